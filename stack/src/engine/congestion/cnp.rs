//! The notification point (docs/protocol.md §7): sends congestion notification packets (CNPs) to the senders of packets
//! that a switch has marked.

use std::collections::VecDeque;

use ferroce_driver::Nanos;
use ferroce_wire::{Bth, Ecn, Gid, Opcode, Packet, PathHeader, Psn, Qpn};

use crate::engine::frame_slot::FrameSlot;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{AddressVector, CnpScope, CongestionNotification, Port, QpState};

/// The most CNPs waiting for the port. A marked packet for which there is no room causes none. CNPs for datagrams use only
/// the first half of the room: anybody can send datagrams, and the peers of connections must not be delayed by them.
const OWED_MAX: usize = 256;
/// The most senders whose last CNP is remembered when a datagram adds one. In the scope `Peer` there is additional room for
/// the peers of all queue pairs.
const SENDERS_MAX: usize = 1024;
/// Zeros after the BTH.
const RESERVED: usize = 16;

/// The owed CNPs, and when the last one of each scope was sent. Sized when created.
pub(crate) struct NotificationPoint {
    settings: CongestionNotification,
    interval: u64,
    owed: VecDeque<Owed>,
    /// By the slot of a connected queue pair, with its QPN, because the slot may have been reused.
    connected: Box<[(Qpn, Last)]>,
    /// Ordered by sender.
    senders: Vec<(Sender, Last)>,
    /// No sender is forgotten before this time: the table is searched at most once per interval, even in a flood of new
    /// senders.
    forget_at: Nanos,
}

/// A CNP waiting for the port. It is sent even if its queue pair is reset or destroyed meanwhile.
struct Owed {
    header: PathHeader,
    dest_qpn: Qpn,
    flow: Flow,
}

/// The unit to which an interval applies.
#[derive(Clone, Copy)]
enum Flow {
    /// A connected queue pair, by slot and QPN.
    Connected(u32, Qpn),
    Sender(Sender),
}

/// Fields that the scope does not distinguish are zero.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Sender {
    local: u32,
    remote: u32,
    gid: [u8; 16],
}

/// The last CNP of a flow. The interval starts when it is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    Never,
    Owed,
    Sent(Nanos),
}

impl Last {
    fn is_over(self, interval: u64, now: Nanos) -> bool {
        match self {
            Last::Never => true,
            Last::Owed => false,
            Last::Sent(at) => now.0.saturating_sub(at.0) >= interval,
        }
    }
}

impl NotificationPoint {
    /// For this many queue pairs.
    pub(crate) fn new(settings: CongestionNotification, max_qps: u32) -> NotificationPoint {
        let (connected, peers) = match settings.scope {
            CnpScope::QueuePair => (max_qps as usize, 0),
            CnpScope::Peer => (0, max_qps as usize),
            CnpScope::Port => (0, 0),
        };
        NotificationPoint {
            settings,
            interval: u64::try_from(settings.min_time_between_cnps.as_nanos()).unwrap_or(u64::MAX),
            owed: VecDeque::with_capacity(OWED_MAX),
            connected: vec![(Qpn::default(), Last::Never); connected].into_boxed_slice(),
            senders: Vec::with_capacity(SENDERS_MAX + peers),
            forget_at: Nanos::ZERO,
        }
    }

    fn flow(&self, qp: &QueuePair, remote: Qpn, source: Gid) -> Flow {
        match self.settings.scope {
            CnpScope::QueuePair if qp.connection.is_some() => Flow::Connected(qp.handle.0.index, qp.qpn),
            CnpScope::QueuePair => {
                Flow::Sender(Sender { local: qp.qpn.value(), remote: remote.value(), gid: source.0 })
            }
            CnpScope::Peer => Flow::Sender(Sender { gid: source.0, ..Sender::default() }),
            CnpScope::Port => Flow::Sender(Sender::default()),
        }
    }

    /// Whether a CNP may be owed to `flow` for a packet of a connection, or for a datagram. If so, this is recorded.
    fn admits(&mut self, flow: Flow, is_datagram: bool, now: Nanos) -> bool {
        let (owed_most, senders_most) = match is_datagram {
            true => (OWED_MAX / 2, SENDERS_MAX),
            false => (OWED_MAX, self.senders.capacity()),
        };
        if self.owed.len() >= owed_most {
            return false;
        }
        let interval = self.interval;
        if interval == 0 {
            return true;
        }
        let last = match flow {
            Flow::Connected(slot, qpn) => self.last_of_queue_pair(slot, qpn),
            Flow::Sender(sender) => self.last_of_sender(sender, senders_most, now),
        };
        let Some(last) = last.filter(|last| last.is_over(interval, now)) else { return false };
        *last = Last::Owed;
        true
    }

