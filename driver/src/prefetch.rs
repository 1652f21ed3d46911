//! Fetching into the cache what will soon be needed.

const LINE: usize = 64;

/// Asks for all of `value`, without waiting for it. A hint: nothing changes but the time that the
/// next access takes.
#[inline]
pub fn prefetch<T: ?Sized>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(value)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: inside `value`; and a prefetch reads nothing as far as the program can tell.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast::<i8>().add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (value, LINE);
}
