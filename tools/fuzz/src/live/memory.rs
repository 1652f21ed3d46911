//! The regions of a [`Live`] and its memory window: their expected contents, their access rights, and the fuzzer's
//! choices among them.

use std::cell::RefCell;

use ferroce::{Access, Data, Memory, Mr, RKey, SendFlags, SendOp, SendWorkRequest, Sge};
use ferroce_test_support::peer::all_access;

use super::Live;
use crate::input::Input;
use crate::packet;

/// Bytes of each region.
pub(crate) const REGION: usize = 4096;
/// Selects the window in a choice of a place.
const WINDOW_CHOICE: u8 = 5;
/// The most registered regions.
pub(super) const PLACES: usize = 5;

/// The region in each place, which is registered again after each deregistration: access rights, whether it is in the
/// queue pair's protection domain, and the address of its first byte.
fn place(number: usize) -> (Access, bool, u64) {
    match number {
        0 => (all_access(), true, 0x10_0000),
        1 => (Access::REMOTE_READ, true, 0),
        2 => (Access::LOCAL_WRITE, true, 0x1000),
        3 => (all_access(), false, 0x20_0000),
        _ => (all_access(), true, u64::MAX - (REGION as u64 - 1)),
    }
}

pub(crate) struct Region {
    pub(crate) mr: Mr,
    pub(crate) access: Access,
    pub(crate) own_pd: bool,
    pub(crate) iova: u64,
    pub(crate) rkey: RKey,
    /// Whether its key was invalidated.
    pub(crate) revoked: bool,
    /// Its expected contents.
    pub(crate) bytes: Box<[u8]>,
}

/// Bytes of a region, by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) place: usize,
    pub(crate) offset: usize,
    pub(crate) length: usize,
}

/// The memory that a window opens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) piece: Piece,
    access: Access,
    rkey: RKey,
}

impl Live {
    pub(crate) fn register(&mut self, place: usize) {
        let (access, own_pd, iova) = self::place(place);
        if self.regions[place].is_some() {
            return;
        }
        let mut memory =
            POOL.with_borrow_mut(Vec::pop).unwrap_or_else(|| Memory::zeroed(REGION).expect("memory"));
        let bytes: Box<[u8]> = FILLED.with(|filled| filled[place].as_slice().into());
        memory.write(0, &bytes).expect("as many bytes");
        let pd = if own_pd { self.pd } else { self.foreign_pd };
        let mr = self.context.register_at(pd, memory, access, iova).expect("as lawful as the last time");
        let rkey = self.context.remote(mr).expect("it was just made").rkey;
        self.regions[place] = Some(Region { mr, access, own_pd, iova, rkey, revoked: false, bytes });
    }

    /// Deregisters the region in a place, which must be refused while it is `pinned`, or while the window is bound to
    /// it.
    pub(crate) fn deregister(&mut self, place: usize, pinned: bool) {
        let pinned = pinned || self.window.is_some_and(|window| window.piece.place == place);
        let Some(region) = &self.regions[place] else { return };
        match self.context.deregister(region.mr) {
            Ok(memory) => {
                assert!(!pinned, "a region went while a work request names it");
                assert!(
                    memory.bytes() == Ok(&*region.bytes),
                    "the memory that came back is not what was there"
                );
                self.stale_key = region.rkey;
                self.regions[place] = None;
                POOL.with_borrow_mut(|pool| pool.push(memory));
            }
            Err(error) => assert!(pinned, "{error}"),
        }
    }

    /// A key chosen by the fuzzer: mostly that of a place or of the window, otherwise an almost valid one.
    pub(crate) fn key(&self, choice: u8) -> RKey {
        let key = match self.window {
            Some(window) if choice & 7 == WINDOW_CHOICE => window.rkey,
            _ => self.region_of(choice).map_or(self.stale_key, |region| region.rkey),
        };
        match choice >> 3 & 3 {
            0 | 1 => key,
            2 => self.stale_key,
            _ => RKey::new(key.value().wrapping_add(1)),
        }
    }

    /// The address of the first byte that a chosen key opens.
    pub(crate) fn address(&self, choice: u8) -> u64 {
        match self.window {
            Some(window) if choice & 7 == WINDOW_CHOICE => {
                let region = self.regions[window.piece.place].as_ref();
                region.map_or(0, |region| region.iova + window.piece.offset as u64)
            }
            _ => self.region_of(choice).map_or(0, |region| region.iova),
        }
    }

