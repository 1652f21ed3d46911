//! DPDK ports: network cards bound to user space, and virtual devices. The first port that is opened loads the system's libdpdk.
//!
//! The environment (EAL) starts once in a process, with the application's arguments: devices (`--vdev`, `-a`) and memory
//! (`--no-huge`, `-m`). A [`Dpdk`] is one queue pair of one port.
//!
//! Payloads are sent from registered memory if the port's driver reads them with the CPU during the call: net_af_packet, net_tap
//! and net_pcap. There a frame is a chain of the header, the payload as an external buffer, and the trailer. Other
//! ports get a copy: a memif is faster with it, the peer of a net_ring would receive the buffer itself, a net_null has
//! no reader, and a card would need the memory mapped for its DMA.
//!
//! A port without a kernel interface has the configured addresses. The driver itself sends and answers ARP and
//! neighbour discovery (`neighbour.rs`), unless the kernel also receives every frame. This costs RoCE over IPv4 one
//! comparison.
//!
//! There are no receive interrupts: an idle port sleeps 50 µs at a time.
//!
//! # memif
//!
//! The client of a memif tries to connect to its server for 10 s when it is opened. DPDK 22.11 has two bugs here:
//!
//! - A client that ends before its server has answered makes the server panic: if a server has accepted a client that
//!   has ended meanwhile, it closes a descriptor that stays registered. So a client waits at least 2 s before it gives
//!   up a start.
//! - When a peer ends, a thread of DPDK unmaps the shared memory, and a poll at that moment can cause a segmentation fault. First
//!   stop polling at one end, then drop the port of the other end first.

mod eal;
mod kept;
mod kind;
mod mbuf;
mod port;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_dpdk_sys as sys;
use tracing::info;

use crate::icmp;
use crate::neighbour::{Neighbours, Search};
use crate::netlink::gid_order;
use crate::{
    Armed, Capabilities, Error, FrameSink, FrameSource, Gathered, Nanos, NextHop, PacketDriver, Payload,
    Refusal, RxFrame, Stats, TAIL_MAX,
};
use kept::{KEPT_MAX, Kept};
use mbuf::{BURST, Buffer, HEAD_ROOM, Outbox, Spare, chain};
use port::{BACKLOG, EthDevice, NeighbourSource};

/// Loads DPDK and its shim, like the first open.
///
/// # Errors
/// [`Error::NoDpdk`] with what is missing.
pub fn load() -> Result<(), Error> {
    eal::load().map(drop)
}

/// The port to open.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct DpdkConfig {
    /// EAL's arguments, without a program name. Those of the first open in a process are used; later ones must be the
    /// same or empty.
    pub eal: Vec<String>,
    /// The port: a virtual device's name (`net_memif0`) or a PCI address (`0000:03:00.0`).
    pub port: String,
    /// The port's addresses with prefix lengths. If empty, those of the kernel interface of the port (net_af_packet,
    /// net_af_xdp).
    pub addresses: Vec<(IpAddr, u8)>,
    /// Largest IP packet. `None` is the port's own MTU; without a link, 9000 or the largest that fits.
    pub mtu: Option<u32>,
    /// Entries of a receive queue, adjusted to the port's limits. Virtual devices have arguments for it.
    pub rx_descriptors: u16,
    /// Entries of a transmit queue, adjusted likewise.
    pub tx_descriptors: u16,
}

impl DpdkConfig {
    /// A port with sizes that cause no loss between two busy cores.
    pub fn new(port: impl Into<String>, addresses: &[(IpAddr, u8)]) -> DpdkConfig {
        DpdkConfig {
            eal: Vec::new(),
            port: port.into(),
            addresses: addresses.to_vec(),
            mtu: None,
            rx_descriptors: 4096,
            tx_descriptors: 1024,
        }
    }

    /// EAL's arguments, without a program name; none by default.
    pub fn eal(self, eal: Vec<String>) -> Self {
        DpdkConfig { eal, ..self }
    }

