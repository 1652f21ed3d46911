//! The scripted peer: one queue pair under test, and everything that the other end of its
//! connection would send, by hand.
//!
//! Time stands still until a case calls [`Peer::advance`], and the engine runs only inside the
//! methods here, so a case is the same every time. Expectations take what they name: `expect` the
//! oldest packet sent, `expect_wc` the oldest completion, `expect_event` the oldest event. What
//! nobody took fails the case when the peer is dropped.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce::driver::{self, Capabilities, FrameSink, FrameSource, Layer, RxFrame, Stats};
use ferroce::wire::{Encapsulation, Opcode, PathAddress, PathHeader, Sack, Syndrome};
use ferroce::{
    Access, AddressVector, Config, Context, Counter, Cq, Data, Destination, Event, Gid, MacAddr, Memory, Mr,
    Nanos, PKey, PacketDriver, PathMtu, Pd, Psn, Qp, QpAttributes, QpConfig, QpState, QpType, Qpn, RKey,
    ReadyToReceive, ReadyToSend, ReceiveWorkRequest, RemoteAddress, RemoteMemory, RnrTimer, SendFlags,
    SendOp, SendWorkRequest, Sge, Srq, SrqConfig, Transition, UnreliablePath, WcStatus, WorkCompletion,
};

use crate::packet::{self, BTH, Got, IP, Script, UDP, reseal};

/// The peer's queue pair.
pub(crate) const PEER_QPN: Qpn = Qpn::new(0x77);
/// The PSN of the engine's first request, unless a case says otherwise.
pub(crate) const SQ: u32 = 1000;
/// The PSN of the peer's first request, unless a case says otherwise.
pub(crate) const RQ: u32 = 5000;
/// The Q_Key of datagrams, both ways.
pub(crate) const QKEY: u32 = 0x1111_1111;
/// Memory of the peer.
pub(crate) const REMOTE: RemoteAddress = RemoteAddress { addr: 0x10_0000, rkey: RKey::new(0x5eed_beef) };

const ENGINE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const ENGINE_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
const PEER_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const ENGINE_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2));
const PEER_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1));

/// What a case may choose; the rest is fixed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) qp_type: QpType,
    /// Receives come from an SRQ of this depth.
    pub(crate) srq: Option<u32>,
    pub(crate) ipv6: bool,
    pub(crate) mtu: PathMtu,
    /// How far the queue pair is taken.
    pub(crate) state: QpState,
    pub(crate) access: Access,
    pub(crate) sq_psn: u32,
    pub(crate) rq_psn: u32,
    pub(crate) timeout: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) cq_capacity: u32,
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) roce_v1: bool,
    pub(crate) selective_repeat: bool,
    pub(crate) reorder_packets: u16,
    pub(crate) flush: bool,
    pub(crate) atomic_write: bool,
    pub(crate) drop_access_errors: bool,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            qp_type: QpType::Rc,
            srq: None,
            ipv6: false,
            mtu: PathMtu::Mtu256,
            state: QpState::Rts,
            access: all_access(),
            sq_psn: SQ,
            rq_psn: RQ,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 12,
            cq_capacity: 256,
            max_send_wr: 128,
            max_recv_wr: 128,
            roce_v1: false,
            selective_repeat: false,
            reorder_packets: 1024,
            flush: true,
            atomic_write: true,
            drop_access_errors: false,
        }
    }
}

impl Setup {
    /// The default, of another service.
    pub(crate) fn of(qp_type: QpType) -> Setup {
        Setup { qp_type, ..Setup::default() }
    }
}

/// Everything that host memory can grant.
pub(crate) fn all_access() -> Access {
    Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL
        | Access::REMOTE_INVALIDATE
        | Access::MW_BIND
}

/// `length` bytes, no two neighbouring packets of them alike.
pub(crate) fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect()
}

/// `length` bytes of a region, from its start.
pub(crate) fn sge(mr: Mr, length: usize) -> Sge {
    Sge { mr, offset: 0, length: length as u32 }
}

