//! Blocking verbs, and a context's time: it advances in them, and in all loops that drive the context after them.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::loopback::{self, Loopback};
use ferroce::*;

const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const LONG: Duration = Duration::from_secs(20);
/// Three times the ACK timer of [`Lonely`], with margin for a busy machine.
const SOON: Duration = Duration::from_millis(300);

/// A queue pair whose peer never answers: its ACK timer is 4.2 ms, with two retries.
struct Lonely {
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    /// The other end of the cable, which is not polled.
    _peer: Loopback,
}

impl Lonely {
    fn new() -> Lonely {
        let (port, peer) = loopback::pair(&[HERE], &[PEER]);
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        let receive = ReadyToReceive::new(AddressVector::new(Gid::from(PEER), 0), Qpn::new(99), Psn::new(0));
        context.modify_qp(qp, Transition::ReadyToReceive(receive)).unwrap();
        let send = ReadyToSend::new(Psn::new(0)).timeout(10).retry_count(2);
        context.modify_qp(qp, Transition::ReadyToSend(send)).unwrap();
        Lonely { context, pd, cq, qp, _peer: peer }
    }

    fn post(&mut self) {
        post(&mut self.context, self.qp);
    }

    /// Connects without an answer: this many tries of 268 ms.
    fn connect(&mut self, tries: u8) -> Result<CmId, Error> {
        let parameters = ConnectionParameters::default().cm_timeout(16).cm_retries(tries - 1);
        let qp = self.context.create_qp(&QpConfig::rc(self.pd, self.cq))?;
        self.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        self.context.connect(qp, SocketAddr::new(PEER, 7), &parameters)
    }

    /// Waits for the end of posted work, with a clock of the application.
    fn ends_by(&mut self, mut poll: impl FnMut(&mut Context)) {
        self.post();
        let start = Instant::now();
        let completion = loop {
            poll(&mut self.context);
            if let Some(completion) = self.context.poll_cq(self.cq).unwrap() {
                break completion;
            }
            assert!(start.elapsed() < LONG, "nothing after {LONG:?}");
        };
        assert_ended_soon(completion.status, start);
    }
}

fn post(context: &mut Context, qp: Qp) {
    let wr =
        SendWorkRequest { wr_id: 1, op: SendOp::Send, data: Data::Inline(b"x"), flags: SendFlags::SIGNALED };
    context.post_send(qp, &wr).unwrap();
}

fn assert_ended_soon(status: WcStatus, start: Instant) {
    let took = start.elapsed();
    println!("{status:?} after {took:?}");
    assert_eq!(status, WcStatus::RetryExcErr);
    assert!(took < SOON, "{took:?}");
}

/// The same with a runner. Returns the context.
fn ends_by_a_runner(context: Context, cq: Cq, qp: Qp) -> Context {
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    handle.deliver(cq).unwrap();
    handle.call(move |context| post(context, qp)).unwrap();
    let start = Instant::now();
    let delivery = handle.wait(LONG).unwrap();
    println!("{delivery:?} after {:?}", start.elapsed());
    assert!(delivery.is_some() && start.elapsed() < SOON, "{delivery:?} after {:?}", start.elapsed());
    drop(handle);
    runner.stop().context
}

#[test]
fn timers_advance_in_short_waits() {
    for slice in [Duration::ZERO, Duration::from_micros(100), Duration::from_millis(2), LONG] {
        let mut end = Lonely::new();
        end.post();
        let start = Instant::now();
        let completion = loop {
            if let Some(completion) = end.context.wait_cq(end.cq, slice).unwrap() {
                break completion;
            }
            assert!(start.elapsed() < LONG, "wait_cq({slice:?}): nothing after {LONG:?}");
        };
        assert_ended_soon(completion.status, start);
    }
    let mut end = Lonely::new();
    let id = end.connect(3).unwrap();
    let start = Instant::now();
    let event = loop {
        if let Some(event) = end.context.wait_cm_event(Duration::from_millis(100)).unwrap() {
            break event;
        }
        assert!(start.elapsed() < LONG, "nothing after {LONG:?}");
    };
    println!("{event:?} after {:?}", start.elapsed());
    assert_eq!(event, CmEvent::Unreachable { id, reason: Unreachable::Silent { peer: PEER } });
    assert!(start.elapsed() < Duration::from_secs(3));
}

/// Time between two waits counts too.
#[test]
fn time_between_waits_counts() {
    let mut end = Lonely::new();
    end.post();
    let start = Instant::now();
    let mut calls = 0;
    while end.context.wait_cq(end.cq, Duration::ZERO).unwrap().is_none() {
        calls += 1;
        thread::sleep(Duration::from_millis(5));
    }
    println!("{calls} calls in {:?}", start.elapsed());
    assert!(calls <= 6, "{calls} calls, 5 ms apart, for three times 4.2 ms");
}

