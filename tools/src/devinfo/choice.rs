//! The backend that a device name selects, and the reason.

use ferroce::driver::Capabilities;
use ferroce::{DeviceSpec, Error, SharedMemory};
use serde::Serialize;

use super::rnics::Rnics;
use crate::failure::{Failure, legible};
use crate::output::say;

#[derive(Debug, Serialize)]
pub(super) struct Choice {
    /// As given with -d.
    name: String,
    driver: &'static str,
    reason: String,
    /// RNICs on the same interface; an interface's name never selects them.
    rnics: Vec<OtherCard>,
}

#[derive(Debug, Serialize)]
struct OtherCard {
    /// For -d.
    device: String,
    /// Whether it is rdma_rxe: software of the kernel, not hardware.
    software: bool,
}

impl Choice {
    /// For an opened device. `rnics` are those of the machine.
    pub(super) fn new(device: &DeviceSpec, opened: &Capabilities, rnics: Option<&Rnics>) -> Choice {
        let by_name = "the name says so".to_owned();
        let reason = match (device, opened.driver) {
            (DeviceSpec::Interface { .. }, "af_xdp") => "the lowest latency in this build".to_owned(),
            (DeviceSpec::Interface { interface, .. }, driver) => {
                let faster = DeviceSpec::AfXdp {
                    interface: interface.clone(),
                    queue: None,
                    shared_memory: SharedMemory::Off,
                };
                match faster.open() {
                    Err(reason) => format!("af_xdp is not available: {reason}"),
                    Ok(_) => format!("af_xdp was not available when {driver} was chosen, and is now"),
                }
            }
            _ => by_name,
        };
        let interface = match device {
            DeviceSpec::Interface { interface: name, .. }
            | DeviceSpec::AfXdp { interface: name, .. }
            | DeviceSpec::UdpInterface { interface: name, .. } => Some(name),
            _ => None,
        };
        let cards = interface.into_iter().flat_map(|name| rnics.map(|rnics| rnics.on(name))).flatten();
        let rnics = cards.map(|(name, software)| OtherCard { device: format!("ibverbs:{name}"), software });
        Choice { name: device.to_string(), driver: opened.driver, reason, rnics: rnics.collect() }
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        say!("-d {} selects {}: {}", self.name, self.driver, legible(&self.reason))?;
        for OtherCard { device, software } in &self.rnics {
            let what = if *software {
                "rdma_rxe, the kernel's software RoCE, is on this interface too"
            } else {
                "an RNIC is on this interface too, and is faster"
            };
            say!("  {what}: -d {device}")?;
        }
        Ok(())
    }
}

/// Explains an unknown interface name that is the name of an RNIC.
pub(super) fn explain(name: &str, error: ferroce::driver::Error, rnics: &Rnics) -> Failure {
    match rnics.has(name) {
        true => Failure::usage(format!("'{name}' is an RNIC, not an interface: -d ibverbs:{name}")),
        false => Error::from(error).into(),
    }
}
