//! A port of DPDK, from its configuration to its end.
//!
//! When its last queue is dropped, the port removes its device, so nothing remains; if it is opened again, the device
//! is created again. Before removing the device it waits for DPDK's control thread, which may be closing the same
//! memif.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::mem;
use std::net::IpAddr;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ferroce_dpdk_sys as sys;
use tracing::warn;

use super::kept::KEPT_MAX;
use super::kind::{Kind, Tries};
use super::mbuf::{BURST, HEAD_ROOM, PRIVATE, Pool, SEGMENT_ROOM};
use super::{DpdkConfig, FRAME_OVERHEAD, eal, lock};
use crate::neighbour::Neighbours;
use crate::netlink::{Interface, Netlink};
use crate::{Error, ROCE_PORT};

/// A running Ethernet device of EAL, shared by the queues of a port. It is stopped and removed when its last queue is
/// dropped.
#[derive(Debug)]
pub(super) struct EthDevice {
    pub(super) shim: &'static sys::Functions,
    pub(super) id: u16,
    pub(super) name: String,
    pub(super) driver: String,
    pub(super) kind: Kind,
    pub(super) mac: [u8; 6],
    pub(super) mtu: u32,
    pub(super) addresses: Vec<(IpAddr, u8)>,
    pub(super) link: NeighbourSource,
    /// The distribution of frames over the queues, and the received frames, for the description.
    pub(super) steering: String,
    pub(super) queues: Vec<Pools>,
    started: bool,
}

/// The source of neighbours' hardware addresses.
#[derive(Debug)]
pub(super) enum NeighbourSource {
    /// The kernel, whose interface on this port also receives every frame.
    Kernel { netlink: Mutex<Netlink>, index: u32 },
    /// This driver, because the port receives ARP and neighbour discovery.
    Own(Mutex<Neighbours>),
}

impl NeighbourSource {
    #[inline]
    pub(super) fn is_own(&self) -> bool {
        matches!(self, NeighbourSource::Own(_))
    }
}

/// The pools of one queue.
#[derive(Debug)]
pub(super) struct Pools {
    pub(super) rx: Pool,
    pub(super) tx: Pool,
    /// For frames whose payload is not copied.
    pub(super) gather: Option<GatherPools>,
}

/// The pools for the parts of a frame.
#[derive(Debug)]
pub(super) struct GatherPools {
    /// For the part before the payload.
    pub(super) heads: Pool,
    /// For the payload and the part after it.
    pub(super) segments: Pool,
}

impl EthDevice {
    /// Configures and starts the port with `queues` queues.
    pub(super) fn start(config: &DpdkConfig, queues: u16) -> Result<EthDevice, Error> {
        let shim = eal::start(&config.eal)?;
        let claim = Claim::new(find(shim, &config.port)?, &config.port)?;
        let id = claim.0;
        let info = info(shim, id, &config.port)?;
        // SAFETY: a static string of the driver.
        let driver = unsafe { text(info.driver) };
        // SAFETY: a string that exists as long as the port's device.
        let arguments = unsafe { text(info.arguments) };
        let kind = Kind::of(&driver, &arguments, info.multi_segment != 0)?;
        let mut port = EthDevice {
            shim,
            id,
            name: config.port.clone(),
            driver,
            kind,
            mac: [0; 6],
            mtu: 0,
            addresses: config.addresses.clone(),
            link: NeighbourSource::Own(Mutex::new(Neighbours::new([0; 6], Vec::new()))),
            steering: String::new(),
            queues: Vec::new(),
            started: false,
        };
        // The port owns the claim from here on.
        mem::forget(claim);
        port.configure(config, &info, queues)?;
        port.set_up_queues(config, queues)?;
        match port.kind.calls_peer {
            Some(tries) => port.call_peer(tries)?,
            None => {
                // SAFETY: the port is configured and its queues are set up.
                port.check("starting the port", unsafe { (shim.port_start)(id) })?;
                port.started = true;
            }
        }
        port.finish(queues, &info)?;
        port.find_addresses(&info)?;
        Ok(port)
    }

