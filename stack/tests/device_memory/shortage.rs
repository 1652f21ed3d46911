//! Few chunks: no queue pair holds them needlessly, and none waits forever.

use std::time::Duration;

use ferroce::driver::gpu::Device;
use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::pair::{End, QKEY, Setup};

use super::world::{World, rights, sge};

type Configure = fn(Config) -> Config;

fn four_chunks(config: Config) -> Config {
    config.staging_chunks(4)
}

/// For memory of two devices.
fn six_chunks(config: Config) -> Config {
    config.staging_chunks(6)
}

#[test]
fn a_queue_pair_that_has_failed_keeps_no_chunks() {
    let setup = Setup { qps: 2, timeout: 14, config: four_chunks, ..Setup::default() };
    let mut world = World::new(1, LinkConfig::default(), setup, &Strict::default(), 1 << 18);
    let (device, there) = (world.device[0], world.remote_host[1]);
    let nowhere = RemoteAddress { addr: 1 << 40, rkey: there.rkey };
    world.post_on(0, 0, 1, SendOp::Read(nowhere), &[sge(device, 0, 1 << 17)], SendFlags::SIGNALED);
    assert_eq!(world.completion(0).status, WcStatus::RemAccessErr);
    world.post_on(0, 1, 2, SendOp::Write(there.at(0)), &[sge(device, 0, 1000)], SendFlags::SIGNALED);
    world.success(0, 2);
}

/// Gathered data is dropped for another queue pair, and then more is acknowledged than was gathered again, which ends
/// within a packet: pieces end anywhere.
#[test]
fn bytes_gathered_again_start_with_a_packet() {
    for seed in 0..400 {
        let mut random = Random::new(seed);
        let setup = Setup { qps: 2, timeout: 14, config: four_chunks, ..Setup::default() };
        let delay = Duration::from_micros(random.below(500));
        let link = LinkConfig::default().delay(delay).rate(5_000_000_000);
        let late = Strict::default().seed(seed).depth(1).latest(Duration::from_micros(random.below(300)));
        let mut world = World::new(seed, link, setup, &late, 1 << 18);
        let bytes: Vec<u8> = (0..1 << 16).flat_map(|n: u32| n.to_ne_bytes()).collect();
        world.pair.ends[0].context.write(world.device[0], 0, &bytes).unwrap();
        let (device, host, there) = (world.device[0], world.host[0], world.remote_host[1]);
        world.pair.ends[0].context.write(host, 0, &bytes[40_001..40_011]).unwrap();
        let pieces = [sge(device, 0, 40_001), sge(host, 0, 10), sge(device, 40_011, 156_597)];
        world.post_on(0, 0, 1, SendOp::Write(there.at(0)), &pieces, SendFlags::SIGNALED);
        // At any moment of it.
        let other = [sge(device, 0, 100)];
        for _ in 0..4 {
            for _ in 0..random.below(60) {
                world.step();
            }
            world.post_on(0, 1, 2, SendOp::Write(there.at(200_000)), &other, SendFlags::SIGNALED);
        }
        for _ in 0..5 {
            assert_eq!(world.completion(0).status, WcStatus::Success, "seed {seed}");
        }
        assert!(world.read(1, world.host[1], 0, 196_608) == bytes[..196_608], "other bytes, seed {seed}");
    }
}

/// Each queue pair WRITEs from its device and READs to it after that, and everything is lost for a while: gathered data,
/// and chunks reserved for READs, must not wait for each other.
#[test]
fn an_outage_with_few_chunks_ends_nothing() {
    let as_usual: Configure = |config| config;
    let cases = [(four_chunks as Configure, 2, 1 << 10), (four_chunks, 8, 1 << 10), (as_usual, 100, 1 << 16)];
    for selective_repeat in [false, true] {
        for (config, qps, len) in cases {
            let setup = Setup { qps, timeout: 10, selective_repeat, config, ..Setup::default() };
            let late = Strict::default().latest(Duration::from_micros(20));
            let mut world = World::new(1, LinkConfig::default(), setup, &late, 1 << 24);
            let (device, there) = (world.device[0], world.remote_host[1]);
            world.pair.network.set_config(LinkConfig::default().loss(1.0)).unwrap();
            for n in 0..qps {
                let (write, read) = (SendOp::Write(there.at(0)), SendOp::Read(there.at(0)));
                world.post_on(0, n, n as u64, write, &[sge(device, 0, len)], SendFlags::SIGNALED);
                world.post_on(0, n, 1000 + n as u64, read, &[sge(device, 0, len)], SendFlags::SIGNALED);
            }
            let cut = world.completions_within(0, Duration::from_millis(8));
            assert_eq!(cut.len(), 0);
            world.pair.network.set_config(LinkConfig::default()).unwrap();
            for done in 0..2 * qps {
                let wc = world.completion(0);
                assert_eq!(wc.status, WcStatus::Success, "{wc:?}, after {done} of {qps} queue pairs");
            }
        }
    }
}

