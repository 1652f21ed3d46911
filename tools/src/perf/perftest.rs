//! Measurements with the programs of perftest (`ib_write_bw` and so on), by their own TCP protocol.
//!
//! The protocol carries neither sizes nor counts nor the number of queue pairs. A server that counts messages uses its
//! own command line.
//!
//! - What an end of perftest sends depends on the version that the other end announces. ferroce announces 6.27 to all.
//!   From 6.28 on, both ends would also compare a C structure of libibverbs. One difference between peer versions
//!   remains: from 5.70 on, addresses are sent once more when the queue pairs are connected.
//! - In WRITE latency the server sends the first WRITE.
//! - With an unreliable service, messages are counted as lost if the server has not received them when the client has
//!   sent its next TCP message and no more packets arrive. If the client's requests complete without the server (READ,
//!   atomics, WRITE bandwidth), the server compares the client's report with the requests that have arrived.
//! - A closed or silent peer is noticed even if unread messages of it have arrived, unless the next one is being waited
//!   for.

mod exchange;
pub mod message;
pub(super) mod rdma_cm;

use std::time::{Duration, Instant};

use ferroce::{Counter, PathMtu, RKey, RemoteAddress};
use hdrhistogram::Histogram;
use tracing::{info, warn};

use super::account::{Account, Measured};
use super::client::{Stop, lap};
use super::pattern::Origin;
use super::plan::{Layout, MAX_MESSAGES, Mode, Operation, Plan};
use super::server::Wishes;
use super::session::{Beside, Session};
use crate::failure::Failure;
use crate::visitors::Heard;
use exchange::Wait;
use message::{BandwidthReport, PerftestDestination, SystemData, Version};

pub(super) use exchange::PerftestExchange;

/// Parses the start of a client's stream, which is its version; `None` if it is not a program of perftest.
pub(super) fn judge(said: &[u8]) -> Result<Option<Heard<()>>, Failure> {
    if !Version::may_start(said) {
        return Ok(None);
    }
    let Some(version) = said.first_chunk() else { return Ok(Some(Heard::Needs(message::VERSION))) };
    Version::from_message(version).map_err(Failure::run)?;
    Ok(Some(Heard::Client(())))
}

/// Measures messages of each of `sizes`, with the given count on each queue pair. If it fails, the results so far
/// remain. The path MTU is the smaller one of both ends.
pub(super) fn measure(
    session: &mut Session<PerftestExchange>,
    sizes: &[(u32, Stop)],
    wishes: Wishes,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let connection = Connection::establish(session, sizes, wishes)?;
    measured.path_mtu = connection.path_mtu;
    let Plan { operation, mode, bidirectional, .. } = session.plan;
    let mut report = BandwidthReport { size: 0, messages: 0, peak: 0.0, average: 0.0, rate: 0.0 };
    for (size, stop) in sizes {
        session.resize(*size)?;
        let (count, until) = stop.limits(*size, session.end.now());
        let targets = vec![count; session.lanes.len()];
        session.begin(&targets)?;
        if operation == Operation::Send || bidirectional {
            connection.wait(session, 0, Wait::Measurement)?;
        }
        let mut account = Account::new(&session.plan, *size)?;
        account.begin_lap(session.end.now());
        let moved = if session.plan.doorbell() {
            bounce(session, count, account.latencies.as_mut())
        } else {
            lap(session, &targets, until, account.latencies.as_mut())
        };
        let result = moved.and_then(|time| {
            let messages = session.sent().iter().sum();
            account.end_lap(messages, time);
            report = bandwidth(*size, messages, time);
            if bidirectional {
                account.messages += both_ways(&connection, session, sizes, report)?.messages;
            }
            Ok(())
        });
        if result.is_err() {
            account.cut_lap(session.completed(), session.end.now());
        }
        if result.is_ok() || account.messages > 0 {
            measured.results.push(account.measurement(&session.plan, session.role, measured.path_mtu));
        }
        result?;
        connection.end_size(session, sizes)?;
    }
    if mode == Mode::Bw && operation != Operation::Send && !bidirectional {
        connection.wait(session, 0, Wait::Measurement)?;
        swap_report(session, report)?;
    }
    connection.close(session)
}

