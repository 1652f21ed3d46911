//! The connection manager of a card over a librdmacm that reports impossible events: any event with any number and status,
//! at any time, twice, for no connection, in floods, or none at all.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::SocketAddr;
use std::time::Duration;

use ferroce::driver::rnic::{CmFunctions, Verbs};
use ferroce::*;
use ferroce_driver_test_support::rdmacm_stub::RdmaCmStub;
use ferroce_driver_test_support::rnic_stub::Stub;

const ADDR_RESOLVED: u32 = 0;
const ROUTE_RESOLVED: u32 = 2;
const CONNECT_REQUEST: u32 = 4;
const CONNECT_RESPONSE: u32 = 5;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;
const TIMEWAIT_EXIT: u32 = 15;

/// A context on a card, and its time.
struct Host {
    context: Context,
    now: u64,
    pd: Pd,
    cq: Cq,
}

impl Host {
    fn new(stub: &Stub, cm: &RdmaCmStub) -> Host {
        let verbs = Verbs::load_from(stub.path()).unwrap();
        let functions = CmFunctions::load_from(cm.path()).unwrap();
        let port = RnicPort::open_by(&verbs, "stub0", None, None).unwrap().connections_by(&functions);
        let mut context = Context::open(port, &Config::default().seed([3; 32])).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
        Host { context, now: 0, pd, cq }
    }

    fn qp(&mut self) -> Qp {
        let qp = self.context.create_qp(&QpConfig::rc(self.pd, self.cq)).unwrap();
        self.context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE }).unwrap();
        qp
    }

    /// Polls late enough that events are checked, and takes them.
    fn poll(&mut self) -> Vec<CmEvent> {
        self.now += 2_000_000;
        self.context.poll(Nanos(self.now)).unwrap();
        std::iter::from_fn(|| self.context.next_cm_event()).collect()
    }

    fn asked(&mut self) -> ConnectionRequest {
        let events = self.poll();
        let [CmEvent::ConnectionRequest(request)] = events[..] else { panic!("{events:?}") };
        request
    }

    fn state(&mut self, qp: Qp) -> QpState {
        self.context.query_qp(qp).unwrap().state
    }
}

fn own(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 2], port))
}

fn to() -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 9], 7))
}

const STAGES: [&str; 12] = [
    "FindingAddress",
    "FindingRoute",
    "Asked",
    "Established",
    "Ending",
    "Timewait",
    "Requested",
    "Accepted",
    "EstablishedHere",
    "Search",
    "Searched",
    "Listener",
];

/// Brings a connection to a stage. Returns its ID, its queue pair, and its events. Its identifier is the newest.
fn bring(
    host: &mut Host,
    cm: &RdmaCmStub,
    stage: &str,
    port: u16,
) -> (Option<CmId>, Option<Qp>, Vec<CmEvent>) {
    let place = STAGES.iter().position(|name| *name == stage).unwrap();
    let mut told = Vec::new();
    match place {
        0..=5 => {
            let qp = host.qp();
            let id = host.context.connect(qp, to(), &ConnectionParameters::default()).unwrap();
            for (n, kind) in
                [(1, ADDR_RESOLVED), (2, ROUTE_RESOLVED), (3, CONNECT_RESPONSE), (5, DISCONNECTED)]
            {
                if place >= 4 && n == 5 {
                    host.context.disconnect(id).unwrap();
                }
                if place >= n {
                    cm.raise(0, kind, 0);
                }
                told.extend(host.poll());
            }
            (Some(id), Some(qp), told)
        }
        6..=8 => {
            host.context.listen(PortSpace::Tcp, own(port), &ListenConfig::default()).unwrap();
            let request = host.asked();
            let qp = host.qp();
            if place >= 7 {
                host.context.accept(request.id, qp, &ConnectionParameters::default()).unwrap();
            }
            if place == 8 {
                cm.raise(0, ESTABLISHED, 0);
            }
            told.extend(host.poll());
            (Some(request.id), Some(qp).filter(|_| place >= 7), told)
        }
        9 | 10 => {
            let id = host.context.resolve(to(), &ConnectionParameters::default()).unwrap();
            for kind in [ADDR_RESOLVED, ROUTE_RESOLVED].into_iter().filter(|_| place == 10) {
                cm.raise(0, kind, 0);
                told.extend(host.poll());
            }
            (Some(id), None, told)
        }
        _ => {
            host.context.listen(PortSpace::Tcp, own(port), &ListenConfig::default()).unwrap();
            let request = host.asked();
            host.context.reject(request.id, b"").unwrap();
            (None, None, told)
        }
    }
}

