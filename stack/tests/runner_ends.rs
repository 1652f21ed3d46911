//! The end of a runner, by `stop`, by a drop, by its port or by a panic: no wait is endless, and no memory passed to it is
//! lost.
//!
//! `FERROCE_RACES=100000` sets the number of races.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use ferroce::driver::loopback;
use ferroce::*;
use ferroce_driver_test_support::mortal::Mortal;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

const LONG: Duration = Duration::from_secs(20);

/// Memory that holds its number.
fn block(number: u64) -> Memory {
    let mut memory = Memory::zeroed(64).unwrap();
    memory.write(0, &number.to_le_bytes()).unwrap();
    memory
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// A context with regions that hold the blocks from 0 on, and a queue pair in RESET, which accepts no work request.
fn context(port: Box<dyn PacketDriver>, regions: u64) -> (Context, Vec<Mr>, Qp) {
    let mut context = Context::open(port, &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let mrs = (0..regions).map(|n| context.register(pd, block(n), Access::LOCAL_WRITE).unwrap()).collect();
    (context, mrs, qp)
}

fn port() -> Box<dyn PacketDriver> {
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
    Box::new(port)
}

fn post(handle: &mut RunnerHandle, qp: Qp, wr_id: u64) {
    handle.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
}

/// All deliveries until the handle reports that the runner has ended, in words: an exchange with the number of its block.
fn rest(handle: &mut RunnerHandle) -> Vec<String> {
    let mut rest = Vec::new();
    loop {
        match handle.wait(LONG) {
            Ok(Some(Delivery::Exchanged { memory, outcome, .. })) => {
                let outcome = outcome.map_or_else(|error| error.to_string(), |()| "exchanged".to_owned());
                rest.push(format!("{} {outcome}", number(memory.bytes().unwrap())));
            }
            Ok(Some(Delivery::Refused { wr_id, error })) => rest.push(format!("{wr_id} {error}")),
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                assert!(matches!(error, Error::RunnerEnded { .. }), "{error}");
                return rest;
            }
        }
    }
}

#[test]
fn held_deliveries_are_returned_after_the_end() {
    for is_dropped in [false, true] {
        let (context, mrs, qp) = context(port(), 4);
        let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
        let mut handle = runner.handle(&HandleConfig::default().deliveries(1)).unwrap();
        for (n, mr) in mrs.iter().enumerate() {
            handle.exchange(*mr, block(10 + n as u64)).unwrap();
        }
        post(&mut handle, qp, 7);
        if is_dropped {
            drop(runner);
        } else {
            let context = runner.stop().context;
            let inside: Vec<u64> = mrs.iter().map(|mr| number(context.bytes(*mr).unwrap())).collect();
            assert_eq!(inside, [10, 11, 12, 13]);
        }
        let rest = rest(&mut handle);
        assert_eq!(rest[..4], ["0 exchanged", "1 exchanged", "2 exchanged", "3 exchanged"]);
        assert!(
            rest.len() == 5 && rest[4].starts_with("7 QP ") && rest[4].contains("is in Reset"),
            "{rest:?}"
        );
    }
}

/// A thread exchanges while another one stops the runner. Each block is in one place afterwards.
#[test]
fn no_memory_is_lost_during_a_stop() {
    let races: u64 = std::env::var("FERROCE_RACES").ok().map_or(300, |races| races.parse().unwrap());
    let (mut exchanged, mut refused) = (0, 0);
    for race in 0..races {
        let (context, mrs, _) = context(port(), 1);
        let mr = mrs[0];
        let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
        let config = HandleConfig::default().deliveries(1 + (race % 300) as u32);
        let mut handle = runner.handle(&config).unwrap();
        let exchanges = thread::spawn(move || {
            let (mut blocks, mut next) = (Vec::new(), 1);
            let mut take = |delivery| match delivery {
                Delivery::Exchanged { memory, outcome, .. } => {
                    blocks.push((number(memory.bytes().unwrap()), outcome.is_ok()));
                }
                other => panic!("{other:?}"),
            };
            loop {
                match handle.exchange(mr, block(next)) {
                    Ok(()) => next += 1,
                    Err(RegisterError { source: Error::RunnerEnded { .. }, .. }) => break,
                    Err(RegisterError { source: Error::QueueFull { .. }, .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                while let Ok(Some(delivery)) = handle.poll() {
                    take(delivery);
                }
            }
            while let Ok(Some(delivery)) = handle.poll() {
                take(delivery);
            }
            (blocks, next)
        });
        thread::sleep(Duration::from_micros(race % 7 * 50));
        let context = runner.stop().context;
        let (blocks, count) = exchanges.join().unwrap();
        let inside = number(context.bytes(mr).unwrap());
        let mut all: Vec<u64> = blocks.iter().map(|(block, _)| *block).chain([inside]).collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..count), "{} of {count} blocks are left", all.len());
        exchanged += blocks.iter().filter(|(_, ok)| *ok).count();
        refused += blocks.iter().filter(|(_, ok)| !ok).count();
    }
    println!("{races} runners: {exchanged} blocks exchanged, {refused} given back");
}

/// The runner has executed none of them when its port fails, or when a closure panics.
#[test]
fn commands_that_are_not_executed_are_returned() {
    for panics in [false, true] {
        let dead = Arc::new(AtomicBool::new(false));
        let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
        let (context, mrs, qp) = context(Box::new(Mortal::new(port, dead.clone())), 1);
        let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
        let mut handle = runner.handle(&HandleConfig::default()).unwrap();
        let mut other = runner.handle(&HandleConfig::default()).unwrap();
        let (begun, begins) = mpsc::channel();
        let (go_on, goes_on) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let last = move |_: &mut Context| {
                    begun.send(()).unwrap();
                    goes_on.recv().unwrap();
                    dead.store(true, Ordering::Relaxed);
                    assert!(!panics, "on purpose");
                };
                assert_eq!(other.call(last).is_err(), panics);
            });
            begins.recv().unwrap();
            handle.exchange(mrs[0], block(10)).unwrap();
            post(&mut handle, qp, 7);
            handle.exchange(mrs[0], block(11)).unwrap();
            go_on.send(()).unwrap();
        });
        let rest = rest(&mut handle);
        let why = if panics { "its thread panicked" } else { "it is gone" };
        assert_eq!(rest.len(), 3, "{rest:?}");
        for (told, number) in rest.iter().zip([10, 7, 11]) {
            assert!(
                told.starts_with(&format!("{number} the runner has ended: ")) && told.contains(why),
                "{told}"
            );
        }
    }
}

