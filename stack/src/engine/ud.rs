//! Unreliable datagrams (docs/protocol.md §6): messages of one packet, each with its own destination.

use std::num::NonZeroU16;

use ferroce_wire::{Bth, Deth, Ecn, ImmDt, NetworkHeader, Opcode, Packet};

use crate::engine::ah::Hop;
use crate::engine::frame_slot::FrameSlot;
use crate::engine::qp::QueuePair;
use crate::engine::scheduler::Wait;
use crate::engine::shared::Shared;
use crate::engine::staging::landing::NoRoom;
use crate::telemetry::counters::Counter;
use crate::verbs::{Access, Destination, Port, QpState, SendOp, WcOpcode, WcStatus, WorkCompletion};

/// Bytes before each received message, which end with the network header.
const GRH_AREA: usize = 40;

impl QueuePair {
    /// Writes the next datagram, which completes it, or returns what it waits for: the next hop of its address handle, if
    /// that is being resolved.
    pub(crate) fn transmit_datagram(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Result<usize, Wait> {
        while self.state == QpState::Rts && !self.sq.is_empty() {
            let number = self.sq.head();
            let wqe = *self.sq.wqe(number);
            let (to, immediate) = match wqe.op {
                SendOp::SendTo(to) => (to, None),
                SendOp::SendToWithImm(to, immediate) => (to, Some(immediate)),
                // Posting refuses everything else.
                _ => return Err(Wait::Nothing),
            };
            let Some(ah) = shared.ahs.get(to.ah.0).filter(|ah| ah.pd == self.pd).copied() else {
                self.fail_oldest(shared, WcStatus::LocQpOpErr);
                return Err(Wait::Nothing);
            };
            match ah.hop {
                Hop::Found(_) => {}
                Hop::Sought(ticket) => return Err(Wait::Ticket(ticket)),
                Hop::Missing => {
                    self.fail_oldest(shared, WcStatus::RetryExcErr);
                    return Err(Wait::Nothing);
                }
            }
            if shared.mrs.check_local(self.pd, self.sq.sges(number), Access::NONE).is_err() {
                self.fail_oldest(shared, WcStatus::LocProtErr);
                return Err(Wait::Nothing);
            }
            if wqe.length > ah.max_payload {
                shared.count(Counter::TxTooLong);
                self.complete_oldest(shared);
                continue;
            }
            let opcode = match immediate {
                None => Opcode::UD_SEND_ONLY,
                Some(_) => Opcode::UD_SEND_ONLY_WITH_IMMEDIATE,
            };
            let mut bth = Bth::new(opcode, to.qpn, self.requester.next_psn()).in_partition(self.pkey);
            bth.set_solicited(wqe.flags.solicited);
            let mut header = ah.header(self.qpn, to.qpn);
            if let Some(reaction) = &mut self.reaction {
                header.set_ecn(Ecn::Capable);
                reaction.note_destination(ah.gid);
            }
            let mut frame = slot.start(&header, bth, wqe.length as usize).ok_or(Wait::Nothing)?;
            frame.put(&Deth::new(self.qkey_for(to), self.qpn));
            if let Some(immediate) = immediate {
                frame.put(&ImmDt::new(immediate));
            }
            let bytes = (number, 0, wqe.length);
            let written = match self.sq.piece(number, 0, wqe.length, &shared.mrs) {
                Some(piece) => frame.fill(shared.crc, std::iter::once(piece)),
                None => match self.fill_in_parts(shared, frame, bytes) {
                    Some(written) => written,
                    None if self.await_gather(shared, number, 0, wqe.length) => continue,
                    None => return Err(Wait::Nothing),
                },
            };
            self.requester.take_psn();
            shared.count(Counter::SentPkts);
            self.complete_oldest(shared);
            return Ok(slot.end(written));
        }
        Err(Wait::Nothing)
    }

    /// A Q_Key with the highest bit set stands for the queue pair's own: such keys are privileged, and work requests must
    /// not use them (IBA 10.2.5).
    fn qkey_for(&self, to: Destination) -> u32 {
        if to.qkey >> 31 == 1 { self.qkey } else { to.qkey }
    }

    /// Processes a datagram. Invalid ones are dropped, and the queue pair continues.
    pub(crate) fn receive_datagram(
        &mut self,
        shared: &mut Shared,
        port: &Port,
        packet: &Packet<'_>,
    ) -> Result<(), Counter> {
        if !matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) {
            return Err(Counter::RxWrongState);
        }
        let deth = packet.deth().ok_or(Counter::RxInvalidRequest)?;
        if deth.qkey() != self.qkey {
            return Err(Counter::RxQkeyMismatch);
        }
        if !packet.pad_fits() {
            return Err(Counter::RxInvalidRequest);
        }
        // An answer is sent to the hardware address that this came from, so that a packet does not cause a resolution.
        let way_back = port.way_back(packet).ok_or(Counter::RxWrongAddress)?;
        if !self.has_receive(shared) {
            return Err(Counter::OutOfBuffer);
        }
        let Some(receive) = self.rq.front() else { return Err(Counter::OutOfBuffer) };
        let length = GRH_AREA + packet.payload.len();
        if length > receive.length as usize {
            return Err(Counter::RxTooLong);
        }
        if shared.mrs.check_local(self.receive_pd, receive.sges, Access::LOCAL_WRITE).is_err() {
            self.complete_receive_in_error(shared, WcStatus::LocProtErr);
            self.fail(shared);
            return Ok(());
        }
        let area = grh_area(packet);
        let by_cpu = shared.mrs.scatter(receive.sges, 0, &area)
            & shared.mrs.scatter(receive.sges, GRH_AREA as u32, packet.payload);
        if !by_cpu {
            let bytes = [(0, &area[..]), (GRH_AREA as u32, packet.payload)];
            self.land_receive(shared, &bytes, false).map_err(|NoRoom(_)| Counter::RxStagingFull)?;
        }
        let plain = self.completion(0, WcStatus::Success, WcOpcode::Recv);
        let (byte_len, src_qpn) = (length as u32, deth.source_qpn());
        let source_mac = packet.source_mac().and(Some(way_back));
        let vlan = packet.vlan().and_then(NonZeroU16::new);
        let wc = WorkCompletion { byte_len, grh: true, src_qpn, source_mac, vlan, ..plain };
        self.complete_receive(shared, packet, wc);
        Ok(())
    }
}

/// The received IPv6 header or GRH; an IPv4 header in the last 20 bytes, after zeros.
fn grh_area(packet: &Packet<'_>) -> [u8; GRH_AREA] {
    let mut area = [0; GRH_AREA];
    let start = match packet.header {
        NetworkHeader::Ipv4 => GRH_AREA - NetworkHeader::Ipv4.len(),
        NetworkHeader::Ipv6 | NetworkHeader::Grh => 0,
    };
    // The header has the length of its kind.
    area[start..].copy_from_slice(packet.network_bytes());
    area
}
