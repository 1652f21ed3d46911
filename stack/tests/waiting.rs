//! Waiting from outside: for a context by its file descriptor, for completion queues by that of a channel.
//!
//! `FERROCE_RACES=1000000` sets the number of races; `FERROCE_SEED` replays their delays.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::udp::{Udp, UdpConfig};
use ferroce::driver::{loopback, sim};
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_driver_test_support::waited::Waited;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);

/// Whether `fd` becomes readable within `timeout`.
fn is_readable(fd: &impl AsFd, timeout: Duration) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timespec(timeout))).unwrap() == 1
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}

fn races() -> u64 {
    std::env::var("FERROCE_RACES").ok().map_or(5_000, |races| races.parse().unwrap())
}

/// Delays of up to some microseconds, so that two threads interleave in every way.
struct Delays(Random);

impl Delays {
    fn new(salt: u64) -> Delays {
        let seed = std::env::var("FERROCE_SEED").ok().map_or(7, |seed| seed.parse().unwrap());
        println!("replay: FERROCE_SEED={seed} cargo test -p ferroce --test waiting -- --nocapture");
        Delays(Random::new(seed ^ salt))
    }

    fn spend(&mut self) {
        for _ in 0..self.0.below(2000) {
            std::hint::spin_loop();
        }
    }
}

/// A context with an RC queue pair, and memory.
struct End {
    context: Context,
    cq: Cq,
    qp: Qp,
    clock: Clock,
    /// Waits for the context like an asynchronous runtime: it is ready once for each event of the descriptor.
    edges: OwnedFd,
}

impl End {
    fn new(driver: impl PacketDriver + 'static) -> End {
        let mut context = Context::open(Box::new(driver), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        let edges = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&edges, &context, epoll::EventData::new_u64(0), flags).unwrap();
        End { context, cq, qp, clock: Clock::start(), edges }
    }

    fn connect(&mut self, gid: Gid, qpn: Qpn, timeout: u8) {
        let peer = ReadyToReceive::new(AddressVector::new(gid, 0), qpn, Psn::new(1));
        self.context.modify_qp(self.qp, Transition::Init { access: Access::REMOTE_WRITE }).unwrap();
        self.context.modify_qp(self.qp, Transition::ReadyToReceive(peer)).unwrap();
        let send = ReadyToSend::new(Psn::new(1)).timeout(timeout);
        self.context.modify_qp(self.qp, Transition::ReadyToSend(send)).unwrap();
    }

    fn name(&self) -> (Gid, Qpn) {
        (self.context.port().gids[0].gid, self.context.query_qp(self.qp).unwrap().qpn)
    }

