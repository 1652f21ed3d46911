//! `ferroce fabric`, as a user runs it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;
mod fabric_allreduce;
mod fabric_failures;
mod fabric_hostile;
mod fabric_settings;

use std::fs;
use std::path::{Path, PathBuf};

use ends::{Ferroce, Outcome, refused};
use ferroce_driver::pcap::Reader;
use serde_json::Value;

fn fabric(arguments: &str) -> Outcome {
    Ferroce::start(None, &format!("fabric {arguments}")).end()
}

/// The runs of all settings, in order.
fn runs(report: &Value) -> Vec<&Value> {
    report["cases"].as_array().unwrap().iter().flat_map(|case| case["runs"].as_array().unwrap()).collect()
}

fn hashes(arguments: &str) -> Vec<String> {
    let report = fabric(&format!("{arguments} --json")).json();
    runs(&report).into_iter().map(|run| run["trace_hash"].as_str().unwrap().to_owned()).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// A folder that is removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ferroce-fabric-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Each scenario, at a small size.
const SMALL: [&str; 7] = [
    "incast --hosts 4 --bytes 100KB --count 2",
    "fairness --hosts 2 --limit 3ms --warm-up 2500us",
    "burst --hosts 3 --count 1 --limit 6ms",
    "victim --hosts 3 --limit 1ms --warm-up 100us",
    "permutation --hosts 8 --hosts-per-leaf 4 --bytes 100KB --count 2",
    "alltoall --hosts 4 --bytes 50KB",
    "websearch --hosts 4 --load 0.1 --post-for 5ms",
];

#[test]
fn each_scenario_does_its_work() {
    for scenario in SMALL {
        let report = fabric(&format!("{scenario} --json")).json();
        let run = runs(&report)[0];
        let traffic = run["traffic"].as_object().unwrap();
        for (name, measures) in traffic {
            assert!(number(&measures["goodput_gbps"]) > 0.0, "{scenario} {name}: {measures:#}");
            if let Some(unfinished) = measures.get("unfinished") {
                assert_eq!(unfinished, 0.0, "{scenario} {name}");
                assert!(number(&measures["slowdown_p50"]) >= 1.0, "{scenario} {name}: {measures:#}");
                let [p50, p99, max] =
                    ["fct_p50_us", "fct_p99_us", "fct_max_us"].map(|key| number(&measures[key]));
                assert!(p50 <= p99 && p99 <= max, "{scenario} {name}: {measures:#}");
            }
        }
        assert_eq!(run["measures"]["drops"], 0.0, "{scenario}: PFC is on");
    }
}

#[test]
fn a_table_names_what_was_measured_and_the_command_that_repeats_it() {
    let outcome = fabric("incast --hosts 4 --bytes 100KB --count 1 --rate 25G --pmax 0.5");
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    for words in [
        "5 hosts around one switch; links 25G, 1us",
        "Kmin 100KB, Kmax 400KB, Pmax 0.5",
        "window 512 packets",
        "ACK timeout 67109us",
        "goodput, Gb/s",
        "Jain's index",
        "FCT mean, us",
        "p99, us",
        "slowdown mean",
        "busiest switch port",
        "  used, %",
        "longest queue",
        "  mean, KB",
        "frames marked",
        "CNPs",
        "pauses, whole run",
        "  sum of all links, us",
        "frames dropped",
        "packets retransmitted",
        "queue switch0:0 to host0: mean",
        "trace hash ",
        "repeat it by: ferroce fabric incast",
    ] {
        assert!(outcome.stdout.contains(words), "no '{words}' in {outcome:#?}");
    }
    let (_, command) = outcome.stdout.split_once("repeat it by: ferroce ").unwrap();
    let again = Ferroce::start(None, command).end();
    let hash = |outcome: &Outcome| outcome.stdout.split_once("trace hash ").unwrap().1[..16].to_owned();
    assert_eq!(hash(&again), hash(&outcome));
}

#[test]
fn the_same_seed_is_the_same_run_and_another_one_is_not() {
    let scenario = "permutation --hosts 8 --hosts-per-leaf 4 --bytes 200KB --count 2";
    let three = hashes(&format!("{scenario} --seed 5 --seeds 3"));
    assert_eq!(three, hashes(&format!("{scenario} --seed 5 --seeds 3 --jobs 1")));
    let each: Vec<String> = (5..8).flat_map(|seed| hashes(&format!("{scenario} --seed {seed}"))).collect();
    assert_eq!(three, each);
    assert!(three[0] != three[1] && three[1] != three[2]);
}

#[test]
fn settings_are_compared() {
    let report = fabric(
        "victim --hosts 6 --buffer 8MB --limit 4ms --warm-up 1ms --compare off,dcqcn --compare pfc=on,off --json",
    );
    let report = report.json();
    let cases = report["cases"].as_array().unwrap();
    let labels: Vec<&str> = cases.iter().map(|case| case["label"].as_str().unwrap()).collect();
    assert_eq!(labels, ["off pfc=on", "off pfc=off", "dcqcn pfc=on", "dcqcn pfc=off"]);
    let of = |case: usize, key: &str| number(&cases[case]["runs"][0]["measures"][key]);
    let victim = |case: usize| number(&cases[case]["runs"][0]["traffic"]["victim"]["goodput_gbps"]);
    // There are pauses instead of drops, and a flow that suffers from them, unless the senders slow down.
    assert!(of(0, "pauses") > 0.0 && of(0, "drops") == 0.0 && of(0, "marked") == 0.0);
    assert!(of(1, "pauses") == 0.0 && of(1, "drops") > 0.0 && of(1, "retransmitted") > 0.0);
    assert!(of(2, "cnps") > 0.0 && of(2, "drops") == 0.0);
    assert!(victim(0) < 60.0 && victim(1) > 95.0 && victim(2) > victim(0) && victim(3) > 95.0, "{report:#}");
    let links = cases[0]["runs"][0]["pauses"].as_array().unwrap();
    assert!(links.iter().any(|link| link["link"] == "switch0:2 to switch1:7"), "{links:#?}");
    // Each run is the same when repeated alone.
    for case in cases {
        let command = case["runs"][0]["command"].as_str().unwrap().strip_prefix("ferroce fabric ").unwrap();
        assert_eq!(hashes(command), [case["runs"][0]["trace_hash"].as_str().unwrap()]);
    }
}

#[test]
fn more_seeds_give_a_deviation() {
    let outcome = fabric("incast --hosts 4 --bytes 400KB --count 2 --seeds 3 --compare kmin=20KB,400KB");
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    let row = |label: &str| outcome.stdout.lines().find(|line| line.starts_with(label)).unwrap();
    assert!(row("mean ± standard deviation of 3 seeds").len() > 1);
    let values: Vec<&str> = row("FCT mean, us").split_whitespace().skip(3).collect();
    assert_eq!(values.len(), 4, "{values:?}");
    assert!(values[1].starts_with('±') && values[1] != "±0", "{values:?}");
}

#[test]
fn a_file_that_describes_a_scenario_is_the_same_run() {
    let folder = Folder::new("describe");
    for (at, scenario) in SMALL.iter().enumerate() {
        let described = fabric(&format!("{scenario} --describe"));
        assert_eq!(described.code, Some(0), "{described:#?}");
        let file = folder.file(&format!("{at}.toml"));
        fs::write(&file, &described.stdout).unwrap();
        assert_eq!(hashes(&file), hashes(scenario), "{}", described.stdout);
        assert_eq!(fabric(&format!("{file} --describe")).stdout, described.stdout);
    }
    // Options change a file as they change a scenario.
    let file = folder.file("0.toml");
    assert_eq!(
        hashes(&format!("{file} --pfc off --delay 2us --compare off,mlx5")),
        hashes(&format!("{} --pfc off --delay 2us --compare off,mlx5", SMALL[0]))
    );
}

/// The TOML files of the manual.
#[test]
fn the_files_of_the_manual_run() {
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/fabric.md");
    let manual = fs::read_to_string(manual).unwrap();
    let folder = Folder::new("manual");
    let files: Vec<&str> =
        manual.split("```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(files.len() >= 2, "the manual has its files");
    for (at, text) in files.iter().enumerate() {
        let file = folder.file(&format!("{at}.toml"));
        fs::write(&file, text).unwrap();
        let outcome = fabric(&file);
        assert_eq!(outcome.code, Some(0), "{text}\n{outcome:#?}");
    }
}

#[test]
fn a_port_is_recorded() {
    let folder = Folder::new("pcap");
    let (receiver, switch) = (folder.file("host.pcapng"), folder.file("switch.pcapng"));
    let scenario = "incast --hosts 3 --bytes 50KB --count 1 --compare off";
    let outcome = fabric(&format!("{scenario} --pcap host0={receiver} --pcap switch0:1={switch} --json"));
    let report = outcome.json();
    let mut times = Vec::new();
    let mut payloads = 0;
    let mut reader = Reader::open(&receiver).unwrap();
    while let Some(record) = reader.next_record().unwrap() {
        times.push(record.timestamp);
        payloads += usize::from(record.captured.len() > 1000);
    }
    // 3 messages of 13 packets, and the acknowledgements.
    assert!(payloads >= 36 && times.len() > payloads, "{payloads} of {}", times.len());
    assert!(times.is_sorted());
    let last = number(&runs(&report)[0]["measures"]["time_ms"]) * 1e6;
    // The times are those of the report: traffic begins at 0.
    assert!(times[0] < 5_000 && *times.last().unwrap() as f64 <= last, "virtual time: {times:?}, {last}");
    let dissected = Ferroce::start(None, &format!("dissect {switch}")).end();
    assert_eq!(dissected.code, Some(0), "{dissected:#?}");
    assert!(dissected.stdout.contains("RC_RDMA_WRITE_FIRST") && dissected.stdout.contains("ICRC ok"));
    // Recording changes nothing.
    assert_eq!(hashes(scenario)[0], runs(&report)[0]["trace_hash"].as_str().unwrap());
}

/// Failed queue pairs end a run: the results do not depend on the limit.
#[test]
fn a_limit_that_is_not_reached_changes_nothing() {
    let scenario =
        "incast --hosts 32 --bytes 400KB --count 4 --buffer 2MB --pfc off --congestion off --ack-timeout 6";
    let measures = |limit: &str| {
        let outcome = fabric(&format!("{scenario} --limit {limit} --json"));
        assert_eq!(outcome.code, Some(1), "{outcome:#?}");
        let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let run = runs(&report)[0].clone();
        (run["measures"].clone(), run["traffic"].clone())
    };
    let (short, long) = (measures("100ms"), measures("400ms"));
    assert!(number(&short.1["incast"]["unfinished"]) > 0.0 && number(&short.0["failed_queue_pairs"]) > 0.0);
    assert_eq!(short, long);
}

/// No message is faster than alone, whatever the rates on the path; uplinks matter in an oversubscribed fabric.
#[test]
fn faster_uplinks_count() {
    let report =
        fabric("permutation --hosts 4 --hosts-per-leaf 2 --rate 25G --uplink-rate 400G --bytes 4KB --json")
            .json();
    let run = runs(&report)[0];
    for message in run["messages"].as_array().unwrap() {
        assert!(number(&message["fct_us"]) >= number(&message["alone_us"]), "{message}");
    }
    let leaves =
        "websearch --topology leaf-spine --hosts 64 --hosts-per-leaf 16 --rate 25G --uplink-rate 100G";
    let described = fabric(&format!("{leaves} --oversubscription 2 --describe")).stdout;
    assert!(described.contains("spines = 2\n"), "{described}");
}

#[test]
fn plots_are_written() {
    let folder = Folder::new("svg");
    let file = folder.file("plot.svg");
    let outcome = fabric(&format!("incast --hosts 4 --bytes 400KB --compare off,dcqcn --svg {file}"));
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
    for words in [
        "goodput of incast",
        "rate allowed to a flow, 4 of 4 flows",
        "switch0:0 to host0",
        "dcqcn Gb/s (seed 1)",
        "off queue, KB (seed 1)",
    ] {
        assert!(text.contains(words), "no '{words}'");
    }
    assert!(text.matches("<polyline").count() >= 4 && text.len() < 200_000, "{} bytes", text.len());
}

#[test]
fn series_are_in_the_json_if_they_are_asked_for() {
    let scenario = "incast --hosts 2 --bytes 200KB --count 2 --json";
    let report = fabric(scenario).json();
    assert!(runs(&report)[0].get("series").is_none());
    let report = fabric(&format!("{scenario} --series")).json();
    let series = &runs(&report)[0]["series"];
    let samples = series["time_us"].as_array().unwrap().len();
    assert!(samples > 3);
    for of in [&series["goodput"][0], &series["rate"][1], &series["queue"]["switch0:0 to host0"]] {
        assert_eq!(of.as_array().unwrap().len(), samples, "{of}");
    }
}

#[test]
fn what_was_not_done_is_told() {
    let outcome = fabric("incast --hosts 3 --limit 50us");
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stdout.contains("messages unfinished"), "{outcome:#?}");
    assert!(outcome.stderr.contains("30 of 30 messages were not completed by 50us"), "{outcome:#?}");
    // All packets are lost: the queue pairs fail.
    let outcome = fabric("incast --hosts 2 --bytes 4096 --count 1 --loss 1 --ack-timeout 1 --limit 100ms");
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stderr.contains("2 queue pairs failed, the first from host1 to host0: "), "{outcome:#?}");
}

