//! Next hops that take seconds, or are never found: the context continues, and waiters are notified.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferroce::driver::sim::{LinkConfig, SimNetwork, SimPort};
use ferroce::driver::{self, Capabilities, FrameSink, FrameSource, NextHop, Refusal, Stats};
use ferroce::*;
use ferroce_test_support::pair::{self, Pair, QKEY, Setup};

/// How long the driver resolves a next hop.
const SEARCH: Duration = Duration::from_secs(3);
/// It is found after that, though no host answers there.
const SLOW: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3));
/// It is not found after that.
const ABSENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 4));
/// The driver never reports anything about it.
const UNKNOWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));
/// There is no route to it.
const ELSEWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

/// A port whose next hops take [`SEARCH`]: those of the addresses above, or all.
struct Searching {
    port: SimPort,
    all: bool,
    now: Nanos,
    since: HashMap<IpAddr, Nanos>,
}

impl Searching {
    fn wrap(port: SimPort) -> Box<dyn PacketDriver> {
        Box::new(Searching { port, all: false, now: Nanos::ZERO, since: HashMap::new() })
    }

    fn wrap_all(port: SimPort) -> Box<dyn PacketDriver> {
        Box::new(Searching { port, all: true, now: Nanos::ZERO, since: HashMap::new() })
    }
}

impl PacketDriver for Searching {
    fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }
    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        self.now = now;
        self.port.rx_burst(now, sink)
    }
    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        self.port.tx_burst(now, source)
    }
    fn wait(&mut self, timeout: Duration) -> Result<(), driver::Error> {
        self.port.wait(timeout)
    }
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, driver::Error> {
        if !self.all && ![SLOW, ABSENT, UNKNOWN].contains(&peer) {
            return self.port.resolve(peer);
        }
        let since = *self.since.entry(peer).or_insert(self.now);
        if peer == UNKNOWN || self.now < since + SEARCH {
            return Ok(NextHop::Pending);
        }
        self.since.remove(&peer);
        match peer {
            SLOW => Ok(NextHop::Found([2, 0, 0, 0, 0, 0x33])),
            ABSENT => {
                let (protocol, interface) = ("ARP", self.capabilities().interface.clone());
                Err(driver::Error::NoNeighbour { peer, protocol, interface })
            }
            _ => self.port.resolve(peer),
        }
    }
    fn stats(&self) -> Stats {
        self.port.stats()
    }
}

/// A pair on an ideal link, with ports created by `port`.
fn pair(setup: Setup, port: fn(SimPort) -> Box<dyn PacketDriver>) -> Pair {
    Pair::new(1, LinkConfig::default(), Setup { port, ..setup })
}

/// Polls both ends for this time, a millisecond at a time.
fn run(pair: &mut Pair, time: Duration) {
    let end = pair.now + time;
    while pair.now < end {
        pair.now = pair.now + Duration::from_millis(1);
        for end in &mut pair.ends {
            end.context.poll(pair.now).unwrap();
        }
    }
}

fn to(peer: IpAddr) -> AddressVector {
    AddressVector::new(Gid::from(peer), 0)
}

/// A queue pair of the first end, in INIT.
fn another_qp(pair: &mut Pair) -> Qp {
    let end = &mut pair.ends[0];
    let qp = end.context.create_qp(&QpConfig::rc(end.pd, end.cq)).unwrap();
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    qp
}

fn ready_to_send(pair: &mut Pair, qp: Qp, peer: IpAddr) {
    let receive = ReadyToReceive::new(to(peer), Qpn::new(99), Psn::new(0));
    let context = &mut pair.ends[0].context;
    context.modify_qp(qp, Transition::ReadyToReceive(receive)).unwrap();
    context.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(Psn::new(0)))).unwrap();
}

fn send(pair: &mut Pair, qp: Qp, wr_id: u64, op: SendOp) {
    let wr = SendWorkRequest { wr_id, op, data: Data::Inline(b"x"), flags: SendFlags::SIGNALED };
    pair.ends[0].context.post_send(qp, &wr).unwrap();
}

fn completions(pair: &mut Pair, end: usize) -> Vec<(u64, WcStatus)> {
    let end = &mut pair.ends[end];
    std::iter::from_fn(|| end.context.poll_cq(end.cq).unwrap()).map(|wc| (wc.wr_id, wc.status)).collect()
}

