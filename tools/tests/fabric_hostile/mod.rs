//! Hostile input: misleading files, outputs and numbers.

use std::fs;

use serde_json::Value;

use super::ends::{Ferroce, refused};
use super::{Folder, fabric, number, runs};

/// The only sample is after 100 s; the interruption comes earlier.
#[test]
fn a_run_is_interrupted_between_samples() {
    let process = Ferroce::start(None, "fabric fairness --hosts 16 --limit 100s --warm-up 0ns --sample 100s");
    std::thread::sleep(std::time::Duration::from_millis(500));
    process.interrupt();
    let outcome = process.end();
    assert_eq!(outcome.code, Some(130), "{outcome:#?}");
    assert!(outcome.stdout.contains("goodput, Gb/s"), "{outcome:#?}");
}

/// Settings or seeds without any message have the same rows as the others, and a picture.
#[test]
fn few_messages_leave_no_gap_in_the_table() {
    let folder = Folder::new("gap");
    let svg = folder.file("gap.svg");
    let command = "websearch --hosts 4 --load 0.01 --compare rate=100G,1G";
    let outcome = fabric(&format!("{command} --svg {svg}"));
    assert!(fs::read_to_string(&svg).unwrap().contains("</svg>"), "{outcome:#?}");
    let report: Value = serde_json::from_str(&fabric(&format!("{command} --json")).stdout).unwrap();
    let keys = |run: &Value| -> Vec<String> {
        let all = run["measures"].as_object().unwrap().keys();
        let traffic = run["traffic"]["websearch"].as_object().unwrap().keys();
        all.chain(traffic).cloned().collect()
    };
    let runs = runs(&report);
    let none = runs.iter().filter(|run| run["messages"].as_array().unwrap().is_empty()).count();
    assert_eq!((runs.len(), none), (2, 1), "one of them without messages");
    assert_eq!(keys(runs[0]), keys(runs[1]));
    // Settings without messages have delivered nothing, which is reported.
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stderr.contains("nothing was delivered"), "{outcome:#?}");
    let lines = outcome.stdout.lines();
    let row = lines.clone().find(|line| line.starts_with("messages completed")).unwrap();
    assert!(row.split_whitespace().last() == Some("0"), "{row}");
}

/// The measurement begins at the end of the warm-up, whatever the sampling interval.
#[test]
fn samples_far_apart_measure_the_same() {
    let goodput = |sample: &str| {
        let report = fabric(&format!("fairness --sample {sample} --json")).json();
        number(&runs(&report)[0]["traffic"]["fairness"]["goodput_gbps"])
    };
    let often = goodput("10us");
    for sample in ["15ms", "36ms"] {
        let seldom = goodput(sample);
        assert!((seldom / often - 1.0).abs() < 0.001, "{sample}: {seldom}, not {often}");
    }
    let outcome = fabric("incast --hosts 1 --count 1 --bytes 1KB --warm-up 1ms");
    assert!(!outcome.stdout.contains("NaN") && outcome.stdout.contains(": mean - KB"), "{outcome:#?}");
}

const TWO_ISLANDS: &str = r#"
[time]
limit = "1ms"

[topology.custom]
hosts = 2
switches = 2
links = [{ ends = ["host0", "switch0"] }, { ends = ["host1", "switch1"] }]

[[traffic]]
pattern = "pairs"
pairs = [[0, 1]]
endless = true
"#;

