//! What a driver and the engine hand each other during a burst.

use crate::kept::RxFrame;
use crate::memory::{Payload, Span, SpanMut};

/// Where a burst of received frames goes. A closure over `&[u8]` is one.
pub trait FrameSink {
    /// A frame of this burst whose turn comes soon: time to fetch what it will need into the cache.
    /// May be only the frame's start, with the headers in it. A driver that can't look ahead, or has
    /// nothing to look ahead to, leaves it out.
    fn announce(&mut self, frame: &[u8]) {
        let _ = frame;
    }

    /// Takes a frame, which is borrowed for the call only; [`RxFrame::keep`] keeps it for longer.
    fn take(&mut self, frame: RxFrame<'_>);
}

impl<F: FnMut(&[u8])> FrameSink for F {
    fn take(&mut self, frame: RxFrame<'_>) {
        self(frame.bytes());
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
        Some(Gathered { head, tail: 0 })
    }

    /// The payload of the frame that [`gather`](FrameSource::gather) has just made, if it is not in `head`.
    fn payload(&self) -> Option<Payload<'_>> {
        None
    }

    /// As [`write`](FrameSource::write), for ports whose frames go to memory that others have too: `head` and `tail` are
    /// the port's own and get what is around a payload, which goes where `room` says. `head` gets all of a frame whose
    /// payload is short, or has no room elsewhere; it is as long as `write` wants its buffer.
    fn place(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX], room: &mut dyn Room) -> Option<Gathered> {
        let _ = (tail, room);
        let head = self.write(head)?;
        Some(Gathered { head, tail: 0 })
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

/// Where payloads go that are copied once, from registered memory to what processes share.
pub trait Room {
    /// A place for `payload` bytes of a frame to the queue pair `qpn` at an IP address, of which `destination` has the 4 or
    /// 16 bytes; `None` if there is none. It is asked for once a frame at most, before the frame is written.
    fn place(&mut self, destination: &[u8], qpn: u32, payload: usize) -> Option<Placed<'_>>;
}

/// Where a payload goes.
#[derive(Debug)]
pub struct Placed<'a> {
    /// As many bytes as the payload has.
    pub to: SpanMut<'a>,
    /// Whether the frame is to have an ICRC. If not, its four bytes say nothing.
    pub icrc: bool,
}

/// Most bytes behind a payload: three of pad, four of ICRC.
pub const TAIL_MAX: usize = 8;

/// A frame in pieces: what is around its [`payload`](FrameSource::payload).
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    /// Bytes in `head`.
    pub head: usize,
    /// Bytes in `tail`.
    pub tail: usize,
}

/// A sink in front of another one, which gets every call. `pass` sees each frame first, and tells whether it goes on.
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

/// A source in front of another one, which gets every call. `pass` sees each frame that is to be sent, and tells
/// whether it goes on; the next one is asked for in place of one that does not.
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
            // A length beyond the buffer is the driver's to refuse.
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

    /// A frame must be whole to be seen, so it is written in one piece.
    fn place(&mut self, head: &mut [u8], _: &mut [u8; TAIL_MAX], _: &mut dyn Room) -> Option<Gathered> {
        let head = self.write(head)?;
        Some(Gathered { head, tail: 0 })
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        self.source.renumber(frame, identification);
    }
}

/// A frame that is to be sent, as a [`FilteredSource`] sees it: in one piece or in three.
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

    /// The whole frame; in `scratch`, if it is in several pieces. The payload's owner may write it before it
    /// is sent, so what is sent can differ from this.
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