fn events(pair: &mut Pair) -> Vec<Event> {
    std::iter::from_fn(|| pair.ends[0].context.next_event()).collect()
}

/// The times, in polls, at which each WRITE of 1,000 queue pairs with one outstanding completes, for 3.5 s, together with
/// the actions of `disturb` after 100 ms; and the longest duration of a poll or a verb.
fn trace(disturb: impl FnOnce(&mut Pair)) -> (Vec<(u32, u64)>, Duration) {
    const QPS: usize = 1000;
    let setup = Setup { qps: QPS, timeout: 18, ..Setup::default() };
    let mut pair = pair(setup, Searching::wrap);
    let RemoteMemory { addr, rkey, .. } = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let post = |end: &mut pair::End, n: u64| {
        let sges = [Sge { mr: end.mr, offset: 0, length: 64 }];
        let op = SendOp::Write(RemoteAddress { addr, rkey });
        let wr = SendWorkRequest { wr_id: n, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
        end.context.post_send(end.qps[n as usize], &wr).unwrap();
    };
    (0..QPS as u64).for_each(|n| post(&mut pair.ends[0], n));
    let (mut trace, mut disturb, mut longest) = (Vec::new(), Some(disturb), Duration::ZERO);
    for poll in 0..3500 {
        let begun = Instant::now();
        if poll == 100 {
            disturb.take().into_iter().for_each(|disturb| disturb(&mut pair));
        }
        run(&mut pair, Duration::from_millis(1));
        longest = longest.max(begun.elapsed());
        let end = &mut pair.ends[0];
        while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
            // Those of `disturb` have other numbers.
            if wc.wr_id < QPS as u64 {
                assert_eq!(wc.status, WcStatus::Success);
                trace.push((poll, wc.wr_id));
                post(end, wc.wr_id);
            }
        }
    }
    (trace, longest)
}

#[test]
fn a_resolve_of_three_seconds_delays_none_of_a_thousand_queue_pairs() {
    let (undisturbed, _) = trace(|_| {});
    let (disturbed, longest) = trace(|pair| {
        let address = SocketAddr::new(ABSENT, 7471);
        let qp = another_qp(pair);
        pair.ends[0].context.connect(qp, address, &ConnectionParameters::default()).unwrap();
        pair.ends[0].context.resolve(address, &ConnectionParameters::default()).unwrap();
        let (pd, way) = (pair.ends[0].pd, to(SLOW));
        pair.ends[0].context.create_ah(pd, &way).unwrap();
        for n in 0..8 {
            let qp = another_qp(pair);
            ready_to_send(pair, qp, if n % 2 == 0 { SLOW } else { ABSENT });
            send(pair, qp, 10_000 + n, SendOp::Send);
        }
    });
    // During the search there is no difference; packets sent after it have places in the bursts too.
    let until = |poll| move |(at, _): &&(u32, u64)| *at < poll;
    let searching = undisturbed.iter().take_while(until(3000)).count();
    assert_eq!(undisturbed[..searching], disturbed[..searching]);
    let late = undisturbed.iter().zip(&disturbed).map(|(a, b)| (b.0 - a.0, a.1 == b.1));
    let (latest, same) = late.fold((0, true), |(most, all), (late, same)| (most.max(late), all && same));
    println!(
        "{} completions of 1,000 queue pairs in 3,500 polls, {} beside resolves of 3 s: the first {searching}, until \
         they end, in the same polls, the latest of all {latest} polls later, {} order; the longest poll with its \
         verbs took {longest:?}",
        undisturbed.len(),
        disturbed.len(),
        if same { "in the same" } else { "in another" },
    );
    assert!(searching > 100_000 && undisturbed.len() - disturbed.len() < 64, "{searching}");
    assert!(latest <= 1 && same, "{latest} polls later");
    assert!(longest < Duration::from_secs(1), "a verb has blocked: {longest:?}");
}

