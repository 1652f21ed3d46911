//! Joining the descriptors of one received frame.
//!
//! The kernel takes chunks in the order in which it gets them back, so the pieces of a frame are almost always in
//! neighbouring chunks, with the headroom of one chunk between them. Then a later piece, which is the shorter one, is
//! moved down by these 256 bytes, to the end of the piece before it. If the chunks are not neighbours, or a burst ends between
//! them, the frame is copied as a whole.

use xsk_rs::umem::frame::FrameDesc;

use super::frames::Frames;
use super::layout::XDP_HEADROOM;

/// A frame in several descriptors, as far as it has been received.
#[derive(Debug)]
pub(super) struct Assembly {
    state: State,
    buffer: Box<[u8]>,
    chunk_size: usize,
    dropped: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The next descriptor begins a frame.
    Between,
    /// `len` contiguous bytes are in the UMEM, beginning at `start`. The last piece ended at `end` before it was moved.
    InPlace { start: usize, len: usize, end: usize },
    /// `len` bytes are in the buffer.
    Copied { len: usize },
    /// The frame is too large, or a piece of it is missing. The rest of it is skipped.
    Skipped,
}

impl Assembly {
    /// For frames of up to `max_frame` bytes in chunks of `chunk_size`.
    pub(super) fn new(max_frame: usize, chunk_size: usize) -> Assembly {
        Assembly { state: State::Between, buffer: vec![0; max_frame].into(), chunk_size, dropped: 0 }
    }

