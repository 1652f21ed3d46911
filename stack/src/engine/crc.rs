use std::cell::Cell;

use ferroce_driver::{Crc32, Placed, Span, SpanMut};
use ferroce_wire::icrc::{self, MASK_LEN};
use ferroce_wire::{FrameBuilder, Piece};

/// The driver's CRC-32 for the packets of `wire`, which has no `unsafe` code and so no processor-specific instructions.
#[derive(Clone, Copy)]
pub(crate) struct Crc(Crc32);

impl Crc {
    pub(crate) fn detect() -> Crc {
        Crc(Crc32::detect())
    }
}

impl icrc::Crc32 for Crc {
    #[inline]
    fn update(self, register: u32, data: &[u8]) -> u32 {
        self.0.update(register, data)
    }

    #[inline]
    fn update_masked(self, register: u32, mask: &[u8; MASK_LEN], data: &[u8]) -> u32 {
        self.0.update_masked(register, mask, data)
    }

    #[inline]
    fn copy(self, register: u32, from: &[u8], to: &mut [u8]) -> u32 {
        self.0.copy(register, from, to)
    }
}

/// Registered memory, which may be written meanwhile.
impl Piece<Crc> for Span<'_> {
    #[inline(always)]
    fn len(self) -> usize {
        Span::len(self)
    }

    #[inline(always)]
    fn copy_to(self, to: &mut [u8]) {
        Span::copy_to(self, to);
    }

    #[inline]
    fn update(self, crc: Crc, register: u32) -> u32 {
        crc.0.update(register, self)
    }

    #[inline]
    fn copy(self, crc: Crc, register: u32, to: &mut [u8]) -> u32 {
        crc.0.copy(register, self, to)
    }
}

/// Completes a frame whose payload is written to memory shared with another process. Returns the lengths before and after
/// it.
pub(crate) fn fill_placed(
    crc: Crc,
    frame: FrameBuilder<'_>,
    payload: Span<'_>,
    Placed { to, icrc }: Placed<'_>,
) -> (usize, usize) {
    let to = Cell::new(to);
    frame.fill(PlacingCrc { crc: icrc.then_some(crc), to: &to }, std::iter::once(payload))
}

/// [`Crc`] for a payload that is copied to another place than its frame; or no CRC, and only the copy.
#[derive(Clone, Copy)]
struct PlacingCrc<'a> {
    crc: Option<Crc>,
    /// The destination of the next piece.
    to: &'a Cell<SpanMut<'a>>,
}

impl icrc::Crc32 for PlacingCrc<'_> {
    #[inline]
    fn update(self, register: u32, data: &[u8]) -> u32 {
        self.crc.map_or(0, |crc| crc.update(register, data))
    }

    #[inline]
    fn update_masked(self, register: u32, mask: &[u8; MASK_LEN], data: &[u8]) -> u32 {
        self.crc.map_or(0, |crc| crc.update_masked(register, mask, data))
    }

    #[inline]
    fn copy(self, register: u32, from: &[u8], to: &mut [u8]) -> u32 {
        match self.crc {
            Some(crc) => icrc::Crc32::copy(crc, register, from, to),
            None => {
                to.copy_from_slice(from);
                0
            }
        }
    }
}

impl Piece<PlacingCrc<'_>> for Span<'_> {
    #[inline(always)]
    fn len(self) -> usize {
        Span::len(self)
    }

    #[inline(always)]
    fn copy_to(self, to: &mut [u8]) {
        Span::copy_to(self, to);
    }

    /// For a payload at another place.
    #[inline]
    fn update(self, crc: PlacingCrc<'_>, register: u32) -> u32 {
        let (now, later) = crc.to.get().split_at(Span::len(self));
        crc.to.set(later);
        match crc.crc {
            Some(Crc(crc)) => crc.copy_to(register, self, now),
            None => {
                now.copy_from(self);
                0
            }
        }
    }

    /// For a payload in the frame.
    #[inline]
    fn copy(self, crc: PlacingCrc<'_>, register: u32, to: &mut [u8]) -> u32 {
        match crc.crc {
            Some(Crc(crc)) => crc.copy(register, self, to),
            None => {
                Span::copy_to(self, to);
                0
            }
        }
    }
}
