use super::*;

#[test]
fn the_loopback_interface_is_listed() {
    let netlink = Netlink::open().unwrap();
    let lo = netlink.interface("lo").unwrap();
    assert!(lo.loopback);
    assert_eq!(lo.index, 1);
    assert!(lo.rx_queues >= 1);
}

#[test]
fn a_missing_interface_is_named_with_those_that_exist() {
    let error = Netlink::open().unwrap().interface("nosuch0").unwrap_err().to_string();
    assert!(error.contains("'nosuch0'") && error.contains("lo"), "{error}");
}

#[test]
fn addresses_come_in_gid_order() {
    let mut lo = Netlink::open().unwrap().interface("lo").unwrap();
    let of = |s: &str| s.parse::<IpAddr>().unwrap();
    lo.addresses = ["10.0.0.1", "2001:db8::1", "fe80::1", "10.0.0.2"].map(|s| (of(s), 0)).to_vec();
    assert_eq!(lo.gid_order(), ["fe80::1", "10.0.0.1", "10.0.0.2", "2001:db8::1"].map(of));
}

#[test]
fn a_full_neighbour_table_is_reported_with_its_remedy() {
    let lo = Netlink::open().unwrap().interface("lo").unwrap();
    for (peer, setting) in
        [("192.0.2.1", "net.ipv4.neigh.default.gc_thresh3"), ("fe80::1", "net.ipv6.neigh.default.gc_thresh3")]
    {
        let full = io::Error::from_raw_os_error(libc::ENOBUFS);
        let error = not_touched(&lo, peer.parse().unwrap(), full).to_string();
        assert!(error.contains(&format!("its table is full: raise {setting}")), "{error}");
    }
}
