//! The XDP program: it redirects RoCE packets for the port's own addresses and groups to the socket of their receive
//! queue. Everything else is passed to the kernel.
//!
//! It is assembled here, instruction by instruction, so no eBPF compiler is needed, neither at build time nor at run
//! time. It is loaded with support for frags. It redirects
//!
//! - UDP to port 4791 over IPv4 with a header of 20 bytes, unless it is a fragment (RoCEv2 packets are never
//!   fragmented, and only the kernel can reassemble fragments),
//! - UDP to port 4791 over IPv6 without extension headers,
//! - EtherType 0x8915 (RoCE v1), if enabled,
//!
//! each with or without one 802.1Q tag. IPv4 options are not followed: this needs arithmetic with packet pointers,
//! which the verifier allows only with CAP_PERFMON, and RoCEv2 packets have no options.
//!
//! UDP is redirected only if its address is in the map of destinations for that queue. The map contains the addresses
//! of the interface, those of `PacketDriver::admit`, and the groups. Other addresses, such as those of a bridge's
//! guests or of a container, belong to other programs. If the port shares an address with UDP sockets, packets to odd
//! queue pair numbers are passed to the sockets, except those to QP1 ([`slots`](crate::slots)).

use std::net::IpAddr;

use super::bpf::Instruction;
use crate::ROCE_PORT;
use crate::slots::owner;

/// The value of an address in the map of destinations if all packets to it are the port's.
pub(super) const ALL: u8 = 1;
/// The value of an address that the port shares: packets to even queue pair numbers and to QP1 are the port's.
pub(super) const EVEN: u8 = 2;

/// Bytes of a key in the map of destinations: an IPv6 or IPv4-mapped address, and a queue number in native byte order.
pub(super) const DESTINATION: usize = 20;

