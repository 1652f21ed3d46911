//! The notification point (docs/protocol.md §7): who sends packets that a switch has marked gets congestion
//! notification packets (CNPs).

use std::collections::VecDeque;

use ferroce_driver::Nanos;
use ferroce_wire::{Bth, Ecn, Gid, Opcode, Packet, PathHeader, Psn, Qpn, Service};

use crate::engine::frame_slot::FrameSlot;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{AddressVector, CnpScope, CongestionNotification, Port};

/// CNPs that wait for the port, at most. For a marked packet that finds no room there is none.
const OWED_MAX: usize = 256;
/// Peers whose last CNP is remembered. While all of them had one within the interval, others get none.
const PEERS_MAX: usize = 1024;
/// Zeros behind the BTH.
const RESERVED: usize = 16;

/// When CNPs were sent, and those that are owed.
pub(crate) struct NotificationPoint {
    settings: CongestionNotification,
    interval: u64,
    last: Last,
    owed: VecDeque<(PathHeader, Qpn)>,
}

/// When the last CNP was owed in each scope.
enum Last {
    /// By the slot of the queue pair, and its number then.
    QueuePairs(Box<[(Qpn, Nanos)]>),
    /// Ordered by GID.
    Peers(Vec<(Gid, Nanos)>),
    /// Of the whole port.
    Whole(Option<Nanos>),
}

impl NotificationPoint {
    /// For so many queue pairs.
    pub(crate) fn new(settings: CongestionNotification, max_qps: u32) -> NotificationPoint {
        let last = match settings.scope {
            CnpScope::QueuePair => {
                Last::QueuePairs(vec![(Qpn::default(), Nanos::ZERO); max_qps as usize].into_boxed_slice())
            }
            CnpScope::Peer => Last::Peers(Vec::with_capacity(PEERS_MAX)),
            CnpScope::Port => Last::Whole(None),
        };
        let interval = u64::try_from(settings.min_time_between_cnps.as_nanos()).unwrap_or(u64::MAX);
        NotificationPoint { settings, interval, last, owed: VecDeque::with_capacity(OWED_MAX) }
    }

    /// Whether a CNP may be sent now to this peer of a queue pair. If so, that is remembered.
    fn admits(&mut self, now: Nanos, (slot, qpn): (u32, Qpn), peer: Gid) -> bool {
        if self.owed.len() == OWED_MAX {
            return false;
        }
        let interval = self.interval;
        let is_over = |last: Nanos| now.0.saturating_sub(last.0) >= interval;
        match &mut self.last {
            Last::QueuePairs(queue_pairs) => {
                let Some((of, last)) = queue_pairs.get_mut(slot as usize) else { return false };
                if *of == qpn && !is_over(*last) {
                    return false;
                }
                (*of, *last) = (qpn, now);
            }
            Last::Peers(peers) => match peers.binary_search_by_key(&peer.0, |(gid, _)| gid.0) {
                Ok(at) if !is_over(peers[at].1) => return false,
                Ok(at) => peers[at].1 = now,
                Err(_) => {
                    if peers.len() == PEERS_MAX {
                        peers.retain(|(_, last)| !is_over(*last));
                    }
                    if peers.len() == PEERS_MAX {
                        return false;
                    }
                    let at = peers.partition_point(|(gid, _)| gid.0 < peer.0);
                    peers.insert(at, (peer, now));
                }
            },
            Last::Whole(last) => {
                if last.is_some_and(|last| !is_over(last)) {
                    return false;
                }
                *last = Some(now);
            }
        }
        true
    }
}

impl QueuePair {
    /// A switch has marked a packet for this queue pair that has passed all checks. The transmit phase tells its sender.
    #[cold]
    pub(crate) fn note_marked(&mut self, shared: &mut Shared, port: &Port, packet: &Packet<'_>) {
        let now = shared.now;
        let Some(point) = &mut shared.notification else { return };
        // An acknowledgement is no data: to slow its sender down would not help.
        if packet.opcode.is_acknowledgement() || self.next_hop.is_some() {
            return;
        }
        let way = match self.service {
            Service::Ud => self.way_to_sender(port, packet),
            _ => self.connection.as_ref().map(|connection| (connection.header, connection.dest_qpn)),
        };
        let Some((mut header, sender)) = way else { return };
        if point.admits(now, (self.handle.0.index, self.qpn), packet.network().source) {
            // ECN-capable, as those of ConnectX: a congested switch marks it, and does not drop it for that.
            header.set_traffic_class(point.settings.cnp_dscp << 2 | Ecn::Capable as u8);
            header.set_priority(point.settings.cnp_802p_prio);
            point.owed.push_back((header, sender));
        }
    }

