//! A handle in an asynchronous task, with any executor.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{self, Poll};

use futures_core::Stream;

use super::command::Delivery;
use super::handle::{Call, RunnerHandle};
use crate::Context;
use crate::verbs::Error;

impl RunnerHandle {
    /// Waits for the oldest delivery. This method hides `StreamExt::next`, whose item has no error: for that one write
    /// `StreamExt::next(&mut handle)`. It allocates nothing, and a dropped future has taken nothing: the next one gets the
    /// delivery.
    ///
    /// ```
    /// # use ferroce::*;
    /// # async fn run(mut handle: RunnerHandle) -> Result<(), Error> {
    /// loop {
    ///     match handle.next().await? {
    ///         Delivery::Completed { completion, .. } => println!("{completion:?}"),
    ///         other => println!("{other:?}"),
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`poll`](RunnerHandle::poll).
    pub async fn next(&mut self) -> Result<Delivery, Error> {
        poll_fn(|task| self.poll_next(task)).await
    }

    /// The poll function of [`next`](RunnerHandle::next), for your own futures: takes the oldest delivery, or wakes `task`
    /// when there may be one. Only the task of the latest call is woken. This method hides `Stream::poll_next`, which
    /// returns an `Option` and takes a `Pin`.
    ///
    /// # Errors
    /// As [`next`](RunnerHandle::next).
    pub fn poll_next(&mut self, task: &mut task::Context<'_>) -> Poll<Result<Delivery, Error>> {
        loop {
            if let Some(delivery) = self.poll()? {
                return Poll::Ready(Ok(delivery));
            }
            if !self.desk.bell.tell(task.waker(), || self.has_delivery()) {
                return Poll::Pending;
            }
        }
    }

    /// As [`call`](RunnerHandle::call), without blocking. If the future is dropped after `f` was put into the command ring, `f`
    /// still runs; before that it does not. The first poll puts it there, or a later one if the ring is full.
    ///
    /// # Errors
    /// [`Error::RunnerEnded`] as [`call`](RunnerHandle::call). A closure on the runner's thread must not block on it: it would
    /// wait for itself.
    pub async fn call_async<R: Send + 'static>(
        &mut self,
        f: impl FnOnce(&mut Context) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let mut call = Call::new(move |context, _| f(context));
        poll_fn(|task| {
            loop {
                if let Some(result) = call.step(self)? {
                    return Poll::Ready(Ok(result));
                }
                if !self.desk.bell.tell(task.waker(), || call.may_go_on(self)) {
                    return Poll::Pending;
                }
            }
        })
        .await
    }
}

/// All deliveries. The stream ends when the runner has ended; then [`poll`](RunnerHandle::poll) returns the reason.
impl Stream for RunnerHandle {
    type Item = Delivery;

    fn poll_next(self: Pin<&mut Self>, task: &mut task::Context<'_>) -> Poll<Option<Delivery>> {
        self.get_mut().poll_next(task).map(Result::ok)
    }
}
