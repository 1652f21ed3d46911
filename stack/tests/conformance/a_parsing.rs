//! Section A: parsing, ICRC, demultiplexing.

use ferroce::WcStatus::Success;
use ferroce::wire::{Encapsulation, NetworkHeader, Opcode, PKEY_DEFAULT, PKey, Packet, ParseError, Qpn};
use ferroce::{Access, Counter, Event, Memory, QpConfig, QpState, QpType, Transition};

use crate::packet::{BTH, IP, UDP, ack, packet, reseal};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, pattern};

/// The vectors of docs/protocol.md §3.
const TV1: &str = "0200000000020200000000010800 456a0034123440004011a417c0000201c0000202
    c00112b700200000 0470ffff00000011800000fe 68656c6c6f000000 740220d2";
const TV2: &str = "02000000000202000000000181006064 86dd 66a123450030114020010db8000000000000000000000001
    20010db8000000000000000000000002 d23412b700300000 0a00ffff00abcdef80ffffff
    00007f001234567800a1b2c300000008 0102030405060708 ad97cb5d";
const TV3: &str = "e41d2dab2bc27cfe90643b320800 45c2003c718c4000401191610a0011010a001201
    000012b700280000 8100ffff4000011800000000 00000000000000000000000000000000 82fd002a";
const TV4: &str = "0200000000010200000000020800 456a0030432140004011732ec0000202c0000201
    c00112b7001c0000 1140ffff00000012000000fe 1f000001 4fd72dc9";

