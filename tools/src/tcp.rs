//! The TCP connections between the ends of a measurement.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};
use crate::host::{self, in_background};

/// The longest time that the other end may leave sent data unread.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

/// The time limit for connecting.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// The most blocks that are read in one call, so that a peer that sends continuously does not block the rest.
const PIECES: usize = 16;

/// The most new connections that are accepted before the existing ones are read.
const MAX_NEW: usize = 16;

/// A server's listening socket.
pub(crate) struct Listener {
    listener: TcpListener,
    /// Whether a failure to accept clients was reported.
    is_troubled: AtomicBool,
}

/// The address of a server of many clients: `8080` is 127.0.0.1:8080, `:8080` all addresses, or `HOST:8080`.
#[derive(Clone, Debug)]
pub(crate) struct ListenAddress {
    /// `None`: all addresses.
    host: Option<String>,
    port: u16,
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ListenAddress, String> {
        let wrong = || {
            format!(
                "'{text}': must be a port, as 8080 or :8080, or an address with a port, as 10.0.0.1:8080 or [::1]:8080"
            )
        };
        let (host, port) = text.rsplit_once(':').unwrap_or(("127.0.0.1", text));
        let port = port.parse().map_err(|_| wrong())?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        // Without brackets, the last group of an IPv6 address would be taken for the port.
        if host.contains(':') && !text.starts_with('[') {
            return Err(wrong());
        }
        Ok(ListenAddress { host: Some(host.to_owned()).filter(|host| !host.is_empty()), port })
    }
}

impl ListenAddress {
    pub(crate) fn listen(&self) -> Result<Listener, Failure> {
        let Some(host) = &self.host else { return Listener::any(self.port) };
        let listener = TcpListener::bind((&**host, self.port));
        Listener::new(listener.or_fail(|| format!("listening on {host}:{}", self.port))?)
    }
}

impl Listener {
    /// On all addresses of the machine.
    pub(crate) fn any(port: u16) -> Result<Listener, Failure> {
        // If IPv6 is disabled, there is no [::].
        let addresses =
            [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
        let listener = TcpListener::bind(&addresses[..]).map_err(|error| {
            Failure::run(match error.kind() {
                ErrorKind::AddrInUse => {
                    format!("TCP port {port} is in use by another process; use another one at both ends (-p)")
                }
                _ => format!("listening on TCP port {port}: {error}"),
            })
        })?;
        Listener::new(listener)
    }

    /// On a port that the kernel chooses and that only this machine can reach.
    pub(crate) fn local() -> Result<Listener, Failure> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).or_fail(|| "listening on 127.0.0.1".into())?;
        Listener::new(listener)
    }

    fn new(listener: TcpListener) -> Result<Listener, Failure> {
        listener.set_nonblocking(true).or_fail(|| "listening".into())?;
        Ok(Listener { listener, is_troubled: AtomicBool::new(false) })
    }

    pub(crate) fn port(&self) -> Result<u16, Failure> {
        Ok(self.address()?.port())
    }

    pub(crate) fn address(&self) -> Result<SocketAddr, Failure> {
        self.listener.local_addr().or_fail(|| "listening".into())
    }

    /// Accepts pending connections, with their source addresses; at most a few, so that existing connections are read,
    /// too. The connections are blocking.
    pub(crate) fn newcomers(&self) -> impl Iterator<Item = (TcpStream, SocketAddr)> {
        (0..MAX_NEW).map_while(|_| self.poll())
    }

    fn poll(&self) -> Option<(TcpStream, SocketAddr)> {
        let accepted = self.listener.accept().and_then(|(stream, from)| {
            stream.set_nonblocking(false)?;
            Ok((stream, from))
        });
        match accepted {
            Ok(newcomer) => {
                self.is_troubled.store(false, Ordering::Relaxed);
                Some(newcomer)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            // All errors of accept are temporary: the client has given up, the path to it is lost, or there is no file
            // descriptor available.
            Err(error) => {
                if !self.is_troubled.swap(true, Ordering::Relaxed) {
                    warn!("a client can't be accepted: {error}");
                }
                None
            }
        }
    }
}

/// A connection that does not block on reading; sending blocks until a signal arrives.
pub(crate) struct Link {
    stream: TcpStream,
    interrupt: Interrupt,
    open: bool,
}

impl Link {
    pub(crate) fn new(stream: TcpStream, interrupt: &Interrupt) -> Result<Link, Failure> {
        stream.set_nodelay(true).or_fail(|| "control connection".into())?;
        stream.set_nonblocking(true).or_fail(|| "control connection".into())?;
        Ok(Link { stream, interrupt: interrupt.clone(), open: true })
    }

    /// Whether more data may arrive.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Sends all of it. If the other end is gone, [`receive`](Link::receive) reports it.
    ///
    /// # Errors
    /// [`Failure::Interrupted`], if it has to wait.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let deadline = Instant::now() + SEND_PATIENCE;
        let mut rest = bytes;
        while !rest.is_empty() && self.open {
            match self.stream.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    self.interrupt.check()?;
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
        }
        Ok(())
    }

    /// Passes received data on, a limited amount. Returns whether there was any, and whether more may arrive.
    pub(crate) fn receive(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(bool, bool), Failure> {
        let mut chunk = [0; 4096];
        let mut any = false;
        for _ in 0..PIECES {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.open = false,
                Ok(count) => {
                    take(&chunk[..count])?;
                    any = true;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.open = false,
            }
            break;
        }
        Ok((any, self.open))
    }
}

/// Connects to a server at one of these addresses.
pub(crate) fn connect(to: Vec<SocketAddr>, interrupt: &Interrupt) -> Result<TcpStream, Failure> {
    let name = to.first().map(|address| address.ip().to_string()).unwrap_or_default();
    Ok(in_background(interrupt, &name, move || connect_to(&to))??)
}

