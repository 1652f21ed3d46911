//! Congestion control: who is told of marked packets, what a sender does that is told, and how it keeps to a rate.

pub(crate) mod cnp;
pub(crate) mod dcqcn;
pub(crate) mod pacing;

use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_wire::{Gid, Opcode, Packet, PathMtu, Service};

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

/// Changes of the rate that are followed one by one. Where there are more, what may be sent grows at the lower rate that
/// there was before, and a queue pair is looked at again before it is due.
const STEPS_MAX: u32 = 64;

/// Destinations of datagrams that a queue pair remembers.
const DESTINATIONS: usize = 64;

/// The sender's half of congestion control: a queue pair that has it is paced, and obeys congestion notification packets.
pub(crate) struct Reaction {
    control: CongestionControl,
    /// As it is before anything was sent.
    fresh: ReactionPoint,
    point: ReactionPoint,
    pacer: Pacer,
    /// Bytes in front of a frame as the driver has it, which are on the wire as well.
    link_header: u32,
    /// Where datagrams went, each in the place that its address gives it, and a later one in place of an earlier; empty for
    /// a connection.
    destinations: Box<[Gid]>,
}

impl Reaction {
    /// Of a queue pair of this service, on a port of so many bit/s.
    pub(crate) fn new(
        service: Service,
        parameters: Dcqcn,
        line_rate: u64,
        link_header: u32,
    ) -> Result<Reaction, Error> {
        let fresh = ReactionPoint::new(parameters, line_rate)?;
        let (point, pacer) = (fresh.clone(), Pacer::new(PathMtu::Mtu4096.bytes() + HEADERS_MAX));
        let control = CongestionControl::Dcqcn(parameters);
        let destinations = if service == Service::Ud { DESTINATIONS } else { 0 };
        let destinations = vec![Gid::default(); destinations].into();
        Ok(Reaction { control, fresh, point, pacer, link_header, destinations })
    }

    /// Nothing was sent yet, and payloads will have this size at most.
    pub(crate) fn restart(&mut self, path_mtu: PathMtu) {
        self.point = self.fresh.clone();
        self.pacer = Pacer::new(path_mtu.bytes() + HEADERS_MAX);
        self.destinations.fill(Gid::default());
    }

    /// A datagram goes to `gid`, whose CNPs are obeyed from now on.
    pub(crate) fn note_destination(&mut self, gid: Gid) {
        if let Some(place) = self.destinations.get_mut(place(gid)) {
            *place = gid;
        }
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

    /// Carries out what was due at `now` or before; what may be sent grows at the rates that there were.
    #[inline]
    fn advance(&mut self, now: Nanos) {
        for _ in 0..STEPS_MAX {
            let change = self.point.next_rate_change();
            if change > now {
                break;
            }
            self.pacer.gain(change, self.point.rate());
            self.point.advance(change);
        }
        self.pacer.gain(now, self.point.rate());
        self.point.advance(now);
    }

    /// Whether a frame may leave. If not, [`ready`](Reaction::ready) says when.
    #[inline]
    fn admits(&mut self, now: Nanos) -> bool {
        self.advance(now);
        if self.pacer.admits() {
            return true;
        }
        let ready = self.due(now);
        self.pacer.wait_until(ready);
        false
    }

    /// When what is lacking will be there, at the rates to come if there is no CNP; or earlier, after many changes.
    #[inline]
    fn due(&self, now: Nanos) -> Nanos {
        let lacking = self.pacer.lacking();
        let due = |now: Nanos, lacking: u64, rate: u64| Nanos(now.0.saturating_add(lacking.div_ceil(rate)));
        let at_this_rate = due(now, lacking, self.point.rate());
        if at_this_rate <= self.point.next_rate_change() {
            return at_this_rate;
        }
        let (mut point, mut now, mut lacking) = (self.point.clone(), now, lacking);
        for _ in 0..STEPS_MAX {
            let change = point.next_rate_change();
            let at_this_rate = due(now, lacking, point.rate());
            if at_this_rate <= change {
                return at_this_rate;
            }
            lacking -= point.rate() * (change.0 - now.0);
            now = change;
            point.advance(now);
        }
        now
    }

    /// Whether the sender is so slow that packets which ask for an ACK only now and then would come after a timeout.
    pub(crate) fn is_slow(&self, packets: u32, timeout: Duration) -> bool {
        let timeout = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        self.pacer.takes_longer(2 * u64::from(packets), self.point.rate(), timeout)
    }
}

/// The place of a destination.
fn place(Gid(bytes): Gid) -> usize {
    bytes.iter().fold(0, |sum: usize, byte| sum.wrapping_mul(31) + usize::from(*byte)) % DESTINATIONS
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
        if !reaction.admits(shared.now) {
            let ready = reaction.ready();
            // An acknowledgement is no data, and its peer waits for it. It must not overtake a response.
            if self.may_owe_response() {
                return Err(Wait::At(ready.min(self.requester.deadline())));
            }
            return self.transmit_acknowledgement(shared, slot).ok_or_else(|| self.waits_for(shared));
        }
        let length = match self.transmit_unpaced(shared, slot) {
            Ok(length) => length,
            Err(wait) => {
                if let Some(reaction) = &mut self.reaction {
                    reaction.pacer.rest();
                }
                return Err(wait);
            }
        };
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

    /// A congestion notification packet of the peer; to a queue pair of datagrams from anywhere.
    #[cold]
    pub(crate) fn receive_cnp(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Counter> {
        let source = packet.network().source;
        let reaction = self.reaction.as_mut().ok_or(Counter::RpCnpIgnored)?;
        // A stranger must not set the rate. There is no address of a peer to compare with.
        if self.service == Service::Ud && reaction.destinations.get(place(source)) != Some(&source) {
            return Err(Counter::RpCnpIgnored);
        }
        reaction.advance(Nanos(shared.now.0.saturating_sub(1)));
        reaction.point.on_cnp(shared.now);
        shared.count(Counter::RpCnpHandled);
        Ok(())
    }
}
