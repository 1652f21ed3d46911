//! The condition for each option to have any effect, given the buffer memory of the switches (`memory.rs`).
//!
//! An option is checked against all runs of a comparison: it is accepted if it has an effect in one of them.

use std::collections::BTreeMap;
use std::ops::Range;

use ferroce::CongestionControl;

use super::description::{Control, Description, FailureEntry, SwitchSection};
use super::heading::timeout;
use super::memory::Memory;
use super::options::{self, Settings};
use super::traffic::{Hosts, Pattern};
use super::wrong::Wrong;
use crate::quantity::Time;

/// A run's settings, and what follows from them.
pub(crate) struct Effect<'a> {
    pub(crate) settings: &'a Settings,
    /// With all resolved values.
    pub(crate) description: &'a Description,
    pub(crate) memory: &'a Memory,
}

/// Rejects an option without effect in any of the runs that it was given for.
pub(crate) fn check(runs: &[Effect<'_>]) -> Result<(), Wrong> {
    if let Some(run) = runs.first().filter(|run| run.settings.kmin.is_some())
        && runs.iter().all(|run| run.marks_nothing())
    {
        let right = format!(
            "less than the longest queue of a port, {}: otherwise no packet is marked",
            run.memory.queue
        );
        return Err(Wrong::new("kmin", run.settings.kmin.unwrap_or_default(), right));
    }
    let given: Vec<Vec<(String, String)>> = runs.iter().map(|run| options::given(run.settings)).collect();
    for (option, value) in given.iter().flatten() {
        let has = runs.iter().zip(&given).filter(|(_, given)| given.iter().any(|(name, _)| name == option));
        let idle: Option<Vec<String>> = has.map(|(run, _)| run.idle(option)).collect();
        if let Some(why) = idle.and_then(|why| why.into_iter().next()) {
            return Err(Wrong::new(option, value, format!("left out: it has no effect, {why}")));
        }
    }
    Ok(())
}

/// Notes on misleading settings, if they apply to all runs.
pub(crate) fn notes(runs: &[Effect<'_>]) -> Vec<String> {
    let mut notes: Vec<Vec<String>> = runs.iter().map(Effect::notes).collect();
    let Some(mut common) = notes.pop() else { return Vec::new() };
    common.retain(|note| notes.iter().all(|others| others.contains(note)));
    let controls = || runs.iter().map(|run| run.description.control.congestion);
    if runs.iter().all(|run| !run.description.switches.ecn)
        && controls().any(|one| Some(one) != controls().next())
    {
        let note =
            "the congestion controls do not differ: ECN is off, no frame is marked, and no CNP is sent";
        common.push(note.to_owned());
    }
    common
}

impl Effect<'_> {
    fn is_controlled(&self) -> bool {
        self.description.control.congestion != Control::Given(CongestionControl::Off)
    }

    /// Whether no queue can exceed Kmin, although marks would have an effect.
    fn marks_nothing(&self) -> bool {
        let SwitchSection { ecn, kmin, .. } = self.description.switches;
        ecn && self.is_controlled() && kmin.is_some_and(|kmin| kmin >= self.memory.queue)
    }

    /// The reason that an option has no effect, if it has none.
    fn idle(&self, option: &str) -> Option<String> {
        let Description { time, topology, switches, .. } = self.description;
        let is_of_marking = ["kmin", "kmax", "pmax", "marking"].contains(&option);
        let is_ecn = is_of_marking || option == "ecn" && switches.ecn;
        let is_of_pfc = ["alpha", "xoff", "xon-offset", "headroom", "watchdog"].contains(&option);
        let why = match option {
            "cnp-interval" if !self.is_controlled() => "because congestion control is off".to_owned(),
            _ if is_ecn && !self.is_controlled() => {
                "because congestion control is off and frames can't be marked".into()
            }
            _ if is_of_marking && !switches.ecn => "because ECN is off".into(),
            _ if is_of_marking && self.marks_nothing() => {
                format!("because Kmin is not less than the longest queue of a port, {}", self.memory.queue)
            }
            _ if is_of_pfc && !switches.pfc => "because PFC is off".into(),
            "alpha" if switches.xoff.is_some() => "because xoff is set instead".into(),
            "lossy-alpha" if switches.pfc => "because PFC is on".into(),
            "watchdog" if switches.watchdog.is_some_and(|watchdog| watchdog >= time.limit) => {
                format!("because the run ends before, at {}", time.limit)
            }
            "watchdog" if !topology.links_switches() => {
                "because it is for ports of switches that are paused, and no two switches are linked".into()
            }
            "uplink-rate" if !topology.has_uplinks() => {
                "because no link between switches has this rate in this topology".into()
            }
            _ => return None,
        };
        Some(why)
    }

    fn notes(&self) -> Vec<String> {
        let Effect { settings, description: Description { links, switches, control, traffic, .. }, memory } =
            self;
        let mut notes = Vec::new();
        if let (true, true, Some(kmin), Some(kmax)) =
            (switches.ecn, self.is_controlled(), switches.kmin, switches.kmax)
        {
            let (queue, under_way) = (memory.queue, memory.under_way);
            if kmin >= queue {
                notes.push(format!(
                    "no packet is marked: Kmin, {kmin}, is not less than the longest queue of a port, {queue}"
                ));
            } else if kmin >= under_way {
                notes.push(format!(
                    "no packet is marked: Kmin, {kmin}, is not less than the windows of all queue pairs, {under_way}"
                ));
            } else if kmax >= queue {
                notes.push(format!(
                    "Pmax is never reached: Kmax, {kmax}, is not less than the longest queue of a port, {queue}"
                ));
            }
        }
        if let (true, true, true, Some(kmin), Some(xoff)) =
            (switches.pfc, switches.ecn, self.is_controlled(), switches.kmin, switches.xoff)
            && xoff < kmin
        {
            notes.push(format!(
                "ports pause before queues are marked: xoff, {xoff} of one port, is less than Kmin, {kmin}; ECN \
                 should act first"
            ));
        }
        if let Some(headroom) = switches.headroom.filter(|headroom| switches.pfc && *headroom < memory.needed)
        {
            notes.push(format!(
                "frames may be dropped in spite of PFC: headroom, {headroom}, is less than the {} that a link needs \
                 for frames that arrive after a pause has begun",
                memory.needed
            ));
        }
        // Given as options, these are errors; in a file, they are noted.
        for (setting, is_in_file) in [
            ("uplink-rate", links.uplink_rate.is_some()),
            ("xoff", switches.xoff.is_some()),
            ("headroom", switches.headroom.is_some()),
            ("watchdog", switches.watchdog.is_some()),
        ] {
            let idle = self.idle(setting).filter(|_| is_in_file);
            notes.extend(idle.map(|why| format!("{setting} has no effect, {why}")));
        }
        notes.extend(self.note_of_alpha());
        notes.extend(self.notes_of_failures());
        if !switches.ecn && self.is_controlled() {
            notes.push(
                "congestion control is not notified: ECN is off, no frame is marked, and no CNP is sent"
                    .into(),
            );
        }
        for traffic in traffic {
            let Some(to) = traffic.to else { continue };
            let is_among = |hosts: &Hosts| hosts.0.iter().any(|range| range.contains(&to));
            if traffic.hosts.as_ref().is_some_and(is_among) {
                notes.push(format!(
                    "host{to} is among the hosts of '{}' and receives; it does not send to itself",
                    traffic.name()
                ));
            }
        }
        if settings.window.is_some() && memory.window > memory.posted {
            let most = memory.posted.0 / u64::from(control.path_mtu.bytes());
            notes.push(format!(
                "the window is {most} packets in effect: a queue pair posts {} at a time",
                memory.posted
            ));
        }
        notes
    }

    /// If alpha decays faster than packets can raise it again, queues stay long.
    fn note_of_alpha(&self) -> Option<String> {
        const KEPT: f64 = 0.95;
        let Description { topology, links, switches, control, traffic, .. } = self.description;
        let CongestionControl::Dcqcn(dcqcn) = control.congestion.at(links.rate) else { return None };
        let incasts =
            traffic.iter().filter(|traffic| traffic.pattern == Pattern::Incast && traffic.load.is_none());
        let mut flows: BTreeMap<usize, usize> = BTreeMap::new();
        for traffic in incasts {
            let to = traffic.to.unwrap_or_default();
            let others = |hosts: Range<usize>| hosts.len() - usize::from(hosts.contains(&to));
            let senders = match &traffic.hosts {
                Some(hosts) => hosts.0.iter().cloned().map(others).sum(),
                None => others(0..topology.hosts()),
            };
            *flows.entry(to).or_default() += senders;
        }
        let most = flows.into_values().max()?;
        let frame = 8.0 * f64::from(control.path_mtu.bytes() + 82);
        let apart = 1e6 * most as f64 * frame / links.rate.0 as f64;
        let period = f64::from(dcqcn.dce_tcp_rtt);
        let kept = (f64::from(dcqcn.dce_tcp_g) / 1024.0).powf(apart / period);
        (switches.ecn && kept < KEPT).then(|| {
            format!(
                "{most} flows to one host: the packets of one are {apart:.0}us apart, alpha falls each {period}us, and cuts become too small to keep queues short; mlx25 is for so many flows (docs/congestion.md, Parameters)"
            )
        })
    }

    /// Effects of failures that a run does not show.
    fn notes_of_failures(&self) -> Vec<String> {
        let Description { time, switches, control, failure, .. } = self.description;
        let (convergence, limit) = (switches.convergence, time.limit);
        let mut notes = Vec::new();
        if failure.is_empty() && convergence != SwitchSection::default().convergence {
            notes.push(format!("convergence = {convergence} has no effect: there is no [[failure]]"));
        }
        let timeout = timeout(control.ack_timeout.unwrap_or_default());
        for entry in failure {
            let FailureEntry { at, until, .. } = entry;
            let what = entry.what();
            let lasts = Time(until.unwrap_or(limit).0.saturating_sub(at.0));
            match until {
                _ if entry.host().is_some() => {}
                Some(until) if convergence >= lasts => notes.push(format!(
                    "no switch uses another path while {what} is down: it is up again at {until}, after {lasts}, and \
                     convergence takes {convergence}"
                )),
                _ if Time(at.0 + convergence.0) >= limit => notes.push(format!(
                    "no switch uses another path after the failure of {what}: convergence takes {convergence}, and \
                     the run ends at {limit}"
                )),
                _ => {}
            }
            if let (Some(host), None) = (entry.host(), until) {
                notes.push(format!("{host} has no other link: it receives and sends nothing after {at}"));
            }
            if Time(at.0 + timeout.0) >= limit {
                notes.push(format!(
                    "a queue pair that the failure of {what} interrupts makes no progress until the end: the ACK \
                     timeout is {timeout}, and the run ends at {limit}; with a lower ack-timeout it retransmits earlier"
                ));
            }
        }
        notes
    }
}
