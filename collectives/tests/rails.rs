//! Several ports per rank, in a simulated fabric in virtual time: a star for each rail.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::driver::sim::fabric::{Built, FabricConfig, SwitchConfig, Topology};
use ferroce::{Config, Context, Memory, Nanos};
use ferroce_collectives::flight::{Diagnosis, Finding, Recording};
use ferroce_collectives::{
    Algorithm, Buffer, Card, Collectives, Communicator, DataType, Error, MAX_RAILS, Operation, Options,
    Reduction, Request,
};

const GIGABIT: u64 = 1_000_000_000;

/// Ranks with one host of the fabric for each rail: rank r's host on rail k has number k · ranks + r, and so has its link.
struct World {
    fabric: Built,
    ranks: Vec<(Collectives, Communicator)>,
    buffers: Vec<Buffer>,
    now: Nanos,
}

impl World {
    /// With rails of these rates, in bits per second; a rank has `rails(rank)` of them.
    fn new(size: usize, rates: &[u64], rails: impl Fn(usize) -> usize, options: &Options) -> World {
        let mut topology = Topology::default();
        for rate in rates {
            let switch = topology.add_switch(SwitchConfig::default());
            let link = LinkConfig::default().rate(*rate).delay(Duration::from_micros(1));
            topology.add_hosts(size, switch, &link);
        }
        let fabric = topology.build(1, FabricConfig::default()).unwrap();
        let open = |rank: usize, rail: usize| {
            let port = fabric.fabric.open(fabric.hosts[rail * size + rank]).unwrap();
            let mut seed = [0; 32];
            seed[..2].copy_from_slice(&[rank as u8, rail as u8]);
            Context::open(Box::new(port), &Config::default().seed(seed)).unwrap()
        };
        let mut ranks = Vec::new();
        for rank in 0..size {
            let mut it = Collectives::new(open(rank, 0)).unwrap();
            (1..rails(rank)).for_each(|rail| it.add_rail(open(rank, rail)).unwrap());
            ranks.push(it);
        }
        let of = |rank: usize| options.host(rank as u128);
        let cards: Vec<Card> =
            ranks.iter_mut().enumerate().map(|(rank, it)| it.card(&of(rank)).unwrap()).collect();
        let join = |(rank, mut it): (usize, Collectives)| {
            let all = it.join_with(rank as u32, &cards, &of(rank)).unwrap();
            (it, all)
        };
        let ranks = ranks.into_iter().enumerate().map(join).collect();
        World { fabric, ranks, buffers: Vec::new(), now: Nanos(0) }
    }

    fn size(&self) -> u64 {
        self.ranks.len() as u64
    }

    /// Takes the link of a rank's rail down, or up, at a time.
    fn set_link(&self, rank: usize, rail: usize, is_up: bool, time: Nanos) {
        let link = self.fabric.links[rail * self.ranks.len() + rank];
        self.fabric.fabric.set_link(link, is_up, time);
    }

    /// All-reduces `count` elements in separate memory, and checks each. Returns the duration.
    fn all_reduce(&mut self, count: usize) -> Duration {
        self.buffers.clear();
        for (it, all) in &mut self.ranks {
            let buffer = it.allocate(count * 8).unwrap();
            let element = |i: usize| (i as u64) << 20 | u64::from(all.rank() + 1);
            let bytes: Vec<u8> = (0..count).flat_map(|i| element(i).to_ne_bytes()).collect();
            it.write(buffer, 0, &bytes).unwrap();
            self.buffers.push(buffer);
        }
        let time =
            self.run(|buffer, _| Operation::all_reduce(buffer, buffer, count, DataType::U64, Reduction::Sum));
        let ranks = self.size();
        let mut bytes = vec![0; count * 8];
        for ((it, all), buffer) in self.ranks.iter_mut().zip(&self.buffers) {
            it.read(*buffer, 0, &mut bytes).unwrap();
            for (i, bytes) in bytes.as_chunks::<8>().0.iter().enumerate() {
                let due = ((i as u64 * ranks) << 20) + ranks * (ranks + 1) / 2;
                assert_eq!(u64::from_ne_bytes(*bytes), due, "rank {}, element {i}", all.rank());
            }
            it.deregister(*buffer).unwrap();
        }
        time
    }

