//! The TCP connection beside a measurement: [messages](Message), after eight bytes of either end that
//! name the protocol and its version.

use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::message::{Incoming, Message};
use super::session::Beside;
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::tcp::{Greeting, Link, check_greeting, read_exact};

/// The protocol and its version.
const PREAMBLE: &Greeting = b"frcperf\x02";
const PATIENCE: Duration = Duration::from_secs(10);
/// Messages that wait to be taken. Either end speaks in its turn, so one that sends more is broken.
const MAX_WAITING: usize = 16;

/// The connection, which never blocks once it is made.
pub(super) struct Control {
    link: Link,
    incoming: Incoming,
    messages: VecDeque<Message>,
}

/// Hears what the other end says first.
pub(super) fn hear(stream: &mut TcpStream, interrupt: &Interrupt) -> Result<Greeting, Failure> {
    let mut greeting = [0; PREAMBLE.len()];
    read_exact(stream, &mut greeting, PATIENCE, interrupt)?;
    Ok(greeting)
}

impl Control {
    /// Greets the server. Nothing is heard of one of perftest's, which waits for more.
    pub(super) fn greet(mut stream: TcpStream, interrupt: &Interrupt) -> Result<Control, Failure> {
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        let greeting = hear(&mut stream, interrupt).map_err(|failure| match failure {
            Failure::Run(reason) => Failure::Run(format!("{reason}; is it perftest's? Then give --perftest")),
            other => other,
        })?;
        Control::new(stream, greeting)
    }

    /// Greets a client that has said that.
    pub(super) fn answer(mut stream: TcpStream, greeting: Greeting) -> Result<Control, Failure> {
        stream.write_all(PREAMBLE).or_fail(|| "greeting the other end".into())?;
        Control::new(stream, greeting)
    }

    fn new(stream: TcpStream, greeting: Greeting) -> Result<Control, Failure> {
        check_greeting(&greeting, PREAMBLE, "perf")?;
        Ok(Control { link: Link::new(stream)?, incoming: Incoming::default(), messages: VecDeque::new() })
    }

    /// Sends a message. If the other end is gone, [`receive`](Beside::receive) will tell.
    pub(super) fn send(&mut self, message: &Message) -> Result<(), Failure> {
        self.link.send(&message.to_bytes().map_err(Failure::run)?);
        Ok(())
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
}

/// Takes the messages that are whole.
fn sort(incoming: &mut Incoming, messages: &mut VecDeque<Message>) -> Result<(), Failure> {
    while let Some(message) = incoming.next().map_err(Failure::run)? {
        match message {
            Message::Alive => {}
            Message::Failed { reason } => {
                return Err(Failure::run(format!("the other end failed: {reason}")));
            }
            _ if messages.len() == MAX_WAITING => {
                return Err(Failure::run(format!("the other end sent over {MAX_WAITING} messages unasked")));
            }
            other => messages.push_back(other),
        }
    }
    Ok(())
}

impl Beside for Control {
    const HEARTBEATS: bool = true;
    const ADVICE: &'static str = "";

    fn receive(&mut self) -> Result<(bool, bool), Failure> {
        let Control { link, incoming, messages } = self;
        link.receive(|bytes| {
            incoming.extend(bytes);
            sort(incoming, messages)
        })
    }

    fn has_message(&self) -> bool {
        !self.messages.is_empty()
    }

    fn keep_alive(&mut self) -> Result<(), Failure> {
        self.send(&Message::Alive)
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
        let (mut stream, _) = listener.accept().expect("the peer");
        let greeting = hear(&mut stream, &Interrupt::default()).expect("a greeting");
        let mut control = Control::answer(stream, greeting).expect("a right greeting");
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
