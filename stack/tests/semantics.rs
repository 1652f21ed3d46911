//! The semantics of the verbs over pairs of contexts. `tools/tests/rxe/hardware.rs` runs the same cases in the guest with
//! rdma_rxe.
//!
//!     cargo test -p ferroce --test semantics -- --nocapture      (FERROCE_CASE=WORDS: those with these words)

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::IpAddr;

use ferroce::driver::loopback::{self, Loopback};
use ferroce::driver::rnic::Verbs;
use ferroce::driver::{Error, NextHop, PacketDriver, Wrapper};
use ferroce::{Config, Context, Gid, GidEntry, RnicPort};
use ferroce_driver_test_support::rnic_stub::Stub;
use ferroce_test_support::semantics::{self, Kind, Pair, VLAN};

fn run(contexts: [Context; 2], kinds: [Kind; 2]) {
    let only = std::env::var("FERROCE_CASE").ok();
    let mut pair = Pair::new(contexts).unwrap();
    // The stub has one address.
    assert!(pair.has_ipv6() && pair.has_vlan() || kinds.contains(&Kind::Stub));
    let (table, wrong) = semantics::run(&mut pair, kinds, only.as_deref());
    println!("{kinds:?}\n{table}");
    assert_eq!(wrong, 0, "{table}");
}

#[test]
fn software_to_software() {
    let (a, b) = loopback::pair(
        &[[10, 0, 0, 1].into(), [0xfd77, 0, 0, 0, 0, 0, 0, 1].into()],
        &[[10, 0, 0, 2].into(), [0xfd77, 0, 0, 0, 0, 0, 0, 2].into()],
    );
    let macs = [&a, &b].map(|port| port.capabilities().mac);
    let contexts = [(a, 1, macs[1]), (b, 2, macs[0])].map(|(port, host, peer)| {
        let port = InVlan { port, peer };
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        context.add_gid(GidEntry::new(in_vlan(host)).vlan(VLAN)).unwrap();
        context
    });
    run(contexts, [Kind::Software; 2]);
}

/// A port with a path to its peer in a VLAN.
struct InVlan {
    port: Loopback,
    peer: [u8; 6],
}

impl Wrapper for InVlan {
    type Inner = Loopback;

    fn inner(&self) -> &Loopback {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.port
    }

    fn resolve_in_vlan(&mut self, vlan: u16, peer: IpAddr) -> Result<NextHop, Error> {
        let is_there = vlan == VLAN && [1, 2].map(|host| in_vlan(host).to_ip()).contains(&peer);
        let no_route = || Error::NoRoute { peer, interface: format!("VLAN {vlan}") };
        is_there.then_some(NextHop::Found(self.peer)).ok_or_else(no_route)
    }
}

fn in_vlan(host: u8) -> Gid {
    Gid::from_ipv4([10, 0, 7, host].into())
}

/// The libibverbs of the tests: two contexts on one device, which executes posted work immediately.
#[test]
fn a_card_to_itself() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let open = |_| {
        Context::open(RnicPort::open_by(&verbs, "stub0", None, None).unwrap(), &Config::default()).unwrap()
    };
    run([(), ()].map(open), [Kind::Stub; 2]);
}
