//! The named scenarios.

use std::fmt;
use std::time::Duration;

use ferroce_collectives::MAX_RAILS;

use super::allreduce::{AllreduceSection, MOST_RANKS};
use super::description::{ControlSection, Description, LinkSection, Shape, SwitchSection, TimeSection};
use super::options::{self, SceneOptions, ShapeName};
use super::sizes::Sizes;
use super::traffic::{Hosts, Pattern, Traffic};
use super::wrong::Wrong;
use crate::quantity::{Bytes, Rate, Time};

/// A scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Scenario {
    /// N senders, each with messages for the same receiver.
    Incast,
    /// N senders without end to one receiver, that begin one after the other.
    Fairness,
    /// N senders that burst, beside two that send without end to the same receiver.
    Burst,
    /// A flow that shares no bottleneck with an incast of N, but a link that it pauses.
    Victim,
    /// N hosts, each with messages for one other.
    Permutation,
    /// N ranks of the collectives, all sizes by all algorithms.
    Allreduce,
    /// N hosts, each with messages for all others, step after step.
    Alltoall,
    /// N hosts, messages of web search by a Poisson process to hosts by chance.
    Websearch,
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

impl Scenario {
    /// The description of a scenario, with its size from the options. `uplink` is the rate of links between switches
    /// relative to that of the hosts' links.
    pub(crate) fn describe(self, options: &SceneOptions, uplink: f64) -> Result<Description, Wrong> {
        let n = options.hosts.unwrap_or(match self {
            Scenario::Fairness => 4,
            Scenario::Permutation | Scenario::Websearch => 32,
            Scenario::Allreduce => 64,
            _ => 16,
        });
        let (least, most) = if self == Scenario::Allreduce { (2, MOST_RANKS) } else { (1, 2048) };
        if !(least..=most).contains(&n) {
            return Err(Wrong::new("hosts", n, format!("{least} to {most}")));
        }
        self.check(options)?;
        let ms = |ms: u64| Time(Duration::from_millis(ms));
        let single = options.bytes.as_ref().map(|list| list.single().ok_or(list)).transpose();
        let given = match single {
            Err(list) if self != Scenario::Allreduce => {
                return Err(Wrong::new("bytes", list, "one size: only allreduce has several"));
            }
            single => single.unwrap_or_default(),
        };
        let bytes = |default: u64| Some(given.unwrap_or(Bytes(default)));
        let count = |default: usize| options.count.unwrap_or(default);
        let mut links = LinkSection::default();
        let mut time = TimeSection::default();
        let spread = Time(Duration::from_micros(1));
        let senders = |first: usize| Some(Hosts::from(first..first + n));
        let mut shape = ShapeName::Star;
        let mut hosts = n;
        let traffic = match self {
            Scenario::Incast => {
                hosts = n + 1;
                let incast = Traffic { to: Some(0), spread, ..Traffic::of(Pattern::Incast) };
                vec![Traffic { hosts: senders(1), bytes: bytes(1_000_000), count: count(10), ..incast }]
            }
            Scenario::Fairness => {
                hosts = n + 1;
                let apart = 2;
                let all = apart * (n as u64 - 1);
                time = TimeSection { limit: ms(all + 30), warm_up: ms(all + 10), ..time };
                let incast = Traffic { to: Some(0), hosts: senders(1), ..Traffic::of(Pattern::Incast) };
                vec![Traffic {
                    name: Some("fairness".into()),
                    endless: true,
                    every: Some(ms(apart)),
                    ..incast
                }]
            }
            Scenario::Burst => {
                hosts = n + 3;
                let rounds = count(5);
                time = TimeSection { limit: ms(5 * rounds as u64 + 10), ..time };
                let incast = Traffic { to: Some(0), ..Traffic::of(Pattern::Incast) };
                let background = Traffic {
                    name: Some("background".into()),
                    hosts: Some(Hosts::from(1..3)),
                    endless: true,
                    ..incast.clone()
                };
                let bursts = Traffic {
                    name: Some("bursts".into()),
                    hosts: senders(3),
                    bytes: bytes(256_000),
                    count: rounds,
                    every: Some(ms(5)),
                    start: ms(5),
                    spread,
                    ..incast
                };
                vec![background, bursts]
            }
            Scenario::Victim => {
                // Hosts 0 and 1 are on the left: a sender of the incast, and the victim's sender. On the right are the
                // receivers of both, hosts 2 and 3, and the other senders. The link between the switches has the
                // capacity of both left hosts.
                hosts = n + 3;
                shape = ShapeName::Dumbbell;
                links.uplink_rate = Some(Rate(2 * links.rate.0));
                time = TimeSection { limit: ms(20), warm_up: ms(5), ..time };
                let others = [0..1, 4..n + 3].into_iter().filter(|range| !range.is_empty()).collect();
                let incast = Traffic { to: Some(2), endless: true, spread, ..Traffic::of(Pattern::Incast) };
                let victim = Traffic {
                    name: Some("victim".into()),
                    pairs: vec![[1, 3]],
                    endless: true,
                    ..Traffic::of(Pattern::Pairs)
                };
                vec![Traffic { hosts: Some(Hosts(others)), ..incast }, victim]
            }
            Scenario::Permutation => {
                shape = ShapeName::LeafSpine;
                let each = Traffic { spread, ..Traffic::of(Pattern::Permutation) };
                vec![Traffic { bytes: bytes(1_000_000), count: count(10), hosts: senders(0), ..each }]
            }
            Scenario::Allreduce => {
                shape = ShapeName::LeafSpine;
                hosts = n.saturating_mul(options.rails.unwrap_or(1).clamp(1, MAX_RAILS));
                // The limit of one all-reduce, which may have 1 GiB.
                time = TimeSection { limit: ms(5000), ..time };
                Vec::new()
            }
            Scenario::Alltoall => {
                shape = ShapeName::LeafSpine;
                let all = Traffic { hosts: senders(0), ..Traffic::of(Pattern::AllToAll) };
                vec![Traffic { bytes: bytes(1_000_000), count: count(1), ..all }]
            }
            Scenario::Websearch => {
                shape = ShapeName::LeafSpine;
                let name = Some("websearch".into());
                let load = Some(options.load.unwrap_or(0.3));
                let random = Traffic { name, load, hosts: senders(0), ..Traffic::of(Pattern::Random) };
                let stop = options.post_for.unwrap_or(ms(20));
                // The last messages get the same time to complete as with the default `--post-for`.
                time.limit = Time(time.limit.0.max(stop.0.saturating_add(ms(180).0)));
                vec![Traffic { sizes: Some(Sizes::Websearch), stop: Some(stop), ..random }]
            }
        };
        let left = if self == Scenario::Victim { 2 } else { hosts.div_ceil(2) };
        let topology = shape_for(options.topology.unwrap_or(shape), (hosts, left), options, uplink)?;
        links.uplink_rate = links.uplink_rate.filter(|_| topology.has_uplinks());
        let allreduce = (self == Scenario::Allreduce).then(|| allreduce(options, n, &topology));
        Ok(Description {
            seed: 1,
            time,
            topology,
            links,
            switches: SwitchSection::default(),
            control: ControlSection::default(),
            traffic,
            allreduce,
            failure: Vec::new(),
        })
    }
}

