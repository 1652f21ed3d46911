//! Derived communicators, failed communicators whose ranks continue without the dead, and communicators on a runner's
//! thread.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferroce_collectives::{
    Algorithm, Cause, Collectives, Communicator, DataType, Error, Operation, Options, Reduction, Runner,
    SharedMemory,
};
use group::{LIMIT, options, run};

/// The sum of `1 << rank` over the ranks of a communicator.
fn sum(ranks: &mut Collectives, of: Communicator, own: u32) -> Result<u64, Error> {
    let buffer = ranks.allocate(8).unwrap();
    ranks.write(buffer, 0, &(1_u64 << own).to_ne_bytes()).unwrap();
    let result = ranks.run(of, &Operation::all_reduce(buffer, buffer, 1, DataType::U64, Reduction::Sum));
    let mut bytes = [0; 8];
    ranks.read(buffer, 0, &mut bytes).unwrap();
    ranks.deregister(buffer).unwrap();
    result.map(|()| u64::from_ne_bytes(bytes))
}

#[test]
fn a_split_is_by_color_in_the_order_of_keys() {
    run(6, options(), None, LIMIT, |mut ranks, all| {
        let own = all.rank();
        // Even and odd ranks, in the opposite order; rank 5 is in neither.
        let color = (own != 5).then_some(own % 2);
        let half = ranks.split(all, color, -(own as i32)).unwrap();
        match half {
            None => assert_eq!(own, 5),
            Some(half) => {
                let members: &[u32] = if own % 2 == 0 { &[4, 2, 0] } else { &[3, 1] };
                assert_eq!(
                    (half.rank(), half.size()),
                    (members.iter().position(|r| *r == own).unwrap() as u32, members.len() as u32)
                );
                let due = members.iter().map(|rank| 1 << rank).sum();
                assert_eq!(sum(&mut ranks, half, own).unwrap(), due);
            }
        }
        // Both communicators can be used concurrently.
        assert_eq!(sum(&mut ranks, all, own).unwrap(), 0b11_1111);
        if let Some(half) = half {
            ranks.leave(half).unwrap();
        }
        assert_eq!(sum(&mut ranks, all, own).unwrap(), 0b11_1111);
        ranks.finish().unwrap();
    });
}

#[test]
fn an_invalid_subset_is_refused() {
    run(2, options(), None, LIMIT, |mut ranks, all| {
        for (subset, due) in
            [(&[0, 2][..], "rank of a subset = 2"), (&[1, 1], "rank of a subset = 1"), (&[], "none")]
        {
            let refused = ranks.subset(all, subset).unwrap_err().to_string();
            assert!(refused.contains(due), "{refused}");
        }
        let only = ranks.subset(all, &[1]).unwrap();
        assert_eq!(only.is_some(), all.rank() == 1);
        ranks.finish().unwrap();
    });
}

