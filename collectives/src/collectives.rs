//! The communicators of one process on one context.

use std::sync::Arc;
use std::time::Duration;

use ferroce::driver::Piece;
use ferroce::driver::gpu::Device;
use ferroce::driver::segment::Ticket;
use ferroce::{Access, Context, Idle, Memory, Mr, Nanos, Pd, Poller, Sge};
use tracing::{debug, info, warn};
use zerocopy::byteorder::big_endian::{U32, U64};

use crate::card::{Card, gid_index};
use crate::choice::{Explanation, Model};
use crate::compute::Computer;
use crate::control::Control;
use crate::error::Cause;
use crate::group::{Group, Outcome, Process};
use crate::mapped::{Host, Mapped};
use crate::memory::{allocate, deregister};
use crate::rendezvous::rendezvous;
use crate::slab::{Handle, Slab};
use crate::{
    Algorithm, At, Bootstrap, DataType, Error, MAX_SIZE, Operation, Options, Reduction, SharedMemory,
};

/// Memory that is registered for operations. It is named by this handle until [`Collectives::deregister`] gives the memory
/// back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) mr: Mr,
}

/// A group of ranks that carry out operations together, and this rank's place among them. A handle: [`Collectives`] has what
/// it names.
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

    /// How many ranks there are.
    pub fn size(self) -> u32 {
        self.size
    }
}

/// Operations that have begun together. A handle, until [`test`](Collectives::test) or [`wait`](Collectives::wait) has said how
/// they ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "an operation has ended when `test` or `wait` says so"]
pub struct Request(Handle);

/// The operations of a request.
struct Pending {
    communicator: Handle,
    first: u64,
    count: u64,
}

/// The communicators of one process on one context, which it owns. One thread owns it; [`Runner`](crate::Runner) gives it one.
///
/// Operations go on only in [`poll`](Collectives::poll), and in [`test`](Collectives::test) and [`wait`](Collectives::wait), which call
/// it. Other ranks get their answers only there, too: whoever computes for long polls now and then, at least once in
/// [`Options::retry_budget`], or leaves that to a runner.
pub struct Collectives {
    context: Context,
    pd: Pd,
    control: Control,
    computer: Computer,
    poller: Poller,
    buffers: Vec<Buffer>,
    /// Memory that is shared with the processes of this host.
    host: Host,
    /// Turns with nothing to do, and what is done then.
    empty: u32,
    idle: Idle,
    groups: Slab<Group>,
    /// Communicators that have shrunk, with what was made of them: their ranks may still be asked who is left.
    shrunk: Vec<(Handle, Handle)>,
    requests: Slab<Pending>,
}

impl Collectives {
    /// On a context.
    ///
    /// # Errors
    /// [`Error::Verbs`], such as too few queue pairs; [`Error::Memory`].
    pub fn new(context: Context) -> Result<Collectives, Error> {
        Collectives::reducing(context, None)
    }

    /// As [`new`](Collectives::new), with a GPU that reduces. Its memory is what [`allocate`](Collectives::allocate) gives.
    ///
    /// Kernels that write a buffer have ended (`clFinish`, `cudaStreamSynchronize`, or an event) before an operation with it
    /// begins, and those that read it begin behind it: operations wait for no stream of the program's. Other ranks may have another
    /// device, or none.
    ///
    /// # Errors
    /// As [`new`](Collectives::new); [`Error::Gpu`].
    pub fn on_device(context: Context, device: Arc<dyn Device>) -> Result<Collectives, Error> {
        Collectives::reducing(context, Some(device))
    }

    fn reducing(mut context: Context, device: Option<Arc<dyn Device>>) -> Result<Collectives, Error> {
        let pd = context.alloc_pd()?;
        let control = Control::new(&mut context, pd)?;
        let (computer, poller) = (Computer::new(device), Poller::new());
        let (buffers, groups, requests) = (Vec::new(), Slab::default(), Slab::default());
        Ok(Collectives {
            context,
            pd,
            control,
            computer,
            poller,
            buffers,
            host: Host::default(),
            empty: 0,
            idle: Idle::default(),
            groups,
            shrunk: Vec::new(),
            requests,
        })
    }

