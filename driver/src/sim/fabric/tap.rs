//! Taps, which see the frames that pass a port.

use crate::Nanos;

use super::event::Picos;
use super::frame::Frames;

/// Sees a frame that passes a port: the time, whether it leaves the port (or has arrived), and its bytes.
pub type Tap = Box<dyn FnMut(Nanos, bool, &[u8]) + Send>;

/// The taps, by port.
#[derive(Default)]
pub(super) struct Taps(Vec<(u32, Tap)>);

impl Taps {
    pub(super) fn add(&mut self, port: u32, tap: Tap) {
        self.0.push((port, tap));
    }

    #[inline]
    pub(super) fn show(&mut self, port: u32, now: Picos, leaves: bool, frames: &Frames, frame: u32) {
        for (_, tap) in self.0.iter_mut().filter(|(at, _)| *at == port) {
            tap(now.nanos(), leaves, &frames.to_vec(frame));
        }
    }
}
