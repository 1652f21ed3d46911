//! `ferroce rping`, `ucmatose` and `udaddy` against themselves. Against rdma_cm's programs: `rxe.rs`.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use ends::{Ferroce, alone};

fn run(arguments: &str) -> ends::Outcome {
    Ferroce::start(None, arguments).end()
}

#[test]
fn the_programs_of_rdma_cm() {
    let _alone = alone();
    for (arguments, good) in [
        ("rping -d loopback -C 5 -S 1000", "5 pings of 1000 bytes came back right"),
        ("ucmatose -d loopback -c 4 -C 3", "4 connections, 12 messages of 100 bytes sent, 12 received"),
        ("udaddy -d loopback -C 7 -S 33", "7 datagrams of 33 bytes sent, 7 received"),
        ("pingpong -d loopback -t uc -n 50 -s 5000 -c", "50 iters in"),
        ("pingpong -d loopback -t ud -n 50 -s 4096 -c", "50 iters in"),
    ] {
        let outcome = run(arguments);
        assert_eq!(outcome.code, Some(0), "{arguments}: {outcome:#?}");
        assert!(outcome.stdout.contains(good), "{arguments}: {outcome:#?}");
    }
}

/// Both ends in a partition, the client as a limited member: all packets have its P_Keys.
#[test]
fn the_programs_in_a_partition() {
    let _alone = alone();
    let capture = concat!(env!("CARGO_TARGET_TMPDIR"), "/partition.pcapng");
    for program in [
        "rping -C 3",
        "ucmatose -c 2 -C 3",
        "udaddy -C 3",
        "pingpong -n 20 -c",
        "pingpong -t uc -n 20 -c",
        "pingpong -t ud -s 1000 -n 20 -c",
        "perf write bw -n 20",
    ] {
        let arguments = format!("{program} -d loopback --pkey 0x0001 --pcap {capture}");
        let outcome = run(&arguments);
        assert_eq!(outcome.code, Some(0), "{arguments}: {outcome:#?}");
        let packets = run(&format!("dissect --json {capture}")).stdout;
        let keys: std::collections::BTreeSet<u64> = packets
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["pkey"].as_u64())
            .collect();
        // The client's packets and the server's.
        assert_eq!(keys, [0x0001, 0x8001].into(), "{arguments}");
    }
    for bad in ["0", "0x8000", "0x10000", "all"] {
        let outcome = run(&format!("rping -d loopback --pkey {bad}"));
        assert_eq!(outcome.code, Some(2), "{bad}: {outcome:#?}");
        assert!(outcome.stderr.contains("as 0x8001"), "{bad}: {outcome:#?}");
    }
}

#[test]
fn what_goes_wrong_is_said() {
    let _alone = alone();
    for (arguments, code, said) in [
        ("rping -d udp:127.0.0.61 -C 1 127.0.0.62", 1, "127.0.0.62 has nothing on UDP port 4791"),
        ("rping -d udp:127.0.0.63 -C 1 ::1", 2, "which has no IPv6 address"),
        ("udaddy -d loopback -S 5000", 2, "5000 bytes: must be 1 to 4096"),
        ("pingpong -d loopback -t ud -s 5000", 2, "-s 5000: must be at most "),
    ] {
        let outcome = run(arguments);
        assert_eq!(outcome.code, Some(code), "{arguments}: {outcome:#?}");
        assert!(outcome.stderr.contains(said), "{arguments}: {outcome:#?}");
    }
}
