//! Copies between a device's memory and staging.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Arc, PoisonError, Weak};

use arrayvec::ArrayVec;
use cl3::command_queue::{
    enqueue_map_buffer, enqueue_read_buffer, enqueue_unmap_mem_object, enqueue_write_buffer, finish, flush,
};
use cl3::event::{CL_COMPLETE, CL_EVENT_COMMAND_EXECUTION_STATUS, get_event_info, wait_for_events};
use cl3::info_type::InfoType;
use cl3::memory::{CL_MAP_READ, CL_MAP_WRITE, CL_MEM_READ_WRITE, CL_MEM_USE_HOST_PTR, create_buffer};

use super::OpenCl;
use super::buffer::Buffer;
use super::object::{Kind, Object};
use crate::Nanos;
use crate::gpu::{Failed, GpuError, MAX_PIECES, QUEUE_DEPTH, Queue, Span, Staging, Ticket, Tickets};
use crate::memory::Piece;

pub(super) struct CopyQueue {
    opencl: Arc<OpenCl>,
    commands: Object,
    staging: Arc<PinnedStaging>,
    copies: VecDeque<UnderWay>,
    last: Ticket,
    /// Reused storage for the events that a copy waits for.
    before: Vec<*mut c_void>,
}

// SAFETY: the contents of `before` are only used during a call.
unsafe impl Send for CopyQueue {}

/// The commands submitted under one ticket.
pub(super) struct UnderWay {
    pub(super) ticket: Ticket,
    /// One event per piece. Those at the front may have ended.
    pub(super) events: ArrayVec<Object, MAX_PIECES>,
    /// The number of events known to have ended.
    ended: usize,
    /// A refused call, or the error status of a command.
    failed: Option<(&'static str, i32)>,
    /// Kept until the commands have ended.
    _spans: ArrayVec<Span, MAX_PIECES>,
}

impl UnderWay {
    pub(super) fn new(ticket: Ticket, spans: ArrayVec<Span, MAX_PIECES>) -> UnderWay {
        UnderWay { ticket, events: ArrayVec::new(), ended: 0, failed: None, _spans: spans }
    }

    /// Records the result of a call. Returns whether the command was submitted.
    pub(super) fn submitted(&mut self, call: &'static str, event: Result<*mut c_void, i32>) -> bool {
        match event {
            // SAFETY: it was just created, and has no other owner.
            Ok(event) => self.events.push(unsafe { Object::owned(Kind::Event, event) }),
            Err(code) => self.failed = Some((call, code)),
        }
        self.failed.is_none()
    }

    /// Flushes the queue: commands do not start before. If that fails, the work has ended only when the whole queue has,
    /// because submitted commands may start nevertheless.
    pub(super) fn flush(&mut self, commands: &Object) {
        if let Err(code) = flush(commands.raw()) {
            self.failed = Some(("clFlush", code));
            end(commands);
        }
    }

