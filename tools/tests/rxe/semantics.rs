//! The semantics of the verbs, over rdma_rxe at one end or both: this test itself, run in the guest.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use ferroce::{Config, Context, DeviceSpec, Gid, GidEntry, ListenConfig, PortSpace};
use ferroce_driver_test_support::namespaces::{self, ip};
use ferroce_test_support::semantics::{self, End, Kind, Pair, VLAN};

use crate::guest::Guest;

/// rdma_rxe at one end of a veth pair, and a namespace for the software stack at the other.
const CABLE: &str = "ip netns add soft && ip link add v0 type veth peer name v1 && ip link set v1 netns soft && \
    ip link set v0 mtu 3000 up && ip addr add 10.79.0.1/24 dev v0 && ip -n soft link set lo up && \
    ip -n soft link set v1 mtu 3000 up && ip -n soft addr add 10.79.0.2/24 dev v1 && \
    ip addr add fd79::1/64 dev v0 nodad && ip -n soft addr add fd79::2/64 dev v1 nodad && \
    ip link add link v0 name v0.7 type vlan id 7 && ip link set v0.7 up && ip addr add 10.81.0.1/24 dev v0.7 && \
    ip -n soft link add link v1 name v1.7 type vlan id 7 && ip -n soft link set v1.7 up && \
    ip -n soft addr add 10.81.0.2/24 dev v1.7 && rdma link add rxe1 type rxe netdev v0 && \
    ip link add link eth0 name eth0.7 type vlan id 7 && ip link set eth0.7 up && ip addr add 10.82.0.1/24 dev eth0.7";
/// The ends of the cases; the requester first.
const PAIRS: [(&str, &str); 3] = [
    ("rdma_rxe to rdma_rxe", "ibverbs:rxe0,ibverbs:rxe0"),
    ("rdma_rxe to software", "ibverbs:rxe1,af_xdp:v1@soft"),
    ("software to rdma_rxe", "af_xdp:v1@soft,ibverbs:rxe1"),
];
/// The time limit of all cases over one pair, in an emulated guest on a busy machine.
const PATIENCE: Duration = Duration::from_secs(400);

/// Runs all cases in the guest. Returns their number.
pub(crate) fn run(guest: &Guest) -> u32 {
    guest.start(CABLE).succeed();
    let mut wrong = Vec::new();
    for (pair, ends) in PAIRS {
        let only =
            std::env::var("FERROCE_CASE").map(|words| format!("FERROCE_CASE='{words}'")).unwrap_or_default();
        let environment = format!("cd /tmp; RUST_BACKTRACE=0 FERROCE_ENDS={ends} {only}");
        let said = guest.start_inside(&environment, "test", "--nocapture").finish_in(PATIENCE);
        let (text, is_right) = said.map_or_else(|text| (text, false), |text| (text, true));
        println!("{pair}\n{text}");
        if !is_right {
            wrong.push(pair);
        }
    }
    if std::env::var_os("FERROCE_CASE").is_none() {
        is_in_vlan(guest);
    }
    guest.start("rdma link delete rxe1; ip netns del soft; ip link del eth0.7").succeed();
    assert!(wrong.is_empty(), "{wrong:?}: see WRONG above");
    (PAIRS.len() * semantics::cases().len()) as u32
}

/// In the guest: runs the cases over these ends, `DEVICE` or `DEVICE@NAMESPACE` separated by a comma, and prints the
/// table.
pub(crate) fn inside(ends: &str) {
    let ends: Vec<(&str, Option<&str>)> = ends
        .split(',')
        .map(|end| end.split_once('@').map_or((end, None), |(end, name)| (end, Some(name))))
        .collect();
    let [a, b] = ends[..] else { panic!("FERROCE_ENDS: two ends, with a comma between them") };
    // AF_XDP opens everything that it needs in its namespace here; the kernel's connection manager uses this thread's
    // namespace.
    let [(first, a), (second, b)] = [a, b].map(|(device, namespace)| match namespace {
        Some(namespace) => namespaces::inside(namespace, || open(device)),
        None => open(device),
    });
    let mut pair = Pair::new([a, b]).expect("two ends that reach each other");
    assert!(pair.has_ipv6(), "the two have no IPv6 addresses");
    assert!(pair.has_vlan(), "the two have no VLAN {VLAN}");
    let (table, wrong) =
        semantics::run(&mut pair, [first, second], std::env::var("FERROCE_CASE").ok().as_deref());
    println!("{table}{wrong} wrong");
    assert_eq!(wrong, 0);
    if first == Kind::Rxe && second == Kind::Software {
        lists_a_new_vlan(&mut pair.ends[0]);
    }
}

/// A VLAN that is set up on the RNIC's interface while its context is open has a row of the GID table, with its number,
/// until it is removed.
fn lists_a_new_vlan(end: &mut End) {
    ip("link add link v0 name v0.8 type vlan id 8");
    ip("link set v0.8 up");
    ip("addr add 10.83.0.1/24 dev v0.8");
    let (gid, start) = (Gid::from_ipv4([10, 83, 0, 1].into()), Instant::now());
    let row = loop {
        end.poll().expect("the card is there");
        if let Some(row) = end.context.port().gids.iter().find(|row| row.gid == gid) {
            break *row;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "no row {gid}: {:?}", end.context.port().gids);
    };
    assert_eq!((row.vlan, row.roce_v1), (Some(8), false));
    println!("a new VLAN is listed after {:?}", start.elapsed());
    ip("link del v0.8");
    // The row remains, since queue pairs may use it; there is no listener on its address.
    let (anywhere, config) = (SocketAddr::from(([0, 0, 0, 0], 20_999)), ListenConfig::default());
    loop {
        end.poll().expect("the card is there");
        match end.context.listen(PortSpace::Tcp, anywhere, &config) {
            Ok(listener) => break end.context.unlisten(listener).expect("a listener"),
            Err(error) => assert!(start.elapsed() < Duration::from_secs(20), "{error}"),
        }
    }
}

/// Packets that rdma_rxe sends from a VLAN's address leave through the VLAN's interface, with a tag, and packets to one
/// must arrive through it: the message of a case, in each direction.
fn is_in_vlan(guest: &Guest) {
    for name in ["tx_bytes", "rx_bytes"] {
        let said = guest.start(&format!("cat /sys/class/net/v0.7/statistics/{name}")).succeed();
        let bytes: u64 = said.trim().parse().expect("a number");
        assert!(bytes > 2 * 9000, "{name} of v0.7: {bytes}, where RC and UC have had 9000 each");
    }
}

fn open(device: &str) -> (Kind, Context) {
    let kind = if device.starts_with("ibverbs:") { Kind::Rxe } else { Kind::Software };
    let spec: DeviceSpec = device.parse().expect("a device");
    let opened = spec.open().unwrap_or_else(|error| panic!("{device}: {error}"));
    let context = Context::open(opened, &Config::default());
    let mut context = context.unwrap_or_else(|error| panic!("{device}: {error}"));
    if kind == Kind::Software {
        let in_vlan = GidEntry::new(Gid::from_ipv4([10, 81, 0, 2].into())).vlan(VLAN);
        context.add_gid(in_vlan).expect("room for one more");
    }
    (kind, context)
}
