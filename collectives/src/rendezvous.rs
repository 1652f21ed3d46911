//! The rendezvous: a TCP exchange in which rank 0 collects one [`Card`] of every rank and sends all cards to all, in
//! the frames of `rendezvous/frame.rs`. Every wait has a deadline.
//!
//! - Connections that are not from ranks delay a rank for a moment and never end the job (`rendezvous/lobby.rs`), unless
//!   they use the protocol and claim a rank: nothing is authenticated.
//! - A rank whose connection breaks before it was answered connects again until its deadline.
//! - A hello contains the number of the job, so that ranks of two jobs do not mix (`bootstrap/unique_id.rs`).

mod frame;
#[cfg(fuzzing)]
pub mod fuzzing;
mod lobby;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tracing::debug;
use zerocopy::IntoBytes;

use frame::{Answer, Hello, MAX_REFUSAL, REFUSAL, Reply, TABLE, table};
use lobby::Lobby;

use crate::card::Card;
use crate::{Bootstrap, Error};

/// Meets the other ranks. Returns all cards, by rank.
pub(crate) fn rendezvous(bootstrap: Bootstrap, card: Card) -> Result<Vec<Card>, Error> {
    let deadline = Instant::now() + bootstrap.timeout;
    if bootstrap.rank == 0 { root(bootstrap, card, deadline) } else { worker(&bootstrap, card, deadline) }
}

/// The pause between two checks of idle sockets.
const PAUSE: Duration = Duration::from_millis(1);
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// The timeout of one attempt to connect. SYNs are retransmitted less and less often within it.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(5);
/// A rank waits this much longer than rank 0, whose refusal names the missing rank.
const GRACE: Duration = Duration::from_secs(2);

fn broken(rank: u32, peer: u32, problem: String) -> Error {
    Error::Bootstrap { rank, peer: format!("rank {peer}"), problem }
}

/// Reads available bytes, 0 if there are none yet; the end of the stream is an error.
fn read_some(stream: &mut TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    match stream.read(bytes) {
        Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed the connection")),
        Ok(n) => Ok(n),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(e) => Err(e),
    }
}

fn root(bootstrap: Bootstrap, card: Card, deadline: Instant) -> Result<Vec<Card>, Error> {
    let Bootstrap { size, listen, listener, timeout, nonce, .. } = bootstrap;
    let listen_error = |source| Error::Listen { address: listen, source };
    let listener = match listener {
        Some(listener) => listener,
        None => TcpListener::bind(listen).map_err(listen_error)?,
    };
    listener.set_nonblocking(true).map_err(listen_error)?;
    let address = listener.local_addr().map_err(listen_error)?;
    let mut lobby = Lobby::new(size, nonce, card);
    while !lobby.is_complete() {
        if Instant::now() >= deadline {
            let (missing, refused) = (lobby.missing(), lobby.problems());
            lobby.dismiss(&format!("{missing} missing of {size} ranks after {timeout:?}{refused}"));
            return Err(Error::Missing { address, missing, size, waited: timeout, refused });
        }
        if !lobby.attend(&listener) {
            sleep(PAUSE);
        }
    }
    let (others, mut streams) = lobby.into_known();
    let cards: Vec<Card> = [card].into_iter().chain(others).collect();
    let mut table = Reply::new(TABLE, size_of_val(&*cards)).as_bytes().to_vec();
    table.extend_from_slice(cards.as_bytes());
    // As long as a rank waits for it.
    distribute(&mut streams, &table, deadline + GRACE)?;
    Ok(cards)
}

/// Sends the table to ranks 1, 2, ... in turns, because it may be more than a socket accepts at once, and a rank that does
/// not read must not delay others.
fn distribute(streams: &mut [TcpStream], table: &[u8], deadline: Instant) -> Result<(), Error> {
    let mut sent = vec![0; streams.len()];
    loop {
        let (mut waiting, mut moved) = (None, false);
        for ((peer, stream), sent) in (1..).zip(&mut *streams).zip(&mut sent) {
            if *sent == table.len() {
                continue;
            }
            match stream.write(&table[*sent..]) {
                Ok(count) => (*sent, moved) = (*sent + count, true),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(e) => return Err(broken(0, peer, e.to_string())),
            }
            if *sent < table.len() {
                waiting = waiting.or(Some((peer, *sent)));
            }
        }
        let Some((peer, sent)) = waiting else { return Ok(()) };
        if Instant::now() >= deadline {
            let problem =
                format!("it has accepted {sent} of the {} bytes that describe the other ranks", table.len());
            return Err(broken(0, peer, problem));
        }
        if !moved {
            sleep(PAUSE);
        }
    }
}

