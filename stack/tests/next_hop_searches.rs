//! Searches for next hops: their waiters, their end, and their cost.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferroce::driver::loopback::{self, Loopback};
use ferroce::driver::{self, NextHop, Wrapper};
use ferroce::*;

const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

/// The driver reports nothing about the hosts of network 11; hosts of network 12 do not answer.
fn unknown(host: u32) -> IpAddr {
    IpAddr::from((0x0b00_0000 + host).to_be_bytes())
}

fn absent(host: u32) -> IpAddr {
    IpAddr::from((0x0c00_0000 + host).to_be_bytes())
}

/// A port that counts how often it is polled for a next hop; for network 12 it reports at the second poll that there is no
/// answer.
struct Counting {
    port: Loopback,
    asked: Arc<AtomicU64>,
    before: Vec<IpAddr>,
}

impl Wrapper for Counting {
    type Inner = Loopback;
    fn inner(&self) -> &Loopback {
        &self.port
    }
    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.port
    }
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, driver::Error> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match peer {
            IpAddr::V4(host) if host.octets()[0] == 11 => Ok(NextHop::Pending),
            IpAddr::V4(host) if host.octets()[0] == 12 => {
                if self.before.contains(&peer) {
                    let (protocol, interface) = ("ARP", "loopback0".to_owned());
                    return Err(driver::Error::NoNeighbour { peer, protocol, interface });
                }
                self.before.push(peer);
                Ok(NextHop::Pending)
            }
            _ => PacketDriver::resolve(&mut self.port, peer),
        }
    }
}

struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
    asked: Arc<AtomicU64>,
    now: Nanos,
    _peer: Loopback,
}

impl End {
    fn new(config: &Config) -> End {
        let (port, peer) = loopback::pair(&[HERE], &[PEER]);
        let asked = Arc::new(AtomicU64::new(0));
        let port = Counting { port, asked: asked.clone(), before: Vec::new() };
        let mut context = Context::open(Box::new(port), config).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        End { context, pd, cq, asked, now: Nanos(1_000_000_000), _peer: peer }
    }

    /// Polls every 10 µs for this time. Returns how often the driver was polled.
    fn run(&mut self, time: Duration) -> u64 {
        let (before, end) = (self.asked.load(Ordering::Relaxed), self.now + time);
        while self.now < end {
            self.now = self.now + Duration::from_micros(10);
            self.context.poll(self.now).unwrap();
        }
        self.asked.load(Ordering::Relaxed) - before
    }

    fn qp(&mut self) -> Qp {
        let qp = self.context.create_qp(&QpConfig::rc(self.pd, self.cq)).unwrap();
        self.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
        qp
    }

    fn ready(&mut self, qp: Qp, peer: IpAddr) {
        self.context.modify_qp(qp, receive_from(peer)).unwrap();
        self.context.modify_qp(qp, Transition::ReadyToSend(ReadyToSend::new(Psn::new(0)))).unwrap();
    }

    fn send(&mut self, qp: Qp) {
        let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
        let wr = SendWorkRequest { wr_id: 1, op, data: Data::Inline(b"x"), flags };
        self.context.post_send(qp, &wr).unwrap();
    }

    fn sent(&self) -> u64 {
        self.context.driver_stats().tx_frames
    }

    fn move_to(&mut self, qp: Qp, peer: IpAddr) {
        self.context.modify_qp(qp, Transition::Drain).unwrap();
        let update = QpUpdate::default().address(to(peer));
        self.context.modify_qp(qp, Transition::Update(update)).unwrap();
        self.context.modify_qp(qp, Transition::Resume).unwrap();
    }
}

fn to(peer: IpAddr) -> AddressVector {
    AddressVector::new(Gid::from(peer), 0)
}

fn receive_from(peer: IpAddr) -> Transition {
    Transition::ReadyToReceive(ReadyToReceive::new(to(peer), Qpn::new(99), Psn::new(0)))
}

