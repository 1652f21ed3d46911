//! The flight recorder: finds late ranks, slow ports and hanging ranks from recordings alone. In virtual time.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod world;

use std::fs;
use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::driver::sim::fabric::{Fabric, FabricConfig, HostConfig, SwitchConfig};
use ferroce::{Config, Context, Nanos};
use ferroce_collectives::flight::{Diagnosis, Finding, Recording, Why};
use ferroce_collectives::{
    Algorithm, Card, Collectives, Communicator, DataType, Kind, Operation, Options, Reduction, Request,
};
use world::{World, link};

/// The current contents of the recorders of these ranks, as if each had been dumped now.
fn recordings<'a>(ranks: impl IntoIterator<Item = &'a (Collectives, Communicator)>) -> Vec<Recording> {
    ranks.into_iter().map(|(it, _)| it.flight_recorder().unwrap().read()).collect()
}

fn diagnosis(recordings: &[Recording]) -> Diagnosis {
    let mut all = Diagnosis::all(recordings);
    assert_eq!(all.len(), 1, "{all:?}");
    all.pop().unwrap()
}

/// Polls all ranks that are not `asleep` until the time is reached, or until no operation is outstanding.
fn poll_until(world: &mut World, asleep: &[usize], limit: Nanos, requests: &mut [Option<Request>]) {
    while world.now < limit && requests.iter().any(Option::is_some) {
        let mut moved = false;
        for (rank, ((it, _), request)) in world.ranks.iter_mut().zip(&mut *requests).enumerate() {
            if asleep.contains(&rank) {
                continue;
            }
            moved |= it.poll(world.now).unwrap();
            if request.is_some_and(|request| it.has_ended(request).unwrap()) {
                *request = None;
            }
        }
        if !moved {
            let awake = world
                .ranks
                .iter()
                .enumerate()
                .filter(|(rank, _)| !asleep.contains(rank))
                .map(|(_, (it, _))| it);
            let due = awake.flat_map(|it| it.next_timeout().into_iter().chain([it.next_look()]));
            let next = due.chain(world.network.next_arrival()).min().unwrap_or(limit);
            // Frames queued for sleeping ranks hide the arrival of frames for others.
            let least = Duration::from_nanos(if asleep.is_empty() { 1 } else { 1000 });
            world.now = next.max(world.now + least).min(limit);
        }
    }
}

#[test]
fn a_late_rank_is_named() {
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Tree, Algorithm::Halving] {
        for count in [64, 20_000] {
            let options = Options::default().algorithm(algorithm);
            let mut world = World::new(4, 1, link(), &options, 1);
            let buffers = world.allocate(8 * count);
            let sum = |rank: usize| {
                Operation::all_reduce(buffers[rank], buffers[rank], count, DataType::U64, Reduction::Sum)
            };
            for turn in 0..100 {
                let is_late = turn % 10 == 3;
                let mut requests: Vec<Option<Request>> = Vec::new();
                for (rank, (it, all)) in world.ranks.iter_mut().enumerate() {
                    let is_on_time = !(is_late && rank == 2);
                    requests.push(is_on_time.then(|| it.start(*all, &sum(rank)).unwrap()));
                }
                if is_late {
                    let then = world.now + Duration::from_millis(5);
                    poll_until(&mut world, &[2], then, &mut requests);
                    let (it, all) = &mut world.ranks[2];
                    requests[2] = Some(it.start(*all, &sum(2)).unwrap());
                }
                let limit = world.now + Duration::from_secs(1);
                poll_until(&mut world, &[], limit, &mut requests);
                assert!(world.now < limit, "no end");
            }
            let recordings = recordings(&world.ranks);
            let diagnosis = diagnosis(&recordings);
            let [Finding::Late { rank: 2, operations: 10, of: 100, all, most }] = &diagnosis.findings[..]
            else {
                panic!("{algorithm}, {count}: {diagnosis:?}")
            };
            for time in [*most, *all / 10] {
                assert!((4_900..5_200).contains(&time.as_micros()), "{algorithm}, {count}: {diagnosis}");
            }
            // The operations themselves record it too.
            let late: Vec<u64> = recordings
                .iter()
                .flat_map(|of| &of.communicators[0].operations)
                .filter(|of| of.late.is_some_and(|(rank, _)| rank == 2))
                .map(|of| of.number % 10)
                .collect();
            assert!(!late.is_empty() && late.iter().all(|turn| *turn == 3), "{late:?}");
        }
    }
}