#[test]
fn case_001_known_vectors() {
    // Unchanged: parsed, ICRC included, and dropped only because their queue pair does not exist.
    let mut peer = Peer::new();
    for vector in [TV1, TV2, TV3, TV4] {
        peer.expect_dropped(hex(vector), Counter::RxUnknownQp);
        peer.expect_counted(Counter::RcvdPkts, 1);
        assert_eq!(bitwise_icrc(&hex(vector)), icrc_of(&hex(vector)));
    }

    // TV1 for a queue pair that exists: received, and answered with a packet like TV4.
    let mut peer = Peer::with(Setup { rq_psn: 0xfe, ..Setup::default() });
    let mr = peer.post_recv(1, 64);
    let mut frame = hex(TV1);
    frame[BTH + 5..BTH + 8].copy_from_slice(&peer.qpn.value().to_be_bytes()[1..]);
    reseal(&mut frame);
    peer.inject_frame(frame);
    let answer = peer.expect(Opcode::RC_ACKNOWLEDGE, 0xfe);
    assert_eq!(answer.frame[BTH + 8..BTH + 16], hex(TV4)[BTH + 8..BTH + 16], "AckReq, PSN, AETH");
    assert_eq!(bitwise_icrc(&answer.frame), icrc_of(&answer.frame), "ICRC of the answer");
    assert_eq!(peer.expect_wc(1, Success).byte_len, 5);
    assert_eq!(&peer.bytes(mr)[..8], b"hello\0\0\0");

    // TV2 likewise: over IPv6, tagged, at the last PSN.
    let mut peer = Peer::with(Setup { ipv6: true, rq_psn: 0xff_ffff, ..Setup::default() });
    let (memory, access) = (Memory::zeroed(8).unwrap(), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let mr = peer.context.register_at(peer.pd, memory, access, 0x7f00_1234_5678).unwrap();
    let mut frame = hex(TV2);
    let bth = 18 + 40 + 8;
    frame[bth + 5..bth + 8].copy_from_slice(&peer.qpn.value().to_be_bytes()[1..]);
    frame[bth + 20..bth + 24].copy_from_slice(&peer.remote(mr).rkey.value().to_be_bytes());
    reseal(&mut frame);
    peer.inject_frame(frame);
    let answer = peer.expect(Opcode::RC_ACKNOWLEDGE, 0xff_ffff);
    assert_eq!(bitwise_icrc(&answer.frame), icrc_of(&answer.frame), "ICRC of the answer");
    assert_eq!(peer.bytes(mr), [1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn case_002_what_routers_and_switches_change() {
    // TV1b: CE, TTL 63, FECN; the ICRC is unchanged.
    let mut routed = hex(TV1);
    route(&mut routed);
    let parsed = Packet::parse(&routed).unwrap();
    assert!(parsed.congestion_experienced() && parsed.bth.fecn() && parsed.network().hop_limit == 63);

    let mut peer = Peer::new();
    let send = |psn| packet(Opcode::RC_SEND_ONLY, psn).ack_req().payload(b"hello");
    let tag = |frame: &mut Vec<u8>, tci: [u8; 2]| {
        frame.splice(12..12, [0x81, 0x00, tci[0], tci[1]]);
    };
    let mut routed = peer.frame(&send(RQ));
    route(&mut routed);
    let mut tagged = peer.frame(&send(RQ + 1));
    tag(&mut tagged, [0x00, 0x64]);
    let mut retagged = peer.frame(&send(RQ + 2));
    tag(&mut retagged, [0xe0, 0x64]);
    for (n, frame) in [routed, tagged, retagged].into_iter().enumerate() {
        let mr = peer.post_recv(n as u64, 5);
        peer.inject_frame(frame);
        peer.expect_ack(RQ + n as u32, n as u32 + 1);
        peer.expect_wc(n as u64, Success);
        assert_eq!(peer.bytes(mr), b"hello");
    }

    fn route(frame: &mut [u8]) {
        frame[IP + 1] |= 3;
        frame[IP + 8] = 63;
        frame[BTH + 4] |= 0x80;
        // A router updates the checksum: the sum over the header is all ones.
        frame[IP + 10..IP + 12].fill(0);
        let words = frame[IP..UDP].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
        let sum: u32 = words.sum();
        let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
        frame[IP + 10..IP + 12].copy_from_slice(&checksum.to_be_bytes());
    }
}

#[test]
fn case_003_one_bit_flipped() {
    for ipv6 in [false, true] {
        let mut peer = Peer::with(Setup { ipv6, ..Setup::default() });
        let good = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello"));
        let (udp, bth) = if ipv6 { (IP + 40, IP + 48) } else { (UDP, BTH) };
        // Not covered by the ICRC.
        let is_variant = |at: usize, bit: u8| match at - IP {
            1 | 8 | 10 | 11 if !ipv6 => true,
            0 if ipv6 => bit < 4,
            1..=3 | 7 if ipv6 => true,
            _ => at == bth + 4 || at == udp + 6 || at == udp + 7,
        };
        // Checked before the ICRC can be, and so possibly counted as something else: version and lengths, fragmentation,
        // protocol, destination port, opcode.
        let is_read_first = |at: usize, bit: u8| match at - IP {
            0 | 2 | 3 | 9 if !ipv6 => true,
            6 if !ipv6 => bit != 6 && bit != 7,
            7 if !ipv6 => true,
            0 | 4..=6 if ipv6 => true,
            _ => (udp + 2..udp + 6).contains(&at) || at == bth,
        };
        let mut by_icrc = 0;
        for at in IP..good.len() {
            for bit in (0..8).filter(|bit| !is_variant(at, *bit)) {
                let mut frame = good.clone();
                frame[at] ^= 1 << bit;
                let refused = Packet::parse(&frame).expect_err("a flipped bit");
                if matches!(refused, ParseError::Icrc { .. }) {
                    by_icrc += 1;
                    peer.expect_dropped(frame, Counter::RxIcrcEncapsulated);
                    continue;
                }
                assert!(is_read_first(at, bit), "byte {at} bit {bit}: {refused}");
                let before = peer.query();
                peer.inject_frame(frame);
                peer.expect_nothing();
                assert_eq!(peer.query(), before, "byte {at} bit {bit}");
                peer.expect_counted(Counter::RcvdPkts, 0);
            }
        }
        assert!(by_icrc > 250, "only {by_icrc} flips were seen by the ICRC");
        // Nothing is stuck: the same packet, undamaged.
        peer.post_recv(1, 5);
        peer.inject_frame(good);
        peer.expect_ack(RQ, 1);
        peer.expect_wc(1, Success);
    }
}

#[test]
fn case_004_pad() {
    let mut peer = Peer::new();
    for (n, text) in [b"a".as_slice(), b"bc", b"def"].into_iter().enumerate() {
        let (n, id) = (n as u32, n as u64);
        let mr = peer.post_recv(id, 8);
        peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + n).ack_req().payload(text));
        peer.expect_ack(RQ + n, n + 1);
        assert_eq!(peer.expect_wc(id, Success).byte_len as usize, text.len());
        assert_eq!(&peer.bytes(mr)[..text.len()], text);

        peer.post_send(10 + id, text);
        let sent = peer.expect(Opcode::RC_SEND_ONLY, SQ + n);
        assert_eq!((sent.bth.pad(), &sent.payload[..]), (4 - text.len(), text));
        let pad = &sent.frame[BTH + 12 + text.len()..sent.frame.len() - 4];
        assert_eq!(pad, &[0, 0, 0][..4 - text.len()], "the pad");
        peer.inject(ack(SQ + n, n + 1));
        peer.expect_wc(10 + id, Success);
    }
}

#[test]
fn case_005_pad_is_not_delivered() {
    let mut peer = Peer::new();
    let mr = peer.post_recv(1, 8);
    let mut frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello"));
    let end = frame.len() - 4;
    frame[end - 3..end].copy_from_slice(b"!!!");
    reseal(&mut frame);
    peer.inject_frame(frame);
    peer.expect_ack(RQ, 1);
    assert_eq!(peer.expect_wc(1, Success).byte_len, 5);
    assert_eq!(peer.bytes(mr), b"hello\0\0\0");
}

#[test]
fn case_006_udp_length() {
    for ipv6 in [false, true] {
        let mut peer = Peer::with(Setup { ipv6, ..Setup::default() });
        let good = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello"));
        let udp = if ipv6 { IP + 40 } else { UDP };
        let right = (good.len() - udp) as u16;
        for length in (0..24).chain([right + 1, right + 4, 0xffff]) {
            let mut frame = good.clone();
            frame[udp + 4..udp + 6].copy_from_slice(&length.to_be_bytes());
            reseal(&mut frame);
            peer.expect_dropped(frame, Counter::RxLengthErrors);
        }
        // An IP length beyond the frame is invalid too.
        let mut frame = good.clone();
        frame[if ipv6 { IP + 5 } else { IP + 3 }] += 1;
        reseal(&mut frame);
        peer.expect_dropped(frame, Counter::RxLengthErrors);
    }
}

#[test]
fn case_007_every_opcode_too_short() {
    let mut peer = Peer::new();
    let nobody = Qpn::new(peer.qpn.value() ^ 1);
    for byte in 0..=255 {
        for pad in 0..4u8 {
            let Some(opcode) = Opcode::from_byte(byte) else {
                peer.expect_dropped(peer.raw(byte, pad << 4, peer.qpn, 60), Counter::RxUnknownOpcode);
                continue;
            };
            let needed = 12 + opcode.extensions_len() + usize::from(pad) + 4;
            for length in 0..needed {
                peer.expect_dropped(peer.raw(byte, pad << 4, peer.qpn, length), Counter::RxLengthErrors);
            }
            // With one byte more the length is valid.
            peer.expect_dropped(peer.raw(byte, pad << 4, nobody, needed), Counter::RxUnknownQp);
        }
    }
    // A frame truncated anywhere.
    let good =
        peer.frame(&packet(Opcode::RC_WRITE_ONLY, RQ).ack_req().reth(0, REMOTE.rkey, 5).payload(b"hello"));
    for length in 0..good.len() {
        peer.expect_dropped(good[..length].to_vec(), Counter::RxLengthErrors);
    }
}

#[test]
fn case_008_opcodes_that_do_not_exist() {
    let mut peer = Peer::new();
    for byte in [0x15, 0x18, 0x40, 0x80, 0xe0, 0xff] {
        peer.expect_dropped(peer.raw(byte, 0, peer.qpn, 60), Counter::RxUnknownOpcode);
    }
    // Everything that the table of docs/protocol.md §2 does not list.
    let rc = (0x00..=0x14).chain([0x16, 0x17, 0x1c, 0x1d]);
    let listed: Vec<u8> = rc.chain(0x20..=0x2b).chain([0x64, 0x65, 0x81]).collect();
    for byte in (0..=255).filter(|byte| !listed.contains(byte)) {
        peer.expect_dropped(peer.raw(byte, 0, peer.qpn, 60), Counter::RxUnknownOpcode);
    }
}

#[test]
fn case_009_version_and_queue_pair() {
    let mut peer = Peer::new();
    let request = packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello");
    for version in 1..16 {
        let mut frame = peer.frame(&request);
        frame[BTH + 1] |= version;
        reseal(&mut frame);
        peer.expect_dropped(frame, Counter::RxTransportVersion);
    }
    for qpn in [0, 1, 0xff_ffff, peer.qpn.value() ^ 1, peer.qpn.value() ^ 0x80_0000] {
        let frame = peer.frame(&request.clone().dest_qpn(Qpn::new(qpn)));
        peer.expect_dropped(frame, Counter::RxUnknownQp);
    }
    // A destroyed queue pair is unknown again.
    let (pd, cq) = (peer.pd, peer.cq);
    let short_lived = peer.context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let qpn = peer.context.query_qp(short_lived).unwrap().qpn;
    peer.context.destroy_qp(short_lived).unwrap();
    peer.expect_dropped(peer.frame(&request.dest_qpn(qpn)), Counter::RxUnknownQp);
}

#[test]
fn case_010_service_of_the_opcode() {
    let mut peer = Peer::new();
    for byte in (0x20..=0x2b).chain([0x64, 0x65]) {
        let opcode = Opcode::from_byte(byte).unwrap();
        let frame = peer.frame(&packet(opcode, RQ).ack_req().payload(&pattern(256)));
        peer.expect_dropped(frame, Counter::RxWrongService);
    }
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut peer = Peer::with(Setup { qp_type, ..Setup::default() });
        peer.post_recv(1, 512);
        let foreign: Vec<u8> = match qp_type {
            QpType::Uc => (0x00..=0x1d).chain([0x64, 0x65]).collect(),
            _ => (0x00..=0x1d).chain(0x20..=0x2b).collect(),
        };
        for opcode in foreign.into_iter().filter_map(Opcode::from_byte) {
            let frame = peer.frame(&packet(opcode, RQ).ack_req().payload(&pattern(256)));
            peer.expect_dropped(frame, Counter::RxWrongService);
        }
    }
}

#[test]
fn case_011_state_of_the_queue_pair() {
    let request = |psn| packet(Opcode::RC_SEND_ONLY, psn).ack_req().payload(b"hello");
    for state in [QpState::Reset, QpState::Init] {
        let mut peer = Peer::with(Setup { state, ..Setup::default() });
        if state == QpState::Init {
            peer.post_recv(1, 8);
        }
        for psn in [0, RQ] {
            peer.expect_dropped(peer.frame(&request(psn)), Counter::RxWrongState);
        }
    }
    // RESET after use: the data of its peer is gone too.
    let mut peer = Peer::new();
    peer.modify(Transition::Reset);
    assert_eq!(peer.query().dest_qpn, None);
    peer.expect_dropped(peer.frame(&request(RQ)), Counter::RxWrongState);

    let mut peer = Peer::with(Setup { state: QpState::Rtr, ..Setup::default() });
    let mr = peer.post_recv(1, 8);
    peer.inject(request(RQ));
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);
    peer.expect_event(Event::CommEst(peer.qp));
    assert_eq!(&peer.bytes(mr)[..5], b"hello");
}

