//! The results, as text and as JSON.

use std::collections::BTreeMap;
use std::process::Command;

use ferroce::driver::machine::{Machine, Rounds};
use ferroce_benches::perftest;
use ferroce_benches::plot::{Curve, Interval, Sheet};
use ferroce_benches::report::Spread;
use ferroce_benches::state;
use serde_json::{Value, json};

use crate::case::{Case, Contender, Figures, Op, RoundTrip, bytes};
use crate::plan::{Bound, Figure, Group, Line, Measure, Quantity, SIZES};

/// All results.
pub(crate) struct Results {
    rounds: usize,
    millis: u64,
    cores: [Option<usize>; 2],
    pub(crate) groups: Vec<Measured>,
    /// The state of the machine, in each case of each round.
    pub(crate) state: Rounds,
    /// Measurements that were not possible, with the reason.
    left_out: Vec<(Group, String)>,
    /// The results of perftest on this machine, or the reason that there are none.
    perftest: Result<Vec<perftest::Row>, String>,
}

/// A driver with a frame size.
pub(crate) struct Measured {
    pub(crate) group: Group,
    link: String,
    /// By round; some cases are only in the first rounds.
    pub(crate) cases: BTreeMap<Case, Vec<Option<Figures>>>,
    pub(crate) descriptions: BTreeMap<Contender, String>,
    /// The last failure of each.
    pub(crate) failures: BTreeMap<Contender, String>,
    pub(crate) no_cycles: Option<String>,
}

pub(crate) fn name(contender: Contender) -> &'static str {
    match contender {
        Contender::Raw => "raw driver",
        Contender::Ferroce => "ferroce",
        Contender::Tcp => "kernel TCP",
        Contender::Udp => "kernel UDP",
        Contender::Ucx => "UCX over TCP",
        Contender::Ring => "ring",
    }
}

impl Measured {
    pub(crate) fn new(group: Group, link: String) -> Measured {
        Measured {
            group,
            link,
            cases: BTreeMap::new(),
            descriptions: BTreeMap::new(),
            failures: BTreeMap::new(),
            no_cycles: None,
        }
    }

    /// A figure of one case.
    fn spread(&self, case: Case, get: fn(&Figures) -> Option<f64>) -> Option<Spread> {
        let rounds = self.cases.get(&case)?.iter().flatten();
        Spread::of(rounds.filter_map(get).collect())
    }

    /// Payload by message size, with the best results of the others.
    fn curves(&self) -> Vec<Curve> {
        let gbps = |figures: &Figures| figures.gbps;
        let shapes = [
            ("ferroce WRITE", Op::Write, 1),
            ("ferroce READ", Op::Read, 1),
            ("ferroce SEND", Op::Send, 1),
            ("ferroce WRITE, 16 QPs", Op::Write, 16),
        ];
        let curve = |name: &str, case: &dyn Fn(u32) -> Case| {
            let of = |size: u32| Some((f64::from(size), self.spread(case(size), gbps)?));
            Curve { name: name.to_owned(), points: SIZES.into_iter().filter_map(of).collect() }
        };
        let curves = shapes.map(|(name, op, qps)| curve(name, &|size| Case::Rate { op, size, qps }));
        let ucx = curve("UCX over TCP, put", &|size| Case::UcxRate { size });
        let others = self.cases.keys().filter_map(|case| {
            let name = match case {
                Case::RawChecked { .. } => "driver alone, copy and CRC",
                Case::TcpRate { write } => &format!("kernel TCP, writes of {}", bytes(*write)),
                Case::UdpRate { .. } => "kernel UDP, full datagrams",
                Case::Ring { crc: true, .. } => "shared memory, copy and CRC",
                _ => return None,
            };
            let points = self.spread(*case, gbps).map(|spread| (case.payload() as f64, spread));
            Some(Curve { name: name.to_owned(), points: points.into_iter().collect() })
        });
        curves.into_iter().chain([ucx]).chain(others).filter(|curve| !curve.points.is_empty()).collect()
    }

