//! Whether a heap is on huge pages. Without the test harness, which would run tests in threads.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::{fs, thread};

use ferroce_driver::heap::prefer_huge_pages;

fn main() {
    println!("running 1 test");
    if cfg!(not(target_env = "gnu")) {
        println!("skipped: this is not glibc's heap");
    } else if !fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap() {
        println!("skipped: this kernel has no transparent huge pages");
    } else {
        what_is_allocated_next_lies_where_huge_pages_are_asked_for();
        println!("test what_is_allocated_next_lies_where_huge_pages_are_asked_for ... ok");
    }
    println!("\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
}

fn what_is_allocated_next_lies_where_huge_pages_are_asked_for() {
    assert!(prefer_huge_pages(64 << 20));
    let allocate = || (0..1000).map(|size| vec![1; size << 6]).collect::<Vec<Vec<u8>>>();
    let blocks = thread::spawn(allocate).join().unwrap();
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let advised =
        blocks.iter().filter(|block| flags_at(&maps, block.as_ptr().addr()).contains(&"hg")).count();
    // A few are in earlier gaps.
    assert!(advised > 900, "{advised} of {} blocks", blocks.len());
}

/// The flags of the mapping that contains `address`.
fn flags_at(maps: &str, address: usize) -> Vec<&str> {
    let mut inside = false;
    for line in maps.lines() {
        let Some((first, rest)) = line.split_once(' ') else { continue };
        if let Some((start, end)) = first.split_once('-') {
            let bound = |text| usize::from_str_radix(text, 16).unwrap();
            inside = (bound(start)..bound(end)).contains(&address);
        } else if inside && first == "VmFlags:" {
            return rest.split_whitespace().collect();
        }
    }
    Vec::new()
}
