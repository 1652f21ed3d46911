//! Memory of devices, of cards, and memory that others may write.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::gpu::{DATA_TYPES, Device};
use ferroce::driver::reduction::reduce;
use ferroce::driver::rnic::Verbs;
use ferroce::{Memory, RnicPort};
use ferroce_collectives::{
    Algorithm, Collectives, Communicator, DataType, Operation, ReduceOp, Reduction, SharedMemory,
};
use ferroce_driver_test_support::gpu;
use ferroce_driver_test_support::rnic_stub::Stub;
use group::{LIMIT, check_sums, element, fill, options, run, run_on, run_with_gpus, sum};

/// The libibverbs of the tests in the place of a card, which refuses slices.
#[test]
fn sums_over_a_card() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let open =
        |rank| RnicPort::open_by(&verbs, ["stub0", "stub1"][rank as usize % 2], None, None).unwrap().into();
    for size in [2, 3, 4] {
        run_on(size, options(), LIMIT, open, |mut ranks, all| {
            check_sums(&mut ranks, all, &[0, 1, 2, 7, 1000, 100_000, 300_000]);
            let buffer = ranks.allocate(8).unwrap();
            let refused = ranks.bytes_mut(buffer).unwrap_err().to_string();
            assert!(refused.contains("an RNIC has no slices"), "{refused}");
            ranks.finish().unwrap();
        });
    }
    assert_eq!(stub.live_objects(), 0);
}

/// Ranks whose device is strict, some late, and ranks without one.
fn strict(rank: u32) -> Option<Arc<dyn Device>> {
    let latest = Duration::from_micros(u64::from(rank) * 100);
    let device: Arc<dyn Device> = Strict::default().seed(rank.into()).latest(latest).open().unwrap();
    Some(device).filter(|_| rank % 4 != 3)
}

/// What goes a slower way than it might is counted, with its reason.
#[test]
fn fallbacks_are_among_the_metrics() {
    run_with_gpus(2, options(), LIMIT, strict, |mut ranks, all| {
        let buffer = ranks.allocate(800).unwrap();
        let average = Operation::all_reduce(buffer, buffer, 100, DataType::F32, Reduction::Average);
        ranks.run(all, &average).unwrap();
        let metrics = ranks.context().metrics().to_string();
        let has = |reason: &str| {
            metrics
                .lines()
                .any(|line| line.starts_with("ferroce_collective_fallbacks_total{") && line.contains(reason))
        };
        assert!(has("reason=\"a rank has no memory to share\""), "{metrics}");
        assert!(has("reason=\"a device's memory is reduced by the CPU\""), "{metrics}");
        ranks.finish().unwrap();
    });
    // Nothing is one where it was asked for.
    run(2, options().shared_memory(SharedMemory::Off), None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(800).unwrap();
        sum(&mut ranks, all, buffer, 100, DataType::F32).unwrap();
        assert!(!ranks.context().metrics().to_string().contains("collective_fallbacks"));
        ranks.finish().unwrap();
    });
}

fn found(_: u32) -> Option<Arc<dyn Device>> {
    gpu::first()
}

#[test]
fn sums_of_memory_of_devices() {
    for size in [1, 2, 3, 5] {
        run_with_gpus(size, options(), LIMIT, strict, |mut ranks, all| {
            check_sums(&mut ranks, all, &[0, 1, 2, 7, 1000, 100_000, 300_000]);
            ranks.finish().unwrap();
        });
    }
    if gpu::first().is_some() {
        run_with_gpus(3, options(), LIMIT, found, |mut ranks, all| {
            check_sums(&mut ranks, all, &[1, 7, 1000, 100_000]);
            ranks.finish().unwrap();
        });
    }
}

/// The elements of a segment of the ring: segments differ by one element at most, the longer ones first.
fn segment(index: usize, size: usize, count: usize) -> Range<usize> {
    let start = |index: usize| index * (count / size) + index.min(count % size);
    start(index)..start(index + 1)
}