    /// Starts the port of a client, repeatedly if this may help, until its other end is connected. A start is not given
    /// up early while an answer may be pending: a server that answers a client that has ended panics (DPDK 22.11).
    fn call_peer(&mut self, tries: Tries) -> Result<(), Error> {
        let deadline = Instant::now() + PEER_PATIENCE;
        let mut patience = match tries {
            Tries::One => PEER_PATIENCE,
            Tries::Many => PEER_TIME,
        };
        loop {
            // SAFETY: the port is configured and stopped, and its queues are set up.
            self.started = unsafe { (self.shim.port_start)(self.id) } == 0;
            let try_ends = deadline.min(Instant::now() + if self.started { patience } else { PEER_PAUSE });
            while Instant::now() < try_ends {
                // SAFETY: the port exists.
                if self.started && unsafe { (self.shim.link_is_up)(self.id) } != 0 {
                    return Ok(());
                }
                thread::sleep(Duration::from_millis(1));
            }
            if try_ends == deadline {
                return Err(Error::Invalid {
                    parameter: "port",
                    value: self.name.clone(),
                    expected: format!(
                        "a peer within {PEER_PATIENCE:?}: start the server of the memif first{}",
                        match tries {
                            Tries::One => " (with zero-copy=yes DPDK takes its first answer for its last)",
                            Tries::Many => "",
                        }
                    ),
                });
            }
            if self.started {
                patience *= 2;
                // SAFETY: the port is started, and only this function uses it.
                unsafe { (self.shim.port_stop)(self.id) };
            }
        }
    }

    /// The description, in one line.
    pub(super) fn describe(&self, queue: u16) -> String {
        let payloads = match self.kind.copies {
            None => "payloads sent from registered memory".to_owned(),
            Some(why) => format!("payloads copied ({why})"),
        };
        let neighbours = if self.link.is_own() { "own ARP and ND" } else { "the kernel's ARP and ND" };
        format!(
            "{}, queue {queue} of {}{}, {payloads}, {neighbours}, when idle sleeps 50 µs at a time",
            self.driver,
            self.queues.len(),
            self.steering
        )
    }

    /// The speed of its link in bit/s, if known.
    pub(super) fn speed(&self) -> Option<u64> {
        // SAFETY: the port exists.
        match unsafe { (self.shim.link_speed)(self.id) } {
            0 => None,
            megabits => Some(u64::from(megabits) * 1_000_000),
        }
    }

    /// Frames lost before they were received, and frames that were not sent.
    pub(super) fn losses(&self) -> (u64, u64) {
        let mut losses = sys::Losses::default();
        // SAFETY: `losses` outlives the call.
        match unsafe { (self.shim.port_losses)(self.id, &raw mut losses) } {
            0 => (losses.received, losses.sent),
            _ => (0, 0),
        }
    }

    /// The largest frame that is sent.
    pub(super) fn max_frame(&self) -> usize {
        self.mtu as usize + FRAME_OVERHEAD
    }

    fn configure(&mut self, config: &DpdkConfig, info: &sys::PortInfo, queues: u16) -> Result<(), Error> {
        let most = info.max_queues;
        if queues == 0 || queues > most {
            let expected = format!("'{}' has 1 to {most}", self.name);
            return Err(Error::Invalid { parameter: "queues", value: queues.to_string(), expected });
        }
        let mut settings = sys::PortSettings {
            rss: if queues > 1 { info.rss_udp } else { 0 },
            mtu: 0,
            queues,
            multi_segment: self.kind.copies.is_none().into(),
        };
        if let (Some(mtu), false) = (config.mtu, self.kind.any_mtu) {
            self.check_mtu(mtu, info.min_mtu, info.max_mtu, "its driver allows")?;
            settings.mtu = mtu;
        }
        // SAFETY: the settings outlive the call, and the port belongs to this process and is stopped.
        let result = unsafe { (self.shim.port_configure)(self.id, &raw const settings) };
        self.check("configuring the port", result)?;
        self.steering = match (queues, info.rss_udp != 0) {
            (1, _) => String::new(),
            (_, true) => ", spread over the queues by UDP ports (RSS)".to_owned(),
            (_, false) => ", no RSS: the sender or the device chooses the queue".to_owned(),
        };
        self.choose_mtu(config, info)
    }

