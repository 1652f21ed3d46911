//! ARP and IPv6 neighbour discovery for ports without a kernel behind them (RFC 826, RFC 4861): a port answers requests for its
//! own addresses, and resolves the addresses of others.
//!
//! An entry of the table is from the answer to a request of this port, or from a host that resolves the port's address, as in the
//! kernel's table. No other packet can change the table.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The port's addresses, and its known neighbours.
#[derive(Debug)]
pub(crate) struct Neighbours {
    mac: [u8; 6],
    addresses: Vec<(IpAddr, u8)>,
    known: Vec<Known>,
    /// The resolutions in progress.
    asked: Vec<Asked>,
}

/// A resolution in progress.
#[derive(Debug)]
struct Asked {
    address: IpAddr,
    /// The number of requests sent.
    times: u32,
    /// The time of the last one.
    at: Instant,
}

/// The state of a resolution.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Search {
    /// The neighbour has this hardware address.
    Found([u8; 6]),
    /// This request must be sent.
    Ask(NeighbourFrame),
    /// The answer is awaited.
    Waiting,
    /// There was no answer.
    Silent,
    /// The neighbour is not on the link of any of the port's addresses.
    Elsewhere,
}

/// A frame to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeighbourFrame {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Neighbours {
    pub(crate) fn new(mac: [u8; 6], addresses: Vec<(IpAddr, u8)>) -> Neighbours {
        Neighbours { mac, addresses, known: Vec::with_capacity(MOST), asked: Vec::new() }
    }

    /// Whether the frame is ARP or neighbour discovery, for [`receive`](Neighbours::receive).
    #[inline]
    pub(crate) fn concerns(frame: &[u8]) -> bool {
        match frame.get(12..14) {
            Some(ARP) => true,
            Some(IPV6) => {
                frame.get(20) == Some(&ICMPV6)
                    && frame.get(54).is_some_and(|kind| matches!(*kind, SOLICITATION | ADVERTISEMENT))
            }
            _ => false,
        }
    }

    /// Processes an ARP or neighbour discovery frame, and returns the answer to a request.
    pub(crate) fn receive(&mut self, frame: &[u8], now: Instant) -> Option<NeighbourFrame> {
        if frame.get(12..14)? == ARP { self.receive_arp(frame, now) } else { self.receive_nd(frame, now) }
    }

    /// Resolves `peer`, one step with each call. Its answers are accepted until the resolution ends.
    pub(crate) fn seek(&mut self, peer: IpAddr, now: Instant) -> Search {
        if let Some(mac) = self.look_up(peer, now) {
            self.stop(peer);
            return Search::Found(mac);
        }
        let Some(question) = self.question(peer) else { return Search::Elsewhere };
        // The result of an abandoned resolution is outdated.
        self.asked.retain(|asked| now.duration_since(asked.at) < FRESH);
        match self.asked.iter_mut().find(|asked| asked.address == peer) {
            Some(asked) if now.duration_since(asked.at) < ANSWER_TIME => return Search::Waiting,
            Some(asked) if asked.times == QUESTIONS => {
                self.stop(peer);
                return Search::Silent;
            }
            Some(asked) => (asked.times, asked.at) = (asked.times + 1, now),
            None => self.asked.push(Asked { address: peer, times: 1, at: now }),
        }
        Search::Ask(question)
    }

    /// A request for the hardware address of `peer`; `None` if it is not on the link of any of the port's addresses.
    fn question(&self, peer: IpAddr) -> Option<NeighbourFrame> {
        let own = self.source_for(peer)?;
        Some(match (own, peer) {
            (IpAddr::V4(own), IpAddr::V4(peer)) => self.arp(REQUEST, [0xff; 6], own, [0; 6], peer),
            (IpAddr::V6(own), IpAddr::V6(peer)) => {
                let group = solicited_node(peer);
                self.nd(SOLICITATION, group_mac(group), own, group, 0, peer)
            }
            _ => return None,
        })
    }

    fn stop(&mut self, peer: IpAddr) {
        self.asked.retain(|asked| asked.address != peer);
    }

    fn is_asked(&self, peer: IpAddr) -> bool {
        self.asked.iter().any(|asked| asked.address == peer)
    }

    /// The hardware address of `peer` if it was learned in the last minute, or is the port's own.
    fn look_up(&self, peer: IpAddr, now: Instant) -> Option<[u8; 6]> {
        if self.is_own(peer) {
            return Some(self.mac);
        }
        let known = self.known.iter().find(|known| known.address == peer)?;
        (now.duration_since(known.heard) < FRESH).then_some(known.mac)
    }

    fn is_own(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|(own, _)| *own == address)
    }

    /// The port's address on the link of `peer`.
    fn source_for(&self, peer: IpAddr) -> Option<IpAddr> {
        self.addresses.iter().find(|(own, prefix)| same_link(*own, peer, *prefix)).map(|(own, _)| *own)
    }

    fn learn(&mut self, address: IpAddr, mac: [u8; 6], now: Instant) {
        if mac[0] & 1 == 1 || mac == [0; 6] || self.source_for(address).is_none() || self.is_own(address) {
            return;
        }
        let entry = Known { address, mac, heard: now };
        if let Some(known) = self.known.iter_mut().find(|known| known.address == address) {
            *known = entry;
        } else if self.known.len() < MOST {
            self.known.push(entry);
        } else if let Some(oldest) = self.known.iter_mut().min_by_key(|known| known.heard) {
            *oldest = entry;
        }
    }

    fn receive_arp(&mut self, frame: &[u8], now: Instant) -> Option<NeighbourFrame> {
        let arp = frame.get(14..42)?;
        // Ethernet and IPv4, with the lengths of their addresses.
        if arp[..6] != [0, 1, 8, 0, 6, 4] {
            return None;
        }
        let operation = u16::from_be_bytes([arp[6], arp[7]]);
        let (their_mac, their) = (mac_at(arp, 8)?, v4_at(arp, 14)?);
        let wanted = v4_at(arp, 24)?;
        if !self.is_own(wanted.into()) {
            return None;
        }
        match operation {
            REQUEST => {
                self.learn(their.into(), their_mac, now);
                Some(self.arp(REPLY, their_mac, wanted, their_mac, their))
            }
            REPLY if self.is_asked(their.into()) => {
                self.learn(their.into(), their_mac, now);
                None
            }
            _ => None,
        }
    }

    fn receive_nd(&mut self, frame: &[u8], now: Instant) -> Option<NeighbourFrame> {
        let ip = frame.get(14..)?;
        let len = usize::from(u16::from_be_bytes([*ip.get(4)?, *ip.get(5)?]));
        let icmp = ip.get(40..40 + len)?;
        // RFC 4861 7.1: not forwarded by a router, and code 0.
        if *ip.get(7)? != 255 || icmp.len() < 24 || icmp[1] != 0 {
            return None;
        }
        let (source, destination) = (v6_at(ip, 8)?, v6_at(ip, 24)?);
        if checksum(source, destination, icmp) != 0 {
            return None;
        }
        let target = v6_at(icmp, 8)?;
        match icmp[0] {
            SOLICITATION if self.is_own(target.into()) => {
                // Duplicate address detection: the sender has no address yet (RFC 4862), so the answer is multicast.
                if source.is_unspecified() {
                    return Some(self.nd(
                        ADVERTISEMENT,
                        group_mac(ALL_NODES),
                        target,
                        ALL_NODES,
                        OVERRIDE,
                        target,
                    ));
                }
                let mac = option(&icmp[24..], SOURCE_LINK_ADDRESS).or_else(|| mac_at(frame, 6))?;
                self.learn(source.into(), mac, now);
                Some(self.nd(ADVERTISEMENT, mac, target, source, SOLICITED | OVERRIDE, target))
            }
            ADVERTISEMENT if self.is_asked(target.into()) => {
                let mac = option(&icmp[24..], TARGET_LINK_ADDRESS).or_else(|| mac_at(frame, 6))?;
                self.learn(target.into(), mac, now);
                None
            }
            _ => None,
        }
    }

    fn arp(
        &self,
        operation: u16,
        to: [u8; 6],
        own: Ipv4Addr,
        mac: [u8; 6],
        peer: Ipv4Addr,
    ) -> NeighbourFrame {
        let mut message = NeighbourFrame::new(to, self.mac, ARP);
        message.push(&[0, 1, 8, 0, 6, 4]);
        message.push(&operation.to_be_bytes());
        message.push(&self.mac);
        message.push(&own.octets());
        message.push(&mac);
        message.push(&peer.octets());
        message.padded()
    }

    fn nd(
        &self,
        kind: u8,
        to: [u8; 6],
        own: Ipv6Addr,
        peer: Ipv6Addr,
        flags: u8,
        target: Ipv6Addr,
    ) -> NeighbourFrame {
        let mut icmp = [0; 32];
        icmp[0] = kind;
        icmp[4] = flags;
        icmp[8..24].copy_from_slice(&target.octets());
        icmp[24] = if kind == SOLICITATION { SOURCE_LINK_ADDRESS } else { TARGET_LINK_ADDRESS };
        icmp[25] = 1;
        icmp[26..].copy_from_slice(&self.mac);
        let sum = checksum(own, peer, &icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut message = NeighbourFrame::new(to, self.mac, IPV6);
        message.push(&[0x60, 0, 0, 0, 0, icmp.len() as u8, ICMPV6, 255]);
        message.push(&own.octets());
        message.push(&peer.octets());
        message.push(&icmp);
        message
    }
}

