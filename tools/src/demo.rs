//! `ferroce demo`: ranks all-reduce the parameter tensors of ResNet-50 with RoCEv2 packets, and check every element.
//!
//! The ranks are processes of this program: in network namespaces (`netns.rs`), with UDP sockets on addresses of the
//! loopback interface, or on one RNIC. Or they are threads over a loopback switch.
//!
//! - `supervisor.rs`: starts the ranks, reads what they report, ends them
//! - `rank.rs`: the work of a rank
//! - `shapes.rs`, `values.rs`: the tensors; their contents, and the check of the result
//! - `tcp_ring.rs`, `chunks.rs`: the same all-reduce over the kernel's TCP, for comparison in the table
//! - `state.rs`: the state of the machine
//! - `stoppable.rs`: a driver that can be stopped
//! - `report.rs`: the results
//!
//! All ranks begin a tensor together, after a barrier. Without it, an early rank began the next tensor (or the check)
//! on the core of a late rank, and small tensors after large ones took milliseconds.
//!
//! Rank 0 measures the state of the machine before and after a round, each time between two barriers. All ranks vote on
//! whether a slow round is repeated.
//!
//! If ranks share cores, they do not spin (`Options::idle`). The demo does not pin its threads: there are more ranks
//! than cores, and even two ranks on two shared cores were 14 to 21 % slower when pinned, in three runs of three.

mod chunks;
mod rank;
mod report;
mod shapes;
mod state;
mod stoppable;
mod supervisor;
mod tcp_ring;
mod values;

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferroce::{DeviceSpec, Idle, PathMtu, SharedMemory};
use ferroce_collectives::Bootstrap;
use ferroce_driver::loopback::{Switch, SwitchConfig};
use ferroce_driver::machine::{Machine, Rounds};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tracing::info;

use crate::congestion::CongestionArgs;
use crate::failure::Failure;
use crate::memory::MemorySpec;
use crate::netns::{self, Lab, Network};
use crate::output::{JsonArg, note, say};
use rank::{Fault, RankEvent, RankPlan};
use report::{DemoReport, RankLog};
use supervisor::{RankNotice, Supervisor};

/// All-reduces the parameter tensors of ResNet-50 between ranks and checks every element.
///
/// Rounds over ferroce alternate with rounds over the kernel's TCP, and the table has the times of both. "ratio" is
/// TCP's time divided by ferroce's: above 1 ferroce is faster.
///
/// Before and after each round rank 0 measures the time that a cache line needs from core to core. A round in which this
/// was slow is repeated, with at most N + 3 repetitions for N rounds (ferroce and TCP together). If --pcap is given, no
/// round is repeated.
///
/// As root, the ranks are processes in network namespaces of their own, joined by a bridge, and send RoCEv2 through
/// AF_XDP; all of this is removed at the end. Without the privileges for it, they are processes with UDP sockets on the
/// loopback interface. If that is not possible either, they are threads that send the same packets over an in-process
/// switch.
///
/// With -d ibverbs:DEVICE they are processes that share a port of an RNIC.
///
/// Exit status: 0 if every element is right, 1 if one is not or a rank failed, 2 for wrong usage, 130 if it is
/// interrupted.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The network between the ranks: af_xdp (a namespace and a process per rank), udp (sockets on addresses of the
    /// loopback interface, a process per rank; no privilege needed), loopback (a switch inside this process, a thread
    /// per rank), or an RNIC, as ibverbs:DEVICE[:PORT[:GID]] (a process per rank) [default: af_xdp if possible, else
    /// udp, else loopback].
    #[arg(short, long)]
    device: Option<Joint>,
    /// Number of ranks.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=i64::from(values::MAX_RANKS)))]
    ranks: u32,
    /// Rounds; each all-reduces every tensor once [default: 3, or 1 with --pcap].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Payload bytes of a full packet: 256, 512, 1024, 2048 or 4096. The interfaces get an MTU of 1500 bytes, or more
    /// if this path MTU needs it.
    #[arg(long, default_value_t = PathMtu::Mtu4096, value_parser = parse_path_mtu)]
    path_mtu: PathMtu,
    /// Memory of the tensors: host, or a GPU's (opencl[:N], cuda[:N]); the GPU then also adds them up, and there is no
    /// comparison with TCP.
    #[arg(long, default_value_t)]
    memory: MemorySpec,
    #[command(flatten)]
    congestion: CongestionArgs,
    /// Record the packets that rank 0 sends and receives into a pcapng file (about 310 MB per round).
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
    /// Only the first tensors of the network, for tests.
    #[arg(long, hide = true, value_parser = clap::value_parser!(u32).range(1..))]
    tensors: Option<u32>,
    /// RANK:TENSOR:INDEX of an element that a rank gets wrong on purpose, for tests.
    #[arg(long, hide = true)]
    fault: Option<Fault>,
    /// For a rank: its address for the TCP baseline.
    #[arg(long, hide = true, value_name = "ADDRESS")]
    tcp_address: Option<IpAddr>,
    /// This process is a rank that a demo started, on this device.
    #[arg(long, hide = true, value_name = "DEVICE")]
    as_rank: Option<DeviceSpec>,
}

