//! Memory windows of type 2B (IBA 10.6.7.2): they grant a range of a region to the peer of one queue pair, without a
//! registration.
//!
//! Regions and windows share the key table, so a packet's key is looked up once.

use std::ops::Range;

use ferroce_wire::RKey;
use rand_chacha::ChaCha20Rng;

use crate::engine::mr::{MemoryRegions, Named, RemoteAccess, check_words};
use crate::verbs::{Access, Error, Mr, Mw, Pd, Qp, RemoteMemory};

/// The parameters of a bind: the fields of [`SendOp::BindMw`](crate::SendOp::BindMw).
#[derive(Clone, Copy)]
pub(crate) struct MwBind {
    pub(crate) mw: Mw,
    pub(crate) mr: Mr,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) access: Access,
}

/// A bind that violates a rule; the status does not report which.
pub(crate) struct BindRefused;

pub(crate) struct MemoryWindow {
    pub(crate) pd: Pd,
    binding: Option<Binding>,
}

/// The range of a bound window, and its queue pair.
pub(crate) struct Binding {
    pub(crate) qp: Qp,
    pub(crate) access: Access,
    /// The index of the region.
    pub(crate) region: u32,
    /// Bytes of the region.
    pub(crate) range: Range<u64>,
    rkey: RKey,
    /// Links of the list of `qp`: the window bound after this one and the one before.
    later: Option<u32>,
    earlier: Option<u32>,
}

