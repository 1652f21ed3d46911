//! Queue pairs, and the work requests that are posted to them.

use ferroce_wire::Qpn;

use super::Context;
use crate::backend::dispatch;
use crate::verbs::{
    Error, Mismatch, PostError, Qp, QpAttributes, QpConfig, ReceiveWorkRequest, SendWorkRequest,
};

impl Context {
    /// Creates a queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::InvalidHandle`], [`Error::Exhausted`].
    pub fn create_qp(&mut self, config: &QpConfig) -> Result<Qp, Error> {
        dispatch!(&mut self.backend, create_qp(config))
    }

    /// Destroys a queue pair; its outstanding work is discarded, and its completions with it.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Busy`] while it is attached to multicast groups.
    pub fn destroy_qp(&mut self, qp: Qp) -> Result<(), Error> {
        dispatch!(&mut self.backend, destroy_qp(qp))
    }

    /// What a queue pair is like now.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn query_qp(&self, qp: Qp) -> Result<QpAttributes, Error> {
        dispatch!(&self.backend, query_qp(qp))
    }

    /// Which queue pairs have had a packet of a peer that is set up otherwise than they are, and what the
    /// first one showed: why a work request was refused, or packets are dropped.
    pub fn mismatches(&self) -> impl Iterator<Item = (Qpn, Mismatch)> {
        dispatch!(&self.backend, mismatches()).into_iter()
    }

    /// Posts a send. It leaves with the next polls.
    ///
    /// # Errors
    /// [`Error::State`] before RTS, [`Error::QueueFull`], [`Error::Invalid`], [`Error::Access`],
    /// [`Error::Unsupported`] for FLUSH and ATOMIC WRITE where the device lacks them,
    /// [`Error::InvalidHandle`] for memory that is not registered. Memory that is registered but
    /// may not be used this way is told by the completion, as verbs do.
    #[inline]
    pub fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, post_send(qp, wr))
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// [`Error::State`] in RESET, [`Error::QueueFull`], [`Error::Invalid`] (also for a queue pair
    /// with an SRQ), [`Error::InvalidHandle`].
    pub fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, post_recv(qp, wr))
    }

    /// Posts several sends, in this order.
    ///
    /// # Errors
    /// At the first that [`post_send`](Context::post_send) refuses: those before it are posted, it and those behind it
    /// are not.
    pub fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        dispatch!(&mut self.backend, post_sends(qp, wrs))
    }

    /// Posts several receives, in this order.
    ///
    /// # Errors
    /// As [`post_sends`](Context::post_sends), of [`post_recv`](Context::post_recv).
    pub fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        dispatch!(&mut self.backend, post_recvs(qp, wrs))
    }
}