/// Checks that the events of one connection are consistent.
fn check(told: &[CmEvent], id: CmId, state: Option<QpState>, case: &str) {
    let mut stage = 0;
    for event in told {
        assert_eq!(event.id(), id, "{case}: {told:?}");
        // 0: nothing yet; 1: established; 2: disconnected; 3: ended.
        let (from, next) = match event {
            CmEvent::ConnectionRequest(_) => (0..=0, 0),
            CmEvent::Established { .. } => (0..=0, 1),
            CmEvent::Resolved { .. } | CmEvent::Rejected { .. } | CmEvent::Unreachable { .. } => (0..=0, 3),
            CmEvent::Disconnected { .. } => (0..=1, 2),
            CmEvent::TimewaitExit { .. } => (2..=2, 3),
            _ => panic!("{case}: {event:?}"),
        };
        assert!(from.contains(&stage), "{case}: {told:?}");
        stage = next;
    }
    if let Some(state) = state {
        assert_eq!(state == QpState::Rts, stage == 1, "{case}: {state:?}, {told:?}");
    }
}

#[test]
fn any_event_at_any_time_is_handled_consistently() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    let mut port = 1000;
    let mut failures = Vec::new();
    for stage in STAGES {
        for kind in (0..=17).chain([4711, u32::MAX]) {
            // Only listeners receive requests.
            if kind == CONNECT_REQUEST && stage != "Listener" {
                continue;
            }
            for status in [0, -110, 28, i32::MIN, i32::MAX] {
                port += 1;
                cm.silence(true);
                let mut host = Host::new(&stub, &cm);
                let (id, qp, mut told) = bring(&mut host, &cm, stage, port);
                let before = told.len();
                cm.raise(0, kind, status);
                told.extend(host.poll());
                let case = format!("{stage}, event {kind}, status {status}");
                if let Some(id) = id {
                    // If it still exists: another valid event.
                    let is_over = matches!(
                        told.last(),
                        Some(
                            CmEvent::Resolved { .. }
                                | CmEvent::Rejected { .. }
                                | CmEvent::Unreachable { .. }
                                | CmEvent::TimewaitExit { .. }
                        )
                    );
                    let is_there = host.context.disconnect(id).is_ok();
                    if is_over && is_there {
                        failures.push(format!("{case}: {told:?}, and it is there"));
                    }
                }
                let state = qp.map(|qp| host.state(qp));
                if let Some(id) = id {
                    let checked = std::panic::catch_unwind(|| check(&told, id, None, &case));
                    if checked.is_err() {
                        failures.push(format!("{case}: {:?} then {:?}", &told[..before], &told[before..]));
                    }
                    // It has ended by now, for any reason.
                    if state == Some(QpState::Rts) {
                        failures.push(format!("{case}: the queue pair is in RTS"));
                    }
                }
                drop(host);
                assert_eq!((cm.live_objects(), stub.live_objects()), (0, 0), "{case}");
            }
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn a_repeated_event_is_reported_once() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    cm.silence(true);
    let mut host = Host::new(&stub, &cm);
    let qp = host.qp();
    let id = host.context.connect(qp, to(), &ConnectionParameters::default()).unwrap();
    let mut told = Vec::new();
    for kind in [ADDR_RESOLVED, ROUTE_RESOLVED, CONNECT_RESPONSE] {
        cm.raise(0, kind, 0);
        cm.raise(0, kind, 0);
        told.extend(host.poll());
    }
    assert_eq!(host.state(qp), QpState::Rts, "{told:?}");
    cm.raise(0, ESTABLISHED, 0);
    for kind in [DISCONNECTED, TIMEWAIT_EXIT] {
        cm.raise(0, kind, 0);
        if kind == DISCONNECTED {
            cm.raise(0, kind, 0);
        }
        told.extend(host.poll());
    }
    assert!(
        matches!(
            told[..],
            [CmEvent::Established { .. }, CmEvent::Disconnected { .. }, CmEvent::TimewaitExit { .. }]
        ),
        "{told:?}"
    );
    check(&told, id, Some(host.state(qp)), "twice");
}

/// The kernel reports this for a peer that gives up a connection that it has accepted, before it receives that the
/// connection is ready.
#[test]
fn a_connection_that_the_peer_rejects_late_has_ended() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    for stage in ["Established", "EstablishedHere", "Ending"] {
        cm.silence(true);
        let mut host = Host::new(&stub, &cm);
        let (id, qp, mut told) = bring(&mut host, &cm, stage, 2000);
        cm.raise(0, REJECTED, 28);
        told.extend(host.poll());
        assert_eq!(host.state(qp.unwrap()), QpState::Error, "{stage}: {told:?}");
        cm.raise(0, TIMEWAIT_EXIT, 0);
        told.extend(host.poll());
        let id = id.unwrap();
        assert_eq!(
            told[told.len() - 2..],
            [CmEvent::Disconnected { id }, CmEvent::TimewaitExit { id }],
            "{stage}: {told:?}"
        );
    }
}

