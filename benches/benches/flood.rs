//! A good queue pair beside a flood of junk, on one core over a ring in memory: what a frame of the
//! flood costs, by its kind and length, and what is left to the good one.
//!
//! The budget: a core that spends `j` nanoseconds on a frame of junk and `g` on a good packet gives,
//! with `k` frames of junk beside each good packet, one good packet each `g + k·j`. The table says how
//! near to that the good queue pair came. The flood is made on the same core, so `j` is there with what
//! it takes to put a frame into the ring.

use ferroce::wire::{Encapsulation, PathAddress};
use ferroce::{Counter, MacAddr, Nanos, QpAttributes, QpState};
use ferroce_benches::pair::{Pair, Setup, Writes};
use ferroce_benches::report::{CpuTime, Median, Options, resident_bytes};
use ferroce_benches::ring::{self, Inlet};
use junk::{Junk, Random, Target};
use serde_json::json;

#[path = "../../stack/tests/junk/mod.rs"]
#[expect(unreachable_pub, reason = "a module shared with the tests")]
mod junk;

const ROUNDS: usize = 9;
const PACKETS: u64 = 40_000;
/// Bytes of a good WRITE, and of the payload of junk in the mix.
const LENGTH: u32 = 1024;
/// Frames of junk for each good packet; the last is as many as the ring takes.
const FLOODS: [u64; 4] = [1, 4, 16, u64::MAX];

/// Frames for the responder, over and over.
struct Flood {
    inlet: Inlet,
    frames: Vec<(Junk, Vec<u8>)>,
    next: usize,
    sent: [u64; Junk::ALL.len()],
}

impl Flood {
    /// Puts up to `count` frames into the ring; returns how many found room.
    fn pour(&mut self, count: u64) -> u64 {
        for poured in 0..count {
            let (kind, frame) = &self.frames[self.next % self.frames.len()];
            if !self.inlet.push(frame) {
                return poured;
            }
            self.sent[*kind as usize] += 1;
            self.next += 1;
        }
        count
    }
}

