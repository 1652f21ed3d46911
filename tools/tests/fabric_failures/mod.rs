//! Runs with failures: cut off, interrupted, or with links and switches that are down.

use std::fs;

use serde_json::Value;

use super::ends::Ferroce;
use super::{Folder, fabric, number, runs};

/// The goodput of a run that is cut off counts all arrived bytes, not only complete messages; the report and its flows
/// agree.
#[test]
fn goodput_of_a_run_that_is_cut_off_counts_all_that_has_come() {
    let scenario = "incast --hosts 4 --bytes 10MB --count 1 --congestion off --limit 1ms";
    let text = fabric(&format!("{scenario} --json"));
    assert_eq!(text.code, Some(1), "{text:#?}");
    let report: Value = serde_json::from_str(&text.stdout).unwrap();
    let run = runs(&report)[0];
    let traffic = &run["traffic"]["incast"];
    let flows: Vec<f64> =
        run["flows"].as_array().unwrap().iter().map(|flow| number(&flow["goodput_gbps"])).collect();
    let sum: f64 = flows.iter().sum();
    assert_eq!(number(&traffic["completed"]), 0.0);
    assert!(sum > 90.0 && (number(&traffic["goodput_gbps"]) / sum - 1.0).abs() < 0.01, "{sum}: {traffic:#}");
    let least = flows.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(number(&traffic["goodput_least_gbps"]), least);
    assert!(least > 20.0 && number(&traffic["jain"]) > 0.99, "{traffic:#}");
    // For a run that completes, all agree as well, whatever the warm-up.
    let report = fabric("incast --hosts 4 --bytes 400KB --count 2 --warm-up 50us --json").json();
    let run = runs(&report)[0];
    let bytes: Vec<f64> =
        run["flows"].as_array().unwrap().iter().map(|flow| number(&flow["bytes"])).collect();
    assert_eq!(bytes, [800_000.0; 4]);
}

/// A permutation over two spines, one of which is down from 2 to 6 ms.
fn spine_away(options: &str) -> String {
    format!(
        r#"
[time]
limit = "12ms"

[topology.leaf-spine]
leaves = 4
hosts-per-leaf = 4
spines = 2

[switches]
{options}

[[traffic]]
pattern = "permutation"
endless = true

[[failure]]
at = "2ms"
until = "6ms"
switch = "switch4"
"#
    )
}

/// Switches or senders that recover too slowly are noted: the numbers alone look healthy.
#[test]
fn a_failure_without_recovery_in_the_run_is_noted() {
    let folder = Folder::new("still");
    let file = folder.file("still.toml");
    let svg = folder.file("still.svg");
    fs::write(&file, spine_away("")).unwrap();
    let outcome = fabric(&format!("{file} --svg {svg}"));
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    for words in [
        "note      no switch uses another path while switch4 is down: it is up again at 6ms, after 4ms, and \
         convergence takes 50ms",
        "the ACK timeout is 16777us, and the run ends at 12ms",
        "of 16 flows are stalled at the end, host",
        "  no path to their host",
        "a flow stood still at most, us",
        "  median of the flows, us",
    ] {
        assert!(outcome.stdout.contains(words), "no '{words}' in {outcome:#?}");
    }
    assert!(fs::read_to_string(&svg).unwrap().contains("failure"));
    let report = fabric(&format!("{file} --json")).json();
    let run = runs(&report)[0];
    let at_end = run["flows"].as_array().unwrap().iter().map(|flow| number(&flow["still_at_end_us"]));
    let still = at_end.filter(|micros| *micros > 1200.0).count();
    let said = report["notes"]
        .as_array()
        .unwrap()
        .iter()
        .any(|note| note.as_str().unwrap().contains(&format!("{still} of 16 flows")));
    assert!(still > 0 && said, "{still}: {report:#}");
    let measures = &run["measures"];
    let causes = ["buffer", "link", "no_way", "watchdog", "host"];
    let causes: f64 = causes.iter().map(|cause| number(&measures[format!("drops_{cause}")])).sum();
    assert_eq!(causes, number(&measures["drops"]));
    // With switches and senders that are fast enough there is no note, and the time is short.
    fs::write(&file, spine_away("convergence = \"300us\"\n[control]\nack-timeout = 7")).unwrap();
    let outcome = fabric(&file);
    assert!(!outcome.stdout.contains("note "), "{outcome:#?}");
    let report = fabric(&format!("{file} --json")).json();
    let most = number(&runs(&report)[0]["traffic"]["permutation"]["still_max_us"]);
    assert!((300.0..6000.0).contains(&most), "{most}");
}

