//! A description from a file.

use std::fs;
use std::ops::Range;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::description::Description;
use super::wrong::Wrong;
use crate::failure::{Failure, legible};

/// Bytes of a file at most.
const MOST: u64 = 16 << 20;

/// Reads and checks a description. What is wrong is told with file, line and value.
pub(crate) fn read(path: &Path) -> Result<Description, Failure> {
    let named = path.display().to_string();
    let named = legible(&named);
    let wrong = |why: String| Failure::usage(format!("{named}: {why}"));
    // A FIFO that nobody writes to would be waited for, and a device read for ever.
    let metadata = fs::metadata(path).map_err(|error| wrong(error.to_string()))?;
    if !metadata.is_file() || metadata.len() > MOST {
        return Err(wrong(format!("must be a regular file of at most {MOST} bytes")));
    }
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    parse(&text).map_err(|(line, why)| Failure::usage(format!("{named}, line {line}: {}", legible(&why))))
}

/// A description as a file. What is off or follows from the rest stands there as a comment.
pub(crate) fn write(description: &Description) -> Result<String, Failure> {
    let description = description.clone().resolve();
    let text = toml::to_string(&description);
    let text = text.map_err(|error| Failure::run(format!("--describe: {error}")))?;
    let mut out = String::new();
    for line in text.lines() {
        out.push_str(line);
        out.push('\n');
        for (section, is_given, comment) in [
            ("[links]", description.links.uplink_rate.is_some(), "uplink-rate: as rate"),
            ("[switches]", description.switches.xoff.is_some(), "xoff: none, alpha decides"),
            ("[switches]", description.switches.headroom.is_some(), "headroom: what each link needs"),
            ("[switches]", description.switches.watchdog.is_some(), "watchdog: off"),
        ] {
            if line == section && !is_given {
                out.push_str(&format!("# {comment}\n"));
            }
        }
    }
    Ok(out)
}

/// The line is that of what is wrong, from 1.
pub(super) fn parse(text: &str) -> Result<Description, (usize, String)> {
    let line = |at: usize| 1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
    let description: Description = toml::from_str(text).map_err(|error| {
        let span = error.span().unwrap_or_default();
        let value = text.get(span.clone()).unwrap_or_default().lines().next().unwrap_or_default();
        let value = if value.is_empty() { String::new() } else { format!("{value}: ") };
        (line(span.start), format!("{value}{}", error.message().replace('\n', " ")))
    })?;
    match description.compile() {
        Ok(_) => Ok(description),
        Err(wrong) => Err((line(place(text, &wrong).start), wrong.to_string())),
    }
}

/// Where a value is, or where it would have to be.
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
        assert_eq!(parse(&again).unwrap(), description.resolve(), "{again}");
        for line in ["# uplink-rate: as rate", "# xoff: none, alpha decides", "# watchdog: off"] {
            assert_eq!(again.lines().filter(|other| *other == line).count(), 1, "{again}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (from, to, line, words) in [
            ("\"25G\"", "\"25\"", 8, &["25", "a rate with its unit"][..]),
            ("rate =", "rats =", 8, &["unknown field `rats`", "`rate`"]),
            ("\"200KB\"", "\"20KB\"", 11, &["switches.kmin = 50KB", "less than kmax, 20KB"]),
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
