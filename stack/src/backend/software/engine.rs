use ferroce_driver::{FrameSink, FrameSource, Gathered, Icrc, Nanos, Payload, Room, RxFrame, TAIL_MAX};
use ferroce_wire::cm::CmMessage;
use ferroce_wire::{Identifications, NetworkHeader, Opcode, Packet, ParseError, Qpn, Service};

use super::next_hops::NextHops;
use crate::cm::{CmId, ConnectionManager, Gsi, Verbs};
use crate::engine::congestion::Reaction;
use crate::engine::frame_slot::FrameSlot;
use crate::engine::key_table::KeyTable;
use crate::engine::mr::Granted;
use crate::engine::multicast::MulticastGroups;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::slab::Slab;
use crate::engine::staging::Started;
use crate::engine::staging::landing::CopiesLeft;
use crate::telemetry::counters::Counter;
use crate::verbs::{Config, Error, GidEntry, Pd, Port, Qp, QpConfig, QpState};

/// The protocol, without IO and without a clock: frames in, frames out, timers.
pub(crate) struct Engine {
    pub(crate) qps: Slab<QueuePair>,
    qpns: KeyTable<u32>,
    pub(crate) shared: Shared,
    pub(crate) groups: MulticastGroups,
    pub(crate) port: Port,
    /// Created when connections are first used.
    cm: Option<Box<ConnectionManager>>,
    max_connections: u32,
    max_listeners: u32,
    max_cm_channels: u32,
    /// For ports that are sockets, whose kernel numbers packets and does not report the numbers of received ones.
    identifications: Identifications,
    /// The last identification that was determined.
    identified: u16,
    roce_v1: bool,
    pub(crate) next_hops: NextHops,
    /// The queue pair number of the last announced frame.
    announced: u32,
    /// The number and the slot of the queue pair of the last frame.
    last: Option<(u32, u32)>,
    /// The payload of the last gathered frame, if it stays in registered memory.
    gathered: Option<Granted>,
}

impl Engine {
    pub(crate) fn new(config: &Config, port: Port) -> Engine {
        let shared = Shared::new(config, &port);
        Engine {
            qps: Slab::new(config.max_qps, shared.generation),
            qpns: KeyTable::new(config.max_qps, 24),
            shared,
            identifications: Identifications::default(),
            identified: 0,
            groups: MulticastGroups::new(config.max_mcast_attachments),
            port,
            cm: None,
            max_connections: config.max_connections,
            max_listeners: config.max_listeners,
            max_cm_channels: config.max_cm_channels,
            roce_v1: config.roce_v1,
            next_hops: NextHops::new(),
            announced: 0,
            last: None,
            gathered: None,
        }
    }

    pub(crate) fn add_gid(&mut self, entry: GidEntry) -> Result<usize, Error> {
        if entry.roce_v1 && !self.roce_v1 {
            return Err(Error::invalid("gid", entry.gid, "RoCE v2, or roce_v1 in the Config"));
        }
        if let Some(index) = self.port.gids.iter().position(|row| *row == entry) {
            let expected = format!("a GID that is not in the table yet; this one is at index {index}");
            return Err(Error::invalid("gid", entry.gid, expected));
        }
        self.port.gids.push(entry);
        Ok(self.port.gids.len() - 1)
    }

    /// The numbers of queue pairs, and of connections and listeners, that use a P_Key.
    pub(crate) fn pkey_users(&self, index: usize) -> (usize, usize) {
        let uses = |qp: &&QueuePair| qp.state != QpState::Reset && qp.pkey_index == index;
        let connections = self.cm.as_ref().map_or(0, |cm| cm.pkey_users(index));
        (self.qps.iter().filter(uses).count(), connections)
    }

