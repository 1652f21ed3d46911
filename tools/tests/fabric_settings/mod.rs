//! Settings that are invalid or without effect.

use std::fs;

use super::ends::refused;
use super::{Folder, fabric};

/// An invalid value is reported as such, and not taken for an option.
#[test]
fn invalid_values_have_clear_errors() {
    refused(&[
        ("fabric incast --buffer -16MB", &["'-16MB'", "--buffer", "must be bytes, as 4096"]),
        ("fabric incast --hosts -5", &["'-5'", "--hosts", "must be a whole number"]),
        ("fabric websearch --load half", &["'half'", "--load", "must be a number, as 0.5 or 50%"]),
        ("fabric websearch --load -50%", &["--load -0.5: must be a part of the line rate, 0.000001 to 10"]),
        ("fabric websearch --post-for 0s", &["--post-for 0ns: must be more than 0"]),
        (
            "fabric websearch --limit 3ms",
            &["--limit 3ms: must be at least 20ms, when the traffic of 'websearch' stops"],
        ),
        ("fabric incast --loss 101%", &["--loss 1.01: must be 0 to 1"]),
        ("fabric incast --kmax 100KB", &["--kmax 100KB: must be more than Kmin, 400KB by default at 100G"]),
        ("fabric incast --kmin 2MB --kmax 1MB", &["--kmin 2MB: must be less than Kmax, 1MB"]),
    ]);
    let described = fabric("websearch --load 50% --describe");
    assert!(described.stdout.contains("load = 0.5\n"), "{described:#?}");
}

#[test]
fn a_setting_without_effect_is_refused() {
    refused(&[
        (
            "fabric incast --load 0.5",
            &["--load 0.5: must be left out: only websearch has messages by chance"],
        ),
        ("fabric websearch --count 7", &["--count 7: must be left out: --post-for says"]),
        (
            "fabric victim --bytes 1MB",
            &["--bytes 1MB: must be left out: the flows of this scenario have no end"],
        ),
        (
            "fabric incast --hosts-per-leaf 4",
            &["--hosts-per-leaf 4: must be left out: only --topology leaf-spine"],
        ),
        (
            "fabric incast --kmin 40MB --kmax 50MB",
            &["--kmin 40MB: must be less than the longest queue of a port, "],
        ),
        (
            "fabric incast --pfc off --buffer 8MB --kmin 5MB --kmax 6MB",
            &[
                "--kmin 5MB: must be less than the longest queue of a port, 4MB: otherwise no packet is marked",
            ],
        ),
        (
            "fabric incast --ecn off --kmin 100KB",
            &["--kmin 100KB: must be left out: it has no effect, because ECN is off"],
        ),
        (
            "fabric incast --congestion off --pmax 0.5",
            &["--pmax 0.5: must be left out", "congestion control is off"],
        ),
        ("fabric incast --congestion off --cnp-interval 4us", &["--cnp-interval 4us: must be left out"]),
        ("fabric incast --pfc off --headroom 100KB", &["--headroom 100KB: must be left out", "PFC is off"]),
        ("fabric incast --xoff 100KB --alpha 0.5", &["--alpha 0.5: must be left out", "xoff is set instead"]),
        ("fabric incast --xoff 10KB", &["--xoff 10KB: must be more than xon-offset, 18KiB"]),
        ("fabric incast --xon-offset 8MiB", &["--xon-offset 8MiB: must be less than 4MiB"]),
        ("fabric incast --lossy-alpha 0.5", &["--lossy-alpha 0.5: must be left out", "PFC is on"]),
        ("fabric incast --watchdog 1ms", &["--watchdog 1ms: must be left out", "no two switches"]),
        (
            "fabric incast --uplink-rate 400G",
            &["--uplink-rate 400G: must be left out", "no link between switches"],
        ),
        ("fabric incast --compare kmin=1KB,2KB --ecn off", &["--kmin 1KB: must be left out"]),
    ]);
    let folder = Folder::new("idle");
    let file = folder.file("idle.toml");
    for (key, words) in [
        ("endless = true\ncount = 3", "traffic.0.count = 3: must be left out"),
        ("bytes = \"1MB\"\nstop = \"1ms\"", "traffic.0.stop = 1ms: must be left out"),
        ("bytes = \"1MB\"\nload = 0.5\nspread = \"1us\"", "traffic.0.spread = 1us: must be left out"),
    ] {
        let text = format!("[topology.star]\nhosts = 3\n[[traffic]]\npattern = \"incast\"\nto = 0\n{key}\n");
        fs::write(&file, text).unwrap();
        refused(&[(&format!("fabric {file}"), &[words])]);
    }
}

