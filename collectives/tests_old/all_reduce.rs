//! Ring all-reduce between threads over the loopback switch, checked against sums computed
//! another way.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::gpu::{DATA_TYPES, Device};
use ferroce::driver::rnic::Verbs;
use ferroce::{Counter, Memory, RnicPort, WcStatus};
use ferroce_collectives::{Communicator, DataType, Error, Options, ReduceOp, Schedule, reduce};
use ferroce_driver_test_support::gpu;
use ferroce_driver_test_support::rnic_stub::Stub;
use group::{element, fill, options, run, run_on, run_with_gpus};

const LIMIT: Duration = Duration::from_secs(120);

/// An element with this value, as it lies in memory.
type Encode = fn(i32) -> [u8; 4];

/// All-reduces `counts` one after the other, in both types, and checks every element, and those
/// behind the last.
fn check_sums(mut communicator: Communicator, counts: &[usize]) -> Communicator {
    let (rank, size) = (communicator.rank(), communicator.size());
    let longest = counts.iter().max().unwrap() + 1;
    let buffer = communicator.allocate(longest * 4).unwrap();
    for (call, &count) in counts.iter().enumerate() {
        let types: [(DataType, Encode); 2] =
            [(DataType::F32, |value| (value as f32).to_ne_bytes()), (DataType::I32, i32::to_ne_bytes)];
        for (data_type, encode) in types {
            fill(&mut communicator, buffer, (0..=count).map(|i| encode(element(rank, call, i)))).unwrap();
            communicator.all_reduce(buffer, count, data_type, ReduceOp::Sum).unwrap();
            let mut bytes = vec![0; (count + 1) * 4];
            communicator.read(buffer, 0, &mut bytes).unwrap();
            for (index, got) in bytes.as_chunks::<4>().0.iter().enumerate() {
                let expected = match index {
                    _ if index == count => element(rank, call, index),
                    _ => (0..size).map(|other| element(other, call, index)).sum(),
                };
                assert_eq!(
                    *got,
                    encode(expected),
                    "rank {rank} of {size}, {data_type}, element {index} of {count}"
                );
            }
        }
    }
    communicator.deregister(buffer).unwrap();
    communicator
}

#[test]
fn sums_of_every_size_for_every_number_of_ranks() {
    let counts = [0, 1, 2, 3, 7, 1000, 100_000, 1_000_000, 5, 0, 8192];
    for size in [1, 2, 3, 4, 5, 8] {
        let start = Instant::now();
        run(size, options(), None, LIMIT, move |communicator| {
            check_sums(communicator, &counts).finish().unwrap();
        });
        println!("{size} ranks: {:?}", start.elapsed());
    }
}

/// A rank that has returned may compute, or wait for something else, for as long as it likes.
#[test]
fn a_rank_that_has_returned_holds_up_nobody() {
    for size in [2, 3] {
        let all_returned = Arc::new(Barrier::new(size as usize));
        run(size, options(), None, Duration::from_secs(30), move |mut communicator| {
            let buffer = communicator.allocate(4 * 50_000).unwrap();
            for call in 0..100 {
                let count = [1, 1000, 50_000][call % 3];
                communicator.all_reduce(buffer, count, DataType::F32, ReduceOp::Sum).unwrap();
                // It polls nothing here.
                all_returned.wait();
            }
            communicator.finish().unwrap();
        });
    }
}

#[test]
fn sums_with_the_default_options() {
    run(4, Options::default(), None, LIMIT, |communicator| {
        let mut communicator = check_sums(communicator, &[1 << 20, 3, 25_557_032 / 16]);
        communicator.barrier().unwrap();
        communicator.finish().unwrap();
    });
}

