//! Device names, as in `--device`, and opening their drivers.

mod dpdk;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use ferroce_driver::loopback::{Switch, SwitchConfig};
use ferroce_driver::shm::{Shm, ShmConfig};
use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{PacketDriver, SharedMemory};
use rustix::io::Errno;
use tracing::info;

use crate::backend::{Device, RnicPort};
use crate::verbs::Error;
use crate::verbs::number::decimal;
pub use dpdk::DpdkSpec;

/// A device name, as in `--device`: an interface, or a driver with its argument. [`Device::open`] opens a device by its name.
///
/// | text | meaning |
/// |---|---|
/// | `eth0` | the interface, with the best driver for it |
/// | `af_xdp:eth0` | AF_XDP on all queues of the interface |
/// | `af_xdp:eth0:2` | the same, only on queue 2 |
/// | `udp:192.0.2.1` | a UDP socket on this address of the host |
/// | `udp:eth0` | the same, on the interface's first address |
/// | `udp:192.0.2.1,shm=off` | the same, without shared memory to processes of this host |
/// | `udp:192.0.2.1,shm=noicrc` | the same, without ICRC in shared memory if the other end sets it too |
/// | `shm:NAME` | shared memory between the processes of this user that open the same name, at the address 127.0.0.1 |
/// | `dpdk:net_memif0@10.0.0.1/24 --vdev=...` | a port of DPDK, see [`DpdkSpec`] |
/// | `ibverbs:mlx5_0` | the first RoCE port of an RNIC, with libibverbs |
/// | `ibverbs:mlx5_0:1:3` | its port 1, with only row 3 of the GID table |
/// | `loopback` | a port inside this process |
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceSpec {
    /// An interface; [`open`](DeviceSpec::open) chooses the driver.
    Interface {
        /// Its name.
        interface: String,
        /// Whether shared memory is used to processes of this host.
        shared_memory: SharedMemory,
    },
    /// AF_XDP on an interface.
    AfXdp {
        /// The interface's name.
        interface: String,
        /// The queue; all of them if `None`.
        queue: Option<u32>,
        /// Whether shared memory is used to processes of this host, if the port is on all queues.
        shared_memory: SharedMemory,
    },
    /// A UDP socket on an address of the host.
    Udp {
        /// The address.
        address: IpAddr,
        /// Whether shared memory is used to processes of this host.
        shared_memory: SharedMemory,
    },
    /// A UDP socket on the first address of an interface.
    UdpInterface {
        /// The interface's name.
        interface: String,
        /// Whether shared memory is used to processes of this host.
        shared_memory: SharedMemory,
    },
    /// A switch in shared memory, by its name.
    Shm {
        /// The name, the same in all processes that communicate.
        name: String,
        /// Whether frames have an ICRC; they have none if both ends turn it off.
        icrc: bool,
    },
    /// A port of DPDK.
    Dpdk(DpdkSpec),
    /// A port of an RNIC, with libibverbs.
    Ibverbs {
        /// The device, such as `mlx5_0` or `rxe0`.
        name: String,
        /// The number of the port, from 1; the first RoCE port if `None`.
        port: Option<u8>,
        /// The only row of the GID table that is used; all of them if `None`.
        gid: Option<u8>,
    },
    /// The in-process driver.
    Loopback,
}

impl DeviceSpec {
    /// The same device without shared memory, so that packets take the path through the kernel.
    #[must_use]
    pub fn without_shared_memory(mut self) -> DeviceSpec {
        if let DeviceSpec::Interface { shared_memory, .. }
        | DeviceSpec::AfXdp { shared_memory, .. }
        | DeviceSpec::Udp { shared_memory, .. }
        | DeviceSpec::UdpInterface { shared_memory, .. } = &mut self
        {
            *shared_memory = SharedMemory::Off;
        }
        self
    }

