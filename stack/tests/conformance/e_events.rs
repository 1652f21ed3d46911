//! Section E, third part: events.

use ferroce::WcStatus::{Success, WrFlushErr};
use ferroce::wire::Opcode;
use ferroce::{Counter, Data, Event, Gid, Notify, QpState, QpType, SendFlags, SendOp, Transition};

use crate::packet::{NAK_RNR, Script, ack, packet};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern, sge};

#[test]
fn case_098_completion_events() {
    solicited_only();
    no_arrival_is_missed();
    armed_queue_and_the_order_of_things();
}

/// Which messages wake an application that waits for solicited ones.
fn solicited_only() {
    use Opcode as O;
    type Message = fn(u32) -> Script;
    let messages: [(QpType, Message); 5] = [
        (QpType::Rc, |psn| packet(O::RC_SEND_ONLY, psn).payload(b"hello")),
        (QpType::Rc, |psn| packet(O::RC_WRITE_ONLY_WITH_IMMEDIATE, psn)),
        (QpType::Uc, |psn| packet(O::UC_SEND_ONLY_WITH_IMMEDIATE, psn).payload(b"hello")),
        (QpType::Uc, |psn| packet(O::UC_WRITE_ONLY_WITH_IMMEDIATE, psn)),
        (QpType::Ud, |psn| packet(O::UD_SEND_ONLY, psn).deth(QKEY, PEER_QPN).payload(b"hello")),
    ];
    for (qp_type, message) in messages {
        let mut peer = Peer::with(Setup::of(qp_type));
        for wr_id in 1..=4 {
            peer.post_recv(wr_id, 64);
        }
        peer.context.req_notify_cq(peer.cq, Notify::Solicited).unwrap();
        peer.inject(message(RQ));
        peer.expect_wc(1, Success);
        peer.expect_no_event();
        peer.inject(message(RQ + 1).solicited());
        peer.expect_event(Event::Completion(peer.cq));
        peer.expect_wc(2, Success);
        // It is disarmed.
        peer.inject(message(RQ + 2).solicited());
        peer.expect_wc(3, Success);
        peer.expect_no_event();
        // An error always raises an event.
        peer.context.req_notify_cq(peer.cq, Notify::Solicited).unwrap();
        peer.modify(Transition::Error);
        peer.expect_event(Event::Completion(peer.cq));
        peer.expect_wc(4, WrFlushErr);
    }
    // Unsignaled sends succeed without an event; and arming for any completion takes precedence.
    let mut peer = Peer::new();
    peer.context.req_notify_cq(peer.cq, Notify::Solicited).unwrap();
    peer.post_send(1, b"hello");
    peer.expect(O::RC_SEND_ONLY, SQ);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
    peer.expect_no_event();
    peer.context.req_notify_cq(peer.cq, Notify::Next).unwrap();
    peer.context.req_notify_cq(peer.cq, Notify::Solicited).unwrap();
    peer.post_send(2, b"hello");
    peer.expect(O::RC_SEND_ONLY, SQ + 1);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_event(Event::Completion(peer.cq));
    peer.expect_wc(2, Success);

    // The flag is in the last packet of a SEND, and of a WRITE with immediate, and nowhere else.
    let ops = [
        (SendOp::Send, vec![false, false, true]),
        (SendOp::SendWithImm(1), vec![false, false, true]),
        (SendOp::WriteWithImm(REMOTE, 1), vec![false, false, true]),
        (SendOp::Write(REMOTE), vec![false; 3]),
    ];
    for (op, marks) in ops {
        for qp_type in [QpType::Rc, QpType::Uc] {
            let mut peer = Peer::with(Setup::of(qp_type));
            let mr = peer.memory(&pattern(600));
            let flags = SendFlags::default().solicited(true);
            peer.post_flagged(1, op, Data::Sges(&[sge(mr, 600)]), flags);
            let got: Vec<bool> = peer.take_packets().iter().map(|got| got.bth.solicited()).collect();
            assert_eq!(got, marks, "{op:?} on {qp_type:?}");
        }
    }
}

