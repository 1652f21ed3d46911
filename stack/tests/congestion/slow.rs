//! Senders at the lowest rate: the worst effect of a few forged CNPs.

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::{Config, Counter, Dcqcn, PathMtu, QpState, RemoteAddress, SendOp, WcStatus};
use ferroce_test_support::packet::{NAK_SEQUENCE, ack, nak};
use ferroce_test_support::pair::{self, Pair};
use ferroce_test_support::peer::{Peer, REMOTE, SQ, Setup, pattern, sge};

use crate::{GIGABIT, cnp, reaction, with};

fn slow(config: Config) -> Config {
    with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(1), 10 * GIGABIT)
}

/// The ACK timer does not include the pacer's delay: a packet not yet retransmitted is not lost again.
#[test]
fn a_retransmission_delayed_by_the_pacer_uses_no_retries() {
    for timeout in [9, 10, 11, 12] {
        let setup = Setup { config: slow, mtu: PathMtu::Mtu4096, timeout, ..Setup::default() };
        let mut peer = Peer::with(setup);
        let mr = peer.memory(&pattern(1 << 15));
        peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 1 << 15)]);
        let first = peer.take_packets();
        assert_eq!(first.len(), 4);
        // The second was lost; nothing else is.
        peer.inject(nak(NAK_SEQUENCE, SQ + 1, 0));
        let mut psn = SQ + 1;
        for _ in 0..4000 {
            peer.advance(Duration::from_micros(100));
            for got in peer.take_packets() {
                if got.psn() == psn {
                    psn += 1;
                }
                peer.inject(ack(psn - 1, u32::from(psn == SQ + 8)));
            }
        }
        let (state, timeouts) =
            (peer.query().state, peer.context.counters().value(Counter::LocalAckTimeoutErr));
        println!("timeout {timeout}: {state:?}, {timeouts} timeouts, {} packets came", psn - SQ);
        let wc = peer.context.poll_cq(peer.cq).unwrap();
        assert_eq!(wc.map(|wc| wc.status), Some(WcStatus::Success), "timeout {timeout}");
        assert_eq!(timeouts, 0, "timeout {timeout}");
    }
}

/// Sixteen CNPs, no loss: the connection survives. The attacker knows an address and a queue pair number.
#[test]
fn forged_cnps_do_not_end_a_connection() {
    for timeout in [8, 9, 10, 11, 12] {
        let config = |config| with(config, Dcqcn::MLX5, 25 * GIGABIT);
        let mut peer = Peer::with(Setup { config, mtu: PathMtu::Mtu4096, timeout, ..Setup::default() });
        let mr = peer.memory(&pattern(1 << 20));
        peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 1 << 20)]);
        // Five of 256 packets were sent, none of which requests an ACK.
        peer.poll();
        let mut psn = SQ;
        let mut seen = |peer: &mut Peer| {
            for got in peer.take_packets() {
                let asks = got.bth.ack_req();
                if got.psn() == psn {
                    psn += 1;
                }
                if asks {
                    peer.inject(ack(psn - 1, u32::from(psn == SQ + 256)));
                }
            }
            psn
        };
        // The CNPs continue.
        for n in 0..40_000 {
            if n % 2 == 0 {
                peer.inject(cnp());
            }
            peer.advance(Duration::from_micros(5));
            seen(&mut peer);
        }
        let came = seen(&mut peer) - SQ;
        let timeouts = peer.context.counters().value(Counter::LocalAckTimeoutErr);
        println!(
            "timeout {timeout}: {:?} at {} bit/s, {timeouts} timeouts, {came} packets came",
            peer.query().state,
            reaction(&peer).rate
        );
        let state = peer.query().state;
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
        let _ = peer.end();
        assert_eq!(state, QpState::Rts, "timeout {timeout}, {came} packets came, none was lost");
    }
}

/// As `a_slow_sender_asks_often_enough_to_hear_in_time`, with selective repeat negotiated by both ends.
fn asks_often_enough(setup: pair::Setup, seconds: u64, read: bool) -> (u64, u64, u64) {
    let mut pair = Pair::new(3, LinkConfig::default().delay(Duration::from_micros(2)), setup);
    let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
    let (start, mut posted) = (pair.now.0, 0);
    while pair.now.0 < start + seconds * GIGABIT {
        while posted < 4 {
            let op = if read { SendOp::Read(remote) } else { SendOp::Write(remote) };
            pair.ends[0].post_send(0, op, 0, 1 << 18);
            posted += 1;
        }
        assert!(pair.step());
        let end = &mut pair.ends[0];
        while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
            assert_eq!(wc.status, WcStatus::Success, "after {} ms", (pair.now.0 - start) / 1_000_000);
            posted -= 1;
        }
    }
    let counters = pair.ends[0].context.counters();
    let from = pair.ends[usize::from(read)].context.counters();
    (
        counters.value(Counter::LocalAckTimeoutErr),
        from.value(Counter::SentPkts),
        counters.value(Counter::RetransmittedPkts),
    )
}

