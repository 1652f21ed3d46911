//! The work of either end: sides, verbs, requests, completions.

use ferroce::{Access, PathMtu, QpType};

/// One of the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ferroce,
    Rxe,
}

impl Side {
    pub(crate) const BOTH: [Side; 2] = [Side::Ferroce, Side::Rxe];

    pub(crate) fn other(self) -> Side {
        if self == Side::Ferroce { Side::Rxe } else { Side::Ferroce }
    }

    pub(crate) fn name(self) -> &'static str {
        if self == Side::Ferroce { "ferroce" } else { "rxe" }
    }
}

/// An operation on the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Send,
    SendImm,
    SendInvalidate,
    Write,
    WriteImm,
    Read,
    FetchAdd,
    CompareSwap,
}

impl Verb {
    /// The standard's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::Send => "SEND",
            Verb::SendImm => "SEND with immediate",
            Verb::SendInvalidate => "SEND with invalidate",
            Verb::Write => "WRITE",
            Verb::WriteImm => "WRITE with immediate",
            Verb::Read => "READ",
            Verb::FetchAdd => "FETCH_ADD",
            Verb::CompareSwap => "CMP_SWAP, hits and misses",
        }
    }

    /// The opcode number in its completion.
    pub(crate) fn opcode(self) -> u64 {
        match self {
            Verb::Send | Verb::SendImm | Verb::SendInvalidate => 0,
            Verb::Write | Verb::WriteImm => 1,
            Verb::Read => 2,
            Verb::CompareSwap => 3,
            Verb::FetchAdd => 4,
        }
    }

    pub(crate) fn is_send(self) -> bool {
        matches!(self, Verb::Send | Verb::SendImm | Verb::SendInvalidate)
    }

    /// Whether it consumes a receive WR.
    pub(crate) fn takes_receive(self) -> bool {
        self.is_send() || self == Verb::WriteImm
    }

    pub(crate) fn has_immediate(self) -> bool {
        matches!(self, Verb::SendImm | Verb::WriteImm)
    }

    /// Its name in the guest.
    pub(crate) fn name_there(self) -> &'static str {
        match self {
            Verb::Send => "send",
            Verb::SendImm => "send_imm",
            Verb::SendInvalidate => "send_inv",
            Verb::Write => "write",
            Verb::WriteImm => "write_imm",
            Verb::Read => "read",
            Verb::FetchAdd => "fetch_add",
            Verb::CompareSwap => "compare_swap",
        }
    }
}

/// One work request of a send queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// In the requester's memory.
    pub(crate) offset: u64,
    pub(crate) length: u32,
    /// In the memory of the other end, whose bounds checks find an offset outside.
    pub(crate) remote_offset: i64,
    /// The key to use in place of the memory's own.
    pub(crate) rkey: Option<u32>,
    pub(crate) imm: u32,
    /// The value to compare or add.
    pub(crate) compare: u64,
    pub(crate) swap: u64,
    /// The key to invalidate.
    pub(crate) invalidate: u32,
    pub(crate) fence: bool,
}

impl Request {
    pub(crate) const EMPTY: Request = Request {
        offset: 0,
        length: 0,
        remote_offset: 0,
        rkey: None,
        imm: 0,
        compare: 0,
        swap: 0,
        invalidate: 0,
        fence: false,
    };
}

/// A part of a memory that contains the pattern of its seed, or arbitrary data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) seed: Option<u8>,
}

/// A completion, of either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) wr_id: u64,
    /// The number in the verbs API.
    pub(crate) status: u64,
    pub(crate) opcode: u64,
    pub(crate) length: u64,
    pub(crate) imm: Option<u32>,
    pub(crate) invalidated: Option<u32>,
}

/// A queue of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    Send,
    Receive,
}

/// The attributes of two connected queue pairs. Access rights are those that each end grants to the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) service: QpType,
    pub(crate) path_mtu: PathMtu,
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rnr_timer: u8,
    pub(crate) access: Access,
}

impl Terms {
    pub(crate) fn new(service: QpType, path_mtu: PathMtu) -> Terms {
        // 1 s: an emulated guest is slow with operations that it executes for the first time.
        let timeout = 18;
        Terms {
            service,
            path_mtu,
            timeout,
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer: 12,
            access: everything(),
        }
    }
}

/// All kinds of remote access that both ends support.
pub(crate) fn everything() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}
