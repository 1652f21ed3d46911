//! What may be shown of a text that somebody else has chosen.

/// Whether a character does something on a terminal but stand in its place: controls (C0 and C1), marks and overrides
/// of the direction of text, line and paragraph separators, and format characters without a width.
///
/// For the crates above, which show texts of others by the same rule.
pub fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}