    /// Opens the device.
    ///
    /// For an interface it uses AF_XDP, or a UDP socket if AF_XDP lacks privileges or is not in this build. On a veth or another
    /// interface where AF_XDP works in copy mode a UDP socket (`udp:eth0`) has the higher throughput, and AF_XDP the lower
    /// latency. The choice and its reason are logged at `info`. `Loopback` opens a port with the address 127.0.0.1 on a switch of
    /// its own, which connects only queue pairs of the same context; to connect contexts, use ports of one [`Switch`] instead.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Unsupported`] for a driver that this build lacks.
    pub fn open(&self) -> Result<Device, Error> {
        Ok(Device::Driver(match self {
            DeviceSpec::Ibverbs { name, port, gid } => {
                return Ok(RnicPort::open(name, *port, *gid)?.into());
            }
            DeviceSpec::Interface { interface, shared_memory } => {
                match open_af_xdp(interface, None, *shared_memory) {
                    Err(reason) if is_unavailable(&reason) => {
                        info!(interface, "using the driver udp, because af_xdp is not available: {reason}");
                        open_udp(&UdpConfig::of_interface(interface)?.shared_memory(*shared_memory))?
                    }
                    // Another process of this user may share the address.
                    Err(reason) if is_taken(&reason) => {
                        let udp = UdpConfig::of_interface(interface)?.shared_memory(*shared_memory);
                        let Ok(udp) = open_udp(&udp) else { return Err(reason) };
                        info!(interface, "using the driver udp, next to {}", first_comer(&reason));
                        udp
                    }
                    opened => {
                        let opened = opened?;
                        info!(
                            interface,
                            "using the driver af_xdp, which has the lowest latency in this build (udp:{interface} has \
                             more throughput if AF_XDP copies frames, as on a veth)"
                        );
                        opened
                    }
                }
            }
            DeviceSpec::AfXdp { interface, queue, shared_memory } => {
                open_af_xdp(interface, *queue, *shared_memory)?
            }
            DeviceSpec::Udp { address, shared_memory } => {
                open_udp(&UdpConfig::new(*address).shared_memory(*shared_memory))?
            }
            DeviceSpec::UdpInterface { interface, shared_memory } => {
                open_udp(&UdpConfig::of_interface(interface)?.shared_memory(*shared_memory))?
            }
            DeviceSpec::Shm { name, icrc } => Box::new(Shm::open(&ShmConfig::new(name).icrc(*icrc))?),
            DeviceSpec::Dpdk(port) => port.open()?,
            DeviceSpec::Loopback => {
                let switch = Switch::new(SwitchConfig::default())?;
                Box::new(switch.port(&[IpAddr::V4(Ipv4Addr::LOCALHOST)]))
            }
        }))
    }
}

