//! The output with `--bad-only`, `--qp` and `--summary`.

use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{ETHERNET, TempFile, ferroce, frame_with_pad, frames, icrc_at, json};

#[test]
fn only_bad_packets_are_shown() {
    let good = frames("rc_send.pcap");
    let mut bad = good[0].clone();
    let at = icrc_at(&bad);
    bad[at] ^= 4;
    let mut malformed = frame_with_pad();
    malformed[20] = 0x20; // a fragment
    let nak = frames("rc_nak_access.pcap").into_iter().find(|frame| frame[54] == 0x62).unwrap();
    let all = [good[0].clone(), bad, nak, malformed, good[1].clone()];
    let file = TempFile::pcap(ETHERNET, &all);
    let text = |arguments: &[&str]| {
        let output = ferroce(arguments, &file.0);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stdout).unwrap()
    };
    let numbers = |text: &str| -> Vec<u64> {
        text.lines()
            .take_while(|line| !line.is_empty())
            .map(|line| line.split_whitespace().next().unwrap().parse().unwrap())
            .collect()
    };
    let (whole, bad_only) = (text(&[]), text(&["--bad-only"]));
    assert_eq!((numbers(&whole), numbers(&bad_only)), (vec![1, 2, 3, 4, 5], vec![2, 4]));
    let summary = |text: &str| text[text.find("\n\n").unwrap()..].to_owned();
    assert_eq!(summary(&whole), summary(&bad_only), "the summary is of all packets");
    assert_eq!(text(&["--summary"]), summary(&whole)[1..]);
    let json = text(&["--bad-only", "--json"]);
    let json: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((json.len(), &json[0]["frame"], &json[1]["frame"]), (3, &2.into(), &4.into()));
    assert_eq!(json[2]["summary"]["frames"], 5);
    assert_eq!(text(&["--summary", "--json"]).lines().count(), 1);

    // A truncated packet is not bad, and neither is a manufacturer opcode.
    let cut = TempFile::cut(ETHERNET, &good, 60);
    let output = ferroce(&["--bad-only"], &cut.0);
    assert!(output.stdout.starts_with(b"\n"), "nothing but the summary");
}

#[test]
fn queue_pairs_are_chosen_with_their_peers() {
    // A connection that the connection manager set up, and one whose setup was not captured.
    let (rping, send) = (frames("rping_ipv6.pcap"), frames("rc_send.pcap"));
    let file = TempFile::pcap(ETHERNET, &[rping.clone(), send.clone()].concat());
    let chosen = |qps: &str| {
        let output = ferroce(&["--json", "--qp", qps], &file.0);
        let text = String::from_utf8(output.stdout).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let summary = lines.pop().unwrap()["summary"].take();
        assert_eq!(summary["roce_packets"], lines.len());
        assert_eq!(summary["frames"], rping.len() + send.len());
        (lines, summary)
    };
    let (packets, _, _) = json(&file.0);
    let of = |message: &str| {
        let packet = packets.iter().find(|packet| packet["cm"]["message"] == message).unwrap();
        packet["cm"]["qpn"].as_u64().unwrap()
    };
    let (asking, asked) = (of("REQ"), of("REP"));
    assert_ne!(asking, asked);
    // The whole connection, in both directions, with its messages.
    let (lines, _) = chosen(&format!("{asking:#x}"));
    let numbers: Vec<u64> = lines.iter().map(|line| line["frame"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=rping.len() as u64).collect::<Vec<_>>());
    // The REQ does not contain the other end's queue pair.
    assert_eq!(chosen(&asked.to_string()).0.len(), rping.len() - 1);

    // Without the connection manager, only packets to the queue pair, unless both ends are named.
    let to = |frame: &Vec<u8>| u32::from_be_bytes([0, frame[47], frame[48], frame[49]]);
    let there = to(&send[0]);
    let back = send.iter().map(to).find(|qp| *qp != there).unwrap();
    let count = send.iter().filter(|frame| to(frame) == there).count();
    let (lines, summary) = chosen(&there.to_string());
    assert!(lines.iter().all(|line| line["dest_qp"] == there));
    assert_eq!((lines.len(), summary["flows"].as_array().unwrap().len()), (count, 1));
    assert_eq!(chosen(&format!("{there},{back:#08x}")).0.len(), send.len());
    let (lines, summary) = chosen("0xabcdef");
    assert_eq!((lines.len(), &summary["roce_packets"]), (0, &0.into()));

    // A wrong ICRC of another queue pair does not count.
    let mut broken = send[0].clone();
    let at = icrc_at(&broken);
    broken[at] ^= 1;
    let answer = send.iter().find(|frame| to(frame) == back).unwrap().clone();
    let file = TempFile::pcap(ETHERNET, &[broken, answer]);
    assert_eq!(ferroce(&["--qp", &back.to_string()], &file.0).status.code(), Some(0));
    assert_eq!(ferroce(&["--qp", &there.to_string()], &file.0).status.code(), Some(1));
    // A queue pair without packets is an error.
    let output = ferroce(&["--qp", "0xabcdef"], &file.0);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--qp 0xabcdef: no packet of it"), "{stderr}");

    for wrong in ["", "x", "-1", "+1", "0x", "0x+1", "0x1000000", "16777216", "1,,2"] {
        let output = ferroce(&[&format!("--qp={wrong}")], &file.0);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong}: {stderr}");
        assert!(stderr.contains("24 bits, as 17 or 0x000011"), "{wrong}: {stderr}");
    }
}

#[test]
fn a_reader_that_goes_does_not_hide_a_wrong_icrc() {
    let good = frames("rc_send.pcap");
    let mut all: Vec<Vec<u8>> = good.iter().cycle().take(5_000).cloned().collect();
    let last = all.last_mut().unwrap();
    let at = icrc_at(last);
    last[at] ^= 4;
    let file = TempFile::pcap(ETHERNET, &all);
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferroce"))
        .arg("dissect")
        .arg(&file.0)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn a_report_never_overwrites_its_capture() {
    let file = TempFile::pcap(ETHERNET, &frames("rc_send.pcap"));
    let before = fs::read(&file.0).unwrap();
    for (command, by_name) in [("dissect", true), ("replay", true), ("dissect", false), ("replay", false)] {
        let output = Command::new(env!("CARGO_BIN_EXE_ferroce"))
            .arg(command)
            .arg(format!("--json={}", file.0.display()))
            .arg(if by_name { file.0.as_os_str() } else { "-".as_ref() })
            .stdin(fs::File::open(&file.0).unwrap())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("overwrite the capture"), "{said}");
        assert!(fs::read(&file.0).unwrap() == before, "{command}");
    }
    // Status 1 is for a wrong ICRC.
    let output = ferroce(&["--json=/proc/none.json"], &file.0);
    assert_eq!(output.status.code(), Some(2));
}