/// The scripted peer and the engine under test.
pub(crate) struct Peer {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
    pub(crate) srq: Option<Srq>,
    /// The number of the queue pair under test.
    pub(crate) qpn: Qpn,
    /// The virtual time.
    pub(crate) now: Nanos,
    /// The addresses of the peer's packets.
    pub(crate) address: PathAddress,
    cable: Arc<Mutex<Cable>>,
    /// What each counter showed when it was last asked for.
    asked: HashMap<Counter, u64>,
}

impl Peer {
    /// A connection in RTS with the default [`Setup`].
    pub(crate) fn new() -> Peer {
        Peer::with(Setup::default())
    }

    pub(crate) fn with(setup: Setup) -> Peer {
        let cable = Arc::new(Mutex::new(Cable { room: usize::MAX, ..Cable::default() }));
        let port = CablePort {
            capabilities: Capabilities {
                driver: "cable",
                description: "the scripted peer's end of a cable".to_owned(),
                interface: "script0".to_owned(),
                layer: Layer::Ethernet,
                mac: ENGINE_MAC.0,
                addresses: vec![ENGINE_V4, ENGINE_V6],
                mtu: 9000,
                max_frame: 9018,
            },
            buffer: vec![0; 9018].into_boxed_slice(),
            poisoned: None,
            cable: Arc::clone(&cable),
        };
        let Setup { roce_v1, flush, atomic_write, drop_access_errors, reorder_packets, .. } = setup;
        let seed = Some([7; 32]);
        let limits = Config { reorder_packets, ..Config::default() };
        let config = Config { seed, roce_v1, flush, atomic_write, drop_access_errors, ..limits };
        let mut context = Context::open(Box::new(port), &config).unwrap();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(setup.cq_capacity).unwrap();
        let Setup { qp_type, max_send_wr, max_recv_wr, .. } = setup;
        let srq = setup.srq.map(|max_wr| context.create_srq(&SrqConfig { pd, max_wr, max_sge: 4 }).unwrap());
        let config = QpConfig { qp_type, srq, max_send_wr, max_recv_wr, ..QpConfig::rc(pd, cq) };
        let qp = context.create_qp(&config).unwrap();
        let qpn = context.query_qp(qp).unwrap().qpn;
        let (source, destination) = if setup.ipv6 { (PEER_V6, ENGINE_V6) } else { (PEER_V4, ENGINE_V4) };
        let address = PathAddress {
            source_mac: PEER_MAC,
            destination_mac: ENGINE_MAC,
            vlan: None,
            source: source.into(),
            destination: destination.into(),
            encapsulation: Encapsulation::RoceV2 { source_port: 0xd123 },
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            identification: 0,
        };
        let now = Nanos(1_000_000_000);
        let mut peer = Peer { context, pd, cq, qp, srq, qpn, now, address, cable, asked: HashMap::new() };
        peer.take_to(&setup);
        peer
    }

    /// Takes the queue pair from RESET to the state of the setup.
    pub(crate) fn take_to(&mut self, setup: &Setup) {
        let steps = match setup.state {
            QpState::Reset => 0,
            QpState::Init => 1,
            QpState::Rtr => 2,
            QpState::Rts => 3,
            state => panic!("a setup cannot end in {state:?}"),
        };
        for transition in &self.transitions(setup)[..steps] {
            self.modify(*transition);
        }
    }

    /// The way to the peer, or to any other GID.
    pub(crate) fn way_to(&self, gid: Gid) -> AddressVector {
        let sgid_index = self.context.port().gid_index_for(self.address.source).unwrap();
        AddressVector { mac: Some(PEER_MAC), ..AddressVector::new(gid, sgid_index) }
    }

