//! `ferroce topo` in the guest: rdma_rxe as an RNIC on a virtio interface.

use crate::guest::{Guest, report};

pub(crate) fn run(guest: &Guest) -> u32 {
    let text = guest.start_inside("", "ferroce", "topo").succeed();
    println!("{text}");
    // rdma_rxe has no PCI function of its own: it is listed at its interface.
    for expected in
        ["eth0 (rxe0): up", "network port", "pci0000:00", "each NIC is a rank", "rail 0: eth0 (rxe0)"]
    {
        assert!(text.contains(expected), "'{expected}' is not in:\n{text}");
    }
    report("topo", "rxe0", "only");
    // A record that is created in the guest gives the same result as the guest.
    let json = guest.start_inside("", "ferroce", "topo --json --record /tmp/topo").succeed();
    let again = guest.start_inside("", "ferroce", "topo --json --sysfs /tmp/topo").succeed();
    for name in ["\"rxe0\"", "\"eth1\""] {
        assert!(json.contains(name) && again.contains(name), "{name} is not in:\n{json}\n{again}");
    }
    report("topo --record", "rxe0", "only");
    2
}
