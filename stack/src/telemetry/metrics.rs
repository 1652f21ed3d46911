//! The metrics of a context, a snapshot that can be written and parsed in the text format of Prometheus (exposition format
//! 0.0.4).

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{self, Write};
use std::slice;

use ferroce_driver::{Stats, is_unprintable};

use crate::telemetry::counters::{Counter, Counters};

/// A name and its value, such as `device="eth0"`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Label {
    /// Letters, digits and underscores.
    pub name: Cow<'static, str>,
    /// Any text.
    pub value: Cow<'static, str>,
}

impl Label {
    pub(crate) fn new(name: &'static str, value: impl Into<Cow<'static, str>>) -> Label {
        Label { name: name.into(), value: value.into() }
    }
}

/// Whether a value only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetricKind {
    /// The value only grows.
    Counter,
    /// The value rises and falls.
    Gauge,
}

/// One value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sample {
    /// The label that distinguishes it from other values of its metric, such as `state="rts"`.
    pub label: Option<Label>,
    /// The value.
    pub value: u64,
}

/// A counter or gauge with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// As [`Counter::name`]; in Prometheus text with the prefix `ferroce_` and, for a counter, the suffix `_total`.
    pub name: Cow<'static, str>,
    /// Its help text, one sentence.
    pub help: Cow<'static, str>,
    /// Counter or gauge.
    pub kind: MetricKind,
    /// One value, or one for each label.
    pub samples: Vec<Sample>,
}

/// The state of one context at one time: its counters, its driver's counters, and objects in use.
///
/// Its `Display` is Prometheus text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metrics {
    labels: Vec<Label>,
    metrics: Vec<Metric>,
}

/// A counter of a program, or of a library that uses a context, in the [`Metrics`] of the context:
/// [`Context::count`](crate::Context::count).
///
/// ```
/// # use ferroce::*;
/// # fn main() -> Result<(), Error> {
/// const REFUSED: ProgramCounter = ProgramCounter::new("refused_orders", "Orders that were refused.", "reason");
/// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
/// context.count(&REFUSED, "no such account");
/// let text = context.metrics().to_string();
/// let line = text.lines().find(|line| line.starts_with("ferroce_refused_orders_total")).expect("it was counted");
/// assert!(line.ends_with(",reason=\"no such account\"} 1"), "{line}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ProgramCounter {
    /// As [`Metric::name`]; names are unique.
    pub name: &'static str,
    /// What it counts, in one sentence.
    pub help: &'static str,
    /// The name of the label that distinguishes its values.
    pub label: &'static str,
}

impl ProgramCounter {
    /// A counter with a name that ferroce does not use itself. Name and label consist of letters, digits and underscores; the
    /// label begins with a letter, and is none of the common labels (`device`, `driver`, `pid`, `uid`, `context`).
    ///
    /// # Panics
    /// If they violate this; for a constant, at compile time.
    pub const fn new(name: &'static str, help: &'static str, label: &'static str) -> ProgramCounter {
        assert!(is_name(name) && is_name(label), "letters, digits and underscores");
        assert!(label.as_bytes()[0].is_ascii_alphabetic(), "a label begins with a letter");
        let is_common = matches!(label.as_bytes(), b"device" | b"driver" | b"pid" | b"uid" | b"context");
        assert!(!is_common, "a label that not all metrics have");
        ProgramCounter { name, help, label }
    }
}

/// The counts of a program, by counter and label. Labels are constants of the program, so they are few.
#[derive(Debug, Default)]
pub(crate) struct ProgramCounters(Vec<(ProgramCounter, &'static str, u64)>);

impl ProgramCounters {
    pub(crate) fn count(&mut self, counter: &ProgramCounter, label: &'static str) {
        let key = (counter.name, label);
        match self.0.binary_search_by_key(&key, |(counter, label, _)| (counter.name, label)) {
            Ok(index) => self.0[index].2 += 1,
            Err(index) => self.0.insert(index, (*counter, label, 1)),
        }
    }
}

/// The states of several contexts as one text, with one help text per metric.
#[derive(Clone, Copy, Debug)]
pub struct Exposition<'a>(pub &'a [Metrics]);

/// A text that [`Metrics::parse`] refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, '{}': {expected}", text.escape_debug())]
#[non_exhaustive]
pub struct MetricsError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The line, or the start of a long one.
    pub text: String,
    /// The valid form.
    pub expected: &'static str,
}