/// The reason that there is no connection.
#[derive(Debug)]
pub(crate) struct NoConnection {
    reason: Failure,
    /// The peer has refused it, so packets pass in both directions.
    pub(crate) by_peer: bool,
}

impl From<NoConnection> for Failure {
    fn from(failed: NoConnection) -> Failure {
        failed.reason
    }
}

impl From<Failure> for NoConnection {
    fn from(reason: Failure) -> NoConnection {
        NoConnection { reason, by_peer: false }
    }
}

/// Connects to a server; a failure says what it shows about the path.
pub(crate) fn try_connect(host: &str, port: u16, interrupt: &Interrupt) -> Result<TcpStream, NoConnection> {
    let name = host.to_owned();
    in_background(interrupt, host, move || connect_to(&host::find(&name, port)?))?
}

fn connect_to(addresses: &[SocketAddr]) -> Result<TcpStream, NoConnection> {
    let mut failed =
        NoConnection { reason: Failure::run("there is no address to connect to"), by_peer: false };
    for address in addresses {
        match TcpStream::connect_timeout(address, CONNECT_PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                failed.by_peer |= error.kind() == ErrorKind::ConnectionRefused;
                failed.reason = Failure::run(format!(
                    "connecting to {address}: {error}; is the server running? One that serves another client \
                     refuses connections until it is done"
                ));
            }
        }
    }
    Err(failed)
}

/// The first bytes of each end of a control connection: the protocol and its version.
pub(crate) type Greeting = [u8; 8];

/// Fails if the other end's greeting is not that of `ferroce COMMAND`.
pub(crate) fn check_greeting(found: &Greeting, right: &Greeting, command: &str) -> Result<(), Failure> {
    if found == right {
        return Ok(());
    }
    Err(Failure::run(format!(
        "the other end greets with '{}' instead of '{}': it is not `ferroce {command}`, or it is another version",
        found.escape_ascii(),
        right.escape_ascii()
    )))
}

/// Fills `buffer`, within `patience`.
pub(crate) fn read_exact(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    patience: Duration,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let deadline = Instant::now() + patience;
    // Short, so that signals are noticed.
    stream.set_read_timeout(Some(Duration::from_millis(50))).or_fail(|| "reading from the peer".into())?;
    let mut have = 0;
    while have < buffer.len() {
        interrupt.check()?;
        // Also for a peer that sends a byte from time to time.
        if Instant::now() > deadline {
            return Err(Failure::run(format!(
                "the peer sent {have} of {} bytes over TCP within {patience:?}",
                buffer.len()
            )));
        }
        match stream.read(&mut buffer[have..]) {
            Ok(0) => {
                return Err(Failure::run(format!(
                    "the peer closed the TCP connection after {have} of {} bytes",
                    buffer.len()
                )));
            }
            Ok(n) => have += n,
            Err(error)
                if [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted]
                    .contains(&error.kind()) => {}
            Err(error) => return Err(Failure::run(format!("reading from the peer over TCP: {error}"))),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_of_this_machine() {
        for (text, host) in [
            ("8080", Some("127.0.0.1")),
            (":8080", None),
            ("example.org:8080", Some("example.org")),
            ("[::1]:8080", Some("::1")),
            ("0.0.0.0:8080", Some("0.0.0.0")),
        ] {
            let address: ListenAddress = text.parse().expect(text);
            assert_eq!((address.host.as_deref(), address.port), (host, 8080), "{text}");
        }
        for wrong in ["", "host", "80800", "::1", "fe80::1:8080", "10.0.0.1:", "10.0.0.1:http"] {
            assert!(wrong.parse::<ListenAddress>().is_err_and(|said| said.contains(":8080")), "{wrong}");
        }
    }

    /// A peer that does not read must not delay the handling of a signal.
    #[test]
    fn a_send_that_waits_is_interrupted() {
        let listener = Listener::local().expect("a port");
        let _deaf = connect(vec![listener.address().expect("its address")], &Interrupt::default())
            .expect("a connection");
        let interrupt = Interrupt::default();
        let mut link = Link::new(accept(&listener), &interrupt).expect("a connection");
        let signal = thread::spawn(move || {
            thread::sleep(Duration::from_millis(200));
            interrupt.set();
        });
        let started = Instant::now();
        let result = link.send(&vec![0; 64 << 20]);
        let took = started.elapsed();
        signal.join().expect("no panic");
        assert!(took < Duration::from_secs(5), "{took:?}");
        assert!(matches!(result, Err(Failure::Interrupted)), "{result:?}");
    }

    fn accept(listener: &Listener) -> TcpStream {
        loop {
            match listener.newcomers().next() {
                Some((stream, _)) => return stream,
                None => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    #[test]
    fn a_peer_that_sends_byte_after_byte_has_its_time() {
        let listener = Listener::local().expect("a port");
        let mut slow = connect(vec![listener.address().expect("its address")], &Interrupt::default())
            .expect("a connection");
        let mut stream = accept(&listener);
        let started = Instant::now();
        let writer = thread::spawn(move || {
            while slow.write_all(b"x").is_ok() && started.elapsed() < Duration::from_secs(5) {
                thread::sleep(Duration::from_millis(10));
            }
        });
        let patience = Duration::from_millis(200);
        let result = read_exact(&mut stream, &mut [0; 400], patience, &Interrupt::default());
        let took = started.elapsed();
        drop(stream);
        writer.join().expect("no panic");
        assert!(result.is_err_and(|failure| failure.to_string().contains("of 400 bytes")));
        assert!(took < Duration::from_secs(2), "{took:?}");
    }
}