#[test]
fn values_that_make_no_sense_are_refused() {
    let folder = Folder::new("refused");
    let file = folder.file("wrong.toml");
    let text = fabric("incast --describe").stdout;
    fs::write(&file, text.replace("kmin = \"400KB\"", "kmin = \"4000KB\"")).unwrap();
    let unknown = folder.file("unknown.toml");
    fs::write(&unknown, text.replace("kmin =", "Kmin =")).unwrap();
    refused(&[
        (
            &format!("fabric {file}"),
            &["wrong.toml, line 20: switches.kmin = 4MB: must be less than Kmax, 1600KB"],
        ),
        (&format!("fabric {unknown}"), &["unknown.toml, line 20: ", "unknown field `Kmin`", "`kmin`"]),
        (&format!("fabric {unknown}x"), &["neither a scenario nor a file", "incast"]),
        (&format!("fabric {file} --hosts 3"), &["--hosts is for the scenarios"]),
        (
            "fabric incast --kmin 2MB",
            &["--kmin 2MB: must be less than Kmax, 1600KB by default at 100G; or give a higher kmax too"],
        ),
        ("fabric incast --kmin many", &["'many': must be bytes, as 4096, 64K"]),
        ("fabric incast --rate 100", &["'100': must be a rate with its unit, as 100G"]),
        ("fabric incast --delay 1", &["'1': must be a time with its unit"]),
        ("fabric incast --delay 2s", &["--delay 2s: must be 0ns to 1s"]),
        ("fabric incast --pmax 1.5", &["--pmax 1.5: must be 0 to 1"]),
        ("fabric incast --pfc maybe", &["must be on or off"]),
        ("fabric incast --hosts 0", &["--hosts 0: must be 1 to 2048"]),
        ("fabric incast --window 0", &["--window 0: must be 1 to 8388607"]),
        ("fabric incast --path-mtu 1500", &["1500"]),
        ("fabric incast --dscp 48", &["--dscp 48: must be below 48 or above 55"]),
        ("fabric incast --congestion cubic", &["cubic", "off"]),
        ("fabric incast --sample 1ns", &["--sample 1ns: must be 100ns to"]),
        ("fabric fairness --limit 10ms", &["--warm-up 16ms: must be less than the limit, 10ms"]),
        ("fabric incast --seeds 0", &["'0'", "--seeds", "must be 1 to 10000"]),
        ("fabric incast --compare colour=red", &["no option 'colour' to compare", "kmin"]),
        ("fabric incast --pcap host99=x.pcapng", &["no port 'host99'", "host0 to host16"]),
        ("fabric incast --pcap host0", &["switch0:3=port.pcapng"]),
        ("fabric incast --pcap host0=x.pcapng --seeds 2", &["there are 2 runs; must be a single one"]),
        // Options without effect are rejected.
        (
            "fabric incast --load 0.5",
            &["--load 0.5: must be left out: only websearch has messages by chance"],
        ),
        (
            "fabric fairness --bytes 1MB",
            &["--bytes 1MB: must be left out: the flows of this scenario have no end"],
        ),
        ("fabric websearch --count 3", &["--count 3: must be left out", "--post-for"]),
        ("fabric incast --oversubscription 4", &["must be left out: only --topology leaf-spine has leaves"]),
        ("fabric incast --kmin 80MB --kmax 90MB", &["--kmin 80MB: must be"]),
        ("fabric incast --xoff 10KB", &["--xoff 10KB: must be more than xon-offset, 18KiB"]),
        ("fabric incast --buffer -16MB", &["'-16MB'", "bytes, as 4096"]),
        ("fabric websearch --load 1e-300", &["--load", "must be a part of the line rate, 0.000001 to 10"]),
        (
            "fabric fairness --warm-up 0ns --limit 3ms",
            &["--limit 3ms: must be after all flows have begun, the last at 6ms"],
        ),
        // A run that exceeds the machine's memory is rejected before it starts.
        ("fabric incast --hosts 2048 --count 4000000", &["--count about 8192000000 messages", "4000000"]),
        ("fabric alltoall --hosts 2048", &["--count about 4192256 messages"]),
        (
            "fabric incast --compare kmin=1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33 --compare pmax=0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1,0,1",
            &["at most 1024 settings; these are 1056"],
        ),
        ("fabric /dev/zero", &["must be a regular file of at most"]),
        (
            "fabric incast --svg /nonexistent/x.svg",
            &["--svg /nonexistent/x.svg: there is no directory '/nonexistent'"],
        ),
        ("fabric incast --pcap host0=x.pcapng --pcap host1=x.pcapng", &["x.pcapng: must be another file"]),
        (&format!("fabric {file} --svg {file}"), &["wrong.toml, line 20"]),
        ("fabric permutation --oversubscription 100", &["--oversubscription 100: must be 1/64 to 8"]),
    ]);
}

