//! The TCP connection beside a measurement: [messages](Message), after eight bytes of either end that
//! name the protocol and its version.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::message::{Incoming, Message};
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::tcp::read_exact;

/// The protocol and its version.
const PREAMBLE: &[u8; 8] = b"frcperf\x02";
const PATIENCE: Duration = Duration::from_secs(10);
/// Messages that wait to be taken. Either end speaks in its turn, so one that sends more is broken.
const MAX_WAITING: usize = 16;

/// The connection, which never blocks once it is made.
pub(super) struct Control {
    stream: TcpStream,
    incoming: Incoming,
    messages: VecDeque<Message>,
    open: bool,
}

impl Control {
    /// Greets the other end.
    pub(super) fn new(mut stream: TcpStream, interrupt: &Interrupt) -> Result<Control, Failure> {
        stream.set_nodelay(true).or_fail(|| "control connection".into())?;
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        let mut greeting = [0; PREAMBLE.len()];
        read_exact(&mut stream, &mut greeting, PATIENCE, interrupt)?;
        if &greeting != PREAMBLE {
            return Err(Failure::run(format!(
                "the other end greets with '{}' instead of '{}': it is not `ferroce perf`, or of another version",
                greeting.escape_ascii(),
                PREAMBLE.escape_ascii()
            )));
        }
        stream.set_nonblocking(true).or_fail(|| "control connection".into())?;
        Ok(Control { stream, incoming: Incoming::default(), messages: VecDeque::new(), open: true })
    }

    /// Sends a message. If the other end is gone, [`receive`](Control::receive) will tell.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), Failure> {
        let bytes = message.to_bytes().map_err(Failure::run)?;
        let deadline = Instant::now() + PATIENCE;
        let mut rest = &bytes[..];
        while !rest.is_empty() && self.open {
            match self.stream.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
        }
        Ok(())
    }

    /// Takes what has arrived. Returns whether there was anything, and whether more may come.
    pub(super) fn receive(&mut self) -> Result<(bool, bool), Failure> {
        let mut chunk = [0; 4096];
        let mut any = false;
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.open = false,
                Ok(count) => {
                    self.incoming.extend(&chunk[..count]);
                    self.sort()?;
                    any = true;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.open = false,
            }
            break;
        }
        Ok((any, self.open))
    }

    /// Waits until the other end has closed the connection, within patience.
    pub(super) fn wait_closed(&mut self, interrupt: &Interrupt) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        while self.receive()?.1 && Instant::now() < deadline {
            interrupt.check()?;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The oldest message that has arrived.
    pub(super) fn take(&mut self) -> Option<Message> {
        self.messages.pop_front()
    }

    pub(super) fn has_message(&self) -> bool {
        !self.messages.is_empty()
    }

    /// Takes the messages that are whole.
    fn sort(&mut self) -> Result<(), Failure> {
        while let Some(message) = self.incoming.next().map_err(Failure::run)? {
            match message {
                Message::Alive => {}
                Message::Failed { reason } => {
                    return Err(Failure::run(format!("the other end failed: {reason}")));
                }
                _ if self.messages.len() == MAX_WAITING => {
                    return Err(Failure::run(format!(
                        "the other end sent over {MAX_WAITING} messages unasked"
                    )));
                }
                other => self.messages.push_back(other),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// What a broken peer sends unasked must not pile up.
    #[test]
    fn messages_that_nobody_takes_are_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut peer = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("a connection");
        peer.write_all(PREAMBLE).expect("room in the socket");
        let (stream, _) = listener.accept().expect("the peer");
        let mut control = Control::new(stream, &Interrupt::default()).expect("a right greeting");
        let ready = Message::Ready.to_bytes().expect("plain");
        peer.write_all(&ready.repeat(MAX_WAITING + 1)).expect("room in the socket");
        drop(peer);
        let refusal = loop {
            match control.receive() {
                Ok((_, true)) => thread::yield_now(),
                Ok((_, false)) => panic!("all {} messages were kept", control.messages.len()),
                Err(failure) => break failure.to_string(),
            }
        };
        assert!(refusal.contains("unasked"), "{refusal}");
    }
}
