//! PCI functions: their addresses, types and link speeds.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::tree::Tree;
use crate::Error;

/// The address of a PCI function: `0000:3b:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct PciAddress {
    /// Also called segment.
    pub domain: u32,
    /// The bus in the domain.
    pub bus: u8,
    /// The device on the bus.
    pub device: u8,
    /// The function of the device.
    pub function: u8,
}

impl PciAddress {
    /// Whether both are functions of one device, such as the ports of a network card.
    pub fn is_same_card(self, other: PciAddress) -> bool {
        (self.domain, self.bus, self.device) == (other.domain, other.bus, other.device)
    }

    fn parse(text: &str) -> Option<PciAddress> {
        let (rest, function) = text.split_once('.')?;
        let mut parts = rest.split(':');
        let (domain, bus, device) = (parts.next()?, parts.next()?, parts.next()?);
        let hex = |digits: &str, lengths: &[usize]| {
            let is_number = lengths.contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            u32::from_str_radix(digits, 16).ok().filter(|_| is_number)
        };
        let byte = |digits: &str, len: usize, most: u32| {
            hex(digits, &[len]).filter(|number| *number <= most).and_then(|number| u8::try_from(number).ok())
        };
        let address = PciAddress {
            domain: hex(domain, &[4, 5, 6, 7, 8])?,
            bus: byte(bus, 2, 0xff)?,
            device: byte(device, 2, 31)?,
            function: byte(function, 1, 7)?,
        };
        parts.next().is_none().then_some(address)
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<PciAddress, Error> {
        PciAddress::parse(text).ok_or_else(|| Error::Invalid {
            parameter: "PCI address",
            value: text.chars().take(40).collect::<String>().escape_debug().to_string(),
            expected: "DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as 0000:3b:00.0".to_owned(),
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// The type of a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PciKind {
    /// A GPU, or another accelerator.
    Gpu,
    /// A network controller.
    Network,
    /// A bridge: a root port, or a port of a switch.
    Bridge,
    /// Any other.
    Other,
}

/// A PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PciDevice {
    /// Its address.
    pub address: PciAddress,
    /// Its host bridge, in the kernel's notation: `pci0000:16`.
    pub host_bridge: String,
    /// The bridges between the host bridge and the function, from the host bridge on.
    pub bridges: Vec<PciAddress>,
    /// Class, subclass and programming interface: 0x020000 is an Ethernet controller.
    pub class: Option<u32>,
    /// The vendor ID: 0x10de is NVIDIA.
    pub vendor: Option<u32>,
    /// The device ID.
    pub device: Option<u32>,
    /// One of [`Topology::nodes`](super::Topology::nodes); `None` if the kernel reports none.
    pub numa_node: Option<u32>,
    /// The name of its driver.
    pub driver: Option<String>,
    /// Its link; for a bridge, the link below a root port, or above a switch. `None` for functions without their own link,
    /// such as virtual functions and those of virtual machines.
    pub link: Option<PcieLink>,
    /// Its physical function, if it is a virtual one (SR-IOV).
    pub physical: Option<PciAddress>,
}

/// A PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PcieLink {
    /// The current rate.
    pub current: PcieRate,
    /// The highest rate that this end supports.
    pub max: PcieRate,
}

/// The rate of a PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PcieRate {
    /// Megatransfers per second of a lane: 16000 for PCIe 4.0.
    pub megatransfers: u32,
    /// The number of lanes.
    pub lanes: u32,
}

impl PcieRate {
    /// Bits per second in one direction, after the encoding: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, from 64 GT/s on
    /// flits of 256 bytes with 236 of packets (PCI Express Base Specification 6.0). Packet headers use a part of it.
    pub fn bits_per_second(&self) -> u64 {
        let raw = u64::from(self.megatransfers) * 1_000_000 * u64::from(self.lanes);
        match self.megatransfers {
            0..=5_000 => raw / 10 * 8,
            5_001..64_000 => raw / 130 * 128,
            _ => raw / 256 * 236,
        }
    }
}

/// `32 GT/s x16`.
impl fmt::Display for PcieRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GT/s x{}", f64::from(self.megatransfers) / 1000.0, self.lanes)
    }
}

/// Vendors whose display controllers are GPUs. Those of other vendors are for a console: of a BMC, or of a virtual machine.
const GPU_VENDORS: [u32; 3] = [0x10de, 0x1002, 0x8086];

impl PciDevice {
    /// Its type, by its class.
    pub fn kind(&self) -> PciKind {
        let is_gpu_vendor = self.vendor.is_some_and(|vendor| GPU_VENDORS.contains(&vendor));
        match self.class.map(|class| class >> 8) {
            Some(0x0300 | 0x0380) if is_gpu_vendor => PciKind::Gpu,
            Some(0x0302 | 0x1200) => PciKind::Gpu,
            // Old InfiniBand controllers have class 0x0c06.
            Some(0x0200..=0x02ff | 0x0c06) => PciKind::Network,
            Some(0x0604 | 0x0609) => PciKind::Bridge,
            _ => PciKind::Other,
        }
    }

