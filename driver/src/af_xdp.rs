//! Kernel-bypass sockets on a real interface: AF_XDP, on xsk-rs.
//!
//! An XDP program on the interface directs RoCE (and nothing else) from one receive queue to the
//! socket, so ARP, neighbour discovery and every other protocol of the interface go on working.
//! Frames come and go through rings in shared memory. Native XDP is tried before generic, and
//! zero-copy before copy; [`Capabilities::description`] says what it came to, and why.
//!
//! Nothing stays behind: the program hangs on a bpf link that ends with the last process that
//! has it open, whether that one returns, panics or is killed.
//!
//! # Several queues
//!
//! A port is one queue of its interface. For more cores than one open a port for each queue, with a
//! context of its own; they share the program. The kernel binds a socket to its queue, so no XDP
//! program can hand a frame to another queue's port: what comes to the wrong one meets a context that
//! does not know its queue pair, and is dropped and counted there. So frames must come right:
//!
//! - A network card is told by rules. An address for each context is the simplest, for it needs nothing
//!   of the peers: `ethtool -N eth0 flow-type udp4 dst-ip 10.0.0.2 dst-port 4791 action 1` sends those to
//!   10.0.0.2 to queue 1. Without rules RSS spreads flows by a hash that no context chooses; with one
//!   context, give the interface one queue (`ethtool -L eth0 combined 1`).
//! - A veth delivers to the queue whose number is the sender's, whatever is in the frame: the port on
//!   queue 1 hears that on queue 1 of the other end and nobody else. Both ends need as many queues
//!   (`ip link add … numrxqueues 2 numtxqueues 2`): with fewer at the receiving end, frames of the others
//!   pass the program by and end in the kernel.
//!
//! # Rate or latency on veth
//!
//! As it is, all of a frame's way through a veth, up to the receiver's ring, is run by the sender's
//! system call, and a receiver that spins makes none. That has the least latency. Threaded NAPI takes the
//! second half of the way to a kernel thread on the receiver's core: 1.3 to 1.8 times the rate for frames
//! of 64 to 2106 bytes and nothing for 4154, at ten times the round trip. It is a setting of the
//! interface, which has other users and outlives a process that is killed, and the thread belongs on the
//! core of a loop that the driver does not know; so the driver leaves it to the administrator. At either
//! end:
//!
//! ```sh
//! ethtool -K veth0 gro on                      # else the threads exist only while a port is open
//! echo 1 > /sys/class/net/veth0/threaded
//! for t in $(pgrep '^napi/veth0-'); do taskset -pc 1 $t; done   # the core of the poll loop
//! tc qdisc add dev veth0 root pfifo            # a full veth holds senders back; without, it drops
//! ```
//!
//! The poll loop then has to block when it finds nothing (`Poller::blocking`), for the thread needs the
//! core. `echo 0 > …/threaded`, `tc qdisc del dev veth0 root` and `ethtool -K veth0 gro off` undo it.

mod assembly;
mod attachment;
mod bpf;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod common;
mod filter;
mod frames;
mod layout;
mod membership;
mod rx_chunks;
mod socket;

use std::io;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::task::Waker;
use std::time::Duration;

use tracing::{info, warn};
use xsk_rs::umem::frame::FrameDesc;
use xsk_rs::{CompQueue, FillQueue, RxQueue, TxQueue};

use crate::icmp::IcmpListener;
use crate::netlink::{Interface, Netlink, XdpMode};
use crate::waker::Doorbell;
use crate::{
    Armed, Capabilities, Error, FrameSink, FrameSource, Layer, Nanos, NextHop, PacketDriver, Refusal, Stats,
};
use assembly::Assembly;
use attachment::Attachment;
use frames::{Frames, Pages, TxSlots};
use layout::{FRAME_OVERHEAD, Layout, MAX_CHUNKS_PER_SLOT, check};
use membership::Membership;
use rx_chunks::{Received, RxChunks};
use socket::{Bound, bind, enlarge_send_buffer, prefer_busy_poll, socket_error};

