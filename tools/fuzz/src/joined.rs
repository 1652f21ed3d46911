//! Frames that contain several packets, as captured before segmentation by the kernel or a network card.

use crate::packet::seal;

/// The frame after the first two bytes of an input, which are the length of its first packet. The ICRC of that packet
/// is corrected; without this, hardly any input would be split.
pub fn frame(input: &[u8]) -> Option<Vec<u8>> {
    let (length, frame) = input.split_first_chunk::<2>()?;
    let mut frame = frame.to_vec();
    let length = usize::from(u16::from_be_bytes(*length));
    if let Some(mut first) = frame.get(..length).and_then(first_packet)
        && seal(&mut first)
    {
        let icrc = length - 4..length;
        frame[icrc.clone()].copy_from_slice(&first[icrc]);
    }
    Some(frame)
}

/// An input with several packets to one queue pair, each given as a frame.
pub fn input_of(packets: &[&[u8]]) -> Option<Vec<u8>> {
    let first = packets.first()?;
    let mut frame = first.to_vec();
    for packet in &packets[1..] {
        frame.extend_from_slice(packet.get(headers(packet)?..)?);
    }
    let length = frame.len();
    put_lengths(&mut frame, length)?;
    Some([&(first.len() as u16).to_be_bytes()[..], &frame].concat())
}

/// A pcap file of one frame.
pub fn capture(frame: &[u8]) -> Vec<u8> {
    let mut file = Vec::with_capacity(40 + frame.len());
    // Nanoseconds, version 2.4, snapshots of 64 KiB, Ethernet; a record at 0 s.
    for word in [0xa1b2_3c4d, 0x0004_0002, 0, 0, 0x10000, 1, 0, 0, frame.len() as u32, frame.len() as u32] {
        file.extend_from_slice(&u32::to_le_bytes(word));
    }
    file.extend_from_slice(frame);
    file
}

/// The bytes of a frame as one packet, with the lengths corrected.
fn first_packet(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut packet = bytes.to_vec();
    put_lengths(&mut packet, bytes.len())?;
    Some(packet)
}

/// The offset of the BTH in a frame without tags and options.
fn headers(frame: &[u8]) -> Option<usize> {
    match *frame.get(12..14)?.first_chunk()? {
        [0x08, 0x00] => Some(14 + 20 + 8),
        [0x86, 0xdd] => Some(14 + 40 + 8),
        _ => None,
    }
}

/// Writes the length of a frame to its headers.
fn put_lengths(frame: &mut [u8], length: usize) -> Option<()> {
    let bth = headers(frame)?;
    let mut put = |at: usize, length: usize| {
        frame.get_mut(at..at + 2)?.copy_from_slice(&u16::try_from(length).ok()?.to_be_bytes());
        Some(())
    };
    put(bth - 4, length.checked_sub(bth - 8)?)?;
    match bth {
        42 => put(16, length - 14),
        _ => put(18, length.checked_sub(54)?),
    }
}
