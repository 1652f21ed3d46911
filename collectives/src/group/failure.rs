//! The failure of a communicator when a rank fails, and its detection.
//!
//! A waiting rank sends pings, so the death of a rank is reported within the retry budget.

use super::*;

impl Group {
    /// Why it has failed.
    pub(crate) fn failure(&self) -> Option<&Cause> {
        self.failed.as_ref()
    }

    /// The error for a call of the program.
    pub(crate) fn say_failure(&mut self, operation: String) -> Option<Error> {
        let cause = self.failed.clone()?;
        self.has_said_failure = true;
        Some(Error::Failed { rank: self.rank, operation, cause })
    }

    /// The failure, if it was not yet returned to the program.
    pub(crate) fn last_word(&mut self) -> Option<Error> {
        if self.has_said_failure { None } else { self.say_failure("leaving".to_owned()) }
    }

    pub(super) fn tell_failure(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        let Some(cause) = &self.failed else { return Ok(()) };
        let (origin, reason) = match cause {
            Cause::Aborted { origin, reason, .. } => (*origin, reason.clone()),
            cause => (self.rank, cause.to_string()),
        };
        let lost = cause.lost();
        self.tell(process, peer, Message::Abort { origin, lost, reason })
    }

    /// Fails the communicator, and notifies the others.
    pub(crate) fn fail(&mut self, cause: Cause) {
        if self.failed.is_some() {
            return;
        }
        warn!(rank = self.rank, "communicator {:016x} has failed: {cause}", self.id);
        self.log.failed(&cause.to_string());
        self.is_to_be_recorded = true;
        self.failed = Some(cause);
        if let Ok(mapped) = &mut self.mapped {
            mapped.fail();
        }
        self.telling = Some((None, Nanos::ZERO));
        (self.next_look, self.device_due) = (Nanos::ZERO, Nanos::NEVER);
    }

    /// This rank can't continue after an error.
    pub(crate) fn refused(&mut self, error: &Error) {
        self.fail(Cause::of(self.rank, error));
    }

    /// Whether the others still have to be notified of the failure.
    pub(crate) fn is_telling(&self) -> bool {
        self.telling.is_some()
    }

    /// When it must be polled even if nothing arrives.
    pub(crate) fn next_look(&self) -> Nanos {
        let is_waiting = !self.executions.is_empty()
            || self.telling.is_some()
            || self.shrink.is_some()
            || self.shrinking.is_some();
        let is_working = self.mapped.as_ref().is_ok_and(Mapped::is_working);
        match ((self.is_dirty || is_working) && self.failed.is_none(), is_waiting) {
            (true, _) => Nanos::ZERO,
            (false, true) => self.next_look.min(self.device_due),
            (false, false) => Nanos::NEVER,
        }
    }

    /// Whether this rank's device has failed a copy: then errors of connections are attributed to it.
    pub(super) fn own_device_failed(&self, ports: &Ports, how: &dyn std::fmt::Display) -> Option<Cause> {
        let problem = format!("a copy between its memory and the host's, as the log says ({how})");
        (device_errors(ports) > self.device_errors).then_some(Cause::Device { rank: self.rank, problem })
    }

    /// The rank whose device has failed, if that is why a connection to a peer has failed.
    pub(super) fn device_failed(&self, ports: &Ports, peer: u32, status: WcStatus) -> Option<Cause> {
        let how = || format!("the connection to rank {peer} failed with {status:?}");
        match status {
            // This end's device: a failed read or write.
            WcStatus::FatalErr | WcStatus::WrFlushErr => self.own_device_failed(ports, &how()),
            // A rank without a device does not return this error.
            WcStatus::RemOpErr if self.cards[peer as usize].device.get() != 0 => Some(Cause::Device {
                rank: peer,
                problem: format!("a copy between its memory and the host's, as its log says ({})", how()),
            }),
            _ => None,
        }
    }

