//! 64 bytes at a time, with AVX-512 and VPCLMULQDQ.

use std::arch::x86_64::*;

use super::constants::{self, LIMIT, coefficients};
use super::pclmulqdq;
use crate::memory::{Span, SpanMut};

/// The bytes of a vector.
const VECTOR: usize = 64;
/// The bytes processed in an iteration of the loop over long messages.
const TURN: usize = 4 * VECTOR;

/// Whether the processor can call the functions of this module.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("vpclmulqdq")
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,pclmulqdq,vpclmulqdq")]
pub(super) fn update(register: u32, from: Span<'_>) -> u32 {
    run::<false>(register, _mm512_setzero_si512(), BytesBy64 { from, to: std::ptr::dangling_mut() })
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,pclmulqdq,vpclmulqdq")]
pub(super) fn update_masked(register: u32, mask: &[u8; 64], from: Span<'_>) -> u32 {
    run::<false>(register, load(mask), BytesBy64 { from, to: std::ptr::dangling_mut() })
}

/// `from` and `to` have the same length.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,pclmulqdq,vpclmulqdq")]
pub(super) fn copy(register: u32, from: Span<'_>, to: SpanMut<'_>) -> u32 {
    run::<true>(register, _mm512_setzero_si512(), BytesBy64 { from, to: to.address() })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,pclmulqdq,vpclmulqdq")]
fn run<const COPY: bool>(register: u32, mask: __m512i, mut bytes: BytesBy64<'_, COPY>) -> u32 {
    let len = bytes.from.len();
    let register = _mm512_zextsi128_si512(_mm_cvtsi32_si128(register.cast_signed()));
    if len <= VECTOR {
        let mask = _mm512_maskz_mov_epi8(first(len), mask);
        let vector = _mm512_xor_si512(_mm512_or_si512(bytes.last(), mask), register);
        return remainder(multiply(vector, weights(len, 0)));
    }
    let vector = _mm512_xor_si512(_mm512_or_si512(bytes.vector(), mask), register);
    // The length of the summed message, and the number of its next vector.
    let (mut sum, len, mut at) = if len < LIMIT {
        (multiply(vector, weights(len, 0)), len, 1)
    } else {
        let lanes = fold([vector, bytes.vector(), bytes.vector(), bytes.vector()], &mut bytes);
        // The folded lanes are like a message of their own before the remaining bytes.
        let len = TURN + bytes.from.len();
        let mut sum = multiply(lanes[0], weights(len, 0));
        for (i, &lane) in lanes.iter().enumerate().skip(1) {
            sum = add(sum, lane, weights(len, i));
        }
        (sum, len, lanes.len())
    };
    while bytes.from.len() > VECTOR {
        sum = add(sum, bytes.vector(), weights(len, at));
        at += 1;
    }
    if !bytes.from.is_empty() {
        sum = add(sum, bytes.last(), weights(len, at));
    }
    remainder(sum)
}

/// Folds the lanes into the vectors that follow, as long as there are enough bytes for a whole iteration.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,bmi2,pclmulqdq,vpclmulqdq")]
fn fold<const COPY: bool>(mut lanes: [__m512i; 4], bytes: &mut BytesBy64<'_, COPY>) -> [__m512i; 4] {
    let [low, high] = const { constants::fold(TURN as i32) };
    let over = _mm512_broadcast_i32x4(_mm_set_epi64x(high.cast_signed(), low.cast_signed()));
    while bytes.from.len() >= TURN {
        for lane in &mut lanes {
            *lane = add(bytes.vector(), *lane, over);
        }
    }
    lanes
}

/// The sum of `sum` and the products of the words of `vector`, two in each lane.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn add(sum: __m512i, vector: __m512i, weights: __m512i) -> __m512i {
    let (low, high) = (
        _mm512_clmulepi64_epi128::<0x00>(vector, weights),
        _mm512_clmulepi64_epi128::<0x11>(vector, weights),
    );
    const XOR: i32 = 0x96;
    _mm512_ternarylogic_epi64::<XOR>(sum, low, high)
}

#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn multiply(vector: __m512i, weights: __m512i) -> __m512i {
    let (low, high) = (
        _mm512_clmulepi64_epi128::<0x00>(vector, weights),
        _mm512_clmulepi64_epi128::<0x11>(vector, weights),
    );
    _mm512_xor_si512(low, high)
}

/// The coefficients of the words of vector `at` in a message of `len` bytes.
#[inline]
#[target_feature(enable = "avx512f")]
fn weights(len: usize, at: usize) -> __m512i {
    let words: &[u32; VECTOR / 8] = coefficients(len, at * VECTOR / 8);
    // SAFETY: 32 bytes are read from an array of 32.
    _mm512_cvtepu32_epi64(unsafe { _mm256_loadu_si256(words.as_ptr().cast()) })
}

/// The sum of the lanes modulo P.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,pclmulqdq")]
fn remainder(lanes: __m512i) -> u32 {
    let lanes = _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
    let value = _mm_xor_si128(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    pclmulqdq::remainder(value)
}

/// The remaining bytes, and the place of their copy: with `COPY` as many bytes there are valid for writes, otherwise it
/// is not used.
struct BytesBy64<'a, const COPY: bool> {
    from: Span<'a>,
    to: *mut u8,
}

impl<const COPY: bool> BytesBy64<'_, COPY> {
    /// The next 64 bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,bmi2")]
    fn vector(&mut self) -> __m512i {
        let (now, later) = self.from.split_at(VECTOR);
        self.from = later;
        // SAFETY: 64 bytes are read from a span of 64.
        let vector = unsafe { _mm512_loadu_si512(now.address().cast()) };
        if COPY {
            // SAFETY: as many bytes are valid for writes as `from` had, which were at least 64.
            unsafe { _mm512_storeu_si512(self.to.cast(), vector) };
            // SAFETY: as above, so it is inside or at the end.
            self.to = unsafe { self.to.add(VECTOR) };
        }
        vector
    }

    /// The last bytes, at most 64, padded with zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,bmi2")]
    fn last(&mut self) -> __m512i {
        // SAFETY: only existing bytes are read.
        let vector = unsafe { _mm512_maskz_loadu_epi8(first(self.from.len()), self.from.address().cast()) };
        if COPY {
            // SAFETY: as many bytes are written as `from` has, and as many are valid for writes.
            unsafe { _mm512_mask_storeu_epi8(self.to.cast(), first(self.from.len()), vector) };
        }
        vector
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; VECTOR]) -> __m512i {
    // SAFETY: 64 bytes are read from an array of 64.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// The mask of the first `count` bytes of a vector, or of all if there are more.
#[inline]
#[target_feature(enable = "bmi2")]
fn first(count: usize) -> __mmask64 {
    _bzhi_u64(u64::MAX, count.min(VECTOR) as u32)
}
