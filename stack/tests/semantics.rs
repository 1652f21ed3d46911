//! The semantics of the verbs over pairs of contexts. In the guest with rdma_rxe it is `tools/tests/rxe/hardware.rs` that
//! runs the same cases.
//!
//!     cargo test -p ferroce --test semantics -- --nocapture      (FERROCE_CASE=WORDS: those with these words)

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::driver::loopback;
use ferroce::driver::rnic::Verbs;
use ferroce::{Config, Context, RnicPort};
use ferroce_driver_test_support::rnic_stub::Stub;
use ferroce_test_support::semantics::{self, Kind, Pair};

fn run(contexts: [Context; 2], kinds: [Kind; 2]) {
    let only = std::env::var("FERROCE_CASE").ok();
    let mut pair = Pair::new(contexts).unwrap();
    // The stub has one address.
    assert!(pair.has_ipv6() || kinds.contains(&Kind::Stub));
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
    let contexts = [a, b].map(|port| Context::open(Box::new(port), &Config::default()).unwrap());
    run(contexts, [Kind::Software; 2]);
}

/// The libibverbs of the tests: two contexts on one device, which carries out at once what is posted.
#[test]
fn a_card_to_itself() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let open = |_| {
        Context::open(RnicPort::open_by(&verbs, "stub0", None, None).unwrap(), &Config::default()).unwrap()
    };
    run([(), ()].map(open), [Kind::Stub; 2]);
}