#[test]
fn case_012_address_of_the_peer() {
    let mut peer = Peer::new();
    peer.post_recv(1, 8);
    let outstanding = pattern(8);
    peer.post_send(2, &outstanding);
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    let mr = peer.memory(&[7; 8]);
    let remote = peer.remote(mr);

    let right = peer.address;
    let mut wrong = Vec::new();
    for bit in [0, 7, 24] {
        let mut address = right;
        address.source.0[15 - bit / 8] ^= 1 << (bit % 8);
        wrong.push(address);
    }
    let mut address = right;
    address.destination.0[15] ^= 1;
    wrong.push(address);
    let mut address = right;
    let v6 = Peer::with(Setup { ipv6: true, ..Setup::default() }).address;
    (address.source, address.destination) = (v6.source, v6.destination);
    wrong.push(address);

    for address in wrong {
        peer.address = address;
        for script in [
            packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"forged"),
            packet(Opcode::RC_WRITE_ONLY, RQ).ack_req().reth(remote.addr, remote.rkey, 8).payload(&[0; 8]),
            packet(Opcode::RC_READ_REQUEST, RQ).ack_req().reth(0, REMOTE.rkey, 8),
            packet(Opcode::RC_SEND_MIDDLE, RQ + 9).ack_req(),
            ack(SQ, 1),
            packet(Opcode::RC_ACKNOWLEDGE, SQ).aeth(0x62, 0),
        ] {
            peer.expect_dropped(peer.frame(&script), Counter::RxWrongAddress);
        }
    }
    assert_eq!(peer.bytes(mr), [7; 8]);

    peer.address = right;
    peer.inject(ack(SQ, 1));
    peer.expect_wc(2, Success);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"genuine"));
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);
}

