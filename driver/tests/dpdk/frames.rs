//! Numbered frames.

use ferroce_driver::{FrameSource, Gathered, Memory, Payload, TAIL_MAX};

/// Numbered frames, contiguous or with a payload that is not copied.
pub(super) struct Numbered<'a> {
    pub(super) size: usize,
    pub(super) next: usize,
    pub(super) end: usize,
    pub(super) payload: Option<&'a Memory>,
}

impl FrameSource for Numbered<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        if self.next >= self.end {
            return None;
        }
        buffer[..self.size].copy_from_slice(&frame(self.size, self.next));
        self.next += 1;
        Some(self.size)
    }

    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        if self.payload.is_none() {
            return Some(Gathered { head: self.write(head)?, tail: 0 });
        }
        if self.next >= self.end {
            return None;
        }
        let whole = gathered(self.size, self.next);
        let (before, behind) = pieces(self.size, self.next);
        head[..before].copy_from_slice(&whole[..before]);
        tail[..behind].copy_from_slice(&whole[self.size - behind..]);
        self.next += 1;
        Some(Gathered { head: before, tail: behind })
    }

    fn payload(&self) -> Option<Payload<'_>> {
        let (before, behind) = pieces(self.size, self.next - 1);
        self.payload?.payload(before as u64, self.size - before - behind)
    }
}

/// A broadcast frame of this size, different from all others.
pub(super) fn frame(size: usize, number: usize) -> Vec<u8> {
    let mut bytes = vec![0xff; 6];
    bytes.extend([2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0]);
    bytes.extend(((size - 14) as u16).to_be_bytes());
    bytes.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0xc0, 0, 0x12, 0xb7]);
    bytes.extend(((size - 34) as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend((number as u32).to_be_bytes());
    bytes.extend((bytes.len()..size).map(|at| (at * 7 + number * 31) as u8));
    bytes
}

/// The lengths before and after the payload of such a frame.
pub(super) fn pieces(size: usize, number: usize) -> (usize, usize) {
    (54, if size > 60 { number % (TAIL_MAX + 1) } else { 4 })
}

/// The same with the payload of frame 0 of 9000 bytes, which is in the memory.
pub(super) fn gathered(size: usize, number: usize) -> Vec<u8> {
    let (before, behind) = pieces(size, number);
    let mut bytes = frame(size, number);
    bytes[before..size - behind].copy_from_slice(&frame(9000, 0)[before..size - behind]);
    bytes
}

/// Excludes frames that the kernel or another port sends on its own.
pub(super) fn ours(bytes: &[u8]) -> bool {
    bytes[..6] == [0xff; 6] && bytes[36..38] == [0x12, 0xb7]
}
