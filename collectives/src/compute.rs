//! Copies and reductions of memory of any kind: by the CPU in place, by a GPU in its own memory, or on a GPU's memory
//! by way of host memory.
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

/// What goes into a reduction.
pub(crate) type Operands = ArrayVec<Sge, MAX_SPANS>;

/// What computes.
#[derive(Default)]
pub(crate) struct Computer {
    /// Of each operand a block, and of the result.
    blocks: Vec<u8>,
    device: Option<DeviceReducer>,
}

/// A device that reduces its own memory.
struct DeviceReducer {
    device: Arc<dyn Device>,
    /// `None` if it computes nothing.
    reducer: Option<Box<dyn Reducer>>,
    /// The last that has begun.
    begun: Ticket,
    /// Everything up to it has ended.
    ended: Ticket,
    /// What of that has failed, and nobody has asked for so far: each operation asks for all that it began.
    failed: Vec<(Ticket, GpuError)>,
    /// The regions of its memory.
    regions: HashSet<Mr>,
    /// It has not computed something, and the log says why.
    has_refused: bool,
}

/// What a device makes of a computation.
pub(crate) enum ByDevice {
    /// It is none of its.
    No,
    /// It has as many as it takes: later.
    Later,
    /// It has begun.
    Begun(Ticket),
}

/// Bytes of a block of a device's memory that goes by way of the host: whole elements, and enough of them for the start of a copy to
/// cost little.
const BLOCK: usize = 256 << 10;
/// Bytes of one copy.
const LONGEST: usize = 1 << 30;

impl Computer {
    /// With a device that reduces its own memory: what it computes with is built here, for that takes long.
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

    /// Registers memory, and remembers which regions are the device's.
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

    /// Takes what the device has ended, also of operations that ask no more: it lets go of their memory, and has room for others.
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

    /// The last computation that the device has begun.
    pub(crate) fn newest(&self) -> Ticket {
        self.device.as_ref().map_or(Ticket::NONE, |own| own.begun)
    }

    /// Whether it has ended everything up to this one, well or not.
    pub(crate) fn is_past(&self, ticket: Ticket) -> bool {
        self.device.as_ref().is_none_or(|own| own.ended >= ticket)
    }

    /// That the device does not end what it has begun.
    pub(crate) fn hangs(&self, waited: Duration) -> Error {
        let device = self.device().map_or_else(|| "a device".to_owned(), |device| device.name().to_owned());
        let reason = format!("its copies and reductions have not ended for {waited:?}, and may still write to memory");
        Error::Gpu(GpuError::Call { device, call: "copies and reductions", reason })
    }

    /// Begins a computation by the device, if it can do it: of its own memory alone.
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

    /// When the device is to be asked again what has ended: now where it does not tell, never if nothing is under way.
    pub(crate) fn next_deadline(&self, now: Nanos) -> Nanos {
        let reducer = self.device.as_ref().and_then(|own| own.reducer.as_ref());
        reducer.and_then(|reducer| reducer.next_deadline(now)).unwrap_or(Nanos::NEVER)
    }

    /// Whether a computation by the device has ended, as of the last [`poll`](Computer::poll).
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

    /// What a device does not compute.
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

    /// Copies blocks of the sources to the host, and what `compute` makes of them to the target. The first block is the
    /// result's.
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

/// What came of it; `None` if the CPU does not reach the memory.
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

    /// Whoever asks for it, however late, and whatever else is taken from the device before.
    #[test]
    fn a_failure_stays_until_its_operation_asks() {
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
