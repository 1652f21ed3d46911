//! The reference model: what the verbs promise of a connection, and nothing of how it is done.
//!
//! Work requests of one direction are executed once each, in the order in which they were posted.
//! The model keeps those whose outcome it has not been told, and the peer's memory as the others
//! have left it. It is told what was posted, what completed, and what the application did to the
//! connection; it answers whether that may be.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;

use ferroce::{WcOpcode, WcStatus};

/// What the model and the engine disagree about.
#[derive(Debug)]
pub(crate) struct Disagreement(pub(crate) String);

pub(crate) type Verdict<T = ()> = Result<T, Disagreement>;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::model::Disagreement(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

/// Bytes of the noise that all messages are cut from.
pub(crate) const NOISE: usize = 3 << 20;

/// Bytes that differ nearly everywhere from themselves at another place. All data comes from here,
/// so that a message is named by two numbers.
pub(crate) fn noise() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        (0..NOISE / 8).flat_map(|_| next()).collect()
    })
}

/// A piece of the noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: usize,
    pub(crate) length: u32,
}

impl Window {
    pub(crate) fn bytes(self) -> &'static [u8] {
        &noise()[self.start..self.start + self.length as usize]
    }
}

/// What a work request does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Send {
        data: Window,
        immediate: Option<u32>,
        invalidates: Option<usize>,
    },
    Write {
        data: Window,
        at: usize,
        immediate: Option<u32>,
    },
    /// To the place `into` of the requester's landing memory.
    Read {
        at: usize,
        length: u32,
        into: usize,
    },
    /// The old value goes there likewise.
    Atomic {
        at: usize,
        change: Change,
        into: usize,
    },
    LocalInvalidate,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Add(u64),
    CompareSwap { compare: u64, swap: u64 },
}

/// Why a work request must fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// It names memory of its own that is not there.
    Local,
    /// It names memory of the peer that is not there, or not for it.
    Access,
    /// It is no lawful request.
    Invalid,
    /// It is longer than any receive.
    TooLong,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) action: Action,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) flaw: Option<Flaw>,
}

/// A work completion, as far as the model looks at it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) number: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) immediate: Option<u32>,
    /// Which of the receiver's keys was revoked.
    pub(crate) invalidated: Option<usize>,
}

/// A response packet that was sent to the requester.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Response {
    pub(crate) is_acknowledge: bool,
    pub(crate) syndrome: u8,
    pub(crate) psn: u32,
    pub(crate) msn: u32,
}

impl Action {
    pub(crate) fn length(&self) -> u32 {
        match *self {
            Action::Send { data, .. } | Action::Write { data, .. } => data.length,
            Action::Read { length, .. } => length,
            Action::Atomic { .. } => 8,
            Action::LocalInvalidate => 0,
        }
    }

    pub(crate) fn opcode(&self) -> WcOpcode {
        match self {
            Action::Send { .. } => WcOpcode::Send,
            Action::Write { .. } => WcOpcode::RdmaWrite,
            Action::Read { .. } => WcOpcode::RdmaRead,
            Action::Atomic { change: Change::Add(_), .. } => WcOpcode::FetchAdd,
            Action::Atomic { change: Change::CompareSwap { .. }, .. } => WcOpcode::CompSwap,
            Action::LocalInvalidate => WcOpcode::LocalInv,
        }
    }

    /// Whether it takes a receive of the peer.
    fn takes_receive(&self) -> bool {
        matches!(self, Action::Send { .. } | Action::Write { immediate: Some(_), .. })
    }

    /// Whether a result comes back.
    pub(crate) fn lands(&self) -> bool {
        matches!(self, Action::Read { .. } | Action::Atomic { .. })
    }

    /// The peer's memory that it needs.
    pub(crate) fn touches(&self) -> Range<usize> {
        match *self {
            Action::Write { data, at, .. } => at..at + data.length as usize,
            Action::Read { at, length, .. } => at..at + length as usize,
            Action::Atomic { at, .. } => at..at + 8,
            Action::Send { .. } | Action::LocalInvalidate => 0..0,
        }
    }

