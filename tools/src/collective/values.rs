//! The inputs of the ranks and the expected outputs, computed independently of the measured code.
//!
//! All numbers are integers. Floats are small enough that no order of a reduction rounds, so an output must be equal
//! bit for bit. Operations that only move elements use arbitrary bits.

use ferroce_collectives::{DataType, Reduction};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::pattern::factor;

/// The values repeat after this many elements. It is a prime number, so a shift by whole chunks is detected.
pub(super) const PERIOD: usize = 65_521;

/// The values of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    pub(super) data_type: DataType,
    /// `None` if elements are only moved.
    pub(super) reduction: Option<Reduction>,
    pub(super) ranks: u32,
    /// Makes the outputs of different operations differ.
    pub(super) salt: u32,
}

/// The kind of number that an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Signed,
    Unsigned,
    /// `significand`: the number of significand bits, including the leading one.
    Float {
        significand: u32,
    },
}

impl Values {
    /// The first `len` elements of a rank's input.
    pub(super) fn input(&self, rank: u32, len: usize) -> Vec<u8> {
        self.write(self.numbers(rank, len).into_iter().map(|number| self.encode(number)))
    }

    /// The first `len` elements of the reduction of all inputs.
    pub(super) fn reduced(&self, len: usize) -> Vec<u8> {
        let mut all = vec![];
        for rank in 0..self.ranks {
            let mut own = self.numbers(rank, len);
            if let Some(Reduction::PreMulSum(_)) = self.reduction {
                own.iter_mut().for_each(|number| *number *= factor(rank));
            }
            if rank == 0 {
                all = own;
                continue;
            }
            for (sum, number) in all.iter_mut().zip(own) {
                *sum = match self.reduction {
                    Some(Reduction::Product) => sum.wrapping_mul(number),
                    Some(Reduction::Min) => number.min(*sum),
                    Some(Reduction::Max) => number.max(*sum),
                    _ => *sum + number,
                };
            }
        }
        let is_average = matches!(self.reduction, Some(Reduction::Average));
        self.write(
            all.into_iter().map(|number| if is_average { self.mean(number) } else { self.encode(number) }),
        )
    }

    fn numbers(&self, rank: u32, len: usize) -> Vec<i128> {
        let mut random = ChaCha8Rng::seed_from_u64(u64::from(self.salt) << 32 | u64::from(rank));
        (0..len.min(PERIOD)).map(|index| self.number(rank, index, random.next_u64())).collect()
    }

    /// Converts random bits to a number.
    fn number(&self, rank: u32, index: usize, random: u64) -> i128 {
        let Some(reduction) = self.reduction else { return i128::from(random) };
        let Class::Float { significand } = self.class() else {
            // Sums and products wrap. With even factors, a product would soon be 0.
            let odd = u64::from(matches!(reduction, Reduction::Product));
            return self.wrap(i128::from(random | odd));
        };
        // A float represents every integer up to this one.
        let most = 1_i128 << significand.min(40);
        let ranks = i128::from(self.ranks);
        // Where not all ranks may contribute a value other than 0 (for products: 1), they take turns by element.
        let turn = (i128::from(rank) + index as i128) % ranks;
        let random = i128::from(random);
        match reduction {
            Reduction::Product => {
                let magnitude = if turn < 3 { 1 + (random & 1) } else { 1 };
                if random & 2 == 0 { magnitude } else { -magnitude }
            }
            Reduction::Min | Reduction::Max => random % (2 * most + 1) - most,
            _ => {
                let most = if matches!(reduction, Reduction::PreMulSum(_)) { most / 2 } else { most };
                let active = ranks.min(most);
                let each = most / active;
                if turn < active { random % (2 * each + 1) - each } else { 0 }
            }
        }
    }

