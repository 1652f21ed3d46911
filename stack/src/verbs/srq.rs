//! How a shared receive queue is created (docs/protocol.md §6).

use crate::verbs::{Error, Pd};

/// How a shared receive queue is created. [`Context::create_srq`](crate::Context::create_srq) has an example.
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct SrqConfig {
    /// The protection domain of its receives.
    pub pd: Pd,
    /// Outstanding receives, 1 to 65536; rounded up to a power of two.
    pub max_wr: u32,
    /// SGEs of a receive, 1 to 32.
    pub max_sge: u8,
}

impl SrqConfig {
    /// 128 receives of 4 SGEs, as for a queue pair.
    pub fn new(pd: Pd) -> SrqConfig {
        SrqConfig { pd, max_wr: 128, max_sge: 4 }
    }

    /// Outstanding receives, 1 to 65536; 128 by default.
    pub fn max_wr(self, max_wr: u32) -> Self {
        SrqConfig { max_wr, ..self }
    }

    /// SGEs of a receive, 1 to 32; 4 by default.
    pub fn max_sge(self, max_sge: u8) -> Self {
        SrqConfig { max_sge, ..self }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let limits = [("max_wr", self.max_wr, 65536), ("max_sge", self.max_sge.into(), 32)];
        for (attribute, value, most) in limits {
            if value == 0 || value > most {
                return Err(Error::invalid(attribute, value, format!("1 to {most}")));
            }
        }
        Ok(())
    }
}
