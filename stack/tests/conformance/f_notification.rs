//! Section F: the notification point, which tells the senders of marked packets. The sender's half is in `f_reaction.rs`.

use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::wire::{Encapsulation, Opcode, OwnedPacket, PathAddress, VlanTag, source_port};
use ferroce::{
    AddressVector, CnpScope, Config, CongestionControl, CongestionNotification, Counter, Dcqcn, Gid,
    GidEntry, PathMtu, Psn, Qp, QpState, QpType, QpUpdate, Qpn, ReceiveWorkRequest, SendOp, Transition,
};

use crate::packet::{Got, Script, ack, packet, read_response};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern, sge};

/// ECN of a packet that a switch has marked.
const CE: u8 = 3;

const INTERVAL: Duration = Duration::from_micros(50);

/// A CNP that a ConnectX-4 Lx has sent (docs/protocol.md §3, TV3).
const TV3: &str = "e41d2dab2bc27cfe90643b320800 45c2003c718c4000401191610a0011010a001201 000012b700280000 \
                   8100ffff4000011800000000 00000000000000000000000000000000 82fd002a";

/// The most CNPs waiting for the port.
const OWED_MAX: usize = 256;

/// The most senders of datagrams that are distinguished.
const SENDERS_MAX: usize = 1024;

fn notifying(config: Config) -> Config {
    config.notification(CongestionNotification::default())
}

/// A CNP for each marked packet.
fn each(config: Config) -> Config {
    config.notification(CongestionNotification::default().min_time_between_cnps(Duration::ZERO))
}

fn for_each_peer(config: Config) -> Config {
    config.notification(CongestionNotification::default().scope(CnpScope::Peer))
}

fn for_the_port(config: Config) -> Config {
    config.notification(CongestionNotification::default().scope(CnpScope::Port))
}

/// With its own reaction point.
fn obeying(config: Config) -> Config {
    config.congestion(CongestionControl::Dcqcn(Dcqcn::PAPER)).line_rate(10_000_000_000)
}

fn with(config: fn(Config) -> Config) -> Setup {
    Setup { config, ..Setup::default() }
}

/// A peer whose packets are all marked in the network.
fn marked(setup: Setup) -> Peer {
    let mut peer = Peer::with(setup);
    peer.address.traffic_class = 0x68 | CE;
    peer
}

/// A request that needs and requests nothing.
fn request(number: u32) -> Script {
    packet(Opcode::RC_WRITE_ONLY, RQ + number)
}

fn datagram() -> Script {
    packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, PEER_QPN)
}

fn cnp() -> Script {
    packet(Opcode::CNP, 0).payload(&[0; 16])
}

/// The destinations of the CNPs among the sent packets, in order.
fn told(sent: &[Got]) -> Vec<Gid> {
    let cnps = sent.iter().filter(|sent| sent.opcode == Opcode::CNP);
    cnps.map(|cnp| cnp.network.destination).collect()
}

/// The frame is TV3, byte by byte, sent back along `path` with this DSCP and priority.
#[track_caller]
fn assert_is_tv3(got: &Got, path: &PathAddress, qpn: Qpn, (dscp, priority): (u8, u8)) {
    let digits: Vec<u8> = TV3.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let captured: Vec<u8> = digits.chunks(2).map(byte).collect();
    let mut expected = OwnedPacket::parse(&captured).unwrap();
    assert_eq!(expected.emit(), captured);
    assert_eq!(expected.network.traffic_class, 48 << 2 | 2);
    expected.set_path(&PathAddress {
        source: path.destination,
        destination: path.source,
        source_mac: path.destination_mac,
        destination_mac: path.source_mac,
        vlan: path.vlan.map(|tag| VlanTag { priority, ..tag }),
        traffic_class: dscp << 2 | 2,
        encapsulation: Encapsulation::RoceV2 { source_port: source_port(0, qpn, PEER_QPN) },
        ..*path
    });
    expected.bth.set_dest_qpn(PEER_QPN);
    assert_eq!(got.frame, expected.emit(), "{got}");
}

