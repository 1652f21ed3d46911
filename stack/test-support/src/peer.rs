//! The scripted peer: one queue pair under test, and all packets of the other end of its connection, written by the test.
//!
//! Time stands still until a case calls [`Peer::advance`], and the engine runs only inside the methods here, so a case is
//! the same every time. Expectations take what they name: `expect` the oldest packet sent, `expect_wc` the oldest
//! completion, `expect_event` the oldest event. Anything not taken fails the case when the peer is dropped.

mod expect;

use std::collections::HashMap;

use ferroce::wire::{Encapsulation, PathAddress, PathHeader};
use ferroce::{
    Access, AddressVector, Config, Context, Counter, Cq, Data, Destination, Event, Gid, Memory, Mr, Nanos,
    PKey, PathMtu, Pd, Psn, Qp, QpAttributes, QpConfig, QpState, QpType, Qpn, RKey, ReadyToReceive,
    ReadyToSend, ReceiveWorkRequest, RemoteAddress, RemoteMemory, RnrTimer, SendFlags, SendOp,
    SendWorkRequest, Sge, Srq, SrqConfig, Transition, UnreliablePath,
};

use crate::cable::{Cable, ENGINE_MAC, ENGINE_V4, ENGINE_V6, PEER_MAC, PEER_V4, PEER_V6};
use crate::packet::{self, BTH, IP, Script, UDP, reseal};

/// The peer's queue pair.
pub const PEER_QPN: Qpn = Qpn::new(0x77);
/// The PSN of the engine's first request, unless a case sets another.
pub const SQ: u32 = 1000;
/// The PSN of the peer's first request, unless a case sets another.
pub const RQ: u32 = 5000;
/// The Q_Key of datagrams, in both directions.
pub const QKEY: u32 = 0x1111_1111;
/// Memory of the peer.
pub const REMOTE: RemoteAddress = RemoteAddress { addr: 0x10_0000, rkey: RKey::new(0x5eed_beef) };

/// The settings of a case; all else is fixed.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The service.
    pub qp_type: QpType,
    /// Receives come from an SRQ of this depth.
    pub srq: Option<u32>,
    /// IPv6 addresses, or IPv4 otherwise.
    pub ipv6: bool,
    /// The path MTU.
    pub mtu: PathMtu,
    /// The final state of the queue pair.
    pub state: QpState,
    /// The peer's rights set with INIT.
    pub access: Access,
    /// The PSN of the engine's first request.
    pub sq_psn: u32,
    /// The PSN of the peer's first request.
    pub rq_psn: u32,
    /// ACK timeout, 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// Retransmissions before the connection ends.
    pub retry_count: u8,
    /// The same after RNR NAKs; 7 is unlimited.
    pub rnr_retry: u8,
    /// READs and atomics that the engine may have outstanding.
    pub max_rd_atomic: u8,
    /// READs and atomics that the peer may have outstanding.
    pub max_dest_rd_atomic: u8,
    /// The timer code of the engine's RNR NAKs.
    pub min_rnr_timer: u8,
    /// Completions that the CQ holds.
    pub cq_capacity: u32,
    /// Work requests that the send queue holds.
    pub max_send_wr: u32,
    /// Work requests that the receive queue holds.
    pub max_recv_wr: u32,
    /// Whether the context supports RoCE v1 too.
    pub roce_v1: bool,
    /// Whether both ends have negotiated selective repeat.
    pub selective_repeat: bool,
    /// As [`Config::reorder_packets`].
    pub reorder_packets: u16,
    /// As [`Config::flush`].
    pub flush: bool,
    /// As [`Config::atomic_write`].
    pub atomic_write: bool,
    /// As [`Config::drop_access_errors`].
    pub drop_access_errors: bool,
    /// Changes to the configuration.
    pub config: fn(Config) -> Config,
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
            config: |config| config,
        }
    }
}

impl Setup {
    /// The default, for another service.
    pub fn of(qp_type: QpType) -> Setup {
        Setup { qp_type, ..Setup::default() }
    }
}

/// All rights that host memory can grant.
pub fn all_access() -> Access {
    Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL
        | Access::REMOTE_INVALIDATE
        | Access::MW_BIND
}

