#![no_main]

use ferroce_fuzz::responder;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| responder::run(input));
