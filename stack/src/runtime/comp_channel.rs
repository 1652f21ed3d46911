//! Completion channels: another thread, or an event loop, waits for completion queues by file descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{read, write};

use crate::Context;
use crate::verbs::{Cq, Error};

/// A completion channel, `ibv_comp_channel` of the verbs: a file descriptor for the events of the completion queues created on it
/// ([`Context::create_cq_on`]).
///
/// An armed queue ([`Context::req_notify_cq`]) raises one event with the next matching completion, or when the runner of its
/// context ends. The descriptor is readable as long as there are events; [`get_cq_event`](CompChannel::get_cq_event) takes one. A
/// completion added before the queue was armed raises none, so the loop is: arm, poll until the queue is empty, wait.
///
/// Every wait ends: when a [`Runner`](crate::Runner) ends, the armed queues of its context raise their events; a channel without
/// queues is readable, like a pipe without a writer, and a wait for it returns [`Error::NoQueue`]. So create a queue on it before
/// the first wait.
///
/// Clones are the same channel. Any thread may use it while another one polls the context; neither blocks the other. Events are
/// counters: they need no allocation, and there is no limit.
///
/// ```
/// # use std::time::Duration;
/// # use ferroce::*;
/// # fn run(handle: &mut RunnerHandle) -> Result<(), Error> {
/// // The context is a runner's; this thread sleeps until there are completions.
/// let (channel, cq) = handle.call(|context| -> Result<_, Error> {
///     let channel = context.create_comp_channel()?;
///     let cq = context.create_cq_on(64, &channel)?;
///     Ok((channel, cq))
/// })??;
/// loop {
///     let completions = handle.call(move |context| -> Result<_, Error> {
///         context.req_notify_cq(cq, Notify::Next)?;
///         std::iter::from_fn(|| context.poll_cq(cq).transpose()).collect::<Result<Vec<_>, _>>()
///     })??;
///     println!("{completions:?}");
///     # break;
///     if completions.is_empty() {
///         channel.wait_cq_event(Duration::MAX)?;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CompChannel {
    tokens: Arc<OwnedFd>,
    queues: Arc<Mutex<Queues>>,
}

impl Context {
    /// Creates a completion channel.
    ///
    /// # Errors
    /// [`Error::Driver`] when this process may open no more file descriptors.
    pub fn create_comp_channel(&mut self) -> Result<CompChannel, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        // One token, because it has no queue yet.
        let tokens = eventfd(1, flags)
            .map_err(|error| Error::waiting(&self.capabilities().interface, error.into()))?;
        Ok(CompChannel { tokens: Arc::new(tokens), queues: Arc::default() })
    }

    /// Creates a completion queue for `capacity` completions, 1 to 2²², whose completion events go to `channel` instead of
    /// [`next_event`](Context::next_event). The channel must be of this context: its events name the queue by handle.
    ///
    /// # Errors
    /// As [`create_cq`](Context::create_cq).
    pub fn create_cq_on(&mut self, capacity: u32, channel: &CompChannel) -> Result<Cq, Error> {
        let cq = self.create_cq(capacity)?;
        self.attach(cq, channel.add(cq))?;
        Ok(cq)
    }
}

impl CompChannel {
    /// Takes an event without blocking, unlike `ibv_get_cq_event`; [`wait_cq_event`](CompChannel::wait_cq_event) blocks. `None`
    /// when there is none. The queues of the channel are served in turn.
    ///
    /// The returned queue is disarmed now. It usually has a completion. It has none if the event was raised by the end of a
    /// [`Runner`](crate::Runner), which wakes all waiting threads, or if the completion was already polled or was removed with
    /// its queue pair. So an empty poll is no error.
    ///
    /// # Errors
    /// [`Error::NoQueue`] when the channel has no completion queue, or no longer has one: all were destroyed, or their context
    /// was dropped. The descriptor is readable then.
    pub fn get_cq_event(&self) -> Result<Option<Cq>, Error> {
        // The token of a queue destroyed meanwhile has no event.
        while self.take_token() {
            if let Some(cq) = self.queues().take() {
                return Ok(Some(cq));
            }
        }
        if self.queues().is_empty() {
            // For other waiting threads.
            add_token(&self.tokens);
            return Err(Error::NoQueue);
        }
        Ok(None)
    }

    /// Takes an event, and blocks until there is one, for at most `timeout`. `None` after the timeout.
    ///
    /// # Errors
    /// [`Error::NoQueue`] as [`get_cq_event`](CompChannel::get_cq_event); [`Error::Wait`] when the system can't wait.
    pub fn wait_cq_event(&self, timeout: Duration) -> Result<Option<Cq>, Error> {
        let start = Instant::now();
        loop {
            if let Some(cq) = self.get_cq_event()? {
                return Ok(Some(cq));
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            // A time too long to represent is no limit.
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(self, PollFlags::IN)], left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::Wait(error.into())),
            }
        }
    }

    /// The descriptor that the queue makes readable with an event.
    fn add(&self, cq: Cq) -> Waker {
        let queue = Arc::new(Queue { cq, events: AtomicU64::new(0), is_gone: AtomicBool::new(false) });
        let mut queues = self.queues();
        // Without a queue there is no event, and no token belongs to one.
        while queues.is_empty() && self.take_token() {}
        queues.all.retain(|queue| !queue.is_gone());
        queues.all.push(queue.clone());
        Waker::from(Arc::new(Attachment { queue, tokens: self.tokens.clone() }))
    }

    fn take_token(&self) -> bool {
        read(&*self.tokens, &mut [0; 8]).is_ok()
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tokens.as_fd()
    }
}

impl AsRawFd for CompChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// The queues of a channel. Locked to take events and to create queues, never by a poll.
#[derive(Debug, Default)]
struct Queues {
    all: Vec<Arc<Queue>>,
    /// The queue whose turn it is.
    next: usize,
}

impl Queues {
    fn is_empty(&self) -> bool {
        self.all.iter().all(|queue| queue.is_gone())
    }

    fn take(&mut self) -> Option<Cq> {
        let count = self.all.len();
        let mut turns = (0..count).map(|n| (self.next + n) % count);
        let found = turns.find(|n| !self.all[*n].is_gone() && self.all[*n].take())?;
        self.next = found + 1;
        Some(self.all[found].cq)
    }
}

/// A completion queue of a channel.
#[derive(Debug)]
struct Queue {
    cq: Cq,
    /// Events not taken yet. Each has a token, added after the event: a thread that has a token finds an event.
    events: AtomicU64,
    /// It was destroyed, or its context was dropped. That added a token too.
    is_gone: AtomicBool,
}

impl Queue {
    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    fn take(&self) -> bool {
        self.events.fetch_update(Ordering::AcqRel, Ordering::Acquire, |events| events.checked_sub(1)).is_ok()
    }
}

/// The completion queue's reference to its channel.
struct Attachment {
    queue: Arc<Queue>,
    /// The channel's eventfd, which counts all events.
    tokens: Arc<OwnedFd>,
}

impl Wake for Attachment {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.queue.events.fetch_add(1, Ordering::Release);
        add_token(&self.tokens);
    }
}

impl Drop for Attachment {
    /// A waiting thread checks whether this was the last queue.
    fn drop(&mut self) {
        self.queue.is_gone.store(true, Ordering::Release);
        add_token(&self.tokens);
    }
}

fn add_token(tokens: &OwnedFd) {
    // It fails only if 2⁶⁴ − 2 events are pending.
    let _: Result<usize, _> = write(tokens, &1u64.to_ne_bytes());
}
