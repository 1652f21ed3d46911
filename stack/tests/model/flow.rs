//! The reference model of one direction of a connection: requests in the order of posting, and their effects on the peer's
//! memory and receives.

use std::collections::VecDeque;
use std::ops::Range;

use ferroce::{WcOpcode, WcStatus};

use crate::model::{Completion, Disagreement, GUARD, POISON, Response, Service, Terms, Verdict, ensure};
use crate::request::{Action, Flaw, Request};

/// A request without a known outcome.
struct Posted {
    request: Request,
    /// Its first PSN, and how many it occupies.
    psn: u32,
    packets: u32,
    /// Messages before it, on the wire.
    messages: u64,
}

/// A message that has not been received.
struct Unreceived {
    number: u64,
    request: Request,
    /// A later request writes to the same place.
    overwritten: bool,
}

/// A receive without an outcome.
struct Receive {
    number: u64,
    /// Its memory does not exist: no SEND can use it.
    flawed: bool,
}

/// One direction.
pub(crate) struct Flow {
    service: Service,
    /// The network neither reorders nor duplicates messages.
    faithful: bool,
    mtu: u32,
    rnr_endless: bool,
    /// Requests without a known outcome, the oldest first, and the number of the oldest.
    requests: VecDeque<Posted>,
    first: u64,
    /// Requests that have failed or were flushed. They may have been executed nevertheless.
    ended: Vec<(u64, Request)>,
    inbox: VecDeque<Unreceived>,
    /// The peer's receives for these messages; empty if they are shared.
    receives: VecDeque<Receive>,
    shared_receives: bool,
    whole_reads: bool,
    staged: bool,
    /// Reliable: the peer's memory after all requests before the oldest.
    memory: Vec<u8>,
    /// Unreliable: all writes that may have been executed.
    writes: Vec<Action>,
    /// All requests before this one have been executed, as a receive has shown.
    executed: u64,
    next_psn: u32,
    next_message: u64,
    /// A request, or a receive, has failed: all others of the queue are flushed.
    failed: bool,
    receives_failed: bool,
    /// The peer's memory was withdrawn.
    pub(crate) withdrawn: bool,
    /// A window of the peer was closed, or will be.
    pub(crate) window_closed: bool,
}

impl Flow {
    /// From `end` to its peer, whose memory is zeroed.
    pub(crate) fn new(end: usize, terms: &Terms) -> Flow {
        Flow {
            service: terms.service,
            faithful: terms.faithful,
            mtu: terms.mtu,
            rnr_endless: terms.rnr_endless,
            requests: VecDeque::new(),
            first: 0,
            ended: Vec::new(),
            inbox: VecDeque::new(),
            receives: VecDeque::new(),
            shared_receives: terms.shared_receives,
            whole_reads: terms.whole_reads,
            staged: terms.staged[1 - end],
            memory: vec![0; terms.memory],
            writes: Vec::new(),
            executed: 0,
            next_psn: terms.psn[end],
            next_message: 0,
            failed: false,
            receives_failed: false,
            withdrawn: false,
            window_closed: false,
        }
    }

    fn is_reliable(&self) -> bool {
        self.service == Service::Reliable
    }

    /// The number of the next request.
    pub(crate) fn next_number(&self) -> u64 {
        self.first + self.requests.len() as u64
    }

    /// Requests without a known outcome.
    pub(crate) fn outstanding(&self) -> usize {
        self.requests.len()
    }

    /// Messages posted so far.
    pub(crate) fn messages(&self) -> u64 {
        self.next_message
    }

    pub(crate) fn receives(&self) -> usize {
        self.receives.len()
    }

    pub(crate) fn receives_failed(&self) -> bool {
        self.receives_failed
    }

