//! The same with numbers: every type, reduction and algorithm, compared with results computed in another way.

use ferroce::driver::reduction::{DataType, ReduceOp, Reduction as Arithmetic, scale};
use ferroce::driver::{Span, SpanMut};

use super::super::simulation::{Elements, run};
use super::*;
use crate::Reduction;

/// The bytes of an element, with padding.
type Number = [u8; 8];

/// A pattern that no result may contain.
const GARBAGE: Number = [0xa5; 8];

struct Numbers {
    data_type: DataType,
    op: ReduceOp,
    ranks: u32,
}

impl Elements for Numbers {
    type Element = Number;

    fn reduce(&self, operands: &[Number], finish: Finish, rank: usize) -> Number {
        let size = self.data_type.size();
        let sources: Vec<Span<'_>> = operands.iter().map(|operand| Span::from(&operand[..size])).collect();
        let mut number = [0; 8];
        let target = SpanMut::from(&mut number[..size]);
        let arithmetic = Arithmetic::new(self.data_type, self.op);
        match finish {
            Finish::No => arithmetic.apply(&[target], &sources),
            Finish::Whole => arithmetic.divide_by(self.ranks).apply(&[target], &sources),
            Finish::Scale => scale(self.data_type, target, sources[0], f64::from(factor(rank))),
        }
        number
    }
}

/// The factor of a rank's elements.
fn factor(rank: usize) -> u8 {
    if rank == 1 { 2 } else { 1 }
}

/// Any sum of these, in any order, has three bits, and is exact in the smallest floats.
fn value(data_type: DataType, rank: usize, index: usize) -> i64 {
    let value: i64 = [1, -1, 2, -2, 1, -1, 2, -2, 1][rank];
    let value = if index.is_multiple_of(2) { value } else { -value };
    if is_unsigned(data_type) { value.abs() } else { value }
}

fn is_unsigned(data_type: DataType) -> bool {
    matches!(data_type, DataType::U8 | DataType::U16 | DataType::U32 | DataType::U64)
}

/// The exponent's bias and the mantissa bits of float types that Rust does not have.
fn small_float(data_type: DataType) -> Option<(i64, u32)> {
    match data_type {
        DataType::F8E4M3 => Some((7, 3)),
        DataType::F8E5M2 => Some((15, 2)),
        DataType::F16 => Some((15, 10)),
        DataType::Bf16 => Some((127, 7)),
        _ => None,
    }
}

/// A number that the type represents exactly.
fn encode(data_type: DataType, value: f64) -> Number {
    let mut number = [0; 8];
    let bytes: Vec<u8> = match (data_type, small_float(data_type)) {
        (DataType::F32, _) => (value as f32).to_ne_bytes().to_vec(),
        (DataType::F64, _) => value.to_ne_bytes().to_vec(),
        (_, Some((bias, mantissa))) => {
            let bits = 8 * data_type.size() as u32;
            let exponent = value.abs().log2().floor();
            let fraction = value.abs() / exponent.exp2() - 1.0;
            let magnitude = match value {
                0.0 => 0,
                _ => {
                    ((exponent as i64 + bias) as u64) << mantissa
                        | (fraction * f64::from(1 << mantissa)) as u64
                }
            };
            let sign = u64::from(value < 0.0) << (bits - 1);
            (sign | magnitude).to_le_bytes()[..data_type.size()].to_vec()
        }
        _ => (value as i64).to_le_bytes()[..data_type.size()].to_vec(),
    };
    number[..bytes.len()].copy_from_slice(&bytes);
    number
}

/// The result of all ranks; `None` if the type can't represent it exactly.
fn due(data_type: DataType, reduction: Reduction, ranks: usize, index: usize) -> Option<f64> {
    let values = || (0..ranks).map(|rank| value(data_type, rank, index));
    let is_float = small_float(data_type).is_some() || matches!(data_type, DataType::F32 | DataType::F64);
    let whole = match reduction {
        Reduction::Sum => values().sum(),
        Reduction::Product => values().product(),
        Reduction::Min => values().min().unwrap_or(0),
        Reduction::Max => values().max().unwrap_or(0),
        Reduction::PreMulSum(_) => {
            values().zip(0..).map(|(value, rank)| value * i64::from(factor(rank))).sum()
        }
        Reduction::Average if !is_float => values().sum::<i64>() / ranks as i64,
        Reduction::Average => {
            let sum = values().sum::<i64>() as f64;
            return match data_type {
                DataType::F32 => Some(f64::from(sum as f32 / ranks as f32)),
                DataType::F64 => Some(sum / ranks as f64),
                _ => ranks.is_power_of_two().then_some(sum / ranks as f64),
            };
        }
    };
    Some(whole as f64)
}

#[test]
fn every_type_with_every_reduction_and_algorithm() {
    let reductions = [
        Reduction::Sum,
        Reduction::Product,
        Reduction::Min,
        Reduction::Max,
        Reduction::Average,
        Reduction::PreMulSum(0.0),
    ];
    let mut elements = 0;
    for kind in Kind::ALL.into_iter().filter(|kind| kind.reduces()) {
        for (size, algorithm) in (1..=9).flat_map(|size| Algorithm::ALL.map(|algorithm| (size, algorithm))) {
            for (reduction, in_place) in reductions.into_iter().flat_map(|r| [(r, false), (r, true)]) {
                let case = Case {
                    kind,
                    algorithm,
                    size,
                    counts: vec![5],
                    differ: false,
                    root: size / 2,
                    chunk: 2,
                    lands_above: 1,
                    is_average: reduction == Reduction::Average,
                    is_scaled: matches!(reduction, Reduction::PreMulSum(_)),
                    in_place,
                    hosts: if size % 3 == 0 { 3 } else { 2.min(size) },
                };
                for data_type in DataType::ALL.into_iter().filter(|_| case.makes_sense()) {
                    elements += check(&case, data_type, reduction);
                }
            }
        }
    }
    println!("{elements} elements");
    assert!(elements > 100_000, "{elements}");
}

/// Returns the number of elements.
fn check(case: &Case, data_type: DataType, reduction: Reduction) -> usize {
    let numbers = Numbers { data_type, op: reduction.op(), ranks: case.size as u32 };
    let of = |rank| move |at| encode(data_type, value(data_type, rank, at) as f64);
    let mut ranks: Vec<_> = (0..case.size).map(|rank| case.rank_of(rank, of(rank), GARBAGE)).collect();
    run(&numbers, &mut ranks, 2, 1, |of| of - 1);
    let mut count = 0;
    for (number, rank) in ranks.iter_mut().enumerate() {
        let (_, len) = case.lengths(number);
        let first = if case.kind == Kind::ReduceScatter { number * case.count() } else { 0 };
        for (at, got) in rank.result(len).into_iter().enumerate() {
            let Some(due) = due(data_type, reduction, case.size, first + at) else { continue };
            let size = data_type.size();
            assert_eq!(
                got[..size],
                encode(data_type, due)[..size],
                "{data_type} {reduction}, {case:?}: element {at} of rank {number}, {due}"
            );
            count += 1;
        }
    }
    count
}