impl Device {
    /// Opens a device by its name: an interface (`eth0`), or a driver with its argument (`udp:192.0.2.1`, `loopback`).
    /// [`DeviceSpec`] lists the names.
    ///
    /// ```
    /// # use ferroce::*;
    /// let context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// assert_eq!(context.port().gids[0].gid.to_string(), "::ffff:127.0.0.1");
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid device name; those of [`DeviceSpec::open`].
    pub fn open(name: &str) -> Result<Device, Error> {
        name.parse::<DeviceSpec>()?.open()
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] names the part that is wrong.
    fn from_str(text: &str) -> Result<DeviceSpec, Error> {
        let refused = |expected: &str| Err(Error::invalid("device", format!("'{text}'"), expected));
        let (device, options) = match text.split_once(',') {
            // Its argument contains commas.
            _ if text.starts_with("dpdk") => (text, None),
            Some((device, options)) => (device, Some(options)),
            None => (text, None),
        };
        let shared_memory = match options {
            None => SharedMemory::On,
            Some(SHM_OFF) => SharedMemory::Off,
            Some(SHM_WITHOUT_ICRC) => SharedMemory::WithoutIcrc,
            Some(other) => {
                return refused(&format!(
                    "'{other}' is not an option; {SHM_OFF} disables shared memory, {SHM_WITHOUT_ICRC} the ICRC there"
                ));
            }
        };
        let (driver, argument) = match device.split_once(':') {
            Some((driver, argument)) => (driver, Some(argument)),
            None => (device, None),
        };
        match (driver, argument) {
            ("loopback" | "ibverbs", _) if options.is_some() => {
                refused(&format!("'{driver}' has no options"))
            }
            _ if device.parse::<IpAddr>().is_ok() => refused(&format!("the driver is missing: udp:{device}")),
            ("loopback", None) => Ok(DeviceSpec::Loopback),
            ("loopback", Some(_)) => refused("'loopback' has no argument"),
            ("shm", Some(_)) if shared_memory == SharedMemory::Off => {
                refused(&format!("shm:NAME has only the option {SHM_WITHOUT_ICRC}"))
            }
            ("shm", Some(name)) => {
                Ok(DeviceSpec::Shm { name: name.to_owned(), icrc: shared_memory == SharedMemory::On })
            }
            ("shm", None) => {
                refused("shm needs a name: shm:NAME, the same for all processes that communicate")
            }
            ("dpdk", Some(argument)) => Ok(DeviceSpec::Dpdk(argument.parse()?)),
            ("dpdk", None) => refused("dpdk needs a port: dpdk:net_memif0@10.0.0.1/24 --vdev=..."),
            ("af_xdp", None) => {
                refused("af_xdp needs an interface: af_xdp:eth0, or af_xdp:eth0:2 for queue 2")
            }
            ("af_xdp", Some(argument)) => {
                let (interface, queue) = match argument.split_once(':') {
                    Some((interface, queue)) => match decimal(queue) {
                        Some(queue) => (interface, Some(queue)),
                        None => return refused("a queue number after the interface, as in af_xdp:eth0:2"),
                    },
                    None => (argument, None),
                };
                if !is_interface_name(interface) {
                    return refused("af_xdp:INTERFACE, a name of 1 to 15 characters as `ip link` shows it");
                }
                if queue.is_some() && shared_memory != SharedMemory::On {
                    return refused(
                        "no options after a queue number: a port on one queue has no shared memory",
                    );
                }
                Ok(DeviceSpec::AfXdp { interface: interface.to_owned(), queue, shared_memory })
            }
            ("udp", None) => refused("udp needs an address or an interface: udp:192.0.2.1, udp:eth0"),
            ("udp", Some(argument)) => match without_brackets(argument).parse() {
                Ok(address) => Ok(DeviceSpec::Udp { address, shared_memory }),
                Err(_) if is_interface_name(argument) => {
                    Ok(DeviceSpec::UdpInterface { interface: argument.to_owned(), shared_memory })
                }
                Err(_) => refused("udp:ADDRESS, an address of this host, or udp:INTERFACE"),
            },
            ("ibverbs", None) => refused(
                "ibverbs needs an RNIC: ibverbs:mlx5_0, or ibverbs:mlx5_0:1:3 for port 1 with row 3 of its GID table",
            ),
            ("ibverbs", Some(argument)) => {
                let mut parts = argument.split(':');
                let name = parts.next().unwrap_or_default();
                if !is_device_name(name) {
                    return refused("ibverbs:DEVICE, a name of 1 to 63 characters as `rdma link` shows it");
                }
                let (port, gid) = (parts.next(), parts.next());
                let number = |text: Option<&str>| text.map(|text| decimal(text).ok_or(())).transpose();
                match (number(port), number(gid), parts.next()) {
                    (Ok(port), Ok(gid), None) if port != Some(0) => {
                        Ok(DeviceSpec::Ibverbs { name: name.to_owned(), port, gid })
                    }
                    _ => refused(
                        "ibverbs:DEVICE:PORT:GID, a port from 1 to 255 and a row of its GID table from 0 to 255",
                    ),
                }
            }
            (_, None) if is_interface_name(device) => {
                Ok(DeviceSpec::Interface { interface: device.to_owned(), shared_memory })
            }
            (_, None) => refused(&format!("an interface's name of 1 to 15 characters; there are {DEVICES}")),
            (_, Some(_)) => refused(&format!("no such driver; there are {DEVICES}")),
        }
    }
}

/// An IPv6 address may be in brackets, as in a URL.
fn without_brackets(address: &str) -> &str {
    address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address)
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Interface { interface, shared_memory } => {
                write!(f, "{interface}{}", option(*shared_memory))
            }
            DeviceSpec::AfXdp { interface, queue, shared_memory } => {
                write!(f, "af_xdp:{interface}")?;
                queue.map_or(Ok(()), |queue| write!(f, ":{queue}"))?;
                f.write_str(&option(*shared_memory))
            }
            DeviceSpec::Udp { address, shared_memory } => {
                write!(f, "udp:{address}{}", option(*shared_memory))
            }
            DeviceSpec::UdpInterface { interface, shared_memory } => {
                write!(f, "udp:{interface}{}", option(*shared_memory))
            }
            DeviceSpec::Shm { name, icrc } => {
                let shared_memory = if *icrc { SharedMemory::On } else { SharedMemory::WithoutIcrc };
                write!(f, "shm:{name}{}", option(shared_memory))
            }
            DeviceSpec::Dpdk(port) => write!(f, "dpdk:{port}"),
            DeviceSpec::Ibverbs { name, port, gid } => {
                write!(f, "ibverbs:{name}")?;
                // A row without a port is of the first port.
                match (port, gid) {
                    (None, None) => Ok(()),
                    (port, None) => write!(f, ":{}", port.unwrap_or(1)),
                    (port, Some(gid)) => write!(f, ":{}:{gid}", port.unwrap_or(1)),
                }
            }
            DeviceSpec::Loopback => f.write_str("loopback"),
        }
    }
}

