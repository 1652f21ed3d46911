//! The links of the project's pages: each relative link, and each link to a file of the repository by its URL, leads to a
//! file that exists, and each anchor to a heading of that page. Links to other sites are not checked. The tests named in
//! SECURITY.md exist.
//!
//!     cargo test -p ferroce --test links

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::path::{Component, Path, PathBuf};

use ferroce_test_support::repository::{files, root};

/// The URL of the repository's files on pages read elsewhere, such as crates.io.
const REPOSITORY: &str = "https://github.com/ferroce/ferroce/blob/main/";

/// A page's lines outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !is_fence && !in_code
    })
}

/// A line without its code spans.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// The links of a page: links, references and images of Markdown, and those of HTML.
fn links(text: &str) -> Vec<String> {
    let lines: Vec<String> = prose(text).map(without_code).collect();
    let is_reference = |line: &&String| line.starts_with('[');
    let references = lines.iter().filter(is_reference).filter_map(|line| line.split_once("]: "));
    let mut found: Vec<String> = references.map(|(_, link)| link.to_owned()).collect();
    let text = lines.join("\n");
    for (start, end) in [("](", ')'), (" src=\"", '"'), (" srcset=\"", '"'), (" href=\"", '"')] {
        let behind = text.split(start).skip(1);
        found.extend(behind.filter_map(|rest| rest.split_once(end)).map(|(link, _)| link.to_owned()));
    }
    found
}

/// A line with only the text of each link.
fn without_targets(line: &str) -> String {
    let mut parts = line.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    first + &parts.filter_map(|part| part.split_once(')')).map(|(_, behind)| behind).collect::<String>()
}

/// GitHub's anchors of the headings of a page.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in prose(text) {
        let title = line.trim_start_matches('#');
        let level = line.len() - title.len();
        if !(1..=6).contains(&level) || !title.starts_with(' ') {
            continue;
        }
        let kept: String = without_targets(&title.trim().to_lowercase())
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
            .collect();
        let anchor = kept.replace(' ', "-");
        let count = (1..).map(|n| format!("{anchor}-{n}"));
        let name = iter::once(anchor.clone()).chain(count).find(|name| !found.contains(name));
        found.extend(name);
    }
    found
}

/// The path without `.` and `..`; `None` if it leaves the repository.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if !plain.pop() => return None,
            Component::Normal(name) => plain.push(name),
            _ => {}
        }
    }
    Some(plain)
}

/// Why a link on a page is broken.
fn complaint(page: &Path, link: &str, pages: &BTreeMap<PathBuf, String>) -> Option<String> {
    let (folder, link) = match link.strip_prefix(REPOSITORY) {
        Some(path) => (Path::new(""), path),
        None if link.contains("://") || link.starts_with("mailto:") => return None,
        None => (page.parent().unwrap(), link),
    };
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() { Some(page.to_owned()) } else { plain(&folder.join(path)) };
    let Some(target) = target else { return Some("outside of the repository".into()) };
    if !root().join(&target).exists() {
        return Some(format!("there is no {}", target.display()));
    }
    let anchor = anchor?;
    match pages.get(&target) {
        Some(text) if anchors(text).contains(anchor) => None,
        Some(_) => Some(format!("{} has no heading with this anchor", target.display())),
        None => Some("an anchor in what is no page".into()),
    }
}

#[test]
fn links_are_valid() {
    let pages = files(".md");
    let mut count = 0;
    let mut broken = Vec::new();
    for (page, text) in &pages {
        for link in links(text) {
            count += 1;
            let why = complaint(page, &link, &pages);
            broken.extend(why.map(|why| format!("{}: ({link}): {why}", page.display())));
        }
    }
    println!("{} pages, {count} links", pages.len());
    assert!(pages.len() > 20 && count > 50, "{} pages, {count} links: some were not seen", pages.len());
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// Each protection against an attacker has a test, given by its name.
#[test]
fn tests_that_the_threat_model_names_exist() {
    let pages = files(".md");
    let is_name = |code: &&str| {
        let is_snake = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        code.matches('_').count() >= 2 && code.chars().all(is_snake)
    };
    let named: Vec<&str> =
        pages[Path::new("SECURITY.md")].split('`').skip(1).step_by(2).filter(is_name).collect();
    let sources = files(".rs");
    let is_there = |name: &str| {
        // In a file of tests, or in a test module.
        let tests = ["", "    "].map(|indent| format!("#[test]\n{indent}fn {name}() {{"));
        sources.values().any(|text| tests.iter().any(|test| text.contains(test)))
    };
    let missing: Vec<&str> = named.iter().copied().filter(|name| !is_there(name)).collect();
    println!("{} tests are named", named.len());
    assert!(named.len() > 10 && missing.is_empty(), "{} are named, not there: {missing:?}", named.len());
}

#[test]
fn each_kind_of_broken_link_is_found() {
    let text = "# One `two` (three), [four](x.md): five\n## Twice\n## Twice\n```sh\n# no heading\n[no](link)\n```\n`[no](link)`\n\
                [a](b.md#c)\n<img src=\"d.svg\">![e](f.svg)\n[g]: h.md\n";
    assert_eq!(links(text), ["h.md", "x.md", "b.md#c", "f.svg", "d.svg"]);
    assert_eq!(anchors(text), ["one-two-three-four-five", "twice", "twice-1"].map(str::to_owned).into());
    let pages = BTreeMap::from([(PathBuf::from("README.md"), "# Here".to_owned())]);
    let says = |page: &str, link: &str| complaint(Path::new(page), link, &pages);
    for (page, link) in [
        ("README.md", "#here"),
        ("docs/a.md", "../README.md#here"),
        ("docs/a.md", "https://github.com/ferroce/ferroce/blob/main/README.md#here"),
        ("README.md", "stack/src"),
        ("README.md", "https://example.org/nothing"),
    ] {
        assert_eq!(says(page, link), None, "{link} on {page}");
    }
    for (page, link) in [
        ("README.md", "#there"),
        ("README.md", "nothing.md"),
        ("docs/a.md", "README.md"),
        ("docs/a.md", "../README.md#there"),
        ("README.md", "Cargo.toml#here"),
        ("README.md", "../elsewhere.md"),
        ("stack/README.md", "https://github.com/ferroce/ferroce/blob/main/nothing.md"),
    ] {
        assert!(says(page, link).is_some(), "{link} on {page}");
    }
}