    /// What it leaves in the peer's memory.
    fn apply(&self, memory: &mut [u8]) {
        match *self {
            Action::Write { data, .. } => memory[self.touches()].copy_from_slice(data.bytes()),
            Action::Atomic { change, .. } => {
                let word = &mut memory[self.touches()];
                word.copy_from_slice(&change.of(read_word(word)).to_ne_bytes());
            }
            _ => {}
        }
    }
}

impl Change {
    fn of(self, old: u64) -> u64 {
        match self {
            Change::Add(value) => old.wrapping_add(value),
            Change::CompareSwap { compare, swap } if compare == old => swap,
            Change::CompareSwap { .. } => old,
        }
    }
}

fn read_word(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The distance of PSNs, the shorter way round.
fn distance(a: u32, b: u32) -> i32 {
    (a.wrapping_sub(b) << 8) as i32 >> 8
}

/// A request without a known outcome.
struct Posted {
    request: Request,
    /// Its first PSN, and how many it takes.
    psn: u32,
    packets: u32,
    /// Messages before it, on the wire.
    messages: u64,
}

/// A message that has not been received.
struct Message {
    number: u64,
    request: Request,
    /// A later request writes where this one did.
    overwritten: bool,
}

struct Receive {
    number: u64,
    /// Its memory is not there: no SEND can go into it.
    flawed: bool,
}

/// One direction of a connection.
struct Flow {
    mtu: u32,
    /// Requests without a known outcome, oldest first, and the number of the oldest.
    requests: VecDeque<Posted>,
    first: u64,
    /// Requests that have failed or were flushed. They may have been executed all the same.
    ended: Vec<(u64, Request)>,
    inbox: VecDeque<Message>,
    /// Of the peer, for these messages.
    receives: VecDeque<Receive>,
    /// The peer's memory, as all requests before the oldest leave it.
    memory: Vec<u8>,
    /// All requests before this one have been executed: a receive has told.
    executed: u64,
    next_psn: u32,
    next_message: u64,
    /// A request, or a receive, has failed: all others of the queue are flushed.
    failed: bool,
    receives_failed: bool,
    /// The peer's memory was taken away.
    withdrawn: bool,
}

/// What may become of an end, because of what was done to it.
#[derive(Clone, Copy, Default)]
struct Fate {
    /// It was reset or destroyed, or its completions found no room: its work has no outcome.
    discarded: bool,
    draining: bool,
}

/// Both directions of a connection, from its making to its end.
pub(crate) struct Connection {
    /// By the end that requests.
    flows: [Flow; 2],
    fates: [Fate; 2],
    /// Something has been done that may break it. Without that no work fails.
    shaky: bool,
    rnr_endless: bool,
}

impl Connection {
    /// Connected, with `memory` bytes of zeros at each end for the other to reach.
    pub(crate) fn new(psn: [u32; 2], mtu: u32, memory: usize, rnr_endless: bool) -> Connection {
        let flow = |psn| Flow {
            mtu,
            requests: VecDeque::new(),
            first: 0,
            ended: Vec::new(),
            inbox: VecDeque::new(),
            receives: VecDeque::new(),
            memory: vec![0; memory],
            executed: 0,
            next_psn: psn,
            next_message: 0,
            failed: false,
            receives_failed: false,
            withdrawn: false,
        };
        Connection { flows: psn.map(flow), fates: [Fate::default(); 2], shaky: !rnr_endless, rnr_endless }
    }

    /// The number of the next request of an end.
    pub(crate) fn next_number(&self, end: usize) -> u64 {
        self.flows[end].first + self.flows[end].requests.len() as u64
    }

    /// Requests of an end whose outcome is not known.
    pub(crate) fn outstanding(&self, end: usize) -> usize {
        self.flows[end].requests.len()
    }

    /// Receives of an end that wait for messages.
    pub(crate) fn receives(&self, end: usize) -> usize {
        self.flows[1 - end].receives.len()
    }

    /// Whether the receives of an end are flushed.
    pub(crate) fn receives_failed(&self, end: usize) -> bool {
        self.flows[1 - end].receives_failed
    }

    /// Nothing of either end is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.flows.iter().all(|flow| flow.requests.is_empty() && flow.inbox.is_empty())
            && self.fates.iter().all(|fate| !fate.draining)
    }

    /// Whether the outcome of the latest request will be told only by a later one.
    pub(crate) fn ends_in_silence(&self, end: usize) -> bool {
        self.flows[end].requests.back().is_some_and(|last| !last.request.signaled)
    }

    /// Whether a request that writes there must wait for earlier READs: they may see it otherwise.
    pub(crate) fn needs_fence(&self, end: usize, range: Range<usize>) -> bool {
        let reads = |posted: &Posted| {
            matches!(posted.request.action, Action::Read { .. })
                && overlap(&posted.request.action.touches(), &range)
        };
        self.flows[end].requests.iter().any(reads)
    }

    /// The word at `at` of the peer once all that is posted is done.
    pub(crate) fn word(&self, end: usize, at: usize) -> u64 {
        let flow = &self.flows[end];
        let old = read_word(&flow.memory[at..at + 8]);
        flow.requests.iter().fold(old, |word, posted| match posted.request.action {
            Action::Atomic { at: place, change, .. } if place == at => change.of(word),
            _ => word,
        })
    }

    pub(crate) fn post(&mut self, end: usize, mut request: Request) {
        let flow = &mut self.flows[end];
        let touches = request.action.touches();
        if flow.withdrawn && !touches.is_empty() && request.flaw.is_none() {
            request.flaw = Some(Flaw::Access);
        }
        self.shaky |= request.flaw.is_some();
        if let Action::Write { .. } = request.action {
            for message in &mut flow.inbox {
                message.overwritten |= overlap(&message.request.action.touches(), &touches);
            }
        }
        let number = flow.first + flow.requests.len() as u64;
        if request.action.takes_receive() {
            flow.inbox.push_back(Message { number, request, overwritten: false });
        }
        let packets = match request.action {
            Action::LocalInvalidate => 0,
            Action::Atomic { .. } => 1,
            _ if request.flaw == Some(Flaw::Local) => 0,
            _ => request.action.length().div_ceil(flow.mtu).max(1),
        };
        let (psn, messages) = (flow.next_psn, flow.next_message);
        flow.requests.push_back(Posted { request, psn, packets, messages });
        flow.next_psn = flow.next_psn.wrapping_add(packets) & 0x00ff_ffff;
        flow.next_message += u64::from(packets > 0);
    }

    pub(crate) fn post_receive(&mut self, end: usize, number: u64, flawed: bool) {
        self.shaky |= flawed;
        self.flows[1 - end].receives.push_back(Receive { number, flawed });
    }

    /// The application moved an end to ERR.
    pub(crate) fn kill(&mut self) {
        self.shaky = true;
    }

    /// The application reset or destroyed an end, or its completion queue has overflowed.
    pub(crate) fn discard(&mut self, end: usize) {
        self.shaky = true;
        self.fates[end].discarded = true;
    }

    /// The application took back the memory that the peer could reach, with what it held.
    pub(crate) fn withdraw(&mut self, end: usize) {
        self.shaky = true;
        self.flows[1 - end].withdrawn = true;
    }

    pub(crate) fn drain(&mut self, end: usize) {
        self.fates[end].draining = true;
    }

    pub(crate) fn drained(&mut self, end: usize) -> Verdict {
        ensure!(self.fates[end].draining, "drained twice, or unasked");
        self.fates[end].draining = false;
        Ok(())
    }

    /// Events other than of draining tell of a broken connection.
    pub(crate) fn broken(&self) -> Verdict {
        ensure!(self.shaky, "an event of failure, and no reason for it");
        Ok(())
    }

    /// A send queue of `depth` work requests is said to be full.
    pub(crate) fn full(&self, end: usize, depth: u32) -> Verdict {
        let outstanding = self.outstanding(end);
        ensure!(outstanding >= depth as usize, "the send queue is full with {outstanding} of {depth}");
        Ok(())
    }

    /// A request has completed. `landing` is the requester's memory for results. Returns the
    /// requests that are now known to have succeeded.
    pub(crate) fn complete(&mut self, end: usize, wc: Completion, landing: &[u8]) -> Verdict<Vec<Request>> {
        let mut done = Vec::new();
        while self.flows[end].first < wc.number {
            done.push(self.succeed_in_silence(end, landing)?);
        }
        let flow = &mut self.flows[end];
        ensure!(flow.first == wc.number, "a second outcome: {wc:?}");
        let Some(Posted { request, .. }) = flow.requests.front() else {
            return Err(Disagreement(format!("nothing is outstanding, but {wc:?}")));
        };
        let request = *request;
        let opcode = request.action.opcode();
        ensure!(wc.opcode == opcode, "{opcode:?} completes as {wc:?}");
        if wc.status == WcStatus::Success {
            ensure!(request.signaled, "not signaled: {wc:?}");
            let length = request.action.length();
            ensure!(wc.byte_len == length, "{length} bytes complete as {wc:?}");
            flow.succeed(landing)?;
            done.push(request);
            return Ok(done);
        }
        let withdrawn = flow.withdrawn && !request.action.touches().is_empty();
        let into_flawed = flow.receives.iter().any(|receive| receive.flawed) || flow.receives_failed;
        let fits = match wc.status {
            WcStatus::WrFlushErr => self.shaky,
            _ if flow.failed => false,
            WcStatus::RetryExcErr => self.shaky,
            WcStatus::RnrRetryExcErr => !self.rnr_endless && request.action.takes_receive(),
            WcStatus::LocProtErr => request.flaw == Some(Flaw::Local),
            WcStatus::RemAccessErr => request.flaw == Some(Flaw::Access) || withdrawn,
            WcStatus::RemInvReqErr => matches!(request.flaw, Some(Flaw::Invalid | Flaw::TooLong)),
            WcStatus::RemOpErr => into_flawed && matches!(request.action, Action::Send { .. }),
            _ => false,
        };
        ensure!(fits, "{request:?} completes as {wc:?}");
        flow.failed = true;
        flow.requests.pop_front();
        flow.first += 1;
        flow.ended.push((wc.number, request));
        Ok(done)
    }

    /// The oldest request has succeeded, for a later one has completed.
    fn succeed_in_silence(&mut self, end: usize, landing: &[u8]) -> Verdict<Request> {
        let flow = &mut self.flows[end];
        let Some(Posted { request, .. }) = flow.requests.front() else {
            return Err(Disagreement("a request that was not posted completes".to_owned()));
        };
        let request = *request;
        ensure!(!request.signaled, "no outcome of {request:?}, number {}", flow.first);
        flow.succeed(landing)?;
        Ok(request)
    }

    /// A receive has completed. `buffer` is its memory, `memory` what the peer can reach of this
    /// end, unless it was taken away. Returns whether the message was sent as solicited.
    pub(crate) fn complete_receive(
        &mut self,
        end: usize,
        wc: Completion,
        buffer: &[u8],
        memory: Option<&[u8]>,
    ) -> Verdict<bool> {
        let shaky = self.shaky;
        let flow = &mut self.flows[1 - end];
        let Some(receive) = flow.receives.pop_front() else {
            return Err(Disagreement(format!("no receive is posted, but {wc:?}")));
        };
        ensure!(wc.number == receive.number, "the oldest receive is {}, but {wc:?}", receive.number);
        if wc.status == WcStatus::WrFlushErr {
            ensure!(shaky, "no reason for {wc:?}");
            flow.receives_failed = true;
            return Ok(true);
        }
        ensure!(!flow.receives_failed, "after another has failed: {wc:?}");
        let Some(Message { number, request, overwritten }) = flow.inbox.pop_front() else {
            return Err(Disagreement(format!("no message is under way, but {wc:?}")));
        };
        let is_send = matches!(request.action, Action::Send { .. });
        if wc.status != WcStatus::Success {
            let fits = match wc.status {
                WcStatus::LocLenErr => request.flaw == Some(Flaw::TooLong),
                WcStatus::LocProtErr => receive.flawed && is_send,
                WcStatus::RemInvReqErr => request.flaw == Some(Flaw::Access) && is_send,
                _ => false,
            };
            ensure!(fits, "{request:?} is received as {wc:?}");
            flow.receives_failed = true;
            return Ok(true);
        }
        ensure!(request.flaw.is_none(), "{request:?} is received: {wc:?}");
        ensure!(!(receive.flawed && is_send), "into memory that is not there: {wc:?}");
        let (opcode, immediate, invalidated, bytes) = match request.action {
            Action::Send { data, immediate, invalidates } => {
                (WcOpcode::Recv, immediate, invalidates, data.bytes())
            }
            Action::Write { immediate, .. } => (WcOpcode::RecvRdmaWithImm, immediate, None, &[][..]),
            _ => unreachable!("only messages are under way"),
        };
        let found = (wc.opcode, wc.byte_len, wc.immediate, wc.invalidated);
        let length = request.action.length();
        ensure!(found == (opcode, length, immediate, invalidated), "{request:?} is received as {wc:?}");
        if !receive.flawed {
            ensure!(buffer.starts_with(bytes), "{request:?}: other bytes are received");
            let rest = &buffer[bytes.len()..buffer.len().min(bytes.len() + GUARD)];
            ensure!(rest.iter().all(|byte| *byte == POISON), "{request:?}: written beyond its end");
        }
        if let (Action::Write { data, .. }, Some(memory), false) = (request.action, memory, overwritten) {
            let visible = &memory[request.action.touches()];
            ensure!(visible == data.bytes(), "{request:?} is announced before its bytes are there");
        }
        flow.executed = flow.executed.max(number + 1);
        Ok(request.solicited)
    }

    /// A response was sent to `end`: its MSN counts the messages before.
    pub(crate) fn respond(&self, end: usize, response: Response) -> Verdict {
        let flow = &self.flows[end];
        let Response { is_acknowledge, syndrome, psn, msn } = response;
        // 0x61 to 0x63 may stand in the middle of READs that are counted already.
        if self.fates[end].discarded || syndrome > 0x60 {
            return Ok(());
        }
        let is_ack = syndrome < 0x20;
        let bound = if is_acknowledge && !is_ack { psn } else { psn.wrapping_add(1) };
        // Messages that are over before `bound`, or the one whose answer this is.
        let mut expected = None;
        let oldest = flow.requests.front().map_or(flow.next_psn, |posted| posted.psn);
        if is_acknowledge && distance(bound, oldest) >= 0 {
            let over = |posted: &&Posted| distance(posted.psn.wrapping_add(posted.packets), bound) > 0;
            let next = flow.requests.iter().find(over);
            expected = Some(next.map_or(flow.next_message, |posted| posted.messages));
        } else if !is_acknowledge {
            let covers = |posted: &&Posted| {
                let at = distance(psn, posted.psn);
                at >= 0 && (at as u32) < posted.packets
            };
            expected = flow.requests.iter().find(covers).map(|posted| posted.messages + 1);
        }
        if let Some(expected) = expected {
            let expected = (expected & 0x00ff_ffff) as u32;
            ensure!(msn == expected, "MSN {expected} becomes {response:x?}");
        }
        Ok(())
    }

    /// All is done that will be. `memory` is what the peer of `end` holds.
    pub(crate) fn settled(&self, end: usize, memory: &[u8]) -> Verdict {
        let flow = &self.flows[end];
        ensure!(flow.requests.is_empty(), "{} requests without outcome", flow.requests.len());
        ensure!(flow.inbox.is_empty(), "{} messages are lost", flow.inbox.len());
        flow.compare(memory)
    }

    /// Both ends have come to their end: whatever has no outcome now will have none. `memory` is
    /// what the peer of `end` holds, or held when it was taken away.
    pub(crate) fn finish(&mut self, end: usize, landing: &[u8], memory: &[u8]) -> Verdict<Vec<Request>> {
        let mut done = Vec::new();
        if !self.fates[end].discarded {
            while !self.flows[end].requests.is_empty() {
                ensure!(!self.flows[end].failed, "work behind a failure was not flushed");
                done.push(self.succeed_in_silence(end, landing)?);
            }
        }
        let receives = self.flows[end].receives.len();
        ensure!(receives == 0 || self.fates[1 - end].discarded, "{receives} receives without outcome");
        self.flows[end].reconcile(memory)?;
        Ok(done)
    }
}

