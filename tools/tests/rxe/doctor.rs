//! `ferroce doctor` with a peer that runs no doctor.

use crate::guest::{GUEST, Guest, report};

/// Runs it over each driver and IP version; returns the number of runs.
pub(crate) fn run(guest: &Guest) -> u32 {
    let ways = [("af_xdp:fe0", 0), ("af_xdp:fe0", 1), ("udp:10.77.0.1", 0), ("udp:fd77::1", 1)];
    for (device, version) in ways {
        let said = guest.start_ferroce(&format!("doctor -d {device} {}", GUEST[version])).succeed();
        for words in [
            "no doctor answers",
            "refuses, as it should (invalid service id)",
            "right in both directions",
            "no fault found",
        ] {
            assert!(said.contains(words), "{device}: no '{words}' in {said}");
        }
        let path_mtu = said.lines().find(|line| line.starts_with("path MTU "));
        assert!(path_mtu.is_some_and(|line| line.contains("| ok          | 4096:")), "{said}");
        report(&format!("doctor, IPv{}", if version == 0 { 4 } else { 6 }), device, "client");
    }
    ways.len() as u32
}