const MOMENT: Duration = Duration::from_millis(2);

#[test]
fn a_queue_pair_with_a_new_path_sends_on_it() {
    let mut end = End::new(&Config::default());
    let qp = end.qp();
    end.ready(qp, unknown(1));
    end.send(qp);
    end.run(MOMENT);
    assert_eq!(end.sent(), 0);
    // Another one that is resolved, then one that is known.
    end.move_to(qp, unknown(2));
    end.run(MOMENT);
    assert_eq!(end.sent(), 0);
    end.move_to(qp, PEER);
    end.run(MOMENT);
    assert_eq!(end.sent(), 1);
}

#[test]
fn a_new_path_is_independent_of_the_old_ones_failure() {
    let mut end = End::new(&Config::default());
    let qp = end.qp();
    end.ready(qp, absent(1));
    end.run(MOMENT);
    assert_eq!(end.context.query_qp(qp).unwrap().state, QpState::Error);
    // Its event is not read. No verb on the queue pair fails because of it,
    let blocking = |end: &mut End, transition| {
        end.context.modify_qp_blocking(qp, transition, Duration::from_secs(1)).map_err(|e| e.to_string())
    };
    assert_eq!(blocking(&mut end, Transition::Reset), Ok(()));
    assert_eq!(blocking(&mut end, Transition::Init { access: Access::NONE }), Ok(()));
    assert_eq!(blocking(&mut end, receive_from(PEER)), Ok(()));
    assert_eq!(end.context.next_event_of(qp).unwrap(), None);
    // and another peer's failure has its own reason.
    end.context.modify_qp(qp, Transition::Reset).unwrap();
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    end.ready(qp, absent(2));
    end.run(MOMENT);
    end.context.modify_qp(qp, Transition::Reset).unwrap();
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let error = blocking(&mut end, receive_from(absent(3))).unwrap_err();
    assert!(error.contains("12.0.0.3"), "{error}");
    // A queue pair that enters ERR waits for no search.
    end.context.modify_qp(qp, Transition::Reset).unwrap();
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    end.ready(qp, unknown(1));
    assert_eq!(blocking(&mut end, Transition::Error), Ok(()));
}

/// However many unwanted searches were started, a few polls are enough to remove them.
#[test]
fn a_search_ends_with_its_last_waiter() {
    let mut end = End::new(&Config::default().max_ahs(1));
    let pd = end.pd;
    let none_is_left = |end: &mut End| {
        let asked = end.run(Duration::from_millis(10));
        assert!(asked == 0 && end.context.next_timeout().is_none(), "asked {asked} times for nobody");
    };
    // Address handles.
    for host in 0..10_000 {
        let ah = end.context.create_ah(pd, &to(unknown(host))).unwrap();
        end.context.destroy_ah(ah).unwrap();
    }
    none_is_left(&mut end);
    // Queue pairs that are destroyed, reset, failed, moved on.
    for host in 0..1000 {
        let qp = end.qp();
        end.ready(qp, unknown(host));
        match host % 4 {
            0 => end.context.modify_qp(qp, Transition::Reset).unwrap(),
            1 => end.context.modify_qp(qp, Transition::Error).unwrap(),
            2 => end.move_to(qp, PEER),
            _ => {}
        }
        end.context.destroy_qp(qp).unwrap();
    }
    none_is_left(&mut end);
    // Exchanges.
    for host in 0..1000 {
        let qp = end.qp();
        let peer = SocketAddr::new(unknown(host), 7);
        let id = end.context.connect(qp, peer, &ConnectionParameters::default()).unwrap();
        end.context.disconnect(id).unwrap();
        end.context.destroy_qp(qp).unwrap();
    }
    none_is_left(&mut end);
    // Together with an address handle that does wait.
    let ah = end.context.create_ah(pd, &to(unknown(1))).unwrap();
    let asked = end.run(Duration::from_millis(100));
    assert!((90..=110).contains(&asked), "{asked}");
    end.context.destroy_ah(ah).unwrap();
    none_is_left(&mut end);
}

