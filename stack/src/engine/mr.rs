use std::ops::Range;

use arrayvec::ArrayVec;
use ferroce_driver::gpu::MAX_PIECES;
use ferroce_driver::{Held, Memory, MemoryError, MemoryKind, Payload, Piece, Span};
use ferroce_wire::RKey;
use rand_chacha::ChaCha20Rng;

use crate::engine::key_table::KeyTable;
use crate::engine::mw::MemoryWindow;
use crate::engine::slab::Slab;
use crate::engine::staging::landing::LandingPlace;
use crate::verbs::{Access, Config, Error, Feature, Mr, Pd, Qp, RegisterError, RemoteMemory, Sge};

pub(crate) struct MemoryRegion {
    pub(crate) memory: Memory,
    pub(crate) pd: Pd,
    pub(crate) access: Access,
    pub(crate) iova: u64,
    rkey: RKey,
    /// The key was invalidated: local use continues, remote use does not.
    pub(crate) revoked: bool,
    /// Outstanding work requests that refer to the region.
    pins: u32,
    /// Memory windows bound to it.
    pub(crate) windows: u32,
    /// The copier for device memory.
    copier: Option<u8>,
}

/// The next bytes of a list of pieces: in host memory, or in memory of one device.
#[expect(clippy::large_enum_variant, reason = "it is looked at where it is made, and kept nowhere")]
pub(crate) enum Source<'a> {
    Host(Span<'a>),
    /// The copier, and the pieces.
    Device(u8, ArrayVec<Piece<'a>, MAX_PIECES>),
}

/// The object of a remote key, by index.
#[derive(Clone, Copy)]
pub(crate) enum Named {
    Region(u32),
    Window(u32),
}

/// A work request refers to memory that it may not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalProtection;

/// A packet refers to memory that it may not use; the peer is not told which rule it violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemoteAccess;

/// A checked range of a region that a packet or a work request may use.
#[derive(Clone, Copy)]
pub(crate) struct Granted {
    index: u32,
    start: u64,
    len: usize,
}

impl Granted {
    /// The `len` bytes of a piece that passed `check_local`, from byte `skip` of it on.
    pub(crate) fn of_sge(sge: &Sge, skip: u32, len: u32) -> Option<Granted> {
        let start = sge.offset.checked_add(skip.into())?;
        Some(Granted { index: sge.mr.0.index, start, len: len as usize })
    }

    pub(crate) fn len(self) -> u32 {
        self.len as u32
    }
}

/// Memory regions, and the windows that open parts of them (`mw.rs`).
pub(crate) struct MemoryRegions {
    pub(crate) slab: Slab<MemoryRegion>,
    pub(crate) windows: Slab<MemoryWindow>,
    /// The window bound last, by the queue pair's slot modulo the length; bindings link to earlier ones.
    pub(crate) bound_last: Box<[Option<u32>]>,
    pub(crate) keys: KeyTable<Named>,
}

/// The range of a key: the bytes `range` of the region at `index`.
struct Reach<'a> {
    index: u32,
    region: &'a MemoryRegion,
    range: Range<u64>,
}

impl MemoryRegions {
    pub(crate) fn new(config: &Config, generation: u32) -> MemoryRegions {
        let Config { max_mrs: regions, max_mws: windows, max_qps: qps, .. } = *config;
        let most = regions.saturating_add(windows);
        let keys = KeyTable::new(most, 32);
        MemoryRegions {
            slab: Slab::new(regions, generation),
            windows: Slab::new(windows, generation),
            bound_last: vec![None; qps.min(windows).max(1) as usize].into(),
            // A bind draws a key during packet processing.
            keys: if windows > 0 { keys.at_full_size(most) } else { keys },
        }
    }

    pub(crate) fn register(
        &mut self,
        rng: &mut ChaCha20Rng,
        pd: Pd,
        (memory, copier): (Memory, Option<u8>),
        access: Access,
        iova: u64,
    ) -> Result<Mr, RegisterError> {
        if let Err(source) = self.check_registration(&memory, access, iova) {
            return Err(RegisterError { memory, source });
        }
        let MemoryRegions { slab, keys, .. } = self;
        let handle = slab.insert_with(|handle| {
            let rkey = RKey::new(keys.insert(rng, Named::Region(handle.index), |_| true));
            MemoryRegion { memory, pd, access, iova, rkey, revoked: false, pins: 0, windows: 0, copier }
        });
        // There is room: `check_registration` has checked it.
        handle.map(Mr).ok_or_else(|| unreachable!("the slab was checked for room"))
    }

