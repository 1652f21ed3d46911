//! Copies and reductions of memory of any kind: by the CPU in place, by a GPU in its own memory, or on GPU memory by copies
//! through host memory.
//!
//! `execution.rs` waits for the completion of a device's work while it continues with other steps.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use ferroce::driver::gpu::{Device, Failed, GpuError, MAX_SOURCES, Reducer, Ticket};
use ferroce::driver::reduction::{Computation, DataType, MAX_SPANS, Reduction, scale};
use ferroce::driver::{Piece, Span, SpanMut};
use ferroce::{Access, Context, Memory, Mr, Nanos, Sge};
use tracing::warn;

use crate::Error;
use crate::fallback;
use crate::ports::Ports;

/// The operands of a reduction.
pub(crate) type Operands = ArrayVec<Sge, MAX_SPANS>;

/// The CPU and the device as executors of computations.
#[derive(Default)]
pub(crate) struct Computer {
    /// A block for each operand, and one for the result.
    blocks: Vec<u8>,
    device: Option<DeviceReducer>,
}

/// A device that reduces its own memory.
struct DeviceReducer {
    device: Arc<dyn Device>,
    /// `None` if the device computes nothing.
    reducer: Option<Box<dyn Reducer>>,
    /// The last computation that was started.
    begun: Ticket,
    /// All computations up to this one have ended.
    ended: Ticket,
    /// Failed computations that were not yet reported: each operation queries all that it started.
    failed: Vec<(Ticket, GpuError)>,
    /// The regions of its memory.
    regions: HashSet<Mr>,
    /// The device has refused a computation, and the reason was logged.
    has_refused: bool,
}

/// The device's response to a computation.
pub(crate) enum ByDevice {
    /// The device can't do it.
    No,
    /// The device's queue is full: try again later.
    Later,
    /// It was started.
    Begun(Ticket),
}

/// Bytes per block of device memory that is copied through the host: whole elements, and enough of them to make the fixed
/// cost of a copy small.
const BLOCK: usize = 256 << 10;
/// The most bytes of one copy.
const LONGEST: usize = 1 << 30;

