//! Reductions by kernels.

use std::ffi::{CStr, CString};
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
use crate::gpu::{DATA_TYPES, Failed, GpuError, MAX_PIECES, Reducer, Span, Ticket, Tickets, check_elements};
use crate::memory::Piece;
use crate::reduction::{DataType, ReduceOp};

/// The kernels.
pub(super) const SOURCE: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!("prelude.c"), include_str!("../reduce.c"), "\0").as_bytes(),
) {
    Ok(source) => source,
    Err(_) => panic!("a zero in the source"),
};

/// Threads of a block: all devices have so many, and run enough of them at once.
const BLOCK: u32 = 256;

pub(super) struct KernelQueue {
    /// Dropped first: what is in it has ended by then.
    reductions: UnderWay,
    /// In order: each reduction is behind the one before.
    stream: Stream,
    kernels: Vec<((DataType, ReduceOp), CUfunction)>,
    cuda: Arc<Cuda>,
}

// SAFETY: functions of CUDA may be called by any thread; kernels are only given to them, and live as long as the device.
unsafe impl Send for KernelQueue {}

impl KernelQueue {
    pub(super) fn new(cuda: Arc<Cuda>) -> Result<KernelQueue, GpuError> {
        cuda.module()?;
        let kernels = Vec::with_capacity(DATA_TYPES.len() * ReduceOp::ALL.len());
        Ok(KernelQueue {
            reductions: UnderWay::new(&cuda)?,
            stream: Stream::new(&cuda.context)?,
            kernels,
            cuda,
        })
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
        let KernelQueue { reductions, stream, kernels, cuda } = self;
        check_elements(&cuda.context.name, what.0, &target, &source)?;
        reductions.check_room()?;
        let spans: ArrayVec<Span, MAX_PIECES> = [target, source].iter().map(Span::of).collect();
        let size = what.0.size() as u64;
        let [mut target, mut source] =
            [&spans[0], &spans[1]].map(|span| span.block::<Buffer>(&**cuda).pointer());
        // What is imported may begin anywhere, and a device is lost by one element that is read askew.
        if let Some(pointer) = [target, source].into_iter().find(|pointer| !pointer.is_multiple_of(size)) {
            return Err(GpuError::Unaligned {
                device: cuda.context.name.clone(),
                size: size as usize,
                offset: pointer,
            });
        }
        let [mut target_at, mut source_at] = [&spans[0], &spans[1]].map(|span| span.offset / size);
        let mut count = spans[0].len as u64 / size;
        let blocks =
            u32::try_from(count.div_ceil(u64::from(BLOCK))).ok().filter(|blocks| *blocks <= i32::MAX as u32);
        let blocks =
            blocks.ok_or_else(|| cuda.refused("cuLaunchKernel", format!("{count} elements at once")))?;
        let current = cuda.context.enter()?;
        let kernel = kernel(cuda, &current, kernels, what)?;
        let mut arguments = [
            (&raw mut target).cast(),
            (&raw mut target_at).cast(),
            (&raw mut source).cast(),
            (&raw mut source_at).cast(),
            (&raw mut count).cast(),
        ];
        let mut result = Ok(());
        if blocks > 0 {
            // SAFETY: the arguments are those of `reduce.c`, five numbers of 64 bits, which are copied during the call. All elements were seen to be
            // in the pieces, which are kept until the kernel has ended.
            result = current.call("cuLaunchKernel", |cuda| unsafe {
                let (raw, no_more) = (stream.raw(), null_mut());
                (cuda.launch)(kernel, blocks, 1, 1, BLOCK, 1, 1, 0, raw, arguments.as_mut_ptr(), no_more)
            });
        }
        reductions.submitted((&current, stream), false, result, spans)
    }
}

/// The kernel, as it is called in `reduce.c`.
fn kernel(
    cuda: &Cuda,
    current: &Current<'_>,
    kernels: &mut Vec<((DataType, ReduceOp), CUfunction)>,
    what: (DataType, ReduceOp),
) -> Result<CUfunction, GpuError> {
    if let Some((_, kernel)) = kernels.iter().find(|(other, _)| *other == what) {
        return Ok(*kernel);
    }
    let name = CString::new(format!("{}_{}", what.1, what.0)).unwrap_or_default();
    let module = cuda.module()?.raw();
    let mut kernel = null_mut();
    // SAFETY: a module, a text that ends with a zero, and where the kernel is to be.
    let find = |cuda: &Functions| unsafe { (cuda.kernel)(&mut kernel, module, name.as_ptr()) };
    current.call("cuModuleGetFunction", find)?;
    kernels.push((what, kernel));
    Ok(kernel)
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
