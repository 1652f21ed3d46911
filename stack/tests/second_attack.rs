//! What the attack on the mends of issue 13 found: each test is named for the rule that was broken.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferroce::driver::loopback::{self, Loopback};
use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork};
use ferroce::driver::{self, NextHop, Wrapper};
use ferroce::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn host(n: u8) -> IpAddr {
    [192, 0, 2, n].into()
}

/// A port that finds no next hop until it is told to.
struct Silent {
    port: Loopback,
    answers: Arc<AtomicBool>,
}

impl Wrapper for Silent {
    type Inner = Loopback;
    fn inner(&self) -> &Loopback {
        &self.port
    }
    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.port
    }
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, driver::Error> {
        if self.answers.load(Ordering::Relaxed) {
            PacketDriver::resolve(&mut self.port, peer)
        } else {
            Ok(NextHop::Pending)
        }
    }
}

/// Decision 2: a driver that says nothing *for 10 s* is given up. Who begins to wait while a search is there that nobody
/// wants any more, or in a context that was not polled for a while, has no such time: it is told `Silent` by the first poll.
#[test]
fn a_next_hop_is_looked_for_as_long_as_each_who_waits_may_want() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let answers = Arc::new(AtomicBool::new(false));
    let mut context =
        Context::open(Box::new(Silent { port, answers: answers.clone() }), &Config::default()).unwrap();
    let pd = context.alloc_pd().unwrap();
    let to = AddressVector::new(host(2).into(), 0);
    let mut now = Nanos(1_000_000_000);
    let first = context.create_ah(pd, &to).unwrap();
    context.poll(now).unwrap();
    context.destroy_ah(first).unwrap();
    // Nobody waits, and nothing is to be done for the context: its program is elsewhere.
    now = now + Duration::from_secs(11);
    let second = context.create_ah(pd, &to).unwrap();
    context.poll(now).unwrap();
    let event = context.next_event();
    answers.store(true, Ordering::Relaxed);
    for _ in 0..10 {
        now = now + Duration::from_millis(1);
        context.poll(now).unwrap();
    }
    assert_eq!(event, None, "{second:?} waited for no time at all");
}

/// Decision 2: "A Poller, a Runner and a verb that waits catch up with it if it is ahead of theirs". A runner does so only
/// when it starts: a closure that tells its context a later time stops all of its timers.
#[test]
fn a_runner_goes_on_where_a_closure_has_left_the_time() {
    for ahead in [Duration::ZERO, Duration::from_secs(3600)] {
        let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        let to = AddressVector::new(host(2).into(), 0);
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
        let start = Instant::now();
        let delivery = handle.wait(Duration::from_secs(3)).unwrap();
        println!("ahead {ahead:?}: {delivery:?} after {:?}", start.elapsed());
        assert!(delivery.is_some(), "ahead by {ahead:?}: nothing in 3 s");
    }
}

/// `CompChannel`: "a channel without queues is readable, as a pipe without a writer is".
#[test]
fn a_channel_that_never_had_a_queue_is_readable() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let channel = context.create_comp_channel().unwrap();
    let time = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let ready = poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&time)).unwrap();
    assert_eq!(ready, 1, "who waits for the descriptor waits for ever");
}

/// A region that grants REMOTE_WRITE grants ATOMIC WRITE. Words of shared memory must be words of memory (decision 1), so
/// registration or `exchange` refuses what can't be done, by its name; an ATOMIC WRITE that is granted is carried out.
#[test]
fn a_granted_atomic_write_to_shared_memory_is_carried_out_or_refused_at_registration() {
    let (a, b) = loopback::pair(&[host(1)], &[host(2)]);
    let mut ends = [a, b].map(|port| Context::open(Box::new(port), &Config::default()).unwrap());
    let mut clock = Clock::start();
    let pds = ends.each_mut().map(|end| end.alloc_pd().unwrap());
    let cqs = ends.each_mut().map(|end| end.create_cq(16).unwrap());
    let qps = [0, 1].map(|n| ends[n].create_qp(&QpConfig::rc(pds[n], cqs[n])).unwrap());
    let endpoints = [0, 1].map(|n| ends[n].endpoint(qps[n], 0).unwrap());
    for n in [0, 1] {
        ends[n].handshake(qps[n], &endpoints[n], &endpoints[1 - n]).unwrap();
    }
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let memory = Memory::shared(4096).unwrap();
    // Refused with REMOTE_ATOMIC.
    let Ok(mr) = ends[1].register_at(pds[1], memory, access, 0x1001) else { return };
    let remote = ends[1].remote(mr).unwrap();
    let wr = SendWorkRequest {
        wr_id: 1,
        op: SendOp::AtomicWrite(remote.at(7)),
        data: Data::Inline(&[1; 8]),
        flags: SendFlags::SIGNALED,
    };
    ends[0].post_send(qps[0], &wr).unwrap();
    for _ in 0..100_000 {
        for end in &mut ends {
            end.poll(clock.now()).unwrap();
        }
        if let Some(wc) = ends[0].poll_cq(cqs[0]).unwrap() {
            assert_eq!(wc.status, WcStatus::Success);
            return;
        }
    }
    panic!("no completion");
}

