//! Ports inside one process, connected by a switch. Needs no privilege.
//!
//! Each port is driven by a thread of its own, or several by one thread. A frame is written once, into a buffer of the sending
//! port; delivery swaps that buffer with a spare one of the receiving port, so it copies no bytes, and takes the receiver's lock
//! once per run of frames to one destination.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::mem;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Wake, Waker};
use std::time::Duration;

use crate::kept::{COPIES_MAX, Copies};
use crate::waker::Doorbell;
use crate::{
    Armed, Capabilities, ETHERNET_HEADER, Error, FrameSink, FrameSource, Nanos, NextHop, PacketDriver,
    RxFrame, Stats,
};

/// Bytes of a frame in addition to the IP packet: Ethernet header and one 802.1Q tag.
pub(crate) const FRAME_OVERHEAD: usize = 18;
/// Frames moved under one lock.
const BURST: usize = 64;

/// Sizes of a [`Switch`], the same for all of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct SwitchConfig {
    /// Largest IP packet in bytes, 68 to 65535.
    pub mtu: u32,
    /// Queue length of a port; further frames are dropped. The memory, `depth` × (`mtu` + 18) bytes per port, is only used as far
    /// as the queue was ever filled.
    pub depth: usize,
}

impl Default for SwitchConfig {
    /// An MTU of 4200, enough for a path MTU of 4096 (4160 bytes over IPv4, 4180 over IPv6), and 4096 frames.
    fn default() -> SwitchConfig {
        SwitchConfig { mtu: 4200, depth: 4096 }
    }
}

impl SwitchConfig {
    /// Largest IP packet in bytes, 68 to 65535; 4200 by default.
    pub fn mtu(self, mtu: u32) -> Self {
        SwitchConfig { mtu, ..self }
    }

    /// Queue length of a port in frames, 1 to 65536; 4096 by default.
    pub fn depth(self, depth: usize) -> Self {
        SwitchConfig { depth, ..self }
    }
}

/// A port's frames are allocated with it.
const DEPTH_MAX: usize = 1 << 16;

/// A switch with static forwarding: frames are sent to the port with their destination address, and to every other port for a
/// group address or an unknown one.
///
/// Clones are handles to the same switch, which lives as long as they or its ports do.
#[derive(Clone, Debug)]
pub struct Switch {
    fabric: Arc<Fabric>,
}

impl Switch {
    /// A switch without ports.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the MTU is not in 68 to 65535 or the depth not in 1 to 65536.
    pub fn new(config: SwitchConfig) -> Result<Switch, Error> {
        check_mtu(config.mtu)?;
        if !(1..=DEPTH_MAX).contains(&config.depth) {
            return Err(Error::Invalid {
                parameter: "depth",
                value: config.depth.to_string(),
                expected: format!("1 to {DEPTH_MAX} frames"),
            });
        }
        let fabric = Fabric { config, ports: Mutex::default(), generation: AtomicUsize::new(0) };
        Ok(Switch { fabric: Arc::new(fabric) })
    }

    /// Plugs in a new port that owns `addresses` (its GID table, in that order). Its hardware address is locally administered and
    /// derived from the port's number. If two ports own the same IP address, [`PacketDriver::resolve`] finds the older one.
    pub fn port(&self, addresses: &[IpAddr]) -> Loopback {
        let SwitchConfig { mtu, depth } = self.fabric.config;
        let max_frame = mtu as usize + FRAME_OVERHEAD;
        let buffer = || vec![0; max_frame].into_boxed_slice();
        let mut ports = lock(&self.fabric.ports);
        let number = ports.len();
        let inbox = Arc::new(Inbox::new(depth, buffer));
        ports.push(Entry { inbox: inbox.clone(), addresses: addresses.to_vec() });
        self.fabric.generation.fetch_add(1, Ordering::Release);
        Loopback {
            capabilities: Capabilities::new("loopback", format!("loopback{number}"), port_mac(number), mtu)
                .description("switch inside this process")
                .addresses(addresses.to_vec())
                .max_frame(max_frame),
            number,
            inbox,
            fabric: self.fabric.clone(),
            peers: Vec::new(),
            generation: 0,
            staged: (0..BURST).map(|_| LoopbackFrame { bytes: buffer(), len: 0 }).collect(),
            received: Vec::with_capacity(BURST),
            copies: Copies::default(),
            stats: Stats::default(),
        }
    }
}

