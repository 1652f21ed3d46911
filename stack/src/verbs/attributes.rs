//! Attributes of the device, of a queue pair and of a shared receive queue.

use ferroce_wire::{Operation, PKey, PathMtu, Psn, Qpn, RnrTimer};

use crate::verbs::{
    Access, AddressVector, Config, CongestionControl, MAX_RD_ATOMIC, QpState, QpType, ReadyToSend, Srq,
};

/// Capabilities and limits of a context, under the names of `ibv_query_device_ex`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceAttributes {
    /// Protection domains.
    pub max_pd: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Queue pairs.
    pub max_qp: u32,
    /// P_Keys.
    pub max_pkeys: usize,
    /// READs, atomics, FLUSHes and ATOMIC WRITEs that a queue pair may have outstanding in each direction.
    pub max_qp_rd_atom: u8,
    /// Memory windows are of type 2B: each belongs to the queue pair that bound it.
    pub mem_window_type_2b: bool,
    /// FLUSH to global visibility, as requester and responder.
    pub flush_global: bool,
    /// Memory can be flushed to persistence. Host memory can't.
    pub flush_persistent: bool,
    /// ATOMIC WRITE, as requester and responder.
    pub atomic_write: bool,
}

impl DeviceAttributes {
    pub(crate) fn of(config: &Config) -> DeviceAttributes {
        DeviceAttributes {
            max_pd: config.max_pds,
            max_mr: config.max_mrs,
            max_mw: config.max_mws,
            max_cq: config.max_cqs,
            max_qp: config.max_qps,
            max_pkeys: crate::PkeyTable::MAX,
            max_qp_rd_atom: MAX_RD_ATOMIC,
            mem_window_type_2b: true,
            flush_global: config.flush,
            flush_persistent: false,
            atomic_write: config.atomic_write,
        }
    }

    /// Whether requests of this kind are supported.
    pub(crate) fn supports(&self, operation: Operation) -> bool {
        match operation {
            Operation::Flush => self.flush_global,
            Operation::AtomicWrite => self.atomic_write,
            _ => true,
        }
    }
}

/// The state of a queue pair's reaction point.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReactionState {
    /// The current rate, in bit/s.
    pub rate: u64,
    /// The highest rate, used without congestion: the line rate, or that of the parameters.
    pub highest: u64,
    /// The rate that it recovers to, in bit/s.
    pub target: u64,
    /// The estimate of the congestion, 0 to 1.
    pub alpha: f64,
    /// How often the timer has raised the rate since the last cut.
    pub timer_stage: u32,
    /// How often the byte counter has raised the rate since the last cut.
    pub byte_stage: u32,
}

/// What [`Context::query_qp`](crate::Context::query_qp) returns.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct QpAttributes {
    /// Its transport service.
    pub qp_type: QpType,
    /// Its state.
    pub state: QpState,
    /// In SQD: some started sends are not complete yet.
    pub sq_draining: bool,
    /// Its number.
    pub qpn: Qpn,
    /// The peer's; `None` before RTR, and for UD.
    pub dest_qpn: Option<Qpn>,
    /// The path to the peer; likewise.
    pub address: Option<AddressVector>,
    /// The path MTU; likewise.
    pub path_mtu: Option<PathMtu>,
    /// Whether selective repeat was agreed with the peer; go-back-N otherwise.
    pub selective_repeat: bool,
    /// Its congestion control.
    pub congestion: CongestionControl,
    /// The state of its congestion control; `None` if it is off.
    pub reaction: Option<ReactionState>,
    /// The most unacknowledged packets.
    pub window: u32,
    /// The access rights of the peer.
    pub access: Access,
    /// The Q_Key; `None` except for UD.
    pub qkey: Option<u32>,
    /// The index of its P_Key in the port's table; 0 unless an update or the connection manager has set another.
    pub pkey_index: usize,
    /// That P_Key: its packets carry it, and it accepts packets that match it.
    pub pkey: PKey,
    /// The PSN expected next from the peer.
    pub rq_psn: Psn,
    /// The PSN of the next new request.
    pub sq_psn: Psn,
    /// The attributes of the transition to RTS; `None` before RTS, and for UC and UD.
    pub send: Option<ReadyToSend>,
    /// READs and atomics that the peer may have outstanding; 0 before RTR, and for UC and UD.
    pub max_dest_rd_atomic: u8,
    /// The RNR timer sent to the peer; `None` likewise.
    pub min_rnr_timer: Option<RnrTimer>,
    /// Its SRQ.
    pub srq: Option<Srq>,
    /// Sends not yet complete.
    pub outstanding_sends: u32,
    /// Receives not yet complete; with an SRQ only the one in use.
    pub outstanding_receives: u32,
}

/// What [`Context::query_srq`](crate::Context::query_srq) returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SrqAttributes {
    /// The most receives.
    pub depth: u32,
    /// Posted receives that no message has used.
    pub posted: u32,
    /// With fewer receives than this an event is raised; 0 is off.
    pub limit: u32,
}
