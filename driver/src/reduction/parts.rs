//! Reductions of parts of several memories in one store, such as the regions of a context.

use std::marker::PhantomData;
use std::ptr::NonNull;

use arrayvec::ArrayVec;

use super::{DataType, MAX_SPANS, Reduction, scale};
use crate::memory::{Span, SpanMut};
use crate::rnic::Region;
use crate::{Memory, MemoryError, MemoryKind};

/// A computation on parts of memories.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Computation {
    /// [`Reduction::apply`].
    Reduce(Reduction),
    /// [`scale`], from the first source to the first target.
    Scale {
        /// The type of the elements.
        data_type: DataType,
        /// The factor.
        factor: f64,
    },
}

impl Computation {
    /// The type of the elements.
    pub fn data_type(self) -> DataType {
        match self {
            Computation::Reduce(Reduction { data_type, .. }) | Computation::Scale { data_type, .. } => {
                data_type
            }
        }
    }

    /// Whether it only copies, with this many sources.
    pub fn is_copy(self, sources: usize) -> bool {
        matches!(self, Computation::Reduce(Reduction { divide_by: None, .. }) if sources == 1)
    }
}

/// A range of bytes of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a memory, and where in it")]
pub struct Part<K> {
    /// Identifies the memory.
    pub memory: K,
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of bytes.
    pub len: usize,
}

/// Memory that the CPU can compute with: host [`Memory`], or memory registered with an RNIC.
pub trait Computable: sealed::Sealed {}

mod sealed {
    use super::{Memory, MemoryError, Place, Region};

    pub trait Sealed {
        /// The address of these bytes.
        fn place(&self, offset: u64, len: usize) -> Result<Place<'_>, MemoryError>;
    }

    impl Sealed for Memory {
        fn place(&self, offset: u64, len: usize) -> Result<Place<'_>, MemoryError> {
            Place::of(self, offset, len)
        }
    }

    impl Sealed for Region {
        fn place(&self, offset: u64, len: usize) -> Result<Place<'_>, MemoryError> {
            Place::of(self.memory(), offset, len)
        }
    }
}

impl Computable for Memory {}
impl Computable for Region {}

/// Bytes of a borrowed memory, accessible only in this file.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    base: NonNull<u8>,
    len: usize,
    _of: PhantomData<&'a Memory>,
}

impl Place<'_> {
    fn of(memory: &Memory, offset: u64, len: usize) -> Result<Place<'_>, MemoryError> {
        if memory.kind() == MemoryKind::Device {
            return Err(MemoryError::NoSlices { kind: MemoryKind::Device });
        }
        Ok(Place { base: memory.start(offset, len)?, len, _of: PhantomData })
    }
}

impl Computation {
    /// Computes with parts of memories, which `find` looks up in `store` by their keys.
    ///
    /// # Errors
    /// Those of `find`, and those that `refused` creates for bytes that are outside a memory or that the CPU can't access.
    /// Nothing is written then.
    ///
    /// # Panics
    /// As [`Reduction::apply`].
    pub fn run<S, K: Copy, M: Computable, E>(
        self,
        store: &mut S,
        find: impl Fn(&S, K) -> Result<&M, E>,
        refused: impl Fn(K, MemoryError) -> E,
        targets: &[Part<K>],
        sources: &[Part<K>],
    ) -> Result<(), E> {
        assert!(
            targets.len() <= MAX_SPANS && sources.len() <= MAX_SPANS,
            "{} sources and {} targets, of which there are {MAX_SPANS} at most",
            sources.len(),
            targets.len()
        );
        let store: &S = store;
        let place = |part: &Part<K>| {
            let place = find(store, part.memory)?.place(part.offset, part.len);
            place.map_err(|error| refused(part.memory, error))
        };
        // The vectors are filled in place: moving them takes longer than computing a few elements.
        let mut to = ArrayVec::<SpanMut<'_>, MAX_SPANS>::new();
        for target in targets {
            let Place { base, len, .. } = place(target)?;
            // SAFETY: the bytes are valid as long as their memory, which is borrowed from the store until the end. This
            // process has no other references to them: the caller passes the store by a unique borrow.
            to.push(unsafe { SpanMut::new(base, len) });
        }
        let mut from = ArrayVec::<Span<'_>, MAX_SPANS>::new();
        for source in sources {
            let Place { base, len, .. } = place(source)?;
            // SAFETY: as above.
            from.push(unsafe { Span::new(base, len) });
        }
        match self {
            Computation::Reduce(reduction) => reduction.apply(&to, &from),
            Computation::Scale { data_type, factor } => scale(data_type, to[0], from[0], factor),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduction::ReduceOp;

    #[test]
    fn parts_of_one_memory_and_of_another() {
        let mut store = [Memory::copy_of(&[1, 2, 3, 4]).unwrap(), Memory::copy_of(&[10, 20]).unwrap()];
        fn find(store: &[Memory; 2], name: usize) -> Result<&Memory, String> {
            store.get(name).ok_or_else(|| "no such memory".to_owned())
        }
        let refused = |_, error: MemoryError| error.to_string();
        let part = |memory, offset| Part { memory, offset, len: 2 };
        let sum = Computation::Reduce(Reduction::new(DataType::U8, ReduceOp::Sum));
        sum.run(&mut store, find, refused, &[part(0, 2)], &[part(0, 0), part(1, 0), part(0, 2)]).unwrap();
        assert_eq!(store[0].bytes().unwrap(), [1, 2, 14, 26]);
        let double = Computation::Scale { data_type: DataType::U8, factor: 2.0 };
        double.run(&mut store, find, refused, &[part(1, 0)], &[part(0, 0)]).unwrap();
        assert_eq!(store[1].bytes().unwrap(), [2, 4]);

        let outside = sum.run(&mut store, find, refused, &[part(0, 3)], &[part(1, 0)]).unwrap_err();
        assert!(outside.contains("2 bytes from offset 3 on, of memory of 4 bytes"), "{outside}");
        assert_eq!(
            sum.run(&mut store, find, refused, &[part(2, 0)], &[part(1, 0)]).unwrap_err(),
            "no such memory"
        );
        assert_eq!(store[0].bytes().unwrap(), [1, 2, 14, 26]);
    }
}
