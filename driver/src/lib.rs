//! Packet drivers and memory of [ferroce](https://docs.rs/ferroce), a RoCEv2 stack in user space.
//!
//! Applications use the crate `ferroce`, which has this one as `ferroce::driver`. It is of use by itself to move whole frames from
//! user space: for a tool of your own, or to write another driver ([`PacketDriver`]) or one around a driver ([`Wrapper`]).
//! Every line of `unsafe` and FFI of the stack is in this crate. A driver knows nothing of RoCE beyond UDP port 4791; the engine
//! knows nothing of sockets, rings and file descriptors.
//!
//! | driver | what it is |
//! |---|---|
//! | [`loopback`] | pairs and small switches of ports inside one process, usable across threads |
//! | [`sim`] | virtual time, seeded: loss, duplication, reorder, corruption, delay, rate, ECN; fabrics of switches |
//! | `af_xdp` | AF_XDP sockets on a real interface; feature `af_xdp`, which needs clang, libclang, m4, libelf and zlib headers at build time |
//! | [`udp`] | a plain UDP socket, which needs no privilege |
//! | [`shm`] | memory that processes of one user on this host share |
//! | [`dpdk`] | ports of DPDK: cards bound to user space, virtual devices; loaded at run time |
//! | [`pcap`] | a recorder that wraps any driver, and a reader of captures |
//!
//! A frame goes from one port to another:
//!
//! ```
//! use ferroce_driver::loopback;
//! use ferroce_driver::{Clock, PacketDriver};
//!
//! let (mut near, mut far) = loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
//! let mut frame = vec![0; 64];
//! frame[..6].copy_from_slice(&far.capabilities().mac);
//! let mut to_send = Some(&frame);
//! let mut clock = Clock::start();
//! // A source writes each frame into the driver's buffer, and `None` ends the burst.
//! let sent = near.tx_burst(clock.now(), &mut |buffer: &mut [u8]| {
//!     let frame = to_send.take()?;
//!     buffer[..frame.len()].copy_from_slice(frame);
//!     Some(frame.len())
//! })?;
//! let mut received = Vec::new();
//! far.rx_burst(clock.now(), &mut |frame: &[u8]| received.push(frame.to_vec()))?;
//! assert_eq!((sent, received), (1, vec![frame]));
//! # Ok::<(), ferroce_driver::Error>(())
//! ```
//!
//! Beside the drivers: [`memory`], what is registered with a context; [`rnic`], which finds cards that speak RoCE themselves, and is no
//! driver; [`gpu`], whose memory may be registered too, and [`reduction`]; [`topology`], how far both are from the CPUs; [`netlink`], [`credentials`], [`echo`] and [`holder`], which ask the kernel, and a peer's. [`shared`] (a ring between
//! two processes), [`cycles`] and [`machine`] are for benchmarks, [`heap`] for large simulations.

#[cfg(feature = "af_xdp")]
pub mod af_xdp;
mod crc;
pub mod credentials;
pub mod cycles;
pub mod dpdk;
pub mod echo;
mod error;
mod frame;
pub mod gpu;
pub mod heap;
pub mod holder;
mod icmp;
mod kept;
pub mod loopback;
pub mod machine;
mod membership;
pub mod memory;
mod neighbour;
pub mod netlink;
mod next_hop;
pub mod pcap;
mod prefetch;
mod printable;
pub mod private_directory;
mod readiness;
pub mod reduction;
pub mod rnic;
mod sealed;
pub mod segment;
pub mod shared;
pub mod shm;
pub mod sim;
mod slots;
mod time;
pub mod topology;
pub mod udp;
pub mod user_ids;
mod waker;
mod wrapper;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

pub use crc::Crc32;
pub use error::Error;
pub use frame::{
    EitherSource, FilteredSink, FilteredSource, FrameSink, FrameSource, Gathered, Placed, Room, Sent,
    TAIL_MAX,
};
pub use kept::{Icrc, KeptFrame, RxFrame};
pub use membership::Membership;
pub use memory::{Held, Memory, MemoryError, MemoryKind, Payload, Piece, Pinned, Span, SpanMut};
pub use next_hop::{NextHop, Refusal, RefusalReason};
pub use prefetch::prefetch;
#[doc(hidden)]
pub use printable::is_unprintable;
pub use readiness::Readiness;
pub use shm::SharedMemory;
pub use time::{Clock, Nanos};
pub use wrapper::Wrapper;

