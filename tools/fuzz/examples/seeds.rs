//! Makes the first corpus of each target from the captures in pcap-fixtures.

use std::error::Error;
use std::fs;
use std::path::Path;

use ferroce_wire::{Packet, Qpn};

fn main() -> Result<(), Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = here.join("corpus");
    for target in ["parse", "parse_emit_parse", "cm"] {
        fs::create_dir_all(corpus.join(target))?;
    }
    let (mut frames, mut mads) = (0, 0);
    for entry in fs::read_dir(here.join("../../pcap-fixtures"))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "pcap") {
            continue;
        }
        let file = fs::read(&path)?;
        // Little-endian pcap: a header of 24 bytes, then records with headers of 16.
        let mut rest = file.get(24..).ok_or("no pcap header")?;
        while let Some((header, after)) = rest.split_first_chunk::<16>() {
            let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
            let (frame, after) = after.split_at_checked(length).ok_or("cut in a record")?;
            rest = after;
            frames += 1;
            for target in ["parse", "parse_emit_parse"] {
                fs::write(corpus.join(target).join(format!("frame-{frames}")), frame)?;
            }
            let packet = Packet::parse(frame)?;
            if packet.bth.dest_qpn() == Qpn::GSI {
                mads += 1;
                fs::write(corpus.join("cm").join(format!("mad-{mads}")), packet.payload)?;
            }
        }
    }
    println!("{frames} frames and {mads} MADs in {}", corpus.display());
    Ok(())
}
