//! Work requests: what is posted to queue pairs and shared receive queues.

use std::ffi::c_int;
use std::io;
use std::mem::zeroed;
use std::ptr::null_mut;

use super::abi::{Atomic, BindMw, Rdma, RecvWr, SendTarget, SendWr, Ud};
use super::device::Device;
use super::memory::{AddressHandle, Region, Window};
use crate::Error;

/// A piece of registered memory: `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// The first byte, counted as the region's `iova` has it.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The region's [`lkey`](Region::lkey).
    pub lkey: u32,
}

/// An address in a peer's memory, and its key.
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
    /// The way there.
    pub ah: &'a AddressHandle,
    /// The queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
}

/// A bind of a window.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The window.
    pub window: &'a Window,
    /// Its key from then on: that of the window but for the low eight bits.
    pub rkey: u32,
    /// The region.
    pub region: &'a Region,
    /// The first byte.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// Of [`access`](super::access).
    pub access: u32,
}

/// What a send work request does.
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

/// Work for a send queue.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: SendOperation<'a>,
    /// The local memory.
    pub data: SendData<'a>,
    /// [`FENCE`](SendRequest::FENCE), [`SIGNALED`](SendRequest::SIGNALED), [`SOLICITED`](SendRequest::SOLICITED).
    pub flags: u32,
}

/// `IBV_SEND_INLINE`
const INLINE: u32 = 8;

impl<'a> SendRequest<'a> {
    /// A placeholder.
    pub const EMPTY: SendRequest<'static> =
        SendRequest { wr_id: 0, operation: SendOperation::Send, data: SendData::Pieces(&[]), flags: 0 };
    /// `IBV_SEND_FENCE`
    pub const FENCE: u32 = 1;
    /// `IBV_SEND_SIGNALED`
    pub const SIGNALED: u32 = 2;
    /// `IBV_SEND_SOLICITED`
    pub const SOLICITED: u32 = 4;

    /// As the provider takes it; `inline` is where the piece is for data that is inline.
    #[inline]
    pub(super) fn fill(&self, raw: &mut SendWr, inline: &'a mut Piece) {
        raw.wr_id = self.wr_id;
        raw.next = null_mut();
        raw.send_flags = self.flags;
        match self.data {
            SendData::Pieces(pieces) => {
                raw.sg_list = pieces.as_ptr().cast_mut();
                raw.num_sge = pieces.len() as c_int;
            }
            SendData::Inline(bytes) => {
                raw.send_flags |= INLINE;
                *inline = Piece {
                    addr: bytes.as_ptr().expose_provenance() as u64,
                    length: bytes.len() as u32,
                    lkey: 0,
                };
                raw.sg_list = inline;
                raw.num_sge = 1;
            }
        }
        let rdma = |remote: Remote| SendTarget { rdma: Rdma { remote_addr: remote.addr, rkey: remote.rkey } };
        let ud = |to: Target<'_>| SendTarget {
            ud: Ud { ah: to.ah.as_ptr(), remote_qpn: to.qpn, remote_qkey: to.qkey },
        };
        // Numbers of `enum ibv_wr_opcode`.
        let opcode = match self.operation {
            SendOperation::Write(remote) => {
                raw.wr = rdma(remote);
                0
            }
            SendOperation::WriteWithImm(remote, immediate) => {
                raw.wr = rdma(remote);
                raw.imm_or_key = immediate.to_be();
                1
            }
            SendOperation::Send => 2,
            SendOperation::SendWithImm(immediate) => {
                raw.imm_or_key = immediate.to_be();
                3
            }
            SendOperation::Read(remote) => {
                raw.wr = rdma(remote);
                4
            }
            SendOperation::CompareSwap { remote, compare, swap } => {
                raw.wr = SendTarget {
                    atomic: Atomic {
                        remote_addr: remote.addr,
                        compare_add: compare,
                        swap,
                        rkey: remote.rkey,
                    },
                };
                5
            }
            SendOperation::FetchAdd { remote, add } => {
                raw.wr = SendTarget {
                    atomic: Atomic { remote_addr: remote.addr, compare_add: add, swap: 0, rkey: remote.rkey },
                };
                6
            }
            SendOperation::LocalInvalidate(key) => {
                raw.imm_or_key = key;
                7
            }
            SendOperation::Bind(bind) => {
                raw.bind_mw = BindMw {
                    mw: bind.window.as_ptr(),
                    rkey: bind.rkey,
                    mr: bind.region.as_ptr(),
                    addr: bind.addr,
                    length: bind.length,
                    mw_access_flags: bind.access,
                };
                8
            }
            SendOperation::SendWithInvalidate(key) => {
                raw.imm_or_key = key;
                9
            }
            SendOperation::SendTo(target) => {
                raw.wr = ud(target);
                2
            }
            SendOperation::SendToWithImm(target, immediate) => {
                raw.wr = ud(target);
                raw.imm_or_key = immediate.to_be();
                3
            }
        };
        raw.opcode = opcode;
    }
}

