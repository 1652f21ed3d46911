//! Frame memory on huge pages. A separate test program, because it changes the system's settings. Needs root; otherwise
//! prints the reason and passes.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::fs;
use std::time::Duration;

use ferroce_driver::PacketDriver;
use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver_test_support::exchange::cross;
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use ferroce_driver_test_support::patience::until;

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
/// More than enough for two ports, which need 18 MiB each at an MTU of 1500.
const PAGES: &str = "24";

/// Releases the pages, unless their number was changed meanwhile.
struct Reserved;

impl Reserved {
    fn new() -> Option<Reserved> {
        let set_apart = fs::read_to_string(NR_HUGEPAGES).unwrap_or_default();
        if set_apart.trim() != "0" || meminfo("Hugepagesize") != Some(2048) {
            println!("skipped: huge pages are set up already, or of another size than 2 MiB");
            return None;
        }
        if let Err(e) = fs::write(NR_HUGEPAGES, PAGES) {
            println!("skipped: no huge pages can be set apart ({e})");
            return None;
        }
        let reserved = Reserved;
        if fs::read_to_string(NR_HUGEPAGES).unwrap_or_default().trim() != PAGES {
            println!("skipped: memory is too fragmented for huge pages");
            return None;
        }
        Some(reserved)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if fs::read_to_string(NR_HUGEPAGES).is_ok_and(|now| now.trim() == PAGES) {
            let _ = fs::write(NR_HUGEPAGES, "0");
        }
    }
}

fn meminfo(field: &str) -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

#[test]
fn frames_are_on_huge_pages_if_enough_are_free() {
    let Some(pair) = Namespaces::new(1500) else { return };
    // The second size, 4.2 MiB, is not a multiple of a huge page.
    let sizes = [(8192, 1024), (2048, 100)];
    let open = |(rx_frames, tx_frames)| {
        AfXdp::open(&AfXdpConfig::new(VETH).sharing(false).rx_frames(rx_frames).tx_frames(tx_frames)).unwrap()
    };
    let ordinary = pair.in_a(|| open(sizes[0]));
    let Some(_reserved) = Reserved::new() else { return };
    let description = &ordinary.capabilities().description;
    assert!(
        description.ends_with(" on ordinary pages (9 huge pages needed, 0 free: vm.nr_hugepages)"),
        "{description}"
    );
    drop(ordinary);
    let free = meminfo("HugePages_Free");
    for size in sizes {
        let (mut a, mut b) = (pair.in_a(|| open(size)), pair.in_b(|| open(size)));
        for port in [&a, &b] {
            let description = &port.capabilities().description;
            assert!(description.ends_with(" on huge pages of 2 MiB"), "{description}");
        }
        assert!(meminfo("HugePages_Free") < free);
        cross(&mut a, &mut b, 1082, 1000);
        cross(&mut b, &mut a, 64, 1000);
        drop((a, b));
        // The kernel releases them a moment after the sockets are closed.
        let are_back = || (meminfo("HugePages_Free") == free).then_some(());
        let missing = || format!("{:?} of {free:?} come back", meminfo("HugePages_Free"));
        until(Duration::from_secs(10), are_back, missing);
    }
}
