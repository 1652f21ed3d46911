//! Protection domains, memory regions, memory windows and address handles.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::abi::{Ah, AhAttr, GlobalRoute, MW_TYPE_2, Mr, Mw, Pd};
use super::device::Device;
use super::dma_buf::Exported;
use super::remedy;
use super::work::Piece;
use crate::memory::EmptyRange;
use crate::{Error, Memory, MemoryError, MemoryKind, Piece as GpuPiece};

/// A protection domain. Clones share it. It is freed with the last clone and the last object that was created in it.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(Arc<Domain>);

#[derive(Debug)]
struct Domain {
    device: Device,
    pd: NonNull<Pd>,
}

// SAFETY: libibverbs and its providers may be called by any thread, for any object. The pointer is only passed to them.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

/// The rights of a peer or a queue pair, bits of `enum ibv_access_flags`.
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
    /// Creates a protection domain on a device.
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
        // SAFETY: it was created by `ibv_alloc_pd`, its objects were destroyed, and it is freed once.
        let returned = unsafe { (self.device.functions().dealloc_pd)(self.pd.as_ptr()) };
        self.device.warn("ibv_dealloc_pd", returned);
    }
}

/// Memory that the card may access by keys, until this is dropped.
///
/// Work requests of this side use its addresses in this process: the providers of ConnectX and of HiSilicon's cards
/// copy data from a completion to the address in the work request. Peers use the addresses that were chosen for it. So
/// it is registered twice, unless these are equal or peers may not access it. A GPU's memory has no addresses in this
/// process that can be written. It gets reserved addresses without memory, and is registered by its dma-buf.
#[derive(Debug)]
pub struct Region {
    /// Registered with the addresses in this process.
    mr: NonNull<Mr>,
    for_peers: Option<NonNull<Mr>>,
    addr: u64,
    lkey: u32,
    domain: ProtectionDomain,
    kept: ManuallyDrop<Kept>,
}

/// The memory that the card, or its provider, may write as long as the region is registered.
#[derive(Debug)]
struct Kept {
    memory: Memory,
    /// For a GPU's memory.
    _addresses: Option<EmptyRange>,
}

// SAFETY: as `Domain`. `Memory` is also `Send`.
unsafe impl Send for Region {}

impl Region {
    /// Its bytes. Slices of them are not allowed, because the card may write them.
    pub(crate) fn memory(&self) -> &Memory {
        &self.kept.memory
    }

    /// Registers memory whose first byte has the address `iova` for peers.
    ///
    /// # Errors
    /// With the memory: [`Error::Verbs`]; [`Error::Invalid`] for an `iova` that is not congruent, modulo the page size,
    /// to the memory's address, or for a GPU's memory to its offset in its dma-buf. For a GPU's memory also
    /// [`Error::Verbs`] if the card, its driver, the kernel or libibverbs does not support it; [`Error::NoDmaBuf`] if
    /// the GPU does not export it; [`Error::Invalid`] because there are no memory windows, or if the card's provider
    /// would copy with the CPU.
    pub fn new(
        domain: &ProtectionDomain,
        memory: Memory,
        access: u32,
        iova: u64,
    ) -> Result<Region, (Memory, Error)> {
        let bytes = match Bytes::of(domain, &memory, access) {
            Ok(bytes) => bytes,
            Err(error) => return Err((memory, error)),
        };
        let addr = bytes.address(&memory);
        let is_for_peers = access & !access::LOCAL_WRITE != 0;
        let is_twice = is_for_peers && addr != iova;
        if is_twice && let Err(error) = bytes.check(addr, iova) {
            return Err((memory, error));
        }
        let own_access = if is_twice { access & access::LOCAL_WRITE } else { access };
        let mr = match bytes.register(domain, &memory, own_access, addr) {
            Ok(mr) => mr,
            Err(error) => return Err((memory, error)),
        };
        // SAFETY: the region exists.
        let lkey = unsafe { mr.as_ref() }.lkey;
        let for_peers = if is_twice { Some(bytes.register(domain, &memory, access, iova)) } else { None };
        let kept = ManuallyDrop::new(Kept { memory, _addresses: bytes.into_addresses() });
        let mut this = Region { mr, for_peers: None, addr, lkey, domain: domain.clone(), kept };
        if let Some(for_peers) = for_peers {
            match for_peers {
                Ok(mr) => this.for_peers = Some(mr),
                Err(error) => {
                    if let Err(kept) = this.release() {
                        tracing::warn!("{kept}");
                    }
                    // A remaining registration has a key that was never returned, and no rights for peers.
                    return Err((this.into_memory(), error));
                }
            }
        }
        Ok(this)
    }

