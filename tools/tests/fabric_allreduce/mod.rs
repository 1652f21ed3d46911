//! Ranks of the real library in the fabric.

use super::*;

/// Two leaves with two hosts of four ranks each.
const SMALL: &str = "allreduce --ranks 16 --ranks-per-host 4 --bytes 1KiB..256KiB";

fn sizes(case: &Value) -> &Vec<Value> {
    case["sizes"].as_array().unwrap()
}

/// The library's choice takes at most a tenth longer than the best algorithm, with and without congestion control. All
/// elements are checked, or the run fails.
#[test]
fn the_choice_is_the_best_or_near_it() {
    let report = fabric(&format!("{SMALL} --compare off,dcqcn --json")).json();
    let cases = report["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    for case in cases {
        assert_eq!(sizes(case).len(), 5);
        for size in sizes(case) {
            assert_eq!(size["checked"], true, "{size:#}");
            assert!(number(&size["above_best"]) <= 0.10, "{}: {size:#}", case["label"]);
            let times = size["algorithms"].as_array().unwrap();
            let simulated = times.iter().filter(|cell| cell["time_us"].is_number()).count();
            // A direct exchange of longer messages can't be the best.
            assert!(simulated >= 5, "{size:#}");
        }
        // The model includes that ranks share the links between leaves.
        let model = &case["model"];
        let pace = |value: &Value| number(value);
        assert!(pace(&model["exchanged_per_second"]) < 0.9 * pace(&model["bytes_per_second"]), "{model:#}");
        assert!(pace(&model["hosts"]["latency_us"]) > pace(&model["latency_us"]), "{model:#}");
    }
}

#[test]
fn the_same_seed_is_the_same_time() {
    let run = |seed: u32| {
        let report = fabric(&format!("{SMALL} --algorithm ring,tree --seed {seed} --json")).json();
        let case = report["cases"][0].clone();
        (case["sizes"].clone(), case["trace_hash"].clone())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).1, run(2).1);
}

/// As a file, the run is the same.
#[test]
fn a_file_describes_the_ranks() {
    let folder = Folder::new("allreduce");
    let scenario = "allreduce --ranks 8 --ranks-per-host 2 --bytes 8B,64KiB --algorithm auto --count 2";
    let described = fabric(&format!("{scenario} --describe"));
    assert!(described.stdout.contains("[allreduce]\n"), "{described:#?}");
    let file = folder.file("ranks.toml");
    fs::write(&file, &described.stdout).unwrap();
    let svg = folder.file("times.svg");
    let sizes = |arguments: &str| fabric(&format!("{arguments} --json")).json()["cases"][0]["sizes"].clone();
    let of_file = sizes(&format!("{file} --svg {svg}"));
    assert_eq!(of_file, sizes(scenario));
    assert!(fs::read_to_string(svg).unwrap().contains("<svg"));
    for size in of_file.as_array().unwrap() {
        let chosen = &size["chosen"];
        for cell in size["algorithms"].as_array().unwrap() {
            assert_eq!(cell["time_us"].is_number(), cell["algorithm"] == *chosen, "{size:#}");
        }
    }
    let outcome = fabric(scenario);
    for words in [
        "8 ranks, 2 on a host",
        "mean of 2 rounds",
        "elements  checked",
        "was not compared",
        "repeat it by: ",
    ] {
        assert!(outcome.stdout.contains(words), "no '{words}' in {outcome:#?}");
    }
}

