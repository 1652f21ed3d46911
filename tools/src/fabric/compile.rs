//! Compiles a description to a plan. Every value is checked.

use std::time::Duration;

use ferroce_driver::sim::fabric::{
    BufferConfig, Cable, ClassMap, FabricConfig, Marking, Part, PfcConfig, SwitchConfig, Threshold, Topology,
};
use ferroce_driver::sim::{EcnConfig, LinkConfig};

use super::description::{
    Description, FailureEntry, LinkEntry, LinkSection, MarkingAt, Repeat, Shape, SwitchSection,
};
use super::plan::{Failing, Flow, Outage, Plan, Transport};
use super::traffic::{Expanded, Group, Scene};
use super::wrong::Wrong;
use crate::quantity::{Bytes, Rate, Time};

/// A plan, with the names of its flows and messages.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub(crate) plan: Plan,
    pub(crate) groups: Vec<Group>,
}

/// The most hosts of a fabric: beyond this, hosts evict each other's memory from the cache.
const MOST_HOSTS: usize = 4096;
/// The most links between leaves and spines.
const MOST_UPLINKS: usize = 65_536;
/// The most samples of a run.
const MOST_SAMPLES: u128 = 1_000_000;

impl Description {
    /// The plan, if all values are valid. [Resolved](Description::resolve) values are checked as well.
    pub(crate) fn compile(&self) -> Result<Compiled, Wrong> {
        let description = self.clone().resolve();
        description.check_links()?;
        self.switches.check_marking(self.links.rate, &description.switches)?;
        description.check()?;
        let Description { seed, time, topology, links, switches, control, traffic, failure, .. } =
            &description;
        let switch = switches.config(control.dscp);
        let topology = topology.build(links, switch)?;
        let mut failures = Vec::new();
        for (place, failure) in failure.iter().enumerate() {
            let outages = failure.outages(&topology, time.limit, place)?;
            check_apart(&failures, &outages, failure, place)?;
            failures.extend(outages);
        }
        let scene = Scene { seed: *seed, hosts: topology.hosts.len(), rate: links.rate, limit: time.limit };
        let Expanded { flows, messages, groups } = Expanded::new(traffic, scene)?;
        check_ways(&topology, &flows)?;
        let mtu = control.path_mtu.bytes() + 104;
        let transport = Transport {
            control: control.congestion.at(links.rate),
            cnp_interval: control.cnp_interval.unwrap_or_default().0,
            selective_repeat: control.repeat == Repeat::Selective,
            path_mtu: control.path_mtu,
            dscp: control.dscp,
            window: control.window,
            timeout: control.ack_timeout.unwrap_or_default(),
            poll_interval: control.poll.0,
        };
        let plan = Plan {
            seed: *seed,
            fabric: FabricConfig::default().mtu(mtu.max(1500)).convergence(switches.convergence.0),
            topology,
            flows,
            messages,
            failures,
            transport,
            duration: time.limit.0,
            warm_up: time.warm_up.0,
            sample: time.sample.0,
        };
        Ok(Compiled { plan, groups })
    }

    fn check_links(&self) -> Result<(), Wrong> {
        let links = &self.links;
        check_link("links", links.rate, links.delay)?;
        links.uplink_rate.map_or(Ok(()), |rate| check_rate("links.uplink-rate", rate))?;
        part("links.loss", links.loss)
    }

