//! State transitions of queue pairs, and the paths to their peers.

use ferroce_wire::{PathAddress, Qpn};

use super::Software;
use super::engine::Engine;
use super::next_hops::{Seeker, Wanted};
use crate::engine::ah::Hop;
use crate::engine::qp::Connection;
use crate::verbs::{AddressVector, Error, Qp, QpState, QpUpdate, Transition, UnreliablePath};

impl Software {
    pub(crate) fn modify_qp(&mut self, qp: Qp, transition: Transition) -> Result<(), Error> {
        if matches!(transition, Transition::Error | Transition::Reset) {
            self.send_owed(Some(qp));
        }
        let Engine { qps, shared, port, .. } = &mut self.engine;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        transition.check_service(queue_pair.service)?;
        match transition {
            Transition::Init { access } => queue_pair.init(access, port),
            Transition::InitDatagram { qkey } => queue_pair.init_datagram(qkey, port),
            Transition::ReadyToReceive(attributes) => {
                queue_pair.require_init()?;
                attributes.check()?;
                let (connection, hop) = self.connection(qp, &attributes.path())?;
                let (queue_pair, shared) = self.qp(qp)?;
                queue_pair.ready_to_receive(shared, &attributes, connection)?;
                self.await_next_hop(qp, &attributes.address, hop)
            }
            Transition::ReadyToReceiveUnreliable(path) => {
                queue_pair.require_init()?;
                let (connection, hop) = self.connection(qp, &path)?;
                self.qp(qp)?.0.ready_to_receive_unreliable(&path, connection)?;
                self.await_next_hop(qp, &path.address, hop)
            }
            Transition::ReadyToReceiveDatagrams => queue_pair.ready_to_receive_datagrams(),
            Transition::ReadyToSend(attributes) => queue_pair.ready_to_send(attributes),
            Transition::ReadyToSendUnreliable { sq_psn } => queue_pair.ready_to_send_unreliable(sq_psn),
            Transition::Drain => queue_pair.drain(shared),
            Transition::Resume => queue_pair.resume(shared),
            Transition::Update(update) => self.update(qp, &update),
            Transition::Error => {
                queue_pair.require("Error", "any state but RESET", &QpState::ALL_BUT_RESET)?;
                queue_pair.await_next_hop(shared, None);
                queue_pair.fail(shared);
                Ok(())
            }
            Transition::Reset => {
                queue_pair.reset(shared);
                Ok(())
            }
        }
    }

    fn update(&mut self, qp: Qp, update: &QpUpdate) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        queue_pair.check_update(update)?;
        let pkey = update.pkey_index.map(|index| self.engine.port.pkey(index)).transpose()?;
        let (queue_pair, _) = self.qp(qp)?;
        let moved = match (update.address, queue_pair.connection, queue_pair.responder.expected_psn()) {
            (Some(address), Some(Connection { path_mtu, dest_qpn, .. }), rq_psn) => {
                let path = UnreliablePath { address, path_mtu, dest_qpn, rq_psn };
                Some((address, self.connection(qp, &path)?))
            }
            _ => None,
        };
        let (queue_pair, shared) = self.qp(qp)?;
        queue_pair.update(shared, update, moved.map(|(_, (connection, _))| connection), pkey);
        moved.map_or(Ok(()), |(address, (_, hop))| self.await_next_hop(qp, &address, hop))
    }

    /// Nothing is sent on a new path before its next hop is resolved. A failure on the old path is cleared.
    fn await_next_hop(&mut self, qp: Qp, address: &AddressVector, hop: Hop) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        queue_pair.await_next_hop(shared, hop.ticket());
        shared.events.take_unreachable(qp.into());
        let wanted = Wanted::of(address, &self.engine.port);
        self.engine.next_hops.tell(wanted, hop, Seeker::Qp(qp));
        Ok(())
    }

    /// The checked connection of a queue pair along a path, and its next hop.
    fn connection(&mut self, qp: Qp, attributes: &UnreliablePath) -> Result<(Connection, Hop), Error> {
        let local = self.qp(qp)?.0.qpn;
        let UnreliablePath { address, path_mtu, dest_qpn, .. } = *attributes;
        if !dest_qpn.is_ordinary() {
            return Err(Error::invalid("dest_qpn", dest_qpn, "a QPN other than 0, 1 and 0xffffff"));
        }
        if address.gid.is_multicast() {
            return Err(Error::invalid("gid", address.gid, "the address of one peer, not a multicast group"));
        }
        let port = &self.engine.port;
        // The header of RoCE v1 is as long as IPv6, for any addresses.
        let is_v1 = port.gids.get(address.sgid_index).is_some_and(|entry| entry.roce_v1);
        let needed = path_mtu.required_l3_mtu(address.gid.is_ipv6() || is_v1);
        if needed > port.mtu {
            let (interface, mtu) = (port.interface.clone(), port.mtu);
            return Err(Error::PathMtu { path_mtu, needed, interface, mtu });
        }
        let (path, hop) = self.path(&address, local, dest_qpn)?;
        Ok((Connection::new(&path, self.engine.port.header(&path), path_mtu, dest_qpn), hop))
    }

    /// The headers of packets to `address`, and the state of the next hop. All checks that need no system call are first.
    pub(super) fn path(
        &mut self,
        address: &AddressVector,
        local: Qpn,
        remote: Qpn,
    ) -> Result<(PathAddress, Hop), Error> {
        let mut path = address.path(&self.engine.port, local, remote)?;
        if address.mac.is_some() || address.gid.is_multicast() {
            return Ok((path, Hop::Found(path.destination_mac)));
        }
        let wanted = Wanted::of(address, &self.engine.port);
        let hop = self.engine.next_hop(&mut *self.driver, wanted)?;
        if let Hop::Found(mac) = hop {
            path.destination_mac = mac;
        }
        Ok((path, hop))
    }
}
