//! Responses of a queue pair from device memory: the data of a peer's READs, gathered in advance.

use std::collections::VecDeque;

use ferroce_driver::Span;
use ferroce_wire::{Aeth, Bth, Extension, Opcode, PathMtu, Psn, RKey, Syndrome};

use super::stream::{Stream, Taken};
use super::{Purpose, StagingPool};
use crate::engine::frame_slot::FrameSlot;
use crate::engine::mr::MemoryRegions;
use crate::engine::outcome::{Answer, Outcome, Outcomes};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{Access, Pd, Qp};

/// The bytes of the owed outcomes, in the order in which they are sent.
pub(crate) struct Answers {
    stream: Stream,
    planned: VecDeque<Planned>,
}

/// An outcome whose bytes are being gathered.
struct Planned {
    /// The next packet to send.
    next: Psn,
    /// The position of its bytes in the stream.
    position: u64,
    /// Copies were started for everything before it, counted from the first byte of the READ.
    offset: u32,
    limit: u32,
    va: u64,
    rkey: RKey,
}

impl Planned {
    /// Whether it is this outcome as it is owed now; the peer may have requested another part meanwhile.
    fn is_of(&self, outcome: &Outcome) -> bool {
        let Answer::Read { va, rkey, .. } = outcome.answer else { return false };
        outcome.owes(self.next, self.limit) && (va, rkey) == (self.va, self.rkey)
    }
}

/// Whether the bytes of a packet are there.
enum AnswerState {
    /// From this position on.
    There(u64),
    Coming,
    Failed,
}

/// The outcomes of the queue pair, and the first packet whose execution is not visible.
struct OwedAnswers<'a> {
    outcomes: &'a Outcomes,
    invisible: Option<Psn>,
}

impl OwedAnswers<'_> {
    /// The owed outcomes after `last` that may be answered, in order.
    fn behind(&self, last: &Planned) -> impl Iterator<Item = &Outcome> {
        let is_visible = |next: &&Outcome| self.invisible.is_none_or(|psn| next.first_psn.distance(psn) <= 0);
        let order = self.outcomes.owed().take_while(is_visible);
        order.skip_while(|outcome| !last.is_of(outcome)).skip(1)
    }
}

/// The result of a turn to send an outcome of device memory.
pub(crate) enum FromDevice {
    Frame(usize),
    /// The bytes are not there yet, or there is no room for the frame.
    Nothing,
    Failed,
}

/// The most outcomes that are gathered in advance.
const PLANNED_MAX: usize = 16;