impl Computer {
    /// With a device that reduces its own memory. The kernels are built here, because that takes long.
    pub(crate) fn new(device: Option<Arc<dyn Device>>) -> Result<Computer, Error> {
        let Some(device) = device else { return Ok(Computer::default()) };
        let reducer = match device.reducer() {
            Ok(reducer) => Some(reducer),
            Err(error @ GpuError::Unsupported { .. }) => {
                warn!("the host computes in its place: {error}");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let own = DeviceReducer {
            device,
            reducer,
            begun: Ticket::NONE,
            ended: Ticket::NONE,
            failed: Vec::new(),
            regions: HashSet::new(),
            has_refused: false,
        };
        Ok(Computer { blocks: Vec::new(), device: Some(own) })
    }

    /// The device.
    pub(crate) fn device(&self) -> Option<&dyn Device> {
        self.device.as_ref().map(|own| &*own.device)
    }

    /// Registers memory, and records whether it is of the device.
    pub(crate) fn register(
        &mut self,
        ports: &mut Ports,
        memory: Memory,
        access: Access,
    ) -> Result<Mr, Error> {
        let own = self.device.as_ref().map(|own| &own.device);
        let is_own = memory.device().zip(own).is_some_and(|(its, own)| Arc::ptr_eq(its, own));
        let mr = ports.register(memory, access)?;
        if let Some(own) = self.device.as_mut().filter(|_| is_own) {
            own.regions.insert(mr);
        }
        Ok(mr)
    }

    /// Ends a registration, as [`Ports::deregister`] does.
    pub(crate) fn deregister(
        &mut self,
        ports: &mut Ports,
        now: impl FnMut() -> Nanos,
        mr: Mr,
    ) -> Result<Memory, Error> {
        let memory = ports.deregister(now, mr)?;
        self.device.iter_mut().for_each(|own| {
            own.regions.remove(&mr);
        });
        Ok(memory)
    }

    /// Processes the computations that the device has ended, including those of operations that no longer query them: this
    /// releases their memory, and makes room for others.
    pub(crate) fn poll(&mut self, now: Nanos) {
        let Some(DeviceReducer { reducer: Some(reducer), begun, ended, failed, .. }) = &mut self.device
        else {
            return;
        };
        while *ended < *begun {
            match reducer.done(now) {
                Ok(watermark) => {
                    *ended = watermark;
                    break;
                }
                Err(Failed { ticket, source, .. }) => {
                    *ended = ticket;
                    failed.push((ticket, source));
                }
            }
        }
    }

    /// The last computation started on the device.
    pub(crate) fn newest(&self) -> Ticket {
        self.device.as_ref().map_or(Ticket::NONE, |own| own.begun)
    }

    /// Whether all computations up to this one have ended, successfully or not.
    pub(crate) fn is_past(&self, ticket: Ticket) -> bool {
        self.device.as_ref().is_none_or(|own| own.ended >= ticket)
    }

    /// The error of a device that does not complete its computations.
    pub(crate) fn hangs(&self, waited: Duration) -> Error {
        let device = self.device().map_or_else(|| "a device".to_owned(), |device| device.name().to_owned());
        let reason = format!("not ended for {waited:?}; they may still write to memory");
        Error::Gpu(GpuError::Call { device, call: "copies and reductions", reason })
    }

    /// Starts a computation on the device, if it supports it: only in its own memory.
    pub(crate) fn begin(
        &mut self,
        context: &Context,
        now: Nanos,
        computation: Computation,
        target: Sge,
        sources: &[Sge],
    ) -> Result<ByDevice, Error> {
        let Some(own) = &mut self.device else { return Ok(ByDevice::No) };
        let are_own = sources.iter().chain([&target]).all(|sge| own.regions.contains(&sge.mr));
        if !are_own || sources.len() > MAX_SOURCES {
            return Ok(ByDevice::No);
        }
        let Some(reducer) = &mut own.reducer else { return Ok(ByDevice::No) };
        let piece = |sge: &Sge| context.piece(sge.mr, sge.offset, sge.length as usize);
        let sources: ArrayVec<Piece<'_>, MAX_SOURCES> =
            sources.iter().map(piece).collect::<Result<_, _>>()?;
        match reducer.compute(now, computation, piece(&target)?, &sources) {
            Ok(ticket) => {
                own.begun = ticket;
                Ok(ByDevice::Begun(ticket))
            }
            Err(GpuError::Full { .. }) => Ok(ByDevice::Later),
            Err(error @ (GpuError::Unaligned { .. } | GpuError::Unsupported { .. })) => {
                if !std::mem::replace(&mut own.has_refused, true) {
                    warn!("{error}");
                }
                Ok(ByDevice::No)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// When to poll the device again: now if it can't tell, never if nothing is outstanding.
    pub(crate) fn next_deadline(&self, now: Nanos) -> Nanos {
        let reducer = self.device.as_ref().and_then(|own| own.reducer.as_ref());
        reducer.and_then(|reducer| reducer.next_deadline(now)).unwrap_or(Nanos::NEVER)
    }

    /// Whether a computation of the device has ended, as of the last [`poll`](Computer::poll).
    pub(crate) fn has_ended(&mut self, ticket: Ticket) -> Result<bool, Error> {
        let Some(own) = &mut self.device else { return Ok(true) };
        match own.failed.iter().position(|(failed, _)| *failed == ticket) {
            Some(index) => Err(own.failed.swap_remove(index).1.into()),
            None => Ok(ticket <= own.ended),
        }
    }

    /// Copies bytes.
    pub(crate) fn copy(&mut self, context: &mut Context, target: Sge, source: Sge) -> Result<(), Error> {
        if let Some(done) = by_cpu(context.copy(target, source)) {
            return done;
        }
        self.by_blocks(
            context,
            "a device's memory is copied by the CPU",
            (target, &[source]),
            |blocks, bytes| {
                let (result, source) = blocks.split_at_mut(BLOCK);
                result[..bytes].copy_from_slice(&source[..bytes]);
            },
        )
    }

    /// Copies all bytes.
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

    /// Executes a computation without the device.
    pub(crate) fn compute(
        &mut self,
        context: &mut Context,
        computation: Computation,
        target: Sge,
        sources: &[Sge],
    ) -> Result<(), Error> {
        match (computation, sources) {
            (Computation::Scale { data_type, factor }, [source, ..]) => {
                self.scale(context, data_type, target, *source, factor)
            }
            (Computation::Reduce(reduction), _) => self.reduce(context, reduction, target, sources),
            _ => Ok(()),
        }
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
        self.by_blocks(
            context,
            "a device's memory is scaled by the CPU",
            (target, &[source]),
            |blocks, bytes| {
                let (result, source) = blocks.split_at_mut(BLOCK);
                scale(data_type, (&mut result[..bytes]).into(), (&source[..bytes]).into(), factor);
            },
        )
    }

    /// Reduces elements, from left to right.
    pub(crate) fn reduce(
        &mut self,
        context: &mut Context,
        reduction: Reduction,
        target: Sge,
        sources: &[Sge],
    ) -> Result<(), Error> {
        if let Some(done) = by_cpu(context.reduce(reduction, &[target], sources)) {
            return done;
        }
        self.by_blocks(
            context,
            "a device's memory is reduced by the CPU",
            (target, sources),
            |blocks, bytes| {
                let (result, sources) = blocks.split_at_mut(BLOCK);
                let sources: ArrayVec<Span<'_>, MAX_SPANS> =
                    sources.chunks(BLOCK).map(|block| Span::from(&block[..bytes])).collect();
                reduction.apply(&[SpanMut::from(&mut result[..bytes])], &sources);
            },
        )
    }

    /// Copies blocks of the sources to the host, and the result of `compute` to the target. The first block is that of the
    /// result.
    #[cold]
    fn by_blocks(
        &mut self,
        context: &mut Context,
        reason: &'static str,
        (target, sources): (Sge, &[Sge]),
        compute: impl Fn(&mut [u8], usize),
    ) -> Result<(), Error> {
        fallback::by_the_host(context, reason, self.blocks.is_empty());
        let length = target.length as usize;
        let room = (sources.len() + 1) * BLOCK;
        self.blocks.resize(room.max(self.blocks.len()), 0);
        for start in (0..length).step_by(BLOCK) {
            let bytes = (length - start).min(BLOCK);
            for (source, block) in sources.iter().zip(self.blocks[BLOCK..].chunks_mut(BLOCK)) {
                context.read(source.mr, source.offset + start as u64, &mut block[..bytes])?;
            }
            compute(&mut self.blocks[..room], bytes);
            context.write(target.mr, target.offset + start as u64, &self.blocks[..bytes])?;
        }
        Ok(())
    }
}

/// The result; `None` if the CPU can't access the memory.
fn by_cpu(result: Result<(), ferroce::Error>) -> Option<Result<(), Error>> {
    match result {
        Ok(()) => Some(Ok(())),
        Err(ferroce::Error::Region { source: ferroce::MemoryError::NoSlices { .. }, .. }) => None,
        Err(error) => Some(Err(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use ferroce::driver::gpu::strict::{Strict, Submission};
    use ferroce::driver::reduction::ReduceOp;
    use ferroce::{Config, Device as Port};

    use super::*;

    /// A failure is kept until its operation queries it, even if other computations end before.
    #[test]
    fn a_failure_is_kept_until_its_operation_queries_it() {
        let device = Strict::default().open().unwrap();
        let context = Context::open(Port::open("loopback").unwrap(), &Config::default()).unwrap();
        let mut ports = Ports::new(context).unwrap();
        let mut computer = Computer::new(Some(device.clone())).unwrap();
        let memory = device.allocate(64).unwrap();
        let mr = computer.register(&mut ports, memory, Access::LOCAL_WRITE).unwrap();
        let sge = Sge { mr, offset: 0, length: 64 };
        let sum = Computation::Reduce(Reduction::new(DataType::F32, ReduceOp::Sum));
        let begin = |computer: &mut Computer, ports: &Ports| match computer
            .begin(ports, Nanos::ZERO, sum, sge, &[sge, sge])
            .unwrap()
        {
            ByDevice::Begun(ticket) => Some(ticket),
            _ => None,
        };
        let first = begin(&mut computer, &ports).unwrap();
        device.fail_next(Submission::Computation);
        let second = begin(&mut computer, &ports).unwrap();
        let third = begin(&mut computer, &ports).unwrap();
        assert!(!computer.is_past(first) && computer.newest() == third);
        computer.poll(Nanos::ZERO);
        assert!(computer.is_past(third));
        assert!(computer.has_ended(third).unwrap() && computer.has_ended(first).unwrap());
        computer.has_ended(second).unwrap_err();
        let device = computer.device.as_ref().unwrap();
        assert!(device.failed.is_empty(), "{:?}", device.failed);

        computer.deregister(&mut ports, || Nanos::ZERO, mr).unwrap();
        assert!(begin(&mut computer, &ports).is_none(), "its memory is not known any more");
    }
}
