//! The driver under the engine: one frame in by hand, all frames out on record.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferroce::driver::{self, Capabilities, FrameSink, FrameSource, RxFrame, Stats};
use ferroce::{MacAddr, Nanos, PacketDriver};

pub(crate) const ENGINE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
pub(crate) const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(crate) const ENGINE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
pub(crate) const PEER_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
pub(crate) const ENGINE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));
pub(crate) const PEER_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

const MTU: u32 = 1200;
const MAX_FRAME: usize = MTU as usize + 18;

/// The frames of both directions.
#[derive(Default)]
struct Frames {
    to_engine: Vec<u8>,
    from_engine: Vec<Vec<u8>>,
    /// How many frames the port still takes.
    room: usize,
}

/// The far end of the cable.
#[derive(Clone, Default)]
pub(crate) struct Cable(Arc<Mutex<Frames>>);

impl Cable {
    /// The engine's end.
    pub(crate) fn port(&self) -> CablePort {
        let capabilities = Capabilities::new("cable", "fuzz0".to_owned(), ENGINE_MAC.0, MTU)
            .description(String::new())
            .addresses(vec![ENGINE_V4, ENGINE_V6])
            .max_frame(MAX_FRAME);
        CablePort { capabilities, cable: self.clone(), buffer: [0; MAX_FRAME] }
    }

    /// Puts a frame on the way; no bytes are no frame.
    pub(crate) fn send(&self, frame: &[u8]) {
        let mut frames = self.lock();
        frames.to_engine.clear();
        frames.to_engine.extend_from_slice(frame);
    }

    /// From now on the port takes so many frames.
    pub(crate) fn set_room(&self, room: usize) {
        self.lock().room = room;
    }

    /// Takes the frames that the engine has sent since it was last asked.
    pub(crate) fn take(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.lock().from_engine)
    }

    fn lock(&self) -> MutexGuard<'_, Frames> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) struct CablePort {
    capabilities: Capabilities,
    cable: Cable,
    buffer: [u8; MAX_FRAME],
}

impl PacketDriver for CablePort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        let mut frames = self.cable.lock();
        if frames.to_engine.is_empty() {
            return Ok(0);
        }
        sink.take(RxFrame::borrowed(&frames.to_engine));
        frames.to_engine.clear();
        Ok(1)
    }

    fn tx_burst(&mut self, _: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let mut frames = self.cable.lock();
        let mut sent = 0;
        while frames.room > 0 {
            // What the engine leaves unwritten shows up as this byte.
            self.buffer.fill(0xa5);
            let Some(length) = source.write(&mut self.buffer) else { break };
            frames.room -= 1;
            frames.from_engine.push(self.buffer[..length].to_vec());
            sent += 1;
        }
        Ok(sent)
    }

    fn wait(&mut self, _: Duration) -> Result<(), driver::Error> {
        Ok(())
    }

    fn resolve(&mut self, _: IpAddr) -> Result<driver::NextHop, driver::Error> {
        Ok(driver::NextHop::Found(PEER_MAC.0))
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}