/// In the order along the ring, by processors and devices alike; what each makes of it is a matter of its own tests.
#[test]
fn each_type_and_operation_in_the_order_of_the_ring() {
    let body = |mut ranks: Collectives, all: Communicator| {
        let (rank, size) = (all.rank() as usize, all.size() as usize);
        let count = 9_001;
        for (number, (data_type, op)) in
            DATA_TYPES.iter().flat_map(|of| ReduceOp::ALL.map(|op| (*of, op))).enumerate()
        {
            let width = data_type.size();
            let own = |rank: usize| -> Vec<u8> {
                (0..count).flat_map(|index| encode(data_type, element(rank as u32, number, index))).collect()
            };
            let buffer = ranks.allocate(count * width).unwrap();
            ranks.write(buffer, 0, &own(rank)).unwrap();
            ranks.run(all, &Operation::all_reduce(buffer, buffer, count, data_type, op)).unwrap();
            let mut got = vec![0; count * width];
            ranks.read(buffer, 0, &mut got).unwrap();
            ranks.deregister(buffer).unwrap();
            for first in 0..size {
                let elements = segment(first, size, count);
                let bytes = elements.start * width..elements.end * width;
                let mut expected = own(first)[bytes.clone()].to_vec();
                for next in 1..size {
                    // Each rank reduces what has come and its own.
                    reduce(data_type, op, &mut expected, &own((first + next) % size)[bytes.clone()]);
                }
                assert!(got[bytes] == expected, "rank {rank}: {op} of {data_type}, segment {first}");
            }
        }
        ranks.finish().unwrap();
    };
    let options = options().algorithm(Algorithm::Ring);
    run(3, options, None, LIMIT, body);
    run_with_gpus(4, options, LIMIT, strict, body);
    if gpu::first().is_some() {
        run_with_gpus(2, options, LIMIT, found, body);
    }
}

/// A number of one of [`DATA_TYPES`], which rounding may change.
fn encode(data_type: DataType, value: i32) -> Vec<u8> {
    match data_type {
        DataType::F32 => (value as f32 * 1.1).to_ne_bytes().to_vec(),
        DataType::F64 => (f64::from(value) * 1.1).to_ne_bytes().to_vec(),
        DataType::I32 => (value * 5).to_ne_bytes().to_vec(),
        DataType::I64 => (i64::from(value) << 40).to_ne_bytes().to_vec(),
        // Between 1 and 2, with all bits of their fractions.
        DataType::F16 => (0x3c00 | value as u16 & 0x3ff).to_ne_bytes().to_vec(),
        _ => (0x3f80 | value as u16 & 0x7f).to_ne_bytes().to_vec(),
    }
}

/// Memory that other threads may write has no slices either.
#[test]
fn sums_of_shared_memory() {
    run(3, options(), None, LIMIT, |mut ranks, all| {
        let memory = Memory::shared(40_000).unwrap();
        let (here, rank) = (memory.share().unwrap(), all.rank());
        let buffer = ranks.register(memory).unwrap();
        fill(&mut ranks, buffer, (0..10_000).map(|i| element(rank, 0, i).to_ne_bytes()));
        sum(&mut ranks, all, buffer, 10_000, DataType::I32).unwrap();
        let mut bytes = vec![0; 40_000];
        here.read(0, &mut bytes).unwrap();
        for (index, got) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let sum: i32 = (0..3).map(|rank| element(rank, 0, index)).sum();
            assert_eq!(i32::from_ne_bytes(*got), sum, "element {index}");
        }
        ranks.finish().unwrap();
    });
}

/// What the device can do it does: its memory is not read by way of the host.
#[test]
fn a_device_reduces_its_own_memory() {
    let device = Strict::default().open().unwrap();
    let own: Arc<dyn Device> = device.clone();
    let open = move |rank| (rank == 0).then(|| own.clone());
    run_with_gpus(2, options(), LIMIT, open, |mut ranks, all| {
        let buffer = ranks.allocate(4 * 100_000).unwrap();
        let operation = Operation::all_reduce(buffer, buffer, 100_000, DataType::F32, ReduceOp::Sum);
        ranks.run(all, &operation).unwrap();
        ranks.finish().unwrap();
    });
    // Half of 400,000 bytes in chunks of 16 KiB.
    assert_eq!(device.reductions(), 13);
}
