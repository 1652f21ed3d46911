use std::num::NonZeroU16;

use ferroce_wire::{MacAddr, Qpn, RKey};

use crate::verbs::Qp;

/// How a work request ended; numbers and names as in verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the verbs' names")]
#[repr(u8)]
#[non_exhaustive]
pub enum WcStatus {
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    RemAbortErr = 16,
    FatalErr = 19,
    RespTimeoutErr = 20,
    GeneralErr = 21,
}

/// What a completed work request was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the verbs' names")]
#[repr(u8)]
#[non_exhaustive]
pub enum WcOpcode {
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Flush = 8,
    AtomicWrite = 9,
    Recv = 128,
    RecvRdmaWithImm = 129,
}

/// The end of a work request. On an error only `wr_id`, `status`, `qp` and `qpn` mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkCompletion {
    /// What the work request was posted with.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// Bytes received, written or read.
    pub byte_len: u32,
    /// The receive starts with 40 bytes of network header, which `byte_len` counts (UD).
    pub grh: bool,
    /// The immediate that came with the message.
    pub immediate: Option<u32>,
    /// The local key that the message revoked.
    pub invalidated: Option<RKey>,
    /// The queue pair that it was posted to.
    pub qp: Qp,
    /// Its number.
    pub qpn: Qpn,
    /// The sender's queue pair.
    pub src_qpn: Qpn,
    /// The hardware address that a datagram came from; `None` for all else, and over a socket.
    pub source_mac: Option<MacAddr>,
    /// The VLAN in the tag that a datagram came with. `None` for all else, and where the tag was taken off on the way:
    /// by a card, which does not tell it, or by the interface of a packet driver.
    pub vlan: Option<NonZeroU16>,
}

impl WorkCompletion {
    /// A placeholder, to fill the array that [`Context::poll_cq_into`](crate::Context::poll_cq_into) writes to.
    pub const EMPTY: WorkCompletion = WorkCompletion {
        wr_id: 0,
        status: WcStatus::GeneralErr,
        opcode: WcOpcode::Send,
        byte_len: 0,
        grh: false,
        immediate: None,
        invalidated: None,
        qp: Qp::NONE,
        qpn: Qpn::new(0),
        src_qpn: Qpn::new(0),
        source_mac: None,
        vlan: None,
    };
}

/// Which completions raise an [`Event::Completion`](crate::Event::Completion).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notify {
    /// The next one.
    Next,
    /// The next one of a message that was sent as solicited, or in error.
    Solicited,
}