    fn choose_mtu(&mut self, config: &DpdkConfig, info: &sys::PortInfo) -> Result<(), Error> {
        let frame_limit = self.kind.largest.map_or(usize::from(u16::MAX), |(largest, _)| largest);
        let limit = frame_limit.saturating_sub(FRAME_OVERHEAD).min(MAX_MTU) as u32;
        let what = match self.kind.largest {
            Some((_, argument)) => format!("its argument {argument}, {frame_limit}, leaves room for"),
            None => "a packet buffer holds".to_owned(),
        };
        self.mtu = match (config.mtu, self.kind.any_mtu) {
            (Some(mtu), true) => mtu,
            (None, true) => limit.min(DEFAULT_MTU),
            (wanted, false) => {
                if let Some(mtu) = wanted {
                    // SAFETY: the port is configured.
                    let result = unsafe { (self.shim.port_set_mtu)(self.id, mtu as u16) };
                    if result != 0 {
                        let now = self.current_mtu()?;
                        let why = eal::os_error("setting the MTU", &self.name, result);
                        return Err(Error::Invalid {
                            parameter: "mtu",
                            value: mtu.to_string(),
                            expected: format!("{now}, its present value, which can't be changed ({why})"),
                        });
                    }
                }
                match wanted {
                    // Until an MTU is set, DPDK reports 1500.
                    None if self.has_kernel(info) => {
                        let interface = kernel_interface(&Netlink::open()?, info.interface)?;
                        interface.mtu.min(limit).min(info.max_mtu)
                    }
                    None => self.current_mtu()?.min(limit),
                    Some(_) => self.current_mtu()?,
                }
            }
        };
        self.check_mtu(self.mtu, MIN_MTU, limit, &what)
    }

    fn check_mtu(&self, mtu: u32, least: u32, most: u32, what: &str) -> Result<(), Error> {
        if (least..=most).contains(&mtu) {
            return Ok(());
        }
        let expected = format!("{least} to {most}, which is what {what} on '{}'", self.name);
        Err(Error::Invalid { parameter: "mtu", value: mtu.to_string(), expected })
    }

    fn current_mtu(&self) -> Result<u32, Error> {
        let mut mtu = 0;
        // SAFETY: `mtu` outlives the call.
        self.check("reading the MTU", unsafe { (self.shim.port_mtu)(self.id, &raw mut mtu) })?;
        Ok(mtu.into())
    }

    fn set_up_queues(&mut self, config: &DpdkConfig, queues: u16) -> Result<(), Error> {
        let (mut rx, mut tx) = (config.rx_descriptors, config.tx_descriptors);
        // SAFETY: both numbers outlive the call.
        let result = unsafe { (self.shim.port_fit)(self.id, &raw mut rx, &raw mut tx) };
        self.check("fitting the numbers of descriptors", result)?;
        // SAFETY: the port exists.
        let node = unsafe { (self.shim.port_node)(self.id) };
        let max_frame = self.max_frame();
        for queue in 0..queues {
            let rx_frames = u32::from(rx).max(self.kind.ring) + BACKLOG as u32 + KEPT_MAX;
            let tx_frames = u32::from(tx).max(self.kind.ring);
            let pool = |frames, room: usize, private| {
                let room = room.min(self.shim.max_room.into()) as u16;
                Pool::new(self.shim, &self.name, frames, room, private, node)
            };
            let gather = self.kind.copies.is_none().then(|| {
                let heads = pool(tx_frames, HEAD_ROOM, 0)?;
                Ok(GatherPools { heads, segments: pool(2 * tx_frames, SEGMENT_ROOM.into(), PRIVATE)? })
            });
            let pools = Pools {
                rx: pool(rx_frames, max_frame.max(self.kind.rx_room), 0)?,
                tx: pool(tx_frames, max_frame, 0)?,
                gather: gather.transpose()?,
            };
            // SAFETY: the port is configured and stopped, and the pool exists until the port is closed.
            let result = unsafe { (self.shim.rx_queue)(self.id, queue, rx, node, pools.rx.as_ptr()) };
            self.queues.push(pools);
            self.check("setting up a receive queue", result)?;
            // SAFETY: as above.
            let result = unsafe { (self.shim.tx_queue)(self.id, queue, tx, node) };
            self.check("setting up a transmit queue", result)?;
        }
        Ok(())
    }

