use std::sync::Arc;
use std::time::Duration;

use ferroce::driver::Piece;
use ferroce::driver::gpu::Device;
use ferroce::{Access, Context, Memory, Mr, Pd, Poller};
use tracing::{debug, warn};

use crate::all_reduce::{AllReduce, spread_failure};
use crate::rendezvous::{Point, Session, rendezvous};
use crate::ring::{ABORT_TIME, Ring, allocate, deregister, register};
use crate::schedule_old::Schedule;
use crate::{Bootstrap, DataType, Error, Options, ReduceOp};

/// Memory that is registered with a communicator. It is named by this handle until
/// [`Communicator::deregister`] gives the memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) mr: Mr,
    pub(crate) place: Place,
}

/// Where elements are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// Where they are: nobody but this context reaches the bytes.
    Here,
    /// On the communicator's device, whose memory they are in.
    Device,
    /// In copies of them, for a card, a device or another thread may write them at any time.
    Copies,
}

/// One rank's part in a group of ranks that compute together.
///
/// It owns the context. Collectives are called by all ranks in the same order with the same
/// arguments, and return when this rank is done. The stack answers peers only while it is polled:
/// a rank that computes for long between two collectives calls
/// [`progress`](Communicator::progress) now and then, at least once in
/// [`Options::retry_budget`].
pub struct Communicator {
    context: Context,
    poller: Poller,
    rank: u32,
    size: u32,
    pd: Pd,
    buffers: Vec<Buffer>,
    /// One element, for barriers.
    token: Buffer,
    /// What reduces, if not the processor.
    device: Option<Arc<dyn Device>>,
    /// `None` for a rank alone.
    links: Option<Links>,
    /// Calls so far.
    calls: u32,
    /// Why the communicator is of no use any more.
    failed: Option<String>,
}

struct Links {
    ring: Ring,
    session: Session,
}

impl Communicator {
    /// Meets the other ranks and connects to the two neighbours on the ring. All ranks return from
    /// it at about the same time.
    ///
    /// # Errors
    /// Those of the rendezvous ([`Error::Missing`], [`Error::Connect`], [`Error::Refused`], ...),
    /// [`Error::Invalid`] for an option, [`Error::Verbs`].
    pub fn new(context: Context, bootstrap: Bootstrap, options: &Options) -> Result<Communicator, Error> {
        Communicator::reducing(context, bootstrap, options, None)
    }

    /// As [`new`](Communicator::new), with a GPU that reduces. Its memory is what
    /// [`allocate`](Communicator::allocate) gives; chunks arrive in memory of it too, and are reduced there, with the bits of the
    /// processor ([`reduce`](crate::reduce)). Buffers of other memory, also of another handle of the device, work as well, reduced by
    /// the processor in copies. [`piece`](Communicator::piece) names a buffer for kernels.
    ///
    /// Kernels that write a buffer have ended (`clFinish`, `cudaStreamSynchronize`, or an event) before a call with it, and those that
    /// read it begin behind it: the calls wait for no stream of the program's.
    ///
    /// Other ranks may have another device, or none.
    ///
    /// # Errors
    /// As [`new`](Communicator::new); [`Error::Gpu`].
    pub fn on_device(
        context: Context,
        bootstrap: Bootstrap,
        options: &Options,
        device: Arc<dyn Device>,
    ) -> Result<Communicator, Error> {
        Communicator::reducing(context, bootstrap, options, Some(device))
    }

