//! Packet drivers and memory of [ferroce](https://docs.rs/ferroce), a RoCEv2 stack in user space.
//!
//! Applications use the crate `ferroce`, which re-exports this one as `ferroce::driver`. Use it directly to send and receive
//! whole frames in user space: for a tool of your own, or to write another driver ([`PacketDriver`]) or one around a driver
//! ([`Wrapper`]). All `unsafe` code and FFI of the stack is in this crate. A driver does not depend on RoCE except for UDP port
//! 4791; the engine does not depend on sockets, rings and file descriptors.
//!
//! | driver | description |
//! |---|---|
//! | [`loopback`] | pairs and small switches of ports inside one process, usable across threads |
//! | [`sim`] | virtual time, seeded: loss, duplication, reorder, corruption, delay, rate, ECN; fabrics of switches |
//! | `af_xdp` | AF_XDP sockets on a real interface; feature `af_xdp`, which needs clang, libclang, m4, libelf and zlib headers at build time |
//! | [`udp`] | a UDP socket, which needs no privilege |
//! | [`shm`] | shared memory between processes of one user on this host |
//! | [`dpdk`] | ports of DPDK: cards bound to user space, virtual devices; loaded at run time |
//! | [`pcap`] | a recorder that wraps any driver, and a reader of captures |
//!
//! Sending a frame from one port to another:
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
//! Besides the drivers: [`memory`], which is registered with a context; [`rnic`], which finds RoCE cards and is no driver;
//! [`gpu`], whose memory may be registered too, and [`reduction`]; [`topology`], the distances of both from the CPUs;
//! [`netlink`], [`credentials`], [`echo`] and [`holder`], which query the kernel, and a peer's. [`shared`] (a ring between two
//! processes), [`cycles`] and [`machine`] are for benchmarks, [`heap`] for large simulations. Where the IP packet of a frame is, and
//! its DSCP: `sim/ip.rs`.

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

/// A poll-mode port: it sends and receives frames, and nothing else.
///
/// The methods are called once per burst, so the cost of a `Box<dyn PacketDriver>` is negligible. A driver owns its frame memory;
/// the engine reads and writes frames in place. A driver around another one implements [`Wrapper`] instead.
pub trait PacketDriver: Send {
    /// Properties and capabilities of the port. Constant for the life of the driver.
    fn capabilities(&self) -> &Capabilities;

    /// The current bit rate of the port's link, as reported by the port; `None` if unknown.
    fn line_rate(&self) -> Option<u64> {
        None
    }

    /// Passes the received frames (at most a burst) to `sink`, in order of arrival, and returns their number. A frame is borrowed
    /// only for the call and is recycled after it, unless the sink [keeps](RxFrame::keep) it; it starts at
    /// [`Capabilities::layer`] and has no FCS.
    ///
    /// # Errors
    /// Only when the port is gone for good (interface removed, socket dead).
    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error>;

    /// How many received frames may be [kept](RxFrame::keep) at once. The port has enough additional memory to receive.
    fn keeps(&self) -> usize {
        0
    }

    /// Asks `source` for frames until it has none or the port is full, sends them and returns their number. `source` is not asked
    /// when there is no room, so nothing that it writes is lost.
    ///
    /// # Errors
    /// Only when the port is gone for good.
    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error>;

    /// Blocks until a frame may have arrived, the [`waker`](PacketDriver::waker) is used or `timeout` has passed, whichever is
    /// first. It may end early. If the port disappears, it must end within a second, however long `timeout` is.
    ///
    /// # Errors
    /// Only when the port is gone for good.
    fn wait(&mut self, timeout: Duration) -> Result<(), Error>;