/// Two ports on a switch of their own, with the default sizes.
pub fn pair(a: &[IpAddr], b: &[IpAddr]) -> (Loopback, Loopback) {
    let config = SwitchConfig::default();
    let fabric = Fabric { config, ports: Mutex::default(), generation: AtomicUsize::new(0) };
    let switch = Switch { fabric: Arc::new(fabric) };
    (switch.port(a), switch.port(b))
}

/// A port of a [`Switch`].
///
/// The port receives frames to its own hardware address. A frame is dropped if the queue of its destination is full, and counted
/// there as [`Stats::rx_dropped`]. A frame with a length from `source` shorter than an Ethernet header or longer than
/// [`Capabilities::max_frame`] is not sent and counts as [`Stats::tx_dropped`].
#[derive(Debug)]
pub struct Loopback {
    capabilities: Capabilities,
    number: usize,
    inbox: Arc<Inbox>,
    fabric: Arc<Fabric>,
    /// The switch's ports as of `generation`, so that sending needs no lock shared by all ports.
    peers: Vec<Arc<Inbox>>,
    generation: usize,
    staged: Vec<LoopbackFrame>,
    received: Vec<LoopbackFrame>,
    copies: Copies,
    stats: Stats,
}

impl PacketDriver for Loopback {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        if self.inbox.waiting.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        self.inbox.take(&mut self.received);
        for frame in &self.received {
            sink.take(RxFrame::new(&frame.bytes[..frame.len], &mut self.copies));
            self.stats.rx_bytes += frame.len as u64;
        }
        self.stats.rx_frames += self.received.len() as u64;
        Ok(self.received.len())
    }

    fn keeps(&self) -> usize {
        COPIES_MAX
    }

    /// Sends at most as many frames per call as the queue of a port holds.
    fn tx_burst(&mut self, _now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        self.refresh_peers();
        let mut sent = 0;
        while sent < self.fabric.config.depth {
            let room = BURST.min(self.fabric.config.depth - sent);
            let mut staged = 0;
            while staged < room {
                let frame = &mut self.staged[staged];
                let Some(len) = source.write(&mut frame.bytes) else { break };
                if !(ETHERNET_HEADER..=self.capabilities.max_frame).contains(&len) {
                    self.stats.tx_dropped += 1;
                    continue;
                }
                frame.len = len;
                self.stats.tx_bytes += len as u64;
                staged += 1;
            }
            self.deliver(staged);
            sent += staged;
            if staged < room {
                break;
            }
        }
        self.stats.tx_frames += sent as u64;
        Ok(sent)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let bell = self.bell()?;
        if self.inbox.rest() {
            bell.wait(timeout).map_err(|source| self.os_error(source))?;
            self.inbox.rise();
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        let bell = self.bell()?;
        let longest = if self.inbox.rest() { Duration::MAX } else { Duration::ZERO };
        Ok(Armed { fd: Some(bell.as_fd()), longest })
    }

    fn disarm(&mut self) {
        self.inbox.rise();
        if let Some(bell) = self.inbox.bell.get() {
            bell.clear();
        }
    }

    fn waker(&self) -> Option<Waker> {
        Some(Waker::from(self.inbox.clone()))
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        let ports = lock(&self.fabric.ports);
        find_address(ports.iter().map(|port| &port.addresses[..]), peer)
            .map(NextHop::Found)
            .ok_or_else(|| Error::NoRoute { peer, interface: self.capabilities.interface.clone() })
    }

    /// All VLANs lead to the same ports.
    fn resolve_in_vlan(&mut self, _: u16, peer: IpAddr) -> Result<NextHop, Error> {
        self.resolve(peer)
    }

    fn stats(&self) -> Stats {
        Stats { rx_dropped: self.inbox.dropped.load(Ordering::Relaxed), ..self.stats }
    }
}

