//! One exchange with a peer, from its request to its end.
//!
//! `PATIENCE_MAX`, two minutes, is all that one end can make the other wait: a request for the application's answer,
//! and, with MRAs, a REQ or REP for the peer's answer, however often and for how long MRAs ask. What an application
//! itself chooses (`cm_timeout`, `cm_retries`) may be longer.

use std::ops::RangeInclusive;
use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_wire::cm::{CmBody, CmMessage};
use ferroce_wire::{MAD_LEN, MacAddr, PKEY_DEFAULT, PKey, PathHeader, PathMtu, Psn, Qpn};

use super::{CmChannel, CmId, Listener, PortSpace, Verbs};
use crate::RnrTimer;
use crate::engine::ah::Hop;
use crate::engine::qp::Connection;
use crate::verbs::{AddressVector, Error, Qp, QpType, ReadyToReceive, ReadyToSend, UnreliablePath, time_of};

/// How long an exchange waits for an answer because the other end wants it to: a request for the
/// application's, since it came, and a message for the peer's, since it first left.
pub(super) const PATIENCE_MAX: Duration = Duration::from_secs(120);

/// The ACK timeouts that a peer may ask of a queue pair here, as exponents. With 0 it would wait for ever for a peer
/// that is gone, with 31 for hours; 8 times the longest are 69 s.
pub(super) const ACK_TIMEOUTS: RangeInclusive<u8> = 1..=21;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The next hop is looked for; what asks leaves then.
    Resolving,
    /// We asked.
    ReqSent,
    /// The peer asked; the application has the word.
    ReqReceived,
    /// We accepted; the queue pair receives.
    RepSent,
    Established,
    /// We end it.
    DreqSent,
    /// It is over; its ids must not be used again before late packets are gone.
    Timewait,
    /// We ask for a datagram service.
    SidrSent,
    /// The peer asks for one.
    SidrReceived,
}

impl State {
    /// Whether the last message is sent again until it is answered.
    pub(super) fn repeats(self) -> bool {
        matches!(self, State::ReqSent | State::RepSent | State::DreqSent | State::SidrSent)
    }

    pub(super) fn awaits_application(self) -> bool {
        matches!(self, State::ReqReceived | State::SidrReceived)
    }
}

/// What a queue pair needs to know to be connected; either end has its own view of it. A datagram service
/// has none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) qp_type: QpType,
    pub(super) path_mtu: PathMtu,
    /// What the peer's first packet has.
    pub(super) rq_psn: Psn,
    /// What our first packet has.
    pub(super) sq_psn: Psn,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
}

impl Default for Terms {
    fn default() -> Terms {
        Terms {
            qp_type: QpType::Ud,
            path_mtu: PathMtu::Mtu256,
            rq_psn: Psn::new(0),
            sq_psn: Psn::new(0),
            max_dest_rd_atomic: 0,
            max_rd_atomic: 0,
            timeout: 0,
            retry_count: 0,
            rnr_retry: 0,
        }
    }
}

pub(super) struct Communication {
    pub(super) id: CmId,
    pub(super) state: State,
    pub(super) space: PortSpace,
    /// Of the messages that we begin.
    pub(super) transaction_id: u64,
    pub(super) local_comm_id: u32,
    /// 0 as long as it is not known.
    pub(super) remote_comm_id: u32,
    /// The way to the peer, next hop included.
    pub(super) address: AddressVector,
    /// The same for MADs.
    pub(super) header: PathHeader,
    /// The partition, of its messages and of its queue pair: an index of the port's table, and the key there.
    pub(super) pkey_index: usize,
    pub(super) pkey: PKey,
    /// The key that a peer's request names.
    pub(super) peer_pkey: PKey,
    /// 0 as long as it is not known.
    pub(super) remote_qpn: Qpn,
    pub(super) qp: Option<Qp>,
    pub(super) local_qpn: Qpn,
    /// Where it came to.
    pub(super) listener: Option<Listener>,
    /// Where its events are told.
    pub(super) channel: Option<CmChannel>,
    /// What was asked for.
    pub(super) service_id: u64,
    pub(super) terms: Terms,
    pub(super) cm_timeout: u8,
    /// How often a message is sent again.
    pub(super) cm_retries: u8,
    pub(super) retries_left: u8,
    pub(super) deadline: Nanos,
    /// When what nobody answers is over, however much time the peer asks for: [`PATIENCE_MAX`] after the
    /// first message went or came.
    pub(super) latest: Nanos,
    /// The last message that may have to be sent again.
    pub(super) mad: [u8; MAD_LEN],
}