    /// The cause of a failed connection to a peer, if no device has failed.
    pub(super) fn why(&self, peer: u32, status: WcStatus) -> Cause {
        match status {
            // The peer has reported it, or an event contains the reason.
            WcStatus::WrFlushErr => {
                Cause::Lost { peer, how: "the connection to it was given up with WrFlushErr".to_owned() }
            }
            WcStatus::RetryExcErr | WcStatus::RnrRetryExcErr => {
                let how = format!(
                    "the connection to it failed with {status:?}; it has ended, or has not polled for {:?} (Options::ack_timeout and \
                     retry_count)",
                    self.options.retry_budget()
                );
                Cause::Lost { peer, how }
            }
            WcStatus::RemInvReqErr | WcStatus::RemAccessErr | WcStatus::RemOpErr | WcStatus::BadRespErr => {
                Cause::Protocol { peer, problem: format!("the connection to it failed with {status:?}") }
            }
            // This rank's own port or memory.
            _ => {
                Cause::Local { problem: format!("the connection to rank {peer} failed here with {status:?}") }
            }
        }
    }

    /// Periodic work: hellos, pings, aborts.
    pub(super) fn look(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        let now = process.now;
        self.next_look = now + self.options.probe_interval;
        if self.shrink.is_some() || self.shrinking.is_some() {
            return self.agree(process);
        }
        if let Some((until, next)) = self.telling {
            return self.tell_all(process, until, next);
        }
        for index in 0..self.linked.len() {
            let peer = self.linked[index];
            let Some(channel) = &self.peers[peer as usize].channel else { continue };
            let (is_open, rails) = (channel.is_open(), channel.paths().len());
            if !is_open {
                self.next_look = self.next_look.min(now + self.again());
            }
            for rail in 0..rails {
                let Some(channel) = &self.peers[peer as usize].channel else { break };
                let path = &channel.paths()[rail];
                if path.is_greeting() && now >= path.next_hello {
                    self.greet(process, peer, rail)?;
                }
            }
        }
        if self.cqs.len() > 1 {
            // To detect a rail that delivers nothing.
            self.next_look = self.next_look.min(now + self.options.retry_budget() / 16);
        }
        if self.failed.is_none() {
            self.ask(process)?;
        }
        self.take_events(process)
    }

    /// Pings ranks for which an operation has waited for long.
    pub(super) fn ask(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        let now = process.now;
        let interval = self.options.probe_interval;
        // The longest silence of a rank, from the last progress on.
        let patience = self.options.retry_budget().saturating_sub(interval).max(interval);
        let waiting = self
            .executions
            .iter()
            .flatten()
            .find(|execution| execution.moved.is_some_and(|moved| now.since(moved) >= interval));
        let Some(execution) = waiting else {
            let first = self.executions.iter().flatten().filter_map(|execution| execution.moved).min();
            self.next_look = first.map_or(self.next_look, |moved| self.next_look.min(moved + interval));
            return Ok(());
        };
        let waited = now.since(execution.moved.unwrap_or(now));
        let mut peers: Vec<u32> = match &self.mapped {
            Ok(mapped) if !execution.has_steps() => mapped.waits_for().into_iter().collect(),
            // Everything after it depends on the device: no other rank need be pinged.
            _ if execution.is_on_device() => vec![self.rank],
            _ => execution.waits_for().collect(),
        };
        peers.sort_unstable();
        peers.dedup();
        let record = match &self.mapped {
            Ok(mapped) if !execution.has_steps() => mapped.record(),
            _ => Some(execution.record),
        };
        record.iter().for_each(|record| self.log.waits(*record, &peers));
        let call = execution.call;
        if !execution.has_steps()
            && let Some((peer, theirs)) =
                peers.iter().find_map(|peer| Some((*peer, self.went_on(*peer, call)?)))
        {
            let ours = call.to_string();
            self.fail(Cause::Mismatch { peer, ours, theirs: theirs.to_string() });
            return Ok(());
        }
        // An operation may wait for its turn as long as others make progress.
        let newest = self.executions.iter().flatten().filter_map(|execution| execution.moved).max();
        let is_on_device = execution.is_on_device();
        // A rank that knows the reason reports it before the ranks that wait for it give up.
        let limit = self.options.stall_timeout * if is_on_device { 7 } else { 8 } / 8;
        if newest.is_some_and(|moved| now.since(moved) >= limit) {
            if is_on_device {
                let problem = format!("none of its copies and reductions has ended for {waited:?}");
                self.fail(Cause::Device { rank: self.rank, problem });
                return Ok(());
            }
            let (steps, done) = execution.progress();
            let waits_for = self.waits_for(&peers, call.number, (steps, done));
            self.fail(Cause::Stalled { waited, waits_for });
            return Ok(());
        }
        peers.retain(|peer| *peer != self.rank);
        for number in peers {
            let peer = &mut self.peers[number as usize];
            if let Some(since) = peer.silent
                && now.since(since) >= patience
            {
                let how = format!(
                    "no answer for {:?}; it has ended, or has not polled (Options::ack_timeout and retry_count)",
                    waited
                );
                self.fail(Cause::Lost { peer: number, how });
                return Ok(());
            }
            if now.since(peer.pinged) >= interval {
                peer.pinged = now;
                peer.silent.get_or_insert(now);
                self.tell(process, number, Message::Ping { call: call.number })?;
            }
            if let Some(since) = self.peers[number as usize].silent {
                self.next_look = self.next_look.min(since + patience);
            }
        }
        Ok(())
    }