    fn last_of_queue_pair(&mut self, slot: u32, qpn: Qpn) -> Option<&mut Last> {
        let (of, last) = self.connected.get_mut(slot as usize)?;
        if *of != qpn {
            (*of, *last) = (qpn, Last::Never);
        }
        Some(last)
    }

    /// `None` if the sender is new and there is no room.
    fn last_of_sender(&mut self, sender: Sender, most: usize, now: Nanos) -> Option<&mut Last> {
        let mut found = self.find(sender);
        if found.is_err() && self.senders.len() >= most {
            if now < self.forget_at {
                return None;
            }
            self.forget_at = Nanos(now.0.saturating_add(self.interval));
            self.senders.retain(|(_, last)| !last.is_over(self.interval, now));
            if self.senders.len() >= most {
                return None;
            }
            found = self.find(sender);
        }
        let at = found.unwrap_or_else(|at| {
            self.senders.insert(at, (sender, Last::Never));
            at
        });
        self.senders.get_mut(at).map(|(_, last)| last)
    }

    fn find(&self, sender: Sender) -> Result<usize, usize> {
        self.senders.binary_search_by_key(&sender, |(sender, _)| *sender)
    }

    /// A CNP of `flow` was sent. Its queue pair may be gone.
    fn note_sent(&mut self, flow: Flow, now: Nanos) {
        let last = match flow {
            Flow::Connected(slot, qpn) => {
                let place = self.connected.get_mut(slot as usize);
                place.filter(|(of, _)| *of == qpn).map(|(_, last)| last)
            }
            Flow::Sender(sender) => self.find(sender).ok().map(|at| &mut self.senders[at].1),
        };
        if let Some(last) = last {
            *last = Last::Sent(now);
        }
    }
}

impl QueuePair {
    /// The queue pair has received a packet that a switch has marked. The transmit phase notifies its sender.
    #[cold]
    pub(crate) fn note_marked(&mut self, shared: &mut Shared, port: &Port, packet: &Packet<'_>) {
        let now = shared.now;
        let Some(point) = &mut shared.notification else { return };
        let receives = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        // An acknowledgement carries no data, so slowing its sender down would not help.
        if !receives || packet.opcode.is_acknowledgement() || self.next_hop.is_some() {
            return;
        }
        let way = match &self.connection {
            Some(connection) => Some((connection.header, connection.dest_qpn)),
            None => self.way_to_sender(port, packet),
        };
        let Some((mut header, dest_qpn)) = way else { return };
        let flow = point.flow(self, dest_qpn, packet.network().source);
        if point.admits(flow, self.connection.is_none(), now) {
            // ECN-capable, as those of ConnectX: a congested switch marks it instead of dropping it.
            header.set_traffic_class(point.settings.cnp_dscp << 2 | Ecn::Capable as u8);
            header.set_priority(point.settings.cnp_802p_prio);
            point.owed.push_back(Owed { header, dest_qpn, flow });
        }
    }

    /// The path to the sender of a datagram, and its queue pair.
    fn way_to_sender(&self, port: &Port, packet: &Packet<'_>) -> Option<(PathHeader, Qpn)> {
        let sender = packet.deth()?.source_qpn();
        let mac = port.way_back(packet)?;
        let sgid_index = port.index_of_destination(packet)?;
        let address = AddressVector::new(packet.network().source, sgid_index).mac(mac);
        let path = address.path(port, self.qpn, sender).ok()?;
        Some((port.header(&path), sender))
    }
}

impl Shared {
    /// Whether CNPs wait for the port.
    pub(crate) fn owes_cnps(&self) -> bool {
        self.notification.as_ref().is_some_and(|point| !point.owed.is_empty())
    }

    /// Writes the oldest owed CNP.
    #[inline]
    pub(crate) fn transmit_cnp(&mut self, slot: &mut FrameSlot<'_>) -> Option<usize> {
        let point = self.notification.as_mut()?;
        let Owed { header, dest_qpn, flow } = point.owed.front()?;
        let flow = *flow;
        let mut bth = Bth::new(Opcode::CNP, *dest_qpn, Psn::new(0));
        bth.set_becn(true);
        bth.set_mig_req(false);
        let mut frame = slot.start(header, bth, RESERVED)?;
        frame.payload().fill(0);
        let length = frame.finish_with(self.crc);
        point.owed.pop_front();
        point.note_sent(flow, self.now);
        self.count(Counter::SentPkts);
        self.count(Counter::NpCnpSent);
        Some(slot.end((length, 0)))
    }
}