    /// Largest IP packet in bytes; the port's own by default.
    pub fn mtu(self, mtu: impl Into<Option<u32>>) -> Self {
        DpdkConfig { mtu: mtu.into(), ..self }
    }

    /// Entries of a receive queue; 4096 by default.
    pub fn rx_descriptors(self, rx_descriptors: u16) -> Self {
        DpdkConfig { rx_descriptors, ..self }
    }

    /// Entries of a transmit queue; 1024 by default.
    pub fn tx_descriptors(self, tx_descriptors: u16) -> Self {
        DpdkConfig { tx_descriptors, ..self }
    }
}

/// A queue pair of a port.
#[derive(Debug)]
pub struct Dpdk {
    capabilities: Capabilities,
    /// A frame received in several segments.
    scratch: Box<[u8]>,
    received: [*mut sys::Mbuf; BURST],
    frames: [sys::Frame; BURST],
    /// Frames received while there was no sink.
    backlog: VecDeque<(*mut sys::Mbuf, sys::Frame)>,
    outbox: Outbox,
    spare: Spare,
    heads: Spare,
    segments: Spare,
    kept: Kept,
    /// Errors for packets that were not delivered.
    refusals: VecDeque<Refusal>,
    stats: Stats,
    queue: u16,
    // Last, because the fields above hold its buffers.
    port: Arc<EthDevice>,
}

// SAFETY: the buffers belong to the driver until it hands them over, and a queue may be used by any thread, one at a
// time.
unsafe impl Send for Dpdk {}

impl Dpdk {
    /// Opens queue 0 of the port, which then is its only one.
    ///
    /// # Errors
    /// [`Error::NoDpdk`] if this system has no DPDK or no shim for it; [`Error::Invalid`] for EAL arguments that DPDK refuses or
    /// that differ from the first ones, a port that does not exist or is already open, an unsupported MTU, missing addresses;
    /// [`Error::InterfaceDown`]; [`Error::Os`] with DPDK's error.
    pub fn open(config: &DpdkConfig) -> Result<Dpdk, Error> {
        let port = Arc::new(EthDevice::start(config, 1)?);
        Dpdk::on_queue(port, 0)
    }

    /// Opens the port with several queues, for one context each. If the port can hash, frames are spread by their UDP
    /// ports. Other frames (ARP) are received by the first queue, which must be polled.
    ///
    /// # Errors
    /// As [`open`](Dpdk::open).
    pub fn open_queues(config: &DpdkConfig, queues: u16) -> Result<Vec<Dpdk>, Error> {
        let port = Arc::new(EthDevice::start(config, queues)?);
        (0..queues).map(|queue| Dpdk::on_queue(port.clone(), queue)).collect()
    }

    fn on_queue(port: Arc<EthDevice>, queue: u16) -> Result<Dpdk, Error> {
        eal::enter();
        let description = port.describe(queue);
        info!(port = port.name, "dpdk: {description}");
        let addresses = gid_order(&port.addresses);
        let (mtu, max_frame) = (port.mtu, port.max_frame());
        Ok(Dpdk {
            capabilities: Capabilities::new("dpdk", &port.name, port.mac, mtu)
                .description(description)
                .addresses(addresses)
                .max_frame(max_frame),
            scratch: vec![0; max_frame].into(),
            received: [ptr::null_mut(); BURST],
            frames: [sys::Frame::default(); BURST],
            backlog: VecDeque::with_capacity(BACKLOG),
            outbox: Outbox::new(port.shim),
            spare: Spare::new(port.shim),
            heads: Spare::new(port.shim),
            segments: Spare::new(port.shim),
            kept: Kept::new(port.clone()),
            refusals: VecDeque::with_capacity(Refusal::KEPT_MAX),
            stats: Stats::default(),
            queue,
            port,
        })
    }

