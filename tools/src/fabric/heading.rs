//! The settings of a run, as text.

use std::fmt;
use std::time::Duration;

use ferroce::CongestionControl;

use super::description::{Control, Description, FailureEntry, MarkingAt, Repeat, Shape};
use super::memory::Memory;
use crate::quantity::Time;

/// With all resolved values.
pub(crate) struct Heading<'a>(pub(crate) &'a Description, pub(crate) &'a Memory);

impl fmt::Display for Heading<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Heading(description, memory) = self;
        let Description { time, topology, links, switches, control, failure, .. } = description;
        write!(f, "fabric    {topology}; links {}, {}", links.rate, links.delay)?;
        if let Some(rate) = links.uplink_rate {
            write!(f, "; between switches {rate}")?;
        }
        if links.loss > 0.0 {
            write!(f, "; loss {}", links.loss)?;
        }
        write!(f, "\nswitches  buffer {}{memory}; ECN ", switches.buffer)?;
        match (switches.ecn, switches.kmin, switches.kmax) {
            (true, Some(kmin), Some(kmax)) => {
                let at = if switches.marking == MarkingAt::Enqueue { "enqueue" } else { "dequeue" };
                write!(f, "Kmin {kmin}, Kmax {kmax}, Pmax {} at {at}", switches.pmax)?;
            }
            _ => write!(f, "off")?,
        }
        match (switches.pfc, switches.xoff) {
            (true, Some(xoff)) => write!(f, "; PFC from {xoff} of a port on")?,
            (true, None) => write!(f, "; PFC from {} of the free buffer on", switches.alpha)?,
            (false, _) => write!(f, "; no PFC, a queue may use {} of the free buffer", switches.lossy_alpha)?,
        }
        let repeat = if control.repeat == Repeat::Selective { "selective" } else { "go-back-n" };
        let timeout = timeout(control.ack_timeout.unwrap_or_default());
        let (mtu, window, dscp, poll) =
            (control.path_mtu.bytes(), control.window, control.dscp, control.poll);
        let cnps = match control.cnp_interval {
            Some(time) if control.congestion != Control::Given(CongestionControl::Off) => {
                format!(" with a CNP each {time} at most")
            }
            _ => String::new(),
        };
        write!(f, "\nhosts     {}{cnps}, repeat {repeat}, path MTU {mtu}, ", control.congestion)?;
        write!(f, "window {window} packets, ")?;
        write!(f, "ACK timeout {timeout}, DSCP {dscp}, a poll each {poll}")?;
        match description.allreduce {
            Some(_) => write!(f, "\ntime      at most {} for an all-reduce", time.limit)?,
            None => write!(f, "\ntime      at most {}, samples each {}", time.limit, time.sample)?,
        }
        if time.warm_up > Time::default() {
            let from = time.warm_up;
            write!(f, "; rates of endless flows, means and p99 of queues from {from} on, the rest from 0")?;
        }
        for entry in failure {
            let FailureEntry { at, until, .. } = entry;
            let what = entry.what();
            let until = until.map_or("the end".to_owned(), |until| until.to_string());
            write!(
                f,
                "\nfailure   {what}, {at} to {until}; new paths {} after each change",
                switches.convergence
            )?;
        }
        Ok(())
    }
}

/// The ACK timeout of this exponent.
pub(super) fn timeout(exponent: u8) -> Time {
    let seconds = 4.096e-6 * 2_f64.powi(exponent.into());
    Time(Duration::from_micros((seconds * 1e6).round() as u64))
}

impl FailureEntry {
    /// The part that goes down.
    pub(super) fn what(&self) -> String {
        match (&self.link, &self.switch) {
            (Some([a, b]), _) => format!("{a} to {b}"),
            (None, switch) => switch.clone().unwrap_or_default(),
        }
    }

    /// The host, if the failure is of its only link.
    pub(super) fn host(&self) -> Option<&String> {
        self.link.iter().flatten().find(|end| end.starts_with("host"))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Star { hosts } => write!(f, "{hosts} hosts around one switch"),
            Shape::Dumbbell { left, right } => write!(f, "two switches with {left} and {right} hosts"),
            Shape::LeafSpine { leaves, hosts_per_leaf, spines } => {
                write!(f, "{leaves} leaves with {hosts_per_leaf} hosts each, {spines} spines")
            }
            Shape::FatTree { k } => write!(f, "fat tree of {k} ports, {} hosts", self.hosts()),
            Shape::Custom { hosts, switches, links } => {
                write!(f, "{hosts} hosts and {switches} switches with {} links", links.len())
            }
        }
    }
}