/// What joins the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Joint {
    AfXdp,
    Udp,
    Loopback,
    /// A port of an RNIC, which all ranks share.
    Rnic(DeviceSpec),
}

impl FromStr for Joint {
    type Err = String;

    fn from_str(text: &str) -> Result<Joint, String> {
        match text {
            "af_xdp" => Ok(Joint::AfXdp),
            "udp" => Ok(Joint::Udp),
            "loopback" => Ok(Joint::Loopback),
            _ if text.starts_with("ibverbs") => {
                text.parse().map(Joint::Rnic).map_err(|error: ferroce::Error| error.to_string())
            }
            _ => Err("af_xdp, udp, loopback or ibverbs:DEVICE, such as ibverbs:mlx5_0".to_owned()),
        }
    }
}

/// Runs the ranks and prints the report; see [`Args`] for the exit status.
///
/// # Errors
/// A rank can't be started or fails, the report can't be written, or the demo is interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    if let Some(device) = &args.as_rank {
        return Ok(rank::main(&args.plan(), device, args.tcp_address, args.pcap.as_deref()));
    }
    args.json.check_beside(args.pcap.as_deref())?;
    // Fails here, before a rank does.
    args.memory.open()?;
    let result = interruption().and_then(|interrupted| {
        let result = demo(&args, &interrupted);
        // A failure that the signal caused is not reported.
        if interrupted.load(Ordering::Relaxed) {
            info!("the ranks were ended, and their network was removed");
            return Err(Error::Interrupted);
        }
        result
    });
    let report = result?;
    if !args.json.write(&report)? {
        say!("{report}")?;
    }
    Ok(ExitCode::from(report.exit_status()))
}

#[derive(Debug, thiserror::Error)]
enum Error {
    /// The driver is unavailable; another one may be available.
    #[error("{driver} can't be used: {reason}")]
    Unavailable { driver: &'static str, reason: String },
    #[error("the in-process switch: {0}")]
    Switch(#[from] ferroce_driver::Error),
    #[error(transparent)]
    Collective(#[from] ferroce_collectives::Error),
    #[error("{name} {what}; it had {progress}")]
    Rank { name: String, what: String, progress: String },
    #[error("no rank has reported anything for {} s: {progress}", PATIENCE.as_secs())]
    Stuck { progress: String },
    #[error("{what}: {source}")]
    Os { what: &'static str, source: io::Error },
    #[error("interrupted")]
    Interrupted,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error {
            Error::Interrupted => Failure::Interrupted,
            error => Failure::run(error.to_string()),
        }
    }
}

/// The longest time without any event of the ranks. A round over loopback on one slow core takes a tenth of it.
const PATIENCE: Duration = Duration::from_secs(40);
/// The longest time without output for the user.
const SILENCE: Duration = Duration::from_secs(5);
/// How often an interruption is checked for.
const TICK: Duration = Duration::from_millis(50);
const AF_XDP: &str = "AF_XDP";
const UDP: &str = "udp";
const IBVERBS: &str = "ibverbs";
/// The rendezvous port of the ranks, as torchrun's default. Rank 0 has a namespace of its own.
const MASTER_PORT: u16 = 29500;

impl Args {
    fn plan(&self) -> RankPlan {
        let mut tensors = shapes::resnet50();
        tensors.truncate(self.tensors.map_or(usize::MAX, |count| count as usize));
        let rounds = self.rounds.unwrap_or(if self.pcap.is_some() { 1 } else { 3 });
        RankPlan {
            tensors,
            rounds,
            path_mtu: self.path_mtu,
            idle: idle(self.ranks as usize, Machine::this().cores),
            fault: self.fault,
            memory: self.memory,
            congestion: self.congestion.clone(),
        }
    }

    /// The MTU of the interfaces.
    fn mtu(&self) -> u32 {
        self.path_mtu.required_l3_mtu(false).max(1500)
    }
}

/// The idle strategy of a rank. A rank that spins does not yield its core to the other ranks on it, and may be waiting
/// for one of them: with 4 ranks on 2 cores, small tensors took 1.7 times as long with the default's spins.
fn idle(ranks: usize, cores: usize) -> Idle {
    match Idle::default() {
        Idle::Adaptive { yields, .. } if ranks > cores => Idle::Adaptive { spins: 0, yields },
        default => default,
    }
}

/// A flag that signals to end the program set from now on.
fn interruption() -> Result<Arc<AtomicBool>, Error> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, interrupted.clone())
            .map_err(|source| Error::Os { what: "registering a signal handler", source })?;
    }
    Ok(interrupted)
}