    /// Polls for this time.
    fn idle(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let mut moved = false;
            for (it, _) in &mut self.ranks {
                moved |= it.poll(self.now).unwrap();
            }
            if !moved {
                self.now = self.next_event().max(self.now + Duration::from_nanos(1)).min(end);
            }
            self.fabric.fabric.advance(self.now);
        }
    }

    /// The time of the next event, of ranks or in the fabric.
    fn next_event(&self) -> Nanos {
        let timers =
            self.ranks.iter().flat_map(|(it, _)| it.next_timeout().into_iter().chain([it.next_look()]));
        timers.chain(self.fabric.fabric.next_event()).min().unwrap()
    }

    /// Executes each rank's part of an operation on its buffer. Returns the duration.
    fn run(&mut self, operation: impl Fn(Buffer, Communicator) -> Operation) -> Duration {
        self.try_run(operation).into_iter().map(Result::unwrap).max().unwrap()
    }

    fn try_run(
        &mut self,
        operation: impl Fn(Buffer, Communicator) -> Operation,
    ) -> Vec<Result<Duration, Error>> {
        self.run_with_pauses(operation, |_, _| false)
    }

    /// As [`try_run`](World::try_run); a rank for which `is_away` is true at a time does not poll.
    fn run_with_pauses(
        &mut self,
        operation: impl Fn(Buffer, Communicator) -> Operation,
        is_away: impl Fn(u32, Nanos) -> bool,
    ) -> Vec<Result<Duration, Error>> {
        let start = self.now;
        let mut requests: Vec<Result<Request, Result<Duration, Error>>> = Vec::new();
        for ((it, all), buffer) in self.ranks.iter_mut().zip(&self.buffers) {
            requests.push(Ok(it.start(*all, &operation(*buffer, *all)).unwrap()));
        }
        while requests.iter().any(Result::is_ok) {
            let mut moved = false;
            for ((it, all), request) in self.ranks.iter_mut().zip(&mut requests) {
                if is_away(all.rank(), self.now) {
                    continue;
                }
                moved |= it.poll(self.now).unwrap();
                let Ok(under_way) = *request else { continue };
                match it.has_ended(under_way) {
                    Ok(false) => {}
                    Ok(true) => *request = Err(Ok(self.now.since(start))),
                    Err(error) => *request = Err(Err(error)),
                }
            }
            assert!(self.now.since(start) < Duration::from_secs(60), "no end");
            if !moved {
                let now = self.now;
                let timers = self
                    .ranks
                    .iter()
                    .filter(|(_, all)| !is_away(all.rank(), now))
                    .flat_map(|(it, _)| it.next_timeout().into_iter().chain([it.next_look()]));
                let next = timers.chain(self.fabric.fabric.next_event()).min().unwrap();
                // Frames queued for ranks that are away hide the arrival of frames for others.
                let least =
                    if self.ranks.iter().any(|(_, all)| is_away(all.rank(), now)) { 10_000 } else { 1 };
                self.now = next.max(self.now + Duration::from_nanos(least));
            }
            self.fabric.fabric.advance(self.now);
        }
        requests.into_iter().filter_map(Result::err).collect()
    }
}

fn ring() -> Options {
    Options::default().algorithm(Algorithm::Ring)
}

const COUNT: usize = (64 << 20) / 8;

/// The time of 64 MiB with ranks with rails of these rates, once they are connected.
fn time(size: usize, rates: &[u64], options: &Options) -> Duration {
    let mut world = World::new(size, rates, |_| rates.len(), options);
    world.all_reduce(1 << 17);
    world.all_reduce(COUNT)
}

/// The fabric has no noise, so two numbers are compared that are the same in each run.
#[test]
fn two_rails_move_twice_as_much_as_one() {
    // In a tree fewer chunks are outstanding between two ranks.
    for (algorithm, size, aim) in [
        (Algorithm::Ring, 2, 1.95),
        (Algorithm::Ring, 4, 1.95),
        (Algorithm::Halving, 4, 1.95),
        (Algorithm::Tree, 3, 1.8),
    ] {
        let options = Options::default().algorithm(algorithm);
        let one = time(size, &[100 * GIGABIT], &options);
        let two = time(size, &[100 * GIGABIT; 2], &options);
        let ratio = one.as_secs_f64() / two.as_secs_f64();
        println!(
            "64 MiB, {size} ranks, {algorithm}: {one:?} by one rail of 100 Gb/s, {two:?} by two: {ratio:.3}"
        );
        assert!(ratio >= aim, "{ratio}");
    }
}

