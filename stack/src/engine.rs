use ferroce_wire::{NetworkHeader, Opcode, PKEY_DEFAULT, Packet, Qpn, Service};
use rand_chacha::ChaCha20Rng;

use crate::config::Config;
use crate::counters::Counter;
use crate::key_table::KeyTable;
use crate::qp::{QpConfig, QueuePair};
use crate::shared::Shared;
use crate::slab::{Qp, Slab};

/// Frames of one queue pair before the next has its turn.
const QUANTUM: u32 = 32;

/// The protocol, without IO and without a clock: frames in, frames out, timers.
pub(crate) struct Engine {
    pub(crate) qps: Slab<QueuePair>,
    qpns: KeyTable,
    pub(crate) shared: Shared,
    roce_v1: bool,
    /// Frames that the queue pair at the front of the active list has sent in this turn.
    turn: u32,
}

impl Engine {
    pub(crate) fn new(config: &Config) -> Engine {
        Engine {
            qps: Slab::new(config.max_qps),
            qpns: KeyTable::new(config.max_qps, 24),
            shared: Shared::new(config),
            roce_v1: config.roce_v1,
            turn: 0,
        }
    }

    pub(crate) fn create_qp(&mut self, rng: &mut ChaCha20Rng, config: &QpConfig) -> Option<Qp> {
        let Engine { qps, qpns, .. } = self;
        let handle = qps.insert_with(|handle| {
            let qpn = Qpn::new(qpns.insert(rng, handle.index, |n| Qpn::new(n).is_ordinary()));
            QueuePair::new(handle, qpn, config)
        });
        handle.map(Qp)
    }

    pub(crate) fn destroy_qp(&mut self, qp: Qp) {
        if let Some(mut removed) = self.qps.remove(qp.0) {
            removed.reset(&mut self.shared);
            self.qpns.retire(removed.qpn.value());
            self.shared.active.retain(|index| *index != qp.0.index);
            self.turn = 0;
        }
    }

    /// The receive phase: takes one frame. It never transmits; it only marks what is owed.
    pub(crate) fn receive(&mut self, frame: &[u8]) {
        let packet = match Packet::parse(frame) {
            Ok(packet) => packet,
            Err(error) => return self.shared.count(Counter::of(&error)),
        };
        self.shared.count(Counter::RcvdPkts);
        if let Err(reason) = self.dispatch(&packet) {
            self.shared.count(reason);
        }
    }

    /// Finds the queue pair, and sees that the packet is its peer's before any state changes.
    fn dispatch(&mut self, packet: &Packet<'_>) -> Result<(), Counter> {
        if packet.network.header == NetworkHeader::Grh && !self.roce_v1 {
            return Err(Counter::RxRoceV1Off);
        }
        let index = self.qpns.get(packet.bth.dest_qpn().value()).ok_or(Counter::RxUnknownQp)?;
        let qp = self.qps.at_mut(index).ok_or(Counter::RxUnknownQp)?;
        let connection = qp.connection.as_ref().ok_or(Counter::RxWrongState)?;
        if !connection.admits(&packet.network) {
            return Err(Counter::RxWrongAddress);
        }
        if !PKEY_DEFAULT.admits(packet.bth.pkey()) {
            return Err(Counter::RxPkeyMismatch);
        }
        if packet.opcode == Opcode::CNP {
            return Err(Counter::RxCnpIgnored);
        }
        if packet.opcode.service() != qp.service {
            return Err(Counter::RxWrongService);
        }
        match qp.service {
            Service::Rc if packet.opcode.is_request() => qp.receive_request(&mut self.shared, packet),
            Service::Rc => qp.receive_response(&mut self.shared, packet),
            Service::Uc | Service::Ud | Service::Cnp => return Err(Counter::RxWrongService),
        }
        qp.settle(&mut self.shared);
        Ok(())
    }

    /// The timers that are due.
    pub(crate) fn fire_timers(&mut self) {
        while let Some(index) = self.shared.timers.pop(self.shared.now) {
            if let Some(qp) = self.qps.at_mut(index) {
                qp.on_timer(&mut self.shared);
            }
        }
    }

    /// The transmit phase: writes one frame of the queue pair whose turn it is.
    pub(crate) fn transmit(&mut self, buffer: &mut [u8]) -> Option<usize> {
        while let Some(index) = self.shared.active.front().copied() {
            if self.turn == QUANTUM {
                self.turn = 0;
                self.shared.active.rotate_left(1);
                continue;
            }
            let Some(qp) = self.qps.at_mut(index) else {
                self.shared.active.pop_front();
                continue;
            };
            if let Some(length) = qp.transmit(&mut self.shared, buffer) {
                self.turn += 1;
                return Some(length);
            }
            qp.scheduled = false;
            self.turn = 0;
            self.shared.active.pop_front();
        }
        None
    }
}
