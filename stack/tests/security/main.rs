//! Security: one test for each known bug of other stacks (docs/protocol.md §9), named after it, and one for each protection
//! against a threat without a conformance case. `security.md` in this directory describes what each bug would be here.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod bugs;
mod bugs_of_state;
mod threats;

use ferroce_test_support::{packet, peer};

/// Each test has a row of the table, and each row a test.
#[test]
fn every_row_has_its_tests() {
    let rows: Vec<&str> = include_str!("security.md")
        .lines()
        .filter_map(|line| line.strip_suffix("` |")?.rsplit_once("| `").map(|(_, test)| test))
        .collect();
    let sources = [include_str!("bugs.rs"), include_str!("bugs_of_state.rs"), include_str!("threats.rs")];
    let tests: Vec<&str> = sources
        .into_iter()
        .flat_map(str::lines)
        .filter_map(|line| line.trim_start().strip_prefix("fn ")?.strip_suffix("() {"))
        .collect();
    assert!(tests.len() > 25, "{tests:?}");
    for test in &tests {
        assert_eq!(rows.iter().filter(|row| *row == test).count(), 1, "rows of {test} in security.md");
    }
    for row in &rows {
        assert!(tests.contains(row), "{row} of security.md is no test");
    }
}
