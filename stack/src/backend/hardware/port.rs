//! A port of a card, its tables, and the device's capabilities.

use std::net::IpAddr;

use ferroce_driver::netlink::{Interface, Netlink};
use ferroce_driver::rnic::{
    CmFunctions, Device, RnicGid, RnicGidKind, RnicLimits, RnicPort as CardPort, Verbs,
};
use ferroce_driver::{Capabilities, Membership};
use ferroce_wire::{Gid, PKey, PathMtu};

use super::Hardware;
use crate::verbs::{
    Config, DeviceAttributes, Error, Feature, GidEntry, MAX_MESSAGE, MAX_RD_ATOMIC, PkeyTable, Port,
};

/// An open port of an RNIC.
#[derive(Debug)]
pub struct RnicPort {
    pub(super) device: Device,
    pub(super) number: u8,
    pub(super) limits: RnicLimits,
    pub(super) port: Port,
    pub(super) gid_rows: GidRows,
    pub(super) membership: Membership,
    pub(super) is_rxe: bool,
    /// The longest message, in bytes.
    pub(super) max_message: u32,
    pub(super) capabilities: Capabilities,
    pub(super) cm_functions: Option<CmFunctions>,
}

/// The rows of the card's GID table in use.
#[derive(Debug)]
pub(super) struct GidRows {
    /// The row of each local entry.
    pub(super) rows: Vec<GidRow>,
    /// The only wanted one.
    only: Option<u8>,
    roce_v1: bool,
}

/// A row of the card's GID table.
#[derive(Clone, Copy, Debug)]
pub(super) struct GidRow {
    pub(super) index: u8,
    /// The interface with the address: the card's, or that of a VLAN on it; 0 if the kernel reports none.
    pub(super) interface: u32,
    /// The kernel has not removed it from the table.
    pub(super) is_there: bool,
}

impl RnicPort {
    /// Opens a port of the device `name` with libibverbs: port `number`, or its first RoCE port. `gid`, if given, is the
    /// only GID table entry in use.
    ///
    /// # Errors
    /// [`Error::Driver`] with [`NoVerbs`](ferroce_driver::Error::NoVerbs), [`NoRnic`](ferroce_driver::Error::NoRnic) or
    /// [`Verbs`](ferroce_driver::Error::Verbs); [`Error::Invalid`] for a port or an entry that does not exist.
    pub fn open(name: &str, number: Option<u8>, gid: Option<u8>) -> Result<RnicPort, Error> {
        RnicPort::open_by(&Verbs::load()?, name, number, gid)
    }

    /// The same with a libibverbs that is already loaded.
    ///
    /// # Errors
    /// As [`open`](RnicPort::open).
    pub fn open_by(
        verbs: &Verbs,
        name: &str,
        number: Option<u8>,
        gid: Option<u8>,
    ) -> Result<RnicPort, Error> {
        let device = verbs.open(name)?;
        let details = device.details()?;
        let ports = &details.ports;
        let numbers = || ports.iter().map(|port| port.number.to_string()).collect::<Vec<_>>().join(", ");
        let found = match number {
            Some(number) => ports.iter().find(|port| port.number == number).ok_or_else(|| {
                Error::invalid("port", number, format!("a port of {name}, which has {}", numbers()))
            })?,
            None => ports.iter().find(|port| port.is_ethernet).ok_or_else(|| {
                Error::invalid("device", name, "one with a port that speaks RoCE; this one speaks InfiniBand")
            })?,
        };
        if !found.is_ethernet {
            let expected = "a port that speaks RoCE; this one speaks InfiniBand";
            return Err(Error::invalid("port", found.number, expected));
        }
        let interfaces = Netlink::open()?.interfaces()?;
        let (port, gid_rows) = table(name, found, gid, &interfaces)?;
        let mut capabilities = Capabilities::new("ibverbs", name, port.mac.0, port.mtu);
        let addresses = port.gids.iter().filter(|entry| !entry.roce_v1);
        capabilities.addresses = addresses.map(|entry| entry.gid.to_ip()).collect::<Vec<IpAddr>>();
        capabilities.description = format!(
            "port {} of {name} by libibverbs{}",
            found.number,
            if found.is_active { "" } else { "; its link is down" }
        );
        let interface = found.gids.iter().find_map(|gid| gid.interface).unwrap_or(0);
        let membership = Membership::new(interface, &capabilities.addresses);
        let (number, limits, is_rxe) = (found.number, details.limits, details.is_rxe());
        // rdma_rxe reports 8 MiB, and supports longer ones.
        let max_message = match found.max_message {
            most if !is_rxe && most > 0 => most.min(MAX_MESSAGE),
            _ => MAX_MESSAGE,
        };
        Ok(RnicPort {
            device,
            number,
            limits,
            port,
            gid_rows,
            membership,
            is_rxe,
            max_message,
            capabilities,
            cm_functions: None,
        })
    }

