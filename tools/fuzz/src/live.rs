//! A context with one connected queue pair, and memory with known contents.

mod memory;

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::wire::{
    Encapsulation, FlushType, NetworkHeader, Opcode, PKEY_DEFAULT, Packet, PathAddress, PathHeader,
    Selectivity, Service,
};
use ferroce::{
    Access, AddressVector, Config, Context, Counter, Cq, Gid, Mw, Nanos, PathMtu, Pd, Psn, Qp, QpAttributes,
    QpConfig, QpState, QpType, Qpn, RKey, ReadyToReceive, ReadyToSend, ReceiveWorkRequest, RemoteAddress,
    SendFlags, SendOp, Srq, SrqConfig, Transition, UnreliablePath, WorkCompletion,
};
use ferroce_test_support::cable::{Cable, ENGINE_MAC, ENGINE_V4, ENGINE_V6, PEER_MAC, PEER_V4, PEER_V6};
use ferroce_test_support::peer::{PEER_QPN, all_access};

use crate::input::Input;
use crate::packet::{self, Fields, Flags, QKEY};
use memory::{PLACES, Region, Window};
pub(crate) use memory::{Piece, REGION, part, total};

/// The most outstanding work requests of a queue.
pub(crate) const DEPTH: u32 = 8;
/// Bytes of the port's longest packet.
const MTU: u32 = 1200;
/// Packets in flight.
pub(crate) const WINDOW: u32 = 32;
/// Memory of the peer.
pub(crate) const REMOTE: RemoteAddress =
    RemoteAddress { addr: 0xffff_ffff_ffff_e000, rkey: RKey::new(0x5eed_beef) };
/// Six kinds for a queue pair, two for a completion queue, one for a shared receive queue, one for the port.
const MAX_EVENTS: u32 = 10;
/// The attributes of the connected queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) ipv6: bool,
    pub(crate) mtu: PathMtu,
    pub(crate) access: Access,
    pub(crate) rts: bool,
    pub(crate) sq_psn: Psn,
    pub(crate) rq_psn: Psn,
    pub(crate) rd_atomic: u8,
    pub(crate) dest_rd_atomic: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) cq_capacity: u32,
    pub(crate) service: QpType,
    /// Whether receive WRs come from a shared receive queue.
    pub(crate) shared_receives: bool,
    /// With selective repeat: the most packets that can be held.
    pub(crate) reorder_packets: Option<u16>,
}

impl Setup {
    /// Parses the first bytes of an input.
    pub(crate) fn read(input: &mut Input<'_>) -> Setup {
        let (kind, counts, psn) = (input.u8(), input.u8(), input.u8());
        let psn = Psn::new(if psn & 1 == 0 { 0x1000 } else { 0xff_fffc } + u32::from(psn >> 1));
        Setup {
            ipv6: kind & 1 != 0,
            mtu: [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu256]
                [usize::from(kind >> 1 & 3)],
            access: if kind & 8 == 0 { all_access() } else { Access::LOCAL_WRITE },
            rts: kind & 16 == 0,
            sq_psn: psn,
            rq_psn: psn,
            rd_atomic: [16, 1, 2, 4][usize::from(counts & 3)],
            dest_rd_atomic: [16, 1, 2, 0][usize::from(counts >> 2 & 3)],
            retry_count: [7, 1, 0, 2][usize::from(counts >> 4 & 3)],
            rnr_retry: [7, 0, 1, 6][usize::from(counts >> 6)],
            cq_capacity: if kind & 32 == 0 { 256 } else { 2 },
            service: [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][usize::from(kind >> 6)],
            shared_receives: match kind >> 6 {
                0 | 2 => false,
                1 => true,
                _ => kind & 8 != 0,
            },
            reorder_packets: None,
        }
    }

