//! Reserving UDP port 4791 of the addresses whose packets an AF_XDP port receives.
//!
//! The XDP program redirects the packets before any socket receives them. So no other process may have a socket on
//! these addresses, which would receive nothing any more, and no process may open one later: see
//! [`holder`](crate::holder).

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use tracing::warn;

use super::os_error;
use crate::holder::{Holder, is_kernels, sockets_on};
use crate::netlink::Interface;
use crate::netlink::sockets::BoundSocket;
use crate::rnic::remedy::rxe_on;
use crate::{Error, ROCE_PORT, udp};

/// Warns if rdma_rxe is on the interface.
pub(super) fn warn_of_rxe(interface: &Interface) {
    if let Some(rxe) = rxe_on(&interface.name) {
        warn!(
            interface = interface.name,
            "'{rxe}' (rdma_rxe) is on this interface too: it receives no RoCE packets to these addresses while this \
             AF_XDP port is open"
        );
    }
}

/// Reserves UDP port 4791 of each of the interface's addresses as long as the sockets are open.
pub(super) fn reserve(interface: &Interface) -> Result<Vec<OwnedFd>, Error> {
    let sockets = interface.gid_order().into_iter().map(|address| reserve_address(address, interface));
    sockets.filter_map(Result::transpose).collect()
}

/// Returns `None` if rdma_rxe is on any interface: its socket has the port of all addresses, so no other socket can
/// have it.
fn reserve_address(address: IpAddr, interface: &Interface) -> Result<Option<OwnedFd>, Error> {
    for _ in 0..TRIES {
        let own = udp::reserve(address, interface);
        // Checked after the reservation, because sockets are refused from then on.
        let others = sockets_on(address, interface)?;
        let is_refused = matches!(&own, Err(error) if error.kind() == io::ErrorKind::AddrInUse);
        let beside_kernel = || others.iter().any(is_kernels);
        let in_the_way = others.iter().find(|other| hears(other));
        let unexplained = || others.first().filter(|_| is_refused && !beside_kernel());
        if let Some(other) = in_the_way.or_else(unexplained) {
            return Err(Error::PortInUse { address, port: ROCE_PORT, holder: Some(Holder::of(other)) });
        }
        match own {
            Ok(socket) => return Ok(Some(socket)),
            Err(_) if is_refused && beside_kernel() => return Ok(None),
            // The socket that had the port was closed meanwhile.
            Err(_) if is_refused => {}
            Err(source) => return Err(os_error("reserving UDP port 4791", &interface.name, source)),
        }
    }
    Err(Error::PortInUse { address, port: ROCE_PORT, holder: None })
}

/// How often the port may be in use when it is reserved, but free when its holder is looked up.
const TRIES: u32 = 100;

/// Whether the socket would miss the packets that the XDP program redirects.
fn hears(other: &BoundSocket) -> bool {
    match other.interface {
        Some(0) => !is_kernels(other),
        // Another AF_XDP port on the interface, for other queues. If the kernel does not report the interface, this is
        // assumed, unless the kernel has refused the own socket, or the other one shares the port with sockets of its
        // user (SO_REUSEPORT).
        Some(_) | None => false,
    }
}