/// The key of an address or a group on a queue.
pub(super) fn destination(to: IpAddr, queue: u32) -> [u8; DESTINATION] {
    let address = match to {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut key = [0; DESTINATION];
    key[..16].copy_from_slice(&address.octets());
    key[16..].copy_from_slice(&queue.to_ne_bytes());
    key
}

/// Builds the program with a map of [`destination`]s and an XSKMAP. A process that joins the program finds the maps in
/// this order.
pub(super) fn roce_filter(destinations: i32, xskmap: i32, roce_v1: bool) -> Vec<Instruction> {
    let mut a = Assembler::default();
    let [tagged, ethertype, ipv4, ipv6, look, redirect, pass] = a.labels();

    // R6: context; R2: start of the frame, advanced past a tag; R3: its end.
    a.move_register(R6, R1);
    a.load(WORD, R2, R1, XDP_MD_DATA);
    a.load(WORD, R3, R1, XDP_MD_DATA_END);
    a.require_bytes(ETHERNET, pass);
    a.load(HALF, R5, R2, 12);
    a.jump_if(EQUAL, R5, be16(0x8100), tagged);

    a.place(ethertype);
    a.jump_if(EQUAL, R5, be16(0x0800), ipv4);
    a.jump_if(EQUAL, R5, be16(0x86dd), ipv6);
    if roce_v1 {
        a.jump_if(EQUAL, R5, be16(0x8915), redirect);
    }
    a.jump(pass);

    a.place(tagged);
    a.add(R2, 4);
    a.require_bytes(ETHERNET, pass);
    a.load(HALF, R5, R2, 12);
    a.jump(ethertype);

    a.place(ipv4);
    a.require_bytes(ETHERNET + 20 + 8 + QPN + 4, pass);
    a.load(BYTE, R0, R2, ETHERNET); // version and header length
    a.jump_if(NOT_EQUAL, R0, 0x45, pass);
    a.load(BYTE, R0, R2, ETHERNET + 9); // protocol
    a.jump_if(NOT_EQUAL, R0, UDP, pass);
    a.load(HALF, R0, R2, ETHERNET + 6); // flags and fragment offset
    a.and(R0, be16(0x3fff));
    a.jump_if(NOT_EQUAL, R0, 0, pass);
    a.load(HALF, R0, R2, ETHERNET + 20 + 2); // destination port
    a.jump_if(NOT_EQUAL, R0, be16(ROCE_PORT), pass);
    a.load(WORD, R7, R2, ETHERNET + 20 + 8 + QPN);
    a.load(WORD, R5, R2, ETHERNET + 16); // destination address
    a.store_immediate(DOUBLE_WORD, KEY, 0);
    a.store_immediate(WORD, KEY + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
    a.store(WORD, KEY + 12, R5);
    a.jump(look);

    a.place(ipv6);
    a.require_bytes(ETHERNET + 40 + 8 + QPN + 4, pass);
    a.load(BYTE, R0, R2, ETHERNET + 6); // next header
    a.jump_if(NOT_EQUAL, R0, UDP, pass);
    a.load(HALF, R0, R2, ETHERNET + 40 + 2); // destination port
    a.jump_if(NOT_EQUAL, R0, be16(ROCE_PORT), pass);
    a.load(WORD, R7, R2, ETHERNET + 40 + 8 + QPN);
    for word in [0, 4, 8, 12] {
        a.load(WORD, R5, R2, ETHERNET + 24 + word); // destination address
        a.store(WORD, KEY + word, R5);
    }

    a.place(look);
    a.load(WORD, R5, R6, XDP_MD_RX_QUEUE_INDEX);
    a.store(WORD, KEY + 16, R5);
    a.load_map(R1, destinations);
    a.move_register(R2, R10);
    a.add(R2, KEY.into());
    a.call(BPF_FUNC_MAP_LOOKUP_ELEM);
    a.jump_if(EQUAL, R0, 0, pass);
    a.load(BYTE, R0, R0, 0);
    a.jump_if(EQUAL, R0, ALL.into(), redirect);
    a.and(R7, be32(0x00ff_ffff));
    a.jump_if(EQUAL, R7, be32(owner::QP1), redirect);
    a.and(R7, be32(owner::SHARED));
    a.jump_if(NOT_EQUAL, R7, 0, pass);

    a.place(redirect);
    a.load_map(R1, xskmap);
    a.load(WORD, R2, R6, XDP_MD_RX_QUEUE_INDEX);
    a.move_immediate(R3, XDP_PASS); // if the queue has no socket
    a.call(BPF_FUNC_REDIRECT_MAP);
    a.exit();

    a.place(pass);
    a.move_immediate(R0, XDP_PASS);
    a.exit();
    a.finish()
}

/// Bytes of an Ethernet header. The load offsets above include it, so a tag only advances R2.
const ETHERNET: i16 = 14;
const UDP: i32 = 17;
/// The offset of the destination queue pair in the BTH. The first 8 of its 32 bits are other fields.
const QPN: i16 = 4;

const XDP_PASS: i32 = 2;
const BPF_FUNC_MAP_LOOKUP_ELEM: i32 = 1;
const BPF_FUNC_REDIRECT_MAP: i32 = 51;
/// The stack offset of the key. The stack ends at R10, and stores are of up to 8 bytes.
const KEY: i16 = -(DESTINATION.next_multiple_of(8) as i16);
// Offsets in `struct xdp_md`.
const XDP_MD_DATA: i16 = 0;
const XDP_MD_DATA_END: i16 = 4;
const XDP_MD_RX_QUEUE_INDEX: i16 = 16;

const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const R3: u8 = 3;
const R4: u8 = 4;
const R5: u8 = 5;
const R6: u8 = 6;
const R7: u8 = 7;
const R10: u8 = 10;

// Sizes of loads and conditions of jumps, as opcode bits (RFC 9669, sections 4.3 and 5).
const WORD: u8 = 0x00;
const HALF: u8 = 0x08;
const BYTE: u8 = 0x10;
const DOUBLE_WORD: u8 = 0x18;
const EQUAL: u8 = 0x10;
const NOT_EQUAL: u8 = 0x50;

/// A big-endian field of a packet, as a 16-bit load returns it.
fn be16(value: u16) -> i32 {
    i32::from(value.to_be())
}

/// The same for four bytes.
fn be32(value: u32) -> i32 {
    value.to_be().cast_signed()
}

#[derive(Clone, Copy)]
struct Label(usize);

/// A one-pass assembler with labels.
#[derive(Default)]
struct Assembler {
    code: Vec<Instruction>,
    /// The position of each label, once placed.
    places: Vec<Option<usize>>,
    /// The jumps, and the labels that they jump to.
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn labels<const N: usize>(&mut self) -> [Label; N] {
        let first = self.places.len();
        self.places.resize(first + N, None);
        std::array::from_fn(|i| Label(first + i))
    }

    fn place(&mut self, label: Label) {
        self.places[label.0] = Some(self.code.len());
    }

    fn finish(mut self) -> Vec<Instruction> {
        for (at, label) in self.jumps {
            let target = self.places[label.0].expect("every label of the filter is placed");
            self.code[at].offset = (target as i64 - at as i64 - 1) as i16;
        }
        self.code
    }

    fn push(&mut self, code: u8, destination: u8, source: u8, offset: i16, immediate: i32) {
        let registers = source << 4 | destination;
        self.code.push(Instruction { code, registers, offset, immediate });
    }

    fn load(&mut self, size: u8, destination: u8, source: u8, offset: i16) {
        self.push(0x61 | size, destination, source, offset, 0);
    }

    /// Stores to the stack.
    fn store(&mut self, size: u8, offset: i16, source: u8) {
        self.push(0x63 | size, R10, source, offset, 0);
    }

    fn store_immediate(&mut self, size: u8, offset: i16, value: i32) {
        self.push(0x62 | size, R10, 0, offset, value);
    }

    fn load_map(&mut self, destination: u8, fd: i32) {
        const BPF_PSEUDO_MAP_FD: u8 = 1;
        self.push(0x18, destination, BPF_PSEUDO_MAP_FD, 0, fd);
        self.push(0, 0, 0, 0, 0);
    }

    fn move_register(&mut self, destination: u8, source: u8) {
        self.push(0xbf, destination, source, 0, 0);
    }

    fn move_immediate(&mut self, destination: u8, value: i32) {
        self.push(0xb7, destination, 0, 0, value);
    }

    fn add(&mut self, destination: u8, value: i32) {
        self.push(0x07, destination, 0, 0, value);
    }

    fn and(&mut self, destination: u8, value: i32) {
        self.push(0x57, destination, 0, 0, value);
    }

    fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(0x05, 0, 0, 0, 0);
    }

    fn jump_if(&mut self, condition: u8, register: u8, value: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(0x05 | condition, register, 0, 0, value);
    }

    /// Jumps unless at least `n` bytes follow R2. The verifier requires this before each access.
    fn require_bytes(&mut self, n: i16, otherwise: Label) {
        const GREATER_REGISTER: u8 = 0x2d;
        self.move_register(R4, R2);
        self.add(R4, i32::from(n));
        self.jumps.push((self.code.len(), otherwise));
        self.push(GREATER_REGISTER, R4, R3, 0, 0);
    }

    fn call(&mut self, helper: i32) {
        self.push(0x85, 0, 0, 0, helper);
    }

    fn exit(&mut self) {
        self.push(0x95, 0, 0, 0, 0);
    }
}
