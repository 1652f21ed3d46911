use ferroce_driver::Crc32;
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
