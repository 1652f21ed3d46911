//! Several queue pairs over one simulated link that marks, with and without congestion control, in virtual time.

use std::time::Duration;

use ferroce::driver::sim::{EcnConfig, LinkConfig};
use ferroce::*;
use ferroce_test_support::pair::{Pair, Setup};

const LINE_RATE: u64 = 25_000_000_000;
const MESSAGE: u32 = 1 << 17;
/// Outstanding messages of a queue pair.
const OUTSTANDING: u64 = 4;
/// Ethernet, IPv4, UDP, BTH and ICRC, and the overhead on the link.
const FRAME: u64 = 4096 + 14 + 20 + 8 + 12 + 4 + 24;
/// After this time the measured values are stable.
const START_UP: u64 = 40_000_000;
const END: u64 = 100_000_000;

/// The results of a run, after the start-up.
struct Outcome {
    /// Acknowledged payload, as a fraction of the link's capacity.
    utilisation: f64,
    /// Jain's fairness index of the queue pairs.
    fairness: f64,
    /// Bytes sent and not arrived.
    mean_queue: f64,
    max_queue: f64,
    max_queue_at_start: f64,
    marked: u64,
    cnps: u64,
    dropped: u64,
    retransmitted: u64,
}

fn run(qps: usize, control: fn(Config) -> Config) -> Outcome {
    // Kmin, Kmax and Pmax as with the preset zhu25p in the published simulator.
    let link = LinkConfig::default()
        .delay(Duration::from_micros(1))
        .rate(LINE_RATE)
        .queue_limit(4 << 20)
        .ecn(EcnConfig::new(5150, 206_000, 0.01));
    let setup = Setup { qps, config: control, path_mtu: PathMtu::Mtu4096, timeout: 14, ..Setup::default() };
    let mut pair = Pair::new(5, link, setup);
    let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
    let start = pair.now.0;
    let (mut posted, mut done) = (vec![0; qps], vec![0_u64; qps]);
    let (mut queue, mut last) = ([0.0_f64; 3], start);
    while pair.now.0 < start + END {
        let end = &mut pair.ends[0];
        for (at, qp) in end.qps.iter().enumerate() {
            while posted[at] < OUTSTANDING {
                let data = [Sge { mr: end.mr, offset: 0, length: MESSAGE }];
                let (data, flags) = (Data::Sges(&data), SendFlags::SIGNALED);
                let wr = SendWorkRequest { wr_id: at as u64, op: SendOp::Write(remote), data, flags };
                end.context.post_send(*qp, &wr).unwrap();
                posted[at] += 1;
            }
        }
        assert!(pair.step());
        let (now, settled) = (pair.now.0, pair.now.0 > start + START_UP);
        let end = &mut pair.ends[0];
        while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
            assert_eq!(wc.status, WcStatus::Success);
            posted[wc.wr_id as usize] -= 1;
            done[wc.wr_id as usize] += u64::from(settled);
        }
        let sent = end.context.counters().value(Counter::SentPkts);
        let under_way = sent.saturating_sub(pair.ends[1].context.counters().value(Counter::RcvdPkts)) * FRAME;
        if settled {
            queue[0] += under_way as f64 * (now - last) as f64;
            queue[1] = queue[1].max(under_way as f64);
        } else {
            queue[2] = queue[2].max(under_way as f64);
        }
        last = now;
    }
    let bytes = done.iter().map(|done| *done as f64 * f64::from(MESSAGE));
    let (sum, squares) =
        bytes.fold((0.0, 0.0), |(sum, squares), bytes| (sum + bytes, squares + bytes * bytes));
    let time = (END - START_UP) as f64 / 1e9;
    let counters = pair.ends[0].context.counters();
    Outcome {
        utilisation: 8.0 * sum / time / (LINE_RATE as f64 * 4096.0 / FRAME as f64),
        fairness: sum * sum / (qps as f64 * squares),
        mean_queue: queue[0] / (END - START_UP) as f64,
        max_queue: queue[1],
        max_queue_at_start: queue[2],
        marked: pair.ends[1].context.counters().value(Counter::NpEcnMarkedRocePackets),
        cnps: counters.value(Counter::RpCnpHandled),
        dropped: pair.network.counters().queue_dropped,
        retransmitted: counters.value(Counter::RetransmittedPkts),
    }
}