/// Serves one client.
pub(super) fn serve(
    session: &mut Session<PerftestExchange>,
    sizes: &[(u32, Stop)],
    wishes: Wishes,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let connection = Connection::establish(session, sizes, wishes)?;
    measured.path_mtu = connection.path_mtu;
    let Plan { operation, mode, bidirectional, .. } = session.plan;
    // With READs, atomics and WRITE bandwidth, a server gets no notification before the end.
    let takes_part = operation == Operation::Send || session.plan.goes_both_ways();
    let mut made = 1;
    for (size, stop) in sizes.iter().filter(|_| takes_part) {
        session.resize(*size)?;
        let (count, until) = stop.limits(*size, session.end.now());
        let targets = vec![count; session.lanes.len()];
        session.begin(&targets)?;
        if operation == Operation::Send || bidirectional {
            connection.wait(session, 0, Wait::Measurement)?;
        }
        if bidirectional {
            let time = lap(session, &targets, until, None)?;
            let messages = session.sent().iter().sum();
            both_ways(&connection, session, sizes, bandwidth(*size, messages, time))?;
        } else if session.plan.doorbell() {
            bounce(session, count, None)?;
        } else if session.plan.echoes() {
            while session.lanes[0].posted < count {
                session.turn()?;
                session.check_lost(session.lanes[0].posted)?;
                session.echo(count)?;
            }
            session.settle()?;
        } else {
            tell_lost(session.await_messages(&targets, false)?);
        }
        connection.end_size(session, sizes)?;
    }
    if mode == Mode::Bw && operation != Operation::Send && !bidirectional {
        connection.wait(session, 0, Wait::Measurement)?;
        session.drain()?;
        if session.end.context.counters().value(Counter::RcvdPkts) == 0 {
            let name = session.plan.name();
            return Err(Failure::run(format!(
                "the client waits for this end and has not sent a packet: it is not the program for `perf {name}`, or \
                 -b was given at one end only"
            )));
        }
        let nothing = BandwidthReport { size: 0, messages: 0, peak: 0.0, average: 0.0, rate: 0.0 };
        let BandwidthReport { size, messages, average, rate, .. } = swap_report(session, nothing)?;
        info!(size, messages, average, rate, "the client reports");
        made = messages.max(1);
    }
    connection.close(session)?;
    if !takes_part {
        check_requests(session, made)?;
    }
    Ok(())
}

/// Ends a size for which both ends have sent: exchanges the results. Returns the other end's report.
fn both_ways(
    connection: &Connection,
    session: &mut Session<PerftestExchange>,
    sizes: &[(u32, Stop)],
    ours: BandwidthReport,
) -> Result<BandwidthReport, Failure> {
    let targets = session.sent();
    if session.plan.operation == Operation::Send {
        tell_lost(session.await_messages(&targets, false)?);
    } else if sizes.len() > 1 {
        connection.wait(session, 0, Wait::Measurement)?;
    }
    let theirs = swap_report(session, ours)?;
    let BandwidthReport { size, messages, average, rate, .. } = theirs;
    info!(size, messages, average, rate, "the other end reports");
    if session.plan.operation != Operation::Send {
        session.drain()?;
        check_requests(session, messages.max(1))?;
    }
    Ok(theirs)
}

fn tell_lost(messages: u64) {
    if messages > 0 {
        warn!(messages, "lost");
    }
}

/// Fails if fewer requests have arrived than the other end has completed: it may have been a client for another
/// operation.
fn check_requests(session: &Session<PerftestExchange>, made: u64) -> Result<(), Failure> {
    if !session.end.counts_packets() {
        info!("a card does not report the number of requests it received: the other end's number is used");
        return Ok(());
    }
    let came = session.requests();
    if came >= made || (came > 0 && !session.plan.is_reliable()) {
        tell_lost(made.saturating_sub(came));
        return Ok(());
    }
    let (name, evidence) = (session.plan.name(), session.end.evidence());
    Err(Failure::run(format!(
        "of {made} requests that the other end reports, {came} have arrived: is it the program for `perf {name}`, and \
         -b at both ends or at neither?{evidence}"
    )))
}

