//! Protection domains, memory regions, memory windows and address handles.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::abi::{Ah, AhAttr, GlobalRoute, MW_TYPE_2, Mr, Mw, Pd};
use super::device::Device;
use super::remedy;
use crate::{Error, Memory, MemoryError};

/// A protection domain. Clones are the same one; it goes with the last of them and of what was made in it.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(Arc<Domain>);

#[derive(Debug)]
struct Domain {
    device: Device,
    pd: NonNull<Pd>,
}

// SAFETY: libibverbs and its providers may be called by any thread, for any object; the pointer is only given to them.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

/// What a peer or a queue pair may do, as `enum ibv_access_flags` has it.
pub mod access {
    /// `IBV_ACCESS_LOCAL_WRITE`
    pub const LOCAL_WRITE: u32 = 1;
    /// `IBV_ACCESS_REMOTE_WRITE`
    pub const REMOTE_WRITE: u32 = 2;
    /// `IBV_ACCESS_REMOTE_READ`
    pub const REMOTE_READ: u32 = 4;
    /// `IBV_ACCESS_REMOTE_ATOMIC`
    pub const REMOTE_ATOMIC: u32 = 8;
    /// `IBV_ACCESS_MW_BIND`
    pub const MW_BIND: u32 = 16;
}

impl ProtectionDomain {
    /// Of a device.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(device: &Device) -> Result<ProtectionDomain, Error> {
        // SAFETY: the context is open.
        let pd = unsafe { (device.functions().alloc_pd)(device.context()) };
        let pd = device.object("ibv_alloc_pd", pd)?;
        Ok(ProtectionDomain(Arc::new(Domain { device: device.clone(), pd })))
    }

    pub(super) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn as_ptr(&self) -> *mut Pd {
        self.0.pd.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: it came from `ibv_alloc_pd`, what was made in it is gone, and it is freed once.
        let returned = unsafe { (self.device.functions().dealloc_pd)(self.pd.as_ptr()) };
        self.device.warn("ibv_dealloc_pd", returned);
    }
}

/// Memory that the card may reach by keys, until this is dropped.
#[derive(Debug)]
pub struct Region {
    mr: NonNull<Mr>,
    domain: ProtectionDomain,
    memory: ManuallyDrop<Memory>,
}

// SAFETY: as `Domain`; `Memory` moves between threads too.
unsafe impl Send for Region {}

impl Region {
    /// Registers memory, whose first byte has the address `iova` for work requests and peers.
    ///
    /// # Errors
    /// [`Error::Verbs`], with the memory.
    pub fn new(
        domain: &ProtectionDomain,
        memory: Memory,
        access: u32,
        iova: u64,
    ) -> Result<Region, (Memory, Error)> {
        let device = domain.device();
        // SAFETY: the bytes are the memory's, which stays where it is and is kept until the region is deregistered.
        let mr = unsafe {
            (device.functions().reg_mr)(
                domain.as_ptr(),
                memory.address().as_ptr().cast(),
                memory.len(),
                iova,
                access,
            )
        };
        match device.object("ibv_reg_mr_iova2", mr) {
            Ok(mr) => Ok(Region { mr, domain: domain.clone(), memory: ManuallyDrop::new(memory) }),
            Err(error) => {
                let error = error.remedied(|source| remedy::of_registration(memory.len(), source));
                Err((memory, error))
            }
        }
    }

    /// The key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region exists.
        unsafe { (*self.mr.as_ptr()).lkey }
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region exists.
        unsafe { (*self.mr.as_ptr()).rkey }
    }

    pub(super) fn as_ptr(&self) -> *mut Mr {
        self.mr.as_ptr()
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// As [`Memory::read`]: by copying, for the card may write the bytes at any time, so there are no slices of them.
    ///
    /// # Errors
    /// Those of [`Memory::read`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        self.memory.read(offset, to)
    }

    /// As [`Memory::write`].
    ///
    /// # Errors
    /// Those of [`Memory::write`].
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.memory.write(offset, from)
    }

    /// As [`Memory::load_u64`].
    ///
    /// # Errors
    /// Those of [`Memory::load_u64`].
    pub fn load_u64(&self, offset: u64) -> Result<u64, MemoryError> {
        self.memory.load_u64(offset)
    }

    /// As [`Memory::store_u64`].
    ///
    /// # Errors
    /// Those of [`Memory::store_u64`].
    pub fn store_u64(&mut self, offset: u64, value: u64) -> Result<(), MemoryError> {
        self.memory.store_u64(offset, value)
    }

    /// As [`Memory::atomics`].
    ///
    /// # Errors
    /// Those of [`Memory::atomics`].
    pub fn atomics(&self) -> Result<&[AtomicU64], MemoryError> {
        self.memory.atomics()
    }

    /// Ends the registration.
    ///
    /// # Errors
    /// [`Error::Verbs`], with the region as before: a window is bound to it.
    pub fn deregister(self) -> Result<Memory, (Region, Error)> {
        // SAFETY: it came from `ibv_reg_mr_iova2`. Nothing is done with it behind this unless the call fails.
        let returned = unsafe { (self.domain.device().functions().dereg_mr)(self.mr.as_ptr()) };
        if let Err(error) = self.domain.device().check("ibv_dereg_mr", returned) {
            return Err((self, error));
        }
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used any more, nor dropped: each field is taken or dropped once.
        unsafe {
            let memory = ManuallyDrop::take(&mut this.memory);
            std::ptr::drop_in_place(&mut this.domain);
            Ok(memory)
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it came from `ibv_reg_mr_iova2`, and is deregistered once.
        let returned = unsafe { (self.domain.device().functions().dereg_mr)(self.mr.as_ptr()) };
        if returned == 0 {
            // SAFETY: the card does not reach it any more, and it is dropped once.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        } else {
            // The card may still write it: the memory is never given back.
            self.domain.device().warn("ibv_dereg_mr", returned);
        }
    }
}