/// Bytes of one packet are for two devices alternately, in more pieces than there are chunks.
#[test]
fn a_list_may_change_devices_more_often_than_there_are_chunks() {
    let setup = Setup { qp_type: QpType::Ud, config: six_chunks, ..Setup::default() };
    let late = Strict::default().latest(Duration::from_micros(20));
    let mut world = World::new(3, LinkConfig::default(), setup, &late, 1 << 17);
    let other = Strict::default().seed(99).open().unwrap().allocate(1 << 16).unwrap();
    let end = &mut world.pair.ends[1];
    let other = end.context.register(end.pd, other, rights()).unwrap();
    let config = QpConfig::new(QpType::Ud, end.pd, end.cq).max_recv_sge(16);
    let qp = end.context.create_qp(&config).unwrap();
    for transition in [
        Transition::InitDatagram { qkey: QKEY },
        Transition::ReadyToReceiveDatagrams,
        Transition::ReadyToSendUnreliable { sq_psn: Psn::new(0) },
    ] {
        end.context.modify_qp(qp, transition).unwrap();
    }
    let qpn = end.context.query_qp(qp).unwrap().qpn;
    let (device, host) = (world.device[1], world.host[0]);
    let pieces: Vec<Sge> = (0..12).map(|n| sge([device, other][n % 2], 100 * n as u64, 50)).collect();
    for round in 0..3 {
        let bytes: Vec<u8> = (0..560).map(|n| (n + round) as u8).collect();
        world.pair.ends[1].context.post_recv(qp, &ReceiveWorkRequest { wr_id: 5, sges: &pieces }).unwrap();
        world.pair.ends[0].context.write(host, 0, &bytes).unwrap();
        let to = Destination { qpn, ..world.pair.ends[0].destination.unwrap() };
        world.post(0, 1, SendOp::SendTo(to), &[sge(host, 0, 560)]);
        world.success(1, 5);
        // After the GRH.
        let found: Vec<u8> =
            pieces.iter().flat_map(|piece| world.read(1, piece.mr, piece.offset, 50)).collect();
        assert_eq!(found[40..], bytes, "round {round}");
    }
}

/// Datagrams that find no chunk are dropped and counted: each is received or counted, and its receive is left for the next.
#[test]
fn datagrams_that_find_no_chunk_are_counted() {
    let setup = Setup { qp_type: QpType::Ud, config: four_chunks, ..Setup::default() };
    let late = Strict::default().depth(2).latest(Duration::from_micros(30));
    let link = LinkConfig::default().rate(1_000_000_000);
    let mut world = World::new(3, link, setup, &late, 1 << 17);
    let (device, host) = (world.device[1], world.host[0]);
    let bytes = world.fill(0, host, &mut Random::new(3));
    for n in 0..64 {
        world.post_recv(1, n, &[sge(device, n * 1064, 1064)]);
        let to = SendOp::SendTo(world.pair.ends[0].destination.unwrap());
        world.post(0, n, to, &[sge(host, n * 1024, 1024)]);
        world.success(0, n);
    }
    let arrived = world.completions_within(1, Duration::from_millis(200));
    let lost = world.pair.ends[1].context.counters().value(Counter::RxStagingFull);
    assert_eq!(arrived.len() as u64 + lost, 64);
    assert!(lost > 0 && arrived.len() > 4, "{lost} of 64 lost");
    let mut sent = bytes.chunks(1024);
    for (n, wc) in (0..).zip(arrived) {
        assert_eq!((wc.wr_id, wc.status, wc.byte_len), (n, WcStatus::Success, 1064));
        let found = world.read(1, device, n * 1064 + 40, 1024);
        assert!(sent.any(|datagram| datagram == found), "{n} is none of those behind the one before it");
    }
}

