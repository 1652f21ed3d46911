//! Protection domains, memory regions and memory windows.

use std::sync::atomic::AtomicU64;

use ferroce_driver::reduction::{Computation, Part};
use ferroce_driver::{Memory, Piece};

use super::{Engine, Software};
use crate::engine::mr::refused;
use crate::engine::shared::Shared;
use crate::verbs::{Access, Error, Mr, Mw, Pd, RegisterError, RemoteMemory};

impl Software {
    pub(crate) fn alloc_pd(&mut self) -> Result<Pd, Error> {
        let limit = self.pds.capacity();
        let full = Error::Exhausted { kind: "PD", limit, setting: "max_pds" };
        self.pds.insert_with(|_| ()).map(Pd).ok_or(full)
    }

    pub(crate) fn dealloc_pd(&mut self, pd: Pd) -> Result<(), Error> {
        self.check_pd(pd)?;
        let shared = &self.engine.shared;
        let users = if shared.mrs.uses_pd(pd) {
            "memory regions or windows"
        } else if shared.srqs.iter().any(|srq| srq.pd == pd) {
            "shared receive queues"
        } else if shared.ahs.iter().any(|ah| ah.pd == pd) {
            "address handles"
        } else if self.engine.qps.iter().any(|qp| qp.pd == pd) {
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
        if let Err(source) = self.check_pd(pd) {
            return Err(RegisterError { memory, source });
        }
        let copier = match self.copier_of(&memory) {
            Ok(copier) => copier,
            Err(source) => return Err(RegisterError { memory, source }),
        };
        let Shared { mrs, rng, .. } = &mut self.engine.shared;
        mrs.register(rng, pd, (memory, copier), access, iova)
    }

    /// The copier for this memory's device, if it is device memory.
    fn copier_of(&mut self, memory: &Memory) -> Result<Option<u8>, Error> {
        let Engine { qps, shared, .. } = &mut self.engine;
        Ok(shared.staging.copier_of(memory, &shared.mrs, qps.capacity())?)
    }

    pub(crate) fn deregister(&mut self, mr: Mr) -> Result<Memory, Error> {
        self.engine.shared.mrs.deregister(mr)
    }

    pub(crate) fn exchange(&mut self, mr: Mr, memory: Memory) -> Result<Memory, RegisterError> {
        match self.copier_of(&memory) {
            Ok(copier) => self.engine.shared.mrs.exchange(mr, (memory, copier)),
            Err(source) => Err(RegisterError { memory, source }),
        }
    }

    pub(crate) fn remote(&self, mr: Mr) -> Result<RemoteMemory, Error> {
        self.engine.shared.mrs.remote(mr)
    }

    pub(crate) fn alloc_mw(&mut self, pd: Pd) -> Result<Mw, Error> {
        self.check_pd(pd)?;
        self.engine.shared.mrs.alloc_mw(pd)
    }

    pub(crate) fn dealloc_mw(&mut self, mw: Mw) -> Result<(), Error> {
        self.engine.shared.mrs.dealloc_mw(mw)
    }

    pub(crate) fn remote_window(&self, mw: Mw) -> Result<Option<RemoteMemory>, Error> {
        self.engine.shared.mrs.remote_window(mw)
    }

    pub(crate) fn read(&self, mr: Mr, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        self.memory(mr)?.read(offset, to).map_err(refused(mr))
    }

    pub(crate) fn write(&mut self, mr: Mr, offset: u64, from: &[u8]) -> Result<(), Error> {
        self.memory_mut(mr)?.write(offset, from).map_err(refused(mr))
    }

    pub(crate) fn load_u64(&self, mr: Mr, offset: u64) -> Result<u64, Error> {
        self.memory(mr)?.load_u64(offset).map_err(refused(mr))
    }

    pub(crate) fn store_u64(&mut self, mr: Mr, offset: u64, value: u64) -> Result<(), Error> {
        self.memory_mut(mr)?.store_u64(offset, value).map_err(refused(mr))
    }

    pub(crate) fn atomics(&self, mr: Mr) -> Result<&[AtomicU64], Error> {
        self.memory(mr)?.atomics().map_err(refused(mr))
    }

    pub(crate) fn bytes(&self, mr: Mr) -> Result<&[u8], Error> {
        self.memory(mr)?.bytes().map_err(refused(mr))
    }

    pub(crate) fn bytes_mut(&mut self, mr: Mr) -> Result<&mut [u8], Error> {
        self.memory_mut(mr)?.bytes_mut().map_err(refused(mr))
    }

    pub(crate) fn piece(&self, mr: Mr, offset: u64, len: usize) -> Result<Piece<'_>, Error> {
        self.memory(mr)?.piece(offset, len).map_err(refused(mr))
    }

    pub(crate) fn compute(
        &mut self,
        computation: Computation,
        targets: &[Part<Mr>],
        sources: &[Part<Mr>],
    ) -> Result<(), Error> {
        let regions = &mut self.engine.shared.mrs;
        let refused = |mr, error| refused(mr)(error);
        computation.run(regions, |regions, mr| regions.memory(mr), refused, targets, sources)
    }

    fn memory(&self, mr: Mr) -> Result<&Memory, Error> {
        self.engine.shared.mrs.memory(mr)
    }

    fn memory_mut(&mut self, mr: Mr) -> Result<&mut Memory, Error> {
        self.engine.shared.mrs.memory_mut(mr)
    }
}
