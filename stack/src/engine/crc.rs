use ferroce_driver::{Crc32, Span};
use ferroce_wire::Piece;
use ferroce_wire::icrc::{self, MASK_LEN};

/// The driver's CRC-32 for the packets of `wire`, which has no `unsafe` and so no instructions that
/// only some processors have.
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

/// Registered memory, which somebody may write meanwhile.
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