/// Receives and READs with pieces of two devices and of the host, of more queue pairs than there are chunks for: a packet
/// takes all of its chunks or none.
#[test]
fn lists_of_many_queue_pairs_get_chunks_in_turn() {
    for (qps, len, loss, selective_repeat) in
        [(5, 900, 0.0, false), (12, 900, 0.0, false), (16, 2000, 0.02, false), (12, 2000, 0.02, true)]
    {
        for op in ["SEND", "READ"] {
            let setup = Setup { qps, timeout: 12, selective_repeat, config: six_chunks, ..Setup::default() };
            let late = Strict::default().latest(Duration::from_micros(100));
            let mut world = World::new(7, LinkConfig::default().loss(loss), setup, &late, 1 << 18);
            let to = usize::from(op == "SEND");
            let second = world.second_device(to);
            let source = world.fill(1 - to, world.host[1 - to], &mut Random::new(5));
            let list = |world: &World, slot: usize| {
                let (at, third) = (slot as u64 * 2048, len / 3);
                [(world.device[to], third), (second, third), (world.host[to], len - 2 * third)]
                    .map(|(mr, length)| sge(mr, at, length))
            };
            for slot in 0..4 * qps {
                let (sges, at) = (list(&world, slot), slot as u64 * 2048);
                if op == "SEND" {
                    let wr = ReceiveWorkRequest { wr_id: slot as u64, sges: &sges };
                    let end = &mut world.pair.ends[1];
                    end.context.post_recv(end.qps[slot % qps], &wr).unwrap();
                    let data = [sge(world.host[0], at, len)];
                    world.post_on(0, slot % qps, 1, SendOp::Send, &data, SendFlags::SIGNALED);
                } else {
                    let read = SendOp::Read(world.remote_host[1].at(at));
                    world.post_on(0, slot % qps, 1, read, &sges, SendFlags::SIGNALED);
                }
            }
            for done in 0..4 * qps {
                let wc = world.completion(0);
                assert_eq!(
                    wc.status,
                    WcStatus::Success,
                    "{op} {done} of {qps} queue pairs; {}",
                    world.counted()
                );
            }
            world.settle();
            for slot in 0..4 * qps {
                let pieces = list(&world, slot);
                let found: Vec<u8> = pieces
                    .iter()
                    .flat_map(|piece| world.read(to, piece.mr, piece.offset, piece.length as usize))
                    .collect();
                assert!(found == source[slot * 2048..][..len], "{op} {slot} of {qps} queue pairs");
            }
        }
    }
}

/// Requests that find no chunk are requested again, without an RNR NAK if that is soon, so a peer without RNR retries
/// continues.
#[test]
fn a_request_that_finds_no_chunk_costs_no_rnr_retry() {
    for selective_repeat in [false, true] {
        let base = Setup { qps: 20, timeout: 16, rnr_retry: 0, ..Setup::default() };
        let setup = Setup { selective_repeat, config: four_chunks, ..base };
        let late = Strict::default().latest(Duration::from_micros(100));
        let mut world = World::new(1, LinkConfig::default(), setup, &late, 1 << 17);
        let (to, host) = (world.remote_device[1], world.host[0]);
        for n in 0..20 {
            let write = SendOp::Write(to.at(n as u64 * 4096));
            world.post_on(0, n, n as u64, write, &[sge(host, 0, 3000)], SendFlags::SIGNALED);
        }
        for _ in 0..20 {
            assert_eq!(world.completion(0).status, WcStatus::Success, "{}", world.counted());
        }
    }
}

