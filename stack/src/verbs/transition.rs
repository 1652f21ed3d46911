//! How a queue pair moves from state to state (docs/protocol.md §6). The type of a transition has its required attributes;
//! optional attributes are a separate update.

use std::time::Duration;

use ferroce_wire::{PathMtu, Psn, Qpn, RnrTimer, Service};

use crate::verbs::{Access, AddressVector, Error, MAX_RD_ATOMIC, QpState, exponent_of, time_of};

/// A transition between states, with its required attributes. [`Context::modify_qp`](crate::Context::modify_qp) has an example.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Transition {
    /// RC and UC, RESET → INIT, or INIT → INIT. The P_Key is the first of the port's table; another one is
    /// [`QpUpdate::pkey_index`].
    Init {
        /// The rights of the peer through this queue pair: any of [`REMOTE_WRITE`](Access::REMOTE_WRITE),
        /// [`REMOTE_READ`](Access::REMOTE_READ), [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC) and
        /// [`FLUSH_GLOBAL`](Access::FLUSH_GLOBAL). The other bits have no effect here. The rights of the region are checked too.
        access: Access,
    },
    /// UD, RESET → INIT, or INIT → INIT; the P_Key as for `Init`.
    InitDatagram {
        /// The Q_Key that datagrams to this queue pair must carry.
        qkey: u32,
    },
    /// RC, INIT → RTR.
    ReadyToReceive(ReadyToReceive),
    /// UC, INIT → RTR.
    ReadyToReceiveUnreliable(UnreliablePath),
    /// UD, INIT → RTR.
    ReadyToReceiveDatagrams,
    /// RC, RTR → RTS.
    ReadyToSend(ReadyToSend),
    /// UC and UD, RTR → RTS.
    ReadyToSendUnreliable {
        /// The PSN of the first packet.
        sq_psn: Psn,
    },
    /// RTS → SQD: complete started sends, start no others, then raise [`Event::SqDrained`](crate::Event::SqDrained).
    Drain,
    /// SQD → RTS, after it has drained; SQE → RTS.
    Resume,
    /// INIT, RTS and SQD (drained) to themselves: the attributes that may change there.
    Update(QpUpdate),
    /// Any but RESET → ERR: all work is flushed.
    Error,
    /// Any → RESET: all work is discarded, without completions.
    Reset,
}

/// The attributes for an RC queue pair to receive. [`Context::modify_qp`](crate::Context::modify_qp) has an example.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct ReadyToReceive {
    /// The path to the peer.
    pub address: AddressVector,
    /// Payload of a full packet, the same at both ends.
    pub path_mtu: PathMtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// The PSN of the peer's first request.
    pub rq_psn: Psn,
    /// READs and atomics that the peer may have outstanding here, at most 128.
    pub max_dest_rd_atomic: u8,
    /// The RNR timer: how long a peer waits if there is no receive for its message.
    pub min_rnr_timer: RnrTimer,
    /// Selective repeat instead of go-back-N: only if the peer is ferroce too and both ends set it. Other peers do not support
    /// it. A READ whose response was lost is executed again, after READs that were posted later: a READ that must not see older
    /// memory than the one before it needs a [fence](crate::SendFlags::fence).
    pub selective_repeat: bool,
}

/// The attributes for a UC queue pair to receive.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct UnreliablePath {
    /// The path to the peer.
    pub address: AddressVector,
    /// Payload of a full packet, the same at both ends.
    pub path_mtu: PathMtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// The PSN of the peer's first packet.
    pub rq_psn: Psn,
}

/// The attributes for an RC queue pair to send.
///
/// ```
/// # use ferroce::*;
/// # use std::time::Duration;
/// let send = ReadyToSend::new(Psn::new(7)).timeout_at_least(Duration::from_millis(20)).retry_count(3);
/// assert_eq!((send.timeout, send.ack_timeout()), (13, Some(Duration::from_nanos(4096 << 13))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct ReadyToSend {
    /// The PSN of the first request.
    pub sq_psn: Psn,
    /// ACK timeout, 4.096 µs · 2^timeout; 0 to 31, 0 is off. [`timeout_at_least`](ReadyToSend::timeout_at_least)
    /// takes a `Duration`. With `retry_count` it gives the [retry budget](crate::manual::connecting#timeouts-and-retries).
    pub timeout: u8,
    /// Retries after timeouts and sequence errors, 0 to 7. Unlike in `rnr_retry`, 7 means seven retries.
    pub retry_count: u8,
    /// Retries after RNR NAKs, 0 to 7. 7 means without limit.
    pub rnr_retry: u8,
    /// Outstanding READs and atomics, at most 128, and no more than the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
}