    /// Nothing outstanding is certain to complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.is_empty() && (self.inbox.is_empty() || !self.is_reliable())
    }

    /// Whether the outcome of the latest request will be known only by a later one.
    pub(crate) fn ends_in_silence(&self) -> bool {
        self.requests.back().is_some_and(|last| !last.request.signaled)
    }

    /// Whether a request that writes there must wait for earlier READs, which may see it otherwise.
    pub(crate) fn needs_fence(&self, range: Range<usize>) -> bool {
        let reads =
            |action: &Action| matches!(action, Action::Read { .. }) && overlap(&action.touches(), &range);
        self.requests.iter().any(|posted| reads(&posted.request.action))
    }

    /// The word at `at` once all posted requests are done.
    pub(crate) fn word(&self, at: usize) -> u64 {
        let mut words = self.memory[..at + 8].to_vec();
        let of_word = |action: &&Action| action.touches() == (at..at + 8);
        self.requests
            .iter()
            .map(|posted| &posted.request.action)
            .filter(of_word)
            .for_each(|action| action.apply(&mut words));
        words[at..].try_into().map_or(0, u64::from_ne_bytes)
    }

    /// Returns whether it may break the connection.
    pub(crate) fn post(&mut self, mut request: Request) -> bool {
        let touches = request.action.touches();
        if self.withdrawn && request.action.reaches() && request.flaw.is_none() {
            request.flaw = Some(Flaw::Access);
        }
        if let Action::Write { .. } = request.action {
            for message in &mut self.inbox {
                message.overwritten |= overlap(&message.request.action.touches(), &touches);
            }
            if !self.is_reliable() && request.flaw.is_none() {
                self.writes.push(request.action);
            }
        }
        let number = self.next_number();
        if request.action.takes_receive() {
            self.inbox.push_back(Unreceived { number, request, overwritten: false });
        }
        let packets = match request.action {
            action if action.is_local() => 0,
            _ if request.flaw == Some(Flaw::Local) => 0,
            Action::Atomic { .. } => 1,
            _ => request.action.length().div_ceil(self.mtu).max(1),
        };
        let (psn, messages) = (self.next_psn, self.next_message);
        self.requests.push_back(Posted { request, psn, packets, messages });
        self.next_psn = self.next_psn.wrapping_add(packets) & 0x00ff_ffff;
        self.next_message += u64::from(packets > 0);
        request.flaw.is_some_and(|flaw| self.is_reliable() || flaw.is_local())
    }

    pub(crate) fn post_receive(&mut self, number: u64, flawed: bool) {
        self.receives.push_back(Receive { number, flawed });
    }

    /// A request has completed; `shaky` if the connection has a reason to fail. Returns the requests that are now known to
    /// have succeeded.
    pub(crate) fn complete(&mut self, wc: Completion, landing: &[u8], shaky: bool) -> Verdict<Vec<Request>> {
        let mut done = Vec::new();
        while self.first < wc.number {
            done.push(self.succeed_in_silence(landing)?);
        }
        ensure!(self.first == wc.number, "a second outcome: {wc:?}");
        let Some(Posted { request, .. }) = self.requests.front() else {
            return Err(Disagreement(format!("nothing is outstanding, but {wc:?}")));
        };
        let request = *request;
        let opcode = request.action.opcode();
        ensure!(wc.opcode == opcode, "{opcode:?} completes as {wc:?}");
        if wc.status == WcStatus::Success {
            ensure!(request.signaled, "not signaled: {wc:?}");
            let length = request.action.length();
            ensure!(wc.byte_len == length, "{length} bytes complete as {wc:?}");
            done.push(self.succeed(landing)?);
            return Ok(done);
        }
        ensure!(self.may_fail(&request, wc.status, shaky), "{request:?} completes as {wc:?}");
        self.failed = true;
        self.requests.pop_front();
        self.first += 1;
        self.ended.push((wc.number, request));
        Ok(done)
    }

    fn may_fail(&self, request: &Request, status: WcStatus, shaky: bool) -> bool {
        let Request { action, flaw, .. } = request;
        let closed = self.window_closed && request.through_window;
        let withdrawn = (self.withdrawn || closed) && action.reaches();
        let into_flawed = self.receives_failed || self.receives.iter().any(|receive| receive.flawed);
        match status {
            WcStatus::WrFlushErr => shaky,
            _ if self.failed => false,
            WcStatus::LocProtErr => *flaw == Some(Flaw::Local),
            WcStatus::MwBindErr => *flaw == Some(Flaw::Bind),
            _ if !self.is_reliable() => false,
            WcStatus::RetryExcErr => shaky,
            WcStatus::RnrRetryExcErr => {
                let needs_room = self.staged && matches!(action, Action::Send { .. } | Action::Write { .. });
                !self.rnr_endless && (action.takes_receive() || needs_room)
            }
            WcStatus::RemAccessErr => *flaw == Some(Flaw::Access) || withdrawn,
            WcStatus::RemInvReqErr => matches!(flaw, Some(Flaw::Invalid | Flaw::TooLong)),
            WcStatus::RemOpErr => into_flawed && matches!(action, Action::Send { .. }),
            _ => false,
        }
    }

    /// The oldest request has succeeded, because a later one has completed.
    fn succeed_in_silence(&mut self, landing: &[u8]) -> Verdict<Request> {
        let signaled = self.requests.front().is_some_and(|posted| posted.request.signaled);
        ensure!(!signaled, "no outcome of number {}", self.first);
        self.succeed(landing)
    }

    /// The oldest request has succeeded: checks its effect and its result. An unreliable one was sent, and nothing more is
    /// known.
    fn succeed(&mut self, landing: &[u8]) -> Verdict<Request> {
        let Some(Posted { request, .. }) = self.requests.pop_front() else {
            return Err(Disagreement("a request that was not posted completes".to_owned()));
        };
        let Request { action, flaw, .. } = request;
        ensure!(!self.failed, "success behind a failure: {request:?}");
        let leaves = !self.is_reliable() && !flaw.is_some_and(Flaw::is_local);
        ensure!(flaw.is_none() || leaves, "{request:?} succeeds");
        self.first += 1;
        if !self.is_reliable() {
            return Ok(request);
        }
        if let Action::Read { into, .. } | Action::Atomic { into, .. } = action {
            let expected = &self.memory[action.touches()];
            let found = &landing[into..into + expected.len()];
            ensure!(found == expected, "number {}, {request:?}: another result", self.first - 1);
        }
        action.apply(&mut self.memory);
        Ok(request)
    }

    /// A receive of the peer has completed. `buffer` is its memory, `memory` the peer's memory that this direction can
    /// access, unless it was withdrawn. Returns the request that was received.
    pub(crate) fn receive(
        &mut self,
        wc: Completion,
        buffer: &[u8],
        memory: Option<&[u8]>,
        shaky: bool,
    ) -> Verdict<Option<Request>> {
        let flawed = self.take_receive(&wc)?;
        if wc.status == WcStatus::WrFlushErr {
            ensure!(shaky, "no reason for {wc:?}");
            self.receives_failed = true;
            return Ok(None);
        }
        ensure!(!self.receives_failed, "after another has failed: {wc:?}");
        if wc.status != WcStatus::Success {
            let request = self.inbox.pop_front().map(|message| message.request);
            let is_send = request.is_some_and(|request| matches!(request.action, Action::Send { .. }));
            let flaw = request.and_then(|request| request.flaw);
            let fits = match wc.status {
                WcStatus::LocProtErr => flawed && (is_send || !self.is_reliable()),
                _ if !self.is_reliable() => false,
                WcStatus::LocLenErr => flaw == Some(Flaw::TooLong),
                WcStatus::RemInvReqErr => flaw == Some(Flaw::Access) && is_send,
                _ => false,
            };
            ensure!(fits, "{request:?} is received as {wc:?}");
            self.receives_failed = true;
            return Ok(None);
        }
        let Unreceived { number, request, overwritten } = self.take_message(&wc, buffer)?;
        ensure!(request.flaw.is_none(), "{request:?} is received: {wc:?}");
        let is_send = matches!(request.action, Action::Send { .. });
        ensure!(!(flawed && is_send), "into memory that is not there: {wc:?}");
        ensure!(is_received_as(&request.action, &wc), "{request:?} is received as {wc:?}");
        if let Action::Send { data, .. } = request.action {
            let (bytes, rest) = buffer.split_at(data.length as usize);
            ensure!(bytes == data.bytes(), "{request:?}: other bytes are received");
            // An earlier unreliable message may have arrived in part.
            let rest = if self.is_reliable() { &rest[..rest.len().min(GUARD)] } else { &[] };
            ensure!(rest.iter().all(|byte| *byte == POISON), "{request:?}: written beyond its end");
        }
        let settled = !overwritten && (self.faithful || self.is_reliable());
        if let (Action::Write { data, .. }, Some(memory), true) = (request.action, memory, settled) {
            let visible = &memory[request.action.touches()];
            ensure!(visible == data.bytes(), "{request:?} is announced before its bytes are there");
        }
        self.executed = self.executed.max(number + 1);
        Ok(Some(request))
    }

    /// The receive of a completion, which is the oldest. Returns whether it is flawed.
    fn take_receive(&mut self, wc: &Completion) -> Verdict<bool> {
        if self.shared_receives {
            return Ok(false);
        }
        let Some(receive) = self.receives.pop_front() else {
            return Err(Disagreement(format!("no receive is posted, but {wc:?}")));
        };
        ensure!(wc.number == receive.number, "the oldest receive is {}, but {wc:?}", receive.number);
        Ok(receive.flawed)
    }

    /// The message of a completion: the oldest, or, if it is unreliable, one that matches. All before it are lost then,
    /// unless the network may still deliver them.
    fn take_message(&mut self, wc: &Completion, buffer: &[u8]) -> Verdict<Unreceived> {
        let none = || Disagreement(format!("no such message is under way, but {wc:?}"));
        if self.is_reliable() {
            return self.inbox.pop_front().ok_or_else(none);
        }
        let fits = |message: &Unreceived| {
            let action = &message.request.action;
            message.request.flaw.is_none()
                && is_received_as(action, wc)
                && match action {
                    Action::Send { data, .. } => buffer.starts_with(data.bytes()),
                    _ => true,
                }
        };
        let at = self.inbox.iter().position(fits).ok_or_else(none)?;
        if self.faithful {
            self.inbox.drain(..at);
            return self.inbox.pop_front().ok_or_else(none);
        }
        let Unreceived { number, request, overwritten } = self.inbox[at];
        Ok(Unreceived { number, request, overwritten })
    }

    /// A response was sent to the requester: its MSN counts the messages before.
    pub(crate) fn respond(&self, response: Response) -> Verdict {
        let Response { is_acknowledge, syndrome, psn, msn } = response;
        // 0x61 to 0x63 may occur within READs that are counted already.
        if syndrome > 0x60 || !self.whole_reads {
            return Ok(());
        }
        let is_ack = syndrome < 0x20;
        let bound = if is_acknowledge && !is_ack { psn } else { psn.wrapping_add(1) };
        // Messages complete before `bound`, or the one that this responds to.
        let mut expected = None;
        let oldest = self.requests.front().map_or(self.next_psn, |posted| posted.psn);
        if is_acknowledge && distance(bound, oldest) >= 0 {
            let over = |posted: &&Posted| distance(posted.psn.wrapping_add(posted.packets), bound) > 0;
            let next = self.requests.iter().find(over);
            expected = Some(next.map_or(self.next_message, |posted| posted.messages));
        } else if !is_acknowledge {
            let covers = |posted: &&Posted| {
                let at = distance(psn, posted.psn);
                at >= 0 && (at as u32) < posted.packets
            };
            expected = self.requests.iter().find(covers).map(|posted| posted.messages + 1);
        }
        if let Some(expected) = expected {
            let expected = (expected & 0x00ff_ffff) as u32;
            ensure!(msn == expected, "MSN {expected} becomes {response:x?}");
        }
        Ok(())
    }

    /// Everything possible is done. `memory` is the peer's memory.
    pub(crate) fn settled(&self, memory: &[u8]) -> Verdict {
        ensure!(self.requests.is_empty(), "{} requests without outcome", self.requests.len());
        if !self.is_reliable() {
            return self.compare_unreliable(memory);
        }
        ensure!(self.inbox.is_empty(), "{} messages are lost", self.inbox.len());
        self.compare(memory)
    }

    /// Both ends have ended: requests without an outcome now will have none, which must be correct, unless an end was
    /// `discarded`. `memory` is the peer's memory now, or when it was withdrawn.
    pub(crate) fn finish(
        &mut self,
        landing: &[u8],
        memory: &[u8],
        discarded: bool,
        peer_discarded: bool,
    ) -> Verdict<Vec<Request>> {
        let mut done = Vec::new();
        while !self.requests.is_empty() && !discarded {
            ensure!(!self.failed, "work behind a failure was not flushed");
            done.push(self.succeed_in_silence(landing)?);
        }
        let receives = self.receives.len();
        ensure!(receives == 0 || peer_discarded, "{receives} receives without outcome");
        if self.is_reliable() {
            self.reconcile(memory)?;
        } else {
            self.compare_unreliable(memory)?;
        }
        Ok(done)
    }

    fn compare(&self, memory: &[u8]) -> Verdict {
        if self.memory == memory {
            return Ok(());
        }
        let at = self.memory.iter().zip(memory).position(|(a, b)| a != b);
        Err(Disagreement(format!("the memory holds other bytes, from {at:?} on")))
    }

    /// Any of the WRITEs may have been executed, in any part.
    fn compare_unreliable(&self, memory: &[u8]) -> Verdict {
        let mut known: Vec<bool> = memory.iter().map(|byte| *byte == 0).collect();
        for action in &self.writes {
            let Action::Write { data, .. } = action else { continue };
            let range = action.touches();
            let found = &memory[range.clone()];
            for ((known, found), byte) in known[range].iter_mut().zip(found).zip(data.bytes()) {
                *known |= found == byte;
            }
        }
        let stray = known.iter().position(|known| !known);
        ensure!(stray.is_none(), "the memory holds a byte that nobody wrote, at {stray:?}");
        Ok(())
    }

    /// Some of the requests that did not succeed were executed, in order, and the next one possibly in part: determines how
    /// many.
    fn reconcile(&mut self, memory: &[u8]) -> Verdict {
        let left = (self.first..).zip(self.requests.iter().map(|posted| posted.request));
        let pending: Vec<(u64, Request)> = self.ended.iter().copied().chain(left).collect();
        for (number, Request { action, .. }) in pending.iter().take_while(|(_, r)| r.flaw.is_none()) {
            if *number >= self.executed && self.is_partly(action, memory) {
                return Ok(());
            }
            action.apply(&mut self.memory);
        }
        self.compare(memory)
    }

    /// Whether `memory` is the model's, or the result of a part of a WRITE on it.
    fn is_partly(&self, action: &Action, memory: &[u8]) -> bool {
        let Action::Write { data, .. } = action else { return self.memory == memory };
        let Range { start, end } = action.touches();
        let mut parts = data.bytes().iter().zip(&self.memory[start..end]).zip(&memory[start..end]);
        self.memory[..start] == memory[..start]
            && self.memory[end..] == memory[end..]
            && parts.all(|((new, old), found)| found == new || found == old)
    }
}

/// Whether a message completes a receive like this, apart from its bytes.
fn is_received_as(action: &Action, wc: &Completion) -> bool {
    let (opcode, immediate, invalidated) = match *action {
        Action::Send { immediate, invalidates, .. } => (WcOpcode::Recv, immediate, invalidates),
        Action::Write { immediate, .. } => (WcOpcode::RecvRdmaWithImm, immediate, None),
        _ => return false,
    };
    (wc.opcode, wc.byte_len, wc.immediate, wc.invalidated)
        == (opcode, action.length(), immediate, invalidated)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The distance of PSNs, in the shorter direction.
fn distance(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}
