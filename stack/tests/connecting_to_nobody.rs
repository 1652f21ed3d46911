//! Connecting to a host that does not exist: the result, its time, and the error; and the blocking verbs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

#[cfg(feature = "af_xdp")]
use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce::driver::loopback;
use ferroce::driver::udp::{Udp, UdpConfig};
use ferroce::*;
#[cfg(feature = "af_xdp")]
use ferroce_driver_test_support::namespaces::{self, Namespaces, VETH};

const PORT: u16 = 7471;
const LONG: Duration = Duration::from_secs(20);

struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
}

impl End {
    fn new(driver: Box<dyn PacketDriver>) -> End {
        let mut context = Context::open(driver, &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        End { context, pd, cq }
    }

    fn qp(&mut self) -> Qp {
        let qp = self.context.create_qp(&QpConfig::rc(self.pd, self.cq)).unwrap();
        self.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        qp
    }

    /// Connects without success, with rdma_cm's defaults (69 s). Returns the error, and the duration.
    fn connect(&mut self, peer: IpAddr) -> (Error, Duration) {
        let (qp, start) = (self.qp(), Instant::now());
        let to = SocketAddr::new(peer, PORT);
        let outcome = self.context.connect_blocking(qp, to, &ConnectionParameters::default(), LONG);
        let (error, took) = (outcome.unwrap_err(), start.elapsed());
        println!("{peer} over {}: after {took:?}: {error}", self.context.capabilities().driver);
        assert!(error.to_string().contains(&peer.to_string()), "{error}");
        assert_eq!(self.context.query_qp(qp).unwrap().state, QpState::Init);
        (error, took)
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn udp(address: IpAddr) -> Box<dyn PacketDriver> {
    Box::new(Udp::open(&UdpConfig::new(address)).unwrap())
}

#[test]
fn a_host_without_roce_refuses_at_once() {
    let mut end = End::new(udp(ip("127.81.0.1")));
    let peer = ip("127.81.0.2");
    let (error, took) = end.connect(peer);
    let reason = Unreachable::Refused { peer, from: peer, reason: RefusalReason::Port };
    assert!(matches!(error, Error::Unreachable(of) if of == reason), "{error:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    // The same for a search for a datagram service; and an event reports it to a program that does not wait.
    let search =
        end.context.resolve_blocking(SocketAddr::new(peer, PORT), &ConnectionParameters::default(), LONG);
    assert!(matches!(search, Err(Error::Unreachable(of)) if of == reason), "{search:?}");
    let qp = end.qp();
    let id = end.context.connect(qp, SocketAddr::new(peer, PORT), &ConnectionParameters::default()).unwrap();
    assert_eq!(end.context.wait_cm_event(LONG).unwrap(), Some(CmEvent::Unreachable { id, reason }));
}

#[cfg(feature = "af_xdp")]
#[test]
fn hosts_that_do_not_exist_and_hosts_that_refuse() {
    let Some(namespaces) = Namespaces::new(1500) else { return };
    namespaces::ip(&format!("-n {} route add prohibit 198.51.100.0/24", namespaces.b));
    namespaces::ip(&format!("-n {} route add 198.51.100.0/24 via 10.9.0.2", namespaces.a));
    namespaces.in_b(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
    let at_once = Duration::from_secs(1);
    for over_udp in [true, false] {
        let open = |own: &str| -> Box<dyn PacketDriver> {
            match over_udp {
                true => udp(ip(own)),
                false => Box::new(AfXdp::open(&AfXdpConfig::new(VETH)).unwrap()),
            }
        };
        let mut end = End::new(namespaces.in_a(|| open("10.9.0.1")));
        let (error, took) = end.connect(ip("192.0.2.1"));
        assert!(
            error.to_string().starts_with("no route to 192.0.2.1") && took < at_once,
            "{error}, {took:?}"
        );
        let (error, took) = end.connect(ip("10.9.0.2"));
        assert_eq!(error.to_string(), "10.9.0.2 has nothing on UDP port 4791 (ICMP port unreachable)");
        assert!(took < at_once, "{took:?}");
        let (error, took) = end.connect(ip("198.51.100.7"));
        let said = "packets to 198.51.100.7 come back: administratively prohibited (ICMP, from 10.9.0.2)";
        assert!(error.to_string() == said && took < at_once, "{error}, {took:?}");
        // The kernel sends three ARP requests, one per second.
        let (error, took) = end.connect(ip("10.9.0.77"));
        assert!(matches!(error, Error::Unreachable(_)) && took < Duration::from_secs(5), "{error}, {took:?}");
        if over_udp {
            drop(end);
            end = End::new(namespaces.in_a(|| open("fd09::1")));
            let (error, took) = end.connect(ip("fd09::2"));
            let said = "fd09::2 has nothing on UDP port 4791 (ICMP port unreachable)";
            assert!(error.to_string() == said && took < at_once, "{error}, {took:?}");
        }
        let (error, took) = end.connect(ip("fd09::77"));
        assert!(matches!(error, Error::Unreachable(_)) && took < Duration::from_secs(5), "{error}, {took:?}");
    }
}

/// A host that drops unwanted packets does not answer, and the application's timeout applies.
#[test]
fn silence_ends_with_the_timeout_and_names_the_peer() {
    let [own, deaf] = [ip("10.0.0.1"), ip("10.0.0.2")];
    let (port, _deaf) = loopback::pair(&[own], &[deaf]);
    let mut end = End::new(Box::new(port));
    let (qp, start, timeout) = (end.qp(), Instant::now(), Duration::from_millis(100));
    let to = SocketAddr::new(deaf, PORT);
    let error = end.context.connect_blocking(qp, to, &ConnectionParameters::default(), timeout).unwrap_err();
    assert_eq!(error.to_string(), "connecting to 10.0.0.2:7471 takes longer than 100ms");
    assert!((timeout..10 * timeout).contains(&start.elapsed()), "{:?}", start.elapsed());
    assert_eq!(end.context.query_qp(qp).unwrap().state, QpState::Init);
    assert_eq!(end.context.wait_cq(end.cq, Duration::from_millis(10)).unwrap(), None);
    let brief = ConnectionParameters::default().cm_timeout(12).cm_retries(1);
    let error = end.context.connect_blocking(qp, to, &brief, LONG).unwrap_err();
    assert_eq!(error.to_string(), "10.0.0.2 does not answer");
}

#[test]
fn two_blocking_ends_connect() {
    let [own, other] = [ip("10.0.0.1"), ip("10.0.0.2")];
    let (a, b) = loopback::pair(&[own], &[other]);
    let (mut a, mut b) = (End::new(Box::new(a)), End::new(Box::new(b)));
    let to = SocketAddr::new(other, PORT);
    let parameters = ConnectionParameters::default();
    b.context.listen(PortSpace::Tcp, to, &ListenConfig::default()).unwrap();
    b.context.listen(PortSpace::Udp, to, &ListenConfig::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let qp = b.qp();
            let Some(CmEvent::ConnectionRequest(request)) = b.context.wait_cm_event(LONG).unwrap() else {
                panic!("no request");
            };
            b.context.post_recv(qp, &ReceiveWorkRequest { wr_id: 5, sges: &[] }).unwrap();
            b.context.accept_blocking(request.id, qp, &parameters, LONG).unwrap();
            let wc = b.context.wait_cq(b.cq, LONG).unwrap().expect("a message");
            assert_eq!((wc.wr_id, wc.status), (5, WcStatus::Success));
            let Some(CmEvent::ConnectionRequest(search)) = b.context.wait_cm_event(LONG).unwrap() else {
                panic!("no search");
            };
            b.context.reject(search.id, &[]).unwrap();
            // Until the other end has disconnected.
            assert!(matches!(b.context.wait_cm_event(LONG).unwrap(), Some(CmEvent::Disconnected { .. })));
        });
        let qp = a.qp();
        let (id, _) = a.context.connect_blocking(qp, to, &parameters, LONG).unwrap();
        let flags = SendFlags::SIGNALED;
        let wr = SendWorkRequest { wr_id: 6, op: SendOp::Send, data: Data::Inline(b""), flags };
        a.context.post_send(qp, &wr).unwrap();
        let wc = a.context.wait_cq(a.cq, LONG).unwrap().expect("a completion");
        assert_eq!((wc.wr_id, wc.status), (6, WcStatus::Success));
        let refused = a.context.resolve_blocking(to, &parameters, LONG).unwrap_err();
        assert!(matches!(refused, Error::Rejected { peer, .. } if peer == to), "{refused}");
        let way = AddressVector::new(Gid::from(other), 0);
        let ah = a.context.create_ah_blocking(a.pd, &way, LONG).unwrap();
        a.context.destroy_ah(ah).unwrap();
        let receive = ReadyToReceive::new(way, Qpn::new(99), Psn::new(0));
        let third = a.qp();
        a.context.modify_qp_blocking(third, Transition::ReadyToReceive(receive), LONG).unwrap();
        a.context.disconnect(id).unwrap();
        let gone = a.context.wait_cm_event(LONG).unwrap();
        assert!(matches!(gone, Some(CmEvent::Disconnected { .. })), "{gone:?}");
    });
}

/// An object that waits for a next hop that is not found reports why, and leaves no state.
#[cfg(feature = "af_xdp")]
#[test]
fn verbs_that_wait_for_a_next_hop_in_vain() {
    let Some(namespaces) = Namespaces::new(1500) else { return };
    let port = namespaces.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH)).unwrap());
    let mut end = End::new(Box::new(port));
    let peer = ip("10.9.0.77");
    let sgid = end.context.port().gid_index_for(Gid::from(peer)).unwrap();
    let way = AddressVector::new(Gid::from(peer), sgid);
    let receive = Transition::ReadyToReceive(ReadyToReceive::new(way, Qpn::new(99), Psn::new(0)));
    let (qp, late) = (end.qp(), end.qp());
    let start = Instant::now();
    let error = end.context.modify_qp_blocking(late, receive, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }) && start.elapsed() < Duration::from_secs(1), "{error}");
    let error = end.context.modify_qp_blocking(qp, receive, LONG).unwrap_err();
    assert_eq!(error.to_string(), "10.9.0.77 does not answer ARP");
    for qp in [qp, late] {
        assert_eq!(end.context.query_qp(qp).unwrap().state, QpState::Error);
    }
    let error = end.context.create_ah_blocking(end.pd, &way, LONG).unwrap_err();
    assert_eq!(error.to_string(), "10.9.0.77 does not answer ARP");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // The event of the queue pair for which no call waited.
    assert!(matches!(end.context.next_event(), Some(Event::QpUnreachable { qp: of, .. }) if of == late));
    assert_eq!(end.context.next_event(), None);
    end.context.dealloc_pd(end.pd).unwrap_err();
}

/// Attempts that were given up do not consume the answer of the next one.
#[test]
fn an_attempt_after_abandoned_ones_is_answered_at_once() {
    let mut end = End::new(udp(ip("127.81.0.3")));
    for peer in ["127.81.0.4", "127.81.0.5"].map(ip) {
        let to = SocketAddr::new(peer, PORT);
        for patience in [Duration::ZERO, Duration::from_nanos(1)] {
            let qp = end.qp();
            let outcome = end.context.connect_blocking(qp, to, &ConnectionParameters::default(), patience);
            println!("{patience:?}: {:?}", outcome.map_err(|error| error.to_string()));
            end.context.destroy_qp(qp).unwrap();
        }
        let (error, took) = end.connect(peer);
        let reason = Unreachable::Refused { peer, from: peer, reason: RefusalReason::Port };
        assert!(matches!(error, Error::Unreachable(of) if of == reason), "{error:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }
}
