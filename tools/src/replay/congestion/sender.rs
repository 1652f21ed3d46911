//! A sender compared with the reaction point of DCQCN. A `ReactionPoint` gets the sender's CNPs and bytes, and the
//! rates that it allows are summed up.

use std::cmp::Reverse;
use std::fmt;

use ferroce::{Gid, Nanos, Qpn, ReactionPoint};
use serde::Serialize;

use super::super::sample::Sample;
use super::origin::SenderName;
use super::window::whole_windows;
use super::{gigabits, micros};

/// A sender, its data and its CNPs.
pub(super) struct Sender {
    name: SenderName,
    /// The first destination of its data, and whether there are others.
    to: Option<(Gid, Qpn)>,
    has_more: bool,
    marked: u64,
    events: Vec<(Nanos, Event)>,
}

#[derive(Clone, Copy)]
enum Event {
    Cnp,
    Data(u32),
}

/// The report on a sender. Rates are in bit/s, times in µs since the first packet of the capture.
#[derive(Serialize)]
pub(super) struct SenderReport {
    address: String,
    queue_pair: Option<u32>,
    /// The first destination of its data.
    to: Option<String>,
    #[serde(skip)]
    name: String,
    packets: u64,
    bytes: u64,
    /// Packets of it that were recorded with Congestion Experienced.
    marked: u64,
    cnps: u64,
    least_us_between_cnps: Option<f64>,
    expected: Expected,
    seen: SeenRates,
    /// The window, of at least 1 ms and 200 packets, with the greatest excess.
    worst: Option<Excess>,
    series: Vec<Interval>,
}

#[derive(Serialize)]
struct Expected {
    /// From its first data packet to its last.
    mean: Option<f64>,
    lowest: u64,
    /// At the end of the capture, or when the last CNP takes effect.
    last: u64,
    target: u64,
    alpha: f64,
}

#[derive(Serialize)]
struct SeenRates {
    /// From its first data packet to its last.
    mean: Option<f64>,
    /// Over 1 ms and 200 packets.
    most: Option<f64>,
}

#[derive(Serialize)]
struct Excess {
    from_us: f64,
    to_us: f64,
    seen: f64,
    expected: f64,
    /// The excess over the expected rate: 0.1 is 10 % more. Negative if less was sent.
    excess: f64,
}

/// A time interval of a sender.
#[derive(Clone, Serialize)]
struct Interval {
    from_us: f64,
    to_us: f64,
    cnps: u64,
    expected: f64,
    seen: f64,
}

/// The most intervals of a series, and steps in which the allowed rate is summed up.
const INTERVALS: u64 = 50;
const STEPS: u64 = 20_000;
/// The most changes after the last event that are followed, to see the effect of a CNP.
const PATIENCE: usize = 1000;

impl Sender {
    pub(super) fn new(name: SenderName) -> Sender {
        Sender { name, to: None, has_more: false, marked: 0, events: Vec::new() }
    }

    /// Takes data of the sender, or a CNP for it.
    pub(super) fn take(&mut self, sample: &Sample) {
        if sample.is_cnp() {
            self.events.push((sample.at, Event::Cnp));
            return;
        }
        let to = (sample.destination, sample.to);
        self.has_more |= *self.to.get_or_insert(to) != to;
        self.marked += u64::from(sample.is_marked);
        self.events.push((sample.at, Event::Data(sample.bytes)));
    }

    /// Feeds `point` with the sender's CNPs and data, in a capture from `start` to `end`.
    pub(super) fn compare(self, point: ReactionPoint, start: Nanos, end: Nanos) -> SenderReport {
        let mut course = Course::new(point, &self.events, start);
        for (at, event) in &self.events {
            course.take(*at, *event);
        }
        let (course, last) = course.finish(end);
        let times = &course.times;
        let mean = |sums: &[f64]| rate_of(sums.last()? - sums.first()?, *times.first()?, *times.last()?);
        let us = |at: Nanos| micros_since(start, at);
        let rates = |(from, to): (usize, usize)| {
            let rate = |sums: &[f64]| rate_of(sums[to] - sums[from], times[from], times[to]);
            Some((from, to, rate(&course.sent)?, rate(&course.allowed)?))
        };
        let windows: Vec<_> = whole_windows(times).filter_map(rates).collect();
        let excess = windows.iter().map(|&(from, to, seen, expected)| Excess {
            from_us: us(times[from]),
            to_us: us(times[to]),
            seen,
            expected,
            excess: seen / expected - 1.0,
        });
        let cnps = || self.events.iter().filter(|(_, event)| matches!(event, Event::Cnp)).map(|(at, _)| *at);
        let gaps = cnps().zip(cnps().skip(1)).map(|(a, b)| micros_since(a, b));
        SenderReport {
            address: self.name.host().to_ip().to_string(),
            queue_pair: self.name.qpn().map(Qpn::value),
            to: self.to.map(|to| place(to.0, Some(to.1))),
            name: self.label(),
            packets: times.len() as u64,
            bytes: course.bytes,
            marked: self.marked,
            cnps: cnps().count() as u64,
            least_us_between_cnps: gaps.reduce(f64::min),
            expected: Expected {
                mean: mean(&course.allowed),
                lowest: course.lowest,
                last: last.rate(),
                target: last.target(),
                alpha: last.alpha(end),
            },
            seen: SeenRates {
                mean: mean(&course.sent),
                most: windows.iter().map(|window| window.2).reduce(f64::max),
            },
            worst: excess.reduce(|a, b| if b.excess > a.excess { b } else { a }),
            series: course.series,
        }
    }

