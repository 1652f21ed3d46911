//! RC and UC: the contents of messages, and the capacity of the queues.

use std::thread;
use std::time::Duration;

use ferroce_driver::Error;
use ferroce_driver::rnic::{
    AddressHandle, Bind, Completion, Piece, QueuePair, QueuePairChange, ReceiveRequest, Remote, SendData,
    SendOperation, SendRequest, Target, Window, access,
};
use ferroce_driver_test_support::readiness::is_readable;

use crate::ends::{End, INIT, IOVA, Kind, RC, RESET, RTS, SQD, UC, UD, address, config, errno, good, pair};

#[test]
fn messages_with_all_optional_contents() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind::of(RC));
    a.region.write(0, b"hello, world").unwrap();
    // Two SGEs at the sender, three at the receiver.
    b.receive(1, &[b.piece(100, 4), b.piece(200, 0), b.piece(300, 20)]);
    let sent = a.carry_out(SendOperation::Send, &[a.piece(0, 5), a.piece(5, 7)]);
    assert_eq!((sent.status, sent.opcode), (0, 0));
    let received = b.received();
    assert_eq!(received.len(), 1);
    let Completion { wr_id, status, opcode, byte_len, qp_num, wc_flags, .. } = received[0];
    assert_eq!((wr_id, status, opcode, byte_len, qp_num, wc_flags), (1, 0, 128, 12, b.qp.qpn(), 0));
    assert_eq!((b.bytes(100, 5), b.bytes(300, 9)), (b"hell\0".to_vec(), b"o, world\0".to_vec()));

    b.receive(2, &[b.piece(0, 4)]);
    assert_eq!(a.carry_out(SendOperation::SendWithImm(0x0102_0304), &[]).status, 0);
    let received = b.received()[0];
    assert_eq!((received.wr_id, received.byte_len, received.wc_flags), (2, 0, Completion::WITH_IMM));
    assert_eq!(u32::from_be(received.imm_or_key), 0x0102_0304);

    // Inline data may be overwritten immediately.
    b.receive(3, &[b.piece(0, 64)]);
    let mut bytes = *b"inline";
    let wr_id = a.post_flagged(SendOperation::Send, SendData::Inline(&bytes), SendRequest::SIGNALED);
    bytes.fill(0);
    assert_eq!((a.sent()[0].wr_id, b.received()[0].byte_len), (wr_id, 6));
    assert_eq!(b.bytes(0, 6), b"inline");
}

#[test]
fn memory_is_written_and_read() {
    let Some(stub) = good() else { return };
    let (mut a, mut b) = pair(&stub, Kind::of(RC));
    a.region.write(0, b"to be written").unwrap();
    let sent = a.carry_out(SendOperation::Write(b.remote(1001)), &[a.piece(0, 13)]);
    assert_eq!((sent.status, sent.opcode), (0, 1));
    assert_eq!(b.bytes(1001, 13), b"to be written");
    assert!(b.received().is_empty());

    b.receive(4, &[]);
    let sent = a.carry_out(SendOperation::WriteWithImm(b.remote(2000), 9), &[a.piece(0, 13)]);
    assert_eq!((sent.status, sent.opcode), (0, 1));
    let received = b.received()[0];
    assert_eq!((received.wr_id, received.opcode, received.byte_len), (4, 129, 13));
    assert_eq!((u32::from_be(received.imm_or_key), received.wc_flags), (9, Completion::WITH_IMM));
    assert_eq!(b.bytes(2000, 13), b"to be written");

    b.region.write(3000, b"to be read").unwrap();
    let sent = a.carry_out(SendOperation::Read(b.remote(3000)), &[a.piece(512, 5), a.piece(600, 5)]);
    assert_eq!((sent.status, sent.opcode, sent.byte_len), (0, 2, 10));
    assert_eq!((a.bytes(512, 5), a.bytes(600, 5)), (b"to be".to_vec(), b" read".to_vec()));
    // No key is checked for zero bytes.
    let nowhere = Remote { addr: 5, rkey: 5 };
    assert_eq!(a.carry_out(SendOperation::Read(nowhere), &[]).status, 0);
    assert_eq!(a.carry_out(SendOperation::Write(nowhere), &[]).status, 0);
}

