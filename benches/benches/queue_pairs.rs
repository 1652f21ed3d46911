//! The cost of an idle queue pair: bytes, and nanoseconds per packet of the others; and the cost of receiving from all
//! receive queues of an interface in one context.
//!
//! Ten queue pairs write, with more and more connected idle ones. The sizes take turns within each round, so that other
//! load affects all of them.

use ferroce::driver::machine::Rounds;
use ferroce::{Cq, Error, Pd, QpConfig};
use ferroce_benches::pair::{Pair, Setup, Writes};
use ferroce_benches::report::{CpuTime, Median, Options, resident_bytes};
use ferroce_benches::ring;
#[cfg(feature = "af_xdp")]
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use serde_json::{Value, json};

const ACTIVE: usize = 10;
const ROUNDS: usize = 15;
const PACKETS: u64 = 200_000;
/// Bytes of a WRITE: short, so that the payload takes little of the time.
const LENGTH: u32 = 64;

type Make = fn(Pd, Cq) -> QpConfig;

/// Sixteen work requests in each direction, with one SGE, nothing inline.
fn modest(pd: Pd, cq: Cq) -> QpConfig {
    QpConfig::rc(pd, cq).max_send_wr(16).max_recv_wr(16).max_send_sge(1).max_recv_sge(1).max_inline_data(0)
}

/// The smallest configuration that can send and receive.
fn minimal(pd: Pd, cq: Cq) -> QpConfig {
    modest(pd, cq).max_send_wr(1).max_recv_wr(1)
}

/// The receive queues of the interface, and the queue pairs whose packets arrive on them.
#[cfg(feature = "af_xdp")]
const QUEUES: u32 = 4;
#[cfg(feature = "af_xdp")]
const SPREAD: u32 = 64;

/// The cost of receiving from all queues of an interface relative to one, including the kernel's part: WRITEs of 64
/// queue pairs between two namespaces, in turn. Null if unavailable, with the reason printed.
#[cfg(feature = "af_xdp")]
fn measure_queues(
    rounds: usize,
    packets: u64,
    state: &mut Rounds,
) -> Result<Value, Box<dyn std::error::Error>> {
    use ferroce::PacketDriver;
    use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
    let mut ways = Vec::new();
    let mut namespaces = Vec::new();
    for (name, queues, queue) in [
        ("the one queue of an interface", 1, None),
        ("one of four queues", QUEUES, Some(0)),
        ("all four queues", QUEUES, None),
    ] {
        let Some(pair) = Namespaces::with_queues(1500, queues) else { return Ok(Value::Null) };
        let config = AfXdpConfig::new(VETH).queue(queue);
        let open = || Ok(Box::new(AfXdp::open(&config)?) as Box<dyn PacketDriver>);
        let ports: Result<_, ferroce::driver::Error> =
            pair.in_a(open).and_then(|a| Ok([a, pair.in_b(open)?]));
        let setup = Setup { qps: SPREAD, path_mtu: ferroce::PathMtu::Mtu1024, ..Setup::default() };
        ways.push((name, Pair::new(ports?, &setup)?.in_real_time()));
        namespaces.push(pair);
    }
    let active: Vec<usize> = (0..SPREAD as usize).collect();
    let mut round = || {
        let mut times = [0.0; 3];
        for (time, (_, pair)) in times.iter_mut().zip(&mut ways) {
            let start = CpuTime::start();
            pair.write(&Writes { active: &active, length: LENGTH, depth: 16, count: packets })?;
            *time = start.each(packets);
        }
        Ok::<_, Error>(times)
    };
    // Warm-up.
    round()?;
    let runs = state.hold(rounds, |_| round())?;
    println!();
    println!(
        "nanoseconds a packet over AF_XDP, WRITE of {LENGTH} bytes, {SPREAD} queue pairs; median of {rounds} rounds"
    );
    println!("{:<34} {:>10} {:>8} {:>14} {:>10}", "heard", "ns", "spread", "to the first", "lost");
    let mut rows = Vec::new();
    for (n, (name, pair)) in ways.into_iter().enumerate() {
        let ratio = Median::of(runs.iter().map(|times| times[n] / times[0]).collect()).value;
        let Median { value, spread } = Median::of_each(&runs)[n];
        let lost: u64 = pair.ends.iter().map(|end| end.context.driver_stats().rx_dropped).sum();
        println!("{name:<34} {value:>10.1} {:>7.0}% {ratio:>14.3} {lost:>10}", spread * 100.0);
        rows.push(json!({ "heard": name, "ns": value, "spread": spread, "ratio": ratio, "lost": lost }));
    }
    Ok(Value::from(rows))
}