    /// The bytes at `offset`, for a work request. The card completes a work request with bytes outside the region with
    /// a local protection error.
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

    /// The registration that peers access, and that windows are bound to.
    pub(super) fn as_ptr(&self) -> *mut Mr {
        self.for_peers.unwrap_or(self.mr).as_ptr()
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.kept.memory.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.kept.memory.is_empty()
    }

    /// As [`Memory::read`]: by copying, without slices, because the card may write the bytes at any time.
    ///
    /// # Errors
    /// Those of [`Memory::read`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        self.kept.memory.read(offset, to)
    }

    /// As [`Memory::write`].
    ///
    /// # Errors
    /// Those of [`Memory::write`].
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.kept.memory.write(offset, from)
    }

    /// As [`Memory::load_u64`].
    ///
    /// # Errors
    /// Those of [`Memory::load_u64`].
    pub fn load_u64(&self, offset: u64) -> Result<u64, MemoryError> {
        self.kept.memory.load_u64(offset)
    }

    /// As [`Memory::store_u64`].
    ///
    /// # Errors
    /// Those of [`Memory::store_u64`].
    pub fn store_u64(&mut self, offset: u64, value: u64) -> Result<(), MemoryError> {
        self.kept.memory.store_u64(offset, value)
    }

    /// As [`Memory::atomics`].
    ///
    /// # Errors
    /// Those of [`Memory::atomics`].
    pub fn atomics(&self) -> Result<&[AtomicU64], MemoryError> {
        self.kept.memory.atomics()
    }

    /// As [`Memory::piece`].
    ///
    /// # Errors
    /// Those of [`Memory::piece`].
    pub fn gpu_piece(&self, offset: u64, len: usize) -> Result<GpuPiece<'_>, MemoryError> {
        self.kept.memory.piece(offset, len)
    }

    /// Deregisters the memory.
    ///
    /// # Errors
    /// [`Error::Verbs`], with the region unchanged, if a window is bound to it.
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

    /// The memory of a released region.
    fn into_memory(self) -> Memory {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used any more nor dropped: each field is taken or dropped once.
        unsafe {
            let kept = ManuallyDrop::take(&mut this.kept);
            std::ptr::drop_in_place(&mut this.domain);
            kept.memory
        }
    }

    /// Deregisters everything. Must not be called again after success.
    fn release(&mut self) -> Result<(), Error> {
        let device = self.domain.device();
        let dereg_mr = device.functions().dereg_mr;
        if let Some(mr) = self.for_peers {
            // SAFETY: it was returned by a function that registers. It is forgotten unless the call fails.
            device.check("ibv_dereg_mr", unsafe { dereg_mr(mr.as_ptr()) })?;
            self.for_peers = None;
        }
        // SAFETY: it was returned by a function that registers. It is not used afterwards unless the call fails.
        device.check("ibv_dereg_mr", unsafe { dereg_mr(self.mr.as_ptr()) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.release() {
            // SAFETY: the card can no longer access it, and it is dropped once.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.kept) },
            // The card, or its provider, may still write it: neither the memory nor the addresses are ever released.
            Err(error) => tracing::warn!("{error}"),
        }
    }
}

pub(super) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// The kernel maps whole pages: `iova` must have the same offset in a page as the memory has, by `place`.
pub(super) fn check_page(addr: u64, iova: u64, place: &str) -> Result<(), Error> {
    let page = page_size();
    if addr % page == iova % page {
        return Ok(());
    }
    let expected = format!("{} modulo {page}, like {place}; register_at sets the iova", addr % page);
    Err(Error::Invalid { parameter: "iova", value: format!("{iova:#x}"), expected })
}

/// The kind of the memory that is being registered.
enum Bytes {
    Host,
    Gpu(Exported),
}

impl Bytes {
    fn of(domain: &ProtectionDomain, memory: &Memory, access: u32) -> Result<Bytes, Error> {
        match memory.kind() {
            MemoryKind::Device => Ok(Bytes::Gpu(Exported::new(domain, memory, access)?)),
            MemoryKind::Owned | MemoryKind::Shared | MemoryKind::Foreign => Ok(Bytes::Host),
        }
    }

    /// The address in work requests of this side.
    fn address(&self, memory: &Memory) -> u64 {
        match self {
            Bytes::Host => memory.address().as_ptr().expose_provenance() as u64,
            Bytes::Gpu(exported) => exported.address(),
        }
    }

    fn check(&self, addr: u64, iova: u64) -> Result<(), Error> {
        match self {
            Bytes::Host => check_page(addr, iova, "the memory's address"),
            Bytes::Gpu(exported) => exported.check(iova),
        }
    }

    fn register(
        &self,
        domain: &ProtectionDomain,
        memory: &Memory,
        access: u32,
        iova: u64,
    ) -> Result<NonNull<Mr>, Error> {
        match self {
            Bytes::Host => register(domain, memory, access, iova),
            Bytes::Gpu(exported) => exported.register(domain, memory, access, iova),
        }
    }

    fn into_addresses(self) -> Option<EmptyRange> {
        match self {
            Bytes::Host => None,
            Bytes::Gpu(exported) => Some(exported.addresses),
        }
    }
}

/// Registers the bytes of a host's memory with addresses from `iova` on.
fn register(
    domain: &ProtectionDomain,
    memory: &Memory,
    access: u32,
    iova: u64,
) -> Result<NonNull<Mr>, Error> {
    let (device, first) = (domain.device(), memory.address().as_ptr().cast());
    // SAFETY: the bytes are the memory's, which is not moved and is kept until the region is deregistered.
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
    /// Allocates a window that is not bound.
    ///
    /// # Errors
    /// [`Error::Verbs`], also if the card has no windows.
    pub fn new(domain: &ProtectionDomain) -> Result<Window, Error> {
        let device = domain.device();
        let alloc_mw = device.ops().alloc_mw.ok_or_else(|| device.lacks("ibv_alloc_mw"))?;
        // SAFETY: the protection domain exists.
        let mw = unsafe { alloc_mw(domain.as_ptr(), MW_TYPE_2) };
        Ok(Window { mw: device.object("ibv_alloc_mw", mw)?, domain: domain.clone() })
    }

    /// The key of the window as allocated. In each bind the caller chooses the low eight bits.
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
            // SAFETY: it was returned by `alloc_mw`, and is freed once.
            device.warn("ibv_dealloc_mw", unsafe { dealloc_mw(self.mw.as_ptr()) });
        }
    }
}

/// The path to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// The peer.
    pub gid: [u8; 16],
    /// The row of the port's GID table that is the source.
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

/// The path to a peer, for datagrams.
#[derive(Debug)]
pub struct AddressHandle {
    ah: NonNull<Ah>,
    domain: ProtectionDomain,
}

// SAFETY: as `Domain`.
unsafe impl Send for AddressHandle {}

impl AddressHandle {
    /// Creates an address handle. If the provider resolves the next hop, this can take seconds.
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
        // SAFETY: it was created by `ibv_create_ah`, and is destroyed once.
        device.warn("ibv_destroy_ah", unsafe { (device.functions().destroy_ah)(self.ah.as_ptr()) });
    }
}