    /// `receives` are the PD and the pieces of its SRQ's receives.
    pub(crate) fn create_qp(
        &mut self,
        config: &QpConfig,
        receives: Option<(Pd, u8)>,
        reaction: Option<Reaction>,
    ) -> Option<Qp> {
        let Engine { qps, qpns, shared, port, .. } = self;
        let window = config.window.map_or(shared.window, |window| window.min(shared.window));
        let (index, count) = port.qpns;
        let usable = |n| Qpn::new(n).is_ordinary() && n % count == index;
        let handle = qps.insert_with(|handle| {
            let qpn = Qpn::new(qpns.insert(&mut shared.rng, handle.index, usable));
            QueuePair::new(handle, qpn, config, receives, (window, reaction))
        });
        handle.map(Qp)
    }

    pub(crate) fn destroy_qp(&mut self, qp: Qp) {
        if let Some(mut removed) = self.qps.remove(qp.0) {
            removed.reset(&mut self.shared);
            self.qpns.retire(removed.qpn.value());
            self.shared.events.forget(qp.into());
            self.last = None;
            self.shared.scheduler.remove(qp.0.index);
        }
    }

    /// The connection manager, created with the first use, and the state that it accesses.
    pub(crate) fn cm(&mut self) -> Result<(&mut ConnectionManager, Verbs<'_>), Error> {
        let Engine { cm, qps, shared, port, max_connections, max_listeners, max_cm_channels, .. } = self;
        let cm = cm.get_or_insert_with(|| {
            let limits = (*max_connections, *max_listeners, *max_cm_channels);
            Box::new(ConnectionManager::new(limits, port, shared))
        });
        Ok((cm, Verbs { qps, shared, port }))
    }

    /// The same, if it exists.
    pub(crate) fn cm_if_used(&mut self) -> Option<(&mut ConnectionManager, Verbs<'_>)> {
        let Engine { cm, qps, shared, port, .. } = self;
        Some((cm.as_deref_mut()?, Verbs { qps, shared, port }))
    }

    /// Whether an exchange waits for its next hop.
    pub(crate) fn awaits_next_hop(&self, id: CmId) -> bool {
        self.cm.as_ref().is_some_and(|cm| cm.awaits_next_hop(id))
    }

    /// The number of connections, and its limit.
    pub(crate) fn connections(&self) -> (usize, usize) {
        let unused = (0, self.max_connections as usize);
        self.cm.as_ref().map_or(unused, |cm| cm.usage())
    }

    /// Whether there are frames for which the port had no room.
    pub(crate) fn has_backlog(&self) -> bool {
        self.shared.scheduler.is_active()
            || self.shared.owes_cnps()
            || self.cm.as_ref().is_some_and(|cm| !cm.gsi.is_empty())
    }

    /// Starts a poll. Returns its time, which is never before that of the last one.
    #[inline]
    pub(crate) fn begin(&mut self, now: Nanos) -> Nanos {
        self.shared.now = self.shared.now.max(now);
        self.shared.poll += 1;
        self.shared.scheduler.begin_poll();
        self.shared.now
    }

    /// Schedules `qp`, or every queue pair, if it owes an ACK. Returns whether any does.
    pub(crate) fn schedule_acks(&mut self, qp: Option<Qp>) -> bool {
        let Engine { qps, shared, .. } = self;
        let mut any = false;
        let all = 0..if qp.is_none() { qps.capacity() as u32 } else { 0 };
        for index in all.chain(qp.map(|qp| qp.0.index)) {
            if let Some(qp) = qps.at_mut(index)
                && qp.ack_due(shared).is_some()
            {
                any = true;
                qp.schedule(shared);
            }
        }
        any
    }

