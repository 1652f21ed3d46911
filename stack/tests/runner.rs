//! Runners: contexts on threads of their own, reached by other threads through rings.
//!
//! `FERROCE_SEED` replays the choices of a run, but not the scheduling of threads.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::loopback;
use ferroce::*;
use ferroce_driver_test_support::mortal::Mortal;
use ferroce_driver_test_support::random::Random;

const LONG: Duration = Duration::from_secs(60);
const IDLES: [Idle; 4] = [Idle::Yield, Idle::Adaptive { spins: 20, yields: 5 }, Idle::Block, Idle::Spin];

/// Any of them except the last: with fewer cores than spinning threads it would only be slow.
fn any_idle(random: &mut Random) -> Idle {
    IDLES[random.below(3) as usize]
}

fn seed() -> u64 {
    let seed = std::env::var("FERROCE_SEED").ok().map_or(7, |seed| seed.parse().unwrap());
    println!("replay: FERROCE_SEED={seed} cargo test -p ferroce --test runner -- --nocapture");
    seed
}

/// One end of a connection: a queue pair with its own completion queue and `BUFFERS` regions.
#[derive(Clone)]
struct Line {
    cq: Cq,
    qp: Qp,
    buffers: Vec<Mr>,
}

const BUFFERS: usize = 4;
const BUFFER: usize = 3000;
/// Of each queue.
const DEPTH: u32 = 16;

/// Two contexts with `lines` connections between them, on two ports of a switch.
fn connected(
    lines: usize,
    wrap: impl Fn(loopback::Loopback) -> Box<dyn PacketDriver>,
) -> [(Context, Vec<Line>); 2] {
    let (a, b) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mut ends = [a, b].map(|port| {
        let mut context = Context::open(wrap(port), &Config::default()).unwrap();
        let pd = context.alloc_pd().unwrap();
        let made = (0..lines).map(|_| {
            let cq = context.create_cq(4 * DEPTH).unwrap();
            let config = QpConfig::rc(pd, cq).max_send_wr(DEPTH).max_recv_wr(DEPTH).max_recv_sge(2);
            let qp = context.create_qp(&config).unwrap();
            let region = |_| context.register(pd, Memory::zeroed(BUFFER).unwrap(), access).unwrap();
            let buffers = (0..BUFFERS).map(region).collect();
            Line { cq, qp, buffers }
        });
        let made: Vec<Line> = made.collect();
        (context, made)
    });
    let facts = ends.each_ref().map(|(context, lines)| {
        let qpns: Vec<Qpn> = lines.iter().map(|line| context.query_qp(line.qp).unwrap().qpn).collect();
        (context.port().gids[0].gid, qpns)
    });
    for (n, (context, lines)) in ends.iter_mut().enumerate() {
        let (gid, qpns) = &facts[1 - n];
        for (line, qpn) in lines.iter().zip(qpns) {
            let psn = Psn::new(100);
            let peer = ReadyToReceive::new(AddressVector::new(*gid, 0), *qpn, psn)
                // The shortest, 10 µs: receivers are often late here.
                .min_rnr_timer(RnrTimer::new(1).unwrap());
            // A thread may be off its core for long: unlimited RNR retries, and a long timeout.
            let send = ReadyToSend::new(psn).timeout(18);
            context.modify_qp(line.qp, Transition::Init { access }).unwrap();
            context.modify_qp(line.qp, Transition::ReadyToReceive(peer)).unwrap();
            context.modify_qp(line.qp, Transition::ReadyToSend(send)).unwrap();
        }
    }
    ends
}

fn boxed(port: loopback::Loopback) -> Box<dyn PacketDriver> {
    Box::new(port)
}

fn runner(context: Context, idle: Idle) -> Runner {
    Runner::start(context, &RunnerConfig::default().idle(idle)).unwrap()
}

