use std::fmt;

/// The transport service of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable Connection.
    Rc,
    /// Unreliable Connection.
    Uc,
    /// Unreliable Datagram.
    Ud,
    /// Congestion notification, which has no service.
    Cnp,
}

/// The operation of a packet, regardless of its position in the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Delivers to the next receive WR.
    Send,
    /// Writes to memory that the requester names.
    Write,
    /// Requests memory that the requester names.
    ReadRequest,
    /// Answers a READ, and without payload a FLUSH or ATOMIC WRITE.
    ReadResponse,
    /// Only an AETH.
    Acknowledge,
    /// Answers an atomic.
    AtomicAcknowledge,
    /// Stores 8 bytes if the old value is the expected one.
    CompareSwap,
    /// Adds to 8 bytes.
    FetchAdd,
    /// Makes written bytes visible or persistent.
    Flush,
    /// Stores 8 bytes atomically.
    AtomicWrite,
    /// An AETH and a [`Sack`](crate::Sack), between ends that have negotiated it.
    SelectiveAcknowledge,
    /// Notifies a sender of congestion.
    Cnp,
}

/// The position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The whole message.
    Only,
}

/// A header between the BTH and the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each names the type of its header")]
pub enum Extension {
    Deth,
    Reth,
    AtomicEth,
    Aeth,
    AtomicAckEth,
    ImmDt,
    Ieth,
    Feth,
}

impl Extension {
    /// The number of kinds.
    const COUNT: usize = 8;

    /// Bytes on the wire.
    pub const fn len(self) -> usize {
        match self {
            Extension::Deth | Extension::AtomicAckEth => 8,
            Extension::Reth => 16,
            Extension::AtomicEth => 28,
            Extension::Aeth | Extension::ImmDt | Extension::Ieth | Extension::Feth => 4,
        }
    }
}

/// The allowed length of the payload, relative to the path MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PayloadRule {
    /// Exactly the path MTU.
    Full,
    /// 1 to the path MTU.
    Some,
    /// 0 to the path MTU.
    Any,
    /// Exactly this many bytes, for every path MTU.
    Exactly(u8),
}

impl PayloadRule {
    /// Whether a payload of `len` bytes is valid with a path MTU of `mtu` bytes.
    pub const fn admits(self, len: usize, mtu: usize) -> bool {
        match self {
            PayloadRule::Full => len == mtu,
            PayloadRule::Some => len > 0 && len <= mtu,
            PayloadRule::Any => len <= mtu,
            PayloadRule::Exactly(n) => len == n as usize,
        }
    }
}

/// The requests that may follow on a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Successor {
    /// The start of a message.
    #[default]
    NewMessage,
    /// A SEND Middle or Last, with or without immediate or invalidate.
    SendContinued,
    /// A WRITE Middle or Last, with or without immediate.
    WriteContinued,
}

/// A valid opcode: its byte can be looked up without a check.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(u8);

/// The properties of an opcode that are needed for each packet, in a table. The size is that of a cache line, so the
/// row of a byte is found by a shift.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Info {
    name: &'static str,
    exists: bool,
    service: Service,
    operation: Operation,
    position: Position,
    extensions: &'static [Extension],
    extensions_len: u8,
    /// The offset of each header, by its number; [`ABSENT`] if the packet does not have it.
    offsets: [u8; Extension::COUNT],
    payload: PayloadRule,
    is_request: bool,
    is_answered_explicitly: bool,
    successor: Successor,
    /// The required [`successor`](Opcode::successor) of the previous request.
    continues: Successor,
}

const ABSENT: u8 = u8::MAX;

impl Opcode {
    /// The opcode of a byte; `None` if it is invalid.
    #[inline]
    pub const fn from_byte(byte: u8) -> Option<Opcode> {
        if TABLE[byte as usize].exists { Some(Opcode(byte)) } else { None }
    }

    /// The byte on the wire.
    pub const fn byte(self) -> u8 {
        self.0
    }

