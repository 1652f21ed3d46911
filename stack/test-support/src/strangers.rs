//! Working connections during a flood of requests from hosts that do not exist: REQs whose source addresses are on the link
//! and unused. An application that accepts them all must not be delayed by any.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::{self, EitherSource, FrameSource};
use ferroce::wire::cm::{CmBody, CmMessage, IpCm, PathRecord, Req, SERVICE_ID_TCP};
use ferroce::wire::{Bth, Deth, Encapsulation, FrameBuilder, MAD_LEN, Opcode, PathAddress, PathHeader};
use ferroce::*;

/// The parameters of a run.
pub struct Plan {
    /// The number of working connections.
    pub connections: u32,
    /// REQs of strangers per second, if the server polls often enough to receive them (see `PER_POLL`).
    pub rate: u64,
    /// How long the connections work: once without, and once with the strangers. On a machine that is too busy for half of
    /// the strangers it is longer, up to ten times.
    pub time: Duration,
}

/// The results of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Round trips without the strangers.
    pub alone: Latencies,
    /// Round trips during the flood.
    pub beside: Latencies,
    /// REQs sent.
    pub asked: u64,
    /// Those that the application accepted.
    pub accepted: u64,
    /// Those that were refused, because too many were pending.
    pub refused: u64,
    /// Packets that the connections retransmitted.
    pub retransmitted: u64,
}

/// Round trips of 8-byte WRITEs, in microseconds.
#[derive(Debug)]
pub struct Latencies {
    /// The number of round trips.
    pub count: usize,
    /// The median.
    pub median: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

/// Connects `ports`, the client's and the server's, and runs the plan.
///
/// # Panics
/// When a connection ends or the strangers' requests are not received.
pub fn run([client, server]: [Box<dyn PacketDriver>; 2], plan: &Plan) -> Result<Outcome, Error> {
    let (near, far) = (ipv4(&*client), ipv4(&*server));
    let count = plan.rate * plan.time.as_secs().max(1);
    let frames = (0..count).map(|n| frame(&*client, &*server, n as u32)).collect();
    let allowed = Arc::new(AtomicU64::new(0));
    let client = Strangers { port: client, frames, next: 0, allowed: allowed.clone() };
    // It outlives the server's thread: no connection ends before the server has checked it.
    let mut client = End::open(Box::new(client), plan.connections)?;
    let shared = Shared::default();
    thread::scope(|scope| {
        let serving = scope.spawn(|| serve(server, near, plan.connections, &shared));
        let at_end = StopAtEnd(&shared);
        let worked = work(&mut client, far, plan, &allowed, &shared.polls);
        drop(at_end);
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let [alone, beside] = worked?;
        let retransmitted = client.context.counters().value(Counter::RetransmittedPkts);
        let (accepted, refused) = served?;
        let asked = allowed.load(Relaxed).min(count);
        Ok(Outcome { alone, beside, asked, accepted, refused, retransmitted })
    })
}

/// The state shared by the two threads.
#[derive(Default)]
struct Shared {
    /// Polls of the server.
    polls: AtomicU64,
    /// The client has ended, possibly by a panic.
    stop: AtomicBool,
}

/// The server stops when the client has ended.
struct StopAtEnd<'a>(&'a Shared);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Relaxed);
    }
}

/// The port of the service.
const PORT: u16 = 7471;
/// The most pending requests.
const BACKLOG: u32 = 128;
/// Outstanding WRITEs, each of another connection.
const DEPTH: usize = 8;
/// The most REQs of strangers per poll of the server that the client has seen; fewer than a poll processes. On a busy
/// machine the server has no time for more, and if its receive buffer overflowed, WRITEs would be lost for a reason that is
/// not tested here.
const PER_POLL: u64 = 4;

/// One end: a context with memory, and a completion queue for all work.
struct End {
    context: Context,
    clock: Clock,
    pd: Pd,
    cq: Cq,
    mr: Mr,
}

impl End {
    fn open(port: Box<dyn PacketDriver>, connections: u32) -> Result<End, Error> {
        // In addition to the working connections there are pending ones, and those that have just ended.
        let most = connections + 4 * BACKLOG;
        let config = Config::default().max_qps(most).max_connections(most);
        let mut context = Context::open(port, &config)?;
        let (pd, cq) = (context.alloc_pd()?, context.create_cq(4 * most)?);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = context.register(pd, Memory::zeroed(4096)?, access)?;
        Ok(End { context, clock: Clock::start(), pd, cq, mr })
    }

    /// In INIT.
    fn queue_pair(&mut self) -> Result<Qp, Error> {
        let small = QpConfig::rc(self.pd, self.cq).max_send_wr(4).max_recv_wr(1);
        let qp = self.context.create_qp(&small)?;
        self.context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE })?;
        Ok(qp)
    }

    fn poll(&mut self) -> Result<(), Error> {
        if self.context.poll(self.clock.now())? == 0 {
            thread::yield_now();
        }
        Ok(())
    }

    fn is_alive(&self, qp: Qp) -> Result<bool, Error> {
        Ok(self.context.query_qp(qp)?.state == QpState::Rts)
    }
}

