//! The coverage of a verdict: only unambiguous flows are paired, packets that were not judged or not played are
//! counted, and the exit status is 0 only if work was done.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::wild::{Frames, reth, transport};
use crate::{Scratch, fixtures, replay, text};

const ACK: u8 = 0x11;
const READ_ONLY_RESPONSE: u8 = 0x10;

/// The packets of a conversation, from the BTH on; the flag marks those of the responder.
type Talk = Vec<(bool, Vec<u8>)>;

fn headers() -> Frames {
    Frames::read(&fixtures().join("rc_write.pcap")).expect("a pcap file")
}

fn write(psn: u32) -> (bool, Vec<u8>) {
    (false, transport(0x0a, 0x22, 1 << 31 | psn, &[reth(0x1000, 7, 8), vec![5; 8]].concat()))
}

fn read(psn: u32, length: u32) -> (bool, Vec<u8>) {
    (false, transport(0x0c, 0x22, 1 << 31 | psn, &reth(0x1000, 7, length)))
}

fn fetch_add(psn: u32) -> (bool, Vec<u8>) {
    let rest = [&[0; 8][..], &[0, 0, 0, 7], &1u64.to_be_bytes(), &[0; 8]].concat();
    (false, transport(0x14, 0x22, 1 << 31 | psn, &rest))
}

fn answer(opcode: u8, psn: u32, msn: u8, payload: usize) -> (bool, Vec<u8>) {
    (true, transport(opcode, 0x11, psn, &[&[0x1f, 0, 0, msn], &vec![9; payload][..]].concat()))
}

