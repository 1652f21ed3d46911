//! Ranks as threads on a switch inside the process.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ferroce::Counter;
use ferroce_collectives::{Algorithm, DataType, Kind, Operation, Options, ReduceOp, SharedMemory};
use group::{LIMIT, check_sums, options, run, sum};

#[test]
fn sums_of_every_size_with_every_algorithm() {
    for size in [1, 2, 3, 4, 5, 8] {
        for algorithm in Algorithm::ALL {
            if !algorithm.applies_to(Kind::AllReduce) || algorithm == Algorithm::Hierarchical {
                continue;
            }
            run(size, options().algorithm(algorithm), None, LIMIT, move |mut ranks, all| {
                let counts = [1, 2, 3, 7, 255, 256, 257, 1000, 4096, 4097, 100_000, 300_001, 0, 5];
                let longest = 300_002;
                let buffer = ranks.allocate(longest * 4).unwrap();
                for (call, count) in counts.into_iter().enumerate() {
                    let own =
                        |rank: u32, i: usize| (i as i32).wrapping_mul(31) ^ (rank as i32) << 16 ^ call as i32;
                    let bytes: Vec<u8> = (0..=count).flat_map(|i| own(all.rank(), i).to_ne_bytes()).collect();
                    ranks.write(buffer, 0, &bytes).unwrap();
                    ranks
                        .run(all, &Operation::all_reduce(buffer, buffer, count, DataType::I32, ReduceOp::Sum))
                        .unwrap();
                    let mut bytes = vec![0; (count + 1) * 4];
                    ranks.read(buffer, 0, &mut bytes).unwrap();
                    for (i, got) in bytes.as_chunks::<4>().0.iter().enumerate() {
                        let due = match i {
                            _ if i == count => own(all.rank(), i),
                            _ => (0..size).fold(0_i32, |sum, rank| sum.wrapping_add(own(rank, i))),
                        };
                        assert_eq!(
                            i32::from_ne_bytes(*got),
                            due,
                            "rank {} of {size}, {algorithm}, element {i} of {count}",
                            all.rank()
                        );
                    }
                }
                ranks.finish().unwrap();
            });
        }
    }
}

/// A rank that has returned may compute, or wait for another event, for any time.
#[test]
fn a_rank_that_has_returned_does_not_delay_others() {
    for size in [2, 3] {
        let all_returned = Arc::new(Barrier::new(size as usize));
        run(size, options(), None, Duration::from_secs(30), move |mut ranks, all| {
            let buffer = ranks.allocate(4 * 50_000).unwrap();
            for call in 0..100 {
                let count = [1, 1000, 50_000][call % 3];
                sum(&mut ranks, all, buffer, count, DataType::F32).unwrap();
                // It does not poll here.
                all_returned.wait();
            }
            ranks.finish().unwrap();
        });
    }
}

#[test]
fn sums_with_the_default_options() {
    run(4, Options::default(), None, LIMIT, |mut ranks, all| {
        check_sums(&mut ranks, all, &[1 << 20, 3, 25_557_032 / 16]);
        ranks.run(all, &Operation::barrier()).unwrap();
        ranks.finish().unwrap();
    });
}

#[test]
fn the_smallest_chunks_and_messages() {
    let options = options().chunk_bytes(1 << 10).eager_bytes(64);
    run(3, options, None, LIMIT, |mut ranks, all| {
        check_sums(&mut ranks, all, &[1, 2, 100, 5000]);
        ranks.finish().unwrap();
    });
}

#[test]
fn sums_survive_loss() {
    for (size, every) in [(2, 17), (4, 53)] {
        // On a loaded machine threads are off their cores for tens of milliseconds.
        let options = options().ack_timeout(Duration::from_millis(60)).shared_memory(SharedMemory::Off);
        let resent = run(size, options, Some(every), LIMIT, |mut ranks, all| {
            check_sums(&mut ranks, all, &[1, 7, 1000, 100_000, 300_000]);
            ranks.finish().unwrap().counters().value(Counter::RetransmittedPkts)
        });
        assert!(resent.iter().sum::<u64>() > 0, "nothing was lost: {resent:?}");
    }
}

/// Floats whose sums depend on the order of additions.
#[test]
fn the_same_bits_on_every_rank_and_in_every_run() {
    const COUNT: usize = 5000;
    for algorithm in Algorithm::ALL {
        if !algorithm.applies_to(Kind::AllReduce) || algorithm == Algorithm::Hierarchical {
            continue;
        }
        let bits = || {
            run(5, options().algorithm(algorithm), None, LIMIT, |mut ranks, all| {
                let buffer = ranks.allocate(COUNT * 8).unwrap();
                let mut results = Vec::new();
                for data_type in
                    [DataType::F32, DataType::F64, DataType::Bf16, DataType::F16, DataType::F8E5M2]
                {
                    // Any bits except those of large numbers and NaNs.
                    let mut state = u64::from(all.rank()) + 1;
                    let mut byte = |at: usize| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let byte = (state >> 56) as u8;
                        if at % data_type.size() == data_type.size() - 1 { byte & 0xbf | 0x20 } else { byte }
                    };
                    let bytes: Vec<u8> = (0..COUNT * data_type.size()).map(&mut byte).collect();
                    ranks.write(buffer, 0, &bytes).unwrap();
                    let sum = Operation::all_reduce(buffer, buffer, COUNT, data_type, ReduceOp::Sum);
                    ranks.run(all, &sum).unwrap();
                    let mut sums = vec![0; bytes.len()];
                    ranks.read(buffer, 0, &mut sums).unwrap();
                    assert_ne!(sums, bytes);
                    results.push(sums);
                }
                ranks.finish().unwrap();
                results
            })
        };
        let [first, second] = [bits(), bits()];
        for results in first.iter().chain(&second) {
            assert!(*results == first[0], "{algorithm}");
        }
    }
}

#[test]
fn a_barrier_holds_back_the_early() {
    let times = run(4, options(), None, LIMIT, |mut ranks, all| {
        std::thread::sleep(Duration::from_millis(40) * all.rank());
        let entered = Instant::now();
        ranks.run(all, &Operation::barrier()).unwrap();
        let left = Instant::now();
        ranks.finish().unwrap();
        (entered, left)
    });
    let last_entered = times.iter().map(|(entered, _)| *entered).max().unwrap();
    assert!(times.iter().all(|(_, left)| *left >= last_entered));
}

/// A rank that leaves early no longer answers, and its neighbour's last packets may need an answer.
#[test]
fn no_rank_leaves_before_all_are_done() {
    let times = run(3, options(), None, LIMIT, |mut ranks, all| {
        ranks.run(all, &Operation::barrier()).unwrap();
        std::thread::sleep(Duration::from_millis(40) * all.rank());
        let done = Instant::now();
        ranks.finish().unwrap();
        (done, Instant::now())
    });
    let last_done = times.iter().map(|(done, _)| *done).max().unwrap();
    assert!(times.iter().all(|(_, left)| *left >= last_done));
}
