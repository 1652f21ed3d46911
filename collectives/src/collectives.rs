//! The communicators of one process, its ports (`ports.rs`: a context for each rail) and its buffers.

mod buffers;
mod joining;
mod measuring;
mod membership;

pub use measuring::Measurement;

use std::sync::Arc;
use std::time::Duration;

use ferroce::driver::Piece;
use ferroce::driver::gpu::Device;
use ferroce::driver::segment::Ticket;
use ferroce::{Access, Context, Idle, Idler, Memory, Mr, Nanos, Poller, Sge};
use tracing::{debug, warn};
use zerocopy::byteorder::big_endian::{U32, U64};

use crate::card::{Card, RailCard};
use crate::choice::{Explanation, Model, Seconds};
use crate::compute::Computer;
use crate::error::Cause;
use crate::flight::{FlightRecorder, Recorder};
use crate::group::{Group, Outcome, Process};
use crate::mapped::{Host, Mapped};
use crate::ports::{MAX_RAILS, Ports};
use crate::rendezvous::rendezvous;
use crate::slab::{Handle, Slab};
use crate::{
    Algorithm, At, Bootstrap, DataType, Error, MAX_SIZE, Operation, Options, Reduction, SharedMemory,
};

/// A handle of memory registered for operations. It is valid until [`Collectives::deregister`] returns the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) mr: Mr,
}

/// A handle of a group of ranks that execute operations together. [`Collectives`] owns the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Communicator {
    handle: Handle,
    rank: u32,
    size: u32,
}

impl Communicator {
    /// This rank, 0 to `size` − 1.
    pub fn rank(self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    pub fn size(self) -> u32 {
        self.size
    }
}

/// A handle of operations started together, valid until [`test`](Collectives::test) or [`wait`](Collectives::wait) has returned
/// their result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "an operation has ended when `test` or `wait` says so"]
pub struct Request(Handle);

/// The operations of a request.
struct Pending {
    communicator: Handle,
    first: u64,
    count: u64,
}

/// The communicators of one process on one context, which it owns. One thread owns it, such as that of a
/// [`Runner`](crate::Runner).
///
/// Operations make progress only in [`poll`](Collectives::poll), and in [`test`](Collectives::test) and
/// [`wait`](Collectives::wait), which call it. Other ranks are answered only there, too: a thread that computes for long must
/// poll from time to time, at least once per [`Options::retry_budget`], or use a runner.
pub struct Collectives {
    ports: Ports,
    computer: Computer,
    poller: Poller,
    buffers: Vec<Buffer>,
    /// Memory shared with the processes of this host.
    host: Host,
    recorder: Recorder,
    /// The idle action.
    idler: Idler,
    /// Turns on mapped memory only, since the last poll of the ports.
    turns_on_memory: u32,
    groups: Slab<Group>,
    /// Other ranks may know this process's ports.
    has_card: bool,
    /// Communicators that have shrunk, with the resulting ones: their ranks may still be asked for the remaining ranks.
    shrunk: Vec<(Handle, Handle)>,
    requests: Slab<Pending>,
}

const UNKNOWN: Error = Error::InvalidHandle { what: "communicator" };

/// How often a wait checks other things than frames.
const LONGEST: Duration = Duration::from_millis(2);

impl Collectives {
    /// Creates collectives on a context.
    ///
    /// # Errors
    /// [`Error::Verbs`], such as too few queue pairs; [`Error::Memory`].
    pub fn new(context: Context) -> Result<Collectives, Error> {
        Collectives::reducing(context, None)
    }

    /// As [`new`](Collectives::new), with a GPU that reduces. [`allocate`](Collectives::allocate) returns its memory. The kernels
    /// are compiled here, which may take seconds the first time.
    ///
    /// Kernels that write a buffer must have finished (`clFinish`, `cudaStreamSynchronize`, or an event) before an operation with
    /// it starts, and those that read it must start after it: operations do not wait for streams of the program. Other ranks may
    /// have another device, or none.
    ///
    /// # Errors
    /// As [`new`](Collectives::new); [`Error::Gpu`].
    pub fn on_device(context: Context, device: Arc<dyn Device>) -> Result<Collectives, Error> {
        Collectives::reducing(context, Some(device))
    }