fn demo(args: &Args, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    match &args.device {
        Some(joint) => Ok(over(joint, args, interrupted)?.because("as --device says")),
        None => over_the_first_available(args, interrupted),
    }
}

fn over(joint: &Joint, args: &Args, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    match joint {
        Joint::AfXdp => over_af_xdp(args, interrupted),
        Joint::Udp => over_udp(args, interrupted),
        Joint::Loopback => over_loopback(args, interrupted),
        Joint::Rnic(card) => over_card(args, card, interrupted),
    }
}

/// Tries the drivers in turn, and says why one is unavailable.
fn over_the_first_available(args: &Args, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    let mut why = "the driver with the lowest latency without an RNIC".to_owned();
    for (joint, instead) in [(Joint::AfXdp, "processes, over udp"), (Joint::Udp, "threads, over loopback")] {
        match over(&joint, args, interrupted) {
            Err(unavailable @ Error::Unavailable { .. }) if !interrupted.load(Ordering::Relaxed) => {
                note!("{unavailable}");
                note!("so the ranks are {instead}");
                why = unavailable.to_string();
            }
            result => return Ok(result?.because(&why)),
        }
    }
    Ok(over_loopback(args, interrupted)?.because(&why))
}

/// Ranks as processes in namespaces.
fn over_af_xdp(args: &Args, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    check_rights()?;
    let lab =
        Lab::new("demo", args.ranks, args.mtu()).map_err(|error| unavailable(AF_XDP, error.to_string()))?;
    // Declared after the namespaces, so the ranks are dropped first.
    let mut ranks = Supervisor::new();
    let program = own_program()?;
    for rank in 0..args.ranks {
        let command = lab.command(rank, &program);
        let device = DeviceSpec::AfXdp {
            interface: netns::INTERFACE.to_owned(),
            queue: None,
            shared_memory: SharedMemory::On,
        };
        let addresses = Addresses {
            master: netns::address(Network::Ferroce, 0),
            tcp: Some(netns::address(Network::Tcp, rank)),
        };
        start_rank(args, &mut ranks, rank, command, &device, addresses)?;
    }
    supervise(&args.plan(), AF_XDP, &mut ranks, interrupted)
}

/// Ranks as processes on the loopback interface, each with its own address there.
fn over_udp(args: &Args, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    if args.pcap.is_some() {
        let reason = "a UDP socket does not report the IPv4 identification, so its capture would be wrong";
        return Err(unavailable(UDP, reason.to_owned()));
    }
    let mut ranks = Supervisor::new();
    let program = own_program()?;
    for rank in 0..args.ranks {
        let device = DeviceSpec::Udp { address: host_address(rank), shared_memory: SharedMemory::On };
        let addresses = Addresses { master: host_address(0), tcp: Some(host_address(rank)) };
        start_rank(args, &mut ranks, rank, Command::new(&program), &device, addresses)?;
    }
    supervise(&args.plan(), UDP, &mut ranks, interrupted)
}

/// Ranks as processes that share a port of an RNIC. TCP can't use its memory, so nothing is compared.
fn over_card(args: &Args, card: &DeviceSpec, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    let mut ranks = Supervisor::new();
    let program = own_program()?;
    for rank in 0..args.ranks {
        let addresses = Addresses { master: host_address(0), tcp: None };
        start_rank(args, &mut ranks, rank, Command::new(&program), card, addresses)?;
    }
    supervise(&args.plan(), IBVERBS, &mut ranks, interrupted)
}

/// The address of a rank on the loopback interface, which has all addresses that start with 127. It is one that other
/// programs are unlikely to use.
fn host_address(rank: u32) -> IpAddr {
    Ipv4Addr::new(127, 77, 0, rank as u8 + 1).into()
}

