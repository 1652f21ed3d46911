//! The process that receives a packet, on an address that several processes share.
//!
//! The number of a queue pair determines its slot. The address has one QP1. A response of the connection manager
//! contains the communication id of the requester, whose low bits are its slot; a request contains the service that it
//! asks for (IBA 12.6, docs/protocol.md §2).

use super::{Group, PACKET, SLOTS};

/// Set in the number of every queue pair whose context may share its address, and in no other. Only this bit tells a
/// sender that packets sent at once may be for several queue pairs.
pub(crate) const SHARED: u32 = 1;
/// Odd and even numbers of each slot.
pub(crate) const NUMBERS: u32 = 2 * SLOTS as u32;

/// The queue pair of MADs.
pub(crate) const QP1: u32 = 1;

/// The part of an IP packet from its BTH on.
#[inline]
pub(crate) fn datagram_of(packet: &[u8]) -> Option<&[u8]> {
    const UDP: usize = 8;
    let network = if packet.first()? >> 4 == 4 { 20 } else { 40 };
    packet.get(network + UDP..)
}

/// The destination QPN of a packet, from its BTH on.
#[inline]
pub(crate) fn qpn_of(datagram: &[u8]) -> Option<u32> {
    let &[_, a, b, c] = datagram.get(4..8)? else { return None };
    Some(u32::from_be_bytes([0, a, b, c]))
}

/// `(rest, divisor)` of the queue pair numbers of a slot. Slot 0 has all even ones.
pub(crate) fn qpns(slot: usize) -> (u32, u32) {
    if slot == 0 { (0, 2) } else { (2 * slot as u32 + SHARED, NUMBERS) }
}

/// The slot of a queue pair.
#[inline]
pub(crate) fn slot_of(qpn: u32) -> usize {
    if qpn & SHARED == 0 { 0 } else { ((qpn % NUMBERS) >> 1) as usize }
}

/// `(rest, divisor)` of the communication ids of a slot.
pub(crate) fn comm_ids(slot: usize) -> (u32, u32) {
    (slot as u32, SLOTS as u32)
}

/// Forwards a packet to its owners, including slot `own` of this process. `datagram` is its part from the BTH on.
pub(crate) fn post(group: &Group, own: usize, datagram: &[u8], packet: &[u8]) {
    let Some(qpn) = qpn_of(datagram) else { return };
    let to = slot_of(qpn);
    let is_own = if qpn == QP1 { post_mad(group, own, datagram, packet) } else { to == own };
    if is_own {
        group.post_or_count((own, own), PACKET, packet);
    } else if qpn != QP1 {
        group.post_or_count((own, to), PACKET, packet);
    }
}

/// Forwards a packet for QP1 to its owners. `datagram` is its part from the BTH on. Returns whether slot `own` of this
/// process, which already has the packet, is an owner.
pub(crate) fn post_mad(group: &Group, own: usize, datagram: &[u8], packet: &[u8]) -> bool {
    let alive = group.alive();
    let lowest = alive & alive.wrapping_neg();
    let first = || group.first_with_services().map_or(lowest, |slot| 1 << slot);
    let to = match recipient(datagram) {
        Recipient::Slot(slot) if alive >> slot & 1 == 1 => 1 << slot,
        // It has ended with all its connections. Another process with a connection manager answers so.
        Recipient::Slot(slot) if group.is_vacant(slot) => first(),
        // It has just joined. The peer will retransmit.
        Recipient::Slot(_) => 0,
        // As above, if no process has the service.
        Recipient::Service(service) => group.find(service).map_or_else(first, |slot| 1 << slot),
        Recipient::Unknown => lowest,
        Recipient::Anybody if group.may_tell_all() => alive,
        Recipient::Anybody => 0,
    };
    if to == 0 {
        group.lose(own, 1);
    }
    for slot in (0..SLOTS).filter(|slot| to >> slot & 1 == 1 && *slot != own) {
        group.post_or_count((own, slot), PACKET, packet);
    }
    to >> own & 1 == 1
}

/// The owner of a packet's connection, from its BTH on: of its queue pair, or for QP1 the slot that has started or
/// accepted the exchange.
#[inline]
pub(crate) fn party(datagram: &[u8]) -> Option<usize> {
    match qpn_of(datagram)? {
        QP1 => match recipient(datagram) {
            Recipient::Slot(slot) => Some(slot),
            _ => None,
        },
        qpn => Some(slot_of(qpn)),
    }
}