#[test]
fn a_loop_continues_the_time_of_a_blocking_verb() {
    let after_a_wait = || {
        let mut end = Lonely::new();
        end.connect(6).unwrap();
        let waited = Instant::now();
        assert!(end.context.wait_cm_event(LONG).unwrap().is_some());
        assert!(waited.elapsed() > Duration::from_millis(1500));
        end
    };
    let mut poller = Poller::new();
    after_a_wait().ends_by(|context| _ = poller.poll(context).unwrap());
    let mut clock = Clock::start();
    after_a_wait().ends_by(|context| _ = context.poll(clock.now()).unwrap());
    let Lonely { context, cq, qp, _peer, .. } = after_a_wait();
    ends_by_a_runner(context, cq, qp);
}

/// An application's own clock may have any value.
#[test]
fn loops_continue_from_the_applications_time() {
    let hour = Nanos::ZERO + Duration::from_secs(3600);
    let told = || {
        let mut end = Lonely::new();
        end.context.poll(hour).unwrap();
        assert_eq!(end.context.now(), hour);
        end
    };
    let mut poller = Poller::new();
    told().ends_by(|context| _ = poller.poll(context).unwrap());
    let mut end = told();
    let mut clock = Clock::start();
    clock.catch_up_with(end.context.now());
    end.ends_by(|context| _ = context.poll(clock.now()).unwrap());
    let (mut end, start) = (told(), Instant::now());
    end.post();
    assert_ended_soon(end.context.wait_cq(end.cq, LONG).unwrap().unwrap().status, start);
    let Lonely { context, cq, qp, _peer, .. } = told();
    let context = ends_by_a_runner(context, cq, qp);
    assert!(context.now() > hour);
}

#[test]
fn time_never_goes_back() {
    let mut end = Lonely::new();
    for (told, now) in [(5, 5), (3, 5), (5, 5), (6, 6)] {
        end.context.poll(Nanos(told)).unwrap();
        assert_eq!(end.context.now(), Nanos(now));
    }
    // It could not continue from a time that is never reached.
    for late in [Nanos(1 << 63), Nanos::NEVER] {
        let error = end.context.poll(late).unwrap_err();
        assert!(error.to_string().starts_with(&format!("now = {}: below", late.0)), "{error}");
        assert_eq!(end.context.now(), Nanos(6));
    }
    // A loop whose clock is behind does not sleep past a timer.
    end.post();
    end.context.poll(Nanos(1_000_000_000)).unwrap();
    let quiet = end.context.quiet_for(Nanos(0)).unwrap();
    assert!(quiet < Duration::from_millis(10), "{quiet:?}");
}

#[test]
fn a_runner_continues_the_time_of_the_previous_one() {
    let Lonely { context, cq, qp, _peer, .. } = Lonely::new();
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    thread::sleep(Duration::from_secs(1));
    handle.call(|_| ()).unwrap();
    thread::sleep(Duration::from_millis(50));
    drop(handle);
    ends_by_a_runner(runner.stop().context, cq, qp);
}

/// Two loops that alternate do not advance time too far.
#[test]
fn alternating_pollers_have_the_same_time() {
    let mut end = Lonely::new();
    let mut old = Poller::spinning();
    old.poll(&mut end.context).unwrap();
    thread::sleep(Duration::from_millis(100));
    let mut young = Poller::spinning();
    let start = (Instant::now(), old.now());
    for _ in 0..1000 {
        old.poll(&mut end.context).unwrap();
        young.poll(&mut end.context).unwrap();
    }
    let (passed, told) = (start.0.elapsed(), end.context.now().since(start.1));
    assert!(told < passed + Duration::from_millis(5), "{told:?} of {passed:?}");
}

/// A request that is given up immediately must not delay the next one.
#[test]
fn a_thousand_attempts_with_zero_timeout_delay_nothing() {
    let (port, peer) = loopback::pair(&[HERE], &[PEER]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let to = SocketAddr::new(PEER, 7);
    let parameters = ConnectionParameters::default();
    for _ in 0..1000 {
        let outcome = context.connect_blocking(qp, to, &parameters, Duration::ZERO);
        assert!(matches!(outcome, Err(Error::TimedOut { .. })), "{outcome:?}");
        // The same with the nonblocking verb, without a poll in between.
        let id = context.connect(qp, to, &parameters).unwrap();
        context.disconnect(id).unwrap();
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut peer = Context::open(Box::new(peer), &Config::default()).unwrap();
            let (pd, cq) = (peer.alloc_pd().unwrap(), peer.create_cq(16).unwrap());
            peer.listen(PortSpace::Tcp, to, &ListenConfig::default()).unwrap();
            while !stop.load(Ordering::Relaxed) {
                if let Some(CmEvent::ConnectionRequest(request)) =
                    peer.wait_cm_event(Duration::from_millis(10)).unwrap()
                {
                    let qp = peer.create_qp(&QpConfig::rc(pd, cq)).unwrap();
                    peer.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
                    // An attempt that was given up has ended already.
                    _ = peer.accept(request.id, qp, &ConnectionParameters::default());
                }
            }
        });
        thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        let outcome = context.connect_blocking(qp, to, &parameters, LONG);
        stop.store(true, Ordering::Relaxed);
        println!("{:?} after {:?}", outcome.as_ref().map(|(id, _)| id), start.elapsed());
        assert!(outcome.is_ok() && start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    });
}
