//! AF_XDP: kernel-bypass sockets on a real interface, with xsk-rs.
//!
//! An XDP program on the interface redirects RoCE packets, and nothing else, from the receive queues to the sockets of the port.
//! ARP, neighbour discovery and all other protocols of the interface still work. Frames pass through rings in shared memory.
//! Native XDP is tried before generic XDP, and zero-copy before copy; [`Capabilities::description`] has the mode and the reason.
//!
//! The program is attached through a BPF link. The kernel detaches it when the last process that has the link open
//! ends, whether it returns, panics or is killed.
//!
//! # Privileges
//!
//! The first port on an interface needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF, and either CAP_IPC_LOCK or enough
//! locked memory. A further port on the same interface joins the program that is attached. This needs CAP_SYS_ADMIN.
//!
//! # Several queues
//!
//! A port receives from all receive queues of its interface, with one socket for each queue. So the card's hash (RSS) may deliver
//! a frame to any queue. A burst serves the queues in turn and takes at most 64 descriptors; after a full burst the next one
//! begins at the next queue. A frame is sent on the queue that a hash of its UDP source port chooses. RoCEv2 distinguishes flows
//! by this port: the frames of one queue pair stay in order, and those of many queue pairs are spread over the queues. All
//! sockets share one UMEM. Receive chunks belong to one queue, transmit slots to all (docs/decisions/05-all-queues.md).
//!
//! To use more than one core, open a port for each queue ([`AfXdpConfig::queue`]), with a context of its own. These
//! ports share the program. The kernel binds a socket to its queue, so no XDP program can redirect a frame to the port
//! of another queue. A frame on the wrong queue reaches a context that does not know the queue pair, and is dropped and
//! counted there. So each frame must arrive on the right queue:
//!
//! - A network card is configured with rules. The simplest configuration is an address for each context, because the peers need
//!   no configuration: `ethtool -N eth0 flow-type udp4 dst-ip 10.0.0.2 dst-port 4791 action 1` sends packets to 10.0.0.2 to
//!   queue 1.
//! - A veth delivers a frame to the queue with the number of the sender's queue, independent of its contents: the port on queue 1
//!   receives only from queue 1 of the other end.
//!
//! Both ends of a veth need the same number of queues (`ip link add … numrxqueues 4 numtxqueues 4`). If the receiving end has
//! fewer, frames of the other queues bypass the program and go to the kernel.
//!
//! # Rate or latency on veth
//!
//! By default the sender's system call executes the whole path of a frame through a veth, up to the receiver's ring, and a
//! receiver that spins makes no system call. This has the lowest latency. Threaded NAPI moves the second half of the path to a
//! kernel thread on the receiver's core. The rate is then 1.3 to 1.8 times as high for frames of 64 to 2106 bytes and the same
//! for 4154 bytes, with ten times the round trip. It is a setting of the interface, which has other users and outlives a killed
//! process, and the thread must be on the core of a poll loop that the driver does not know. So the driver leaves it to the
//! administrator. At either end:
//!
//! ```sh
//! ethtool -K veth0 gro on                      # else the threads exist only while a port is open
//! echo 1 > /sys/class/net/veth0/threaded
//! for t in $(pgrep '^napi/veth0-'); do taskset -pc 1 $t; done   # the core of the poll loop
//! tc qdisc add dev veth0 root pfifo            # a full veth holds senders back; without, it drops
//! ```
//!
//! The poll loop must then block when it finds nothing (`Poller::blocking`), because the thread needs the core.
//! `echo 0 > …/threaded`, `tc qdisc del dev veth0 root` and `ethtool -K veth0 gro off` undo it.

mod assembly;
mod attachment;
mod bpf;
mod config;
mod filter;
mod frames;
mod layout;
mod queue;
mod reservation;
mod returns;
mod rx_chunks;
mod sharing;
mod socket;

use std::io;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::task::Waker;
use std::time::Duration;

use tracing::{info, warn};
use xsk_rs::umem::frame::FrameDesc;

use crate::icmp::IcmpListener;
use crate::kept::COPIES_MAX;
use crate::membership::Membership;
use crate::netlink::{Interface, Netlink, XdpMode};
use crate::slots::owner;
use crate::waker::Doorbell;
use crate::{
    Armed, Capabilities, Error, FrameSink, FrameSource, Layer, Nanos, NextHop, PacketDriver, Refusal, Stats,
};
use attachment::Attachment;
pub use config::AfXdpConfig;
use filter::{ALL, EVEN};
use frames::{Frames, Pages, TxSlots};
use layout::{FRAME_OVERHEAD, Layout, check};
use queue::Queue;
use reservation::{reserve, warn_of_rxe};
use sharing::Sharing;
use socket::{bind, enlarge_send_buffer, prefer_busy_poll, socket_error};