    fn region_of(&self, choice: u8) -> Option<&Region> {
        self.regions[usize::from(choice & 7) % PLACES].as_ref()
    }

    /// The bytes that a peer names, if it may access them: place and offset.
    pub(crate) fn reach(&self, rkey: RKey, access: Access, va: u64, length: usize) -> Option<Piece> {
        let Piece { place, offset: start, length: room } = self.opened(rkey, access)?;
        let offset = usize::try_from(va.checked_sub(self.regions[place].as_ref()?.iova)?).ok()?;
        let end = offset.checked_add(length)?;
        (offset >= start && end <= start + room).then_some(Piece { place, offset, length })
    }

    /// The memory that a key opens for this access.
    pub(crate) fn opened(&self, rkey: RKey, access: Access) -> Option<Piece> {
        if let Some(window) = &self.window
            && window.rkey == rkey
        {
            return window.access.contains(access).then_some(window.piece);
        }
        let may = |r: &Region| r.rkey == rkey && r.own_pd && !r.revoked && r.access.contains(access);
        let place = self.regions.iter().position(|region| region.as_ref().is_some_and(may))?;
        Some(Piece { place, offset: 0, length: REGION })
    }

    /// A peer has invalidated a key: it must have had the right to do so.
    pub(crate) fn invalidated(&mut self, rkey: RKey) {
        if self.window.is_some_and(|window| window.rkey == rkey) {
            self.window = None;
            return;
        }
        let opened = self.opened(rkey, Access::REMOTE_INVALIDATE);
        let Some(Piece { place, .. }) = opened else {
            panic!("a key was invalidated that may not be: {rkey}")
        };
        let bound = self.window.is_some_and(|window| window.piece.place == place);
        assert!(!bound, "a region was invalidated while a window is bound to it");
        if let Some(region) = &mut self.regions[place] {
            region.revoked = true;
        }
    }