#[test]
fn a_file_is_taken_at_its_word() {
    let folder = Folder::new("word");
    let run = |name: &str, text: &str, options: &str| {
        let file = folder.file(name);
        fs::write(&file, text).unwrap();
        fabric(&format!("{file} {options}"))
    };
    let apart = run("apart.toml", TWO_ISLANDS, "");
    assert_eq!(apart.code, Some(2), "{apart:#?}");
    assert!(
        apart.stderr.contains("topology.custom.links = no path from host0 to host1: must be such"),
        "{apart:#?}"
    );
    // Two entries of the same name remain separate.
    let one = TWO_ISLANDS.replace("\"switch1\"] }", "\"switch0\"] }");
    let entry = &one[one.find("[[traffic]]").unwrap()..];
    let report = run("twice.toml", &format!("{one}{entry}"), "--json").json();
    let names: Vec<_> = runs(&report)[0]["traffic"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(names, ["pairs", "pairs (2)"]);
    // Control characters do not reach the terminal, and no row can be forged.
    let forged = run("forged.toml", &format!("{one}name = \"\\u001b[31mRED\\nfake row 999\"\n"), "");
    assert_eq!(forged.code, Some(2), "{forged:#?}");
    assert!(!forged.stderr.contains('\u{1b}') && !forged.stderr.contains("\nfake"), "{forged:#?}");
    // Parallel links: no message is faster than possible.
    let side_by_side = one
        .replace("links = [", "links = [{ ends = [\"switch0\", \"switch1\"], rate = \"1G\" }, { ends = [\"switch0\", \"switch1\"] }, ")
        .replace("[\"host1\", \"switch0\"]", "[\"host1\", \"switch1\"]")
        .replace("endless = true", "bytes = \"1MB\"\ncount = 8\n")
        .replace("1ms", "100ms");
    let report = run("side.toml", &side_by_side, "--json").json();
    let slowdown = number(&runs(&report)[0]["traffic"]["pairs"]["slowdown_mean"]);
    assert!(slowdown > 0.99, "{slowdown}");
    let spaced = run("a b;x.toml", &one, "");
    assert_eq!(spaced.code, Some(2), "two words");
}

/// A leaf has two uplinks. With one down, the flows share the other; the frames in flight are retransmitted.
#[test]
fn a_link_goes_down_and_comes_up_again() {
    let text = r#"
[time]
limit = "60ms"

[topology.leaf-spine]
leaves = 2
hosts-per-leaf = 4
spines = 2

[[traffic]]
pattern = "pairs"
pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
bytes = "1MB"
count = 20
"#;
    let folder = Folder::new("outage");
    let run = |outage: &str| -> Value {
        let file = folder.file("outage.toml");
        fs::write(&file, format!("{text}{outage}")).unwrap();
        let report = fabric(&format!("{file} --json")).json();
        runs(&report)[0].clone()
    };
    let measure = |run: &Value, key: &str| number(&run["measures"][key]);
    let [whole, link, switch] = [
        "",
        "[[failure]]\nlink = [\"switch2\", \"switch0\"]\nat = \"1ms\"\nuntil = \"2ms\"\n",
        "[[failure]]\nswitch = \"switch2\"\nat = \"1ms\"\n",
    ]
    .map(run);
    assert_eq!(measure(&whole, "drops"), 0.0);
    for outage in [&link, &switch] {
        assert!(measure(outage, "drops") > 0.0 && measure(outage, "retransmitted") > 0.0);
        assert!(measure(outage, "time_ms") > measure(&whole, "time_ms"));
    }
    for (outage, words) in [
        ("at = \"1ms\"\n", "failure.0.at = 1ms: must be with one of link"),
        (
            "switch = \"switch9\"\nat = \"1ms\"\n",
            "failure.0.switch = switch9: must be host0 to host7, or switch0 to switch3",
        ),
        ("link = [\"host0\", \"host1\"]\nat = \"1ms\"\n", "host0 and host1: must be two that are linked"),
        ("switch = \"switch2\"\nat = \"1s\"\n", "failure.0.at = 1s: must be before the limit, 60ms"),
        (
            "switch = \"switch2\"\nat = \"1ms\"\nuntil = \"1ms\"\n",
            "failure.0.until = 1ms: must be after it begins, 1ms",
        ),
    ] {
        let file = folder.file("wrong.toml");
        fs::write(&file, format!("{text}[[failure]]\n{outage}")).unwrap();
        refused(&[(&format!("fabric {file}"), &[words])]);
    }
}

/// Links between switches also have the uplink rate in a file that lists links.
#[test]
fn uplinks_of_a_file_have_their_rate() {
    let folder = Folder::new("uplink");
    let file = folder.file("uplink.toml");
    let text = TWO_ISLANDS
        .replace("links = [", "links = [{ ends = [\"switch0\", \"switch1\"] }, ")
        .replace("endless = true", "bytes = \"1MB\"");
    fs::write(&file, text).unwrap();
    let goodput = |options: &str| {
        let report = fabric(&format!("{file} {options} --json")).json();
        number(&runs(&report)[0]["traffic"]["pairs"]["goodput_gbps"])
    };
    assert!(goodput("") > 80.0 && goodput("--uplink-rate 10G") < 10.0);
}

/// With a full disk a picture or a message is lost, but not the report.
#[test]
fn a_failed_write_loses_nothing_else() {
    let outcome = fabric("incast --hosts 2 --count 1 --svg /dev/full");
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stdout.contains("goodput, Gb/s") && outcome.stderr.contains("/dev/full"), "{outcome:#?}");
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferroce"));
    let arguments = ["fabric", "incast", "--hosts", "3", "--limit", "50us"];
    let output = command.args(arguments).stderr(full()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("messages unfinished"));
}

/// File names with spaces remain one word in the command that repeats a run.
#[test]
fn the_command_that_repeats_a_run_is_for_a_shell() {
    let folder = Folder::new("a b;x");
    let file = folder.file("it's.toml");
    fs::write(&file, fabric("incast --hosts 2 --count 1 --describe").stdout).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferroce"));
    let output = command.args(["fabric", &file]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, repeats) = text.split_once("repeat it by: ferroce ").unwrap();
    let line = format!("{} {}", env!("CARGO_BIN_EXE_ferroce"), repeats.trim());
    let again = std::process::Command::new("sh").args(["-c", &line]).output().unwrap();
    let hash =
        |text: &str| text.lines().find_map(|line| Some(line.split_once("trace hash ")?.1[..16].to_owned()));
    assert_eq!(hash(&text), hash(&String::from_utf8(again.stdout).unwrap()));
    assert!(hash(&text).is_some());
}

/// Large fabrics run with huge pages, which changes only the run time.
#[test]
fn the_pages_of_the_heap_change_nothing() {
    let arguments = "fabric permutation --topology fat-tree --hosts 256 --count 1 --bytes 64KB --json";
    let run = |tunables: Option<&str>| -> Value {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferroce"));
        command.args(arguments.split(' '));
        if let Some(tunables) = tunables {
            command.env("GLIBC_TUNABLES", tunables);
        }
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let [huge, small] = [run(None), run(Some("glibc.malloc.top_pad=4096"))];
    assert_eq!(runs(&huge)[0]["trace_hash"], runs(&small)[0]["trace_hash"]);
}
