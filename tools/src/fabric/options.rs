//! The options that change a scenario or a file.

use std::str::FromStr;

use clap::Arg;
use ferroce::PathMtu;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::allreduce::{Algorithms, ByteList};
use super::description::{Control, Description, LinkSection, MarkingAt, Repeat};
use crate::pingpong::path_mtu;
use crate::quantity::{Bytes, Rate, Time};

/// What a scenario with a name is made for; a file says it itself.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Size of the scenario")]
pub(crate) struct SceneOptions {
    /// N of the scenario: hosts that send at once (incast, fairness, burst, victim), or hosts or ranks in all (the others).
    #[arg(long, value_name = "N", visible_aliases = ["senders", "ranks"], value_parser = whole::<usize>)]
    pub(crate) hosts: Option<usize>,
    /// Length of a message, as 64KB or 1MiB; for alltoall the length for each other host; for allreduce the sizes to simulate:
    /// one, several (1KiB,1MiB), or a range in which each is four times the one before (1KiB..256MiB); 1KiB..4MiB by default.
    #[arg(long, value_name = "SIZE", visible_alias = "message-size")]
    pub(crate) bytes: Option<ByteList>,
    /// Messages of each flow, one after the other, 10 by default; for burst, allreduce and alltoall the number of rounds, 5 by
    /// default for burst, 1 for the others.
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub(crate) count: Option<usize>,
    /// For allreduce: a list, as ring,tree, of direct, two_step, ring, halving, tree and hierarchical; auto is the library's choice
    /// for each size; all, the default, simulates all.
    #[arg(long, value_name = "LIST")]
    pub(crate) algorithm: Option<Algorithms>,
    /// For allreduce: ports of each rank (rails), 1 to 8; 1 by default. Each port is a host of the fabric: of R ranks,
    /// hosts 0 to R - 1 are the first ports, hosts R to 2R - 1 the second ones.
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub(crate) rails: Option<usize>,
    /// For allreduce: ranks per host, each with a port of its own, all under one leaf; by default the largest of 8, 4, 2 and 1 that
    /// divides both the number of ranks and --hosts-per-leaf, and leaves at least two hosts.
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub(crate) ranks_per_host: Option<usize>,
    /// For allreduce: length of the chunks into which long operations are divided, as 64KiB; by default the library's. A shorter
    /// one needs less memory for the simulation.
    #[arg(long, value_name = "SIZE")]
    pub(crate) chunk: Option<Bytes>,
    /// For allreduce: messages of up to this length are copied and sent without waiting for the receiver's destination address, 64
    /// to 64KiB (the default). Each pair of ranks has memory for such messages, so a smaller value saves memory if there are
    /// many ranks.
    #[arg(long, value_name = "SIZE")]
    pub(crate) eager: Option<Bytes>,
    /// For websearch: the average rate of a host, as a fraction of its link's rate, 0.5 or 50%; 0.3 by default.
    #[arg(long, value_name = "PART", value_parser = number)]
    pub(crate) load: Option<f64>,
    /// For websearch: for how long messages are posted; 20ms by default. More messages give better percentiles.
    #[arg(long, value_name = "TIME")]
    pub(crate) post_for: Option<Time>,
    /// Shape of the network, with as many hosts as the scenario needs; by default star for incast, fairness and burst, dumbbell for
    /// victim, leaf-spine for the others.
    #[arg(long, value_name = "SHAPE")]
    pub(crate) topology: Option<ShapeName>,
    /// For leaf-spine: hosts of each leaf; 8 by default.
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub(crate) hosts_per_leaf: Option<usize>,
    /// For leaf-spine: the rate of a leaf's hosts divided by that of its uplinks; 2 by default.
    #[arg(long, value_name = "RATIO", value_parser = number)]
    pub(crate) oversubscription: Option<f64>,
}

/// A shape by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ShapeName {
    Star,
    Dumbbell,
    LeafSpine,
    FatTree,
}

