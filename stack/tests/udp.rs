//! Contexts over UDP sockets, on addresses of the loopback interface, for which no privilege is needed. Transferred data is
//! compared; forged packets are sent from plain sockets.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use ferroce::driver::udp::{Udp, UdpConfig};
use ferroce::wire::{
    Aeth, Bth, Encapsulation, FrameBuilder, Opcode, Packet, PathAddress, PathHeader, Reth, Syndrome,
};
use ferroce::*;

const MEMORY: usize = 1 << 20;

/// A context with a region, and queue pairs to others.
struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
    mr: Mr,
}

/// With shared memory off: otherwise contexts of one host would use it.
fn sockets_of(address: IpAddr) -> UdpConfig {
    UdpConfig::new(address).shared_memory(SharedMemory::Off)
}

fn loopback(last: u8) -> IpAddr {
    Ipv4Addr::new(127, 80, 0, last).into()
}

fn access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
}

impl End {
    fn open(config: UdpConfig) -> End {
        End::on(Udp::open(&config).unwrap())
    }

    fn on(port: Udp) -> End {
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(4096).unwrap();
        let mr = context.register(pd, Memory::zeroed(MEMORY).unwrap(), access()).unwrap();
        End { context, pd, cq, mr }
    }

    fn qp(&mut self) -> (Qp, Qpn) {
        let qp = self.context.create_qp(&QpConfig::rc(self.pd, self.cq)).unwrap();
        (qp, self.context.query_qp(qp).unwrap().qpn)
    }

    fn gid(&self) -> Gid {
        self.context.port().gids[0].gid
    }

    fn connect(&mut self, qp: Qp, way: AddressVector, dest_qpn: Qpn, path_mtu: PathMtu) {
        let receive = ReadyToReceive::new(way, dest_qpn, PSN).path_mtu(path_mtu);
        let send = ReadyToSend::new(PSN);
        self.context.modify_qp(qp, Transition::Init { access: access() }).unwrap();
        self.context.modify_qp(qp, Transition::ReadyToReceive(receive)).unwrap();
        self.context.modify_qp(qp, Transition::ReadyToSend(send)).unwrap();
    }

    fn count(&self, counter: Counter) -> u64 {
        self.context.counters().value(counter)
    }

    fn fill(&mut self, n: u64, start: u64, length: u32) {
        let range = start as usize..(start + u64::from(length)) as usize;
        pattern(n, &mut self.context.bytes_mut(self.mr).unwrap()[range]);
    }

    fn check(&self, n: u64, start: u64, length: u32) {
        let mut expected = vec![0; length as usize];
        pattern(n, &mut expected);
        let range = start as usize..(start + u64::from(length)) as usize;
        assert!(self.context.bytes(self.mr).unwrap()[range] == expected, "message {n} of {length} bytes");
    }
}

const PSN: Psn = Psn::new(0xff_fff0);

/// The contents of message `n`: every message differs from its neighbours everywhere.
fn pattern(n: u64, bytes: &mut [u8]) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = (n.wrapping_mul(0x9e37_79b9) as usize ^ at ^ at >> 8).wrapping_mul(167) as u8;
    }
}

/// Polls both until `done` returns true.
fn drive(ends: &mut [&mut End], clock: &mut Clock, mut done: impl FnMut(&mut [&mut End]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(ends) {
        assert!(Instant::now() < deadline, "nothing moves");
        for end in ends.iter_mut() {
            end.context.poll(clock.now()).unwrap();
        }
    }
}

/// WRITEs, READs and SENDs of all lengths from `a` to `b`, four at a time, compared at their end.
fn exchange(a: &mut End, b: &mut End, qps: (Qp, Qp), messages: u64) {
    const LENGTHS: [u32; 10] = [0, 1, 1023, 1024, 1025, 4097, 40_001, 65_536, 262_144, 8];
    const SLOT: u64 = 1 << 18;
    let mut clock = Clock::start();
    for n in 0..messages {
        let length = LENGTHS[(n % 10) as usize];
        let start = n / 10 % 4 * SLOT;
        let local = [Sge { mr: a.mr, offset: start, length }];
        let remote = b.context.remote(b.mr).unwrap();
        let remote = RemoteAddress { addr: remote.addr + start, rkey: remote.rkey };
        let kind = n / 40 % 3;
        let op = match kind {
            0 => SendOp::Write(remote),
            1 => SendOp::Read(remote),
            _ => SendOp::Send,
        };
        if kind == 1 { &mut *b } else { &mut *a }.fill(n, start, length);
        if kind == 2 {
            let sges = [Sge { mr: b.mr, offset: start, length }];
            b.context.post_recv(qps.1, &ReceiveWorkRequest { wr_id: n, sges: &sges }).unwrap();
        }
        let wr = SendWorkRequest { wr_id: n, op, data: Data::Sges(&local), flags: SendFlags::SIGNALED };
        a.context.post_send(qps.0, &wr).unwrap();
        let (mut sent, mut received) = (false, kind != 2);
        drive(&mut [a, b], &mut clock, |ends| {
            for (end, done) in ends.iter_mut().zip([&mut sent, &mut received]) {
                if let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
                    assert_eq!((wc.status, wc.wr_id, *done), (WcStatus::Success, n, false));
                    *done = true;
                }
            }
            sent && received
        });
        if kind == 1 { &*a } else { &*b }.check(n, start, length);
    }
}

