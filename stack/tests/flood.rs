//! A flood in addition to valid traffic: every frame is counted under its reason, and nothing else changes. `./do bench
//! --bench flood` measures the cost.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

use ferroce::driver::sim::{LinkConfig, SimPort};
use ferroce::wire::{Encapsulation, PathAddress};
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::junk::{Junk, Target};
use ferroce_test_support::pair::{Pair, Setup};

/// A stranger on the network of a pair, which floods both ends in turn.
struct Flooder {
    port: SimPort,
    frames: Vec<(usize, Junk, Vec<u8>)>,
    next: usize,
    /// By end and kind.
    sent: [[u64; Junk::ALL.len()]; 2],
}

impl Flooder {
    fn new(pair: &Pair, seed: u64) -> Flooder {
        let mut random = Random::new(seed);
        let mut frames = Vec::new();
        for (end, victim) in pair.ends.iter().enumerate() {
            let [ours, peers] = [victim, &pair.ends[1 - end]].map(|end| end.context.port().gids[0].gid);
            let [mac, source_mac] =
                [victim, &pair.ends[1 - end]].map(|end| MacAddr(end.context.capabilities().mac));
            let path = PathAddress {
                source_mac,
                destination_mac: mac,
                vlan: None,
                source: peers,
                destination: ours,
                encapsulation: Encapsulation::RoceV2 { source_port: 0xc123 },
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                identification: 0,
            };
            let qpn = victim.context.query_qp(victim.qp).unwrap().qpn;
            for payload in [0, 64, 1024] {
                let target = Target { path, qpn, payload };
                for kind in Junk::ALL {
                    let of_kind = kind.frames(&target, &mut random);
                    frames.extend(of_kind.into_iter().map(|frame| (end, kind, frame)));
                }
            }
        }
        // So that all kinds and both ends are in random order.
        for n in (1..frames.len()).rev() {
            frames.swap(n, random.below(n as u64 + 1) as usize);
        }
        let port = pair.network.port(&[[10, 0, 0, 3].into()]);
        Flooder { port, frames, next: 0, sent: Default::default() }
    }

    /// Sends this many frames.
    fn pour(&mut self, now: Nanos, count: usize) {
        let Flooder { port, frames, next, sent } = self;
        let last = *next + count;
        let poured = port.tx_burst(now, &mut |buffer: &mut [u8]| {
            if *next == last {
                return None;
            }
            let (end, kind, frame) = &frames[*next % frames.len()];
            buffer[..frame.len()].copy_from_slice(frame);
            sent[*end][*kind as usize] += 1;
            *next += 1;
            Some(frame.len())
        });
        assert_eq!(poured.unwrap(), count);
    }
}

fn seed() -> u64 {
    let given = std::env::var("FERROCE_SEED").ok();
    let seed = given.map_or(7, |v| v.parse().unwrap_or_else(|_| panic!("FERROCE_SEED={v}: a number")));
    println!("replay: FERROCE_SEED={seed} cargo test -p ferroce --test flood -- --nocapture");
    seed
}

/// Every frame was counted under its reason and no other.
fn assert_counted(pair: &Pair, flooder: &Flooder) {
    for (end, sent) in pair.ends.iter().zip(&flooder.sent) {
        for kind in Junk::ALL {
            let counted = end.context.counters().value(kind.counter());
            assert_eq!(counted, sent[kind as usize], "{kind:?}\n{}", end.context.counters());
        }
    }
}

