#![no_main]

use ferroce_fuzz::selective;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| selective::run(input));