/// Attributes that may change without a change of state; `None` keeps the value. If the service or the state does not allow an
/// attribute, the update fails and nothing changes.
///
/// ```
/// # use ferroce::*;
/// let update = QpUpdate::default().retry_count(3).access(Access::REMOTE_READ);
/// assert_eq!((update.retry_count, update.timeout), (Some(3), None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct QpUpdate {
    /// RC and UC, in INIT, RTS and SQD.
    pub access: Option<Access>,
    /// UD, in INIT, RTS and SQD.
    pub qkey: Option<u32>,
    /// The index of a P_Key in the port's table, 0 by default; in INIT and SQD.
    pub pkey_index: Option<usize>,
    /// RC, in RTS and SQD.
    pub min_rnr_timer: Option<RnrTimer>,
    /// RC and UC, in SQD: another path to the same queue pair.
    pub address: Option<AddressVector>,
    /// RC, in SQD: an exponent, as in [`ReadyToSend`].
    pub timeout: Option<u8>,
    /// RC, in SQD.
    pub retry_count: Option<u8>,
    /// RC, in SQD.
    pub rnr_retry: Option<u8>,
    /// RC, in SQD.
    pub max_rd_atomic: Option<u8>,
    /// RC, in SQD.
    pub max_dest_rd_atomic: Option<u8>,
}

impl Transition {
    /// Fails if the transition is for another service than the queue pair's.
    pub(crate) fn check_service(&self, service: Service) -> Result<(), Error> {
        let (name, fits, expected) = match self {
            Transition::Init { .. } => {
                ("Init", service != Service::Ud, "an RC or UC QP; InitDatagram for UD")
            }
            Transition::InitDatagram { .. } => ("InitDatagram", service == Service::Ud, "a UD QP"),
            Transition::ReadyToReceive(_) => ("ReadyToReceive", service == Service::Rc, "an RC QP"),
            Transition::ReadyToReceiveUnreliable(_) => {
                ("ReadyToReceiveUnreliable", service == Service::Uc, "a UC QP")
            }
            Transition::ReadyToReceiveDatagrams => {
                ("ReadyToReceiveDatagrams", service == Service::Ud, "a UD QP")
            }
            Transition::ReadyToSend(_) => ("ReadyToSend", service == Service::Rc, "an RC QP"),
            Transition::ReadyToSendUnreliable { .. } => {
                ("ReadyToSendUnreliable", service != Service::Rc, "a UC or UD QP")
            }
            Transition::Drain
            | Transition::Resume
            | Transition::Update(_)
            | Transition::Error
            | Transition::Reset => return Ok(()),
        };
        if fits { Ok(()) } else { Err(Error::invalid("transition", name, expected)) }
    }
}

impl ReadyToReceive {
    /// From `dest_qpn` at `address`, whose first request has `rq_psn`: a path MTU of 1024, 16
    /// READs and atomics, an RNR timer of 0.64 ms, go-back-N.
    pub fn new(address: AddressVector, dest_qpn: Qpn, rq_psn: Psn) -> ReadyToReceive {
        ReadyToReceive {
            address,
            path_mtu: PathMtu::Mtu1024,
            dest_qpn,
            rq_psn,
            max_dest_rd_atomic: 16,
            min_rnr_timer: RnrTimer::DEFAULT,
            selective_repeat: false,
        }
    }

    /// Payload of a full packet, the same at both ends; 1024 bytes by default.
    pub fn path_mtu(self, path_mtu: PathMtu) -> Self {
        ReadyToReceive { path_mtu, ..self }
    }

    /// READs and atomics that the peer may have outstanding here, at most 128; 16 by default.
    pub fn max_dest_rd_atomic(self, max_dest_rd_atomic: u8) -> Self {
        ReadyToReceive { max_dest_rd_atomic, ..self }
    }

    /// How long a peer waits for a receive; 0.64 ms by default ([`RnrTimer::at_least`] takes a `Duration`).
    pub fn min_rnr_timer(self, min_rnr_timer: RnrTimer) -> Self {
        ReadyToReceive { min_rnr_timer, ..self }
    }

