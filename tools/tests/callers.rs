//! Requests to the servers of rdma_cm's programs from others than the expected client.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ends::{Ferroce, alone};
use ferroce::driver::{self, FilteredSource, FrameSource, Sent};
use ferroce::{
    Access, CmEvent, Config, ConnectionParameters, Context, Data, DeviceSpec, ListenConfig, Memory, Nanos,
    PacketDriver, Poller, PortSpace, QpConfig, QpState, QpType, RKey, ReceiveWorkRequest, RemoteAddress,
    SendFlags, SendOp, SendWorkRequest, Sge, Transition,
};

/// An address of the loopback interface that no other process uses.
fn address(last: u8) -> String {
    let [.., a, b] = std::process::id().to_be_bytes();
    format!("127.{}.{a}.{b}", 100 + last)
}

/// The behavior of a client whose first packet may have a forged address.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stranger {
    /// Requests a UC connection.
    Unlike,
    /// Does not react to the answer.
    Absent,
    /// Withdraws the request before it has seen the answer.
    Fickle,
    /// Looks up a datagram service and sends nothing.
    Seeks,
    /// Accepts without sending an RTU, and reads memory that it was not given.
    Trespasses,
}

impl Stranger {
    /// The server's message once it has received all of it.
    fn is_told_by(self) -> &'static str {
        match self {
            Stranger::Unlike => "is not a client: it asks for Uc",
            Stranger::Absent => "connection request",
            Stranger::Trespasses => "is not a client: it asks for access that its connection does not allow",
            Stranger::Fickle => "is not a client: it refuses",
            Stranger::Seeks => "resolves the service",
        }
    }
}

/// Sends a request from an address, and the packets that follow. The returned context keeps its socket open.
fn visit(server: &mut Ferroce, stranger: Stranger, last: u8, port: u16) -> Context {
    let device: DeviceSpec = format!("udp:{}", address(last)).parse().unwrap();
    let mut driver = device.open().unwrap().into_driver().unwrap();
    if stranger == Stranger::Trespasses {
        driver = Box::new(NotReady(driver));
    }
    let mut context = Context::open(driver, &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let to = SocketAddr::new(address(0).parse::<IpAddr>().unwrap(), port);
    let mut poller = Poller::new();
    if stranger == Stranger::Seeks {
        context.resolve(to, &ConnectionParameters::default()).unwrap();
        poller.poll(&mut context).unwrap();
        return context;
    }
    let qp_type = if stranger == Stranger::Unlike { QpType::Uc } else { QpType::Rc };
    let qp = context.create_qp(&QpConfig::new(qp_type, pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let id = context.connect(qp, to, &ConnectionParameters::default()).unwrap();
    poller.poll(&mut context).unwrap();
    if stranger == Stranger::Trespasses {
        while context.query_qp(qp).unwrap().state != QpState::Rts {
            poller.poll(&mut context).unwrap();
        }
        let mr = context.register(pd, Memory::zeroed(8).unwrap(), Access::LOCAL_WRITE).unwrap();
        let op = SendOp::Read(RemoteAddress { addr: 0, rkey: RKey::new(0x5eed) });
        let data = Data::Sges(&[Sge { mr, offset: 0, length: 8 }]);
        let read = SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED };
        context.post_send(qp, &read).unwrap();
        poller.poll(&mut context).unwrap();
    }
    if stranger == Stranger::Fickle {
        // It has not seen the answer, since it does not poll.
        server.says("connection request", || {});
        context.disconnect(id).unwrap();
        poller.poll(&mut context).unwrap();
    }
    context
}

/// A port that drops the RTUs of its connections.
struct NotReady(Box<dyn PacketDriver>);

impl driver::Wrapper for NotReady {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.0
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.0
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        // IPv4 and UDP, then the BTH with the queue pair; after it and the DETH, the MAD with its attribute.
        const BTH: usize = 28;
        let mut scratch = Vec::new();
        let is_no_rtu = |packet: Sent<'_>| {
            let packet = packet.bytes(&mut scratch);
            packet.get(BTH + 5..BTH + 8) != Some(&[0, 0, 1])
                || packet.get(BTH + 36..BTH + 38) != Some(&[0, 0x14])
        };
        (*self.0).tx_burst(now, &mut FilteredSource::new(source, is_no_rtu))
    }
}

/// The server survives, and its client is served at once.
fn is_served(program: &str, port: u16, strangers: &[Stranger], waiting: &str) {
    let _alone = alone();
    let mut server = Ferroce::start(None, &format!("{program} -d udp:{} -p {port}", address(0)));
    server.ready();
    let _theirs: Vec<Context> = (2..)
        .zip(strangers)
        .map(|(last, stranger)| {
            let theirs = visit(&mut server, *stranger, last, port);
            // The next one is sent once this one was handled.
            server.says(stranger.is_told_by(), || {});
            theirs
        })
        .collect();
    let started = Instant::now();
    let client =
        Ferroce::start(None, &format!("{program} -d udp:{} -p {port} {}", address(1), address(0))).end();
    let took = started.elapsed();
    if client.code != Some(0) {
        server.interrupt();
    }
    let server = server.end();
    assert_eq!((server.code, client.code), (Some(0), Some(0)), "{strangers:?}: {server:#?} {client:#?}");
    assert!(took < Duration::from_secs(8), "{took:?}: {server:#?}");
    assert!(server.stderr.contains(waiting), "no '{waiting}' in {server:#?}");
}

