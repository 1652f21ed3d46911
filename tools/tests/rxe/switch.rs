//! The guest as a switch: it forwards between two AF_XDP ports, with a bottleneck that marks on the path to the
//! receiver.
//!
//! Two queue pairs of one port share the bottleneck. They use the same path, so only their congestion control divides
//! it between them, and no hash or scheduler. The rate of the bottleneck is at most half of what the guest forwards,
//! which is measured first; so losses occur only in the queue of the bottleneck.

mod flows;
mod simulated;

use std::fmt;
use std::time::Duration;

use ferroce::{Config, CongestionControl, CongestionNotification, Dcqcn};
use serde_json::Value;

use self::flows::{ACK_TIMEOUT, FLOWS, Flows, MESSAGE, OUTSTANDING, PATH_MTU};
use self::simulated::Simulated;
use crate::guest::Guest;

/// Ethernet without FCS, IPv4, UDP, BTH and ICRC, in each packet; RETH in the first one of a message. As counted by
/// `tbf`.
const HEADERS: u32 = 14 + 20 + 8 + 12 + 4;
const RETH: u32 = 16;

/// Queue lengths in bytes: below the first nothing is marked, above the second everything is, and the third is the
/// limit.
const KMIN: u32 = 50_000;
const KMAX: u32 = 200_000;
const PMAX: f64 = 0.5;
const LIMIT: u32 = 1_000_000;
/// Bytes of a burst.
const BURST: u32 = 65_536;
/// Mb/s of the bottleneck: well below the speed of most guests, and no less than the parameters require.
const MOST: u32 = 40;
const LEAST: u32 = 20;
/// At 40 Mb/s, KMAX bytes of queue take 40 ms, so the times of the published presets, which are for 25 Gb/s and more,
/// are multiplied by some hundreds. With the original ones, less than half of the rate is used on a simulated link of
/// this kind.
fn control() -> CongestionControl {
    CongestionControl::Dcqcn(
        Dcqcn::PAPER
            .dce_tcp_rtt(22_000)
            .rpg_time_reset(20_000)
            .rpg_byte_reset(1_000_000)
            .rpg_threshold(1)
            .rpg_ai_rate(1)
            .rpg_hai_rate(5)
            .rpg_min_rate(1),
    )
}
const CNP_INTERVAL: Duration = Duration::from_millis(20);

/// The time before the measurement, and that of the measurement.
const START_UP: Duration = Duration::from_secs(1);
const UNLIMITED: Duration = Duration::from_secs(1);
const MEASURED: Duration = Duration::from_secs(5);
/// The most attempts of the exchange with congestion control. A machine that pauses for a tenth of a second makes a
/// queue overflow, or leaves the bottleneck idle; congestion control that does not work would do it every time.
const ATTEMPTS: u32 = 3;

/// Measures, configures the bottleneck and runs two flows over it, with and without congestion control; returns the
/// number of runs.
pub(crate) fn run(guest: &Guest) -> u32 {
    guest.forward();
    let free = Flows::run(guest, &Config::default(), START_UP, UNLIMITED);
    let goodput: f64 = free.goodputs.iter().sum();
    println!(
        "the guest forwards {goodput:.0} Mb/s of ferroce's payload in frames of {} bytes ({:.0} packets/s, {} resent); \
         round trip without load {:.2} ms",
        PATH_MTU.bytes() + HEADERS,
        goodput * 1e6 / 8.0 / f64::from(PATH_MTU.bytes()),
        free.retransmitted,
        free.round_trip.as_secs_f64() * 1e3
    );
    let rate = MOST.min((goodput / 2.0) as u32);
    assert!(rate >= LEAST, "half of that is below {LEAST} Mb/s: this machine is too slow for the parameters");
    print_setting(rate);
    println!("{}", Outcome::HEADING);

    let notification = CongestionNotification::default().min_time_between_cnps(CNP_INTERVAL);
    let line_rate = u64::from(rate) * 1_000_000;
    let controlled = Config::default().congestion(control()).notification(notification).line_rate(line_rate);
    let mut attempts = 0;
    loop {
        attempts += 1;
        let outcome = limited(guest, rate, &controlled);
        println!("{outcome}");
        let Err(wrong) = outcome.is_controlled() else { break };
        assert!(attempts < ATTEMPTS, "with congestion control, at {rate} Mb/s: {wrong}");
        println!("with congestion control: {wrong}; once more");
    }
    let outcome = limited(guest, rate, &Config::default());
    println!("{outcome}");
    outcome.is_uncontrolled().unwrap_or_else(|wrong| panic!("without congestion control: {wrong}"));
    let CongestionControl::Dcqcn(parameters) = control() else { unreachable!("it is DCQCN") };
    let controlled = CongestionControl::Dcqcn(parameters.rpg_max_rate(rate));
    for control in [controlled, CongestionControl::Off] {
        let simulated = Simulated::run(rate, outcome.capacity, control);
        println!("{simulated}");
        simulated.check();
    }
    2
}

