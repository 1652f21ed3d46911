//! One measurement over two devices in turn: first, second, first, second. Other load and the temperature of the
//! machine then affect both alike. Both ends open and close the devices in turn, with a whole measurement on each.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::{Duration, Instant};

use ferroce::DeviceSpec;
use ferroce::driver::netlink::Netlink;
use ferroce::driver::rnic::Verbs;
use serde::Serialize;
use tracing::info;

use super::report::{Measurement, PerfReport};
use super::{Args, Patience};
use crate::endpoint::{Endpoint, Interrupt};
use crate::failure::Failure;
use crate::output::say;
use crate::tcp::Listener;

/// The second device of `--compare`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    /// The RNIC on the interface of `-d`.
    Found,
    /// This device.
    Named(DeviceSpec),
}

/// The value of `--compare` if none is given.
pub(super) const FOUND: &str = "auto";
/// Runs over each device.
const ROUNDS: usize = 3;
/// The longest time that a server waits for the client's next run.
const NEXT: Duration = Duration::from_secs(30);

impl FromStr for Comparison {
    type Err = String;

    fn from_str(text: &str) -> Result<Comparison, String> {
        match text {
            FOUND => Ok(Comparison::Found),
            _ => text.parse().map(Comparison::Named).map_err(|error: ferroce::Error| error.to_string()),
        }
    }
}

/// Runs one end, and prints the comparison.
pub(super) fn run(args: &Args, with: &Comparison) -> Result<(), Failure> {
    let first = args.port.device.clone();
    let second = match with {
        Comparison::Named(second) => second.clone(),
        Comparison::Found => card_beside(&first)?,
    };
    let devices = [first, second];
    if let Some(device) = devices.iter().find(|device| matches!(device, DeviceSpec::Loopback)) {
        return Err(Failure::usage(format!("--compare: '{device}' does not leave this process")));
    }
    let interrupt = Interrupt::install()?;
    // A missing device or an unsupported option is found before the first measurement.
    devices.iter().try_for_each(|device| open(args, device, &interrupt).map(drop))?;
    let listener = args.host.is_none().then(|| Listener::any(args.tcp_port)).transpose()?;
    let mut reports: [Vec<PerfReport>; 2] = [Vec::new(), Vec::new()];
    for run in 0..2 * ROUNDS {
        let device = &devices[run % 2];
        let report =
            one(args, device, listener.as_ref(), &interrupt, run).map_err(|failure| match failure {
                Failure::Run(reason) => {
                    Failure::Run(format!("run {} of {}, over {device}: {reason}", run + 1, 2 * ROUNDS))
                }
                other => other,
            })?;
        reports[run % 2].push(report);
    }
    let compared = Compared::new(&devices, reports);
    if args.json.write(&compared)? {
        Ok(())
    } else if listener.is_some() {
        let [first, second] = &devices;
        say!("served {ROUNDS} runs over {first} and {ROUNDS} over {second}, in turn")
    } else {
        say!("{compared}")
    }
}

fn one(
    args: &Args,
    device: &DeviceSpec,
    listener: Option<&Listener>,
    interrupt: &Interrupt,
    run: usize,
) -> Result<PerfReport, Failure> {
    let mut end = open(args, device, interrupt)?;
    let mut report = None;
    match (listener, &args.host) {
        (Some(listener), _) => {
            // The wait for the first run has no limit, as for any client.
            let patience = if run == 0 { Patience::Endless } else { Patience::Until(Instant::now() + NEXT) };
            let client = args.await_client(&mut end, listener, patience)?;
            args.serve(end, client, &mut report)?;
        }
        (None, Some(host)) => {
            info!("run {} of {}: {device}", run + 1, 2 * ROUNDS);
            args.measure(end, host, args.tcp_port, &mut report)?;
        }
        (None, None) => return Err(Failure::usage("--compare: a client needs a HOST")),
    }
    report.ok_or_else(|| Failure::run("nothing was measured"))
}

fn open(args: &Args, device: &DeviceSpec, interrupt: &Interrupt) -> Result<Endpoint, Failure> {
    let mut port = args.port.clone();
    port.device = device.clone();
    let opened = device.open().map_err(|error| absent(device, Failure::from(error)))?;
    args.endpoint(opened, &port, interrupt).map_err(|failure| absent(device, failure))
}

/// The RNIC on the same interface as a device.
fn card_beside(device: &DeviceSpec) -> Result<DeviceSpec, Failure> {
    let named = |what: &str| {
        Failure::usage(format!(
            "--compare: {what}; name the device to compare with, as --compare=ibverbs:mlx5_0"
        ))
    };
    let interfaces = Netlink::open()?.interfaces()?;
    let has = |address: &IpAddr| {
        interfaces.iter().find(|interface| interface.addresses.iter().any(|(own, _)| own == address))
    };
    let interface = match device {
        DeviceSpec::Interface { interface: name, .. }
        | DeviceSpec::AfXdp { interface: name, .. }
        | DeviceSpec::UdpInterface { interface: name, .. } => {
            interfaces.iter().find(|interface| interface.name == *name)
        }
        DeviceSpec::Udp { address, .. } => has(address),
        _ => return Err(named(&format!("'{device}' is not on an interface of the kernel"))),
    };
    let interface = interface.ok_or_else(|| named(&format!("there is no interface of '{device}'")))?;
    let cards = Verbs::load().and_then(|verbs| verbs.rnics());
    let cards = cards.map_err(|reason| {
        Failure::run(format!("--compare: looking for an RNIC on '{}' failed: {reason}", interface.name))
    })?;
    for card in cards {
        for port in card.details.iter().flat_map(|details| &details.ports) {
            if port.is_ethernet && port.gids.iter().any(|gid| gid.interface == Some(interface.index)) {
                let number = (port.number != 1).then_some(port.number);
                return Ok(DeviceSpec::Ibverbs { name: card.name.clone(), port: number, gid: None });
            }
        }
    }
    Err(Failure::run(format!(
        "--compare: no RNIC is on '{}'; `ferroce devinfo` lists all RNICs",
        interface.name
    )))
}

