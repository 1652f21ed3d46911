//! Two ends that exchange endpoints, and connect by one call each.

use std::net::IpAddr;

use ferroce::driver::loopback;
use ferroce::*;

fn addresses() -> [Vec<IpAddr>; 2] {
    ["192.0.2.1 fe80::1", "192.0.2.2 fe80::2"]
        .map(|list| list.split(' ').map(|address| address.parse().expect("as set up")).collect())
}

fn pair() -> [Context; 2] {
    let [near, far] = addresses();
    let (near, far) = loopback::pair(&near, &far);
    [near, far].map(|port| Context::open(Box::new(port), &Config::default()).expect("as set up"))
}

/// Over both kinds of connection and both IP versions, with the endpoints as text or as bytes.
#[test]
fn a_handshake_connects() {
    for make in [QpConfig::rc, QpConfig::uc] {
        for gid in [0, 1] {
            let mut ends = pair();
            let made = ends.each_mut().map(|end| {
                let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
                let qp = end.create_qp(&make(pd, cq)).expect("as set up");
                let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let mr = end.register(pd, Memory::zeroed(64).expect("as set up"), access).expect("as set up");
                let endpoint = end.endpoint(qp, gid).expect("as set up");
                (qp, cq, mr, endpoint, end.remote(mr).expect("as set up"))
            });
            let [(a, cq, mr, local, _), (b, _, target, remote, memory)] = made;
            let told: Endpoint = remote.to_string().parse().expect("as set up");
            ends[0].handshake(a, &local, &told).expect("as set up");
            ends[1]
                .handshake(b, &remote, &Endpoint::from_bytes(&local.to_bytes()).expect("as set up"))
                .expect("as set up");
            ends[0].write(mr, 8, b"hello").expect("as set up");
            let sges = [mr.sge(8..13)];
            let (op, data) = (SendOp::Write(memory.at(2)), Data::Sges(&sges));
            ends[0]
                .post_send(a, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })
                .expect("as set up");
            let mut clock = Clock::start();
            let completion = (0..100_000).find_map(|_| {
                ends.iter_mut().for_each(|end| _ = end.poll(clock.now()).expect("as set up"));
                ends[0].poll_cq(cq).expect("as set up")
            });
            assert_eq!(completion.expect("as set up").status, WcStatus::Success);
            ends[1].poll(clock.now()).expect("as set up");
            let mut found = [0; 7];
            ends[1].read(target, 0, &mut found).expect("as set up");
            assert_eq!(&found, b"\0\0hello");
        }
    }
}

/// Each kind of peer is reached from an address of its kind; without one, the error names the peer and the port.
#[test]
fn an_endpoint_for_a_peer_has_the_address_that_reaches_it() {
    let [mut end, _] = pair();
    let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
    let qp = end.create_qp(&QpConfig::rc(pd, cq)).expect("as set up");
    let mut endpoint = |peer: &str| end.endpoint_for(qp, peer.parse().expect("an address"));
    for (peer, own) in [("192.0.2.2", "192.0.2.1"), ("::ffff:192.0.2.2", "192.0.2.1"), ("fe80::2", "fe80::1")]
    {
        assert_eq!(endpoint(peer).expect(peer).gid.to_ip().to_string(), own, "for {peer}");
    }
    for peer in ["0.0.0.0", "::", "239.1.1.1", "ff02::1"] {
        let refusal = endpoint(peer).expect_err(peer).to_string();
        assert!(refusal.contains(&format!("address = {peer}: the address of one peer")), "{refusal}");
    }
    let (port, _) = loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    let mut end = Context::open(Box::new(port), &Config::default()).expect("as set up");
    let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
    let qp = end.create_qp(&QpConfig::rc(pd, cq)).expect("as set up");
    let refusal = end.endpoint_for(qp, "fe80::2".parse().expect("an address")).expect_err("no IPv6 address");
    assert!(refusal.to_string().contains("which has no IPv6 address"), "{refusal}");
}