/// An option with an effect in one of the compared settings is not rejected for the others.
#[test]
fn options_are_not_rejected_if_one_setting_uses_them() {
    let small = "incast --hosts 2 --bytes 50KB --count 1";
    let outcome = fabric(&format!("{small} --headroom 100KB --compare pfc=on,off"));
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    assert!(!outcome.stdout.contains("note "), "{outcome:#?}");
    for (options, words) in [
        (
            "--buffer 2MB --pfc off",
            "note      Pmax is never reached: Kmax, 1600KB, is not less than the longest queue of a port, 1MB",
        ),
        (
            "--buffer 300KB",
            "note      no packet is marked: Kmin, 400KB, is not less than the longest queue of a port, ",
        ),
        (
            "--xoff 100KB",
            "note      ports pause before queues are marked: xoff, 100KB of one port, is less than Kmin, 400KB",
        ),
        (
            "--headroom 1KB",
            "note      frames may be dropped in spite of PFC: headroom, 1KB, is less than the ",
        ),
        ("--window 1024", "note      the window is 512 packets in effect"),
    ] {
        let outcome = fabric(&format!("{small} {options}"));
        assert_eq!(outcome.code, Some(0), "{outcome:#?}");
        assert!(outcome.stdout.contains(words), "{options}: {outcome:#?}");
    }
    assert!(!fabric(small).stdout.contains("note "));
}

/// Two values for one option, or one value twice.
#[test]
fn duplicate_options_are_refused() {
    refused(&[
        (
            "fabric incast --compare kmin=100KB+kmin=200KB",
            &[
                "--compare kmin=100KB+kmin=200KB: kmin is given twice in one setting, the second time as 200KB",
            ],
        ),
        ("fabric incast --compare pfc=on,on", &["--compare: 'pfc=on' is the same as 'pfc=on'"]),
        ("fabric incast --compare kmin=1KB,1000", &["'kmin=1000' is the same as 'kmin=1KB'"]),
        (
            "fabric incast --compare pfc=on,off --pfc on",
            &["--pfc on: must be left out: --compare has pfc too"],
        ),
        (
            "fabric incast --compare pfc=on,off --compare pfc=off",
            &["--compare pfc=off: pfc is in another --compare too; give all its values in one"],
        ),
        ("fabric incast --pcap host1=x --pcap host1=y", &["--pcap: host1 is given twice"]),
    ]);
}

#[test]
fn errors_name_the_value_and_the_remedy() {
    refused(&[
        ("fabric incast --jobs 0", &["'0'", "--jobs", "must be 1 to 1024"]),
        ("fabric incast --seeds 0", &["'0'", "--seeds", "must be 1 to 10000"]),
        (
            "fabric incast --seed 18446744073709551615 --seeds 2",
            &["--seed 18446744073709551615: must be at most 18446744073709551614 with --seeds 2"],
        ),
        (
            "fabric victim --watchdog 10s",
            &["--watchdog 10s: must be left out", "because the run ends before, at 20ms"],
        ),
        ("fabric incast --rate 0G", &["--rate 0b/s: must be 1M to 4000G"]),
        ("fabric incast --buffer 100TB", &["'100TB'", "'TB' is not a unit; units are GB, GiB"]),
        ("fabric incast --buffer 99999999T", &["'99999999T'", "'T' is not a unit"]),
        ("fabric incast --rate 99999999T", &["'99999999T'", "this is too much"]),
        ("fabric allreduce --hosts 1", &["--hosts 1: must be 2 to 512"]),
        (
            "fabric incast --compare frobnicate",
            &["'frobnicate'", "values of an option, as kmin=50KB,100KB", "pmax, marking"],
        ),
    ]);
    // No text is cut within a character.
    for list in ["kmin=many", "delay=x", "rate=1", "pfc=maybe", "window=-1", "frobnicate"] {
        let outcome = fabric(&format!("incast --compare {list}"));
        assert_eq!(outcome.code, Some(2), "{outcome:#?}");
        assert!(!outcome.stderr.contains(char::REPLACEMENT_CHARACTER), "{outcome:#?}");
    }
}