#[test]
fn rails_are_loaded_by_their_throughput() {
    let one = time(2, &[100 * GIGABIT], &ring());
    for (rates, aim) in [(&[100, 50][..], 1.4), (&[50, 100], 1.4), (&[100, 100, 100, 100], 3.8)] {
        let rates: Vec<u64> = rates.iter().map(|rate| rate * GIGABIT).collect();
        let several = time(2, &rates, &ring());
        let ratio = one.as_secs_f64() / several.as_secs_f64();
        println!("64 MiB: {one:?} by one rail of 100 Gb/s, {several:?} by rails of {rates:?}: {ratio:.3}");
        assert!(ratio >= aim, "{rates:?}: {ratio}");
    }
}

#[test]
fn a_failed_rail_is_left_and_used_again_after_recovery() {
    for rail in [0, 1] {
        for size in [2, 4] {
            let mut world = World::new(size, &[100 * GIGABIT; 2], |_| 2, &ring());
            world.all_reduce(1 << 17);
            let whole = world.all_reduce(COUNT / 4);
            world.set_link(size - 1, rail, false, world.now + whole / 2);
            let cut = world.all_reduce(COUNT / 4);
            let left: u64 = world.ranks.iter().map(|(it, _)| left(it)).sum();
            assert!(left >= 2, "both ends have left it: {left}");
            let without = world.all_reduce(COUNT / 4);
            let neighbours: Vec<(u32, u32)> = if size == 2 {
                vec![(0, 1)]
            } else {
                vec![(0, size as u32 - 1), (size as u32 - 2, size as u32 - 1)]
            };
            let named = |ranks| Finding::RailLeft { ranks, rail: rail as u32 };
            assert_eq!(rails_left(&world), neighbours.into_iter().map(named).collect::<Vec<_>>());
            println!(
                "16 MiB, {size} ranks: {whole:?} by two rails; rail {rail} of rank {} cut in the middle: {cut:?}; without it: {without:?}",
                size - 1
            );
            // A quarter of the retry budget without an answer, and the retransmission of the outstanding messages.
            assert!(cut < Duration::from_millis(1500), "{cut:?}");
            assert!(without > whole * 3 / 2 && without < whole * 5 / 2, "{without:?}");
            world.set_link(size - 1, rail, true, world.now);
            // A hello is sent with each operation, at limited intervals.
            world.now = world.now + Duration::from_secs(2);
            world.all_reduce(COUNT / 4);
            let back = world.all_reduce(COUNT / 4);
            println!("back again: {back:?}");
            assert_eq!(rails_left(&world), []);
            assert!(back < whole * 21 / 20, "{back:?} in place of {whole:?}");
        }
    }
}

/// It can be connected, and fails again: for example with a loose plug, or a switch that drops long packets.
#[test]
fn a_rail_that_fails_repeatedly_is_retried_less_often() {
    const TURNS: usize = 24;
    let options = ring().ack_timeout(Duration::from_millis(4)).probe_interval(Duration::from_millis(10));
    let mut world = World::new(2, &[100 * GIGABIT; 2], |_| 2, &options);
    world.all_reduce(1 << 17);
    let whole = world.all_reduce(1 << 20);
    let mut held_up = 0;
    for _ in 0..TURNS {
        world.set_link(1, 1, false, world.now + whole / 4);
        let time = world.all_reduce(1 << 20);
        held_up += usize::from(time > whole * 5 / 2);
        world.set_link(1, 1, true, world.now);
        // More than enough to connect.
        world.idle(options.retry_budget());
    }
    println!("{held_up} of {TURNS} operations were held up by the rail");
    // Pauses of 0 to 1/4, 1/4, 1/2, 1, 2, 4, 8 and 16 budgets.
    assert!((2..=8).contains(&held_up), "{held_up} of {TURNS}");
    // After it has worked for long, earlier failures do not count.
    world.idle(options.retry_budget() * 40);
    let back = world.all_reduce(1 << 20);
    assert!(back < whole * 21 / 20, "{back:?} in place of {whole:?}");
}

