//! Bytes that others may write at any time, and copies of them.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Bytes to copy from. They may change between two copies, so there is no slice of them; a slice can be converted to a span.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    base: NonNull<u8>,
    len: usize,
    life: PhantomData<&'a [u8]>,
}

impl<'a> Span<'a> {
    /// # Safety
    /// `len` initialised bytes at `base` must be valid for reads for the lifetime `'a`.
    #[inline(always)]
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Span<'a> {
        Span { base, len, life: PhantomData }
    }

    /// The number of bytes.
    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub(super) fn base(self) -> NonNull<u8> {
        self.base
    }

    /// The first byte.
    #[inline(always)]
    pub(crate) fn address(self) -> *const u8 {
        self.base.as_ptr()
    }

    /// The first `at` bytes, and the remaining ones.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline(always)]
    pub(crate) fn split_at(self, at: usize) -> (Span<'a>, Span<'a>) {
        assert!(at <= self.len, "{at} bytes of {}", self.len);
        // SAFETY: both are parts of the span.
        unsafe { (Span::new(self.base, at), Span::new(self.base.add(at), self.len - at)) }
    }

    /// The `len` bytes at `offset`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline(always)]
    pub fn part(self, offset: usize, len: usize) -> Span<'a> {
        self.split_at(offset).1.split_at(len).0
    }

    /// The first `N` bytes.
    #[inline(always)]
    pub(crate) fn first<const N: usize>(self) -> Option<[u8; N]> {
        // SAFETY: this many initialised bytes. An array of them needs no alignment.
        (self.len >= N).then(|| unsafe { self.base.cast().read_unaligned() })
    }

    /// The last `N` bytes.
    #[inline(always)]
    pub(crate) fn last<const N: usize>(self) -> Option<[u8; N]> {
        // SAFETY: as above.
        (self.len >= N).then(|| unsafe { self.base.add(self.len - N).cast().read_unaligned() })
    }

    /// Copies all bytes.
    ///
    /// # Panics
    /// If `to` has another length.
    #[inline(always)]
    pub fn copy_to(self, to: &mut [u8]) {
        assert_eq!(self.len, to.len(), "a copy has as many bytes as the original");
        // Two overlapping words, without a call.
        if let (8..=16, Some(first), Some(last)) = (self.len, self.first::<8>(), self.last::<8>()) {
            let behind = self.len - 8;
            to[..8].copy_from_slice(&first);
            to[behind..].copy_from_slice(&last);
            return;
        }
        // SAFETY: this many bytes are valid on both sides. `to` is a unique borrow, so it does not overlap with memory
        // that others may write.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr(), to.as_mut_ptr(), self.len) };
    }
}

impl<'a> From<&'a [u8]> for Span<'a> {
    #[inline(always)]
    fn from(bytes: &'a [u8]) -> Span<'a> {
        // SAFETY: a slice's bytes are valid for its lifetime.
        unsafe { Span::new(NonNull::from(bytes).cast(), bytes.len()) }
    }
}

impl<'a, const N: usize> From<&'a [u8; N]> for Span<'a> {
    #[inline(always)]
    fn from(bytes: &'a [u8; N]) -> Span<'a> {
        bytes.as_slice().into()
    }
}

/// Bytes to copy to. Another process may read and write them at any time, so there is no slice of them.
#[derive(Clone, Copy, Debug)]
pub struct SpanMut<'a> {
    base: NonNull<u8>,
    len: usize,
    life: PhantomData<&'a mut [u8]>,
}

impl<'a> SpanMut<'a> {
    /// # Safety
    /// `len` initialised bytes at `base` must be valid for reads and writes for the lifetime `'a`, and this process
    /// must have no references to them.
    #[inline(always)]
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> SpanMut<'a> {
        SpanMut { base, len, life: PhantomData }
    }

    /// The number of bytes.
    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The first byte.
    #[inline(always)]
    pub(crate) fn address(self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The first `at` bytes, and the remaining ones.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline(always)]
    pub fn split_at(self, at: usize) -> (SpanMut<'a>, SpanMut<'a>) {
        assert!(at <= self.len, "{at} bytes of {}", self.len);
        // SAFETY: both are parts of the span.
        unsafe { (SpanMut::new(self.base, at), SpanMut::new(self.base.add(at), self.len - at)) }
    }

    /// The `len` bytes at `offset`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline(always)]
    pub fn part(self, offset: usize, len: usize) -> SpanMut<'a> {
        self.split_at(offset).1.split_at(len).0
    }

    /// The same bytes as a source of copies.
    #[inline(always)]
    pub fn as_span(self) -> Span<'a> {
        // SAFETY: the bytes are also valid for reads, and initialised.
        unsafe { Span::new(self.base, self.len) }
    }

    /// Copies `from` to these bytes.
    ///
    /// # Panics
    /// If the lengths differ.
    #[inline(always)]
    pub fn copy_from(self, from: Span<'_>) {
        assert_eq!(self.len, from.len(), "a copy has as many bytes as the original");
        // SAFETY: this many bytes are valid on both sides. If the two overlap, bytes are written while they are copied,
        // and no program relies on their values.
        unsafe { std::ptr::copy(from.address(), self.base.as_ptr(), self.len) };
    }
}

impl<'a> From<&'a mut [u8]> for SpanMut<'a> {
    #[inline(always)]
    fn from(bytes: &'a mut [u8]) -> SpanMut<'a> {
        // SAFETY: a slice's bytes are valid for its lifetime, for which it is borrowed.
        unsafe { SpanMut::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }
}

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

/// Copies `from` to `to`, the last bytes last and with release: a peer's program waits for the last byte of a WRITE,
/// and all others must be visible by then.
///
/// # Safety
/// As many bytes at `to` must be valid for writes, and there must be no references to them except to atomics.
#[inline(always)]
pub(crate) unsafe fn copy_in(to: NonNull<u8>, from: &[u8]) {
    let before = from.len().saturating_sub(WORD);
    let (first, last) = from.split_at(before);
    // SAFETY: inside `to`, which has as many bytes as `from`.
    let end = unsafe { to.add(before) };
    if !first.is_empty() {
        // SAFETY: this many bytes are valid on both sides. `from` is a borrow of memory that is not written, so they do
        // not overlap.
        unsafe { std::ptr::copy_nonoverlapping(first.as_ptr(), to.as_ptr(), before) };
    }
    match <[u8; WORD]>::try_from(last) {
        Ok(word) if (end.as_ptr() as usize).is_multiple_of(WORD) => {
            // SAFETY: eight aligned bytes that are valid for writes and not borrowed.
            unsafe { AtomicU64::from_ptr(end.as_ptr().cast()) }
                .store(u64::from_ne_bytes(word), Ordering::Release);
        }
        _ => {
            for (at, byte) in last.iter().enumerate() {
                // SAFETY: a byte that is valid for writes and not borrowed.
                unsafe { AtomicU8::from_ptr(end.as_ptr().add(at)) }.store(*byte, Ordering::Release);
            }
        }
    }
}