#[test]
fn datagrams_start_in_one_call() {
    let [mut end, _] = pair();
    let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
    let [datagrams, connected] =
        [QpConfig::ud(pd, cq), QpConfig::rc(pd, cq)].map(|config| end.create_qp(&config).expect("as set up"));
    end.start_datagrams(datagrams, 7).expect("from RESET");
    assert_eq!(end.query_qp(datagrams).expect("as set up").state, QpState::Rts);
    end.modify_qp(datagrams, Transition::Reset).expect("as set up");
    end.modify_qp(datagrams, Transition::InitDatagram { qkey: 8 }).expect("as set up");
    end.start_datagrams(datagrams, 7).expect("from INIT");
    let attributes = end.query_qp(datagrams).expect("as set up");
    assert_eq!((attributes.state, attributes.qkey), (QpState::Rts, Some(7)));
    for (qp, said) in [(datagrams, "is in Rts"), (connected, "InitDatagram: a UD QP")] {
        let state = end.query_qp(qp).expect("as set up").state;
        let refusal = end.start_datagrams(qp, 7).expect_err(said).to_string();
        assert!(refusal.contains(said), "{refusal}");
        assert_eq!(end.query_qp(qp).expect("as set up").state, state, "{refusal}");
    }
}

/// The GID alone determines the table entry; an endpoint with another GID would be connected wrongly.
#[test]
fn an_endpoint_must_match_its_gid_table_entry() {
    let [near, far] = addresses();
    let (near, _far) = loopback::pair(&near, &far);
    let mut end = Context::open(Box::new(near), &Config::default().roce_v1(true)).expect("as set up");
    let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
    let qp = end.create_qp(&QpConfig::rc(pd, cq)).expect("as set up");
    let gids = end.port().gids.clone();
    let on_vlan = end.add_gid(GidEntry::new(gids[0].gid).vlan(7)).expect("as set up");
    let mut rows = [0; 2];
    for (row, entry) in gids.iter().enumerate() {
        rows[usize::from(entry.roce_v1)] += 1;
        let endpoint = end.endpoint(qp, row);
        assert_eq!(endpoint.is_ok(), !entry.roce_v1, "row {row}: {endpoint:?}");
    }
    assert_eq!(rows, [2, 2]);
    let first = end.port().gid_index(gids[0].gid).expect("of RoCE v2");
    let said = end.endpoint(qp, on_vlan).unwrap_err().to_string();
    assert!(said.contains(&format!("sgid_index = {on_vlan}: {first}, the first row")), "{said}");
}

#[test]
fn a_handshake_with_a_foreign_endpoint_is_refused() {
    let mut ends = pair();
    let end = &mut ends[0];
    let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
    let qp = end.create_qp(&QpConfig::rc(pd, cq)).expect("as set up");
    let ud = end.create_qp(&QpConfig::ud(pd, cq)).expect("as set up");
    let (local, of_ud) = (end.endpoint(qp, 0).expect("as set up"), end.endpoint(ud, 0).expect("as set up"));
    assert!(end.endpoint(qp, 2).unwrap_err().to_string().contains("below 2"));
    let said = end.handshake(qp, &of_ud, &local).unwrap_err().to_string();
    assert!(said.contains("the endpoint of the queue pair"), "{said}");
    let error = end.handshake(ud, &of_ud, &local).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("an RC or UC queue pair"), "{error}");
    let elsewhere = Endpoint::new(Gid::from(addresses()[1][0]), local.qpn, local.psn);
    let said = end.handshake(qp, &elsewhere, &local).unwrap_err().to_string();
    assert!(said.contains("an endpoint with a RoCE v2 GID of"), "{said}");
    assert_eq!(end.query_qp(qp).expect("as set up").state, QpState::Reset, "nothing has changed");
    // A refused transition: the queue pair is in RESET again.
    let other_version = Endpoint::new(Gid::from(addresses()[1][1]), Qpn::new(9), Psn::new(9));
    let said = end.handshake(qp, &local, &other_version).unwrap_err().to_string();
    assert!(said.contains("IP version"), "{said}");
    assert_eq!(end.query_qp(qp).expect("as set up").state, QpState::Reset);
    // Rights are narrowed before.
    end.modify_qp(qp, Transition::Init { access: Access::REMOTE_READ }).expect("as set up");
    end.handshake(qp, &local, &Endpoint::new(Gid::from(addresses()[1][0]), Qpn::new(9), Psn::new(9)))
        .expect("as set up");
    let attributes = end.query_qp(qp).expect("as set up");
    assert_eq!((attributes.state, attributes.access), (QpState::Rts, Access::REMOTE_READ));
}

