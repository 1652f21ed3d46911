//! Waking a sleeping context when frames arrive in a ring.
//!
//! A bell is a pair of datagram sockets, not an eventfd or a futex. The process that rings it has received the
//! descriptor from another process. That process may have sent any descriptor, and may make it blocking at any time. A
//! send to a socket never blocks if this is requested in the call.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};

/// The most rings consumed at once. The kernel queues 10 by default (`net.unix.max_dgram_qlen`); remaining ones cause
/// another wake-up.
const RINGS_MAX: usize = 16;

/// The end of the context that is woken.
#[derive(Debug)]
pub(crate) struct Bell {
    readable: OwnedFd,
    rope: OwnedFd,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Bell> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (readable, rope) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        Ok(Bell { readable, rope })
    }

    /// The descriptor by which other contexts ring the bell.
    pub(super) fn rope(&self) -> BorrowedFd<'_> {
        self.rope.as_fd()
    }

    /// Consumes pending rings.
    pub(super) fn clear(&self) {
        let rung = || recv(&self.readable, &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok();
        (0..RINGS_MAX).all(|_| rung());
    }
}

impl AsFd for Bell {
    /// Readable when the bell was rung.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// The end of a context that wakes another one.
#[derive(Debug)]
pub(super) struct Rope(OwnedFd);

impl Rope {
    /// A rope from another process's descriptor, if it is suitable.
    pub(super) fn new(given: OwnedFd) -> Option<Rope> {
        is_unix_socket(&given, SocketType::DGRAM).then_some(Rope(given))
    }

    /// Never blocks.
    pub(super) fn ring(&self) {
        // It fails if the bell was rung often enough, or if its context has ended.
        let _ = send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

/// Whether a descriptor from another process is such a socket. Other kinds may block their users.
pub(super) fn is_unix_socket(fd: &OwnedFd, kind: SocketType) -> bool {
    sockopt::socket_domain(fd).is_ok_and(|domain| domain == AddressFamily::UNIX)
        && sockopt::socket_type(fd).is_ok_and(|found| found == kind)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
    use rustix::io::dup;

    use super::*;
    use crate::waker::timespec;

    fn has_rung(bell: &Bell) -> bool {
        poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&timespec(Duration::ZERO))).unwrap() == 1
    }

    #[test]
    fn a_bell_rings_until_it_is_cleared() {
        let bell = Bell::new().unwrap();
        let rope = Rope::new(dup(bell.rope()).unwrap()).unwrap();
        assert!(!has_rung(&bell));
        for _ in 0..1000 {
            rope.ring();
        }
        assert!(has_rung(&bell));
        for _ in 0..100 {
            bell.clear();
        }
        assert!(!has_rung(&bell));
        rope.ring();
        assert!(has_rung(&bell));
        drop(bell);
        rope.ring();
    }

    /// A full pipe blocks its writer, and its owner can make it blocking at any time.
    #[test]
    fn descriptors_that_may_block_are_refused() {
        let (_, end) = io::pipe().unwrap();
        assert!(Rope::new(end.into()).is_none());
        assert!(Rope::new(eventfd(0, EventfdFlags::empty()).unwrap()).is_none());
        let (stream, _) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None).unwrap();
        assert!(Rope::new(stream).is_none());
    }
}