#[test]
fn case_013_partition_key() {
    let mut peer = Peer::new();
    let request = |psn, pkey| packet(Opcode::RC_SEND_ONLY, psn).ack_req().pkey(pkey).payload(b"hello");
    for (n, pkey) in [0x7fff, PKEY_DEFAULT.0].into_iter().enumerate() {
        peer.post_recv(n as u64, 8);
        peer.inject(request(RQ + n as u32, pkey));
        peer.expect_ack(RQ + n as u32, n as u32 + 1);
        peer.expect_wc(n as u64, Success);
    }
    for pkey in [0x1234, 0x9234, 0xfffe, 0x0000] {
        peer.expect_foreign(peer.frame(&request(RQ + 2, pkey)), Some(peer.qp), PKey(pkey));
    }
}

#[test]
fn case_014_fragments_and_options() {
    let mut peer = Peer::new();
    let good = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello"));
    // More fragments; an offset; the last fragment; reserved bit aside, any mix of them.
    for word in [0x2000u16, 0x0001, 0x1fff, 0x2001, 0x6000, 0x4001] {
        let mut frame = good.clone();
        frame[IP + 6..IP + 8].copy_from_slice(&word.to_be_bytes());
        reseal(&mut frame);
        peer.expect_dropped(frame, Counter::RxIpErrors);
    }
    for words in 1..=10u8 {
        let mut frame = good.clone();
        // No-operation options between IP and UDP.
        frame.splice(UDP..UDP, vec![1; usize::from(words) * 4]);
        frame[IP] = 0x45 + words;
        let length = (frame.len() - IP) as u16;
        frame[IP + 2..IP + 4].copy_from_slice(&length.to_be_bytes());
        reseal(&mut frame);
        peer.expect_dropped(frame, Counter::RxIpErrors);
    }
}

