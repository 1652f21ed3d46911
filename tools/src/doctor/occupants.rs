//! The users of the addresses that a check would use: sockets on UDP port 4791, by sock_diag or `/proc`, and contexts,
//! by their `stat` sockets.

use std::collections::HashSet;
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferroce::driver::holder::Holder;
use ferroce::driver::netlink::{Interface, Netlink};
use ferroce::driver::udp::{UdpConfig, sharers};
use ferroce::{DeviceSpec, Exported, Gid, Metrics};

use crate::failure::Failure;

/// The kernel interface of a device, and the addresses that the device receives packets for.
pub(super) struct Place {
    pub(super) interface: Interface,
    pub(super) addresses: Vec<IpAddr>,
    /// The driver in the device's name, if it has one.
    pub(super) driver: Option<&'static str>,
}

impl Place {
    /// `None` for a device that is on no interface of the kernel.
    pub(super) fn of(device: &DeviceSpec) -> Result<Option<Place>, Failure> {
        let netlink = Netlink::open()?;
        let whole = |name: &str, driver| -> Result<_, Failure> {
            let interface = netlink.interface(name)?;
            let addresses = interface.gid_order();
            Ok(Some(Place { interface, addresses, driver }))
        };
        let one = |address: IpAddr| -> Result<_, Failure> {
            let interface = netlink.interfaces()?.into_iter().find(|interface| interface.owns(address));
            let place = |interface| Place { interface, addresses: vec![address], driver: Some("udp") };
            Ok(interface.map(place))
        };
        match device {
            DeviceSpec::Interface { interface: name, .. } => whole(name, None),
            DeviceSpec::AfXdp { interface, .. } => whole(interface, Some("af_xdp")),
            DeviceSpec::Udp { address, .. } => one(*address),
            DeviceSpec::UdpInterface { interface: name, .. } => one(UdpConfig::of_interface(name)?.address),
            _ => Ok(None),
        }
    }

    /// Whether a context of that process is on one of the addresses. Contexts of earlier versions do not report their
    /// addresses.
    fn has(&self, metrics: &Metrics, holders: &[Holder]) -> bool {
        // Both come from the kernel.
        let number = |label| metrics.label(label)?.parse().ok();
        let (Some(pid), Some(user)) = (number("pid"), number("uid")) else { return false };
        let mut gids = gauge(metrics, "port_gid").map(|(gid, _)| gid).peekable();
        let own: Vec<String> = self.addresses.iter().map(|address| Gid::from(*address).to_string()).collect();
        let is_on_address = gids.peek().is_none() || gids.any(|gid| own.iter().any(|own| own == gid));
        metrics.label("device") == Some(&self.interface.name) && is_on_address && is_here(pid, user, holders)
    }
}

/// Whether a process of that user is in this network namespace: other namespaces may have interfaces of the same name.
/// A process with file capabilities hides its namespace and its sockets even from its own user.
fn is_here(pid: u32, user: u32, holders: &[Holder]) -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let is_holder =
        |holder: &Holder| holder.process.as_ref().map_or(holder.user == user, |process| process.pid == pid);
    match (namespace("self"), namespace(&pid.to_string())) {
        (Some(own), Some(other)) => own == other,
        _ => holders.iter().any(is_holder),
    }
}

/// The owner of a file.
fn owner(path: &Path) -> Option<u32> {
    fs::symlink_metadata(path).map(|metadata| metadata.uid()).ok()
}

/// A gauge's values with their labels.
pub(super) fn gauge<'a>(metrics: &'a Metrics, name: &str) -> impl Iterator<Item = (&'a str, u64)> {
    let found = metrics.iter().find(|metric| metric.name == name);
    let samples = found.into_iter().flat_map(|metric| &metric.samples);
    samples.map(|sample| (sample.label.as_ref().map_or("", |label| &*label.value), sample.value))
}

/// A context that does not report its counters.
pub(super) struct Mute {
    pub(super) pid: u32,
    pub(super) why: String,
}

/// The users of a place.
#[derive(Default)]
pub(super) struct Occupants {
    /// Sockets on UDP port 4791. The kernel's own are left out: only opening the port shows whether they conflict.
    pub(super) holders: Vec<Holder>,
    /// Contexts that export their metrics.
    pub(super) contexts: Vec<Metrics>,
    /// Contexts at this place that do not answer.
    pub(super) mute: Vec<Mute>,
    /// Processes of ferroce, of this user, that share an address, whether or not they export metrics.
    pub(super) sharers: HashSet<u32>,
}

impl Occupants {
    pub(super) fn find(place: &Place) -> Result<Occupants, Failure> {
        let mut occupants = Occupants::default();
        for address in &place.addresses {
            let all = Holder::all(*address, &place.interface)?;
            let new: Vec<Holder> = all
                .into_iter()
                .filter(|holder| !holder.is_kernel && !occupants.holders.contains(holder))
                .collect();
            occupants.holders.extend(new);
            // If they can't be listed, none is known.
            let sharers = sharers(*address).unwrap_or_default();
            occupants.sharers.extend(sharers.into_iter().map(|(_, pid)| pid));
        }
        for (path, metrics) in Exported::find().read() {
            match metrics {
                Ok(metrics) if place.has(&metrics, &occupants.holders) => occupants.contexts.push(metrics),
                Ok(_) => {}
                Err(error) => {
                    // A user who may create files there can use any process id in a name.
                    if let Some(pid) = pid_of(&path, &place.interface.name)
                        && let Some(user) = owner(&path)
                        && owner(Path::new(&format!("/proc/{pid}"))) == Some(user)
                        && is_here(pid, user, &occupants.holders)
                    {
                        occupants.mute.push(Mute { pid, why: error.to_string() });
                    }
                }
            }
        }
        Ok(occupants)
    }

    /// The users of the port, as text; `None` if it is free. A context without a socket does not count: any user can
    /// pretend to have one.
    pub(super) fn describe(&self) -> Option<String> {
        let mut held: Vec<String> = Vec::new();
        for holder in &self.holders {
            let text = format!("UDP port 4791 of {} is in use by {holder}", holder.address);
            // A process on several addresses is listed once.
            if !held.iter().any(|held| held.ends_with(&format!("by {holder}"))) {
                held.push(text);
            }
        }
        held.truncate(MAX_NAMED);
        (!held.is_empty()).then(|| held.join("; "))
    }
}

/// The most users that are listed.
const MAX_NAMED: usize = 8;

/// The process of a context on that device, from the path of its socket: `PID.NUMBER.DEVICE`.
fn pid_of(socket: &Path, device: &str) -> Option<u32> {
    let name = PathBuf::from(socket.file_name()?);
    let mut parts = name.to_str()?.splitn(3, '.');
    let pid = parts.next()?.parse().ok()?;
    (parts.nth(1) == Some(device)).then_some(pid)
}
