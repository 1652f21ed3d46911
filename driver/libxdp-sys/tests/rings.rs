//! The functions of the rings behave like those of libxdp, with rings that wrap around, are full and are empty.
#![cfg(feature = "use_cc_build")]

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use ferroce_driver_test_support::random::Random;
use libxdp_sys::*;

/// The functions of libxdp, which it exports in addition to the inline ones of its header.
mod c {
    use libxdp_sys::{xdp_desc, xsk_ring_cons, xsk_ring_prod};

    unsafe extern "C" {
        pub(super) fn xsk_prod_nb_free(r: *mut xsk_ring_prod, nb: u32) -> u32;
        pub(super) fn xsk_cons_nb_avail(r: *mut xsk_ring_cons, nb: u32) -> u32;
        pub(super) fn xsk_ring_prod__reserve(r: *mut xsk_ring_prod, nb: u32, idx: *mut u32) -> u32;
        pub(super) fn xsk_ring_prod__submit(r: *mut xsk_ring_prod, nb: u32);
        pub(super) fn xsk_ring_cons__peek(r: *mut xsk_ring_cons, nb: u32, idx: *mut u32) -> u32;
        pub(super) fn xsk_ring_cons__cancel(r: *mut xsk_ring_cons, nb: u32);
        pub(super) fn xsk_ring_cons__release(r: *mut xsk_ring_cons, nb: u32);
        pub(super) fn xsk_ring_prod__needs_wakeup(r: *const xsk_ring_prod) -> i32;
        pub(super) fn xsk_ring_prod__fill_addr(r: *mut xsk_ring_prod, idx: u32) -> *mut u64;
        pub(super) fn xsk_ring_cons__comp_addr(r: *const xsk_ring_cons, idx: u32) -> *const u64;
        pub(super) fn xsk_ring_prod__tx_desc(r: *mut xsk_ring_prod, idx: u32) -> *mut xdp_desc;
        pub(super) fn xsk_ring_cons__rx_desc(r: *const xsk_ring_cons, idx: u32) -> *const xdp_desc;
    }
}

/// The memory that a ring shares with the kernel.
struct Mapped {
    producer: Cell<u32>,
    consumer: Cell<u32>,
    flags: Cell<u32>,
}

const SIZE: u32 = 8;

macro_rules! ring {
    ($type:ident, $mapped:expr, $headstart:expr) => {
        $type {
            cached_prod: $mapped.producer.get(),
            cached_cons: $mapped.consumer.get() + $headstart,
            mask: SIZE - 1,
            size: SIZE,
            producer: $mapped.producer.as_ptr(),
            consumer: $mapped.consumer.as_ptr(),
            ring: ptr::null_mut::<c_void>(),
            flags: $mapped.flags.as_ptr(),
        }
    };
}

/// Calls both functions, and checks that their results are equal.
macro_rules! both {
    ($name:ident($ours:expr, $theirs:expr $(, $argument:expr)*)) => {{
        // SAFETY: the rings are set up as libxdp does it, and only this thread has them.
        let (ours, theirs) = unsafe { ($name($ours $(, $argument)*), c::$name($theirs $(, $argument)*)) };
        assert_eq!(ours, theirs, stringify!($name));
        ours
    }};
}

