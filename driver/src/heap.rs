//! The heap of a program with very many small objects, such as the hosts of a large fabric.

/// Requests transparent huge pages from the kernel for the next `bytes` that this program allocates, in allocations of
/// any size. If objects are spread over more pages than a TLB has entries, each access to one walks the page table.
/// From now on the heap is one piece that only grows. Must be called once, by the main thread, before there are other
/// threads, because those have separate heaps.
///
/// This is a hint. Returns whether it was accepted: not with an allocator other than glibc's, in another thread, or if
/// `bytes` of address space are not available. If transparent huge pages are set to `never` in the system, it has no
/// effect.
#[must_use]
pub fn prefer_huge_pages(bytes: usize) -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // glibc.malloc.hugetlb=1 would have the same effect. But it must be in the environment when the program starts,
        // and glibc 2.36 compares one byte more than it has read of the kernel's setting: it works by chance.
        let settings = [
            // All threads use the one heap,
            (libc::M_ARENA_MAX, 1),
            // which also serves large allocations
            (libc::M_MMAP_MAX, 0),
            // and is never shrunk, so that the advice remains in effect.
            (libc::M_TRIM_THRESHOLD, -1),
        ];
        for (setting, value) in settings {
            // SAFETY: mallopt accepts any value, under glibc's own lock, and does not move allocations.
            if unsafe { libc::mallopt(setting, value) } == 0 {
                return false;
            }
        }
        advise(bytes)
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        let _ = bytes;
        false
    }
}

/// Reserves the next `bytes` of the heap, advises the kernel, and frees them. Later allocations are made there.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn advise(bytes: usize) -> bool {
    const PAGE: usize = 4096;
    let mut room: Vec<u8> = Vec::new();
    if room.try_reserve_exact(bytes).is_err() {
        return false;
    }
    let start = room.as_mut_ptr();
    // SAFETY: sbrk(0) only returns the end of the heap.
    let heap_end = unsafe { libc::sbrk(0) };
    if start.addr() + bytes > heap_end.addr() {
        return false;
    }
    let before_page = start.align_offset(PAGE).min(bytes);
    // SAFETY: the range is inside the allocation, which is not used otherwise. The advice does not change any bytes.
    unsafe { libc::madvise(start.add(before_page).cast(), bytes - before_page, libc::MADV_HUGEPAGE) == 0 }
}