/// AF_XDP sockets on the queues of an interface.
#[derive(Debug)]
pub struct AfXdp {
    capabilities: Capabilities,
    netlink: Netlink,
    /// The interface's index.
    interface: u32,
    icmp: IcmpListener,
    /// The time of the last burst.
    now: Nanos,
    // Dropped first, so that later frames are passed to the kernel.
    attachment: Attachment,
    _reservation: Vec<OwnedFd>,
    /// For a port on all queues, unless rdma_rxe has UDP port 4791 of all addresses.
    sharing: Option<Box<Sharing>>,
    queues: Box<[Queue]>,
    /// The first queue of the next burst.
    turn: usize,
    /// The number of queues, the first ones, that can also send.
    sending: usize,
    frames: Frames,
    slots: TxSlots,
    /// A burst of descriptors, received or completed.
    burst: Box<[FrameDesc]>,
    doorbell: Doorbell,
    membership: Membership,
    stats: Stats,
}

impl AfXdp {
    /// Opens the sockets and directs the queues' RoCE frames to them. Needs CAP_NET_RAW,
    /// CAP_NET_ADMIN and CAP_BPF, and enough locked memory for the frames (about 36 MiB by default
    /// with up to four queues, 68 MiB with more) unless it has CAP_IPC_LOCK.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::InterfaceDown`], [`Error::Permission`] (also for the limit of locked memory),
    /// [`Error::QueueBusy`], [`Error::ForeignProgram`], [`Error::PortInUse`] if another holder that does not share it, or was
    /// first, has UDP port 4791 of one of the interface's addresses, [`Error::Sharing`], [`Error::Invalid`] for a parameter out
    /// of range and for more than 256 queues, [`Error::Os`].
    pub fn open(config: &AfXdpConfig) -> Result<AfXdp, Error> {
        let netlink = Netlink::open()?;
        let interface = netlink.interface(&config.interface)?;
        check(config, &interface)?;
        let layout = Layout::new(config, &interface)?;
        raise_memlock_limit();
        warn_of_rxe(&interface);
        // A port on one queue has the same addresses as those on the others, and they share nothing else. Missing privileges are
        // detected before joining others.
        let attach = || Attachment::new(&netlink, &interface, config.roce_v1);
        let (attachment, reservation, sharing) = if config.sharing && config.queue.is_none() {
            (attach()?, Vec::new(), Sharing::join(&interface, config.shared_memory)?)
        } else {
            let reservation = reserve(&interface)?;
            (attach()?, reservation, None)
        };
        let (frames, chunks) = register(&layout, &interface)?;
        let (tx_chunks, rx_chunks) = chunks.split_at(layout.tx_chunks as usize);
        let mut why_copy = None;
        let mut queues = Vec::with_capacity(layout.queues.len());
        for (number, chunks) in layout.queues.clone().zip(rx_chunks.chunks_exact(layout.rx_chunks as usize)) {
            let mut bound = bind(number, &layout, &interface, &frames, attachment.mode)?;
            why_copy = why_copy.or(bound.why_copy.take());
            let umem = frames.umem.clone();
            queues.push(Queue::new(number, bound, &layout, chunks, umem, config.busy_poll.is_some()));
        }
        let os = |what| move |source| os_error(what, &config.interface, source);
        let doorbell = Doorbell::new().map_err(os("making the doorbell"))?;
        for queue in &queues {
            let fd = queue.socket().as_raw_fd();
            enlarge_send_buffer(fd, &interface);
            if let Some(time) = config.busy_poll {
                prefer_busy_poll(fd, time).map_err(os("asking for busy polling"))?;
            }
            attachment
                .direct(queue.number, fd)
                .map_err(os("putting the socket into the XDP program's map"))?;
        }

        let description =
            describe(config, &layout, &interface, &attachment, why_copy.as_deref(), &frames.pages);
        info!(interface = interface.name, "af_xdp: {description}");
        if let Some(queue) = config.queue.filter(|_| interface.rx_queues > 1) {
            warn!(
                interface = interface.name,
                "only RoCE frames that the device steers to queue {} of {} arrive here: by a rule for the address of \
                 this context, `ethtool -N {} flow-type udp4 dst-ip ADDRESS dst-port 4791 action {}` (a veth keeps \
                 the sender's queue), or use all queues: a port without a queue number",
                queue,
                interface.rx_queues,
                interface.name,
                queue
            );
        }
        if !interface.carrier {
            warn!(interface = interface.name, "the link has no carrier");
        }
        let mut port = AfXdp {
            capabilities: Capabilities {
                driver: "af_xdp",
                description,
                interface: interface.name.clone(),
                layer: Layer::Ethernet,
                mac: interface.mac,
                addresses: interface.gid_order(),
                mtu: interface.mtu.min((layout.max_frame - FRAME_OVERHEAD) as u32),
                max_frame: layout.max_frame,
                qpns: if sharing.is_some() { owner::qpns(sharing::SLOT) } else { (0, 1) },
                comm_ids: if sharing.is_some() { owner::comm_ids(sharing::SLOT) } else { (0, 1) },
            },
            netlink,
            interface: interface.index,
            icmp: IcmpListener::new(&interface.name),
            now: Nanos::ZERO,
            attachment,
            _reservation: reservation,
            sharing,
            queues: queues.into(),
            turn: 0,
            sending: layout.queues.len().min(interface.tx_queues.max(1) as usize),
            slots: TxSlots::new(tx_chunks, layout.chunks_per_slot as usize, layout.umem),
            frames,
            burst: vec![FrameDesc::default(); BURST].into(),
            doorbell,
            membership: Membership::new(interface.index, &interface.gid_order()),
            stats: Stats::default(),
        };
        port.sharing.iter().for_each(|sharing| sharing.wake(&port.doorbell.waker()));
        interface.gid_order().into_iter().try_for_each(|address| port.admit(address))?;
        Ok(port)
    }

