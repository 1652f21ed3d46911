//! The work of a rank, as a process or as a thread.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ferroce::{Context, Counter, Device, DeviceSpec, Idle, PathMtu};
use ferroce_collectives::{
    Bootstrap, Buffer, Collectives, Communicator, DataType, Operation, Options, ReduceOp, SharedMemory,
};
use ferroce_driver::machine::{LineTime, Repetitions};
use ferroce_driver::pcap::{Recorder, Recording};
use ferroce_driver::{Clock, Stats};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::shapes::{ELEMENT, Tensor};
use super::state::{Line, is_repeated, vote};
use super::stoppable::Stoppable;
use super::tcp_ring::{self, Listening, TcpRing};
use super::values::{self, Wrong};
use crate::congestion::CongestionArgs;
use crate::endpoint::{counts_packets, export, packet_driver};
use crate::failure::Failure;
use crate::memory::MemorySpec;

/// The settings that all ranks of a demo share.
#[derive(Clone, Debug)]
pub(super) struct RankPlan {
    /// The tensors.
    pub(super) tensors: Vec<Tensor>,
    /// How often each of them is all-reduced.
    pub(super) rounds: u32,
    /// Payload bytes of a full packet.
    pub(super) path_mtu: PathMtu,
    /// The idle strategy of a rank.
    pub(super) idle: Idle,
    /// For tests: an element that one rank corrupts.
    pub(super) fault: Option<Fault>,
    /// The memory of the tensors, which also determines where they are summed.
    pub(super) memory: MemorySpec,
    /// The congestion control of the ranks as senders.
    pub(super) congestion: CongestionArgs,
}

/// An event that a rank reports.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RankEvent {
    /// The port is open.
    Opened(Opened),
    /// The port can't be opened.
    Unopened {
        /// The reason.
        reason: String,
    },
    /// All tensors were all-reduced once more and compared with the reference.
    Round {
        /// The transport of the round.
        transport: Transport,
        /// The start and end of each tensor, in nanoseconds of a clock that all ranks share.
        times: Vec<[u64; 2]>,
        /// Number of compared elements.
        elements: u64,
        /// Tensors with wrong elements.
        wrong: Vec<Wrong>,
        /// The state of the machine before and after, from rank 0.
        state: [Option<Line>; 2],
        /// Whether the round is repeated and does not count, because the machine was in its slow state.
        is_repeated: bool,
    },
    /// The rank has finished.
    Finished(Totals),
    /// The rank can't continue.
    Failed {
        /// The reason.
        reason: String,
    },
}

/// The transport of the chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Transport {
    /// RoCEv2, by this stack.
    Ferroce,
    /// The kernel's TCP, on the same ring.
    Tcp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Ferroce => "ferroce",
            Transport::Tcp => "TCP",
        })
    }
}

/// A rank's port.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Opened {
    /// Driver, as spelled for `--device`.
    pub(super) driver: String,
    /// Interface or port name.
    interface: String,
    /// The mode that the driver chose.
    mode: String,
    /// Addresses.
    addresses: Vec<IpAddr>,
    /// Largest IP packet.
    mtu: u32,
    /// Path MTU in use.
    path_mtu: u32,
    /// The memory of the tensors.
    memory: MemorySpec,
}

impl Opened {
    fn new(context: &Context, plan: &RankPlan) -> Opened {
        let capabilities = context.capabilities();
        Opened {
            driver: capabilities.driver.to_owned(),
            interface: capabilities.interface.clone(),
            mode: capabilities.description.clone(),
            addresses: capabilities.addresses.clone(),
            mtu: capabilities.mtu,
            path_mtu: plan.path_mtu.bytes(),
            memory: plan.memory,
        }
    }
}

impl fmt::Display for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Opened { driver, interface, mode, addresses, mtu, path_mtu, memory } = self;
        write!(f, "{driver}:{interface}")?;
        addresses.iter().try_for_each(|address| write!(f, " {address}"))?;
        write!(f, ", MTU {mtu}, path MTU {path_mtu}; {mode}")?;
        if !memory.is_host() {
            write!(f, "; tensors in memory of {memory}, added up there")?;
        }
        Ok(())
    }
}