#[cfg(not(feature = "af_xdp"))]
fn measure_queues(_: usize, _: u64, _: &mut Rounds) -> Result<Value, Box<dyn std::error::Error>> {
    println!("skipped: built without the AF_XDP driver");
    Ok(Value::Null)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_args();
    let sizes = options.scale([10, 100, 1000], [10, 1000, 100_000]);
    let (rounds, packets) = options.scale((1, 10_000), (ROUNDS, PACKETS));
    let most = sizes[2];

    println!("memory of a connected queue pair (of one end)");
    println!("{:<34} {:>8} {:>12} {:>12} {:>12}", "", "number", "allocated B", "resident B", "to make, µs");
    // Kept until the end: freed memory would be missing from the growth of the next one.
    let mut kept = Vec::new();
    let mut memory = Vec::new();
    let kinds: [(&str, Make, u8, u32); 3] = [
        ("minimal: 1+1 WRs, no READs", minimal, 0, most),
        ("modest: 16+16 WRs, 16 READs", modest, 16, most),
        ("default: 128+128 WRs of 4 pieces", QpConfig::rc, 16, most / 20),
    ];
    for (name, qp_config, max_rd_atomic, qps) in kinds {
        let setup = Setup { qps, qp_config, max_rd_atomic, ..Setup::default() };
        let before = resident_bytes();
        let (mut pair, start) = (None, CpuTime::start());
        let counted = allocation_counter::measure(|| pair = Some(Pair::new(ring::ports(), &setup)));
        let micros = start.each(2000 * u64::from(qps));
        let pair = pair.ok_or("was made")??;
        let each = |bytes: f64| bytes / f64::from(2 * qps);
        // Objects that exist once: contexts, rings and so on.
        let empty = Setup { qps: 1, ..setup };
        let fixed =
            allocation_counter::measure(|| drop(std::hint::black_box(Pair::new(ring::ports(), &empty))));
        let allocated = each(counted.bytes_current as f64 - fixed.bytes_max as f64);
        let resident = each(resident_bytes() as f64 - before as f64 - fixed.bytes_max as f64);
        kept.push(pair);
        println!("{name:<34} {qps:>8} {allocated:>12.0} {resident:>12.0} {micros:>12.2}");
        memory.push(json!({
            "config": name, "qps": qps, "allocated_bytes": allocated, "resident_bytes": resident,
            "make_us": micros,
        }));
    }

    drop(kept);

    let mut pairs = Vec::new();
    for qps in sizes {
        let setup = Setup { qps, qp_config: modest, ..Setup::default() };
        // The writing ones are distributed over all.
        let stride = qps as usize / ACTIVE;
        let active: Vec<usize> = (0..ACTIVE).map(|n| n * stride + stride / 2).collect();
        pairs.push((qps, active, Pair::new(ring::ports(), &setup)?));
    }
    let mut round = || {
        let mut times = [0.0; 3];
        for (time, (_, active, pair)) in times.iter_mut().zip(&mut pairs) {
            let start = CpuTime::start();
            pair.write(&Writes { active, length: LENGTH, depth: 16, count: packets })?;
            *time = start.each(packets);
        }
        Ok::<_, Error>(times)
    };
    // Warm-up.
    round()?;
    let mut state = Rounds::new();
    let runs = state.hold(rounds, |_| round())?;
    println!();
    println!(
        "nanoseconds a packet, WRITE of {LENGTH} bytes, {ACTIVE} queue pairs active; median of {rounds} rounds"
    );
    println!("{:>10} {:>10} {:>8} {:>14}", "connected", "ns", "spread", "to the least");
    let mut rows = Vec::new();
    for (n, qps) in sizes.into_iter().enumerate() {
        // Round by round, since the machine is slower in some.
        let ratio = Median::of(runs.iter().map(|times| times[n] / times[0]).collect()).value;
        let Median { value, spread } = Median::of_each(&runs)[n];
        println!("{qps:>10} {value:>10.1} {:>7.0}% {ratio:>14.3}", spread * 100.0);
        rows.push(json!({ "connected": qps, "ns": value, "spread": spread, "ratio": ratio }));
    }
    let queues = measure_queues(rounds, packets, &mut state)?;
    let results = json!({ "bench": "queue_pairs", "memory": memory, "time": rows, "queues": queues });
    Ok(options.save_with(&state, results)?)
}
