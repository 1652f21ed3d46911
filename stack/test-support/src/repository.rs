//! The files of this repository, for tests that check its pages and sources against its rules. The Rust code of the pages
//! is tested here too, because published packages do not contain them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The root directory of the repository.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// The files whose names have this end, by their paths in the repository, with their texts. Build outputs, symbolic links
/// and hidden files are left out.
pub fn files(end: &str) -> BTreeMap<PathBuf, String> {
    fn gather(folder: &Path, end: &str, found: &mut BTreeMap<PathBuf, String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let is_output = path.is_dir() && name.starts_with("target");
            if path.is_symlink() || name.starts_with('.') || is_output {
                continue;
            }
            if path.is_dir() {
                gather(&path, end, found);
            } else if name.ends_with(end) {
                let place = path.strip_prefix(root()).unwrap().to_owned();
                found.insert(place, fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    gather(root(), end, &mut found);
    found
}

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/congestion.md")]
struct Congestion;
