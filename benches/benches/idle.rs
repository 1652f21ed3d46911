//! The cost of a runner: its share of a core when idle, its latency for the first packet, and the cost of its rings
//! compared with the same work in one thread.
//!
//! A wake-up is timed from the peer's post of a message, after a tenth of a second of silence: to its acknowledgement,
//! when the runner has handled it, and to the completion in the application's thread, which is a second wake-up if that
//! thread blocks. For comparison, the kernel's own wake-up is measured in the same rounds: a datagram over `lo` to a
//! thread that blocks in `recv`.
//!
//! The runner and the thread that blocks in `recv` run on one core, the sender and the thread that waits for the
//! completion on the other one. A scheduler that wakes a thread on the core of a spinning one makes it wait for a time
//! slice, which takes milliseconds.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::loopback;
use ferroce::driver::machine::Rounds;
use ferroce::{
    Clock, Context, Cq, Data, Delivery, Error, HandleConfig, Idle, PacketDriver, Poller, Qp,
    ReceiveWorkRequest, RemoteAddress, Runner, RunnerConfig, RunnerHandle, SendFlags, SendOp,
    SendWorkRequest, WcStatus, WorkCompletion, pin_to_core,
};
use ferroce_benches::pair::{End, Pair, Setup};
use ferroce_benches::report::{CpuTime, Median, Options};
#[cfg(feature = "af_xdp")]
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use serde_json::{Value, json};

/// The pause before each wake-up.
const SILENCE: Duration = Duration::from_millis(100);
/// The idle strategies of a runner, and of the thread that waits for its completions.
const WAYS: [(&str, Idle, Idle); 3] = [
    ("block", Idle::Block, Idle::Block),
    ("adaptive", Idle::Adaptive { spins: 200, yields: 20 }, Idle::Adaptive { spins: 200, yields: 20 }),
    ("spin", Idle::Spin, Idle::Block),
];
const LONG: Duration = Duration::from_secs(10);

type Ports = [Box<dyn PacketDriver>; 2];
type Failure = Box<dyn std::error::Error + Send + Sync>;
type Outcome<T> = Result<T, Failure>;

/// The amount of each measurement.
struct Scale {
    /// The measured idle time.
    rest: Duration,
    wakeups: usize,
    rounds: usize,
    messages: u64,
}

fn main() -> Outcome<()> {
    let options = Options::from_args();
    let scale = options.scale(
        Scale { rest: Duration::from_millis(50), wakeups: 2, rounds: 1, messages: 100 },
        Scale { rest: Duration::from_secs(3), wakeups: 100, rounds: 7, messages: 100_000 },
    );
    let cores = Cores::find();
    let mut state = Rounds::new();
    let loopback = measure_idle("loopback", loopback_ports, &scale, cores, &mut state)?;
    let af_xdp = measure_af_xdp(&scale, cores, &mut state)?;
    let rings = measure_rings(&scale, &mut state)?;
    let results = json!({ "bench": "idle", "loopback": loopback, "af_xdp": af_xdp, "rings": rings });
    println!("each time of rest and each wake-up is a round of its own:");
    options.save_with(&state, results)?;
    Ok(())
}

/// The cores of the threads; any, if this process has only one core.
#[derive(Clone, Copy)]
struct Cores {
    /// The sender, and the thread that waits for the completion.
    near: Option<usize>,
    /// The runner.
    far: Option<usize>,
}

impl Cores {
    fn find() -> Cores {
        let ids = core_affinity::get_core_ids().unwrap_or_default();
        match &ids[..] {
            [near, far, ..] => Cores { near: Some(near.id), far: Some(far.id) },
            _ => {
                println!("one core for all threads: wake-ups wait for time slices");
                Cores { near: None, far: None }
            }
        }
    }
}

/// Pins the calling thread to that core.
fn settle(core: Option<usize>) -> Result<(), Error> {
    core.map_or(Ok(()), pin_to_core)
}

fn loopback_ports() -> Outcome<Ports> {
    let (a, b) = loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    Ok([Box::new(a), Box::new(b)])
}