/// Receives are filled with this before they are posted.
pub(crate) const POISON: u8 = 0xcc;
/// Bytes behind a message that are looked at: as many as the longest packet could spill.
pub(crate) const GUARD: usize = 4096;

impl Flow {
    /// The oldest request has succeeded: its effect is there, and its result.
    fn succeed(&mut self, landing: &[u8]) -> Verdict {
        let Some(Posted { request, .. }) = self.requests.pop_front() else { return Ok(()) };
        ensure!(!self.failed, "success behind a failure: {request:?}");
        ensure!(request.flaw.is_none(), "{request:?} succeeds");
        self.first += 1;
        let expected = match request.action {
            Action::Read { into, .. } | Action::Atomic { into, .. } => {
                Some((into, &self.memory[request.action.touches()]))
            }
            _ => None,
        };
        if let Some((into, expected)) = expected {
            let found = &landing[into..into + expected.len()];
            ensure!(found == expected, "number {}, {request:?}: another result", self.first - 1);
        }
        request.action.apply(&mut self.memory);
        Ok(())
    }

    fn compare(&self, memory: &[u8]) -> Verdict {
        match self.memory.iter().zip(memory).position(|(a, b)| a != b) {
            _ if self.memory == memory => Ok(()),
            at => Err(Disagreement(format!("the memory holds other bytes, from {at:?} on"))),
        }
    }