    /// Receives a burst from the port, or takes one from the backlog. Returns the number of frames.
    #[inline]
    fn receive(&mut self) -> usize {
        if self.backlog.is_empty() {
            return self.poll_port();
        }
        let n = self.backlog.len().min(BURST);
        for (at, (mbuf, frame)) in self.backlog.drain(..n).enumerate() {
            self.received[at] = mbuf;
            self.frames[at] = frame;
        }
        n
    }

    #[inline]
    fn poll_port(&mut self) -> usize {
        let (mbufs, frames) = (self.received.as_mut_ptr(), self.frames.as_mut_ptr());
        // SAFETY: the port runs and has this queue, which only this driver uses. There is room for a burst.
        usize::from(unsafe {
            (self.port.shim.rx_burst)(self.port.id, self.queue, mbufs, frames, BURST as u16)
        })
    }

    /// Appends received frames to the backlog while there is room, and processes ARP, ND and ICMP. Returns whether any
    /// frames were received.
    fn set_aside(&mut self) -> bool {
        let n = self.poll_port();
        for at in 0..n {
            let (mut mbuf, frame) = (self.received[at], self.frames[at]);
            // SAFETY: the segment is in the buffer, which belongs to the driver until it is freed below.
            let bytes = unsafe { std::slice::from_raw_parts(frame.data, frame.segment as usize) };
            if self.concerns(bytes) {
                self.deal_with(bytes);
            } else if self.backlog.len() < BACKLOG {
                self.backlog.push_back((mbuf, frame));
                continue;
            } else {
                self.stats.rx_dropped += 1;
            }
            // SAFETY: the buffer is no longer used.
            unsafe { (self.port.shim.give)(&raw mut mbuf, 1) };
        }
        n > 0
    }

    /// Whether the driver processes the frame itself, with [`deal_with`](Dpdk::deal_with).
    #[inline]
    fn concerns(&self, frame: &[u8]) -> bool {
        icmp::concerns(frame) || self.port.link.is_own() && Neighbours::concerns(frame)
    }

    /// Learns from an ARP or ND frame, and answers it. Keeps ICMP errors for
    /// [`next_refusal`](PacketDriver::next_refusal).
    #[cold]
    fn deal_with(&mut self, frame: &[u8]) {
        if icmp::concerns(frame) {
            let refusal = icmp::of_frame(frame).filter(|_| self.refusals.len() < Refusal::KEPT_MAX);
            self.refusals.extend(refusal);
        } else if let NeighbourSource::Own(neighbours) = &self.port.link {
            let answer = lock(neighbours).receive(frame, Instant::now());
            if let Some(answer) = answer {
                self.send_at_once(&answer);
            }
        }
    }

    /// Sends a frame of the driver itself. It is lost if there is no room.
    fn send_at_once(&mut self, frame: &[u8]) {
        let pools = &self.port.queues[usize::from(self.queue)];
        if !self.outbox.flush(self.port.id, self.queue) {
            return;
        }
        if let Some(Buffer { mbuf, room }) = self.spare.peek(&pools.tx) {
            self.spare.used();
            // SAFETY: the room belongs to the driver, and in every pool it is larger than such a frame.
            unsafe {
                ptr::copy_nonoverlapping(frame.as_ptr(), room, frame.len());
                (self.port.shim.set_length)(mbuf, frame.len() as u16);
            }
            self.outbox.push(mbuf);
            self.outbox.flush(self.port.id, self.queue);
        }
    }

