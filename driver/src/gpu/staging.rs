use std::ptr::NonNull;
use std::sync::Arc;

use super::GpuError;
use crate::memory::{AnonymousMapping, Span, copy_in};

/// Host memory between GPU memory and packets. Clones are the same bytes.
///
/// A device may write them at any time, so there are no slices of them.
#[derive(Clone, Debug)]
pub struct Staging {
    mapping: Arc<AnonymousMapping>,
    /// The length of the mapping.
    len: usize,
}

impl Staging {
    /// `len` bytes, zeroed and prefaulted.
    ///
    /// # Errors
    /// [`GpuError::Staging`].
    pub fn new(len: usize) -> Result<Staging, GpuError> {
        let mapping = AnonymousMapping::zeroed(len)
            .map_err(|error| GpuError::Staging { bytes: len, reason: error.to_string() })?;
        Ok(Staging { mapping: Arc::new(mapping), len })
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "there is no use for one without bytes")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether both are the same bytes.
    #[cfg(feature = "opencl")]
    pub(super) fn is(&self, other: &Staging) -> bool {
        Arc::ptr_eq(&self.mapping, &other.mapping)
    }

    /// A span to copy from.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn span(&self, at: usize, len: usize) -> Span<'_> {
        // SAFETY: `len` initialised bytes, valid for the life of `self`.
        unsafe { Span::new(self.place(at, len), len) }
    }

    /// Copies the bytes from `at` on to `to`.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn read(&self, at: usize, to: &mut [u8]) {
        self.span(at, to.len()).copy_to(to);
    }

    /// Copies `from` to the bytes from `at` on.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(&self, at: usize, from: &[u8]) {
        // SAFETY: `from.len()` bytes of the mapping, to which no references exist.
        unsafe { copy_in(self.place(at, from.len()), from) };
    }

    /// Copies `from`, which may change meanwhile, to the bytes from `at` on.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn copy(&self, at: usize, from: Span<'_>) {
        // SAFETY: `from.len()` bytes at both addresses. No references to the staging exist, and bytes that change during
        // the read are only copied.
        unsafe { std::ptr::copy(from.address(), self.place(at, from.len()).as_ptr(), from.len()) };
    }

    /// The address of these bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub(super) fn place(&self, at: usize, len: usize) -> NonNull<u8> {
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(inside, "{len} bytes from {at} on, of staging of {} bytes", self.len());
        // SAFETY: inside the mapping or at its end, as just checked.
        unsafe { self.mapping.base().add(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_are_the_same_bytes() {
        let staging = Staging::new(100).unwrap();
        staging.clone().write(90, b"the end...");
        let mut found = [0; 11];
        staging.read(89, &mut found);
        assert_eq!(&found, b"\0the end...");
    }

    #[test]
    #[should_panic(expected = "11 bytes from 90 on, of staging of 100 bytes")]
    fn access_outside_panics() {
        Staging::new(100).unwrap().write(90, &[0; 11]);
    }
}