    fn receive(&mut self, wr_id: u64) {
        self.context.post_recv(self.qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
    }

    fn send(&mut self, wr_id: u64) {
        let wr =
            SendWorkRequest { wr_id, op: SendOp::Send, data: Data::Inline(&[]), flags: SendFlags::SIGNALED };
        self.context.post_send(self.qp, &wr).unwrap();
    }

    fn poll(&mut self) -> Option<u64> {
        self.context.poll(self.clock.now()).unwrap();
        let completion = self.context.poll_cq(self.cq).unwrap()?;
        assert_eq!(completion.status, WcStatus::Success);
        Some(completion.wr_id)
    }

    /// Polls until it must wait.
    fn prepare(&mut self) {
        while !self.context.prepare_wait(self.clock.now()).unwrap() {
            assert_eq!(self.poll(), None);
        }
    }

    /// The number of the next completion, waiting by file descriptor.
    fn next(&mut self) -> u64 {
        loop {
            if let Some(wr_id) = self.poll() {
                return wr_id;
            }
            if self.context.prepare_wait(self.clock.now()).unwrap() {
                assert!(self.has_edge(LONG), "nobody woke it");
            }
        }
    }

    fn has_edge(&self, timeout: Duration) -> bool {
        let mut events = Vec::with_capacity(1);
        let room = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(&self.edges, room, Some(&timespec(timeout))).unwrap() == 1
    }
}

fn pair() -> [End; 2] {
    // 4.3 s: a thread may be off its core for long.
    pair_with(20)
}

/// With this ACK timeout.
fn pair_with(timeout: u8) -> [End; 2] {
    let (a, b) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    connected([End::new(a), End::new(b)], timeout)
}

fn connected(mut ends: [End; 2], timeout: u8) -> [End; 2] {
    let names = ends.each_ref().map(End::name);
    for n in 0..2 {
        let (gid, qpn) = names[1 - n];
        ends[n].connect(gid, qpn, timeout);
    }
    ends
}

#[test]
fn the_descriptor_is_readable_from_a_frame_until_the_poll() {
    let [mut a, mut b] = pair();
    b.receive(1);
    b.prepare();
    assert!(!is_readable(&b.context, SHORT));
    a.send(7);
    assert_eq!(a.poll(), None);
    // Level-triggered.
    assert!(is_readable(&b.context, LONG) && is_readable(&b.context, Duration::ZERO));
    assert_eq!(b.poll(), Some(1));
    assert!(!is_readable(&b.context, Duration::ZERO));
    // It owes an ACK, so there is work.
    assert!(!b.context.prepare_wait(b.clock.now()).unwrap());
    b.prepare();
    assert_eq!(a.next(), 7);
}

#[test]
fn a_frame_that_has_arrived_prevents_a_wait() {
    let [mut a, mut b] = pair();
    b.receive(1);
    b.prepare();
    b.poll();
    a.send(7);
    a.poll();
    assert!(!b.context.prepare_wait(b.clock.now()).unwrap());
    assert_eq!(b.next(), 1);
}

#[test]
fn the_waker_makes_it_readable_used_before_or_during_the_wait() {
    let [mut a, _] = pair();
    let waker = a.context.waker().unwrap();
    a.prepare();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SHORT);
            waker.wake_by_ref();
        });
        assert!(is_readable(&a.context, LONG));
    });
    a.poll();
    assert!(!is_readable(&a.context, Duration::ZERO));
    // Used without a wait: the next wait ends first.
    waker.wake_by_ref();
    assert!(!a.context.prepare_wait(a.clock.now()).unwrap());
    a.poll();
    assert!(a.context.prepare_wait(a.clock.now()).unwrap());
    assert!(!is_readable(&a.context, SHORT));
}

#[test]
fn a_timer_of_the_engine_makes_it_readable() {
    let [mut a, _b] = pair_with(14); // 67 ms
    let start = Instant::now();
    // The peer is not polled, so there is no answer.
    a.send(7);
    let mut waits = 0;
    a.poll();
    while a.context.counters().value(Counter::LocalAckTimeoutErr) == 0 {
        if a.context.prepare_wait(a.clock.now()).unwrap() {
            waits += 1;
            assert!(is_readable(&a.context, LONG), "the ACK timer is due");
        }
        a.poll();
    }
    assert!(
        start.elapsed() >= Duration::from_millis(67) && waits < 10,
        "{waits} waits, {:?}",
        start.elapsed()
    );
    assert!(!is_readable(&a.context, Duration::ZERO), "the time that was over is forgotten");
}

/// An edge-triggered wait, as of an asynchronous runtime, gets an edge for each event after `true`.
#[test]
fn each_wake_up_is_an_edge() {
    let [mut a, mut b] = pair();
    for n in 0..100 {
        b.receive(n);
        b.prepare();
        while b.has_edge(Duration::ZERO) {}
        a.send(n);
        while a.poll().is_none() {
            assert!(b.has_edge(LONG), "frame {n} without an edge");
            assert_eq!(b.poll(), Some(n));
            while !b.context.prepare_wait(b.clock.now()).unwrap() {
                b.poll();
            }
        }
    }
}

/// Two threads, each with its context, that wait for each other's messages by file descriptor.
#[test]
fn no_frame_from_another_thread_is_missed() {
    wait_for_each_other(pair());
}

