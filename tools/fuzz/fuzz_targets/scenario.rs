#![no_main]

use ferroce_tools::fabric;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| {
    let Ok(text) = std::str::from_utf8(file) else { return };
    if let Err((line, why)) = fabric::check(text) {
        assert!(!why.is_empty());
        assert!(line <= 1 + text.lines().count(), "line {line} of {}", text.lines().count());
    }
});