impl NeighbourFrame {
    fn new(to: [u8; 6], from: [u8; 6], ether_type: &[u8]) -> NeighbourFrame {
        let mut message = NeighbourFrame { bytes: [0; LONGEST], len: 0 };
        message.push(&to);
        message.push(&from);
        message.push(ether_type);
        message
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Padded with zeros to Ethernet's minimum frame.
    fn padded(mut self) -> NeighbourFrame {
        self.len = self.len.max(60);
        self
    }
}

impl std::ops::Deref for NeighbourFrame {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[derive(Debug)]
struct Known {
    address: IpAddr,
    mac: [u8; 6],
    heard: Instant,
}

/// The most entries.
const MOST: usize = 256;
const FRESH: Duration = Duration::from_secs(60);
/// The number of requests to a neighbour, and the time to wait for each answer.
const QUESTIONS: u32 = 4;
const ANSWER_TIME: Duration = Duration::from_millis(800);
/// A solicitation: Ethernet, IPv6, ICMPv6 with one option.
const LONGEST: usize = 14 + 40 + 32;

const ARP: &[u8] = &[0x08, 0x06];
const IPV6: &[u8] = &[0x86, 0xdd];
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOURCE_LINK_ADDRESS: u8 = 1;
const TARGET_LINK_ADDRESS: u8 = 2;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

fn same_link(own: IpAddr, peer: IpAddr, prefix: u8) -> bool {
    match (own, peer) {
        (IpAddr::V4(own), IpAddr::V4(peer)) => {
            (own.to_bits() ^ peer.to_bits()).leading_zeros() >= u32::from(prefix.min(32))
        }
        (IpAddr::V6(own), IpAddr::V6(peer)) => {
            (own.to_bits() ^ peer.to_bits()).leading_zeros() >= u32::from(prefix.min(128))
        }
        _ => false,
    }
}

/// The destination of a solicitation for the address (RFC 4291 2.7.1).
fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]))
}