    fn reducing(context: Context, device: Option<Arc<dyn Device>>) -> Result<Collectives, Error> {
        let recorder = Recorder::new(&context);
        let ports = Ports::new(context)?;
        let (computer, poller) = (Computer::new(device)?, Poller::new());
        let (buffers, groups, requests) = (Vec::new(), Slab::default(), Slab::default());
        Ok(Collectives {
            ports,
            computer,
            poller,
            buffers,
            host: Host::default(),
            recorder,
            idler: Idler::new(Idle::default()),
            turns_on_memory: 0,
            groups,
            has_card: false,
            shrunk: Vec::new(),
            requests,
        })
    }

    /// Turns off the flight recorder, for example for the ranks of a simulation. Call it before cards and communicators are
    /// created; none of them is then recorded.
    #[must_use]
    pub fn unrecorded(self) -> Collectives {
        Collectives { recorder: Recorder::off(), ..self }
    }

    /// Adds a port, a rail. Rails with the same number connect two ranks, the first to the first, and long operations use all of
    /// them, each port according to its throughput. If a rail fails in the middle of an operation, the operation completes on the
    /// others; a rail that recovers is used again. [`finish`](Collectives::finish) closes it.
    ///
    /// All ports must access the memory: that of [`allocate`](Collectives::allocate) is suitable, and
    /// [`register`](Collectives::register) no longer takes owned memory. Ranks may have different kinds of ports; two ranks have
    /// as many rails as the one with fewer ports.
    ///
    /// ```
    /// # use ferroce_collectives::ferroce::{Config, Context, Device};
    /// # use ferroce_collectives::*;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let (first, second) = ("loopback", "loopback");
    /// let open = |device: &str| Context::open(Device::open(device)?, &Config::default());
    /// let mut collectives = Collectives::new(open(first)?)?;
    /// collectives.add_rail(open(second)?)?;
    /// assert_eq!(collectives.rails(), 2);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than [`MAX_RAILS`], and after communicators, cards or buffers were created; [`Error::Verbs`],
    /// [`Error::Memory`].
    pub fn add_rail(&mut self, context: Context) -> Result<(), Error> {
        if self.rails() == MAX_RAILS {
            return Err(Error::invalid("rails", MAX_RAILS + 1, format!("at most {MAX_RAILS}")));
        }
        if self.has_card || !self.buffers.is_empty() {
            let expected = "add rails before cards, communicators and buffers are made";
            return Err(Error::invalid("rail", self.rails(), expected));
        }
        self.ports.add(context)
    }

    /// The number of ports.
    pub fn rails(&self) -> usize {
        self.ports.count()
    }

    /// The context of the first port, to read its counters and its port.
    pub fn context(&self) -> &Context {
        &self.ports
    }

    /// The context of a rail; [`context`](Collectives::context) returns that of rail 0.
    pub fn rail(&self, rail: usize) -> Option<&Context> {
        (rail < self.rails()).then(|| &self.ports.of(rail).context)
    }

    /// When a port has something to do without a frame, as [`Context::next_timeout`]; for loops in virtual time.
    pub fn next_timeout(&self) -> Option<Nanos> {
        self.ports.next_timeout()
    }

