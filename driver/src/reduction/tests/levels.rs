//! All levels give the same bits, for any alignment of the elements and any choice of targets among the sources.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::element::{Block, LANES, Level, Portable};
use super::super::processor::Processor;
use super::*;

#[derive(Debug, Clone)]
struct Case {
    what: Reduction,
    /// Bytes per source.
    len: usize,
    /// The offset of each source and target from a multiple of 32 bytes.
    skews: Vec<usize>,
    /// Sources that are also targets.
    in_place: BTreeSet<usize>,
    /// Further targets.
    elsewhere: usize,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let what = (prop::sample::select(&DataType::ALL), prop::sample::select(&ReduceOp::ALL));
    let divide_by =
        prop_oneof![3 => Just(None), 1 => (1_u32..70).prop_map(Some), 1 => (1_u32..).prop_map(Some)];
    let sources = prop_oneof![Just(1_usize), Just(2), 3_usize..=9, 10_usize..=64];
    // Less than a block, some blocks, some pieces.
    let count = prop_oneof![0_usize..40, 0_usize..300, 900_usize..2500];
    (what, divide_by, sources, count, any::<u64>()).prop_flat_map(
        |((data_type, op), divide_by, sources, count, seed)| {
            (
                prop::collection::vec(0_usize..32, 2 * sources),
                prop::collection::btree_set(0..sources, 0..=sources.min(3)),
                0_usize..3,
            )
                .prop_map(move |(skews, in_place, elsewhere)| Case {
                    what: Reduction::new(data_type, op).divide_by(divide_by),
                    len: count * data_type.size(),
                    skews,
                    elsewhere: elsewhere.max(usize::from(in_place.is_empty())),
                    in_place,
                    seed,
                })
        },
    )
}

/// The contents of each source: any bits, often those of special values.
fn contents(case: &Case) -> Vec<Vec<u8>> {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{RngCore, SeedableRng};
    let mut chance = ChaCha8Rng::seed_from_u64(case.seed);
    let fill = |_| {
        let mut bytes = vec![0; case.len];
        chance.fill_bytes(&mut bytes);
        for element in bytes.chunks_mut(case.what.data_type.size()) {
            let last = element.len() - 1;
            match chance.next_u32() % 16 {
                0 => element.fill(0),
                1 => element.fill(0xff),
                2 => element[last] = 0x7f,
                3 => element[..last].fill(0),
                _ => {}
            }
        }
        bytes
    };
    (0..case.skews.len() / 2).map(fill).collect()
}

/// Returns the contents of each target; checks that the bytes around them are unchanged.
fn run(case: &Case, contents: &[Vec<u8>], reduce: impl FnOnce(&[SpanMut<'_>], &[Span<'_>])) -> Vec<Vec<u8>> {
    const GUARD: u8 = 0x5a;
    let place = |bytes: &[u8], skew| [&vec![GUARD; skew][..], bytes, &[GUARD; 64]].concat();
    let (skews, other_skews) = case.skews.split_at(contents.len());
    let mut sources: Vec<_> = contents.iter().zip(skews).map(|(bytes, skew)| place(bytes, *skew)).collect();
    let mut others: Vec<_> =
        (0..case.elsewhere).map(|n| place(&vec![1; case.len], other_skews[n % other_skews.len()])).collect();

    let spans: Vec<SpanMut<'_>> = sources
        .iter_mut()
        .zip(skews)
        .map(|(bytes, skew)| SpanMut::from(&mut bytes[..]).part(*skew, case.len))
        .collect();
    let mut targets: Vec<SpanMut<'_>> = case.in_place.iter().map(|n| spans[*n]).collect();
    targets.extend(
        others.iter_mut().enumerate().map(|(n, bytes)| {
            SpanMut::from(&mut bytes[..]).part(other_skews[n % other_skews.len()], case.len)
        }),
    );
    reduce(&targets, &spans.iter().map(|span| span.as_span()).collect::<Vec<_>>());
    let results = targets.iter().map(|target| {
        let mut bytes = vec![0; case.len];
        target.as_span().copy_to(&mut bytes);
        bytes
    });
    let results = results.collect();
    for (n, bytes) in sources.iter().enumerate() {
        let (before, rest) = bytes.split_at(skews[n]);
        assert!(before.iter().chain(&rest[case.len..]).all(|byte| *byte == GUARD), "source {n}");
        assert!(case.in_place.contains(&n) || rest[..case.len] == contents[n], "source {n} has changed");
    }
    for (n, bytes) in others.iter().enumerate() {
        let (before, rest) = bytes.split_at(other_skews[n % other_skews.len()]);
        assert!(before.iter().chain(&rest[case.len..]).all(|byte| *byte == GUARD), "target {n}");
    }
    results
}

