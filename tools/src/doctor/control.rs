//! The TCP connection of the check: eight bytes of each end with the name and version of the protocol, then
//! [messages](DoctorMessage).
//!
//! The connection has to work on paths that drop large packets, since the check is to find these. So a message is sent
//! in pieces of 200 bytes, each of which the other end answers with one byte: TCP never has enough data for a large
//! segment.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use super::message::DoctorMessage;
use crate::control_message;
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::tcp::{Greeting, check_greeting, read_exact};

/// The protocol and its version.
const PREAMBLE: &Greeting = b"frcdoct\x02";
/// Fits into the smallest path MTU.
const PIECE: usize = 200;
/// The receiver's answer to a piece.
const GO_ON: u8 = b'+';

/// The most characters of an unexpected message that are shown.
const SHOWN: usize = 80;
/// The interval for checking interrupts and receiving packets: the port buffers packets for this long.
const TICK: Duration = Duration::from_millis(10);

pub(super) struct DoctorControl {
    stream: TcpStream,
    interrupt: Interrupt,
    limits: Limits,
    deadline: Instant,
}

/// Time limits for the other end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// For one answer.
    pub(super) answer: Duration,
    /// For the whole check.
    pub(super) whole: Duration,
}

impl DoctorControl {
    /// Exchanges greetings with the other end.
    pub(super) fn new(
        mut stream: TcpStream,
        limits: Limits,
        interrupt: &Interrupt,
    ) -> Result<DoctorControl, Failure> {
        stream.set_nodelay(true).or_fail(|| "control connection".into())?;
        // So little data is in flight that a write does not block.
        stream.set_write_timeout(Some(limits.answer)).or_fail(|| "control connection".into())?;
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        let mut control = DoctorControl {
            stream,
            interrupt: interrupt.clone(),
            limits,
            deadline: Instant::now() + limits.whole,
        };
        let mut greeting = [0; PREAMBLE.len()];
        control.read_exact(&mut greeting)?;
        check_greeting(&greeting, PREAMBLE, "doctor")?;
        Ok(control)
    }

    /// Restarts the time, with other limits.
    pub(super) fn limit(&mut self, limits: Limits) {
        self.limits = limits;
        self.deadline = Instant::now() + limits.whole;
    }

    /// The address of the other end.
    pub(super) fn peer(&self) -> Result<IpAddr, Failure> {
        let peer = self.stream.peer_addr().or_fail(|| "the other end's address".into())?;
        Ok(peer.ip().to_canonical())
    }

    pub(super) fn send(&mut self, message: &DoctorMessage) -> Result<(), Failure> {
        let bytes = message.to_bytes().map_err(Failure::run)?;
        for piece in bytes.chunks(PIECE) {
            self.stream.write_all(piece).or_fail(|| "sending to the other end".into())?;
            let mut answer = [0];
            self.read_exact(&mut answer)?;
            if answer != [GO_ON] {
                return Err(Failure::run(
                    "the other end closed the connection in the middle of a control message",
                ));
            }
        }
        Ok(())
    }

    /// The next message; `None` if the other end has closed the connection between two messages.
    pub(super) fn receive(&mut self) -> Result<Option<DoctorMessage>, Failure> {
        self.receive_while(|| Ok(()))
    }

    fn receive_while(
        &mut self,
        meanwhile: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Option<DoctorMessage>, Failure> {
        if !self.has_more(meanwhile)? {
            return Ok(None);
        }
        let mut prefix = [0; 4];
        self.read_exact(&mut prefix)?;
        let mut bytes = prefix.to_vec();
        bytes.resize(prefix.len() + control_message::length(prefix).map_err(Failure::run)?, 0);
        let mut had = prefix.len();
        for piece in bytes.chunks_mut(PIECE) {
            self.read_exact(&mut piece[std::mem::take(&mut had)..])?;
            self.stream.write_all(&[GO_ON]).or_fail(|| "sending to the other end".into())?;
        }
        match DoctorMessage::parse(&bytes[prefix.len()..]).map_err(Failure::run)? {
            DoctorMessage::Failed(reason) => Err(Failure::run(format!("the other end failed: {reason}"))),
            message => Ok(Some(message)),
        }
    }

    /// Waits for the next message. A peek distinguishes a connection that was closed between two messages from one
    /// closed within a message. After a timeout, the following read reports it.
    fn has_more(&mut self, mut meanwhile: impl FnMut() -> Result<(), Failure>) -> Result<bool, Failure> {
        self.stream.set_read_timeout(Some(TICK)).or_fail(|| "control connection".into())?;
        let deadline = Instant::now() + self.patience()?;
        while Instant::now() < deadline {
            self.interrupt.check()?;
            meanwhile()?;
            match self.stream.peek(&mut [0]) {
                Ok(length) => return Ok(length > 0),
                Err(error)
                    if [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted]
                        .contains(&error.kind()) => {}
                Err(error) => return Err(error).or_fail(|| "control connection".into()),
            }
        }
        Ok(true)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), Failure> {
        let patience = self.patience()?;
        read_exact(&mut self.stream, buffer, patience, &self.interrupt)
    }

    /// The time limit for the next read.
    fn patience(&self) -> Result<Duration, Failure> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Failure::run(format!(
                "the other end has not answered within {:?}",
                self.limits.whole
            )));
        }
        Ok(left.min(self.limits.answer))
    }

    /// Sends a message and returns the answer.
    pub(super) fn ask(&mut self, message: &DoctorMessage) -> Result<DoctorMessage, Failure> {
        self.ask_while(message, || Ok(()))
    }

    /// As [`ask`](DoctorControl::ask), and calls `meanwhile` repeatedly until the answer arrives.
    pub(super) fn ask_while(
        &mut self,
        message: &DoctorMessage,
        meanwhile: impl FnMut() -> Result<(), Failure>,
    ) -> Result<DoctorMessage, Failure> {
        self.send(message)?;
        self.receive_while(meanwhile)?
            .ok_or_else(|| Failure::run("the other end closed the connection in the middle of the check"))
    }
}

/// The failure for a message in place of an answer.
pub(super) fn unexpected(message: &DoctorMessage) -> Failure {
    let said: String = format!("{message:?}").chars().take(SHOWN).collect();
    Failure::run(format!("the other end sent {said}, which was not expected"))
}
