//! UD, and multicast.

use ferroce_driver::rnic::{
    AddressHandle, Completion, ProtectionDomain, QueuePair, Remote, SendData, SendOperation, SendRequest,
    Target,
};

use crate::ends::{End, Kind, RTS, SQE, UD, address, config, errno, good, ipv4, pair, polled, warnings};

const QKEY: u32 = 0x1234;

fn group(last: u8) -> [u8; 16] {
    let mut group = ipv4(last);
    group[12] = 239;
    group
}

fn to<'a>(ah: &'a AddressHandle, end: &End) -> Target<'a> {
    Target { ah, qpn: end.qp.qpn(), qkey: QKEY }
}

/// The checksum of an IPv4 header over all its words; 0 if it is correct.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    !(((sum & 0xffff) + (sum >> 16)) as u16)
}

#[test]
fn datagrams_are_received_with_their_network_header() {
    let Some(stub) = good() else { return };
    for with_srq in [false, true] {
        let (mut a, b) = pair(&stub, Kind { with_srq, ..Kind::of(UD) });
        let ah = AddressHandle::new(&a.domain, &address(b.gid)).unwrap();
        a.region.write(0, b"datagram").unwrap();
        b.receive(7, &[b.piece(0, 30), b.piece(100, 100)]);
        let sent = a.carry_out(SendOperation::SendToWithImm(to(&ah, &b), 5), &[a.piece(0, 8)]);
        assert_eq!((sent.status, sent.opcode), (0, 0));
        let Completion { wr_id, status, byte_len, src_qp, wc_flags, imm_or_key, .. } = b.received()[0];
        assert_eq!((wr_id, status, byte_len, src_qp), (7, 0, 48, a.qp.qpn()));
        assert_eq!((wc_flags, u32::from_be(imm_or_key)), (Completion::GRH | Completion::WITH_IMM, 5));
        let mut header = b.bytes(0, 30);
        header.extend(b.bytes(100, 10));
        assert_eq!(header[..22], [vec![0; 20], vec![0x45, 0x68]].concat());
        assert_eq!(header[32..], [10, 0, 0, 2, 10, 0, 0, 3]);
        assert_eq!((header[28], header[29], checksum(&header[20..])), (64, 17, 0));
        assert_eq!(b.bytes(110, 8), b"datagram");
    }
}

#[test]
fn datagrams_are_dropped_silently() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(UD));
    let ah = AddressHandle::new(&a.domain, &address(b.gid)).unwrap();
    let elsewhere = AddressHandle::new(&a.domain, &address(ipv4(99))).unwrap();
    let good = to(&ah, &b);
    let send = |target, len| a.carry_out(SendOperation::SendTo(target), &[a.piece(0, len)]).status;
    // Without a receive WR, then each with one error.
    assert_eq!(send(good, 8), 0);
    b.receive(1, &[b.piece(0, 60)]);
    for (target, len) in [
        (Target { qkey: QKEY + 1, ..good }, 8),
        (Target { qpn: b.qp.qpn() + 1, ..good }, 8),
        (Target { ah: &elsewhere, ..good }, 8),
        (good, 21),
        (good, 4097),
    ] {
        assert_eq!(send(target, len), 0);
        assert!(b.received().is_empty(), "{target:?}, {len} bytes");
    }
    // With its own Q_Key, by a controlled one.
    assert_eq!(send(Target { qkey: 1 << 31, ..good }, 20), 0);
    assert_eq!((b.received()[0].wr_id, b.state()), (1, RTS));
}