/// A poll-mode port: frames out, frames in, nothing else.
///
/// The methods are called once a burst, so a `Box<dyn PacketDriver>` costs nothing that matters.
/// A driver owns its frame memory; the engine reads and writes frames in place. A driver around another one
/// implements [`Wrapper`] instead.
pub trait PacketDriver: Send {
    /// What the port is and can do. Constant for the life of the driver.
    fn capabilities(&self) -> &Capabilities;

    /// Bits a second that the port's link carries now, as the port tells; `None` where it does not.
    fn line_rate(&self) -> Option<u64> {
        None
    }

    /// Hands the frames that have arrived (a burst of them at most) to `sink`, in order of
    /// arrival, and returns how many there were. A frame is borrowed for the call only and is
    /// recycled after it, unless the sink [keeps](RxFrame::keep) it; it starts at [`Capabilities::layer`] and has no
    /// FCS.
    ///
    /// # Errors
    /// Only when the port is gone for good (interface removed, socket dead).
    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error>;

    /// How many received frames may be [kept](RxFrame::keep) at once. The port has enough memory beside them to go on
    /// receiving.
    fn keeps(&self) -> usize {
        0
    }

    /// Asks `source` for frames until it has none or the port takes no more, sends them and returns
    /// how many there were. `source` is not asked when there is no room, so nothing that it writes
    /// is lost.
    ///
    /// # Errors
    /// Only when the port is gone for good.
    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error>;

    /// Blocks until a frame may have arrived, the [`waker`](PacketDriver::waker) is used or `timeout`
    /// has passed, whichever is first. It may end early; it may not outlast the port: a port that goes
    /// away under it is told within a second, however long `timeout` is.
    ///
    /// # Errors
    /// Only when the port is gone for good.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;

    /// What another thread ends [`wait`](PacketDriver::wait) with. Used while nobody waits, it ends the
    /// next wait. `None` where a wait can't be ended: whoever has more to look after than frames must
    /// keep waits short then.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Readies the port for a wait outside of it, by epoll or an asynchronous runtime, and says what to wait for: see
    /// [`Readiness`], which does all of it. Such a wait ends as [`wait`](PacketDriver::wait) does.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a driver that has nothing to wait for; when the port is gone for good.
    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        Err(Error::Unsupported { driver: self.capabilities().driver, what: "waiting for it from outside" })
    }

    /// Ends what [`arm`](PacketDriver::arm) has begun, before the next burst: the descriptor is not readable any longer
    /// because the waker was used.
    fn disarm(&mut self) {}

    /// The hardware address to which frames for `peer` go: its own on the same link, the
    /// gateway's otherwise. Never blocks: the first call asks for an address that is not known, and later
    /// calls look whether the answer has come.
    ///
    /// # Errors
    /// [`Error::NoRoute`] at once; [`Error::NoNeighbour`] as soon as it is known that nobody answers.
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error>;

    /// As [`resolve`](PacketDriver::resolve), in a VLAN on the interface: whoever is asked is in it too.
    ///
    /// # Errors
    /// As [`resolve`](PacketDriver::resolve); [`Error::NoVlan`] where the kernel is asked and has no interface of the
    /// VLAN; [`Error::Unsupported`] for a driver that asks by itself, without a tag.
    fn resolve_in_vlan(&mut self, vlan: u16, peer: IpAddr) -> Result<NextHop, Error> {
        let _ = (vlan, peer);
        Err(Error::no_vlans(self.capabilities()))
    }

    /// As [`resolve`](PacketDriver::resolve), for programs that have nothing else to do meanwhile: blocks until
    /// the next hop is found, for `timeout` at most.
    ///
    /// # Errors
    /// As [`resolve`](PacketDriver::resolve); [`Error::NoNeighbour`] after `timeout`.
    fn resolve_blocking(&mut self, peer: IpAddr, timeout: Duration) -> Result<[u8; 6], Error> {
        // A time too far away to be told is none.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            match self.resolve(peer)? {
                NextHop::Found(mac) => return Ok(mac),
                NextHop::Pending if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    thread::sleep(RESOLVE_PAUSE);
                }
                NextHop::Pending => return Err(Error::no_neighbour(peer, &self.capabilities().interface)),
            }
        }
    }

    /// The next word of the network on a packet that was not delivered. Never blocks. A port that hears of none
    /// has none; MADs are what a port should hear of.
    fn next_refusal(&mut self) -> Option<Refusal> {
        None
    }

    /// Lets frames to another address of this port come in, beside those of its [`capabilities`](PacketDriver::capabilities).
    /// A port that hears every address need do nothing.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    fn admit(&mut self, address: IpAddr) -> Result<(), Error> {
        let _ = address;
        Ok(())
    }

    /// Lets frames to a multicast group come in. A port that hears every group need do nothing.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    fn join(&mut self, group: IpAddr) -> Result<(), Error> {
        let _ = group;
        Ok(())
    }

    /// Ends [`join`](PacketDriver::join).
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    fn leave(&mut self, group: IpAddr) -> Result<(), Error> {
        let _ = group;
        Ok(())
    }

    /// Lets requests for a service of the connection manager come in. A port that hears every request need do nothing. Where
    /// processes share an address, it waits while another one comes or goes: for ten seconds at most, if that is stopped.
    ///
    /// # Errors
    /// [`Error::ServiceInUse`] where another process on the port's address has it; [`Error::Sharing`].
    fn listen(&mut self, service: u64) -> Result<(), Error> {
        let _ = service;
        Ok(())
    }

    /// Ends [`listen`](PacketDriver::listen).
    fn unlisten(&mut self, service: u64) {
        let _ = service;
    }

    /// Frames and bytes so far, and losses that the driver knows of.
    fn stats(&self) -> Stats;
}