#[test]
fn atomics_change_a_word_and_return_the_old_value() {
    let Some(stub) = good() else { return };
    let (a, mut b) = pair(&stub, Kind::of(RC));
    b.region.store_u64(64, 40).unwrap();
    let sent = a.carry_out(SendOperation::FetchAdd { remote: b.remote(64), add: 2 }, &[a.piece(8, 8)]);
    assert_eq!((sent.status, sent.opcode, sent.byte_len), (0, 4, 8));
    assert_eq!((a.region.load_u64(8).unwrap(), b.region.load_u64(64).unwrap()), (40, 42));
    for (compare, swap, after) in [(41, 1, 42), (42, 7, 7)] {
        let operation = SendOperation::CompareSwap { remote: b.remote(64), compare, swap };
        let sent = a.carry_out(operation, &[a.piece(8, 8)]);
        assert_eq!((sent.status, sent.opcode), (0, 3));
        assert_eq!((a.region.load_u64(8).unwrap(), b.region.load_u64(64).unwrap()), (42, after));
    }
}

#[test]
fn uc_drops_messages_that_do_not_fit() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind::of(UC));
    a.region.write(0, b"unreliable").unwrap();
    // Without a receive WR; with one that is too small, which remains; with a wrong key.
    assert_eq!(a.carry_out(SendOperation::Send, &[a.piece(0, 10)]).status, 0);
    b.receive(1, &[b.piece(0, 4)]);
    assert_eq!(a.carry_out(SendOperation::Send, &[a.piece(0, 10)]).status, 0);
    let mut wrong = b.remote(0);
    wrong.rkey ^= 1;
    assert_eq!(a.carry_out(SendOperation::Write(wrong), &[a.piece(0, 10)]).status, 0);
    assert!(b.received().is_empty());
    assert_eq!(a.carry_out(SendOperation::SendWithImm(3), &[a.piece(0, 4)]).status, 0);
    assert_eq!(a.carry_out(SendOperation::Write(b.remote(50)), &[a.piece(0, 10)]).status, 0);
    assert_eq!(
        (b.received()[0].wr_id, b.bytes(0, 4), b.bytes(50, 10)),
        (1, b"unre".into(), b"unreliable".into())
    );
    // UC has no READ and no atomics.
    let mut request = SendRequest::new(1, SendOperation::Read(b.remote(0)), SendData::Pieces(&[]), 0);
    assert_eq!(errno(&a.qp.post_send(&mut request).unwrap_err()), libc::EINVAL);
}

