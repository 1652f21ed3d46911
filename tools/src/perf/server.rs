//! The server, which uses the client's parameters.

use std::time::Duration;

use ferroce::{Gid, PKey, PathMtu};
use tracing::info;

use super::account::{Account, Measured};
use super::message::{Offer, PerfMessage, Tally};
use super::plan::{Operation, Plan};
use super::session::{Session, unexpected};
use crate::failure::{Failure, legible};

/// The options of the server's own command line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wishes {
    pub(super) gid_index: Option<usize>,
    pub(super) path_mtu: Option<PathMtu>,
    /// The client's address, if packets must not be sent to another address without its consent.
    pub(super) home: Option<Gid>,
}

impl Wishes {
    /// Fails if a client requests more data to another address than comes from there. Acknowledgements prove nothing:
    /// anyone who knows queue pair number and PSN, as the client does, can send them under any source address.
    pub(super) fn check_address(&self, plan: &Plan, size: u32, gid: Gid) -> Result<(), Failure> {
        match self.home {
            Some(home) if plan.pours(size) && home != gid => Err(Failure::usage(format!(
                "the client comes from {home} and wants `perf {}` to send to {gid}, which may be another host: if it \
                 belongs to the client, start the server with --any-gid",
                plan.name()
            ))),
            _ => Ok(()),
        }
    }
}

/// Serves one client. `session.plan` has the options of the command line. The results are those of a measurement that
/// ends early.
pub(super) fn run(
    session: &mut Session,
    plan: Plan,
    wishes: Wishes,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let result = serve(session, plan, wishes, measured);
    if let Err(failure) = &result {
        session.tell(failure)?;
    }
    result
}

fn serve(session: &mut Session, plan: Plan, wishes: Wishes, measured: &mut Measured) -> Result<(), Failure> {
    agree(&session.plan, &plan)?;
    session.plan = plan;
    session.control.send(&PerfMessage::Ready)?;
    loop {
        match session.wait_message()? {
            PerfMessage::Connect(offer) => serve_size(session, &offer, wishes, measured)?,
            PerfMessage::Finish => return Ok(()),
            other => return Err(unexpected(&other)),
        }
    }
}

/// Checks the options that both ends must agree on; the others are the client's.
fn agree(ours: &Plan, theirs: &Plan) -> Result<(), Failure> {
    if (ours.operation, ours.mode) != (theirs.operation, theirs.mode) {
        return Err(Failure::usage(format!(
            "the server was started for `perf {}`, the client for `perf {}`; give both the same",
            ours.name(),
            theirs.name()
        )));
    }
    theirs.check_limits()
}

fn serve_size(
    session: &mut Session,
    offer: &Offer,
    wishes: Wishes,
    measured: &mut Measured,
) -> Result<(), Failure> {
    wishes.check_address(&session.plan, offer.size, Gid(offer.gid.octets()))?;
    check_partition(session.end.pkey(), PKey(offer.pkey))?;
    check_switch(session.end.switch(), offer.switch.as_deref())?;
    let gid_index = session.end.gid_index(wishes.gid_index, Some(Gid(offer.gid.octets())))?;
    let mut answer = session.open(offer.size, gid_index, wishes.path_mtu)?;
    let path_mtu = negotiate(&answer, offer)?;
    session.plan.check_datagram(offer.size, path_mtu)?;
    answer.path_mtu = Some(path_mtu.bytes());
    measured.path_mtu = path_mtu;
    session.connect(offer, gid_index, path_mtu)?;
    info!(size = offer.size, %path_mtu, "connected");
    session.control.send(&PerfMessage::Connect(answer))?;
    let mut account = Account::new(&session.plan, offer.size)?;
    let result = serve_laps(session, offer.size, &mut account);
    if result.is_err() {
        account.cut_lap(session.arrived(), session.end.now());
        let has_some = account.messages > 0;
        let measurement = || account.measurement(&session.plan, session.role, measured.path_mtu);
        measured.results.extend(has_some.then(measurement));
    }
    result?;
    session.settle()?;
    session.control.send(&PerfMessage::Closed)?;
    session.close()
}

fn serve_laps(session: &mut Session, size: u32, account: &mut Account) -> Result<(), Failure> {
    loop {
        match session.wait_message()? {
            PerfMessage::Lap { number, messages } => {
                session.plan.check_lap(size, &messages)?;
                serve_lap(session, number, &messages, account)?;
            }
            PerfMessage::Close => return Ok(()),
            other => return Err(unexpected(&other)),
        }
    }
}

/// Fails if the P_Keys do not match: each end would drop all packets of the other.
fn check_partition(ours: PKey, theirs: PKey) -> Result<(), Failure> {
    if ours.admits(theirs) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "P_Key (--pkey) {ours} at the server, {theirs} at the client: both need the same partition (low 15 bits), and \
         at least one of them full membership (0x8000)"
    )))
}

