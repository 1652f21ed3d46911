//! Bugs that were found after the conformance cases were written, one test each.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use ferroce::driver::loopback;
use ferroce::wire::{Feth, FlushType, Opcode, Selectivity};
use ferroce::*;
use ferroce_test_support::packet::{NAK_ACCESS, Script, ack, nak, packet, payload};
use ferroce_test_support::peer::{Peer, RQ, SQ, all_access, pattern};

/// A late duplicate of a READ that was answered, and after it a message that revokes the key: the peer has its data, so the
/// current response ends, and the connection survives.
#[test]
fn a_key_revoked_after_a_duplicate_read_does_not_break_the_connection() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(600));
    let rkey = peer.remote(mr).rkey;
    let read = packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 600);
    peer.inject(read.clone());
    assert_eq!(payload(&peer.take_packets()), pattern(600));
    peer.post_recv(1, 8);
    let bye = packet(Opcode::RC_SEND_ONLY_WITH_INVALIDATE, RQ + 3).ieth(rkey).payload(b"bye").ack_req();
    peer.inject_all([read, bye]);
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_ack(RQ + 3, 2);
    peer.expect_nothing();
    peer.expect_state(QpState::Rts);
    peer.expect_counted(Counter::RxForgottenDuplicate, 1);
    peer.expect_counted(Counter::RespRemoteAccessErrors, 0);
}

/// The same, when the application deregisters the memory during the second response.
#[test]
fn memory_deregistered_during_a_repeated_response_does_not_break_the_connection() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(600));
    let rkey = peer.remote(mr).rkey;
    let read = packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 600);
    peer.inject(read.clone());
    assert_eq!(peer.take_packets().len(), 3);
    peer.take_at_most(1);
    peer.inject(read);
    peer.expect(Opcode::RC_READ_RESPONSE_FIRST, RQ);
    drop(peer.context.deregister(mr).unwrap());
    peer.take_at_most(usize::MAX);
    peer.expect_nothing();
    peer.expect_state(QpState::Rts);
}

/// A duplicate READ may request less than the rest of the first one (docs/protocol.md §5: a suffix or subset), as from a
/// requester that knows what it has.
#[test]
fn a_duplicate_read_of_a_part_is_answered() {
    use Opcode as O;
    let mut peer = Peer::new();
    let data = pattern(1000);
    let mr = peer.memory(&data);
    let rkey = peer.remote(mr).rkey;
    let read = |psn, at: u32, length| packet(O::RC_READ_REQUEST, psn).reth(at.into(), rkey, length);
    peer.inject(read(RQ, 0, 1000));
    assert_eq!(peer.take_packets().len(), 4);
    let parts = [
        (0, 512, vec![O::RC_READ_RESPONSE_FIRST, O::RC_READ_RESPONSE_LAST]),
        (1, 256, vec![O::RC_READ_RESPONSE_ONLY]),
        (1, 300, vec![O::RC_READ_RESPONSE_FIRST, O::RC_READ_RESPONSE_LAST]),
        (2, 1, vec![O::RC_READ_RESPONSE_ONLY]),
    ];
    for (skip, length, opcodes) in parts {
        let start = skip as usize * 256;
        peer.inject(read(RQ + skip, skip * 256, length));
        let got = peer.take_packets();
        assert_eq!(got.iter().map(|got| got.opcode).collect::<Vec<_>>(), opcodes);
        assert_eq!(got.iter().map(|got| got.psn() - RQ - skip).collect::<Vec<_>>()[..], [0, 1][..got.len()]);
        assert_eq!(payload(&got), data[start..start + length as usize]);
    }
    // All of it can be requested afterwards.
    peer.inject(read(RQ, 0, 1000));
    assert_eq!(payload(&peer.take_packets()), data);
}

