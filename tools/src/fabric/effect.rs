//! What a setting needs to change anything.

use ferroce::CongestionControl;

use super::description::{Control, Description, SwitchSection};
use super::memory::Memory;
use super::options::{self, Settings};
use super::wrong::Wrong;

/// A run, by what was asked for and what came of it.
pub(crate) struct Effect<'a> {
    pub(crate) settings: &'a Settings,
    /// With all that follows from the rest.
    pub(crate) description: &'a Description,
    pub(crate) memory: &'a Memory,
}

/// Refuses an option that changes nothing in any of the runs that it was given for.
pub(crate) fn check(runs: &[Effect<'_>]) -> Result<(), Wrong> {
    if let Some(run) = runs.first().filter(|run| run.settings.kmin.is_some())
        && runs.iter().all(|run| run.marks_nothing())
    {
        let right =
            format!("less than what a port can queue, {}: nothing is marked otherwise", run.memory.queue);
        return Err(Wrong::new("kmin", run.settings.kmin.unwrap_or_default(), right));
    }
    let given: Vec<Vec<(String, String)>> = runs.iter().map(|run| options::given(run.settings)).collect();
    for (option, value) in given.iter().flatten() {
        let has = runs.iter().zip(&given).filter(|(_, given)| given.iter().any(|(name, _)| name == option));
        let idle: Option<Vec<String>> = has.map(|(run, _)| run.idle(option)).collect();
        if let Some(why) = idle.and_then(|why| why.into_iter().next()) {
            return Err(Wrong::new(option, value, format!("left out: it changes nothing, {why}")));
        }
    }
    Ok(())
}

/// What is not as it seems, in all of the runs.
pub(crate) fn notes(runs: &[Effect<'_>]) -> Vec<String> {
    let mut notes: Vec<Vec<String>> = runs.iter().map(Effect::notes).collect();
    let Some(mut common) = notes.pop() else { return Vec::new() };
    common.retain(|note| notes.iter().all(|others| others.contains(note)));
    common
}

impl Effect<'_> {
    fn is_controlled(&self) -> bool {
        self.description.control.congestion != Control::Given(CongestionControl::Off)
    }

    /// Whether no queue can be longer than Kmin, which would be looked at otherwise.
    fn marks_nothing(&self) -> bool {
        let SwitchSection { ecn, kmin, .. } = self.description.switches;
        ecn && self.is_controlled() && kmin.is_some_and(|kmin| kmin >= self.memory.queue)
    }

    /// Why an option changes nothing, if it does not.
    fn idle(&self, option: &str) -> Option<String> {
        let Description { topology, switches, .. } = self.description;
        let is_of_marking = ["kmin", "kmax", "pmax", "marking"].contains(&option);
        let is_ecn = is_of_marking || option == "ecn" && switches.ecn;
        let is_of_pfc = ["alpha", "xoff", "xon-offset", "headroom", "watchdog"].contains(&option);
        let why = match option {
            "cnp-interval" if !self.is_controlled() => "as congestion control is off".to_owned(),
            _ if is_ecn && !self.is_controlled() => {
                "as congestion control is off and frames take no marks".into()
            }
            _ if is_of_marking && !switches.ecn => "as ECN is off".into(),
            _ if is_of_marking && self.marks_nothing() => {
                format!("as Kmin is not less than what a port can queue, {}", self.memory.queue)
            }
            _ if is_of_pfc && !switches.pfc => "as PFC is off".into(),
            "alpha" if switches.xoff.is_some() => "as xoff is in its place".into(),
            "lossy-alpha" if switches.pfc => "as PFC is on".into(),
            "watchdog" if !topology.links_switches() => {
                "as it is for ports of switches that are paused, and no two switches are linked".into()
            }
            "uplink-rate" if !topology.has_uplinks() => {
                "as no link between switches has this rate in this topology".into()
            }
            _ => return None,
        };
        Some(why)
    }

    fn notes(&self) -> Vec<String> {
        let Effect { settings, description: Description { links, switches, control, .. }, memory } = self;
        let mut notes = Vec::new();
        if let (true, true, Some(kmin), Some(kmax)) =
            (switches.ecn, self.is_controlled(), switches.kmin, switches.kmax)
        {
            let (queue, under_way) = (memory.queue, memory.under_way);
            if kmin >= queue {
                notes.push(format!(
                    "nothing is marked: Kmin, {kmin}, is not less than what a port can queue, {queue}"
                ));
            } else if kmin >= under_way {
                notes.push(format!(
                    "nothing is marked: Kmin, {kmin}, is not less than the windows of all queue pairs, {under_way}"
                ));
            } else if kmax >= queue {
                notes.push(format!(
                    "Pmax is never reached: Kmax, {kmax}, is not less than what a port can queue, {queue}"
                ));
            }
        }
        // As options they are refused; a file may have them all the same.
        for (setting, is_in_file) in [
            ("uplink-rate", links.uplink_rate.is_some()),
            ("xoff", switches.xoff.is_some()),
            ("headroom", switches.headroom.is_some()),
            ("watchdog", switches.watchdog.is_some()),
        ] {
            let idle = self.idle(setting).filter(|_| is_in_file);
            notes.extend(idle.map(|why| format!("{setting} changes nothing, {why}")));
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
}
