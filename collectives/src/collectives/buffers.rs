//! The buffers of operations.

use super::*;
use crate::memory::PATIENCE;

impl Collectives {
    /// Registers memory for operations. This is local: other ranks need not call it too. Other ranks may write the memory while
    /// it is the output of an operation.
    ///
    /// # Errors
    /// [`Error::Verbs`]; [`Error::Invalid`] for owned memory if there are several [rails](Collectives::add_rail).
    pub fn register(&mut self, memory: Memory) -> Result<Buffer, Error> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = self.computer.register(&mut self.ports, memory, access)?;
        let buffer = Buffer { mr };
        self.buffers.push(buffer);
        Ok(buffer)
    }

    /// Allocates and registers `bytes` zeros: memory that the ranks of this host access without packets, or memory of the device
    /// that reduces. It has no slices: use [`read`](Collectives::read) and [`write`](Collectives::write), or
    /// [`allocate_private`](Collectives::allocate_private), which costs ranks of one host one more copy.
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
                warn!("allocating {bytes} bytes in this process: {error}");
                self.allocate_private(bytes)
            }
        }
    }

    /// As [`allocate`](Collectives::allocate), but private memory of this process, which has slices
    /// ([`bytes`](Collectives::bytes)) unless there are several [rails](Collectives::add_rail).
    ///
    /// # Errors
    /// As [`allocate`](Collectives::allocate).
    pub fn allocate_private(&mut self, bytes: usize) -> Result<Buffer, Error> {
        let memory = self.ports.allocate(self.computer.device(), bytes)?;
        self.register(memory)
    }

    /// Ends a registration and returns the memory.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and while an operation sends from it; [`Error::Invalid`] while
    /// one uses it as memory shared by ranks; [`Error::Gpu`] if a device hangs.
    pub fn deregister(&mut self, buffer: Buffer) -> Result<Memory, Error> {
        if self.groups.iter().any(|group| group.is_about(buffer.mr)) {
            let expected = "one that no outstanding operation uses: wait for the operation first";
            return Err(Error::invalid("buffer", format!("{:?}", buffer.mr), expected));
        }
        // In a communicator that has failed, outstanding work of the device is not awaited elsewhere.
        if self.groups.iter().any(|group| group.failure().is_some()) {
            self.wait_for_device()?;
        }
        let Collectives { ports, poller, computer, .. } = self;
        let memory = computer.deregister(ports, || poller.now(), buffer.mr)?;
        self.host.forget(buffer.mr);
        self.buffers.retain(|other| *other != buffer);
        Ok(memory)
    }

    /// Polls until the device has completed all computations started so far.
    fn wait_for_device(&mut self) -> Result<(), Error> {
        let (start, newest) = (self.now(), self.computer.newest());
        while !self.computer.is_past(newest) {
            if self.now().since(start) >= PATIENCE {
                return Err(self.computer.hangs(PATIENCE));
            }
            self.turn()?;
        }
        Ok(())
    }

    /// Copies bytes of a buffer to `to`: those from `offset` on. Works on every context and every kind of memory.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and for bytes outside it.
    pub fn read(&self, buffer: Buffer, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        Ok(self.ports.read(buffer.mr, offset, to)?)
    }

    /// Copies `from` to the bytes of a buffer from `offset` on. Works on every context and every kind of memory.
    ///
    /// # Errors
    /// As [`read`](Collectives::read).
    pub fn write(&mut self, buffer: Buffer, offset: u64, from: &[u8]) -> Result<(), Error> {
        Ok(self.ports.write(buffer.mr, offset, from)?)
    }

    /// The bytes of a buffer of owned memory, without a copy; not on an RNIC, which may write them at any time.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here, and for memory without slices: use [`read`](Collectives::read).
    pub fn bytes(&self, buffer: Buffer) -> Result<&[u8], Error> {
        Ok(self.ports.bytes(buffer.mr)?)
    }

    /// As [`bytes`](Collectives::bytes), mutable.
    ///
    /// # Errors
    /// As [`bytes`](Collectives::bytes).
    pub fn bytes_mut(&mut self, buffer: Buffer) -> Result<&mut [u8], Error> {
        Ok(self.ports.bytes_mut(buffer.mr)?)
    }

    /// Bytes of a buffer in GPU memory, for kernels: `OpenCl::buffer` and `Cuda::pointer` return the kernel argument.
    ///
    /// # Errors
    /// [`Error::Verbs`] for a buffer that is not registered here or is host memory, and for bytes outside it.
    pub fn piece(&self, buffer: Buffer, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        Ok(self.ports.piece(buffer.mr, offset, len)?)
    }

    /// Bytes of a buffer, if there is one.
    pub(super) fn length(&self, at: Option<At>) -> Result<u64, Error> {
        at.map_or(Ok(0), |at| Ok(self.ports.remote(at.buffer.mr)?.length))
    }
}
