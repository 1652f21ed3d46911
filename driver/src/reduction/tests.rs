mod levels;

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;

fn bytes<const N: usize, T>(values: &[T], to: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(to).collect()
}

proptest! {
    #[test]
    fn i32_sums_wrap(pairs in prop::collection::vec(any::<(i32, i32)>(), 0..300), skew in 0usize..4) {
        let (a, b): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
        // `skew` bytes in front, so that neither operand is aligned.
        let mut target = [vec![0; skew], bytes(&a, |v| v.to_ne_bytes())].concat();
        let source = [vec![0; skew + 1], bytes(&b, |v| v.to_ne_bytes())].concat();
        reduce(DataType::I32, ReduceOp::Sum, &mut target[skew..], &source[skew + 1..]);
        let sums: Vec<i32> = a.iter().zip(&b).map(|(a, b)| a.wrapping_add(*b)).collect();
        prop_assert_eq!(&target[skew..], bytes(&sums, |v| v.to_ne_bytes()));
    }

    #[test]
    fn f32_sums_are_those_of_ieee(pairs in prop::collection::vec(any::<(f32, f32)>(), 0..300)) {
        let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        let mut target = bytes(&a, |v| v.to_ne_bytes());
        reduce(DataType::F32, ReduceOp::Sum, &mut target, &bytes(&b, |v| v.to_ne_bytes()));
        for ((a, b), got) in a.iter().zip(&b).zip(target.as_chunks::<4>().0) {
            prop_assert_eq!((a + b).to_bits(), f32::from_ne_bytes(*got).to_bits());
        }
    }
}

/// One element, of any type.
fn one<const N: usize>(data_type: DataType, op: ReduceOp, a: [u8; N], b: [u8; N]) -> [u8; N] {
    assert_eq!(data_type.size(), N);
    let mut target = a;
    reduce(data_type, op, &mut target, &b);
    target
}

#[test]
fn each_operation_of_each_type() {
    use {DataType as T, ReduceOp as Op};
    let i64s = |op, a: i64, b: i64| i64::from_ne_bytes(one(T::I64, op, a.to_ne_bytes(), b.to_ne_bytes()));
    assert_eq!(
        [Op::Sum, Op::Product, Op::Min, Op::Max].map(|op| i64s(op, i64::MAX, 2)),
        [i64::MIN + 1, -2, 2, i64::MAX]
    );
    let i32s = |op, a: i32, b: i32| i32::from_ne_bytes(one(T::I32, op, a.to_ne_bytes(), b.to_ne_bytes()));
    assert_eq!(ReduceOp::ALL.map(|op| i32s(op, i32::MIN, 3)), [i32::MIN + 3, i32::MIN, i32::MIN, 3]);
    let f64s = |op, a: f64, b: f64| f64::from_ne_bytes(one(T::F64, op, a.to_ne_bytes(), b.to_ne_bytes()));
    assert_eq!(ReduceOp::ALL.map(|op| f64s(op, 1.5, -4.0)), [-2.5, -6.0, -4.0, 1.5]);
    let f16s = |op, a: f32, b: f32| {
        let [a, b] = [a, b].map(|value| f16::from_f32(value).to_ne_bytes());
        f16::from_ne_bytes(one(T::F16, op, a, b)).to_f32()
    };
    // 2048 + 1 is a tie, which rounds down to the even number; 65504 is the largest.
    assert_eq!(ReduceOp::ALL.map(|op| f16s(op, 2048.0, 1.0)), [2048.0, 2048.0, 1.0, 2048.0]);
    assert_eq!([f16s(Op::Sum, 2048.0, 3.0), f16s(Op::Sum, 65504.0, 65504.0)], [2052.0, f32::INFINITY]);
    let bf16s = |op, a: f32, b: f32| {
        let [a, b] = [a, b].map(|value| bf16::from_f32(value).to_ne_bytes());
        bf16::from_ne_bytes(one(T::Bf16, op, a, b)).to_f32()
    };
    assert_eq!(ReduceOp::ALL.map(|op| bf16s(op, 256.0, 3.0)), [260.0, 768.0, 3.0, 256.0]);
}