#[test]
fn an_error_of_the_sender_stops_only_its_sends() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(UD));
    let ah = AddressHandle::new(&a.domain, &address(b.gid)).unwrap();
    let back = AddressHandle::new(&b.domain, &address(a.gid)).unwrap();
    let outside = a.piece(u64::MAX, 8);
    assert_eq!(a.carry_out(SendOperation::SendTo(to(&ah, &b)), &[outside]).status, 4);
    assert_eq!(a.state(), SQE);
    assert_eq!(a.carry_out(SendOperation::SendTo(to(&ah, &b)), &[]).status, 5);
    a.receive(1, &[a.piece(0, 40)]);
    assert_eq!(b.carry_out(SendOperation::SendTo(to(&back, &a)), &[]).status, 0);
    assert_eq!(a.received()[0].wr_id, 1);
    a.move_to(RTS);
    assert_eq!(a.carry_out(SendOperation::SendTo(to(&ah, &b)), &[]).status, 0);
    // An address of another protection domain.
    let other = ProtectionDomain::new(&a.device).unwrap();
    let ah = AddressHandle::new(&other, &address(b.gid)).unwrap();
    assert_eq!(a.carry_out(SendOperation::SendTo(to(&ah, &b)), &[]).status, 2);
}

#[test]
fn each_member_of_a_group_gets_a_copy() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind::of(UD));
    let c = QueuePair::new(&b.domain, &config(Kind::of(UD), &b.sends, &b.receives, None)).unwrap();
    a.region.write(0, b"all").unwrap();
    let group = group(1);
    let ah = AddressHandle::new(&a.domain, &address(group)).unwrap();
    let all = Target { ah: &ah, qpn: 0xff_ffff, qkey: QKEY };
    b.qp.attach(&group).unwrap();
    b.qp.attach(&group).unwrap();
    c.attach(&group).unwrap();
    b.receive(1, &[b.piece(0, 64)]);
    assert_eq!(a.carry_out(SendOperation::SendTo(all), &[a.piece(0, 3)]).status, 0);
    // The other one is not ready.
    assert_eq!(
        b.received().iter().map(|received| (received.wr_id, received.byte_len)).collect::<Vec<_>>(),
        [(1, 43)]
    );
    assert_eq!((b.bytes(36, 4), b.bytes(40, 3)), (vec![239, 0, 0, 1], b"all".into()));
    b.qp.detach(&group).unwrap();
    assert_eq!(errno(&b.qp.detach(&group).unwrap_err()), libc::EINVAL);
    b.receive(2, &[b.piece(0, 64)]);
    assert_eq!(a.carry_out(SendOperation::SendTo(all), &[a.piece(0, 3)]).status, 0);
    assert!(b.received().is_empty());
    assert_eq!(errno(&b.qp.attach(&ipv4(9)).unwrap_err()), libc::EINVAL);
}

/// The kernel does not destroy a queue pair that is in a group.
#[test]
fn a_dropped_queue_pair_leaves_its_groups() {
    let Some(stub) = good() else { return };
    let a = End::new(&stub, 0, Kind::of(UD));
    for last in [1, 2, 2, 3] {
        a.qp.attach(&group(last)).unwrap();
    }
    a.qp.detach(&group(3)).unwrap();
    assert_eq!(warnings(|| drop(a)), [""; 0]);
    assert_eq!(stub.live_objects(), 0);
}

#[test]
fn inline_datagrams() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(UD));
    let ah = AddressHandle::new(&a.domain, &address(b.gid)).unwrap();
    b.receive(1, &[b.piece(0, 64)]);
    a.post_flagged(SendOperation::SendTo(to(&ah, &b)), SendData::Inline(b"short"), 0);
    assert_eq!((polled(&b.receives)[0].byte_len, b.bytes(40, 5)), (45, b"short".into()));
    let mut request = SendRequest::new(1, SendOperation::SendTo(to(&ah, &b)), SendData::Inline(&[0; 65]), 0);
    assert_eq!(errno(&a.qp.post_send(&mut request).unwrap_err()), libc::EINVAL);
}

/// A provider reads the destination from a field that contains an address in other operations: it would dereference a
/// number.
#[test]
fn only_datagrams_are_passed_to_the_provider() {
    let Some(stub) = good() else { return };
    let (a, _b) = pair(&stub, Kind::of(UD));
    let remote = Remote { addr: 0x10, rkey: 0 };
    for operation in [SendOperation::Write(remote), SendOperation::Read(remote), SendOperation::Send] {
        let mut request = SendRequest::new(1, operation, SendData::Pieces(&[]), 0);
        let told = a.qp.post_send(&mut request).unwrap_err().to_string();
        assert!(told.contains("ibv_post_send") && told.contains("datagram"), "{told}");
    }
}