impl Loopback {
    /// Created by the first wait.
    fn bell(&self) -> Result<&Doorbell, Error> {
        let bell = &self.inbox.bell;
        if bell.get().is_none() {
            let made = Doorbell::new().map_err(|source| self.os_error(source))?;
            // Only this port creates one.
            let _ = bell.set(made);
        }
        bell.get().ok_or_else(|| self.os_error(ErrorKind::NotFound.into()))
    }

    fn os_error(&self, source: io::Error) -> Error {
        Error::Os { what: "waiting", interface: self.capabilities.interface.clone(), source }
    }

    fn refresh_peers(&mut self) {
        let generation = self.fabric.generation.load(Ordering::Acquire);
        if generation != self.generation {
            self.generation = generation;
            self.peers.clear();
            self.peers.extend(lock(&self.fabric.ports).iter().map(|port| port.inbox.clone()));
        }
    }

    /// Delivers the first `count` staged frames, a run of equal destinations at a time.
    fn deliver(&mut self, count: usize) {
        let mut rest = &mut self.staged[..count];
        while let Some(first) = rest.first() {
            let target = |frame: &LoopbackFrame| Destination::of(&frame.bytes, self.peers.len());
            let destination = target(first);
            let run = rest.iter().take_while(|frame| target(frame) == destination).count();
            let (run, after) = mem::take(&mut rest).split_at_mut(run);
            match destination {
                Destination::Port(number) => self.peers[number].put(run),
                Destination::Flood => {
                    for (_, inbox) in self.peers.iter().enumerate().filter(|(n, _)| *n != self.number) {
                        inbox.put_copy(run);
                    }
                }
            }
            rest = after;
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        if let Some(entry) = lock(&self.fabric.ports).get_mut(self.number) {
            entry.addresses.clear();
        }
        self.inbox.close();
    }
}

/// The destination of a frame at a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// One port.
    Port(usize),
    /// All ports except its source.
    Flood,
}

impl Destination {
    /// Reads the destination address of `frame`, which has at least an Ethernet header, at a switch
    /// of `ports` ports whose addresses are those of [`port_mac`].
    pub(crate) fn of(frame: &[u8], ports: usize) -> Destination {
        let [a, b, c, d, e, f] = [frame[0], frame[1], frame[2], frame[3], frame[4], frame[5]];
        let number = u32::from_be_bytes([c, d, e, f]) as usize;
        if [a, b] == PORT_MAC_PREFIX && number < ports {
            Destination::Port(number)
        } else {
            Destination::Flood
        }
    }
}

/// The hardware address of port `number`, so that forwarding is static.
pub(crate) fn port_mac(number: usize) -> [u8; 6] {
    let [a, b] = PORT_MAC_PREFIX;
    let [c, d, e, f] = (number as u32).to_be_bytes();
    [a, b, c, d, e, f]
}

/// Locally administered, unicast.
const PORT_MAC_PREFIX: [u8; 2] = [0x02, 0xfe];

/// The hardware address of the first port that owns `address`.
pub(crate) fn find_address<'a>(
    mut ports: impl Iterator<Item = &'a [IpAddr]>,
    address: IpAddr,
) -> Option<[u8; 6]> {
    ports.position(|addresses| addresses.contains(&address)).map(port_mac)
}

/// Checks an MTU requested by a caller.
pub(crate) fn check_mtu(mtu: u32) -> Result<(), Error> {
    if (68..=65535).contains(&mtu) {
        return Ok(());
    }
    Err(Error::Invalid {
        parameter: "mtu",
        value: mtu.to_string(),
        expected: "68 to 65535 bytes (path MTU 4096 needs 4160 over IPv4, 4180 over IPv6)".into(),
    })
}

/// Takes a lock. A panic while it was held can't leave a queue half changed, so a poisoned lock is used like any other.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Fabric {
    config: SwitchConfig,
    ports: Mutex<Vec<Entry>>,
    /// Counts the ports ever plugged in.
    generation: AtomicUsize,
}

