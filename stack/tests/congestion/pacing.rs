//! The frames of a paced queue pair, and their times.

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::{Dcqcn, PathMtu, QpType, RemoteAddress, SendOp, Transition, WcStatus};
use ferroce_test_support::pair::{self, Pair};
use ferroce_test_support::peer::{Peer, REMOTE, RQ, Setup, pattern, sge};

use crate::{GIGABIT, cnp, reaction, with};

/// "Never more than one frame and the burst ahead": credit of a high rate is not used at a low one.
#[test]
fn credit_of_a_high_rate_is_not_spent_at_a_low_one() {
    for (line, mtu) in [(400, PathMtu::Mtu256), (100, PathMtu::Mtu1024), (400, PathMtu::Mtu4096)] {
        let config = if line == 400 {
            |config| with(config, Dcqcn::MLX5, 400 * GIGABIT)
        } else {
            |config| with(config, Dcqcn::MLX5, 100 * GIGABIT)
        };
        let mut peer = Peer::with(Setup { config, mtu, qp_type: QpType::Uc, ..Setup::default() });
        let mr = peer.memory(&pattern(1 << 20));
        // Something is sent, so that the bucket is full; then a series of CNPs, as in an incast.
        peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 64)]);
        peer.advance(Duration::from_micros(100));
        peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 64)]);
        peer.take_packets();
        for _ in 0..40 {
            peer.inject(cnp());
            peer.advance(Duration::from_micros(5));
        }
        let rate = reaction(&peer).rate;
        peer.post(2, SendOp::Write(REMOTE), &[sge(mr, 1 << 19)]);
        let at_once = peer.take_packets();
        let bytes: usize = at_once.iter().map(|sent| sent.frame.len()).sum();
        println!(
            "{line} Gb/s, {mtu:?}: at {rate} bit/s {} frames of {bytes} bytes at once: {} ms of the rate",
            at_once.len(),
            8000.0 * bytes as f64 / rate as f64
        );
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
        assert!(at_once.len() <= 4, "{} frames at once at {rate} bit/s", at_once.len());
        let _ = peer.end();
    }
}

/// Three frames may leave at once after a pause, also after a late poll.
#[test]
fn a_late_poll_does_not_increase_the_burst() {
    let config = |config| with(config, Dcqcn::PAPER.rpg_max_rate(100), 10 * GIGABIT);
    let mut peer =
        Peer::with(Setup { config, mtu: PathMtu::Mtu1024, qp_type: QpType::Uc, ..Setup::default() });
    let mr = peer.memory(&pattern(1 << 18));
    // Until the bucket is overdrawn; then there is nothing more to send.
    peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 4096)]);
    peer.poll();
    peer.now = peer.now + Duration::from_secs(1);
    peer.poll();
    peer.take_packets();
    peer.advance(Duration::from_secs(60));
    assert!(peer.take_packets().is_empty());
    peer.post(2, SendOp::Write(REMOTE), &[sge(mr, 1 << 17)]);
    let at_once = peer.take_packets().len();
    while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
    let _ = peer.end();
    assert!(at_once <= 4, "{at_once} frames at once after a minute of silence");
}

/// The rate of `query_qp` is applied: no frame waits according to an old rate.
#[test]
fn a_waiting_queue_pair_continues_when_its_rate_recovers() {
    let config = |config| with(config, Dcqcn::MLX5, 25 * GIGABIT);
    let mut peer =
        Peer::with(Setup { config, mtu: PathMtu::Mtu4096, qp_type: QpType::Uc, ..Setup::default() });
    let mr = peer.memory(&pattern(1 << 20));
    for wr in 0..20 {
        peer.post(wr, SendOp::Write(REMOTE), &[sge(mr, 1 << 20)]);
    }
    peer.advance(Duration::from_micros(50));
    for _ in 0..16 {
        peer.inject(cnp());
        peer.advance(Duration::from_micros(5));
    }
    let lowest = reaction(&peer).rate;
    let start = peer.now;
    peer.take_packets();
    let (mut allowed, mut sent, mut silent, mut last) = (0.0, 0.0, 0, start);
    let mut recovered = None;
    while peer.now.0 < start.0 + 50_000_000 {
        let rate = reaction(&peer).rate;
        if rate >= 25 * GIGABIT * 9 / 10 && recovered.is_none() {
            recovered = Some(peer.now.0 - start.0);
            println!("recovered to {rate} after {} us", (peer.now.0 - start.0) / 1000);
        }
        allowed += rate as f64 * 100e-6 / 8.0;
        peer.advance(Duration::from_micros(100));
        let got = peer.take_packets();
        if !got.is_empty() {
            if got[0].at.0 - last.0 > silent {
                silent = got[0].at.0 - last.0;
                println!(
                    "silent for {} us until {} us after the CNPs",
                    silent / 1000,
                    (got[0].at.0 - start.0) / 1000
                );
            }
            last = got[got.len() - 1].at;
        }
        sent += got.iter().map(|got| got.frame.len() as f64).sum::<f64>();
        if sent > 1e6 {
            break;
        }
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
    }
    println!("lowest {lowest}; allowed {allowed:.0} bytes, sent {sent:.0}");
    while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
    let _ = peer.end();
    assert!(
        silent < 5_000_000,
        "nothing was sent for {} us; 90 % of the line after {recovered:?} ns",
        silent / 1000
    );
}