#[track_caller]
fn expect_cnp(peer: &mut Peer) {
    let got = peer.expect(Opcode::CNP, 0);
    assert_is_tv3(&got, &peer.address, peer.qpn, (48, 6));
}

/// A queue pair of another peer in addition to the one under test; its number.
fn another_peer(peer: &mut Peer, setup: &Setup, last: u8) -> (Qp, Qpn) {
    let own = std::mem::replace(&mut peer.address.source.0[15], last);
    let qp = peer.another_qp(setup);
    peer.address.source.0[15] = own;
    (qp, peer.context.query_qp(qp).unwrap().qpn)
}

#[test]
fn case_101_a_marked_packet_makes_a_cnp() {
    for ipv6 in [false, true] {
        // The CNP is sent before the acknowledgement.
        let mut peer = marked(Setup { ipv6, ..with(notifying) });
        peer.inject(request(0).ack_req());
        expect_cnp(&mut peer);
        peer.expect_ack(RQ, 1);
        peer.expect_nothing();
        peer.expect_counted(Counter::NpCnpSent, 1);
        peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1);
        // Unmarked packets of the same queue pair cause none.
        for class in [0, 1, 2] {
            peer.advance(INTERVAL);
            peer.address.traffic_class = 0x68 | class;
            peer.inject(request(1 + u32::from(class)));
            peer.expect_nothing();
        }
        peer.expect_counted(Counter::NpEcnMarkedRocePackets, 0);

        // For READ responses the requester is the notification point.
        let mut peer = marked(Setup { ipv6, ..with(notifying) });
        peer.post_read(1, 256);
        peer.expect(Opcode::RC_READ_REQUEST, SQ);
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &[7; 256]));
        expect_cnp(&mut peer);
        peer.expect_wc(1, Success);

        let mut peer = marked(Setup { qp_type: QpType::Uc, ipv6, ..with(notifying) });
        peer.inject(packet(Opcode::UC_WRITE_ONLY, RQ));
        expect_cnp(&mut peer);

        // It is sent to the queue pair that a datagram gives as its sender.
        let mut peer = marked(Setup { qp_type: QpType::Ud, ipv6, ..with(notifying) });
        peer.post_recv(1, 64);
        peer.inject(datagram());
        expect_cnp(&mut peer);
        peer.expect_wc(1, Success);
    }
}

/// DSCP and priority are those of the settings. An untagged path has no priority.
#[test]
fn cnps_have_their_own_dscp_and_priority() {
    let config =
        |config: Config| config.notification(CongestionNotification::default().cnp_dscp(63).cnp_802p_prio(7));
    for (qp_type, tag) in [(QpType::Uc, true), (QpType::Ud, true), (QpType::Uc, false), (QpType::Ud, false)] {
        let setup = Setup { qp_type, config, state: QpState::Init, ..Setup::default() };
        let mut peer = marked(setup);
        let own = GidEntry::new(peer.address.destination);
        let index = match tag {
            true => peer.context.add_gid(own.vlan(100)).unwrap(),
            false => peer.context.port().gid_index_for(peer.address.source).unwrap(),
        };
        peer.address.vlan = tag.then_some(VlanTag { id: 100, priority: 3 });
        let way = AddressVector::new(peer.address.source, index).mac(peer.address.source_mac);
        for transition in &peer.transitions(&setup)[1..] {
            peer.modify(match *transition {
                Transition::ReadyToReceiveUnreliable(mut path) => {
                    path.address = way.traffic_class(0x6a).service_level(3);
                    Transition::ReadyToReceiveUnreliable(path)
                }
                other => other,
            });
        }
        match qp_type {
            QpType::Ud => {
                peer.post_recv(1, 64);
                peer.inject(datagram());
                peer.expect_wc(1, Success);
            }
            _ => peer.inject(packet(Opcode::UC_WRITE_ONLY, RQ)),
        }
        let got = peer.expect(Opcode::CNP, 0);
        assert_is_tv3(&got, &peer.address, peer.qpn, (63, 7));
    }
    let refused = |notification: CongestionNotification| {
        let (port, _) = ferroce::driver::loopback::pair(&[], &[]);
        let config = Config::default().notification(notification);
        ferroce::Context::open(Box::new(port), &config).map(drop).unwrap_err().to_string()
    };
    assert_eq!(refused(CongestionNotification::default().cnp_dscp(64)), "cnp_dscp = 64: 0 to 63");
    assert_eq!(refused(CongestionNotification::default().cnp_802p_prio(8)), "cnp_802p_prio = 8: 0 to 7");
}

