//! Protection domains, memory regions and memory windows.

use std::sync::atomic::AtomicU64;

use arrayvec::ArrayVec;
use ferroce_driver::reduction::{Computation, DataType, MAX_SPANS, Part, ReduceOp, Reduction};
use ferroce_driver::{Memory, Piece};

use super::Context;
use crate::backend::dispatch;
use crate::verbs::{Access, Error, Mr, Mw, Pd, RegisterError, RemoteMemory, Sge};

impl Context {
    /// Allocates a protection domain: queue pairs access only memory of their own protection domain. Most programs need one.
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

    /// Registers memory of any [kind](crate::MemoryKind): local work requests may use it, and peers according to `access`.
    /// Addresses for peers start at 0. [`manual::memory`](crate::manual::memory) says who may access it when.
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
    /// The context owns the memory from now on:
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
    /// [`RegisterError`], with the memory: [`Error::Access`] for rights that can't be combined (peers that write need
    /// [`LOCAL_WRITE`](Access::LOCAL_WRITE)), [`Error::Exhausted`] ([`Config::max_mrs`](crate::Config::max_mrs)),
    /// [`Error::InvalidHandle`]; with an RNIC the card's error, mostly that too little memory may be locked (`ulimit -l`), or
    /// that it does not support device memory ([`manual::memory`](crate::manual::memory)).
    pub fn register(&mut self, pd: Pd, memory: Memory, access: Access) -> Result<Mr, RegisterError> {
        self.register_at(pd, memory, access, 0)
    }

    /// As [`register`](Context::register), with the address `iova` for its first byte.
    ///
    /// # Errors
    /// As [`register`](Context::register); [`Error::Invalid`] for an `iova` from which the region would exceed 2⁶⁴, or that is
    /// not congruent to the memory's address modulo 8 if peers may execute atomics.
    pub fn register_at(
        &mut self,
        pd: Pd,
        memory: Memory,
        access: Access,
        iova: u64,
    ) -> Result<Mr, RegisterError> {
        dispatch!(&mut self.backend, register_at(pd, memory, access, iova))
    }

    /// Ends a registration and returns the memory. Peers that still use the key are refused from now on, even in the middle of a
    /// READ.
    ///
    /// # Errors
    /// [`Error::Busy`] while a posted work request uses it, a window is bound to it, the port still sends from it (DPDK sends
    /// long payloads without a copy), or its device copies: poll and take completions, invalidate the window, or destroy the
    /// queue pair, and try again. If only the port or copies delay it, peers are already refused. (A posted bind does not count:
    /// it completes with [`MwBindErr`](crate::WcStatus::MwBindErr).)
    pub fn deregister(&mut self, mr: Mr) -> Result<Memory, Error> {
        dispatch!(&mut self.backend, deregister(mr))
    }

    /// Replaces the memory of a region by other memory of the same length, and returns the old memory. Registration, address and
    /// keys do not change, and peers access the new bytes from now on. No bytes are copied. The new memory may be of another
    /// [kind](crate::MemoryKind): with shared or foreign memory, [`bytes`](Context::bytes) fails, and [`read`](Context::read) and
    /// [`write`](Context::write) work. [`manual::memory`](crate::manual::memory) has an example.
    ///
    /// # Errors
    /// [`Error::Busy`] while a posted work request uses the region or the port still sends from it, [`Error::Invalid`] for
    /// another length and for an address that [`register_at`](Context::register_at) would refuse, [`Error::InvalidHandle`]; with
    /// the memory.
    pub fn exchange(&mut self, mr: Mr, memory: Memory) -> Result<Memory, RegisterError> {
        dispatch!(&mut self.backend, exchange(mr, memory))
    }