#[test]
fn no_packet_to_a_socket_is_missed() {
    let port = |last| Udp::open(&UdpConfig::new([127, 81, 0, last].into())).unwrap();
    wait_for_each_other(connected([1, 2].map(|last| End::new(port(last))), 20));
}

fn wait_for_each_other([mut a, mut b]: [End; 2]) {
    let (races, start, done) = (races(), Instant::now(), AtomicU64::new(0));
    let run = |end: &mut End, begins: bool| {
        let mut delays = Delays::new(u64::from(begins));
        let (mut sent, mut received, mut acknowledged) = (0, 0, 0);
        end.receive(RECEIVE);
        while received < races || acknowledged < races {
            if sent < received + u64::from(begins) && sent < races {
                delays.spend();
                end.send(sent);
                sent += 1;
            }
            match end.next() {
                RECEIVE => {
                    received += 1;
                    end.receive(RECEIVE);
                }
                wr_id => {
                    assert_eq!(wr_id, acknowledged);
                    acknowledged += 1;
                }
            }
        }
        // The other one may still need its ACK.
        done.fetch_add(1, Ordering::Relaxed);
        while done.load(Ordering::Relaxed) < 2 {
            assert_eq!(end.poll(), None);
        }
    };
    const RECEIVE: u64 = u64::MAX;
    thread::scope(|scope| {
        scope.spawn(|| run(&mut b, false));
        run(&mut a, true);
    });
    println!("{races} messages each way in {:?}", start.elapsed());
}

/// Each use of the waker, at any time, wakes once.
#[test]
fn no_use_of_the_waker_is_missed() {
    let [mut a, _] = pair();
    let (waker, rung, seen) = (a.context.waker().unwrap(), AtomicU64::new(0), AtomicU64::new(0));
    let (races, start) = (races(), Instant::now());
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut delays = Delays::new(3);
            for n in 1..=races {
                while seen.load(Ordering::Acquire) < n - 1 {
                    thread::yield_now();
                }
                delays.spend();
                rung.store(n, Ordering::Release);
                waker.wake_by_ref();
            }
        });
        let mut delays = Delays::new(5);
        for n in 1..=races {
            while rung.load(Ordering::Acquire) < n {
                a.poll();
                delays.spend();
                if rung.load(Ordering::Acquire) < n && a.context.prepare_wait(a.clock.now()).unwrap() {
                    assert!(is_readable(&a.context, LONG), "wake-up {n} is lost");
                }
            }
            seen.store(n, Ordering::Release);
        }
    });
    println!("{races} wake-ups in {:?}", start.elapsed());
}

#[test]
fn a_driver_without_a_descriptor_reports_it() {
    let network = sim::SimNetwork::new(1, sim::LinkConfig::default()).unwrap();
    let mut end = End::new(network.port(&[[10, 0, 0, 1].into()]));
    let error = end.context.prepare_wait(end.clock.now()).unwrap_err();
    assert_eq!(error.to_string(), "the sim driver does not support waiting for it from outside");
}

/// A queue pair without a peer: posted work is flushed immediately.
struct Flushing {
    context: Context,
    pd: Pd,
    channel: CompChannel,
    cq: Cq,
    qp: Qp,
}

impl Flushing {
    fn new() -> Flushing {
        let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[]);
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let (pd, channel) = (context.alloc_pd().unwrap(), context.create_comp_channel().unwrap());
        let (cq, qp) = on_channel(&mut context, pd, &channel);
        Flushing { context, pd, channel, cq, qp }
    }

    fn complete(&mut self, wr_id: u64) {
        self.context.post_recv(self.qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
    }

    fn arm(&mut self, notify: Notify) {
        self.context.req_notify_cq(self.cq, notify).unwrap();
    }

    fn drain(&mut self) -> u64 {
        std::iter::from_fn(|| self.context.poll_cq(self.cq).unwrap()).count() as u64
    }
}

fn on_channel(context: &mut Context, pd: Pd, channel: &CompChannel) -> (Cq, Qp) {
    let cq = context.create_cq_on(64, channel).unwrap();
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    context.modify_qp(qp, Transition::Error).unwrap();
    (cq, qp)
}

