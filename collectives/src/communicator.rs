use ferroce::{Access, Context, Memory, Mr, Pd};

use crate::{Bootstrap, DataType, Error, Options, ReduceOp};

/// Memory that is registered with a communicator. It is named by this handle until
/// [`Communicator::deregister`] gives the memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer {
    pub(crate) mr: Mr,
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
    rank: u32,
    size: u32,
    pd: Pd,
}

impl Communicator {
    /// Meets the other ranks and connects to the two neighbours on the ring. All ranks return from
    /// it at about the same time.
    ///
    /// # Errors
    /// Those of the rendezvous ([`Error::Missing`], [`Error::Connect`], [`Error::Refused`], ...),
    /// [`Error::Invalid`] for an option, [`Error::Disagreement`], [`Error::Verbs`].
    pub fn new(mut context: Context, bootstrap: Bootstrap, options: &Options) -> Result<Communicator, Error> {
        options.check()?;
        let (rank, size) = (bootstrap.rank(), bootstrap.size());
        if size > 1 {
            return Err(Error::invalid("size", size, "1: the ring is not built yet"));
        }
        let pd = context.alloc_pd()?;
        Ok(Communicator { context, rank, size, pd })
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
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = self.context.register(self.pd, memory, access).map_err(ferroce::Error::from)?;
        Ok(Buffer { mr })
    }

    /// Allocates `bytes` zeros and registers them.
    ///
    /// # Errors
    /// [`Error::Memory`], [`Error::Verbs`].
    pub fn allocate(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let memory = Memory::zeroed(bytes).map_err(|source| Error::Memory { bytes, source })?;
        self.register(memory)
    }

    /// Ends a registration and gives the memory back.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer of another communicator, or one deregistered before.
    pub fn deregister(&mut self, buffer: Buffer) -> Result<Memory, Error> {
        Ok(self.context.deregister(buffer.mr)?)
    }

    /// The bytes of a buffer.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here.
    pub fn bytes(&self, buffer: Buffer) -> Result<&[u8], Error> {
        Ok(self.context.bytes(buffer.mr)?)
    }

    /// As [`bytes`](Communicator::bytes), to write.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here.
    pub fn bytes_mut(&mut self, buffer: Buffer) -> Result<&mut [u8], Error> {
        Ok(self.context.bytes_mut(buffer.mr)?)
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
        let length = self.bytes(buffer)?.len();
        if count > length / data_type.size() {
            let expected = format!("at most {} {data_type} in {length} bytes", length / data_type.size());
            return Err(Error::invalid("count", count, expected));
        }
        let _ = op;
        Ok(())
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Communicator::all_reduce).
    pub fn barrier(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Polls the context once, without blocking, so that peers get their answers.
    ///
    /// # Errors
    /// [`Error::Verbs`] when the port is gone; failed connections, as
    /// [`all_reduce`](Communicator::all_reduce).
    pub fn progress(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Takes leave of the other ranks and gives the context back. It polls until all ranks have
    /// called it, so that nobody's last packet goes unanswered.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if a rank went away without it; [`Error::Verbs`].
    pub fn finish(self) -> Result<Context, Error> {
        Ok(self.context)
    }
}