/// A poll every 20 µs, no congestion: congestion control costs little throughput.
#[test]
fn without_congestion_the_line_is_used_fully() {
    for (interval, mtu) in [
        (5_000, PathMtu::Mtu1024),
        (10_000, PathMtu::Mtu1024),
        (20_000, PathMtu::Mtu1024),
        (20_000, PathMtu::Mtu4096),
    ] {
        let mut results = Vec::new();
        for on in [false, true] {
            let config = if on { |config| with(config, Dcqcn::MLX5, 25 * GIGABIT) } else { |config| config };
            let setup = pair::Setup { config, timeout: 14, path_mtu: mtu, ..pair::Setup::default() };
            let link = LinkConfig::default().delay(Duration::from_micros(2)).rate(25 * GIGABIT);
            let mut pair = Pair::new(3, link, setup);
            let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
            let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
            let (mut posted, mut done) = (0, 0_u64);
            let start = pair.now.0;
            while pair.now.0 < start + 20_000_000 {
                while posted < 16 {
                    pair.ends[0].post_send(0, SendOp::Write(remote), 0, 1 << 18);
                    posted += 1;
                }
                pair.now.0 += interval;
                let now = pair.now;
                for end in &mut pair.ends {
                    end.context.poll(now).unwrap();
                }
                let end = &mut pair.ends[0];
                while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
                    assert_eq!(wc.status, WcStatus::Success);
                    posted -= 1;
                    done += 1;
                }
            }
            results.push(done as f64 * f64::from(1 << 18) * 8.0 / 20e6);
        }
        println!("a poll each {interval} ns, {mtu:?}: off {:.1} Gb/s, on {:.1} Gb/s", results[0], results[1]);
        assert!(interval > 5000 || results[1] >= 0.9 * results[0], "{results:?}");
        assert!(results[1] >= 0.5 * results[0], "{results:?}");
    }
}

/// An acknowledgement of the peer's requests is not delayed, although data waits.
#[test]
fn acknowledgements_do_not_wait() {
    let config = |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(1), 10 * GIGABIT);
    let mut peer = Peer::with(Setup { config, mtu: PathMtu::Mtu4096, timeout: 20, ..Setup::default() });
    let mr = peer.memory(&pattern(1 << 20));
    peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 1 << 20)]);
    peer.poll();
    peer.take_packets();
    for n in 0..10 {
        peer.post_recv(7, 64);
        peer.inject(
            ferroce_test_support::packet::packet(ferroce::wire::Opcode::RC_SEND_ONLY, RQ + n)
                .payload(b"1234")
                .ack_req(),
        );
        peer.expect_wc(7, WcStatus::Success);
        peer.advance(Duration::from_micros(200));
        let acks = peer.take_packets();
        assert!(
            acks.iter()
                .any(|got| got.opcode == ferroce::wire::Opcode::RC_ACKNOWLEDGE && got.psn() == (RQ + n)),
            "{n}"
        );
    }
    // A gap: the NAK.
    peer.inject(
        ferroce_test_support::packet::packet(ferroce::wire::Opcode::RC_SEND_ONLY, RQ + 15)
            .payload(b"1234")
            .ack_req(),
    );
    let naks = peer.take_packets();
    assert_eq!(naks.len(), 1);
    // Without a receive.
    peer.inject(
        ferroce_test_support::packet::packet(ferroce::wire::Opcode::RC_SEND_ONLY, RQ + 10)
            .payload(b"1234")
            .ack_req(),
    );
    assert_eq!(peer.take_packets().len(), 1);
    let _ = peer.end();
}

/// Draining ends while packets are paced.
#[test]
fn a_paced_queue_pair_drains() {
    let config = |config| with(config, Dcqcn::PAPER.rpg_max_rate(100), 10 * GIGABIT);
    let setup = pair::Setup { config, timeout: 14, ..pair::Setup::default() };
    let mut pair = Pair::new(3, LinkConfig::default().delay(Duration::from_micros(2)), setup);
    let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
    for n in 0..3 {
        pair.ends[0].post_send(n, SendOp::Write(remote), 0, 1 << 18);
    }
    pair.step();
    let qp = pair.ends[0].qp;
    pair.ends[0].context.modify_qp(qp, Transition::Drain).unwrap();
    let mut drained = false;
    while pair.step() {
        while let Some(event) = pair.ends[0].context.next_event() {
            drained |= event == ferroce::Event::SqDrained(qp);
        }
    }
    assert!(drained);
    pair.ends[0].context.modify_qp(qp, Transition::Resume).unwrap();
    while pair.step() {}
    let end = &mut pair.ends[0];
    let mut done = 0;
    while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
        assert_eq!(wc.status, WcStatus::Success);
        done += 1;
    }
    assert_eq!(done, 3);
}