/// What one changes most, in scenarios and in files.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Settings {
    /// Rate of the links, as 100G or 25G; 100G by default.
    #[arg(long, value_name = "RATE", help_heading = "Links and switches")]
    pub(crate) rate: Option<Rate>,
    /// Rate of the links between switches; by default that of the other links, for victim twice that.
    #[arg(long, value_name = "RATE", help_heading = "Links and switches")]
    pub(crate) uplink_rate: Option<Rate>,
    /// Propagation delay of each link; 1us by default.
    #[arg(long, value_name = "TIME", help_heading = "Links and switches")]
    pub(crate) delay: Option<Time>,
    /// Probability that a link loses a frame; 0 by default.
    #[arg(long, value_name = "PART", help_heading = "Links and switches", value_parser = number)]
    pub(crate) loss: Option<f64>,
    /// Whether switches mark (ECN); on by default.
    #[arg(long, value_name = "on|off", value_parser = on_off, help_heading = "Links and switches")]
    pub(crate) ecn: Option<bool>,
    /// Queue length up to which no packet is marked; 4 KB per Gb/s of --rate by default.
    #[arg(long, value_name = "SIZE", help_heading = "Links and switches")]
    pub(crate) kmin: Option<Bytes>,
    /// Queue length above which every packet is marked; 16 KB per Gb/s of --rate by default.
    #[arg(long, value_name = "SIZE", help_heading = "Links and switches")]
    pub(crate) kmax: Option<Bytes>,
    /// Probability of a mark at Kmax; it rises linearly from 0 at Kmin; 0.2 by default.
    #[arg(long, value_name = "PART", help_heading = "Links and switches", value_parser = number)]
    pub(crate) pmax: Option<f64>,
    /// When the queue length is compared with Kmin and Kmax: when a packet enters the queue or leaves it; dequeue by default.
    #[arg(long, value_name = "WHERE", help_heading = "Links and switches")]
    pub(crate) marking: Option<MarkingAt>,
    /// Whether switches pause the priority of the data (PFC) and drop nothing; if off, they drop packets that do not fit; on by
    /// default.
    #[arg(long, value_name = "on|off", value_parser = on_off, help_heading = "Links and switches")]
    pub(crate) pfc: Option<bool>,
    /// Memory of a switch, for all its ports; 32MiB by default.
    #[arg(long, value_name = "SIZE", help_heading = "Links and switches")]
    pub(crate) buffer: Option<Bytes>,
    /// A pause begins when the stored bytes of an ingress port exceed this factor times the free part of the buffer; 0.125 by
    /// default.
    #[arg(long, value_name = "FACTOR", help_heading = "Links and switches", value_parser = number)]
    pub(crate) alpha: Option<f64>,
    /// A pause begins at this many bytes, instead of by --alpha.
    #[arg(long, value_name = "SIZE", help_heading = "Links and switches")]
    pub(crate) xoff: Option<Bytes>,
    /// A pause ends this many bytes below the length at which it began; 18KiB by default.
    #[arg(long, value_name = "SIZE", help_heading = "Links and switches")]
    pub(crate) xon_offset: Option<Bytes>,
    /// Memory of each port for packets that arrive after a pause has begun; by default as much as the link needs.
    #[arg(long, value_name = "SIZE", help_heading = "Links and switches")]
    pub(crate) headroom: Option<Bytes>,
    /// PFC storm watchdog: the frames of a queue that was paused for this long are dropped, and so are further frames until the
    /// pause has ended; off by default.
    #[arg(long, value_name = "TIME", help_heading = "Links and switches")]
    pub(crate) watchdog: Option<Time>,
    /// Without PFC: the queue of a port may be as long as this factor times the free part of the buffer; 1 by default.
    #[arg(long, value_name = "FACTOR", help_heading = "Links and switches", value_parser = number)]
    pub(crate) lossy_alpha: Option<f64>,

    /// Congestion control: off, dcqcn (hpcc100 with rate increases in proportion to the rate of the links; the default), or a
    /// preset, optionally with changes, as for the other commands: mlx5,rpg_ai_rate=20.
    #[arg(long, value_name = "CONTROL", help_heading = "Hosts")]
    pub(crate) congestion: Option<Control>,
    /// Minimum time between two CNPs of a queue pair; by default the minimum time between two rate cuts of the congestion control
    /// (4us with dcqcn), or 50us without one.
    #[arg(long, value_name = "TIME", help_heading = "Hosts")]
    pub(crate) cnp_interval: Option<Time>,
    /// What is retransmitted after a loss; go-back-n by default.
    #[arg(long, value_name = "MODE", help_heading = "Hosts")]
    pub(crate) repeat: Option<Repeat>,
    /// Path MTU, 256 to 4096 bytes; 4096 by default.
    #[arg(long, value_name = "BYTES", value_parser = path_mtu, help_heading = "Hosts")]
    #[serde(serialize_with = "in_bytes")]
    pub(crate) path_mtu: Option<PathMtu>,
    /// Maximum number of unacknowledged packets of a queue pair; 512 by default.
    #[arg(long, value_name = "PACKETS", help_heading = "Hosts", value_parser = whole::<u32>)]
    pub(crate) window: Option<u32>,
    /// ACK timeout, 4.096 us · 2^N; by default the smallest N from 8 to 24 with which it is above four times the time in which
    /// a full buffer drains.
    #[arg(long, value_name = "N", help_heading = "Hosts", value_parser = whole::<u8>)]
    pub(crate) ack_timeout: Option<u8>,
    /// DSCP of the data; 26 by default, in class 3.
    #[arg(long, value_name = "N", help_heading = "Hosts", value_parser = whole::<u8>)]
    pub(crate) dscp: Option<u8>,
    /// How often a host polls; 250ns by default.
    #[arg(long, value_name = "TIME", help_heading = "Hosts")]
    pub(crate) poll: Option<Time>,

    /// The run (for allreduce, each all-reduce) ends at this time at the latest; 200ms by default, for some scenarios
    /// another time (--describe prints it).
    #[arg(long, value_name = "TIME", help_heading = "Time")]
    pub(crate) limit: Option<Time>,
    /// Time at the start that is not included in the rates of endless flows and in means and percentiles of queues; 0
    /// by default, for fairness and victim another time (--describe prints it).
    #[arg(long, value_name = "TIME", help_heading = "Time")]
    pub(crate) warm_up: Option<Time>,
    /// How often rates and queues are sampled; 10us by default.
    #[arg(long, value_name = "TIME", help_heading = "Time")]
    pub(crate) sample: Option<Time>,
}

