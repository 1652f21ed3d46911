#![no_main]

use ferroce_fuzz::joined;
use ferroce_tools::dissect;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some(frame) = joined::frame(input) else { return };
    let packets = dissect::check(&joined::capture(&frame)).expect("a capture of one frame");
    // A packet is never shorter than its BTH and its ICRC.
    assert!(packets as usize <= frame.len() / 16, "{packets} packets in {} bytes", frame.len());
});