/// What to open.
#[derive(Clone, Debug)]
pub struct AfXdpConfig {
    /// The interface's name.
    pub interface: String,
    /// The receive and transmit queue of the interface; one socket a queue.
    pub queue: u32,
    /// Buffers for received frames, and entries of the rings that hold them: a power of two, 64 to
    /// 65536. Few of them lose frames when the receiver is kept from its core.
    pub rx_frames: u32,
    /// Frames that may be under way to the wire at once, 1 to 1024.
    pub tx_frames: u32,
    /// Whether RoCE v1 (EtherType 0x8915) is received as well.
    pub roce_v1: bool,
    /// Polls the device from `rx_burst` for up to this time instead of waiting for its interrupts.
    /// Helps where the device's interrupts come to the poll loop's own core; does nothing on veth.
    pub busy_poll: Option<Duration>,
}

impl AfXdpConfig {
    /// Queue 0 of the interface, with sizes that lose nothing between two busy cores.
    pub fn new(interface: impl Into<String>) -> AfXdpConfig {
        AfXdpConfig {
            interface: interface.into(),
            queue: 0,
            rx_frames: 8192,
            tx_frames: 1024,
            roce_v1: false,
            busy_poll: None,
        }
    }
}

/// An AF_XDP socket on one queue of an interface.
#[derive(Debug)]
pub struct AfXdp {
    capabilities: Capabilities,
    netlink: Netlink,
    /// The interface's index.
    interface: u32,
    icmp: IcmpListener,
    /// The time of the last burst.
    now: Nanos,
    // Goes first on drop, so that frames which come later go to the kernel.
    _attachment: Attachment,
    rx: RxQueue,
    fill: FillQueue,
    tx: TxQueue,
    completion: CompQueue,
    frames: Frames,
    slots: TxSlots,
    rx_chunks: RxChunks,
    tx_ring: u32,
    /// A burst of descriptors, received or completed.
    burst: Box<[FrameDesc]>,
    /// Descriptors on their way to the transmit ring.
    batch: Box<[FrameDesc]>,
    /// The kernel may not have taken everything from the transmit ring.
    unsent: bool,
    /// A frame in several descriptors, as far as it has come.
    assembly: Assembly,
    busy_poll: bool,
    doorbell: Doorbell,
    membership: Membership,
    stats: Stats,
}