    /// Round trips.
    fn intervals(&self) -> Vec<Interval> {
        let micros = |case: Case, get: fn(&RoundTrip) -> u64| {
            let times = self.cases.get(&case)?.iter().flatten().filter_map(|figures| figures.round_trip);
            Spread::of(times.map(|times| get(&times) as f64 / 1e3).collect())
        };
        let cases = self.cases.keys().filter(|case| case.is_round_trip() && **case != Case::Idle);
        let interval = |case: &Case| {
            let name = match case {
                Case::RoundTrip { size } => format!("ferroce WRITE, {}", bytes(*size as usize)),
                Case::RawRoundTrip { frame } => format!("driver alone, {frame} B"),
                Case::RingRoundTrip => "shared memory, 64 B".to_owned(),
                case => format!("{}, {}", name(case.contender()), bytes(case.payload())),
            };
            let (p50, p99) = (micros(*case, |times| times.p50)?, micros(*case, |times| times.p99)?);
            Some(Interval { name, p50, p99 })
        };
        cases.filter_map(interval).collect()
    }

    /// A line's value in each round that has all its inputs.
    fn values(&self, figure: Figure) -> Vec<f64> {
        let rounds = self.cases.values().map(Vec::len).max().unwrap_or(0);
        let of = |case: Case, round: usize| self.cases.get(&case)?.get(round)?.clone();
        (0..rounds).filter_map(|round| figure.value(|case| of(case, round))).collect()
    }
}

impl Results {
    pub(crate) fn new(rounds: usize, millis: u64, cores: [Option<usize>; 2]) -> Results {
        let perftest = perftest::run();
        let (groups, left_out, state) = (Vec::new(), Vec::new(), Rounds::new());
        Results { rounds, millis, cores, groups, state, left_out, perftest }
    }

    pub(crate) fn leave_out(&mut self, group: Group, reason: String) {
        eprintln!("wire: {} is left out: {reason}", group.driver.name());
        self.left_out.push((group, reason));
    }

    fn spread(&self, line: &Line) -> Option<Spread> {
        let measured = self.groups.iter().find(|measured| measured.group == line.group)?;
        Spread::of(measured.values(line.figure))
    }

    pub(crate) fn print(&self, lines: &[&Line]) {
        let Results { rounds, millis, cores, .. } = self;
        println!("{}", Machine::this());
        match cores {
            [Some(a), Some(b)] if a != b => println!("two processes, on core {a} and core {b}"),
            _ => println!("two processes on ONE core, which the figures are not meant for"),
        }
        println!("{rounds} rounds, each case {millis} ms a round; median, and least to most of the rounds");
        println!("machine's state: {}; each case of a round is a round here", self.state);
        println!();
        println!(
            "{:<4} {:<7} {:<68} {:>8}  {:<17} {:<9} ",
            "line", "driver", "what", "measured", "spread", "bound"
        );
        for line in lines {
            self.print_line(line);
        }
        self.print_disturbance();
        for measured in &self.groups {
            print_group(measured);
        }
        println!();
        println!(
            "ns/msg: CPU time of a thread for each message, at the end that starts and at the other one; both"
        );
        println!(
            "spin, so it is what a message keeps a core from, and the kernel's own threads are not in it."
        );
        if let Some(reason) = self.groups.iter().find_map(|measured| measured.no_cycles.as_ref()) {
            println!("cycles: no counters here ({reason})");
        }
        match &self.perftest {
            Ok(rows) => rows.iter().for_each(|row| println!("{}: {:.2} {}", row.what, row.value, row.unit)),
            Err(reason) => println!("perftest: {reason}"),
        }
        for (group, reason) in &self.left_out {
            println!("left out: {}, path MTU {}: {reason}", group.driver.name(), group.path_mtu);
        }
        for measured in &self.groups {
            let group = measured.group;
            for (contender, reason) in &measured.failures {
                let (driver, mtu) = (group.driver.name(), group.path_mtu);
                println!("failed: {driver}, path MTU {mtu}, {}: {reason}", name(*contender));
            }
        }
    }

    /// A spinning process that does not have its core all the time was disturbed by others. Returns whether that was
    /// so.
    fn disturbance(&self) -> Option<(String, bool)> {
        let cases = self.groups.iter().flat_map(|measured| measured.cases.values());
        let shares = cases.flatten().flatten().filter_map(|figures| figures.on_core);
        let Spread { median, least, .. } = Spread::of(shares.collect())?;
        let [median_percent, least_percent] = [median, least].map(|share| share * 100.0);
        let text = format!(
            "spinning processes had their cores for {median_percent:.0} % of the time, {least_percent:.0} % at worst"
        );
        Some((text, median < QUIET))
    }