    fn label(&self) -> String {
        let from = place(self.name.host(), self.name.qpn());
        let more = if self.has_more { ", ..." } else { "" };
        self.to.map_or(from.clone(), |(gid, qpn)| format!("{from} > {}{more}", place(gid, Some(qpn))))
    }
}

impl SenderName {
    fn host(&self) -> Gid {
        match self {
            SenderName::Known(host, _) => *host,
            SenderName::Unknown(flow) => flow.0,
        }
    }

    fn qpn(&self) -> Option<Qpn> {
        match self {
            SenderName::Known(_, qpn) => Some(*qpn),
            SenderName::Unknown(_) => None,
        }
    }
}

fn place(gid: Gid, qpn: Option<Qpn>) -> String {
    format!("{} qp {}", gid.to_ip(), qpn.map_or("?".to_owned(), |qpn| qpn.to_string()))
}

fn micros_since(start: Nanos, at: Nanos) -> f64 {
    at.since(start).as_nanos() as f64 / 1e3
}

/// The rate of `bits` between two times; `None` if the times are equal.
fn rate_of(bits: f64, from: Nanos, to: Nanos) -> Option<f64> {
    let time = to.0.saturating_sub(from.0);
    (time > 0).then(|| bits * 1e9 / time as f64)
}

/// A reaction point in the course of a capture.
struct Course {
    point: ReactionPoint,
    first: Nanos,
    now: Nanos,
    step: u64,
    /// Bits allowed and sent so far.
    bits_allowed: f64,
    bits_sent: f64,
    bytes: u64,
    /// For each data packet: its time, and the bits allowed and sent before it.
    times: Vec<Nanos>,
    allowed: Vec<f64>,
    sent: Vec<f64>,
    lowest: u64,
    /// The rate before a CNP that has not lowered it yet.
    uncut: Option<u64>,
    interval: u64,
    series: Vec<Interval>,
}

impl Course {
    fn new(point: ReactionPoint, events: &[(Nanos, Event)], start: Nanos) -> Course {
        let time = |event: Option<&(Nanos, Event)>| event.map_or(start, |(at, _)| *at);
        let (first, last) = (time(events.first()), time(events.last()));
        let span = last.0.saturating_sub(first.0);
        // No step spans two intervals.
        let step = (span / STEPS).max(1);
        let interval = span.div_ceil(INTERVALS).max(1).next_multiple_of(step);
        let intervals = (0..if span > 0 { span.div_ceil(interval) } else { 0 }).map(|number| {
            let bound = |number: u64| micros_since(start, Nanos(first.0 + (number * interval).min(span)));
            let (from_us, to_us) = (bound(number), bound(number + 1));
            Interval { from_us, to_us, cnps: 0, expected: 0.0, seen: 0.0 }
        });
        Course {
            lowest: point.rate(),
            point,
            first,
            now: first,
            step,
            bits_allowed: 0.0,
            bits_sent: 0.0,
            bytes: 0,
            times: Vec::new(),
            allowed: Vec::new(),
            sent: Vec::new(),
            uncut: None,
            interval,
            series: intervals.collect(),
        }
    }

    /// The current interval of the series.
    fn interval(&mut self) -> Option<&mut Interval> {
        let last = self.series.len().checked_sub(1)?;
        let number = (self.now.0 - self.first.0) / self.interval;
        self.series.get_mut(last.min(usize::try_from(number).unwrap_or(last)))
    }

