//! The contexts as text.

use std::collections::HashMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::time::Instant;

use ferroce::{Label, Metric, MetricKind, Metrics, Sample};

/// Prints contexts repeatedly, with rates per second from the second time on.
pub(super) struct Table {
    /// Also show zeros and constants.
    all: bool,
    last: Option<(Instant, Vec<Metrics>)>,
}

impl Table {
    pub(super) fn new(all: bool) -> Table {
        Table { all, last: None }
    }

    /// The contexts as of `time`, under a heading of whole lines.
    pub(super) fn draw(&mut self, heading: &str, contexts: Vec<Metrics>, time: Instant) -> String {
        let mut text = if self.last.is_some() { "\n".to_owned() } else { String::new() };
        if !heading.is_empty() {
            let _ = writeln!(text, "{heading}");
        }
        let last = self.last.as_ref().map(|(then, last)| {
            let contexts: HashMap<&[Label], &Metrics> =
                last.iter().map(|metrics| (metrics.labels(), metrics)).collect();
            (time.duration_since(*then).as_secs_f64(), contexts)
        });
        for (number, metrics) in contexts.iter().enumerate() {
            let gap = if number == 0 { "" } else { "\n" };
            let _ = writeln!(text, "{gap}{}", title(metrics));
            let before = last
                .as_ref()
                .and_then(|(seconds, last)| Some((seconds, counts(last.get(metrics.labels())?))));
            for metric in metrics.iter().filter(|metric| self.all || metric.name != CONSTANT) {
                for sample in metric.samples.iter().filter(|sample| self.all || sample.value > 0) {
                    let old = before
                        .as_ref()
                        .and_then(|(seconds, counts)| Some((*counts.get(&key(metric, sample))?, **seconds)));
                    let rate = old.map(|(old, seconds)| sample.value.saturating_sub(old) as f64 / seconds);
                    row(&mut text, metric, sample, last.is_some(), rate);
                }
            }
        }
        self.last = Some((time, contexts));
        text
    }
}

fn row(text: &mut String, metric: &Metric, sample: &Sample, has_rates: bool, rate: Option<f64>) {
    let label = sample.label.as_ref().map_or(String::new(), |label| format!(" {}", label.value));
    let name = format!("{}{label}", metric.name);
    let rate = match rate {
        Some(rate) => format!(" {rate:>14.0}/s"),
        None if has_rates => " ".repeat(17),
        None => String::new(),
    };
    let _ = writeln!(text, "  {name:32} {:>16}{rate}  {}", sample.value, metric.help);
}

/// Limits on the number of objects: constants of a context.
const CONSTANT: &str = "resource_limit";

/// The key of a value in its context.
type Key<'a> = (&'a str, MetricKind, Option<&'a Label>);

fn key<'a>(metric: &'a Metric, sample: &'a Sample) -> Key<'a> {
    (&metric.name, metric.kind, sample.label.as_ref())
}

/// The previous values of counters.
fn counts(metrics: &Metrics) -> HashMap<Key<'_>, u64> {
    let counters = metrics.iter().filter(|metric| metric.kind == MetricKind::Counter);
    counters.flat_map(|metric| metric.samples.iter().map(|s| (key(metric, s), s.value))).collect()
}

/// The name of a context: `veth0 (udp, 10.0.0.1, slot 2), pid 1234`; of a communicator's rank: `veth0 (collectives), pid 1234, rank 0
/// of 4 of communicator 0123456789abcdef`.
pub(crate) fn title(metrics: &Metrics) -> String {
    let label = |name| metrics.label(name).unwrap_or("?");
    let samples =
        |name| metrics.iter().find(|metric| metric.name == name).map_or(&[][..], |metric| &metric.samples);
    // A port with several addresses is identified by its interface.
    let address = match (samples("port_gid"), samples("port_slot")) {
        ([Sample { label: Some(gid), .. }], [Sample { value: slot, .. }]) => {
            let address = gid.value.parse::<IpAddr>().map(|address| address.to_canonical().to_string());
            format!(", {}, slot {slot}", address.as_deref().unwrap_or(&gid.value))
        }
        _ => String::new(),
    };
    let communicator = match metrics.label("communicator") {
        Some(id) => format!(", rank {} of {} of communicator {id}", label("rank"), label("size")),
        None => String::new(),
    };
    format!("{} ({}{address}), pid {}{communicator}", label("device"), label("driver"), label("pid"))
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
             ferroce_qps{{device=\"eth0\",driver=\"sim\",pid=\"7\",state=\"rts\"}} {qps}\n\
             ferroce_qps{{device=\"eth0\",driver=\"sim\",pid=\"7\",state=\"sqd\"}} 0\n\
             # TYPE ferroce_resource_limit gauge\n\
             ferroce_resource_limit{{device=\"eth0\",driver=\"sim\",pid=\"7\",kind=\"qp\"}} 256\n"
        );
        Metrics::parse(&text).expect("it is well-formed")
    }

    fn columns(text: &str) -> Vec<Vec<&str>> {
        text.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn contexts_of_one_address_are_told_apart() {
        let of = |rest: &str| {
            let labels = "{device=\"lo\",driver=\"udp\",pid=\"7\"";
            let gids = rest
                .split(' ')
                .filter(|gid| !gid.is_empty())
                .map(|gid| format!("ferroce_port_gid{labels},gid=\"{gid}\"}} 1\n"));
            let gids: String = gids.collect();
            let text = format!(
                "# TYPE ferroce_port_gid gauge\n{gids}# TYPE ferroce_port_slot gauge\nferroce_port_slot{labels}}} 3\n"
            );
            title(&Metrics::parse(&text).expect("it is well-formed"))
        };
        assert_eq!(of("::ffff:10.0.0.1"), "lo (udp, 10.0.0.1, slot 3), pid 7");
        assert_eq!(of("fd00::1"), "lo (udp, fd00::1, slot 3), pid 7");
        assert_eq!(of("fd00::1 fd00::2"), "lo (udp), pid 7");
    }

    #[test]
    fn rates_are_of_a_second_and_zeroes_and_limits_are_left_out() {
        let mut table = Table::new(false);
        let start = Instant::now();
        let first = table.draw("", vec![metrics(100, 1)], start);
        let expected: [&[&str]; 3] = [
            &["eth0", "(sim),", "pid", "7"],
            &["sent_pkts", "100", "Packets", "sent."],
            &["qps", "rts", "1"],
        ];
        assert_eq!(columns(&first), expected, "{first}");
        let second = table.draw("", vec![metrics(300, 0)], start + Duration::from_secs(2));
        let expected: [&[&str]; 3] =
            [&[], &["eth0", "(sim),", "pid", "7"], &["sent_pkts", "300", "100/s", "Packets", "sent."]];
        assert_eq!(columns(&second), expected, "{second}");
        assert_eq!(columns(&Table::new(true).draw("", vec![metrics(0, 0)], start)).len(), 5);
    }
}
