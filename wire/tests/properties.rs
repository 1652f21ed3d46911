//! Packets of every opcode, encapsulation and length: emitted ones parse to what they were made
//! from, and one wrong bit in what the ICRC covers is always seen. A failure prints the smallest
//! input and is kept in a `.proptest-regressions` file beside this one, which the next run replays.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce_wire::*;
use proptest::prelude::*;

/// All that a frame is made from.
#[derive(Clone, Debug)]
struct Frame {
    address: PathAddress,
    bth: Bth,
    opcode: Opcode,
    extensions: Extensions,
    payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Extensions {
    deth: Deth,
    reth: Reth,
    atomic_eth: AtomicEth,
    aeth: Aeth,
    atomic_ack_eth: AtomicAckEth,
    immdt: ImmDt,
    ieth: Ieth,
    feth: Feth,
}

impl Frame {
    fn emit(&self) -> Vec<u8> {
        let path = PathHeader::new(&self.address);
        let mut buffer = [0xaa; 8192];
        let mut builder = FrameBuilder::start(&mut buffer, &path, self.bth, self.payload.len()).unwrap();
        self.put_extensions(&mut builder);
        builder.payload().copy_from_slice(&self.payload);
        let length = builder.finish();
        buffer[..length].to_vec()
    }

    /// The same, with the payload from pieces that end at `cuts`.
    fn emit_pieces(&self, cuts: &[prop::sample::Index]) -> Vec<u8> {
        let path = PathHeader::new(&self.address);
        let mut buffer = [0xaa; 8192];
        let mut builder = FrameBuilder::start(&mut buffer, &path, self.bth, self.payload.len()).unwrap();
        self.put_extensions(&mut builder);
        let (length, behind) = builder.fill(icrc::Portable, self.pieces(cuts).into_iter());
        assert_eq!(behind, 0);
        buffer[..length].to_vec()
    }

    /// The same, with the payload left where it is.
    fn emit_apart(&self, cuts: &[prop::sample::Index]) -> Vec<u8> {
        let path = PathHeader::new(&self.address);
        let (mut head, mut tail) = ([0xaa; 256], [0xbb; 8]);
        let length = self.payload.len();
        let mut builder = FrameBuilder::start_apart(&mut head, &mut tail, &path, self.bth, length).unwrap();
        self.put_extensions(&mut builder);
        let (front, behind) = builder.fill(icrc::Portable, self.pieces(cuts).into_iter());
        [&head[..front], &self.payload, &tail[..behind]].concat()
    }

    fn pieces(&self, cuts: &[prop::sample::Index]) -> Vec<&[u8]> {
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(self.payload.len() + 1)).collect();
        ends.sort_unstable();
        ends.push(self.payload.len());
        let starts = [0].into_iter().chain(ends.clone());
        starts.zip(&ends).map(|(start, end)| &self.payload[start..*end]).collect()
    }

    fn put_extensions(&self, builder: &mut FrameBuilder<'_>) {
        let e = &self.extensions;
        for extension in self.opcode.extensions() {
            match extension {
                Extension::Deth => builder.put(&e.deth),
                Extension::Reth => builder.put(&e.reth),
                Extension::AtomicEth => builder.put(&e.atomic_eth),
                Extension::Aeth => builder.put(&e.aeth),
                Extension::AtomicAckEth => builder.put(&e.atomic_ack_eth),
                Extension::ImmDt => builder.put(&e.immdt),
                Extension::Ieth => builder.put(&e.ieth),
                Extension::Feth => builder.put(&e.feth),
            }
        }
    }

    fn network_start(&self) -> usize {
        if self.address.vlan.is_some() { 18 } else { 14 }
    }

