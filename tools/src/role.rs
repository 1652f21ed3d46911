//! The two roles of a program of rdma_cm, of which this process plays one, or both over the loopback driver.

use std::net::IpAddr;
use std::process::ExitCode;

use ferroce::Device;

use crate::endpoint::{Interrupt, PortArgs};
use crate::failure::Failure;
use crate::selftest;

/// One end of such a program.
pub(crate) trait Role {
    /// Waits for a client, and serves it.
    fn serve(&mut self) -> Result<(), Failure>;

    /// Connects to the server there, and does the client's part.
    fn call(&mut self, host: IpAddr) -> Result<(), Failure>;
}

/// Plays the server without a host, the client with one; both on a device that reaches no other process.
pub(crate) fn play<E: Role>(
    port: &PortArgs,
    host: Option<IpAddr>,
    new: impl Fn(&PortArgs, Device, Interrupt) -> Result<E, Failure> + Sync,
) -> Result<ExitCode, Failure> {
    let interrupt = Interrupt::install()?;
    let name = host.map(|host| host.to_string());
    let Some([server, client]) = selftest::ports(&port.device, name.as_deref())? else {
        let mut end = new(port, port.open()?, interrupt)?;
        match host {
            None => end.serve()?,
            Some(host) => end.call(host)?,
        }
        drop(end);
        return port.check_recording().map(|()| ExitCode::SUCCESS);
    };
    let to = server.capabilities().addresses[0];
    let serve = || new(&port.for_server(), server, interrupt.clone())?.serve();
    let call = || new(port, client, interrupt.clone())?.call(to);
    selftest::run(&interrupt, serve, call)?;
    port.check_recording().map(|()| ExitCode::SUCCESS)
}
