//! The scenarios of the published simulators (pcap-fixtures/dcqcn/README.md), and the results of a run.

use std::collections::BTreeMap;

use ferroce::driver::sim::fabric::{BufferConfig, SwitchConfig, Threshold};

use super::nic::{Job, Set, Star, Style};

/// The results of a run, by the names of summary.csv; for scenario c, the completion times too, in µs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    pub(crate) values: BTreeMap<(&'static str, &'static str), f64>,
    pub(crate) completions: Vec<f64>,
}

const MICRO: u64 = 1_000;
const MILLI: u64 = 1_000_000;

/// Jain's fairness index.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    sum * sum / (shares.len() as f64 * squares)
}

/// Two flows for 100 ms.
pub(crate) fn a(set: Set, seed: u64) -> Figures {
    let mut star = Star::new(set, seed, &[Job::ENDLESS; 2], true, |switch| switch);
    star.run_until(20 * MILLI);
    let first: [i64; 2] = [0, 1].map(|flow| star.progress(flow));
    let mut before = first;
    let (mut rates, mut fairness, mut queues) = (0.0, Vec::new(), Vec::new());
    // The mean is of samples each µs, the percentile of samples each 10 µs.
    let mut mean = 0.0;
    for micro in 20_000..100_000 {
        star.run_until((micro + 1) * MICRO);
        mean += star.queue() as f64 / 80_000.0;
        if (micro + 1) % 10 == 0 {
            queues.push(star.queue() as f64);
            rates +=
                [0, 1].map(|flow| star.rate(flow, (micro + 1) * MICRO) as f64).iter().sum::<f64>() / 16_000.0;
        }
        if (micro + 1) % 1000 == 0 {
            let now: [i64; 2] = [0, 1].map(|flow| star.progress(flow));
            fairness.push(jain(&[0, 1].map(|flow| (now[flow] - before[flow]) as f64)));
            before = now;
        }
    }
    queues.sort_unstable_by(f64::total_cmp);
    let bytes: i64 = before.iter().zip(first).map(|(now, first)| now - first).sum();
    let utilization = bytes as f64 * 8.0 / 80e-3 / set.line_rate as f64;
    let values = [
        ("utilization", utilization),
        ("rp_rate_mean_both", rates / 1e6),
        ("queue_mean_20_100ms", mean),
        ("queue_p99_20_100ms", percentile(&queues, 0.99)),
        ("jain_1ms_mean", fairness.iter().sum::<f64>() / fairness.len() as f64),
    ];
    let values = values.into_iter().map(|(name, value)| (("base", name), value)).collect();
    Figures { values, completions: Vec::new() }
}

/// Four flows start, one every 50 ms, and end.
pub(crate) fn b(set: Set, seed: u64) -> Figures {
    let job = |start: u64, stop: u64| Job { start: start * MILLI, stop: stop * MILLI, packets: u32::MAX };
    // The flow that started first ends first.
    let jobs = [job(0, 200), job(50, 250), job(100, 300), job(150, 350)];
    let mut star = Star::new(set, seed, &jobs, true, |switch| switch);
    let mut figures = Figures::default();
    star.run_until(100 * MILLI);
    for (phase, name) in (3_u64..).zip(["phase3", "phase4", "phase5", "phase6"]) {
        let start = (phase - 1) * 50 * MILLI;
        let progress = |star: &Star| -> Vec<i64> { (0..4).map(|flow| star.progress(flow)).collect() };
        let before = progress(&star);
        star.run_until(start + 30 * MILLI);
        let middle = progress(&star);
        star.run_until(start + 50 * MILLI);
        let after = progress(&star);
        let bytes: i64 = after.iter().zip(&before).map(|(after, before)| after - before).sum();
        let active = |flow: &usize| jobs[*flow].start <= start && jobs[*flow].stop > start;
        let shares: Vec<f64> =
            (0..4).filter(active).map(|flow| (after[flow] - middle[flow]) as f64).collect();
        let utilization = bytes as f64 * 8.0 / 50e-3 / set.line_rate as f64;
        figures.values.insert((name, "utilization_50ms"), utilization);
        figures.values.insert((name, "jain_last20ms"), jain(&shares));
    }
    figures
}

/// Ten flows of 500 packets burst onto a long one at 10 ms.
pub(crate) fn c(set: Set, variant: &'static str, seed: u64) -> Figures {
    let burst = Job { start: 10 * MILLI, stop: u64::MAX, packets: 500 };
    let mut jobs = vec![Job::ENDLESS];
    jobs.extend([burst; 10]);
    let pool = if variant == "buf2M" || variant == "lossy" { 2_000_000 } else { set.pool };
    let set = Set { pool, ..set };
    let adjust = |switch: SwitchConfig| match set.style {
        // Neither PFC nor drops.
        Style::Zhu => {
            switch.buffer(BufferConfig::default().pool(1 << 30).lossy_threshold(Threshold::Static(1 << 30)))
        }
        Style::Mlx => switch,
    };
    let mut star = Star::new(set, seed, &jobs, variant != "lossy", adjust);
    let mut queue = 0;
    for micro in 9_900..20_000 {
        star.run_until((micro + 1) * MICRO);
        queue = queue.max(star.queue());
    }
    let mut end = 20;
    while end < 80 && star.flows()[1..].iter().any(|flow| flow.finished.is_none()) {
        end += 1;
        star.run_until(end * MILLI);
    }
    let completions: Vec<f64> = star.flows()[1..]
        .iter()
        .map(|flow| flow.finished.map_or(f64::INFINITY, |finished| (finished - 10 * MILLI) as f64 / 1e3))
        .collect();
    let (drops, pauses) = star.drops_and_pauses();
    let cnps: f64 = star.flows()[1..].iter().map(|flow| f64::from(flow.cnps)).sum();
    let values = [
        ("fct_mean_us", completions.iter().sum::<f64>() / 10.0),
        ("fct_min_us", completions.iter().copied().fold(f64::INFINITY, f64::min)),
        ("fct_max_us", completions.iter().copied().fold(0.0, f64::max)),
        ("queue_max", queue as f64),
        ("pause_frames", pauses as f64),
        ("drops", drops as f64),
        ("cnp_per_burst_flow", cnps / 10.0),
    ];
    let values = values.into_iter().map(|(name, value)| ((variant, name), value)).collect();
    Figures { values, completions }
}

/// As in numpy and spreadsheets, interpolated between the two nearest ranks.
pub(crate) fn percentile(sorted: &[f64], part: f64) -> f64 {
    let place = part * (sorted.len() - 1) as f64;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    below + (above - below) * place.fract()
}