    /// The next frame of `source`, in buffers of DPDK; `None` if there is no frame or no buffer.
    #[inline]
    fn load(&mut self, source: &mut dyn FrameSource) -> Option<()> {
        let pools = &self.port.queues[usize::from(self.queue)];
        let max_frame = self.capabilities.max_frame;
        let buffer = self.spare.peek(&pools.tx)?;
        // SAFETY: a buffer of the pool, which belongs to the driver and has room for the largest frame.
        let room = unsafe { std::slice::from_raw_parts_mut(buffer.room, max_frame) };
        let len = match &pools.gather {
            None => source.write(room)?,
            Some(pools) => {
                let (head, [payload, tail]) =
                    (self.heads.peek(&pools.heads)?, self.segments.peek_two(&pools.segments)?);
                // SAFETY: as above. Buffers of this pool have room for a tail.
                let tail_room = unsafe { &mut *tail.room.cast::<[u8; TAIL_MAX]>() };
                let Gathered { head: head_len, tail: tail_len } = source.gather(room, tail_room)?;
                if let Some(pinned) = source.payload().map(Payload::pin) {
                    let len = head_len + pinned.len() + tail_len;
                    assert!(
                        head_len <= HEAD_ROOM && tail_len <= TAIL_MAX && len <= max_frame,
                        "{head_len} + {} + {tail_len} bytes: must be at most {max_frame}",
                        pinned.len()
                    );
                    self.heads.used();
                    self.segments.used();
                    self.segments.used();
                    // SAFETY: the three buffers belong to the driver and are written up to these lengths, the first one
                    // here. Only ports that read with the CPU have such pools.
                    unsafe {
                        ptr::copy_nonoverlapping(room.as_ptr(), head.room, head_len);
                        chain(self.port.shim, head.mbuf, head_len, payload.mbuf, pinned, tail.mbuf, tail_len);
                    }
                    self.count(head.mbuf, len);
                    return Some(());
                }
                head_len
            }
        };
        assert!((1..=max_frame).contains(&len), "a frame of {len} bytes: must be at most {max_frame}");
        self.spare.used();
        // SAFETY: the buffer belongs to the driver, and this many bytes of it are written.
        unsafe { (self.port.shim.set_length)(buffer.mbuf, len as u16) };
        self.count(buffer.mbuf, len);
        Some(())
    }

    #[inline]
    fn count(&mut self, mbuf: *mut sys::Mbuf, len: usize) {
        self.outbox.push(mbuf);
        self.stats.tx_frames += 1;
        self.stats.tx_bytes += len as u64;
    }
}

