//! Section E, second part: states and flushes.

use ferroce::WcStatus::{LocProtErr, RemOpErr, Success, WrFlushErr};
use ferroce::wire::Opcode;
use ferroce::{
    Access, AddressVector, Counter, Data, Error, Event, Gid, Memory, PKEY_DEFAULT, PKey, PathMtu, Psn,
    QpAttributes, QpState, QpType, QpUpdate, Qpn, ReadyToReceive, ReadyToSend, ReceiveWorkRequest, RnrTimer,
    SendFlags, SendOp, SendWorkRequest, Sge, Transition, UnreliablePath,
};

use crate::packet::{NAK_OPERATIONAL, ack, nak, packet};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern, sge};

const TYPES: [QpType; 3] = [QpType::Rc, QpType::Uc, QpType::Ud];
const STATES: [QpState; 7] =
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];

/// A transition carries its required attributes as fields, so "minus one required attribute" does not compile, and there is
/// no mask. The remaining errors are refused here with the queue pair unchanged: a transition of another service, one from
/// another state, a value out of range, and an update that the service or the state does not allow.
#[test]
fn case_094_transitions() {
    every_move_from_every_state();
    every_update_in_every_state();
    values_out_of_range();
    nothing_moves_while_it_drains();
}

fn every_move_from_every_state() {
    let mut legal = 0;
    for (qp_type, state) in types_and_states() {
        let setup = Setup::of(qp_type);
        let Some(peer) = in_state(qp_type, state) else { continue };
        let moves = every_move(&peer);
        drop(peer);
        for transition in moves {
            let Some(mut peer) = in_state(qp_type, state) else { continue };
            let before = peer.query();
            let result = peer.context.modify_qp(peer.qp, transition);
            let after = peer.query();
            let what = format!("{qp_type:?} in {state:?}: {transition:?}");
            let Some(end) = end_of(transition, qp_type, state) else {
                assert!(
                    matches!(result, Err(Error::State { .. } | Error::Invalid { .. })),
                    "{what}: {result:?}"
                );
                assert_eq!(after, before, "{what}");
                continue;
            };
            legal += 1;
            assert!(result.is_ok(), "{what}: {result:?}");
            assert_eq!(after.state, end, "{what}");
            match end {
                QpState::Reset => {
                    let mut fresh = Peer::with(Setup { state: QpState::Reset, ..setup }).query();
                    fresh.qpn = before.qpn;
                    assert_eq!(after, fresh, "{what}");
                }
                QpState::Sqd if state == QpState::Rts => peer.expect_event(Event::SqDrained(peer.qp)),
                _ => {}
            }
        }
    }
    // RESET, ERR, and the rest of the table in docs/protocol.md §6.
    let (reset, error) = (7 + 7 + 6, 6 + 6 + 5);
    let (init, rtr_and_rts, drain, resume, update) = (2 * 3, 2 * 3, 3, 3 + 2, 3 * 3);
    assert_eq!(legal, reset + error + init + rtr_and_rts + drain + resume + update);
}

fn every_update_in_every_state() {
    for (qp_type, state) in types_and_states() {
        for (name, update, services, states) in updates() {
            let Some(mut peer) = in_state(qp_type, state) else { continue };
            peer.context.add_pkey(PKEYS[1]).unwrap();
            let before = peer.query();
            let what = format!("{name} of {qp_type:?} in {state:?}");
            let is_at_home = services.contains(&qp_type) && states.contains(&state);
            let update = update(&peer);
            let result = peer.context.modify_qp(peer.qp, Transition::Update(update));
            if is_at_home {
                assert!(result.is_ok(), "{what}: {result:?}");
                assert_eq!(peer.query(), updated(before, &update), "{what}");
                assert_ne!(peer.query(), before, "{what}");
                continue;
            }
            let is_state = !matches!(state, QpState::Init | QpState::Rts | QpState::Sqd);
            match result {
                Err(Error::State { .. }) if is_state => {}
                Err(Error::Invalid { attribute, .. }) if !is_state => assert_eq!(attribute, name, "{what}"),
                other => panic!("{what}: {other:?}"),
            }
            assert_eq!(peer.query(), before, "{what}");
            // Not even with one that would otherwise be valid.
            let welcome = match qp_type {
                QpType::Ud => update.qkey(5),
                _ => update.access(Access::NONE),
            };
            assert!(peer.context.modify_qp(peer.qp, Transition::Update(welcome)).is_err(), "{what}");
            assert_eq!(peer.query(), before, "{what}");
        }
    }
}