/// A refused verb changes nothing. From INIT the queue pair could not go back from RTR.
#[test]
fn a_refused_handshake_leaves_the_queue_pair_unchanged() {
    let [mut end, _other] = pair();
    let (pd, cq) = (end.alloc_pd().expect("as set up"), end.create_cq(16).expect("as set up"));
    let peer = Gid::from(addresses()[1][0]);
    let no_version = Endpoint::new(Gid::from(addresses()[1][1]), Qpn::new(9), Psn::new(9));
    let too_many = Endpoint::new(peer, Qpn::new(9), Psn::new(9)).rd_atomic(129);
    for (is_initialised, remote) in [(false, too_many), (true, too_many), (true, no_version)] {
        let qp = end.create_qp(&QpConfig::rc(pd, cq)).expect("as set up");
        if is_initialised {
            end.modify_qp(qp, Transition::Init { access: Access::REMOTE_READ }).expect("as set up");
        }
        let before = end.query_qp(qp).expect("as set up");
        let local = end.endpoint(qp, 0).expect("as set up");
        let error = end.handshake(qp, &local, &remote).unwrap_err();
        assert_eq!(end.query_qp(qp).expect("as set up"), before, "{error}");
        // Nothing prevents the valid one.
        end.handshake(qp, &local, &Endpoint::new(peer, Qpn::new(9), Psn::new(9))).expect("as set up");
    }
}

#[test]
fn a_host_with_link_local_addresses_alone_has_a_gid_for_every_ipv6_peer() {
    let (port, _) =
        loopback::pair(&["fe80::1".parse().expect("as set up")], &["fe80::2".parse().expect("as set up")]);
    let context = Context::open(Box::new(port), &Config::default()).expect("as set up");
    let peer = |address: &str| Gid::from(address.parse::<IpAddr>().expect("as set up"));
    assert_eq!(context.port().gid_index_for(peer("2001:db8::1")), Some(0));
    assert_eq!(context.port().gid_index_for(peer("fe80::9")), Some(0));
    assert_eq!(context.port().gid_index_for(peer("192.0.2.1")), None);
}

#[test]
fn errors_print_the_same_with_debug_and_display() {
    let error = "192.0.2.1".parse::<Endpoint>().unwrap_err();
    assert_eq!(format!("{error:?}"), error.to_string());
}

#[test]
#[should_panic(expected = "bytes 8..7: a range of at most")]
fn a_piece_that_ends_before_it_starts_is_refused() {
    let mut ends = pair();
    let pd = ends[0].alloc_pd().expect("as set up");
    let mr = ends[0].register(pd, Memory::zeroed(64).expect("as set up"), Access::NONE).expect("as set up");
    #[expect(clippy::reversed_empty_ranges)]
    let _ = mr.sge(8..7);
}

/// The text of each, in any serde format.
#[test]
fn serde_uses_the_text_form() {
    let text = "192.0.2.1/qpn=0x000011/psn=0x123456/mtu=1024/rd_atomic=16";
    let endpoint: Endpoint = text.parse().expect("an endpoint");
    let memory: RemoteMemory = "addr=0x1000/rkey=0x00c0ffee/length=64".parse().expect("memory");
    let json = serde_json::to_string(&(endpoint, memory)).expect("JSON");
    assert_eq!(json, format!("[\"{text}\",\"{memory}\"]"));
    assert_eq!(serde_json::from_str::<(Endpoint, RemoteMemory)>(&json).expect("both"), (endpoint, memory));
    let refused = serde_json::from_str::<Endpoint>("\"192.0.2.1\"").expect_err("no endpoint");
    assert!(refused.to_string().contains("ADDRESS/qpn=N"), "{refused}");
}
