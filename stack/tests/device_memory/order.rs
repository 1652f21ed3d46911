//! The order of acknowledgements and completions when bytes land late or never.

use std::time::Duration;

use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_test_support::pair::Setup;

use super::world::{World, sge};

/// Each copy fails, at most 50 µs late.
fn failing() -> Strict {
    Strict::default().fails_one_in(1).latest(Duration::from_micros(50))
}

fn late() -> Strict {
    Strict::default().latest(Duration::from_millis(10))
}

fn patient() -> Setup {
    Setup { timeout: 14, ..Setup::default() }
}

fn statuses(completions: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

const MS: Duration = Duration::from_millis(1);
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

#[test]
fn a_failed_read_completes_before_flushed_work() {
    let mut world = World::new(1, LinkConfig::default(), patient(), &failing(), 1 << 17);
    let (from, device, host) = (world.remote_host[1].at(0), world.device[0], world.host[0]);
    world.post(0, 1, SendOp::Read(from), &[sge(device, 0, 100)]);
    // There is no receive for them.
    world.post(0, 2, SendOp::Send, &[sge(host, 0, 100)]);
    world.post(0, 3, SendOp::Send, &[sge(host, 0, 100)]);
    let told = statuses(&world.completions_within(0, 500 * MS));
    assert_eq!(told, [(1, WcStatus::FatalErr), (2, FLUSHED), (3, FLUSHED)]);
}

/// A WRITE whose bytes can't be gathered fails while the data of a READ before it is copied, whose copy fails then.
#[test]
fn a_send_queue_reports_one_cause() {
    let mut second = 0;
    for seed in 0..40 {
        let failing = failing().seed(seed).latest(Duration::from_micros(400));
        let mut world = World::new(seed, LinkConfig::default(), patient(), &failing, 1 << 17);
        let (there, device) = (world.remote_host[1], world.device[0]);
        world.post(0, 1, SendOp::Read(there.at(0)), &[sge(device, 0, 100)]);
        world.post(0, 2, SendOp::Write(there.at(0)), &[sge(device, 200, 100)]);
        world.post(0, 3, SendOp::Write(there.at(0)), &[sge(device, 300, 100)]);
        let told = statuses(&world.completions_within(0, 500 * MS));
        assert_eq!(told, [(1, WcStatus::FatalErr), (2, FLUSHED), (3, FLUSHED)], "seed {seed}");
        second += usize::from(world.pair.ends[0].context.counters().value(Counter::DeviceGathers) > 0);
    }
    assert!(second > 0, "no gather has begun");
}

#[test]
fn a_failed_receive_completes_before_flushed_work() {
    let mut world = World::new(1, LinkConfig::default(), patient(), &failing(), 1 << 17);
    let (device, [here, there]) = (world.device[1], world.host);
    world.post_recv(1, 1, &[sge(device, 0, 100)]);
    world.post_recv(1, 2, &[sge(there, 0, 100)]);
    world.post_recv(1, 3, &[sge(there, 0, 100)]);
    world.post(0, 1, SendOp::Send, &[sge(here, 0, 100)]);
    let told = statuses(&world.completions_within(1, 500 * MS));
    assert_eq!(told, [(1, WcStatus::FatalErr), (2, FLUSHED), (3, FLUSHED)]);
}

/// The NAK of a later request would acknowledge the WRITE whose copy has failed.
#[test]
fn a_failed_write_is_not_acknowledged_by_later_requests() {
    for with_read in [false, true] {
        let mut world = World::new(1, LinkConfig::default(), patient(), &failing(), 1 << 17);
        let (to, there, host) = (world.remote_device[1].at(0), world.remote_host[1], world.host[0]);
        world.post(0, 1, SendOp::Write(to), &[sge(host, 0, 1000)]);
        let mut expected = vec![(1, WcStatus::RemOpErr)];
        if with_read {
            world.post(0, 2, SendOp::Read(there.at(0)), &[sge(host, 2000, 100)]);
            expected.push((2, FLUSHED));
        }
        let nowhere = RemoteAddress { addr: 1 << 40, rkey: there.rkey };
        world.post(0, 3, SendOp::Write(nowhere), &[sge(host, 0, 1000)]);
        expected.push((3, FLUSHED));
        assert_eq!(statuses(&world.completions_within(0, 3000 * MS)), expected);
    }
}

/// Nor by its NAK, if another copy after it has failed as well.
#[test]
fn a_failed_write_is_not_acknowledged_by_the_next_failure() {
    for (seed, distance) in (0..20).flat_map(|seed| [(seed, 0), (seed, 70_000)]) {
        let strict = failing().seed(seed);
        let mut world = World::new(seed, LinkConfig::default(), patient(), &strict, 1 << 18);
        let (there, host) = (world.remote_device[1], world.host[0]);
        // Each in a separate batch: they overlap, or fill a chunk.
        world.post(0, 1, SendOp::Write(there.at(0)), &[sge(host, 0, 100 + distance)]);
        world.post(0, 2, SendOp::Write(there.at(distance as u64)), &[sge(host, 0, 100)]);
        world.post(0, 3, SendOp::Write(there.at(0)), &[sge(host, 0, 100)]);
        let told = statuses(&world.completions_within(0, 3000 * MS));
        assert_eq!(told, [(1, WcStatus::RemOpErr), (2, FLUSHED), (3, FLUSHED)], "seed {seed}");
    }
}

/// A copy that fails immediately, while another one after it has ended long ago or succeeds.
#[test]
fn all_work_completes_whichever_copy_fails() {
    for seed in 0..200 {
        let strict = Strict::default().seed(seed).fails_one_in(3).latest(Duration::from_millis(3));
        let mut world = World::new(seed, LinkConfig::default(), patient(), &strict, 1 << 18);
        let (device, host) = (world.device[1], world.host[0]);
        for n in 0..4 {
            world.post_recv(1, n, &[sge(device, n % 2 * 1000, 1000)]);
        }
        for n in 0..4 {
            world.post(0, n, SendOp::Send, &[sge(host, 0, 1000)]);
        }
        let told = [0, 1].map(|end| statuses(&world.completions_within(end, 3000 * MS)));
        let successes = told.each_ref().map(|told| {
            assert!(told.iter().map(|(wr_id, _)| *wr_id).eq(0..4), "seed {seed}: {told:?}");
            told.iter().take_while(|(_, status)| *status == WcStatus::Success).count()
        });
        // Data reported to the sender as delivered is there.
        assert!(successes[0] <= successes[1], "seed {seed}: {told:?}");
    }
}

/// Host memory after device memory is written in the order of the messages.
#[test]
fn a_message_is_not_overwritten_by_an_earlier_write() {
    for (seed, selective_repeat) in (0..20).flat_map(|seed| [(seed, false), (seed, true)]) {
        let setup = Setup { timeout: 16, selective_repeat, ..Setup::default() };
        let mut world = World::new(seed, LinkConfig::default(), setup, &late().seed(seed), 1 << 17);
        let [here, there] = world.host;
        world.pair.ends[0].context.write(here, 0, &[1; 64]).unwrap();
        world.pair.ends[0].context.write(here, 64, &[2; 64]).unwrap();
        world.post_recv(1, 9, &[sge(there, 0, 64)]);
        let (device, host) = (world.remote_device[1].at(0), world.remote_host[1].at(0));
        world.post(0, 1, SendOp::Write(device), &[sge(here, 0, 64)]);
        world.post(0, 2, SendOp::Write(host), &[sge(here, 0, 64)]);
        world.post(0, 3, SendOp::Send, &[sge(here, 64, 64)]);
        for n in 1..=3 {
            world.success(0, n);
        }
        world.success(1, 9);
        assert_eq!(world.read(1, there, 0, 64), [2; 64], "seed {seed}");
        world.end();
    }
}

#[test]
fn requests_before_a_failed_write_are_answered() {
    let link = LinkConfig::default().rate(1_000_000_000);
    let setup = Setup { timeout: 14, frames: 64, ..Setup::default() };
    let mut world = World::new(1, link, setup, &failing(), 1 << 20);
    let (to, from, host) = (world.remote_device[1].at(0), world.remote_host[1].at(0), world.host[0]);
    world.post(0, 1, SendOp::Read(from), &[sge(host, 0, 1 << 19)]);
    world.post(0, 2, SendOp::Write(to), &[sge(host, 0, 100)]);
    let told = statuses(&world.completions_within(0, 3000 * MS));
    assert_eq!(told, [(1, WcStatus::Success), (2, WcStatus::RemOpErr)]);
}

#[test]
fn a_failed_unsignaled_read_is_reported() {
    let mut world = World::new(1, LinkConfig::default(), patient(), &failing(), 1 << 17);
    let (from, device) = (world.remote_host[1].at(0), world.device[0]);
    world.post_on(0, 0, 1, SendOp::Read(from), &[sge(device, 0, 100)], SendFlags::default());
    let told = statuses(&world.completions_within(0, 500 * MS));
    assert_eq!(told, [(1, WcStatus::FatalErr)]);
}

/// A flag in host memory, set by a WRITE, and by every other operation that changes a word.
#[test]
fn a_flag_in_host_memory_is_set_after_device_memory() {
    for flag in 0..4 {
        let setup = Setup { timeout: 16, ..Setup::default() };
        let mut world = World::new(3, LinkConfig::default(), setup, &late(), 1 << 17);
        let (to, host) = (world.remote_device[1].at(0), world.host[0]);
        let word = world.pair.ends[1].context.remote(world.pair.ends[1].mr).unwrap().at(0);
        let result = [sge(world.pair.ends[0].mr, 64, 8)];
        world.pair.ends[0].context.write(host, 0, &[9; 4000]).unwrap();
        world.post(0, 1, SendOp::Write(to), &[sge(host, 0, 4000)]);
        match flag {
            0 => world.post(0, 2, SendOp::Write(word), &[sge(host, 0, 8)]),
            1 => world.post(0, 2, SendOp::FetchAdd { remote: word, add: 1 }, &result),
            2 => world.post(0, 2, SendOp::CompareSwap { remote: word, compare: 0, swap: 1 }, &result),
            _ => world.post(0, 2, SendOp::AtomicWrite(word), &[sge(host, 0, 8)]),
        }
        let mr = world.pair.ends[1].mr;
        while world.read(1, mr, 0, 8) == [0; 8] {
            assert!(world.step(), "flag {flag} is never set");
        }
        assert_eq!(world.read(1, world.device[1], 0, 4000), [9; 4000], "flag {flag} is ahead");
        world.success(0, 1);
        world.success(0, 2);
        world.end();
    }
}

#[test]
fn the_event_of_the_last_receive_follows_its_completion() {
    let setup = Setup { srq: true, timeout: 16, ..Setup::default() };
    let mut world = World::new(3, LinkConfig::default(), setup, &late(), 1 << 17);
    let (device, host) = (world.device[1], world.host[0]);
    let end = &mut world.pair.ends[1];
    let sges = [sge(device, 0, 4000)];
    end.context.post_srq_recv(end.srq.unwrap(), &ReceiveWorkRequest { wr_id: 5, sges: &sges }).unwrap();
    world.post(0, 1, SendOp::Send, &[sge(host, 0, 4000)]);
    while world.devices[1].copies().0 == 0 {
        world.step();
    }
    let qp = world.pair.ends[1].qp;
    world.pair.ends[1].context.modify_qp(qp, Transition::Error).unwrap();
    let mut received = Vec::new();
    loop {
        received.extend(world.come(1).map(|wc| (wc.wr_id, wc.status)));
        match world.pair.ends[1].context.next_event() {
            Some(Event::QpLastWqeReached(last)) if last == qp => break,
            _ => assert!(world.step(), "the event never comes"),
        }
    }
    received.extend(world.come(1).map(|wc| (wc.wr_id, wc.status)));
    assert_eq!(received, [(5, WcStatus::Success)]);
}

/// Landed data is acknowledged while other bytes are still in flight; otherwise a sender would wait for a whole window.
#[test]
fn landed_data_is_acknowledged_while_more_arrives() {
    for selective_repeat in [false, true] {
        let setup = Setup { timeout: 14, selective_repeat, ..Setup::default() };
        let link = LinkConfig::default().rate(10_000_000_000).delay(Duration::from_micros(2));
        let late = Strict::default().latest(Duration::from_micros(30));
        let mut world = World::new(3, link, setup, &late, 1 << 20);
        let (to, host) = (world.remote_device[1], world.host[0]);
        for n in 0..60 {
            world.post(0, n, SendOp::Write(to.at(n * 16_384)), &[sge(host, 0, 16_384)]);
        }
        let mut times = Vec::new();
        for n in 0..60 {
            world.success(0, n);
            times.push(world.pair.now.0);
        }
        // The bytes take 0.8 ms on the link.
        let halfway = times[30] - times[0];
        times.dedup();
        assert!(times.len() >= 20, "{} times, selective repeat {selective_repeat}: {times:?}", times.len());
        assert!(halfway > 200_000, "{halfway} ns");
        world.end();
    }
}
