//! Numbers in text. Unlike with `str::parse`, a sign is refused.

use std::str::FromStr;

/// A decimal number.
pub(crate) fn decimal<T: FromStr>(text: &str) -> Option<T> {
    if text.starts_with('+') { None } else { text.parse().ok() }
}

/// A decimal number, or a hexadecimal one after `0x`.
pub(crate) fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) if digits.starts_with('+') => None,
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => decimal(text),
    }
}
