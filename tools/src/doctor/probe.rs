//! Packets of known contents, and their arrival.
//!
//! If a socket hides the headers of a received probe, the ICRC is solved for the change, as `dissect` does
//! (`diagnosis.rs`). Otherwise the headers are compared directly.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ferroce::wire::{
    Bth, Deth, Encapsulation, FrameBuilder, Identifications, NetworkHeader, Opcode, Packet, ParseError,
    PathAddress, PathHeader, icrc,
};
use ferroce::{Gid, MacAddr, Psn, Qpn};

use super::message::{Headers, Hello, Probe, Sighting};
use crate::diagnosis::Diagnosis;

/// Copies of each probe. The 15 short probes make 465 packets, so a loss of 1 % is noticed in 99 of 100 checks.
pub(super) const COPIES: u8 = 31;
/// The hop limit of probes.
pub(super) const HOP_LIMIT: u8 = 64;

/// The start of each probe's payload, before token, number and position.
const MAGIC: &[u8; 8] = b"frcprobe";
const PREFIX: usize = MAGIC.len() + 8 + 2 + 2;
/// A probe whose token was not announced.
pub(super) const CHALLENGE: Probe = Probe { number: 1000, traffic_class: 0, length: 100 };
/// Copies of a challenge: one may be lost, and many would flood a host that has not requested them.
pub(super) const CHALLENGE_COPIES: u8 = 3;

/// The token of a challenge, if the frame is one.
pub(super) fn challenge(frame: &[u8], is_socket: bool) -> Option<u64> {
    let decoded = if is_socket { Packet::decode_ip(frame) } else { Packet::decode(frame) };
    let prefix: &[u8; PREFIX] = decoded.ok()?.payload.first_chunk()?;
    let (token, rest) = prefix.strip_prefix(MAGIC)?.split_first_chunk()?;
    rest.starts_with(&CHALLENGE.number.to_be_bytes()).then(|| u64::from_be_bytes(*token))
}

impl Headers {
    /// The headers of probes as sent.
    pub(super) fn sent(from: &Hello, to: IpAddr, probe: &Probe) -> Headers {
        Headers {
            source: from.address,
            destination: to,
            source_port: from.source_port,
            traffic_class: probe.traffic_class,
            hop_limit: HOP_LIMIT,
            // All drivers send identification 0 and DF.
            ipv4: to.is_ipv4().then_some((0, 0x4000)),
        }
    }

    fn of(packet: &Packet<'_>, is_socket: bool) -> Headers {
        let network = packet.network();
        let bytes = packet.network_bytes();
        let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let is_told = packet.header == NetworkHeader::Ipv4 && !is_socket;
        Headers {
            source: network.source.to_ip(),
            destination: network.destination.to_ip(),
            source_port: network.source_port.unwrap_or(0),
            traffic_class: network.traffic_class,
            hop_limit: network.hop_limit,
            ipv4: is_told.then(|| (word(4), word(6))),
        }
    }

    /// The changes of fields that the ICRC covers.
    pub(super) fn rewritten(&self, seen: &Headers) -> Vec<String> {
        let mut changes = Vec::new();
        let mut compare = |name: &str, was: String, is: String| {
            if was != is {
                changes.push(format!("{name} {was} -> {is}"));
            }
        };
        compare("source address", self.source.to_string(), seen.source.to_string());
        compare("destination address", self.destination.to_string(), seen.destination.to_string());
        compare("source port", self.source_port.to_string(), seen.source_port.to_string());
        if let (Some(was), Some(is)) = (self.ipv4, seen.ipv4) {
            compare("IPv4 identification", format!("{:#06x}", was.0), format!("{:#06x}", is.0));
            compare("IPv4 flags", format!("{:#06x}", was.1), format!("{:#06x}", is.1));
        }
        changes
    }
}

