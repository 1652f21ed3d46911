//! The interface between a driver and the engine during a burst.

use crate::kept::RxFrame;
use crate::memory::{Payload, Span, SpanMut};

/// The destination of a burst of received frames. A closure over `&[u8]` is one.
pub trait FrameSink {
    /// Announces a frame that follows soon in this burst, so that its data can be prefetched into the cache. The slice may
    /// end after the headers. A driver need not call it.
    fn announce(&mut self, frame: &[u8]) {
        let _ = frame;
    }

    /// Takes a frame, which is borrowed only for the call; [`RxFrame::keep`] keeps it for longer.
    fn take(&mut self, frame: RxFrame<'_>);
}

impl<F: FnMut(&[u8])> FrameSink for F {
    fn take(&mut self, frame: RxFrame<'_>) {
        self(frame.bytes());
    }
}

/// The source of a burst of frames to send. A closure from a buffer to a length is one.
pub trait FrameSource {
    /// Writes the next frame at the start of `buffer`, which is at least
    /// [`Capabilities::max_frame`](crate::Capabilities::max_frame) bytes long, and returns its
    /// length; `None` if there is nothing to send.
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize>;

    /// As [`write`](FrameSource::write), but a payload may stay in registered memory: `head` gets the bytes before it, `tail`
    /// those after it. For ports that can send a frame in several segments.
    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        let _ = tail;
        let head = self.write(head)?;
        Some(Gathered { head, tail: 0 })
    }

    /// The payload of the frame that [`gather`](FrameSource::gather) has just written, if it is not in `head`.
    fn payload(&self) -> Option<Payload<'_>> {
        None
    }

    /// As [`write`](FrameSource::write), for ports that write frames to shared memory: `head` and `tail` are private to the port
    /// and get the bytes around a payload, which is written to the place from `room`. `head` gets the whole frame if its payload
    /// is short, or if there is no room elsewhere; it is as long as the buffer of `write`.
    fn place(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX], room: &mut dyn Room) -> Option<Gathered> {
        let _ = (tail, room);
        let head = self.write(head)?;
        Some(Gathered { head, tail: 0 })
    }

    /// Changes the IPv4 identification of a frame that [`write`](FrameSource::write) has just written. For sockets whose kernel
    /// numbers the packets ([`Layer::Ip`](crate::Layer::Ip)).
    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        let _ = (frame, identification);
    }
}

impl<F: FnMut(&mut [u8]) -> Option<usize>> FrameSource for F {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self(buffer)
    }
}

/// The destination of payloads that are copied once, from registered to shared memory.
pub trait Room {
    /// A place for `payload` bytes of a frame to the queue pair `qpn` at the IP address `destination`, of 4 or 16 bytes; `None`
    /// if there is none. It is called at most once per frame, before the frame is written.
    fn place(&mut self, destination: &[u8], qpn: u32, payload: usize) -> Option<Placed<'_>>;
}

/// The place for a payload.
#[derive(Debug)]
pub struct Placed<'a> {
    /// As long as the payload.
    pub to: SpanMut<'a>,
    /// Whether the frame has an ICRC. If not, its four bytes are undefined.
    pub icrc: bool,
}

/// The most bytes after a payload: three of pad, four of ICRC.
pub const TAIL_MAX: usize = 8;

/// A frame in pieces: the lengths around its [`payload`](FrameSource::payload).
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    /// Bytes in `head`.
    pub head: usize,
    /// Bytes in `tail`.
    pub tail: usize,
}

/// A sink in front of another one, which gets every call. `pass` sees each frame first, and returns whether to pass it on.
pub struct FilteredSink<'a, F> {
    sink: &'a mut dyn FrameSink,
    pass: F,
}

