//! Two libraries on one context: each takes the events of its own objects, and unread events of one don't affect the other.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::SocketAddr;

use ferroce::driver::loopback;
use ferroce::*;

fn open(port: loopback::Loopback, max_connections: u32) -> Context {
    Context::open(Box::new(port), &Config::default().max_connections(max_connections)).unwrap()
}

fn alone() -> Context {
    open(loopback::pair(&[[10, 0, 0, 1].into()], &[]).0, 4)
}

/// A queue pair in INIT.
fn queue_pair(context: &mut Context, pd: Pd, cq: Cq) -> Qp {
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    qp
}

/// Flushes this many receives, of which the completion queue holds fewer: the queue pair fails without a completion there.
fn overflow(context: &mut Context, qp: Qp, receives: u64) {
    for wr_id in 0..receives {
        context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] }).unwrap();
    }
    context.modify_qp(qp, Transition::Error).unwrap();
}

#[test]
fn each_library_takes_the_events_of_its_own_objects() {
    let mut context = alone();
    let pd = context.alloc_pd().unwrap();
    let mut library = || {
        let cq = context.create_cq(1).unwrap();
        context.req_notify_cq(cq, Notify::Next).unwrap();
        let srq = context.create_srq(&SrqConfig::new(pd).max_wr(4).max_sge(1)).unwrap();
        (cq, queue_pair(&mut context, pd, cq), srq)
    };
    let libraries = [library(), library()];
    for (_, qp, srq) in libraries {
        overflow(&mut context, qp, 2);
        context.arm_srq(srq, 1).unwrap();
    }
    let [mine, theirs] = libraries;
    for (cq, _, srq) in [theirs, mine] {
        assert_eq!(context.next_event_of(cq).unwrap(), Some(Event::Completion(cq)));
        assert_eq!(context.next_event_of(cq).unwrap(), Some(Event::CqErr(cq)));
        assert_eq!(context.next_event_of(cq).unwrap(), None);
        assert_eq!(context.next_event_of(srq).unwrap(), Some(Event::SrqLimitReached(srq)));
    }
    assert_eq!((context.next_event_of(EventSource::Port).unwrap(), context.next_event()), (None, None));
}

/// The queue used to be bounded, and events without room were dropped: a library that did not read lost the other's events.
#[test]
fn a_library_that_does_not_read_does_not_affect_the_other() {
    let mut context = alone();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(4).unwrap());
    let silent = context.create_srq(&SrqConfig::new(pd).max_wr(4).max_sge(1)).unwrap();
    let srq = context.create_srq(&SrqConfig::new(pd).max_wr(4).max_sge(1)).unwrap();
    let allocated = allocation_counter::measure(|| {
        for _ in 0..10_000 {
            context.arm_srq(silent, 1).unwrap();
        }
        for _ in 0..10_000 {
            context.arm_srq(srq, 1).unwrap();
            assert_eq!(context.next_event_of(srq).unwrap(), Some(Event::SrqLimitReached(srq)));
        }
    });
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    assert_eq!(context.counters().value(Counter::EventSrqLimitReached), 20_000);
    // The same event is reported once, until it is read.
    assert_eq!(context.next_event_of(silent).unwrap(), Some(Event::SrqLimitReached(silent)));
    assert_eq!(context.next_event_of(silent).unwrap(), None);
    // The events of a destroyed object are removed.
    context.arm_srq(silent, 1).unwrap();
    context.destroy_srq(silent).unwrap();
    assert!(matches!(context.next_event_of(silent), Err(Error::InvalidHandle { .. })));
    assert_eq!(context.next_event(), None);
    context.destroy_cq(cq).unwrap();
    assert!(matches!(context.next_event_of(cq), Err(Error::InvalidHandle { .. })));
}

/// A client whose connections are accepted by two listeners of a server, one with a channel and one without.
struct Two {
    client: Context,
    server: Context,
    channel: CmChannel,
    clock: Clock,
}

const PORTS: [u16; 2] = [7471, 7472];

impl Two {
    fn new(max_connections: u32) -> Two {
        let (a, b) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
        let [client, mut server] = [open(a, max_connections), open(b, max_connections)];
        let channel = server.create_cm_channel().unwrap();
        for (port, channel) in PORTS.into_iter().zip([Some(channel), None]) {
            let address = SocketAddr::from(([0, 0, 0, 0], port));
            let config = ListenConfig::default().channel(channel);
            server.listen(PortSpace::Tcp, address, &config).unwrap();
        }
        Two { client, server, channel, clock: Clock::start() }
    }

