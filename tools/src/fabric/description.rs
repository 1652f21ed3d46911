//! The description of a run: the sections of a file, which a scenario fills in and options change.

use std::fmt;
use std::time::Duration;

use ferroce::{CongestionControl, CongestionNotification, Dcqcn, PathMtu};
use serde::{Deserialize, Serialize};

use super::allreduce::AllreduceSection;
use super::traffic::Traffic;
use crate::quantity::{Bytes, Rate, Time};

/// The whole run. `None` values follow from the others; [`Description::resolve`] says how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Description {
    /// Determines all random choices: marks, paths, start times, sizes.
    #[serde(default = "first_seed")]
    pub(crate) seed: u64,
    #[serde(default)]
    pub(crate) time: TimeSection,
    pub(crate) topology: Shape,
    #[serde(default)]
    pub(crate) links: LinkSection,
    #[serde(default)]
    pub(crate) switches: SwitchSection,
    #[serde(default)]
    pub(crate) control: ControlSection,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) traffic: Vec<Traffic>,
    /// In place of traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) allreduce: Option<AllreduceSection>,
    /// Outages of links and switches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failure: Vec<FailureEntry>,
}

fn first_seed() -> u64 {
    1
}

/// `[time]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct TimeSection {
    /// The latest end of the run; it ends earlier if all messages are completed and no flow is endless.
    pub(crate) limit: Time,
    /// The time before this is excluded from rates and from the means and percentiles of queues.
    pub(crate) warm_up: Time,
    /// The sampling interval of rates and queues.
    pub(crate) sample: Time,
}

impl Default for TimeSection {
    fn default() -> TimeSection {
        let limit = Time(Duration::from_millis(200));
        TimeSection { limit, warm_up: Time(Duration::ZERO), sample: Time(Duration::from_micros(10)) }
    }
}

/// `[topology.star]` and so on: the hosts, switches and links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) enum Shape {
    /// Hosts around one switch.
    #[serde(rename_all = "kebab-case")]
    Star { hosts: usize },
    /// Two switches with hosts, and one link between them.
    #[serde(rename_all = "kebab-case")]
    Dumbbell { left: usize, right: usize },
    /// Leaves with hosts, and a link from each leaf to each spine.
    #[serde(rename_all = "kebab-case")]
    LeafSpine { leaves: usize, hosts_per_leaf: usize, spines: usize },
    /// A fat tree of switches with `k` ports.
    #[serde(rename_all = "kebab-case")]
    FatTree { k: usize },
    /// Given by its links.
    #[serde(rename_all = "kebab-case")]
    Custom { hosts: usize, switches: usize, links: Vec<LinkEntry> },
}

/// `[[topology.custom.links]]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LinkEntry {
    /// Such as `["host0", "switch1"]`.
    #[serde(deserialize_with = "pair::one")]
    pub(crate) ends: [String; 2],
    /// By default that of `[links]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rate: Option<Rate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) delay: Option<Time>,
}

impl LinkEntry {
    pub(super) fn links_switches(&self) -> bool {
        self.ends.iter().all(|end| end.starts_with("switch"))
    }
}

/// `[links]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct LinkSection {
    pub(crate) rate: Rate,
    pub(crate) delay: Time,
    /// Rate of links between switches; by default that of the other links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uplink_rate: Option<Rate>,
    /// Probability that a frame is lost on a link.
    pub(crate) loss: f64,
}

impl Default for LinkSection {
    fn default() -> LinkSection {
        let delay = Time(Duration::from_micros(1));
        LinkSection { rate: Rate(100_000_000_000), delay, uplink_rate: None, loss: 0.0 }
    }
}