    /// When there is work even without a frame: immediately if an ACK waits for the next poll.
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        let Engine { shared, next_hops, cm, .. } = self;
        let connections = cm.as_ref().and_then(|cm| cm.next_deadline());
        let queue_pairs = shared.scheduler.next_deadline(shared.now);
        let copies = if shared.staging.is_used() { shared.staging.next_deadline(shared.now) } else { None };
        [queue_pairs, next_hops.next_deadline(), connections, copies].into_iter().flatten().min()
    }

    /// The receive phase: processes one frame. It never transmits; it only records what is owed.
    #[inline]
    fn receive(&mut self, frame: &[u8], icrc: Icrc) {
        let is_ip = self.port.socket.is_some();
        let packet = match if is_ip { Packet::decode_ip(frame) } else { Packet::decode(frame) } {
            Ok(packet) => packet,
            Err(error) => return self.shared.count(Counter::of(&error)),
        };
        let checked = match icrc {
            Icrc::Right => packet.check(self.shared.crc),
            Icrc::Guessed => self.check_guessed(&packet),
            Icrc::LeftOut => packet.check_version(),
        };
        if let Err(error) = checked {
            return self.shared.count(Counter::of(&error));
        }
        self.shared.count(Counter::RcvdPkts);
        self.shared.counters.count_if(packet.congestion_experienced(), Counter::NpEcnMarkedRocePackets);
        if let Err(reason) = self.dispatch(&packet) {
            self.shared.count(reason);
        }
    }

    /// Checks a packet received without its IPv4 identification.
    fn check_guessed(&mut self, packet: &Packet<'_>) -> Result<(), ParseError> {
        let Some(identification) = packet.check_guessed(self.shared.crc, &mut self.identifications)? else {
            return Ok(());
        };
        let likely = identification < SEGMENTS_MAX
            || (1..=SUCCESSORS).contains(&identification.wrapping_sub(self.identified));
        self.identified = identification;
        self.shared.counters.count_if(likely, Counter::RxIdentificationLikely);
        self.shared.counters.count_if(!likely, Counter::RxIdentificationSolved);
        Ok(())
    }

    /// Finds the queue pair, and checks that the packet is its peer's before any state changes.
    #[inline]
    fn dispatch(&mut self, packet: &Packet<'_>) -> Result<(), Counter> {
        if packet.header == NetworkHeader::Grh && !self.roce_v1 {
            return Err(Counter::RxRoceV1Off);
        }
        if packet.bth.dest_qpn() == Qpn::MULTICAST {
            return self.dispatch_multicast(packet);
        }
        let Some(index) = self.slot_of(packet.bth.dest_qpn().value()) else {
            return self.receive_mad(packet);
        };
        let qp = self.qps.at_mut(index).ok_or(Counter::RxUnknownQp)?;
        if qp.service == Service::Ud {
            if !self.port.is_destination(packet) {
                return Err(Counter::RxWrongAddress);
            }
        } else {
            let connection = qp.connection.as_ref().ok_or(Counter::RxWrongState)?;
            if !connection.admits(packet) {
                return Err(Counter::RxWrongAddress);
            }
        }
        if packet.opcode == Opcode::CNP {
            return qp.receive_cnp(&mut self.shared, packet);
        }
        if !qp.pkey.admits(packet.bth.pkey()) {
            return Err(self.shared.refuse_pkey(Some(qp.handle), packet));
        }
        if packet.opcode == Opcode::SELECTIVE_ACKNOWLEDGE && qp.selective.is_none() {
            return Err(Counter::RxUnknownOpcode);
        }
        if packet.opcode.service() != qp.service {
            qp.note_service(packet.opcode);
            return Err(Counter::RxWrongService);
        }
        let taken = match qp.service {
            Service::Rc if packet.opcode.is_request() => {
                qp.receive_request(&mut self.shared, packet);
                Ok(())
            }
            Service::Rc => {
                qp.receive_response(&mut self.shared, packet);
                Ok(())
            }
            Service::Uc => {
                qp.receive_unreliable(&mut self.shared, packet);
                Ok(())
            }
            Service::Ud => qp.receive_datagram(&mut self.shared, &self.port, packet),
            Service::Cnp => Err(Counter::RxWrongService),
        };
        qp.settle(&mut self.shared);
        if taken.is_ok() && self.shared.notification.is_some() && packet.congestion_experienced() {
            qp.note_marked(&mut self.shared, &self.port, packet);
        }
        taken
    }

    /// The slot of the queue pair with this number. Consecutive frames are often for one queue pair.
    #[inline]
    fn slot_of(&mut self, qpn: u32) -> Option<u32> {
        match self.last {
            Some((last, index)) if last == qpn => Some(index),
            _ => {
                let index = self.qpns.get(qpn)?;
                self.last = Some((qpn, index));
                Some(index)
            }
        }
    }

    /// Processes a packet that is not for an ordinary queue pair: for QP1, or for none.
    #[cold]
    fn receive_mad(&mut self, packet: &Packet<'_>) -> Result<(), Counter> {
        let is_for_cm = packet.bth.dest_qpn() == Qpn::GSI && packet.header != NetworkHeader::Grh;
        let Some((cm, mut verbs)) = self.cm_if_used().filter(|_| is_for_cm) else {
            return Err(Counter::RxUnknownQp);
        };
        if !verbs.port.is_destination(packet) {
            return Err(Counter::RxWrongAddress);
        }
        let pkeys = &verbs.port.pkeys;
        let Some(pkey) = pkeys.index_admitting(packet.bth.pkey()).and_then(|index| pkeys.get(index)) else {
            return Err(verbs.shared.refuse_pkey(None, packet));
        };
        let mad = Gsi::payload(packet)?;
        let message = CmMessage::parse(mad).map_err(|_| Counter::RxMadErrors)?;
        verbs.shared.count(Counter::CmRxMsgs);
        cm.receive(packet, pkey, &message, &mut verbs)
    }

    /// Delivers a copy to each queue pair that has joined the group.
    fn dispatch_multicast(&mut self, packet: &Packet<'_>) -> Result<(), Counter> {
        let group = packet.network().destination;
        if !self.groups.has_members(group) {
            return Err(Counter::RxUnknownQp);
        }
        if packet.opcode.service() != Service::Ud {
            return Err(Counter::RxWrongService);
        }
        // A group is per partition: members in another one do not receive this packet.
        let mut heard = false;
        for index in self.groups.members(group) {
            let Some(qp) = self.qps.at_mut(index).filter(|qp| qp.pkey.admits(packet.bth.pkey())) else {
                continue;
            };
            heard = true;
            if let Err(reason) = qp.receive_datagram(&mut self.shared, &self.port, packet) {
                self.shared.count(reason);
            }
            qp.settle(&mut self.shared);
        }
        if heard { Ok(()) } else { Err(self.shared.refuse_pkey(None, packet)) }
    }

    /// Copies from and to device memory: processes the ended ones, and starts those that are due.
    #[cold]
    pub(crate) fn copy(&mut self) {
        let Engine { qps, shared, .. } = self;
        while let Some(copy) = shared.staging.next_ended(shared.now) {
            if let Some(qp) = qps.get_mut(copy.qp.0) {
                qp.copy_ended(shared, &copy);
            }
        }
        let (mut left, mut most) = (0, CopiesLeft::None);
        while let Some(handle) = shared.staging.open_at(left) {
            match qps.get_mut(handle.0).map_or(CopiesLeft::None, |qp| qp.start_copies(shared)) {
                CopiesLeft::None => shared.staging.close(handle),
                some => (left, most) = (left + 1, most.max(some)),
            }
        }
        shared.staging.set_soon(most == CopiesLeft::Soon);
        let Started { gathers, scatters, bytes, failed } = shared.staging.started();
        for (counter, count) in [
            (Counter::DeviceGathers, gathers),
            (Counter::DeviceScatters, scatters),
            (Counter::DeviceBytes, bytes),
            (Counter::DeviceErrors, failed),
        ] {
            shared.counters.set(counter, count);
        }
        while let Some(in_vain) = shared.staging.next_in_vain(shared.now) {
            if let Some(qp) = qps.get_mut(in_vain.0) {
                qp.give_back_chunks(shared);
            }
        }
        if let Some((idlest, purpose)) = shared.staging.idlest(shared.now)
            && let Some(qp) = qps.get_mut(idlest.0)
        {
            qp.yield_room(shared, purpose);
        }
        shared.staging.end_offers();
        while let Some(behind) = shared.staging.next_behind_copies() {
            if let Some(qp) = qps.get_mut(behind.0) {
                qp.schedule(shared);
            }
        }
        while let Some(offered) = shared.staging.next_offer() {
            if let Some(qp) = qps.get_mut(offered.0) {
                qp.take_room(shared);
            }
        }
    }

    /// Processes expired timers.
    pub(crate) fn fire_timers(&mut self) {
        while let Some(index) = self.shared.scheduler.due(self.shared.now) {
            if let Some(qp) = self.qps.at_mut(index) {
                qp.on_timer(&mut self.shared);
            }
        }
        let begun = std::mem::take(&mut self.shared.comm_est);
        if let Some((cm, mut verbs)) = self.cm_if_used() {
            if begun {
                cm.on_first_packets(&mut verbs);
            }
            cm.fire_timers(&mut verbs);
        }
    }

    /// The transmit phase: writes one frame of the queue pair whose turn it is.
    #[inline]
    fn transmit(&mut self, slot: &mut FrameSlot<'_>) -> Option<usize> {
        if let Some(cm) = &mut self.cm
            && let Some(length) = cm.gsi.transmit(&mut self.shared, slot)
        {
            return Some(length);
        }
        if let Some(length) = self.shared.transmit_cnp(slot) {
            return Some(length);
        }
        while let Some((index, begins)) = self.shared.scheduler.turn() {
            if begins {
                self.look_ahead();
            }
            let Some(qp) = self.qps.at_mut(index) else {
                self.shared.scheduler.end_turn();
                continue;
            };
            match qp.transmit(&mut self.shared, slot) {
                Ok(length) => {
                    self.shared.scheduler.sent();
                    return Some(length);
                }
                Err(wait) => {
                    self.shared.scheduler.end_turn();
                    qp.scheduled = self.shared.scheduler.wait(index, wait);
                }
            }
        }
        None
    }
}