    fn check(&self) -> Result<(), Wrong> {
        let Description { time, topology, switches, control, traffic, allreduce, .. } = self;
        let second = Time(Duration::from_secs(1));
        within("time.limit", time.limit, Time(Duration::from_micros(1)), Time(100 * second.0))?;
        within("time.sample", time.sample, Time(Duration::from_nanos(100)), time.limit)?;
        if time.limit.0.as_nanos() / time.sample.0.as_nanos() > MOST_SAMPLES {
            let least = Time(time.limit.0 / MOST_SAMPLES as u32);
            let right = format!("at least {least}, for at most {MOST_SAMPLES} samples until {}", time.limit);
            return Err(Wrong::new("time.sample", time.sample, right));
        }
        if time.warm_up >= time.limit {
            return Err(Wrong::new(
                "time.warm-up",
                time.warm_up,
                format!("less than the limit, {}", time.limit),
            ));
        }
        switches.check()?;
        within("control.window", control.window, 1, (1 << 23) - 1)?;
        control.ack_timeout.map_or(Ok(()), |timeout| within("control.ack-timeout", timeout, 1, 31))?;
        control
            .cnp_interval
            .map_or(Ok(()), |time| within("control.cnp-interval", time, Time::default(), second))?;
        within("control.dscp", control.dscp, 0, 63)?;
        within("control.poll", control.poll, Time(Duration::from_nanos(10)), Time(second.0 / 1000))?;
        if control.dscp >> 3 == 6 {
            return Err(Wrong::new(
                "control.dscp",
                control.dscp,
                "below 48 or above 55: these are in the class of CNPs",
            ));
        }
        match (allreduce, traffic.is_empty()) {
            (Some(allreduce), true) => allreduce.check(topology, control, time),
            (None, false) => Ok(()),
            (Some(_), false) => Err(Wrong::new(
                "traffic",
                "beside [allreduce]",
                "left out: an [allreduce] must be the only traffic",
            )),
            (None, true) => Err(Wrong::new("traffic", "none", "at least one [[traffic]], or an [allreduce]")),
        }
    }
}

/// Outages of the same part must not overlap.
fn check_apart(before: &[Outage], new: &[Outage], entry: &FailureEntry, place: usize) -> Result<(), Wrong> {
    let ends = |outage: &Outage| outage.until.unwrap_or(Duration::MAX);
    let is_twice = |a: &Outage, b: &Outage| a.of == b.of && a.from < ends(b) && b.from < ends(a);
    if let Some(other) = before.iter().find(|other| new.iter().any(|new| is_twice(other, new))) {
        let from = Time(other.from);
        let until = other.until.map_or("the end".to_owned(), |until| Time(until).to_string());
        let right = format!(
            "at a time at which {} is not down by another [[failure]], as from {from} to {until}",
            entry.what()
        );
        return Err(Wrong::new(format!("failure.{place}.at"), entry.at, right));
    }
    Ok(())
}

/// Each sender has a path to its receiver.
fn check_ways(topology: &Topology, flows: &[Flow]) -> Result<(), Wrong> {
    let hosts = topology.hosts.len();
    let place = |part: Part| match part {
        Part::Host(host) => host,
        Part::Switch(switch) => hosts + switch,
    };
    let mut root: Vec<usize> = (0..hosts + topology.switches.len()).collect();
    let find = |root: &mut Vec<usize>, mut of: usize| {
        while root[of] != of {
            root[of] = root[root[of]];
            of = root[of];
        }
        of
    };
    for cable in &topology.links {
        let [a, b] = cable.ends.map(|end| find(&mut root, place(end)));
        root[a] = b;
    }
    let mut is_cut = |flow: &Flow| find(&mut root, flow.from) != find(&mut root, flow.to);
    match flows.iter().find(|flow| is_cut(flow)) {
        None => Ok(()),
        Some(Flow { from, to, .. }) => Err(Wrong::new(
            "topology.custom.links",
            format!("no path from host{from} to host{to}"),
            "such that there is a path from each sender to its receivers",
        )),
    }
}

fn check_rate(place: &str, rate: Rate) -> Result<(), Wrong> {
    within(place, rate, Rate(1_000_000), Rate(4_000_000_000_000))
}

fn check_link(place: &str, rate: Rate, delay: Time) -> Result<(), Wrong> {
    check_rate(&format!("{place}.rate"), rate)?;
    within(&format!("{place}.delay"), delay, Time(Duration::ZERO), Time(Duration::from_secs(1)))
}