#[derive(Debug)]
struct Entry {
    inbox: Arc<Inbox>,
    addresses: Vec<IpAddr>,
}

#[derive(Debug)]
struct LoopbackFrame {
    bytes: Box<[u8]>,
    len: usize,
}

/// The received frames of a port.
#[derive(Debug)]
struct Inbox {
    depth: usize,
    state: Mutex<InboxState>,
    /// Present after the first wait of the port's thread.
    bell: OnceLock<Doorbell>,
    /// Length of the queue, so that polling an empty one takes no lock.
    waiting: AtomicUsize,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct InboxState {
    queue: VecDeque<LoopbackFrame>,
    /// Last in, first out: a queue that stays short stays in the cache.
    spare: Vec<Box<[u8]>>,
    /// There is a wait for the bell; ringing it without one would cost a system call.
    sleeping: bool,
    /// The port's waker was used since the last wait.
    woken: bool,
}

impl Inbox {
    fn new(depth: usize, buffer: impl Fn() -> Box<[u8]>) -> Inbox {
        // One burst more than the queue length, for the frames that the port's thread is reading.
        let spare = (0..depth + BURST).map(|_| buffer()).collect();
        let state =
            InboxState { queue: VecDeque::with_capacity(depth), spare, sleeping: false, woken: false };
        Inbox {
            depth,
            state: Mutex::new(state),
            bell: OnceLock::new(),
            waiting: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Queues `frames` and leaves spare buffers in their place.
    fn put(&self, frames: &mut [LoopbackFrame]) {
        self.push(frames.len(), |state, i, spare| {
            let frame = &mut frames[i];
            state.push_back(LoopbackFrame { bytes: mem::replace(&mut frame.bytes, spare), len: frame.len });
        });
    }

    fn put_copy(&self, frames: &[LoopbackFrame]) {
        self.push(frames.len(), |state, i, mut spare| {
            let LoopbackFrame { bytes, len } = &frames[i];
            spare[..*len].copy_from_slice(&bytes[..*len]);
            state.push_back(LoopbackFrame { bytes: spare, len: *len });
        });
    }

    fn push(&self, count: usize, mut push: impl FnMut(&mut VecDeque<LoopbackFrame>, usize, Box<[u8]>)) {
        let mut state = lock(&self.state);
        let taken = count.min(self.depth - state.queue.len());
        let mut pushed = 0;
        while pushed < taken {
            let Some(spare) = state.spare.pop() else { break };
            push(&mut state.queue, pushed, spare);
            pushed += 1;
        }
        self.waiting.store(state.queue.len(), Ordering::Release);
        let wake = mem::take(&mut state.sleeping);
        drop(state);
        if wake {
            self.ring();
        }
        if pushed < count {
            self.dropped.fetch_add((count - pushed) as u64, Ordering::Relaxed);
        }
    }

    /// Returns the buffers of `frames` and fills it with the next burst.
    fn take(&self, frames: &mut Vec<LoopbackFrame>) {
        let mut state = lock(&self.state);
        state.spare.extend(frames.drain(..).map(|frame| frame.bytes));
        let count = state.queue.len().min(BURST);
        frames.extend(state.queue.drain(..count));
        self.waiting.store(state.queue.len(), Ordering::Release);
    }

    /// Senders ring the bell from now on. Returns whether the queue is still empty.
    fn rest(&self) -> bool {
        let mut state = lock(&self.state);
        state.sleeping = !mem::take(&mut state.woken) && state.queue.is_empty();
        state.sleeping
    }

    /// Ends the wait.
    fn rise(&self) {
        let mut state = lock(&self.state);
        state.sleeping = false;
        state.woken = false;
    }

    fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Frees everything. Later frames find no buffer and are dropped.
    fn close(&self) {
        *lock(&self.state) = InboxState::default();
        self.waiting.store(0, Ordering::Release);
    }
}

impl Wake for Inbox {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        state.woken = true;
        if mem::take(&mut state.sleeping) {
            drop(state);
            self.ring();
        }
    }
}

#[cfg(test)]
mod tests;