impl Scenario {
    /// Rejects options of other scenarios.
    fn check(self, options: &SceneOptions) -> Result<(), Wrong> {
        let is_endless = matches!(self, Scenario::Fairness | Scenario::Victim);
        let is_random = self == Scenario::Websearch;
        if let Some(time) = options.post_for.filter(|time| time.0.is_zero()) {
            return Err(Wrong::new("post-for", time, "more than 0"));
        }
        for (option, value) in options::given(options) {
            let right = match option.as_str() {
                "algorithm" | "rails" | "ranks-per-host" | "chunk" | "eager"
                    if self != Scenario::Allreduce =>
                {
                    "left out: only allreduce has it"
                }
                "load" | "post-for" if !is_random => "left out: only websearch has messages by chance",
                "bytes" | "count" if is_endless => "left out: the flows of this scenario have no end",
                "bytes" if is_random => "left out: websearch has sizes by chance",
                "count" if is_random => "left out: --post-for says how long websearch posts messages",
                _ => continue,
            };
            return Err(Wrong::new(option, value, right));
        }
        Ok(())
    }
}

/// The operations of the ranks of a topology.
fn allreduce(options: &SceneOptions, ranks: usize, topology: &Shape) -> AllreduceSection {
    let default = AllreduceSection::default();
    let of_leaf = match topology {
        Shape::LeafSpine { hosts_per_leaf, .. } => *hosts_per_leaf,
        _ => ranks,
    };
    let fits =
        |each: &usize| ranks.is_multiple_of(*each) && of_leaf.is_multiple_of(*each) && ranks / *each > 1;
    AllreduceSection {
        ranks: (ranks * options.rails.unwrap_or(1) != topology.hosts()).then_some(ranks),
        rails: options.rails.unwrap_or(default.rails),
        ranks_per_host: options.ranks_per_host.unwrap_or([8, 4, 2].into_iter().find(fits).unwrap_or(1)),
        algorithm: options.algorithm.clone().unwrap_or(default.algorithm),
        bytes: options.bytes.clone().unwrap_or(default.bytes),
        count: options.count.unwrap_or(default.count),
        chunk: options.chunk,
        eager: options.eager,
    }
}

/// A topology with at least this many hosts.
fn shape_for(
    name: ShapeName,
    (hosts, left): (usize, usize),
    options: &SceneOptions,
    uplink: f64,
) -> Result<Shape, Wrong> {
    let of_leaves = [
        ("hosts-per-leaf", options.hosts_per_leaf.map(|hosts| hosts.to_string())),
        ("oversubscription", options.oversubscription.map(|ratio| ratio.to_string())),
    ];
    for (option, value) in of_leaves {
        if let Some(value) = value.filter(|_| name != ShapeName::LeafSpine) {
            return Err(Wrong::new(option, value, "left out: only --topology leaf-spine has leaves"));
        }
    }
    Ok(match name {
        ShapeName::Star => Shape::Star { hosts },
        ShapeName::Dumbbell => Shape::Dumbbell { left, right: (hosts - left).max(1) },
        ShapeName::FatTree => {
            let k = (1..).map(|half| 2 * half).find(|k: &usize| k.pow(3) / 4 >= hosts);
            Shape::FatTree { k: k.unwrap_or(2) }
        }
        ShapeName::LeafSpine => {
            let hosts_per_leaf = options.hosts_per_leaf.unwrap_or(8);
            if !(1..=512).contains(&hosts_per_leaf) {
                return Err(Wrong::new("hosts-per-leaf", hosts_per_leaf, "1 to 512"));
            }
            let oversubscription = options.oversubscription.unwrap_or(2.0);
            let spines = (hosts_per_leaf as f64 / oversubscription / uplink).round();
            let spines = if options.oversubscription.is_none() { spines.max(1.0) } else { spines };
            if !(1.0..=512.0).contains(&spines) {
                let most = hosts_per_leaf as f64 / uplink;
                let right = format!("1/64 to {most}, the hosts of a leaf over one uplink");
                return Err(Wrong::new("oversubscription", oversubscription, right));
            }
            let leaves = hosts.div_ceil(hosts_per_leaf);
            Shape::LeafSpine { leaves, hosts_per_leaf, spines: spines as usize }
        }
    })
}
