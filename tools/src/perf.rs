//! `ferroce perf`: bandwidth and latency of each operation, in the manner of perftest.
//!
//! - `plan.rs`: the parameters of a measurement; both ends agree on them before the first packet. A new one has `#[serde(default)]`,
//!   for ends of other versions
//! - `client.rs`, `server.rs`: the two ends
//! - `session.rs`, `session/`: queue pairs, memory and the poll loop, for both ends and both protocols
//! - `control.rs`, `message.rs`: ferroce's own control protocol
//! - `perftest.rs`, `perftest/`: the protocol of perftest
//! - `account.rs`, `report.rs`: the counters; the report
//! - `pattern.rs`: the bytes that are sent and compared
//! - `compare.rs`: one measurement over two devices
//!
//! Both protocols use the same TCP port. The first bytes of a client are a version in perftest and a greeting in
//! ferroce, so a server recognizes either. A server of perftest waits for 16 bytes before it sends anything, so a
//! client needs the option `--perftest`.
//!
//! A client uses the GID of the local address of its TCP connection, if the device has it.
//!
//! If the server sends more than it receives (`Plan::pours`), it sends only to the address from which the TCP
//! connection comes, unless that is a loopback address of this machine or `--any-gid` is given. The GID is only the
//! client's claim, and anyone who knows queue pair number and PSN can send acknowledgements and READs under any source
//! address.
//!
//! `--core` pins the poll loop (core_affinity).

mod account;
mod client;
mod compare;
mod control;
pub mod message;
mod pattern;
pub mod perftest;
pub mod plan;
mod report;
mod server;
mod session;

use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferroce::{Device, DeviceSpec, Gid, PathMtu};
use tracing::info;

use crate::endpoint::{Endpoint, Interrupt, PortArgs};
use crate::failure::{Failure, OrFail};
use crate::memory::MemorySpec;
use crate::output::JsonArg;
use crate::pingpong::path_mtu;
use crate::serving::{ServingArgs, until_signal};
use crate::tcp::Listener;
use crate::visitors::{Heard, await_client};
use crate::{host, progress, quantity, selftest, tcp};
use account::Measured;
use client::Stop;
use compare::Comparison;
use control::PerfControl;
use pattern::Origin;
use perftest::PerftestExchange;
use perftest::rdma_cm::{self, Ear};
use plan::{AtomicType, MAX_DEPTH, MAX_SIZE, Mode, Operation, Plan, Service};
use report::PerfReport;
use server::Wishes;
use session::{Beside, Session};

