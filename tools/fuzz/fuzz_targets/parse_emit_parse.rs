#![no_main]

use ferroce::wire::{OwnedPacket, Packet};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    let mut frame = frame.to_vec();
    if !ferroce_fuzz::seal(&mut frame) {
        return;
    }
    let Ok(packet) = Packet::parse(&frame) else { return };
    let packet = OwnedPacket::from(&packet);
    let mut again = OwnedPacket::parse(&packet.emit()).expect("what is emitted parses");
    // It also covers what an owned packet does not keep: IPv4 flags, and the bytes of the pad.
    again.icrc = packet.icrc;
    assert_eq!(again, packet);
});
