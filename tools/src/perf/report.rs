//! The results, as text and as JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use ferroce::Counter;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::account::Measured;
use super::plan::Service;
use super::session::{Beside, Session};
use crate::congestion::CongestionReport;
use crate::failure::Failure;
use crate::memory::MemorySpec;
use crate::output::{JsonArg, say};

/// The report of one end.
#[derive(Debug, Serialize)]
pub(super) struct PerfReport {
    pub(super) test: String,
    role: &'static str,
    driver: &'static str,
    driver_description: String,
    /// Packets, sent and received, that used shared memory between processes.
    by_memory: u64,
    /// The part of these without an ICRC.
    without_icrc: u64,
    interface: String,
    path_mtu: u32,
    /// The memory of this end, as named for `--memory`.
    memory: MemorySpec,
    service: Service,
    bidirectional: bool,
    qps: u32,
    tx_depth: u32,
    selective_repeat: bool,
    congestion: CongestionReport,
    /// The reason that the run ended early; the results are those until then.
    ended_early: Option<String>,
    /// Empty at the server, unless the run ended early.
    pub(super) results: Vec<Measurement>,
    /// `None` on an RNIC, which does not report it.
    retransmitted_packets: Option<u64>,
    dropped_packets: Option<u64>,
    /// All counters of the stack that are not 0.
    counters: BTreeMap<&'static str, u64>,
}

/// Messages of one size.
#[derive(Debug, Serialize)]
pub(super) struct Measurement {
    pub(super) size: u32,
    messages: u64,
    bytes: u64,
    seconds: f64,
    pub(super) gigabits_per_second: f64,
    messages_per_second: f64,
    /// Bytes that were compared with the expected ones; null without --check.
    verified_bytes: Option<u64>,
    /// The state of the messages that the numbers and rates include.
    counted: Counted,
    /// Messages that have not arrived, in addition to those that have; null if none can be lost, or if the number is
    /// unknown.
    lost_messages: Option<u64>,
    /// A lower bound if the exact number is unknown: messages whose first packet has not arrived.
    lost_messages_at_least: Option<u64>,
    pub(super) latency: Option<Latency>,
}

/// The known state of messages that were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Counted {
    /// They have arrived.
    Arrived,
    /// Their first packet has arrived: for a WRITE over UC, nothing shows that the others did.
    Begun,
    /// They were sent; the receiver's count is missing.
    Sent,
}

/// In microseconds.
#[derive(Debug, Serialize)]
pub(super) struct Latency {
    /// `half a round trip`, or `operation` for READ and atomics.
    of: &'static str,
    min: f64,
    mean: f64,
    pub(super) p50: f64,
    p99: f64,
    #[serde(rename = "p99.9")]
    p999: f64,
    #[serde(rename = "p99.99")]
    p9999: f64,
    max: f64,
}

impl Latency {
    /// From round-trip times in nanoseconds. They are halved if the peer answers with the same message.
    pub(super) fn new(histogram: &Histogram<u64>, halved: bool) -> Latency {
        let unit = if halved { 2000.0 } else { 1000.0 };
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / unit;
        Latency {
            of: if halved { "half a round trip" } else { "operation" },
            min: histogram.min() as f64 / unit,
            mean: histogram.mean() / unit,
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            p9999: at(0.9999),
            max: histogram.max() as f64 / unit,
        }
    }
}

impl Measurement {
    pub(super) fn new(
        size: u32,
        messages: u64,
        time: Duration,
        verified_bytes: Option<u64>,
        (counted, lost): (Counted, Option<u64>),
        latency: Option<Latency>,
    ) -> Measurement {
        let messages = messages.saturating_sub(lost.unwrap_or(0));
        let bytes = messages * u64::from(size);
        // An empty run takes no time.
        let seconds = time.as_secs_f64().max(1e-9);
        Measurement {
            size,
            messages,
            bytes,
            seconds,
            gigabits_per_second: bytes as f64 * 8.0 / seconds / 1e9,
            messages_per_second: messages as f64 / seconds,
            verified_bytes,
            counted,
            lost_messages: lost.filter(|_| counted == Counted::Arrived),
            lost_messages_at_least: lost.filter(|_| counted == Counted::Begun),
            latency,
        }
    }
}

