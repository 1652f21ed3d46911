//! Paced queue pairs together with others, windows, and address families.

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::wire::{NetworkHeader, Opcode};
use ferroce::{
    AddressVector, CongestionControl, Data, Dcqcn, PathMtu, Psn, Qp, QpConfig, QpType, ReadyToReceive,
    ReadyToSend, RemoteAddress, SendFlags, SendOp, SendWorkRequest, Sge, Transition, WcStatus,
};
use ferroce_test_support::pair::{self, Pair};
use ferroce_test_support::peer::{Peer, REMOTE, Setup, all_access, pattern, sge};

use crate::{GIGABIT, with};

fn slow(megabits: u32) -> CongestionControl {
    CongestionControl::Dcqcn(Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(megabits))
}

/// Another connection between the two ends, with congestion control at each of them.
fn connection(
    pair: &mut Pair,
    controls: [CongestionControl; 2],
    mtu: PathMtu,
    window: Option<u32>,
) -> [Qp; 2] {
    let mut n = 0;
    let qps = pair.ends.each_mut().map(|end| {
        let config = QpConfig::rc(end.pd, end.cq).max_send_wr(64).congestion(controls[n]).window(window);
        n += 1;
        end.context.create_qp(&config).unwrap()
    });
    let qpns = [0, 1].map(|n| pair.ends[n].context.query_qp(qps[n]).unwrap().qpn);
    let gids = [0, 1].map(|n| pair.ends[n].context.port().gids[0].gid);
    for n in 0..2 {
        let way = AddressVector::new(gids[1 - n], 0);
        let context = &mut pair.ends[n].context;
        context.modify_qp(qps[n], Transition::Init { access: all_access() }).unwrap();
        let receive = ReadyToReceive::new(way, qpns[1 - n], Psn::new(7)).path_mtu(mtu);
        context.modify_qp(qps[n], Transition::ReadyToReceive(receive)).unwrap();
        let send = ReadyToSend::new(Psn::new(7)).timeout(16);
        context.modify_qp(qps[n], Transition::ReadyToSend(send)).unwrap();
    }
    qps
}

/// The bytes that each connection transfers in this many ns; the first `reads` ones by READs.
fn share(pair: &mut Pair, qps: &[Qp], reads: usize, time: u64) -> Vec<u64> {
    let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
    let (mut posted, mut done) = (vec![0; qps.len()], vec![0; qps.len()]);
    let start = pair.now.0;
    while pair.now.0 < start + time {
        let end = &mut pair.ends[0];
        for (n, qp) in qps.iter().enumerate() {
            while posted[n] < 8 {
                let data = [Sge { mr: end.mr, offset: 0, length: 1 << 18 }];
                let op = if n < reads { SendOp::Read(remote) } else { SendOp::Write(remote) };
                let wr = SendWorkRequest {
                    wr_id: n as u64,
                    op,
                    data: Data::Sges(&data),
                    flags: SendFlags::SIGNALED,
                };
                end.context.post_send(*qp, &wr).unwrap();
                posted[n] += 1;
            }
        }
        assert!(pair.step());
        let end = &mut pair.ends[0];
        while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
            assert_eq!(wc.status, WcStatus::Success, "connection {}", wc.wr_id);
            posted[wc.wr_id as usize] -= 1;
            done[wc.wr_id as usize] += 1 << 18;
        }
    }
    done
}

/// A slow responder does not occupy the window of its destination at the expense of fast ones.
#[test]
fn slow_queue_pairs_do_not_block_fast_ones() {
    let off = CongestionControl::Off;
    let rate = |bytes: u64, time: u64| 8.0 * bytes as f64 / time as f64;
    let new = || {
        let config = |config: ferroce::Config| config.line_rate(25 * GIGABIT);
        let setup = pair::Setup { config, ..pair::Setup::default() };
        Pair::new(3, LinkConfig::default().delay(Duration::from_micros(20)).rate(25 * GIGABIT), setup)
    };
    let time = 20_000_000;
    let mut pair = new();
    let alone = connection(&mut pair, [off; 2], PathMtu::Mtu1024, None);
    let alone = rate(share(&mut pair, &[alone[0]], 0, time)[0], time);
    for (what, reads, controls) in [("WRITEs", 0, [slow(10), off]), ("READs", 4, [off, slow(10)])] {
        let mut pair = new();
        let mut qps: Vec<Qp> =
            (0..4).map(|_| connection(&mut pair, controls, PathMtu::Mtu1024, None)[0]).collect();
        qps.push(connection(&mut pair, [off; 2], PathMtu::Mtu1024, None)[0]);
        let done = share(&mut pair, &qps, reads, time);
        let beside = rate(done[4], time);
        println!("alone {alone:.1} Gb/s, beside four slow {what} {beside:.1} Gb/s");
        assert!(beside >= 0.8 * alone, "alone {alone:.1} Gb/s, beside four slow {what} {beside:.1} Gb/s");
    }
}