    /// Sums up the allowed bits until `at`.
    fn advance(&mut self, at: Nanos) {
        while self.now < at {
            let gone = self.now.0 - self.first.0;
            let next = Nanos(self.now.0.saturating_add(self.step - gone % self.step)).min(at);
            let bits = self.point.rate() as f64 * (next.0 - self.now.0) as f64 / 1e9;
            self.bits_allowed += bits;
            if let Some(interval) = self.interval() {
                interval.expected += bits;
            }
            self.now = next;
            self.point.advance(next);
            self.look();
        }
    }

    fn look(&mut self) {
        let rate = self.point.rate();
        self.lowest = self.lowest.min(rate);
        self.uncut = self.uncut.filter(|before| rate >= *before);
    }

    fn take(&mut self, at: Nanos, event: Event) {
        self.advance(at);
        match event {
            Event::Cnp => {
                self.uncut = Some(self.point.rate());
                self.point.on_cnp(at);
                if let Some(interval) = self.interval() {
                    interval.cnps += 1;
                }
            }
            Event::Data(bytes) => {
                self.times.push(at);
                self.allowed.push(self.bits_allowed);
                self.sent.push(self.bits_sent);
                let bits = 8.0 * f64::from(bytes);
                self.bits_sent += bits;
                self.bytes += u64::from(bytes);
                if let Some(interval) = self.interval() {
                    interval.seen += bits;
                }
                self.point.on_sent(bytes, at);
            }
        }
        self.look();
    }

    /// Ends the course; returns it with the rates of its series, and the reaction point at the end of the capture.
    fn finish(mut self, end: Nanos) -> (Course, ReactionPoint) {
        for interval in &mut self.series {
            let seconds = (interval.to_us - interval.from_us) / 1e6;
            (interval.expected, interval.seen) = (interval.expected / seconds, interval.seen / seconds);
        }
        let mut last = self.point.clone();
        last.advance(end);
        self.lowest = self.lowest.min(last.rate());
        // Some rules cut only some time after a CNP.
        if let Some(before) = self.uncut.filter(|before| last.rate() == *before) {
            let (mut later, mut now) = (last.clone(), end);
            for _ in 0..PATIENCE {
                now = later.next_change(now);
                if now == Nanos::NEVER || later.rate() != before {
                    break;
                }
                later.advance(now);
            }
            if later.rate() < before {
                self.lowest = self.lowest.min(later.rate());
                last = later;
            }
        }
        (self, last)
    }
}

impl SenderReport {
    pub(super) const GROUPS: &str =
        "                                          | expected                 |        | seen            |";
    pub(super) const HEADER: &str = "   packets        bytes   marked     CNPs |     mean  lowest    last |  alpha |    mean    most |   excess";

    /// Those with the most CNPs first, then those with the most data.
    pub(super) fn order(&self) -> impl Ord + use<> {
        Reverse((self.cnps, self.bytes))
    }

    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    /// Whether the CNPs for it are unknown.
    pub(super) fn is_unknown(&self) -> bool {
        self.queue_pair.is_none()
    }

    pub(super) fn write_series(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "    {:>12} {:>12} {:>6} {:>9} {:>9}", "from us", "to us", "CNPs", "expected", "seen")?;
        self.series.iter().try_for_each(|interval| {
            let Interval { from_us, to_us, cnps, expected, seen } = interval;
            let (expected, seen) = (gigabits(Some(*expected)), gigabits(Some(*seen)));
            writeln!(
                f,
                "    {:>12} {:>12} {cnps:>6} {expected:>9} {seen:>9}",
                micros(Some(*from_us)),
                micros(Some(*to_us))
            )
        })
    }
}

impl fmt::Display for SenderReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |rate: u64| gigabits(Some(rate as f64));
        let excess =
            self.worst.as_ref().map_or("-".to_owned(), |worst| format!("{:+.1} %", 100.0 * worst.excess));
        // A sender without data has the rate 0.
        let mean = if self.packets == 0 { Some(0.0) } else { self.seen.mean };
        write!(
            f,
            "{:>10} {:>12} {:>8} {:>8} | {:>8} {:>7} {:>7} | {:>6.4} | {:>7} {:>7} | {:>8}",
            self.packets,
            self.bytes,
            self.marked,
            self.cnps,
            gigabits(self.expected.mean),
            rate(self.expected.lowest),
            rate(self.expected.last),
            self.expected.alpha,
            gigabits(mean),
            gigabits(self.seen.most),
            excess
        )
    }
}