/// The same between namespaces; null if unavailable, with the reason printed.
#[cfg(feature = "af_xdp")]
fn measure_af_xdp(scale: &Scale, cores: Cores, state: &mut Rounds) -> Outcome<Value> {
    use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
    let Some(pair) = Namespaces::new(1500) else { return Ok(Value::Null) };
    let open = || Ok(Box::new(AfXdp::open(&AfXdpConfig::new(VETH))?) as Box<dyn PacketDriver>);
    let ports = || {
        let a: Result<_, ferroce::driver::Error> = pair.in_a(open);
        Ok([a?, pair.in_b(open)?])
    };
    measure_idle("af_xdp on veth", ports, scale, cores, state)
}

#[cfg(not(feature = "af_xdp"))]
fn measure_af_xdp(_: &Scale, _: Cores, _: &mut Rounds) -> Outcome<Value> {
    println!("skipped: built without the AF_XDP driver");
    Ok(Value::Null)
}

/// Idle share and wake-ups, with all strategies in turn.
fn measure_idle(
    name: &str,
    ports: impl Fn() -> Outcome<Ports>,
    scale: &Scale,
    cores: Cores,
    state: &mut Rounds,
) -> Outcome<Value> {
    println!("{name}: a runner with nothing to do, and its first packet after {SILENCE:?} of silence");
    println!(
        "{:>12} {:>14} {:>14} {:>8} {:>12} {:>15} {:>8}",
        "runner", "share of core", "served p50 us", "p99 us", "over 100 us", "delivered p50", "p99 us"
    );
    let mut rows = Vec::new();
    let mut kernel = Vec::new();
    for (way, idle, waits) in WAYS {
        let setup = Setup { path_mtu: ferroce::PathMtu::Mtu1024, ..Setup::default() };
        let [mut near, far] = Pair::new(ports()?, &setup)?.ends;
        let End { context, cq, qps, mr, .. } = far;
        let qp = qps[0];
        let runner = Runner::start(context, &RunnerConfig::default().idle(idle).core(cores.far))?;
        let mut handle = runner.handle(&HandleConfig::default().idle(waits))?;
        handle.deliver(cq)?;

        let share = state.hold(1, |_| share_at_rest(&mut handle, scale.rest))?[0];
        let sge = ferroce::Sge { mr, offset: 0, length: 8 };
        let wakeups = state.hold(scale.wakeups, |n| {
            let receive = ReceiveWorkRequest { wr_id: n as u64, sges: &[sge] };
            handle.post_recv(qp, &receive)?;
            let times = wake_up(&mut near, &mut handle, n as u64, cores.near)?;
            let by_kernel = if way == "block" { Some(wake_by_kernel(cores)?) } else { None };
            Outcome::Ok((times, by_kernel))
        })?;
        kernel.extend(wakeups.iter().filter_map(|(_, by_kernel)| *by_kernel));
        let (mut served, mut times): (Vec<_>, Vec<_>) = wakeups.into_iter().map(|(times, _)| times).unzip();
        let [served_p50, served_p99] = percentiles(&mut served);
        let [p50, p99] = percentiles(&mut times);
        let late = served.iter().filter(|time| **time > 100.0).count();
        println!(
            "{way:>12} {:>12.3} % {served_p50:>14.1} {served_p99:>8.1} {late:>5} of {:>3} {p50:>15.1} {p99:>8.1}",
            share * 100.0,
            served.len()
        );
        rows.push(json!({
            "idle": way, "share": share, "served_p50_us": served_p50, "served_p99_us": served_p99,
            "over_100_us": late, "wakeups": served.len(), "delivered_p50_us": p50, "delivered_p99_us": p99,
        }));
        drop(runner);
    }
    let [p50, p99] = percentiles(&mut kernel);
    let late = kernel.iter().filter(|time| **time > 100.0).count();
    println!("{:>12} {:>14} {p50:>14.1} {p99:>8.1} {late:>5} of {:>3}", "kernel's UDP", "", kernel.len());
    println!();
    Ok(json!({ "rows": rows, "kernel": { "p50_us": p50, "p99_us": p99, "over_100_us": late } }))
}