/// RTR and RTS are reached meanwhile, requests are received, and owed and posted packets are sent with the next hop.
#[test]
fn a_queue_pair_sends_when_its_next_hop_is_found() {
    let mut pair = pair(Setup::default(), Searching::wrap_all);
    let state = pair.ends[0].context.query_qp(pair.ends[0].qp).unwrap().state;
    assert_eq!(state, QpState::Rts);
    for end in 0..2 {
        pair.ends[end].post_recv(100, 0, 64);
        pair.ends[end].post_send(7, SendOp::Send, 64, 64);
    }
    run(&mut pair, Duration::from_millis(2900));
    assert_eq!([0, 1].map(|end| pair.ends[end].context.driver_stats().tx_frames), [0, 0]);
    // No timeout has occurred, because nothing was sent yet.
    assert_eq!(pair.ends[0].context.counters().value(Counter::LocalAckTimeoutErr), 0);
    run(&mut pair, Duration::from_millis(200));
    for end in 0..2 {
        let mut ended = completions(&mut pair, end);
        ended.sort_unstable_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(ended, [(7, WcStatus::Success), (100, WcStatus::Success)]);
    }
    assert_eq!(pair.ends[0].context.counters().value(Counter::LocalAckTimeoutErr), 0);
    assert_eq!(events(&mut pair), []);
}