/// PFC applies to the class of the data, whatever its DSCP.
#[test]
fn data_of_any_class_is_paused() {
    let report = fabric("incast --hosts 8 --buffer 2MB --congestion off --dscp 10 --json").json();
    let measures = &runs(&report)[0]["measures"];
    assert!(number(&measures["pauses"]) > 0.0 && measures["drops"] == 0.0, "{measures:#}");
}

/// The offered rate is reported, and goodput is that of the same time.
#[test]
fn random_messages_are_reported_by_load_and_size() {
    let scenario = "websearch --hosts 8 --load 0.4";
    let outcome = fabric(scenario);
    for words in
        ["offered, Gb/s", "of the senders' links, %", "goodput while offered, Gb/s", "messages up to 10 KB"]
    {
        assert!(outcome.stdout.contains(words), "no '{words}' in {outcome:#?}");
    }
    let measures = |options: &str| {
        let report = fabric(&format!("{scenario} {options} --json")).json();
        runs(&report)[0]["traffic"]["websearch"].clone()
    };
    let (short, long) = (measures(""), measures("--post-for 80ms"));
    for measures in [&short, &long] {
        let of = |key: &str| number(&measures[key]);
        assert!((of("offered_percent") - of("offered_gbps") / 8.0).abs() < 1e-6);
        // Most of the offered messages arrive while others are posted, and no more than that.
        assert!(of("goodput_gbps") <= of("offered_gbps") && of("goodput_gbps") > 0.5 * of("offered_gbps"));
        let sizes = ["to_10kb", "to_100kb", "to_1mb", "above_1mb"];
        let count: f64 = sizes.iter().map(|size| of(&format!("{size}_messages"))).sum();
        assert_eq!(count, of("completed"));
        for size in sizes {
            let [p50, p99] = ["p50", "p99"].map(|key| of(&format!("{size}_slowdown_{key}")));
            assert!(1.0 <= p50 && p50 <= p99, "{measures:#}");
        }
    }
    assert!(number(&long["completed"]) > 3.0 * number(&short["completed"]));
    assert!((number(&long["offered_percent"]) - 40.0).abs() < 10.0, "{long:#}");
    assert!(number(&long["goodput_gbps"]) > 0.85 * number(&long["offered_gbps"]), "{long:#}");
}