/// The counters of a rank; `None` on an RNIC, whose counters include all users of the port.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Totals {
    #[serde(flatten)]
    pub(super) packets: Option<PacketTotals>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PacketTotals {
    /// Packets sent.
    pub(super) sent: u64,
    /// Packets received with a valid ICRC.
    pub(super) received: u64,
    /// Retransmitted request packets.
    pub(super) retransmitted: u64,
    /// Expired ACK timers.
    pub(super) timeouts: u64,
    /// Sequence error NAKs received.
    pub(super) sequence_naks: u64,
    /// Packets dropped, by reason.
    pub(super) dropped: BTreeMap<String, u64>,
}

impl Totals {
    fn of(context: &Context) -> Totals {
        let packets = counts_packets(context).then(|| PacketTotals::of(context));
        Totals { packets }
    }
}

impl PacketTotals {
    fn of(context: &Context) -> PacketTotals {
        let counters = context.counters();
        let Stats { rx_dropped, tx_dropped, .. } = context.driver_stats();
        let mut dropped: BTreeMap<String, u64> =
            counters.drops().map(|(name, count)| (name.to_owned(), count)).collect();
        dropped.insert("no buffer at the receiving port".to_owned(), rx_dropped);
        dropped.insert("not accepted by the sending port".to_owned(), tx_dropped);
        dropped.retain(|_, count| *count > 0);
        PacketTotals {
            sent: counters.value(Counter::SentPkts),
            received: counters.value(Counter::RcvdPkts),
            retransmitted: counters.value(Counter::RetransmittedPkts),
            timeouts: counters.value(Counter::LocalAckTimeoutErr),
            sequence_naks: counters.value(Counter::PacketSeqErr),
            dropped,
        }
    }
}

/// An element that a rank corrupts on purpose: `RANK:TENSOR:INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    rank: u32,
    tensor: usize,
    index: usize,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.rank, self.tensor, self.index)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        let numbers: Option<Vec<usize>> = text.split(':').map(|part| part.parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[rank, tensor, index]) => Ok(Fault { rank: rank as u32, tensor, index }),
            _ => Err("must be RANK:TENSOR:INDEX, three numbers".to_owned()),
        }
    }
}

/// Runs as a rank in a process of its own, which finds the others by environment variables. It reports its events on
/// standard output, and stops at the end of its standard input: when the demo closes it or has ended.
pub(super) fn main(
    plan: &RankPlan,
    device: &DeviceSpec,
    tcp: Option<IpAddr>,
    pcap: Option<&Path>,
) -> ExitCode {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        stopped.store(true, Ordering::Relaxed);
    });
    let mut failed = false;
    let mut tell = |event: RankEvent| {
        failed |= matches!(event, RankEvent::Unopened { .. } | RankEvent::Failed { .. });
        // If the demo no longer reads, it has also closed the standard input.
        if let Ok(line) = serde_json::to_string(&event) {
            let _ = writeln!(io::stdout(), "{line}");
        }
    };
    match Bootstrap::from_env() {
        Ok(bootstrap) => match device.open() {
            Ok(device) => run(plan, bootstrap, device, tcp, stop, pcap, &mut tell),
            Err(error) => tell(RankEvent::Unopened { reason: error.to_string() }),
        },
        Err(error) => tell(RankEvent::Failed { reason: error.to_string() }),
    }
    ExitCode::from(u8::from(failed))
}

