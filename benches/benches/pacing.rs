//! The accuracy of a rate, and its cost: over AF_XDP and UDP sockets in real time, with ten thousand queue pairs on one
//! core, and in nanoseconds per packet relative to a sender without congestion control.

use std::error::Error;

use ferroce::driver::machine::Rounds;
use ferroce::{Config, CongestionControl, Counter, Dcqcn, PacketDriver, PathMtu, Qp, QpConfig};
use ferroce::{Data, SendFlags, SendOp, SendWorkRequest, Sge};
use ferroce_benches::pair::{Pair, Setup, Writes};
use ferroce_benches::report::{CpuTime, Median, Options};
use ferroce_benches::ring;
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use serde_json::{Value, json};

/// Rates in Mb/s.
const RATES: [u32; 6] = [100, 500, 1000, 2000, 3000, 4000];
/// Ethernet, IPv4, UDP, BTH and ICRC.
const HEADERS: f64 = 14.0 + 20.0 + 8.0 + 12.0 + 4.0;
const QPS: u32 = 10_000;

fn limited(megabits: u32) -> Config {
    let control = Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(megabits);
    Config::default().congestion(CongestionControl::Dcqcn(control)).line_rate(4_000_000_000_000)
}

/// Queue pairs that always have data to send.
struct Stream {
    pair: Pair,
    length: u32,
    outstanding: Vec<u32>,
}

impl Stream {
    fn new(pair: Pair, length: u32) -> Stream {
        let outstanding = vec![0; pair.ends[0].qps.len()];
        Stream { pair, length, outstanding }
    }

    fn post(&mut self, at: usize, qp: Qp) -> Result<(), Box<dyn Error>> {
        let [requester, responder] = &mut self.pair.ends;
        let data = [Sge { mr: requester.mr, offset: 0, length: self.length }];
        let wr = SendWorkRequest {
            wr_id: at as u64,
            op: SendOp::Write(responder.remote),
            data: Data::Sges(&data),
            flags: SendFlags::SIGNALED,
        };
        while self.outstanding[at] < 2 {
            requester.context.post_send(qp, &wr)?;
            self.outstanding[at] += 1;
        }
        Ok(())
    }

    /// Runs for this many nanoseconds. Returns the number of sent packets, and the elapsed nanoseconds.
    fn run(&mut self, nanos: u64) -> Result<(u64, u64), Box<dyn Error>> {
        let qps = self.pair.ends[0].qps.clone();
        for (at, qp) in qps.iter().enumerate() {
            self.post(at, *qp)?;
        }
        let sent = |pair: &Pair| pair.ends[0].context.counters().value(Counter::SentPkts);
        let (start, before) = (self.pair.tick(), sent(&self.pair));
        loop {
            let now = self.pair.tick();
            for end in &mut self.pair.ends {
                end.context.poll(now)?;
            }
            loop {
                let requester = &mut self.pair.ends[0];
                let Some(wc) = requester.context.poll_cq(requester.cq)? else { break };
                if wc.status != ferroce::WcStatus::Success {
                    return Err(format!("a WRITE ended with {:?}", wc.status).into());
                }
                self.outstanding[wc.wr_id as usize] -= 1;
                self.post(wc.wr_id as usize, qps[wc.wr_id as usize])?;
            }
            let gone = now.since(start).as_nanos() as u64;
            if gone >= nanos {
                return Ok((sent(&self.pair) - before, gone));
            }
        }
    }
}

/// Each rate over each driver, in turn; null if unavailable, with the reason printed.
fn measure_drivers(rounds: usize, nanos: u64, state: &mut Rounds) -> Result<Value, Box<dyn Error>> {
    println!("rate of one queue pair, WRITE of 64 KiB, path MTU 1024; median of {rounds} rounds");
    println!("{:<10} {:>10} {:>10} {:>8} {:>8}", "driver", "Mb/s", "kept", "off", "spread");
    let mut rows = Vec::new();
    for driver in ["af_xdp", "udp"] {
        for rate in RATES {
            let Some(namespaces) = Namespaces::new(1500) else { return Ok(Value::Null) };
            let open = || -> Result<Box<dyn PacketDriver>, ferroce::driver::Error> {
                Ok(match driver {
                    #[cfg(feature = "af_xdp")]
                    "af_xdp" => {
                        use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
                        Box::new(AfXdp::open(&AfXdpConfig::new(VETH))?)
                    }
                    _ => {
                        use ferroce::driver::udp::{Udp, UdpConfig};
                        Box::new(Udp::open(&UdpConfig::of_interface(VETH)?)?)
                    }
                })
            };
            let ports = [namespaces.in_a(open)?, namespaces.in_b(open)?];
            let setup =
                Setup { config: limited(rate), path_mtu: PathMtu::Mtu1024, timeout: 18, ..Setup::default() };
            let mut stream = Stream::new(Pair::new(ports, &setup)?.in_real_time(), 1 << 16);
            stream.run(nanos / 5)?;
            let runs = state.hold(rounds, |_| {
                let (packets, nanos) = stream.run(nanos)?;
                Ok::<_, Box<dyn Error>>(packets as f64 * 8.0 * (HEADERS + 1024.0) / nanos as f64 * 1000.0)
            })?;
            let Median { value, spread } = Median::of(runs);
            let off = value / f64::from(rate) - 1.0;
            println!("{driver:<10} {rate:>10} {value:>10.1} {:>7.2}% {:>7.1}%", off * 100.0, spread * 100.0);
            rows.push(json!({ "driver": driver, "rate": rate, "kept": value, "off": off, "spread": spread }));
        }
    }
    println!();
    Ok(Value::from(rows))
}

