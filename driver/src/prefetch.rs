//! Prefetching into the cache.

const LINE: usize = 64;

/// Prefetches the whole of `value`, without waiting. A hint, which only changes the duration of the next access.
#[inline]
pub fn prefetch<T: ?Sized>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(value)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: inside `value`; and a prefetch does not read as far as the program can tell.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast::<i8>().add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (value, LINE);
}