    /// The configuration that needs a running port.
    fn finish(&mut self, queues: u16, info: &sys::PortInfo) -> Result<(), Error> {
        let mut mac = [0; 6];
        // SAFETY: `mac` outlives the call.
        let result = unsafe { (self.shim.port_mac)(self.id, &raw mut mac) };
        self.check("reading the hardware address", result)?;
        self.mac = mac;
        // For neighbour discovery and multicast datagrams. A port without a filter receives all of them.
        // SAFETY: the port runs.
        let result = unsafe { (self.shim.port_hear_multicast)(self.id) };
        if result != 0 && result != -libc::ENOTSUP {
            let why = eal::os_error("enabling multicast frames", &self.name, result);
            warn!(port = self.name, "{why}");
        }
        // Without such a rule all frames are received, and the engine ignores those of others.
        // SAFETY: the port runs with `queues` queues.
        if unsafe { (self.shim.port_steer)(self.id, ROCE_PORT, queues, info.rss_udp) } != 0 {
            self.steering.push_str(", UDP port 4791 by a flow rule");
        }
        Ok(())
    }

    /// Sets the port's own addresses, or those of its kernel interface, and the source of neighbours.
    fn find_addresses(&mut self, info: &sys::PortInfo) -> Result<(), Error> {
        if self.addresses.is_empty() && self.has_kernel(info) {
            let netlink = Netlink::open()?;
            let interface = kernel_interface(&netlink, info.interface)?;
            if !interface.up {
                return Err(Error::InterfaceDown { name: interface.name });
            }
            self.addresses = interface.addresses;
            if self.kind.kernel_answers {
                self.link = NeighbourSource::Kernel { netlink: Mutex::new(netlink), index: info.interface };
                return Ok(());
            }
        }
        if self.addresses.is_empty() {
            return Err(Error::Invalid {
                parameter: "addresses",
                value: "(none)".to_owned(),
                expected: format!(
                    "the addresses of '{}', because no interface of the kernel has them: \
                     {}@10.0.0.1/24",
                    self.name, self.name
                ),
            });
        }
        self.link = NeighbourSource::Own(Mutex::new(Neighbours::new(self.mac, self.addresses.clone())));
        Ok(())
    }

    /// Whether this port is an interface of the kernel.
    fn has_kernel(&self, info: &sys::PortInfo) -> bool {
        info.interface != 0 && !self.kind.kernel_is_peer
    }

    fn check(&self, what: &'static str, result: i32) -> Result<(), Error> {
        if result == 0 { Ok(()) } else { Err(eal::os_error(what, &self.name, result)) }
    }
}

impl Drop for EthDevice {
    fn drop(&mut self) {
        let arguments = info(self.shim, self.id, &self.name).map(|info| {
            // SAFETY: a string that exists as long as the port's device.
            unsafe { text(info.arguments) }
        });
        let device = format!("{},{}", self.name, arguments.unwrap_or_default());
        // SAFETY: the port belongs to this process, and none of its queues is in use. Removing its device closes it,
        // which returns its buffers before the pools are freed.
        let removed = unsafe {
            // DPDK's control thread may be closing it too, because the other end has ended.
            (self.shim.await_control)();
            if self.started {
                (self.shim.port_stop)(self.id);
            }
            (self.shim.port_remove)(self.id)
        };
        if removed == 0 {
            lock(&REMOVED).insert(self.name.clone(), device);
        } else {
            warn!("{}", eal::os_error("closing the port", &self.name, removed));
        }
        release(self.id);
    }
}

/// The most frames that wait for the engine while an address is resolved.
pub(super) const BACKLOG: usize = 512;
const _: () = assert!(BACKLOG.is_multiple_of(BURST));

