//! Standard output, which can be a full disk or a pipe that nobody reads any more.

use std::fmt::Arguments;
use std::io::{self, BufWriter, ErrorKind, Write};

use crate::failure::{Failure, OrFail};

/// Writes a line to standard output; fails if it can't be written.
macro_rules! say {
    ($($what:tt)*) => { $crate::output::line(format_args!($($what)*)) };
}

pub(crate) use say;

/// See [`say`]. Where a reader has gone, it has had enough.
pub(crate) fn line(text: Arguments<'_>) -> Result<(), Failure> {
    write(format_args!("{text}\n")).map(drop)
}

/// Writes to standard output. Returns whether somebody still reads it.
pub(crate) fn write(text: Arguments<'_>) -> Result<bool, Failure> {
    // Standard output by itself writes line by line, and a report can have 200,000 lines.
    let mut stdout = BufWriter::new(io::stdout().lock());
    match stdout.write_fmt(text).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.or_fail(|| "standard output".into()).map(|()| true),
    }
}