/// A FLUSH of the whole region has no range: address and length are ignored (rxe checks neither), but the key is checked.
#[test]
fn a_flush_of_a_whole_region_has_no_range() {
    let visible = FlushType { global_visibility: true, persistence: false };
    let flush = |psn, selectivity, va, rkey, length| {
        packet(Opcode::RC_FLUSH, psn).feth(Feth::new(selectivity, visible)).reth(va, rkey, length)
    };
    let mut peer = Peer::new();
    let mr = peer.context.register_at(peer.pd, Memory::zeroed(64).unwrap(), all_access(), 4096).unwrap();
    let rkey = peer.remote(mr).rkey;
    for (i, (va, length)) in [(0, 0), (4096, 64), (u64::MAX, 1000)].into_iter().enumerate() {
        let psn = RQ + i as u32;
        peer.inject(flush(psn, Selectivity::MemoryRegion, va, rkey, length));
        peer.expect(Opcode::RC_READ_RESPONSE_ONLY, psn);
    }
    let bogus = RKey::new(!rkey.value());
    peer.inject(flush(RQ + 3, Selectivity::MemoryRegion, 4096, bogus, 64));
    peer.expect_nak(NAK_ACCESS, RQ + 3, 3);
    peer.expect_event(Event::QpAccessErr(peer.qp));
}

/// A region may end at the last address.
#[test]
fn a_region_ends_at_the_last_address() {
    let mut peer = Peer::new();
    let memory = || Memory::zeroed(4096).unwrap();
    let last = u64::MAX - 4095;
    let mr = peer.context.register_at(peer.pd, memory(), all_access(), last).unwrap();
    let refused = peer.context.register_at(peer.pd, memory(), all_access(), last + 1).unwrap_err();
    assert!(matches!(refused.source, Error::Invalid { attribute: "iova", .. }));
    let rkey = peer.remote(mr).rkey;
    let data = pattern(600);
    let write = [
        packet(Opcode::RC_WRITE_FIRST, RQ).reth(u64::MAX - 599, rkey, 600).payload(&data[..256]),
        packet(Opcode::RC_WRITE_MIDDLE, RQ + 1).payload(&data[256..512]),
        packet(Opcode::RC_WRITE_LAST, RQ + 2).payload(&data[512..]).ack_req(),
    ];
    peer.inject_all(write);
    peer.expect_ack(RQ + 2, 1);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ + 3).reth(u64::MAX - 599, rkey, 600));
    assert_eq!(payload(&peer.take_packets()), data);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ + 6).reth(u64::MAX - 599, rkey, 601));
    peer.expect_nak(NAK_ACCESS, RQ + 6, 2);
    peer.expect_event(Event::QpAccessErr(peer.qp));
}

/// Owed responses are first, but not always: a peer that always has READs outstanding does not keep a queue pair from
/// sending its own requests.
#[test]
fn a_peer_that_reads_all_the_time_does_not_starve_requests() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(4 * 256));
    let rkey = peer.remote(mr).rkey;
    // The port accepts fewer packets than the peer requests.
    peer.take_at_most(0);
    peer.post_send(1, &pattern(3 * 256));
    let mut sent = Vec::new();
    for i in 0..10 {
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ + 4 * i).reth(0, rkey, 4 * 256));
        peer.take_at_most(3);
        sent.extend(peer.take_packets());
    }
    let position = |opcode| sent.iter().position(|got| got.opcode == opcode);
    assert!(position(Opcode::RC_SEND_LAST).is_some_and(|at| at < 10), "{:?}", position(Opcode::RC_SEND_LAST));
    // And the other way round.
    let responses = sent.iter().take(10).filter(|got| !got.opcode.is_request()).count();
    assert!(responses >= 5, "{responses}");
    peer.take_at_most(usize::MAX);
    peer.take_packets();
    peer.inject(ack(SQ + 2, 1));
    peer.expect_wc(1, WcStatus::Success);
}

