//! Network ports: interfaces, and the RNICs on them.

use std::net::IpAddr;
use std::path::Path;

use super::PciAddress;
use super::pci::address_of;
use super::tree::{Tree, printable};

/// A network port: an interface, an RNIC, or usually both.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Nic {
    /// The interface.
    pub interface: Option<String>,
    /// The RNICs on it, as `-d ibverbs:` names them: `mlx5_0`; `mlx4_0:2` for the second port of one.
    pub rnics: Vec<String>,
    /// Its PCI address. `None` for a virtual interface, and for one on another bus.
    pub pci: Option<PciAddress>,
    /// The interface that it belongs to: a bond, a bridge. That interface has the IP addresses then.
    pub part_of: Option<String>,
    /// Whether it is a software interface: a bridge, a veth.
    pub is_virtual: bool,
    /// Whether its link is InfiniBand, which does not carry RoCE.
    pub is_infiniband: bool,
    /// Whether it can transfer packets.
    pub state: NicState,
    /// Bits per second. `None` if its driver does not report it, for example while it is down.
    pub rate: Option<u64>,
    /// Bytes of the largest IP packet.
    pub mtu: Option<u32>,
    /// Its IP addresses. They are not in sysfs: `None` for a recorded tree.
    pub addresses: Option<Vec<IpAddr>>,
}

/// Whether packets can be transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NicState {
    /// Yes.
    Up,
    /// No: the interface or its link is down.
    Down,
    /// Its driver does not report it.
    Unknown,
}

impl Nic {
    /// The interface, or the RNIC if there is no interface.
    pub fn name(&self) -> &str {
        self.interface.as_deref().or_else(|| self.rnics.first().map(String::as_str)).unwrap_or_default()
    }

    /// All except the loopback interface and tunnels, by their addresses; virtual ones last.
    pub(super) fn all(tree: &Tree) -> Vec<Nic> {
        let names = tree.names(INTERFACES);
        let mut all: Vec<(u32, Nic)> = names.iter().filter_map(|name| interface(tree, name)).collect();
        for name in tree.names(RNICS) {
            add_rnic(tree, &name, &mut all);
        }
        let mut all: Vec<Nic> = all.into_iter().map(|(_, nic)| nic).collect();
        all.sort_by(|a, b| {
            let key = |nic: &Nic| (nic.is_virtual, nic.pci.is_none(), nic.pci, nic.name().to_owned());
            key(a).cmp(&key(b))
        });
        all
    }
}

const INTERFACES: &str = "class/net";
const RNICS: &str = "class/infiniband";

/// Hardware types, of <linux/if_arp.h>.
const ETHERNET: u32 = 1;
const INFINIBAND: u32 = 32;

/// An interface, and its port number in its PCI function.
fn interface(tree: &Tree, name: &str) -> Option<(u32, Nic)> {
    let real = tree.real(&Path::new(INTERFACES).join(name))?;
    let kind = tree.number(real.join("type"), &[]);
    if !matches!(kind, None | Some(ETHERNET | INFINIBAND)) {
        return None;
    }
    let speed = tree.number::<u64>(real.join("speed"), &["-1"]);
    // Includes −1 as older kernels print it.
    let speed = speed.filter(|megabits| !matches!(megabits, 0 | 0xffff_ffff));
    let state = match tree.text(real.join("operstate")).as_deref() {
        Some("up") => NicState::Up,
        None | Some("unknown") => NicState::Unknown,
        Some(_) => NicState::Down,
    };
    let nic = Nic {
        interface: Some(printable(name)),
        rnics: Vec::new(),
        pci: address_of(&real),
        part_of: tree
            .real(&real.join("master"))
            .and_then(|master| Some(printable(master.file_name()?.to_str()?))),
        is_virtual: real.starts_with("devices/virtual"),
        is_infiniband: kind == Some(INFINIBAND),
        state,
        rate: speed.and_then(|megabits| megabits.checked_mul(1_000_000)),
        mtu: tree.number(real.join("mtu"), &[]),
        addresses: None,
    };
    Some((tree.number(real.join("dev_port"), &[]).unwrap_or(0), nic))
}

fn add_rnic(tree: &Tree, name: &str, all: &mut Vec<(u32, Nic)>) {
    let Some(real) = tree.real(&Path::new(RNICS).join(name)) else { return };
    let pci = address_of(&real);
    // rdma_rxe has no PCI function, but reports its interface.
    let parent = tree.text(real.join("parent"));
    for port in tree.names(real.join("ports")) {
        let Ok(number) = port.parse::<u32>() else { continue };
        let folder = real.join("ports").join(&port);
        let rnic = if number == 1 { printable(name) } else { printable(&format!("{name}:{number}")) };
        let is_active = tree.text(folder.join("state")).is_some_and(|state| state.contains("ACTIVE"));
        let rate =
            tree.text(folder.join("rate")).as_deref().and_then(rate).filter(|_| is_active && pci.is_some());
        // Of the first GID.
        let told = tree.text(folder.join("gid_attrs/ndevs/0")).or_else(|| parent.clone());
        let by_name =
            told.and_then(|told| all.iter().position(|(_, nic)| nic.interface.as_ref() == Some(&told)));
        let by_place = || {
            let same = |port: u32, nic: &Nic| pci.is_some() && nic.pci == pci && port + 1 == number;
            all.iter().position(|(port, nic)| same(*port, nic))
        };
        match by_name.or_else(by_place).and_then(|at| all.get_mut(at)) {
            Some((_, nic)) => {
                nic.rate = nic.rate.or(rate);
                nic.rnics.push(rnic);
            }
            None => {
                let link = tree.text(folder.join("link_layer"));
                let nic = Nic {
                    interface: None,
                    rnics: vec![rnic],
                    pci,
                    part_of: None,
                    is_virtual: pci.is_none(),
                    is_infiniband: link.as_deref() == Some("InfiniBand"),
                    state: if is_active { NicState::Up } else { NicState::Down },
                    rate,
                    mtu: None,
                    addresses: None,
                };
                all.push((number.saturating_sub(1), nic));
            }
        }
    }
}

/// Bits per second, parsed from a text such as `400 Gb/sec (4X NDR)`.
fn rate(text: &str) -> Option<u64> {
    let (number, _) = text.split_once(" Gb/sec")?;
    let gigabits: f64 = number.parse().ok()?;
    (0.1..=100_000.0).contains(&gigabits).then_some((gigabits * 1e9) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_an_rnic_is_its_first_number() {
        assert_eq!(rate("400 Gb/sec (4X NDR)"), Some(400_000_000_000));
        assert_eq!(rate("2.5 Gb/sec (1X SDR)"), Some(2_500_000_000));
        for wrong in ["", "NaN Gb/sec", "-1 Gb/sec", "1e300 Gb/sec", "400"] {
            assert_eq!(rate(wrong), None, "{wrong}");
        }
    }
}