/// Peers that never answer READs, of queue pairs without an ACK timeout, keep the chunks reserved for the responses; others
/// send and READ nevertheless.
#[test]
fn peers_that_never_answer_reads_do_not_starve_others() {
    for (config, silent) in [(four_chunks as Configure, 3), (|config| config, 40)] {
        let setup = Setup { qps: silent + 2, timeout: 0, config, ..Setup::default() };
        let late = Strict::default().latest(Duration::from_micros(100));
        let mut world = World::new(1, LinkConfig::default(), setup, &late, 1 << 20);
        let (device, there) = (world.device[0], world.remote_host[1].at(0));
        for n in 0..silent {
            let End { context, qps, .. } = &mut world.pair.ends[1];
            context.modify_qp(qps[n], Transition::Reset).unwrap();
            world.post_on(0, n, 1, SendOp::Read(there), &[sge(device, 0, 1 << 20)], SendFlags::SIGNALED);
        }
        assert_eq!(world.completions_within(0, Duration::from_millis(1)).len(), 0);
        let began = world.pair.now;
        for n in 0..20 {
            let op = if n % 2 == 0 { SendOp::Write(there) } else { SendOp::Read(there) };
            world.post_on(0, silent + n % 2, n as u64, op, &[sge(device, 0, 1 << 17)], SendFlags::SIGNALED);
        }
        for _ in 0..20 {
            assert_eq!(world.completion(0).status, WcStatus::Success);
        }
        // Each time chunks must be taken from a queue pair, it takes 100 ms.
        assert!(world.pair.now.since(began) < Duration::from_secs(3), "{:?}", world.pair.now.since(began));
    }
}

/// A device whose memory was deregistered makes room for another.
#[test]
fn any_number_of_devices_in_sequence() {
    let setup = Setup { config: |config| config.staging_chunks(256), ..Setup::default() };
    let mut world = World::new(1, LinkConfig::default(), setup, &Strict::default(), 1 << 12);
    for n in 0..200 {
        let memory = Strict::default().seed(n).open().unwrap().allocate(64).unwrap();
        let end = &mut world.pair.ends[0];
        let mr = end.context.register(end.pd, memory, rights()).unwrap();
        end.context.deregister(mr).unwrap();
    }
    let held: Vec<Mr> = (0..63)
        .map(|n| {
            let memory = Strict::default().seed(n).open().unwrap().allocate(64).unwrap();
            let end = &mut world.pair.ends[0];
            end.context.register(end.pd, memory, rights()).unwrap()
        })
        .collect();
    let end = &mut world.pair.ends[0];
    let one_more = || Strict::default().open().unwrap().allocate(64).unwrap();
    let refused = end.context.register(end.pd, one_more(), rights()).unwrap_err().to_string();
    assert!(refused.contains("memory of 64 devices already"), "{refused}");
    end.context.deregister(held[7]).unwrap();
    end.context.register(end.pd, one_more(), rights()).unwrap();
}

/// One packet may bring bytes for each device and for the host.
#[test]
fn each_device_needs_chunks() {
    let mut world = World::new(
        1,
        LinkConfig::default(),
        Setup { config: six_chunks, ..Setup::default() },
        &Strict::default(),
        1 << 12,
    );
    world.second_device(0);
    let end = &mut world.pair.ends[0];
    let memory = Strict::default().seed(3).open().unwrap().allocate(64).unwrap();
    let refused = end.context.register(end.pd, memory, rights()).unwrap_err().to_string();
    assert!(
        refused.contains("6 chunks of staging are too few") && refused.contains("staging_chunks to 8"),
        "{refused}"
    );
}

/// Queue pairs between devices with copies at most this many microseconds late, and few chunks.
fn crowd(qps: usize, setup: Setup, seed: u64, late: u64) -> World {
    let setup = Setup { qps, config: four_chunks, ..setup };
    let link = LinkConfig::default().rate(10_000_000_000).delay(Duration::from_micros(2));
    let strict = Strict::default().seed(seed).latest(Duration::from_micros(late));
    World::new(seed, link, setup, &strict, 1 << 18)
}

/// All succeed within this time.
fn end_within(world: &mut World, end: usize, count: usize, most: Duration) {
    let (began, mut polled) = (world.pair.now, world.pair.now);
    let (mut done, mut more) = (0, true);
    loop {
        while let Some(wc) = world.come(end) {
            assert_eq!(wc.status, WcStatus::Success, "{done} of {count} done: {wc:?}");
            done += 1;
        }
        if done == count {
            break;
        }
        assert!(
            more && polled.since(began) <= most,
            "{done} of {count} done after {:?}",
            polled.since(began)
        );
        polled = world.pair.now;
        more = world.step();
    }
}

