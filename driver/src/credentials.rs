//! The process at the other end of a Unix socket, as reported by the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The process at the other end at the time of the connection; for the connecting end, the process that called listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Credentials {
    /// Its PID; 0 for a process outside this PID namespace.
    pub pid: u32,
    /// The effective user ID.
    pub uid: u32,
}

impl Credentials {
    /// The credentials of the other end of a connected Unix socket (SO_PEERCRED).
    ///
    /// # Errors
    /// That of the system call.
    pub fn of_peer(socket: impl AsFd) -> io::Result<Credentials> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of_val(&found) as libc::socklen_t;
        // SAFETY: pointer and length describe `found`, in which all bytes are valid and which outlives the
        // call.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut found).cast(),
                &raw mut len,
            )
        };
        match result {
            0 => Ok(Credentials { pid: found.pid.unsigned_abs(), uid: found.uid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Makes the kernel refuse descriptors sent by the other end of a socket, before it is connected (SO_PASSRIGHTS). Closing the
/// last descriptor of a TCP socket with SO_LINGER blocks for as long as its creator chose.
///
/// # Errors
/// That of the system call; kernels before Linux 6.16 do not know it.
pub fn refuse_descriptors(socket: impl AsFd) -> io::Result<()> {
    const SO_PASSRIGHTS: i32 = 83;
    crate::udp::set_option(socket.as_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, 0i32)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_other_end_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let uid = std::fs::metadata("/proc/self").unwrap().uid();
        assert_eq!(Credentials::of_peer(&one).unwrap(), Credentials { pid: std::process::id(), uid });
    }

    #[test]
    fn descriptors_are_refused_before_they_come() {
        use rustix::io::Errno;
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let (one, other) = UnixStream::pair().unwrap();
        let send = || {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = [one.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
            sendmsg(&one, &[io::IoSlice::new(b"x")], &mut control, SendFlags::empty())
        };
        assert_eq!(send(), Ok(1));
        if let Err(error) = refuse_descriptors(&other) {
            return println!("skipped: this kernel has no SO_PASSRIGHTS: {error}");
        }
        assert_eq!(send(), Err(Errno::PERM));
    }
}