/// A memory window of type 2.
#[derive(Debug)]
pub struct Window {
    mw: NonNull<Mw>,
    domain: ProtectionDomain,
}

// SAFETY: as `Domain`.
unsafe impl Send for Window {}

impl Window {
    /// A window that is not bound.
    ///
    /// # Errors
    /// [`Error::Verbs`], also where the card has none.
    pub fn new(domain: &ProtectionDomain) -> Result<Window, Error> {
        let device = domain.device();
        let alloc_mw = device.ops().alloc_mw.ok_or_else(|| device.lacks("ibv_alloc_mw"))?;
        // SAFETY: the protection domain exists.
        let mw = unsafe { alloc_mw(domain.as_ptr(), MW_TYPE_2) };
        Ok(Window { mw: device.object("ibv_alloc_mw", mw)?, domain: domain.clone() })
    }

    /// The key of the window as it was allocated; the low eight bits of each bind are the caller's.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the window exists.
        unsafe { (*self.mw.as_ptr()).rkey }
    }

    pub(super) fn as_ptr(&self) -> *mut Mw {
        self.mw.as_ptr()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let device = self.domain.device();
        if let Some(dealloc_mw) = device.ops().dealloc_mw {
            // SAFETY: it came from `alloc_mw`, and is freed once.
            device.warn("ibv_dealloc_mw", unsafe { dealloc_mw(self.mw.as_ptr()) });
        }
    }
}

/// The way to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// The peer.
    pub gid: [u8; 16],
    /// The row of the port's GID table that is sent from.
    pub sgid_index: u8,
    /// 20 bits.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// The priority.
    pub service_level: u8,
    /// The port, from 1.
    pub port: u8,
}

impl Address {
    pub(super) fn raw(&self) -> AhAttr {
        let Address { gid, sgid_index, flow_label, hop_limit, traffic_class, service_level, port } = *self;
        AhAttr {
            grh: GlobalRoute { dgid: gid, flow_label, sgid_index, hop_limit, traffic_class },
            sl: service_level,
            is_global: 1,
            port_num: port,
            ..AhAttr::default()
        }
    }

    pub(super) fn from_raw(raw: &AhAttr) -> Address {
        let GlobalRoute { dgid, flow_label, sgid_index, hop_limit, traffic_class } = raw.grh;
        let (service_level, port) = (raw.sl, raw.port_num);
        Address { gid: dgid, sgid_index, flow_label, hop_limit, traffic_class, service_level, port }
    }
}

/// The way to a peer, for datagrams.
#[derive(Debug)]
pub struct AddressHandle {
    ah: NonNull<Ah>,
    domain: ProtectionDomain,
}

// SAFETY: as `Domain`.
unsafe impl Send for AddressHandle {}

impl AddressHandle {
    /// Looks for the next hop, if the provider does, which can take seconds.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn new(domain: &ProtectionDomain, address: &Address) -> Result<AddressHandle, Error> {
        let device = domain.device();
        let mut raw = address.raw();
        // SAFETY: the protection domain exists, and the attributes have the size that the ABI fixes.
        let ah = unsafe { (device.functions().create_ah)(domain.as_ptr(), &mut raw) };
        Ok(AddressHandle { ah: device.object("ibv_create_ah", ah)?, domain: domain.clone() })
    }

    pub(super) fn as_ptr(&self) -> *mut Ah {
        self.ah.as_ptr()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        let device = self.domain.device();
        // SAFETY: it came from `ibv_create_ah`, and is destroyed once.
        device.warn("ibv_destroy_ah", unsafe { (device.functions().destroy_ah)(self.ah.as_ptr()) });
    }
}
