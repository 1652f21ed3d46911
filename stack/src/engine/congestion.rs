//! Congestion control: notifications for marked packets, the sender's reaction to them, and pacing.

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

/// The most bytes of a frame in addition to its payload: Ethernet with a VLAN tag, IPv6, UDP, BTH, RETH and an immediate,
/// pad and ICRC.
const HEADERS_MAX: u32 = 18 + 40 + 8 + 12 + 16 + 4 + 3 + 4;

/// The most changes of the rate that are computed individually. Beyond that the credit grows at the previous, lower rate,
/// and the queue pair is checked again before it is due.
const STEPS_MAX: u32 = 64;

/// Destinations of datagrams that a queue pair remembers.
const DESTINATIONS: usize = 64;

/// The reaction point: a queue pair with it is paced, and obeys congestion notification packets.
pub(crate) struct Reaction {
    control: CongestionControl,
    /// The initial state.
    fresh: ReactionPoint,
    point: ReactionPoint,
    pacer: Pacer,
    /// Bytes of the link header that are not part of the driver's frames.
    link_header: u32,
    /// The destinations of datagrams, each in a place derived from its address, where a later one replaces an earlier one;
    /// empty for a connection.
    destinations: Box<[Gid]>,
}

impl Reaction {
    /// For a queue pair of this service, on a port with this rate in bit/s.
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

    /// Returns to the initial state; payloads will have at most this size.
    pub(crate) fn restart(&mut self, path_mtu: PathMtu) {
        self.point = self.fresh.clone();
        self.pacer = Pacer::new(path_mtu.bytes() + HEADERS_MAX);
        self.destinations.fill(Gid::default());
    }

    /// A datagram is sent to `gid`, whose CNPs are obeyed from now on.
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

    /// When the waiting frame may leave.
    pub(crate) fn ready(&self) -> Nanos {
        self.pacer.ready()
    }

    /// Executes all events due by `now`; the credit grows at the rates of each period.
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

    /// Whether a frame may leave. If not, [`ready`](Reaction::ready) returns when.
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

    /// When the missing credit will be there, at the future rates without further CNPs; or earlier, after many changes.
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

    /// Whether the sender is so slow that the ACK timer could expire before a packet requests an ACK.
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
    /// As [`transmit`](QueuePair::transmit), at the rate of the congestion control.
    #[inline(never)]
    pub(crate) fn transmit_paced(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Result<usize, Wait> {
        let Some(reaction) = &mut self.reaction else { return Err(Wait::Nothing) };
        if !reaction.admits(shared.now) {
            let ready = reaction.ready();
            // An acknowledgement carries no data, and the peer waits for it. It must not overtake a response.
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

    /// Processes a congestion notification packet of the peer; for a queue pair of datagrams, of any destination.
    #[cold]
    pub(crate) fn receive_cnp(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Counter> {
        let source = packet.network().source;
        let reaction = self.reaction.as_mut().ok_or(Counter::RpCnpIgnored)?;
        // A stranger must not set the rate. There is no peer address to compare with.
        if self.service == Service::Ud && reaction.destinations.get(place(source)) != Some(&source) {
            return Err(Counter::RpCnpIgnored);
        }
        reaction.advance(Nanos(shared.now.0.saturating_sub(1)));
        reaction.point.on_cnp(shared.now);
        shared.count(Counter::RpCnpHandled);
        Ok(())
    }
}