fn pair(a: UdpConfig, b: UdpConfig, path_mtu: PathMtu) -> ([End; 2], [Qp; 2]) {
    let mut ends = [End::open(a), End::open(b)];
    let [(qp_a, qpn_a), (qp_b, qpn_b)] = ends.each_mut().map(End::qp);
    let [gid_a, gid_b] = [ends[0].gid(), ends[1].gid()];
    ends[0].connect(qp_a, AddressVector::new(gid_b, 0), qpn_b, path_mtu);
    ends[1].connect(qp_b, AddressVector::new(gid_a, 0), qpn_a, path_mtu);
    (ends, [qp_a, qp_b])
}

#[test]
fn everything_arrives_once_and_exact() {
    for path_mtu in [PathMtu::Mtu1024, PathMtu::Mtu4096] {
        for (segmentation, aggregation) in [(true, true), (true, false), (false, true), (false, false)] {
            let config =
                |last| sockets_of(loopback(last)).segmentation(segmentation).aggregation(aggregation);
            let ([mut a, mut b], qps) = pair(config(1), config(2), path_mtu);
            exchange(&mut a, &mut b, (qps[0], qps[1]), 240);
            for end in [&a, &b] {
                let counters = end.context.counters();
                assert!(counters.drops().all(|(_, count)| count == 0), "{counters}");
                assert_eq!(end.count(Counter::RxIdentificationSolved), 0);
                // A receiver that gets the segments one by one must determine their identifications.
                let found = end.count(Counter::RxIdentificationLikely);
                assert_eq!(found > 0, segmentation && !aggregation, "{found}");
            }
        }
    }
}

/// The headers of packets of a peer at `from`.
fn path(from: SocketAddr, to: IpAddr, identification: u16) -> PathHeader {
    let path = PathHeader::new(&PathAddress {
        source_mac: MacAddr::default(),
        destination_mac: MacAddr::default(),
        vlan: None,
        source: from.ip().into(),
        destination: to.into(),
        encapsulation: Encapsulation::RoceV2 { source_port: from.port() },
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        identification,
    });
    path.without_link()
}

