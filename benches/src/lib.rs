//! Shared code of the benchmarks of ferroce; `./do bench` runs them all, `./do bench --bench NAME` one. Each prints
//! ratios next to absolute times, because on a shared machine only a ratio within one run is meaningful.

pub mod callgrind;
pub mod command;
pub mod pair;
pub mod perftest;
pub mod plot;
pub mod process;
pub mod report;
pub mod ring;
pub mod state;
pub mod veth;

use ferroce::wire::{Encapsulation, Gid, MacAddr, PathAddress, PathHeader};

/// The headers of an example IPv4 path.
pub fn path() -> PathHeader {
    PathHeader::new(&path_address())
}

/// The addresses of an example IPv4 path.
pub fn path_address() -> PathAddress {
    PathAddress {
        source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
        destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
        vlan: None,
        source: Gid::from_ipv4([192, 0, 2, 1].into()),
        destination: Gid::from_ipv4([192, 0, 2, 2].into()),
        encapsulation: Encapsulation::RoceV2 { source_port: 0xc000 },
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        identification: 0,
    }
}