#[test]
fn case_102_one_cnp_in_each_interval() {
    let setup = with(notifying);
    let mut peer = marked(setup);
    let (_, second) = another_peer(&mut peer, &setup, 9);
    let start = peer.now;
    for number in 0..1000 {
        peer.inject(request(number));
        // Another flow, which is marked half of the time, has its own.
        if number < 500 {
            let own = std::mem::replace(&mut peer.address.source.0[15], 9);
            peer.inject(request(number).dest_qpn(second));
            peer.address.source.0[15] = own;
        }
        peer.advance(Duration::from_micros(1));
    }
    let sent = peer.take_packets();
    let times = |last: u8| -> Vec<u128> {
        let of_peer = sent.iter().filter(|cnp| cnp.network.destination.0[15] == last);
        of_peer.map(|cnp| cnp.at.since(start).as_nanos()).collect()
    };
    let expected: Vec<u128> = (0..20).map(|number| 50_000 * number).collect();
    assert_eq!(times(peer.address.source.0[15]), expected);
    assert_eq!(times(9), expected[..10]);
    peer.expect_counted(Counter::NpCnpSent, 30);
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1500);
}

/// Not a nanosecond early. It starts when a CNP is sent, which may be long after the packet that caused it.
#[test]
fn an_interval_is_between_cnps_on_the_wire() {
    for config in [notifying, for_each_peer, for_the_port] {
        let mut peer = marked(with(config));
        peer.inject(request(0));
        expect_cnp(&mut peer);
        peer.advance(INTERVAL - Duration::from_nanos(1));
        peer.inject(request(1));
        peer.expect_nothing();
        peer.advance(Duration::from_nanos(1));
        peer.inject_all([request(2), request(3)]);
        expect_cnp(&mut peer);
        peer.expect_nothing();

        peer.advance(INTERVAL);
        peer.take_at_most(0);
        peer.inject(request(4));
        peer.advance(INTERVAL * 2);
        peer.inject(request(5));
        peer.take_at_most(usize::MAX);
        expect_cnp(&mut peer);
        peer.advance(INTERVAL - Duration::from_nanos(1));
        peer.inject(request(6));
        peer.expect_nothing();
        peer.advance(Duration::from_nanos(1));
        peer.inject(request(7));
        expect_cnp(&mut peer);
    }
}

/// Two queue pairs of one peer and one of another, and datagrams of three senders at two addresses.
#[test]
fn intervals_apply_to_their_scope() {
    for (config, connected, datagrams) in [
        (notifying as fn(Config) -> Config, &[1, 1, 9][..], &[1, 1, 9][..]),
        (for_each_peer, &[1, 9], &[1, 9]),
        (for_the_port, &[1], &[1]),
    ] {
        let setup = with(config);
        let mut peer = marked(setup);
        peer.address.source = Gid::from_ipv4([192, 0, 2, 1].into());
        let second = peer.another_qp(&setup);
        let second = peer.context.query_qp(second).unwrap().qpn;
        let (_, third) = another_peer(&mut peer, &setup, 9);
        let lasts = |sent: &[Got]| told(sent).iter().map(|gid| gid.0[15]).collect::<Vec<_>>();
        for round in 0..2 {
            peer.arrive([0, 1].map(|n| request(2 * round + n)));
            peer.arrive([0, 1].map(|n| request(2 * round + n).dest_qpn(second)));
            peer.address.source.0[15] = 9;
            peer.arrive([0, 1].map(|n| request(2 * round + n).dest_qpn(third)));
            peer.address.source.0[15] = 1;
            assert_eq!(lasts(&peer.take_packets()), connected);
            peer.advance(INTERVAL);
        }

        let mut peer = marked(Setup { qp_type: QpType::Ud, ..setup });
        let senders = [(1, PEER_QPN), (1, Qpn::GSI), (9, PEER_QPN)];
        for round in 0..2 {
            for (last, qpn) in senders.into_iter().chain(senders) {
                peer.post_recv(round, 64);
                peer.address.source.0[15] = last;
                peer.arrive([packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, qpn)]);
            }
            assert_eq!(lasts(&peer.take_packets()), datagrams);
            for _ in 0..6 {
                peer.expect_wc(round, Success);
            }
            peer.advance(INTERVAL);
        }
    }
}

