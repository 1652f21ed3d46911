//! Standard output, which can be a full disk or a pipe that nobody reads any more.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write};

use crate::failure::{Failure, OrFail};

/// Writes a line to standard output; fails if it can't be written.
macro_rules! say {
    ($($what:tt)*) => { $crate::output::line(format_args!($($what)*)) };
}

pub(crate) use say;

/// See [`say`]. Where a reader has gone, it has had enough.
pub(crate) fn line(text: Arguments<'_>) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.or_fail(|| "standard output".into()),
    }
}