fn values_out_of_range() {
    // INIT → RTR.
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut peer = Peer::with(Setup { state: QpState::Init, ..Setup::of(qp_type) });
        let address = peer.way_to(peer.address.source);
        let group = Gid::from_ipv4([239, 1, 1, 1].into());
        let v6 = Gid(std::net::Ipv6Addr::LOCALHOST.octets());
        let good = UnreliablePath::new(address, PEER_QPN, Psn::new(RQ)).path_mtu(PathMtu::Mtu256);
        let to = |address| UnreliablePath::new(address, PEER_QPN, good.rq_psn).path_mtu(good.path_mtu);
        let from = |qpn| UnreliablePath::new(address, Qpn::new(qpn), good.rq_psn).path_mtu(good.path_mtu);
        let mut bad = vec![from(0), from(1), from(0xff_ffff)];
        bad.push(to(AddressVector::new(group, address.sgid_index)));
        bad.push(to(AddressVector::new(v6, address.sgid_index)));
        bad.push(to(AddressVector::new(address.gid, 99)));
        bad.push(to(address.flow_label(1 << 20)));
        bad.push(to(address.service_level(8)));
        for path in bad {
            let transition = match qp_type {
                QpType::Rc => Transition::ReadyToReceive(reliable(path)),
                _ => Transition::ReadyToReceiveUnreliable(path),
            };
            expect_refused(&mut peer, transition);
        }
        let too_many = reliable(good).max_dest_rd_atomic(129);
        expect_refused(&mut peer, Transition::ReadyToReceive(too_many));
    }
    // There is no RNR timer above 31.
    assert!(RnrTimer::new(32).is_none());

    // RTR → RTS, and the same in SQD.
    let mut peer = Peer::with(Setup { state: QpState::Rtr, ..Setup::default() });
    let good = ReadyToSend::new(Psn::new(SQ));
    for bad in [good.timeout(32), good.retry_count(8), good.rnr_retry(8), good.max_rd_atomic(129)] {
        expect_refused(&mut peer, Transition::ReadyToSend(bad));
    }
    let mut peer = in_state(QpType::Rc, QpState::Sqd).unwrap();
    let address = peer.way_to(peer.address.source);
    let none = QpUpdate::default();
    for bad in [
        none.timeout(32),
        none.retry_count(8),
        none.rnr_retry(8),
        none.max_rd_atomic(129),
        none.max_dest_rd_atomic(129).access(Access::NONE),
        none.address(AddressVector::new(address.gid, 99)),
        none.address(address.service_level(8)),
        none.address(address.hop_limit(1)).timeout(32),
    ] {
        expect_refused(&mut peer, Transition::Update(bad));
    }
    // PSNs are masked to 24 bits, by their type.
    assert_eq!(Psn::new(0x0100_0005), Psn::new(5));
}

fn nothing_moves_while_it_drains() {
    let mut peer = Peer::new();
    peer.post_send(1, &pattern(300));
    peer.expect(Opcode::RC_SEND_FIRST, SQ);
    peer.expect(Opcode::RC_SEND_LAST, SQ + 1);
    peer.modify(Transition::Drain);
    assert!(peer.query().sq_draining);
    expect_refused(&mut peer, Transition::Resume);
    expect_refused(&mut peer, Transition::Update(QpUpdate::default().timeout(1)));
    expect_refused(&mut peer, Transition::Drain);
    peer.expect_no_event();
    peer.inject(ack(SQ + 1, 1));
    peer.expect_wc(1, Success);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.modify(Transition::Update(QpUpdate::default().timeout(1)));
    peer.modify(Transition::Resume);
    peer.expect_state(QpState::Rts);
}

