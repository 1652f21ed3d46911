//! Tests of the runner's loop and a handle in one thread, turn by turn.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::atomic::Ordering;

use ferroce_driver::loopback;
use ferroce_wire::Psn;

use super::*;
use crate::Memory;
use crate::verbs::{
    Access, AddressVector, Config, Cq, Data, Qp, QpConfig, ReadyToReceive, ReadyToSend, SendFlags, SendOp,
    SendWorkRequest, Sge, Transition, WcStatus,
};

/// A queue pair that is connected to itself.
fn looped() -> (Context, Cq, Qp, Sge) {
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(1024).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let gid = context.port().gids[0].gid;
    let qpn = context.query_qp(qp).unwrap().qpn;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let peer = ReadyToReceive::new(AddressVector::new(gid, 0), qpn, Psn::new(1));
    context.modify_qp(qp, Transition::Init { access }).unwrap();
    context.modify_qp(qp, Transition::ReadyToReceive(peer)).unwrap();
    context.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(Psn::new(1)))).unwrap();
    let mr = context.register(pd, Memory::zeroed(4096).unwrap(), access).unwrap();
    (context, cq, qp, Sge { mr, offset: 0, length: 64 })
}

fn turns(context: Context, idle: Idle) -> Turns {
    let state = Arc::new(RunnerState::new(idle, context.waker()));
    Turns::new(context, idle, state)
}

/// The same as `deliver`, without a second thread.
fn deliver_to(turns: &mut Turns, cq: Cq) -> RunnerHandle {
    let config = HandleConfig { commands: 16, deliveries: 8, idle: Idle::Spin };
    let handle = turns.state.handle(&config).unwrap();
    assert!(!turns.is_told_to_stop());
    turns.clients.last_mut().unwrap().feed(cq);
    handle
}

#[test]
fn commands_and_deliveries_allocate_nothing() {
    let (context, cq, qp, sge) = looped();
    let remote = context.remote(sge.mr).unwrap();
    let mut turns = turns(context, Idle::default());
    let mut handle = deliver_to(&mut turns, cq);
    let mut spare = Some(Memory::zeroed(4096).unwrap());
    let mut round = |n: u64| {
        let remote = crate::RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        let (op, flags) = (SendOp::Write(remote), SendFlags::SIGNALED);
        for data in [Data::Inline(&[7; 64]), Data::Sges(&[sge, sge])] {
            handle.post_send(qp, &SendWorkRequest { wr_id: n, op, data, flags }).unwrap();
        }
        let mut ended = 0;
        while ended < 2 {
            turns.turn().unwrap();
            turns.clients.iter().for_each(Client::announce_rest);
            while let Some(delivery) = handle.poll().unwrap() {
                let Delivery::Completed { completion, .. } = delivery else { panic!("{delivery:?}") };
                assert_eq!((completion.wr_id, completion.status), (n, WcStatus::Success));
                ended += 1;
            }
        }
        // A task waits for the handle.
        let mut task = std::task::Context::from_waker(Waker::noop());
        assert!(handle.poll_next(&mut task).is_pending());
        handle.exchange(sge.mr, spare.take().unwrap()).unwrap();
        turns.turn().unwrap();
        match handle.poll().unwrap() {
            Some(Delivery::Exchanged { memory, outcome: Ok(()), .. }) => spare = Some(memory),
            other => panic!("{other:?}"),
        }
        // Both directions are full: commands, and deliveries without room.
        let data = Data::Inline(&[]);
        while handle.post_send(qp, &SendWorkRequest { wr_id: n, op, data, flags }).is_ok() {}
        for _ in 0..100 {
            turns.turn().unwrap();
        }
        let mut drained = 0;
        while drained < 16 {
            drained += usize::from(handle.poll().unwrap().is_some());
            turns.turn().unwrap();
        }
    };
    round(0);
    let allocated = allocation_counter::measure(|| (1..100).for_each(&mut round));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
}