/// Ranks on a switch, each with its own link.
fn star(rates: &[u64], options: &Options) -> (Fabric, Vec<(Collectives, Communicator)>) {
    let fabric = Fabric::new(1, FabricConfig::default()).unwrap();
    let switch = fabric.add_switch(SwitchConfig::default()).unwrap();
    let mut ranks: Vec<Collectives> = (0..)
        .zip(rates)
        .map(|(rank, rate)| {
            let host = fabric.add_host(HostConfig::default(), &[[10, 0, 0, rank + 1].into()]).unwrap();
            let link = LinkConfig::default().rate(*rate).delay(Duration::from_micros(1));
            fabric.link(host, switch, &link).unwrap();
            let config = Config::default().seed([rank; 32]);
            Collectives::new(Context::open(Box::new(fabric.open(host).unwrap()), &config).unwrap()).unwrap()
        })
        .collect();
    let of = |rank: usize| options.host(rank as u128);
    let cards: Vec<Card> =
        ranks.iter_mut().enumerate().map(|(rank, it)| it.card(&of(rank)).unwrap()).collect();
    let join = |(rank, mut it): (usize, Collectives)| {
        let all = it.join_with(rank as u32, &cards, &of(rank)).unwrap();
        (it, all)
    };
    let ranks = ranks.into_iter().enumerate().map(join).collect();
    (fabric, ranks)
}

#[test]
fn a_port_of_half_the_speed_is_named() {
    const FULL: u64 = 10_000_000_000;
    for (slow, algorithm, count) in [
        (2, Algorithm::Ring, 1 << 20),
        (0, Algorithm::Ring, 1 << 20),
        (1, Algorithm::TwoStep, 1 << 20),
        (2, Algorithm::Ring, 1 << 18),
        (1, Algorithm::TwoStep, 1 << 18),
    ] {
        let mut rates = [FULL; 4];
        rates[slow] /= 2;
        let (fabric, mut ranks) = star(&rates, &Options::default().algorithm(algorithm));
        let buffers: Vec<_> =
            ranks.iter_mut().map(|(it, _)| it.allocate_private(4 * count).unwrap()).collect();
        let mut now = Nanos(0);
        for _ in 0..(9 << 20) / count {
            let mut requests: Vec<Option<Request>> = ranks
                .iter_mut()
                .zip(&buffers)
                .map(|((it, all), buffer)| {
                    let sum = Operation::all_reduce(*buffer, *buffer, count, DataType::F32, Reduction::Sum);
                    Some(it.start(*all, &sum).unwrap())
                })
                .collect();
            while requests.iter().any(Option::is_some) {
                let mut moved = false;
                for ((it, _), request) in ranks.iter_mut().zip(&mut requests) {
                    moved |= it.poll(now).unwrap();
                    if request.is_some_and(|request| it.has_ended(request).unwrap()) {
                        *request = None;
                    }
                }
                assert!(now < Nanos(20_000_000_000), "no end");
                if !moved {
                    let timers = ranks.iter().filter_map(|(it, _)| it.next_timeout());
                    let looks = ranks.iter().map(|(it, _)| it.next_look());
                    now = timers
                        .chain(looks)
                        .chain(fabric.next_event())
                        .min()
                        .unwrap()
                        .max(now + Duration::from_nanos(1));
                }
            }
        }
        let diagnosis = diagnosis(&recordings(&ranks));
        let [Finding::SlowPort { rank, bytes_per_second, others, .. }] = &diagnosis.findings[..] else {
            panic!("rank {slow}, {algorithm}, {count} elements: {diagnosis:?}")
        };
        println!("{algorithm}: {diagnosis}");
        assert_eq!(*rank as usize, slow);
        assert!(
            bytes_per_second * 8.0 < 0.52 * FULL as f64 && *others > 1.4 * bytes_per_second,
            "{diagnosis}"
        );
    }
}

#[test]
fn equally_fast_punctual_ranks_are_not_named() {
    for algorithm in [Algorithm::Ring, Algorithm::TwoStep, Algorithm::Direct] {
        let mut world = World::new(4, 1, link(), &Options::default().algorithm(algorithm), 1);
        let buffers = world.allocate(4 << 20);
        for _ in 0..5 {
            world.run(|rank, _| {
                Operation::all_reduce(buffers[rank], buffers[rank], 1 << 20, DataType::F32, Reduction::Sum)
            });
        }
        let diagnosis = diagnosis(&recordings(&world.ranks));
        assert_eq!((diagnosis.findings, diagnosis.missing), (vec![], vec![]), "{algorithm}");
    }
}

