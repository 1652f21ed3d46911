//! RNICs, as libibverbs lists them.

use std::path::Path;

use ferroce::Gid;
use ferroce::driver::netlink::Interface;
use ferroce::driver::rnic::{Rnic, RnicGidKind, Verbs};
use serde::Serialize;

use super::card_congestion::CardCongestion;
use crate::failure::{Failure, legible};
use crate::output::say;

#[derive(Debug, Serialize)]
pub(super) struct Rnics {
    /// The reason that RNICs can't be listed; null if libibverbs is installed.
    unavailable: Option<String>,
    /// The interface that the list is restricted to, if it is.
    #[serde(skip)]
    interface: Option<String>,
    devices: Vec<RnicInfo>,
}

#[derive(Debug, Serialize)]
struct RnicInfo {
    name: String,
    /// The reason that it can't be queried; null if it can.
    error: Option<String>,
    firmware: Option<String>,
    max_qps: Option<u32>,
    max_qp_wr: Option<u32>,
    /// Whether it is rdma_rxe; null if it can't be queried.
    rxe: Option<bool>,
    /// `guessable`, or `unknown`: no RNIC reports it.
    keys: &'static str,
    /// Asynchronous events that it does not raise; null if unknown.
    absent_events: Option<Vec<&'static str>>,
    ports: Vec<PortInfo>,
}

#[derive(Debug, Serialize)]
struct PortInfo {
    number: u8,
    active: bool,
    /// Otherwise InfiniBand.
    ethernet: bool,
    /// In bytes.
    path_mtu: Option<u32>,
    /// Null if the kernel does not report it.
    congestion: Option<CardCongestion>,
    gids: Vec<GidInfo>,
}

#[derive(Debug, Serialize)]
struct GidInfo {
    index: u32,
    gid: String,
    #[serde(rename = "type")]
    kind: String,
    interface: Option<String>,
}

impl Rnics {
    /// All RNICs; `interfaces` provide the names of their GIDs' interfaces.
    pub(super) fn find(interfaces: &[Interface]) -> Rnics {
        match Verbs::load().and_then(|verbs| verbs.rnics()) {
            Err(reason) => {
                Rnics { unavailable: Some(reason.to_string()), interface: None, devices: Vec::new() }
            }
            Ok(rnics) => {
                let devices = rnics.into_iter().map(|rnic| RnicInfo::new(rnic, interfaces));
                Rnics { unavailable: None, interface: None, devices: devices.collect() }
            }
        }
    }

    /// Keeps only the one with this name, if there is one.
    pub(super) fn keep(&mut self, name: &str) {
        if self.has(name) {
            self.devices.retain(|rnic| rnic.name == name);
        }
    }

    /// Keeps only those on an interface.
    pub(super) fn keep_on(&mut self, interface: &str) {
        self.devices.retain(|rnic| rnic.is_on(interface));
        self.interface = Some(interface.to_owned());
    }

    /// All names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(|rnic| rnic.name.as_str())
    }

    /// Whether there is one of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.devices.iter().any(|rnic| rnic.name == name)
    }

    /// The names of those on an interface, and whether each is rdma_rxe.
    pub(super) fn on(&self, interface: &str) -> impl Iterator<Item = (&str, bool)> {
        let on = self.devices.iter().filter(move |rnic| rnic.is_on(interface));
        on.map(|rnic| (rnic.name.as_str(), rnic.rxe == Some(true)))
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        match &self.unavailable {
            Some(reason) => say!("RNICs: unknown: {}", legible(reason))?,
            None if self.devices.is_empty() => match &self.interface {
                Some(interface) => say!("RNICs on {interface}: none")?,
                None => say!("RNICs: none")?,
            },
            None => {}
        }
        self.devices.iter().try_for_each(RnicInfo::print)
    }
}

