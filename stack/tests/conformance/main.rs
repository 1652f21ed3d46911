//! Conformance cases: an engine against a scripted peer, in virtual time.
//!
//! A case is named after its number in the list of the README beside this file, and reads as a
//! script: post this, expect exactly these packets, inject those, expect these completions. What
//! is neither expected nor taken (a packet, a completion, an event) fails the case at its end.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod a_parsing;
mod b_requester;
mod c_loss;
mod d_checks;
mod d_order;
mod d_resources;
mod e_services;
mod e_states;
mod packet;
mod pairs;
mod peer;

/// The sections with their first and last case.
const SECTIONS: [(&str, &str, u32, u32); 6] = [
    ("a_parsing", include_str!("a_parsing.rs"), 1, 18),
    ("b_requester", include_str!("b_requester.rs"), 19, 40),
    ("c_loss", include_str!("c_loss.rs"), 41, 55),
    ("d_order", include_str!("d_order.rs"), 56, 66),
    ("d_checks", include_str!("d_checks.rs"), 67, 75),
    ("d_resources", include_str!("d_resources.rs"), 76, 88),
];

/// A missing number is a missing test.
#[test]
fn every_case_has_one_test_and_one_row() {
    let rows: Vec<&str> =
        include_str!("README.md").lines().filter(|line| line.contains("| `case_")).collect();
    let mut listed = 0;
    for (section, source, first, last) in SECTIONS {
        let tests: Vec<&str> =
            source.lines().filter_map(|line| line.strip_prefix("fn ")?.strip_suffix("() {")).collect();
        for number in first..=last {
            let prefix = format!("case_{number:03}_");
            let found: Vec<&str> = tests.iter().copied().filter(|name| name.starts_with(&prefix)).collect();
            let [test] = found[..] else {
                panic!("case {number} must be one test of {section}.rs: {found:?}")
            };
            let row = (format!("| {number} | "), format!(" | `{test}` |"));
            let there = rows.iter().filter(|line| line.starts_with(&row.0) && line.ends_with(&row.1)).count();
            assert_eq!(there, 1, "rows '{} ...{}' in README.md", row.0, row.1);
            listed += 1;
        }
    }
    assert_eq!(rows.len(), listed, "rows of README.md");
}
