//! Floating point in 8 and 16 bits: the conversion to f32, which is exact, and back, rounded once.
//!
//! The code has no branches, so that the compiler vectorises loops over it.

/// A format with one sign bit, then the exponent, then the mantissa.
pub(super) trait Format {
    /// The total number of bits.
    const BITS: u32;
    /// Bits of the mantissa.
    const MANTISSA: u32;
    /// The bias of exponents.
    const BIAS: u32;
    /// The least magnitude, as an f32, that exceeds the format's greatest finite number after rounding to its mantissa
    /// length with an unlimited exponent. Its code follows the greatest number's.
    const OVERFLOW: f32;
    /// Whether the greatest exponent means infinity and NaN, as in IEEE 754; if not, only all ones is a NaN.
    const IS_IEEE: bool;
    /// The least magnitude that is not a finite number: infinity, or the NaN if the format has no infinity.
    const FIRST_NONE: u32 = match Self::IS_IEEE {
        true => ((1 << (Self::BITS - 1 - Self::MANTISSA)) - 1) << Self::MANTISSA,
        false => (1 << (Self::BITS - 1)) - 1,
    };
}

/// IEEE 754 binary16.
pub(super) struct F16;

impl Format for F16 {
    const BITS: u32 = 16;
    const MANTISSA: u32 = 10;
    const BIAS: u32 = 15;
    const OVERFLOW: f32 = 65536.0;
    const IS_IEEE: bool = true;
}

/// OCP E4M3.
pub(super) struct E4M3;

impl Format for E4M3 {
    const BITS: u32 = 8;
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
    const OVERFLOW: f32 = 480.0;
    const IS_IEEE: bool = false;
}

/// OCP E5M2.
pub(super) struct E5M2;

impl Format for E5M2 {
    const BITS: u32 = 8;
    const MANTISSA: u32 = 2;
    const BIAS: u32 = 15;
    const OVERFLOW: f32 = 65536.0;
    const IS_IEEE: bool = true;
}

/// The mantissa bits of an f32, and its bias.
pub(super) const MANTISSA: u32 = f32::MANTISSA_DIGITS - 1;
pub(super) const BIAS: u32 = 127;
pub(super) const SIGN: u32 = 1 << 31;
pub(super) const INFINITY: u32 = f32::INFINITY.to_bits();
/// The mantissa bit that marks a quiet NaN.
pub(super) const QUIET: u32 = 1 << (MANTISSA - 1);

/// The number encoded in the lower bits of `code`. A NaN keeps its sign and its payload.
#[inline(always)]
pub(super) fn widen<F: Format>(code: u32) -> f32 {
    let magnitude = code & ((1 << (F::BITS - 1)) - 1);
    let sign = (code << (32 - F::BITS)) & SIGN;
    let shifted = magnitude << (MANTISSA - F::MANTISSA);
    let normal = shifted + ((BIAS - F::BIAS) << MANTISSA);
    // A power of two, so multiplying an integer by it does not round.
    let least = f32::from_bits((BIAS + 1 - F::BIAS - F::MANTISSA) << MANTISSA);
    let subnormal = (magnitude as i32 as f32 * least).to_bits();
    let finite = if magnitude < 1 << F::MANTISSA { subnormal } else { normal };
    let none = if F::IS_IEEE { shifted | INFINITY } else { INFINITY | QUIET };
    f32::from_bits(sign | if magnitude >= F::FIRST_NONE { none } else { finite })
}

/// The code, in the lower bits, of the number nearest to `value`, ties to even. A NaN is made quiet.
#[inline(always)]
pub(super) fn narrow<F: Format>(value: f32) -> u32 {
    let bits = value.to_bits();
    let magnitude = bits & !SIGN;
    // Includes infinity and NaN.
    let bounded = magnitude.min(F::OVERFLOW.to_bits());
    // Subnormal numbers have the exponent of the least normal one.
    let least_normal = (BIAS + 1 - F::BIAS) << MANTISSA;
    let exponent = (bounded & INFINITY).max(least_normal);
    // So large that the sum has as many fraction bits as the format: the processor rounds, ties to even. The bits below the
    // sum's leading one are the mantissa with its own leading one.
    let large = exponent + ((MANTISSA - F::MANTISSA) << MANTISSA);
    let sum = (f32::from_bits(bounded) + f32::from_bits(large)).to_bits();
    // A leading one, or two after rounding up, carries into the exponent.
    let code = (sum - large) + ((exponent - least_normal) >> (MANTISSA - F::MANTISSA));
    let payload = ((magnitude | QUIET) >> (MANTISSA - F::MANTISSA)) & ((1 << F::MANTISSA) - 1);
    let none = payload | F::FIRST_NONE;
    let code = if F::IS_IEEE && magnitude > INFINITY { none } else { code };
    code | (bits & SIGN) >> (32 - F::BITS)
}

/// The value of a bfloat16.
#[inline(always)]
pub(super) fn widen_bf16(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

/// The bfloat16 nearest to `value`, ties to even. A NaN is made quiet.
#[inline(always)]
pub(super) fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let code = if bits & !SIGN > INFINITY { bits | QUIET } else { rounded };
    (code >> 16) as u16
}
