//! The options of congestion control, for all commands that send data.

use std::str::FromStr;

use ferroce::{Config, CongestionControl, CongestionNotification, Context, Counter, Device};
use serde::Serialize;

use crate::failure::Failure;

/// Options of congestion control.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct CongestionArgs {
    /// Congestion control: off, or a preset of DCQCN (paper, zhu25, zhu25p, mlx25, hpcc100, mlx5), optionally followed
    /// by changes to its parameters: mlx5,rpg_ai_rate=20. With a preset, this end reduces its rate when it receives
    /// CNPs (congestion notification packets), and sends CNPs for packets that switches have marked.
    #[arg(long, value_name = "CONTROL", default_value_t = CongestionControl::Off)]
    pub(crate) congestion: CongestionControl,
    /// Line rate of the port in Gb/s, for congestion control; by default the rate that the driver reports.
    #[arg(long, value_name = "GBPS")]
    pub(crate) line_rate: Option<Gigabits>,
    /// DSCP of the packets of this end, 0 to 63; switches map it to a traffic class (for RoCE often 26). Default: 0,
    /// but at the server of rping and ucmatose the DSCP of the client. The server of udaddy always uses that of the client.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=63))]
    pub(crate) dscp: Option<u8>,
}

impl CongestionArgs {
    /// The configuration of a context on `device` with these options.
    pub(crate) fn config(&self, device: &Device) -> Result<Config, Failure> {
        let line_rate = self.line_rate.map(Gigabits::bits);
        let is_on = self.congestion != CongestionControl::Off;
        if is_on && matches!(device, Device::Rnic(_)) {
            let name = &device.capabilities().interface;
            return Err(Failure::usage(format!(
                "--congestion: '{name}' is an RNIC, which has its own congestion control (`ferroce devinfo -d \
                 ibverbs:{name}`); leave the option out"
            )));
        }
        if is_on && line_rate.is_none() && device.line_rate().is_none() {
            return Err(Failure::usage(format!(
                "--congestion: '{}' does not report its line rate, at which congestion control starts; set it by \
                 --line-rate GBPS",
                device.capabilities().interface
            )));
        }
        let notification = is_on.then(CongestionNotification::default);
        Ok(Config::default().congestion(self.congestion).notification(notification).line_rate(line_rate))
    }

    /// The traffic class of `--dscp`.
    pub(crate) fn traffic_class(&self) -> Option<u8> {
        self.dscp.map(|dscp| dscp << 2)
    }

    /// The options as arguments for a command that this one starts.
    pub(crate) fn to_arguments(&self) -> Vec<String> {
        let mut arguments = vec![format!("--congestion={}", self.congestion)];
        arguments.extend(self.line_rate.map(|rate| format!("--line-rate={}", rate.bits() as f64 / 1e9)));
        arguments.extend(self.dscp.map(|dscp| format!("--dscp={dscp}")));
        arguments
    }
}

/// A rate in bit/s, given in Gb/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gigabits(u64);

impl Gigabits {
    /// In bit/s.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

impl FromStr for Gigabits {
    type Err = String;

    fn from_str(text: &str) -> Result<Gigabits, String> {
        match text.parse::<f64>() {
            Ok(rate) if (0.001..=4000.0).contains(&rate) => Ok(Gigabits((rate * 1e9) as u64)),
            _ => Err("a rate in Gb/s, 0.001 to 4000".to_owned()),
        }
    }
}

/// The results of congestion control at this end.
#[derive(Debug, Serialize)]
pub(crate) struct CongestionReport {
    control: String,
    /// Received packets with Congestion Experienced.
    marked_packets: u64,
    /// Congestion notification packets that this end has sent.
    cnps_sent: u64,
    /// Handled CNPs, and ignored ones.
    cnps_handled: u64,
    cnps_ignored: u64,
}

impl CongestionReport {
    pub(crate) fn new(control: CongestionControl, context: &Context) -> CongestionReport {
        let counters = context.counters();
        CongestionReport {
            control: control.to_string(),
            marked_packets: counters.value(Counter::NpEcnMarkedRocePackets),
            cnps_sent: counters.value(Counter::NpCnpSent),
            cnps_handled: counters.value(Counter::RpCnpHandled),
            cnps_ignored: counters.value(Counter::RpCnpIgnored),
        }
    }

    /// Whether there is something to report.
    pub(crate) fn is_of_interest(&self) -> bool {
        self.control != "off"
            || self.marked_packets + self.cnps_sent + self.cnps_handled + self.cnps_ignored > 0
    }
}

impl std::fmt::Display for CongestionReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CongestionReport { control, marked_packets, cnps_sent, cnps_handled, cnps_ignored } = self;
        let control = control.split_once(',').map_or(control.as_str(), |(rules, _)| rules);
        write!(
            f,
            "congestion control {control}: {marked_packets} packets received marked; CNPs: {cnps_sent} sent, \
             {cnps_handled} handled, {cnps_ignored} ignored"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_rate_is_given_in_gigabits() {
        assert_eq!("25".parse(), Ok(Gigabits(25_000_000_000)));
        assert_eq!("0.1".parse(), Ok(Gigabits(100_000_000)));
        for wrong in ["0", "-1", "4001", "fast", "NaN", "inf", ""] {
            assert_eq!(wrong.parse::<Gigabits>(), Err("a rate in Gb/s, 0.001 to 4000".to_owned()), "{wrong}");
        }
    }
}
