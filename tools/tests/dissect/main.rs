//! `ferroce dissect` on real captures, on modified copies, and on files that are not captures. The input is generated
//! here; ICRCs are computed by a separate CRC implementation.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod choice;
mod input;
mod joined;
#[path = "../judge/mod.rs"]
mod judge;
mod streams;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use ferroce::Gid;
use ferroce::wire::{Encapsulation, MacAddr, PathAddress};
use judge::crc;
use serde_json::Value;

const ETHERNET: u32 = 1;
const RAW_IP: u32 = 101;
const COOKED: u32 = 113;
const COOKED_2: u32 = 276;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures").join(name)
}

fn fixtures() -> Vec<PathBuf> {
    let folder = std::fs::read_dir(fixture("")).unwrap();
    let mut paths: Vec<PathBuf> = folder.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "pcap"));
    paths.sort();
    assert!(!paths.is_empty());
    paths
}

/// The frames of a fixture, starting with the Ethernet header.
fn frames(name: &str) -> Vec<Vec<u8>> {
    let file = std::fs::read(fixture(name)).unwrap();
    let (mut rest, mut frames) = (&file[24..], Vec::new());
    while let Some((header, after)) = rest.split_at_checked(16) {
        let length = u32::from_le_bytes(header[8..12].try_into().unwrap()) as usize;
        frames.push(after[..length].to_vec());
        rest = &after[length..];
    }
    frames
}

/// The addresses of packets that are built with `wire`.
fn path(addresses: [&str; 2], identification: u16) -> PathAddress {
    let [source, destination] = addresses.map(|address| Gid::from(address.parse::<IpAddr>().unwrap()));
    PathAddress {
        source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
        destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
        vlan: None,
        source,
        destination,
        encapsulation: Encapsulation::RoceV2 { source_port: 50_000 },
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        identification,
    }
}

/// A file that is removed when the test ends.
struct TempFile(PathBuf);

