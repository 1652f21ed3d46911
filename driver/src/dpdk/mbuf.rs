//! Packet buffers: their pools, and the buffers that the driver has.
//!
//! A payload that is sent from registered memory is kept by a `Pinned` in the private data of its buffer, which is
//! dropped when DPDK frees the buffer.

use std::ffi::{CString, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce_dpdk_sys as sys;
use tracing::warn;

use super::eal;
use crate::memory::Pinned;
use crate::{Error, TAIL_MAX};

/// The most frames in one call of the port, in each direction.
pub(super) const BURST: usize = 32;
/// Buffers in a thread's cache.
const CACHE: u32 = 256;

/// A pool of buffers, each with `room` bytes for a frame.
#[derive(Debug)]
pub(super) struct Pool {
    shim: &'static sys::Functions,
    pool: NonNull<sys::Mempool>,
    count: u32,
}

// SAFETY: DPDK's pools may be used by several threads at once.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Creates a pool for `frames` buffers in use at once, and those in the threads' caches.
    pub(super) fn new(
        shim: &'static sys::Functions,
        port: &str,
        frames: u32,
        room: u16,
        private: u16,
        node: i32,
    ) -> Result<Pool, Error> {
        static NAMES: AtomicU32 = AtomicU32::new(0);
        let name = format!("ferroce{}", NAMES.fetch_add(1, Ordering::Relaxed));
        let name = CString::new(name).unwrap_or_default();
        // The cache of a thread that frees the buffers of another thread may hold half as many again.
        let count = frames + 3 * CACHE + 4 * BURST as u32;
        let mut error = 0;
        // SAFETY: the name is a string, which is copied. EAL runs, and `error` outlives the call.
        let pool =
            unsafe { (shim.pool_create)(name.as_ptr(), count, CACHE, private, room, node, &raw mut error) };
        match NonNull::new(pool) {
            Some(pool) => Ok(Pool { shim, pool, count }),
            None => {
                let what = "making a pool of packet buffers (is there memory? EAL's -m)";
                Err(eal::os_error(what, port, error))
            }
        }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::Mempool {
        self.pool.as_ptr()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the pool exists.
        let free = unsafe { (self.shim.pool_available)(self.as_ptr()) };
        if free == self.count {
            // SAFETY: every buffer was returned, so none is in use.
            unsafe { (self.shim.pool_free)(self.as_ptr()) };
        } else {
            // For example, the other end of a net_ring has sent frames.
            warn!("{} packet buffers are still in use, so their pool stays", self.count - free);
        }
    }
}

/// Buffers taken from a pool and not yet used. Taking one is expensive, and taking 32 costs little more.
#[derive(Debug)]
pub(super) struct Spare {
    shim: &'static sys::Functions,
    mbufs: [*mut sys::Mbuf; BURST],
    rooms: [*mut u8; BURST],
    left: usize,
}

/// A taken buffer, and the place of its data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub(super) mbuf: *mut sys::Mbuf,
    pub(super) room: *mut u8,
}

impl Spare {
    pub(super) fn new(shim: &'static sys::Functions) -> Spare {
        Spare { shim, mbufs: [ptr::null_mut(); BURST], rooms: [ptr::null_mut(); BURST], left: 0 }
    }

    /// The next buffer, which stays here until [`used`](Spare::used); `None` if the pool is empty.
    #[inline]
    pub(super) fn peek(&mut self, pool: &Pool) -> Option<Buffer> {
        if self.left == 0 {
            // SAFETY: there is room for the requested number of pointers of either kind.
            let result = unsafe {
                (self.shim.take)(
                    pool.as_ptr(),
                    self.mbufs.as_mut_ptr(),
                    self.rooms.as_mut_ptr(),
                    BURST as u16,
                )
            };
            if result != 0 {
                return None;
            }
            self.left = BURST;
        }
        Some(Buffer { mbuf: self.mbufs[self.left - 1], room: self.rooms[self.left - 1] })
    }

    /// The next two buffers. A stock that is used in pairs always has both.
    #[inline]
    pub(super) fn peek_two(&mut self, pool: &Pool) -> Option<[Buffer; 2]> {
        let last = self.peek(pool)?;
        let at = self.left.checked_sub(2)?;
        Some([last, Buffer { mbuf: self.mbufs[at], room: self.rooms[at] }])
    }

