//! The port of a scripted peer: what the engine sends is kept, what it gets is said.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce::driver::{self, Capabilities, FrameSink, FrameSource, RxFrame, Stats};
use ferroce::{Nanos, PacketDriver};

use super::PEER_MAC;

/// Frames under way, both directions.
#[derive(Default)]
pub(super) struct Cable {
    pub(super) to_engine: VecDeque<Vec<u8>>,
    pub(super) from_engine: VecDeque<(Nanos, Vec<u8>)>,
    /// How many frames the port still takes.
    pub(super) room: usize,
    /// What the port's buffers hold before the engine writes to them starts with this.
    pub(super) poison: u8,
    /// What the engine has allocated while it took frames and made some.
    pub(super) allocations: u64,
    /// How often the port was asked for a way.
    pub(super) resolved: u64,
}

pub(super) struct CablePort {
    pub(super) capabilities: Capabilities,
    pub(super) buffer: Box<[u8]>,
    /// What the buffer is filled with, until the engine has written to it.
    pub(super) poisoned: Option<u8>,
    pub(super) cable: Arc<Mutex<Cable>>,
}

impl PacketDriver for CablePort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        let frames = std::mem::take(&mut self.cable.lock().unwrap().to_engine);
        let allocated = allocation_counter::measure(|| {
            frames.iter().for_each(|frame| sink.take(RxFrame::borrowed(frame)))
        });
        self.cable.lock().unwrap().allocations += allocated.count_total;
        Ok(frames.len())
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let CablePort { buffer, poisoned, cable, .. } = self;
        let mut cable = cable.lock().unwrap();
        let mut sent = 0;
        while cable.room > 0 {
            // What the engine leaves unwritten shows up as these bytes.
            if *poisoned != Some(cable.poison) {
                *poisoned = Some(cable.poison);
                let bytes = buffer.iter_mut().enumerate();
                bytes.for_each(|(at, byte)| *byte = cable.poison.wrapping_add(at as u8));
            }
            let mut length = None;
            let allocated = allocation_counter::measure(|| length = source.write(buffer));
            cable.allocations += allocated.count_total;
            let Some(length) = length else { break };
            *poisoned = None;
            cable.room -= 1;
            cable.from_engine.push_back((now, buffer[..length].to_vec()));
            sent += 1;
        }
        Ok(sent)
    }

    fn wait(&mut self, _: Duration) -> Result<(), driver::Error> {
        Ok(())
    }

    fn resolve(&mut self, _: IpAddr) -> Result<driver::NextHop, driver::Error> {
        self.cable.lock().unwrap().resolved += 1;
        Ok(driver::NextHop::Found(PEER_MAC.0))
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}
