//! The selection of packets by `--qp`.

use std::collections::{HashMap, HashSet};

use ferroce_wire::{Gid, Qpn};

use super::cm::CmFields;
use super::record::{IcrcVerdict, Record};

/// The named queue pairs, and their peers as far as the connection manager's messages show them.
#[derive(Default)]
pub(super) struct QueuePairs {
    named: Vec<u32>,
    /// By address and communication ID of the active end: the passive end's address, and the active end's queue pair.
    asked: HashMap<(Gid, u32), (Gid, u32)>,
    /// Packets of peers of a named queue pair: source, destination, and destination queue pair.
    flows: HashSet<(Gid, Gid, u32)>,
    /// Connections of a named queue pair, by address and communication ID of an end.
    connections: HashSet<(Gid, u32)>,
}

/// The most connections that are kept; above it, all are forgotten.
const MOST: usize = 1 << 16;

impl QueuePairs {
    pub(super) fn new(named: &[Qpn]) -> QueuePairs {
        QueuePairs { named: named.iter().map(|qpn| qpn.value()).collect(), ..QueuePairs::default() }
    }

    /// Whether a packet belongs to a named queue pair: as its destination, or as its source according to the DETH or
    /// the connection manager. Also takes the connection manager's messages.
    pub(super) fn select(&mut self, record: &Record) -> bool {
        if self.named.is_empty() {
            return true;
        }
        let Some(bth) = &record.bth else { return false };
        let (source, destination) = (record.network.source, record.network.destination);
        let source_qp = record.extensions.deth.map(|deth| deth.source_qpn().value());
        let to = bth.dest_qpn().value();
        let is_of_connection = match record.cm.as_ref().filter(|_| record.icrc == IcrcVerdict::Ok) {
            Some(message) => self.learn(source, destination, message),
            None => false,
        };
        is_of_connection
            || self.named.contains(&to)
            || source_qp.is_some_and(|qp| self.named.contains(&qp))
            || self.flows.contains(&(source, destination, to))
    }

    /// Whether the message concerns a connection of a named queue pair.
    fn learn(&mut self, source: Gid, destination: Gid, message: &CmFields) -> bool {
        if self.asked.len().max(self.flows.len()).max(self.connections.len()) >= MOST {
            *self = QueuePairs { named: std::mem::take(&mut self.named), ..QueuePairs::default() };
        }
        let own = message.local_comm_id.map(|id| (source, id));
        let theirs = message.remote_comm_id.map(|id| (destination, id));
        let mut is_named = message.qpn.is_some_and(|qpn| self.named.contains(&qpn));
        match (message.own_qpn(), own, theirs) {
            (Some(qpn), Some(own), None) => drop(self.asked.insert(own, (destination, qpn))),
            (Some(qpn), _, Some(theirs)) => {
                if let Some((_, asking)) = self.asked.get(&theirs).filter(|(asked, _)| *asked == source) {
                    is_named |= self.named.contains(asking);
                    if is_named {
                        self.flows.insert((source, destination, *asking));
                        self.flows.insert((destination, source, qpn));
                    }
                }
            }
            _ => {}
        }
        let ids = || own.into_iter().chain(theirs);
        let is_known = ids().any(|id| self.connections.contains(&id));
        if is_named || is_known {
            self.connections.extend(ids());
        }
        is_named || is_known
    }
}