    fn check_registration(&self, memory: &Memory, access: Access, iova: u64) -> Result<(), Error> {
        access.check_region(memory.len(), iova)?;
        check_words(memory, access, iova)?;
        if self.slab.is_full() {
            return Err(Error::Exhausted { kind: "MR", limit: self.slab.capacity(), setting: "max_mrs" });
        }
        Ok(())
    }

    pub(crate) fn deregister(&mut self, mr: Mr) -> Result<Memory, Error> {
        let region = self.slab.get_mut(mr.0).ok_or_else(|| invalid(mr))?;
        if region.pins > 0 || region.windows > 0 {
            let MemoryRegion { pins, windows, .. } = region;
            let users = format!("{pins} outstanding work requests and {windows} bound memory windows");
            return Err(busy(mr, users));
        }
        if region.memory.is_pinned() {
            // Otherwise peers could delay it forever.
            region.revoked = true;
            return Err(busy(mr, region.still_used()));
        }
        match self.slab.remove(mr.0) {
            Some(region) => {
                self.keys.retire(region.rkey.value());
                Ok(region.memory)
            }
            None => Err(invalid(mr)),
        }
    }

    pub(crate) fn exchange(
        &mut self,
        mr: Mr,
        (memory, copier): (Memory, Option<u8>),
    ) -> Result<Memory, RegisterError> {
        let Some(region) = self.slab.get_mut(mr.0) else {
            return Err(RegisterError { memory, source: invalid(mr) });
        };
        let (pins, length) = (region.pins, region.memory.len());
        let words = check_words(&memory, region.access, region.iova);
        let source = if pins > 0 {
            busy(mr, format!("{pins} outstanding work requests"))
        } else if region.memory.is_pinned() {
            busy(mr, region.still_used())
        } else if memory.len() != length {
            Error::invalid("memory", memory.len(), format!("{length} bytes, as the region has"))
        } else if let Err(error) = words {
            error
        } else {
            region.copier = copier;
            return Ok(std::mem::replace(&mut region.memory, memory));
        };
        Err(RegisterError { memory, source })
    }

    pub(crate) fn remote(&self, mr: Mr) -> Result<RemoteMemory, Error> {
        let region = self.get(mr)?;
        Ok(RemoteMemory { addr: region.iova, rkey: region.rkey, length: region.memory.len() as u64 })
    }

    pub(crate) fn memory(&self, mr: Mr) -> Result<&Memory, Error> {
        Ok(&self.get(mr)?.memory)
    }

    pub(crate) fn memory_mut(&mut self, mr: Mr) -> Result<&mut Memory, Error> {
        Ok(&mut self.slab.get_mut(mr.0).ok_or_else(|| invalid(mr))?.memory)
    }

    pub(crate) fn uses_pd(&self, pd: Pd) -> bool {
        self.slab.iter().any(|region| region.pd == pd) || self.windows.iter().any(|window| window.pd == pd)
    }

    /// Whether a region is memory of this copier's device.
    pub(crate) fn uses_copier(&self, copier: u8) -> bool {
        self.slab.iter().any(|region| region.copier == Some(copier))
    }

    /// Whether some of the pieces are device memory.
    pub(crate) fn has_device(&self, sges: &[Sge]) -> bool {
        sges.iter().any(|sge| self.copier_of(sge).is_some())
    }

    fn copier_of(&self, sge: &Sge) -> Option<u8> {
        self.slab.get(sge.mr.0)?.copier
    }

    /// The number of devices whose memory is among the pieces.
    pub(crate) fn devices(&self, sges: &[Sge]) -> usize {
        let is_first =
            |(index, of): &(usize, u8)| !sges[..*index].iter().any(|sge| self.copier_of(sge) == Some(*of));
        let copiers = sges.iter().enumerate().filter_map(|(index, sge)| Some((index, self.copier_of(sge)?)));
        copiers.filter(is_first).count()
    }

    /// Records that a work request refers to these pieces.
    #[inline]
    pub(crate) fn pin(&mut self, sges: &[Sge]) -> Result<(), Error> {
        for (n, sge) in sges.iter().enumerate() {
            let Some(region) = self.slab.get_mut(sge.mr.0) else {
                self.unpin(&sges[..n]);
                return Err(invalid(sge.mr));
            };
            region.pins += 1;
        }
        Ok(())
    }