    /// Uses a librdmacm that is already loaded, instead of the system's, for connections.
    #[must_use]
    pub fn connections_by(mut self, functions: &CmFunctions) -> RnicPort {
        self.cm_functions = Some(functions.clone());
        self
    }

    /// The properties that the card reports.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Without the rows of RoCE v1, unless they are wanted.
    pub(super) fn for_config(mut self, config: &Config) -> Result<RnicPort, Error> {
        self.gid_rows.roce_v1 = config.roce_v1;
        if !config.roce_v1 {
            let mut entries = self.port.gids.iter();
            self.gid_rows.rows.retain(|_| entries.next().is_some_and(|entry| !entry.roce_v1));
            self.port.gids.retain(|entry| !entry.roce_v1);
        }
        match self.gid_rows.only {
            Some(only) if self.port.gids.is_empty() => {
                let expected = "a row of RoCE v2; this one is of v1, which Config::roce_v1 turns on";
                Err(Error::invalid("GID", only, expected))
            }
            _ => Ok(self),
        }
    }
}

/// The tables of a port, and the card's row of each GID.
fn table(
    name: &str,
    port: &CardPort,
    only: Option<u8>,
    interfaces: &[Interface],
) -> Result<(Port, GidRows), Error> {
    let found = gids(port, only, interfaces);
    if let Some(only) = only
        && found.is_empty()
    {
        let row = |gid: &RnicGid| {
            let kind = if gid.kind == RnicGidKind::RoceV1 { " of RoCE v1" } else { "" };
            format!("{}: {}{kind}", gid.index, Gid(gid.gid).to_ip())
        };
        let there: Vec<String> = port.gids.iter().map(row).collect();
        let expected = format!(
            "a row of the GID table of port {} of {name}, which has {}",
            port.number,
            there.join(", ")
        );
        return Err(Error::invalid("GID", only, expected));
    }
    let base = port.gids.iter().find_map(|gid| interface_of(gid, interfaces));
    let mut capabilities = Capabilities::new("ibverbs", name, [0; 6], 0);
    if let Some(interface) = base {
        (capabilities.mac, capabilities.mtu) = (interface.mac, interface.mtu);
    } else if let Some(path_mtu) = port.path_mtu {
        // The interface is in another namespace, or has no address.
        capabilities.mtu = path_mtu + MAX_HEADERS;
    }
    if let Some(path_mtu) = port.path_mtu
        && PathMtu::largest_for(capabilities.mtu, false).is_some_and(|largest| largest.bytes() > path_mtu)
    {
        // The card reserves more room for headers than a packet here has.
        capabilities.mtu = path_mtu + MAX_HEADERS;
    }
    let mut table = Port::new(&capabilities, false);
    table.pkeys = PkeyTable::of(port.pkeys.iter().map(|pkey| PKey(*pkey)));
    let (rows, gids) = found.into_iter().unzip();
    table.gids = gids;
    Ok((table, GidRows { rows, only, roce_v1: true }))
}

