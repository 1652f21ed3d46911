//! Many ranks in one thread, on a simulated network in virtual time: no clock, no socket, no thread.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, SimNetwork};
use ferroce::{Config, Context, Nanos};
use ferroce_collectives::{
    Algorithm, Buffer, Card, Collectives, Communicator, DataType, Operation, Options, Reduction, Request,
};

struct World {
    network: SimNetwork,
    ranks: Vec<(Collectives, Communicator)>,
    now: Nanos,
}

/// A link of a data center: 100 Gb/s, 1 µs.
fn link() -> LinkConfig {
    LinkConfig::default().rate(100_000_000_000).delay(Duration::from_micros(1))
}

impl World {
    fn new(size: u32, seed: u64, link: LinkConfig, options: &Options, each: u32) -> World {
        let network = SimNetwork::new(seed, link).unwrap();
        let mut ranks: Vec<Collectives> = (0..size)
            .map(|rank| {
                let address = IpAddr::from(Ipv4Addr::from(0x0a00_0001 + rank));
                let mut bytes = [0; 32];
                bytes[..8].copy_from_slice(&(seed << 16 | u64::from(rank)).to_ne_bytes());
                let config = Config::default().seed(bytes);
                Collectives::new(Context::open(Box::new(network.port(&[address])), &config).unwrap()).unwrap()
            })
            .collect();
        let of = |rank: u32| options.host(u128::from(rank / each));
        let cards: Vec<Card> = (0..).zip(&mut ranks).map(|(rank, it)| it.card(&of(rank)).unwrap()).collect();
        let join = |(rank, mut it): (u32, Collectives)| {
            let all = it.join_with(rank, &cards, &of(rank)).unwrap();
            (it, all)
        };
        let ranks = (0..).zip(ranks).map(join).collect();
        World { network, ranks, now: Nanos(0) }
    }

    /// Each rank's part of an operation, to its end. Returns the time that it took.
    fn run(&mut self, operation: impl Fn(usize, Communicator) -> Operation) -> Duration {
        let start = self.now;
        let mut requests: Vec<Option<Request>> = Vec::new();
        for (rank, (it, all)) in self.ranks.iter_mut().enumerate() {
            requests.push(Some(it.start(*all, &operation(rank, *all)).unwrap()));
        }
        while requests.iter().any(Option::is_some) {
            let mut moved = false;
            for ((it, _), request) in self.ranks.iter_mut().zip(&mut requests) {
                moved |= it.poll(self.now).unwrap();
                if let Some(ended) = *request
                    && it.has_ended(ended).unwrap()
                {
                    *request = None;
                }
            }
            assert!(self.now.since(start) < Duration::from_secs(60), "no end");
            if moved {
                continue;
            }
            // Nothing happens before the next frame arrives or a timer runs out.
            let arrival = self.network.next_arrival();
            let timers = self.ranks.iter().filter_map(|(it, _)| it.context().next_timeout());
            let looks = self.ranks.iter().map(|(it, _)| it.next_look());
            let next = timers.chain(looks).chain(arrival).min().unwrap();
            self.now = next.max(self.now + Duration::from_nanos(1));
        }
        self.now.since(start)
    }

    fn allocate(&mut self, bytes: usize) -> Vec<Buffer> {
        self.ranks.iter_mut().map(|(it, _)| it.allocate_private(bytes).unwrap()).collect()
    }
}

/// All-reduces `count` elements, checks each, and returns times and a hash of the whole traffic.
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
fn sixty_four_ranks_by_every_algorithm() {
    // Simulated ranks share no memory.
    for algorithm in Algorithm::ALL.into_iter().filter(|algorithm| *algorithm != Algorithm::Mapped) {
        // Direct exchange of more than this takes the test's time, not the algorithm's.
        let count = if algorithm == Algorithm::Direct { 16 } else { 4096 };
        let (times, _) = all_reduce(64, 1, link(), count, Options::default().algorithm(algorithm), 8);
        println!("64 ranks, {count} u64 by {algorithm}: {times:?}");
    }
}

#[test]
fn a_run_repeats_bit_by_bit_and_loss_only_costs_time() {
    let options = Options::default().ack_timeout(Duration::from_millis(2));
    let lossy = || all_reduce(9, 7, link().loss(0.01), 50_000, options.algorithm(Algorithm::Ring), 3);
    let (times, hash) = lossy();
    assert_eq!(lossy(), (times.clone(), hash));
    let (ideal, other) = all_reduce(9, 7, link(), 50_000, options.algorithm(Algorithm::Ring), 3);
    assert!(times[2] > ideal[2] && hash != other, "{times:?} with loss, {ideal:?} without");
}
