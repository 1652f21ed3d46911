//! Slots: the processes of one user that share something, such as an address, have a slot each.
//!
//! There is no daemon. Each process has a listener at the name of its slot, and a thread that answers there, so a new
//! process can join even if the program does not poll for a while. A new process takes the lock, asks a member for
//! everything that the group has, takes the lowest slot without a process, and notifies the other members.
//!
//! Every member has every descriptor of the group. A socket of a SO_REUSEPORT group keeps its place as long as any
//! process has it open. When one is closed, the kernel moves the last socket into its place. So each slot has a place,
//! and no place moves when a process is killed. The descriptor of a slot is kept for the next process in that slot.
//!
//! A message to another process of the group is sent to its mailbox. A mailbox is a socket pair: the process has one
//! end, and all other processes have the other. The other end also shows when the process has ended.
//!
//! The members share a `Resource`: the sockets of an address (`udp/steering.rs`), or nothing (`shm.rs`). These modules
//! know nothing about packets except their slot (`owner.rs`).
//!
//! - `name.rs`: names in the user's directory, and the lock
//! - `join.rs`: joining a group
//! - `service.rs`: the thread of a member
//! - `message.rs`: messages between processes
//! - `owner.rs`: the slot that a packet is for
//! - `table.rs`: the services of each process
//!
//! docs/decisions/12-neighbours.md has the reasons.

mod join;
mod message;
mod name;
pub(crate) mod owner;
mod service;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::Error;
use crate::credentials::Credentials;
use name::{Found, Lock, Name};
use table::{Listened, Table};

