//! How queue pairs move from state to state.

use super::Context;
use crate::backend::dispatch;
#[cfg(doc)]
use crate::verbs::Event;
use crate::verbs::{Error, Qp, Transition};

impl Context {
    /// Moves a queue pair from state to state.
    ///
    /// Never blocks. A new way to a peer asks the driver for the next hop if the address vector has no hardware
    /// address. Until it answers (ARP, ND) the queue pair is in the new state, receives, and may be moved on; what
    /// it has to send waits, and no ACK timer runs. If nobody answers it goes to ERR, its oldest send completes
    /// with `RetryExcErr`, and [`Event::QpUnreachable`] says why.
    ///
    /// # Errors
    /// [`Error::State`] if the move does not start from the QP's state, [`Error::Invalid`] for what
    /// its service or state does not admit, [`Error::PathMtu`], [`Error::AddressFamily`], or the
    /// driver's word, as that there is no route. The queue pair is as it was then.
    pub fn modify_qp(&mut self, qp: Qp, transition: Transition) -> Result<(), Error> {
        dispatch!(&mut self.backend, modify_qp(qp, transition))
    }
}
