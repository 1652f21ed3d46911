//! The ports of a process, its rails, with a context for each. Operations on memory use the first; the other contexts have
//! the same memory registered at the same addresses, with their own keys.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::time::Duration;

use ferroce::driver::MemoryKind;
use ferroce::driver::gpu::Device;
use ferroce::{Access, Context, Memory, Mr, Nanos, Pd, RKey, Sge};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::warn;

use crate::Error;
use crate::control::{Control, Envelope};
use crate::memory;

/// The most rails of a process.
pub const MAX_RAILS: usize = 8;

/// The keys of a region, by rail.
pub(crate) type Keys = [RKey; MAX_RAILS];

/// The ports of a process. They dereference to the context of the first.
pub(crate) struct Ports {
    first: Port,
    others: Vec<Port>,
}

/// A port, with its resources.
pub(crate) struct Port {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    /// For control messages.
    pub(crate) control: Control,
    /// For each region of the first context, the region of this one.
    twins: HashMap<Mr, Mr>,
    is_gone: bool,
}

impl Deref for Ports {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.first.context
    }
}

impl DerefMut for Ports {
    fn deref_mut(&mut self) -> &mut Context {
        &mut self.first.context
    }
}

impl Port {
    /// The next control message received.
    pub(crate) fn next_message(&mut self) -> Result<Option<Envelope>, Error> {
        if self.is_gone {
            return Ok(None);
        }
        self.control.next(&mut self.context)
    }

    /// The name of its device.
    pub(crate) fn device(&self) -> String {
        self.context.metrics().label("device").unwrap_or_default().to_owned()
    }

    /// It neither sends nor receives any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone
    }

    fn new(mut context: Context) -> Result<Port, Error> {
        let pd = context.alloc_pd()?;
        let control = Control::new(&mut context, pd)?;
        Ok(Port { context, pd, control, twins: HashMap::new(), is_gone: false })
    }
}

impl Ports {
    pub(crate) fn new(first: Context) -> Result<Ports, Error> {
        Ok(Ports { first: Port::new(first)?, others: Vec::new() })
    }

    /// Adds a port.
    pub(crate) fn add(&mut self, context: Context) -> Result<(), Error> {
        self.others.push(Port::new(context)?);
        Ok(())
    }

    /// The number of ports.
    pub(crate) fn count(&self) -> usize {
        1 + self.others.len()
    }

    /// All ports, the first one first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Port> {
        std::iter::once(&self.first).chain(&self.others)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Port> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// The port of a rail below [`count`](Ports::count).
    pub(crate) fn of(&self, rail: usize) -> &Port {
        if rail == 0 { &self.first } else { &self.others[rail - 1] }
    }

    /// The port of a rail, mutable.
    pub(crate) fn of_mut(&mut self, rail: usize) -> &mut Port {
        if rail == 0 { &mut self.first } else { &mut self.others[rail - 1] }
    }

    /// The protection domain of the first context.
    pub(crate) fn pd(&self) -> Pd {
        self.first.pd
    }

    /// An SGE for the context of a rail.
    pub(crate) fn sge(&self, rail: usize, sge: Sge) -> Result<Sge, Error> {
        Ok(Sge { mr: self.twin(rail, sge.mr)?, ..sge })
    }

    fn twin(&self, rail: usize, mr: Mr) -> Result<Mr, Error> {
        match rail {
            0 => Ok(mr),
            rail => {
                self.of(rail).twins.get(&mr).copied().ok_or(Error::InvalidHandle { what: "region of a rail" })
            }
        }
    }

    /// The address of a region, the same on all rails, and its keys.
    pub(crate) fn keys(&self, mr: Mr) -> Result<(u64, Keys), Error> {
        let own = self.remote(mr)?;
        let mut keys = [RKey::new(0); MAX_RAILS];
        keys[0] = own.rkey;
        for ((rail, port), key) in (0..).zip(self.all()).zip(&mut keys).skip(1) {
            *key = port.context.remote(self.twin(rail, mr)?)?.rkey;
        }
        Ok((own.addr, keys))
    }

    /// Zeroed memory that all rails can access: of the device if there is one.
    pub(crate) fn allocate(&self, device: Option<&dyn Device>, bytes: usize) -> Result<Memory, Error> {
        match device {
            None if !self.others.is_empty() => {
                Memory::shared(bytes).map_err(|source| Error::Memory { bytes, source })
            }
            device => memory::allocate(device, bytes),
        }
    }