/// Measures bandwidth or latency of one operation between two ends.
///
/// Without HOST it is the server and waits for one client; with HOST the client, which decides sizes, counts and depths
/// for both. With `-d loopback` and no HOST, both ends run in this process. If either end is killed, the other one
/// reports it and exits with status 1. A long run prints its progress to standard error: every second with -D,
/// otherwise every 5 s. With -P and --json a server writes one report per client, one after another.
///
/// A run that ends early, by Ctrl-C (SIGINT), SIGTERM or a failure, prints its results until then, at both ends (with
/// perftest, at the client). The exit status is 130 at an end that received a signal, and 1 at the other.
///
/// Either end can be a program of perftest, 5.5 to 6.x: ib_write_bw, ib_read_lat and so on. A server detects perftest;
/// at a client give --perftest. perftest does not exchange -s, -n, -q, -a, -b and -c: they must be the same at both
/// ends, and -n is the number of messages per queue pair. --check and --selective-repeat need ferroce at both ends, and
/// are refused with perftest.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The operation to measure.
    operation: Operation,
    /// Bandwidth or latency.
    mode: Mode,
    /// The server, by name or IP address.
    host: Option<String>,
    #[command(flatten)]
    port: PortArgs,
    /// TCP port of the control connection.
    #[arg(short = 'p', long = "port", value_name = "PORT", default_value_t = 18515)]
    tcp_port: u16,
    /// Bytes of a message, as 65536, 64K or 1M (K is 1024, KB is 1000). Default: bandwidth 65536 (1024 with UD),
    /// latency 2; atomics always have 8.
    #[arg(short, long, value_name = "BYTES", value_parser = quantity::length::<1, MAX_SIZE>)]
    size: Option<u32>,
    /// All sizes from 2 B to 8 MiB. Without -n, -D, --bytes and perftest, at most 256 MiB of each size.
    #[arg(short, long, conflicts_with = "size")]
    all: bool,
    /// Messages of each size. Default: bandwidth 5000 (with perftest 1000, except WRITE), latency 1000.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 48))]
    iters: Option<u64>,
    /// Seconds for each size, instead of -n.
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = seconds, conflicts_with_all = ["iters", "bytes"])]
    duration: Option<Duration>,
    /// Total bytes of each size, as 1G, instead of -n.
    #[arg(long, value_name = "BYTES", value_parser = quantity::total, conflicts_with = "iters")]
    bytes: Option<u64>,
    /// Number of queue pairs.
    #[arg(short, long = "qp", value_name = "QPS", default_value_t = 1)]
    qps: u32,
    /// Transport service: RC, UC (WRITE and SEND) or UD (SEND). The client decides; with perftest give it at both ends.
    #[arg(short = 'c', long, default_value = "RC", ignore_case = true)]
    service: Service,
    /// Both ends send at the same time. The client decides; with perftest give it at both ends.
    #[arg(short, long)]
    bidirectional: bool,
    /// Path MTU: 256, 512, 1024, 2048 or 4096; by default the largest that both interfaces allow.
    #[arg(short, long, value_parser = path_mtu)]
    mtu: Option<PathMtu>,
    /// Index in the GID table that `ferroce devinfo -d DEVICE` shows below `device`; by default a row of the peer's IP
    /// version. An RNIC's own table also has the GIDs of RoCE v1; name a row of it in DEVICE: ibverbs:mlx5_0:1:3 is row 3 of
    /// port 1.
    #[arg(short = 'x', long, value_name = "INDEX")]
    gid_index: Option<usize>,
    /// Server: also send messages and READ responses to a client whose GID is not the address of its TCP connection.
    #[arg(long, conflicts_with = "host")]
    any_gid: bool,
    #[command(flatten)]
    serving: ServingArgs,
    /// Outstanding send WRs per queue pair.
    #[arg(short, long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=MAX_DEPTH as i64))]
    tx_depth: u32,
    /// Receive WRs posted per queue pair.
    #[arg(short, long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=MAX_DEPTH as i64))]
    rx_depth: u32,
    /// Outstanding READs and atomics per queue pair.
    #[arg(short, long = "outs", default_value_t = 16, value_parser = clap::value_parser!(u8).range(1..=128))]
    outstanding: u8,
    /// ACK timeout, 4.096 µs · 2^N.
    #[arg(short = 'u', long, value_name = "N", default_value_t = 14, value_parser = clap::value_parser!(u8).range(1..=31))]
    qp_timeout: u8,
    /// Retransmit only lost packets, instead of all packets from the first lost one. The client decides.
    #[arg(long)]
    selective_repeat: bool,
    /// Memory of this end for the messages: host, or a GPU's (opencl[:N], cuda[:N]); the GPU then copies the data between
    /// this memory and the packets. The other end can use other memory. Not for atomics. In `write lat` each poll of the
    /// last byte is also a copy by the GPU.
    #[arg(long, default_value_t)]
    memory: MemorySpec,
    /// The atomic operation.
    #[arg(short = 'A', long = "atomic_type", default_value = "FETCH_AND_ADD")]
    atomic: AtomicType,
    /// The receiving end compares every byte with the expected value. The client decides.
    #[arg(long)]
    check: bool,
    /// The server is a perftest program. With -d loopback both ends use perftest's exchange.
    #[arg(long, conflicts_with_all = ["check", "selective_repeat"])]
    perftest: bool,
    /// Refused: ferroce perf does not connect by rdma_cm, as perftest does with -R and -z.
    #[arg(short = 'R', long = "rdma_cm", visible_short_alias = 'z', visible_alias = "comm_rdma_cm")]
    rdma_cm: bool,
    /// Also measure over this device, alternating with -d, three times each, and print one table of both with ratio and
    /// spread: --compare=ibverbs:mlx5_0, or --compare for the RNIC on the interface of -d. Both ends need this option;
    /// an end with only one device names it twice (-d DEVICE --compare=DEVICE). Select GIDs by DEVICE
    /// (ibverbs:mlx5_0:1:3), not by -x. Each device is closed before the other is opened, so AF_XDP and an RNIC can
    /// share an interface; a UDP socket and rdma_rxe can't be compared in one network namespace, because both need UDP
    /// port 4791.
    #[arg(
        long,
        value_name = "DEVICE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = compare::FOUND,
        conflicts_with_all = ["pcap", "perftest", "gid_index"]
    )]
    compare: Option<Comparison>,
    #[command(flatten)]
    json: JsonArg,
    /// Print only errors and warnings to standard error, no progress; the report is still printed. (-q is --qp here, as
    /// in perftest.)
    // Replaces the option of all commands, since `-q` has another meaning here.
    #[arg(long, global = true)]
    quiet: bool,
}