impl SwitchSection {
    fn check(&self) -> Result<(), Wrong> {
        let most = Bytes(1 << 40);
        within("switches.buffer", self.buffer, Bytes(10_000), most)?;
        within("switches.kmax", self.kmax.unwrap_or_default(), Bytes(1), most)?;
        part("switches.pmax", self.pmax)?;
        within("switches.xon-offset", self.xon_offset, Bytes(0), most)?;
        self.xoff.map_or(Ok(()), |xoff| within("switches.xoff", xoff, Bytes(1), self.buffer))?;
        within("switches.convergence", self.convergence, Time::default(), Time(Duration::from_secs(100)))?;
        self.headroom.map_or(Ok(()), |headroom| within("switches.headroom", headroom, Bytes(0), most))?;
        let watchdog = (Time(Duration::from_micros(1)), Time(Duration::from_secs(100)));
        self.watchdog.map_or(Ok(()), |time| within("switches.watchdog", time, watchdog.0, watchdog.1))?;
        for (place, alpha) in [("switches.alpha", self.alpha), ("switches.lossy-alpha", self.lossy_alpha)] {
            if !(alpha > 0.0 && alpha <= 1024.0) {
                return Err(Wrong::new(place, alpha, "a factor above 0 and at most 1024"));
            }
        }
        self.check_pause()
    }

    /// A pause must end below the threshold at which it began, above 0.
    fn check_pause(&self) -> Result<(), Wrong> {
        let offset = self.xon_offset;
        match self.xoff {
            _ if !self.pfc => Ok(()),
            Some(xoff) if xoff <= offset => {
                let right = format!("more than xon-offset, {offset}: a pause ends that far below xoff");
                Err(Wrong::new("switches.xoff", xoff, right))
            }
            None if offset.0 as f64 >= self.alpha * self.buffer.0 as f64 => {
                let begins = Bytes((self.alpha * self.buffer.0 as f64) as u64);
                let right = format!(
                    "less than {begins}, where a pause begins at most (alpha {} of the buffer, {})",
                    self.alpha, self.buffer
                );
                Err(Wrong::new("switches.xon-offset", offset, right))
            }
            _ => Ok(()),
        }
    }

    /// Kmin must be below Kmax. Omitted values are `resolved`, from the rate.
    fn check_marking(&self, rate: Rate, resolved: &SwitchSection) -> Result<(), Wrong> {
        let (kmin, kmax) = (resolved.kmin.unwrap_or_default(), resolved.kmax.unwrap_or_default());
        if kmin < kmax || !self.ecn && (self.kmin.is_none() || self.kmax.is_none()) {
            return Ok(());
        }
        Err(match (self.kmin, self.kmax) {
            (None, Some(_)) => {
                let right = format!("more than Kmin, {kmin} by default at {rate}; or give a lower kmin too");
                Wrong::new("switches.kmax", kmax, right)
            }
            (Some(_), None) => {
                let right = format!("less than Kmax, {kmax} by default at {rate}; or give a higher kmax too");
                Wrong::new("switches.kmin", kmin, right)
            }
            _ => Wrong::new("switches.kmin", kmin, format!("less than Kmax, {kmax}")),
        })
    }

    /// PFC applies to the class of this DSCP, which the data has.
    fn config(&self, dscp: u8) -> SwitchConfig {
        let threshold = match self.xoff {
            Some(xoff) => Threshold::Static(xoff.0),
            None => Threshold::Dynamic(self.alpha),
        };
        let buffer = BufferConfig::default()
            .pool(self.buffer.0)
            .threshold(threshold)
            .resume_offset(self.xon_offset.0)
            .headroom(self.headroom.map(|headroom| headroom.0))
            .lossy_threshold(Threshold::Dynamic(self.lossy_alpha));
        let kmin = self.kmin.unwrap_or_default().0;
        let ecn = EcnConfig::new(kmin, self.kmax.unwrap_or_default().0, self.pmax);
        let marking = match self.marking {
            MarkingAt::Enqueue => Marking::Enqueue,
            MarkingAt::Dequeue => Marking::Dequeue,
        };
        let pfc = PfcConfig::default()
            .classes(1 << ClassMap::default().class(dscp))
            .watchdog(self.watchdog.map(|time| time.0));
        SwitchConfig::default()
            .buffer(buffer)
            .marking(marking)
            .ecn(self.ecn.then_some(ecn))
            .pfc(self.pfc.then_some(pfc))
    }
}

