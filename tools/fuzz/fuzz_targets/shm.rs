#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| ferroce::driver::shm::attack::play(script));