    /// The context, to look at its counters and its port.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Meets the other ranks and joins a communicator with them. It blocks until all are there.
    ///
    /// # Errors
    /// Those of the rendezvous ([`Error::Missing`], [`Error::Connect`], [`Error::Refused`], ...), [`Error::Invalid`] for an
    /// option, [`Error::Verbs`].
    pub fn join(&mut self, bootstrap: Bootstrap, options: &Options) -> Result<Communicator, Error> {
        let card = self.card(options)?;
        let rank = bootstrap.rank();
        let cards = match bootstrap.size() {
            1 => vec![card],
            _ => rendezvous(bootstrap, card)?,
        };
        let communicator = self.join_with(rank, &cards, options)?;
        if communicator.size > 1 && options.shared_memory != SharedMemory::Off {
            self.agree_on_memory(communicator, options)?;
        }
        if options.model.is_none() && communicator.size > 1 {
            let _ = self.measure(communicator)?;
        }
        Ok(communicator)
    }

    /// Measures what messages cost, with all ranks at the same time, and chooses algorithms by that from now on. It takes some
    /// milliseconds; [`join`](Collectives::join) has done it, unless [`Options::model`] was given.
    ///
    /// # Errors
    /// As [`wait`](Collectives::wait).
    pub fn measure(&mut self, communicator: Communicator) -> Result<Model, Error> {
        /// Of each, the shortest counts.
        const ROUNDS: usize = 4;
        const SHORT: usize = 8;
        let others = communicator.size.saturating_sub(1).max(1) as usize;
        // Whole elements, also in halves.
        let long = ((1 << 20) / others).clamp(32 << 10, 256 << 10) & !0xff;
        let room = self.room(long * (others + 1))?;
        let own = room.at((long * communicator.rank as usize) as u64);
        let near = room.at((SHORT * communicator.rank as usize) as u64);
        let shortest = |ranks: &mut Collectives, operation: &Operation, algorithm| -> Result<f64, Error> {
            let mut shortest = f64::INFINITY;
            for _ in 0..ROUNDS {
                let start = ranks.now();
                ranks.run_by(communicator, operation, algorithm)?;
                shortest = shortest.min(ranks.now().since(start).as_secs_f64());
            }
            Ok(shortest)
        };
        self.run_by(communicator, &Operation::barrier(), Algorithm::Direct)?;
        let short = Operation::all_gather(near, room, SHORT, DataType::U8);
        let latency = shortest(self, &short, Algorithm::Ring)? / others as f64;
        let at_once = shortest(self, &short, Algorithm::Direct)?;
        let overhead = (at_once - latency).max(latency / 16.0) / others as f64;
        let blocks = Operation::all_gather(own, room, long, DataType::U8);
        let byte =
            (shortest(self, &blocks, Algorithm::Ring)? / others as f64 - latency).max(1e-9) / long as f64;
        let half = (long / 2) as u32;
        let [a, b] = [0, half].map(|offset| Sge { mr: room.mr, offset: offset.into(), length: half });
        let sum = ferroce::driver::reduction::Reduction::new(
            DataType::F32,
            ferroce::driver::reduction::ReduceOp::Sum,
        );
        let mut reduced = f64::INFINITY;
        for _ in 0..ROUNDS {
            let start = self.now();
            self.computer.reduce(&mut self.context, sum, a, &[a, b])?;
            reduced = reduced.min(self.now().since(start).as_secs_f64() / f64::from(half));
        }
        let numbers = [latency, overhead, byte, reduced];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        self.write(room, 0, &bytes)?;
        let all = Operation::all_reduce(room, room, numbers.len(), DataType::F64, Reduction::Max);
        self.run_by(communicator, &all, Algorithm::Direct)?;
        let mut bytes = [0; 32];
        self.read(room, 0, &mut bytes)?;
        self.deregister(room)?;
        let mut worst = numbers;
        for (number, bytes) in worst.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *number = f64::from_ne_bytes(*bytes);
        }
        let model = Model::from_numbers(worst);
        if let Some(group) = self.groups.get_mut(communicator.handle) {
            group.set_model(model);
        }
        Ok(model)
    }

    /// Which algorithm an operation takes, what each would cost, and by which model.
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
    /// [`Error::Invalid`] for counts, roots and peers that do not fit; [`Error::InvalidHandle`].
    pub fn explain(&self, communicator: Communicator, operation: &Operation) -> Result<Explanation, Error> {
        let group =
            self.groups.get(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        group.explain(operation)
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

    /// What the other ranks must know of this one, to join a communicator without a [`Bootstrap`]: give all ranks the cards of
    /// all, by whatever means, and call [`join_with`](Collectives::join_with). A card is good for one communicator.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an option.
    pub fn card(&mut self, options: &Options) -> Result<Card, Error> {
        options.check()?;
        let (index, path_mtu) = gid_index(&self.context, options)?;
        let [high, low] = [(); 2].map(|()| u64::from(self.context.random_psn().value()));
        let host = options.host.unwrap_or_else(this_host);
        let board = self.board(options)?;
        Ok(Card {
            gid: self.context.port().gids[index].gid.0,
            qpn: U32::new(self.control.qpn.value()),
            qkey: U32::new(self.control.qkey),
            nonce: U64::new(high << 24 | low),
            host: host.to_be_bytes(),
            chunk_bytes: U32::new(options.chunk_bytes),
            eager_bytes: U32::new(options.eager_bytes),
            algorithm: U32::new(options.algorithm.map_or(0, |algorithm| algorithm as u32)),
            byte_order: Card::BYTE_ORDER,
            path_mtu: U32::new(path_mtu.bytes()),
            board_pid: U32::new(board.pid),
            board_fd: U32::new(board.fd),
            board_bytes: U32::new(board.length as u32),
            board_namespace: U64::new(board.namespace),
            board_nonce: U64::new(board.nonce),
        })
    }

    /// What ranks of this host open this process's board by; nothing if there is none.
    fn board(&mut self, options: &Options) -> Result<Ticket, Error> {
        if options.shared_memory == SharedMemory::Off || self.computer.device().is_some() {
            return Ok(Ticket::default());
        }
        match self.host.board(&mut self.context, self.pd) {
            Err(error) if options.shared_memory == SharedMemory::Auto => {
                warn!("no memory is shared with ranks of this host: {error}");
                Ok(Ticket::default())
            }
            board => board,
        }
    }

    /// The ranks find out whether all of them are on this host and have mapped each other's memory.
    fn agree_on_memory(&mut self, communicator: Communicator, options: &Options) -> Result<(), Error> {
        let group =
            self.groups.get(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        let id = group.id;
        let mapped = match group.boards() {
            Err(problem) => Err(Error::Shared { reason: problem.to_owned() }),
            Ok(boards) => {
                let Collectives { host, context, pd, .. } = self;
                let opened = boards.iter().try_for_each(|board| host.open(context, *pd, board));
                let full =
                    || Error::Shared { reason: "this process is in too many communicators".to_owned() };
                opened
                    .and_then(|()| Mapped::new(host, id, communicator.rank as usize, boards).ok_or_else(full))
            }
        };
        let room = self.room(1)?;
        self.write(room, 0, &[u8::from(mapped.is_ok())])?;
        let all = Operation::all_reduce(room, room, 1, DataType::U8, Reduction::Min);
        self.run_by(communicator, &all, Algorithm::Direct)?;
        let mut all = [0];
        self.read(room, 0, &mut all)?;
        self.deregister(room)?;
        let mapped = match (mapped, all) {
            (Ok(mapped), [1]) => Ok(mapped),
            (Ok(mapped), _) => {
                let Collectives { host, context, poller, .. } = self;
                mapped.free(host, context, || poller.now())?;
                Err(Error::Shared { reason: "another rank can't map what the others share".to_owned() })
            }
            (Err(error), _) => Err(error),
        };
        if let (Err(error), SharedMemory::Required) = (&mapped, options.shared_memory) {
            let reason = error.to_string();
            self.leave(communicator)?;
            return Err(Error::Shared { reason });
        }
        if let Err(error) = &mapped {
            info!(rank = communicator.rank, "{error}");
        }
        if let Some(group) = self.groups.get_mut(communicator.handle) {
            group.set_mapped(mapped.map_err(|_| "the ranks do not all share memory (see the log)"));
        }
        Ok(())
    }

    /// Joins a communicator as rank `rank`, whose ranks have these cards, in their order. It returns at once: ranks connect when
    /// an operation needs it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no or too many cards, a rank outside, a card that is not of this process, and for options that
    /// differ; [`Error::Verbs`].
    pub fn join_with(&mut self, rank: u32, cards: &[Card], options: &Options) -> Result<Communicator, Error> {
        options.check()?;
        let size = u32::try_from(cards.len()).unwrap_or(u32::MAX);
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(Error::invalid("number of cards", size, format!("1 to {MAX_SIZE}")));
        }
        let Some(own) = cards.get(rank as usize) else {
            return Err(Error::invalid(
                "rank",
                rank,
                format!("0 to {}, below the number of cards", size - 1),
            ));
        };
        if own.qpn.get() != self.control.qpn.value() {
            return Err(Error::invalid("card", format!("that of rank {rank}"), "the card of this process"));
        }
        for (peer, card) in (0..).zip(cards) {
            if let Some(difference) = own.difference(rank, card, peer) {
                return Err(Error::invalid("card", format!("that of rank {peer}"), difference));
            }
        }
        self.idle = options.idle;
        let port = gid_index(&self.context, options)?;
        let now = self.now();
        let group = Group::new(&mut self.process(now).0, rank, cards.to_vec(), options, port)?;
        Ok(Communicator { handle: self.groups.insert(group), rank, size })
    }

    /// Registers memory for operations; local, and no other rank needs to do the same at the same time. Other ranks may write
    /// it while an operation has it as output.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn register(&mut self, memory: Memory) -> Result<Buffer, Error> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = self.computer.register(&mut self.context, self.pd, memory, access)?;
        let buffer = Buffer { mr };
        self.buffers.push(buffer);
        Ok(buffer)
    }

    /// Allocates `bytes` zeros and registers them: memory that the ranks of this host reach without packets, or that of the device
    /// that reduces. It has no slices: use [`read`](Collectives::read) and [`write`](Collectives::write), or
    /// [`allocate_private`](Collectives::allocate_private), which costs ranks of one host a copy more.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Verbs`], [`Error::Gpu`].
    pub fn allocate(&mut self, bytes: usize) -> Result<Buffer, Error> {
        if self.computer.device().is_some() {
            return self.allocate_private(bytes);
        }
        match Host::allocate(bytes) {
            Ok((segment, memory)) => {
                let buffer = self.register(memory)?;
                self.host.keep(buffer.mr, segment);
                Ok(buffer)
            }
            // Such as a limit on the size of files.
            Err(error) => {
                warn!("{bytes} bytes of this process's own: {error}");
                self.allocate_private(bytes)
            }
        }
    }

    /// As [`allocate`](Collectives::allocate), memory of this process alone, which has slices ([`bytes`](Collectives::bytes)).
    ///
    /// # Errors
    /// As [`allocate`](Collectives::allocate).
    pub fn allocate_private(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let memory = allocate(self.computer.device(), bytes)?;
        self.register(memory)
    }

    /// Memory of the host, for operations of a communicator's own.
    fn room(&mut self, bytes: usize) -> Result<Buffer, Error> {
        self.register(allocate(None, bytes)?)
    }

    /// Ends a registration and gives the memory back.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and while an operation sends from it.
    pub fn deregister(&mut self, buffer: Buffer) -> Result<Memory, Error> {
        let Collectives { context, poller, groups, computer, .. } = self;
        // Of a communicator that has failed nobody asks for what the device was about.
        if groups.iter().any(|group| group.failure().is_some()) {
            computer.stop();
        }
        let memory = deregister(context, || poller.now(), buffer.mr)?;
        self.host.forget(buffer.mr);
        self.computer.forget(buffer.mr);
        self.buffers.retain(|other| *other != buffer);
        Ok(memory)
    }

    /// Copies bytes of a buffer to `to`: those from `offset` on. Works on every context and every kind of memory.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and for bytes outside it.
    pub fn read(&self, buffer: Buffer, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        Ok(self.context.read(buffer.mr, offset, to)?)
    }

    /// Copies `from` to the bytes of a buffer from `offset` on. Works on every context and every kind of memory.
    ///
    /// # Errors
    /// As [`read`](Collectives::read).
    pub fn write(&mut self, buffer: Buffer, offset: u64, from: &[u8]) -> Result<(), Error> {
        Ok(self.context.write(buffer.mr, offset, from)?)
    }

    /// The bytes of a buffer of owned memory, without a copy; not on an RNIC, which may write them at any time.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and for memory that has no slices: use
    /// [`read`](Collectives::read).
    pub fn bytes(&self, buffer: Buffer) -> Result<&[u8], Error> {
        Ok(self.context.bytes(buffer.mr)?)
    }

    /// As [`bytes`](Collectives::bytes), to write.
    ///
    /// # Errors
    /// As [`bytes`](Collectives::bytes).
    pub fn bytes_mut(&mut self, buffer: Buffer) -> Result<&mut [u8], Error> {
        Ok(self.context.bytes_mut(buffer.mr)?)
    }

    /// Bytes of a buffer of a GPU's memory, for kernels: `OpenCl::buffer` and `Cuda::pointer` name them.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here or is memory of the host, and for bytes outside it.
    pub fn piece(&self, buffer: Buffer, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        Ok(self.context.piece(buffer.mr, offset, len)?)
    }

    /// Begins an operation. Nothing is sent before the next [`poll`](Collectives::poll).
    ///
    /// # Errors
    /// [`Error::Invalid`] for counts, roots and buffers that do not fit; [`Error::Failed`] of a communicator that has failed;
    /// [`Error::InvalidHandle`].
    pub fn start(&mut self, communicator: Communicator, operation: &Operation) -> Result<Request, Error> {
        self.start_all(communicator, std::slice::from_ref(operation))
    }

    /// Begins several operations as one request, which has ended when all of them have. Operations of two ranks are begun so
    /// where each waits for the other.
    ///
    /// # Errors
    /// As [`start`](Collectives::start), of the first operation that is refused; those before it have begun, and the communicator
    /// is of no use any more if there are any.
    pub fn start_all(
        &mut self,
        communicator: Communicator,
        operations: &[Operation],
    ) -> Result<Request, Error> {
        self.start_by(communicator, operations, None, false)
    }

    /// As [`start_all`](Collectives::start_all), by an algorithm; an operation of the program or of the communicator's own.
    fn start_by(
        &mut self,
        communicator: Communicator,
        operations: &[Operation],
        forced: Option<Algorithm>,
        is_own: bool,
    ) -> Result<Request, Error> {
        let now = self.now();
        let mut first = None;
        for operation in operations {
            let buffers = [self.length(operation.input)?, self.length(operation.output)?];
            let (mut process, groups) = self.process(now);
            let group =
                groups.get_mut(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
            match group.start(&mut process, operation, buffers, forced, is_own) {
                Ok(id) => first = first.or(Some(id)),
                Err(error) => {
                    if first.is_some() {
                        group.fail(&process, Cause::Local { problem: error.to_string() });
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

    /// Bytes of a buffer, if there is one.
    fn length(&self, at: Option<At>) -> Result<u64, Error> {
        at.map_or(Ok(0), |at| Ok(self.context.remote(at.buffer.mr)?.length))
    }

    /// Begins an operation and waits for its end.
    ///
    /// # Errors
    /// As [`start`](Collectives::start) and [`wait`](Collectives::wait).
    pub fn run(&mut self, communicator: Communicator, operation: &Operation) -> Result<(), Error> {
        let request = self.start(communicator, operation)?;
        self.wait(request)
    }

    /// Polls once. Whether a request has ended; its handle is of no use any more then.
    ///
    /// # Errors
    /// [`Error::Failed`], which ends the request and the communicator: outputs hold anything then. [`Error::InvalidHandle`],
    /// [`Error::Verbs`].
    pub fn test(&mut self, request: Request) -> Result<bool, Error> {
        let now = self.now();
        self.poll(now)?;
        self.has_ended(request)
    }

    /// Whether a request has ended, without a poll.
    ///
    /// # Errors
    /// As [`test`](Collectives::test).
    pub fn has_ended(&mut self, request: Request) -> Result<bool, Error> {
        let pending = self.requests.get(request.0).ok_or(Error::InvalidHandle { what: "request" })?;
        let Some(group) = self.groups.get(pending.communicator) else {
            self.requests.remove(request.0);
            return Err(Error::InvalidHandle { what: "communicator" });
        };
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

    /// Polls until a request has ended.
    ///
    /// # Errors
    /// As [`test`](Collectives::test).
    pub fn wait(&mut self, request: Request) -> Result<(), Error> {
        loop {
            match self.has_ended(request) {
                Ok(false) => self.turn()?,
                Ok(true) => return Ok(()),
                Err(error) => {
                    self.tell_failures()?;
                    return Err(error);
                }
            }
        }
    }

    /// One turn at the time `now`: of the context, and of all operations. Returns whether anything has moved.
    ///
    /// # Errors
    /// [`Error::Verbs`] when the port is gone. What becomes of operations their requests tell.
    pub fn poll(&mut self, now: Nanos) -> Result<bool, Error> {
        let frames = self.context.poll(now)?;
        let moved = self.progress(now)?;
        if moved {
            // What is to be sent goes at once.
            self.context.poll(now)?;
        }
        Ok(moved || frames > 0)
    }

    /// Goes on with operations after a poll of the context.
    fn progress(&mut self, now: Nanos) -> Result<bool, Error> {
        let mut moved = false;
        let (mut process, groups) = self.process(now);
        while let Some(envelope) = process.control.next(process.context)? {
            match groups.iter_mut().find(|group| group.id == envelope.communicator) {
                Some(group) => group.hear(&mut process, envelope.from, envelope.message)?,
                None => {
                    debug!("a control message of communicator {:016x}, unknown here", envelope.communicator)
                }
            }
            moved = true;
        }
        for group in groups.iter_mut() {
            moved |= group.poll(&mut process)?;
        }
        Ok(moved)
    }

    /// One turn, and a rest if there was nothing to do.
    fn turn(&mut self) -> Result<(), Error> {
        /// Things other than frames are looked after so often.
        const LONGEST: Duration = Duration::from_millis(2);
        let now = self.now();
        if self.poll(now)? || self.next_look() == Nanos::ZERO {
            self.empty = 0;
            return Ok(());
        }
        self.empty = self.empty.saturating_add(1);
        match self.idle {
            Idle::Spin => std::hint::spin_loop(),
            Idle::Adaptive { spins, .. } if self.empty <= spins => std::hint::spin_loop(),
            Idle::Yield => std::thread::yield_now(),
            Idle::Adaptive { spins, yields } if self.empty <= spins.saturating_add(yields) => {
                std::thread::yield_now()
            }
            _ => self.rest(LONGEST)?,
        }
        Ok(())
    }

    /// When it wants to be polled though nothing comes; [`Nanos::ZERO`] is at once, [`Nanos::NEVER`] not at all.
    pub fn next_look(&self) -> Nanos {
        self.groups.iter().map(Group::next_look).min().unwrap_or(Nanos::NEVER)
    }

    /// Blocks until something may have come, something is due, or for `timeout`.
    ///
    /// # Errors
    /// [`Error::Verbs`] when the port is gone.
    pub fn rest(&mut self, timeout: Duration) -> Result<(), Error> {
        let now = self.now();
        // Whoever shows something from now on sends a packet too.
        self.host.sleep();
        let waited = match self.progress(now)? {
            true => Ok(()),
            false => {
                let quiet = self.context.quiet_for(now).unwrap_or(timeout);
                let until_look = self.next_look().since(now);
                self.context.wait(timeout.min(quiet).min(until_look))
            }
        };
        self.host.rise();
        Ok(waited?)
    }

    /// Polls until the others know which communicators have failed, for half a second at most.
    fn tell_failures(&mut self) -> Result<(), Error> {
        while self.groups.iter_mut().any(|group| group.is_telling()) {
            self.turn()?;
        }
        Ok(())
    }

    /// Ends a communicator on all ranks: what is under way fails there with `reason`.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn abort(&mut self, communicator: Communicator, reason: &str) -> Result<(), Error> {
        let now = self.now();
        let (process, groups) = self.process(now);
        let group =
            groups.get_mut(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        group.fail(&process, Cause::Local { problem: format!("aborted: {reason}") });
        self.tell_failures()
    }

    /// A communicator of some ranks of another one, in this order. All ranks of that call it, with the same ranks, and nothing is
    /// sent. `None` at ranks that are not among them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no ranks, a rank outside, and one that is named twice; [`Error::Failed`] of a communicator that has
    /// failed; [`Error::InvalidHandle`], [`Error::Verbs`].
    pub fn subset(
        &mut self,
        communicator: Communicator,
        ranks: &[u32],
    ) -> Result<Option<Communicator>, Error> {
        let is_outside = |rank: &&u32| **rank >= communicator.size;
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| &pair[0]);
        if let Some(rank) = ranks.iter().find(is_outside).or(twice) {
            let expected = format!("ranks below {}, each once", communicator.size);
            return Err(Error::invalid("rank of a subset", rank, expected));
        }
        if ranks.is_empty() {
            return Err(Error::invalid("ranks of a subset", "none", "at least one"));
        }
        let group =
            self.groups.get_mut(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        if let Some(cause) = group.failure() {
            let (rank, operation) = (communicator.rank, "subset".to_owned());
            return Err(Error::Failed { rank, operation, cause: cause.clone() });
        }
        self.child(communicator, ranks)
    }

    fn child(&mut self, communicator: Communicator, ranks: &[u32]) -> Result<Option<Communicator>, Error> {
        let group =
            self.groups.get_mut(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        let (options, model) = (group.options, group.model());
        let Some((rank, cards)) = group.cards_of(ranks) else { return Ok(None) };
        let port = gid_index(&self.context, &options)?;
        let now = self.now();
        let boards = self.groups.get(communicator.handle).map(|group| group.mapped_boards(ranks));
        let mut group = Group::new(&mut self.process(now).0, rank, cards, &options, port)?;
        group.set_model(model);
        match boards {
            Some(Ok(boards)) => {
                let full =
                    || Error::Shared { reason: "this process is in too many communicators".to_owned() };
                group.set_mapped(Ok(
                    Mapped::new(&self.host, group.id, rank as usize, boards).ok_or_else(full)?
                ));
            }
            Some(Err(problem)) => group.set_mapped(Err(problem)),
            None => {}
        }
        let size = ranks.len() as u32;
        Ok(Some(Communicator { handle: self.groups.insert(group), rank, size }))
    }

    /// Splits a communicator: the ranks that call it with the same `color` are one, ordered by `key` and then by their ranks.
    /// All ranks call it; it blocks. `None` at those without a color.
    ///
    /// # Errors
    /// As [`wait`](Collectives::wait).
    pub fn split(
        &mut self,
        communicator: Communicator,
        color: Option<u32>,
        key: i32,
    ) -> Result<Option<Communicator>, Error> {
        const EACH: usize = 12;
        let room = self.room(EACH * communicator.size as usize)?;
        let own = (EACH * communicator.rank as usize) as u64;
        let words = [u32::from(color.is_some()), color.unwrap_or(0), key as u32];
        self.write(room, own, &words.map(u32::to_ne_bytes).concat())?;
        let rows = Operation::all_gather(room.at(own), room, EACH, DataType::U8);
        let told = self.run_by(communicator, &rows, Algorithm::Direct);
        let mut bytes = vec![0; EACH * communicator.size as usize];
        self.read(room, 0, &mut bytes)?;
        self.deregister(room)?;
        told?;
        let rows = bytes.as_chunks::<EACH>().0.iter().zip(0..).map(|(row, rank): (_, u32)| {
            let word = |at: usize| u32::from_ne_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
            ((word(0) == 1).then(|| word(4)), word(8) as i32, rank)
        });
        let mut members: Vec<(i32, u32)> =
            rows.filter(|(of, ..)| *of == color).map(|(_, key, rank)| (key, rank)).collect();
        members.sort_unstable();
        let ranks: Vec<u32> = members.into_iter().map(|(_, rank)| rank).collect();
        match color {
            // The others make one communicator less of it, and count it.
            None => self.child(communicator, &[u32::MAX]),
            Some(_) => self.child(communicator, &ranks),
        }
    }

    /// Goes on without the ranks that are gone, after a communicator has failed: those that are left call it, agree on who is
    /// gone, and get a communicator of theirs, in their order. It blocks until all that answer have called it; a rank that does not
    /// answer for [`Options::retry_budget`] is gone. The old communicator is of no use any more.
    ///
    /// Two halves of a network that do not hear each other go on as two communicators.
    ///
    /// # Errors
    /// [`Error::Failed`] if the others hold this rank for gone; [`Error::Invalid`] for more than 1280 ranks;
    /// [`Error::InvalidHandle`], [`Error::Verbs`].
    pub fn shrink(&mut self, communicator: Communicator) -> Result<Communicator, Error> {
        let now = self.now();
        let group =
            self.groups.get_mut(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        group.begin_to_shrink(now)?;
        let gone = loop {
            match self.groups.get(communicator.handle).and_then(Group::agreed) {
                Some(gone) => break gone.clone(),
                None => self.turn()?,
            }
        };
        let ranks: Vec<u32> = (0..communicator.size).filter(|rank| !gone.has(*rank)).collect();
        let child = self.child(communicator, &ranks)?;
        let Collectives { host, context, poller, groups, shrunk, .. } = self;
        if let Some(group) = groups.get_mut(communicator.handle) {
            group.disconnect(host, context, || poller.now())?;
        }
        match child {
            Some(child) => {
                shrunk.push((communicator.handle, child.handle));
                Ok(child)
            }
            None => {
                let problem = "the other ranks hold this one for gone".to_owned();
                let (rank, operation) = (communicator.rank, "shrink".to_owned());
                Err(Error::Failed { rank, operation, cause: Cause::Local { problem } })
            }
        }
    }

    /// Leaves a communicator: polls until all ranks have called it, so that nobody's last packet goes unanswered, and frees what
    /// it has. A communicator that has failed is left at once.
    ///
    /// # Errors
    /// [`Error::Failed`] if a rank has gone without it; everything is freed then too. [`Error::InvalidHandle`].
    pub fn leave(&mut self, communicator: Communicator) -> Result<(), Error> {
        let group =
            self.groups.get(communicator.handle).ok_or(Error::InvalidHandle { what: "communicator" })?;
        let has_failed = group.failure().is_some();
        let left =
            if has_failed || communicator.size == 1 { Ok(()) } else { self.say_farewell(communicator) };
        let told = self.tell_failures();
        if has_failed || left.is_err() {
            self.computer.stop();
        }
        let mut handles = vec![communicator.handle];
        while let Some(handle) = handles.pop() {
            // With it go those that it was made of by shrinking.
            let parents = self.shrunk.extract_if(.., |(_, child)| *child == handle).map(|(parent, _)| parent);
            handles.extend(parents);
            if let Some(group) = self.groups.remove(handle) {
                let Collectives { host, context, poller, .. } = self;
                group.destroy(host, context, || poller.now())?;
            }
        }
        left.and(told)
    }

    /// A barrier, whose last messages are acknowledged on both sides.
    fn say_farewell(&mut self, communicator: Communicator) -> Result<(), Error> {
        if let Some(group) = self.groups.get_mut(communicator.handle) {
            group.begin_to_leave();
        }
        // By packets: what a rank shows is gone when it has left.
        self.run_by(communicator, &Operation::barrier(), Algorithm::Direct)?;
        while let Some(group) = self.groups.get_mut(communicator.handle) {
            if group.has_left() {
                group.acknowledge(&mut self.context)?;
                let now = self.now();
                self.context.poll(now)?;
                break;
            }
            self.turn()?;
        }
        Ok(())
    }

    /// Leaves all communicators and gives the context back. Buffers that are registered still are freed.
    ///
    /// # Errors
    /// As [`leave`](Collectives::leave), of the first that fails; [`Error::Verbs`].
    pub fn finish(mut self) -> Result<Context, Error> {
        let communicators: Vec<Communicator> = self
            .groups
            .handles()
            .filter_map(|handle| {
                let group = self.groups.get(handle)?;
                Some(Communicator { handle, rank: group.rank, size: group.size() })
            })
            .collect();
        let mut first = Ok(());
        for communicator in communicators {
            if let Err(error) = self.leave(communicator) {
                warn!(%error, "leaving a communicator");
                first = first.and(Err(error));
            }
        }
        let freed = self.free();
        // What comes of an error before is no news.
        first?;
        freed
    }

    fn free(self) -> Result<Context, Error> {
        let Collectives { mut context, mut poller, control, buffers, pd, host, .. } = self;
        for buffer in buffers {
            deregister(&mut context, || poller.now(), buffer.mr)?;
        }
        host.free(&mut context, || poller.now())?;
        control.destroy(&mut context, || poller.now())?;
        context.dealloc_pd(pd)?;
        Ok(context)
    }

    /// The time by which it works.
    pub(crate) fn now(&mut self) -> Nanos {
        self.poller.now().max(self.context.now())
    }

    fn process(&mut self, now: Nanos) -> (Process<'_>, &mut Slab<Group>) {
        let Collectives { context, control, computer, host, pd, groups, .. } = self;
        (Process { context, control, computer, host, pd: *pd, now }, groups)
    }
}

/// What the kernel has drawn when it started.
fn this_host() -> u128 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(id.trim().replace('-', "").as_str(), 16).unwrap_or(0)
}
