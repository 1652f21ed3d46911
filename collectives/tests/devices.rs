//! Device memory, memory on RNICs, and memory that others may write.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;
mod product;

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::Clock;
use ferroce::driver::gpu::Device;
use ferroce::driver::gpu::strict::{Strict, StrictDevice, Submission};
use ferroce::driver::reduction::reduce;
use ferroce::driver::rnic::Verbs;
use ferroce::{Memory, RnicPort};
use ferroce_collectives::flight::{Diagnosis, Finding, Recording, Why};
use ferroce_collectives::{
    Algorithm, Buffer, Collectives, Communicator, DataType, Model, Operation, Options, ReduceOp, Reduction,
    SharedMemory,
};
use ferroce_driver_test_support::file_gpu::FileGpu;
use ferroce_driver_test_support::gpu;
use ferroce_driver_test_support::rnic_stub::{INTEL, Stub};
use group::{
    LIMIT, check_sums, element, fill, join_again, options, run, run_on, run_ranks, run_with_gpus, sum,
};
use product::{check_all, room, small};

/// The tests' libibverbs acts as an RNIC, which has no slices.
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

/// The RNIC accesses the memory itself, without queues of the device; the device leaves reductions to the CPU.
#[test]
fn every_operation_over_a_card_in_memory_of_a_device() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    stub.set_vendor(INTEL);
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let open = |rank: u32| {
        let port = RnicPort::open_by(&verbs, ["stub0", "stub1"][rank as usize % 2], None, None).unwrap();
        let gpu: Arc<dyn Device> = Arc::new(FileGpu::default());
        (port.into(), Some(gpu).filter(|_| rank % 4 != 2))
    };
    for size in [2, 3] {
        run_ranks(size, small(), LIMIT, open, |mut ranks, all| {
            let buffer = ranks.allocate(room()).unwrap();
            check_all(&mut ranks, all, buffer, None, 0);
            ranks.finish().unwrap();
        });
    }
    assert!(stub.live_objects() == 0 && stub.dma_bufs().len() > 4);
}

/// Some ranks have a strict device, some of these with late copies, and other ranks have none.
fn strict(rank: u32) -> Option<Arc<dyn Device>> {
    let latest = Duration::from_micros(u64::from(rank) * 100);
    let device: Arc<dyn Device> = Strict::default().seed(rank.into()).latest(latest).open().unwrap();
    Some(device).filter(|_| rank % 4 != 3)
}