/// The window of a queue pair applies, paced or not.
#[test]
fn a_window_of_few_packets_works() {
    for window in [1, 2, 3, 15, 16, 17] {
        for control in [CongestionControl::Off, slow(1000)] {
            let config = |config: ferroce::Config| config.line_rate(25 * GIGABIT);
            let setup = pair::Setup { config, ..pair::Setup::default() };
            let link = LinkConfig::default().delay(Duration::from_micros(2)).rate(25 * GIGABIT).loss(0.001);
            let mut pair = Pair::new(3, link, setup);
            let [qp, _] = connection(&mut pair, [control; 2], PathMtu::Mtu1024, Some(window));
            let done = share(&mut pair, &[qp], 0, 50_000_000)[0];
            println!("window {window}, {control}: {:.2} Gb/s", done as f64 * 8.0 / 5e7);
            assert!(done > 0);
        }
    }
}

/// Five hundred rates on one engine, from 1 Mb/s to 5 Gb/s; each is accurate.
#[test]
fn very_different_rates_are_all_accurate() {
    const QPS: u32 = 500;
    let setup = Setup {
        qp_type: QpType::Uc,
        mtu: PathMtu::Mtu1024,
        config: |config| with(config.max_qps(1024), Dcqcn::PAPER, 400 * GIGABIT),
        ..Setup::default()
    };
    let mut peer = Peer::with(setup);
    let mr = peer.memory(&pattern(1 << 20));
    let rates: Vec<u32> = (0..QPS).map(|n| 1 + n * n / 50).collect();
    for (n, rate) in rates.iter().enumerate() {
        let config = QpConfig::uc(peer.pd, peer.cq).max_send_wr(64).congestion(slow(*rate));
        let qp = peer.context.create_qp(&config).unwrap();
        for transition in peer.transitions(&Setup { sq_psn: (n as u32) << 14, ..setup }) {
            peer.context.modify_qp(qp, transition).unwrap();
        }
        for _ in 0..12 {
            let data = [sge(mr, 1 << 20)];
            let wr = SendWorkRequest {
                wr_id: 0,
                op: SendOp::Write(REMOTE),
                data: Data::Sges(&data),
                flags: SendFlags::default(),
            };
            peer.context.post_send(qp, &wr).unwrap();
        }
    }
    let mut bytes = vec![0; QPS as usize];
    peer.poll();
    peer.take_packets();
    for _ in 0..1000 {
        peer.now = peer.now + Duration::from_micros(10);
        for got in peer.take_packets() {
            bytes[(got.psn() >> 14) as usize] += got.frame.len() as u64;
        }
    }
    let mut worst = 0.0_f64;
    for (sent, rate) in bytes.iter().zip(&rates) {
        let ideal = f64::from(*rate) * 1e6 * 0.01 / 8.0;
        let frames = (*sent as f64 - ideal).abs() / 1098.0;
        worst = worst.max((frames - 4.0) * 1098.0 / ideal);
        assert!(frames <= 4.0 + 0.02 * ideal / 1098.0, "{sent} bytes at {rate} Mb/s, {ideal} would be right");
    }
    println!("worst beyond four frames: {worst}");
    let _ = peer.end();
}

/// The wheel causes little work: polls per frame of a paced queue pair.
#[test]
fn few_polls_for_each_frame() {
    for megabits in [10, 100, 1000] {
        let setup = pair::Setup {
            config: |config| config.line_rate(25 * GIGABIT),
            timeout: 16,
            ..pair::Setup::default()
        };
        let mut pair = Pair::new(3, LinkConfig::default().delay(Duration::from_micros(2)), setup);
        let [qp, _] = connection(&mut pair, [slow(megabits); 2], PathMtu::Mtu1024, None);
        let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
        let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        let data = [Sge { mr: pair.ends[0].mr, offset: 0, length: 1 << 18 }];
        let wr = SendWorkRequest {
            wr_id: 0,
            op: SendOp::Write(remote),
            data: Data::Sges(&data),
            flags: SendFlags::SIGNALED,
        };
        pair.ends[0].context.post_send(qp, &wr).unwrap();
        let mut steps = 0;
        while pair.step() {
            steps += 1;
        }
        println!("{megabits} Mb/s: {steps} steps for 256 packets");
        assert!(steps < 256 * 12, "{steps}");
    }
}

/// ECT(0), over IPv6, in a VLAN, in RoCE v1.
#[test]
fn ipv6_is_marked_as_ipv4_is() {
    let config = |config| with(config, Dcqcn::PAPER, 10 * GIGABIT);
    for class in [0_u8, 0x68, 0xff] {
        let mut peer =
            Peer::with(Setup { ipv6: true, config, state: ferroce::QpState::Reset, ..Setup::default() });
        let mut transitions = peer.transitions(&Setup::default());
        if let Transition::ReadyToReceive(receive) = &mut transitions[1] {
            receive.address.traffic_class = class;
        }
        for transition in transitions {
            peer.modify(transition);
        }
        peer.post_write(1, &pattern(600));
        for got in peer.take_packets() {
            assert_eq!(got.network.header, NetworkHeader::Ipv6);
            assert_eq!(got.network.traffic_class, class & !3 | 2, "{got}");
        }
        peer.post_recv(2, 64);
        peer.inject(
            ferroce_test_support::packet::packet(Opcode::RC_SEND_ONLY, ferroce_test_support::peer::RQ)
                .payload(b"1234")
                .ack_req(),
        );
        peer.expect_wc(2, WcStatus::Success);
        for got in peer.take_packets() {
            assert_eq!(got.network.traffic_class, class & !3, "{got}");
        }
        let _ = peer.end();
    }
}
