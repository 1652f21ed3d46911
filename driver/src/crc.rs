//! CRC-32 (IEEE 802.3), the algorithm of RoCE's ICRC, as fast as the processor allows, alone or combined with a copy.
//!
//! All functions use the *register*: all ones before the first byte, and inverted after the last one for the CRC on the
//! wire. So bytes may be processed in any number of pieces.
//!
//! ```
//! let crc = ferroce_driver::Crc32::detect();
//! let register = crc.update(crc.update(!0, b"1234"), b"56789");
//! assert_eq!(!register, 0xcbf4_3926);
//! ```

#[cfg(target_arch = "x86_64")]
mod constants;
#[cfg(target_arch = "x86_64")]
mod pclmulqdq;
#[cfg(target_arch = "x86_64")]
mod vpclmulqdq;

use crc32fast::Hasher;

use crate::memory::{Span, SpanMut};

/// An implementation of CRC-32 that this processor supports. All have the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32(Level);

/// A level that needs more than the base architecture exists only if [`Level::is_supported`] has confirmed it: only
/// [`Crc32::all`] returns such values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    #[cfg(target_arch = "x86_64")]
    Vpclmulqdq,
    #[cfg(target_arch = "x86_64")]
    Pclmulqdq,
    Crc32fast,
}

impl Crc32 {
    /// The fastest implementation for this processor. Checks the processor: once for each value, not for each packet.
    pub fn detect() -> Crc32 {
        Crc32::all().next().unwrap_or(Crc32::portable())
    }

    /// The crate crc32fast, for every processor.
    pub fn portable() -> Crc32 {
        Crc32(Level::Crc32fast)
    }

    /// All implementations for this processor, the fastest first, [`portable`](Crc32::portable) last.
    pub fn all() -> impl Iterator<Item = Crc32> {
        Level::ALL.iter().copied().filter(|level| level.is_supported()).map(Crc32)
    }

    /// Its name in reports: `vpclmulqdq`, `pclmulqdq`, `crc32fast`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Level::Vpclmulqdq => "vpclmulqdq",
            #[cfg(target_arch = "x86_64")]
            Level::Pclmulqdq => "pclmulqdq",
            Level::Crc32fast => "crc32fast",
        }
    }

    /// The register after `data`, computed from the one before it.
    #[inline]
    pub fn update<'a>(self, register: u32, data: impl Into<Span<'a>>) -> u32 {
        let data = data.into();
        match self.0 {
            // SAFETY: a value of this level exists only if the processor has its features.
            #[cfg(target_arch = "x86_64")]
            Level::Vpclmulqdq => unsafe { vpclmulqdq::update(register, data) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Pclmulqdq => unsafe { pclmulqdq::update(register, data) },
            Level::Crc32fast => crc32fast_of(register, data),
        }
    }

    /// As [`update`](Crc32::update), with the first 64 bytes of `data`, or all if there are fewer, ORed with `mask`.
    /// `data` itself is not changed.
    #[inline(always)]
    pub fn update_masked(self, register: u32, mask: &[u8; 64], data: &[u8]) -> u32 {
        match self.0 {
            // SAFETY: a value of this level exists only if the processor has its features.
            #[cfg(target_arch = "x86_64")]
            Level::Vpclmulqdq => unsafe { vpclmulqdq::update_masked(register, mask, data.into()) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Pclmulqdq => unsafe { pclmulqdq::update_masked(register, mask, data.into()) },
            Level::Crc32fast => crc32fast_update_masked(register, mask, data),
        }
    }

    /// As [`update`](Crc32::update) over `from`, which is copied to `to` at the same time: the CRC is that of the copy,
    /// even if `from` is written meanwhile.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy<'a>(self, register: u32, from: impl Into<Span<'a>>, to: &mut [u8]) -> u32 {
        self.copy_to(register, from.into(), to.into())
    }

    /// As [`copy`](Crc32::copy), to memory that another process may write meanwhile.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline]
    pub fn copy_to(self, register: u32, from: Span<'_>, to: SpanMut<'_>) -> u32 {
        assert_eq!(from.len(), to.len(), "a copy has as many bytes as the original");
        match self.0 {
            // SAFETY: a value of this level exists only if the processor has its features.
            #[cfg(target_arch = "x86_64")]
            Level::Vpclmulqdq => unsafe { vpclmulqdq::copy(register, from, to) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Level::Pclmulqdq => unsafe { pclmulqdq::copy(register, from, to) },
            Level::Crc32fast => crc32fast_copy(register, from, to),
        }
    }
}

impl Level {
    /// The fastest first.
    const ALL: &[Level] = &[
        #[cfg(target_arch = "x86_64")]
        Level::Vpclmulqdq,
        #[cfg(target_arch = "x86_64")]
        Level::Pclmulqdq,
        Level::Crc32fast,
    ];

    fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Vpclmulqdq => vpclmulqdq::is_supported(),
            #[cfg(target_arch = "x86_64")]
            Level::Pclmulqdq => pclmulqdq::is_supported(),
            Level::Crc32fast => true,
        }
    }
}

fn crc32fast_update(register: u32, data: &[u8]) -> u32 {
    let mut hasher = Hasher::new_with_initial(!register);
    hasher.update(data);
    !hasher.finalize()
}

fn crc32fast_update_masked(register: u32, mask: &[u8; 64], data: &[u8]) -> u32 {
    let (head, rest) = data.split_at(data.len().min(mask.len()));
    let mut masked = *mask;
    for (byte, &from) in masked.iter_mut().zip(head) {
        *byte |= from;
    }
    crc32fast_update(crc32fast_update(register, &masked[..head.len()]), rest)
}

/// Bytes that are still in the L1 cache when they are read again.
const PIECE: usize = 4096;

/// For bytes that may be written meanwhile: of a copy of them.
fn crc32fast_of(register: u32, data: Span<'_>) -> u32 {
    by_pieces(register, data, |_| ())
}

fn crc32fast_copy(register: u32, from: Span<'_>, to: SpanMut<'_>) -> u32 {
    let mut rest = to;
    by_pieces(register, from, |piece| {
        let (now, later) = rest.split_at(piece.len());
        now.copy_from(piece.into());
        rest = later;
    })
}

/// Copies `data` in pieces, and calls `each` with each of them.
fn by_pieces(register: u32, data: Span<'_>, mut each: impl FnMut(&[u8])) -> u32 {
    let (mut register, mut rest, mut copy) = (register, data, [0; PIECE]);
    while !rest.is_empty() {
        let (now, later) = rest.split_at(rest.len().min(PIECE));
        let piece = &mut copy[..now.len()];
        now.copy_to(piece);
        register = crc32fast_update(register, piece);
        each(piece);
        rest = later;
    }
    register
}