/// Frames of these kinds, in any order.
fn frames(pair: &Pair, kinds: &[Junk], payload: usize) -> Result<Vec<(Junk, Vec<u8>)>, ferroce::Error> {
    let [peer, victim] = &pair.ends;
    let path = PathAddress {
        source_mac: MacAddr(peer.context.capabilities().mac),
        destination_mac: MacAddr(victim.context.capabilities().mac),
        vlan: None,
        source: peer.context.port().gids[0].gid,
        destination: victim.context.port().gids[0].gid,
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
    Ok(frames)
}

/// Nanoseconds of a frame of `flood` that comes alone: what the responder spends on it, and the same
/// with putting it into the ring.
fn cost(pair: &mut Pair, flood: &mut Flood, rings: u64) -> Result<(f64, f64), ferroce::Error> {
    let (mut handled, mut whole) = (0.0, 0.0);
    for _ in 0..rings {
        let start = CpuTime::start();
        let count = flood.pour(u64::MAX);
        let poured = CpuTime::start();
        pair.now = Nanos(pair.now.0 + 1000);
        while pair.ends[1].context.poll(pair.now)? > 0 {}
        handled += poured.each(count * rings);
        whole += start.each(count * rings);
    }
    Ok((handled, whole))
}

/// What came of good packets beside a flood.
struct Run {
    /// Nanoseconds a good packet, with its share of the flood.
    good: f64,
    /// Frames of junk for a good packet.
    ratio: f64,
}

fn run(pair: &mut Pair, flood: &mut Flood, times: u64, packets: u64) -> Result<Run, ferroce::Error> {
    let mut poured = 0;
    let start = CpuTime::start();
    let writes = Writes { active: &[0], length: LENGTH, depth: 16, count: packets };
    pair.write_beside(&writes, &mut |posted| {
        poured += flood.pour(times.saturating_mul(posted).saturating_sub(poured));
    })?;
    Ok(Run { good: start.each(packets), ratio: poured as f64 / packets as f64 })
}

/// What a queue pair is like, but for its progress.
fn still(attributes: QpAttributes, progress: QpAttributes) -> QpAttributes {
    QpAttributes { rq_psn: progress.rq_psn, sq_psn: progress.sq_psn, ..attributes }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_args();
    let (rounds, packets) = options.scale((1, 1_000), (ROUNDS, PACKETS));
    let ports = ring::ports();
    let inlet = ports[1].inlet();
    let mut pair = Pair::new(ports, &Setup::default())?;
    let flood = |frames| Flood { inlet: inlet.clone(), frames, next: 0, sent: Default::default() };

    println!("nanoseconds a frame of junk, by its payload; median of {rounds} runs");
    let payloads = [0, 64, 1024, 4096];
    println!("{:<16} {:>10} {:>10} {:>10} {:>10}", "", payloads[0], payloads[1], payloads[2], payloads[3]);
    let mut costs = Vec::new();
    let mut sent = [0; Junk::ALL.len()];
    for kind in Junk::ALL {
        let mut row = Vec::new();
        for payload in payloads {
            let mut flood = flood(frames(&pair, &[kind], payload)?);
            let runs = (0..rounds).map(|_| Ok(cost(&mut pair, &mut flood, 4)?.0));
            let runs = runs.collect::<Result<Vec<_>, ferroce::Error>>()?;
            row.push(Median::of(runs).value);
            sent[kind as usize] += flood.sent[kind as usize];
        }
        let name = format!("{kind:?}");
        println!("{name:<16} {:>10.1} {:>10.1} {:>10.1} {:>10.1}", row[0], row[1], row[2], row[3]);
        costs.push(json!({ "kind": name, "payloads": payloads, "ns": row }));
    }

    let mut mix = flood(frames(&pair, &Junk::ALL, LENGTH as usize)?);
    // To warm up, and to have everything allocated that ever will be.
    for times in FLOODS {
        run(&mut pair, &mut mix, times, packets / 10)?;
    }
    let before = [0, 1].map(|n: usize| pair.ends[n].context.query_qp(pair.ends[n].qps[0]));
    let resident = resident_bytes();
    let mut results: [Vec<Run>; FLOODS.len()] = Default::default();
    let (mut good, mut junk) = (Vec::with_capacity(rounds), Vec::with_capacity(rounds));
    results.iter_mut().for_each(|runs| runs.reserve(rounds));
    let mut outcome = Ok(());
    let allocated = allocation_counter::measure(|| {
        outcome = (0..rounds).try_for_each(|_| {
            good.push(run(&mut pair, &mut mix, 0, packets)?.good);
            junk.push(cost(&mut pair, &mut mix, 16)?.1);
            for (times, runs) in FLOODS.into_iter().zip(&mut results) {
                runs.push(run(&mut pair, &mut mix, times, packets)?);
                // What is left in the ring belongs to nobody.
                while pair.ends[1].context.poll(pair.now)? > 0 {}
            }
            Ok::<_, ferroce::Error>(())
        });
    });
    outcome?;
    let grown = resident_bytes() as i64 - resident as i64;

    println!();
    let (good, junk) = (Median::of(good), Median::of(junk));
    println!(
        "WRITEs of {LENGTH} bytes beside all kinds of junk with {LENGTH} bytes of payload, one core for all;"
    );
    println!(
        "alone {:.0} ns a good packet (spread {:.0} %) and {:.0} ns a frame of junk ({:.0} %), making it included",
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
    for runs in results {
        let ratio = Median::of(runs.iter().map(|run| run.ratio).collect()).value;
        let Median { value, spread } = Median::of(runs.iter().map(|run| run.good).collect());
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

    println!();
    println!(
        "allocations while it went on: {}; resident memory grew by {grown} bytes",
        allocated.count_total
    );
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    // Linux counts pages in batches.
    assert!(grown < 1 << 20, "memory grew by {grown} bytes");
    let counters = pair.ends[1].context.counters();
    for kind in Junk::ALL {
        let (sent, counted) = (sent[kind as usize] + mix.sent[kind as usize], counters.value(kind.counter()));
        println!("{:<24} {sent:>12} sent {counted:>12} counted", kind.counter().name());
        assert_eq!(sent, counted, "{kind:?}");
    }
    for (end, before) in pair.ends.iter().zip(before) {
        let (before, after) = (before?, end.context.query_qp(end.qps[0])?);
        assert_eq!(still(after, before), before);
        assert_eq!(after.state, QpState::Rts);
        assert_eq!(end.context.counters().value(Counter::RetransmittedPkts), 0);
    }
    println!("the good queue pair: nothing retransmitted, nothing changed but its PSNs");
    Ok(options.save(&json!({
        "bench": "flood", "good_ns": good.value, "junk_ns": junk.value, "costs": costs, "floods": rows,
        "allocations": allocated.count_total, "resident_growth": grown,
    }))?)
}
