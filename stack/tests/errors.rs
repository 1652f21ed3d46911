//! The texts of the verbs' errors: the attribute, its value, and the valid ones.

use std::net::{IpAddr, SocketAddr};

use ferroce::driver::loopback;
use ferroce::*;

struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
}

fn end(addresses: &[&str]) -> End {
    let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().expect("an address")).collect();
    let (near, _) = loopback::pair(&addresses, &[[192, 0, 2, 2].into()]);
    let mut context = Context::open(Box::new(near), &Config::default()).expect("as set up");
    let (pd, cq) = (context.alloc_pd().expect("as set up"), context.create_cq(16).expect("as set up"));
    End { context, pd, cq }
}

/// With an IPv4 and an IPv6 address.
fn dual() -> End {
    end(&["192.0.2.1", "fe80::1"])
}

#[track_caller]
fn says<T>(result: Result<T, impl Into<Error>>, said: &str) {
    let error: Error = result.map(drop).expect_err(said).into();
    let error = error.to_string();
    assert!(error.contains(said), "{error}\nwithout: {said}");
}

/// Connected to itself.
fn connected(end: &mut End) -> Qp {
    let qp = end.context.create_qp(&QpConfig::rc(end.pd, end.cq).max_send_wr(1)).expect("as set up");
    let own = end.context.endpoint(qp, 0).expect("as set up");
    end.context.handshake(qp, &own, &own).expect("as set up");
    qp
}

#[test]
fn errors_of_addresses() {
    let mut end = dual();
    let peer = |text: &str| Gid::from(text.parse::<IpAddr>().expect("an address"));
    let mut ah = |gid, index| end.context.create_ah(end.pd, &AddressVector::new(gid, index));
    says(
        ah(peer("fe80::2"), 0),
        "sgid_index = 0: the index of a GID of the same IP version as the destination fe80::2; 0 is 192.0.2.1, and the \
         GID table has 0: 192.0.2.1, 1: fe80::1",
    );
    says(ah(peer("192.0.2.2"), 2), "sgid_index = 2: below 2, the size of the GID table of 'loopback");
    let none = AddressVector::new(peer("192.0.2.2"), 0).hop_limit(0);
    says(end.context.create_ah(end.pd, &none), "hop_limit = 0: 1 to 255");
    let there = GidEntry::new(peer("fe80::1"));
    says(end.context.add_gid(there), "a GID that is not in the table yet; this one is at index 1");

    let mut without = self::end(&[]);
    let ah = without.context.create_ah(without.pd, &AddressVector::new(peer("192.0.2.2"), 0));
    says(ah, "sgid_index = 0: the port needs a GID, but 'loopback");
}

#[test]
fn errors_of_work_requests() {
    let mut end = dual();
    let qp = connected(&mut end);
    let remote = RemoteMemory::new(0, RKey::new(1), 8).at(0);
    let send = |op, data| SendWorkRequest { wr_id: 0, op, data, flags: SendFlags::SIGNALED };
    says(
        end.context.post_send(qp, &send(SendOp::Read(remote), Data::Inline(&[]))),
        "data = Inline for RdmaRead: Data::Sges; only SEND, WRITE and ATOMIC WRITE can have inline data",
    );
    let one = send(SendOp::Send, Data::Inline(&[]));
    end.context.post_send(qp, &one).expect("room for one");
    says(
        end.context.post_send(qp, &one),
        "send queue is full: all 1 entries are in use; Context::poll frees an entry when its work request ends and its CQ has room \
         (poll_cq)",
    );
    let ud = end.context.create_qp(&QpConfig::ud(end.pd, end.cq)).expect("as set up");
    for transition in [
        Transition::InitDatagram { qkey: 1 },
        Transition::ReadyToReceiveDatagrams,
        Transition::ReadyToSendUnreliable { sq_psn: Psn::new(0) },
    ] {
        end.context.modify_qp(ud, transition).expect("as set up");
    }
    says(end.context.post_send(ud, &one), "op = Send: SendTo or SendToWithImm on a UD queue pair");
    let srq = end.context.create_srq(&SrqConfig::new(end.pd)).expect("as set up");
    let shared = end.context.create_qp(&QpConfig::rc(end.pd, end.cq).srq(srq)).expect("as set up");
    end.context.modify_qp(shared, Transition::Init { access: Access::NONE }).expect("as set up");
    says(
        end.context.post_recv(shared, &ReceiveWorkRequest { wr_id: 0, sges: &[] }),
        "qp = attached to an SRQ: post receives to the SRQ with post_srq_recv",
    );
    says(
        end.context.create_qp(&QpConfig::uc(end.pd, end.cq).srq(srq)),
        "srq = given for a UC QP: no SRQ; only RC and UD have them",
    );
}

