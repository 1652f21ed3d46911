//! Section H, second part: counters, notifications, fairness, the behaviour of RNICs.

use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::driver::sim::{LinkConfig, SimNetwork, Verdict};
use ferroce::wire::{Encapsulation, Opcode};
use ferroce::{
    Access, AddressVector, Config, Context, Counter, Gid, Nanos, PacketDriver, PathMtu, Psn, QpConfig,
    QpState, Qpn, ReadyToReceive, SendOp, Transition,
};
use ferroce_driver_test_support::random::Random;

use crate::a_parsing::hex;
use crate::packet::{BTH, NAK_RNR, NAK_SEQUENCE, Script, ack, nak, packet, payload, read_response, reseal};
use crate::pair::{self, Pair};
use crate::peer::{Peer, RQ, SQ, Setup, pattern};
use crate::switch::{REQUESTER, RESPONDER, link, remote};

/// Known numbers of all counted events, and no other counts.
#[test]
fn case_124_counters_equal_events() {
    let (gaps, packets_behind, naks, implied, timeouts, flips, cnps) = (3, 5, 4, 6, 2, 7, 8);
    let mut peer = Peer::with(Setup { retry_count: 7, ..Setup::default() });
    let mut frames = 0;
    // Of the responder: packets beyond a gap.
    peer.post_recv(99, 8);
    for gap in 0..gaps {
        for behind in 1..=packets_behind {
            peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ + gap + behind).ack_req());
            frames += 1;
        }
        peer.expect_nak(NAK_SEQUENCE, RQ + gap, gap);
        peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ + gap).ack_req());
        frames += 1;
        peer.expect_ack(RQ + gap, gap + 1);
    }
    // Of the requester: NAKs, each with a new PSN, and each repeated without effect.
    for n in 0..=naks {
        peer.post_write(n.into(), &[n as u8; 8]);
    }
    assert_eq!(peer.take_packets().len() as u32, naks + 1);
    let mut resent = 0;
    for n in 0..naks {
        for _ in 0..2 {
            peer.inject(nak(NAK_SEQUENCE, SQ + n + 1, n + 1));
            frames += 1;
        }
        peer.expect_wc(n.into(), Success);
        resent += peer.take_packets().len() as u32;
    }
    assert_eq!(resent, (1..=naks).sum());
    peer.inject(ack(SQ + naks, naks + 1));
    frames += 1;
    peer.expect_wc(naks.into(), Success);
    // Invalid responses: an ACK after a READ that has no data yet.
    let mut psn = SQ + naks + 1;
    for n in 0..implied {
        peer.post_read(100 + n, 8);
        peer.post_write(200 + n, b"behind");
        assert_eq!(peer.take_packets().len(), 2);
        peer.inject(ack(psn + 1, 0));
        resent += peer.take_packets().len() as u32;
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, psn, &[7; 8]));
        peer.inject(ack(psn + 1, 0));
        frames += 3;
        peer.expect_wc(100 + n, Success);
        peer.expect_wc(200 + n, Success);
        psn += 2;
    }
    // Timeouts.
    peer.post_write(300, b"lost");
    peer.expect(Opcode::RC_WRITE_ONLY, psn);
    for _ in 0..timeouts {
        peer.advance(Duration::from_nanos(4096 << 14) * 5 / 4);
        peer.expect(Opcode::RC_WRITE_ONLY, psn);
        resent += 1;
    }
    peer.inject(ack(psn, 0));
    frames += 1;
    peer.expect_wc(300, Success);
    // Broken frames, and congestion notifications.
    for n in 0..flips {
        let mut frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ + gaps).payload(b"hello"));
        let last = frame.len() - 1 - n;
        frame[last] ^= 1;
        peer.inject_frame(frame);
    }
    for _ in 0..cnps {
        peer.inject(packet(Opcode::CNP, 0).payload(&[0; 16]));
        frames += 1;
    }
    peer.expect_nothing();
    // The total of all counts.
    let sent = gaps * 2 + (naks + 1) + 2 * implied as u32 + 1 + resent;
    let wanted = [
        (Counter::SentPkts, sent),
        (Counter::RcvdPkts, frames),
        (Counter::RxWriteRequests, gaps),
        (Counter::RetransmittedPkts, resent),
        (Counter::OutOfSequence, gaps * packets_behind),
        (Counter::PacketSeqErr, naks),
        (Counter::ImpliedNakSeqErr, implied as u32),
        (Counter::LocalAckTimeoutErr, timeouts),
        (Counter::RxIcrcEncapsulated, flips as u32),
        (Counter::RpCnpIgnored, cnps),
    ];
    let wanted: Vec<_> = wanted.map(|(counter, count)| (counter.name(), u64::from(count))).into();
    let counted: Vec<_> = peer.context.counters().iter().filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, wanted);
}