    /// Frames of each queue passed to the sink, by the queue's number.
    pub fn received_by_queue(&self) -> impl Iterator<Item = (u32, u64)> {
        self.queues.iter().map(|queue| (queue.number, queue.received))
    }

    /// Makes the XDP program redirect packets to an address or a group.
    fn let_in(&self, to: IpAddr) -> io::Result<()> {
        let is_shared = self.sharing.as_ref().is_some_and(|sharing| sharing.has(to));
        let which = if is_shared { EVEN } else { ALL };
        self.queues.iter().try_for_each(|queue| self.attachment.admit(to, queue.number, which))
    }

    /// Passes a burst of frames from the interface to `sink`. Returns their number.
    fn receive(&mut self, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let AfXdp { capabilities, queues, frames, burst, stats, .. } = self;
        let before = stats.rx_frames;
        let (mut taken, first) = (0, self.turn);
        for at in (first..queues.len()).chain(0..first) {
            let room = &mut burst[taken..];
            let received = queues[at].receive(frames, room, capabilities.mac, stats, sink);
            taken += received.map_err(|source| gone(capabilities, source))?;
            if taken == BURST {
                // The other queues had no turn, or a shorter one.
                self.turn = if at + 1 == queues.len() { 0 } else { at + 1 };
                break;
            }
        }
        Ok((stats.rx_frames - before) as usize)
    }

    /// Sends frames through the interface. Returns their number.
    fn send(&mut self, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let AfXdp { capabilities, queues, sending, frames, slots, burst, stats, .. } = self;
        let max_frame = capabilities.max_frame;
        let before = stats.tx_frames;
        loop {
            // Before each batch, because the slots of the last one are still in the cache.
            for queue in &mut *queues {
                queue.reclaim(slots, burst, stats);
            }
            let mut descriptors = 0;
            while descriptors < TX_BATCH {
                let Some(slot) = slots.peek() else { break };
                let buffer = slots.buffer(slot, frames, max_frame);
                let Some(len) = source.write(buffer) else { break };
                assert!(
                    (1..=max_frame).contains(&len),
                    "a frame of {len} bytes: must be at most {max_frame}"
                );
                let queue = if *sending == 1 { 0 } else { spread(&buffer[..len], *sending) };
                descriptors += queues[queue].load(slots, slot, len, frames);
                stats.tx_frames += 1;
                stats.tx_bytes += len as u64;
            }
            for queue in &mut *queues {
                queue.send().map_err(|source| gone(capabilities, source))?;
            }
            if descriptors < TX_BATCH {
                return Ok((stats.tx_frames - before) as usize);
            }
        }
    }