/// A configuration that makes no sense is refused by the name of its field, as `SwitchConfig::depth` is.
#[test]
fn a_network_of_too_many_frames_is_refused() {
    for frames in [usize::MAX, 1 << 40] {
        let config = NetworkConfig::default().frames(frames);
        if let Ok(network) = SimNetwork::with_config(1, LinkConfig::default(), config) {
            let _ = network.port(&[host(1)]);
        }
    }
}

/// The same of an attempt to connect: one that its program has ended (as `connect_blocking` does after its timeout) spends
/// the time of the next one, if nobody polls in between. The peer has come up meanwhile; the second look would find it.
#[test]
fn an_attempt_to_connect_does_not_spend_the_time_of_the_next() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let answers = Arc::new(AtomicBool::new(false));
    let mut context =
        Context::open(Box::new(Silent { port, answers: answers.clone() }), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let to = std::net::SocketAddr::new(host(2), 7471);
    let parameters = ConnectionParameters::default();
    let mut clock = Clock::start();
    let refused = context.connect_blocking(qp, to, &parameters, Duration::from_millis(5)).unwrap_err();
    assert!(matches!(refused, Error::TimedOut { .. }), "{refused}");
    // 11 s in which the program does something else; in place of a sleep, a time of its own.
    let later = clock.catch_up_with(context.now()) + Duration::from_secs(11);
    let id = context.connect(qp, to, &parameters).unwrap();
    context.poll(later).unwrap();
    answers.store(true, Ordering::Relaxed);
    context.poll(later + Duration::from_millis(1)).unwrap();
    assert_eq!(context.next_cm_event(), None, "{id:?}");
}

/// `Poller` takes any context, and its time is each context's own: one that is ahead does not take another one along, whose
/// connections and timers would all be over at once.
#[test]
fn a_poller_of_two_contexts_does_not_tell_one_the_time_of_the_other() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let (other, _) = loopback::pair(&[host(3)], &[]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let mut ahead = Context::open(Box::new(other), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let mut poller = Poller::spinning();
    // A patience of minutes, by default.
    let parameters = ConnectionParameters::default();
    context.connect(qp, std::net::SocketAddr::new(host(2), 7471), &parameters).unwrap();
    poller.poll(&mut context).unwrap();
    // An application's own time: since 1970.
    ahead.poll(Nanos(1_700_000_000_000_000_000)).unwrap();
    for _ in 0..100 {
        poller.poll(&mut ahead).unwrap();
        poller.poll(&mut context).unwrap();
    }
    assert_eq!(context.next_cm_event(), None, "of {:?} patience", parameters.patience());
}

/// `handshake`: "Error::State in any other state, or for a UD queue pair".
#[test]
fn a_handshake_of_datagrams_is_refused_by_the_error_that_is_documented() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::ud(pd, cq)).unwrap();
    let local = context.endpoint(qp, 0).unwrap();
    let error = context.handshake(qp, &local, &local).unwrap_err();
    assert!(matches!(error, Error::State { .. }), "{error:?}");
}