    /// Records that a work request with these pieces is done.
    #[inline]
    pub(crate) fn unpin(&mut self, sges: &[Sge]) {
        for sge in sges {
            if let Some(region) = self.slab.get_mut(sge.mr.0) {
                region.pins -= 1;
            }
        }
    }

    /// Whether a queue pair of `pd` may use these pieces with `access`.
    #[inline]
    pub(crate) fn check_local(&self, pd: Pd, sges: &[Sge], access: Access) -> Result<(), LocalProtection> {
        let fine = |sge: &Sge| {
            let Some(region) = self.slab.get(sge.mr.0) else { return false };
            let end = sge.offset.checked_add(u64::from(sge.length));
            region.pd == pd
                && region.access.contains(access)
                && end.is_some_and(|end| end <= region.memory.len() as u64)
        };
        if sges.iter().all(fine) { Ok(()) } else { Err(LocalProtection) }
    }

    /// The `len` bytes of `sges` from byte `skip` on, piece by piece. They passed [`check_local`](Self::check_local) and
    /// are pinned since.
    pub(crate) fn pieces<'a>(&'a self, sges: &'a [Sge], skip: u32, len: u32) -> Pieces<'a> {
        Pieces { mrs: self, sges: sges.iter(), skip: skip as usize, left: len as usize }
    }

