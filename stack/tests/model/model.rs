//! The reference model: the guarantees of the verbs for a connection, without an implementation.
//!
//! Work requests of one direction are executed once each, in the order of posting. The model keeps those without a known
//! outcome, and the peer's memory after all others. It is passed what was posted, what completed, and what the application
//! did to the connection; it returns whether that is allowed.
//!
//! Unreliable connections and datagrams guarantee less: received messages were sent, complete and bit-exact; each message
//! arrives at most once and in order, if the network is faithful.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use ferroce::{WcOpcode, WcStatus};

use crate::flow::Flow;
use crate::request::Request;

/// A difference between the model and the engine.
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

/// Receives are filled with this before they are posted.
pub(crate) const POISON: u8 = 0xcc;
/// Bytes after a message that are checked: as many as the longest packet could overwrite.
pub(crate) const GUARD: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    Reliable,
    Unreliable,
}

/// The properties of a connection that the model needs.
pub(crate) struct Terms {
    pub(crate) service: Service,
    pub(crate) psn: [u32; 2],
    pub(crate) mtu: u32,
    /// Bytes at each end that the other can access.
    pub(crate) memory: usize,
    /// RNR NAKs never end it.
    pub(crate) rnr_endless: bool,
    /// The network neither reorders nor duplicates messages.
    pub(crate) faithful: bool,
    /// Receives are from a queue shared with others.
    pub(crate) shared_receives: bool,
    /// A READ is one request on the wire. In parts it counts as several.
    pub(crate) whole_reads: bool,
    /// Data for this end is copied to a device, and may find no chunk: the sender gets an RNR NAK.
    pub(crate) staged: [bool; 2],
}

/// A work completion, as far as the model checks it.
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

/// Both directions of a connection, from its creation to its end.
pub(crate) struct Connection {
    /// By the requesting end.
    flows: [Flow; 2],
    /// Ends whose work has no outcome: they were reset or destroyed, or completions found no room.
    discarded: [bool; 2],
    draining: [bool; 2],
    /// An action may have broken it. Without one no work may fail.
    shaky: bool,
}

impl Connection {
    pub(crate) fn new(terms: &Terms) -> Connection {
        Connection {
            flows: [0, 1].map(|end| Flow::new(end, terms)),
            discarded: [false; 2],
            draining: [false; 2],
            shaky: terms.service == Service::Reliable && !terms.rnr_endless,
        }
    }

    /// The requests of `end` to its peer.
    pub(crate) fn requests(&self, end: usize) -> &Flow {
        &self.flows[end]
    }

    /// Receives of an end that wait for messages.
    pub(crate) fn receives(&self, end: usize) -> usize {
        self.flows[1 - end].receives()
    }

    /// Whether the receives of an end are flushed.
    pub(crate) fn receives_failed(&self, end: usize) -> bool {
        self.flows[1 - end].receives_failed()
    }

    /// Nothing of either end is outstanding.
    pub(crate) fn is_idle(&self) -> bool {
        self.flows.iter().all(Flow::is_idle) && self.draining == [false; 2]
    }

    /// Whether a request that writes there must wait for earlier READs, which may see it otherwise.
    pub(crate) fn needs_fence(&self, end: usize, range: Range<usize>) -> bool {
        self.flows[end].needs_fence(range)
    }

    pub(crate) fn post(&mut self, end: usize, request: Request) {
        self.shaky |= self.flows[end].post(request);
    }

    pub(crate) fn post_receive(&mut self, end: usize, number: u64, flawed: bool) {
        self.shaky |= flawed;
        self.flows[1 - end].post_receive(number, flawed);
    }

    /// The application moved an end to ERR.
    pub(crate) fn kill(&mut self) {
        self.shaky = true;
    }

    /// The application reset or destroyed an end, or its completion queue has overflowed.
    pub(crate) fn discard(&mut self, end: usize) {
        self.shaky = true;
        self.discarded[end] = true;
    }

    /// The application withdrew the memory that the peer could access, with these contents.
    pub(crate) fn withdraw(&mut self, end: usize) {
        self.shaky = true;
        self.flows[1 - end].withdrawn = true;
    }

    /// The application is about to close a window that the peer uses.
    pub(crate) fn close_window(&mut self, end: usize) {
        self.shaky = true;
        self.flows[1 - end].window_closed = true;
    }

    pub(crate) fn drain(&mut self, end: usize) {
        self.draining[end] = true;
    }

    pub(crate) fn drained(&mut self, end: usize) -> Verdict {
        ensure!(self.draining[end], "drained twice, or unasked");
        self.draining[end] = false;
        Ok(())
    }

    /// There is evidence of a broken connection.
    pub(crate) fn broken(&self) -> Verdict {
        ensure!(self.shaky, "it is broken, and there is no reason for it");
        Ok(())
    }

