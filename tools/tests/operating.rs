//! The pages of docs/operating: each metric that they name is exported, with the labels that a query uses, and each command in
//! them is accepted by the command line.
//!
//!     cargo test -p ferroce-tools --test operating
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use ends::{Ferroce, LIMIT, alone};
use ferroce_driver_test_support::patience::until;
use ferroce_test_support::repository::files;
use ferroce_tools::Cli;
use serde_json::Value;

/// The files of docs/operating whose name ends so.
fn operating(end: &str) -> BTreeMap<PathBuf, String> {
    files(end).into_iter().filter(|(path, _)| path.starts_with("docs/operating")).collect()
}

/// Metrics by name, each with the names of its labels.
type Labels = BTreeMap<String, BTreeSet<String>>;

fn is_word(c: char) -> bool {
    c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'
}

/// The words of `text` that begin so, each with what follows it.
fn words<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    // Not the end of a longer one, as in libferroce_dpdk.so.
    let starts =
        text.match_indices(start).filter(|(at, _)| !text[..*at].ends_with(|c: char| c.is_alphanumeric()));
    starts.map(|(at, _)| {
        let rest = &text[at..];
        rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()))
    })
}

/// The names before `=` in a selector or a sample: `{device="eth0",state=~"a|b"}`.
fn selected(rest: &str) -> BTreeSet<String> {
    let (mut names, mut name, mut in_value) = (BTreeSet::new(), String::new(), false);
    for c in rest.strip_prefix('{').unwrap_or_default().chars() {
        match c {
            '"' => in_value = !in_value,
            _ if in_value => {}
            '}' => break,
            '=' | '!' if !name.is_empty() => {
                names.insert(mem::take(&mut name));
            }
            c if is_word(c) => name.push(c),
            _ => {}
        }
    }
    names
}

/// The metrics that a query names, each with the labels that the query uses of it.
fn named(query: &str) -> Labels {
    let grouped = query.split("by (").skip(1).filter_map(|rest| rest.split_once(')')).map(|(names, _)| names);
    let grouped: BTreeSet<String> = grouped.flat_map(|names| names.split(", ")).map(str::to_owned).collect();
    let mut found = Labels::new();
    // A path of Rust is a module, as in a line of the log.
    for (name, rest) in words(query, "ferroce_").filter(|(_, rest)| !rest.starts_with("::")) {
        found.entry(name.to_owned()).or_default().extend(selected(rest).into_iter().chain(grouped.clone()));
    }
    found
}

/// The metrics of Prometheus text.
fn exported(text: &str) -> Labels {
    let mut found = Labels::new();
    for line in text.lines().filter(|line| line.starts_with("ferroce_")) {
        let (name, rest) = line.split_at(line.find(|c| !is_word(c)).unwrap_or(line.len()));
        found.entry(name.to_owned()).or_default().extend(selected(rest));
    }
    found
}