    /// The algorithm of an operation, the predicted cost of each algorithm, and the model.
    ///
    /// ```
    /// # use ferroce_collectives::ferroce::{Config, Context, Device};
    /// # use ferroce_collectives::*;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let mut collectives = Collectives::new(context)?;
    /// # let card = collectives.card(&Options::default())?;
    /// # let all = collectives.join_with(0, &[card], &Options::default())?;
    /// # let buffer = collectives.allocate(4096)?;
    /// let sum = Operation::all_reduce(buffer, buffer, 1024, DataType::F32, Reduction::Sum);
    /// println!("{}", collectives.explain(all, &sum)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid counts, roots and peers; [`Error::InvalidHandle`].
    pub fn explain(&self, communicator: Communicator, operation: &Operation) -> Result<Explanation, Error> {
        self.group(communicator)?.explain(operation)
    }

    pub(crate) fn group(&self, communicator: Communicator) -> Result<&Group, Error> {
        self.groups.get(communicator.handle).ok_or(UNKNOWN)
    }

    pub(crate) fn group_mut(&mut self, communicator: Communicator) -> Result<&mut Group, Error> {
        self.groups.get_mut(communicator.handle).ok_or(UNKNOWN)
    }

    fn run_by(
        &mut self,
        communicator: Communicator,
        operation: &Operation,
        algorithm: Algorithm,
    ) -> Result<(), Error> {
        let request = self.start_by(communicator, std::slice::from_ref(operation), Some(algorithm), true)?;
        self.wait(request)
    }

    /// Starts an operation. Nothing is sent before the next [`poll`](Collectives::poll); ranks that share memory see it at once.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid counts, roots and buffers; [`Error::Failed`] of a communicator that has failed;
    /// [`Error::InvalidHandle`].
    pub fn start(&mut self, communicator: Communicator, operation: &Operation) -> Result<Request, Error> {
        self.start_all(communicator, std::slice::from_ref(operation))
    }

    /// Starts several operations as one request, which completes when all of them have. Use it for operations of two ranks that
    /// wait for each other.
    ///
    /// # Errors
    /// As [`start`](Collectives::start), for the first invalid operation; none has started then.
    pub fn start_all(
        &mut self,
        communicator: Communicator,
        operations: &[Operation],
    ) -> Result<Request, Error> {
        self.start_by(communicator, operations, None, false)
    }

    /// As [`start_all`](Collectives::start_all), with an algorithm; for operations of the program or of the communicator itself.
    fn start_by(
        &mut self,
        communicator: Communicator,
        operations: &[Operation],
        forced: Option<Algorithm>,
        is_own: bool,
    ) -> Result<Request, Error> {
        // Nothing happens before the next poll, which passes the time.
        let now = self.ports.now();
        let mut first = None;
        if operations.len() > 1 {
            // None starts if one is invalid.
            for operation in operations {
                let buffers = [self.length(operation.input)?, self.length(operation.output)?];
                let _ = self.group_mut(communicator)?.check(operation, buffers, forced)?;
            }
        }
        for operation in operations {
            let buffers = [self.length(operation.input)?, self.length(operation.output)?];
            let (mut process, groups) = self.process(now);
            let group = groups.get_mut(communicator.handle).ok_or(UNKNOWN)?;
            match group.start(&mut process, operation, buffers, forced, is_own) {
                Ok(id) => first = first.or(Some(id)),
                Err(error) => {
                    if first.is_some() {
                        group.refused(&error);
                    }
                    return Err(error);
                }
            }
        }
        let pending = Pending {
            communicator: communicator.handle,
            first: first.unwrap_or(0),
            count: operations.len() as u64,
        };
        Ok(Request(self.requests.insert(pending)))
    }

    /// Starts an operation and waits until it completes.
    ///
    /// # Errors
    /// As [`start`](Collectives::start) and [`wait`](Collectives::wait).
    pub fn run(&mut self, communicator: Communicator, operation: &Operation) -> Result<(), Error> {
        let request = self.start(communicator, operation)?;
        self.wait(request)
    }

