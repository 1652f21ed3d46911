//! Comparison with two published ns-3 simulators, event by event (pcap-fixtures/dcqcn).

use std::fs;
use std::path::Path;

use ferroce::{Dcqcn, Nanos, ReactionPoint};

/// The input of a trace: its file, the parameters, the line rate, and the packets of the sender.
struct Trace {
    file: &'static str,
    parameters: Dcqcn,
    line_rate: u64,
    packet: u32,
    /// The time of a packet on the line, in ns.
    serialisation: u64,
}

const ZHU: Trace = Trace {
    file: "rp_synthetic_zhu25",
    parameters: Dcqcn::ZHU25,
    line_rate: 25_000_000_000,
    packet: 1020,
    serialisation: 326,
};

const MLX: Trace =
    Trace { file: "rp_synthetic_mlx25", parameters: Dcqcn::MLX25, packet: 1048, serialisation: 335, ..ZHU };

fn traces() -> [Trace; 10] {
    let free = |parameters: Dcqcn| parameters.clamp_tgt_rate(false);
    let of_150k = Dcqcn::ZHU25.rpg_byte_reset(150_000);
    [
        ZHU,
        Trace { file: "rp_synthetic_zhu25_noclamp", parameters: free(Dcqcn::ZHU25), ..ZHU },
        Trace { file: "rp_synthetic_zhu25_bc150k", parameters: of_150k, ..ZHU },
        Trace { file: "rp_synthetic_zhu25_bc150k_noclamp", parameters: free(of_150k), ..ZHU },
        MLX,
        Trace {
            file: "rp_synthetic_mlx25_noclamp",
            parameters: free(Dcqcn::MLX25).clamp_tgt_rate_after_time_inc(true),
            ..MLX
        },
        Trace { file: "rp_trace_incast2_zhu25", ..ZHU },
        Trace { file: "rp_trace_incast2_zhu25p", parameters: Dcqcn::ZHU25P, ..ZHU },
        Trace { file: "rp_trace_incast2_mlx25", ..MLX },
        Trace {
            file: "rp_trace_incast2_hpcc100",
            parameters: Dcqcn::HPCC100,
            line_rate: 100_000_000_000,
            serialisation: 83,
            ..MLX
        },
    ]
}

/// A line of a trace: an event, and the state after it.
#[derive(Clone, Debug)]
struct Row {
    time: u64,
    event: String,
    alpha: f64,
    rate: f64,
    target: f64,
    timer_stage: u32,
    byte_stage: Option<u32>,
}

impl Row {
    fn parse(line: &str) -> Row {
        let mut fields = line.split(',');
        let mut next = || fields.next().unwrap();
        Row {
            time: next().parse().unwrap(),
            event: next().to_owned(),
            alpha: next().parse().unwrap(),
            rate: next().parse().unwrap(),
            target: next().parse().unwrap(),
            timer_stage: next().parse().unwrap(),
            byte_stage: fields.next().map(|stage| stage.parse().unwrap()),
        }
    }

    /// `cnp`, `alpha`, `timer`, `byte` or `cut`.
    fn kind(&self) -> &str {
        self.event.split('_').next().unwrap()
    }
}

fn rows(file: &str) -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures/dcqcn").join(file);
    let text = fs::read_to_string(path.with_extension("csv")).unwrap();
    text.lines().skip(1).map(Row::parse).collect()
}

/// The state of a reaction point.
#[derive(Clone, Copy, Debug, PartialEq)]
struct State {
    alpha: f64,
    rate: u64,
    target: u64,
    timer_stage: u32,
    byte_stage: u32,
}

impl State {
    fn of(point: &ReactionPoint, now: u64) -> State {
        State {
            alpha: point.alpha(Nanos(now)),
            rate: point.rate(),
            target: point.target(),
            timer_stage: point.timer_stage(),
            byte_stage: point.byte_stage(),
        }
    }
}

/// A change of a reaction point, its time, and the state after it.
#[derive(Clone, Copy, Debug)]
struct Change {
    time: u64,
    before: State,
    after: State,
}

impl Change {
    /// Whether it is an event of this kind in the trace.
    fn is_of(&self, kind: &str) -> bool {
        let Change { before, after, .. } = self;
        match kind {
            "alpha" => after.alpha != before.alpha,
            "timer" => after.timer_stage == before.timer_stage + 1,
            "byte" => after.byte_stage == before.byte_stage + 1,
            "cut" => after.timer_stage == 0 && after.rate < before.rate,
            _ => false,
        }
    }
}

/// A sender that always has packets of one size to send. It is passed CNPs and the time, and records each change of its
/// reaction point.
struct Sender<'a> {
    trace: &'a Trace,
    point: ReactionPoint,
    now: u64,
    /// When the next packet is sent.
    departure: u64,
    changes: Vec<Change>,
}

