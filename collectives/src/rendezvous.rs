//! The bootstrap: rank 0 collects one [`Endpoint`] of every rank and gives all to all, in the frames of
//! `rendezvous/frame.rs`. Nothing is waited for without a deadline.

mod frame;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tracing::{debug, warn};
use zerocopy::IntoBytes;

pub(crate) use frame::Endpoint;
use frame::{Answer, Hello, MAX_REFUSAL, REFUSAL, Reply, TABLE, table};

use crate::{Bootstrap, Error};

/// The connections of the rendezvous, kept for [`sync`](Session::sync).
pub(crate) struct Session {
    rank: u32,
    role: Role,
}

enum Role {
    /// One connection for each of ranks 1, 2, ...
    Root(Vec<TcpStream>),
    Worker(TcpStream),
}

/// The points at which all ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// Every queue pair is ready to receive.
    Ready,
    /// No rank needs an answer any more.
    Leave,
}

/// Meets the other ranks. Returns all endpoints, by rank.
pub(crate) fn rendezvous(
    bootstrap: Bootstrap,
    endpoint: Endpoint,
) -> Result<(Vec<Endpoint>, Session), Error> {
    let deadline = Instant::now() + bootstrap.timeout;
    if bootstrap.rank == 0 {
        root(bootstrap, endpoint, deadline)
    } else {
        worker(&bootstrap, endpoint, deadline)
    }
}

impl Session {
    /// Returns when all ranks have called it for `point`; calls `idle` while it waits.
    pub(crate) fn sync(
        &mut self,
        point: Point,
        timeout: Duration,
        mut idle: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        let rank = self.rank;
        let frame = Reply::new(point.kind(), 0);
        let send = |stream: &mut TcpStream, peer: u32| {
            stream.write_all(frame.as_bytes()).map_err(|e| broken(rank, peer, e.to_string()))
        };
        let mut wait = |stream: &mut TcpStream, peer: u32| {
            let mut bytes = [0; size_of::<Reply>()];
            let mut filled = 0;
            while filled < bytes.len() {
                match read_some(stream, &mut bytes[filled..]) {
                    Ok(0) if Instant::now() >= deadline => {
                        let problem = format!("no sign of life after {timeout:?}, waiting for {point:?}");
                        return Err(broken(rank, peer, problem));
                    }
                    Ok(0) => idle()?,
                    Ok(n) => filled += n,
                    Err(e) => return Err(broken(rank, peer, e.to_string())),
                }
            }
            if bytes != frame.as_bytes() {
                return Err(broken(rank, peer, format!("{bytes:02x?} is not the frame for {point:?}")));
            }
            Ok(())
        };
        match &mut self.role {
            Role::Root(streams) => {
                for (peer, stream) in (1..).zip(&mut *streams) {
                    wait(stream, peer)?;
                }
                (1..).zip(streams).try_for_each(|(peer, stream)| send(stream, peer))
            }
            Role::Worker(stream) => {
                send(stream, 0)?;
                wait(stream, 0)
            }
        }
    }
}

impl Point {
    fn kind(self) -> u32 {
        match self {
            Point::Ready => 3,
            Point::Leave => 4,
        }
    }
}

/// Between two looks at sockets that have nothing.
const PAUSE: Duration = Duration::from_millis(1);
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// A rank waits so much longer than rank 0, whose refusal says which rank is missing.
const GRACE: Duration = Duration::from_secs(2);
/// Connections that have not said who they are; more are turned away.
const MAX_UNKNOWN: usize = 256;
/// Refusals that rank 0 remembers, to tell them should ranks be missing.
const MAX_REMEMBERED: usize = 8;

fn broken(rank: u32, peer: u32, problem: String) -> Error {
    Error::Bootstrap { rank, peer: format!("rank {peer}"), problem }
}

