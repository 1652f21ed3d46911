//! Goodput over a simulated link of 100 Gb/s and 10 µs round trip, by loss: the purpose of selective repeat. In virtual
//! time, so a run is the same on every machine.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_test_support::pair::{Pair, Setup};

/// Bytes of a message, except with many READs at once.
const MESSAGE: u32 = 1 << 18;
/// Outstanding messages.
const OUTSTANDING: u64 = 32;

struct Run {
    path_mtu: PathMtu,
    /// One packet in this many is lost; 0 for none.
    loss: u32,
    selective_repeat: bool,
    reads: bool,
    message: u32,
    max_rd_atomic: u8,
}

impl Default for Run {
    fn default() -> Run {
        Run {
            path_mtu: PathMtu::Mtu1024,
            loss: 0,
            selective_repeat: true,
            reads: false,
            message: MESSAGE,
            max_rd_atomic: 16,
        }
    }
}

impl Run {
    /// Transfers about 100 000 packets. Returns bits of payload per second, and the requester's counters.
    fn goodput(&self) -> (f64, Counters) {
        let Run { path_mtu, loss, selective_repeat, reads, message, max_rd_atomic } = *self;
        let messages = 100_000 / u64::from(path_mtu.packets(message));
        let link = LinkConfig::default()
            .loss(if loss == 0 { 0.0 } else { 1.0 / f64::from(loss) })
            .delay(Duration::from_micros(5))
            .rate(100_000_000_000);
        // Fewer than the default, so that they would be used up if losses counted as retries.
        let setup = Setup { path_mtu, selective_repeat, max_rd_atomic, retry_count: 2, ..Setup::default() };
        let mut pair = Pair::new(11, link, setup);
        let remote = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
        let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        let op = if reads { SendOp::Read(remote) } else { SendOp::Write(remote) };
        let start = pair.now;
        let (mut posted, mut completed) = (0, 0);
        while completed < messages {
            let end = &mut pair.ends[0];
            while posted < messages && posted < completed + OUTSTANDING {
                let sges = [Sge { mr: end.mr, offset: 0, length: message }];
                let (data, flags) = (Data::Sges(&sges), SendFlags::SIGNALED);
                end.context.post_send(end.qp, &SendWorkRequest { wr_id: posted, op, data, flags }).unwrap();
                posted += 1;
            }
            match end.context.poll_cq(end.cq).unwrap() {
                Some(wc) => {
                    assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, completed));
                    completed += 1;
                }
                None => assert!(pair.step(), "stuck after {completed}"),
            }
        }
        let bits = (messages * u64::from(MESSAGE) * 8) as f64;
        (bits / pair.now.since(start).as_secs_f64(), pair.ends[0].context.counters().clone())
    }
}

/// The largest reduction of goodput with selective repeat, by loss.
const BOUNDS: [(u32, f64); 4] = [(4096, 0.01), (1024, 0.02), (256, 0.06), (64, 0.15)];

#[test]
fn selective_repeat_loses_little_more_goodput_than_packets() {
    for path_mtu in [PathMtu::Mtu1024, PathMtu::Mtu4096] {
        let run = |loss| Run { path_mtu, loss, ..Run::default() }.goodput();
        let (whole, _) = run(0);
        println!("path MTU {path_mtu}: {:.2} Gb/s", whole / 1e9);
        for (loss, bound) in BOUNDS {
            let (rate, counters) = run(loss);
            println!("loss 1/{loss}: {:.4}\n{counters}", rate / whole);
            assert!(rate >= (1.0 - bound) * whole, "path MTU {path_mtu}, loss 1/{loss}: {:.4}", rate / whole);
            // Lost packets are retransmitted once, and almost nothing else.
            let sent = counters.value(Counter::SentPkts) as f64;
            let repeated = counters.value(Counter::RetransmittedPkts) as f64;
            let lost = sent / f64::from(loss);
            assert!(repeated <= 1.2 * lost + 20.0, "{repeated} sent again where about {lost:.0} were lost");
        }
    }
}

#[test]
fn selective_repeat_of_reads_too() {
    let run = |loss| Run { loss, reads: true, ..Run::default() }.goodput();
    let (whole, _) = run(0);
    println!("{:.2} Gb/s", whole / 1e9);
    for (loss, bound) in BOUNDS {
        let (rate, counters) = run(loss);
        println!("loss 1/{loss}: {:.4}\n{counters}", rate / whole);
        assert!(rate >= (1.0 - bound) * whole, "loss 1/{loss}: {:.4}", rate / whole);
    }
}

/// A READ that is requested again overtakes those that are held at the responder after a lost request. Its response is no
/// evidence about them.
#[test]
fn many_concurrent_reads_are_not_all_requested_again() {
    let many = Run {
        path_mtu: PathMtu::Mtu4096,
        reads: true,
        message: 1 << 16,
        max_rd_atomic: 128,
        ..Run::default()
    };
    let (whole, _) = many.goodput();
    let (rate, counters) = Run { loss: 128, ..many }.goodput();
    println!("{:.4}\n{counters}", rate / whole);
    assert!(rate >= 0.9 * whole, "{:.4}", rate / whole);
}

/// Without loss there is neither a gain nor a cost.
#[test]
fn without_loss_both_have_equal_goodput() {
    for reads in [false, true] {
        let run = |selective_repeat| Run { selective_repeat, reads, ..Run::default() }.goodput();
        let ((selective, _), (plain, _)) = (run(true), run(false));
        println!("reads {reads}: {:.2} Gb/s, go-back-N {:.2}", selective / 1e9, plain / 1e9);
        assert!((selective / plain - 1.0).abs() < 0.005, "{selective} and {plain}");
    }
}