fn minimal(pd: ferroce::Pd, cq: ferroce::Cq) -> QpConfig {
    QpConfig::rc(pd, cq).max_send_wr(2).max_recv_wr(1).max_send_sge(1).max_recv_sge(1).max_inline_data(0)
}

/// Ten thousand queue pairs at 1 Mb/s each, both ends on one core.
fn measure_many(rounds: usize, nanos: u64, state: &mut Rounds) -> Result<Value, Box<dyn Error>> {
    let setup = Setup {
        config: limited(1),
        qps: QPS,
        qp_config: minimal,
        cqes: 2 * QPS,
        max_rd_atomic: 0,
        timeout: 20,
        ..Setup::default()
    };
    let mut stream = Stream::new(Pair::new(ring::ports(), &setup)?.in_real_time(), 4096);
    stream.run(nanos)?;
    let sums = state.hold(rounds, |_| {
        let (packets, nanos) = stream.run(nanos)?;
        Ok::<_, Box<dyn Error>>(packets as f64 * 8.0 * (HEADERS + 4096.0) / nanos as f64)
    })?;
    let (sum, due) = (Median::of(sums), f64::from(QPS) / 1000.0);
    println!(
        "{QPS} queue pairs at 1 Mb/s each: {:.3} Gb/s of {due:.0} ({:+.2}%), spread {:.1}%",
        sum.value,
        (sum.value / due - 1.0) * 100.0,
        sum.spread * 100.0
    );
    drop(stream);
    // A core that spins is always busy. In virtual time, polled every µs, the run takes as long as the work.
    let mut stream = Stream::new(Pair::new(ring::ports(), &setup)?, 4096);
    stream.run(nanos)?;
    let runs = state.hold(rounds, |_| {
        let cpu = CpuTime::start();
        let (count, nanos) = stream.run(nanos)?;
        let nanoseconds = cpu.each(1);
        let poll = idle_poll(&mut stream.pair)?;
        Ok::<_, Box<dyn Error>>([nanoseconds / nanos as f64, nanoseconds / count as f64, poll])
    })?;
    let one = idle_poll(&mut Pair::new(ring::ports(), &Setup { qps: 1, ..setup })?)?;
    let [load, packet, poll] = Median::of_each(&runs);
    println!(
        "CPU of both ends, polled each µs: {:.1}% of a core, spread {:.1}%; {:.0} ns a packet with its ACK. A poll with \
         nothing due: {:.1} ns, of one queue pair {one:.1} ns",
        load.value * 100.0,
        load.spread * 100.0,
        packet.value,
        poll.value
    );
    Ok(json!({
        "qps": QPS, "sum": sum.value, "due": due, "spread": sum.spread,
        "cpu": load.value, "ns_a_packet": packet.value, "idle_poll_ns": poll.value, "idle_poll_of_one_ns": one,
    }))
}

/// Nanoseconds of a poll without work left.
fn idle_poll(pair: &mut Pair) -> Result<f64, Box<dyn Error>> {
    const POLLS: u64 = 100_000;
    let (now, requester) = (pair.now, &mut pair.ends[0]);
    for _ in 0..1000 {
        requester.context.poll(now)?;
    }
    let cpu = CpuTime::start();
    for _ in 0..POLLS {
        requester.context.poll(now)?;
    }
    Ok(cpu.each(POLLS))
}

/// Nanoseconds per packet with congestion control at a line rate that never delays it, relative to without.
fn measure_cost(rounds: usize, packets: u64, state: &mut Rounds) -> Result<Value, Box<dyn Error>> {
    let mut rows = Vec::new();
    println!("nanoseconds a packet, both ends on one core; median of {rounds} rounds");
    println!("{:<26} {:>8} {:>8} {:>8} {:>8}", "", "off", "on", "more", "spread");
    for (name, length) in [("WRITE of 64 bytes", 64), ("WRITE of 4096 bytes", 4096)] {
        let make = |config: Config| Pair::new(ring::ports(), &Setup { config, ..Setup::default() });
        let mut off = make(Config::default())?;
        let mut on = make(limited(0))?;
        let writes = Writes { active: &[0], length, depth: 64, count: packets };
        let mut round = || {
            let start = CpuTime::start();
            off.write(&writes)?;
            let without = start.each(packets);
            let start = CpuTime::start();
            on.write(&writes)?;
            let with = start.each(packets);
            Ok::<_, Box<dyn Error>>([without, with, with - without])
        };
        // Warm-up.
        round()?;
        let runs = state.hold(rounds, |_| round())?;
        let [off, on, Median { value: more, .. }] = Median::of_each(&runs);
        println!("{name:<26} {:>8.1} {:>8.1} {more:>+8.1} {:>7.0}%", off.value, on.value, on.spread * 100.0);
        rows.push(
            json!({ "write": length, "off": off.value, "on": on.value, "more": more, "spread": on.spread }),
        );
    }
    println!();
    Ok(Value::from(rows))
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::from_args();
    let (rounds, nanos, packets) = options.scale((1, 50_000_000, 10_000), (7, 500_000_000, 300_000));
    let mut state = Rounds::new();
    let drivers = measure_drivers(rounds, nanos, &mut state)?;
    let cost = measure_cost(2 * rounds + 1, packets, &mut state)?;
    let many = measure_many(rounds, nanos, &mut state)?;
    options.save_with(&state, json!({ "drivers": drivers, "cost": cost, "many": many }))?;
    Ok(())
}
