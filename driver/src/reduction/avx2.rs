//! Kernels for AVX2 and F16C: the portable code, compiled with wider vectors, and special instructions for small floats.

use std::arch::x86_64::*;

use super::element::{Block, Element, LANES, Level, Op, Portable};
use super::kernel::{self, Job};
use super::small_float::{BIAS, E4M3, E5M2, Format, INFINITY, MANTISSA, SIGN};
use crate::memory::{Span, SpanMut};

/// Floats per vector.
const VECTOR: usize = 8;

/// Whether the processor can call the functions of this module.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn reduce<E: Element, O: Op>(job: Job<'_>) {
    kernel::reduce::<E, O, Avx2>(job);
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn scale<E: Element>(target: SpanMut<'_>, source: Span<'_>, factor: f64) {
    kernel::scale::<E, Avx2>(target, source, factor);
}

/// Only [`reduce`] and [`scale`] use it; their callers have checked that the processor has the features.
struct Avx2;

macro_rules! level {
    ($($name:ident: $from:ty => $to:ty, $call:path;)*) => {
        impl Level for Avx2 {
            $(
                #[inline(always)]
                fn $name(from: &Block<$from>) -> Block<$to> {
                    // SAFETY: the processor has the features.
                    unsafe { $call(from) }
                }
            )*
        }
    };
}

level! {
    widen_f16: u16 => f32, widen_f16;
    narrow_f16: f32 => u16, narrow_f16;
    widen_bf16: u16 => f32, widen_bf16;
    narrow_bf16: f32 => u16, narrow_bf16;
    widen_e4m3: u8 => f32, widen_e4m3;
    narrow_e4m3: f32 => u8, narrow_e4m3;
    widen_e5m2: u8 => f32, widen_e5m2;
    narrow_e5m2: f32 => u8, narrow_e5m2;
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_f16(codes: &Block<u16>) -> Block<f32> {
    let mut values = [0.0; LANES];
    for (codes, values) in codes.as_chunks::<VECTOR>().0.iter().zip(values.as_chunks_mut::<VECTOR>().0) {
        store(values, _mm256_cvtph_ps(load_128(codes)));
    }
    values
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_f16(values: &Block<f32>) -> Block<u16> {
    let mut codes = [0; LANES];
    for (values, codes) in values.as_chunks::<VECTOR>().0.iter().zip(codes.as_chunks_mut::<VECTOR>().0) {
        let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load(values));
        // SAFETY: an array of the vector's size.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), rounded) };
    }
    codes
}

/// In the order in which [`narrow_bf16`] packs: in each half of a vector of codes, the lower four and the upper four.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_bf16(codes: &Block<u16>) -> Block<f32> {
    let mut values = [0.0; LANES];
    let (pairs, _) = values.as_chunks_mut::<VECTOR>();
    for (codes, values) in codes.as_chunks::<{ 2 * VECTOR }>().0.iter().zip(pairs.as_chunks_mut::<2>().0) {
        // SAFETY: an array of the vector's size.
        let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
        let zero = _mm256_setzero_si256();
        store(&mut values[0], _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, codes)));
        store(&mut values[1], _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, codes)));
    }
    values
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_bf16(values: &Block<f32>) -> Block<u16> {
    if has_nan(values) {
        // In the order of the codes.
        let mut sorted = [0.0; LANES];
        for (n, &value) in values.iter().enumerate() {
            sorted[n & !0b1100 | (n & 0b100) << 1 | (n & 0b1000) >> 1] = value;
        }
        return Portable::narrow_bf16(&sorted);
    }
    let mut codes = [0; LANES];
    let (values, _) = values.as_chunks::<VECTOR>();
    for (values, codes) in values.as_chunks::<2>().0.iter().zip(codes.as_chunks_mut::<{ 2 * VECTOR }>().0) {
        let packed = _mm256_packus_epi32(bf16_of(load(&values[0])), bf16_of(load(&values[1])));
        // SAFETY: an array of the vector's size.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    }
    codes
}

/// As [`small_float::narrow_bf16`](super::small_float::narrow_bf16), for values that are not NaN.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn bf16_of(values: __m256) -> __m256i {
    let bits = _mm256_castps_si256(values);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), all(1));
    _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, _mm256_add_epi32(odd, all(0x7fff))))
}