    /// The data that a peer needs to access a region, as text or bytes; [`RemoteMemory::at`] returns the address of one byte.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn remote(&self, mr: Mr) -> Result<RemoteMemory, Error> {
        dispatch!(&self.backend, remote(mr))
    }

    /// Allocates a memory window of type 2B, unbound: [`SendOp::BindMw`](crate::SendOp::BindMw) assigns a range and a key to it.
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

    /// Frees a memory window, bound or not. Peers that still use its key are refused from now on.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn dealloc_mw(&mut self, mw: Mw) -> Result<(), Error> {
        dispatch!(&mut self.backend, dealloc_mw(mw))
    }

    /// The data that a peer needs to access a window; `None` while it is not bound. The key is valid when the bind completes;
    /// each bind draws a new one.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn remote_window(&self, mw: Mw) -> Result<Option<RemoteMemory>, Error> {
        dispatch!(&self.backend, remote_window(mw))
    }

    /// Copies bytes of a region to `to`, from `offset` on, counted from the region's first byte. Works on every kind of memory;
    /// GPU memory is copied by the GPU, and the call waits for it. With concurrent writes, some bytes are old and some are new.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for bytes outside the region, or if the GPU refuses.
    pub fn read(&self, mr: Mr, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        dispatch!(&self.backend, read(mr, offset, to))
    }

    /// Copies `from` to the bytes of a region from `offset` on. Works on every kind of memory. The last bytes are stored last,
    /// with release, except in GPU memory, which the GPU writes while the call waits.
    ///
    /// # Errors
    /// As [`read`](Context::read).
    pub fn write(&mut self, mr: Mr, offset: u64, from: &[u8]) -> Result<(), Error> {
        dispatch!(&mut self.backend, write(mr, offset, from))
    }

    /// The word of a region at `offset`, in this machine's byte order, with acquire. Works on every kind of memory.
    ///
    /// # Errors
    /// As [`read`](Context::read); [`Error::Region`] also if its address is not a multiple of 8, except for owned and GPU memory.
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
    /// [`Error::InvalidHandle`]; [`Error::Region`] for owned memory, and for misaligned words.
    pub fn atomics(&self, mr: Mr) -> Result<&[AtomicU64], Error> {
        dispatch!(&self.backend, atomics(mr))
    }

    /// The bytes of a region of owned memory. The context can't be polled during the borrow, so no peer can write meanwhile:
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
    /// [`Error::InvalidHandle`]; [`Error::Region`] for memory that others may write, which has no slices.
    pub fn bytes(&self, mr: Mr) -> Result<&[u8], Error> {
        dispatch!(&self.backend, bytes(mr))
    }

    /// As [`bytes`](Context::bytes), mutable.
    ///
    /// # Errors
    /// As [`bytes`](Context::bytes).
    pub fn bytes_mut(&mut self, mr: Mr) -> Result<&mut [u8], Error> {
        dispatch!(&mut self.backend, bytes_mut(mr))
    }

    /// Bytes of a region of GPU memory, for a [`Reducer`](crate::driver::gpu::Reducer) or a [`Queue`](crate::driver::gpu::Queue)
    /// of the program's own: its kernels and copies run concurrently with those of the context, which read posted data and write
    /// until the completion.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Region`] for host memory, and for bytes outside the region.
    pub fn piece(&self, mr: Mr, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        dispatch!(&self.backend, piece(mr, offset, len))
    }

    /// Reduces bytes of regions into bytes of regions ([`Reduction::apply`](crate::driver::reduction::Reduction::apply)): all
    /// have the same length, and hold whole elements; regions may be the same. Works on every kind of memory except GPU memory.
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
    /// [`Error::InvalidHandle`]; [`Error::Region`] for bytes outside a region, and for GPU memory.
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

    /// Copies bytes of a region to another region, or within the same one. As [`reduce`](Context::reduce).
    ///
    /// # Errors
    /// As [`reduce`](Context::reduce).
    ///
    /// # Panics
    /// If their lengths differ.
    pub fn copy(&mut self, target: Sge, source: Sge) -> Result<(), Error> {
        let nothing = Reduction::new(DataType::U8, ReduceOp::Sum);
        self.compute(Computation::Reduce(nothing), &[target], &[source])
    }

    fn compute(&mut self, computation: Computation, targets: &[Sge], sources: &[Sge]) -> Result<(), Error> {
        // Filled in place: moving them takes longer than computing with a few elements.
        let mut to = ArrayVec::<Part<Mr>, MAX_SPANS>::new();
        let mut from = ArrayVec::<Part<Mr>, MAX_SPANS>::new();
        let part = |sge: &Sge| Part { memory: sge.mr, offset: sge.offset, len: sge.length as usize };
        to.extend(targets.iter().map(part));
        from.extend(sources.iter().map(part));
        dispatch!(&mut self.backend, compute(computation, &to, &from))
    }
}
