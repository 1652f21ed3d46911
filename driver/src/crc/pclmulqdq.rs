//! 16 bytes at a time, with SSE4.1 and PCLMULQDQ.

use std::arch::x86_64::*;

use super::constants::{self, INVERSE, MODULUS, coefficients};

/// Bytes of a vector.
const VECTOR: usize = 16;
/// Bytes of the vectors that a turn of the loop over long messages takes: as many as a mask has.
const TURN: usize = 4 * VECTOR;

/// Whether the processor can call the functions of this module.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("sse4.1") && is_x86_feature_detected!("pclmulqdq")
}

#[target_feature(enable = "sse4.1,pclmulqdq")]
pub(super) fn update(register: u32, data: &[u8]) -> u32 {
    run::<false>(register, None, Bytes { from: data, to: &mut [] })
}

#[target_feature(enable = "sse4.1,pclmulqdq")]
pub(super) fn update_masked(register: u32, mask: &[u8; 64], data: &[u8]) -> u32 {
    run::<false>(register, Some(mask), Bytes { from: data, to: &mut [] })
}

/// `from` and `to` have the same length.
#[target_feature(enable = "sse4.1,pclmulqdq")]
pub(super) fn copy(register: u32, from: &[u8], to: &mut [u8]) -> u32 {
    run::<true>(register, None, Bytes { from, to })
}

#[inline]
#[target_feature(enable = "sse4.1,pclmulqdq")]
fn run<const COPY: bool>(register: u32, mask: Option<&[u8; TURN]>, mut bytes: Bytes<'_, COPY>) -> u32 {
    let len = bytes.from.len();
    // What is added to the next vector: the register to the first.
    let mut addend = _mm_cvtsi32_si128(register.cast_signed());
    if len < 2 * TURN {
        let mut sum = _mm_setzero_si128();
        for at in 0..=len / VECTOR {
            let count = bytes.from.len().min(VECTOR);
            let mut vector = bytes.next();
            if let Some(mask) = mask.and_then(|mask| mask.as_chunks::<VECTOR>().0.get(at)) {
                vector = _mm_or_si128(vector, load(&mask[..count]));
            }
            sum = add(sum, _mm_xor_si128(vector, addend), weights(len, at));
            addend = _mm_setzero_si128();
        }
        return remainder(sum);
    }

    let mut lanes = [bytes.next(), bytes.next(), bytes.next(), bytes.next()];
    if let Some(mask) = mask {
        for (lane, mask) in lanes.iter_mut().zip(mask.as_chunks::<VECTOR>().0) {
            *lane = _mm_or_si128(*lane, load(mask));
        }
    }
    lanes[0] = _mm_xor_si128(lanes[0], addend);
    let over = const { constants::fold(TURN as i32) };
    let over = _mm_set_epi64x(over[1].cast_signed(), over[0].cast_signed());
    while bytes.from.len() >= TURN {
        for lane in &mut lanes {
            *lane = add(bytes.next(), *lane, over);
        }
    }

    // What is folded is as good as a message of its own in front of what is left.
    let len = TURN + bytes.from.len();
    let mut sum = _mm_setzero_si128();
    for (at, lane) in lanes.into_iter().enumerate() {
        sum = add(sum, lane, weights(len, at));
    }
    for at in lanes.len()..=len / VECTOR {
        sum = add(sum, bytes.next(), weights(len, at));
    }
    remainder(sum)
}

/// The sum of `sum` and the products of the two words of `vector`.
#[inline]
#[target_feature(enable = "pclmulqdq")]
fn add(sum: __m128i, vector: __m128i, weights: __m128i) -> __m128i {
    let low = _mm_clmulepi64_si128::<0x00>(vector, weights);
    let high = _mm_clmulepi64_si128::<0x11>(vector, weights);
    _mm_xor_si128(sum, _mm_xor_si128(low, high))
}

/// The coefficients of the words of vector `at` in a message of `len` bytes.
#[inline]
#[target_feature(enable = "sse4.1")]
fn weights(len: usize, at: usize) -> __m128i {
    let words: &[u32; VECTOR / 8] = coefficients(len, at * VECTOR / 8);
    // SAFETY: 8 bytes are read from an array of 8.
    _mm_cvtepu32_epi64(unsafe { _mm_loadl_epi64(words.as_ptr().cast()) })
}

/// `value` modulo P.
#[inline]
#[target_feature(enable = "sse4.1,pclmulqdq")]
fn remainder(value: __m128i) -> u32 {
    let constants = _mm_set_epi64x(MODULUS.cast_signed(), INVERSE.cast_signed());
    let quotient = _mm_clmulepi64_si128::<0x00>(value, constants);
    let product = _mm_clmulepi64_si128::<0x10>(quotient, constants);
    _mm_extract_epi32::<2>(_mm_xor_si128(value, product)).cast_unsigned()
}

/// What is still to be read, and where it goes. With `COPY` both have the same length, else the second
/// is not used.
struct Bytes<'a, const COPY: bool> {
    from: &'a [u8],
    to: &'a mut [u8],
}

impl<const COPY: bool> Bytes<'_, COPY> {
    /// The next 16 bytes, or as many as there are with zeros behind them.
    #[inline]
    #[target_feature(enable = "sse4.1")]
    fn next(&mut self) -> __m128i {
        let (now, later) = self.from.split_at(self.from.len().min(VECTOR));
        self.from = later;
        let vector = load(now);
        if COPY {
            let (now, later) = std::mem::take(&mut self.to).split_at_mut(now.len());
            self.to = later;
            store(vector, now);
        }
        vector
    }
}

/// 16 bytes at most, with zeros behind them. Two overlapping loads make fewer than 16.
#[inline]
#[target_feature(enable = "sse4.1")]
fn load(bytes: &[u8]) -> __m128i {
    if let Some(bytes) = bytes.first_chunk::<VECTOR>() {
        // SAFETY: 16 bytes are read from an array of 16.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    } else if let (Some(&first), Some(&last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        let behind = u64::from_le_bytes(last).unbounded_shr(8 * (VECTOR - bytes.len()) as u32);
        _mm_set_epi64x(behind.cast_signed(), i64::from_le_bytes(first))
    } else if let (Some(&first), Some(&last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        let last = u64::from(u32::from_le_bytes(last)) << (8 * (bytes.len() - 4));
        _mm_cvtsi64_si128((u64::from(u32::from_le_bytes(first)) | last).cast_signed())
    } else {
        let value = bytes.iter().rev().fold(0, |value, &byte| value << 8 | i32::from(byte));
        _mm_cvtsi32_si128(value)
    }
}

/// The first bytes of `vector`, as many as there is room for, 16 at most.
#[inline]
#[target_feature(enable = "sse4.1")]
fn store(vector: __m128i, to: &mut [u8]) {
    if let Some(to) = to.first_chunk_mut::<VECTOR>() {
        // SAFETY: 16 bytes are written to an array of 16.
        return unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), vector) };
    }
    let (low, high) = (_mm_cvtsi128_si64(vector), _mm_extract_epi64::<1>(vector));
    let (low, high) = (low.to_le_bytes(), high.to_le_bytes());
    for (byte, from) in to.iter_mut().zip(low.into_iter().chain(high)) {
        *byte = from;
    }
}