impl Answers {
    pub(crate) fn new(qp: Qp, pool: &StagingPool) -> Answers {
        Answers {
            stream: Stream::new((qp, Purpose::Answers), pool),
            planned: VecDeque::with_capacity(PLANNED_MAX),
        }
    }

    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) {
        self.stream.ended(number, succeeded);
    }

    /// Nothing is owed any more.
    pub(crate) fn give_up(&mut self, pool: &mut StagingPool) {
        self.stream.give_up(pool);
        self.planned.clear();
    }

    /// Looks up the bytes of the next packet of `outcome`, and starts copies of them and of the following ones.
    fn look_for(
        &mut self,
        shared: &mut Shared,
        (qp, pd): (Qp, Pd),
        (outcome, owed): (&Outcome, &OwedAnswers<'_>),
        (path_mtu, bytes): (PathMtu, u32),
    ) -> AnswerState {
        if self.planned.front().is_none_or(|planned| !planned.is_of(outcome)) {
            // The peer requests another part.
            self.give_up(&mut shared.staging);
            self.plan(&shared.staging, outcome, path_mtu);
        }
        // Includes the rest at the end of a chunk, which would otherwise stay while another chunk is waited for.
        let sent = self.planned.front().map_or(0, |planned| planned.position);
        self.stream.free(&mut shared.staging, sent);
        self.gather(shared, (qp, pd), owed, path_mtu);
        let Some(Planned { position, .. }) = self.planned.front() else { return AnswerState::Failed };
        let end = position + u64::from(bytes);
        if self.stream.lacks(end) {
            return AnswerState::Failed;
        }
        if self.stream.has(end) { AnswerState::There(*position) } else { AnswerState::Coming }
    }

    fn plan(&mut self, pool: &StagingPool, outcome: &Outcome, path_mtu: PathMtu) {
        if let Answer::Read { va, rkey, .. } = outcome.answer {
            let (offset, limit) = outcome.rest(path_mtu);
            self.stream.begin(pool, limit - offset);
            let (next, position) = (outcome.next_psn(), self.stream.end());
            self.planned.push_back(Planned { next, position, offset, limit, va, rkey });
        }
    }

    /// Starts copies for what is owed, as far as there is room.
    fn gather(&mut self, shared: &mut Shared, (qp, pd): (Qp, Pd), owed: &OwedAnswers<'_>, path_mtu: PathMtu) {
        let has_device = |mrs: &MemoryRegions, outcome: &&Outcome| match outcome.answer {
            Answer::Read { va, rkey, length: 1.. } => {
                let grant = mrs.grant(pd, qp, rkey, Access::REMOTE_READ, va, 1);
                grant.is_ok_and(|grant| mrs.granted(grant).is_none())
            }
            _ => false,
        };
        loop {
            let has_room = self.planned.len() < PLANNED_MAX;
            let Some(last) = self.planned.back_mut() else { return };
            if last.offset == last.limit {
                let next = owed.behind(last).find(|outcome| has_device(&shared.mrs, outcome));
                let Some(next) = next.filter(|_| has_room) else { return };
                self.plan(&shared.staging, next, path_mtu);
                continue;
            }
            let Shared { staging, mrs, now, .. } = shared;
            let (va, rest) = (last.va.wrapping_add(last.offset.into()), last.limit - last.offset);
            let Ok(grant) = mrs.grant(pd, qp, last.rkey, Access::REMOTE_READ, va, rest) else { return };
            let Some(room) = self.stream.room(staging, *now) else { return };
            let source = mrs.granted_source(grant, room.len);
            match self.stream.take(staging, *now, room, source) {
                Taken::Bytes(bytes) => last.offset += bytes.min(rest),
                Taken::Nothing => return,
            }
        }
    }

    /// The packet that was looked up was sent.
    fn advance(&mut self, pool: &mut StagingPool, bytes: u32, is_over: bool) {
        let Some(planned) = self.planned.front_mut() else { return };
        planned.next += 1;
        planned.position += u64::from(bytes);
        self.stream.free(pool, planned.position);
        if is_over {
            self.planned.pop_front();
        }
    }

    fn span<'a>(&self, pool: &'a StagingPool, position: u64, bytes: u32) -> Option<Span<'a>> {
        self.stream.span(pool, position, bytes as usize)
    }
}

impl QueuePair {
    /// Nothing is owed: the gathered bytes are not needed.
    #[cold]
    pub(crate) fn settle_answers(&mut self, shared: &mut Shared) {
        if let Some(staged) = &mut self.staged {
            staged.answers.give_up(&mut shared.staging);
        }
    }

    /// Writes the next packet of the oldest owed outcome, which reads device memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn write_from_device(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
        (opcode, bytes): (Opcode, u32),
    ) -> FromDevice {
        self.stage(shared);
        let (Some(connection), Some(staged)) = (&self.connection, &mut self.staged) else {
            return FromDevice::Nothing;
        };
        let outcomes = &mut self.responder.outcomes;
        let Some(outcome) = outcomes.next_owed().copied() else { return FromDevice::Nothing };
        let invisible = staged.requests.invisible().map(|(psn, _)| psn);
        let answers = &mut staged.answers;
        let (owner, owed) = ((self.handle, self.pd), OwedAnswers { outcomes, invisible });
        let position = match answers.look_for(shared, owner, (&outcome, &owed), (connection.path_mtu, bytes))
        {
            AnswerState::There(position) => position,
            AnswerState::Coming => return FromDevice::Nothing,
            AnswerState::Failed => return FromDevice::Failed,
        };
        let bth = Bth::new(opcode, connection.dest_qpn, outcome.next_psn()).in_partition(self.pkey);
        let Some(mut frame) = slot.start(&connection.header, bth, bytes as usize) else {
            return FromDevice::Nothing;
        };
        if opcode.has(Extension::Aeth) {
            frame.put(&Aeth::new(Syndrome::ACK, outcome.msn));
        }
        let written = frame.fill(shared.crc, answers.span(&shared.staging, position, bytes).into_iter());
        if let Some(outcome) = outcomes.next_owed() {
            outcome.advance();
            answers.advance(&mut shared.staging, bytes, !outcome.is_owed());
        }
        shared.count(Counter::SentPkts);
        FromDevice::Frame(slot.end(written))
    }
}