/// The counters of collectives, which are exported from their first count on: a rail that was left, a slower path.
fn program_counters() -> Labels {
    let sources = files(".rs").into_iter().filter(|(path, _)| path.starts_with("collectives/src"));
    let constants: Vec<String> = sources
        .flat_map(|(_, text)| {
            text.split("ProgramCounter::new(").skip(1).map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    let row = |constant: &String| {
        // Name, help and label.
        let strings: Vec<&str> = constant.split('"').skip(1).step_by(2).take(3).collect();
        let labels = ["device", "driver", "pid", "uid", "context", strings[2]].map(str::to_owned);
        (format!("ferroce_{}_total", strings[0]), labels.into())
    };
    constants.iter().map(row).collect()
}

/// What is wanted and not there.
fn missing(wanted: &Labels, there: &Labels) -> Vec<String> {
    let mut missing = Vec::new();
    for (name, labels) in wanted {
        match there.get(name) {
            None => missing.push(name.clone()),
            // Prometheus adds the first two.
            Some(there) => missing.extend(
                labels
                    .iter()
                    .filter(|label| !["instance", "job"].contains(&label.as_str()) && !there.contains(*label))
                    .map(|label| format!("{name}{{{label}}}")),
            ),
        }
    }
    missing
}

/// All texts in JSON.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(values) => values.iter().flat_map(texts).collect(),
        Value::Object(fields) => fields.values().flat_map(texts).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn metrics_that_the_pages_name_are_exported() {
    let _alone = alone();
    let mut queries: Vec<String> = operating(".json")
        .into_values()
        .flat_map(|text| texts(&serde_json::from_str(&text).unwrap()))
        .collect();
    // A query may have several lines, and begins behind its key.
    queries.extend(
        operating(".yml")
            .into_values()
            .flat_map(|text| text.split("expr:").map(str::to_owned).collect::<Vec<_>>()),
    );
    queries.extend(
        operating(".md")
            .into_values()
            .flat_map(|text| text.split('`').map(str::to_owned).collect::<Vec<_>>()),
    );
    let mut wanted = Labels::new();
    for (name, labels) in queries.iter().flat_map(|query| named(query)) {
        wanted.entry(name).or_default().extend(labels);
    }
    println!("{} metrics are named", wanted.len());
    assert!(wanted.len() > 40, "some were not seen: {wanted:?}");

    // One rank is late now and then, and one process has congestion control.
    let late = "all_reduce -g 2 -b 1K -e 1K -n 1000000 -w 0 -c 0 --shared-memory off --late 1:50ms:10";
    let _ranks = Ferroce::start(None, &format!("collective {late}"));
    let _perf = Ferroce::start(None, "perf write bw -d loopback --congestion mlx5 --line-rate 25 -D 120");
    let there = || {
        let mut there = exported(&Ferroce::start(None, "stat --prometheus").end().stdout);
        there.extend(program_counters());
        there
    };
    until(
        LIMIT,
        || Some(()).filter(|()| missing(&wanted, &there()).is_empty()),
        || format!("named and not exported: {:?}", missing(&wanted, &there())),
    );
}

#[test]
fn a_metric_or_label_that_is_not_exported_is_seen() {
    let there = exported(
        "# TYPE ferroce_a_total counter\nferroce_a_total{device=\"x=y,z\",pid=\"1\"} 3\nferroce_b{pid=\"1\"} 1\n",
    );
    let lacks = |query: &str| missing(&named(query), &there);
    assert!(
        lacks("sum by (instance, pid) (rate(ferroce_a_total{device=~\"a|b=c\"}[5m])) / ferroce_b{job=\"x\"}")
            .is_empty()
    );
    assert!(lacks("libferroce_dpdk.so, WARN ferroce_driver::udp").is_empty());
    assert_eq!(lacks("rate(ferroce_c_total[5m])"), ["ferroce_c_total"]);
    assert_eq!(lacks("ferroce_a_total{state!=\"x\"}"), ["ferroce_a_total{state}"]);
    assert_eq!(lacks("sum by (peer) (ferroce_a_total)"), ["ferroce_a_total{peer}"]);
    assert!(program_counters().keys().any(|name| name == "ferroce_collective_rails_left_total"));
}

/// What is code on a page: lines of its blocks, joined where they continue, and code inside of lines.
fn code(page: &str) -> Vec<String> {
    let (mut found, mut in_block) = (Vec::new(), false);
    for line in page.replace("\\\n", " ").lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
        } else if in_block {
            found.push(line.to_owned());
        } else {
            found.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    found
}

/// The arguments of each `ferroce` command in a line, up to what a shell does with it.
fn commands(line: &str) -> Vec<Vec<String>> {
    let of_cli = Cli::command();
    let is_command = |word: &str| of_cli.get_subcommands().any(|command| command.get_name() == word);
    let mut found: Vec<Vec<String>> = Vec::new();
    let mut words = shell_words(line).into_iter().peekable();
    while let Some(word) = words.next() {
        let is_ferroce = word == "ferroce" || word.ends_with("/ferroce");
        if !is_ferroce || !words.peek().is_some_and(|next| is_command(next)) {
            continue;
        }
        let is_argument =
            |word: &String| !["|", "&", "&&", ";", ">", "2>", "2>&1", "#", "\\"].contains(&word.as_str());
        let mut arguments = vec!["ferroce".to_owned()];
        while let Some(argument) = words.next_if(is_argument) {
            arguments.push(argument);
        }
        found.push(arguments);
    }
    found
}

/// Words as a shell has them, without its expansions. A backtick ends a command that a quoted output names.
fn shell_words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match c {
            c if quote == Some(c) => quote = None,
            '"' | '\'' if quote.is_none() => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            '`' | ';' if quote.is_none() => {
                words.extend(word.take());
                words.push(";".to_owned());
            }
            c if c.is_whitespace() && quote.is_none() => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Why the command line refuses arguments. A command that is only named has none.
fn refusal(arguments: &[String]) -> Option<String> {
    if arguments.len() == 2 {
        return None;
    }
    let error = Cli::try_parse_from(arguments).err()?;
    let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    (!is_help).then(|| format!("{}: {error}", arguments.join(" ")))
}

#[test]
fn commands_of_the_pages_are_accepted() {
    let mut lines: Vec<String> = operating(".md").values().flat_map(|page| code(page)).collect();
    lines.extend(
        operating(".service").values().flat_map(|unit| unit.lines().map(str::to_owned).collect::<Vec<_>>()),
    );
    // The arguments of a container, whose entry point is `ferroce`.
    let manifests = operating(".yaml");
    let containers = manifests
        .values()
        .flat_map(|text| text.lines())
        .filter_map(|line| line.trim().strip_prefix("args: ["));
    lines.extend(containers.map(|list| format!("ferroce {}", list.trim_end_matches(']').replace(", ", " "))));
    let all: Vec<Vec<String>> =
        lines.iter().flat_map(|line| commands(line.trim_start_matches("ExecStart="))).collect();
    println!("{} commands", all.len());
    assert!(all.len() > 30, "some were not seen: {all:?}");
    let refused: Vec<String> = all.iter().filter_map(|arguments| refusal(arguments)).collect();
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn a_command_that_is_not_accepted_is_seen() {
    let page = "`ferroce stat` and\n```sh\n\
                $ ip netns exec a /bin/ferroce perf write bw \\\n  -d 'udp:10.0.0.1' 10.0.0.2 | head -1\n\
                x; `ferroce doctor -d DEV` there\nferroce is a stack\n```\nferroce stat --nothing\n";
    let all: Vec<String> =
        code(page).iter().flat_map(|line| commands(line)).map(|arguments| arguments.join(" ")).collect();
    assert_eq!(
        all,
        ["ferroce stat", "ferroce perf write bw -d udp:10.0.0.1 10.0.0.2", "ferroce doctor -d DEV"]
    );
    let refused = |line: &str| commands(line).iter().any(|arguments| refusal(arguments).is_some());
    assert!(refused("ferroce stat --nothing") && refused("ferroce perf write -d eth0"));
    assert!(!refused("ferroce perf --help") && !refused("ferroce doctor -d DEV"));
}
