//! The connections to rank 0: ranks, and others that find the port.
//!
//! A connection has three seconds to say who it is. If there are too many, the oldest is closed. No error of `accept`
//! is final. A connection that does not speak the protocol can delay a rank, but never end the rendezvous. One that
//! does is the rank that it claims to be, if it is the first to claim it.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::frame::Hello;
use super::{read_some, refuse};
use crate::card::Card;

/// How long a connection may take to say who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);
/// How long one that was refused may take to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// Connections that have not said who they are, and those that were refused. One more, and the oldest goes.
const MAX_UNKNOWN: usize = 256;
const MAX_LEAVING: usize = 64;
/// So many come in before those that are there are heard.
const MAX_NEW: usize = 16;
/// Refusals that rank 0 remembers, to tell them should ranks be missing.
pub(super) const MAX_REMEMBERED: usize = 8;

pub(super) struct Lobby {
    size: u32,
    nonce: u64,
    card: Card,
    /// The oldest first.
    unknown: Vec<Visitor>,
    /// Of ranks 1, 2, ...
    known: Vec<Option<(Card, TcpStream)>>,
    /// They have been told why, and until when they may read it.
    leaving: Vec<(TcpStream, Instant)>,
    refused: Vec<(SocketAddr, String)>,
    /// Why a connection can't be taken at the moment.
    trouble: Option<String>,
}

struct Visitor {
    stream: TcpStream,
    from: SocketAddr,
    deadline: Instant,
    bytes: [u8; size_of::<Hello>()],
    filled: usize,
}

impl Lobby {
    /// Of rank 0, which has `card`, in the job that `nonce` names.
    pub(super) fn new(size: u32, nonce: u64, card: Card) -> Lobby {
        let mut known = Vec::new();
        known.resize_with(size as usize - 1, || None);
        let (unknown, leaving, refused, trouble) = (Vec::new(), Vec::new(), Vec::new(), None);
        Lobby { size, nonce, card, unknown, known, leaving, refused, trouble }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.known.iter().all(Option::is_some)
    }

    /// Cards and connections of ranks 1, 2, ..., as far as they are there.
    pub(super) fn into_known(self) -> (Vec<Card>, Vec<TcpStream>) {
        self.known.into_iter().flatten().unzip()
    }

    /// Tells all who are there, and ends their connections.
    pub(super) fn dismiss(&mut self, reason: &str) {
        self.known.iter_mut().flatten().for_each(|(_, stream)| refuse(stream, reason));
    }

    /// Who is not there.
    pub(super) fn missing(&self) -> String {
        let missing: Vec<String> = (1..)
            .zip(&self.known)
            .filter(|(_, known)| known.is_none())
            .map(|(r, _): (u32, _)| r.to_string())
            .collect();
        format!("{} {}", if missing.len() == 1 { "rank" } else { "ranks" }, missing.join(", "))
    }

    /// What may be the reason; empty if there is none.
    pub(super) fn problems(&self) -> String {
        let refused = self.refused.iter().map(|(from, problem)| format!("{from}: {problem}"));
        let refused = match refused.collect::<Vec<_>>().as_slice() {
            [] => String::new(),
            refused => format!("; refused: {}", refused.join("; ")),
        };
        let trouble = self.trouble.as_ref().map(|trouble| format!("; no more connections: {trouble}"));
        refused + &trouble.unwrap_or_default()
    }

    /// Takes connections and hears what they have to say. Returns whether there was anything.
    pub(super) fn attend(&mut self, listener: &TcpListener) -> bool {
        let has_come = (0..MAX_NEW).take_while(|_| self.accept(listener)).count() > 0;
        let was_heard = self.listen();
        self.leaving.retain_mut(|(stream, deadline)| is_reading(stream) && Instant::now() < *deadline);
        has_come || was_heard
    }