impl Settings {
    /// The rate of links between switches relative to that of the hosts' links, as far as both are given.
    pub(crate) fn uplink(&self) -> f64 {
        let rate = self.rate.unwrap_or(LinkSection::default().rate);
        self.uplink_rate.map_or(1.0, |uplink| uplink.0 as f64 / rate.0.max(1) as f64)
    }

    /// Applies the options to a description.
    pub(crate) fn apply(&self, to: &mut Description) {
        let Settings {
            rate,
            uplink_rate,
            delay,
            loss,
            ecn,
            kmin,
            kmax,
            pmax,
            marking,
            pfc,
            buffer,
            alpha,
            xoff,
            xon_offset,
            headroom,
            watchdog,
            lossy_alpha,
            congestion,
            cnp_interval,
            repeat,
            path_mtu,
            window,
            ack_timeout,
            dscp,
            poll,
            limit,
            warm_up,
            sample,
        } = self.clone();
        let Description { time, links, switches, control, .. } = to;
        // Keeps the ratio of the uplink rate to the host rate.
        if let (Some(rate), Some(uplink)) = (rate, links.uplink_rate) {
            let ratio = u128::from(uplink.0) * u128::from(rate.0) / u128::from(links.rate.0.max(1));
            links.uplink_rate = Some(Rate(ratio as u64));
        }
        set(&mut links.rate, rate);
        links.uplink_rate = uplink_rate.or(links.uplink_rate);
        set(&mut links.delay, delay);
        set(&mut links.loss, loss);
        set(&mut switches.ecn, ecn);
        switches.kmin = kmin.or(switches.kmin);
        switches.kmax = kmax.or(switches.kmax);
        set(&mut switches.pmax, pmax);
        set(&mut switches.marking, marking);
        set(&mut switches.pfc, pfc);
        set(&mut switches.buffer, buffer);
        if alpha.is_some() {
            switches.xoff = None;
        }
        set(&mut switches.alpha, alpha);
        switches.xoff = xoff.or(switches.xoff);
        set(&mut switches.xon_offset, xon_offset);
        switches.headroom = headroom.or(switches.headroom);
        switches.watchdog = watchdog.or(switches.watchdog);
        set(&mut switches.lossy_alpha, lossy_alpha);
        set(&mut control.congestion, congestion);
        control.cnp_interval = cnp_interval.or(control.cnp_interval);
        set(&mut control.repeat, repeat);
        set(&mut control.path_mtu, path_mtu);
        set(&mut control.window, window);
        control.ack_timeout = ack_timeout.or(control.ack_timeout);
        set(&mut control.dscp, dscp);
        set(&mut control.poll, poll);
        set(&mut time.limit, limit);
        set(&mut time.warm_up, warm_up);
        set(&mut time.sample, sample);
    }
}

