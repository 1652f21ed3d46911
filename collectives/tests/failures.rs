//! Failures of a communicator: a rank dies, calls another operation, or calls none.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::gpu::Device as Gpu;
use ferroce::driver::gpu::strict::{Strict, Submission};
use ferroce::driver::loopback::{Switch, SwitchConfig};
use ferroce::driver::{self, Clock, Error as DriverError, FilteredSource, FrameSink, FrameSource, Sent};
use ferroce::{Nanos, PacketDriver};
use ferroce_collectives::{
    Cause, Collectives, Communicator, DataType, Error, Operation, Options, ReduceOp, Reduction, SharedMemory,
};
use group::{LIMIT, join_again, options, run, run_on, run_with_gpus, sum};

/// The result of a call, and its duration.
type Outcome = (Option<Error>, Duration);

fn call(ranks: &mut Collectives, all: Communicator, count: usize, data_type: DataType) -> Outcome {
    let buffer = ranks.allocate(1 << 20).unwrap();
    let start = Instant::now();
    let result = sum(ranks, all, buffer, count, data_type);
    (result.err(), start.elapsed())
}

fn cause(error: &Option<Error>) -> Option<&Cause> {
    match error {
        Some(Error::Failed { cause, .. }) => Some(cause),
        _ => None,
    }
}

/// Answers others for this time, without a call.
fn poll_for(ranks: &mut Collectives, time: Duration) {
    let (mut clock, end) = (Clock::start(), Instant::now() + time);
    while Instant::now() < end {
        ranks.poll(clock.now()).unwrap();
        thread::yield_now();
    }
}

fn impatient() -> Options {
    options().ack_timeout(Duration::from_millis(260)).retry_count(2)
}

#[test]
fn the_death_of_a_rank_reaches_all_in_time() {
    let outcomes = run(5, impatient(), None, LIMIT, |mut ranks, all| {
        let first = call(&mut ranks, all, 1000, DataType::F32);
        assert!(first.0.is_none(), "{first:?}");
        if all.rank() == 2 {
            return None;
        }
        let outcome = call(&mut ranks, all, 200_000, DataType::F32);
        let buffer = ranks.allocate(4).unwrap();
        let later = sum(&mut ranks, all, buffer, 1, DataType::F32);
        assert!(matches!(later, Err(Error::Failed { .. })), "{later:?}");
        ranks.finish().unwrap();
        Some(outcome)
    });
    for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != 2) {
        let (error, took) = outcome.as_ref().unwrap();
        assert_eq!(cause(error).and_then(Cause::lost), Some(2), "rank {rank}: {error:?}");
        assert!(*took < impatient().retry_budget() + Duration::from_secs(10), "rank {rank}: {took:?}");
    }
}

/// The dead rank has acknowledged everything; only a ping detects its death.
#[test]
fn a_rank_that_only_waits_notices_a_death_too() {
    let outcomes = run(2, impatient(), None, LIMIT, |mut ranks, all| {
        if all.rank() == 1 {
            poll_for(&mut ranks, Duration::from_millis(500));
            return None;
        }
        Some(call(&mut ranks, all, 10, DataType::F32))
    });
    let (error, took) = outcomes[0].as_ref().unwrap();
    assert!(matches!(cause(error), Some(Cause::Lost { peer: 1, .. })), "{error:?}");
    assert!(*took < impatient().retry_budget() + Duration::from_secs(10), "{took:?}");
}

/// The same if the receiver of a message waits, which never sends anything.
#[test]
fn a_receiver_notices_the_death_of_the_sender() {
    let outcomes = run(2, impatient(), None, LIMIT, |mut ranks, all| {
        ranks.run(all, &Operation::barrier()).unwrap();
        if all.rank() == 1 {
            poll_for(&mut ranks, Duration::from_millis(300));
            return None;
        }
        let buffer = ranks.allocate(1 << 20).unwrap();
        ranks.run(all, &Operation::receive(buffer, 1 << 18, DataType::F32, 1)).err()
    });
    assert_eq!(cause(&outcomes[0]).and_then(Cause::lost), Some(1), "{outcomes:?}");
}

