//! Every level of CRC-32, compared with crc32fast and with a bitwise CRC-32.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce_driver::Crc32;
use ferroce_driver_test_support::random::Random;
use proptest::prelude::*;

/// By the definition: the lowest bit first, the polynomial reflected.
fn bit_by_bit(mut register: u32, data: &[u8]) -> u32 {
    for &byte in data {
        register ^= u32::from(byte);
        for _ in 0..8 {
            register = if register & 1 == 1 { register >> 1 ^ 0xedb8_8320 } else { register >> 1 };
        }
    }
    register
}

fn crc32fast(register: u32, data: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(!register);
    hasher.update(data);
    !hasher.finalize()
}

fn masked(mask: &[u8; 64], data: &[u8]) -> Vec<u8> {
    let mut masked = data.to_vec();
    for (byte, mask) in masked.iter_mut().zip(mask) {
        *byte |= mask;
    }
    masked
}

/// Random bytes, the same ones for a seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::new(seed).fill(&mut bytes);
    bytes
}

/// Copies between positions `from_at` and `to_at` in two buffers, and checks every byte of both.
fn check_copy(crc: Crc32, register: u32, data: &[u8], from_at: usize, to_at: usize) {
    const CANARY: u8 = 0xa5;
    let mut from = vec![CANARY; from_at + data.len() + 80];
    from[from_at..][..data.len()].copy_from_slice(data);
    let from_before = from.clone();
    let mut to = vec![CANARY; to_at + data.len() + 80];
    let mut expected = to.clone();
    expected[to_at..][..data.len()].copy_from_slice(data);

    let result = crc.copy(register, &from[from_at..][..data.len()], &mut to[to_at..][..data.len()]);
    let what = format!("{} copies {} bytes from {from_at} to {to_at}", crc.name(), data.len());
    assert_eq!(result, crc32fast(register, data), "{what}");
    assert!(to == expected, "{what}: bytes differ");
    assert!(from == from_before, "{what}: the original has changed");
}

#[test]
fn the_levels_of_this_processor() {
    let all: Vec<_> = Crc32::all().collect();
    println!("fastest first: {}", all.iter().map(|crc| crc.name()).collect::<Vec<_>>().join(", "));
    assert_eq!(all.first(), Some(&Crc32::detect()));
    assert_eq!(all.last(), Some(&Crc32::portable()));
    assert_eq!(Crc32::portable().name(), "crc32fast");
}

/// The published check value of CRC-32, and the register after the ICRC's eight bytes of ones.
#[test]
fn known_values() {
    for crc in Crc32::all() {
        assert_eq!(!crc.update(!0, b"123456789"), 0xcbf4_3926, "{}", crc.name());
        assert_eq!(crc.update(!0, &[0xff; 8]), 0xdebb_20e3, "{}", crc.name());
    }
}

#[test]
fn every_short_length() {
    let mask: [u8; 64] = noise(1, 64).try_into().unwrap();
    for len in 0..=1100 {
        let data = noise(len as u64 + 2, len + 1);
        // At odd and even addresses.
        let data = &data[len % 2..][..len];
        for register in [!0, 0, 0x8000_0001, 0x1234_5678] {
            let expected = bit_by_bit(register, data);
            assert_eq!(crc32fast(register, data), expected);
            let expected_masked = bit_by_bit(register, &masked(&mask, data));
            for crc in Crc32::all() {
                assert_eq!(crc.update(register, data), expected, "{} of {len} bytes", crc.name());
                let result = crc.update_masked(register, &mask, data);
                assert_eq!(result, expected_masked, "{} of {len} masked bytes", crc.name());
            }
        }
        for crc in Crc32::all() {
            check_copy(crc, !0, data, len % 3, len % 7);
        }
    }
}

/// An access outside the data would be to an inaccessible page.
#[test]
fn nothing_is_touched_beyond_the_ends() {
    let (mut from, mut to) = (GuardedPage::new(), GuardedPage::new());
    for crc in Crc32::all() {
        for len in 0..=600 {
            let data = noise(len as u64 + 1, len);
            let expected = crc32fast(!0, &data);
            for range in [0..len, GuardedPage::LEN - len..GuardedPage::LEN] {
                from.bytes()[range.clone()].copy_from_slice(&data);
                let (from, to) = (&from.bytes()[range.clone()], &mut to.bytes()[range.clone()]);
                assert_eq!(crc.update(!0, from), expected);
                assert_eq!(crc.update_masked(!0, &[0; 64], from), expected);
                assert_eq!(crc.copy(!0, from, to), expected);
                assert!(to == data);
            }
        }
    }
}

/// A page between two inaccessible ones.
struct GuardedPage {
    base: *mut u8,
}

impl GuardedPage {
    const LEN: usize = 4096;

    fn new() -> GuardedPage {
        let (flags, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_NONE);
        // SAFETY: a new mapping at an address chosen by the kernel does not affect existing memory.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), 3 * Self::LEN, none, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: the second of the three pages that were just mapped.
        let middle = unsafe { base.add(Self::LEN) };
        // SAFETY: as above. There are no references to it yet.
        let result = unsafe { libc::mprotect(middle, Self::LEN, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(result, 0);
        GuardedPage { base: middle.cast() }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the page can be read and written, is unmapped only by `drop`, and is borrowed like `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base, Self::LEN) }
    }
}

impl Drop for GuardedPage {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`. No borrow outlives it.
        let result = unsafe { libc::munmap(self.base.sub(Self::LEN).cast(), 3 * Self::LEN) };
        assert_eq!(result, 0);
    }
}

#[test]
#[should_panic(expected = "as many bytes as the original")]
fn a_copy_to_another_length() {
    Crc32::detect().copy(!0, &[0; 8], &mut [0; 9]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn as_crc32fast(
        data in (0usize..9000, any::<u64>()).prop_map(|(len, seed)| noise(seed, len)),
        register: u32,
        mask in prop::array::uniform32(any::<[u8; 2]>()),
        at in 0usize..128,
        to_at in 0usize..128,
        split in any::<prop::sample::Index>(),
    ) {
        let mask: [u8; 64] = mask.as_flattened().try_into().unwrap();
        let at = at.min(data.len());
        let part = &data[at..];
        let expected = crc32fast(register, part);
        let expected_masked = crc32fast(register, &masked(&mask, part));
        let (before, behind) = part.split_at(split.index(part.len() + 1));
        for crc in Crc32::all() {
            prop_assert_eq!(crc.update(register, part), expected, "{}", crc.name());
            let in_two = crc.update(crc.update(register, before), behind);
            prop_assert_eq!(in_two, expected, "{} in two pieces", crc.name());
            let result = crc.update_masked(register, &mask, part);
            prop_assert_eq!(result, expected_masked, "{} masked", crc.name());
            check_copy(crc, register, part, at, to_at);
        }
    }
}