/// Connected idle queue pairs, and 100 000 frames for them.
#[test]
fn a_flood_alone_changes_nothing() {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup::default());
    let mut flooder = Flooder::new(&pair, seed());
    let before = [0, 1].map(|n: usize| pair.ends[n].context.query_qp(pair.ends[n].qp).unwrap());
    let pour = |pair: &mut Pair, flooder: &mut Flooder, bursts| {
        for _ in 0..bursts {
            flooder.pour(pair.now, 100);
            while pair.step() {}
        }
    };
    pour(&mut pair, &mut flooder, 10);
    let allocated = allocation_counter::measure(|| pour(&mut pair, &mut flooder, 1000));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    for (end, before) in pair.ends.iter_mut().zip(before) {
        assert_eq!(end.context.query_qp(end.qp).unwrap(), before);
        assert_eq!(end.context.counters().value(Counter::SentPkts), 0, "a flood is not answered");
        // A flood from other partitions causes one event, whatever its length.
        let told = end.context.next_event();
        assert!(matches!(told, Some(Event::PkeyViolation { qp: Some(qp), .. }) if qp == end.qp), "{told:?}");
        assert_eq!((end.context.next_event(), end.context.poll_cq(end.cq).unwrap()), (None, None));
    }
    assert_counted(&pair, &flooder);
}

/// WRITEs, SENDs and READs with sixteen times as many frames of the flood: nothing is retransmitted, nothing fails, nothing
/// is allocated, and the data is correct.
#[test]
fn a_flood_beside_traffic_changes_nothing() {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup::default());
    let mut flooder = Flooder::new(&pair, seed());
    let traffic = |pair: &mut Pair, flooder: &mut Flooder, messages: u64| {
        let length = 3000;
        let RemoteMemory { addr, rkey, .. } = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
        for n in 0..messages {
            let byte = n as u8;
            let [requester, responder] = &mut pair.ends;
            let offset = n % 3 * 4096;
            let (sges, theirs) =
                ([Sge { mr: requester.mr, offset, length }], [Sge { mr: responder.mr, offset, length }]);
            let remote = RemoteAddress { addr: addr + offset, rkey };
            let (op, source, sink) = match n % 3 {
                0 => (SendOp::Write(remote), 0, 1),
                1 => (SendOp::Send, 0, 1),
                _ => (SendOp::Read(remote), 1, 0),
            };
            if op == SendOp::Send {
                responder
                    .context
                    .post_recv(responder.qp, &ReceiveWorkRequest { wr_id: n, sges: &theirs })
                    .unwrap();
            }
            let range = offset as usize..(offset + u64::from(length)) as usize;
            let end = &mut pair.ends[source];
            end.context.bytes_mut(end.mr).unwrap()[range.clone()].fill(byte);
            let wr = SendWorkRequest { wr_id: n, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
            let requester = &mut pair.ends[0];
            requester.context.post_send(requester.qp, &wr).unwrap();
            let wc = loop {
                // A message of 3 packets and their ACKs.
                flooder.pour(pair.now, 64);
                assert!(pair.step(), "stuck at message {n}");
                let requester = &mut pair.ends[0];
                if let Some(wc) = requester.context.poll_cq(requester.cq).unwrap() {
                    break wc;
                }
            };
            assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, n));
            let end = &pair.ends[sink];
            assert!(end.context.bytes(end.mr).unwrap()[range].iter().all(|b| *b == byte));
            let responder = &mut pair.ends[1];
            while let Some(wc) = responder.context.poll_cq(responder.cq).unwrap() {
                assert_eq!(wc.status, WcStatus::Success);
            }
        }
    };
    traffic(&mut pair, &mut flooder, 30);
    let allocated = allocation_counter::measure(|| traffic(&mut pair, &mut flooder, 300));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    while pair.step() {}
    assert_counted(&pair, &flooder);
    let [requester, responder] =
        [0, 1].map(|n: usize| pair.ends[n].context.query_qp(pair.ends[n].qp).unwrap());
    assert_eq!((requester.state, responder.state), (QpState::Rts, QpState::Rts));
    // Three packets per message, each once; for the READ, those of the response.
    assert_eq!(requester.sq_psn.distance(Setup::default().start_psn[0]), 330 * 3);
    assert_eq!(requester.sq_psn, responder.rq_psn);
    for end in &pair.ends {
        for counter in [Counter::RetransmittedPkts, Counter::DuplicateRequest, Counter::OutOfSequence] {
            assert_eq!(end.context.counters().value(counter), 0, "{counter:?}");
        }
    }
}
