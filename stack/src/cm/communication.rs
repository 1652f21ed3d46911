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

/// The longest time that one end can delay an exchange at the other: for a request until the application's answer, from its
/// arrival, and for a message until the peer's answer, from its first transmission.
pub(super) const PATIENCE_MAX: Duration = Duration::from_secs(120);

/// The ACK timeouts that a peer may request for a local queue pair, as exponents. With 0 the queue pair would wait forever
/// for a peer that is gone, with 31 for hours; 8 times the longest are 69 s.
pub(super) const ACK_TIMEOUTS: RangeInclusive<u8> = 1..=21;

/// The state of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The next hop is being resolved; the first message is sent then.
    Resolving,
    /// A request was sent.
    ReqSent,
    /// The peer has sent a request, which the application must answer.
    ReqReceived,
    /// It was accepted here; the queue pair receives.
    RepSent,
    Established,
    /// It is being ended here.
    DreqSent,
    /// It has ended; its IDs must not be reused before late packets are gone.
    Timewait,
    /// A search for a datagram service was sent.
    SidrSent,
    /// The peer searches for a datagram service.
    SidrReceived,
}

impl State {
    /// Whether the last message is retransmitted until it is answered.
    pub(super) fn repeats(self) -> bool {
        matches!(self, State::ReqSent | State::RepSent | State::DreqSent | State::SidrSent)
    }

    pub(super) fn awaits_application(self) -> bool {
        matches!(self, State::ReqReceived | State::SidrReceived)
    }
}

/// The attributes to connect a queue pair; each end has its own view. A datagram service has none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) qp_type: QpType,
    pub(super) path_mtu: PathMtu,
    /// The PSN of the peer's first packet.
    pub(super) rq_psn: Psn,
    /// The PSN of the first local packet.
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
    /// Of messages that start here.
    pub(super) transaction_id: u64,
    pub(super) local_comm_id: u32,
    /// 0 while it is unknown.
    pub(super) remote_comm_id: u32,
    /// The path to the peer, next hop included.
    pub(super) address: AddressVector,
    /// The same for MADs.
    pub(super) header: PathHeader,
    /// The partition of its messages and of its queue pair: an index of the port's table, and the key there.
    pub(super) pkey_index: usize,
    pub(super) pkey: PKey,
    /// The P_Key in a peer's request.
    pub(super) peer_pkey: PKey,
    /// 0 while it is unknown.
    pub(super) remote_qpn: Qpn,
    pub(super) qp: Option<Qp>,
    pub(super) local_qpn: Qpn,
    /// The listener that received it.
    pub(super) listener: Option<Listener>,
    /// The channel of its events.
    pub(super) channel: Option<CmChannel>,
    /// The requested service.
    pub(super) service_id: u64,
    pub(super) terms: Terms,
    pub(super) cm_timeout: u8,
    /// How often a message is retransmitted.
    pub(super) cm_retries: u8,
    pub(super) retries_left: u8,
    pub(super) deadline: Nanos,
    /// The end of unanswered messages, however much time the peer requests: [`PATIENCE_MAX`] after the first message was
    /// sent or received.
    pub(super) latest: Nanos,
    /// The last message that may be retransmitted.
    pub(super) mad: [u8; MAD_LEN],
}

impl Communication {
    /// For a request to a peer whose next hop is known, or is being resolved.
    pub(super) fn asking(
        ids: (CmId, u32),
        space: PortSpace,
        (address, hop): (AddressVector, Hop),
        header: PathHeader,
    ) -> Communication {
        let state = if hop.ticket().is_some() { State::Resolving } else { asking(space) };
        Communication::new(ids, (state, space), address, header)
    }

    /// With a peer of which only the address is known. MADs use the same path.
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

    /// Writes the message that may be retransmitted.
    pub(super) fn keep(&mut self, body: CmBody<'_>) {
        CmMessage { transaction_id: self.transaction_id, body }.emit(&mut self.mad);
    }

    /// The first transmission of a message is sent now. A time chosen by the application may exceed what a peer can
    /// request, and is not shortened.
    pub(super) fn begin_waiting(&mut self, now: Nanos) {
        let chosen = time_of(self.cm_timeout) * (u32::from(self.retries_left) + 1);
        self.latest = now + chosen.max(PATIENCE_MAX);
    }

    /// Waits until `deadline`, but not longer than the limit.
    pub(super) fn wait_until(&mut self, deadline: Nanos) {
        self.deadline = deadline.min(self.latest);
    }

    /// The next hop of the peer is resolved.
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

/// The state of the requesting end, for a connection or a datagram service.
fn asking(space: PortSpace) -> State {
    match space {
        PortSpace::Tcp => State::ReqSent,
        PortSpace::Udp => State::SidrSent,
    }
}

fn no_qp(communication: &Communication) -> Error {
    Error::InvalidHandle { kind: "QP", handle: format!("of connection {:?}", communication.id.0) }
}
