//! The memory that this process shares with the others of its host, and the memory of theirs that it has mapped.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ferroce::driver::segment::{Segment, SegmentError, Ticket};
use ferroce::{Access, Context, Memory, Mr, Nanos, Pd};

use super::board::{Board, Shown};
use crate::memory::{deregister, register};

/// Memory shared with the processes of this host.
#[derive(Default)]
pub(crate) struct Host {
    own: Option<(Arc<Board>, Mr)>,
    /// Other processes, by the nonces of their boards.
    neighbours: HashMap<u64, Neighbour>,
    /// Segments of this process, by their regions.
    segments: HashMap<Mr, Segment>,
}

/// Another process.
struct Neighbour {
    board: Arc<Board>,
    mr: Mr,
    /// Its mapped segments, by their nonces: the region, and the length.
    segments: HashMap<u64, (Mr, u64)>,
    /// The number of its segments known to be retired.
    retired: u64,
}

/// Why another rank's elements can't be accessed.
pub(super) enum Unreachable {
    /// Its published data is invalid.
    Nonsense(String),
    /// This process can't map or register more memory.
    Here(String),
    /// Its process has ended.
    Gone,
}

impl Host {
    /// This process's board, created if necessary.
    pub(crate) fn board(&mut self, context: &mut Context, pd: Pd) -> Result<Ticket, crate::Error> {
        if self.own.is_none() {
            let board = Board::create().map_err(shared)?;
            let mr = register(context, pd, board.0.memory(), Access::LOCAL_WRITE)?;
            self.own = Some((Arc::new(board), mr));
        }
        Ok(self.own.as_ref().map(|(board, _)| board.0.ticket()).unwrap_or_default())
    }

    /// Maps the board of another process.
    pub(crate) fn open(
        &mut self,
        context: &mut Context,
        pd: Pd,
        ticket: &Ticket,
    ) -> Result<(), crate::Error> {
        let is_own = self.own.as_ref().is_some_and(|(board, _)| board.0.ticket() == *ticket);
        if !is_own && !self.neighbours.contains_key(&ticket.nonce) {
            let board = Arc::new(Board::open(ticket).map_err(shared)?);
            let mr = register(context, pd, board.0.memory(), Access::LOCAL_WRITE)?;
            let retired = board.retired();
            self.neighbours.insert(ticket.nonce, Neighbour { board, mr, segments: HashMap::new(), retired });
        }
        Ok(())
    }

    /// The board of this process, or one that was opened, and its region.
    pub(super) fn get(&self, nonce: u64) -> Option<(&Arc<Board>, Mr)> {
        let own = self.own.as_ref().filter(|(board, _)| board.0.ticket().nonce == nonce);
        own.map(|(board, mr)| (board, *mr))
            .or_else(|| self.neighbours.get(&nonce).map(|neighbour| (&neighbour.board, neighbour.mr)))
    }

    /// Memory that others can map, to be registered and then [kept](Host::keep).
    pub(crate) fn allocate(bytes: usize) -> Result<(Segment, Memory), crate::Error> {
        let segment = Segment::create(bytes.max(1)).map_err(shared)?;
        let memory = segment.memory();
        Ok((segment, memory))
    }

    pub(crate) fn keep(&mut self, mr: Mr, segment: Segment) {
        self.segments.insert(mr, segment);
    }

    /// A region no longer exists: others unmap it with the next operation.
    pub(crate) fn forget(&mut self, mr: Mr) {
        if let (Some(segment), Some((board, _))) = (self.segments.remove(&mr), &self.own) {
            board.retire(segment.ticket().nonce);
        }
    }

    /// Unmaps the retired segments of a process.
    pub(super) fn give_up(&mut self, context: &mut Context, board: u64) -> Result<(), crate::Error> {
        let Some(Neighbour { board, segments, retired, .. }) = self.neighbours.get_mut(&board) else {
            return Ok(());
        };
        let (now, since) = (board.retired(), *retired);
        if now != since {
            for (_, (mr, _)) in segments.extract_if(|nonce, _| board.has_retired(*nonce, since)) {
                context.deregister(mr)?;
            }
            *retired = now;
        }
        Ok(())
    }

    /// Unmaps processes that have no rank in any communicator.
    pub(super) fn prune(
        &mut self,
        context: &mut Context,
        now: &mut impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        let is_alone = |_: &u64, neighbour: &mut Neighbour| Arc::strong_count(&neighbour.board) == 1;
        for (_, neighbour) in self.neighbours.extract_if(is_alone) {
            neighbour.free(context, now)?;
        }
        Ok(())
    }

    pub(crate) fn free(
        self,
        context: &mut Context,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        for neighbour in self.neighbours.into_values() {
            neighbour.free(context, &mut now)?;
        }
        if let Some((_, mr)) = self.own {
            deregister(context, &mut now, mr)?;
        }
        Ok(())
    }

    /// This process sleeps, unless something was published meanwhile.
    pub(crate) fn sleep(&self) {
        if let Some((board, _)) = &self.own {
            board.sleep();
        }
    }

    pub(crate) fn rise(&self) {
        if let Some((board, _)) = &self.own {
            board.rise();
        }
    }

    pub(super) fn show(&self, (mr, offset): (Mr, u64)) -> Option<Shown> {
        let Ticket { fd, length, nonce, .. } = self.segments.get(&mr)?.ticket();
        Some(Shown { fd, length, nonce, offset })
    }

    /// The local region of a segment of another rank's process, mapped if necessary.
    pub(super) fn map(
        &mut self,
        context: &mut Context,
        pd: Pd,
        of: &Ticket,
        shown: &Shown,
    ) -> Result<Mr, Unreachable> {
        let neighbour = self.neighbours.get_mut(&of.nonce);
        let neighbour =
            neighbour.ok_or_else(|| Unreachable::Nonsense("a segment that no rank owns".to_owned()))?;
        match neighbour.segments.get(&shown.nonce) {
            Some((mr, length)) if *length == shown.length => Ok(*mr),
            Some(_) => Err(Unreachable::Nonsense("a segment of two lengths".to_owned())),
            None => {
                let here =
                    |error: &dyn std::fmt::Display| Unreachable::Here(format!("mapping its memory: {error}"));
                let ticket = Ticket { fd: shown.fd, length: shown.length, nonce: shown.nonce, ..*of };
                let segment = match Segment::open(&ticket) {
                    Ok(segment) => segment,
                    Err(_) if !Path::new(&format!("/proc/{}", of.pid)).exists() => {
                        return Err(Unreachable::Gone);
                    }
                    Err(error) => return Err(here(&error)),
                };
                let mr = register(context, pd, segment.memory(), Access::LOCAL_WRITE)
                    .map_err(|error| here(&error))?;
                neighbour.segments.insert(shown.nonce, (mr, shown.length));
                Ok(mr)
            }
        }
    }
}

impl Neighbour {
    fn free(self, context: &mut Context, now: &mut impl FnMut() -> Nanos) -> Result<(), crate::Error> {
        for mr in self.segments.into_values().map(|(mr, _)| mr).chain([self.mr]) {
            deregister(context, &mut *now, mr)?;
        }
        Ok(())
    }
}

fn shared(error: SegmentError) -> crate::Error {
    crate::Error::Shared { reason: error.to_string() }
}