/// The addresses of a rank.
struct Addresses {
    /// Rank 0's address, for the rendezvous.
    master: IpAddr,
    /// The rank's own address for the TCP baseline, if there is one.
    tcp: Option<IpAddr>,
}

/// Starts a rank with a command that runs this program.
fn start_rank(
    args: &Args,
    ranks: &mut Supervisor,
    rank: u32,
    mut command: Command,
    device: &DeviceSpec,
    Addresses { master, tcp }: Addresses,
) -> Result<(), Error> {
    let plan = args.plan();
    command.args(["demo", "--as-rank", &device.to_string()]);
    command.args(["--rounds", &plan.rounds.to_string(), "--tensors", &plan.tensors.len().to_string()]);
    command.args(["--path-mtu", &plan.path_mtu.to_string()]);
    command.args(["--memory", &plan.memory.to_string()]);
    command.args(args.congestion.to_arguments());
    if let Some(address) = tcp {
        command.args(["--tcp-address", &address.to_string()]);
    }
    if let Some(fault) = &args.fault {
        command.args(["--fault", &fault.to_string()]);
    }
    if let (0, Some(file)) = (rank, &args.pcap) {
        command.arg("--pcap").arg(file);
    }
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", args.ranks.to_string());
    command.env("MASTER_ADDR", master.to_string()).env("MASTER_PORT", MASTER_PORT.to_string());
    if std::env::var_os("RUST_LOG").is_none() {
        // The report already says which modes the drivers chose.
        command.env("RUST_LOG", "warn");
    }
    ranks.start_process(&mut command).map_err(|source| Error::Os { what: "starting a rank", source })
}

fn own_program() -> Result<PathBuf, Error> {
    std::env::current_exe().map_err(|source| Error::Os { what: "finding this program's file", source })
}

fn unavailable(driver: &'static str, reason: String) -> Error {
    Error::Unavailable { driver, reason }
}

/// Ranks as threads of this process.
fn over_loopback(args: &Args, interrupted: &AtomicBool) -> Result<DemoReport, Error> {
    let switch = Switch::new(SwitchConfig::default().mtu(args.mtu()))?;
    let plan = args.plan();
    let rendezvous = |source| Error::Os { what: "listening on 127.0.0.1 for the rendezvous", source };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(rendezvous)?;
    let master = listener.local_addr().map_err(rendezvous)?;
    let mut listener = Some(listener);
    // All ports exist before a rank looks for its peers.
    let ports: Vec<_> =
        (0..args.ranks).map(|rank| switch.port(&[netns::address(Network::Ferroce, rank)])).collect();
    let mut ranks = Supervisor::new();
    for (rank, port) in (0..).zip(ports) {
        let plan = plan.clone();
        let pcap = args.pcap.clone().filter(|_| rank == 0);
        let mut bootstrap = Bootstrap::new(rank, args.ranks, master)?;
        // Only rank 0 takes the listener; it is started first.
        if let Some(listener) = listener.take() {
            bootstrap = bootstrap.listener(listener);
        }
        ranks.start_thread(move |stop, tell| {
            let tcp = Some(Ipv4Addr::LOCALHOST.into());
            rank::run(&plan, bootstrap, Box::new(port).into(), tcp, stop, pcap.as_deref(), tell);
        });
    }
    supervise(&plan, "loopback", &mut ranks, interrupted)
}

/// Checks whether this process may create namespaces and open AF_XDP sockets.
fn check_rights() -> Result<(), Error> {
    if cfg!(not(feature = "af_xdp")) {
        return Err(unavailable(AF_XDP, "this `ferroce` was built without the feature `af_xdp`".to_owned()));
    }
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|source| Error::Os { what: "reading /proc/self/status", source })?;
    let missing = missing_capabilities(&status);
    if missing.is_empty() {
        return Ok(());
    }
    Err(unavailable(AF_XDP, format!("this process lacks {}; run as root", missing.join(", "))))
}

/// The capabilities that the demo needs and that are missing in this /proc/PID/status.
fn missing_capabilities(status: &str) -> Vec<&'static str> {
    // Numbers as in linux/capability.h. CAP_SYS_ADMIN is for the namespaces and includes CAP_BPF.
    const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (13, "CAP_NET_RAW"), (21, "CAP_SYS_ADMIN")];
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    NEEDED.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| *name).collect()
}