    fn print_disturbance(&self) {
        let Some((text, is_busy)) = self.disturbance() else { return };
        println!();
        println!("{text}");
        if is_busy {
            println!(
                "BUSY MACHINE: others took the rest, so neither times nor ratios are what they could be"
            );
        }
    }

    fn print_line(&self, line: &Line) {
        let format = |value: f64| match line.figure {
            Figure::Ratio(..) => format!("{value:.3}"),
            Figure::Above(..) => format!("{value:.0}"),
            Figure::Alone(Measure(_, Quantity::Idle)) => format!("{:.2} %", value * 100.0),
            Figure::Alone(Measure(_, Quantity::P50 | Quantity::P99)) => format!("{:.1} us", value / 1e3),
            Figure::Alone(Measure(_, Quantity::Payload)) => format!("{value:.1} Gb/s"),
            Figure::Alone(..) => format!("{:.2} M", value / 1e6),
        };
        let bound = match line.bound {
            Bound::AtLeast(bound) => format!(">= {}", format(bound)),
            Bound::AtMost(bound) => format!("<= {}", format(bound)),
        };
        let (value, spread, verdict) = match self.spread(line) {
            Some(Spread { median, least, most }) => {
                let verdict = if line.bound.is_met_by(median) { "meets" } else { "falls short" };
                (format(median), format!("{} - {}", format(least), format(most)), verdict)
            }
            None => ("-".to_owned(), String::new(), "not measured"),
        };
        let driver = line.group.driver.name();
        println!(
            "{:<4} {driver:<7} {:<68} {value:>8}  {spread:<17} {bound:<10} {verdict}",
            line.id, line.text
        );
    }

    pub(crate) fn svg(&self) -> String {
        let Results { rounds, millis, cores, .. } = self;
        let cores = match cores {
            [Some(a), Some(b)] if a != b => "two processes with a core each",
            _ => "two processes on ONE core",
        };
        let mut notes = vec![
            format!("{}; {}", Machine::this(), today()),
            format!(
                "{cores}; lines are the median of {rounds} rounds of {millis} ms, bands and bars go from the least to the most of them"
            ),
        ];
        if let Some((text, true)) = self.disturbance() {
            notes.push(format!("BUSY MACHINE: {text}; others took the rest"));
        }
        if self.state.slow() > 0 {
            notes.push(format!("machine's state: {}", self.state));
        }
        let mut sheet =
            Sheet::new("ferroce beside the driver alone, the kernel's sockets and UCX".to_owned(), notes);
        for measured in &self.groups {
            let Group { driver, path_mtu, .. } = measured.group;
            let title = format!("{}, path MTU {path_mtu}: {}", driver.name(), measured.link);
            sheet.row(title, measured.curves(), measured.intervals());
        }
        sheet.svg()
    }

    pub(crate) fn json(&self, lines: &[&Line]) -> Value {
        let line = |line: &&Line| {
            let spread = self.spread(line);
            let (at_least, bound) = match line.bound {
                Bound::AtLeast(bound) => (true, bound),
                Bound::AtMost(bound) => (false, bound),
            };
            json!({
                "line": line.id, "driver": line.group.driver.name(), "path_mtu": line.group.path_mtu,
                "what": line.text, "at_least": at_least, "bound": bound,
                "median": spread.map(|spread| spread.median),
                "least": spread.map(|spread| spread.least),
                "most": spread.map(|spread| spread.most),
                "meets": spread.map(|spread| line.bound.is_met_by(spread.median)),
            })
        };
        let group = |measured: &Measured| {
            let cases = measured
                .cases
                .iter()
                .map(|(case, rounds)| json!({ "case": case, "name": case.to_string(), "rounds": rounds }));
            let described = measured.descriptions.iter().map(|(who, what)| (name(*who), what));
            let failures = measured.failures.iter().map(|(who, why)| (name(*who), why));
            json!({
                "driver": measured.group.driver.name(), "path_mtu": measured.group.path_mtu,
                "link": measured.link, "ports": described.collect::<BTreeMap<_, _>>(),
                "cases": cases.collect::<Vec<_>>(), "failures": failures.collect::<BTreeMap<_, _>>(),
            })
        };
        let left_out = self.left_out.iter().map(|(group, reason)| {
            json!({ "driver": group.driver.name(), "path_mtu": group.path_mtu, "reason": reason })
        });
        json!({
            "bench": "wire", "machine": Machine::this().to_string(), "date": today(), "cores": self.cores,
            "rounds": self.rounds, "millis": self.millis, "state": state::json(&self.state),
            "lines": lines.iter().map(line).collect::<Vec<_>>(),
            "groups": self.groups.iter().map(group).collect::<Vec<_>>(),
            "left_out": left_out.collect::<Vec<_>>(),
            "perftest": match &self.perftest {
                Ok(rows) => rows.iter().map(|row| json!([row.what, row.value, row.unit])).collect(),
                Err(reason) => json!(reason),
            },
        })
    }
}