fn send(wr_id: u64, data: Data<'_>) -> SendWorkRequest<'_> {
    SendWorkRequest { wr_id, op: SendOp::SendWithImm(wr_id as u32), data, flags: SendFlags::SIGNALED }
}

fn completion(delivery: Delivery) -> WorkCompletion {
    match delivery {
        Delivery::Completed { completion, .. } => completion,
        other => panic!("{other:?}"),
    }
}

/// Posts `count` numbered messages as there is room, and polls at random.
fn send_all(mut handle: RunnerHandle, line: &Line, count: u64, mut random: Random) -> RunnerHandle {
    let (mut posted, mut ended) = (0, 0);
    while ended < count {
        for _ in 0..random.below(8) {
            if posted < count && posted - ended < u64::from(DEPTH) {
                match handle.post_send(line.qp, &send(posted, Data::Inline(&posted.to_le_bytes()))) {
                    Ok(()) => posted += 1,
                    Err(Error::QueueFull { queue: "command", .. }) => break,
                    Err(error) => panic!("{error}"),
                }
            }
        }
        let wait = if posted == count || posted - ended == u64::from(DEPTH) { LONG } else { Duration::ZERO };
        for _ in 0..random.below(6) {
            let Some(delivery) = handle.wait(wait).unwrap() else { break };
            let wc = completion(delivery);
            assert_eq!((wc.wr_id, wc.status), (ended, WcStatus::Success));
            ended += 1;
            if ended == posted {
                break;
            }
        }
    }
    handle
}

/// Posts receives at random, and takes `count` messages, which must be the expected ones, in order.
fn receive_all(mut handle: RunnerHandle, line: &Line, count: u64, mut random: Random) -> RunnerHandle {
    let (mut posted, mut taken) = (0, 0);
    while taken < count {
        for _ in 0..1 + random.below(6) {
            if posted < count && posted - taken < BUFFERS as u64 {
                let sges = [Sge { mr: line.buffers[posted as usize % BUFFERS], offset: 0, length: 8 }];
                match handle.post_recv(line.qp, &ReceiveWorkRequest { wr_id: posted, sges: &sges }) {
                    Ok(()) => posted += 1,
                    Err(Error::QueueFull { .. }) => break,
                    Err(error) => panic!("{error}"),
                }
            }
        }
        if posted == taken {
            continue;
        }
        for _ in 0..random.below(5) {
            let Some(delivery) =
                handle.wait(if random.below(2) == 0 { LONG } else { Duration::ZERO }).unwrap()
            else {
                break;
            };
            let wc = completion(delivery);
            assert_eq!((wc.wr_id, wc.status, wc.byte_len), (taken, WcStatus::Success, 8));
            assert_eq!(wc.immediate, Some(taken as u32), "every message once, in order");
            // Its buffer is not posted again before it is checked.
            if random.below(50) == 0 {
                let mr = line.buffers[taken as usize % BUFFERS];
                let bytes = handle.call(move |context| context.bytes(mr).unwrap()[..8].to_vec()).unwrap();
                assert_eq!(bytes, taken.to_le_bytes());
            }
            taken += 1;
            if taken == posted {
                break;
            }
        }
    }
    handle
}

#[test]
fn every_message_arrives_once_through_rings_that_are_often_full() {
    const LINES: usize = 3;
    const COUNT: u64 = 2000;
    let seed = seed();
    for round in 0..4 {
        let mut random = Random::new(seed.wrapping_mul(4).wrapping_add(round));
        let [(a, a_lines), (b, b_lines)] = connected(LINES, boxed);
        let runners = [runner(a, any_idle(&mut random)), runner(b, any_idle(&mut random))];
        thread::scope(|scope| {
            for n in 0..LINES {
                for (end, lines) in [(0, &a_lines), (1, &b_lines)] {
                    let line = &lines[n];
                    let config = HandleConfig::default()
                        .commands(1 + random.below(6) as u32)
                        .deliveries(1 + random.below(6) as u32)
                        .idle(any_idle(&mut random));
                    let mut handle = runners[end].handle(&config).unwrap();
                    let random = Random::new(random.any());
                    scope.spawn(move || {
                        handle.deliver(line.cq).unwrap();
                        // Each end sends on the odd or on the even lines.
                        let mut handle = if n % 2 == end {
                            send_all(handle, line, COUNT, random)
                        } else {
                            receive_all(handle, line, COUNT, random)
                        };
                        assert!(handle.poll().unwrap().is_none(), "nothing came twice");
                    });
                }
            }
        });
        for runner in runners {
            let Stopped { mut context, error, .. } = runner.stop();
            assert!(error.is_none());
            let count = |counter| context.counters().value(counter);
            let (rnr, late) = (count(Counter::RnrNakRetryErr), count(Counter::LocalAckTimeoutErr));
            println!("round {round}: {rnr} RNR NAKs, {late} ACK timeouts");
            for line in a_lines.iter().chain(&b_lines) {
                assert!(!matches!(context.poll_cq(line.cq), Ok(Some(_))), "nothing is left");
            }
        }
    }
}

/// The contents of message `n`.
fn fill(n: u64, bytes: &mut [u8]) {
    bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (n as usize * 31 + i * 7) as u8);
}

