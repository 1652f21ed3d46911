use ferroce_wire::icrc::{self, MASK_LEN};

/// The driver's CRC-32 for the packets of `wire`, which has no `unsafe` and so no instructions of one
/// processor.
#[derive(Clone, Copy)]
pub(crate) struct Crc;

impl Crc {
    pub(crate) fn detect() -> Crc {
        Crc
    }
}

impl icrc::Crc32 for Crc {
    #[inline]
    fn update(self, register: u32, data: &[u8]) -> u32 {
        icrc::Portable.update(register, data)
    }

    #[inline]
    fn update_masked(self, register: u32, mask: &[u8; MASK_LEN], data: &[u8]) -> u32 {
        icrc::Portable.update_masked(register, mask, data)
    }

    #[inline]
    fn copy(self, register: u32, from: &[u8], to: &mut [u8]) -> u32 {
        icrc::Portable.copy(register, from, to)
    }
}
