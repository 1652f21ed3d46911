//! What stands in for the rest of a runner: rings that carry numbers, a port that can be woken, the loops of
//! both sides in as few steps as they can have.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;

use loom::sync::{Condvar, Mutex, atomic};

use super::wakeup::{Desk, End, Sleep};

/// A ring, as far as its ends see each other: how many went in and came out.
pub(super) struct Ring {
    depth: usize,
    pushed: atomic::AtomicUsize,
    popped: atomic::AtomicUsize,
}

impl Ring {
    pub(super) fn new(depth: usize) -> Ring {
        Ring { depth, pushed: atomic::AtomicUsize::new(0), popped: atomic::AtomicUsize::new(0) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pushed.load(Ordering::Acquire) == self.popped.load(Ordering::Acquire)
    }

    pub(super) fn is_full(&self) -> bool {
        self.pushed.load(Ordering::Acquire) - self.popped.load(Ordering::Acquire) == self.depth
    }

    pub(super) fn push(&self) -> bool {
        let room = !self.is_full();
        if room {
            self.pushed.store(self.pushed.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
        room
    }

    pub(super) fn pop(&self) -> bool {
        let any = !self.is_empty();
        if any {
            self.popped.store(self.popped.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
        any
    }
}

/// A port that blocks until it is woken, as one with an eventfd: a wake-up is not lost if it comes first.
pub(super) struct Doorbell {
    rung: Mutex<bool>,
    ringing: Condvar,
}

impl Doorbell {
    fn new() -> Doorbell {
        Doorbell { rung: Mutex::new(false), ringing: Condvar::new() }
    }

    fn ring(&self) {
        *self.rung.lock().expect("no panic under it") = true;
        self.ringing.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().expect("no panic under it");
        while !*rung {
            rung = self.ringing.wait(rung).expect("no panic under it");
        }
        *rung = false;
    }
}

impl Wake for Doorbell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

/// A runner with one handle.
pub(super) struct Stub {
    sleep: Sleep,
    end: End,
    desk: Arc<Desk>,
    commands: Ring,
    deliveries: Ring,
    doorbell: Doorbell,
    /// Deliveries that have found no room.
    owed: Own,
}

impl Stub {
    pub(super) fn new(deliveries: usize) -> Arc<Stub> {
        let desk = Arc::new(Desk::new());
        let end = End::new();
        end.join(desk.clone());
        Arc::new(Stub {
            sleep: Sleep::new(),
            end,
            desk,
            commands: Ring::new(2),
            deliveries: Ring::new(deliveries),
            doorbell: Doorbell::new(),
            owed: Own(AtomicUsize::new(0)),
        })
    }

    // The handle's thread.

    /// Posts a command.
    pub(super) fn post(&self) {
        assert!(self.commands.push(), "there is room");
        self.sleep.nudge(|| self.doorbell.ring());
    }

    /// Takes a delivery, and sleeps until there is one; `false` if the runner has ended.
    pub(super) fn wait(&self) -> bool {
        loop {
            if self.deliveries.pop() {
                return true;
            }
            self.nudge_a_stalled_runner();
            if self.end.reason().is_some() {
                return self.deliveries.pop();
            }
            self.desk.bell.sleep(Duration::MAX, || {
                self.nudge_a_stalled_runner();
                !self.deliveries.is_empty() || self.end.reason().is_some()
            });
        }
    }

    /// The same as a task, which its executor polls each time that it was woken.
    pub(super) fn wait_as_a_task(&self) -> bool {
        let executor = Arc::new(Doorbell::new());
        let task = Waker::from(executor.clone());
        loop {
            if self.deliveries.pop() {
                return true;
            }
            self.nudge_a_stalled_runner();
            if self.end.reason().is_some() {
                return self.deliveries.pop();
            }
            let is_ready = self.desk.bell.tell(&task, || {
                self.nudge_a_stalled_runner();
                !self.deliveries.is_empty() || self.end.reason().is_some()
            });
            if !is_ready {
                executor.wait();
            }
        }
    }

    fn nudge_a_stalled_runner(&self) {
        if self.desk.is_stalled() {
            self.sleep.nudge(|| self.doorbell.ring());
        }
    }

    /// The handle goes.
    pub(super) fn leave(&self) {
        self.desk.leave();
        self.sleep.tell_news(|| self.doorbell.ring());
    }

    /// A handle that comes while the runner may be ending: it is told, sooner or later.
    pub(super) fn come_and_wait_for_the_end(&self) {
        let desk = Arc::new(Desk::new());
        self.end.join(desk.clone());
        while self.end.reason().is_none() {
            desk.bell.sleep(Duration::MAX, || self.end.reason().is_some());
        }
    }

    // Whoever has the runner.

    pub(super) fn stop(&self) {
        self.sleep.stop(|| self.doorbell.ring());
    }

    // The runner's thread.

    /// Answers `commands` commands with `each` deliveries, or until it is told to stop or its handle is gone.
    /// Returns how many commands there were.
    pub(super) fn run(&self, commands: usize, each: usize) -> usize {
        let (mut seen, mut taken) = (0, 0);
        while taken < commands || self.owed.get() > 0 {
            let news = self.sleep.news();
            if news != seen {
                seen = news;
                if self.sleep.is_stopping() || self.desk.has_left() {
                    // What was posted before the end.
                    while self.commands.pop() {
                        taken += 1;
                    }
                    break;
                }
            }
            if !self.turn(each, &mut taken) {
                self.rest(seen);
            }
        }
        taken
    }

    /// The runner's thread ends, in whatever way.
    pub(super) fn finish(&self, reason: &str) {
        self.end.set(reason);
        self.end.tell();
    }

    /// Returns whether there was anything to do.
    fn turn(&self, each: usize, taken: &mut usize) -> bool {
        let (mut any, mut delivered) = (false, false);
        if self.owed.get() == 0 && self.commands.pop() {
            *taken += 1;
            self.owed.set(each);
            any = true;
        }
        while self.owed.get() > 0 && self.deliveries.push() {
            self.owed.set(self.owed.get() - 1);
            delivered = true;
        }
        if delivered {
            self.desk.bell.ring();
        }
        any || delivered
    }

    fn rest(&self, seen: u32) {
        let stuck = self.owed.get() > 0;
        self.desk.announce(stuck);
        let may_rest = || if stuck { self.deliveries.is_full() } else { self.commands.is_empty() };
        self.sleep.sleep(seen, may_rest, || self.doorbell.wait());
        self.desk.announce(false);
    }
}

/// For the runner's thread alone.
struct Own(AtomicUsize);

impl Own {
    fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self, value: usize) {
        self.0.store(value, Ordering::Relaxed);
    }
}
