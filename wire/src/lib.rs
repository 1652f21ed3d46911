//! RoCEv2 on the wire: every header, the opcode table, the ICRC, and types that enforce the rules (24-bit PSNs that
//! wrap, opcodes that exist, the five path MTUs).
//!
//! It is a part of [ferroce](https://docs.rs/ferroce), a RoCEv2 stack in user space, and can be used alone for a
//! dissector, a traffic generator or a test. No IO, no clock, no allocation on the packet path, no `unsafe`.
//!
//! | to | use |
//! |---|---|
//! | parse a frame, from Ethernet or from IP on | [`Packet::parse`]; [`ParseError`] names what is wrong |
//! | write a frame into a buffer | [`FrameBuilder`], with the headers of a path in [`PathHeader`] |
//! | keep a packet, or make one by hand | [`OwnedPacket`]: values, and it allocates |
//! | one header | [`Bth`], [`Aeth`], [`Deth`], [`Extensions`] and the others |
//! | the CRC over invariant fields | [`icrc`] |
//! | messages of the connection manager | [`cm`], [`MadHeader`] |
//!
//! ```
//! use ferroce_wire::*;
//!
//! let path = PathHeader::new(&PathAddress {
//!     source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
//!     destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
//!     vlan: None,
//!     source: Gid::from_ipv4([192, 0, 2, 1].into()),
//!     destination: Gid::from_ipv4([192, 0, 2, 2].into()),
//!     encapsulation: Encapsulation::RoceV2 { source_port: 0xc011 },
//!     traffic_class: 0,
//!     flow_label: 0,
//!     hop_limit: 64,
//!     identification: 0,
//! });
//! let mut buffer = [0; 256];
//! let mut bth = Bth::new(Opcode::RC_SEND_ONLY, Qpn::new(0x11), Psn::new(254));
//! bth.set_ack_req(true);
//! let mut frame = FrameBuilder::start(&mut buffer, &path, bth, 5).unwrap();
//! frame.payload().copy_from_slice(b"hello");
//! let length = frame.finish();
//!
//! let packet = Packet::parse(&buffer[..length]).unwrap();
//! assert_eq!(packet.opcode, Opcode::RC_SEND_ONLY);
//! assert_eq!(packet.payload, b"hello");
//! ```
#![forbid(unsafe_code)]
#![expect(clippy::len_without_is_empty, reason = "no header is ever empty")]

mod aeth;
mod atomic;
mod bth;
pub mod cm;
mod deth;
mod extensions;
mod feth;
mod frame;
mod gid;
mod grh;
pub mod icrc;
mod identification;
mod immdt;
mod key;
mod mac;
mod mad;
mod mtu;
mod opcode;
mod owned_packet;
mod packet;
mod psn;
mod qpn;
mod rdeth;
mod reth;
mod sack;

pub use aeth::{Aeth, CREDITS_UNLIMITED, Nak, RnrTimer, Syndrome, credits};
pub use atomic::{AtomicAckEth, AtomicEth};
pub use bth::{Bth, PKEY_DEFAULT, PKey};
pub use deth::Deth;
pub use extensions::Extensions;
pub use feth::{Feth, FlushType, Selectivity};
pub use frame::{Ecn, Encapsulation, FrameBuilder, PathAddress, PathHeader, Piece, source_port};
pub use gid::Gid;
pub use grh::Grh;
pub use identification::Identifications;
pub use immdt::{Ieth, ImmDt};
pub use key::RKey;
pub use mac::{MacAddr, VlanTag};
pub use mad::{MAD_LEN, MadError, MadHeader};
pub use mtu::{InvalidPathMtu, PathMtu};
pub use opcode::{Extension, InvalidOpcode, Opcode, Operation, PayloadRule, Position, Service, Successor};
pub use owned_packet::OwnedPacket;
pub use packet::{Link, Network, NetworkHeader, Packet, ParseError};
pub use psn::Psn;
pub use qpn::Qpn;
pub use rdeth::Rdeth;
pub use reth::Reth;
pub use sack::Sack;

/// The UDP destination port of RoCEv2.
pub const ROCE_V2_PORT: u16 = 4791;
/// The EtherType of RoCE v1.
pub const ROCE_V1_ETHERTYPE: u16 = 0x8915;
/// The Q_Key of the general service interface, QP1.
pub const GSI_QKEY: u32 = 0x8001_0000;
/// The length of the ICRC at the end of every packet.
pub const ICRC_LEN: usize = 4;
