use ferroce_wire::{Gid, NetworkHeader, PathHeader, PathMtu, Psn, Qpn, RnrTimer, Service};

use crate::config::MAX_WINDOW;
use crate::cq::{WcOpcode, WcStatus, WorkCompletion};
use crate::event::Event;
use crate::requester::Requester;
use crate::responder::Responder;
use crate::rq::{MAX_MESSAGE, ReceiveQueue};
use crate::shared::Shared;
use crate::slab::{Cq, Handle, Pd, Qp};
use crate::sq::{SendQueue, Wqe};
use crate::{Access, AddressVector, Error, Mr};

/// The transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpType {
    /// Reliable Connection.
    Rc,
    /// Unreliable Connection.
    Uc,
    /// Unreliable Datagram.
    Ud,
}

/// How a queue pair is created.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// The transport service.
    pub qp_type: QpType,
    /// Where its memory must be registered.
    pub pd: Pd,
    /// Where sends complete.
    pub send_cq: Cq,
    /// Where receives complete.
    pub recv_cq: Cq,
    /// Outstanding sends, 1 to 65536; rounded up to a power of two.
    pub max_send_wr: u32,
    /// Outstanding receives, likewise.
    pub max_recv_wr: u32,
    /// Pieces of a send, at most 32.
    pub max_send_sge: u8,
    /// Pieces of a receive, at most 32.
    pub max_recv_sge: u8,
    /// Bytes that a send may carry inline, at most 4096.
    pub max_inline_data: u32,
    /// Every send completes with a work completion, as if it were flagged so.
    pub signal_all: bool,
}

impl QpConfig {
    /// An RC queue pair with one CQ, 128 sends and receives of 4 pieces, and 64 bytes inline.
    pub fn rc(pd: Pd, cq: Cq) -> QpConfig {
        QpConfig {
            qp_type: QpType::Rc,
            pd,
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
            signal_all: false,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let limits = [
            ("max_send_wr", self.max_send_wr, 1, 65536),
            ("max_recv_wr", self.max_recv_wr, 1, 65536),
            ("max_send_sge", self.max_send_sge.into(), 1, 32),
            ("max_recv_sge", self.max_recv_sge.into(), 1, 32),
            ("max_inline_data", self.max_inline_data, 0, 4096),
        ];
        for (attribute, value, least, most) in limits {
            if value < least || value > most {
                return Err(Error::invalid(attribute, value, format!("{least} to {most}")));
            }
        }
        match self.qp_type {
            QpType::Rc => Ok(()),
            QpType::Uc => Err(Error::Unsupported("UC queue pairs")),
            QpType::Ud => Err(Error::Unsupported("UD queue pairs")),
        }
    }
}

/// The states of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// As created.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained or draining.
    Sqd,
    /// Failed; all work is flushed.
    Error,
}

/// A move from state to state, with all that the move requires and nothing else.
#[derive(Clone, Copy, Debug)]
pub enum Transition {
    /// RESET → INIT, or INIT → INIT.
    Init {
        /// What the peer may do through this queue pair.
        access: Access,
    },
    /// INIT → RTR.
    ReadyToReceive(ReadyToReceive),
    /// RTR → RTS.
    ReadyToSend(ReadyToSend),
    /// RTS → SQD: finish what is started, start nothing, then [`Event::SqDrained`].
    Drain,
    /// SQD → RTS, once it is drained.
    Resume,
    /// Any but RESET → ERR: all work is flushed.
    Error,
    /// Any → RESET: all work is discarded, without completions.
    Reset,
}

/// What a queue pair must know to receive.
#[derive(Clone, Copy, Debug)]
pub struct ReadyToReceive {
    /// The way to the peer.
    pub address: AddressVector,
    /// Payload of a full packet, the same at both ends.
    pub path_mtu: PathMtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// The PSN of the peer's first request.
    pub rq_psn: Psn,
    /// READs and atomics that the peer may have outstanding here, at most 128.
    pub max_dest_rd_atomic: u8,
    /// How long a peer is asked to wait when there is no receive for its message.
    pub min_rnr_timer: RnrTimer,
}

