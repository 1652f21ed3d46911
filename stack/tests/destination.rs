//! Queue pairs to one destination share its window: a way there whose queue holds what one queue pair may have in
//! flight loses nothing however many there are.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[expect(dead_code, unreachable_pub, reason = "a module shared by test programs")]
mod pair;

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use pair::{Pair, Setup};

const MESSAGE: u32 = 1 << 16;
/// 67 ms.
const TIMEOUT: u8 = 14;

/// 1 Gb/s, with a queue of so many frames of path MTU 1024.
fn bottleneck(frames: u64) -> LinkConfig {
    LinkConfig {
        delay: Duration::from_micros(50),
        rate: Some(1_000_000_000),
        queue_limit: Some(frames * 1130),
        ..LinkConfig::default()
    }
}

fn remote(pair: &Pair) -> RemoteAddress {
    let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    RemoteAddress { addr: remote.addr, rkey: remote.rkey }
}

/// Posts a message to queue pair `number`.
fn post(pair: &mut Pair, number: usize, op: SendOp) {
    let end = &mut pair.ends[0];
    let sges = [Sge { mr: end.mr, offset: 0, length: MESSAGE }];
    let wr =
        SendWorkRequest { wr_id: number as u64, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
    end.context.post_send(end.qps[number], &wr).unwrap();
}

/// Goes on until so many messages are complete.
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
        // Each queue pair may have 4 packets besides, or a READ, whatever the others have.
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

/// What is lost for good at a queue pair that is gone fills the window until the ACK timer has run out; others go on.
#[test]
fn a_queue_pair_without_a_peer_stops_no_other() {
    let setup = Setup { qps: 2, timeout: TIMEOUT, ..Setup::default() };
    let mut pair = Pair::new(16, bottleneck(1000), setup);
    let far = remote(&pair);
    let gone = pair.ends[1].qps[0];
    pair.ends[1].context.destroy_qp(gone).unwrap();
    for _ in 0..20 {
        post(&mut pair, 0, SendOp::Write(far));
    }
    // It fills the window.
    for _ in 0..1000 {
        pair.step();
    }
    let start = pair.now;
    for _ in 0..20 {
        post(&mut pair, 1, SendOp::Write(far));
    }
    complete(&mut pair, 20);
    let took = pair.now.since(start);
    println!("20 messages in {took:?}");
    // 11 ms on a link of its own; 4 packets a round trip of 0.14 ms would take 45.
    assert!(took < Duration::from_millis(60), "{took:?}");
}
