//! Every module of the project lies where the compiler looks for it: what several test programs share is a crate
//! (`driver/test-support`, `stack/test-support`), and what one needs is in its folder.
//!
//!     cargo test -p ferroce --test modules

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Files that name the place of a module, how often, and why they may.
const ALLOWED: [(&str, usize, &str); 7] = [
    ("driver/dpdk-sys/src/lib.rs", 1, "bindgen writes the bindings where the build says"),
    (
        "stack/loom/src/lib.rs",
        1,
        "loom runs the Runner's own file on its own atomics: a copy of that file would prove nothing",
    ),
    ("tools/fuzz/fuzz_targets/exchange/doctor.rs", 1, NO_LIBRARY),
    ("tools/fuzz/fuzz_targets/exchange/main.rs", 1, NO_LIBRARY),
    ("tools/fuzz/fuzz_targets/exchange/perf.rs", 2, NO_LIBRARY),
    ("tools/fuzz/fuzz_targets/exchange/perftest.rs", 1, NO_LIBRARY),
    ("tools/fuzz/fuzz_targets/exchange/pingpong.rs", 1, NO_LIBRARY),
];
const NO_LIBRARY: &str =
    "ferroce-tools is a program: its parsers are in no library that the fuzzer could call";

/// Whether a line takes a module, or text, from a place of its own.
fn names_a_place(line: &str) -> bool {
    let line = line.trim_start();
    let attribute = line.strip_prefix("#[").or_else(|| line.strip_prefix("#!["));
    attribute.is_some_and(|attribute| {
        let conditional = attribute.starts_with("cfg_attr(") && attribute.contains(", path");
        conditional || attribute.strip_prefix("path").is_some_and(|rest| rest.trim_start().starts_with('='))
    }) || line.starts_with("include!(")
}

/// How many such lines each source file has, by its path in the project.
fn count(folder: &Path, root: &Path, found: &mut BTreeMap<String, usize>, files: &mut usize) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_symlink() || name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            count(&path, root, found, files);
        } else if name.ends_with(".rs") {
            *files += 1;
            let lines = fs::read_to_string(&path).unwrap().lines().filter(|line| names_a_place(line)).count();
            if lines > 0 {
                found.insert(path.strip_prefix(root).unwrap().to_string_lossy().into_owned(), lines);
            }
        }
    }
}

#[test]
fn modules_lie_where_the_compiler_looks_for_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut found, mut files) = (BTreeMap::new(), 0);
    count(root, root, &mut found, &mut files);
    println!("{files} source files, lines that name a place: {found:?}");
    assert!(files > 400, "{files} source files in {}", root.display());
    let allowed = ALLOWED.map(|(file, lines, _)| (file.to_owned(), lines));
    assert_eq!(
        found,
        allowed.into(),
        "files with the path attribute or include!, beside those that may (a row that is not needed any more goes)"
    );
}

#[test]
fn each_way_to_name_a_place_is_seen() {
    for attribute in ["path = \"../other/mod.rs\"", "path=\"x.rs\"", "cfg_attr(test, path = \"x.rs\")"] {
        assert!(names_a_place(&format!("    #[{attribute}] mod x;")), "{attribute}");
        assert!(!names_a_place(&format!("//! #[{attribute}]")), "{attribute}");
    }
    assert!(names_a_place("include!(\"x.rs\");"));
    for line in ["mod x;", "include_str!(\"x.md\")", "#[pathological]"] {
        assert!(!names_a_place(line), "{line}");
    }
}
