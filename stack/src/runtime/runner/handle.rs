//! The handle through which a thread uses a runner.
//!
//! Memory belongs to the context. With `Context::exchange` a buffer is owned by one side at a time, by move. If both sides shared
//! the bytes, it would be a data race in Rust, although the verbs allow it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use rtrb::{Consumer, Producer, PushError};

use super::RunnerState;
use super::client::Unfinished;
use super::command::{Command, Delivery, Job, MAX_INLINE, MAX_SGES, Payload, ReceivesOf};
use super::wakeup::Desk;
use crate::runtime::idle::{Idle, Idler};
use crate::verbs::{Cq, Data, Error, Mr, Qp, ReceiveWorkRequest, RegisterError, SendWorkRequest, Srq};
use crate::{Context, Memory};

/// A thread's handle of a [`Runner`](crate::Runner). [`manual::threads`](crate::manual::threads) has an example.
///
/// Posting puts a command into a ring, and fails only if the ring is full. If the context refuses it,
/// [`poll`](RunnerHandle::poll) returns the error, in the order of posting, together with completions. A full command ring is
/// [`Error::QueueFull`]; if the delivery ring is full, completions stay in their queues and commands in their ring. Nothing is
/// lost.
///
/// When the runner ends, `poll` still returns all deliveries, then each command that was not executed: work requests as
/// [`Delivery::Refused`] and memory as [`Delivery::Exchanged`], both with [`Error::RunnerEnded`]. The commands of a dropped
/// handle are executed; the memory that they return is freed.
///
/// A handle delivers completions, refusals and exchanges, but no events. Take these with [`call`](RunnerHandle::call):
/// `handle.call(|context| context.next_cm_event())`, and likewise [`Context::next_event`]. Posting to a full command ring does
/// not block: on [`Error::QueueFull`] take deliveries and post again.
///
/// Memory belongs to the context. A thread accesses its bytes in one of three ways:
///
/// | | moves | cost |
/// |---|---|---|
/// | [`Data::Inline`] | up to [`MAX_INLINE`](RunnerHandle::MAX_INLINE) bytes, to send | a copy into the ring's slot |
/// | [`exchange`](RunnerHandle::exchange) | any size, both ways | a region and a spare block per buffer; two slots of the rings; no copy |
/// | [`call`](RunnerHandle::call) | any size, both ways | an allocation, a round trip, and nothing is polled while the closure copies |
pub struct RunnerHandle {
    commands: Producer<Command>,
    deliveries: Consumer<Delivery>,
    /// Deliveries that a call took off the ring.
    held: VecDeque<Delivery>,
    pub(super) desk: Arc<Desk>,
    state: Arc<RunnerState>,
    idle: Idle,
    /// From the runner, before it reports its end.
    last: Receiver<Unfinished>,
    unfinished: Option<Unfinished>,
}

impl RunnerHandle {
    /// The most SGEs of a work request.
    pub const MAX_SGES: usize = MAX_SGES;
    /// The most bytes of inline data, if the queue pair allows as many.
    pub const MAX_INLINE: usize = MAX_INLINE;

    pub(super) fn new(
        commands: Producer<Command>,
        deliveries: Consumer<Delivery>,
        desk: Arc<Desk>,
        state: Arc<RunnerState>,
        idle: Idle,
        last: Receiver<Unfinished>,
    ) -> RunnerHandle {
        let held = VecDeque::new();
        RunnerHandle { commands, deliveries, held, desk, state, idle, last, unfinished: None }
    }