/// What a queue pair must know to send.
#[derive(Clone, Copy, Debug)]
pub struct ReadyToSend {
    /// The PSN of the first request.
    pub sq_psn: Psn,
    /// ACK timeout, 4.096 µs · 2^timeout; 0 to 31, 0 is off.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors, 0 to 7. (7 means seven.)
    pub retry_count: u8,
    /// Retries after RNR NAKs, 0 to 7. 7 means without end.
    pub rnr_retry: u8,
    /// READs and atomics outstanding at once, at most 128, and no more than the peer's
    /// `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
}

/// The most READs and atomics that a queue pair has outstanding, each way.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;

impl ReadyToReceive {
    /// From `dest_qpn` at `address`, whose first request has `rq_psn`: a path MTU of 1024, 16
    /// READs and atomics, an RNR timer of 0.64 ms.
    pub fn new(address: AddressVector, dest_qpn: Qpn, rq_psn: Psn) -> ReadyToReceive {
        ReadyToReceive {
            address,
            path_mtu: PathMtu::Mtu1024,
            dest_qpn,
            rq_psn,
            max_dest_rd_atomic: 16,
            min_rnr_timer: RnrTimer::DEFAULT,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        at_most("max_dest_rd_atomic", self.max_dest_rd_atomic, MAX_RD_ATOMIC)
    }
}

impl ReadyToSend {
    /// The first request has `sq_psn`: an ACK timeout of 67 ms, 7 retries, RNR retries without
    /// end, 16 READs and atomics.
    pub fn new(sq_psn: Psn) -> ReadyToSend {
        ReadyToSend { sq_psn, timeout: 14, retry_count: 7, rnr_retry: 7, max_rd_atomic: 16 }
    }

    fn check(&self) -> Result<(), Error> {
        at_most("timeout", self.timeout, 31)?;
        at_most("retry_count", self.retry_count, 7)?;
        at_most("rnr_retry", self.rnr_retry, 7)?;
        at_most("max_rd_atomic", self.max_rd_atomic, MAX_RD_ATOMIC)
    }
}

fn at_most(attribute: &'static str, value: u8, most: u8) -> Result<(), Error> {
    if value <= most { Ok(()) } else { Err(Error::invalid(attribute, value, format!("0 to {most}"))) }
}

/// What [`Context::query_qp`](crate::Context::query_qp) tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAttributes {
    /// Its state.
    pub state: QpState,
    /// Its number.
    pub qpn: Qpn,
    /// The peer's; `None` before RTR.
    pub dest_qpn: Option<Qpn>,
    /// The path MTU; `None` before RTR.
    pub path_mtu: Option<PathMtu>,
    /// What the peer may do.
    pub access: Access,
    /// The PSN expected next from the peer.
    pub rq_psn: Psn,
    /// The PSN of the next new request.
    pub sq_psn: Psn,
    /// Sends not yet complete.
    pub outstanding_sends: u32,
}

/// The peer of a connected queue pair, and the way to it.
#[derive(Clone, Copy)]
pub(crate) struct Connection {
    pub(crate) header: PathHeader,
    pub(crate) local: Gid,
    pub(crate) remote: Gid,
    pub(crate) path_mtu: PathMtu,
    pub(crate) dest_qpn: Qpn,
}

impl Connection {
    /// Whether a packet with these addresses is the peer's.
    pub(crate) fn admits(&self, network: &ferroce_wire::Network) -> bool {
        let v1 = |header| header == NetworkHeader::Grh;
        network.source == self.remote
            && network.destination == self.local
            && v1(network.header) == v1(self.header.network())
    }

    /// The longest message, in bytes: its packets must be fewer than half the PSNs.
    pub(crate) fn max_message(&self) -> u32 {
        let most = u64::from(MAX_WINDOW) << self.path_mtu.shift();
        u32::try_from(most).map_or(MAX_MESSAGE, |most| most.min(MAX_MESSAGE))
    }
}

pub(crate) struct QueuePair {
    pub(crate) handle: Qp,
    pub(crate) qpn: Qpn,
    pub(crate) service: Service,
    pub(crate) pd: Pd,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    signal_all: bool,
    pub(crate) state: QpState,
    pub(crate) access: Access,
    pub(crate) connection: Option<Connection>,
    pub(crate) sq: SendQueue,
    pub(crate) rq: ReceiveQueue,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// It is in the list of active queue pairs.
    pub(crate) scheduled: bool,
    /// The last frame was a response.
    responded: bool,
    /// A completion found no room: the queue pair is to fail.
    overflowed: bool,
}

