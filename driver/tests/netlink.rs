//! Interfaces, neighbours and routes of the kernel, on veth pairs between namespaces of the test. Needs root; otherwise
//! prints the reason and passes.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::net::IpAddr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::netlink::{Dcb, Neighbour, Netlink, Pause};
use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{Error, NextHop, PacketDriver};
use ferroce_driver_test_support::namespaces::{Namespaces, VETH, ip};
use ferroce_driver_test_support::patience::until;

/// Longer than the kernel's resolution of a neighbour.
const PATIENCE: Duration = Duration::from_secs(8);

#[test]
fn interfaces_are_listed_with_their_attributes() {
    let Some(pair) = Namespaces::with_queues(4200, 2) else { return };
    pair.in_a(|| {
        let netlink = Netlink::open().unwrap();
        // The kernel detects the carrier a moment later.
        let carrier = || netlink.interface(VETH).unwrap().carrier.then_some(());
        until(Duration::from_secs(10), carrier, || "a carrier".to_owned());
        let all = netlink.interfaces().unwrap();
        assert_eq!(all.iter().map(|i| i.name.as_str()).collect::<Vec<_>>(), ["lo", VETH]);
        let veth = &all[1];
        assert_eq!((veth.mtu, veth.kind.as_deref(), veth.loopback), (4200, Some("veth"), false));
        assert!(veth.up && veth.carrier && veth.xdp.is_none());
        assert_eq!((veth.rx_queues, veth.tx_queues), (2, 2));
        // The kernel's value for every veth interface.
        assert_eq!((all[0].speed, veth.speed), (None, Some(10_000_000_000)));
        let sockets = UdpConfig::of_interface(VETH).and_then(|config| Udp::open(&config)).unwrap();
        assert_eq!(sockets.line_rate(), veth.speed);
        // AF_XDP needs UDP port 4791 too.
        drop(sockets);
        assert_eq!(AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap().line_rate(), veth.speed);
        let sys = Command::new("ip").args(["link", "show", VETH]).output().unwrap();
        let mac = veth.mac.map(|b| format!("{b:02x}")).join(":");
        assert!(String::from_utf8_lossy(&sys.stdout).contains(&mac), "{mac}");
        let gids = veth.gid_order();
        assert!(matches!(gids[0], IpAddr::V6(v6) if v6.is_unicast_link_local()), "{gids:?}");
        assert_eq!(gids[1..], ["10.9.0.1", "fd09::1"].map(|s| s.parse::<IpAddr>().unwrap()));
        ip(&format!("-n {} link set {VETH} down", pair.a));
        assert!(!netlink.interface(VETH).unwrap().up);
    });
}

/// The kernel answers both requests, but a veth interface has neither.
#[test]
fn a_port_without_pause_frames_and_traffic_classes_has_none() {
    let Some(pair) = Namespaces::new(1500) else { return };
    pair.in_a(|| {
        let veth = Netlink::open().unwrap().interface(VETH).unwrap();
        assert_eq!((Pause::of(&veth).unwrap(), Dcb::of(&veth).unwrap()), (None, None));
        ip(&format!("-n {} link del {VETH}", pair.a));
        let errors = [Pause::of(&veth).unwrap_err(), Dcb::of(&veth).unwrap_err()].map(|e| e.to_string());
        for (error, what) in errors.iter().zip(["the pause frames", "the traffic classes"]) {
            assert!(error.contains(what) && error.contains("'veth0'"), "{error}");
            assert!(error.contains("No such device"), "{error}");
        }
    });
}

#[test]
fn neighbours_are_resolved_by_the_kernel() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, b) = pair.in_both(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap());
    let own: IpAddr = "10.9.0.1".parse().unwrap();
    assert_eq!(a.resolve(own).unwrap(), NextHop::Found(a.capabilities().mac));
    // Not in the namespace's thread: the driver keeps the namespace in which it was opened.
    for peer in ["10.9.0.2", "fd09::2"] {
        let start = Instant::now();
        let mac = a.resolve_blocking(peer.parse().unwrap(), PATIENCE).unwrap();
        assert_eq!(mac, b.capabilities().mac, "{peer}");
        assert!(start.elapsed() < Duration::from_secs(3));
    }
    let link_local = b.capabilities().addresses[0];
    assert_eq!(a.resolve_blocking(link_local, PATIENCE).unwrap(), b.capabilities().mac, "{link_local}");
}

