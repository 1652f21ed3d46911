//! What a queue pair answers from memory of a device: the responses to a peer's READs, gathered ahead.

use std::collections::VecDeque;

use ferroce_driver::Span;
use ferroce_wire::{Aeth, Bth, Extension, Opcode, PathMtu, Psn, RKey, Syndrome};

use super::stream::{Stream, Taken};
use super::{Purpose, StagingPool};
use crate::engine::frame_slot::FrameSlot;
use crate::engine::outcome::{Answer, Outcome, Outcomes};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{Access, Pd, Qp};

/// The bytes of the outcomes that are owed, in the order in which they are sent.
pub(crate) struct Answers {
    stream: Stream,
    planned: VecDeque<Planned>,
}

/// An outcome whose bytes are being gathered.
struct Planned {
    first_psn: Psn,
    /// The packet that is sent next.
    next: Psn,
    /// Where its bytes are in the stream.
    position: u64,
    /// Copies were started for everything before it; it counts from the first byte of the READ.
    offset: u32,
    limit: u32,
    va: u64,
    rkey: RKey,
}

/// Whether the bytes of a packet are there.
enum AnswerState {
    /// From this position on.
    There(u64),
    Coming,
    Failed,
}

/// The outcomes of the queue pair, and the packet from which on what was executed is not visible.
struct OwedReads<'a> {
    outcomes: &'a Outcomes,
    invisible: Option<Psn>,
}

impl OwedReads<'_> {
    /// The READ behind that at `psn` that may be answered.
    fn read_after(&self, psn: Psn) -> Option<&Outcome> {
        let is_visible = |next: &&Outcome| self.invisible.is_none_or(|psn| next.first_psn.distance(psn) <= 0);
        self.outcomes.read_after(psn).filter(is_visible)
    }
}

/// What came of a turn to send an outcome of a device's memory.
pub(crate) enum FromDevice {
    Frame(usize),
    /// The bytes are not there yet, or there is no room for the frame.
    Nothing,
    Failed,
}

/// Outcomes that are gathered ahead.
const PLANNED_MAX: usize = 16;

impl Answers {
    pub(crate) fn new(pool: &StagingPool) -> Answers {
        Answers { stream: Stream::new(Purpose::Answers, pool), planned: VecDeque::with_capacity(PLANNED_MAX) }
    }

    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) {
        self.stream.ended(number, succeeded);
    }

    /// Nothing is owed any more.
    pub(crate) fn give_up(&mut self, pool: &mut StagingPool) {
        self.stream.give_up(pool);
        self.planned.clear();
    }

    /// Looks for the bytes of the packet that `outcome` owes next, and has them and what follows copied.
    fn look_for(
        &mut self,
        shared: &mut Shared,
        (qp, pd): (Qp, Pd),
        (outcome, behind): (&Outcome, &OwedReads<'_>),
        (path_mtu, bytes): (PathMtu, u32),
    ) -> AnswerState {
        let psn = outcome.next_psn();
        if self.planned.front().is_none_or(|planned| planned.next != psn) {
            // The peer asks for something else.
            self.give_up(&mut shared.staging);
            self.plan(&shared.staging, outcome, path_mtu);
        }
        self.gather(shared, (qp, pd), behind, path_mtu);
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
            let (first_psn, next, position) = (outcome.first_psn, outcome.next_psn(), self.stream.end());
            self.planned.push_back(Planned { first_psn, next, position, offset, limit, va, rkey });
        }
    }

    /// Starts copies for what is owed, as far as there is room.
    fn gather(&mut self, shared: &mut Shared, (qp, pd): (Qp, Pd), behind: &OwedReads<'_>, path_mtu: PathMtu) {
        loop {
            let has_room = self.planned.len() < PLANNED_MAX;
            let Some(last) = self.planned.back_mut() else { return };
            if last.offset == last.limit {
                let Some(next) = behind.read_after(last.first_psn).filter(|_| has_room) else { return };
                self.plan(&shared.staging, next, path_mtu);
                continue;
            }
            let Shared { staging, mrs, now, .. } = shared;
            let (va, rest) = (last.va.wrapping_add(last.offset.into()), last.limit - last.offset);
            let Ok(grant) = mrs.grant(pd, qp, last.rkey, Access::REMOTE_READ, va, rest) else { return };
            let Some(room) = self.stream.room(staging, *now, qp) else { return };
            let source = mrs.granted_source(grant, room.len);
            match self.stream.take(staging, *now, qp, room, source) {
                Taken::Bytes(bytes) => last.offset += bytes.min(rest),
                Taken::Nothing => return,
            }
        }
    }

    /// The packet that was looked for was sent.
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
    /// Writes the next packet of the oldest outcome that is owed, which reads memory of a device.
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
        let (owner, behind) = ((self.handle, self.pd), OwedReads { outcomes, invisible });
        let position =
            match answers.look_for(shared, owner, (&outcome, &behind), (connection.path_mtu, bytes)) {
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
