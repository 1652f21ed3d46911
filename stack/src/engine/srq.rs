//! Receives shared by several queue pairs (docs/protocol.md §6).

use crate::engine::rq::ReceiveQueue;
use crate::verbs::{Pd, SrqAttributes, SrqConfig};

pub(crate) struct SharedReceiveQueue {
    pub(crate) pd: Pd,
    pub(crate) max_sge: u8,
    pub(crate) queue: ReceiveQueue,
    /// Fewer receives than this raise an event, once; 0 disables it.
    limit: u32,
    /// Queue pairs that use it; it can't be destroyed before them.
    pub(crate) users: u32,
}

impl SharedReceiveQueue {
    pub(crate) fn new(config: &SrqConfig, queue: ReceiveQueue) -> SharedReceiveQueue {
        SharedReceiveQueue { pd: config.pd, max_sge: config.max_sge, queue, limit: 0, users: 0 }
    }

    pub(crate) fn arm(&mut self, limit: u32) {
        self.limit = limit;
    }

    pub(crate) fn attributes(&self) -> SrqAttributes {
        SrqAttributes { depth: self.queue.depth(), posted: self.queue.len(), limit: self.limit }
    }

    /// Whether the limit has been reached, which disables it.
    pub(crate) fn trip(&mut self) -> bool {
        let tripped = self.queue.len() < self.limit;
        if tripped {
            self.limit = 0;
        }
        tripped
    }
}
