//! All sizes with all algorithms, compared with the cost model.

use std::time::{Duration, Instant};

use ferroce_collectives::{Algorithm, Explanation, Model, Options};

use super::ranks::{Ranks, own_bytes};
use super::section::{Algorithms, AllreduceSection, over_the_fabric};
use crate::fabric::plan::Plan;
use crate::failure::Failure;
use crate::quantity::Rate;

/// The results.
pub(super) struct Sweep {
    /// The cost model that the ranks have measured.
    pub(super) model: Option<Model>,
    pub(super) sizes: Vec<Size>,
    /// The longest size that was checked.
    pub(super) checked: u64,
    pub(super) events: u64,
    /// The hash of all simulations.
    pub(super) trace_hash: u64,
    pub(super) wall: Duration,
}

/// One size.
pub(super) struct Size {
    pub(super) bytes: u64,
    /// The library's own choice.
    pub(super) chosen: Algorithm,
    pub(super) cells: Vec<Cell>,
}

/// One size with one algorithm.
pub(super) struct Cell {
    pub(super) algorithm: Algorithm,
    /// The cost model's time, or the reason that the algorithm is impossible.
    pub(super) model: Result<Duration, &'static str>,
    pub(super) simulated: Simulated,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Simulated {
    /// The mean of all rounds.
    Time(Duration),
    /// Not simulated: another algorithm was faster than this lower bound, which follows from the bytes over a rank's
    /// link.
    Above(Duration),
    /// The staging memory of all ranks would be this many bytes.
    TooMuch(u64),
    /// Not requested, impossible, or the run was interrupted.
    No,
}

impl Size {
    /// The fastest algorithm.
    pub(super) fn best(&self) -> Option<(Algorithm, Duration)> {
        let times = self.cells.iter().filter_map(|cell| match cell.simulated {
            Simulated::Time(time) => Some((cell.algorithm, time)),
            _ => None,
        });
        times.min_by_key(|(_, time)| *time)
    }

    /// How far the chosen algorithm is above the fastest, as a fraction.
    pub(super) fn excess(&self) -> Option<Excess> {
        let (_, best) = self.best()?;
        let chosen = self.cells.iter().find(|cell| cell.algorithm == self.chosen)?;
        let above = |time: Duration| time.as_secs_f64() / best.as_secs_f64() - 1.0;
        match chosen.simulated {
            Simulated::Time(time) => Some(Excess { above: above(time), is_least: false }),
            Simulated::Above(time) => Some(Excess { above: above(time), is_least: true }),
            Simulated::TooMuch(_) | Simulated::No => None,
        }
    }
}

/// A time relative to the least one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Excess {
    pub(super) above: f64,
    /// A lower bound, since the algorithm was not simulated to its end.
    pub(super) is_least: bool,
}

impl Excess {
    pub(super) fn max(self, other: Excess) -> Excess {
        if other.above > self.above { other } else { self }
    }
}

/// The first round of a size connects and allocates, so it is not measured. It is cut to this many bytes.
const FIRST_ROUND: u64 = 1 << 20;

/// The most staging memory of all ranks.
const MOST_STAGING: u64 = 3 << 30;

/// Simulates all sizes. `progress` gets the fraction that is done, and stops the sweep by returning `false`; the
/// results so far are returned.
pub(super) fn sweep(
    plan: &Plan,
    section: &AllreduceSection,
    rate: Rate,
    progress: &mut dyn FnMut(f64) -> bool,
) -> Result<Sweep, Failure> {
    let started = Instant::now();
    let bytes = section.bytes.sizes();
    let ranks = section.size(plan.topology.hosts.len());
    let mut sweep = Sweep {
        model: None,
        sizes: Vec::new(),
        checked: own_bytes(&bytes, ranks),
        events: 0,
        trace_hash: 0,
        wall: Duration::ZERO,
    };
    sweep.carry_out(
        plan,
        section,
        &bytes,
        &Links { ranks, rate: Rate(rate.0 * section.rails as u64) },
        progress,
    )?;
    sweep.wall = started.elapsed();
    Ok(sweep)
}

