//! Traffic: senders, receivers, sizes and times.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use ferroce::is_unprintable;
use serde::{Deserialize, Serialize};

use super::description::pair;
use super::expansion::Expansion;
use super::plan::{Flow, Message};
use super::sizes::Sizes;
use super::wrong::Wrong;
use crate::failure::legible;
use crate::quantity::{Bytes, Rate, Time};

/// One entry of `[[traffic]]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Traffic {
    /// Its name in the report; by default its pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) pattern: Pattern,
    /// The hosts that take part; all by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hosts: Option<Hosts>,
    /// The receiver of an incast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) to: Option<usize>,
    /// Sender and receiver, for the pattern `pairs`.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "pair::many")]
    pub(crate) pairs: Vec<[usize; 2]>,
    /// Whether flows send endlessly.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) endless: bool,
    /// The length of a message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<Bytes>,
    /// The lengths of messages, by distribution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sizes: Option<Sizes>,
    /// Messages of a Poisson process, at this fraction of the rate of the sender's link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) load: Option<f64>,
    /// Messages of each flow, or rounds of a collective.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub(crate) count: usize,
    /// The interval between two messages; by default, each is posted when the previous one has arrived. For endless
    /// flows, the interval between their starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) every: Option<Time>,
    #[serde(default, skip_serializing_if = "is_now")]
    pub(crate) start: Time,
    /// The time at which endless flows, or random messages, stop; by default the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stop: Option<Time>,
    /// Each flow starts later by a random time up to this.
    #[serde(default, skip_serializing_if = "is_now")]
    pub(crate) spread: Time,
}

/// The sender and receiver of each flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Pattern {
    /// As given by `pairs`.
    Pairs,
    /// All others to one host.
    Incast,
    /// Each host to a random other one; each receives from one.
    Permutation,
    /// Each host to the next one. With `bytes`, an AllReduce of that size: 2 (n - 1) steps with an n-th of the bytes. A
    /// step starts when the previous one has arrived from the previous host.
    Ring,
    /// Each host to all others. With `bytes`, that many to each, in n - 1 steps. A step starts when the previous one
    /// has arrived.
    AllToAll,
    /// Each message to a random other host; needs `load`.
    Random,
}

impl Traffic {
    pub(crate) fn of(pattern: Pattern) -> Traffic {
        Traffic {
            name: None,
            pattern,
            hosts: None,
            to: None,
            pairs: Vec::new(),
            endless: false,
            bytes: None,
            sizes: None,
            load: None,
            count: 1,
            every: None,
            start: Time::default(),
            stop: None,
            spread: Time::default(),
        }
    }

    pub(crate) fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.pattern.to_string())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pattern::Pairs => "pairs",
            Pattern::Incast => "incast",
            Pattern::Permutation => "permutation",
            Pattern::Ring => "ring",
            Pattern::AllToAll => "all-to-all",
            Pattern::Random => "random",
        })
    }
}

fn time(time: Option<Time>) -> String {
    time.unwrap_or_default().to_string()
}

fn is_false(value: &bool) -> bool {
    !value
}

fn once() -> usize {
    1
}

fn is_once(count: &usize) -> bool {
    *count == 1
}

fn is_now(time: &Time) -> bool {
    time.0.is_zero()
}

/// Hosts by number: `0-15`, `0,2,5-7`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hosts(pub(crate) Vec<Range<usize>>);

impl From<Range<usize>> for Hosts {
    fn from(range: Range<usize>) -> Hosts {
        Hosts([range].into())
    }
}

impl FromStr for Hosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Hosts, String> {
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<usize>().ok().filter(|number| *number < 1 << 20);
            number(first)
                .zip(number(last))
                .filter(|(first, last)| first <= last)
                .map(|(first, last)| first..last + 1)
        };
        let ranges: Option<Vec<Range<usize>>> = text.split(',').map(range).collect();
        ranges.map(Hosts).ok_or_else(|| format!("'{text}': must be numbers of hosts, as 0-15 or 0,2,5-7"))
    }
}

impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Range { start, end }) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match end - start {
                1 => write!(f, "{comma}{start}")?,
                _ => write!(f, "{comma}{start}-{}", end - 1)?,
            }
        }
        Ok(())
    }
}

impl Serialize for Hosts {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hosts {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Hosts, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The flows and messages of an entry, and their name.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) flows: Range<usize>,
    pub(crate) messages: Range<usize>,
    /// For random messages: rates of flows are meaningless then.
    pub(crate) offer: Option<Offer>,
    /// Whether its flows send endlessly, without messages.
    pub(crate) is_endless: bool,
}

/// The time and the senders of random messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub(crate) from: Duration,
    pub(crate) until: Duration,
    /// The sum of the rates of the senders' links, in bit/s.
    pub(crate) capacity: f64,
    /// Whether messages have different sizes.
    pub(crate) has_sizes: bool,
}

/// The traffic of a plan.
#[derive(Default)]
pub(super) struct Expanded {
    pub(super) flows: Vec<Flow>,
    pub(super) messages: Vec<Message>,
    pub(super) groups: Vec<Group>,
}