/// How long [`PacketDriver::resolve_blocking`] sleeps between two looks.
const RESOLVE_PAUSE: Duration = Duration::from_millis(1);

/// What ends a wait for a port from outside.
#[derive(Clone, Copy, Debug)]
pub struct Armed<'a> {
    /// Readable when a frame may have arrived, and when the [`waker`](PacketDriver::waker) has been used since the last
    /// [`disarm`](PacketDriver::disarm). It stays the same for the life of the driver. `None` for a driver that must be polled.
    pub fd: Option<BorrowedFd<'a>>,
    /// The longest time to wait. After it the port must be polled even if `fd` is not readable. Zero means: do not wait.
    pub longest: Duration,
}

/// The layer at which the frames of a driver start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Whole Ethernet frames, without FCS.
    Ethernet,
    /// IP packets, without a link header. The kernel makes the IP and UDP headers: of a packet to
    /// send the driver takes addresses, TOS, TTL and UDP source port; of a received one it writes
    /// anew what the kernel tells, and the IPv4 identification, which it doesn't tell, is a guess ([`Icrc::Guessed`]).
    Ip(SocketTerms),
}

/// What a socket of the kernel demands of those who use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct SocketTerms {
    /// The UDP source port of all packets, which the ICRC covers.
    pub source_port: u16,
    /// Bytes that wait in the socket at most, about twice the packets' own; what finds no room is
    /// lost.
    pub receive_buffer: usize,
}

impl SocketTerms {
    /// A socket in which `receive_buffer` bytes may wait.
    pub fn new(source_port: u16, receive_buffer: usize) -> SocketTerms {
        SocketTerms { source_port, receive_buffer }
    }
}

/// What a port is and can do.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Capabilities {
    /// The driver's name as `--device` spells it: `af_xdp`, `loopback`, `sim`.
    pub driver: &'static str,
    /// One line for people: mode chosen, and why not the better one.
    pub description: String,
    /// Interface (or port) name.
    pub interface: String,
    /// Where its frames start.
    pub layer: Layer,
    /// The port's own hardware address.
    pub mac: [u8; 6],
    /// The port's own IP addresses, IPv6 link-local ones included, in GID-table order.
    pub addresses: Vec<IpAddr>,
    /// Largest IP packet, in bytes (the interface's MTU).
    pub mtu: u32,
    /// Largest frame that `tx_burst` takes, in bytes, Ethernet header included.
    pub max_frame: usize,
    /// `(rest, divisor)`: queue pair numbers leave this rest by this divisor. By it packets come to the right one of the
    /// contexts that share an address, and a sender tells that several may.
    pub qpns: (u32, u32),
    /// The same of communication ids: by it contexts that share an address share its QP1.
    pub comm_ids: (u32, u32),
}

