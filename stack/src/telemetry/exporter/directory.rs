//! A directory of sockets that only one user can access.
//!
//! Root reads those of all users, so the entries of a directory are opened relative to the opened and checked directory.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use ferroce_driver::credentials::refuse_descriptors;
use ferroce_driver::private_directory;
use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::geteuid;

/// In /tmp only its owner and root can remove it.
const CURE: &str = "remove it, or (unless you are root) set XDG_RUNTIME_DIR to a directory of your own";

/// The most entries read.
const MAX_ENTRIES: usize = 4096;

#[derive(Debug)]
pub(super) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    owner: u32,
}

impl Directory {
    /// Opens a directory that must be of `owner` with mode 0700.
    pub(super) fn open(path: &Path, owner: u32) -> io::Result<Directory> {
        let fd = private_directory::open(path, owner).map_err(with_cure)?;
        Ok(Directory { fd, path: path.to_owned(), owner })
    }

    /// Opens this user's directory; creates it if necessary.
    pub(super) fn make(path: &Path) -> io::Result<Directory> {
        let fd = private_directory::make(path).map_err(with_cure)?;
        Ok(Directory { fd, path: path.to_owned(), owner: geteuid().as_raw() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn owner(&self) -> u32 {
        self.owner
    }

    /// The entries with a socket's name, in order.
    pub(super) fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.fd)?.take(MAX_ENTRIES) {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if pid_of(name).is_some() {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Connects to a socket, without waiting: a process that no longer answers has a full backlog. The stream does not block.
    pub(super) fn connect(&self, name: &OsStr) -> io::Result<UnixStream> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = fs::openat(&self.fd, name, flags, Mode::empty())?;
        if FileType::from_raw_mode(fs::fstat(&entry)?.st_mode) != FileType::Socket {
            return Err(io::Error::other("is not a socket"));
        }
        // This is the entry that was checked, even if the name was replaced meanwhile; and the path is never too long.
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", entry.as_raw_fd()))?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // On a kernel without this, the listening process can block this one.
        let _ = refuse_descriptors(&socket);
        net::connect(&socket, &address).map_err(|error| match io::Error::from(error) {
            error if error.kind() == ErrorKind::NotFound => {
                io::Error::other("can't be reached, because there is no /proc")
            }
            error => error,
        })?;
        Ok(socket.into())
    }

    /// Removes the sockets of dead processes.
    pub(super) fn remove_abandoned(&self) {
        for name in self.names().unwrap_or_default() {
            if pid_of(&name).is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
                self.remove_dead(&name);
            }
        }
    }

    /// Removes a socket if it refuses connections. One that accepts them belongs to a live process, which another PID namespace
    /// can hide.
    pub(super) fn remove_dead(&self, name: &OsStr) {
        let refuses = |error: io::Error| error.kind() == ErrorKind::ConnectionRefused;
        if self.connect(name).is_err_and(refuses) {
            let _ = fs::unlinkat(&self.fd, name, AtFlags::empty());
        }
    }
}

/// What to do about a directory that can't be trusted.
fn with_cure(error: io::Error) -> io::Error {
    match error.kind() {
        kind @ (ErrorKind::NotADirectory | ErrorKind::Other) => {
            io::Error::new(kind, format!("{error}; {CURE}"))
        }
        _ => error,
    }
}

/// From the name of a socket, `PID.NUMBER.DEVICE`.
fn pid_of(name: &OsStr) -> Option<u32> {
    name.to_str()?.split_once('.')?.0.parse().ok()
}
