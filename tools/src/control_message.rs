//! The framing of messages on a control connection, for `perf` and `doctor`: JSON, preceded by its length as a
//! big-endian `u32` of at most 64 KiB.

use serde::{Deserialize, Serialize};

use crate::failure::{legible, quote};

/// Bytes of the length.
pub const LENGTH: usize = 4;
const MAX_LENGTH: u32 = 64 << 10;

/// The number of JSON bytes after this length prefix.
///
/// # Errors
/// The length is 0 or too large.
pub fn length(prefix: [u8; LENGTH]) -> Result<usize, String> {
    match u32::from_be_bytes(prefix) {
        length @ 1..=MAX_LENGTH => Ok(length as usize),
        length => Err(format!("a control message of {length} bytes: must be 1 to {MAX_LENGTH}")),
    }
}

/// The bytes of a message, with its length prefix.
///
/// # Errors
/// The message is too long.
pub(crate) fn to_bytes(message: &impl Serialize) -> Result<Vec<u8>, String> {
    let body = serde_json::to_vec(message).map_err(|error| format!("control message: {error}"))?;
    let prefix = (body.len() as u32).to_be_bytes();
    length(prefix)?;
    Ok([&prefix[..], &body].concat())
}

/// Parses the bytes after the length prefix.
///
/// # Errors
/// It is not such a message; the error has its bytes, escaped.
pub(crate) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, String> {
    serde_json::from_slice(body)
        .map_err(|error| format!("control message {}: {}", quote(body), legible(&error.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_bounds() {
        assert_eq!(length([0, 1, 0, 0]), Ok(65_536));
        assert!(length([0, 1, 0, 1]).is_err_and(|error| error.contains("65537")));
        assert!(length([0; 4]).is_err() && length([0xff; 4]).is_err());
        assert_eq!(to_bytes(&"yes").as_deref(), Ok(&b"\0\0\0\x05\"yes\""[..]));
        assert!(to_bytes(&"y".repeat(65_535)).is_err_and(|error| error.contains("65537")));
        assert_eq!(parse::<String>(b"\"yes\"").as_deref(), Ok("yes"));
    }
}
