//! Bugs of other stacks in lifetimes: ports, queue pairs and lists that change or end.

use std::net::IpAddr;
use std::time::Duration;

use ferroce::driver::{self, Capabilities, FrameSink, FrameSource, Stats, loopback};
use ferroce::wire::{Opcode, Operation, Service};
use ferroce::{
    Access, AddressVector, Config, Context, Counter, Data, Error, Event, Gid, Memory, Nanos, PacketDriver,
    QpConfig, QpState, QpType, QpUpdate, Qpn, ReadyToReceive, ReceiveWorkRequest, SendFlags, SendOp,
    SendWorkRequest, Sge, SrqConfig, Transition, WcStatus,
};

use crate::packet::{NAK_INVALID, ack, packet, payload, read_response};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern};

/// A port whose interface no longer exists.
struct Gone(Capabilities);

impl Gone {
    fn error() -> driver::Error {
        driver::Error::InterfaceDown { name: "gone0".to_owned() }
    }
}

impl PacketDriver for Gone {
    fn capabilities(&self) -> &Capabilities {
        &self.0
    }
    fn rx_burst(&mut self, _: Nanos, _: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        Err(Gone::error())
    }
    fn tx_burst(&mut self, _: Nanos, _: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        Err(Gone::error())
    }
    fn wait(&mut self, _: Duration) -> Result<(), driver::Error> {
        Err(Gone::error())
    }
    fn resolve(&mut self, _: IpAddr) -> Result<driver::NextHop, driver::Error> {
        Err(Gone::error())
    }
    fn stats(&self) -> Stats {
        Stats::default()
    }
}

#[test]
fn cve_2024_57795_interface_that_goes_away() {
    let port = Gone(
        Capabilities::new("gone", "gone0".to_owned(), [2, 0, 0, 0, 0, 1], 4200)
            .description(String::new())
            .addresses(vec![[10, 0, 0, 1].into()]),
    );
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16).unwrap();
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let mr = context.register(pd, Memory::zeroed(64).unwrap(), Access::NONE).unwrap();
    // Verbs that need the port fail, each time; all others work.
    for _ in 0..3 {
        assert!(matches!(context.poll(Nanos(1)), Err(Error::Driver(_))));
        assert!(matches!(context.wait(Duration::ZERO), Err(Error::Driver(_))));
    }
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let address = AddressVector::new(Gid::from_ipv4([10, 0, 0, 2].into()), 0);
    let receive = ReadyToReceive::new(address, Qpn::new(9), ferroce::Psn::new(0));
    let refused = context.modify_qp(qp, Transition::ReadyToReceive(receive));
    assert!(matches!(refused, Err(Error::Driver(_))));
    assert!(matches!(context.create_ah(pd, &address), Err(Error::Driver(_))));
    context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] }).unwrap();
    context.modify_qp(qp, Transition::Error).unwrap();
    assert_eq!(context.poll_cq(cq).unwrap().map(|wc| wc.status), Some(WcStatus::WrFlushErr));
    context.destroy_qp(qp).unwrap();
    drop(context.deregister(mr).unwrap());
    context.destroy_cq(cq).unwrap();
    context.dealloc_pd(pd).unwrap();
}

