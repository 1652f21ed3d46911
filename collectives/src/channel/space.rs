//! The free parts of a peer's memory.

/// Memory that is allocated in order and freed in order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Space {
    length: u32,
    /// The start of the next part.
    head: u32,
    /// The start of the oldest allocated part.
    tail: u32,
    /// The number of allocated parts.
    out: u32,
}

impl Space {
    pub(super) fn new(length: u32) -> Space {
        Space { length, head: 0, tail: 0, out: 0 }
    }

    pub(super) fn length(&self) -> u32 {
        self.length
    }

    /// Allocates `bytes`, at a multiple of `unit`. It restarts at 0 whenever nothing is allocated, so that short messages
    /// stay in the cache.
    pub(super) fn take(&mut self, bytes: u32, unit: u32) -> Option<u32> {
        let bytes = bytes.checked_next_multiple_of(unit)?.max(unit);
        if self.out == 0 {
            (self.head, self.tail) = (0, 0);
        }
        let is_behind = self.head > self.tail || self.out == 0;
        let start = if is_behind && bytes <= self.length - self.head {
            self.head
        } else if is_behind && bytes <= self.tail {
            0
        } else if !is_behind && bytes <= self.tail - self.head {
            self.head
        } else {
            return None;
        };
        self.head = start + bytes;
        self.out += 1;
        Some(start)
    }

    /// Frees the oldest part; the one after it starts at `next`.
    pub(super) fn give_back(&mut self, next: Option<u32>) {
        self.out -= 1;
        if let Some(next) = next {
            self.tail = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn allocated_parts_do_not_overlap(sizes in prop::collection::vec((0u32..400, any::<bool>()), 1..200)) {
            let mut space = Space::new(1024);
            let mut out: VecDeque<(u32, u32)> = VecDeque::new();
            for (bytes, gives_back) in sizes {
                if gives_back && out.pop_front().is_some() {
                    space.give_back(out.front().map(|part| part.0));
                }
                match space.take(bytes, 64) {
                    Some(start) => {
                        prop_assert!(start % 64 == 0 && start + bytes <= 1024);
                        prop_assert!(out.iter().all(|(other, len)| start + bytes.max(1) <= *other || *other + (*len).max(1) <= start));
                        out.push_back((start, bytes));
                    }
                    None => prop_assert!(!out.is_empty(), "no room in an empty space"),
                }
            }
        }
    }
}