/// Responses to READs that end anywhere in a chunk: it is released when they are sent, whether there is another or not.
/// Without an ACK timeout no request is repeated.
#[test]
fn responses_release_used_chunks_before_waiting() {
    let mut world = crowd(5, Setup { timeout: 0, ..Setup::default() }, 1, 100);
    let (from, to) = (world.remote_device[1].at(0), world.host[0]);
    for n in 0..1000 {
        world.post_on(0, n % 5, n as u64 % 5, SendOp::Read(from), &[sge(to, 0, 3000)], SendFlags::SIGNALED);
        // Eight of each are outstanding.
        if n >= 40 {
            end_within(&mut world, 0, 1, Duration::from_millis(10));
        }
    }
}

/// Chunks kept for a peer's request wait for the peer's sends, which wait for chunks kept for local requests.
#[test]
fn both_ends_send_between_few_chunks() {
    for seed in 0..20 {
        let mut world = crowd(4, Setup { timeout: 0, ..Setup::default() }, seed, 500);
        for n in 0..24 {
            for end in [0, 1] {
                let (to, from) = (world.remote_device[1 - end].at(1 << 17), world.device[end]);
                world.post_on(end, n % 4, 1, SendOp::Write(to), &[sge(from, 0, 900)], SendFlags::SIGNALED);
            }
        }
        end_within(&mut world, 0, 24, Duration::from_millis(40));
        end_within(&mut world, 1, 24, Duration::from_millis(40));
    }
}

/// With selective repeat too, a response that finds no chunk is requested again when there is one.
#[test]
fn a_response_without_a_chunk_is_requested_again_without_a_timer() {
    for selective_repeat in [false, true] {
        let mut world = crowd(6, Setup { timeout: 0, selective_repeat, ..Setup::default() }, 1, 100);
        let (from, to) = (world.remote_host[1].at(0), world.device[0]);
        for n in 0..12 {
            world.post_on(0, n % 6, 1, SendOp::Read(from), &[sge(to, 0, 60_000)], SendFlags::SIGNALED);
        }
        end_within(&mut world, 0, 12, Duration::from_millis(50));
    }
}

/// Both ends WRITE, SEND and READ lists over two devices, all at once: chunks that one reserves for future data must not be
/// those that the other needs to send it. Without an ACK timeout no request is repeated.
#[test]
fn everything_at_once_in_both_directions_completes() {
    for seed in 0..12 {
        let selective_repeat = seed % 2 == 1;
        let qps = [6, 20, 40][seed as usize % 3];
        let setup = Setup { qps, timeout: 0, selective_repeat, config: six_chunks, ..Setup::default() };
        let link = LinkConfig::default().rate(10_000_000_000).delay(Duration::from_micros(2));
        let late = Strict::default().seed(seed).depth(3).latest(Duration::from_micros(50));
        let mut world = World::new(seed, link, setup, &late, 1 << 16);
        let others = [0, 1].map(|end| world.second_device(end));
        let mut random = Random::new(seed);
        for n in 0..6 * qps {
            for end in [0, 1] {
                let len = 1 + random.below(8000) as usize;
                let list = |world: &World, end: usize| {
                    [sge(world.device[end], 0, len), sge(others[end], 0, len), sge(world.host[end], 0, len)]
                };
                let there = [world.remote_device, world.remote_host][random.below(2) as usize][1 - end].at(0);
                let op = match random.below(3) {
                    0 => SendOp::Write(there),
                    1 => SendOp::Read(there),
                    _ => {
                        let receive = list(&world, 1 - end);
                        let peer = &mut world.pair.ends[1 - end];
                        let wr = ReceiveWorkRequest { wr_id: 1 << 32, sges: &receive };
                        peer.context.post_recv(peer.qps[n % qps], &wr).unwrap();
                        SendOp::Send
                    }
                };
                world.post_on(end, n % qps, n as u64, op, &list(&world, end), SendFlags::SIGNALED);
            }
        }
        let (mut done, mut more) = ([0, 0], true);
        while done != [6 * qps; 2] {
            assert!(
                more && world.pair.now < Nanos(3_000_000_000),
                "seed {seed}: {done:?} of {} at {:?}",
                6 * qps,
                world.pair.now
            );
            more = world.step();
            for end in [0, 1] {
                while let Some(wc) = world.come(end) {
                    assert_eq!(wc.status, WcStatus::Success, "seed {seed}: {wc:?}");
                    done[end] += usize::from(wc.wr_id < 1 << 32);
                }
            }
        }
    }
}

