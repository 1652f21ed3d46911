//! The TCP connection beside the check: [messages](Message), after eight bytes of either end that name
//! the protocol and its version.
//!
//! It must live where large packets vanish, for that is what it is to tell. So a message goes in pieces,
//! each of which waits for a byte of the other end: TCP never has enough at once for a large segment.

use std::io::Write;
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

use super::message::{self, Message};
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::tcp::{Greeting, check_greeting, read_exact};

/// The protocol and its version.
const PREAMBLE: &Greeting = b"frcdoct\x01";
/// Either end answers within two resolutions of a neighbour and a wait for packets.
const PATIENCE: Duration = Duration::from_secs(15);

/// Fits the smallest path MTU there is.
const PIECE: usize = 200;
/// The receiver of a piece says so.
const GO_ON: u8 = b'+';

pub(super) struct Control {
    stream: TcpStream,
    interrupt: Interrupt,
}

impl Control {
    /// Greets the other end.
    pub(super) fn new(mut stream: TcpStream, interrupt: &Interrupt) -> Result<Control, Failure> {
        stream.set_nodelay(true).or_fail(|| "control connection".into())?;
        stream.set_write_timeout(Some(PATIENCE)).or_fail(|| "control connection".into())?;
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        let mut greeting = [0; PREAMBLE.len()];
        read_exact(&mut stream, &mut greeting, PATIENCE, interrupt)?;
        check_greeting(&greeting, PREAMBLE, "doctor")?;
        Ok(Control { stream, interrupt: interrupt.clone() })
    }

    /// The address at the other end.
    pub(super) fn peer(&self) -> Result<IpAddr, Failure> {
        let peer = self.stream.peer_addr().or_fail(|| "the other end's address".into())?;
        Ok(peer.ip().to_canonical())
    }

    pub(super) fn send(&mut self, message: &Message) -> Result<(), Failure> {
        let bytes = message.to_bytes().map_err(Failure::run)?;
        for piece in bytes.chunks(PIECE) {
            self.stream.write_all(piece).or_fail(|| "telling the other end".into())?;
            let mut answer = [0];
            read_exact(&mut self.stream, &mut answer, PATIENCE, &self.interrupt)?;
            if answer != [GO_ON] {
                return Err(Failure::run("the other end broke off in the middle of a control message"));
            }
        }
        Ok(())
    }

    /// The next message; `None` once the other end has hung up between two.
    pub(super) fn receive(&mut self) -> Result<Option<Message>, Failure> {
        // Only a peek tells an end between two messages from one within.
        self.stream.set_read_timeout(Some(PATIENCE)).or_fail(|| "control connection".into())?;
        if let Ok(0) = self.stream.peek(&mut [0]) {
            return Ok(None);
        }
        let mut prefix = [0; 4];
        read_exact(&mut self.stream, &mut prefix, PATIENCE, &self.interrupt)?;
        let mut bytes = prefix.to_vec();
        bytes.resize(prefix.len() + message::length(prefix).map_err(Failure::run)?, 0);
        let mut had = prefix.len();
        for piece in bytes.chunks_mut(PIECE) {
            read_exact(&mut self.stream, &mut piece[std::mem::take(&mut had)..], PATIENCE, &self.interrupt)?;
            self.stream.write_all(&[GO_ON]).or_fail(|| "telling the other end".into())?;
        }
        match Message::parse(&bytes[prefix.len()..]).map_err(Failure::run)? {
            Message::Failed(reason) => Err(Failure::run(format!("the other end failed: {reason}"))),
            message => Ok(Some(message)),
        }
    }

    /// Sends a message and takes the answer.
    pub(super) fn ask(&mut self, message: &Message) -> Result<Message, Failure> {
        self.send(message)?;
        self.receive()?.ok_or_else(|| Failure::run("the other end hung up in the middle of the check"))
    }
}

/// What came in place of an answer.
pub(super) fn unexpected(message: &Message) -> Failure {
    Failure::run(format!("the other end says {message:?}, which was not asked for"))
}
