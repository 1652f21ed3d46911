//! Rounds of a measurement. Those in the machine's slow state are repeated.

use std::fmt;
use std::thread;
use std::time::Duration;

use super::LineTime;

/// The machine's state over all rounds of a program, and the rounds that count.
///
/// The state is measured before and after each round. A round with the slow state at either end is repeated as long as
/// there are [`Repetitions`] left. After that slow rounds count, and [`Display`](fmt::Display) reports their number.
#[derive(Clone, Debug, Default)]
pub struct Rounds {
    /// The slower end of each measured round.
    lines: Vec<LineTime>,
    rounds: usize,
    repeated: usize,
    slow: usize,
}

/// The remaining repetitions of slow rounds for one figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repetitions(usize);

impl Repetitions {
    /// Repetitions in addition to the number of rounds, so that a single round has several.
    const MORE: usize = 3;

    /// For a figure with `rounds` rounds: as many repetitions, and three more.
    pub fn of(rounds: usize) -> Repetitions {
        Repetitions(rounds + Repetitions::MORE)
    }

    /// None, so that slow rounds count.
    pub fn none() -> Repetitions {
        Repetitions(0)
    }

    /// Takes a repetition for a round that is slow at one of its `ends`, if one is left. Returns whether it has, and
    /// the round is to be repeated.
    pub fn take(&mut self, ends: [Option<LineTime>; 2]) -> bool {
        let repeats = self.0 > 0 && ends.iter().flatten().any(LineTime::is_slow);
        self.0 -= usize::from(repeats);
        repeats
    }
}

impl Rounds {
    /// No rounds yet.
    pub fn new() -> Rounds {
        Rounds::default()
    }

    /// Performs rounds until `count` of them count, and returns their results. `round` is called with the number of
    /// earlier rounds that count.
    ///
    /// # Errors
    /// The first error of `round`.
    pub fn hold<T, E>(
        &mut self,
        count: usize,
        round: impl FnMut(usize) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        self.hold_with(count, round, LineTime::measure, PAUSE)
    }

    /// Whether a round with these `ends` counts. Without a measurement it does.
    pub fn counts(&mut self, ends: [Option<LineTime>; 2], repetitions: &mut Repetitions) -> bool {
        let counts = !repetitions.take(ends);
        self.note(ends, counts);
        counts
    }

    /// Records a round that another [`Rounds`] has already judged.
    pub fn note(&mut self, ends: [Option<LineTime>; 2], counts: bool) {
        let slower = ends.into_iter().flatten().max_by_key(|line| line.nanos);
        self.lines.extend(slower);
        self.rounds += 1;
        self.repeated += usize::from(!counts);
        self.slow += usize::from(counts && slower.is_some_and(|line| line.is_slow()));
    }

    /// The time of a cache line from core to core in nanoseconds, from the slower end of each round: the minimum, the
    /// median and the maximum. `None` if no round was measured.
    pub fn line_nanos(&self) -> Option<[u32; 3]> {
        let mut nanos: Vec<u32> = self.lines.iter().map(|line| line.nanos).collect();
        nanos.sort_unstable();
        Some([*nanos.first()?, nanos[nanos.len() / 2], *nanos.last()?])
    }

    /// The two cores of these measurements.
    pub fn cores(&self) -> Option<[usize; 2]> {
        self.lines.first().map(|line| line.cores)
    }

    /// All rounds, including those that do not count.
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Rounds in the slow state that were repeated and do not count.
    pub fn repeated(&self) -> usize {
        self.repeated
    }

    /// Rounds in the slow state that count.
    pub fn slow(&self) -> usize {
        self.slow
    }

    fn hold_with<T, E>(
        &mut self,
        count: usize,
        mut round: impl FnMut(usize) -> Result<T, E>,
        mut measure: impl FnMut() -> Option<LineTime>,
        pause: Duration,
    ) -> Result<Vec<T>, E> {
        let mut repetitions = Repetitions::of(count);
        let mut kept = Vec::with_capacity(count);
        while kept.len() < count {
            let before = measure();
            let brought = round(kept.len())?;
            if self.counts([before, measure()], &mut repetitions) {
                kept.push(brought);
            } else {
                thread::sleep(pause);
            }
        }
        Ok(kept)
    }
}

/// The pause before a repetition. The state lasts for seconds: a round of a few milliseconds would only see the same
/// state again.
const PAUSE: Duration = Duration::from_millis(100);