/// The hosts and limits that traffic is expanded for.
#[derive(Clone, Copy)]
pub(super) struct Scene {
    pub(super) seed: u64,
    pub(super) hosts: usize,
    pub(super) rate: Rate,
    pub(super) limit: Time,
}

/// More messages or flows than this are considered a mistake. Each flow has two queue pairs.
pub(super) const MOST_MESSAGES: usize = 4_000_000;
const MOST_FLOWS: usize = 65_536;

impl Expanded {
    pub(super) fn new(traffic: &[Traffic], scene: Scene) -> Result<Expanded, Wrong> {
        let mut expanded = Expanded::default();
        for (place, entry) in traffic.iter().enumerate() {
            let wrong = |key: &str, value: &dyn fmt::Display, right: String| {
                Wrong::new(format!("traffic.{place}.{key}"), value, right)
            };
            entry.check(scene, &wrong)?;
            let (new_flows, new_messages) = entry.size(scene);
            let all = expanded.messages.len() as f64 + new_messages;
            if all > MOST_MESSAGES as f64 {
                let right = format!("such that there are at most {MOST_MESSAGES} messages in all");
                let key = if entry.load.is_some() { "load" } else { "count" };
                return Err(wrong(key, &format!("about {all:.0} messages"), right));
            }
            if expanded.flows.len().saturating_add(new_flows) > MOST_FLOWS {
                let right = format!("such that there are at most {MOST_FLOWS} flows in all");
                return Err(wrong("hosts", &format!("{new_flows} flows"), right));
            }
            let (flows, messages) = (expanded.flows.len(), expanded.messages.len());
            Expansion::new(entry, scene, place, &mut expanded).expand();
            let endless = expanded.flows[flows..].iter().filter_map(|flow| flow.endless);
            let begins = Time(endless.map(|(begins, _)| begins).max().unwrap_or_default());
            let stop = entry.stop.unwrap_or(scene.limit);
            if begins >= stop {
                let right = format!("after all flows have begun, the last at {begins}");
                return Err(match entry.stop {
                    Some(stop) => wrong("stop", &stop, right),
                    None => Wrong::new("time.limit", stop, right),
                });
            }
            let name = entry.name();
            let same = traffic[..place].iter().filter(|other| other.name() == name).count();
            expanded.groups.push(Group {
                name: if same == 0 { name } else { format!("{name} ({})", same + 1) },
                flows: flows..expanded.flows.len(),
                messages: messages..expanded.messages.len(),
                offer: entry.load.map(|_| entry.offer(scene)),
                is_endless: entry.endless,
            });
        }
        Ok(expanded)
    }
}