    /// The same bytes of a list with one piece, at less cost; `None` if it has fewer.
    #[inline(always)]
    pub(crate) fn piece(&self, sge: &Sge, skip: u32, len: u32) -> Option<Span<'_>> {
        self.slab.get(sge.mr.0)?.memory.span(sge.offset.checked_add(skip.into())?, len as usize)
    }

    /// The bytes of a range, if a port may send them in place.
    pub(crate) fn payload(&self, range: Granted) -> Option<Payload<'_>> {
        self.slab.at(range.index)?.memory.payload(range.start, range.len)
    }

    /// Copies `data` to the pieces, from byte `skip` on. They passed [`check_local`](Self::check_local). Returns whether
    /// all of it was copied: the CPU can't access device memory.
    #[must_use]
    pub(crate) fn scatter(&mut self, sges: &[Sge], skip: u32, data: &[u8]) -> bool {
        let mut whole = true;
        let mut rest = data;
        for (mr, offset, len) in parts(sges, skip, data.len()) {
            let (part, behind) = rest.split_at(len);
            if let Some(region) = self.slab.get_mut(mr.0) {
                whole &= region.memory.write_by_cpu(offset, part);
            }
            rest = behind;
        }
        whole
    }

    /// The next bytes of the pieces from byte `skip` on, at most `len`, of host memory or of one device. `None` if the
    /// region is gone.
    pub(crate) fn next_source<'a>(&'a self, sges: &[Sge], skip: u32, len: usize) -> Option<Source<'a>> {
        let mut found: Option<(u8, ArrayVec<Piece<'a>, MAX_PIECES>)> = None;
        for (mr, offset, len) in parts(sges, skip, len) {
            let region = self.slab.get(mr.0)?;
            match (&mut found, region.copier) {
                (None, None) => return region.memory.span(offset, len).map(Source::Host),
                (None, Some(copier)) => {
                    found = Some((copier, [region.memory.piece(offset, len).ok()?].into_iter().collect()));
                }
                (Some((of, pieces)), Some(copier)) if *of == copier && !pieces.is_full() => {
                    pieces.push(region.memory.piece(offset, len).ok()?);
                }
                _ => break,
            }
        }
        found.map(|(copier, pieces)| Source::Device(copier, pieces))
    }

    /// The first bytes of a grant of device memory, at most `most`.
    pub(crate) fn granted_source(&self, grant: Granted, most: usize) -> Option<Source<'_>> {
        let region = self.slab.at(grant.index)?;
        let piece = region.memory.piece(grant.start, grant.len.min(most)).ok()?;
        Some(Source::Device(region.copier?, [piece].into_iter().collect()))
    }

    /// The place of a grant's bytes.
    pub(crate) fn place_of(&self, grant: Granted) -> Option<LandingPlace> {
        let copier = self.slab.at(grant.index)?.copier;
        Some(LandingPlace { region: grant.index, copier, offset: grant.start })
    }

    /// The place of a byte of a region.
    pub(crate) fn place_at(&self, mr: Mr, offset: u64) -> Option<LandingPlace> {
        let copier = self.slab.get(mr.0)?.copier;
        Some(LandingPlace { region: mr.0.index, copier, offset })
    }

    /// A reference to the memory of a region.
    pub(crate) fn hold(&self, region: u32) -> Option<Held> {
        Some(self.slab.at(region)?.memory.hold())
    }

    /// Writes to host memory.
    pub(crate) fn write_at(&mut self, region: u32, offset: u64, bytes: &[u8]) {
        let written =
            self.slab.at_mut(region).is_some_and(|region| region.memory.write_by_cpu(offset, bytes));
        debug_assert!(written, "held since it was granted");
    }

    /// The index of the region of a key, or of its window.
    pub(crate) fn region_of(&self, rkey: RKey) -> Option<u32> {
        match self.keys.get(rkey.value())? {
            Named::Region(index) => Some(index),
            Named::Window(index) => self.region_of_window(index),
        }
    }

    /// Whether copies to or from the device memory are outstanding.
    pub(crate) fn is_copied(&mut self, region: u32) -> bool {
        self.slab.at_mut(region).is_some_and(|region| region.copier.is_some() && region.memory.is_pinned())
    }

    /// Bytes of a region in device memory.
    pub(crate) fn device_piece(&self, region: u32, offset: u64, len: usize) -> Option<Piece<'_>> {
        self.slab.at(region)?.memory.piece(offset, len).ok()
    }

    /// Whether a packet for `qp` of `pd` may use `len` bytes at `va` with `access`.
    #[inline(always)]
    pub(crate) fn grant(
        &self,
        pd: Pd,
        qp: Qp,
        rkey: RKey,
        access: Access,
        va: u64,
        len: u32,
    ) -> Result<Granted, RemoteAccess> {
        let Reach { index, region, range } = self.reach(pd, qp, rkey, access)?;
        let start = va.checked_sub(region.iova).ok_or(RemoteAccess)?;
        let end = start.checked_add(u64::from(len)).ok_or(RemoteAccess)?;
        if start < range.start || end > range.end {
            return Err(RemoteAccess);
        }
        Ok(Granted { index, start, len: len as usize })
    }

    /// Whether a packet for `qp` of `pd` may use the whole range of a key with `access`.
    pub(crate) fn grant_whole(&self, pd: Pd, qp: Qp, rkey: RKey, access: Access) -> Result<(), RemoteAccess> {
        self.reach(pd, qp, rkey, access).map(drop)
    }

    #[inline(always)]
    fn reach(&self, pd: Pd, qp: Qp, rkey: RKey, access: Access) -> Result<Reach<'_>, RemoteAccess> {
        let at = |index| self.slab.at(index).ok_or(RemoteAccess);
        let (reach, granted) = match self.keys.get(rkey.value()).ok_or(RemoteAccess)? {
            Named::Region(index) => {
                let region = at(index)?;
                if region.revoked || region.pd != pd {
                    return Err(RemoteAccess);
                }
                (Reach { index, region, range: 0..region.memory.len() as u64 }, region.access)
            }
            Named::Window(index) => {
                // The queue pair bound it, so it is in its protection domain.
                let window = self.opened(index, qp)?;
                let (index, range) = (window.region, window.range.clone());
                (Reach { index, region: at(index)?, range }, window.access)
            }
        };
        if granted.contains(access) { Ok(reach) } else { Err(RemoteAccess) }
    }

    /// The bytes of a grant that was made for this packet.
    #[inline]
    pub(crate) fn granted(&self, grant: Granted) -> Option<Span<'_>> {
        self.slab.at(grant.index)?.memory.span(grant.start, grant.len)
    }

    /// Copies `data` to the start of a grant for this packet, which is at least as long. Returns whether it was copied: the
    /// CPU can't access device memory.
    #[must_use]
    #[inline(always)]
    pub(crate) fn write(&mut self, grant: Granted, data: &[u8]) -> bool {
        self.slab.at_mut(grant.index).is_some_and(|region| region.memory.write_by_cpu(grant.start, data))
    }

    /// Changes the word of a grant for this packet atomically; returns the previous value. `None` if it is not aligned in
    /// memory that others access: in a region for atomics (`check_words`) each aligned address is a word.
    pub(crate) fn change_word(
        &mut self,
        grant: Granted,
        change: impl FnOnce(&mut Memory, u64) -> Result<u64, MemoryError>,
    ) -> Option<u64> {
        change(&mut self.slab.at_mut(grant.index)?.memory, grant.start).ok()
    }

    /// Revokes a key: of a region of `pd` that grants `needed` and has no windows bound to it, or
    /// of a window that is bound to `qp`.
    pub(crate) fn invalidate(
        &mut self,
        pd: Pd,
        qp: Qp,
        rkey: RKey,
        needed: Access,
    ) -> Result<(), RemoteAccess> {
        let index = match self.keys.get(rkey.value()).ok_or(RemoteAccess)? {
            Named::Region(index) => index,
            Named::Window(index) => {
                self.opened(index, qp)?;
                self.unbind(index);
                return Ok(());
            }
        };
        let region = self.slab.at_mut(index).ok_or(RemoteAccess)?;
        if region.pd != pd || region.revoked || region.windows > 0 || !region.access.contains(needed) {
            return Err(RemoteAccess);
        }
        region.revoked = true;
        Ok(())
    }

    pub(crate) fn get(&self, mr: Mr) -> Result<&MemoryRegion, Error> {
        self.slab.get(mr.0).ok_or_else(|| invalid(mr))
    }
}

