//! Ranks as threads on a switch inside the process.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use ferroce_collectives::{Algorithm, DataType, Kind, Operation, Options, ReduceOp, Reduction};
use group::{LIMIT, options, run};

#[test]
fn sums_of_every_size_by_every_algorithm() {
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