impl Metrics {
    /// For the port `device` of a driver.
    pub(crate) fn new(driver: &'static str, device: &str) -> Metrics {
        let labels = vec![Label::new("device", device.to_owned()), Label::new("driver", driver)];
        Metrics { labels, metrics: Vec::with_capacity(Counter::all().count() + 16) }
    }

    /// With one more label on every value.
    pub(crate) fn with_label(mut self, name: &'static str, value: impl ToString) -> Metrics {
        self.labels.push(Label::new(name, value.to_string()));
        self
    }

    pub(crate) fn push_counters(&mut self, counters: &Counters) {
        for counter in Counter::all() {
            self.push(counter.name(), counter.help(), MetricKind::Counter, None, counters.value(counter));
        }
    }

    /// With the names of the kernel's interface statistics.
    pub(crate) fn push_driver(&mut self, stats: &Stats) {
        for (name, help, value) in stats.named() {
            self.push(name, help, MetricKind::Counter, None, value);
        }
    }

    pub(crate) fn push_program(&mut self, ProgramCounters(counted): &ProgramCounters) {
        for (ProgramCounter { name, help, label }, value, count) in counted {
            self.push(*name, *help, MetricKind::Counter, Some(Label::new(label, *value)), *count);
        }
    }

    /// The number of objects of each kind and their limits, and queue pairs by state.
    pub(crate) fn push_objects(
        &mut self,
        kinds: &[(&'static str, (usize, usize))],
        states: impl IntoIterator<Item = (&'static str, u64)>,
    ) {
        let in_use = kinds.iter().map(|(kind, (used, _))| (*kind, *used as u64));
        self.push_gauges("resource_in_use", "Objects that exist.", "resource", in_use);
        let limits = kinds.iter().map(|(kind, (_, capacity))| (*kind, *capacity as u64));
        self.push_gauges("resource_limit", "Objects that can exist.", "resource", limits);
        self.push_gauges("qps", "Queue pairs by state.", "state", states);
    }

    /// A gauge with one value.
    pub(crate) fn push_gauge(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.push(name, help, MetricKind::Gauge, None, value);
    }

    /// A gauge with a value for each of its labels `key`.
    pub(crate) fn push_gauges(
        &mut self,
        name: &'static str,
        help: &'static str,
        key: &'static str,
        values: impl IntoIterator<Item = (impl Into<Cow<'static, str>>, u64)>,
    ) {
        for (label, value) in values {
            self.push(name, help, MetricKind::Gauge, Some(Label::new(key, label)), value);
        }
    }

    fn push(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        help: impl Into<Cow<'static, str>>,
        kind: MetricKind,
        label: Option<Label>,
        value: u64,
    ) {
        let name = name.into();
        let sample = Sample { label, value };
        match self.metrics.last_mut().filter(|last| last.name == name) {
            Some(last) => last.samples.push(sample),
            None => self.metrics.push(Metric { name, help: help.into(), kind, samples: vec![sample] }),
        }
    }

    /// The common labels: device, driver, and origin.
    pub fn labels(&self) -> &[Label] {
        &self.labels
    }

    /// The value of a common label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|label| label.name == name).map(|label| &*label.value)
    }

    /// All metrics, in the order of output.
    pub fn iter(&self) -> slice::Iter<'_, Metric> {
        self.metrics.iter()
    }

    /// Parses the output of [`Display`](fmt::Display), of this version or another one: at most 4096 values of 16 labels each, in
    /// lines of 4096 bytes.
    ///
    /// # Errors
    /// [`MetricsError`] for the first invalid line.
    pub fn parse(text: &str) -> Result<Metrics, MetricsError> {
        let mut parser = Parser::default();
        for (number, line) in text.lines().enumerate() {
            let start = || line.chars().take(SHOWN).collect();
            let error = |expected| MetricsError { line: number + 1, text: start(), expected };
            parser.line(line).map_err(error)?;
        }
        Ok(parser.finish())
    }

    /// As received from this process, regardless of the labels in the text: these labels are from the kernel, and control
    /// characters are replaced.
    pub(crate) fn of_process(mut self, pid: u32, uid: u32) -> Result<Metrics, &'static str> {
        let is_known = |label: &Label| ["pid", "uid"].contains(&&*label.name);
        self.labels.retain(|label| !is_known(label));
        for metric in &mut self.metrics {
            make_plain(&mut metric.help);
            for label in metric.samples.iter_mut().filter_map(|sample| sample.label.as_mut()) {
                if is_known(label) {
                    return Err("its values are of several processes");
                }
                make_plain(&mut label.value);
            }
        }
        self.labels.iter_mut().for_each(|label| make_plain(&mut label.value));
        Ok(self.with_label("pid", pid).with_label("uid", uid))
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Exposition(slice::from_ref(self)).fmt(f)
    }
}

const PREFIX: &str = "ferroce_";
const COUNTER_SUFFIX: &str = "_total";

impl fmt::Display for Exposition<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Contexts of other versions may have metrics that the first does not have.
        let mut places = HashMap::new();
        let mut families: Vec<Vec<(&Metrics, &Metric)>> = Vec::new();
        for metrics in self.0 {
            for metric in &metrics.metrics {
                let place = *places.entry(metric.full_name()).or_insert(families.len());
                if place == families.len() {
                    families.push(Vec::new());
                }
                families[place].push((metrics, metric));
            }
        }
        for family in families {
            if let Some((_, first)) = family.first() {
                first.write_header(f)?;
            }
            family.into_iter().try_for_each(|(metrics, metric)| metric.write_samples(f, &metrics.labels))?;
        }
        Ok(())
    }
}

