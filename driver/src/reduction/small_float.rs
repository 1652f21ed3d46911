//! Floating point in 8 and 16 bits: to f32, which is exact, and back, rounded once.
//!
//! Without a branch, so that the compiler makes vector code of loops over it.

/// A format with one bit for the sign, then the exponent, then the mantissa.
pub(super) trait Format {
    /// Bits of all.
    const BITS: u32;
    /// Bits of the mantissa.
    const MANTISSA: u32;
    /// What is added to exponents.
    const BIAS: u32;
    /// The least magnitude, as an f32, that is more than the format's greatest finite number when it is rounded to as many
    /// bits of mantissa without a limit of the exponent. It becomes the code behind the greatest number's.
    const OVERFLOW: f32;
    /// Whether the greatest exponent means infinity and NaN, as IEEE 754 has it; else all ones are the only NaN.
    const IS_IEEE: bool;
    /// The least magnitude that is not a finite number: infinity, or the NaN where there is none.
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

/// Bits of the mantissa of an f32, and what is added to its exponents.
pub(super) const MANTISSA: u32 = f32::MANTISSA_DIGITS - 1;
pub(super) const BIAS: u32 = 127;
pub(super) const SIGN: u32 = 1 << 31;
pub(super) const INFINITY: u32 = f32::INFINITY.to_bits();
/// The bit of the mantissa that a quiet NaN has.
pub(super) const QUIET: u32 = 1 << (MANTISSA - 1);

/// The number that the lower bits of `code` stand for. A NaN keeps its sign and what there is of a payload.
#[inline(always)]
pub(super) fn widen<F: Format>(code: u32) -> f32 {
    let magnitude = code & ((1 << (F::BITS - 1)) - 1);
    let sign = (code << (32 - F::BITS)) & SIGN;
    let shifted = magnitude << (MANTISSA - F::MANTISSA);
    let normal = shifted + ((BIAS - F::BIAS) << MANTISSA);
    // A power of two, by which a whole number is multiplied without rounding.
    let least = f32::from_bits((BIAS + 1 - F::BIAS - F::MANTISSA) << MANTISSA);
    let subnormal = (magnitude as i32 as f32 * least).to_bits();
    let finite = if magnitude < 1 << F::MANTISSA { subnormal } else { normal };
    let none = if F::IS_IEEE { shifted | INFINITY } else { INFINITY | QUIET };
    f32::from_bits(sign | if magnitude >= F::FIRST_NONE { none } else { finite })
}

/// The code, in the lower bits, of the number next to `value`, of two the even one. A NaN is made quiet.
#[inline(always)]
pub(super) fn narrow<F: Format>(value: f32) -> u32 {
    let bits = value.to_bits();
    let magnitude = bits & !SIGN;
    // Also infinity and NaN.
    let bounded = magnitude.min(F::OVERFLOW.to_bits());
    // Below the least normal number all have its exponent.
    let least_normal = (BIAS + 1 - F::BIAS) << MANTISSA;
    let exponent = (bounded & INFINITY).max(least_normal);
    // So large that the sum has as many bits below its binary point as the format has: the processor rounds, to even where
    // there is a tie. What is above the sum's leading one is the mantissa, with its own leading one.
    let large = exponent + ((MANTISSA - F::MANTISSA) << MANTISSA);
    let sum = (f32::from_bits(bounded) + f32::from_bits(large)).to_bits();
    // The leading one, or two, is a carry into the exponent.
    let code = (sum - large) + ((exponent - least_normal) >> (MANTISSA - F::MANTISSA));
    let payload = ((magnitude | QUIET) >> (MANTISSA - F::MANTISSA)) & ((1 << F::MANTISSA) - 1);
    let none = payload | F::FIRST_NONE;
    let code = if F::IS_IEEE && magnitude > INFINITY { none } else { code };
    code | (bits & SIGN) >> (32 - F::BITS)
}

/// Of a bfloat16.
#[inline(always)]
pub(super) fn widen_bf16(code: u16) -> f32 {
    f32::from_bits(u32::from(code) << 16)
}

/// The bfloat16 next to `value`, of two the even one. A NaN is made quiet.
#[inline(always)]
pub(super) fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let code = if bits & !SIGN > INFINITY { bits | QUIET } else { rounded };
    (code >> 16) as u16
}