/// TOML's errors about a value are reported with its key.
#[test]
fn errors_in_files_name_the_key() {
    let folder = Folder::new("keys");
    let file = folder.file("keys.toml");
    let base = "seed = 1\n[topology.star]\nhosts = 4\n[links]\nrate = \"100G\"\n[switches]\npfc = true\n[control]\nwindow = 9\n\
                [[traffic]]\npattern = \"pairs\"\nbytes = \"1KB\"\npairs = [[1, 2]]\n";
    fs::write(&file, base).unwrap();
    assert_eq!(fabric(&file).code, Some(0));
    for (from, to, words) in [
        (
            "pfc = true",
            "pfc = \"off\"",
            "line 7: pfc = \"off\": invalid type: string \"off\", must be true or false, without quotes",
        ),
        ("pfc = true", "kmin = \"-100KB\"", "line 7: kmin = \"-100KB\": must be bytes, as 4096"),
        (
            "seed = 1",
            "seed = -1",
            "line 1: seed = -1: invalid value: integer `-1`, must be a whole number, not below 0",
        ),
        (
            "window = 9",
            "path-mtu = \"4096\"",
            "line 9: path-mtu = \"4096\": invalid type: string \"4096\", must be a whole number",
        ),
        ("[[1, 2]]", "[[1, 2, 3]]", "line 13: pairs = [[1, 2, 3]]: must be two in brackets; these are 3"),
        ("[[1, 2]]", "[[1]]", "line 13: pairs = [[1]]: must be two in brackets; these are 1"),
    ] {
        fs::write(&file, base.replace(from, to)).unwrap();
        refused(&[(&format!("fabric {file}"), &[words])]);
    }
}

/// Settings of a file without effect are noted.
#[test]
fn file_settings_without_effect_are_noted() {
    let folder = Folder::new("nothing");
    let file = folder.file("nothing.toml");
    let base = "[topology.dumbbell]\nleft = 2\nright = 2\n[switches]\nSWITCHES\n[[traffic]]\npattern = \"incast\"\nto = 0\nbytes = \"1KB\"\nhosts = \"HOSTS\"\n";
    for (switches, hosts, words) in [
        (
            "convergence = \"1ms\"",
            "1-3",
            "note      convergence = 1ms has no effect: there is no [[failure]]",
        ),
        (
            "watchdog = \"10s\"",
            "1-3",
            "note      watchdog has no effect, because the run ends before, at 200ms",
        ),
        ("ecn = false", "1-3", "note      congestion control is not notified: ECN is off"),
        (
            "",
            "0-3",
            "note      host0 is among the hosts of 'incast' and receives; it does not send to itself",
        ),
    ] {
        fs::write(&file, base.replace("SWITCHES", switches).replace("HOSTS", hosts)).unwrap();
        let outcome = fabric(&file);
        assert!(outcome.code == Some(0) && outcome.stdout.contains(words), "no '{words}' in {outcome:#?}");
    }
    let outcome = fabric("incast --hosts 2 --bytes 1KB --count 1 --ecn off --compare off,dcqcn");
    assert!(
        outcome.stdout.contains("note      the congestion controls do not differ: ECN is off"),
        "{outcome:#?}"
    );
}

/// A control whose alpha decays faster than packets arrive is noted, if there are many flows.
#[test]
fn a_control_for_fewer_flows_is_noted() {
    let words = "note      32 flows to one host: the packets of one are 43us apart, alpha falls each 1us";
    let scenario = "incast --hosts 32 --rate 25G --bytes 4KB --count 1";
    let outcome = fabric(scenario);
    assert!(outcome.stdout.contains(words), "{outcome:#?}");
    for options in ["--congestion mlx25", "--congestion off", "--ecn off --congestion off", "--rate 100G"] {
        let scenario = scenario.replace("--rate 25G", "");
        let rate = if options.contains("--rate") { "" } else { "--rate 25G" };
        let outcome = fabric(&format!("{scenario} {rate} {options}"));
        assert!(!outcome.stdout.contains("flows to one host"), "{outcome:#?}");
    }
}
