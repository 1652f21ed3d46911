//! Packets of every opcode, encapsulation and length: emitted ones are parsed to the original, and one wrong bit
//! covered by the ICRC is always detected. A failure prints the smallest input and is stored in a
//! `.proptest-regressions` file in this directory, which the next run replays.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce_wire::*;
use proptest::prelude::*;

/// A frame whose payload is in pieces that end at `cuts`.
fn emit_pieces(made: &OwnedPacket, cuts: &[prop::sample::Index]) -> Vec<u8> {
    let path = PathHeader::new(&made.path());
    let mut buffer = [0xaa; 8192];
    let mut builder = FrameBuilder::start(&mut buffer, &path, made.bth, made.payload.len()).unwrap();
    builder.put_extensions(&made.extensions);
    let (length, behind) = builder.fill(icrc::Portable, pieces(&made.payload, cuts).into_iter());
    assert_eq!(behind, 0);
    buffer[..length].to_vec()
}

/// The same, with a payload that is not copied.
fn emit_apart(made: &OwnedPacket, cuts: &[prop::sample::Index]) -> Vec<u8> {
    let path = PathHeader::new(&made.path());
    let (mut head, mut tail) = ([0xaa; 256], [0xbb; 8]);
    let length = made.payload.len();
    let mut builder = FrameBuilder::start_apart(&mut head, &mut tail, &path, made.bth, length).unwrap();
    builder.put_extensions(&made.extensions);
    let (front, behind) = builder.fill(icrc::Portable, pieces(&made.payload, cuts).into_iter());
    [&head[..front], &made.payload, &tail[..behind]].concat()
}

fn pieces<'a>(payload: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(payload.len() + 1)).collect();
    ends.sort_unstable();
    ends.push(payload.len());
    let starts = [0].into_iter().chain(ends.clone());
    starts.zip(&ends).map(|(start, end)| &payload[start..*end]).collect()
}

/// The start of the network header in the frame.
fn network_start(made: &OwnedPacket) -> usize {
    match made.link {
        Some(Link { vlan: Some(_), .. }) => 18,
        Some(_) => 14,
        None => 0,
    }
}

/// The bits that a switch or router may change, as masks of the bytes of the frame.
fn variant_bits(made: &OwnedPacket, frame_len: usize) -> Vec<u8> {
    let mut mask = vec![0; frame_len];
    mask[..12].fill(0xff);
    let start = network_start(made);
    if start == 18 {
        mask[14..16].fill(0xff);
    }
    let network = made.network.header;
    match network {
        NetworkHeader::Ipv4 => [1, 8, 10, 11].iter().for_each(|at| mask[start + at] = 0xff),
        NetworkHeader::Ipv6 | NetworkHeader::Grh => {
            mask[start] = 0x0f;
            [1, 2, 3, 7].iter().for_each(|at| mask[start + at] = 0xff);
        }
    }
    let mut bth = start + network.len();
    if network.has_udp() {
        mask[bth + 6..bth + 8].fill(0xff);
        bth += 8;
    }
    mask[bth + 4] = 0xff;
    mask
}

fn address() -> impl Strategy<Value = PathAddress> {
    let macs = (any::<[u8; 6]>(), any::<[u8; 6]>());
    let vlan = proptest::option::of((0u16..4096, 0u8..8).prop_map(|(id, priority)| VlanTag { id, priority }));
    let marks = (any::<u8>(), 0u32..1 << 20, any::<u8>(), any::<u16>());
    (macs, vlan, 0..3, any::<[u8; 16]>(), any::<[u8; 16]>(), any::<u16>(), marks).prop_map(
        |(macs, vlan, encapsulation, source, destination, source_port, marks)| {
            let gid = |bytes: [u8; 16]| match encapsulation {
                0 => Gid::from_ipv4([bytes[0], bytes[1], bytes[2], bytes[3]].into()),
                _ => Gid(bytes),
            };
            let (traffic_class, flow_label, hop_limit, identification) = marks;
            PathAddress {
                source_mac: MacAddr(macs.0),
                destination_mac: MacAddr(macs.1),
                vlan,
                source: gid(source),
                destination: gid(destination),
                encapsulation: match encapsulation {
                    2 => Encapsulation::RoceV1,
                    _ => Encapsulation::RoceV2 { source_port },
                },
                traffic_class,
                flow_label: if encapsulation == 0 { 0 } else { flow_label },
                hop_limit,
                identification: if encapsulation == 0 { identification } else { 0 },
            }
        },
    )
}