#[test]
fn a_runner_sleeps_only_if_it_has_no_work() {
    let (context, cq, qp, _) = looped();
    let mut turns = turns(context, Idle::Block);
    let mut handle = deliver_to(&mut turns, cq);
    let rests = |turns: &Turns| turns.clients.iter().all(Client::may_rest);
    assert!(rests(&turns));
    let bad = SendWorkRequest {
        wr_id: 5,
        op: SendOp::LocalInvalidate(crate::RKey::new(1)),
        data: Data::Inline(&[1]),
        flags: SendFlags::SIGNALED,
    };
    // Each is refused: the work request does not allow inline data. There is no room for the ninth delivery.
    (0..12).for_each(|_| handle.post_send(qp, &bad).unwrap());
    assert!(!rests(&turns));
    while turns.turn().unwrap() > 0 {}
    assert!(rests(&turns), "nobody takes what it delivers");
    turns.clients.iter().for_each(Client::announce_rest);
    assert!(handle.is_stalled());
    assert!(matches!(handle.poll().unwrap(), Some(Delivery::Refused { wr_id: 5, .. })));
    assert!(!rests(&turns), "there is room again");
    // As if the runner had checked that it may sleep after the handle has taken all.
    turns.state.sleep.sleeping().store(true, Ordering::Relaxed);
    let mut refused = 1;
    while let Some(delivery) = handle.poll().unwrap() {
        assert!(matches!(delivery, Delivery::Refused { wr_id: 5, .. }));
        refused += 1;
    }
    assert!(!turns.state.sleep.sleeping().load(Ordering::Relaxed), "it was woken");
    while refused < 12 {
        turns.turn().unwrap();
        refused += std::iter::from_fn(|| handle.poll().unwrap()).count();
    }
    turns.turn().unwrap();
    assert!(rests(&turns) && refused == 12);
}

#[test]
fn the_queues_of_a_handle_take_turns_when_room_is_scarce() {
    let (mut context, cq, qp, sge) = looped();
    let second = context.create_cq(64).unwrap();
    let pd = context.alloc_pd().unwrap();
    let other = context.create_qp(&QpConfig::rc(pd, second)).unwrap();
    let access = Access::LOCAL_WRITE;
    context.modify_qp(other, Transition::Init { access }).unwrap();
    for wr_id in 0..40 {
        let wr = crate::ReceiveWorkRequest { wr_id, sges: &[sge] };
        context.post_recv(qp, &wr).unwrap();
        context.post_recv(other, &wr).unwrap();
    }
    // All are flushed.
    context.modify_qp(qp, Transition::Error).unwrap();
    context.modify_qp(other, Transition::Error).unwrap();
    let mut turns = turns(context, Idle::Spin);
    let mut handle = deliver_to(&mut turns, cq);
    turns.clients.last_mut().unwrap().feed(second);
    let mut seen = Vec::new();
    while seen.len() < 80 {
        turns.turn().unwrap();
        if let Some(Delivery::Completed { cq, .. }) = handle.poll().unwrap() {
            seen.push(cq);
        }
    }
    let early = seen[..40].iter().filter(|from| **from == second).count();
    assert!((10..=30).contains(&early), "{early} of the second queue among the first 40");
}

/// A program that creates and destroys queues all the time must not make the runner's lists grow.
#[test]
fn a_destroyed_queue_is_removed() {
    let (context, cq, ..) = looped();
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let [mut handle, mut other] = [(); 2].map(|()| runner.handle(&HandleConfig::default()).unwrap());
    handle.deliver(cq).unwrap();
    for _ in 0..1000 {
        let cq = handle.call(|context| context.create_cq(16)).unwrap().unwrap();
        handle.deliver(cq).unwrap();
        handle.call(move |context| context.destroy_cq(cq)).unwrap().unwrap();
    }
    // Queues destroyed in the last turns may still be in the list.
    assert!(runner.state.claims.count() < 100, "{}", runner.state.claims.count());
    assert!(matches!(other.deliver(cq), Err(Error::Busy { .. })), "one that is there is not forgotten");
    drop(handle);
    other.deliver(cq).unwrap();
}

/// The runner may process a request of the next handle before it notices that the previous one was dropped.
#[test]
fn a_dropped_handle_takes_nothing_from_the_next() {
    let (mut context, cq, qp, sge) = looped();
    context.post_recv(qp, &crate::ReceiveWorkRequest { wr_id: 7, sges: &[sge] }).unwrap();
    context.modify_qp(qp, Transition::Error).unwrap();
    let mut turns = turns(context, Idle::Spin);
    let [first, mut next] = [(); 2].map(|()| deliver_to(&mut turns, cq));
    drop(first);
    turns.turn().unwrap();
    let delivery = next.poll().unwrap();
    assert!(matches!(delivery, Some(Delivery::Completed { .. })), "{delivery:?}");
}