/// Slower paths are counted, with their reasons.
#[test]
fn fallbacks_are_among_the_metrics() {
    run_with_gpus(2, options(), LIMIT, strict, |mut ranks, all| {
        // Data arrives in device memory, and this buffer is host memory.
        let buffer = ranks.register(Memory::zeroed(800).unwrap()).unwrap();
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
    // A slower path that was requested is not counted.
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

/// The elements of a segment of the ring: segment lengths differ by at most one element, the longer ones first.
fn segment(index: usize, size: usize, count: usize) -> Range<usize> {
    let start = |index: usize| index * (count / size) + index.min(count % size);
    start(index)..start(index + 1)
}

/// In the order along the ring, on CPUs and devices alike; the arithmetic of each is tested elsewhere.
#[test]
fn each_type_and_operation_in_the_order_of_the_ring() {
    let body = |mut ranks: Collectives, all: Communicator| {
        let (rank, size) = (all.rank() as usize, all.size() as usize);
        let count = 9_001;
        for (number, (data_type, op)) in
            DataType::ALL.iter().flat_map(|of| ReduceOp::ALL.map(|op| (*of, op))).enumerate()
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
                    // Each rank reduces the received elements and its own.
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

/// A number of a type, whose sums may need rounding.
fn encode(data_type: DataType, value: i32) -> Vec<u8> {
    match data_type {
        DataType::F32 => (value as f32 * 1.1).to_ne_bytes().to_vec(),
        DataType::F64 => (f64::from(value) * 1.1).to_ne_bytes().to_vec(),
        DataType::I32 | DataType::U32 => (value * 5).to_ne_bytes().to_vec(),
        DataType::I64 | DataType::U64 => (i64::from(value) << 40).to_ne_bytes().to_vec(),
        DataType::I16 | DataType::U16 => (value as i16).to_ne_bytes().to_vec(),
        DataType::I8 | DataType::U8 => vec![value as u8],
        // Between 1 and 2, with all fraction bits in use.
        DataType::F16 => (0x3c00 | value as u16 & 0x3ff).to_ne_bytes().to_vec(),
        DataType::Bf16 => (0x3f80 | value as u16 & 0x7f).to_ne_bytes().to_vec(),
        DataType::F8E4M3 => vec![0x38 | value as u8 & 0x07],
        _ => vec![0x3c | value as u8 & 0x03],
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

/// The device computes all that it can: its memory is not read through the host.
#[test]
fn a_device_reduces_its_own_memory() {
    let device = Strict::default().open().unwrap();
    let own: Arc<dyn Device> = device.clone();
    let open = move |rank| (rank == 0).then(|| own.clone());
    run_with_gpus(2, options(), LIMIT, open, move |mut ranks, all| {
        let buffer = ranks.allocate(4 * 100_000).unwrap();
        let before = device.reductions();
        let operation = Operation::all_reduce(buffer, buffer, 100_000, DataType::F32, ReduceOp::Sum);
        ranks.run(all, &operation).unwrap();
        // Half of 400,000 bytes in chunks of 16 KiB.
        assert!(all.rank() != 0 || device.reductions() - before == 13);
        ranks.finish().unwrap();
    });
}

/// Every operation on memory of devices with late copies, in place or not, short and long, with every algorithm; no data is
/// copied through the host. Every fourth rank has no device.
#[test]
fn every_operation_on_memory_of_devices() {
    for size in [1, 2, 3, 4] {
        run_with_gpus(size, small(), LIMIT, strict, every_operation);
    }
}

#[test]
fn every_operation_on_memory_of_a_gpu() {
    if gpu::first().is_none() {
        return;
    }
    run_with_gpus(2, small(), LIMIT, found, every_operation);
    // Every other rank has host memory.
    run_with_gpus(3, small(), LIMIT, |rank| if rank % 2 == 1 { gpu::first() } else { None }, every_operation);
}

fn every_operation(mut ranks: Collectives, all: Communicator) {
    let buffer = ranks.allocate(room()).unwrap();
    check_all(&mut ranks, all, buffer, None, 0);
    let host = u128::from(all.rank() / 2) + 1;
    for (nth, algorithm) in Algorithm::ALL.into_iter().enumerate() {
        let is_hierarchical = algorithm == Algorithm::Hierarchical;
        if algorithm == Algorithm::Mapped || is_hierarchical && ![1, 4].contains(&all.size()) {
            continue;
        }
        let by_it = join_again(&mut ranks, all, &small().host(host).algorithm(algorithm), false).unwrap();
        check_all(&mut ranks, by_it, buffer, Some(algorithm), nth * 1000);
        ranks.leave(by_it).unwrap();
    }
    let metrics = ranks.context().metrics().to_string();
    assert!(!metrics.contains("reason=\"a device's memory"), "{metrics}");
    ranks.finish().unwrap();
}

/// Concurrent operations, which use the device and each peer in the order in which they were started.
#[test]
fn several_operations_are_under_way_on_a_device() {
    run_with_gpus(3, small(), LIMIT, strict, |mut ranks, all| {
        let count = 5000;
        let buffers: Vec<Buffer> = (0..6).map(|_| ranks.allocate(3 * 4 * count).unwrap()).collect();
        for round in 0..5_i32 {
            let mut requests = Vec::new();
            for (nth, buffer) in buffers.iter().enumerate() {
                let own = (round + nth as i32 + all.rank() as i32).to_ne_bytes().repeat(count);
                let at = u64::from(all.rank()) * 4 * count as u64;
                ranks.write(*buffer, if nth % 2 == 0 { 0 } else { at }, &own).unwrap();
                let operation = match nth % 2 {
                    0 => Operation::all_reduce(*buffer, *buffer, count, DataType::I32, Reduction::Average),
                    _ => Operation::all_gather(buffer.at(at), *buffer, count, DataType::I32),
                };
                requests.push(ranks.start(all, &operation).unwrap());
            }
            requests.into_iter().rev().for_each(|request| ranks.wait(request).unwrap());
            for (nth, buffer) in buffers.iter().enumerate() {
                let first = round + nth as i32;
                let due = match nth % 2 {
                    0 => (first + 1).to_ne_bytes().repeat(count),
                    _ => (0..3).flat_map(|rank| (first + rank).to_ne_bytes().repeat(count)).collect(),
                };
                let mut got = vec![0; due.len()];
                ranks.read(*buffer, 0, &mut got).unwrap();
                assert!(got == due, "rank {}, round {round}, operation {nth}", all.rank());
            }
        }
        ranks.finish().unwrap();
    });
}

/// One failed copy or computation of one rank's device ends the operation at every rank, with an error that names the rank.
#[test]
fn a_copy_that_fails_ends_the_operation_at_every_rank() {
    for (nth, (size, failing)) in [2, 3]
        .into_iter()
        .flat_map(|size| {
            [Submission::Gather, Submission::Scatter, Submission::Computation].map(|failing| (size, failing))
        })
        .enumerate()
    {
        let devices: Vec<Arc<StrictDevice>> =
            (0..size).map(|rank| Strict::default().seed(rank.into()).open().unwrap()).collect();
        let failing_rank = nth as u32 % size;
        let device = devices[failing_rank as usize].clone();
        let open = |rank: u32| Some(devices[rank as usize].clone() as Arc<dyn Device>);
        let start = Instant::now();
        let errors = run_with_gpus(size, options(), LIMIT, open, move |mut ranks, all| {
            let count = 100_000;
            let buffer = ranks.allocate(4 * count).unwrap();
            sum(&mut ranks, all, buffer, count, DataType::F32).unwrap();
            ranks.run(all, &Operation::barrier()).unwrap();
            if all.rank() == failing_rank {
                device.fail_next(failing);
            }
            let error = sum(&mut ranks, all, buffer, count, DataType::F32).unwrap_err().to_string();
            drop(ranks.finish());
            error
        });
        for (rank, error) in errors.iter().enumerate() {
            let name = format!("the device of rank {failing_rank} has failed: ");
            assert!(
                error.contains(&name),
                "{failing:?} of rank {failing_rank} of {size}, at {rank}: {error}"
            );
        }
        println!("{failing:?}, {size} ranks, {:?}: {errors:?}", start.elapsed());
    }
}

/// A device that is gone refuses each copy and computation. No rank is considered lost.
#[test]
fn a_device_that_is_lost_is_named_by_every_rank() {
    const COUNT: usize = 100_000;
    let whole = |buffer, _| Operation::all_reduce(buffer, buffer, COUNT, DataType::F32, ReduceOp::Sum);
    let short = |buffer, _| Operation::all_reduce(buffer, buffer, 8, DataType::F32, ReduceOp::Sum);
    let gather =
        |buffer: Buffer, _| Operation::all_gather(buffer, buffer.at(4 * COUNT as u64), COUNT, DataType::F32);
    let from_it = |buffer, _| Operation::broadcast(buffer, buffer, COUNT, DataType::F32, 1);
    let to_it = |buffer, _| Operation::broadcast(buffer, buffer, COUNT, DataType::F32, 0);
    type Make = fn(Buffer, u32) -> Operation;
    let operations: [(&str, Make); 5] = [
        ("all_reduce", whole),
        ("short", short),
        ("all_gather", gather),
        ("broadcast from it", from_it),
        ("broadcast to it", to_it),
    ];
    for (size, (what, operation)) in [2, 3].into_iter().flat_map(|size| operations.map(|of| (size, of))) {
        let devices: Vec<Arc<StrictDevice>> =
            (0..size).map(|rank| Strict::default().seed(rank.into()).open().unwrap()).collect();
        let lost = devices[1].clone();
        let open = |rank: u32| Some(devices[rank as usize].clone() as Arc<dyn Device>);
        let errors = run_with_gpus(size, options(), LIMIT, open, move |mut ranks, all| {
            let buffer = ranks.allocate(4 * COUNT * 4).unwrap();
            ranks.run(all, &operation(buffer, size)).unwrap();
            ranks.run(all, &Operation::barrier()).unwrap();
            if all.rank() == 1 {
                lost.lose();
            }
            let error = ranks.run(all, &operation(buffer, size)).err();
            // A rank that has sent all its data, such as a root, detects it later.
            let error = error.or_else(|| ranks.run(all, &Operation::barrier()).err());
            drop(ranks.finish());
            error.map(|error| error.to_string()).unwrap_or_default()
        });
        println!("{what}, {size} ranks: {errors:?}");
        for (rank, error) in errors.iter().enumerate() {
            let is_named = error.contains("the device of rank 1 has failed: ");
            assert!(is_named, "{what}, {size} ranks, at {rank}: {error}");
        }
    }
}

/// A computation that never ends is not reported as a lost rank.
#[test]
fn a_device_that_hangs_is_named_by_its_rank() {
    let devices: Vec<Arc<StrictDevice>> =
        (0..2).map(|rank| Strict::default().seed(rank).open().unwrap()).collect();
    let hanging = devices[0].clone();
    let open = |rank: u32| Some(devices[rank as usize].clone() as Arc<dyn Device>);
    let options = options().stall_timeout(Duration::from_secs(4));
    let outcomes = run_with_gpus(2, options, LIMIT, open, move |mut ranks, all| {
        let count = 100_000;
        let buffer = ranks.allocate(4 * count).unwrap();
        sum(&mut ranks, all, buffer, count, DataType::F32).unwrap();
        ranks.run(all, &Operation::barrier()).unwrap();
        if all.rank() == 0 {
            hanging.hang_next(Submission::Computation);
        }
        let sum = Operation::all_reduce(buffer, buffer, count, DataType::F32, ReduceOp::Sum);
        let request = ranks.start(all, &sum).unwrap();
        // The flight recorder reports it a second later, long before the operation fails.
        let (mut clock, start) = (Clock::start(), Instant::now());
        while start.elapsed() < Duration::from_millis(2000) {
            ranks.poll(clock.now()).unwrap();
            thread::yield_now();
        }
        let recording = ranks.flight_recorder().unwrap().read();
        let error = ranks.wait(request).unwrap_err();
        // Its device still uses the buffer.
        std::mem::forget(ranks);
        (error.to_string(), recording)
    });
    let recordings: Vec<Recording> = outcomes.iter().map(|(_, recording)| recording.clone()).collect();
    let found = &Diagnosis::all(&recordings)[0].findings;
    assert!(matches!(&found[..], [Finding::Hangs { rank: 0, why: Why::Device, .. }]), "{found:?}");
    for (rank, (outcome, _)) in outcomes.iter().enumerate() {
        let names = outcome
            .contains("the device of rank 0 has failed: none of its copies and reductions has ended for ");
        assert!(names, "rank {rank}: {outcome}");
    }
}

/// Polls until `ready` returns true.
fn poll_until(ranks: &mut Collectives, mut ready: impl FnMut() -> bool) {
    while !ready() {
        let now = ranks.now();
        ranks.poll(now).unwrap();
    }
}

/// Options with which ranks join without an operation, which takes long if copies are late.
fn measured() -> Options {
    options().model(Model::default()).shared_memory(SharedMemory::Off)
}

/// After a failed communicator was left or shrunk, its memory belongs to the program: the device writes nothing later.
fn check_that_nothing_is_written_afterwards(computes: bool) {
    const LATE: Duration = Duration::from_secs(2);
    for shrinks in [true, false] {
        let strict = Strict::default().seed(7);
        let device = match computes {
            // 160 ms per chunk.
            true => strict.speed(u64::MAX, 100_000),
            false => strict.latest(LATE),
        };
        let device = device.open().unwrap();
        let own: Arc<dyn Device> = device.clone();
        let open = move |rank| (rank == 1).then(|| own.clone());
        run_with_gpus(2, measured().algorithm(Algorithm::Ring), LIMIT, open, move |mut ranks, all| {
            let count = 200_000;
            let buffer = ranks.allocate(4 * count).unwrap();
            let operation = match computes {
                true => Operation::all_reduce(buffer, buffer, count, DataType::F32, ReduceOp::Sum),
                false => Operation::broadcast(buffer, buffer, count, DataType::F32, 0),
            };
            let request = ranks.start(all, &operation).unwrap();
            if all.rank() == 1 {
                poll_until(&mut ranks, || match computes {
                    true => device.reductions() >= 4,
                    false => device.copies().0 >= 8,
                });
                ranks.abort(all, "the user has thought better of it").unwrap();
            }
            ranks.wait(request).unwrap_err();
            let start = Instant::now();
            match shrinks {
                true => drop(ranks.shrink(all).unwrap()),
                false => drop(ranks.leave(all)),
            }
            assert!(start.elapsed() < 2 * LATE, "{:?}", start.elapsed());
            if all.rank() == 1 {
                ranks.write(buffer, 0, &vec![0xee; 4 * count]).unwrap();
                let end = Instant::now() + LATE;
                poll_until(&mut ranks, || Instant::now() > end);
                let mut bytes = vec![0; 4 * count];
                ranks.read(buffer, 0, &mut bytes).unwrap();
                let late = bytes.iter().filter(|byte| **byte != 0xee).count();
                assert_eq!(late, 0, "shrinks: {shrinks}, computes: {computes}");
                ranks.deregister(buffer).unwrap();
            }
            ranks.finish().unwrap();
        });
    }
}

#[test]
fn no_copy_lands_after_a_failed_communicator_was_left() {
    check_that_nothing_is_written_afterwards(false);
}

#[test]
fn nothing_is_computed_after_a_failed_communicator_was_left() {
    check_that_nothing_is_written_afterwards(true);
}

/// No rank has waited for the operation: it ends nevertheless, before the communicator does.
#[test]
fn a_communicator_is_left_while_its_device_computes() {
    let open = |_| Some(Strict::default().speed(u64::MAX, 400_000).open().unwrap() as Arc<dyn Device>);
    run_with_gpus(2, measured().algorithm(Algorithm::Direct), LIMIT, open, |mut ranks, all| {
        let count = 20_000;
        let buffer = ranks.allocate(4 * count).unwrap();
        ranks.write(buffer, 0, &1_i32.to_ne_bytes().repeat(count)).unwrap();
        let all_reduce = Operation::all_reduce(buffer, buffer, count, DataType::I32, ReduceOp::Sum);
        let _ = ranks.start(all, &all_reduce).unwrap();
        ranks.leave(all).unwrap();
        let mut sums = vec![0; 4 * count];
        ranks.read(buffer, 0, &mut sums).unwrap();
        assert!(sums == 2_i32.to_ne_bytes().repeat(count));
        ranks.deregister(buffer).unwrap();
        ranks.finish().unwrap();
    });
}

/// The device's queue is full of work of a failed communicator.
#[test]
fn a_communicator_continues_after_another_one_has_failed() {
    // 40 ms per chunk.
    let slow = |rank: u32| Strict::default().seed(rank.into()).depth(4).speed(u64::MAX, 400_000);
    let devices: Vec<Arc<StrictDevice>> = (0..2).map(|rank| slow(rank).open().unwrap()).collect();
    let open = |rank: u32| Some(devices[rank as usize].clone() as Arc<dyn Device>);
    let devices = devices.clone();
    run_with_gpus(2, measured(), LIMIT, open, move |mut ranks, all| {
        let other = ranks.subset(all, &[0, 1]).unwrap().unwrap();
        let (count, device) = (200_000, &devices[all.rank() as usize]);
        let buffer = ranks.allocate(4 * count).unwrap();
        let all_reduce = Operation::all_reduce(buffer, buffer, count, DataType::F32, ReduceOp::Sum);
        let request = ranks.start(all, &all_reduce).unwrap();
        if all.rank() == 0 {
            // More than the queue holds: each ended one is replaced.
            poll_until(&mut ranks, || device.reductions() >= 6);
            ranks.abort(all, "the user has thought better of it").unwrap();
        }
        ranks.wait(request).unwrap_err();
        let start = Instant::now();
        check_sums(&mut ranks, other, &[1000]);
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        ranks.leave(other).unwrap();
        drop(ranks.leave(all));
        ranks.deregister(buffer).unwrap();
        ranks.finish().unwrap();
    });
}

/// A device that completes nothing.
fn hanging() -> Arc<StrictDevice> {
    Strict::default().seed(7).latest(Duration::from_secs(1 << 30)).open().unwrap()
}

/// The hanging device is named in time.
#[test]
fn a_device_that_hangs_is_named_when_leaving() {
    let device = hanging();
    let own: Arc<dyn Device> = device.clone();
    let open = move |rank| (rank == 1).then(|| own.clone());
    run_with_gpus(2, measured(), LIMIT, open, move |mut ranks, all| {
        let buffer = ranks.allocate(400_000).unwrap();
        let request =
            ranks.start(all, &Operation::broadcast(buffer, buffer, 100_000, DataType::F32, 0)).unwrap();
        if all.rank() == 1 {
            poll_until(&mut ranks, || device.copies().0 >= 2);
            ranks.abort(all, "it takes too long").unwrap();
        }
        ranks.wait(request).unwrap_err();
        let start = Instant::now();
        let left = ranks.leave(all);
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        if all.rank() == 1 {
            let error = left.unwrap_err().to_string();
            assert!(error.starts_with("strict:7: ") && error.contains("not ended for 10s"), "{error}");
        }
    });
}

#[test]
fn a_device_that_hangs_during_measurement_is_named() {
    let open = |rank| (rank == 1).then(hanging).map(|device| device as Arc<dyn Device>);
    let options = measured().stall_timeout(Duration::from_secs(2));
    run_with_gpus(2, options, LIMIT, open, move |mut ranks, all| {
        if all.rank() == 0 {
            let end = Instant::now() + Duration::from_secs(1);
            poll_until(&mut ranks, || Instant::now() > end);
        }
        let error = ranks.measure(all).unwrap_err().to_string();
        assert!(error.contains("the device of rank 1 has failed"), "{error}");
    });
}