#[test]
fn a_slow_selective_sender_asks_often_enough_to_hear_in_time() {
    for (megabits, timeout) in [(2, 14), (10, 14), (10, 12), (100, 9)] {
        let config = match megabits {
            2 => |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(2), 10 * GIGABIT),
            10 => |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(10), 10 * GIGABIT),
            _ => |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(100), 10 * GIGABIT),
        };
        let plain = pair::Setup { config, timeout, retry_count: 1, ..pair::Setup::default() };
        println!(
            "{megabits} Mb/s, timeout {timeout}, go back n (timeouts, sent, resent): {:?}",
            asks_often_enough(plain, 2, false)
        );
        let setup = pair::Setup { selective_repeat: true, ..plain };
        let outcome = asks_often_enough(setup, 2, false);
        println!("{megabits} Mb/s, timeout {timeout}, selective: {outcome:?}");
        assert_eq!((outcome.0, outcome.2), (0, 0), "{megabits} Mb/s, timeout {timeout}");
    }
}

/// READs from a slow sender. The requester does not know its rate: its ACK timeout must exceed the time of a frame there.
/// One of 4 KiB takes 33 ms.
#[test]
fn reads_from_a_slow_responder_complete() {
    for (mtu, timeout, selective_repeat) in [
        (PathMtu::Mtu1024, 14, false),
        (PathMtu::Mtu1024, 12, false),
        (PathMtu::Mtu1024, 14, true),
        (PathMtu::Mtu1024, 12, true),
        (PathMtu::Mtu4096, 14, false),
    ] {
        let setup = pair::Setup {
            config: slow,
            timeout,
            path_mtu: mtu,
            selective_repeat,
            retry_count: 1,
            ..pair::Setup::default()
        };
        let outcome = std::panic::catch_unwind(|| asks_often_enough(setup, 4, true));
        println!(
            "{mtu:?}, timeout {timeout}, selective {selective_repeat} (timeouts, sent, resent): {outcome:?}"
        );
        assert!(
            outcome.is_ok_and(|outcome| outcome.0 == 0),
            "{mtu:?}, timeout {timeout}, selective {selective_repeat}"
        );
    }
}

#[test]
fn a_slow_sender_recovers_from_loss() {
    for selective_repeat in [false, true] {
        for (megabits, timeout) in [(10, 12), (100, 10), (1000, 8)] {
            let config = match megabits {
                10 => |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(10), 10 * GIGABIT),
                100 => |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(100), 10 * GIGABIT),
                _ => |config| with(config, Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(1000), 10 * GIGABIT),
            };
            let mut done = [0; 2];
            for (n, loss) in [0.0, 0.01].into_iter().enumerate() {
                let setup = pair::Setup { config, timeout, selective_repeat, ..pair::Setup::default() };
                let link = LinkConfig::default().delay(Duration::from_micros(2)).loss(loss);
                let mut pair = Pair::new(3, link, setup);
                let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
                let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
                let (start, mut posted) = (pair.now.0, 0);
                while pair.now.0 < start + 10_000 / megabits * GIGABIT / 1000 {
                    while posted < 16 {
                        pair.ends[0].post_send(0, SendOp::Write(remote), 0, 1 << 16);
                        posted += 1;
                    }
                    assert!(pair.step());
                    let end = &mut pair.ends[0];
                    while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
                        assert_eq!(
                            wc.status,
                            WcStatus::Success,
                            "{megabits} Mb/s, loss {loss}, selective {selective_repeat}"
                        );
                        posted -= 1;
                        done[n] += 1;
                    }
                }
                let counters = pair.ends[0].context.counters();
                println!(
                    "{megabits} Mb/s, timeout {timeout}, selective {selective_repeat}, loss {loss}: {} messages of 64 KiB, timeouts {}, resent {} of {}",
                    done[n],
                    counters.value(Counter::LocalAckTimeoutErr),
                    counters.value(Counter::RetransmittedPkts),
                    counters.value(Counter::SentPkts)
                );
            }
            assert!(done[1] * 2 >= done[0], "{megabits} Mb/s, selective {selective_repeat}: {done:?}");
        }
    }
}
