//! Many ranks in one thread, on a simulated network in virtual time: no clock, no socket, no thread.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod world;

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce_collectives::{Algorithm, DataType, Operation, Options, Reduction};
use world::{World, link};

/// All-reduces `count` elements, checks each, and returns times and a hash of all traffic.
fn all_reduce(
    size: u32,
    seed: u64,
    link: LinkConfig,
    count: usize,
    options: Options,
    each: u32,
) -> (Vec<Duration>, u64) {
    let mut world = World::new(size, seed, link, &options, each);
    let buffers = world.allocate(count * 8);
    let times = (0..3_u64)
        .map(|turn| {
            for ((it, all), buffer) in world.ranks.iter_mut().zip(&buffers) {
                let element = |i: usize| (i as u64) << 20 | u64::from(all.rank() + 1) << 4 | turn;
                let bytes: Vec<u8> = (0..count).flat_map(|i| element(i).to_ne_bytes()).collect();
                it.write(*buffer, 0, &bytes).unwrap();
            }
            let time = world.run(|rank, _| {
                Operation::all_reduce(buffers[rank], buffers[rank], count, DataType::U64, Reduction::Sum)
            });
            let ranks = u64::from(size);
            for ((it, all), buffer) in world.ranks.iter().zip(&buffers) {
                for (i, bytes) in it.bytes(*buffer).unwrap().as_chunks::<8>().0.iter().enumerate() {
                    let due = ((i as u64 * ranks) << 20) + ((ranks * (ranks + 1) / 2) << 4) + turn * ranks;
                    assert_eq!(u64::from_ne_bytes(*bytes), due, "rank {}, element {i}", all.rank());
                }
            }
            time
        })
        .collect();
    (times, world.network.trace_hash())
}

#[test]
fn sixty_four_ranks_with_every_algorithm() {
    // Simulated ranks share no memory.
    for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Mapped) {
        // Direct exchange of more elements would take too long in the test.
        let count = if algorithm == Algorithm::Direct { 16 } else { 4096 };
        let (times, _) = all_reduce(64, 1, link(), count, Options::default().algorithm(algorithm), 8);
        println!("64 ranks, {count} u64 by {algorithm}: {times:?}");
    }
}

#[test]
fn a_run_repeats_bit_for_bit_and_loss_only_costs_time() {
    let options = Options::default().ack_timeout(Duration::from_millis(2));
    let lossy = || all_reduce(9, 7, link().loss(0.01), 50_000, options.algorithm(Algorithm::Ring), 3);
    let (times, hash) = lossy();
    assert_eq!(lossy(), (times.clone(), hash));
    let (ideal, other) = all_reduce(9, 7, link(), 50_000, options.algorithm(Algorithm::Ring), 3);
    assert!(times[2] > ideal[2] && hash != other, "{times:?} with loss, {ideal:?} without");
}
