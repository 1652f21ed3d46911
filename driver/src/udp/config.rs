//! The configuration of a socket, and the interface that has its address.

use std::net::IpAddr;
use std::time::Duration;

use crate::netlink::{Interface, Netlink};
use crate::{Error, SharedMemory};

/// The socket to open.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct UdpConfig {
    /// One of the host's own addresses.
    pub address: IpAddr,
    /// Whether packets of one size to one context are sent together, as segments that the kernel separates late (UDP
    /// GSO).
    pub segmentation: bool,
    /// Whether the kernel may deliver aggregated segments (UDP GRO). While several contexts share the address, it does
    /// not aggregate packets: they may be for several contexts, but would be delivered to one socket.
    pub aggregation: bool,
    /// Whether other processes of this user may open the address too.
    pub sharing: bool,
    /// Whether shared memory ([`shm`](crate::shm)) is used instead of the kernel's UDP between processes of this user
    /// on addresses of this host, if both ends enable it. It needs `sharing`.
    pub shared_memory: SharedMemory,
    /// Polls the device from the socket's calls for up to this time instead of waiting for its interrupts (SO_BUSY_POLL). Needs
    /// CAP_NET_ADMIN; has no effect on veth and loopback interfaces.
    pub busy_poll: Option<Duration>,
}

impl UdpConfig {
    /// On `address`, with all accelerations that need no privilege.
    pub fn new(address: IpAddr) -> UdpConfig {
        UdpConfig {
            address,
            segmentation: true,
            aggregation: true,
            sharing: true,
            shared_memory: SharedMemory::On,
            busy_poll: None,
        }
    }

    /// UDP GSO; on by default.
    pub fn segmentation(self, segmentation: bool) -> Self {
        UdpConfig { segmentation, ..self }
    }

    /// UDP GRO; on by default.
    pub fn aggregation(self, aggregation: bool) -> Self {
        UdpConfig { aggregation, ..self }
    }

    /// Other processes may open the address; on by default.
    pub fn sharing(self, sharing: bool) -> Self {
        UdpConfig { sharing, ..self }
    }

    /// Shared memory is used between processes of this host; on by default.
    pub fn shared_memory(self, shared_memory: SharedMemory) -> Self {
        UdpConfig { shared_memory, ..self }
    }

    /// Polls the device for up to this time (SO_BUSY_POLL); off by default.
    pub fn busy_poll(self, busy_poll: impl Into<Option<Duration>>) -> Self {
        UdpConfig { busy_poll: busy_poll.into(), ..self }
    }

    /// On the first address of `interface`, in the order of GIDs, but with link-local ones last.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::InterfaceDown`], [`Error::NoAddress`], [`Error::Os`].
    pub fn of_interface(interface: &str) -> Result<UdpConfig, Error> {
        let interface = Netlink::open()?.interface(interface)?;
        check_up(&interface)?;
        let mut addresses = interface.gid_order();
        addresses.sort_by_key(|address| is_link_local(*address));
        match addresses.first() {
            Some(address) => Ok(UdpConfig::new(*address)),
            None => Err(Error::NoAddress { interface: interface.name }),
        }
    }
}

/// The interface of an address.
#[derive(Clone, Debug)]
pub(super) struct LocalAddress {
    pub(super) address: IpAddr,
    pub(super) interface: Interface,
    /// Index of the interface if the address is unique only there, otherwise 0.
    pub(super) scope: u32,
    /// All addresses of this host except those that are unique only on an interface.
    pub(super) all: Vec<IpAddr>,
}

impl LocalAddress {
    /// The scope, which distinguishes the address from the same one on another interface.
    pub(super) fn scope_name(&self) -> String {
        if self.scope == 0 { String::new() } else { format!("%{}", self.interface.name) }
    }

    pub(super) fn find(address: IpAddr) -> Result<LocalAddress, Error> {
        let interfaces = Netlink::open()?.interfaces()?;
        let present = || {
            let all = interfaces.iter().flat_map(|interface| &interface.addresses);
            all.map(|(address, _)| address.to_string()).collect::<Vec<_>>().join(", ")
        };
        match interfaces.iter().find(|interface| interface.owns(address)) {
            Some(interface) => {
                check_up(interface)?;
                let scope = if is_link_local(address) { interface.index } else { 0 };
                let all = interfaces.iter().flat_map(|interface| &interface.addresses);
                let all = all.map(|(address, _)| *address).filter(|address| !is_link_local(*address));
                // All of 127.0.0.0/8 belongs to this host.
                let all = all.chain(address.is_loopback().then_some(address)).collect();
                Ok(LocalAddress { address, interface: interface.clone(), scope, all })
            }
            None => Err(Error::Invalid {
                parameter: "address",
                value: address.to_string(),
                expected: format!("is no address of this host, which has {}", present()),
            }),
        }
    }
}

fn check_up(interface: &Interface) -> Result<(), Error> {
    if interface.up { Ok(()) } else { Err(Error::InterfaceDown { name: interface.name.clone() }) }
}

pub(crate) fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}
