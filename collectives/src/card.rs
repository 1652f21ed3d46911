//! The data of a rank that other ranks need.

use ferroce::driver::segment::Ticket;
use ferroce::{Context, Gid, PathMtu};
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Error;
use crate::channel::Limits;
use crate::options::{Options, SharedMemory};
use crate::ports::{MAX_RAILS, Port};
use crate::schedule::Algorithm;

/// The data of a rank that the other ranks of a communicator need: plain bytes, sent to all by any means.
/// [`Collectives::card`](crate::Collectives::card) returns it. Integers are big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Card {
    /// Its rails; `rail_count` of them are used.
    pub(crate) rails: [RailCard; MAX_RAILS],
    pub(crate) rail_count: U32,
    /// That of rank 0 identifies the communicator.
    pub(crate) nonce: U64,
    /// The identifier of its host.
    pub(crate) host: [u8; 16],
    /// The values that all ranks must share.
    pub(crate) chunk_bytes: U32,
    pub(crate) eager_bytes: U32,
    pub(crate) algorithm: U32,
    /// [`SharedMemory`](crate::SharedMemory) as a number, and 1 if the model was given.
    pub(crate) shared_memory: U32,
    pub(crate) has_model: U32,
    pub(crate) byte_order: [u8; 4],
    /// 1 if the rank has a device that reduces.
    pub(crate) device: U32,
    /// The data with which ranks of its host open its board; nonce 0 if it has none.
    pub(crate) board_pid: U32,
    pub(crate) board_fd: U32,
    pub(crate) board_bytes: U32,
    pub(crate) board_namespace: U64,
    pub(crate) board_nonce: U64,
}

/// The data of one port of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RailCard {
    gid: [u8; 16],
    /// The queue pair for control messages.
    pub(crate) qpn: U32,
    pub(crate) qkey: U32,
    /// The largest path MTU of the port, in bytes.
    path_mtu: U32,
}

impl RailCard {
    /// The data of a port.
    pub(crate) fn of(port: &Port, options: &Options) -> Result<RailCard, Error> {
        let (index, path_mtu) = gid_index(&port.context, options)?;
        Ok(RailCard {
            gid: port.context.port().gids[index].gid.0,
            qpn: U32::new(port.control.qpn.value()),
            qkey: U32::new(port.control.qkey),
            path_mtu: U32::new(path_mtu.bytes()),
        })
    }

    /// The address of the port.
    pub(crate) fn gid(&self) -> Gid {
        Gid(self.gid)
    }
}

impl Card {
    /// Bytes of a card.
    pub const LEN: usize = size_of::<Card>();

    /// 1 to 4 in the byte order of this machine, which is the byte order of elements.
    pub(crate) const BYTE_ORDER: [u8; 4] = 0x0102_0304_u32.to_ne_bytes();

    /// The bytes.
    pub fn to_bytes(&self) -> [u8; Card::LEN] {
        let mut bytes = [0; Card::LEN];
        bytes.copy_from_slice(self.as_bytes());
        bytes
    }

    /// Parses the bytes of a card.
    pub fn from_bytes(bytes: &[u8; Card::LEN]) -> Card {
        zerocopy::transmute!(*bytes)
    }

    /// The data with which ranks of its host open its board.
    pub(crate) fn board(&self) -> Ticket {
        Ticket {
            pid: self.board_pid.get(),
            fd: self.board_fd.get(),
            length: self.board_bytes.get().into(),
            namespace: self.board_namespace.get(),
            nonce: self.board_nonce.get(),
        }
    }

    /// Its rails.
    pub(crate) fn rails(&self) -> &[RailCard] {
        &self.rails[..(self.rail_count.get() as usize).min(MAX_RAILS)]
    }

    /// Differences between rank `rank`, whose card this is, and rank `peer` in values that must be equal, in words.
    pub(crate) fn difference(&self, rank: u32, other: &Card, peer: u32) -> Option<String> {
        let number = |value: U32| value.to_string();
        let algorithm = |value: U32| {
            let forced = Algorithm::from_number(value.get());
            forced.map_or_else(|| "none".to_owned(), |forced| forced.to_string())
        };
        let shared_memory = |value: U32| {
            let all = [SharedMemory::Auto, SharedMemory::Off, SharedMemory::Required];
            let known = all.into_iter().find(|known| *known as u32 == value.get());
            known.map_or_else(|| value.to_string(), |known| known.to_string())
        };
        let is_given = |value: U32| if value.get() == 0 { "none" } else { "one" }.to_owned();
        type Name<'a> = &'a dyn Fn(U32) -> String;
        let pairs: [(_, _, _, Name<'_>); 5] = [
            ("chunk_bytes", self.chunk_bytes, other.chunk_bytes, &number),
            ("eager_bytes", self.eager_bytes, other.eager_bytes, &number),
            ("the forced algorithm", self.algorithm, other.algorithm, &algorithm),
            ("shared_memory", self.shared_memory, other.shared_memory, &shared_memory),
            ("the given model", self.has_model, other.has_model, &is_given),
        ];
        for (what, ours, theirs, name) in pairs {
            if ours != theirs {
                let (ours, theirs) = (name(ours), name(theirs));
                return Some(format!("{what} differs: rank {rank} has {ours}, rank {peer} has {theirs}"));
            }
        }
        if self.byte_order != other.byte_order {
            return Some(format!("the byte orders of rank {rank} and rank {peer} differ"));
        }
        None
    }
}

/// The row of the GID table for messages, and its largest path MTU.
pub(crate) fn gid_index(context: &Context, options: &Options) -> Result<(usize, PathMtu), Error> {
    let port = context.port();
    let gids = &port.gids;
    if gids.is_empty() {
        return Err(Error::invalid("GID table", "empty", "give the interface an IP address"));
    }
    let index = match options.gid_index {
        Some(index) if index >= gids.len() => {
            let expected = format!("below {}, the size of the GID table", gids.len());
            return Err(Error::invalid("gid_index", index, expected));
        }
        Some(index) => index,
        None => gids.iter().position(|e| !e.gid.is_ipv6() && !e.roce_v1).unwrap_or(0),
    };
    let largest = port.path_mtu(gids[index].gid.is_ipv6()).ok_or_else(|| {
        let expected = "room for a path MTU of 256 and the headers";
        Error::invalid("interface MTU", port.mtu, expected)
    })?;
    Ok((index, options.path_mtu.map_or(largest, |wanted| wanted.min(largest))))
}

/// The most outstanding data of a channel of a communicator of `size` ranks.
pub(crate) fn limits(options: &Options, size: u32) -> Limits {
    let chunk = options.chunk_bytes.next_multiple_of(64);
    let peers = size.saturating_sub(1).max(1);
    // A rank with very many peers has fewer for each.
    let depth = (4096 / peers).clamp(8, 64);
    let eager = options.eager_bytes.next_multiple_of(64);
    let chunks = (64 / peers).clamp(4, 8);
    let (ring, staging) = ((eager + 64) * (256 / peers).clamp(4, 8), chunk.saturating_mul(chunks));
    Limits { depth, ring, eager: options.eager_bytes, staging, chunks }
}