/// A message waits for a receive WR, and so do the messages after it.
#[test]
fn messages_wait_for_receives() {
    let Some(stub) = good() else { return };
    for with_srq in [false, true] {
        let (mut a, b) = pair(&stub, Kind { with_srq, ..Kind::of(RC) });
        a.region.write(0, b"12").unwrap();
        let first = a.post(SendOperation::Send, &[a.piece(0, 1)]);
        let second = a.post(SendOperation::Write(b.remote(10)), &[a.piece(0, 2)]);
        let third = a.post(SendOperation::WriteWithImm(b.remote(20), 7), &[a.piece(0, 2)]);
        assert!(a.sent().is_empty() && b.received().is_empty());
        b.receive(1, &[b.piece(0, 1)]);
        assert_eq!(a.sent().iter().map(|sent| sent.wr_id).collect::<Vec<_>>(), [first, second]);
        b.receive(2, &[]);
        assert_eq!(a.sent()[0].wr_id, third);
        assert_eq!(b.received().iter().map(|received| received.wr_id).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(
            (b.bytes(0, 1), b.bytes(10, 2), b.bytes(20, 2)),
            (b"1".into(), b"12".into(), b"12".into())
        );
    }
}

#[test]
fn messages_wait_until_the_peer_is_ready() {
    let Some(stub) = good() else { return };
    let (a, b) = (End::new(&stub, 0, Kind::of(RC)), End::new(&stub, 1, Kind::of(RC)));
    a.connect(RC, &b);
    a.post(SendOperation::Send, &[]);
    b.init(RC);
    b.receive(1, &[]);
    assert!(a.sent().is_empty());
    b.receives_from(RC, a.gid, a.qp.qpn());
    assert_eq!((a.sent()[0].status, b.received()[0].wr_id), (0, 1));
    assert_eq!(b.events(), [(4, b.qp.id())], "the communication is established");
}

#[test]
fn unsignaled_sends_keep_their_room_until_a_later_one_is_polled() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind { capacity: 4, ..Kind::of(RC) });
    let request =
        |flags| SendRequest::new(5, SendOperation::Write(b.remote(0)), SendData::Pieces(&[]), flags);
    for flags in [0, 0, SendRequest::SIGNALED, 0] {
        a.qp.post_send(&mut request(flags)).unwrap();
    }
    assert_eq!(errno(&a.qp.post_send(&mut request(0)).unwrap_err()), libc::ENOMEM);
    assert_eq!(a.sent().len(), 1);
    // One of the four was posted after the one that was polled.
    let refused = a.qp.post_sends(&mut [request(0), request(0), request(0), request(0)]).unwrap_err();
    assert_eq!((refused.posted, errno(&refused.error)), (3, libc::ENOMEM));

    let (a, b) = pair(&stub, Kind { capacity: 4, signal_all: true, ..Kind::of(RC) });
    a.post_flagged(SendOperation::Write(b.remote(0)), SendData::Pieces(&[]), 0);
    assert_eq!(a.sent().len(), 1);
}

#[test]
fn a_list_stops_at_a_refused_request() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind { capacity: 64, ..Kind::of(RC) });
    let bytes: Vec<u8> = (0..40).collect();
    a.region.write(0, &bytes).unwrap();
    let pieces: Vec<Piece> = (0..40).map(|at| a.piece(at, 1)).collect();
    let too_many = vec![a.piece(0, 1); 5];
    let mut requests: Vec<SendRequest<'_>> = (0..40)
        .map(|at: usize| {
            let (operation, data) =
                (SendOperation::Write(b.remote(at as u64)), SendData::Pieces(&pieces[at..=at]));
            SendRequest::new(at as u64, operation, data, SendRequest::SIGNALED)
        })
        .collect();
    a.qp.post_sends(&mut requests).unwrap();
    assert_eq!(a.sent().iter().map(|sent| sent.wr_id).collect::<Vec<_>>(), (0..40).collect::<Vec<_>>());
    assert_eq!(b.bytes(0, 40), bytes);
    requests[35].set_data(35, SendData::Pieces(&too_many), SendRequest::SIGNALED);
    let refused = a.qp.post_sends(&mut requests).unwrap_err();
    assert_eq!((refused.posted, errno(&refused.error)), (35, libc::EINVAL));
    assert_eq!(a.sent().len(), 35);

    let mut receives: Vec<_> =
        (0..40).map(|wr_id| ReceiveRequest::new(wr_id, if wr_id == 20 { &too_many } else { &[] })).collect();
    let refused = b.qp.post_receives(&mut receives).unwrap_err();
    assert_eq!((refused.posted, errno(&refused.error)), (20, libc::EINVAL));
    assert!(refused.error.to_string().starts_with("ibv_post_recv of stub1: "), "{}", refused.error);
    let (mut sum, most) = (20, 64);
    while b.qp.post_receives(&mut receives[..1]).is_ok() {
        sum += 1;
    }
    assert_eq!(sum, most);
}

