//! Reductions by kernels.

use std::collections::VecDeque;
use std::ffi::{CString, c_void};
use std::ptr::null;
use std::sync::Arc;

use arrayvec::ArrayVec;
use cl3::command_queue::enqueue_nd_range_kernel;
use cl3::kernel::{create_kernel, set_kernel_arg};

use super::OpenCl;
use super::buffer::Buffer;
use super::object::{Kind, Object};
use super::queue::{UnderWay, done, end};
use crate::Nanos;
use crate::gpu::{DATA_TYPES, Failed, GpuError, QUEUE_DEPTH, Reducer, Span, Ticket, Tickets, check_elements};
use crate::memory::Piece;
use crate::reduction::{DataType, ReduceOp};

/// Items that may be computed with together.
const GROUP: usize = 256;

pub(super) struct KernelQueue {
    opencl: Arc<OpenCl>,
    /// In order: each reduction is behind the one before.
    commands: Object,
    kernels: Vec<((DataType, ReduceOp), Object)>,
    reductions: VecDeque<UnderWay>,
    last: Ticket,
}

impl KernelQueue {
    pub(super) fn new(opencl: Arc<OpenCl>) -> Result<KernelQueue, GpuError> {
        opencl.program()?;
        let commands = opencl.commands_in_order()?;
        let kernels = Vec::with_capacity(DATA_TYPES.len() * ReduceOp::ALL.len());
        let reductions = VecDeque::with_capacity(QUEUE_DEPTH);
        Ok(KernelQueue { opencl, commands, kernels, reductions, last: Ticket::NONE })
    }

    /// The kernel, as it is called in `reduce.c`.
    fn kernel(&mut self, what: (DataType, ReduceOp)) -> Result<*mut c_void, GpuError> {
        if let Some((_, kernel)) = self.kernels.iter().find(|(other, _)| *other == what) {
            return Ok(kernel.raw());
        }
        let (data_type, op) = what;
        self.opencl.computes_with(data_type)?;
        let name = CString::new(format!("{op}_{data_type}")).unwrap_or_default();
        let kernel = create_kernel(self.opencl.program()?.raw(), &name);
        let kernel = kernel.map_err(self.opencl.failed("clCreateKernel"))?;
        // SAFETY: it was just created, and nobody else has it.
        self.kernels.push((what, unsafe { Object::owned(Kind::Kernel, kernel) }));
        Ok(kernel)
    }
}

impl Reducer for KernelQueue {
    fn reduce(
        &mut self,
        _now: Nanos,
        what: (DataType, ReduceOp),
        target: Piece<'_>,
        source: Piece<'_>,
    ) -> Result<Ticket, GpuError> {
        check_elements(&self.opencl.name, what.0, &target, &source)?;
        if self.reductions.len() == QUEUE_DEPTH {
            return Err(GpuError::Full { copies: QUEUE_DEPTH });
        }
        let kernel = self.kernel(what)?;
        let size = what.0.size() as u64;
        let count = target.len() as u64 / size;
        let spans: ArrayVec<Span, _> = [target, source].iter().map(Span::of).collect();
        let ticket = self.last.next();
        for (index, span) in spans.iter().enumerate() {
            let buffer = span.block::<Buffer>(&*self.opencl).object().raw();
            let at = span.offset / size;
            let failed = self.opencl.failed("clSetKernelArg");
            // SAFETY: the kernel's arguments are, twice, a buffer and the number of its first element, as `reduce.c` has them.
            unsafe {
                argument(kernel, 2 * index as u32, &buffer).map_err(&failed)?;
                argument(kernel, 2 * index as u32 + 1, &at).map_err(&failed)?;
            }
        }
        // SAFETY: the last argument is the count.
        unsafe { argument(kernel, 4, &count) }.map_err(self.opencl.failed("clSetKernelArg"))?;
        let mut reduction = UnderWay::new(ticket, spans);
        if count > 0 {
            // Of a multiple, groups of items can be large. Those beyond the count do nothing.
            let items = (count as usize).next_multiple_of(GROUP);
            // SAFETY: the kernel looks at elements below the count alone, all of which were seen to be in the pieces.
            let event = unsafe {
                enqueue_nd_range_kernel(self.commands.raw(), kernel, 1, null(), &items, null(), 0, null())
            };
            reduction.submitted("clEnqueueNDRangeKernel", event);
        }
        reduction.flush(&self.commands);
        self.last = ticket;
        self.reductions.push_back(reduction);
        Ok(ticket)
    }
}

/// # Safety
/// The kernel's argument of this number is a `T`.
unsafe fn argument<T>(kernel: *mut c_void, index: u32, value: &T) -> Result<(), i32> {
    // SAFETY: so many bytes, which OpenCL copies; that they are the right ones the caller says.
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