    /// All functions, by their addresses.
    pub(super) fn all(tree: &Tree) -> Vec<PciDevice> {
        const FOLDER: &str = "bus/pci/devices";
        let names = tree.names(FOLDER);
        let mut all: Vec<PciDevice> =
            names.iter().filter_map(|name| PciDevice::read(tree, &Path::new(FOLDER).join(name))).collect();
        all.sort_by_key(|device| device.address);
        all.dedup_by_key(|device| device.address);
        all
    }

    fn read(tree: &Tree, link: &Path) -> Option<PciDevice> {
        let real = tree.real(link)?;
        let Some((host_bridge, mut chain)) = place(&real) else {
            tree.note(format!("{}: it is below no host bridge (pci0000:00), and is ignored", real.display()));
            return None;
        };
        let mut device = PciDevice {
            address: chain.pop()?,
            host_bridge,
            bridges: chain,
            class: tree.hexadecimal(real.join("class")),
            vendor: tree.hexadecimal(real.join("vendor")),
            device: tree.hexadecimal(real.join("device")),
            numa_node: tree.number(real.join("numa_node"), &["-1"]),
            driver: None,
            link: None,
            physical: None,
        };
        if device.kind() != PciKind::Other {
            let driver = tree.real(&real.join("driver"));
            device.driver =
                driver.and_then(|driver| Some(super::tree::printable(driver.file_name()?.to_str()?)));
            device.link = PcieLink::read(tree, &real);
            let physical = tree.real(&real.join("physfn"));
            device.physical = physical.and_then(|physical| address_of(&physical));
        }
        Some(device)
    }
}

impl PcieLink {
    fn read(tree: &Tree, device: &Path) -> Option<PcieLink> {
        let rate = |of: &str| {
            let speed = device.join(format!("{of}_link_speed"));
            let lanes = tree.number(device.join(format!("{of}_link_width")), &["Unknown"]);
            let lanes = lanes.filter(|lanes| matches!(lanes, 1..=32));
            let text = tree.text(&speed)?;
            let megatransfers = megatransfers(&text);
            if megatransfers.is_none() && !text.starts_with("Unknown") {
                tree.note_wrong(&speed, &text, "a speed as 16.0 GT/s PCIe");
            }
            Some(PcieRate { megatransfers: megatransfers?, lanes: lanes? })
        };
        Some(PcieLink { current: rate("current")?, max: rate("max")? })
    }
}

/// Parsed from a text such as `16.0 GT/s PCIe`.
fn megatransfers(text: &str) -> Option<u32> {
    let (number, _) = text.split_once(" GT/s")?;
    let gigatransfers: f64 = number.parse().ok()?;
    (0.1..=1000.0).contains(&gigatransfers).then(|| (gigatransfers * 1000.0).round() as u32)
}

/// The host bridge and the functions from there on, from the canonical path of a device on a PCI bus.
fn place(real: &Path) -> Option<(String, Vec<PciAddress>)> {
    let mut parts = real.iter().filter_map(|part| part.to_str());
    let host_bridge = parts.find(|part| part.strip_prefix("pci").is_some_and(|bus| bus.contains(':')))?;
    let chain: Vec<PciAddress> = parts.filter_map(PciAddress::parse).collect();
    (!chain.is_empty()).then(|| (super::tree::printable(host_bridge), chain))
}

/// The function of a device with this canonical path.
pub(super) fn address_of(real: &Path) -> Option<PciAddress> {
    place(real).and_then(|(_, mut chain)| chain.pop())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for address in ["0000:3b:00.0", "0000:ff:1f.7", "10000:e1:00.0"] {
            assert_eq!(address.parse::<PciAddress>().unwrap().to_string(), address);
        }
        for wrong in
            ["", "3b:00.0", "0000:3b:20.0", "0000:3b:00.8", "0000:+b:00.0", "0000:3b:00.0:0", "000:3b:00.0"]
        {
            let error = wrong.parse::<PciAddress>().unwrap_err().to_string();
            assert!(error.contains(&format!("= {wrong}:")), "{error}");
        }
        let port = |function: &str| format!("0000:3b:00.{function}").parse::<PciAddress>().unwrap();
        assert!(port("0").is_same_card(port("1")));
        assert!(!port("0").is_same_card("0000:3b:01.0".parse().unwrap()));
    }

    #[test]
    fn rates_are_those_after_the_encoding() {
        let rate = |text, lanes| {
            PcieRate { megatransfers: megatransfers(text).unwrap(), lanes }.bits_per_second() / 1_000_000
        };
        assert_eq!(rate("2.5 GT/s PCIe", 1), 2_000);
        assert_eq!(rate("8.0 GT/s PCIe", 16), 126_030);
        assert_eq!(rate("16.0 GT/s PCIe", 16), 252_061);
        assert_eq!(rate("32.0 GT/s PCIe", 16), 504_123);
        assert_eq!(rate("64.0 GT/s PCIe", 16), 944_000);
        for wrong in ["Unknown", "", "NaN GT/s", "inf GT/s", "-8 GT/s", "1e9 GT/s", "8.0"] {
            assert_eq!(megatransfers(wrong), None, "{wrong}");
        }
    }
}
