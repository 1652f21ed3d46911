//! The ABI of the shim, as in `shim.h`, which documents it.

#![allow(missing_docs, reason = "shim.h says what each is")]

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

/// The version of this file.
pub const ABI: u32 = 1;
/// Bytes for the name of a port, with its NUL.
pub const NAME_SIZE: usize = 64;
/// Bytes for DPDK's data about a payload that is not copied.
pub const SHARED_SIZE: usize = 32;

/// A packet buffer of DPDK. Only the shim knows its layout.
#[repr(C)]
#[derive(Debug)]
pub struct Mbuf {
    _opaque: [u8; 0],
}

/// A pool of packet buffers, opaque likewise.
#[repr(C)]
#[derive(Debug)]
pub struct Mempool {
    _opaque: [u8; 0],
}

/// A received frame: its first segment, and its total length.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    pub data: *const u8,
    pub segment: u32,
    pub length: u32,
}

impl Default for Frame {
    fn default() -> Frame {
        Frame { data: ptr::null(), segment: 0, length: 0 }
    }
}

/// The properties of a port.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PortInfo {
    pub driver: *const c_char,
    pub arguments: *const c_char,
    pub rss_udp: u64,
    pub interface: u32,
    pub min_mtu: u32,
    pub max_mtu: u32,
    pub max_queues: u16,
    pub multi_segment: u16,
}

impl Default for PortInfo {
    fn default() -> PortInfo {
        PortInfo {
            driver: ptr::null(),
            arguments: ptr::null(),
            rss_udp: 0,
            interface: 0,
            min_mtu: 0,
            max_mtu: 0,
            max_queues: 0,
            multi_segment: 0,
        }
    }
}

/// The configuration of a port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PortSettings {
    pub rss: u64,
    pub mtu: u32,
    pub queues: u16,
    pub multi_segment: u16,
}

/// Frames that a port has lost.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Losses {
    pub received: u64,
    pub sent: u64,
}

/// Memory for DPDK's data about a payload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Shared {
    pub opaque: [u64; SHARED_SIZE / 8],
}

/// Called by DPDK when a payload has been sent.
pub type Released = unsafe extern "C" fn(address: *mut c_void, pinned: *mut c_void);

/// The shim's table of functions.
#[repr(C)]
#[derive(Debug)]
pub struct Functions {
    pub abi: u32,
    pub size: u32,
    pub max_room: u16,

    pub eal_start: unsafe extern "C" fn(argc: c_int, argv: *mut *mut c_char) -> c_int,
    pub error_text: unsafe extern "C" fn(code: c_int) -> *const c_char,
    pub thread_register: unsafe extern "C" fn() -> c_int,
    pub thread_unregister: unsafe extern "C" fn(),
    pub await_control: unsafe extern "C" fn(),

    pub device_probe: unsafe extern "C" fn(device: *const c_char) -> c_int,
    pub port_find: unsafe extern "C" fn(name: *const c_char, port: *mut u16) -> c_int,
    pub port_next: unsafe extern "C" fn(from: u16, name: *mut [c_char; NAME_SIZE]) -> c_int,
    pub port_info: unsafe extern "C" fn(port: u16, info: *mut PortInfo) -> c_int,
    pub port_configure: unsafe extern "C" fn(port: u16, settings: *const PortSettings) -> c_int,
    pub port_mtu: unsafe extern "C" fn(port: u16, mtu: *mut u16) -> c_int,
    pub port_set_mtu: unsafe extern "C" fn(port: u16, mtu: u16) -> c_int,
    pub port_fit:
        unsafe extern "C" fn(port: u16, rx_descriptors: *mut u16, tx_descriptors: *mut u16) -> c_int,
    pub port_node: unsafe extern "C" fn(port: u16) -> c_int,
    pub rx_queue: unsafe extern "C" fn(
        port: u16,
        queue: u16,
        descriptors: u16,
        node: c_int,
        pool: *mut Mempool,
    ) -> c_int,
    pub tx_queue: unsafe extern "C" fn(port: u16, queue: u16, descriptors: u16, node: c_int) -> c_int,
    pub port_start: unsafe extern "C" fn(port: u16) -> c_int,
    pub port_stop: unsafe extern "C" fn(port: u16) -> c_int,
    pub port_remove: unsafe extern "C" fn(port: u16) -> c_int,
    pub port_mac: unsafe extern "C" fn(port: u16, mac: *mut [u8; 6]) -> c_int,
    pub port_hear_multicast: unsafe extern "C" fn(port: u16) -> c_int,
    pub port_steer: unsafe extern "C" fn(port: u16, udp_port: u16, queues: u16, rss: u64) -> c_int,
    pub link_is_up: unsafe extern "C" fn(port: u16) -> c_int,
    pub link_speed: unsafe extern "C" fn(port: u16) -> u32,
    pub port_losses: unsafe extern "C" fn(port: u16, losses: *mut Losses) -> c_int,

    pub pool_create: unsafe extern "C" fn(
        name: *const c_char,
        count: u32,
        cache: u32,
        private_size: u16,
        room: u16,
        node: c_int,
        error: *mut c_int,
    ) -> *mut Mempool,
    pub pool_free: unsafe extern "C" fn(pool: *mut Mempool),
    pub pool_available: unsafe extern "C" fn(pool: *const Mempool) -> u32,

    pub rx_burst:
        unsafe extern "C" fn(port: u16, queue: u16, mbufs: *mut *mut Mbuf, frames: *mut Frame, n: u16) -> u16,
    pub contiguous: unsafe extern "C" fn(mbuf: *const Mbuf, length: u32, buffer: *mut u8) -> *const u8,
    pub take:
        unsafe extern "C" fn(pool: *mut Mempool, mbufs: *mut *mut Mbuf, rooms: *mut *mut u8, n: u16) -> c_int,
    pub give: unsafe extern "C" fn(mbufs: *mut *mut Mbuf, n: u32),
    pub set_length: unsafe extern "C" fn(mbuf: *mut Mbuf, length: u16),
    pub private_data: unsafe extern "C" fn(mbuf: *mut Mbuf) -> *mut c_void,
    pub chain: unsafe extern "C" fn(
        head: *mut Mbuf,
        head_length: u16,
        payload: *mut Mbuf,
        address: *mut c_void,
        length: u16,
        shared: *mut Shared,
        released: Released,
        pinned: *mut c_void,
        tail: *mut Mbuf,
        tail_length: u16,
    ),
    pub tx_burst: unsafe extern "C" fn(port: u16, queue: u16, mbufs: *mut *mut Mbuf, n: u16) -> u16,
}

// SAFETY: constant data of a library that stays loaded. Every function may be called by any thread, as documented by
// DPDK.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}
