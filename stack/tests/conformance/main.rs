//! Conformance cases: an engine against a scripted peer, in virtual time.
//!
//! A case is named after its number in the list of the README in this directory, and reads as a script: post this, expect
//! exactly these packets, inject those, expect these completions. Anything neither expected nor taken (a packet, a
//! completion, an event) fails the case at its end.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use ferroce_test_support::{packet, pair, peer};

mod a_parsing;
mod b_requester;
mod b_responses;
mod c_loss;
mod d_checks;
mod d_order;
mod d_resources;
mod e_events;
mod e_services;
mod e_states;
mod f_notification;
mod f_reaction;
mod fuzz;
mod g_cm;
mod g_cm_ends;
mod g_exchange;
mod g_hostile;
mod h_behaviour;
mod h_go_back_n;
mod i_progress;
mod i_security;
mod j_device_memory;
mod pairs;
mod pkeys;
mod selective;
mod selective_sender;
mod switch;

/// Cases without a test here, and why.
const PENDING: [(RangeInclusive<u32>, &str); 2] = [
    (109..=109, "needs the kernel's connection manager: tools/tests/rxe"),
    (127..=127, "needs the kernel's rdma_rxe: tools/tests/rxe"),
];

/// Every case has one test and one row of the README, or is pending in both lists.
#[test]
fn every_case_has_one_test_and_one_row() {
    let tests = tests();
    let rows: Vec<Vec<&str>> = include_str!("README.md")
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect()))
        .filter(|row: &Vec<&str>| row[0].parse::<u32>().is_ok())
        .collect();
    let mut missing = Vec::new();
    for number in 1..=CASES {
        let prefix = format!("case_{number:03}_");
        let found: Vec<&str> =
            tests.iter().map(String::as_str).filter(|name| name.starts_with(&prefix)).collect();
        let listed: Vec<&str> =
            rows.iter().filter(|row| row[0] == number.to_string()).map(|row| row[2]).collect();
        let [listed] = listed[..] else { panic!("case {number} must be one row of README.md: {listed:?}") };
        let reason = PENDING.iter().find(|(range, _)| range.contains(&number)).map(|(_, reason)| reason);
        match (&found[..], reason) {
            ([test], None) => assert_eq!(listed, format!("`{test}`"), "case {number} in README.md"),
            ([], Some(reason)) => {
                println!("pending: case {number}: {reason}");
                assert_eq!(listed, "pending", "case {number} in README.md");
                missing.push(number);
            }
            (_, None) => panic!("case {number} must be one test: {found:?}"),
            (_, Some(_)) => panic!("case {number} is listed as pending, but there is {found:?}"),
        }
    }
    assert_eq!(rows.len() as u32, CASES, "rows of README.md");
    assert_eq!(tests.len() + missing.len(), CASES as usize, "tests named case_");
    let reasons: Vec<String> = PENDING
        .iter()
        .map(|(range, reason)| match (range.start(), range.end()) {
            (first, last) if first == last => format!("{first} ({reason})"),
            (first, last) => format!("{first}-{last} ({reason})"),
        })
        .collect();
    println!("conformance: {} of {CASES} cases have a test; pending: {}", tests.len(), reasons.join(", "));
}

/// A mutation (`./do mutations cases`) whose lines have changed would otherwise be noticed only when it is run.
#[test]
fn each_mutation_finds_what_it_replaces() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let lines = |text: &str| text.lines().map(|line| format!("{}\n", line.trim())).collect::<String>();
    let table = include_str!("mutations.txt");
    let mutations: Vec<&str> = table.split("\n\n").filter(|block| block.starts_with("case_")).collect();
    for mutation in &mutations {
        let (title, changes) = mutation.split_once('\n').unwrap();
        let file = title.rsplit(' ').next().unwrap();
        let replaced: Vec<&str> = changes.lines().filter_map(|line| line.strip_prefix('-')).collect();
        let source = lines(&fs::read_to_string(root.join(file)).unwrap());
        let replaced = lines(&replaced.join("\n"));
        // A mutation may start and end within a line.
        assert_eq!(source.matches(replaced.trim_end()).count(), 1, "{title}: {replaced}");
    }
    assert!(mutations.len() > 40, "{} mutations", mutations.len());
}

const CASES: u32 = 140;

/// The names of all cases, from the sources of the modules of this program.
fn tests() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance");
    let modules =
        include_str!("main.rs").lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let sources =
        modules.filter_map(|module| fs::read_to_string(folder.join(module).with_extension("rs")).ok());
    let mut names = Vec::new();
    for source in sources {
        let mut is_test = false;
        for line in source.lines() {
            let name = line.strip_prefix("fn ").and_then(|rest| rest.strip_suffix("() {"));
            names.extend(name.filter(|name| is_test && name.starts_with("case_")).map(str::to_owned));
            is_test = line == "#[test]";
        }
    }
    names
}
