//! Completion channels: completion queues that another thread, or an event loop, waits for by file descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{read, write};

use crate::Context;
use crate::verbs::{Cq, Error};

/// A completion channel, `ibv_comp_channel` of the verbs: the events of the completion queues that were created on it
/// ([`Context::create_cq_on`]), behind a file descriptor of its own.
///
/// A queue raises one event each time that it was armed ([`Context::req_notify_cq`]) and a completion that it was armed for
/// came, or when the runner of its context ends. The descriptor is readable as long as there are events; [`get_cq_event`](CompChannel::get_cq_event) takes one. A
/// completion that came before the queue was armed raises none, so the loop is: arm, poll until there is nothing, wait.
///
/// Every wait ends: when a [`Runner`](crate::Runner) ends, the queues of its context that are armed raise their events;
/// a channel without queues is readable, as a pipe without a writer is, and a wait for it ends with
/// [`Error::NoQueue`]. So create a queue on it before the first wait.
///
/// Clones are the same channel. Any thread may use it while another one polls the context, and neither waits for the
/// other. An event is a count: nothing is allocated for it, and there is no limit.
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
    /// [`Error::Driver`] when this process may have no more file descriptors.
    pub fn create_comp_channel(&mut self) -> Result<CompChannel, Error> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        // One token, for it has no queue yet.
        let tokens = eventfd(1, flags)
            .map_err(|error| Error::waiting(&self.capabilities().interface, error.into()))?;
        Ok(CompChannel { tokens: Arc::new(tokens), queues: Arc::default() })
    }

    /// Creates a completion queue for `capacity` completions, 1 to 2²², whose completion events go to `channel` instead of
    /// [`next_event`](Context::next_event). The channel is one of this context's: its events name the queue by handle.
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
    /// Takes an event without blocking, unlike `ibv_get_cq_event`; [`wait_cq_event`](CompChannel::wait_cq_event) blocks.
    /// `None` when there is none. The queues of the channel take turns.
    ///
    /// The returned queue was armed, and is so no longer. It usually has a completion. It has none if the event is that of
    /// the end of a [`Runner`](crate::Runner), which wakes all who wait, or if the completion was taken already or went with
    /// its queue pair. So go on with whatever polling the queue finds.
    ///
    /// # Errors
    /// [`Error::NoQueue`] when the channel has no completion queue, or has none any longer: all were destroyed, or went
    /// with their context. The descriptor is readable then.
    pub fn get_cq_event(&self) -> Result<Option<Cq>, Error> {
        // A token of a queue that is gone meanwhile finds no event.
        while self.take_token() {
            if let Some(cq) = self.queues().take() {
                return Ok(Some(cq));
            }
        }
        if self.queues().is_empty() {
            // For the others that wait.
            add_token(&self.tokens);
            return Err(Error::NoQueue);
        }
        Ok(None)
    }

    /// Takes an event, and blocks until there is one, for `timeout` at most. `None` when there was none in that time.
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
            // A time too long to be told is for ever.
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(self, PollFlags::IN)], left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(Error::Wait(error.into())),
            }
        }
    }

    /// What the queue wakes when it has an event.
    fn add(&self, cq: Cq) -> Waker {
        let queue = Arc::new(Queue { cq, events: AtomicU64::new(0), is_gone: AtomicBool::new(false) });
        let mut queues = self.queues();
        // Without a queue there is no event, and no token is one's.
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

/// The queues of a channel. Locked by who takes events and who creates queues, never by a poll.
#[derive(Debug, Default)]
struct Queues {
    all: Vec<Arc<Queue>>,
    /// Whose turn it is.
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
    /// Not taken yet. Each has brought a token, which comes after it: who has a token finds an event.
    events: AtomicU64,
    /// It was destroyed, or its context is gone. That has brought a token too.
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

/// What the completion queue has of its channel, as long as it is there.
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
    /// Who waits looks whether this was the last queue.
    fn drop(&mut self) {
        self.queue.is_gone.store(true, Ordering::Release);
        add_token(&self.tokens);
    }
}

fn add_token(tokens: &OwnedFd) {
    // It fails only when 2⁶⁴ − 2 events wait.
    let _: Result<usize, _> = write(tokens, &1u64.to_ne_bytes());
}
