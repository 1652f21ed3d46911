//! Shared code of the tests with captures.

use std::path::Path;

/// The frames of a capture in pcap-fixtures: pcap, little-endian.
pub(crate) fn frames(name: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures").join(name);
    let file = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(file[..4], [0xd4, 0xc3, 0xb2, 0xa1], "{name} is a little-endian pcap");
    let mut rest = &file[24..];
    let mut frames = Vec::new();
    while let Some((header, after)) = rest.split_at_checked(16) {
        let length = u32::from_le_bytes(header[8..12].try_into().unwrap()) as usize;
        frames.push(after[..length].to_vec());
        rest = &after[length..];
    }
    assert!(rest.is_empty() && !frames.is_empty(), "{name} ends in the middle of a record or has none");
    frames
}