#[test]
fn case_095_posting_by_state() {
    for (qp_type, state) in types_and_states() {
        let Some(mut peer) = in_state(qp_type, state) else { continue };
        let mr = peer.memory(&[7; 64]);
        let op = if qp_type == QpType::Ud { SendOp::SendTo(peer.destination()) } else { SendOp::Send };
        let before = peer.query();
        let sges = [sge(mr, 4)];
        let send = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&sges), flags: SendFlags::default() };
        let sent = peer.context.post_send(peer.qp, &send);
        match state {
            QpState::Reset | QpState::Init | QpState::Rtr => {
                assert!(matches!(sent, Err(Error::State { verb: "post_send", .. })), "{state:?}: {sent:?}");
                assert_eq!(peer.query(), before);
                peer.expect_no_wc();
            }
            // Although it is unsignaled.
            QpState::Error | QpState::Sqe => {
                sent.unwrap();
                peer.expect_wc(1, WrFlushErr);
            }
            QpState::Sqd => sent.unwrap(),
            QpState::Rts => {
                sent.unwrap();
                assert_eq!(peer.take_packets().len(), 1);
            }
        }
        if !matches!(state, QpState::Rts) {
            peer.expect_nothing();
        }

        let sges = [sge(mr, 64)];
        let posted = peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 2, sges: &sges });
        match state {
            QpState::Reset => assert!(matches!(posted, Err(Error::State { verb: "post_recv", .. }))),
            QpState::Error => {
                posted.unwrap();
                peer.expect_wc(2, WrFlushErr);
            }
            _ => {
                posted.unwrap();
                peer.expect_no_wc();
                assert_eq!(peer.query().outstanding_receives, 1);
            }
        }

        let message = match qp_type {
            QpType::Rc => packet(Opcode::RC_SEND_ONLY, RQ),
            QpType::Uc => packet(Opcode::UC_SEND_ONLY, RQ),
            QpType::Ud => packet(Opcode::UD_SEND_ONLY, RQ).deth(QKEY, PEER_QPN),
        };
        match state {
            QpState::Reset | QpState::Init | QpState::Error => {
                let frame = peer.frame(&message);
                peer.expect_dropped(frame, Counter::RxWrongState);
            }
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe => {
                peer.inject(message);
                peer.expect_wc(2, Success);
                let is_first = state == QpState::Rtr && qp_type != QpType::Ud;
                assert_eq!(peer.context.next_event(), is_first.then_some(Event::CommEst(peer.qp)));
            }
        }
    }
    // An operation that the service does not support.
    let remote = REMOTE;
    let foreign = |to| {
        [
            (QpType::Rc, vec![SendOp::SendTo(to), SendOp::SendToWithImm(to, 1)]),
            (
                QpType::Uc,
                vec![
                    SendOp::Read(remote),
                    SendOp::FetchAdd { remote, add: 1 },
                    SendOp::CompareSwap { remote, compare: 1, swap: 1 },
                    SendOp::SendWithInvalidate(remote.rkey),
                    SendOp::SendTo(to),
                ],
            ),
            (
                QpType::Ud,
                vec![SendOp::Send, SendOp::SendWithImm(1), SendOp::Write(remote), SendOp::Read(remote)],
            ),
        ]
    };
    let to = Peer::with(Setup::of(QpType::Ud)).destination();
    for (qp_type, ops) in foreign(to) {
        let mut peer = Peer::with(Setup::of(qp_type));
        let mr = peer.memory(&[0; 8]);
        for op in ops {
            let sges = [sge(mr, 8)];
            let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
            let refused = peer.context.post_send(peer.qp, &wr);
            assert!(matches!(refused, Err(Error::Invalid { attribute: "op", .. })), "{op:?}: {refused:?}");
        }
    }
}

