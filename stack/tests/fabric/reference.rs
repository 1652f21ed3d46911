//! Comparison with two published simulators: our state machine, our pacer, and our switch.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::compare::{Published, Row, Sample, pooled, print_header};
use super::nic::{HPCC100, MLX25, Set, ZHU25, ZHU25P};
use super::scenario::{self, Figures};

/// A scenario of a set, with the published number of seeds, and the compared results.
struct Case {
    set: Set,
    scenario: &'static str,
    variant: &'static str,
    seeds: u64,
    figures: &'static [&'static str],
}

const A: [&str; 5] =
    ["utilization", "rp_rate_mean_both", "queue_mean_20_100ms", "queue_p99_20_100ms", "jain_1ms_mean"];
const B: [&str; 2] = ["utilization_50ms", "jain_last20ms"];
const PHASES: [&str; 4] = ["phase3", "phase4", "phase5", "phase6"];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for set in [ZHU25, ZHU25P, MLX25, HPCC100] {
        cases.push(Case { set, scenario: "a", variant: "base", seeds: 20, figures: &A });
        cases.push(Case { set, scenario: "b", variant: "", seeds: 10, figures: &B });
    }
    for (set, variant, figures) in [
        (ZHU25, "nopfc", &["fct_mean_us", "queue_max", "pause_frames", "drops"]),
        (ZHU25P, "nopfc", &["fct_mean_us", "queue_max", "pause_frames", "drops"]),
        (MLX25, "base", &["fct_mean_us", "queue_max", "pause_frames", "drops"]),
        (MLX25, "buf2M", &["fct_mean_us", "queue_max", "pause_frames", "drops"]),
        (MLX25, "lossy", &["fct_mean_us", "queue_max", "pause_frames", "drops"]),
        (HPCC100, "base", &["fct_mean_us", "queue_max", "pause_frames", "drops"]),
    ] {
        cases.push(Case { set, scenario: "c", variant, seeds: 20, figures });
    }
    cases
}

impl Case {
    fn run(&self, seed: u64) -> Figures {
        match self.scenario {
            "a" => scenario::a(self.set, seed),
            "b" => scenario::b(self.set, seed),
            _ => scenario::c(self.set, self.variant, seed),
        }
    }

    fn rows(&self, published: &Published, runs: &[Figures]) -> Vec<Row> {
        let variants = if self.scenario == "b" { &PHASES[..] } else { &[self.variant][..] };
        let mut rows = Vec::new();
        for variant in variants {
            for figure in self.figures {
                let values: Vec<f64> = runs.iter().map(|run| run.values[&(*variant, *figure)]).collect();
                let what = format!("{},{},{variant},{figure}", self.set.name, self.scenario);
                rows.push(Row { ours: Sample::of(&values), theirs: published.figure(&what), what });
            }
        }
        if self.scenario == "c" {
            let ours: Vec<Vec<f64>> = runs.iter().map(|run| run.completions.clone()).collect();
            let theirs = published.completions(&format!("{},{}", self.set.name, self.variant));
            for (name, part) in [("fct_pooled_p50_us", 0.5), ("fct_pooled_p99_us", 0.99)] {
                let what = format!("{},c,{},{name}", self.set.name, self.variant);
                rows.push(Row { what, ours: pooled(&ours, part), theirs: pooled(&theirs, part) });
            }
        }
        rows
    }
}

/// Runs all seeds of all cases, on two threads.
fn run(cases: &[Case]) -> Vec<Vec<Figures>> {
    let jobs: Vec<(usize, u64)> = cases
        .iter()
        .enumerate()
        .flat_map(|(case, of)| (1..=of.seeds).map(move |seed| (case, seed)))
        .collect();
    let results: Mutex<Vec<Vec<Option<Figures>>>> =
        Mutex::new(cases.iter().map(|case| vec![None; case.seeds as usize]).collect());
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((case, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
                    let figures = cases[case].run(seed);
                    results.lock().unwrap()[case][seed as usize - 1] = Some(figures);
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    results.into_iter().map(|runs| runs.into_iter().map(Option::unwrap).collect()).collect()
}

#[test]
fn the_results_of_published_simulators_are_reproduced() {
    let published = Published::read();
    let only = std::env::var("FERROCE_FABRIC_ONLY").ok();
    let wanted = |case: &Case| {
        let name = format!("{},{}", case.set.name, case.scenario);
        only.as_ref().is_none_or(|only| only.split(' ').any(|only| only == name))
    };
    let cases: Vec<Case> = cases().into_iter().filter(wanted).collect();
    assert!(!cases.is_empty(), "FERROCE_FABRIC_ONLY: names such as 'zhu25,a mlx25,c'");
    print_header();
    let mut beyond = Vec::new();
    for (case, runs) in cases.iter().zip(run(&cases)) {
        for row in case.rows(&published, &runs) {
            row.print();
            if !row.is_within() {
                beyond.push(row.what);
            }
        }
    }
    assert_eq!(beyond, [""; 0], "beyond 5 % and two standard errors");
}

/// Nothing in it is random: it is the same with every seed, and as published.
#[test]
fn the_burst_of_zhu25p_is_exact() {
    for seed in [1, 2] {
        let run = scenario::c(ZHU25P, "nopfc", seed);
        println!("{:?} {:?}", run.values, run.completions);
        assert_eq!(run.values[&("nopfc", "queue_max")], 4_735_860.0);
        assert_eq!(run.values[&("nopfc", "cnp_per_burst_flow")], 36.0);
        assert!(
            run.values[&("nopfc", "fct_min_us")] >= 1780.0 && run.values[&("nopfc", "fct_max_us")] <= 1795.1
        );
    }
}
