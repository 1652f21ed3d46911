//! GPU memory, which the CPU never accesses.

use std::ptr::NonNull;
use std::sync::Arc;

use super::{Handle, Memory, MemoryError, MemoryKind};
use crate::gpu::{Block, Device, DmaBuf};

impl Memory {
    /// A block of GPU memory. `address` is the device's address of the first byte. If the device's memory has no
    /// addresses, it is an unmapped one.
    pub fn of_device(block: Arc<dyn Block>, address: NonNull<u8>, len: usize) -> Memory {
        let block = super::Block::Device(block);
        // The CPU does not access it.
        Memory { base: address, len, reach: 0, block: Arc::new(Handle { kind: MemoryKind::Device, block }) }
    }

    /// Its GPU, if it is GPU memory.
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

    /// Exports the GPU memory as a dma-buf, by which a network card accesses it.
    ///
    /// # Errors
    /// [`MemoryError::Gpu`] with what is missing; [`MemoryError::NotADevices`] for host memory.
    pub fn export(&self) -> Result<DmaBuf, MemoryError> {
        let block = self.device_block().ok_or(MemoryError::NotADevices)?;
        block.export().map_err(|error| MemoryError::Gpu(Box::new(error)))
    }

    /// Bytes of GPU memory, for a copy or a reduction by the GPU.
    ///
    /// # Errors
    /// [`MemoryError::NotADevices`] for host memory; [`MemoryError::Range`] outside the block.
    pub fn piece(&self, offset: u64, len: usize) -> Result<Piece<'_>, MemoryError> {
        if self.kind() != MemoryKind::Device {
            return Err(MemoryError::NotADevices);
        }
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.len as u64);
        end.map(|_| Piece { memory: self, offset, len }).ok_or_else(|| self.range(offset, len))
    }

    /// Reads device memory by a copy of the device.
    #[cold]
    pub(super) fn read_by_device(&self, offset: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        self.by_device(offset, to.len(), |block| block.read(offset, to))
    }

    /// A reference to the memory: until it is dropped, the memory [is pinned](Memory::is_pinned).
    pub fn hold(&self) -> Held {
        Held(Arc::clone(&self.block))
    }

    /// Writes device memory by a copy of the device.
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

/// Bytes of GPU memory.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    memory: &'a Memory,
    offset: u64,
    len: usize,
}

impl<'a> Piece<'a> {
    /// The offset from the first byte of the block.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "it may be empty, and nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its block, if it is of this type.
    #[cfg(any(feature = "opencl", feature = "cuda"))]
    pub(crate) fn block_as<T: Block>(&self) -> Option<&'a T> {
        self.memory.device_block()?.as_any().downcast_ref()
    }

    /// A reference to the memory during a copy of it: until it is dropped, the memory [is pinned](Memory::is_pinned).
    pub fn hold(&self) -> Held {
        self.memory.hold()
    }
}

/// A reference to memory: [`Memory::hold`].
#[derive(Clone, Debug)]
pub struct Held(Arc<Handle>);

impl Held {
    /// The owner of GPU memory.
    ///
    /// # Panics
    /// If it is host memory.
    pub fn block(&self) -> &dyn Block {
        match &self.0.block {
            super::Block::Device(block) => &**block,
            _ => panic!("memory of the host has no block of a device"),
        }
    }
}