/// Whether any value is a NaN. This is rare, so the vector code does not handle it.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn has_nan(values: &Block<f32>) -> bool {
    let (values, _) = values.as_chunks::<VECTOR>();
    // Two vectors per comparison.
    let first = _mm256_cmp_ps::<_CMP_UNORD_Q>(load(&values[0]), load(&values[1]));
    let second = _mm256_cmp_ps::<_CMP_UNORD_Q>(load(&values[2]), load(&values[3]));
    _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_e4m3(codes: &Block<u8>) -> Block<f32> {
    let mut values = [0.0; LANES];
    // An f16 with the same exponent and mantissa bits has another bias.
    let factor = _mm256_set1_ps((1 << (15 - E4M3::BIAS)) as f32);
    // In the layout of an f16: the sign, and the other bits shifted right by one. All ones are a NaN.
    let ones = _mm256_set1_epi16(0x7f00);
    let (pairs, _) = values.as_chunks_mut::<VECTOR>();
    for (codes, values) in codes.as_chunks::<{ 2 * VECTOR }>().0.iter().zip(pairs.as_chunks_mut::<2>().0) {
        let codes = upper_halves(codes);
        let is_none = _mm256_cmpeq_epi16(_mm256_and_si256(codes, ones), ones);
        let codes = _mm256_and_si256(_mm256_srai_epi16::<1>(codes), _mm256_set1_epi16(!0x4000));
        let codes = _mm256_or_si256(codes, _mm256_and_si256(is_none, _mm256_set1_epi16(0x7e00)));
        store(&mut values[0], _mm256_mul_ps(low_f16(codes), factor));
        store(&mut values[1], _mm256_mul_ps(high_f16(codes), factor));
    }
    values
}

/// E5M2 is the upper half of an f16.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_e5m2(codes: &Block<u8>) -> Block<f32> {
    let mut values = [0.0; LANES];
    let (pairs, _) = values.as_chunks_mut::<VECTOR>();
    for (codes, values) in codes.as_chunks::<{ 2 * VECTOR }>().0.iter().zip(pairs.as_chunks_mut::<2>().0) {
        let codes = upper_halves(codes);
        store(&mut values[0], low_f16(codes));
        store(&mut values[1], high_f16(codes));
    }
    values
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_e4m3(values: &Block<f32>) -> Block<u8> {
    narrow_8::<E4M3>(values)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_e5m2(values: &Block<f32>) -> Block<u8> {
    if has_nan(values) { Portable::narrow_e5m2(values) } else { narrow_8::<E5M2>(values) }
}

/// As [`small_float::narrow`](super::small_float::narrow); if the format has infinities, for values that are not NaN.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn narrow_8<F: Format>(values: &Block<f32>) -> Block<u8> {
    let (values, _) = values.as_chunks::<VECTOR>();
    let [a, b, c, d] = [load(&values[0]), load(&values[1]), load(&values[2]), load(&values[3])];
    let low = _mm256_packus_epi32(magnitude_of::<F>(a), magnitude_of::<F>(b));
    let high = _mm256_packus_epi32(magnitude_of::<F>(c), magnitude_of::<F>(d));
    let magnitude = _mm256_packus_epi16(low, high);
    // Packing with signed saturation keeps the sign.
    let low = _mm256_packs_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
    let high = _mm256_packs_epi32(_mm256_castps_si256(c), _mm256_castps_si256(d));
    let sign = _mm256_and_si256(_mm256_packs_epi16(low, high), all(0x8080_8080));
    // The instructions pack each half of a vector separately.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let packed = _mm256_permutevar8x32_epi32(_mm256_or_si256(magnitude, sign), order);
    let mut codes = [0; LANES];
    // SAFETY: an array of the vector's size.
    unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    codes
}

/// As [`small_float::narrow`](super::small_float::narrow), step by step, without signs and the payloads of NaNs.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn magnitude_of<F: Format>(values: __m256) -> __m256i {
    let shift = _mm_cvtsi32_si128((MANTISSA - F::MANTISSA) as i32);
    let magnitude = _mm256_and_si256(_mm256_castps_si256(values), all(!SIGN));
    let bounded = _mm256_min_epu32(magnitude, all(F::OVERFLOW.to_bits()));
    let least_normal = all((BIAS + 1 - F::BIAS) << MANTISSA);
    let exponent = _mm256_max_epu32(_mm256_and_si256(bounded, all(INFINITY)), least_normal);
    let large = _mm256_add_epi32(exponent, all((MANTISSA - F::MANTISSA) << MANTISSA));
    let sum = _mm256_add_ps(_mm256_castsi256_ps(bounded), _mm256_castsi256_ps(large));
    let mantissa = _mm256_sub_epi32(_mm256_castps_si256(sum), large);
    let carried = _mm256_srl_epi32(_mm256_sub_epi32(exponent, least_normal), shift);
    _mm256_add_epi32(mantissa, carried)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn all(value: u32) -> __m256i {
    _mm256_set1_epi32(value.cast_signed())
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load(values: &[f32; VECTOR]) -> __m256 {
    // SAFETY: an array of the vector's size.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn store(to: &mut [f32; VECTOR], values: __m256) {
    // SAFETY: an array of the vector's size.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), values) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_128(codes: &[u16; VECTOR]) -> __m128i {
    // SAFETY: an array of the vector's size.
    unsafe { _mm_loadu_si128(codes.as_ptr().cast()) }
}

/// Each byte in the upper half of 16 bits.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn upper_halves(codes: &[u8; 2 * VECTOR]) -> __m256i {
    // SAFETY: an array of the vector's size.
    let codes = unsafe { _mm_loadu_si128(codes.as_ptr().cast()) };
    _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(codes))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn low_f16(codes: __m256i) -> __m256 {
    _mm256_cvtph_ps(_mm256_castsi256_si128(codes))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn high_f16(codes: __m256i) -> __m256 {
    _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(codes))
}
