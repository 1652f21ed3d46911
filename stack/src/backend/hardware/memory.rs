//! Protection domains, memory regions and memory windows.

use std::sync::atomic::AtomicU64;

use ferroce_driver::reduction::{Computation, Part};
use ferroce_driver::rnic::{ProtectionDomain, Region, Window, access};
use ferroce_driver::{Memory, MemoryError, Piece};
use ferroce_wire::RKey;

use super::Hardware;
use super::work::WindowWork;
use crate::engine::mr::{busy, invalid, refused};
use crate::verbs::{Access, Error, Feature, Mr, Mw, Pd, RegisterError, RemoteMemory};

pub(super) struct HardwareRegion {
    pub(super) card: Region,
    pd: Pd,
    /// Its address for peers.
    pub(super) iova: u64,
}

pub(super) struct HardwareWindow {
    pub(super) card: Window,
    pd: Pd,
    /// The low bits of the key of the last bind.
    pub(super) key: u8,
    bound: Option<WindowBinding>,
}

impl HardwareWindow {
    /// The key of the next bind.
    pub(super) fn next_rkey(&self) -> u32 {
        self.card.rkey() & !0xff | u32::from(self.key.wrapping_add(1))
    }
}

/// The range that a bind grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowBinding {
    pub(super) region: Mr,
    pub(super) remote: RemoteMemory,
}

impl Hardware {
    pub(crate) fn alloc_pd(&mut self) -> Result<Pd, Error> {
        let full = Error::Exhausted { kind: "PD", limit: self.pds.capacity(), setting: "max_pds" };
        if self.pds.is_full() {
            return Err(full);
        }
        let card = ProtectionDomain::new(&self.device)?;
        self.pds.insert_with(|_| card).map(Pd).ok_or(full)
    }

    pub(crate) fn dealloc_pd(&mut self, pd: Pd) -> Result<(), Error> {
        self.pd(pd)?;
        let users =
            if self.named.mrs.iter().any(|mr| mr.pd == pd) || self.named.mws.iter().any(|mw| mw.pd == pd) {
                "memory regions or windows"
            } else if self.srqs.iter().any(|srq| srq.pd == pd) {
                "shared receive queues"
            } else if self.named.ahs.iter().any(|ah| ah.pd == pd) {
                "address handles"
            } else if self.qps.iter().any(|qp| qp.pd == pd) {
                "queue pairs"
            } else {
                self.pds.remove(pd.0);
                return Ok(());
            };
        Err(Error::Busy { kind: "PD", handle: format!("{:?}", pd.0), users: users.to_owned() })
    }

    pub(crate) fn register_at(
        &mut self,
        pd: Pd,
        memory: Memory,
        access: Access,
        iova: u64,
    ) -> Result<Mr, RegisterError> {
        let full = Error::Exhausted { kind: "MR", limit: self.named.mrs.capacity(), setting: "max_mrs" };
        let checked = self.pd(pd).cloned().and_then(|domain| {
            access.check_region(memory.len(), iova)?;
            if self.named.mrs.is_full() { Err(full) } else { Ok((domain, region_rights(access)?)) }
        });
        let (domain, rights) = match checked {
            Ok(checked) => checked,
            Err(source) => return Err(RegisterError { memory, source }),
        };
        let card = Region::new(&domain, memory, rights, iova)
            .map_err(|(memory, source)| RegisterError { memory, source: source.into() })?;
        let inserted = self.named.mrs.insert_with(|_| HardwareRegion { card, pd, iova });
        // There is room, as just checked.
        inserted.map(Mr).ok_or_else(|| unreachable!("the slab was checked for room"))
    }

    #[expect(clippy::result_large_err, reason = "what could not be ended goes back to its place")]
    pub(crate) fn deregister(&mut self, mr: Mr) -> Result<Memory, Error> {
        self.region(mr)?;
        let posted: u32 = self.qps.iter().map(|qp| qp.users_of(mr)).sum::<u32>()
            + self.srqs.iter().map(|srq| srq.slots.users_of(mr)).sum::<u32>();
        let is_bound = |mw: &&HardwareWindow| mw.bound.is_some_and(|bound| bound.region == mr);
        let windows = self.named.mws.iter().filter(is_bound).count();
        if posted > 0 || windows > 0 {
            let users = format!("{posted} outstanding work requests and {windows} bound memory windows");
            return Err(busy(mr, users));
        }
        let deregister = |HardwareRegion { card, pd, iova }| {
            card.deregister().map_err(|(card, error)| (HardwareRegion { card, pd, iova }, error))
        };
        self.named.mrs.remove_by(mr.0, deregister).ok_or_else(|| invalid(mr))?.map_err(Error::from)
    }

    pub(crate) fn exchange(&mut self, mr: Mr, memory: Memory) -> Result<Memory, RegisterError> {
        let source = self.region(mr).err().unwrap_or(Error::Unsupported(Feature::Exchange));
        Err(RegisterError { memory, source })
    }

    pub(crate) fn remote(&self, mr: Mr) -> Result<RemoteMemory, Error> {
        let HardwareRegion { iova, .. } = *self.named.mrs.get(mr.0).ok_or_else(|| invalid(mr))?;
        let region = self.region(mr)?;
        Ok(RemoteMemory { addr: iova, rkey: RKey::new(region.rkey()), length: region.len() as u64 })
    }