#[test]
fn set_attributes_are_returned() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let state = a.qp.query().unwrap();
    assert_eq!((state.state, state.access, state.dest_qpn, state.path_mtu), (RTS, 15, b.qp.qpn(), 3));
    assert_eq!(state.address, address(b.gid));
    assert_eq!((state.rq_psn, state.sq_psn, state.timeout), (7, 9, 14));
    assert_eq!((state.retry_count, state.rnr_retry, state.min_rnr_timer), (7, 7, 12));
    assert_eq!((state.max_rd_atomic, state.max_dest_rd_atomic, state.sq_draining), (4, 4, false));
    let refused = |change: QueuePairChange| errno(&a.qp.modify(&change).unwrap_err());
    // An invalid transition, missing attributes, unexpected attributes, invalid values.
    for change in [
        QueuePairChange { state: Some(INIT), ..QueuePairChange::default() },
        QueuePairChange { state: Some(77), ..QueuePairChange::default() },
        QueuePairChange { qkey: Some(5), ..QueuePairChange::default() },
        QueuePairChange { current_state: Some(SQD), state: Some(RTS), ..QueuePairChange::default() },
        QueuePairChange { min_rnr_timer: Some(32), ..QueuePairChange::default() },
    ] {
        assert_eq!(refused(change), libc::EINVAL, "{change:?}");
    }
    a.qp.modify(&QueuePairChange { access: Some(2), ..QueuePairChange::default() }).unwrap();
    assert_eq!(a.qp.query().unwrap().access, 2);
    a.move_to(RESET);
    assert_eq!(
        refused(QueuePairChange { state: Some(INIT), port: Some(1), ..QueuePairChange::default() }),
        libc::EINVAL
    );
    a.connect(RC, &b);
    b.receive(1, &[]);
    assert_eq!(a.carry_out(SendOperation::Send, &[]).status, 0);
}

#[test]
fn a_send_queue_is_drained() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let drain = QueuePairChange { state: Some(SQD), sqd_event: true, ..QueuePairChange::default() };
    a.qp.modify(&drain).unwrap();
    assert_eq!((a.events(), a.state()), (vec![(5, a.qp.id())], SQD));
    // Work requests posted now wait.
    a.post(SendOperation::Write(b.remote(0)), &[]);
    assert!(a.sent().is_empty());
    let go = QueuePairChange { state: Some(RTS), current_state: Some(SQD), ..QueuePairChange::default() };
    a.qp.modify(&go).unwrap();
    assert_eq!(a.sent().len(), 1);
    // Started work requests are completed first.
    a.post(SendOperation::Send, &[]);
    a.qp.modify(&drain).unwrap();
    a.post(SendOperation::Send, &[]);
    assert!(a.events().is_empty() && a.qp.query().unwrap().sq_draining);
    b.receive(1, &[]);
    b.receive(2, &[]);
    assert_eq!((a.sent().len(), a.events()), (1, vec![(5, a.qp.id())]));
    assert!(!a.qp.query().unwrap().sq_draining);
    // Without an event.
    a.move_to(RTS);
    a.move_to(SQD);
    assert_eq!((a.sent().len(), a.events()), (1, vec![]));
}

#[test]
fn regions_are_counted_from_where_they_were_told() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind::of(RC));
    a.region.write(8188, b"last").unwrap();
    for (length, status) in [(4, 0), (5, 4)] {
        let piece = a.region.piece(8188, length);
        assert_eq!(a.carry_out(SendOperation::Write(b.remote(0)), &[piece]).status, status);
    }
    assert_eq!(b.bytes(0, 4), b"last");
    let memory = b.region.deregister().unwrap();
    assert_eq!(memory.len(), 8192);
}

#[test]
fn what_the_device_does_not_have_is_refused() {
    let Some(stub) = good() else { return };
    let a = End::new(&stub, 0, Kind::of(RC));
    let config = config(Kind { kind: 9, ..Kind::of(RC) }, &a.sends, &a.receives, None);
    let error = QueuePair::new(&a.domain, &config).unwrap_err();
    assert!(
        matches!(&error, Error::Verbs { call: "ibv_create_qp", device, .. } if device == "stub0"),
        "{error}"
    );
    assert_eq!(errno(&error), libc::EINVAL);
}