    /// From RESET to RTS.
    pub(crate) fn transitions(&self, setup: &Setup) -> [Transition; 3] {
        let address = self.way_to(self.address.source);
        let path = UnreliablePath {
            address,
            path_mtu: setup.mtu,
            dest_qpn: PEER_QPN,
            rq_psn: Psn::new(setup.rq_psn),
        };
        let sq_psn = Psn::new(setup.sq_psn);
        match setup.qp_type {
            QpType::Rc => [
                Transition::Init { access: setup.access },
                Transition::ReadyToReceive(ReadyToReceive {
                    path_mtu: setup.mtu,
                    max_dest_rd_atomic: setup.max_dest_rd_atomic,
                    min_rnr_timer: RnrTimer::new(setup.min_rnr_timer).unwrap(),
                    selective_repeat: setup.selective_repeat,
                    ..ReadyToReceive::new(address, PEER_QPN, path.rq_psn)
                }),
                Transition::ReadyToSend(ReadyToSend {
                    sq_psn,
                    timeout: setup.timeout,
                    retry_count: setup.retry_count,
                    rnr_retry: setup.rnr_retry,
                    max_rd_atomic: setup.max_rd_atomic,
                }),
            ],
            QpType::Uc => [
                Transition::Init { access: setup.access },
                Transition::ReadyToReceiveUnreliable(path),
                Transition::ReadyToSendUnreliable { sq_psn },
            ],
            QpType::Ud => [
                Transition::InitDatagram { qkey: QKEY },
                Transition::ReadyToReceiveDatagrams,
                Transition::ReadyToSendUnreliable { sq_psn },
            ],
        }
    }

    /// Another queue pair beside the one under test, likewise configured and in RTS.
    pub(crate) fn another_qp(&mut self, setup: &Setup) -> Qp {
        let config = QpConfig { qp_type: setup.qp_type, srq: self.srq, ..QpConfig::rc(self.pd, self.cq) };
        let qp = self.context.create_qp(&config).unwrap();
        for transition in self.transitions(setup) {
            self.context.modify_qp(qp, transition).unwrap();
        }
        qp
    }

    /// The peer's UD queue pair.
    pub(crate) fn destination(&mut self) -> Destination {
        let address = self.way_to(self.address.source);
        let ah = self.context.create_ah(self.pd, &address).unwrap();
        Destination { ah, qpn: PEER_QPN, qkey: QKEY }
    }

    pub(crate) fn modify(&mut self, transition: Transition) {
        self.context.modify_qp(self.qp, transition).unwrap();
    }

    pub(crate) fn query(&self) -> QpAttributes {
        self.context.query_qp(self.qp).unwrap()
    }

    #[track_caller]
    pub(crate) fn expect_state(&self, state: QpState) {
        assert_eq!(self.query().state, state, "state of the queue pair");
    }

    // Memory.

    /// Registers a copy of `bytes` with every right.
    pub(crate) fn memory(&mut self, bytes: &[u8]) -> Mr {
        self.memory_with(bytes, all_access())
    }

    /// Registers a copy of `bytes`.
    pub(crate) fn memory_with(&mut self, bytes: &[u8], access: Access) -> Mr {
        self.context.register(self.pd, Memory::copy_of(bytes).unwrap(), access).unwrap()
    }

    pub(crate) fn bytes(&self, mr: Mr) -> &[u8] {
        self.context.bytes(mr).unwrap()
    }

    /// The application's own change to its memory.
    pub(crate) fn bytes_mut(&mut self, mr: Mr) -> &mut [u8] {
        self.context.bytes_mut(mr).unwrap()
    }

    /// What the peer must name to reach a region.
    pub(crate) fn remote(&self, mr: Mr) -> RemoteMemory {
        self.context.remote(mr).unwrap()
    }

    // Work requests of the engine's application.

    /// Posts a signaled work request; it leaves with the next expectation.
    #[track_caller]
    pub(crate) fn post(&mut self, wr_id: u64, op: SendOp, data: &[Sge]) {
        self.post_flagged(wr_id, op, Data::Sges(data), SendFlags::SIGNALED);
    }

    #[track_caller]
    pub(crate) fn post_flagged(&mut self, wr_id: u64, op: SendOp, data: Data<'_>, flags: SendFlags) {
        self.context.post_send(self.qp, &SendWorkRequest { wr_id, op, data, flags }).unwrap();
    }