#[test]
fn a_pause_of_a_rank_is_not_a_rail_failure() {
    let mut world = World::new(3, &[100 * GIGABIT; 2], |_| 2, &ring());
    let whole = world.all_reduce(COUNT);
    // Between operations.
    for pause in [1200, 2500, 4000] {
        world.now = world.now + Duration::from_millis(pause);
        world.all_reduce(1 << 17);
    }
    // During an operation.
    for pause in [600, 1200, 2500, 4000] {
        world.buffers.clear();
        for (it, _) in &mut world.ranks {
            world.buffers.push(it.allocate(COUNT * 8).unwrap());
        }
        let away = world.now + whole / 2;
        let ends = world.run_with_pauses(
            |buffer, _| Operation::all_reduce(buffer, buffer, COUNT, DataType::U64, Reduction::Sum),
            |rank, now| rank == 1 && now >= away && now < away + Duration::from_millis(pause),
        );
        println!("away for {pause} ms: {ends:?}");
        assert!(ends.iter().all(Result::is_ok), "{ends:?}");
        for ((it, _), buffer) in world.ranks.iter_mut().zip(&world.buffers) {
            it.deregister(*buffer).unwrap();
        }
    }
    let left: Vec<u64> = world.ranks.iter().map(|(it, _)| left(it)).collect();
    assert_eq!(left, [0, 0, 0], "rails that were left though none has failed");
}

/// Messages are sent in one direction, so only credits are sent back: the rail fails at any moment, even if only a credit
/// is outstanding.
#[test]
fn a_credit_lost_with_a_rail_is_sent_again() {
    let options = ring()
        .chunk_bytes(1024)
        .eager_bytes(64)
        .ack_timeout(Duration::from_millis(4))
        .probe_interval(Duration::from_millis(10))
        .stall_timeout(Duration::from_secs(1));
    const FEW: usize = (256 << 10) / 8;
    for step in 0..250 {
        let mut world = World::new(2, &[100 * GIGABIT; 2], |_| 2, &options);
        world.all_reduce(1024);
        world.buffers.clear();
        for (it, _) in &mut world.ranks {
            world.buffers.push(it.allocate(FEW * 8).unwrap());
        }
        let cut = world.now + Duration::from_nanos(200 * step);
        world.set_link(1, 0, false, cut);
        let ends = world
            .try_run(|buffer, _| Operation::reduce(buffer, buffer, FEW, DataType::U64, Reduction::Sum, 1));
        assert!(ends.iter().all(Result::is_ok), "cut after {} ns: {ends:?}", 200 * step);
    }
}

/// The number of rails left, from the metrics.
fn left(it: &Collectives) -> u64 {
    let of = |line: &str| {
        line.starts_with("ferroce_collective_rails_left_total{")
            .then(|| line.rsplit(' ').next()?.parse::<f64>().ok())?
    };
    let metrics = (0..it.rails()).map(|rail| it.rail(rail).unwrap().metrics().to_string());
    metrics.map(|text| text.lines().filter_map(of).sum::<f64>() as u64).sum()
}

/// The findings about rails from the flight recorders of all ranks.
fn rails_left(world: &World) -> Vec<Finding> {
    let recordings: Vec<Recording> =
        world.ranks.iter().map(|(it, _)| it.flight_recorder().unwrap().read()).collect();
    let findings = Diagnosis::all(&recordings).into_iter().flat_map(|diagnosis| diagnosis.findings);
    findings.filter(|finding| matches!(finding, Finding::RailLeft { .. })).collect()
}

