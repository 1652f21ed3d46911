//! The cause of failed work: the end that refused it, and what this end's queue pairs and counters show about the
//! cause.

use std::time::Duration;

use ferroce::driver::netlink::Netlink;
use ferroce::{Counter, Event, Mismatch, Nanos, WcOpcode, WcStatus, WorkCompletion};

use crate::endpoint::Endpoint;
use crate::failure::Failure;

impl Endpoint {
    /// The failure for a work completion in error.
    pub(crate) fn failed(&self, wc: &WorkCompletion, work: &str) -> Failure {
        let is_receive = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        let mut reason =
            format!("QP {}: {work} completed with {:?}: {}", wc.qpn, wc.status, wc.status.meaning(wc.opcode));
        reason += &self.evidence();
        match wc.status {
            WcStatus::LocLenErr if is_receive => reason += "; is the size (-s) the same at both ends?",
            WcStatus::RetryExcErr => reason += &self.own_fault().unwrap_or_else(|| self.referral()),
            WcStatus::RemInvReqErr | WcStatus::RemAccessErr | WcStatus::RemOpErr
                if !is_receive && !self.has_mismatch() =>
            {
                reason += "; are operation, direction, size (-s) and path MTU (-m) the same at both ends?";
            }
            _ => {}
        }
        Failure::Run(reason)
    }

    /// The failure for an asynchronous event that ends the work.
    pub(crate) fn struck(&self, event: &Event) -> Failure {
        let what = match event {
            Event::QpReqErr(_) => "a request of the peer is refused here: invalid, or not allowed".to_owned(),
            Event::QpAccessErr(_) => {
                "a request of the peer is refused here: it has no access to the memory that it names; are size (-s), \
                 queue pairs (-q) and direction (-b) the same at both ends?"
                    .to_owned()
            }
            other => format!("asynchronous event {other:?}"),
        };
        Failure::Run(what + &self.evidence())
    }

    /// The errors at this end so far, each after a semicolon; empty without any.
    pub(crate) fn evidence(&self) -> String {
        let mut found: Vec<String> = Vec::new();
        for (_, mismatch) in self.context.mismatches() {
            let clause = format!("{mismatch}: {}", remedy(&mismatch));
            if !found.contains(&clause) {
                found.push(clause);
            }
        }
        let counters = self.context.counters();
        let icrc = counters.value(Counter::RxIcrcEncapsulated);
        let drops = Counter::all().filter(|counter| counter.is_drop() && counters.value(*counter) > 0);
        if icrc > 0 {
            let name = Counter::RxIcrcEncapsulated.name();
            found.push(format!("{icrc} packets dropped because of a wrong ICRC ({name}){}", self.referral()));
        } else if let Some(counter) = drops.max_by_key(|counter| counters.value(*counter)) {
            let count = counters.value(counter);
            let help = counter.help().trim_start_matches("Dropped: ").trim_end_matches('.');
            found.push(format!("{count} packets dropped here ({}: {help})", counter.name()));
        }
        found.iter().map(|clause| format!("; {clause}")).collect()
    }

    /// Whether a packet has shown that the peer's settings differ.
    pub(crate) fn has_mismatch(&self) -> bool {
        self.context.mismatches().next().is_some()
    }

    /// Fails once a packet has shown that the peer uses another transport service: the measurement can't succeed.
    pub(crate) fn check_service(&self) -> Result<(), Failure> {
        if self.context.counters().value(Counter::RxWrongService) == 0 {
            return Ok(());
        }
        let mut mismatches = self.context.mismatches().map(|(_, mismatch)| mismatch);
        match mismatches.find(|mismatch| matches!(mismatch, Mismatch::Service { .. })) {
            Some(mismatch) => Err(Failure::run(format!("{mismatch}: {}", remedy(&mismatch)))),
            None => Ok(()),
        }
    }

    /// Whether the own interface prevents all packets from leaving.
    fn own_fault(&self) -> Option<String> {
        let name = &self.context.port().interface;
        let interface = Netlink::open().and_then(|netlink| netlink.interface(name)).ok()?;
        match (interface.up, interface.carrier) {
            (false, _) => Some(format!("; '{name}' here is down: `ip link set {name} up`")),
            (true, false) => Some(format!("; '{name}' here has no carrier")),
            (true, true) => None,
        }
    }

    /// The command that can examine the path to the peer.
    fn referral(&self) -> String {
        let device = &self.device;
        // A switch in shared memory has no path to examine, and a missing peer has joined another switch.
        if self.switch().is_some() {
            return format!(
                "; has the peer joined '{device}' too, as this user and in this network namespace?"
            );
        }
        let peer = self.peer.map_or("PEER".to_owned(), |peer| peer.to_ip().to_string());
        format!("; `ferroce doctor -d {device} {peer}` checks the path")
    }
}

/// Received and expected messages, if both ends have to know their number.
pub(crate) fn of_messages(come: u32, wanted: u32) -> String {
    format!("after {come} of {wanted} messages; are count (-C) and size (-S) the same at both ends?")
}

/// The time limit of an end that waits for messages and does not know whether the peer still sends.
pub(crate) struct Patience {
    come: u32,
    since: Nanos,
}

impl Patience {
    /// The longest time without a message.
    const LONGEST: Duration = Duration::from_secs(30);

    pub(crate) fn new(end: &mut Endpoint) -> Patience {
        Patience { come: 0, since: end.now() }
    }

    /// Fails when the number has not increased for too long. `detail` describes the messages.
    pub(crate) fn check(
        &mut self,
        end: &mut Endpoint,
        come: u32,
        detail: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        let now = end.now();
        if come != self.come {
            *self = Patience { come, since: now };
        }
        if now.since(self.since) <= Patience::LONGEST {
            return Ok(());
        }
        let (seconds, detail, evidence) = (Patience::LONGEST.as_secs(), detail(), end.evidence());
        // The evidence for damaged packets refers to it already.
        let referral = if evidence.contains("ferroce doctor") { String::new() } else { end.referral() };
        Err(Failure::run(format!("the peer has sent nothing for {seconds} s, {detail}{evidence}{referral}")))
    }
}

fn remedy(mismatch: &Mismatch) -> &'static str {
    match mismatch {
        Mismatch::Service { .. } => {
            "both ends need the same transport service (-c in perf and perftest, -t in pingpong)"
        }
        Mismatch::PathMtu { .. } => "both ends need the same path MTU (-m)",
        Mismatch::Access { .. } => "start both ends for the same operation, with -b at both or at none",
        _ => "both ends need the same settings",
    }
}
