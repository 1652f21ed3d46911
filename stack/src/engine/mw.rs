//! Memory windows of type 2B (IBA 10.6.7.2): a range of a region, opened to the peer of one queue
//! pair for as long as the application likes, without a registration.
//!
//! Regions and windows share the table of keys, so a packet's key is looked up once.

use std::ops::Range;

use ferroce_wire::RKey;
use rand_chacha::ChaCha20Rng;

use crate::engine::mr::{MemoryRegions, Named, RemoteAccess};
use crate::verbs::{Access, Error, Mr, Mw, Pd, Qp, RemoteMemory};

/// What a bind opens: the fields of [`SendOp::BindMw`](crate::SendOp::BindMw).
#[derive(Clone, Copy)]
pub(crate) struct MwBind {
    pub(crate) mw: Mw,
    pub(crate) mr: Mr,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) access: Access,
}

/// A bind that one of the rules forbids; which, verbs do not tell.
pub(crate) struct BindRefused;

pub(crate) struct MemoryWindow {
    pub(crate) pd: Pd,
    binding: Option<Binding>,
}

/// What a bound window opens, and to whom.
pub(crate) struct Binding {
    pub(crate) qp: Qp,
    pub(crate) access: Access,
    /// The index of the region.
    pub(crate) region: u32,
    /// Bytes of the region.
    pub(crate) range: Range<u64>,
    rkey: RKey,
}

impl MemoryRegions {
    pub(crate) fn alloc_mw(&mut self, pd: Pd) -> Result<Mw, Error> {
        let full = Error::Exhausted { kind: "MW", limit: self.windows.capacity(), setting: "max_mws" };
        self.windows.insert_with(|_| MemoryWindow { pd, binding: None }).map(Mw).ok_or(full)
    }

    pub(crate) fn dealloc_mw(&mut self, mw: Mw) -> Result<(), Error> {
        self.window(mw)?;
        self.unbind(mw.0.index);
        self.windows.remove(mw.0);
        Ok(())
    }

    pub(crate) fn remote_window(&self, mw: Mw) -> Result<Option<RemoteMemory>, Error> {
        let Some(Binding { region, range, rkey, .. }) = &self.window(mw)?.binding else { return Ok(None) };
        let remote = self.slab.at(*region).map(|region| RemoteMemory {
            addr: region.iova + range.start,
            rkey: *rkey,
            length: range.end - range.start,
        });
        Ok(remote)
    }

    /// What can be said of a bind before its turn comes.
    pub(crate) fn check_bind(&self, bind: &MwBind) -> Result<(), Error> {
        let MwBind { mw, mr, length, access, .. } = *bind;
        let grantable =
            Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
        if !grantable.contains(access) {
            return Err(Error::Access { access, reason: "a window grants remote access and flushes only" });
        }
        if length == 0 {
            return Err(Error::invalid("length of the window", 0, "at least 1; invalidate it to unbind it"));
        }
        self.window(mw)?;
        self.get(mr).map(drop)
    }

    /// Binds a window for `qp` of `pd`, under a new key.
    pub(crate) fn bind(
        &mut self,
        rng: &mut ChaCha20Rng,
        pd: Pd,
        qp: Qp,
        bind: &MwBind,
    ) -> Result<(), BindRefused> {
        let MwBind { mw, mr, offset, length, access } = *bind;
        let MemoryRegions { slab, windows, keys } = self;
        let window = windows.get_mut(mw.0).ok_or(BindRefused)?;
        let region = slab.get_mut(mr.0).ok_or(BindRefused)?;
        let end = offset.checked_add(length).ok_or(BindRefused)?;
        let remote_writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let needed = if access.intersects(remote_writes) {
            Access::MW_BIND | Access::LOCAL_WRITE
        } else {
            Access::MW_BIND
        };
        // C10-72 to C10-75, and o10-37.2.30: what is bound must be invalidated first.
        let allowed = window.binding.is_none()
            && window.pd == pd
            && region.pd == pd
            && !region.revoked
            && region.access.contains(needed)
            && end <= region.memory.len() as u64;
        if !allowed {
            return Err(BindRefused);
        }
        let rkey = RKey::new(keys.insert(rng, Named::Window(mw.0.index), |_| true));
        region.windows += 1;
        window.binding = Some(Binding { qp, access, region: mr.0.index, range: offset..end, rkey });
        Ok(())
    }

    /// What the window in this slot opens to `qp`. To others it is not there.
    pub(crate) fn opened(&self, index: u32, qp: Qp) -> Result<&Binding, RemoteAccess> {
        let binding = self.windows.at(index).and_then(|window| window.binding.as_ref());
        binding.filter(|binding| binding.qp == qp).ok_or(RemoteAccess)
    }

    /// Ends what the window in this slot opens, if it is bound. Its key comes back late.
    pub(crate) fn unbind(&mut self, index: u32) {
        let binding = self.windows.at_mut(index).and_then(|window| window.binding.take());
        if let Some(Binding { region, rkey, .. }) = binding {
            self.keys.retire(rkey.value());
            if let Some(region) = self.slab.at_mut(region) {
                region.windows -= 1;
            }
        }
    }

    /// A queue pair that ends takes its windows with it.
    pub(crate) fn unbind_windows_of(&mut self, qp: Qp) {
        for index in 0..self.windows.capacity() as u32 {
            if self.opened(index, qp).is_ok() {
                self.unbind(index);
            }
        }
    }

    fn window(&self, mw: Mw) -> Result<&MemoryWindow, Error> {
        let invalid = || Error::invalid_handle("MW", mw.0);
        self.windows.get(mw.0).ok_or_else(invalid)
    }
}
