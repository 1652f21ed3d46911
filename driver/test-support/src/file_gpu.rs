//! A GPU whose memory is files, which it gives out as dma-bufs. It has no queues.

use std::any::Any;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::NonNull;
use std::sync::Arc;

use ferroce_driver::Memory;
use ferroce_driver::gpu::{Block, Device, DmaBuf, GpuError, Queue, Reducer, Staging};
use rustix::fs::{MemfdFlags, memfd_create};

/// Such a GPU, `files:0`.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileGpu {
    /// Where its memory begins in its file.
    pub offset: u64,
    /// Whether it refuses to give its memory out.
    pub keeps: bool,
}

/// A file by its device and number.
pub type Ino = (u64, u64);

impl FileGpu {
    /// Memory of it, and its file.
    pub fn memory(self, len: usize) -> (Memory, Ino) {
        let file = File::from(memfd_create("ferroce-file-gpu", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(self.offset + len as u64).unwrap();
        let ino = ino(&file.metadata().unwrap());
        let block = FileBlock { device: Arc::new(self), gpu: self, file };
        (Memory::of_device(Arc::new(block), NonNull::dangling(), len), ino)
    }
}

fn ino(metadata: &fs::Metadata) -> Ino {
    (metadata.dev(), metadata.ino())
}

/// How many descriptors of a file this process has.
pub fn descriptors(of: Ino) -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap();
    all.filter(|entry| fs::metadata(entry.as_ref().unwrap().path()).is_ok_and(|found| ino(&found) == of))
        .count()
}

impl Device for FileGpu {
    fn name(&self) -> &str {
        "files:0"
    }

    fn allocate(&self, len: usize) -> Result<Memory, GpuError> {
        Ok(self.memory(len).0)
    }

    fn queue(&self, _: &Staging) -> Result<Box<dyn Queue>, GpuError> {
        Err(lacks("queues"))
    }

    fn reducer(&self) -> Result<Box<dyn Reducer>, GpuError> {
        Err(lacks("reductions"))
    }
}

fn lacks(what: &str) -> GpuError {
    GpuError::Unsupported {
        device: "files:0".to_owned(),
        what: what.to_owned(),
        reason: "it has none".to_owned(),
    }
}

#[derive(Debug)]
struct FileBlock {
    device: Arc<dyn Device>,
    gpu: FileGpu,
    file: File,
}

impl Block for FileBlock {
    fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.file.read_exact_at(to, self.gpu.offset + offset).unwrap();
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError> {
        self.file.write_all_at(from, self.gpu.offset + offset).unwrap();
        Ok(())
    }

    fn export(&self) -> Result<DmaBuf, GpuError> {
        if self.gpu.keeps {
            return Err(lacks("a dma-buf of its memory"));
        }
        let fd: OwnedFd = self.file.try_clone().unwrap().into();
        Ok(DmaBuf { fd, offset: self.gpu.offset })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
