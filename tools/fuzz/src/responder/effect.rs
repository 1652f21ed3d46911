//! The effect of a packet if the engine executes it.

use ferroce::wire::{Feth, NetworkHeader, Operation, Packet, Position, Selectivity};
use ferroce::{Access, QpType, RKey, WcOpcode};

use super::{Answer, InboundMessage, Target};
use crate::live::{Piece, part, total};
use crate::packet::QKEY;

/// The effect of an executed packet.
pub(super) struct Effect {
    /// Its number of PSNs.
    pub(super) packets: u32,
    pub(super) writes: Vec<(Piece, Vec<u8>)>,
    pub(super) message: InboundMessage,
    /// Whether the message is complete.
    pub(super) ends: bool,
    /// The oldest receive WR completes.
    pub(super) received: Option<(WcOpcode, usize)>,
    pub(super) immediate: Option<u32>,
    pub(super) invalidates: Option<RKey>,
    pub(super) answer: Option<Answer>,
}

impl Effect {
    /// The effect of a one-packet message, still empty.
    fn of(packet: &Packet<'_>) -> Effect {
        Effect {
            packets: 1,
            writes: Vec::new(),
            message: InboundMessage::None,
            ends: true,
            received: None,
            immediate: packet.immdt().map(|immdt| immdt.value()),
            invalidates: packet.ieth().map(|ieth| ieth.rkey()),
            answer: None,
        }
    }
}

impl Target {
    /// The effect of the packet if the engine executes it; `None` if it must not be executed.
    pub(super) fn effect(&self, packet: &Packet<'_>) -> Option<Effect> {
        let (opcode, length) = (packet.opcode, packet.payload.len());
        if self.live.setup.service == QpType::Ud {
            return self.datagram_effect(packet);
        }
        let mtu = self.live.setup.mtu.bytes() as usize;
        let (first, last) = match opcode.position() {
            Position::First => (true, false),
            Position::Middle => (false, false),
            Position::Last => (false, true),
            Position::Only => (true, true),
        };
        let lengths = match (first, last) {
            (_, false) => mtu..=mtu,
            (false, true) => 1..=mtu,
            (true, true) => 0..=mtu,
        };
        let lawful = packet.bth.psn() == self.expected
            && lengths.contains(&length)
            && packet.bth.pad() == length.wrapping_neg() & 3
            && first == matches!(self.message, InboundMessage::None);
        if !lawful {
            return None;
        }
        let plain = Effect::of(packet);
        match opcode.operation() {
            Operation::Send => self.send_effect(packet, first, last, plain),
            Operation::Write => self.write_effect(packet, first, last, plain),
            Operation::ReadRequest => {
                let reth = packet.reth()?;
                let (va, rkey, length) = (reth.va(), reth.rkey(), reth.length());
                self.allowed(Access::REMOTE_READ)?;
                if length > 0 {
                    self.live.reach(rkey, Access::REMOTE_READ, va, length as usize)?;
                }
                let packets = length.div_ceil(mtu as u32).max(1);
                Some(Effect { packets, answer: Some(Answer::Read { va, rkey, length }), ..plain })
            }
            Operation::CompareSwap | Operation::FetchAdd => {
                let atomic = packet.atomic_eth()?;
                self.allowed(Access::REMOTE_ATOMIC)?;
                let piece = self.live.reach(atomic.rkey(), Access::REMOTE_ATOMIC, atomic.va(), 8)?;
                if atomic.va() % 8 != 0 {
                    return None;
                }
                let original = u64::from_ne_bytes(self.live.bytes(piece).try_into().ok()?);
                let new = if opcode.operation() == Operation::FetchAdd {
                    original.wrapping_add(atomic.swap_or_add())
                } else if original == atomic.compare() {
                    atomic.swap_or_add()
                } else {
                    original
                };
                let writes = vec![(piece, new.to_ne_bytes().to_vec())];
                Some(Effect { writes, answer: Some(Answer::Atomic { original }), ..plain })
            }
            Operation::Flush => {
                let (feth, reth) = (packet.feth()?, packet.reth()?);
                let access = flush_access(feth)?;
                self.allowed(access)?;
                match feth.selectivity()? {
                    Selectivity::Range => {
                        self.live.reach(reth.rkey(), access, reth.va(), reth.length() as usize)?;
                    }
                    Selectivity::MemoryRegion => {
                        self.live.opened(reth.rkey(), access)?;
                    }
                }
                Some(Effect { answer: Some(Answer::Done), ..plain })
            }
            Operation::AtomicWrite => {
                let reth = packet.reth()?;
                self.allowed(Access::REMOTE_WRITE)?;
                let piece = self.live.reach(reth.rkey(), Access::REMOTE_WRITE, reth.va(), 8)?;
                if reth.va() % 8 != 0 || reth.length() != 8 || length != 8 {
                    return None;
                }
                let writes = vec![(piece, packet.payload.to_vec())];
                Some(Effect { writes, answer: Some(Answer::Done), ..plain })
            }
            _ => None,
        }
    }