impl Metric {
    fn write_header(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.full_name();
        write!(f, "# HELP {name} ")?;
        write_escaped(f, &self.help, false)?;
        let kind = match self.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        };
        writeln!(f, "\n# TYPE {name} {kind}")
    }

    fn write_samples(&self, f: &mut fmt::Formatter<'_>, common: &[Label]) -> fmt::Result {
        let full_name = self.full_name();
        for sample in &self.samples {
            f.write_str(&full_name)?;
            for (number, Label { name, value }) in common.iter().chain(&sample.label).enumerate() {
                write!(f, "{}{name}=\"", if number == 0 { '{' } else { ',' })?;
                write_escaped(f, value, true)?;
                f.write_char('"')?;
            }
            writeln!(f, "}} {}", sample.value)?;
        }
        Ok(())
    }

    fn full_name(&self) -> String {
        let suffix = if self.kind == MetricKind::Counter { COUNTER_SUFFIX } else { "" };
        format!("{PREFIX}{}{suffix}", self.name)
    }
}

fn write_escaped(f: &mut fmt::Formatter<'_>, text: &str, quoted: bool) -> fmt::Result {
    text.chars().try_for_each(|c| match c {
        '\\' => f.write_str("\\\\"),
        '\n' => f.write_str("\\n"),
        '"' if quoted => f.write_str("\\\""),
        c => f.write_char(c),
    })
}

/// Replaces control characters.
fn make_plain(text: &mut Cow<'static, str>) {
    if text.contains(is_unprintable) {
        *text = text.replace(is_unprintable, "\u{fffd}").into();
    }
}

/// The most values of a text: 20 times those of a context.
const MAX_VALUES: usize = 4096;
const MAX_LABELS: usize = 16;
const LONGEST_LINE: usize = 4096;
/// The most quoted characters of a refused line.
const SHOWN: usize = 120;