#[test]
fn a_silent_or_unreachable_peer_is_named() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let mut a = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))).unwrap();
    for (peer, protocol) in [("10.9.0.77", "ARP"), ("fd09::77", "neighbour discovery")] {
        let start = Instant::now();
        let error = a.resolve_blocking(peer.parse().unwrap(), PATIENCE).unwrap_err();
        assert_eq!(error.to_string(), format!("{peer} does not answer {protocol} on 'veth0'"));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
    // The last one is the broadcast address of the link.
    for peer in ["192.0.2.1", "2001:db8::1", "10.9.0.255"] {
        let error = a.resolve(peer.parse().unwrap()).unwrap_err();
        assert_eq!(error.to_string(), format!("no route to {peer} from 'veth0'"));
    }
    // A peer in a VLAN is not resolved without its tag (for an existing VLAN: tools/tests/rxe/semantics.rs).
    let error = a.resolve_in_vlan(7, "10.9.0.2".parse().unwrap()).unwrap_err();
    assert!(matches!(&error, Error::NoVlan { interface, vlan: 7 } if interface == VETH), "{error}");
    assert!(error.to_string().contains("ip link add link veth0 name veth0.7 type vlan id 7"), "{error}");
}

/// No call waits for a neighbour, whether it answers or not.
#[test]
fn resolving_a_neighbour_does_not_block() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let mut a = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))).unwrap();
    for peer in ["10.9.0.77", "fd09::77"] {
        let (mut calls, mut longest) = (0, Duration::ZERO);
        let error = loop {
            let start = Instant::now();
            let looked = a.resolve(peer.parse().unwrap());
            longest = longest.max(start.elapsed());
            calls += 1;
            match looked {
                Ok(NextHop::Pending) => thread::sleep(Duration::from_millis(5)),
                Ok(NextHop::Found(mac)) => panic!("{peer} has the address {mac:02x?}"),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::NoNeighbour { .. }), "{error}");
        println!("{peer}: {calls} calls until it is given up, the longest {longest:?}");
        assert!(calls > 10 && longest < Duration::from_millis(200), "{calls} calls, {longest:?}");
    }
}

#[test]
fn routes_have_gateways_sources_and_mtus() {
    let Some(pair) = Namespaces::new(1500) else { return };
    ip(&format!("-n {} route add 192.0.2.0/24 via 10.9.0.2 mtu 1280", pair.a));
    ip(&format!("-n {} route add 2001:db8::/32 via fd09::2 dev {VETH}", pair.a));
    ip(&format!("-n {} route add 198.51.100.0/24 via inet6 fd09::2 dev {VETH}", pair.a));
    ip(&format!("-n {} route add unreachable 203.0.113.0/24", pair.a));
    let mac = pair.in_b(|| Netlink::open().unwrap().interface(VETH).unwrap().mac);
    pair.in_a(|| {
        let netlink = Netlink::open().unwrap();
        let veth = netlink.interface(VETH).unwrap();
        let of = |s: &str| s.parse::<IpAddr>().unwrap();
        let route = netlink.route(&veth, of("192.0.2.9")).unwrap();
        assert_eq!(route.gateway, Some(of("10.9.0.2")));
        assert_eq!((route.source, route.mtu), (Some(of("10.9.0.1")), Some(1280)));
        let route = netlink.route(&veth, of("10.9.0.2")).unwrap();
        assert_eq!((route.gateway, route.mtu), (None, None));
        for gateway in ["2001:db8::9", "198.51.100.9"] {
            assert_eq!(netlink.route(&veth, of(gateway)).unwrap().gateway, Some(of("fd09::2")));
        }
        assert!(matches!(netlink.route(&veth, of("203.0.113.1")), Err(Error::NoRoute { .. })));
        assert_eq!(netlink.neighbour(&veth, of("10.9.0.2")).unwrap(), Neighbour::Absent);
        for peer in ["192.0.2.9", "2001:db8::9", "198.51.100.9"] {
            // Neighbour discovery on a new link takes time, and the kernel may fail once.
            let found = || match netlink.resolve(&veth, of(peer)) {
                Ok(NextHop::Found(mac)) => Some(mac),
                _ => None,
            };
            let resolved = until(Duration::from_secs(20), found, || {
                format!("{peer}: {:?}", netlink.resolve(&veth, of(peer)))
            });
            assert_eq!(resolved, mac, "{peer}");
        }
        assert_eq!(netlink.neighbour(&veth, of("10.9.0.2")).unwrap(), Neighbour::Fresh(mac));
    });
}
