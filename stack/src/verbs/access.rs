use std::fmt;
use std::ops::BitOr;

use crate::verbs::Error;

/// Access rights of a memory region, of a window or of a queue pair.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Access(u8);

const NAMES: [(Access, &str); 8] = [
    (Access::LOCAL_WRITE, "LOCAL_WRITE"),
    (Access::REMOTE_WRITE, "REMOTE_WRITE"),
    (Access::REMOTE_READ, "REMOTE_READ"),
    (Access::REMOTE_ATOMIC, "REMOTE_ATOMIC"),
    (Access::FLUSH_GLOBAL, "FLUSH_GLOBAL"),
    (Access::FLUSH_PERSISTENT, "FLUSH_PERSISTENT"),
    (Access::REMOTE_INVALIDATE, "REMOTE_INVALIDATE"),
    (Access::MW_BIND, "MW_BIND"),
];

impl Access {
    /// Local reads only; every region allows them.
    pub const NONE: Access = Access(0);
    /// The stack may write the region for its owner: receives, READ results.
    pub const LOCAL_WRITE: Access = Access(1);
    /// Peers may write. A region needs [`LOCAL_WRITE`](Access::LOCAL_WRITE) too; a queue pair does not.
    ///
    /// An ATOMIC WRITE needs an address that is a multiple of 8. In a region of shared or foreign memory, the byte must also be
    /// at a multiple of 8 in memory: the region's iova must be congruent to its memory's address modulo 8
    /// ([`register_at`](crate::Context::register_at)). Otherwise it is refused as misaligned, with
    /// [`RemInvReqErr`](crate::WcStatus::RemInvReqErr). WRITE has no such rule.
    pub const REMOTE_WRITE: Access = Access(2);
    /// Peers may read.
    pub const REMOTE_READ: Access = Access(4);
    /// Peers may execute atomics. A region needs [`LOCAL_WRITE`](Access::LOCAL_WRITE) too; a queue pair does not.
    pub const REMOTE_ATOMIC: Access = Access(8);
    /// Peers may flush to global visibility.
    pub const FLUSH_GLOBAL: Access = Access(16);
    /// Peers may flush to persistence. Host memory is not persistent, so registration refuses this right.
    pub const FLUSH_PERSISTENT: Access = Access(32);
    /// A peer's SEND with invalidate may revoke the region's remote key. (In the verbs the kind of registration grants this; here
    /// it is a flag.)
    pub const REMOTE_INVALIDATE: Access = Access(64);
    /// Memory windows may be bound to the region. The rights of peers through a window are those of its bind.
    pub const MW_BIND: Access = Access(128);

    /// Whether all of `other` is in `self`.
    pub const fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether a region of `length` bytes at `iova` can have these rights.
    pub(crate) fn check_region(self, length: usize, iova: u64) -> Result<(), Error> {
        let remote_writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if self.intersects(remote_writes) && !self.contains(Access::LOCAL_WRITE) {
            let reason = "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE";
            return Err(Error::Access { access: self, reason });
        }
        if self.contains(Access::FLUSH_PERSISTENT) {
            return Err(Error::Access { access: self, reason: "host memory is not persistent" });
        }
        if iova.checked_add((length as u64).saturating_sub(1)).is_none() {
            let expected = format!("iova + {length} bytes must not pass 2^64");
            return Err(Error::invalid("iova", format_args!("{iova:#x}"), expected));
        }
        Ok(())
    }

    /// Whether any of `other` is in `self`.
    pub const fn intersects(self, other: Access) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Access {
    type Output = Access;
    fn bitor(self, rhs: Access) -> Access {
        Access(self.0 | rhs.0)
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("NONE");
        }
        let names: Vec<&str> = NAMES.iter().filter(|(a, _)| self.contains(*a)).map(|(_, n)| *n).collect();
        f.write_str(&names.join(" | "))
    }
}