/// Without an interval every marked packet causes one, up to the number that can wait for the port.
#[test]
fn without_an_interval_every_marked_packet_causes_a_cnp() {
    let zero_for_peers = |config: Config| {
        let settings = CongestionNotification::default().min_time_between_cnps(Duration::ZERO);
        config.notification(settings.scope(CnpScope::Peer))
    };
    for config in [each as fn(Config) -> Config, zero_for_peers] {
        let mut peer = marked(with(config));
        peer.inject_all((0..1000).map(request));
        assert_eq!(peer.take_packets().len(), OWED_MAX);
        peer.inject_all((1000..1100).map(request));
        assert_eq!(peer.take_packets().len(), 100);
    }
}

/// However many sends and responses wait.
#[test]
fn cnps_are_sent_before_data() {
    let mut peer = marked(with(notifying));
    peer.take_at_most(0);
    peer.post_write(1, &pattern(4096));
    let memory = peer.memory(&pattern(1024));
    let remote = peer.remote(memory);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(remote.addr, remote.rkey, 1024));
    peer.take_at_most(usize::MAX);
    expect_cnp(&mut peer);
    let rest = peer.take_packets();
    assert_eq!((rest.len(), told(&rest).len()), (16 + 4, 0));
    peer.inject(ack(SQ + 15, 1));
    peer.expect_wc(1, Success);
}

#[test]
fn case_103_a_broken_packet_and_a_cnp_make_none() {
    let mut peer = marked(with(each));
    let mut broken = peer.frame(&request(0));
    *broken.last_mut().unwrap() ^= 1;
    peer.expect_dropped(broken, Counter::RxIcrcEncapsulated);
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 0);

    // These are counted as marked, and cause nothing.
    let mut drop = |script: Script, reason| {
        peer.inject(script);
        peer.expect_nothing();
        peer.expect_counted(reason, 1);
        peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1);
    };
    drop(cnp(), Counter::RpCnpIgnored);
    drop(packet(Opcode::UC_WRITE_ONLY, RQ), Counter::RxWrongService);
    drop(request(0).dest_qpn(Qpn::new(0x31_3131)), Counter::RxUnknownQp);
    drop(request(0).pkey(0x8001), Counter::RxPkeyMismatch);
    assert!(peer.context.next_event().is_some());
    let own = std::mem::replace(&mut peer.address.source.0[15], 77);
    peer.inject(request(0));
    peer.expect_nothing();
    peer.expect_counted(Counter::RxWrongAddress, 1);
    peer.address.source.0[15] = own;

    // Nor an acknowledgement: its sender sends no data.
    peer.post_write(1, &[1; 16]);
    peer.expect(Opcode::RC_WRITE_ONLY, SQ);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
    peer.expect_nothing();
    peer.expect_counted(Counter::NpCnpSent, 0);

    // Nor a marked CNP, which the queue pair itself obeys.
    let mut peer = marked(with(|config| each(obeying(config))));
    peer.inject(cnp());
    peer.expect_nothing();
    peer.expect_counted(Counter::RpCnpHandled, 1);
    peer.expect_counted(Counter::NpCnpSent, 0);

    // Nor a dropped datagram: without a receive, or with another Q_Key.
    let mut peer = marked(Setup { qp_type: QpType::Ud, ..with(each) });
    peer.inject_all([datagram(), packet(Opcode::UD_SEND_ONLY, 0).deth(1, PEER_QPN)]);
    peer.expect_nothing();
    peer.expect_counted(Counter::OutOfBuffer, 1);
    peer.expect_counted(Counter::RxQkeyMismatch, 1);
}

