//! What this process shares with the others of its host, and what it has mapped of theirs.

use std::collections::HashMap;

use ferroce::driver::segment::{Segment, SegmentError, Ticket};
use ferroce::{Access, Context, Memory, Mr, Nanos, Pd};

use super::board::{Board, Shown};
use crate::memory::{deregister, register};

/// Memory that the processes of a host share with this one.
#[derive(Default)]
pub(crate) struct Host {
    own: Option<(Board, Mr)>,
    /// Others' boards, by their nonces.
    boards: HashMap<u64, (Board, Mr)>,
    /// Others' segments that are mapped here, by their nonces.
    foreign: HashMap<u64, Foreign>,
    /// How many segments of each board are known to be no more.
    retired: HashMap<u64, u64>,
    /// Segments of this process, by the regions that they are registered as.
    pub(super) segments: HashMap<Mr, Segment>,
}

/// Another process's segment.
struct Foreign {
    mr: Mr,
    length: u64,
    /// The nonce of its board.
    board: u64,
}

impl Host {
    /// This process's board, made if there is none.
    pub(crate) fn board(&mut self, context: &mut Context, pd: Pd) -> Result<Ticket, crate::Error> {
        if self.own.is_none() {
            let board = Board::create().map_err(shared)?;
            let mr = register(context, pd, board.0.memory(), Access::LOCAL_WRITE)?;
            self.own = Some((board, mr));
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
        if !is_own && !self.boards.contains_key(&ticket.nonce) {
            let board = Board::open(ticket).map_err(shared)?;
            let mr = register(context, pd, board.0.memory(), Access::LOCAL_WRITE)?;
            self.boards.insert(ticket.nonce, (board, mr));
        }
        Ok(())
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

    /// A region is no more: others give up what they have mapped of it with the next operation.
    pub(crate) fn forget(&mut self, mr: Mr) {
        if let (Some(segment), Some((board, _))) = (self.segments.remove(&mr), &self.own) {
            board.retire(segment.ticket().nonce);
        }
    }

    /// Gives up the segments of a process that are no more there.
    pub(super) fn give_up(&mut self, context: &mut Context, board: u64) -> Result<(), crate::Error> {
        let Some((shown, _)) = self.get(board) else { return Ok(()) };
        let (now, since) = (shown.retired(), self.retired.get(&board).copied().unwrap_or(0));
        if now == since {
            return Ok(());
        }
        let is_gone =
            |nonce: u64, foreign: &Foreign| foreign.board == board && shown.has_retired(nonce, since);
        let gone: Vec<u64> =
            self.foreign.iter().filter(|(nonce, of)| is_gone(**nonce, of)).map(|(nonce, _)| *nonce).collect();
        for nonce in gone {
            if let Some(foreign) = self.foreign.remove(&nonce) {
                context.deregister(foreign.mr)?;
            }
        }
        self.retired.insert(board, now);
        Ok(())
    }

    pub(crate) fn free(
        self,
        context: &mut Context,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        let boards = self.boards.into_values().chain(self.own).map(|(_, mr)| mr);
        for mr in boards.chain(self.foreign.into_values().map(|foreign| foreign.mr)) {
            deregister(context, &mut now, mr)?;
        }
        Ok(())
    }

    /// This process sleeps, unless something was shown meanwhile.
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

    pub(super) fn get(&self, nonce: u64) -> Option<&(Board, Mr)> {
        let own = self.own.as_ref().filter(|(board, _)| board.0.ticket().nonce == nonce);
        own.or_else(|| self.boards.get(&nonce))
    }

    pub(super) fn show(&self, place: Option<(Mr, u64)>) -> Option<Shown> {
        let (mr, offset) = place?;
        let Ticket { fd, length, nonce, .. } = self.segments.get(&mr)?.ticket();
        Some(Shown { fd, length, nonce, offset })
    }

    /// Where elements of another rank are here, mapped if they were not.
    pub(super) fn map(
        &mut self,
        context: &mut Context,
        pd: Pd,
        of: &Ticket,
        shown: &Shown,
        bytes: u64,
    ) -> Result<(Mr, u64), String> {
        let end = shown.offset.checked_add(bytes).filter(|end| *end <= shown.length);
        if end.is_none() {
            return Err(format!(
                "{bytes} bytes from byte {} on of a segment of {}",
                shown.offset, shown.length
            ));
        }
        if let Some(Foreign { mr, length, .. }) = self.foreign.get(&shown.nonce) {
            return if *length == shown.length {
                Ok((*mr, shown.offset))
            } else {
                Err("a segment of two lengths".to_owned())
            };
        }
        let ticket = Ticket { fd: shown.fd, length: shown.length, nonce: shown.nonce, ..*of };
        let segment = Segment::open(&ticket).map_err(|error| error.to_string())?;
        let mr = register(context, pd, segment.memory(), Access::LOCAL_WRITE)
            .map_err(|error| error.to_string())?;
        let foreign = Foreign { mr, length: shown.length, board: of.nonce };
        self.foreign.insert(shown.nonce, foreign);
        Ok((mr, shown.offset))
    }
}

fn shared(error: SegmentError) -> crate::Error {
    crate::Error::Shared { reason: error.to_string() }
}