    /// Whether all commands have ended.
    fn has_ended(&mut self, commands: &Object) -> bool {
        while let Some(event) = self.events.get(self.ended) {
            match get_event_info(event.raw(), CL_EVENT_COMMAND_EXECUTION_STATUS) {
                // A query is not a synchronisation point, a wait is (OpenCL 1.2, 5.9); it returns immediately.
                Ok(InfoType::Int(CL_COMPLETE)) => {
                    if let Err(code) = wait_for_events(&[event.raw()]) {
                        self.failed.get_or_insert(("clWaitForEvents", code));
                    }
                }
                Ok(InfoType::Int(code)) if code > 0 => return false,
                Ok(InfoType::Int(code)) => drop(self.failed.get_or_insert(("a command on it", code))),
                Ok(_) => return false,
                Err(code) => {
                    // The error does not tell whether the command has ended.
                    end(commands);
                    self.failed.get_or_insert(("clGetEventInfo", code));
                }
            }
            self.ended += 1;
        }
        true
    }
}

/// The ticket up to which all outstanding work, oldest first, has completed.
pub(super) fn done(
    (opencl, commands): (&OpenCl, &Object),
    under_way: &mut VecDeque<UnderWay>,
    last: Ticket,
) -> Result<Ticket, Failed> {
    while under_way.front_mut().is_some_and(|oldest| oldest.has_ended(commands))
        && let Some(ended) = under_way.pop_front()
    {
        if let Some((call, code)) = ended.failed {
            return Err(Failed::new(ended.ticket, opencl.failed(call)(code)));
        }
    }
    Ok(under_way.front().map_or(last, |oldest| Ticket(oldest.ticket.0 - 1)))
}

/// Waits for the end of all commands.
pub(super) fn end(commands: &Object) {
    if let Err(code) = finish(commands.raw()) {
        tracing::warn!("OpenCL: clFinish: {}", super::object::meaning(code));
    }
}

impl CopyQueue {
    pub(super) fn new(opencl: Arc<OpenCl>, staging: &Staging) -> Result<CopyQueue, GpuError> {
        let commands = opencl.commands_in_any_order()?;
        let staging = opencl.pinned(staging)?;
        Ok(CopyQueue {
            opencl,
            commands,
            staging,
            copies: VecDeque::with_capacity(QUEUE_DEPTH),
            last: Ticket::NONE,
            before: Vec::with_capacity(QUEUE_DEPTH * MAX_PIECES),
        })
    }