/// Options, after a comma.
const SHM_OFF: &str = "shm=off";
const SHM_WITHOUT_ICRC: &str = "shm=noicrc";

/// A device's option, with the comma in front of it.
fn option(shared_memory: SharedMemory) -> String {
    match shared_memory {
        SharedMemory::On => String::new(),
        SharedMemory::WithoutIcrc => format!(",{SHM_WITHOUT_ICRC}"),
        SharedMemory::Off => format!(",{SHM_OFF}"),
    }
}

/// The valid devices.
const DEVICES: &str = "INTERFACE, af_xdp:INTERFACE, af_xdp:INTERFACE:QUEUE, udp:ADDRESS, udp:INTERFACE, shm:NAME, dpdk:PORT, ibverbs:DEVICE and loopback";

/// A valid interface name for the kernel (`dev_valid_name`).
fn is_interface_name(name: &str) -> bool {
    let forbidden = |c: char| c == '/' || c == ':' || c == '\0' || c.is_whitespace();
    (1..=15).contains(&name.len()) && name != "." && name != ".." && !name.contains(forbidden)
}

/// A valid RNIC name: a part of a path in sysfs.
fn is_device_name(name: &str) -> bool {
    let forbidden = |c: char| c == '/' || c == ':' || c == '\0' || c.is_whitespace();
    (1..=63).contains(&name.len()) && name != "." && name != ".." && !name.contains(forbidden)
}

fn open_udp(config: &UdpConfig) -> Result<Box<dyn PacketDriver>, Error> {
    Ok(Box::new(Udp::open(config)?))
}

/// The holder of a resource that AF_XDP needs.
fn first_comer(reason: &Error) -> String {
    match reason {
        Error::Driver(ferroce_driver::Error::PortInUse { holder: Some(holder), .. }) => {
            format!("{holder}, which came first")
        }
        other => format!("another process ({other})"),
    }
}

/// Whether another process holds a resource that AF_XDP needs.
fn is_taken(reason: &Error) -> bool {
    use ferroce_driver::Error as E;
    matches!(reason, Error::Driver(E::PortInUse { .. } | E::QueueBusy { .. }))
}

/// Whether AF_XDP is unavailable here. If it is available but fails, the error is returned, and no slower driver is used.
fn is_unavailable(reason: &Error) -> bool {
    use ferroce_driver::Error as E;
    match reason {
        Error::Unsupported(_) | Error::Driver(E::Permission { .. }) => true,
        // A kernel without AF_XDP.
        Error::Driver(E::Os { source, .. }) => Errno::from_io_error(source) == Some(Errno::AFNOSUPPORT),
        _ => false,
    }
}

#[cfg(feature = "af_xdp")]
fn open_af_xdp(
    interface: &str,
    queue: Option<u32>,
    shared_memory: SharedMemory,
) -> Result<Box<dyn PacketDriver>, Error> {
    use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
    Ok(Box::new(AfXdp::open(&AfXdpConfig::new(interface).queue(queue).shared_memory(shared_memory))?))
}

