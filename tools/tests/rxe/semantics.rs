//! The semantics of the verbs, over rdma_rxe at one end or both: this test itself, run in the guest.

use std::time::Duration;

use ferroce::{Config, Context, DeviceSpec};
use ferroce_driver_test_support::namespaces;
use ferroce_test_support::semantics::{self, Kind, Pair};

use crate::guest::Guest;

/// rdma_rxe at one end of a cable, and a namespace for software at the other.
const CABLE: &str = "ip netns add soft && ip link add v0 type veth peer name v1 && ip link set v1 netns soft && \
    ip link set v0 mtu 3000 up && ip addr add 10.79.0.1/24 dev v0 && ip -n soft link set lo up && \
    ip -n soft link set v1 mtu 3000 up && ip -n soft addr add 10.79.0.2/24 dev v1 && rdma link add rxe1 type rxe netdev v0";
/// Ends of the cases; the requester first.
const PAIRS: [(&str, &str); 3] = [
    ("rdma_rxe to rdma_rxe", "ibverbs:rxe0,ibverbs:rxe0"),
    ("rdma_rxe to software", "ibverbs:rxe1,af_xdp:v1@soft"),
    ("software to rdma_rxe", "af_xdp:v1@soft,ibverbs:rxe1"),
];
/// Of all cases over one pair, in an emulated guest on a busy machine.
const PATIENCE: Duration = Duration::from_secs(400);

/// Runs all cases in the guest. Returns how many.
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
    guest.start("rdma link delete rxe1; ip netns del soft").succeed();
    assert!(wrong.is_empty(), "{wrong:?}: see WRONG above");
    (PAIRS.len() * semantics::cases().len()) as u32
}

/// In the guest: runs the cases over these ends, `DEVICE` or `DEVICE@NAMESPACE` with a comma between them, and prints the
/// table.
pub(crate) fn inside(ends: &str) {
    let ends: Vec<(&str, Option<&str>)> = ends
        .split(',')
        .map(|end| end.split_once('@').map_or((end, None), |(end, name)| (end, Some(name))))
        .collect();
    let [a, b] = ends[..] else { panic!("FERROCE_ENDS: two ends, with a comma between them") };
    // What AF_XDP needs of its namespace is open from then on; the kernel's connection manager is of this thread's.
    let [(first, a), (second, b)] = [a, b].map(|(device, namespace)| match namespace {
        Some(namespace) => namespaces::inside(namespace, || open(device)),
        None => open(device),
    });
    let mut pair = Pair::new([a, b]).expect("two ends that reach each other");
    let (table, wrong) =
        semantics::run(&mut pair, [first, second], std::env::var("FERROCE_CASE").ok().as_deref());
    println!("{table}{wrong} wrong");
    assert_eq!(wrong, 0);
}

fn open(device: &str) -> (Kind, Context) {
    let kind = if device.starts_with("ibverbs:") { Kind::Rxe } else { Kind::Software };
    let spec: DeviceSpec = device.parse().expect("a device");
    let opened = spec.open().unwrap_or_else(|error| panic!("{device}: {error}"));
    (kind, Context::open(opened, &Config::default()).unwrap_or_else(|error| panic!("{device}: {error}")))
}
