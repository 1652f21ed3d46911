//! Copies and reductions of memory of any kind: by the CPU in place, or of a GPU's memory by way of the host's.

use arrayvec::ArrayVec;
use ferroce::driver::reduction::{DataType, MAX_SPANS, Reduction, scale};
use ferroce::driver::{Span, SpanMut};
use ferroce::{Context, Mr, Sge};

use crate::Error;

/// What goes into a reduction.
pub(crate) type Operands = ArrayVec<Sge, MAX_SPANS>;

/// Room for what the CPU can't reach.
#[derive(Default)]
pub(crate) struct Computer {
    /// Of each operand a block, and of the result.
    blocks: Vec<u8>,
}

/// Bytes of a block: whole elements, that stay in the first cache.
const BLOCK: usize = 4096;
/// Bytes of one copy.
const LONGEST: usize = 1 << 30;

impl Computer {
    /// Copies bytes.
    pub(crate) fn copy(&mut self, context: &mut Context, target: Sge, source: Sge) -> Result<(), Error> {
        if let Some(done) = by_cpu(context.copy(target, source)) {
            return done;
        }
        self.by_blocks(context, target, &[source], |blocks, bytes| {
            let (result, source) = blocks.split_at_mut(BLOCK);
            result[..bytes].copy_from_slice(&source[..bytes]);
        })
    }

    /// Copies bytes, as many as there are.
    pub(crate) fn copy_all(
        &mut self,
        context: &mut Context,
        to: (Mr, u64),
        from: (Mr, u64),
        bytes: usize,
    ) -> Result<(), Error> {
        for start in (0..bytes).step_by(LONGEST) {
            let length = (bytes - start).min(LONGEST) as u32;
            let [to, from] = [to, from].map(|(mr, offset)| Sge { mr, offset: offset + start as u64, length });
            self.copy(context, to, from)?;
        }
        Ok(())
    }

    /// Multiplies elements by a factor.
    pub(crate) fn scale(
        &mut self,
        context: &mut Context,
        data_type: DataType,
        target: Sge,
        source: Sge,
        factor: f64,
    ) -> Result<(), Error> {
        if let Some(done) = by_cpu(context.scale(data_type, target, source, factor)) {
            return done;
        }
        self.by_blocks(context, target, &[source], |blocks, bytes| {
            let (result, source) = blocks.split_at_mut(BLOCK);
            scale(data_type, (&mut result[..bytes]).into(), (&source[..bytes]).into(), factor);
        })
    }

    /// Reduces elements, from left to right.
    pub(crate) fn reduce(
        &mut self,
        context: &mut Context,
        reduction: Reduction,
        target: Sge,
        sources: &[Sge],
    ) -> Result<(), Error> {
        self.reduce_to(context, reduction, &[target], sources)
    }

    /// As [`reduce`](Computer::reduce), to several targets, of which one alone may be out of the CPU's reach.
    pub(crate) fn reduce_to(
        &mut self,
        context: &mut Context,
        reduction: Reduction,
        targets: &[Sge],
        sources: &[Sge],
    ) -> Result<(), Error> {
        if let Some(done) = by_cpu(context.reduce(reduction, targets, sources)) {
            return done;
        }
        let target = targets[0];
        self.by_blocks(context, target, sources, |blocks, bytes| {
            let (result, sources) = blocks.split_at_mut(BLOCK);
            let sources: ArrayVec<Span<'_>, MAX_SPANS> =
                sources.chunks(BLOCK).map(|block| Span::from(&block[..bytes])).collect();
            reduction.apply(&[SpanMut::from(&mut result[..bytes])], &sources);
        })
    }

    /// Copies blocks of the sources to the host, and what `compute` makes of them to the target. The first block is the
    /// result's.
    #[cold]
    fn by_blocks(
        &mut self,
        context: &mut Context,
        target: Sge,
        sources: &[Sge],
        compute: impl Fn(&mut [u8], usize),
    ) -> Result<(), Error> {
        self.blocks.resize((sources.len() + 1) * BLOCK, 0);
        let length = target.length as usize;
        for start in (0..length).step_by(BLOCK) {
            let bytes = (length - start).min(BLOCK);
            for (source, block) in sources.iter().zip(self.blocks[BLOCK..].chunks_mut(BLOCK)) {
                context.read(source.mr, source.offset + start as u64, &mut block[..bytes])?;
            }
            compute(&mut self.blocks, bytes);
            context.write(target.mr, target.offset + start as u64, &self.blocks[..bytes])?;
        }
        Ok(())
    }
}

/// What came of it; `None` if the CPU does not reach the memory.
fn by_cpu(result: Result<(), ferroce::Error>) -> Option<Result<(), Error>> {
    match result {
        Ok(()) => Some(Ok(())),
        Err(ferroce::Error::Region { source: ferroce::MemoryError::NoSlices { .. }, .. }) => None,
        Err(error) => Some(Err(error.into())),
    }
}
