//! The results, as text and as JSON.

use std::collections::BTreeMap;

use ferroce::driver::machine::{Machine, Rounds};
use ferroce_benches::plot::{Curve, Sheet};
use ferroce_benches::report::{self, Spread};
use ferroce_benches::state;
use serde_json::{Value, json};

use crate::Outcome;
use crate::contender::{Contender, Time};
use crate::place::Place;

/// All results.
pub(crate) struct Results {
    pub(crate) rounds: usize,
    pub(crate) measured: Vec<Measured>,
    /// The state of the machine, before and after each job.
    pub(crate) state: Rounds,
    /// Measurements that were not possible, with the reason.
    left_out: Vec<(String, String)>,
}

/// An operation at a place.
pub(crate) struct Measured {
    place: Place,
    ranks: usize,
    pub(crate) operation: &'static str,
    /// By size and contender, and by round.
    times: BTreeMap<(u64, Contender), BTreeMap<usize, Time>>,
    pub(crate) failures: Vec<(Contender, String)>,
}

impl Measured {
    pub(crate) fn new(place: Place, ranks: usize, operation: &'static str) -> Measured {
        Measured { place, ranks, operation, times: BTreeMap::new(), failures: Vec::new() }
    }

    pub(crate) fn add(&mut self, round: usize, contender: Contender, times: &[Time]) {
        for time in times {
            self.times.entry((time.bytes, contender)).or_default().insert(round, *time);
        }
    }

    fn title(&self) -> String {
        let yields = if self.ranks > 2 { ", two on each core: all yield while they wait" } else { "" };
        format!("{}, {} ranks {}{yields}", self.operation, self.ranks, self.place.name())
    }

    fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = self.times.keys().map(|(bytes, _)| *bytes).collect();
        sizes.dedup();
        sizes
    }

    fn time(&self, bytes: u64, contender: Contender) -> Option<Spread> {
        let rounds = self.times.get(&(bytes, contender))?;
        Spread::of(rounds.values().map(|time| time.mean).collect())
    }

    /// ferroce's time divided by another one's, in the rounds that have both.
    fn ratio(&self, bytes: u64, other: Contender) -> Option<Spread> {
        let [own, theirs] = [Contender::Ferroce, other].map(|contender| self.times.get(&(bytes, contender)));
        let (own, theirs) = own.zip(theirs)?;
        let ratio = |(round, time): (&usize, &Time)| Some(time.mean / theirs.get(round)?.mean);
        Spread::of(own.iter().filter_map(ratio).collect())
    }

    /// The contender and the greatest share of its time that ferroce is to take. Only for two ranks: four ranks have
    /// two on each core.
    fn aim(&self, bytes: u64) -> Option<(Contender, f64)> {
        const MIB: u64 = 1 << 20;
        if self.ranks != 2 {
            return None;
        }
        let of_open_mpi = |share| Some((Contender::OpenMpi, share));
        match (self.place, bytes) {
            (Place::Host, ..MIB) => of_open_mpi(0.5),
            (Place::Host, _) => of_open_mpi(0.2),
            (_, ..=4096) => of_open_mpi(0.5),
            (Place::AfXdp, ..=16384) => of_open_mpi(1.0),
            (Place::AfXdp, size) if size >= 4 * MIB => Some((Contender::Raw, 1.0 / 0.85)),
            (Place::Udp, ..=65536) => of_open_mpi(1.0),
            (Place::Udp, size) if size >= 4 * MIB => of_open_mpi(0.6),
            _ => None,
        }
    }

    pub(crate) fn print(&self) {
        println!();
        println!("{}", self.title());
        let others = Contender::ALL.into_iter().filter(|other| *other != Contender::Ferroce);
        let others: Vec<Contender> =
            others.filter(|other| self.times.keys().any(|(_, contender)| contender == other)).collect();
        let mut head = format!("  {:>8}  {:>10} {:>5}", "size", "ferroce", "+-");
        for other in &others {
            head += &format!("  {:>10} {:>5}  {:>6} {:<13}", other.name(), "+-", "ratio", "spread");
        }
        println!("{head}  aim");
        for bytes in self.sizes() {
            let mut line =
                format!("  {:>8}  {}", report::bytes(bytes), cell(self.time(bytes, Contender::Ferroce)));
            for other in &others {
                line += &format!("  {}", cell(self.time(bytes, *other)));
                line += &match self.ratio(bytes, *other) {
                    Some(Spread { least, median, most }) => {
                        format!("  {median:>6.2} {:<13}", format!("{least:.2} - {most:.2}"))
                    }
                    None => format!("  {:>6} {:<13}", "-", ""),
                };
            }
            if let Some((of, most)) = self.aim(bytes) {
                let verdict = match self.ratio(bytes, of) {
                    Some(ratio) if ratio.median <= most => "meets",
                    Some(_) => "falls short",
                    None => "not measured",
                };
                line += &format!("  <= {most:.2} of {}: {verdict}", of.name());
            }
            println!("{line}");
        }
        for (contender, reason) in &self.failures {
            println!("  failed: {}, {reason}", contender.name());
        }
    }

    fn curves(&self) -> Vec<Curve> {
        let curve = |contender: Contender| {
            let point = |bytes: u64| Some((bytes as f64, self.time(bytes, contender)?));
            let points: Vec<_> = self.sizes().into_iter().filter_map(point).collect();
            (!points.is_empty()).then(|| Curve { name: contender.name().to_owned(), points })
        };
        Contender::ALL.into_iter().filter_map(curve).collect()
    }

    fn json(&self) -> Value {
        let row = |bytes: u64| {
            let contenders = Contender::ALL.into_iter().filter_map(|contender| {
                let rounds = self.times.get(&(bytes, contender))?;
                let of = |get: fn(&Time) -> f64| rounds.values().map(get).collect::<Vec<f64>>();
                let figures = json!({ "mean_us": of(|time| time.mean), "median_us": of(|time| time.median) });
                Some((contender.name(), figures))
            });
            let ratio = |other: Contender| {
                let Spread { least, median, most } = self.ratio(bytes, other)?;
                Some((other.name(), [least, median, most]))
            };
            let others = Contender::ALL.into_iter().filter(|other| *other != Contender::Ferroce);
            json!({
                "bytes": bytes, "rounds": contenders.collect::<BTreeMap<_, _>>(),
                "ratio_to": others.filter_map(ratio).collect::<BTreeMap<_, _>>(),
                "aim": self.aim(bytes).map(|(of, most)| json!({ "of": of.name(), "most": most })),
            })
        };
        let failures = self.failures.iter().map(|(who, why)| json!([who.name(), why]));
        json!({
            "operation": self.operation, "ranks": self.ranks, "place": self.place.name(),
            "sizes": self.sizes().into_iter().map(row).collect::<Vec<_>>(),
            "failures": failures.collect::<Vec<_>>(),
        })
    }
}

