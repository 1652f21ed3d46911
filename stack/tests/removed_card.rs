//! A card that is removed while work is posted: an event, flushed completions, errors, and nothing that hangs. rdma_rxe
//! can't show it, because its removal waits for its users (`tools/tests/rxe/hardware.rs`).

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::driver::rnic::Verbs;
use ferroce::{
    Access, Config, Context, Data, Error, Event, Memory, Nanos, QpConfig, QpState, ReceiveWorkRequest,
    RnicPort, SendFlags, SendOp, SendWorkRequest, WcStatus,
};
use ferroce_driver_test_support::rnic_stub::Stub;

#[test]
fn posted_work_is_flushed_and_every_verb_returns() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let port = RnicPort::open_by(&verbs, "stub0", None, None).unwrap();
    let mut context = Context::open(port, &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qps = [(); 2].map(|()| context.create_qp(&QpConfig::rc(pd, cq)).unwrap());
    let ends = qps.map(|qp| context.endpoint(qp, 0).unwrap());
    context.handshake(qps[0], &ends[0], &ends[1]).unwrap();
    context.handshake(qps[1], &ends[1], &ends[0]).unwrap();
    let mr = context.register(pd, Memory::zeroed(64).unwrap(), Access::LOCAL_WRITE).unwrap();
    let sges = [mr.sge(0..8)];
    // A send without a receive at the peer, and receives without a message.
    let send =
        SendWorkRequest { wr_id: 1, op: SendOp::Send, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
    context.post_send(qps[0], &send).unwrap();
    (2..=3).for_each(|wr_id| context.post_recv(qps[0], &ReceiveWorkRequest { wr_id, sges: &sges }).unwrap());
    context.poll(Nanos(1)).unwrap();
    assert!(matches!(context.deregister(mr), Err(Error::Busy { .. })));

    stub.remove_device();
    let told = (2..5000).find_map(|n| context.poll(Nanos(n)).err()).unwrap().to_string();
    assert!(told.contains("stub0"), "{told}");
    assert_eq!(context.next_event(), Some(Event::DeviceFatal));
    for wr_id in 1..=3 {
        let wc = context.poll_cq(cq).unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.status, wc.qp), (wr_id, WcStatus::WrFlushErr, qps[0]));
    }
    assert_eq!(context.poll_cq(cq).unwrap(), None);
    assert!(context.poll(Nanos(6000)).is_err() && context.post_send(qps[0], &send).is_err());
    assert!(context.post_recv(qps[0], &ReceiveWorkRequest { wr_id: 4, sges: &[] }).is_err());
    assert!(context.prepare_wait(Nanos(6000)).is_err() && context.wait(std::time::Duration::MAX).is_err());
    if let Ok(attributes) = context.query_qp(qps[0]) {
        assert_eq!(attributes.state, QpState::Error);
    }
    for qp in qps {
        context.destroy_qp(qp).unwrap();
    }
    context.destroy_cq(cq).unwrap();
}
