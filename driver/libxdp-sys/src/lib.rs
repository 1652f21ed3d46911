//! The part of libxdp that xsk-rs calls, declared by hand.
//!
//! The crate of this name on crates.io compiles libxdp and libbpf, their BPF programs with clang, and generates these
//! declarations with bindgen. This needs the packages of a C++ compiler, possibly a second version of LLVM, and a
//! minute of CPU time. ferroce loads its own XDP program, so xsk-rs needs only two objects of libxdp and the rings.
//! Debian's libxdp-dev has the objects; the functions of the rings, which are inline in C, are here.
//!
//! Only builds in this workspace use this crate (`[patch.crates-io]`). ferroce as a dependency, or installed by `cargo
//! install`, is built with the crate on crates.io.

#![expect(non_snake_case, reason = "the names are those of libxdp")]
#![allow(missing_docs, reason = "xdp/xsk.h and linux/if_xdp.h say what each is")]
#![expect(clippy::missing_safety_doc, reason = "each ring must be one that libxdp has set up")]

mod ring;

pub use ring::*;

use std::ffi::{c_char, c_int, c_void};

pub const XDP_PACKET_HEADROOM: u32 = 256;
pub const XDP_RING_NEED_WAKEUP: u32 = 1;
pub const XDP_STATISTICS: u32 = 7;
pub const XSK_RING_CONS__DEFAULT_NUM_DESCS: u32 = 2048;
pub const XSK_RING_PROD__DEFAULT_NUM_DESCS: u32 = 2048;
pub const XSK_UMEM__DEFAULT_FRAME_HEADROOM: u32 = 0;
pub const XSK_UMEM__DEFAULT_FRAME_SIZE: u32 = 4096;

#[repr(C)]
#[derive(Debug)]
pub struct xsk_umem {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Debug)]
pub struct xsk_socket {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xsk_umem_config {
    pub fill_size: u32,
    pub comp_size: u32,
    pub frame_size: u32,
    pub frame_headroom: u32,
    pub flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct xsk_socket_config {
    pub rx_size: u32,
    pub tx_size: u32,
    /// bindgen's name of an unnamed field.
    pub __bindgen_anon_1: xsk_socket_config__bindgen_ty_1,
    pub xdp_flags: u32,
    pub bind_flags: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union xsk_socket_config__bindgen_ty_1 {
    pub libbpf_flags: u32,
    pub libxdp_flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xdp_desc {
    pub addr: u64,
    pub len: u32,
    pub options: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct xdp_statistics {
    pub rx_dropped: u64,
    pub rx_invalid_descs: u64,
    pub tx_invalid_descs: u64,
    pub rx_ring_full: u64,
    pub rx_fill_ring_empty_descs: u64,
    pub tx_ring_empty_descs: u64,
}

unsafe extern "C" {
    pub fn xsk_umem__create(
        umem: *mut *mut xsk_umem,
        umem_area: *mut c_void,
        size: u64,
        fill: *mut xsk_ring_prod,
        comp: *mut xsk_ring_cons,
        config: *const xsk_umem_config,
    ) -> c_int;
    pub fn xsk_umem__delete(umem: *mut xsk_umem) -> c_int;
    pub fn xsk_socket__create_shared(
        xsk: *mut *mut xsk_socket,
        ifname: *const c_char,
        queue_id: u32,
        umem: *mut xsk_umem,
        rx: *mut xsk_ring_cons,
        tx: *mut xsk_ring_prod,
        fill: *mut xsk_ring_prod,
        comp: *mut xsk_ring_cons,
        config: *const xsk_socket_config,
    ) -> c_int;
    pub fn xsk_socket__fd(xsk: *const xsk_socket) -> c_int;
    pub fn xsk_socket__delete(xsk: *mut xsk_socket);
}