    /// Polls once. Returns whether a request has completed; its handle is then invalid.
    ///
    /// # Errors
    /// [`Error::Failed`], which ends the request and the communicator: the contents of outputs are then undefined.
    /// [`Error::InvalidHandle`], [`Error::Verbs`].
    pub fn test(&mut self, request: Request) -> Result<bool, Error> {
        if !self.turn_on_memory(request)? {
            let now = self.now();
            self.poll(now)?;
        }
        self.has_ended(request)
    }

    /// Whether a request has completed, without a poll.
    ///
    /// # Errors
    /// As [`test`](Collectives::test).
    pub fn has_ended(&mut self, request: Request) -> Result<bool, Error> {
        let pending = self.requests.get(request.0).ok_or(Error::InvalidHandle { what: "request" })?;
        let Some(group) = self.groups.get_mut(pending.communicator) else {
            self.requests.remove(request.0);
            return Err(UNKNOWN);
        };
        if group.has_ended_before(pending.first + pending.count) {
            self.requests.remove(request.0);
            return Ok(true);
        }
        for id in pending.first..pending.first + pending.count {
            match group.outcome(id) {
                Outcome::UnderWay => return Ok(false),
                Outcome::Done => {}
                Outcome::Failed(error) => {
                    self.requests.remove(request.0);
                    return Err(error);
                }
            }
        }
        self.requests.remove(request.0);
        Ok(true)
    }

    /// Polls until a request has completed.
    ///
    /// # Errors
    /// As [`test`](Collectives::test).
    pub fn wait(&mut self, request: Request) -> Result<(), Error> {
        let mut turned = None;
        loop {
            match self.has_ended(request) {
                Ok(false) if self.turn_on_memory(request)? => {}
                Ok(false) => self.turn_on_time(&mut turned)?,
                Ok(true) => return Ok(()),
                Err(error) => {
                    self.tell_failures()?;
                    return Err(error);
                }
            }
        }
    }

    /// One turn of the context and of all operations, at the time [`now`](Collectives::now) or that of a clock of the program's
    /// own. Returns whether there was any progress.
    ///
    /// # Errors
    /// [`Error::Verbs`] when the port is gone. Failures of operations are returned for their requests.
    pub fn poll(&mut self, now: Nanos) -> Result<bool, Error> {
        self.recorder.polled(now);
        // Operations started since are sent in this turn of the context, which is a system call on most ports.
        let has_begun = self.groups.iter().any(Group::is_dirty) && self.progress(now)?;
        self.take_posted();
        let frames = self.ports.poll(now)?;
        let moved = self.progress(now)? || has_begun;
        if moved && self.take_posted() {
            self.ports.poll(now)?;
        }
        Ok(moved || frames > 0)
    }

    /// Whether something was posted since the last call.
    fn take_posted(&mut self) -> bool {
        let Collectives { groups, ports, .. } = self;
        groups.iter_mut().fold(ports.take_sent(), |posted, group| posted | group.take_posted())
    }

    /// Advances operations after a poll of the context.
    fn progress(&mut self, now: Nanos) -> Result<bool, Error> {
        let mut moved = false;
        let (mut process, groups) = self.process(now);
        process.computer.poll(now);
        // Operations first: those that can complete do so, even if another rank has given up afterwards.
        for group in groups.iter_mut() {
            moved |= group.poll(&mut process);
        }
        for rail in 0..process.ports.count() {
            while let Some(envelope) = process.ports.of_mut(rail).next_message()? {
                match groups.iter_mut().find(|group| group.id == envelope.communicator) {
                    Some(group) => group.hear(&mut process, (envelope.from, rail), envelope.message),
                    None => {
                        debug!(
                            "a control message of communicator {:016x}, unknown here",
                            envelope.communicator
                        )
                    }
                }
                moved = true;
            }
        }
        let has_failed = groups.iter_mut().fold(false, |failed, group| group.take_failure() | failed);
        if has_failed {
            process.recorder.leave();
        }
        Ok(process.ports.has_sent() || moved)
    }