#[test]
fn case_015_udp_checksum() {
    for ipv6 in [true, false] {
        let mut peer = Peer::with(Setup { ipv6, ..Setup::default() });
        // 0 is valid over both; any other is ignored, because the ICRC covers the packet.
        for (n, checksum) in [0x0000u16, 0xbad0].into_iter().enumerate() {
            let (n, id) = (n as u32, n as u64);
            let mr = peer.post_recv(id, 8);
            let mut frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ + n).ack_req().payload(b"hello"));
            let udp = if ipv6 { IP + 40 } else { UDP };
            frame[udp + 6..udp + 8].copy_from_slice(&checksum.to_be_bytes());
            peer.inject_frame(frame);
            let answer = peer.expect(Opcode::RC_ACKNOWLEDGE, RQ + n);
            assert_eq!(answer.frame[udp + 6..udp + 8], [0, 0], "checksum of the answer");
            assert_eq!(peer.expect_wc(id, Success).byte_len, 5);
            assert_eq!(&peer.bytes(mr)[..6], b"hello\0");
        }
    }
}

#[test]
fn case_016_bits_to_be_ignored() {
    let mut peer = Peer::new();
    // M, and the byte with FECN, BECN and Resv6, and Resv7 next to AckReq.
    let variants = [(false, 0x00, 0x00), (true, 0x00, 0x00), (true, 0xff, 0x7f), (false, 0x10, 0x7f)];
    for (n, (migrated, byte_4, byte_8)) in variants.into_iter().enumerate() {
        let (n, id) = (n as u32, n as u64);
        peer.post_recv(id, 8);
        let request = packet(Opcode::RC_SEND_ONLY, RQ + n).ack_req().mig_req(migrated).payload(b"hello");
        let mut frame = peer.frame(&request);
        frame[BTH + 4] = byte_4;
        frame[BTH + 8] |= byte_8;
        reseal(&mut frame);
        peer.inject_frame(frame);
        let answer = peer.expect(Opcode::RC_ACKNOWLEDGE, RQ + n);
        assert!(answer.bth.mig_req(), "M of {answer}");
        assert_eq!(
            (answer.frame[BTH + 4], answer.frame[BTH + 8] & 0x7f),
            (0, 0),
            "reserved bits of {answer}"
        );
        peer.expect_wc(id, Success);

        // The same in a response.
        peer.post_send(10 + id, b"there");
        peer.expect(Opcode::RC_SEND_ONLY, SQ + n);
        let mut frame = peer.frame(&ack(SQ + n, n + 1).mig_req(migrated));
        frame[BTH + 4] = byte_4;
        frame[BTH + 8] |= byte_8;
        reseal(&mut frame);
        peer.inject_frame(frame);
        peer.expect_wc(10 + id, Success);
    }
}