impl QueuePair {
    pub(crate) fn new(handle: Handle, qpn: Qpn, config: &QpConfig) -> QueuePair {
        // Fills unused slots; never looked at.
        let filler = Mr(handle);
        QueuePair {
            handle: Qp(handle),
            qpn,
            service: match config.qp_type {
                QpType::Rc => Service::Rc,
                QpType::Uc => Service::Uc,
                QpType::Ud => Service::Ud,
            },
            pd: config.pd,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            signal_all: config.signal_all,
            state: QpState::Reset,
            access: Access::NONE,
            connection: None,
            sq: SendQueue::new(config.max_send_wr, config.max_send_sge, config.max_inline_data, filler),
            rq: ReceiveQueue::new(config.max_recv_wr, config.max_recv_sge, filler),
            requester: Requester::default(),
            responder: Responder::default(),
            scheduled: false,
            responded: false,
            overflowed: false,
        }
    }

    pub(crate) fn attributes(&self) -> QpAttributes {
        QpAttributes {
            state: self.state,
            qpn: self.qpn,
            dest_qpn: self.connection.map(|c| c.dest_qpn),
            path_mtu: self.connection.map(|c| c.path_mtu),
            access: self.access,
            rq_psn: self.responder.expected_psn(),
            sq_psn: self.requester.next_psn(),
            outstanding_sends: self.sq.tail().wrapping_sub(self.sq.head()),
        }
    }

    pub(crate) fn init(&mut self, access: Access) -> Result<(), Error> {
        self.require("Init", "RESET or INIT", &[QpState::Reset, QpState::Init])?;
        self.access = access;
        self.state = QpState::Init;
        Ok(())
    }

    pub(crate) fn ready_to_receive(
        &mut self,
        attributes: &ReadyToReceive,
        connection: Connection,
    ) -> Result<(), Error> {
        self.require("ReadyToReceive", "INIT", &[QpState::Init])?;
        self.connection = Some(connection);
        self.responder = Responder::new(attributes);
        self.state = QpState::Rtr;
        Ok(())
    }

    pub(crate) fn ready_to_send(&mut self, attributes: ReadyToSend) -> Result<(), Error> {
        self.require("ReadyToSend", "RTR", &[QpState::Rtr])?;
        attributes.check()?;
        self.requester = Requester::new(attributes, self.sq.head());
        self.state = QpState::Rts;
        Ok(())
    }

    pub(crate) fn drain(&mut self, shared: &mut Shared) -> Result<(), Error> {
        self.require("Drain", "RTS", &[QpState::Rts])?;
        self.state = QpState::Sqd;
        self.note_drained(shared);
        Ok(())
    }

    pub(crate) fn resume(&mut self, shared: &mut Shared) -> Result<(), Error> {
        let expected = "SQD, drained";
        self.require("Resume", expected, &[QpState::Sqd])?;
        if !self.is_drained() {
            return Err(Error::State { verb: "Resume", state: self.state, expected });
        }
        self.state = QpState::Rts;
        self.schedule(shared);
        Ok(())
    }

    /// Fails if the state is none of `allowed`.
    pub(crate) fn require(
        &self,
        verb: &'static str,
        expected: &'static str,
        allowed: &[QpState],
    ) -> Result<(), Error> {
        if allowed.contains(&self.state) {
            return Ok(());
        }
        Err(Error::State { verb, state: self.state, expected })
    }

    /// Asks for a turn in the transmit phase.
    pub(crate) fn schedule(&mut self, shared: &mut Shared) {
        if !self.scheduled {
            self.scheduled = true;
            shared.active.push_back(self.handle.0.index);
        }
    }

    /// The next frame of this queue pair: a response, because a peer waits for it, but then a
    /// request has its turn, or a peer that reads all the time would keep them back for ever.
    pub(crate) fn transmit(&mut self, shared: &mut Shared, buffer: &mut [u8]) -> Option<usize> {
        let request_first = std::mem::take(&mut self.responded);
        let request = if request_first { self.transmit_request(shared, buffer) } else { None };
        let frame = request.or_else(|| {
            let response = self.transmit_response(shared, buffer);
            self.responded = response.is_some();
            response
        });
        let frame = frame.or_else(|| self.transmit_request(shared, buffer));
        self.settle(shared);
        frame
    }

