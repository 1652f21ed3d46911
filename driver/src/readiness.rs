//! Waiting for a port, and for a time, from outside.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::Armed;
use crate::waker::{add, timespec};

/// One descriptor that is readable when a port may have a frame, or after a time.
///
/// It costs system calls only in [`arm`](Readiness::arm) and [`disarm`](Readiness::disarm), so only before a sleep and after
/// it.
#[derive(Debug)]
pub struct Readiness {
    all: OwnedFd,
    timer: OwnedFd,
    is_timed: bool,
    has_port: bool,
}

impl Readiness {
    /// Without a port. The first port that is armed remains its port.
    ///
    /// # Errors
    /// The kernel's error, when this process may open no more descriptors.
    pub fn new() -> io::Result<Readiness> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let all = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add(&all, timer.as_fd())?;
        Ok(Readiness { all, timer, is_timed: false, has_port: false })
    }

    /// Becomes readable with `port`, and after `quiet` at the latest (`None`: never). Returns whether to wait: not if the port is
    /// ready or the time has passed already.
    ///
    /// The kernel's error.
    /// The kernel's.
    pub fn arm(&mut self, port: Armed<'_>, quiet: Option<Duration>) -> io::Result<bool> {
        if let Some(fd) = port.fd
            && !self.has_port
        {
            add(&self.all, fd)?;
            self.has_port = true;
        }
        let time = quiet.map_or(port.longest, |quiet| quiet.min(port.longest));
        if time.is_zero() {
            return Ok(false);
        }
        self.set_timer((time < Duration::MAX).then_some(time))?;
        let mut fds = [PollFd::new(&self.all, PollFlags::IN)];
        Ok(poll(&mut fds, Some(&timespec(Duration::ZERO)))? == 0)
    }

    /// Clears the time set by [`arm`](Readiness::arm).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn disarm(&mut self) -> io::Result<()> {
        self.set_timer(None)
    }

    fn set_timer(&mut self, time: Option<Duration>) -> io::Result<()> {
        if time.is_some() || self.is_timed {
            // Zero is never. Any new setting clears an expired time.
            let it_value = timespec(time.unwrap_or_default());
            let once = Itimerspec { it_interval: timespec(Duration::ZERO), it_value };
            timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
            self.is_timed = time.is_some();
        }
        Ok(())
    }
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}
