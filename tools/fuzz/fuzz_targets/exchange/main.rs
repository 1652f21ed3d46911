//! What a peer says outside of RoCE, before there is a connection: of the bytes the first says to whom.
#![no_main]

mod doctor;
mod perf;
mod perftest;
mod pingpong;

use ferroce_collectives::fuzzing as rendezvous;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 6 {
        0 => pingpong::run(bytes),
        1 => perf::run(bytes),
        2 => rendezvous::hello(bytes),
        3 => rendezvous::answer(bytes),
        4 => perftest::run(bytes),
        _ => doctor::run(bytes),
    }
});
