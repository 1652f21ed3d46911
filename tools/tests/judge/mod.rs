//! Checks of frames without shared code with ferroce: tshark, and a bitwise ICRC.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use ferroce::driver::pcap::{LinkType, Reader};
use serde_json::Value;

/// Compares the output of `ferroce dissect --json` for each RoCE packet of a capture (`ours`) with that of tshark:
/// opcode, QPN, PSN, pad, ICRC. Returns the number of packets; without tshark, prints so and returns `None`.
#[allow(dead_code, reason = "not every test program asks it")]
pub(crate) fn tshark_agrees(path: &Path, ours: &[Value]) -> Option<usize> {
    let Ok(values) = Command::new("tshark").args(["-G", "values"]).output() else {
        println!("skipped: there is no tshark here (Debian: apt-get install tshark)");
        return None;
    };
    let names: HashMap<u64, String> = String::from_utf8_lossy(&values.stdout)
        .lines()
        .filter_map(|line| {
            let mut columns = line.split('\t').skip(1);
            let (field, value, name) = (columns.next()?, columns.next()?, columns.next()?);
            (field == "infiniband.bth.opcode").then_some((value.parse().ok()?, our_name(name)))
        })
        .collect();
    assert_eq!(names[&4], "RC_SEND_ONLY");

    let fields = [
        "frame.number",
        "infiniband.bth.opcode",
        "infiniband.bth.destqp",
        "infiniband.bth.psn",
        "infiniband.bth.padcnt",
        "infiniband.invariant.crc",
    ];
    let arguments = fields.iter().flat_map(|field| ["-e", field]);
    // Two dissectors of RDMA payloads claim short payloads and call them malformed.
    let output = Command::new("tshark")
        .args(["--disable-protocol", "rpcordma", "--disable-protocol", "infiniband.eoib", "-r"])
        .arg(path)
        .args(["-T", "fields"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let theirs = String::from_utf8(output.stdout).unwrap();
    assert_eq!(theirs.lines().count(), ours.len(), "{}", path.display());
    for (line, packet) in theirs.lines().zip(ours) {
        let row: Vec<u64> = line.split('\t').map(number).collect();
        // It shows the ICRC's bytes in wire order.
        let icrc = packet["icrc_found"].as_u64().unwrap() as u32;
        let mine =
            ["frame", "opcode_byte", "dest_qp", "psn", "pad"].map(|name| packet[name].as_u64().unwrap());
        assert_eq!(row[..5], mine, "{} {packet}", path.display());
        assert_eq!(row[5] as u32, icrc.swap_bytes(), "{} {packet}", path.display());
        assert_eq!(packet["opcode"], names[&row[1]].as_str());
    }
    Some(ours.len())
}

/// The congestion notification packets of a capture according to tshark: frame, destination queue pair, DSCP, and
/// whether BECN is set. Without tshark, prints so and returns `None`.
#[allow(dead_code, reason = "not every test program asks it")]
pub(crate) fn tshark_cnps(path: &Path) -> Option<Vec<[u64; 4]>> {
    let Ok(values) = Command::new("tshark").args(["-G", "values"]).output() else {
        println!("skipped: there is no tshark here (Debian: apt-get install tshark)");
        return None;
    };
    let values = String::from_utf8_lossy(&values.stdout).into_owned();
    let name = values.lines().find_map(|line| line.strip_prefix("V\tinfiniband.bth.opcode\t129\t"));
    match name {
        Some(name) => assert_eq!(name, "CNP"),
        None => println!(
            "this tshark has no name for opcode 0x81 (4.0 has CNP at 0x80): its numbers are compared"
        ),
    }
    let fields = ["frame.number", "infiniband.bth.destqp", "ip.dsfield.dscp", "infiniband.bth"];
    let output = Command::new("tshark")
        .args(["-Y", "infiniband.bth.opcode == 0x81", "-T", "fields", "-r"])
        .arg(path)
        .args(fields.iter().flat_map(|field| ["-e", field]))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows = String::from_utf8(output.stdout).unwrap();
    let row = |line: &str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let [frame, to, dscp, bth] = columns[..] else { panic!("{line}") };
        // FECN and BECN are the first bits of byte 4.
        let becn = u64::from_str_radix(&bth[8..10], 16).unwrap() >> 6 & 1;
        [number(frame), number(to), number(dscp), becn]
    };
    Some(rows.lines().map(row).collect())
}

/// Parses a number as written by tshark.
fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
        None => text.parse().unwrap(),
    }
}

/// `Reliable Connection (RC) - RDMA WRITE Only with Immediate` as `RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE`. Wireshark has
/// its own names, but with two exceptions they are the long form of ours.
fn our_name(theirs: &str) -> String {
    let (service, operation) = theirs.split_once(" - ").unwrap_or(("", theirs));
    let service = service.split(['(', ')']).nth(1).unwrap_or("");
    let operation = operation.replace("CmpSwap", "COMPARE_SWAP").replace("FetchAdd", "FETCH_ADD");
    format!("{service}_{}", operation.to_uppercase().replace(' ', "_"))
}

/// Checks the ICRC of every frame of a capture of untagged RoCEv2, by the description in docs/protocol.md §3. Returns
/// the number of frames.
pub(crate) fn icrcs_are_right(path: &Path) -> usize {
    let mut reader = Reader::open(path).unwrap();
    let mut frames = 0;
    while let Some(record) = reader.next_record().unwrap() {
        frames += 1;
        assert_eq!(record.link_type, LinkType::Ethernet);
        let (ethernet, ip) = record.captured.split_at(14);
        let mut covered = vec![0xff; 8];
        let bth = match ethernet[12..] {
            [0x08, 0x00] => {
                covered.extend(&ip[..usize::from(u16::from_be_bytes([ip[2], ip[3]]))]);
                for variant in [1, 8, 10, 11, 26, 27] {
                    covered[8 + variant] = 0xff; // TOS, TTL, both checksums
                }
                28
            }
            [0x86, 0xdd] => {
                covered.extend(&ip[..40 + usize::from(u16::from_be_bytes([ip[4], ip[5]]))]);
                covered[8] |= 0x0f;
                for variant in [1, 2, 3, 7, 46, 47] {
                    covered[8 + variant] = 0xff; // traffic class, flow label, hop limit, UDP checksum
                }
                48
            }
            ref other => panic!("frame {frames} of {}: EtherType {other:02x?}", path.display()),
        };
        covered[8 + bth + 4] = 0xff; // FECN, BECN, reserved
        let icrc = covered.split_off(covered.len() - 4);
        assert_eq!(crc(covered).to_le_bytes(), icrc[..], "frame {frames} of {}", path.display());
    }
    frames
}

/// CRC-32 bit by bit.
pub(crate) fn crc(bytes: impl IntoIterator<Item = u8>) -> u32 {
    !bytes.into_iter().fold(u32::MAX, |register, byte| {
        (0..8).fold(register ^ u32::from(byte), |r, _| (r >> 1) ^ ((r & 1) * 0xedb8_8320))
    })
}
