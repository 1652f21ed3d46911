//! Several work requests posted, and several completions taken, with one call.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::*;

/// A queue pair that is its own peer, with four work requests each way.
fn connected() -> (Context, Qp, Cq, Mr) {
    let driver = "loopback".parse::<DeviceSpec>().unwrap().open().unwrap();
    let mut context = Context::open(driver, &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
    let mr = context.register(pd, Memory::zeroed(4096).unwrap(), Access::LOCAL_WRITE).unwrap();
    let qp = context.create_qp(&QpConfig::rc(pd, cq).max_send_wr(4).max_recv_wr(4)).unwrap();
    let (gid, qpn, psn) = (context.port().gids[0].gid, context.query_qp(qp).unwrap().qpn, Psn::new(7));
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let peer = ReadyToReceive::new(AddressVector::new(gid, 0), qpn, psn);
    context.modify_qp(qp, Transition::ReadyToReceive(peer)).unwrap();
    context.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(psn))).unwrap();
    (context, qp, cq, mr)
}

#[test]
fn lists_are_posted_in_order_up_to_the_first_refused_request() {
    let (mut context, qp, cq, mr) = connected();
    let pieces: Vec<[Sge; 1]> = (0..6).map(|n| [Sge { mr, offset: 8 * n, length: 8 }]).collect();
    let receives: Vec<_> =
        pieces.iter().zip(100..).map(|(sges, wr_id)| ReceiveWorkRequest { wr_id, sges }).collect();
    let sends: Vec<_> = (0..6)
        .map(|wr_id| SendWorkRequest {
            wr_id,
            op: SendOp::Send,
            data: Data::Inline(b"in order"),
            flags: SendFlags::SIGNALED,
        })
        .collect();

    // The queues hold four.
    let full = context.post_recvs(qp, &receives).unwrap_err();
    assert!(
        matches!(full, PostError { posted: 4, source: Error::QueueFull { depth: 4, .. }, .. }),
        "{full:?}"
    );
    let full = context.post_sends(qp, &sends).unwrap_err();
    assert!(
        matches!(full, PostError { posted: 4, source: Error::QueueFull { depth: 4, .. }, .. }),
        "{full:?}"
    );
    assert!(
        full.to_string().starts_with("after 4 work requests that were posted: send queue is full"),
        "{full}"
    );

    let mut poller = Poller::new();
    let mut done = Vec::new();
    let mut room = [WorkCompletion::EMPTY; 3];
    while done.len() < 8 {
        poller.poll(&mut context).unwrap();
        let count = context.poll_cq_into(cq, &mut room).unwrap();
        done.extend_from_slice(&room[..count]);
    }
    assert!(done.iter().all(|wc| wc.status == WcStatus::Success && wc.qp == qp), "{done:?}");
    let of = |receive: bool| {
        let ids = done.iter().map(|wc| wc.wr_id).filter(move |wr_id| (*wr_id >= 100) == receive);
        ids.collect::<Vec<_>>()
    };
    assert_eq!((of(false), of(true)), (vec![0, 1, 2, 3], vec![100, 101, 102, 103]));
    assert_eq!(&context.bytes(mr).unwrap()[..40], b"in orderin orderin orderin order\0\0\0\0\0\0\0\0");

    // Nothing more: `room` is unchanged.
    let before = room;
    assert_eq!(context.poll_cq_into(cq, &mut room).unwrap(), 0);
    assert_eq!(room, before);
    // A list whose first request is refused leaves nothing posted.
    context.modify_qp(qp, Transition::Reset).unwrap();
    let refused = context.post_sends(qp, &sends[..2]).unwrap_err();
    assert!(matches!(refused, PostError { posted: 0, source: Error::State { .. }, .. }), "{refused:?}");
    assert_eq!(context.query_qp(qp).unwrap().outstanding_sends, 0);
    assert!(context.post_sends(qp, &[]).is_ok());
}

#[test]
fn a_shared_receive_queue_accepts_lists_too() {
    let (mut context, _, _, mr) = connected();
    let pd = context.alloc_pd().unwrap();
    let srq = context.create_srq(&SrqConfig::new(pd).max_wr(2).max_sge(1)).unwrap();
    let sges = [Sge { mr, offset: 0, length: 8 }];
    let receives = [1, 2, 3].map(|wr_id| ReceiveWorkRequest { wr_id, sges: &sges });
    let full = context.post_srq_recvs(srq, &receives).unwrap_err();
    assert!(matches!(full, PostError { posted: 2, source: Error::QueueFull { .. }, .. }), "{full:?}");
    assert_eq!(context.query_srq(srq).unwrap().posted, 2);
}
