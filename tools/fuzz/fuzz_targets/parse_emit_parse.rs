#![no_main]

use ferroce::wire::{
    Encapsulation, Extension, FrameBuilder, Link, Network, NetworkHeader, Packet, PathAddress, PathHeader,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    let mut frame = frame.to_vec();
    if !ferroce_fuzz::seal(&mut frame) {
        return;
    }
    let Ok(packet) = Packet::parse(&frame) else { return };
    // Two forms that are accepted and never emitted: a pad that is longer than it need be, and an IPv4
    // address spelled as an IPv6 one.
    let mapped = packet.network().source.is_ipv6() != packet.network().destination.is_ipv6()
        || packet.network().source.is_ipv6() == (packet.header == NetworkHeader::Ipv4);
    if packet.bth.pad() != packet.payload.len().wrapping_neg() & 3
        || packet.header != NetworkHeader::Grh && mapped
    {
        return;
    }

    let Link { destination, source, vlan } = packet.link().expect("parsed from a frame");
    let Network { header, traffic_class, flow_label, hop_limit, source_port, .. } = packet.network();
    let path = PathHeader::new(&PathAddress {
        source_mac: source,
        destination_mac: destination,
        vlan,
        source: packet.network().source,
        destination: packet.network().destination,
        encapsulation: match source_port {
            Some(source_port) => Encapsulation::RoceV2 { source_port },
            None => Encapsulation::RoceV1,
        },
        traffic_class,
        flow_label,
        hop_limit,
        identification: 0,
    });
    let mut buffer = vec![0xaa; frame.len() + 64];
    let mut builder = FrameBuilder::start(&mut buffer, &path, *packet.bth, packet.payload.len())
        .expect("a frame as long as the parsed one");
    for extension in packet.opcode.extensions() {
        match extension {
            Extension::Deth => packet.deth().map(|header| builder.put(header)),
            Extension::Reth => packet.reth().map(|header| builder.put(header)),
            Extension::AtomicEth => packet.atomic_eth().map(|header| builder.put(header)),
            Extension::Aeth => packet.aeth().map(|header| builder.put(header)),
            Extension::AtomicAckEth => packet.atomic_ack_eth().map(|header| builder.put(header)),
            Extension::ImmDt => packet.immdt().map(|header| builder.put(header)),
            Extension::Ieth => packet.ieth().map(|header| builder.put(header)),
            Extension::Feth => packet.feth().map(|header| builder.put(header)),
        }
        .expect("the opcode has it");
    }
    builder.payload().copy_from_slice(packet.payload);
    let length = builder.finish();
    let again = Packet::parse(&buffer[..length]).expect("what is emitted parses");
    assert_eq!(
        (again.link(), again.network(), again.opcode),
        (packet.link(), packet.network(), packet.opcode)
    );
    assert_eq!((again.bth, again.payload), (packet.bth, packet.payload));
    assert_eq!((again.deth(), again.reth()), (packet.deth(), packet.reth()));
    assert_eq!((again.atomic_eth(), again.aeth()), (packet.atomic_eth(), packet.aeth()));
    assert_eq!((again.atomic_ack_eth(), again.immdt()), (packet.atomic_ack_eth(), packet.immdt()));
    assert_eq!((again.ieth(), again.feth()), (packet.ieth(), packet.feth()));
    if header != NetworkHeader::Ipv4 {
        // Over IPv4 the identification differs.
        assert!(again.header == header);
    }
});
