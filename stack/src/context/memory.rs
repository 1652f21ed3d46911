//! Protection domains, memory regions and memory windows.

use std::sync::atomic::AtomicU64;

use arrayvec::ArrayVec;
use ferroce_driver::reduction::{Computation, DataType, MAX_SPANS, Part, ReduceOp, Reduction};
use ferroce_driver::{Memory, Piece};

use super::Context;
use crate::backend::dispatch;
use crate::verbs::{Access, Error, Mr, Mw, Pd, RegisterError, RemoteMemory, Sge};

impl Context {
    /// Allocates a protection domain: queue pairs reach only memory of their own. Most programs need one.
    ///
    /// # Errors
    /// [`Error::Exhausted`]: raise [`Config::max_pds`](crate::Config::max_pds).
    pub fn alloc_pd(&mut self) -> Result<Pd, Error> {
        dispatch!(&mut self.backend, alloc_pd())
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// [`Error::Busy`] while anything belongs to it.
    pub fn dealloc_pd(&mut self, pd: Pd) -> Result<(), Error> {
        dispatch!(&mut self.backend, dealloc_pd(pd))
    }

    /// Registers memory of any [kind](crate::MemoryKind): local work requests may name it, and peers as far as `access`
    /// goes. The peers' addresses start at 0. [`manual::memory`](crate::manual::memory) says who may touch it when.
    ///
    /// ```
    /// # use ferroce::*;
    /// let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// let pd = context.alloc_pd()?;
    /// let mr = context.register(pd, Memory::copy_of(b"hello")?, Access::REMOTE_READ)?;
    /// let memory = context.remote(mr)?; // for the peer: address, key and length
    /// assert_eq!((memory.addr, memory.length), (0, 5));
    /// let block = context.deregister(mr)?; // the key is of no use any more
    /// assert_eq!(block.bytes()?, b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The handle is the context's from now on:
    ///
    /// ```compile_fail,E0382
    /// # use ferroce::*;
    /// # fn main() -> Result<(), Error> {
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let pd = context.alloc_pd()?;
    /// let mut memory = Memory::zeroed(64)?;
    /// let mr = context.register(pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    /// memory.write(0, b"late"); // of shared memory there are more handles
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RegisterError`], with the memory: [`Error::Access`] for rights that do not go together (peers that write need
    /// [`LOCAL_WRITE`](Access::LOCAL_WRITE)), [`Error::Exhausted`] ([`Config::max_mrs`](crate::Config::max_mrs)),
    /// [`Error::InvalidHandle`]; with an RNIC what the card says, mostly too little memory that may be locked (`ulimit -l`), or
    /// that it does not take memory of a device ([`manual::memory`](crate::manual::memory)).
    pub fn register(&mut self, pd: Pd, memory: Memory, access: Access) -> Result<Mr, RegisterError> {
        self.register_at(pd, memory, access, 0)
    }

    /// As [`register`](Context::register), with the address `iova` for its first byte.
    ///
    /// # Errors
    /// As [`register`](Context::register); [`Error::Invalid`] for an `iova` from which the region would pass 2⁶⁴, or one that
    /// is not congruent to the memory's address modulo 8 where peers may do atomics.
    pub fn register_at(
        &mut self,
        pd: Pd,
        memory: Memory,
        access: Access,
        iova: u64,
    ) -> Result<Mr, RegisterError> {
        dispatch!(&mut self.backend, register_at(pd, memory, access, iova))
    }

    /// Ends a registration and gives the memory back. Peers that go on using the key are refused
    /// from now on, in the middle of a READ too.
    ///
    /// # Errors
    /// [`Error::Busy`] while a posted work request names it, a window is bound to it, the port still sends from it
    /// (DPDK sends long payloads from where they are), or its device copies: poll and take completions, invalidate the window, or
    /// destroy the queue pair, and try again. Where only the port or copies hold it up, peers are refused already. (A posted bind does not count: it ends as [`MwBindErr`](crate::WcStatus::MwBindErr).)
    pub fn deregister(&mut self, mr: Mr) -> Result<Memory, Error> {
        dispatch!(&mut self.backend, deregister(mr))
    }

    /// Replaces the memory of a region by other memory of the same length, and returns the old memory. Registration,
    /// address and keys stay as they are, and peers reach the new bytes from now on. No bytes are copied. The new memory may
    /// be of another [kind](crate::MemoryKind): after shared or foreign memory is put into a region,
    /// [`bytes`](Context::bytes) fails, and [`read`](Context::read) and [`write`](Context::write) work.
    /// [`manual::memory`](crate::manual::memory) has an example.
    ///
    /// # Errors
    /// [`Error::Busy`] while a posted work request names the region or the port still sends from it,
    /// [`Error::Invalid`] for another length and for an address that [`register_at`](Context::register_at) would refuse,
    /// [`Error::InvalidHandle`]; with the memory.
    pub fn exchange(&mut self, mr: Mr, memory: Memory) -> Result<Memory, RegisterError> {
        dispatch!(&mut self.backend, exchange(mr, memory))
    }

    /// What to tell a peer about a region, as text or bytes; [`RemoteMemory::at`] is the address of one byte there.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn remote(&self, mr: Mr) -> Result<RemoteMemory, Error> {
        dispatch!(&self.backend, remote(mr))
    }

    /// Allocates a memory window of type 2B, unbound: [`SendOp::BindMw`](crate::SendOp::BindMw)
    /// gives it a range and a key.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ferroce::*;
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    /// # let own = context.endpoint(qp, 0)?;
    /// # context.handshake(qp, &own, &own)?;
    /// // Opens bytes 100 to 163 of a region to the peer of a connected queue pair.
    /// let mr = context.register(pd, Memory::zeroed(4096)?, Access::MW_BIND)?;
    /// let mw = context.alloc_mw(pd)?;
    /// let op = SendOp::BindMw { mw, mr, offset: 100, length: 64, access: Access::REMOTE_READ };
    /// let (data, flags) = (Data::Sges(&[]), SendFlags::SIGNALED);
    /// context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags })?;
    /// context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
    /// let window = context.remote_window(mw)?.expect("it is bound"); // for the peer
    /// assert_eq!(window.length, 64);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::Exhausted`].
    pub fn alloc_mw(&mut self, pd: Pd) -> Result<Mw, Error> {
        dispatch!(&mut self.backend, alloc_mw(pd))
    }