#[test]
fn a_channel_wakes_once_for_each_arm() {
    let mut end = Flushing::new();
    // Not armed: no event. Earlier completions raise none after arming either, and are found by polling.
    end.complete(1);
    end.arm(Notify::Next);
    assert!(!is_readable(&end.channel, Duration::ZERO) && end.channel.get_cq_event().unwrap().is_none());
    assert_eq!(end.drain(), 1);
    // Two completions and one event, until it is taken.
    end.complete(2);
    end.complete(3);
    assert!(is_readable(&end.channel, Duration::ZERO) && is_readable(&end.channel, Duration::ZERO));
    assert_eq!(end.channel.get_cq_event().unwrap(), Some(end.cq));
    assert!(!is_readable(&end.channel, Duration::ZERO) && end.channel.get_cq_event().unwrap().is_none());
    assert_eq!(end.drain(), 2);
    // Three arms, three events, though none is taken meanwhile.
    for n in 0..3 {
        end.arm(Notify::Next);
        end.arm(Notify::Next);
        end.complete(n);
    }
    let events = std::iter::from_fn(|| end.channel.get_cq_event().unwrap()).count();
    assert_eq!((events, end.drain()), (3, 3));
    // An error raises an event for solicited arming too. None of this is an event of the context.
    end.arm(Notify::Solicited);
    end.complete(4);
    assert_eq!(end.channel.wait_cq_event(LONG).unwrap(), Some(end.cq));
    let start = Instant::now();
    assert_eq!(end.channel.wait_cq_event(SHORT).unwrap(), None);
    assert!(start.elapsed() >= SHORT);
    assert_eq!(end.context.next_event(), None);
    assert_eq!(end.context.counters().value(Counter::EventCompletion), 5);
}

#[test]
fn the_queues_of_a_channel_take_turns_and_a_destroyed_one_leaves_no_event() {
    let mut end = Flushing::new();
    let (other, other_qp) = on_channel(&mut end.context, end.pd, &end.channel);
    for wr_id in 0..4 {
        end.arm(Notify::Next);
        end.complete(wr_id);
    }
    end.context.req_notify_cq(other, Notify::Next).unwrap();
    end.context.post_recv(other_qp, &ReceiveWorkRequest { wr_id: 9, sges: &[] }).unwrap();
    let channel = end.channel.clone();
    let two = || [(); 2].map(|()| channel.get_cq_event().unwrap());
    let first = two();
    assert!(first.contains(&Some(other)) && first.contains(&Some(end.cq)), "{first:?}");
    // Three events of the first queue are left.
    end.context.destroy_qp(end.qp).unwrap();
    end.context.destroy_cq(end.cq).unwrap();
    assert_eq!(channel.get_cq_event().unwrap(), None);
    assert!(!is_readable(&channel, Duration::ZERO));
    end.context.req_notify_cq(other, Notify::Next).unwrap();
    end.context.post_recv(other_qp, &ReceiveWorkRequest { wr_id: 9, sges: &[] }).unwrap();
    assert_eq!(two(), [Some(other), None]);
}

#[test]
fn an_event_of_a_channel_allocates_nothing() {
    let mut end = Flushing::new();
    let mut round = || {
        end.arm(Notify::Next);
        end.complete(1);
        assert_eq!(end.channel.wait_cq_event(LONG).unwrap(), Some(end.cq));
        assert_eq!(end.drain(), 1);
    };
    round();
    let allocated = allocation_counter::measure(|| (0..100).for_each(|_| round()));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
}

