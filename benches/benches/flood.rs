//! A good queue pair during a flood of junk frames, all on one core: the cost of a junk frame, by kind and length, and
//! the rate that remains for the good queue pair.
//!
//! The budget: if a junk frame takes `j` nanoseconds and a good packet `g`, and each good packet comes with `k` junk
//! frames, there is one good packet per `g + k·j`. The table compares the good queue pair with that. The flood is sent
//! by the same core, so `j` includes the time to send it.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(feature = "af_xdp")]
use std::time::Duration;

use ferroce::driver::machine::Rounds;
use ferroce::driver::{self, EitherSource, FilteredSource, FrameSource};
use ferroce::wire::{Encapsulation, PathAddress};
use ferroce::{Counter, MacAddr, Nanos, PacketDriver, PathMtu, QpAttributes, QpState};
use ferroce_benches::pair::{Pair, Setup, Writes};
use ferroce_benches::report::{CpuTime, Median, Options, resident_bytes};
use ferroce_benches::ring;
#[cfg(feature = "af_xdp")]
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::junk::{Junk, Target};
#[cfg(feature = "af_xdp")]
use ferroce_test_support::strangers;
use serde_json::{Value, json};

const ROUNDS: usize = 9;
const PACKETS: u64 = 40_000;
/// Bytes of a good WRITE, and of the payload of junk frames in the mix.
const LENGTH: u32 = 1024;

/// Of the requester and the responder.
type Ports = [Box<dyn PacketDriver>; 2];

/// Frames for the responder, repeated.
#[derive(Default)]
struct Flood {
    frames: Vec<(Junk, Vec<u8>)>,
    next: usize,
    sent: [u64; Junk::ALL.len()],
    /// The number of junk frames after each good frame.
    times: u64,
    /// Junk frames to send before the next good one.
    due: u64,
    /// Junk frames to send at the end of a burst, as long as the port accepts them.
    allowance: u64,
}

impl Flood {
    fn total(&self) -> u64 {
        self.sent.iter().sum()
    }

    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let (kind, frame) = self.frames.get(self.next)?;
        buffer.get_mut(..frame.len())?.copy_from_slice(frame);
        self.sent[*kind as usize] += 1;
        self.next = (self.next + 1) % self.frames.len();
        Some(frame.len())
    }
}

/// A port whose peer is flooded.
struct Flooding {
    port: Box<dyn PacketDriver>,
    flood: Arc<Mutex<Flood>>,
}

impl driver::Wrapper for Flooding {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.port
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.port
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let mut flood = lock(&self.flood);
        let mut allowance = flood.allowance;
        let flood = RefCell::new(&mut *flood);
        let mut due = |buffer: &mut [u8]| {
            let mut flood = flood.borrow_mut();
            flood.due = flood.due.checked_sub(1)?;
            flood.write(buffer)
        };
        let mut good = FilteredSource::new(source, |_| {
            let mut flood = flood.borrow_mut();
            flood.due = flood.times;
            true
        });
        let mut idle = |buffer: &mut [u8]| {
            allowance = allowance.checked_sub(1)?;
            flood.borrow_mut().write(buffer)
        };
        let mut rest = EitherSource::new(&mut good, &mut idle);
        (*self.port).tx_burst(now, &mut EitherSource::new(&mut due, &mut rest))
    }
}

fn lock(flood: &Mutex<Flood>) -> MutexGuard<'_, Flood> {
    flood.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A good queue pair and the flood.
struct Scene {
    pair: Pair,
    flood: Arc<Mutex<Flood>>,
    /// The most junk frames in a burst.
    burst: u64,
    /// The frames that were lost between the two ports, by the counters there.
    lost_on_the_way: Box<dyn Fn() -> u64>,
}

/// The results for good packets during a flood.
#[derive(Clone, Copy, Default)]
struct Run {
    /// Nanoseconds per good packet, including its share of the flood.
    good: f64,
    /// Junk frames per good packet.
    ratio: f64,
}

impl Scene {
    fn new([requester, responder]: Ports, burst: u64) -> Result<Scene, ferroce::Error> {
        let flood = Arc::new(Mutex::new(Flood::default()));
        let requester = Box::new(Flooding { port: requester, flood: flood.clone() });
        let setup = Setup { path_mtu: PathMtu::Mtu1024, ..Setup::default() };
        let pair = Pair::new([requester as Box<dyn PacketDriver>, responder], &setup)?;
        Ok(Scene { pair, flood, burst, lost_on_the_way: Box::new(|| 0) })
    }