/// A time and the spread of the rounds.
fn cell(time: Option<Spread>) -> String {
    let Some(Spread { least, median, most }) = time else { return format!("{:>10} {:>5}", "-", "") };
    let decimals = if median < 100.0 { 2 } else { 0 };
    format!("{median:>10.decimals$} {:>4.0}%", (most - least) / median * 100.0)
}

impl Results {
    pub(crate) fn new(rounds: usize) -> Results {
        Results { rounds, measured: Vec::new(), state: Rounds::new(), left_out: Vec::new() }
    }

    pub(crate) fn leave_out(&mut self, what: String, reason: String) {
        eprintln!("collectives: {what}: left out: {reason}");
        self.left_out.push((what, reason));
    }

    pub(crate) fn print_start(&self) {
        println!("{}", Machine::this());
        println!(
            "f32; calls back to back, microseconds each, the mean at the slowest rank; median of {} rounds, and least to most of them; \
             gloo in every third, with both cores for each rank and a tenth of the calls",
            self.rounds
        );
    }

    pub(crate) fn print_end(&self) {
        println!();
        println!("machine's state: {}; each job of a round is a round here", self.state);
        for (what, reason) in &self.left_out {
            println!("left out: {what}: {reason}");
        }
    }

    /// A run without results of ferroce, or with wrong elements, has failed.
    pub(crate) fn verdict(&self) -> Outcome<()> {
        if self.measured.iter().all(|measured| measured.times.is_empty()) {
            return Err("nothing could be measured".into());
        }
        let failures: usize = self.measured.iter().map(|measured| measured.failures.len()).sum();
        if failures > 0 {
            return Err(format!("{failures} jobs have failed, see above").into());
        }
        Ok(())
    }

    pub(crate) fn json(&self) -> Value {
        let left_out = self.left_out.iter().map(|(what, reason)| json!({ "what": what, "reason": reason }));
        json!({
            "bench": "collectives", "machine": Machine::this().to_string(), "rounds": self.rounds,
            "state": state::json(&self.state),
            "measured": self.measured.iter().map(Measured::json).collect::<Vec<_>>(),
            "left_out": left_out.collect::<Vec<_>>(),
        })
    }

    pub(crate) fn svg(&self) -> String {
        let notes = vec![
            Machine::this().to_string(),
            format!(
                "f32, back to back; lines are the median of {} rounds, bands go from the least to the most of them",
                self.rounds
            ),
            format!("machine's state: {}", self.state),
        ];
        let mut sheet =
            Sheet::new("ferroce's collectives beside others'".to_owned(), notes).with_y("time, µs");
        for measured in &self.measured {
            sheet.row(measured.title(), measured.curves(), Vec::new());
        }
        sheet.svg()
    }
}