    /// Posts a bind of the window to this piece, which generates no completion on success.
    pub(crate) fn post_bind(&mut self, wr_id: u64, piece: Piece, access: Access) {
        let Some(region) = &self.regions[piece.place] else { return };
        let op = SendOp::BindMw {
            mw: self.mw,
            mr: region.mr,
            offset: piece.offset as u64,
            length: piece.length as u64,
            access,
        };
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(&[]), flags: SendFlags::default() };
        if self.context.post_send(self.qp, &wr).is_ok() {
            self.binds.push_back((piece, access));
        }
    }

    /// Checks whether the window was bound in the last turn; the bind must have been valid.
    pub(crate) fn observe_window(&mut self) {
        let remote = self.context.remote_window(self.mw).expect("it lives to the end");
        if remote.map(|remote| remote.rkey) == self.window.map(|window| window.rkey) {
            return;
        }
        let Some(remote) = remote else { panic!("the window was closed, and nobody asked for it") };
        assert!(self.window.is_none(), "a window was bound that was bound already");
        let Some((piece, access)) = self.binds.pop_front() else { panic!("a bind that nobody asked for") };
        let region = self.regions[piece.place].as_ref().expect("what a window is bound to is registered");
        let needed = match access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
            true => Access::MW_BIND | Access::LOCAL_WRITE,
            false => Access::MW_BIND,
        };
        assert!(
            region.own_pd && !region.revoked && region.access.contains(needed),
            "a bind without the right"
        );
        assert!(piece.offset + piece.length <= REGION, "a window beyond its region");
        let opens = (remote.addr, remote.length);
        assert_eq!(opens, (region.iova + piece.offset as u64, piece.length as u64));
        self.window = Some(Window { piece, access, rkey: remote.rkey });
    }

    pub(crate) fn bytes(&self, piece: Piece) -> &[u8] {
        let region = self.regions[piece.place].as_ref().expect("a region that is there");
        &region.bytes[piece.offset..piece.offset + piece.length]
    }

    /// The current bytes in the engine's memory.
    pub(crate) fn actual(&self, piece: Piece) -> &[u8] {
        let region = self.regions[piece.place].as_ref().expect("a region that is there");
        &self.context.bytes(region.mr).expect("it is registered")[piece.offset..piece.offset + piece.length]
    }

    /// Sets the expected bytes.
    pub(crate) fn expect_bytes(&mut self, piece: Piece, bytes: &[u8]) {
        let region = self.regions[piece.place].as_mut().expect("a region that is there");
        region.bytes[piece.offset..piece.offset + piece.length].copy_from_slice(bytes);
    }

    /// The application changes its memory.
    pub(crate) fn write_own(&mut self, piece: Piece, value: u8) {
        let Some(region) = &mut self.regions[piece.place] else { return };
        let range = piece.offset..piece.offset + piece.length;
        region.bytes[range.clone()].fill(value);
        self.context.bytes_mut(region.mr).expect("it is registered")[range].fill(value);
    }

    /// From the input: at most 64 bytes of a region.
    pub(crate) fn write_some(&mut self, input: &mut Input<'_>) {
        let (piece, value) = (self.read_pieces(input)[0], input.u8());
        let length = piece.length.min(64);
        if piece.offset + length <= REGION {
            self.write_own(Piece { length, ..piece }, value);
        }
    }

    /// Checks every byte of every region.
    pub(crate) fn check_memory(&self) {
        for (place, region) in self.regions.iter().enumerate() {
            let Some(region) = region else { continue };
            let actual = self.context.bytes(region.mr).expect("it is registered");
            if *actual != *region.bytes {
                let at = actual.iter().zip(&region.bytes).position(|(a, b)| a != b);
                panic!("region {place} was changed at byte {at:?}, and nobody may have");
            }
        }
    }

    /// The SGEs of a work request, chosen by the fuzzer: up to two.
    pub(crate) fn read_pieces(&self, input: &mut Input<'_>) -> Vec<Piece> {
        let (places, offset, length) = (input.u8(), usize::from(input.u16()), usize::from(input.u16()));
        let (offset, length) = (offset % REGION, length % (2 * REGION));
        let place = |choice: u8| usize::from(choice) % PLACES;
        let first = Piece { place: place(places & 7), offset, length: length.min(REGION - offset) };
        let mut pieces = vec![first];
        if length > first.length {
            // The pieces do not overlap, so the order in which they are filled does not matter.
            let place = place(places >> 3 & 7);
            let room = if place == first.place { offset } else { REGION };
            pieces.push(Piece { place, offset: 0, length: (length - first.length).min(room) });
        }
        if places & 0x40 != 0 {
            // Beyond the end of the region: the completion must report it.
            pieces[0].length += 1;
        }
        pieces
    }

    /// The bytes that [`read_pieces`](Live::read_pieces) parses as one piece.
    pub(crate) fn pieces_bytes(place: u8, offset: u16, length: u16) -> [u8; 5] {
        let ([a, b], [c, d]) = (offset.to_le_bytes(), length.to_le_bytes());
        [place, a, b, c, d]
    }

    /// As SGEs; `None` if a region is not registered now.
    pub(crate) fn sges(&self, pieces: &[Piece]) -> Option<Vec<Sge>> {
        let sge = |piece: &Piece| {
            let mr = self.regions[piece.place].as_ref()?.mr;
            Some(Sge { mr, offset: piece.offset as u64, length: piece.length as u32 })
        };
        pieces.iter().map(sge).collect()
    }

    /// Whether the queue pair may use these pieces: protection domain, access rights, bounds.
    pub(crate) fn may_use(&self, pieces: &[Piece], access: Access) -> bool {
        pieces.iter().all(|piece| {
            let region = self.regions[piece.place].as_ref();
            region.is_some_and(|r| r.own_pd && r.access.contains(access))
                && piece.offset + piece.length <= REGION
        })
    }
}

/// Part `skip..skip + length` of a list of pieces.
pub(crate) fn part(pieces: &[Piece], mut skip: usize, mut length: usize) -> Vec<Piece> {
    let mut parts = Vec::new();
    for piece in pieces {
        if skip >= piece.length {
            skip -= piece.length;
            continue;
        }
        let take = (piece.length - skip).min(length);
        if take > 0 {
            parts.push(Piece { place: piece.place, offset: piece.offset + skip, length: take });
        }
        length -= take;
        skip = 0;
    }
    parts
}

/// The bytes of a list of pieces.
pub(crate) fn total(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.length).sum()
}

thread_local! {
    /// Regions of earlier executions: mapping memory is the most expensive part of a context.
    static POOL: RefCell<Vec<Memory>> = const { RefCell::new(Vec::new()) };
    /// The initial contents of each place.
    static FILLED: [Vec<u8>; PLACES] = std::array::from_fn(|place| {
        let mut bytes = vec![0; REGION];
        packet::fill(&mut bytes, 0x80 ^ place as u8);
        bytes
    });
}