    pub(crate) fn alloc_mw(&mut self, pd: Pd) -> Result<Mw, Error> {
        let full = Error::Exhausted { kind: "MW", limit: self.named.mws.capacity(), setting: "max_mws" };
        let domain = self.pd(pd)?;
        if self.named.mws.is_full() {
            return Err(full);
        }
        let card = Window::new(domain)?;
        let key = card.rkey() as u8;
        let window = HardwareWindow { card, pd, key, bound: None };
        self.named.mws.insert_with(|_| window).map(Mw).ok_or(full)
    }

    pub(crate) fn dealloc_mw(&mut self, mw: Mw) -> Result<(), Error> {
        self.named.mws.remove(mw.0).map(drop).ok_or_else(|| Error::invalid_handle("MW", mw.0))
    }

    pub(crate) fn remote_window(&self, mw: Mw) -> Result<Option<RemoteMemory>, Error> {
        let window = self.named.mws.get(mw.0).ok_or_else(|| Error::invalid_handle("MW", mw.0))?;
        Ok(window.bound.map(|bound| bound.remote))
    }

    /// Completes a work request on a window.
    #[cold]
    pub(super) fn complete_window(&mut self, work: WindowWork, has_succeeded: bool) {
        match work {
            WindowWork::Bind { window, binding } if has_succeeded => {
                if let Some(window) = self.named.mws.get_mut(window.0) {
                    window.bound = Some(binding);
                }
            }
            WindowWork::Invalidate { rkey } if has_succeeded => self.revoke(rkey),
            WindowWork::Bind { .. } | WindowWork::Invalidate { .. } => {}
        }
    }

    /// The window with this key is no longer bound.
    #[cold]
    pub(super) fn revoke(&mut self, rkey: u32) {
        let has_key = |window: &&mut HardwareWindow| {
            window.bound.is_some_and(|bound| bound.remote.rkey.value() == rkey)
        };
        if let Some(window) = self.named.mws.iter_mut().find(has_key) {
            window.bound = None;
        }
    }

    pub(crate) fn read(&self, mr: Mr, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        self.region(mr)?.read(offset, to).map_err(refused(mr))
    }

    pub(crate) fn write(&mut self, mr: Mr, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.region_mut(mr)?.write(offset, from).map_err(refused(mr))
    }

    pub(crate) fn load_u64(&self, mr: Mr, offset: u64) -> Result<u64, Error> {
        self.region(mr)?.load_u64(offset).map_err(refused(mr))
    }

    pub(crate) fn store_u64(&mut self, mr: Mr, offset: u64, value: u64) -> Result<(), Error> {
        self.region_mut(mr)?.store_u64(offset, value).map_err(refused(mr))
    }

    pub(crate) fn atomics(&self, mr: Mr) -> Result<&[AtomicU64], Error> {
        self.region(mr)?.atomics().map_err(refused(mr))
    }

    pub(crate) fn bytes(&self, mr: Mr) -> Result<&[u8], Error> {
        self.region(mr)?;
        Err(refused(mr)(MemoryError::Card))
    }

    pub(crate) fn bytes_mut(&mut self, mr: Mr) -> Result<&mut [u8], Error> {
        self.region(mr)?;
        Err(refused(mr)(MemoryError::Card))
    }

    pub(crate) fn piece(&self, mr: Mr, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        self.region(mr)?.gpu_piece(offset, len).map_err(refused(mr))
    }

    pub(crate) fn compute(
        &mut self,
        computation: Computation,
        targets: &[Part<Mr>],
        sources: &[Part<Mr>],
    ) -> Result<(), Error> {
        let refused = |mr, error| refused(mr)(error);
        computation.run(self, Hardware::region, refused, targets, sources)
    }

    fn region(&self, mr: Mr) -> Result<&Region, Error> {
        self.named.mrs.get(mr.0).map(|region| &region.card).ok_or_else(|| invalid(mr))
    }

    fn region_mut(&mut self, mr: Mr) -> Result<&mut Region, Error> {
        self.named.mrs.get_mut(mr.0).map(|region| &mut region.card).ok_or_else(|| invalid(mr))
    }
}

/// The card's form of a region's rights.
fn region_rights(rights: Access) -> Result<u32, Error> {
    if rights.contains(Access::REMOTE_INVALIDATE) {
        return Err(Error::Unsupported(Feature::RemoteInvalidate));
    }
    if rights.contains(Access::FLUSH_GLOBAL) {
        return Err(Error::Unsupported(Feature::Flush));
    }
    let local = if rights.contains(Access::LOCAL_WRITE) { access::LOCAL_WRITE } else { 0 };
    let bind = if rights.contains(Access::MW_BIND) { access::MW_BIND } else { 0 };
    Ok(local | bind | remote_rights(rights))
}

/// The rights of peers, for regions, windows and queue pairs.
pub(super) fn remote_rights(rights: Access) -> u32 {
    let table = [
        (Access::REMOTE_WRITE, access::REMOTE_WRITE),
        (Access::REMOTE_READ, access::REMOTE_READ),
        (Access::REMOTE_ATOMIC, access::REMOTE_ATOMIC),
    ];
    table.iter().filter(|(right, _)| rights.contains(*right)).map(|(_, bit)| bit).sum()
}