    fn class(&self) -> Class {
        match self.data_type {
            DataType::I8 | DataType::I16 | DataType::I32 | DataType::I64 => Class::Signed,
            DataType::F64 => Class::Float { significand: 53 },
            DataType::F32 => Class::Float { significand: 24 },
            DataType::F16 => Class::Float { significand: 11 },
            DataType::Bf16 => Class::Float { significand: 8 },
            DataType::F8E4M3 => Class::Float { significand: 4 },
            DataType::F8E5M2 => Class::Float { significand: 3 },
            _ => Class::Unsigned,
        }
    }

    /// The number of this type with the same low bits.
    fn wrap(&self, number: i128) -> i128 {
        let above = 128 - 8 * self.data_type.size() as u32;
        match self.class() {
            Class::Signed => number << above >> above,
            _ => ((number as u128) << above >> above) as i128,
        }
    }

    /// Encodes a number as the bits of an element.
    fn encode(&self, number: i128) -> u64 {
        match (self.reduction, self.class()) {
            (Some(_), Class::Float { .. }) => self.float(number as f64),
            _ => number as u64,
        }
    }

    /// Encodes a sum divided by the number of ranks.
    fn mean(&self, sum: i128) -> u64 {
        match self.class() {
            Class::Float { .. } if self.data_type == DataType::F64 => {
                self.float(sum as f64 / f64::from(self.ranks))
            }
            // Types smaller than f64 are computed in f32.
            Class::Float { .. } => self.float(f64::from(sum as f32 / self.ranks as f32)),
            _ => (self.wrap(sum) / i128::from(self.ranks)) as u64,
        }
    }

    /// The bits of the nearest float; ties round to even.
    fn float(&self, value: f64) -> u64 {
        match self.data_type {
            DataType::F64 => value.to_bits(),
            DataType::F32 => u64::from((value as f32).to_bits()),
            DataType::F16 => small_float(value, 5, 10),
            DataType::Bf16 => small_float(value, 8, 7),
            DataType::F8E4M3 => small_float(value, 4, 3),
            _ => small_float(value, 5, 2),
        }
    }

    fn write(&self, bits: impl Iterator<Item = u64>) -> Vec<u8> {
        let size = self.data_type.size();
        let mut bytes = Vec::new();
        for bits in bits {
            match size {
                1 => bytes.push(bits as u8),
                2 => bytes.extend((bits as u16).to_ne_bytes()),
                4 => bytes.extend((bits as u32).to_ne_bytes()),
                _ => bytes.extend(bits.to_ne_bytes()),
            }
        }
        bytes
    }
}

/// A float with this many exponent and mantissa bits. The value must not overflow.
fn small_float(value: f64, exponent_bits: u32, mantissa: i32) -> u64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let magnitude = value.abs();
    if magnitude == 0.0 {
        return 0;
    }
    // Subnormal numbers have the exponent of the least normal number.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - bias);
    let steps = (magnitude * 2_f64.powi(mantissa - exponent)).round_ties_even() as u64;
    // `steps` includes the leading bit, which adds one to the exponent; a carry adds one more.
    let bits = (((exponent + bias) as u64 - 1) << mantissa) + steps;
    let sign = u64::from(value < 0.0) << (exponent_bits as i32 + mantissa);
    sign | bits
}

/// An element as text: the number, if Rust has the type, and the bits.
pub(super) fn text_of(data_type: DataType, bits: u64) -> String {
    let digits = 2 * data_type.size();
    let number = match data_type {
        DataType::F32 => format!("{:?} ", f32::from_bits(bits as u32)),
        DataType::F64 => format!("{:?} ", f64::from_bits(bits)),
        DataType::I8 => format!("{} ", bits as i8),
        DataType::I16 => format!("{} ", bits as i16),
        DataType::I32 => format!("{} ", bits as i32),
        DataType::I64 => format!("{} ", bits as i64),
        DataType::U8 | DataType::U16 | DataType::U32 | DataType::U64 => format!("{bits} "),
        _ => String::new(),
    };
    format!("{number}0x{bits:0digits$x}")
}

