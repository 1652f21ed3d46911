//! The responses to READs, atomics, FLUSHes and ATOMIC WRITEs: those that are owed, and those that were sent and are kept,
//! so that a duplicate request can be answered without executing it again (docs/protocol.md §5).

use std::collections::VecDeque;

use ferroce_wire::{Opcode, Operation, PathMtu, Psn, RKey, Reth};

#[derive(Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) first_psn: Psn,
    pub(crate) packets: u32,
    pub(crate) msn: u32,
    pub(crate) answer: Answer,
    under_way: Part,
    /// The next packet to send.
    next: u32,
    /// All of it was sent once: if it is owed now, it answers a duplicate.
    answered: bool,
}

#[derive(Clone, Copy)]
pub(crate) enum Answer {
    /// From memory, as of the time when it is sent.
    Read {
        va: u64,
        rkey: RKey,
        length: u32,
    },
    Atomic {
        original: u64,
    },
    /// FLUSH and ATOMIC WRITE: an empty READ response.
    Done,
}

/// The packets of an outcome that are to be sent.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    start: u32,
    end: u32,
    /// The end of a READ's bytes, counted from the start of the whole.
    limit: u32,
}

impl Outcome {
    /// For a request that was just executed; all of it is owed.
    pub(crate) fn new(first_psn: Psn, packets: u32, msn: u32, answer: Answer) -> Outcome {
        let limit = if let Answer::Read { length, .. } = answer { length } else { 0 };
        let under_way = Part { start: 0, end: packets, limit };
        Outcome { first_psn, packets, msn, answer, under_way, next: 0, answered: false }
    }

    pub(crate) fn is_owed(&self) -> bool {
        self.next < self.under_way.end
    }

    /// Whether all of it was sent to the peer.
    pub(crate) fn is_answered(&self) -> bool {
        self.answered
    }

    /// The PSN of the next packet to send.
    pub(crate) fn next_psn(&self) -> Psn {
        self.first_psn + self.next
    }

