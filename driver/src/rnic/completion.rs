//! Completion queues and their channel.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use super::abi::{CompChannel, Cq};
use super::device::{Device, nothing_yet, set_nonblocking};
use crate::Error;

/// `struct ibv_wc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The identifier of the work request.
    pub wr_id: u64,
    /// `enum ibv_wc_status`; 0 is success. On an error only `wr_id`, `vendor_err` and `qp_num` are also valid.
    pub status: u32,
    /// `enum ibv_wc_opcode`
    pub opcode: u32,
    /// The provider's error code.
    pub vendor_err: u32,
    /// Bytes received, written or read.
    pub byte_len: u32,
    /// An immediate in network byte order, or the invalidated key: see `wc_flags`.
    pub imm_or_key: u32,
    /// The local queue pair.
    pub qp_num: u32,
    /// The sender's queue pair.
    pub src_qp: u32,
    /// `enum ibv_wc_flags`
    pub wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

const _: () = {
    assert!(size_of::<Completion>() == 48);
    assert!(std::mem::offset_of!(Completion, imm_or_key) == 24);
    assert!(std::mem::offset_of!(Completion, wc_flags) == 36);
};

impl Completion {
    /// `IBV_WC_GRH`: the received message begins with 40 bytes of network header.
    pub const GRH: u32 = 1;
    /// `IBV_WC_WITH_IMM`
    pub const WITH_IMM: u32 = 2;
    /// `IBV_WC_WITH_INV`
    pub const WITH_INV: u32 = 8;

    /// A placeholder.
    pub const EMPTY: Completion = Completion {
        wr_id: 0,
        status: 0,
        opcode: 0,
        vendor_err: 0,
        byte_len: 0,
        imm_or_key: 0,
        qp_num: 0,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    };
}

/// A completion channel. Clones share it.
#[derive(Clone, Debug)]
pub struct CompletionChannel(Arc<Channel>);

#[derive(Debug)]
struct Channel {
    device: Device,
    channel: NonNull<CompChannel>,
}

// SAFETY: libibverbs and its providers may be called by any thread, for any object. The pointer is only passed to them.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl CompletionChannel {
    /// Creates a channel on a device. [`event`](CompletionChannel::event) does not wait.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(device: &Device) -> Result<CompletionChannel, Error> {
        // SAFETY: the context is open.
        let channel = unsafe { (device.functions().create_comp_channel)(device.context()) };
        let channel = device.object("ibv_create_comp_channel", channel)?;
        let this = CompletionChannel(Arc::new(Channel { device: device.clone(), channel }));
        set_nonblocking(this.fd()?)
            .map_err(|source| device.error("fcntl of a completion channel", source))?;
        Ok(this)
    }

    /// Readable when there are events.
    ///
    /// # Errors
    /// [`Error::Verbs`] if it has no descriptor.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Error> {
        // SAFETY: the channel exists.
        let fd = unsafe { (*self.0.channel.as_ptr()).fd };
        if fd < 0 {
            let source = io::Error::other(format!("fd = {fd}"));
            return Err(self.0.device.error("ibv_create_comp_channel", source));
        }
        // SAFETY: the descriptor is the channel's until it is destroyed, which `self` outlives.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Takes an event, if there is one. Returns the tag of its queue.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn event(&self) -> Result<Option<usize>, Error> {
        let Channel { device, channel } = &*self.0;
        let (mut cq, mut tag) = (null_mut(), null_mut());
        // SAFETY: the channel exists. The returned queue exists, because its event is not acknowledged.
        let returned = unsafe { (device.functions().get_cq_event)(channel.as_ptr(), &mut cq, &mut tag) };
        if returned != 0 {
            return nothing_yet(io::Error::last_os_error())
                .map_err(|source| device.error("ibv_get_cq_event", source));
        }
        // SAFETY: as above; each event is acknowledged once.
        unsafe { (device.functions().ack_cq_events)(cq, 1) };
        Ok(Some(tag.addr()))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: it was created by `ibv_create_comp_channel`, its queues were destroyed, and it is destroyed once.
        let returned = unsafe { (self.device.functions().destroy_comp_channel)(self.channel.as_ptr()) };
        self.device.warn("ibv_destroy_comp_channel", returned);
    }
}

/// A completion queue. Clones share it. It is destroyed with the last clone and the last queue pair that uses it.
#[derive(Clone, Debug)]
pub struct CompletionQueue(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    device: Device,
    cq: NonNull<Cq>,
    _channel: CompletionChannel,
}

// SAFETY: as `Channel`.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl CompletionQueue {
    /// Creates a queue for at least `capacity` completions. `tag` identifies it in the events of the channel.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(capacity: u32, channel: &CompletionChannel, tag: usize) -> Result<CompletionQueue, Error> {
        let Channel { device, channel: raw } = &*channel.0;
        let capacity = c_int::try_from(capacity).unwrap_or(c_int::MAX);
        // Queues are distributed over the interrupts of the card.
        // SAFETY: the context is open.
        let vectors = unsafe { (*device.context()).num_comp_vectors }.max(1);
        let vector = c_int::try_from(tag % vectors as usize).unwrap_or(0);
        let tag = std::ptr::without_provenance_mut::<c_void>(tag);
        // SAFETY: the context is open and the channel exists. The tag is never dereferenced.
        let cq =
            unsafe { (device.functions().create_cq)(device.context(), capacity, tag, raw.as_ptr(), vector) };
        let cq = device.object("ibv_create_cq", cq)?;
        Ok(CompletionQueue(Arc::new(Queue { device: device.clone(), cq, _channel: channel.clone() })))
    }

    /// Its identifier in asynchronous events.
    pub fn id(&self) -> u64 {
        self.0.cq.as_ptr().addr() as u64
    }

    pub(super) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn as_ptr(&self) -> *mut Cq {
        self.0.cq.as_ptr()
    }

    /// Takes as many completions as there are, at most the length of `room`. Returns their number.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    #[inline]
    pub fn poll(&self, room: &mut [Completion]) -> Result<usize, Error> {
        let Queue { device, cq, .. } = &*self.0;
        let Some(poll_cq) = device.ops().poll_cq else { return Err(device.lacks("ibv_poll_cq")) };
        let most = c_int::try_from(room.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue exists, and `most` is at most the length of `room`.
        let count = unsafe { poll_cq(cq.as_ptr(), most, room.as_mut_ptr()) };
        if (0..=most).contains(&count) { Ok(count as usize) } else { Err(garbage(device, count, most)) }
    }

    /// Requests an event of the channel for the next completion, or for the next solicited one if `solicited_only`.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn request_event(&self, solicited_only: bool) -> Result<(), Error> {
        let Queue { device, cq, .. } = &*self.0;
        let request = device.ops().req_notify_cq.ok_or_else(|| device.lacks("ibv_req_notify_cq"))?;
        // SAFETY: the queue exists.
        let returned = unsafe { request(cq.as_ptr(), solicited_only.into()) };
        device.check("ibv_req_notify_cq", returned)
    }
}

#[cold]
fn garbage(device: &Device, count: c_int, most: c_int) -> Error {
    let source = if count < 0 {
        io::Error::from_raw_os_error(count.saturating_neg())
    } else {
        io::Error::other(format!("it reports {count} completions: must be at most {most}"))
    };
    device.error("ibv_poll_cq", source)
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: it was created by `ibv_create_cq`, its queue pairs were destroyed, its events are acknowledged, and
        // it is destroyed once.
        let returned = unsafe { (self.device.functions().destroy_cq)(self.cq.as_ptr()) };
        self.device.warn("ibv_destroy_cq", returned);
    }
}
