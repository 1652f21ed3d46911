//! Waking a context that sleeps when frames have come through a ring.
//!
//! A bell is a pair of datagram sockets, not an eventfd or a futex. The process that rings has got the descriptor from
//! another process. That process may have given any descriptor, and may make it block at any time. A send to a socket
//! does not block if it is told not to.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};

/// Rings that are taken at once. The kernel keeps 10 by default (`net.unix.max_dgram_qlen`); what is left wakes once more.
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

    /// What others ring it by.
    pub(super) fn rope(&self) -> BorrowedFd<'_> {
        self.rope.as_fd()
    }

    /// Forgets that somebody has rung.
    pub(super) fn clear(&self) {
        let rung = || recv(&self.readable, &mut [0u8; 1], RecvFlags::DONTWAIT).is_ok();
        (0..RINGS_MAX).all(|_| rung());
    }
}

impl AsFd for Bell {
    /// Readable when somebody has rung.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// The end of somebody who wakes another context.
#[derive(Debug)]
pub(super) struct Rope(OwnedFd);

impl Rope {
    /// What another process has given for one, if it can be.
    pub(super) fn new(given: OwnedFd) -> Option<Rope> {
        is_unix_socket(&given, SocketType::DGRAM).then_some(Rope(given))
    }

    /// Never blocks.
    pub(super) fn ring(&self) {
        // It fails if it was rung often enough, or if nobody is there any more.
        let _ = send(&self.0, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

/// Whether a descriptor that came from somewhere is of such a socket: other kinds may block whoever uses them.
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
    fn a_bell_rings_until_it_is_heard_however_often() {
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

    /// A pipe that is full blocks who writes to it, and its owner can have it block at any time.
    #[test]
    fn what_may_block_is_no_rope() {
        let (_, end) = io::pipe().unwrap();
        assert!(Rope::new(end.into()).is_none());
        assert!(Rope::new(eventfd(0, EventfdFlags::empty()).unwrap()).is_none());
        let (stream, _) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None).unwrap();
        assert!(Rope::new(stream).is_none());
    }
}