/// The longest time that a server waits for a client.
#[derive(Clone, Copy)]
enum Patience {
    Endless,
    Until(Instant),
}

/// Measures as a client, or serves one, and prints the report, also after a run that ended early.
///
/// # Errors
/// The options are invalid, an end fails, a byte is wrong or missing, the report or the recording can't be written, or
/// the command is interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    args.check()?;
    args.json.check_beside(args.port.pcap.as_deref())?;
    match &args.compare {
        Some(with) => compare::run(&args, with)?,
        None => start(&args)?,
    }
    args.port.check_recording()?;
    Ok(ExitCode::SUCCESS)
}

fn start(args: &Args) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    let mut report = None;
    if let Some([server, client]) = selftest::ports(&args.port.device, args.host.as_deref())? {
        let listener = Listener::local()?;
        let tcp_port = listener.port()?;
        let serve = || {
            let mut end = args.endpoint(server, &args.port.for_server(), &interrupt)?;
            let client = args.await_client(&mut end, &listener, Patience::Endless)?;
            args.serve(end, client, &mut None)
        };
        let measure = || {
            let end = args.endpoint(client, &args.port, &interrupt)?;
            args.measure(end, "127.0.0.1", tcp_port, &mut report)
        };
        let result = selftest::run(&interrupt, serve, measure);
        return args.print(report, result);
    }
    if let Some(host) = &args.host {
        let end = args.endpoint(args.port.open()?, &args.port, &interrupt)?;
        let result = args.measure(end, host, args.tcp_port, &mut report);
        return args.print(report, result);
    }
    if args.perftest {
        return Err(Failure::usage(
            "--perftest is for a client, with a HOST; a server detects a perftest client",
        ));
    }
    let mut tcp_port = args.tcp_port;
    let open = || {
        let end = args.endpoint(args.port.open()?, &args.port, &interrupt)?;
        let listener = Listener::any(tcp_port)?;
        tcp_port = listener.port()?;
        Ok((end, listener))
    };
    args.serving.run(&interrupt, open, |(mut end, listener)| {
        let client = until_signal(args.await_client(&mut end, &listener, Patience::Endless))?;
        let Some(client) = client else { return Ok(false) };
        // Further clients are refused; otherwise they would wait without a message.
        drop(listener);
        let mut report = None;
        let result = args.serve(end, client, &mut report);
        args.print(report, result).map(|()| true)
    })
}

impl Args {
    /// Checks the options that do not depend on the devices.
    fn check(&self) -> Result<(), Failure> {
        if self.rdma_cm {
            return Err(Failure::usage(
                "-R, -z: `ferroce perf` does not connect by rdma_cm; leave them out at both ends (`rping` and \
                 `ucmatose` connect by it)",
            ));
        }
        let plan = self.plan();
        plan.check_limits()?;
        if self.operation == Operation::Atomic && !self.memory.is_host() {
            let memory = self.memory;
            return Err(Failure::usage(format!("--memory {memory}: atomics need memory of the host")));
        }
        if self.all && self.service == Service::Ud {
            return Err(Failure::usage(
                "--all: UD has messages of one packet; give sizes one by one with -s",
            ));
        }
        self.sizes(self.perftest).iter().try_for_each(|(size, _)| plan.check_size(*size))?;
        if self.perftest {
            self.check_perftest()?;
        }
        // Fails here, before the other end waits for this one.
        self.memory.open().map(drop)
    }

