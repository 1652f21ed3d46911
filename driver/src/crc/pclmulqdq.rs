//! 16 bytes at a time, with SSE4.1 and PCLMULQDQ.

use std::arch::x86_64::*;

use super::constants::{self, INVERSE, MODULUS, coefficients};
use crate::memory::{Span, SpanMut};

/// The bytes of a vector.
const VECTOR: usize = 16;
/// The bytes processed in an iteration of the loop over long messages: as many as a mask has.
const TURN: usize = 4 * VECTOR;

/// Whether the processor can call the functions of this module.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("sse4.1") && is_x86_feature_detected!("pclmulqdq")
}

#[target_feature(enable = "sse4.1,pclmulqdq")]
pub(super) fn update(register: u32, from: Span<'_>) -> u32 {
    run::<false>(register, None, BytesBy16 { from, to: std::ptr::dangling_mut() })
}

#[target_feature(enable = "sse4.1,pclmulqdq")]
pub(super) fn update_masked(register: u32, mask: &[u8; 64], from: Span<'_>) -> u32 {
    run::<false>(register, Some(mask), BytesBy16 { from, to: std::ptr::dangling_mut() })
}

/// `from` and `to` have the same length.
#[target_feature(enable = "sse4.1,pclmulqdq")]
pub(super) fn copy(register: u32, from: Span<'_>, to: SpanMut<'_>) -> u32 {
    run::<true>(register, None, BytesBy16 { from, to: to.address() })
}

#[inline]
#[target_feature(enable = "sse4.1,pclmulqdq")]
fn run<const COPY: bool>(register: u32, mask: Option<&[u8; TURN]>, mut bytes: BytesBy16<'_, COPY>) -> u32 {
    let len = bytes.from.len();
    let masks = mask.map_or(&[][..], |mask| mask.as_chunks::<VECTOR>().0);
    // The value added to the next vector: to the first one, the register.
    let mut addend = _mm_cvtsi32_si128(register.cast_signed());
    let mut sum = _mm_setzero_si128();
    let mut at = 0;
    let len = if len < 2 * TURN {
        while bytes.from.len() >= VECTOR {
            let mut vector = bytes.vector();
            if let Some(mask) = masks.get(at) {
                vector = _mm_or_si128(vector, load(mask));
            }
            sum = add(sum, _mm_xor_si128(vector, addend), weights(len, at));
            addend = _mm_setzero_si128();
            at += 1;
        }
        len
    } else {
        let mut lanes = [bytes.vector(), bytes.vector(), bytes.vector(), bytes.vector()];
        for (lane, mask) in lanes.iter_mut().zip(masks) {
            *lane = _mm_or_si128(*lane, load(mask));
        }
        lanes[0] = _mm_xor_si128(lanes[0], addend);
        addend = _mm_setzero_si128();
        let [low, high] = const { constants::fold(TURN as i32) };
        let over = _mm_set_epi64x(high.cast_signed(), low.cast_signed());
        while bytes.from.len() >= TURN {
            for lane in &mut lanes {
                *lane = add(bytes.vector(), *lane, over);
            }
        }
        // The folded lanes are like a message of their own before the remaining bytes.
        let len = TURN + bytes.from.len();
        for lane in lanes {
            sum = add(sum, lane, weights(len, at));
            at += 1;
        }
        while bytes.from.len() >= VECTOR {
            sum = add(sum, bytes.vector(), weights(len, at));
            at += 1;
        }
        len
    };
    let rest = bytes.from.len();
    let mut vector = bytes.last();
    if let Some(mask) = masks.get(at).and_then(|mask| mask.get(..rest)) {
        vector = _mm_or_si128(vector, load_part(mask.into()));
    }
    remainder(add(sum, _mm_xor_si128(vector, addend), weights(len, at)))
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
pub(super) fn remainder(value: __m128i) -> u32 {
    let constants = _mm_set_epi64x(MODULUS.cast_signed(), INVERSE.cast_signed());
    let quotient = _mm_clmulepi64_si128::<0x00>(value, constants);
    let product = _mm_clmulepi64_si128::<0x10>(quotient, constants);
    _mm_extract_epi32::<2>(_mm_xor_si128(value, product)).cast_unsigned()
}

/// The remaining bytes, and the place of their copy: with `COPY` as many bytes there are valid for writes, otherwise it
/// is not used.
struct BytesBy16<'a, const COPY: bool> {
    from: Span<'a>,
    to: *mut u8,
}

impl<const COPY: bool> BytesBy16<'_, COPY> {
    /// The next 16 bytes.
    #[inline]
    #[target_feature(enable = "sse4.1")]
    fn vector(&mut self) -> __m128i {
        let (now, later) = self.from.split_at(VECTOR);
        self.from = later;
        // SAFETY: 16 bytes are read from a span of 16.
        let vector = unsafe { _mm_loadu_si128(now.address().cast()) };
        if COPY {
            // SAFETY: as many bytes are valid for writes as `from` had, which were at least 16.
            unsafe { _mm_storeu_si128(self.to.cast(), vector) };
            // SAFETY: as above, so it is inside or at the end.
            self.to = unsafe { self.to.add(VECTOR) };
        }
        vector
    }

    /// The last bytes, at most 15, padded with zeros.
    #[inline]
    #[target_feature(enable = "sse4.1")]
    fn last(&mut self) -> __m128i {
        let (vector, len) = (load_part(self.from), self.from.len());
        if COPY {
            // Writes the bytes that were read, even if the source is written meanwhile.
            let mut bytes = [0; VECTOR];
            // SAFETY: 16 bytes are written to an array of 16.
            unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), vector) };
            // SAFETY: at most 15 bytes are written, as many as `from` has, and as many are valid for writes.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.to, len) };
        }
        vector
    }
}

#[inline]
#[target_feature(enable = "sse4.1")]
fn load(bytes: &[u8; VECTOR]) -> __m128i {
    // SAFETY: 16 bytes are read from an array of 16.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// At most 15 bytes, padded with zeros, by two overlapping loads.
#[inline]
#[target_feature(enable = "sse4.1")]
fn load_part(bytes: Span<'_>) -> __m128i {
    let len = bytes.len() as u32;
    if let (Some(first), Some(last)) = (bytes.first(), bytes.last()) {
        let behind = u64::from_le_bytes(last).unbounded_shr(8 * (16 - len));
        _mm_set_epi64x(behind.cast_signed(), i64::from_le_bytes(first))
    } else if let (Some(first), Some(last)) = (bytes.first(), bytes.last()) {
        let (first, last) = (u32::from_le_bytes(first), u32::from_le_bytes(last));
        _mm_cvtsi64_si128((u64::from(first) | u64::from(last) << (8 * (len - 4))).cast_signed())
    } else {
        let mut rest = [0; 4];
        bytes.copy_to(&mut rest[..bytes.len()]);
        _mm_cvtsi32_si128(i32::from_le_bytes(rest))
    }
}
