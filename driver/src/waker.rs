//! What the owner of a port waits for: the port's descriptors, and a bell that other threads ring.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

/// An eventfd beside the descriptors of a port. [`wait`](Doorbell::wait) ends with any of them, and the doorbell's own
/// descriptor is readable while one of them is.
///
/// A ring is not forgotten: one that comes while nobody waits ends the next wait.
#[derive(Debug)]
pub(crate) struct Doorbell {
    all: OwnedFd,
    ringer: Arc<Ringer>,
}

impl Doorbell {
    /// One that nobody has rung, without a port.
    pub(crate) fn new() -> io::Result<Doorbell> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add(&all, bell.as_fd())?;
        Ok(Doorbell { all, ringer: Arc::new(Ringer(File::from(bell))) })
    }

    /// Adds a descriptor of the port, which leaves again when it is closed.
    pub(crate) fn watch(&self, port: BorrowedFd<'_>) -> io::Result<()> {
        add(&self.all, port)
    }

    /// Rings it.
    pub(crate) fn waker(&self) -> Waker {
        Waker::from(self.ringer.clone())
    }

    /// Rings it, for who has it.
    pub(crate) fn ring(&self) {
        self.ringer.wake_by_ref();
    }

    /// Blocks until the port is readable, somebody rings, or `timeout` has passed; a signal ends it too.
    pub(crate) fn wait(&self, timeout: Duration) -> io::Result<()> {
        let mut fds =
            [self.all.as_fd(), self.ringer.0.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, Some(&timespec(timeout))) {
            Ok(_) if fds[1].revents().contains(PollFlags::IN) => self.clear(),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Forgets that somebody has rung.
    pub(crate) fn clear(&self) {
        // The count is of no interest; reading it takes it back to 0.
        let _ = (&self.ringer.0).read(&mut [0; 8]);
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}

#[derive(Debug)]
struct Ringer(File);

impl Wake for Ringer {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // It fails only when the count is at its limit, and then the bell has been rung.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }
}

/// Has `all` become readable when `one` does.
pub(crate) fn add(all: &OwnedFd, one: BorrowedFd<'_>) -> io::Result<()> {
    Ok(epoll::add(all, one, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
}

/// Longer times than the kernel takes are its longest.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().min(i32::MAX as u64) as i64, tv_nsec: time.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    fn is_readable(bell: &Doorbell) -> bool {
        let mut fds = [PollFd::new(bell, PollFlags::IN)];
        poll(&mut fds, Some(&timespec(Duration::ZERO))).unwrap() == 1
    }

    #[test]
    fn a_wait_ends_with_the_bell_the_port_or_its_time() {
        let bell = Doorbell::new().unwrap();
        let (port, mut far) = UnixStream::pair().unwrap();
        bell.watch(port.as_fd()).unwrap();
        let start = Instant::now();
        bell.wait(SHORT).unwrap();
        assert!(start.elapsed() >= SHORT);

        let start = Instant::now();
        // Twice before the wait is one end of it.
        bell.waker().wake_by_ref();
        bell.waker().wake();
        assert!(is_readable(&bell));
        bell.wait(LONG).unwrap();
        assert!(start.elapsed() < LONG && !is_readable(&bell));
        let start = Instant::now();
        bell.wait(SHORT).unwrap();
        assert!(start.elapsed() >= SHORT);

        let start = Instant::now();
        let waker = bell.waker();
        let ringer = thread::spawn(move || {
            thread::sleep(SHORT);
            waker.wake();
        });
        bell.wait(LONG).unwrap();
        ringer.join().unwrap();
        far.write_all(b"x").unwrap();
        assert!(is_readable(&bell));
        bell.wait(LONG).unwrap();
        assert!(start.elapsed() < LONG && is_readable(&bell));
    }
}
