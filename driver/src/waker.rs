//! Waiting for a port's descriptors, and for a bell that other threads ring.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

/// An eventfd in addition to the descriptors of a port. [`wait`](Doorbell::wait) ends with any of them, and the doorbell's own
/// descriptor is readable while one of them is.
///
/// A ring is not lost: without a current wait it ends the next one.
///
/// A port's descriptors are watched only during waits. In the kernel each frame notifies the watchers of its socket, which would
/// be a useless cost for a port that is polled all the time: 8 % of a round trip over AF_XDP.
#[derive(Debug)]
pub(crate) struct Doorbell {
    all: OwnedFd,
    ringer: Arc<Ringer>,
    watch: Watch,
}

#[derive(Debug, PartialEq, Eq)]
enum Watch {
    /// The port's descriptors are not watched.
    Off,
    /// They are watched, during a wait.
    Armed,
    /// They are watched, and the port was polled this many times since the last wait.
    Polled(u32),
}

/// A port that is polled this often between two waits is not watched in between: watching it again costs less than notifications
/// by the frames.
const POLLS_WATCHED: u32 = 64;

impl Doorbell {
    /// A doorbell that was not rung, without a port.
    pub(crate) fn new() -> io::Result<Doorbell> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add(&all, bell.as_fd())?;
        Ok(Doorbell { all, ringer: Arc::new(Ringer(File::from(bell))), watch: Watch::Off })
    }

    /// Watches the port's descriptors until [`disarm`](Doorbell::disarm) at least.
    pub(crate) fn arm<'a>(&mut self, port: impl Iterator<Item = BorrowedFd<'a>>) -> io::Result<()> {
        if self.watch == Watch::Off {
            for fd in port {
                // One may still be watched after a failed attempt.
                match add(&self.all, fd) {
                    Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                    _ => {}
                }
            }
        }
        self.watch = Watch::Armed;
        Ok(())
    }

    /// Adds a descriptor of the port. It is removed when it is closed.
    pub(crate) fn widen(&self, port: BorrowedFd<'_>) -> io::Result<()> {
        if self.watch == Watch::Off { Ok(()) } else { add(&self.all, port) }
    }

    /// Records a poll of the port.
    #[inline]
    pub(crate) fn polled<'a>(&mut self, port: impl Iterator<Item = BorrowedFd<'a>>) {
        if let Watch::Polled(polls) = &mut self.watch {
            *polls += 1;
            if *polls == POLLS_WATCHED {
                self.watch = Watch::Off;
                for fd in port {
                    // It fails only for a descriptor that is not watched.
                    let _ = epoll::delete(&self.all, fd);
                }
            }
        }
    }

    /// Ends a wait, and clears the bell.
    pub(crate) fn disarm(&mut self) {
        self.clear();
        if self.watch == Watch::Armed {
            self.watch = Watch::Polled(0);
        }
    }

    /// A waker that rings it.
    pub(crate) fn waker(&self) -> Waker {
        Waker::from(self.ringer.clone())
    }

    /// Rings it at once.
    pub(crate) fn ring(&self) {
        self.ringer.wake_by_ref();
    }

    /// [`arm`](Doorbell::arm), [`wait`](Doorbell::wait), and the end of the wait.
    pub(crate) fn wait_with<'a>(
        &mut self,
        port: impl Iterator<Item = BorrowedFd<'a>>,
        timeout: Duration,
    ) -> io::Result<()> {
        self.arm(port)?;
        self.watch = Watch::Polled(0);
        self.wait(timeout)
    }

    /// Blocks until it is rung, a watched descriptor is readable, or `timeout` has passed; a signal ends it too.
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

    /// Clears the bell.
    pub(crate) fn clear(&self) {
        // The count is not needed; reading it resets it to 0.
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
        // It fails only if the count is at its limit, and then the bell is already rung.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }
}

/// Makes `all` readable when `one` is.
pub(crate) fn add(all: &OwnedFd, one: BorrowedFd<'_>) -> io::Result<()> {
    Ok(epoll::add(all, one, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
}

/// Times too long for the kernel become its longest.
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
    fn a_wait_ends_by_the_bell_the_port_or_its_timeout() {
        let mut bell = Doorbell::new().unwrap();
        let (port, mut far) = UnixStream::pair().unwrap();
        bell.arm([port.as_fd()].into_iter()).unwrap();
        let start = Instant::now();
        bell.wait(SHORT).unwrap();
        assert!(start.elapsed() >= SHORT);

        let start = Instant::now();
        // Two rings before a wait end it once.
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

        // A wait that must arm it first.
        bell.disarm();
        poll_often(&mut bell, &port);
        assert!(!is_readable(&bell));
        let start = Instant::now();
        bell.wait_with([port.as_fd()].into_iter(), LONG).unwrap();
        assert!(start.elapsed() < LONG && is_readable(&bell));
    }

    fn poll_often(bell: &mut Doorbell, port: &UnixStream) {
        (0..POLLS_WATCHED).for_each(|_| bell.polled([port.as_fd()].into_iter()));
    }

    #[test]
    fn a_port_is_watched_during_waits_and_not_while_it_is_polled() {
        let mut bell = Doorbell::new().unwrap();
        let (port, mut far) = UnixStream::pair().unwrap();
        far.write_all(b"x").unwrap();
        let sockets = || [port.as_fd()].into_iter();
        assert!(!is_readable(&bell), "before anybody has waited");
        bell.arm(sockets()).unwrap();
        poll_often(&mut bell, &port);
        assert!(is_readable(&bell), "armed, however often it is polled");
        bell.disarm();
        assert!(is_readable(&bell), "another wait is likely");
        poll_often(&mut bell, &port);
        assert!(!is_readable(&bell), "polled since");
        bell.arm(sockets()).unwrap();
        bell.arm(sockets()).unwrap();
        assert!(is_readable(&bell));

        let (group, mut sender) = UnixStream::pair().unwrap();
        sender.write_all(b"x").unwrap();
        bell.disarm();
        poll_often(&mut bell, &port);
        bell.widen(group.as_fd()).unwrap();
        assert!(!is_readable(&bell), "a socket more of a port that is not watched");
        bell.arm([group.as_fd()].into_iter()).unwrap();
        assert!(is_readable(&bell));
        drop((group, port));
        assert!(!is_readable(&bell), "a closed descriptor leaves");
    }
}