impl AfXdp {
    /// Opens the socket and directs the queue's RoCE frames to it. Needs CAP_NET_RAW,
    /// CAP_NET_ADMIN and CAP_BPF, and enough locked memory for the frames (about 36 MiB by default)
    /// unless it has CAP_IPC_LOCK.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::InterfaceDown`], [`Error::Permission`] (also for the limit
    /// of locked memory), [`Error::QueueBusy`], [`Error::ForeignProgram`], [`Error::Invalid`] for a
    /// parameter out of its range, [`Error::Os`].
    pub fn open(config: &AfXdpConfig) -> Result<AfXdp, Error> {
        let netlink = Netlink::open()?;
        let interface = netlink.interface(&config.interface)?;
        check(config, &interface)?;
        let layout = Layout::new(config, &interface)?;
        raise_memlock_limit();
        let attachment = Attachment::new(&netlink, &interface, config.roce_v1)?;
        let (frames, chunks) = register(&layout, &interface)?;
        let (tx_chunks, rx_chunks) = chunks.split_at(layout.tx_chunks as usize);
        let bound = bind(config, &layout, &interface, &frames, attachment.mode)?;
        let Bound { tx, rx, mut fill, completion, why_copy } = bound;

        // SAFETY: the receive chunks are of this UMEM, disjoint from the transmit ones, and used by
        // nobody. The fill ring has room for all of them.
        let filled = unsafe { fill.produce(rx_chunks) };
        debug_assert_eq!(filled, rx_chunks.len());
        let fd = rx.fd().as_raw_fd();
        // SAFETY: the socket is open as long as its receive ring, which is there beyond the borrow.
        let socket = unsafe { BorrowedFd::borrow_raw(fd) };
        let doorbell = Doorbell::new().and_then(|doorbell| doorbell.watch(socket).map(|()| doorbell));
        let doorbell = doorbell.map_err(|source| os_error("making the doorbell", &interface.name, source))?;
        enlarge_send_buffer(fd, &interface);
        if let Some(time) = config.busy_poll {
            prefer_busy_poll(fd, time)
                .map_err(|source| os_error("asking for busy polling", &interface.name, source))?;
        }
        attachment.direct(config.queue, fd).map_err(|source| {
            os_error("putting the socket into the XDP program's map", &interface.name, source)
        })?;

        let description =
            describe(config, &layout, &interface, &attachment, why_copy.as_deref(), &frames.pages);
        info!(interface = interface.name, "af_xdp: {description}");
        if interface.rx_queues > 1 {
            warn!(
                interface = interface.name,
                "only RoCE frames that the device steers to queue {} of {} arrive here: by a rule for this context's \
                 address, `ethtool -N {} flow-type udp4 dst-ip ADDRESS dst-port 4791 action {}` (a veth keeps the \
                 sender's queue), or have one queue, `ethtool -L {} combined 1`",
                config.queue,
                interface.rx_queues,
                interface.name,
                config.queue,
                interface.name
            );
        }
        if !interface.carrier {
            warn!(interface = interface.name, "the link has no carrier");
        }
        Ok(AfXdp {
            capabilities: Capabilities {
                driver: "af_xdp",
                description,
                interface: interface.name.clone(),
                layer: Layer::Ethernet,
                mac: interface.mac,
                addresses: interface.gid_order(),
                mtu: interface.mtu.min((layout.max_frame - FRAME_OVERHEAD) as u32),
                max_frame: layout.max_frame,
            },
            netlink,
            interface: interface.index,
            icmp: IcmpListener::new(&interface.name),
            now: Nanos::ZERO,
            _attachment: attachment,
            rx,
            fill,
            tx,
            completion,
            slots: TxSlots::new(tx_chunks, layout.chunks_per_slot as usize, layout.umem),
            rx_chunks: RxChunks::new(rx_chunks, layout.umem.frame_size().get() as usize),
            frames,
            tx_ring: layout.tx_ring,
            burst: vec![FrameDesc::default(); BURST].into(),
            // The last frame of a batch may have more than one descriptor.
            batch: vec![FrameDesc::default(); TX_BATCH + MAX_CHUNKS_PER_SLOT].into(),
            unsent: false,
            assembly: Assembly::new(layout.max_frame, layout.umem.frame_size().get() as usize),
            busy_poll: config.busy_poll.is_some(),
            doorbell,
            membership: Membership::new(interface.index, &interface.gid_order()),
            stats: Stats::default(),
        })
    }

    /// How long a wait that begins now may be at most; not at all if frames have arrived.
    fn before_wait(&mut self) -> Result<Duration, Error> {
        self.kick()?;
        if self.rx.nb_avail(1) > 0 {
            return Ok(Duration::ZERO);
        }
        // What the kernel did not take has to be offered again; nothing tells when.
        let waits = self.tx.nb_free_exact() < self.tx_ring;
        Ok(if waits { TX_RETRY } else { LONGEST_SILENCE })
    }

    /// A socket whose interface was removed becomes silent, with the reason set aside.
    fn check_alive(&mut self) -> Result<(), Error> {
        match socket_error(self.rx.fd().as_raw_fd()).map_err(|source| self.gone(source))? {
            0 => Ok(()),
            code => Err(self.gone(io::Error::from_raw_os_error(code))),
        }
    }

    /// Takes back the slots of frames that have left.
    fn reclaim(&mut self) {
        while self.slots.any_in_flight() {
            // SAFETY: the completion ring belongs to the UMEM of `frames`.
            let n = unsafe { self.completion.consume(&mut self.burst) };
            for descriptor in &self.burst[..n] {
                let done = self.slots.complete(descriptor.addr());
                self.stats.bad_descriptors += u64::from(!done);
            }
            if n < self.burst.len() {
                break;
            }
        }
    }

