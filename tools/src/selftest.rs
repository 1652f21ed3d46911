//! Both ends of a measurement in one process, over the loopback driver.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::OnceLock;
use std::thread;

use ferroce::driver::loopback;
use ferroce::{Device, DeviceSpec};
use tracing::info;

use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// The ports of server and client if the device is `loopback`, whose other end must be in this process.
pub(crate) fn ports(device: &DeviceSpec, host: Option<&str>) -> Result<Option<[Device; 2]>, Failure> {
    match (device, host) {
        (DeviceSpec::Loopback, None) => {
            info!("loopback does not leave this process: server and client both run in it");
            let [server, client] = [1, 2].map(|last| IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)));
            let (server, client) = loopback::pair(&[server], &[client]);
            Ok(Some([Box::new(server).into(), Box::new(client).into()]))
        }
        (DeviceSpec::Loopback, Some(host)) => Err(Failure::usage(format!(
            "host '{host}' can't be reached over -d loopback, which stays inside this process; leave the host out to \
             run both ends here, or name an interface"
        ))),
        _ => Ok(None),
    }
}

/// Runs the server on its own thread and the client on this one. If one fails, the other is interrupted; if a signal
/// came first, the result is that of an interruption.
pub(crate) fn run<T>(
    interrupt: &Interrupt,
    server: impl FnOnce() -> Result<(), Failure> + Send,
    client: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let is_signalled = OnceLock::new();
    let ended = |failure| {
        is_signalled.get_or_init(|| interrupt.is_set());
        interrupt.set();
        failure
    };
    let (served, result) = thread::scope(|scope| {
        let server = scope.spawn(|| server().map_err(ended));
        let result = client().map_err(ended);
        let served = server.join().unwrap_or_else(|_| Err(Failure::run("the server's thread panicked")));
        (served, result)
    });
    match (served, result) {
        _ if is_signalled.get() == Some(&true) => Err(Failure::Interrupted),
        (Ok(()), result) => result,
        (Err(failure), Ok(_)) => Err(failure),
        (Err(server), Err(client)) => Err(of_both(server, client)),
    }
}

/// The message if both ends fail: one because of the other, and it is unknown which one was the first.
fn of_both(server: Failure, client: Failure) -> Failure {
    let (at_server, at_client) = (server.to_string(), client.to_string());
    match (server, client) {
        (Failure::Interrupted, other) | (other, Failure::Interrupted) => other,
        (server, _) if at_client.contains(&at_server) => server,
        (_, client) if at_server.contains(&at_client) => client,
        (server, client) => {
            let text = format!("{at_client}; the server: {at_server}");
            let is_usage = [&server, &client].iter().any(|failure| matches!(failure, Failure::Usage(_)));
            if is_usage { Failure::Usage(text) } else { Failure::Run(text) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_told_from_an_end_that_fails() {
        let interrupt = Interrupt::default();
        interrupt.set();
        let told = || Err(Failure::run("the other end failed: interrupted"));
        let result = run::<()>(&interrupt, told, || interrupt.check());
        assert!(matches!(result, Err(Failure::Interrupted)), "{result:?}");
        let interrupt = Interrupt::default();
        let interrupted = || loop {
            interrupt.check()?;
        };
        let result = run::<()>(&interrupt, || Err(Failure::run("no memory")), interrupted);
        assert!(matches!(&result, Err(Failure::Run(why)) if why == "no memory"), "{result:?}");
    }
}