impl Shape {
    fn build(&self, links: &LinkSection, switch: SwitchConfig) -> Result<Topology, Wrong> {
        let link = links.link(links.rate, links.delay);
        let uplink = links.link(links.uplink_rate.unwrap_or(links.rate), links.delay);
        let count = |place: &str, count: usize, least: usize| within(place, count, least, MOST_HOSTS);
        let topology = match self {
            Shape::Star { hosts } => {
                count("topology.star.hosts", *hosts, 2)?;
                Topology::star(*hosts, &link, switch)
            }
            Shape::Dumbbell { left, right } => {
                count("topology.dumbbell.left", *left, 1)?;
                count("topology.dumbbell.right", *right, 1)?;
                Topology::dumbbell(*left, *right, &link, &uplink, switch)
            }
            Shape::LeafSpine { leaves, hosts_per_leaf, spines } => {
                count("topology.leaf-spine.leaves", *leaves, 1)?;
                count("topology.leaf-spine.hosts-per-leaf", *hosts_per_leaf, 1)?;
                count("topology.leaf-spine.spines", *spines, usize::from(*leaves > 1))?;
                let hosts = leaves * hosts_per_leaf;
                if !(2..=MOST_HOSTS).contains(&hosts) {
                    let right = format!("such that there are 2 to {MOST_HOSTS} hosts; these are {hosts}");
                    return Err(Wrong::new("topology.leaf-spine.leaves", leaves, right));
                }
                if leaves * spines > MOST_UPLINKS {
                    let right = format!(
                        "such that there are at most {MOST_UPLINKS} links to leaves; these are {}",
                        leaves * spines
                    );
                    return Err(Wrong::new("topology.leaf-spine.spines", spines, right));
                }
                Topology::leaf_spine(*leaves, *hosts_per_leaf, *spines, &link, &uplink, switch)
                    .map_err(|error| Wrong::new("topology.leaf-spine", "", error.to_string()))?
            }
            Shape::FatTree { k } => {
                if *k < 2 || k % 2 == 1 || *k > 24 {
                    return Err(Wrong::new("topology.fat-tree.k", k, "an even number, 2 to 24"));
                }
                Topology::fat_tree(*k, &link, switch)
                    .map_err(|error| Wrong::new("topology.fat-tree.k", k, error.to_string()))?
            }
            Shape::Custom { hosts, switches, links: entries } => {
                count("topology.custom.hosts", *hosts, 2)?;
                count("topology.custom.switches", *switches, 0)?;
                let mut topology = Topology::default();
                (0..*hosts).for_each(|_| topology.hosts.push(Default::default()));
                (0..*switches).for_each(|_| topology.switches.push(switch));
                let mut linked = vec![false; *hosts];
                for (at, entry) in entries.iter().enumerate() {
                    let place = format!("topology.custom.links.{at}.ends");
                    let ends = entry.parts(*hosts, *switches, &place)?;
                    for end in ends {
                        if let Part::Host(host) = end
                            && (std::mem::replace(&mut linked[host], true) || ends[0] == ends[1])
                        {
                            return Err(Wrong::new(
                                place,
                                format!("host{host}"),
                                "a host without a link so far: a host has one",
                            ));
                        }
                    }
                    let uplink = links.uplink_rate.filter(|_| entry.links_switches());
                    let rate = entry.rate.or(uplink).unwrap_or(links.rate);
                    let delay = entry.delay.unwrap_or(links.delay);
                    check_link(&format!("topology.custom.links.{at}"), rate, delay)?;
                    topology.add_link(ends[0], ends[1], &links.link(rate, delay));
                }
                if let Some(host) = linked.iter().position(|is_linked| !is_linked) {
                    return Err(Wrong::new(
                        "topology.custom.hosts",
                        hosts,
                        format!("the number of hosts with a link; host{host} has none"),
                    ));
                }
                topology
            }
        };
        Ok(topology)
    }
}

