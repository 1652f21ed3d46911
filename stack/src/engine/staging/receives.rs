//! Received data of a queue pair for device memory, and the acknowledgements, responses and completions that wait for it.

use std::time::Duration;

use arrayvec::ArrayVec;
use ferroce_driver::gpu::MAX_PIECES;
use ferroce_wire::{Nak, Psn, RKey, Service, Syndrome};

use super::answers::Answers;
use super::landing::{CopiesLeft, Landing, LandingPlace, NoRoom};
use super::sends::Sends;
use super::{EndedCopy, Purpose};
use crate::engine::mr::{Granted, RemoteAccess};
use crate::engine::qp::QueuePair;
use crate::engine::responder::RequestRefusal;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{Access, Cq, Event, QpState, Sge, WcOpcode, WcStatus, WorkCompletion};

/// The additional state of a queue pair that uses device memory.
pub(crate) struct Staged {
    pub(crate) sends: Sends,
    pub(crate) answers: Answers,
    /// For the peer's requests.
    pub(crate) requests: Landing,
    /// For the responses to its READs.
    pub(crate) responses: Landing,
    /// What the request refused last waits for.
    refused: Option<Refused>,
    /// The request that was last requested again, after chunks were free.
    asked_for: Option<Psn>,
    /// The region invalidated by the oldest request, while it is copied.
    invalidated: Option<u32>,
    /// No more receives of the SRQ will complete except those that wait for their bytes.
    owes_last_wqe: bool,
}

/// A request that could not be accepted, and is requested again when it can.
struct Refused {
    awaits: Awaits,
    /// How often it was retransmitted without success.
    repeats: u8,
}

/// How often a request may be retransmitted without success before its peer gets an RNR NAK: if RNR NAKs end a connection,
/// this must not be caused by retransmissions without a wait.
const REPEATS: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaits {
    /// This many chunks.
    Chunks(usize),
    /// The end of all outstanding copies.
    Landing,
}

impl QueuePair {
    /// Allocates the state for device memory, unless done before.
    pub(crate) fn stage(&mut self, shared: &Shared) {
        if self.staged.is_none() {
            let pool = &shared.staging;
            self.staged = Some(Box::new(Staged {
                sends: Sends::new(self.handle, pool, self.sq.depth(), self.sq.head()),
                answers: Answers::new(self.handle, pool),
                requests: Landing::new(Purpose::Requests, pool, self.rq.depth()),
                responses: Landing::new(Purpose::Responses, pool, self.sq.depth()),
                refused: None,
                asked_for: None,
                invalidated: None,
                owes_last_wqe: false,
            }));
        }
    }

    /// The packet being executed: everything before it may be visible.
    fn this_request(&self) -> (Psn, u32) {
        (self.responder.expected_psn(), self.responder.msn())
    }

    /// Accepts bytes of a request for the oldest receive, each from this byte of it on, as far as they are for device
    /// memory, or also for host memory, after outstanding copies.
    #[cold]
    #[inline(never)]
    pub(crate) fn land_receive(
        &mut self,
        shared: &mut Shared,
        bytes: &[(u32, &[u8])],
        with_host: bool,
    ) -> Result<(), NoRoom> {
        self.stage(shared);
        let (handle, first) = (self.handle, self.this_request());
        let (Some(staged), Some(receive)) = (&mut self.staged, self.rq.front()) else { return Ok(()) };
        let parts = bytes.iter().flat_map(|bytes| parts(shared, receive.sges, *bytes, with_host));
        let parts: ArrayVec<_, MAX_PIECES> = parts.collect();
        let taken = staged.requests.take(shared, handle, &parts, first);
        self.await_chunks(shared, taken)
    }

    /// Accepts bytes of a WRITE for device memory, or for host memory after outstanding copies.
    #[cold]
    #[inline(never)]
    pub(crate) fn land_write(
        &mut self,
        shared: &mut Shared,
        grant: Granted,
        data: &[u8],
        is_last: bool,
    ) -> Result<(), NoRoom> {
        self.stage(shared);
        let (handle, first) = (self.handle, self.this_request());
        let (Some(staged), Some(place)) = (&mut self.staged, shared.mrs.place_of(grant)) else {
            return Ok(());
        };
        let taken = staged.requests.take(shared, handle, &[(place, data)], first);
        if taken.is_ok() && is_last {
            staged.requests.want();
        }
        self.await_chunks(shared, taken)
    }