    fn plan(&self) -> Plan {
        Plan {
            operation: self.operation,
            mode: self.mode,
            atomic: self.atomic,
            service: self.service,
            bidirectional: self.bidirectional,
            qps: self.qps,
            tx_depth: self.tx_depth,
            rx_depth: self.rx_depth,
            outstanding: self.outstanding,
            timeout: self.qp_timeout,
            selective_repeat: self.selective_repeat,
            check: self.check,
        }
    }

    /// The sizes to measure, and when each ends.
    fn sizes(&self, perftest: bool) -> Vec<(u32, Stop)> {
        let many = self.mode == Mode::Bw && (!perftest || self.operation == Operation::Write);
        let count = self.iters.unwrap_or(if many { 5000 } else { 1000 });
        let stop = match (self.duration, self.bytes) {
            (Some(time), _) => Stop::After(time),
            (_, Some(bytes)) => Stop::Bytes(bytes),
            _ => Stop::Messages(count),
        };
        let chosen = perftest || self.iters.is_some() || self.duration.is_some() || self.bytes.is_some();
        if self.all && self.operation != Operation::Atomic {
            let limited = |size: u32| Stop::Messages(count.min(u64::from(ALL_SIZES_BYTES / size)));
            return (1..=23)
                .map(|power| 1 << power)
                .map(|s| (s, if chosen { stop } else { limited(s) }))
                .collect();
        }
        let size = match (self.operation, self.mode) {
            (Operation::Atomic, _) => 8,
            (_, Mode::Bw) if self.service == Service::Ud => 1024,
            (_, Mode::Bw) => 65536,
            (_, Mode::Lat) => 2,
        };
        vec![(self.size.unwrap_or(size), stop)]
    }

    /// Checks the options that programs of perftest do not support.
    fn check_perftest(&self) -> Result<(), Failure> {
        let counted = self.operation == Operation::Send || self.plan().echoes();
        let refused = [
            (self.check, "--check: the contents of perftest's messages are not known"),
            (self.selective_repeat, "--selective-repeat: perftest does not support it"),
            (
                counted && self.duration.is_some(),
                "-D: the server of this operation must know the number of messages, which perftest does not send; \
                 give -n at both ends",
            ),
            (
                self.plan().doorbell() && self.iters == Some(1),
                "-n 1: must be 2 or more: perftest measures WRITE latency from one WRITE to the next",
            ),
        ];
        match refused.iter().find(|(given, _)| *given) {
            Some((_, why)) => Err(Failure::usage(format!("the other end is perftest; {why}"))),
            None => Ok(()),
        }
    }

    fn endpoint(&self, device: Device, port: &PortArgs, interrupt: &Interrupt) -> Result<Endpoint, Failure> {
        // The session creates a CQ of the right size once the plan is known.
        let end = Endpoint::new(device, port, 1, interrupt.clone())?;
        if self.gid_index.is_some() {
            end.gid_index(self.gid_index, None)?;
        }
        Ok(end)
    }

    /// Waits for a client of ferroce or of perftest.
    fn await_client(
        &self,
        end: &mut Endpoint,
        listener: &Listener,
        patience: Patience,
    ) -> Result<(TcpStream, FirstWords), Failure> {
        info!("waiting for a client on TCP port {}", listener.port()?);
        let mut ear = Ear::open(end, listener.port()?)?;
        let meanwhile = || {
            if matches!(patience, Patience::Until(end) if Instant::now() > end) {
                return Err(Failure::run("the client has not connected again; does it have --compare too?"));
            }
            end.poll().and_then(|_| ear.check(end))
        };
        let client = await_client(listener, meanwhile, control::GREETING, FirstWords::of)?;
        ear.close(end)?;
        Ok(client)
    }

    /// Serves one client, and reports, also after a run that ended early.
    fn serve(
        &self,
        end: Endpoint,
        (stream, client): (TcpStream, FirstWords),
        report: &mut Option<PerfReport>,
    ) -> Result<(), Failure> {
        let interrupt = end.interrupt.clone();
        let from = stream.peer_addr().or_fail(|| "the client's address".into())?.ip().to_canonical();
        info!(%from, "a client");
        // A program on this machine could send packets itself.
        let home = (!self.any_gid && !from.is_loopback()).then(|| Gid::from(from));
        let wishes = Wishes { gid_index: self.gid_index, path_mtu: self.mtu, home };
        let mut measured = Measured::nothing();
        let result;
        match client {
            FirstWords::Ferroce(plan) => {
                let mut session = self.session(end, PerfControl::new(stream, &interrupt)?, Origin::Server)?;
                result = server::run(&mut session, plan, wishes, &mut measured);
                *report = PerfReport::new("server", &session, measured, &result);
            }
            FirstWords::Perftest(version) => {
                self.check_perftest()?;
                let control = PerftestExchange::new(stream, &version, &interrupt)?;
                let mut session = self.session(end, control, Origin::Server)?;
                result = perftest::serve(&mut session, &self.sizes(true), wishes, &mut measured);
                *report = PerfReport::new("server", &session, measured, &result);
            }
        }
        result
    }

