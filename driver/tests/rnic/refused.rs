//! Refusals by a peer or the provider: the statuses, and the state of the queues.

use ferroce_driver::Memory;
use ferroce_driver::rnic::{
    Completion, CompletionQueue, Piece, ProtectionDomain, QueuePair, QueuePairChange, Region, Remote,
    SendData, SendOperation, access,
};

use crate::ends::{
    ERR, End, INIT, IOVA, Kind, LEN, RC, REMOTE, RESET, RTS, SQE, UC, config, good, pair, polled,
};

/// The statuses of completions, in order.
fn statuses(completions: &[Completion]) -> Vec<u32> {
    completions.iter().map(|completion| completion.status).collect()
}

/// A range that the stub refuses before it accesses the memory.
fn nowhere(addr: u64, length: u32, lkey: u32) -> Piece {
    // SAFETY: the stub checks the key first, and no region has these.
    unsafe { Piece::new(addr, length, lkey) }
}

#[test]
fn invalid_local_keys() {
    let Some(stub) = good() else { return };
    type Wrong = fn(&End) -> Piece;
    let wrong: [Wrong; 6] = [
        |_| nowhere(0, 8, 0),
        |a| nowhere(0, 8, a.region.rkey()),
        |a| nowhere(0, 8, a.region.lkey() ^ 1),
        |a| nowhere(IOVA, 8, a.region.lkey()),
        |a| nowhere(u64::MAX - 3, 8, a.region.lkey()),
        |a| a.piece(LEN as u64 - 7, 8),
    ];
    for piece in wrong {
        let (a, b) = pair(&stub, Kind::of(RC));
        // Although it is unsignaled, it has a completion.
        a.post_flagged(SendOperation::Write(b.remote(0)), SendData::Pieces(&[piece(&a)]), 0);
        a.post_flagged(SendOperation::Write(b.remote(0)), SendData::Pieces(&[]), 0);
        assert_eq!((statuses(&a.sent()), a.state(), b.state()), (vec![4, 5], ERR, RTS));
    }
    // The key of another protection domain, and one without write access.
    let (a, b) = pair(&stub, Kind::of(RC));
    let other = ProtectionDomain::new(&a.device).unwrap();
    let region = Region::new(&other, Memory::zeroed(64).unwrap(), REMOTE, 0).unwrap();
    let piece = region.piece(0, 8);
    assert_eq!(a.carry_out(SendOperation::Write(b.remote(0)), &[piece]).status, 4);
    let (a, b) = pair(&stub, Kind { access: 0, ..Kind::of(RC) });
    assert_eq!(a.carry_out(SendOperation::Read(b.remote(0)), &[a.piece(0, 8)]).status, 4);
}

#[test]
fn invalid_remote_keys() {
    let Some(stub) = good() else { return };
    type Wrong = fn(&End) -> Remote;
    let wrong: [Wrong; 5] = [
        |b| Remote { rkey: 0, ..b.remote(0) },
        |b| Remote { rkey: b.region.lkey(), ..b.remote(0) },
        |b| Remote { addr: IOVA - 8, ..b.remote(0) },
        |b| b.remote(LEN as u64),
        |b| Remote { addr: u64::MAX - 7, ..b.remote(0) },
    ];
    for (place, remote) in wrong.into_iter().enumerate() {
        let (a, b) = pair(&stub, Kind::of(RC));
        b.receive(1, &[]);
        let (remote, word) = (remote(&b), [a.piece(0, 8)]);
        let operation = match place % 4 {
            0 => SendOperation::Write(remote),
            1 => SendOperation::Read(remote),
            2 => SendOperation::FetchAdd { remote, add: 1 },
            _ => SendOperation::WriteWithImm(remote, 1),
        };
        assert_eq!((a.carry_out(operation, &word).status, a.state(), b.state()), (10, ERR, ERR));
        // The receive WR is flushed, and an event reports the reason.
        assert_eq!((statuses(&b.received()), b.events()), (vec![5], vec![(3, b.qp.id())]));
        assert_eq!(a.carry_out(SendOperation::Send, &[]).status, 5);
    }
    // The region does not allow it.
    for (access, operation) in [
        (access::REMOTE_READ, 0),
        (access::LOCAL_WRITE | access::REMOTE_WRITE, 1),
        (access::LOCAL_WRITE | access::REMOTE_READ, 2),
    ] {
        let (a, b) = (End::new(&stub, 0, Kind::of(RC)), End::new(&stub, 1, Kind { access, ..Kind::of(RC) }));
        a.connect(RC, &b);
        b.connect(RC, &a);
        let operation = match operation {
            0 => SendOperation::Write(b.remote(0)),
            1 => SendOperation::Read(b.remote(0)),
            _ => SendOperation::FetchAdd { remote: b.remote(0), add: 1 },
        };
        assert_eq!(a.carry_out(operation, &[a.piece(0, 8)]).status, 10, "{operation:?}");
    }
}

