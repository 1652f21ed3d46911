//! Runners' handles in asynchronous tasks: deliveries as futures and as a stream, with any executor.
//!
//! `FERROCE_RACES=1000000` sets the number of races.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{self, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use ferroce::driver::loopback;
use ferroce::*;
use futures_core::Stream;

const LONG: Duration = Duration::from_secs(20);

/// The smallest executor: one task, on the thread that waits for it.
struct Parked {
    thread: Thread,
    wakes: AtomicU64,
}

impl Parked {
    fn new() -> Arc<Parked> {
        Arc::new(Parked { thread: thread::current(), wakes: AtomicU64::new(0) })
    }

    /// Polls the future each time it was woken. No other unpark can hide a lost wake-up.
    fn run<F: Future>(self: &Arc<Self>, waker: &Waker, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            let seen = self.wakes.load(Ordering::Acquire);
            if let Poll::Ready(output) = future.as_mut().poll(&mut task::Context::from_waker(waker)) {
                return output;
            }
            let start = Instant::now();
            while self.wakes.load(Ordering::Acquire) == seen {
                assert!(start.elapsed() < LONG, "nobody woke the task");
                thread::park_timeout(LONG);
            }
        }
    }
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::Release);
        self.thread.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let parked = Parked::new();
    let waker = Waker::from(parked.clone());
    parked.run(&waker, future)
}

/// Polls a future once.
fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut task::Context::from_waker(Waker::noop()))
}

/// A runner, and a queue pair whose receives are flushed immediately.
fn flushing() -> (Runner, Cq, Qp) {
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    context.modify_qp(qp, Transition::Error).unwrap();
    (Runner::start(context, &RunnerConfig::default().idle(Idle::Block)).unwrap(), cq, qp)
}

fn post(handle: &mut RunnerHandle, qp: Qp, wr_id: u64) {
    handle.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
}

fn wr_id(delivery: Delivery) -> u64 {
    match delivery {
        Delivery::Completed { completion, .. } => completion.wr_id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_delivery_wakes_its_task() {
    let (runner, cq, qp) = flushing();
    let config = HandleConfig::default();
    let (mut poster, mut taker) = (runner.handle(&config).unwrap(), runner.handle(&config).unwrap());
    taker.deliver(cq).unwrap();
    let races = std::env::var("FERROCE_RACES").ok().map_or(5_000, |races| races.parse().unwrap());
    let (taken, start) = (AtomicU64::new(0), Instant::now());
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..races {
                while taken.load(Ordering::Acquire) < n {
                    thread::yield_now();
                }
                // Up to some microseconds, so that the threads interleave in every way.
                for _ in 0..n.wrapping_mul(0x9e37_79b9) % 2000 {
                    std::hint::spin_loop();
                }
                post(&mut poster, qp, n);
            }
        });
        for n in 0..races {
            assert_eq!(wr_id(block_on(taker.next()).unwrap()), n);
            taken.store(n + 1, Ordering::Release);
        }
    });
    println!("{races} deliveries in {:?}", start.elapsed());
}

#[test]
fn a_future_that_is_dropped_loses_nothing() {
    let (runner, cq, qp) = flushing();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    handle.deliver(cq).unwrap();
    for n in 0..2000 {
        // One that waits; then some before and some after the delivery is available.
        assert!(poll_once(pin!(handle.next())).is_pending(), "nothing is posted");
        post(&mut handle, qp, n);
        for _ in 0..n % 5 {
            let polled = poll_once(pin!(handle.next()));
            if let Poll::Ready(delivery) = polled {
                assert_eq!(wr_id(delivery.unwrap()), n);
                post(&mut handle, qp, n);
                break;
            }
        }
        drop(handle.next());
        assert_eq!(wr_id(block_on(handle.next()).unwrap()), n);
    }
}

#[test]
fn a_delivery_allocates_nothing_in_its_task() {
    let (runner, cq, qp) = flushing();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    handle.deliver(cq).unwrap();
    let parked = Parked::new();
    let waker = Waker::from(parked.clone());
    let mut round = |n| {
        post(&mut handle, qp, n);
        assert_eq!(wr_id(parked.run(&waker, handle.next()).unwrap()), n);
        post(&mut handle, qp, n);
        let mut stream = pin!(&mut handle);
        let delivery = parked.run(&waker, std::future::poll_fn(|task| stream.as_mut().poll_next(task)));
        assert_eq!(wr_id(delivery.unwrap()), n);
    };
    round(0);
    let allocated = allocation_counter::measure(|| (1..1000).for_each(&mut round));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
}

