//! The characters of untrusted text that may be shown.

/// Whether a character does more on a terminal than fill its cell: controls (C0 and C1), marks and overrides of the direction of
/// text, line and paragraph separators, and format characters without a width.
///
/// Public because the crates that use this one show untrusted text by the same rule.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}
