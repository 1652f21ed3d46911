//! Requests that a card refuses, and the valid values.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::driver::rnic::Verbs;
use ferroce::{Access, Config, Context, Error, Memory, Nanos, QpConfig, RnicPort};
use ferroce_driver_test_support::rnic_stub::Stub;

/// The stub's rows: 0 of RoCE v1, 1 of v2.
fn open(verbs: &Verbs, gid: Option<u8>, config: &Config) -> Result<Context, Error> {
    Context::open(RnicPort::open_by(verbs, "stub0", None, gid)?, config)
}

fn says<T>(refused: Result<T, impl ToString>, words: &str) {
    let text = refused.err().expect("a refusal").to_string();
    assert!(text.contains(words), "{text}");
}

#[test]
fn a_roce_v1_gid_is_reported_by_its_index() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    says(open(&verbs, Some(0), &Config::default()), "GID = 0: a row of RoCE v2");
    says(open(&verbs, Some(9), &Config::default()), "0: 10.0.0.2 of RoCE v1, 1: 10.0.0.2");
    assert_eq!(open(&verbs, Some(0), &Config::default().roce_v1(true)).unwrap().port().gids.len(), 1);
    assert_eq!(open(&verbs, Some(1), &Config::default()).unwrap().port().gids.len(), 1);
}

#[test]
fn a_refusal_names_the_request() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let mut context = open(&verbs, None, &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    says(context.create_qp(&QpConfig::rc(pd, cq).max_inline_data(4096)), "4 pieces and 4096 bytes inline");
    says(context.register(pd, Memory::zeroed(0).unwrap(), Access::LOCAL_WRITE), "the memory has 0 bytes");
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    let end = context.endpoint(qp, 0).unwrap();
    // INIT, then RTR.
    stub.fail("ibv_modify_qp", 2);
    says(context.handshake(qp, &end, &end), "; 10.0.0.2, or the router to it, does not answer ARP or ND");
    stub.remove_device();
    (1..5000).find_map(|n| context.poll(Nanos(n)).err()).unwrap();
    says(context.poll(Nanos(6000)), "drop the context, and open the device when it is back");
}

/// The kernel maps whole pages.
#[test]
fn a_region_for_peers_has_the_page_offset_of_its_memory() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let mut context = open(&verbs, None, &Config::default()).unwrap();
    let (pd, rights) = (context.alloc_pd().unwrap(), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    let zeroed = || Memory::zeroed(64).unwrap();
    says(context.register_at(pd, zeroed(), rights, 8), "iova = 0x8: 0 modulo 4096");
    context.register_at(pd, zeroed(), rights, 0x7000).unwrap();
    // No peer knows its addresses.
    context.register_at(pd, zeroed(), Access::LOCAL_WRITE, 8).unwrap();
}