/// The libibverbs of the tests in the place of a card, which refuses slices.
#[test]
fn sums_over_a_card() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let open =
        |rank| RnicPort::open_by(&verbs, ["stub0", "stub1"][rank as usize % 2], None, None).unwrap().into();
    for size in [2, 3, 4] {
        run_on(size, options(), LIMIT, open, |communicator| {
            let mut communicator = check_sums(communicator, &[0, 1, 2, 7, 1000, 100_000, 300_000]);
            let buffer = communicator.allocate(8).unwrap();
            let refused = communicator.bytes_mut(buffer).unwrap_err().to_string();
            assert!(refused.contains("an RNIC has no slices"), "{refused}");
            communicator.finish().unwrap();
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

fn found(_: u32) -> Option<Arc<dyn Device>> {
    gpu::first()
}

#[test]
fn sums_of_memory_of_devices() {
    for size in [1, 2, 3, 5] {
        run_with_gpus(size, options(), LIMIT, strict, |communicator| {
            check_sums(communicator, &[0, 1, 2, 7, 1000, 100_000, 300_000]).finish().unwrap();
        });
    }
    if gpu::first().is_some() {
        run_with_gpus(3, options(), LIMIT, found, |communicator| {
            check_sums(communicator, &[1, 7, 1000, 100_000]).finish().unwrap();
        });
    }
}

/// In the order along the ring, by processors and devices alike; what each makes of it is a matter of its own tests.
#[test]
fn each_type_and_operation_in_the_documented_order() {
    let body = |mut communicator: Communicator| {
        let (rank, size) = (communicator.rank() as usize, communicator.size() as usize);
        let count = 9_001;
        for (number, (data_type, op)) in
            DATA_TYPES.iter().flat_map(|of| ReduceOp::ALL.map(|op| (*of, op))).enumerate()
        {
            let width = data_type.size();
            let own = |rank: usize| -> Vec<u8> {
                (0..count).flat_map(|index| encode(data_type, element(rank as u32, number, index))).collect()
            };
            let buffer = communicator.allocate(count * width).unwrap();
            communicator.write(buffer, 0, &own(rank)).unwrap();
            communicator.all_reduce(buffer, count, data_type, op).unwrap();
            let mut got = vec![0; count * width];
            communicator.read(buffer, 0, &mut got).unwrap();
            communicator.deregister(buffer).unwrap();
            for segment in 0..size {
                let elements = Schedule::new(rank, size, count, 1).segment(segment);
                let bytes = elements.start * width..elements.end * width;
                let mut expected = own(segment)[bytes.clone()].to_vec();
                for next in 1..size {
                    // Each rank reduces what has come into its own.
                    let mut target = own((segment + next) % size)[bytes.clone()].to_vec();
                    reduce(data_type, op, &mut target, &expected);
                    expected = target;
                }
                assert!(got[bytes] == expected, "rank {rank}: {op} of {data_type}, segment {segment}");
            }
        }
        communicator.finish().unwrap();
    };
    run(3, options(), None, LIMIT, body);
    run_with_gpus(4, options(), LIMIT, strict, body);
    if gpu::first().is_some() {
        run_with_gpus(2, options(), LIMIT, found, body);
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

#[test]
fn a_device_that_fails_ends_the_call_on_every_rank() {
    let gpu = |rank: u32| -> Option<Arc<dyn Device>> {
        let strict = if rank == 1 { Strict::default().fails_one_in(20) } else { Strict::default() };
        Some(strict.seed(5).latest(Duration::from_millis(2)).open().unwrap())
    };
    let outcomes = run_with_gpus(3, options(), LIMIT, gpu, |mut communicator| {
        let buffer = communicator.allocate(4 << 20).unwrap();
        let calls = (0..50)
            .find_map(|_| communicator.all_reduce(buffer, 1 << 20, DataType::F32, ReduceOp::Sum).err());
        // Copies and reductions are under way, here or at others: everything comes back all the same.
        communicator.deregister(buffer).unwrap();
        communicator.finish().unwrap();
        calls.map(|error| error.to_string())
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        println!("rank {rank}: {outcome:?}");
        assert!(outcome.is_some());
    }
}

/// Memory that other threads may write has no slices either.
#[test]
fn sums_of_shared_memory() {
    run(3, options(), None, LIMIT, |mut communicator| {
        let memory = Memory::shared(40_000).unwrap();
        let (here, rank) = (memory.share().unwrap(), communicator.rank());
        let buffer = communicator.register(memory).unwrap();
        fill(&mut communicator, buffer, (0..10_000).map(|i| element(rank, 0, i).to_ne_bytes())).unwrap();
        communicator.all_reduce(buffer, 10_000, DataType::I32, ReduceOp::Sum).unwrap();
        let mut bytes = vec![0; 40_000];
        here.read(0, &mut bytes).unwrap();
        for (index, got) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let sum: i32 = (0..3).map(|rank| element(rank, 0, index)).sum();
            assert_eq!(i32::from_ne_bytes(*got), sum, "element {index}");
        }
        communicator.finish().unwrap();
    });
}

#[test]
fn the_smallest_chunks_and_the_fewest_slots() {
    let options = options().chunk_bytes(8).chunks_in_flight(2);
    run(3, options, None, LIMIT, |communicator| {
        check_sums(communicator, &[1, 2, 100, 5000]).finish().unwrap();
    });
}

#[test]
fn sums_survive_loss() {
    for (size, every) in [(2, 17), (4, 53)] {
        let options = options().ack_timeout(Duration::from_millis(16));
        let resent = run(size, options, Some(every), LIMIT, |communicator| {
            let communicator = check_sums(communicator, &[1, 7, 1000, 100_000, 300_000]);
            communicator.finish().unwrap().counters().value(Counter::RetransmittedPkts)
        });
        assert!(resent.iter().sum::<u64>() > 0, "nothing was lost: {resent:?}");
    }
}

/// The order of the additions is that of the documentation, so a reference can be bit-exact for
/// values that f32 rounds.
#[test]
fn f32_is_added_up_in_the_order_of_the_ring() {
    let (size, count) = (5_u32, 1003_usize);
    run(size, options(), None, LIMIT, move |mut communicator| {
        let value = |rank: u32, index: usize| (element(rank, 0, index) as f32).powi(3) * 1.1e-7;
        let buffer = communicator.allocate(count * 4).unwrap();
        let own = communicator.rank();
        fill(&mut communicator, buffer, (0..count).map(|i| value(own, i).to_ne_bytes())).unwrap();
        communicator.all_reduce(buffer, count, DataType::F32, ReduceOp::Sum).unwrap();
        let schedule = Schedule::new(0, size as usize, count, 1);
        let mut differs_from_plain_order = 0;
        for segment in 0..size {
            for index in schedule.segment(segment as usize) {
                let terms = (0..size).map(|k| value((segment + k) % size, index));
                let sum = terms.reduce(|sum, term| sum + term).unwrap();
                let bytes = communicator.bytes(buffer).unwrap();
                let got = f32::from_ne_bytes(bytes.as_chunks::<4>().0[index]);
                assert_eq!(got.to_bits(), sum.to_bits(), "element {index}");
                let plain: f32 = (0..size).map(|rank| value(rank, index)).sum();
                differs_from_plain_order += u32::from(plain != sum);
            }
        }
        assert!(differs_from_plain_order > 0, "these values tell no order from another");
        communicator.finish().unwrap();
    });
}

#[test]
fn a_call_allocates_nothing() {
    run(3, options(), None, LIMIT, |mut communicator| {
        let buffer = communicator.allocate(400_000).unwrap();
        // A port makes what it is woken by when it blocks for the first time: each rank waits for a late one before.
        for late in 0..3 {
            if communicator.rank() == late {
                std::thread::sleep(Duration::from_millis(300));
            }
            communicator.barrier().unwrap();
        }
        let mut call = || communicator.all_reduce(buffer, 100_000, DataType::F32, ReduceOp::Sum).unwrap();
        call();
        let measured = allocation_counter::measure(call);
        assert_eq!(measured.count_total, 0, "{measured:?}");
        communicator.finish().unwrap();
    });
}

#[test]
fn a_barrier_holds_back_the_early() {
    let size = 4;
    let times = run(size, options(), None, LIMIT, |mut communicator| {
        let delay = Duration::from_millis(40) * communicator.rank();
        std::thread::sleep(delay);
        let entered = Instant::now();
        communicator.barrier().unwrap();
        let left = Instant::now();
        communicator.finish().unwrap();
        (entered, left)
    });
    let last_entered = times.iter().map(|(entered, _)| *entered).max().unwrap();
    assert!(times.iter().all(|(_, left)| *left >= last_entered));
}

/// Whoever leaves early no longer answers, and its neighbour's last packets may need an answer.
#[test]
fn nobody_leaves_before_all_are_done() {
    let times = run(3, options(), None, LIMIT, |mut communicator| {
        communicator.barrier().unwrap();
        std::thread::sleep(Duration::from_millis(40) * communicator.rank());
        let done = Instant::now();
        communicator.finish().unwrap();
        (done, Instant::now())
    });
    let last_done = times.iter().map(|(done, _)| *done).max().unwrap();
    assert!(times.iter().all(|(_, left)| *left >= last_done));
}

#[test]
fn a_rank_that_goes_without_leave_is_named() {
    let outcomes = run(2, options(), None, LIMIT, |mut communicator| {
        communicator.barrier().unwrap();
        (communicator.rank() == 0).then(|| communicator.finish().map(drop).unwrap_err())
    });
    let message = outcomes[0].as_ref().unwrap().to_string();
    assert!(message.contains("rank 0, bootstrap connection with rank 1: it closed"), "{message}");
}

#[test]
fn too_large_a_count_is_refused_and_harmless() {
    run(2, options(), None, LIMIT, |mut communicator| {
        let buffer = communicator.allocate(10).unwrap();
        let refused = communicator.all_reduce(buffer, 3, DataType::I32, ReduceOp::Sum).unwrap_err();
        assert!(refused.to_string().contains("count = 3: at most 2 i32 in 10 bytes"), "{refused}");
        communicator.all_reduce(buffer, 2, DataType::I32, ReduceOp::Sum).unwrap();
        let memory = communicator.deregister(buffer).unwrap();
        assert_eq!(memory.len(), 10);
        assert!(communicator.bytes(buffer).is_err());
        communicator.finish().unwrap();
    });
}

/// What a rank got for a call, and how long it took.
type Outcome = (Option<Error>, Duration);

fn call(communicator: &mut Communicator, count: usize, data_type: DataType) -> Outcome {
    let buffer = communicator.allocate(1 << 20).unwrap();
    let start = Instant::now();
    let result = communicator.all_reduce(buffer, count, data_type, ReduceOp::Sum);
    (result.err(), start.elapsed())
}

#[test]
fn the_death_of_a_rank_reaches_all_in_time() {
    let options = options().ack_timeout(Duration::from_millis(260)).retry_count(2);
    let outcomes = run(5, options, None, LIMIT, |mut communicator| {
        let first = call(&mut communicator, 1000, DataType::F32);
        assert!(first.0.is_none(), "{first:?}");
        if communicator.rank() == 2 {
            return None;
        }
        let outcome = call(&mut communicator, 200_000, DataType::F32);
        let buffer = communicator.allocate(4).unwrap();
        let later = communicator.all_reduce(buffer, 1, DataType::F32, ReduceOp::Sum);
        assert!(matches!(later, Err(Error::Failed { .. })), "{later:?}");
        Some(outcome)
    });
    for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let (error, took) = outcome.as_ref().unwrap();
        let names_the_dead = match error {
            Some(Error::Neighbour { peer: 2, status: WcStatus::RetryExcErr, .. }) => rank == 1 || rank == 3,
            Some(Error::Aborted { origin: 2, .. }) => true,
            _ => false,
        };
        assert!(names_the_dead, "rank {rank}: {error:?}");
        assert!(*took < options.retry_budget() + Duration::from_secs(10), "rank {rank}: {took:?}");
    }
}

/// The dead rank has acknowledged everything; only a probe finds out.
#[test]
fn a_rank_that_only_waits_notices_a_death_too() {
    let options = options().ack_timeout(Duration::from_millis(260)).retry_count(2);
    let outcomes = run(2, options, None, LIMIT, |mut communicator| {
        if communicator.rank() == 1 {
            let end = Instant::now() + Duration::from_millis(500);
            while Instant::now() < end {
                communicator.progress().unwrap();
            }
            return None;
        }
        Some(call(&mut communicator, 10, DataType::F32))
    });
    let (error, took) = outcomes[0].as_ref().unwrap();
    assert!(matches!(error, Some(Error::Neighbour { rank: 0, peer: 1, .. })), "{error:?}");
    assert!(*took < options.retry_budget() + Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_rank_that_lives_and_does_not_call_stalls_the_others() {
    let options = options().stall_timeout(Duration::from_millis(600));
    let outcomes = run(2, options, None, LIMIT, |mut communicator| {
        if communicator.rank() == 0 {
            return call(&mut communicator, 10, DataType::F32).0;
        }
        loop {
            if let Err(error) = communicator.progress() {
                return Some(error);
            }
            std::thread::yield_now();
        }
    });
    assert!(matches!(outcomes[0], Some(Error::Stalled { rank: 0, received: 0, .. })), "{outcomes:?}");
    assert!(matches!(outcomes[1], Some(Error::Aborted { rank: 1, origin: 0, .. })), "{outcomes:?}");
}

#[test]
fn different_calls_are_told_apart() {
    let wrong: [(usize, DataType); 3] =
        [(1001, DataType::F32), (1000, DataType::I32), (200_000, DataType::F32)];
    for (count, data_type) in wrong {
        let outcomes = run(4, options(), None, LIMIT, move |mut communicator| match communicator.rank() {
            1 => call(&mut communicator, count, data_type),
            _ => call(&mut communicator, 1000, DataType::F32),
        });
        let (mut mismatches, mut aborts) = (0, 0);
        for (rank, (error, took)) in outcomes.iter().enumerate() {
            match error {
                Some(Error::Mismatch { .. }) => mismatches += 1,
                Some(Error::Aborted { .. }) => aborts += 1,
                other => panic!("rank {rank}: {other:?}"),
            }
            assert!(*took < Duration::from_secs(10), "rank {rank}: {took:?}");
        }
        assert!(mismatches >= 1 && mismatches + aborts == 4, "{outcomes:?}");
    }
}