#[test]
fn buffers_change_hands_without_a_copy() {
    const COUNT: u64 = 60;
    let [(a, a_lines), (b, b_lines)] = connected(1, boxed);
    let runners = [runner(a, Idle::default()), runner(b, Idle::Block)];
    let config = HandleConfig::default();
    let (mut sender, mut receiver) =
        (runners[0].handle(&config).unwrap(), runners[1].handle(&config).unwrap());
    let (from, to) = (&a_lines[0], &b_lines[0]);
    sender.deliver(from.cq).unwrap();
    receiver.deliver(to.cq).unwrap();
    let mut outgoing = Some(Memory::zeroed(BUFFER).unwrap());
    let mut spare = Some(Memory::zeroed(BUFFER).unwrap());
    let length = BUFFER as u32;
    for n in 0..COUNT {
        let sges = [Sge { mr: to.buffers[0], offset: 0, length }];
        receiver.post_recv(to.qp, &ReceiveWorkRequest { wr_id: n, sges: &sges }).unwrap();
        let mut memory = outgoing.take().unwrap();
        fill(n, memory.bytes_mut().unwrap());
        let address = memory.address();
        sender.exchange(from.buffers[0], memory).unwrap();
        let sges = [Sge { mr: from.buffers[0], offset: 0, length }];
        sender.post_send(from.qp, &send(n, Data::Sges(&sges))).unwrap();
        match sender.wait(LONG).unwrap() {
            Some(Delivery::Exchanged { memory, outcome: Ok(()), .. }) => {
                assert_ne!(memory.address(), address);
                outgoing = Some(memory);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(completion(sender.wait(LONG).unwrap().unwrap()).status, WcStatus::Success);

        assert_eq!(completion(receiver.wait(LONG).unwrap().unwrap()).byte_len, length);
        receiver.exchange(to.buffers[0], spare.take().unwrap()).unwrap();
        let Some(Delivery::Exchanged { memory, outcome: Ok(()), .. }) = receiver.wait(LONG).unwrap() else {
            panic!("no exchange");
        };
        let mut expected = vec![0; BUFFER];
        fill(n, &mut expected);
        assert!(memory.bytes().unwrap() == expected, "message {n}");
        spare = Some(memory);
    }
    // A region in use by a work request, and memory of another size: both return the memory.
    let sges = [Sge { mr: to.buffers[0], offset: 0, length }];
    receiver.post_recv(to.qp, &ReceiveWorkRequest { wr_id: 0, sges: &sges }).unwrap();
    for (mr, memory) in [(to.buffers[0], spare.unwrap()), (to.buffers[1], Memory::zeroed(1).unwrap())] {
        let length = memory.len();
        receiver.exchange(mr, memory).unwrap();
        match receiver.wait(LONG).unwrap() {
            Some(Delivery::Exchanged { mr: of, memory, outcome: Err(error) }) => {
                assert_eq!((of, memory.len()), (mr, length));
                assert!(matches!(*error, Error::Busy { .. } | Error::Invalid { .. }), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn refusals_are_delivered_in_order() {
    let [(a, lines), _b] = connected(1, boxed);
    let runner = runner(a, Idle::Block);
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    let line = &lines[0];
    handle.deliver(line.cq).unwrap();
    // The other end has no runner, so nothing is acknowledged.
    for n in 0..u64::from(DEPTH) + 2 {
        handle.post_send(line.qp, &send(n, Data::Inline(b"x"))).unwrap();
    }
    for n in [DEPTH, DEPTH + 1] {
        match handle.wait(LONG).unwrap() {
            Some(Delivery::Refused { wr_id, error }) => {
                assert_eq!(wr_id, n.into());
                assert!(matches!(*error, Error::QueueFull { queue: "send", .. }), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
    // Work requests that no command can hold are refused immediately.
    let sges = [Sge { mr: line.buffers[0], offset: 0, length: 1 }; RunnerHandle::MAX_SGES + 1];
    let error = handle.post_send(line.qp, &send(0, Data::Sges(&sges))).unwrap_err().to_string();
    assert!(error.contains("at most 4"), "{error}");
    let long = [0; RunnerHandle::MAX_INLINE + 1];
    let error = handle.post_send(line.qp, &send(0, Data::Inline(&long))).unwrap_err().to_string();
    assert!(error.contains("at most 96"), "{error}");
    // Commands stay in order across calls; completions are delivered without a request.
    let qp = line.qp;
    handle.call(move |context| context.modify_qp(qp, Transition::Error)).unwrap().unwrap();
    for n in 0..u64::from(DEPTH) {
        let wc = completion(handle.wait(LONG).unwrap().unwrap());
        assert_eq!((wc.wr_id, wc.status), (n, WcStatus::WrFlushErr));
    }
    // A queue has one handle at a time.
    let mut other = runner.handle(&HandleConfig::default()).unwrap();
    assert!(matches!(other.deliver(line.cq), Err(Error::Busy { .. })));
    drop(handle);
    other.deliver(line.cq).unwrap();
    let (cq, qp) = (line.cq, line.qp);
    other.call(move |context| context.destroy_qp(qp).and_then(|()| context.destroy_cq(cq))).unwrap().unwrap();
    let mut third = runner.handle(&HandleConfig::default()).unwrap();
    drop(other);
    assert!(matches!(third.deliver(cq), Err(Error::InvalidHandle { .. })));
}

#[test]
fn a_call_completes_while_deliveries_are_unread() {
    let [(a, lines), _b] = connected(1, boxed);
    let runner = runner(a, Idle::Block);
    let config = HandleConfig::default().commands(4).deliveries(1).idle(Idle::Block);
    let mut handle = runner.handle(&config).unwrap();
    let line = &lines[0];
    handle.deliver(line.cq).unwrap();
    let bad = [Sge { mr: line.buffers[0], offset: 0, length: 1 }; 4];
    let mut posted = 0;
    // More pieces than the queue pair allows: refused, so the ring fills in both directions.
    for _ in 0..1000 {
        posted +=
            u64::from(handle.post_recv(line.qp, &ReceiveWorkRequest { wr_id: posted, sges: &bad }).is_ok());
        if posted == 6 {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert!(posted >= 5, "the runner takes what it can");
    assert_eq!(handle.call(|context| context.port().gids.len()).unwrap(), 1);
    for n in 0..posted {
        assert!(matches!(handle.wait(LONG).unwrap(), Some(Delivery::Refused { wr_id, .. }) if wr_id == n));
    }
    assert!(handle.poll().unwrap().is_none());
}

#[test]
fn stopping_executes_posted_commands_and_returns_the_context() {
    for idle in IDLES {
        let [(a, lines), (mut b, b_lines)] = connected(1, boxed);
        let runner = runner(a, idle);
        let mut handle = runner.handle(&HandleConfig::default()).unwrap();
        let line = &lines[0];
        for n in 0..5 {
            handle.post_send(line.qp, &send(n, Data::Inline(b"x"))).unwrap();
        }
        let Stopped { context: mut a, error, .. } = runner.stop();
        assert!(error.is_none());
        let told = handle.post_send(line.qp, &send(9, Data::Inline(b"x"))).unwrap_err().to_string();
        assert!(told.contains("it was stopped"), "{told}");
        assert!(matches!(handle.wait(LONG), Err(Error::RunnerEnded { .. })));
        assert!(matches!(handle.call(|_| ()), Err(Error::RunnerEnded { .. })));
        // The completions had no handle before.
        let sges = [Sge { mr: b_lines[0].buffers[0], offset: 0, length: 8 }];
        for wr_id in 0..5 {
            b.post_recv(b_lines[0].qp, &ReceiveWorkRequest { wr_id, sges: &sges }).unwrap();
        }
        let (mut poller, start, mut ended) = (Poller::new(), Instant::now(), 0);
        while ended < 5 && start.elapsed() < LONG {
            poller.poll(&mut a).unwrap();
            b.poll(poller.now()).unwrap();
            ended += u64::from(a.poll_cq(line.cq).unwrap().is_some());
        }
        assert_eq!(ended, 5, "{idle:?}");
    }
}

#[test]
fn the_failure_of_the_port_is_reported_to_every_handle() {
    let (dead, polls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let wrap =
        |port| -> Box<dyn PacketDriver> { Box::new(Mortal::new(port, dead.clone()).counting(polls.clone())) };
    let [(a, _), _b] = connected(1, wrap);
    let runner = runner(a, Idle::Block);
    let config = HandleConfig::default().idle(Idle::Block);
    let mut handles = [(); 2].map(|()| runner.handle(&config).unwrap());
    let mut last = runner.handle(&config).unwrap();
    thread::scope(|scope| {
        for handle in &mut handles {
            scope.spawn(move || {
                let error = handle.wait(LONG).unwrap_err();
                assert!(
                    matches!(error, Error::RunnerEnded { .. }) && error.to_string().contains("it is gone")
                );
            });
        }
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(20));
            dead.store(true, Ordering::Relaxed);
            // It sleeps, so it must be woken before it can notice.
            let error = last.call(|_| ()).and_then(|()| last.call(|_| ())).unwrap_err();
            assert!(error.to_string().contains("mortal0"), "{error}");
        });
    });
    assert!(matches!(runner.handle(&config), Err(Error::RunnerEnded { .. })));
    let error = runner.stop().error.unwrap().to_string();
    assert!(error.contains("it is gone"), "{error}");
}

#[test]
fn a_panic_in_a_call_is_reported_to_every_handle_and_by_stop() {
    let [(a, _), _b] = connected(1, boxed);
    let runner = runner(a, Idle::Block);
    let [mut one, mut two] = [(); 2].map(|()| runner.handle(&HandleConfig::default()).unwrap());
    let error = one.call::<()>(|_| panic!("on purpose")).unwrap_err().to_string();
    assert!(error.contains("panicked"), "{error}");
    assert!(matches!(two.wait(LONG), Err(Error::RunnerEnded { .. })));
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(runner.stop())));
    assert!(stopped.is_err());
}

#[test]
fn a_runner_with_nothing_to_do_does_nothing() {
    for waker in [true, false] {
        let polls = Arc::new(AtomicU64::new(0));
        let wrap = |port| -> Box<dyn PacketDriver> {
            let dead = Arc::default();
            Box::new(Mortal::new(port, dead).counting(polls.clone()).waker(waker))
        };
        let [(a, _), _b] = connected(1, wrap);
        let runner = runner(a, Idle::Block);
        let mut handle = runner.handle(&HandleConfig::default()).unwrap();
        handle.call(|_| ()).unwrap();
        thread::sleep(Duration::from_millis(5));
        let before = polls.load(Ordering::Relaxed);
        thread::sleep(Duration::from_millis(200));
        let turns = polls.load(Ordering::Relaxed) - before;
        // One that can't be woken polls every millisecond.
        assert!(if waker { turns == 0 } else { (1..=200).contains(&turns) }, "{turns} turns, {waker}");
        // And it reacts immediately, or within that time.
        let start = Instant::now();
        handle.call(|_| ()).unwrap();
        assert!(start.elapsed() < LONG);
        drop(runner);
    }
}

#[test]
fn an_invalid_core_or_ring_is_refused() {
    let [(a, _), (b, _)] = connected(1, boxed);
    let config = RunnerConfig::default().core(100_000);
    let Err(error) = Runner::start(a, &config) else { panic!("there is no such core") };
    assert!(error.to_string().starts_with("core = 100000: one that this process may run on: "), "{error}");
    // It is unchanged.
    let mut context = error.into_context();
    assert_eq!(context.poll(Nanos::ZERO).unwrap(), 0);
    assert!(context.alloc_pd().is_ok());
    let runner = Runner::start(b, &RunnerConfig::default().idle(Idle::Block)).unwrap();
    for config in [HandleConfig::default().commands(0), HandleConfig::default().deliveries(1 << 21)] {
        assert!(matches!(runner.handle(&config), Err(Error::Invalid { .. })));
    }
}

/// Its timers continue from the time that a closure passed to the context.
#[test]
fn a_runner_continues_from_the_time_of_a_closure() {
    for ahead in [Duration::ZERO, Duration::from_secs(3600)] {
        let (port, _peer) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        let to = AddressVector::new(Gid::from_ipv4([10, 0, 0, 2].into()), 0);
        let receive = ReadyToReceive::new(to, Qpn::new(99), Psn::new(0));
        context.modify_qp(qp, Transition::ReadyToReceive(receive)).unwrap();
        let send = ReadyToSend::new(Psn::new(0)).timeout(8).retry_count(2);
        context.modify_qp(qp, Transition::ReadyToSend(send)).unwrap();
        let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
        let mut handle = runner.handle(&HandleConfig::default()).unwrap();
        handle.deliver(cq).unwrap();
        handle.call(move |context| context.poll(context.now() + ahead).unwrap()).unwrap();
        let wr = SendWorkRequest {
            wr_id: 1,
            op: SendOp::Send,
            data: Data::Inline(b""),
            flags: SendFlags::SIGNALED,
        };
        handle.post_send(qp, &wr).unwrap();
        let delivery = handle.wait(LONG).unwrap();
        assert!(delivery.is_some(), "ahead by {ahead:?}: nothing");
    }
}
