//! The rings shared by the kernel and a program. One side writes the producer's index, the other the consumer's. Each
//! keeps a copy of both, and reads the other's index only when the ring is full or empty according to its copy.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{XDP_RING_NEED_WAKEUP, xdp_desc};

/// A ring in which a program passes descriptors to the kernel: fill ring, TX ring.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xsk_ring_prod {
    pub cached_prod: u32,
    /// The consumer's index plus `size`, which saves an addition when counting free entries.
    pub cached_cons: u32,
    pub mask: u32,
    pub size: u32,
    pub producer: *mut u32,
    pub consumer: *mut u32,
    pub ring: *mut c_void,
    pub flags: *mut u32,
}

/// A ring in which the kernel passes descriptors to a program: completion ring, RX ring.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xsk_ring_cons {
    pub cached_prod: u32,
    pub cached_cons: u32,
    pub mask: u32,
    pub size: u32,
    pub producer: *mut u32,
    pub consumer: *mut u32,
    pub ring: *mut c_void,
    pub flags: *mut u32,
}

/// An index shared with the kernel.
///
/// # Safety
/// It must be the index of a mapped ring.
unsafe fn shared<'a>(index: *mut u32) -> &'a AtomicU32 {
    // SAFETY: a ring's index is an aligned word of its mapping, and all its users access it as a whole.
    unsafe { AtomicU32::from_ptr(index) }
}

#[inline]
pub unsafe fn xsk_prod_nb_free(r: *mut xsk_ring_prod, nb: u32) -> u32 {
    // SAFETY: only the caller uses the ring, and libxdp has set it up.
    unsafe {
        let ring = &mut *r;
        if ring.cached_cons.wrapping_sub(ring.cached_prod) < nb {
            ring.cached_cons = shared(ring.consumer).load(Ordering::Acquire).wrapping_add(ring.size);
        }
        ring.cached_cons.wrapping_sub(ring.cached_prod)
    }
}

#[inline]
pub unsafe fn xsk_cons_nb_avail(r: *mut xsk_ring_cons, nb: u32) -> u32 {
    // SAFETY: as in `xsk_prod_nb_free`.
    unsafe {
        let ring = &mut *r;
        if ring.cached_prod == ring.cached_cons {
            ring.cached_prod = shared(ring.producer).load(Ordering::Acquire);
        }
        ring.cached_prod.wrapping_sub(ring.cached_cons).min(nb)
    }
}

#[inline]
pub unsafe fn xsk_ring_prod__reserve(prod: *mut xsk_ring_prod, nb: u32, idx: *mut u32) -> u32 {
    // SAFETY: as in `xsk_prod_nb_free`. `idx` points to a word of the caller.
    unsafe {
        if xsk_prod_nb_free(prod, nb) < nb {
            return 0;
        }
        *idx = (*prod).cached_prod;
        (*prod).cached_prod = (*prod).cached_prod.wrapping_add(nb);
    }
    nb
}

/// Afterwards the kernel may read the entries.
#[inline]
pub unsafe fn xsk_ring_prod__submit(prod: *mut xsk_ring_prod, nb: u32) {
    // SAFETY: as in `xsk_prod_nb_free`. Only this side writes the index.
    unsafe {
        let index = shared((*prod).producer);
        index.store(index.load(Ordering::Relaxed).wrapping_add(nb), Ordering::Release);
    }
}

#[inline]
pub unsafe fn xsk_ring_cons__peek(cons: *mut xsk_ring_cons, nb: u32, idx: *mut u32) -> u32 {
    // SAFETY: as in `xsk_ring_prod__reserve`.
    unsafe {
        let entries = xsk_cons_nb_avail(cons, nb);
        if entries > 0 {
            *idx = (*cons).cached_cons;
            (*cons).cached_cons = (*cons).cached_cons.wrapping_add(entries);
        }
        entries
    }
}

#[inline]
pub unsafe fn xsk_ring_cons__cancel(cons: *mut xsk_ring_cons, nb: u32) {
    // SAFETY: as in `xsk_prod_nb_free`.
    unsafe { (*cons).cached_cons = (*cons).cached_cons.wrapping_sub(nb) }
}

/// Afterwards the kernel may write the entries again.
#[inline]
pub unsafe fn xsk_ring_cons__release(cons: *mut xsk_ring_cons, nb: u32) {
    // SAFETY: as in `xsk_ring_prod__submit`.
    unsafe {
        let index = shared((*cons).consumer);
        index.store(index.load(Ordering::Relaxed).wrapping_add(nb), Ordering::Release);
    }
}

#[inline]
pub unsafe fn xsk_ring_prod__needs_wakeup(r: *const xsk_ring_prod) -> c_int {
    // SAFETY: as in `xsk_prod_nb_free`.
    let flags = unsafe { shared((*r).flags).load(Ordering::Relaxed) };
    c_int::from(flags & XDP_RING_NEED_WAKEUP != 0)
}

#[inline]
pub unsafe fn xsk_ring_prod__fill_addr(fill: *mut xsk_ring_prod, idx: u32) -> *mut u64 {
    // SAFETY: the mask keeps the index inside the ring, which has entries of this type.
    unsafe { (*fill).ring.cast::<u64>().add((idx & (*fill).mask) as usize) }
}

#[inline]
pub unsafe fn xsk_ring_cons__comp_addr(comp: *const xsk_ring_cons, idx: u32) -> *const u64 {
    // SAFETY: as in `xsk_ring_prod__fill_addr`.
    unsafe { (*comp).ring.cast::<u64>().add((idx & (*comp).mask) as usize) }
}

#[inline]
pub unsafe fn xsk_ring_prod__tx_desc(tx: *mut xsk_ring_prod, idx: u32) -> *mut xdp_desc {
    // SAFETY: as in `xsk_ring_prod__fill_addr`.
    unsafe { (*tx).ring.cast::<xdp_desc>().add((idx & (*tx).mask) as usize) }
}

#[inline]
pub unsafe fn xsk_ring_cons__rx_desc(rx: *const xsk_ring_cons, idx: u32) -> *const xdp_desc {
    // SAFETY: as in `xsk_ring_prod__fill_addr`.
    unsafe { (*rx).ring.cast::<xdp_desc>().add((idx & (*rx).mask) as usize) }
}