/// Slots of a group.
pub(crate) const SLOTS: usize = 64;
/// The most mail pending in a mailbox until its process polls.
const MAIL_MAX: usize = 1024;
/// The longest mail.
pub(crate) const MAIL_LEN_MAX: usize = 10 << 10;
/// Kind of mail: a packet for this slot.
pub(crate) const PACKET: u8 = b'P';
/// Kind of mail: sent to the slot's name by a process of this group or of another one.
pub(crate) const OFFER: u8 = b'O';
/// Kind of mail: notifies a process that the file of its name was removed.
const NAMELESS: u8 = b'M';
/// Kind of mail: a [watched](Slot::watch) process has ended. Its bytes are the watch's number.
pub(crate) const GONE: u8 = b'G';
/// A slot that had no process is not checked again for this time.
pub(crate) const VACANT: Duration = Duration::from_millis(10);
/// The most copies of messages to all slots that are forwarded in a window. An honest peer sends one if an answer to it
/// was lost.
const TOLD_ALL_MAX: u32 = 2 * SLOTS as u32;
const TOLD_ALL_WINDOW: Duration = Duration::from_millis(10);
/// How long a change of the group may take, in which a new process waits for the answers of members.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// The resource that a group shares. One value creates or joins the group, and is then used by the process's thread.
pub(crate) trait Resource: Send + 'static {
    /// Whether it is useless without other processes.
    fn needs_others(&self) -> bool {
        false
    }

    /// Checks whether this slot, the lowest free one, is suitable. Nothing has changed yet.
    fn takes(&self, slot: usize) -> Result<(), Error> {
        let _ = slot;
        Ok(())
    }

    /// Creates the common descriptors of a new group.
    fn found(&mut self) -> Result<Vec<OwnedFd>, Error>;

    /// Creates the descriptor of the next slot.
    fn add(&mut self, parts: &Parts) -> Result<OwnedFd, Error>;

    /// Prepares the descriptor of a slot whose process has ended for a new one.
    fn renew(&mut self, descriptor: BorrowedFd<'_>) -> Result<(), Error>;

    /// Called when the process of a slot has ended. The descriptor is unused until it is [renewed](Resource::renew).
    fn retire(&mut self, descriptor: BorrowedFd<'_>);

    /// Called when the slots with processes have changed; those in `own` belong to this process.
    fn changed(&mut self, group: &Parts, alive: u64, own: u64);

    /// The descriptors that the thread [serves](Resource::serve) when they are readable. The process with the lowest
    /// slot is the first.
    fn served(&self, group: &Parts, is_first: bool) -> Vec<Arc<OwnedFd>>;

    /// Serves a readable descriptor. Never blocks.
    fn serve(&mut self, group: &Group, served: BorrowedFd<'_>);
}

/// Connects to the first process in these slots of the group `what`, if there is one. Never blocks.
pub(crate) fn connect(what: &str, slots: impl IntoIterator<Item = usize>) -> io::Result<Option<OwnedFd>> {
    let name = Name::new(what)?;
    let mut nobody = Ok(None);
    for slot in slots {
        match name.connect(&slot.to_string()) {
            Ok(Found::Process(connection)) => return Ok(Some(connection)),
            Ok(Found::Nobody | Found::Busy) => {}
            Err(error) => nobody = Err(error),
        }
    }
    nobody
}

/// The slots of the group `what` that processes of this user have, each with the process's number.
///
/// # Errors
/// If no process can be found.
pub(crate) fn members(what: &str) -> io::Result<Vec<(usize, u32)>> {
    let name = Name::new(what)?;
    let pid = |slot: usize| match name.connect(&slot.to_string()) {
        Ok(Found::Process(connection)) => Some((slot, Credentials::of_peer(&connection).ok()?.pid)),
        _ => None,
    };
    Ok((0..SLOTS).filter_map(pid).collect())
}

/// The name of a new process that has not notified any member.
#[cfg(test)]
pub(crate) fn unheard(what: &str, number: usize) -> impl Drop + use<> {
    Name::new(what).unwrap().bind(&number.to_string()).unwrap().unwrap()
}

/// Sends a message to a mailbox, or to a process that this one is [connected](connect) to. Never blocks.
pub(crate) fn say(to: impl AsFd, kind: u8, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    message::send(to, &[&[kind], bytes], descriptors)
}

/// A resource without descriptors of its own: its members only find each other.
#[derive(Debug)]
pub(crate) struct Mailboxes;

/// The descriptors of a group. Every member has all of them.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// The common descriptors.
    pub(crate) common: Vec<Arc<OwnedFd>>,
    /// By slot. A process with a descriptor also has all before it, so that no place moves: see the module
    /// documentation.
    pub(crate) descriptors: Vec<Arc<OwnedFd>>,
    /// The mailboxes of the other processes.
    mailboxes: Vec<Option<Arc<OwnedFd>>>,
}

/// A group from one process's point of view.
#[derive(Debug)]
pub(crate) struct Group {
    name: Name,
    /// A description of the resource for messages.
    what: String,
    table: Table,
    /// The slots known to have processes.
    alive: AtomicU64,
    /// The slots of this process.
    own: AtomicU64,
    parts: Mutex<Parts>,
    inboxes: Vec<Inbox>,
    /// Slots of this process to be given up, and those given up.
    leaving: AtomicU64,
    left: Mutex<u64>,
    one_left: Condvar,
    bell: OwnedFd,
    watches: Mutex<Vec<Watch>>,
    /// The time until which each slot need not be checked again because it had no process: in nanoseconds since `made`.
    vacant: Vec<AtomicU64>,
    /// The end of the window, since `made`, and the number of copies of messages to all slots in it.
    told_all: Mutex<(Duration, u32)>,
    made: Instant,
}

/// A process whose end is reported to a slot.
#[derive(Clone, Debug)]
struct Watch {
    slot: usize,
    number: u64,
    /// The mailbox of the process.
    mailbox: Arc<OwnedFd>,
}

/// The mail for a slot of this process.
#[derive(Debug, Default)]
struct Inbox {
    mail: Mutex<VecDeque<Mail>>,
    is_waiting: AtomicBool,
    waker: Mutex<Option<Waker>>,
    lost: AtomicU64,
}

/// A message from another member.
#[derive(Debug)]
pub(crate) struct Mail {
    /// Its kind, defined by the resource.
    pub(crate) kind: u8,
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// A slot of this process. It is given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    group: Arc<Group>,
    number: usize,
    mailbox: Arc<OwnedFd>,
    thread: Arc<Thread>,
}

#[derive(Debug)]
struct Thread {
    handle: Mutex<Option<JoinHandle<()>>>,
    /// Its process: a forked child has no thread.
    process: u32,
}

impl Slot {
    /// Takes `count` slots of the group `what`, which is called `known_as` in messages.
    ///
    /// # Errors
    /// [`Error::Sharing`]; the resource's errors.
    pub(crate) fn join(
        what: &str,
        known_as: String,
        count: usize,
        resource: impl Resource,
    ) -> Result<Vec<Slot>, Error> {
        join::join(what, known_as, count, resource)
    }

    pub(crate) fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// The end of this slot's mailbox that other processes have.
    pub(crate) fn mailbox(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }

    /// Requests mail of the kind [`GONE`] when the process with this mailbox has ended.
    pub(crate) fn watch(&self, number: u64, mailbox: OwnedFd) {
        let watch = Watch { slot: self.number, number, mailbox: mailbox.into() };
        locked(&self.group.watches).push(watch);
        self.group.ring();
    }

    /// Mail to and from this slot that was lost because there was no room or no process, and packets that the resource
    /// has [lost](Group::lose).
    pub(crate) fn lost(&self) -> u64 {
        self.inbox().lost.load(Ordering::Relaxed)
    }

    /// Ends a watch. Returns the mailbox, if its process has not ended yet.
    pub(crate) fn unwatch(&self, number: u64) -> Option<Arc<OwnedFd>> {
        let mut watches = locked(&self.group.watches);
        let at = watches.iter().position(|watch| watch.number == number)?;
        let watch = watches.swap_remove(at);
        drop(watches);
        // The thread polls the mailbox until then.
        self.group.ring();
        Some(watch.mailbox)
    }

    /// Sets the waker that is called when there is mail.
    pub(crate) fn wake(&self, waker: Waker) {
        *locked(&self.inbox().waker) = Some(waker);
    }

    /// Whether there may be mail. Costs one load.
    #[inline]
    pub(crate) fn has_mail(&self) -> bool {
        self.inbox().is_waiting.load(Ordering::Relaxed)
    }

    pub(crate) fn take_mail(&self) -> Option<Mail> {
        let inbox = self.inbox();
        let mut mail = locked(&inbox.mail);
        let first = mail.pop_front();
        inbox.is_waiting.store(!mail.is_empty(), Ordering::Relaxed);
        first
    }

    /// Directs requests for the service to this slot. Waits for at most ten seconds while other processes change the
    /// group.
    ///
    /// # Errors
    /// [`Error::ServiceInUse`], [`Error::Sharing`].
    pub(crate) fn listen(&self, service: u64) -> Result<(), Error> {
        let Group { name, table, what, .. } = &*self.group;
        let _lock = lock(name, what)?;
        match table.listen(service, self.number, self.group.alive()) {
            Listened::Done => Ok(()),
            Listened::Full => Err(Error::sharing(
                what,
                format!("all {} services of the address are in use", table::SERVICES_MAX),
            )),
            Listened::Taken(slot) => {
                let pid = match name.connect(&slot.to_string()) {
                    Ok(Found::Process(socket)) => Credentials::of_peer(&socket).ok(),
                    _ => None,
                };
                Err(Error::ServiceInUse { service, of: what.clone(), pid: pid.map_or(0, |peer| peer.pid) })
            }
        }
    }

    /// Stops listening. Requests are still directed to this slot until another slot listens: requesters may retransmit,
    /// and this slot knows its earlier answers.
    pub(crate) fn unlisten(&self, service: u64) {
        self.group.table.unlisten(service, self.number);
    }

    fn inbox(&self) -> &Inbox {
        &self.group.inboxes[self.number]
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.thread.process != std::process::id() {
            return;
        }
        let bit = 1 << self.number;
        self.group.leaving.fetch_or(bit, Ordering::AcqRel);
        self.group.ring();
        let mut left = locked(&self.group.left);
        while *left & bit == 0 {
            left = self.group.one_left.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
        let is_last = self.group.own.load(Ordering::Acquire) == 0;
        drop(left);
        // The thread's references to descriptors are dropped when it ends.
        if is_last
            && let Some(thread) = locked(&self.thread.handle).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of {} has panicked", self.group.what);
        }
    }
}

impl Group {
    /// The slots with processes, as a bit mask.
    pub(crate) fn alive(&self) -> u64 {
        self.alive.load(Ordering::Acquire)
    }

    /// Whether there is more than one process.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.alive.load(Ordering::Relaxed).count_ones() > 1
    }

    /// The slot that answers requests for a service: the one that listens, or the last one that did.
    pub(crate) fn find(&self, service: u64) -> Option<usize> {
        self.table.find_last(service, self.alive())
    }

    /// Whether no process of this user has the slot, including new processes whose notification this process has not
    /// received because it was stopped. This makes system calls, but not for each of many packets from a peer.
    pub(crate) fn is_vacant(&self, slot: usize) -> bool {
        let Some(vacant) = self.vacant.get(slot).filter(|_| self.alive() >> slot & 1 == 0) else {
            return false;
        };
        let now = self.made.elapsed();
        let known = vacant.load(Ordering::Relaxed);
        if u128::from(known) > now.as_nanos() {
            return true;
        }
        let is_vacant = matches!(self.name.connect(&slot.to_string()), Ok(Found::Nobody));
        if is_vacant {
            vacant.store((now + VACANT).as_nanos() as u64, Ordering::Relaxed);
        }
        is_vacant
    }

    /// Whether another message without a known owner may be sent to all slots. Any peer can send such messages, and
    /// each costs work in all processes.
    pub(crate) fn may_tell_all(&self) -> bool {
        let now = self.made.elapsed();
        let mut told_all = locked(&self.told_all);
        let (until, count) = &mut *told_all;
        if now >= *until {
            (*until, *count) = (now + TOLD_ALL_WINDOW, 0);
        }
        *count = count.saturating_add(self.alive().count_ones());
        *count <= TOLD_ALL_MAX
    }

    /// The lowest slot of this process.
    pub(crate) fn first_own(&self) -> Option<usize> {
        let own = self.own.load(Ordering::Acquire);
        (own != 0).then_some(own.trailing_zeros() as usize)
    }

    /// The lowest slot with a service.
    pub(crate) fn first_with_services(&self) -> Option<usize> {
        self.table.first_with_any(self.alive())
    }

    pub(crate) fn parts(&self) -> MutexGuard<'_, Parts> {
        locked(&self.parts)
    }

    /// Sends a message to the process of a slot. Returns whether it was taken: a mailbox may be full, or its process
    /// may have ended.
    pub(crate) fn post(&self, to: usize, kind: u8, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        if bytes.len() > MAIL_LEN_MAX || to >= SLOTS {
            return false;
        }
        if self.own.load(Ordering::Acquire) >> to & 1 == 1 {
            let descriptors = descriptors.iter().map(|fd| fd.try_clone_to_owned()).collect();
            let Ok(descriptors) = descriptors else { return false };
            return self.inboxes[to].put(Mail { kind, bytes: bytes.to_vec(), descriptors });
        }
        let parts = self.parts();
        let Some(mailbox) = parts.mailbox(to) else { return false };
        message::send(mailbox, &[&[kind], bytes], descriptors).is_ok()
    }

    /// Like [`post`](Group::post), without descriptors. Messages that were not taken are counted for slot `from` of
    /// this process.
    pub(crate) fn post_or_count(&self, (from, to): (usize, usize), kind: u8, bytes: &[u8]) {
        if !self.post(to, kind, bytes, &[]) {
            self.lose(from, 1);
        }
    }

    /// Counts lost packets of a slot of this process.
    pub(crate) fn lose(&self, slot: usize, count: u64) {
        if let Some(inbox) = self.inboxes.get(slot) {
            inbox.lost.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// The part of a growing total that no process of the group has reported yet.
    pub(crate) fn untold(&self, total: u64) -> u64 {
        total.saturating_sub(self.table.told().fetch_max(total, Ordering::AcqRel))
    }

    /// The number of [watched](Slot::watch) processes.
    #[cfg(test)]
    pub(crate) fn watched(&self) -> usize {
        locked(&self.watches).len()
    }

    /// Wakes the thread.
    fn ring(&self) {
        // It fails only if it was rung 2⁶⁴ times before the thread has read it.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    fn set_alive(&self, alive: u64) {
        self.alive.store(alive, Ordering::Release);
    }
}

impl Inbox {
    /// Returns whether there was room.
    fn put(&self, mail: Mail) -> bool {
        if locked(&self.mail).len() >= MAIL_MAX {
            return false;
        }
        self.put_always(mail);
        true
    }

    /// Discards the matching mail.
    fn forget(&self, is_meant: impl Fn(&Mail) -> bool) {
        locked(&self.mail).retain(|mail| !is_meant(mail));
    }

    fn put_always(&self, mail: Mail) {
        let mut all = locked(&self.mail);
        all.push_back(mail);
        self.is_waiting.store(true, Ordering::Relaxed);
        drop(all);
        if let Some(waker) = &*locked(&self.waker) {
            waker.wake_by_ref();
        }
    }
}

impl Parts {
    fn mailbox(&self, slot: usize) -> Option<BorrowedFd<'_>> {
        self.mailboxes.get(slot)?.as_ref().map(|mailbox| mailbox.as_fd())
    }
}