/// Runs a rank on its port, and on its address for TCP if TCP is compared.
pub(super) fn run(
    plan: &RankPlan,
    bootstrap: Bootstrap,
    device: Device,
    tcp: Option<IpAddr>,
    stop: Arc<AtomicBool>,
    pcap: Option<&Path>,
    tell: &mut dyn FnMut(RankEvent),
) {
    let mut recording = Recording::default();
    let recorded = match pcap {
        Some(file) => record(device, file, &mut recording),
        None => Ok(device),
    };
    let result = recorded.and_then(|device| {
        let device = match device.into_driver() {
            Ok(driver) => Box::new(Stoppable { driver, stop: stop.clone() }).into(),
            Err(card) => (*card).into(),
        };
        // A capture contains the requested rounds, whatever the state of the machine.
        let transports = 1 + usize::from(tcp.is_some());
        let repetitions = match pcap {
            Some(_) => Repetitions::none(),
            None => Repetitions::of(transports * plan.rounds as usize),
        };
        all_reduce_all(plan, bootstrap, device, tcp, repetitions, &stop, tell)
    });
    // The last frames are written when the driver is dropped.
    tell(match (result, recording.failure()) {
        (Err(error), _) => RankEvent::Failed { reason: error.to_string() },
        (Ok(_), Some(reason)) => RankEvent::Failed { reason: reason.to_owned() },
        (Ok(totals), None) => RankEvent::Finished(totals),
    });
}

