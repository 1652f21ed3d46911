//! Each verb between device memory and host memory, in both directions.

use std::time::Duration;

use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::pair::Setup;

use super::world::{World, rights, sge};

/// Below, at and above a packet and a chunk.
const SIZES: [usize; 9] = [1, 8, 100, 1024, 1025, 65_535, 65_536, 70_000, 200_001];

fn late() -> Strict {
    Strict::default().latest(Duration::from_micros(500))
}

#[test]
fn writes_are_there_when_they_complete() {
    let mut random = Random::from_env("FERROCE_DEVICE_SEED");
    for selective_repeat in [false, true] {
        let setup = Setup { selective_repeat, ..Setup::default() };
        let mut world = World::new(1, LinkConfig::default(), setup, &late(), 1 << 18);
        let source = world.fill(0, world.device[0], &mut random);
        for (n, len) in SIZES.into_iter().enumerate() {
            let offset = 8 * n as u64;
            let to = world.remote_device[1].at(offset);
            world.post(0, n as u64, SendOp::Write(to), &[sge(world.device[0], 3, len)]);
            world.success(0, n as u64);
            assert_eq!(world.read(1, world.device[1], offset, len), source[3..3 + len], "{len} bytes");
        }
        world.end();
    }
}

#[test]
fn reads_return_the_contents() {
    let mut random = Random::from_env("FERROCE_DEVICE_SEED");
    for selective_repeat in [false, true] {
        let setup = Setup { selective_repeat, ..Setup::default() };
        let mut world = World::new(1, LinkConfig::default(), setup, &late(), 1 << 18);
        let source = world.fill(1, world.device[1], &mut random);
        for (n, len) in SIZES.into_iter().enumerate() {
            let from = world.remote_device[1].at(n as u64);
            world.post(0, n as u64, SendOp::Read(from), &[sge(world.device[0], 5, len)]);
            world.success(0, n as u64);
            assert_eq!(world.read(0, world.device[0], 5, len), source[n..n + len], "{len} bytes");
        }
        world.end();
    }
}

#[test]
fn messages_are_there_when_they_complete() {
    let mut random = Random::from_env("FERROCE_DEVICE_SEED");
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let setup = Setup { qp_type, ..Setup::default() };
        let mut world = World::new(1, LinkConfig::default(), setup, &late(), 1 << 18);
        let source = world.fill(0, world.device[0], &mut random);
        let (grh, most) = if qp_type == QpType::Ud { (40, 1024) } else { (0, usize::MAX) };
        for (n, len) in SIZES.into_iter().enumerate().filter(|(_, len)| *len <= most) {
            let wr_id = n as u64;
            world.post_recv(1, wr_id, &[sge(world.device[1], 7, grh + len)]);
            let op = world.pair.ends[0].send_op();
            world.post(0, wr_id, op, &[sge(world.device[0], wr_id, len)]);
            let completion = world.success(1, wr_id);
            assert_eq!(completion.byte_len as usize, grh + len);
            assert_eq!(
                world.read(1, world.device[1], 7 + grh as u64, len),
                source[n..n + len],
                "{qp_type:?}, {len} bytes"
            );
            world.success(0, wr_id);
        }
        world.end();
    }
}

#[test]
fn a_message_may_have_pieces_of_host_and_device() {
    let mut random = Random::from_env("FERROCE_DEVICE_SEED");
    let mut world = World::new(1, LinkConfig::default(), Setup::default(), &late(), 1 << 16);
    let config = QpConfig::rc(world.pair.ends[0].pd, world.pair.ends[0].cq);
    assert!(config.max_send_sge >= 4);
    let (device, host) =
        (world.fill(0, world.device[0], &mut random), world.fill(0, world.host[0], &mut random));
    let (d, h) = (world.device, world.host);
    world.post_recv(1, 1, &[sge(h[1], 0, 1000)]);
    world.post(0, 1, SendOp::Send, &[sge(d[0], 10, 300), sge(h[0], 20, 500), sge(d[0], 1000, 200)]);
    world.success(1, 1);
    let expected = [&device[10..310], &host[20..520], &device[1000..1200]].concat();
    assert_eq!(world.read(1, h[1], 0, 1000), expected);
    world.success(0, 1);
    world.end();
}