/// Who waits by an edge-triggered descriptor (tokio's `AsyncFd`) and takes events until there are none is woken once for
/// what happened, not for ever: when the queues of a channel are gone, each look makes the descriptor ready anew.
#[test]
fn a_channel_whose_queues_are_gone_is_not_a_busy_loop() {
    use rustix::event::epoll;
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let channel = context.create_comp_channel().unwrap();
    context.create_cq_on(16, &channel).unwrap();
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&edges, &channel, epoll::EventData::new_u64(0), flags).unwrap();
    drop(context);
    let (time, mut wakes) = (Timespec { tv_sec: 0, tv_nsec: 50_000_000 }, 0);
    while wakes < 1000 {
        let mut events = Vec::with_capacity(1);
        if epoll::wait(&edges, rustix::buffer::spare_capacity(&mut events), Some(&time)).unwrap() == 0 {
            break;
        }
        while let Some(cq) = channel.get_cq_event() {
            println!("{cq:?}");
        }
        wakes += 1;
    }
    assert!(
        wakes < 10,
        "{wakes} wakes, and `get_cq_event` said None each time, as it does when there is no event"
    );
}

/// `Error`: "A refused verb changes nothing." A handshake that is refused leaves RESET, but INIT it does not leave alone.
#[test]
fn a_handshake_that_is_refused_leaves_init_as_it_was() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    for initialised in [false, true] {
        let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
        if initialised {
            context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        }
        let before = context.query_qp(qp).unwrap().state;
        let local = context.endpoint(qp, 0).unwrap();
        let remote = Endpoint::new(host(2).into(), Qpn::new(99), Psn::new(0)).rd_atomic(129);
        let error = context.handshake(qp, &local, &remote).unwrap_err();
        assert_eq!(context.query_qp(qp).unwrap().state, before, "{error}");
    }
}

/// `CompChannel::get_cq_event`: "The returned queue was armed and has a completion". After the end of a runner it has none.
#[test]
fn an_event_of_a_channel_stands_for_a_completion() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let context = Context::open(Box::new(port), &Config::default()).unwrap();
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handle = runner.handle(&HandleConfig::default()).unwrap();
    let (channel, cq) = handle
        .call(|context| {
            let channel = context.create_comp_channel().unwrap();
            let cq = context.create_cq_on(16, &channel).unwrap();
            context.req_notify_cq(cq, Notify::Next).unwrap();
            (channel, cq)
        })
        .unwrap();
    let mut context = runner.stop().context;
    assert_eq!(channel.get_cq_event(), Some(cq));
    assert!(context.poll_cq(cq).unwrap().is_some(), "an event and no completion");
}

/// `Poller::poll`: "It does not block over a completion or an event that came since the last turn." A loop that takes one
/// completion in each turn, of several that came together, sleeps 2 ms over each of the others.
#[test]
fn a_poller_does_not_sleep_over_completions_that_were_not_taken() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    for wr_id in 0..50 {
        context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
    }
    context.modify_qp(qp, Transition::Error).unwrap();
    let (mut poller, start, mut taken) = (Poller::blocking(), Instant::now(), 0);
    while taken < 50 {
        poller.poll(&mut context).unwrap();
        taken += u32::from(context.poll_cq(cq).unwrap().is_some());
    }
    let passed = start.elapsed();
    assert!(passed < Duration::from_millis(20), "50 completions that were there took {passed:?}");
}

/// `Stopped`: "Completions that found no room in a handle's ring are in their queues"; there is room. What the last commands of
/// a later handle complete for an earlier one is not delivered, and is gone if the runner was dropped.
#[test]
fn the_last_commands_of_one_handle_complete_for_another() {
    let (port, _peer) = loopback::pair(&[host(1)], &[host(2)]);
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    context.modify_qp(qp, Transition::Error).unwrap();
    let runner = Runner::start(context, &RunnerConfig::default()).unwrap();
    let mut handles = [(); 3].map(|()| runner.handle(&HandleConfig::default()).unwrap());
    let [listener, poster, sleeper] = &mut handles;
    listener.deliver(cq).unwrap();
    poster.call(|_| ()).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let busy = move |_: &mut Context| {
                tell.send(()).unwrap();
                std::thread::sleep(Duration::from_millis(200));
            };
            sleeper.call(busy).unwrap();
        });
        told.recv().unwrap();
        poster.post_recv(qp, &ReceiveWorkRequest { wr_id: 7, sges: &[] }).unwrap();
        // Before the closure is over; it returns when the runner has ended.
        drop(runner);
    });
    let delivery = listener.poll();
    assert!(matches!(delivery, Ok(Some(Delivery::Completed { .. }))), "{delivery:?}");
}
