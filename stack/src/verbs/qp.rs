//! How a queue pair is created, and the states that it has.

use ferroce_wire::Service;

use crate::verbs::{CongestionControl, Cq, Error, Pd, Srq};

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

impl QpType {
    pub(crate) fn service(self) -> Service {
        match self {
            QpType::Rc => Service::Rc,
            QpType::Uc => Service::Uc,
            QpType::Ud => Service::Ud,
        }
    }
}

/// How a queue pair is created.
///
/// ```
/// # use ferroce::*;
/// # fn create(context: &mut Context, pd: Pd, sent: Cq, received: Cq) -> Result<Qp, Error> {
/// context.create_qp(&QpConfig::rc(pd, sent).recv_cq(received).max_send_wr(512).max_inline_data(0))
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct QpConfig {
    /// The transport service.
    pub qp_type: QpType,
    /// Its protection domain.
    pub pd: Pd,
    /// The completion queue of sends.
    pub send_cq: Cq,
    /// The completion queue of receives.
    pub recv_cq: Cq,
    /// RC and UD: the shared receive queue, instead of a receive queue of its own.
    pub srq: Option<Srq>,
    /// Outstanding sends, 1 to 65536; rounded up to a power of two.
    pub max_send_wr: u32,
    /// Outstanding receives, likewise; unused with an SRQ.
    pub max_recv_wr: u32,
    /// SGEs of a send, 1 to 32.
    pub max_send_sge: u8,
    /// SGEs of a receive, 1 to 32; unused with an SRQ.
    pub max_recv_sge: u8,
    /// Bytes that a send may carry inline, at most 4096.
    pub max_inline_data: u32,
    /// Every send completes with a work completion, as if it were flagged so.
    pub signal_all: bool,
    /// Its congestion control as a sender; `None` for that of the [`Config`](crate::Config).
    pub congestion: Option<CongestionControl>,
    /// The most unacknowledged packets, 1 to the window of the [`Config`](crate::Config), which is the default.
    pub window: Option<u32>,
}

impl QpConfig {
    /// A queue pair with one CQ, 128 sends and receives of 4 SGEs, and 64 bytes inline.
    pub fn new(qp_type: QpType, pd: Pd, cq: Cq) -> QpConfig {
        QpConfig {
            qp_type,
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
            signal_all: false,
            congestion: None,
            window: None,
        }
    }

    /// An RC queue pair; see [`new`](QpConfig::new).
    pub fn rc(pd: Pd, cq: Cq) -> QpConfig {
        QpConfig::new(QpType::Rc, pd, cq)
    }

    /// A UC queue pair; see [`new`](QpConfig::new).
    pub fn uc(pd: Pd, cq: Cq) -> QpConfig {
        QpConfig::new(QpType::Uc, pd, cq)
    }

    /// A UD queue pair; see [`new`](QpConfig::new).
    pub fn ud(pd: Pd, cq: Cq) -> QpConfig {
        QpConfig::new(QpType::Ud, pd, cq)
    }

    /// A separate completion queue for sends.
    pub fn send_cq(self, send_cq: Cq) -> Self {
        QpConfig { send_cq, ..self }
    }

    /// A separate completion queue for receives.
    pub fn recv_cq(self, recv_cq: Cq) -> Self {
        QpConfig { recv_cq, ..self }
    }

    /// RC and UD: uses a shared receive queue; by default the queue pair has a receive queue of its own.
    pub fn srq(self, srq: impl Into<Option<Srq>>) -> Self {
        QpConfig { srq: srq.into(), ..self }
    }

    /// Outstanding sends, 1 to 65536; 128 by default.
    pub fn max_send_wr(self, max_send_wr: u32) -> Self {
        QpConfig { max_send_wr, ..self }
    }

    /// Outstanding receives, 1 to 65536; 128 by default.
    pub fn max_recv_wr(self, max_recv_wr: u32) -> Self {
        QpConfig { max_recv_wr, ..self }
    }

    /// SGEs of a send, 1 to 32; 4 by default.
    pub fn max_send_sge(self, max_send_sge: u8) -> Self {
        QpConfig { max_send_sge, ..self }
    }

    /// SGEs of a receive, 1 to 32; 4 by default.
    pub fn max_recv_sge(self, max_recv_sge: u8) -> Self {
        QpConfig { max_recv_sge, ..self }
    }

    /// Bytes that a send may carry inline, at most 4096; 64 by default.
    pub fn max_inline_data(self, max_inline_data: u32) -> Self {
        QpConfig { max_inline_data, ..self }
    }

    /// Every send completes with a work completion; off by default.
    pub fn signal_all(self, signal_all: bool) -> Self {
        QpConfig { signal_all, ..self }
    }

    /// Its congestion control as a sender; that of the [`Config`](crate::Config) by default.
    pub fn congestion(self, congestion: impl Into<Option<CongestionControl>>) -> Self {
        QpConfig { congestion: congestion.into(), ..self }
    }

    /// The most unacknowledged packets; the window of the [`Config`](crate::Config) by default.
    pub fn window(self, window: impl Into<Option<u32>>) -> Self {
        QpConfig { window: window.into(), ..self }
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
        if self.qp_type == QpType::Uc && self.srq.is_some() {
            return Err(Error::invalid("srq", "given for a UC QP", "no SRQ; only RC and UD have them"));
        }
        Ok(())
    }
}

/// The states of a queue pair (docs/protocol.md §6). [`Transition`](crate::Transition) has the steps between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// RESET: as created. Nothing can be posted, and packets are dropped.
    Reset,
    /// INIT: receives may be posted; packets are dropped.
    Init,
    /// RTR, ready to receive: requests of the peer are executed; sends can't be posted yet.
    Rtr,
    /// RTS, ready to send: sends may be posted too.
    Rts,
    /// SQD, send queue drained, or draining: started sends are completed, and no other is started.
    Sqd,
    /// SQE, send queue error: a send of a UC or UD queue pair failed locally; later ones are flushed, and it still receives.
    Sqe,
    /// ERR: failed; all work is flushed.
    Error,
}

impl QpState {
    pub(crate) const ALL_BUT_RESET: [QpState; 6] =
        [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];

    /// The name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            QpState::Reset => "reset",
            QpState::Init => "init",
            QpState::Rtr => "rtr",
            QpState::Rts => "rts",
            QpState::Sqd => "sqd",
            QpState::Sqe => "sqe",
            QpState::Error => "error",
        }
    }
}