#[test]
fn a_live_rank_that_does_not_call_stalls_the_others() {
    let options = options().stall_timeout(Duration::from_millis(600));
    let outcomes = run(3, options, None, LIMIT, |mut ranks, all| {
        if all.rank() != 1 {
            return call(&mut ranks, all, 10, DataType::F32).0;
        }
        poll_for(&mut ranks, Duration::from_secs(3));
        // It was notified meanwhile.
        ranks.start(all, &Operation::barrier()).err()
    });
    for rank in [0, 2] {
        match cause(&outcomes[rank]) {
            Some(Cause::Stalled { waits_for, .. }) => {
                assert!(waits_for.contains("rank 1, which has made 0 calls"), "{waits_for}");
            }
            Some(Cause::Aborted { origin, .. }) => assert_eq!(*origin as usize, 2 - rank),
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    assert!(matches!(cause(&outcomes[1]), Some(Cause::Aborted { origin: 0 | 2, .. })), "{outcomes:?}");
}

#[test]
fn different_calls_are_detected() {
    use DataType::{F32, I32};
    type Call = fn(ferroce_collectives::Buffer) -> Operation;
    let calls: [(u32, Call, Call); 9] = [
        (
            4,
            |b| Operation::all_reduce(b, b, 1000, F32, ReduceOp::Sum),
            |b| Operation::all_reduce(b, b, 1001, F32, ReduceOp::Sum),
        ),
        (
            4,
            |b| Operation::all_reduce(b, b, 1000, F32, ReduceOp::Sum),
            |b| Operation::all_reduce(b, b, 1000, I32, ReduceOp::Sum),
        ),
        (
            4,
            |b| Operation::all_reduce(b, b, 1000, F32, ReduceOp::Sum),
            |b| Operation::all_reduce(b, b, 200_000, F32, ReduceOp::Sum),
        ),
        (
            4,
            |b| Operation::all_reduce(b, b, 200_000, F32, ReduceOp::Sum),
            |b| Operation::all_reduce(b, b, 200_000, F32, Reduction::Average),
        ),
        (2, |b| Operation::all_reduce(b, b, 0, F32, ReduceOp::Sum), |_| Operation::barrier()),
        (3, |b| Operation::broadcast(b, b, 100_000, F32, 0), |b| Operation::broadcast(b, b, 100_000, F32, 1)),
        (
            3,
            |b| Operation::reduce(b, b, 10, F32, ReduceOp::Max, 0),
            |b| Operation::broadcast(b, b, 10, F32, 0),
        ),
        (
            2,
            |b| Operation::all_gather(b, b.at(800), 100, F32),
            |b| Operation::all_gather(b, b.at(800), 101, F32),
        ),
        (
            2,
            |b| Operation::all_gather(b, b.at(80_000), 10_000, F32),
            |b| Operation::all_gather(b, b.at(80_000), 10_001, F32),
        ),
    ];
    for (number, (size, right, wrong)) in calls.into_iter().enumerate() {
        let outcomes = run(size, options(), None, LIMIT, move |mut ranks, all| {
            let buffer = ranks.allocate(1 << 20).unwrap();
            let operation = if all.rank() == 1 { wrong(buffer) } else { right(buffer) };
            let start = Instant::now();
            let mut result = ranks.run(all, &operation);
            if result.is_ok() {
                // A rank that only sends may have completed already.
                result = ranks.run(all, &Operation::barrier());
            }
            (result.err(), start.elapsed())
        });
        let (mut mismatches, mut aborts) = (0, 0);
        for (rank, (error, took)) in outcomes.iter().enumerate() {
            match cause(error) {
                Some(Cause::Mismatch { .. }) => mismatches += 1,
                Some(Cause::Aborted { .. }) => aborts += 1,
                _ => panic!("calls {number}, rank {rank}: {outcomes:?}"),
            }
            assert!(*took < Duration::from_secs(10), "calls {number}, rank {rank}: {took:?}");
        }
        assert!(mismatches >= 1 && mismatches + aborts == size, "calls {number}: {outcomes:?}");
    }
}

/// Each of two ranks considers itself the root: both complete immediately, and detect the mismatch as soon as they poll.
#[test]
fn different_roots_are_detected_without_another_call() {
    for size in [2, 3] {
        let all_know = Arc::new(std::sync::Barrier::new(size as usize));
        run(size, options().shared_memory(SharedMemory::Off), None, LIMIT, move |mut ranks, all| {
            let buffer = ranks.allocate(40).unwrap();
            let root = u32::from(all.rank() == 1);
            let first = ranks.run(all, &Operation::broadcast(buffer, buffer, 10, DataType::F32, root));
            poll_for(&mut ranks, Duration::from_millis(200));
            all_know.wait();
            // No other rank makes a call now.
            let next = ranks.start(all, &Operation::broadcast(buffer, buffer, 10, DataType::F32, all.rank()));
            let error = first.and(next.map(drop)).unwrap_err();
            let Error::Failed { cause, .. } = &error else { panic!("{error}") };
            assert!(matches!(cause, Cause::Mismatch { .. } | Cause::Aborted { .. }), "{error}");
            let told = error.to_string();
            assert!(told.contains("root 0") && told.contains("root 1"), "{told}");
        });
    }
}

/// For two long messages the receiver's grant shows it, for a short one the sender's header; if the sender waits for a
/// grant and the receiver for a short message, they ping.
#[test]
fn messages_of_different_lengths_are_detected() {
    for (sent, received) in [(10, 11), (100_000, 100), (100, 100_000), (100_000, 100_001)] {
        let outcomes = run(2, options(), None, LIMIT, move |mut ranks, all| {
            let buffer = ranks.allocate(1 << 20).unwrap();
            let operation = match all.rank() {
                0 => Operation::send(buffer, sent, DataType::F32, 1),
                _ => Operation::receive(buffer, received, DataType::F32, 0),
            };
            let result = ranks.run(all, &operation);
            result.and_then(|()| ranks.run(all, &Operation::barrier())).err()
        });
        let causes: Vec<_> = outcomes.iter().map(cause).collect();
        assert!(causes.iter().any(|cause| matches!(cause, Some(Cause::Mismatch { .. }))), "{outcomes:?}");
        assert!(causes.iter().all(Option::is_some), "{outcomes:?}");
    }
}

#[test]
fn a_rank_that_ends_without_leave_is_named() {
    let outcomes = run(2, impatient(), None, LIMIT, |mut ranks, all| {
        ranks.run(all, &Operation::barrier()).unwrap();
        (all.rank() == 0).then(|| ranks.finish().map(drop).unwrap_err())
    });
    assert_eq!(cause(&outcomes[0]).and_then(Cause::lost), Some(1), "{outcomes:?}");
}

/// A rank that computes longer than the stall timeout without polling has not stalled when it continues, and a failure that
/// it detects then is reported immediately.
#[test]
fn time_spent_computing_does_not_count_as_stalled() {
    let options = options().shared_memory(SharedMemory::Required).stall_timeout(Duration::from_millis(700));
    run(2, options, None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(40_000).unwrap();
        for count in [2, 10_000] {
            sum(&mut ranks, all, buffer, count, DataType::I32).unwrap();
            // The others are slightly later.
            thread::sleep(Duration::from_millis(900 + 200 * u64::from(all.rank())));
            sum(&mut ranks, all, buffer, count, DataType::I32).unwrap();
        }
        thread::sleep(Duration::from_millis(900));
        let start = Instant::now();
        let error = sum(&mut ranks, all, buffer, 1 + all.rank() as usize, DataType::I32).unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{error}");
        let told = error.to_string();
        assert!(told.contains("all_reduce of 1 i32") && told.contains("all_reduce of 2 i32"), "{told}");
        assert!(start.elapsed() < Duration::from_millis(600), "{:?}", start.elapsed());
        ranks.finish().unwrap();
    });
}

/// A program that makes no further call gets the failure at the end.
#[test]
fn an_unreported_failure_is_reported_at_the_end() {
    for how in [SharedMemory::Off, SharedMemory::Required] {
        run(2, impatient().shared_memory(how), None, LIMIT, |mut ranks, all| {
            let buffer = ranks.allocate(8).unwrap();
            if all.rank() == 0 {
                let error = sum(&mut ranks, all, buffer, 1, DataType::I32).unwrap_err();
                assert!(matches!(error, Error::Failed { cause: Cause::Lost { peer: 1, .. }, .. }), "{error}");
                // The failure was returned before.
                ranks.finish().unwrap();
            } else {
                thread::sleep(options().retry_budget() * 3);
                let error = ranks.finish().map(drop).unwrap_err();
                assert!(matches!(error, Error::Failed { rank: 1, .. }), "{error}");
            }
        });
    }
}

/// One call too many: the other ranks have left, or have split.
#[test]
fn a_call_that_the_others_do_not_make_fails_in_time() {
    for (how, splits) in
        [(SharedMemory::Off, false), (SharedMemory::Required, false), (SharedMemory::Required, true)]
    {
        run(2, options().shared_memory(how), None, LIMIT, move |mut ranks, all| {
            let buffer = ranks.allocate(8).unwrap();
            sum(&mut ranks, all, buffer, 1, DataType::I32).unwrap();
            let error = match (all.rank(), splits) {
                (1, _) => sum(&mut ranks, all, buffer, 1, DataType::I32).unwrap_err(),
                (_, true) => ranks.split(all, Some(0), 0).unwrap_err(),
                (_, false) => ranks.finish().map(drop).unwrap_err(),
            };
            let Error::Failed { cause, .. } = &error else { panic!("{error}") };
            assert!(matches!(cause, Cause::Mismatch { .. } | Cause::Aborted { .. }), "{error}");
            let told = error.to_string();
            assert!(
                told.contains("all_reduce of 1 i32 (sum)") && told.contains("communicator's own"),
                "{told}"
            );
        });
    }
}

/// Ranks whose counts for each other differ get an error with both counts.
#[test]
fn mismatched_counts_are_detected() {
    run(2, options().shared_memory(SharedMemory::Off), None, LIMIT, |mut ranks, all| {
        let (from, to) = (ranks.allocate(64).unwrap(), ranks.allocate(64).unwrap());
        let (sent, received) = if all.rank() == 0 { ([1, 5], [1, 2]) } else { ([2, 1], [4, 1]) };
        let all_to_all = Operation::all_to_all_v(from, to, &sent, &received, DataType::F32);
        let error =
            ranks.run(all, &all_to_all).and_then(|()| ranks.run(all, &Operation::barrier())).unwrap_err();
        let told = error.to_string();
        assert!(told.contains("20 bytes for this rank") && told.contains("16 bytes from rank 0"), "{told}");
    });
}

#[test]
fn a_device_that_fails_ends_the_call_on_every_rank() {
    let late =
        |rank: u32| Strict::default().seed(rank.into()).latest(Duration::from_millis(2)).open().unwrap();
    let devices = [0, 1, 2].map(late);
    let failing = devices[1].clone();
    let gpu = |rank: u32| Some(devices[rank as usize].clone() as Arc<dyn Gpu>);
    let outcomes = run_with_gpus(3, options(), LIMIT, gpu, move |mut ranks, all| {
        let buffer = ranks.allocate(4 << 20).unwrap();
        let calls = (0..5).find_map(|call| {
            if (call, all.rank()) == (2, 1) {
                failing.fail_next(Submission::Scatter);
            }
            sum(&mut ranks, all, buffer, 1 << 20, DataType::F32).err()
        });
        // Copies and reductions are outstanding here or at others: all buffers are returned nevertheless.
        ranks.deregister(buffer).unwrap();
        ranks.finish().unwrap();
        calls.map(|error| error.to_string())
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        let outcome = outcome.as_deref().unwrap_or_default();
        // No rank is lost.
        assert!(outcome.contains("the device of rank 1 has failed"), "rank {rank}: {outcome}");
    }
}

/// A rank that aborts reports the reason to the others, and another communicator of the same ranks continues.
#[test]
fn an_abort_ends_only_one_communicator() {
    let outcomes = run(3, options(), None, LIMIT, |mut ranks, all| {
        let doomed = join_again(&mut ranks, all, &options(), false).unwrap();
        let result = match all.rank() {
            2 => {
                poll_for(&mut ranks, Duration::from_millis(50));
                ranks.abort(doomed, "no more data").unwrap();
                None
            }
            _ => ranks.run(doomed, &Operation::barrier()).err(),
        };
        ranks.leave(doomed).unwrap();
        let buffer = ranks.allocate(400_000).unwrap();
        sum(&mut ranks, all, buffer, 100_000, DataType::F32).unwrap();
        ranks.finish().unwrap();
        result
    });
    for rank in [0, 1] {
        match cause(&outcomes[rank]) {
            Some(Cause::Aborted { origin: 2, lost: None, reason }) => {
                assert!(reason.contains("no more data"), "{reason}");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
}

/// A link that is cut in the middle of calls is detected at both ends, and by ranks that can still communicate with both.
#[test]
fn a_rank_whose_link_is_cut_is_named_by_the_others() {
    let switch = Switch::new(SwitchConfig::default()).unwrap();
    let cut = Arc::new(AtomicBool::new(false));
    let open = {
        let cut = cut.clone();
        move |rank: u32| {
            let port = Box::new(switch.port(&[[10, 0, 0, rank as u8 + 1].into()]));
            let cut = if rank == 1 { cut.clone() } else { Arc::default() };
            let driver: Box<dyn PacketDriver> = Box::new(Cut { inner: port, cut });
            driver.into()
        }
    };
    let times: Arc<Mutex<Vec<Duration>>> = Arc::default();
    let outcomes =
        run_on(3, impatient().shared_memory(SharedMemory::Off), LIMIT, open, move |mut ranks, all| {
            let buffer = ranks.allocate(400_000).unwrap();
            for calls in 0.. {
                if calls == 20 && all.rank() == 1 {
                    cut.store(true, Ordering::Relaxed);
                }
                let start = Instant::now();
                if let Err(error) = sum(&mut ranks, all, buffer, 100_000, DataType::F32) {
                    times.lock().unwrap().push(start.elapsed());
                    ranks.finish().unwrap();
                    return error;
                }
            }
            unreachable!()
        });
    let outcomes: Vec<_> = outcomes.into_iter().map(Some).collect();
    for rank in [0, 2] {
        assert_eq!(cause(&outcomes[rank]).and_then(Cause::lost), Some(1), "rank {rank}: {outcomes:?}");
    }
    assert!(matches!(cause(&outcomes[1]).and_then(Cause::lost), Some(0 | 2)), "{outcomes:?}");
}

/// Neither sends nor receives once it is cut.
struct Cut {
    inner: Box<dyn PacketDriver>,
    cut: Arc<AtomicBool>,
}

impl driver::Wrapper for Cut {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, DriverError> {
        if self.cut.load(Ordering::Relaxed) {
            return Ok(0);
        }
        (*self.inner).rx_burst(now, sink)
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, DriverError> {
        let Cut { inner, cut } = self;
        (**inner).tx_burst(now, &mut FilteredSource::new(source, |_: Sent<'_>| !cut.load(Ordering::Relaxed)))
    }
}

#[test]
fn invalid_operations_are_refused_and_harmless() {
    run(2, options(), None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(10).unwrap();
        let refused = sum(&mut ranks, all, buffer, 3, DataType::I32).unwrap_err();
        let why = "input = 12 bytes from byte 0 on: a part of the buffer, which has 10 bytes";
        assert_eq!(refused.to_string(), why);
        for (operation, why) in [
            (Operation::send(buffer, 1, DataType::I32, all.rank()), "another rank than this one"),
            (Operation::send(buffer, 1, DataType::I32, 2), "a rank below 2"),
            (Operation::broadcast(buffer, buffer, 1, DataType::I32, 2), "a rank below 2"),
            (Operation::all_to_all(buffer, buffer, 1, DataType::I32), "can't be in place"),
            (Operation::all_gather_v(buffer, buffer, &[1], DataType::U8), "2, one for each rank"),
            (Operation::all_gather(buffer.at(1), buffer, 4, DataType::U8), "no overlap, or in place"),
            (
                Operation::all_reduce(buffer, buffer, usize::MAX, DataType::I32, ReduceOp::Sum),
                "less than 2^63 bytes",
            ),
            (Operation::all_reduce(buffer.at(11), buffer, 0, DataType::I32, ReduceOp::Sum), "10 bytes"),
            (
                Operation::all_reduce(buffer, buffer, 1, DataType::I32, Reduction::PreMulSum(0.5)),
                "factor = 0.5: an integer from -2147483648 to 2147483647, for elements of type i32",
            ),
        ] {
            let refused = ranks.run(all, &operation).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
        sum(&mut ranks, all, buffer, 2, DataType::I32).unwrap();
        let memory = ranks.deregister(buffer).unwrap();
        assert_eq!(memory.len(), 10);
        assert!(ranks.bytes(buffer).is_err());
        assert!(sum(&mut ranks, all, buffer, 2, DataType::I32).is_err());
        ranks.finish().unwrap();
    });
}
