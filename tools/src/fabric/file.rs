//! A description from a file.

use std::fs;
use std::ops::Range;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::allreduce::AllreduceSection;
use super::description::{Description, LinkSection, SwitchSection};
use super::traffic::Traffic;
use super::wrong::Wrong;
use crate::failure::{Failure, legible};

/// The most bytes of a file.
const MOST: u64 = 16 << 20;

/// Reads and checks a description. Errors name file, line and value.
pub(crate) fn read(path: &Path) -> Result<Description, Failure> {
    let named = path.display().to_string();
    let named = legible(&named);
    let wrong = |why: String| Failure::usage(format!("{named}: {why}"));
    // Opening a FIFO without a writer would block, and a device may never end.
    let metadata = fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    if !metadata.is_file() || metadata.len() > MOST {
        return Err(wrong(format!("must be a regular file of at most {MOST} bytes")));
    }
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    parse(&text).map_err(|(line, why)| Failure::usage(format!("{named}, line {line}: {}", legible(&why))))
}

/// Writes a description as a file. Omitted settings are comments, so the file names each setting.
pub(crate) fn write(description: &Description) -> Result<String, Failure> {
    let text = toml::to_string(description).map_err(|error| Failure::run(format!("--describe: {error}")))?;
    let mut file = String::new();
    let mut traffic = description.traffic.iter();
    // A table ends at an empty line or at the end of the text.
    for table in text.trim_end().split("\n\n") {
        let left_out = match table.lines().next() {
            Some("[links]") => description.links.left_out(),
            Some("[switches]") => description.switches.left_out(),
            Some("[allreduce]") => {
                description.allreduce.iter().flat_map(AllreduceSection::left_out).collect()
            }
            Some("[[traffic]]") => traffic.next().map(Traffic::left_out).unwrap_or_default(),
            _ => Vec::new(),
        };
        file += if file.is_empty() { "" } else { "\n" };
        file += table;
        file.push('\n');
        left_out.iter().for_each(|(key, value)| file += &format!("# {key}: {value}\n"));
    }
    Ok(file)
}

/// Omitted keys of a table, and the values that apply.
type LeftOut = Vec<(&'static str, &'static str)>;

/// The keys that are not given.
fn not_given<const N: usize>(keys: [(bool, &'static str, &'static str); N]) -> LeftOut {
    keys.into_iter().filter(|(is_given, ..)| !is_given).map(|(_, key, value)| (key, value)).collect()
}

impl LinkSection {
    fn left_out(&self) -> LeftOut {
        let uplink = "that of all links, as \"100G\"";
        not_given([(self.uplink_rate.is_some(), "uplink-rate", uplink)])
    }
}

impl SwitchSection {
    fn left_out(&self) -> LeftOut {
        not_given([
            (self.xoff.is_some(), "xoff", "off, alpha decides; or bytes, as \"100KB\""),
            (self.headroom.is_some(), "headroom", "what the link of each port needs; or bytes, as \"100KB\""),
            (self.watchdog.is_some(), "watchdog", "off; or a time, as \"10ms\""),
        ])
    }
}

impl AllreduceSection {
    fn left_out(&self) -> LeftOut {
        not_given([
            (self.ranks.is_some(), "ranks", "one at each host"),
            (self.chunk.is_some(), "chunk", "that of the library; or bytes, as \"64KiB\""),
            (self.eager.is_some(), "eager", "that of the library; or bytes, as \"16KiB\""),
        ])
    }
}

impl Traffic {
    fn left_out(&self) -> LeftOut {
        let is_timed = self.endless || self.load.is_some();
        let every = if self.endless { "all flows begin at start" } else { "one after the other" };
        not_given([
            (self.name.is_some(), "name", "the pattern"),
            (self.hosts.is_some() || !self.pairs.is_empty(), "hosts", "all; or some, as \"0-3,7\""),
            (self.count != 1 || is_timed, "count", "1"),
            (self.every.is_some() || self.load.is_some(), "every", every),
            (!self.start.0.is_zero(), "start", "0ns"),
            (self.stop.is_some() || !is_timed, "stop", "the limit"),
            (!self.spread.0.is_zero() || self.load.is_some(), "spread", "0ns"),
        ])
    }
}

