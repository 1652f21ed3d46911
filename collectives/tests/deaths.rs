//! A rank is killed or cut off at any moment of any operation with any algorithm: every other rank returns an error that
//! names the rank and the operation, within the retry budget, and continues without it. In virtual time.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod world;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ferroce::Nanos;
use ferroce::driver::sim::Verdict;
use ferroce_collectives::{
    Algorithm, Buffer, Communicator, DataType, Error, Kind, Operation, Options, Reduction, Request,
};
use world::{World, link};

/// Numbers from a seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) as usize % limit
    }
}

const KINDS: [Kind; 9] = [
    Kind::AllReduce,
    Kind::ReduceScatter,
    Kind::AllGather,
    Kind::Broadcast,
    Kind::Reduce,
    Kind::AllToAll,
    Kind::Gather,
    Kind::Scatter,
    Kind::Barrier,
];

fn operation(kind: Kind, input: Buffer, output: Buffer, count: usize, root: u32) -> Operation {
    let (of, by) = (DataType::U64, Reduction::Sum);
    match kind {
        Kind::AllReduce => Operation::all_reduce(input, output, count, of, by),
        Kind::ReduceScatter => Operation::reduce_scatter(input, output, count, of, by),
        Kind::AllGather => Operation::all_gather(input, output, count, of),
        Kind::Broadcast => Operation::broadcast(input, output, count, of, root),
        Kind::Reduce => Operation::reduce(input, output, count, of, by, root),
        Kind::AllToAll => Operation::all_to_all(input, output, count, of),
        Kind::Gather => Operation::gather(input, output, count, of, root),
        Kind::Scatter => Operation::scatter(input, output, count, of, root),
        _ => Operation::barrier(),
    }
}

/// A live rank.
struct Alive {
    index: usize,
    request: Option<Request>,
    error: Option<Error>,
    left: Option<Communicator>,
    /// When its last operation started: others may have sent data for it in advance.
    began: Nanos,
}