    /// Registers memory with all contexts.
    pub(crate) fn register(&mut self, memory: Memory, access: Access) -> Result<Mr, Error> {
        if memory.kind() == MemoryKind::Owned && !self.others.is_empty() {
            let expected = "memory that the contexts of several rails can have: Memory::shared, or Collectives::allocate";
            return Err(Error::invalid("memory", "owned", expected));
        }
        let shares: Result<Vec<Memory>, _> = self.others.iter().map(|_| memory.share()).collect();
        let shares =
            shares.map_err(|problem| Error::invalid("memory", problem, "memory for several contexts"))?;
        let pd = self.first.pd;
        let mr = memory::register(self, pd, memory, access)?;
        let address = self.remote(mr)?.addr;
        let mut result = Ok(mr);
        for (port, share) in self.others.iter_mut().zip(shares) {
            match port.context.register_at(port.pd, share, access, address) {
                Ok(twin) => _ = port.twins.insert(mr, twin),
                Err(error) => {
                    result = Err(ferroce::Error::from(error).into());
                    break;
                }
            }
        }
        if result.is_err() {
            for Port { context, twins, .. } in &mut self.others {
                twins.remove(&mr).map_or(Ok(()), |twin| context.deregister(twin).map(drop))?;
            }
            self.first.context.deregister(mr)?;
        }
        result
    }

    /// Ends a registration after the copies of a device and the ports' sends from the memory.
    pub(crate) fn deregister(&mut self, mut now: impl FnMut() -> Nanos, mr: Mr) -> Result<Memory, Error> {
        for Port { context, twins, .. } in &mut self.others {
            if let Some(twin) = twins.get(&mr).copied() {
                memory::deregister(context, &mut now, twin)?;
                twins.remove(&mr);
            }
        }
        memory::deregister(&mut self.first.context, now, mr)
    }

    /// Polls each context once. A port that is gone is skipped while there is another one.
    pub(crate) fn poll(&mut self, now: Nanos) -> Result<usize, Error> {
        if self.others.is_empty() {
            return Ok(self.first.context.poll(now)?);
        }
        let (mut frames, mut living, mut last) = (0, 0, Error::Ended);
        for (rail, port) in self.all_mut().enumerate().filter(|(_, port)| !port.is_gone) {
            match port.context.poll(now) {
                Ok(more) => (frames, living) = (frames + more, living + 1),
                Err(error) => {
                    warn!(rail, "the port is gone: {error}");
                    port.is_gone = true;
                    last = error.into();
                }
            }
        }
        if living == 0 { Err(last) } else { Ok(frames) }
    }

    /// Blocks until something may have arrived at one of them, something is due, or `timeout` has passed.
    pub(crate) fn wait(&mut self, now: Nanos, timeout: Duration) -> Result<(), Error> {
        let living = self.all().filter(|port| !port.is_gone);
        let quiet = living.filter_map(|port| port.context.quiet_for(now)).fold(timeout, Duration::min);
        if self.others.is_empty() {
            return Ok(self.first.context.wait(quiet)?);
        }
        let mut waiting = Vec::with_capacity(MAX_RAILS);
        for port in self.all_mut().filter(|port| !port.is_gone) {
            if !port.context.prepare_wait(now)? {
                return Ok(());
            }
            waiting.push(&port.context);
        }
        let mut descriptors: Vec<PollFd<'_>> =
            waiting.iter().map(|context| PollFd::from_borrowed_fd(context.as_fd(), PollFlags::IN)).collect();
        match poll(&mut descriptors, Timespec::try_from(quiet).ok().as_ref()) {
            // A signal: the caller checks its events, and waits again.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(Error::Verbs(ferroce::Error::Thread(error.into()))),
        }
    }

    /// When something is due without an event.
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        let living = self.all().filter(|port| !port.is_gone);
        living.filter_map(|port| port.context.next_timeout()).min()
    }

    /// Whether control messages were sent since the last [`take_sent`](Ports::take_sent).
    pub(crate) fn has_sent(&self) -> bool {
        self.all().any(|port| port.control.has_sent())
    }

    /// Whether control messages were sent since the last call; the next poll sends them.
    pub(crate) fn take_sent(&mut self) -> bool {
        self.all_mut().fold(false, |sent, port| port.control.take_sent() | sent)
    }

    /// Frees all resources, and returns the first context. The others are closed.
    pub(crate) fn free(self, mut now: impl FnMut() -> Nanos) -> Result<Context, Error> {
        let Ports { first, others } = self;
        for Port { mut context, pd, control, .. } in others {
            control.destroy(&mut context, &mut now)?;
            context.dealloc_pd(pd)?;
        }
        let Port { mut context, pd, control, .. } = first;
        control.destroy(&mut context, now)?;
        context.dealloc_pd(pd)?;
        Ok(context)
    }
}