#[test]
fn case_096_flush_and_reset() {
    for qp_type in TYPES {
        for end in [QpState::Error, QpState::Reset] {
            let mut peer = Peer::with(Setup::of(qp_type));
            let op = if qp_type == QpType::Ud { SendOp::SendTo(peer.destination()) } else { SendOp::Send };
            let mr = peer.memory(&[7; 64]);
            peer.take_at_most(0);
            for wr_id in 0..5 {
                // Whether signaled or not.
                let flags = SendFlags::default().signaled(wr_id % 2 == 0);
                peer.post_flagged(wr_id, op, Data::Sges(&[sge(mr, 8)]), flags);
                peer.post_recv(10 + wr_id, 64);
            }
            match end {
                QpState::Error => {
                    peer.modify(Transition::Error);
                    for wr_id in (0..5).chain(10..15) {
                        peer.expect_wc(wr_id, WrFlushErr);
                    }
                }
                _ => peer.modify(Transition::Reset),
            }
            peer.expect_no_wc();
            peer.take_at_most(usize::MAX);
            peer.expect_nothing();
            peer.expect_state(end);
            assert_eq!((peer.query().outstanding_sends, peer.query().outstanding_receives), (0, 0));
            // The memory is free.
            drop(peer.context.deregister(mr).unwrap());
        }
    }
    // RESET discards unread completions, and the queue pair starts again.
    let setup = Setup::default();
    let mut peer = Peer::with(setup);
    let other = peer.another_qp(&setup);
    peer.post_recv(1, 8);
    peer.modify(Transition::Error);
    peer.context.post_recv(other, &ReceiveWorkRequest { wr_id: 2, sges: &[] }).unwrap();
    peer.context.modify_qp(other, Transition::Error).unwrap();
    peer.modify(Transition::Reset);
    peer.expect_wc(2, WrFlushErr);
    peer.expect_no_wc();
    peer.take_to(&setup);
    peer.post_send(3, b"anew");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(3, Success);

    // Some sent, some not; the failing one first, then later ones.
    let mut peer = Peer::new();
    peer.post_send(1, b"done");
    peer.post_send(2, b"fails");
    peer.post_send(3, b"sent");
    assert_eq!(peer.take_packets().len(), 3);
    peer.post_recv(11, 8);
    peer.take_at_most(0);
    peer.post_send(4, b"not sent");
    peer.inject(nak(NAK_OPERATIONAL, SQ + 1, 1));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, RemOpErr);
    for wr_id in [3, 4, 11] {
        peer.expect_wc(wr_id, WrFlushErr);
    }
}

fn types_and_states() -> impl Iterator<Item = (QpType, QpState)> {
    TYPES.into_iter().flat_map(|qp_type| STATES.map(|state| (qp_type, state)))
}

/// A queue pair of this type in this state; RC has no SQE.
fn in_state(qp_type: QpType, state: QpState) -> Option<Peer> {
    let start = match state {
        QpState::Sqd | QpState::Sqe | QpState::Error => QpState::Rts,
        other => other,
    };
    let mut peer = Peer::with(Setup { state: start, ..Setup::of(qp_type) });
    match state {
        QpState::Sqd => {
            peer.modify(Transition::Drain);
            peer.expect_event(Event::SqDrained(peer.qp));
        }
        QpState::Error => peer.modify(Transition::Error),
        QpState::Sqe if qp_type == QpType::Rc => return None,
        QpState::Sqe => {
            let op = if qp_type == QpType::Ud { SendOp::SendTo(peer.destination()) } else { SendOp::Send };
            let elsewhere = peer.context.alloc_pd().unwrap();
            let memory = Memory::zeroed(8).unwrap();
            let mr = peer.context.register(elsewhere, memory, Access::NONE).unwrap();
            peer.post(99, op, &[Sge { mr, offset: 0, length: 8 }]);
            peer.expect_wc(99, LocProtErr);
        }
        _ => {}
    }
    peer.expect_state(state);
    Some(peer)
}

/// Each kind of transition, with valid values.
fn every_move(peer: &Peer) -> Vec<Transition> {
    let path = UnreliablePath::new(peer.way_to(peer.address.source), PEER_QPN, Psn::new(RQ))
        .path_mtu(PathMtu::Mtu256);
    vec![
        Transition::Init { access: Access::REMOTE_READ },
        Transition::InitDatagram { qkey: 7 },
        Transition::ReadyToReceive(reliable(path)),
        Transition::ReadyToReceiveUnreliable(path),
        Transition::ReadyToReceiveDatagrams,
        Transition::ReadyToSend(ReadyToSend::new(Psn::new(SQ))),
        Transition::ReadyToSendUnreliable { sq_psn: Psn::new(SQ) },
        Transition::Drain,
        Transition::Resume,
        Transition::Update(QpUpdate::default()),
        Transition::Error,
        Transition::Reset,
    ]
}

