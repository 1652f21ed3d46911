//! The buffers for one frame.

use ferroce_driver::{Gathered, Placed, Room, TAIL_MAX};
use ferroce_wire::{Bth, FrameBuilder, Opcode, PathHeader, Qpn};

use crate::engine::mr::Granted;

/// A shorter payload is copied, because a separate segment costs the port more.
const APART_MIN: u32 = 512;

/// The buffers that a driver provides for a frame: one buffer; or one for the headers and one for the bytes after a payload
/// that stays in registered memory, or is written where the driver decides.
pub(crate) struct FrameSlot<'a> {
    head: &'a mut [u8],
    tail: Option<&'a mut [u8; TAIL_MAX]>,
    /// The payload may stay in registered memory.
    leaves_payload: bool,
    room: Option<&'a mut dyn Room>,
    /// The payload, if it stays in registered memory.
    payload: Option<Granted>,
    tail_len: usize,
    /// Bytes of a payload written where the driver decided.
    placed: usize,
}

impl<'a> FrameSlot<'a> {
    /// A frame in one buffer.
    pub(crate) fn whole(buffer: &'a mut [u8]) -> FrameSlot<'a> {
        FrameSlot::new(buffer, None, None)
    }

    /// A frame whose payload may stay in registered memory.
    pub(crate) fn in_pieces(head: &'a mut [u8], tail: &'a mut [u8; TAIL_MAX]) -> FrameSlot<'a> {
        FrameSlot::new(head, Some(tail), None)
    }

    /// A frame whose payload may be written to a place from `room`.
    pub(crate) fn with_room(
        head: &'a mut [u8],
        tail: &'a mut [u8; TAIL_MAX],
        room: &'a mut dyn Room,
    ) -> FrameSlot<'a> {
        FrameSlot::new(head, Some(tail), Some(room))
    }

    fn new(
        head: &'a mut [u8],
        tail: Option<&'a mut [u8; TAIL_MAX]>,
        room: Option<&'a mut dyn Room>,
    ) -> FrameSlot<'a> {
        let leaves_payload = tail.is_some() && room.is_none();
        FrameSlot { head, tail, leaves_payload, room, payload: None, tail_len: 0, placed: 0 }
    }

    /// Whether a payload of `len` bytes should stay in registered memory.
    pub(crate) fn wants_apart(&self, len: u32) -> bool {
        self.leaves_payload && len >= APART_MIN
    }

    /// The place for the payload of a frame on this path, if the driver has one.
    #[inline(always)]
    pub(crate) fn place(&mut self, path: &PathHeader, qpn: Qpn, len: usize) -> Option<Placed<'a>> {
        if len < APART_MIN as usize { None } else { self.place_long(path, qpn, len) }
    }

    #[inline]
    fn place_long(&mut self, path: &PathHeader, qpn: Qpn, len: usize) -> Option<Placed<'a>> {
        let room = self.room.take()?;
        let placed = room.place(path.destination(), qpn.value(), len)?;
        self.placed = len;
        Some(placed)
    }

    /// Starts a frame whose payload was written to the place from [`place`](FrameSlot::place).
    pub(crate) fn start_placed<'b>(
        &'b mut self,
        path: &'b PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'b>> {
        FrameBuilder::start_apart(self.head, self.tail.as_deref_mut()?, path, bth, payload_len)
    }

    /// Starts a frame in one buffer.
    #[inline]
    pub(crate) fn start<'b>(
        &'b mut self,
        path: &'b PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'b>> {
        FrameBuilder::start(self.head, path, bth, payload_len)
    }

    /// Starts a frame whose payload stays in registered memory, at `apart`, if set.
    #[inline(always)]
    pub(crate) fn start_apart<'b>(
        &'b mut self,
        path: &'b PathHeader,
        bth: Bth,
        payload_len: usize,
        apart: Option<Granted>,
    ) -> Option<FrameBuilder<'b>> {
        match (apart, &mut self.tail) {
            (Some(_), Some(tail)) => {
                let frame = FrameBuilder::start_apart(self.head, tail, path, bth, payload_len)?;
                self.payload = apart;
                Some(frame)
            }
            _ => FrameBuilder::start(self.head, path, bth, payload_len),
        }
    }

    /// Records the length after the payload. Returns the length before it.
    pub(crate) fn end(&mut self, (head, tail): (usize, usize)) -> usize {
        self.tail_len = tail;
        head
    }

    /// The opcode of the frame after a header of this length, if it is valid.
    pub(crate) fn opcode(&self, header: usize) -> Option<Opcode> {
        Opcode::from_byte(*self.head.get(header)?)
    }

    /// The length of the whole frame; `head` is the length that was returned for it.
    pub(crate) fn frame_length(&self, head: usize) -> u32 {
        (head + self.tail_len + self.placed) as u32 + self.payload.map_or(0, Granted::len)
    }

    /// The pieces of the frame, and its payload; `head` is the length that was returned for it.
    pub(crate) fn gathered(self, head: usize) -> (Gathered, Option<Granted>) {
        (Gathered { head, tail: self.tail_len }, self.payload)
    }
}
