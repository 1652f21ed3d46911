//! Ranks in one thread, on a simulated network in virtual time.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, SimNetwork};
use ferroce::{Config, Context, Nanos};
use ferroce_collectives::{Buffer, Card, Collectives, Communicator, Operation, Options, Request};

pub(crate) struct World {
    pub(crate) network: SimNetwork,
    pub(crate) ranks: Vec<(Collectives, Communicator)>,
    pub(crate) now: Nanos,
}

/// A link of a data center: 100 Gb/s, 1 µs.
pub(crate) fn link() -> LinkConfig {
    LinkConfig::default().rate(100_000_000_000).delay(Duration::from_micros(1))
}

impl World {
    pub(crate) fn new(size: u32, seed: u64, link: LinkConfig, options: &Options, each: u32) -> World {
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

    /// Executes each rank's part of an operation. Returns the duration.
    pub(crate) fn run(&mut self, operation: impl Fn(usize, Communicator) -> Operation) -> Duration {
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
            self.advance(None);
        }
        self.now.since(start)
    }

    /// Advances to the next event, the arrival of a frame or the expiry of a timer. Not beyond `limit`.
    pub(crate) fn advance(&mut self, limit: Option<Nanos>) {
        let arrival = self.network.next_arrival();
        let timers = self.ranks.iter().filter_map(|(it, _)| it.next_timeout());
        let looks = self.ranks.iter().map(|(it, _)| it.next_look());
        let next = timers.chain(looks).chain(arrival).chain(limit).min().unwrap();
        self.now = next.max(self.now + Duration::from_nanos(1));
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Vec<Buffer> {
        self.ranks.iter_mut().map(|(it, _)| it.allocate_private(bytes).unwrap()).collect()
    }
}