/// A RoCE v1 packet has 40 bytes of GRH, whatever its addresses: a path MTU that fits an interface over IPv4 may not fit it
/// with v1.
#[test]
fn a_path_mtu_leaves_room_for_the_grh() {
    use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork};
    let config = NetworkConfig::default().mtu(PathMtu::Mtu1024.required_l3_mtu(false)).frames(16);
    let network = SimNetwork::with_config(1, LinkConfig::default(), config).unwrap();
    let port = Box::new(network.port(&[[10, 0, 0, 1].into()]));
    let config = Config::default().roce_v1(true);
    let mut context = Context::open(port, &config).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16).unwrap();
    let gids = context.port().gids.clone();
    assert_eq!(gids.iter().map(|entry| entry.roce_v1).collect::<Vec<_>>(), [false, true]);
    for (sgid_index, entry) in gids.iter().enumerate() {
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        let address = AddressVector::new(entry.gid, sgid_index);
        let receive = ReadyToReceive::new(address, Qpn::new(9), Psn::new(0));
        let result = context.modify_qp(qp, Transition::ReadyToReceive(receive));
        match result {
            Err(Error::PathMtu { .. }) => assert!(entry.roce_v1),
            other => assert!(other.is_ok() && !entry.roce_v1, "{other:?}"),
        }
    }
}

/// An application that sleeps until its completion event arrives gets it, however many other events are unread.
#[test]
fn a_completion_event_has_room_despite_other_unread_events() {
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let pd = context.alloc_pd().unwrap();
    let (full, cq) = (context.create_cq(1).unwrap(), context.create_cq(4).unwrap());
    let mut failed_receives = |cq, count| {
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        for wr_id in 0..count {
            context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
        }
        context.req_notify_cq(cq, Notify::Next).unwrap();
        context.modify_qp(qp, Transition::Error).unwrap();
    };
    failed_receives(full, 2);
    failed_receives(cq, 1);
    failed_receives(cq, 1);
    let events: Vec<Event> = std::iter::from_fn(|| context.next_event()).collect();
    let expected = [Event::Completion(full), Event::CqErr(full), Event::Completion(cq)];
    assert_eq!(events, expected, "one event for a CQ, until it is read");
}

/// The memory of a READ is deregistered during its response, when the message after it has started to arrive. The current
/// receive is not at fault: it is flushed, and an event reports the failure (C9-222.1.1: a completion in error is for
/// errors that can be related to that receive).
#[test]
fn a_failed_read_does_not_fail_the_receive_of_a_later_message() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(600));
    let rkey = peer.remote(mr).rkey;
    peer.post_recv(1, 600);
    peer.take_at_most(1);
    let read = packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 600);
    let send = packet(Opcode::RC_SEND_FIRST, RQ + 3).payload(&pattern(256));
    peer.inject_all([read, send]);
    peer.expect(Opcode::RC_READ_RESPONSE_FIRST, RQ);
    drop(peer.context.deregister(mr).unwrap());
    peer.take_at_most(usize::MAX);
    peer.expect_nak(NAK_ACCESS, RQ + 1, 1);
    peer.expect_wc(1, WcStatus::WrFlushErr);
    peer.expect_event(Event::QpAccessErr(peer.qp));
    peer.expect_state(QpState::Error);
}

/// A request arrives, and is processed in a poll that sends nothing.
fn arrive(peer: &mut Peer, request: Script) {
    peer.arrive([request]);
    assert_eq!(peer.context.poll(peer.now).unwrap(), 1, "the request comes, and nothing goes");
}

/// The application answers by a WRITE.
fn answer(peer: &mut Peer, wr_id: u64, psn: u32) {
    peer.post_write(wr_id, &pattern(8));
    peer.expect(Opcode::RC_WRITE_ONLY, psn);
}