#[test]
fn case_017_udp_source_port() {
    let mut peer = Peer::new();
    let mr = peer.post_recv(1, 4 * 256);
    let data = pattern(4 * 256);
    let opcodes =
        [Opcode::RC_SEND_FIRST, Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_LAST];
    // It changes within a message.
    let ports = [0xd123, 0, 72, 0xffff];
    let mut answered = Vec::new();
    for (n, (opcode, source_port)) in opcodes.into_iter().zip(ports).enumerate() {
        peer.address.encapsulation = Encapsulation::RoceV2 { source_port };
        let piece = &data[n * 256..][..256];
        peer.inject(packet(opcode, RQ + n as u32).ack_req().payload(piece));
        let answer = peer.expect(Opcode::RC_ACKNOWLEDGE, RQ + n as u32);
        answered.push(u16::from_be_bytes([answer.frame[UDP], answer.frame[UDP + 1]]));
    }
    assert_eq!(peer.expect_wc(1, Success).byte_len, 4 * 256);
    assert_eq!(peer.bytes(mr), data);
    assert!(answered.iter().all(|port| *port == answered[0] && *port >= 0xc000), "own ports {answered:x?}");
}

#[test]
fn case_018_roce_v1_off() {
    let mut peer = Peer::new();
    peer.post_recv(1, 8);
    peer.address.encapsulation = Encapsulation::RoceV1;
    let frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello"));
    assert_eq!(Packet::parse(&frame).unwrap().header, NetworkHeader::Grh);
    peer.expect_dropped(frame, Counter::RxRoceV1Off);
}

pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn icrc_of(frame: &[u8]) -> u32 {
    u32::from_le_bytes(*frame.last_chunk().unwrap())
}

/// The ICRC once more, from the text of docs/protocol.md §3, bit by bit.
fn bitwise_icrc(frame: &[u8]) -> u32 {
    let ip = if frame[12..14] == [0x81, 0x00] { 18 } else { 14 };
    let mut packet = frame[ip..frame.len() - 4].to_vec();
    let (network_len, masked) = match packet[0] >> 4 {
        4 => (20, vec![1, 8, 10, 11]),
        _ => (40, vec![1, 2, 3, 7]),
    };
    if network_len == 40 {
        packet[0] |= 0x0f;
    }
    for at in masked.into_iter().chain([network_len + 6, network_len + 7, network_len + 8 + 4]) {
        packet[at] = 0xff;
    }
    let mut crc = u32::MAX;
    for byte in [0xff; 8].into_iter().chain(packet) {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc
}