#[test]
fn min_and_max_propagate_nan() {
    let nan = f32::from_bits(0x7fc0_1234);
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for (a, b) in [(nan, 1.0), (1.0, nan)] {
            let got = one(DataType::F32, op, a.to_ne_bytes(), b.to_ne_bytes());
            assert_eq!(got, nan.to_ne_bytes());
        }
        // Zeros of either sign are equal.
        assert_eq!(
            one(DataType::F32, op, (-0.0_f32).to_ne_bytes(), 0.0_f32.to_ne_bytes()),
            (-0.0_f32).to_ne_bytes()
        );
    }
}

#[test]
fn bytes_outside_are_unchanged() {
    let mut target = [0x7f; 12];
    reduce(DataType::I32, ReduceOp::Sum, &mut target[4..8], &[1, 0, 0, 0]);
    assert_eq!(target[..4], [0x7f; 4]);
    assert_eq!(target[8..], [0x7f; 4]);
    assert_ne!(target[4..8], [0x7f; 4]);
}

/// Each type has the names that users write; an error lists all valid ones.
#[test]
fn names_are_read_and_written() {
    for data_type in DataType::ALL {
        assert_eq!(data_type.to_string().parse::<DataType>(), Ok(data_type));
    }
    for op in ReduceOp::ALL {
        assert_eq!(op.to_string().parse::<ReduceOp>(), Ok(op));
    }
    let nccl = "int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 fp8_e4m3 fp8_e5m2";
    let names: Vec<_> = nccl.split(' ').map(|name| name.parse::<DataType>().unwrap().to_string()).collect();
    assert_eq!(names.join(" "), "i8 u8 i32 u32 i64 u64 f16 f32 f64 bf16 f8e4m3 f8e5m2");
    assert_eq!("prod".parse::<ReduceOp>(), Ok(ReduceOp::Product));
    let refused = "f31".parse::<DataType>().unwrap_err().to_string();
    assert!(refused.starts_with("data type \"f31\": valid are f32, float, i32, int32"), "{refused}");
    let refused = "avg".parse::<ReduceOp>().unwrap_err().to_string();
    assert_eq!(refused, "operation \"avg\": valid are sum, product, prod, min, max");
}

#[test]
fn factors_of_integers_are_integers_of_the_type() {
    assert!(check_factor(DataType::F8E4M3, 0.3).is_ok());
    assert!(check_factor(DataType::I64, -9_223_372_036_854_775_808.0).is_ok());
    for (data_type, factor) in [(DataType::U8, 256.0), (DataType::U8, -1.0), (DataType::I16, 0.5)]
        .into_iter()
        .chain([f64::NAN, f64::INFINITY, 9_223_372_036_854_775_808.0].map(|factor| (DataType::I64, factor)))
    {
        assert!(check_factor(data_type, factor).is_err(), "{factor} of {data_type}");
    }
    assert_eq!(
        check_factor(DataType::I8, 200.0).unwrap_err().to_string(),
        "factor 200 for elements of type i8: an integer from -128 to 127 is needed"
    );
}

#[test]
fn factors_multiply() {
    let mut bytes = [3_u8, 100, 0, 255];
    let span = SpanMut::from(&mut bytes[..]);
    scale(DataType::U8, span, span.as_span(), 3.0);
    assert_eq!(bytes, [9, 44, 0, 253]);
    let mut scaled = [0; 4];
    let halves = [3.0_f32, -7.0].map(|value| f16::from_f32(value).to_ne_bytes());
    scale(DataType::F16, scaled.as_mut_slice().into(), halves.as_flattened().into(), 0.5);
    let expected = [1.5_f32, -3.5].map(|value| f16::from_f32(value).to_ne_bytes());
    assert_eq!(scaled, expected.as_flattened());
}

