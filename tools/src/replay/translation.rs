//! A recorded packet translated for the engine: with the engine's queue pair numbers and keys.

use ferroce::wire::{
    AtomicEth, Encapsulation, ICRC_LEN, Ieth, Link, OwnedPacket, PathAddress, Reth, source_port,
};
use ferroce::{MacAddr, Qpn};

use super::memory::Exposed;
use super::packet::Seen;

/// The frame of a packet to the engine's queue pair, with the engine's keys. The ICRC remains as valid or invalid as it
/// was. The engine accepts one version of RoCE per connection.
pub(super) fn translated(
    recorded: &Seen,
    to: Qpn,
    exposed: &Exposed,
    [near, far]: [[u8; 6]; 2],
    is_v1: bool,
) -> Vec<u8> {
    let mut packet = OwnedPacket::clone(recorded);
    if to != Qpn::GSI {
        packet.bth.set_dest_qpn(to);
    }
    let extensions = &mut packet.extensions;
    if let Some(reth) = &mut extensions.reth {
        *reth = Reth::new(reth.va(), exposed.translate(reth.rkey(), reth.va()), reth.length());
    }
    if let Some(atomic) = &mut extensions.atomic_eth {
        let key = exposed.translate(atomic.rkey(), atomic.va());
        *atomic = AtomicEth::new(atomic.va(), key, atomic.swap_or_add(), atomic.compare());
    }
    if let Some(ieth) = &mut extensions.ieth {
        *ieth = Ieth::new(exposed.translate_any(ieth.rkey()));
    }
    if recorded.is_roce_v1() != is_v1 {
        packet.set_path(&PathAddress {
            encapsulation: match is_v1 {
                true => Encapsulation::RoceV1,
                false => Encapsulation::RoceV2 { source_port: source_port(0, Qpn::GSI, Qpn::GSI) },
            },
            flow_label: 0,
            hop_limit: 64,
            identification: 0,
            ..recorded.path()
        });
    }
    packet.link = Some(Link { destination: MacAddr(near), source: MacAddr(far), vlan: None });
    let mut frame = packet.emit();
    if !recorded.icrc_is_right {
        frame.iter_mut().rev().take(ICRC_LEN).for_each(|byte| *byte = !*byte);
    }
    frame
}
