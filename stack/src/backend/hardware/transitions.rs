//! State transitions of queue pairs.
//!
//! The kernel resolves the next hop of an address itself, inside `ibv_modify_qp`: a transition to RTR takes as long as ARP,
//! if the kernel's neighbour table has no entry.

use ferroce_driver::rnic::{Address, QueuePairChange};
use ferroce_wire::{Gid, PathMtu, Psn, Qpn};
use rustix::io::Errno;

use super::Hardware;
use super::memory::remote_rights;
use super::queue_pairs::HardwareQp;
use crate::verbs::{
    AddressVector, Error, Feature, Qp, QpState, QpUpdate, ReadyToReceive, ReadyToSend, Transition,
};

impl Hardware {
    pub(crate) fn modify_qp(&mut self, qp: Qp, transition: Transition) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        let service = queue_pair.qp_type.service();
        transition.check_service(service)?;
        let change = QueuePairChange::default();
        match transition {
            Transition::Init { access } => {
                self.init(qp, QueuePairChange { access: Some(remote_rights(access)), ..change })?;
                self.qp(qp)?.told.access = access;
                Ok(())
            }
            Transition::InitDatagram { qkey } => {
                self.init(qp, QueuePairChange { qkey: Some(qkey), ..change })?;
                self.qp(qp)?.told.qkey = qkey;
                Ok(())
            }
            Transition::ReadyToReceive(attributes) => {
                require_init(queue_pair)?;
                attributes.check()?;
                if attributes.selective_repeat {
                    return Err(Error::Unsupported(Feature::SelectiveRepeat));
                }
                let ReadyToReceive { max_dest_rd_atomic, min_rnr_timer, .. } = attributes;
                let path = attributes.path();
                let change = QueuePairChange {
                    max_dest_rd_atomic: Some(max_dest_rd_atomic),
                    min_rnr_timer: Some(min_rnr_timer.code()),
                    ..change
                };
                self.receive(qp, path.address, path.path_mtu, (path.dest_qpn, path.rq_psn), change)?;
                let told = &mut self.qp(qp)?.told;
                told.max_dest_rd_atomic = max_dest_rd_atomic;
                told.min_rnr_timer = Some(min_rnr_timer);
                Ok(())
            }
            Transition::ReadyToReceiveUnreliable(path) => {
                require_init(queue_pair)?;
                self.receive(qp, path.address, path.path_mtu, (path.dest_qpn, path.rq_psn), change)
            }
            Transition::ReadyToReceiveDatagrams => {
                require_init(queue_pair)?;
                self.change(qp, QpState::Rtr, change)
            }
            Transition::ReadyToSend(attributes) => {
                queue_pair.require("ReadyToSend", "RTR", &[QpState::Rtr])?;
                attributes.check()?;
                let ReadyToSend { sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic } = attributes;
                let change = QueuePairChange {
                    sq_psn: Some(sq_psn.value()),
                    timeout: Some(timeout),
                    retry_count: Some(retry_count),
                    rnr_retry: Some(rnr_retry),
                    max_rd_atomic: Some(max_rd_atomic),
                    ..change
                };
                self.change(qp, QpState::Rts, change)?;
                self.qp(qp)?.told.send = Some(attributes);
                Ok(())
            }
            Transition::ReadyToSendUnreliable { sq_psn } => {
                queue_pair.require("ReadyToSend", "RTR", &[QpState::Rtr])?;
                self.change(qp, QpState::Rts, QueuePairChange { sq_psn: Some(sq_psn.value()), ..change })
            }
            Transition::Drain => {
                queue_pair.require("Drain", "RTS", &[QpState::Rts])?;
                self.change(qp, QpState::Sqd, QueuePairChange { sqd_event: true, ..change })
            }
            Transition::Resume => {
                queue_pair.require("Resume", "SQD, drained, or SQE", &[QpState::Sqd, QpState::Sqe])?;
                let current_state = Some(queue_pair.state as u32);
                self.change(qp, QpState::Rts, QueuePairChange { current_state, ..change })
            }
            Transition::Update(update) => self.update(qp, &update),
            Transition::Error => {
                queue_pair.require("Error", "any state but RESET", &QpState::ALL_BUT_RESET)?;
                self.change(qp, QpState::Error, change)
            }
            Transition::Reset => {
                let (send_cq, recv_cq) = self.qp(qp).map(|qp| (qp.send_cq, qp.recv_cq))?;
                // As when it is destroyed.
                self.purge(qp, send_cq, recv_cq);
                self.change(qp, QpState::Reset, change)?;
                self.purge(qp, send_cq, recv_cq);
                self.qp(qp)?.forget();
                self.events.forget(qp.into());
                Ok(())
            }
        }
    }

    fn init(&mut self, qp: Qp, change: QueuePairChange) -> Result<(), Error> {
        self.qp(qp)?.require("Init", "RESET or INIT", &[QpState::Reset, QpState::Init])?;
        let pkey_index = self.port.pkeys.iter().next().map_or(0, |(index, _)| index);
        let row = Some(pkey_index as u16);
        self.change(
            qp,
            QpState::Init,
            QueuePairChange { port: Some(self.port_number), pkey_index: row, ..change },
        )?;
        self.qp(qp)?.told.pkey_index = pkey_index;
        Ok(())
    }

    fn receive(
        &mut self,
        qp: Qp,
        address: AddressVector,
        path_mtu: PathMtu,
        (dest_qpn, rq_psn): (Qpn, Psn),
        change: QueuePairChange,
    ) -> Result<(), Error> {
        if !dest_qpn.is_ordinary() {
            return Err(Error::invalid("dest_qpn", dest_qpn, "a QPN other than 0, 1 and 0xffffff"));
        }
        if address.gid.is_multicast() {
            return Err(Error::invalid("gid", address.gid, "the address of one peer, not a multicast group"));
        }
        let way = self.way(&address)?;
        let needed = path_mtu.required_l3_mtu(address.gid.is_ipv6());
        if needed > self.port.mtu {
            let (interface, mtu) = (self.port.interface.clone(), self.port.mtu);
            return Err(Error::PathMtu { path_mtu, needed, interface, mtu });
        }
        let change = QueuePairChange {
            address: Some(way),
            path_mtu: Some(path_mtu.code().into()),
            dest_qpn: Some(dest_qpn.value()),
            rq_psn: Some(rq_psn.value()),
            ..change
        };
        self.change(qp, QpState::Rtr, change).map_err(|error| self.unreached(address.gid, error))?;
        let told = &mut self.qp(qp)?.told;
        told.address = Some(address);
        told.path_mtu = Some(path_mtu);
        told.dest_qpn = Some(dest_qpn);
        self.qp(qp)?.received.src_qpn = dest_qpn;
        Ok(())
    }

    /// An address in the card's form, after the checks that give better errors here.
    pub(super) fn way(&self, address: &AddressVector) -> Result<Address, Error> {
        if address.mac.is_some() {
            return Err(Error::Unsupported(Feature::ChosenNextHop));
        }
        address.path(&self.port, Qpn::default(), Qpn::default())?;
        let Some(row) = self.gid_rows.rows.get(address.sgid_index) else {
            return Err(Error::invalid("sgid_index", address.sgid_index, self.port.gid_indices()));
        };
        Ok(Address {
            gid: address.gid.0,
            sgid_index: row.index,
            flow_label: address.flow_label,
            hop_limit: address.hop_limit,
            traffic_class: address.traffic_class,
            service_level: address.service_level,
            port: self.port_number,
        })
    }

    /// Names the peer whose next hop the kernel could not resolve.
    pub(super) fn unreached(&self, peer: Gid, error: Error) -> Error {
        let Error::Driver(error) = error else { return error };
        Error::Driver(error.remedied(|source| {
            let (peer, number, name) = (peer.to_ip(), self.port_number, self.device.name());
            let Some(errno) = Errno::from_io_error(source) else { return String::new() };
            match errno {
                Errno::TIMEDOUT => format!("{peer}, or the router to it, does not answer ARP or ND"),
                Errno::NETUNREACH | Errno::HOSTUNREACH => {
                    let ports = self.device.details().map(|details| details.ports).unwrap_or_default();
                    match ports.iter().find(|port| port.number == number) {
                        Some(port) if !port.is_active => {
                            format!("the link of port {number} of {name} is down")
                        }
                        _ => format!("there is no route to {peer} from port {number} of {name}"),
                    }
                }
                _ => format!("the peer is {peer}"),
            }
        }))
    }

    pub(super) fn change(&mut self, qp: Qp, state: QpState, change: QueuePairChange) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        queue_pair.card.modify(&QueuePairChange { state: Some(state as u32), ..change })?;
        queue_pair.state = state;
        Ok(())
    }

    fn update(&mut self, qp: Qp, update: &QpUpdate) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        let (state, service) = (queue_pair.state, queue_pair.qp_type.service());
        let expected = "INIT, RTS, or SQD, drained";
        queue_pair.require("Update", expected, &[QpState::Init, QpState::Rts, QpState::Sqd])?;
        update.check(service, state)?;
        let send = queue_pair.told.send.map(|send| updated(send, update));
        send.map_or(Ok(()), |send| send.check())?;
        let pkey = update.pkey_index.map(|index| self.port.pkey(index).map(|_| index as u16)).transpose()?;
        let address = update.address.map(|address| self.way(&address)).transpose()?;
        let change = QueuePairChange {
            access: update.access.map(remote_rights),
            qkey: update.qkey,
            pkey_index: pkey,
            address,
            min_rnr_timer: update.min_rnr_timer.map(|timer| timer.code()),
            timeout: update.timeout,
            retry_count: update.retry_count,
            rnr_retry: update.rnr_retry,
            max_rd_atomic: update.max_rd_atomic,
            max_dest_rd_atomic: update.max_dest_rd_atomic,
            ..QueuePairChange::default()
        };
        self.change(qp, state, change)?;
        let told = &mut self.qp(qp)?.told;
        told.access = update.access.unwrap_or(told.access);
        told.qkey = update.qkey.unwrap_or(told.qkey);
        told.pkey_index = update.pkey_index.unwrap_or(told.pkey_index);
        told.address = update.address.or(told.address);
        told.min_rnr_timer = update.min_rnr_timer.or(told.min_rnr_timer);
        told.max_dest_rd_atomic = update.max_dest_rd_atomic.unwrap_or(told.max_dest_rd_atomic);
        told.send = send;
        Ok(())
    }
}

fn require_init(queue_pair: &HardwareQp) -> Result<(), Error> {
    queue_pair.require("ReadyToReceive", "INIT", &[QpState::Init])
}

fn updated(send: ReadyToSend, update: &QpUpdate) -> ReadyToSend {
    ReadyToSend {
        timeout: update.timeout.unwrap_or(send.timeout),
        retry_count: update.retry_count.unwrap_or(send.retry_count),
        rnr_retry: update.rnr_retry.unwrap_or(send.rnr_retry),
        max_rd_atomic: update.max_rd_atomic.unwrap_or(send.max_rd_atomic),
        ..send
    }
}
