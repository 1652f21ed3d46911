//! A netlink socket: requests, and the messages that answer them.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::codec::{Request, messages, u32_at};
use super::os_error;
use crate::Error;

/// A connection to one protocol of netlink, in the network namespace of the thread which opened it.
#[derive(Debug)]
pub(super) struct NetlinkSocket {
    fd: OwnedFd,
    sequence: Cell<u32>,
    buffer: RefCell<Vec<u8>>,
}

/// The kernel always answers sooner. This only prevents a lost answer from blocking forever.
const REPLY_TIMEOUT_S: i64 = 5;

impl NetlinkSocket {
    /// Opens a socket of this protocol (`NETLINK_ROUTE`, `NETLINK_GENERIC`).
    pub(super) fn open(protocol: libc::c_int) -> Result<NetlinkSocket, Error> {
        let os = |source| os_error("opening a netlink socket", "(any)", source);
        // SAFETY: no pointers; the result is checked below.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        if fd < 0 {
            return Err(os(io::Error::last_os_error()));
        }
        // SAFETY: `fd` is a new descriptor without another owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let timeout = libc::timeval { tv_sec: REPLY_TIMEOUT_S, tv_usec: 0 };
        // SAFETY: the pointer and length describe `timeout`, which outlives the call.
        let result = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const timeout).cast(),
                size_of_val(&timeout) as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(os(io::Error::last_os_error()));
        }
        Ok(NetlinkSocket { fd, sequence: Cell::new(0), buffer: RefCell::new(vec![0; 1 << 16]) })
    }

    /// Sends a request, and passes the payload of each message of the answer to `each`.
    pub(super) fn exchange(&self, request: Request, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let sequence = self.sequence.get().wrapping_add(1);
        self.sequence.set(sequence);
        let bytes = request.finish(sequence);
        let fd = self.fd.as_raw_fd();
        // SAFETY: pointer and length are those of `bytes`.
        if unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut buffer = self.buffer.borrow_mut();
        loop {
            // SAFETY: pointer and length are those of `buffer`, borrowed exclusively.
            let n = unsafe { libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_TRUNC) };
            let n = match usize::try_from(n) {
                Ok(n) => n,
                Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Err(io::Error::last_os_error()),
            };
            if n > buffer.len() {
                return Err(io::Error::other(format!("a netlink message of {n} bytes is too long")));
            }
            for message in messages(&buffer[..n]).filter(|m| m.sequence == sequence) {
                match i32::from(message.kind) {
                    // The end of a dump and of every other answer: a negated errno, or 0. A dump may instead contain
                    // the return value of its last part, which is not negative.
                    kind @ (libc::NLMSG_DONE | libc::NLMSG_ERROR) => {
                        return match u32_at(message.payload, 0).unwrap_or(0) as i32 {
                            0 => Ok(()),
                            1.. if kind == libc::NLMSG_DONE => Ok(()),
                            errno => Err(io::Error::from_raw_os_error(errno.wrapping_neg())),
                        };
                    }
                    _ => each(message.payload),
                }
            }
        }
    }
}

impl AsRawFd for NetlinkSocket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
