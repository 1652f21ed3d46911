//! What goes down in a run, and comes up again.

use std::time::Duration;

use ferroce_driver::sim::fabric::{Built, Part, Topology};
use serde::{Deserialize, Serialize};

use super::quantity::Time;
use super::wrong::Wrong;

/// One entry of `[[outage]]`: a link by its ends, or a switch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OutageEntry {
    /// Such as `["switch0", "switch4"]`; if there are several links between them, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) link: Option<[String; 2]>,
    /// Such as `switch4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) switch: Option<String>,
    /// When it goes down.
    pub(crate) at: Time,
    /// When it comes up again; never by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) until: Option<Time>,
}

/// A part of a fabric that is down for a time.
#[derive(Clone, Debug)]
pub(crate) struct Outage {
    part: Down,
    at: Duration,
    until: Option<Duration>,
}

/// By their places in the topology.
#[derive(Clone, Debug)]
enum Down {
    Links(Vec<usize>),
    Switch(usize),
}

impl OutageEntry {
    /// The outage; `place` is that of the entry.
    pub(super) fn compile(&self, place: &str, topology: &Topology, limit: Time) -> Result<Outage, Wrong> {
        let wrong =
            |key: &str, value: String, right: String| Wrong::new(format!("{place}.{key}"), value, right);
        if self.at >= limit {
            return Err(wrong("at", self.at.to_string(), format!("before the limit, {limit}")));
        }
        if let Some(until) = self.until.filter(|until| *until <= self.at) {
            return Err(wrong("until", until.to_string(), format!("after {}", self.at)));
        }
        let part = match (&self.link, &self.switch) {
            (Some(ends), None) => {
                let [a, b] = ends;
                let ends = [
                    named(a, topology, &format!("{place}.link"))?,
                    named(b, topology, &format!("{place}.link"))?,
                ];
                let is_it = |cable: [Part; 2]| cable == ends || cable == [ends[1], ends[0]];
                let links = topology.links.iter().enumerate().filter(|(_, cable)| is_it(cable.ends));
                let links: Vec<usize> = links.map(|(number, _)| number).collect();
                if links.is_empty() {
                    return Err(wrong(
                        "link",
                        format!("{a} to {b}"),
                        "the ends of a link that is there".into(),
                    ));
                }
                Down::Links(links)
            }
            (None, Some(name)) => match named(name, topology, &format!("{place}.switch"))? {
                Part::Switch(switch) => Down::Switch(switch),
                Part::Host(_) => return Err(wrong("switch", name.clone(), "a switch, as switch0".into())),
            },
            (link, _) => {
                let given = if link.is_some() { "both" } else { "none" };
                return Err(wrong("link", given.into(), "a link or a switch".into()));
            }
        };
        Ok(Outage { part, at: self.at.0, until: self.until.map(|until| until.0) })
    }
}

impl Outage {
    /// Tells the fabric, whose time begins at `begin`.
    pub(super) fn plan(&self, built: &Built, begin: ferroce::Nanos) {
        let until = self.until.map(|until| (true, until));
        for (is_up, time) in [(false, self.at)].into_iter().chain(until) {
            let time = begin + time;
            match &self.part {
                Down::Links(links) => {
                    links.iter().for_each(|link| built.fabric.set_link(built.links[*link], is_up, time));
                }
                Down::Switch(switch) => built.fabric.set_switch(built.switches[*switch], is_up, time),
            }
        }
    }
}

/// The part of a topology that a file names: `host3`, `switch0`.
pub(super) fn named(name: &str, topology: &Topology, place: &str) -> Result<Part, Wrong> {
    let (hosts, switches) = (topology.hosts.len(), topology.switches.len());
    let number = |prefix: &str| name.strip_prefix(prefix)?.parse::<usize>().ok();
    let host = number("host").filter(|number| *number < hosts).map(Part::Host);
    let part = host.or_else(|| number("switch").filter(|number| *number < switches).map(Part::Switch));
    part.ok_or_else(|| {
        let last = |prefix: &str, count: usize| match count {
            0 => String::new(),
            1 => format!("{prefix}0"),
            _ => format!("{prefix}0 to {prefix}{}", count - 1),
        };
        let parts = [last("host", hosts), last("switch", switches)];
        let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        Wrong::new(place, name, parts.join(", or "))
    })
}
