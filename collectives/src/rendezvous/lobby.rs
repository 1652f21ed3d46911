//! The connections to rank 0, from ranks and from other programs.
//!
//! A connection must send its hello within three seconds. If there are too many, the oldest is closed. No error of `accept`
//! is final. A connection that does not use the protocol can delay a rank, but never end the rendezvous. A connection that
//! does is accepted as the rank that it claims, if it is the first to claim it.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::frame::Hello;
use super::{read_some, refuse};
use crate::card::Card;

/// The time in which a connection must send its hello.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);
/// The time in which a refused connection may read the reason.
const FAREWELL: Duration = Duration::from_secs(1);
/// The most connections without a hello, and the most refused ones. Beyond that the oldest is closed.
const MAX_UNKNOWN: usize = 256;
const MAX_LEAVING: usize = 64;
/// The most connections accepted before the existing ones are read.
const MAX_NEW: usize = 16;
/// The most refusals that rank 0 keeps, to report them if ranks are missing.
pub(super) const MAX_REMEMBERED: usize = 8;

pub(super) struct Lobby {
    size: u32,
    nonce: u64,
    card: Card,
    /// The oldest first.
    unknown: Vec<Visitor>,
    /// Of ranks 1, 2, ...
    known: Vec<Option<(Card, TcpStream)>>,
    /// Refused connections, and the time until which they may read the reason.
    leaving: Vec<(TcpStream, Instant)>,
    refused: Vec<(SocketAddr, String)>,
    /// Why no connection can be accepted at the moment.
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
    /// For rank 0 with `card`, in the job with this `nonce`.
    pub(super) fn new(size: u32, nonce: u64, card: Card) -> Lobby {
        let mut known = Vec::new();
        known.resize_with(size as usize - 1, || None);
        let (unknown, leaving, refused, trouble) = (Vec::new(), Vec::new(), Vec::new(), None);
        Lobby { size, nonce, card, unknown, known, leaving, refused, trouble }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.known.iter().all(Option::is_some)
    }

    /// Cards and connections of ranks 1, 2, ..., as far as they have connected.
    pub(super) fn into_known(self) -> (Vec<Card>, Vec<TcpStream>) {
        self.known.into_iter().flatten().unzip()
    }

    /// Refuses all connected ranks.
    pub(super) fn dismiss(&mut self, reason: &str) {
        self.known.iter_mut().flatten().for_each(|(_, stream)| refuse(stream, reason));
    }

    /// The missing ranks, in words.
    pub(super) fn missing(&self) -> String {
        let missing: Vec<String> = (1..)
            .zip(&self.known)
            .filter(|(_, known)| known.is_none())
            .map(|(r, _): (u32, _)| r.to_string())
            .collect();
        format!("{} {}", if missing.len() == 1 { "rank" } else { "ranks" }, missing.join(", "))
    }

    /// The possible reasons; empty if there are none.
    pub(super) fn problems(&self) -> String {
        let refused = self.refused.iter().map(|(from, problem)| format!("{from}: {problem}"));
        let refused = match refused.collect::<Vec<_>>().as_slice() {
            [] => String::new(),
            refused => format!("; refused: {}", refused.join("; ")),
        };
        let trouble = self.trouble.as_ref().map(|trouble| format!("; no more connections: {trouble}"));
        refused + &trouble.unwrap_or_default()
    }

    /// Accepts connections and reads from them. Returns whether there was anything.
    pub(super) fn attend(&mut self, listener: &TcpListener) -> bool {
        let has_come = (0..MAX_NEW).take_while(|_| self.accept(listener)).count() > 0;
        let was_heard = self.listen();
        self.leaving.retain_mut(|(stream, deadline)| is_reading(stream) && Instant::now() < *deadline);
        has_come || was_heard
    }

    /// Accepts a connection, if there is one.
    fn accept(&mut self, listener: &TcpListener) -> bool {
        let accepted = listener.accept().and_then(|(stream, from)| {
            stream.set_nonblocking(true)?;
            Ok((stream, from))
        });
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            // The client closed the connection before it was accepted.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {
                return true;
            }
            // Other errors are temporary; if descriptors are exhausted, a connection may hold one.
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
        // TCP_NODELAY only reduces latency.
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

    /// Reads from the connections. Returns whether there was any data.
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
        // A rank whose connection has ended may have been restarted.
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
        // Each reason once, and only a few: clients can connect repeatedly, and influence the text.
        if self.refused.len() == MAX_REMEMBERED || self.refused.iter().any(|(_, known)| *known == problem) {
            debug!(%from, "refused: {problem}");
            return;
        }
        warn!(%from, "refused: {problem}");
        self.refused.push((from, problem));
    }
}

impl Visitor {
    /// The hello, once it is complete.
    fn read(&mut self) -> Result<Option<Hello>, String> {
        let n = read_some(&mut self.stream, &mut self.bytes[self.filled..]).map_err(|e| e.to_string())?;
        self.filled += n;
        Hello::parse(&self.bytes[..self.filled])
    }
}

/// Whether a rank still waits for the table; it sends nothing meanwhile.
fn is_alive(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(_) => false,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

/// Reads more bytes of a connection that is being closed: closing it with unread bytes would reset it, and the reason would
/// be lost. Returns whether it may still be reading.
fn is_reading(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 1024]) {
        Ok(length) => length > 0,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}
