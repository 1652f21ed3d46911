//! Properties of an operation that the engine needs repeatedly, looked up once when it is posted.

use ferroce_wire::{Opcode, Service};

use crate::verbs::{Error, SendOp, WcOpcode};

/// The kind of an operation.
pub(crate) struct Kind {
    /// The RC opcodes of its packets by their [`Place`]. Local operations have no packet, and datagrams no place.
    pub(crate) opcodes: Option<[Opcode; 4]>,
    pub(crate) wc_opcode: WcOpcode,
    /// A bit for each service that supports it.
    services: u8,
    /// Its packets carry the bytes of the message.
    pub(crate) has_payload: bool,
    /// The required length of the message in bytes, if there is one.
    pub(crate) length: Option<u32>,
    /// READ, atomics, FLUSH and ATOMIC WRITE: the responder answers with more than an ACK, and uses a responder resource
    /// for each.
    pub(crate) is_read_or_atomic: bool,
    pub(crate) is_read: bool,
    pub(crate) is_atomic: bool,
    /// It sends no packet.
    pub(crate) is_local: bool,
    /// The peer's application is notified, by an event if it is solicited.
    pub(crate) notifies: bool,
}

/// A packet's place in its message, as an index of [`Kind::opcodes`].
#[derive(Clone, Copy)]
pub(crate) struct Place(usize);

impl Place {
    #[inline]
    pub(crate) fn new(is_first: bool, is_last: bool) -> Place {
        Place(usize::from(is_first) + 2 * usize::from(is_last))
    }
}

impl Kind {
    #[inline]
    pub(crate) fn is_on(&self, service: Service) -> bool {
        self.services >> service as u8 & 1 != 0
    }

    /// READ and atomics: the data of the response is written to local memory.
    pub(crate) fn writes_local_memory(&self) -> bool {
        self.is_read || self.is_atomic
    }

    pub(crate) fn opcode(&self, place: Place) -> Option<Opcode> {
        self.opcodes.as_ref().map(|opcodes| opcodes[place.0 & 3])
    }
}

impl SendOp {
    /// The error that a queue pair of this service does not support the operation.
    #[cold]
    pub(crate) fn not_on(&self, service: Service) -> Error {
        let expected = match service {
            Service::Ud => "SendTo or SendToWithImm on a UD queue pair",
            Service::Uc => {
                "Send or Write, with an immediate or without, BindMw or LocalInvalidate on a UC queue pair"
            }
            _ => "any operation but SendTo and SendToWithImm on an RC queue pair",
        };
        Error::invalid("op", format_args!("{self:?}"), expected)
    }

    #[inline]
    pub(crate) fn kind(&self) -> &'static Kind {
        match self {
            SendOp::Send => &SEND,
            SendOp::SendWithImm(_) => &SEND_WITH_IMM,
            SendOp::SendWithInvalidate(_) => &SEND_WITH_INVALIDATE,
            SendOp::SendTo(_) | SendOp::SendToWithImm(..) => &SEND_TO,
            SendOp::Write(_) => &WRITE,
            SendOp::WriteWithImm(..) => &WRITE_WITH_IMM,
            SendOp::Read(_) => &READ,
            SendOp::CompareSwap { .. } => &COMPARE_SWAP,
            SendOp::FetchAdd { .. } => &FETCH_ADD,
            SendOp::Flush { .. } => &FLUSH,
            SendOp::AtomicWrite(_) => &ATOMIC_WRITE,
            SendOp::LocalInvalidate(_) => &LOCAL_INVALIDATE,
            SendOp::BindMw { .. } => &BIND_MW,
        }
    }
}

pub(crate) const SEND: Kind = message(Opcode::RC_SEND_LAST, Opcode::RC_SEND_ONLY);
const SEND_WITH_IMM: Kind = message(Opcode::RC_SEND_LAST_WITH_IMMEDIATE, Opcode::RC_SEND_ONLY_WITH_IMMEDIATE);
const SEND_WITH_INVALIDATE: Kind = Kind {
    services: of(Service::Rc),
    ..message(Opcode::RC_SEND_LAST_WITH_INVALIDATE, Opcode::RC_SEND_ONLY_WITH_INVALIDATE)
};
const SEND_TO: Kind =
    Kind { opcodes: None, services: of(Service::Ud), ..message(Opcode::RC_SEND_LAST, Opcode::RC_SEND_ONLY) };
pub(crate) const WRITE: Kind =
    Kind { notifies: false, ..write(Opcode::RC_WRITE_LAST, Opcode::RC_WRITE_ONLY) };
const WRITE_WITH_IMM: Kind =
    write(Opcode::RC_WRITE_LAST_WITH_IMMEDIATE, Opcode::RC_WRITE_ONLY_WITH_IMMEDIATE);
const READ: Kind = Kind { is_read: true, ..explicit(Opcode::RC_READ_REQUEST, WcOpcode::RdmaRead) };
const COMPARE_SWAP: Kind =
    Kind { is_atomic: true, length: Some(8), ..explicit(Opcode::RC_COMPARE_SWAP, WcOpcode::CompSwap) };
const FETCH_ADD: Kind =
    Kind { is_atomic: true, length: Some(8), ..explicit(Opcode::RC_FETCH_ADD, WcOpcode::FetchAdd) };
const FLUSH: Kind = Kind { length: Some(0), ..explicit(Opcode::RC_FLUSH, WcOpcode::Flush) };
const ATOMIC_WRITE: Kind =
    Kind { has_payload: true, length: Some(8), ..explicit(Opcode::RC_ATOMIC_WRITE, WcOpcode::AtomicWrite) };
const LOCAL_INVALIDATE: Kind = local(WcOpcode::LocalInv);
const BIND_MW: Kind = local(WcOpcode::BindMw);

const fn of(service: Service) -> u8 {
    1 << service as u8
}

const fn message(last: Opcode, only: Opcode) -> Kind {
    Kind {
        opcodes: Some([Opcode::RC_SEND_MIDDLE, Opcode::RC_SEND_FIRST, last, only]),
        wc_opcode: WcOpcode::Send,
        services: of(Service::Rc) | of(Service::Uc),
        has_payload: true,
        length: None,
        is_read_or_atomic: false,
        is_read: false,
        is_atomic: false,
        is_local: false,
        notifies: true,
    }
}

const fn write(last: Opcode, only: Opcode) -> Kind {
    Kind {
        opcodes: Some([Opcode::RC_WRITE_MIDDLE, Opcode::RC_WRITE_FIRST, last, only]),
        wc_opcode: WcOpcode::RdmaWrite,
        ..message(last, only)
    }
}

/// A request of one packet that has its own response.
const fn explicit(opcode: Opcode, wc_opcode: WcOpcode) -> Kind {
    Kind {
        opcodes: Some([opcode; 4]),
        wc_opcode,
        services: of(Service::Rc),
        has_payload: false,
        is_read_or_atomic: true,
        notifies: false,
        ..message(opcode, opcode)
    }
}

const fn local(wc_opcode: WcOpcode) -> Kind {
    Kind {
        opcodes: None,
        wc_opcode,
        has_payload: false,
        length: Some(0),
        is_local: true,
        notifies: false,
        ..message(Opcode::RC_SEND_LAST, Opcode::RC_SEND_ONLY)
    }
}