    /// Posts a signaled SEND of `bytes`, from memory of its own.
    #[track_caller]
    pub(crate) fn post_send(&mut self, wr_id: u64, bytes: &[u8]) {
        let mr = self.memory(bytes);
        self.post(wr_id, SendOp::Send, &[sge(mr, bytes.len())]);
    }

    /// Posts a signaled WRITE of `bytes` to [`REMOTE`].
    #[track_caller]
    pub(crate) fn post_write(&mut self, wr_id: u64, bytes: &[u8]) {
        let mr = self.memory(bytes);
        self.post(wr_id, SendOp::Write(REMOTE), &[sge(mr, bytes.len())]);
    }

    /// Posts a signaled READ from [`REMOTE`] into zeroed memory, which it returns.
    #[track_caller]
    pub(crate) fn post_read(&mut self, wr_id: u64, length: usize) -> Mr {
        let mr = self.memory(&vec![0; length]);
        self.post(wr_id, SendOp::Read(REMOTE), &[sge(mr, length)]);
        mr
    }

    /// Posts a receive of up to `length` bytes into zeroed memory, which it returns; to the SRQ if
    /// there is one.
    #[track_caller]
    pub(crate) fn post_recv(&mut self, wr_id: u64, length: usize) -> Mr {
        let mr = self.memory(&vec![0; length]);
        let wr = ReceiveWorkRequest { wr_id, sges: &[sge(mr, length)] };
        match self.srq {
            Some(srq) => self.context.post_srq_recv(srq, &wr).unwrap(),
            None => self.context.post_recv(self.qp, &wr).unwrap(),
        }
        mr
    }

    // Packets of the peer.

    /// The frame of a packet from the peer, to be changed by hand.
    pub(crate) fn frame(&self, packet: &Script) -> Vec<u8> {
        packet.frame(&PathHeader::new(&self.address), self.qpn)
    }

    /// A frame from the peer with any bytes as its transport packet: opcode, the second byte of the
    /// BTH, and `length` bytes from the BTH to a right ICRC.
    pub(crate) fn raw(&self, opcode: u8, flags: u8, qpn: Qpn, length: usize) -> Vec<u8> {
        let template = self.frame(&packet::ack(0, 0));
        let mut transport = template[BTH..].to_vec();
        transport[0] = opcode;
        transport[1] = flags;
        transport[5..8].copy_from_slice(&qpn.value().to_be_bytes()[1..]);
        transport.resize(length, 0x3c);
        let mut frame = [&template[..BTH], &transport].concat();
        let ip_length = (frame.len() - IP) as u16;
        frame[IP + 2..IP + 4].copy_from_slice(&ip_length.to_be_bytes());
        frame[UDP + 4..UDP + 6].copy_from_slice(&(ip_length - 20).to_be_bytes());
        if length >= 12 + 4 {
            reseal(&mut frame);
        }
        frame
    }

    /// The packet arrives, and the engine has its turn.
    #[track_caller]
    pub(crate) fn inject(&mut self, packet: Script) {
        self.inject_all([packet]);
    }

    /// The packets arrive together, before the engine has its turn.
    #[track_caller]
    pub(crate) fn inject_all(&mut self, packets: impl IntoIterator<Item = Script>) {
        self.arrive(packets);
        self.poll();
    }

    /// The packets arrive, and the engine has no turn yet.
    pub(crate) fn arrive(&mut self, packets: impl IntoIterator<Item = Script>) {
        let path = PathHeader::new(&self.address);
        let frames: Vec<Vec<u8>> = packets.into_iter().map(|p| p.frame(&path, self.qpn)).collect();
        self.cable.lock().unwrap().to_engine.extend(frames);
    }

    /// Any frame arrives, and the engine has its turn.
    #[track_caller]
    pub(crate) fn inject_frame(&mut self, frame: Vec<u8>) {
        self.cable.lock().unwrap().to_engine.push_back(frame);
        self.poll();
    }