/// If the choice was not simulated, only the model's time is shown, and the verdict excludes it.
#[test]
fn a_choice_that_is_not_simulated_is_marked() {
    let report = fabric("allreduce --ranks 8 --bytes 8B,4MiB --algorithm ring,tree --json").json();
    let sizes = sizes(&report["cases"][0]);
    let chosen: Vec<&Value> = sizes.iter().map(|size| &size["chosen"]).collect();
    let is_simulated = |of: &&Value| ["ring", "tree"].contains(&of.as_str().unwrap());
    assert_ne!(chosen.iter().filter(|of| is_simulated(of)).count(), 2, "{chosen:?}");
    let outcome = fabric("allreduce --ranks 8 --bytes 8B,4MiB --algorithm ring,tree");
    assert!(outcome.stdout.contains(" by the model, not simulated)"), "{outcome:#?}");
    let verdict = outcome.stdout.lines().find(|line| line.starts_with("choice ")).unwrap();
    assert!(verdict.contains("unknown"), "{verdict}");
    let model = outcome.stdout.lines().find(|line| line.starts_with("measured ")).unwrap();
    assert!(model.ends_with("reductions free"), "{model}");
    assert!(outcome.stderr.contains("8 ranks need "), "{}", outcome.stderr);
    // The same as in the JSON.
    for size in sizes {
        for cell in size["algorithms"].as_array().unwrap() {
            let (time, model) = (&cell["time_us"], &cell["model_us"]);
            let note = format!(
                "the cost model is more than 20 % off for {} at ",
                cell["algorithm"].as_str().unwrap()
            );
            let told = outcome.stdout.lines().any(|line| {
                let bytes = if size["bytes"] == 8 { "8B" } else { "4MiB" };
                line.contains(&note) && line.contains(bytes)
            });
            let is_far = time.is_number() && (number(model) / number(time) - 1.0).abs() > 0.20;
            assert_eq!(told, is_far, "{size:#} {}", outcome.stdout);
        }
    }
}

#[test]
fn what_can_not_be_is_named() {
    refused(&[
        (
            "fabric allreduce --algorithm rign",
            &["'rign'", "must be all, auto, or some of direct,two_step,ring"],
        ),
        ("fabric allreduce --algorithm mapped", &["'mapped'", "must be all, auto, or some of"]),
        ("fabric allreduce --ranks-per-host 3", &["--ranks-per-host 3: must be a number that divides 64"]),
        (
            "fabric allreduce --ranks-per-host 16",
            &["--ranks-per-host 16: must be a number that divides 8, the hosts of a leaf"],
        ),
        (
            "fabric allreduce --hosts 8 --ranks-per-host 8 --algorithm hierarchical",
            &["--ranks-per-host 8: must be 2 or more, and less than 8, for the hierarchical algorithm"],
        ),
        ("fabric allreduce --hosts 1000", &["--hosts 1000: must be 2 to 512"]),
        (
            "fabric allreduce --hosts 256",
            &["--eager 64KiB: must be less: the channels between 256 ranks take"],
        ),
        ("fabric allreduce --bytes 2GiB", &["--bytes 2GiB: must be multiples of 8 bytes, up to 1GiB"]),
        ("fabric allreduce --bytes 1KiB,12B,1004B", &["--bytes 12B: must be multiples of 8 bytes"]),
        ("fabric allreduce --bytes 1MiB..1KiB", &["'1MiB..1KiB': must have the smaller size first"]),
        ("fabric allreduce --chunk 100", &["--chunk 100B: must be a multiple of 8 bytes, 1KiB to 16MiB"]),
        ("fabric allreduce --repeat selective", &["--repeat selective: must be go-back-n"]),
        ("fabric allreduce --warm-up 1ms", &["--warm-up 1ms: must be left out"]),
        ("fabric allreduce --seeds 2", &["--seeds: must be one seed"]),
        ("fabric allreduce --pcap host1=x", &["--pcap: must be left out"]),
        ("fabric incast --algorithm ring", &["--algorithm ring: must be left out: only allreduce has it"]),
        ("fabric incast --bytes 1KB,2KB", &["--bytes 1KB,2KB: must be one size: only allreduce has several"]),
    ]);
    let late = fabric("allreduce --hosts 4 --bytes 1MiB --limit 50us");
    assert_eq!(late.code, Some(1), "{late:#?}");
    assert!(late.stderr.contains("has not ended after 50us; --limit gives more time"), "{late:#?}");
}