    /// The longest wait from now on; none if frames have arrived.
    fn before_wait(&mut self) -> Result<Duration, Error> {
        let by_memory = self.sharing.as_ref().map_or(LONGEST_SILENCE, |sharing| sharing.before_wait());
        let mut longest = by_memory.min(LONGEST_SILENCE);
        for queue in &mut self.queues {
            queue.send().map_err(|source| gone(&self.capabilities, source))?;
            if queue.has_arrivals() {
                return Ok(Duration::ZERO);
            }
            // Frames that the kernel did not take must be offered again; there is no notification.
            if queue.has_unsent() {
                longest = longest.min(TX_RETRY);
            }
        }
        Ok(longest)
    }

    /// A socket whose interface was removed has no more frames; the reason is kept.
    fn check_alive(&self) -> Result<(), Error> {
        for queue in &self.queues {
            let code = socket_error(queue.socket().as_raw_fd());
            let code = code.map_err(|source| gone(&self.capabilities, source))?;
            if code != 0 {
                return Err(gone(&self.capabilities, io::Error::from_raw_os_error(code)));
            }
        }
        Ok(())
    }
}

impl PacketDriver for AfXdp {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.now = now;
        let AfXdp { queues, doorbell, sharing, .. } = self;
        doorbell.polled(queues.iter().map(Queue::socket).chain(bell(sharing)));
        // Taken out for the duration of the burst, because `receive` borrows `self`.
        let Some(mut sharing) = self.sharing.take() else { return self.receive(sink) };
        let received =
            if sharing.is_shared() { self.receive(&mut sharing.filter(sink)) } else { self.receive(sink) };
        let received = received.map(|received| received + sharing.receive(sink));
        self.sharing = Some(sharing);
        received
    }

    fn keeps(&self) -> usize {
        let copies = if self.sharing.is_some() { COPIES_MAX } else { 0 };
        self.queues.iter().map(Queue::keeps).sum::<usize>() + copies
    }

    fn tx_burst(&mut self, _now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let Some(mut sharing) = self.sharing.take_if(|sharing| sharing.is_used()) else {
            return self.send(source);
        };
        let mut outward = sharing.outward(source);
        let sent = self.send(&mut outward);
        let stayed = outward.end();
        self.sharing = Some(sharing);
        Ok(sent? + stayed)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let longest = self.before_wait()?;
        if longest.is_zero() {
            self.sharing.iter().for_each(|sharing| sharing.rise());
            return Ok(());
        }
        let AfXdp { capabilities, queues, doorbell, sharing, .. } = self;
        let fds = queues.iter().map(Queue::socket).chain(bell(sharing));
        let waited = doorbell.wait_with(fds, timeout.min(longest));
        sharing.iter().for_each(|sharing| sharing.rise());
        waited.map_err(|source| gone(capabilities, source))?;
        self.check_alive()
    }

    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        let longest = self.before_wait()?;
        if !longest.is_zero() {
            self.check_alive()?;
        }
        let armed = self.doorbell.arm(self.queues.iter().map(Queue::socket).chain(bell(&self.sharing)));
        armed.map_err(|source| gone(&self.capabilities, source))?;
        Ok(Armed { fd: Some(self.doorbell.as_fd()), longest })
    }

    fn disarm(&mut self) {
        self.sharing.iter().for_each(|sharing| sharing.rise());
        self.doorbell.disarm();
    }

    fn waker(&self) -> Option<Waker> {
        Some(self.doorbell.waker())
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        if let Some(sharing) = self.sharing.as_mut().filter(|sharing| sharing.is_here(peer))
            && self.netlink.interfaces()?.iter().any(|interface| interface.owns(peer))
        {
            sharing.add_address(peer);
            return Ok(NextHop::Found(self.capabilities.mac));
        }
        if let Some(looked) = self.netlink.look_again(self.interface, peer) {
            return looked;
        }
        // Read again: addresses may change.
        let interface = self.netlink.interface(&self.capabilities.interface)?;
        self.netlink.resolve(&interface, peer)
    }

    fn resolve_in_vlan(&mut self, vlan: u16, peer: IpAddr) -> Result<NextHop, Error> {
        self.netlink.resolve_in_vlan(self.interface, vlan, peer)
    }

    fn next_refusal(&mut self) -> Option<Refusal> {
        self.icmp.hear(self.now)
    }

    fn admit(&mut self, address: IpAddr) -> Result<(), Error> {
        let what = "putting an address into the XDP program's map";
        self.let_in(address).map_err(|source| os_error(what, &self.capabilities.interface, source))
    }

    fn join(&mut self, group: IpAddr) -> Result<(), Error> {
        let joined = self.membership.join(group).and_then(|()| self.let_in(group));
        joined.map_err(|source| os_error("joining a multicast group", &self.capabilities.interface, source))
    }

    fn leave(&mut self, group: IpAddr) -> Result<(), Error> {
        let left = self.membership.leave(group);
        let left = left.and_then(|()| {
            self.queues.iter().try_for_each(|queue| self.attachment.dismiss(group, queue.number))
        });
        left.map_err(|source| os_error("leaving a multicast group", &self.capabilities.interface, source))
    }

    fn listen(&mut self, service: u64) -> Result<(), Error> {
        self.sharing.as_ref().map_or(Ok(()), |sharing| sharing.listen(service))
    }

    fn unlisten(&mut self, service: u64) {
        self.sharing.iter().for_each(|sharing| sharing.unlisten(service));
    }

    fn line_rate(&self) -> Option<u64> {
        self.netlink.interface(&self.capabilities.interface).ok()?.speed
    }

    fn stats(&self) -> Stats {
        let mut stats = self.stats;
        for queue in &self.queues {
            queue.add_losses(&mut stats);
        }
        self.sharing.iter().for_each(|sharing| sharing.add_to(&mut stats));
        stats
    }
}