/// `length` bytes; no two adjacent packets are equal.
pub fn pattern(length: usize) -> Vec<u8> {
    (0..length as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect()
}

/// `length` bytes of a region, from its start.
pub fn sge(mr: Mr, length: usize) -> Sge {
    Sge { mr, offset: 0, length: length as u32 }
}

/// The scripted peer and the engine under test.
pub struct Peer {
    /// The engine under test, with its verbs.
    pub context: Context,
    /// The protection domain of everything here.
    pub pd: Pd,
    /// The completion queue of all work.
    pub cq: Cq,
    /// The queue pair under test.
    pub qp: Qp,
    /// The queue for receives, with [`Setup::srq`].
    pub srq: Option<Srq>,
    /// The number of the queue pair under test.
    pub qpn: Qpn,
    /// The virtual time.
    pub now: Nanos,
    /// The addresses of the peer's packets.
    pub address: PathAddress,
    cable: Cable,
    /// The value of each counter at the last query.
    asked: HashMap<Counter, u64>,
}

impl Peer {
    /// A connection in RTS with the default [`Setup`].
    #[expect(clippy::new_without_default, reason = "what is dropped checks that nothing is left: no value")]
    pub fn new() -> Peer {
        Peer::with(Setup::default())
    }

    /// The queue pair in the state of the setup.
    pub fn with(setup: Setup) -> Peer {
        let cable = Cable::new();
        let Setup { roce_v1, flush, atomic_write, drop_access_errors, reorder_packets, .. } = setup;
        let config = Config::default()
            .seed([7; 32])
            .reorder_packets(reorder_packets)
            .roce_v1(roce_v1)
            .flush(flush)
            .atomic_write(atomic_write)
            .drop_access_errors(drop_access_errors);
        let mut context = Context::open(Box::new(cable.port(9000)), &(setup.config)(config)).unwrap();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(setup.cq_capacity).unwrap();
        let Setup { qp_type, max_send_wr, max_recv_wr, .. } = setup;
        let srq = setup.srq.map(|max_wr| context.create_srq(&SrqConfig::new(pd).max_wr(max_wr)).unwrap());
        let config =
            QpConfig::new(qp_type, pd, cq).srq(srq).max_send_wr(max_send_wr).max_recv_wr(max_recv_wr);
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
    pub fn take_to(&mut self, setup: &Setup) {
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

    /// The address vector of the peer, or of another GID.
    pub fn way_to(&self, gid: Gid) -> AddressVector {
        let sgid_index = self.context.port().gid_index_for(self.address.source).unwrap();
        AddressVector::new(gid, sgid_index).mac(PEER_MAC)
    }

    /// From RESET to RTS.
    pub fn transitions(&self, setup: &Setup) -> [Transition; 3] {
        let address = self.way_to(self.address.source);
        let path = UnreliablePath::new(address, PEER_QPN, Psn::new(setup.rq_psn)).path_mtu(setup.mtu);
        let sq_psn = Psn::new(setup.sq_psn);
        match setup.qp_type {
            QpType::Rc => [
                Transition::Init { access: setup.access },
                Transition::ReadyToReceive(
                    ReadyToReceive::new(address, PEER_QPN, path.rq_psn)
                        .path_mtu(setup.mtu)
                        .max_dest_rd_atomic(setup.max_dest_rd_atomic)
                        .min_rnr_timer(RnrTimer::new(setup.min_rnr_timer).unwrap())
                        .selective_repeat(setup.selective_repeat),
                ),
                Transition::ReadyToSend(
                    ReadyToSend::new(sq_psn)
                        .timeout(setup.timeout)
                        .retry_count(setup.retry_count)
                        .rnr_retry(setup.rnr_retry)
                        .max_rd_atomic(setup.max_rd_atomic),
                ),
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

    /// Another queue pair in addition to the one under test, with the same configuration and in RTS.
    pub fn another_qp(&mut self, setup: &Setup) -> Qp {
        let config = QpConfig::new(setup.qp_type, self.pd, self.cq).srq(self.srq);
        let qp = self.context.create_qp(&config).unwrap();
        for transition in self.transitions(setup) {
            self.context.modify_qp(qp, transition).unwrap();
        }
        qp
    }

    /// The peer's UD queue pair.
    pub fn destination(&mut self) -> Destination {
        let address = self.way_to(self.address.source);
        let ah = self.context.create_ah(self.pd, &address).unwrap();
        Destination { ah, qpn: PEER_QPN, qkey: QKEY }
    }

    /// A transition of the queue pair, which must succeed.
    pub fn modify(&mut self, transition: Transition) {
        self.context.modify_qp(self.qp, transition).unwrap();
    }

    /// The current attributes of the queue pair.
    pub fn query(&self) -> QpAttributes {
        self.context.query_qp(self.qp).unwrap()
    }

    /// The queue pair is in this state.
    #[track_caller]
    pub fn expect_state(&self, state: QpState) {
        assert_eq!(self.query().state, state, "state of the queue pair");
    }

    // Memory.

    /// Registers a copy of `bytes` with every right.
    pub fn memory(&mut self, bytes: &[u8]) -> Mr {
        self.memory_with(bytes, all_access())
    }

    /// Registers a copy of `bytes`.
    pub fn memory_with(&mut self, bytes: &[u8], access: Access) -> Mr {
        self.context.register(self.pd, Memory::copy_of(bytes).unwrap(), access).unwrap()
    }

    /// The contents of a region.
    pub fn bytes(&self, mr: Mr) -> &[u8] {
        self.context.bytes(mr).unwrap()
    }

    /// For changes by the application.
    pub fn bytes_mut(&mut self, mr: Mr) -> &mut [u8] {
        self.context.bytes_mut(mr).unwrap()
    }

    /// The address and key of a region for the peer.
    pub fn remote(&self, mr: Mr) -> RemoteMemory {
        self.context.remote(mr).unwrap()
    }

    // Work requests of the engine's application.

    /// Posts a signaled work request; it is sent with the next expectation.
    #[track_caller]
    pub fn post(&mut self, wr_id: u64, op: SendOp, data: &[Sge]) {
        self.post_flagged(wr_id, op, Data::Sges(data), SendFlags::SIGNALED);
    }

    /// Posts a work request with these flags; it is sent with the next expectation.
    #[track_caller]
    pub fn post_flagged(&mut self, wr_id: u64, op: SendOp, data: Data<'_>, flags: SendFlags) {
        self.context.post_send(self.qp, &SendWorkRequest { wr_id, op, data, flags }).unwrap();
    }

    /// Posts a signaled SEND of `bytes`, from separate memory.
    #[track_caller]
    pub fn post_send(&mut self, wr_id: u64, bytes: &[u8]) {
        let mr = self.memory(bytes);
        self.post(wr_id, SendOp::Send, &[sge(mr, bytes.len())]);
    }

    /// Posts a signaled WRITE of `bytes` to [`REMOTE`].
    #[track_caller]
    pub fn post_write(&mut self, wr_id: u64, bytes: &[u8]) {
        let mr = self.memory(bytes);
        self.post(wr_id, SendOp::Write(REMOTE), &[sge(mr, bytes.len())]);
    }

    /// Posts a signaled READ from [`REMOTE`] into zeroed memory, which it returns.
    #[track_caller]
    pub fn post_read(&mut self, wr_id: u64, length: usize) -> Mr {
        let mr = self.memory(&vec![0; length]);
        self.post(wr_id, SendOp::Read(REMOTE), &[sge(mr, length)]);
        mr
    }

    /// Posts a receive of up to `length` bytes into zeroed memory, which it returns; to the SRQ if
    /// there is one.
    #[track_caller]
    pub fn post_recv(&mut self, wr_id: u64, length: usize) -> Mr {
        let mr = self.memory(&vec![0; length]);
        let wr = ReceiveWorkRequest { wr_id, sges: &[sge(mr, length)] };
        match self.srq {
            Some(srq) => self.context.post_srq_recv(srq, &wr).unwrap(),
            None => self.context.post_recv(self.qp, &wr).unwrap(),
        }
        mr
    }

    // Packets of the peer.

    /// The frame of a packet from the peer, to be changed by the test.
    pub fn frame(&self, packet: &Script) -> Vec<u8> {
        packet.frame(&PathHeader::new(&self.address), self.qpn)
    }

    /// A frame from the peer with any bytes as its transport packet: opcode, the second byte of the BTH, and `length` bytes
    /// from the BTH to a correct ICRC.
    pub fn raw(&self, opcode: u8, flags: u8, qpn: Qpn, length: usize) -> Vec<u8> {
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

    /// The packet arrives, and the engine is polled.
    #[track_caller]
    pub fn inject(&mut self, packet: Script) {
        self.inject_all([packet]);
    }

    /// The packets arrive together, before the engine is polled.
    #[track_caller]
    pub fn inject_all(&mut self, packets: impl IntoIterator<Item = Script>) {
        self.arrive(packets);
        self.poll();
    }

    /// The packets arrive, and the engine is not polled yet.
    pub fn arrive(&mut self, packets: impl IntoIterator<Item = Script>) {
        let path = PathHeader::new(&self.address);
        packets.into_iter().for_each(|p| self.cable.send(p.frame(&path, self.qpn)));
    }

    /// The frame arrives, and the engine is polled.
    #[track_caller]
    pub fn inject_frame(&mut self, frame: Vec<u8>) {
        self.cable.send(frame);
        self.poll();
    }

    /// The frame arrives and is dropped: one count under `reason`, no reply, no completion, no event, and the queue pair is
    /// unchanged.
    #[track_caller]
    pub fn expect_dropped(&mut self, frame: Vec<u8>, reason: Counter) {
        self.expect_dropped_with(frame, &[reason], None);
    }

    /// The frame arrives and is dropped because of its P_Key, with an event.
    #[track_caller]
    pub fn expect_foreign(&mut self, frame: Vec<u8>, qp: Option<Qp>, pkey: PKey) {
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

    /// The packet is dropped silently: one count under `reason`, and the queue pair continues.
    #[track_caller]
    pub fn expect_refused(&mut self, packet: Script, reason: Counter) {
        let (state, before) = (self.query().state, self.context.counters().value(reason));
        self.inject(packet);
        self.expect_nothing();
        self.expect_no_wc();
        self.expect_no_event();
        self.expect_state(state);
        assert_eq!(self.context.counters().value(reason), before + 1, "{}", reason.name());
    }
}

impl Drop for Peer {
    /// Nothing may be left that the case did not expect.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.expect_nothing();
            self.expect_no_wc();
            self.expect_no_event();
            assert_eq!(self.cable.allocations(), 0, "allocations of the engine while it handled frames");
        }
    }
}