    /// A datagram is received into the oldest receive WR, with its network header first.
    fn datagram_effect(&self, packet: &Packet<'_>) -> Option<Effect> {
        let receive = self.receives.front()?;
        let mut message = vec![0; if packet.header == NetworkHeader::Ipv4 { 20 } else { 0 }];
        message.extend_from_slice(packet.network_bytes());
        message.extend_from_slice(packet.payload);
        let lawful = packet.deth()?.qkey() == QKEY
            && packet.bth.pad() == packet.payload.len().wrapping_neg() & 3
            && message.len() <= total(&receive.pieces)
            && self.live.may_use(&receive.pieces, Access::LOCAL_WRITE);
        if !lawful {
            return None;
        }
        let writes = scatter(&part(&receive.pieces, 0, message.len()), &message);
        Some(Effect { writes, received: Some((WcOpcode::Recv, message.len())), ..Effect::of(packet) })
    }

    fn send_effect(&self, packet: &Packet<'_>, first: bool, last: bool, plain: Effect) -> Option<Effect> {
        let received = match self.message {
            InboundMessage::Send { received } => received,
            InboundMessage::None if first => 0,
            _ => return None,
        };
        let receive = self.receives.front()?;
        let end = received + packet.payload.len();
        if end > total(&receive.pieces) || !self.live.may_use(&receive.pieces, Access::LOCAL_WRITE) {
            return None;
        }
        let writes = scatter(&part(&receive.pieces, received, packet.payload.len()), packet.payload);
        if !last {
            return Some(Effect {
                writes,
                message: InboundMessage::Send { received: end },
                ends: false,
                ..plain
            });
        }
        Some(Effect { writes, received: Some((WcOpcode::Recv, end)), ..plain })
    }

    fn write_effect(&self, packet: &Packet<'_>, first: bool, last: bool, plain: Effect) -> Option<Effect> {
        self.allowed(Access::REMOTE_WRITE)?;
        let (va, rkey, remaining, total) = match (self.message, packet.reth()) {
            (InboundMessage::None, Some(reth)) if first => {
                (reth.va(), reth.rkey(), reth.length(), reth.length())
            }
            (InboundMessage::Write { va, rkey, remaining, total }, None) => (va, rkey, remaining, total),
            _ => return None,
        };
        let length = packet.payload.len() as u32;
        if last != (length == remaining) || length > remaining || total > 1 << 31 {
            return None;
        }
        let mut writes = Vec::new();
        if total > 0 {
            // The whole announced range must be accessible, not only that of this packet.
            let piece = self.live.reach(rkey, Access::REMOTE_WRITE, va, remaining as usize)?;
            writes.push((Piece { length: packet.payload.len(), ..piece }, packet.payload.to_vec()));
        }
        if !last {
            let va = va.wrapping_add(length.into());
            let message = InboundMessage::Write { va, rkey, remaining: remaining - length, total };
            return Some(Effect { writes, message, ends: false, ..plain });
        }
        let received = packet.immdt().map(|_| (WcOpcode::RecvRdmaWithImm, total as usize));
        if received.is_some() && self.receives.is_empty() {
            return None;
        }
        Some(Effect { writes, received, ..plain })
    }

    /// Whether the queue pair has this access right.
    fn allowed(&self, access: Access) -> Option<()> {
        self.live.setup.access.contains(access).then_some(())
    }
}

fn flush_access(feth: &Feth) -> Option<Access> {
    let kind = feth.flush_type();
    match (kind.global_visibility, kind.persistence) {
        (true, false) => Some(Access::FLUSH_GLOBAL),
        // Host memory has no persistence, so this right can't be granted.
        _ => None,
    }
}

fn scatter(pieces: &[Piece], mut payload: &[u8]) -> Vec<(Piece, Vec<u8>)> {
    let mut writes = Vec::new();
    for piece in pieces {
        let (bytes, rest) = payload.split_at(piece.length);
        writes.push((*piece, bytes.to_vec()));
        payload = rest;
    }
    writes
}