    /// Posts a send; [`Delivery::Refused`] if the context refuses it.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::RunnerEnded`]; [`Error::Invalid`] for more SGEs or inline data than a command holds.
    pub fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let SendWorkRequest { wr_id, op, data, flags } = *wr;
        self.put(Command::Send { qp, wr_id, op, flags, payload: Payload::new(data)? })
    }

    /// Posts a receive; [`Delivery::Refused`] if the context refuses it.
    ///
    /// # Errors
    /// As [`post_send`](RunnerHandle::post_send).
    pub fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        self.receive(ReceivesOf::Qp(qp), wr)
    }

    /// Posts a receive to a shared receive queue; [`Delivery::Refused`] if the context refuses it.
    ///
    /// # Errors
    /// As [`post_send`](RunnerHandle::post_send).
    pub fn post_srq_recv(&mut self, srq: Srq, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        self.receive(ReceivesOf::Srq(srq), wr)
    }

    /// Replaces the memory of a region by `memory` ([`Context::exchange`]). [`Delivery::Exchanged`] returns the previous memory.
    /// Commands posted after it use the new memory.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::RunnerEnded`]; with the memory.
    pub fn exchange(&mut self, mr: Mr, memory: Memory) -> Result<(), RegisterError> {
        if let Err(source) = self.state.check() {
            return Err(RegisterError { memory, source });
        }
        match self.commands.push(Command::Exchange { mr, memory }) {
            Ok(()) => {
                self.state.nudge();
                Ok(())
            }
            Err(PushError::Full(Command::Exchange { memory, .. })) => {
                Err(RegisterError { memory, source: self.full() })
            }
            Err(PushError::Full(_)) => unreachable!("a ring gives back what did not fit"),
        }
    }

    /// Takes the oldest delivery.
    ///
    /// # Errors
    /// [`Error::RunnerEnded`] after everything was taken, including unfinished commands.
    pub fn poll(&mut self) -> Result<Option<Delivery>, Error> {
        if let Some(delivery) = self.held.pop_front() {
            return Ok(Some(delivery));
        }
        if let Ok(delivery) = self.deliveries.pop() {
            return Ok(Some(delivery));
        }
        if self.desk.is_stalled() {
            self.state.nudge();
        }
        self.state.check().map_or_else(|ended| self.take_unfinished().ok_or(ended).map(Some), |()| Ok(None))
    }

    /// Takes the oldest delivery or command after the end.
    #[cold]
    fn take_unfinished(&mut self) -> Option<Delivery> {
        let RunnerHandle { deliveries, state, last, unfinished, .. } = self;
        // It may have delivered something since this thread checked.
        if let Ok(delivery) = deliveries.pop() {
            return Some(delivery);
        }
        if unfinished.is_none() {
            *unfinished = last.try_recv().ok();
        }
        let reason = state.end.reason()?;
        unfinished.as_mut()?.next(|| Error::RunnerEnded { reason: reason.clone() })
    }

    /// Takes the oldest delivery; waits for one according to the handle's [`Idle`], for at most `timeout`.
    ///
    /// # Errors
    /// [`Error::RunnerEnded`], as [`poll`](RunnerHandle::poll); [`Error::OwnThread`] in a closure on the runner's thread, where
    /// nothing can arrive.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Delivery>, Error> {
        if let Some(delivery) = self.poll()? {
            return Ok(Some(delivery));
        }
        if timeout.is_zero() {
            return Ok(None);
        }
        self.state.check_thread("wait")?;
        let mut idler = Idler::new(self.idle);
        let mut deadline = None;
        loop {
            if let Some(delivery) = self.poll()? {
                return Ok(Some(delivery));
            }
            let blocks = idler.rest();
            let now = Instant::now();
            // A time too far away to represent is no limit.
            let deadline = *deadline.get_or_insert_with(|| now.checked_add(timeout));
            let left = deadline.map_or(timeout, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                return Ok(None);
            }
            if blocks {
                self.desk.bell.sleep(left, || self.has_delivery());
            }
        }
    }

    /// Runs `f` on the runner's thread, after all commands posted before, and returns its result. Use it for everything outside
    /// the fast path: creating, connecting, registering, reading memory. Nothing is polled while `f` runs, so it should not take
    /// long.
    ///
    /// # Errors
    /// [`Error::RunnerEnded`], also if it ends meanwhile; whether `f` has run is then unknown. [`Error::OwnThread`] inside
    /// another call: the closure already has the context.
    pub fn call<R: Send + 'static>(
        &mut self,
        f: impl FnOnce(&mut Context) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.state.check_thread("call")?;
        self.run(move |context, _| f(context))
    }

    /// Delivers the completions of `cq` to this handle from now on. Blocks until the runner has done so, and has no asynchronous
    /// form: call it before moving the handle to a task.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Busy`] if they are delivered to a handle already; [`Error::RunnerEnded`];
    /// [`Error::OwnThread`] as [`call`](RunnerHandle::call).
    pub fn deliver(&mut self, cq: Cq) -> Result<(), Error> {
        self.state.check_thread("deliver")?;
        self.state.claims.add(cq, &self.desk)?;
        let taken = self.run(move |context, cqs| {
            context.check_cq(cq)?;
            cqs.push(cq);
            Ok(())
        });
        let taken = taken.flatten();
        if taken.is_err() {
            self.state.claims.remove(cq);
        }
        taken
    }

    fn receive(&mut self, queue: ReceivesOf, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        let payload = Payload::new(Data::Sges(wr.sges))?;
        self.put(Command::Receive { queue, wr_id: wr.wr_id, payload })
    }

    fn put(&mut self, command: Command) -> Result<(), Error> {
        self.state.check()?;
        match self.commands.push(command) {
            Ok(()) => {
                self.state.nudge();
                Ok(())
            }
            Err(_) => Err(self.full()),
        }
    }

    fn run<R: Send + 'static>(
        &mut self,
        f: impl FnOnce(&mut Context, &mut Vec<Cq>) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let mut call = Call::new(f);
        let mut idler = Idler::new(self.idle);
        loop {
            if let Some(result) = call.step(self)? {
                return Ok(result);
            }
            if idler.rest() {
                self.desk.bell.sleep(LONGEST_SLEEP, || call.may_go_on(self));
            }
        }
    }

    /// The last check before this handle waits for a delivery.
    pub(super) fn has_delivery(&self) -> bool {
        // After the fence, so that the runner does not sleep although there is room.
        if self.desk.is_stalled() {
            self.state.nudge();
        }
        !self.deliveries.is_empty() || self.state.end.reason().is_some()
    }

    /// The runner takes no command of a handle while it can't deliver the result of an earlier one. Only this thread takes
    /// deliveries, so it must do so while it waits for a command.
    fn make_room(&mut self) {
        if !is_full(&self.deliveries) {
            return;
        }
        while let Ok(delivery) = self.deliveries.pop() {
            self.held.push_back(delivery);
        }
        self.state.nudge();
    }

    #[cfg(test)]
    pub(super) fn is_stalled(&self) -> bool {
        self.desk.is_stalled()
    }

    fn full(&self) -> Error {
        Error::QueueFull { queue: "command", depth: self.commands.buffer().capacity() as u32 }
    }
}