/// The recipient of a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recipient {
    /// The process that allocated the communication id.
    Slot(usize),
    /// The process with the service.
    Service(u64),
    /// The process that knows the exchange by the peer's id: for a REJ, whose sender may not know the receiver's id.
    Anybody,
    /// None: it is not a message of the connection manager, or lacks the required id.
    Unknown,
}

/// The length of BTH and DETH.
const MAD: usize = 12 + 8;
/// The offset of the body, after a MAD's header.
const BODY: usize = MAD + 24;

/// The recipient of a packet for QP1, from its BTH on.
fn recipient(packet: &[u8]) -> Recipient {
    let number =
        |at: usize| packet.get(at..).and_then(|rest| rest.first_chunk()).map(|n| u32::from_be_bytes(*n));
    let service =
        || packet.get(BODY + 8..).and_then(|rest| rest.first_chunk()).map(|n| u64::from_be_bytes(*n));
    let attribute =
        packet.get(MAD + 16..).and_then(|rest| rest.first_chunk()).map(|n| u16::from_be_bytes(*n));
    let found = match attribute {
        Some(REQ | SIDR_REQ) => service().map(Recipient::Service),
        Some(SIDR_REP) => number(BODY).map(of_comm_id),
        Some(REJ) if number(BODY + 4) == Some(0) => Some(Recipient::Anybody),
        // All of these contain the sender's id, followed by the receiver's.
        Some(MRA..=DREP | LAP | APR) => number(BODY + 4).map(of_comm_id),
        _ => None,
    };
    found.unwrap_or(Recipient::Unknown)
}

/// The sender of a request, from its BTH on.
pub(crate) fn sender(packet: &[u8]) -> Option<usize> {
    let is_mad = qpn_of(packet)? == QP1;
    let comm_id = u32::from_be_bytes(*packet.get(BODY..)?.first_chunk()?);
    is_mad.then_some((comm_id % SLOTS as u32) as usize)
}

fn of_comm_id(id: u32) -> Recipient {
    if id == 0 { Recipient::Unknown } else { Recipient::Slot((id % SLOTS as u32) as usize) }
}

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const DREP: u16 = 0x16;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;
const LAP: u16 = 0x19;
const APR: u16 = 0x1a;

#[cfg(test)]
mod tests {
    use super::*;

    fn mad(attribute: u16, body: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; BODY];
        packet[7] = 1;
        packet[MAD + 16..MAD + 18].copy_from_slice(&attribute.to_be_bytes());
        packet.extend(body);
        packet
    }

    #[test]
    fn a_number_belongs_to_one_slot() {
        for slot in 0..SLOTS {
            let (rest, divisor) = qpns(slot);
            assert!((0..1000).all(|n| slot_of(n * divisor + rest) == slot));
        }
    }

    #[test]
    fn requests_are_of_their_service_and_answers_of_who_asked() {
        let service = 0x0000_0000_0106_1234u64;
        let ids = [[0, 0, 0, 65], [0x80, 0, 1, 130]].concat();
        let asked = [&ids[..], &service.to_be_bytes()].concat();
        for attribute in [REQ, SIDR_REQ] {
            assert_eq!(recipient(&mad(attribute, &asked)), Recipient::Service(service));
        }
        for attribute in (MRA..=DREP).chain([LAP, APR]) {
            assert_eq!(recipient(&mad(attribute, &asked)), Recipient::Slot(2));
        }
        assert_eq!(recipient(&mad(SIDR_REP, &asked)), Recipient::Slot(1));
        for attribute in (MRA..=DREP).chain([LAP, APR]) {
            // Otherwise each of several processes would answer a DREQ to any address, even a forged source address.
            let expected = if attribute == REJ { Recipient::Anybody } else { Recipient::Unknown };
            assert_eq!(recipient(&mad(attribute, &[0, 0, 0, 65, 0, 0, 0, 0])), expected);
        }
        assert_eq!(sender(&mad(REQ, &asked)), Some(1));
        for (attribute, body) in
            [(REQ, &asked[..15]), (0x13, &asked[..7]), (SIDR_REP, &asked[..3]), (0x1b, &asked)]
        {
            assert_eq!(recipient(&mad(attribute, body)), Recipient::Unknown);
        }
        assert_eq!((recipient(&[]), sender(&[]), sender(&[0; 48])), (Recipient::Unknown, None, None));
    }
}
