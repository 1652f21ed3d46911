//! A card that never stops, and sequences of verbs that stress the state kept in addition to the card's.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ferroce::driver::rnic::Verbs;
use ferroce::*;
use ferroce_driver_test_support::rnic_stub::Stub;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn open(stub: &Stub) -> Context {
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let port = RnicPort::open_by(&verbs, "stub0", None, None).unwrap();
    Context::open(port, &Config::default().seed([3; 32])).unwrap()
}

/// Two queue pairs that reach each other, and a region.
fn connected(context: &mut Context) -> (Cq, [Qp; 2], Pd, Mr) {
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::MW_BIND;
    let mr = context.register(pd, Memory::zeroed(4096).unwrap(), rights).unwrap();
    let qps = [(); 2].map(|()| context.create_qp(&QpConfig::rc(pd, cq)).unwrap());
    let ends = qps.map(|qp| context.endpoint(qp, 0).unwrap());
    context.handshake(qps[0], &ends[0], &ends[1]).unwrap();
    context.handshake(qps[1], &ends[1], &ends[0]).unwrap();
    (cq, qps, pd, mr)
}

#[test]
fn a_poll_ends_during_endless_bogus_completions() {
    let Some(stub) = Stub::build(&["FLOOD_POLL"]) else { return };
    let (tell, told) = mpsc::channel();
    let attacked = thread::spawn(move || {
        let mut context = open(&stub);
        let (cq, qps, ..) = connected(&mut context);
        let taken = context.poll(Nanos(1)).unwrap();
        assert!(taken > 0);
        assert!(context.poll_cq(cq).unwrap().is_none());
        // These check for completions, too.
        assert!(!context.prepare_wait(Nanos(2)).unwrap());
        context.modify_qp(qps[0], Transition::Reset).unwrap();
        context.destroy_qp(qps[0]).unwrap();
        drop(context);
        tell.send(stub.live_objects()).unwrap();
    });
    let live = told.recv_timeout(Duration::from_secs(20)).expect("it hangs, or has failed");
    assert_eq!(live, 0);
    attacked.join().unwrap();
}

/// Completions after the end of a device refer to memory that may have been reused.
#[test]
fn a_device_that_is_gone_is_not_polled_for_completions() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let port = RnicPort::open_by(&verbs, "stub1", None, None).unwrap();
    let mut other = Context::open(port, &Config::default()).unwrap();
    let its_cq = other.create_cq(16).unwrap();
    let mut context = open(&stub);
    let (cq, qps, ..) = connected(&mut context);
    stub.remove_device();
    (1..5000).find_map(|n| context.poll(Nanos(n)).err()).unwrap();
    while context.poll_cq(cq).unwrap().is_some() {}
    stub.fail("ibv_poll_cq", 1);
    let mut room = [WorkCompletion::EMPTY; 4];
    assert_eq!(context.poll_cq_into(cq, &mut room).unwrap(), 0);
    qps.into_iter().for_each(|qp| context.destroy_qp(qp).unwrap());
    // Another context is the first to ask.
    assert!(other.poll_cq_into(its_cq, &mut room).is_err());
}

#[test]
fn arming_for_any_completion_takes_precedence_in_both_orders() {
    for order in [[Notify::Solicited, Notify::Next], [Notify::Next, Notify::Solicited]] {
        let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
        let mut context = open(&stub);
        let (cq, qps, _, mr) = connected(&mut context);
        let sges = [mr.sge(0..8)];
        context.poll(Nanos(1)).unwrap();
        for notify in order {
            context.req_notify_cq(cq, notify).unwrap();
        }
        while !context.prepare_wait(Nanos(1)).unwrap() {
            context.poll(Nanos(1)).unwrap();
            while context.next_event().is_some() {}
        }
        context.post_recv(qps[1], &ReceiveWorkRequest { wr_id: 1, sges: &sges }).unwrap();
        let (op, data, flags) = (SendOp::Send, Data::Sges(&sges), SendFlags::SIGNALED);
        context.post_send(qps[0], &SendWorkRequest { wr_id: 2, op, data, flags }).unwrap();
        let mut ends = [PollFd::from_borrowed_fd(context.as_fd(), PollFlags::IN)];
        let ready = poll(&mut ends, Some(&Timespec { tv_sec: 2, tv_nsec: 0 })).unwrap();
        assert_eq!(ready, 1, "{order:?}: nobody is woken");
        context.poll(Nanos(2)).unwrap();
        let events: Vec<_> = std::iter::from_fn(|| context.next_event()).collect();
        assert!(events.contains(&Event::Completion(cq)), "{order:?}: {events:?}");
    }
}

