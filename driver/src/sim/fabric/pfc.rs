//! PFC frames (IEEE 802.1Qbb, IEEE 802.3 annex 31D).

use super::config::CLASSES;

/// Bytes of a PFC frame without its FCS.
pub(super) const LENGTH: usize = 60;

const DESTINATION: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 1];
const MAC_CONTROL: [u8; 2] = [0x88, 0x08];
const OPCODE: [u8; 2] = [0x01, 0x01];

/// A frame that pauses the classes of `pause` for `quanta` of 512 bit times, and resumes those of `resume`.
pub(super) fn frame(port: u32, pause: u8, resume: u8, quanta: u16) -> [u8; LENGTH] {
    let mut frame = [0; LENGTH];
    let [a, b, c, d] = port.to_be_bytes();
    frame[..6].copy_from_slice(&DESTINATION);
    frame[6..12].copy_from_slice(&[0x06, 0, a, b, c, d]);
    frame[12..14].copy_from_slice(&MAC_CONTROL);
    frame[14..16].copy_from_slice(&OPCODE);
    frame[17] = pause | resume;
    for class in (0..CLASSES).filter(|class| pause & 1 << class != 0) {
        frame[18 + 2 * class..][..2].copy_from_slice(&quanta.to_be_bytes());
    }
    frame
}

/// The quanta of each class that a PFC frame names, if it is one.
pub(super) fn read(frame: &[u8]) -> Option<[Option<u16>; CLASSES]> {
    let is_pfc = frame.len() >= LENGTH && frame[12..14] == MAC_CONTROL && frame[14..16] == OPCODE;
    is_pfc.then(|| {
        std::array::from_fn(|class| {
            let quanta = u16::from_be_bytes([frame[18 + 2 * class], frame[19 + 2 * class]]);
            (frame[17] & 1 << class != 0).then_some(quanta)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_frame_reads_back() {
        let frame = frame(5, 0b1000, 0b0001, 0x1234);
        let mut quanta = [None; CLASSES];
        (quanta[0], quanta[3]) = (Some(0), Some(0x1234));
        assert_eq!(read(&frame), Some(quanta));
        assert_eq!((read(&frame[..LENGTH - 1]), read(&[0; 60])), (None, None));
    }
}