/// An ACK sent in the poll that processed the request used to precede the application's response, and cost a frame's time
/// in that direction. It is sent after the work posted between two polls, and is delayed for a while; a response posted
/// later finds it sent.
#[test]
fn an_ack_is_sent_after_the_applications_response() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(8));
    let rkey = peer.remote(mr).rkey;
    let write = |psn| packet(Opcode::RC_WRITE_ONLY, psn).reth(0, rkey, 8).payload(&pattern(8)).ack_req();
    arrive(&mut peer, write(RQ));
    assert_eq!(peer.context.next_timeout(), Some(peer.now), "there is an ACK to send");
    answer(&mut peer, 0, SQ);
    peer.expect_ack(RQ, 1);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(0, WcStatus::Success);
    // From here on it is delayed after responses for 50 µs, and acknowledges all that has arrived until then.
    for turn in 1..5 {
        arrive(&mut peer, write(RQ + turn));
        answer(&mut peer, turn.into(), SQ + turn);
        peer.inject(ack(SQ + turn, turn + 1));
        peer.expect_wc(turn.into(), WcStatus::Success);
        peer.expect_nothing();
        assert!(peer.context.next_timeout().is_some_and(|at| at <= peer.now + Duration::from_micros(51)));
        peer.advance(Duration::from_micros(10));
    }
    peer.advance(Duration::from_micros(11));
    peer.expect_ack(RQ + 4, 5);
    // Without a response it is sent with the next poll, and is not lost.
    arrive(&mut peer, write(RQ + 5));
    peer.expect_ack(RQ + 5, 6);
    assert_eq!(peer.context.next_timeout().filter(|at| *at <= peer.now), None);
    peer.expect_nothing();
}

/// An ACK that was owed for two polls used to precede a READ's response whose turn was after a request: it acknowledged the
/// READ.
#[test]
fn an_ack_does_not_overtake_a_read_response() {
    use Opcode as O;
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(600));
    let rkey = peer.remote(mr).rkey;
    peer.take_at_most(1);
    let read = packet(O::RC_READ_REQUEST, RQ).reth(0, rkey, 600);
    let write = packet(O::RC_WRITE_ONLY, RQ + 3).reth(0, rkey, 8).payload(&pattern(8)).ack_req();
    peer.inject_all([read, write]);
    let responses = [O::RC_READ_RESPONSE_FIRST, O::RC_READ_RESPONSE_MIDDLE, O::RC_READ_RESPONSE_LAST];
    for (opcode, psn) in responses.into_iter().zip(RQ..) {
        peer.expect(opcode, psn);
        peer.poll();
        peer.take_at_most(1);
    }
    peer.expect_ack(RQ + 3, 2);
    peer.expect_nothing();
}

/// Messages that the application has seen are acknowledged even if it ends at once: the ACK that waited for the next poll
/// used to be lost with its queue pair or context, and the peer's send failed.
#[test]
fn an_ack_is_not_lost_with_its_queue_pair() {
    type End = fn(&mut Peer);
    let ends: [End; 3] = [
        |peer| peer.context.destroy_qp(peer.qp).unwrap(),
        |peer| peer.context.modify_qp(peer.qp, Transition::Error).unwrap(),
        |peer| peer.context.modify_qp(peer.qp, Transition::Reset).unwrap(),
    ];
    for end in ends {
        let mut peer = Peer::new();
        peer.post_recv(1, 8);
        arrive(&mut peer, packet(Opcode::RC_SEND_ONLY, RQ).payload(b"bye").ack_req());
        let completion = peer.context.poll_cq(peer.cq).unwrap();
        assert_eq!(completion.map(|wc| wc.status), Some(WcStatus::Success));
        end(&mut peer);
        peer.expect_ack(RQ, 1);

        // Nor while it is delayed after a response.
        let mut peer = Peer::new();
        for turn in 0..2 {
            peer.post_recv(1, 8);
            arrive(&mut peer, packet(Opcode::RC_SEND_ONLY, RQ + turn).payload(b"bye").ack_req());
            answer(&mut peer, 2, SQ + turn);
            if turn == 0 {
                peer.expect_ack(RQ, 1);
            }
        }
        peer.expect_nothing();
        end(&mut peer);
        peer.expect_ack(RQ + 1, 2);
        // The results of the work requests are irrelevant here.
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
    }
}

