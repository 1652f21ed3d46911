//! Congestion control: who is told of marked packets, what a sender does that is told, and how it keeps to a rate.

pub(crate) mod cnp;
pub(crate) mod dcqcn;
pub(crate) mod pacing;

use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_wire::{Opcode, PathMtu, Service};

use crate::engine::congestion::dcqcn::ReactionPoint;
use crate::engine::congestion::pacing::Pacer;
use crate::engine::frame_slot::FrameSlot;
use crate::engine::qp::QueuePair;
use crate::engine::scheduler::Wait;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{CongestionControl, Dcqcn, Error, ReactionState};

/// Bytes that a frame has besides its payload, at most: Ethernet with a VLAN tag, IPv6, UDP, BTH, RETH and an immediate,
/// pad and ICRC.
const HEADERS_MAX: u32 = 18 + 40 + 8 + 12 + 16 + 4 + 3 + 4;

/// The sender's half of congestion control: a queue pair that has it is paced, and obeys congestion notification packets.
pub(crate) struct Reaction {
    control: CongestionControl,
    /// As it is before anything was sent.
    fresh: ReactionPoint,
    point: ReactionPoint,
    pacer: Pacer,
    /// Bytes in front of a frame as the driver has it, which are on the wire as well.
    link_header: u32,
}

impl Reaction {
    /// For a port of so many bit/s.
    pub(crate) fn new(parameters: Dcqcn, line_rate: u64, link_header: u32) -> Result<Reaction, Error> {
        let fresh = ReactionPoint::new(parameters, line_rate)?;
        let (point, pacer) = (fresh.clone(), Pacer::new(PathMtu::Mtu4096.bytes() + HEADERS_MAX));
        Ok(Reaction { control: CongestionControl::Dcqcn(parameters), fresh, point, pacer, link_header })
    }

    /// Nothing was sent yet, and payloads will have this size at most.
    pub(crate) fn restart(&mut self, path_mtu: PathMtu) {
        self.point = self.fresh.clone();
        self.pacer = Pacer::new(path_mtu.bytes() + HEADERS_MAX);
    }

    pub(crate) fn control(&self) -> CongestionControl {
        self.control
    }

    pub(crate) fn state(&self, now: Nanos) -> ReactionState {
        let mut point = self.point.clone();
        point.advance(now);
        ReactionState {
            rate: point.rate(),
            highest: self.fresh.rate(),
            target: point.target(),
            alpha: point.alpha(now),
            timer_stage: point.timer_stage(),
            byte_stage: point.byte_stage(),
        }
    }

    /// When a frame may leave that had to wait.
    pub(crate) fn ready(&self) -> Nanos {
        self.pacer.ready()
    }

    /// Whether the sender is so slow that packets which ask for an ACK only now and then would come after a timeout.
    pub(crate) fn is_slow(&self, packets: u32, timeout: Duration) -> bool {
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.pacer.takes_longer(2 * u64::from(packets), self.point.rate(), timeout)
    }
}

impl QueuePair {
    /// As [`transmit`](QueuePair::transmit), at the rate that congestion control allows.
    #[inline(never)]
    pub(crate) fn transmit_paced(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Result<usize, Wait> {
        let Some(reaction) = &mut self.reaction else { return Err(Wait::Nothing) };
        reaction.point.advance(shared.now);
        if !reaction.pacer.admits(shared.now, reaction.point.rate()) {
            let ready = reaction.pacer.ready();
            // An acknowledgement is no data, and its peer waits for it. It must not overtake a response.
            if self.may_owe_response() {
                return Err(Wait::At(ready.min(self.requester.deadline())));
            }
            return self.transmit_acknowledgement(shared, slot).ok_or_else(|| self.waits_for(shared));
        }
        let length = self.transmit_unpaced(shared, slot)?;
        let header = self.connection.as_ref().map_or(0, |connection| connection.header.len());
        let is_data =
            self.service != Service::Rc || !slot.opcode(header).is_some_and(Opcode::is_acknowledgement);
        if let Some(reaction) = &mut self.reaction
            && is_data
        {
            let bytes = slot.frame_length(length) + reaction.link_header;
            reaction.pacer.charge(bytes);
            reaction.point.on_sent(bytes, shared.now);
        }
        Ok(length)
    }

    /// A congestion notification packet of the peer.
    pub(crate) fn receive_cnp(&mut self, shared: &mut Shared) -> Result<(), Counter> {
        let reaction = self.reaction.as_mut().ok_or(Counter::RpCnpIgnored)?;
        reaction.point.on_cnp(shared.now);
        shared.count(Counter::RpCnpHandled);
        Ok(())
    }
}