/// Reads a text line by line.
#[derive(Default)]
struct Parser {
    /// The latest help text, with its full name.
    help: Option<(String, String)>,
    /// The latest type, likewise.
    kind: Option<(String, MetricKind)>,
    metrics: Vec<(Metric, Vec<Vec<Label>>)>,
    /// The position of each metric, by its full name.
    places: HashMap<String, usize>,
    values: usize,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<(), &'static str> {
        if line.len() > LONGEST_LINE {
            return Err("a line has at most 4096 bytes");
        }
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap_or((help, ""));
            self.help = Some((name.to_owned(), unescape(help)?));
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = match kind.split_once(' ') {
                Some((name, "counter")) => (name, MetricKind::Counter),
                Some((name, "gauge")) => (name, MetricKind::Gauge),
                _ => return Err("a type is 'counter' or 'gauge'"),
            };
            self.kind = Some((name.to_owned(), kind));
        } else if !line.is_empty() && !line.starts_with('#') {
            self.sample(line)?;
        }
        Ok(())
    }

    fn sample(&mut self, line: &str) -> Result<(), &'static str> {
        if self.values == MAX_VALUES {
            return Err("a text has at most 4096 values");
        }
        self.values += 1;
        let end = line.find(['{', ' ']).ok_or("a value is 'NAME{LABEL=\"VALUE\",...} NUMBER'")?;
        let (full_name, rest) = line.split_at(end);
        let (labels, value) = parse_labels(rest)?;
        let value = value.trim().parse().map_err(|_| "a value is a whole number below 2^64")?;
        let kind = match &self.kind {
            Some((name, kind)) if name == full_name => *kind,
            _ => return Err("a value follows its '# TYPE'"),
        };
        let suffix = if kind == MetricKind::Counter { COUNTER_SUFFIX } else { "" };
        let name = full_name.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(suffix));
        let name =
            name.filter(|name| is_name(name)).ok_or("a name is 'ferroce_NAME', or 'ferroce_NAME_total'")?;
        let sample = Sample { label: None, value };
        match self.places.get(full_name) {
            Some(&place) => {
                let (metric, all) = &mut self.metrics[place];
                metric.samples.push(sample);
                all.push(labels);
            }
            None => {
                let help = self.help.take().filter(|(name, _)| name == full_name).map(|(_, help)| help);
                let (name, help) = (name.to_owned().into(), help.unwrap_or_default().into());
                self.places.insert(full_name.to_owned(), self.metrics.len());
                self.metrics.push((Metric { name, help, kind, samples: vec![sample] }, vec![labels]));
            }
        }
        Ok(())
    }

    /// Labels that all values share become the common labels; the first other one is the value's own.
    fn finish(self) -> Metrics {
        let mut all = self.metrics.iter().flat_map(|(_, labels)| labels);
        let mut common = all.next().cloned().unwrap_or_default();
        all.for_each(|labels| common.retain(|label| labels.contains(label)));
        let own = |(mut metric, labels): (Metric, Vec<Vec<Label>>)| {
            for (sample, labels) in metric.samples.iter_mut().zip(labels) {
                sample.label = labels.into_iter().find(|label| !common.contains(label));
            }
            metric
        };
        let metrics = self.metrics.into_iter().map(own).collect();
        Metrics { labels: common, metrics }
    }
}

const fn is_name(text: &str) -> bool {
    let (bytes, mut at) = (text.as_bytes(), 0);
    while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_') {
        at += 1;
    }
    at > 0 && at == bytes.len()
}

/// Reads `{LABEL="VALUE",...}`, or nothing, and returns what follows.
fn parse_labels(text: &str) -> Result<(Vec<Label>, &str), &'static str> {
    const EXPECTED: &str = "labels are '{LABEL=\"VALUE\",...}'";
    let Some(mut rest) = text.strip_prefix('{') else { return Ok((Vec::new(), text)) };
    let mut labels = Vec::new();
    while !rest.starts_with('}') {
        let (name, value) = rest.split_once("=\"").ok_or(EXPECTED)?;
        // Names that begin with two underscores are reserved by Prometheus.
        if !is_name(name) || name.starts_with("__") || name.starts_with(|c: char| c.is_ascii_digit()) {
            return Err("a label's name is letters, digits and underscores, and begins with a letter");
        }
        if labels.len() == MAX_LABELS || labels.iter().any(|label: &Label| label.name == name) {
            return Err("a value has at most 16 labels, each once");
        }
        let mut escaped = false;
        let end = value.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let (value, after) = end.and_then(|end| value.split_at_checked(end)).ok_or(EXPECTED)?;
        labels.push(Label { name: name.to_owned().into(), value: unescape(value)?.into() });
        rest = after.strip_prefix('"').unwrap_or(after);
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    Ok((labels, rest.strip_prefix('}').unwrap_or(rest)))
}