/// Up to 20 are each polled once per millisecond, more of them every 50 µs in turn.
#[test]
fn searches_are_polled_in_turn() {
    for (sought, expected) in [(1, 1), (20, 20), (1000, 20)] {
        let mut end = End::new(&Config::default().max_ahs(1001));
        let pd = end.pd;
        for host in 0..sought {
            end.context.create_ah(pd, &to(unknown(host))).unwrap();
        }
        let asked = end.run(Duration::from_millis(100)) / 100;
        assert!((expected * 9 / 10..=expected).contains(&asked), "{sought}: {asked} times a millisecond");
        // An available answer is received when its turn comes.
        let ah = end.context.create_ah(pd, &to(absent(1))).unwrap();
        let start = end.now;
        while end.context.next_event_of(ah).unwrap().is_none() {
            end.run(Duration::from_micros(10));
        }
        let turn = (Duration::from_micros(50) * (sought + 1)).max(Duration::from_millis(1));
        let took = end.now.since(start);
        println!("{sought} sought: told after {took:?}");
        assert!(took <= turn + Duration::from_micros(200), "{sought} sought: told after {took:?}");
    }
}

/// A driver that reports nothing for 10 s is given up, by each waiter after its own 10 s. Earlier waiters do not shorten
/// the time of later ones, even without polls in between.
#[test]
fn each_waiter_has_its_whole_time() {
    type Seek = fn(&mut End) -> Box<dyn FnOnce(&mut End)>;
    let by_address_handle: Seek = |end| {
        let ah = end.context.create_ah(end.pd, &to(unknown(1))).unwrap();
        Box::new(move |end| end.context.destroy_ah(ah).unwrap())
    };
    let by_queue_pair: Seek = |end| {
        let qp = end.qp();
        end.ready(qp, unknown(1));
        Box::new(move |end| end.context.modify_qp(qp, Transition::Reset).unwrap())
    };
    let by_connection: Seek = |end| {
        let (qp, peer) = (end.qp(), SocketAddr::new(unknown(1), 7));
        let id = end.context.connect(qp, peer, &ConnectionParameters::default()).unwrap();
        Box::new(move |end| end.context.disconnect(id).unwrap())
    };
    let all = [by_address_handle, by_queue_pair, by_connection];
    let is_told = |end: &mut End| {
        end.context.poll(end.now).unwrap();
        end.context.next_event().is_some() || end.context.next_cm_event().is_some()
    };
    for (first, second) in all.iter().flat_map(|first| all.iter().map(move |second| (first, second))) {
        let mut end = End::new(&Config::default());
        let give_up = first(&mut end);
        assert!(!is_told(&mut end));
        give_up(&mut end);
        // The context has nothing to do meanwhile.
        end.now = end.now + Duration::from_secs(11);
        let _: Box<dyn FnOnce(&mut End)> = second(&mut end);
        for seconds in [0, 5, 4] {
            end.now = end.now + Duration::from_secs(seconds);
            assert!(!is_told(&mut end), "{:?}", end.now);
        }
        end.now = end.now + Duration::from_secs(1);
        assert!(is_told(&mut end));
    }
    // Together with another one that still waits.
    let mut end = End::new(&Config::default());
    let [first, second] = [9, 3].map(|wait| {
        let ah = end.context.create_ah(end.pd, &to(unknown(1))).unwrap();
        assert!(!is_told(&mut end));
        end.now = end.now + Duration::from_secs(wait);
        ah
    });
    let told = |end: &mut End, ah| {
        end.context.poll(end.now).unwrap();
        end.context.next_event_of(ah).unwrap().is_some()
    };
    assert!(told(&mut end, first) && !told(&mut end, second));
    end.now = end.now + Duration::from_secs(8);
    assert!(told(&mut end, second));
}
