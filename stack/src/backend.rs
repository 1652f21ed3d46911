//! The closed enum of backends, which execute the verbs. Only this file distinguishes backends
//! (docs/decisions/07-backends.md).
//!
//! - `software.rs`, `software/`: the protocol engine over a packet driver
//! - `hardware.rs`, `hardware/`: an RNIC, with libibverbs

mod hardware;
mod software;

use ferroce_driver::{Capabilities, Nanos, PacketDriver};

use crate::verbs::{Config, Error, PostError};
use hardware::Hardware;
pub use hardware::RnicPort;
use software::Software;

/// The backend of a context. Each backend has every verb that is called on it by [`dispatch`], under the same name; an
/// unsupported one returns [`Error::Unsupported`](crate::Error::Unsupported).
#[expect(
    clippy::large_enum_variant,
    reason = "a context has one, and software is reached without another pointer"
)]
pub(crate) enum Backend {
    /// The protocol engine over a packet driver.
    Software(Software),
    /// A port of an RNIC.
    Hardware(Box<Hardware>),
}

/// What a [`Context`](crate::Context) is opened on: what [`DeviceSpec::open`](crate::DeviceSpec::open) returns, or any packet
/// driver by `into()`.
#[non_exhaustive]
pub enum Device {
    /// A packet driver, for the protocol in software.
    Driver(Box<dyn PacketDriver>),
    /// A port of an RNIC, which implements the protocol itself.
    Rnic(Box<RnicPort>),
}

impl Device {
    /// What the driver or the card says of itself.
    pub fn capabilities(&self) -> &Capabilities {
        match self {
            Device::Driver(driver) => driver.capabilities(),
            Device::Rnic(port) => port.capabilities(),
        }
    }

    /// Bits a second that its link carries now, as a driver tells; an RNIC does not.
    pub fn line_rate(&self) -> Option<u64> {
        match self {
            Device::Driver(driver) => driver.line_rate(),
            Device::Rnic(_) => None,
        }
    }

    /// The packet driver.
    ///
    /// # Errors
    /// The port of an RNIC, which moves the frames itself.
    pub fn into_driver(self) -> Result<Box<dyn PacketDriver>, Box<RnicPort>> {
        match self {
            Device::Driver(driver) => Ok(driver),
            Device::Rnic(port) => Err(port),
        }
    }
}

impl<Driver: PacketDriver + 'static> From<Box<Driver>> for Device {
    fn from(driver: Box<Driver>) -> Device {
        Device::Driver(driver)
    }
}

impl From<Box<dyn PacketDriver>> for Device {
    fn from(driver: Box<dyn PacketDriver>) -> Device {
        Device::Driver(driver)
    }
}

impl From<RnicPort> for Device {
    fn from(port: RnicPort) -> Device {
        Device::Rnic(Box::new(port))
    }
}

impl Backend {
    pub(crate) fn open(device: Device, config: &Config) -> Result<Backend, Error> {
        Ok(match device {
            Device::Driver(driver) => Backend::Software(Software::open(driver, config)?),
            Device::Rnic(port) => Backend::Hardware(Box::new(Hardware::open(*port, config)?)),
        })
    }
}

/// Executes a verb on the backend: `dispatch!(&mut self.backend, poll(now))`.
macro_rules! dispatch {
    ($backend:expr, $verb:ident($($argument:expr),*)) => {
        match $backend {
            $crate::backend::Backend::Software(software) => software.$verb($($argument),*),
            $crate::backend::Backend::Hardware(hardware) => hardware.$verb($($argument),*),
        }
    };
}
pub(crate) use dispatch;

/// A context's time never decreases, and deadlines are after it.
const TOO_LATE: Nanos = Nanos(1 << 63);

#[inline]
fn check_time(now: Nanos) -> Result<(), Error> {
    if now < TOO_LATE {
        return Ok(());
    }
    let expected = format!("below Nanos({}): told a later time, no timer would ever be due", TOO_LATE.0);
    Err(Error::invalid("now", now.0, expected))
}

#[inline]
fn in_order<T>(wrs: &[T], mut post: impl FnMut(&T) -> Result<(), Error>) -> Result<(), PostError> {
    for (posted, wr) in wrs.iter().enumerate() {
        post(wr).map_err(|source| PostError { posted, source })?;
    }
    Ok(())
}