/// An application that reads the event, arms, polls until there is nothing, and sleeps until the next event, is woken for
/// each message, whenever that arrives.
fn no_arrival_is_missed() {
    #[derive(Clone, Copy, PartialEq, Debug)]
    enum Step {
        Arm,
        Poll,
        Sleep,
    }
    // Each bit determines whether a message arrives before that step: twelve steps, all combinations.
    for arrivals in 0u32..1 << 12 {
        let mut peer = Peer::with(Setup::of(QpType::Ud));
        for wr_id in 0..12 {
            peer.post_recv(wr_id, 64);
        }
        let (mut step, mut sent, mut received) = (Step::Arm, 0, 0);
        let mut turn = |peer: &mut Peer, received: &mut u32| match step {
            Step::Arm => {
                peer.context.req_notify_cq(peer.cq, Notify::Next).unwrap();
                step = Step::Poll;
                true
            }
            Step::Poll => {
                match peer.context.poll_cq(peer.cq).unwrap() {
                    Some(_) => *received += 1,
                    None => step = Step::Sleep,
                }
                true
            }
            Step::Sleep => match peer.context.next_event() {
                Some(event) => {
                    assert_eq!(event, Event::Completion(peer.cq));
                    step = Step::Arm;
                    true
                }
                None => false,
            },
        };
        for bit in 0..12 {
            if arrivals >> bit & 1 == 1 {
                peer.inject(packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, PEER_QPN));
                sent += 1;
            }
            turn(&mut peer, &mut received);
        }
        // From here on nothing arrives; the application runs until it sleeps.
        while turn(&mut peer, &mut received) {}
        assert_eq!(received, sent, "arrivals {arrivals:#014b}: it sleeps over a completion");
    }
}

fn armed_queue_and_the_order_of_things() {
    // Completions present when the queue is armed raise nothing; later ones do, once.
    let mut peer = Peer::new();
    for wr_id in 1..=4 {
        peer.post_recv(wr_id, 8);
    }
    let send = |n: u32| packet(Opcode::RC_SEND_ONLY, RQ + n).payload(b"hello");
    peer.inject(send(0));
    peer.context.req_notify_cq(peer.cq, Notify::Next).unwrap();
    peer.expect_no_event();
    peer.expect_wc(1, Success);
    peer.inject_all([send(1), send(2)]);
    peer.expect_event(Event::Completion(peer.cq));
    peer.expect_no_event();
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
    // Armed twice before the event is read: one event is enough.
    peer.context.req_notify_cq(peer.cq, Notify::Next).unwrap();
    peer.inject(send(3));
    peer.context.req_notify_cq(peer.cq, Notify::Next).unwrap();
    peer.post_recv(5, 8);
    peer.inject(send(4));
    peer.expect_event(Event::Completion(peer.cq));
    peer.expect_no_event();
    peer.expect_wc(4, Success);
    peer.expect_wc(5, Success);
}

#[test]
fn case_099_communication_established() {
    let rtr = |qp_type| Setup { state: QpState::Rtr, ..Setup::of(qp_type) };
    for (qp_type, opcode) in [(QpType::Rc, Opcode::RC_SEND_ONLY), (QpType::Uc, Opcode::UC_SEND_ONLY)] {
        let mut peer = Peer::with(rtr(qp_type));
        for wr_id in 1..=3 {
            peer.post_recv(wr_id, 8);
        }
        peer.inject_all([packet(opcode, RQ), packet(opcode, RQ + 1)]);
        peer.expect_event(Event::CommEst(peer.qp));
        peer.expect_no_event();
        peer.expect_wc(1, Success);
        peer.expect_wc(2, Success);
        let last = peer.transitions(&Setup::of(qp_type))[2];
        peer.modify(last);
        peer.inject(packet(opcode, RQ + 2));
        peer.expect_wc(3, Success);
        peer.expect_no_event();

        // After a reset, a new event.
        peer.modify(Transition::Reset);
        peer.take_to(&rtr(qp_type));
        peer.post_recv(4, 8);
        peer.inject(packet(opcode, RQ));
        peer.expect_event(Event::CommEst(peer.qp));
        peer.expect_wc(4, Success);

        // In RTS there is no event.
        let mut peer = Peer::with(Setup::of(qp_type));
        peer.post_recv(1, 8);
        peer.inject(packet(opcode, RQ));
        peer.expect_wc(1, Success);
        peer.expect_no_event();
    }
    // A packet that finds no receive also shows that the peer is connected.
    let mut peer = Peer::with(rtr(QpType::Rc));
    for _ in 0..2 {
        peer.inject(packet(Opcode::RC_SEND_ONLY, RQ));
        peer.expect_nak(NAK_RNR | 12, RQ, 0);
    }
    peer.expect_event(Event::CommEst(peer.qp));
    peer.expect_no_event();
    let mut peer = Peer::with(rtr(QpType::Uc));
    peer.inject(packet(Opcode::UC_SEND_ONLY, RQ));
    peer.expect_counted(Counter::OutOfBuffer, 1);
    peer.expect_event(Event::CommEst(peer.qp));

    // Packets dropped before processing show nothing; datagrams establish nothing.
    let mut peer = Peer::with(rtr(QpType::Rc));
    let own = peer.address.source;
    peer.address.source = Gid::from_ipv4([192, 0, 2, 77].into());
    let stray = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ));
    peer.expect_dropped(stray, Counter::RxWrongAddress);
    peer.address.source = own;
    let mut peer = Peer::with(rtr(QpType::Ud));
    peer.post_recv(1, 64);
    peer.inject(packet(Opcode::UD_SEND_ONLY, RQ).deth(QKEY, PEER_QPN));
    peer.expect_wc(1, Success);
    peer.expect_no_event();
}
