//! The services of each process: a table in memory that all members map. Entries are added under the lock. The entries
//! of a process that has ended are no longer valid, and another process clears them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::SLOTS;
use crate::sealed::{SealedError, SealedMemory};

/// The most services of a group.
pub(super) const SERVICES_MAX: usize = 4096;
const HEADER: usize = 64;
const ENTRY: usize = 16;
const LENGTH: usize = HEADER + SERVICES_MAX * ENTRY;
/// Words of the header: the number of descriptors for the group's slots, and the number of entries ever used.
const DESCRIPTORS: usize = 0;
const USED: usize = 8;
/// The reported part of the group's count of packets: see [`Group::untold`](super::Group::untold).
const TOLD: usize = 16;
/// Flag in the word of an entry's owner: it no longer listens.
const FORMER: u64 = 1 << 32;

#[derive(Debug)]
pub(super) struct Table {
    memory: SealedMemory,
    /// For new members.
    file: OwnedFd,
}

/// The result of listening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listened {
    Done,
    /// Another slot has the service.
    Taken(usize),
    Full,
}

impl Table {
    pub(super) fn create() -> Result<Table, SealedError> {
        let (memory, file) = SealedMemory::create("ferroce-slots", LENGTH)?;
        Ok(Table { memory, file })
    }

