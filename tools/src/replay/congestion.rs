//! Congestion control in a capture: the receivers of CNPs, and the rate of each sender compared with the rate that
//! DCQCN would have allowed. This is a report and not a verdict: a sender need not use the preset with which it is
//! compared.
//!
//! - `congestion/origin.rs`: the sender of a packet
//! - `congestion/sender.rs`: a sender and its `ReactionPoint`
//! - `congestion/receiver.rs`: the CNPs of a host
//! - `congestion/line_rate.rs`, `congestion/window.rs`: the line rate; the interval of a rate
//!
//! Rates are computed from every packet that is not damaged, including truncated ones, for at most 4,096 senders. In a
//! capture of the engine's own port the computed reaction point ends at the rate of the engine's own, to the bit/s.

mod line_rate;
mod origin;
mod receiver;
mod sender;
mod window;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;

use ferroce::{CongestionControl, Dcqcn, Gid, Nanos, Qpn};
use serde::Serialize;

use super::capture::Capture;
use super::conversation::Conversation;
use super::sample::Sample;
use crate::congestion::Gigabits;
use crate::failure::Failure;
use line_rate::LineRate;
use origin::Origins;
use receiver::Receiver;
use sender::{Sender, SenderReport};

/// What the senders of a capture are compared with.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct CongestionOptions {
    /// Compare the rate of each sender with the rate that DCQCN allows: a preset (paper, zhu25, zhu25p, mlx25, hpcc100, mlx5),
    /// optionally followed by changes to its parameters: mlx5,rpg_ai_rate=20. It changes neither verdict nor exit status.
    #[arg(long, value_name = "PRESET")]
    congestion: Option<Preset>,
    /// Line rate of the senders in Gb/s; by default estimated from the capture.
    #[arg(long, value_name = "GBPS", requires = "congestion")]
    line_rate: Option<Gigabits>,
    /// Also print the rates of each sender over time.
    #[arg(long, requires = "congestion")]
    series: bool,
}