#[test]
fn a_host_that_stays_away_is_noted() {
    let folder = Folder::new("away");
    let file = folder.file("away.toml");
    let text = fabric("incast --hosts 2 --bytes 100KB --describe").stdout;
    let failure = "\n[[failure]]\nat = \"10us\"\nlink = [\"host1\", \"switch0\"]\n";
    fs::write(&file, text.clone() + failure).unwrap();
    let outcome = fabric(&format!("{file} --ack-timeout 4"));
    let words = "note      host1 has no other link: it receives and sends nothing after 10us";
    assert!(outcome.stdout.contains(words), "{outcome:#?}");
    // If an option makes a value of the file invalid, the error names its place: there is no option for it.
    let failure = failure.replace("10us", "2ms");
    fs::write(&file, text.clone() + &failure).unwrap();
    let outcome = fabric(&format!("{file} --limit 1ms"));
    assert!(outcome.stderr.contains("failure.0.at = 2ms: must be before the limit, 1ms"), "{outcome:#?}");
    // A link that is down can't go down.
    let again = failure.replace("2ms", "3ms");
    fs::write(&file, text + &failure + &again).unwrap();
    let outcome = fabric(&file);
    assert_eq!(outcome.code, Some(2), "{outcome:#?}");
    let words = "failure.1.at = 3ms: must be at a time at which host1 to switch0 is not down by another [[failure]], as from 2ms to the end";
    assert!(outcome.stderr.contains(words), "{outcome:#?}");
}

fn interrupted(arguments: &str) -> super::Outcome {
    let process = Ferroce::start(None, arguments);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    process.interrupt();
    let outcome = process.end();
    assert_eq!(outcome.code, Some(130), "{outcome:#?}");
    assert!(outcome.stderr.contains("interrupted"), "{outcome:#?}");
    outcome
}

/// The report itself says that it is incomplete.
#[test]
fn an_interrupted_run_prints_its_results() {
    let outcome = interrupted("fabric fairness --hosts 16 --limit 100s --sample 1ms");
    assert!(outcome.stdout.contains("goodput, Gb/s"), "{outcome:#?}");
    assert_eq!(outcome.stdout.matches("interrupted at ").count(), 2, "{outcome:#?}");
    assert!(outcome.stdout.contains(" of 100s: the report covers a part of the run"), "{outcome:#?}");
}

/// An incomplete run is no sample: only completed ones count, and columns without one are listed.
#[test]
fn interrupted_comparisons_count_whole_runs() {
    let quick = "fabric incast --hosts 2 --bytes 64KB --count 1 --jobs 1 --compare pmax=0.1,0.2 --compare";
    let outcome = interrupted(&format!("{quick} limit=1ms,limit=2ms --seeds 10000"));
    for words in [
        "note      interrupted: only the ",
        " of 40000 runs that were complete are reported; ",
        " of 10000 seeds; without a run, and left out: ",
        "'pmax=0.2 limit=2ms'",
    ] {
        assert!(outcome.stdout.contains(words), "no '{words}' in {outcome:#?}");
    }
    let outcome =
        interrupted("fabric fairness --hosts 16 --limit 100s --sample 1ms --compare dcqcn,off --json");
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(report["interrupted"], true);
    assert_eq!(report["cases"].as_array().unwrap().len(), 0);
    assert!(
        report["left_out"].as_str().unwrap().contains("only the 0 of 2 runs that were complete are reported"),
        "{report:#}"
    );
}

/// A run keeps only the data that the report shows.
#[test]
fn many_seeds_take_little_memory() {
    let memory = |seeds: u64| {
        let outcome = fabric(&format!("incast --hosts 16 --bytes 200KB --count 4 --jobs 1 --seeds {seeds}"));
        assert_eq!(outcome.stdout.matches(" MB of memory in all").count(), 1, "{outcome:#?}");
        let (before, _) = outcome.stdout.split_once(" MB of memory in all").unwrap();
        before.rsplit('\n').next().unwrap().parse::<f64>().unwrap()
    };
    let (few, many) = (memory(2), memory(60));
    assert!(many < 2.0 * few, "{few} and {many} MB");
}