    fn submit(
        &mut self,
        pieces: &[Piece<'_>],
        at: usize,
        after: Ticket,
        submit: impl Fn(*mut c_void, &Transfer, &[*mut c_void]) -> (&'static str, Result<*mut c_void, i32>),
    ) -> Result<Ticket, GpuError> {
        let CopyQueue { opencl, commands, staging, copies, last, before } = self;
        if copies.len() == QUEUE_DEPTH {
            return Err(GpuError::Full { copies: QUEUE_DEPTH });
        }
        before.clear();
        let waits_for = copies.iter().take_while(|copy| copy.ticket <= after);
        before.extend(waits_for.flat_map(|copy| &copy.events).map(Object::raw));
        let spans: ArrayVec<Span, MAX_PIECES> = pieces.iter().map(Span::of).collect();
        let mut at = at;
        let transfers: ArrayVec<Transfer, MAX_PIECES> = spans
            .iter()
            .map(|span| {
                let staged = staging.staging.place(at, span.len).as_ptr().cast();
                at += span.len;
                let buffer = span.block::<Buffer>(&**opencl).object().raw();
                Transfer { buffer, offset: span.offset as usize, staged, len: span.len }
            })
            .collect();
        *last = last.next();
        let mut copy = UnderWay::new(*last, spans);
        for transfer in transfers.iter().filter(|transfer| transfer.len > 0) {
            let (call, event) = submit(commands.raw(), transfer, before);
            if !copy.submitted(call, event) {
                break;
            }
        }
        copy.flush(commands);
        copies.push_back(copy);
        Ok(*last)
    }
}

struct Transfer {
    buffer: *mut c_void,
    offset: usize,
    staged: *mut c_void,
    len: usize,
}

/// A list of events in OpenCL's form: an empty list has a null pointer.
pub(super) fn waiting_for(events: &[*mut c_void]) -> (u32, *const *mut c_void) {
    let first = if events.is_empty() { null() } else { events.as_ptr() };
    (events.len() as u32, first)
}

impl Queue for CopyQueue {
    fn gather(&mut self, _now: Nanos, from: &[Piece<'_>], at: usize) -> Result<Ticket, GpuError> {
        self.submit(from, at, Ticket::NONE, |commands, transfer, before| {
            let (Transfer { buffer, offset, staged, len }, (events, first)) = (transfer, waiting_for(before));
            // SAFETY: OpenCL checks the range in the buffer; the staging has that many bytes, to which no references exist,
            // and is kept until the copy has ended.
            let event =
                unsafe { enqueue_read_buffer(commands, *buffer, 0, *offset, *len, *staged, events, first) };
            ("clEnqueueReadBuffer", event)
        })
    }

    fn scatter(
        &mut self,
        _now: Nanos,
        at: usize,
        to: &[Piece<'_>],
        after: Ticket,
    ) -> Result<Ticket, GpuError> {
        self.submit(to, at, after, |commands, transfer, before| {
            let (Transfer { buffer, offset, staged, len }, (events, first)) = (transfer, waiting_for(before));
            // SAFETY: as in `gather`.
            let event =
                unsafe { enqueue_write_buffer(commands, *buffer, 0, *offset, *len, *staged, events, first) };
            ("clEnqueueWriteBuffer", event)
        })
    }
}

impl Tickets for CopyQueue {
    fn done(&mut self, _now: Nanos) -> Result<Ticket, Failed> {
        done((&self.opencl, &self.commands), &mut self.copies, self.last)
    }

    fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        (!self.copies.is_empty()).then_some(now)
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        end(&self.commands);
    }
}

/// Staging that OpenCL has mapped, so that its driver need not copy it once more. All queues share one: OpenCL leaves
/// commands on two buffers over the same bytes undefined.
#[derive(Debug)]
pub(super) struct PinnedStaging {
    commands: Object,
    buffer: Object,
    mapped: *mut c_void,
    staging: Staging,
}

impl PinnedStaging {
    fn new(opencl: &OpenCl, staging: &Staging) -> Result<PinnedStaging, GpuError> {
        let (first, len) = (staging.place(0, staging.len()).as_ptr().cast(), staging.len());
        // SAFETY: `len` bytes, which stay at their address until the buffer is released.
        let buffer =
            unsafe { create_buffer(opencl.context(), CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, len, first) };
        let buffer = buffer.map_err(opencl.failed("clCreateBuffer, of staging"))?;
        // SAFETY: it was just created, and has no other owner.
        let buffer = unsafe { Object::owned(Kind::Memory, buffer) };
        let commands = opencl.commands_in_order()?;
        let mut mapped = null_mut();
        // While the buffer is mapped, the host may access its bytes.
        // SAFETY: the whole buffer; the mapping is the staging itself.
        let event = unsafe {
            let flags = CL_MAP_READ | CL_MAP_WRITE;
            enqueue_map_buffer(commands.raw(), buffer.raw(), 1, flags, 0, len, &mut mapped, 0, null())
        };
        let event = event.map_err(opencl.failed("clEnqueueMapBuffer, of staging"))?;
        // SAFETY: it was just created, and has no other owner.
        drop(unsafe { Object::owned(Kind::Event, event) });
        Ok(PinnedStaging { commands, buffer, mapped, staging: staging.clone() })
    }
}

// SAFETY: the pointer is only passed back to OpenCL.
unsafe impl Send for PinnedStaging {}
// SAFETY: as above.
unsafe impl Sync for PinnedStaging {}

impl OpenCl {
    /// The mapped staging, mapped by this queue or an earlier one.
    fn pinned(&self, staging: &Staging) -> Result<Arc<PinnedStaging>, GpuError> {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.retain(|shown| shown.strong_count() > 0);
        let shown = pinned.iter().filter_map(Weak::upgrade);
        if let Some(shown) = shown.into_iter().find(|shown| shown.staging.is(staging)) {
            return Ok(shown);
        }
        let shown = Arc::new(PinnedStaging::new(self, staging)?);
        pinned.push(Arc::downgrade(&shown));
        Ok(shown)
    }
}

impl Drop for PinnedStaging {
    fn drop(&mut self) {
        // SAFETY: it was mapped by this queue, and is unmapped once, after all copies.
        let event = unsafe {
            enqueue_unmap_mem_object(self.commands.raw(), self.buffer.raw(), self.mapped, 0, null())
        };
        if let Ok(event) = event {
            // SAFETY: it was just created, and has no other owner.
            drop(unsafe { Object::owned(Kind::Event, event) });
        }
        end(&self.commands);
    }
}