/// Returns the longest time until a rank knew of the death, as a fraction of the retry budget.
fn death(seed: u64) -> f64 {
    let mut numbers = Numbers(seed);
    let size = 2 + numbers.below(6);
    let kind = KINDS[numbers.below(KINDS.len())];
    let algorithms: Vec<Algorithm> =
        [Algorithm::Direct, Algorithm::TwoStep, Algorithm::Ring, Algorithm::Halving, Algorithm::Tree]
            .into_iter()
            .filter(|algorithm| algorithm.applies_to(kind))
            .collect();
    let algorithm = algorithms[numbers.below(algorithms.len())];
    let count = [1, 100, 3000, 40_000][numbers.below(4)];
    let (dead, root) = (numbers.below(size), numbers.below(size) as u32);
    let is_cut = numbers.below(2) == 0;
    let what = format!(
        "{kind} of {count} u64 by {algorithm}, {size} ranks, root {root}, rank {dead} {}",
        if is_cut { "is cut off" } else { "dies" }
    );
    let options = Options::default()
        .algorithm(algorithm)
        .chunk_bytes(16 << 10)
        .eager_bytes(1 << 10)
        .ack_timeout(Duration::from_millis(2))
        .probe_interval(Duration::from_millis(2));
    let budget = options.retry_budget();
    let mut world = World::new(size as u32, seed, link().rate(10_000_000_000), &options, 1);
    let buffers = world.allocate(8 * count * size);
    let outputs = world.allocate(8 * count * size);
    let cut = Arc::new(AtomicU32::new(u32::MAX - 1));
    let cut_off = cut.clone();
    world.network.set_filter(Box::new(move |frame| {
        // The last bytes of the IPv4 addresses, after the Ethernet header.
        let is_of = |at: usize| {
            frame
                .get(at)
                .is_some_and(|last| u32::from(*last) == cut_off.load(Ordering::Relaxed).wrapping_add(1))
        };
        if is_of(29) || is_of(33) { Verdict::Drop } else { Verdict::Pass }
    }));
    // First an operation of all ranks, which connects them.
    let whole = world.run(|rank, _| operation(kind, buffers[rank], outputs[rank], count, root));
    let moment = world.now + whole * numbers.below(300) as u32 / 100;
    let mut alive: Vec<Alive> = (0..size)
        .map(|index| Alive { index, request: None, error: None, left: None, began: world.now })
        .collect();
    let mut died = None;
    let mut latest = Duration::ZERO;
    let mut corpse = None;
    while alive.iter().any(|rank| rank.left.is_none()) {
        if died.is_none() && world.now >= moment {
            died = Some(world.now);
            alive.retain(|rank| rank.index != dead);
            if is_cut {
                cut.store(dead as u32, Ordering::Relaxed);
            } else {
                corpse = Some(dead);
                let (collectives, _) = world.ranks.remove(dead);
                drop(collectives);
                alive.iter_mut().filter(|rank| rank.index > dead).for_each(|rank| rank.index -= 1);
            }
        }
        let mut moved = false;
        for (it, _) in &mut world.ranks {
            moved |= it.poll(world.now).unwrap();
        }
        for rank in &mut alive {
            let (it, all) = &mut world.ranks[rank.index];
            let number = all.rank() as usize;
            match (&rank.error, rank.request) {
                (None, None) => {
                    let next = operation(kind, buffers[number], outputs[number], count, root);
                    match it.start(*all, &next) {
                        Ok(request) => (rank.request, rank.began) = (Some(request), world.now),
                        Err(error) => {
                            it.start_shrink(*all).unwrap();
                            rank.error = Some(error);
                        }
                    }
                    moved = true;
                }
                (None, Some(request)) => match it.has_ended(request) {
                    Ok(true) => (rank.request, moved) = (None, true),
                    Ok(false) => {}
                    Err(error) => {
                        it.start_shrink(*all).unwrap();
                        rank.error = Some(error);
                        let since = died.map_or(rank.began, |died| died.max(rank.began));
                        latest = latest.max(world.now.since(since));
                    }
                },
                (Some(_), _) if rank.left.is_none() => rank.left = it.shrunk(*all).unwrap(),
                _ => {}
            }
        }
        let since = died.map_or(Duration::ZERO, |died| world.now.since(died));
        assert!(since < budget * 6, "{what}: {:?}", alive.iter().map(|rank| &rank.error).collect::<Vec<_>>());
        if !moved {
            world.advance(died.is_none().then_some(moment));
        }
    }
    for rank in &alive {
        let Some(Error::Failed { operation, cause, .. }) = &rank.error else {
            panic!("{what}: {:?}", rank.error)
        };
        assert!(operation.contains(&kind.to_string()), "{what}: {operation}");
        assert_eq!(cause.lost(), Some(dead as u32), "{what}: {cause}");
        assert_eq!(rank.left.map(Communicator::size), Some(size as u32 - 1), "{what}");
    }
    // The remaining ranks continue, with correct sums.
    cut.store(dead as u32, Ordering::Relaxed);
    let left: Vec<Communicator> = alive.iter().filter_map(|rank| rank.left).collect();
    if corpse.is_none() {
        world.ranks.remove(dead);
    }
    for ((it, all), left) in world.ranks.iter_mut().zip(left) {
        it.write(buffers[all.rank() as usize], 0, &(1_u64 << all.rank()).to_ne_bytes()).unwrap();
        *all = left;
    }
    let own: Vec<Buffer> = (0..size).filter(|rank| *rank != dead).map(|rank| buffers[rank]).collect();
    world.run(|rank, _| Operation::all_reduce(own[rank], own[rank], 1, DataType::U64, Reduction::Sum));
    let due = (0..size).filter(|rank| *rank != dead).map(|rank| 1_u64 << rank).sum::<u64>();
    for ((it, _), buffer) in world.ranks.iter().zip(&own) {
        let mut sum = [0; 8];
        it.read(*buffer, 0, &mut sum).unwrap();
        assert_eq!(u64::from_ne_bytes(sum), due, "{what}");
    }
    println!(
        "{what}: {latest:?} of {budget:?}: {:?}",
        alive.iter().map(|rank| &rank.error).collect::<Vec<_>>()
    );
    latest.as_secs_f64() / budget.as_secs_f64()
}

#[test]
fn a_death_at_any_moment_is_reported_to_all_in_time() {
    let chosen = std::env::var("FERROCE_DEATH_SEED").ok().map(|seed| seed.parse().unwrap());
    let count = std::env::var("FERROCE_DEATHS").map_or(60, |count| count.parse().unwrap());
    let seeds = chosen.map_or(0..count, |seed: u64| seed..seed + 1);
    let mut latest: f64 = 0.0;
    for seed in seeds {
        println!("FERROCE_DEATH_SEED={seed} cargo test -p ferroce-collectives --test deaths");
        let share = death(seed);
        latest = latest.max(share);
        // The rank that detects the death may have made its last progress after it, and others check their messages every 2
        // ms.
        assert!(share <= 1.5, "seed {seed}: known after {share:.2} of the retry budget");
    }
    println!("a rank waited for {latest:.2} of the retry budget at most");
}
