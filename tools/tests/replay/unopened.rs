//! Frames without a RoCE packet are counted by kind, by `replay` and by `dissect`.

use std::process::Command;

use crate::wild::Frames;
use crate::{Scratch, fixtures, replay, text};

/// A frame with this EtherType.
fn frame(ethertype: u16, rest: &[u8]) -> Vec<u8> {
    [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2][..], &ethertype.to_be_bytes(), rest].concat()
}

fn ipv4(protocol: u8, rest: &[u8]) -> Vec<u8> {
    let length = (20 + rest.len() as u16).to_be_bytes();
    let header = [0x45, 0, length[0], length[1], 0, 1, 0, 0, 64, protocol, 0, 0, 10, 1, 1, 1, 10, 1, 1, 2];
    frame(0x0800, &[&header[..], rest].concat())
}

fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    let length = (8 + payload.len() as u16).to_be_bytes();
    let port = port.to_be_bytes();
    let header = [0xc0, 0, port[0], port[1], length[0], length[1], 0, 0];
    ipv4(17, &[&header[..], payload].concat())
}

#[test]
fn what_is_not_opened_is_counted_by_name() {
    let tags = 15_000;
    let tagged = frame(0x8100, &[&[0, 1, 0x81, 0].repeat(tags)[..], &[0, 1, 8, 0]].concat());
    let mut fragment = ipv4(17, &[0; 64]);
    fragment[14 + 6] = 0x20;
    fragment[14 + 7] = 9;
    let cases = [
        ("UDP port 2152 (GTP-U)", udp(2152, &[0x30; 64])),
        ("UDP port 4500 (IPsec NAT-T)", udp(4500, &[0; 64])),
        ("UDP port 1701 (L2TP)", udp(1701, &[0; 64])),
        ("UDP port 6635 (MPLS-in-UDP)", udp(6635, &[0; 64])),
        ("UDP port 51820 (WireGuard)", udp(51820, &[4; 64])),
        ("UDP port 12345", udp(12345, &[0; 64])),
        ("VXLAN without a network identifier", udp(8472, &[0; 64])),
        ("EtherIP", ipv4(97, &[0x30; 64])),
        ("IP protocol 200", ipv4(200, &[0; 64])),
        ("TCP", ipv4(6, &[0; 20])),
        ("IPv4 fragments", fragment),
        ("ARP", frame(0x0806, &[0; 28])),
        ("EtherType 0x9999", frame(0x9999, &[0; 64])),
        ("more than 16 VLAN tags", tagged),
        ("cut before it shows what it is", vec![2; 10]),
    ];
    let directory = Scratch::new("unopened");
    let file = directory.0.join("unopened.pcap");
    for (name, frame) in &cases {
        Frames::raw(vec![frame.clone()]).write(&file);
        let replayed = replay(&file, &[]);
        assert_eq!(replayed.status.code(), Some(3), "{name}: {}", text(&replayed));
        assert!(text(&replayed).contains(&format!("1 frames not opened: {name}\n")), "{}", text(&replayed));
        let mut dissect = Command::new(env!("CARGO_BIN_EXE_ferroce"));
        let dissected = dissect.arg("dissect").arg(&file).output().expect("ferroce runs");
        assert!(text(&dissected).contains(&format!("not opened: {name} x1\n")), "{}", text(&dissected));
    }
    // All in one: the text shows the most frequent, and --json has all of them.
    let real = Frames::read(&fixtures().join("rc_send.pcap")).expect("a pcap file");
    let all = Frames::raw(cases.iter().map(|(_, frame)| frame.clone()).collect());
    real.and(all).write(&file);
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(
        text(&output).contains("7 frames not opened: 7 other kinds, which --json names"),
        "{}",
        text(&output)
    );
    let report: serde_json::Value = serde_json::from_slice(&replay(&file, &["--json"]).stdout).expect("JSON");
    assert!(cases.iter().all(|(name, _)| report["unopened"][name] == 1), "{:#}", report["unopened"]);
}