/// With RoCE v1 there are no CNPs: the traffic class of a GRH has no ECN. The packet does not count as marked.
#[test]
fn roce_v1_has_no_marks() {
    let setup = Setup { roce_v1: true, ipv6: true, state: QpState::Init, ..with(each) };
    let mut peer = marked(setup);
    let entry = GidEntry::new(peer.address.destination).roce_v1(true);
    let index = peer.context.port().gids.iter().position(|own| *own == entry).unwrap();
    peer.address.encapsulation = Encapsulation::RoceV1;
    let way = AddressVector::new(peer.address.source, index).mac(peer.address.source_mac);
    for transition in &peer.transitions(&setup)[1..] {
        peer.modify(match *transition {
            Transition::ReadyToReceive(mut receive) => {
                receive.address = way;
                Transition::ReadyToReceive(receive)
            }
            other => other,
        });
    }
    peer.inject(request(0).ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_nothing();
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 0);
}

/// For a datagram to a group there is none: all its members would notify the sender at once.
#[test]
fn multicast_causes_no_cnps() {
    let mut peer = marked(Setup { qp_type: QpType::Ud, ..with(each) });
    let group = Gid::from_ipv4([239, 1, 2, 3].into());
    peer.context.attach_mcast(peer.qp, group).unwrap();
    peer.post_recv(1, 64);
    peer.address.destination = group;
    peer.inject(datagram().dest_qpn(Qpn::MULTICAST));
    peer.expect_wc(1, Success);
    peer.expect_nothing();
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1);
}

/// CNPs use the default partition, whatever the queue pair's is.
#[test]
fn cnps_use_the_default_partition() {
    let setup = with(notifying);
    let mut peer = marked(Setup { state: QpState::Init, ..setup });
    let index = peer.context.add_pkey(ferroce::PKey(0x8001)).unwrap();
    peer.modify(Transition::Update(QpUpdate::default().pkey_index(index)));
    for transition in &peer.transitions(&setup)[1..] {
        peer.modify(*transition);
    }
    peer.inject(request(0).pkey(0x8001));
    expect_cnp(&mut peer);
}

/// Obeying CNPs is another setting.
#[test]
fn a_reaction_point_alone_sends_no_cnps() {
    let mut peer = marked(with(obeying));
    peer.inject(request(0));
    peer.expect_nothing();
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1);
}

/// A CNP is not acknowledged, and uses no PSN of the queue pair.
#[test]
fn cnps_use_no_psn() {
    let mut peer = marked(with(notifying));
    peer.inject(request(0));
    expect_cnp(&mut peer);
    assert_eq!(peer.query().sq_psn, Psn::new(SQ));
    peer.post(2, SendOp::Write(REMOTE), &[]);
    peer.expect(Opcode::RC_WRITE_ONLY, SQ);
}

/// An owed CNP is sent although the queue pair was destroyed, because its peer contributed to the congestion. A failed
/// queue pair causes no more, and another one in the same slot has its own interval.
#[test]
fn a_cnp_is_sent_after_its_queue_pair_was_destroyed() {
    let setup = with(notifying);
    let ends: [fn(&mut Peer, Qp); 3] = [
        |peer, qp| peer.context.destroy_qp(qp).unwrap(),
        |peer, qp| peer.context.modify_qp(qp, Transition::Reset).unwrap(),
        |peer, qp| peer.context.modify_qp(qp, Transition::Error).unwrap(),
    ];
    for end in ends {
        let mut peer = marked(setup);
        let qp = peer.another_qp(&setup);
        let qpn = peer.context.query_qp(qp).unwrap().qpn;
        peer.take_at_most(0);
        peer.inject(request(0).dest_qpn(qpn));
        end(&mut peer, qp);
        peer.advance(INTERVAL);
        peer.inject(request(1).dest_qpn(qpn));
        // In the slot of the destroyed one.
        let next = peer.another_qp(&setup);
        let next = peer.context.query_qp(next).unwrap().qpn;
        peer.inject(request(0).dest_qpn(next));
        peer.take_at_most(usize::MAX);
        let sent = peer.take_packets();
        assert_eq!(told(&sent), [peer.address.source; 2]);
        assert_is_tv3(&sent[0], &peer.address, qpn, (48, 6));
        assert_is_tv3(&sent[1], &peer.address, next, (48, 6));
        // The interval of the new one started then, independent of earlier CNPs.
        peer.advance(INTERVAL - Duration::from_nanos(1));
        peer.inject(request(1).dest_qpn(next));
        peer.expect_nothing();
        peer.advance(Duration::from_nanos(1));
        peer.inject(request(2).dest_qpn(next));
        assert_eq!(told(&peer.take_packets()).len(), 1);
    }
}