#[test]
fn requests_that_the_peer_does_not_take() {
    let Some(stub) = good() else { return };
    for place in 0..4 {
        let (a, b) = pair(&stub, Kind::of(RC));
        let none = QueuePairChange { access: Some(0), ..QueuePairChange::default() };
        if place > 0 {
            b.qp.modify(&none).unwrap();
        }
        let operation = match place {
            0 => SendOperation::FetchAdd { remote: b.remote(4), add: 1 },
            1 => SendOperation::Write(b.remote(0)),
            2 => SendOperation::Read(b.remote(0)),
            _ => SendOperation::CompareSwap { remote: b.remote(0), compare: 1, swap: 2 },
        };
        assert_eq!((a.carry_out(operation, &[a.piece(0, 8)]).status, b.state()), (9, ERR), "{operation:?}");
        assert_eq!(b.events(), [(2, b.qp.id())]);
    }
    // An atomic of four bytes.
    let (a, b) = pair(&stub, Kind::of(RC));
    let add = SendOperation::FetchAdd { remote: b.remote(0), add: 1 };
    assert_eq!((a.carry_out(add, &[a.piece(0, 4)]).status, b.state()), (1, RTS));
}

#[test]
fn messages_that_do_not_fit() {
    let Some(stub) = good() else { return };
    for with_srq in [false, true] {
        let kind = Kind { with_srq, ..Kind::of(RC) };
        let (a, b) = pair(&stub, kind);
        b.receive(1, &[b.piece(0, 7)]);
        b.receive(2, &[b.piece(0, 8)]);
        assert_eq!(
            (a.carry_out(SendOperation::Send, &[a.piece(0, 8)]).status, a.state(), b.state()),
            (9, ERR, ERR)
        );
        // Receive WRs remain for other queue pairs.
        let (behind, events) = if with_srq { (vec![1], vec![(16, b.qp.id())]) } else { (vec![1, 5], vec![]) };
        let received = b.received();
        assert_eq!((statuses(&received), received[0].wr_id, b.events()), (behind, 1, events));

        let (a, b) = pair(&stub, kind);
        b.receive(1, &[nowhere(0, 8, 5)]);
        assert_eq!(a.carry_out(SendOperation::Send, &[a.piece(0, 8)]).status, 11);
        assert_eq!((statuses(&b.received()), b.state()), (vec![4], ERR));
    }
}

#[test]
fn missing_peers() {
    let Some(stub) = good() else { return };
    let a = End::new(&stub, 0, Kind::of(RC));
    for (gid, qpn) in [(a.gid, 5), (crate::ends::ipv4(77), a.qp.qpn())] {
        let lonely = End::new(&stub, 1, Kind::of(RC));
        lonely.init(RC);
        lonely.receives_from(RC, gid, qpn);
        lonely.sends(RC, 7);
        assert_eq!((lonely.carry_out(SendOperation::Send, &[]).status, lonely.state()), (12, ERR));
    }
    // A peer that ends while it is awaited: by the error state, by RESET, or by its destruction.
    for state in [Some(ERR), Some(RESET), None] {
        let (a, b) = pair(&stub, Kind::of(RC));
        a.post(SendOperation::Send, &[]);
        a.post(SendOperation::Send, &[]);
        match state {
            Some(state) => b.move_to(state),
            None => drop(b),
        }
        assert_eq!((statuses(&a.sent()), a.state()), (vec![12, 5], ERR));
    }
    // Nothing is reported about a UC peer.
    let (a, b) = pair(&stub, Kind::of(UC));
    drop(b);
    assert_eq!(a.carry_out(SendOperation::Send, &[]).status, 0);
}

