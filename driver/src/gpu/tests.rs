//! Tests that every device must pass.

use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;
use crate::memory;
use crate::reduction::{DataType, ReduceOp, Reduction, scale};

pub(super) fn random(chance: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    chance.fill_bytes(&mut bytes);
    bytes
}

/// Device memory with these contents.
pub(super) fn filled(device: &dyn Device, bytes: &[u8]) -> Memory {
    let mut memory = device.allocate(bytes.len()).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

pub(super) fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

pub(super) fn piece(memory: &Memory, offset: u64, len: usize) -> Piece<'_> {
    memory.piece(offset, len).unwrap()
}

/// Polls until the ticket has ended, for at most 10 s. These devices don't tell when to poll.
pub(super) fn wait(queue: &mut (impl Tickets + ?Sized), ticket: Ticket) {
    let limit = Instant::now() + Duration::from_secs(10);
    while queue.done(Nanos(0)).unwrap() < ticket {
        assert!(Instant::now() < limit && queue.next_deadline(Nanos(5)) == Some(Nanos(5)));
    }
}

/// A copy that was reported as ended is visible, in order if that was requested; a queue holds 64, and completes them when
/// it is dropped.
pub(super) fn copies_are_there_when_they_have_ended(device: &dyn Device) {
    let chance = &mut ChaCha8Rng::seed_from_u64(2);
    let len = 300_000;
    let (from, mut to) = (random(chance, len), device.allocate(len).unwrap());
    let mut source = device.allocate(len).unwrap();
    source.write(0, &from).unwrap();
    let staging = Staging::new(len).unwrap();
    let mut gathers = device.queue(&staging).unwrap();
    let mut scatters = device.queue(&staging).unwrap();
    // In two pieces, whose order is swapped.
    let ticket = gathers.gather(Nanos(0), &[piece(&source, 1000, len - 1000), piece(&source, 0, 1000)], 0);
    assert!(source.is_pinned());
    wait(&mut *gathers, ticket.unwrap());
    let turned = [&from[1000..], &from[..1000]].concat();
    let mut staged = vec![0; len];
    staging.read(0, &mut staged);
    assert!(staged == turned && !source.is_pinned());
    // The staging stays pinned for the other queue.
    drop(gathers);
    let ticket = scatters.scatter(Nanos(0), 0, &[piece(&to, 0, len)], Ticket::NONE).unwrap();
    wait(&mut *scatters, ticket);
    assert!(bytes_of(&to) == turned);
    // A copy that depends on earlier ones waits for them, in either direction.
    for round in 0..100_u8 {
        staging.write(0, &[round; 64 << 10]);
        staging.write(128 << 10, &[100 + round; 100]);
        let first = scatters.scatter(Nanos(0), 0, &[piece(&to, 0, 64 << 10)], Ticket::NONE).unwrap();
        let second = scatters.scatter(Nanos(0), 128 << 10, &[piece(&to, 500, 100)], first).unwrap();
        wait(&mut *scatters, second);
        assert_eq!(bytes_of(&to)[500..600], [100 + round; 100]);
        source.write(0, &[round; 64 << 10]).unwrap();
        let third = scatters.gather(Nanos(0), &[piece(&source, 0, 64 << 10)], 200_000).unwrap();
        let last = scatters.scatter(Nanos(0), 200_000, &[piece(&to, 0, 64 << 10)], third).unwrap();
        wait(&mut *scatters, last);
        assert_eq!(bytes_of(&to)[..64 << 10], [round; 64 << 10]);
    }
    // An empty copy ends too.
    let ticket = scatters.gather(Nanos(0), &[], 0).unwrap();
    wait(&mut *scatters, ticket);
    let mut submitted = 0;
    let full = loop {
        match scatters.scatter(Nanos(0), 0, &[piece(&to, 0, 64 << 10)], Ticket::NONE) {
            Ok(_) => submitted += 1,
            Err(error) => break error,
        }
        assert!(submitted < 1000, "nobody asks what has ended, so it must be full");
    };
    assert!(full.to_string().contains("64 copies or reductions are outstanding"), "{full}");
    // Outstanding copies end when the queue is dropped.
    drop(scatters);
    assert!(!to.is_pinned());
    to.write(0, b"ours again").unwrap();
}

/// The computations of this many sources: each reduction, its quotients, products by factors, and copies.
fn computations(data_type: DataType) -> Vec<(Computation, usize)> {
    let mut all = Vec::new();
    for op in ReduceOp::ALL {
        let reduction = Reduction::new(data_type, op);
        all.extend([2, 3, MAX_SOURCES].map(|sources| (Computation::Reduce(reduction), sources)));
        for (divide_by, sources) in [(3, 1), (2, 2), (300, MAX_SOURCES), (u32::MAX, 2)] {
            all.push((Computation::Reduce(reduction.divide_by(divide_by)), sources));
        }
    }
    all.extend([-3.0, 0.1, 1e9].map(|factor| (Computation::Scale { data_type, factor }, 1)));
    all.push((Computation::Reduce(Reduction::new(data_type, ReduceOp::Sum)), 1));
    all
}

