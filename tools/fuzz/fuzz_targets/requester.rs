#![no_main]

use ferroce_fuzz::requester;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| requester::run(input));
