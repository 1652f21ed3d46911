//! Captures, replayed: each gives its report, no part of one gives a false violation, and violations are found.

mod congestion;
mod contradictions;
mod impaired;
mod input;
mod limits;
mod recovery;
mod unopened;
mod unreliable;
mod verdicts;
mod wild;
mod world;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ferroce_driver_test_support::random::Random;
use wild::{Frames, reth, transport};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures")
}

/// The folders of captures, each with a folder of their reports.
fn folders() -> [PathBuf; 3] {
    [fixtures(), fixtures().join("impaired"), fixtures().join("congestion")]
}

/// The captures, by name without extension.
fn captures() -> BTreeMap<String, PathBuf> {
    let entries = folders().into_iter().flat_map(|folder| fs::read_dir(folder).expect("captures are there"));
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let captures = paths.filter(|path| path.extension().is_some_and(|e| e == "pcap" || e == "pcapng"));
    captures.map(|path| (path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), path)).collect()
}

/// The command; `FERROCE_REPLAY_WITH` names another build of it, for comparison.
fn program() -> OsString {
    std::env::var_os("FERROCE_REPLAY_WITH").unwrap_or(env!("CARGO_BIN_EXE_ferroce").into())
}

fn replay(file: &Path, options: &[&str]) -> Output {
    Command::new(program()).arg("replay").args(options).arg(file).output().expect("ferroce runs")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// `FERROCE_WRITE_REPORTS=1` writes them again.
#[test]
fn every_capture_gives_its_report() {
    let write = std::env::var_os("FERROCE_WRITE_REPORTS").is_some();
    let mut wrong = Vec::new();
    let captures = captures();
    for (name, path) in &captures {
        let report = path.with_file_name("reports").join(format!("{name}.txt"));
        let output = replay(path, &[]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // The sources of these captures conform; one capture has only READ responses.
        if !matches!(output.status.code(), Some(0 | 3)) {
            wrong.push(format!("{name}: {:?}: {}", output.status, said.lines().last().unwrap_or_default()));
        }
        if write {
            fs::write(&report, &said).expect("the report can be written");
        }
        let expected = fs::read_to_string(&report).unwrap_or_default();
        if said != expected {
            let differs = said.lines().zip(expected.lines()).find(|(a, b)| a != b);
            wrong.push(format!("{name}: {differs:#?}"));
        }
    }
    let reports =
        folders().map(|folder| fs::read_dir(folder.join("reports")).expect("the reports are there"));
    for entry in reports.into_iter().flatten() {
        let name = entry.expect("an entry").path();
        let name = name.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        assert!(captures.contains_key(&name), "reports/{name}.txt is of no capture");
    }
    println!("{} captures replayed", captures.len());
    assert!(wrong.is_empty(), "{} of {} reports:\n{}", wrong.len(), captures.len(), wrong.join("\n"));
}

/// A capture may begin and end anywhere, lack a packet, be truncated, or have only one direction.
#[test]
fn no_part_of_a_capture_is_found_to_violate() {
    let mut random = Random::from_env("FERROCE_REPLAY_SEED");
    let directory = Scratch::new("parts");
    let mut parts = 0;
    for (name, path) in captures() {
        let frames = Frames::read(&path).expect("Ethernet frames");
        for turn in 0..2 {
            let at = random.below(frames.len() as u64) as usize;
            let (what, part) = match (turn, random.below(4)) {
                (0, _) => {
                    let to = at + 1 + random.below((frames.len() - at) as u64) as usize;
                    (format!("frames {at} to {to}"), frames.part(at, to))
                }
                (_, 0) => (format!("only what the sender of frame {at} sent"), frames.one_way(at)),
                (_, 1) => {
                    let length = [64, 96, 128, 256][random.below(4) as usize];
                    (format!("{length} bytes of each"), frames.cut(length))
                }
                _ => (format!("without frame {at}"), frames.without(at)),
            };
            let file = directory.0.join("part.pcap");
            part.write(&file);
            // The report on congestion control contains no violation either.
            let output = replay(&file, &["--congestion", "mlx5"]);
            let seed = random.seed();
            // Some parts contain nothing to judge.
            assert!(
                matches!(output.status.code(), Some(0 | 3)),
                "{name}, {what}, from 0 (FERROCE_REPLAY_SEED={seed} cargo test -p ferroce-tools --test replay):\n{}",
                text(&output)
            );
            parts += 1;
        }
    }
    println!("{parts} parts of captures");
    assert!(parts > 100);
}

/// A recorded end that breaks a rule is named, with the rule.
#[test]
fn a_broken_rule_is_found_in_a_capture() {
    /// The change of the capture, and the end and rule that must be named.
    struct Broken {
        what: &'static str,
        capture: &'static str,
        breaks: fn(&mut Frames),
        who: &'static str,
        rule: &'static str,
    }
    const ASKS: &str = "10.77.0.11 as recorded";
    const ANSWERS: &str = "10.77.0.12 as recorded";
    // Frame numbers from 1, as in `ferroce dissect`.
    let broken = [
        Broken {
            what: "MSN counted twice",
            capture: "rc_write",
            breaks: |frames| frames.edit(4, |bth| bth[15] += 1),
            who: ANSWERS,
            rule: "msn",
        },
        Broken {
            what: "a gap told twice",
            capture: "rc_write_loss",
            breaks: |frames| {
                frames.repeat(6);
                frames.edit_network(7, |packet| packet[5] ^= 0x55);
            },
            who: ANSWERS,
            rule: "nak-once",
        },
        Broken {
            what: "a READ response with the opcode of another place",
            capture: "rc_read",
            breaks: |frames| frames.edit(10, |bth| bth[0] = 0x0f),
            who: ANSWERS,
            rule: "read-response",
        },
        Broken {
            what: "an ACK for what was never sent",
            capture: "rc_write",
            breaks: |frames| frames.edit(4, |bth| bth[9] ^= 0x10),
            who: ANSWERS,
            rule: "ack-psn",
        },
        Broken {
            what: "a syndrome that does not exist",
            capture: "rc_send",
            breaks: |frames| frames.edit(2, |bth| bth[12] = 0x5f),
            who: ANSWERS,
            rule: "syndrome",
        },
        Broken {
            what: "no pad behind one byte",
            capture: "rc_send",
            breaks: |frames| {
                frames.edit(3, |bth| bth[1] &= 0xcf);
                frames.shorten(3, 3);
                frames.edit(3, |_| {});
            },
            who: ASKS,
            rule: "pad",
        },
        Broken {
            what: "Middle as First",
            capture: "rc_reorder",
            breaks: |frames| frames.edit(2, |bth| bth[0] = 0x00),
            who: ASKS,
            rule: "opcode-order",
        },
        Broken {
            what: "a repeat with another payload",
            capture: "rc_rnr_nak",
            breaks: |frames| frames.edit(3, |bth| bth[20] ^= 1),
            who: ASKS,
            rule: "repeat",
        },
        Broken {
            what: "a repeat before the RNR timer",
            capture: "rc_rnr_nak",
            breaks: |frames| frames.hurry(3, 40_000_000),
            who: ASKS,
            rule: "rnr-wait",
        },
        Broken {
            what: "a READ that goes on at a wrong address",
            capture: "rc_read_loss",
            breaks: |frames| frames.edit(25, |bth| bth[19] ^= 4),
            who: ASKS,
            rule: "read-resume",
        },
        Broken {
            what: "a READ that takes up one PSN",
            capture: "rc_write",
            breaks: |frames| *frames = read_then_writes(frames, [101, 102, 103]),
            who: ASKS,
            rule: "psn-step",
        },
        Broken {
            what: "a READ counted by another path MTU",
            capture: "rc_write",
            breaks: |frames| *frames = read_then_writes(frames, [102, 103, 104]),
            who: ASKS,
            rule: "psn-step",
        },
        Broken {
            what: "another P_Key in the middle",
            capture: "rc_send",
            breaks: |frames| frames.edit(3, |bth| bth[2..4].copy_from_slice(&[0x80, 0x05])),
            who: ASKS,
            rule: "header",
        },
        Broken {
            what: "a transport version",
            capture: "rc_send",
            breaks: |frames| frames.edit(1, |bth| bth[1] |= 1),
            who: ASKS,
            rule: "header",
        },
    ];
    let directory = Scratch::new("broken");
    for Broken { what, capture, breaks, who, rule } in broken {
        let mut frames = Frames::read(&fixtures().join(format!("{capture}.pcap"))).expect("a pcap file");
        breaks(&mut frames);
        let file = directory.0.join("broken.pcap");
        frames.write(&file);
        let output = replay(&file, &[]);
        let said = text(&output);
        let mut behind = said.lines().skip_while(|line| !line.trim_start().starts_with(who));
        let verdict = behind.next().unwrap_or_default();
        let mut findings = behind.take_while(|line| line.starts_with("    "));
        assert!(
            output.status.code() == Some(1)
                && verdict.contains("VIOLATES")
                && findings.any(|line| line.trim_start().starts_with(&format!("VIOLATION {rule}"))),
            "{what}: {who} must be found to break '{rule}':\n{said}"
        );
        println!("{what:<50} | {capture:<15} | {who}: {rule}");
    }
}

/// A switch, or netem, duplicates a packet: its sender sent it once.
#[test]
fn network_copies_are_no_violation() {
    let directory = Scratch::new("copies");
    // A sequence error NAK, final refusals, an RNR NAK, and the packet retransmitted after it.
    for (capture, number) in
        [("rc_write_loss", 6), ("rc_nak_access", 2), ("rc_rnr_nak", 2), ("rc_rnr_nak", 3)]
    {
        let mut frames = Frames::read(&fixtures().join(format!("{capture}.pcap"))).expect("a pcap file");
        frames.repeat(number);
        let file = directory.0.join("copies.pcap");
        frames.write(&file);
        let output = replay(&file, &[]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{capture} with frame {number} twice:\n{said}");
        assert!(said.contains("1 copies by the network"), "{capture}, frame {number}:\n{said}");
    }
}

/// A capture without anything to judge does not count as conforming.
#[test]
fn nothing_to_judge_is_a_verdict_of_its_own() {
    let directory = Scratch::new("nothing");
    let file = directory.0.join("nothing.pcap");
    let whole = Frames::read(&fixtures().join("rc_send.pcap")).expect("a pcap file");
    let mut damaged = whole.clone();
    (1..=whole.len()).for_each(|number| damaged.damage(number));
    let mut options = whole.clone();
    (1..=whole.len()).for_each(|number| options.give_options(number));
    let mut silent = whole.clone();
    (1..=whole.len()).for_each(|number| silent.cut_silently(number, 56));
    let mut secret = whole.clone();
    (1..=whole.len()).for_each(|number| secret.wrap(number, &[0x88, 0xe5, 0, 0, 0, 0, 0, 0]));
    let count = whole.len();
    let cases = [
        ("empty", whole.part(0, 0), "0 frames".to_owned()),
        ("damaged", damaged, format!("the ICRC of {count} is wrong")),
        ("with options", options, format!("{count} unchecked: with IPv4 options")),
        ("snapped", whole.cut(56), format!("{count} unchecked: cut short by the recorder")),
        ("cut in silence", silent, format!("{count} unchecked: cut short by the recorder")),
        ("in MACsec", secret, format!("{count} frames not opened: MACsec")),
    ];
    for (what, frames, reason) in cases {
        frames.write(&file);
        let output = replay(&file, &[]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(3), "{what}:\n{said}");
        assert!(said.contains("\nnothing to judge") && said.contains(&reason), "{what}, {reason}:\n{said}");
        let json: serde_json::Value =
            serde_json::from_slice(&replay(&file, &["--json"]).stdout).expect("JSON");
        assert_eq!(json["verdict"], "nothing-to-judge", "{what}");
    }
    // In a VXLAN, and after two MPLS labels, with and without Ethernet: it is decoded and judged.
    for tunnel in wild::TUNNELS {
        let mut frames = whole.clone();
        (1..=count).for_each(|number| frames.tunnel(number, tunnel));
        frames.write(&file);
        let output = replay(&file, &[]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{tunnel:?}:\n{said}");
        assert!(said.contains(&format!("{count} frames, {count} RoCE packets\n")), "{tunnel:?}:\n{said}");
    }
}

/// A READ of 4 KiB starting at PSN 100, with a path MTU of 1024, and WRITEs at these PSNs.
fn read_then_writes(headers: &Frames, psns: [u32; 3]) -> Frames {
    let kib = [7; 1024];
    let mut packets = vec![(false, transport(0x0c, 0x22, 100, &reth(0x1000, 7, 4096)))];
    for (psn, opcode) in (100..).zip([0x0d, 0x0e, 0x0e, 0x0f]) {
        let aeth: &[u8] = if opcode == 0x0e { &[] } else { &[0x1f, 0, 0, 1] };
        packets.push((true, transport(opcode, 0x11, psn, &[aeth, &kib].concat())));
    }
    for (psn, msn) in psns.into_iter().zip(2..) {
        packets
            .push((false, transport(0x0a, 0x22, 1 << 31 | psn, &[reth(0x2000, 7, 8), vec![5; 8]].concat())));
        packets.push((true, transport(0x11, 0x11, psn, &[0x1f, 0, 0, msn])));
    }
    headers.talk(packets)
}

#[test]
fn an_address_that_nobody_has_is_refused_by_name() {
    let output = replay(&fixtures().join("rc_send.pcap"), &["--role", "192.0.2.1"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("192.0.2.1") && said.contains("10.77.0.11, 10.77.0.12"), "{said}");
    let none = replay(Path::new("nowhere.pcap"), &[]);
    assert_eq!(none.status.code(), Some(2), "{}", text(&none));
    let role = replay(&fixtures().join("rc_send.pcap"), &["--role", "10.77.0.12", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&role.stdout).expect("JSON");
    let ends = report["conversations"][0]["ends"].as_array().expect("ends").len();
    assert_eq!((ends, report["verdict"].as_str()), (3, Some("differs-lawfully")));
}

/// A folder that is removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(purpose: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("ferroce-replay-{purpose}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder for the test");
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