/// For any bits in the memory; only the bits of NaN results are undefined.
pub(super) fn reductions_are_those_of_the_processor(device: &dyn Device, reducer: &mut dyn Reducer) {
    let chance = &mut ChaCha8Rng::seed_from_u64(3);
    let (all, at, len) = (20_000, 16, 16_000);
    for data_type in DataType::ALL {
        for (nth, (computation, count)) in computations(data_type).into_iter().enumerate() {
            let bytes: Vec<Vec<u8>> = (0..=count).map(|_| random(chance, all)).collect();
            let memories: Vec<Memory> = bytes.iter().map(|bytes| filled(device, bytes)).collect();
            // The target is the first source, or none of them.
            let mut sources: Vec<(usize, usize)> = (1..=count).map(|source| (source, 8 * source)).collect();
            if nth % 2 == 1 {
                sources[nth % count] = (0, at);
            }
            let pieces: Vec<Piece<'_>> =
                sources.iter().map(|(memory, at)| piece(&memories[*memory], *at as u64, len)).collect();
            let target = piece(&memories[0], at as u64, len);
            let ticket = reducer.compute(Nanos(0), computation, target, &pieces);
            let ticket = match ticket {
                Err(GpuError::Unsupported { what, reason, .. }) => {
                    println!("skipped: {what}: {reason}");
                    continue;
                }
                ticket => ticket.unwrap(),
            };
            wait(reducer, ticket);
            let spans: Vec<memory::Span<'_>> =
                sources.iter().map(|(memory, at)| bytes[*memory][*at..*at + len].into()).collect();
            let mut expected = bytes[0].clone();
            let target = memory::SpanMut::from(&mut expected[at..at + len]);
            match computation {
                Computation::Reduce(reduction) => reduction.apply(&[target], &spans),
                Computation::Scale { data_type, factor } => scale(data_type, target, spans[0], factor),
            }
            let got = bytes_of(&memories[0]);
            let size = data_type.size();
            for (n, (expected, got)) in expected.chunks(size).zip(got.chunks(size)).enumerate() {
                let chooses = matches!(computation, Computation::Reduce(of)
                    if matches!(of.op, ReduceOp::Min | ReduceOp::Max) && of.divide_by.is_none());
                let none = is_no_number(data_type, expected) && is_no_number(data_type, got);
                assert!(
                    expected == got
                        || none && (!chooses || quiet(data_type, expected) == quiet(data_type, got)),
                    "{computation:?} of {sources:?}, element {n}: {expected:x?} of the processor, {got:x?} of the device"
                );
            }
        }
    }
    copies_need_no_alignment(device, reducer);
    let memory = device.allocate(64).unwrap();
    let sum = Computation::Reduce(Reduction::new(DataType::F32, ReduceOp::Sum));
    let first = piece(&memory, 0, 16);
    let refused = reducer.compute(Nanos(0), sum, first, &[first; MAX_SOURCES + 1]).unwrap_err().to_string();
    assert_eq!(refused, format!("{}: a reduction of 9 sources: a device takes 8 at once", device.name()));
    let refused = reducer.compute(Nanos(0), sum, first, &[first, piece(&memory, 18, 16)]);
    assert_eq!(
        refused.unwrap_err().to_string(),
        format!(
            "{}: elements of 4 bytes begin at byte 18 of its memory: must be a multiple of 4",
            device.name()
        )
    );
}

fn copies_need_no_alignment(device: &dyn Device, reducer: &mut dyn Reducer) {
    let copy = Computation::Reduce(Reduction::new(DataType::U8, ReduceOp::Sum));
    let memory = filled(device, b"copies need no alignment");
    // One after the other, in place, and empty.
    let last = [(7, 0, 5), (15, 7, 5), (3, 3, 20), (24, 0, 0)].map(|(to, from, len)| {
        let [to, from] = [to, from].map(|at| piece(&memory, at, len));
        reducer.compute(Nanos(0), copy, to, &[from]).unwrap()
    })[3];
    wait(reducer, last);
    assert_eq!(bytes_of(&memory), b"copies copieno copiement");
}

/// Sets the quiet bit of NaNs, for the types whose NaNs may become quiet.
fn quiet(data_type: DataType, bits: &[u8]) -> Vec<u8> {
    let bit: u16 = match data_type {
        DataType::F16 => 0x0200,
        DataType::Bf16 => 0x0040,
        DataType::F8E5M2 => return vec![bits[0] | 0x02],
        _ => return bits.to_vec(),
    };
    (u16::from_ne_bytes(bits.try_into().unwrap()) | bit).to_ne_bytes().to_vec()
}

fn is_no_number(data_type: DataType, bits: &[u8]) -> bool {
    match data_type {
        DataType::F32 => f32::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::F64 => f64::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::F16 => half::f16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::Bf16 => half::bf16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        DataType::F8E4M3 => bits[0] & 0x7f == 0x7f,
        DataType::F8E5M2 => bits[0] & 0x7f > 0x7c,
        _ => false,
    }
}