/// Prints all settings that are needed to repeat this elsewhere.
fn print_setting(rate: u32) {
    println!("{}", bottleneck(rate));
    println!(
        "{FLOWS} RC queue pairs from one port, line rate {rate} Mb/s each; WRITEs of {MESSAGE} bytes, {OUTSTANDING} outstanding, \
         path MTU {}, window {} packets, ACK timeout {ACK_TIMEOUT}, go-back-N",
        PATH_MTU.bytes(),
        Config::default().window
    );
    println!("{}; a CNP per queue pair in {CNP_INTERVAL:?}; {MEASURED:?} after {START_UP:?}", control());
}

/// The commands of the bottleneck. The `burst` of `red` is the least that it accepts: its average follows the queue
/// within two packets. It spaces its marks evenly, which makes them up to twice as many as PMAX says. With `nodrop` it
/// drops packets that are not ECN-capable only when the queue is full. The kernel does not merge UDP packets that it
/// forwards, so as many arrive marked as `red` has marked.
fn bottleneck(rate: u32) -> String {
    let frame = PATH_MTU.bytes() + HEADERS;
    format!(
        "tc qdisc add dev eth1 root handle 1: tbf rate {rate}mbit burst {BURST} limit {LIMIT} && \
         tc qdisc add dev eth1 parent 1:1 handle 10: red limit {LIMIT} min {KMIN} max {KMAX} avpkt {frame} burst {} \
         probability {PMAX} bandwidth {rate}mbit ecn nodrop",
        KMIN.div_ceil(frame)
    )
}

/// A run over the bottleneck.
fn limited(guest: &Guest, rate: u32, config: &Config) -> Outcome {
    guest.start(&bottleneck(rate)).succeed();
    let flows = Flows::run(guest, config, START_UP, MEASURED);
    let queue = Queue::of(guest);
    guest.start("tc qdisc del dev eth1 root").succeed();
    let packets = MESSAGE.div_ceil(PATH_MTU.bytes());
    let payload = f64::from(MESSAGE) / f64::from(MESSAGE + packets * HEADERS + RETH);
    let line_rate = f64::from(rate);
    Outcome { control: config.congestion, line_rate, capacity: line_rate * payload, flows, queue }
}

/// The counters of the bottleneck's queue.
struct Queue {
    packets: u64,
    marked: u64,
    /// Drops because the queue was full.
    full: u64,
    /// All drops.
    dropped: u64,
}

impl Queue {
    fn of(guest: &Guest) -> Queue {
        let said = guest.start("tc -s -j qdisc show dev eth1").succeed();
        let qdiscs: Value = serde_json::from_str(said.trim()).unwrap_or_else(|e| panic!("{e}: {said}"));
        let red = qdiscs.as_array().and_then(|qdiscs| qdiscs.iter().find(|qdisc| qdisc["kind"] == "red"));
        let count = |name: &str| {
            let value = red.and_then(|red| red[name].as_u64());
            value.unwrap_or_else(|| panic!("red has no counter {name}: {said}"))
        };
        Queue {
            packets: count("packets"),
            marked: count("marked"),
            full: count("pdrop"),
            dropped: count("drops"),
        }
    }
}