#[test]
fn cve_2022_50885_cve_2022_50671_queue_pair_creation_that_fails() {
    let config = Config::default().max_qps(1);
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let mut context = Context::open(Box::new(port), &config).unwrap();
    let pd = context.alloc_pd().unwrap();
    let (send_cq, recv_cq) = (context.create_cq(16).unwrap(), context.create_cq(16).unwrap());
    let srq = context.create_srq(&SrqConfig::new(pd).max_wr(4).max_sge(1)).unwrap();
    let gone_cq = context.create_cq(1).unwrap();
    context.destroy_cq(gone_cq).unwrap();
    let gone_pd = context.alloc_pd().unwrap();
    context.dealloc_pd(gone_pd).unwrap();
    let gone_srq = context.create_srq(&SrqConfig::new(pd).max_wr(4).max_sge(1)).unwrap();
    context.destroy_srq(gone_srq).unwrap();
    let good = QpConfig::rc(pd, send_cq).recv_cq(recv_cq).srq(srq);
    let bad = [
        QpConfig::rc(gone_pd, send_cq),
        good.send_cq(gone_cq),
        good.recv_cq(gone_cq),
        good.srq(gone_srq),
        good.max_send_wr(0),
        good.max_send_wr(u32::MAX),
        good.max_recv_wr(65537),
        good.max_send_sge(33),
        good.max_recv_sge(0),
        good.max_inline_data(u32::MAX),
        QpConfig::uc(pd, send_cq).srq(srq),
    ];
    for round in 0..3 {
        for config in &bad {
            let refused = context.create_qp(config);
            assert!(
                matches!(refused, Err(Error::Invalid { .. } | Error::InvalidHandle { .. })),
                "{refused:?}"
            );
        }
        let qp = context.create_qp(&good).unwrap();
        assert!(matches!(context.create_qp(&good), Err(Error::Exhausted { kind: "QP", .. })), "{round}");
        context.destroy_qp(qp).unwrap();
        assert!(matches!(context.destroy_qp(qp), Err(Error::InvalidHandle { kind: "QP", .. })));
    }
    // None of the attempts holds references.
    context.destroy_srq(srq).unwrap();
    context.destroy_cq(send_cq).unwrap();
    context.destroy_cq(recv_cq).unwrap();
    context.dealloc_pd(pd).unwrap();
}

#[test]
fn ml_2026_07_packet_executed_again_for_each_wqe_after_err() {
    let mut peer = Peer::new();
    let mrs = [1, 2, 3].map(|wr_id| peer.post_recv(wr_id, 8));
    let target = peer.memory(&[0; 8]);
    let key = peer.remote(target).rkey;
    // The packet that ends the connection, with valid ones after it in the same burst.
    let bad = packet(Opcode::RC_SEND_ONLY, RQ).payload(&[0xee; 9]);
    let good = packet(Opcode::RC_SEND_ONLY, RQ + 1).payload(&[0xee; 8]);
    let write = packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, key, 8).payload(&[0xee; 8]);
    peer.inject_all([bad.clone(), bad.clone(), good, write, bad]);
    peer.expect_nak(NAK_INVALID, RQ, 0);
    peer.expect_nothing();
    peer.expect_wc(1, WcStatus::LocLenErr);
    peer.expect_wc(2, WcStatus::WrFlushErr);
    peer.expect_wc(3, WcStatus::WrFlushErr);
    peer.expect_no_wc();
    peer.expect_state(QpState::Error);
    peer.expect_counted(Counter::RxWrongState, 4);
    assert!(mrs.into_iter().chain([target]).all(|mr| peer.bytes(mr) == [0; 8]));
}

#[test]
fn ml_2026_07_max_dest_rd_atomic_changed_under_remembered_answers() {
    for depth in [0, 1, 2, 128] {
        let mut peer = Peer::with(Setup { max_dest_rd_atomic: 4, ..Setup::default() });
        let mr = peer.memory(&pattern(1024));
        let key = peer.remote(mr).rkey;
        let read = |i: u32| packet(Opcode::RC_READ_REQUEST, RQ + 4 * i).reth(0, key, 1024);
        for i in 0..4 {
            peer.inject(read(i));
            assert_eq!(payload(&peer.take_packets()), pattern(1024));
        }
        // One of them is being sent again while the number changes.
        peer.take_at_most(1);
        peer.inject(read(2));
        peer.modify(Transition::Drain);
        peer.expect_event(Event::SqDrained(peer.qp));
        peer.modify(Transition::Update(QpUpdate::default().max_dest_rd_atomic(depth)));
        assert_eq!(peer.query().max_dest_rd_atomic, depth);
        peer.take_at_most(usize::MAX);
        assert_eq!(payload(&peer.take_packets()), pattern(1024));
        // Remembered responses stay until their place is needed.
        for i in 0..4 {
            peer.inject(read(i));
            assert_eq!(payload(&peer.take_packets()), pattern(1024), "depth {depth}, READ {i}");
        }
        let requests = u32::from(depth.min(3)) + 1;
        peer.take_at_most(0);
        peer.inject_all((0..requests).map(|i| read(4 + i)));
        peer.take_at_most(usize::MAX);
        let answers = peer.take_packets();
        if depth < 4 {
            // One more than it may have outstanding now.
            assert_eq!(answers.last().unwrap().extensions.aeth.unwrap().syndrome_byte(), NAK_INVALID);
            assert_eq!(answers.len(), 4 * usize::from(depth) + 1);
            peer.expect_event(Event::QpReqErr(peer.qp));
        } else {
            assert_eq!(answers.len(), 16);
        }
    }
}

