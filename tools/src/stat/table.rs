//! Contexts for people.

use std::fmt::Write;
use std::time::Instant;

use ferroce::{Metric, MetricKind, Metrics, Sample};

/// Draws contexts again and again, from the second time on with what came in a second.
pub(super) struct Table {
    /// Also what is 0.
    all: bool,
    last: Option<(Instant, Vec<Metrics>)>,
}

impl Table {
    pub(super) fn new(all: bool) -> Table {
        Table { all, last: None }
    }

    /// The contexts as they were at `time`.
    pub(super) fn draw(&mut self, contexts: Vec<Metrics>, time: Instant) -> String {
        let mut text = String::new();
        if self.last.is_some() {
            text.push('\n');
        }
        for (number, metrics) in contexts.iter().enumerate() {
            let gap = if number == 0 { "" } else { "\n" };
            let _ = writeln!(text, "{gap}{}", title(metrics));
            let before = self.last.as_ref().and_then(|(then, last)| {
                let same = last.iter().find(|old| old.labels() == metrics.labels())?;
                Some((same, time.duration_since(*then).as_secs_f64()))
            });
            for metric in metrics.iter() {
                for sample in metric.samples.iter().filter(|sample| self.all || sample.value > 0) {
                    let rate = before.and_then(|(old, seconds)| rate(metric, sample, old, seconds));
                    row(&mut text, metric, sample, self.last.is_some(), rate);
                }
            }
        }
        self.last = Some((time, contexts));
        text
    }
}

fn row(text: &mut String, metric: &Metric, sample: &Sample, has_rates: bool, rate: Option<f64>) {
    let label = sample.label.as_ref().map_or(String::new(), |label| format!(" {}", label.value));
    let name = plain(&format!("{}{label}", metric.name));
    let rate = match rate {
        Some(rate) => format!(" {rate:>14.0}/s"),
        None if has_rates => " ".repeat(17),
        None => String::new(),
    };
    let _ = writeln!(text, "  {name:32} {:>16}{rate}  {}", sample.value, plain(&metric.help));
}

/// What came in a second, of a counter.
fn rate(metric: &Metric, sample: &Sample, old: &Metrics, seconds: f64) -> Option<f64> {
    let before =
        old.iter().find(|before| before.name == metric.name && metric.kind == MetricKind::Counter)?;
    let before = before.samples.iter().find(|before| before.label == sample.label)?;
    Some(sample.value.saturating_sub(before.value) as f64 / seconds)
}

/// The name of a context: `veth0 (af_xdp), pid 1234`.
pub(super) fn title(metrics: &Metrics) -> String {
    let label = |name| plain(metrics.label(name).unwrap_or("?"));
    format!("{} ({}), pid {}", label("device"), label("driver"), label("pid"))
}

/// Without what would move a terminal: the text comes from other processes.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn metrics(packets: u64, qps: u64) -> Metrics {
        let text = format!(
            "# HELP ferroce_sent_pkts_total Packets sent.\n# TYPE ferroce_sent_pkts_total counter\n\
             ferroce_sent_pkts_total{{device=\"eth0\",driver=\"sim\",pid=\"7\"}} {packets}\n\
             # TYPE ferroce_qps gauge\n\
             ferroce_qps{{device=\"eth0\",driver=\"sim\",pid=\"7\",state=\"\x1b[2Jrts\"}} {qps}\n\
             ferroce_qps{{device=\"eth0\",driver=\"sim\",pid=\"7\",state=\"sqd\"}} 0\n"
        );
        Metrics::parse(&text).expect("it is well-formed")
    }

    fn columns(text: &str) -> Vec<Vec<&str>> {
        text.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn rates_are_of_a_second_and_zeroes_are_left_out() {
        let mut table = Table::new(false);
        let start = Instant::now();
        let first = table.draw(vec![metrics(100, 1)], start);
        let expected: [&[&str]; 3] = [
            &["eth0", "(sim),", "pid", "7"],
            &["sent_pkts", "100", "Packets", "sent."],
            &["qps", "[2Jrts", "1"],
        ];
        assert_eq!(columns(&first), expected, "{first}");
        assert!(!first.contains('\x1b'));
        let second = table.draw(vec![metrics(300, 0)], start + Duration::from_secs(2));
        let expected: [&[&str]; 3] =
            [&[], &["eth0", "(sim),", "pid", "7"], &["sent_pkts", "300", "100/s", "Packets", "sent."]];
        assert_eq!(columns(&second), expected, "{second}");
        assert_eq!(columns(&Table::new(true).draw(vec![metrics(0, 0)], start)).len(), 4);
    }
}