/// The results of a run over the bottleneck.
struct Outcome {
    control: CongestionControl,
    /// Mb/s of the bottleneck, and of each flow at its start.
    line_rate: f64,
    /// Mb/s of payload that the bottleneck carries.
    capacity: f64,
    flows: Flows,
    queue: Queue,
}

impl Outcome {
    const HEADING: &str = "        |               Mb/s |       |       | KB of queue | at the switch             | at the receiver | at the sender\n\
        control | each flow, allowed | used  | Jain  |  mean, most | forwarded marked  dropped | marked     CNPs |   CNPs    resent timeouts";

    /// The acknowledged part of the bottleneck's capacity.
    fn used(&self) -> f64 {
        self.flows.goodputs.iter().sum::<f64>() / self.capacity
    }

    /// Jain's fairness index.
    fn fairness(&self) -> f64 {
        jain(&self.flows.goodputs)
    }

    /// Whether packets were marked, the sender slowed down and nothing was lost.
    fn is_controlled(&self) -> Result<(), String> {
        let Outcome { flows, queue, .. } = self;
        let expected = [
            ("nothing was marked", queue.marked > 0),
            ("what arrived marked is not what the switch marked", flows.marked == queue.marked),
            ("no CNP was sent", flows.cnps_sent > 0),
            ("CNPs were lost or ignored", flows.cnps_handled == flows.cnps_sent && flows.cnps_ignored == 0),
            (
                "a flow is not slowed down",
                flows.allowed.iter().all(|rate| rate.is_some_and(|rate| rate < self.line_rate)),
            ),
            ("packets were dropped", queue.dropped == 0),
            ("packets were sent twice", flows.retransmitted == 0 && flows.timeouts == 0),
            ("Jain's index is below 0.95", self.fairness() >= 0.95),
            ("less than 0.9 of the rate was used", self.used() >= 0.9),
        ];
        check(&expected)
    }

    /// Whether the queue overflowed, and no sender slowed down.
    fn is_uncontrolled(&self) -> Result<(), String> {
        let Outcome { flows, queue, .. } = self;
        let expected = [
            ("packets were marked that are not ECN-capable", queue.marked == 0 && flows.marked == 0),
            ("a CNP was sent", flows.cnps_sent == 0),
            ("nothing was dropped", queue.full > 0 && queue.dropped == queue.full),
            ("nothing was sent twice", flows.retransmitted > 0),
        ];
        check(&expected)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { control, flows, queue, .. } = self;
        let control = if *control == CongestionControl::Off { "off" } else { "DCQCN" };
        let goodputs = flows.goodputs.map(|rate| format!("{rate:.1}")).join(" ");
        let allowed =
            flows.allowed.map(|rate| rate.map_or("-".to_owned(), |rate| format!("{rate:.0}"))).join(" ");
        let kilobytes = flows.under_way.map(|frames| frames * f64::from(PATH_MTU.bytes() + HEADERS) / 1e3);
        // Lost packets never arrive.
        let under_way =
            if queue.dropped == 0 { kilobytes.map(|n| format!("{n:.0}")).join(" ") } else { "-".to_owned() };
        write!(
            f,
            "{control:<7} | {goodputs:>11} {allowed:>6} | {:>5.3} | {:>5.3} | {under_way:>11} | {:>9} {:>6} {:>8} | {:>6} {:>8} | {:>6} {:>9} {:>8}",
            self.used(),
            self.fairness(),
            queue.packets,
            queue.marked,
            queue.dropped,
            flows.marked,
            flows.cnps_sent,
            flows.cnps_handled,
            flows.retransmitted,
            flows.timeouts
        )
    }
}

/// Jain's fairness index.
fn jain(rates: &[f64]) -> f64 {
    let (sum, squares) =
        rates.iter().fold((0.0, 0.0), |(sum, squares), rate| (sum + rate, squares + rate * rate));
    sum * sum / (rates.len() as f64 * squares)
}

/// Fails with the conditions that are not met.
fn check(expected: &[(&str, bool)]) -> Result<(), String> {
    let wrong: Vec<&str> =
        expected.iter().filter(|(_, is_so)| !is_so).map(|(otherwise, _)| *otherwise).collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join(", ")) }
}
