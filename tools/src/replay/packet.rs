//! A RoCE packet, recorded or sent by the engine, parsed once, with its time.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;

use ferroce::wire::{NetworkHeader, Opcode, Operation, OwnedPacket, Packet, ParseError, Position, Service};
use ferroce::{Nanos, Psn, RKey};

/// The first manufacturer opcode.
pub(super) const MANUFACTURERS: u8 = 0xc0;

/// A packet with a valid transport header, and its time.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Its frame number in the capture, from 1; for an engine's packet, that of the recorded packet before it.
    pub(super) frame: u64,
    pub(super) at: Nanos,
    pub(super) icrc_is_right: bool,
    pub(super) pad_fits: bool,
    /// Without its payload if the engine sent it, except for a CNP.
    packet: OwnedPacket,
    payload_len: usize,
    /// Of the payload, to compare packets if one payload is not kept.
    digest: u64,
}

impl Deref for Seen {
    type Target = OwnedPacket;

    fn deref(&self) -> &OwnedPacket {
        &self.packet
    }
}

impl Seen {
    /// Parses a packet that begins with its network header.
    pub(super) fn new(frame: u64, at: Nanos, bytes: &[u8], is_roce_v1: bool) -> Result<Seen, ParseError> {
        let packet = if is_roce_v1 { Packet::decode_grh(bytes) } else { Packet::decode_ip(bytes) }?;
        let mut digest = DefaultHasher::new();
        packet.payload.hash(&mut digest);
        Ok(Seen {
            frame,
            at,
            icrc_is_right: packet.check_icrc().is_ok(),
            pad_fits: packet.pad_fits(),
            packet: OwnedPacket::from(&packet),
            payload_len: packet.payload.len(),
            digest: digest.finish(),
        })
    }

    /// As [`new`](Seen::new), for a packet that the engine sent. The engine may send much more than was recorded, so
    /// the payload is not kept, except for a CNP, whose payload is checked.
    pub(super) fn sent(frame: u64, at: Nanos, bytes: &[u8], is_roce_v1: bool) -> Result<Seen, ParseError> {
        let mut seen = Seen::new(frame, at, bytes, is_roce_v1)?;
        if !seen.is_cnp() {
            seen.packet.payload = Vec::new();
        }
        Ok(seen)
    }

    pub(super) fn is_roce_v1(&self) -> bool {
        self.network.header == NetworkHeader::Grh
    }

    /// The IPv4 identification.
    pub(super) fn identification(&self) -> Option<u16> {
        (self.network.header == NetworkHeader::Ipv4).then_some(self.network.identification)
    }

    /// Whether it was sent after another packet, according to the identifications.
    pub(super) fn was_sent_behind(&self, other: &Seen) -> bool {
        self.sent_since(other).is_some_and(|sent| (1..1 << 15).contains(&sent))
    }

    /// The number of packets sent since another one, including this one, according to the identifications.
    pub(super) fn sent_since(&self, other: &Seen) -> Option<u16> {
        Some(self.identification()?.wrapping_sub(other.identification()?))
    }

    /// Whether all fields that routers leave unchanged are equal: those that the ICRC covers.
    pub(super) fn is_same_as(&self, other: &Seen) -> bool {
        self.identification() == other.identification()
            && self.bth.masked() == other.bth.masked()
            && self.extensions == other.extensions
            && self.carries_the_same_as(other)
            && self.icrc == other.icrc
    }

    /// The original value that an atomic returned.
    pub(super) fn original(&self) -> Option<u64> {
        self.extensions.atomic_ack_eth.map(|header| header.original())
    }

    pub(super) fn immediate(&self) -> Option<u32> {
        self.extensions.immdt.map(|header| header.value())
    }

    pub(super) fn invalidates(&self) -> Option<RKey> {
        self.extensions.ieth.map(|header| header.rkey())
    }

    /// The length of its payload, which may not be kept.
    pub(super) fn payload_len(&self) -> usize {
        self.payload_len
    }

    pub(super) fn payload_digest(&self) -> (usize, u64) {
        (self.payload_len, self.digest)
    }

    /// Whether both have the same payload.
    pub(super) fn carries_the_same_as(&self, other: &Seen) -> bool {
        self.payload_digest() == other.payload_digest()
    }

    pub(super) fn psn(&self) -> Psn {
        self.bth.psn()
    }

    pub(super) fn service(&self) -> Service {
        self.opcode.service()
    }

    /// Whether it may have the solicited event bit.
    pub(super) fn may_solicit(&self) -> bool {
        self.ends() && (self.opcode.operation() == Operation::Send || self.extensions.immdt.is_some())
    }

    pub(super) fn is_request(&self) -> bool {
        self.opcode.is_request()
    }

    /// Whether it is a response: an ACK, a NAK, a READ response, an Atomic Acknowledge.
    pub(super) fn is_response(&self) -> bool {
        use Operation::{Acknowledge, AtomicAcknowledge, ReadResponse};
        matches!(self.opcode.operation(), ReadResponse | Acknowledge | AtomicAcknowledge)
    }

    /// Whether it is a request with a valid ICRC.
    pub(super) fn is_whole_request(&self) -> bool {
        self.is_request() && self.icrc_is_right
    }

    /// Whether it is a response with a valid ICRC.
    pub(super) fn is_whole_response(&self) -> bool {
        self.is_response() && self.icrc_is_right
    }

    /// Whether its kind can answer a request of this operation; a NAK can answer any.
    pub(super) fn may_answer(&self, request: Operation) -> bool {
        self.is_nak() || answers(self.opcode.operation(), request)
    }

    pub(super) fn is_rnr_nak(&self) -> bool {
        self.is_response() && self.extensions.aeth.is_some_and(|aeth| aeth.syndrome_byte() >> 5 == 1)
    }

    /// Whether it is a NAK other than a sequence error or RNR NAK.
    pub(super) fn is_refusal(&self) -> bool {
        self.is_response()
            && self.extensions.aeth.is_some_and(|aeth| matches!(aeth.syndrome_byte(), 0x61..=0x64))
    }

    /// Whether it is a NAK of any kind, including RNR.
    pub(super) fn is_nak(&self) -> bool {
        self.is_response() && self.extensions.aeth.is_some_and(|aeth| aeth.syndrome_byte() >= 0x20)
    }

    pub(super) fn is_cnp(&self) -> bool {
        self.opcode == Opcode::CNP
    }

    /// Whether it has a manufacturer opcode, such as ferroce's selective acknowledge.
    pub(super) fn is_manufacturers(&self) -> bool {
        self.opcode.byte() >= MANUFACTURERS
    }

    pub(super) fn is_marked(&self) -> bool {
        self.network.traffic_class & 3 == 3
    }

    /// Whether it starts a message.
    pub(super) fn starts(&self) -> bool {
        matches!(self.opcode.position(), Position::First | Position::Only)
    }

    /// Whether it ends a message.
    pub(super) fn ends(&self) -> bool {
        matches!(self.opcode.position(), Position::Last | Position::Only)
    }
}

/// Whether a response of one operation answers a request of another one.
pub(super) fn answers(answer: Operation, request: Operation) -> bool {
    use Operation::{
        AtomicAcknowledge, AtomicWrite, CompareSwap, FetchAdd, Flush, ReadRequest, ReadResponse,
    };
    match answer {
        ReadResponse => matches!(request, ReadRequest | Flush | AtomicWrite),
        AtomicAcknowledge => matches!(request, CompareSwap | FetchAdd),
        _ => !matches!(request, ReadRequest | CompareSwap | FetchAdd | Flush | AtomicWrite),
    }
}