fn opcode() -> impl Strategy<Value = Opcode> {
    let all: Vec<Opcode> = (0..=255).filter_map(Opcode::from_byte).collect();
    proptest::sample::select(all)
}

/// A value for every header.
fn extensions() -> impl Strategy<Value = Extensions> {
    (any::<[u64; 4]>(), any::<[u32; 4]>(), any::<u8>()).prop_map(|([a, b, c, d], [e, f, g, h], byte)| {
        let syndrome = Syndrome::from_byte(byte).unwrap_or(Syndrome::ACK);
        let selectivity = if byte & 1 == 0 { Selectivity::Range } else { Selectivity::MemoryRegion };
        let kind = FlushType { global_visibility: byte & 2 != 0, persistence: byte & 4 != 0 };
        let mut extensions = Extensions::default();
        extensions.deth = Some(Deth::new(e, Qpn::new(f)));
        extensions.reth = Some(Reth::new(a, RKey::new(g), h));
        extensions.atomic_eth = Some(AtomicEth::new(b, RKey::new(e), c, d));
        extensions.aeth = Some(Aeth::new(syndrome, f & 0x00ff_ffff));
        extensions.atomic_ack_eth = Some(AtomicAckEth::new(c));
        extensions.immdt = Some(ImmDt::new(g));
        extensions.ieth = Some(Ieth::new(RKey::new(h)));
        extensions.feth = Some(Feth::new(selectivity, kind));
        extensions
    })
}

/// Packets of every opcode, encapsulation and header.
fn packet(payload: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = OwnedPacket> {
    let bth = (any::<u32>(), any::<u32>(), any::<u16>(), any::<[bool; 4]>());
    (address(), opcode(), bth, extensions(), payload).prop_map(
        |(address, opcode, (qpn, psn, pkey, [solicited, mig_req, becn, ack_req]), extensions, payload)| {
            let mut made = OwnedPacket::new(&address, opcode, Qpn::new(qpn), Psn::new(psn));
            made.bth.set_pkey(PKey(pkey));
            made.bth.set_solicited(solicited);
            made.bth.set_mig_req(mig_req);
            made.bth.set_becn(becn);
            made.bth.set_ack_req(ack_req);
            made.extensions = extensions;
            for absent in EXTENSIONS.into_iter().filter(|extension| !opcode.has(*extension)) {
                made.extensions.remove(absent);
            }
            made.set_payload(payload);
            made
        },
    )
}

const EXTENSIONS: [Extension; 8] = [
    Extension::Deth,
    Extension::Reth,
    Extension::AtomicEth,
    Extension::Aeth,
    Extension::AtomicAckEth,
    Extension::ImmDt,
    Extension::Ieth,
    Extension::Feth,
];

fn any_payload() -> impl Strategy<Value = Vec<u8>> {
    let bytes = |lengths: std::ops::Range<usize>| proptest::collection::vec(any::<u8>(), lengths);
    prop_oneof![bytes(0..9), bytes(0..300), bytes(4090..4100)]
}

fn short_payload() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..20)
}

/// A packet received without its identification, and its identification if that differs from the guess.
fn guessed<'a>(
    packet: &'a [u8],
    identifications: &mut Identifications,
) -> Result<(Packet<'a>, Option<u16>), ParseError> {
    let packet = Packet::decode_ip(packet)?;
    let solved = packet.check_guessed(icrc::Portable, identifications)?;
    Ok((packet, solved))
}

