//! The report as text.

use std::fmt::Write;
use std::time::Duration;

use super::merged::{Merged, Together, seconds};
use crate::quantity::Bytes;

/// The most ranks that are listed one per line.
const RANKS_MAX: usize = 64;

pub(super) fn draw(merged: &Merged<'_>) -> String {
    let mut text = String::new();
    // Writing to a string can't fail.
    let _ = write(&mut text, merged);
    text
}

fn write(text: &mut String, merged: &Merged<'_>) -> std::fmt::Result {
    let Merged { diagnosis, ranks, operations } = merged;
    writeln!(text, "communicator {:016x}: {} ranks", diagnosis.communicator, diagnosis.size)?;
    for (rank, part) in ranks.iter().take(RANKS_MAX) {
        let (recording, own) = (part.recording, part.own);
        writeln!(
            text,
            "  rank {rank:>3}  process {} on {} ({}), {} calls: {}",
            recording.process,
            recording.host,
            recording.device,
            own.calls,
            part.state()
        )?;
    }
    if ranks.len() > RANKS_MAX {
        writeln!(text, "  and {} more", ranks.len() - RANKS_MAX)?;
    }
    if !diagnosis.missing.is_empty() {
        let missing: Vec<String> = diagnosis.missing.iter().take(RANKS_MAX).map(u32::to_string).collect();
        writeln!(text, "  no recording of {} ranks: {}", diagnosis.missing.len(), missing.join(", "))?;
    }
    if !operations.is_empty() {
        writeln!(
            text,
            "\n  {:>12} {:>11} {:>11} {:>5} {:>11}  operation",
            "began", "size", "began later", "rank", "time"
        )?;
        let start = operations.iter().find_map(Together::began).unwrap_or_default();
        operations.iter().try_for_each(|operation| row(text, operation, start))?;
    }
    if diagnosis.findings.is_empty() {
        writeln!(text, "\n  no rank hangs, is very late, or has a slow port")
    } else {
        text.push('\n');
        diagnosis.findings.iter().try_for_each(|finding| writeln!(text, "  {finding}"))
    }
}

fn row(text: &mut String, operation: &Together<'_>, start: Duration) -> std::fmt::Result {
    let Some((_, first)) = operation.parts.first() else { return Ok(()) };
    let began = operation.began().map_or("-".to_owned(), |began| {
        let after = began.saturating_sub(start);
        format!("+{}", seconds(after))
    });
    let (later, rank) = match operation.last() {
        Some((rank, later)) => (seconds(later), rank.to_string()),
        None => ("-".to_owned(), "-".to_owned()),
    };
    let time = operation.time().map_or("not ended".to_owned(), seconds);
    writeln!(
        text,
        "  {began:>12} {:>11} {later:>11} {rank:>5} {time:>11}  {}",
        Bytes(first.bytes).to_string(),
        first.operation
    )
}
