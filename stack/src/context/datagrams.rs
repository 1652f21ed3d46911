//! Address handles and multicast groups.

use ferroce_wire::Gid;

use super::Context;
use crate::backend::dispatch;
use crate::verbs::{AddressVector, Ah, Error, Pd, Qp, WorkCompletion};

impl Context {
    /// Creates an address handle: the way of datagrams to a port, or to a multicast group.
    /// [`manual::connecting`](crate::manual::connecting) has an example, and
    /// [`create_ah_blocking`](Context::create_ah_blocking) waits for the next hop.
    ///
    /// Never blocks. It asks the driver for the next hop if the address vector has no hardware address. Datagrams
    /// that are posted before it answers (ARP, ND) wait in their queue pair's send queue, and those behind them with
    /// them. If nobody answers they complete with `RetryExcErr`, which puts their queue pair into SQE, and
    /// [`Event::AhUnreachable`](crate::Event::AhUnreachable) says why.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a value out of its range; [`Error::AddressFamily`]: take another
    /// `sgid_index` ([`Port::gid_index_for`](crate::Port::gid_index_for)); [`Error::Exhausted`]: raise
    /// [`Config::max_ahs`](crate::Config::max_ahs); or the driver's word, as that there is no route.
    pub fn create_ah(&mut self, pd: Pd, address: &AddressVector) -> Result<Ah, Error> {
        dispatch!(&mut self.backend, create_ah(pd, address))
    }

    /// The way back to the sender of a datagram, from its completion and the first 40 bytes of its
    /// receive. The answer goes to the hardware address that the datagram came from, so an address handle
    /// for it is made without asking anybody. It has the DSCP of the datagram, and ECN 0: the mark of a switch is of the
    /// packet that came. Of several rows of the GID table with one address it names that of the completion's
    /// [`vlan`](WorkCompletion::vlan); where that is not told, one without a VLAN, or the first.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are no network header, or were sent to no GID of this port.
    pub fn address_from_wc(&self, wc: &WorkCompletion, grh: &[u8; 40]) -> Result<AddressVector, Error> {
        dispatch!(&self.backend, address_from_wc(wc, grh))
    }

    /// Destroys an address handle. Datagrams that are posted with it and have not left end in
    /// error.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn destroy_ah(&mut self, ah: Ah) -> Result<(), Error> {
        dispatch!(&mut self.backend, destroy_ah(ah))
    }

    /// Lets a UD queue pair hear a multicast group. Once is enough; more change nothing. `examples/publish.rs` has a publisher and
    /// its subscribers.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a queue pair that is not UD, or a GID that
    /// is no group; [`Error::Exhausted`], or the driver's word.
    pub fn attach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        dispatch!(&mut self.backend, attach_mcast(qp, group))
    }

    /// Ends what [`attach_mcast`](Context::attach_mcast) began.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] if the queue pair is not attached; the driver's
    /// word.
    pub fn detach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        dispatch!(&mut self.backend, detach_mcast(qp, group))
    }
}
