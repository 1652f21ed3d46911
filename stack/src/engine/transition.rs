//! State transitions of a queue pair (docs/protocol.md §6).

use ferroce_wire::{Ecn, PKey, Psn, Service};

use crate::engine::qp::{Connection, QueuePair};
use crate::engine::requester::Requester;
use crate::engine::responder::Responder;
use crate::engine::selective::Selective;
use crate::engine::shared::Shared;
use crate::verbs::{
    Access, AddressVector, Error, Port, QpState, QpUpdate, ReadyToReceive, ReadyToSend, UnreliablePath,
};

impl QueuePair {
    pub(crate) fn init(&mut self, access: Access, port: &Port) -> Result<(), Error> {
        self.require("Init", "RESET or INIT", &[QpState::Reset, QpState::Init])?;
        self.pkey = port.pkey(self.pkey_index)?;
        self.access = access;
        self.state = QpState::Init;
        Ok(())
    }

    pub(crate) fn init_datagram(&mut self, qkey: u32, port: &Port) -> Result<(), Error> {
        self.require("InitDatagram", "RESET or INIT", &[QpState::Reset, QpState::Init])?;
        self.pkey = port.pkey(self.pkey_index)?;
        self.qkey = qkey;
        self.state = QpState::Init;
        Ok(())
    }

    pub(crate) fn require_init(&self) -> Result<(), Error> {
        self.require("ReadyToReceive", "INIT", &[QpState::Init])
    }

    pub(crate) fn ready_to_receive(
        &mut self,
        shared: &mut Shared,
        attributes: &ReadyToReceive,
        connection: Connection,
    ) -> Result<(), Error> {
        self.require_init()?;
        self.responder = std::mem::take(&mut self.responder).renewed(attributes);
        if attributes.selective_repeat {
            shared.reorder.prepare();
            self.selective = Some(Box::new(Selective::new(attributes.rq_psn, self.window)));
        }
        self.connect(attributes.address, connection);
        self.join_destination(shared, attributes.address.gid);
        Ok(())
    }

    pub(crate) fn ready_to_receive_unreliable(
        &mut self,
        path: &UnreliablePath,
        connection: Connection,
    ) -> Result<(), Error> {
        self.require_init()?;
        self.responder = Responder::expecting(path.rq_psn);
        self.connect(path.address, connection);
        Ok(())
    }

    pub(crate) fn ready_to_receive_datagrams(&mut self) -> Result<(), Error> {
        self.require_init()?;
        self.state = QpState::Rtr;
        Ok(())
    }

    fn connect(&mut self, address: AddressVector, connection: Connection) {
        self.address = Some(address);
        self.connection = Some(self.marked(connection));
        if let Some(reaction) = &mut self.reaction {
            reaction.restart(connection.path_mtu);
        }
        self.state = QpState::Rtr;
    }

    /// A connection with the ECN mark of its packets.
    fn marked(&self, mut connection: Connection) -> Connection {
        if self.reaction.is_some() {
            connection.header.set_ecn(Ecn::Capable);
        }
        connection
    }

    pub(crate) fn ready_to_send(&mut self, attributes: ReadyToSend) -> Result<(), Error> {
        self.require("ReadyToSend", "RTR", &[QpState::Rtr])?;
        attributes.check()?;
        self.requester = Requester::new(attributes, self.sq.head());
        if let Some(selective) = &mut self.selective {
            selective.scoreboard.start(attributes.sq_psn);
        }
        self.state = QpState::Rts;
        Ok(())
    }

    /// Without acknowledgements and retransmission.
    pub(crate) fn ready_to_send_unreliable(&mut self, sq_psn: Psn) -> Result<(), Error> {
        self.ready_to_send(ReadyToSend { sq_psn, timeout: 0, retry_count: 0, rnr_retry: 0, max_rd_atomic: 0 })
    }

    pub(crate) fn drain(&mut self, shared: &mut Shared) -> Result<(), Error> {
        self.require("Drain", "RTS", &[QpState::Rts])?;
        self.state = QpState::Sqd;
        self.note_drained(shared);
        Ok(())
    }

    pub(crate) fn resume(&mut self, shared: &mut Shared) -> Result<(), Error> {
        let expected = "SQD, drained, or SQE";
        self.require("Resume", expected, &[QpState::Sqd, QpState::Sqe])?;
        if !self.is_drained() {
            return Err(self.refused("Resume", expected));
        }
        self.state = QpState::Rts;
        self.schedule(shared);
        Ok(())
    }

    /// Checks an update before anything is changed.
    pub(crate) fn check_update(&self, update: &QpUpdate) -> Result<(), Error> {
        let expected = "INIT, RTS, or SQD, drained";
        self.require("Update", expected, &[QpState::Init, QpState::Rts, QpState::Sqd])?;
        if self.state == QpState::Sqd && !self.is_drained() {
            return Err(self.refused("Update", expected));
        }
        update.check(self.service, self.state)?;
        self.requester.updated(update).check()
    }

    /// Applies an update that passed [`check_update`](QueuePair::check_update), with the connection on the new path and the
    /// key at the new index if there is one.
    pub(crate) fn update(
        &mut self,
        shared: &mut Shared,
        update: &QpUpdate,
        connection: Option<Connection>,
        pkey: Option<PKey>,
    ) {
        if let (Some(address), Service::Rc) = (update.address, self.service) {
            self.leave_destination(shared);
            self.join_destination(shared, address.gid);
        }
        self.pkey = pkey.unwrap_or(self.pkey);
        self.pkey_index = update.pkey_index.unwrap_or(self.pkey_index);
        self.access = update.access.unwrap_or(self.access);
        self.qkey = update.qkey.unwrap_or(self.qkey);
        self.address = update.address.or(self.address);
        self.connection = connection.map(|connection| self.marked(connection)).or(self.connection);
        let attributes = self.requester.updated(update);
        if attributes != self.requester.attributes() {
            self.requester.set_attributes(attributes);
        }
        self.responder.update(update);
    }
}
