//! Protection domains, memory regions, memory windows and address handles.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::abi::{Ah, AhAttr, GlobalRoute, MW_TYPE_2, Mr, Mw, Pd};
use super::device::Device;
use super::remedy;
use super::work::Piece;
use crate::{Error, Memory, MemoryError, Piece as GpuPiece};

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
///
/// Work requests of this side name it by its addresses in this process: providers of ConnectX and of HiSilicon's cards copy
/// what came with a completion to the address that the work request has. Peers name it by the addresses that it was given,
/// so it is registered twice, unless these are the same or it is not for peers.
#[derive(Debug)]
pub struct Region {
    /// Its addresses are those of this process.
    mr: NonNull<Mr>,
    for_peers: Option<NonNull<Mr>>,
    addr: u64,
    lkey: u32,
    domain: ProtectionDomain,
    memory: ManuallyDrop<Memory>,
}

// SAFETY: as `Domain`; `Memory` moves between threads too.
unsafe impl Send for Region {}

impl Region {
    /// Registers memory, whose first byte has the address `iova` for peers.
    ///
    /// # Errors
    /// With the memory: [`Error::Verbs`]; [`Error::Invalid`] for an `iova` that is not congruent to the memory's address modulo
    /// the page size.
    pub fn new(
        domain: &ProtectionDomain,
        memory: Memory,
        access: u32,
        iova: u64,
    ) -> Result<Region, (Memory, Error)> {
        let addr = memory.address().as_ptr().expose_provenance() as u64;
        let is_for_peers = access & !access::LOCAL_WRITE != 0;
        let is_twice = is_for_peers && addr != iova;
        if is_twice && let Err(error) = check_page(addr, iova) {
            return Err((memory, error));
        }
        let own_access = if is_twice { access & access::LOCAL_WRITE } else { access };
        let mr = match register(domain, &memory, own_access, addr) {
            Ok(mr) => mr,
            Err(error) => return Err((memory, error)),
        };
        // SAFETY: the region exists.
        let lkey = unsafe { mr.as_ref() }.lkey;
        let (domain, memory) = (domain.clone(), ManuallyDrop::new(memory));
        let mut this = Region { mr, for_peers: None, addr, lkey, domain, memory };
        if is_twice {
            match register(&this.domain, &this.memory, access, iova) {
                Ok(mr) => this.for_peers = Some(mr),
                Err(error) => {
                    if let Err(kept) = this.release() {
                        tracing::warn!("{kept}");
                    }
                    // A registration that is left has a key that nobody knows, and no rights for peers.
                    return Err((this.into_memory(), error));
                }
            }
        }
        Ok(this)
    }

    /// Bytes from `offset` on, for a work request. The card ends one that names others than the region has with a local
    /// protection error.
    #[inline(always)]
    pub fn piece(&self, offset: u64, length: u32) -> Piece {
        let is_inside = offset <= self.len() as u64 && u64::from(length) <= self.len() as u64 - offset;
        let addr = if is_inside { self.addr + offset } else { Piece::nowhere() };
        Piece { addr, length, lkey: self.lkey }
    }

    /// The key for work requests of this side.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region exists.
        unsafe { (*self.as_ptr()).rkey }
    }

    pub(super) fn device(&self) -> &Device {
        self.domain.device()
    }

    /// What peers reach, and windows are bound to.
    pub(super) fn as_ptr(&self) -> *mut Mr {
        self.for_peers.unwrap_or(self.mr).as_ptr()
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

    /// As [`Memory::piece`].
    ///
    /// # Errors
    /// Those of [`Memory::piece`].
    pub fn gpu_piece(&self, offset: u64, len: usize) -> Result<GpuPiece<'_>, MemoryError> {
        self.memory.piece(offset, len)
    }

    /// Ends the registration.
    ///
    /// # Errors
    /// [`Error::Verbs`], with the region as before: a window is bound to it.
    #[expect(
        clippy::result_large_err,
        reason = "the region goes on, and a box would be one more thing that can fail"
    )]
    pub fn deregister(mut self) -> Result<Memory, (Region, Error)> {
        match self.release() {
            Ok(()) => Ok(self.into_memory()),
            Err(error) => Err((self, error)),
        }
    }

    /// The memory of what is released.
    fn into_memory(self) -> Memory {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is not used any more, nor dropped: each field is taken or dropped once.
        unsafe {
            let memory = ManuallyDrop::take(&mut this.memory);
            std::ptr::drop_in_place(&mut this.domain);
            memory
        }
    }

    /// Ends what there is of the registration. Not to be called again when it succeeds.
    fn release(&mut self) -> Result<(), Error> {
        let device = self.domain.device();
        let dereg_mr = device.functions().dereg_mr;
        if let Some(mr) = self.for_peers {
            // SAFETY: it came from `ibv_reg_mr_iova2`; it is forgotten unless the call fails.
            device.check("ibv_dereg_mr", unsafe { dereg_mr(mr.as_ptr()) })?;
            self.for_peers = None;
        }
        // SAFETY: it came from `ibv_reg_mr_iova2`. Nothing is done with it behind this unless the call fails.
        device.check("ibv_dereg_mr", unsafe { dereg_mr(self.mr.as_ptr()) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.release() {
            // SAFETY: the card does not reach it any more, and it is dropped once.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.memory) },
            // The card may still write it: the memory is never given back.
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

/// The kernel maps whole pages: a region begins as far behind the start of one as its memory does.
fn check_page(addr: u64, iova: u64) -> Result<(), Error> {
    // SAFETY: it takes a number and returns one.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
    if addr % page == iova % page {
        return Ok(());
    }
    let expected =
        format!("{} modulo {page}, as the memory's address is; register_at takes one", addr % page);
    Err(Error::Invalid { parameter: "iova", value: format!("{iova:#x}"), expected })
}

/// The bytes of a memory, by addresses from `iova` on.
fn register(
    domain: &ProtectionDomain,
    memory: &Memory,
    access: u32,
    iova: u64,
) -> Result<NonNull<Mr>, Error> {
    let (device, first) = (domain.device(), memory.address().as_ptr().cast());
    // SAFETY: the bytes are the memory's, which stays where it is and is kept until the region is deregistered.
    let mr = unsafe { (device.functions().reg_mr)(domain.as_ptr(), first, memory.len(), iova, access) };
    let registered = device.object("ibv_reg_mr_iova2", mr);
    registered.map_err(|error| error.remedied(|source| remedy::of_registration(memory.len(), source)))
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

    pub(super) fn device(&self) -> &Device {
        self.domain.device()
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

    pub(super) fn device(&self) -> &Device {
        self.domain.device()
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
