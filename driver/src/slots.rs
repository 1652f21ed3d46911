//! Slots: processes of one user share something, such as an address, and each of them has a slot.
//!
//! There is no daemon. Each process has a listener at the name of its slot, and a thread that answers there, so a
//! program that does not poll for a while keeps no newcomer out. A newcomer takes the lock, asks a member for
//! everything that the group has, takes the lowest slot without a process, and tells the other members.
//!
//! Every member has every descriptor of the group. A socket of a SO_REUSEPORT group keeps its place as long as any
//! process has it open. When one is closed, the kernel moves the last socket into its place. So a place is a slot, and
//! no place moves when a process is killed. A descriptor that a slot has once had is kept for the next process in that
//! slot.
//!
//! A message for another process of the group goes to its mailbox. A mailbox is a socket pair: the process has one end,
//! and all other processes have the other. The other end also shows when the process has ended.
//!
//! What the members share is a `Resource`: the sockets of an address (`udp/steering.rs`), or nothing (`shm.rs`). Of
//! packets these modules know only which slot a packet is for (`owner.rs`).
//!
//! - `name.rs`: names in the user's directory, and the lock
//! - `join.rs`: how a process becomes a member
//! - `service.rs`: the thread of a member
//! - `message.rs`: messages between processes
//! - `owner.rs`: the slot that a packet is for
//! - `table.rs`: which process has which service
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
/// What waits in a mailbox until its process polls.
const MAIL_MAX: usize = 1024;
/// The longest mail.
pub(crate) const MAIL_LEN_MAX: usize = 10 << 10;
/// Mail that is a packet for this slot.
pub(crate) const PACKET: u8 = b'P';
/// Mail that came by the slot's name, from a process of this group or of another one.
pub(crate) const OFFER: u8 = b'O';
/// Mail that says to a process that the file of its name is gone.
const NAMELESS: u8 = b'M';
/// Mail that says of a process that was [watched](Slot::watch) that it has ended; its bytes are the watch's number.
pub(crate) const GONE: u8 = b'G';
/// So long a slot in which nobody was is not looked at again.
pub(crate) const VACANT: Duration = Duration::from_millis(10);
/// How many copies of messages to all slots are handed on in how long: an honest peer sends one where an answer to it was lost.
const TOLD_ALL_MAX: u32 = 2 * SLOTS as u32;
const TOLD_ALL_WINDOW: Duration = Duration::from_millis(10);
/// How long a change of the group may take: a newcomer waits for the answers of members.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// What a group shares. One value founds or joins the group, and stays with the process's thread.
pub(crate) trait Resource: Send + 'static {
    /// Whether it is nothing without others.
    fn needs_others(&self) -> bool {
        false
    }

    /// Whether this slot, the lowest that is free, will do. Nothing has changed yet.
    fn takes(&self, slot: usize) -> Result<(), Error> {
        let _ = slot;
        Ok(())
    }

    /// Nobody shares it yet: makes what all have in common.
    fn found(&mut self) -> Result<Vec<OwnedFd>, Error>;

    /// Makes the descriptor of the next slot.
    fn add(&mut self, parts: &Parts) -> Result<OwnedFd, Error>;

    /// Makes the descriptor of a slot whose process has ended that of a new one.
    fn renew(&mut self, descriptor: BorrowedFd<'_>) -> Result<(), Error>;

    /// The process of a slot has ended, and nobody has the descriptor until it is [renewed](Resource::renew).
    fn retire(&mut self, descriptor: BorrowedFd<'_>);

    /// These slots have processes now, those that are `own` this one.
    fn changed(&mut self, group: &Parts, alive: u64, own: u64);

    /// What the thread is to [serve](Resource::serve) when it is readable. The process with the lowest slot is the first.
    fn served(&self, group: &Parts, is_first: bool) -> Vec<Arc<OwnedFd>>;

    /// That is readable. Never blocks.
    fn serve(&mut self, group: &Group, served: BorrowedFd<'_>);
}

/// A connection to the first process in these slots of what is called `what` in names, if one is there. Never blocks.
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

/// The slots of what is called `what` in names that have a process of this user, and its number.
///
/// # Errors
/// Nobody can be found.
pub(crate) fn members(what: &str) -> io::Result<Vec<(usize, u32)>> {
    let name = Name::new(what)?;
    let pid = |slot: usize| match name.connect(&slot.to_string()) {
        Ok(Found::Process(connection)) => Some((slot, Credentials::of_peer(&connection).ok()?.pid)),
        _ => None,
    };
    Ok((0..SLOTS).filter_map(pid).collect())
}

/// The name of a newcomer of whom nobody has heard yet.
#[cfg(test)]
pub(crate) fn unheard(what: &str, number: usize) -> impl Drop + use<> {
    Name::new(what).unwrap().bind(&number.to_string()).unwrap().unwrap()
}

/// Says something to who has a mailbox, or to a process that one is [connected](connect) to. Never blocks.
pub(crate) fn say(to: impl AsFd, kind: u8, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    message::send(to, &[&[kind], bytes], descriptors)
}

/// A resource that has no descriptors of its own: its members find each other, no more.
#[derive(Debug)]
pub(crate) struct Mailboxes;

/// The descriptors of a group, of which every member has all.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// Those that all have in common.
    pub(crate) common: Vec<Arc<OwnedFd>>,
    /// By slot. Whoever has one has all before it, so that no place moves: see the module.
    pub(crate) descriptors: Vec<Arc<OwnedFd>>,
    /// To the mailboxes of the others.
    mailboxes: Vec<Option<Arc<OwnedFd>>>,
}

/// A group as one process has it.
#[derive(Debug)]
pub(crate) struct Group {
    name: Name,
    /// What is shared, for people.
    what: String,
    table: Table,
    /// Slots with processes, as far as is known.
    alive: AtomicU64,
    /// Slots of this process.
    own: AtomicU64,
    parts: Mutex<Parts>,
    inboxes: Vec<Inbox>,
    /// Slots of this process that are to be given up, and those that were.
    leaving: AtomicU64,
    left: Mutex<u64>,
    one_left: Condvar,
    bell: OwnedFd,
    watches: Mutex<Vec<Watch>>,
    /// Until when each slot need not be looked at again, for nobody was in it: in nanoseconds since `made`.
    vacant: Vec<AtomicU64>,
    /// Copies of messages to all slots in the window that ends then, since `made`.
    told_all: Mutex<(Duration, u32)>,
    made: Instant,
}

/// A process whose end is told to a slot.
#[derive(Clone, Debug)]
struct Watch {
    slot: usize,
    number: u64,
    /// The mailbox of the process.
    mailbox: Arc<OwnedFd>,
}

/// What has come for a slot of this process.
#[derive(Debug, Default)]
struct Inbox {
    mail: Mutex<VecDeque<Mail>>,
    is_waiting: AtomicBool,
    waker: Mutex<Option<Waker>>,
    lost: AtomicU64,
}

/// Something that another member has handed on.
#[derive(Debug)]
pub(crate) struct Mail {
    /// What it is; the resource knows.
    pub(crate) kind: u8,
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// A slot of this process. It is given up on drop.
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
    /// Its process: a child that was forked has no thread.
    process: u32,
}

impl Slot {
    /// Takes `count` slots of what is called `what` in names, and `known_as` for people.
    ///
    /// # Errors
    /// [`Error::Sharing`]; those of the resource.
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

    /// The end of this slot's mailbox that others have.
    pub(crate) fn mailbox(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }

    /// Has mail of the kind [`GONE`] come when the process that has this mailbox has ended.
    pub(crate) fn watch(&self, number: u64, mailbox: OwnedFd) {
        let watch = Watch { slot: self.number, number, mailbox: mailbox.into() };
        locked(&self.group.watches).push(watch);
        self.group.ring();
    }

    /// Mail to this slot and from it that found no room, or nobody, and what the resource has [lost](Group::lose).
    pub(crate) fn lost(&self) -> u64 {
        self.inbox().lost.load(Ordering::Relaxed)
    }

    /// Does no more. Returns the mailbox, if its process has not ended yet.
    pub(crate) fn unwatch(&self, number: u64) -> Option<Arc<OwnedFd>> {
        let mut watches = locked(&self.group.watches);
        let at = watches.iter().position(|watch| watch.number == number)?;
        let watch = watches.swap_remove(at);
        drop(watches);
        // The thread looks at it until then.
        self.group.ring();
        Some(watch.mailbox)
    }

    /// Who is woken when there is mail.
    pub(crate) fn wake(&self, waker: Waker) {
        *locked(&self.inbox().waker) = Some(waker);
    }

    /// Whether there may be mail: one load.
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

    /// Requests for the service are for this slot from now on. Waits while others change the group, for ten seconds at most.
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

    /// Nobody else's are they until somebody else listens: whoever has asked already may ask again, and this slot knows what it
    /// has answered.
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
        // With the thread go the descriptors that it had a part in.
        if is_last
            && let Some(thread) = locked(&self.thread.handle).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of {} has panicked", self.group.what);
        }
    }
}

