//! A recorded packet as it must be to reach the engine.

use ferroce::wire::{
    Bth, Encapsulation, FrameBuilder, ICRC_LEN, NetworkHeader, PathAddress, PathHeader, ROCE_V1_ETHERTYPE,
    icrc, source_port,
};
use ferroce::{MacAddr, Qpn};
use zerocopy::FromBytes;

use super::memory::Exposed;
use super::packet::Seen;

/// The frame of a packet to the engine's queue pair, with the engine's keys. The ICRC stays
/// as right or wrong as it was. The engine takes one version of RoCE on a connection.
pub(super) fn translated(
    packet: &Seen,
    to: Qpn,
    exposed: &Exposed,
    [near, far]: [[u8; 6]; 2],
    is_v1: bool,
) -> Vec<u8> {
    let mut bytes = packet.bytes.clone();
    let bth = packet.header.bth_start();
    if to != Qpn::GSI {
        bytes[bth + 5..bth + 8].copy_from_slice(&to.value().to_be_bytes()[1..]);
    }
    let extensions = bth + 12;
    if let Some(reth) = packet.reth {
        let start = extensions + if packet.feth.is_some() { 4 } else { 0 };
        let key = exposed.translate(reth.rkey(), reth.va());
        bytes[start + 8..start + 12].copy_from_slice(&key.value().to_be_bytes());
    }
    if let Some(atomic) = packet.atomic {
        let key = exposed.translate(atomic.rkey(), atomic.va());
        bytes[extensions + 8..extensions + 12].copy_from_slice(&key.value().to_be_bytes());
    }
    if let Some(rkey) = packet.invalidates {
        bytes[extensions..extensions + 4].copy_from_slice(&exposed.translate_any(rkey).value().to_be_bytes());
    }
    if packet.is_roce_v1() != is_v1
        && let Some(frame) = encapsulated(packet, &bytes, [near, far], is_v1)
    {
        return frame;
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

/// The same packet, `bytes` from its network header on, in the other version of RoCE.
fn encapsulated(packet: &Seen, bytes: &[u8], [near, far]: [[u8; 6]; 2], is_v1: bool) -> Option<Vec<u8>> {
    let path = PathHeader::new(&PathAddress {
        source_mac: MacAddr(far),
        destination_mac: MacAddr(near),
        vlan: None,
        source: packet.source,
        destination: packet.destination,
        encapsulation: match is_v1 {
            true => Encapsulation::RoceV1,
            false => Encapsulation::RoceV2 { source_port: source_port(0, Qpn::GSI, Qpn::GSI) },
        },
        traffic_class: packet.traffic_class,
        flow_label: 0,
        hop_limit: 64,
        identification: 0,
    });
    let bth_start = packet.header.bth_start();
    let bth = Bth::read_from_bytes(bytes.get(bth_start..bth_start + Bth::LEN)?).ok()?;
    let (payload, extensions) = (packet.payload(), packet.opcode.extensions_len());
    let mut frame = vec![0; path.len() + Bth::LEN + extensions + payload.len() + 3 + ICRC_LEN];
    let mut builder = FrameBuilder::start(&mut frame, &path, bth, payload.len())?;
    for word in bytes.get(bth_start + Bth::LEN..)?.get(..extensions)?.as_chunks::<4>().0 {
        builder.put(word);
    }
    builder.payload().copy_from_slice(payload);
    let len = builder.finish();
    frame.truncate(len);
    if !packet.icrc_is_right {
        frame[len - ICRC_LEN..].iter_mut().for_each(|byte| *byte = !*byte);
    }
    Some(frame)
}