    #[inline]
    const fn info(self) -> &'static Info {
        &TABLE[self.0 as usize]
    }

    /// The name used by the kernel and rdma-core: `RC_SEND_ONLY`, `UD_SEND_ONLY_WITH_IMMEDIATE`, `CNP`.
    pub const fn name(self) -> &'static str {
        self.info().name
    }

    /// The transport service.
    pub const fn service(self) -> Service {
        self.info().service
    }

    /// The operation.
    pub const fn operation(self) -> Operation {
        self.info().operation
    }

    /// The same opcode of another service, if it exists.
    pub const fn on(self, service: Service) -> Option<Opcode> {
        let base = match service {
            Service::Rc => 0x00,
            Service::Uc => 0x20,
            Service::Ud => 0x60,
            Service::Cnp => 0x80,
        };
        Opcode::from_byte(base | self.0 & 0x1f)
    }

    /// The position in the message.
    pub const fn position(self) -> Position {
        self.info().position
    }

    /// The headers between BTH and payload, in order.
    pub const fn extensions(self) -> &'static [Extension] {
        self.info().extensions
    }

    /// The length of these headers.
    pub const fn extensions_len(self) -> usize {
        self.info().extensions_len as usize
    }

    /// The allowed length of the payload.
    pub const fn payload(self) -> PayloadRule {
        self.info().payload
    }

    /// Whether the packet has this header.
    pub fn has(self, extension: Extension) -> bool {
        self.info().offsets[extension as usize] != ABSENT
    }

    /// The offset of a header from the end of the BTH.
    pub(crate) fn offset_of(self, extension: Extension) -> Option<usize> {
        match self.info().offsets[extension as usize] {
            ABSENT => None,
            offset => Some(usize::from(offset)),
        }
    }

    /// Whether it only acknowledges a requester's packets: ACK, NAK, or selective acknowledgement.
    pub const fn is_acknowledgement(self) -> bool {
        matches!(self.operation(), Operation::Acknowledge | Operation::SelectiveAcknowledge)
    }

    /// Whether a requester sends it (rather than a responder or a congestion point).
    pub const fn is_request(self) -> bool {
        self.info().is_request
    }

    /// Whether a request is answered by a specific packet (READ response, Atomic Acknowledge) rather than by any ACK at
    /// or after it.
    pub const fn is_answered_explicitly(self) -> bool {
        self.info().is_answered_explicitly
    }

    /// The requests that may follow this one (docs/protocol.md §2).
    pub const fn successor(self) -> Successor {
        self.info().successor
    }

    /// Whether this request may follow.
    pub fn may_come(self, expected: Successor) -> bool {
        self.info().continues == expected
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An invalid opcode byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("opcode {0:#04x} does not exist")]
pub struct InvalidOpcode(pub u8);

impl TryFrom<u8> for Opcode {
    type Error = InvalidOpcode;
    fn try_from(byte: u8) -> Result<Opcode, InvalidOpcode> {
        Opcode::from_byte(byte).ok_or(InvalidOpcode(byte))
    }
}