/// Sends the reason, if the socket accepts it; the connection ends in any case.
fn refuse(stream: &mut TcpStream, reason: &str) {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REFUSAL)];
    let frame = [Reply::new(REFUSAL, reason.len()).as_bytes(), reason].concat();
    if let Err(error) = stream.write_all(&frame) {
        debug!(%error, "a refusal was not sent");
    }
}

fn worker(bootstrap: &Bootstrap, card: Card, deadline: Instant) -> Result<Vec<Card>, Error> {
    let rank = bootstrap.rank;
    let mut broke: Option<io::Error> = None;
    loop {
        let mut stream = connect(bootstrap, deadline).map_err(|error| match &broke {
            None => error,
            Some(broke) => broken(rank, 0, format!("{broke}; then: {error}")),
        })?;
        match introduce(&mut stream, bootstrap, card, deadline + GRACE)? {
            Ok(cards) => return Ok(cards),
            Err(error) if Instant::now() >= deadline => return Err(broken(rank, 0, error.to_string())),
            Err(error) => {
                debug!(rank, %error, "rank 0 has not answered; once more");
                broke = Some(error);
                sleep(CONNECT_PAUSE);
            }
        }
    }
}

/// Sends the hello, and receives the table; or returns why there was no answer, in which case another attempt may succeed.
fn introduce(
    stream: &mut TcpStream,
    &Bootstrap { rank, size, master, nonce, .. }: &Bootstrap,
    card: Card,
    deadline: Instant,
) -> Result<Result<Vec<Card>, io::Error>, Error> {
    let failed = |problem: String| broken(rank, 0, problem);
    let io_failed = |e: io::Error| failed(e.to_string());
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY");
    }
    let mut start = [0; size_of::<Reply>()];
    let (first, rest) = start.split_at_mut(1);
    let hello = Hello::new(rank, size, nonce, card);
    let said = stream.write_all(hello.as_bytes());
    if let Err(error) = said.and_then(|()| read_until(stream, first, deadline)) {
        return Ok(Err(error));
    }
    read_until(stream, rest, deadline).map_err(io_failed)?;
    let answer = Answer::parse(&start, size).map_err(failed)?;
    let mut body = vec![0; answer.length()];
    read_until(stream, &mut body, deadline).map_err(io_failed)?;
    let cards = match answer {
        Answer::Table(_) => table(&body, rank, &card).map_err(failed)?,
        Answer::Refusal(_) => {
            // Text from the network is made printable.
            let reason = String::from_utf8_lossy(&body).replace(ferroce::is_unprintable, "\u{fffd}");
            return Err(Error::Refused { rank, address: master, reason });
        }
    };
    Ok(Ok(cards))
}

/// Tries until rank 0 listens, because the ranks start in any order.
fn connect(bootstrap: &Bootstrap, deadline: Instant) -> Result<TcpStream, Error> {
    let &Bootstrap { rank, master: address, timeout, .. } = bootstrap;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).clamp(PAUSE, LONGEST_ATTEMPT);
        let connected = TcpStream::connect_timeout(&address, left).and_then(|stream| {
            // Without a listener, the kernel may choose the destination port as the source port and connect the socket to
            // itself.
            match stream.local_addr()? == stream.peer_addr()? {
                true => Err(ErrorKind::ConnectionRefused.into()),
                false => Ok(stream),
            }
        });
        match connected {
            Ok(stream) => return Ok(stream),
            Err(source) if Instant::now() >= deadline => {
                return Err(Error::Connect { rank, address, waited: timeout, source });
            }
            Err(_) => sleep(CONNECT_PAUSE),
        }
    }
}

/// Fills `bytes` from a blocking stream.
fn read_until(stream: &mut TcpStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let from = stream.peer_addr().map_or_else(|_| "rank 0".to_owned(), |address| address.to_string());
            let problem = format!("no answer from {from} in time: does another program listen there?");
            return Err(io::Error::new(ErrorKind::TimedOut, problem));
        }
        stream.set_read_timeout(Some(left))?;
        filled += read_some(stream, &mut bytes[filled..])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
