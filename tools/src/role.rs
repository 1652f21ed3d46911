//! The two roles of an rdma_cm program. This process has one of them, or both over the loopback driver.

use std::net::SocketAddr;
use std::process::ExitCode;

use ferroce::Device;

use crate::endpoint::{Endpoint, Interrupt, PortArgs};
use crate::failure::Failure;
use crate::serving::ServingArgs;
use crate::{host, selftest};

/// One end of such a program.
pub(crate) trait Role {
    /// Its port.
    fn end(&self) -> &Endpoint;

    /// Waits for a client, and serves it. Returns whether a client arrived before a signal.
    fn serve(&mut self) -> Result<bool, Failure>;

    /// Connects to the server, and runs as the client.
    fn call(&mut self, to: SocketAddr) -> Result<(), Failure>;
}

/// The arguments of both roles.
pub(crate) struct RoleArgs<'a> {
    pub(crate) port: &'a PortArgs,
    /// The server, by name or address. Without it, this process is the server.
    pub(crate) host: Option<&'a str>,
    /// Port of the connection manager.
    pub(crate) cm_port: u16,
    pub(crate) serving: &'a ServingArgs,
}

/// Runs as the server without a host, as the client with one, and as both on a device without other processes.
pub(crate) fn play<E: Role>(
    args: &RoleArgs<'_>,
    new: impl Fn(&PortArgs, Device, Interrupt) -> Result<E, Failure> + Sync,
) -> Result<ExitCode, Failure> {
    let RoleArgs { port, host, cm_port, serving } = *args;
    let interrupt = Interrupt::install()?;
    if let Some([server, client]) = selftest::ports(&port.device, host)? {
        let to = SocketAddr::new(server.capabilities().addresses[0], cm_port);
        let serve = || new(&port.for_server(), server, interrupt.clone())?.serve().map(drop);
        let call = || new(port, client, interrupt.clone())?.call(to);
        selftest::run(&interrupt, serve, call)?;
    } else {
        let open = || new(port, port.open()?, interrupt.clone());
        match host {
            None => serving.run(&interrupt, open, |mut end| end.serve())?,
            Some(host) => {
                let mut end = open()?;
                let to = host::reachable(end.end(), host, cm_port)?;
                end.call(to)?;
            }
        }
    }
    port.check_recording().map(|()| ExitCode::SUCCESS)
}
