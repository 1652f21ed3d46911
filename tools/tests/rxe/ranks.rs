//! Ranks of `ferroce demo` on rdma_rxe as an RNIC, in the guest: among themselves, and with the software stack outside.

use crate::guest::{Guest, OURS, Running, report};
use crate::share;

/// The first tensors of the network, which fit into the guest's memory, in two rounds.
const WORK: &str = "--tensors 20 --rounds 2";
/// Elements of these tensors.
const ELEMENTS: u64 = 137_984;
const RANKS: u64 = 3;
/// The devices of the rank outside.
const OUTSIDE: [&str; 2] = ["af_xdp:fe0", "udp:10.77.0.1"];

/// Runs all of them; returns their number.
pub(crate) fn run(guest: &Guest) -> u32 {
    let demo = format!("demo -d ibverbs:rxe0 --ranks {RANKS} {WORK} --json");
    let said = guest.start(&share::command_that_starts_itself(&demo)).succeed();
    let start = said.find('{').unwrap_or_else(|| panic!("no report:\n{said}"));
    let mut reports = serde_json::Deserializer::from_str(&said[start..]).into_iter::<serde_json::Value>();
    let told = reports.next().and_then(Result::ok).unwrap_or_else(|| panic!("no report:\n{said}"));
    assert_eq!(told["elements_checked"], 2 * RANKS * ELEMENTS, "{told}");
    assert_eq!(told["wrong"], serde_json::json!([]), "{told}");
    for port in told["ports"].as_array().expect("ports") {
        assert_eq!((&port["driver"], &port["interface"]), (&"ibverbs".into(), &"rxe0".into()), "{port}");
    }
    report("demo, three ranks on one card", "ibverbs:rxe0", "ranks");

    for outside in OUTSIDE {
        let here = guest.start_beside(&rank(0, outside, env!("CARGO_BIN_EXE_ferroce")));
        let there =
            [1, 2].map(|number| guest.start(&rank(number, "ibverbs:rxe0", &share::command("ferroce", ""))));
        for running in [here].into_iter().chain(there) {
            check(running);
        }
        report(&format!("demo, a rank on {outside} and two on a card"), "ibverbs:rxe0", "ranks");
    }
    1 + OUTSIDE.len() as u32
}

/// The command of a rank of [`RANKS`]; it ends at the end of its standard input, a pipe that stays open here.
fn rank(number: u32, device: &str, ferroce: &str) -> String {
    format!(
        "cd /tmp; pipe=rank-{number}-$$; mkfifo $pipe; exec 9<>$pipe; rm $pipe; \
         export RANK={number} WORLD_SIZE={RANKS} MASTER_ADDR={} MASTER_PORT=29500; \
         {ferroce} demo --as-rank {device} {WORK} <&9",
        OURS[0]
    )
}

/// A rank has compared all elements of both rounds with the expected ones, bit for bit.
fn check(rank: Running) {
    let said = rank.succeed();
    let events: Vec<serde_json::Value> =
        said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let rounds: Vec<_> = events.iter().filter_map(|event| event.get("round")).collect();
    assert_eq!(rounds.len(), 2, "{said}");
    for round in rounds {
        assert_eq!(
            (&round["elements"], &round["wrong"]),
            (&ELEMENTS.into(), &serde_json::json!([])),
            "{said}"
        );
    }
    assert!(events.iter().any(|event| event.get("finished").is_some()), "{said}");
}