#[test]
fn cve_2026_64102_cve_2026_23242_length_that_goes_below_zero() {
    // A WRITE with more data than is left of its announced length.
    for (announced, last) in [(300, 45), (300, 256), (257, 2), (512, 257)] {
        let mut peer = Peer::new();
        let mr = peer.memory(&[0; 1024]);
        let key = peer.remote(mr).rkey;
        peer.inject(packet(Opcode::RC_WRITE_FIRST, RQ).reth(0, key, announced).payload(&[0xee; 256]));
        peer.inject(packet(Opcode::RC_WRITE_LAST, RQ + 1).payload(&vec![0xee; last]));
        peer.expect_nak(NAK_INVALID, RQ + 1, 0);
        peer.expect_event(Event::QpReqErr(peer.qp));
        assert_eq!(peer.bytes(mr)[256..], [0; 768]);
    }
    // A SEND that exceeds its receive in any packet.
    for packets in 1..4u32 {
        let mut peer = Peer::new();
        let mr = peer.post_recv(1, packets as usize * 256 - 1);
        let opcode = |i| if i == 0 { Opcode::RC_SEND_FIRST } else { Opcode::RC_SEND_MIDDLE };
        peer.inject_all((0..packets).map(|i| packet(opcode(i), RQ + i).payload(&[0xee; 256])));
        peer.expect_nak(NAK_INVALID, RQ + packets - 1, 0);
        peer.expect_wc(1, WcStatus::LocLenErr);
        assert_eq!(peer.bytes(mr)[packets as usize * 256 - 256..], vec![0; 255]);
    }
    // READ responses with more or less data than is left.
    for (opcode, length) in [
        (Opcode::RC_READ_RESPONSE_LAST, 45),
        (Opcode::RC_READ_RESPONSE_LAST, 43),
        (Opcode::RC_READ_RESPONSE_LAST, 256),
        (Opcode::RC_READ_RESPONSE_LAST, 0),
        (Opcode::RC_READ_RESPONSE_ONLY, 300),
    ] {
        let mut peer = Peer::new();
        let mr = peer.post_read(1, 300);
        peer.expect(Opcode::RC_READ_REQUEST, SQ);
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &[0xee; 256]));
        peer.inject(read_response(opcode, SQ + 1, &vec![0xee; length]));
        peer.expect_wc(1, WcStatus::LocLenErr);
        assert_eq!(peer.bytes(mr)[256..], [0; 44]);
    }
    // Invalid responses without a request.
    let mut peer = Peer::new();
    let answers = (0..=255)
        .filter_map(Opcode::from_byte)
        .filter(|opcode| !opcode.is_request() && opcode.operation() != Operation::Cnp)
        .filter(|opcode| *opcode != Opcode::SELECTIVE_ACKNOWLEDGE);
    for opcode in answers {
        for psn in [SQ - 1, SQ, SQ + 1] {
            peer.expect_dropped(peer.frame(&packet(opcode, psn)), Counter::StaleResponse);
        }
    }
}