    /// A send queue of `depth` work requests was reported as full.
    pub(crate) fn full(&self, end: usize, depth: u32) -> Verdict {
        let outstanding = self.flows[end].outstanding();
        ensure!(outstanding >= depth as usize, "the send queue is full with {outstanding} of {depth}");
        Ok(())
    }

    /// A request has completed. `landing` is the requester's memory for results. Returns the requests that are now known to
    /// have succeeded.
    pub(crate) fn complete(&mut self, end: usize, wc: Completion, landing: &[u8]) -> Verdict<Vec<Request>> {
        self.flows[end].complete(wc, landing, self.shaky)
    }

    /// A receive has completed. `buffer` is its memory, `memory` the memory of this end that the peer can access, unless it
    /// was withdrawn. Returns the request that was received.
    pub(crate) fn complete_receive(
        &mut self,
        end: usize,
        wc: Completion,
        buffer: &[u8],
        memory: Option<&[u8]>,
    ) -> Verdict<Option<Request>> {
        self.flows[1 - end].receive(wc, buffer, memory, self.shaky)
    }

    /// A response was sent to `end`.
    pub(crate) fn respond(&self, end: usize, response: Response) -> Verdict {
        if self.discarded[end] { Ok(()) } else { self.flows[end].respond(response) }
    }

    /// Everything possible is done. `memory` is the memory of the peer of `end`.
    pub(crate) fn settled(&self, end: usize, memory: &[u8]) -> Verdict {
        self.flows[end].settled(memory)
    }

    /// Both ends have ended. `landing` is the memory of `end` for results, `memory` that of its peer now, or when it was
    /// withdrawn. Returns the requests that have succeeded without a completion.
    pub(crate) fn finish(&mut self, end: usize, landing: &[u8], memory: &[u8]) -> Verdict<Vec<Request>> {
        self.flows[end].finish(landing, memory, self.discarded[end], self.discarded[1 - end])
    }
}

/// Receives that several queue pairs share.
pub(crate) struct SharedReceives {
    /// Posted and not complete, in the order of posting.
    outstanding: VecDeque<u64>,
    /// A queue pair was reset or destroyed, with its current receive, and with unread completions: the number left is
    /// unknown.
    discarded: bool,
    armed: Option<u32>,
    /// How many older ones may be missing when one completes: each queue pair has one current receive.
    overtaking: usize,
}

impl SharedReceives {
    pub(crate) fn new(overtaking: usize) -> SharedReceives {
        SharedReceives { outstanding: VecDeque::new(), discarded: false, armed: None, overtaking }
    }

    pub(crate) fn outstanding(&self) -> &VecDeque<u64> {
        &self.outstanding
    }

    pub(crate) fn post(&mut self, number: u64) {
        self.outstanding.push_back(number);
    }

    /// The work of a queue pair has no outcome any more.
    pub(crate) fn discard(&mut self) {
        self.discarded = true;
    }

    /// One of the queue pairs has completed a receive.
    pub(crate) fn complete(&mut self, number: u64) -> Verdict {
        let at = self.outstanding.iter().position(|other| *other == number);
        let Some(at) = at else { return Err(Disagreement(format!("receive {number} is not outstanding"))) };
        let in_order = at < self.overtaking || self.discarded;
        ensure!(in_order, "receive {number} is taken before {at} older ones");
        self.outstanding.remove(at);
        Ok(())
    }

    pub(crate) fn arm(&mut self, limit: u32) {
        self.armed = Some(limit).filter(|limit| *limit > 0);
    }

    pub(crate) fn limit_reached(&mut self) -> Verdict {
        ensure!(self.armed.take().is_some(), "SRQ_LIMIT_REACHED twice, or unasked");
        Ok(())
    }

    /// All events were read, and this many receives are posted and not taken.
    pub(crate) fn check_limit(&self, posted: u32) -> Verdict {
        let limit = self.armed.unwrap_or(0);
        ensure!(posted >= limit, "{posted} receives are left, and no event tells that it was {limit}");
        Ok(())
    }

    /// All completions were read; this many receives are posted and not taken, and this many are current.
    pub(crate) fn check_lost(&self, posted: u32, in_hand: u32) -> Verdict {
        let (outstanding, there) = (self.outstanding.len(), (posted + in_hand) as usize);
        let all = outstanding == there || self.discarded && outstanding > there;
        ensure!(all, "of {outstanding} shared receives {there} are left");
        Ok(())
    }
}

impl fmt::Display for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (end, flow) in self.flows.iter().enumerate() {
            let (outstanding, receives) = (flow.outstanding(), flow.receives());
            write!(f, "from end {end}: {outstanding} outstanding, {receives} receives. ")?;
        }
        Ok(())
    }
}
