//! A recorded packet as it must be to reach the engine.

use ferroce::Qpn;
use ferroce::wire::{ICRC_LEN, NetworkHeader, ROCE_V1_ETHERTYPE, icrc};

use super::memory::Exposed;
use super::packet::Seen;

/// The frame of a packet to the engine's queue pair, with the engine's keys. The ICRC stays
/// as right or wrong as it was.
pub(super) fn translated(packet: &Seen, to: Qpn, exposed: &Exposed, near: [u8; 6], far: [u8; 6]) -> Vec<u8> {
    let mut bytes = packet.bytes.clone();
    let bth = packet.header.bth_start();
    if to != Qpn::GSI {
        bytes[bth + 5..bth + 8].copy_from_slice(&to.value().to_be_bytes()[1..]);
    }
    let extensions = bth + 12;
    if let Some(reth) = packet.reth {
        let start = extensions + if packet.feth.is_some() { 4 } else { 0 };
        let key = exposed.translate(reth.rkey(), reth.va());
        bytes[start + 8..start + 12].copy_from_slice(&key.0.to_be_bytes());
    }
    if let Some(atomic) = packet.atomic {
        let key = exposed.translate(atomic.rkey(), atomic.va());
        bytes[extensions + 8..extensions + 12].copy_from_slice(&key.0.to_be_bytes());
    }
    if let Some(rkey) = packet.invalidates {
        bytes[extensions..extensions + 4].copy_from_slice(&exposed.translate_any(rkey).0.to_be_bytes());
    }
    let end = bytes.len() - ICRC_LEN;
    if let Some(right) = icrc::compute(packet.header, &bytes[..end]) {
        let icrc = if packet.icrc_is_right { right } else { !right };
        bytes[end..].copy_from_slice(&icrc.to_le_bytes());
    }
    let ethertype: u16 = match packet.header {
        NetworkHeader::Ipv4 => 0x0800,
        NetworkHeader::Ipv6 => 0x86dd,
        NetworkHeader::Grh => ROCE_V1_ETHERTYPE,
    };
    [&near[..], &far[..], &ethertype.to_be_bytes()[..], &bytes].concat()
}
