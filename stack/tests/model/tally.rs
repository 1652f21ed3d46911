//! Statistics of the runs.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

use ferroce::driver::sim;
use ferroce::{Counter, Counters, WcStatus};

use crate::request::{Action, Change, Request};
use crate::schedule::Service;

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) schedules: u64,
    /// Requests that succeeded, or arrived, and their bytes, by verb.
    verbs: BTreeMap<&'static str, [u64; 2]>,
    pub(crate) received: u64,
    through_windows: u64,
    statuses: BTreeMap<String, u64>,
    pub(crate) accidents: u64,
    pub(crate) reconnected: u64,
    pub(crate) drained: u64,
    pub(crate) overflows: u64,
    frames: u64,
    lost: u64,
    duplicated: u64,
    reordered: u64,
    corrupted: u64,
    engine: BTreeMap<&'static str, u64>,
}

/// The engine's reactions.
const COUNTERS: [Counter; 7] = [
    Counter::RetransmittedPkts,
    Counter::DuplicateRequest,
    Counter::OutOfSequence,
    Counter::PacketSeqErr,
    Counter::ImpliedNakSeqErr,
    Counter::LocalAckTimeoutErr,
    Counter::RnrNakRetryErr,
];

impl Tally {
    /// Payload bytes of all requests that succeeded.
    pub(crate) fn bytes(&self) -> u64 {
        self.verbs.values().map(|[_, bytes]| bytes).sum()
    }

    /// Counts a request that succeeded. For an unreliable one that means nothing yet.
    pub(crate) fn count_request(&mut self, request: &Request, is_reliable: bool) {
        if is_reliable {
            self.through_windows += u64::from(request.through_window);
            let verb = match request.action {
                Action::Send { invalidates: Some(_), .. } => "RC SEND with invalidate",
                Action::Send { immediate: Some(_), .. } => "RC SEND with immediate",
                Action::Send { .. } => "RC SEND",
                Action::Write { immediate: Some(_), .. } => "RC WRITE with immediate",
                Action::Write { .. } => "RC WRITE",
                Action::Read { .. } => "RC READ",
                Action::Atomic { change: Change::Add(_), .. } => "RC FETCH_ADD",
                Action::Atomic { change: Change::CompareSwap { .. }, .. } => "RC COMPARE_SWAP",
                Action::AtomicWrite { .. } => "RC ATOMIC_WRITE",
                Action::Flush { .. } => "RC FLUSH",
                Action::LocalInvalidate => "LOCAL_INVALIDATE",
                Action::BindWindow => "BIND_MW",
            };
            self.count(verb, request);
        }
    }

    /// Counts a message that was received.
    pub(crate) fn count_received(&mut self, request: &Request, service: Service) {
        self.received += 1;
        match (service, request.action) {
            (Service::Rc, _) => {}
            (Service::Uc, Action::Send { .. }) => self.count("UC SEND", request),
            (Service::Uc, _) => self.count("UC WRITE with immediate", request),
            (Service::Ud, _) => self.count("UD SEND", request),
        }
    }

    fn count(&mut self, verb: &'static str, request: &Request) {
        let [count, bytes] = self.verbs.entry(verb).or_default();
        *count += 1;
        *bytes += u64::from(request.action.length());
    }

    pub(crate) fn count_status(&mut self, status: WcStatus) {
        *self.statuses.entry(format!("{status:?}")).or_default() += 1;
    }

    pub(crate) fn add_engine(&mut self, counters: &Counters) {
        for counter in COUNTERS {
            *self.engine.entry(counter.name()).or_default() += counters.value(counter);
        }
    }

    pub(crate) fn add_network(&mut self, counters: &sim::Counters) {
        self.frames += counters.offered;
        self.lost += counters.lost;
        self.duplicated += counters.duplicated;
        self.reordered += counters.reordered;
        self.corrupted += counters.corrupted;
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.schedules += 1;
        for (verb, [count, bytes]) in other.verbs {
            let sum = self.verbs.entry(verb).or_default();
            *sum = [sum[0] + count, sum[1] + bytes];
        }
        for (status, count) in other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        for (name, count) in other.engine {
            *self.engine.entry(name).or_default() += count;
        }
        self.received += other.received;
        self.through_windows += other.through_windows;
        self.accidents += other.accidents;
        self.reconnected += other.reconnected;
        self.drained += other.drained;
        self.overflows += other.overflows;
        self.frames += other.frames;
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.reordered += other.reordered;
        self.corrupted += other.corrupted;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (verb, [count, bytes]) in &self.verbs {
            writeln!(f, "{verb:24} {count:10} of {bytes:12} bytes")?;
        }
        writeln!(f, "{:24} {:10}", "messages received", self.received)?;
        for (status, count) in &self.statuses {
            writeln!(f, "{status:24} {count:10}")?;
        }
        let events = [
            ("through windows", self.through_windows),
            ("accidents", self.accidents),
            ("reconnections", self.reconnected),
            ("drained", self.drained),
            ("CQ overflows", self.overflows),
            ("frames", self.frames),
            ("lost", self.lost),
            ("duplicated", self.duplicated),
            ("reordered", self.reordered),
            ("corrupted", self.corrupted),
        ];
        for (name, count) in events.into_iter().chain(self.engine.iter().map(|(n, c)| (*n, *c))) {
            writeln!(f, "{name:24} {count:10}")?;
        }
        Ok(())
    }
}