/// Calls three operations at all ranks, and starts a fourth at those that are not `silent`; then `seconds` pass in which
/// those that are `asleep` do not poll.
fn hang(silent: &[usize], asleep: &[usize], seconds: u64) -> World {
    let options = Options::default().algorithm(Algorithm::Ring).ack_timeout(Duration::from_secs(10));
    let mut world = World::new(4, 1, link(), &options, 1);
    let buffers = world.allocate(800);
    let sum =
        |rank: usize| Operation::all_reduce(buffers[rank], buffers[rank], 100, DataType::U64, Reduction::Sum);
    for _ in 0..3 {
        world.run(|rank, _| sum(rank));
    }
    let mut requests: Vec<Option<Request>> = Vec::new();
    for (rank, (it, all)) in world.ranks.iter_mut().enumerate() {
        let calls = !silent.contains(&rank);
        requests.push(calls.then(|| it.start(*all, &sum(rank)).unwrap()));
    }
    let limit = world.now + Duration::from_secs(seconds);
    poll_until(&mut world, asleep, limit, &mut requests);
    world
}

/// As if taken on a running system: in virtual time no clock advances.
fn taken_then(world: &World) -> Vec<Recording> {
    let mut recordings = recordings(&world.ranks);
    let last = recordings.iter().map(|recording| recording.polled).max().unwrap();
    recordings.iter_mut().for_each(|recording| recording.taken = last);
    recordings
}

#[test]
fn the_rank_that_others_wait_for_is_named() {
    let call = "call 3, all_reduce of 100 u64 (sum), by ring";
    // It polls, but its program has not called the operation.
    let world = hang(&[2], &[], 3);
    let found = diagnosis(&taken_then(&world));
    let [
        Finding::Hangs {
            rank: 2,
            why: Why::HasNotCalled { calls: 3, last: Some((last, _)), .. },
            operation,
            waiting,
            waited,
        },
    ] = &found.findings[..]
    else {
        panic!("{found:?}")
    };
    assert!(operation == call && waiting == &[0, 1, 3] && *waited > Duration::from_secs(2), "{found}");
    assert!(last.starts_with("call 2, all_reduce"), "{found}");
    assert!(found.to_string().contains("and it polls: its program does something else"), "{found}");

    // The clocks of its recording and the others' are the same, and the others' recordings show the same without its own.
    let others: Vec<Recording> =
        taken_then(&world).into_iter().filter(|of| of.communicators[0].rank != 2).collect();
    let found = diagnosis(&others);
    assert!(matches!(&found.findings[..], [Finding::Hangs { rank: 2, why: Why::Unknown, .. }]), "{found:?}");
    assert_eq!(found.missing, [2]);
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let mut world = World::new(2, 1, link(), &Options::default(), 1);
    let buffers = world.allocate(800);
    let mut requests: Vec<Option<Request>> = Vec::new();
    for (rank, (it, all)) in world.ranks.iter_mut().enumerate() {
        let receive = Operation::receive(buffers[rank], 100, DataType::U64, 1 - rank as u32);
        requests.push(Some(it.start(*all, &receive).unwrap()));
    }
    let limit = world.now + Duration::from_secs(3);
    poll_until(&mut world, &[], limit, &mut requests);
    let found = diagnosis(&taken_then(&world));
    let [Finding::Deadlock { ranks, .. }] = &found.findings[..] else { panic!("{found:?}") };
    assert_eq!(ranks.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1], "{found}");
}

/// The default chunk size in bytes.
const CHUNK: u64 = (256 << 10) - 64;

#[test]
fn a_recording_contains_the_operations() {
    let mut world = World::new(2, 1, link(), &Options::default(), 1);
    let (buffers, outputs) = (world.allocate(4 << 20), world.allocate(4 << 20));
    for turn in 0..300 {
        world.run(|rank, _| match turn {
            299 => Operation::all_gather(buffers[rank], outputs[rank], 1 << 18, DataType::F32),
            _ => Operation::all_reduce(buffers[rank], buffers[rank], 16, DataType::F32, Reduction::Max),
        });
    }
    let recordings = recordings(&world.ranks);
    for (rank, recording) in recordings.iter().enumerate() {
        assert_eq!((recording.process, &*recording.device), (std::process::id(), ["sim0", "sim1"][rank]));
        let [own] = &recording.communicators[..] else { panic!("{recording:?}") };
        assert_eq!((own.rank as usize, own.size, own.calls, own.forgotten), (rank, 2, 300, 44));
        assert!(own.failure.is_none() && !own.has_left && own.under_way().next().is_none());
        let numbers: Vec<u64> = own.operations.iter().map(|of| of.number).collect();
        assert_eq!(numbers, (44..300).collect::<Vec<u64>>());
        let last = own.operations.last().unwrap();
        assert_eq!((last.call, last.kind, last.bytes), (Some(299), Kind::AllGather, 2 << 20));
        assert!(
            last.began.unwrap() <= last.first.unwrap() && last.first <= last.last && last.last <= last.ended
        );
        let peer = own.peers.iter().find(|peer| peer.peer as usize == 1 - rank).unwrap();
        assert_eq!((peer.sent_bytes, peer.received_bytes), (299 * 64 + (1 << 20), 299 * 64 + (1 << 20)));
        // The rest is sent with a header.
        assert_eq!(peer.chunk_bytes, (1 << 20) / CHUNK * CHUNK);
        assert!(peer.qp > 0 && !peer.sending.is_zero());
    }
}