/// A notification next to a NAK, as ConnectX-5 and 6 send it, does not change the effect of the NAK. (How many
/// notifications a congested flow causes belongs to section F.)
#[test]
fn case_125_cnp_beside_a_nak() {
    let cnp = || packet(Opcode::CNP, 0).payload(&[0; 16]);
    for (name, packets) in [
        ("before", vec![cnp(), nak(NAK_SEQUENCE, SQ + 1, 1)]),
        ("after", vec![nak(NAK_SEQUENCE, SQ + 1, 1), cnp()]),
        ("around", vec![cnp(), cnp(), nak(NAK_SEQUENCE, SQ + 1, 1), cnp()]),
    ] {
        let mut peer = Peer::new();
        for id in 0..3 {
            peer.post_write(id, &[id as u8; 8]);
        }
        assert_eq!(peer.take_packets().len(), 3);
        let cnps = packets.len() as u64 - 1;
        peer.inject_all(packets);
        peer.expect_wc(0, Success);
        let resent: Vec<u32> = peer.take_packets().iter().map(|got| got.psn()).collect();
        assert_eq!(resent, [SQ + 1, SQ + 2], "{name}");
        peer.expect_counted(Counter::RpCnpIgnored, cnps);
        peer.expect_counted(Counter::PacketSeqErr, 1);
        peer.inject_all([cnp(), ack(SQ + 2, 3), cnp()]);
        peer.expect_wc(1, Success);
        peer.expect_wc(2, Success);
    }
    // Next to an RNR NAK it does not shorten the wait; and the responder is unaffected.
    let mut peer = Peer::new();
    peer.post_send(1, b"wait");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    peer.inject_all([nak(NAK_RNR | 14, SQ, 0), cnp()]);
    peer.advance(Duration::from_micros(1279));
    peer.inject(cnp());
    peer.expect_nothing();
    peer.advance(Duration::from_micros(4));
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
    let before = peer.query();
    peer.inject_all([packet(Opcode::RC_WRITE_ONLY, RQ + 1), cnp()]);
    peer.expect_nak(NAK_SEQUENCE, RQ, 0);
    assert_eq!(peer.query(), before);
}

/// Fifteen loss-free queue pairs and one that loses every twentieth packet, at 100 Gb/s. That one has sixteen times as much
/// to send as each of the others.
#[test]
fn case_126_one_lossy_queue_pair() {
    let clean = goodput_beside(None);
    let beside_loss = goodput_beside(Some(20));
    let ratio = beside_loss.clean as f64 / clean.clean as f64;
    println!(
        "case 126: 15 clean queue pairs: {} packets beside a clean one, {} beside a lossy one ({:.1} %); \
         the other: {} and {}",
        clean.clean,
        beside_loss.clean,
        ratio * 100.0,
        clean.other,
        beside_loss.other
    );
    assert!(ratio >= 0.95, "{ratio}");
    assert!(beside_loss.other > 0, "the lossy one gets on, too");
    assert!(beside_loss.other < clean.other / 2, "the loss was to be felt");
    // Each has its share, and a sender with much data takes turns: all of it at once would exceed the packets in flight of
    // all others.
    for goodput in [clean, beside_loss] {
        assert!(goodput.least * 16 > goodput.clean, "{goodput:?}");
        assert!(goodput.other < goodput.clean, "{goodput:?}");
    }
}