    /// Wakes the kernel while it takes frames from the transmit ring. It takes 32 a call; what it
    /// does not take now (no buffer space) waits for the next call of `tx_burst` or `wait`.
    fn kick(&mut self) -> Result<(), Error> {
        if !self.unsent {
            return Ok(());
        }
        let mut waiting = self.tx_ring - self.tx.nb_free_exact();
        while waiting > 0 && self.tx.needs_wakeup() {
            self.tx.wakeup().map_err(|source| self.gone(source))?;
            let left = self.tx_ring - self.tx.nb_free_exact();
            if left == waiting {
                break;
            }
            waiting = left;
        }
        self.unsent = waiting > 0;
        Ok(())
    }

    /// Takes the chunks of the first `n` descriptors of the burst from the kernel. Returns, a bit each, whose
    /// chunk it had, and which of these can be used.
    fn take(&mut self, n: usize) -> (u64, u64) {
        let (mut ours, mut usable) = (0, 0);
        for (i, descriptor) in self.burst[..n].iter().enumerate() {
            let received = self.rx_chunks.take(descriptor.addr(), descriptor.lengths().data());
            ours |= u64::from(received != Received::Foreign) << i;
            usable |= u64::from(received == Received::Piece) << i;
        }
        self.stats.bad_descriptors += n as u64 - u64::from(usable.count_ones());
        (ours, usable)
    }

    /// Tells the sink what is coming. The frames were written by another core: fetching the headers
    /// of all of them at once takes as long as fetching one.
    fn announce(&self, received: &[FrameDesc], sink: &mut dyn FrameSink) {
        let mut first = !self.assembly.under_way();
        let starts = received.iter().filter(move |d| std::mem::replace(&mut first, !d.has_more_frames()));
        for descriptor in starts.clone() {
            self.frames.prefetch(descriptor.addr());
        }
        for descriptor in starts {
            // SAFETY: the kernel has handed this chunk over, and has not got it back.
            sink.announce(unsafe { self.frames.bytes(descriptor.addr(), descriptor.lengths().data()) });
        }
    }

    /// Gives the kernel the chunks of the first `n` descriptors of the burst, of those that are `ours`.
    fn refill(&mut self, n: usize, ours: u64) {
        let mut kept = 0;
        for i in (0..n).filter(|i| ours >> i & 1 == 1) {
            self.rx_chunks.give_back(self.burst[i].addr());
            self.burst[kept] = self.burst[i];
            kept += 1;
        }
        // SAFETY: these chunks came from this UMEM's receive ring, each once, and are not used any more. The
        // fill ring has two entries for each receive chunk, so there is room.
        let refilled = unsafe { self.fill.produce(&self.burst[..kept]) };
        debug_assert_eq!(refilled, kept);
    }

    /// Lets the kernel look for frames where it does not do so by itself: a driver that sleeps
    /// until woken, or one that is polled instead of interrupting.
    fn drive_receive(&self) -> Result<(), Error> {
        if !self.busy_poll && !self.fill.needs_wakeup() {
            return Ok(());
        }
        let fd = self.rx.fd().as_raw_fd();
        // SAFETY: no memory is passed; a receive of zero bytes only drives the device.
        if unsafe { libc::recv(fd, std::ptr::null_mut(), 0, libc::MSG_DONTWAIT) } < 0 {
            let error = io::Error::last_os_error();
            let passing = [libc::EAGAIN, libc::EBUSY, libc::ENOBUFS, libc::ENETDOWN, libc::EINTR];
            if !error.raw_os_error().is_some_and(|code| passing.contains(&code)) {
                return Err(self.gone(error));
            }
        }
        Ok(())
    }

    fn gone(&self, source: io::Error) -> Error {
        os_error("using the AF_XDP socket (was the interface removed?)", &self.capabilities.interface, source)
    }
}