    /// Sets the kinds of junk frames.
    fn set_frames(&mut self, kinds: &[Junk], payload: usize) -> Result<(), ferroce::Error> {
        let [peer, victim] = &self.pair.ends;
        let path = PathAddress {
            source_mac: MacAddr(peer.context.capabilities().mac),
            destination_mac: MacAddr(victim.context.capabilities().mac),
            vlan: None,
            source: peer.gid,
            destination: victim.gid,
            encapsulation: Encapsulation::RoceV2 { source_port: 0xc123 },
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            identification: 0,
        };
        let target = Target { path, qpn: victim.context.query_qp(victim.qps[0])?.qpn, payload };
        let mut random = Random::new(1);
        let mut frames = Vec::new();
        for kind in kinds {
            frames.extend(kind.frames(&target, &mut random).into_iter().map(|frame| (*kind, frame)));
        }
        for n in (1..frames.len()).rev() {
            frames.swap(n, random.below(n as u64 + 1) as usize);
        }
        let mut flood = lock(&self.flood);
        (flood.frames, flood.next) = (frames, 0);
        Ok(())
    }

    /// Nanoseconds of a junk frame without good packets: at the responder alone, and including the sending.
    fn cost(&mut self, bursts: u64) -> Result<(f64, f64), ferroce::Error> {
        let (mut handled, mut whole) = (0.0, 0.0);
        lock(&self.flood).allowance = self.burst;
        for _ in 0..bursts {
            let before = lock(&self.flood).total();
            let now = self.pair.tick();
            let start = CpuTime::start();
            self.pair.ends[0].context.poll(now)?;
            let sent = CpuTime::start();
            self.drain()?;
            let count = lock(&self.flood).total() - before;
            handled += sent.each(count * bursts);
            whole += start.each(count * bursts);
        }
        lock(&self.flood).allowance = 0;
        Ok((handled, whole))
    }

    /// Executes good WRITEs with `times` as many junk frames; `None` is as many as possible.
    fn run(&mut self, times: Option<u64>, packets: u64) -> Result<Run, ferroce::Error> {
        let before = {
            let mut flood = lock(&self.flood);
            flood.times = times.unwrap_or(0);
            flood.allowance = if times.is_none() { self.burst } else { 0 };
            flood.total()
        };
        let start = CpuTime::start();
        self.pair.write(&Writes { active: &[0], length: LENGTH, depth: 16, count: packets })?;
        let good = start.each(packets);
        let mut flood = lock(&self.flood);
        (flood.times, flood.due, flood.allowance) = (0, 0, 0);
        let ratio = (flood.total() - before) as f64 / packets as f64;
        drop(flood);
        self.drain()?;
        Ok(Run { good, ratio })
    }

    /// Receives the frames in flight.
    fn drain(&mut self) -> Result<(), ferroce::Error> {
        while self.pair.ends[1].context.poll(self.pair.now)? > 0 {}
        Ok(())
    }

    fn attributes(&self) -> Result<[QpAttributes; 2], ferroce::Error> {
        let [a, b] = &self.pair.ends;
        Ok([a.context.query_qp(a.qps[0])?, b.context.query_qp(b.qps[0])?])
    }

    /// The cost of each kind.
    fn measure_kinds(&mut self, rounds: usize, state: &mut Rounds) -> Result<Value, ferroce::Error> {
        const PAYLOADS: [usize; 4] = [0, 64, 1024, 4096];
        let runs = state.hold(rounds, |_| {
            let mut costs = [[0.0; PAYLOADS.len()]; Junk::ALL.len()];
            for (kind, costs) in Junk::ALL.into_iter().zip(&mut costs) {
                for (payload, cost) in PAYLOADS.into_iter().zip(costs) {
                    self.set_frames(&[kind], payload)?;
                    *cost = self.cost(4)?.0;
                }
            }
            Ok::<_, ferroce::Error>(costs)
        })?;
        println!(
            "nanoseconds that the responder spends on a frame of junk, by its payload; median of {rounds}"
        );
        println!(
            "{:<16} {:>10} {:>10} {:>10} {:>10}",
            "", PAYLOADS[0], PAYLOADS[1], PAYLOADS[2], PAYLOADS[3]
        );
        let mut rows = Vec::new();
        for (n, kind) in Junk::ALL.into_iter().enumerate() {
            let costs: Vec<_> = runs.iter().map(|costs| costs[n]).collect();
            let row = Median::of_each(&costs).map(|cost| cost.value);
            let name = format!("{kind:?}");
            println!("{name:<16} {:>10.1} {:>10.1} {:>10.1} {:>10.1}", row[0], row[1], row[2], row[3]);
            rows.push(json!({ "kind": name, "payloads": PAYLOADS, "ns": row }));
        }
        Ok(Value::Array(rows))
    }