#[test]
fn errors_of_queue_pairs() {
    let mut end = dual();
    let qp = connected(&mut end);
    says(
        end.context.modify_qp(qp, Transition::Update(QpUpdate::default().timeout(14))),
        "timeout = changed for RC in RTS: may change for RC in SQD only; Transition::Drain leads there from RTS",
    );
    says(
        end.context.modify_qp(qp, Transition::Update(QpUpdate::default().qkey(1))),
        "qkey = changed for RC in RTS: may change for UD in INIT, RTS, SQD only",
    );
    let (own, qpn) =
        (end.context.endpoint(qp, 0).expect("as set up"), end.context.query_qp(qp).expect("as set up").qpn);
    says(end.context.handshake(qp, &own, &own), &format!("QP {qpn} is in Rts: ReadyToReceive needs INIT"));
    let ud = end.context.create_qp(&QpConfig::ud(end.pd, end.cq)).expect("as set up");
    let to = SocketAddr::from(([192, 0, 2, 2], 7471));
    says(
        end.context.connect(ud, to, &ConnectionParameters::default()),
        "qp = UD: an RC or UC QP; resolve and accept_datagrams are for UD",
    );
}

#[test]
fn errors_of_memory() {
    let mut end = dual();
    let memory = Memory::shared(64).expect("as set up");
    let address = memory.address().addr().get() as u64;
    let access = Access::LOCAL_WRITE | Access::REMOTE_ATOMIC;
    let iova = (address + 3) % 8;
    let said = format!("iova = {iova:#x}: an iova that is {} modulo 8", address % 8);
    says(end.context.register_at(end.pd, memory, access, iova), &said);

    says(
        "addr=0xffffffffffffff00/rkey=1/length=257".parse::<RemoteMemory>(),
        "addr + length of at most 2^64",
    );
    let last =
        "addr=0xffffffffffffff00/rkey=0x00000001/length=256".parse::<RemoteMemory>().expect("the last bytes");
    assert_eq!(RemoteMemory::from_bytes(&last.to_bytes()).expect("the same"), last);
    let beyond = RemoteMemory::new(u64::MAX, RKey::new(1), 2);
    says(RemoteMemory::from_bytes(&beyond.to_bytes()), "addr + length of at most 2^64");
    says(
        RemoteMemory::from_bytes(&[0; 56]),
        "remote memory = 56 bytes: 20 bytes; of a peer's private data, which is padded, the first RemoteMemory::LEN",
    );
}

#[test]
fn errors_of_connections() {
    let peer = SocketAddr::from(([192, 0, 2, 2], 7471));
    let (near, far) = loopback::pair(&[[192, 0, 2, 1].into()], &[peer.ip()]);
    let mut server = Context::open(Box::new(far), &Config::default()).expect("as set up");
    // It receives MADs once its connection manager is in use.
    let other = SocketAddr::new(peer.ip(), 1);
    server.listen(PortSpace::Tcp, other, &ListenConfig::default()).expect("as set up");
    let server = Runner::start(server, &RunnerConfig::default().idle(Idle::Block)).expect("as set up");
    let mut client = Context::open(Box::new(near), &Config::default()).expect("as set up");
    let (pd, cq) = (client.alloc_pd().expect("as set up"), client.create_cq(16).expect("as set up"));
    let qp = client.create_qp(&QpConfig::rc(pd, cq)).expect("as set up");
    client.modify_qp(qp, Transition::Init { access: Access::NONE }).expect("as set up");
    let refused = client.connect_blocking(
        qp,
        peer,
        &ConnectionParameters::default(),
        std::time::Duration::from_secs(20),
    );
    says(
        refused,
        "192.0.2.2:7471 rejects the request: no listener on port 7471 in this partition (invalid service id)",
    );
    drop(server.stop());
}

#[test]
fn errors_of_completions() {
    let (success, failure) = (WcStatus::Success, WcStatus::LocLenErr);
    let mut completion = WorkCompletion::EMPTY;
    (completion.wr_id, completion.opcode, completion.status) = (7, WcOpcode::Recv, failure);
    says(
        completion.ok(),
        "Recv 7 completed with LocLenErr: refused here: the message is longer than the receive",
    );
    completion.opcode = WcOpcode::RdmaRead;
    says(
        completion.ok(),
        "RdmaRead 7 completed with LocLenErr: refused here: the response does not have the requested length",
    );
    completion.status = success;
    assert_eq!(completion.ok().expect("it has succeeded"), completion);
}