#[test]
fn a_rail_dies_at_any_moment_of_any_operation() {
    let seed = std::env::var("FERROCE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u64);
    println!("FERROCE_SEED={seed} cargo test -p ferroce-collectives --test rails -- --nocapture any_moment");
    let mut state = seed;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for turn in 0..20 {
        let (size, rails) = (2 + draw(4) as usize, 2 + draw(2) as usize);
        let options = Options::default()
            .algorithm([None, Some(Algorithm::Ring), Some(Algorithm::Tree)][draw(3) as usize])
            .ack_timeout(Duration::from_millis(4))
            .probe_interval(Duration::from_millis(10));
        let mut world = World::new(size, &vec![10 * GIGABIT; rails], |_| rails, &options);
        let count = 1 << draw(18);
        let mut whole = world.all_reduce(count);
        for _ in 0..3 {
            let (rank, rail) = (draw(size as u64) as usize, draw(rails as u64) as usize);
            let cut = world.now + whole.mul_f64(draw(1000) as f64 / 700.0);
            world.set_link(rank, rail, false, cut);
            if draw(2) == 0 {
                // While it is left, or before any rank has detected that it was down.
                let back = world.now + whole.mul_f64(1.5) + Duration::from_micros(draw(60_000));
                world.set_link(rank, rail, true, back);
            }
            let times: Vec<Duration> = (0..3).map(|_| world.all_reduce(count)).collect();
            println!(
                "turn {turn}: {size} ranks, {count} elements, rail {rail} of {rails} of rank {rank}: {whole:?}, {times:?}"
            );
            // It recovers before another one fails.
            world.set_link(rank, rail, true, world.now.max(cut + Duration::from_millis(61)));
            for _ in 0..20 {
                world.now = world.now + Duration::from_millis(20);
                whole = world.all_reduce(count.min(1 << 12));
            }
            whole = whole.max(world.all_reduce(count));
        }
    }
}

#[test]
fn a_rail_that_is_dead_from_the_start_is_reported() {
    for rail in [0, 1] {
        let options = ring().ack_timeout(Duration::from_millis(4)).probe_interval(Duration::from_millis(10));
        let mut world = World::new(2, &[100 * GIGABIT; 2], |_| 2, &options);
        world.set_link(1, rail, false, world.now);
        world.idle(options.retry_budget());
        while world.now.since(Nanos(0)) < 2 * options.retry_budget() {
            world.all_reduce(1 << 17);
        }
        let left: Vec<u64> = world.ranks.iter().map(|(it, _)| left(it)).collect();
        assert_eq!(left, [1, 1], "rail {rail}");
        assert_eq!(rails_left(&world), [Finding::RailLeft { ranks: (0, 1), rail: rail as u32 }]);
        world.set_link(1, rail, true, world.now);
        world.idle(options.retry_budget());
        let both = world.all_reduce(COUNT);
        assert_eq!(rails_left(&world), []);
        assert!(both < Duration::from_millis(4), "64 MiB by two rails: {both:?}");
    }
}

#[test]
fn a_rank_without_any_rail_is_lost() {
    let options = ring().ack_timeout(Duration::from_millis(4)).probe_interval(Duration::from_millis(10));
    let mut world = World::new(3, &[100 * GIGABIT; 2], |_| 2, &options);
    let whole = world.all_reduce(COUNT);
    for rail in [0, 1] {
        world.set_link(1, rail, false, world.now + whole / 2);
    }
    for it in 0..3 {
        let buffer = world.ranks[it].0.allocate(COUNT * 8).unwrap();
        if it == 0 {
            world.buffers.clear()
        }
        world.buffers.push(buffer);
    }
    let start = world.now;
    let ends = world
        .try_run(|buffer, _| Operation::all_reduce(buffer, buffer, COUNT, DataType::U64, Reduction::Sum));
    let waited = world.now.since(start);
    println!("{waited:?}: {ends:?}");
    // As with one rail: if one rail is silent like the one before, no further one is waited for.
    assert!(
        waited < options.retry_budget() * 6 / 5,
        "{waited:?} with a budget of {:?}",
        options.retry_budget()
    );
    for end in [&ends[0], &ends[2]] {
        let Err(Error::Failed { cause, .. }) = end else { panic!("{end:?}") };
        assert!(cause.to_string().contains("rank 1"), "{cause}");
    }
    assert!(ends[1].is_err());
}

#[test]
fn ranks_with_fewer_rails_use_their_common_rails() {
    let mut world = World::new(3, &[100 * GIGABIT; 2], |rank| if rank == 1 { 1 } else { 2 }, &ring());
    world.all_reduce(1 << 17);
    for rank in 0..3 {
        assert_eq!(world.ranks[rank].0.rails(), if rank == 1 { 1 } else { 2 });
    }
    for (it, all) in world.ranks.drain(..) {
        // The others are in the same thread, so ranks can't leave in a blocking call.
        drop((it, all));
    }
}

#[test]
fn invalid_use_is_refused_with_the_valid_values() {
    let mut world = World::new(2, &[GIGABIT; 2], |_| 2, &ring());
    let other = World::new(1, &[GIGABIT; 9], |_| MAX_RAILS, &ring());
    let (it, _) = &mut world.ranks[0];
    let owned = it.register(Memory::zeroed(64).unwrap()).unwrap_err().to_string();
    assert_eq!(
        owned,
        "memory = owned: memory that the contexts of several rails can have: Memory::shared, or Collectives::allocate"
    );
    let shared = it.register(Memory::shared(64).unwrap()).unwrap();
    it.deregister(shared).unwrap();
    let port = other.fabric.fabric.open(other.fabric.hosts[8]).unwrap();
    let late =
        it.add_rail(Context::open(Box::new(port), &Config::default()).unwrap()).unwrap_err().to_string();
    assert_eq!(late, "rail = 2: add rails before cards, communicators and buffers are made");
    assert!(it.rail(1).is_some() && it.rail(2).is_none());
}
