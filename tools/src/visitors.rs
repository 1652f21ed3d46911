//! The TCP connections to a server that takes one client.
//!
//! The server accepts several connections at a time, until one of them has sent the start of a client's protocol. The
//! others are closed, and each is logged with the reason. A connection that sends nothing, or something else, neither
//! ends the server nor delays the client.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::failure::{Failure, OrFail};
use crate::tcp::Listener;

/// The time limit for a visitor's first message.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most visitors at a time; a further one replaces the oldest.
const MOST: usize = 32;
/// The most bytes of a first message.
const LONGEST: usize = 4096;
const PAUSE: Duration = Duration::from_millis(5);

/// The result of parsing a visitor's bytes.
pub(crate) enum Heard<T> {
    /// This many bytes are needed, counted from the first one.
    Needs(usize),
    /// A client's message.
    Client(T),
}

struct Visitor {
    stream: TcpStream,
    from: SocketAddr,
    said: Vec<u8>,
    needs: usize,
    deadline: Instant,
}

/// Waits for a client, without a time limit. Calls `meanwhile` repeatedly; its failure ends the wait.
///
/// `judge` gets the bytes of a visitor, `first` of them at first, and may answer. A visitor that it refuses is
/// disconnected.
pub(crate) fn await_client<T>(
    listener: &Listener,
    mut meanwhile: impl FnMut() -> Result<(), Failure>,
    first: usize,
    mut judge: impl FnMut(&mut TcpStream, &[u8]) -> Result<Heard<T>, Failure>,
) -> Result<(TcpStream, T), Failure> {
    let mut visitors: Vec<Visitor> = Vec::new();
    loop {
        meanwhile()?;
        for (stream, from) in listener.newcomers() {
            stream.set_nonblocking(true).or_fail(|| "accepting a client".into())?;
            if visitors.len() == MOST {
                send_away(&visitors.remove(0), "it has not sent its greeting in time");
            }
            let deadline = Instant::now() + PATIENCE;
            visitors.push(Visitor { stream, from, said: Vec::new(), needs: first, deadline });
        }
        let mut index = 0;
        while let Some(visitor) = visitors.get_mut(index) {
            match visitor.listen(&mut judge) {
                Ok(None) => index += 1,
                Ok(Some(client)) => {
                    let stream = visitors.remove(index).stream;
                    stream.set_nonblocking(false).or_fail(|| "accepting a client".into())?;
                    return Ok((stream, client));
                }
                Err(failure) => send_away(&visitors.remove(index), &failure.to_string()),
            }
        }
        thread::sleep(PAUSE);
    }
}

fn send_away(visitor: &Visitor, reason: &str) {
    warn!("{} is not a client: {reason}; still waiting for one", visitor.from);
}

impl Visitor {
    /// Reads from a visitor. Returns the client once it is identified.
    fn listen<T>(
        &mut self,
        judge: &mut impl FnMut(&mut TcpStream, &[u8]) -> Result<Heard<T>, Failure>,
    ) -> Result<Option<T>, Failure> {
        let mut chunk = [0; LONGEST];
        loop {
            // No more than needed: the rest is for the code that serves the client.
            let wanted = &mut chunk[..self.needs - self.said.len()];
            match self.stream.read(wanted) {
                Ok(0) => {
                    let (have, needs) = (self.said.len(), self.needs);
                    return Err(Failure::run(format!(
                        "it closed the connection after {have} of {needs} bytes"
                    )));
                }
                Ok(count) => self.said.extend_from_slice(&wanted[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(Failure::run(error.to_string())),
            }
            if self.said.len() < self.needs {
                continue;
            }
            match judge(&mut self.stream, &self.said)? {
                Heard::Client(client) => return Ok(Some(client)),
                Heard::Needs(bytes) if bytes > self.said.len() && bytes <= LONGEST => self.needs = bytes,
                Heard::Needs(bytes) => {
                    return Err(Failure::run(format!(
                        "a message of {bytes} bytes: must be at most {LONGEST}"
                    )));
                }
            }
        }
        if Instant::now() < self.deadline {
            return Ok(None);
        }
        let (have, needs, seconds) = (self.said.len(), self.needs, PATIENCE.as_secs());
        Err(Failure::run(format!("it sent {have} of {needs} bytes within {seconds} s")))
    }
}
