//! Requests with their own response: READ, atomics, FLUSH, ATOMIC WRITE. The response is owed, and kept for a duplicate
//! request (`outcome.rs`).

use ferroce_driver::Memory;
use ferroce_wire::{Feth, Operation, Packet, PathMtu, Reth, Selectivity};

use super::{RequestRefusal, Responder};
use crate::engine::outcome::{Answer, Outcome, TooMany};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::Access;

impl QueuePair {
    pub(super) fn execute_read(
        &mut self,
        shared: &mut Shared,
        reth: Option<&Reth>,
        path_mtu: PathMtu,
    ) -> Result<(), RequestRefusal> {
        let Some(reth) = reth else { return Err(RequestRefusal::Invalid) };
        let (va, rkey, length) = (reth.va(), reth.rkey(), reth.length());
        self.make_room_for_outcome()?;
        if length > 0 {
            let grant = shared.mrs.grant(self.pd, self.handle, rkey, Access::REMOTE_READ, va, length);
            grant.map_err(|_| RequestRefusal::Access)?;
        }
        let packets = path_mtu.packets(length);
        shared.count(Counter::RxReadRequests);
        self.responder.count_message();
        self.remember(packets, Answer::Read { va, rkey, length });
        self.responder.expected += packets;
        Ok(())
    }

    pub(super) fn execute_atomic(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
    ) -> Result<(), RequestRefusal> {
        let Some(atomic) = packet.atomic_eth() else { return Err(RequestRefusal::Invalid) };
        if atomic.va() % 8 != 0 {
            return Err(RequestRefusal::Invalid);
        }
        self.make_room_for_outcome()?;
        let grant =
            shared.mrs.grant(self.pd, self.handle, atomic.rkey(), Access::REMOTE_ATOMIC, atomic.va(), 8);
        let grant = grant.map_err(|_| RequestRefusal::Access)?;
        if self.is_landing() {
            return Err(self.await_landing());
        }
        let is_swap = packet.opcode.operation() == Operation::CompareSwap;
        let change = |memory: &mut Memory, at| match is_swap {
            true => memory.compare_swap(at, atomic.compare(), atomic.swap_or_add()),
            false => memory.fetch_add(at, atomic.swap_or_add()),
        };
        let original = shared.mrs.change_word(grant, change).ok_or(RequestRefusal::Invalid)?;
        shared.count(Counter::RxAtomicRequests);
        self.responder.count_message();
        self.remember(1, Answer::Atomic { original });
        Ok(())
    }

    /// Host memory is coherent: earlier writes are visible already, and only the right is checked. Unlike READ and WRITE,
    /// also for a length of 0 (docs/protocol.md §5).
    pub(super) fn execute_flush(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
    ) -> Result<(), RequestRefusal> {
        let (Some(feth), Some(reth)) = (packet.feth(), packet.reth()) else {
            return Err(RequestRefusal::Invalid);
        };
        let access = flush_access(feth);
        let Some(selectivity) = feth.selectivity().filter(|_| access != Access::NONE) else {
            return Err(RequestRefusal::Invalid);
        };
        self.make_room_for_outcome()?;
        let allowed = match selectivity {
            Selectivity::Range => shared
                .mrs
                .grant(self.pd, self.handle, reth.rkey(), access, reth.va(), reth.length())
                .map(drop),
            // Address and length are meaningless then; rxe checks neither.
            Selectivity::MemoryRegion => shared.mrs.grant_whole(self.pd, self.handle, reth.rkey(), access),
        };
        allowed.map_err(|_| RequestRefusal::Access)?;
        shared.count(Counter::RxFlushRequests);
        self.responder.count_message();
        self.remember(1, Answer::Done);
        Ok(())
    }

    pub(super) fn execute_atomic_write(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
    ) -> Result<(), RequestRefusal> {
        let Some(reth) = packet.reth() else { return Err(RequestRefusal::Invalid) };
        if reth.length() != 8 || reth.va() % 8 != 0 {
            return Err(RequestRefusal::Invalid);
        }
        self.make_room_for_outcome()?;
        let grant = shared.mrs.grant(self.pd, self.handle, reth.rkey(), Access::REMOTE_WRITE, reth.va(), 8);
        let grant = grant.map_err(|_| RequestRefusal::Access)?;
        let Ok(word) = <[u8; 8]>::try_from(packet.payload) else { return Err(RequestRefusal::Invalid) };
        if self.is_landing() {
            return Err(self.await_landing());
        }
        let store = |memory: &mut Memory, at| memory.store_u64(at, u64::from_ne_bytes(word)).map(|()| 0);
        shared.mrs.change_word(grant, store).ok_or(RequestRefusal::Invalid)?;
        shared.count(Counter::RxAtomicWriteRequests);
        self.responder.count_message();
        self.remember(1, Answer::Done);
        Ok(())
    }

    fn make_room_for_outcome(&mut self) -> Result<(), RequestRefusal> {
        self.responder.outcomes.make_room().map_err(|TooMany| RequestRefusal::Invalid)
    }

    /// Records the response to the current request as owed.
    fn remember(&mut self, packets: u32, answer: Answer) {
        let Responder { outcomes, expected, msn, .. } = &mut self.responder;
        outcomes.push(Outcome::new(*expected, packets, *msn, answer));
    }
}

/// The right that a FLUSH needs, of the queue pair and of the memory.
pub(super) fn flush_access(feth: &Feth) -> Access {
    let kind = feth.flush_type();
    let global = if kind.global_visibility { Access::FLUSH_GLOBAL } else { Access::NONE };
    let persistent = if kind.persistence { Access::FLUSH_PERSISTENT } else { Access::NONE };
    global | persistent
}