impl Sweep {
    fn carry_out(
        &mut self,
        plan: &Plan,
        section: &AllreduceSection,
        bytes: &[u64],
        links: &Links,
        progress: &mut dyn FnMut(f64) -> bool,
    ) -> Result<(), Failure> {
        let mut met = Ranks::meet(plan, section, &section.options())?;
        let Some(model) = met.measure(&mut || progress(0.0))? else { return Ok(()) };
        self.model = Some(model);
        for bytes in bytes {
            let Explanation { algorithm: chosen, costs, .. } = met.explain(*bytes)?;
            let cells = over_the_fabric().map(|algorithm| {
                let cost = costs.iter().find(|(of, _)| *of == algorithm);
                let model = cost.map_or(Err("unknown to the library"), |(_, cost)| *cost);
                Cell { algorithm, model, simulated: Simulated::No }
            });
            self.sizes.push(Size { bytes: *bytes, chosen, cells: cells.collect() });
        }
        self.note(&met);
        drop(met);
        // The algorithm that sends most goes last: by then others have shown for which sizes it can't be the best.
        let mut columns: Vec<(usize, Algorithm)> = over_the_fabric().enumerate().collect();
        columns.sort_by_key(|(_, algorithm)| *algorithm == Algorithm::Direct);
        let wanted = |size: &Size, algorithm: Algorithm| match &section.algorithm {
            Algorithms::All => true,
            Algorithms::Auto => size.chosen == algorithm,
            Algorithms::These(these) => these.contains(&algorithm),
        };
        let work = |size: &Size, algorithm: Algorithm| {
            // A constant for the messages, in addition to the bytes.
            let is_wanted = wanted(size, algorithm);
            if is_wanted { links.received(algorithm, size.bytes) + 1e6 } else { 0.0 }
        };
        let pairs = self.sizes.iter().flat_map(|size| columns.iter().map(move |(_, of)| (size, *of)));
        let all: f64 = pairs.map(|(size, algorithm)| work(size, algorithm)).sum();
        let mut done = 0.0;
        for (column, algorithm) in columns {
            let options = section.options().model(model).algorithm(algorithm);
            let mut met: Option<Ranks> = None;
            for size in &mut self.sizes {
                let work = work(size, algorithm);
                if let Err(problem) = size.cells[column].model {
                    if section.algorithm.is_named(algorithm) {
                        return Err(Failure::usage(format!("--algorithm {algorithm}: {problem}")));
                    }
                } else if wanted(size, algorithm) {
                    let least = links.least(algorithm, size.bytes);
                    let staging = staging(algorithm, size.bytes, links.ranks, &options);
                    size.cells[column].simulated = match size.best() {
                        Some((_, best)) if best < least => Simulated::Above(least),
                        _ if staging > MOST_STAGING => Simulated::TooMuch(staging),
                        _ => {
                            let ranks = match &mut met {
                                Some(ranks) => ranks,
                                none => none.insert(Ranks::meet(plan, section, &options)?),
                            };
                            let mut told = || progress(done / all);
                            match mean(ranks, size.bytes, section.count, &mut told)? {
                                Some(time) => Simulated::Time(time),
                                None => return Ok(()),
                            }
                        }
                    };
                }
                done += work;
                if !progress(done / all) {
                    return Ok(());
                }
            }
            if let Some(met) = met {
                self.note(&met);
            }
        }
        Ok(())
    }

    fn note(&mut self, ranks: &Ranks) {
        let (events, hash) = ranks.trace();
        self.events += events;
        self.trace_hash = self.trace_hash.rotate_left(7) ^ hash;
    }
}

/// The mean of `rounds` rounds, after one that is not counted.
fn mean(
    ranks: &mut Ranks,
    bytes: u64,
    rounds: usize,
    told: &mut dyn FnMut() -> bool,
) -> Result<Option<Duration>, Failure> {
    if ranks.all_reduce(bytes.min(FIRST_ROUND), told)?.is_none() {
        return Ok(None);
    }
    let mut sum = Duration::ZERO;
    for _ in 0..rounds {
        match ranks.all_reduce(bytes, told)? {
            Some(time) => sum += time,
            None => return Ok(None),
        }
    }
    Ok(Some(sum / rounds as u32))
}

/// A lower bound for the staging memory of all ranks, for messages that are reduced from all other ranks: four chunks
/// for each of these (see [`Options::chunk_bytes`]).
fn staging(algorithm: Algorithm, bytes: u64, ranks: usize, options: &Options) -> u64 {
    let ranks = ranks as u64;
    let message = match algorithm {
        Algorithm::Direct => bytes,
        Algorithm::TwoStep => bytes / ranks,
        _ => 0,
    };
    let is_staged = message > options.eager_bytes.into();
    if is_staged { ranks * (ranks - 1) * 4 * u64::from(options.chunk_bytes) } else { 0 }
}

/// The load on the link of each rank.
struct Links {
    ranks: usize,
    rate: Rate,
}

impl Links {
    /// Bytes that a rank receives, on average.
    fn received(&self, algorithm: Algorithm, bytes: u64) -> f64 {
        let others = self.ranks as f64 - 1.0;
        match algorithm {
            Algorithm::Direct => others * bytes as f64,
            _ => 2.0 * others / self.ranks as f64 * bytes as f64,
        }
    }

    /// A lower bound for the time of an algorithm that sends more than others.
    fn least(&self, algorithm: Algorithm, bytes: u64) -> Duration {
        match algorithm {
            Algorithm::Direct => {
                let bits = 8.0 * self.received(algorithm, bytes);
                Duration::from_secs_f64(bits / self.rate.0.max(1) as f64)
            }
            _ => Duration::ZERO,
        }
    }
}
