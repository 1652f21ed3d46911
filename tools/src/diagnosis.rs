//! The probable cause of a wrong ICRC, for `dissect` and `doctor`.

mod crc;

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;

use ferroce_wire::cm::{CmBody, CmMessage, IpCm};
use ferroce_wire::{Bth, Gid, NetworkHeader, Packet};

use crc::{backward, forward};

/// A likely cause of a wrong ICRC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The byte order is wrong.
    ByteOrder,
    /// The ICRC is 0: most likely the packet was recorded before the sender's hardware filled it in.
    NotFilledIn,
    /// The pad was not covered, as in rdma_rxe before December 2019.
    PadLeftOut,
    /// These fields were covered with their values, instead of as ones.
    Included(Vec<&'static str>),
    /// The source port was changed from this value.
    SourcePort(u16),
    /// The IPv4 identification was changed from this value.
    Identification(u16),
    /// Flags and fragment offset of the IPv4 header were changed from this value.
    Flags(u16),
    /// The addresses were changed from these, and so was the source port if there is one.
    Addresses { source: Gid, destination: Gid, source_port: Option<u16> },
    /// All packets of the flow were changed in the same way before the BTH. If it was one IPv4 address, its original
    /// value.
    Headers { if_source: Option<Gid>, if_destination: Option<Gid> },
    /// One byte was changed in these bits.
    Byte { at: usize, part: &'static str, bits: u8 },
    /// The ICRC itself was changed.
    Icrc,
    /// More was changed.
    Corrupted,
}

/// The answer of [`Diagnosis::explain`].
pub(crate) struct Explained {
    pub(crate) cause: Cause,
    /// The previous packet of the same flow, reported as corrupted, has this cause, too.
    pub(crate) also_explains_previous: Option<&'static str>,
}

/// Keeps what earlier packets show.
#[derive(Default)]
pub(crate) struct Diagnosis {
    /// Addresses of other packets, and those in the connection manager's messages.
    seen: Vec<Gid>,
    /// By source, destination and source port.
    unexplained: HashMap<(Gid, Gid, Option<u16>), Unexplained>,
}

/// The last packet of a flow without another explanation.
#[derive(Clone, Copy)]
struct Unexplained {
    /// The difference of the CRC register before the BTH.
    register: u32,
    /// Whether another packet had the same difference.
    confirmed: bool,
}

/// The most flows whose last packet is kept; a hostile capture has a new flow in each packet.
const MAX_UNEXPLAINED: usize = 1 << 16;
/// The most addresses that are tried.
const MAX_SEEN: usize = 32;

impl Diagnosis {
    /// Takes the addresses of a packet.
    pub(crate) fn learn(&mut self, packet: &Packet<'_>) {
        let network = packet.network();
        self.learn_addresses(network.source, network.destination);
    }

    /// Takes two addresses that exchange packets.
    pub(crate) fn learn_addresses(&mut self, source: Gid, destination: Gid) {
        self.add(source);
        self.add(destination);
    }

    /// Takes the addresses of a connection request.
    pub(crate) fn learn_from_cm(&mut self, message: &CmMessage<'_>) {
        let private_data = match message.body {
            CmBody::Req(req) => {
                self.add(req.primary_path.local_gid());
                self.add(req.primary_path.remote_gid());
                &req.private_data[..]
            }
            CmBody::SidrReq(request) => &request.private_data[..],
            _ => return,
        };
        if let Ok(ip) = IpCm::parse(private_data) {
            self.add(ip.source.into());
            self.add(ip.destination.into());
        }
    }

    fn add(&mut self, address: Gid) {
        if !self.seen.contains(&address) {
            if self.seen.len() == MAX_SEEN {
                self.seen.remove(0);
            }
            self.seen.push(address);
        }
    }

    /// Finds a cause for the wrong ICRC of `packet`.
    pub(crate) fn explain(&mut self, packet: &Packet<'_>) -> Explained {
        let network = packet.network();
        let key = (network.source, network.destination, network.source_port);
        let mut also_explains_previous = None;
        let cause = Case::new(packet).and_then(|case| {
            let cause = case.by_the_sender().or_else(|| case.header_field());
            let cause = cause.or_else(|| case.addresses(&self.seen)).or_else(|| case.single_byte());
            if cause.is_some() {
                return cause;
            }
            // A constant difference before the BTH is not random: the probability is 1 in 2³².
            let register = case.at(case.bth_start);
            let previous = self.unexplained.get(&key).filter(|previous| previous.register == register);
            let (confirmed, first) = (previous.is_some(), previous.is_some_and(|p| !p.confirmed));
            if self.unexplained.len() == MAX_UNEXPLAINED {
                self.unexplained.clear();
            }
            self.unexplained.insert(key, Unexplained { register, confirmed });
            if !confirmed {
                return None;
            }
            let cause = case.headers();
            also_explains_previous = first.then(|| cause.slug());
            Some(cause)
        });
        self.learn(packet);
        Explained { cause: cause.unwrap_or(Cause::Corrupted), also_explains_previous }
    }
}

/// One packet with a wrong ICRC.
struct Case<'p, 'a> {
    packet: &'p Packet<'a>,
    expected: u32,
    /// The difference between the ICRC and the expected one.
    difference: u32,
    bth_start: usize,
}

impl<'p, 'a> Case<'p, 'a> {
    fn new(packet: &'p Packet<'a>) -> Option<Case<'p, 'a>> {
        let header = packet.header;
        let expected = ferroce_wire::icrc::compute(header, packet.covered())?;
        let bth_start = header.len() + if header.has_udp() { 8 } else { 0 };
        Some(Case { packet, expected, difference: packet.icrc ^ expected, bth_start })
    }

    /// The difference of the CRC register at byte `at`, if no later byte was changed.
    fn at(&self, at: usize) -> u32 {
        backward(self.difference, self.packet.covered().len() - at)
    }

    /// The difference of the ICRC if `bytes` at `at` were changed by these bits.
    fn effect(&self, at: usize, bytes: &[u8]) -> u32 {
        let after = self.packet.covered().len() - at - bytes.len();
        forward(0, bytes.iter().copied().chain(std::iter::repeat_n(0, after)))
    }

    /// ICRCs that the sender computed wrongly.
    fn by_the_sender(&self) -> Option<Cause> {
        let (found, pad) = (self.packet.icrc, self.packet.bth.pad());
        if found == self.expected.swap_bytes() {
            return Some(Cause::ByteOrder);
        }
        if found == 0 {
            return Some(Cause::NotFilledIn);
        }
        let covered = self.packet.covered();
        let pad_is_zero = covered[covered.len() - pad..].iter().all(|&byte| byte == 0);
        if pad > 0 && pad_is_zero && found == !backward(!self.expected, pad) {
            return Some(Cause::PadLeftOut);
        }
        self.included()
    }

    /// Any set of the fields that count as ones, and of the ones in front.
    fn included(&self) -> Option<Cause> {
        let network_len = self.packet.header.len();
        let mut fields: Vec<(&'static str, usize, usize)> = match self.packet.header {
            NetworkHeader::Ipv4 => vec![("TOS", 1, 1), ("TTL", 8, 1), ("IPv4 checksum", 10, 2)],
            NetworkHeader::Ipv6 | NetworkHeader::Grh => {
                vec![("traffic class and flow label", 0, 4), ("hop limit", 7, 1)]
            }
        };
        if self.packet.header.has_udp() {
            fields.push(("UDP checksum", network_len + 6, 2));
        }
        fields.push(("BTH byte 4", self.bth_start + 4, 1));
        let covered = self.packet.covered();
        let mut effects: Vec<(&'static str, u32)> = fields
            .into_iter()
            .map(|(name, at, len)| {
                let mut difference: Vec<u8> = covered[at..at + len].iter().map(|byte| !byte).collect();
                if at == 0 {
                    difference[0] &= 0x0f; // the IP version is unchanged
                }
                (name, self.effect(at, &difference))
            })
            .collect();
        // Without the 8 bytes of ones, the register starts with ones instead of 0xdebb20e3.
        let no_prefix = forward(!0xdebb_20e3, std::iter::repeat_n(0, covered.len()));
        effects.push(("no ones in front", no_prefix));
        let chosen = |set: usize| effects.iter().enumerate().filter(move |(i, _)| set >> i & 1 != 0);
        // Small sets first: the fewest mistakes that explain it.
        let mut sets: Vec<usize> = (1..1 << effects.len()).collect();
        sets.sort_by_key(|set| set.count_ones());
        let set = sets
            .into_iter()
            .find(|&set| chosen(set).fold(0, |sum, (_, (_, effect))| sum ^ effect) == self.difference)?;
        Some(Cause::Included(
            chosen(set).filter(|(_, (_, effect))| *effect != 0).map(|(_, (name, _))| *name).collect(),
        ))
    }

    /// One 16-bit header field that was changed.
    fn header_field(&self) -> Option<Cause> {
        let covered = self.packet.covered();
        let original = |at: usize| {
            let [a, b, 0, 0] = self.at(at).to_le_bytes() else { return None };
            Some(u16::from_be_bytes([covered[at] ^ a, covered[at + 1] ^ b]))
        };
        if self.packet.header.has_udp()
            && let Some(port) = original(self.packet.header.len())
        {
            return Some(Cause::SourcePort(port));
        }
        if self.packet.header != NetworkHeader::Ipv4 {
            return None;
        }
        original(4).map(Cause::Identification).or_else(|| original(6).map(Cause::Flags))
    }

    /// Other addresses, and with one of them another source port.
    fn addresses(&self, seen: &[Gid]) -> Option<Cause> {
        let network = self.packet.network();
        let (source, destination) = (network.source, network.destination);
        let is_v4 = network.header == NetworkHeader::Ipv4;
        let candidates = || seen.iter().copied().filter(|gid| gid.is_ipv6() != is_v4);
        let after = self.at(network.header.len());
        let residue = |was_source: Gid, was_destination: Gid| {
            // An IPv4 address is the last 4 bytes of its GID; equal addresses have no effect.
            let changed = |a: Gid, b: Gid| {
                let from = if is_v4 { 12 } else { 0 };
                (from..16).map(move |i| a.0[i] ^ b.0[i])
            };
            after ^ forward(0, changed(source, was_source).chain(changed(destination, was_destination)))
        };
        let pairs = || {
            let one = candidates().flat_map(move |other| [(other, destination), (source, other)]);
            one.filter(move |&pair| pair != (source, destination))
        };
        let exact = pairs()
            .chain(candidates().flat_map(|source| candidates().map(move |other| (source, other))))
            .find(|&(source, destination)| residue(source, destination) == 0);
        if let Some((source, destination)) = exact {
            return Some(Cause::Addresses { source, destination, source_port: None });
        }
        let port = network.source_port?;
        pairs().find_map(|(source, destination)| {
            let [a, b, 0, 0] = residue(source, destination).to_le_bytes() else { return None };
            let source_port = Some(port ^ u16::from_be_bytes([a, b]));
            Some(Cause::Addresses { source, destination, source_port })
        })
    }

    /// The original value of one IPv4 address, for either one.
    fn headers(&self) -> Cause {
        let network = self.packet.network();
        let was = |at: usize, address: Gid| {
            let mut bytes = address.0;
            for (byte, change) in bytes[12..].iter_mut().zip(self.at(at).to_le_bytes()) {
                *byte ^= change;
            }
            (network.header == NetworkHeader::Ipv4).then_some(Gid(bytes))
        };
        Cause::Headers { if_source: was(12, network.source), if_destination: was(16, network.destination) }
    }

    /// One byte, in the packet or in the ICRC.
    fn single_byte(&self) -> Option<Cause> {
        if self.difference.count_ones() == 1
            || self.difference.to_be_bytes().iter().filter(|&&b| b != 0).count() == 1
        {
            return Some(Cause::Icrc);
        }
        let mut register = self.difference;
        for at in (0..self.packet.covered().len()).rev() {
            register = backward(register, 1);
            if let [bits, 0, 0, 0] = register.to_le_bytes() {
                let cause = self.address_byte(at, bits);
                return Some(cause.unwrap_or_else(|| Cause::Byte { at, part: self.part(at), bits }));
            }
        }
        None
    }

    /// A changed byte of an address is more likely rewritten than corrupted: the Ethernet FCS detects corruption on the
    /// wire.
    fn address_byte(&self, at: usize, bits: u8) -> Option<Cause> {
        let network = self.packet.network();
        // The start of the addresses, and the number of bytes of a GID that are on the wire.
        let (start, len) = if network.header == NetworkHeader::Ipv4 { (12, 4) } else { (8, 16) };
        let index = at.checked_sub(start).filter(|index| *index < 2 * len)?;
        let mut addresses = [network.source, network.destination];
        addresses[index / len].0[16 - len + index % len] ^= bits;
        let [source, destination] = addresses;
        Some(Cause::Addresses { source, destination, source_port: None })
    }

    fn part(&self, at: usize) -> &'static str {
        let payload_start = self.bth_start + Bth::LEN + self.packet.opcode.extensions_len();
        let parts = [
            (self.packet.header.len(), "network header"),
            (self.bth_start, "UDP header"),
            (self.bth_start + Bth::LEN, "BTH"),
            (payload_start, "extension headers"),
            (payload_start + self.packet.payload.len(), "payload"),
        ];
        parts.into_iter().find(|(end, _)| at < *end).map_or("pad", |(_, part)| part)
    }
}

impl Cause {
    /// A stable name.
    pub(crate) fn slug(&self) -> &'static str {
        match self {
            Cause::ByteOrder => "byte_order",
            Cause::NotFilledIn => "not_filled_in",
            Cause::PadLeftOut => "pad_left_out",
            Cause::Included(_) => "variant_fields_included",
            Cause::SourcePort(_) => "source_port_rewritten",
            Cause::Identification(_) => "ip_id_rewritten",
            Cause::Flags(_) => "ip_flags_rewritten",
            Cause::Addresses { .. } | Cause::Headers { .. } => "address_rewritten",
            Cause::Byte { .. } | Cause::Icrc | Cause::Corrupted => "corrupted",
        }
    }

    /// Whether the headers are still credible.
    pub(crate) fn is_systematic(&self) -> bool {
        self.slug() != "corrupted"
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::ByteOrder => f.write_str("its bytes are in reverse order"),
            Cause::NotFilledIn => f.write_str("it is 0, so it was not filled in yet"),
            Cause::PadLeftOut => {
                f.write_str("computed without the pad, as rdma_rxe did before December 2019")
            }
            Cause::Included(fields) => {
                write!(f, "computed over fields that count as ones: {}", fields.join(", "))
            }
            Cause::SourcePort(port) => write!(f, "source port rewritten, was {port}"),
            Cause::Identification(id) => write!(f, "IPv4 identification rewritten, was {id:#06x}"),
            Cause::Flags(flags) => write!(f, "IPv4 flags rewritten, were {flags:#06x}"),
            Cause::Addresses { source, destination, source_port } => {
                write!(f, "address rewritten, was {} to {}", source.to_ip(), destination.to_ip())?;
                match source_port {
                    Some(port) => write!(f, " from port {port}"),
                    None => Ok(()),
                }
            }
            Cause::Headers { if_source, if_destination } => {
                f.write_str("addresses or ports rewritten, in each packet of the flow alike")?;
                let mut separator = ": ";
                let mut one = |which: &str, address: &Option<Gid>| match address.map(Gid::to_ip) {
                    Some(IpAddr::V4(address)) => {
                        write!(f, "{separator}{address} if it was the {which} alone")?;
                        separator = ", ";
                        Ok(())
                    }
                    _ => Ok(()),
                };
                one("source", if_source)?;
                one("destination", if_destination)
            }
            Cause::Byte { at, part, bits } if bits.count_ones() == 1 => {
                write!(f, "corrupted: bit {} of byte {at}, in the {part}", bits.trailing_zeros())
            }
            Cause::Byte { at, part, .. } => write!(f, "corrupted: byte {at}, in the {part}"),
            Cause::Icrc => f.write_str("corrupted: the ICRC itself"),
            Cause::Corrupted => f.write_str("corrupted, or changed in several places"),
        }
    }
}
