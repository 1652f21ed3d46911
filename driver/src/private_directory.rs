//! Directories for sockets, accessible to one user only: for the names of processes that share a resource, and for the
//! sockets of a context's counters.
//!
//! Such a directory may be in a place where every user may write, and another user may have created it first. So it is
//! opened once, without following a link, and the opened directory is checked.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, CWD, Mode, OFlags};
use rustix::process::geteuid;

use crate::user_ids::UserIds;

/// The directory of root.
pub const OF_ROOT: &str = "/run/ferroce";
/// The parent of other users' directories. Their names are [`OTHERS_PREFIX`] and the user ID outside all user namespaces.
pub const OF_OTHERS: &str = "/tmp";
/// See [`OF_OTHERS`].
pub const OTHERS_PREFIX: &str = "ferroce-";

/// The directory of this process's user, independent of the environment: all processes of the user find the same one.
pub fn of_user() -> PathBuf {
    let (ids, uid) = (UserIds::read(), geteuid());
    // Root of a user namespace is an ordinary user, who does not own /run.
    if uid.is_root() && ids.are_the_same() {
        return OF_ROOT.into();
    }
    let uid = ids.outside(uid.as_raw()).unwrap_or(uid.as_raw());
    Path::new(OF_OTHERS).join(format!("{OTHERS_PREFIX}{uid}"))
}

/// Creates a directory of this user, or opens it.
///
/// # Errors
/// Those of the system calls; and those of [`open`].
pub fn make(path: &Path) -> io::Result<OwnedFd> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    open(path, geteuid().as_raw())
}

/// Opens a directory, which must be of `owner` with mode 0700.
///
/// # Errors
/// Those of the system calls; [`ErrorKind::NotADirectory`] for a link or a file; [`ErrorKind::Other`] for a directory of
/// another user, or one that others can access. Both state the requirement.
pub fn open(path: &Path, owner: u32) -> io::Result<OwnedFd> {
    let wanted = format!("must be a directory of uid {owner} with mode 0700");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = fs::openat(CWD, path, flags, Mode::empty()).map_err(|error| match io::Error::from(error) {
        // The kernel's error for a link.
        error if error.kind() == ErrorKind::NotADirectory => {
            io::Error::new(error.kind(), format!("{wanted}; it is a link or a file"))
        }
        error => error,
    })?;
    let found = fs::fstat(&fd)?;
    let mode = found.st_mode & 0o7777;
    if found.st_uid != owner || mode & 0o077 != 0 {
        let found = format!("it belongs to uid {} and has mode {mode:04o}", found.st_uid);
        return Err(io::Error::other(format!("{wanted}; {found}")));
    }
    Ok(fd)
}
