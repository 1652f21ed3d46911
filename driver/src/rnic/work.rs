//! Work requests for queue pairs and shared receive queues.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{dangling, null, null_mut};
use std::sync::atomic::AtomicU64;
use std::{fmt, io};

use super::abi::{Atomic, BindMw, Context, Rdma, RecvWr, SendTarget, SendWr, Ud};
use super::device::Device;
use super::memory::{AddressHandle, Region, Window};
use crate::Error;

/// A range of registered memory, from [`Region::piece`]: `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// The address of a range outside its region. A provider that copies before it checks the key would write received data
/// here, at most as much as a completion contains.
static NOWHERE: [AtomicU64; 32] = [const { AtomicU64::new(0) }; 32];

impl Piece {
    /// With any address and key.
    ///
    /// # Safety
    /// A provider must be allowed to write the bytes: some copy data from a completion there.
    pub const unsafe fn new(addr: u64, length: u32, lkey: u32) -> Piece {
        Piece { addr, length, lkey }
    }

    /// The address of a range outside its region.
    #[cold]
    #[inline(never)]
    pub(super) fn nowhere() -> u64 {
        NOWHERE.as_ptr().expose_provenance() as u64
    }
}

/// An address in a peer's memory, with its key.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    /// The address.
    pub addr: u64,
    /// The key.
    pub rkey: u32,
}

/// A datagram's destination.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// The path to it.
    pub ah: &'a AddressHandle,
    /// The queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

/// Parameters of a bind.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The window.
    pub window: &'a Window,
    /// Its new key: only the low eight bits may differ from the window's key.
    pub rkey: u32,
    /// The region.
    pub region: &'a Region,
    /// The first byte.
    pub addr: u64,
    /// The number of bytes.
    pub length: u64,
    /// Bits of [`access`](super::access).
    pub access: u32,
}