    /// The frame arrives and is dropped: one count under `reason`, no reply, no completion, no
    /// event, and the queue pair is as it was.
    #[track_caller]
    pub(crate) fn expect_dropped(&mut self, frame: Vec<u8>, reason: Counter) {
        self.expect_dropped_with(frame, &[reason], None);
    }

    /// The frame arrives and is dropped for its P_Key, and the application is told.
    #[track_caller]
    pub(crate) fn expect_foreign(&mut self, frame: Vec<u8>, qp: Option<Qp>, pkey: PKey) {
        let event = Event::PkeyViolation { qp, pkey, source: self.address.source };
        let reasons = [Counter::EventPkeyViolation, Counter::RxPkeyMismatch];
        self.expect_dropped_with(frame, &reasons, Some(event));
    }

    #[track_caller]
    fn expect_dropped_with(&mut self, frame: Vec<u8>, reasons: &[Counter], event: Option<Event>) {
        self.poll();
        let before = self.query();
        let counters = self.context.counters().clone();
        self.inject_frame(frame);
        self.expect_nothing();
        self.expect_no_wc();
        assert_eq!(self.context.next_event(), event, "what a dropped frame told");
        self.expect_no_event();
        assert_eq!(self.query(), before, "a dropped frame changed the queue pair");
        let changed: Vec<(&str, u64)> = counters
            .iter()
            .zip(self.context.counters().iter())
            .filter(|(old, new)| old != new && new.0 != Counter::RcvdPkts.name())
            .map(|(old, new)| (new.0, new.1 - old.1))
            .collect();
        let expected: Vec<(&str, u64)> = reasons.iter().map(|reason| (reason.name(), 1)).collect();
        assert_eq!(changed, expected, "what the drop was counted as");
    }

    /// The packet is dropped in silence: one count under `reason`, and the queue pair goes on.
    #[track_caller]
    pub(crate) fn expect_refused(&mut self, packet: Script, reason: Counter) {
        let (state, before) = (self.query().state, self.context.counters().value(reason));
        self.inject(packet);
        self.expect_nothing();
        self.expect_no_wc();
        self.expect_no_event();
        self.expect_state(state);
        assert_eq!(self.context.counters().value(reason), before + 1, "{}", reason.name());
    }

    // Time.

    /// Turns of the engine at the present time, until there is nothing left to do.
    #[track_caller]
    pub(crate) fn poll(&mut self) {
        while self.context.poll(self.now).unwrap() > 0 {}
    }