/// Connects, and measures round trips without and with the strangers.
fn work(
    end: &mut End,
    far: IpAddr,
    plan: &Plan,
    allowed: &AtomicU64,
    server_polls: &AtomicU64,
) -> Result<[Latencies; 2], Error> {
    let parameters = ConnectionParameters::default().timeout(15);
    let mut qps = Vec::new();
    let mut remote = None;
    for _ in 0..plan.connections {
        let qp = end.queue_pair()?;
        end.context.connect(qp, SocketAddr::new(far, PORT), &parameters)?;
        qps.push(qp);
        remote = Some(loop {
            end.poll()?;
            match end.context.next_cm_event() {
                Some(CmEvent::Established { private_data, .. }) => break remote_address(&private_data),
                Some(other) => panic!("not connected: {other:?}"),
                None => {}
            }
        });
    }
    let Some(remote) = remote else { panic!("a plan without connections") };
    let alone = round_trips(end, &qps, remote, |elapsed| elapsed < plan.time)?;
    let mut seen = 0;
    let beside = round_trips(end, &qps, remote, |elapsed| {
        let polls = server_polls.load(Relaxed);
        if polls != seen {
            let due = (elapsed.as_secs_f64() * plan.rate as f64) as u64;
            allowed.store(due.min(allowed.load(Relaxed) + PER_POLL), Relaxed);
            seen = polls;
        }
        let is_half = allowed.load(Relaxed) >= plan.rate * plan.time.as_secs() / 2;
        elapsed < if is_half { plan.time } else { 10 * plan.time }
    })?;
    for qp in &qps {
        assert!(end.is_alive(*qp)?, "a connection ended: {:?}", end.context.query_qp(*qp)?);
    }
    assert_eq!(end.context.next_cm_event(), None);
    Ok([alone, beside])
}

/// WRITEs on all connections in turn, some at a time, while `goes_on`, which gets the elapsed time.
fn round_trips(
    end: &mut End,
    qps: &[Qp],
    remote: RemoteAddress,
    mut goes_on: impl FnMut(Duration) -> bool,
) -> Result<Latencies, Error> {
    let sges = [Sge { mr: end.mr, offset: 0, length: 8 }];
    let start = Instant::now();
    let mut posted = vec![start; qps.len()];
    let (mut next, mut under_way) = (0, 0);
    let mut round_trips = Vec::new();
    loop {
        let goes_on = goes_on(start.elapsed());
        if !goes_on && under_way == 0 {
            break;
        }
        while goes_on && under_way < DEPTH.min(qps.len()) {
            posted[next] = Instant::now();
            let (op, data) = (SendOp::Write(remote), Data::Sges(&sges));
            let wr = SendWorkRequest { wr_id: next as u64, op, data, flags: SendFlags::SIGNALED };
            end.context.post_send(qps[next], &wr)?;
            (next, under_way) = ((next + 1) % qps.len(), under_way + 1);
        }
        end.poll()?;
        while let Some(wc) = end.context.poll_cq(end.cq)? {
            assert_eq!(wc.status, WcStatus::Success, "connection {} of {}", wc.wr_id, qps.len());
            round_trips.push(posted[wc.wr_id as usize].elapsed().as_secs_f64() * 1e6);
            under_way -= 1;
        }
    }
    round_trips.sort_by(f64::total_cmp);
    let at = |share: f64| round_trips[((round_trips.len() - 1) as f64 * share) as usize];
    Ok(Latencies { count: round_trips.len(), median: at(0.5), p99: at(0.99), max: at(1.0) })
}

