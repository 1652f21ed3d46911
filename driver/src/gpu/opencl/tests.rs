use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;
use crate::gpu::{Ticket, Tickets};
use crate::memory::Piece;
use crate::reduction::{ReduceOp, reduce};
use crate::{MemoryKind, Nanos};

/// As `ferroce_driver_test_support::opencl::first`, which has the types of another instance of this crate.
fn first() -> Option<Arc<OpenCl>> {
    match open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "CI tests everything: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

fn random(chance: &mut ChaCha8Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    chance.fill_bytes(&mut bytes);
    bytes
}

fn bytes_of(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

fn piece(memory: &Memory, offset: u64, len: usize) -> Piece<'_> {
    memory.piece(offset, len).unwrap()
}

/// Until the ticket has ended, within 10 s.
fn wait(queue: &mut (impl Tickets + ?Sized), ticket: Ticket) {
    let limit = Instant::now() + Duration::from_secs(10);
    while queue.done(Nanos(0)).unwrap() < ticket {
        assert!(Instant::now() < limit && queue.next_deadline(Nanos(5)) == Some(Nanos(5)));
    }
}

#[test]
fn devices_are_listed_and_opened_by_their_number() {
    let Some(device) = first() else { return };
    let listed = devices().unwrap();
    assert!(listed.iter().map(|found| found.index).eq(0..listed.len()));
    assert!(!listed[0].name.is_empty() && !listed[0].platform.is_empty() && listed[0].memory > 1 << 20);
    assert_eq!(Device::name(&*device), "opencl:0");
    let refused = open(listed.len()).unwrap_err().to_string();
    assert_eq!(refused, format!("opencl:{0}: there are {0} devices of OpenCL, counted from 0", listed.len()));
}

#[test]
fn memory_is_zeroed_written_and_read() {
    let Some(device) = first() else { return };
    let mut memory = device.allocate(100_000).unwrap();
    assert_eq!((memory.kind(), bytes_of(&memory)), (MemoryKind::Device, vec![0; 100_000]));
    let bytes = random(&mut ChaCha8Rng::seed_from_u64(1), 5000);
    memory.write(77, &bytes).unwrap();
    assert_eq!(bytes_of(&memory)[77..5077], bytes);
    assert!(memory.span(0, 1).is_none() && memory.write(99_999, &[0; 2]).is_err());
    let refused = memory.export().unwrap_err().to_string();
    assert!(refused.contains("OpenCL exports none"), "{refused}");
    assert_eq!(device.allocate(0).unwrap().len(), 0);
}

#[test]
fn copies_are_there_when_they_have_ended() {
    let Some(device) = first() else { return };
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
    let ticket = scatters.scatter(Nanos(0), 0, &[piece(&to, 0, len)], Ticket::NONE).unwrap();
    wait(&mut *scatters, ticket);
    assert!(bytes_of(&to) == turned);
    // One that is to wait for others does.
    for round in 0..100_u8 {
        staging.write(0, &[round; 64 << 10]);
        staging.write(128 << 10, &[100 + round; 100]);
        let first = scatters.scatter(Nanos(0), 0, &[piece(&to, 0, 64 << 10)], Ticket::NONE).unwrap();
        let last = scatters.scatter(Nanos(0), 128 << 10, &[piece(&to, 500, 100)], first).unwrap();
        wait(&mut *scatters, last);
        assert_eq!(bytes_of(&to)[500..600], [100 + round; 100]);
    }
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
}

/// Whatever bits are in the memory; but of what is no number nobody promises the bits.
#[test]
fn reductions_are_those_of_the_processor() {
    let Some(device) = first() else { return };
    let chance = &mut ChaCha8Rng::seed_from_u64(3);
    let mut reducer = device.reducer().unwrap();
    for data_type in DataType::ALL {
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
            wait(&mut *reducer, last);
            for source in [b, c] {
                reduce(data_type, op, &mut a[16..70_016], &source[8..70_008]);
            }
            let size = data_type.size();
            let got = bytes_of(&target);
            for (n, (expected, got)) in a.chunks(size).zip(got.chunks(size)).enumerate() {
                let chooses = matches!(op, ReduceOp::Min | ReduceOp::Max);
                let none = is_no_number(data_type, expected) && is_no_number(data_type, got);
                assert!(
                    expected == got || none && !chooses,
                    "{op} of {data_type}, element {n}: {expected:x?} of the processor, {got:x?} of the device"
                );
            }
        }
    }
    let memory = device.allocate(64).unwrap();
    let refused = reducer.reduce(
        Nanos(0),
        (DataType::F32, ReduceOp::Sum),
        piece(&memory, 0, 16),
        piece(&memory, 18, 16),
    );
    assert_eq!(
        refused.unwrap_err().to_string(),
        "opencl:0: elements of 4 bytes begin at byte 18 of its memory: a multiple of 4 is needed"
    );
}

fn is_no_number(data_type: DataType, bits: &[u8]) -> bool {
    match (data_type, bits) {
        (DataType::F32, [.., _, _]) => f32::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        (DataType::F64, _) => f64::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        (DataType::F16, _) => half::f16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        (DataType::Bf16, _) => half::bf16::from_ne_bytes(bits.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

#[test]
fn buffers_of_a_programs_own_context_are_imported() {
    let Some(theirs) = first() else { return };
    // SAFETY: a context, and a device of it.
    let ours = unsafe { OpenCl::of_context("tensors", theirs.context(), theirs.id()) }.unwrap();
    let mut tensor = theirs.allocate(1000).unwrap();
    tensor.write(0, &[7; 1000]).unwrap();
    let buffer = OpenCl::buffer(&tensor).unwrap();
    // SAFETY: a buffer.
    let mut imported = unsafe { ours.import(buffer) }.unwrap();
    assert_eq!((imported.len(), bytes_of(&imported)), (1000, vec![7; 1000]));
    imported.write(10, b"written").unwrap();
    assert_eq!(&bytes_of(&tensor)[10..17], b"written");
    // Whoever is last keeps it.
    drop(tensor);
    assert_eq!(&bytes_of(&imported)[10..17], b"written");
    // One of another context is refused.
    let other = first().unwrap();
    // SAFETY: a buffer.
    let refused = unsafe { other.import(OpenCl::buffer(&imported).unwrap()) }.unwrap_err().to_string();
    assert!(refused.contains("a buffer of another context"), "{refused}");
    assert_eq!(OpenCl::buffer(&Memory::zeroed(8).unwrap()), None);
}