/// The packets of complete messages in 4 ms.
#[derive(Debug)]
struct Goodput {
    /// Of queue pairs 1 to 15 together, and of the slowest of them.
    clean: u64,
    least: u64,
    /// Of queue pair 0.
    other: u64,
}

fn goodput_beside(one_in: Option<u64>) -> Goodput {
    const QPS: usize = 16;
    let rate = link(Duration::from_micros(5)).rate(100_000_000_000);
    let setup = pair::Setup { qps: QPS, path_mtu: PathMtu::Mtu4096, frames: 256, ..Default::default() };
    let mut pair = Pair::new(1, rate, setup);
    let lossy = pair.ends[RESPONDER].qpns()[0];
    let mut dice = Random::new(126);
    pair.network.set_filter(Box::new(move |frame| {
        let qpn = u32::from_be_bytes([0, frame[BTH + 5], frame[BTH + 6], frame[BTH + 7]]);
        let is_lost = Qpn::new(qpn) == lossy && one_in.is_some_and(|one_in| dice.below(one_in) == 0);
        if is_lost { Verdict::Drop } else { Verdict::Pass }
    }));
    let to = remote(&pair.ends[RESPONDER]);
    let packets = |q: usize| if q == 0 { 64 } else { 4 };
    let mut completed = [0; QPS];
    let mut posted = [0; QPS];
    let end = pair.now + Duration::from_millis(4);
    while pair.now < end {
        let requester = &mut pair.ends[REQUESTER];
        for q in 0..QPS {
            while posted[q] < completed[q] + 4 {
                requester.qp = requester.qps[q];
                requester.post_send(q as u64, SendOp::Write(to), 0, 4096 * packets(q));
                posted[q] += 1;
            }
        }
        assert!(pair.step());
        let requester = &mut pair.ends[REQUESTER];
        while let Some(wc) = requester.context.poll_cq(requester.cq).unwrap() {
            assert_eq!(wc.status, Success);
            completed[wc.wr_id as usize] += 1;
        }
    }
    let mut goodput = completed;
    goodput.iter_mut().enumerate().for_each(|(q, messages)| *messages *= u64::from(packets(q)));
    let [other, clean @ ..] = goodput;
    Goodput { clean: clean.iter().sum(), least: clean.into_iter().min().unwrap_or(0), other }
}

/// Properties of packets of ConnectX cards that rdma_rxe's do not have: MigReq 1, credit 0 in ACKs, varying source ports.
/// First a captured packet, then an exchange in which the peer does all of that.
#[test]
fn case_128_connectx() {
    connectx_capture();
    for (mig_req, credits) in [(true, [0x00; 4]), (true, [0x01, 0x0d, 0x00, 0x05]), (false, [0x1f; 4])] {
        connectx_conversation(mig_req, credits);
    }
}