impl PacketDriver for Dpdk {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        eal::enter();
        let n = self.receive();
        if n == 0 {
            return Ok(0);
        }
        for frame in &self.frames[..n] {
            if frame.segment == frame.length {
                // SAFETY: the only segment of a received frame, which belongs to the driver until it is freed below.
                sink.announce(unsafe { std::slice::from_raw_parts(frame.data, frame.segment as usize) });
            }
        }
        let before = self.stats.rx_frames;
        for at in 0..n {
            let frame = self.frames[at];
            let len = frame.length as usize;
            let bytes = if frame.segment == frame.length {
                // SAFETY: as above.
                unsafe { std::slice::from_raw_parts(frame.data, len) }
            } else if len <= self.scratch.len() {
                // SAFETY: there is room for the frame, and the buffer is not changed before the next frame.
                unsafe {
                    let whole = (self.port.shim.contiguous)(
                        self.received[at],
                        frame.length,
                        self.scratch.as_mut_ptr(),
                    );
                    std::slice::from_raw_parts(whole, len)
                }
            } else {
                self.stats.rx_dropped += 1;
                continue;
            };
            // A port without a filter also delivers frames to other hardware addresses.
            if !bytes.get(..6).is_some_and(|to| to[0] & 1 == 1 || to == self.capabilities.mac) {
                continue;
            }
            if self.concerns(bytes) {
                self.deal_with(bytes);
                continue;
            }
            self.stats.rx_frames += 1;
            self.stats.rx_bytes += len as u64;
            let mbuf = (bytes.as_ptr() != self.scratch.as_ptr()).then_some(self.received[at]);
            let mut keeper = self.kept.keeper(mbuf);
            sink.take(RxFrame::new(bytes, &mut keeper));
            if keeper.lent {
                // A null pointer is ignored when freeing.
                self.received[at] = ptr::null_mut();
            }
        }
        // SAFETY: these buffers were received and are no longer used. Kept ones were replaced by null pointers.
        unsafe { (self.port.shim.give)(self.received.as_mut_ptr(), n as u32) };
        Ok((self.stats.rx_frames - before) as usize)
    }

    fn keeps(&self) -> usize {
        KEPT_MAX as usize
    }

    fn tx_burst(&mut self, _now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        eal::enter();
        let before = self.stats.tx_frames;
        while self.outbox.flush(self.port.id, self.queue) {
            while self.outbox.has_room() && self.load(source).is_some() {}
            let more = !self.outbox.has_room();
            if !self.outbox.flush(self.port.id, self.queue) || !more {
                break;
            }
        }
        Ok((self.stats.tx_frames - before) as usize)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        eal::enter();
        self.outbox.flush(self.port.id, self.queue);
        // A deadline that can't be represented is no limit.
        let deadline = Instant::now().checked_add(timeout);
        while self.backlog.is_empty() && !self.set_aside() {
            let left = deadline.map_or(NAP, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(NAP));
        }
        Ok(())
    }

    /// No descriptor signals frames, so a wait sleeps and checks again.
    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        eal::enter();
        self.outbox.flush(self.port.id, self.queue);
        let is_idle = self.backlog.is_empty() && !self.set_aside();
        Ok(Armed { fd: None, longest: if is_idle { NAP } else { Duration::ZERO } })
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        eal::enter();
        let port = self.port.clone();
        let neighbours = match &port.link {
            NeighbourSource::Kernel { netlink, index } => {
                let netlink = lock(netlink);
                if let Some(looked) = netlink.look_again(*index, peer) {
                    return looked;
                }
                return netlink.resolve(&port::kernel_interface(&netlink, *index)?, peer);
            }
            NeighbourSource::Own(neighbours) => neighbours,
        };
        // A caller that only resolves does not receive, so without this the answer would remain in the port.
        self.set_aside();
        let search = lock(neighbours).seek(peer, Instant::now());
        match search {
            Search::Found(mac) => Ok(NextHop::Found(mac)),
            Search::Ask(question) => {
                self.send_at_once(&question);
                Ok(NextHop::Pending)
            }
            Search::Waiting => Ok(NextHop::Pending),
            Search::Silent => Err(Error::no_neighbour(peer, &port.name)),
            Search::Elsewhere => Err(Error::NoRoute { peer, interface: port.name.clone() }),
        }
    }

    fn resolve_in_vlan(&mut self, vlan: u16, peer: IpAddr) -> Result<NextHop, Error> {
        match &self.port.link {
            NeighbourSource::Kernel { netlink, index } => lock(netlink).resolve_in_vlan(*index, vlan, peer),
            NeighbourSource::Own(_) => Err(Error::no_vlans(self.capabilities())),
        }
    }

    fn next_refusal(&mut self) -> Option<Refusal> {
        self.refusals.pop_front()
    }

    fn line_rate(&self) -> Option<u64> {
        self.port.speed()
    }

    fn stats(&self) -> Stats {
        let mut stats = self.stats;
        // The port's counters are for all its queues, so only one queue reports them.
        if self.queue == 0 {
            let (dropped, failed) = self.port.losses();
            stats.rx_dropped += dropped;
            stats.tx_dropped = failed;
        }
        stats
    }
}

impl Drop for Dpdk {
    fn drop(&mut self) {
        self.outbox.release();
        self.spare.release();
        self.heads.release();
        self.segments.release();
        for (mut mbuf, _) in self.backlog.drain(..) {
            // SAFETY: frames in the backlog belong to the driver.
            unsafe { (self.port.shim.give)(&raw mut mbuf, 1) };
        }
    }
}

/// Ethernet header and one 802.1Q tag, which the MTU does not count.
const FRAME_OVERHEAD: usize = 18;
/// The sleep between two checks of a port without interrupts.
const NAP: Duration = Duration::from_micros(50);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