    /// The bytes that [`read`](Setup::read) parses as the usual setup, with this service, path MTU and version of IP.
    pub(crate) fn usual(service: QpType, mtu: PathMtu, ipv6: bool) -> [u8; 3] {
        let service = match service {
            QpType::Rc => 0,
            QpType::Uc => 2,
            QpType::Ud => 3,
        };
        let mtu = match mtu {
            PathMtu::Mtu256 => 0,
            PathMtu::Mtu512 => 1,
            _ => 2,
        };
        [u8::from(ipv6) | mtu << 1 | service << 6, 0, 0]
    }
}

pub(crate) struct Live {
    pub(crate) context: Context,
    pub(crate) cq: Cq,
    srq: Option<Srq>,
    mw: Mw,
    /// The memory that the window opens, while it is bound.
    pub(crate) window: Option<Window>,
    /// The posted binds that were not observed yet, oldest first.
    binds: VecDeque<(Piece, Access)>,
    pub(crate) qp: Qp,
    pub(crate) qpn: Qpn,
    pub(crate) setup: Setup,
    pub(crate) regions: [Option<Region>; PLACES],
    /// A key that is no longer valid.
    stale_key: RKey,
    pd: Pd,
    foreign_pd: Pd,
    cable: Cable,
    path: PathHeader,
    foreign_path: PathHeader,
    /// The GIDs of the peer and of the engine.
    gids: (Gid, Gid),
    now: Nanos,
    frame: Vec<u8>,
}

impl Live {
    pub(crate) fn new(setup: Setup) -> Live {
        let cable = Cable::new();
        let config = Config::default()
            .reorder_packets(setup.reorder_packets.unwrap_or(0))
            .seed([7; 32])
            .max_pds(2)
            .max_mrs(PLACES as u32)
            .max_cqs(1)
            .max_qps(1)
            .max_srqs(1)
            .max_ahs(1)
            .max_mcast_attachments(1)
            .max_connections(1)
            .max_listeners(1)
            .max_mws(1)
            .flush(true)
            .atomic_write(true)
            .max_cm_channels(0)
            .window(WINDOW)
            .roce_v1(false)
            .drop_access_errors(false);
        let mut context =
            Context::open(Box::new(cable.port(MTU)), &config).expect("the configuration is right");
        let (pd, foreign_pd) = (context.alloc_pd().expect("room"), context.alloc_pd().expect("room"));
        let cq = context.create_cq(setup.cq_capacity).expect("room");
        let mw = context.alloc_mw(pd).expect("room");
        let srq = setup.shared_receives.then(|| {
            let config = SrqConfig::new(pd).max_wr(DEPTH);
            context.create_srq(&config).expect("room")
        });
        let (qp, qpn) = create_qp(&mut context, &setup, pd, cq, srq);
        let (peer, own) = if setup.ipv6 { (PEER_V6, ENGINE_V6) } else { (PEER_V4, ENGINE_V4) };
        let address = PathAddress {
            source_mac: PEER_MAC,
            destination_mac: ENGINE_MAC,
            vlan: None,
            source: peer.into(),
            destination: own.into(),
            encapsulation: Encapsulation::RoceV2 { source_port: 0xd123 },
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            identification: 0,
        };
        // A sender with all the right numbers but another address.
        let foreign = PathAddress {
            source: if setup.ipv6 { PEER_V4 } else { [192, 0, 2, 3].into() }.into(),
            ..address
        };
        let mut live = Live {
            context,
            cq,
            srq,
            mw,
            window: None,
            binds: VecDeque::new(),
            qp,
            qpn,
            setup,
            regions: Default::default(),
            stale_key: RKey::new(0),
            pd,
            foreign_pd,
            cable,
            path: PathHeader::new(&address),
            foreign_path: PathHeader::new(&foreign),
            gids: (address.source, address.destination),
            now: Nanos(1_000_000_000),
            frame: vec![0; 8192],
        };
        for place in 0..PLACES {
            live.register(place);
        }
        live.connect();
        live
    }