/// What has come, 0 if nothing has yet; the end of the stream is an error.
fn read_some(stream: &mut TcpStream, bytes: &mut [u8]) -> io::Result<usize> {
    match stream.read(bytes) {
        Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "it closed the connection")),
        Ok(n) => Ok(n),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        Err(e) => Err(e),
    }
}

fn root(
    bootstrap: Bootstrap,
    endpoint: Endpoint,
    deadline: Instant,
) -> Result<(Vec<Endpoint>, Session), Error> {
    let Bootstrap { size, listen, listener, timeout, .. } = bootstrap;
    let listen_error = |source| Error::Listen { address: listen, source };
    let listener = match listener {
        Some(listener) => listener,
        None => TcpListener::bind(listen).map_err(listen_error)?,
    };
    listener.set_nonblocking(true).map_err(listen_error)?;
    let address = listener.local_addr().map_err(listen_error)?;
    let mut lobby = Lobby { size, endpoint, unknown: Vec::new(), known: Vec::new(), refused: Vec::new() };
    lobby.known.resize_with(size as usize - 1, || None);
    while lobby.known.iter().any(Option::is_none) {
        if Instant::now() >= deadline {
            let missing = lobby.missing();
            let reason = format!("{missing} missing of {size} ranks after {timeout:?}");
            for (_, stream) in lobby.known.iter_mut().flatten() {
                refuse(stream, &reason);
            }
            let refused = match lobby.refused.as_slice() {
                [] => String::new(),
                refused => format!("; refused: {}", refused.join("; ")),
            };
            return Err(Error::Missing { address, missing, size, waited: timeout, refused });
        }
        if !lobby.accept(&listener).map_err(listen_error)? & !lobby.listen() {
            sleep(PAUSE);
        }
    }
    let (others, streams): (Vec<Endpoint>, Vec<TcpStream>) = lobby.known.into_iter().flatten().unzip();
    let endpoints: Vec<Endpoint> = [endpoint].into_iter().chain(others).collect();
    let mut table = Reply::new(TABLE, size_of_val(&*endpoints)).as_bytes().to_vec();
    table.extend_from_slice(endpoints.as_bytes());
    let mut session = Session { rank: 0, role: Role::Root(streams) };
    if let Role::Root(streams) = &mut session.role {
        for (peer, stream) in (1..).zip(streams) {
            // A table of 4096 ranks is more than a socket takes at once.
            let sent = stream
                .set_nonblocking(false)
                .and_then(|()| stream.set_write_timeout(Some(timeout)))
                .and_then(|()| stream.write_all(&table))
                .and_then(|()| stream.set_nonblocking(true));
            sent.map_err(|e| broken(0, peer, e.to_string()))?;
        }
    }
    Ok((endpoints, session))
}

/// Who has come to rank 0.
struct Lobby {
    size: u32,
    endpoint: Endpoint,
    unknown: Vec<Visitor>,
    /// Of ranks 1, 2, ...
    known: Vec<Option<(Endpoint, TcpStream)>>,
    refused: Vec<String>,
}

struct Visitor {
    stream: TcpStream,
    from: SocketAddr,
    bytes: [u8; size_of::<Hello>()],
    filled: usize,
}