    /// Accepts bytes of a response to the READ `number`, from byte `skip` of it on, as far as they are for device memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn land_response(
        &mut self,
        shared: &mut Shared,
        number: u32,
        (skip, data): (u32, &[u8]),
    ) -> Result<(), NoRoom> {
        self.stage(shared);
        let handle = self.handle;
        let Some(staged) = &mut self.staged else { return Ok(()) };
        let parts = parts(shared, self.sq.sges(number), (skip, data), false);
        staged.responses.take(shared, handle, &parts, (Psn::default(), 0))
    }

    /// How many packets of a READ may be requested, of `packets` from `psn` on: all, unless they are for device memory and
    /// there are fewer chunks. `None` if there are none now. Without selective repeat one part of a READ is requested at a
    /// time.
    #[cold]
    #[inline(never)]
    pub(crate) fn reserve_read(
        &mut self,
        shared: &mut Shared,
        number: u32,
        psn: Psn,
        packets: u32,
    ) -> Option<u32> {
        let devices = shared.mrs.devices(self.sq.sges(number));
        if self.sq.wqe(number).length == 0 || devices == 0 {
            return Some(packets);
        }
        let (is_later, is_selective) = (psn != self.sq.wqe(number).first_psn, self.selective.is_some());
        if is_later && !is_selective && psn != self.requester.una() {
            return None;
        }
        let shift = self.path_mtu()?.shift();
        self.stage(shared);
        let (handle, now) = (self.handle, shared.now);
        let asked = (psn, packets, shift);
        let Staged { responses, sends, .. } = &mut **self.staged.as_mut()?;
        let mut reserved = responses.reserve(&mut shared.staging, now, (handle, devices), asked);
        // With selective repeat a repeated READ delays nothing.
        let holds_up = !is_selective || psn.distance(self.requester.sent()) >= 0;
        if reserved.is_none() && number == self.sq.head() && holds_up && !sends.is_copying() {
            // The sends after it may hold the chunks, and wait for it.
            self.give_up_sends(shared);
            let responses = &mut self.staged.as_mut()?.responses;
            reserved = responses.reserve(&mut shared.staging, now, (handle, devices), asked);
        }
        // Selective repeat has its own parts, and requests again what found no chunk.
        if is_selective { reserved.map(|_| packets) } else { reserved }
    }

    /// Releases chunks reserved for READs that are not needed.
    #[cold]
    #[inline(never)]
    pub(crate) fn settle_reads(&mut self, shared: &mut Shared) {
        let una = self.requester.una();
        if let Some(staged) = &mut self.staged {
            staged.responses.settle(&mut shared.staging, una);
        }
    }

    /// Whether data of READs is not there yet.
    pub(crate) fn is_fetching(&self) -> bool {
        self.staged.as_ref().is_some_and(|staged| !staged.responses.is_idle())
    }

    /// The PSN before which everything was executed and is visible, and the messages complete before it.
    #[inline(always)]
    pub(crate) fn visible(&self) -> (Psn, u32) {
        match &self.staged {
            None => self.this_request(),
            Some(staged) => staged.requests.invisible().unwrap_or_else(|| self.this_request()),
        }
    }

    /// Whether the data of some executed requests is not visible.
    #[inline(always)]
    pub(crate) fn is_landing(&self) -> bool {
        match &self.staged {
            None => false,
            Some(staged) => !staged.requests.is_idle(),
        }
    }

    /// The PSN before which everything may be acknowledged, and the messages complete before it; `None` if the owed
    /// acknowledgement must wait for bytes that are not there yet or for a response before it.
    #[cold]
    #[inline(never)]
    pub(crate) fn acknowledgeable(&mut self) -> Option<(Psn, u32)> {
        if self.may_owe_response() {
            return None;
        }
        let all = self.this_request();
        // A selective acknowledgement would report invisible packets as missing, and request the refused one.
        let is_selective = self.selective.as_ref().is_some_and(|selective| selective.reorder.gap);
        let is_refused = self.refused_request().is_some();
        let requests = &mut self.staged.as_mut()?.requests;
        let visible = requests.invisible().unwrap_or(all);
        if visible == all && !(is_selective && is_refused) {
            return Some(all);
        }
        // It is owed again when more is there.
        requests.asked = true;
        if is_selective || visible.0.distance(requests.acknowledged) <= 0 {
            self.responder.forget_ack();
            return None;
        }
        Some(visible)
    }

    /// A request that finds too few chunks is requested again when there are enough, unless the peer does not retransmit
    /// it.
    fn await_chunks(&mut self, shared: &mut Shared, taken: Result<(), NoRoom>) -> Result<(), NoRoom> {
        match taken {
            Ok(()) => {}
            Err(NoRoom(chunks)) if self.service == Service::Rc => self.await_what(Awaits::Chunks(chunks)),
            Err(NoRoom(_)) => shared.staging.waiting.leave(self.handle, Purpose::Requests),
        }
        taken
    }

    /// A request is refused, and requested again when it can be accepted.
    fn await_what(&mut self, awaits: Awaits) {
        if let Some(staged) = &mut self.staged {
            staged.requests.want();
            let repeats = staged.refused.as_ref().map_or(0, |refused| refused.repeats.saturating_add(1));
            staged.refused = Some(Refused { awaits, repeats });
        }
    }

    /// The refused request has arrived again and was accepted.
    pub(crate) fn end_wait_for_request(&mut self, shared: &mut Shared) {
        if let Some(staged) = &mut self.staged {
            (staged.refused, staged.asked_for) = (None, None);
            shared.staging.waiting.leave(self.handle, Purpose::Requests);
            shared.staging.end_promise(self.handle);
            staged.requests.give_up_parts(&mut shared.staging);
        }
    }

    /// Whether the refused request was retransmitted so often without success that the peer must be notified.
    pub(crate) fn is_refused_again(&self) -> bool {
        self.refused_request().is_some_and(|refused| refused.repeats >= REPEATS)
    }

    fn refused_request(&self) -> Option<&Refused> {
        self.staged.as_ref()?.refused.as_ref()
    }

    /// Keeps chunks for a request that found too few, and requests it again: otherwise others would take them before it
    /// arrives.
    pub(crate) fn feed(&mut self, shared: &mut Shared) {
        let (handle, now) = (self.handle, shared.now);
        let Some(&Refused { awaits: Awaits::Chunks(chunks), .. }) = self.refused_request() else { return };

        let Some(staged) = &mut self.staged else { return };
        if staged.requests.keep(&mut shared.staging, now, handle, chunks) {
            staged.refused = None;
            shared.staging.promise(now, handle);
            let expected = self.responder.expected_psn();
            // Requesters ignore a second NAK for the same packet.
            if staged.asked_for.replace(expected) == Some(expected) {
                self.refuse_for_now(shared, Duration::ZERO);
            } else {
                self.ask_again(shared);
            }
        }
    }

    /// The peer has not retransmitted the requested packet.
    pub(crate) fn give_back_chunks(&mut self, shared: &mut Shared) {
        if let Some(staged) = &mut self.staged {
            staged.requests.give_up_parts(&mut shared.staging);
        }
    }

    /// A NAK waits for executed requests to become visible.
    #[cold]
    pub(crate) fn want_visible(&mut self) {
        if let Some(staged) = &mut self.staged {
            staged.requests.want();
        }
    }

    /// Delays a completion that must not precede bytes which are not there yet.
    #[cold]
    #[inline(never)]
    pub(crate) fn defer(&mut self, cq: Cq, wc: WorkCompletion, solicited: bool) -> bool {
        let Some(staged) = &mut self.staged else { return false };
        let is_receive = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        let landing = if is_receive { &mut staged.requests } else { &mut staged.responses };
        landing.defer(cq, wc, (solicited, true))
    }

    /// As [`defer`](QueuePair::defer), for a READ that completes visibly only if its bytes can't be copied.
    #[cold]
    #[inline(never)]
    pub(crate) fn defer_unsignaled(&mut self, wc: WorkCompletion) {
        let cq = self.send_cq;
        if let Some(staged) = self.staged.as_mut().filter(|_| wc.opcode == WcOpcode::RdmaRead) {
            staged.responses.defer(cq, wc, (false, false));
        }
    }

    /// LOCAL_INV: access ends immediately, and it is complete when no data received with the key is being copied any more.
    /// `None` until then.
    pub(crate) fn invalidate(&mut self, shared: &mut Shared, rkey: RKey) -> Option<Result<(), RemoteAccess>> {
        let waits = self.staged.as_mut().and_then(|staged| staged.invalidated.take());
        let region = match waits {
            Some(region) => Some(region),
            None => {
                let region = shared.mrs.region_of(rkey);
                if let Err(refused) = shared.mrs.invalidate(self.pd, self.handle, rkey, Access::NONE) {
                    return Some(Err(refused));
                }
                region
            }
        };
        let Some(region) = region.filter(|region| shared.mrs.is_copied(*region)) else { return Some(Ok(())) };
        self.stage(shared);
        if let Some(staged) = &mut self.staged {
            staged.invalidated = Some(region);
        }
        shared.staging.note_open(self.handle, false);
        None
    }

    /// Starts the copies that are due.
    pub(crate) fn start_copies(&mut self, shared: &mut Shared) -> CopiesLeft {
        let handle = self.handle;
        let Some(staged) = &mut self.staged else { return CopiesLeft::None };
        let left = staged.requests.start_copies(shared, handle);
        let left = left.max(staged.responses.start_copies(shared, handle));
        self.land_ended(shared);
        if self.staged.as_ref().is_some_and(|staged| staged.invalidated.is_some()) {
            self.schedule(shared);
            return left.max(CopiesLeft::Later);
        }
        left
    }

    /// A copy has ended.
    pub(crate) fn copy_ended(&mut self, shared: &mut Shared, copy: &EndedCopy) {
        if let Some(failure) = &copy.failure
            && self.state != QpState::Error
        {
            // Later events on this queue pair are consequences of this error.
            tracing::error!(
                "QP {}: a copy of what it {} has failed: {failure}",
                self.qpn,
                copy.purpose.does()
            );
        }
        let (number, succeeded) = (copy.number, copy.failure.is_none());
        let Some(staged) = &mut self.staged else { return };
        match copy.purpose {
            Purpose::Sends => staged.sends.ended(number, succeeded),
            Purpose::Answers => staged.answers.ended(number, succeeded),
            Purpose::Requests => staged.requests.ended(number, succeeded),
            Purpose::Responses | Purpose::Awaited => staged.responses.ended(number, succeeded),
        }
        match copy.purpose {
            Purpose::Sends | Purpose::Answers => self.schedule(shared),
            Purpose::Requests | Purpose::Responses | Purpose::Awaited => self.land_ended(shared),
        }
        self.settle(shared);
    }

    /// Delivers completions for copied data.
    fn land_ended(&mut self, shared: &mut Shared) {
        let Some(staged) = &mut self.staged else { return };
        let was_fetching = !staged.responses.is_idle();
        let mut landed = false;
        for landing in [&mut staged.requests, &mut staged.responses] {
            while landing.pop_ended(shared).is_some() {
                landed = true;
            }
        }
        let failed = (staged.requests.has_failed(), staged.responses.has_failed());
        self.complete_landed(shared);
        match failed {
            (true, _) => self.fail_request_copy(shared),
            (_, true) => self.fail_response_copy(shared),
            _ => {}
        }
        if failed != (false, false) {
            // The batch at the front may have ended long ago.
            return self.land_ended(shared);
        }
        if landed {
            let asked = self.staged.as_mut().is_some_and(|staged| staged.requests.asked);
            if asked {
                if let Some(staged) = &mut self.staged {
                    staged.requests.asked = !staged.requests.is_idle();
                }
                self.owe_ack(shared);
            }
            if was_fetching && !self.is_fetching() {
                self.note_drained(shared);
            }
            self.schedule(shared);
        }
        self.end_landing(shared);
    }

    /// The actions that wait until all copies have ended.
    fn end_landing(&mut self, shared: &mut Shared) {
        let Some(staged) = self.staged.as_mut().filter(|staged| staged.requests.is_idle()) else { return };
        if std::mem::take(&mut staged.owes_last_wqe) {
            shared.raise(Event::QpLastWqeReached(self.handle));
        }
        if staged.refused.take_if(|refused| refused.awaits == Awaits::Landing).is_some() {
            self.ask_again(shared);
        }
    }

    /// A request that changes host memory immediately must wait until all copies have ended: it is requested again then.
    #[cold]
    pub(crate) fn await_landing(&mut self) -> RequestRefusal {
        self.await_what(Awaits::Landing);
        RequestRefusal::NoRoom
    }

    /// No receive of an SRQ will complete any more, now or after the ones that wait for their bytes.
    pub(crate) fn end_receives(&mut self, shared: &mut Shared) {
        match self.staged.as_mut().filter(|staged| staged.requests.keeps_completions()) {
            Some(staged) => staged.owes_last_wqe = true,
            None => shared.raise(Event::QpLastWqeReached(self.handle)),
        }
    }

    /// Delivers completions that need not wait any more.
    fn complete_landed(&mut self, shared: &mut Shared) {
        while let Some(staged) = &mut self.staged {
            let next = staged.requests.pop_completion().or_else(|| staged.responses.pop_completion());
            let Some((cq, wc, solicited)) = next else { return };
            self.push_now(shared, cq, wc, solicited);
        }
    }

    /// Bytes of a request can't be copied: treated as a fault of the receive's memory.
    fn fail_request_copy(&mut self, shared: &mut Shared) {
        let (mut psn, mut msn) = self.visible();
        // An earlier failure may have undone more.
        if psn.distance(self.responder.expected_psn()) > 0 {
            (psn, msn) = self.this_request();
        }
        let Some(staged) = &mut self.staged else { return };
        let told = staged.requests.give_up(&mut shared.staging, WcStatus::FatalErr);
        shared.count(Counter::RespRemoteOperationalErrors);
        // An acknowledgement, a response or another NAK that was owed is no longer correct.
        let tells = self.responder.go_back_to(psn, msn);
        let has_failed = self.state == QpState::Error;
        if self.service == Service::Rc && (tells || !has_failed) {
            self.owe_nak(shared, Syndrome::Nak(Nak::RemoteOperationalError));
        }
        // Before the flushed ones.
        self.complete_landed(shared);
        match (has_failed, told) {
            (true, _) => {}
            (false, true) => self.enter_error(shared),
            (false, false) => self.fail_receive(shared, WcStatus::FatalErr, Event::QpFatal(self.handle)),
        }
        // The NAK may have waited for a copy that has failed as well.
        self.schedule(shared);
    }

    /// Bytes of a response can't be copied: the READ fails.
    fn fail_response_copy(&mut self, shared: &mut Shared) {
        let Some(staged) = &mut self.staged else { return };
        let told = staged.responses.give_up(&mut shared.staging, WcStatus::FatalErr);
        // Before the flushed ones.
        self.complete_landed(shared);
        if self.state != QpState::Error {
            if told {
                self.responder.give_up();
                self.enter_error(shared);
            } else {
                self.fail_oldest(shared, WcStatus::FatalErr);
            }
        }
    }

    /// Others need the chunks that it holds for its own requests.
    #[cold]
    pub(crate) fn yield_room(&mut self, shared: &mut Shared, purpose: Purpose) {
        match (purpose, &mut self.staged) {
            (Purpose::Sends, _) => self.give_up_sends(shared),
            (Purpose::Awaited, Some(staged)) => drop(staged.responses.yield_parts(&mut shared.staging)),
            _ => {}
        }
    }

    /// The queue pair has failed. Data of executed requests is copied nevertheless, because a NAK acknowledges them;
    /// flushed work requests complete after that.
    #[cold]
    pub(crate) fn finish_staged(&mut self, shared: &mut Shared) {
        let owes = self.may_owe_response();
        let Some(staged) = &mut self.staged else { return };
        staged.requests.want();
        staged.responses.want();
        staged.requests.give_up_parts(&mut shared.staging);
        staged.responses.give_up_parts(&mut shared.staging);
        if !owes {
            staged.answers.give_up(&mut shared.staging);
        }
        shared.staging.waiting.leave_all(self.handle);
    }

    /// The posted work requests are flushed.
    #[cold]
    pub(crate) fn restart_sends(&mut self, shared: &mut Shared) {
        let head = self.sq.head();
        if let Some(staged) = &mut self.staged {
            staged.sends.restart(&mut shared.staging, head, 0);
            staged.invalidated = None;
        }
    }

    /// The queue pair is reset or destroyed.
    #[cold]
    pub(crate) fn drop_staged(&mut self, shared: &mut Shared) {
        if let Some(mut staged) = self.staged.take() {
            staged.requests.reset(&mut shared.staging);
            staged.responses.reset(&mut shared.staging);
            staged.answers.give_up(&mut shared.staging);
            staged.sends.restart(&mut shared.staging, 0, 0);
            shared.staging.forget(self.handle);
        }
    }
}

/// The destinations of bytes from byte `skip` of a list of pieces on, as far as they are device memory; also host memory,
/// if requested.
fn parts<'a>(
    shared: &Shared,
    sges: &[Sge],
    (skip, data): (u32, &'a [u8]),
    with_host: bool,
) -> ArrayVec<(LandingPlace, &'a [u8]), MAX_PIECES> {
    let mut rest = data;
    let mut parts = ArrayVec::new();
    for (mr, offset, len) in crate::engine::mr::parts(sges, skip, data.len()) {
        let (part, behind) = rest.split_at(len.min(rest.len()));
        let place = shared.mrs.place_at(mr, offset);
        parts.extend(place.filter(|place| with_host || place.copier.is_some()).map(|place| (place, part)));
        rest = behind;
    }
    parts
}