fn apply_one<const N: usize>(reduction: Reduction, sources: &[[u8; N]]) -> [u8; N] {
    let mut target = [0; N];
    let sources: Vec<Span<'_>> = sources.iter().map(|source| source.as_slice().into()).collect();
    reduction.apply(&[target.as_mut_slice().into()], &sources);
    target
}

#[test]
fn quotients_are_rounded_as_documented() {
    let sum = |data_type| Reduction::new(data_type, ReduceOp::Sum);
    assert_eq!(apply_one(sum(DataType::I8).divide_by(2), &[[-7_i8 as u8]]), [-3_i8 as u8]);
    assert_eq!(apply_one(sum(DataType::I8).divide_by(128), &[[-128_i8 as u8]]), [-1_i8 as u8]);
    assert_eq!(apply_one(sum(DataType::I8).divide_by(u32::MAX), &[[-128_i8 as u8]]), [0]);
    assert_eq!(apply_one(sum(DataType::U8).divide_by(2), &[[250], [5]]), [127]);
    assert_eq!(
        apply_one(sum(DataType::F32).divide_by(3), &[1_f32.to_ne_bytes()]),
        (1_f32 / 3.0).to_ne_bytes()
    );
    // In f16 the sum would be infinite.
    let large = f16::from_f32(60_000.0).to_ne_bytes();
    assert_eq!(apply_one(sum(DataType::F16).divide_by(2), &[large, large]), large);
    // 2049 is not an f16; the sum over all sources is.
    let [many, one] = [2048.0, 1.0].map(|value| f16::from_f32(value).to_ne_bytes());
    assert_eq!(apply_one(sum(DataType::F16), &[many, one, one]), f16::from_f32(2050.0).to_ne_bytes());
}

proptest! {
    /// Tests the division by floats, for each type that uses it.
    #[test]
    fn quotients_of_integers_are_exact(
        value: u32, by in prop_oneof![1_u32..300, 1_u32..=u32::MAX], shift in 0_u32..32
    ) {
        let by = (by >> shift).max(1);
        let reduction = |data_type| Reduction::new(data_type, ReduceOp::Sum).divide_by(by);
        for value in [value, value >> shift, (value / by) * by, ((value / by) * by).wrapping_sub(1)] {
            let signed = i64::from(value as i32) / i64::from(by);
            prop_assert_eq!(apply_one(reduction(DataType::U32), &[value.to_ne_bytes()]), (value / by).to_ne_bytes());
            prop_assert_eq!(apply_one(reduction(DataType::I32), &[value.to_ne_bytes()]), (signed as i32).to_ne_bytes());
            let half = value as i16;
            let quotient = (i64::from(half) / i64::from(by)) as i16;
            prop_assert_eq!(apply_one(reduction(DataType::I16), &[half.to_ne_bytes()]), quotient.to_ne_bytes());
            let half = value as u16;
            let quotient = (u64::from(half) / u64::from(by)) as u16;
            prop_assert_eq!(apply_one(reduction(DataType::U16), &[half.to_ne_bytes()]), quotient.to_ne_bytes());
        }
    }
}

#[test]
#[should_panic(expected = "divides by a number from 1 on")]
fn division_by_zero_panics() {
    apply_one(Reduction::new(DataType::I8, ReduceOp::Sum).divide_by(0), &[[1]]);
}

#[test]
#[should_panic(expected = "hold no whole elements of type i16")]
fn partial_elements_panic() {
    apply_one(Reduction::new(DataType::I16, ReduceOp::Sum), &[[1; 3]]);
}

#[test]
#[should_panic(expected = "not equally long")]
fn spans_of_different_lengths_panic() {
    reduce(DataType::I8, ReduceOp::Sum, &mut [0; 3], &[0; 4]);
}