impl Drop for RunnerHandle {
    /// Posted commands are executed; completions stay in their queues from now on.
    fn drop(&mut self) {
        // In this order: deliveries to this handle must end before another one gets the queues.
        self.desk.leave();
        self.state.claims.leave(&self.desk);
        self.state.tell_news();
    }
}

/// A closure sent to the runner, and its result.
pub(super) struct Call<R> {
    /// Until there is room in the ring.
    waiting: Option<Command>,
    answer: Receiver<R>,
    answered: Option<R>,
}

impl<R: Send + 'static> Call<R> {
    pub(super) fn new(f: impl FnOnce(&mut Context, &mut Vec<Cq>) -> R + Send + 'static) -> Call<R> {
        let (sender, answer) = sync_channel(1);
        let job: Job = Box::new(move |context, cqs| {
            // The receiver is missing only if a future was dropped.
            let _ = sender.send(f(context, cqs));
        });
        Call { waiting: Some(Command::Run(job)), answer, answered: None }
    }

    /// Makes progress as far as possible. Returns the result, if it is available.
    pub(super) fn step(&mut self, handle: &mut RunnerHandle) -> Result<Option<R>, Error> {
        if let Some(command) = self.waiting.take() {
            match handle.commands.push(command) {
                Ok(()) => handle.state.nudge(),
                Err(PushError::Full(command)) => self.waiting = Some(command),
            }
        }
        // In this order: the result may be the last action of the runner.
        let ended = handle.state.check();
        if !self.is_answered() {
            ended?;
            handle.make_room();
        }
        Ok(self.answered.take())
    }

    /// The last check before its handle waits.
    pub(super) fn may_go_on(&mut self, handle: &RunnerHandle) -> bool {
        self.is_answered()
            || handle.state.end.reason().is_some()
            || is_full(&handle.deliveries)
            || self.waiting.is_some() && !handle.commands.is_full()
    }

    fn is_answered(&mut self) -> bool {
        if self.answered.is_none() {
            self.answered = self.answer.try_recv().ok();
        }
        self.answered.is_some()
    }
}

/// How long a thread of a call without a timeout sleeps: it is woken, so any time works.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

fn is_full(deliveries: &Consumer<Delivery>) -> bool {
    deliveries.slots() == deliveries.buffer().capacity()
}