/// A program that creates and leaves communicators: those left last stay recorded.
#[test]
fn the_communicators_left_last_stay_recorded() {
    let options = Options::default();
    let mut world = World::new(1, world_seed(), link(), &options, 1);
    let (it, _) = &mut world.ranks[0];
    let ids = |it: &Collectives, has_left: bool| -> Vec<u64> {
        let recording = it.flight_recorder().unwrap().read();
        recording.communicators.iter().filter(|own| own.has_left == has_left).map(|own| own.id).collect()
    };
    let own = ids(it, false)[0];
    let mut left = Vec::new();
    for _ in 0..100 {
        let card = it.card(&options).unwrap();
        let other = it.join_with(0, &[card], &options).unwrap();
        left.extend(ids(it, false).into_iter().filter(|id| *id != own));
        it.leave(other).unwrap();
    }
    let (mut due, mut recorded) = (left[left.len() - 63..].to_vec(), ids(it, true));
    due.sort_unstable();
    recorded.sort_unstable();
    assert_eq!(recorded, due);
}

#[test]
fn a_dump_does_not_follow_links() {
    let world = hang(&[2], &[], 2);
    let folder = std::env::temp_dir().join(format!("ferroce-flight-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let path = folder.join("dump");
    let victim = folder.join("victim");
    fs::write(&victim, "of somebody").unwrap();
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    let recorder = world.ranks[0].0.flight_recorder().unwrap();
    recorder.dump(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let read = Recording::parse(&bytes).unwrap();
    assert_eq!(read.communicators, recorder.read().communicators);
    assert_eq!(fs::read(&victim).unwrap(), b"of somebody");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    assert!(recorder.dump(&folder.join("none/dump")).is_err());
    fs::remove_dir_all(&folder).unwrap();

    // A truncated file is refused.
    for cut in (100..bytes.len()).step_by(997).chain([256, bytes.len() - 1]) {
        assert!(Recording::parse(&bytes[..cut]).unwrap_err().to_string().contains("cut off"), "{cut}");
    }
    assert!(Recording::parse(b"no recording").unwrap_err().to_string().contains("does not begin like one"));
}

#[test]
fn corrupted_recordings_are_harmless() {
    let seed = world_seed();
    println!("replay: FERROCE_SEED={seed} cargo test -p ferroce-collectives --test flight what_is_spoilt");
    let world = hang(&[2], &[], 2);
    let folder = std::env::temp_dir().join(format!("ferroce-flight-spoilt-{}", std::process::id()));
    world.ranks[0].0.flight_recorder().unwrap().dump(&folder).unwrap();
    let bytes = fs::read(&folder).unwrap();
    fs::remove_file(&folder).unwrap();
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let others = recordings(&world.ranks[1..]);
    for _ in 0..2000 {
        let mut bytes = bytes.clone();
        for _ in 0..random() % 64 {
            let at = 8 + random() as usize % (bytes.len() - 8);
            // Mostly in fields that are in use.
            let at = if random() % 4 == 0 { at } else { 8 + at % 1200 };
            bytes[at] = random() as u8;
        }
        // If its length is corrupted, the file is truncated.
        let recording = Recording::parse(&bytes).unwrap_or_default();
        let all: Vec<Recording> = others.iter().cloned().chain([recording]).collect();
        for diagnosis in Diagnosis::all(&all) {
            assert!(!diagnosis.to_string().contains(|c: char| c.is_control() && c != '\n'), "{diagnosis}");
        }
    }
}

/// From the environment, or from the time.
fn world_seed() -> u64 {
    let given = std::env::var("FERROCE_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64)
}
