//! Both ends of a measurement in this process, over the loopback driver.

use std::net::{IpAddr, Ipv4Addr};
use std::thread;

use ferroce::driver::loopback;
use ferroce::{DeviceSpec, PacketDriver};
use tracing::info;

use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// The ports of server and client if the device is `loopback`, whose other end can only be here.
pub(crate) fn ports(
    device: &DeviceSpec,
    host: Option<&str>,
) -> Result<Option<[Box<dyn PacketDriver>; 2]>, Failure> {
    match (device, host) {
        (DeviceSpec::Loopback, None) => {
            info!("loopback reaches no other process: server and client both run in this one");
            let [server, client] = [1, 2].map(|last| IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)));
            let (server, client) = loopback::pair(&[server], &[client]);
            Ok(Some([Box::new(server), Box::new(client)]))
        }
        (DeviceSpec::Loopback, Some(host)) => Err(Failure::usage(format!(
            "host '{host}' can't be reached over -d loopback, which stays inside this process; leave the host out to \
             run both ends here, or name an interface"
        ))),
        _ => Ok(None),
    }
}

/// Runs the server on a thread of its own and the client on this one. Where one fails, the other is
/// interrupted; the failure that came first is returned.
pub(crate) fn run<T>(
    interrupt: &Interrupt,
    server: impl FnOnce() -> Result<(), Failure> + Send,
    client: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    // With each failure, whether the other end was all right at that time.
    let ended = |failure| (interrupt.set(), failure);
    let (served, result) = thread::scope(|scope| {
        let server = scope.spawn(|| server().map_err(ended));
        let result = client().map_err(ended);
        let served =
            server.join().unwrap_or_else(|_| Err((true, Failure::run("the server's thread panicked"))));
        (served, result)
    });
    match (served, result) {
        (Ok(()), result) => result.map_err(|(_, failure)| failure),
        (Err((first, failure)), Err(_)) if first => Err(failure),
        (Err(_), Err((_, failure))) | (Err((_, failure)), Ok(_)) => Err(failure),
    }
}