/// They arrive in one poll and are copied at once, as far as one copy has room for pieces; a packet that continues the last
/// one needs no further piece.
#[test]
fn many_pieces_come_in_one_poll() {
    for read in [false, true] {
        let mut world = World::new(1, LinkConfig::default(), Setup::default(), &late(), 1 << 16);
        let (from, to) = if read { (1, 0) } else { (0, 1) };
        let source = world.fill(from, world.host[from], &mut Random::new(1));
        let (host, device) = (world.host[from], world.device[to]);
        let apart = |n: u64| [0, 1, 2, 3].map(|i| sge(device, 1000 + 64 * (4 * n + i), 8));
        let long = [sge(device, 8192, 1100), sge(device, 16_384, 500), sge(device, 32_768, 8)];
        let mut lists: Vec<Vec<Sge>> = (0..8).map(|n| apart(n).to_vec()).collect();
        lists.push(long.to_vec());
        for (n, list) in (0..).zip(&lists) {
            let len = list.iter().map(|piece| piece.length as usize).sum();
            if read {
                world.post(0, n, SendOp::Read(world.remote_host[1].at(0)), list);
            } else {
                world.post_recv(1, n, list);
                world.post(0, n, SendOp::Send, &[sge(host, 0, len)]);
            }
        }
        for n in 0..9 {
            world.success(0, n);
        }
        for list in lists {
            let found: Vec<u8> = list
                .iter()
                .flat_map(|piece| world.read(to, piece.mr, piece.offset, piece.length as usize))
                .collect();
            assert_eq!(found, source[..found.len()], "read {read}");
        }
    }
}

/// Data is gathered once per chunk, not per packet.
#[test]
fn data_is_copied_per_chunk() {
    let mut world = World::new(1, LinkConfig::default(), Setup::default(), &late(), 1 << 20);
    let len = 1 << 20;
    world.post(0, 1, SendOp::Write(world.remote_device[1].at(0)), &[sge(world.device[0], 0, len)]);
    world.success(0, 1);
    let (gathers, gathered) = world.devices[0].copies();
    let (scatters, scattered) = world.devices[1].copies();
    assert_eq!((gathers, gathered, scattered), (16, 1 << 20, 1 << 20));
    assert!(scatters <= 32, "{scatters} copies of 1024 packets");
    let counted = [0, 1].map(|end| {
        let counters = world.pair.ends[end].context.counters();
        [Counter::DeviceGathers, Counter::DeviceScatters, Counter::DeviceBytes].map(|c| counters.value(c))
    });
    assert_eq!(counted, [[gathers, 0, gathered], [0, scatters, scattered]]);
    world.end();
}

/// A window can't grant atomics that its region does not support.
#[test]
fn windows_for_atomics_are_not_bound_to_memory_of_devices() {
    let mut world = World::new(1, LinkConfig::default(), Setup::default(), &late(), 4096);
    let end = &mut world.pair.ends[0];
    let memory = end.context.deregister(world.device[0]).unwrap();
    let mr = end.context.register(end.pd, memory, rights() | Access::MW_BIND).unwrap();
    let mw = end.context.alloc_mw(end.pd).unwrap();
    world.device[0] = mr;
    let bind = |access| SendOp::BindMw { mw, mr, offset: 0, length: 64, access };
    world.post(0, 1, bind(Access::REMOTE_WRITE), &[]);
    let statuses = |world: &mut World| -> Vec<WcStatus> {
        world.completions_within(0, Duration::from_millis(1)).iter().map(|wc| wc.status).collect()
    };
    assert_eq!(statuses(&mut world), [WcStatus::Success]);
    let rkey = world.pair.ends[0].context.remote_window(mw).unwrap().unwrap().rkey;
    world.post(0, 2, SendOp::LocalInvalidate(rkey), &[]);
    world.post(0, 3, bind(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC), &[]);
    assert_eq!(statuses(&mut world), [WcStatus::Success, WcStatus::MwBindErr]);
}

#[test]
fn atomics_are_refused_when_requested() {
    let mut world = World::new(1, LinkConfig::default(), Setup::default(), &late(), 4096);
    let end = &mut world.pair.ends[0];
    let remote = world.remote_host[1].at(0);
    let (op, sges) = (SendOp::FetchAdd { remote, add: 1 }, [sge(world.device[0], 0, 8)]);
    let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
    let refused = end.context.post_send(end.qp, &wr).unwrap_err();
    assert!(matches!(refused, Error::Unsupported(Feature::AtomicsOfDevice)), "{refused}");
    let memory = end.context.deregister(world.device[0]).unwrap();
    let refused =
        end.context.register(end.pd, memory, Access::REMOTE_ATOMIC | Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(refused.source, Error::Unsupported(Feature::AtomicsOfDevice)), "{refused}");
}