#[test]
fn a_failed_bind_does_not_affect_an_earlier_successful_one() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let mut context = open(&stub);
    let (cq, qps, pd, mr) = connected(&mut context);
    let mw = context.alloc_mw(pd).unwrap();
    let first = context.remote(mr).unwrap();
    let post = |context: &mut Context, op| {
        let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&[]), flags: SendFlags::SIGNALED };
        context.post_send(qps[0], &wr).unwrap();
    };
    let bind = |length| SendOp::BindMw { mw, mr, offset: 0, length, access: Access::REMOTE_WRITE };
    // The key of the first bind, which was not returned yet.
    post(&mut context, bind(8));
    context.poll(Nanos(1)).unwrap();
    let key = context.remote_window(mw).unwrap().unwrap().rkey;
    assert_ne!(key, first.rkey);
    post(&mut context, SendOp::LocalInvalidate(key));
    context.poll(Nanos(2)).unwrap();
    assert_eq!(context.remote_window(mw).unwrap(), None);
    while context.poll_cq(cq).unwrap().is_some() {}
    // Both are posted before either completion is polled; the second exceeds the region.
    post(&mut context, bind(16));
    post(&mut context, bind(1 << 40));
    context.poll(Nanos(3)).unwrap();
    let told: Vec<_> = std::iter::from_fn(|| context.poll_cq(cq).unwrap()).map(|told| told.status).collect();
    assert_eq!(told, [WcStatus::Success, WcStatus::MwBindErr]);
    // The first bind is valid.
    assert_eq!(context.remote_window(mw).unwrap().map(|window| window.length), Some(16));
}

#[test]
fn a_bind_of_a_destroyed_window_does_not_affect_the_next_one() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let mut context = open(&stub);
    let (_, qps, pd, mr) = connected(&mut context);
    let bind = |mw, length| SendWorkRequest {
        wr_id: 1,
        op: SendOp::BindMw { mw, mr, offset: 0, length, access: Access::REMOTE_WRITE },
        data: Data::Sges(&[]),
        flags: SendFlags::SIGNALED,
    };
    let old = context.alloc_mw(pd).unwrap();
    context.post_send(qps[0], &bind(old, 8)).unwrap();
    context.dealloc_mw(old).unwrap();
    let new = context.alloc_mw(pd).unwrap();
    // It exceeds the region: it fails.
    context.post_send(qps[0], &bind(new, 1 << 40)).unwrap();
    context.poll(Nanos(1)).unwrap();
    assert_eq!(context.remote_window(new).unwrap(), None);
    context.dealloc_mw(new).unwrap();
    for qp in qps {
        context.destroy_qp(qp).unwrap();
    }
    context.deregister(mr).unwrap();
}

/// Unsignaled sends free room in their queues by completions that the application has not counted.
#[test]
fn many_silent_queue_pairs_do_not_overflow_a_small_queue() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let mut context = open(&stub);
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let mr = context
        .register(pd, Memory::zeroed(64).unwrap(), Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap();
    let op = SendOp::Write(context.remote(mr).unwrap().at(0));
    let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&[mr.sge(0..8)]), flags: SendFlags::default() };
    let config = QpConfig::rc(pd, cq).max_send_wr(8);
    let senders: Vec<Qp> = (0..120)
        .map(|_| {
            let qps = [(); 2].map(|()| context.create_qp(&config).unwrap());
            let ends = qps.map(|qp| context.endpoint(qp, 0).unwrap());
            context.handshake(qps[0], &ends[0], &ends[1]).unwrap();
            context.handshake(qps[1], &ends[1], &ends[0]).unwrap();
            qps[0]
        })
        .collect();
    for round in 1..=3 {
        for qp in &senders {
            while context.post_send(*qp, &wr).is_ok() {}
            assert_eq!(context.query_qp(*qp).unwrap().outstanding_sends, 8);
        }
        context.poll(Nanos(round)).unwrap();
        assert_eq!(context.next_event(), None);
        assert!(senders.iter().all(|qp| context.query_qp(*qp).unwrap().outstanding_sends < 8));
    }
    assert_eq!(context.poll_cq(cq).unwrap(), None);
}