/// The share of a core that the runner's thread uses in this time.
fn share_at_rest(handle: &mut RunnerHandle, time: Duration) -> Result<f64, Error> {
    let (start, cpu) = (Instant::now(), handle.call(|_| CpuTime::start())?);
    thread::sleep(time);
    let used = handle.call(move |_| cpu.each(1))?;
    Ok(used / start.elapsed().as_nanos() as f64)
}

/// Microseconds from the peer's post to the acknowledgement, and to the completion in a thread that waits for it.
fn wake_up(near: &mut End, handle: &mut RunnerHandle, n: u64, core: Option<usize>) -> Outcome<(f64, f64)> {
    thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            settle(core)?;
            let delivery = handle.wait(LONG)?;
            let time = Instant::now();
            Ok::<_, Error>((completion(delivery), time))
        });
        let sender = scope.spawn(move || {
            settle(core)?;
            thread::sleep(SILENCE);
            let mut poller = Poller::spinning();
            let op = SendOp::SendWithImm(n as u32);
            let data = Data::Inline(&[0; 8]);
            let sent = Instant::now();
            let wr = SendWorkRequest { wr_id: n, op, data, flags: SendFlags::SIGNALED };
            near.context.post_send(near.qps[0], &wr)?;
            while near.context.poll_cq(near.cq)?.is_none() {
                poller.poll(&mut near.context)?;
            }
            Ok::<_, Error>((sent, Instant::now()))
        });
        let (sent, answered) = sender.join().map_err(|_| "the sending thread panicked")??;
        let (wc, woken) = waiter.join().map_err(|_| "the waiting thread panicked")??;
        assert_eq!((wc.status, wc.immediate), (WcStatus::Success, Some(n as u32)));
        let micros = |end: Instant| (end - sent).as_nanos() as f64 / 1000.0;
        Ok((micros(answered), micros(woken)))
    })
}

/// The same with a datagram and a thread that blocks in `recv`.
fn wake_by_kernel(cores: Cores) -> Outcome<f64> {
    let (near, far) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    let to = far.local_addr()?;
    far.set_read_timeout(Some(LONG))?;
    thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            settle(cores.far)?;
            far.recv(&mut [0; 8])?;
            Ok::<_, Failure>(Instant::now())
        });
        let sender = scope.spawn(move || {
            settle(cores.near)?;
            thread::sleep(SILENCE);
            let sent = Instant::now();
            near.send_to(&[0; 8], to)?;
            Ok::<_, Failure>(sent)
        });
        let sent = sender.join().map_err(|_| "the sending thread panicked")??;
        let woken = waiter.join().map_err(|_| "the waiting thread panicked")??;
        Ok((woken - sent).as_nanos() as f64 / 1000.0)
    })
}

fn completion(delivery: Option<Delivery>) -> WorkCompletion {
    match delivery {
        Some(Delivery::Completed { completion, .. }) => completion,
        other => panic!("no completion: {other:?}"),
    }
}

fn percentiles(times: &mut [f64]) -> [f64; 2] {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    [at(0.5), at(0.99)]
}

/// Eight-byte WRITEs of a queue pair to itself: on a context that one thread drives and uses, or on a runner's.
struct Writer {
    cq: Cq,
    qp: Qp,
    remote: RemoteAddress,
}

