use proptest::prelude::*;

use super::*;
use half::{bf16, f16};

fn bytes<const N: usize, T>(values: &[T], to: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(to).collect()
}

proptest! {
    #[test]
    fn i32_sums_wrap(pairs in prop::collection::vec(any::<(i32, i32)>(), 0..300), skew in 0usize..4) {
        let (a, b): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
        // `skew` bytes in front: neither operand is aligned.
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

/// One pair, of any type.
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
    // 2048 + 1 is a tie, and even is below; 65504 is the largest.
    assert_eq!(ReduceOp::ALL.map(|op| f16s(op, 2048.0, 1.0)), [2048.0, 2048.0, 1.0, 2048.0]);
    assert_eq!([f16s(Op::Sum, 2048.0, 3.0), f16s(Op::Sum, 65504.0, 65504.0)], [2052.0, f32::INFINITY]);
    let bf16s = |op, a: f32, b: f32| {
        let [a, b] = [a, b].map(|value| bf16::from_f32(value).to_ne_bytes());
        bf16::from_ne_bytes(one(T::Bf16, op, a, b)).to_f32()
    };
    assert_eq!(ReduceOp::ALL.map(|op| bf16s(op, 256.0, 3.0)), [260.0, 768.0, 3.0, 256.0]);
}

#[test]
fn the_lesser_of_a_number_and_none_is_none() {
    let nan = f32::from_bits(0x7fc0_1234);
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for (a, b) in [(nan, 1.0), (1.0, nan)] {
            let got = one(DataType::F32, op, a.to_ne_bytes(), b.to_ne_bytes());
            assert_eq!(got, nan.to_ne_bytes());
        }
        // Neither zero is less.
        assert_eq!(
            one(DataType::F32, op, (-0.0_f32).to_ne_bytes(), 0.0_f32.to_ne_bytes()),
            (-0.0_f32).to_ne_bytes()
        );
    }
}

#[test]
fn nothing_outside_is_touched() {
    let mut target = [0x7f; 12];
    reduce(DataType::I32, ReduceOp::Sum, &mut target[4..8], &[1, 0, 0, 0]);
    assert_eq!(target[..4], [0x7f; 4]);
    assert_eq!(target[8..], [0x7f; 4]);
    assert_ne!(target[4..8], [0x7f; 4]);
}