/// A pause of a link between switches affects other flows: it is listed before those of hosts, however short it was.
#[test]
fn pauses_between_switches_come_first() {
    let outcome = fabric("victim --hosts 12 --buffer 8MB --congestion off --limit 3ms --warm-up 1ms");
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    let paused: Vec<&str> = outcome.stdout.lines().filter(|line| line.starts_with("  paused ")).collect();
    assert!(paused[0].starts_with("  paused between switches: switch0:2 to switch1:13: "), "{paused:#?}");
    assert!(paused[0].ends_with(" us in the whole run"), "{paused:#?}");
    assert!(paused[1..].iter().all(|line| line.starts_with("  paused host")), "{paused:#?}");
    assert!(outcome.stdout.contains("of those between switches, us"));
}

/// The bottleneck port is reported with its name and utilization, in comparisons too.
#[test]
fn the_bottleneck_is_named() {
    let scenario = "incast --hosts 8 --bytes 1MB --count 2";
    let outcome = fabric(&format!("{scenario} --compare dcqcn,off"));
    let row = |label: &str| {
        let line = outcome.stdout.lines().find(|line| line.starts_with(label));
        let cells = line.unwrap()[label.len()..].split("  ").map(str::trim).filter(|cell| !cell.is_empty());
        cells.map(str::to_owned).collect::<Vec<String>>()
    };
    assert_eq!(row("busiest switch port"), ["switch0:0 to host0", "switch0:0 to host0"]);
    assert_eq!(row("longest queue"), ["switch0:0 to host0", "switch0:0 to host0"]);
    let report = fabric(&format!("{scenario} --congestion off --json")).json();
    let measures = &runs(&report)[0]["measures"];
    let used = number(&measures["busiest_used_percent"]);
    assert!(measures["busiest_port"] == "switch0:0 to host0" && used > 95.0 && used <= 100.0, "{measures:#}");
}

