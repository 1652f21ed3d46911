//! What a driver and the engine hand each other during a burst.

use crate::memory::Pinned;

/// Where a burst of received frames goes. A closure over `&[u8]` is one.
pub trait FrameSink {
    /// A frame of this burst whose turn comes soon: time to fetch what it will need into the cache.
    /// May be only the frame's start, with the headers in it. A driver that can't look ahead, or has
    /// nothing to look ahead to, leaves it out.
    fn announce(&mut self, frame: &[u8]) {
        let _ = frame;
    }

    /// Takes a frame, which is borrowed for the call only.
    fn take(&mut self, frame: &[u8]);
}

impl<F: FnMut(&[u8])> FrameSink for F {
    fn take(&mut self, frame: &[u8]) {
        self(frame);
    }
}

/// Where a burst of frames to send comes from. A closure from a buffer to a length is one.
pub trait FrameSource {
    /// Writes the next frame at the start of `buffer`, which is at least
    /// [`Capabilities::max_frame`](crate::Capabilities::max_frame) bytes long, and returns its
    /// length; `None` if there is nothing to send.
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize>;

    /// As [`write`](FrameSource::write), but a payload may stay where it is registered: `head` gets
    /// what is in front of it, `tail` what is behind it. For ports that send from several places.
    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        let _ = tail;
        let head = self.write(head)?;
        Some(Gathered { head, payload: None, tail: 0 })
    }

    /// Gives a frame that [`write`](FrameSource::write) has just made another IPv4 identification.
    /// For sockets whose kernel numbers the packets ([`Layer::Ip`](crate::Layer::Ip)).
    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        let _ = (frame, identification);
    }
}

impl<F: FnMut(&mut [u8]) -> Option<usize>> FrameSource for F {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self(buffer)
    }
}

/// Most bytes behind a payload: three of pad, four of ICRC.
pub const TAIL_MAX: usize = 8;

/// A frame in pieces.
#[derive(Debug)]
pub struct Gathered {
    /// Bytes in `head`.
    pub head: usize,
    /// The payload, if it is not in `head`.
    pub payload: Option<Pinned>,
    /// Bytes in `tail`.
    pub tail: usize,
}