/// A packet with eight bytes of payload, as from such a peer, with an identification that its kernel may assign.
fn packet(
    from: SocketAddr,
    to: IpAddr,
    identification: u16,
    bth: Bth,
    put: impl Fn(&mut FrameBuilder<'_>),
) -> Vec<u8> {
    let path = path(from, to, identification);
    let mut buffer = [0; 256];
    let mut frame = FrameBuilder::start(&mut buffer, &path, bth, 8).unwrap();
    put(&mut frame);
    frame.payload().copy_from_slice(b"identity");
    let length = frame.finish();
    buffer[..length].to_vec()
}

/// A context, and a socket that acts as the peer of its queue pair.
fn with_forger(own: u8, peer: u8) -> (End, Qpn, UdpSocket) {
    let socket = UdpSocket::bind((loopback(peer), 0)).unwrap();
    let mut end = End::open(sockets_of(loopback(own)));
    let (qp, qpn) = end.qp();
    end.connect(qp, AddressVector::new(loopback(peer).into(), 0), Qpn::new(77), PathMtu::Mtu1024);
    (end, qpn, socket)
}

fn write_only(end: &End, from: &UdpSocket, to: IpAddr, qpn: Qpn, identification: u16, psn: Psn) -> Vec<u8> {
    let remote = end.context.remote(end.mr).unwrap();
    let bth = Bth::new(Opcode::RC_WRITE_ONLY, qpn, psn);
    packet(from.local_addr().unwrap(), to, identification, bth, |frame| {
        frame.put(&Reth::new(remote.addr, remote.rkey, 8));
    })
}

fn poll_until(end: &mut End, counter: Counter, value: u64) {
    let mut clock = Clock::start();
    drive(&mut [end], &mut clock, |ends| ends[0].count(counter) >= value);
}

#[test]
fn unknown_identifications_are_determined() {
    let (mut end, qpn, peer) = with_forger(3, 4);
    let own = loopback(3);
    // The guess is 0; small numbers, and those after the last one, are likely.
    let cases =
        [(0, 0, 0), (5, 1, 0), (63, 2, 0), (64, 3, 0), (40_000, 3, 1), (40_001, 4, 1), (39_999, 4, 2)];
    for (n, (identification, likely, solved)) in cases.into_iter().enumerate() {
        let psn = Psn::new(PSN.value() + n as u32);
        let packet = write_only(&end, &peer, own, qpn, identification, psn);
        end.context.bytes_mut(end.mr).unwrap()[..8].fill(0);
        peer.send_to(&packet[28..], (own, 4791)).unwrap();
        poll_until(&mut end, Counter::RxWriteRequests, n as u64 + 1);
        assert_eq!(&end.context.bytes(end.mr).unwrap()[..8], b"identity");
        let counted =
            (end.count(Counter::RxIdentificationLikely), end.count(Counter::RxIdentificationSolved));
        assert_eq!(counted, (likely, solved), "identification {identification}");
    }
    assert_eq!(end.count(Counter::RcvdPkts), cases.len() as u64);
}

/// One wrong bit anywhere after the UDP header is detected, except those that routers may change.
#[test]
fn damage_is_detected() {
    let (mut end, qpn, peer) = with_forger(5, 6);
    let own = loopback(5);
    let good = write_only(&end, &peer, own, qpn, 0, PSN).split_off(28);
    let mut sent = 0;
    for at in (0..good.len()).filter(|at| *at != 4) {
        // With the length of this packet, none of these can be explained by an identification.
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        peer.send_to(&bad, (own, 4791)).unwrap();
        sent += 1;
    }
    let mut clock = Clock::start();
    let dropped = |end: &End| end.context.counters().drops().map(|(_, count)| count).sum::<u64>();
    drive(&mut [&mut end], &mut clock, |ends| dropped(ends[0]) == sent);
    // A damaged opcode or pad is detected before the ICRC is checked.
    assert!(end.count(Counter::RxIcrcEncapsulated) > sent - 12, "{}", end.context.counters());
    assert_eq!((end.count(Counter::RcvdPkts), end.count(Counter::RxWriteRequests)), (0, 0));
    assert!(end.context.bytes(end.mr).unwrap()[..8].iter().all(|byte| *byte == 0));
    peer.send_to(&good, (own, 4791)).unwrap();
    poll_until(&mut end, Counter::RxWriteRequests, 1);
    assert_eq!(&end.context.bytes(end.mr).unwrap()[..8], b"identity");
}

/// The engine's packets, received by a plain socket: from port 4791, with an ICRC that is correct for identification 0.
#[test]
fn packets_are_sent_as_written() {
    let own = loopback(7);
    let peer = UdpSocket::bind((loopback(8), 4791)).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut end = End::open(sockets_of(own));
    let (qp, _) = end.qp();
    let way = AddressVector::new(loopback(8).into(), 0).traffic_class(0x6a).hop_limit(9);
    end.connect(qp, way, Qpn::new(77), PathMtu::Mtu1024);
    let wr = SendWorkRequest {
        wr_id: 1,
        op: SendOp::Send,
        data: Data::Inline(b"identity"),
        flags: SendFlags::SIGNALED,
    };
    end.context.post_send(qp, &wr).unwrap();
    let mut clock = Clock::start();
    end.context.poll(clock.now()).unwrap();
    let mut buffer = [0; 256];
    let (len, from) = peer.recv_from(&mut buffer).unwrap();
    assert_eq!(from, SocketAddr::from((own, 4791)));
    let mut bth = Bth::new(Opcode::RC_SEND_ONLY, Qpn::new(77), PSN);
    bth.set_ack_req(true);
    assert_eq!(buffer[..len], packet(from, loopback(8), 0, bth, |_| {})[28..]);
    // An answer of the plain socket completes it.
    let qpn = end.context.query_qp(qp).unwrap().qpn;
    let path = path((loopback(8), 4791).into(), own, 0);
    let acknowledge = Bth::new(Opcode::RC_ACKNOWLEDGE, qpn, PSN);
    let mut frame = FrameBuilder::start(&mut buffer, &path, acknowledge, 0).unwrap();
    frame.put(&Aeth::new(Syndrome::ACK, 1));
    let len = frame.finish();
    assert!(Packet::decode_ip(&buffer[..len]).unwrap().check_icrc().is_ok());
    peer.send_to(&buffer[28..len], (own, 4791)).unwrap();
    let mut status = None;
    drive(&mut [&mut end], &mut clock, |ends| {
        status = ends[0].context.poll_cq(ends[0].cq).unwrap().map(|wc| wc.status);
        status.is_some()
    });
    assert_eq!(status, Some(WcStatus::Success));
}

/// ECN marks reach the receiver: they are counted, and are in the header before datagrams.
#[test]
fn ecn_marks_are_received() {
    let mut ends = [9, 10].map(|last| End::open(sockets_of(loopback(last))));
    let qps = ends.each_mut().map(|end| {
        let qp = end.context.create_qp(&QpConfig::ud(end.pd, end.cq)).unwrap();
        end.context.modify_qp(qp, Transition::InitDatagram { qkey: 5 }).unwrap();
        end.context.modify_qp(qp, Transition::ReadyToReceiveDatagrams).unwrap();
        end.context.modify_qp(qp, Transition::ReadyToSendUnreliable { sq_psn: PSN }).unwrap();
        qp
    });
    let [a, b] = &mut ends;
    let qpn = b.context.query_qp(qps[1]).unwrap().qpn;
    let way = AddressVector::new(b.gid(), 0).traffic_class(0x6b).hop_limit(7);
    let ah = a.context.create_ah(a.pd, &way).unwrap();
    let sges = [Sge { mr: b.mr, offset: 0, length: 48 }];
    b.context.post_recv(qps[1], &ReceiveWorkRequest { wr_id: 1, sges: &sges }).unwrap();
    let wr = SendWorkRequest {
        wr_id: 1,
        op: SendOp::SendTo(Destination { ah, qpn, qkey: 5 }),
        data: Data::Inline(b"identity"),
        flags: SendFlags::SIGNALED,
    };
    a.context.post_send(qps[0], &wr).unwrap();
    let mut clock = Clock::start();
    let mut came = None;
    drive(&mut [a, b], &mut clock, |ends| {
        came = ends[1].context.poll_cq(ends[1].cq).unwrap();
        came.is_some()
    });
    let wc = came.unwrap();
    assert_eq!((wc.status, wc.byte_len), (WcStatus::Success, 48));
    assert_eq!(b.count(Counter::NpEcnMarkedRocePackets), 1);
    let bytes = b.context.bytes(b.mr).unwrap();
    assert_eq!((bytes[21], bytes[28], &bytes[40..48]), (0x6b, 7, &b"identity"[..]));
    let grh = bytes[..40].try_into().unwrap();
    let back = b.context.address_from_wc(&wc, &grh).unwrap();
    assert_eq!((back.gid, back.traffic_class), (a.gid(), 0x68));
}

/// Four contexts on one address, each with the queue pairs of its share, and one peer of all.
#[test]
fn contexts_share_an_address() {
    let group = Udp::open_group(&sockets_of(loopback(11)), 4).unwrap();
    let mut group: Vec<End> = group.into_iter().map(End::on).collect();
    let mut peer = End::open(sockets_of(loopback(12)));
    for (index, end) in group.iter_mut().enumerate() {
        for _ in 0..5 {
            let ((own, own_qpn), (other, other_qpn)) = (end.qp(), peer.qp());
            let share = if index == 0 { own_qpn.value() % 2 } else { own_qpn.value() % 128 };
            let expected = if index == 0 { 0 } else { 2 * index as u32 + 1 };
            assert_eq!((share, other_qpn.value() % 2), (expected, 0));
            end.connect(own, AddressVector::new(peer.gid(), 0), other_qpn, PathMtu::Mtu4096);
            peer.connect(other, AddressVector::new(end.gid(), 0), own_qpn, PathMtu::Mtu4096);
            exchange(end, &mut peer, (own, other), 120);
            exchange(&mut peer, end, (other, own), 120);
        }
    }
    for end in group.iter().chain([&peer]) {
        assert!(end.context.counters().drops().all(|(_, count)| count == 0), "{}", end.context.counters());
    }
}

/// WRITEs through forty queue pairs at once, to one context and to four on one address: packets sent together are received
/// by the right context.
#[test]
fn many_queue_pairs_write_at_once() {
    const LENGTH: u32 = 24;
    let alone = Udp::open(&sockets_of(loopback(18))).unwrap();
    for ports in [vec![alone], Udp::open_group(&sockets_of(loopback(17)), 4).unwrap()] {
        let mut others: Vec<End> = ports.into_iter().map(End::on).collect();
        let mut own = End::open(sockets_of(loopback(19)));
        let mut clock = Clock::start();
        let mut pairs = Vec::new();
        for n in 0..40 {
            let place = n % others.len();
            let ((qp, qpn), (other, other_qpn)) = (own.qp(), others[place].qp());
            own.connect(qp, AddressVector::new(others[place].gid(), 0), other_qpn, PathMtu::Mtu1024);
            others[place].connect(other, AddressVector::new(own.gid(), 0), qpn, PathMtu::Mtu1024);
            pairs.push((qp, place));
        }
        for round in 0..20 {
            for (n, (qp, place)) in (0u64..).zip(&pairs) {
                let start = n * u64::from(LENGTH);
                own.fill(round * 40 + n, start, LENGTH);
                let remote = others[*place].context.remote(others[*place].mr).unwrap();
                let remote = RemoteAddress { addr: remote.addr + start, rkey: remote.rkey };
                let data = [Sge { mr: own.mr, offset: start, length: LENGTH }];
                let wr = SendWorkRequest {
                    wr_id: n,
                    op: SendOp::Write(remote),
                    data: Data::Sges(&data),
                    flags: SendFlags::SIGNALED,
                };
                own.context.post_send(*qp, &wr).unwrap();
            }
            let mut done = 0;
            let mut ends: Vec<&mut End> = std::iter::once(&mut own).chain(&mut others).collect();
            drive(&mut ends, &mut clock, |ends| {
                while let Some(wc) = ends[0].context.poll_cq(ends[0].cq).unwrap() {
                    assert_eq!(wc.status, WcStatus::Success);
                    done += 1;
                }
                done == pairs.len()
            });
            for (n, (_, place)) in (0u64..).zip(&pairs) {
                others[*place].check(round * 40 + n, n * u64::from(LENGTH), LENGTH);
            }
        }
        for end in others.iter().chain([&own]) {
            let counters = end.context.counters();
            assert!(counters.drops().all(|(_, count)| count == 0), "{counters}");
        }
    }
}

#[test]
fn unsupported_features_of_sockets_are_refused() {
    let config = Config::default().roce_v1(true);
    let port = Udp::open(&sockets_of(loopback(13))).unwrap();
    let refusal = Context::open(Box::new(port), &config).map(|_| ()).unwrap_err();
    assert!(matches!(refusal, Error::Unsupported(Feature::RoceV1)), "{refusal}");
    let mut end = End::open(sockets_of(loopback(13)));
    let entry = GidEntry::new(loopback(14).into()).vlan(5);
    let refusal = end.context.add_gid(entry).unwrap_err();
    assert!(matches!(refusal, Error::Unsupported(Feature::SecondAddress)), "{refusal}");
    // No path there: an immediate error, and the queue pair is unchanged.
    let (qp, _) = end.qp();
    end.context.modify_qp(qp, Transition::Init { access: access() }).unwrap();
    let way = AddressVector::new(Gid::from(IpAddr::from([192, 0, 2, 77])), 0);
    let move_on = Transition::ReadyToReceive(ReadyToReceive::new(way, Qpn::new(5), PSN));
    let refusal = end.context.modify_qp(qp, move_on).unwrap_err().to_string();
    assert!(refusal.contains("no route to 192.0.2.77"), "{refusal}");
}

/// The loopback interface loses nothing as long as the window fits into the receiver's buffer.
#[test]
fn nothing_allocates_after_set_up() {
    let ([mut a, mut b], qps) = pair(sockets_of(loopback(15)), sockets_of(loopback(16)), PathMtu::Mtu4096);
    let mut clock = Clock::start();
    let remote = b.context.remote(b.mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
    let mut run = |messages: u64| {
        let (mut posted, mut completed) = (0, 0);
        while completed < messages {
            while posted < messages && posted < completed + 8 {
                let local = [Sge { mr: a.mr, offset: 0, length: 65_536 }];
                let op = if posted % 2 == 0 { SendOp::Write(remote) } else { SendOp::Read(remote) };
                let wr = SendWorkRequest {
                    wr_id: posted,
                    op,
                    data: Data::Sges(&local),
                    flags: SendFlags::SIGNALED,
                };
                a.context.post_send(qps[0], &wr).unwrap();
                posted += 1;
            }
            let now = clock.now();
            a.context.poll(now).unwrap();
            b.context.poll(now).unwrap();
            while let Some(wc) = a.context.poll_cq(a.cq).unwrap() {
                assert_eq!(wc.status, WcStatus::Success);
                completed += 1;
            }
        }
    };
    run(200);
    let counted = allocation_counter::measure(|| run(2000));
    assert_eq!(counted.count_total, 0);
}
