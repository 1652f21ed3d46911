//! The chunks of the receive side, and which of them the kernel has.

use xsk_rs::umem::frame::FrameDesc;

/// The chunks that frames are received into. Received descriptors are checked against it: a chunk that is taken back
/// twice would be given to the kernel twice, and then be written while it is read.
#[derive(Debug)]
pub(super) struct RxChunks {
    /// The number, in the UMEM, of the first chunk.
    first: usize,
    /// A power of two.
    chunk_size: usize,
    with_kernel: Box<[bool]>,
    descriptors: Box<[FrameDesc]>,
}

/// The result of checking a received descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Bytes of a chunk that the kernel had and has handed over.
    Piece,
    /// The kernel had the chunk and has handed it over, but the bytes are not inside it.
    Beyond,
    /// An address where the kernel had no chunk.
    Foreign,
}

impl RxChunks {
    /// The kernel has all of `chunks`, which are contiguous.
    pub(super) fn new(chunks: &[FrameDesc], chunk_size: usize) -> RxChunks {
        let first = chunks.first().map_or(0, |chunk| chunk.addr() / chunk_size);
        RxChunks {
            first,
            chunk_size,
            with_kernel: vec![true; chunks.len()].into(),
            descriptors: chunks.into(),
        }
    }

    /// Takes back the chunk of a received descriptor.
    pub(super) fn take(&mut self, address: usize, length: usize) -> Received {
        let chunk = self.number(address);
        let Some(with_kernel) = self.with_kernel.get_mut(chunk) else {
            return Received::Foreign;
        };
        if !std::mem::replace(with_kernel, false) {
            return Received::Foreign;
        }
        if length <= self.chunk_size - (address & (self.chunk_size - 1)) {
            Received::Piece
        } else {
            Received::Beyond
        }
    }

    /// Marks the chunk at this address as the kernel's again. It must have been taken.
    pub(super) fn give_back(&mut self, address: usize) {
        let chunk = self.number(address);
        self.with_kernel[chunk] = true;
    }

    /// As `give_back`, with the chunk's number on the receive side. Returns its descriptor.
    pub(super) fn give_back_kept(&mut self, chunk: usize) -> FrameDesc {
        self.with_kernel[chunk] = true;
        self.descriptors[chunk]
    }

    /// The number, on the receive side, of the chunk at this address; a number that is out of range for other chunks.
    pub(super) fn number(&self, address: usize) -> usize {
        (address >> self.chunk_size.trailing_zeros()).wrapping_sub(self.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = 4096;

    fn chunks() -> RxChunks {
        RxChunks {
            first: 3,
            chunk_size: CHUNK,
            with_kernel: vec![true; 4].into(),
            descriptors: Box::default(),
        }
    }

    #[test]
    fn a_chunk_is_taken_once() {
        let mut chunks = chunks();
        let address = 4 * CHUNK + 256;
        for _ in 0..3 {
            assert_eq!(chunks.take(address, 1500), Received::Piece);
            assert_eq!(chunks.take(address, 1500), Received::Foreign);
            assert_eq!(chunks.take(4 * CHUNK, 0), Received::Foreign);
            chunks.give_back(address);
        }
    }

    #[test]
    fn only_chunks_of_the_receive_side_are_taken() {
        let mut chunks = chunks();
        // The transmit chunks have lower addresses, and no chunks follow.
        for address in [0, 256, 3 * CHUNK - 1, 7 * CHUNK, 7 * CHUNK + 256, 1 << 40, usize::MAX] {
            assert_eq!(chunks.take(address, 64), Received::Foreign, "{address:#x}");
        }
        for chunk in 3..7 {
            assert_eq!(chunks.take(chunk * CHUNK + 256, 64), Received::Piece, "{chunk}");
        }
    }

    #[test]
    fn a_descriptor_beyond_its_chunk_returns_only_the_chunk() {
        for (offset, length, what) in [
            (256, CHUNK - 256, Received::Piece),
            (256, CHUNK - 255, Received::Beyond),
            (0, CHUNK, Received::Piece),
            (CHUNK - 1, 1, Received::Piece),
            (CHUNK - 1, 2, Received::Beyond),
            (256, u32::MAX as usize, Received::Beyond),
            (256, usize::MAX, Received::Beyond),
        ] {
            let mut chunks = chunks();
            assert_eq!(chunks.take(6 * CHUNK + offset, length), what, "{offset} + {length}");
            chunks.give_back(6 * CHUNK + offset);
            assert_eq!(chunks.take(6 * CHUNK + 256, 64), Received::Piece);
        }
    }
}