    /// Moves the queue pair to the error state. Returns the packets that were sent first, as with each verb that ends
    /// the queue pair's sending: it sends the ACK that it owes, and everything before it. They are checked against the
    /// state before the verb; after it nothing may be sent.
    pub(crate) fn stop(&mut self) -> Vec<Vec<u8>> {
        self.modify(Transition::Error);
        self.cable.take()
    }

    /// RESET: posted work requests are discarded, and the window's bind as well. Returns the packets that were sent
    /// first.
    pub(crate) fn reset(&mut self) -> Vec<Vec<u8>> {
        self.modify(Transition::Reset);
        assert_eq!(self.poll_cq(), None, "a completion of what was before RESET");
        self.drain_events();
        self.cable.take()
    }

    /// The queue pair has flushed its binds, or was destroyed with its window.
    fn forget_window(&mut self) {
        self.binds.clear();
        self.window = None;
        self.observe_window();
    }

    /// Destroys the queue pair and creates another one. Returns the packets that were sent first.
    pub(crate) fn replace(&mut self) -> Vec<Vec<u8>> {
        let sent = self.destroy_qp();
        (self.qp, self.qpn) = create_qp(&mut self.context, &self.setup, self.pd, self.cq, self.srq);
        sent
    }

    /// Destroys the queue pair. Returns the packets that were sent first.
    pub(crate) fn destroy_qp(&mut self) -> Vec<Vec<u8>> {
        self.drain_events();
        self.context.destroy_qp(self.qp).expect("a queue pair can always be destroyed");
        assert_eq!(self.poll_cq(), None, "a completion of a queue pair that is gone");
        assert_eq!(self.context.next_timeout(), None, "a timer of a queue pair that is gone");
        self.drain_events();
        self.cable.take()
    }

    /// From RESET to the state of the setup.
    pub(crate) fn connect(&mut self) {
        self.forget_window();
        let setup = self.setup;
        let sgid_index = self.context.port().gid_index_for(self.gids.0).expect("one of each kind");
        let address = AddressVector::new(self.gids.0, sgid_index).mac(PEER_MAC);
        let Setup { mtu: path_mtu, rq_psn, sq_psn, access, .. } = setup;
        let steps = match setup.service {
            QpType::Rc => [
                Transition::Init { access },
                Transition::ReadyToReceive(
                    ReadyToReceive::new(address, PEER_QPN, rq_psn)
                        .max_dest_rd_atomic(setup.dest_rd_atomic)
                        .path_mtu(path_mtu)
                        .selective_repeat(setup.reorder_packets.is_some()),
                ),
                Transition::ReadyToSend(
                    ReadyToSend::new(sq_psn)
                        .timeout(8)
                        .retry_count(setup.retry_count)
                        .rnr_retry(setup.rnr_retry)
                        .max_rd_atomic(setup.rd_atomic),
                ),
            ],
            QpType::Uc => [
                Transition::Init { access },
                Transition::ReadyToReceiveUnreliable(
                    UnreliablePath::new(address, PEER_QPN, rq_psn).path_mtu(path_mtu),
                ),
                Transition::ReadyToSendUnreliable { sq_psn },
            ],
            QpType::Ud => [
                Transition::InitDatagram { qkey: QKEY },
                Transition::ReadyToReceiveDatagrams,
                Transition::ReadyToSendUnreliable { sq_psn },
            ],
        };
        for step in &steps[..if setup.rts { 3 } else { 2 }] {
            self.modify(*step);
        }
        self.cable.set_room(usize::MAX);
    }

    pub(crate) fn modify(&mut self, transition: Transition) {
        self.context.modify_qp(self.qp, transition).expect("the transition is lawful");
    }

    pub(crate) fn query(&self) -> QpAttributes {
        self.context.query_qp(self.qp).expect("it lives to the end")
    }

