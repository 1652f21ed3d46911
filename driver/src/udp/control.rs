//! Ancillary data of `sendmsg` and `recvmsg`.

const WORD: usize = size_of::<usize>();
const HEADER: usize = size_of::<libc::cmsghdr>();

/// A buffer for the control messages of one datagram.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(super) struct Control {
    pub(super) bytes: [u8; Control::CAPACITY],
}

impl Control {
    /// Six messages of up to eight bytes, or the kernel's report of an ICMP message.
    pub(super) const CAPACITY: usize = 6 * (HEADER + 8);

    pub(super) const fn empty() -> Control {
        Control { bytes: [0; Control::CAPACITY] }
    }

    /// Appends a message after the first `len` bytes. Returns the new length.
    pub(super) fn push(&mut self, len: usize, level: i32, kind: i32, data: &[u8]) -> usize {
        let end = len + HEADER + data.len();
        self.bytes[len..len + WORD].copy_from_slice(&(HEADER + data.len()).to_ne_bytes());
        self.bytes[len + WORD..len + WORD + 4].copy_from_slice(&level.to_ne_bytes());
        self.bytes[len + WORD + 4..len + HEADER].copy_from_slice(&kind.to_ne_bytes());
        self.bytes[len + HEADER..end].copy_from_slice(data);
        end.next_multiple_of(WORD)
    }

    /// The messages in the first `len` bytes, as the kernel wrote them: level, kind, data.
    pub(super) fn messages(&self, len: usize) -> impl Iterator<Item = (i32, i32, &[u8])> {
        let mut rest = &self.bytes[..len.min(Control::CAPACITY)];
        std::iter::from_fn(move || {
            let (length, fields) = rest.split_first_chunk::<WORD>()?;
            let length = usize::from_ne_bytes(*length);
            let (level, fields) = fields.split_first_chunk::<4>()?;
            let kind = fields.first_chunk::<4>()?;
            let data = rest.get(HEADER..length)?;
            rest = rest.get(length.next_multiple_of(WORD)..).unwrap_or_default();
            Some((i32::from_ne_bytes(*level), i32::from_ne_bytes(*kind), data))
        })
    }
}

/// The number in the data of a message, which the kernel writes as one byte or as an `int`.
pub(super) fn number(data: &[u8]) -> Option<i32> {
    match data {
        [byte] => Some(i32::from(*byte)),
        _ => data.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_written() {
        let mut control = Control::empty();
        let len = control.push(0, 17, 103, &1000u16.to_ne_bytes());
        let len = control.push(len, 0, 1, &[0x6a]);
        let len = control.push(len, 0, 2, &64i32.to_ne_bytes());
        let read: Vec<_> =
            control.messages(len).map(|(level, kind, data)| (level, kind, data.len())).collect();
        assert_eq!(read, [(17, 103, 2), (0, 1, 1), (0, 2, 4)]);
        let numbers: Vec<_> = control.messages(len).filter_map(|(_, _, data)| number(data)).collect();
        assert_eq!(numbers, [0x6a, 64]);
        assert_eq!(len % WORD, 0);
    }

    #[test]
    fn truncated_messages_are_omitted() {
        let mut control = Control::empty();
        let len = control.push(0, 0, 2, &64i32.to_ne_bytes());
        assert_eq!(control.messages(len - 5).count(), 0);
        assert_eq!(control.messages(0).count(), 0);
        // A length of zero must not cause an endless loop.
        assert_eq!(Control::empty().messages(Control::CAPACITY).count(), 0);
    }
}