/// `[switches]`: all of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct SwitchSection {
    /// Shared by all ports of a switch.
    pub(crate) buffer: Bytes,
    /// Whether the switches mark packets.
    pub(crate) ecn: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kmin: Option<Bytes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kmax: Option<Bytes>,
    /// Probability of a mark at Kmax.
    pub(crate) pmax: f64,
    pub(crate) marking: MarkingAt,
    /// Whether the switches pause the class of the data.
    pub(crate) pfc: bool,
    /// A pause begins when a port uses this factor times the free part of the buffer (dynamic threshold) ...
    pub(crate) alpha: f64,
    /// ... or this many bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) xoff: Option<Bytes>,
    /// A pause ends this many bytes below the threshold.
    pub(crate) xon_offset: Bytes,
    /// Per port, for packets that arrive after a pause began; by default what the link needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) headroom: Option<Bytes>,
    /// Drops packets that a pause has held for this long; never by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) watchdog: Option<Time>,
    /// Without PFC: a port may queue this factor times the free part of the buffer.
    pub(crate) lossy_alpha: f64,
    /// The delay between a failure and the choice of new paths.
    pub(crate) convergence: Time,
}

impl Default for SwitchSection {
    fn default() -> SwitchSection {
        SwitchSection {
            buffer: Bytes(32 << 20),
            ecn: true,
            kmin: None,
            kmax: None,
            pmax: 0.2,
            marking: MarkingAt::Dequeue,
            pfc: true,
            alpha: 0.125,
            xoff: None,
            xon_offset: Bytes(18 << 10),
            headroom: None,
            watchdog: None,
            lossy_alpha: 1.0,
            convergence: Time(Duration::from_millis(50)),
        }
    }
}

/// At which end of its stay in a switch a frame is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MarkingAt {
    Enqueue,
    Dequeue,
}

/// `[[failure]]`: a link or a switch goes down and comes up again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FailureEntry {
    pub(crate) at: Time,
    /// The end of the run by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<Time>,
    /// All links between these two, such as `["switch0", "switch2"]` ...
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "pair::maybe")]
    pub(crate) link: Option<[String; 2]>,
    /// ... or a switch with its links, such as `"switch2"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) switch: Option<String>,
}

/// `[control]`: the transport of the hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct ControlSection {
    pub(crate) congestion: Control,
    /// The least time between two CNPs of a queue pair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cnp_interval: Option<Time>,
    pub(crate) repeat: Repeat,
    #[serde(with = "path_mtu")]
    pub(crate) path_mtu: PathMtu,
    /// Packets that a queue pair may have unacknowledged.
    pub(crate) window: u32,
    /// 4.096 µs · 2^`ack_timeout`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) dscp: u8,
    /// The least time between two polls of a host.
    pub(crate) poll: Time,
}

impl Default for ControlSection {
    fn default() -> ControlSection {
        ControlSection {
            congestion: Control::Scaled,
            cnp_interval: None,
            repeat: Repeat::GoBackN,
            path_mtu: PathMtu::Mtu4096,
            window: 512,
            ack_timeout: None,
            dscp: 26,
            poll: Time(Duration::from_nanos(250)),
        }
    }
}

/// How a queue pair repeats what was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Repeat {
    /// All packets from the first lost one.
    GoBackN,
    /// Only lost packets.
    Selective,
}

/// Congestion control.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Control {
    /// `dcqcn`: the preset hpcc100 with increases in proportion to the rate of the hosts' links.
    Scaled,
    Given(CongestionControl),
}

impl Control {
    pub(crate) fn at(self, rate: Rate) -> CongestionControl {
        match self {
            Control::Given(control) => control,
            Control::Scaled => {
                let of = Dcqcn::HPCC100;
                let scaled = |increase: u32| {
                    let scaled = u128::from(increase) * u128::from(rate.0) / 100_000_000_000;
                    (scaled as u32).max(1)
                };
                let dcqcn = of.rpg_ai_rate(scaled(of.rpg_ai_rate)).rpg_hai_rate(scaled(of.rpg_hai_rate));
                CongestionControl::Dcqcn(dcqcn)
            }
        }
    }
}

impl std::str::FromStr for Control {
    type Err = String;

