//! Copies that fail, a lost device, objects destroyed during copies.

use std::time::Duration;

use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::pair::{End, Setup};

use super::world::World;

const LATE: Duration = Duration::from_millis(10);

fn sge(mr: Mr, length: usize) -> Sge {
    Sge { mr, offset: 0, length: length as u32 }
}

/// The work request of an end, from and to device memory.
fn post(world: &mut World, op: usize, len: usize) {
    let to = world.remote_device[1].at(0);
    let op = [SendOp::Write(to), SendOp::Read(to), SendOp::Send][op];
    world.post_recv(1, 7, &[sge(world.device[1], len)]);
    world.post(0, 1, op, &[sge(world.device[0], len)]);
}

#[test]
fn a_copy_that_fails_ends_the_work_request_in_error() {
    let mut random = Random::from_env("FERROCE_DEVICE_SEED");
    let mut ends = [0; 3];
    for round in 0..60 {
        let strict = Strict::default().fails_one_in(3).latest(Duration::from_micros(100));
        let setup = Setup { selective_repeat: round % 2 == 1, timeout: 14, ..Setup::default() };
        let mut world = World::new(round, LinkConfig::default(), setup, &strict, 1 << 17);
        let sources = [0, 1].map(|end| world.fill(end, world.device[end], &mut random));
        let (op, len) = (round as usize % 3, 1 + random.below(1 << 17) as usize);
        post(&mut world, op, len);
        let completion = world.completion(0);
        ends[usize::from(completion.status != WcStatus::Success)] += 1;
        match completion.status {
            WcStatus::Success if op == 1 => {
                assert_eq!(world.read(0, world.device[0], 0, len), sources[1][..len])
            }
            WcStatus::Success => assert_eq!(world.read(1, world.device[1], 0, len), sources[0][..len]),
            // Here, or at the peer.
            WcStatus::FatalErr => {}
            WcStatus::RemOpErr => {
                ends[2] += 1;
                world.settle();
                let told = world.come(1).map(|receive| receive.status);
                let event = world.pair.ends[1].context.next_event().is_some();
                assert!(matches!(told, Some(WcStatus::FatalErr | WcStatus::WrFlushErr)) || event, "{told:?}");
            }
            other => panic!("round {round}: {other}, {len} bytes; {}", world.counted()),
        }
        world.end();
    }
    assert!(ends.iter().all(|count| *count > 5), "{ends:?}");
}

#[test]
fn a_device_that_is_lost_ends_everything() {
    for (end, op) in [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)] {
        let setup = Setup { timeout: 14, ..Setup::default() };
        let strict = Strict::default().latest(LATE);
        let mut world = World::new(3, LinkConfig::default(), setup, &strict, 1 << 20);
        post(&mut world, op, 1 << 20);
        for _ in 0..4 {
            world.step();
        }
        world.devices[end].lose();
        let status = world.completion(0).status;
        assert!(
            matches!(status, WcStatus::FatalErr | WcStatus::RemOpErr),
            "device {end}, verb {op}: {status}"
        );
        world.end();
    }
}

/// Regions stay as long as the device may write them, and no longer.
#[test]
fn memory_stays_during_copies() {
    let setup = Setup { timeout: 14, ..Setup::default() };
    let strict = Strict::default().latest(LATE);
    let mut world = World::new(5, LinkConfig::default(), setup, &strict, 1 << 20);
    world.post(0, 1, SendOp::Write(world.remote_device[1].at(0)), &[sge(world.device[0], 1 << 20)]);
    let mut refused = 0;
    while world.come(0).is_none() {
        assert!(world.step());
        let exchange = world.devices[1].copies().0 > 0;
        if exchange && let Err(error) = world.pair.ends[1].context.deregister(world.device[1]) {
            assert!(matches!(error, Error::Busy { .. }), "{error}");
            assert!(error.to_string().contains("copies of its device that are under way"), "{error}");
            refused += 1;
        } else if exchange {
            break;
        }
    }
    assert!(refused > 0);
    // The peer is refused from now on.
    let status = world.completion(0).status;
    assert!(matches!(status, WcStatus::RemAccessErr | WcStatus::Success), "{status}");
    world.settle();
    world.pair.ends[0].context.deregister(world.device[0]).unwrap();
}

#[test]
fn a_queue_pair_is_destroyed_during_copies() {
    for op in 0..3 {
        for steps in [3, 10, 30, 100] {
            let setup = Setup { timeout: 14, ..Setup::default() };
            let strict = Strict::default().latest(LATE);
            let mut world = World::new(9, LinkConfig::default(), setup, &strict, 1 << 20);
            post(&mut world, op, 1 << 20);
            for _ in 0..steps {
                world.step();
            }
            for end in &mut world.pair.ends {
                end.context.destroy_qp(end.qp).unwrap();
            }
            world.end();
        }
    }
}

/// A hundred queue pairs that WRITE and READ at once, in either direction, with four chunks: each gets its turn, and every
/// byte is correct.
#[test]
fn staging_is_shared_by_more_queue_pairs_than_it_has_chunks() {
    const QPS: usize = 100;
    const LEN: usize = 3000;
    let mut random = Random::from_env("FERROCE_DEVICE_SEED");
    for selective_repeat in [false, true] {
        let config = |config: Config| config.staging_chunks(4);
        let setup = Setup { qps: QPS, timeout: 16, selective_repeat, config, ..Setup::default() };
        let strict = Strict::default().latest(Duration::from_micros(100));
        let mut world = World::new(1, LinkConfig::default(), setup, &strict, 4 * QPS * LEN);
        let sources = [0, 1].map(|end| world.fill(end, world.device[end], &mut random));
        // The first quarter of an end is written by the other, the second receives its READs; it sends from the others.
        let at = |quarter: usize, n: usize| ((quarter * QPS + n) * LEN) as u64;
        for end in [0, 1] {
            for n in 0..QPS {
                let remote = world.remote_device[1 - end];
                let ops = [
                    (SendOp::Write(remote.at(at(0, n))), at(2, n)),
                    (SendOp::Read(remote.at(at(3, n))), at(1, n)),
                ];
                for (kind, (op, offset)) in (0..).zip(ops) {
                    let sges = [Sge { mr: world.device[end], offset, length: LEN as u32 }];
                    let wr_id = (2 * n + kind) as u64;
                    let (data, flags) = (Data::Sges(&sges), SendFlags::SIGNALED);
                    let End { context, qps, .. } = &mut world.pair.ends[end];
                    context.post_send(qps[n], &SendWorkRequest { wr_id, op, data, flags }).unwrap();
                }
            }
        }
        for end in [0, 1] {
            let mut ended: Vec<u64> = (0..2 * QPS)
                .map(|_| {
                    let completion = world.completion(end);
                    assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
                    completion.wr_id
                })
                .collect();
            ended.sort_unstable();
            assert!(ended.into_iter().eq(0..2 * QPS as u64));
        }
        for end in [0, 1] {
            for n in 0..QPS {
                for (quarter, from) in [(0, 2), (1, 3)] {
                    let source = &sources[1 - end][at(from, n) as usize..][..LEN];
                    let found = world.read(end, world.device[end], at(quarter, n), LEN);
                    assert!(found == source, "end {end}, queue pair {n}, quarter {quarter}");
                }
            }
            let starved = world.pair.ends[end].context.counters().value(Counter::RxStagingFull);
            println!("end {end}: {starved} packets found no room, selective repeat {selective_repeat}");
        }
        for end in &mut world.pair.ends {
            for qp in &end.qps[1..] {
                end.context.destroy_qp(*qp).unwrap();
            }
        }
        world.end();
    }
}