    /// The waker with which another thread ends [`wait`](PacketDriver::wait). Used while there is no wait, it ends the next one.
    /// `None` if a wait can't be ended: callers with other work than frames must then keep waits short.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Prepares the port for a wait by epoll or an asynchronous runtime, and returns the descriptor to wait for: see
    /// [`Readiness`], which does all of it. Such a wait ends as [`wait`](PacketDriver::wait) does.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a driver without a descriptor; when the port is gone for good.
    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        Err(Error::Unsupported { driver: self.capabilities().driver, what: "waiting for it from outside" })
    }

    /// Reverses [`arm`](PacketDriver::arm), before the next burst: an earlier use of the waker no longer makes the descriptor
    /// readable.
    fn disarm(&mut self) {}

    /// The destination hardware address of frames for `peer`: the peer's own on the same link, the gateway's otherwise. Does not
    /// block: the first call starts the resolution of an unknown address, and later calls check for its result.
    ///
    /// # Errors
    /// [`Error::NoRoute`] at once; [`Error::NoNeighbour`] as soon as the resolution has failed.
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error>;

    /// As [`resolve`](PacketDriver::resolve), in a VLAN on the interface: ARP and ND use that VLAN too.
    ///
    /// # Errors
    /// As [`resolve`](PacketDriver::resolve); [`Error::NoVlan`] if the kernel resolves and has no interface of the VLAN;
    /// [`Error::Unsupported`] for a driver that resolves itself, without a tag.
    fn resolve_in_vlan(&mut self, vlan: u16, peer: IpAddr) -> Result<NextHop, Error> {
        let _ = (vlan, peer);
        Err(Error::no_vlans(self.capabilities()))
    }

    /// As [`resolve`](PacketDriver::resolve), for programs that have nothing else to do meanwhile: blocks until the next hop is
    /// found, for at most `timeout`.
    ///
    /// # Errors
    /// As [`resolve`](PacketDriver::resolve); [`Error::NoNeighbour`] after `timeout`.
    fn resolve_blocking(&mut self, peer: IpAddr, timeout: Duration) -> Result<[u8; 6], Error> {
        // A time too far away to represent is no limit.
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

    /// The next error message of the network about a packet that was not delivered. Does not block. A port that gets no such
    /// messages returns none; it should at least get those for MADs.
    fn next_refusal(&mut self) -> Option<Refusal> {
        None
    }

    /// Receives frames to another address of this port, besides those of its [`capabilities`](PacketDriver::capabilities). A port
    /// that receives all addresses need do nothing.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    fn admit(&mut self, address: IpAddr) -> Result<(), Error> {
        let _ = address;
        Ok(())
    }

    /// Receives frames to a multicast group. A port that receives all groups need do nothing.
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

    /// Receives requests for a service of the connection manager. A port that receives all requests need do nothing. If processes
    /// share an address, it waits while another one joins or leaves: at most ten seconds, if that process is stopped.
    ///
    /// # Errors
    /// [`Error::ServiceInUse`] if another process on the port's address listens for it; [`Error::Sharing`].
    fn listen(&mut self, service: u64) -> Result<(), Error> {
        let _ = service;
        Ok(())
    }

    /// Ends [`listen`](PacketDriver::listen).
    fn unlisten(&mut self, service: u64) {
        let _ = service;
    }

    /// Frames and bytes so far, and losses known to the driver.
    fn stats(&self) -> Stats;
}

/// How long [`PacketDriver::resolve_blocking`] sleeps between two checks.
const RESOLVE_PAUSE: Duration = Duration::from_millis(1);

/// The descriptor and the time limit of a wait for a port from outside.
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
    /// IP packets, without a link header. The kernel writes the IP and UDP headers: of a packet to send the driver uses
    /// addresses, TOS, TTL and UDP source port; of a received one it reconstructs the headers from what the kernel reports,
    /// except the IPv4 identification, which is a guess ([`Icrc::Guessed`]).
    Ip(SocketTerms),
}

/// Requirements of a kernel socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct SocketTerms {
    /// The UDP source port of all packets, which the ICRC covers.
    pub source_port: u16,
    /// The most bytes queued in the socket, about twice the packets' own; packets that do not fit are lost.
    pub receive_buffer: usize,
}