impl Communication {
    /// As who asks a peer to whom the next hop is known, or is being looked for.
    pub(super) fn asking(
        ids: (CmId, u32),
        space: PortSpace,
        (address, hop): (AddressVector, Hop),
        header: PathHeader,
    ) -> Communication {
        let state = if hop.ticket().is_some() { State::Resolving } else { asking(space) };
        Communication::new(ids, (state, space), address, header)
    }

    /// With a peer of whom only the address is known. MADs go the same way.
    pub(super) fn new(
        (id, local_comm_id): (CmId, u32),
        (state, space): (State, PortSpace),
        address: AddressVector,
        header: PathHeader,
    ) -> Communication {
        Communication {
            id,
            state,
            space,
            transaction_id: 0,
            local_comm_id,
            remote_comm_id: 0,
            address,
            header,
            pkey_index: 0,
            pkey: PKEY_DEFAULT,
            peer_pkey: PKEY_DEFAULT,
            remote_qpn: Qpn::default(),
            qp: None,
            local_qpn: Qpn::default(),
            listener: None,
            channel: None,
            service_id: 0,
            terms: Terms::default(),
            cm_timeout: 0,
            cm_retries: 0,
            retries_left: 0,
            deadline: Nanos::NEVER,
            latest: Nanos::NEVER,
            mad: [0; MAD_LEN],
        }
    }

    /// Writes the message that may have to be sent again.
    pub(super) fn keep(&mut self, body: CmBody<'_>) {
        CmMessage { transaction_id: self.transaction_id, body }.emit(&mut self.mad);
    }

    /// The first of a message's transmissions leaves now. What the application has chosen itself may take
    /// longer than a peer can ask for, and is not cut short.
    pub(super) fn begin_waiting(&mut self, now: Nanos) {
        let chosen = time_of(self.cm_timeout) * (u32::from(self.retries_left) + 1);
        self.latest = now + chosen.max(PATIENCE_MAX);
    }

    /// Waits until `deadline`, or for as long as there is.
    pub(super) fn wait_until(&mut self, deadline: Nanos) {
        self.deadline = deadline.min(self.latest);
    }

    /// The next hop of a peer that is to be asked is found.
    pub(super) fn take_next_hop(&mut self, mac: MacAddr) {
        self.address.mac = Some(mac);
        self.header.set_destination_mac(mac);
        self.state = asking(self.space);
    }

    /// INIT → RTR.
    pub(super) fn make_ready_to_receive(&self, verbs: &mut Verbs<'_>) -> Result<(), Error> {
        let Verbs { qps, shared, port } = verbs;
        let qp = self.qp.and_then(|qp| qps.get_mut(qp.0)).ok_or_else(|| no_qp(self))?;
        let path = self.address.path(port, self.local_qpn, self.remote_qpn)?;
        let Terms { qp_type, path_mtu, rq_psn, max_dest_rd_atomic, .. } = self.terms;
        let (address, dest_qpn) = (self.address, self.remote_qpn);
        let connection = Connection::new(&path, port.header(&path), path_mtu, dest_qpn);
        let made = match qp_type {
            QpType::Rc => {
                let min_rnr_timer = RnrTimer::DEFAULT;
                let attributes = ReadyToReceive {
                    path_mtu,
                    max_dest_rd_atomic,
                    min_rnr_timer,
                    ..ReadyToReceive::new(address, dest_qpn, rq_psn)
                };
                qp.ready_to_receive(shared, &attributes, connection)
            }
            _ => {
                let path = UnreliablePath { address, path_mtu, dest_qpn, rq_psn };
                qp.ready_to_receive_unreliable(&path, connection)
            }
        };
        if made.is_ok() {
            (qp.pkey_index, qp.pkey) = (self.pkey_index, self.pkey);
        }
        made
    }

    /// RTR → RTS.
    pub(super) fn make_ready_to_send(&self, verbs: &mut Verbs<'_>) -> Result<(), Error> {
        let qp = self.qp.and_then(|qp| verbs.qps.get_mut(qp.0)).ok_or_else(|| no_qp(self))?;
        let Terms { qp_type, sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic, .. } = self.terms;
        match qp_type {
            QpType::Rc => {
                qp.ready_to_send(ReadyToSend { sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic })
            }
            _ => qp.ready_to_send_unreliable(sq_psn),
        }
    }
}

/// The state of who asks for a connection, or for a datagram service.
fn asking(space: PortSpace) -> State {
    match space {
        PortSpace::Tcp => State::ReqSent,
        PortSpace::Udp => State::SidrSent,
    }
}

fn no_qp(communication: &Communication) -> Error {
    Error::InvalidHandle { kind: "QP", handle: format!("of connection {:?}", communication.id.0) }
}