    /// Removes the buffer that [`peek`](Spare::peek) returned, because it has been handed over.
    #[inline]
    pub(super) fn used(&mut self) {
        self.left -= 1;
    }

    /// Returns all buffers to their pool.
    pub(super) fn release(&mut self) {
        // SAFETY: these `left` buffers belong to the driver.
        unsafe { (self.shim.give)(self.mbufs.as_mut_ptr(), self.left as u32) };
        self.left = 0;
    }
}

/// Frames that the port has not taken yet.
#[derive(Debug)]
pub(super) struct Outbox {
    shim: &'static sys::Functions,
    mbufs: [*mut sys::Mbuf; BURST],
    len: usize,
}

impl Outbox {
    pub(super) fn new(shim: &'static sys::Functions) -> Outbox {
        Outbox { shim, mbufs: [ptr::null_mut(); BURST], len: 0 }
    }

    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.len < BURST
    }

    /// Appends a frame. There is [room](Outbox::has_room).
    #[inline]
    pub(super) fn push(&mut self, mbuf: *mut sys::Mbuf) {
        self.mbufs[self.len] = mbuf;
        self.len += 1;
    }

    /// Offers all frames to the port. Returns whether it took them.
    #[inline]
    pub(super) fn flush(&mut self, port: u16, queue: u16) -> bool {
        if self.len > 0 {
            // SAFETY: the frames are complete and belong to the driver; those that are sent then belong to the port.
            let sent = unsafe { (self.shim.tx_burst)(port, queue, self.mbufs.as_mut_ptr(), self.len as u16) };
            let sent = usize::from(sent).min(self.len);
            self.mbufs.copy_within(sent..self.len, 0);
            self.len -= sent;
        }
        self.len == 0
    }

    /// Returns all frames to their pools.
    pub(super) fn release(&mut self) {
        // SAFETY: the frames belong to the driver.
        unsafe { (self.shim.give)(self.mbufs.as_mut_ptr(), self.len as u32) };
        self.len = 0;
    }
}

/// The private data of a payload's buffer.
#[repr(C)]
struct Private {
    shared: sys::Shared,
    pinned: MaybeUninit<Pinned>,
}

/// Bytes of private data in the buffers of payloads.
pub(super) const PRIVATE: u16 = size_of::<Private>().next_multiple_of(8) as u16;
/// The longest head before a payload that is not copied: more than all RoCE headers together.
pub(super) const HEAD_ROOM: usize = 256;
/// Room for a tail in the buffers of payloads.
pub(super) const SEGMENT_ROOM: u16 = TAIL_MAX as u16;

/// Makes one frame of `head`, `pinned` and `tail`, which `head` then owns. `payload` and `tail` must be from a pool
/// with [`PRIVATE`] bytes.
///
/// # Safety
/// The three buffers must belong to the caller, with `head_len` and `tail_len` bytes written, and the port that sends
/// the frame must read it with the CPU: the payload has no address for a device.
#[inline]
pub(super) unsafe fn chain(
    shim: &sys::Functions,
    head: *mut sys::Mbuf,
    head_len: usize,
    payload: *mut sys::Mbuf,
    pinned: Pinned,
    tail: *mut sys::Mbuf,
    tail_len: usize,
) {
    let (address, len) = (pinned.address().as_ptr(), pinned.len());
    // SAFETY: the buffer belongs to the caller and has `PRIVATE` bytes of private data, aligned to 8. The pin is kept
    // there until `released`, which DPDK calls once, when the payload is no longer needed.
    unsafe {
        let private = (shim.private_data)(payload).cast::<Private>();
        let place = (&raw mut (*private).pinned).cast::<Pinned>();
        place.write(pinned);
        (shim.chain)(
            head,
            head_len as u16,
            payload,
            address.cast(),
            len as u16,
            &raw mut (*private).shared,
            released,
            place.cast(),
            tail,
            tail_len as u16,
        );
    }
}

unsafe extern "C" fn released(_: *mut c_void, pinned: *mut c_void) {
    // SAFETY: `chain` stored a pin there, and this is the only call for it.
    unsafe { pinned.cast::<Pinned>().drop_in_place() };
}