#[test]
fn the_latest_task_is_woken() {
    let (runner, cq, qp) = flushing();
    let config = HandleConfig::default();
    let (mut poster, mut taker) = (runner.handle(&config).unwrap(), runner.handle(&config).unwrap());
    taker.deliver(cq).unwrap();
    let first = Parked::new();
    let waker = Waker::from(first.clone());
    assert!(taker.poll_next(&mut task::Context::from_waker(&waker)).is_pending());
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            post(&mut poster, qp, 1);
        });
        assert_eq!(wr_id(block_on(taker.next()).unwrap()), 1);
    });
    assert_eq!(first.wakes.load(Ordering::Relaxed), 0);
    // A thread that waits afterwards is woken too.
    post(&mut poster, qp, 2);
    assert_eq!(wr_id(taker.wait(LONG).unwrap().unwrap()), 2);
}

#[test]
fn a_call_is_a_future_and_completes_with_a_full_ring() {
    let (runner, cq, qp) = flushing();
    let config = HandleConfig::default().commands(4).deliveries(2).idle(Idle::Block);
    let mut handle = runner.handle(&config).unwrap();
    handle.deliver(cq).unwrap();
    assert_eq!(block_on(handle.call_async(|context| context.query_device().max_qp)).unwrap(), 256);
    for n in 0..40 {
        post(&mut handle, qp, n);
        assert_eq!(block_on(handle.call_async(move |_| n)).unwrap(), n);
    }
    for n in 0..40 {
        assert_eq!(wr_id(block_on(handle.next()).unwrap()), n);
    }
    // If it is dropped before it was polled, it is not posted; if it is dropped while it waits, it is executed.
    let ran = Arc::new(AtomicU64::new(0));
    let add = |amount| {
        let ran = ran.clone();
        move |_: &mut Context| ran.fetch_add(amount, Ordering::Relaxed)
    };
    drop(handle.call_async(add(1)));
    let _ = poll_once(pin!(handle.call_async(add(16))));
    block_on(handle.call_async(|_| ())).unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 16);
}

#[test]
fn a_call_that_is_dropped_runs_if_there_was_room_for_it() {
    let (runner, ..) = flushing();
    let config = HandleConfig::default();
    let (mut blocker, mut handle) =
        (runner.handle(&config).unwrap(), runner.handle(&config.commands(2)).unwrap());
    let ran = Arc::new(AtomicU64::new(0));
    let (begun, begins) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || blocker.call(move |_| (begun.send(()).unwrap(), goes_on.recv().unwrap())));
        begins.recv().unwrap();
        // The runner is busy: two are in the ring, and the third found no room.
        for amount in [1, 16, 256] {
            let ran = ran.clone();
            let call = handle.call_async(move |_| ran.fetch_add(amount, Ordering::Relaxed));
            assert!(poll_once(pin!(call)).is_pending());
        }
        go_on.send(()).unwrap();
        handle.call(|_| ()).unwrap();
    });
    assert_eq!(ran.load(Ordering::Relaxed), 17);
}

#[test]
fn tasks_are_notified_of_the_end() {
    let (runner, cq, qp) = flushing();
    let mut handles: Vec<_> = (0..3).map(|_| runner.handle(&HandleConfig::default()).unwrap()).collect();
    handles[0].deliver(cq).unwrap();
    post(&mut handles[0], qp, 1);
    thread::scope(|scope| {
        let mut waiting = handles.iter_mut();
        let (first, second, third) =
            (waiting.next().unwrap(), waiting.next().unwrap(), waiting.next().unwrap());
        scope.spawn(move || {
            // Earlier deliveries are first.
            let mut stream = pin!(first);
            let mut next = || block_on(std::future::poll_fn(|task| stream.as_mut().poll_next(task)));
            assert_eq!(next().map(wr_id), Some(1));
            assert!(next().is_none() && next().is_none());
        });
        scope.spawn(move || {
            let error = block_on(second.next()).unwrap_err().to_string();
            assert!(error.contains("it was stopped"), "{error}");
        });
        scope.spawn(move || while let Ok(()) = block_on(third.call_async(|_| ())) {});
        thread::sleep(Duration::from_millis(30));
        assert!(runner.stop().error.is_none());
    });
}