/// A series has the arrivals of each sample: never above the line rate, and complete in total.
#[test]
fn a_series_is_never_above_the_rate_of_the_line() {
    for options in [
        "incast --hosts 4 --bytes 1MB --count 2",
        "incast --hosts 4 --bytes 1MB --count 2 --buffer 1MB --pfc off --repeat selective --congestion off",
        "fairness --hosts 2 --limit 4ms --warm-up 3ms --rate 400G",
    ] {
        let report = fabric(&format!("{options} --json --series")).json();
        let run = runs(&report)[0];
        let line = if options.contains("400G") { 400e9 } else { 100e9 };
        let series: Vec<Vec<f64>> = serde_json::from_value(run["series"]["goodput"].clone()).unwrap();
        let times: Vec<f64> = serde_json::from_value(run["series"]["time_us"].clone()).unwrap();
        let mut bytes = 0.0;
        let mut before = 0.0;
        for (sample, time) in times.iter().enumerate() {
            let sum: f64 = series.iter().map(|flow| flow[sample]).sum();
            assert!(sum <= 1.000_001 * line, "{options}: {sum} at {time} us");
            bytes += sum * (time - before) * 1e-6 / 8.0;
            before = *time;
        }
        if options.starts_with("incast") {
            assert!((bytes - 8e6).abs() < 8e3, "{options}: {bytes}");
        }
    }
}

