//! The constants of the carry-less multiplication: powers of x modulo the polynomial, all computed from it.
//!
//! A polynomial over GF(2) is written with its highest power in the lowest bit, the order in which CRC-32 processes the
//! bits of a message. In this order the product of 64 bits and 32 bits, in 95 bits, has its lowest power x^0 in bit 94.
//!
//! A message M of *n* bytes, with the register XORed into its first four, has the CRC M·x^32 mod P. Its *j*-th 64-bit
//! word, counted from 0, represents word·x^(8n - 64j - 64) in M. So the CRC is the sum of the words' products with
//! [`coefficients`], modulo P: 96 bits with x^0 in bit 95. This needs no special case for an incomplete last word or
//! for a message shorter than the register, because x has an inverse for negative powers.

/// The polynomial, without x^32.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The polynomial, x^32 in bit 0 and x^0 in bit 32.
pub(super) const MODULUS: u64 = (POLYNOMIAL as u64) << 1 | 1;

/// Its inverse modulo 2^64 in carry-less arithmetic. A 96-bit value V equals V + V.low·`INVERSE`·`MODULUS` modulo P, if
/// the first product is truncated to 64 bits, and the low 64 bits of the sum are zero. So its remainder is in bits 64
/// to 95.
pub(super) const INVERSE: u64 = inverse(MODULUS);

/// Messages shorter than this have [`coefficients`].
pub(super) const LIMIT: usize = 512;

/// The coefficients of words 8 bytes apart are adjacent, so there is a row for each remainder of the length modulo 8,
/// in descending powers. A row is long enough for the words of the last 64 bytes, even if fewer remain.
const ROW: usize = LIMIT / 8 + 8;

#[repr(align(64))]
struct Rows([u32; 8 * ROW]);

static ROWS: Rows = Rows(rows());

/// The factors of `WORDS` words of a message of `len` bytes, beginning with word `word`: the *j*-th word of the message
/// is multiplied by x^(8·`len` - 64j - 33) mod P. The words are padded to a multiple of 64 bytes.
///
/// # Panics
/// If `len` is not less than [`LIMIT`].
#[inline(always)]
pub(super) fn coefficients<const WORDS: usize>(len: usize, word: usize) -> &'static [u32; WORDS] {
    let start = len % 8 * ROW + LIMIT / 8 - 1 - len / 8 + word;
    match ROWS.0[start..].first_chunk() {
        Some(coefficients) => coefficients,
        None => panic!("word {word} of {len} bytes is past the next whole 64 bytes"),
    }
}

/// The factors of the two words of a 128-bit lane that move the lane forward by `bytes` bytes without changing the
/// remainder: x^(D + 31) and x^(D - 33) mod P, for D bits.
pub(super) const fn fold(bytes: i32) -> [u64; 2] {
    [power(8 * bytes + 31) as u64, power(8 * bytes - 33) as u64]
}

const fn rows() -> [u32; 8 * ROW] {
    let mut rows = [0; 8 * ROW];
    let mut remainder = 0;
    while remainder < 8 {
        // The last value of a row: the smallest power.
        let mut value = power(8 * (remainder as i32 - 8 * (ROW - LIMIT / 8) as i32) - 33);
        let mut i = ROW;
        while i > 0 {
            i -= 1;
            rows[remainder * ROW + i] = value;
            let mut times = 0;
            while times < 64 {
                value = times_x(value);
                times += 1;
            }
        }
        remainder += 1;
    }
    rows
}

/// x^`exponent` mod P.
const fn power(exponent: i32) -> u32 {
    let mut value = 1 << 31;
    let mut i = 0;
    while i < exponent.unsigned_abs() {
        value = if exponent < 0 { over_x(value) } else { times_x(value) };
        i += 1;
    }
    value
}

const fn times_x(value: u32) -> u32 {
    let carry = if value & 1 == 0 { 0 } else { POLYNOMIAL };
    value >> 1 ^ carry
}

/// P contains x^0, so adding it makes any value divisible by x.
const fn over_x(value: u32) -> u32 {
    if value >> 31 == 0 { value << 1 } else { (value ^ POLYNOMIAL) << 1 | 1 }
}

/// Bit by bit: a bit is set if the product still has an unwanted one.
const fn inverse(odd: u64) -> u64 {
    let (mut inverse, mut product) = (0, 0);
    let mut bit = 0;
    while bit < 64 {
        let wanted = (bit == 0) as u64;
        if product >> bit & 1 != wanted {
            inverse |= 1 << bit;
            product ^= odd << bit;
        }
        bit += 1;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009: R1 to R5 and P of the
    /// bit-reflected CRC-32. Its powers of x are shifted by a bit, so x^k there is the remainder of x^(k + 1) here. The
    /// inverse is longer than the paper's: its last 33 bits are equal.
    #[test]
    fn powers_match_the_published_ones() {
        let published = |exponent| u64::from(power(exponent)) << 1;
        assert_eq!(published(4 * 128 + 32), 0x1_5444_2bd4);
        assert_eq!(published(4 * 128 - 32), 0x1_c6e4_1596);
        assert_eq!(published(128 + 32), 0x1_7519_97d0);
        assert_eq!(published(128 - 32), 0x0_ccaa_009e);
        assert_eq!(published(64), 0x1_63cd_6124);
        assert_eq!(MODULUS, 0x1_db71_0641);
        assert_eq!(INVERSE & 0x1_ffff_ffff, 0x1_f701_1641);
    }

    #[test]
    fn x_has_an_inverse() {
        for exponent in 1..100 {
            let mut value = power(-exponent);
            for _ in 0..exponent {
                value = times_x(value);
            }
            assert_eq!(value, power(0), "x^-{exponent}");
        }
    }
}
