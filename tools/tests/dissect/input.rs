//! Captures that come from a pipe, are compressed, or are still being written.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use ferroce_driver_test_support::signal::{Signal, signal};

use super::{ETHERNET, TempFile, ferroce, fixture, frames};

/// Runs `dissect -` with `bytes` as standard input.
fn from_pipe(arguments: &[&str], bytes: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferroce"))
        .arg("dissect")
        .args(arguments)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&bytes); // the reader may have closed its end
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_pipe_and_gzip_are_read_as_a_file_is() {
    for name in ["rc_send.pcap", "ferroce_answers_rc_send.pcapng"] {
        let path = fixture(name);
        let bytes = std::fs::read(&path).unwrap();
        let expected = ferroce(&["--json"], &path);
        assert!(!expected.stdout.is_empty());
        // The file name does not matter, and gzip files may be concatenated.
        let compressed = TempFile::new(&gzip(&bytes));
        let two_parts = [gzip(&bytes[..100]), gzip(&bytes[100..])].concat();
        for output in [
            from_pipe(&["--json"], &bytes),
            from_pipe(&["--json"], &gzip(&bytes)),
            from_pipe(&["--json"], &two_parts),
            ferroce(&["--json"], &compressed.0),
        ] {
            assert_eq!(output, expected, "{name}");
        }
    }
}

#[test]
fn gzip_that_is_damaged_is_named_and_what_came_before_is_shown() {
    // Far more than the decoder's read-ahead.
    let many: Vec<Vec<u8>> = frames("mtu4096_write.pcap").into_iter().cycle().take(2000).collect();
    let file = TempFile::pcap(ETHERNET, &many);
    let whole = gzip(&std::fs::read(&file.0).unwrap());
    let middle = whole.len() / 2;
    // The checksum, which is the second last word.
    let mut wrong = whole.clone();
    wrong[whole.len() - 8] ^= 1;
    for (bytes, reason, most) in [
        (&whole[..middle], "truncated: the gzip data ends early", 1999),
        (&wrong, "the gzip data is damaged: ", 2000),
    ] {
        let output = from_pipe(&[], bytes);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("'standard input'") && stderr.contains(reason), "{stderr}");
        let shown = String::from_utf8(output.stdout).unwrap();
        let packets = shown.lines().filter(|line| line.ends_with("ICRC ok")).count();
        assert!((100..=most).contains(&packets), "{packets} of 2000");
        assert!(shown.contains(&format!("\n{packets} frames, ")), "the summary is there");
    }
    let output = from_pipe(&[], &[0x1f]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("1 bytes are not a capture"), "{stderr}");
}

/// Half a gigabyte of unknown blocks, in half a megabyte, with no more memory than the longest block needs.
#[test]
fn a_gzip_bomb_takes_no_memory() {
    const BLOCK: usize = 16 << 20;
    let mut section = 0x0a0d_0d0a_u32.to_le_bytes().to_vec();
    for word in [28, 0x1a2b_3c4d, 1, u32::MAX, u32::MAX, 28_u32] {
        section.extend(word.to_le_bytes());
    }
    let mut block = vec![0; BLOCK];
    for (at, word) in [(0, 0x0bad_u32), (4, BLOCK as u32), (BLOCK - 4, BLOCK as u32)] {
        block[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    let mut bomb = gzip(&section);
    let part = gzip(&block);
    (0..32).for_each(|_| bomb.extend(&part));
    let file = TempFile::new(&bomb);
    let limited = format!(
        "ulimit -v 262144 && exec '{}' dissect '{}'",
        env!("CARGO_BIN_EXE_ferroce"),
        file.0.display()
    );
    let output = Command::new("sh").args(["-c", &limited]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("0 frames, 0 RoCE packets"), "{text}");
}

/// A recorder at the other end of the pipe that continues to record.
struct Live {
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Live {
    fn start(bytes: &[u8]) -> Live {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ferroce"))
            .args(["dissect", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(bytes).unwrap();
        let (sender, lines) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Live { child, stdin, lines }
    }

    /// The next line, which is printed although the pipe stays open.
    fn line(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    /// Sends SIGINT, as Ctrl-C does.
    fn interrupt(&self) {
        signal(self.child.id(), Signal::INT);
    }

    /// The summary, and the exit status.
    fn end(mut self, keep_open: bool) -> (String, Option<i32>) {
        let stdin = keep_open.then_some(self.stdin);
        let status = self.child.wait().unwrap();
        drop(stdin);
        (self.lines.iter().collect::<Vec<_>>().join("\n"), status.code())
    }
}

#[test]
fn a_live_capture_is_shown_as_it_comes_and_ctrl_c_prints_the_summary() {
    let bytes = std::fs::read(fixture("rc_send.pcap")).unwrap();
    let first_two = 24 + 2 * 16 + frames("rc_send.pcap")[..2].iter().map(Vec::len).sum::<usize>();
    for ends_too in [true, false] {
        // A part of the third one is there, too.
        let mut live = Live::start(&bytes[..first_two + 20]);
        assert!(live.line().ends_with("ICRC ok"));
        assert!(live.line().ends_with("ICRC ok"));
        live.interrupt();
        if ends_too {
            // Ctrl-C has also ended the recorder, which writes its remaining packets.
            live.stdin.write_all(&bytes[first_two + 20..]).unwrap();
        }
        let (rest, status) = live.end(!ends_too);
        let count = if ends_too { frames("rc_send.pcap").len() } else { 2 };
        assert!(rest.contains(&format!("{count} frames, {count} RoCE packets: ICRC {count} ok")), "{rest}");
        assert_eq!(status, Some(if ends_too { 0 } else { 130 }));
    }
}

#[test]
fn a_reader_that_has_enough_ends_it_quietly() {
    // Far more than the capacity of a pipe.
    let many: Vec<Vec<u8>> = frames("rc_send.pcap").into_iter().cycle().take(20_000).collect();
    let file = TempFile::pcap(ETHERNET, &many);
    let mut child = Command::new(env!("CARGO_BIN_EXE_ferroce"))
        .arg("dissect")
        .arg(&file.0)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}
