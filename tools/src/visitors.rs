//! The TCP connections to a server that takes one client.
//!
//! The server accepts several connections at a time, until one of them has sent what only a client sends. The others
//! are closed, each with a line that says why. A connection that sends nothing, or something else, neither ends the
//! server nor delays the client.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::failure::{Failure, OrFail};
use crate::tcp::Listener;

/// How long a visitor may take for its first words.
const PATIENCE: Duration = Duration::from_secs(10);
/// Visitors at a time; beyond that the oldest goes.
const MOST: usize = 32;
/// Bytes of the longest first words.
const LONGEST: usize = 4096;
const PAUSE: Duration = Duration::from_millis(5);

/// What a visitor's words are.
pub(crate) enum Heard<T> {
    /// So many bytes are needed, counted from the first one.
    Needs(usize),
    /// A client's.
    Client(T),
}

struct Visitor {
    stream: TcpStream,
    from: SocketAddr,
    said: Vec<u8>,
    needs: usize,
    deadline: Instant,
}

/// Waits for a client, without end. Does `meanwhile` again and again; its failure ends the wait.
///
/// `judge` is given what a visitor has said, of which it wants `first` bytes to begin with, and may answer. A
/// visitor that it refuses is sent away.
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
    /// Takes what has come. Returns the client once it is known to be one.
    fn listen<T>(
        &mut self,
        judge: &mut impl FnMut(&mut TcpStream, &[u8]) -> Result<Heard<T>, Failure>,
    ) -> Result<Option<T>, Failure> {
        let mut chunk = [0; LONGEST];
        loop {
            // No more than is needed: the rest is for whoever serves it.
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
                    return Err(Failure::run(format!("a message of {bytes} bytes: must be at most {LONGEST}")));
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
