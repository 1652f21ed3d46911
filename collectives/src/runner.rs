//! Collectives on a thread of their own, and the handles through which other threads use them.

use std::future::Future;
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Collectives, Communicator, Error, Operation, Request};

/// Drives [`Collectives`] on a thread of its own, until it is stopped or dropped. The thread sleeps while there is nothing to do,
/// so it takes no core from a program that computes; other ranks are answered meanwhile.
///
/// ```
/// # use ferroce_collectives::ferroce::{Config, Context, Device};
/// # use ferroce_collectives::*;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let context = Context::open(Device::open("loopback")?, &Config::default())?;
/// # let mut collectives = Collectives::new(context)?;
/// # let card = collectives.card(&Options::default())?;
/// # let all = collectives.join_with(0, &[card], &Options::default())?;
/// let buffer = collectives.allocate(4096)?;
/// let runner = Runner::start(collectives)?;
/// let ranks = runner.handle();
/// let sum = ranks.start(all, Operation::all_reduce(buffer, buffer, 1024, DataType::F32, Reduction::Sum));
/// // ... compute something else ...
/// sum.wait()?; // or `sum.await?`
/// let collectives = runner.stop()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Runner {
    handle: RunnerHandle,
    thread: Option<JoinHandle<Result<Collectives, Error>>>,
}

/// A handle through which threads use a [`Runner`]. Clones are the same handle.
#[derive(Clone, Debug)]
pub struct RunnerHandle {
    commands: Sender<Command>,
    waker: Option<Waker>,
}

enum Command {
    Call(Box<dyn FnOnce(&mut Collectives) + Send>),
    Start(Communicator, Vec<Operation>, Kept),
    Stop,
}

/// Operations passed to a runner: a future, or [`wait`](Pending::wait) for it.
#[derive(Debug)]
#[must_use = "an operation has ended when `wait`, `test` or `await` says so"]
pub struct Pending(Arc<Promise>);

#[derive(Debug, Default)]
struct Promise {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    result: Option<Result<(), Error>>,
    has_ended: bool,
    waker: Option<Waker>,
}

/// The longest sleep of the thread, and the longest if the driver can't be woken.
const LONGEST: Duration = Duration::from_millis(500);
const BLIND: Duration = Duration::from_millis(1);
/// Turns with nothing to do before it sleeps.
const PATIENCE: u32 = 50;

impl Runner {
    /// Moves `collectives` to a new thread and drives them there.
    ///
    /// # Errors
    /// [`Error::Verbs`] with [`ferroce::Error::Thread`].
    pub fn start(collectives: Collectives) -> Result<Runner, Error> {
        let waker = collectives.context().waker();
        let (commands, inbox) = channel();
        let longest = if waker.is_some() { LONGEST } else { BLIND };
        let (hand_over, seat) = sync_channel::<Collectives>(1);
        let body = move || {
            // The starting thread ended before it passed the collectives.
            let collectives = seat.recv().map_err(|_| ended())?;
            Turns { collectives, inbox, pending: Vec::new(), longest }.run()
        };
        let spawned = thread::Builder::new().name("ferroce-ranks".to_owned()).spawn(body);
        let thread = spawned.map_err(|error| Error::Verbs(ferroce::Error::Thread(error)))?;
        // The new thread waits for it.
        let _ = hand_over.send(collectives);
        Ok(Runner { handle: RunnerHandle { commands, waker }, thread: Some(thread) })
    }

    /// A handle for other threads.
    pub fn handle(&self) -> RunnerHandle {
        self.handle.clone()
    }

    /// Ends the thread after the commands passed before, and returns the collectives.
    ///
    /// # Errors
    /// What ended the thread before, such as [`Error::Verbs`] when the port is gone.
    ///
    /// # Panics
    /// With the panic of a closure that a handle's [`call`](RunnerHandle::call) has run.
    pub fn stop(mut self) -> Result<Collectives, Error> {
        self.handle.give(Command::Stop);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Err(ended()),
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.handle.give(Command::Stop);
            // Its result is not needed any more.
            let _ = thread.join();
        }
    }
}