#[test]
fn the_remaining_ranks_continue_without_the_dead() {
    for dead in [vec![0], vec![2], vec![1, 4]] {
        let gone = dead.clone();
        run(5, options(), None, LIMIT, move |mut ranks, all| {
            let own = all.rank();
            assert_eq!(sum(&mut ranks, all, own).unwrap(), 0b1_1111);
            if gone.contains(&own) {
                return;
            }
            let error = loop {
                match sum(&mut ranks, all, own) {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            let Error::Failed { operation, cause, .. } = &error else { panic!("{error}") };
            assert!(operation.contains("all_reduce of 1 u64 (sum)"), "{error}");
            assert!(cause.lost().is_some_and(|lost| gone.contains(&lost)), "{error}");
            assert!(error.to_string().contains("is gone"), "{error}");
            let left = ranks.shrink(all).unwrap();
            assert_eq!(left.size() as usize, 5 - gone.len());
            let due = (0..5).filter(|rank| !gone.contains(rank)).map(|rank| 1 << rank).sum();
            for _ in 0..3 {
                assert_eq!(sum(&mut ranks, left, own).unwrap(), due);
            }
            let again = ranks.subset(all, &[own]).unwrap_err().to_string();
            assert!(again.contains("subset"), "{again}");
            ranks.leave(left).unwrap();
            ranks.finish().unwrap();
        });
    }
}

/// Operations started before a shrink have failed, even if none was tested before it.
#[test]
fn operations_ended_by_a_shrink_have_failed() {
    for how in [SharedMemory::Off, SharedMemory::Required] {
        run(3, options().shared_memory(how), None, LIMIT, |mut ranks, all| {
            let buffer = ranks.allocate(16).unwrap();
            let sum =
                |at| Operation::all_reduce(buffer.at(at), buffer.at(at), 1, DataType::U64, Reduction::Sum);
            ranks.run(all, &sum(0)).unwrap();
            if all.rank() == 2 {
                return;
            }
            let [first, second] = [0, 8].map(|at| ranks.start(all, &sum(at)).unwrap());
            if all.rank() == 0 {
                assert!(ranks.wait(first).is_err());
            }
            let left = ranks.shrink(all).unwrap();
            assert_eq!(ranks.shrunk(all).unwrap(), Some(left));
            assert!(ranks.wait(second).is_err());
            if all.rank() == 1 {
                assert!(ranks.wait(first).is_err());
            }
            ranks.run(left, &sum(0)).unwrap();
            ranks.finish().unwrap();
        });
    }
}

/// Ranks that have derived different communicators before agree on the remaining ranks.
#[test]
fn earlier_derived_communicators_do_not_affect_a_shrink() {
    run(3, options(), None, LIMIT, |mut ranks, all| {
        let own = all.rank();
        if own == 0 {
            assert!(ranks.subset(all, &[0]).unwrap().is_some());
        }
        if own == 2 {
            return;
        }
        let left = ranks.shrink(all).unwrap();
        assert_eq!(sum(&mut ranks, left, own).unwrap(), 0b11);
        ranks.finish().unwrap();
    });
}

/// Communicators that ranks have in different orders are left by all at once.
#[test]
fn communicators_in_any_order_are_left_by_finish() {
    run(3, options(), None, LIMIT, |mut ranks, all| {
        let own = all.rank();
        let before = ranks.subset(all, &[1, 2]).unwrap();
        let first = ranks.subset(all, &[0, 1]).unwrap();
        if let Some(before) = before {
            ranks.leave(before).unwrap();
        }
        // At rank 1 it reuses the place of the one that was left, before the first.
        let second = ranks.subset(all, &[0, 1]).unwrap();
        for of in [first, second].into_iter().flatten() {
            assert_eq!(sum(&mut ranks, of, own).unwrap(), 0b11);
        }
        ranks.finish().unwrap();
    });
}

/// A rank that others consider lost, and that later continues an operation, writes nothing to their memory.
#[test]
fn a_late_rank_does_not_write_to_memory_of_others() {
    const COUNT: usize = 1 << 20;
    let goes_on = Arc::new(AtomicBool::new(false));
    let has_gone_on = Arc::new(AtomicBool::new(false));
    run(3, options().shared_memory(SharedMemory::Required), None, LIMIT, move |mut ranks, all| {
        let own = all.rank();
        let buffer = ranks.allocate(COUNT * 8).unwrap();
        let ones = vec![1_u64.to_ne_bytes(); COUNT].concat();
        ranks.write(buffer, 0, &ones).unwrap();
        let sum = |of| Operation::all_reduce(of, of, COUNT, DataType::U64, Reduction::Sum);
        let request = ranks.start(all, &sum(buffer)).unwrap();
        let wait_for = |what: &AtomicBool| {
            while !what.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        if own == 2 {
            // Into the middle of the operation.
            for _ in 0..3 {
                let now = ranks.now();
                ranks.poll(now).unwrap();
            }
            wait_for(&goes_on);
            assert!(ranks.wait(request).is_err());
            has_gone_on.store(true, Ordering::Release);
            return;
        }
        assert!(ranks.wait(request).is_err());
        let left = ranks.shrink(all).unwrap();
        ranks.write(buffer, 0, &ones).unwrap();
        ranks.run(left, &sum(buffer)).unwrap();
        goes_on.store(true, Ordering::Release);
        wait_for(&has_gone_on);
        let mut bytes = vec![0; COUNT * 8];
        ranks.read(buffer, 0, &mut bytes).unwrap();
        let wrong = bytes.as_chunks::<8>().0.iter().filter(|bytes| u64::from_ne_bytes(**bytes) != 2).count();
        assert_eq!(wrong, 0, "of {COUNT} elements of rank {own}");
        ranks.finish().unwrap();
    });
}

#[test]
fn an_abort_ends_operations_on_all_ranks() {
    run(3, options(), None, LIMIT, |mut ranks, all| {
        if all.rank() == 1 {
            assert_eq!(sum(&mut ranks, all, 1).unwrap(), 0b111);
            ranks.abort(all, "no more data").unwrap();
        } else {
            // The first may have ended or not: rank 1 has all data of it before the others do.
            let error = (0..2).find_map(|_| sum(&mut ranks, all, all.rank()).err()).unwrap();
            let Error::Failed { cause: Cause::Aborted { origin: 1, lost: None, reason }, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(reason, "aborted: no more data");
        }
        let later = sum(&mut ranks, all, all.rank()).unwrap_err().to_string();
        assert!(later.contains("no more data"), "{later}");
        ranks.leave(all).unwrap();
        ranks.finish().unwrap();
    });
}

#[test]
fn communicators_leave_nothing_behind() {
    run(2, options().model(ferroce_collectives::Model::default()), None, LIMIT, |mut ranks, all| {
        assert_eq!(sum(&mut ranks, all, all.rank()).unwrap(), 0b11);
        let in_use = |ranks: &Collectives| {
            let text = ranks.context().metrics().to_string();
            let lines = text.lines().filter(|line| line.contains("in_use"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let before = in_use(&ranks);
        for _ in 0..1000 {
            let both = ranks.subset(all, &[1, 0]).unwrap().unwrap();
            assert_eq!(sum(&mut ranks, both, all.rank()).unwrap(), 0b11);
            ranks.leave(both).unwrap();
        }
        assert_eq!(in_use(&ranks), before);
        ranks.finish().unwrap();
    });
}

#[test]
fn a_runner_executes_operations_of_other_threads() {
    run(3, options(), None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(8 * 2).unwrap();
        let runner = Runner::start(ranks).unwrap();
        let handle = runner.handle();
        for turn in 0..20_u64 {
            let numbers = [turn, u64::from(all.rank())].map(u64::to_ne_bytes).concat();
            handle.call(move |ranks| ranks.write(buffer, 0, &numbers)).unwrap().unwrap();
            let operations = [0, 8].map(|at| {
                Operation::all_reduce(buffer.at(at), buffer.at(at), 1, DataType::U64, Reduction::Sum)
            });
            let pending = if turn % 2 == 0 {
                handle.start_all(all, operations.to_vec())
            } else {
                let [first, second] = operations;
                let before = handle.start(all, first);
                let behind = handle.start(all, second);
                before.wait().unwrap();
                behind
            };
            pending.wait().unwrap();
            let sums = handle
                .call(move |ranks| {
                    let mut bytes = [0; 16];
                    ranks.read(buffer, 0, &mut bytes).map(|()| bytes)
                })
                .unwrap()
                .unwrap();
            assert_eq!(sums, [3 * turn, 3].map(u64::to_ne_bytes).concat()[..]);
        }
        let refused = handle.start(all, Operation::broadcast(buffer, buffer, 1, DataType::U64, 3)).wait();
        assert!(refused.unwrap_err().to_string().contains("root = 3"), "");
        let ranks = runner.stop().unwrap();
        ranks.finish().unwrap();
        let ended = handle.start(all, Operation::barrier()).wait().unwrap_err();
        assert!(matches!(ended, Error::Ended), "{ended}");
    });
}

/// No wait for a runner that a closure has ended is endless.
#[test]
fn a_closure_that_panics_ends_the_waits_of_others() {
    run(2, options(), None, LIMIT, |ranks, all| {
        let runner = Runner::start(ranks).unwrap();
        let handle = runner.handle();
        // The other rank does not call it.
        let pending = (all.rank() == 0).then(|| handle.start(all, Operation::barrier()));
        let called = handle.call(|_| {
            if std::hint::black_box(true) {
                panic!("on purpose")
            }
        });
        assert!(matches!(called, Err(Error::Ended)), "{called:?}");
        if let Some(pending) = pending {
            assert!(matches!(pending.wait(), Err(Error::Ended)));
        }
        assert!(matches!(handle.start(all, Operation::barrier()).wait(), Err(Error::Ended)));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runner.stop())).is_err());
    });
}

/// A rank that sleeps for longer than the retry budget is alive if a runner answers for it.
#[test]
fn a_runner_answers_while_the_program_computes() {
    run(2, options(), None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(8).unwrap();
        let runner = Runner::start(ranks).unwrap();
        if all.rank() == 1 {
            std::thread::sleep(Options::retry_budget(&options()) * 2);
        }
        let sum = Operation::all_reduce(buffer, buffer, 1, DataType::U64, Reduction::Sum);
        runner.handle().start(all, sum).wait().unwrap();
        runner.stop().unwrap().finish().unwrap();
    });
    assert!(options().retry_budget() > Duration::from_millis(500));
}

fn regions(ranks: &Collectives) -> String {
    let text = ranks.context().metrics().to_string();
    text.lines().find(|line| line.contains("in_use") && line.contains("\"mr\"")).unwrap().to_owned()
}

/// A buffer that another rank has deregistered is unmapped by the next operation.
#[test]
fn deregistered_buffers_leave_no_mappings() {
    run(2, options().shared_memory(SharedMemory::Required), None, LIMIT, |mut ranks, all| {
        let mut before = None;
        for turn in 0..200 {
            let buffer = ranks.allocate(1 << 16).unwrap();
            let sum = Operation::all_reduce(buffer, buffer, 1 << 13, DataType::U64, Reduction::Sum);
            ranks.run(all, &sum).unwrap();
            // Both ranks have the buffer of this turn mapped, and no longer that of the turn before.
            if turn == 1 {
                before = Some(regions(&ranks));
            }
            if turn == 199 {
                assert_eq!(before, Some(regions(&ranks)));
            }
            ranks.deregister(buffer).unwrap();
        }
        ranks.finish().unwrap();
    });
}

#[test]
fn an_impossible_forced_algorithm_is_refused() {
    let options = options().shared_memory(SharedMemory::Off).algorithm(Algorithm::Mapped);
    run(2, options, None, LIMIT, |mut ranks, all| {
        let refused = sum(&mut ranks, all, 0).unwrap_err().to_string();
        assert!(refused.contains("algorithm = mapped: another one: the ranks have not agreed"), "{refused}");
        ranks.finish().unwrap();
    });
}