/// The table of docs/protocol.md §6: the new state, if the transition is allowed.
fn end_of(transition: Transition, qp_type: QpType, state: QpState) -> Option<QpState> {
    use QpState::{Init, Reset, Rtr, Rts, Sqd, Sqe};
    use QpType::{Rc, Uc, Ud};
    match (transition, qp_type, state) {
        (Transition::Reset, ..) => Some(Reset),
        (Transition::Error, _, Reset) => None,
        (Transition::Error, ..) => Some(QpState::Error),
        (Transition::Init { .. }, Rc | Uc, Reset | Init) => Some(Init),
        (Transition::InitDatagram { .. }, Ud, Reset | Init) => Some(Init),
        (Transition::ReadyToReceive(_), Rc, Init) => Some(Rtr),
        (Transition::ReadyToReceiveUnreliable(_), Uc, Init) => Some(Rtr),
        (Transition::ReadyToReceiveDatagrams, Ud, Init) => Some(Rtr),
        (Transition::ReadyToSend(_), Rc, Rtr) => Some(Rts),
        (Transition::ReadyToSendUnreliable { .. }, Uc | Ud, Rtr) => Some(Rts),
        (Transition::Drain, _, Rts) => Some(Sqd),
        (Transition::Resume, _, Sqd | Sqe) => Some(Rts),
        (Transition::Update(_), _, Init | Rts | Sqd) => Some(state),
        _ => None,
    }
}

/// The port's table.
const PKEYS: [PKey; 2] = [PKEY_DEFAULT, PKey(0x8001)];

type Row = (&'static str, fn(&Peer) -> QpUpdate, &'static [QpType], &'static [QpState]);

/// Each attribute with a different value, and where it may change.
fn updates() -> [Row; 10] {
    use QpState::{Init, Rts, Sqd};
    use QpType::{Rc, Uc, Ud};
    [
        ("access", |_| QpUpdate::default().access(Access::REMOTE_READ), &[Rc, Uc], &[Init, Rts, Sqd]),
        ("qkey", |_| QpUpdate::default().qkey(5), &[Ud], &[Init, Rts, Sqd]),
        ("pkey_index", |_| QpUpdate::default().pkey_index(1), &[Rc, Uc, Ud], &[Init, Sqd]),
        ("min_rnr_timer", |_| QpUpdate::default().min_rnr_timer(RnrTimer::new(3)), &[Rc], &[Rts, Sqd]),
        (
            "address",
            |peer| {
                let way = peer.way_to(Gid::from_ipv4([192, 0, 2, 9].into()));
                QpUpdate::default().address(way)
            },
            &[Rc, Uc],
            &[Sqd],
        ),
        ("timeout", |_| QpUpdate::default().timeout(3), &[Rc], &[Sqd]),
        ("retry_count", |_| QpUpdate::default().retry_count(3), &[Rc], &[Sqd]),
        ("rnr_retry", |_| QpUpdate::default().rnr_retry(3), &[Rc], &[Sqd]),
        ("max_rd_atomic", |_| QpUpdate::default().max_rd_atomic(3), &[Rc], &[Sqd]),
        ("max_dest_rd_atomic", |_| QpUpdate::default().max_dest_rd_atomic(3), &[Rc], &[Sqd]),
    ]
}

/// The expected query after an update.
fn updated(before: QpAttributes, update: &QpUpdate) -> QpAttributes {
    let send = before.send.map(|send| {
        send.timeout(update.timeout.unwrap_or(send.timeout))
            .retry_count(update.retry_count.unwrap_or(send.retry_count))
            .rnr_retry(update.rnr_retry.unwrap_or(send.rnr_retry))
            .max_rd_atomic(update.max_rd_atomic.unwrap_or(send.max_rd_atomic))
    });
    let mut after = before;
    after.send = send;
    after.access = update.access.unwrap_or(before.access);
    after.qkey = update.qkey.or(before.qkey);
    after.pkey_index = update.pkey_index.unwrap_or(before.pkey_index);
    after.pkey = if update.pkey_index.is_some() { PKEYS[1] } else { before.pkey };
    after.min_rnr_timer = update.min_rnr_timer.or(before.min_rnr_timer);
    after.address = update.address.or(before.address);
    after.max_dest_rd_atomic = update.max_dest_rd_atomic.unwrap_or(before.max_dest_rd_atomic);
    after
}

fn reliable(path: UnreliablePath) -> ReadyToReceive {
    ReadyToReceive::new(path.address, path.dest_qpn, path.rq_psn).path_mtu(path.path_mtu)
}

/// The transition is refused, and the queue pair is unchanged.
#[track_caller]
fn expect_refused(peer: &mut Peer, transition: Transition) {
    let before = peer.query();
    let result = peer.context.modify_qp(peer.qp, transition);
    assert!(result.is_err(), "{transition:?}");
    assert_eq!(peer.query(), before, "{transition:?}");
}
