//! Calls allocate nothing.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use ferroce_collectives::{DataType, Operation, SharedMemory};
use group::{LIMIT, options, run, sum};

#[test]
fn a_call_with_packets_allocates_nothing() {
    calls_allocate_nothing(SharedMemory::Off);
}

#[test]
fn a_call_on_mapped_memory_allocates_nothing() {
    calls_allocate_nothing(SharedMemory::Required);
}

fn calls_allocate_nothing(shared_memory: SharedMemory) {
    run(3, options().shared_memory(shared_memory), None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(400_000).unwrap();
        // A port creates its waker when it first blocks, so first each rank waits for a late one.
        for late in 0..3 {
            if all.rank() == late {
                std::thread::sleep(std::time::Duration::from_millis(300));
            }
            ranks.run(all, &Operation::barrier()).unwrap();
        }
        for count in [10, 100_000] {
            let mut call = || sum(&mut ranks, all, buffer, count, DataType::F32).unwrap();
            (0..100).for_each(|_| call());
            let measured = allocation_counter::measure(|| (0..100).for_each(|_| call()));
            assert_eq!(measured.count_total, 0, "{measured:?}");
        }
        ranks.finish().unwrap();
    });
}