/// Checks the range and the rights of any window.
pub(crate) fn check_rights(access: Access, length: u64) -> Result<(), Error> {
    let grantable = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
    if !grantable.contains(access) {
        return Err(Error::Access { access, reason: "a window grants remote access and flushes only" });
    }
    if length == 0 {
        return Err(Error::invalid("length of the window", 0, "at least 1; invalidate it to unbind it"));
    }
    Ok(())
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

    /// The index of the region of a bound window.
    pub(crate) fn region_of_window(&self, index: u32) -> Option<u32> {
        Some(self.windows.at(index)?.binding.as_ref()?.region)
    }

    /// The checks of a bind when it is posted.
    pub(crate) fn check_bind(&self, bind: &MwBind) -> Result<(), Error> {
        let MwBind { mw, mr, length, access, .. } = *bind;
        check_rights(access, length)?;
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
        let list = self.list_of(qp);
        let MemoryRegions { slab, windows, keys, bound_last } = self;
        let window = windows.get_mut(mw.0).ok_or(BindRefused)?;
        let region = slab.get_mut(mr.0).ok_or(BindRefused)?;
        let end = offset.checked_add(length).ok_or(BindRefused)?;
        let remote_writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let needed = if access.intersects(remote_writes) {
            Access::MW_BIND | Access::LOCAL_WRITE
        } else {
            Access::MW_BIND
        };
        // C10-72 to C10-75, and o10-37.2.30: a bound window must be invalidated first.
        let allowed = window.binding.is_none()
            && window.pd == pd
            && region.pd == pd
            && !region.revoked
            && region.access.contains(needed)
            && check_words(&region.memory, access, region.iova).is_ok()
            && end <= region.memory.len() as u64;
        if !allowed {
            return Err(BindRefused);
        }
        let rkey = RKey::new(keys.insert(rng, Named::Window(mw.0.index), |_| true));
        region.windows += 1;
        let earlier = bound_last[list].replace(mw.0.index);
        let (region, range) = (mr.0.index, offset..end);
        window.binding = Some(Binding { qp, access, region, range, rkey, later: None, earlier });
        if let Some(earlier) = earlier.and_then(|index| self.binding_mut(index)) {
            earlier.later = Some(mw.0.index);
        }
        Ok(())
    }

    /// The binding of the window in this slot for `qp`. For others there is none.
    pub(crate) fn opened(&self, index: u32, qp: Qp) -> Result<&Binding, RemoteAccess> {
        let binding = self.windows.at(index).and_then(|window| window.binding.as_ref());
        binding.filter(|binding| binding.qp == qp).ok_or(RemoteAccess)
    }

    /// Ends the binding of the window in this slot, if it is bound. Its key is reused late.
    pub(crate) fn unbind(&mut self, index: u32) {
        let binding = self.windows.at_mut(index).and_then(|window| window.binding.take());
        if let Some(Binding { qp, region, rkey, later, earlier, .. }) = binding {
            match later.and_then(|index| self.binding_mut(index)) {
                Some(later) => later.earlier = earlier,
                None => self.bound_last[self.list_of(qp)] = earlier,
            }
            if let Some(earlier) = earlier.and_then(|index| self.binding_mut(index)) {
                earlier.later = later;
            }
            self.keys.retire(rkey.value());
            if let Some(region) = self.slab.at_mut(region) {
                region.windows -= 1;
            }
        }
    }

    /// Unbinds the windows of a queue pair that ends.
    pub(crate) fn unbind_windows_of(&mut self, qp: Qp) {
        let mut next = self.bound_last[self.list_of(qp)];
        while let Some((index, binding)) = next.and_then(|index| Some((index, self.binding_mut(index)?))) {
            next = binding.earlier;
            if binding.qp == qp {
                self.unbind(index);
            }
        }
    }

    /// The list with the windows of a queue pair.
    fn list_of(&self, qp: Qp) -> usize {
        qp.0.index as usize % self.bound_last.len()
    }

    fn binding_mut(&mut self, index: u32) -> Option<&mut Binding> {
        self.windows.at_mut(index)?.binding.as_mut()
    }

    fn window(&self, mw: Mw) -> Result<&MemoryWindow, Error> {
        let invalid = || Error::invalid_handle("MW", mw.0);
        self.windows.get(mw.0).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use ferroce_driver::Memory;
    use rand_chacha::rand_core::{RngCore, SeedableRng};

    use super::*;
    use crate::verbs::{Config, Handle};

    /// Binds, ends of bindings and of queue pairs in any order, compared with a list of all bindings.
    #[test]
    fn exactly_the_windows_of_a_queue_pair_are_unbound() {
        let mut random = ChaCha20Rng::seed_from_u64(1);
        let mut mrs = MemoryRegions::new(&Config::default().max_mrs(1).max_mws(32).max_qps(4), 0);
        // Two of the four queue pairs are in one list.
        mrs.bound_last = vec![None; 3].into();
        let pd = Pd(Handle { index: 0, generation: 0 });
        let access = Access::MW_BIND;
        let memory = Memory::zeroed(64).expect("memory");
        let mr = mrs.register(&mut random, pd, (memory, None), access, 0).expect("there is room");
        let windows: Vec<Mw> = (0..32).map(|_| mrs.alloc_mw(pd).expect("there is room")).collect();
        let mut bound = [None; 32];
        for step in 0..10_000 {
            let drawn = random.next_u64();
            let (at, owner) = ((drawn >> 40) as usize % 32, (drawn >> 50) as u32 % 4);
            let qp = Qp(Handle { index: owner, generation: 0 });
            match (drawn >> 60, bound[at]) {
                (0, _) => {
                    mrs.unbind_windows_of(qp);
                    bound.iter_mut().filter(|to| **to == Some(owner)).for_each(|to| *to = None);
                }
                (_, None) => {
                    let bind =
                        MwBind { mw: windows[at], mr, offset: 0, length: 1, access: Access::REMOTE_READ };
                    assert!(mrs.bind(&mut random, pd, qp, &bind).is_ok(), "step {step}");
                    bound[at] = Some(owner);
                }
                (_, Some(_)) => {
                    mrs.unbind(at as u32);
                    bound[at] = None;
                }
            }
            for (index, owner) in (0..).zip(bound) {
                let binding = mrs.windows.at(index).and_then(|window| window.binding.as_ref());
                assert_eq!(binding.map(|binding| binding.qp.0.index), owner, "step {step}, window {index}");
            }
        }
    }
}
