//! `GET /metrics` for a Prometheus server: one client at a time, each with little time and memory.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use httparse::{EMPTY_HEADER, Request, Status};
use tracing::{debug, info};

use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::tcp::Listener;

/// How long a client may take for its request, and to take its answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes of a request, and lines of it, at most.
const LARGEST_REQUEST: usize = 8192;
const MAX_HEADERS: usize = 64;

/// Answers until it is interrupted, with what `text` returns each time.
pub(super) fn serve(
    address: SocketAddr,
    interrupt: &Interrupt,
    text: impl Fn() -> Result<String, Failure>,
) -> Result<(), Failure> {
    let listener = Listener::at(address)?;
    info!("waiting for a client of http://{}/metrics", listener.address()?);
    loop {
        let mut stream = listener.accept(|| interrupt.check())?;
        let answer = match read_request(&mut stream) {
            Ok(request) => request.answer(&text),
            Err(error) => {
                debug!("a client that asks for nothing: {error}");
                continue;
            }
        };
        if let Err(error) = stream.set_write_timeout(Some(PATIENCE)).and_then(|()| stream.write_all(&answer))
        {
            debug!("a client that takes no answer: {error}");
        }
    }
}

/// What a client wants.
enum Wanted {
    Metrics { head_only: bool },
    OtherPath,
    OtherMethod,
    Nonsense,
}

fn read_request(stream: &mut TcpStream) -> io::Result<Wanted> {
    let deadline = Instant::now() + PATIENCE;
    let mut bytes = Vec::with_capacity(LARGEST_REQUEST);
    let mut piece = [0; 1024];
    while bytes.len() < LARGEST_REQUEST {
        let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        let length = match stream.read(&mut piece)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => length,
        };
        bytes.extend(piece.iter().take(length));
        if let Some(wanted) = Wanted::read(&bytes) {
            return Ok(wanted);
        }
    }
    Ok(Wanted::Nonsense)
}

impl Wanted {
    /// From the head of a request, if it is complete.
    fn read(bytes: &[u8]) -> Option<Wanted> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(Status::Partial) => return None,
            Ok(Status::Complete(_)) => {}
            Err(_) => return Some(Wanted::Nonsense),
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

    fn answer(self, text: impl Fn() -> Result<String, Failure>) -> Vec<u8> {
        let (status, body) = match &self {
            Wanted::Metrics { .. } => match text() {
                Ok(text) => ("200 OK", text),
                Err(failure) => ("500 Internal Server Error", format!("{failure}\n")),
            },
            Wanted::OtherPath => ("404 Not Found", "there is only /metrics\n".to_owned()),
            Wanted::OtherMethod => {
                ("405 Method Not Allowed\r\nAllow: GET, HEAD", "only GET and HEAD\n".to_owned())
            }
            Wanted::Nonsense => ("400 Bad Request", "not an HTTP request\n".to_owned()),
        };
        let length = body.len();
        let shown = if matches!(self, Wanted::Metrics { head_only: true }) { "" } else { &body };
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{shown}"
        )
        .into_bytes()
    }
}
