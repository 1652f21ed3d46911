//! With AVX2 and F16C: the portable code, which the compiler makes wider vector code of, and instructions for f16.

use std::arch::x86_64::*;

use super::element::{Block, Element, LANES, Level, Op, Portable};
use super::kernel::{self, Job};
use crate::memory::{Span, SpanMut};

/// Floats of a vector.
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

/// Only [`reduce`] and [`scale`] use it: whoever called them knows that the processor has the features.
struct Avx2;

impl Level for Avx2 {
    #[inline(always)]
    fn widen_f16(codes: &Block<u16>) -> Block<f32> {
        let mut values = [0.0; LANES];
        let (codes, _) = codes.as_chunks::<VECTOR>();
        for (codes, values) in codes.iter().zip(values.as_chunks_mut::<VECTOR>().0) {
            // SAFETY: the processor has the features; as many bytes are loaded and stored as the arrays have.
            unsafe {
                let codes = _mm_loadu_si128(codes.as_ptr().cast());
                _mm256_storeu_ps(values.as_mut_ptr(), _mm256_cvtph_ps(codes));
            }
        }
        values
    }

    #[inline(always)]
    fn narrow_f16(values: &Block<f32>) -> Block<u16> {
        let mut codes = [0; LANES];
        let (values, _) = values.as_chunks::<VECTOR>();
        for (values, codes) in values.iter().zip(codes.as_chunks_mut::<VECTOR>().0) {
            // SAFETY: as above.
            unsafe {
                let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(values.as_ptr()));
                _mm_storeu_si128(codes.as_mut_ptr().cast(), rounded);
            }
        }
        codes
    }

    #[inline(always)]
    fn widen_e4m3(codes: &Block<u8>) -> Block<f32> {
        Portable::widen_e4m3(codes)
    }

    #[inline(always)]
    fn narrow_e4m3(values: &Block<f32>) -> Block<u8> {
        Portable::narrow_e4m3(values)
    }

    #[inline(always)]
    fn widen_e5m2(codes: &Block<u8>) -> Block<f32> {
        Portable::widen_e5m2(codes)
    }

    #[inline(always)]
    fn narrow_e5m2(values: &Block<f32>) -> Block<u8> {
        Portable::narrow_e5m2(values)
    }
}