/// A buffer for an incoming message.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest<'a> {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// Filled in order.
    pub pieces: &'a [Piece],
}

/// How many work requests go to a provider at once.
const CHUNK: usize = 16;

/// A list of work requests of which one was refused.
#[derive(Debug)]
pub struct PostRefused {
    /// How many were posted.
    pub posted: usize,
    /// Why the next one was not.
    pub error: Error,
}

/// Posts one work request.
#[inline]
pub(super) fn post_send(
    device: &Device,
    request: &SendRequest<'_>,
    post: impl FnOnce(*mut SendWr, *mut *mut SendWr) -> c_int,
) -> Result<(), Error> {
    // SAFETY: all bytes zero are a value of it: numbers, and null pointers.
    let (mut raw, mut inline): (SendWr, _) = (unsafe { zeroed() }, Piece::default());
    request.fill(&mut raw, &mut inline);
    let mut bad = null_mut();
    match post(&mut raw, &mut bad) {
        0 => Ok(()),
        returned => Err(refused(device, "ibv_post_send", returned)),
    }
}

/// Posts a list, [`CHUNK`] at a time.
#[inline]
pub(super) fn post_sends(
    device: &Device,
    requests: &[SendRequest<'_>],
    mut post: impl FnMut(*mut SendWr, *mut *mut SendWr) -> c_int,
) -> Result<(), PostRefused> {
    for (number, chunk) in requests.chunks(CHUNK).enumerate() {
        // SAFETY: all bytes zero are a value of them: numbers, and null pointers.
        let mut raw: [SendWr; CHUNK] = unsafe { zeroed() };
        let mut inline = [Piece::default(); CHUNK];
        for ((raw, inline), request) in raw.iter_mut().zip(&mut inline).zip(chunk) {
            request.fill(raw, inline);
        }
        let list = raw.get_mut(..chunk.len()).unwrap_or_default();
        post_list(device, "ibv_post_send", list, number * CHUNK, &mut post)?;
    }
    Ok(())
}

/// Posts a list of receives, [`CHUNK`] at a time.
#[inline]
pub(super) fn post_receives(
    device: &Device,
    call: &'static str,
    requests: &[ReceiveRequest<'_>],
    mut post: impl FnMut(*mut RecvWr, *mut *mut RecvWr) -> c_int,
) -> Result<(), PostRefused> {
    for (number, chunk) in requests.chunks(CHUNK).enumerate() {
        let empty = RecvWr { wr_id: 0, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
        let mut raw = [empty; CHUNK];
        for (raw, ReceiveRequest { wr_id, pieces }) in raw.iter_mut().zip(chunk) {
            let (sg_list, num_sge) = (pieces.as_ptr().cast_mut(), pieces.len() as c_int);
            *raw = RecvWr { wr_id: *wr_id, next: null_mut(), sg_list, num_sge };
        }
        let list = raw.get_mut(..chunk.len()).unwrap_or_default();
        post_list(device, call, list, number * CHUNK, &mut post)?;
    }
    Ok(())
}

/// What a provider takes a list of.
trait Linked {
    fn set_next(&mut self, next: *mut Self);
}

impl Linked for SendWr {
    fn set_next(&mut self, next: *mut SendWr) {
        self.next = next;
    }
}

impl Linked for RecvWr {
    fn set_next(&mut self, next: *mut RecvWr) {
        self.next = next;
    }
}

/// Posts one list as it is, after `before` work requests of the caller's.
#[inline]
fn post_list<Raw: Linked>(
    device: &Device,
    call: &'static str,
    list: &mut [Raw],
    before: usize,
    post: &mut impl FnMut(*mut Raw, *mut *mut Raw) -> c_int,
) -> Result<(), PostRefused> {
    let mut first = null_mut();
    for raw in list.iter_mut().rev() {
        raw.set_next(first);
        first = raw;
    }
    if first.is_null() {
        return Ok(());
    }
    let mut bad = null_mut();
    match post(first, &mut bad) {
        0 => Ok(()),
        returned => {
            // A provider that names none of them has posted none, as far as can be told.
            let place = bad.addr().wrapping_sub(first.addr()) / size_of::<Raw>();
            let place = if place < list.len() { place } else { 0 };
            Err(PostRefused { posted: before + place, error: refused(device, call, returned) })
        }
    }
}

#[cold]
fn refused(device: &Device, call: &'static str, returned: c_int) -> Error {
    device.error(call, io::Error::from_raw_os_error(returned.saturating_abs()))
}
