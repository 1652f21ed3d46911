//! The options of congestion control: rejected values, and their effect on packets.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::path::Path;
use std::process::Command;

use ends::{Ferroce, alone, refused};
use serde_json::Value;

#[test]
fn bad_input_is_named() {
    refused(&[
        ("pingpong -d loopback --congestion mlx5", &["'loopback", "--line-rate GBPS"]),
        ("perf write bw -d loopback --congestion paper", &["'loopback", "--line-rate GBPS"]),
        ("pingpong -d loopback --congestion swift", &["'swift'", "off", "paper", "mlx5"]),
        ("pingpong -d loopback --congestion mlx5,speed=1", &["speed", "rpg_ai_rate"]),
        ("pingpong -d loopback --congestion mlx5,rpg_ai_rate=fast", &["rpg_ai_rate", "fast"]),
        (
            "pingpong -d loopback --congestion mlx5,rpg_threshold=0 --line-rate 10",
            &["rpg_threshold = 0", "1 to 31"],
        ),
        ("pingpong -d loopback --line-rate 0", &["'0'", "0.001 to 4000"]),
        ("pingpong -d loopback --dscp 64", &["64", "63"]),
        ("rping -d loopback --congestion zhu25", &["'loopback", "--line-rate GBPS"]),
    ]);
}

/// Every packet has the requested class. Data is ECN-capable, acknowledgements are not; the connection manager's
/// datagrams have neither.
#[test]
fn packets_have_their_class() {
    let _alone = alone();
    for command in [
        "pingpong -n 20",
        "perf write bw -n 20",
        "perf send bw -c ud -s 512 -n 20",
        "rping -C 2",
        "ucmatose -C 2",
        "udaddy -C 2",
    ] {
        let file = format!("{}/class-{}.pcapng", env!("CARGO_TARGET_TMPDIR"), std::process::id());
        let options = format!("-d loopback --congestion mlx5 --line-rate 10 --dscp 26 --pcap {file}");
        let outcome = Ferroce::start(None, &format!("{command} {options}")).end();
        assert_eq!(outcome.code, Some(0), "{command}: {outcome:#?}");
        let packets = dissect(Path::new(&file));
        std::fs::remove_file(&file).unwrap();
        let (mut data, mut acknowledgements) = (0, 0);
        for packet in packets.iter().filter(|packet| packet["dest_qp"] != 1) {
            let is_acknowledgement = packet["opcode"] == "RC_ACKNOWLEDGE";
            *if is_acknowledgement { &mut acknowledgements } else { &mut data } += 1;
            let ecn = if is_acknowledgement { 0 } else { 2 };
            assert_eq!((&packet["dscp"], &packet["ecn"]), (&26.into(), &ecn.into()), "{command}: {packet}");
        }
        let is_ud = command.contains("ud");
        assert!(data >= 4 && (is_ud || acknowledgements > 0), "{command}: {data}, {acknowledgements}");
    }
}

fn dissect(file: &Path) -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_ferroce")).args(["dissect", "--json"]).arg(file).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    let mut packets: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    packets.pop();
    packets
}
