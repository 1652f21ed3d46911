//! Reductions by kernels.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use arrayvec::ArrayVec;
use cudarc::driver::sys::CUfunction;

use super::Cuda;
use super::buffer::Buffer;
use super::context::{Current, Stream};
use super::library::Functions;
use super::under_way::UnderWay;
use crate::Nanos;
use crate::gpu::kernels::Kernel;
use crate::gpu::{Failed, GpuError, MAX_PIECES, MAX_SOURCES, Reducer, Span, Ticket, Tickets, check_sources};
use crate::memory::Piece;
use crate::reduction::Computation;

/// The source of the kernels.
pub(super) const SOURCE: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("prelude.c"), include_str!("../reduce.c"), "\0").as_bytes(),
) {
    Ok(source) => source,
    Err(_) => panic!("a zero in the source"),
};

/// Threads per block: every device supports this number, and runs enough such blocks at once.
const BLOCK: u32 = 256;

pub(super) struct KernelQueue {
    /// Dropped first: its reductions have ended by then.
    reductions: UnderWay,
    /// In order: each reduction starts after the one before.
    stream: Stream,
    kernels: HashMap<Kernel, CUfunction>,
    cuda: Arc<Cuda>,
}

// SAFETY: functions of CUDA may be called by any thread; kernels are only passed to them, and live as long as the device.
unsafe impl Send for KernelQueue {}

impl KernelQueue {
    /// Compiles and loads all kernels, so that no computation waits for that.
    pub(super) fn new(cuda: Arc<Cuda>) -> Result<KernelQueue, GpuError> {
        let module = cuda.module()?;
        let current = cuda.context.enter()?;
        let kernels = Kernel::all()
            .map(|kernel| {
                let (name, mut function) = (kernel.name(), null_mut());
                // SAFETY: a module, a NUL-terminated string, and a valid pointer to store the kernel.
                let find =
                    |cuda: &Functions| unsafe { (cuda.kernel)(&mut function, module.raw(), name.as_ptr()) };
                current.call("cuModuleGetFunction", find).map(|()| (kernel, function))
            })
            .collect::<Result<_, _>>()?;
        drop(current);
        Ok(KernelQueue {
            reductions: UnderWay::new(&cuda)?,
            stream: Stream::new(&cuda.context)?,
            kernels,
            cuda,
        })
    }
}

impl Reducer for KernelQueue {
    fn compute(
        &mut self,
        _now: Nanos,
        computation: Computation,
        target: Piece<'_>,
        sources: &[Piece<'_>],
    ) -> Result<Ticket, GpuError> {
        let KernelQueue { reductions, stream, kernels, cuda } = self;
        check_sources(&cuda.context.name, computation, &target, sources)?;
        reductions.check_room()?;
        let spans: ArrayVec<Span, MAX_PIECES> = [&target].into_iter().chain(sources).map(Span::of).collect();
        let current = cuda.context.enter()?;
        let result = match Kernel::of(computation, sources.len()) {
            None => copy((cuda, &current), stream, &spans),
            Some(kernel) => {
                Launch::new(cuda, kernel, computation, &spans)?.submit(&current, stream, kernels[&kernel])
            }
        };
        reductions.submitted((&current, stream), false, result, spans)
    }
}

fn copy((cuda, current): (&Cuda, &Current<'_>), stream: &Stream, spans: &[Span]) -> Result<(), GpuError> {
    let [to, from] = [&spans[0], &spans[1]].map(|span| span.block::<Buffer>(cuda).pointer() + span.offset);
    let len = spans[0].len;
    if len == 0 || to == from {
        return Ok(());
    }
    // SAFETY: `len` bytes at both addresses, which are kept until the copy has ended.
    current.call("cuMemcpyDtoDAsync", |cuda| unsafe { (cuda.copy_inside)(to, from, len, stream.raw()) })
}

/// The arguments of a kernel.
struct Launch {
    blocks: u32,
    arguments: ArrayVec<u64, ARGUMENTS>,
}

/// A pointer and a number for the target and for each source, and further numbers after them.
const ARGUMENTS: usize = 2 * (1 + MAX_SOURCES) + 3;

impl Launch {
    fn new(
        cuda: &Cuda,
        kernel: Kernel,
        computation: Computation,
        spans: &[Span],
    ) -> Result<Launch, GpuError> {
        let size = kernel.data_type.size() as u64;
        let (count, last) = (spans[0].len as u64 / size, spans.len() - 1);
        let mut arguments = ArrayVec::new();
        // The kernel does not read the sources after the last, so the last fills their places.
        for nth in 0..=kernel.sources() {
            let span = &spans[nth.min(last)];
            let pointer = span.block::<Buffer>(cuda).pointer();
            // Imported memory may start at any address, and one misaligned access makes the device unusable.
            if !pointer.is_multiple_of(size) {
                return Err(GpuError::Unaligned {
                    device: cuda.context.name.clone(),
                    size: size as usize,
                    offset: pointer,
                });
            }
            arguments.extend([pointer, span.offset / size]);
        }
        arguments.extend(kernel.numbers(computation, last, count).into_iter().flatten());
        let blocks =
            u32::try_from(count.div_ceil(u64::from(BLOCK))).ok().filter(|blocks| *blocks <= i32::MAX as u32);
        let blocks =
            blocks.ok_or_else(|| cuda.refused("cuLaunchKernel", format!("{count} elements at once")))?;
        Ok(Launch { blocks, arguments })
    }

    fn submit(
        mut self,
        current: &Current<'_>,
        stream: &Stream,
        function: CUfunction,
    ) -> Result<(), GpuError> {
        if self.blocks == 0 {
            return Ok(());
        }
        let mut arguments: ArrayVec<*mut c_void, ARGUMENTS> =
            self.arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
        // SAFETY: the arguments are those of `reduce.c`, numbers of 64 bits, which are copied during the call. All elements
        // were checked to be in the pieces, which are kept until the kernel has ended.
        current.call("cuLaunchKernel", |cuda| unsafe {
            let (raw, no_more) = (stream.raw(), null_mut());
            (cuda.launch)(function, self.blocks, 1, 1, BLOCK, 1, 1, 0, raw, arguments.as_mut_ptr(), no_more)
        })
    }
}

impl Tickets for KernelQueue {
    fn done(&mut self, _now: Nanos) -> Result<Ticket, Failed> {
        self.reductions.done(&self.cuda, &[&self.stream])
    }

    fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        (!self.reductions.is_empty()).then_some(now)
    }
}

impl Drop for KernelQueue {
    fn drop(&mut self) {
        self.stream.end_at_last();
    }
}