/// The operation of a send work request.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the verbs' names")]
pub enum SendOperation<'a> {
    Send,
    SendWithImm(u32),
    SendWithInvalidate(u32),
    SendTo(Target<'a>),
    SendToWithImm(Target<'a>, u32),
    Write(Remote),
    WriteWithImm(Remote, u32),
    Read(Remote),
    CompareSwap { remote: Remote, compare: u64, swap: u64 },
    FetchAdd { remote: Remote, add: u64 },
    LocalInvalidate(u32),
    Bind(Bind<'a>),
}

/// The local side of a send work request.
#[derive(Clone, Copy, Debug)]
pub enum SendData<'a> {
    /// Registered memory.
    Pieces(&'a [Piece]),
    /// Copied when posted.
    Inline(&'a [u8]),
}

/// A work request for a send queue, in the provider's format: `struct ibv_send_wr`.
#[repr(C)]
pub struct SendRequest<'a> {
    raw: SendWr,
    /// The SGE of inline data.
    inline: MaybeUninit<Piece>,
    /// The device of the address handle, or of the window and the region, in the request; null without these.
    pub(super) named_of: *const Context,
    named: PhantomData<&'a ()>,
}

/// `IBV_SEND_INLINE`
const INLINE: u32 = 8;

impl<'a> SendRequest<'a> {
    /// `IBV_SEND_FENCE`
    pub const FENCE: u32 = 1;
    /// `IBV_SEND_SIGNALED`
    pub const SIGNALED: u32 = 2;
    /// `IBV_SEND_SOLICITED`
    pub const SOLICITED: u32 = 4;

    /// A SEND without data, to be modified. The fields of other operations are uninitialised: they are written with the
    /// operation, and the link when the request is posted.
    #[inline(always)]
    pub fn empty() -> SendRequest<'a> {
        SendRequest {
            raw: SendWr {
                wr_id: 0,
                next: MaybeUninit::uninit(),
                sg_list: null_mut(),
                num_sge: 0,
                opcode: SEND,
                send_flags: 0,
                imm_or_key: 0,
                wr: SendTarget { rdma: Rdma { remote_addr: 0, rkey: 0 } },
                qp_type: MaybeUninit::uninit(),
                bind_mw: MaybeUninit::uninit(),
            },
            inline: MaybeUninit::uninit(),
            named_of: null(),
            named: PhantomData,
        }
    }

    /// Whether it is a send with a destination.
    pub(super) fn has_target(&self) -> bool {
        !self.named_of.is_null() && matches!(self.raw.opcode, SEND | SEND_WITH_IMM)
    }

    /// `wr_id` is returned in the completion; `flags` are [`FENCE`](SendRequest::FENCE),
    /// [`SIGNALED`](SendRequest::SIGNALED), [`SOLICITED`](SendRequest::SOLICITED).
    #[inline(always)]
    pub fn new(wr_id: u64, operation: SendOperation<'a>, data: SendData<'a>, flags: u32) -> SendRequest<'a> {
        let mut request = SendRequest::empty();
        request.set_operation(operation);
        request.set_data(wr_id, data, flags);
        request
    }

    /// Sets the local memory, the identifier returned in the completion, and the flags except that of inline data.
    #[inline(always)]
    pub fn set_data(&mut self, wr_id: u64, data: SendData<'a>, flags: u32) {
        self.raw.wr_id = wr_id;
        match data {
            SendData::Pieces(pieces) => {
                self.raw.send_flags = flags & !INLINE;
                self.raw.sg_list = pieces.as_ptr().cast_mut();
                self.raw.num_sge = pieces.len() as c_int;
            }
            SendData::Inline(bytes) => {
                self.raw.send_flags = flags | INLINE;
                self.raw.num_sge = 1;
                let (addr, length) = (bytes.as_ptr().expose_provenance() as u64, bytes.len() as u32);
                self.inline.write(Piece { addr, length, lkey: 0 });
            }
        }
    }

    /// Sets the operation. In a caller that knows the operation this is a few stores.
    #[inline(always)]
    pub fn set_operation(&mut self, operation: SendOperation<'a>) {
        self.named_of = match operation {
            SendOperation::SendTo(to) | SendOperation::SendToWithImm(to, _) => to.ah.device().context(),
            SendOperation::Bind(Bind { window, region, .. }) => {
                let devices = [window.device().context(), region.device().context()];
                if devices[0] == devices[1] { devices[0] } else { dangling() }
            }
            _ => null(),
        };
        let raw = &mut self.raw;
        let rdma = |remote: Remote| SendTarget { rdma: Rdma { remote_addr: remote.addr, rkey: remote.rkey } };
        let ud = |to: Target<'_>| SendTarget {
            ud: Ud { ah: to.ah.as_ptr(), remote_qpn: to.qpn, remote_qkey: to.qkey },
        };
        raw.opcode = match operation {
            SendOperation::Write(remote) => {
                raw.wr = rdma(remote);
                0
            }
            SendOperation::WriteWithImm(remote, immediate) => {
                raw.wr = rdma(remote);
                raw.imm_or_key = immediate.to_be();
                1
            }
            SendOperation::Send => SEND,
            SendOperation::SendWithImm(immediate) => {
                raw.imm_or_key = immediate.to_be();
                SEND_WITH_IMM
            }
            SendOperation::Read(remote) => {
                raw.wr = rdma(remote);
                4
            }
            SendOperation::CompareSwap { remote: Remote { addr, rkey }, compare, swap } => {
                let compare_add = compare;
                raw.wr = SendTarget { atomic: Atomic { remote_addr: addr, compare_add, swap, rkey } };
                5
            }
            SendOperation::FetchAdd { remote: Remote { addr, rkey }, add } => {
                raw.wr = SendTarget { atomic: Atomic { remote_addr: addr, compare_add: add, swap: 0, rkey } };
                6
            }
            SendOperation::LocalInvalidate(key) => {
                raw.imm_or_key = key;
                7
            }
            SendOperation::Bind(bind) => {
                raw.bind_mw.write(BindMw {
                    mw: bind.window.as_ptr(),
                    rkey: bind.rkey,
                    mr: bind.region.as_ptr(),
                    addr: bind.addr,
                    length: bind.length,
                    mw_access_flags: bind.access,
                });
                8
            }
            SendOperation::SendWithInvalidate(key) => {
                raw.imm_or_key = key;
                9
            }
            SendOperation::SendTo(target) => {
                raw.wr = ud(target);
                SEND
            }
            SendOperation::SendToWithImm(target, immediate) => {
                raw.wr = ud(target);
                raw.imm_or_key = immediate.to_be();
                SEND_WITH_IMM
            }
        };
    }
}