/// The time in which a port tries to reach its other end, the time for the first answer, and the pause between tries
/// without an answer.
const PEER_PATIENCE: Duration = Duration::from_secs(10);
const PEER_TIME: Duration = Duration::from_secs(2);
const PEER_PAUSE: Duration = Duration::from_millis(250);
/// For ports without a link MTU: that of Ethernet's jumbo frames.
const DEFAULT_MTU: u32 = 9000;
/// The least MTU of IPv4 (RFC 791), so that all MTUs can be reported.
const MIN_MTU: u32 = 68;
const MAX_MTU: usize = 9702;

/// The ports that are open in this process.
static OPEN: Mutex<Vec<u16>> = Mutex::new(Vec::new());

/// The devices of closed ports, by name, with their arguments, to create them again.
static REMOVED: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// A claim on a port, which nothing else in this process may open.
struct Claim(u16);

impl Claim {
    fn new(id: u16, name: &str) -> Result<Claim, Error> {
        let mut open = lock(&OPEN);
        if open.contains(&id) {
            return Err(Error::Invalid {
                parameter: "port",
                value: format!("'{name}'"),
                expected: "a port that is not open in this process; its queues are opened together"
                    .to_owned(),
            });
        }
        open.push(id);
        Ok(Claim(id))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        release(self.0);
    }
}

fn release(id: u16) {
    lock(&OPEN).retain(|open| *open != id);
}

/// The number of the port of this name. If it was closed by this process, its device is created again.
fn find(shim: &sys::Functions, name: &str) -> Result<u16, Error> {
    if let Some(device) = lock(&REMOVED).remove(name) {
        let device = CString::new(device).unwrap_or_default();
        // SAFETY: a string that outlives the call.
        match unsafe { (shim.device_probe)(device.as_ptr()) } {
            0 => {}
            result => return Err(eal::os_error("making the port's device again", name, result)),
        }
    }
    let mut id = 0;
    let text = CString::new(name).unwrap_or_default();
    // SAFETY: a string and a number that outlive the call.
    if unsafe { (shim.port_find)(text.as_ptr(), &raw mut id) } == 0 {
        return Ok(id);
    }
    let present = names(shim);
    let present = if present.is_empty() {
        "there is none: name a device with --vdev=, or bind one to vfio-pci and allow it with -a".to_owned()
    } else {
        format!("there are: {}", present.join(", "))
    };
    let expected = format!("a port of DPDK; {present}");
    Err(Error::Invalid { parameter: "port", value: format!("'{name}'"), expected })
}

fn names(shim: &sys::Functions) -> Vec<String> {
    let mut names = Vec::new();
    let mut next = 0;
    loop {
        let mut name: [c_char; sys::abi::NAME_SIZE] = [0; _];
        // SAFETY: room for the longest name, with its NUL.
        let Ok(port) = u16::try_from(unsafe { (shim.port_next)(next, &raw mut name) }) else {
            return names;
        };
        // SAFETY: DPDK has terminated it with NUL.
        names.push(unsafe { text(name.as_ptr()) });
        next = port + 1;
    }
}

/// A string of DPDK; empty for a null pointer.
///
/// # Safety
/// It must be null, or terminated by NUL and valid during the call.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: not null; the rest is the caller's contract.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The kernel's interface with this index.
pub(super) fn kernel_interface(netlink: &Netlink, index: u32) -> Result<Interface, Error> {
    let all = netlink.interfaces()?;
    let present: Vec<_> = all.iter().map(|interface| interface.name.as_str()).collect();
    let missing =
        Error::NoInterface { name: format!("number {index}"), is_rnic: false, present: present.join(", ") };
    all.into_iter().find(|interface| interface.index == index).ok_or(missing)
}

fn info(shim: &sys::Functions, id: u16, name: &str) -> Result<sys::PortInfo, Error> {
    let mut info = sys::PortInfo::default();
    // SAFETY: `info` outlives the call.
    match unsafe { (shim.port_info)(id, &raw mut info) } {
        0 => Ok(info),
        result => Err(eal::os_error("asking what the port can do", name, result)),
    }
}