/// A completion posted on another thread wakes the thread that sleeps on the channel, once for each arm.
#[test]
fn no_completion_of_another_thread_is_missed() {
    let Flushing { context, channel, cq, qp, .. } = Flushing::new();
    let runner = Runner::start(context, &RunnerConfig::default().idle(Idle::Block)).unwrap();
    let (races, start, taken) = (races(), Instant::now(), AtomicU64::new(0));
    let config = HandleConfig::default();
    let (mut poster, mut waiter) = (runner.handle(&config).unwrap(), runner.handle(&config).unwrap());
    let mut waits = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut delays = Delays::new(11);
            for wr_id in 0..races {
                while taken.load(Ordering::Acquire) < wr_id {
                    thread::yield_now();
                }
                delays.spend();
                poster.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
            }
        });
        // Armed, and not yet woken for that.
        let mut armed = false;
        for wr_id in 0..races {
            let completion = loop {
                let poll = move |context: &mut Context| {
                    if !armed {
                        context.req_notify_cq(cq, Notify::Next).unwrap();
                    }
                    context.poll_cq(cq).unwrap()
                };
                let found = waiter.call(poll).unwrap();
                armed = true;
                if let Some(completion) = found {
                    break completion;
                }
                let event = channel.wait_cq_event(LONG).unwrap();
                assert_eq!(event, Some(cq), "completion {wr_id} woke nobody");
                (armed, waits) = (false, waits + 1);
            };
            assert_eq!(completion.wr_id, wr_id);
            taken.store(wr_id + 1, Ordering::Release);
        }
    });
    println!("{races} completions, {waits} waits, in {:?}", start.elapsed());
    // While the queue exists.
    let left = std::iter::from_fn(|| channel.get_cq_event().unwrap()).count() as u64;
    let events = runner.stop().context.counters().value(Counter::EventCompletion);
    assert_eq!(events, waits + left, "one event for each arm");
    assert!(left <= 1);
}

/// Events are handled immediately, with or without a frame: a `Poller` does not block first.
#[test]
fn a_poller_does_not_block_over_a_completion_or_an_event() {
    let (port, peer) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let waits = Arc::new(AtomicU64::new(0));
    let (a, b) = (End::new(Waited { port, waits: waits.clone() }), End::new(peer));
    // 1 ms; the peer is not polled.
    let [mut a, _b] = connected([a, b], 8);
    let mut poller = Poller::blocking();
    // Whether the turn that delivered it has blocked.
    let mut blocks_before = |context: &mut Context, comes: &mut dyn FnMut(&mut Context) -> bool| {
        let start = Instant::now();
        while start.elapsed() < LONG {
            let before = waits.load(Ordering::Relaxed);
            poller.poll(context).unwrap();
            if comes(context) {
                return waits.load(Ordering::Relaxed) > before;
            }
        }
        panic!("nothing came");
    };
    a.send(7);
    // Timers: the last retry, and the event of a connection request without an answer.
    let (cq, qp) = (a.cq, a.qp);
    let mut completes = |context: &mut Context| context.poll_cq(cq).unwrap().is_some();
    assert!(!blocks_before(&mut a.context, &mut completes), "over the error of a send");
    a.receive(8);
    assert!(!blocks_before(&mut a.context, &mut completes), "over what a verb has flushed");
    a.context.modify_qp(qp, Transition::Reset).unwrap();
    a.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    // 8 ms and no retry.
    let asked = ConnectionParameters::default().cm_timeout(11).cm_retries(0);
    a.context.connect(qp, "10.0.0.2:7".parse().unwrap(), &asked).unwrap();
    let mut ends = |context: &mut Context| context.next_cm_event().is_some();
    assert!(!blocks_before(&mut a.context, &mut ends), "over the event of a connection");
    // Without events it blocks.
    let before = waits.load(Ordering::Relaxed);
    assert_eq!((0..10).map(|_| poller.poll(&mut a.context).unwrap()).sum::<usize>(), 0);
    assert!(waits.load(Ordering::Relaxed) >= before + 5);
}

/// Types that threads and executors pass to each other.
#[test]
fn threads_can_share_a_channel_and_move_a_handle() {
    fn shared<T: Send + Sync + Clone>() {}
    fn moved<T: Send>(_: T) {}
    shared::<CompChannel>();
    let Flushing { context, .. } = Flushing::new();
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    moved(handle.next());
    moved(handle.call_async(|_| ()));
    moved(handle);
}
