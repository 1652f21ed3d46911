use ferroce_wire::Operation;

use crate::verbs::{Config, MAX_RD_ATOMIC};

/// What a context can do and how much of it there can be, under the names of `ibv_query_device_ex`.
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
    /// READs, atomics, FLUSHes and ATOMIC WRITEs that a queue pair has outstanding, each way.
    pub max_qp_rd_atom: u8,
    /// Memory windows are of type 2B: each belongs to the queue pair that bound it.
    pub mem_window_type_2b: bool,
    /// FLUSH to global visibility, to send and to answer.
    pub flush_global: bool,
    /// Memory here can be flushed to persistence. Host memory cannot.
    pub flush_persistent: bool,
    /// ATOMIC WRITE, to send and to answer.
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

    /// Whether requests of this kind exist here at all.
    pub(crate) fn supports(&self, operation: Operation) -> bool {
        match operation {
            Operation::Flush => self.flush_global,
            Operation::AtomicWrite => self.atomic_write,
            _ => true,
        }
    }
}