/// Handles the ranks' events until all ranks have finished.
fn supervise(
    plan: &RankPlan,
    driver: &'static str,
    ranks: &mut Supervisor,
    interrupted: &AtomicBool,
) -> Result<DemoReport, Error> {
    let mut logs: Vec<RankLog> = (0..ranks.len()).map(|_| RankLog::default()).collect();
    note!("{} ranks over {driver} are starting", logs.len());
    let (mut heard, mut told) = (Instant::now(), Instant::now());
    let mut state = Rounds::new();
    while logs.iter().any(|log| log.totals.is_none()) {
        if interrupted.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        if told.elapsed() > SILENCE {
            told = Instant::now();
            note!("still at work: {}", progress_of_all(&logs));
        }
        let Some((rank, message)) = ranks.next(TICK) else {
            if heard.elapsed() > PATIENCE {
                return Err(Error::Stuck { progress: progress_of_all(&logs) });
            }
            continue;
        };
        heard = Instant::now();
        let log = &mut logs[rank as usize];
        match message {
            RankNotice::Event(RankEvent::Opened(opened)) => log.opened = Some(opened),
            RankNotice::Event(RankEvent::Round { transport, state: ends, is_repeated, .. })
                if rank == 0 && is_repeated =>
            {
                state.note(ends.map(|line| line.map(Into::into)), false);
                note!(
                    "a round over {transport} was measured in the slow state of this machine, and is repeated"
                );
                told = Instant::now();
            }
            // It does not count; a round with wrong elements is never repeated.
            RankNotice::Event(RankEvent::Round { is_repeated: true, .. }) => {}
            RankNotice::Event(RankEvent::Round {
                transport, times, elements, wrong, state: ends, ..
            }) => {
                if rank == 0 {
                    state.note(ends.map(|line| line.map(Into::into)), true);
                }
                log.add_round(transport, times, elements, wrong);
                if let Some(news) = report::news_of_round(plan.rounds, &logs, transport, rank) {
                    note!("{news}");
                    told = Instant::now();
                }
            }
            RankNotice::Event(RankEvent::Finished(totals)) => log.totals = Some(totals),
            RankNotice::Event(RankEvent::Unopened { reason }) => return Err(unavailable(driver, reason)),
            RankNotice::Event(RankEvent::Failed { reason }) => {
                return Err(failed(ranks, rank, format!("failed: {reason}"), log));
            }
            // A rank that has finished ends.
            RankNotice::Gone(_) if log.totals.is_some() => {}
            RankNotice::Gone(how) => return Err(failed(ranks, rank, how, log)),
        }
    }
    Ok(DemoReport::new(&plan.tensors, logs).in_state(&state))
}

fn failed(ranks: &Supervisor, rank: u32, what: String, log: &RankLog) -> Error {
    Error::Rank { name: ranks.name(rank), what, progress: progress(log) }
}

fn progress(log: &RankLog) -> String {
    match (&log.opened, log.rounds()) {
        (None, _) => "not opened its port".to_owned(),
        (Some(_), 0) => "opened its port and completed no round".to_owned(),
        (Some(_), rounds) => format!("completed {rounds} rounds"),
    }
}

fn progress_of_all(logs: &[RankLog]) -> String {
    let one = |(rank, log): (usize, &RankLog)| format!("rank {rank} has {}", progress(log));
    logs.iter().enumerate().map(one).collect::<Vec<_>>().join(", ")
}

fn parse_path_mtu(text: &str) -> Result<PathMtu, String> {
    let bytes: u32 = text.parse().map_err(|_| "must be 256, 512, 1024, 2048 or 4096 bytes".to_owned())?;
    PathMtu::try_from(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_cores_give_way_at_once() {
        assert_eq!(idle(2, 2), Idle::default());
        assert_eq!(idle(3, 2), Idle::Adaptive { spins: 0, yields: 20 });
    }

    #[test]
    fn missing_capabilities_are_named() {
        let status = |hex: &str| format!("Name:\tferroce\nCapInh:\t0000000000000000\nCapEff:\t{hex}\n");
        assert_eq!(missing_capabilities(&status("000001ffffffffff")), [""; 0]);
        assert_eq!(
            missing_capabilities(&status("0000000000000000")),
            ["CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_ADMIN"]
        );
        // The usual set of a container's root: CAP_NET_RAW, but neither of the others.
        assert_eq!(missing_capabilities(&status("00000000a80425fb")), ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]);
    }
}