/// Writes a probe's frame, starting with the Ethernet header or, for a socket, the IP header; `place` is the number of
/// probes sent before it. Returns its length; `None` if `buffer` is too small.
pub(super) fn write(
    buffer: &mut [u8],
    from: &Hello,
    to: &Hello,
    [source_mac, destination_mac]: [MacAddr; 2],
    probe: &Probe,
    place: u16,
) -> Option<usize> {
    let Headers { source, destination, source_port, traffic_class, hop_limit, .. } =
        Headers::sent(from, to.address, probe);
    let header = PathHeader::new(&PathAddress {
        source_mac,
        destination_mac,
        vlan: None,
        source: Gid::from(source),
        destination: Gid::from(destination),
        encapsulation: Encapsulation::RoceV2 { source_port },
        traffic_class,
        flow_label: 0,
        hop_limit,
        identification: 0,
    });
    let header = if from.is_socket { header.without_link() } else { header };
    let opcode = Opcode::UD_SEND_ONLY;
    let overhead =
        header.network().bth_start() + Bth::LEN + opcode.extensions_len() + ferroce::wire::ICRC_LEN;
    let length = (probe.length as usize).checked_sub(overhead)? & !3;
    let bth = Bth::new(opcode, Qpn::new(to.qpn), Psn::new(probe.number.into()));
    let mut frame = FrameBuilder::start(buffer, &header, bth, length)?;
    frame.put(&Deth::new(0, Qpn::new(from.qpn)));
    fill(frame.payload(), from.token, probe.number, place)?;
    Some(frame.finish())
}

fn fill(payload: &mut [u8], token: u64, number: u16, place: u16) -> Option<()> {
    let (prefix, rest) = payload.split_first_chunk_mut::<PREFIX>()?;
    prefix[..8].copy_from_slice(MAGIC);
    prefix[8..16].copy_from_slice(&token.to_be_bytes());
    prefix[16..18].copy_from_slice(&number.to_be_bytes());
    prefix[18..].copy_from_slice(&place.to_be_bytes());
    rest.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
    Some(())
}

/// A description if the payload differs from what was written.
fn damage(payload: &[u8], token: u64, number: u16, place: u16) -> Option<String> {
    let mut written = vec![0; payload.len()];
    fill(&mut written, token, number, place)?;
    match written.iter().zip(payload).filter(|(was, is)| was != is).count() {
        0 => None,
        count => Some(format!("{count} bytes of the payload")),
    }
}

/// Receives the probes of one end.
pub(super) struct Lookout {
    from: Hello,
    to: IpAddr,
    /// Whether the receiving end is a socket.
    is_socket: bool,
    probes: Vec<Probe>,
    seen: Vec<Sighting>,
    /// The positions that have arrived.
    places: BTreeSet<u16>,
    /// The last position of each DSCP: switches may reorder packets of different classes.
    last: BTreeMap<u8, u16>,
    diagnosis: Diagnosis,
    identifications: Identifications,
}

impl Lookout {
    pub(super) fn new(from: &Hello, to: IpAddr, is_socket: bool, probes: Vec<Probe>) -> Lookout {
        let mut diagnosis = Diagnosis::default();
        diagnosis.learn_addresses(from.address.into(), to.into());
        Lookout {
            from: from.clone(),
            to,
            is_socket,
            probes,
            seen: Vec::new(),
            places: BTreeSet::new(),
            last: BTreeMap::new(),
            diagnosis,
            identifications: Identifications::default(),
        }
    }

    /// Processes a received frame.
    pub(super) fn frame(&mut self, frame: &[u8]) {
        let decoded = if self.is_socket { Packet::decode_ip(frame) } else { Packet::decode(frame) };
        let Ok(packet) = decoded else { return };
        let Some((probe, place)) = self.probe(&packet) else { return };
        let Probe { number, .. } = probe;
        let last = self.last.entry(probe.traffic_class >> 2).or_insert(place);
        let is_late = place < *last;
        *last = place.max(*last);
        let is_new = self.places.insert(place);
        if let Some(sighting) = self.seen.iter_mut().find(|sighting| sighting.number == number) {
            let count = match (is_new, is_late) {
                (false, _) => &mut sighting.repeated,
                (true, true) => {
                    sighting.late = sighting.late.saturating_add(1);
                    &mut sighting.copies
                }
                (true, false) => &mut sighting.copies,
            };
            *count = count.saturating_add(1);
            return;
        }
        let headers = Headers::of(&packet, self.is_socket);
        let checked = if self.is_socket {
            packet.check_guessed(icrc::Portable, &mut self.identifications).map(drop)
        } else {
            packet.check_icrc()
        };
        let icrc = match checked {
            Err(ParseError::Icrc { .. }) => {
                let mut changes = Headers::sent(&self.from, self.to, &probe).rewritten(&headers);
                changes.extend(damage(packet.payload, self.from.token, number, place));
                // Both ends are known here, so a difference that is visible needs no guess.
                Some(match changes.is_empty() {
                    true => self.diagnosis.explain(&packet).cause.to_string(),
                    false => changes.join(", "),
                })
            }
            _ => None,
        };
        self.seen.push(Sighting { number, headers, icrc, copies: 1, repeated: 0, late: u8::from(is_late) });
    }