/// An error has the line number, from 1.
pub(super) fn parse(text: &str) -> Result<Description, (usize, String)> {
    let line = |at: usize| 1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
    let description: Description = toml::from_str(text).map_err(|error| {
        let span = error.span().unwrap_or_default();
        let value = text.get(span.clone()).unwrap_or_default().lines().next().unwrap_or_default();
        let message =
            error.message().replace('\n', " ").replace(&format!("'{}': ", value.trim_matches('"')), "");
        let value = if value.is_empty() {
            String::new()
        } else {
            format!("{}{value}: ", key_before(text, span.start))
        };
        (line(span.start), format!("{value}{}", in_our_words(&message)))
    })?;
    match description.compile() {
        Ok(_) => Ok(description),
        Err(wrong) => Err((line(place(text, &wrong).start), wrong.to_string())),
    }
}

/// The key of the value at `at`: the key and the characters between.
fn key_before(text: &str, at: usize) -> String {
    let line = text.get(..at).unwrap_or_default().rsplit('\n').next().unwrap_or_default();
    match line.trim_end().strip_suffix('=') {
        None => String::new(),
        Some(before) => {
            let key = before.trim_end().rsplit(['{', ',', ' ', '\t']).next().unwrap_or_default();
            format!("{key} = ")
        }
    }
}

/// Replaces names of Rust types in a message.
fn in_our_words(message: &str) -> String {
    match message.rsplit_once(", expected ") {
        Some((what, "a boolean")) => format!("{what}, must be true or false, without quotes"),
        Some((what, "u8" | "u16" | "u32" | "u64" | "usize")) => {
            format!("{what}, must be a whole number, not below 0 and without quotes")
        }
        Some((what, "f32" | "f64")) => format!("{what}, must be a number without quotes"),
        _ => message.to_owned(),
    }
}

/// The range of a value, or of the table that it would be in.
fn place(text: &str, wrong: &Wrong) -> Range<usize> {
    let Ok(table) = DeTable::parse(text) else { return 0..0 };
    let mut span = 0..0;
    let root = table.into_inner();
    let mut here: Option<&DeValue<'_>> = None;
    for (depth, key) in wrong.place.split('.').enumerate() {
        let next = match (depth, here) {
            (0, _) => root.iter().find(|(name, _)| name.get_ref() == key).map(|(_, value)| value),
            (_, Some(DeValue::Table(table))) => {
                table.iter().find(|(name, _)| name.get_ref() == key).map(|(_, value)| value)
            }
            (_, Some(DeValue::Array(array))) => key.parse().ok().and_then(|at: usize| array.get(at)),
            _ => None,
        };
        let Some(next) = next else { return span };
        span = next.span();
        here = Some(next.get_ref());
    }
    span
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
seed = 7

[topology.star]
hosts = 5

[links]
rate = "25G"

[switches]
kmin = "50KB"
kmax = "200KB"

[[traffic]]
pattern = "incast"
to = 0
bytes = "1MB"
"#;

    #[test]
    fn a_file_is_read() {
        let description = parse(FILE).unwrap();
        assert_eq!(description.seed, 7);
        let again = write(&description).unwrap();
        assert_eq!(parse(&again).unwrap(), description, "{again}");
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (from, to, line, words) in [
            ("\"25G\"", "\"25\"", 8, &["25", "a rate with its unit"][..]),
            ("rate =", "rats =", 8, &["unknown field `rats`", "`rate`"]),
            ("\"200KB\"", "\"20KB\"", 11, &["switches.kmin = 50KB", "less than Kmax, 20KB"]),
            ("to = 0", "to = 5", 16, &["traffic.0.to = 5", "0 to 4"]),
            ("bytes = \"1MB\"", "", 15, &["traffic.0.pattern = incast", "bytes"]),
            ("to = 0\n", "", 14, &["traffic.0.to = none"]),
            ("hosts = 5", "hosts = -5", 5, &["-5"]),
            ("hosts = 5", "hosts = 1", 5, &["topology.star.hosts = 1", "2 to"]),
            ("[links]", "[links", 7, &[""]),
            ("\"incast\"", "\"outcast\"", 15, &["outcast", "`incast`"]),
        ] {
            let text = FILE.replace(from, to);
            let (found, why) = parse(&text).unwrap_err();
            assert!(words.iter().all(|word| why.contains(word)), "{text}\n{found}: {why}");
            assert_eq!(found, line, "{text}\n{why}");
        }
    }
}
