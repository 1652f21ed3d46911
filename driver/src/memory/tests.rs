use super::*;

#[test]
fn zeroed_is_zero_aligned_and_writable() {
    let mut m = Memory::zeroed(5000).unwrap();
    assert_eq!((m.len(), m.kind()), (5000, MemoryKind::Owned));
    assert!(m.bytes().unwrap().iter().all(|b| *b == 0));
    assert_eq!(m.address().as_ptr() as usize % 4096, 0);
    m.bytes_mut().unwrap()[4999] = 7;
    assert_eq!(m.bytes().unwrap()[4999], 7);
    assert!(Memory::zeroed(0).unwrap().is_empty());
}

/// For every length up to some words and every alignment: all bytes and no others are written.
#[test]
fn copies_are_whole_and_stay_inside() {
    let from: Vec<u8> = (1..=40).collect();
    for start in 0..16 {
        for len in 0..=from.len() {
            for mut memory in [Memory::zeroed(64).unwrap(), Memory::shared(64).unwrap()] {
                memory.write(start, &from[..len]).unwrap();
                let mut found = [0xff; 64];
                memory.read(0, &mut found).unwrap();
                let mut expected = [0; 64];
                expected[start as usize..][..len].copy_from_slice(&from[..len]);
                assert_eq!(found, expected, "{len} bytes at {start}");
            }
        }
    }
}

#[test]
fn accesses_outside_are_refused() {
    let mut m = Memory::shared(16).unwrap();
    let range = |offset, len| Err(MemoryError::Range { offset, len, length: 16 });
    assert_eq!(m.write(9, &[0; 8]), range(9, 8));
    assert_eq!(m.read(u64::MAX, &mut [0]), range(u64::MAX, 1));
    assert_eq!(m.load_u64(16).map(drop), range(16, 8));
    assert_eq!(m.store_u64(4, 1), Err(MemoryError::Alignment { offset: 4 }));
    assert!(m.span(16, 0).is_some() && m.span(17, 0).is_none());
    assert_eq!(range(9, 8).unwrap_err().to_string(), "8 bytes from offset 9 on, of memory of 16 bytes");
}

#[test]
fn words_are_loaded_stored_and_changed() {
    let mut m = Memory::zeroed(16).unwrap();
    m.store_u64(8, 5).unwrap();
    assert_eq!(m.fetch_add(8, u64::MAX).unwrap(), 5);
    assert_eq!(m.compare_swap(8, 3, 9).unwrap(), 4);
    assert_eq!(m.compare_swap(8, 4, 9).unwrap(), 4);
    assert_eq!((m.load_u64(8).unwrap(), m.load_u64(0).unwrap()), (9, 0));
    // At any offset, because there are no concurrent readers.
    m.store_u64(3, 0x0102_0304_0506_0708).unwrap();
    assert_eq!(m.fetch_add(3, 1).unwrap(), 0x0102_0304_0506_0708);
    assert_eq!(m.compare_swap(3, 0x0102_0304_0506_0709, 5).unwrap(), 0x0102_0304_0506_0709);
    assert_eq!(m.load_u64(3).unwrap(), 5);
}

#[test]
fn shared_memory_has_handles_and_no_slices() {
    let mut a = Memory::shared(64).unwrap();
    let mut b = a.share().unwrap();
    a.write(0, b"hello").unwrap();
    let mut found = [0; 5];
    b.read(0, &mut found).unwrap();
    assert_eq!(&found, b"hello");
    b.store_u64(8, 7).unwrap();
    assert_eq!(a.atomics().unwrap()[1].load(Ordering::Relaxed), 7);
    assert_eq!(a.atomics().unwrap().len(), 8);
    let refused = b.bytes_mut().unwrap_err();
    assert_eq!(refused, MemoryError::NoSlices { kind: MemoryKind::Shared });
    assert!(refused.to_string().contains("use read and write, load_u64 and store_u64, or atomics"));
    drop(a);
    assert_eq!(b.load_u64(8).unwrap(), 7);
}

#[test]
fn owned_memory_has_one_holder() {
    let m = Memory::zeroed(64).unwrap();
    assert_eq!(m.share().unwrap_err(), MemoryError::NotShared);
    assert_eq!(m.atomics().unwrap_err(), MemoryError::NotShared);
}

#[test]
fn pinned_bytes_outlive_their_memory() {
    let mut m = Memory::zeroed(100).unwrap();
    m.write(9, &[7]).unwrap();
    let pinned = m.payload(9, 91).unwrap().pin();
    assert!(m.payload(9, 92).is_none() && m.payload(u64::MAX, 2).is_none());
    assert!(m.is_pinned());
    drop(m);
    // SAFETY: the pin keeps the mapping.
    assert_eq!((unsafe { pinned.address().read() }, pinned.len()), (7, 91));
}

/// Memory that others may write meanwhile can't be sent without a copy.
#[test]
fn only_owned_memory_is_pinned() {
    let mut owned = Memory::zeroed(64).unwrap();
    let pinned = owned.payload(0, 64).unwrap().pin();
    assert!(owned.is_pinned());
    drop(pinned);
    assert!(!owned.is_pinned());
    let shared = Memory::shared(64).unwrap();
    assert!(shared.payload(0, 64).is_none());
}

#[test]
fn foreign_memory_lives_as_long_as_its_owner() {
    struct Owner(Arc<AtomicU64>, #[expect(dead_code)] Vec<u8>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let dropped = Arc::new(AtomicU64::new(0));
    let mut buffer = vec![1u8; 64];
    let base = NonNull::new(buffer.as_mut_ptr()).unwrap();
    // SAFETY: the owner has the buffer, which is not accessed otherwise.
    let mut m = unsafe { Memory::from_raw(base, 64, Owner(Arc::clone(&dropped), buffer)) };
    m.write(0, &[9]).unwrap();
    assert_eq!(m.bytes().unwrap_err(), MemoryError::NoSlices { kind: MemoryKind::Foreign });
    let shared = m.share().unwrap();
    drop(m);
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    let mut first = [0];
    shared.read(0, &mut first).unwrap();
    assert_eq!(first, [9]);
    drop(shared);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
}
