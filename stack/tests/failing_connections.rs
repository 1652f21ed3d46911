//! The connection manager of a card over a librdmacm whose functions fail one after the other, at each of their calls: an
//! error that names the call, or an event; nothing hangs, nothing is leaked.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};

use ferroce::driver::rnic::{CmFunctions, Verbs};
use ferroce::*;
use ferroce_driver_test_support::rdmacm_stub::{FUNCTIONS, RdmaCmStub};
use ferroce_driver_test_support::rnic_stub::Stub;

/// The Q_Key of rdma_cm's datagram services.
const QKEY: u32 = 0x0123_4567;

fn open(stub: &Stub, cm: &RdmaCmStub) -> Context {
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let functions = CmFunctions::load_from(cm.path()).unwrap();
    let port = RnicPort::open_by(&verbs, "stub0", None, None).unwrap().connections_by(&functions);
    Context::open(port, &Config::default().seed([3; 32])).unwrap()
}

/// The result of a step of the scene that fails.
#[derive(Debug)]
enum End {
    Failed(Error),
    Told(Box<CmEvent>),
    Silent,
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Failed(error)
    }
}

fn event(context: &mut Context, now: &mut u64) -> Result<CmEvent, End> {
    for _ in 0..3000 {
        *now += 1;
        context.poll(Nanos(*now))?;
        if let Some(event) = context.next_cm_event() {
            return Ok(event);
        }
    }
    Err(End::Silent)
}

/// The next event is the expected one.
fn comes(context: &mut Context, now: &mut u64, expected: impl Fn(&CmEvent) -> bool) -> Result<CmEvent, End> {
    let event = event(context, now)?;
    if expected(&event) { Ok(event) } else { Err(End::Told(Box::new(event))) }
}

fn initialized(context: &mut Context, pd: Pd, cq: Cq) -> Result<Qp, End> {
    let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE })?;
    Ok(qp)
}

/// Connects, accepts, finds a datagram service and provides one.
fn scene(context: &mut Context, now: &mut u64) -> Result<(), End> {
    // Listeners of an earlier scene still exist.
    static PORT: AtomicU16 = AtomicU16::new(1000);
    let own = SocketAddr::from(([10, 0, 0, 2], PORT.fetch_add(1, Ordering::Relaxed)));
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    let to = "10.0.0.9:7".parse().unwrap();
    let parameters = ConnectionParameters::default().private_data(b"question").traffic_class(4);

    let qp = initialized(context, pd, cq)?;
    let id = context.connect(qp, to, &parameters)?;
    let established = comes(context, now, |event| matches!(event, CmEvent::Established { .. }))?;
    assert!(
        matches!(established, CmEvent::Established { id: own, private_data } if own == id && private_data.starts_with(b"answer"))
    );
    assert_eq!(context.query_qp(qp)?.state, QpState::Rts);
    context.disconnect(id)?;
    assert_eq!(context.query_qp(qp)?.state, QpState::Error);
    comes(context, now, |event| *event == CmEvent::Disconnected { id })?;
    comes(context, now, |event| *event == CmEvent::TimewaitExit { id })?;
    context.destroy_qp(qp)?;

    let listener = context.listen(PortSpace::Tcp, own, &ListenConfig::default())?;
    let qp = initialized(context, pd, cq)?;
    let CmEvent::ConnectionRequest(request) =
        comes(context, now, |event| matches!(event, CmEvent::ConnectionRequest(_)))?
    else {
        unreachable!("it was looked at")
    };
    assert_eq!((request.listener, request.peer.ip().to_string()), (listener, "10.0.0.9".to_owned()));
    context.accept(request.id, qp, &ConnectionParameters::default())?;
    comes(context, now, |event| matches!(event, CmEvent::Established { .. }))?;
    // The stub's peer does not disconnect: the queue pair's end ends the connection.
    context.destroy_qp(qp)?;
    comes(context, now, |event| matches!(event, CmEvent::Disconnected { .. }))?;
    context.unlisten(listener)?;

    context.resolve(to, &ConnectionParameters::default())?;
    comes(context, now, |event| {
        matches!(event, CmEvent::Resolved { qkey: QKEY, .. } | CmEvent::TimewaitExit { .. })
    })?;
    let listener = context.listen(PortSpace::Udp, own, &ListenConfig::default())?;
    let request = loop {
        match event(context, now)? {
            CmEvent::ConnectionRequest(request) => break request,
            CmEvent::Resolved { .. } | CmEvent::TimewaitExit { .. } => {}
            other => return Err(End::Told(Box::new(other))),
        }
    };
    context.reject(request.id, b"no")?;
    context.unlisten(listener)?;
    while context.next_cm_event().is_some() {}
    context.destroy_cq(cq)?;
    Ok(context.dealloc_pd(pd)?)
}

#[test]
fn each_function_fails_at_each_of_its_calls() {
    let (Some(stub), Some(cm)) = (Stub::build(&["NOTHING_WRONG"]), RdmaCmStub::build()) else { return };
    let mut failures = 0;
    for function in FUNCTIONS {
        let mut failed = 0;
        for nth in 1..100 {
            cm.fail(function, nth);
            let (mut context, mut now) = (open(&stub, &cm), 0);
            let end = scene(&mut context, &mut now);
            cm.fail(function, 0);
            match &end {
                Ok(()) => {}
                Err(End::Failed(error)) => {
                    let told = error.to_string();
                    assert!(
                        told.contains(function) && told.contains(" of stub0"),
                        "{function}, {nth}: {told}"
                    );
                }
                // The failure of a step without a caller is reported by an event, and the reason is logged.
                Err(End::Told(event)) if matches!(**event, CmEvent::Unreachable { .. }) => {}
                Err(other) => panic!("{function}, call {nth}: {other:?}"),
            }
            let is_over = end.is_ok();
            if !is_over {
                failed += 1;
                // The context continues.
                for _ in 0..3000 {
                    now += 1;
                    context.poll(Nanos(now)).unwrap();
                    while context.next_cm_event().is_some() {}
                }
                scene(&mut context, &mut now)
                    .unwrap_or_else(|end| panic!("behind {function}, {nth}: {end:?}"));
            }
            drop(context);
            assert_eq!((cm.live_objects(), stub.live_objects()), (0, 0), "{function}, call {nth}");
            if is_over && nth > failed + 20 {
                break;
            }
        }
        failures += failed;
        // These are only logged, or are not called.
        let is_silent =
            ["rdma_notify", "rdma_ack_cm_event", "rdma_destroy_id", "rdma_reject"].contains(&function);
        assert!(is_silent || failed > 0, "{function}");
    }
    println!("{failures} failures of {} functions", FUNCTIONS.len());
}

#[test]
fn a_missing_library_is_named_by_the_verb_that_needs_it() {
    let missing = CmFunctions::load_from("/nowhere/librdmacm.so.1").unwrap_err().to_string();
    assert!(
        missing.contains("/nowhere/librdmacm.so.1") && missing.contains("connection manager"),
        "{missing}"
    );
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    // A library without the functions: too old, or another one.
    let lacks = CmFunctions::load_from(stub.path()).unwrap_err().to_string();
    assert!(lacks.contains("rdma_create_event_channel") && lacks.contains("rdma-core 33"), "{lacks}");
}