fn said(purpose: &str, talk: Talk, options: &[&str]) -> (Output, String) {
    let directory = Scratch::new(purpose);
    let file = directory.0.join("talk.pcap");
    headers().talk(talk).write(&file);
    let output = replay(&file, options);
    let said = text(&output);
    (output, said)
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// A violation does not undo the pairing by which it is judged.
#[test]
fn the_only_two_flows_are_paired() {
    let cases: [(&str, Talk, &str); 3] = [
        (
            "200 bytes for a READ of 100",
            vec![read(100, 100), answer(READ_ONLY_RESPONSE, 100, 1, 200)],
            "read-response",
        ),
        (
            "100 bytes for a READ of 200",
            vec![read(100, 200), answer(READ_ONLY_RESPONSE, 100, 1, 100)],
            "read-response",
        ),
        (
            "a READ response for a WRITE",
            vec![write(100), answer(READ_ONLY_RESPONSE, 100, 1, 64)],
            "answer-kind",
        ),
    ];
    for (what, talk, rule) in cases {
        let (output, said) = said("only", talk, &[]);
        assert_eq!(output.status.code(), Some(1), "{what}:\n{said}");
        assert!(said.contains("10.77.0.12 as recorded: VIOLATES"), "{what}:\n{said}");
        assert!(said.contains(&format!("VIOLATION {rule}")), "{what}:\n{said}");
        assert!(
            !said.contains("ferroce as 10.77.0.12: VIOLATES"),
            "the engine did it right, {what}:\n{said}"
        );
    }
}

/// It is acknowledged again after its own response, which the capture may lack (`ferroce_answers_reorder_verbs_8`
/// without frame 157): this is noted, and is no violation.
#[test]
fn an_ack_without_the_atomic_response_is_noted() {
    let (output, said) = said("alone", vec![fetch_add(100), answer(ACK, 100, 1, 0)], &[]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("lawful answer-kind") && said.contains("not recorded can account for it"),
        "{said}"
    );
}

/// Its MSN counts messages from before the capture, and it may answer one of them: a retransmission is acknowledged
/// with the newest PSN, that of the atomic (seen from rdma_rxe, `ferroce_asks_delay_verbs_8`, frames 24 to 37).
#[test]
fn an_ack_for_an_atomic_may_answer_a_request_before_the_capture() {
    let (output, said) = said("late", vec![fetch_add(100), answer(ACK, 100, 4, 0)], &[]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(!said.contains("VIOLATION"), "{said}");
}

/// With another connection its response may belong to a third one: the pairing is a guess, which is reported.
#[test]
fn a_violation_next_to_another_connection_is_reported() {
    for psn in [100, 500] {
        let to = |(is_answer, mut bytes): (bool, Vec<u8>)| {
            bytes[7] += 0x22;
            (is_answer, bytes)
        };
        let [ask, wrong] = [read(psn, 100), answer(READ_ONLY_RESPONSE, psn, 1, 200)].map(to);
        let (output, told) = said("beside", vec![write(100), ask, answer(ACK, 100, 1, 0), wrong], &[]);
        assert_eq!(output.status.code(), Some(0), "{told}");
        assert!(told.contains("pairing guessed, not judged; --pair tells"), "{told}");
        assert!(
            told.trim_end().ends_with("; 1 of 2 conversations not judged; 2 of 4 packets not judged"),
            "{told}"
        );
    }
}

/// A response to an unrecorded request does not count as conforming.
#[test]
fn an_answer_that_fits_no_request_is_not_judged() {
    for (what, psn) in [("a little ahead", 105), ("of another connection", 0x60_0000)] {
        let (output, said) = said("ahead", vec![write(100), answer(ACK, psn, 1, 0)], &["--json"]);
        let report = json(&output);
        assert_eq!(
            (report["packets"].as_u64(), report["judged"].as_u64()),
            (Some(2), Some(1)),
            "{what}: {said}"
        );
        let ends = report["conversations"]
            .as_array()
            .expect("conversations")
            .iter()
            .flat_map(|conversation| conversation["ends"].as_array().expect("ends").iter());
        let of_answerer = ends.filter(|end| {
            end["who"] == "10.77.0.12 as recorded"
                && end["summary"].as_str().is_some_and(|summary| summary.contains("1 responses"))
        });
        let verdicts: Vec<&serde_json::Value> = of_answerer.map(|end| &end["verdict"]).collect();
        assert_eq!(verdicts, ["nothing-to-judge"], "{what}: {said}");
    }
    let (_, said) = said("ahead", vec![write(100), answer(ACK, 105, 1, 0)], &[]);
    assert!(said.trim_end().ends_with("; 1 of 2 packets not judged"), "{said}");
}

/// An end without any recorded packet does not conform.
#[test]
fn a_silent_end_gets_no_verdict() {
    let (output, said) = said("silent", vec![write(100), write(101)], &[]);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("10.77.0.11 as recorded: conforms; 2 requests"), "{said}");
    assert!(said.contains("10.77.0.12 as recorded: nothing to judge; 0 requests, 0 responses\n"), "{said}");
}

/// Packets that the engine did not get, and damaged ones, are counted in the last line.
#[test]
fn unjudged_and_unplayed_packets_are_counted() {
    let gap = vec![write(100), write(102), answer(ACK, 102, 2, 0)];
    let uc = |opcode, psn, payload: usize| (false, transport(opcode, 0x22, psn, &vec![7; payload]));
    let cases = [
        ("a gap", gap, "; 2 packets not played"),
        ("a UC message with a gap", vec![uc(0x20, 100, 1024), uc(0x22, 102, 64)], "; 2 ends not played"),
    ];
    for (what, talk, end) in cases {
        let (output, said) = said("counted", talk, &[]);
        assert_eq!(output.status.code(), Some(0), "{what}:\n{said}");
        assert!(said.trim_end().ends_with(end), "{what}:\n{said}");
    }
    let directory = Scratch::new("damaged");
    let file = directory.0.join("damaged.pcap");
    let mut frames = headers().talk([write(100), answer(ACK, 100, 1, 0), write(101)]);
    frames.damage(3);
    frames.write(&file);
    let said = text(&replay(&file, &[]));
    assert!(said.trim_end().ends_with("; 1 of 3 packets not judged"), "{said}");
    assert!(!said.contains("were repeated"), "nothing was: {said}");
    let role = text(&replay(&fixtures().join("rc_send.pcap"), &["--role", "10.77.0.12"]));
    assert!(role.trim_end().ends_with("; 1 ends not played"), "{role}");
}

/// An impossible pair is rejected, with the existing queue pairs.
#[test]
fn an_impossible_pair_is_refused() {
    let file = fixtures().join("rc_send.pcap");
    let output = replay(&file, &["--pair", "1:2"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--pair 0x000001:0x000002") && said.contains("packets go to 0x"), "{said}");
    let directory = Scratch::new("pairs");
    let ambiguous = directory.0.join("ambiguous.pcap");
    let to = |(is_answer, mut bytes): (bool, Vec<u8>), qpn: u8| {
        bytes[7] = qpn;
        (is_answer, bytes)
    };
    let ack = answer(ACK, 100, 1, 0);
    headers()
        .talk([to(write(100), 0x22), to(write(100), 0x23), ack.clone(), to(ack, 0x12)])
        .write(&ambiguous);
    let both = replay(&ambiguous, &["--pair", "0x11:0x22", "--pair", "0x11:0x23"]);
    assert_eq!(both.status.code(), Some(2), "{}", text(&both));
    assert!(text(&both).contains("--pair 0x000011:0x000023 contradicts --pair 0x000011:0x000022"));
    let lawful = replay(&ambiguous, &["--pair", "0x11:0x22", "--pair", "0x23:0x12", "--pair", "0x22:0x11"]);
    assert_eq!(lawful.status.code(), Some(0), "{}", text(&lawful));
    assert!(!text(&lawful).contains("guessed"), "{}", text(&lawful));
}

/// Status 1 is for a broken rule, not for a full disk.
#[test]
fn a_report_that_can_not_be_written_is_no_violation() {
    for (command, file) in [("replay", "rc_send.pcap"), ("dissect", "rc_send.pcap")] {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("there is a full device");
        let mut program = Command::new(env!("CARGO_BIN_EXE_ferroce"));
        let run = program.arg(command).arg(fixtures().join(file)).stdout(Stdio::from(full));
        let output = run.output().expect("ferroce runs");
        assert_eq!(output.status.code(), Some(2), "{command}: {}", text(&output));
        let help = Command::new(env!("CARGO_BIN_EXE_ferroce")).args([command, "--help"]).output();
        let help = text(&help.expect("ferroce runs")).replace("\n", " ");
        assert!(help.contains("can't be written"), "{command}: {help}");
    }
}

/// Two limited members of a partition must not communicate.
#[test]
fn limited_members_may_not_talk_to_each_other() {
    let with = |(is_answer, mut bytes): (bool, Vec<u8>), pkey: u16| {
        bytes[2..4].copy_from_slice(&pkey.to_be_bytes());
        (is_answer, bytes)
    };
    for (keys, status) in [([0x0001, 0x0001], 1), ([0x8001, 0x0001], 0), ([0x0001, 0x8001], 0)] {
        let talk = vec![with(write(100), keys[0]), with(answer(ACK, 100, 1, 0), keys[1])];
        let (output, said) = said("limited", talk, &[]);
        assert_eq!(output.status.code(), Some(status), "{keys:#x?}:\n{said}");
        assert_eq!(said.matches("VIOLATION header").count(), 2 * status as usize, "{keys:#x?}:\n{said}");
    }
}

/// A recorder that was killed leaves a truncated record: the part before it is judged, and the last line says so.
#[test]
fn a_file_that_is_cut_is_judged_up_to_there() {
    let directory = Scratch::new("cut");
    let cut = |name: &str, capture: PathBuf, bytes: usize| {
        let whole = fs::read(&capture).expect("a capture");
        let file = directory.0.join(name);
        fs::write(&file, &whole[..whole.len() - bytes]).expect("the file can be written");
        file
    };
    let pcap = cut("cut.pcap", fixtures().join("rc_send.pcap"), 5);
    let pcapng = cut("cut.pcapng", fixtures().join("ferroce_asks_rc_send.pcapng"), 5);
    for file in [pcap, pcapng] {
        let output = replay(&file, &[]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("differs lawfully; the file is judged up to frame"), "{said}");
        assert!(last.contains("the file ends after"), "{said}");
        assert!(json(&replay(&file, &["--json"]))["damage"].is_string());
    }
    // A violation in a part counts, too.
    let broken = directory.0.join("broken.pcap");
    headers().talk([read(100, 100), answer(READ_ONLY_RESPONSE, 100, 1, 200), write(101)]).write(&broken);
    let broken = cut("broken-cut.pcap", broken, 3);
    assert_eq!(replay(&broken, &[]).status.code(), Some(1));
}

/// If there is nothing to judge, the last line says what was found instead, and the remedy.
#[test]
fn nothing_to_judge_lists_what_was_found() {
    let directory = Scratch::new("instead");
    let file = directory.0.join("instead.pcap");
    let whole = headers();
    let count = whole.len();
    let wrapped = |front: &[u8]| {
        let mut frames = whole.clone();
        (1..=count).for_each(|number| frames.wrap(number, front));
        frames
    };
    let mut options = whole.clone();
    (1..=count).for_each(|number| options.give_options(number));
    let foreign = whole.talk([(false, transport(0xc5, 0x22, 100, &[0; 16]))]);
    let cases = [
        (whole.part(0, 0), "the file has no frames".to_owned()),
        (
            whole.cut(56),
            format!("{count} are cut short by the recorder: `tcpdump -s 0` records whole packets"),
        ),
        (options, format!("{count} are with IPv4 options")),
        (foreign, "1 have a manufacturer's opcode".to_owned()),
        (whole.talk([answer(ACK, 100, 1, 0)]), "1 answers are to requests that were not recorded".to_owned()),
        (wrapped(&[0x88, 0x64, 0, 0, 0, 0, 0, 0]), format!("{count} frames were not opened: PPPoE")),
        (wrapped(&[0x99, 0x99]), format!("{count} frames were not opened: EtherType 0x9999")),
    ];
    for (frames, reason) in cases {
        frames.write(&file);
        let output = replay(&file, &[]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(3), "{reason}:\n{said}");
        assert!(said.lines().last().is_some_and(|last| last.contains(&reason)), "{reason}:\n{said}");
    }
}

/// Packets after a manufacturer packet that begins a capture are judged as if the capture began there.
#[test]
fn a_manufacturers_opcode_in_front_hides_nothing() {
    let foreign = (false, transport(0xc5, 0x22, 100, &[0; 64]));
    let (output, said) = said("front", vec![foreign, write(100), answer(ACK, 100, 1, 0)], &["--json"]);
    let report = json(&output);
    assert_eq!((report["foreign"].as_u64(), report["judged"].as_u64()), (Some(1), Some(2)), "{said}");
    assert_eq!(output.status.code(), Some(0), "{said}");
}
