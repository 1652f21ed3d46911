//! The bytes of a frame in the network.

/// The parts of a frame that are stored inline: its headers, and its end with the ICRC.
const HEAD: usize = 120;
const TAIL: usize = 8;

/// The bytes of a frame, without the zeros between its headers and its end. With a thousand hosts, payload would fill the
/// caches; hosts of a simulation usually send zeros, because nothing reads them.
#[derive(Clone)]
pub(super) struct Contents {
    /// The whole of a short frame; the first and the last bytes of a longer one.
    ends: [u8; HEAD + TAIL],
    /// The bytes between them, if they are not all zero.
    middle: Box<[u8]>,
}

impl Contents {
    pub(super) fn empty() -> Contents {
        Contents { ends: [0; HEAD + TAIL], middle: Box::default() }
    }

    /// Stores `frame`.
    pub(super) fn set(&mut self, frame: &[u8]) {
        let Some((head, rest)) = frame.split_first_chunk::<HEAD>() else { return self.set_short(frame) };
        let Some((middle, tail)) = rest.split_last_chunk::<TAIL>() else { return self.set_short(frame) };
        self.ends[..HEAD].copy_from_slice(head);
        self.ends[HEAD..].copy_from_slice(tail);
        self.middle = if is_zero(middle) { Box::default() } else { middle.into() };
    }

    fn set_short(&mut self, frame: &[u8]) {
        self.ends[..frame.len()].copy_from_slice(frame);
        self.middle = Box::default();
    }

    /// The headers of a frame of `len` bytes, and the part of its payload that is stored with them.
    pub(super) fn headers(&self, len: usize) -> &[u8] {
        &self.ends[..headers_len(len)]
    }

    pub(super) fn headers_mut(&mut self, len: usize) -> &mut [u8] {
        &mut self.ends[..headers_len(len)]
    }

    /// Writes the frame to `frame`, whose length must be that of the frame.
    pub(super) fn write(&self, frame: &mut [u8]) {
        let len = frame.len();
        let Some((middle, tail)) = frame.get_mut(HEAD..).and_then(|rest| rest.split_last_chunk_mut::<TAIL>())
        else {
            return frame.copy_from_slice(&self.ends[..len]);
        };
        if self.middle.is_empty() {
            middle.fill(0);
        } else {
            middle.copy_from_slice(&self.middle);
        }
        *tail = std::array::from_fn(|at| self.ends[HEAD + at]);
        frame[..HEAD].copy_from_slice(&self.ends[..HEAD]);
    }

    /// The frame of `len` bytes.
    pub(super) fn to_vec(&self, len: usize) -> Vec<u8> {
        let mut frame = vec![0; len];
        self.write(&mut frame);
        frame
    }
}

/// Short frames are stored in one piece.
fn headers_len(len: usize) -> usize {
    if len < HEAD + TAIL { len } else { HEAD }
}

fn is_zero(bytes: &[u8]) -> bool {
    // Whole pieces without branches in between, so that the compiler vectorises them.
    let (pieces, rest) = bytes.as_chunks::<64>();
    pieces.iter().all(|piece| piece.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of each length near a limit of the storage, with a non-zero byte at each position.
    #[test]
    fn stored_frames_read_back_unchanged() {
        let mut contents = Contents::empty();
        for len in (0..300).chain([1500, 4200]) {
            let step = if len < 300 { 1 } else { 37 };
            for place in (0..=len).step_by(step) {
                let mut frame = vec![0; len];
                if let Some(byte) = frame.get_mut(place) {
                    *byte = 7;
                }
                contents.set(&frame);
                assert_eq!(contents.to_vec(len), frame, "{len} {place}");
                assert!(frame.starts_with(contents.headers(len)));
                assert!(contents.headers(len).len() >= len.min(HEAD));
                let is_kept = (HEAD..len.saturating_sub(TAIL)).contains(&place);
                assert_eq!(contents.middle.len(), if is_kept { len - HEAD - TAIL } else { 0 });
            }
        }
        contents.set(&[1; 4000]);
        contents.headers_mut(4000)[10] = 2;
        let mut frame = [1; 4000];
        frame[10] = 2;
        assert_eq!(contents.clone().to_vec(4000), frame);
        contents.set(&[0; 4000]);
        assert_eq!(contents.to_vec(4000), [0; 4000]);
    }
}