/// Settings that are off or follow from others are in comments; the file means the same without them.
#[test]
fn a_description_has_every_setting() {
    let text = fabric("incast --describe").stdout;
    for line in [
        "# uplink-rate: that of all links",
        "# xoff: off, alpha decides",
        "# headroom: what the link of each port needs",
        "# watchdog: off",
        "# every: one after the other",
        "# start: 0ns",
    ] {
        assert!(text.lines().any(|found| found.starts_with(line)), "no '{line}' in {text}");
    }
    let given = "victim --xoff 100KB --headroom 50KB --watchdog 1ms --uplink-rate 400G --describe";
    let given = fabric(given).stdout;
    for line in ["xoff = \"100KB\"", "headroom = \"50KB\"", "watchdog = \"1ms\"", "uplink-rate = \"400G\""] {
        assert!(given.lines().any(|found| found == line), "no '{line}' in {given}");
        assert!(!given.contains(&format!("# {}", line.split(' ').next().unwrap())), "{given}");
    }
}

/// A spine fails: its packets are lost until the switches have chosen other paths.
#[test]
fn links_and_switches_fail() {
    let folder = Folder::new("failure");
    let scenario =
        "permutation --hosts 8 --hosts-per-leaf 4 --bytes 200KB --count 4 --pfc off --ack-timeout 6";
    let described = fabric(&format!("{scenario} --describe")).stdout;
    let file = folder.file("failure.toml");
    let run = |failure: &str| {
        let text = described.replace("convergence = \"50ms\"", "convergence = \"100us\"");
        fs::write(&file, format!("{text}\n{failure}")).unwrap();
        let report = fabric(&format!("{file} --json")).json();
        runs(&report)[0]["measures"].clone()
    };
    assert_eq!(run("")["drops"], 0.0);
    for what in
        ["switch = \"switch2\"", "link = [\"switch0\", \"switch2\"]", "link = [\"switch3\", \"switch0\"]"]
    {
        let measures = run(&format!("[[failure]]\nat = \"20us\"\nuntil = \"300us\"\n{what}"));
        assert!(number(&measures["drops"]) > 0.0 && number(&measures["retransmitted"]) > 0.0, "{measures:#}");
    }
    for (failure, words) in [
        ("at = \"1s\"\nswitch = \"switch2\"", "failure.0.at = 1s: must be before the limit, 200ms"),
        ("at = \"1ms\"", "failure.0.at = 1ms: must be with one of link"),
        (
            "at = \"1ms\"\nuntil = \"1us\"\nswitch = \"switch2\"",
            "failure.0.until = 1us: must be after it begins, 1ms",
        ),
        (
            "at = \"1ms\"\nswitch = \"switch9\"",
            "failure.0.switch = switch9: must be host0 to host7, or switch0 to switch3",
        ),
        ("at = \"1ms\"\nswitch = \"host0\"", "failure.0.switch = host0: must be a switch"),
        (
            "at = \"1ms\"\nlink = [\"switch0\", \"switch1\"]",
            "failure.0.link = switch0 and switch1: must be two that are linked",
        ),
    ] {
        fs::write(&file, format!("{described}\n[[failure]]\n{failure}\n")).unwrap();
        refused(&[(&format!("fabric {file}"), &[words])]);
    }
}
