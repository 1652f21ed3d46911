//! Queue pairs to one destination share its window: a path whose queue holds the window of one queue pair loses nothing,
//! however many there are.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, Verdict};
use ferroce::*;
use ferroce_test_support::pair::{Pair, Setup};

const MESSAGE: u32 = 1 << 16;
/// 67 ms.
const TIMEOUT: u8 = 14;

/// 1 Gb/s, with a queue of this many frames of path MTU 1024.
fn bottleneck(frames: u64) -> LinkConfig {
    LinkConfig::default().delay(Duration::from_micros(50)).rate(1_000_000_000).queue_limit(frames * 1130)
}

fn remote(pair: &Pair) -> RemoteAddress {
    let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    RemoteAddress { addr: remote.addr, rkey: remote.rkey }
}

/// Posts a message to queue pair `number`.
fn post(pair: &mut Pair, number: usize, op: SendOp) {
    post_long(pair, number, op, MESSAGE);
}

fn post_long(pair: &mut Pair, number: usize, op: SendOp, length: u32) {
    let end = &mut pair.ends[0];
    let sges = [Sge { mr: end.mr, offset: 0, length }];
    let wr =
        SendWorkRequest { wr_id: number as u64, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
    end.context.post_send(end.qps[number], &wr).unwrap();
}

/// Runs until this many messages are complete.
fn complete(pair: &mut Pair, mut messages: usize) {
    while messages > 0 {
        match pair.ends[0].context.poll_cq(pair.ends[0].cq).unwrap() {
            Some(wc) => {
                assert_eq!(wc.status, WcStatus::Success);
                messages -= 1;
            }
            None => assert!(pair.step(), "stuck with {messages} messages left"),
        }
    }
}

#[test]
fn many_queue_pairs_overrun_no_queue_that_holds_one_window() {
    let window = u64::from(DEFAULT_WINDOW);
    for (reads, qps, messages) in
        [(false, 1, 40), (false, 8, 10), (false, 64, 4), (false, 200, 2), (true, 1, 40), (true, 8, 10)]
    {
        // Each queue pair may have 4 more packets, or a READ, whatever the others have.
        let each = if reads { u64::from(MESSAGE / 1024) } else { 4 };
        let queue = bottleneck(window + each * qps as u64);
        let mut pair = Pair::new(15, queue, Setup { qps, timeout: TIMEOUT, ..Setup::default() });
        let far = remote(&pair);
        let op = if reads { SendOp::Read(far) } else { SendOp::Write(far) };
        let start = pair.now;
        for number in (0..qps).flat_map(|number| vec![number; messages]) {
            post(&mut pair, number, op);
        }
        complete(&mut pair, qps * messages);
        let packets = (qps * messages) as u64 * 64;
        let bits = (packets * 1024 * 8) as f64 / pair.now.since(start).as_secs_f64();
        let counters = pair.ends[0].context.counters();
        let repeated = counters.value(Counter::RetransmittedPkts);
        let lost = pair.network.counters().queue_dropped;
        println!(
            "reads {reads}, {qps} queue pairs: {lost} lost, {repeated} of {packets} repeated, {:.3} Gb/s",
            bits / 1e9
        );
        assert_eq!((lost, repeated), (0, 0), "reads {reads}, {qps} queue pairs\n{counters}");
        assert!(bits > 0.85e9, "{qps} queue pairs: the link is not used, {bits:.0} b/s");
    }
}

/// The time of four messages of one queue pair during traffic of another one that started earlier and always has work.
fn latecomer(op: fn(RemoteAddress) -> SendOp, length: u32) -> Duration {
    let setup = Setup { qps: 2, timeout: TIMEOUT, ..Setup::default() };
    let mut pair = Pair::new(16, bottleneck(4000), setup);
    let far = remote(&pair);
    for _ in 0..60 {
        post_long(&mut pair, 0, op(far), length);
    }
    for _ in 0..3000 {
        pair.step();
    }
    let start = pair.now;
    for _ in 0..4 {
        post(&mut pair, 1, SendOp::Write(far));
    }
    let (mut left, mut meanwhile) = (4, 0);
    while left > 0 {
        match pair.ends[0].context.poll_cq(pair.ends[0].cq).unwrap() {
            Some(wc) => {
                assert_eq!(wc.status, WcStatus::Success);
                if wc.wr_id == 1 {
                    left -= 1;
                } else {
                    meanwhile += 1;
                    post_long(&mut pair, 0, op(far), length);
                }
            }
            None => assert!(pair.step(), "stuck with {left} messages left"),
        }
    }
    let took = pair.now.since(start);
    println!("4 messages took {took:?}, meanwhile the other had {meanwhile} of {length} bytes");
    assert_eq!(pair.network.counters().queue_dropped, 0);
    assert!(meanwhile > 0, "the other stands still");
    took
}

#[test]
fn a_latecomer_gets_its_share() {
    // Before the first of them are 4.6 ms of the other's packets; with equal shares then 4.6 ms for all.
    let took = latecomer(SendOp::Write, MESSAGE);
    assert!(took < Duration::from_millis(12), "{took:?}");
}

/// Responses are sent by the destination, and are independent of what is sent to it.
#[test]
fn reads_do_not_delay_writes() {
    for length in [MESSAGE, 1 << 20] {
        // 2.3 ms on a separate link, with READ requests and ACKs in the other direction.
        let took = latecomer(SendOp::Read, length);
        assert!(took < Duration::from_millis(6), "READs of {length} bytes: {took:?}");
    }
}

/// Lost packets of queue pairs whose peers are gone fill the window until their ACK timers have expired. Meanwhile others
/// make progress, and afterwards they have the whole link, although every timeout causes a retransmission.
#[test]
fn queue_pairs_without_a_peer_do_not_stop_others() {
    for dead in [1, 64] {
        let setup = Setup { qps: dead + 1, timeout: TIMEOUT, ..Setup::default() };
        let mut pair = Pair::new(16, bottleneck(4000), setup);
        let far = remote(&pair);
        let end = &mut pair.ends[1];
        for gone in &end.qps[..dead] {
            end.context.destroy_qp(*gone).unwrap();
        }
        for number in (0..20).flat_map(|_| 0..dead) {
            post(&mut pair, number, SendOp::Write(far));
        }
        // They fill the window.
        for _ in 0..1000 {
            pair.step();
        }
        let start = pair.now;
        for _ in 0..16 {
            post(&mut pair, dead, SendOp::Write(far));
        }
        // Messages in each period of an ACK timer, and when the last queue pair without a peer gave up.
        let mut done = [0; 9];
        let mut given_up = Duration::ZERO;
        loop {
            let now = pair.now.since(start);
            let Some(done) = done.get_mut((now.as_micros() / 67_109) as usize) else { break };
            match pair.ends[0].context.poll_cq(pair.ends[0].cq).unwrap() {
                Some(wc) if wc.wr_id == dead as u64 => {
                    assert_eq!(wc.status, WcStatus::Success);
                    *done += 1;
                    post(&mut pair, dead, SendOp::Write(far));
                }
                Some(wc) if wc.status == WcStatus::RetryExcErr => given_up = now,
                Some(wc) => assert_eq!(wc.status, WcStatus::WrFlushErr),
                None => assert!(pair.step()),
            }
        }
        println!("{dead} without a peer until {given_up:?}: {done:?} messages each 67 ms");
        // 118 is the link's capacity. 4 packets per round trip of 0.14 ms are 30.
        assert!(given_up > Duration::from_millis(500), "{given_up:?}");
        assert!(done[0] >= 25, "{dead} without a peer: {done:?}");
        assert!(done[1..].iter().all(|messages| *messages >= 100), "{dead} without a peer: {done:?}");
    }
}

/// After an outage in which every ACK timer expires nothing more is lost: the packets to probe whether the peer is there
/// again are a quarter of the window, and each queue pair may have 4 more.
#[test]
fn many_queue_pairs_resume_after_an_outage() {
    const QPS: usize = 64;
    let setup = Setup { qps: QPS, timeout: TIMEOUT, ..Setup::default() };
    let queue = u64::from(DEFAULT_WINDOW) * 5 / 4 + 4 * QPS as u64;
    let mut pair = Pair::new(17, bottleneck(queue), setup);
    let far = remote(&pair);
    for number in (0..8).flat_map(|_| 0..QPS) {
        post(&mut pair, number, SendOp::Write(far));
    }
    for _ in 0..1000 {
        pair.step();
    }
    pair.network.set_filter(Box::new(|_| Verdict::Drop));
    let start = pair.now;
    while pair.now.since(start) < Duration::from_millis(100) {
        pair.step();
    }
    let dropped = pair.network.counters().queue_dropped;
    pair.network.set_filter(Box::new(|_| Verdict::Pass));
    let start = pair.now;
    complete(&mut pair, 8 * QPS);
    let took = pair.now.since(start);
    let timeouts = pair.ends[0].context.counters().value(Counter::LocalAckTimeoutErr);
    println!("resumed after {timeouts} timeouts: {took:?}");
    assert!(timeouts >= QPS as u64, "{timeouts}");
    assert_eq!(pair.network.counters().queue_dropped, dropped);
    // 32,768 packets take 296 ms; before is the rest of an ACK timer.
    assert!(took < Duration::from_millis(400), "{took:?}");
}