/// Even if it is the same device, opened twice.
#[test]
fn queues_of_another_device_are_refused() {
    let Some(stub) = good() else { return };
    let kind = Kind { with_srq: true, ..Kind::of(RC) };
    let (a, b) = (End::new(&stub, 0, kind), End::new(&stub, 0, kind));
    for (sends, receives, srq) in [
        (&b.sends, &a.receives, None),
        (&a.sends, &b.receives, None),
        (&a.sends, &a.receives, b.srq.as_ref()),
    ] {
        let error = QueuePair::new(&a.domain, &config(kind, sends, receives, srq)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "ibv_create_qp of stub0: its queues are of another device that is open"
        );
    }
}

/// The provider would use it as its own.
#[test]
fn objects_of_another_device_are_refused() {
    const SAYS: &str = "names an address handle, a window or a region of another device";
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let windows = [&a, &b].map(|end| Window::new(&end.domain).unwrap());
    for (window, region) in [(&windows[1], &a.region), (&windows[0], &b.region), (&windows[1], &b.region)] {
        let (rkey, access) = (window.rkey() | 1, access::REMOTE_READ);
        let bind = SendOperation::Bind(Bind { window, rkey, region, addr: IOVA, length: 8, access });
        let request = |operation| SendRequest::new(0, operation, SendData::Pieces(&[]), 0);
        let mut requests = [request(SendOperation::LocalInvalidate(1)), request(bind)];
        let refused = a.qp.post_sends(&mut requests).unwrap_err();
        assert_eq!(refused.posted, 0, "nothing of the list is posted");
        let told = refused.error.to_string();
        assert_eq!(told, format!("ibv_post_send of {}: request 1 {SAYS}", a.device.name()));
    }
    let (c, d) = pair(&stub, Kind::of(UD));
    let ah = AddressHandle::new(&d.domain, &address(d.gid)).unwrap();
    let to = SendOperation::SendTo(Target { ah: &ah, qpn: d.qp.qpn(), qkey: 1 });
    let mut request = SendRequest::new(0, to, SendData::Pieces(&[]), 0);
    let told = c.qp.post_send(&mut request).unwrap_err().to_string();
    assert_eq!(told, format!("ibv_post_send of {}: request 0 {SAYS}", c.device.name()));
}

/// Each end has a thread, which sleeps until its channel has an event.
#[test]
fn threads_send_to_each_other() {
    const MESSAGES: u64 = 2000;
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind { with_srq: true, ..Kind::of(RC) });
    let run = |mut end: End, is_first: bool| {
        let next = |end: &End| {
            end.receive(0, &[end.piece(8, 8)]);
            end.receives.request_event(false).unwrap();
        };
        next(&end);
        for number in 0..MESSAGES {
            if is_first || number > 0 {
                end.region.store_u64(0, number).unwrap();
                end.post(SendOperation::Send, &[end.piece(0, 8)]);
            }
            while end.received().is_empty() {
                assert!(is_readable(end.channel.fd().unwrap(), Duration::from_secs(20)));
                while end.channel.event().unwrap().is_some() {}
            }
            assert_eq!(end.region.load_u64(8).unwrap(), if is_first { number + 1 } else { number });
            next(&end);
            assert!(end.sent().iter().all(|sent| sent.status == 0));
        }
        if !is_first {
            end.region.store_u64(0, MESSAGES).unwrap();
            end.post(SendOperation::Send, &[end.piece(0, 8)]);
        }
        end
    };
    thread::scope(|scope| {
        let run = &run;
        let threads = [scope.spawn(move || run(a, true)), scope.spawn(move || run(b, false))];
        for thread in threads {
            drop(thread.join().unwrap());
        }
    });
    assert_eq!(stub.live_objects(), 0);
}
