//! Packet buffers that hold kept frames.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferroce_dpdk_sys as sys;

use super::port::EthDevice;
use crate::kept::{Home, Keeper, KeptFrame};

/// Frames of a queue that may be kept at once; its pool has so many buffers more.
pub(super) const KEPT_MAX: u32 = 256;

/// The kept frames of a queue.
#[derive(Debug)]
pub(super) struct Kept(Arc<Mbufs>);

#[derive(Debug)]
struct Mbufs {
    kept: AtomicUsize,
    /// Has the pool of the buffers.
    port: Arc<EthDevice>,
}

impl Kept {
    pub(super) fn new(port: Arc<EthDevice>) -> Kept {
        Kept(Arc::new(Mbufs { kept: AtomicUsize::new(0), port }))
    }

    /// For the frame that lies in `mbuf` alone, or for one that does not.
    #[inline]
    pub(super) fn keeper(&mut self, mbuf: Option<*mut sys::Mbuf>) -> MbufKeeper<'_> {
        MbufKeeper { kept: self, mbuf, lent: false }
    }
}

/// Keeps one frame.
pub(super) struct MbufKeeper<'a> {
    kept: &'a mut Kept,
    mbuf: Option<*mut sys::Mbuf>,
    /// Whether the buffer is the holder's now.
    pub(super) lent: bool,
}

impl Keeper for MbufKeeper<'_> {
    fn keep(&mut self, bytes: &[u8]) -> Option<KeptFrame> {
        let Kept(home) = &*self.kept;
        // Only this adds to it.
        if home.kept.load(Ordering::Relaxed) >= KEPT_MAX as usize {
            return None;
        }
        home.kept.fetch_add(1, Ordering::Relaxed);
        let Some(mbuf) = self.mbuf else { return Some(KeptFrame::copied(bytes, COPY, home.clone())) };
        self.lent = true;
        // SAFETY: the frame lies in this buffer, which the driver does not free when it sees `lent`. Its pool is there
        // as long as the port, which `home` holds.
        Some(unsafe { KeptFrame::lent(bytes, mbuf.expose_provenance(), home.clone()) })
    }
}

/// The token of a copy, which is no buffer's address.
const COPY: usize = 0;

impl Home for Mbufs {
    fn give_back(&self, mbuf: usize) {
        if mbuf != COPY {
            let mut mbuf = std::ptr::with_exposed_provenance_mut::<sys::Mbuf>(mbuf);
            // SAFETY: a buffer that was lent, and comes back once. Its pool takes it from any thread.
            unsafe { (self.port.shim.give)(&raw mut mbuf, 1) };
        }
        self.kept.fetch_sub(1, Ordering::Release);
    }
}