    /// ERR by the application's wish, or because there is no way on: flushes everything, and
    /// nothing more is sent.
    pub(crate) fn fail(&mut self, shared: &mut Shared) {
        self.responder.silence();
        self.enter_error(shared);
    }

    /// ERR after a request that was refused: as [`fail`](QueuePair::fail), but the responses that
    /// are owed, the NAK last, still go out.
    pub(crate) fn enter_error(&mut self, shared: &mut Shared) {
        self.state = QpState::Error;
        self.requester.stop();
        self.flush(shared);
    }

    /// RESET: as if nothing had ever been posted.
    pub(crate) fn reset(&mut self, shared: &mut Shared) {
        while self.sq.pop(&mut shared.mrs).is_some() {}
        while self.rq.pop(&mut shared.mrs).is_some() {}
        for cq in [self.send_cq, self.recv_cq] {
            if let Some(queue) = shared.cqs.get_mut(cq.0) {
                queue.purge(self.handle);
            }
        }
        shared.timers.cancel(self.handle.0.index);
        self.requester = Requester::default();
        self.responder = Responder::default();
        self.connection = None;
        self.access = Access::NONE;
        self.responded = false;
        self.overflowed = false;
        self.state = QpState::Reset;
    }

    /// Completes all posted work as flushed, in the order it was posted.
    pub(crate) fn flush(&mut self, shared: &mut Shared) {
        while let Some(wqe) = self.sq.pop(&mut shared.mrs) {
            self.complete_send(shared, &wqe, WcStatus::WrFlushErr);
        }
        while !self.rq_is_empty() {
            self.complete_receive_in_error(shared, WcStatus::WrFlushErr);
        }
        self.overflowed = false;
    }

    /// Fails the queue pair if one of its completions was lost.
    pub(crate) fn settle(&mut self, shared: &mut Shared) {
        if self.overflowed {
            self.overflowed = false;
            if self.state != QpState::Error {
                self.fail(shared);
            }
        }
    }

    /// The end of a send that was just taken out of the queue.
    pub(crate) fn complete_send(&mut self, shared: &mut Shared, wqe: &Wqe, status: WcStatus) {
        let wanted = wqe.flags.signaled || self.signal_all || status != WcStatus::Success;
        if wanted {
            let wc = WorkCompletion {
                byte_len: wqe.length,
                ..self.completion(wqe.wr_id, status, wqe.wc_opcode())
            };
            self.push(shared, self.send_cq, wc, false);
        }
    }

    /// The end of the oldest receive, in error.
    pub(crate) fn complete_receive_in_error(&mut self, shared: &mut Shared, status: WcStatus) {
        if let Some(wr_id) = self.rq.pop(&mut shared.mrs) {
            let wc = self.completion(wr_id, status, WcOpcode::Recv);
            self.push(shared, self.recv_cq, wc, false);
        }
    }

    /// A completion of this queue pair that says nothing yet but how it ended.
    pub(crate) fn completion(&self, wr_id: u64, status: WcStatus, opcode: WcOpcode) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status,
            opcode,
            byte_len: 0,
            immediate: None,
            invalidated: None,
            qp: self.handle,
            qpn: self.qpn,
            src_qpn: self.connection.map(|c| c.dest_qpn).unwrap_or_default(),
        }
    }

    pub(crate) fn push(&mut self, shared: &mut Shared, cq: Cq, wc: WorkCompletion, solicited: bool) {
        if !shared.complete(cq, wc, solicited) {
            self.overflowed = true;
        }
    }

    pub(crate) fn rq_is_empty(&self) -> bool {
        self.rq.front().is_none()
    }

    /// Says once that a draining send queue has nothing under way any more.
    pub(crate) fn note_drained(&mut self, shared: &mut Shared) {
        if self.state == QpState::Sqd && self.is_drained() {
            shared.raise(Event::SqDrained(self.handle));
        }
    }

    /// No send is started and not complete.
    fn is_drained(&self) -> bool {
        self.sq.front().is_none_or(|wqe| !wqe.started)
    }
}
