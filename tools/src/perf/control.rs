//! The control connection of `ferroce perf`: ferroce's own protocol, with a version and a limit on the length of a
//! message. Each end sends eight bytes with the name and version of the protocol, then [messages](PerfMessage).

use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::message::{Incoming, PerfMessage};
use super::plan::Plan;
use super::session::{Beside, unexpected};
use crate::control_message::LENGTH;
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail, legible};
use crate::tcp::{Greeting, Link, check_greeting, read_exact};
use crate::visitors::Heard;

/// The protocol and its version.
const PREAMBLE: &Greeting = b"frcperf\x03";
const PATIENCE: Duration = Duration::from_secs(10);
/// The most unprocessed messages. The ends take turns, so a peer that sends more is broken.
const MAX_WAITING: usize = 16;

/// The control connection; it does not block once it is established.
pub(super) struct PerfControl {
    link: Link,
    incoming: Incoming,
    messages: VecDeque<PerfMessage>,
    /// Whether the session waits for a message. Otherwise an unread message must not keep it from noticing that the
    /// other end is gone.
    awaited: bool,
}

/// Bytes that identify the protocol.
pub(super) const GREETING: usize = PREAMBLE.len();

/// Parses the start of a client's stream: its greeting, which is answered, and its plan.
pub(super) fn judge(stream: &mut TcpStream, said: &[u8]) -> Result<Heard<Plan>, Failure> {
    let Some((greeting, rest)) = said.split_first_chunk() else { return Ok(Heard::Needs(GREETING)) };
    check_greeting(greeting, PREAMBLE, "perf")?;
    if rest.is_empty() {
        stream.write_all(PREAMBLE).or_fail(|| "greeting it".into())?;
    }
    let whole = PerfMessage::whole(rest).map_err(Failure::run)?;
    let Some(body) = rest.get(LENGTH..whole) else { return Ok(Heard::Needs(GREETING + whole)) };
    match PerfMessage::from_body(body).map_err(Failure::run)? {
        PerfMessage::Plan(plan) => Ok(Heard::Client(plan)),
        other => Err(unexpected(&other)),
    }
}

impl PerfControl {
    /// Exchanges greetings with the server. A server of perftest does not answer, since it waits for more bytes.
    pub(super) fn greet(mut stream: TcpStream, interrupt: &Interrupt) -> Result<PerfControl, Failure> {
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        let mut greeting = [0; GREETING];
        read_exact(&mut stream, &mut greeting, PATIENCE, interrupt).map_err(|failure| match failure {
            Failure::Run(reason) => Failure::Run(format!(
                "{reason}; the server may be serving another client: try again later; or it is a perftest program: \
                 give --perftest"
            )),
            other => other,
        })?;
        check_greeting(&greeting, PREAMBLE, "perf")?;
        PerfControl::new(stream, interrupt)
    }

    /// A connection after the greeting.
    pub(super) fn new(stream: TcpStream, interrupt: &Interrupt) -> Result<PerfControl, Failure> {
        Ok(PerfControl {
            link: Link::new(stream, interrupt)?,
            incoming: Incoming::default(),
            messages: VecDeque::new(),
            awaited: false,
        })
    }

    /// Sends a message. If the other end is gone, [`receive`](Beside::receive) reports it.
    pub(super) fn send(&mut self, message: &PerfMessage) -> Result<(), Failure> {
        self.link.send(&message.to_bytes().map_err(Failure::run)?)
    }

    /// Waits until the other end has closed the connection, or a timeout expires.
    pub(super) fn wait_closed(&mut self, interrupt: &Interrupt) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        while self.receive()?.1 && Instant::now() < deadline {
            interrupt.check()?;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The oldest message. If there is none, the session waits for one from now on.
    pub(super) fn take(&mut self) -> Option<PerfMessage> {
        let message = self.messages.pop_front();
        self.awaited = message.is_none();
        message
    }
}

/// Extracts the complete messages.
fn sort(incoming: &mut Incoming, messages: &mut VecDeque<PerfMessage>) -> Result<(), Failure> {
    while let Some(message) = incoming.pop().map_err(Failure::run)? {
        match message {
            PerfMessage::Alive => {}
            PerfMessage::Failed { reason } => {
                return Err(Failure::run(format!("the other end failed: {}", legible(&reason))));
            }
            _ if messages.len() == MAX_WAITING => {
                return Err(Failure::run(format!(
                    "the other end sent more than {MAX_WAITING} messages that were not \
                    expected"
                )));
            }
            other => messages.push_back(other),
        }
    }
    Ok(())
}

impl Beside for PerfControl {
    const HEARTBEATS: bool = true;
    const ADVICE: &'static str = "";
    const UNANSWERED: &'static str = "";

    fn receive(&mut self) -> Result<(bool, bool), Failure> {
        let PerfControl { link, incoming, messages, .. } = self;
        link.receive(|bytes| {
            incoming.extend(bytes);
            sort(incoming, messages)
        })
    }

    fn has_message(&self) -> bool {
        self.awaited && !self.messages.is_empty()
    }

    fn keep_alive(&mut self) -> Result<(), Failure> {
        self.send(&PerfMessage::Alive)
    }

    /// The end of a part is always a message.
    fn is_over(&self, _quiet: Duration) -> bool {
        false
    }

    /// A failure is a message, or the connection is silent.
    fn stuck(&self, _quiet: Duration) -> Option<String> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Unsolicited messages of a broken peer must not use unbounded memory.
    #[test]
    fn unprocessed_messages_are_bounded() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut peer = TcpStream::connect(listener.local_addr().expect("it is bound")).expect("a connection");
        let (stream, _) = listener.accept().expect("the peer");
        let mut control = PerfControl::new(stream, &Interrupt::default()).expect("a connection");
        let ready = PerfMessage::Ready.to_bytes().expect("plain");
        peer.write_all(&ready.repeat(MAX_WAITING + 1)).expect("room in the socket");
        drop(peer);
        let refusal = loop {
            match control.receive() {
                Ok((_, true)) => thread::yield_now(),
                Ok((_, false)) => panic!("all {} messages were kept", control.messages.len()),
                Err(failure) => break failure.to_string(),
            }
        };
        assert!(refusal.contains("not expected"), "{refusal}");
    }
}