/// The results for a thread that waits for the channel, while `end` runs here.
fn told(channel: &CompChannel, end: impl FnOnce()) -> [Result<Option<Cq>, String>; 2] {
    let wait = || channel.wait_cq_event(LONG).map_err(|error| error.to_string());
    thread::scope(|scope| {
        let waiting = [(); 2].map(|()| scope.spawn(wait));
        thread::sleep(Duration::from_millis(50));
        end();
        waiting.map(|waiting| waiting.join().unwrap())
    })
}

const NO_QUEUE: &str = "the completion channel has no completion queue: all were destroyed, also with their context, \
    or none was created on it";

#[test]
fn a_channel_without_queues_ends_every_wait() {
    let (mut context, ..) = context(port(), 0);
    let channel = context.create_comp_channel().unwrap();
    let is_readable =
        || poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1;
    let has_no_queue = || matches!(channel.get_cq_event(), Err(Error::NoQueue));
    assert!(is_readable() && has_no_queue() && is_readable());
    let error = channel.wait_cq_event(LONG).unwrap_err();
    assert!(matches!(error, Error::NoQueue) && error.to_string() == NO_QUEUE, "{error}");
    let [first, second] = [(); 2].map(|()| context.create_cq_on(16, &channel).unwrap());
    assert!(!is_readable());
    assert_eq!(channel.wait_cq_event(Duration::ZERO).unwrap(), None);
    // After one of two there is another.
    context.destroy_cq(first).unwrap();
    assert_eq!(channel.wait_cq_event(Duration::from_millis(20)).unwrap(), None);
    let gone = [(); 2].map(|()| Err(NO_QUEUE.to_owned()));
    assert_eq!(told(&channel, || context.destroy_cq(second).unwrap()), gone);
    // Like a pipe without a writer: it stays readable, for waits on the descriptor.
    for _ in 0..3 {
        assert!(is_readable() && has_no_queue());
    }
    // With a new queue the channel works again.
    context.create_cq_on(16, &channel).unwrap();
    assert!(!is_readable());
    assert_eq!(channel.get_cq_event().unwrap(), None);
    assert_eq!(told(&channel, || drop(context)), gone);
}

/// A waiter on the descriptor that is edge-triggered (such as tokio's `AsyncFd`) and takes events until there are none gets
/// an error, and does not retry forever.
#[test]
fn a_channel_without_queues_is_distinguished_from_one_without_events() {
    let (mut context, ..) = context(port(), 0);
    let channel = context.create_comp_channel().unwrap();
    context.create_cq_on(16, &channel).unwrap();
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&edges, &channel, epoll::EventData::new_u64(0), flags).unwrap();
    drop(context);
    let (time, mut wakes) = (Timespec { tv_sec: 20, tv_nsec: 0 }, 0);
    let end = loop {
        let mut events = Vec::with_capacity(1);
        assert_eq!(epoll::wait(&edges, rustix::buffer::spare_capacity(&mut events), Some(&time)).unwrap(), 1);
        wakes += 1;
        match channel.get_cq_event() {
            Ok(event) => assert_eq!(event, None),
            Err(error) => break error,
        }
    };
    assert!(matches!(end, Error::NoQueue) && wakes == 1, "{end} after {wakes} wakes");
}

