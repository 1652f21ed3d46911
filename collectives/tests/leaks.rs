//! A thousand communicators leak no descriptors, mappings or memory. It has its own process, because it counts resources of
//! the process.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use std::fs;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use ferroce_collectives::{DataType, Model, Operation, SharedMemory};
use group::{LIMIT, options, run, sum};

/// Descriptors, mappings, and KiB in memory.
fn in_use() -> [usize; 3] {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib = resident.trim().split(' ').next().unwrap().parse().unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    // Mappings of the heap and the stacks vary.
    let shared = maps.lines().filter(|line| line.contains("memfd")).count();
    [fs::read_dir("/proc/self/fd").unwrap().count(), shared, kib]
}

#[test]
fn a_thousand_communicators_leave_nothing_behind() {
    for shared_memory in [SharedMemory::Required, SharedMemory::Off] {
        let together = Arc::new(Barrier::new(2));
        let options = options().model(Model::default()).shared_memory(shared_memory);
        let counts = run(2, options, None, LIMIT, move |mut ranks, all| {
            // A port creates its waker when it first blocks, so first each rank waits for a late one.
            for late in 0..2 {
                if all.rank() == late {
                    thread::sleep(Duration::from_millis(300));
                }
                ranks.run(all, &Operation::barrier()).unwrap();
            }
            let mut count = |turns: usize| {
                for turn in 0..turns {
                    let both = ranks.subset(all, &[1, 0]).unwrap().unwrap();
                    let buffer = ranks.allocate(1 << 14).unwrap();
                    // Elements that are published with the operation, and others.
                    sum(&mut ranks, both, buffer, [10, 4000][turn % 2], DataType::I32).unwrap();
                    ranks.leave(both).unwrap();
                    ranks.deregister(buffer).unwrap();
                }
                // Others unmap the last communicator's memory with the next operation.
                let buffer = ranks.allocate(1 << 14).unwrap();
                sum(&mut ranks, all, buffer, 4000, DataType::I32).unwrap();
                ranks.run(all, &Operation::barrier()).unwrap();
                ranks.deregister(buffer).unwrap();
                together.wait();
                let in_use = if all.rank() == 0 { in_use() } else { [0; 3] };
                together.wait();
                in_use
            };
            let counts = [count(100), count(1000)];
            ranks.finish().unwrap();
            counts
        });
        let [[files, shared, kib], [files_then, shared_then, kib_then]] = counts[0];
        println!("{shared_memory}: {:?}", counts[0]);
        assert_eq!((files_then, shared_then), (files, shared), "{shared_memory}");
        assert!(kib_then < kib + 2048, "{shared_memory}: {kib} KiB, then {kib_then} KiB");
    }
}