fn unescape(text: &str) -> Result<String, &'static str> {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        plain.push(match c {
            '\\' => match chars.next() {
                Some('n') => '\n',
                Some(c @ ('\\' | '"')) => c,
                _ => return Err("after a backslash comes another one, a quotation mark or an n"),
            },
            c => c,
        });
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use prometheus_parse::{Scrape, Value};
    use proptest::prelude::*;

    use super::*;

    fn sample(device: &str, value: u64) -> Metrics {
        let mut metrics = Metrics::new("sim", device);
        let mut counters = Counters::default();
        counters.count_if(value > 0, Counter::OutOfSequence);
        metrics.push_counters(&counters);
        let mut stats = Stats::default();
        stats.rx_bytes = value;
        metrics.push_driver(&stats);
        metrics.push_gauges("qps", "Queue pairs by state.", "state", [("rtr", 0), ("rts", value)]);
        metrics
    }

    /// Parses a text with another parser.
    fn judge(text: &str) -> Scrape {
        Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap()
    }

    #[test]
    fn the_text_has_the_expected_form() {
        let mut metrics = Metrics::new("af_xdp", "eth0");
        metrics.push("b", "Of b.", MetricKind::Counter, None, u64::MAX);
        metrics.push_gauges("qps", "By state.", "state", [("rtr", 0), ("rts", 1)]);
        let other = metrics.clone().with_label("pid", 7);
        let expected = "\
# HELP ferroce_b_total Of b.
# TYPE ferroce_b_total counter
ferroce_b_total{device=\"eth0\",driver=\"af_xdp\"} 18446744073709551615
ferroce_b_total{device=\"eth0\",driver=\"af_xdp\",pid=\"7\"} 18446744073709551615
# HELP ferroce_qps By state.
# TYPE ferroce_qps gauge
ferroce_qps{device=\"eth0\",driver=\"af_xdp\",state=\"rtr\"} 0
ferroce_qps{device=\"eth0\",driver=\"af_xdp\",state=\"rts\"} 1
ferroce_qps{device=\"eth0\",driver=\"af_xdp\",pid=\"7\",state=\"rtr\"} 0
ferroce_qps{device=\"eth0\",driver=\"af_xdp\",pid=\"7\",state=\"rts\"} 1
";
        assert_eq!(Exposition(&[metrics, other]).to_string(), expected);
    }

    #[test]
    fn another_parser_reads_every_metric_with_help_and_type() {
        let metrics = sample("eth0", 5);
        let scrape = judge(&metrics.to_string());
        let written: usize = metrics.iter().map(|metric| metric.samples.len()).sum();
        assert_eq!(scrape.samples.len(), written);
        for found in &scrape.samples {
            let bare = found.metric.strip_prefix(PREFIX).unwrap();
            let metric = metrics.iter().find(|metric| metric.full_name() == found.metric).expect(bare);
            assert_eq!(scrape.docs[&found.metric], metric.help);
            assert_eq!((found.labels.get("device"), found.labels.get("driver")), (Some("eth0"), Some("sim")));
            let own =
                |s: &&Sample| s.label.as_ref().is_none_or(|l| found.labels.get(&l.name) == Some(&*l.value));
            let expected = metric.samples.iter().find(own).unwrap().value as f64;
            match (metric.kind, &found.value) {
                (MetricKind::Counter, Value::Counter(value)) | (MetricKind::Gauge, Value::Gauge(value)) => {
                    assert_eq!(*value, expected, "{bare}");
                }
                (kind, value) => panic!("{bare} is a {kind:?} and was read as {value:?}"),
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let metrics = sample("eth0", 1);
        for (number, metric) in metrics.iter().enumerate() {
            assert!(
                metrics.iter().skip(number + 1).all(|other| other.name != metric.name),
                "{}",
                metric.name
            );
        }
    }

    #[test]
    fn contexts_with_different_metrics_share_one_text() {
        let (one, mut two) = (sample("eth0", 1), sample("eth1", 2));
        two.push("newer", "Of a later version.", MetricKind::Counter, None, 3);
        let text = Exposition(&[one.clone(), two.clone()]).to_string();
        for line in text.lines().filter(|line| line.starts_with('#')) {
            assert_eq!(text.matches(&format!("{line}\n")).count(), 1, "{line}");
        }
        let samples = |metrics: &Metrics| metrics.iter().map(|metric| metric.samples.len()).sum::<usize>();
        assert_eq!(judge(&text).samples.len(), samples(&one) + samples(&two));
    }

    #[test]
    fn invalid_texts_are_refused() {
        for (text, expected) in [
            ("ferroce_a 1", "follows its"),
            ("# TYPE ferroce_a summary", "'counter' or 'gauge'"),
            ("# TYPE ferroce_a gauge\nferroce_a", "a value is 'NAME"),
            ("# TYPE ferroce_a gauge\nferroce_a -1", "whole number"),
            ("# TYPE ferroce_a gauge\nferroce_a{b=\"c\" 1", "labels are"),
            ("# TYPE ferroce_a gauge\nferroce_a{b=\"c", "labels are"),
            ("# TYPE ferroce_a gauge\nferroce_a{b=\"\\t\"} 1", "after a backslash"),
            ("# TYPE ferroce_a gauge\nferroce_a{b c=\"\"} 1", "a label's name"),
            ("# TYPE other gauge\nother 1", "ferroce_NAME"),
            ("# TYPE ferroce_a counter\nferroce_a 1", "_total"),
            ("# TYPE ferroce_a gauge\nferroce_a{b=\"\",b=\"\"} 1", "each once"),
            ("# TYPE ferroce_a gauge\nferroce_a{__name__=\"up\"} 1", "begins with a letter"),
            (&format!("# HELP ferroce_a {}", "x".repeat(4096)), "at most 4096 bytes"),
            (&format!("# TYPE ferroce_a gauge{}", "\nferroce_a 1".repeat(4097)), "at most 4096 values"),
            (&format!("# TYPE ferroce_a gauge\nferroce_a{{{}}} 1", labels(17)), "at most 16 labels"),
        ] {
            let refused = Metrics::parse(text).expect_err(text);
            assert!(refused.to_string().contains(expected), "{text}: {refused}");
            assert_eq!(refused.line, text.lines().count(), "{refused}");
        }
    }

    /// `count` different labels.
    fn labels(count: usize) -> String {
        (0..count).map(|number| format!("l{number}=\"x\",")).collect()
    }

    /// A name may be repeated after others, and a name may look like that of another metric.
    #[test]
    fn each_name_is_explained_once() {
        let text = "# TYPE ferroce_a_total counter\nferroce_a_total{l=\"1\"} 1\n# TYPE ferroce_b gauge\nferroce_b 1\n\
                    # TYPE ferroce_a_total gauge\nferroce_a_total{l=\"2\"} 2\n";
        let metrics = Metrics::parse(text).unwrap();
        assert_eq!(metrics.iter().map(|metric| metric.samples.len()).collect::<Vec<_>>(), [2, 1]);
        let text = Exposition(&[sample("eth0", 1), metrics]).to_string();
        assert_eq!(text.matches("# TYPE ferroce_a_total ").count(), 1, "{text}");
        assert_eq!(judge(&text).samples.iter().filter(|found| found.metric == "ferroce_a_total").count(), 2);
    }

    #[test]
    fn a_process_can_not_choose_its_own_labels() {
        let text = |own: &str| {
            format!(
                "# HELP ferroce_a \x1b[2Jx\n# TYPE ferroce_a gauge\nferroce_a{{device=\"\x1b]0;x\x07\",pid=\"1\",uid=\"0\"}} 1\n\
                 ferroce_a{{device=\"\x1b]0;x\x07\",pid=\"1\",uid=\"0\",{own}=\"\u{9b}2J\u{202e}\"}} 2\n"
            )
        };
        let read = |own| Metrics::parse(&text(own)).unwrap().of_process(7, 1000);
        let metrics = read("state").unwrap();
        let label = |name| metrics.label(name);
        assert_eq!((label("pid"), label("uid")), (Some("7"), Some("1000")));
        assert_eq!(metrics.labels().len(), 3);
        let text = metrics.to_string();
        assert!(!text.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'), "{text:?}");
        let of_several = text.replace("pid=\"7\",uid=\"1000\"} 1", "pid=\"8\",uid=\"1000\"} 1");
        assert!(Metrics::parse(&of_several).unwrap().of_process(7, 1000).is_err());
    }

    proptest! {
        #[test]
        fn a_written_text_parses_back(device in "(?s).*", value: u64) {
            let metrics = sample(&device, value).with_label("pid", 1);
            let text = metrics.to_string();
            prop_assert_eq!(Metrics::parse(&text), Ok(metrics));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "(# (HELP|TYPE) )?(ferroce_)?a(_total)?( counter| gauge)?.*\\PC*") {
            let _ = Metrics::parse(&text);
            let _ = Metrics::parse(&format!("# TYPE ferroce_a gauge\n{text}"));
        }
    }
}
