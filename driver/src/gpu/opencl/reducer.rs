//! Reductions by kernels.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::null;
use std::sync::Arc;

use arrayvec::ArrayVec;
use cl3::command_queue::{enqueue_copy_buffer, enqueue_nd_range_kernel};
use cl3::kernel::{create_kernel, set_kernel_arg};

use super::OpenCl;
use super::buffer::Buffer;
use super::object::{Kind, Object};
use super::queue::{UnderWay, done, end};
use crate::Nanos;
use crate::gpu::kernels::Kernel;
use crate::gpu::{Failed, GpuError, MAX_PIECES, QUEUE_DEPTH, Reducer, Span, Ticket, Tickets, check_sources};
use crate::memory::Piece;
use crate::reduction::Computation;

/// The granularity of the number of work items.
const GROUP: usize = 256;

pub(super) struct KernelQueue {
    opencl: Arc<OpenCl>,
    /// In order: each reduction starts after the one before.
    commands: Object,
    kernels: HashMap<Kernel, Object>,
    reductions: VecDeque<UnderWay>,
    last: Ticket,
}

impl KernelQueue {
    /// Builds all kernels, so that no computation waits for that.
    pub(super) fn new(opencl: Arc<OpenCl>) -> Result<KernelQueue, GpuError> {
        let program = opencl.program()?.raw();
        let kernels = Kernel::all()
            .filter(|kernel| opencl.has(kernel.data_type))
            .map(|kernel| {
                let raw = create_kernel(program, &kernel.name()).map_err(opencl.failed("clCreateKernel"))?;
                // SAFETY: it was just created, and has no other owner.
                Ok((kernel, unsafe { Object::owned(Kind::Kernel, raw) }))
            })
            .collect::<Result<_, GpuError>>()?;
        let commands = opencl.commands_in_order()?;
        let reductions = VecDeque::with_capacity(QUEUE_DEPTH);
        Ok(KernelQueue { opencl, commands, kernels, reductions, last: Ticket::NONE })
    }

    /// Sets a kernel's arguments: the target, the sources, and the number of elements.
    fn set_arguments(
        &self,
        (kernel, raw): (Kernel, *mut c_void),
        computation: Computation,
        spans: &[Span],
    ) -> Result<u64, GpuError> {
        let failed = self.opencl.failed("clSetKernelArg");
        let size = kernel.data_type.size() as u64;
        let count = spans[0].len as u64 / size;
        // The kernel does not read the sources after the last, so the last fills their places.
        let last = spans.len() - 1;
        let mut index = 0;
        for nth in 0..=kernel.sources() {
            let span = &spans[nth.min(last)];
            let buffer = span.block::<Buffer>(&*self.opencl).object().raw();
            // SAFETY: the kernel's arguments are, for the target and for each source, a buffer and the number of its first
            // element, as `reduce.c` declares them.
            unsafe {
                argument(raw, index, &buffer).map_err(&failed)?;
                argument(raw, index + 1, &(span.offset / size)).map_err(&failed)?;
            }
            index += 2;
        }
        for number in kernel.numbers(computation, last, count).iter().flatten() {
            // SAFETY: the others are numbers of 64 bits.
            unsafe { argument(raw, index, number) }.map_err(&failed)?;
            index += 1;
        }
        Ok(count)
    }

    /// Submits a computation, unless it is empty, and returns the call with its event.
    fn submit(&self, computation: Computation, spans: &[Span]) -> Result<Option<Submitted>, GpuError> {
        let Some(kernel) = Kernel::of(computation, spans.len() - 1) else { return Ok(self.copy(spans)) };
        self.opencl.computes(computation)?;
        let raw = self.kernels[&kernel].raw();
        let count = self.set_arguments((kernel, raw), computation, spans)?;
        // A multiple permits large work groups. Items beyond the count do nothing.
        let items = (count as usize).next_multiple_of(GROUP);
        Ok((count > 0).then(|| {
            // SAFETY: the kernel only accesses elements below the count, all of which were checked to be in the pieces.
            let event = unsafe {
                enqueue_nd_range_kernel(self.commands.raw(), raw, 1, null(), &items, null(), 0, null())
            };
            ("clEnqueueNDRangeKernel", event)
        }))
    }

    fn copy(&self, spans: &[Span]) -> Option<Submitted> {
        let [target, source] = [&spans[0], &spans[1]];
        let [to, from] = [target, source].map(|span| span.block::<Buffer>(&*self.opencl).object().raw());
        if target.len == 0 || (to, target.offset) == (from, source.offset) {
            return None;
        }
        let (to_at, from_at) = (target.offset as usize, source.offset as usize);
        // SAFETY: OpenCL checks the ranges in the buffers, which are kept until the copy has ended.
        let event = unsafe {
            enqueue_copy_buffer(self.commands.raw(), from, to, from_at, to_at, target.len, 0, null())
        };
        Some(("clEnqueueCopyBuffer", event))
    }
}

/// A call, and the event that it returned.
type Submitted = (&'static str, Result<*mut c_void, i32>);

impl Reducer for KernelQueue {
    fn compute(
        &mut self,
        _now: Nanos,
        computation: Computation,
        target: Piece<'_>,
        sources: &[Piece<'_>],
    ) -> Result<Ticket, GpuError> {
        check_sources(&self.opencl.name, computation, &target, sources)?;
        if self.reductions.len() == QUEUE_DEPTH {
            return Err(GpuError::Full { copies: QUEUE_DEPTH });
        }
        let spans: ArrayVec<Span, MAX_PIECES> = [&target].into_iter().chain(sources).map(Span::of).collect();
        let submitted = self.submit(computation, &spans)?;
        self.last = self.last.next();
        let mut under_way = UnderWay::new(self.last, spans);
        if let Some((call, event)) = submitted {
            under_way.submitted(call, event);
        }
        under_way.flush(&self.commands);
        self.reductions.push_back(under_way);
        Ok(self.last)
    }
}

/// # Safety
/// The kernel's argument of this number is a `T`.
unsafe fn argument<T>(kernel: *mut c_void, index: u32, value: &T) -> Result<(), i32> {
    // SAFETY: `size_of::<T>()` bytes, which OpenCL copies; the caller guarantees the type.
    unsafe { set_kernel_arg(kernel, index, size_of::<T>(), std::ptr::from_ref(value).cast()) }
}

impl Tickets for KernelQueue {
    fn done(&mut self, _now: Nanos) -> Result<Ticket, Failed> {
        done((&self.opencl, &self.commands), &mut self.reductions, self.last)
    }

    fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        (!self.reductions.is_empty()).then_some(now)
    }
}

impl Drop for KernelQueue {
    fn drop(&mut self) {
        end(&self.commands);
    }
}
