//! Waiting for a port from outside, by file descriptor.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver::{PacketDriver, Readiness};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(30);

/// A wait for `port`, which has nothing to do, ends with its time, with its waker used before or during it, and with the
/// frame that `send` sends, which is not taken.
pub fn ends_with_each<T>(port: &mut dyn PacketDriver, send: impl FnOnce() -> T + Send) {
    let mut readiness = Readiness::new().unwrap();
    let waker = port.waker().unwrap();
    let start = Instant::now();
    assert!(arm(&mut readiness, port, Some(SHORT)));
    assert!(is_readable(&readiness, LONG) && start.elapsed() >= SHORT);

    waker.wake_by_ref();
    assert!(arm(&mut readiness, port, None), "the bell was cleared");
    waker.wake_by_ref();
    assert!(is_readable(&readiness, Duration::ZERO));
    assert!(!readiness.arm(port.arm().unwrap(), None).unwrap(), "there is something to do");
    assert!(arm(&mut readiness, port, None));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SHORT);
            waker.wake_by_ref();
        });
        assert!(is_readable(&readiness, LONG));
    });

    assert!(arm(&mut readiness, port, None));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SHORT);
            let _ = send();
        });
        assert!(is_readable(&readiness, LONG));
    });
    assert!(!arm(&mut readiness, port, None), "the frame is there");
}

/// Waits until there is something to read.
pub fn is_readable(fd: impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// Ends one wait, and begins another.
fn arm(readiness: &mut Readiness, port: &mut dyn PacketDriver, quiet: Option<Duration>) -> bool {
    port.disarm();
    readiness.disarm().unwrap();
    readiness.arm(port.arm().unwrap(), quiet).unwrap()
}