impl PacketDriver for AfXdp {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.now = now;
        // SAFETY: the receive ring belongs to the UMEM of `frames`.
        let n = unsafe { self.rx.consume(&mut self.burst) };
        if n == 0 {
            self.drive_receive()?;
            return Ok(0);
        }
        let (ours, usable) = self.take(n);
        let all = u64::MAX >> (BURST - n);
        let received = &self.burst[..n];
        if n > 1 && usable == all {
            self.announce(received, sink);
        }
        let before = self.stats.rx_frames;
        for (i, descriptor) in received.iter().enumerate() {
            if usable >> i & 1 == 0 {
                self.assembly.skip(descriptor);
                continue;
            }
            // SAFETY: the kernel had this chunk and has handed it over; it gets it back below.
            let frame = unsafe { self.assembly.add(&mut self.frames, descriptor) };
            let Some(frame) = frame else { continue };
            // A veth (or an interface in promiscuous mode) also delivers frames for others.
            if frame.get(..6).is_some_and(|to| to[0] & 1 == 1 || to == self.capabilities.mac) {
                self.stats.rx_frames += 1;
                self.stats.rx_bytes += frame.len() as u64;
                sink.take(frame);
            }
        }
        // SAFETY: the chunks of this burst are still ours.
        unsafe { self.assembly.let_go(&self.frames) };
        self.refill(n, ours);
        if self.fill.needs_wakeup() {
            self.drive_receive()?;
        }
        Ok((self.stats.rx_frames - before) as usize)
    }

    fn tx_burst(&mut self, _now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let max_frame = self.capabilities.max_frame;
        let before = self.stats.tx_frames;
        loop {
            // Before each batch, for the slots of the last one are still in the cache.
            self.reclaim();
            let mut descriptors = 0;
            while descriptors < TX_BATCH {
                let Some(slot) = self.slots.peek() else { break };
                let Some(len) = source.write(self.slots.buffer(slot, &mut self.frames, max_frame)) else {
                    break;
                };
                assert!((1..=max_frame).contains(&len), "a frame of {len} bytes; at most {max_frame} fit");
                let room = &mut self.batch[descriptors..];
                descriptors += self.slots.fill(slot, len, &mut self.frames, room);
                self.stats.tx_frames += 1;
                self.stats.tx_bytes += len as u64;
            }
            if descriptors > 0 {
                // SAFETY: the descriptors are of slots that were free, in this UMEM, and are marked
                // as in flight now. The ring has an entry for each transmit chunk, so there is room.
                let produced = unsafe { self.tx.produce(&self.batch[..descriptors]) };
                debug_assert_eq!(produced, descriptors);
                self.unsent = true;
            }
            self.kick()?;
            if descriptors < TX_BATCH {
                return Ok((self.stats.tx_frames - before) as usize);
            }
        }
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let longest = self.before_wait()?;
        if longest.is_zero() {
            return Ok(());
        }
        self.doorbell.wait(timeout.min(longest)).map_err(|source| self.gone(source))?;
        self.check_alive()
    }

    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        let longest = self.before_wait()?;
        if !longest.is_zero() {
            self.check_alive()?;
        }
        Ok(Armed { fd: Some(self.doorbell.as_fd()), longest })
    }

    fn disarm(&mut self) {
        self.doorbell.clear();
    }

    fn waker(&self) -> Option<Waker> {
        Some(self.doorbell.waker())
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        if let Some(looked) = self.netlink.look_again(self.interface, peer) {
            return looked;
        }
        // Read anew: addresses come and go.
        let interface = self.netlink.interface(&self.capabilities.interface)?;
        self.netlink.resolve(&interface, peer)
    }

    fn next_refusal(&mut self) -> Option<Refusal> {
        self.icmp.hear(self.now)
    }

    fn join(&mut self, group: IpAddr) -> Result<(), Error> {
        let joined = self.membership.join(group);
        joined.map_err(|source| os_error("joining a multicast group", &self.capabilities.interface, source))
    }

    fn leave(&mut self, group: IpAddr) -> Result<(), Error> {
        let left = self.membership.leave(group);
        left.map_err(|source| os_error("leaving a multicast group", &self.capabilities.interface, source))
    }

    fn stats(&self) -> Stats {
        let mut stats = self.stats;
        // Frames without a buffer are in `rx_dropped`; the count of empty fill rings has them too.
        if let Ok(kernel) = self.rx.fd().xdp_statistics() {
            stats.rx_dropped = self.assembly.dropped() + kernel.rx_dropped() + kernel.rx_ring_full();
            stats.tx_dropped = kernel.tx_invalid_descs();
        }
        stats
    }
}

