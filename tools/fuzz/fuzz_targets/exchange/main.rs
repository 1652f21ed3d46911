//! Messages of a peer outside of RoCE, before there is a connection, and the messages of collectives: the first byte
//! selects the protocol.
#![no_main]

mod doctor;
mod perf;
mod perftest;
mod pingpong;

use ferroce_collectives::fuzzing as collectives;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 9 {
        0 => pingpong::run(bytes),
        1 => perf::run(bytes),
        2 => collectives::hello(bytes),
        3 => collectives::answer(bytes),
        4 => perftest::run(bytes),
        5 => doctor::run(bytes),
        6 => collectives::control(bytes),
        7 => collectives::header(bytes),
        _ => collectives::immediate(bytes),
    }
});
