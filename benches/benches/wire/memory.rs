//! The data of both ends, and its check.

use std::ops::Range;

/// Fills memory with bytes that depend on position and seed.
pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    for (n, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, n)[..chunk.len()]);
    }
}

/// Compares a range, starting at a multiple of 8, with what [`fill`] wrote at the other end.
pub(crate) fn verify(bytes: &[u8], seed: u64, range: Range<usize>) -> Result<(), String> {
    let first = range.start / 8;
    for (n, chunk) in bytes[range].chunks(8).enumerate() {
        let expected = word(seed, first + n);
        if chunk != &expected[..chunk.len()] {
            let at = 8 * (first + n);
            return Err(format!("the bytes at {at} are {chunk:x?}, sent were {expected:x?}"));
        }
    }
    Ok(())
}

fn word(seed: u64, n: usize) -> [u8; 8] {
    let mut z = (seed << 40).wrapping_add(n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // No byte is 0, the initial content of memory.
    ((z ^ (z >> 31)) | 0x0101_0101_0101_0101).to_ne_bytes()
}