    /// The call that a peer has made instead of an operation on mapped memory for which this rank waits, as far as packets
    /// report it.
    fn went_on(&self, peer: u32, call: Call) -> Option<Call> {
        let peer = &self.peers[peer as usize];
        let has_not_called =
            peer.calls.is_some_and(|calls| calls <= call.number) && call.number & Call::OWN == 0;
        let theirs = peer.channel.as_ref()?.arrival()?.call;
        let is_begun =
            self.executions.iter().flatten().any(|execution| execution.call.number == theirs.number);
        (has_not_called && !is_begun && theirs.number & Call::OF_TWO == 0).then_some(theirs)
    }

    /// The ranks for which an operation waits, and what they have called, in words.
    pub(super) fn waits_for(&self, peers: &[u32], number: u32, (steps, done): (usize, usize)) -> String {
        let of = |peer: &u32| match self.peers[*peer as usize].calls {
            Some(calls) if number & (Call::OF_TWO | Call::OWN) == 0 && calls <= number => {
                format!("rank {peer}, which has made {calls} calls, but not this one")
            }
            _ => format!("rank {peer}"),
        };
        let peers: Vec<String> = peers.iter().map(of).collect();
        format!("it has done {done} of {steps} steps and waits for {}", peers.join(", "))
    }

    pub(super) fn tell_all(
        &mut self,
        process: &mut Process<'_>,
        until: Option<Nanos>,
        next: Nanos,
    ) -> Result<(), Error> {
        let now = process.now;
        // From now on: a failure between two polls may have occurred at any time since the first.
        let until = until.unwrap_or(now + TELL);
        let gone = self.failed.as_ref().and_then(Cause::lost);
        let others = (0..self.size()).filter(|peer| *peer != self.rank);
        let missing: Vec<u32> = others.filter(|peer| !self.peers[*peer as usize].knows_abort).collect();
        if missing.is_empty() || now >= until {
            self.telling = None;
            return Ok(());
        }
        if now >= next {
            for peer in &missing {
                self.tell_failure(process, *peer)?;
            }
            // A rank considered lost is notified, because it may be alive, but is not waited for.
            if missing.iter().all(|peer| Some(*peer) == gone) {
                self.telling = None;
                return Ok(());
            }
            self.telling = Some((Some(until), now + self.again()));
        }
        self.next_look = now + self.again();
        Ok(())
    }
}

/// The number of failed device copies so far.
pub(super) fn device_errors(ports: &Ports) -> u64 {
    ports.all().map(|port| port.context.counters().value(Counter::DeviceErrors)).sum()
}