/// Nor is it lost when the work request after which it is delayed ends the connection.
#[test]
fn an_ack_is_not_lost_with_a_failed_response() {
    let mut peer = Peer::new();
    for turn in 0..2 {
        peer.post_recv(turn.into(), 8);
        arrive(&mut peer, packet(Opcode::RC_SEND_ONLY, RQ + turn).payload(b"ask").ack_req());
        answer(&mut peer, (10 + turn).into(), SQ + turn);
        peer.expect_wc(turn.into(), WcStatus::Success);
        if turn == 0 {
            peer.expect_ack(RQ, 1);
            peer.inject(ack(SQ, 1));
            peer.expect_wc(10, WcStatus::Success);
        }
    }
    peer.inject(nak(NAK_ACCESS, SQ + 1, 2));
    peer.expect_wc(11, WcStatus::RemAccessErr);
    peer.expect_state(QpState::Error);
    peer.advance(Duration::from_micros(51));
    peer.expect_ack(RQ + 1, 2);
    peer.expect_nothing();
}

/// A peer that retransmits an executed request waits for the ACK that is delayed after a response.
#[test]
fn a_peer_that_asks_again_gets_its_ack() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(8));
    let rkey = peer.remote(mr).rkey;
    let write = |psn| packet(Opcode::RC_WRITE_ONLY, psn).reth(0, rkey, 8).payload(&pattern(8)).ack_req();
    for turn in 0..2 {
        arrive(&mut peer, write(RQ + turn));
        answer(&mut peer, turn.into(), SQ + turn);
        peer.inject(ack(SQ + turn, turn + 1));
        peer.expect_wc(turn.into(), WcStatus::Success);
        if turn == 0 {
            peer.expect_ack(RQ, 1);
        }
    }
    peer.expect_nothing();
    peer.inject(write(RQ + 1));
    peer.expect_ack(RQ + 1, 2);
    peer.expect_nothing();
}

/// An interface that is down accepts some frames and then none. Its queue pairs have no turns any more, but their ACK
/// timers end them nevertheless.
#[test]
fn a_port_that_takes_nothing_stops_no_timer() {
    let mut peer = Peer::new();
    peer.take_at_most(2);
    for wr_id in 1..=3 {
        peer.post_write(wr_id, &pattern(64));
    }
    peer.poll();
    assert_eq!(peer.take_packets().len(), 2);
    peer.take_at_most(0);
    peer.advance(Duration::from_secs(10));
    peer.expect_wc(1, WcStatus::RetryExcErr);
    peer.expect_wc(2, WcStatus::WrFlushErr);
    peer.expect_wc(3, WcStatus::WrFlushErr);
    peer.expect_state(QpState::Error);
}

/// Two equally configured contexts used to have equal handles: one took the other's region, and read it.
#[test]
fn a_handle_of_another_context_is_invalid() {
    let (near, far) = loopback::pair(&["192.0.2.1".parse().unwrap()], &["192.0.2.2".parse().unwrap()]);
    let mut ends = [near, far].map(|port| {
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
        let mr = context.register(pd, Memory::zeroed(64).unwrap(), Access::LOCAL_WRITE).unwrap();
        let (qp, srq) = (
            context.create_qp(&QpConfig::rc(pd, cq)).unwrap(),
            context.create_srq(&SrqConfig::new(pd)).unwrap(),
        );
        (context, pd, cq, mr, qp, srq)
    });
    let [(context, ..), (_, pd, cq, mr, qp, srq)] = &mut ends;
    let refused = [
        context.bytes(*mr).map(drop),
        context.deregister(*mr).map(drop),
        context.read(*mr, 0, &mut [0]),
        context.poll_cq(*cq).map(drop),
        context.destroy_cq(*cq),
        context.query_qp(*qp).map(drop),
        context.destroy_srq(*srq),
        context.dealloc_pd(*pd),
        context.create_qp(&QpConfig::rc(*pd, *cq)).map(drop),
    ];
    for refusal in refused {
        assert!(matches!(refusal, Err(Error::InvalidHandle { .. })), "{refusal:?}");
    }
}