    /// Frees a memory window, bound or not. Peers that go on using its key are refused from now on.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn dealloc_mw(&mut self, mw: Mw) -> Result<(), Error> {
        dispatch!(&mut self.backend, dealloc_mw(mw))
    }

    /// What to tell a peer about a window; `None` while it is not bound. A bind has drawn the key
    /// by the time it completes, and each draws another.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn remote_window(&self, mw: Mw) -> Result<Option<RemoteMemory>, Error> {
        dispatch!(&self.backend, remote_window(mw))
    }

    /// Copies bytes of a region to `to`: those from `offset` on, which counts from the region's first byte. Works on
    /// every kind of memory; a GPU's is copied by the GPU, which this waits for. Where somebody else writes meanwhile, some are old
    /// and some are new.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for bytes outside the region, or if the GPU refuses.
    pub fn read(&self, mr: Mr, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        dispatch!(&self.backend, read(mr, offset, to))
    }

    /// Copies `from` to the bytes of a region from `offset` on. Works on every kind of memory. The last bytes are stored
    /// last, with release, but of a GPU's memory, which the GPU writes and this waits for.
    ///
    /// # Errors
    /// As [`read`](Context::read).
    pub fn write(&mut self, mr: Mr, offset: u64, from: &[u8]) -> Result<(), Error> {
        dispatch!(&mut self.backend, write(mr, offset, from))
    }

    /// The word of a region at `offset`, in this machine's byte order, with acquire. Works on every kind of memory.
    ///
    /// # Errors
    /// As [`read`](Context::read); [`Error::Region`] too if its address is no multiple of 8, but for owned
    /// memory and for a GPU's.
    pub fn load_u64(&self, mr: Mr, offset: u64) -> Result<u64, Error> {
        dispatch!(&self.backend, load_u64(mr, offset))
    }

    /// Stores the word of a region at `offset`, in this machine's byte order, with release. Works on every kind of
    /// memory.
    ///
    /// # Errors
    /// As [`load_u64`](Context::load_u64).
    pub fn store_u64(&mut self, mr: Mr, offset: u64, value: u64) -> Result<(), Error> {
        dispatch!(&mut self.backend, store_u64(mr, offset, value))
    }

    /// The words of a region of shared or foreign memory, as atomics ([`Memory::atomics`]).
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for owned memory, and for words that don't lie as words do.
    pub fn atomics(&self, mr: Mr) -> Result<&[AtomicU64], Error> {
        dispatch!(&self.backend, atomics(mr))
    }

    /// The bytes of a region of owned memory. The borrow keeps the context from being polled meanwhile, so no peer
    /// can write under it:
    ///
    /// ```compile_fail,E0502
    /// # use ferroce::*;
    /// # fn main() -> Result<(), Error> {
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let pd = context.alloc_pd()?;
    /// let mr = context.register(pd, Memory::zeroed(64)?, Access::LOCAL_WRITE)?;
    /// let bytes = context.bytes(mr)?;
    /// context.poll(Clock::start().now())?; // a peer may write now
    /// println!("{}", bytes[0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for memory that others may write too, which has no slices.
    pub fn bytes(&self, mr: Mr) -> Result<&[u8], Error> {
        dispatch!(&self.backend, bytes(mr))
    }

    /// As [`bytes`](Context::bytes), to write.
    ///
    /// # Errors
    /// As [`bytes`](Context::bytes).
    pub fn bytes_mut(&mut self, mr: Mr) -> Result<&mut [u8], Error> {
        dispatch!(&mut self.backend, bytes_mut(mr))
    }

    /// Bytes of a region of a GPU's memory, for a [`Reducer`](crate::driver::gpu::Reducer) or a
    /// [`Queue`](crate::driver::gpu::Queue) of the program's own: its kernels and copies run beside those of the context, which
    /// read what is posted and write where completions have not come.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for memory of the host, and for bytes outside the region.
    pub fn piece(&self, mr: Mr, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        dispatch!(&self.backend, piece(mr, offset, len))
    }

    /// Reduces bytes of regions into bytes of regions ([`Reduction::apply`](crate::driver::reduction::Reduction::apply)): all are
    /// equally long, and hold whole elements; regions may be the same. Works on every kind of memory but a GPU's.
    ///
    /// ```
    /// # use ferroce::*;
    /// # use ferroce::driver::reduction::{DataType, ReduceOp, Reduction};
    /// # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// # let pd = context.alloc_pd()?;
    /// let own = context.register(pd, Memory::copy_of(&[1, 2])?, Access::LOCAL_WRITE)?;
    /// let other = context.register(pd, Memory::copy_of(&[10, 20, 30])?, Access::LOCAL_WRITE)?;
    /// let sum = Reduction::new(DataType::U8, ReduceOp::Sum);
    /// context.reduce(sum, &[own.sge(0..2)], &[own.sge(0..2), other.sge(1..3)])?;
    /// assert_eq!(context.bytes(own)?, [21, 32]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for bytes outside a region, and for a GPU's memory.
    ///
    /// # Panics
    /// As [`Reduction::apply`](crate::driver::reduction::Reduction::apply).
    pub fn reduce(&mut self, reduction: Reduction, targets: &[Sge], sources: &[Sge]) -> Result<(), Error> {
        self.compute(Computation::Reduce(reduction), targets, sources)
    }

    /// Multiplies elements ([`scale`](crate::driver::reduction::scale)). As [`reduce`](Context::reduce).
    ///
    /// # Errors
    /// As [`reduce`](Context::reduce).
    ///
    /// # Panics
    /// As [`scale`](crate::driver::reduction::scale).
    pub fn scale(&mut self, data_type: DataType, target: Sge, source: Sge, factor: f64) -> Result<(), Error> {
        self.compute(Computation::Scale { data_type, factor }, &[target], &[source])
    }

    /// Copies bytes of a region to another one, or elsewhere in the same. As [`reduce`](Context::reduce).
    ///
    /// # Errors
    /// As [`reduce`](Context::reduce).
    ///
    /// # Panics
    /// If they are not equally long.
    pub fn copy(&mut self, target: Sge, source: Sge) -> Result<(), Error> {
        let nothing = Reduction::new(DataType::U8, ReduceOp::Sum);
        self.compute(Computation::Reduce(nothing), &[target], &[source])
    }

    fn compute(&mut self, computation: Computation, targets: &[Sge], sources: &[Sge]) -> Result<(), Error> {
        // Filled where they are: to move them takes longer than to compute with a few elements.
        let mut to = ArrayVec::<Part<Mr>, MAX_SPANS>::new();
        let mut from = ArrayVec::<Part<Mr>, MAX_SPANS>::new();
        let part = |sge: &Sge| Part { memory: sge.mr, offset: sge.offset, len: sge.length as usize };
        to.extend(targets.iter().map(part));
        from.extend(sources.iter().map(part));
        dispatch!(&mut self.backend, compute(computation, &to, &from))
    }
}