/// The CNP of a ConnectX-4 Lx, byte for byte (TV3 of docs/protocol.md §3): source port 0, DSCP 48. For two RoCE v1 frames
/// of such cards docs/protocol.md has only the ICRC.
fn connectx_capture() {
    const CAPTURE: &str = "e41d2dab2bc27cfe90643b320800 45c2003c718c4000401191610a0011010a001201
        000012b700280000 8100ffff4000011800000000 00000000000000000000000000000000 82fd002a";
    let frame = hex(CAPTURE);
    // A port with the destination address, and a queue pair with the sender as its peer.
    let network = SimNetwork::new(1, LinkConfig::default()).unwrap();
    let mut sender = network.port(&[[10, 0, 17, 1].into()]);
    let port = network.port(&[[10, 0, 18, 1].into()]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(4).unwrap();
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let qpn = context.query_qp(qp).unwrap().qpn;
    let gid = Gid::from_ipv4([10, 0, 17, 1].into());
    let way = AddressVector::new(gid, 0);
    for transition in [
        Transition::Init { access: Access::NONE },
        Transition::ReadyToReceive(ReadyToReceive::new(way, Qpn::new(5), Psn::new(0))),
    ] {
        context.modify_qp(qp, transition).unwrap();
    }
    let mut inject = |context: &mut Context, frame: &[u8]| {
        let mut frame = Some(frame);
        let mut send = |buffer: &mut [u8]| {
            let frame = frame.take()?;
            buffer[..frame.len()].copy_from_slice(frame);
            Some(frame.len())
        };
        PacketDriver::tx_burst(&mut sender, Nanos(1), &mut send).unwrap();
        context.poll(Nanos(1)).unwrap();
    };
    // Unchanged: accepted by every check before the queue pair, whose number does not exist.
    inject(&mut context, &frame);
    assert_eq!(context.counters().value(Counter::RcvdPkts), 1);
    assert_eq!(context.counters().value(Counter::RxUnknownQp), 1);
    // To the queue pair that exists.
    let mut frame = frame;
    frame[BTH + 5..BTH + 8].copy_from_slice(&qpn.value().to_be_bytes()[1..]);
    reseal(&mut frame);
    inject(&mut context, &frame);
    assert_eq!(context.counters().value(Counter::RpCnpIgnored), 1);
    assert_eq!(context.query_qp(qp).unwrap().state, QpState::Rtr);
}

fn connectx_conversation(mig_req: bool, credits: [u8; 4]) {
    let mut peer = Peer::new();
    let mut ports = [0u16, 1, 0xc123, 0xffff].into_iter().cycle();
    // Each packet has another source port.
    let mut say = |peer: &mut Peer, script: Script| {
        let source_port = ports.next().unwrap();
        peer.address.encapsulation = Encapsulation::RoceV2 { source_port };
        peer.inject(script.mig_req(mig_req));
    };
    let credit = |psn, msn: u32| nak(credits[msn as usize % 4], psn, msn);
    let data = pattern(600);
    let (mut sq, mut rq) = (SQ, RQ);
    for round in 0..20 {
        // The engine's SEND and WRITE, each acknowledged with few credits or none, and more of them than the total of
        // credits.
        for id in 0..6 {
            peer.post_send(id, &data);
        }
        for id in 0..6 {
            let sent = [
                peer.expect(Opcode::RC_SEND_FIRST, sq),
                peer.expect(Opcode::RC_SEND_MIDDLE, sq + 1),
                peer.expect(Opcode::RC_SEND_LAST, sq + 2),
            ];
            assert!(sent.iter().all(|got| got.bth.mig_req()), "ferroce sends 1, too");
            assert_eq!(payload(&sent), data);
            say(&mut peer, credit(sq + 2, round * 7 + id as u32 + 1));
            peer.expect_wc(id, Success);
            sq += 3;
        }
        // Its READ, with credits in the response as well.
        let mr = peer.post_read(7, 300);
        peer.expect(Opcode::RC_READ_REQUEST, sq);
        let response = |opcode, psn, bytes: &[u8]| packet(opcode, psn).aeth(credits[0], round).payload(bytes);
        say(&mut peer, response(Opcode::RC_READ_RESPONSE_FIRST, sq, &data[..256]));
        say(&mut peer, response(Opcode::RC_READ_RESPONSE_LAST, sq + 1, &data[256..300]));
        peer.expect_wc(7, Success);
        assert_eq!(peer.bytes(mr), &data[..300]);
        sq += 2;
        // The peer's own requests.
        let memory = peer.memory(&[0; 600]);
        let rkey = peer.remote(memory).rkey;
        peer.post_recv(8, 600);
        say(&mut peer, packet(Opcode::RC_SEND_ONLY, rq).payload(b"hello").ack_req());
        peer.expect_ack(rq, round * 3 + 1);
        peer.expect_wc(8, Success);
        say(
            &mut peer,
            packet(Opcode::RC_WRITE_ONLY, rq + 1).reth(0, rkey, 100).payload(&data[..100]).ack_req(),
        );
        peer.expect_ack(rq + 1, round * 3 + 2);
        assert_eq!(peer.bytes(memory)[..100], data[..100]);
        say(&mut peer, packet(Opcode::RC_READ_REQUEST, rq + 2).reth(0, rkey, 100));
        let answer = peer.expect(Opcode::RC_READ_RESPONSE_ONLY, rq + 2);
        assert_eq!((&answer.payload[..], answer.bth.mig_req()), (&data[..100], true));
        rq += 3;
    }
    peer.expect_state(QpState::Rts);
}
