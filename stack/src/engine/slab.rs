//! Storage of objects by handle.

use std::convert::Infallible;

use ferroce_driver::prefetch;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::RngCore;

use crate::verbs::Handle;

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// A fixed number of slots; nothing moves and nothing is allocated after `new`.
///
/// Generations start at different values ([`first_generation`]), so that a handle of another context is invalid here.
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) fn new(capacity: u32, generation: u32) -> Slab<T> {
        Slab {
            slots: (0..capacity).map(|_| Slot { generation, value: None }).collect(),
            free: (0..capacity).rev().collect(),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The number of objects, and its limit.
    pub(crate) fn usage(&self) -> (usize, usize) {
        (self.slots.len() - self.free.len(), self.slots.len())
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Stores the object that `make` creates for its handle; `None` when all slots are taken.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(Handle) -> T) -> Option<Handle> {
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        let handle = Handle { index, generation: slot.generation };
        slot.value = Some(make(handle));
        Some(handle)
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&T> {
        let slot = self.slots.get(handle.index as usize)?;
        if slot.generation == handle.generation { slot.value.as_ref() } else { None }
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        if slot.generation == handle.generation { slot.value.as_mut() } else { None }
    }

    /// The object in a slot, whatever its generation.
    pub(crate) fn at(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.value.as_ref()
    }

    /// As [`at`](Slab::at), mutable.
    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.value.as_mut()
    }

    /// The object in a slot with its handle.
    #[inline]
    pub(crate) fn at_with_handle(&mut self, index: u32) -> Option<(Handle, &mut T)> {
        let Slot { generation, value } = self.slots.get_mut(index as usize)?;
        let handle = Handle { index, generation: *generation };
        value.as_mut().map(|value| (handle, value))
    }

    /// The handle of the object in a slot.
    pub(crate) fn handle_at(&self, index: u32) -> Option<Handle> {
        let Slot { generation, value } = self.slots.get(index as usize)?;
        value.is_some().then_some(Handle { index, generation: *generation })
    }

    /// The slot of the next object; `None` when all are taken.
    pub(crate) fn next_index(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Prefetches a slot into the cache.
    pub(crate) fn prefetch(&self, index: u32) {
        if let Some(slot) = self.slots.get(index as usize) {
            prefetch(slot);
        }
    }

    pub(crate) fn remove(&mut self, handle: Handle) -> Option<T> {
        self.remove_by(handle, |value| Ok::<T, (T, Infallible)>(value))?.ok()
    }

    /// Removes the object if `end` succeeds; if `end` returns it, it stays.
    pub(crate) fn remove_by<R, E>(
        &mut self,
        handle: Handle,
        end: impl FnOnce(T) -> Result<R, (T, E)>,
    ) -> Option<Result<R, E>> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        if slot.generation != handle.generation {
            return None;
        }
        match end(slot.value.take()?) {
            Ok(ended) => {
                slot.generation = slot.generation.wrapping_add(1);
                self.free.push(handle.index);
                Some(Ok(ended))
            }
            Err((value, error)) => {
                slot.value = Some(value);
                Some(Err(error))
            }
        }
    }

    pub(crate) fn iter_with_handles(&self) -> impl Iterator<Item = (Handle, &T)> {
        let slots = (0..).zip(&self.slots);
        slots.filter_map(|(index, Slot { generation, value })| {
            let handle = Handle { index, generation: *generation };
            value.as_ref().map(|value| (handle, value))
        })
    }

    pub(crate) fn iter_mut_with_handles(&mut self) -> impl Iterator<Item = (Handle, &mut T)> {
        let slots = (0..).zip(&mut self.slots);
        slots.filter_map(|(index, Slot { generation, value })| {
            let handle = Handle { index, generation: *generation };
            value.as_mut().map(|value| (handle, value))
        })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| slot.value.as_mut())
    }
}

/// The start of the generations of a context's handles. Drawn separately from the numbers that peers see, which it does not
/// change.
pub(crate) fn first_generation(rng: &ChaCha20Rng) -> u32 {
    let mut rng = rng.clone();
    rng.set_stream(1);
    rng.next_u32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_handle_is_invalid() {
        let mut slab = Slab::new(1, 9);
        let a = slab.insert_with(|_| "a").unwrap();
        assert_eq!(slab.insert_with(|_| "b"), None);
        assert_eq!(slab.remove(a), Some("a"));
        let c = slab.insert_with(|_| "c").unwrap();
        assert_eq!((slab.get(a), slab.get(c)), (None, Some(&"c")));
        assert_eq!(slab.remove(a), None);
        assert_eq!(a.index, c.index);
    }

    #[test]
    fn an_object_that_can_not_end_keeps_its_handle() {
        let mut slab = Slab::new(1, 9);
        let a = slab.insert_with(|_| "a").unwrap();
        assert_eq!(slab.remove_by(a, |value| Err::<(), _>((value, "busy"))), Some(Err("busy")));
        assert_eq!(slab.get(a), Some(&"a"));
        assert_eq!(slab.insert_with(|_| "b"), None);
        assert_eq!(slab.remove_by(a, |value| Ok::<_, (&str, ())>(value.len())), Some(Ok(1)));
        assert_eq!(slab.remove_by(a, |value| Ok::<_, (&str, ())>(value.len())), None);
        assert!(slab.insert_with(|_| "b").is_some());
    }
}
