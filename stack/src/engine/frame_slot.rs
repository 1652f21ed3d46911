//! Where one frame is written.

use ferroce_driver::{Gathered, Placed, Room, TAIL_MAX};
use ferroce_wire::{Bth, FrameBuilder, Opcode, PathHeader, Qpn};

use crate::engine::mr::Granted;

/// A payload that is shorter is copied: a piece of its own costs the port more than that.
const APART_MIN: u32 = 512;

/// The place that a driver gives for a frame: one buffer; or one for the headers and one for what is
/// behind a payload that stays in registered memory, or goes where the driver says.
pub(crate) struct FrameSlot<'a> {
    head: &'a mut [u8],
    tail: Option<&'a mut [u8; TAIL_MAX]>,
    /// A payload may stay where it is.
    leaves_payload: bool,
    room: Option<&'a mut dyn Room>,
    /// The payload, if it stays where it is.
    payload: Option<Granted>,
    tail_len: usize,
    /// Bytes of a payload that is where the driver said.
    placed: usize,
}

impl<'a> FrameSlot<'a> {
    /// A frame in one piece.
    pub(crate) fn whole(buffer: &'a mut [u8]) -> FrameSlot<'a> {
        FrameSlot::new(buffer, None, None)
    }

    /// A frame whose payload may stay where it is.
    pub(crate) fn in_pieces(head: &'a mut [u8], tail: &'a mut [u8; TAIL_MAX]) -> FrameSlot<'a> {
        FrameSlot::new(head, Some(tail), None)
    }

    /// A frame whose payload may go where `room` says.
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

    /// Whether a payload of `len` bytes is better left where it is.
    pub(crate) fn wants_apart(&self, len: u32) -> bool {
        self.leaves_payload && len >= APART_MIN
    }

    /// Where the payload of a frame on this path goes, if the driver says.
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

    /// Begins a frame whose payload goes where [`place`](FrameSlot::place) has said.
    pub(crate) fn start_placed<'b>(
        &'b mut self,
        path: &'b PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'b>> {
        FrameBuilder::start_apart(self.head, self.tail.as_deref_mut()?, path, bth, payload_len)
    }

    /// Begins a frame with all that it has in one buffer.
    #[inline]
    pub(crate) fn start<'b>(
        &'b mut self,
        path: &'b PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'b>> {
        FrameBuilder::start(self.head, path, bth, payload_len)
    }

    /// Begins a frame whose payload stays where it is, at `apart`, if that is told.
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

    /// Notes what the frame has behind its payload. Returns what it has in front.
    pub(crate) fn end(&mut self, (head, tail): (usize, usize)) -> usize {
        self.tail_len = tail;
        head
    }

    /// The opcode of the frame behind a header of so many bytes, if it is one.
    pub(crate) fn opcode(&self, header: usize) -> Option<Opcode> {
        Opcode::from_byte(*self.head.get(header)?)
    }

    /// All of the frame, in bytes; `head` is the length that was returned for it.
    pub(crate) fn frame_length(&self, head: usize) -> u32 {
        (head + self.tail_len + self.placed) as u32 + self.payload.map_or(0, Granted::len)
    }

    /// The frame in pieces, and where its payload is; `head` is the length that was returned for it.
    pub(crate) fn gathered(self, head: usize) -> (Gathered, Option<Granted>) {
        (Gathered { head, tail: self.tail_len }, self.payload)
    }
}
