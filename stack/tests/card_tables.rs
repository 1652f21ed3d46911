//! The tables of a card's port when the kernel changes them.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::driver::rnic::Verbs;
use ferroce::{Config, Context, Nanos, RnicPort};
use ferroce_driver_test_support::rnic_stub::Stub;

/// `IBV_EVENT_GID_CHANGE`
const GID_CHANGE: i32 = 18;

#[test]
fn a_chosen_gid_stays_the_only_one_after_a_change() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let all = RnicPort::open_by(&verbs, "stub0", None, None).unwrap();
    let all = Context::open(all, &Config::default().roce_v1(true)).unwrap();
    let rows = all.port().gids.clone();
    assert!(rows.len() > 1, "{rows:?}");

    let chosen = RnicPort::open_by(&verbs, "stub0", None, Some(0)).unwrap();
    let both = Config::default().roce_v1(true);
    let mut contexts = [
        (Context::open(chosen, &both).unwrap(), 1),
        (all, rows.len()),
        (
            Context::open(RnicPort::open_by(&verbs, "stub0", None, None).unwrap(), &Config::default())
                .unwrap(),
            rows.iter().filter(|entry| !entry.roce_v1).count(),
        ),
    ];
    assert!(stub.raise(GID_CHANGE, 1) > 0);
    for (context, count) in &mut contexts {
        let before = context.port().gids.clone();
        // Events are checked once in several polls.
        for n in 1..5000 {
            context.poll(Nanos(n)).unwrap();
        }
        assert_eq!(context.port().gids, before);
        assert_eq!(context.port().gids.len(), *count);
    }
}