    /// The probe in a packet, whatever happened to its headers, and its position.
    fn probe(&self, packet: &Packet<'_>) -> Option<(Probe, u16)> {
        let prefix = packet.payload.first_chunk::<PREFIX>()?;
        let is_ours = prefix.starts_with(MAGIC) && prefix[8..16] == self.from.token.to_be_bytes();
        let [number, place] = [16, 18].map(|at| u16::from_be_bytes([prefix[at], prefix[at + 1]]));
        let probe = self.probes.iter().find(|probe| is_ours && probe.number == number)?;
        Some((*probe, place))
    }

    /// Whether all copies of each probe have arrived.
    pub(super) fn is_complete(&self) -> bool {
        self.seen.len() == self.probes.len() && self.seen.iter().all(|sighting| sighting.copies >= COPIES)
    }

    pub(super) fn into_seen(self) -> Vec<Sighting> {
        self.seen
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::message::QPNS;
    use super::*;

    pub(in super::super) fn hello(address: &str, is_socket: bool) -> Hello {
        Hello {
            address: address.parse().expect("an address"),
            to: address.parse().expect("an address"),
            addresses: Vec::new(),
            interface: "veth0".into(),
            mtu: 4200,
            driver: "sim".into(),
            token: 0x0123_4567_89ab_cdef,
            source_port: 53447,
            is_socket,
            pkey: 0xffff,
            rounds: 4,
            qpn: *QPNS.end(),
        }
    }

    const PROBE: Probe = Probe { number: 7, traffic_class: 0x6a, length: 1088 };

    /// The sightings of a probe from `from` to `to` that `change` has modified.
    fn seen(from: &str, to: &str, is_socket: bool, change: impl Fn(&mut [u8])) -> Vec<Sighting> {
        let (from, to) = (hello(from, is_socket), hello(to, is_socket));
        let mut frame = [0; 4200];
        let macs = [MacAddr([2; 6]), MacAddr([4; 6])];
        let len = write(&mut frame, &from, &to, macs, &PROBE, 0).expect("room");
        let start = if is_socket { 0 } else { 14 };
        assert_eq!(len - start, 1088, "as long as asked for");
        change(&mut frame[start..len]);
        let mut lookout = Lookout::new(&from, to.address, is_socket, vec![PROBE]);
        lookout.frame(&frame[..len]);
        lookout.frame(&frame[..len]);
        lookout.into_seen()
    }

    #[test]
    fn a_probe_arrives_as_it_was_sent() {
        for (from, to) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for is_socket in [false, true] {
                let [sighting] = &seen(from, to, is_socket, |_| {})[..] else { panic!("one probe") };
                let sent = Headers::sent(&hello(from, is_socket), to.parse().expect("an address"), &PROBE);
                let is_told = !is_socket && from.contains('.');
                let sent = Headers { ipv4: sent.ipv4.filter(|_| is_told), ..sent };
                assert_eq!((sighting.number, sighting.copies, &sighting.icrc), (7, 1, &None));
                assert_eq!((sighting.repeated, sighting.late), (1, 0), "it came twice");
                assert_eq!(sighting.headers, sent);
            }
        }
    }

    #[test]
    fn copies_and_late_packets_are_no_others() {
        let from = hello("10.0.0.1", false);
        let to = hello("10.0.0.2", false);
        let other = Probe { number: 8, ..PROBE };
        let of_another_class = Probe { number: 9, traffic_class: PROBE.traffic_class ^ 0x20, ..PROBE };
        let mut lookout = Lookout::new(&from, to.address, false, vec![PROBE, other, of_another_class]);
        // Position 2 is lost, 3 is duplicated, 4 arrives after 5.
        for (probe, place) in [
            (PROBE, 0),
            (PROBE, 2),
            (PROBE, 2),
            (PROBE, 4),
            (other, 3),
            (other, 6),
            (other, 6),
            (of_another_class, 5),
        ] {
            let mut frame = [0; 1200];
            let len = write(&mut frame, &from, &to, [MacAddr([2; 6]); 2], &probe, place).expect("room");
            lookout.frame(&frame[..len]);
        }
        let counts = lookout.into_seen().into_iter().map(|s| [s.copies, s.repeated, s.late]);
        assert_eq!(counts.collect::<Vec<_>>(), [[3, 1, 0], [2, 1, 1], [1, 0, 0]]);
    }

