//! The message of `ibv_rc_pingpong`, 52 bytes: `LID:QPN:PSN:GID` in hexadecimal digits, 4, 6, 6 and 32 of them, and a
//! NUL.

use std::fmt;

use ferroce::{Gid, Psn, Qpn};

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// 0 on Ethernet.
    pub lid: u16,
    /// The queue pair.
    pub qpn: Qpn,
    /// The PSN of its first packet.
    pub psn: Psn,
    /// Its GID.
    pub gid: Gid,
}

/// Bytes of a message, its NUL included.
pub const MESSAGE: usize = 52;

impl Destination {
    /// As written by ibv_rc_pingpong.
    pub fn to_message(self) -> [u8; MESSAGE] {
        let Destination { lid, qpn, psn, gid } = self;
        let text =
            format!("{lid:04x}:{:06x}:{:06x}:{:032x}", qpn.value(), psn.value(), u128::from_be_bytes(gid.0));
        let mut message = [0; MESSAGE];
        message[..text.len()].copy_from_slice(text.as_bytes());
        message
    }

    /// Parses it; `None` if it is invalid.
    pub fn from_message(message: &[u8; MESSAGE]) -> Option<Destination> {
        let text = std::str::from_utf8(message.strip_suffix(&[0])?).ok()?;
        let fields: Vec<&str> = text.split(':').collect();
        let &[lid, qpn, psn, gid] = fields.as_slice() else { return None };
        if fields.iter().any(|field| !field.bytes().all(|b| b.is_ascii_hexdigit())) {
            return None;
        }
        let number = |digits: &str, len: usize| {
            (digits.len() == len).then(|| u128::from_str_radix(digits, 16).ok()).flatten()
        };
        Some(Destination {
            lid: number(lid, 4)? as u16,
            qpn: Qpn::new(number(qpn, 6)? as u32),
            psn: Psn::new(number(psn, 6)? as u32),
            gid: Gid(number(gid, 32)?.to_be_bytes()),
        })
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Destination { lid, qpn, psn, gid } = self;
        write!(f, "LID 0x{lid:04x}, QPN 0x{:06x}, PSN 0x{:06x}, GID {gid}", qpn.value(), psn.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_that_of_ibv_rc_pingpong() {
        let destination = Destination {
            lid: 0,
            qpn: Qpn::new(0x11),
            psn: Psn::new(0xabcdef),
            gid: Gid::from_ipv4([10, 77, 0, 11].into()),
        };
        let message = destination.to_message();
        assert_eq!(&message[..], b"0000:000011:abcdef:00000000000000000000ffff0a4d000b\0");
        assert_eq!(Destination::from_message(&message), Some(destination));
    }

    #[test]
    fn other_messages_are_refused() {
        let good = b"0000:000011:abcdef:00000000000000000000ffff0a4d000b\0";
        assert!(Destination::from_message(good).is_some());
        // Every byte is significant: replacing any with one that is no digit, colon or NUL is an error.
        for at in 0..MESSAGE {
            for bad in [b'+', b'x', b' ', 0xff] {
                let mut message = *good;
                message[at] = bad;
                assert_eq!(Destination::from_message(&message), None, "byte {at} as {bad:#x}");
            }
        }
        for (at, bad) in [(4, b'0'), (0, b':'), (3, 0)] {
            let mut message = *good;
            message[at] = bad;
            assert_eq!(Destination::from_message(&message), None, "byte {at} as {bad:#x}");
        }
    }
}