#[test]
fn cve_2022_50666_cve_2026_74345_cve_2026_68417_queue_pair_in_use_before_it_is_ready() {
    // Its number is known from the start; it receives nothing before it has a peer.
    for state in [QpState::Reset, QpState::Init] {
        for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
            let mut peer = Peer::with(Setup { state, qp_type, ..Setup::default() });
            if state == QpState::Init {
                peer.post_recv(1, 64);
            }
            for opcode in (0..=255).filter_map(Opcode::from_byte) {
                let reason = match opcode.service() {
                    // Datagrams have no peer: the service is checked first.
                    Service::Cnp if qp_type == QpType::Ud => Counter::RpCnpIgnored,
                    _ if qp_type == QpType::Ud && opcode == Opcode::SELECTIVE_ACKNOWLEDGE => {
                        Counter::RxUnknownOpcode
                    }
                    service if qp_type == QpType::Ud && service != Service::Ud => Counter::RxWrongService,
                    _ => Counter::RxWrongState,
                };
                peer.expect_dropped(peer.frame(&packet(opcode, RQ).ack_req()), reason);
            }
        }
    }
    // A queue pair that has another peer now, and one that had one.
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 8]);
    let key = peer.remote(mr).rkey;
    let write = packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, key, 8).payload(&[0xee; 8]).ack_req();
    peer.modify(Transition::Reset);
    peer.expect_dropped(peer.frame(&write), Counter::RxWrongState);
    let old = peer.address;
    peer.address.source = Gid::from_ipv4([192, 0, 2, 99].into());
    peer.take_to(&Setup::default());
    let new = std::mem::replace(&mut peer.address, old);
    peer.expect_dropped(peer.frame(&write), Counter::RxWrongAddress);
    assert_eq!(peer.bytes(mr), [0; 8]);
    peer.address = new;
    peer.inject(write);
    peer.expect_ack(RQ, 1);
    assert_eq!(peer.bytes(mr), [0xee; 8]);
}

#[test]
fn cve_2026_45856_cve_2026_23243_sizes_from_the_application() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(64));
    let qp = peer.qp;
    let flags = SendFlags::SIGNALED;
    let mut send = |op: SendOp, data: Data<'_>| {
        peer.context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags })
    };
    let attribute = |result| match result {
        Err(Error::Invalid { attribute, .. }) => attribute,
        other => panic!("{other:?}"),
    };
    let piece = |length| Sge { mr, offset: 0, length };
    assert_eq!(attribute(send(SendOp::Send, Data::Sges(&[piece(1); 5]))), "sges");
    // Sums that exceed 32 bits.
    assert_eq!(attribute(send(SendOp::Send, Data::Sges(&[piece(u32::MAX), piece(2)]))), "length");
    assert_eq!(attribute(send(SendOp::Send, Data::Sges(&[piece(1 << 31), piece(1)]))), "length");
    assert_eq!(attribute(send(SendOp::Send, Data::Sges(&[piece(1 << 30); 4]))), "length");
    assert_eq!(attribute(send(SendOp::Send, Data::Inline(&[0; 65]))), "inline data");
    for length in [0, 7, 9, u32::MAX] {
        let add = SendOp::FetchAdd { remote: REMOTE, add: 1 };
        assert_eq!(attribute(send(add, Data::Sges(&[piece(length)]))), "length");
    }
    let refused = peer.context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[piece(1 << 31); 2] });
    assert_eq!(attribute(refused), "length");
    assert!(matches!(peer.context.create_cq(0), Err(Error::Invalid { .. })));
    assert!(matches!(peer.context.create_cq(u32::MAX), Err(Error::Invalid { .. })));
    drop(peer);
    // A piece outside its region fails its work request, and nothing of it is sent.
    for (offset, length) in [(0, 65), (64, 1), (u64::MAX, 1), (u64::MAX - 7, 8), (1 << 63, 1), (60, 5)] {
        let mut peer = Peer::new();
        let mr = peer.memory(&pattern(64));
        let sges = [Sge { mr, offset, length }];
        peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 2, sges: &sges }).unwrap();
        peer.post(1, SendOp::Send, &sges);
        peer.expect_nothing();
        peer.expect_wc(1, WcStatus::LocProtErr);
        peer.expect_wc(2, WcStatus::WrFlushErr);

        let mut peer = Peer::new();
        let mr = peer.memory(&pattern(64));
        let sges = [Sge { mr, offset, length }];
        peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 2, sges: &sges }).unwrap();
        peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(&[0xee]));
        peer.expect_nak(0x63, RQ, 0);
        peer.expect_wc(2, WcStatus::LocProtErr);
        assert_eq!(peer.bytes(mr), pattern(64));
    }
}