    #[test]
    fn a_challenge_is_read_wherever_it_arrives() {
        for is_socket in [false, true] {
            let from = hello("10.0.0.1", is_socket);
            let to = hello("10.0.0.2", is_socket);
            let mut frame = [0; 200];
            let macs = [MacAddr([2; 6]); 2];
            let len = write(&mut frame, &from, &to, macs, &CHALLENGE, 0).expect("room");
            assert_eq!(challenge(&frame[..len], is_socket), Some(from.token));
            let short = Probe { length: 100, ..PROBE };
            let len = write(&mut frame, &from, &to, macs, &short, 0).expect("room");
            assert_eq!(challenge(&frame[..len], is_socket), None);
        }
    }

    #[test]
    fn what_was_rewritten_is_named() {
        let v4 = |change: fn(&mut [u8])| seen("10.0.0.1", "10.0.0.2", false, change);
        let v6 = |change: fn(&mut [u8])| seen("fd00::1", "fd00::2", false, change);
        let cases = [
            (v4(|p| p[12..16].copy_from_slice(&[192, 0, 2, 7])), "source address 10.0.0.1 -> 192.0.2.7"),
            (v4(|p| p[19] = 9), "destination address 10.0.0.2 -> 10.0.0.9"),
            (v4(|p| p[20..22].copy_from_slice(&[4, 0])), "source port 53447 -> 1024"),
            (v4(|p| p[4] = 0x12), "IPv4 identification 0x0000 -> 0x1200"),
            (v4(|p| p[6] = 0), "IPv4 flags 0x4000 -> 0x0000"),
            (v4(|p| p[500] ^= 1), "1 bytes of the payload"),
            // The last byte of the packet.
            (v4(|p| p[1087] ^= 1), "corrupted: the ICRC itself"),
            (v6(|p| p[23] = 9), "source address fd00::1 -> fd00::9"),
            (v6(|p| p[40] = 0), "source port 53447 -> 199"),
        ];
        for (seen, expected) in cases {
            let [sighting] = &seen[..] else { panic!("{expected}: not seen") };
            assert_eq!(sighting.icrc.as_deref(), Some(expected));
        }
        let both = v4(|p| {
            p[15] = 9;
            p[21] ^= 1;
        });
        let expected = "source address 10.0.0.1 -> 10.0.0.9, source port 53447 -> 53446";
        assert_eq!(both[0].icrc.as_deref(), Some(expected));
    }

    #[test]
    fn what_may_change_makes_no_icrc_wrong() {
        let [sighting] = &seen("10.0.0.1", "10.0.0.2", false, |p| (p[1], p[8]) = (3, 61))[..] else {
            panic!("one probe");
        };
        assert_eq!((sighting.headers.traffic_class, sighting.headers.hop_limit), (3, 61));
        assert_eq!(sighting.icrc, None);
    }

    /// A socket does not see the identification, so it computes which one was sent.
    #[test]
    fn a_socket_sees_the_headers_from_the_kernel() {
        let [sighting] = &seen("10.0.0.1", "10.0.0.2", true, |p| p[5] = 3)[..] else { panic!("one probe") };
        assert_eq!((sighting.headers.ipv4, &sighting.icrc), (None, &None));
        let [sighting] = &seen("10.0.0.1", "10.0.0.2", true, |p| p[15] = 9)[..] else { panic!("one probe") };
        assert_eq!(sighting.icrc.as_deref(), Some("source address 10.0.0.1 -> 10.0.0.9"));
    }

    #[test]
    fn packets_of_others_are_none() {
        assert_eq!(challenge(&[0; 100], false), None);
        let other_token = |p: &mut [u8]| p[28 + 12 + 8 + 10] ^= 1;
        assert!(seen("10.0.0.1", "10.0.0.2", false, other_token).is_empty());
        assert!(
            seen("10.0.0.1", "10.0.0.2", false, |p| p[28 + 12 + 8 + 17] = 8).is_empty(),
            "another number"
        );
        let from = hello("10.0.0.1", false);
        let to = hello("10.0.0.2", false);
        for length in [0, 47, 60, 5000] {
            let probe = Probe { length, ..PROBE };
            let macs = [MacAddr([2; 6]); 2];
            assert_eq!(write(&mut [0; 4200], &from, &to, macs, &probe, 0), None, "{length} bytes");
        }
    }
}
