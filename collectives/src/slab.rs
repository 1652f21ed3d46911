//! Objects by small handles, which become invalid when the object is removed.

/// Identifies an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Handle {
    index: u32,
    generation: u32,
}

pub(crate) struct Slab<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, object: T) -> Handle {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let (generation, slot) = &mut self.slots[index as usize];
        *slot = Some(object);
        Handle { index, generation: *generation }
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&T> {
        let (generation, slot) = self.slots.get(handle.index as usize)?;
        slot.as_ref().filter(|_| *generation == handle.generation)
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let (generation, slot) = self.slots.get_mut(handle.index as usize)?;
        slot.as_mut().filter(|_| *generation == handle.generation)
    }

    pub(crate) fn remove(&mut self, handle: Handle) -> Option<T> {
        self.get(handle)?;
        let (generation, slot) = self.slots.get_mut(handle.index as usize)?;
        *generation = generation.wrapping_add(1);
        self.free.push(handle.index);
        slot.take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|(_, slot)| slot.as_ref())
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|(_, slot)| slot.as_mut())
    }

    pub(crate) fn handles(&self) -> impl Iterator<Item = Handle> {
        (0..)
            .zip(&self.slots)
            .filter(|(_, (_, slot))| slot.is_some())
            .map(|(index, (generation, _))| Handle { index, generation: *generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_invalid_after_its_object() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!(slab.remove(a), Some('a'));
        assert_eq!(slab.remove(a), None);
        assert_eq!((slab.get(a), slab.get(b)), (None, Some(&'b')));
        let c = slab.insert('c');
        assert_ne!(c, a);
        assert_eq!(slab.get_mut(c), Some(&mut 'c'));
        assert_eq!(slab.handles().collect::<Vec<_>>(), [c, b]);
    }
}
