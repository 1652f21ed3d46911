//! The far end of a check.
//!
//! A check has at most twelve rounds. Each new connection is handled by its own thread until it has sent its greeting;
//! one that sends nothing is closed.
//!
//! The far end sends probes only to an address that is known to receive them: the source address of the control
//! connection, or, since the RoCE network may be another one, the address that has reported the random token of one
//! small packet.

use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpStream};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use rand_chacha::rand_core::{OsRng, TryRngCore};
use tracing::{debug, info, warn};

use super::control::{DoctorControl, Limits, unexpected};
use super::message::{DoctorMessage, Hello, Probe};
use super::probe::{CHALLENGE, CHALLENGE_COPIES, COPIES, Lookout};
use super::probe_port::ProbePort;
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::serving::until_signal;
use crate::tcp::Listener;

/// For a client that has not yet requested a check.
const TO_GREET: Limits = Limits { answer: Duration::from_secs(3), whole: Duration::from_secs(3) };
/// For a check; clients that wait for it have a longer limit.
pub(super) const TO_CHECK: Limits =
    Limits { answer: Duration::from_secs(10), whole: Duration::from_secs(20) };
/// The most connections without a request. A further one replaces the oldest.
const MAX_VISITORS: usize = 64;
/// The most rounds of probes of a check, in both directions: on a path that loses packets each round is repeated.
pub(super) const MAX_ROUNDS: u32 = 12;
const PAUSE: Duration = Duration::from_millis(5);

/// Serves one client after the other until it is interrupted, or only one client.
pub(super) fn serve(
    mut port: ProbePort,
    listener: &Listener,
    interrupt: &Interrupt,
    only_one: bool,
) -> Result<(), Failure> {
    info!("waiting for a client on TCP port {}", listener.port()?);
    let (told, greeted) = mpsc::channel();
    let mut door = Door { visitors: Vec::new(), next: 0, told, interrupt };
    loop {
        // Outside a check, a signal is the normal end.
        if until_signal(interrupt.check())?.is_none() {
            return Ok(());
        }
        port.receive(&mut |_| {})?;
        for (stream, _) in listener.newcomers() {
            door.let_in(stream);
        }
        let Ok((number, guest)) = greeted.try_recv() else {
            thread::sleep(PAUSE);
            continue;
        };
        door.visitors.retain(|visitor: &AcceptedConnection| visitor.number != number);
        match guest.and_then(|guest: Asker| session(&mut port, guest, interrupt)) {
            result if only_one => return result,
            Ok(()) => {}
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(failure) => warn!("a check ended early: {failure}"),
        }
    }
}

/// Connections that have not sent their greeting, each with a thread, so that a silent client delays no other.
struct Door<'a> {
    /// Oldest first.
    visitors: Vec<AcceptedConnection>,
    /// The number of the next connection.
    next: u64,
    told: Sender<(u64, Result<Asker, Failure>)>,
    interrupt: &'a Interrupt,
}

struct AcceptedConnection {
    number: u64,
    stream: TcpStream,
}

/// A client that has requested a check.
struct Asker {
    control: DoctorControl,
    hello: Hello,
}

impl Door<'_> {
    fn let_in(&mut self, stream: TcpStream) {
        if self.visitors.len() == MAX_VISITORS {
            let AcceptedConnection { stream, .. } = self.visitors.remove(0);
            // Its thread notices the shutdown.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let number = self.next;
        self.next += 1;
        let Ok(second) = stream.try_clone() else {
            return debug!("a client can't be accepted: no file descriptor is free");
        };
        self.visitors.push(AcceptedConnection { number, stream: second });
        let (told, interrupt) = (self.told.clone(), self.interrupt.clone());
        thread::spawn(move || {
            // The receiver is gone if the server has ended.
            let _ = told.send((number, greet(stream, &interrupt)));
        });
    }
}

fn greet(stream: TcpStream, interrupt: &Interrupt) -> Result<Asker, Failure> {
    let mut control = DoctorControl::new(stream, TO_GREET, interrupt)?;
    let failure = match control.receive() {
        Ok(Some(DoctorMessage::Hello(hello))) => return Ok(Asker { control, hello }),
        Ok(Some(other)) => unexpected(&other),
        Ok(None) => Failure::run("the other end closed the connection before it named the check"),
        Err(failure) => failure,
    };
    tell(&mut control, &failure);
    Err(failure)
}

