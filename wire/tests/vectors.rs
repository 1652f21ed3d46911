//! Known packets: the vectors of docs/protocol.md §3, one of them captured from a ConnectX-4 Lx.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce_wire::*;
use zerocopy::IntoBytes;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn tv1() -> Vec<u8> {
    hex("0200000000020200000000010800 456a0034123440004011a417c0000201c0000202
         c00112b700200000 0470ffff00000011800000fe 68656c6c6f000000 740220d2")
}

fn tv2() -> Vec<u8> {
    hex("02000000000202000000000181006064 86dd 66a123450030114020010db8000000000000000000000001
         20010db8000000000000000000000002 d23412b700300000 0a00ffff00abcdef80ffffff
         00007f001234567800a1b2c300000008 0102030405060708 ad97cb5d")
}

fn tv3() -> Vec<u8> {
    hex("e41d2dab2bc27cfe90643b320800 45c2003c718c4000401191610a0011010a001201
         000012b700280000 8100ffff4000011800000000 00000000000000000000000000000000 82fd002a")
}

fn tv4() -> Vec<u8> {
    hex("0200000000010200000000020800 456a0030432140004011732ec0000202c0000201
         c00112b7001c0000 1140ffff00000012000000fe 1f000001 4fd72dc9")
}

#[test]
fn tv1_send_only_ipv4() {
    let bytes = tv1();
    let packet = Packet::parse(&bytes).unwrap();
    assert_eq!(packet.opcode, Opcode::RC_SEND_ONLY);
    assert_eq!(packet.payload, b"hello");
    assert_eq!((packet.bth.dest_qpn().value(), packet.bth.psn().value()), (0x11, 0xfe));
    assert!(packet.bth.ack_req() && packet.bth.mig_req());
    assert_eq!(packet.network().source.to_string(), "::ffff:192.0.2.1");
    assert_eq!(OwnedPacket::from(&packet).emit(), bytes);
}

#[test]
fn tv1b_what_routers_change_is_outside_the_icrc() {
    let mut bytes = tv1();
    bytes[15] |= 3; // CE
    bytes[22] = 63; // TTL
    bytes[24..26].copy_from_slice(&[0, 0]); // IP checksum: any
    bytes[46] = 0x80; // FECN
    let packet = Packet::parse(&bytes).unwrap();
    assert!(packet.congestion_experienced() && packet.bth.fecn());
}

#[test]
fn tv2_write_only_ipv6_vlan() {
    let bytes = tv2();
    let packet = Packet::parse(&bytes).unwrap();
    assert_eq!(packet.opcode, Opcode::RC_WRITE_ONLY);
    assert_eq!(packet.link().unwrap().vlan, Some(VlanTag { id: 100, priority: 3 }));
    let reth = *packet.reth().unwrap();
    assert_eq!((reth.va(), reth.rkey(), reth.length()), (0x7f00_1234_5678, RKey::new(0x00a1_b2c3), 8));
    assert_eq!(OwnedPacket::from(&packet).emit(), bytes);
}

#[test]
fn tv3_cnp_of_a_connectx() {
    let bytes = tv3();
    let packet = Packet::parse(&bytes).unwrap();
    assert_eq!(packet.opcode, Opcode::CNP);
    assert_eq!((packet.network().source_port, packet.payload), (Some(0), [0; 16].as_slice()));
    assert!(packet.bth.becn());
    assert_eq!(OwnedPacket::from(&packet).emit(), bytes);
}

#[test]
fn tv4_acknowledge() {
    let bytes = tv4();
    let packet = Packet::parse(&bytes).unwrap();
    assert_eq!(packet.opcode, Opcode::RC_ACKNOWLEDGE);
    let aeth = *packet.aeth().unwrap();
    assert_eq!((aeth.syndrome(), aeth.msn()), (Some(Syndrome::ACK), 1));
    assert_eq!(aeth.as_bytes(), [0x1f, 0, 0, 1]);
    assert_eq!(OwnedPacket::from(&packet).emit(), bytes);
}

#[test]
fn every_length_of_every_opcode_is_refused_or_right() {
    let template = tv1();
    for byte in 0..=255u8 {
        for pad in 0..4u8 {
            for len in 0..200usize {
                let mut frame = template[..42].to_vec();
                frame.resize(42 + len, 0);
                if len >= 2 {
                    frame[42] = byte;
                    frame[43] = pad << 4;
                }
                let total = (28 + len) as u16;
                frame[16..18].copy_from_slice(&total.to_be_bytes());
                frame[38..40].copy_from_slice(&(total - 20).to_be_bytes());
                let decoded = Packet::decode(&frame);
                let Some(opcode) = Opcode::from_byte(byte) else {
                    assert!(decoded.is_err());
                    continue;
                };
                let needed = 12 + opcode.extensions_len() + usize::from(pad) + 4;
                match decoded {
                    Ok(packet) => assert_eq!(packet.payload.len(), len - needed),
                    Err(_) => assert!(len < needed.max(16), "{opcode} pad {pad} length {len}"),
                }
            }
        }
    }
}

#[test]
fn other_protocols_and_broken_packets_are_distinguished() {
    let good = tv1();
    let edit = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        Packet::parse(&bytes).unwrap_err()
    };
    assert_eq!(edit(13, 6), ParseError::NotRoce); // ARP
    assert_eq!(edit(23, 6), ParseError::NotRoce); // TCP
    assert_eq!(edit(37, 0xb8), ParseError::NotRoce); // another port
    assert_eq!(edit(20, 0x20), ParseError::Fragment); // more fragments
    assert_eq!(edit(21, 1), ParseError::Fragment); // an offset
    assert_eq!(edit(14, 0x46), ParseError::IpOptions(24));
    assert_eq!(edit(39, 23), ParseError::UdpLength { length: 23, available: 32 });
    assert_eq!(edit(39, 33), ParseError::UdpLength { length: 33, available: 32 });
    assert!(matches!(edit(59, b'H'), ParseError::Icrc { .. }));
    assert_eq!(Packet::parse(&good[..60]).unwrap_err(), ParseError::Truncated { needed: 52, present: 46 });
    assert!(matches!(Packet::parse(&good[..9]), Err(ParseError::Truncated { .. })));
}

#[test]
fn roce_v1_round_trips() {
    let v1 = PathAddress {
        source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
        destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
        vlan: None,
        source: Gid::link_local(MacAddr([2, 0, 0, 0, 0, 1])),
        destination: Gid::link_local(MacAddr([2, 0, 0, 0, 0, 2])),
        encapsulation: Encapsulation::RoceV1,
        traffic_class: 7,
        flow_label: 9,
        hop_limit: 1,
        identification: 0,
    };
    let mut made = OwnedPacket::new(&v1, Opcode::RC_SEND_ONLY, Qpn::new(7), Psn::new(8));
    made.set_payload(b"v1".to_vec());
    let parsed = OwnedPacket::parse(&made.emit()).unwrap();
    assert_eq!((parsed.network.header, parsed.path()), (NetworkHeader::Grh, v1));
    made.icrc = parsed.icrc;
    assert_eq!(parsed, made);
}

#[test]
fn source_ports_are_those_that_rxe_uses() {
    // Captured from rdma_rxe 6.12 with flow label 0xabcde.
    assert_eq!(source_port(0xabcde, Qpn::new(1), Qpn::new(2)), 0xfcf4);
    // Symmetric in the QPNs: both directions of a connection share one port.
    assert_eq!(
        source_port(0, Qpn::new(0x11), Qpn::new(0x345)),
        source_port(0, Qpn::new(0x345), Qpn::new(0x11))
    );
}

/// As if the headers had been created with it: IPv4 with its checksum, IPv6, with a VLAN tag, RoCE v1, without a link
/// header.
#[test]
fn the_traffic_class_of_a_path_can_be_changed() {
    for (ipv6, vlan, is_v1, without_link) in [
        (false, false, false, false),
        (false, true, false, false),
        (true, false, false, false),
        (true, true, false, false),
        (false, false, true, false),
        (false, false, false, true),
        (true, false, false, true),
    ] {
        let gid = |last: u8| match ipv6 {
            true => std::net::IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, last.into()]).into(),
            false => Gid::from_ipv4([192, 0, 2, last].into()),
        };
        let path = |traffic_class| PathAddress {
            source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
            vlan: vlan.then_some(VlanTag { priority: 3, id: 5 }),
            source: gid(1),
            destination: gid(2),
            encapsulation: if is_v1 {
                Encapsulation::RoceV1
            } else {
                Encapsulation::RoceV2 { source_port: 0xc123 }
            },
            traffic_class,
            flow_label: 0xa_bcde,
            hop_limit: 64,
            identification: 7,
        };
        let frame = |header: PathHeader| {
            let mut buffer = [0; 256];
            let header = if without_link { header.without_link() } else { header };
            let bth = Bth::new(Opcode::RC_SEND_ONLY, Qpn::new(5), Psn::new(9));
            let length = FrameBuilder::start(&mut buffer, &header, bth, 16).unwrap().finish();
            buffer[..length].to_vec()
        };
        for (before, after) in [(0, 0xff), (0xff, 0), (0x6a, 0xc0), (0x1c, 0x1e)] {
            let mut changed = PathHeader::new(&path(before));
            assert_eq!(changed.traffic_class(), before);
            changed.set_traffic_class(after);
            assert_eq!(changed.traffic_class(), after);
            assert_eq!(frame(changed), frame(PathHeader::new(&path(after))));
        }
        let mut marked = PathHeader::new(&path(0x6b));
        marked.set_ecn(Ecn::Capable);
        assert_eq!(marked.traffic_class(), 0x6a);
    }
}
