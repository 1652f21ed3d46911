//! Calls allocate nothing.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use ferroce_collectives::{DataType, Operation};
use group::{LIMIT, options, run, sum};

#[test]
#[ignore = "each start makes lists of its steps, lanes and peers anew"]
fn a_call_allocates_nothing() {
    run(3, options(), None, LIMIT, |mut ranks, all| {
        let buffer = ranks.allocate(400_000).unwrap();
        // A port makes what it is woken by when it blocks for the first time: each rank waits for a late one before.
        for late in 0..3 {
            if all.rank() == late {
                std::thread::sleep(std::time::Duration::from_millis(300));
            }
            ranks.run(all, &Operation::barrier()).unwrap();
        }
        let mut call = || sum(&mut ranks, all, buffer, 100_000, DataType::F32).unwrap();
        call();
        let measured = allocation_counter::measure(call);
        assert_eq!(measured.count_total, 0, "{measured:?}");
        ranks.finish().unwrap();
    });
}