#[test]
fn a_queue_pair_without_a_next_hop_fails_with_the_reason() {
    let mut pair = pair(Setup::default(), Searching::wrap);
    let [qp, silent] = [(); 2].map(|()| another_qp(&mut pair));
    ready_to_send(&mut pair, qp, ABSENT);
    send(&mut pair, qp, 1, SendOp::Send);
    send(&mut pair, qp, 2, SendOp::Send);
    ready_to_send(&mut pair, silent, UNKNOWN);
    run(&mut pair, Duration::from_millis(2900));
    assert_eq!(pair.ends[0].context.query_qp(qp).unwrap().state, QpState::Rts);
    // A loop that sleeps while nothing happens polls again in time.
    let quiet = pair.ends[0].context.quiet_for(pair.now).unwrap();
    assert!(quiet <= Duration::from_millis(1), "{quiet:?}");
    run(&mut pair, Duration::from_millis(200));
    assert_eq!(completions(&mut pair, 0), [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(pair.ends[0].context.query_qp(qp).unwrap().state, QpState::Error);
    let reason = Unreachable::NoNeighbour { peer: ABSENT, next_hop: ABSENT };
    assert_eq!(events(&mut pair), [Event::QpUnreachable { qp, reason }]);
    assert_eq!(reason.to_string(), "10.0.0.4 does not answer ARP");
    // A next hop about which the driver reports nothing is given up after 10 s.
    run(&mut pair, Duration::from_secs(8));
    let reason = Unreachable::Silent { peer: UNKNOWN };
    assert_eq!(events(&mut pair), [Event::QpUnreachable { qp: silent, reason }]);
    // No search is left, and no deadline.
    assert_eq!(pair.ends[0].context.next_timeout(), None);
}

/// A search that ends after its queue pair has been reset does not affect it.
#[test]
fn a_queue_pair_that_is_reset_waits_for_nothing() {
    let mut pair = pair(Setup::default(), Searching::wrap);
    let qp = another_qp(&mut pair);
    ready_to_send(&mut pair, qp, ABSENT);
    send(&mut pair, qp, 1, SendOp::Send);
    run(&mut pair, Duration::from_millis(10));
    let context = &mut pair.ends[0].context;
    context.modify_qp(qp, Transition::Reset).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    ready_to_send(&mut pair, qp, IpAddr::from([10, 0, 0, 2]));
    send(&mut pair, qp, 2, SendOp::Send);
    let before = pair.ends[0].context.driver_stats().tx_frames;
    run(&mut pair, Duration::from_millis(1));
    assert_eq!(pair.ends[0].context.driver_stats().tx_frames, before + 1);
    let destroyed = another_qp(&mut pair);
    ready_to_send(&mut pair, destroyed, ABSENT);
    send(&mut pair, destroyed, 3, SendOp::Send);
    run(&mut pair, Duration::from_millis(10));
    pair.ends[0].context.destroy_qp(destroyed).unwrap();
    run(&mut pair, Duration::from_secs(4));
    assert_eq!(events(&mut pair), []);
}

#[test]
fn a_datagram_waits_for_its_address_handle() {
    let setup = Setup { qp_type: QpType::Ud, ..Setup::default() };
    let mut pair = pair(setup, Searching::wrap);
    let (pd, qp, near) = (pair.ends[0].pd, pair.ends[0].qp, pair.ends[0].destination.unwrap());
    let [slow, absent, destroyed] =
        [SLOW, ABSENT, ABSENT].map(|peer| pair.ends[0].context.create_ah(pd, &to(peer)).unwrap());
    let to = |ah| SendOp::SendTo(Destination { ah, qpn: Qpn::new(99), qkey: QKEY });
    send(&mut pair, qp, 1, SendOp::SendTo(near));
    send(&mut pair, qp, 2, to(slow));
    send(&mut pair, qp, 3, SendOp::SendTo(near));
    run(&mut pair, Duration::from_millis(2900));
    assert_eq!(completions(&mut pair, 0), [(1, WcStatus::Success)]);
    run(&mut pair, Duration::from_millis(200));
    assert_eq!(completions(&mut pair, 0), [(2, WcStatus::Success), (3, WcStatus::Success)]);
    let reason = Unreachable::NoNeighbour { peer: ABSENT, next_hop: ABSENT };
    let told = [absent, destroyed].map(|ah| Event::AhUnreachable { ah, reason });
    assert_eq!(events(&mut pair), told);
    // Datagrams posted with it complete at once, as any that can't be sent: the queue pair is in SQE.
    send(&mut pair, qp, 4, to(absent));
    send(&mut pair, qp, 5, SendOp::SendTo(near));
    run(&mut pair, Duration::from_millis(1));
    assert_eq!(completions(&mut pair, 0), [(4, WcStatus::RetryExcErr), (5, WcStatus::WrFlushErr)]);
    pair.ends[0].context.modify_qp(qp, Transition::Resume).unwrap();
    send(&mut pair, qp, 6, SendOp::SendTo(near));
    run(&mut pair, Duration::from_millis(1));
    assert_eq!(completions(&mut pair, 0), [(6, WcStatus::Success)]);
}

/// Datagrams that wait for it do not wait forever.
#[test]
fn a_destroyed_address_handle_delays_nothing() {
    let setup = Setup { qp_type: QpType::Ud, ..Setup::default() };
    let mut pair = pair(setup, Searching::wrap);
    let (pd, qp) = (pair.ends[0].pd, pair.ends[0].qp);
    let ah = pair.ends[0].context.create_ah(pd, &to(SLOW)).unwrap();
    send(&mut pair, qp, 1, SendOp::SendTo(Destination { ah, qpn: Qpn::new(99), qkey: QKEY }));
    run(&mut pair, Duration::from_millis(10));
    pair.ends[0].context.destroy_ah(ah).unwrap();
    run(&mut pair, Duration::from_millis(1));
    assert_eq!(completions(&mut pair, 0), [(1, WcStatus::LocQpOpErr)]);
}

#[test]
fn a_connection_is_requested_when_the_next_hop_is_found() {
    let mut pair = pair(Setup::default(), Searching::wrap_all);
    let listen = SocketAddr::from(([10, 0, 0, 2], 7471));
    pair.ends[1].context.listen(PortSpace::Tcp, listen, &ListenConfig::default()).unwrap();
    let parameters = ConnectionParameters::default();
    let qp = another_qp(&mut pair);
    let id = pair.ends[0].context.connect(qp, listen, &parameters).unwrap();
    run(&mut pair, Duration::from_millis(2900));
    assert_eq!(pair.ends[1].context.next_cm_event(), None);
    run(&mut pair, Duration::from_millis(200));
    let Some(CmEvent::ConnectionRequest(request)) = pair.ends[1].context.next_cm_event() else {
        panic!("no request");
    };
    // The answer is sent back to the source, without a search.
    let end = &mut pair.ends[1];
    let accepting = end.context.create_qp(&QpConfig::rc(end.pd, end.cq)).unwrap();
    end.context.modify_qp(accepting, Transition::Init { access: Access::NONE }).unwrap();
    end.context.accept(request.id, accepting, &parameters).unwrap();
    run(&mut pair, Duration::from_millis(5));
    let event = pair.ends[0].context.next_cm_event();
    assert!(matches!(event, Some(CmEvent::Established { id: of, .. }) if of == id), "{event:?}");
    assert!(matches!(pair.ends[1].context.next_cm_event(), Some(CmEvent::Established { .. })));
    send(&mut pair, qp, 1, SendOp::Send);
    run(&mut pair, Duration::from_millis(5));
    assert!(pair.ends[1].context.query_qp(accepting).unwrap().state == QpState::Rts);
}

#[test]
fn connecting_without_a_next_hop_ends_with_the_reason() {
    let mut pair = pair(Setup::default(), Searching::wrap);
    let parameters = ConnectionParameters::default();
    let qp = another_qp(&mut pair);
    let id = pair.ends[0].context.connect(qp, SocketAddr::new(ABSENT, 7471), &parameters).unwrap();
    let search = pair.ends[0].context.resolve(SocketAddr::new(ABSENT, 7471), &parameters).unwrap();
    // One that is ended before has no event.
    let other = another_qp(&mut pair);
    let ended = pair.ends[0].context.connect(other, SocketAddr::new(ABSENT, 7471), &parameters).unwrap();
    run(&mut pair, Duration::from_millis(10));
    pair.ends[0].context.disconnect(ended).unwrap();
    run(&mut pair, Duration::from_millis(3100));
    let reason = Unreachable::NoNeighbour { peer: ABSENT, next_hop: ABSENT };
    let told: Vec<_> = std::iter::from_fn(|| pair.ends[0].context.next_cm_event()).collect();
    assert_eq!(told, [id, search].map(|id| CmEvent::Unreachable { id, reason }));
    // Its queue pair can be connected elsewhere.
    assert_eq!(pair.ends[0].context.query_qp(qp).unwrap().state, QpState::Init);
    let no_route = pair.ends[0].context.connect(qp, SocketAddr::new(ELSEWHERE, 7471), &parameters);
    assert_eq!(no_route.unwrap_err().to_string(), "no route to 192.0.2.1 from 'sim0'");
}

/// A port that can be passed ICMP errors.
struct Told {
    port: SimPort,
    words: Arc<Mutex<Vec<Refusal>>>,
}

impl PacketDriver for Told {
    fn capabilities(&self) -> &Capabilities {
        self.port.capabilities()
    }
    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        self.port.rx_burst(now, sink)
    }
    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        self.port.tx_burst(now, source)
    }
    fn wait(&mut self, timeout: Duration) -> Result<(), driver::Error> {
        self.port.wait(timeout)
    }
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, driver::Error> {
        self.port.resolve(peer)
    }
    fn next_refusal(&mut self) -> Option<Refusal> {
        self.words.lock().unwrap().pop()
    }
    fn stats(&self) -> Stats {
        self.port.stats()
    }
}