impl<'a> Sender<'a> {
    fn new(trace: &'a Trace) -> Sender<'a> {
        let point = ReactionPoint::new(trace.parameters, trace.line_rate).unwrap();
        Sender { trace, point, now: 0, departure: 0, changes: Vec::new() }
    }

    fn state(&self) -> State {
        State::of(&self.point, self.now)
    }

    /// The time of a packet at the current rate, in ns.
    fn gap(&self) -> u64 {
        (8 * u64::from(self.trace.packet) * 1_000_000_000 / self.point.rate()).max(self.trace.serialisation)
    }

    /// Runs until before `until`.
    fn run(&mut self, until: u64) {
        loop {
            let before = self.state();
            let change = self.point.next_change(Nanos(self.now)).0;
            let next = change.min(self.departure);
            if next >= until {
                return;
            }
            self.now = next;
            if change == next {
                let gap = self.gap();
                self.point.advance(Nanos(next));
                // The simulator's packets are not recorded; so its byte counters end when they do in the trace.
                self.departure = (self.departure + self.gap()).saturating_sub(gap).max(next);
            } else {
                self.point.on_sent(self.trace.packet, Nanos(next));
                self.departure = next + self.gap();
            }
            let after = self.state();
            if after != before {
                self.changes.push(Change { time: next, before, after });
            }
        }
    }

    /// The cut at the same time as this timer event, whose clamp sets the target rate to the rate after the timer event.
    fn cut_at_end_of_timer(&self, row: &Row) -> Option<Change> {
        let is_it = |change: &&Change| change.time == row.time && change.is_of("cut");
        self.changes
            .iter()
            .find(is_it)
            .filter(|_| row.kind() == "timer" && self.trace.parameters.clamp_tgt_rate)
            .copied()
    }

    /// Removes the change of this line of the trace.
    fn take(&mut self, row: &Row) -> Option<Change> {
        let slack = if row.kind() == "byte" { self.gap() + 1 } else { 0 };
        let is_it = |change: &Change| change.is_of(row.kind()) && change.time.abs_diff(row.time) <= slack;
        let found = self.changes.iter().position(is_it)?;
        let change = self.changes[found];
        // There may be another change at the same time, with its own line.
        let is_more = ["alpha", "timer", "byte", "cut"].iter().filter(|kind| change.is_of(kind)).count() > 1;
        if is_more {
            self.changes[found].before = match row.kind() {
                "alpha" => State { alpha: change.after.alpha, ..change.before },
                _ => State { alpha: change.before.alpha, ..change.after },
            };
        } else {
            self.changes.remove(found);
        }
        Some(change)
    }
}

/// How far the comparison has advanced.
struct Followed {
    events: usize,
    /// The largest relative difference of alpha or of a rate, beyond the rounding of the trace.
    worst: f64,
    /// The largest difference in time of a byte counter event, in packets.
    latest: f64,
}

impl Followed {
    /// Compares a state with that of a line: the fields that the event changes.
    fn compare(&mut self, file: &str, row: &Row, state: State) {
        let (of_alpha, of_rates) = match row.kind() {
            "alpha" => (true, false),
            "timer" | "byte" => (false, true),
            _ => (true, true),
        };
        let mut pairs = Vec::new();
        if of_alpha {
            pairs.push((state.alpha, row.alpha));
        }
        if of_rates {
            pairs.push((state.rate as f64 / 1e6, row.rate));
            pairs.push((state.target as f64 / 1e6, row.target));
            assert_eq!(state.timer_stage, row.timer_stage, "{file}: {row:?}, and here {state:?}");
            let byte_stage = row.byte_stage.unwrap_or(0);
            assert_eq!(state.byte_stage, byte_stage, "{file}: {row:?}, and here {state:?}");
        }
        for (ours, theirs) in pairs {
            self.near(row, ours, theirs);
        }
        self.events += 1;
    }

    fn near(&mut self, row: &Row, ours: f64, theirs: f64) {
        // Alpha has ten digits in the trace, a rate in Mb/s six.
        let rounding = if theirs <= 1.0 { 5e-11 } else { 5e-7 };
        let difference = ((ours - theirs).abs() - rounding).max(0.0) / theirs;
        assert!(difference <= 4e-9, "{theirs} in {row:?}, and here {ours}");
        self.worst = self.worst.max(difference);
    }
}

/// Passes the CNPs of a trace to a reaction point, and the bytes of a sender that it paces; this must cause exactly the
/// events of the trace.
fn follow(trace: &Trace) -> Followed {
    let mut sender = Sender::new(trace);
    let mut followed = Followed { events: 0, worst: 0.0, latest: 0.0 };
    for row in rows(trace.file) {
        // Events at the time of a CNP are before it if they are in the trace.
        if row.kind() == "cnp" {
            sender.run(row.time);
            sender.now = row.time;
            sender.point.on_cnp(Nanos(row.time));
            followed.compare(trace.file, &row, sender.state());
            continue;
        }
        sender.run(row.time + 1);
        let mut change = sender.take(&row);
        if change.is_none() && row.kind() == "byte" {
            // It may be one packet later.
            sender.run(sender.departure + 1);
            change = sender.take(&row);
        }
        if let Some(cut) = sender.cut_at_end_of_timer(&row) {
            followed.near(&row, cut.after.target as f64 / 1e6, row.rate);
            followed.events += 1;
            continue;
        }
        let Some(change) = change else {
            // With alpha 1 it does not change.
            assert!(row.kind() == "alpha" && sender.state().alpha == 1.0, "{}: no {row:?}", trace.file);
            followed.compare(trace.file, &row, sender.state());
            continue;
        };
        let packets = change.time.abs_diff(row.time) as f64 / sender.gap() as f64;
        followed.latest = followed.latest.max(packets);
        if row.kind() == "byte" {
            // A packet was sent there at this time; the rounding of the gaps is unknown.
            sender.departure = (sender.departure + row.time - change.time).max(sender.now);
        }
        followed.compare(trace.file, &row, change.after);
        let unknown = sender.changes.iter().find(|change| change.time < row.time);
        assert!(unknown.is_none(), "{}: {unknown:?}, which the trace has not, before {row:?}", trace.file);
    }
    followed
}

#[test]
fn events_of_the_published_simulators_are_reproduced() {
    println!("{:<36} {:>6} {:>12} {:>14}", "file", "events", "worst error", "bytes, packets");
    for trace in traces() {
        let Followed { events, worst, latest } = follow(&trace);
        assert_eq!(events, rows(trace.file).len());
        println!("{:<36} {events:>6} {worst:>12.1e} {latest:>14.2}", trace.file);
    }
}
