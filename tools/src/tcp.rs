//! The TCP connections beside a measurement, over which its ends find each other.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tracing::warn;

use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};

/// How long the other end may leave what is sent to it.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

/// Where a server waits for its client.
pub(crate) struct Listener {
    listener: TcpListener,
    /// That clients can't be let in has been said.
    is_troubled: AtomicBool,
}

impl Listener {
    /// On all addresses of the machine.
    pub(crate) fn any(port: u16) -> Result<Listener, Failure> {
        // Where IPv6 is off, there is no [::].
        let addresses =
            [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
        let listener =
            TcpListener::bind(&addresses[..]).or_fail(|| format!("listening on TCP port {port}"))?;
        Listener::new(listener)
    }

    /// On one address.
    pub(crate) fn at(address: SocketAddr) -> Result<Listener, Failure> {
        Listener::new(TcpListener::bind(address).or_fail(|| format!("listening on {address}"))?)
    }

    /// On a port of the kernel's choice that only this machine reaches.
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

    /// Waits for a client, without end. Does `meanwhile` again and again; its failure ends the wait.
    pub(crate) fn accept(
        &self,
        mut meanwhile: impl FnMut() -> Result<(), Failure>,
    ) -> Result<TcpStream, Failure> {
        loop {
            meanwhile()?;
            match self.poll() {
                Some(stream) => return Ok(stream),
                None => thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// A client, if one waits.
    pub(crate) fn poll(&self) -> Option<TcpStream> {
        let accepted = self.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(false)?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => {
                self.is_troubled.store(false, Ordering::Relaxed);
                Some(stream)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            // All that keeps a client from being let in passes: it has given up, the way to it has gone,
            // there is no descriptor for it now.
            Err(error) => {
                if !self.is_troubled.swap(true, Ordering::Relaxed) {
                    warn!("a client can't be let in: {error}");
                }
                None
            }
        }
    }
}

/// A connection that never blocks.
pub(crate) struct Link {
    stream: TcpStream,
    open: bool,
}

impl Link {
    pub(crate) fn new(stream: TcpStream) -> Result<Link, Failure> {
        stream.set_nodelay(true).or_fail(|| "control connection".into())?;
        stream.set_nonblocking(true).or_fail(|| "control connection".into())?;
        Ok(Link { stream, open: true })
    }

    /// Whether more may come.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Sends all of it. If the other end is gone, [`receive`](Link::receive) will tell.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        let deadline = Instant::now() + SEND_PATIENCE;
        let mut rest = bytes;
        while !rest.is_empty() && self.open {
            match self.stream.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
        }
    }

    /// Hands over what has arrived. Returns whether there was anything, and whether more may come.
    pub(crate) fn receive(
        &mut self,
        mut take: impl FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(bool, bool), Failure> {
        let mut chunk = [0; 4096];
        let mut any = false;
        loop {
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

/// Connects to a server.
pub(crate) fn connect(host: &str, port: u16) -> Result<TcpStream, Failure> {
    let addresses = (host, port)
        .to_socket_addrs()
        .map_err(|error| Failure::usage(format!("host '{host}': {error}; a name or an IP address")))?;
    let mut refused = format!("host '{host}' has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return Ok(stream),
            Err(error) => refused = format!("connecting to {address}: {error}; is the server running?"),
        }
    }
    Err(Failure::Run(refused))
}

/// What either end of a control connection says first: the protocol and its version.
pub(crate) type Greeting = [u8; 8];

/// Fails if the other end's greeting is not that of `ferroce COMMAND`.
pub(crate) fn check_greeting(found: &Greeting, right: &Greeting, command: &str) -> Result<(), Failure> {
    if found == right {
        return Ok(());
    }
    Err(Failure::run(format!(
        "the other end greets with '{}' instead of '{}': it is not `ferroce {command}`, or of another version",
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
                    .contains(&error.kind()) =>
            {
                if Instant::now() > deadline {
                    return Err(Failure::run(format!(
                        "the peer sent {have} of {} bytes over TCP within {} s",
                        buffer.len(),
                        patience.as_secs()
                    )));
                }
            }
            Err(error) => return Err(Failure::run(format!("reading from the peer over TCP: {error}"))),
        }
    }
    Ok(())
}