/// `IBV_WR_SEND`, `IBV_WR_SEND_WITH_IMM`; the others are written where they are used.
const SEND: u32 = 2;
const SEND_WITH_IMM: u32 = 3;

impl fmt::Debug for SendRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SendWr { wr_id, opcode, send_flags, num_sge, .. } = self.raw;
        f.debug_struct("SendRequest")
            .field("wr_id", &wr_id)
            .field("opcode", &opcode)
            .field("flags", &send_flags)
            .field("pieces", &num_sge)
            .finish_non_exhaustive()
    }
}

/// A receive WR, in the provider's format: `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Debug)]
pub struct ReceiveRequest<'a> {
    raw: RecvWr,
    named: PhantomData<&'a [Piece]>,
}

impl<'a> ReceiveRequest<'a> {
    /// `wr_id` is returned in the completion. The SGEs are filled in order.
    #[inline]
    pub const fn new(wr_id: u64, pieces: &'a [Piece]) -> ReceiveRequest<'a> {
        let (sg_list, num_sge) = (pieces.as_ptr().cast_mut(), pieces.len() as c_int);
        let next = MaybeUninit::uninit();
        ReceiveRequest { raw: RecvWr { wr_id, next, sg_list, num_sge }, named: PhantomData }
    }

    /// The identifier returned in the completion.
    pub fn wr_id(&self) -> u64 {
        self.raw.wr_id
    }
}

/// A list of work requests of which one was refused.
#[derive(Debug)]
pub struct PostRefused {
    /// The number of posted requests.
    pub posted: usize,
    /// The reason for refusing the next one.
    pub error: Error,
}

/// A request in a provider's list.
pub(super) trait Linked {
    type Raw;

    /// Appends `next` to it and returns a pointer to it.
    fn link(&mut self, next: *mut Self::Raw) -> *mut Self::Raw;
}

impl Linked for SendRequest<'_> {
    type Raw = SendWr;

    #[inline(always)]
    fn link(&mut self, next: *mut SendWr) -> *mut SendWr {
        if self.raw.send_flags & INLINE != 0 {
            self.raw.sg_list = self.inline.as_mut_ptr();
        }
        self.raw.next.write(next);
        &mut self.raw
    }
}

impl Linked for ReceiveRequest<'_> {
    type Raw = RecvWr;

    #[inline(always)]
    fn link(&mut self, next: *mut RecvWr) -> *mut RecvWr {
        self.raw.next.write(next);
        &mut self.raw
    }
}

/// Links work requests to a list. Returns the first one.
#[inline(always)]
pub(super) fn link<Request: Linked>(requests: &mut [Request]) -> *mut Request::Raw {
    requests.iter_mut().rev().fold(null_mut(), |next, request| request.link(next))
}

/// Posts a list of `count` work requests, which begins with `first`, by a function of the provider.
#[inline(always)]
pub(super) fn post<Request: Linked>(
    device: &Device,
    call: &'static str,
    first: *mut Request::Raw,
    count: usize,
    post: impl FnOnce(*mut *mut Request::Raw) -> c_int,
) -> Result<(), PostRefused> {
    if first.is_null() {
        return Ok(());
    }
    let mut bad = null_mut();
    match post(&mut bad) {
        0 => Ok(()),
        returned => {
            let place = bad.addr().wrapping_sub(first.addr()) / size_of::<Request>();
            // If the provider names none of them, none is assumed to be posted.
            let posted = if place < count { place } else { 0 };
            Err(refused(device, call, posted, returned))
        }
    }
}

#[cold]
fn refused(device: &Device, call: &'static str, posted: usize, returned: c_int) -> PostRefused {
    let source = io::Error::from_raw_os_error(returned.saturating_abs());
    PostRefused { posted, error: device.error(call, source) }
}