    fn reducing(
        mut context: Context,
        bootstrap: Bootstrap,
        options: &Options,
        device: Option<Arc<dyn Device>>,
    ) -> Result<Communicator, Error> {
        options.check()?;
        let (rank, size, timeout) = (bootstrap.rank(), bootstrap.size(), bootstrap.timeout);
        let pd = context.alloc_pd()?;
        let memory = allocate(device.as_deref(), DataType::I32.size())?;
        let token = register_buffer(&mut context, pd, memory, device.as_ref())?;
        let mut links = None;
        if size > 1 {
            let mut ring = Ring::new(&mut context, pd, rank, size, options, device.as_deref())?;
            let (endpoints, mut session) = rendezvous(bootstrap, ring.endpoint(&context)?)?;
            ring.connect(&mut context, &endpoints)?;
            // A packet that comes before its queue pair is connected costs its sender a timeout.
            session.sync(Point::Ready, timeout, || {
                std::thread::sleep(PAUSE);
                Ok(())
            })?;
            links = Some(Links { ring, session });
        }
        let poller = Poller::idling(options.idle);
        let (buffers, calls, failed) = (Vec::new(), 0, None);
        Ok(Communicator { context, poller, rank, size, pd, buffers, token, device, links, calls, failed })
    }

    /// This rank, 0 to `size` − 1.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The context, to look at its counters and its port.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Registers memory for collectives; local, and no other rank needs to do the same at the same
    /// time. The neighbour on the ring may write it from now on.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn register(&mut self, memory: Memory) -> Result<Buffer, Error> {
        let buffer = register_buffer(&mut self.context, self.pd, memory, self.device.as_ref())?;
        self.buffers.push(buffer);
        Ok(buffer)
    }

    /// Allocates `bytes` zeros and registers them: memory of the host, or of the device that reduces.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Verbs`], [`Error::Gpu`].
    pub fn allocate(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let memory = allocate(self.device.as_deref(), bytes)?;
        self.register(memory)
    }

    /// Ends a registration and gives the memory back.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer of another communicator, or one deregistered before.
    pub fn deregister(&mut self, buffer: Buffer) -> Result<Memory, Error> {
        let memory = deregister(&mut self.context, &mut self.poller, buffer.mr)?;
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
    /// As [`read`](Communicator::read).
    pub fn write(&mut self, buffer: Buffer, offset: u64, from: &[u8]) -> Result<(), Error> {
        Ok(self.context.write(buffer.mr, offset, from)?)
    }

    /// The bytes of a buffer of owned memory, without a copy; not on an RNIC, which may write them at any time.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and for memory that has no slices: use
    /// [`read`](Communicator::read).
    pub fn bytes(&self, buffer: Buffer) -> Result<&[u8], Error> {
        Ok(self.context.bytes(buffer.mr)?)
    }

    /// As [`bytes`](Communicator::bytes), to write.
    ///
    /// # Errors
    /// As [`bytes`](Communicator::bytes).
    pub fn bytes_mut(&mut self, buffer: Buffer) -> Result<&mut [u8], Error> {
        Ok(self.context.bytes_mut(buffer.mr)?)
    }

    /// Bytes of a buffer of a GPU's memory, for kernels: `OpenCl::buffer` and `Cuda::pointer` name them. A kernel has ended before a
    /// call with the buffer, and begins behind it.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here or is memory of the host, and for bytes outside it.
    pub fn piece(&self, buffer: Buffer, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        Ok(self.context.piece(buffer.mr, offset, len)?)
    }

    /// Replaces the first `count` elements of the buffer, on every rank, by the reduction of those
    /// of all ranks. The same bits on every rank.
    ///
    /// A count of zero returns at once and sends nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the buffer holds fewer than `count` elements. [`Error::Mismatch`],
    /// [`Error::Neighbour`], [`Error::Aborted`] and [`Error::Stalled`] end the communicator: the
    /// buffer holds anything then, and later calls say [`Error::Failed`].
    pub fn all_reduce(
        &mut self,
        buffer: Buffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
    ) -> Result<(), Error> {
        let length = self.context.remote(buffer.mr)?.length as usize;
        if count > length / data_type.size() {
            let expected = format!("at most {} {data_type} in {length} bytes", length / data_type.size());
            return Err(Error::invalid("count", count, expected));
        }
        self.check_alive()?;
        let Some(Links { ring, .. }) = &mut self.links else { return Ok(()) };
        if count == 0 {
            return Ok(());
        }
        let chunk = ring.options.chunk_bytes as usize / data_type.size();
        let schedule = Schedule::new(self.rank as usize, self.size as usize, count, chunk);
        let call = AllReduce::new(&self.context, self.calls, buffer, count, data_type, op, schedule)?;
        self.calls = self.calls.wrapping_add(1);
        let result = call.run(&mut self.context, &mut self.poller, ring);
        self.note(result)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Communicator::all_reduce).
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.all_reduce(self.token, 1, DataType::I32, ReduceOp::Sum)
    }

    /// Polls the context once, without blocking, so that peers get their answers.
    ///
    /// # Errors
    /// [`Error::Verbs`] when the port is gone; failed connections, as
    /// [`all_reduce`](Communicator::all_reduce).
    pub fn progress(&mut self) -> Result<(), Error> {
        self.check_alive()?;
        let Some(Links { ring, .. }) = &mut self.links else { return Ok(()) };
        let result = progress(&mut self.context, &mut self.poller, ring);
        self.note(result)
    }

    /// Takes leave of the other ranks and gives the context back. It polls until all ranks have
    /// called it, so that nobody's last packet goes unanswered. Buffers that are registered still
    /// are freed.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if a rank went away without it, or did not call it in
    /// [`Options::stall_timeout`]; [`Error::Verbs`].
    pub fn finish(mut self) -> Result<Context, Error> {
        if let Some(Links { mut ring, mut session }) = self.links.take() {
            let Communicator { context, poller, failed, .. } = &mut self;
            let timeout = ring.options.stall_timeout;
            let left = session.sync(Point::Leave, timeout, || {
                let frames = context.poll(poller.now())?;
                if failed.is_none() {
                    ring.take_completions(context)?;
                }
                if frames == 0 {
                    context.wait(PAUSE)?;
                }
                Ok(())
            });
            match (left, failed) {
                (Ok(()), _) => {}
                (Err(error), None) => return Err(error),
                // The others may be gone; that the communicator failed was said before.
                (Err(error), Some(_)) => warn!(rank = self.rank, %error, "leaving a failed communicator"),
            }
            ring.destroy(&mut self.context, &mut self.poller)?;
        }
        for buffer in self.buffers.iter().chain([&self.token]) {
            deregister(&mut self.context, &mut self.poller, buffer.mr)?;
        }
        self.context.dealloc_pd(self.pd)?;
        Ok(self.context)
    }

    fn check_alive(&self) -> Result<(), Error> {
        match &self.failed {
            None => Ok(()),
            Some(reason) => Err(Error::Failed { rank: self.rank, reason: reason.clone() }),
        }
    }

    /// After an error: nothing goes any more, and the neighbours are told.
    fn note(&mut self, result: Result<(), Error>) -> Result<(), Error> {
        if let (Err(error), Some(Links { ring, .. })) = (&result, &mut self.links) {
            self.failed = Some(error.to_string());
            ring.end_reductions();
            if let Err(second) = spread_failure(&mut self.context, &mut self.poller, ring, error, ABORT_TIME)
            {
                debug!(rank = self.rank, %second, "the neighbours were not told");
            }
        }
        result
    }
}

/// Turns of the engine in one call of `progress`, at most.
const PROGRESS_TURNS: usize = 64;
/// Between two looks at something other than frames.
const PAUSE: Duration = Duration::from_millis(1);

fn progress(context: &mut Context, poller: &mut Poller, ring: &mut Ring) -> Result<(), Error> {
    for _ in 0..PROGRESS_TURNS {
        let frames = context.poll(poller.now())?;
        ring.take_completions(context)?;
        if frames == 0 {
            break;
        }
    }
    Ok(())
}

fn register_buffer(
    context: &mut Context,
    pd: Pd,
    memory: Memory,
    device: Option<&Arc<dyn Device>>,
) -> Result<Buffer, Error> {
    let is_devices = memory.device().zip(device).is_some_and(|(its, reducing)| Arc::ptr_eq(its, reducing));
    let mr = register(context, pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let place = match device {
        Some(_) if is_devices => Place::Device,
        // Chunks arrive in memory without slices.
        Some(_) => Place::Copies,
        None if context.bytes(mr).is_ok() => Place::Here,
        None => Place::Copies,
    };
    Ok(Buffer { mr, place })
}
