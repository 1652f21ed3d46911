//! What other threads end the wait of a port with.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

/// An eventfd beside the descriptor of a port: [`wait`](Doorbell::wait) ends with either.
///
/// A ring is not forgotten: one that comes while nobody waits ends the next wait.
#[derive(Debug)]
pub(crate) struct Doorbell(Arc<Ringer>);

impl Doorbell {
    /// One that nobody has rung.
    pub(crate) fn new() -> io::Result<Doorbell> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and is nobody else's.
        Ok(Doorbell(Arc::new(Ringer(unsafe { File::from_raw_fd(fd) }))))
    }

    /// Rings it.
    pub(crate) fn waker(&self) -> Waker {
        Waker::from(self.0.clone())
    }

    /// Blocks until `port` is readable, somebody rings, or `timeout` has passed; a signal ends it too.
    /// Returns whether `port` is readable.
    pub(crate) fn wait(&self, port: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
        let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut poll = [entry(port.as_raw_fd()), entry(self.0.0.as_raw_fd())];
        let timeout = libc::timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: two `pollfd`s and a `timespec` that outlive the call; no signal mask.
        if unsafe { libc::ppoll(poll.as_mut_ptr(), 2, &raw const timeout, std::ptr::null()) } < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == ErrorKind::Interrupted { Ok(false) } else { Err(error) };
        }
        if poll[1].revents & libc::POLLIN != 0 {
            // The count is of no interest; reading it takes it back to 0.
            let _ = (&self.0.0).read(&mut [0; 8]);
        }
        Ok(poll[0].revents & libc::POLLIN != 0)
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn a_wait_ends_with_the_bell_the_port_or_its_time() {
        let bell = Doorbell::new().unwrap();
        let (port, mut far) = UnixStream::pair().unwrap();
        let start = Instant::now();
        assert!(!bell.wait(port.as_fd(), Duration::from_millis(20)).unwrap());
        assert!(start.elapsed() >= Duration::from_millis(20));

        let start = Instant::now();
        // Twice before the wait is one end of it.
        bell.waker().wake_by_ref();
        bell.waker().wake();
        assert!(!bell.wait(port.as_fd(), LONG).unwrap());
        assert!(start.elapsed() < LONG);
        let start = Instant::now();
        assert!(!bell.wait(port.as_fd(), Duration::from_millis(20)).unwrap());
        assert!(start.elapsed() >= Duration::from_millis(20));

        let start = Instant::now();
        let waker = bell.waker();
        let ringer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            waker.wake();
        });
        assert!(!bell.wait(port.as_fd(), LONG).unwrap());
        ringer.join().unwrap();
        far.write_all(b"x").unwrap();
        assert!(bell.wait(port.as_fd(), LONG).unwrap());
        assert!(start.elapsed() < LONG);
    }
}