/// Descriptors taken from a ring at once: the number of bits of a mask.
const BURST: usize = 64;
/// The delay after which frames left in the transmit ring are offered again.
const TX_RETRY: Duration = Duration::from_micros(200);
/// The longest block. The kernel does not wake a wait when an interface is removed, so this must be checked.
const LONGEST_SILENCE: Duration = Duration::from_millis(100);
/// Descriptors that the kernel takes from the transmit ring in one call (TX_BATCH_SIZE).
const TX_BATCH: usize = 32;

/// The transmit queue of a frame. Frames with the same UDP source port use the same one.
fn spread(frame: &[u8], queues: usize) -> usize {
    let half = |at: usize| frame.get(at..at + 2).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    let tag = if half(12) == 0x8100 { 4 } else { 0 };
    let header = match half(12 + tag) {
        0x0800 => 20,
        0x86dd => 40,
        // RoCE v1 has no port.
        _ => return 0,
    };
    // Neighbouring hashes have neighbouring ports: the upper bits of the product differ for them.
    let hash = u32::from(half(14 + tag + header)).wrapping_mul(0x9e37_79b1);
    (hash as usize * queues) >> 32
}

/// The descriptor that is readable when a neighbour has sent a frame through shared memory.
fn bell(sharing: &Option<Box<Sharing>>) -> impl Iterator<Item = BorrowedFd<'_>> {
    sharing.iter().flat_map(|sharing| sharing.bell())
}

fn gone(capabilities: &Capabilities, source: io::Error) -> Error {
    os_error("using the AF_XDP socket (was the interface removed?)", &capabilities.interface, source)
}

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
                        "{kib} KiB are needed in addition to the memory that this user has already locked: \
                         CAP_IPC_LOCK, a higher `ulimit -l`, or lower rx_frames and tx_frames"
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
    let queues = match (config.queue, layout.queues.len()) {
        (None, several @ 2..) => format!("all {several} queues"),
        _ => format!("queue {} of {}", layout.queues.start, interface.rx_queues),
    };
    let jumbo = if layout.multi_buffer() { ", multi-buffer" } else { "" };
    format!(
        "{mode}, {copy}{reasons}, {queues}, {} receive and {} transmit frames{jumbo} on {pages}",
        layout.rx_chunks * layout.queues.len() as u32,
        config.tx_frames
    )
}

/// Locked memory is limited per user; a process raises its limit if permitted.
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

/// The system's error that caused one of xsk-rs.
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

/// An error for a missing capability, with those that the process lacks.
fn permission(what: &'static str, interface: &str, capability: &'static str) -> Error {
    let needed = [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_BPF", 39)];
    let effective = effective_capabilities().unwrap_or(0);
    let missing: Vec<_> =
        needed.iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| *name).collect();
    let missing = if missing.is_empty() {
        "the process has them only in its own user namespace".to_owned()
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