fn dcqcn(config: Config) -> Config {
    let control = CongestionControl::Dcqcn(Dcqcn::ZHU25P);
    config.congestion(control).notification(CongestionNotification::default()).line_rate(LINE_RATE)
}

fn off(config: Config) -> Config {
    config
}

/// A thousand paced queue pairs, and a poll that is a quarter of an hour late: one turn for each, however many ticks of the
/// timer wheel have passed.
#[test]
fn a_late_poll_checks_each_paced_queue_pair_once() {
    let slow = |config: Config| {
        let control = CongestionControl::Dcqcn(Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(1));
        config.congestion(control).line_rate(LINE_RATE)
    };
    let setup = Setup { qps: 1000, config: slow, timeout: 20, ..Setup::default() };
    let mut pair = Pair::new(5, LinkConfig::default(), setup);
    let end = &mut pair.ends[0];
    let remote = RemoteAddress { addr: 0, rkey: RKey::new(0) };
    for qp in &end.qps {
        let data = [Sge { mr: end.mr, offset: 0, length: MESSAGE }];
        let (data, flags) = (Data::Sges(&data), SendFlags::SIGNALED);
        let wr = SendWorkRequest { wr_id: 0, op: SendOp::Write(remote), data, flags };
        end.context.post_send(*qp, &wr).unwrap();
    }
    let sent = |end: &ferroce_test_support::pair::End| end.context.counters().value(Counter::SentPkts);
    // Checking each in each tick would take hours.
    for late in 1..=3 {
        end.context.poll(Nanos(late * 1_000_000_000_000)).unwrap();
    }
    assert!(sent(end) >= 4096, "{}", sent(end));
}

#[test]
fn a_marking_link_is_shared_fairly_with_a_short_queue() {
    println!("25 Gb/s, marks from 5,150 to 206,000 bytes; of 40 to 100 ms, and the longest queue before");
    println!(
        "{:>8} {:>8} {:>6} {:>6} {:>11} {:>10} {:>10} {:>8} {:>6} {:>6} {:>6}",
        "qps",
        "control",
        "used",
        "Jain",
        "mean queue",
        "max queue",
        "at start",
        "marked",
        "CNPs",
        "drops",
        "resent"
    );
    for qps in [2, 8] {
        for (name, control) in [("off", off as fn(Config) -> Config), ("zhu25p", dcqcn)] {
            let outcome = run(qps, control);
            let Outcome { utilisation, fairness, mean_queue, max_queue, max_queue_at_start, .. } = outcome;
            let Outcome { marked, cnps, dropped, retransmitted, .. } = outcome;
            println!(
                "{qps:>8} {name:>8} {utilisation:>6.3} {fairness:>6.3} {mean_queue:>11.0} {max_queue:>10.0} \
                 {max_queue_at_start:>10.0} {marked:>8} {cnps:>6} {dropped:>6} {retransmitted:>6}"
            );
            if name == "off" {
                assert_eq!((marked, cnps), (0, 0));
                continue;
            }
            assert!(utilisation >= 0.9, "{qps} queue pairs use {utilisation} of the link");
            assert!(fairness >= 0.95, "Jain's index of {qps} queue pairs is {fairness}");
            assert!(
                mean_queue < 206_000.0 && max_queue < 412_000.0,
                "queue of {mean_queue}, at most {max_queue}"
            );
            assert_eq!((dropped, retransmitted), (0, 0));
            assert!(marked > 0 && cnps > 0);
        }
    }
}