impl Lobby {
    /// Takes a connection, if there is one.
    fn accept(&mut self, listener: &TcpListener) -> io::Result<bool> {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
            // The visitor has given up before it was let in.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {
                return Ok(true);
            }
            Err(e) => return Err(e),
        };
        if self.unknown.len() == MAX_UNKNOWN {
            warn!(%from, "turned away: {MAX_UNKNOWN} connections have not said yet who they are");
            return Ok(true);
        }
        stream.set_nonblocking(true)?;
        // A hint for latency; the rendezvous works without.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%from, %error, "TCP_NODELAY");
        }
        self.unknown.push(Visitor { stream, from, bytes: [0; _], filled: 0 });
        Ok(true)
    }

    /// Hears what visitors have to say. Whether anybody said anything.
    fn listen(&mut self) -> bool {
        let mut heard = false;
        let mut index = 0;
        while index < self.unknown.len() {
            match self.unknown[index].read() {
                Ok(None) => {
                    index += 1;
                    continue;
                }
                Ok(Some(hello)) => {
                    let Visitor { stream, from, .. } = self.unknown.swap_remove(index);
                    self.welcome(stream, from, &hello);
                }
                Err(problem) => {
                    let Visitor { stream, from, .. } = self.unknown.swap_remove(index);
                    self.turn_away(stream, from, problem);
                }
            }
            heard = true;
        }
        heard
    }

    fn welcome(&mut self, stream: TcpStream, from: SocketAddr, hello: &Hello) {
        let rank = hello.rank.get();
        let is_here = |rank: u32| self.known[rank as usize - 1].is_some();
        let problem = hello.problem(self.size, &self.endpoint, is_here);
        match problem {
            None => {
                debug!(rank, %from, "met");
                self.known[rank as usize - 1] = Some((hello.endpoint, stream));
            }
            Some(problem) => self.turn_away(stream, from, problem),
        }
    }

    fn turn_away(&mut self, mut stream: TcpStream, from: SocketAddr, problem: String) {
        warn!(%from, "refused: {problem}");
        refuse(&mut stream, &problem);
        if self.refused.len() < MAX_REMEMBERED {
            self.refused.push(format!("{from}: {problem}"));
        }
    }

    fn missing(&self) -> String {
        let missing: Vec<String> = (1..)
            .zip(&self.known)
            .filter(|(_, known)| known.is_none())
            .map(|(r, _): (u32, _)| r.to_string())
            .collect();
        format!("{} {}", if missing.len() == 1 { "rank" } else { "ranks" }, missing.join(", "))
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

/// Says why, if the socket takes it; the connection ends in any case.
fn refuse(stream: &mut TcpStream, reason: &str) {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REFUSAL)];
    let frame = [Reply::new(REFUSAL, reason.len()).as_bytes(), reason].concat();
    if let Err(error) = stream.write_all(&frame) {
        debug!(%error, "a refusal was not sent");
    }
}

fn worker(
    bootstrap: &Bootstrap,
    endpoint: Endpoint,
    deadline: Instant,
) -> Result<(Vec<Endpoint>, Session), Error> {
    let &Bootstrap { rank, size, master, .. } = bootstrap;
    let mut stream = connect(bootstrap, deadline)?;
    let failed = |problem: String| broken(rank, 0, problem);
    let io_failed = |e: io::Error| failed(e.to_string());
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "TCP_NODELAY");
    }
    let hello = Hello::new(rank, size, endpoint);
    stream.write_all(hello.as_bytes()).map_err(io_failed)?;
    let deadline = deadline + GRACE;
    let mut start = [0; size_of::<Reply>()];
    read_until(&mut stream, &mut start, deadline).map_err(io_failed)?;
    let answer = Answer::parse(&start, size).map_err(failed)?;
    let mut body = vec![0; answer.length()];
    read_until(&mut stream, &mut body, deadline).map_err(io_failed)?;
    let endpoints = match answer {
        Answer::Table(_) => table(&body, rank, &endpoint).map_err(failed)?,
        Answer::Refusal(_) => {
            let reason = String::from_utf8_lossy(&body).into_owned();
            return Err(Error::Refused { rank, address: master, reason });
        }
    };
    stream.set_nonblocking(true).map_err(io_failed)?;
    Ok((endpoints, Session { rank, role: Role::Worker(stream) }))
}

/// Tries until somebody listens, since the ranks start in any order.
fn connect(bootstrap: &Bootstrap, deadline: Instant) -> Result<TcpStream, Error> {
    let &Bootstrap { rank, master: address, timeout, .. } = bootstrap;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
        match TcpStream::connect_timeout(&address, left) {
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
            return Err(io::Error::new(ErrorKind::TimedOut, "rank 0 has not answered in time"));
        }
        stream.set_read_timeout(Some(left))?;
        filled += read_some(stream, &mut bytes[filled..])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