/// Fails if the ends are on different switches: all switches in shared memory have the same addresses.
fn check_switch(ours: Option<&str>, theirs: Option<&str>) -> Result<(), Failure> {
    if ours == theirs {
        return Ok(());
    }
    let [ours, theirs] = [ours, theirs].map(|switch| match switch {
        Some(name) => format!("shm:{}", legible(name)),
        None => "no shm".to_owned(),
    });
    Err(Failure::usage(format!(
        "device (-d) {ours} at the server, {theirs} at the client; give both the same"
    )))
}

/// The path MTU that an end requires, or the largest that both interfaces allow.
fn negotiate(ours: &Offer, theirs: &Offer) -> Result<PathMtu, Failure> {
    let largest = ours.largest_path_mtu.min(theirs.largest_path_mtu);
    let bytes = match (ours.path_mtu, theirs.path_mtu) {
        (Some(ours), Some(theirs)) if ours != theirs => {
            return Err(Failure::usage(format!(
                "path MTU (-m) {ours} at the server, {theirs} at the client; give the same"
            )));
        }
        (Some(bytes), _) | (_, Some(bytes)) => bytes,
        (None, None) => largest,
    };
    if bytes > largest {
        let (server, client) = (ours.largest_path_mtu, theirs.largest_path_mtu);
        return Err(Failure::usage(format!(
            "path MTU (-m) {bytes}: the server's interface allows {server}, the client's {client}"
        )));
    }
    PathMtu::try_from(bytes).map_err(|error| Failure::usage(error.to_string()))
}

fn serve_lap(
    session: &mut Session,
    number: u64,
    messages: &[u64],
    account: &mut Account,
) -> Result<(), Failure> {
    if messages.len() != session.lanes.len() {
        let (theirs, ours) = (messages.len(), session.lanes.len());
        return Err(Failure::run(format!(
            "the client counts messages of {theirs} queue pairs: must be {ours}"
        )));
    }
    session.settle()?;
    session.prepare(number, messages)?;
    session.control.send(&PerfMessage::Ready)?;
    let started = session.end.now();
    account.begin_lap(started);
    let mut sent_by = None;
    let done = loop {
        match session.control.take() {
            Some(PerfMessage::LapDone { messages: done }) => break done,
            Some(other) => return Err(unexpected(&other)),
            None => session.turn()?,
        }
        if session.plan.echoes() {
            session.echo(messages[0])?;
        }
        if session.plan.bidirectional && !session.keep_busy(messages, true)? && sent_by.is_none() {
            sent_by = Some(session.end.now());
        }
    };
    if done.len() != messages.len() || done.iter().zip(messages).any(|(done, wanted)| done > wanted) {
        return Err(Failure::run(format!("the client has sent {done:?} of {messages:?} messages")));
    }
    // A client that stops before its count has reached its time limit, so this end stops as well.
    let open = session.plan.bidirectional && done == messages;
    while session.keep_busy(messages, open)? {
        session.turn()?;
    }
    let nanoseconds = sent_by.unwrap_or_else(|| session.end.now()).since(started).as_nanos();
    let lost = if session.plan.is_counted() { session.await_messages(&done, true)? } else { 0 };
    let sent = session.sent();
    let arrived = if session.plan.operation == Operation::Read { &sent } else { &done };
    let verified = session.verify(number, arrived)?;
    let nanoseconds = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
    account.end_lap(done.iter().sum(), Duration::from_nanos(nanoseconds));
    account.lost += lost;
    account.verified += verified;
    session.control.send(&PerfMessage::Verified(Tally { verified, lost, sent, nanoseconds }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(path_mtu: Option<u32>, largest_path_mtu: u32) -> Offer {
        let gid = std::net::Ipv6Addr::LOCALHOST;
        Offer {
            size: 8,
            gid,
            qps: vec![],
            memory: (0, 0, 0),
            path_mtu,
            largest_path_mtu,
            selective_repeat: false,
            pkey: 0xffff,
            switch: None,
        }
    }

    #[test]
    fn ends_on_two_switches_are_told_so() {
        assert!(check_switch(None, None).is_ok() && check_switch(Some("lab"), Some("lab")).is_ok());
        let refusal = |ours, theirs| check_switch(ours, theirs).expect_err("two switches").to_string();
        let expected = "device (-d) shm:lab at the server, shm:lab2 at the client; give both the same";
        assert_eq!(refusal(Some("lab"), Some("lab2")), expected);
        assert!(refusal(Some("lab"), None).contains("no shm at the client"));
    }

    #[test]
    fn path_mtu_is_what_one_insists_on_or_the_largest_of_both() {
        let mtu = |ours, theirs| negotiate(&ours, &theirs).map(PathMtu::bytes).map_err(|e| e.to_string());
        assert_eq!(mtu(offer(None, 4096), offer(None, 1024)), Ok(1024));
        assert_eq!(mtu(offer(Some(512), 4096), offer(None, 1024)), Ok(512));
        assert_eq!(mtu(offer(None, 4096), offer(Some(256), 1024)), Ok(256));
        assert!(mtu(offer(Some(512), 4096), offer(Some(1024), 1024)).is_err());
        let refusal = mtu(offer(Some(4096), 4096), offer(None, 1024)).expect_err("too large");
        assert!(refusal.contains("4096") && refusal.contains("1024"), "{refusal}");
    }
}
