//! An application's loop: when it blocks, and its time.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce::driver::loopback;
use ferroce::*;
use ferroce_driver_test_support::waited::Waited;

/// Runs turns of `poller`, with its waits, until `is_done`.
fn run(
    poller: &mut Poller,
    context: &mut Context,
    waits: &AtomicU64,
    mut is_done: impl FnMut(&mut Context) -> bool,
) -> (u64, u64) {
    let (before, mut turns) = (waits.load(Ordering::Relaxed), 0);
    loop {
        poller.poll(context).unwrap();
        turns += 1;
        if is_done(context) {
            return (turns, waits.load(Ordering::Relaxed) - before);
        }
        assert!(turns < 10_000);
    }
}

/// Several that arrived together, of which the program takes one per turn.
#[test]
fn a_poller_does_not_block_while_results_are_unread() {
    let (port, _peer) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let waits = Arc::new(AtomicU64::new(0));
    let port = Waited { port, waits: waits.clone() };
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
    let mut poller = Poller::blocking();
    // Completions; a program may do other work in between.
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    for wr_id in 0..50 {
        context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
    }
    context.modify_qp(qp, Transition::Error).unwrap();
    let (mut turn, mut taken) = (0, 0);
    let outcome = run(&mut poller, &mut context, &waits, |context| {
        turn += 1;
        taken += u32::from(turn % 2 == 0 && context.poll_cq(cq).unwrap().is_some());
        taken == 50
    });
    assert_eq!(outcome, (100, 0), "turns and waits");
    // Events of several objects.
    let cqs: Vec<Cq> = (0..10).map(|_| context.create_cq(1).unwrap()).collect();
    let raise = |context: &mut Context| {
        for cq in &cqs {
            context.req_notify_cq(*cq, Notify::Next).unwrap();
            let qp = context.create_qp(&QpConfig::rc(pd, *cq)).unwrap();
            context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
            context.modify_qp(qp, Transition::Error).unwrap();
            context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] }).unwrap();
            assert!(context.poll_cq(*cq).unwrap().is_some());
            context.destroy_qp(qp).unwrap();
        }
    };
    raise(&mut context);
    let mut events = 0;
    let outcome = run(&mut poller, &mut context, &waits, |context| {
        events += u32::from(context.next_event().is_some());
        events == 10
    });
    assert_eq!(outcome, (10, 0), "turns and waits");
    // A program that ignores events does not spin because of them.
    raise(&mut context);
    let mut turns = 0;
    let (_, waited) = run(&mut poller, &mut context, &waits, |_| {
        turns += 1;
        turns == 10
    });
    assert_eq!(waited, 9, "after the turn in which they came");
}

/// It advances its contexts to the time of the latest one; another poller does not.
#[test]
fn a_pollers_contexts_share_one_time() {
    let [mut context, mut ahead, mut beside] = [1, 2, 3].map(|n| {
        let (port, _) = loopback::pair(&[[10, 0, 0, n].into()], &[]);
        Context::open(Box::new(port), &Config::default()).unwrap()
    });
    let later = Nanos(1_700_000_000_000_000_000);
    ahead.poll(later).unwrap();
    let [mut poller, mut other] = [(); 2].map(|()| Poller::spinning());
    for _ in 0..2 {
        poller.poll(&mut ahead).unwrap();
        poller.poll(&mut context).unwrap();
        other.poll(&mut beside).unwrap();
    }
    assert!(ahead.now() >= later && context.now() >= ahead.now() && poller.now() >= context.now());
    assert!(beside.now() < later && other.now() < later);
}