/// Sends the reason that there is no check, or that it ends early.
fn tell(control: &mut DoctorControl, failure: &Failure) {
    // The client may be gone.
    let _ = control.send(&DoctorMessage::Failed(failure.to_string()));
}

fn session(port: &mut ProbePort, mut guest: Asker, interrupt: &Interrupt) -> Result<(), Failure> {
    guest.control.limit(TO_CHECK);
    let result = answer(port, &mut guest, interrupt);
    if let Err(failure) = &result {
        tell(&mut guest.control, failure);
    }
    result
}

fn answer(port: &mut ProbePort, guest: &mut Asker, interrupt: &Interrupt) -> Result<(), Failure> {
    let Asker { control, hello: asks } = guest;
    let own = port.hello(asks.to, asks.address);
    info!(from = %control.peer()?, "a check between {} and {}", asks.address, asks.to);
    control.send(&DoctorMessage::Hello(own.clone()))?;
    let mut is_there = asks.address == control.peer()?;
    let mut round = 0;
    while let Some(message) = control.receive()? {
        round += 1;
        if round > MAX_ROUNDS {
            return Err(Failure::run(format!("a check has at most {MAX_ROUNDS} rounds of probes")));
        }
        match message {
            DoctorMessage::Expect(probes) => expect(port, control, asks, &own, probes, interrupt)?,
            DoctorMessage::Send(probes) => {
                let mut sent = check_addresses(&own, asks.address);
                if sent.is_ok() && !is_there {
                    sent = challenge(port, control, &own, asks)?;
                    is_there = sent.is_ok();
                }
                let sent = sent.and_then(|()| port.send(&own, asks, &probes, COPIES));
                control.send(&DoctorMessage::Sent(sent.err().map(|failure| failure.to_string())))?;
            }
            other => return Err(unexpected(&other)),
        }
    }
    Ok(())
}

/// Checks the addresses that the client names. Probes go from an address of this end to one host.
fn check_addresses(own: &Hello, to: IpAddr) -> Result<(), Failure> {
    let Hello { address, interface, .. } = own;
    if !own.addresses.contains(address) {
        return Err(Failure::run(format!("{address}: must be an address of '{interface}'")));
    }
    let is_broadcast = to == IpAddr::V4(Ipv4Addr::BROADCAST);
    if to.is_ipv4() != address.is_ipv4() || to.is_multicast() || to.is_unspecified() || is_broadcast {
        return Err(Failure::run(format!(
            "{to} is not the address of one host, of the IP version of {address}"
        )));
    }
    Ok(())
}

/// If the control connection comes from another address than the client names, the packets could hit a third party. So
/// the named address gets one small probe, whose token the client must report. The inner result is an error if it does
/// not.
fn challenge(
    port: &mut ProbePort,
    control: &mut DoctorControl,
    own: &Hello,
    to: &Hello,
) -> Result<Result<(), Failure>, Failure> {
    let token = random()?;
    let unknown = Hello { token, ..own.clone() };
    if let Err(failure) = port.send(&unknown, to, &[CHALLENGE], CHALLENGE_COPIES) {
        return Ok(Err(failure));
    }
    match control.ask(&DoctorMessage::Challenge)? {
        DoctorMessage::Proof(Some(told)) if told == token => Ok(Ok(())),
        DoctorMessage::Proof(_) => Ok(Err(Failure::run(format!(
            "this control connection comes from {}, and its other end did not receive a packet that was sent to {}",
            control.peer()?,
            to.address
        )))),
        other => Err(unexpected(&other)),
    }
}

fn random() -> Result<u64, Failure> {
    // Not read from a file, which may be missing in a container.
    OsRng.try_next_u64().map_err(|error| Failure::run(format!("reading a random number: {error}")))
}

/// Receives probes until the client has sent them all.
fn expect(
    port: &mut ProbePort,
    control: &mut DoctorControl,
    from: &Hello,
    own: &Hello,
    probes: Vec<Probe>,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let mut lookout = Lookout::new(from, own.address, port.is_socket(), probes);
    let take = || port.receive(&mut |frame| lookout.frame(frame));
    match control.ask_while(&DoctorMessage::Ready, take)? {
        DoctorMessage::Collect => port.collect(&mut lookout, interrupt)?,
        other => return Err(unexpected(&other)),
    }
    control.send(&DoctorMessage::Seen(lookout.into_seen()))
}