    /// Takes a connection, if there is one.
    fn accept(&mut self, listener: &TcpListener) -> bool {
        let accepted = listener.accept().and_then(|(stream, from)| {
            stream.set_nonblocking(true)?;
            Ok((stream, from))
        });
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            // The visitor has given up before it was let in.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {
                return true;
            }
            // Whatever else it is, it passes; if it is a lack of descriptors, a visitor has one.
            Err(error) => {
                if self.trouble.replace(error.to_string()).is_none() {
                    warn!("a connection can't be accepted now: {error}");
                }
                if !self.unknown.is_empty() {
                    self.unknown.remove(0);
                }
                return false;
            }
        };
        self.trouble = None;
        // A hint for latency; the rendezvous works without.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%from, %error, "TCP_NODELAY");
        }
        if self.unknown.len() == MAX_UNKNOWN {
            let Visitor { from, .. } = self.unknown.remove(0);
            debug!(%from, "has not sent its rank, and {MAX_UNKNOWN} connections came after it");
        }
        let deadline = Instant::now() + PATIENCE;
        self.unknown.push(Visitor { stream, from, deadline, bytes: [0; _], filled: 0 });
        true
    }

    /// Hears what visitors have to say. Whether anybody said anything.
    fn listen(&mut self) -> bool {
        let mut heard = false;
        let mut index = 0;
        while let Some(visitor) = self.unknown.get_mut(index) {
            let said = visitor.read();
            if matches!(said, Ok(None)) && Instant::now() < visitor.deadline {
                index += 1;
                continue;
            }
            heard = true;
            let Visitor { stream, from, filled, .. } = self.unknown.remove(index);
            match said {
                Ok(Some(hello)) => self.welcome(stream, from, &hello),
                Ok(None) if filled == 0 => debug!(%from, "sent nothing for {PATIENCE:?}"),
                Ok(None) => self.turn_away(stream, from, format!("no complete hello in {PATIENCE:?}")),
                Err(problem) => self.turn_away(stream, from, problem),
            }
        }
        heard
    }

    fn welcome(&mut self, stream: TcpStream, from: SocketAddr, hello: &Hello) {
        let rank = hello.rank.get();
        // One that has gone again may have been started anew.
        let is_here = |rank: u32| self.known[rank as usize - 1].as_ref().is_some_and(|(_, s)| is_alive(s));
        let problem = hello.problem(self.size, self.nonce, &self.card, is_here);
        match problem {
            None => {
                debug!(rank, %from, "met");
                self.known[rank as usize - 1] = Some((hello.card, stream));
            }
            Some(problem) => self.turn_away(stream, from, problem),
        }
    }

    fn turn_away(&mut self, mut stream: TcpStream, from: SocketAddr, problem: String) {
        refuse(&mut stream, &problem);
        if stream.shutdown(Shutdown::Write).is_ok() {
            if self.leaving.len() == MAX_LEAVING {
                self.leaving.remove(0);
            }
            self.leaving.push((stream, Instant::now() + FAREWELL));
        }
        // Once each, and not for ever: strangers may come again and again, and choose what is said of them.
        if self.refused.len() == MAX_REMEMBERED || self.refused.iter().any(|(_, known)| *known == problem) {
            debug!(%from, "refused: {problem}");
            return;
        }
        warn!(%from, "refused: {problem}");
        self.refused.push((from, problem));
    }
}

impl Visitor {
    /// The hello, once all of it is there.
    fn read(&mut self) -> Result<Option<Hello>, String> {
        let n = read_some(&mut self.stream, &mut self.bytes[self.filled..]).map_err(|e| e.to_string())?;
        self.filled += n;
        Hello::parse(&self.bytes[..self.filled])
    }
}

/// Whether a rank waits for the table, as it does without a further word.
fn is_alive(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(_) => false,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

/// Takes a piece of what one that is leaving still says: a connection that is closed over unread bytes is
/// reset, and its last word with it. Returns whether it may still be reading.
fn is_reading(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 1024]) {
        Ok(length) => length > 0,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}
