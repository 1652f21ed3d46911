//! The chunks of the receive side, and which of them the kernel has.

use xsk_rs::umem::frame::FrameDesc;

/// The chunks that frames are received into. What the kernel says of them is checked: a chunk that was taken
/// back twice would be given back twice, and then be written while it is read.
#[derive(Debug)]
pub(super) struct RxChunks {
    /// The number of the first, counted in the UMEM.
    first: usize,
    /// A power of two.
    chunk_size: usize,
    with_kernel: Box<[bool]>,
    descriptors: Box<[FrameDesc]>,
}

/// What a received descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// Bytes of a chunk that the kernel had, and we have now.
    Piece,
    /// The chunk is ours now, but the bytes are not inside it.
    Beyond,
    /// A place where the kernel had nothing.
    Foreign,
}

impl RxChunks {
    /// All of `chunks`, which lie in a row, are with the kernel.
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

    /// The kernel gets the chunk of this address again, which was taken from it.
    pub(super) fn give_back(&mut self, address: usize) {
        let chunk = self.number(address);
        self.with_kernel[chunk] = true;
    }

    /// As `give_back`, by the chunk's number among these. Returns its descriptor.
    pub(super) fn give_back_kept(&mut self, chunk: usize) -> FrameDesc {
        self.with_kernel[chunk] = true;
        self.descriptors[chunk]
    }

    /// The number of the chunk with this address among those of the receive side; one that none has, if it is
    /// another's.
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
    fn only_what_the_kernel_was_given() {
        let mut chunks = chunks();
        // The transmit chunks come before, nothing behind.
        for address in [0, 256, 3 * CHUNK - 1, 7 * CHUNK, 7 * CHUNK + 256, 1 << 40, usize::MAX] {
            assert_eq!(chunks.take(address, 64), Received::Foreign, "{address:#x}");
        }
        for chunk in 3..7 {
            assert_eq!(chunks.take(chunk * CHUNK + 256, 64), Received::Piece, "{chunk}");
        }
    }

    #[test]
    fn bytes_beyond_the_chunk_are_none_but_the_chunk_comes_back() {
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