/// The bits of an element.
pub(super) fn bits_of(element: &[u8]) -> u64 {
    match *element {
        [a] => a.into(),
        [a, b] => u16::from_ne_bytes([a, b]).into(),
        [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]).into(),
        [a, b, c, d, e, f, g, h] => u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use ferroce_driver::memory::SpanMut;
    use ferroce_driver::reduction::{ReduceOp, Reduction as Reducing, scale};

    use super::*;

    const REDUCTIONS: [Reduction; 6] = [
        Reduction::Sum,
        Reduction::Product,
        Reduction::Min,
        Reduction::Max,
        Reduction::Average,
        Reduction::PreMulSum(1.0),
    ];

    /// The driver's reduction, starting at rank `start`, one rank at a time.
    fn by_the_driver(values: &Values, len: usize, start: u32) -> Vec<u8> {
        let reduction = values.reduction.unwrap();
        let op = match reduction {
            Reduction::Product => ReduceOp::Product,
            Reduction::Min => ReduceOp::Min,
            Reduction::Max => ReduceOp::Max,
            _ => ReduceOp::Sum,
        };
        let input = |rank| {
            let mut bytes = values.input(rank, len);
            if let Reduction::PreMulSum(_) = reduction {
                let span: SpanMut<'_> = bytes.as_mut_slice().into();
                scale(values.data_type, span, span.as_span(), factor(rank) as f64);
            }
            bytes
        };
        let ranks = values.ranks;
        let mut all = input(start);
        for step in 1..ranks {
            let next = input((start + step) % ranks);
            let reducing = Reducing::new(values.data_type, op);
            let is_last = step == ranks - 1 && matches!(reduction, Reduction::Average);
            let reducing = reducing.divide_by(is_last.then_some(ranks));
            let target: SpanMut<'_> = all.as_mut_slice().into();
            reducing.apply(&[target], &[target.as_span(), next.as_slice().into()]);
        }
        all
    }

    #[test]
    fn the_reference_is_that_of_the_driver_in_any_order() {
        for data_type in DataType::ALL {
            for reduction in REDUCTIONS {
                for (ranks, start) in [(2, 0), (2, 1), (5, 3), (23, 7)] {
                    let values = Values { data_type, reduction: Some(reduction), ranks, salt: 3 };
                    let reference = values.reduced(400);
                    let there = by_the_driver(&values, 400, start);
                    let differs = reference.iter().zip(&there).position(|(ours, theirs)| ours != theirs);
                    assert_eq!(differs, None, "{data_type} {reduction} of {ranks} ranks from {start}");
                }
            }
        }
    }

    /// A reduction of other values gives something else.
    #[test]
    fn values_differ_by_rank_salt_and_index() {
        for data_type in DataType::ALL {
            for reduction in [None, Some(Reduction::Sum), Some(Reduction::Product), Some(Reduction::Max)] {
                let values = Values { data_type, reduction, ranks: 4, salt: 1 };
                let input = values.input(0, 1000);
                assert_eq!(input.len(), 1000 * data_type.size());
                assert_ne!(input, values.input(1, 1000));
                assert_ne!(input, Values { salt: 2, ..values }.input(0, 1000));
                let half = input.len() / 2;
                assert_ne!(input[..half], input[half..], "{data_type} {reduction:?}");
            }
        }
        let values = Values { data_type: DataType::U8, reduction: None, ranks: 1, salt: 0 };
        assert_eq!(values.input(0, 1 << 20).len(), PERIOD);
    }

    #[test]
    fn floats_are_rounded_to_the_nearest() {
        for (value, bits) in [
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (2049.0, 0x6800),
            (2051.0, 0x6802),
            (6e-8, 1),
            (1.0 / 3.0, 0x3555),
        ] {
            assert_eq!(small_float(value, 5, 10), bits, "{value}");
        }
        assert_eq!(small_float(1.0 / 3.0, 8, 7), 0x3eab);
        assert_eq!(small_float(448.0, 4, 3), 0x7e);
        assert_eq!(small_float(-0.1, 5, 2), 0xae);
    }
}