/// As in software: the peer may already consider it established.
#[test]
fn the_end_of_an_accepted_connection_is_reported() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    cm.silence(true);
    let mut host = Host::new(&stub, &cm);
    let (id, qp, told) = bring(&mut host, &cm, "Accepted", 2000);
    assert_eq!(told, []);
    let id = id.unwrap();
    host.context.disconnect(id).unwrap();
    assert_eq!(host.poll(), [CmEvent::Disconnected { id }]);
    assert_eq!(host.state(qp.unwrap()), QpState::Error);
}

/// A library that fails at every query of an event does not keep attempts from timing out.
#[test]
fn unreadable_events_do_not_block_timeouts() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    cm.silence(true);
    let mut host = Host::new(&stub, &cm);
    let qp = host.qp();
    let patience = ConnectionParameters::default().cm_retries(0);
    let id = host.context.connect(qp, to(), &patience).unwrap();
    let mut told = None;
    for _ in 0..10 {
        host.now += 2_000_000_000;
        cm.fail("rdma_get_cm_event", 1);
        let error = host.context.poll(Nanos(host.now)).unwrap_err().to_string();
        assert!(error.contains("rdma_get_cm_event of stub0"), "{error}");
        told = told.or(host.context.next_cm_event());
    }
    assert!(matches!(told, Some(CmEvent::Unreachable { id: own, .. }) if own == id), "{told:?}");
    cm.fail("no event", 1);
    host.now += 2_000_000;
    let error = host.context.poll(Nanos(host.now)).unwrap_err().to_string();
    assert!(error.contains("rdma_get_cm_event of stub0") && error.contains("null"), "{error}");
    assert_eq!(host.poll(), []);
}

#[test]
fn a_flood_of_events_does_not_block_a_poll() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    cm.silence(true);
    let mut host = Host::new(&stub, &cm);
    let (_, qp, _) = bring(&mut host, &cm, "Established", 0);
    let before = cm.live_objects();
    for n in 0..10_000 {
        // For the connection, and for none.
        cm.raise(if n % 2 == 0 { 0 } else { -1 }, n % 4 * 11, 0);
    }
    let mut most = 0;
    let mut polls = 0;
    while cm.live_objects() > before {
        let left = cm.live_objects();
        assert_eq!(host.poll(), []);
        most = most.max(left - cm.live_objects());
        polls += 1;
        assert!(polls < 1000, "{} events are left", cm.live_objects() - before);
    }
    assert!(most <= 64, "{most} events in one poll");
    assert_eq!(host.state(qp.unwrap()), QpState::Rts);
}

#[test]
fn private_data_is_limited_to_its_maximum() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    for (length, is_null, expected) in [(0, false, 0), (255, false, PrivateData::MAX), (255, true, 0)] {
        cm.private_data(Some(length), is_null);
        cm.silence(true);
        let mut host = Host::new(&stub, &cm);
        let (_, _, told) = bring(&mut host, &cm, "Established", 0);
        assert!(
            matches!(&told[..], [CmEvent::Established { private_data, .. }] if private_data.len() == expected)
        );
        let (id, _, mut told) = bring(&mut host, &cm, "Asked", 0);
        cm.raise(0, REJECTED, 28);
        told.extend(host.poll());
        assert!(
            matches!(&told[..], [CmEvent::Rejected { id: own, private_data, .. }] if Some(*own) == id && private_data.len() == expected),
            "{told:?}"
        );
        host.context.listen(PortSpace::Tcp, own(3000), &ListenConfig::default()).unwrap();
        assert_eq!(host.asked().private_data.len(), expected);
    }
}

