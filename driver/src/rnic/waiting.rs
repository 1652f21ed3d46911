//! Waiting for a device.

use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::time::Duration;

use super::completion::CompletionChannel;
use super::connection::EventChannel;
use super::device::Device;
use crate::waker::Doorbell;
use crate::{Armed, Error};

/// The wake-up sources of a device's owner: the events of a completion channel, asynchronous events, and other threads.
#[derive(Debug)]
pub struct Waiting {
    doorbell: Doorbell,
    device: Device,
    channel: CompletionChannel,
    connections: Option<EventChannel>,
}

impl Waiting {
    /// Waits for a channel of a device.
    ///
    /// # Errors
    /// [`Error::Verbs`], [`Error::Os`].
    pub fn new(device: &Device, channel: &CompletionChannel) -> Result<Waiting, Error> {
        let doorbell = Doorbell::new().map_err(|source| os(device, source))?;
        let waiting =
            Waiting { doorbell, device: device.clone(), channel: channel.clone(), connections: None };
        descriptors(device, channel, None)?;
        Ok(waiting)
    }

    /// Waits for the events of connections too.
    ///
    /// # Errors
    /// [`Error::Verbs`], [`Error::Os`].
    pub fn add(&mut self, connections: &EventChannel) -> Result<(), Error> {
        self.doorbell.widen(connections.fd()?).map_err(|source| os(&self.device, source))?;
        self.connections = Some(connections.clone());
        Ok(())
    }

    /// Prepares a wait by the caller on a descriptor.
    ///
    /// # Errors
    /// [`Error::Verbs`], [`Error::Os`].
    pub fn arm(&mut self) -> Result<Armed<'_>, Error> {
        let Waiting { doorbell, device, channel, connections } = self;
        let descriptors = descriptors(device, channel, connections.as_ref())?;
        doorbell.arm(descriptors.into_iter()).map_err(|source| os(device, source))?;
        Ok(Armed { fd: Some(std::os::fd::AsFd::as_fd(&*doorbell)), longest: Duration::MAX })
    }

    /// Ends the wait that [`arm`](Waiting::arm) prepared.
    pub fn disarm(&mut self) {
        self.doorbell.disarm();
    }

    /// Blocks until there is an event, the [`waker`](Waiting::waker) is called, or `timeout` has passed.
    ///
    /// # Errors
    /// [`Error::Verbs`], [`Error::Os`].
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let Waiting { doorbell, device, channel, connections } = self;
        let descriptors = descriptors(device, channel, connections.as_ref())?;
        doorbell.wait_with(descriptors.into_iter(), timeout).map_err(|source| os(device, source))
    }

    /// Lets another thread end a wait.
    pub fn waker(&self) -> Waker {
        self.doorbell.waker()
    }
}

fn descriptors<'a>(
    device: &'a Device,
    channel: &'a CompletionChannel,
    connections: Option<&'a EventChannel>,
) -> Result<Vec<BorrowedFd<'a>>, Error> {
    let mut descriptors = vec![channel.fd()?, device.event_fd()?];
    descriptors.extend(connections.map(EventChannel::fd).transpose()?);
    Ok(descriptors)
}

fn os(device: &Device, source: std::io::Error) -> Error {
    Error::Os { what: "waiting by file descriptor", interface: device.name().to_owned(), source }
}
