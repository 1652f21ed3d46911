//! Address handles and multicast groups.

use ferroce_wire::Gid;

use super::Context;
use crate::backend::dispatch;
use crate::verbs::{AddressVector, Ah, Error, Pd, Qp, WorkCompletion};

impl Context {
    /// Creates an address handle: the path of datagrams to a port, or to a multicast group.
    /// [`manual::connecting`](crate::manual::connecting) has an example, and [`create_ah_blocking`](Context::create_ah_blocking)
    /// waits for the next hop.
    ///
    /// Does not block. It asks the driver for the next hop if the address vector has no hardware address. Datagrams posted before
    /// the next hop is resolved (ARP, ND) wait in their queue pair's send queue, and delay later ones. If the resolution fails
    /// they complete with `RetryExcErr`, which moves their queue pair to SQE, and
    /// [`Event::AhUnreachable`](crate::Event::AhUnreachable) says why.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a value out of range; [`Error::AddressFamily`]: use another `sgid_index`
    /// ([`Port::gid_index_for`](crate::Port::gid_index_for)); [`Error::Exhausted`]: raise
    /// [`Config::max_ahs`](crate::Config::max_ahs); or the driver's error, such as no route.
    pub fn create_ah(&mut self, pd: Pd, address: &AddressVector) -> Result<Ah, Error> {
        dispatch!(&mut self.backend, create_ah(pd, address))
    }

    /// The path back to the sender of a datagram, from its completion and the first 40 bytes of its receive. It has the source
    /// hardware address of the datagram, so an address handle for it needs no next-hop resolution. It has the DSCP of the
    /// datagram, and ECN 0: a switch's mark concerns only the received packet. If several rows of the GID table have the address,
    /// it uses the one of the completion's [`vlan`](WorkCompletion::vlan); if that is unknown, one without a VLAN, or the first.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the bytes are no network header, or the destination is no GID of this port.
    pub fn address_from_wc(&self, wc: &WorkCompletion, grh: &[u8; 40]) -> Result<AddressVector, Error> {
        dispatch!(&self.backend, address_from_wc(wc, grh))
    }

    /// Destroys an address handle. Datagrams posted with it and not yet sent complete in error.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn destroy_ah(&mut self, ah: Ah) -> Result<(), Error> {
        dispatch!(&mut self.backend, destroy_ah(ah))
    }

    /// Attaches a UD queue pair to a multicast group. Repeated calls change nothing. `examples/publish.rs` has a publisher and
    /// its subscribers.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a queue pair that is not UD, or a GID that is no group;
    /// [`Error::Exhausted`], or the driver's error.
    pub fn attach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        dispatch!(&mut self.backend, attach_mcast(qp, group))
    }

    /// Detaches a queue pair from a group ([`attach_mcast`](Context::attach_mcast)).
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] if the queue pair is not attached; the driver's error.
    pub fn detach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        dispatch!(&mut self.backend, detach_mcast(qp, group))
    }
}