impl RnicInfo {
    fn new(rnic: Rnic, interfaces: &[Interface]) -> RnicInfo {
        let name = legible(&rnic.name);
        let details = match rnic.details {
            Ok(details) => details,
            Err(error) => {
                let error = Some(legible(&error.to_string()));
                return RnicInfo {
                    name,
                    error,
                    firmware: None,
                    max_qps: None,
                    max_qp_wr: None,
                    rxe: None,
                    keys: UNKNOWN,
                    absent_events: None,
                    ports: Vec::new(),
                };
            }
        };
        let is_rxe = details.is_rxe();
        let ports = details.ports.into_iter().map(|port| {
            let gids = port.gids.iter().map(|row| GidInfo {
                index: row.index,
                gid: Gid(row.gid).to_string(),
                kind: kind(row.kind),
                interface: row.interface.and_then(|index| {
                    let interface = interfaces.iter().find(|interface| interface.index == index)?;
                    Some(interface.name.clone())
                }),
            });
            let gids: Vec<GidInfo> = gids.collect();
            let interface = gids.iter().find_map(|gid| gid.interface.as_deref());
            PortInfo {
                number: port.number,
                active: port.is_active,
                ethernet: port.is_ethernet,
                path_mtu: port.path_mtu,
                congestion: CardCongestion::read(Path::new("/sys"), &name, interface),
                gids,
            }
        });
        let ports = ports.collect();
        RnicInfo {
            name,
            error: None,
            firmware: Some(legible(&details.firmware)).filter(|firmware| !firmware.is_empty()),
            max_qps: Some(details.limits.max_qp),
            max_qp_wr: Some(details.limits.max_qp_wr),
            rxe: Some(is_rxe),
            keys: if is_rxe { GUESSABLE } else { UNKNOWN },
            absent_events: is_rxe.then(|| RXE_ABSENT_EVENTS.to_vec()),
            ports,
        }
    }

    fn is_on(&self, interface: &str) -> bool {
        let mut gids = self.ports.iter().flat_map(|port| &port.gids);
        gids.any(|gid| gid.interface.as_deref() == Some(interface))
    }

    fn print(&self) -> Result<(), Failure> {
        let firmware = self.firmware.as_ref().map(|firmware| format!(", firmware {firmware}"));
        say!("{0} (RNIC){1}: -d ibverbs:{0}", self.name, firmware.unwrap_or_default())?;
        if let Some(error) = &self.error {
            say!("  {error}")?;
        }
        if let (Some(qps), Some(work)) = (self.max_qps, self.max_qp_wr) {
            say!("  at most {qps} queue pairs of {work} work requests")?;
        }
        match self.keys {
            GUESSABLE => say!("  keys: guessable (an R_Key is an index and 8 bits)")?,
            other => say!("  keys: {other} whether they can be guessed")?,
        }
        match &self.absent_events {
            Some(events) => say!("  events that it does not raise: {}", events.join("; "))?,
            None => say!("  events that it does not raise: unknown")?,
        }
        for port in &self.ports {
            let state = if port.active { "active" } else { "down" };
            let link = if port.ethernet { "Ethernet" } else { "InfiniBand" };
            let mtu = port.path_mtu.map_or("unknown".to_owned(), |mtu| mtu.to_string());
            say!("  port {}: {state}, {link}, path MTU {mtu}", port.number)?;
            say!("  {}", CardCongestion::line(port.congestion.as_ref()))?;
            for GidInfo { index, gid, kind, interface } in &port.gids {
                let interface = interface.as_deref().unwrap_or_default();
                say!("{}", format!("  GID {index:>2}  {gid:<40} {kind:<10} {interface}").trim_end())?;
            }
        }
        Ok(())
    }
}

const GUESSABLE: &str = "guessable";
const UNKNOWN: &str = "unknown";
/// Observed with rdma_rxe of Linux 6.1.
const RXE_ABSENT_EVENTS: [&str; 2] = [
    "QP_ACCESS_ERR (after a bad R_Key only LAST_WQE_REACHED is raised)",
    "DEVICE_FATAL (a removal waits for the last user; Linux 6.1)",
];

fn kind(kind: RnicGidKind) -> String {
    match kind {
        RnicGidKind::InfiniBand => "InfiniBand".into(),
        RnicGidKind::RoceV1 => "RoCE v1".into(),
        RnicGidKind::RoceV2 => "RoCE v2".into(),
        RnicGidKind::Other(number) => format!("type {number}"),
        _ => "unknown".into(),
    }
}
