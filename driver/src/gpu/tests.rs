//! What every device passes.

use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;
use crate::reduction::reduce;

pub(super) fn random(chance: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    chance.fill_bytes(&mut bytes);
    bytes
}

/// Memory of a device that holds these bytes.
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

/// Until the ticket has ended, within 10 s. These devices don't tell when they are to be asked.
pub(super) fn wait(queue: &mut (impl Tickets + ?Sized), ticket: Ticket) {
    let limit = Instant::now() + Duration::from_secs(10);
    while queue.done(Nanos(0)).unwrap() < ticket {
        assert!(Instant::now() < limit && queue.next_deadline(Nanos(5)) == Some(Nanos(5)));
    }
}

/// A copy that was told to have ended is there, in its order where one was asked for; a queue takes 64, and ends what is in it.
pub(super) fn copies_are_there_when_they_have_ended(device: &dyn Device) {
    let chance = &mut ChaCha8Rng::seed_from_u64(2);
    let len = 300_000;
    let (from, mut to) = (random(chance, len), device.allocate(len).unwrap());
    let mut source = device.allocate(len).unwrap();
    source.write(0, &from).unwrap();
    let staging = Staging::new(len).unwrap();
    let mut gathers = device.queue(&staging).unwrap();
    let mut scatters = device.queue(&staging).unwrap();
    // In two pieces, which change their places.
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
    // One that is to wait for others does, of either direction.
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
    // Nothing to copy ends too.
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
    assert!(full.to_string().contains("64 copies or reductions are under way"), "{full}");
    // What is under way ends with the queue.
    drop(scatters);
    assert!(!to.is_pinned());
    to.write(0, b"ours again").unwrap();
}

/// Whatever bits are in the memory; but of what is no number nobody promises the bits.
pub(super) fn reductions_are_those_of_the_processor(device: &dyn Device, reducer: &mut dyn Reducer) {
    let chance = &mut ChaCha8Rng::seed_from_u64(3);
    for data_type in DATA_TYPES {
        for op in ReduceOp::ALL {
            let (mut a, b, c) = (random(chance, 80_000), random(chance, 80_000), random(chance, 80_000));
            let [target, first, second] = [&a, &b, &c].map(|bytes| {
                let mut memory = device.allocate(bytes.len()).unwrap();
                memory.write(0, bytes).unwrap();
                memory
            });
            let last = [&first, &second].map(|source| {
                let (target, source) = (piece(&target, 16, 70_000), piece(source, 8, 70_000));
                reducer.reduce(Nanos(0), (data_type, op), target, source).unwrap()
            })[1];
            wait(reducer, last);
            for source in [b, c] {
                reduce(data_type, op, &mut a[16..70_016], &source[8..70_008]);
            }
            let size = data_type.size();
            let got = bytes_of(&target);
            for (n, (expected, got)) in a.chunks(size).zip(got.chunks(size)).enumerate() {
                let chooses = matches!(op, ReduceOp::Min | ReduceOp::Max);
                let none = is_no_number(data_type, expected) && is_no_number(data_type, got);
                assert!(
                    expected == got
                        || none && (!chooses || quiet(data_type, expected) == quiet(data_type, got)),
                    "{op} of {data_type}, element {n}: {expected:x?} of the processor, {got:x?} of the device"
                );
            }
        }
    }
    let memory = device.allocate(64).unwrap();
    for data_type in DataType::ALL.into_iter().filter(|data_type| !supports(*data_type)) {
        let (target, source) = (piece(&memory, 0, 16), piece(&memory, 16, 16));
        let refused = reducer.reduce(Nanos(0), (data_type, ReduceOp::Sum), target, source).unwrap_err();
        assert!(matches!(refused, GpuError::Unsupported { .. }), "{refused}");
    }
    let (target, source) = (piece(&memory, 0, 16), piece(&memory, 18, 16));
    let refused = reducer.reduce(Nanos(0), (DataType::F32, ReduceOp::Sum), target, source);
    assert_eq!(
        refused.unwrap_err().to_string(),
        format!(
            "{}: elements of 4 bytes begin at byte 18 of its memory: a multiple of 4 is needed",
            device.name()
        )
    );
}

/// With the bit that tells a quiet NaN, in the types whose NaNs may be made quiet.
fn quiet(data_type: DataType, bits: &[u8]) -> Vec<u8> {
    let bit: u16 = match data_type {
        DataType::F16 => 0x0200,
        DataType::Bf16 => 0x0040,
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
        _ => false,
    }
}