fn absent(device: &DeviceSpec, failure: Failure) -> Failure {
    let told = |reason| format!("--compare: '{device}' can't be opened: {reason}");
    match failure {
        Failure::Run(reason) => Failure::Run(told(reason)),
        Failure::Usage(reason) => Failure::Usage(told(reason)),
        Failure::Interrupted => Failure::Interrupted,
    }
}

/// The results of both devices.
#[derive(Debug, Serialize)]
struct Compared {
    test: String,
    devices: [String; 2],
    rounds: usize,
    /// `Gb/s`, where more is better, or `µs`, the median latency, where less is better.
    unit: &'static str,
    /// Empty at the server.
    sizes: Vec<Row>,
    /// All reports, by device.
    runs: [Vec<PerfReport>; 2],
}

#[derive(Debug, PartialEq, Serialize)]
struct Row {
    size: u32,
    /// One entry per device.
    values: [Values; 2],
    /// The factor by which the second device is faster than the first.
    ratio: f64,
}

/// The values of the runs over one device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Values {
    median: f64,
    min: f64,
    max: f64,
    /// (Maximum − minimum) / median.
    spread: f64,
}

impl Values {
    fn new(mut values: Vec<f64>) -> Values {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or_default();
        let (median, min, max) = (at(values.len() / 2), at(0), at(values.len().saturating_sub(1)));
        let spread = if median > 0.0 { (max - min) / median } else { 0.0 };
        Values { median, min, max, spread }
    }
}

impl Row {
    fn new(size: u32, values: [Values; 2], less_is_better: bool) -> Row {
        let [first, second] = values.map(|values| values.median);
        let (above, below) = if less_is_better { (first, second) } else { (second, first) };
        Row { size, values, ratio: if below > 0.0 { above / below } else { 0.0 } }
    }
}

impl Compared {
    fn new(devices: &[DeviceSpec; 2], runs: [Vec<PerfReport>; 2]) -> Compared {
        let is_latency = |runs: &[PerfReport]| {
            runs.iter().flat_map(|run| &run.results).any(|measured| measured.latency.is_some())
        };
        let less_is_better = runs.iter().any(|runs| is_latency(runs));
        let value = |measured: &Measurement| match &measured.latency {
            Some(latency) => latency.p50,
            None => measured.gigabits_per_second,
        };
        let first = runs[0].first();
        let sizes = first.iter().flat_map(|run| &run.results).enumerate().map(|(index, measured)| {
            let of = |runs: &Vec<PerfReport>| {
                Values::new(runs.iter().filter_map(|run| run.results.get(index)).map(value).collect())
            };
            Row::new(measured.size, [of(&runs[0]), of(&runs[1])], less_is_better)
        });
        Compared {
            test: first.map(|run| run.test.clone()).unwrap_or_default(),
            devices: [devices[0].to_string(), devices[1].to_string()],
            rounds: ROUNDS,
            unit: if less_is_better { "µs" } else { "Gb/s" },
            sizes: sizes.collect(),
            runs,
        }
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Compared { test, devices: [first, second], rounds, unit, sizes, .. } = self;
        let what = if *unit == "µs" { "median latency in µs" } else { "Gb/s" };
        writeln!(
            f,
            "{test}, {what}: medians of {rounds} runs over each device, alternating; spread from the smallest to the \
             largest"
        )?;
        let width = first.len().max(second.len()).max(12);
        write!(
            f,
            "{:>10} {first:>width$} {:>8} {second:>width$} {:>8} {:>8}",
            "bytes", "spread", "spread", "ratio"
        )?;
        for Row { size, values: [first, second], ratio } in sizes {
            let percent = |values: &Values| format!("{:.1} %", values.spread * 100.0);
            write!(
                f,
                "\n{size:>10} {:>width$.3} {:>8} {:>width$.3} {:>8} {ratio:>8.3}",
                first.median,
                percent(first),
                second.median,
                percent(second)
            )?;
        }
        write!(f, "\nratio: how many times as fast {second} is as {first}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_spreads_and_ratios() {
        let [a, b] = [vec![2.0, 1.0, 3.0], vec![8.0, 8.0, 10.0]].map(Values::new);
        assert_eq!(a, Values { median: 2.0, min: 1.0, max: 3.0, spread: 1.0 });
        assert_eq!(b.spread, 0.25);
        assert_eq!(Row::new(1, [a, b], false).ratio, 4.0);
        assert_eq!(Row::new(1, [a, b], true).ratio, 0.25);
        // Runs without any message.
        let none = Values::new(vec![0.0; 3]);
        assert_eq!((none.spread, Row::new(1, [none, none], false).ratio), (0.0, 0.0));
    }

    #[test]
    fn the_other_device_is_found_or_named() {
        assert_eq!("auto".parse(), Ok(Comparison::Found));
        let card = DeviceSpec::Ibverbs { name: "mlx5_0".into(), port: None, gid: None };
        assert_eq!("ibverbs:mlx5_0".parse(), Ok(Comparison::Named(card)));
        assert!("ibverbs:".parse::<Comparison>().is_err());
    }
}
