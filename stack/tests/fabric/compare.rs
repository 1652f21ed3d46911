//! Our results compared with those of the published simulators.

use std::fs;
use std::path::Path;

use super::scenario::percentile;

/// Mean and standard deviation of a result over runs with different seeds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) mean: f64,
    pub(crate) deviation: f64,
    pub(crate) count: usize,
}

impl Sample {
    pub(crate) fn of(values: &[f64]) -> Sample {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
        Sample { mean, deviation: (squares / (count.max(2) - 1) as f64).sqrt(), count }
    }

    /// The variance of the mean.
    fn variance(&self) -> f64 {
        self.deviation * self.deviation / self.count as f64
    }
}

/// A result of ours and the published one.
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) ours: Sample,
    pub(crate) theirs: Sample,
}

impl Row {
    /// 5 %, or two standard errors of the difference if that is more.
    pub(crate) fn allowed(&self) -> f64 {
        let errors = 2.0 * (self.ours.variance() + self.theirs.variance()).sqrt();
        errors.max(0.05 * self.theirs.mean.abs())
    }

    pub(crate) fn is_within(&self) -> bool {
        (self.ours.mean - self.theirs.mean).abs() <= self.allowed()
    }

    pub(crate) fn print(&self) {
        let Row { what, ours, theirs } = self;
        let part = |value: f64| {
            if theirs.mean == 0.0 {
                format!("{value:.1}")
            } else {
                format!("{:+.2} %", 100.0 * value / theirs.mean)
            }
        };
        println!(
            "{what:<44} {:>14} ± {:<9} {:>14} ± {:<9} {:>9} of {:>9}  {}",
            number(ours.mean),
            number(ours.deviation),
            number(theirs.mean),
            number(theirs.deviation),
            part(ours.mean - theirs.mean),
            part(self.allowed()),
            if self.is_within() { "within" } else { "BEYOND" }
        );
    }
}

pub(crate) fn print_header() {
    println!(
        "{:<44} {:>14}   {:<9} {:>14}   {:<9} {:>9}    {:>9}",
        "set, scenario, variant or phase, figure", "ours", "sd", "theirs", "sd", "off by", "allowed"
    );
}

fn number(value: f64) -> String {
    if value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.4}") }
}

/// The results of the published simulators.
pub(crate) struct Published {
    summary: Vec<(String, Sample)>,
    completions: Vec<(String, u32, f64)>,
}

impl Published {
    pub(crate) fn read() -> Published {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures/dcqcn");
        let lines = |file: &str| -> Vec<Vec<String>> {
            let text = fs::read_to_string(folder.join(file)).unwrap();
            text.lines().skip(1).map(|line| line.split(',').map(str::to_owned).collect()).collect()
        };
        // A result that was reached with no seed has no mean.
        let reached = |fields: &Vec<String>| !fields[5].is_empty();
        let summary = lines("summary.csv").into_iter().filter(reached).map(|fields| {
            let [mean, deviation] = [5, 6].map(|at| fields[at].parse().unwrap());
            (fields[..4].join(","), Sample { mean, deviation, count: fields[4].parse().unwrap() })
        });
        let completions = lines("fct_burst10.csv")
            .into_iter()
            .map(|fields| (fields[..2].join(","), fields[2].parse().unwrap(), fields[4].parse().unwrap()));
        Published { summary: summary.collect(), completions: completions.collect() }
    }

    /// `name` is as in summary.csv, with commas.
    pub(crate) fn figure(&self, name: &str) -> Sample {
        let found = self.summary.iter().find(|(of, _)| of == name);
        found.unwrap_or_else(|| panic!("no {name} in summary.csv")).1
    }

    /// The completion times of a set and variant, by run.
    pub(crate) fn completions(&self, name: &str) -> Vec<Vec<f64>> {
        let of = |seed: u32| -> Vec<f64> {
            let times = self.completions.iter().filter(|(of, run, _)| of == name && *run == seed);
            times.map(|(_, _, time)| *time).collect()
        };
        let runs: Vec<Vec<f64>> = (1..=20).map(of).collect();
        assert!(runs.iter().all(|run| run.len() == 10), "{name}: ten flows in each run");
        runs
    }
}

/// A percentile of the times of all runs together. Its standard error is from resampling the runs (bootstrap); the sample
/// states it so that [`Row::allowed`] uses it unchanged.
pub(crate) fn pooled(runs: &[Vec<f64>], part: f64) -> Sample {
    let of = |runs: &mut dyn Iterator<Item = &Vec<f64>>| {
        let mut times: Vec<f64> = runs.flatten().copied().collect();
        times.sort_unstable_by(f64::total_cmp);
        percentile(&times, part)
    };
    let mut seed = 1_u64;
    let mut draw = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        &runs[((seed >> 33) % runs.len() as u64) as usize]
    };
    let drawn: Vec<f64> = (0..400).map(|_| of(&mut (0..runs.len()).map(|_| draw()))).collect();
    Sample { mean: of(&mut runs.iter()), deviation: Sample::of(&drawn).deviation, count: 1 }
}
