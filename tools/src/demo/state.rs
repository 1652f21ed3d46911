//! The state of the machine in the rounds of a demo. Rank 0 measures it while the other ranks wait.

use ferroce_driver::machine::{LineTime, Rounds};
use serde::{Deserialize, Serialize};

/// A [`LineTime`], as rank 0 reports it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Line {
    cores: [usize; 2],
    nanos: u32,
}

impl Line {
    /// The measurement of rank 0. `None` at the other ranks, and where it can't be measured.
    pub(super) fn at(rank: u32) -> Option<LineTime> {
        if rank == 0 { LineTime::measure() } else { None }
    }
}

impl From<LineTime> for Line {
    fn from(LineTime { cores, nanos }: LineTime) -> Line {
        Line { cores, nanos }
    }
}

impl From<Line> for LineTime {
    fn from(Line { cores, nanos }: Line) -> LineTime {
        LineTime { cores, nanos }
    }
}

/// A rank's contribution to the sum by which all ranks decide whether a round is repeated. Rank 0 adds whether the
/// machine was in the slow state and repetitions are left; each rank adds whether it found wrong elements. A round with
/// wrong elements is never repeated, so that it is reported.
pub(super) fn vote(repeats: bool, is_wrong: bool) -> f32 {
    f32::from(u8::from(repeats)) + if is_wrong { 2.0 } else { 0.0 }
}

/// The decision that the sum stands for.
pub(super) fn is_repeated(votes: f32) -> bool {
    votes == 1.0
}

/// The report's summary of [`Rounds`].
#[derive(Debug, Serialize)]
pub(super) struct State {
    /// As text.
    #[serde(skip)]
    pub(super) text: String,
    cores: Option<[usize; 2]>,
    /// Time of a cache line from core to core: minimum, median and maximum of the rounds.
    line_ns: Option<[u32; 3]>,
    /// Measured rounds, each over one transport, including repeated ones.
    rounds: usize,
    slow_repeated: usize,
    slow_in_figures: usize,
}

impl From<&Rounds> for State {
    fn from(rounds: &Rounds) -> State {
        State {
            text: rounds.to_string(),
            cores: rounds.cores(),
            line_ns: rounds.line_nanos(),
            rounds: rounds.rounds(),
            slow_repeated: rounds.repeated(),
            slow_in_figures: rounds.slow(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_round_is_repeated_unless_an_element_is_wrong() {
        let rounds: [(&[(bool, bool)], bool); 5] = [
            (&[(false, false), (false, false)], false),
            (&[(true, false), (false, false)], true),
            (&[(true, true), (false, false)], false),
            (&[(true, false), (false, true)], false),
            (&[(false, true), (false, false)], false),
        ];
        for (ranks, expected) in rounds {
            let votes = ranks.iter().map(|(repeats, is_wrong)| vote(*repeats, *is_wrong)).sum();
            assert_eq!(is_repeated(votes), expected, "{ranks:?}");
        }
    }
}
