//! Standard output and standard error of every sub-command: closed, on a full disk, as JSON, quiet.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::fs::{self, File};
use std::process::{Command, Output, Stdio};

use ends::{Ferroce, alone};
use ferroce::{Config, Context};
use ferroce_collectives::{Collectives, Options};
use ferroce_driver::loopback::{Switch, SwitchConfig};
use serde_json::Value;

/// A run of each sub-command that needs no rights and no peer. `--json` can be added to those that have it.
const RUNS: [(&str, bool); 15] = [
    ("collective all_reduce -g 2 -e 64 -n 2", true),
    ("demo -d loopback --tensors 2 --rounds 1", true),
    ("devinfo", true),
    ("dissect CAPTURE", true),
    ("doctor -d loopback", true),
    ("fabric incast --hosts 2 --count 1 --bytes 4KB", true),
    ("flight RECORDING", true),
    ("perf write bw -d loopback -n 10", true),
    ("pingpong -d loopback -n 10", false),
    ("replay CAPTURE", true),
    ("rping -d loopback", false),
    ("stat PID", true),
    ("topo", true),
    ("ucmatose -d loopback", false),
    ("udaddy -d loopback", false),
];

/// Commands that clap answers.
const HELP: [&str; 4] = ["--help", "--version", "help perf", "stat --help"];

const CAPTURE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../pcap-fixtures/ferroce_answers_rc_write.pcapng");

/// A server that `stat` finds.
fn shown() -> Ferroce {
    let [.., a, b] = std::process::id().to_be_bytes();
    let mut server = Ferroce::start(None, &format!("perf write bw -p 0 -d udp:127.97.{a}.{b}"));
    server.ready();
    server
}

/// A file for `flight`, of a communicator without operations.
fn recording() -> String {
    let path = format!("{}/flight-{}", env!("CARGO_TARGET_TMPDIR"), std::process::id());
    let switch = Switch::new(SwitchConfig::default()).unwrap();
    let mut ranks = [1, 2].map(|host| {
        let port = switch.port(&[[10, 0, 0, host].into()]);
        Collectives::new(Context::open(Box::new(port), &Config::default()).unwrap()).unwrap()
    });
    let options = Options::default();
    let cards = ranks.each_mut().map(|rank| rank.card(&options).unwrap());
    ranks[0].join_with(0, &cards, &options).unwrap();
    ranks[0].flight_recorder().unwrap().dump(path.as_ref()).unwrap();
    path
}

/// All runs, as text and as JSON.
fn all_runs(shown: &Ferroce) -> Vec<String> {
    let (pid, recording) = (shown.pid().to_string(), recording());
    let fill = |arguments: &str| {
        arguments.replace("CAPTURE", CAPTURE).replace("RECORDING", &recording).replace("PID", &pid)
    };
    let texts = RUNS.iter().map(|(arguments, _)| fill(arguments));
    let jsons = RUNS.iter().filter(|(_, json)| *json).map(|(arguments, _)| fill(arguments) + " --json");
    let others =
        ["stat PID --prometheus", "stat PID --watch 1 --count 2"].iter().map(|arguments| fill(arguments));
    texts.chain(jsons).chain(others).collect()
}

fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce"));
    command
        .args(arguments.split_whitespace())
        .stdin(Stdio::null())
        .env_remove("RUST_LOG")
        .env("TERM", "xterm");
    command
}

fn run(arguments: &str, stdout: Stdio, stderr: Stdio) -> Output {
    command(arguments).stdout(stdout).stderr(stderr).output().unwrap()
}

fn full() -> Stdio {
    File::create("/dev/full").unwrap().into()
}

/// A pipe whose reader has closed its end.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn every_sub_command_is_tested_here() {
    let help = run("--help", Stdio::piped(), Stdio::piped());
    let help = String::from_utf8(help.stdout).unwrap();
    let list = help.split("Commands:").nth(1).unwrap().split("\n\n").next().unwrap();
    // Descriptions continue in further lines, which begin with more spaces.
    let starts =
        list.lines().filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')));
    let names: Vec<&str> = starts.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.len() > RUNS.len(), "{names:?}");
    for name in names.iter().filter(|name| **name != "help") {
        assert!(RUNS.iter().any(|(arguments, _)| arguments.split(' ').next() == Some(name)), "{name}");
    }
}

#[test]
fn a_full_disk_is_an_error_that_names_standard_output() {
    let _alone = alone();
    let shown = shown();
    for arguments in all_runs(&shown).iter().map(String::as_str).chain(HELP) {
        let outcome = run(arguments, full(), Stdio::piped());
        let said = String::from_utf8_lossy(&outcome.stderr);
        assert!(matches!(outcome.status.code(), Some(1 | 2)), "{arguments}: {outcome:?}");
        assert!(said.contains("standard output: No space left on device"), "{arguments}: {said}");
    }
}