#[test]
fn rnr_retries_are_exhausted() {
    let Some(stub) = good() else { return };
    let (a, b) = (End::new(&stub, 0, Kind::of(RC)), End::new(&stub, 1, Kind::of(RC)));
    b.connect(RC, &a);
    a.init(RC);
    a.receives_from(RC, b.gid, b.qp.qpn());
    a.sends(RC, 0);
    assert_eq!((a.carry_out(SendOperation::Send, &[]).status, b.state()), (13, RTS));
}

#[test]
fn the_error_state_flushes() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    a.receive(1, &[]);
    a.receive(2, &[]);
    let (first, second) = (a.post(SendOperation::Send, &[]), a.post(SendOperation::Send, &[]));
    a.move_to(ERR);
    a.receive(3, &[]);
    let third = a.post(SendOperation::Send, &[]);
    let (sent, received) = (a.sent(), a.received());
    assert_eq!(sent.iter().map(|sent| sent.wr_id).collect::<Vec<_>>(), [first, second, third]);
    assert_eq!(received.iter().map(|received| received.wr_id).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(sent.iter().chain(&received).all(|flushed| flushed.status == 5 && flushed.qp_num == a.qp.qpn()));
    drop(b);
    // After RESET nothing of it is left.
    a.post(SendOperation::Send, &[]);
    a.move_to(RESET);
    assert!(a.sent().is_empty());
    a.init(RC);
    assert_eq!(a.state(), INIT);
}

/// Every defined status, and some undefined ones.
#[test]
fn every_status_is_returned_unchanged() {
    for status in (1..24).chain([77, u32::MAX]) {
        // Two of them are set at build time.
        let setting =
            if matches!(status, 9 | u32::MAX) { format!("STATUS_{status}") } else { "NOTHING_WRONG".into() };
        let Some(stub) = ferroce_driver_test_support::rnic_stub::Stub::build(&[&setting]) else { return };
        if setting == "NOTHING_WRONG" {
            stub.set_status(Some(status));
        }
        for kind in [RC, UC] {
            let (a, b) = pair(&stub, Kind::of(kind));
            a.post_flagged(SendOperation::Write(b.remote(0)), SendData::Pieces(&[]), 0);
            a.post(SendOperation::Write(b.remote(0)), &[]);
            assert_eq!(
                (statuses(&a.sent()), a.state()),
                (vec![status; 2], if kind == RC { ERR } else { SQE })
            );
        }
    }
    let Some(stub) = ferroce_driver_test_support::rnic_stub::Stub::build(&["STATUS_0"]) else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    assert_eq!(a.carry_out(SendOperation::Write(b.remote(0)), &[]).status, 0);
}

#[test]
fn an_overflowing_completion_queue_loses_completions_with_an_event() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let small = CompletionQueue::new(3, &a.channel, 1).unwrap();
    let qp = QueuePair::new(&a.domain, &config(Kind::of(RC), &small, &a.receives, None)).unwrap();
    let c = End { qp, sends: small.clone(), ..a };
    let b = End {
        qp: QueuePair::new(&b.domain, &config(Kind::of(RC), &b.sends, &b.receives, None)).unwrap(),
        ..b
    };
    c.connect(RC, &b);
    b.connect(RC, &c);
    for _ in 0..5 {
        c.post(SendOperation::Write(b.remote(0)), &[]);
    }
    assert_eq!((polled(&small).len(), c.events()), (3, vec![(0, small.id())]));
}