    /// Good packets during the flood, with checks of side effects.
    fn measure_good(
        &mut self,
        kinds: &[Junk],
        rounds: usize,
        packets: u64,
        state: &mut Rounds,
    ) -> Result<Value, ferroce::Error> {
        /// The last one is as many as possible.
        const FLOODS: [Option<u64>; 4] = [Some(1), Some(4), Some(16), None];
        self.set_frames(kinds, LENGTH as usize)?;
        // Warm-up.
        for times in FLOODS {
            self.run(times, packets / 10)?;
        }
        let (before, resident) = (self.attributes()?, resident_bytes());
        // During the rounds only: measuring the state of the machine starts threads.
        let mut allocated = 0;
        let runs = state.hold(rounds, |_| {
            let (mut alone, mut beside) = ([0.0; 2], [Run::default(); FLOODS.len()]);
            let mut outcome: Result<(), ferroce::Error> = Ok(());
            let counted = allocation_counter::measure(|| {
                outcome = (|| {
                    alone = [self.run(Some(0), packets)?.good, self.cost(64)?.1];
                    FLOODS.into_iter().zip(&mut beside).try_for_each(|(times, run)| {
                        *run = self.run(times, packets)?;
                        Ok(())
                    })
                })();
            });
            allocated += counted.count_total;
            outcome.map(|()| (alone, beside))
        })?;
        let grown = resident_bytes() as i64 - resident as i64;

        let alone: Vec<_> = runs.iter().map(|(alone, _)| *alone).collect();
        let [good, junk] = Median::of_each(&alone);
        println!(
            "alone {:.0} ns a good packet (spread {:.0} %), {:.0} ns a frame of junk ({:.0} %) with sending it",
            good.value,
            good.spread * 100.0,
            junk.value,
            junk.spread * 100.0
        );
        println!(
            "{:>14} {:>12} {:>14} {:>14} {:>10} {:>12} {:>10}",
            "junk per good", "junk/s", "good packets/s", "of those alone", "budget", "to budget", "spread"
        );
        let mut rows = Vec::new();
        for n in 0..FLOODS.len() {
            let median =
                |of: fn(&Run) -> f64| Median::of(runs.iter().map(|(_, beside)| of(&beside[n])).collect());
            let ratio = median(|run| run.ratio).value;
            let Median { value, spread } = median(|run| run.good);
            let (share, budget) = (good.value / value, good.value / (good.value + ratio * junk.value));
            println!(
                "{ratio:>14.2} {:>12.0} {:>14.0} {:>12.1} % {:>8.1} % {:>12.2} {:>8.0} %",
                ratio * 1e9 / value,
                1e9 / value,
                share * 100.0,
                budget * 100.0,
                share / budget,
                spread * 100.0
            );
            rows.push(json!({
                "junk_per_good": ratio, "junk_per_second": ratio * 1e9 / value,
                "good_per_second": 1e9 / value, "share": share, "budget": budget, "spread": spread,
            }));
        }

        println!("allocations meanwhile: {allocated}; resident memory grew by {grown} bytes");
        assert_eq!(allocated, 0);
        // Linux counts pages in batches.
        assert!(grown < 1 << 20, "memory grew by {grown} bytes");
        let dropped = self.dropped();
        for (after, before) in self.attributes()?.into_iter().zip(before) {
            let mut progress = after;
            (progress.rq_psn, progress.sq_psn) = (before.rq_psn, before.sq_psn);
            assert_eq!((progress, after.state), (before, QpState::Rts));
        }
        let retransmitted = self.pair.ends[0].context.counters().value(Counter::RetransmittedPkts);
        println!(
            "the good queue pair: {retransmitted} retransmitted, for {dropped} frames of all together were lost \
             between the ports; nothing changed but its PSNs"
        );
        assert!(retransmitted == 0 || dropped > 0);
        Ok(json!({
            "good_ns": good.value, "junk_ns": junk.value, "rows": rows, "retransmitted": retransmitted,
            "dropped": dropped, "allocations": allocated, "resident_growth": grown,
        }))
    }

    /// Frames that were sent and did not arrive at the responder.
    fn dropped(&self) -> u64 {
        self.pair.ends[1].context.driver_stats().rx_dropped + (self.lost_on_the_way)()
    }

    /// Compares how often each kind was sent and counted; the numbers are equal, unless some were lost.
    fn check_counters(&self) {
        let victim = &self.pair.ends[1].context;
        let lossless = self.dropped() == 0;
        let flood = lock(&self.flood);
        for kind in Junk::ALL {
            let (sent, counted) = (flood.sent[kind as usize], victim.counters().value(kind.counter()));
            println!("{:<24} {sent:>12} sent {counted:>12} counted", kind.counter().name());
            assert!(sent == counted || !lossless && counted < sent, "{kind:?}");
        }
    }
}