/// Exchanges WRITEs, `count` in each direction. Unlike with SENDs, the server sends the first one, so a client can only
/// time the interval between its WRITEs. Returns the total time.
fn bounce(
    session: &mut Session<PerftestExchange>,
    count: u64,
    mut latencies: Option<&mut Histogram<u64>>,
) -> Result<Duration, Failure> {
    let started = session.end.now();
    let mut last = None;
    if session.role == Origin::Server {
        session.post(0)?;
    }
    for message in 0..count {
        while !session.rung(message)? {
            session.turn()?;
            session.check_lost(message)?;
        }
        if session.lanes[0].posted == count {
            continue;
        }
        while session.lanes[0].posted - session.lanes[0].completed >= session.plan.tx_depth.into() {
            session.turn()?;
        }
        let now = session.end.now();
        if let (Some(latencies), Some(last)) = (&mut latencies, last.replace(now)) {
            latencies.saturating_record(u64::try_from(now.since(last).as_nanos()).unwrap_or(u64::MAX));
        }
        session.post(0)?;
    }
    session.settle()?;
    Ok(session.end.now().since(started))
}

/// Connected queue pairs, as both ends have announced them.
struct Connection {
    ours: Vec<PerftestDestination>,
    theirs: Vec<PerftestDestination>,
    path_mtu: PathMtu,
}

impl Connection {
    fn establish(
        session: &mut Session<PerftestExchange>,
        sizes: &[(u32, Stop)],
        wishes: Wishes,
    ) -> Result<Connection, Failure> {
        let version = session.swap(Version::OURS.to_message(), Wait::Patiently)?;
        let version = Version::from_message(&version).map_err(Failure::run)?;
        info!("the other end is perftest {version}");
        let [page, line] = SystemData::OURS.to_messages();
        let system_data = [session.swap(page, Wait::Patiently)?, session.swap(line, Wait::Patiently)?];
        let system_data = SystemData::from_messages(system_data).map_err(Failure::run)?;
        let path_mtu = swap_path_mtu(session, wishes)?;
        let peer = match session.role {
            Origin::Client => None,
            Origin::Server => Some(session.await_destination()?.gid),
        };
        let gid_index = session.end.gid_index(wishes.gid_index, peer)?;

        let largest = sizes.iter().map(|(size, _)| *size).max().unwrap_or_default();
        session.plan.check_datagram(largest, path_mtu)?;
        let spacing = system_data.larger(SystemData::OURS).cycle_buffer;
        let layout = Layout::spaced(&session.plan, largest, spacing);
        let memory = session.create(layout, layout)?;
        let ours = session.lanes.iter().enumerate().map(|(index, lane)| PerftestDestination {
            lid: 0,
            outstanding: session.plan.outstanding.into(),
            qpn: lane.qpn,
            psn: lane.psn,
            rkey: memory.rkey.value(),
            addr: memory.addr.wrapping_add(layout.offset(index, 0)),
            gid: session.end.context.port().gids[gid_index].gid,
            srqn: 0,
        });
        let mut connection = Connection { ours: ours.collect(), theirs: Vec::new(), path_mtu };
        connection.swap_destinations(session)?;
        for (index, peer) in connection.theirs.iter().enumerate() {
            wishes.check_address(&session.plan, largest, peer.gid)?;
            let mut path = session.path(session.end.address(peer.gid, gid_index), path_mtu);
            // A client must not have more outstanding READs and atomics than the server has offered.
            let offered = u8::try_from(peer.outstanding).unwrap_or(u8::MAX);
            path.rd_atomic = path.rd_atomic.min(offered).max(1);
            let remote = RemoteAddress { addr: peer.addr, rkey: RKey::new(peer.rkey) };
            session.connect_lane(index, &path, remote, (peer.qpn, peer.psn))?;
        }
        connection.wait_connected(session, version)?;
        info!(%path_mtu, "connected");
        Ok(connection)
    }

    /// Exchanges the addresses of the queue pairs, one by one.
    fn swap_destinations(&mut self, session: &mut Session<PerftestExchange>) -> Result<(), Failure> {
        // For latency without receive WRs, the first one is exchanged twice.
        let Plan { operation, mode, .. } = session.plan;
        if mode == Mode::Lat && operation != Operation::Send {
            session.swap_destination(self.ours[0], Wait::Patiently)?;
        }
        for ours in &self.ours {
            self.theirs.push(session.swap_destination(*ours, Wait::Patiently)?);
        }
        Ok(())
    }

    /// Waits until the other end has connected its queue pairs.
    fn wait_connected(
        &self,
        session: &mut Session<PerftestExchange>,
        version: Version,
    ) -> Result<(), Failure> {
        let again = if version.repeats_addresses() { self.ours.len() } else { 0 };
        let send = session.plan.operation == Operation::Send;
        if send {
            self.wait(session, 0, Wait::Patiently)?;
        }
        (0..again).try_for_each(|index| self.wait(session, index, Wait::Patiently))?;
        if send { Ok(()) } else { self.wait(session, 0, Wait::Patiently) }
    }