    /// The way back to the sender of a datagram, and its queue pair. Of a datagram to a group there is none: all members
    /// would tell at once.
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

    /// Writes the oldest CNP that is owed.
    #[inline]
    pub(crate) fn transmit_cnp(&mut self, slot: &mut FrameSlot<'_>) -> Option<usize> {
        let point = self.notification.as_mut()?;
        let (header, sender) = point.owed.front()?;
        let mut bth = Bth::new(Opcode::CNP, *sender, Psn::new(0));
        bth.set_becn(true);
        bth.set_mig_req(false);
        let mut frame = slot.start(header, bth, RESERVED)?;
        frame.payload().fill(0);
        let length = frame.finish_with(self.crc);
        point.owed.pop_front();
        self.count(Counter::SentPkts);
        self.count(Counter::NpCnpSent);
        Some(slot.end((length, 0)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn gid(last: u32) -> Gid {
        let mut bytes = [0; 16];
        bytes[12..].copy_from_slice(&last.to_be_bytes());
        Gid(bytes)
    }

    fn point(scope: CnpScope, micros: u64) -> NotificationPoint {
        let interval = Duration::from_micros(micros);
        let settings = CongestionNotification::default().scope(scope).min_time_between_cnps(interval);
        NotificationPoint::new(settings, 4)
    }

    /// Times in µs, queue pair and peer of marked packets, and whether each makes a CNP.
    fn admitted(point: &mut NotificationPoint, marked: &[(u64, u32, u32)]) -> Vec<bool> {
        let admits = |(time, qp, peer): &(u64, u32, u32)| {
            point.admits(Nanos(1000 * time), (*qp, Qpn::new(10 + qp)), gid(*peer))
        };
        marked.iter().map(admits).collect()
    }

    #[test]
    fn one_in_each_interval_and_scope() {
        let marked = [(0, 0, 1), (1, 0, 2), (1, 1, 1), (1, 1, 2), (49, 0, 1), (50, 0, 1), (51, 1, 2)];
        let cases = [
            (CnpScope::QueuePair, [true, false, true, false, false, true, true]),
            (CnpScope::Peer, [true, true, false, false, false, true, true]),
            (CnpScope::Port, [true, false, false, false, false, true, false]),
        ];
        for (scope, expected) in cases {
            assert_eq!(admitted(&mut point(scope, 50), &marked), expected, "{scope:?}");
            assert_eq!(admitted(&mut point(scope, 0), &marked), [true; 7], "{scope:?}");
        }
    }

    /// The first packet of a queue pair that has taken the slot of another.
    #[test]
    fn a_new_queue_pair_owes_nothing_for_its_predecessor() {
        let mut point = point(CnpScope::QueuePair, 50);
        assert!(point.admits(Nanos(5), (0, Qpn::new(7)), gid(1)));
        assert!(point.admits(Nanos(6), (0, Qpn::new(8)), gid(1)));
        assert!(!point.admits(Nanos(7), (0, Qpn::new(8)), gid(1)));
    }

    #[test]
    fn peers_without_number_get_no_more_than_they_may() {
        let mut point = point(CnpScope::Peer, 50);
        let all: Vec<_> = (0..3000).map(|peer| (0, 0, peer)).collect();
        assert_eq!(admitted(&mut point, &all).iter().filter(|admitted| **admitted).count(), PEERS_MAX);
        // Those that had one get none within the interval, others once theirs are over.
        assert_eq!(admitted(&mut point, &[(49, 0, 5), (49, 0, 2000), (50, 0, 2000)]), [false, false, true]);
    }
}