/// Anybody can send an ICMP message. Only one that quotes the request ends the attempt, and a host that has not seen the
/// request can't quote it.
#[test]
fn a_forged_refusal_ends_nothing() {
    let network = SimNetwork::new(1, LinkConfig::default()).unwrap();
    let [own, peer] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
    let (port, mut far) = (network.port(&[own]), network.port(&[peer]));
    let words = Arc::new(Mutex::new(Vec::new()));
    let mut context =
        Context::open(Box::new(Told { port, words: words.clone() }), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let id = context.connect(qp, SocketAddr::new(peer, 7471), &ConnectionParameters::default()).unwrap();
    context.poll(Nanos(1)).unwrap();
    let mut request = Vec::new();
    far.rx_burst(Nanos(2), &mut |frame: &[u8]| request = frame.to_vec()).unwrap();
    // After the headers of Ethernet, IPv4 and UDP.
    let quoted: [u8; Refusal::QUOTED] = *request[14 + 20 + 8..].first_chunk().unwrap();
    let reason = RefusalReason::Port;
    let refusal = Refusal { peer, from: peer, reason, quoted };
    let mut forged =
        vec![Refusal { quoted: [0; Refusal::QUOTED], ..refusal }, Refusal { peer: own, ..refusal }];
    // The transaction ID and the communication ID.
    for at in (28..36).chain(44..48) {
        let mut quoted = quoted;
        quoted[at] ^= 1;
        forged.push(Refusal { quoted, ..refusal });
    }
    words.lock().unwrap().extend(forged);
    context.poll(Nanos(3)).unwrap();
    assert_eq!((context.next_cm_event(), words.lock().unwrap().len()), (None, 0));
    words.lock().unwrap().push(refusal);
    context.poll(Nanos(4)).unwrap();
    let reason = Unreachable::Refused { peer, from: peer, reason };
    assert_eq!(context.next_cm_event(), Some(CmEvent::Unreachable { id, reason }));
    // A repetition changes nothing.
    words.lock().unwrap().push(refusal);
    context.poll(Nanos(5)).unwrap();
    assert_eq!(context.next_cm_event(), None);
}