    /// Measures as a client, and reports, also after a run that ended early.
    fn measure(
        &self,
        mut end: Endpoint,
        host: &str,
        tcp_port: u16,
        report: &mut Option<PerfReport>,
    ) -> Result<(), Failure> {
        let addresses = host::look_up(&end, host, tcp_port)?;
        let stream = tcp::connect(addresses, &end.interrupt).map_err(|failure| match failure {
            Failure::Run(_) if self.perftest => rdma_cm::explain(&mut end, host, tcp_port, failure),
            other => other,
        })?;
        let peer = stream.peer_addr().or_fail(|| format!("the address of {host}"))?;
        // The server sends to this end's TCP address if it is one of the device's.
        let own = stream.local_addr().or_fail(|| "the address of this end".into())?.ip().to_canonical();
        let known = end.context.port().gids.iter().position(|row| row.gid == Gid::from(own));
        let wanted = self.gid_index.or(known);
        let gid_index = end.gid_index(wanted, Some(Gid::from(peer.ip().to_canonical())))?;
        let interrupt = end.interrupt.clone();
        let mut measured = Measured::nothing();
        let result;
        if self.perftest {
            let control = PerftestExchange::new(stream, &[], &interrupt)?;
            let mut session = self.session(end, control, Origin::Client)?;
            let wishes = Wishes { gid_index: Some(gid_index), path_mtu: self.mtu, home: None };
            result = perftest::measure(&mut session, &self.sizes(true), wishes, &mut measured);
            *report = PerfReport::new("client", &session, measured, &result);
        } else {
            let control = PerfControl::greet(stream, &interrupt)?;
            let mut session = self.session(end, control, Origin::Client)?;
            result = client::run(&mut session, &self.sizes(false), gid_index, self.mtu, &mut measured);
            *report = PerfReport::new("client", &session, measured, &result);
        }
        result
    }

    /// Prints the report, if there is one, before the error that ended the run.
    fn print(&self, report: Option<PerfReport>, result: Result<(), Failure>) -> Result<(), Failure> {
        let printed = report.map_or(Ok(()), |report| report.print(&self.json));
        result.and(printed)
    }

    fn session<C: Beside>(&self, end: Endpoint, control: C, role: Origin) -> Result<Session<C>, Failure> {
        let interval = match self.duration {
            // The client in the same process reports the progress.
            _ if role == Origin::Server && self.port.device == DeviceSpec::Loopback => Duration::MAX,
            Some(_) => progress::EACH_SECOND,
            None => progress::SELDOM,
        };
        Session::new(end, control, self.plan(), role, (self.memory, interval))
    }
}

/// A client, identified by its first bytes.
enum FirstWords {
    /// The plan of the client.
    Ferroce(Plan),
    /// A program of perftest, and its version.
    Perftest(Vec<u8>),
}

impl FirstWords {
    fn of(stream: &mut TcpStream, said: &[u8]) -> Result<Heard<FirstWords>, Failure> {
        if let Some(heard) = perftest::judge(said)? {
            return Ok(match heard {
                Heard::Needs(bytes) => Heard::Needs(bytes),
                Heard::Client(()) => Heard::Client(FirstWords::Perftest(said.to_vec())),
            });
        }
        Ok(match control::judge(stream, said)? {
            Heard::Needs(bytes) => Heard::Needs(bytes),
            Heard::Client(plan) => Heard::Client(FirstWords::Ferroce(plan)),
        })
    }
}

/// The most bytes that `--all` transfers at each size.
const ALL_SIZES_BYTES: u32 = 256 << 20;

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds <= 1e6);
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("'{text}': seconds, more than 0 and at most a million"))
}