    /// The opcode, offset and length of the next READ response packet.
    pub(crate) fn next_read_packet(&self, path_mtu: PathMtu) -> (Opcode, u32, u32) {
        let Part { start, end, limit } = self.under_way;
        let opcode = match (self.next == start, self.next + 1 == end) {
            (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
            (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
            (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
            (false, true) => Opcode::RC_READ_RESPONSE_LAST,
        };
        let offset = self.next << path_mtu.shift();
        (opcode, offset, (limit - offset).min(path_mtu.bytes()))
    }

    /// The start and end of the bytes of a READ that are still owed, counted from its first one.
    pub(crate) fn rest(&self, path_mtu: PathMtu) -> (u32, u32) {
        (self.next << path_mtu.shift(), self.under_way.limit)
    }

    /// Whether these bytes of a READ are owed from the packet at `psn` on.
    pub(crate) fn owes(&self, psn: Psn, limit: u32) -> bool {
        self.next_psn() == psn && self.under_way.limit == limit
    }

    /// A packet was sent.
    pub(crate) fn advance(&mut self) {
        self.next += 1;
        self.answered |= !self.is_owed();
    }

    /// Cancels all that is owed.
    pub(crate) fn abandon(&mut self) {
        self.next = self.under_way.end;
    }

    /// The part that a duplicate request at `psn` asks for, if it matches: of a READ, the rest from there on or a part of
    /// it, under the same key.
    pub(crate) fn part_for(
        &self,
        operation: Operation,
        reth: Option<&Reth>,
        psn: Psn,
        path_mtu: PathMtu,
    ) -> Option<Part> {
        let start = psn.distance(self.first_psn) as u32;
        match (self.answer, operation) {
            (Answer::Read { va, rkey, length }, Operation::ReadRequest) => {
                let (reth, offset) = (reth?, start << path_mtu.shift());
                let (wanted, rest) = (reth.length(), length.saturating_sub(offset));
                let same = reth.rkey() == rkey && Some(reth.va()) == va.checked_add(offset.into());
                let part = Part {
                    start,
                    end: start + path_mtu.packets(wanted),
                    limit: offset.saturating_add(wanted),
                };
                (same && wanted <= rest && (wanted > 0 || rest == 0)).then_some(part)
            }
            (Answer::Atomic { .. }, Operation::CompareSwap | Operation::FetchAdd)
            | (Answer::Done, Operation::Flush | Operation::AtomicWrite) => {
                Some(Part { start, end: self.packets, limit: 0 })
            }
            _ => None,
        }
    }

    fn covers(&self, psn: Psn) -> bool {
        let distance = psn.distance(self.first_psn);
        distance >= 0 && (distance as u32) < self.packets
    }
}

/// As many as the peer may have outstanding, the oldest first.
#[derive(Default)]
pub(crate) struct Outcomes {
    ring: VecDeque<Outcome>,
    /// The number of oldest ones of which nothing is owed.
    paid: usize,
    depth: usize,
    /// Parts that are owed again to a peer that uses selective repeat, in the order of its requests: it considers earlier
    /// requests lost when a later one is answered.
    repairs: VecDeque<Repair>,
    /// Some may be owed; avoids a search.
    maybe_owed: bool,
}

struct Repair {
    /// Complete except for the owed part.
    outcome: Outcome,
    /// The MSN at the time of the request: outcomes up to it are sent first.
    after: u32,
}

impl Repair {
    /// Whether it is sent before this one, the oldest owed outcome that is not a repair.
    fn precedes(&self, owed: Option<&Outcome>) -> bool {
        owed.is_none_or(|owed| later(owed.msn, self.after))
    }
}

/// More than the holes in a peer's READs; requests beyond will be repeated.
const MAX_REPAIRS: usize = 64;

/// More requests are outstanding than the peer was allowed.
pub(crate) struct TooMany;

impl Outcomes {
    pub(crate) fn new(depth: u8, selective_repeat: bool) -> Outcomes {
        let depth = usize::from(depth);
        let repairs = VecDeque::with_capacity(if selective_repeat { MAX_REPAIRS } else { 0 });
        Outcomes { ring: VecDeque::with_capacity(depth), paid: 0, depth, repairs, maybe_owed: false }
    }

    /// For a new connection. Existing memory is reused.
    pub(crate) fn renewed(mut self, depth: u8, selective_repeat: bool) -> Outcomes {
        self.ring.clear();
        if selective_repeat {
            return Outcomes::new(depth, true);
        }
        self.resize(depth);
        Outcomes { ring: self.ring, depth: self.depth, ..Outcomes::default() }
    }

    /// Removes the oldest, if all places are taken. An outcome that was never sent is live, and a peer with more of those
    /// than allowed violates the contract. One that is owed again is not live: a peer that sends a new request has received
    /// the answer.
    pub(crate) fn make_room(&mut self) -> Result<(), TooMany> {
        while self.ring.len() >= self.depth {
            match self.ring.front() {
                Some(oldest) if oldest.answered => self.ring.pop_front(),
                _ => return Err(TooMany),
            };
            self.paid = self.paid.saturating_sub(1);
        }
        Ok(())
    }

    /// How many are kept.
    pub(crate) fn depth(&self) -> u8 {
        self.depth as u8
    }

    /// Keeps `depth` from now on. Existing outcomes stay until their place is needed.
    pub(crate) fn resize(&mut self, depth: u8) {
        self.depth = usize::from(depth);
        let more = self.depth.saturating_sub(self.ring.len());
        self.ring.reserve(more);
    }

    /// Adds an outcome that is owed now; there is room for it.
    pub(crate) fn push(&mut self, outcome: Outcome) {
        self.ring.push_back(outcome);
        self.maybe_owed = true;
    }

    /// The latest outcome at `psn`: one may be kept so long that PSNs wrap.
    pub(crate) fn at(&self, psn: Psn) -> Option<&Outcome> {
        self.ring.iter().rev().find(|outcome| outcome.covers(psn))
    }

    /// Owes `part` of the outcome at `psn` once more.
    pub(crate) fn replay(&mut self, psn: Psn, part: Part) {
        if let Some(index) = self.ring.iter().rposition(|outcome| outcome.covers(psn)) {
            let outcome = &mut self.ring[index];
            outcome.under_way = part;
            outcome.next = part.start;
            self.paid = self.paid.min(index);
            self.maybe_owed = true;
        }
    }

    /// Owes `part` of the outcome at `psn` in addition to all else; `msn` is the current one.
    pub(crate) fn repair(&mut self, psn: Psn, part: Part, msn: u32) {
        if let Some(outcome) = self.at(psn).copied()
            && self.repairs.len() < MAX_REPAIRS
        {
            let outcome = Outcome { under_way: part, next: part.start, answered: true, ..outcome };
            self.repairs.push_back(Repair { outcome, after: msn });
            self.maybe_owed = true;
        }
    }

    /// Whether one may be owed.
    #[inline]
    pub(crate) fn maybe_owe(&self) -> bool {
        self.maybe_owed
    }

    /// The oldest owed outcome.
    pub(crate) fn next_owed(&mut self) -> Option<&mut Outcome> {
        if !self.maybe_owed {
            return None;
        }
        while self.repairs.front().is_some_and(|repair| !repair.outcome.is_owed()) {
            self.repairs.pop_front();
        }
        while self.ring.get(self.paid).is_some_and(|outcome| !outcome.is_owed()) {
            self.paid += 1;
        }
        let owed = self.ring.get_mut(self.paid);
        let next = match (self.repairs.front_mut(), owed) {
            (Some(repair), owed) if repair.precedes(owed.as_deref()) => Some(&mut repair.outcome),
            (_, owed) => owed,
        };
        self.maybe_owed = next.is_some();
        next
    }

    /// All owed outcomes, in the order in which they are sent.
    pub(crate) fn owed(&self) -> impl Iterator<Item = &Outcome> {
        let mut repairs = self.repairs.iter().filter(|repair| repair.outcome.is_owed()).peekable();
        let mut ring = self.ring.iter().filter(|outcome| outcome.is_owed()).peekable();
        std::iter::from_fn(move || match repairs.next_if(|repair| repair.precedes(ring.peek().copied())) {
            Some(repair) => Some(&repair.outcome),
            None => ring.next(),
        })
    }

    /// Removes those of requests from `psn` on.
    pub(crate) fn forget_from(&mut self, psn: Psn) {
        let is_before = |outcome: &Outcome| outcome.first_psn.distance(psn) < 0;
        self.ring.retain(is_before);
        self.repairs.retain(|repair| is_before(&repair.outcome));
        self.paid = self.paid.min(self.ring.len());
    }

    pub(crate) fn clear(&mut self) {
        self.ring.clear();
        self.paid = 0;
        self.repairs.clear();
        self.maybe_owed = false;
    }
}

/// Whether one MSN is later than another; they wrap like PSNs.
fn later(msn: u32, than: u32) -> bool {
    Psn::new(msn).distance(Psn::new(than)) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written after reviewing the code; from outside the test would need 2²⁴ packets.
    #[test]
    fn a_duplicate_matches_the_latest_outcome_at_its_psn() {
        let mut outcomes = Outcomes::new(2, false);
        let long = Answer::Read { va: 0, rkey: RKey::new(1), length: 1 << 30 };
        outcomes.push(Outcome::new(Psn::new(0xff_0000), 1 << 20, 1, long));
        outcomes.push(Outcome::new(Psn::new(0x00_1000), 1, 2, Answer::Atomic { original: 7 }));
        let found = outcomes.at(Psn::new(0x00_1000)).unwrap();
        assert!(matches!(found.answer, Answer::Atomic { original: 7 }));
        let found = outcomes.at(Psn::new(0x00_1001)).unwrap();
        assert!(matches!(found.answer, Answer::Read { .. }));
        assert!(outcomes.at(Psn::new(0xfe_ffff)).is_none());
    }
}
