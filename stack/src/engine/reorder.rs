//! Selective repeat, the receiving half: requests that arrive early are held until the missing packets have arrived, and
//! are then processed like any others, in the order of their PSNs. They are not examined before that.

use ferroce_wire::{
    Aeth, Bth, ICRC_LEN, NetworkHeader, Opcode, Packet, ParseError, PathMtu, Psn, Sack, Syndrome,
};

use crate::engine::frame_slot::FrameSlot;
use crate::engine::psn_set::{PsnSet, SPAN};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;

/// Bytes of the longest valid packet, from its network header to its ICRC.
const SLOT: usize = PathMtu::Mtu4096.required_l3_mtu(true) as usize;

/// Buffers for held packets, shared by the queue pairs of a context.
pub(crate) struct ReorderPool {
    packets: u16,
    slots: Box<[u8]>,
    /// Length and header kind of each.
    shapes: Box<[(u16, NetworkHeader)]>,
    free: Vec<u16>,
}

impl ReorderPool {
    /// For this many packets; the memory is allocated when a queue pair first needs it.
    pub(crate) fn new(packets: u16) -> ReorderPool {
        ReorderPool { packets, slots: Box::default(), shapes: Box::default(), free: Vec::new() }
    }

    /// Allocates the memory, unless done before.
    pub(crate) fn prepare(&mut self) {
        let packets = usize::from(self.packets);
        if self.shapes.len() != packets {
            // Zeroed: pages are allocated on first use.
            self.slots = vec![0; packets * SLOT].into_boxed_slice();
            self.shapes = vec![(0, NetworkHeader::Ipv4); packets].into_boxed_slice();
            self.free = (0..self.packets).rev().collect();
        }
    }

    /// Keeps a copy of the packet, if it fits and there is room.
    fn put(&mut self, packet: &Packet<'_>) -> Option<u16> {
        let covered = packet.covered();
        let length = covered.len() + ICRC_LEN;
        if length > SLOT {
            return None;
        }
        let slot = self.free.pop()?;
        let bytes = &mut self.slots[usize::from(slot) * SLOT..][..length];
        let (body, icrc) = bytes.split_at_mut(covered.len());
        body.copy_from_slice(covered);
        icrc.copy_from_slice(&packet.icrc.to_le_bytes());
        self.shapes[usize::from(slot)] = (length as u16, packet.header);
        Some(slot)
    }
}

/// The held packets of a queue pair.
pub(crate) struct Reorder {
    /// No held packet is older.
    oldest: Psn,
    held: PsnSet,
    /// For each held PSN, its place in the pool.
    slots: Box<[u16; SPAN as usize]>,
    /// A packet newer than the expected request has arrived: an acknowledgement must report it.
    pub(crate) gap: bool,
}

impl Reorder {
    pub(crate) fn new(expected: Psn) -> Reorder {
        let slots = Box::new([0; SPAN as usize]);
        Reorder { oldest: expected, held: PsnSet::default(), slots, gap: false }
    }

    fn take(&mut self, psn: Psn) -> Option<u16> {
        self.held.remove(psn).then(|| self.slots[slot_of(psn)])
    }

    /// Frees everything before `expected`: a READ occupies more PSNs than packets, and nothing may be left at those.
    fn forget_before(&mut self, pool: &mut ReorderPool, expected: Psn) {
        if self.held.len() > 0 {
            let passed = expected.distance(self.oldest);
            let end = if (0..SPAN as i32).contains(&passed) { expected } else { self.oldest + SPAN };
            while let Some(psn) = self.held.first(self.oldest, end) {
                pool.free.extend(self.take(psn));
            }
        }
        self.oldest = expected;
    }
}

fn slot_of(psn: Psn) -> usize {
    (psn.value() % SPAN) as usize
}

impl QueuePair {
    /// Holds a request that is `distance` ahead of the expected one. The peer is notified when a NAK or an ACK would be
    /// sent: at each new gap, and when it requests an ACK.
    #[inline(never)]
    pub(crate) fn hold_early(&mut self, shared: &mut Shared, packet: &Packet<'_>, distance: u32) {
        let Some(selective) = &mut self.selective else { return };
        let reorder = &mut selective.reorder;
        let psn = packet.bth.psn();
        let follows = reorder.held.contains(psn - 1);
        if distance >= SPAN || !reorder.held.contains(psn) {
            match (distance < SPAN).then(|| shared.reorder.put(packet)).flatten() {
                Some(slot) => {
                    reorder.held.insert(psn);
                    reorder.slots[slot_of(psn)] = slot;
                }
                None => shared.count(Counter::RxReorderFull),
            }
        }
        reorder.gap = true;
        if !follows || packet.bth.ack_req() {
            self.owe_ack(shared);
        }
    }

    /// Executes the held requests that follow the one just executed.
    #[inline]
    pub(crate) fn execute_held(&mut self, shared: &mut Shared) {
        while let Some(selective) = &mut self.selective {
            let reorder = &mut selective.reorder;
            let expected = self.responder.expected_psn();
            reorder.forget_before(&mut shared.reorder, expected);
            let Some(slot) = reorder.take(expected) else {
                reorder.gap = reorder.held.len() > 0;
                return;
            };
            // The packet is read in place, while the rest of `shared` is in use.
            let slots = std::mem::take(&mut shared.reorder.slots);
            let (length, header) = shared.reorder.shapes[usize::from(slot)];
            let bytes = &slots[usize::from(slot) * SLOT..][..usize::from(length)];
            if let Ok(packet) = decode(header, bytes) {
                self.receive_expected(shared, &packet);
            }
            shared.reorder.slots = slots;
            shared.reorder.free.push(slot);
        }
    }

    /// Frees all held packets.
    pub(crate) fn release_held(&mut self, shared: &mut Shared) {
        if let Some(selective) = &mut self.selective {
            let reorder = &mut selective.reorder;
            let end = reorder.oldest + SPAN;
            reorder.forget_before(&mut shared.reorder, end);
            reorder.gap = false;
        }
    }

    /// Writes the ACK that reports the held packets, if there is a gap to report.
    pub(crate) fn write_selective_acknowledge(
        &self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
        msn: u32,
    ) -> Option<usize> {
        let connection = self.connection.as_ref()?;
        let reorder = &self.selective.as_ref()?.reorder;
        if !reorder.gap {
            return None;
        }
        let psn = self.responder.expected_psn();
        let bth = Bth::new(Opcode::SELECTIVE_ACKNOWLEDGE, connection.dest_qpn, psn).in_partition(self.pkey);
        let plain = self.reaction.is_some().then(|| connection.acknowledging());
        let mut frame = slot.start(plain.as_ref().unwrap_or(&connection.header), bth, Sack::LEN)?;
        frame.put(&Aeth::new(Syndrome::ACK, msn));
        frame.payload().copy_from_slice(Sack::new(reorder.held.bits()).bytes());
        shared.count(Counter::SentPkts);
        Some(frame.finish_with(shared.crc))
    }
}

/// Decodes a packet that was valid when it arrived.
fn decode(header: NetworkHeader, bytes: &[u8]) -> Result<Packet<'_>, ParseError> {
    match header {
        NetworkHeader::Grh => Packet::decode_grh(bytes),
        NetworkHeader::Ipv4 | NetworkHeader::Ipv6 => Packet::decode_ip(bytes),
    }
}