impl Resource for Mailboxes {
    fn needs_others(&self) -> bool {
        true
    }

    fn found(&mut self) -> Result<Vec<OwnedFd>, Error> {
        Ok(Vec::new())
    }

    fn add(&mut self, _: &Parts) -> Result<OwnedFd, Error> {
        // Every slot needs a descriptor, of any kind.
        new_bell().map_err(|source| Error::sharing("mailboxes", source.to_string()))
    }

    fn renew(&mut self, _: BorrowedFd<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn retire(&mut self, _: BorrowedFd<'_>) {}

    fn changed(&mut self, _: &Parts, _: u64, _: u64) {}

    fn served(&self, _: &Parts, _: bool) -> Vec<Arc<OwnedFd>> {
        Vec::new()
    }

    fn serve(&mut self, _: &Group, _: BorrowedFd<'_>) {}
}

fn lock(name: &Name, what: &str) -> Result<Lock, Error> {
    let taken = Lock::take(name, LOCK_PATIENCE).map_err(|source| join::failed(what, &source))?;
    had(taken, what)
}

/// Converts the result of waiting for the lock.
fn had(taken: Result<Lock, String>, what: &str) -> Result<Lock, Error> {
    taken.map_err(|holder| {
        let waited = LOCK_PATIENCE.as_secs();
        Error::sharing(
            what,
            format!("{holder} has been changing who shares it for {waited} s; is it stopped?"),
        )
    })
}

fn new_bell() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Data behind these locks is valid even after a panic of another thread: each change is one step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