/// An element in a form to compare: the bits of a computed NaN are undefined.
fn canonical(what: Reduction, element: &[u8]) -> Vec<u8> {
    let chooses = matches!(what.op, ReduceOp::Min | ReduceOp::Max) && what.divide_by.is_none();
    if !chooses && is_nan(what.data_type, element) { vec![0xff; element.len()] } else { element.to_vec() }
}

fn is_nan(data_type: DataType, bits: &[u8]) -> bool {
    match data_type {
        DataType::F32 => f32::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::F64 => f64::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::F16 => f16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::Bf16 => bf16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::F8E4M3 => bits[0] & 0x7f == 0x7f,
        DataType::F8E5M2 => bits[0] & 0x7f > 0x7c,
        _ => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Compares each level with a model that processes one element at a time into one separate target.
    #[test]
    fn all_levels_give_the_same_bits(case in case()) {
        let contents = contents(&case);
        let size = case.what.data_type.size();
        let mut expected = Vec::new();
        for at in (0..case.len).step_by(size) {
            let sources: Vec<Span<'_>> = contents.iter().map(|bytes| Span::from(&bytes[at..at + size])).collect();
            let mut element = vec![0; size];
            let target = [SpanMut::from(&mut element[..])];
            let job = Job::new(&target, &sources, case.what.divide_by);
            Processor::all().last().unwrap().reduce(case.what.data_type, case.what.op, job);
            expected.push(canonical(case.what, &element));
        }
        let check = |name: &str, results: Vec<Vec<u8>>| {
            for (target, got) in results.iter().enumerate() {
                for (n, (got, expected)) in got.chunks(size).zip(&expected).enumerate() {
                    prop_assert!(
                        canonical(case.what, got) == *expected,
                        "{}: element {} of target {}: {:x?}, not {:x?}", name, n, target, got, expected
                    );
                }
            }
            Ok(())
        };
        for processor in Processor::all() {
            check(processor.name(), run(&case, &contents, |targets, sources| {
                processor.reduce(case.what.data_type, case.what.op, Job::new(targets, sources, case.what.divide_by));
            }))?;
        }
        // With one source and no division the bits are unchanged, even those of a signalling NaN.
        if contents.len() > 1 || case.what.divide_by.is_some() {
            check("apply", run(&case, &contents, |targets, sources| case.what.apply(targets, sources)))?;
        }
    }

    #[test]
    fn all_levels_scale_to_the_same_bits(
        (data_type, seed) in (prop::sample::select(&DataType::ALL), any::<u64>()),
        count in 0_usize..200,
        factor in prop_oneof![(-100_i8..100).prop_map(f64::from), any::<f64>()],
    ) {
        let what = Reduction::new(data_type, ReduceOp::Product);
        let len = count * data_type.size();
        let case = Case { what, len, skews: vec![3, 1], in_place: BTreeSet::from([0]), elsewhere: 0, seed };
        let contents = contents(&case);
        let results: Vec<Vec<u8>> = Processor::all().map(|processor| {
            let result = run(&case, &contents, |targets, sources| {
                processor.scale(data_type, targets[0], sources[0], factor);
            });
            result[0].chunks(data_type.size()).flat_map(|element| canonical(what, element)).collect()
        }).collect();
        prop_assert!(results.iter().all(|result| *result == results[0]));
    }
}

/// The value of a code, computed from the format's definition.
fn meaning(code: u8, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(code >> mantissa_bits & ((1 << exponent_bits) - 1));
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * 2_f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2_f64.powi(exponent - bias),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// An 8-bit format, as specified.
struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// The code of the greatest finite number.
    greatest: u8,
    /// The next code: infinity, or the NaN.
    beyond: u8,
    widen: fn(&Block<u8>) -> Block<f32>,
    narrow: fn(&Block<f32>) -> Block<u8>,
}

const FORMATS: [Format; 2] = [
    Format {
        exponent_bits: 4,
        mantissa_bits: 3,
        greatest: 0x7e,
        beyond: 0x7f,
        widen: Portable::widen_e4m3,
        narrow: Portable::narrow_e4m3,
    },
    Format {
        exponent_bits: 5,
        mantissa_bits: 2,
        greatest: 0x7b,
        beyond: 0x7c,
        widen: Portable::widen_e5m2,
        narrow: Portable::narrow_e5m2,
    },
];

impl Format {
    fn value(&self, code: u8) -> f64 {
        meaning(code, self.exponent_bits, self.mantissa_bits)
    }

    /// The nearest of all numbers, found by comparison, ties to the even code. It includes one number beyond the greatest:
    /// values nearest to that overflow.
    fn nearest(&self, value: f32) -> u8 {
        let sign = u8::from(value.is_sign_negative()) << 7;
        let magnitude = f64::from(value.abs()).min(self.value(self.beyond));
        let distance = |code: &u8| (self.value(*code) - magnitude).abs();
        let codes = 0..=self.beyond;
        sign | codes.min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
    }

    fn narrow(&self, value: f32) -> u8 {
        (self.narrow)(&[value; LANES])[0]
    }
}

#[test]
fn each_8_bit_code_converts_to_its_number_and_back() {
    for format in FORMATS {
        for code in 0..=255_u8 {
            let value = (format.widen)(&[code; LANES])[0];
            let magnitude = code & 0x7f;
            if magnitude <= format.greatest {
                assert_eq!(f64::from(value), format.value(code), "{code:#x}");
                assert_eq!(format.narrow(value), code);
            } else if magnitude == 0x7c {
                assert!(value.is_infinite());
                assert_eq!(format.narrow(value), code);
            } else {
                assert!(value.is_nan() && value.is_sign_negative() == (code >= 0x80), "{code:#x}");
                let quiet = if format.mantissa_bits == 2 { code | 2 } else { code };
                assert_eq!(format.narrow(value), quiet, "{code:#x}");
            }
        }
    }
    assert_eq!(
        [448.0, 464.0, 464.1, 1e30, f32::INFINITY].map(|value| FORMATS[0].narrow(value)),
        [0x7e, 0x7e, 0x7f, 0x7f, 0x7f]
    );
    assert_eq!(
        [57344.0, 61439.9, 61440.0, 1e30].map(|value| FORMATS[1].narrow(value)),
        [0x7b, 0x7b, 0x7c, 0x7c]
    );
}

/// Tests each number, each midpoint of two neighbours, and the values next to both.
#[test]
fn rounding_to_8_bits_is_to_nearest() {
    for format in FORMATS {
        for code in 0..format.beyond {
            let (this, next) = (format.value(code) as f32, format.value(code + 1) as f32);
            let middle = (this + next) / 2.0;
            for value in [this, middle] {
                for value in [value.next_down(), value, value.next_up()].into_iter().flat_map(|v| [v, -v]) {
                    assert_eq!(format.narrow(value), format.nearest(value), "{value:e} at {code:#x}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn rounding_any_number_to_8_bits_is_to_nearest(bits: u32, exponent in 100_u32..150) {
        // Any value, and one with an exponent of the formats' range.
        for value in [f32::from_bits(bits), f32::from_bits(bits & 0x807f_ffff | exponent << 23)] {
            for format in FORMATS.iter().filter(|_| !value.is_nan()) {
                prop_assert_eq!(format.narrow(value), format.nearest(value), "{:e}", value);
            }
        }
    }

    /// Compares with another implementation.
    #[test]
    fn f16_and_bf16_are_those_of_the_crate_half(bits: u32, exponent in 95_u32..150) {
        for value in [f32::from_bits(bits), f32::from_bits(bits & 0x807f_ffff | exponent << 23)] {
            prop_assert_eq!(Portable::narrow_f16(&[value; LANES])[0], f16::from_f32_const(value).to_bits());
            prop_assert_eq!(Portable::narrow_bf16(&[value; LANES])[0], bf16::from_f32(value).to_bits());
        }
        let code = bits as u16;
        let (got, expected) = (Portable::widen_f16(&[code; LANES])[0], f16::from_bits(code).to_f32_const());
        prop_assert!(got == expected || got.is_nan() && expected.is_nan());
        prop_assert_eq!(Portable::widen_bf16(&[code; LANES])[0].to_bits(), u32::from(code) << 16);
    }
}