#[test]
fn functions_of_rings_do_what_those_of_libxdp_do() {
    let mut random = Random::from_env("FERROCE_SEED");
    println!(
        "replay: FERROCE_SEED={} cargo test -p libxdp-sys --features use_cc_build --test rings",
        random.seed()
    );
    // Near the end of the numbers, so that they wrap around.
    let start = u32::MAX - SIZE * 3;
    let mapped = || Mapped { producer: Cell::new(start), consumer: Cell::new(start), flags: Cell::new(0) };
    let (tx, c_tx, rx, c_rx) = (mapped(), mapped(), mapped(), mapped());
    let mut prod = ring!(xsk_ring_prod, tx, SIZE);
    let mut c_prod = ring!(xsk_ring_prod, c_tx, SIZE);
    let mut cons = ring!(xsk_ring_cons, rx, 0);
    let mut c_cons = ring!(xsk_ring_cons, c_rx, 0);
    let (mut reserved, mut peeked) = (0, 0);
    for _ in 0..10_000 {
        let n = random.below(u64::from(SIZE) + 2) as u32;
        match random.below(9) {
            0 => drop(both!(xsk_prod_nb_free(&mut prod, &mut c_prod, n))),
            1 => {
                let (mut at, mut c_at) = (0, 0);
                // SAFETY: as in `both`.
                let got = unsafe { xsk_ring_prod__reserve(&mut prod, n, &mut at) };
                // SAFETY: likewise.
                let c_got = unsafe { c::xsk_ring_prod__reserve(&mut c_prod, n, &mut c_at) };
                assert_eq!((got, at), (c_got, c_at), "reserve");
                reserved += got;
            }
            2 => {
                both!(xsk_ring_prod__submit(&mut prod, &mut c_prod, reserved));
                reserved = 0;
            }
            3 => drop(both!(xsk_cons_nb_avail(&mut cons, &mut c_cons, n))),
            4 => {
                let (mut at, mut c_at) = (0, 0);
                // SAFETY: as in `both`.
                let got = unsafe { xsk_ring_cons__peek(&mut cons, n, &mut at) };
                // SAFETY: likewise.
                let c_got = unsafe { c::xsk_ring_cons__peek(&mut c_cons, n, &mut c_at) };
                assert_eq!((got, at), (c_got, c_at), "peek");
                peeked += got;
            }
            5 => {
                let back = n.min(peeked);
                both!(xsk_ring_cons__cancel(&mut cons, &mut c_cons, back));
                peeked -= back;
            }
            6 => {
                both!(xsk_ring_cons__release(&mut cons, &mut c_cons, peeked));
                peeked = 0;
            }
            7 => {
                // The kernel takes the submitted descriptors, and adds as many as there is room for.
                let taken = n.min(tx.producer.get().wrapping_sub(tx.consumer.get()));
                let given = n.min(SIZE - rx.producer.get().wrapping_sub(rx.consumer.get()));
                for tx in [&tx, &c_tx] {
                    tx.consumer.set(tx.consumer.get().wrapping_add(taken));
                }
                for rx in [&rx, &c_rx] {
                    rx.producer.set(rx.producer.get().wrapping_add(given));
                }
            }
            _ => {
                tx.flags.set(n);
                c_tx.flags.set(n);
                both!(xsk_ring_prod__needs_wakeup(&prod, &c_prod));
            }
        }
        let state = |m: &Mapped| (m.producer.get(), m.consumer.get());
        assert_eq!((state(&tx), state(&rx)), (state(&c_tx), state(&c_rx)), "indices");
        assert_eq!((prod.cached_prod, prod.cached_cons), (c_prod.cached_prod, c_prod.cached_cons));
        assert_eq!((cons.cached_prod, cons.cached_cons), (c_cons.cached_prod, c_cons.cached_cons));
    }
}

#[test]
fn entries_are_where_libxdp_has_them() {
    let mapped = Mapped { producer: Cell::new(0), consumer: Cell::new(0), flags: Cell::new(0) };
    // Room for the larger entries.
    let mut entries = [xdp_desc { addr: 0, len: 0, options: 0 }; SIZE as usize];
    let mut prod = ring!(xsk_ring_prod, mapped, SIZE);
    let mut cons = ring!(xsk_ring_cons, mapped, 0);
    (prod.ring, cons.ring) = (entries.as_mut_ptr().cast(), entries.as_mut_ptr().cast());
    let prod = &raw mut prod;
    for index in [0, 1, SIZE - 1, SIZE, SIZE + 3, u32::MAX] {
        both!(xsk_ring_prod__fill_addr(prod, prod, index));
        both!(xsk_ring_cons__comp_addr(&cons, &cons, index));
        both!(xsk_ring_prod__tx_desc(prod, prod, index));
        both!(xsk_ring_cons__rx_desc(&cons, &cons, index));
    }
}