    /// Lets time pass; every timer on the way fires at its own time.
    #[track_caller]
    pub(crate) fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        self.poll();
        while let Some(due) = self.context.next_timeout().filter(|due| *due <= end) {
            // A timer that is due already fires in the poll before; one nanosecond keeps an engine
            // that names the past from stopping the clock.
            self.now = due.max(self.now + Duration::from_nanos(1));
            self.poll();
        }
        self.now = end;
        self.poll();
    }

    // What the engine sends.

    /// The next packet of the engine, which must be this one.
    #[track_caller]
    pub(crate) fn expect(&mut self, opcode: Opcode, psn: u32) -> Got {
        match self.next_packet() {
            Some(got) if (got.opcode, got.psn) == (opcode, psn & 0xff_ffff) => got,
            Some(got) => panic!(
                "expected {} psn {psn:#x}\n   but got {got}\n{}",
                opcode.name(),
                self.situation("and then")
            ),
            None => {
                panic!("expected {} psn {psn:#x}\n   but got nothing\n{}", opcode.name(), self.situation(""))
            }
        }
    }

    /// The next packet is an ACK of everything up to `psn`.
    #[track_caller]
    pub(crate) fn expect_ack(&mut self, psn: u32, msn: u32) {
        self.expect_aeth(Syndrome::ACK.byte(), psn, msn);
    }

    /// The next packet is an Acknowledge with this syndrome byte.
    #[track_caller]
    pub(crate) fn expect_nak(&mut self, syndrome: u8, psn: u32, msn: u32) {
        self.expect_aeth(syndrome, psn, msn);
    }

    #[track_caller]
    fn expect_aeth(&mut self, syndrome: u8, psn: u32, msn: u32) {
        let got = self.expect(Opcode::RC_ACKNOWLEDGE, psn);
        let aeth = got.aeth.map(|aeth| (aeth.syndrome_byte(), aeth.msn()));
        if aeth != Some((syndrome, msn)) {
            panic!(
                "expected syndrome {syndrome:#04x} msn {msn}\n   but got {got}\n{}",
                self.situation("and then")
            );
        }
    }

    /// The next packet is a selective acknowledge of everything before `psn` that names `held`, and
    /// nothing else.
    #[track_caller]
    pub(crate) fn expect_sack(&mut self, psn: u32, msn: u32, held: &[u32]) {
        let got = self.expect(Opcode::SELECTIVE_ACKNOWLEDGE, psn);
        let sack = got.sack.expect("a whole map");
        let named: Vec<u32> =
            (1..Sack::SPAN).map(|i| psn + i).filter(|psn| sack.holds(Psn::new(*psn))).collect();
        let aeth = got.aeth.map(|aeth| (aeth.syndrome_byte(), aeth.msn()));
        assert_eq!((aeth, &named[..]), (Some((Syndrome::ACK.byte(), msn)), held), "of {got}");
        assert!(!sack.holds(Psn::new(psn)), "the missing one is named in {got}");
    }

    /// From now on the port takes so many packets of the engine; it is blocked after them.
    pub(crate) fn take_at_most(&mut self, packets: usize) {
        self.cable.lock().unwrap().room = packets;
    }

    /// From now on the port's buffers hold bytes that no other `poison` has at the same place.
    pub(crate) fn poison(&mut self, poison: u8) {
        self.cable.lock().unwrap().poison = poison;
    }

    /// How often the port has been asked for a way, which may block.
    pub(crate) fn resolved(&self) -> u64 {
        self.cable.lock().unwrap().resolved
    }

    #[track_caller]
    pub(crate) fn expect_nothing(&mut self) {
        self.poll();
        if !self.cable.lock().unwrap().from_engine.is_empty() {
            panic!("expected no packet\n{}", self.situation("but got"));
        }
    }

    /// Takes all packets that the engine has sent.
    #[track_caller]
    pub(crate) fn take_packets(&mut self) -> Vec<Got> {
        std::iter::from_fn(|| self.next_packet()).collect()
    }

    #[track_caller]
    fn next_packet(&mut self) -> Option<Got> {
        self.poll();
        let (at, frame) = self.cable.lock().unwrap().from_engine.pop_front()?;
        let got = Got::parse(at, frame);
        assert!(
            [PEER_QPN, Qpn::MULTICAST, Qpn::GSI].contains(&got.dest_qpn),
            "destination of {got}: {}",
            got.dest_qpn
        );
        Some(got)
    }

    /// Ends the context, and puts an empty one in its place. Returns what it sent at its end.
    pub(crate) fn end(&mut self) -> Vec<Got> {
        let (port, _) = driver::loopback::pair(&[ENGINE_V4], &[PEER_V4]);
        let empty = Context::open(Box::new(port), &Config::default()).unwrap();
        drop(std::mem::replace(&mut self.context, empty));
        self.cq = self.context.create_cq(1).unwrap();
        self.take_packets()
    }

    // What the engine tells its application.

    /// The next completion, which must be this one.
    #[track_caller]
    pub(crate) fn expect_wc(&mut self, wr_id: u64, status: WcStatus) -> WorkCompletion {
        self.poll();
        match self.context.poll_cq(self.cq).unwrap() {
            Some(wc) if (wc.wr_id, wc.status) == (wr_id, status) => wc,
            Some(wc) => {
                panic!(
                    "expected completion of {wr_id}: {status:?}\n   but got {wc:?}\n{}",
                    self.situation("")
                )
            }
            None => {
                panic!("expected completion of {wr_id}: {status:?}\n   but got none\n{}", self.situation(""))
            }
        }
    }

    #[track_caller]
    pub(crate) fn expect_no_wc(&mut self) {
        self.poll();
        if let Some(wc) = self.context.poll_cq(self.cq).unwrap() {
            panic!("expected no completion\n   but got {wc:?}\n{}", self.situation(""));
        }
    }

    #[track_caller]
    pub(crate) fn expect_event(&mut self, event: Event) {
        self.poll();
        assert_eq!(self.context.next_event(), Some(event), "the next event");
    }

    #[track_caller]
    pub(crate) fn expect_no_event(&mut self) {
        self.poll();
        assert_eq!(self.context.next_event(), None, "the next event");
    }

    /// `counter` has counted `times` since it was last asked for.
    #[track_caller]
    pub(crate) fn expect_counted(&mut self, counter: Counter, times: u64) {
        self.poll();
        let value = self.context.counters().value(counter);
        let before = self.asked.insert(counter, value).unwrap_or(0);
        if value - before != times {
            panic!(
                "expected {} to count {times}\n   but it did {}\n{}",
                counter.name(),
                value - before,
                self.situation("")
            );
        }
    }

    /// For the messages of failures: what else there is.
    fn situation(&self, waiting: &str) -> String {
        let mut text = String::new();
        for (at, frame) in &self.cable.lock().unwrap().from_engine {
            text.push_str(&format!("   {waiting} {}\n", Got::parse(*at, frame.clone())));
        }
        text.push_str(&format!("it is {:?}; {:?}\n", Duration::from_nanos(self.now.0), self.query()));
        text.push_str(&self.context.counters().to_string());
        text
    }
}