/// RFC 2464 section 7.
fn group_mac(group: Ipv6Addr) -> [u8; 6] {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

/// The ICMPv6 checksum, over the pseudo header and `icmp`; 0 if that in `icmp` is correct.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, icmp: &[u8]) -> u16 {
    let sum = |bytes: &[u8]| -> u32 {
        bytes
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)))
            .sum()
    };
    let mut total =
        sum(&source.octets()) + sum(&destination.octets()) + icmp.len() as u32 + u32::from(ICMPV6);
    total += sum(icmp);
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    !(total as u16)
}

/// The hardware address in the options of a message.
fn option(mut options: &[u8], kind: u8) -> Option<[u8; 6]> {
    while let [found, units, ..] = *options {
        // In units of 8 bytes; 0 makes the message invalid (RFC 4861 4.6).
        if found == kind && units == 1 {
            return mac_at(options, 2);
        }
        options = options.get(usize::from(units.max(1)) * 8..)?;
    }
    None
}

fn mac_at(bytes: &[u8], at: usize) -> Option<[u8; 6]> {
    bytes.get(at..at + 6)?.try_into().ok()
}

fn v4_at(bytes: &[u8], at: usize) -> Option<Ipv4Addr> {
    Some(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?.into())
}

fn v6_at(bytes: &[u8], at: usize) -> Option<Ipv6Addr> {
    Some(<[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok()?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
    const B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];

    fn host(mac: [u8; 6], last: u8) -> Neighbours {
        let addresses =
            vec![(IpAddr::from([10, 0, 0, last]), 24), (format!("fd00::{last}").parse().unwrap(), 64)];
        Neighbours::new(mac, addresses)
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn ask(host: &mut Neighbours, peer: IpAddr) -> NeighbourFrame {
        match host.seek(peer, Instant::now()) {
            Search::Ask(question) => question,
            other => panic!("{other:?} in place of a question"),
        }
    }

    #[test]
    fn two_hosts_resolve_each_other() {
        for peer in [address("10.0.0.2"), address("fd00::2")] {
            let (mut a, mut b, now) = (host(A, 1), host(B, 2), Instant::now());
            let question = ask(&mut a, peer);
            assert!(Neighbours::concerns(&question) && question.len() >= 60);
            let answer = b.receive(&question, now).unwrap();
            assert_eq!(answer[..6], A);
            assert!(a.receive(&answer, now).is_none());
            assert_eq!(a.look_up(peer, now), Some(B));
            // The host that was asked has learned the sender's address.
            let asker = if peer.is_ipv4() { address("10.0.0.1") } else { address("fd00::1") };
            assert_eq!(b.look_up(asker, now), Some(A));
            assert_eq!(a.look_up(peer, now + FRESH), None);
        }
    }

    #[test]
    fn requests_for_other_hosts_or_links_are_not_answered() {
        let (mut a, mut b, now) = (host(A, 1), host(B, 2), Instant::now());
        let question = ask(&mut a, address("10.0.0.3"));
        assert!(b.receive(&question, now).is_none());
        assert_eq!(b.look_up(address("10.0.0.1"), now), None, "it did not ask for us");
        for beyond in ["10.0.1.2", "fd01::2"] {
            assert!(matches!(a.seek(address(beyond), now), Search::Elsewhere), "{beyond}");
        }
        assert_eq!(a.look_up(address("10.0.0.1"), now), Some(A));
    }

    #[test]
    fn unsolicited_answers_are_ignored() {
        for peer in [address("10.0.0.2"), address("fd00::2")] {
            let (mut a, mut b, now) = (host(A, 1), host(B, 2), Instant::now());
            let question = ask(&mut a, peer);
            let answer = b.receive(&question, now).unwrap();
            a.stop(peer);
            a.receive(&answer, now);
            assert_eq!(a.look_up(peer, now), None);
        }
    }

    #[test]
    fn resolution_fails_after_four_requests() {
        let (mut a, start, peer) = (host(A, 1), Instant::now(), address("10.0.0.9"));
        let mut questions = 0;
        for ms in (0..).step_by(100) {
            match a.seek(peer, start + Duration::from_millis(ms)) {
                Search::Ask(_) => questions += 1,
                Search::Waiting => {}
                Search::Silent => {
                    assert_eq!((questions, ms), (4, 3200));
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        // The next request starts again.
        assert!(matches!(a.seek(peer, start + Duration::from_secs(4)), Search::Ask(_)));
    }

    #[test]
    fn corrupted_neighbour_discovery_is_ignored() {
        let (mut a, mut b, now) = (host(A, 1), host(B, 2), Instant::now());
        let question = ask(&mut a, address("fd00::2"));
        for at in [21, 22, 54, 56, 62, question.len() - 1] {
            let mut changed = question.to_vec();
            changed[at] ^= 1;
            assert!(b.receive(&changed, now).is_none(), "byte {at}");
        }
        for len in 0..question.len() {
            assert!(b.receive(&question[..len], now).is_none());
        }
        assert!(b.receive(&question, now).is_some());
    }

    #[test]
    fn duplicate_address_detection_is_answered_by_multicast() {
        let (a, mut b) = (host(A, 1), host(B, 2));
        let Ok(IpAddr::V6(wanted)) = "fd00::2".parse() else { unreachable!() };
        let group = solicited_node(wanted);
        let question = a.nd(SOLICITATION, group_mac(group), Ipv6Addr::UNSPECIFIED, group, 0, wanted);
        let answer = b.receive(&question, Instant::now()).unwrap();
        assert_eq!(answer[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(answer[58] & SOLICITED, 0);
    }

    #[test]
    fn the_table_keeps_the_newest_entries() {
        let (mut a, start) = (Neighbours::new(A, vec![(address("10.0.0.1"), 8)]), Instant::now());
        let of = |n: u32| IpAddr::from(Ipv4Addr::from_bits(0x0a01_0000 + n));
        for n in 0..=MOST as u32 {
            a.learn(of(n), B, start + Duration::from_millis(n.into()));
        }
        let now = start + Duration::from_secs(1);
        assert_eq!(a.look_up(of(0), now), None);
        assert!((1..=MOST as u32).all(|n| a.look_up(of(n), now).is_some()));
    }
}
