//! Queue pairs, and posting work requests.

use ferroce_wire::Qpn;

use super::Context;
use crate::backend::dispatch;
use crate::verbs::{
    Error, Mismatch, PostError, Qp, QpAttributes, QpConfig, ReceiveWorkRequest, SendWorkRequest,
};

impl Context {
    /// Creates a queue pair, in RESET. [`QpConfig`] has an example; [`manual::connecting`](crate::manual::connecting) says how to
    /// move it to RTS.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size out of range, [`Error::InvalidHandle`], [`Error::Exhausted`]: raise
    /// [`Config::max_qps`](crate::Config::max_qps).
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

    /// Sends the pending ACK of a queue pair, if any. Call it before the thread does something else for more than a few
    /// microseconds: an ACK is delayed behind requests and responses for a few polls, up to 100 µs, and the peer's work requests
    /// complete only with it. Does nothing on an RNIC, which acknowledges itself.
    ///
    /// ```
    /// # use ferroce::*;
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    /// # fn compute() {}
    /// context.acknowledge(qp)?;
    /// compute();
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn acknowledge(&mut self, qp: Qp) -> Result<(), Error> {
        dispatch!(&mut self.backend, acknowledge(qp))
    }

    /// The attributes of a queue pair.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn query_qp(&self, qp: Qp) -> Result<QpAttributes, Error> {
        dispatch!(&self.backend, query_qp(qp))
    }

    /// The queue pairs that received a packet of a peer with another configuration, and what the first such packet showed: why a
    /// work request was refused, or packets are dropped.
    pub fn mismatches(&self) -> impl Iterator<Item = (Qpn, Mismatch)> {
        dispatch!(&self.backend, mismatches()).into_iter()
    }

    /// Posts a send work request: a SEND, a WRITE, a READ, an atomic, or any other [`SendOp`](crate::SendOp). The next polls send
    /// it, and the completion queue reports its result.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ferroce::*;
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    /// # let own = context.endpoint(qp, 0)?;
    /// # context.handshake(qp, &own, &own)?;
    /// # let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    /// # let mr = context.register(pd, Memory::zeroed(64)?, access)?;
    /// # let memory = context.remote(mr)?;
    /// // `memory` is what the peer has told of its memory. This adds 7 to a word of it.
    /// let op = SendOp::FetchAdd { remote: memory.at(8), add: 7 };
    /// let (data, flags) = (Data::Sges(&[mr.sge(32..40)]), SendFlags::SIGNALED); // for the old value
    /// context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags })?;
    /// // A READ of that word.
    /// let (op, data) = (SendOp::Read(memory.at(8)), Data::Sges(&[mr.sge(40..48)]));
    /// context.post_send(qp, &SendWorkRequest { wr_id: 2, op, data, flags })?;
    /// for wr_id in [1, 2] {
    ///     let completion = context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
    ///     assert_eq!(completion.wr_id, wr_id);
    /// }
    /// assert_eq!((context.load_u64(mr, 32)?, context.load_u64(mr, 40)?), (0, 7));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::State`] before RTS: connect it first. [`Error::QueueFull`]: poll, take completions and post again.
    /// [`Error::Invalid`] for an operation that the service does not support, too many SGEs or too many bytes inline.
    /// [`Error::Access`]; [`Error::Unsupported`] for FLUSH and ATOMIC WRITE if the device does not support them;
    /// [`Error::InvalidHandle`] for memory that is not registered. Other errors of local memory are reported by the completion,
    /// as in the verbs.
    #[inline]
    pub fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, post_send(qp, wr))
    }

    /// Posts a receive WR: for one message of the peer, a SEND or a WRITE with immediate. Allowed from INIT on, and best before
    /// the peer can send: a message without a receive waits for the RNR timer (RC) or is lost (UC, UD).
    ///
    /// ```
    /// # use ferroce::*;
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    /// context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    /// let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE)?;
    /// context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[mr.sge(0..1024)] })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::State`] in RESET: move it to INIT. [`Error::QueueFull`]: messages must use receives before more are posted.
    /// [`Error::Invalid`] for too many SGEs, and for a queue pair with an SRQ ([`post_srq_recv`](Context::post_srq_recv)).
    /// [`Error::InvalidHandle`].
    pub fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, post_recv(qp, wr))
    }

    /// Posts several sends, in this order; cheaper than one at a time. [`manual::performance`](crate::manual::performance) has an
    /// example.
    ///
    /// # Errors
    /// The error of [`post_send`](Context::post_send) for the first refused one: those before it are posted, it and those after
    /// it are not.
    pub fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        dispatch!(&mut self.backend, post_sends(qp, wrs))
    }

    /// Posts several receives, in this order.
    ///
    /// # Errors
    /// As [`post_sends`](Context::post_sends), with the errors of [`post_recv`](Context::post_recv).
    pub fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        dispatch!(&mut self.backend, post_recvs(qp, wrs))
    }
}
