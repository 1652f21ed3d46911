//! The peer on the command line: an address, or a name that the system's resolver knows. Of several addresses, those of
//! the device's IP version are preferred.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use tracing::info;

use crate::endpoint::{Endpoint, Interrupt};
use crate::failure::Failure;

/// The interval for checking interrupts.
const LOOK: Duration = Duration::from_millis(20);

/// The addresses of a host, those of an IP version of the device first. Logs them.
pub(crate) fn look_up(end: &Endpoint, host: &str, port: u16) -> Result<Vec<SocketAddr>, Failure> {
    let name = host.to_owned();
    let mut found = in_background(&end.interrupt, host, move || find(&name, port))??;
    found.sort_by_key(|address| !has_version(end, address.ip()));
    if host.parse::<IpAddr>().is_err() {
        info!("host '{host}' is {}", list(&found));
    }
    Ok(found)
}

/// The first address of a host that the device can reach.
pub(crate) fn reachable(end: &Endpoint, host: &str, port: u16) -> Result<SocketAddr, Failure> {
    let found = look_up(end, host, port)?;
    if let Ok(address) = host.parse() {
        // The stack decides whether the device reaches it.
        return Ok(SocketAddr::new(address, port));
    }
    let first = found.iter().find(|address| has_version(end, address.ip()));
    first.copied().ok_or_else(|| {
        let own: Vec<_> = end.context.port().gids.iter().map(|row| row.gid.to_ip().to_string()).collect();
        Failure::usage(format!(
            "host '{host}' is {}, and '{}' has no address of that IP version, only {}",
            list(&found),
            end.device,
            own.join(", ")
        ))
    })
}

/// The addresses of a host, in the order of the resolver.
pub(crate) fn find(host: &str, port: u16) -> Result<Vec<SocketAddr>, Failure> {
    let wrong =
        |why: &str| Failure::usage(format!("host '{host}': {why}; it must be a name or an IP address"));
    let found = (host, port).to_socket_addrs().map_err(|error| wrong(&error.to_string()))?;
    let found: Vec<SocketAddr> = found.collect();
    if found.is_empty() { Err(wrong("it has no address")) } else { Ok(found) }
}

/// Runs work that a signal does not interrupt on its own thread, which is abandoned after a signal.
pub(crate) fn in_background<T: Send + 'static>(
    interrupt: &Interrupt,
    host: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let (tell, told) = sync_channel(1);
    thread::spawn(move || {
        // After a signal the receiver is gone.
        let _ = tell.send(work());
    });
    loop {
        match told.recv_timeout(LOOK) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => interrupt.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::run(format!("host '{host}': the thread that resolves it has ended")));
            }
        }
    }
}

fn has_version(end: &Endpoint, address: IpAddr) -> bool {
    let is_v4 = address.to_canonical().is_ipv4();
    end.context.port().gids.iter().any(|row| row.gid.to_ip().is_ipv4() == is_v4)
}

fn list(found: &[SocketAddr]) -> String {
    found.iter().map(|address| address.ip().to_string()).collect::<Vec<_>>().join(", ")
}