/// The good packets between two namespaces; null if unavailable, with the reason printed.
#[cfg(feature = "af_xdp")]
fn measure_af_xdp(rounds: usize, packets: u64, state: &mut Rounds) -> Result<Value, ferroce::Error> {
    use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
    /// The kernel receives the others.
    const KINDS: [Junk; 8] = [
        Junk::WrongIcrc,
        Junk::UnknownOpcode,
        Junk::WrongVersion,
        Junk::UnknownQp,
        Junk::WrongSource,
        Junk::WrongPkey,
        Junk::WrongService,
        Junk::Cnp,
    ];
    let Some(namespaces) = Namespaces::new(1500) else { return Ok(Value::Null) };
    let open = || Ok(Box::new(AfXdp::open(&AfXdpConfig::new(VETH))?) as Box<dyn PacketDriver>);
    let ports: Result<_, driver::Error> = namespaces.in_a(open).and_then(|a| Ok([a, namespaces.in_b(open)?]));
    // More than the responder receives in its turn would be lost in front of it.
    let mut scene = Scene::new(ports?, 48)?;
    scene.pair = scene.pair.in_real_time();
    // A veth stores 256 frames, and drops further ones while the kernel delays their reception.
    scene.lost_on_the_way = Box::new(move || namespaces.in_a(tx_dropped));
    let results = scene.measure_good(&KINDS, rounds, packets, state)?;
    scene.check_counters();
    Ok(results)
}

/// The frames that the interface of this thread's namespace dropped instead of sending.
#[cfg(feature = "af_xdp")]
fn tx_dropped() -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
    let counters = table.lines().find_map(|line| line.trim_start().strip_prefix(VETH)?.strip_prefix(':'));
    // Eight columns of what it received, then bytes, packets, errors and drops of what it sent.
    counters.and_then(|line| line.split_whitespace().nth(11)?.parse().ok()).unwrap_or_default()
}

/// 1,000 connections between two namespaces, and the increase of their round-trip times by requests from nonexistent
/// hosts; client and server run on their own threads.
#[cfg(feature = "af_xdp")]
fn measure_strangers(seconds: u64, state: &mut Rounds) -> Result<Value, ferroce::Error> {
    use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
    let Some(namespaces) = Namespaces::new(1500) else { return Ok(Value::Null) };
    let open = || Ok(Box::new(AfXdp::open(&AfXdpConfig::new(VETH))?) as Box<dyn PacketDriver>);
    let plan = strangers::Plan { connections: 1000, rate: 10_000, time: Duration::from_secs(seconds) };
    let outcomes = state.hold(1, |_| {
        let ports: Result<_, driver::Error> =
            namespaces.in_a(open).and_then(|a| Ok([a, namespaces.in_b(open)?]));
        strangers::run(ports?, &plan)
    })?;
    let outcome = &outcomes[0];
    println!("{outcome}");
    let [alone, beside] = [&outcome.alone, &outcome.beside]
        .map(|l| json!({ "median_us": l.median, "p99_us": l.p99, "max_us": l.max }));
    Ok(json!({
        "alone": alone, "beside": beside, "asked": outcome.asked, "accepted": outcome.accepted,
        "refused": outcome.refused, "retransmitted": outcome.retransmitted,
    }))
}

#[cfg(not(feature = "af_xdp"))]
fn measure_strangers(_: u64, _: &mut Rounds) -> Result<Value, ferroce::Error> {
    println!("skipped: built without the AF_XDP driver");
    Ok(Value::Null)
}

#[cfg(not(feature = "af_xdp"))]
fn measure_af_xdp(_: usize, _: u64, _: &mut Rounds) -> Result<Value, ferroce::Error> {
    println!("skipped: built without the AF_XDP driver");
    Ok(Value::Null)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_args();
    let (rounds, packets) = options.scale((1, 1_000), (ROUNDS, PACKETS));
    let ports = ring::ports().map(|port| Box::new(port) as Box<dyn PacketDriver>);
    let mut scene = Scene::new(ports, u64::MAX)?;
    let mut state = Rounds::new();
    let costs = scene.measure_kinds(rounds, &mut state)?;
    println!();
    println!("WRITEs of {LENGTH} bytes beside junk of all kinds with as much payload, one core for all,");
    println!("over a ring in memory:");
    let ring = scene.measure_good(&Junk::ALL, rounds, packets, &mut state)?;
    scene.check_counters();
    println!();
    println!("the same between namespaces over AF_XDP, the kernel's part included:");
    let af_xdp = measure_af_xdp(rounds, packets / 4, &mut state)?;
    println!();
    println!(
        "8-byte WRITEs of 1,000 connections over AF_XDP beside REQs from absent addresses, accepted as long as there is room:"
    );
    let strangers = measure_strangers(options.scale(2, 10), &mut state)?;
    let results = json!({
        "bench": "flood", "costs": costs, "ring": ring, "af_xdp": af_xdp, "strangers": strangers,
    });
    Ok(options.save_with(&state, results)?)
}