#[cfg(not(feature = "af_xdp"))]
fn open_af_xdp(_: &str, _: Option<u32>, _: SharedMemory) -> Result<Box<dyn PacketDriver>, Error> {
    Err(Error::Unsupported(crate::verbs::Feature::AfXdp))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for text in [
            "eth0",
            "eth0.5",
            "af_xdp:veth0",
            "af_xdp:veth0:0",
            "af_xdp:veth0:2",
            "dpdk:net_ring0@10.0.0.1/24 -m 64",
            "udp:eth0",
            "udp:10.0.0.1",
            "udp:fd09::1",
            "udp:fd09::1,shm=off",
            "udp:eth0,shm=off",
            "udp:10.0.0.1,shm=noicrc",
            "eth0,shm=off",
            "af_xdp:eth0,shm=noicrc",
            "shm:lab",
            "shm:lab,shm=noicrc",
            "ibverbs:mlx5_0",
            "ibverbs:rxe0:1",
            "ibverbs:rxe0:2:3",
            "loopback",
        ] {
            assert_eq!(text.parse::<DeviceSpec>().expect(text).to_string(), text);
        }
        let shared_memory = SharedMemory::On;
        let all = DeviceSpec::AfXdp { interface: "veth0".into(), queue: None, shared_memory };
        assert_eq!("af_xdp:veth0".parse::<DeviceSpec>().expect("all queues"), all);
        let bare = DeviceSpec::Udp {
            address: "fd09::1".parse().expect("an address"),
            shared_memory: SharedMemory::On,
        };
        assert_eq!("udp:[fd09::1]".parse::<DeviceSpec>().expect("brackets"), bare);
    }

    #[test]
    fn errors_name_the_value_and_the_remedy() {
        for (text, cure) in [
            ("", "an interface's name"),
            ("a-name-of-16-char", "an interface's name"),
            ("a/b", "an interface's name"),
            ("af_xdp", "needs an interface"),
            ("af_xdp:", "af_xdp:INTERFACE"),
            ("af_xdp:eth0:x", "a queue number"),
            ("af_xdp:eth0:1:2", "a queue number"),
            ("af_xdp:eth0:+1", "a queue number"),
            ("loopback:0", "no argument"),
            ("ibverbs", "needs an RNIC"),
            ("ibverbs:", "ibverbs:DEVICE"),
            ("ibverbs:a/b", "ibverbs:DEVICE"),
            ("ibverbs:rxe0:0", "a port from 1"),
            ("ibverbs:rxe0:x", "a port from 1"),
            ("ibverbs:rxe0:1:256", "a row of its GID table"),
            ("ibverbs:rxe0:1:2:3", "ibverbs:DEVICE:PORT:GID"),
            ("shm", "needs a name"),
            ("dpdk", "needs a port"),
            ("dpdk:", "dpdk:PORT"),
            ("xdp:eth0", "no such driver"),
            ("udp", "needs an address"),
            ("udp:10.0.0.1:5", "udp:ADDRESS"),
            ("eth0,shm=on", "'shm=on' is not an option; shm=off disables"),
            ("eth0,icrc=off", "'icrc=off' is not an option"),
            ("eth0,", "'' is not an option"),
            ("af_xdp:eth0,shm=", "'shm=' is not an option"),
            ("af_xdp:eth0:2,shm=off", "one queue"),
            ("loopback,shm=off", "no option"),
            ("ibverbs:rxe0,shm=off", "no option"),
            ("shm:lab,icrc=on", "'icrc=on' is not an option"),
            ("shm:lab,shm=off", "only the option shm=noicrc"),
            ("udp:10.0.0.1,shm=off,shm=noicrc", "'shm=off,shm=noicrc' is not an option"),
            ("10.0.0.1", "the driver is missing: udp:10.0.0.1"),
            ("fe80::1", "the driver is missing: udp:fe80::1"),
            ("udp:", "udp:ADDRESS"),
        ] {
            let refusal = text.parse::<DeviceSpec>().expect_err(text).to_string();
            assert!(refusal.contains(&format!("'{text}'")) && refusal.contains(cure), "{refusal}");
        }
    }

    #[test]
    fn names_with_nul_are_refused() {
        for text in ["eth\0", "af_xdp:eth\0", "udp:eth\0", "dpdk:net_ring0\0", "dpdk:net_ring0 -m\0"] {
            let refusal = text.parse::<DeviceSpec>().expect_err(text).to_string();
            assert!(refusal.contains("\\0'"), "{refusal}");
        }
    }

    #[test]
    fn an_interface_that_does_not_exist_is_named() {
        let opened = "no-such-if".parse::<DeviceSpec>().expect("a name").open();
        let refusal = opened.map(|driver| driver.capabilities().clone()).expect_err("it does not exist");
        assert!(refusal.to_string().contains("'no-such-if'"), "{refusal}");
    }
}