impl Capabilities {
    /// A port of Ethernet frames for IP packets of up to `mtu` bytes, without addresses.
    pub fn new(driver: &'static str, interface: impl Into<String>, mac: [u8; 6], mtu: u32) -> Capabilities {
        Capabilities {
            driver,
            description: String::new(),
            interface: interface.into(),
            layer: Layer::Ethernet,
            mac,
            addresses: Vec::new(),
            mtu,
            max_frame: mtu as usize + ETHERNET_HEADER + VLAN_TAG,
            qpns: (0, 1),
            comm_ids: (0, 1),
        }
    }

    /// One line for people: mode chosen, and why not the better one; empty by default.
    pub fn description(self, description: impl Into<String>) -> Self {
        Capabilities { description: description.into(), ..self }
    }

    /// Where its frames start; [`Layer::Ethernet`] by default.
    pub fn layer(self, layer: Layer) -> Self {
        Capabilities { layer, ..self }
    }

    /// The port's own IP addresses, in GID-table order; none by default.
    pub fn addresses(self, addresses: Vec<IpAddr>) -> Self {
        Capabilities { addresses, ..self }
    }

    /// Largest frame that `tx_burst` takes, in bytes; by default an Ethernet header with a VLAN tag, and the MTU.
    /// A context wants no less of a port that starts at Ethernet.
    pub fn max_frame(self, max_frame: usize) -> Self {
        Capabilities { max_frame, ..self }
    }

    /// `(rest, divisor)` of its queue pair numbers; `(0, 1)`, all of them, by default.
    pub fn qpns(self, qpns: (u32, u32)) -> Self {
        Capabilities { qpns, ..self }
    }

    /// `(rest, divisor)` of its communication ids; `(0, 1)`, all of them, by default.
    pub fn comm_ids(self, comm_ids: (u32, u32)) -> Self {
        Capabilities { comm_ids, ..self }
    }
}

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET_HEADER: usize = 14;
/// Bytes of an 802.1Q tag.
pub(crate) const VLAN_TAG: usize = 4;

/// The UDP port of RoCEv2.
pub(crate) const ROCE_PORT: u16 = 4791;

/// Frames and bytes since the driver was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Frames handed to `sink`.
    pub rx_frames: u64,
    /// Bytes of those.
    pub rx_bytes: u64,
    /// Frames that arrived and were lost before `rx_burst` (ring full, no buffer).
    pub rx_dropped: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes of those.
    pub tx_bytes: u64,
    /// Frames taken by `tx_burst` that the port failed to send.
    pub tx_dropped: u64,
    /// Frames for another process on the address that came to this one and were handed on.
    pub handed_on: u64,
    /// Of the frames sent, those that went to another process of this host by shared memory.
    pub tx_by_memory: u64,
    /// Of the frames received, those that came so.
    pub rx_by_memory: u64,
    /// Of both, those without an ICRC.
    pub without_icrc: u64,
    /// Entries of the device's rings that name no buffer which it had, and rings in shared memory in which another process
    /// has written what can't be: they were ignored. More than none is a fault of who wrote them.
    pub bad_descriptors: u64,
}

impl Stats {
    /// Each number with its name, as the kernel's statistics of an interface have it, and what it counts.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let Stats {
            rx_frames,
            rx_bytes,
            rx_dropped,
            tx_frames,
            tx_bytes,
            tx_dropped,
            handed_on,
            tx_by_memory,
            rx_by_memory,
            without_icrc,
            bad_descriptors,
        } = *self;
        [
            ("rx_packets", "Frames that the driver has received.", rx_frames),
            ("rx_bytes", "Bytes of those.", rx_bytes),
            ("rx_dropped", "Frames lost on the way in: no buffer, ring full.", rx_dropped),
            ("tx_packets", "Frames that the driver has sent.", tx_frames),
            ("tx_bytes", "Bytes of those.", tx_bytes),
            ("tx_dropped", "Frames that the port failed to send.", tx_dropped),
            (
                "handed_on",
                "Frames for another process on the address, which were handed on to it.",
                handed_on,
            ),
            ("tx_by_memory", "Frames sent to another process of this host by shared memory.", tx_by_memory),
            (
                "rx_by_memory",
                "Frames received from another process of this host by shared memory.",
                rx_by_memory,
            ),
            ("without_icrc", "Frames sent and received by shared memory without an ICRC.", without_icrc),
            ("bad_descriptors", "Ring entries that name no buffer which the device had.", bad_descriptors),
        ]
        .into_iter()
    }
}