/// A preset of DCQCN as given, and its parameters.
#[derive(Clone, Debug)]
struct Preset {
    name: String,
    parameters: Dcqcn,
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Preset, String> {
        match text.parse() {
            Ok(CongestionControl::Dcqcn(parameters)) => Ok(Preset { name: text.to_owned(), parameters }),
            Ok(_) => Err("a preset of DCQCN to compare with".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The report on congestion control.
#[derive(Serialize)]
pub(super) struct Congestion {
    /// Congestion notification packets, and the queue pairs that they name.
    cnps: u64,
    queue_pairs_told: usize,
    comparison: Option<Comparison>,
}

/// Each sender compared with a reaction point that gets the same CNPs and bytes.
#[derive(Serialize)]
struct Comparison {
    preset: String,
    parameters: String,
    line_rate: LineRate,
    /// Those with the most CNPs first.
    senders: Vec<SenderReport>,
    receivers: Vec<Receiver>,
    /// Packets without a valid ICRC, or without a transport header.
    packets_left_out: u64,
    /// Packets of senders beyond the limit.
    packets_beyond: u64,
    #[serde(skip)]
    series: bool,
}

/// The most senders that are compared, and hosts whose CNPs are counted.
const MOST: usize = 4096;
/// The most rows of a printed table.
const SHOWN: usize = 32;

impl Congestion {
    /// The report of a capture; `pairs` are connected queue pairs.
    ///
    /// # Errors
    /// A parameter does not fit the line rate.
    pub(super) fn of(
        capture: &Capture,
        conversations: &[Conversation],
        pairs: &[(Qpn, Qpn)],
        options: &CongestionOptions,
    ) -> Result<Congestion, Failure> {
        let samples = &capture.samples;
        let cnps = samples.iter().filter(|sample| sample.is_cnp());
        let told: HashSet<(Gid, Qpn)> = cnps.clone().map(|cnp| (cnp.destination, cnp.to)).collect();
        let comparison = options.congestion.as_ref().map(|preset| {
            let origins = Origins::of(samples, conversations, pairs);
            let left_out = capture.roce_packets() - samples.len() as u64;
            Comparison::of(samples, left_out, &origins, preset, options)
        });
        Ok(Congestion {
            cnps: cnps.count() as u64,
            queue_pairs_told: told.len(),
            comparison: comparison.transpose()?,
        })
    }
}

impl Comparison {
    fn of(
        samples: &[Sample],
        left_out: u64,
        origins: &Origins,
        preset: &Preset,
        options: &CongestionOptions,
    ) -> Result<Comparison, Failure> {
        let line_rate = LineRate::of(samples, options.line_rate, preset.parameters);
        let point = line_rate.reaction_point(preset.parameters)?;
        let (senders, packets_beyond) = senders(samples, origins);
        let start = samples.first().map_or(Nanos::ZERO, |sample| sample.at);
        let end = samples.last().map_or(Nanos::ZERO, |sample| sample.at);
        let mut senders: Vec<SenderReport> =
            senders.into_iter().map(|sender| sender.compare(point.clone(), start, end)).collect();
        senders.sort_by_key(SenderReport::order);
        Ok(Comparison {
            preset: preset.name.clone(),
            parameters: preset.parameters.to_string(),
            line_rate,
            senders,
            receivers: Receiver::all(samples, MOST),
            packets_left_out: left_out,
            packets_beyond,
            series: options.series,
        })
    }
}

/// Senders of data or receivers of CNPs, in the order of their first packets; and the number of packets beyond [`MOST`]
/// senders.
fn senders(samples: &[Sample], origins: &Origins) -> (Vec<Sender>, u64) {
    let mut senders: Vec<Sender> = Vec::new();
    let (mut places, mut beyond) = (HashMap::new(), 0);
    for sample in samples {
        let Some(name) = origins.sender(sample) else { continue };
        let place = match places.get(&name) {
            Some(place) => *place,
            None if senders.len() == MOST => {
                beyond += 1;
                continue;
            }
            None => {
                places.insert(name, senders.len());
                senders.push(Sender::new(name));
                senders.len() - 1
            }
        };
        senders[place].take(sample);
    }
    (senders, beyond)
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.comparison {
            Some(comparison) => comparison.fmt(f),
            None if self.cnps == 0 => Ok(()),
            None => writeln!(
                f,
                "\n{} CNPs to {} queue pairs; --congestion PRESET compares the rates of the senders with DCQCN's",
                self.cnps, self.queue_pairs_told
            ),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\ncongestion control {}: {}", self.preset, self.parameters)?;
        writeln!(f, "line rate {}", self.line_rate)?;
        writeln!(
            f,
            "Gb/s of Ethernet frames without FCS, with the times of the recorder; excess is the most that was sent beyond\n\
             what is expected, over 1 ms and 200 packets at least. A report: it breaks no rule."
        )?;
        let width =
            |names: &mut dyn Iterator<Item = String>| names.map(|name| name.len()).max().unwrap_or(0).max(8);
        let column = width(&mut self.senders.iter().take(SHOWN).map(|sender| sender.name()));
        writeln!(f, "  {:<column$} {}", "", SenderReport::GROUPS)?;
        writeln!(f, "  {:<column$} {}", "sender", SenderReport::HEADER)?;
        for sender in self.senders.iter().take(SHOWN) {
            writeln!(f, "  {:<column$} {sender}", sender.name())?;
            if self.series {
                sender.write_series(f)?;
            }
        }
        more(f, self.senders.len())?;
        if !self.receivers.is_empty() {
            let column = width(&mut self.receivers.iter().take(SHOWN).map(|receiver| receiver.name()));
            writeln!(f, "  {:<column$} {}", "", Receiver::GROUPS)?;
            writeln!(f, "  {:<column$} {}", "receiver", Receiver::HEADER)?;
            for receiver in self.receivers.iter().take(SHOWN) {
                writeln!(f, "  {:<column$} {receiver}", receiver.name())?;
            }
            more(f, self.receivers.len())?;
        }
        if self.senders.iter().any(|sender| sender.is_unknown()) {
            writeln!(f, "  qp ?: the queue pair of the sender and its CNPs are unknown; give --pair")?;
        }
        if self.packets_left_out > 0 {
            writeln!(
                f,
                "  {} packets left out: damaged, or cut before their headers end",
                self.packets_left_out
            )?;
        }
        if self.packets_beyond > 0 {
            writeln!(
                f,
                "  {} packets left out: of more than {MOST} senders the first are compared",
                self.packets_beyond
            )?;
        }
        Ok(())
    }
}

/// Prints the number of omitted rows.
fn more(f: &mut fmt::Formatter<'_>, rows: usize) -> fmt::Result {
    match rows.checked_sub(SHOWN) {
        None | Some(0) => Ok(()),
        Some(more) => writeln!(f, "  and {more} more, which --json has"),
    }
}

/// A rate in Gb/s, or a dash.
fn gigabits(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), |rate| format!("{:.3}", rate / 1e9))
}

/// A time in µs, or a dash.
fn micros(time: Option<f64>) -> String {
    time.map_or("-".to_owned(), |time| format!("{time:.1}"))
}
