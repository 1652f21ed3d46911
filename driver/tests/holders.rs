//! Only one program on a host receives the RoCE packets to an address. The refusal of a second one names the first.
#![cfg(feature = "af_xdp")]

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::holder::Holder;
use ferroce_driver::netlink::Netlink;
use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{Error, PacketDriver};
use ferroce_driver_test_support::exchange::{Roce, receive, send};
use ferroce_driver_test_support::namespaces::{Namespaces, VETH, ip};

fn open_af_xdp() -> Result<AfXdp, Error> {
    AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))
}

fn open_udp(address: &str) -> Result<Udp, Error> {
    Udp::open(&UdpConfig::new(address.parse().expect("an address")))
}

/// Checks a refusal, which must name this process.
fn refusal<T>(refused: Result<T, Error>, of: &str, port: &str) {
    let Err(error @ Error::PortInUse { .. }) = refused else { panic!("not refused for {of}") };
    let own = std::fs::read_to_string("/proc/self/comm").expect("its name");
    let expected = format!(
        "UDP port 4791 of {of} is in use by '{}' (pid {}{port}); it does not share the address, or not with this \
         driver (udp:{of} is shared by processes of ferroce, also with an AF_XDP port that came first); stop it or use \
         another address",
        own.trim_end(),
        process::id()
    );
    assert_eq!(error.to_string(), expected);
}

#[test]
fn af_xdp_takes_no_packets_from_a_socket() {
    let Some(pair) = Namespaces::new(1500) else { return };
    for address in ["10.9.0.2", "fd09::2"] {
        let socket = pair.in_b(|| open_udp(address)).unwrap();
        refusal(pair.in_b(open_af_xdp), address, "");
        drop(socket);
        let config = UdpConfig::new(address.parse().unwrap());
        // Sockets of a group admit others of the same user, but not this one.
        let group = pair.in_b(|| Udp::open_group(&config, 2)).unwrap();
        refusal(pair.in_b(open_af_xdp), address, "");
        drop(group);
        drop(pair.in_b(open_af_xdp).unwrap());
    }
    // A socket of another program, on all addresses of both versions.
    let any: SocketAddr = "[::]:4791".parse().unwrap();
    let socket = pair.in_b(|| UdpSocket::bind(any)).unwrap();
    let Err(error) = pair.in_b(open_af_xdp) else { panic!("not refused") };
    assert!(
        matches!(&error, Error::PortInUse { holder: Some(holder), .. } if holder.process.is_some()),
        "{error}"
    );
    drop(socket);
    let link = pair.in_b(|| Netlink::open().unwrap().interface(VETH).unwrap().xdp);
    assert!(link.is_none(), "what was refused has left a program");
}

#[test]
fn a_socket_is_not_opened_where_af_xdp_takes_the_packets() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let port = pair.in_b(open_af_xdp).unwrap();
    for address in ["10.9.0.2", "fd09::2"] {
        refusal(pair.in_b(|| open_udp(address)), address, ", an AF_XDP port");
        let config = UdpConfig::new(address.parse().unwrap());
        refusal(pair.in_b(|| Udp::open_group(&config, 2)), address, ", an AF_XDP port");
        let [holder] = &pair.in_b(|| holders(address))[..] else { panic!("one holder") };
        assert_eq!(holder.process.as_ref().map(|process| process.pid), Some(process::id()));
        assert_eq!((holder.address.to_string().as_str(), holder.is_kernel), (address, false));
        let index = pair.in_b(|| Netlink::open().unwrap().interface(VETH).unwrap().index);
        assert_eq!(holder.interface, Some(index));
    }
    drop(port);
    assert!(pair.in_b(|| holders("10.9.0.2")).is_empty());
    drop(pair.in_b(|| open_udp("10.9.0.2")).unwrap());
}

/// A program that repeatedly opens the port for moments can't make an AF_XDP port open without it.
#[test]
fn an_open_port_has_reserved_its_addresses() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let address: SocketAddr = "10.9.0.2:4791".parse().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pair.in_b(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(UdpSocket::bind(address));
                }
            });
        });
        let mut unreserved = 0;
        for _ in 0..40 {
            match pair.in_b(open_af_xdp) {
                Ok(port) => {
                    let is_free = pair.in_b(|| (0..20).any(|_| UdpSocket::bind(address).is_ok()));
                    unreserved += u32::from(is_free);
                    drop(port);
                }
                Err(Error::PortInUse { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(unreserved, 0);
    });
}

/// The kernel keeps an address that was added after the port was opened, and a socket on it receives its packets.
#[test]
fn packets_to_other_addresses_reach_their_sockets() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(|| open_af_xdp().unwrap());
    ip(&format!("-n {} addr add 10.9.0.22/24 dev {VETH}", pair.b));
    let mut beside = pair.in_b(|| open_udp("10.9.0.22")).unwrap();
    let roce = Roce::to(b.capabilities(), a.capabilities().mac);
    let to_other = Roce { ip: [10, 9, 0, 22].into(), ..roce };
    send(&mut a, &to_other.build(100, 1));
    send(&mut a, &roce.build(100, 2));
    assert_eq!(receive(&mut b, 1), [roce.build(100, 2)]);
    let [packet] = &receive(&mut beside, 1)[..] else { panic!("one packet") };
    assert!(packet.ends_with(&to_other.build(100, 1)[42..]));
}

/// An address of the port that the kernel's interface does not have.
#[test]
fn an_address_can_be_added_to_a_port() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(|| open_af_xdp().unwrap());
    let roce = Roce::to(b.capabilities(), a.capabilities().mac);
    let to_added = Roce { ip: [10, 81, 0, 2].into(), ..roce };
    send(&mut a, &to_added.build(100, 1));
    send(&mut a, &roce.build(100, 2));
    assert_eq!(receive(&mut b, 1), [roce.build(100, 2)], "before it is added");
    b.admit(to_added.ip).unwrap();
    send(&mut a, &to_added.build(100, 3));
    assert_eq!(receive(&mut b, 1), [to_added.build(100, 3)]);
}

/// Ports of AF_XDP share the queues of an interface, and the program is detached with the last of them.
#[test]
fn ports_on_different_queues_coexist() {
    let Some(pair) = Namespaces::with_queues(1500, 2) else { return };
    let open = |queue| move || AfXdp::open(&AfXdpConfig::new(VETH).queue(queue)).unwrap();
    let [first, second] = [pair.in_b(open(0)), pair.in_b(open(1))];
    drop(first);
    refusal(pair.in_b(|| open_udp("10.9.0.2")), "10.9.0.2", ", an AF_XDP port");
    drop(second);
    drop(pair.in_b(|| open_udp("10.9.0.2")).unwrap());
}

fn holders(address: &str) -> Vec<Holder> {
    let interface = Netlink::open().and_then(|netlink| netlink.interface(VETH)).expect("veth0");
    Holder::all(address.parse::<IpAddr>().expect("an address"), &interface).expect("a list")
}