    /// Selective repeat, if the peer is ferroce and sets it too; go-back-N by default. After a loss READs are executed out of
    /// order, except after a [fence](crate::SendFlags::fence).
    pub fn selective_repeat(self, selective_repeat: bool) -> Self {
        ReadyToReceive { selective_repeat, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        at_most("max_dest_rd_atomic", self.max_dest_rd_atomic, MAX_RD_ATOMIC)
    }

    /// The attributes that UC queue pairs have too.
    pub(crate) fn path(&self) -> UnreliablePath {
        let ReadyToReceive { address, path_mtu, dest_qpn, rq_psn, .. } = *self;
        UnreliablePath { address, path_mtu, dest_qpn, rq_psn }
    }
}

impl UnreliablePath {
    /// From `dest_qpn` at `address`, whose first packet has `rq_psn`: a path MTU of 1024.
    pub fn new(address: AddressVector, dest_qpn: Qpn, rq_psn: Psn) -> UnreliablePath {
        UnreliablePath { address, path_mtu: PathMtu::Mtu1024, dest_qpn, rq_psn }
    }

    /// Payload of a full packet, the same at both ends; 1024 bytes by default.
    pub fn path_mtu(self, path_mtu: PathMtu) -> Self {
        UnreliablePath { path_mtu, ..self }
    }
}

impl ReadyToSend {
    /// The first request has `sq_psn`: an ACK timeout of 67 ms, 7 retries, RNR retries without limit, 16 READs and atomics.
    pub fn new(sq_psn: Psn) -> ReadyToSend {
        ReadyToSend { sq_psn, timeout: 14, retry_count: 7, rnr_retry: 7, max_rd_atomic: 16 }
    }

    /// ACK timeout, 4.096 µs · 2^timeout: 1 to 31, or 0 for none; 14 (67 ms) by default.
    pub fn timeout(self, timeout: u8) -> Self {
        ReadyToSend { timeout, ..self }
    }

    /// `time` rounded up to the next ACK timeout that can be encoded, 8.2 µs to 2.4 h, each twice the one before. Zero turns the
    /// timeout off.
    /// (In [`ConnectionParameters`](crate::ConnectionParameters) it means the shortest one.)
    pub fn timeout_at_least(self, time: Duration) -> Self {
        ReadyToSend { timeout: exponent_of(time), ..self }
    }

    /// Retries after timeouts and sequence errors, 0 to 7; 7 by default.
    pub fn retry_count(self, retry_count: u8) -> Self {
        ReadyToSend { retry_count, ..self }
    }

    /// Retries after RNR NAKs, 0 to 7; 7, without limit, by default.
    pub fn rnr_retry(self, rnr_retry: u8) -> Self {
        ReadyToSend { rnr_retry, ..self }
    }

    /// Outstanding READs and atomics, at most 128; 16 by default.
    pub fn max_rd_atomic(self, max_rd_atomic: u8) -> Self {
        ReadyToSend { max_rd_atomic, ..self }
    }

    /// The time of `timeout`; `None` if it is off.
    pub fn ack_timeout(&self) -> Option<Duration> {
        (self.timeout > 0).then(|| time_of(self.timeout))
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        at_most("timeout", self.timeout, 31)?;
        at_most("retry_count", self.retry_count, 7)?;
        at_most("rnr_retry", self.rnr_retry, 7)?;
        at_most("max_rd_atomic", self.max_rd_atomic, MAX_RD_ATOMIC)
    }
}

impl QpUpdate {
    /// The rights of the peer through the queue pair. RC and UC, in INIT, RTS and SQD.
    pub fn access(self, access: impl Into<Option<Access>>) -> Self {
        QpUpdate { access: access.into(), ..self }
    }

    /// The Q_Key that datagrams to the queue pair must carry. UD, in INIT, RTS and SQD.
    pub fn qkey(self, qkey: impl Into<Option<u32>>) -> Self {
        QpUpdate { qkey: qkey.into(), ..self }
    }

    /// An index in the port's P_Key table. In INIT and SQD.
    pub fn pkey_index(self, pkey_index: impl Into<Option<usize>>) -> Self {
        QpUpdate { pkey_index: pkey_index.into(), ..self }
    }

    /// How long the peer waits for a receive. RC, in RTS and SQD.
    pub fn min_rnr_timer(self, min_rnr_timer: impl Into<Option<RnrTimer>>) -> Self {
        QpUpdate { min_rnr_timer: min_rnr_timer.into(), ..self }
    }