    /// The bits that a switch or router may change, as masks of the bytes of the frame.
    fn variant_bits(&self, frame_len: usize) -> Vec<u8> {
        let mut mask = vec![0; frame_len];
        mask[..12].fill(0xff);
        if self.address.vlan.is_some() {
            mask[14..16].fill(0xff);
        }
        let network = PathHeader::new(&self.address).network();
        let start = self.network_start();
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

fn extensions() -> impl Strategy<Value = Extensions> {
    (any::<[u64; 4]>(), any::<[u32; 4]>(), any::<u8>()).prop_map(|([a, b, c, d], [e, f, g, h], byte)| {
        let syndrome = Syndrome::from_byte(byte).unwrap_or(Syndrome::ACK);
        let selectivity = if byte & 1 == 0 { Selectivity::Range } else { Selectivity::MemoryRegion };
        let kind = FlushType { global_visibility: byte & 2 != 0, persistence: byte & 4 != 0 };
        Extensions {
            deth: Deth::new(e, Qpn::new(f)),
            reth: Reth::new(a, RKey::new(g), h),
            atomic_eth: AtomicEth::new(b, RKey::new(e), c, d),
            aeth: Aeth::new(syndrome, f & 0x00ff_ffff),
            atomic_ack_eth: AtomicAckEth::new(c),
            immdt: ImmDt::new(g),
            ieth: Ieth::new(RKey::new(h)),
            feth: Feth::new(selectivity, kind),
        }
    })
}

fn frame(payload: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Frame> {
    let bth = (any::<u32>(), any::<u32>(), any::<u16>(), any::<[bool; 4]>());
    (address(), opcode(), bth, extensions(), payload).prop_map(
        |(address, opcode, (qpn, psn, pkey, [solicited, mig_req, becn, ack_req]), extensions, payload)| {
            let mut bth = Bth::new(opcode, Qpn::new(qpn), Psn::new(psn));
            bth.set_pkey(PKey(pkey));
            bth.set_solicited(solicited);
            bth.set_mig_req(mig_req);
            bth.set_becn(becn);
            bth.set_ack_req(ack_req);
            bth.set_pad(payload.len().wrapping_neg() & 3);
            Frame { address, bth, opcode, extensions, payload }
        },
    )
}

fn any_payload() -> impl Strategy<Value = Vec<u8>> {
    let bytes = |lengths: std::ops::Range<usize>| proptest::collection::vec(any::<u8>(), lengths);
    prop_oneof![bytes(0..9), bytes(0..300), bytes(4090..4100)]
}

fn short_payload() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..20)
}

/// A packet that came without its identification, and the one that it had if that is another.
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
    fn a_frame_is_the_same_from_pieces_and_in_pieces(
        made in frame(any_payload()), cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..4)
    ) {
        let whole = made.emit();
        prop_assert_eq!(&made.emit_pieces(&cuts), &whole);
        prop_assert_eq!(&made.emit_apart(&cuts), &whole);
    }

    #[test]
    fn what_is_emitted_parses_to_what_it_was_made_from(made in frame(any_payload())) {
        let bytes = made.emit();
        let packet = Packet::parse(&bytes).unwrap();
        let address = &made.address;
        let link = Link {
            destination: address.destination_mac, source: address.source_mac, vlan: address.vlan
        };
        prop_assert_eq!(packet.link(), Some(link));
        let network = packet.network();
        prop_assert_eq!((network.source, network.destination), (address.source, address.destination));
        prop_assert_eq!(network.traffic_class, address.traffic_class);
        prop_assert_eq!((network.hop_limit, network.flow_label), (address.hop_limit, address.flow_label));
        let encapsulation = match network.source_port {
            Some(source_port) => Encapsulation::RoceV2 { source_port },
            None => Encapsulation::RoceV1,
        };
        prop_assert_eq!(encapsulation, address.encapsulation);
        prop_assert_eq!((packet.opcode, *packet.bth), (made.opcode, made.bth));
        prop_assert_eq!(packet.payload, &made.payload[..]);
        let (e, has) = (&made.extensions, |extension| made.opcode.has(extension));
        prop_assert_eq!(packet.deth(), has(Extension::Deth).then_some(&e.deth));
        prop_assert_eq!(packet.reth(), has(Extension::Reth).then_some(&e.reth));
        prop_assert_eq!(packet.atomic_eth(), has(Extension::AtomicEth).then_some(&e.atomic_eth));
        prop_assert_eq!(packet.aeth(), has(Extension::Aeth).then_some(&e.aeth));
        prop_assert_eq!(packet.atomic_ack_eth(), has(Extension::AtomicAckEth).then_some(&e.atomic_ack_eth));
        prop_assert_eq!(packet.immdt(), has(Extension::ImmDt).then_some(&e.immdt));
        prop_assert_eq!(packet.ieth(), has(Extension::Ieth).then_some(&e.ieth));
        prop_assert_eq!(packet.feth(), has(Extension::Feth).then_some(&e.feth));
        // The IPv4 header checksum is right: the one's complement sum over the header is all ones.
        if network.header == NetworkHeader::Ipv4 {
            let start = made.network_start();
            let sum: u32 = bytes[start..start + 20]
                .chunks(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum();
            prop_assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        }
    }

    #[test]
    fn case_003_one_flipped_bit_is_seen_where_the_icrc_covers_it(made in frame(short_payload())) {
        let mut bytes = made.emit();
        let variant = made.variant_bits(bytes.len());
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
    fn renumbered_is_as_if_made_so(made in frame(any_payload()), to in proptest::collection::vec(any::<u16>(), 1..4)) {
        let mut identifications = Identifications::default();
        let mut packet = made.emit().split_off(made.network_start());
        let is_ipv4 = PathHeader::new(&made.address).network() == NetworkHeader::Ipv4;
        for identification in to {
            identifications.renumber(&mut packet, identification);
            let address = PathAddress {
                identification: if is_ipv4 { identification } else { 0 }, ..made.address
            };
            let wanted = Frame { address, ..made.clone() }.emit().split_off(made.network_start());
            prop_assert_eq!(&packet, &wanted);
        }
    }

    /// Two packets by turns, so that what is remembered of one length is used for it alone.
    #[test]
    fn the_identification_is_found(
        made in [frame(any_payload()), frame(any_payload())], guesses in any::<[u16; 6]>()
    ) {
        let mut identifications = Identifications::default();
        for (n, guess) in guesses.into_iter().enumerate() {
            let made = &made[n % 2];
            let PathAddress { identification, .. } = made.address;
            let address = PathAddress { vlan: None, ..made.address };
            let mut packet = Frame { address, ..made.clone() }.emit().split_off(14);
            match PathHeader::new(&address).network() {
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
    fn what_is_damaged_and_found_is_what_the_icrc_says(made in frame(any_payload()), damage in any::<[u8; 6]>()) {
        let address = PathAddress { vlan: None, ..made.address };
        let mut packet = Frame { address, ..made.clone() }.emit().split_off(14);
        let end = packet.len();
        packet[end - 6..].iter_mut().zip(damage).for_each(|(byte, damage)| *byte ^= damage);
        // Whatever is accepted is right with the identification that is named.
        let mut identifications = Identifications::default();
        if let Ok((_, Some(identification))) = guessed(&packet.clone(), &mut identifications) {
            packet[4..6].copy_from_slice(&identification.to_be_bytes());
            prop_assert!(Packet::decode_ip(&packet).unwrap().check_icrc().is_ok());
        }
    }

    #[test]
    fn headers_without_link_are_the_rest(made in frame(short_payload())) {
        let path = PathHeader::new(&made.address).without_link();
        let mut buffer = [0xaa; 512];
        let builder = FrameBuilder::start(&mut buffer, &path, Bth::new(Opcode::RC_SEND_ONLY, Qpn::new(5), Psn::new(6)), 0);
        let length = builder.unwrap().finish();
        let made = Frame {
            bth: Bth::new(Opcode::RC_SEND_ONLY, Qpn::new(5), Psn::new(6)),
            opcode: Opcode::RC_SEND_ONLY,
            payload: Vec::new(),
            ..made
        };
        prop_assert_eq!(&buffer[..length], &made.emit()[made.network_start()..]);
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