#[test]
fn cve_2024_42145_cve_2026_68425_received_lists_are_bounded() {
    let mut peer = Peer::with(Setup { qp_type: QpType::Ud, cq_capacity: 2, ..Setup::default() });
    peer.context.req_notify_cq(peer.cq, ferroce::Notify::Next).unwrap();
    for wr_id in 0..3 {
        peer.post_recv(wr_id, 64);
    }
    let datagram = packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, PEER_QPN).payload(b"flood");
    // The engine allocates nothing meanwhile, which the peer checks at its end.
    peer.inject_all(std::iter::repeat_n(datagram.clone(), 2));
    peer.inject_all(std::iter::repeat_n(datagram.clone(), 1));
    // The third completion found its queue full, which fails the queue pair.
    peer.expect_event(Event::Completion(peer.cq));
    peer.expect_event(Event::CqErr(peer.cq));
    peer.expect_event(Event::QpFatal(peer.qp));
    peer.expect_state(QpState::Error);
    peer.inject_all(std::iter::repeat_n(datagram.clone(), 10_000));
    peer.expect_counted(Counter::RxWrongState, 10_000);
    peer.expect_wc(0, WcStatus::Success);
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_no_wc();

    let mut peer = Peer::with(Setup { qp_type: QpType::Ud, ..Setup::default() });
    peer.post_recv(1, 64);
    peer.inject_all(std::iter::repeat_n(datagram.clone(), 10_000));
    peer.expect_counted(Counter::OutOfBuffer, 9_999);
    peer.expect_wc(1, WcStatus::Success);
    // There are no listeners here, so queue pairs 0 and 1 accept nothing.
    for qpn in [Qpn::new(0), Qpn::new(1)] {
        peer.inject_all(std::iter::repeat_n(datagram.clone().dest_qpn(qpn), 1000));
        peer.expect_counted(Counter::RxUnknownQp, 1000);
    }
}

#[test]
fn cve_2022_48925_address_changed_outside_the_state_check() {
    let mut peer = Peer::new();
    let ours = peer.query().address.unwrap();
    let other = ours.hop_limit(1);
    let update = Transition::Update(QpUpdate::default().address(other));
    let again = peer.transitions(&Setup::default());
    peer.post_send(1, b"under way");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    // Neither in RTS, nor while it drains, nor through earlier states.
    let refused = |peer: &mut Peer, transition| {
        let before = peer.query();
        let result = peer.context.modify_qp(peer.qp, transition);
        assert!(matches!(result, Err(Error::State { .. } | Error::Invalid { .. })), "{result:?}");
        assert_eq!(peer.query(), before);
    };
    refused(&mut peer, update);
    again.into_iter().for_each(|transition| refused(&mut peer, transition));
    peer.modify(Transition::Drain);
    refused(&mut peer, update);
    again.into_iter().for_each(|transition| refused(&mut peer, transition));
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.modify(update);
    assert_eq!(peer.query().address, Some(other));
    // A peer with another address is another peer.
    let group = AddressVector::new(Gid::from_ipv4([239, 0, 0, 1].into()), ours.sgid_index);
    refused(&mut peer, Transition::Update(QpUpdate::default().address(group)));
    peer.modify(Transition::Error);
    refused(&mut peer, update);
}