impl Writer {
    fn new() -> Outcome<(Context, Writer)> {
        // The peer's port is not used: both queue pairs belong to one context.
        use ferroce::{
            Access, AddressVector, Config, Memory, Psn, QpConfig, ReadyToReceive, ReadyToSend, Transition,
        };
        let [port, _] = loopback_ports()?;
        let mut context = Context::open(port, &Config::default())?;
        let (pd, cq) = (context.alloc_pd()?, context.create_cq(1024)?);
        let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = context.register(pd, Memory::zeroed(4096)?, access)?;
        let (gid, qpn) = (context.port().gids[0].gid, context.query_qp(qp)?.qpn);
        let peer = ReadyToReceive::new(AddressVector::new(gid, 0), qpn, Psn::new(0));
        context.modify_qp(qp, Transition::Init { access })?;
        context.modify_qp(qp, Transition::ReadyToReceive(peer))?;
        context.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(Psn::new(0))))?;
        let remote = context.remote(mr)?;
        let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        Ok((context, Writer { cq, qp, remote }))
    }

    fn write(&self, n: u64) -> SendWorkRequest<'static> {
        let (op, data) = (SendOp::Write(self.remote), Data::Inline(&[0; 8]));
        SendWorkRequest { wr_id: n, op, data, flags: SendFlags::SIGNALED }
    }

    /// Nanoseconds per WRITE with `depth` in flight, in this thread.
    fn run_here(&self, context: &mut Context, count: u64, depth: u64) -> Result<f64, Error> {
        let (mut posted, mut ended, mut clock, start) = (0, 0, Clock::start(), Instant::now());
        while ended < count {
            while posted < count && posted - ended < depth {
                context.post_send(self.qp, &self.write(posted))?;
                posted += 1;
            }
            context.poll(clock.now())?;
            while let Some(wc) = context.poll_cq(self.cq)? {
                assert_eq!(wc.status, WcStatus::Success);
                ended += 1;
            }
        }
        Ok(start.elapsed().as_nanos() as f64 / count as f64)
    }

    /// The same through a handle, and the CPU time of its runner.
    fn run_there(&self, handle: &mut RunnerHandle, count: u64, depth: u64) -> Result<(f64, f64), Error> {
        let cpu = handle.call(|_| CpuTime::start())?;
        let (mut posted, mut ended, start) = (0, 0, Instant::now());
        while ended < count {
            while posted < count
                && posted - ended < depth
                && handle.post_send(self.qp, &self.write(posted)).is_ok()
            {
                posted += 1;
            }
            while let Some(delivery) = handle.poll()? {
                assert_eq!(completion(Some(delivery)).status, WcStatus::Success);
                ended += 1;
            }
        }
        let time = start.elapsed().as_nanos() as f64 / count as f64;
        Ok((time, handle.call(move |_| cpu.each(count))?))
    }
}

/// The cost of the rings, compared with one thread that does everything.
fn measure_rings(scale: &Scale, state: &mut Rounds) -> Outcome<Value> {
    println!("8-byte WRITEs of a queue pair to itself over loopback; median of {} rounds", scale.rounds);
    println!(
        "{:>22} {:>14} {:>16} {:>14} {:>20} {:>10}",
        "in flight", "one thread", "through a runner", "ratio", "runner's core, ns", "spread"
    );
    let (mut here, writer) = Writer::new()?;
    let (there, far_writer) = Writer::new()?;
    let runner = Runner::start(there, &RunnerConfig::default().idle(Idle::Spin))?;
    let (there, blocking_writer) = Writer::new()?;
    let blocking = Runner::start(there, &RunnerConfig::default())?;
    let mut rows = Vec::new();
    for (name, runner, far) in [("spin", &runner, &far_writer), ("adaptive", &blocking, &blocking_writer)] {
        let mut handle = runner.handle(&HandleConfig::default().idle(Idle::Spin))?;
        handle.deliver(far.cq)?;
        for depth in [1, 64] {
            let runs = state.hold(scale.rounds, |_| {
                let near = writer.run_here(&mut here, scale.messages, depth)?;
                let (time, cpu) = far.run_there(&mut handle, scale.messages, depth)?;
                Ok::<_, Error>([near, time, cpu])
            })?;
            let [near, rings, core] = Median::of_each(&runs);
            println!(
                "{name:>16} {depth:>5} {:>11.1} ns {:>13.1} ns {:>14.2} {:>20.1} {:>8.0} %",
                near.value,
                rings.value,
                rings.value / near.value,
                core.value,
                rings.spread * 100.0
            );
            rows.push(json!({
                "idle": name, "depth": depth, "one_thread_ns": near.value, "runner_ns": rings.value,
                "ratio": rings.value / near.value, "runner_core_ns": core.value, "spread": rings.spread,
            }));
        }
    }
    Ok(Value::Array(rows))
}
