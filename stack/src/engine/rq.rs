use crate::engine::mr::MemoryRegions;
use crate::verbs::{Error, MAX_MESSAGE, Mr, ReceiveWorkRequest, Sge};

#[derive(Clone, Copy, Default)]
struct PostedReceive {
    wr_id: u64,
    sges: u8,
    length: u32,
}

/// Posted receive WRs, the oldest first. The oldest stays at the head during its message.
pub(crate) struct ReceiveQueue {
    posted: Box<[PostedReceive]>,
    sges: Box<[Sge]>,
    max_sge: usize,
    head: u32,
    tail: u32,
}

/// The oldest receive WR.
#[derive(Clone, Copy)]
pub(crate) struct Receive<'a> {
    pub(crate) wr_id: u64,
    pub(crate) sges: &'a [Sge],
    /// The number of bytes that fit.
    pub(crate) length: u32,
}

impl ReceiveQueue {
    /// At least `depth` receive WRs of up to `max_sge` pieces.
    pub(crate) fn new(depth: u32, max_sge: u8, filler: Mr) -> ReceiveQueue {
        let depth = depth.next_power_of_two() as usize;
        let max_sge = usize::from(max_sge);
        ReceiveQueue {
            posted: vec![PostedReceive::default(); depth].into_boxed_slice(),
            sges: vec![Sge { mr: filler, offset: 0, length: 0 }; depth * max_sge].into_boxed_slice(),
            max_sge,
            head: 0,
            tail: 0,
        }
    }

    pub(crate) fn depth(&self) -> u32 {
        self.posted.len() as u32
    }

    /// The number of posted receives.
    pub(crate) fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.head)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Moves the oldest receive of `from` here, with its memory references. Returns whether there was one, and room for it.
    pub(crate) fn take(&mut self, from: &mut ReceiveQueue) -> bool {
        let Some(Receive { wr_id, sges, length }) = from.front() else { return false };
        if self.len() == self.depth() || sges.len() > self.max_sge {
            return false;
        }
        let index = self.index(self.tail);
        self.posted[index] = PostedReceive { wr_id, sges: sges.len() as u8, length };
        self.sges[index * self.max_sge..][..sges.len()].copy_from_slice(sges);
        self.tail = self.tail.wrapping_add(1);
        from.head = from.head.wrapping_add(1);
        true
    }

    pub(crate) fn post(&mut self, wr: &ReceiveWorkRequest<'_>, mrs: &mut MemoryRegions) -> Result<(), Error> {
        if self.len() == self.depth() {
            return Err(Error::QueueFull { queue: "receive", depth: self.depth() });
        }
        let length = total_length(wr.sges, self.max_sge)?;
        mrs.pin(wr.sges)?;
        let index = self.index(self.tail);
        self.posted[index] = PostedReceive { wr_id: wr.wr_id, sges: wr.sges.len() as u8, length };
        self.sges[index * self.max_sge..][..wr.sges.len()].copy_from_slice(wr.sges);
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    pub(crate) fn front(&self) -> Option<Receive<'_>> {
        if self.is_empty() {
            return None;
        }
        let index = self.index(self.head);
        let PostedReceive { wr_id, sges, length } = self.posted[index];
        let sges = &self.sges[index * self.max_sge..][..usize::from(sges)];
        Some(Receive { wr_id, sges, length })
    }

    /// Removes the oldest and unpins its memory. Returns its `wr_id`.
    pub(crate) fn pop(&mut self, mrs: &mut MemoryRegions) -> Option<u64> {
        let Receive { wr_id, sges, .. } = self.front()?;
        mrs.unpin(sges);
        self.head = self.head.wrapping_add(1);
        Some(wr_id)
    }

    fn index(&self, counter: u32) -> usize {
        counter as usize & (self.posted.len() - 1)
    }
}

/// The length of a list of pieces, if the list is short enough and the sum is a valid message length.
#[inline]
pub(crate) fn total_length(sges: &[Sge], max_sge: usize) -> Result<u32, Error> {
    if sges.len() > max_sge {
        return Err(Error::invalid(
            "sges",
            sges.len(),
            format!("at most {max_sge} pieces, as the queue was created"),
        ));
    }
    let total: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
    if total > u64::from(MAX_MESSAGE) {
        return Err(Error::invalid("length", total, format!("at most {MAX_MESSAGE} bytes a message")));
    }
    Ok(total as u32)
}
