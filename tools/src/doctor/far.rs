//! The end that is asked.

use std::net::{IpAddr, Ipv4Addr};

use ferroce::driver::PacketDriver;
use tracing::{info, warn};

use super::control::{Control, unexpected};
use super::message::{Hello, Message, Probe};
use super::port::Port;
use super::probe::Lookout;
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::tcp::Listener;

/// Serves one client after the other, until it is interrupted; or just one.
pub(super) fn serve(
    driver: Box<dyn PacketDriver>,
    listener: &Listener,
    interrupt: &Interrupt,
    only_one: bool,
) -> Result<(), Failure> {
    let mut port = Port::new(driver);
    info!("waiting for a client on TCP port {}", listener.port()?);
    loop {
        let stream = listener.accept(|| {
            interrupt.check()?;
            port.receive(&mut |_| {})
        })?;
        match Control::new(stream, interrupt).and_then(|control| session(&mut port, control, interrupt)) {
            result if only_one => return result,
            Ok(()) => {}
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(failure) => warn!("a check ended early: {failure}"),
        }
    }
}

fn session(port: &mut Port, mut control: Control, interrupt: &Interrupt) -> Result<(), Failure> {
    let result = answer(port, &mut control, interrupt);
    if let Err(failure) = &result {
        // It may be gone, too.
        let _ = control.send(&Message::Failed(failure.to_string()));
    }
    result
}

fn answer(port: &mut Port, control: &mut Control, interrupt: &Interrupt) -> Result<(), Failure> {
    let Some(first) = control.receive()? else { return Ok(()) };
    let Message::Hello(asks) = first else { return Err(unexpected(&first)) };
    let own = port.hello(asks.to, asks.address);
    info!(from = %control.peer()?, "a check between {} and {}", asks.address, asks.to);
    control.send(&Message::Hello(own.clone()))?;
    while let Some(message) = control.receive()? {
        match message {
            Message::Expect(probes) => expect(port, control, &asks, &own, probes, interrupt)?,
            Message::Send(probes) => {
                let sent = check_addresses(&own, asks.address);
                let sent = sent.and_then(|()| port.send(&own, asks.address, &probes));
                control.send(&Message::Sent(sent.err().map(|failure| failure.to_string())))?;
            }
            other => return Err(unexpected(&other)),
        }
    }
    Ok(())
}

/// Whoever asks says where it is. Probes go from an address of this end to one host.
fn check_addresses(own: &Hello, to: IpAddr) -> Result<(), Failure> {
    let Hello { address, interface, .. } = own;
    if !own.addresses.contains(address) {
        return Err(Failure::run(format!("{address} is no address of '{interface}'")));
    }
    let is_broadcast = to == IpAddr::V4(Ipv4Addr::BROADCAST);
    if to.is_ipv4() != address.is_ipv4() || to.is_multicast() || to.is_unspecified() || is_broadcast {
        return Err(Failure::run(format!(
            "{to} is not the address of one host, of the IP version of {address}"
        )));
    }
    Ok(())
}

/// Looks out for probes until the client has sent them all.
fn expect(
    port: &mut Port,
    control: &mut Control,
    from: &Hello,
    own: &Hello,
    probes: Vec<Probe>,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let mut lookout = Lookout::new(from, own.address, port.is_socket(), probes);
    control.send(&Message::Ready)?;
    // The port holds more than a check sends; they are taken once the client says that it is done.
    match control.receive()? {
        Some(Message::Collect) => port.collect(&mut lookout, interrupt)?,
        Some(other) => return Err(unexpected(&other)),
        None => return Ok(()),
    }
    control.send(&Message::Seen(lookout.into_seen()))
}