    pub(super) fn open(file: OwnedFd) -> Result<Table, SealedError> {
        Ok(Table { memory: SealedMemory::open(&file, LENGTH..=LENGTH)?, file })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The number of slots that have ever had a process.
    pub(super) fn descriptors(&self) -> usize {
        (self.memory.word(DESCRIPTORS).load(Ordering::Acquire) as usize).min(SLOTS)
    }

    pub(super) fn set_descriptors(&self, count: usize) {
        self.memory.word(DESCRIPTORS).store(count as u64, Ordering::Release);
    }

    /// Assigns the service to `slot`. `alive` are the slots with processes.
    pub(super) fn listen(&self, service: u64, slot: usize, alive: u64) -> Listened {
        match self.find(service, alive) {
            Some(other) if other != slot => return Listened::Taken(other),
            Some(_) => return Listened::Done,
            None => {}
        }
        let used = self.used();
        let is_free = |index: &usize| self.holder(*index, alive).is_none();
        let is_former = |index: &usize| self.owner(*index, alive).is_none();
        let found = (0..used).find(|index| self.is_of(*index, service) && is_former(index));
        let found = found.or_else(|| (0..used).find(is_free));
        let found = found.or(Some(used).filter(|used| *used < SERVICES_MAX));
        let Some(index) = found.or_else(|| (0..used).find(is_former)) else { return Listened::Full };
        let [named, owner] = self.entry(index);
        owner.store(0, Ordering::Release);
        named.store(service, Ordering::Release);
        owner.store(slot as u64 + 1, Ordering::Release);
        if index == used {
            self.memory.word(USED).store(used as u64 + 1, Ordering::Release);
        }
        Listened::Done
    }

    /// Ends listening. The slot remains the last owner of the service until the entry is needed otherwise. This needs
    /// no lock, because no other process changes the entry of a process that listens.
    pub(super) fn unlisten(&self, service: u64, slot: usize) {
        let listens = slot as u64 + 1;
        for index in (0..self.used()).filter(|index| self.is_of(*index, service)) {
            let owner = self.entry(index)[1];
            // It fails if the entry is another slot's, or already former.
            let _ = owner.compare_exchange(listens, listens | FORMER, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Removes all entries of `slot`.
    pub(super) fn clear(&self, slot: usize) {
        for index in 0..self.used() {
            if self.holder(index, u64::MAX).is_some_and(|(holder, _)| holder == slot) {
                self.entry(index)[1].store(0, Ordering::Release);
            }
        }
    }

    /// The slot with the service.
    pub(super) fn find(&self, service: u64, alive: u64) -> Option<usize> {
        let mut all = (0..self.used()).filter(|index| self.is_of(*index, service));
        all.find_map(|index| self.owner(index, alive))
    }

    /// The slot with the service, or the last one that had it.
    pub(super) fn find_last(&self, service: u64, alive: u64) -> Option<usize> {
        let all = || (0..self.used()).filter(|index| self.is_of(*index, service));
        let former = || all().find_map(|index| Some(self.holder(index, alive)?.0));
        self.find(service, alive).or_else(former)
    }

    /// The lowest slot with any service.
    pub(super) fn first_with_any(&self, alive: u64) -> Option<usize> {
        (0..self.used()).filter_map(|index| self.owner(index, alive)).min()
    }

    fn used(&self) -> usize {
        (self.memory.word(USED).load(Ordering::Acquire) as usize).min(SERVICES_MAX)
    }

    pub(super) fn told(&self) -> &AtomicU64 {
        self.memory.word(TOLD)
    }

    fn is_of(&self, index: usize, service: u64) -> bool {
        self.entry(index)[0].load(Ordering::Acquire) == service
    }

    /// The slot of an entry, if it has a process that listens.
    fn owner(&self, index: usize, alive: u64) -> Option<usize> {
        self.holder(index, alive).and_then(|(slot, listens)| listens.then_some(slot))
    }

    /// The slot of an entry, if it has a process, and whether it still listens.
    fn holder(&self, index: usize, alive: u64) -> Option<(usize, bool)> {
        let word = self.entry(index)[1].load(Ordering::Acquire);
        let slot = (word & !FORMER).checked_sub(1)?;
        (slot < SLOTS as u64 && alive >> slot & 1 == 1).then_some((slot as usize, word & FORMER == 0))
    }

    /// The words of an entry: the service, and its slot plus one.
    fn entry(&self, index: usize) -> [&AtomicU64; 2] {
        [0, 8].map(|at| self.memory.word(HEADER + index * ENTRY + at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_belongs_to_one_slot_while_its_process_runs() {
        let table = Table::create().unwrap();
        let other = Table::open(table.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(table.listen(7, 3, 0b1001), Listened::Done);
        assert_eq!(other.listen(7, 0, 0b1001), Listened::Taken(3));
        assert_eq!(other.listen(7, 3, 0b1001), Listened::Done, "again");
        assert_eq!(other.listen(8, 0, 0b1001), Listened::Done);
        assert_eq!((table.find(7, 0b1001), table.find(8, 0b1001)), (Some(3), Some(0)));
        assert_eq!((table.find(9, 0b1001), table.first_with_any(0b1001)), (None, Some(0)));
        // Slot 3 ends, and its entry is reused.
        assert_eq!((table.find(7, 1), table.listen(7, 0, 1)), (None, Listened::Done));
        assert_eq!(table.used(), 2);
        other.unlisten(7, 3);
        assert_eq!(table.find(7, 1), Some(0), "not by another slot");
        other.unlisten(7, 0);
        assert_eq!(table.find(7, 1), None);
        table.clear(0);
        assert_eq!(table.first_with_any(1), None);
    }

    #[test]
    fn the_last_owner_of_a_service_is_known_until_it_is_replaced() {
        let table = Table::create().unwrap();
        assert_eq!(
            (table.listen(7, 3, 0b1011), table.listen(8, 3, 0b1011)),
            (Listened::Done, Listened::Done)
        );
        table.unlisten(7, 3);
        assert_eq!((table.find(7, 0b1011), table.find_last(7, 0b1011)), (None, Some(3)));
        assert_eq!(table.find_last(7, 0b0011), None, "its process has ended");
        // Another service gets another entry, and the same service its own again.
        assert_eq!((table.listen(9, 0, 0b1011), table.used()), (Listened::Done, 3));
        assert_eq!((table.listen(7, 1, 0b1011), table.used()), (Listened::Done, 3));
        assert_eq!((table.find_last(7, 0b1011), table.find_last(8, 0b1011)), (Some(1), Some(3)));
        table.unlisten(7, 1);
        table.clear(1);
        assert_eq!(table.find_last(7, 0b1011), None);
    }

    #[test]
    fn a_full_table_is_reported() {
        let table = Table::create().unwrap();
        for service in 0..SERVICES_MAX as u64 {
            assert_eq!(table.listen(service, 0, 1), Listened::Done);
        }
        assert_eq!(table.listen(1 << 40, 0, 1), Listened::Full);
        table.unlisten(17, 0);
        assert_eq!(table.listen(1 << 40, 0, 1), Listened::Done);
    }

    /// Another process may write anything.
    #[test]
    fn entries_are_checked() {
        let table = Table::create().unwrap();
        for offset in (0..LENGTH).step_by(8) {
            table.memory.word(offset).store(u64::MAX, Ordering::Relaxed);
        }
        assert_eq!((table.descriptors(), table.used()), (SLOTS, SERVICES_MAX));
        assert_eq!((table.find(u64::MAX, u64::MAX), table.first_with_any(u64::MAX)), (None, None));
        table.clear(63);
        assert_eq!(table.listen(5, 1, u64::MAX), Listened::Done);
    }
}