/// The queue of a device is full most of the time: no queue pair keeps a place for a chunk that it has.
#[test]
fn a_full_device_queue_stalls_no_queue_pair() {
    for (qps, depth) in [(6, 1), (40, 8), (40, 64)] {
        let setup = Setup { qps, timeout: 16, ..Setup::default() };
        let late = Strict::default().depth(depth).latest(Duration::from_micros(200));
        let mut world = World::new(1, LinkConfig::default(), setup, &late, 1 << 16);
        let (to, from) = (world.remote_host[1].at(0), world.device[0]);
        for n in 0..30 * qps {
            world.post_on(0, n % qps, 1, SendOp::Write(to), &[sge(from, 0, 200)], SendFlags::SIGNALED);
        }
        // The largest number of copies, each as late as possible.
        let most = Duration::from_micros(250) * (30 * qps).div_ceil(depth) as u32;
        end_within(&mut world, 0, 30 * qps, most);
    }
}

/// Peers write without end: one WRITE and one READ of this end complete nevertheless.
#[test]
fn requests_of_peers_leave_room_for_local_ones() {
    let mut world = crowd(10, Setup { timeout: 16, ..Setup::default() }, 1, 100);
    let (here, there) = (world.remote_device[0].at(0), world.remote_host[1].at(0));
    let (device, host) = (world.device[0], world.host[1]);
    let mut own = 0;
    for n in 0..4000 {
        world.post_on(1, n % 10, 1, SendOp::Write(here), &[sge(host, 0, 20_000)], SendFlags::SIGNALED);
        if n < 80 {
            continue;
        }
        if n == 500 {
            world.post_on(0, 0, 7, SendOp::Write(there), &[sge(device, 1 << 17, 1000)], SendFlags::SIGNALED);
            world.post_on(0, 1, 8, SendOp::Read(there), &[sge(device, 1 << 17, 1000)], SendFlags::SIGNALED);
        }
        end_within(&mut world, 1, 1, Duration::from_millis(20));
        own += usize::from(world.come(0).is_some_and(|wc| wc.status == WcStatus::Success));
        if own == 2 {
            return;
        }
    }
    panic!("{own} of 2 while the peers have written 3500 times");
}

/// A chunk is released when its contents are acknowledged, not when another queue pair needs one.
#[test]
fn idle_queue_pairs_keep_no_chunks() {
    let mut world = crowd(6, Setup { timeout: 16, ..Setup::default() }, 1, 100);
    let (to, from) = (world.remote_host[1].at(0), world.device[0]);
    for n in 0..24 {
        world.post_on(0, n % 6, 1, SendOp::Write(to), &[sge(from, 0, 1000)], SendFlags::SIGNALED);
        end_within(&mut world, 0, 1, Duration::from_micros(200));
    }
}

/// A loop that waits for a copy is woken when it ends.
#[test]
fn a_waiting_loop_does_not_poll_for_copies() {
    let setup = Setup { timeout: 16, ..Setup::default() };
    let late = Strict::default().depth(1).latest(Duration::from_millis(10));
    let mut world = World::new(1, LinkConfig::default(), setup, &late, 1 << 17);
    let (to, from) = (world.remote_device[1], world.host[0]);
    for n in 0..20 {
        world.post(0, n, SendOp::Write(to.at(n * 4096)), &[sge(from, 0, 4096)]);
    }
    let (mut steps, mut done) = (0, 0);
    while done < 20 {
        let more = world.step();
        steps += 1;
        while let Some(wc) = world.come(0) {
            assert_eq!(wc.status, WcStatus::Success);
            done += 1;
        }
        assert!(more || done == 20, "{done} done");
    }
    assert!(steps < 5000, "{steps} steps in {:?}", world.pair.now);
}