impl Traffic {
    fn check(
        &self,
        scene: Scene,
        wrong: &dyn Fn(&str, &dyn fmt::Display, String) -> Wrong,
    ) -> Result<(), Wrong> {
        let there = scene.hosts;
        let is_there = |key: &str, host: usize| {
            let right = || format!("a host from 0 to {}", there.saturating_sub(1));
            if host < there { Ok(()) } else { Err(wrong(key, &host, right())) }
        };
        for range in self.hosts.iter().flat_map(|hosts| &hosts.0) {
            is_there("hosts", range.end - 1)?;
        }
        let hosts = self.members(scene);
        let mut sorted = hosts.clone();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            let hosts = self.hosts.as_ref().map(Hosts::to_string).unwrap_or_default();
            return Err(wrong("hosts", &hosts, "hosts that are each named once".into()));
        }
        self.to.map_or(Ok(()), |to| is_there("to", to))?;
        for pair in &self.pairs {
            pair.iter().try_for_each(|host| is_there("pairs", *host))?;
            if pair[0] == pair[1] {
                return Err(wrong("pairs", &format!("{pair:?}"), "two different hosts".into()));
            }
        }
        let pattern = self.pattern;
        let is_pairs = pattern == Pattern::Pairs;
        if is_pairs == self.pairs.is_empty() {
            let right = if is_pairs {
                "at least one, as [[0, 1], [2, 1]]"
            } else {
                "left out: only pattern = \"pairs\" has them"
            };
            return Err(wrong("pairs", &format!("{:?}", self.pairs), right.into()));
        }
        if self.to.is_some() != (pattern == Pattern::Incast) {
            return Err(match self.to {
                None => wrong("to", &"none", "the host that receives".into()),
                Some(to) => wrong("to", &to, "left out: only pattern = \"incast\" has it".into()),
            });
        }
        if !is_pairs
            && hosts.iter().filter(|host| Some(**host) != self.to).count()
                < 1 + usize::from(self.to.is_none())
        {
            return Err(wrong("hosts", &hosts.len(), format!("at least 2 hosts, for {pattern}")));
        }
        let volumes = [self.endless, self.bytes.is_some(), self.sizes.is_some()];
        if volumes.iter().filter(|is_given| **is_given).count() != 1 {
            let right = "with one of endless = true, bytes = \"1MB\", and sizes = \"websearch\" with a load";
            return Err(wrong("pattern", &pattern, right.into()));
        }
        if let Some(bytes) = self.bytes
            && !(1..=1 << 40).contains(&bytes.0)
        {
            return Err(wrong("bytes", &bytes, "1B to 1024GiB".into()));
        }
        if self.count == 0 || self.count > MOST_MESSAGES {
            return Err(wrong("count", &self.count, format!("1 to {MOST_MESSAGES}")));
        }
        let needs_load = self.sizes.is_some() || pattern == Pattern::Random;
        match self.load {
            None if needs_load => {
                let why = if pattern == Pattern::Random { "pattern = \"random\"" } else { "sizes" };
                return Err(wrong("load", &"none", format!("a part of the line rate, as 0.5, for {why}")));
            }
            Some(load) if !(1e-6..=10.0).contains(&load) => {
                return Err(wrong("load", &load, "a part of the line rate, 0.000001 to 10".into()));
            }
            Some(load) if self.endless => {
                return Err(wrong("load", &load, "left out: it is for messages, and this is endless".into()));
            }
            Some(_) if self.count != 1 => {
                return Err(wrong(
                    "count",
                    &self.count,
                    "left out: with a load, messages come until stop".into(),
                ));
            }
            _ => {}
        }
        let is_timed = self.endless || self.load.is_some();
        let idle = [
            (
                "count",
                self.endless && self.count != 1,
                self.count.to_string(),
                "endless flows have no messages",
            ),
            (
                "every",
                self.load.is_some() && self.every.is_some(),
                time(self.every),
                "with a load, chance decides",
            ),
            (
                "spread",
                self.load.is_some() && !is_now(&self.spread),
                self.spread.to_string(),
                "with a load, chance decides",
            ),
            (
                "stop",
                !is_timed && self.stop.is_some(),
                time(self.stop),
                "only endless flows and a load have it; count says how many messages there are",
            ),
        ];
        if let Some((key, _, value, why)) = idle.iter().find(|(_, is_idle, ..)| *is_idle) {
            return Err(wrong(key, value, format!("left out: {why}")));
        }
        if let Some(name) = self.name.as_ref().filter(|name| name.contains(is_unprintable)) {
            return Err(wrong("name", &legible(name), "of printable characters".into()));
        }
        if self.start >= scene.limit {
            return Err(wrong("start", &self.start, format!("before the limit, {}", scene.limit)));
        }
        let most = Time(Duration::from_secs(100));
        for (key, time) in [("spread", self.spread), ("every", self.every.unwrap_or_default())] {
            if time > most {
                return Err(wrong(key, &time, format!("at most {most}")));
            }
        }
        if let Some(stop) = self.stop
            && stop <= self.start
        {
            return Err(wrong("stop", &stop, format!("after the start, {}", self.start)));
        }
        if let Some(stop) = self.stop
            && stop > scene.limit
        {
            let right = format!("at least {stop}, when the traffic of '{}' stops", self.name());
            return Err(Wrong::new("time.limit", scene.limit, right));
        }
        Ok(())
    }

    fn offer(&self, scene: Scene) -> Offer {
        let senders = match self.pattern {
            Pattern::Pairs => {
                let senders: BTreeSet<usize> = self.pairs.iter().map(|[from, _]| *from).collect();
                senders.len()
            }
            _ => self.members(scene).into_iter().filter(|host| Some(*host) != self.to).count(),
        };
        Offer {
            from: self.start.0,
            until: self.stop.unwrap_or(scene.limit).min(scene.limit).0,
            capacity: senders as f64 * scene.rate.0 as f64,
            has_sizes: self.sizes.is_some(),
        }
    }

    /// The greatest number of flows and messages; for random messages, about the expected number.
    fn size(&self, scene: Scene) -> (usize, f64) {
        let members = self.members(scene).len();
        let each_other = members.saturating_mul(members.saturating_sub(1));
        let flows = match self.pattern {
            Pattern::Pairs => self.pairs.len(),
            Pattern::Incast | Pattern::Permutation | Pattern::Ring => members,
            Pattern::AllToAll | Pattern::Random => each_other,
        };
        let count = self.count as f64;
        if self.endless {
            return (flows, 0.0);
        }
        match (self.load, self.pattern) {
            (Some(load), _) => {
                let mean = self.mean_bytes();
                let time = self.stop.unwrap_or(scene.limit).0.saturating_sub(self.start.0).as_secs_f64();
                let messages = members as f64 * load * scene.rate.0 as f64 * time / (8.0 * mean.max(1.0));
                ((messages as usize).saturating_add(1).min(flows), messages)
            }
            (None, Pattern::Ring) => (flows, 2.0 * each_other as f64 * count),
            (None, _) => (flows, flows as f64 * count),
        }
    }

    /// The mean size of a random message.
    pub(super) fn mean_bytes(&self) -> f64 {
        self.sizes.map_or(self.bytes.map_or(0.0, |bytes| bytes.0 as f64), Sizes::mean)
    }

    /// The hosts that take part.
    pub(super) fn members(&self, scene: Scene) -> Vec<usize> {
        match &self.hosts {
            None => (0..scene.hosts).collect(),
            Some(hosts) => hosts.0.iter().cloned().flatten().collect(),
        }
    }
}
