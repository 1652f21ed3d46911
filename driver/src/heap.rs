//! The heap of a program with a great many small objects, such as the hosts of a large fabric.

/// Asks the kernel for huge pages (transparent ones) beneath the next `bytes` that this program allocates, whatever their
/// size: objects spread over more pages than a TLB has entries cost a walk of the page table at each visit. From now on
/// the heap is one piece that only grows. Called once, by the main thread, before there is another thread: those have
/// heaps of their own.
///
/// A hint. Returns whether it was taken: not by an allocator other than glibc's, not by another thread, not where `bytes`
/// of address space can't be had. With the system's setting of transparent huge pages at `never` it changes nothing.
#[must_use]
pub fn prefer_huge_pages(bytes: usize) -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // glibc.malloc.hugetlb=1 would do the same. It has to be in the environment when the program starts, and glibc
        // 2.36 compares what it reads of the kernel's setting with one byte more than it has read: it works by chance.
        let settings = [
            // All threads share the one heap,
            (libc::M_ARENA_MAX, 1),
            // which takes large blocks too
            (libc::M_MMAP_MAX, 0),
            // and is never given back, so that the advice stays.
            (libc::M_TRIM_THRESHOLD, -1),
        ];
        for (setting, value) in settings {
            // SAFETY: mallopt takes any value, under glibc's own lock, and moves nothing that is allocated.
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

/// The next `bytes` of the heap: a room that is advised and given back. What is allocated later is cut from it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn advise(bytes: usize) -> bool {
    const PAGE: usize = 4096;
    let mut room: Vec<u8> = Vec::new();
    if room.try_reserve_exact(bytes).is_err() {
        return false;
    }
    let start = room.as_mut_ptr();
    // SAFETY: sbrk(0) only tells where the heap ends.
    let heap_end = unsafe { libc::sbrk(0) };
    if start.addr() + bytes > heap_end.addr() {
        return false;
    }
    let before_page = start.align_offset(PAGE).min(bytes);
    // SAFETY: all of it lies in the room, which nothing else uses; advice changes no byte.
    unsafe { libc::madvise(start.add(before_page).cast(), bytes - before_page, libc::MADV_HUGEPAGE) == 0 }
}
