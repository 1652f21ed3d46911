//! The state of the machine in which a benchmark was measured: [`Rounds`], with what only benchmarks need.

use ferroce::driver::machine::{LineTime, Rounds};
use serde_json::{Value, json};

/// As JSON, the values that [`Rounds`] prints as text; null if it was not measured.
pub fn json(rounds: &Rounds) -> Value {
    let Some([least, median, most]) = rounds.line_nanos() else { return Value::Null };
    json!({
        "cores": rounds.cores(), "line_ns": { "least": least, "median": median, "most": most },
        "slow_above_ns": LineTime::SLOW_NANOS, "rounds": rounds.rounds(), "slow_repeated": rounds.repeated(),
        "slow_in_figures": rounds.slow(),
    })
}

/// Prints the state for a benchmark whose results do not depend on it, because they measure `counts`.
pub fn print_beside(counts: &str) {
    println!("machine's state: {}; the figures are {counts} and do not depend on it", now());
}

/// Runs the benchmarks of criterion between two measurements of the state. Criterion chooses its own rounds, so none is
/// repeated.
pub fn around_criterion(run: impl FnOnce()) {
    let before = now();
    run();
    println!("machine's state before: {before}");
    println!("machine's state after: {}", now());
    println!("criterion chooses its own rounds: those in the slow state are among the figures");
}

fn now() -> String {
    LineTime::measure().map_or_else(not_measured, |line| line.to_string())
}

fn not_measured() -> String {
    "not measured, for this process can't use two cores".to_owned()
}

#[cfg(test)]
mod tests {
    use ferroce::driver::machine::Repetitions;

    use super::*;

    #[test]
    fn machines_are_told_what_people_are() {
        let mut rounds = Rounds::new();
        assert_eq!(json(&rounds), Value::Null);
        let of = |nanos| Some(LineTime { cores: [0, 1], nanos });
        let mut repetitions = Repetitions::of(1);
        assert!(!rounds.counts([of(112), of(550)], &mut repetitions));
        assert!(rounds.counts([of(112), of(118)], &mut repetitions));
        assert!(rounds.counts([of(560), of(118)], &mut Repetitions::none()));
        assert_eq!(
            json(&rounds),
            json!({
                "cores": [0, 1], "line_ns": { "least": 118, "median": 550, "most": 560 }, "slow_above_ns": 300,
                "rounds": 3, "slow_repeated": 1, "slow_in_figures": 1,
            })
        );
    }
}
