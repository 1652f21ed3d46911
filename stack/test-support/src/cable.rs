//! A cable with an engine at one end and a test at the other, which reads the engine's frames and sends frames to it.
//!
//! ```
//! use ferroce::{Config, Context, Nanos};
//! use ferroce_test_support::cable::Cable;
//!
//! let cable = Cable::new();
//! let mut context = Context::open(Box::new(cable.port(1500)), &Config::default()).unwrap();
//! cable.send(vec![0; 60]);
//! assert_eq!(context.poll(Nanos(1)).unwrap(), 1);
//! assert!(cable.take().is_empty());
//! ```

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferroce::driver::{self, Capabilities, FrameSink, FrameSource, RxFrame, Stats};
use ferroce::{MacAddr, Nanos, PacketDriver};

/// The engine's hardware address.
pub const ENGINE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// The peer's hardware address, which is that of every next hop.
pub const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
/// The engine's IPv4 address.
pub const ENGINE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
/// The peer's IPv4 address.
pub const PEER_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// The engine's IPv6 address.
pub const ENGINE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));
/// The peer's IPv6 address.
pub const PEER_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// The test's end.
#[derive(Clone, Debug)]
pub struct Cable(Arc<Mutex<Way>>);

impl Cable {
    /// A cable whose port accepts any number of frames.
    #[expect(clippy::new_without_default, reason = "a port is made from it, it is no value")]
    pub fn new() -> Cable {
        Cable(Arc::new(Mutex::new(Way { room: usize::MAX, ..Way::default() })))
    }

    /// The engine's end, for IP packets of up to `mtu` bytes.
    pub fn port(&self, mtu: u32) -> CablePort {
        let max_frame = mtu as usize + 18;
        let capabilities = Capabilities::new("cable", "script0".to_owned(), ENGINE_MAC.0, mtu)
            .description("the engine's end of a cable")
            .addresses(vec![ENGINE_V4, ENGINE_V6])
            .max_frame(max_frame);
        CablePort { capabilities, buffer: vec![0; max_frame].into(), poisoned: None, cable: self.clone() }
    }

    /// The frame arrives at the engine's next poll, after those sent before.
    pub fn send(&self, frame: Vec<u8>) {
        self.way().to_engine.push_back(frame);
    }

    /// Takes the oldest frame of the engine, with the time at which it was sent.
    pub fn next_frame(&self) -> Option<(Nanos, Vec<u8>)> {
        self.way().from_engine.pop_front()
    }

    /// Takes all frames of the engine, oldest first.
    pub fn take(&self) -> Vec<Vec<u8>> {
        self.way().from_engine.drain(..).map(|(_, frame)| frame).collect()
    }

    /// Copies of the engine's frames that were not taken, the oldest first.
    pub fn waiting(&self) -> Vec<(Nanos, Vec<u8>)> {
        self.way().from_engine.iter().cloned().collect()
    }

    /// From now on the port accepts this many frames of the engine; it is blocked after them.
    pub fn set_room(&self, frames: usize) {
        self.way().room = frames;
    }

    /// From now on the port's buffers are filled with bytes that differ at each place between values of `poison` below 255,
    /// and are never zero: they show which bytes the engine leaves unwritten.
    pub fn set_poison(&self, poison: u8) {
        self.way().poison = poison;
    }

    /// The allocations of the engine while it received and wrote frames.
    pub fn allocations(&self) -> u64 {
        self.way().allocations
    }

    /// Resets their count.
    pub fn forget_allocations(&self) {
        self.way().allocations = 0;
    }

    /// How often the port was queried for a next hop.
    pub fn resolved(&self) -> u64 {
        self.way().resolved
    }

    fn way(&self) -> MutexGuard<'_, Way> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frames in flight, both directions.
#[derive(Debug, Default)]
struct Way {
    to_engine: VecDeque<Vec<u8>>,
    from_engine: VecDeque<(Nanos, Vec<u8>)>,
    room: usize,
    poison: u8,
    allocations: u64,
    resolved: u64,
}

/// The engine's end.
#[derive(Debug)]
pub struct CablePort {
    capabilities: Capabilities,
    buffer: Box<[u8]>,
    /// The contents of the buffer before the engine writes to it.
    poisoned: Option<u8>,
    cable: Cable,
}

impl PacketDriver for CablePort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        let frames = std::mem::take(&mut self.cable.way().to_engine);
        let allocated = allocation_counter::measure(|| {
            frames.iter().for_each(|frame| sink.take(RxFrame::borrowed(frame)))
        });
        self.cable.way().allocations += allocated.count_total;
        Ok(frames.len())
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let CablePort { buffer, poisoned, cable, .. } = self;
        let mut way = cable.way();
        let mut sent = 0;
        while way.room > 0 {
            if *poisoned != Some(way.poison) {
                *poisoned = Some(way.poison);
                let bytes = buffer.iter_mut().enumerate();
                bytes.for_each(|(at, byte)| *byte = 1 + ((usize::from(way.poison) + at) % 255) as u8);
            }
            let mut length = None;
            let allocated = allocation_counter::measure(|| length = source.write(buffer));
            way.allocations += allocated.count_total;
            let Some(length) = length else { break };
            *poisoned = None;
            way.room -= 1;
            way.from_engine.push_back((now, buffer[..length].to_vec()));
            sent += 1;
        }
        Ok(sent)
    }

    fn wait(&mut self, _: Duration) -> Result<(), driver::Error> {
        Ok(())
    }

    fn resolve(&mut self, _: IpAddr) -> Result<driver::NextHop, driver::Error> {
        self.cable.way().resolved += 1;
        Ok(driver::NextHop::Found(PEER_MAC.0))
    }

    fn resolve_in_vlan(&mut self, _: u16, peer: IpAddr) -> Result<driver::NextHop, driver::Error> {
        self.resolve(peer)
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}