    fn connect(&mut self, port: u16, channel: Option<CmChannel>) -> Result<CmId, Error> {
        let (pd, cq) = (self.client.alloc_pd().unwrap(), self.client.create_cq(4).unwrap());
        let qp = queue_pair(&mut self.client, pd, cq);
        let parameters = ConnectionParameters::default().channel(channel);
        self.client.connect(qp, SocketAddr::from(([10, 0, 0, 2], port)), &parameters)
    }

    fn run(&mut self) {
        for _ in 0..20 {
            self.client.poll(self.clock.now()).unwrap();
            self.server.poll(self.clock.now()).unwrap();
        }
    }

    fn accept(&mut self, id: CmId, channel: Option<CmChannel>) {
        let (pd, cq) = (self.server.alloc_pd().unwrap(), self.server.create_cq(4).unwrap());
        let qp = queue_pair(&mut self.server, pd, cq);
        let parameters = ConnectionParameters::default().channel(channel);
        self.server.accept(id, qp, &parameters).unwrap();
    }
}

fn request(event: Option<CmEvent>) -> CmId {
    match event {
        Some(CmEvent::ConnectionRequest(request)) => request.id,
        other => panic!("{other:?}"),
    }
}

fn established(event: Option<CmEvent>, id: CmId) {
    assert!(matches!(event, Some(CmEvent::Established { id: told, .. }) if told == id), "{event:?}");
}

#[test]
fn connection_events_reach_their_channel() {
    let mut two = Two::new(8);
    let own = two.client.create_cm_channel().unwrap();
    let (a, b) = (two.connect(PORTS[0], Some(own)).unwrap(), two.connect(PORTS[1], None).unwrap());
    two.run();
    let [first, second] =
        [request(two.server.next_cm_event_of(two.channel).unwrap()), request(two.server.next_cm_event())];
    assert_eq!((two.server.next_cm_event_of(two.channel).unwrap(), two.server.next_cm_event()), (None, None));
    // A request's connection stays in the listener's channel, or is moved to another one.
    two.accept(first, None);
    two.accept(second, Some(two.channel));
    two.run();
    for id in [first, second] {
        established(two.server.next_cm_event_of(two.channel).unwrap(), id);
    }
    assert_eq!(two.server.next_cm_event(), None);
    established(two.client.next_cm_event_of(own).unwrap(), a);
    established(two.client.next_cm_event(), b);
    two.client.disconnect(a).unwrap();
    two.run();
    assert_eq!(two.client.next_cm_event(), None);
    assert_eq!(two.client.next_cm_event_of(own).unwrap(), Some(CmEvent::Disconnected { id: a }));
    assert_eq!(two.server.next_cm_event_of(two.channel).unwrap(), Some(CmEvent::Disconnected { id: first }));
    // A channel in use is not destroyed, and a destroyed one is refused.
    let error = two.server.destroy_cm_channel(two.channel).unwrap_err().to_string();
    assert!(error.contains("1 listeners and 2 connections"), "{error}");
    let unused = two.client.create_cm_channel().unwrap();
    two.client.destroy_cm_channel(unused).unwrap();
    assert!(matches!(two.client.next_cm_event_of(unused), Err(Error::InvalidHandle { .. })));
    assert!(matches!(two.connect(PORTS[0], Some(unused)), Err(Error::InvalidHandle { .. })));
}

/// A library that does not read its events gets no new connections. Those of others continue, and nothing is lost.
#[test]
fn a_full_channel_stops_only_its_own_connections() {
    let mut two = Two::new(4);
    let silent = two.client.create_cm_channel().unwrap();
    // Three unread events for each possible connection.
    let (mut refused, mut begun) = (None, 0);
    while refused.is_none() && begun < 1000 {
        match two.connect(PORTS[0], Some(silent)) {
            Ok(id) => {
                begun += 1;
                two.run();
                let id_there = request(two.server.next_cm_event_of(two.channel).unwrap());
                two.server.reject(id_there, &[]).unwrap();
                two.run();
                assert!(two.client.disconnect(id).is_err(), "it is over");
            }
            Err(error) => refused = Some(error.to_string()),
        }
    }
    assert_eq!(begun, 12);
    let refused = refused.unwrap();
    assert!(refused.contains("CM channel") && refused.contains("does not read"), "{refused}");
    // The other library is not affected.
    let id = two.connect(PORTS[1], None).unwrap();
    two.run();
    let there = request(two.server.next_cm_event());
    two.accept(there, None);
    two.run();
    established(two.client.next_cm_event(), id);
    // All events are there.
    let told = std::iter::from_fn(|| two.client.next_cm_event_of(silent).unwrap());
    assert_eq!(told.filter(|event| matches!(event, CmEvent::Rejected { .. })).count(), 12);
    assert!(two.connect(PORTS[0], Some(silent)).is_ok());
}
