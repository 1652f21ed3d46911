//! Two ports over a ring of frames in each direction: without a driver's cost, without a copy.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferroce::driver::{Capabilities, Error, FrameSink, FrameSource, NextHop, RxFrame, Stats};
use ferroce::{Nanos, PacketDriver};

/// The most bytes of a frame.
pub const FRAME: usize = 4300;
const FRAMES: usize = 1024;
/// The most frames of one `rx_burst`.
const BURST: usize = 64;

/// One direction.
struct Ring {
    frames: Vec<(usize, Box<[u8]>)>,
    head: usize,
    tail: usize,
}

impl Ring {
    fn new() -> Ring {
        let frames = (0..FRAMES).map(|_| (0, vec![0; FRAME].into_boxed_slice())).collect();
        Ring { frames, head: 0, tail: 0 }
    }

    /// Lets `source` write the next frame in place. Returns whether there was room and a frame.
    fn push(&mut self, source: &mut dyn FrameSource) -> bool {
        if self.tail - self.head == FRAMES {
            return false;
        }
        let (length, frame) = &mut self.frames[self.tail % FRAMES];
        let Some(written) = source.write(frame) else { return false };
        *length = written;
        self.tail += 1;
        true
    }
}

/// One end of a pair of rings.
pub struct RingPort {
    capabilities: Capabilities,
    rx: Arc<Mutex<Ring>>,
    tx: Arc<Mutex<Ring>>,
}

/// Two connected ports: 192.0.2.1 and 192.0.2.2.
pub fn ports() -> [RingPort; 2] {
    let [a, b] = [(); 2].map(|()| Arc::new(Mutex::new(Ring::new())));
    [RingPort::new(1, a.clone(), b.clone()), RingPort::new(2, b, a)]
}

impl RingPort {
    fn new(n: u8, rx: Arc<Mutex<Ring>>, tx: Arc<Mutex<Ring>>) -> RingPort {
        let capabilities = Capabilities::new("ring", format!("ring{n}"), [2, 0, 0, 0, 0, n], 4200)
            .description("frames in memory")
            .addresses(vec![[192, 0, 2, n].into()])
            .max_frame(FRAME);
        RingPort { capabilities, rx, tx }
    }
}

impl PacketDriver for RingPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let mut ring = lock(&self.rx);
        let burst = (ring.tail - ring.head).min(BURST);
        for n in ring.head..ring.head + burst {
            let (length, frame) = &ring.frames[n % FRAMES];
            sink.announce(&frame[..*length]);
        }
        for _ in 0..burst {
            let (length, frame) = &ring.frames[ring.head % FRAMES];
            sink.take(RxFrame::borrowed(&frame[..*length]));
            ring.head += 1;
        }
        Ok(burst)
    }

    fn tx_burst(&mut self, _: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let mut ring = lock(&self.tx);
        let mut sent = 0;
        while ring.push(source) {
            sent += 1;
        }
        Ok(sent)
    }

    fn wait(&mut self, _: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn resolve(&mut self, _: IpAddr) -> Result<NextHop, Error> {
        Ok(NextHop::Found([2, 0, 0, 0, 0, 3 - self.capabilities.mac[5]]))
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

fn lock(ring: &Mutex<Ring>) -> MutexGuard<'_, Ring> {
    ring.lock().unwrap_or_else(PoisonError::into_inner)
}