/// Descriptors taken from a ring at once: as many as a mask has bits.
const BURST: usize = 64;
/// How soon frames that the kernel left in the transmit ring are offered again.
const TX_RETRY: Duration = Duration::from_micros(200);
/// The longest block. The kernel wakes nobody when it takes an interface away, so one has to look.
const LONGEST_SILENCE: Duration = Duration::from_millis(100);
/// Descriptors that the kernel takes from the transmit ring in one call (TX_BATCH_SIZE).
const TX_BATCH: usize = 32;

fn register(layout: &Layout, interface: &Interface) -> Result<(Frames, Vec<FrameDesc>), Error> {
    const WHAT: &str = "registering frame memory";
    let count = NonZeroU32::new(layout.chunks()).unwrap_or(NonZeroU32::MIN);
    Frames::new(layout.umem, count).map_err(|error| {
        let source = os_cause(&error);
        match source.raw_os_error() {
            Some(libc::EPERM) => permission("opening an AF_XDP socket", &interface.name, "CAP_NET_RAW"),
            // xdp_umem_account_pages: over the limit of locked memory.
            Some(libc::ENOBUFS) => {
                let kib = layout.chunks() as usize * layout.umem.frame_size().get() as usize / 1024;
                Error::Permission {
                    what: WHAT,
                    interface: interface.name.clone(),
                    capability: "more locked memory (RLIMIT_MEMLOCK) or CAP_IPC_LOCK",
                    cure: format!(
                        "{kib} KiB are needed: `ulimit -l {kib}`, or lower rx_frames and tx_frames"
                    ),
                }
            }
            _ => os_error(WHAT, &interface.name, source),
        }
    })
}

fn describe(
    config: &AfXdpConfig,
    layout: &Layout,
    interface: &Interface,
    attachment: &Attachment,
    why_copy: Option<&str>,
    pages: &Pages,
) -> String {
    let mode = match attachment.mode {
        XdpMode::Native => "native XDP",
        XdpMode::Generic => "generic XDP",
        XdpMode::Other => "offloaded XDP",
    };
    let copy = if why_copy.is_some() { "copy" } else { "zero-copy" };
    let reasons: Vec<_> = attachment.why_generic.as_deref().into_iter().chain(why_copy).collect();
    let reasons = if reasons.is_empty() { String::new() } else { format!(" ({})", reasons.join("; ")) };
    let jumbo = if layout.multi_buffer() { ", multi-buffer" } else { "" };
    format!(
        "{mode}, {copy}{reasons}, queue {} of {}, {} receive and {} transmit frames{jumbo} on {pages}",
        config.queue, interface.rx_queues, config.rx_frames, config.tx_frames
    )
}

/// Locked memory is limited per user; a process that may raise its limit does.
fn raise_memlock_limit() {
    let unlimited = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: pointers to an `rlimit` each, which outlive the calls.
    unsafe {
        if libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const unlimited) == 0 {
            return;
        }
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        if libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit);
        }
    }
}

/// The system's error behind one of xsk-rs.
fn os_cause(error: &(dyn std::error::Error + 'static)) -> io::Error {
    let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    match cause.and_then(io::Error::raw_os_error) {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::other(error.to_string()),
    }
}

fn os_error(what: &'static str, interface: &str, source: io::Error) -> Error {
    Error::Os { what, interface: interface.to_owned(), source }
}

/// A refusal for want of a capability, with those that the process lacks.
fn permission(what: &'static str, interface: &str, capability: &'static str) -> Error {
    let needed = [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_BPF", 39)];
    let effective = effective_capabilities().unwrap_or(0);
    let missing: Vec<_> =
        needed.iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| *name).collect();
    let missing = if missing.is_empty() {
        "the process has them in its own user namespace only".to_owned()
    } else {
        format!("the process lacks {}", missing.join(", "))
    };
    let cure = format!(
        "{missing}; run as root, or `setcap cap_net_admin,cap_net_raw,cap_bpf,cap_ipc_lock+ep` the program"
    );
    Error::Permission { what, interface: interface.to_owned(), capability, cure }
}

fn effective_capabilities() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}
