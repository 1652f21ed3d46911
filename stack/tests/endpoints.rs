//! Two ends that tell each other who they are, and connect by one call each.

use std::net::IpAddr;

use ferroce::driver::loopback;
use ferroce::*;

fn addresses() -> [Vec<IpAddr>; 2] {
    ["192.0.2.1 fe80::1", "192.0.2.2 fe80::2"]
        .map(|list| list.split(' ').map(|address| address.parse().unwrap()).collect())
}

fn pair() -> [Context; 2] {
    let [near, far] = addresses();
    let (near, far) = loopback::pair(&near, &far);
    [near, far].map(|port| Context::open(Box::new(port), &Config::default()).unwrap())
}

/// Over both kinds of connection and both IP versions, what is told as text or as bytes.
#[test]
fn a_handshake_connects() {
    for make in [QpConfig::rc, QpConfig::uc] {
        for gid in [0, 1] {
            let mut ends = pair();
            let made = ends.each_mut().map(|end| {
                let (pd, cq) = (end.alloc_pd().unwrap(), end.create_cq(16).unwrap());
                let qp = end.create_qp(&make(pd, cq)).unwrap();
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let mr = end.register(pd, Memory::zeroed(64).unwrap(), access).unwrap();
                let endpoint = end.endpoint(qp, gid).unwrap();
                (qp, cq, mr, endpoint, end.remote(mr).unwrap())
            });
            let [(a, cq, mr, local, _), (b, _, target, remote, memory)] = made;
            let told: Endpoint = remote.to_string().parse().unwrap();
            ends[0].handshake(a, &local, &told).unwrap();
            ends[1].handshake(b, &remote, &Endpoint::from_bytes(&local.to_bytes()).unwrap()).unwrap();
            ends[0].write(mr, 8, b"hello").unwrap();
            let sges = [mr.sge(8..13)];
            let (op, data) = (SendOp::Write(memory.at(2)), Data::Sges(&sges));
            ends[0]
                .post_send(a, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })
                .unwrap();
            let mut clock = Clock::start();
            let completion = (0..100_000).find_map(|_| {
                ends.iter_mut().for_each(|end| _ = end.poll(clock.now()).unwrap());
                ends[0].poll_cq(cq).unwrap()
            });
            assert_eq!(completion.unwrap().status, WcStatus::Success);
            ends[1].poll(clock.now()).unwrap();
            let mut found = [0; 7];
            ends[1].read(target, 0, &mut found).unwrap();
            assert_eq!(&found, b"\0\0hello");
        }
    }
}

#[test]
fn a_handshake_with_what_is_not_its_own_is_refused() {
    let mut ends = pair();
    let end = &mut ends[0];
    let (pd, cq) = (end.alloc_pd().unwrap(), end.create_cq(16).unwrap());
    let qp = end.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let ud = end.create_qp(&QpConfig::ud(pd, cq)).unwrap();
    let (local, of_ud) = (end.endpoint(qp, 0).unwrap(), end.endpoint(ud, 0).unwrap());
    assert!(end.endpoint(qp, 2).unwrap_err().to_string().contains("below 2"));
    let said = end.handshake(qp, &of_ud, &local).unwrap_err().to_string();
    assert!(said.contains("the endpoint of the queue pair"), "{said}");
    let said = end.handshake(ud, &of_ud, &local).unwrap_err().to_string();
    assert!(said.contains("an RC or UC queue pair"), "{said}");
    let elsewhere = Endpoint::new(Gid::from(addresses()[1][0]), local.qpn, local.psn);
    let said = end.handshake(qp, &elsewhere, &local).unwrap_err().to_string();
    assert!(said.contains("an endpoint with a GID of"), "{said}");
    assert_eq!(end.query_qp(qp).unwrap().state, QpState::Reset, "nothing has changed");
    // Who narrows the rights does it before.
    end.modify_qp(qp, Transition::Init { access: Access::REMOTE_READ }).unwrap();
    end.handshake(qp, &local, &Endpoint::new(Gid::from(addresses()[1][0]), Qpn::new(9), Psn::new(9)))
        .unwrap();
    let attributes = end.query_qp(qp).unwrap();
    assert_eq!((attributes.state, attributes.access), (QpState::Rts, Access::REMOTE_READ));
}

#[test]
fn a_host_with_link_local_addresses_alone_has_a_gid_for_every_ipv6_peer() {
    let (port, _) = loopback::pair(&["fe80::1".parse().unwrap()], &["fe80::2".parse().unwrap()]);
    let context = Context::open(Box::new(port), &Config::default()).unwrap();
    let peer = |address: &str| Gid::from(address.parse::<IpAddr>().unwrap());
    assert_eq!(context.port().gid_index_for(peer("2001:db8::1")), Some(0));
    assert_eq!(context.port().gid_index_for(peer("fe80::9")), Some(0));
    assert_eq!(context.port().gid_index_for(peer("192.0.2.1")), None);
}

#[test]
fn errors_are_printed_as_they_read() {
    let error = "192.0.2.1".parse::<Endpoint>().unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}

#[test]
#[should_panic(expected = "bytes 8..7: a range of at most")]
fn a_piece_that_ends_before_it_starts_is_refused() {
    let mut ends = pair();
    let pd = ends[0].alloc_pd().unwrap();
    let mr = ends[0].register(pd, Memory::zeroed(64).unwrap(), Access::NONE).unwrap();
    #[expect(clippy::reversed_empty_ranges)]
    let _ = mr.sge(8..7);
}
