//! The modules ("rooms") of `stack/src`, from the top down: none imports one above it, so there are no cycles.
//!
//!     cargo test -p ferroce --test rooms -- --nocapture      (FERROCE_ROOMS=FOLDER: another copy of stack/src)

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each may import from all after it.
const FLOORS: [&str; 9] =
    ["manual", "runtime", "device", "context", "backend", "cm", "engine", "telemetry", "verbs"];

/// The directory or file directly in `src` to which each file belongs, with its text.
fn rooms(folder: &Path, room: Option<&str>, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let room = room.unwrap_or(&name);
        if path.is_dir() {
            rooms(&path, Some(room), found);
        } else if room != "lib" {
            found.push((room.to_owned(), fs::read_to_string(&path).unwrap()));
        }
    }
}

/// The text without comments, which may mention anything.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The paths that follow `start` in a text: the first word of each, through one level of braces.
fn first_words<'a>(text: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(start).skip(1).flat_map(|rest| {
        let list = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default(),
            None => rest,
        };
        let is_list = rest.starts_with('{');
        list.split(',').take(if is_list { usize::MAX } else { 1 }).map(|path| {
            let path = path.trim();
            let end = path.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(path.len());
            &path[..end]
        })
    })
}

/// The module of each name that the crate exports, by its `pub use`.
fn names(lib: &str) -> BTreeMap<&str, &str> {
    let uses = lib.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let named = uses.filter_map(|path| {
        let (room, _) = path.split_once("::")?;
        let (_, last) = path.rsplit_once("::")?;
        Some(last.trim_matches(['{', '}']).split(',').map(move |name| (name.trim(), room)))
    });
    named.flatten().collect()
}

/// The directory to check.
fn src() -> PathBuf {
    std::env::var_os("FERROCE_ROOMS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), PathBuf::from)
}

/// The name of the type that a line defines outside of an `impl`.
fn defined(line: &str) -> Option<&str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let words = words.strip_prefix(&["pub"]).unwrap_or(&words);
    let words = if words.first()?.starts_with("pub(") { &words[1..] } else { words };
    let kinds = ["struct", "enum", "trait", "type", "union"];
    let [kind, name, ..] = words else { return None };
    let is_definition = kinds.contains(kind) && !line.starts_with(' ');
    is_definition.then(|| name.split(|c: char| c != '_' && !c.is_alphanumeric()).next()).flatten()
}

/// Each type name is used once.
#[test]
fn type_names_are_unique() {
    let mut files = Vec::new();
    rooms(&src(), None, &mut files);
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (room, text) in &files {
        for name in text.lines().filter_map(defined) {
            found.entry(name).or_default().push(room);
        }
    }
    println!("{} types", found.len());
    assert!(found.contains_key("Context") && found.contains_key("Shared"), "nothing was seen");
    found.retain(|_, rooms| rooms.len() > 1);
    assert!(found.is_empty(), "types of one name, and the rooms where they are: {found:?}");
}

#[test]
fn no_module_imports_one_above_it() {
    let src = src();
    let lib = code(&fs::read_to_string(src.join("lib.rs")).unwrap());
    let (names, mut files) = (names(&lib), Vec::new());
    rooms(&src, None, &mut files);
    let all: BTreeSet<&str> = files.iter().map(|(room, _)| room.as_str()).collect();
    let mut imports: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    for (room, text) in &files {
        let text = code(text);
        // Imports that this test does not see, and that are not needed.
        let nested = text
            .split("crate::{")
            .skip(1)
            .any(|list| list.split('}').next().is_some_and(|l| l.contains('{')));
        assert!(
            !nested && !text.contains("super::super::"),
            "{room}: name the room, as in crate::verbs::..."
        );
        for word in first_words(&text, "crate::") {
            let from = all.get(word).or_else(|| names.get(word).and_then(|room| all.get(room)));
            if let Some(from) = from.filter(|from| *from != room) {
                *imports.entry((room, from)).or_default() += 1;
            }
        }
    }
    println!("{:<12} imports from", "room");
    for ((room, from), count) in &imports {
        println!("{room:<12} {from:<12} {count}");
    }
    let floor = |room: &str| FLOORS.iter().position(|known| *known == room);
    let upward: Vec<_> = imports.keys().filter(|(room, from)| floor(room) >= floor(from)).collect();
    println!(
        "{} imports between {} rooms, {} of them upwards: {upward:?}",
        imports.len(),
        all.len(),
        upward.len()
    );
    assert_eq!(all, FLOORS.into(), "a room without a floor, or a floor without its room");
    assert!(upward.is_empty(), "{upward:?}");
    assert!(imports.contains_key(&("engine", "verbs")), "nothing was seen");
    for room in ["context", "runtime", "device"] {
        assert!(!imports.contains_key(&(room, "engine")), "{room} reaches round the backend");
    }
}