impl LinkSection {
    fn link(&self, rate: Rate, delay: Time) -> LinkConfig {
        LinkConfig::default().rate(rate.0).delay(delay.0).loss(self.loss)
    }
}

impl LinkEntry {
    fn parts(&self, hosts: usize, switches: usize, place: &str) -> Result<[Part; 2], Wrong> {
        let [a, b] = &self.ends;
        Ok([part_named(a, hosts, switches, place)?, part_named(b, hosts, switches, place)?])
    }
}

/// Such as `host0` or `switch1`.
fn part_named(name: &str, hosts: usize, switches: usize, place: &str) -> Result<Part, Wrong> {
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse::<usize>().ok();
    let host = number("host").filter(|number| *number < hosts).map(Part::Host);
    let part = host.or_else(|| number("switch").filter(|number| *number < switches).map(Part::Switch));
    let right = || {
        let last = |count: usize| count.saturating_sub(1);
        format!("host0 to host{}, or switch0 to switch{}", last(hosts), last(switches))
    };
    part.ok_or_else(|| Wrong::new(place, name, right()))
}

impl FailureEntry {
    /// The failing parts of the topology: a switch, or each link between two parts.
    fn outages(&self, topology: &Topology, limit: Time, place: usize) -> Result<Vec<Outage>, Wrong> {
        let place = |key: &str| format!("failure.{place}.{key}");
        if self.at >= limit {
            return Err(Wrong::new(place("at"), self.at, format!("before the limit, {limit}")));
        }
        if let Some(until) = self.until.filter(|until| *until <= self.at) {
            return Err(Wrong::new(place("until"), until, format!("after it begins, {}", self.at)));
        }
        let named = |name: &str, key: &str| {
            part_named(name, topology.hosts.len(), topology.switches.len(), &place(key))
        };
        let failing: Vec<Failing> = match (&self.link, &self.switch) {
            (Some([a, b]), None) => {
                let ends = [named(a, "link")?, named(b, "link")?];
                let is_between = |cable: &Cable| cable.ends == ends || cable.ends == [ends[1], ends[0]];
                let links = topology.links.iter().enumerate().filter(|(_, cable)| is_between(cable));
                let links: Vec<Failing> = links.map(|(link, _)| Failing::Link(link)).collect();
                if links.is_empty() {
                    return Err(Wrong::new(place("link"), format!("{a} and {b}"), "two that are linked"));
                }
                links
            }
            (None, Some(name)) => match named(name, "switch")? {
                Part::Switch(switch) => vec![Failing::Switch(switch)],
                Part::Host(_) => return Err(Wrong::new(place("switch"), name, "a switch, as switch0")),
            },
            _ => {
                let right = "with one of link = [\"switch0\", \"switch2\"] and switch = \"switch2\"";
                return Err(Wrong::new(place("at"), self.at, right));
            }
        };
        let (from, until) = (self.at.0, self.until.map(|until| until.0));
        Ok(failing.into_iter().map(|of| Outage { of, from, until }).collect())
    }
}

fn within<T: PartialOrd + std::fmt::Display>(place: &str, value: T, least: T, most: T) -> Result<(), Wrong> {
    if value >= least && value <= most {
        return Ok(());
    }
    Err(Wrong::new(place, value, format!("{least} to {most}")))
}

fn part(place: &str, value: f64) -> Result<(), Wrong> {
    if (0.0..=1.0).contains(&value) {
        return Ok(());
    }
    Err(Wrong::new(place, value, "0 to 1"))
}