    /// Whether the queue pair accepts packets.
    pub(crate) fn is_up(state: QpState) -> bool {
        matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Completions that were lost.
    pub(crate) fn overflows(&self) -> u64 {
        self.context.counters().value(Counter::CqOverflow)
    }

    pub(crate) fn set_room(&mut self, room: usize) {
        self.cable.set_room(room);
    }

    /// Sets the port's room from a byte of the input: fewer than 8 frames, or unlimited.
    pub(crate) fn change_room(&mut self, byte: u8) {
        self.set_room(if byte < 8 { byte.into() } else { usize::MAX });
    }

    /// Builds the frame of a packet of the peer.
    pub(crate) fn build(&mut self, opcode: Opcode, fields: &Fields) -> Vec<u8> {
        let foreign = fields.flags.has(Flags::FOREIGN_SOURCE);
        let path = if foreign { &self.foreign_path } else { &self.path };
        let mut frame = std::mem::take(&mut self.frame);
        frame.resize(8192, 0);
        let length = packet::build(&mut frame, path, self.qpn, opcode, fields);
        frame.truncate(length);
        frame
    }

    /// Returns the buffer of [`build`](Live::build).
    pub(crate) fn recycle(&mut self, frame: Vec<u8>) {
        self.frame = frame;
    }

    /// An arbitrary frame from the input: if it has a BTH and an ICRC and the first byte says so, the BTH names the
    /// queue pair and the ICRC is corrected.
    pub(crate) fn raw(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let (kind, length) = (input.u8(), usize::from(input.u16() % 1300));
        let mut frame = input.bytes(length).to_vec();
        if kind & 1 == 0 {
            let start = self.path.len();
            if kind & 2 == 0 && frame.len() > start + 12 {
                // The peer's own addresses; the lengths are not corrected.
                let mut template = [0; 128];
                let none = Fields::default();
                packet::build(&mut template, &self.path, self.qpn, Opcode::RC_SEND_ONLY, &none);
                frame[..12].copy_from_slice(&template[..12]);
                let addresses = if self.setup.ipv6 { 22..54 } else { 26..34 };
                frame[addresses.clone()].copy_from_slice(&template[addresses]);
                frame[start + 5..start + 8].copy_from_slice(&template[start + 5..start + 8]);
            }
            packet::seal(&mut frame);
        }
        frame
    }

    /// The frame as a packet for this queue pair, if the engine must accept it as one.
    pub(crate) fn admitted<'f>(&self, frame: &'f [u8]) -> Option<Packet<'f>> {
        let packet = Packet::parse(frame).ok()?;
        let (service, network) = (self.setup.service, &packet.network());
        let right = packet.bth.dest_qpn() == self.qpn
            && network.header != NetworkHeader::Grh
            && PKEY_DEFAULT.admits(packet.bth.pkey())
            && packet.opcode.service()
                == match service {
                    QpType::Rc => Service::Rc,
                    QpType::Uc => Service::Uc,
                    QpType::Ud => Service::Ud,
                };
        let is_peer = (network.source, network.destination) == self.gids;
        // Datagrams may come from any source.
        let is_own = [ENGINE_V4, ENGINE_V6].iter().any(|own| Gid::from(*own) == network.destination);
        let from = if service == QpType::Ud { is_own } else { is_peer };
        (right && from).then_some(packet)
    }

    /// Posts a receive WR to the queue of this queue pair. Returns whether there was room.
    pub(crate) fn post_receive(&mut self, wr_id: u64, pieces: &[Piece]) -> bool {
        let Some(sges) = self.sges(pieces) else { return false };
        let wr = ReceiveWorkRequest { wr_id, sges: &sges };
        let posted = match self.srq {
            Some(srq) => self.context.post_srq_recv(srq, &wr),
            None => self.context.post_recv(self.qp, &wr),
        };
        posted.is_ok()
    }

    /// Receive WRs in the shared queue that no queue pair has consumed.
    pub(crate) fn shared_receives(&self) -> Option<usize> {
        let srq = self.srq?;
        Some(self.context.query_srq(srq).expect("it lives to the end").posted as usize)
    }

    pub(crate) fn arm_srq(&mut self, limit: u32) {
        if let Some(srq) = self.srq {
            self.context.arm_srq(srq, limit % (DEPTH + 1)).expect("a limit within the depth");
        }
    }

    /// Delivers the frame (if any), and polls the engine. Returns the frames that it sends.
    pub(crate) fn turn(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        assert!(self.cable.take().is_empty(), "a verb has sent that ends nothing");
        if !frame.is_empty() {
            self.cable.send(frame.to_vec());
        }
        self.context.poll(self.now).expect("the cable does not break");
        self.cable.take()
    }

    /// Advances the clock to the next timer, or by `by` if there is none that soon.
    pub(crate) fn advance(&mut self, by: Duration) {
        let next = self.context.next_timeout().unwrap_or(Nanos::NEVER);
        self.now = (self.now + by).min(next.max(self.now + Duration::from_nanos(1)));
    }

    pub(crate) fn poll_cq(&mut self) -> Option<WorkCompletion> {
        self.context.poll_cq(self.cq).expect("it lives to the end")
    }

    /// Reads all events; they are bounded.
    pub(crate) fn drain_events(&mut self) {
        let mut count = 0;
        while self.context.next_event().is_some() {
            count += 1;
        }
        assert!(count <= MAX_EVENTS, "{count} events wait, and each kind once for each object: {MAX_EVENTS}");
    }

    /// A send WR chosen by the fuzzer.
    pub(crate) fn read_send(&self, kind: u8, choice: u8) -> (SendOp, SendFlags) {
        let number = u64::from(choice) * 0x0101_0101_0101;
        let op = match kind & 15 {
            0 => SendOp::Send,
            1 => SendOp::SendWithImm(choice.into()),
            2 => SendOp::SendWithInvalidate(RKey::new(choice.into())),
            3 | 4 => SendOp::Write(REMOTE),
            5 => SendOp::WriteWithImm(REMOTE, choice.into()),
            6..=9 => SendOp::Read(REMOTE),
            10 | 11 => SendOp::CompareSwap { remote: REMOTE, compare: number, swap: !number },
            12 | 13 => SendOp::FetchAdd { remote: REMOTE, add: number },
            14 => SendOp::LocalInvalidate(self.key(choice)),
            _ if choice & 1 == 0 => SendOp::AtomicWrite(REMOTE),
            _ => SendOp::Flush {
                remote: REMOTE,
                length: choice.into(),
                selectivity: if choice & 2 == 0 { Selectivity::Range } else { Selectivity::MemoryRegion },
                kind: FlushType { global_visibility: true, persistence: choice & 4 != 0 },
            },
        };
        let flags =
            SendFlags::default().signaled(kind & 16 == 0).fence(kind & 32 != 0).solicited(kind & 64 != 0);
        (op, flags)
    }

    /// Destroys all objects after the queue pair: none may still be in use.
    pub(crate) fn destroy(mut self) {
        let sent = self.turn(&[]);
        assert!(sent.is_empty(), "frames of a queue pair that is gone: {sent:02x?}");
        self.forget_window();
        if let Some(srq) = self.srq {
            self.context.destroy_srq(srq).expect("nobody takes from it any more");
        }
        for place in 0..PLACES {
            self.deregister(place, false);
        }
        assert_eq!(
            self.context.poll_cq(self.cq).expect("it is still there"),
            None,
            "a completion of a ghost"
        );
        self.context.destroy_cq(self.cq).expect("nothing completes there any more");
        self.context.dealloc_mw(self.mw).expect("a window can always be freed");
        self.context.dealloc_pd(self.pd).expect("nothing belongs to it any more");
        self.context.dealloc_pd(self.foreign_pd).expect("nothing belongs to it any more");
    }
}

fn create_qp(context: &mut Context, setup: &Setup, pd: Pd, cq: Cq, srq: Option<Srq>) -> (Qp, Qpn) {
    let config = QpConfig::new(setup.service, pd, cq).srq(srq).max_send_wr(DEPTH).max_recv_wr(DEPTH);
    let qp = context.create_qp(&config).expect("room");
    (qp, context.query_qp(qp).expect("it was just made").qpn)
}