#[test]
fn a_server_of_rping_survives_strangers() {
    is_served("rping -C 3", 7191, &[Stranger::Unlike], "is not a client: it asks for Uc");
    is_served(
        "rping -C 3",
        7192,
        &[Stranger::Absent, Stranger::Absent],
        "other clients were connected before it",
    );
    is_served("rping -C 3", 7193, &[Stranger::Fickle], "is not a client: it refuses");
    is_served("rping -C 3", 7195, &[Stranger::Trespasses], Stranger::Trespasses.is_told_by());
}

#[test]
fn a_server_of_ucmatose_survives_strangers() {
    let program = "ucmatose -c 2 -C 3";
    is_served(program, 7491, &[Stranger::Unlike], "is not a client: it asks for Uc");
    is_served(program, 7492, &[Stranger::Absent; 3], "other clients were connected before it");
    is_served(program, 7493, &[Stranger::Fickle, Stranger::Absent], "is not a client: it refuses");
    // More than are kept: the oldest are dropped.
    is_served(program, 7494, &[Stranger::Absent; 20], "for too long");
}

#[test]
fn a_server_of_udaddy_survives_strangers() {
    is_served("udaddy -C 3", 7194, &[Stranger::Seeks, Stranger::Seeks], "resolves the service");
}

/// Packets of another partition are dropped without an answer.
#[test]
fn an_end_in_another_partition_is_named() {
    let _alone = alone();
    for program in
        ["rping", "udaddy", "perf write bw -n 10", "perf write bw -n 10 --perftest", "pingpong -n 10"]
    {
        let served = program.replace(" --perftest", "");
        let mut server =
            Ferroce::start(None, &format!("{served} -d udp:{} -p 7196 --pkey 0x8001", address(0)));
        server.ready();
        let host =
            if served.contains("rping") || served == "udaddy" { address(0) } else { "127.0.0.1".into() };
        let client = Ferroce::start(None, &format!("{program} -d udp:{} -p 7196 {host}", address(1))).end();
        server.interrupt();
        let server = server.end();
        assert_eq!(client.code, Some(1), "{program}: {client:#?} {server:#?}");
        assert!(
            server.stderr.contains("0xffff") && server.stderr.contains("0x8001"),
            "{program}: {server:#?}"
        );
        assert!(server.stderr.contains("--pkey"), "{program}: {server:#?}");
        // The TCP protocols of perftest and pingpong have no field for it.
        if program.ends_with("10") && !program.starts_with("ping") {
            assert!(client.stderr.contains("0xffff") && client.stderr.contains("0x8001"), "{client:#?}");
        }
        if program.starts_with("rping") || program == "udaddy" {
            assert!(client.stderr.contains("partition of 0xffff (--pkey)"), "{client:#?}");
        }
    }
}

/// Everything that it has sent is acknowledged, so no retry fails.
#[test]
fn a_client_of_rping_whose_server_says_nothing_ends() {
    let _alone = alone();
    let device: DeviceSpec = format!("udp:{}", address(0)).parse().unwrap();
    let mut context = Context::open(device.open().unwrap(), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let memory = Memory::zeroed(16).unwrap();
    let mr = context.register(pd, memory, Access::LOCAL_WRITE).unwrap();
    let sges = &[Sge { mr, offset: 0, length: 16 }];
    context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges }).unwrap();
    let any = SocketAddr::from(([0, 0, 0, 0], 7195));
    context.listen(PortSpace::Tcp, any, &ListenConfig::default()).unwrap();
    let command = format!("rping -d udp:{} -p 7195 {}", address(1), address(0));
    let client = std::thread::spawn(move || Ferroce::start(None, &command).end());
    let mut poller = Poller::blocking();
    while !client.is_finished() {
        poller.poll(&mut context).unwrap();
        if let Some(CmEvent::ConnectionRequest(request)) = context.next_cm_event() {
            let depths = ConnectionParameters::default().responder_resources(1);
            context.accept(request.id, qp, &depths).unwrap();
        }
    }
    let outcome = client.join().unwrap();
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.took < Duration::from_secs(40), "{outcome:#?}");
    assert!(outcome.stderr.contains("the peer has sent nothing for 30 s"), "{outcome:#?}");
    // The advice contains the peer's address.
    let advice = format!("ferroce doctor -d udp:{} {}", address(1), address(0));
    assert!(outcome.stderr.contains(&advice), "{outcome:#?}");
}
