//! Pages of a memfd as a dma-buf, by the kernel's `/dev/udmabuf`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{SealFlags, fcntl_add_seals};

/// `struct udmabuf_create`
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// `_IOW('u', 0x42, struct udmabuf_create)`
const UDMABUF_CREATE: libc::c_ulong = 1 << 30 | 24 << 16 | (b'u' as libc::c_ulong) << 8 | 0x42;
const CLOEXEC: u32 = 1;

/// The first `len` bytes, whole pages. Fails with what is missing.
pub(super) fn of(file: &File, len: usize) -> Result<OwnedFd, String> {
    let path = "/dev/udmabuf";
    let opened = File::options().read(true).write(true).open(path);
    let device = opened.map_err(|error| format!("{path}: {error} (modprobe udmabuf, as root)"))?;
    let page = rustix::param::page_size() as u64;
    let size = (len.max(1) as u64).next_multiple_of(page);
    let failed = |error: io::Error| format!("{path}, for {size} bytes: {error}");
    // The kernel requires both the size and the seal: pages of a dma-buf must stay.
    file.set_len(size).map_err(failed)?;
    fcntl_add_seals(file, SealFlags::SHRINK).map_err(|error| failed(error.into()))?;
    let create = Create { memfd: file.as_raw_fd() as u32, flags: CLOEXEC, offset: 0, size };
    // SAFETY: the structure is that of the kernel's interface, and is only read.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE, &create) };
    if fd < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just opened it, without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