impl PerfReport {
    /// `None` if the run failed before the first measurement.
    pub(super) fn new<C: Beside>(
        role: &'static str,
        session: &Session<C>,
        measured: Measured,
        result: &Result<(), Failure>,
    ) -> Option<PerfReport> {
        if result.is_err() && measured.results.is_empty() {
            return None;
        }
        let Session { end, plan, memory, .. } = session;
        let capabilities = end.context.capabilities();
        let counters = end.context.counters();
        let driver = end.context.driver_stats();
        let tells = end.counts_packets();
        let dropped = counters.drops().map(|(_, count)| count).sum::<u64>();
        Some(PerfReport {
            test: plan.name(),
            role,
            driver: capabilities.driver,
            driver_description: capabilities.description.clone(),
            by_memory: driver.tx_by_memory + driver.rx_by_memory,
            without_icrc: driver.without_icrc,
            interface: capabilities.interface.clone(),
            path_mtu: measured.path_mtu.bytes(),
            memory: *memory,
            service: plan.service,
            bidirectional: plan.bidirectional,
            qps: plan.qps,
            tx_depth: plan.tx_depth,
            selective_repeat: plan.selective_repeat,
            congestion: CongestionReport::new(end.congestion, &end.context),
            ended_early: result.as_ref().err().map(|failure| failure.to_string()),
            results: measured.results,
            retransmitted_packets: tells.then(|| counters.value(Counter::RetransmittedPkts)),
            dropped_packets: tells.then_some(dropped + driver.rx_dropped + driver.tx_dropped),
            counters: counters.iter().filter(|(_, count)| *count > 0).collect(),
        })
    }

    pub(super) fn print(&self, json: &JsonArg) -> Result<(), Failure> {
        if json.write(self)? {
            return Ok(());
        }
        let ways = if self.bidirectional { ", both directions" } else { "" };
        say!(
            "{} ({}): {} on {}, path MTU {}, {} {} QP(s), tx depth {}{ways}",
            self.test,
            self.role,
            self.driver,
            self.interface,
            self.path_mtu,
            self.qps,
            self.service.name(),
            self.tx_depth
        )?;
        say!("driver: {}", self.driver_description)?;
        if self.by_memory > 0 {
            let packets = self.by_memory;
            let why = match self.driver {
                "shm" => "",
                _ => ", because the peer is on this host (,shm=off after the device disables it)",
            };
            let icrc = match self.without_icrc {
                0 => String::new(),
                some => format!("; {some} of them without an ICRC, as both ends allow"),
            };
            say!("shared memory: {packets} packets{why}{icrc}")?;
        }
        if !self.memory.is_host() {
            say!("memory: {}", self.memory)?;
        }
        if let Some(reason) = &self.ended_early {
            say!("ended early, results until then: {reason}")?;
        }
        if self.results.iter().any(|result| result.latency.is_some()) {
            self.print_latencies()?;
        } else if !self.results.is_empty() {
            self.print_bandwidths()?;
        }
        let verified = self.results.iter().filter_map(|result| result.verified_bytes).reduce(|a, b| a + b);
        if let Some(verified) = verified {
            say!("{verified} bytes compared, all right")?;
        }
        let sum =
            |of: fn(&Measurement) -> Option<u64>| self.results.iter().filter_map(of).reduce(|a, b| a + b);
        if let Some(lost) = sum(|result| result.lost_messages) {
            say!("{lost} messages lost")?;
        }
        if let Some(lost) = sum(|result| result.lost_messages_at_least) {
            say!(
                "{lost} messages lost, by their first packets: for a WRITE over UC no other packets are counted"
            )?;
        }
        let is_unknown =
            |result: &Measurement| result.lost_messages.or(result.lost_messages_at_least).is_none();
        if self.service != Service::Rc && self.results.iter().any(is_unknown) {
            say!("messages lost: unknown")?;
        }
        if self.results.iter().any(|result| result.counted == Counted::Sent) {
            say!("messages and rates are those of the sender: the receiver's count has not arrived")?;
        }
        if self.congestion.is_of_interest() {
            say!("{}", self.congestion)?;
        }
        match (self.retransmitted_packets, self.dropped_packets) {
            (Some(retransmitted), Some(dropped)) => {
                say!("{retransmitted} packets retransmitted, {dropped} dropped")
            }
            _ => say!("the card does not report retransmitted and dropped packets"),
        }
    }

    fn print_bandwidths(&self) -> Result<(), Failure> {
        say!("{:>10} {:>12} {:>10} {:>12} {:>12}", "bytes", "messages", "seconds", "Gb/s", "Mmsg/s")?;
        for m in &self.results {
            say!(
                "{:>10} {:>12} {:>10.3} {:>12.3} {:>12.4}",
                m.size,
                m.messages,
                m.seconds,
                m.gigabits_per_second,
                m.messages_per_second / 1e6
            )?;
        }
        Ok(())
    }

    fn print_latencies(&self) -> Result<(), Failure> {
        let of = self.results.iter().find_map(|m| m.latency.as_ref()).map_or("", |latency| latency.of);
        say!("latency of {of} in µs")?;
        let columns =
            ["min", "mean", "p50", "p99", "p99.9", "p99.99", "max"].map(|c| format!("{c:>9}")).join(" ");
        say!("{:>10} {:>10} {columns} {:>10}", "bytes", "messages", "kmsg/s")?;
        for m in &self.results {
            let Some(Latency { min, mean, p50, p99, p999, p9999, max, .. }) = &m.latency else { continue };
            let values = [min, mean, p50, p99, p999, p9999, max].map(|v| format!("{v:>9.2}")).join(" ");
            say!("{:>10} {:>10} {values} {:>10.2}", m.size, m.messages, m.messages_per_second / 1e3)?;
        }
        Ok(())
    }
}