#[test]
fn a_reader_that_goes_changes_no_exit_status() {
    let _alone = alone();
    let shown = shown();
    for arguments in all_runs(&shown).iter().map(String::as_str).chain(HELP) {
        let wanted = run(arguments, Stdio::piped(), Stdio::piped());
        assert!(!wanted.stdout.is_empty() && wanted.status.code().is_some_and(|code| code < 2), "{wanted:?}");
        for (stdout, stderr, what) in [
            (closed(), Stdio::piped(), "no reader of standard output"),
            (closed(), closed(), "no reader of either"),
            (Stdio::piped(), closed(), "no reader of standard error"),
            (Stdio::piped(), full(), "standard error on a full disk"),
        ] {
            let outcome = run(arguments, stdout, stderr);
            let said = String::from_utf8_lossy(&outcome.stderr);
            assert_eq!(outcome.status.code(), wanted.status.code(), "{arguments}, {what}: {said}");
            assert!(!said.contains("panicked"), "{arguments}, {what}: {said}");
        }
    }
    // If a failure can't be printed, only the exit status reports it.
    for (arguments, status) in [("perf write bw -d no-such-device", 2), ("stat 1", 1), ("nonsense", 2)] {
        for stderr in [closed(), full()] {
            assert_eq!(run(arguments, Stdio::piped(), stderr).status.code(), Some(status), "{arguments}");
        }
    }
}

#[test]
fn json_is_alone_on_standard_output_or_in_its_file() {
    let _alone = alone();
    let shown = shown();
    let file = std::env::temp_dir().join(format!("ferroce-streams-{}.json", std::process::id()));
    let read = |text: &[u8], arguments: &str| {
        let values = serde_json::Deserializer::from_slice(text).into_iter::<Value>();
        let values: Vec<Value> =
            values.map(|value| value.unwrap_or_else(|e| panic!("{arguments}: {e}"))).collect();
        // One for each packet and the summary.
        assert!(
            if arguments.contains("dissect") { values.len() > 1 } else { values.len() == 1 },
            "{arguments}"
        );
    };
    for arguments in all_runs(&shown).iter().filter(|arguments| arguments.ends_with("--json")) {
        let alone = run(arguments, Stdio::piped(), Stdio::piped());
        read(&alone.stdout, arguments);
        read(&run(&format!("{arguments}=-"), Stdio::piped(), Stdio::piped()).stdout, arguments);
        let filed = run(&format!("{arguments}={}", file.display()), Stdio::piped(), Stdio::piped());
        assert_eq!((filed.status, filed.stdout.len()), (alone.status, 0), "{arguments}: {filed:?}");
        read(&fs::read(&file).unwrap(), arguments);
        fs::remove_file(&file).unwrap();
        let outcome = run(&format!("{arguments}=/dev/full"), Stdio::piped(), Stdio::piped());
        let said = String::from_utf8_lossy(&outcome.stderr);
        assert!(
            matches!(outcome.status.code(), Some(1 | 2)) && said.contains("'/dev/full': No space"),
            "{said}"
        );
        // Before the work, not after it.
        let outcome = run(&format!("{arguments}=/no/such/report.json"), Stdio::piped(), Stdio::piped());
        assert_eq!(outcome.status.code(), Some(2), "{arguments}: {outcome:?}");
        assert!(String::from_utf8_lossy(&outcome.stderr).contains("'/no/such'"), "{arguments}: {outcome:?}");
    }
}

#[test]
fn standard_error_is_plain_and_can_be_silenced() {
    let _alone = alone();
    let shown = shown();
    for arguments in all_runs(&shown) {
        let outcome = run(&arguments, Stdio::piped(), Stdio::piped());
        assert!(![outcome.stdout, outcome.stderr].concat().contains(&0x1b), "{arguments}");
        let quiet = run(&format!("{arguments} --quiet"), Stdio::piped(), Stdio::piped());
        assert_eq!(quiet.status, outcome.status, "{arguments}");
        let said = String::from_utf8_lossy(&quiet.stderr).into_owned();
        assert!(!said.contains("INFO") && !quiet.stdout.is_empty(), "{arguments}: {said}");
        assert!(said.lines().all(|line| line.contains("WARN")), "{arguments}: {said}");
    }
    let loud = run("pingpong -d loopback -n 10", Stdio::piped(), Stdio::piped());
    assert!(String::from_utf8_lossy(&loud.stderr).contains("INFO"), "{loud:?}");
}

#[test]
fn one_variable_says_what_is_logged() {
    let _alone = alone();
    let with = |filter: &str| command("pingpong -d loopback -n 10").env("RUST_LOG", filter).output().unwrap();
    let said = |outcome: &Output| String::from_utf8_lossy(&outcome.stderr).into_owned();
    for (filter, info) in [
        ("", true),
        ("warn", false),
        ("debug", true),
        ("off,ferroce_tools=info", true),
        ("ferroce_tools=off", false),
    ] {
        let outcome = with(filter);
        assert_eq!(outcome.status.code(), Some(0), "{filter}: {outcome:?}");
        let said = said(&outcome);
        assert_eq!(said.contains("INFO"), info, "{filter}: {said}");
    }
    // RUST_LOG may have been set for another program.
    let outcome = with("inof");
    assert_eq!(outcome.status.code(), Some(0), "{outcome:?}");
    assert!(said(&outcome).contains("RUST_LOG: 'inof' is neither a level"), "{outcome:?}");
    let outcome = with("ferroce=verbose");
    assert_eq!(outcome.status.code(), Some(2), "{outcome:?}");
    assert!(
        said(&outcome).contains("RUST_LOG: 'ferroce=verbose' must be a level (error, warn"),
        "{outcome:?}"
    );
}