/// The lookahead in the active list: the work request of the nearer queue pair is prefetched, which requires the queue pair
/// itself in the cache.
const NEAR: usize = 2;
const FAR: usize = 5;

impl Engine {
    /// Prefetches the state of the next queue pairs in the active list.
    fn look_ahead(&self) {
        let Engine { qps, shared, .. } = self;
        if let Some(index) = shared.scheduler.ahead(FAR) {
            qps.prefetch(index);
        }
        if let Some(qp) = shared.scheduler.ahead(NEAR).and_then(|index| qps.at(index)) {
            qp.sq.prefetch(qp.requester.cursor());
        }
    }
}

impl FrameSink for Engine {
    fn announce(&mut self, frame: &[u8]) {
        let Some(qpn) = Packet::peek_dest_qpn(frame) else { return };
        // Consecutive frames are often for one queue pair.
        if std::mem::replace(&mut self.announced, qpn.value()) != qpn.value()
            && let Some(index) = self.qpns.get(qpn.value())
        {
            self.qps.prefetch(index);
        }
    }

    fn take(&mut self, frame: RxFrame<'_>) {
        self.receive(frame.bytes(), frame.icrc());
    }
}

impl FrameSource for Engine {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.transmit(&mut FrameSlot::whole(buffer))
    }

    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        let mut slot = FrameSlot::in_pieces(head, tail);
        let head = self.transmit(&mut slot)?;
        let (gathered, payload) = slot.gathered(head);
        self.gathered = payload;
        Some(gathered)
    }

    fn payload(&self) -> Option<Payload<'_>> {
        self.shared.mrs.payload(self.gathered?)
    }

    fn place(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX], room: &mut dyn Room) -> Option<Gathered> {
        let mut slot = FrameSlot::with_room(head, tail, room);
        let head = self.transmit(&mut slot)?;
        Some(slot.gathered(head).0)
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        self.identifications.renumber(frame, identification);
    }
}

/// The identifications that Linux assigns to the segments of one send.
const SEGMENTS_MAX: u16 = 64;
/// The range after the last identification in which the next one is expected. A peer that numbers all its packets, as
/// rdma_rxe does, sends to others in between.
const SUCCESSORS: u16 = 64;