/// Accepts all requests, including the strangers'. Returns how many of those were accepted, and how many refused.
fn serve(
    port: Box<dyn PacketDriver>,
    near: IpAddr,
    connections: u32,
    shared: &Shared,
) -> Result<(u64, u64), Error> {
    let mut end = End::open(port, connections)?;
    let listen = ListenConfig::default().backlog(BACKLOG);
    end.context.listen(PortSpace::Tcp, SocketAddr::from(([0, 0, 0, 0], PORT)), &listen)?;
    let RemoteMemory { addr, rkey, .. } = end.context.remote(end.mr)?;
    let remote = [&addr.to_be_bytes()[..], &rkey.value().to_be_bytes()].concat();
    // Answers to strangers do not arrive: they are not repeated for long.
    let brief = ConnectionParameters::default().cm_timeout(14).cm_retries(1);
    let lasting = ConnectionParameters::default().private_data(&remote);
    let (mut friends, mut strangers) = (Vec::new(), Vec::new());
    let mut accepted = 0;
    while !shared.stop.load(Relaxed) {
        end.poll()?;
        shared.polls.fetch_add(1, Relaxed);
        while let Some(event) = end.context.next_cm_event() {
            match event {
                CmEvent::ConnectionRequest(request) => {
                    let qp = end.queue_pair()?;
                    let is_friend = request.peer.ip() == near;
                    let parameters = if is_friend { &lasting } else { &brief };
                    end.context.accept(request.id, qp, parameters)?;
                    if is_friend {
                        friends.push(qp);
                    } else {
                        strangers.push((request.id, qp));
                        accepted += 1;
                    }
                }
                CmEvent::Unreachable { id, .. } => {
                    if let Some(at) = strangers.iter().position(|(stranger, _)| *stranger == id) {
                        end.context.destroy_qp(strangers.swap_remove(at).1)?;
                    }
                }
                CmEvent::Established { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    for qp in friends {
        assert!(end.is_alive(qp)?, "a connection ended: {:?}", end.context.query_qp(qp)?);
    }
    Ok((accepted, end.context.counters().value(Counter::CmTxRejects)))
}

fn remote_address(private_data: &[u8]) -> RemoteAddress {
    let (addr, rest) = private_data.split_first_chunk().expect("as the server wrote it");
    let (rkey, _) = rest.split_first_chunk().expect("as the server wrote it");
    RemoteAddress { addr: u64::from_be_bytes(*addr), rkey: RKey::new(u32::from_be_bytes(*rkey)) }
}

fn ipv4(port: &dyn PacketDriver) -> IpAddr {
    let mut addresses = port.capabilities().addresses.iter();
    *addresses.find(|address| address.is_ipv4()).expect("a port with an IPv4 address")
}

/// The REQ of stranger `n`. Hosts 10 to 249 of the server's /24 do not exist, but have hardware addresses in the packets.
fn frame(client: &dyn PacketDriver, server: &dyn PacketDriver, n: u32) -> Vec<u8> {
    let IpAddr::V4(far) = ipv4(server) else { unreachable!("it is one") };
    let [a, b, c, _] = far.octets();
    let source = IpAddr::V4(Ipv4Addr::new(a, b, c, 10 + (n % 240) as u8));
    let destination = IpAddr::V4(far);
    let [.., x, y, z, w] = client.capabilities().mac;
    let path = PathAddress {
        source_mac: MacAddr([2, 0x55, x, y ^ 0xff, z, w.wrapping_add((n % 240) as u8)]),
        destination_mac: MacAddr(server.capabilities().mac),
        vlan: None,
        source: source.into(),
        destination: destination.into(),
        encapsulation: Encapsulation::RoceV2 { source_port: 0xc123 },
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        identification: 0,
    };
    let mut record = PathRecord::new(source.into(), destination.into());
    record.set_ack_timeout(14);
    record.set_hop_limit(64);
    let qpn = Qpn::new(2 + n);
    let mut req =
        Req::new(1 + n, SERVICE_ID_TCP + u64::from(PORT), qpn, Psn::new(n), PathMtu::Mtu1024, record);
    req.set_remote_cm_timeout(20);
    req.set_max_cm_retries(15);
    let addresses = IpCm { source, source_port: 5000, destination }.to_bytes().expect("of one kind");
    req.private_data[..IpCm::LEN].copy_from_slice(&addresses);
    let mut mad = [0; MAD_LEN];
    CmMessage { transaction_id: n.into(), body: CmBody::Req(&req) }.emit(&mut mad);
    let mut bytes = vec![0; 512];
    let bth = Bth::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(n));
    let path = PathHeader::new(&path);
    let mut frame = FrameBuilder::start(&mut bytes, &path, bth, MAD_LEN).expect("there is room");
    frame.put(&Deth::new(0x8001_0000, Qpn::GSI));
    frame.payload().copy_from_slice(&mad);
    let length = frame.finish();
    bytes.truncate(length);
    bytes
}

/// The client's port, which also sends the strangers' frames.
struct Strangers {
    port: Box<dyn PacketDriver>,
    frames: Vec<Vec<u8>>,
    next: usize,
    /// How many may be sent in total.
    allowed: Arc<AtomicU64>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { alone, beside, asked, accepted, refused, retransmitted } = self;
        for (when, Latencies { count, median, p99, max }) in [("alone", alone), ("beside the flood", beside)]
        {
            writeln!(
                f,
                "{when:<16} {count:>8} round trips, {median:>7.1} us median, {p99:>7.1} p99, {max:>8.1} max"
            )?;
        }
        let (median, p99) = (beside.median - alone.median, beside.p99 - alone.p99);
        writeln!(f, "added by {asked} requests: {median:.1} us median, {p99:.1} p99")?;
        write!(
            f,
            "{accepted} accepted, {refused} refused; {retransmitted} packets of the connections sent again"
        )
    }
}

impl driver::Wrapper for Strangers {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.port
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.port
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let Strangers { port, frames, next, allowed } = self;
        let most = frames.len().min(allowed.load(Relaxed) as usize);
        let mut request = |buffer: &mut [u8]| {
            let frame = frames[..most].get(*next)?;
            buffer[..frame.len()].copy_from_slice(frame);
            *next += 1;
            Some(frame.len())
        };
        (**port).tx_burst(now, &mut EitherSource::new(source, &mut request))
    }
}