    /// The flight recorder of all communicators here; `None` if the system refused memory for it, or it is [turned
    /// off](Collectives::unrecorded).
    pub fn flight_recorder(&self) -> Option<FlightRecorder> {
        self.recorder.reader()
    }

    /// One turn of a request's operations on mapped memory. The ports are not polled: that is a system call, and takes longer
    /// than a short operation. Returns whether there was any progress; also `false` when it is time to poll the ports.
    fn turn_on_memory(&mut self, request: Request) -> Result<bool, Error> {
        /// Turns until the ports are polled.
        const TURNS: u32 = 32;
        let Some(Pending { communicator, .. }) = self.requests.get(request.0) else { return Ok(false) };
        let communicator = *communicator;
        if self.turns_on_memory >= TURNS {
            self.turns_on_memory = 0;
            return Ok(false);
        }
        let now = self.ports.now();
        let (mut process, groups) = self.process(now);
        let Some(group) = groups.get_mut(communicator) else { return Ok(false) };
        let moved = group.poll_memory(&mut process);
        if process.ports.take_sent() {
            self.ports.poll(now)?;
        }
        if moved {
            self.idler.reset();
            self.turns_on_memory += 1;
        }
        Ok(moved)
    }

    /// One turn, and the idle action if there was nothing to do. If it ends long after the previous one, the rank was off its
    /// core.
    fn turn_on_time(&mut self, turned: &mut Option<Nanos>) -> Result<(), Error> {
        const LONG: Duration = Duration::from_millis(10);
        let before = turned.unwrap_or_else(|| self.now());
        let turn = self.turn();
        let now = self.now();
        let away = now.since(before).saturating_sub(LONGEST);
        if away >= LONG {
            self.groups.iter().for_each(|group| group.was_away(away));
        }
        *turned = Some(now);
        turn
    }

    /// One turn, and the idle action if there was nothing to do.
    fn turn(&mut self) -> Result<(), Error> {
        let now = self.now();
        if self.poll(now)? || self.next_look() == Nanos::ZERO {
            self.idler.reset();
        } else if self.idler.rest() {
            self.rest(LONGEST)?;
        }
        Ok(())
    }

    /// When it must be polled even if nothing arrives; [`Nanos::ZERO`] is at once, [`Nanos::NEVER`] never.
    pub fn next_look(&self) -> Nanos {
        self.groups.iter().map(Group::next_look).min().unwrap_or(Nanos::NEVER)
    }

    /// Blocks until something may have arrived, something is due, or `timeout` has passed.
    ///
    /// # Errors
    /// [`Error::Verbs`] when the port is gone.
    pub fn rest(&mut self, timeout: Duration) -> Result<(), Error> {
        /// Changes announced by a lost packet are seen then.
        const LOST: Duration = Duration::from_millis(20);
        let now = self.now();
        let is_on_memory = self.groups.iter().any(Group::is_on_memory);
        let timeout = if is_on_memory { timeout.min(LOST) } else { timeout };
        // From now on a rank that announces a change also sends a packet.
        self.host.sleep();
        let waited = match self.progress(now)? {
            true => Ok(()),
            false => {
                let until_look = self.next_look().since(now);
                self.ports.wait(now, timeout.min(until_look))
            }
        };
        self.host.rise();
        waited
    }

    /// Polls until the others know which communicators have failed, for at most half a second.
    fn tell_failures(&mut self) -> Result<(), Error> {
        while self.groups.iter_mut().any(|group| group.is_telling()) {
            self.turn()?;
        }
        Ok(())
    }

    /// The time of its monotonic clock, for [`poll`](Collectives::poll).
    pub fn now(&mut self) -> Nanos {
        self.poller.now().max(self.ports.now())
    }

    fn process(&mut self, now: Nanos) -> (Process<'_>, &mut Slab<Group>) {
        let Collectives { ports, computer, host, recorder, poller: clock, groups, .. } = self;
        (Process { ports, computer, host, recorder, clock, now }, groups)
    }
}