impl RunnerHandle {
    /// Starts an operation. It returns at once; the result reports success, failure or refusal.
    pub fn start(&self, communicator: Communicator, operation: Operation) -> Pending {
        self.start_all(communicator, vec![operation])
    }

    /// Starts several operations as one request. As [`start`](RunnerHandle::start).
    pub fn start_all(&self, communicator: Communicator, operations: Vec<Operation>) -> Pending {
        let promise = Arc::new(Promise::default());
        self.give(Command::Start(communicator, operations, Kept(promise.clone())));
        Pending(promise)
    }

    /// Runs a closure on the runner's thread, with the collectives, and waits for its result. Other ranks are not answered
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::Ended`] if the runner has ended.
    pub fn call<T: Send + 'static>(
        &self,
        closure: impl FnOnce(&mut Collectives) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, result) = sync_channel(1);
        let closure = move |collectives: &mut Collectives| {
            // The result is not awaited any more.
            let _ = answer.send(closure(collectives));
        };
        self.give(Command::Call(Box::new(closure)));
        result.recv().map_err(|_| ended())
    }

    /// If the runner has ended, the command is dropped.
    fn give(&self, command: Command) {
        let _ = self.commands.send(command);
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }
}

impl Pending {
    /// Waits for the result.
    ///
    /// # Errors
    /// Those of [`Collectives::start`] and [`Collectives::wait`]; [`Error::Ended`].
    pub fn wait(self) -> Result<(), Error> {
        let mut state = self.0.lock();
        loop {
            match state.result.take() {
                Some(result) => return result,
                None => state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Whether it has ended, successfully or not.
    pub fn has_ended(&self) -> bool {
        self.0.lock().has_ended
    }
}

impl Future for Pending {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Result<(), Error>> {
        let mut state = self.0.lock();
        match state.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Promise {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, result: Result<(), Error>) {
        let mut state = self.lock();
        if state.has_ended {
            return;
        }
        (state.result, state.has_ended) = (Some(result), true);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        self.changed.notify_all();
    }
}

/// A promise that always gets a result: if it is dropped, [`Error::Ended`].
struct Kept(Arc<Promise>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.keep(Err(ended()));
    }
}

fn ended() -> Error {
    Error::Ended
}

/// The loop of the thread.
struct Turns {
    collectives: Collectives,
    inbox: Receiver<Command>,
    pending: Vec<(Request, Kept)>,
    longest: Duration,
}

impl Turns {
    fn run(mut self) -> Result<Collectives, Error> {
        self.turns().map(|()| self.collectives)
    }

    fn turns(&mut self) -> Result<(), Error> {
        let mut empty = 0;
        loop {
            let now = self.collectives.now();
            let mut moved = self.collectives.poll(now)?;
            let collectives = &mut self.collectives;
            self.pending.retain(|(request, promise)| match collectives.has_ended(*request) {
                Ok(false) => true,
                ended => {
                    promise.0.keep(ended.map(drop));
                    moved = true;
                    false
                }
            });
            // After the poll, which clears the waker: a wake-up from now on ends the sleep.
            loop {
                match self.inbox.try_recv() {
                    Ok(Command::Call(closure)) => closure(&mut self.collectives),
                    Ok(Command::Start(communicator, operations, promise)) => {
                        match self.collectives.start_all(communicator, &operations) {
                            Ok(request) => self.pending.push((request, promise)),
                            Err(error) => promise.0.keep(Err(error)),
                        }
                    }
                    Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return Ok(()),
                    Err(TryRecvError::Empty) => break,
                }
                moved = true;
            }
            empty = if moved { 0 } else { empty + 1 };
            if empty > PATIENCE {
                self.collectives.rest(self.longest)?;
            } else if empty > 0 {
                thread::yield_now();
            }
        }
    }
}
