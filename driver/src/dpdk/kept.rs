//! Packet buffers that contain kept frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferroce_dpdk_sys as sys;

use super::port::EthDevice;
use crate::kept::{Home, Keeper, KeptFrame};

/// The most kept frames of a queue. Its pool has this many additional buffers.
pub(super) const KEPT_MAX: u32 = 256;

/// The kept frames of a queue.
#[derive(Debug)]
pub(super) struct Kept(Arc<Mbufs>);

#[derive(Debug)]
struct Mbufs {
    kept: AtomicUsize,
    /// Owns the pool of the buffers.
    port: Arc<EthDevice>,
}

impl Kept {
    pub(super) fn new(port: Arc<EthDevice>) -> Kept {
        Kept(Arc::new(Mbufs { kept: AtomicUsize::new(0), port }))
    }

    /// A keeper for the frame in `mbuf`, or for a frame in several buffers.
    #[inline]
    pub(super) fn keeper(&mut self, mbuf: Option<*mut sys::Mbuf>) -> MbufKeeper<'_> {
        MbufKeeper { kept: self, mbuf, lent: false }
    }
}

/// Keeps one frame.
pub(super) struct MbufKeeper<'a> {
    kept: &'a mut Kept,
    mbuf: Option<*mut sys::Mbuf>,
    /// Whether the holder has the buffer now.
    pub(super) lent: bool,
}

impl Keeper for MbufKeeper<'_> {
    fn keep(&mut self, bytes: &[u8]) -> Option<KeptFrame> {
        let Kept(home) = &*self.kept;
        // Only this function increments it.
        if home.kept.load(Ordering::Relaxed) >= KEPT_MAX as usize {
            return None;
        }
        home.kept.fetch_add(1, Ordering::Relaxed);
        let Some(mbuf) = self.mbuf else { return Some(KeptFrame::copied(bytes, COPY, home.clone())) };
        self.lent = true;
        // SAFETY: the frame is in this buffer, which the driver does not free because of `lent`. Its pool exists as
        // long as the port, which `home` holds.
        Some(unsafe { KeptFrame::lent(bytes, mbuf.expose_provenance(), home.clone()) })
    }
}

/// The token of a copy. No buffer has this address.
const COPY: usize = 0;

impl Home for Mbufs {
    fn give_back(&self, mbuf: usize) {
        if mbuf != COPY {
            let mut mbuf = std::ptr::with_exposed_provenance_mut::<sys::Mbuf>(mbuf);
            // SAFETY: the buffer was lent and is returned once. Its pool accepts it from any thread.
            unsafe { (self.port.shim.give)(&raw mut mbuf, 1) };
        }
        self.kept.fetch_sub(1, Ordering::Release);
    }
}
