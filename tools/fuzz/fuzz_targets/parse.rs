#![no_main]

use ferroce::wire::{Extension, Packet, icrc};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    let _ = Packet::decode_ip(frame);
    // A random input hardly ever has a valid ICRC, so the packet is also examined without that check.
    let decoded = Packet::decode(frame);
    if let Ok(packet) = &decoded {
        assert!(packet.covered().len() + 4 <= frame.len());
        assert!(packet.payload.len() + packet.bth.pad() <= packet.covered().len());
        let icrc = icrc::compute(packet.header, packet.covered());
        assert_eq!(packet.check_icrc().is_ok(), icrc == Some(packet.icrc));
        for extension in packet.opcode.extensions() {
            let readable = match extension {
                Extension::Deth => packet.deth().is_some(),
                Extension::Reth => packet.reth().is_some(),
                Extension::AtomicEth => packet.atomic_eth().is_some(),
                Extension::Aeth => packet.aeth().is_some(),
                Extension::AtomicAckEth => packet.atomic_ack_eth().is_some(),
                Extension::ImmDt => packet.immdt().is_some(),
                Extension::Ieth => packet.ieth().is_some(),
                Extension::Feth => packet.feth().is_some(),
            };
            assert!(readable, "{} without its {extension:?}", packet.opcode);
        }
    }
    if Packet::parse(frame).is_ok() {
        assert!(decoded.is_ok());
    }
});