#[expect(missing_docs, reason = "the standard's names")]
impl Opcode {
    pub const RC_SEND_FIRST: Opcode = Opcode(0x00);
    pub const RC_SEND_MIDDLE: Opcode = Opcode(0x01);
    pub const RC_SEND_LAST: Opcode = Opcode(0x02);
    pub const RC_SEND_LAST_WITH_IMMEDIATE: Opcode = Opcode(0x03);
    pub const RC_SEND_ONLY: Opcode = Opcode(0x04);
    pub const RC_SEND_ONLY_WITH_IMMEDIATE: Opcode = Opcode(0x05);
    pub const RC_WRITE_FIRST: Opcode = Opcode(0x06);
    pub const RC_WRITE_MIDDLE: Opcode = Opcode(0x07);
    pub const RC_WRITE_LAST: Opcode = Opcode(0x08);
    pub const RC_WRITE_LAST_WITH_IMMEDIATE: Opcode = Opcode(0x09);
    pub const RC_WRITE_ONLY: Opcode = Opcode(0x0a);
    pub const RC_WRITE_ONLY_WITH_IMMEDIATE: Opcode = Opcode(0x0b);
    pub const RC_READ_REQUEST: Opcode = Opcode(0x0c);
    pub const RC_READ_RESPONSE_FIRST: Opcode = Opcode(0x0d);
    pub const RC_READ_RESPONSE_MIDDLE: Opcode = Opcode(0x0e);
    pub const RC_READ_RESPONSE_LAST: Opcode = Opcode(0x0f);
    pub const RC_READ_RESPONSE_ONLY: Opcode = Opcode(0x10);
    pub const RC_ACKNOWLEDGE: Opcode = Opcode(0x11);
    pub const RC_ATOMIC_ACKNOWLEDGE: Opcode = Opcode(0x12);
    pub const RC_COMPARE_SWAP: Opcode = Opcode(0x13);
    pub const RC_FETCH_ADD: Opcode = Opcode(0x14);
    pub const RC_SEND_LAST_WITH_INVALIDATE: Opcode = Opcode(0x16);
    pub const RC_SEND_ONLY_WITH_INVALIDATE: Opcode = Opcode(0x17);
    pub const RC_FLUSH: Opcode = Opcode(0x1c);
    pub const RC_ATOMIC_WRITE: Opcode = Opcode(0x1d);
    pub const UC_SEND_FIRST: Opcode = Opcode(0x20);
    pub const UC_SEND_MIDDLE: Opcode = Opcode(0x21);
    pub const UC_SEND_LAST: Opcode = Opcode(0x22);
    pub const UC_SEND_LAST_WITH_IMMEDIATE: Opcode = Opcode(0x23);
    pub const UC_SEND_ONLY: Opcode = Opcode(0x24);
    pub const UC_SEND_ONLY_WITH_IMMEDIATE: Opcode = Opcode(0x25);
    pub const UC_WRITE_FIRST: Opcode = Opcode(0x26);
    pub const UC_WRITE_MIDDLE: Opcode = Opcode(0x27);
    pub const UC_WRITE_LAST: Opcode = Opcode(0x28);
    pub const UC_WRITE_LAST_WITH_IMMEDIATE: Opcode = Opcode(0x29);
    pub const UC_WRITE_ONLY: Opcode = Opcode(0x2a);
    pub const UC_WRITE_ONLY_WITH_IMMEDIATE: Opcode = Opcode(0x2b);
    pub const UD_SEND_ONLY: Opcode = Opcode(0x64);
    pub const UD_SEND_ONLY_WITH_IMMEDIATE: Opcode = Opcode(0x65);
    pub const CNP: Opcode = Opcode(0x81);
    /// Not in the standard: one of the codes (0xC0 to 0xFF) reserved for manufacturers, so other peers do not use it
    /// otherwise.
    pub const SELECTIVE_ACKNOWLEDGE: Opcode = Opcode(0xf1);
}