    /// Synchronizes both ends: each announces a queue pair again.
    fn wait(&self, session: &mut Session<PerftestExchange>, index: usize, wait: Wait) -> Result<(), Failure> {
        let again = session.swap_destination(self.ours[index], wait)?;
        if again == self.theirs[index] {
            return Ok(());
        }
        let (first, again) = (self.theirs[index].to_message(), again.to_message());
        Err(Failure::run(format!(
            "perftest's queue pair {index} was '{}' and is now '{}'; -q {} at both ends?",
            first.escape_ascii(),
            again.escape_ascii(),
            self.ours.len()
        )))
    }

    /// With several sizes, the ends synchronize after all SENDs of a size.
    fn end_size(
        &self,
        session: &mut Session<PerftestExchange>,
        sizes: &[(u32, Stop)],
    ) -> Result<(), Failure> {
        let Plan { operation, mode, .. } = session.plan;
        if operation == Operation::Send && mode == Mode::Bw && sizes.len() > 1 {
            self.wait(session, 0, Wait::Measurement)?;
        }
        Ok(())
    }

    /// Ends the measurement. After WRITE latency, there is no final synchronization.
    fn close(&self, session: &mut Session<PerftestExchange>) -> Result<(), Failure> {
        if !session.plan.doorbell() {
            self.wait(session, 0, Wait::Measurement)?;
        }
        linger(session)
    }
}

fn swap_path_mtu(session: &mut Session<PerftestExchange>, wishes: Wishes) -> Result<PathMtu, Failure> {
    // A server does not know yet which of its addresses it will use.
    let indices = match wishes.gid_index {
        Some(index) => index..index + 1,
        None => 0..session.end.context.port().gids.len(),
    };
    let largest =
        indices.map(|index| session.end.largest_path_mtu(index)).reduce(|a, b| Ok(a?.min(b?))).transpose()?;
    let largest = largest.unwrap_or(PathMtu::Mtu256);
    let ours = wishes.path_mtu.unwrap_or(largest);
    if ours > largest {
        return Err(Failure::usage(format!("path MTU (-m) {ours}: the interface allows {largest}")));
    }
    let theirs = session.swap(message::path_mtu_to_message(ours), Wait::Patiently)?;
    Ok(ours.min(message::path_mtu_from_message(theirs).map_err(Failure::run)?))
}

fn swap_report(
    session: &mut Session<PerftestExchange>,
    ours: BandwidthReport,
) -> Result<BandwidthReport, Failure> {
    let mut numbers = ours.to_messages();
    for number in &mut numbers {
        *number = session.swap(*number, Wait::Measurement)?;
    }
    let theirs = BandwidthReport::from_messages(numbers);
    let most = MAX_MESSAGES * session.lanes.len() as u64;
    if theirs.messages > most {
        let messages = theirs.messages;
        return Err(Failure::run(format!("perftest reports {messages} messages: must be at most {most}")));
    }
    Ok(theirs)
}

/// In MiB/s, perftest's default unit.
fn bandwidth(size: u32, messages: u64, time: Duration) -> BandwidthReport {
    let size = u64::from(size);
    let rate = messages as f64 / time.as_secs_f64().max(1e-9);
    BandwidthReport {
        size,
        messages,
        peak: 0.0,
        average: rate * size as f64 / f64::from(1 << 20),
        rate: rate / 1e6,
    }
}

/// Acknowledges packets until the other end has closed. Of two ferroce ends, the client closes first.
fn linger(session: &mut Session<PerftestExchange>) -> Result<(), Failure> {
    let patience = match session.role {
        Origin::Server => Duration::from_secs(10),
        // Without a final synchronization, the server may retransmit its last WRITE until it is acknowledged.
        Origin::Client if session.plan.doorbell() => {
            Duration::from_nanos(8192 << session.plan.timeout).min(Duration::from_secs(2))
        }
        // Old versions send one more message before they close, and fail if it is not read.
        Origin::Client => Duration::from_millis(100),
    };
    let deadline = Instant::now() + patience;
    while session.control.is_open() && Instant::now() < deadline {
        session.end.poll()?;
        session.control.receive()?;
    }
    Ok(())
}