fn record(device: Device, file: &Path, recording: &mut Recording) -> Result<Device, Error> {
    let recorder = Recorder::create(packet_driver(device, "--pcap")?, file)?;
    *recording = recorder.recording();
    Ok(Box::new(recorder).into())
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("told to stop")]
    Stopped,
    #[error(transparent)]
    Driver(#[from] ferroce_driver::Error),
    #[error(transparent)]
    Verbs(#[from] ferroce::Error),
    #[error(transparent)]
    Collective(#[from] ferroce_collectives::Error),
    #[error(transparent)]
    Tcp(#[from] tcp_ring::Error),
    #[error(transparent)]
    Failure(#[from] Failure),
}

/// The number of elements that are filled or compared at a time; they fit into the L1 cache.
const PIECE: usize = 2048;
/// The longest time that a rank waits for the others to start.
const RENDEZVOUS: Duration = Duration::from_secs(20);

fn all_reduce_all(
    plan: &RankPlan,
    bootstrap: Bootstrap,
    device: Device,
    tcp: Option<IpAddr>,
    mut repetitions: Repetitions,
    stop: &AtomicBool,
    tell: &mut dyn FnMut(RankEvent),
) -> Result<Totals, Error> {
    let config = plan.congestion.config(&device)?;
    let mut context = Context::open(device, &config)?;
    export(&mut context);
    let gpu = plan.memory.open()?;
    tell(RankEvent::Opened(Opened::new(&context, plan)));
    let traffic_class = plan.congestion.traffic_class().unwrap_or_default();
    // The demo shows packets; over shared memory, ranks on one host would send none.
    let options = Options::default()
        .path_mtu(plan.path_mtu)
        .traffic_class(traffic_class)
        .idle(plan.idle)
        .shared_memory(SharedMemory::Off);
    let bootstrap = bootstrap.timeout(RENDEZVOUS);
    let mut collectives = match gpu {
        Some(gpu) => Collectives::on_device(context, gpu)?,
        None => Collectives::new(context)?,
    };
    let communicator = collectives.join(bootstrap, &options)?;
    let mut member = Member { collectives, communicator, clock: Clock::start() };
    // TCP can't use GPU memory.
    let tcp = tcp.filter(|_| plan.memory.is_host());
    let mut tcp = tcp.map(|address| tcp_ring(&mut member, address, stop)).transpose()?;
    let allocate = |tensor: &Tensor| member.collectives.allocate_private(tensor.bytes());
    let buffers: Vec<Buffer> = plan.tensors.iter().map(allocate).collect::<Result<_, _>>()?;
    let votes = member.collectives.allocate_private(ELEMENT)?;
    for round in 0..plan.rounds {
        // The transports take turns, so that slow changes of the machine affect both alike.
        let mut turn = [Transport::Ferroce, Transport::Tcp];
        if round % 2 == 1 {
            turn.reverse();
        }
        for transport in turn {
            if transport == Transport::Tcp && tcp.is_none() {
                continue;
            }
            loop {
                let mut ranks = Ranks { member: &mut member, tcp: tcp.as_mut(), stop };
                let Timed { times, state } = ranks.all_reduce(plan, transport, &buffers, round)?;
                let (elements, wrong) = check(plan, &mut member, &buffers, round)?;
                let own = vote(repetitions.take(state), !wrong.is_empty());
                let mut ranks = Ranks { member: &mut member, tcp: tcp.as_mut(), stop };
                let is_repeated = is_repeated(ranks.sum(transport, votes, own)?);
                let state = state.map(|line| line.map(Line::from));
                tell(RankEvent::Round { transport, times, elements, wrong, state, is_repeated });
                if !is_repeated {
                    break;
                }
            }
        }
    }
    Ok(Totals::of(&member.collectives.finish()?))
}

/// The times of a round.
struct Timed {
    /// The start and end of each tensor.
    times: Vec<[u64; 2]>,
    /// The state of the machine before and after, at rank 0.
    state: [Option<LineTime>; 2],
}

/// A rank and the communicator of all ranks.
struct Member {
    collectives: Collectives,
    communicator: Communicator,
    clock: Clock,
}

impl Member {
    /// Answers the other ranks while no operation is in progress.
    fn answer(&mut self) -> Result<(), ferroce_collectives::Error> {
        self.collectives.poll(self.clock.now()).map(drop)
    }

    /// Sums a buffer's first elements over all ranks, in place.
    fn sum(&mut self, buffer: Buffer, count: usize, data_type: DataType) -> Result<(), Error> {
        let operation = Operation::all_reduce(buffer, buffer, count, data_type, ReduceOp::Sum);
        Ok(self.collectives.run(self.communicator, &operation)?)
    }

    fn rank(&self) -> u32 {
        self.communicator.rank()
    }
}

/// A rank's connections to the others. Barriers use the transport under test: a rank that waits in TCP does not poll,
/// so its neighbour's last packet would not be acknowledged.
struct Ranks<'a> {
    member: &'a mut Member,
    tcp: Option<&'a mut TcpRing>,
    stop: &'a AtomicBool,
}

impl Ranks<'_> {
    /// All-reduces the tensors of a round.
    fn all_reduce(
        &mut self,
        plan: &RankPlan,
        transport: Transport,
        buffers: &[Buffer],
        round: u32,
    ) -> Result<Timed, Error> {
        fill(plan, self.member, buffers, round)?;
        // The other ranks have finished their work, and wait for rank 0 in the next barrier.
        self.barrier(transport)?;
        let before = Line::at(self.member.rank());
        let mut times = Vec::with_capacity(buffers.len());
        for (tensor, buffer) in plan.tensors.iter().zip(buffers) {
            // A driver that is told to stop does so at once; an RNIC is stopped between two tensors.
            if self.stop.load(Ordering::Relaxed) {
                return Err(Error::Stopped);
            }
            // An early rank would begin the next tensor, and take the core from a rank that has not finished this one.
            self.barrier(transport)?;
            let start = shared_clock();
            match (transport, &mut self.tcp) {
                (Transport::Tcp, Some(ring)) => {
                    ring.all_reduce(self.member.collectives.bytes_mut(*buffer)?, self.stop)?
                }
                _ => self.member.sum(*buffer, tensor.len(), DataType::F32)?,
            }
            times.push([start, shared_clock()]);
        }
        // As above; the next step is the check.
        self.barrier(transport)?;
        let after = Line::at(self.member.rank());
        self.barrier(transport)?;
        Ok(Timed { times, state: [before, after] })
    }

    fn barrier(&mut self, transport: Transport) -> Result<(), Error> {
        match (transport, &mut self.tcp) {
            (Transport::Tcp, Some(ring)) => Ok(ring.all_reduce(&mut [0; ELEMENT], self.stop)?),
            _ => Ok(self.member.collectives.run(self.member.communicator, &Operation::barrier())?),
        }
    }

    /// The sum of one number of each rank, computed in `room`.
    fn sum(&mut self, transport: Transport, room: Buffer, own: f32) -> Result<f32, Error> {
        let mut element = own.to_ne_bytes();
        match (transport, &mut self.tcp) {
            (Transport::Tcp, Some(ring)) => ring.all_reduce(&mut element, self.stop)?,
            _ => {
                self.member.collectives.write(room, 0, &element)?;
                self.member.sum(room, 1, DataType::F32)?;
                self.member.collectives.read(room, 0, &mut element)?;
            }
        }
        Ok(f32::from_ne_bytes(element))
    }
}

/// Connects the ranks over TCP. They exchange their listening addresses, and then the source addresses of their
/// connections: connections from other addresses are rejected.
fn tcp_ring(member: &mut Member, address: IpAddr, stop: &AtomicBool) -> Result<TcpRing, Error> {
    let (rank, size) = (member.rank(), member.communicator.size());
    let listening = Listening::at(address)?;
    let listeners = exchange(member, listening.address()?)?;
    let connected = listening.connect(listeners[((rank + 1) % size) as usize])?;
    let sources = exchange(member, connected.source()?)?;
    Ok(connected.join(rank, size, sources[((rank + size - 1) % size) as usize], stop)?)
}

/// One address of each rank.
fn exchange(member: &mut Member, own: SocketAddr) -> Result<Vec<SocketAddr>, Error> {
    /// Address and port.
    const ENTRY: usize = 6;
    let IpAddr::V4(address) = own.ip() else {
        return Err(
            Failure::run(format!("{own} is not an IPv4 address, which the TCP baseline needs")).into()
        );
    };
    let Member { collectives, communicator, .. } = member;
    let mut entries = vec![[0; ENTRY]; communicator.size() as usize];
    let table = collectives.allocate_private(entries.len() * ENTRY)?;
    let at = u64::from(communicator.rank()) * ENTRY as u64;
    let ([a, b, c, d], [high, low]) = (address.octets(), own.port().to_be_bytes());
    collectives.write(table, at, &[a, b, c, d, high, low])?;
    let operation = Operation::all_gather(table.at(at), table, ENTRY, DataType::U8);
    collectives.run(*communicator, &operation)?;
    collectives.read(table, 0, entries.as_flattened_mut())?;
    collectives.deregister(table)?;
    let address = |[a, b, c, d, high, low]: [u8; ENTRY]| {
        SocketAddr::from((Ipv4Addr::new(a, b, c, d), u16::from_be_bytes([high, low])))
    };
    Ok(entries.into_iter().map(address).collect())
}

/// Nanoseconds of a clock that all processes of the machine share.
fn shared_clock() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Fills the buffers with the rank's values of a round.
fn fill(
    plan: &RankPlan,
    member: &mut Member,
    buffers: &[Buffer],
    round: u32,
) -> Result<(), ferroce_collectives::Error> {
    let rank = member.rank();
    let mut room = [0; PIECE * ELEMENT];
    for (number, (tensor, buffer)) in plan.tensors.iter().zip(buffers).enumerate() {
        let fault = plan.fault.filter(|fault| (fault.rank, fault.tensor) == (rank, number));
        for first in (0..tensor.len()).step_by(PIECE) {
            let piece = &mut room[..(tensor.len() - first).min(PIECE) * ELEMENT];
            values::fill(piece, first, round, rank, number);
            if let Some(index) = fault.and_then(|fault| fault.index.checked_sub(first)) {
                values::negate(piece, index);
            }
            member.collectives.write(*buffer, (first * ELEMENT) as u64, piece)?;
        }
        member.answer()?;
    }
    Ok(())
}

/// Compares the elements; returns their number and the tensors with wrong ones.
fn check(
    plan: &RankPlan,
    member: &mut Member,
    buffers: &[Buffer],
    round: u32,
) -> Result<(u64, Vec<Wrong>), ferroce_collectives::Error> {
    let (mut elements, mut wrong) = (0, Vec::new());
    let (ranks, mut room) = (member.communicator.size(), [0; PIECE * ELEMENT]);
    for (number, (tensor, buffer)) in plan.tensors.iter().zip(buffers).enumerate() {
        let mut found = None;
        for first in (0..tensor.len()).step_by(PIECE) {
            let piece = &mut room[..(tensor.len() - first).min(PIECE) * ELEMENT];
            member.collectives.read(*buffer, (first * ELEMENT) as u64, piece)?;
            if let Err(later) = values::check(piece, first, round, ranks, number, tensor) {
                Wrong::add(&mut found, later);
            }
        }
        wrong.extend(found);
        elements += tensor.len() as u64;
        member.answer()?;
    }
    Ok((elements, wrong))
}