    /// Some of the requests that did not succeed were executed, in order, and the next perhaps in
    /// part: finds out how many.
    fn reconcile(&mut self, memory: &[u8]) -> Verdict {
        let left = (self.first..).zip(self.requests.iter().map(|posted| posted.request));
        let pending: Vec<(u64, Request)> = self.ended.iter().copied().chain(left).collect();
        let lawful = pending.iter().take_while(|(_, request)| request.flaw.is_none());
        let mut lawful = lawful.peekable();
        while let Some((number, request)) = lawful.peek() {
            if *number >= self.executed && self.is_partly(&request.action, memory) {
                return Ok(());
            }
            request.action.apply(&mut self.memory);
            lawful.next();
        }
        self.compare(memory)
    }

    /// Whether `memory` is ours, or what a part of a WRITE makes of it.
    fn is_partly(&self, action: &Action, memory: &[u8]) -> bool {
        let Action::Write { data, .. } = action else { return self.memory == memory };
        let Range { start, end } = action.touches();
        let mut parts = data.bytes().iter().zip(&self.memory[start..end]).zip(&memory[start..end]);
        self.memory[..start] == memory[..start]
            && self.memory[end..] == memory[end..]
            && parts.all(|((new, old), found)| found == new || found == old)
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (end, flow) in self.flows.iter().enumerate() {
            let Flow { requests, inbox, receives, first, .. } = flow;
            let (requests, inbox, receives) = (requests.len(), inbox.len(), receives.len());
            write!(
                f,
                "end {end}: {requests} outstanding from {first} on, {inbox} messages, {receives} receives. "
            )?;
        }
        Ok(())
    }
}