impl fmt::Display for Rounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rounds { rounds, repeated, slow, .. } = self;
        let (Some([a, b]), Some(nanos)) = (self.cores(), self.line_nanos()) else {
            let why = if *rounds == 0 { "there was no round" } else { "this process can't use two cores" };
            return write!(f, "not measured, for {why}; no round was repeated");
        };
        let [least, median, most] = nanos.map(|nanos| f64::from(nanos) / 1e3);
        write!(f, "a cache line goes between cores {a} and {b} in {median:.2} µs (median of {rounds} ")?;
        write!(f, "round{}, {least:.2} to {most:.2}); ", if *rounds == 1 { "" } else { "s" })?;
        let were = |count: usize| if count == 1 { "was" } else { "were" };
        let limit = f64::from(LineTime::SLOW_NANOS) / 1e3;
        match repeated + slow {
            0 => write!(f, "none in the slow state (above {limit:.2} µs)")?,
            all => {
                write!(f, "{all} {} in the slow state (above {limit:.2} µs), {repeated} repeated", were(all))?
            }
        }
        match slow {
            0 => Ok(()),
            _ => {
                write!(f, "; NO MORE REPETITIONS: {slow} slow of {} rounds in the figures", rounds - repeated)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(nanos: u32) -> Option<LineTime> {
        Some(LineTime { cores: [0, 1], nanos })
    }

    /// Performs rounds that return their own numbers, from 0, in these states: each is the state after a round and
    /// before the next one. Returns the rounds that count, and the argument of each round.
    fn hold(count: usize, states: &[u32]) -> (Rounds, Vec<usize>, Vec<usize>) {
        let (mut rounds, mut asked) = (Rounds::new(), Vec::new());
        let mut measured = 0_usize;
        let measure = || {
            // The state after round n is that before round n + 1.
            let state = states[measured.div_ceil(2).min(states.len() - 1)];
            measured += 1;
            of(state)
        };
        let round = |number| {
            asked.push(number);
            Ok::<_, ()>(asked.len() - 1)
        };
        let kept = rounds.hold_with(count, round, measure, Duration::ZERO).unwrap();
        (rounds, kept, asked)
    }

    #[test]
    fn a_round_that_is_slow_at_either_end_is_repeated() {
        let (rounds, kept, asked) = hold(3, &[110, 110, 550, 110, 120, 110]);
        // The machine became slow in round 1, and was slow at the beginning of round 2.
        assert_eq!(kept, [0, 3, 4]);
        assert_eq!(asked, [0, 1, 1, 1, 2]);
        assert_eq!((rounds.rounds(), rounds.repeated(), rounds.slow()), (5, 2, 0));
        assert_eq!(rounds.line_nanos(), Some([110, 120, 550]));
    }

    #[test]
    fn slow_rounds_count_when_there_are_no_repetitions_left() {
        let (rounds, kept, _) = hold(2, &[550]);
        assert_eq!(kept, [5, 6]);
        assert_eq!((rounds.rounds(), rounds.repeated(), rounds.slow()), (7, 5, 2));
        // The last round is fast again.
        let (rounds, kept, _) = hold(2, &[550, 550, 550, 550, 550, 550, 115, 115]);
        assert_eq!(kept, [5, 6]);
        assert_eq!((rounds.repeated(), rounds.slow()), (5, 1));
    }

    #[test]
    fn every_figure_has_repetitions_of_its_own_and_all_are_reported_together() {
        let mut rounds = Rounds::new();
        for _ in 0..2 {
            let kept = rounds.hold_with(1, |_| Ok::<_, ()>(()), || of(550), Duration::ZERO).unwrap();
            assert_eq!(kept.len(), 1);
        }
        assert_eq!((rounds.rounds(), rounds.repeated(), rounds.slow()), (10, 8, 2));
        assert!(!rounds.clone().counts([of(110), of(301)], &mut Repetitions::of(1)));
        assert!(rounds.counts([of(110), of(301)], &mut Repetitions::none()));
    }

    #[test]
    fn an_error_ends_the_rounds() {
        let mut rounds = Rounds::new();
        let round = |number| if number == 1 { Err("wrong") } else { Ok(()) };
        assert_eq!(rounds.hold_with(3, round, || of(110), Duration::ZERO), Err("wrong"));
        assert_eq!(rounds.rounds(), 1);
    }

    #[test]
    fn the_report_counts_slow_and_repeated_rounds() {
        let told = |count, states: &[u32]| hold(count, states).0.to_string();
        assert_eq!(
            told(3, &[112, 118, 115]),
            "a cache line goes between cores 0 and 1 in 0.12 µs (median of 3 rounds, 0.12 to 0.12); \
             none in the slow state (above 0.30 µs)"
        );
        assert_eq!(
            told(1, &[550, 112]),
            "a cache line goes between cores 0 and 1 in 0.55 µs (median of 2 rounds, 0.11 to 0.55); \
             1 was in the slow state (above 0.30 µs), 1 repeated"
        );
        assert_eq!(
            told(2, &[550]),
            "a cache line goes between cores 0 and 1 in 0.55 µs (median of 7 rounds, 0.55 to 0.55); \
             7 were in the slow state (above 0.30 µs), 5 repeated; \
             NO MORE REPETITIONS: 2 slow of 2 rounds in the figures"
        );
    }

    #[test]
    fn without_two_cores_every_round_counts() {
        let mut rounds = Rounds::new();
        let nothing = "not measured, for there was no round; no round was repeated";
        assert_eq!(rounds.to_string(), nothing);
        let kept = rounds.hold_with(4, Ok::<_, ()>, || None, Duration::ZERO).unwrap();
        assert_eq!((kept, rounds.rounds(), rounds.repeated()), (vec![0, 1, 2, 3], 4, 0));
        assert_eq!(rounds.line_nanos(), None);
        assert_eq!(
            rounds.to_string(),
            "not measured, for this process can't use two cores; no round was repeated"
        );
    }
}
