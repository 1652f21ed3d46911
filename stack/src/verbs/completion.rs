use std::fmt;
use std::num::NonZeroU16;

use ferroce_wire::{MacAddr, Qpn, RKey};

use crate::verbs::{Error, Qp};

/// The status of a completed work request; numbers and names as in verbs (IBA 11.6.2, docs/protocol.md §6).
///
/// [`Display`](fmt::Display) prints the name. [`meaning`](WcStatus::meaning) describes the cause in a sentence, and
/// [`manual::errors`](crate::manual::errors) has the remedies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum WcStatus {
    /// It was executed.
    Success = 0,
    /// Of a receive: the message is longer than the buffers. Of a READ or atomic: the response has another length than the
    /// request.
    LocLenErr = 1,
    /// The response does not fit the request; of a datagram: its address handle was destroyed before it was sent.
    LocQpOpErr = 2,
    /// The local memory of the work request is not registered, not in the queue pair's protection domain, too short, or
    /// lacks [`LOCAL_WRITE`](crate::Access::LOCAL_WRITE).
    LocProtErr = 4,
    /// The queue pair is in the error state, and this work request was not executed, or its result is unknown. The first
    /// completion that is not flushed has the cause.
    WrFlushErr = 5,
    /// The bind of a memory window is invalid ([`SendOp::BindMw`](crate::SendOp::BindMw)).
    MwBindErr = 6,
    /// The response is malformed. RNICs only.
    BadRespErr = 7,
    /// The local memory of an incoming request is not accessible. RNICs only.
    LocAccessErr = 8,
    /// The request is invalid or not supported at the peer; of a receive: the peer's request was invalid here.
    RemInvReqErr = 9,
    /// The remote key, the range or the rights are wrong; of a receive: those of the peer's request were.
    RemAccessErr = 10,
    /// The peer could not execute the request: the SGEs of its receive are invalid, or a copy of its GPU failed.
    RemOpErr = 11,
    /// The peer does not answer, and the retries are used up.
    RetryExcErr = 12,
    /// The peer has no receive posted, and the retries for that are used up.
    RnrRetryExcErr = 13,
    /// The peer ended the request. RNICs only.
    RemAbortErr = 16,
    /// A device has failed: the RNIC, or a GPU whose memory the work request names.
    FatalErr = 19,
    /// Timeout of the response. RNICs only.
    RespTimeoutErr = 20,
    /// Any other error, and any status of a card that is not in this list.
    GeneralErr = 21,
}

impl WcStatus {
    /// The meaning of the status for a work request of this kind, and which end refused it.
    pub fn meaning(self, opcode: WcOpcode) -> &'static str {
        let is_receive = matches!(opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        match (self, is_receive) {
            (WcStatus::Success, _) => "carried out",
            (WcStatus::RetryExcErr, _) => {
                "the peer does not answer, and the retries are used up: it has ended, does not poll its context, or \
                 packets are lost; if it uses a GPU's memory, a copy may take longer than the retries"
            }
            (WcStatus::RnrRetryExcErr, _) => "the peer has no receive WR posted, and the retries are used up",
            (WcStatus::WrFlushErr, _) => "flushed, because the queue pair is in the error state",
            (WcStatus::RemAccessErr, false) => {
                "refused by the peer: it does not allow this access to its memory"
            }
            (WcStatus::RemInvReqErr, false) => "refused by the peer as invalid",
            (WcStatus::RemOpErr, false) => "refused by the peer: it could not carry out the request",
            (WcStatus::RemAccessErr, true) => {
                "refused here: the peer has no access to the memory that it named"
            }
            (WcStatus::RemInvReqErr, true) => "refused here: the peer's request is invalid",
            (WcStatus::LocLenErr, true) => "refused here: the message is longer than the receive",
            (WcStatus::LocLenErr, false) => "refused here: the response does not have the requested length",
            (WcStatus::LocProtErr, _) => {
                "refused here: the memory of the work request does not exist, or does not \
                allow this access"
            }
            (WcStatus::LocQpOpErr, false) => "refused here: the response does not belong to this request",
            (WcStatus::FatalErr, _) => {
                "failed here: a device, such as the GPU whose memory it names, has failed"
            }
            (WcStatus::MwBindErr, _) => "refused here: the memory window can't be bound so",
            _ => "see the verbs' ibv_poll_cq for this status",
        }
    }
}

/// The name, as in verbs.
impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The kind of a completed work request.
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

/// The completion of a work request. After an error only `wr_id`, `status`, `opcode`, `qp` and `qpn` are valid; the `opcode` of a
/// receive is then [`Recv`](WcOpcode::Recv).
///
/// ```
/// # use ferroce::*;
/// # fn run(context: &mut Context, cq: Cq) -> Result<(), Error> {
/// while let Some(completion) = context.poll_cq(cq)? {
///     let completion = completion.ok()?; // `QP 0x000011: RdmaWrite 7 completed with RetryExcErr: ...`
///     println!("{} is done: {} bytes", completion.wr_id, completion.byte_len);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkCompletion {
    /// The `wr_id` of the work request.
    pub wr_id: u64,
    /// Its status.
    pub status: WcStatus,
    /// Its kind.
    pub opcode: WcOpcode,
    /// Bytes received, written or read.
    pub byte_len: u32,
    /// The receive starts with 40 bytes of network header, which `byte_len` counts (UD).
    pub grh: bool,
    /// The immediate data of the message.
    pub immediate: Option<u32>,
    /// The local key that the message invalidated.
    pub invalidated: Option<RKey>,
    /// The queue pair that it was posted to.
    pub qp: Qp,
    /// Its number.
    pub qpn: Qpn,
    /// The sender's queue pair.
    pub src_qpn: Qpn,
    /// The source hardware address of a datagram; `None` for everything else, and with a socket.
    pub source_mac: Option<MacAddr>,
    /// The VLAN of a datagram's tag. `None` for everything else, and if the tag was removed before: by a card that does not
    /// report it, or by the interface of a packet driver.
    pub vlan: Option<NonZeroU16>,
}

impl WorkCompletion {
    /// The completion itself if the work request succeeded.
    ///
    /// # Errors
    /// [`Error::Completion`], which names the work request, its status and the meaning of the status.
    /// [`manual::errors`](crate::manual::errors) has the remedies.
    pub fn ok(self) -> Result<WorkCompletion, Error> {
        match self {
            WorkCompletion { status: WcStatus::Success, .. } => Ok(self),
            WorkCompletion { qpn, wr_id, opcode, status, .. } => {
                Err(Error::Completion { qpn, wr_id, opcode, status })
            }
        }
    }

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
    /// The next one of a message sent as solicited, or with an error.
    Solicited,
}