/// The share of its core that a process has on an idle machine.
const QUIET: f64 = 0.97;

fn print_group(measured: &Measured) {
    let group = measured.group;
    println!();
    println!("{}, path MTU {}: {}", group.driver.name(), group.path_mtu, measured.link);
    for (contender, description) in &measured.descriptions {
        println!("  {}: {description}", name(*contender));
    }
    println!("  {:<44} {:>9} {:>8} {:>6} {:>15} {:>7}", "one way", "Mmsg/s", "Gb/s", "+-", "ns/msg", "lost");
    for (case, rounds) in measured.cases.iter().filter(|(case, _)| !case.is_round_trip()) {
        let all = |get: &dyn Fn(&Figures) -> Option<f64>| {
            Spread::of(rounds.iter().flatten().filter_map(get).collect())
        };
        let Some(rate) = all(&|figures| figures.rate) else { continue };
        let median = |get: &dyn Fn(&Figures) -> Option<f64>| all(get).map_or(0.0, |spread| spread.median);
        let gbps = median(&|figures| figures.gbps);
        let cpu = [0, 1].map(|end| all(&|figures: &Figures| figures.cpu_nanos[end]));
        let cpu = cpu.map(|spread| spread.map_or("-".to_owned(), |spread| format!("{:.0}", spread.median)));
        let cycles = [0, 1].map(|end| all(&|figures: &Figures| figures.cycles[end]));
        let cycles = match cycles {
            [Some(a), Some(b)] => format!("  {:.0} + {:.0} cycles", a.median, b.median),
            [Some(a), None] => format!("  {:.0} cycles", a.median),
            _ => String::new(),
        };
        let lost = median(&|figures| Some(figures.lost));
        println!(
            "  {:<44} {:>9.4} {gbps:>8.2} {:>5.0}% {:>15} {:>6.2}%{cycles}",
            case.to_string(),
            rate.median / 1e6,
            (rate.most - rate.least) / rate.median * 100.0,
            cpu.join(" + "),
            lost * 100.0
        );
    }
    if !measured.cases.keys().any(|case| case.is_round_trip()) {
        return;
    }
    println!(
        "  {:<44} {:>9} {:>9} {:>9} {:>9}",
        "round trip, us (half of p50 behind it)", "p50", "p99", "p99.9", "half"
    );
    for (case, rounds) in measured.cases.iter().filter(|(case, _)| case.is_round_trip()) {
        let median = |get: fn(&RoundTrip) -> u64| {
            let values = rounds.iter().flatten().filter_map(|figures| figures.round_trip.as_ref().map(get));
            Spread::of(values.map(|nanos| nanos as f64 / 1e3).collect()).map_or(0.0, |spread| spread.median)
        };
        let p50 = median(|times| times.p50);
        let (p99, p999) = (median(|times| times.p99), median(|times| times.p999));
        println!("  {:<44} {p50:>9.2} {p99:>9.2} {p999:>9.2} {:>9.2}", case.to_string(), p50 / 2.0);
    }
}

/// The date, as `date` prints it.
fn today() -> String {
    let date = Command::new("date").arg("+%Y-%m-%d").output();
    date.map_or(String::new(), |date| String::from_utf8_lossy(&date.stdout).trim().to_owned())
}