#[test]
fn endless_requests_and_a_destroyed_listener_leave_nothing() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    let mut host = Host::new(&stub, &cm);
    cm.silence(true);
    let listener = host.context.listen(PortSpace::Tcp, own(4000), &ListenConfig::default()).unwrap();
    let first = host.asked();
    host.context.reject(first.id, b"").unwrap();
    let idle = cm.live_objects();
    let mut requests = 0;
    for _ in 0..100 {
        let had = cm.live_objects();
        cm.raise(0, CONNECT_REQUEST, 0);
        // The newest is that of the request; the listener is the oldest.
        assert_eq!(cm.live_objects(), had + 2);
        let events = host.poll();
        for event in &events {
            let CmEvent::ConnectionRequest(request) = event else { panic!("{event:?}") };
            requests += 1;
            host.context.reject(request.id, b"full").unwrap();
        }
    }
    assert_eq!((requests, cm.live_objects()), (100, idle));
    // They are not taken: as many as there is room for are kept, and the others are rejected.
    for n in 0..1000 {
        let newer = cm.live_objects() - idle;
        cm.raise(newer, CONNECT_REQUEST, 0);
        host.now += 2_000_000;
        host.context.poll(Nanos(host.now)).unwrap();
        assert!(newer <= 300, "{newer} identifiers after {n} requests");
    }
    let kept = cm.live_objects() - idle;
    assert!(kept > 0);
    // They arrive while the listener is destroyed: some are known, some are not processed yet.
    cm.raise(kept, CONNECT_REQUEST, 0);
    host.context.unlisten(listener).unwrap();
    assert_eq!(host.poll(), []);
    assert_eq!(cm.live_objects(), 1, "the channel alone is left");
}

#[test]
fn peers_that_never_answer_leave_nothing_after_their_timeout() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    cm.silence(true);
    let mut host = Host::new(&stub, &cm);
    let patience = ConnectionParameters::default().cm_retries(1);
    for round in 0..3 {
        let mut ids = Vec::new();
        let mut qps = Vec::new();
        for n in 0..100 {
            let qp = host.qp();
            qps.push(qp);
            ids.push(host.context.connect(qp, to(), &patience).unwrap());
            if n % 3 > 0 {
                cm.raise(0, ADDR_RESOLVED, 0);
                host.poll();
            }
            if n % 3 > 1 {
                cm.raise(0, ROUTE_RESOLVED, 0);
                host.poll();
            }
        }
        if round == 2 {
            // The context is dropped at any moment.
            break;
        }
        host.poll();
        let mut told = Vec::new();
        for _ in 0..100 {
            host.now += u64::try_from(Duration::from_secs(2).as_nanos()).unwrap();
            told.extend(host.poll());
        }
        assert_eq!(told.len(), ids.len());
        assert!(told.iter().all(|event| matches!(event, CmEvent::Unreachable { .. })), "{told:?}");
        assert_eq!(cm.live_objects(), 1, "the channel alone is left");
        for qp in qps {
            assert_eq!(host.state(qp), QpState::Init);
            host.context.destroy_qp(qp).unwrap();
        }
    }
    drop(host);
    assert_eq!((cm.live_objects(), stub.live_objects()), (0, 0));
}

#[test]
fn two_contexts_on_one_card_connect_and_disconnect_repeatedly() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    let mut hosts = [Host::new(&stub, &cm), Host::new(&stub, &cm)];
    for round in 0..10 {
        let mut all = Vec::new();
        for _ in 0..100 {
            for host in &mut hosts {
                let qp = host.qp();
                let id = host.context.connect(qp, to(), &ConnectionParameters::default()).unwrap();
                all.push((qp, id));
            }
        }
        let mut told = [const { Vec::new() }; 2];
        for (host, told) in hosts.iter_mut().zip(&mut told) {
            for _ in 0..20 {
                told.extend(host.poll());
            }
            assert_eq!(told.len(), 100, "round {round}: {told:?}");
        }
        for (n, (qp, id)) in all.into_iter().enumerate() {
            let host = &mut hosts[n % 2];
            assert_eq!(host.state(qp), QpState::Rts);
            if n % 3 == 0 {
                host.context.disconnect(id).unwrap();
            }
            host.context.destroy_qp(qp).unwrap();
        }
        for (host, told) in hosts.iter_mut().zip(&mut told) {
            for _ in 0..20 {
                told.extend(host.poll());
            }
            assert_eq!(told.len(), 300, "round {round}");
        }
        assert_eq!(cm.live_objects(), 2, "round {round}: the channels alone are left");
    }
}
