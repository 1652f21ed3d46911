//! Every module of the project is where the compiler looks for it: code shared by several test programs is a crate
//! (`driver/test-support`, `stack/test-support`) with which no application is built, and other test code is in its
//! program's directory.
//!
//!     cargo test -p ferroce --test modules

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ferroce_test_support::repository::files;

/// Files that set the path of a module, how often, and why they may.
const ALLOWED: [(&str, usize, &str); 5] = [
    (
        "stack/loom/src/lib.rs",
        1,
        "loom runs the Runner's own file on its own atomics: a copy of that file would prove nothing",
    ),
    ("stack/tests/either_backend.rs", 1, "the example, which runs as it is on both backends"),
    ("tools/tests/dissect/main.rs", 1, "the judge, which tests of one file have too"),
    ("tools/tests/doctor/main.rs", 1, "the ends, which tests of one file have too"),
    ("tools/tests/rxe/main.rs", 1, "the same over rdma_rxe"),
];

/// Whether a line sets the path of a module, or includes a text.
fn names_a_place(line: &str) -> bool {
    let line = line.trim_start();
    let attribute = line.strip_prefix("#[").or_else(|| line.strip_prefix("#!["));
    attribute.is_some_and(|attribute| {
        let conditional = attribute.starts_with("cfg_attr(") && attribute.contains(", path");
        conditional || attribute.strip_prefix("path").is_some_and(|rest| rest.trim_start().starts_with('='))
    }) || line.starts_with("include!(")
}

#[test]
fn modules_are_where_the_compiler_looks_for_them() {
    let files = files(".rs");
    let counts =
        files.iter().map(|(file, text)| (file, text.lines().filter(|line| names_a_place(line)).count()));
    let found = counts.filter(|(_, count)| *count > 0).map(|(file, count)| (file.clone(), count));
    let found: BTreeMap<PathBuf, usize> = found.collect();
    println!("{} source files, lines that name a place: {found:?}", files.len());
    assert!(files.len() > 400, "{} source files", files.len());
    let allowed = ALLOWED.map(|(file, lines, _)| (PathBuf::from(file), lines));
    assert_eq!(
        found,
        allowed.into(),
        "files with the path attribute or include!, beside those that may (a row that is not needed any more goes)"
    );
}

#[test]
fn every_form_of_an_explicit_path_is_found() {
    for attribute in ["path = \"../other/mod.rs\"", "path=\"x.rs\"", "cfg_attr(test, path = \"x.rs\")"] {
        assert!(names_a_place(&format!("    #[{attribute}] mod x;")), "{attribute}");
        assert!(!names_a_place(&format!("//! #[{attribute}]")), "{attribute}");
    }
    assert!(names_a_place("include!(\"x.rs\");"));
    for line in ["mod x;".to_owned(), "include_str!(\"x.md\")".to_owned(), format!("#[{}]", "pathological")] {
        assert!(!names_a_place(&line), "{line}");
    }
}

/// Only crates of tests, benchmarks and the fuzzer use them, and each other.
#[test]
fn no_application_is_built_with_test_support() {
    let mut users = Vec::new();
    for (file, text) in files("Cargo.toml") {
        let mut section = "";
        for line in text.lines() {
            section = if line.starts_with('[') { line } else { section };
            let is_one =
                line.starts_with("ferroce-test-support") || line.starts_with("ferroce-driver-test-support");
            if is_one && section != "[workspace.dependencies]" {
                users.push((file.clone(), section.to_owned()));
            }
        }
    }
    println!("{users:?}");
    let is_test =
        |file: &Path| file.ends_with("test-support/Cargo.toml") || file == Path::new("tools/fuzz/Cargo.toml");
    let (tests, others): (Vec<_>, Vec<_>) = users.into_iter().partition(|(file, _)| is_test(file));
    assert!(!tests.is_empty() && others.len() > 3, "nothing was seen");
    assert!(others.iter().all(|(_, section)| section == "[dev-dependencies]"), "{others:?}");
}