impl Drop for Peer {
    /// Nothing may be left that the case did not expect.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.expect_nothing();
            self.expect_no_wc();
            self.expect_no_event();
            let allocations = self.cable.lock().unwrap().allocations;
            assert_eq!(allocations, 0, "allocations of the engine while it handled frames");
        }
    }
}

/// Frames under way, both directions.
#[derive(Default)]
struct Cable {
    to_engine: VecDeque<Vec<u8>>,
    from_engine: VecDeque<(Nanos, Vec<u8>)>,
    /// How many frames the port still takes.
    room: usize,
    /// What the port's buffers hold before the engine writes to them starts with this.
    poison: u8,
    /// What the engine has allocated while it took frames and made some.
    allocations: u64,
    /// How often the port was asked for a way.
    resolved: u64,
}

struct CablePort {
    capabilities: Capabilities,
    buffer: Box<[u8]>,
    /// What the buffer is filled with, until the engine has written to it.
    poisoned: Option<u8>,
    cable: Arc<Mutex<Cable>>,
}

impl PacketDriver for CablePort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        let frames = std::mem::take(&mut self.cable.lock().unwrap().to_engine);
        let allocated = allocation_counter::measure(|| {
            frames.iter().for_each(|frame| sink.take(RxFrame::borrowed(frame)))
        });
        self.cable.lock().unwrap().allocations += allocated.count_total;
        Ok(frames.len())
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let CablePort { buffer, poisoned, cable, .. } = self;
        let mut cable = cable.lock().unwrap();
        let mut sent = 0;
        while cable.room > 0 {
            // What the engine leaves unwritten shows up as these bytes.
            if *poisoned != Some(cable.poison) {
                *poisoned = Some(cable.poison);
                let bytes = buffer.iter_mut().enumerate();
                bytes.for_each(|(at, byte)| *byte = cable.poison.wrapping_add(at as u8));
            }
            let mut length = None;
            let allocated = allocation_counter::measure(|| length = source.write(buffer));
            cable.allocations += allocated.count_total;
            let Some(length) = length else { break };
            *poisoned = None;
            cable.room -= 1;
            cable.from_engine.push_back((now, buffer[..length].to_vec()));
            sent += 1;
        }
        Ok(sent)
    }

    fn wait(&mut self, _: Duration) -> Result<(), driver::Error> {
        Ok(())
    }

    fn resolve(&mut self, _: IpAddr) -> Result<driver::NextHop, driver::Error> {
        self.cable.lock().unwrap().resolved += 1;
        Ok(driver::NextHop::Found(PEER_MAC.0))
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}