impl SocketTerms {
    /// A socket that can queue `receive_buffer` bytes.
    pub fn new(source_port: u16, receive_buffer: usize) -> SocketTerms {
        SocketTerms { source_port, receive_buffer }
    }
}

/// Properties and capabilities of a port.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Capabilities {
    /// The driver's name as `--device` spells it: `af_xdp`, `loopback`, `sim`.
    pub driver: &'static str,
    /// One line for users: the chosen mode, and why not a better one.
    pub description: String,
    /// Interface (or port) name.
    pub interface: String,
    /// The layer at which its frames start.
    pub layer: Layer,
    /// The port's own hardware address.
    pub mac: [u8; 6],
    /// The port's own IP addresses, IPv6 link-local ones included, in GID-table order.
    pub addresses: Vec<IpAddr>,
    /// Largest IP packet, in bytes (the interface's MTU).
    pub mtu: u32,
    /// Largest frame for `tx_burst`, in bytes, Ethernet header included.
    pub max_frame: usize,
    /// `(rest, divisor)`: queue pair numbers modulo `divisor` are `rest`. This determines the context of a packet among those
    /// that share an address, and shows a sender that several may share it.
    pub qpns: (u32, u32),
    /// The same for communication IDs, by which contexts that share an address share its QP1.
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

    /// One line for users: the chosen mode, and why not a better one; empty by default.
    pub fn description(self, description: impl Into<String>) -> Self {
        Capabilities { description: description.into(), ..self }
    }

    /// The layer at which its frames start; [`Layer::Ethernet`] by default.
    pub fn layer(self, layer: Layer) -> Self {
        Capabilities { layer, ..self }
    }

    /// The port's own IP addresses, in GID-table order; none by default.
    pub fn addresses(self, addresses: Vec<IpAddr>) -> Self {
        Capabilities { addresses, ..self }
    }

    /// Largest frame for `tx_burst`, in bytes; by default an Ethernet header with a VLAN tag, and the MTU. A context requires at
    /// least this of a port with Ethernet headers.
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
    /// Frames passed to `sink`.
    pub rx_frames: u64,
    /// Bytes of those.
    pub rx_bytes: u64,
    /// Frames that arrived and were lost before `rx_burst` (ring full, no buffer).
    pub rx_dropped: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes of those.
    pub tx_bytes: u64,
    /// Frames accepted by `tx_burst` that the port failed to send.
    pub tx_dropped: u64,
    /// Frames for another process on the address that this one received and forwarded.
    pub handed_on: u64,
    /// Of the frames sent, those to another process of this host by shared memory.
    pub tx_by_memory: u64,
    /// Of the frames received, those by shared memory.
    pub rx_by_memory: u64,
    /// Of both, those without an ICRC.
    pub without_icrc: u64,
    /// Invalid entries of the device's rings, whose buffers it did not own, and rings in shared memory with invalid contents from
    /// another process: they were ignored. Any of them is a fault of the writer.
    pub bad_descriptors: u64,
}

impl Stats {
    /// Each number with its name, as in the kernel's interface statistics, and its help text.
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
            ("rx_bytes", "Bytes of these frames.", rx_bytes),
            ("rx_dropped", "Received frames that were lost: no buffer, ring full.", rx_dropped),
            ("tx_packets", "Frames that the driver has sent.", tx_frames),
            ("tx_bytes", "Bytes of these frames.", tx_bytes),
            ("tx_dropped", "Frames that the port failed to send.", tx_dropped),
            (
                "handed_on",
                "Frames for another process on the address, which were passed on to it.",
                handed_on,
            ),
            ("tx_by_memory", "Frames sent to another process of this host by shared memory.", tx_by_memory),
            (
                "rx_by_memory",
                "Frames received from another process of this host by shared memory.",
                rx_by_memory,
            ),
            ("without_icrc", "Frames sent and received by shared memory without an ICRC.", without_icrc),
            ("bad_descriptors", "Ring entries that name no buffer of the device.", bad_descriptors),
        ]
        .into_iter()
    }
}