    /// Another path to the same queue pair. RC and UC, in SQD.
    pub fn address(self, address: impl Into<Option<AddressVector>>) -> Self {
        QpUpdate { address: address.into(), ..self }
    }

    /// ACK timeout, 4.096 µs · 2^timeout: 1 to 31, or 0 for none. RC, in SQD.
    pub fn timeout(self, timeout: impl Into<Option<u8>>) -> Self {
        QpUpdate { timeout: timeout.into(), ..self }
    }

    /// The shortest ACK timeout that is at least `time`; see [`ReadyToSend::timeout_at_least`].
    pub fn timeout_at_least(self, time: Duration) -> Self {
        QpUpdate { timeout: Some(exponent_of(time)), ..self }
    }

    /// Retries after timeouts and sequence errors, 0 to 7. RC, in SQD.
    pub fn retry_count(self, retry_count: impl Into<Option<u8>>) -> Self {
        QpUpdate { retry_count: retry_count.into(), ..self }
    }

    /// Retries after RNR NAKs, 0 to 7; 7 is without limit. RC, in SQD.
    pub fn rnr_retry(self, rnr_retry: impl Into<Option<u8>>) -> Self {
        QpUpdate { rnr_retry: rnr_retry.into(), ..self }
    }

    /// Outstanding READs and atomics, at most 128. RC, in SQD.
    pub fn max_rd_atomic(self, max_rd_atomic: impl Into<Option<u8>>) -> Self {
        QpUpdate { max_rd_atomic: max_rd_atomic.into(), ..self }
    }

    /// READs and atomics that the peer may have outstanding here, at most 128. RC, in SQD.
    pub fn max_dest_rd_atomic(self, max_dest_rd_atomic: impl Into<Option<u8>>) -> Self {
        QpUpdate { max_dest_rd_atomic: max_dest_rd_atomic.into(), ..self }
    }

    /// Fails on the first attribute that this service does not allow in this state.
    pub(crate) fn check(&self, service: Service, state: QpState) -> Result<(), Error> {
        use QpState::{Init, Rts, Sqd};
        use Service::{Rc, Uc, Ud};
        let attributes: [(&'static str, bool, &[Service], &[QpState]); 10] = [
            ("access", self.access.is_some(), &[Rc, Uc], &[Init, Rts, Sqd]),
            ("qkey", self.qkey.is_some(), &[Ud], &[Init, Rts, Sqd]),
            ("pkey_index", self.pkey_index.is_some(), &[Rc, Uc, Ud], &[Init, Sqd]),
            ("min_rnr_timer", self.min_rnr_timer.is_some(), &[Rc], &[Rts, Sqd]),
            ("address", self.address.is_some(), &[Rc, Uc], &[Sqd]),
            ("timeout", self.timeout.is_some(), &[Rc], &[Sqd]),
            ("retry_count", self.retry_count.is_some(), &[Rc], &[Sqd]),
            ("rnr_retry", self.rnr_retry.is_some(), &[Rc], &[Sqd]),
            ("max_rd_atomic", self.max_rd_atomic.is_some(), &[Rc], &[Sqd]),
            ("max_dest_rd_atomic", self.max_dest_rd_atomic.is_some(), &[Rc], &[Sqd]),
        ];
        for (attribute, given, services, states) in attributes {
            if given && !(services.contains(&service) && states.contains(&state)) {
                let (services, states) = (capitals(services), capitals(states));
                let way = if states == "SQD" { "; Transition::Drain leads there from RTS" } else { "" };
                let expected = format!("may change for {services} in {states} only{way}");
                let value = format!("changed for {} in {}", capitals(&[service]), capitals(&[state]));
                return Err(Error::invalid(attribute, value, expected));
            }
        }
        at_most("max_dest_rd_atomic", self.max_dest_rd_atomic.unwrap_or(0), MAX_RD_ATOMIC)
    }
}

/// As in the standard.
fn capitals(names: &[impl std::fmt::Debug]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("{name:?}").to_uppercase()).collect();
    names.join(", ")
}

fn at_most(attribute: &'static str, value: u8, most: u8) -> Result<(), Error> {
    if value <= most { Ok(()) } else { Err(Error::invalid(attribute, value, format!("0 to {most}"))) }
}