/// The bytes of a list of pieces of memory.
pub(crate) struct Pieces<'a> {
    mrs: &'a MemoryRegions,
    sges: std::slice::Iter<'a, Sge>,
    /// Bytes before the first wanted one.
    skip: usize,
    left: usize,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Span<'a>;

    #[inline]
    fn next(&mut self) -> Option<Span<'a>> {
        while self.left > 0 {
            let sge = self.sges.next()?;
            let length = sge.length as usize;
            if self.skip >= length {
                self.skip -= length;
                continue;
            }
            let (start, len) = (sge.offset + self.skip as u64, (length - self.skip).min(self.left));
            self.skip = 0;
            self.left -= len;
            return self.mrs.slab.get(sge.mr.0)?.memory.span(start, len);
        }
        None
    }
}

/// Checks that atomics of peers use whole words of memory if others could see half of one. A window may grant them too.
/// REMOTE_WRITE alone is not refused: WRITEs need no words, and most peers send no ATOMIC WRITE.
pub(crate) fn check_words(memory: &Memory, access: Access, iova: u64) -> Result<(), Error> {
    if memory.kind() == MemoryKind::Device {
        let refused = access.contains(Access::REMOTE_ATOMIC);
        return if refused { Err(Error::Unsupported(Feature::AtomicsOfDevice)) } else { Ok(()) };
    }
    let atomics =
        access.contains(Access::REMOTE_ATOMIC) || access.contains(Access::MW_BIND | Access::LOCAL_WRITE);
    if !atomics || memory.kind() == MemoryKind::Owned || memory.is_aligned(iova.wrapping_neg()) {
        return Ok(());
    }
    let expected = format!(
        "an iova that is {} modulo 8, like the memory's address, for aligned atomics; register_at sets the iova",
        memory.address().addr().get() % 8
    );
    Err(Error::invalid("iova", format_args!("{iova:#x}"), expected))
}

pub(crate) fn invalid(mr: Mr) -> Error {
    Error::invalid_handle("MR", mr.0)
}

/// An argument for `map_err`, for memory that can't be accessed in this way.
pub(crate) fn refused(mr: Mr) -> impl Fn(MemoryError) -> Error {
    move |source| Error::Region { handle: format!("{:?}", mr.0), source }
}

impl MemoryRegion {
    /// What still refers to its memory, after all work requests are done.
    fn still_used(&self) -> &'static str {
        match self.copier {
            // Its frames are in the port's ring.
            None => "the port, which still sends from it: poll, and try again",
            Some(_) => "copies of its device that are under way: poll, and try again",
        }
    }
}

pub(crate) fn busy(mr: Mr, users: impl Into<String>) -> Error {
    Error::Busy { kind: "MR", handle: format!("{:?}", mr.0), users: users.into() }
}

/// The parts of `sges` with the bytes `skip..skip + len` of the list: the region, the offset in it, and the length.
#[inline(always)]
pub(crate) fn parts(sges: &[Sge], skip: u32, len: usize) -> impl Iterator<Item = (Mr, u64, usize)> {
    let (mut skip, mut left) = (skip as usize, len);
    sges.iter().filter_map(move |sge| {
        let length = sge.length as usize;
        if skip >= length || left == 0 {
            skip -= length.min(skip);
            return None;
        }
        let (offset, len) = (sge.offset + skip as u64, (length - skip).min(left));
        (skip, left) = (0, left - len);
        Some((sge.mr, offset, len))
    })
}