/// The runner ends; its context is kept, so its queues exist, but are not polled.
#[test]
fn the_end_of_a_runner_wakes_waiters_of_a_channel() {
    for dies in [false, true] {
        let dead = Arc::new(AtomicBool::new(false));
        let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
        let (mut context, ..) = context(Box::new(Mortal::new(port, dead.clone())), 0);
        let channel = context.create_comp_channel().unwrap();
        let [cq, other] = [(); 2].map(|()| context.create_cq_on(16, &channel).unwrap());
        // One event for each armed queue.
        context.req_notify_cq(cq, Notify::Next).unwrap();
        context.req_notify_cq(other, Notify::Solicited).unwrap();
        let runner = Runner::start(context, &RunnerConfig::default().idle(Idle::Block)).unwrap();
        let mut handle = runner.handle(&HandleConfig::default()).unwrap();
        let (mut runner, mut stopped) = (Some(runner), None);
        let events = told(&channel, || {
            if dies {
                dead.store(true, Ordering::Relaxed);
                let _ = handle.call(|_| ());
            } else {
                stopped = runner.take().map(Runner::stop);
            }
        });
        assert!(events.contains(&Ok(Some(cq))) && events.contains(&Ok(Some(other))), "{events:?}");
        assert!(matches!(handle.call(|_| ()), Err(Error::RunnerEnded { .. })));
        // These events have no completion.
        if let Some(mut stopped) = stopped {
            assert_eq!([cq, other].map(|cq| stopped.context.poll_cq(cq).unwrap()), [None, None]);
        }
    }
}

#[test]
fn a_wait_for_the_runner_on_its_own_thread_is_refused() {
    let (context, _, qp) = context(port(), 0);
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    let mut inner = runner.handle(&HandleConfig::default()).unwrap();
    let (done, outcome) = mpsc::channel();
    let inside = move |context: &mut Context| {
        let cq = context.create_cq(16).unwrap();
        let refused = [inner.call(|_| ()), inner.deliver(cq), inner.wait(LONG).map(drop)];
        // Commands without a wait are executed after the closure.
        post(&mut inner, qp, 7);
        assert!(inner.poll().unwrap().is_none() && inner.wait(Duration::ZERO).unwrap().is_none());
        done.send((inner, refused)).unwrap();
    };
    thread::spawn(move || handle.call(inside));
    let (mut inner, refused) = outcome.recv_timeout(LONG).expect("the closure has come to its end");
    for (error, verb) in refused.into_iter().zip(["call", "deliver", "wait"]) {
        let expected = format!(
            "{verb} on the runner's own thread would wait forever: use the context that the closure receives"
        );
        assert_eq!(error.unwrap_err().to_string(), expected);
    }
    assert!(matches!(inner.wait(LONG).unwrap(), Some(Delivery::Refused { wr_id: 7, .. })));
    assert_eq!(inner.call(|_| 5).unwrap(), 5);
}

/// The last owner of a runner is a closure that it executes.
#[test]
fn a_runner_may_be_dropped_on_its_own_thread() {
    let (mut context, mrs, _) = context(port(), 1);
    let channel = context.create_comp_channel().unwrap();
    context.create_cq_on(16, &channel).unwrap();
    let runner = Runner::start(context, &RunnerConfig::default().idle(Idle::Block)).unwrap();
    let [mut handle, mut other] = [(); 2].map(|()| runner.handle(&HandleConfig::default()).unwrap());
    assert_eq!(
        handle
            .call(move |_| {
                drop(runner);
                5
            })
            .unwrap(),
        5
    );
    match other.wait(LONG) {
        Err(Error::RunnerEnded { reason }) => assert_eq!(&*reason, "it was stopped"),
        told => panic!("{told:?}"),
    }
    assert!(handle.exchange(mrs[0], block(1)).is_err());
    // The context was dropped with it.
    assert!(matches!(channel.wait_cq_event(LONG), Err(Error::NoQueue)));
}

#[test]
fn stopping_a_runner_on_its_own_thread_is_an_error() {
    let (context, ..) = context(port(), 0);
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let [mut handle, mut other] = [(); 2].map(|()| runner.handle(&HandleConfig::default()).unwrap());
    let stop = move |_: &mut Context| {
        let stop = std::panic::AssertUnwindSafe(|| drop(runner.stop()));
        *std::panic::catch_unwind(stop).unwrap_err().downcast::<&str>().unwrap()
    };
    assert!(handle.call(stop).unwrap().contains("drop it there"));
    assert!(matches!(other.wait(LONG), Err(Error::RunnerEnded { .. })));
}

/// The commands of all handles are executed before all deliveries.
#[test]
fn completions_of_the_last_commands_reach_other_handles() {
    let mut context = Context::open(port(), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    context.modify_qp(qp, Transition::Error).unwrap();
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handles = [(); 3].map(|()| runner.handle(&HandleConfig::default()).unwrap());
    let [listener, poster, sleeper] = &mut handles;
    listener.deliver(cq).unwrap();
    poster.call(|_| ()).unwrap();
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let busy = move |_: &mut Context| {
                tell.send(()).unwrap();
                thread::sleep(Duration::from_millis(200));
            };
            sleeper.call(busy).unwrap();
        });
        told.recv().unwrap();
        post(poster, qp, 7);
        // Before the closure returns; the drop returns when the runner has ended.
        drop(runner);
    });
    let delivery = listener.poll();
    assert!(matches!(delivery, Ok(Some(Delivery::Completed { .. }))), "{delivery:?}");
}
