//! Memory of a GPU, which the CPU never touches.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Handle, Memory, MemoryError, MemoryKind};
use crate::gpu::{Block, Device, DmaBuf};

impl Memory {
    /// Memory of a GPU, which is one block of it. `address` is what the device calls its first byte; a device whose memory has
    /// no addresses says where nothing is.
    pub fn of_device(block: Arc<dyn Block>, address: NonNull<u8>, len: usize) -> Memory {
        let block = super::Block::Device(block);
        // The CPU reaches nothing of it.
        Memory { base: address, len, reach: 0, block: Arc::new(Handle { kind: MemoryKind::Device, block }) }
    }

    /// The GPU whose memory it is, if it is one's.
    #[inline]
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device_block().map(|block| block.device())
    }

    fn device_block(&self) -> Option<&Arc<dyn Block>> {
        match &self.block.block {
            super::Block::Device(block) => Some(block),
            _ => None,
        }
    }

    /// The GPU's memory as a dma-buf, by which a network card reaches it.
    ///
    /// # Errors
    /// [`MemoryError::Gpu`] with what is missing; [`MemoryError::NotADevices`] for memory of the host.
    pub fn export(&self) -> Result<DmaBuf, MemoryError> {
        let block = self.device_block().ok_or(MemoryError::NotADevices)?;
        block.export().map_err(|error| MemoryError::Gpu(Box::new(error)))
    }

    /// Bytes of a GPU's memory, for a copy or a reduction of its.
    ///
    /// # Errors
    /// [`MemoryError::NotADevices`] for memory of the host; [`MemoryError::Range`] outside the block.
    pub fn piece(&self, offset: u64, len: usize) -> Result<Piece<'_>, MemoryError> {
        if self.kind() != MemoryKind::Device {
            return Err(MemoryError::NotADevices);
        }
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.len as u64);
        end.map(|_| Piece { memory: self, offset, len }).ok_or_else(|| self.range(offset, len))
    }

    /// Reads what the CPU does not reach, by the device.
    #[cold]
    pub(super) fn read_by_device(&self, offset: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        self.by_device(offset, to.len(), |block| block.read(offset, to))
    }

    /// A share in the memory: until it is dropped, the memory [is pinned](Memory::is_pinned).
    pub fn hold(&self) -> Held {
        Held(Arc::clone(&self.block))
    }

    /// Writes what the CPU does not reach, by the device.
    #[cold]
    pub(super) fn write_by_device(&mut self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.by_device(offset, from.len(), |block| block.write(offset, from))
    }

    fn by_device(
        &self,
        offset: u64,
        len: usize,
        copy: impl FnOnce(&dyn Block) -> Result<(), crate::gpu::GpuError>,
    ) -> Result<(), MemoryError> {
        let (Some(block), Ok(_)) = (self.device_block(), self.piece(offset, len)) else {
            return Err(self.range(offset, len));
        };
        if len == 0 {
            return Ok(());
        }
        copy(&**block).map_err(|error| MemoryError::Gpu(Box::new(error)))
    }
}

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    memory: &'a Memory,
    offset: u64,
    len: usize,
}

impl<'a> Piece<'a> {
    /// From the first byte of the block.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "it may be empty, and nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its block, if it is of that type.
    #[cfg(any(feature = "opencl", feature = "cuda"))]
    pub(crate) fn block_as<T: Block>(&self) -> Option<&'a T> {
        self.memory.device_block()?.as_any().downcast_ref()
    }

    /// A share in the memory, for as long as a copy of it is under way: until it is dropped, the memory
    /// [is pinned](Memory::is_pinned).
    pub fn hold(&self) -> Held {
        self.memory.hold()
    }
}

/// A share in memory: [`Memory::hold`].
#[derive(Clone, Debug)]
pub struct Held(Arc<Handle>);

impl Held {
    /// What is kept of a GPU's memory.
    ///
    /// # Panics
    /// If it is the host's.
    pub fn block(&self) -> &dyn Block {
        match &self.0.block {
            super::Block::Device(block) => &**block,
            _ => panic!("memory of the host has no block of a device"),
        }
    }
}