impl Group {
    /// Slots that have processes, a bit each.
    pub(crate) fn alive(&self) -> u64 {
        self.alive.load(Ordering::Acquire)
    }

    /// Whether there is more than one process.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.alive.load(Ordering::Relaxed).count_ones() > 1
    }

    /// Who answers requests for a service: the slot that listens, or that which did.
    pub(crate) fn find(&self, service: u64) -> Option<usize> {
        self.table.find_last(service, self.alive())
    }

    /// Whether nobody of this user is in a slot, also nobody who has come and whom this process, that was stopped, has not heard
    /// yet. Takes system calls, but not for each of many packets that anybody sends.
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

    /// Whether one more message may go to all slots, for nobody can tell whose it is. Anybody can send such, and each is work for
    /// all of them.
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

    /// The lowest slot that has a service.
    pub(crate) fn first_with_services(&self) -> Option<usize> {
        self.table.first_with_any(self.alive())
    }

    pub(crate) fn parts(&self) -> MutexGuard<'_, Parts> {
        locked(&self.parts)
    }

    /// Hands something on to the process of a slot. Returns whether it was taken: a mailbox may be full, or its process gone.
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

    /// As [`post`](Group::post), without descriptors. What was not taken is counted at slot `from` of this process.
    pub(crate) fn post_or_count(&self, (from, to): (usize, usize), kind: u8, bytes: &[u8]) {
        if !self.post(to, kind, bytes, &[]) {
            self.lose(from, 1);
        }
    }

    /// A slot of this process has lost so many packets.
    pub(crate) fn lose(&self, slot: usize, count: u64) {
        if let Some(inbox) = self.inboxes.get(slot) {
            inbox.lost.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// How much of a count that only grows no process of the group has had yet.
    pub(crate) fn untold(&self, total: u64) -> u64 {
        total.saturating_sub(self.table.told().fetch_max(total, Ordering::AcqRel))
    }

    /// Processes that are [watched](Slot::watch).
    #[cfg(test)]
    pub(crate) fn watched(&self) -> usize {
        locked(&self.watches).len()
    }

    /// Wakes the thread.
    fn ring(&self) {
        // It fails only when it was rung 2⁶⁴ times before the thread has looked.
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

    /// Throws some away.
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
        // A slot has a descriptor, whatever it is.
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

/// What came of waiting for the lock.
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

/// A panic of another thread leaves what is behind these locks as it is: each change is one step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
