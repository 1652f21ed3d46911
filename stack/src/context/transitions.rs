//! State transitions of queue pairs.

use super::Context;
use crate::backend::dispatch;
#[cfg(doc)]
use crate::verbs::Event;
use crate::verbs::{Error, Qp, Transition};

impl Context {
    /// Makes a state transition of a queue pair.
    ///
    /// Does not block. For a new path to a peer it asks the driver for the next hop if the address vector has no hardware
    /// address. Until the next hop is resolved (ARP, ND) the queue pair is in the new state, receives, and allows further
    /// transitions; its packets wait, and no ACK timer runs. If the resolution fails, it goes to ERR, its oldest send completes
    /// with `RetryExcErr`, and [`Event::QpUnreachable`] has the reason.
    ///
    /// [`handshake`](Context::handshake), [`start_datagrams`](Context::start_datagrams) and the connection manager make these
    /// transitions with default values. With other values, for an RC queue pair:
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ferroce::*;
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    /// # let local = context.endpoint(qp, 0)?;
    /// # let remote = local;
    /// // `local` is this end's endpoint, which the peer was told; `remote` is the peer's.
    /// let way = AddressVector::new(remote.gid, 0).traffic_class(26 << 2);
    /// let receive = ReadyToReceive::new(way, remote.qpn, remote.psn).path_mtu(PathMtu::Mtu1024).selective_repeat(true);
    /// let send = ReadyToSend::new(local.psn).timeout_at_least(Duration::from_millis(20)).retry_count(3);
    /// context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE })?;
    /// context.modify_qp(qp, Transition::ReadyToReceive(receive))?;
    /// context.modify_qp(qp, Transition::ReadyToSend(send))?;
    /// # assert_eq!(context.query_qp(qp)?.state, QpState::Rts);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::State`] if the transition does not start from the QP's state, [`Error::Invalid`] for an attribute that its
    /// service or state does not allow; [`Error::PathMtu`]: use a smaller one, or a larger MTU of the interface;
    /// [`Error::AddressFamily`]: use another `sgid_index`; or the driver's error, such as no route. The queue pair is then
    /// unchanged.
    pub fn modify_qp(&mut self, qp: Qp, transition: Transition) -> Result<(), Error> {
        dispatch!(&mut self.backend, modify_qp(qp, transition))
    }
}
