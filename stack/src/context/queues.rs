//! Completion queues and shared receive queues.

use std::task::Waker;

use super::Context;
use crate::backend::dispatch;
#[cfg(doc)]
use crate::verbs::Event;
use crate::verbs::{
    Cq, Error, Notify, PostError, ReceiveWorkRequest, Srq, SrqAttributes, SrqConfig, WorkCompletion,
};

impl Context {
    /// Creates a completion queue for `capacity` completions, 1 to 2²². Create it large enough for all completions that are not
    /// polled yet: a completion that does not fit moves its queue pair to ERR ([`Event::CqErr`]).
    ///
    /// # Errors
    /// [`Error::Invalid`] for the capacity; [`Error::Exhausted`]: raise [`Config::max_cqs`](crate::Config::max_cqs).
    pub fn create_cq(&mut self, capacity: u32) -> Result<Cq, Error> {
        dispatch!(&mut self.backend, create_cq(capacity))
    }

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// [`Error::Busy`] while a queue pair uses it: destroy that first.
    pub fn destroy_cq(&mut self, cq: Cq) -> Result<(), Error> {
        dispatch!(&mut self.backend, destroy_cq(cq))
    }

    /// Its completion events wake `waker`, and are not raised.
    pub(crate) fn attach(&mut self, cq: Cq, waker: Waker) -> Result<(), Error> {
        dispatch!(&mut self.backend, attach(cq, waker))
    }

    /// Armed queues raise the events of their channels.
    pub(crate) fn wake_channels(&mut self) {
        dispatch!(&mut self.backend, wake_channels())
    }

    pub(crate) fn check_cq(&mut self, cq: Cq) -> Result<(), Error> {
        dispatch!(&mut self.backend, check_cq(cq))
    }

    /// Takes the oldest completion, if there is one. It does not poll the context ([`wait_cq`](Context::wait_cq) does):
    /// [`poll`](Context::poll) adds completions. [`WorkCompletion`] has an example.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn poll_cq(&mut self, cq: Cq) -> Result<Option<WorkCompletion>, Error> {
        dispatch!(&mut self.backend, poll_cq(cq))
    }

    /// Moves the oldest completions to `room`, as many as it holds. Returns their number; the rest of `room` is unchanged.
    ///
    /// ```
    /// # use ferroce::*;
    /// # fn run(context: &mut Context, cq: Cq) -> Result<(), Error> {
    /// let mut room = [WorkCompletion::EMPTY; 32];
    /// let count = context.poll_cq_into(cq, &mut room)?;
    /// for completion in &room[..count] {
    ///     println!("{} {:?}", completion.wr_id, completion.status);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    #[inline]
    pub fn poll_cq_into(&mut self, cq: Cq, room: &mut [WorkCompletion]) -> Result<usize, Error> {
        dispatch!(&mut self.backend, poll_cq_into(cq, room))
    }

    /// Posts several receives for the queue pairs that share the queue, in this order.
    ///
    /// # Errors
    /// As [`post_sends`](Context::post_sends), with the errors of [`post_srq_recv`](Context::post_srq_recv).
    pub fn post_srq_recvs(&mut self, srq: Srq, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        dispatch!(&mut self.backend, post_srq_recvs(srq, wrs))
    }

    /// Arms a completion queue: the next completion that matches raises one event, an [`Event::Completion`] or one of the
    /// [`CompChannel`](crate::CompChannel) on which the queue was created; the latter is also raised when a runner ends. Poll the
    /// queue once more after arming it, for earlier completions.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn req_notify_cq(&mut self, cq: Cq, notify: Notify) -> Result<(), Error> {
        dispatch!(&mut self.backend, req_notify_cq(cq, notify))
    }

    /// Creates a shared receive queue, for RC and UD queue pairs.
    ///
    /// ```
    /// # use ferroce::*;
    /// let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE)?;
    /// let srq = context.create_srq(&SrqConfig::new(pd))?;
    /// for wr_id in 0..4 {
    ///     let sges = [mr.sge(1024 * wr_id..1024 * (wr_id + 1))];
    ///     context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id, sges: &sges })?;
    /// }
    /// context.arm_srq(srq, 2)?; // an event when fewer than 2 are left
    /// let first = context.create_qp(&QpConfig::rc(pd, cq).srq(srq))?;
    /// let second = context.create_qp(&QpConfig::rc(pd, cq).srq(srq))?;
    /// # let _ = (first, second);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size out of range, [`Error::InvalidHandle`], [`Error::Exhausted`]: raise
    /// [`Config::max_srqs`](crate::Config::max_srqs).
    pub fn create_srq(&mut self, config: &SrqConfig) -> Result<Srq, Error> {
        dispatch!(&mut self.backend, create_srq(config))
    }

    /// Posts a receive for any of the queue pairs that share the queue.
    ///
    /// # Errors
    /// [`Error::QueueFull`]: messages must use receives before more are posted; [`Error::Invalid`] for more SGEs than the queue
    /// allows; [`Error::InvalidHandle`].
    pub fn post_srq_recv(&mut self, srq: Srq, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, post_srq_recv(srq, wr))
    }

    /// Raises [`Event::SrqLimitReached`] once when fewer than `limit` receives are left; 0 turns it off. If fewer are left
    /// already, the event is raised at once.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a limit above the queue's depth.
    pub fn arm_srq(&mut self, srq: Srq, limit: u32) -> Result<(), Error> {
        dispatch!(&mut self.backend, arm_srq(srq, limit))
    }

    /// The attributes of a shared receive queue.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn query_srq(&self, srq: Srq) -> Result<SrqAttributes, Error> {
        dispatch!(&self.backend, query_srq(srq))
    }

    /// Destroys a shared receive queue; its receives are discarded.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Busy`] while queue pairs use it.
    pub fn destroy_srq(&mut self, srq: Srq) -> Result<(), Error> {
        dispatch!(&mut self.backend, destroy_srq(srq))
    }
}
