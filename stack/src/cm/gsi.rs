//! The general service interface: queue pair 1, a UD queue pair that sends and receives MADs.
//!
//! QP1 is not a queue pair of the slab. A packet for it is found where no ordinary queue pair is, and its MADs wait in
//! a short queue that the transmit phase empties first. A context has neither QP1 nor a connection manager until the
//! application listens, connects or searches; before that, packets for QP1 are dropped as packets for an unknown queue
//! pair.

use std::collections::VecDeque;

use ferroce_wire::{Bth, Deth, MAD_LEN, Opcode, PKey, Packet, PathHeader, Psn, Qpn};

use crate::engine::frame_slot::FrameSlot;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;

/// The Q_Key of every datagram to QP1 (IBA 10.2.5).
pub(crate) const QKEY: u32 = 0x8001_0000;

/// The most MADs waiting for the port. A flooding peer gets fewer answers; local requests are retransmitted.
const OUTGOING_MAX: usize = 256;

/// MADs to send.
pub(crate) struct Gsi {
    outgoing: VecDeque<(PathHeader, PKey, [u8; MAD_LEN])>,
    psn: Psn,
}

impl Gsi {
    pub(crate) fn new() -> Gsi {
        Gsi { outgoing: VecDeque::with_capacity(OUTGOING_MAX), psn: Psn::new(0) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.outgoing.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.outgoing.len() >= OUTGOING_MAX
    }

    pub(super) fn push(&mut self, header: PathHeader, pkey: PKey, mad: &[u8; MAD_LEN], shared: &mut Shared) {
        if !self.is_full() {
            self.outgoing.push_back((header, pkey, *mad));
        } else {
            shared.count(Counter::CmTxDropped);
        }
    }

    /// Writes the next MAD.
    pub(crate) fn transmit(&mut self, shared: &mut Shared, slot: &mut FrameSlot<'_>) -> Option<usize> {
        let (header, pkey, mad) = self.outgoing.front()?;
        let bth = Bth::new(Opcode::UD_SEND_ONLY, Qpn::GSI, self.psn).in_partition(*pkey);
        let mut frame = slot.start(header, bth, MAD_LEN)?;
        frame.put(&Deth::new(QKEY, Qpn::GSI));
        frame.payload().copy_from_slice(mad);
        let length = frame.finish_with(shared.crc);
        self.psn += 1;
        self.outgoing.pop_front();
        shared.count(Counter::SentPkts);
        shared.count(Counter::CmTxMsgs);
        Some(slot.end((length, 0)))
    }

    /// The transaction ID and the sender's communication ID of the request in a packet, from its BTH on: of a REQ or a SIDR
    /// REQ.
    pub(crate) fn quoted(packet: &[u8]) -> Option<(u64, u32)> {
        const MAD: usize = 12 + 8;
        let mad = packet.get(MAD..)?;
        let transaction_id = u64::from_be_bytes(*mad.get(8..)?.first_chunk()?);
        let comm_id = u32::from_be_bytes(*mad.get(24..)?.first_chunk()?);
        Some((transaction_id, comm_id))
    }

    /// The MAD in a packet for QP1.
    pub(crate) fn payload<'a>(packet: &Packet<'a>) -> Result<&'a [u8], Counter> {
        if packet.opcode != Opcode::UD_SEND_ONLY {
            return Err(Counter::RxWrongService);
        }
        let deth = packet.deth().ok_or(Counter::RxInvalidRequest)?;
        if deth.qkey() != QKEY {
            return Err(Counter::RxQkeyMismatch);
        }
        if deth.source_qpn() != Qpn::GSI || !packet.pad_fits() {
            return Err(Counter::RxInvalidRequest);
        }
        Ok(packet.payload)
    }
}
