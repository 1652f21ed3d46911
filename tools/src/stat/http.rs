//! `GET /metrics` for Prometheus servers (`ferroce stat --listen`): up to 64 clients at a time, in one thread.
//!
//! Each client has 5 s for its request, 5 s while it waits for the text, 5 s for its answer, and 1 s more to close.
//! Clients that ask at the same time get the same text. At the limit, a new client replaces the oldest one that has not
//! sent a request. docs/packages.md says why the server is ferroce's own.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use httparse::{EMPTY_HEADER, Request, Status};
use tracing::{debug, info};

use crate::failure::Failure;
use crate::tcp::Listener;

/// Time limit for a client's request, and then for its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for a client to read the rest and close the connection.
const FAREWELL: Duration = Duration::from_secs(1);
/// At this limit, a new client replaces the oldest one that has sent nothing.
const MAX_CLIENTS: usize = 64;
/// The most bytes, and lines, of a request.
const LARGEST_REQUEST: usize = 8192;
const MAX_HEADERS: usize = 64;
/// The most reads of a client in one turn.
const PIECES: usize = 16;
/// Pause between two polls of idle clients.
const PAUSE: Duration = Duration::from_millis(5);

/// Answers until a signal ends the process. Clients that ask at the same time get the same `text`.
pub(super) fn serve(listener: &Listener, mut text: impl FnMut() -> String) -> Result<(), Failure> {
    info!("waiting for a client of http://{}/metrics", listener.address()?);
    // Oldest first.
    let mut clients: Vec<Client> = Vec::with_capacity(MAX_CLIENTS);
    loop {
        // Taken before the text is generated: waiting for the text of other clients must not count against a client's
        // deadline.
        let now = Instant::now();
        let new: Vec<_> = listener.newcomers().collect();
        let mut is_idle = new.is_empty();
        for client in new.into_iter().filter_map(|(stream, _)| Client::new(stream)) {
            if clients.len() == MAX_CLIENTS {
                let oldest = clients.iter().position(|client| !client.has_asked()).unwrap_or(0);
                debug!("more than {MAX_CLIENTS} clients: an idle one is disconnected");
                clients.remove(oldest);
            }
            clients.push(client);
        }
        clients.iter_mut().for_each(Client::listen);
        if clients.iter().any(Client::waits_for_metrics) {
            let text = Rc::from(text());
            clients.iter_mut().for_each(|client| client.answer(&text));
            is_idle = false;
        }
        clients.retain_mut(|client| client.speak() && now < client.deadline);
        if is_idle {
            thread::sleep(PAUSE);
        }
    }
}

struct Client {
    stream: TcpStream,
    deadline: Instant,
    state: State,
}

enum State {
    /// The bytes of the request so far.
    Asks(Vec<u8>),
    WaitsForMetrics {
        head_only: bool,
    },
    /// The bytes still to be written, of the head and then of the text.
    IsTold {
        head: Vec<u8>,
        body: Rc<str>,
        written: usize,
    },
    /// The whole answer was written to the socket; the client may not have read it.
    HasIt,
    IsGone,
}

impl Client {
    fn new(stream: TcpStream) -> Option<Client> {
        stream.set_nonblocking(true).ok()?;
        Some(Client { stream, deadline: Instant::now() + PATIENCE, state: State::Asks(Vec::new()) })
    }

    fn has_asked(&self) -> bool {
        matches!(self.state, State::WaitsForMetrics { .. } | State::IsTold { .. })
    }

    fn waits_for_metrics(&self) -> bool {
        matches!(self.state, State::WaitsForMetrics { .. })
    }

    /// Reads from the socket.
    fn listen(&mut self) {
        let mut piece = [0; 1024];
        for _ in 0..PIECES {
            // Bytes after a request are read only once the answer is written: closing a socket with unread bytes resets
            // the connection.
            if !matches!(self.state, State::Asks(_) | State::HasIt) {
                return;
            }
            let length = match self.stream.read(&mut piece) {
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            if length == 0 {
                self.state = State::IsGone;
            }
            if let State::Asks(request) = &mut self.state {
                request.extend(piece.iter().take(length));
                if let Some(wanted) = Wanted::read(request) {
                    self.state = wanted.state();
                    self.deadline = Instant::now() + PATIENCE;
                }
            }
        }
    }

    /// Gives the client the text, if it waits for it.
    fn answer(&mut self, text: &Rc<str>) {
        if let State::WaitsForMetrics { head_only } = self.state {
            let head = head("200 OK", text.len());
            let body = if head_only { "".into() } else { text.clone() };
            self.state = State::IsTold { head, body, written: 0 };
            self.deadline = Instant::now() + PATIENCE;
        }
    }

    /// Writes until the socket blocks. Returns whether the connection is still open.
    fn speak(&mut self) -> bool {
        while let State::IsTold { head, body, written } = &mut self.state {
            let rest = match head.get(*written..) {
                Some(rest) if !rest.is_empty() => rest,
                _ => &body.as_bytes()[*written - head.len()..],
            };
            if rest.is_empty() {
                self.deadline = Instant::now() + FAREWELL;
                self.state = match self.stream.shutdown(Shutdown::Write) {
                    Ok(()) => State::HasIt,
                    Err(_) => State::IsGone,
                };
                break;
            }
            match self.stream.write(rest) {
                Ok(length) => *written += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.state = State::IsGone,
            }
        }
        !matches!(self.state, State::IsGone)
    }
}

/// The request of a client.
enum Wanted {
    Metrics { head_only: bool },
    OtherPath,
    OtherMethod,
    Nonsense,
}

impl Wanted {
    /// Parses the head of a request, if it is complete.
    fn read(bytes: &[u8]) -> Option<Wanted> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(Status::Partial) if bytes.len() < LARGEST_REQUEST => return None,
            Ok(Status::Complete(_)) => {}
            _ => return Some(Wanted::Nonsense),
        }
        let path = request.path.unwrap_or_default().split('?').next();
        Some(match (request.method, path) {
            (Some("GET" | "HEAD"), Some("/metrics")) => {
                Wanted::Metrics { head_only: request.method == Some("HEAD") }
            }
            (Some("GET" | "HEAD"), _) => Wanted::OtherPath,
            _ => Wanted::OtherMethod,
        })
    }

    /// The state that follows the request.
    fn state(self) -> State {
        let (status, body) = match self {
            Wanted::Metrics { head_only } => return State::WaitsForMetrics { head_only },
            Wanted::OtherPath => ("404 Not Found", "there is only /metrics\n"),
            Wanted::OtherMethod => ("405 Method Not Allowed\r\nAllow: GET, HEAD", "only GET and HEAD\n"),
            Wanted::Nonsense => ("400 Bad Request", "not an HTTP request\n"),
        };
        State::IsTold { head: head(status, body.len()), body: body.into(), written: 0 }
    }
}

fn head(status: &str, length: usize) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    )
    .into_bytes()
}