    /// Adds the next piece. Returns the frame when it is complete.
    ///
    /// # Safety
    /// The kernel must have handed over the descriptor's chunk, and must not get it back before [`Assembly::let_go`].
    pub(super) unsafe fn add<'a>(
        &'a mut self,
        frames: &'a mut Frames,
        piece: &FrameDesc,
    ) -> Option<&'a [u8]> {
        let (addr, len) = (piece.addr(), piece.lengths().data());
        if let (State::Between, false) = (self.state, piece.has_more_frames()) {
            // SAFETY: the caller keeps the contract, which is that of `bytes`.
            return Some(unsafe { frames.bytes(addr, len) });
        }
        self.state = match self.state {
            State::Between => State::InPlace { start: addr, len, end: addr + len },
            State::InPlace { start, len: so_far, end } => {
                let neighbour = end % self.chunk_size == 0 && addr == end + XDP_HEADROOM;
                if neighbour && so_far + len <= self.buffer.len() {
                    let offset = addr - start;
                    // SAFETY: the bytes from `start` to the end of this piece are chunks of this frame, and the kernel
                    // has none of them.
                    let row = unsafe { frames.bytes_mut(start, offset + len) };
                    row.copy_within(offset.., so_far);
                    State::InPlace { start, len: so_far + len, end: addr + len }
                } else {
                    // SAFETY: the kernel has none of this frame's chunks.
                    unsafe { self.copy_out(frames) };
                    // SAFETY: as above.
                    self.append(unsafe { frames.bytes(addr, len) })
                }
            }
            // SAFETY: the caller keeps the contract, which is that of `bytes`.
            State::Copied { .. } => self.append(unsafe { frames.bytes(addr, len) }),
            State::Skipped => State::Skipped,
        };
        if piece.has_more_frames() {
            return None;
        }
        match std::mem::replace(&mut self.state, State::Between) {
            State::InPlace { start, len, .. } if len <= self.buffer.len() => {
                // SAFETY: the kernel has none of this frame's chunks.
                Some(unsafe { frames.bytes(start, len) })
            }
            State::Copied { len } => Some(&self.buffer[..len]),
            _ => {
                self.dropped += 1;
                None
            }
        }
    }

    /// Skips an unusable piece: its frame is dropped.
    pub(super) fn skip(&mut self, piece: &FrameDesc) {
        self.state = State::Skipped;
        if !piece.has_more_frames() {
            self.state = State::Between;
            self.dropped += 1;
        }
    }

    /// Copies the received part of an incomplete frame, because its chunks are given back to the kernel now.
    ///
    /// # Safety
    /// The kernel must not have got them back yet.
    pub(super) unsafe fn let_go(&mut self, frames: &Frames) {
        // SAFETY: the caller keeps the contract.
        unsafe { self.copy_out(frames) };
    }

    /// Whether the next descriptor continues a frame.
    pub(super) fn under_way(&self) -> bool {
        !matches!(self.state, State::Between)
    }

    /// Frames dropped because they were too large or incomplete.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// # Safety
    /// The kernel must have none of the incomplete frame's chunks.
    unsafe fn copy_out(&mut self, frames: &Frames) {
        if let State::InPlace { start, len, .. } = self.state {
            self.state = State::Copied { len: 0 };
            // SAFETY: the caller keeps the contract, which is that of `bytes`.
            self.state = self.append(unsafe { frames.bytes(start, len) });
        }
    }

    fn append(&mut self, piece: &[u8]) -> State {
        let State::Copied { len } = self.state else { return State::Skipped };
        match self.buffer.get_mut(len..len + piece.len()) {
            Some(room) => {
                room.copy_from_slice(piece);
                State::Copied { len: len + piece.len() }
            }
            None => State::Skipped,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use xsk_rs::config::UmemConfig;

    use super::super::frames::CONTINUED;
    use super::*;

    const CHUNK: usize = 4096;
    const DATA: usize = CHUNK - XDP_HEADROOM;

    fn byte(at: usize) -> u8 {
        (at * 7 + at / 251) as u8
    }

    struct Lab {
        frames: Frames,
        chunks: Vec<FrameDesc>,
        assembly: Assembly,
    }

    impl Lab {
        fn new(max_frame: usize) -> Option<Lab> {
            let config = UmemConfig::builder().build().unwrap();
            match Frames::new(config, NonZeroU32::new(8).unwrap()) {
                Ok((frames, chunks)) => {
                    Some(Lab { frames, chunks, assembly: Assembly::new(max_frame, CHUNK) })
                }
                Err(e) => {
                    println!("skipped: no AF_XDP here ({e})");
                    None
                }
            }
        }

        /// Writes a frame into these chunks as the kernel does, and adds it piece by piece. With `bursts`, each piece
        /// is in a burst of its own.
        fn add(&mut self, len: usize, chunks: &[usize], bursts: bool) -> Option<Vec<u8>> {
            for (i, chunk) in chunks.iter().enumerate() {
                let mut piece = self.chunks[*chunk];
                let from = i * DATA;
                let until = if i + 1 < chunks.len() { from + DATA } else { len };
                // SAFETY: nothing was given to the kernel.
                let bytes = unsafe { self.frames.bytes_mut(piece.addr(), until - from) };
                bytes.iter_mut().zip(from..).for_each(|(b, at)| *b = byte(at));
                // SAFETY: as above.
                unsafe { self.frames.umem.data_mut(&mut piece) }.cursor().set_pos(until - from);
                piece.set_options(if i + 1 < chunks.len() { CONTINUED } else { 0 });
                assert_eq!(self.assembly.under_way(), i > 0);
                // SAFETY: as above.
                let whole = unsafe { self.assembly.add(&mut self.frames, &piece) }.map(<[u8]>::to_vec);
                if i + 1 == chunks.len() {
                    return whole;
                }
                assert_eq!(whole, None);
                if bursts {
                    // SAFETY: as above.
                    unsafe { self.assembly.let_go(&self.frames) };
                    // SAFETY: as above. The chunk is the kernel's now, which overwrites it.
                    unsafe { self.frames.bytes_mut(piece.addr(), DATA) }.fill(0xee);
                }
            }
            None
        }
    }

    #[test]
    fn frames_of_several_pieces_are_put_together() {
        let Some(mut lab) = Lab::new(3 * DATA) else { return };
        let neighbours: [&[usize]; 3] = [&[2], &[2, 3], &[2, 3, 4]];
        let scattered: [&[usize]; 7] =
            [&[7, 0], &[3, 2], &[1, 3], &[2, 3, 5], &[2, 4, 5], &[4, 3, 2], &[6, 7, 0]];
        for (chunks, bursts) in neighbours.into_iter().chain(scattered).flat_map(|c| [(c, false), (c, true)])
        {
            let least = (chunks.len() - 1) * DATA + 1;
            for len in [least, least + 255, least + 256, least + 300, chunks.len() * DATA] {
                let whole = lab.add(len, chunks, bursts);
                let expected: Vec<_> = (0..len).map(byte).collect();
                assert!(whole == Some(expected), "{len} bytes in the chunks {chunks:?}, bursts: {bursts}");
            }
        }
        assert_eq!(lab.assembly.dropped(), 0);
    }

    #[test]
    fn an_oversize_frame_is_dropped_whole() {
        let Some(mut lab) = Lab::new(DATA + 10) else { return };
        let mut dropped = 0;
        for chunks in [[2, 3], [3, 2]] {
            for bursts in [false, true] {
                assert_eq!(lab.add(DATA + 11, &chunks, bursts), None);
                dropped += 1;
                assert_eq!(lab.assembly.dropped(), dropped);
                assert_eq!(lab.add(DATA + 10, &chunks, bursts).map(|f| f.len()), Some(DATA + 10));
            }
        }
        // The first piece alone may be too large.
        lab.assembly = Assembly::new(DATA - 1, CHUNK);
        assert_eq!(lab.add(DATA + 1, &[2, 3], false), None);
        assert_eq!(lab.add(2 * DATA + 1, &[2, 3, 4], true), None);
        assert_eq!(lab.assembly.dropped(), 2);
        assert_eq!(lab.add(60, &[2], false).map(|f| f.len()), Some(60));
    }

    #[test]
    fn a_frame_that_lacks_a_piece_is_dropped_whole() {
        let Some(mut lab) = Lab::new(3 * DATA) else { return };
        for at in 0..3 {
            for bursts in [false, true] {
                let dropped = lab.assembly.dropped();
                for (i, chunk) in [2, 3, 4].into_iter().enumerate() {
                    let mut piece = lab.chunks[chunk];
                    // SAFETY: nothing was given to the kernel.
                    unsafe { lab.frames.umem.data_mut(&mut piece) }.cursor().set_pos(DATA);
                    piece.set_options(if i < 2 { CONTINUED } else { 0 });
                    if i == at {
                        lab.assembly.skip(&piece);
                    } else {
                        // SAFETY: as above.
                        assert_eq!(unsafe { lab.assembly.add(&mut lab.frames, &piece) }, None);
                    }
                    if bursts {
                        // SAFETY: as above.
                        unsafe { lab.assembly.let_go(&lab.frames) };
                    }
                }
                assert_eq!(lab.assembly.dropped(), dropped + 1);
                // The next one is whole.
                assert_eq!(lab.add(2 * DATA, &[2, 3], bursts).map(|f| f.len()), Some(2 * DATA));
            }
        }
    }
}
