//! Captures that come from a pipe, are compressed, or are still being written.

use std::fs;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ferroce_driver_test_support::patience::until;
use ferroce_driver_test_support::signal::{Signal, signal};

use crate::{fixtures, replay, text};

fn from_pipe() -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce"));
    command.args(["replay", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("ferroce runs")
}

#[test]
fn a_pipe_and_gzip_are_judged_as_a_file_is() {
    let file = fixtures().join("rc_write.pcap");
    let expected = replay(&file, &[]);
    assert_eq!(expected.status.code(), Some(0), "{}", text(&expected));
    let bytes = fs::read(file).expect("a capture");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&bytes).expect("memory");
    for bytes in [bytes, gzip.finish().expect("memory")] {
        let mut child = from_pipe();
        child.stdin.take().expect("a pipe").write_all(&bytes).expect("it reads");
        assert_eq!(child.wait_with_output().expect("it ends"), expected);
    }
}

/// Ctrl-C also ends the recorder, and its whole capture is judged; if the recorder continues, the part before is
/// judged.
#[test]
fn ctrl_c_ends_a_live_capture_which_is_then_judged() {
    let bytes = fs::read(fixtures().join("rc_write.pcap")).expect("a capture");
    let first_frame = 24 + 16 + u32::from_le_bytes(bytes[32..36].try_into().expect("4 bytes")) as usize;
    for ends_too in [true, false] {
        let mut child = from_pipe();
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(&bytes[..first_frame]).expect("it reads");
        let catches = || {
            let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
            (u64::from_str_radix(caught.trim(), 16).ok()? & 2 != 0).then_some(())
        };
        until(Duration::from_secs(30), catches, || "a handler of SIGINT".to_owned());
        signal(child.id(), Signal::INT);
        if ends_too {
            stdin.write_all(&bytes[first_frame..]).expect("it still reads");
            drop(stdin);
            let output = child.wait_with_output().expect("it ends");
            assert_eq!(output.status.code(), Some(0), "{}", text(&output));
            assert!(!text(&output).contains("interrupted"), "{}", text(&output));
        } else {
            let output = child.wait_with_output().expect("it ends");
            drop(stdin);
            assert_eq!(output.status.code(), Some(130), "{}", text(&output));
            assert!(text(&output).contains("; interrupted: read up to frame 1\n"), "{}", text(&output));
        }
    }
}