static TABLE: [Info; 256] = {
    use Extension::{Aeth, AtomicAckEth, AtomicEth, Deth, Feth, Ieth, ImmDt, Reth};
    use Operation::{
        Acknowledge, AtomicAcknowledge, AtomicWrite, Cnp, CompareSwap, FetchAdd, Flush, ReadRequest,
        ReadResponse, SelectiveAcknowledge, Send, Write,
    };
    use PayloadRule::{Any, Exactly, Full, Some as OneUp};
    use Position::{First, Last, Middle, Only};
    use Service::{Rc, Uc, Ud};
    use Successor::{NewMessage, SendContinued, WriteContinued};

    type Row = (u8, &'static str, Service, Operation, Position, &'static [Extension], PayloadRule);

    let mut table = [Info {
        name: "",
        exists: false,
        service: Rc,
        operation: Send,
        position: Only,
        extensions: &[],
        extensions_len: 0,
        offsets: [ABSENT; Extension::COUNT],
        payload: Any,
        is_request: false,
        is_answered_explicitly: false,
        successor: NewMessage,
        continues: NewMessage,
    }; 256];
    let rows: &[Row] = &[
        (0x00, "RC_SEND_FIRST", Rc, Send, First, &[], Full),
        (0x01, "RC_SEND_MIDDLE", Rc, Send, Middle, &[], Full),
        (0x02, "RC_SEND_LAST", Rc, Send, Last, &[], OneUp),
        (0x03, "RC_SEND_LAST_WITH_IMMEDIATE", Rc, Send, Last, &[ImmDt], OneUp),
        (0x04, "RC_SEND_ONLY", Rc, Send, Only, &[], Any),
        (0x05, "RC_SEND_ONLY_WITH_IMMEDIATE", Rc, Send, Only, &[ImmDt], Any),
        (0x06, "RC_RDMA_WRITE_FIRST", Rc, Write, First, &[Reth], Full),
        (0x07, "RC_RDMA_WRITE_MIDDLE", Rc, Write, Middle, &[], Full),
        (0x08, "RC_RDMA_WRITE_LAST", Rc, Write, Last, &[], OneUp),
        (0x09, "RC_RDMA_WRITE_LAST_WITH_IMMEDIATE", Rc, Write, Last, &[ImmDt], OneUp),
        (0x0a, "RC_RDMA_WRITE_ONLY", Rc, Write, Only, &[Reth], Any),
        (0x0b, "RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE", Rc, Write, Only, &[Reth, ImmDt], Any),
        (0x0c, "RC_RDMA_READ_REQUEST", Rc, ReadRequest, Only, &[Reth], Exactly(0)),
        (0x0d, "RC_RDMA_READ_RESPONSE_FIRST", Rc, ReadResponse, First, &[Aeth], Full),
        (0x0e, "RC_RDMA_READ_RESPONSE_MIDDLE", Rc, ReadResponse, Middle, &[], Full),
        (0x0f, "RC_RDMA_READ_RESPONSE_LAST", Rc, ReadResponse, Last, &[Aeth], OneUp),
        (0x10, "RC_RDMA_READ_RESPONSE_ONLY", Rc, ReadResponse, Only, &[Aeth], Any),
        (0x11, "RC_ACKNOWLEDGE", Rc, Acknowledge, Only, &[Aeth], Exactly(0)),
        (0x12, "RC_ATOMIC_ACKNOWLEDGE", Rc, AtomicAcknowledge, Only, &[Aeth, AtomicAckEth], Exactly(0)),
        (0x13, "RC_COMPARE_SWAP", Rc, CompareSwap, Only, &[AtomicEth], Exactly(0)),
        (0x14, "RC_FETCH_ADD", Rc, FetchAdd, Only, &[AtomicEth], Exactly(0)),
        (0x16, "RC_SEND_LAST_WITH_INVALIDATE", Rc, Send, Last, &[Ieth], OneUp),
        (0x17, "RC_SEND_ONLY_WITH_INVALIDATE", Rc, Send, Only, &[Ieth], Any),
        (0x1c, "RC_FLUSH", Rc, Flush, Only, &[Feth, Reth], Exactly(0)),
        (0x1d, "RC_ATOMIC_WRITE", Rc, AtomicWrite, Only, &[Reth], Exactly(8)),
        (0x20, "UC_SEND_FIRST", Uc, Send, First, &[], Full),
        (0x21, "UC_SEND_MIDDLE", Uc, Send, Middle, &[], Full),
        (0x22, "UC_SEND_LAST", Uc, Send, Last, &[], OneUp),
        (0x23, "UC_SEND_LAST_WITH_IMMEDIATE", Uc, Send, Last, &[ImmDt], OneUp),
        (0x24, "UC_SEND_ONLY", Uc, Send, Only, &[], Any),
        (0x25, "UC_SEND_ONLY_WITH_IMMEDIATE", Uc, Send, Only, &[ImmDt], Any),
        (0x26, "UC_RDMA_WRITE_FIRST", Uc, Write, First, &[Reth], Full),
        (0x27, "UC_RDMA_WRITE_MIDDLE", Uc, Write, Middle, &[], Full),
        (0x28, "UC_RDMA_WRITE_LAST", Uc, Write, Last, &[], OneUp),
        (0x29, "UC_RDMA_WRITE_LAST_WITH_IMMEDIATE", Uc, Write, Last, &[ImmDt], OneUp),
        (0x2a, "UC_RDMA_WRITE_ONLY", Uc, Write, Only, &[Reth], Any),
        (0x2b, "UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE", Uc, Write, Only, &[Reth, ImmDt], Any),
        (0x64, "UD_SEND_ONLY", Ud, Send, Only, &[Deth], Any),
        (0x65, "UD_SEND_ONLY_WITH_IMMEDIATE", Ud, Send, Only, &[Deth, ImmDt], Any),
        (0x81, "CNP", Service::Cnp, Cnp, Only, &[], Exactly(16)),
        (
            0xf1,
            "SELECTIVE_ACKNOWLEDGE",
            Rc,
            SelectiveAcknowledge,
            Only,
            &[Aeth],
            Exactly(crate::Sack::LEN as u8),
        ),
    ];
    let mut i = 0;
    while i < rows.len() {
        let (byte, name, service, operation, position, extensions, payload) = rows[i];
        let (mut extensions_len, mut offsets, mut e) = (0, [ABSENT; Extension::COUNT], 0);
        while e < extensions.len() {
            offsets[extensions[e] as usize] = extensions_len;
            extensions_len += extensions[e].len() as u8;
            e += 1;
        }
        table[byte as usize] = Info {
            name,
            exists: true,
            service,
            operation,
            position,
            extensions,
            extensions_len,
            offsets,
            payload,
            is_request: !matches!(
                operation,
                ReadResponse | Acknowledge | AtomicAcknowledge | SelectiveAcknowledge | Cnp
            ),
            is_answered_explicitly: matches!(
                operation,
                ReadRequest | CompareSwap | FetchAdd | Flush | AtomicWrite
            ),
            successor: match (operation, position) {
                (Send, First | Middle) => SendContinued,
                (Write, First | Middle) => WriteContinued,
                _ => NewMessage,
            },
            continues: match (operation, position) {
                (Send, Middle | Last) => SendContinued,
                (Write, Middle | Last) => WriteContinued,
                _ => NewMessage,
            },
        };
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Opcode> {
        (0..=255).filter_map(Opcode::from_byte)
    }

    #[test]
    fn the_table_has_every_opcode_and_no_other() {
        assert_eq!(all().count(), 25 + 12 + 2 + 1 + 1);
        for byte in [0x15, 0x18, 0x19, 0x1a, 0x1b, 0x1e, 0x2c, 0x36, 0x40, 0x60, 0x80, 0xe0, 0xff] {
            assert_eq!(Opcode::try_from(byte), Err(InvalidOpcode(byte)));
        }
        assert_eq!(Opcode::RC_FLUSH.extensions_len(), 20);
        assert_eq!(Opcode::RC_WRITE_ONLY_WITH_IMMEDIATE.extensions_len(), 20);
        assert_eq!(Opcode::RC_FLUSH.offset_of(Extension::Reth), Some(4));
    }

    /// UC has the SENDs and WRITEs of RC, so the two halves of the table must agree.
    #[test]
    fn uc_rows_are_rc_rows() {
        for byte in 0x20..=0x2b {
            let (uc, rc) = (Opcode::from_byte(byte).unwrap(), Opcode::from_byte(byte - 0x20).unwrap());
            assert_eq!(uc.name()[2..], rc.name()[2..]);
            assert_eq!((uc.operation(), uc.position()), (rc.operation(), rc.position()));
            assert_eq!((uc.extensions(), uc.payload()), (rc.extensions(), rc.payload()));
            assert_eq!((rc.on(Service::Uc), uc.on(Service::Rc)), (Some(uc), Some(rc)));
        }
        assert_eq!(Opcode::RC_READ_REQUEST.on(Service::Uc), None);
        assert_eq!(Opcode::RC_SEND_ONLY.on(Service::Ud), Some(Opcode::UD_SEND_ONLY));
        assert_eq!(Opcode::RC_SEND_FIRST.on(Service::Ud), None);
    }

    #[test]
    fn successors() {
        let after_send = Opcode::RC_SEND_FIRST.successor();
        assert!(Opcode::RC_SEND_MIDDLE.may_come(after_send));
        assert!(Opcode::RC_SEND_LAST_WITH_INVALIDATE.may_come(after_send));
        assert!(!Opcode::RC_SEND_ONLY.may_come(after_send));
        assert!(!Opcode::RC_WRITE_MIDDLE.may_come(after_send));
        let after_write = Opcode::RC_WRITE_MIDDLE.successor();
        assert!(Opcode::RC_WRITE_LAST_WITH_IMMEDIATE.may_come(after_write));
        assert!(!Opcode::RC_SEND_LAST_WITH_INVALIDATE.may_come(after_write));
        assert!(!Opcode::RC_READ_REQUEST.may_come(after_write));
        let idle = Successor::default();
        assert!(Opcode::RC_FETCH_ADD.may_come(idle) && Opcode::RC_WRITE_FIRST.may_come(idle));
        assert!(!Opcode::RC_SEND_LAST.may_come(idle));
    }
}