impl<'a, F: FnMut(&[u8]) -> bool> FilteredSink<'a, F> {
    /// In front of `sink`.
    pub fn new(sink: &'a mut dyn FrameSink, pass: F) -> FilteredSink<'a, F> {
        FilteredSink { sink, pass }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<F: FnMut(&[u8]) -> bool> FrameSink for FilteredSink<'_, F> {
    fn announce(&mut self, frame: &[u8]) {
        self.sink.announce(frame);
    }

    fn take(&mut self, frame: RxFrame<'_>) {
        if (self.pass)(frame.bytes()) {
            self.sink.take(frame);
        }
    }
}

/// A source in front of another one, which gets every call. `pass` sees each frame to send, and returns whether to send it;
/// a rejected frame is replaced by the next one. Frames for shared memory are written in one piece, so their payload is copied once more.
pub struct FilteredSource<'a, F> {
    source: &'a mut dyn FrameSource,
    pass: F,
}

impl<'a, F: FnMut(Sent<'_>) -> bool> FilteredSource<'a, F> {
    /// In front of `source`.
    pub fn new(source: &'a mut dyn FrameSource, pass: F) -> FilteredSource<'a, F> {
        FilteredSource { source, pass }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<F: FnMut(Sent<'_>) -> bool> FrameSource for FilteredSource<'_, F> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        loop {
            let len = self.source.write(buffer)?;
            // The driver refuses a length beyond the buffer.
            let Some(head) = buffer.get(..len) else { return Some(len) };
            if (self.pass)(Sent { head, payload: None, tail: &[] }) {
                return Some(len);
            }
        }
    }

    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        loop {
            let gathered = self.source.gather(head, tail)?;
            let (Some(head), Some(tail)) = (head.get(..gathered.head), tail.get(..gathered.tail)) else {
                return Some(gathered);
            };
            let payload = self.source.payload().map(Payload::span);
            if (self.pass)(Sent { head, payload, tail }) {
                return Some(gathered);
            }
        }
    }

    fn payload(&self) -> Option<Payload<'_>> {
        self.source.payload()
    }

    /// A frame must be complete to be examined, so it is written in one piece.
    fn place(&mut self, head: &mut [u8], _: &mut [u8; TAIL_MAX], _: &mut dyn Room) -> Option<Gathered> {
        let head = self.write(head)?;
        Some(Gathered { head, tail: 0 })
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        self.source.renumber(frame, identification);
    }
}

/// A frame to send, in a [`FilteredSource`]: in one piece or in three.
#[derive(Clone, Copy, Debug)]
pub struct Sent<'a> {
    head: &'a [u8],
    payload: Option<Span<'a>>,
    tail: &'a [u8],
}

impl<'a> Sent<'a> {
    /// The first piece, which has all headers.
    pub fn head(&self) -> &'a [u8] {
        self.head
    }

    /// The whole frame; in `scratch`, if it is in several pieces. The payload's owner may write it before it is sent, so the
    /// frame sent can differ.
    pub fn bytes<'b>(&self, scratch: &'b mut Vec<u8>) -> &'b [u8]
    where
        'a: 'b,
    {
        let Some(payload) = self.payload else { return self.head };
        scratch.clear();
        scratch.extend_from_slice(self.head);
        scratch.resize(self.head.len() + payload.len(), 0);
        payload.copy_to(&mut scratch[self.head.len()..]);
        scratch.extend_from_slice(self.tail);
        scratch
    }
}

/// Two sources as one: `first` is asked for each frame, and `then` when it has none.
pub struct EitherSource<'a> {
    first: &'a mut dyn FrameSource,
    then: &'a mut dyn FrameSource,
    /// Whether the last frame is `then`'s.
    second: bool,
}

impl<'a> EitherSource<'a> {
    /// `first` before `then`.
    pub fn new(first: &'a mut dyn FrameSource, then: &'a mut dyn FrameSource) -> EitherSource<'a> {
        EitherSource { first, then, second: false }
    }
}

#[deny(clippy::missing_trait_methods)]
impl FrameSource for EitherSource<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let first = self.first.write(buffer);
        self.second = first.is_none();
        first.or_else(|| self.then.write(buffer))
    }

    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        let first = self.first.gather(head, tail);
        self.second = first.is_none();
        first.or_else(|| self.then.gather(head, tail))
    }

    fn payload(&self) -> Option<Payload<'_>> {
        if self.second { self.then.payload() } else { self.first.payload() }
    }

    fn place(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX], room: &mut dyn Room) -> Option<Gathered> {
        let first = self.first.place(head, tail, room);
        self.second = first.is_none();
        first.or_else(|| self.then.place(head, tail, room))
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        let source = if self.second { &mut self.then } else { &mut self.first };
        source.renumber(frame, identification);
    }
}
