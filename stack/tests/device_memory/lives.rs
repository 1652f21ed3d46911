//! Copies that are outstanding when a queue pair, a key or a region ends.

use std::time::Duration;

use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::pair::{End, Setup};

use super::world::{World, sge};

/// The late copy of a destroyed queue pair must not overwrite later data of another one.
#[test]
fn bytes_of_a_destroyed_queue_pair_land_before_later_ones() {
    for seed in 0..40 {
        let setup = Setup { qps: 2, timeout: 16, ..Setup::default() };
        let late = Strict::default().seed(seed).latest(Duration::from_millis(10));
        let mut world = World::new(seed, LinkConfig::default(), setup, &late, 1 << 17);
        let (host, to) = (world.host[0], world.remote_device[1].at(0));
        world.pair.ends[0].context.write(host, 0, &[1; 1000]).unwrap();
        world.pair.ends[0].context.write(host, 1000, &[2; 1000]).unwrap();
        world.post_on(0, 0, 1, SendOp::Write(to), &[sge(host, 0, 1000)], SendFlags::SIGNALED);
        while world.devices[1].copies().0 == 0 {
            world.step();
        }
        for end in &mut world.pair.ends {
            end.context.destroy_qp(end.qps[0]).unwrap();
        }
        world.post_on(0, 1, 2, SendOp::Write(to), &[sge(host, 1000, 1000)], SendFlags::SIGNALED);
        world.success(0, 2);
        let is_there = |world: &World| world.read(1, world.device[1], 0, 1000) == [2; 1000];
        assert!(is_there(&world), "seed {seed}: complete and not there");
        world.settle();
        assert!(is_there(&world), "seed {seed}: overwritten");
    }
}

/// A peer that writes all the time can't delay the end of a registration.
#[test]
fn the_first_call_to_deregister_ends_the_access() {
    let link = LinkConfig::default().rate(10_000_000_000).delay(Duration::from_micros(2));
    let late = Strict::default().latest(Duration::from_micros(100));
    let mut world = World::new(3, link, Setup { timeout: 16, ..Setup::default() }, &late, 1 << 20);
    let (host, to) = (world.host[0], world.remote_device[1]);
    for n in 0..60 {
        world.post(0, n, SendOp::Write(to.at(n % 8 * 65_536)), &[sge(host, 0, 65_536)]);
    }
    while world.devices[1].copies().0 == 0 {
        world.step();
    }
    let began = world.pair.now;
    while let Err(error) = world.pair.ends[1].context.deregister(world.device[1]) {
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        assert!(world.step());
    }
    // Outstanding copies, and data received before.
    let took = world.pair.now.since(began);
    assert!(took < Duration::from_micros(300), "{took:?}");
    let statuses: Vec<WcStatus> = (0..60).map(|_| world.completion(0).status).collect();
    assert!(statuses.contains(&WcStatus::RemAccessErr), "{statuses:?}");
}

#[test]
fn an_invalidated_key_accepts_no_more_bytes() {
    let late = Strict::default().latest(Duration::from_millis(10));
    let setup = Setup { qps: 2, timeout: 16, ..Setup::default() };
    let mut world = World::new(3, LinkConfig::default(), setup, &late, 1 << 17);
    let (host, to) = (world.host[0], world.remote_device[1]);
    world.pair.ends[0].context.write(host, 0, &[1; 1000]).unwrap();
    world.post(0, 1, SendOp::Write(to.at(0)), &[sge(host, 0, 1000)]);
    while world.devices[1].copies().0 == 0 {
        world.step();
    }
    world.post_on(1, 1, 2, SendOp::LocalInvalidate(to.rkey), &[], SendFlags::SIGNALED);
    world.step();
    // With it nothing more is accepted.
    world.post(0, 3, SendOp::Write(to.at(0)), &[sge(host, 1000, 1000)]);
    world.success(1, 2);
    assert_eq!(world.read(1, world.device[1], 0, 1000), [1; 1000]);
    world.success(0, 1);
    assert_eq!(world.completion(0).status, WcStatus::RemAccessErr);
    world.settle();
    assert_eq!(world.read(1, world.device[1], 0, 1000), [1; 1000]);
}

/// The manual's method to get memory back before its region is deregistered.
#[test]
fn flushed_work_completes_after_copies() {
    for seed in 0..20 {
        let late = Strict::default().seed(seed).latest(Duration::from_millis(10));
        let mut world = World::new(seed, LinkConfig::default(), Setup::default(), &late, 1 << 13);
        let (there, device, host) = (world.remote_device[1], world.device[1], world.host[0]);
        world.fill(0, host, &mut Random::new(seed));
        world.post_recv(1, 7, &[sge(world.host[1], 0, 8)]);
        for n in 0..8 {
            world.post(0, n, SendOp::Write(there.at(n * 1024)), &[sge(host, n * 1024, 1024)]);
        }
        while world.pair.ends[1].context.counters().value(Counter::DeviceScatters) == 0 {
            assert!(world.step());
        }
        let End { context, qp, .. } = &mut world.pair.ends[1];
        context.modify_qp(*qp, Transition::Error).unwrap();
        let flushed = world.completion(1);
        assert_eq!((flushed.wr_id, flushed.status), (7, WcStatus::WrFlushErr));
        world.pair.ends[1].context.write(device, 0, &[0xaa; 8192]).unwrap();
        world.settle();
        assert!(world.read(1, device, 0, 8192) == [0xaa; 8192], "seed {seed}");
    }
}