/// The GIDs of a port with their rows, or only one: RoCE v2 first, as in software.
fn gids(port: &CardPort, only: Option<u8>, interfaces: &[Interface]) -> Vec<(GidRow, GidEntry)> {
    let mut found = Vec::new();
    for kind in [RnicGidKind::RoceV2, RnicGidKind::RoceV1] {
        for gid in port.gids.iter().filter(|gid| gid.kind == kind) {
            let Ok(index) = u8::try_from(gid.index) else { continue };
            let vlan = interface_of(gid, interfaces).and_then(|interface| interface.vlan);
            if only.is_none_or(|only| only == index) {
                let entry = GidEntry::new(Gid(gid.gid)).roce_v1(kind == RnicGidKind::RoceV1).vlan(vlan);
                found.push((GidRow { index, interface: gid.interface.unwrap_or(0), is_there: true }, entry));
            }
        }
    }
    found
}

fn interface_of<'a>(gid: &RnicGid, interfaces: &'a [Interface]) -> Option<&'a Interface> {
    interfaces.iter().find(|interface| Some(interface.index) == gid.interface)
}

/// Bytes of the headers of a packet with IPv6.
const MAX_HEADERS: u32 = 40 + 8 + 12 + 16 + 4 + 4;

pub(super) fn attributes(config: &Config, limits: &RnicLimits) -> DeviceAttributes {
    let rd_atom = limits.max_qp_rd_atom.min(limits.max_qp_init_rd_atom).min(MAX_RD_ATOMIC.into());
    DeviceAttributes {
        max_pd: config.max_pds.min(limits.max_pd),
        max_mr: config.max_mrs.min(limits.max_mr),
        max_mw: config.max_mws.min(limits.max_mw),
        max_cq: config.max_cqs.min(limits.max_cq),
        max_qp: config.max_qps.min(limits.max_qp),
        max_pkeys: PkeyTable::MAX,
        max_qp_rd_atom: rd_atom as u8,
        mem_window_type_2b: limits.has_windows_2b,
        flush_global: false,
        flush_persistent: false,
        atomic_write: false,
    }
}

impl Hardware {
    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// The tables are the kernel's, which changes them when addresses are added and removed.
    pub(crate) fn add_gid(&mut self, _: GidEntry) -> Result<usize, Error> {
        Err(Error::Unsupported(Feature::TablesOfCard))
    }

    pub(crate) fn add_pkey(&mut self, _: PKey) -> Result<usize, Error> {
        Err(Error::Unsupported(Feature::TablesOfCard))
    }

    pub(crate) fn remove_pkey(&mut self, index: usize) -> Result<(), Error> {
        self.port.pkey(index)?;
        Err(Error::Unsupported(Feature::TablesOfCard))
    }

    pub(crate) fn query_device(&self) -> &DeviceAttributes {
        &self.attributes
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Applies the kernel's changes. Existing rows keep their places, because queue pairs refer to them.
    pub(super) fn refresh_port(&mut self) -> Result<(), Error> {
        let details = self.device.details()?;
        let Some(port) = details.ports.iter().find(|port| port.number == self.port_number) else {
            return Ok(());
        };
        let interfaces = Netlink::open()?.interfaces()?;
        let GidRows { rows, only, roce_v1 } = &mut self.gid_rows;
        let found = gids(port, *only, &interfaces);
        for row in rows.iter_mut() {
            row.is_there = found.iter().any(|(there, _)| there.index == row.index);
        }
        for (row, entry) in found {
            match rows.iter().position(|own| own.index == row.index) {
                Some(place) => (rows[place], self.port.gids[place]) = (row, entry),
                None if entry.roce_v1 && !*roce_v1 => {}
                None => {
                    rows.push(row);
                    self.port.gids.push(entry);
                }
            }
        }
        self.port.pkeys = PkeyTable::of(port.pkeys.iter().map(|pkey| PKey(*pkey)));
        Ok(())
    }
}