/// A reset does not end the interval of a queue pair.
#[test]
fn a_reset_does_not_end_the_interval() {
    let setup = with(notifying);
    let mut peer = marked(setup);
    peer.inject(request(0));
    expect_cnp(&mut peer);
    peer.modify(Transition::Reset);
    peer.take_to(&setup);
    peer.inject(request(0));
    peer.expect_nothing();
    peer.advance(INTERVAL);
    peer.inject(request(1));
    expect_cnp(&mut peer);
}

/// Datagrams of any number of senders.
struct Strangers {
    peer: Peer,
    /// A connected queue pair in addition to the one that receives datagrams.
    connected: Qpn,
    sent: u32,
}

impl Strangers {
    fn new(config: fn(Config) -> Config) -> Strangers {
        let setup = Setup { max_recv_wr: 4096, cq_capacity: 8192, mtu: PathMtu::Mtu256, ..with(config) };
        let mut peer = marked(Setup { qp_type: QpType::Ud, ..setup });
        let (_, connected) = another_peer(&mut peer, &setup, 200);
        Strangers { peer, connected, sent: 0 }
    }

    /// Datagrams of these senders arrive.
    fn arrive(&mut self, senders: impl Iterator<Item = usize>) {
        let peer = &mut self.peer;
        let memory = peer.memory(&[0; 64]);
        let own = peer.address.source;
        for sender in senders {
            let wr = ReceiveWorkRequest { wr_id: 0, sges: &[sge(memory, 64)] };
            peer.context.post_recv(peer.qp, &wr).unwrap();
            peer.address.source.0[13..].copy_from_slice(&[1, (sender >> 8) as u8, sender as u8]);
            peer.inject(datagram());
            assert!(peer.context.poll_cq(peer.cq).unwrap().is_some());
        }
        peer.address.source = own;
    }

    /// How many CNPs are sent to strangers, and whether the connected peer gets one for its current packet.
    fn told(&mut self) -> (usize, bool) {
        let peer = &mut self.peer;
        let own = std::mem::replace(&mut peer.address.source.0[15], 200);
        let connected = peer.address.source;
        peer.inject(request(self.sent).dest_qpn(self.connected));
        self.sent += 1;
        peer.address.source.0[15] = own;
        peer.take_at_most(usize::MAX);
        let told = told(&peer.take_packets());
        (told.iter().filter(|gid| **gid != connected).count(), told.contains(&connected))
    }
}

/// Datagrams of more senders than are remembered: each gets at most one CNP per interval, the others get theirs later, and
/// there is always room for a connected peer.
#[test]
fn strangers_get_no_more_than_they_may_and_connected_peers_what_they_should() {
    const SENDERS: usize = 1200;
    for config in [notifying, for_each_peer] {
        let mut strangers = Strangers::new(config);
        strangers.arrive(0..SENDERS);
        assert_eq!(strangers.told(), (SENDERS_MAX, true));
        strangers.peer.advance(INTERVAL / 2);
        strangers.arrive(0..SENDERS);
        assert_eq!(strangers.told(), (0, false));
        strangers.peer.advance(INTERVAL / 2);
        strangers.arrive((0..SENDERS).rev());
        assert_eq!(strangers.told(), (SENDERS_MAX, true));
    }
}

/// While the port is blocked, CNPs for datagrams use half of the room.
#[test]
fn cnps_to_strangers_leave_room_for_those_to_peers() {
    for config in [notifying, for_each_peer, each] {
        let mut strangers = Strangers::new(config);
        strangers.peer.take_at_most(0);
        strangers.arrive(0..300);
        assert_eq!(strangers.told(), (OWED_MAX / 2, true));
    }
}
