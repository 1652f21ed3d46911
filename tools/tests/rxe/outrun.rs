//! A guest that is slower than the engine, without any impairment: the path has a queue of 1000 frames (a tap's), which
//! many queue pairs must not overflow together.

use serde_json::Value;

use crate::guest::{GUEST, Guest, report};

/// The port of perftest's exchange.
const PORT: u16 = 18515;

/// Runs `ib_write_bw` with several queue pairs, over each driver; returns the number of runs. Nothing is retransmitted.
pub(crate) fn run(guest: &Guest) -> u32 {
    let mut runs = 0;
    for device in ["af_xdp:fe0", "udp:10.77.0.1"] {
        for kind in ["-q 8 -s 4096 -n 200", "-q 8 -s 65536 -n 50", "-q 64 -s 4096 -n 50"] {
            // 1 s: the slowest answer of an emulated guest does not cause a timeout.
            let running = guest.start(&format!("timeout 50 ib_write_bw -F -x 1 -u 18 {kind}"));
            guest.wait_for_listener(PORT);
            let ours = format!("perf write bw -d {device} -u 18 {kind} --json --perftest {}", GUEST[0]);
            let said = guest.start_ferroce(&ours).succeed();
            running.succeed();
            let json = said.find('{').and_then(|start| said.rfind('}').map(|end| &said[start..=end]));
            let found: Value =
                json.and_then(|json| serde_json::from_str(json).ok()).expect("a report as JSON");
            let repeated = found["retransmitted_packets"].as_u64();
            assert_eq!(repeated, Some(0), "ib_write_bw {kind} over {device}: {}", found["counters"]);
            report(&format!("ib_write_bw {kind}, nothing sent twice"), device, "client");
            runs += 1;
        }
    }
    runs
}