proptest! {
    #[test]
    fn a_frame_is_the_same_from_pieces_and_with_a_separate_payload(
        made in packet(any_payload()), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..4)
    ) {
        let whole = made.emit();
        prop_assert_eq!(&emit_pieces(&made, &cuts), &whole);
        prop_assert_eq!(&emit_apart(&made, &cuts), &whole);
    }

    /// For every pad. A frame without its Ethernet header is the rest of it.
    #[test]
    fn an_emitted_packet_parses_to_the_original(
        mut made in packet(any_payload()), pad in proptest::option::of(0..4_usize)
    ) {
        made.bth.set_pad(pad.unwrap_or(made.bth.pad()));
        let bytes = made.emit();
        let packet = Packet::parse(&bytes).unwrap();
        prop_assert_eq!(packet.pad_fits(), made.bth.pad() == made.payload.len().wrapping_neg() & 3);
        made.icrc = packet.icrc;
        prop_assert_eq!(&OwnedPacket::from(&packet), &made);
        let mut bare = made.clone();
        bare.link = None;
        let rest = bare.emit();
        prop_assert_eq!(&rest, &bytes[network_start(&made)..]);
        let packet = match made.network.header {
            NetworkHeader::Grh => Packet::decode_grh(&rest),
            NetworkHeader::Ipv4 | NetworkHeader::Ipv6 => Packet::decode_ip(&rest),
        };
        prop_assert_eq!(&OwnedPacket::from(&packet.unwrap()), &bare);
        for extension in EXTENSIONS {
            let mut without = made.extensions;
            without.remove(extension);
            prop_assert_eq!(without != made.extensions, made.opcode.has(extension), "{:?}", extension);
        }
        // The IPv4 header checksum is right if the one's complement sum over the header is all ones.
        if made.network.header == NetworkHeader::Ipv4 {
            let start = network_start(&made);
            let sum: u32 = bytes[start..start + 20]
                .chunks(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            prop_assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        }
    }

    #[test]
    fn case_003_one_flipped_bit_is_seen_where_the_icrc_covers_it(made in packet(short_payload())) {
        let mut bytes = made.emit();
        let variant = variant_bits(&made, bytes.len());
        for (at, variant) in variant.into_iter().enumerate() {
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                let parsed = Packet::parse(&bytes).is_ok();
                prop_assert_eq!(parsed, variant >> bit & 1 != 0, "byte {} bit {}", at, bit);
                bytes[at] ^= 1 << bit;
            }
        }
    }

    #[test]
    fn renumbering_equals_emitting(made in packet(any_payload()), to in proptest::collection::vec(any::<u16>(), 1..4)) {
        let mut identifications = Identifications::default();
        let mut packet = made.emit().split_off(network_start(&made));
        let is_ipv4 = made.network.header == NetworkHeader::Ipv4;
        for identification in to {
            identifications.renumber(&mut packet, identification);
            let mut renumbered = made.clone();
            renumbered.network.identification = if is_ipv4 { identification } else { 0 };
            let wanted = renumbered.emit().split_off(network_start(&made));
            prop_assert_eq!(&packet, &wanted);
        }
    }

    /// Two packets alternately, so that a cached value is used only for its length.
    #[test]
    fn the_identification_is_found(
        made in [packet(any_payload()), packet(any_payload())], guesses in any::<[u16; 6]>()
    ) {
        let mut identifications = Identifications::default();
        for (n, guess) in guesses.into_iter().enumerate() {
            let made = &made[n % 2];
            let identification = made.network.identification;
            let mut packet = made.emit().split_off(network_start(made));
            match made.network.header {
                NetworkHeader::Ipv4 => {
                    packet[4..6].copy_from_slice(&guess.to_be_bytes());
                    let (parsed, solved) = guessed(&packet, &mut identifications).unwrap();
                    prop_assert_eq!(parsed.payload, &made.payload[..]);
                    prop_assert_eq!(solved, (guess != identification).then_some(identification));
                }
                NetworkHeader::Ipv6 => {
                    let (_, solved) = guessed(&packet, &mut identifications).unwrap();
                    prop_assert_eq!(solved, None);
                }
                NetworkHeader::Grh => continue,
            }
        }
    }

    #[test]
    fn a_damaged_packet_is_accepted_only_with_a_right_icrc(made in packet(any_payload()), damage in any::<[u8; 6]>()) {
        let mut packet = made.emit().split_off(network_start(&made));
        let end = packet.len();
        packet[end - 6..].iter_mut().zip(damage).for_each(|(byte, damage)| *byte ^= damage);
        // An accepted packet is right with the returned identification.
        let mut identifications = Identifications::default();
        if let Ok((_, Some(identification))) = guessed(&packet.clone(), &mut identifications) {
            packet[4..6].copy_from_slice(&identification.to_be_bytes());
            prop_assert!(Packet::decode_ip(&packet).unwrap().check_icrc().is_ok());
        }
    }

    #[test]
    fn no_bytes_make_the_parsers_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Packet::parse(&bytes);
        let _ = Packet::decode_ip(&bytes);
        let _ = guessed(&bytes, &mut Identifications::default());
        Identifications::default().renumber(&mut bytes.clone(), 0x1234);
        let _ = cm::CmMessage::parse(&bytes);
        if let Some(ethertype) = bytes.get_mut(12..15) {
            ethertype.copy_from_slice(&[8, 0, 0x45]);
            let _ = Packet::parse(&bytes);
        }
    }
}
