//! Directories for sockets that only one user can reach: the names of processes that share something, and the sockets
//! of a context's counters.
//!
//! Such a directory may be in a place where every user may write, and another user may have made it first. So it is
//! opened once, without following a link, and what was opened is checked.

use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{self, CWD, Mode, OFlags};
use rustix::process::geteuid;

use crate::user_ids::UserIds;

/// Root's.
pub const OF_ROOT: &str = "/run/ferroce";
/// Where that of another user is, and what its name begins with: its number outside of all user namespaces follows.
pub const OF_OTHERS: &str = "/tmp";
/// See [`OF_OTHERS`].
pub const OTHERS_PREFIX: &str = "ferroce-";

/// That of this process's user, whatever the environment says: whoever of the user looks for it finds the same one.
pub fn of_user() -> PathBuf {
    let (ids, uid) = (UserIds::read(), geteuid());
    // Root of a user namespace is an ordinary user to whom /run does not belong.
    if uid.is_root() && ids.are_the_same() {
        return OF_ROOT.into();
    }
    let uid = ids.outside(uid.as_raw()).unwrap_or(uid.as_raw());
    Path::new(OF_OTHERS).join(format!("{OTHERS_PREFIX}{uid}"))
}

/// Makes a directory of this user's, or opens it.
///
/// # Errors
/// Those of the system calls; and as of [`open`].
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
/// Those of the system calls; [`ErrorKind::NotADirectory`] for a link or a file; [`ErrorKind::Other`] for a directory of somebody
/// else, or one that others can look into. Both say what must be.
pub fn open(path: &Path, owner: u32) -> io::Result<OwnedFd> {
    let wanted = format!("must be a directory of uid {owner} with mode 0700");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = fs::openat(CWD, path, flags, Mode::empty()).map_err(|error| match io::Error::from(error) {
        // That is what the kernel says of a link.
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