impl TempFile {
    fn new(bytes: &[u8]) -> TempFile {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("dissect-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, bytes).unwrap();
        TempFile(path)
    }

    fn pcap(link_type: u32, frames: &[Vec<u8>]) -> TempFile {
        TempFile::cut(link_type, frames, usize::MAX)
    }

    /// A pcap that keeps `snap` bytes of each frame.
    fn cut(link_type: u32, frames: &[Vec<u8>], snap: usize) -> TempFile {
        let mut file = Vec::new();
        for word in [0xa1b2_c3d4, 0x0004_0002, 0, 0, 0x4_0000, link_type] {
            file.extend(u32::to_le_bytes(word));
        }
        for (number, frame) in frames.iter().enumerate() {
            let kept = frame.len().min(snap);
            for word in [1000, number as u32, kept as u32, frame.len() as u32] {
                file.extend(word.to_le_bytes());
            }
            file.extend(&frame[..kept]);
        }
        TempFile::new(&file)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn ferroce(arguments: &[&str], file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferroce")).arg("dissect").args(arguments).arg(file).output().unwrap()
}

/// The packets, the summary and the exit status.
fn json(file: &Path) -> (Vec<Value>, Value, i32) {
    let output = ferroce(&["--json"], file);
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut last = lines.pop().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    (lines, last["summary"].take(), output.status.code().unwrap())
}

/// Where the ICRC of an Ethernet frame with IPv4 and without VLAN is.
fn icrc_at(frame: &[u8]) -> usize {
    assert_eq!(frame[12..14], [8, 0]);
    14 + usize::from(u16::from_be_bytes([frame[16], frame[17]])) - 4
}

/// The frame in rc_send with this length of payload and pad.
fn frame_with_pad() -> Vec<u8> {
    let frame = frames("rc_send.pcap").into_iter().find(|frame| frame[43] >> 4 & 3 == 3).unwrap();
    assert_eq!(frame[42], 4, "a SEND Only of 1 byte");
    frame
}

/// The cause of the one packet of a capture.
fn cause_of(frame: Vec<u8>) -> (String, String) {
    let file = TempFile::pcap(ETHERNET, &[frame]);
    let (packets, summary, status) = json(&file.0);
    assert_eq!((packets.len(), status), (1, 1));
    assert_eq!((&packets[0]["icrc"], &summary["icrc_bad"]), (&"bad".into(), &1.into()));
    let text = |name: &str| packets[0][name].as_str().unwrap().to_owned();
    (text("cause"), text("cause_text"))
}

#[test]
fn every_icrc_of_every_fixture_is_right() {
    let mut total = 0;
    for path in fixtures() {
        let (packets, summary, status) = json(&path);
        assert_eq!(status, 0, "{}", path.display());
        let count = summary["roce_packets"].as_u64().unwrap();
        assert_eq!(packets.len() as u64, count);
        assert_eq!((&summary["icrc_ok"], &summary["frames"]), (&count.into(), &count.into()));
        for name in ["icrc_bad", "icrc_truncated", "icrc_unchecked", "malformed"] {
            assert_eq!(summary[name], 0, "{name} of {}", path.display());
        }
        for (number, packet) in packets.iter().enumerate() {
            assert_eq!(packet["frame"], number as u64 + 1);
            assert_eq!(packet["icrc"], "ok");
            assert!(packet["opcode"].is_string() && packet["error"].is_null());
            for name in ["timestamp", "opcode_byte", "dest_qp", "psn", "pkey", "pad", "payload_len"] {
                assert!(packet[name].is_u64(), "{name} in {packet}");
            }
        }
        let in_flows: u64 =
            summary["flows"].as_array().unwrap().iter().map(|f| f["packets"].as_u64().unwrap()).sum();
        assert_eq!(in_flows, count);
        total += count;

        let text = ferroce(&[], &path);
        assert_eq!(text.status.code(), Some(0));
        let text = String::from_utf8(text.stdout).unwrap();
        assert_eq!(text.lines().filter(|line| line.ends_with("| ICRC ok")).count() as u64, count);
    }
    assert_eq!(total, 765);
}

#[test]
fn headers_are_decoded() {
    let (packets, _, _) = json(&fixture("rc_atomic.pcap"));
    let first = &packets[0];
    assert_eq!((&first["opcode"], &first["network"]), (&"RC_FETCH_ADD".into(), &"ipv4".into()));
    assert_eq!((&first["source"], &first["destination"]), (&"10.77.0.11".into(), &"10.77.0.12".into()));
    assert_eq!((&first["psn"], &first["ack_req"]), (&0x100.into(), &true.into()));
    assert_eq!((&first["swap_or_add"], &first["compare"]), (&1.into(), &0.into()));
    let second = &packets[1];
    assert_eq!(second["opcode"], "RC_ATOMIC_ACKNOWLEDGE");
    assert_eq!((&second["aeth"], &second["msn"]), (&"ACK".into(), &1.into()));
    assert_eq!(second["atomic_original"], 0x1122_3344_5566_7788_u64);

    let (packets, _, _) = json(&fixture("rping_ipv6.pcap"));
    let cm: Vec<&str> = packets.iter().filter_map(|packet| packet["cm"]["message"].as_str()).collect();
    assert_eq!(cm, ["REQ", "REP", "RTU", "DREQ", "DREP"]);
    assert_eq!(packets[0]["cm"]["destination"], "fd77::12");
    assert_eq!((&packets[0]["qkey"], &packets[0]["source_qp"]), (&0x8001_0000_u64.into(), &1.into()));

    let (packets, summary, _) = json(&fixture("ecn_ce.pcap"));
    assert!(packets.iter().any(|packet| packet["ecn"] == 3));
    let marked: u64 = summary["flows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["congestion_experienced"].as_u64().unwrap())
        .sum();
    assert_eq!(marked, packets.iter().filter(|packet| packet["ecn"] == 3).count() as u64);
}

#[test]
fn naks_gaps_and_duplicates_are_counted() {
    let (packets, summary, _) = json(&fixture("rc_nak_access.pcap"));
    let naks = packets.iter().filter(|packet| packet["syndrome"] == 0x62).count() as u64;
    let counted: u64 = summary["flows"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|flow| flow["naks"]["NAK_REMOTE_ACCESS_ERROR"].as_u64())
        .sum();
    assert!(naks > 0);
    assert_eq!(counted, naks);

    // One direction of requests: consecutive PSNs from 0x100, without loss.
    let flow = |frames: &[Vec<u8>]| {
        let file = TempFile::pcap(ETHERNET, frames);
        let (_, summary, _) = json(&file.0);
        let flow = summary["flows"][0]["requests"].clone();
        ["gaps", "missing", "late", "duplicates"].map(|name| flow[name].as_u64().unwrap())
    };
    let sends = |frame: &Vec<u8>| frame[42] <= 5;
    let all: Vec<Vec<u8>> = frames("rc_send.pcap").into_iter().filter(sends).collect();
    assert!(all.len() > 6);
    assert_eq!(flow(&all), [0, 0, 0, 0]);
    let mut lost = all.clone();
    lost.drain(2..4);
    assert_eq!(flow(&lost), [1, 2, 0, 0]);
    let mut swapped = all.clone();
    swapped.swap(2, 3);
    assert_eq!(flow(&swapped), [1, 0, 1, 0]);
    let mut twice = all.clone();
    twice.insert(3, all[2].clone());
    assert_eq!(flow(&twice), [0, 0, 0, 1]);

    // A READ has as many PSNs as responses.
    let (_, summary, _) = json(&fixture("rc_read.pcap"));
    for flow in summary["flows"].as_array().unwrap() {
        for stream in ["requests", "read_responses"] {
            for count in ["gaps", "missing", "late", "duplicates"] {
                assert_eq!(flow[stream][count], 0, "{count} of {stream} in {flow}");
            }
        }
    }
    let (_, summary, _) = json(&fixture("rc_write_loss.pcap"));
    let requests = &summary["flows"][0]["requests"];
    assert_eq!(requests["missing"], 0, "what was lost came again");
    assert!(requests["duplicates"].as_u64().unwrap() > 0);
}

#[test]
fn rewritten_addresses_are_seen() {
    // Guest 1 is behind a NAT: the other end sees another address, in both directions. The capture does not show the
    // original one, but the ICRC of every packet differs in the same way.
    let nat = |frame: &mut Vec<u8>| {
        let at = if frame[26..30] == [10, 77, 0, 11] { 26 } else { 30 };
        assert_eq!(frame[at..at + 4], [10, 77, 0, 11]);
        frame[at..at + 4].copy_from_slice(&[192, 0, 2, 7]);
    };
    let mut frames_of_send = frames("rc_send.pcap");
    let original = frames_of_send.clone();
    frames_of_send.iter_mut().for_each(nat);
    let file = TempFile::pcap(ETHERNET, &frames_of_send);
    let (packets, summary, status) = json(&file.0);
    assert_eq!(status, 1);
    let count = packets.len() as u64;
    assert_eq!((&summary["icrc_bad"], &summary["icrc_ok"]), (&count.into(), &0.into()));
    assert_eq!(summary["causes"], serde_json::json!({ "address_rewritten": count }));
    let last = packets.last().unwrap()["cause_text"].as_str().unwrap();
    assert!(last.contains("10.77.0.11"), "{last}");

    // With packets from before the NAT in the capture, the original address is certain.
    let both: Vec<Vec<u8>> = original.into_iter().take(2).chain(frames_of_send).collect();
    let file = TempFile::pcap(ETHERNET, &both);
    let (packets, summary, _) = json(&file.0);
    assert_eq!(summary["icrc_ok"], 2);
    assert_eq!(packets[2]["cause_text"], "address rewritten, was 10.77.0.11 to 10.77.0.12");

    // The connection manager's REQ contains the addresses, which the NAT does not change.
    let mut rping = frames("rping_ipv6.pcap");
    let ours = rping[0][22..38].to_vec();
    for frame in &mut rping {
        let at = if frame[22..38] == ours[..] { 22 } else { 38 };
        assert_eq!(frame[at..at + 16], ours[..]);
        frame[at..at + 8].copy_from_slice(&[0x20, 1, 0xd, 0xb8, 0, 0, 0, 1]);
        frame[at + 15] = 0x99;
    }
    let file = TempFile::pcap(ETHERNET, &rping);
    let (packets, summary, _) = json(&file.0);
    assert_eq!(summary["causes"], serde_json::json!({ "address_rewritten": rping.len() }));
    assert_eq!(packets[0]["cause_text"], "address rewritten, was fd77::11 to fd77::12");

    // The same with another port, too.
    for frame in &mut rping {
        frame[54] ^= 0x12;
        frame[55] ^= 0x34;
    }
    let file = TempFile::pcap(ETHERNET, &rping);
    let (packets, summary, _) = json(&file.0);
    assert_eq!(summary["causes"], serde_json::json!({ "address_rewritten": rping.len() }));
    assert_eq!(packets[0]["cause_text"], "address rewritten, was fd77::11 to fd77::12 from port 55410");
}

#[test]
fn other_causes_are_told_apart() {
    let good = frame_with_pad();
    let at = icrc_at(&good);
    let with_icrc = |value: u32| {
        let mut frame = good.clone();
        frame[at..at + 4].copy_from_slice(&value.to_le_bytes());
        frame
    };
    let found = u32::from_le_bytes(good[at..at + 4].try_into().unwrap());
    /// Sets the fields that the ICRC does not cover to ones.
    fn masked(frame: &[u8], leave: &[usize]) -> Vec<u8> {
        let mut bytes = [&[0xff; 8], &frame[14..]].concat();
        for at in [1, 8, 10, 11, 26, 27, 32] {
            if !leave.contains(&at) {
                bytes[8 + at] = 0xff;
            }
        }
        bytes
    }
    let ours = masked(&good[..at], &[]);
    assert_eq!(crc(ours.iter().copied()), found, "the test's own CRC is right");

    assert_eq!(cause_of(with_icrc(found.swap_bytes())).0, "byte_order");
    assert_eq!(cause_of(with_icrc(0)).0, "not_filled_in");
    let no_pad = crc(ours[..ours.len() - 3].iter().copied());
    assert_eq!(cause_of(with_icrc(no_pad)).0, "pad_left_out");
    let with_ttl = crc(masked(&good[..at], &[8]));
    let (cause, text) = cause_of(with_icrc(with_ttl));
    assert_eq!(cause, "variant_fields_included");
    assert!(text.ends_with(": TTL"), "{text}");
    let with_all = crc(masked(&good[..at], &[1, 8, 10, 11, 26, 27, 32]));
    let (_, text) = cause_of(with_icrc(with_all));
    assert!(text.ends_with("TOS, TTL, IPv4 checksum, UDP checksum, BTH byte 4"), "{text}");
    let no_ones = crc(ours[8..].iter().copied());
    let (_, text) = cause_of(with_icrc(no_ones));
    assert!(text.ends_with("no ones in front"), "{text}");

    let edit = |at: usize, bits: &[u8]| {
        let mut frame = good.clone();
        frame[at..].iter_mut().zip(bits).for_each(|(byte, bits)| *byte ^= bits);
        cause_of(frame)
    };
    let port = u16::from_be_bytes([good[34], good[35]]);
    assert_eq!(
        edit(34, &[0x12, 0x34]),
        ("source_port_rewritten".into(), format!("source port rewritten, was {port}"))
    );
    let id = u16::from_be_bytes([good[18], good[19]]);
    let (cause, text) = edit(18, &good[18..20]);
    assert_eq!(
        (cause.as_str(), text),
        ("ip_id_rewritten", format!("IPv4 identification rewritten, was {id:#06x}"))
    );
    assert_eq!(edit(20, &[0x40]), ("ip_flags_rewritten".into(), "IPv4 flags rewritten, were 0x4000".into()));
    assert_eq!(edit(29, &[0x0f]).1, "address rewritten, was 10.77.0.11 to 10.77.0.12");
    assert_eq!(edit(54, &[0x10]), ("corrupted".into(), "corrupted: bit 4 of byte 40, in the payload".into()));
    assert_eq!(edit(52, &[0x11]).1, "corrupted: byte 38, in the BTH");
    assert_eq!(edit(at, &[4]).1, "corrupted: the ICRC itself");
    assert_eq!(edit(47, &[1, 2, 3, 4, 5, 6, 7]).0, "corrupted");
}

#[test]
fn what_the_capture_cut_off_is_truncated() {
    let original = frames("rc_write.pcap");
    for snap in [54, 60, 70, 96] {
        let file = TempFile::cut(ETHERNET, &original, snap);
        let (packets, summary, status) = json(&file.0);
        assert_eq!(status, 0, "no ICRC is wrong");
        assert_eq!(packets.len(), original.len());
        let mut cut = 0;
        for (packet, frame) in packets.iter().zip(&original) {
            let whole = frame.len() <= snap;
            cut += u64::from(!whole);
            assert_eq!(packet["icrc"], if whole { "ok" } else { "truncated" });
            assert_eq!(
                (&packet["captured_len"], &packet["original_len"]),
                (&frame.len().min(snap).into(), &frame.len().into())
            );
            assert!(packet["opcode"].is_string() && packet["error"].is_null(), "{packet}");
            assert_eq!(packet["psn"], u32::from_be_bytes([0, frame[51], frame[52], frame[53]]));
            // A RETH is shown if it was captured.
            let has_reth = [6, 10, 11].contains(&frame[42]);
            assert_eq!(packet["va"].is_u64(), has_reth && snap >= 54 + 16, "{packet}");
        }
        assert!(cut > 0);
        assert_eq!((&summary["icrc_truncated"], &summary["icrc_bad"]), (&cut.into(), &0.into()));
    }
    // Truncated in the BTH: no opcode is invented.
    let file = TempFile::cut(ETHERNET, &original, 50);
    let (packets, summary, _) = json(&file.0);
    assert!(packets.iter().all(|packet| packet["opcode"].is_null() && packet["icrc"] == "truncated"));
    assert_eq!(summary["icrc_truncated"], original.len());
    // Truncated before the port: the protocol is unknown.
    let file = TempFile::cut(ETHERNET, &original, 34);
    let (packets, summary, status) = json(&file.0);
    assert_eq!((packets.len(), &summary["frames"], status), (0, &original.len().into(), 0));
}

/// Some recorders truncate packets and report the truncated length as the packet's; the headers have the real one.
#[test]
fn silently_truncated_packets_stay_in_their_flow() {
    let original = frames("rc_write.pcap");
    let whole = TempFile::pcap(ETHERNET, &original);
    let (_, expected, _) = json(&whole.0);
    let cut: Vec<Vec<u8>> = original.iter().map(|frame| frame[..frame.len().min(72)].to_vec()).collect();
    let file = TempFile::pcap(ETHERNET, &cut);
    let (packets, summary, status) = json(&file.0);
    let short = original.iter().filter(|frame| frame.len() > 72).count();
    assert!(short > 0);
    assert_eq!((status, &summary["icrc_truncated"], &summary["malformed"]), (0, &short.into(), &0.into()));
    assert!(packets.iter().all(|packet| packet["error"].is_null()));
    assert_eq!(
        summary["flows"], expected["flows"],
        "packets, payload and gaps are those of the whole capture"
    );

    // A packet that was not truncated and has IPv4 options is neither damaged nor malformed.
    let mut options = original[0].clone();
    options[14] = 0x46;
    let length = u16::from_be_bytes([options[16], options[17]]) + 4;
    options[16..18].copy_from_slice(&length.to_be_bytes());
    options.splice(34..34, [1, 1, 1, 0]);
    let (packets, summary, status) = json(&TempFile::pcap(ETHERNET, &[options]).0);
    assert_eq!((status, &packets[0]["icrc"], &summary["malformed"]), (0, &"unchecked".into(), &0.into()));
    assert_eq!(
        summary["unchecked"],
        serde_json::json!({ "IPv4 options (header of 24 bytes; RoCEv2 has 20)": 1 })
    );
}

#[test]
fn other_link_layers() {
    let ethernet = frames("rc_send.pcap");
    let ipv6 = frames("rc_send_ipv6.pcap");
    let both =
        || ethernet.iter().map(|frame| (0x0800_u16, frame)).chain(ipv6.iter().map(|frame| (0x86dd, frame)));
    let wrapped = |front: &dyn Fn(u16, &[u8]) -> Vec<u8>| -> Vec<Vec<u8>> {
        both().map(|(ethertype, frame)| [&front(ethertype, frame)[..], &frame[14..]].concat()).collect()
    };
    let tag = |ethertype: u16, frame: &[u8]| {
        [&frame[..12], &[0x88, 0xa8, 0x60, 7, 0x81, 0, 0xa0, 100], &ethertype.to_be_bytes()].concat()
    };
    let cases = [
        (RAW_IP, wrapped(&|_, _| Vec::new())),
        (COOKED, wrapped(&|ethertype, _| [&[0; 14][..], &ethertype.to_be_bytes()].concat())),
        (COOKED_2, wrapped(&|ethertype, _| [&ethertype.to_be_bytes()[..], &[0; 18]].concat())),
        (ETHERNET, wrapped(&tag)),
    ];
    for (link_type, frames) in cases {
        let file = TempFile::pcap(link_type, &frames);
        let (packets, summary, status) = json(&file.0);
        assert_eq!((status, &summary["icrc_ok"]), (0, &frames.len().into()), "link type {link_type}");
        assert_eq!(packets[0]["opcode"], "RC_SEND_ONLY");
        assert_eq!(packets[0]["eth_source"].is_null(), link_type != ETHERNET);
        if link_type == ETHERNET {
            let vlans = serde_json::json!([{ "id": 7, "priority": 3 }, { "id": 100, "priority": 5 }]);
            assert_eq!(packets[0]["vlans"], vlans);
        }
    }
}

#[test]
fn roce_v1_and_other_traffic() {
    let (mut frame, good) = (Vec::new(), frames("rc_send_ipv6.pcap").swap_remove(0));
    // The IPv6 header becomes a GRH when its next header is changed and UDP is removed.
    frame.extend(&good[..12]);
    frame.extend([0x89, 0x15]);
    frame.extend(&good[14..54]);
    frame[20] = 0x1b;
    let length = u16::from_be_bytes([good[18], good[19]]) - 8;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    frame.extend(&good[62..]);
    let at = frame.len() - 4;
    let mut covered = [&[0xff; 8], &frame[14..at]].concat();
    covered[8] |= 0x0f;
    for at in [1, 2, 3, 7, 44] {
        covered[8 + at] = 0xff;
    }
    frame[at..].copy_from_slice(&crc(covered).to_le_bytes());
    let mut arp = frame.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    let mut dns = frames("rc_send.pcap").swap_remove(0);
    dns[36..38].copy_from_slice(&53_u16.to_be_bytes());
    let file = TempFile::pcap(ETHERNET, &[arp, frame, dns, vec![1, 2, 3]]);
    let (packets, summary, status) = json(&file.0);
    assert_eq!((packets.len(), &summary["frames"], status), (1, &4.into(), 0));
    assert_eq!((&packets[0]["network"], &packets[0]["frame"]), (&"grh".into(), &2.into()));
    assert_eq!((&packets[0]["icrc"], &packets[0]["source"]), (&"ok".into(), &"fd77::11".into()));
}

#[test]
fn malformed_packets_are_listed_with_their_reason() {
    let good = frame_with_pad();
    let at = icrc_at(&good);
    let edit = |edits: &[(usize, u8)]| {
        let mut frame = good.clone();
        edits.iter().for_each(|&(at, value)| frame[at] = value);
        frame
    };
    // A reserved opcode with a valid ICRC.
    let mut unknown = edit(&[(42, 0x15)]);
    let mut covered = [&[0xff; 8], &unknown[14..at]].concat();
    [1, 8, 10, 11, 26, 27, 32].iter().for_each(|at| covered[8 + at] = 0xff);
    unknown[at..at + 4].copy_from_slice(&crc(covered).to_le_bytes());
    let cases = [
        (unknown, "ok", "opcode 0x15 is none of the standard's"),
        (edit(&[(42, 0x1c)]), "bad", "opcode and pad need"),
        (edit(&[(42, 0)]), "bad", "RC_SEND_FIRST with 1 bytes of payload"),
        (edit(&[(39, good[39] - 1)]), "bad", "pad 3 behind 0 bytes of payload: must be 0"),
        (edit(&[(38, 0), (39, 20)]), "unchecked", "UDP length 20"),
        (edit(&[(38, 0xff)]), "unchecked", "UDP length"),
        (edit(&[(20, 0x20)]), "unchecked", "IPv4 fragment"),
        (edit(&[(16, 0xff)]), "unchecked", "frame truncated"),
    ];
    let file = TempFile::pcap(ETHERNET, &cases.iter().map(|(frame, _, _)| frame.clone()).collect::<Vec<_>>());
    let (packets, summary, status) = json(&file.0);
    // The unknown opcode may be a manufacturer's.
    assert_eq!((packets.len(), &summary["malformed"], status), (cases.len(), &(cases.len() - 1).into(), 1));
    assert_eq!(summary["unknown_opcodes"], 1);
    for (packet, (_, icrc, reason)) in packets.iter().zip(&cases) {
        assert_eq!(packet["icrc"], *icrc, "{packet}");
        assert!(packet["error"].as_str().unwrap().contains(reason), "{packet}");
    }
}

#[test]
fn what_can_not_be_read_is_named() {
    let fails = |path: &Path, reason: &str| {
        let output = ferroce(&[], path);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(&path.display().to_string()) && stderr.contains(reason), "{stderr}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(fails(&TempFile::new(b"this is no capture at all").0, ""), "");
    assert_eq!(fails(&TempFile::new(b"").0, ""), "");
    assert_eq!(fails(Path::new("/nonexistent/file.pcap"), "No such file"), "");
    fails(&TempFile::pcap(147, &frames("rc_send.pcap")).0, "link type 147");
    // Damaged at the end: the packets before are shown.
    let mut file = std::fs::read(fixture("rc_send.pcap")).unwrap();
    file.truncate(file.len() - 10);
    let shown = fails(&TempFile::new(&file).0, "truncated");
    assert_eq!(
        shown.lines().filter(|line| line.ends_with("ICRC ok")).count(),
        frames("rc_send.pcap").len() - 1
    );
}

#[test]
fn tshark_says_the_same() {
    let mut compared = 0;
    for path in fixtures() {
        let (ours, _, _) = json(&path);
        let Some(packets) = judge::tshark_agrees(&path, &ours) else { return };
        compared += packets;
    }
    assert_eq!(compared, 765);
}

/// The CNP of a ConnectX-4 Lx (TV3 of docs/protocol.md §3), and CNPs of ferroce among data packets.
#[test]
fn cnps_are_named() {
    let captures = [
        ("connectx_cnp.pcap", 1),
        ("sim_paced_sender.pcapng", 28),
        ("sim_paced_receiver.pcapng", 28),
        ("sim_unheeded_sender.pcapng", 45),
    ];
    for (name, count) in captures {
        let path = fixture("congestion").join(name);
        let (packets, summary, status) = json(&path);
        assert_eq!((status, &summary["icrc_ok"]), (0, &summary["frames"]), "{name}");
        let ours: Vec<&Value> = packets.iter().filter(|packet| packet["opcode"] == "CNP").collect();
        assert_eq!(ours.len(), count, "{name}");
        for cnp in &ours {
            assert_eq!(
                (&cnp["opcode_byte"], &cnp["payload_len"]),
                (&0x81.into(), &16.into()),
                "{name}: {cnp}"
            );
            assert_eq!((&cnp["dscp"], &cnp["becn"], &cnp["psn"]), (&48.into(), &true.into(), &0.into()));
        }
        let flows = summary["flows"].as_array().unwrap().iter();
        let in_flows: u64 = flows.filter_map(|flow| flow["opcodes"]["CNP"].as_u64()).sum();
        assert_eq!(in_flows, count as u64, "{name}: {summary:#}");
        let text = String::from_utf8(ferroce(&[], &path).stdout).unwrap();
        let lines = text.lines().filter(|line| line.contains(" | CNP qp 0x") && line.contains(" becn "));
        assert_eq!(lines.count(), count, "{name}");
        let Some(theirs) = judge::tshark_cnps(&path) else { continue };
        let ours = ours.iter().map(|cnp| {
            let number = |name: &str| cnp[name].as_u64().unwrap();
            [number("frame"), number("dest_qp"), number("dscp"), u64::from(cnp["becn"] == true)]
        });
        assert_eq!(theirs, ours.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn icrcs_computed_bit_by_bit_are_the_same() {
    let checked: usize = fixtures().iter().map(|path| judge::icrcs_are_right(path)).sum();
    assert_eq!(checked, 765);
}