    fn from_str(text: &str) -> Result<Control, String> {
        match text {
            "dcqcn" => Ok(Control::Scaled),
            _ => text.parse().map(Control::Given).map_err(|error: ferroce::Error| {
                format!("{error}; or dcqcn, which is hpcc100 with its increases in proportion to the rate of the hosts' links")
            }),
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Control::Scaled => f.write_str("dcqcn"),
            Control::Given(control) => control.fmt(f),
        }
    }
}

impl Serialize for Control {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Control {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Control, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Exactly two elements. serde would silently ignore further elements of a TOML array.
pub(super) mod pair {
    use serde::{Deserialize, Deserializer, de};

    fn of<T, E: de::Error>(list: Vec<T>) -> Result<[T; 2], E> {
        let count = list.len();
        list.try_into().map_err(|_| E::custom(format!("must be two in brackets; these are {count}")))
    }

    pub(crate) fn one<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<[T; 2], D::Error> {
        of(Vec::deserialize(from)?)
    }

    pub(crate) fn maybe<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<[T; 2]>, D::Error> {
        one(from).map(Some)
    }

    pub(crate) fn many<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<[T; 2]>, D::Error> {
        Vec::<Vec<T>>::deserialize(from)?.into_iter().map(of).collect()
    }
}

mod path_mtu {
    use ferroce::PathMtu;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn serialize<S: Serializer>(mtu: &PathMtu, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(mtu.bytes())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathMtu, D::Error> {
        PathMtu::try_from(u32::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

impl Shape {
    pub(crate) fn hosts(&self) -> usize {
        match self {
            Shape::Star { hosts } | Shape::Custom { hosts, .. } => *hosts,
            Shape::Dumbbell { left, right } => left.saturating_add(*right),
            Shape::LeafSpine { leaves, hosts_per_leaf, .. } => leaves.saturating_mul(*hosts_per_leaf),
            Shape::FatTree { k } => k.saturating_pow(3) / 4,
        }
    }

    /// Whether there are links between switches.
    pub(crate) fn links_switches(&self) -> bool {
        match self {
            Shape::Star { .. } => false,
            Shape::Dumbbell { .. } | Shape::LeafSpine { .. } | Shape::FatTree { .. } => true,
            Shape::Custom { links, .. } => links.iter().any(LinkEntry::links_switches),
        }
    }

    /// Whether some links have the rate of uplinks. All links of a fat tree have the same rate.
    pub(crate) fn has_uplinks(&self) -> bool {
        match self {
            Shape::Custom { links, .. } => {
                links.iter().any(|link| link.rate.is_none() && link.links_switches())
            }
            Shape::FatTree { .. } => false,
            shape => shape.links_switches(),
        }
    }
}

impl Description {
    /// Fills in values that follow from others. Marking thresholds are those of HPCC's authors for DCQCN (400 KB and
    /// 1600 KB at 100 Gb/s, in proportion to the rate). The CNP interval is the least time between two cuts of the
    /// control. The ACK timeout is above four times the time in which a whole buffer drains, since pauses also hold
    /// packets in the headroom and in other switches.
    pub(crate) fn resolve(mut self) -> Description {
        let rate = self.links.rate.0;
        let per_gigabit = |bytes: u64| Bytes((u128::from(bytes) * u128::from(rate) / 1_000_000_000) as u64);
        let switches = &mut self.switches;
        switches.kmin.get_or_insert(per_gigabit(4000));
        switches.kmax.get_or_insert(per_gigabit(16_000));
        let often = match self.control.congestion.at(self.links.rate) {
            CongestionControl::Dcqcn(dcqcn) if dcqcn.rate_reduce_monitor_period > 0 => {
                Duration::from_micros(dcqcn.rate_reduce_monitor_period.into())
            }
            _ => CongestionNotification::default().min_time_between_cnps,
        };
        self.control.cnp_interval.get_or_insert(Time(often));
        let drains = 4.0 * 8.0 * switches.buffer.0 as f64 / rate.max(1) as f64;
        let fits = |timeout: &u8| 4.096e-6 * f64::from(1_u32 << timeout) >= drains;
        self.control.ack_timeout.get_or_insert((8..=24).find(fits).unwrap_or(24));
        self
    }
}
