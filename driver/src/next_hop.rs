use std::fmt;
use std::net::IpAddr;

/// The state of the next hop to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextHop {
    /// The destination hardware address of frames.
    Found([u8; 6]),
    /// It is being resolved: call again.
    Pending,
}

impl NextHop {
    /// The hardware address, if it is found.
    pub fn found(self) -> Option<[u8; 6]> {
        match self {
            NextHop::Found(mac) => Some(mac),
            NextHop::Pending => None,
        }
    }
}

/// An error of the network for a packet that was not delivered (ICMP Destination Unreachable).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The destination of the packet.
    pub peer: IpAddr,
    /// The sender of the error: the peer, a router, or this host, whose ARP or neighbour discovery was not answered.
    pub from: IpAddr,
    /// Why it was not delivered.
    pub reason: RefusalReason,
    /// The first bytes after the packet's UDP header. They identify the packet: a host that did not see it can't know them.
    pub quoted: [u8; Refusal::QUOTED],
}

impl Refusal {
    /// Bytes kept of a packet: up to the communication ID in a MAD.
    pub const QUOTED: usize = 48;
    /// The most errors that a port keeps until they are read.
    pub(crate) const KEPT_MAX: usize = 64;

    /// To be sent to another process of this host.
    pub(crate) fn to_bytes(self) -> [u8; Refusal::BYTES] {
        let mut bytes = [0; Refusal::BYTES];
        bytes[..16].copy_from_slice(&octets(self.peer));
        bytes[16..32].copy_from_slice(&octets(self.from));
        bytes[32] = self.reason as u8;
        bytes[33..].copy_from_slice(&self.quoted);
        bytes
    }

    /// Parses the output of [`to_bytes`](Refusal::to_bytes).
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Refusal> {
        let bytes: &[u8; Refusal::BYTES] = bytes.try_into().ok()?;
        let address = |at: usize| {
            let octets: [u8; 16] = *bytes.get(at..)?.first_chunk()?;
            Some(IpAddr::from(octets).to_canonical())
        };
        let all =
            [RefusalReason::Network, RefusalReason::Host, RefusalReason::Port, RefusalReason::Prohibited];
        let reason = all.into_iter().find(|reason| *reason as u8 == bytes[32])?;
        Some(Refusal { peer: address(0)?, from: address(16)?, reason, quoted: *bytes.last_chunk()? })
    }

    const BYTES: usize = 33 + Refusal::QUOTED;
}

/// The 16 bytes of an address; an IPv4 address is mapped.
pub(crate) fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Why a packet was not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalReason {
    /// The network has no route.
    Network,
    /// The host does not answer ARP or neighbour discovery.
    Host,
    /// Nothing has the UDP port.
    Port,
    /// A firewall rejected it.
    Prohibited,
}

impl RefusalReason {
    /// From the code of an ICMP Destination Unreachable message; `None` for codes that are not a refusal, such as packet
    /// too long.
    pub fn of_icmp(code: u8) -> Option<RefusalReason> {
        match code {
            0 | 6 | 11 => Some(RefusalReason::Network),
            1 | 7 | 8 | 12 => Some(RefusalReason::Host),
            2 | 3 => Some(RefusalReason::Port),
            9 | 10 | 13 => Some(RefusalReason::Prohibited),
            _ => None,
        }
    }

    /// The same for ICMPv6.
    pub fn of_icmpv6(code: u8) -> Option<RefusalReason> {
        match code {
            0 => Some(RefusalReason::Network),
            2 | 3 => Some(RefusalReason::Host),
            4 => Some(RefusalReason::Port),
            1 | 5 | 6 => Some(RefusalReason::Prohibited),
            _ => None,
        }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RefusalReason::Network => "network unreachable",
            RefusalReason::Host => "host unreachable",
            RefusalReason::Port => "port unreachable",
            RefusalReason::Prohibited => "administratively prohibited",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_read_as_written() {
        for (peer, reason) in [("10.0.0.1", RefusalReason::Host), ("fd09::1", RefusalReason::Prohibited)] {
            let peer = peer.parse().expect("an address");
            let refusal = Refusal { peer, from: peer, reason, quoted: [7; Refusal::QUOTED] };
            let bytes = refusal.to_bytes();
            assert_eq!(Refusal::from_bytes(&bytes), Some(refusal));
            assert_eq!(Refusal::from_bytes(&bytes[1..]), None);
            let mut unknown = bytes;
            unknown[32] = 9;
            assert_eq!(Refusal::from_bytes(&unknown), None);
        }
    }
}