/// The given options by name, with their values as on the command line.
pub(crate) fn given(options: &impl Serialize) -> Vec<(String, String)> {
    let option = |(name, value): (String, Value)| match value {
        Value::Null => None,
        Value::Bool(is_on) => Some((name, if is_on { "on" } else { "off" }.to_owned())),
        Value::String(text) => Some((name, text)),
        number => Some((name, number.to_string())),
    };
    match serde_json::to_value(options) {
        Ok(Value::Object(options)) => options.into_iter().filter_map(option).collect(),
        _ => Vec::new(),
    }
}

/// The same as arguments of a command line.
pub(crate) fn arguments(options: &impl Serialize) -> Vec<String> {
    given(options).into_iter().map(|(name, value)| format!("--{name}={value}")).collect()
}

/// A value may begin with a hyphen, so that an invalid one is reported as a value and not taken for an option. File
/// names may not.
pub(crate) fn with_hyphens(option: Arg) -> Arg {
    let is_value = !option.is_positional() && option.get_action().takes_values();
    let is_file = ["svg", "pcap"].contains(&option.get_id().as_str());
    if is_value && !is_file { option.allow_hyphen_values(true) } else { option }
}

pub(crate) fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "must be a whole number, not below 0 and not too large".to_owned())
}

/// A whole number from `LEAST` to `MOST`.
pub(crate) fn between<const LEAST: u64, const MOST: u64>(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
    number.ok_or_else(|| format!("must be {LEAST} to {MOST}"))
}

/// Whether a scenario or a setting has an option of this name.
pub(crate) fn is_option(name: &str) -> bool {
    let has = |options: Option<Value>| options.is_some_and(|options| options.get(name).is_some());
    has(serde_json::to_value(SceneOptions::default()).ok())
        || has(serde_json::to_value(Settings::default()).ok())
}

/// A number, or a percentage.
fn number(text: &str) -> Result<f64, String> {
    let parsed = match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    parsed
        .ok()
        .filter(|number| number.is_finite())
        .ok_or_else(|| "must be a number, as 0.5 or 50%".to_owned())
}

fn in_bytes<S: Serializer>(mtu: &Option<PathMtu>, serializer: S) -> Result<S::Ok, S::Error> {
    mtu.map(PathMtu::bytes).serialize(serializer)
}

fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}

fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("must be on or off".to_owned()),
    }
}
