//! The counters of one message size. A run that ends early reports what was counted until then.

use std::time::Duration;

use ferroce::{Nanos, PathMtu};
use hdrhistogram::Histogram;

use super::pattern::Origin;
use super::plan::{Mode, Operation, Plan, Service};
use super::report::{Counted, Latency, Measurement};
use crate::failure::Failure;

/// The results of a run so far.
#[derive(Debug)]
pub(super) struct Measured {
    /// The server's choice.
    pub(super) path_mtu: PathMtu,
    pub(super) results: Vec<Measurement>,
}

impl Measured {
    pub(super) fn nothing() -> Measured {
        Measured { path_mtu: PathMtu::Mtu256, results: Vec::new() }
    }
}

/// The counters of one end while messages of one size are transferred, in laps.
pub(super) struct Account {
    size: u32,
    pub(super) messages: u64,
    pub(super) lost: u64,
    /// The receiver has reported the lost messages of the last lap.
    pub(super) is_told: bool,
    pub(super) verified: u64,
    pub(super) time: Duration,
    pub(super) latencies: Option<Histogram<u64>>,
    /// The start of the current lap.
    lap: Option<Nanos>,
}

impl Account {
    pub(super) fn new(plan: &Plan, size: u32) -> Result<Account, Failure> {
        let latencies = (plan.mode == Mode::Lat).then(histogram).transpose()?;
        let (messages, lost, verified) = (0, 0, 0);
        let time = Duration::ZERO;
        Ok(Account { size, messages, lost, is_told: false, verified, time, latencies, lap: None })
    }

    pub(super) fn begin_lap(&mut self, now: Nanos) {
        self.lap = Some(now);
        self.is_told = false;
    }

    /// Ends a lap with this many messages.
    pub(super) fn end_lap(&mut self, messages: u64, time: Duration) {
        self.messages += messages;
        self.time += time;
        self.lap = None;
    }

    /// Ends the current lap early, if there is one.
    pub(super) fn cut_lap(&mut self, messages: u64, now: Nanos) {
        if let Some(began) = self.lap {
            self.end_lap(messages, now.since(began));
        }
    }

    /// The measurement. The server of a latency test measures no times.
    pub(super) fn measurement(self, plan: &Plan, role: Origin, path_mtu: PathMtu) -> Measurement {
        // In a latency test, each message was answered.
        let is_told = self.is_told || plan.mode == Mode::Lat;
        let counted = match plan.operation {
            // The server counts messages that arrive.
            _ if !plan.is_reliable() && !is_told && role == Origin::Client => Counted::Sent,
            Operation::Write if plan.service == Service::Uc && self.size > path_mtu.bytes() => Counted::Begun,
            _ => Counted::Arrived,
        };
        let lost = (!plan.is_reliable() && is_told).then_some(self.lost);
        let timed = self.latencies.filter(|histogram| !histogram.is_empty());
        let latency = timed.map(|histogram| Latency::new(&histogram, plan.echoes()));
        let verified = plan.check.then_some(self.verified);
        Measurement::new(self.size, self.messages, self.time, verified, (counted, lost), latency)
    }
}

/// For nanoseconds up to a minute, with three digits.
fn histogram() -> Result<Histogram<u64>, Failure> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3)
        .map_err(|error| Failure::run(format!("histogram: {error}")))
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::plan;
    use super::*;

    /// The JSON for 200 messages of 64 KiB with 2 losses, as far as the receiver reported them.
    fn said(operation: Operation, service: Service, role: Origin, is_told: bool) -> serde_json::Value {
        let plan = Plan { operation, service, ..plan(1, false) };
        let mut account = Account::new(&plan, 65536).unwrap();
        account.begin_lap(Nanos::ZERO);
        account.end_lap(200, Duration::from_secs(1));
        (account.is_told, account.lost) = (is_told, if is_told { 2 } else { 0 });
        serde_json::to_value(account.measurement(&plan, role, PathMtu::Mtu4096)).unwrap()
    }

    #[test]
    fn no_more_is_said_than_is_known() {
        use Operation::{Send, Write};
        use Origin::{Client, Server};
        for (operation, service, role, is_told, counted, messages, lost) in [
            (Send, Service::Rc, Client, true, "arrived", 200, [None, None]),
            (Send, Service::Ud, Client, true, "arrived", 198, [Some(2), None]),
            (Send, Service::Ud, Client, false, "sent", 200, [None, None]),
            (Send, Service::Ud, Server, false, "arrived", 200, [None, None]),
            (Send, Service::Uc, Client, true, "arrived", 198, [Some(2), None]),
            (Write, Service::Uc, Client, true, "begun", 198, [None, Some(2)]),
            (Write, Service::Uc, Client, false, "sent", 200, [None, None]),
        ] {
            let [exactly, at_least] = lost.map(|lost: Option<u64>| serde_json::Value::from(lost));
            let said = said(operation, service, role, is_told);
            assert_eq!((&said["counted"], &said["messages"]), (&counted.into(), &messages.into()), "{said}");
            let found = (&said["lost_messages"], &said["lost_messages_at_least"]);
            assert_eq!(found, (&exactly, &at_least), "{said}");
        }
    }
}
