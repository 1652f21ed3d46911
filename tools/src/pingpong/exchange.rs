//! The exchange of addresses over TCP, as `ibv_rc_pingpong` does it.
//!
//! Either end sends one message: `LID:QPN:PSN:GID` in hexadecimal digits, 4, 6, 6 and 32 of them,
//! and a NUL. The server answers once its queue pair is connected; the client ends with `done` and
//! a NUL, and both close.

use std::fmt;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use ferroce::{Gid, Psn, Qpn};

use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::tcp::read_exact;

/// What a peer must know of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    /// 0 on Ethernet.
    pub(super) lid: u16,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    pub(super) gid: Gid,
}

/// Bytes of a message, its NUL included.
const MESSAGE: usize = 52;
const DONE: &[u8; 5] = b"done\0";
/// How long the other end may take for its part.
const PATIENCE: Duration = Duration::from_secs(20);

impl Destination {
    fn to_message(self) -> [u8; MESSAGE] {
        let Destination { lid, qpn, psn, gid } = self;
        let text =
            format!("{lid:04x}:{:06x}:{:06x}:{:032x}", qpn.value(), psn.value(), u128::from_be_bytes(gid.0));
        let mut message = [0; MESSAGE];
        message[..text.len()].copy_from_slice(text.as_bytes());
        message
    }

    fn from_message(message: &[u8; MESSAGE]) -> Option<Destination> {
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

/// Tells the peer.
pub(super) fn send(stream: &mut TcpStream, destination: Destination) -> Result<(), Failure> {
    stream.write_all(&destination.to_message()).or_fail(|| "sending the own address".into())
}

/// Learns of the peer.
pub(super) fn receive(stream: &mut TcpStream, interrupt: &Interrupt) -> Result<Destination, Failure> {
    let mut message = [0; MESSAGE];
    read_exact(stream, &mut message, PATIENCE, interrupt)?;
    let destination = Destination::from_message(&message).ok_or_else(|| {
        Failure::run(format!(
            "the peer sent '{}', which is not LID:QPN:PSN:GID as ibv_rc_pingpong has it",
            message.escape_ascii()
        ))
    })?;
    if destination.gid == Gid::default() {
        return Err(Failure::run("the peer sent no GID; RoCE needs one: give it -g INDEX"));
    }
    Ok(destination)
}

/// The client's last word.
pub(super) fn send_done(stream: &mut TcpStream) -> Result<(), Failure> {
    stream.write_all(DONE).or_fail(|| "telling the server that we are done".into())
}

/// Waits for the client's last word.
pub(super) fn receive_done(stream: &mut TcpStream, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut done = [0; DONE.len()];
    read_exact(stream, &mut done, PATIENCE, interrupt)?;
    if &done != DONE {
        return Err(Failure::run(format!(
            "the client ended with '{}' instead of 'done'",
            done.escape_ascii()
        )));
    }
    Ok(())
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
        // Every byte matters: none can become something that is no digit, colon or NUL.
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
