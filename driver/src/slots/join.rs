//! Joining a group.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tracing::warn;

use super::message::{self, Message};
use super::name::{Found, Listener, Lock, Name};
use super::service::{Own, Service};
use super::table::Table;
use super::{Group, Inbox, LOCK_PATIENCE, NAMELESS, Parts, Resource, SLOTS, Slot, Thread, had, new_bell};
use crate::Error;
use crate::credentials::Credentials;
use crate::private_directory;
use crate::sealed::SealedError;
use crate::waker::timespec;

/// How long a member may take to answer. Its thread has no other work.
const ANSWER: Duration = Duration::from_millis(500);
/// How long one member is waited for before the next is asked.
const QUICK_ANSWER: Duration = Duration::from_millis(20);

/// The first bytes of messages at names.
pub(super) const HELLO: u8 = b'H';
pub(super) const MEMBERS: u8 = b'M';
pub(super) const JOINED: u8 = b'J';
pub(super) const HEARD: u8 = b'A';
/// The longest of these messages.
pub(super) const ROOM: usize = 64;

/// A member's description of its group, the answer to [`HELLO`], with descriptors.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) table: Table,
    pub(super) common: Vec<OwnedFd>,
    pub(super) descriptors: Vec<OwnedFd>,
    /// Of the member and of other members that it knows.
    pub(super) mailboxes: Vec<(usize, OwnedFd)>,
}

/// A new process's description of itself.
#[derive(Debug)]
pub(super) struct Joined {
    /// The number of slots for which the group has descriptors now.
    pub(super) count: usize,
    /// Slot, descriptor, mailbox.
    pub(super) slots: Vec<(usize, OwnedFd, OwnedFd)>,
}

pub(super) fn join<R: Resource>(
    what: &str,
    known_as: String,
    count: usize,
    resource: R,
) -> Result<Vec<Slot>, Error> {
    become_member(what, known_as.clone(), count, resource).map_err(|error| match error {
        Error::Os { source, .. } if is_short(&source) => failed(&known_as, &source),
        error => error,
    })
}

fn become_member<R: Resource>(
    what: &str,
    known_as: String,
    count: usize,
    mut resource: R,
) -> Result<Vec<Slot>, Error> {
    let os = |source: io::Error| failed(&known_as, &source);
    // If members can't be found, because there is no directory or no room in it, a resource that does not need others
    // can be used alone.
    let needs_others = resource.needs_others();
    let alone = |error: io::Error| {
        if needs_others || is_short(&error) {
            return Err(os(error));
        }
        warn!("{known_as} is used by this process only, and shared memory is not used: {error}");
        Ok(Name::alone())
    };
    let named = Name::new(what).and_then(|name| Ok((Lock::take(&name, LOCK_PATIENCE)?, name)));
    let (mut name, held) = match named {
        Ok((taken, name)) => (name, Some(had(taken, &known_as)?)),
        Err(error) => (alone(error)?, None),
    };
    let (found, members) = look(&name, &known_as)?;
    resource.takes((!found.alive).trailing_zeros() as usize)?;
    if members.is_none() {
        name.clear((0..SLOTS).map(|slot| slot.to_string()));
        name.clear_namespaces();
    }
    let listeners = match bind_free(&name, found.alive, count) {
        Err(error) if members.is_none() => {
            name = alone(error)?;
            bind_free(&name, found.alive, count)
        }
        bound => bound,
    };
    let listeners = listeners.map_err(os)?;
    let (table, mut parts) = match members {
        Some(members) => members,
        None => {
            let common = resource.found()?.into_iter().map(Arc::new).collect();
            let table = Table::create().map_err(|error| unusable(&known_as, error))?;
            (table, Parts { common, ..Parts::default() })
        }
    };
    parts.mailboxes.resize_with(SLOTS, || None);

    if listeners.len() < count {
        let wanted = if count == 1 { String::new() } else { format!(", and {count} are wanted") };
        let processes = format!("{} of its {SLOTS} slots have processes", found.alive.count_ones());
        return Err(Error::sharing(
            &known_as,
            format!("{processes}{wanted}; end one, or use another address"),
        ));
    }
    let mut own = Vec::with_capacity(count);
    for (slot, listener) in listeners {
        if let Some(descriptor) = parts.descriptors.get(slot) {
            resource.renew(descriptor.as_fd())?;
        }
        // The next slot.
        if parts.descriptors.len() == slot {
            parts.descriptors.push(resource.add(&parts)?.into());
            table.set_descriptors(parts.descriptors.len());
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (mailbox, mailbox_of_others) = pair.map_err(|error| os(error.into()))?;
        table.clear(slot);
        own.push(Own { slot, listener, mailbox, mailbox_of_others: Arc::new(mailbox_of_others) });
    }
    let mask = own.iter().fold(0, |mask, own| mask | 1 << own.slot);
    let alive = found.alive | mask;
    resource.changed(&parts, alive, mask);
    found.tell(&own, &parts, &known_as);

    let bell = new_bell().map_err(os)?;
    let group = Arc::new(Group {
        name,
        what: known_as,
        table,
        alive: AtomicU64::new(0),
        own: AtomicU64::new(mask),
        parts: Mutex::new(parts),
        inboxes: (0..SLOTS).map(|_| Inbox::default()).collect(),
        leaving: AtomicU64::new(0),
        left: Mutex::new(0),
        one_left: Condvar::new(),
        watches: Mutex::new(Vec::new()),
        bell,
        vacant: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
        told_all: Mutex::new((Duration::ZERO, 0)),
        made: Instant::now(),
    });
    group.set_alive(alive);
    let numbers: Vec<_> = own.iter().map(|own| (own.slot, own.mailbox_of_others.clone())).collect();
    let thread = Service::start(group.clone(), own, resource)
        .map_err(|source| Error::sharing(&group.what, format!("starting a thread: {source}")))?;
    let thread = Arc::new(Thread { handle: Mutex::new(Some(thread)), process: std::process::id() });
    drop(held);
    for slot in found.nameless {
        // A process that has ended needs no name.
        group.post(slot, NAMELESS, &[], &[]);
    }
    let slot = |(number, mailbox)| Slot { group: group.clone(), number, mailbox, thread: thread.clone() };
    Ok(numbers.into_iter().map(slot).collect())
}

/// Takes the names of the lowest free slots, at most `count`. Because of the lock no other process joins.
fn bind_free(name: &Name, alive: u64, count: usize) -> io::Result<Vec<(usize, Listener)>> {
    let free = (0..SLOTS).filter(|slot| alive >> slot & 1 == 0);
    let bind = |slot: usize| {
        let taken = || io::Error::other(format!("a process has taken slot {slot} without the lock"));
        Ok((slot, name.bind(&slot.to_string())?.ok_or_else(taken)?))
    };
    free.take(count).map(bind).collect()
}

/// Finds the members, and what they have; `None` for the latter if there are none.
fn look(name: &Name, what: &str) -> Result<(Present, Option<(Table, Parts)>), Error> {
    // A forked child that has not executed its program yet keeps names of processes that have ended.
    for _ in 0..LOOKS_MAX {
        let mut found = Present::look(name, what)?;
        if found.alive == 0 {
            return Ok((found, None));
        }
        if let Some(members) = found.ask(what)? {
            return Ok((found, Some(members)));
        }
    }
    Err(Error::sharing(what, "processes that share it end all the time".to_owned()))
}

/// How often all members may end while they are asked.
const LOOKS_MAX: u32 = 100;

/// The members at the time when a new process joins.
struct Present {
    /// Slots with processes.
    alive: u64,
    /// The members that are connected.
    connections: Vec<(usize, OwnedFd)>,
    /// The members whose names were removed: other members have their mailboxes.
    nameless: Vec<usize>,
}

impl Present {
    fn look(name: &Name, what: &str) -> Result<Present, Error> {
        let mut present = Present { alive: 0, connections: Vec::new(), nameless: Vec::new() };
        for slot in 0..SLOTS {
            let found = name.connect(&slot.to_string());
            match found.map_err(|source| failed(what, &source))? {
                Found::Nobody => continue,
                Found::Process(connection) => present.connections.push((slot, connection)),
                Found::Busy => {}
            }
            present.alive |= 1 << slot;
        }
        Ok(present)
    }

    /// Everything that the group has, from the first member that knows all of it. `None` if no member does, and one has
    /// ended meanwhile.
    fn ask(&mut self, what: &str) -> Result<Option<(Table, Parts)>, Error> {
        let (mut best, mut answers, mut has_ended): (Option<Members>, usize, bool) = (None, 0, false);
        let mut take = |answered: io::Result<Message>| match answered.and_then(Members::read) {
            Ok(members) => {
                answers += 1;
                let knows = members.descriptors.len();
                let is_all = knows == members.table.descriptors();
                if best.as_ref().is_none_or(|best| best.descriptors.len() < knows) {
                    best = Some(members);
                }
                Ok(is_all)
            }
            // No answer can be received.
            Err(error) if is_short(&error) => Err(failed(what, &error)),
            Err(error) => {
                tracing::debug!("a process that shares {what} does not answer: {error}");
                use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
                has_ended |= matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
                Ok(false)
            }
        };
        // Many members may be stopped while a new process has the lock: each is waited for briefly, and then all of
        // them together.
        let (mut silent, mut is_all) = (Vec::new(), false);
        for (_, connection) in &self.connections {
            // If it has ended, receiving from it shows this.
            let _ = message::send(connection, &[&[HELLO]], &[]);
            match answer(connection, Instant::now() + QUICK_ANSWER) {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => silent.push(connection),
                answered => is_all = take(answered)?,
            }
            if is_all {
                break;
            }
        }
        let deadline = Instant::now() + ANSWER;
        for connection in silent {
            if is_all {
                break;
            }
            is_all = take(answer(connection, deadline))?;
        }
        self.find_nameless(best.iter().flat_map(|best| &best.mailboxes), what);
        // A member that was stopped while others joined does not know them yet. But descriptors that no existing member
        // knows no longer exist: a new process has ended before it was a member.
        let everybody = answers == self.alive.count_ones() as usize;
        if let Some(best) = best.as_ref().filter(|_| everybody) {
            best.table.set_descriptors(best.descriptors.len());
        }
        let answer = best.filter(|best| best.descriptors.len() == best.table.descriptors());
        let Some(members) = answer else {
            if has_ended {
                return Ok(None);
            }
            let slots: Vec<String> =
                (0..SLOTS).filter(|slot| self.alive >> slot & 1 == 1).map(|slot| slot.to_string()).collect();
            let reason = format!(
                "none of the processes that have slots of it ({}) answers within {} ms; are they stopped, still ending after they were \
                 killed, or have as many files open as they may? Another address does not have them, as 127.0.0.2 \
                 instead of 127.0.0.1",
                slots.join(", "),
                ANSWER.as_millis()
            );
            return Err(Error::sharing(what, reason));
        };
        let Members { table, common, descriptors, mailboxes } = members;
        let shared = |fds: Vec<OwnedFd>| fds.into_iter().map(Arc::new).collect();
        let (common, descriptors) = (shared(common), shared(descriptors));
        let mut parts = Parts { common, descriptors, mailboxes: Vec::new() };
        parts.mailboxes.resize_with(SLOTS, || None);
        for (slot, mailbox) in mailboxes {
            // Its process has ended meanwhile.
            if self.alive >> slot & 1 == 1 {
                parts.mailboxes[slot] = Some(mailbox.into());
            }
        }
        Ok(Some((table, parts)))
    }

    /// A process whose mailbox is open exists, even without its name: its slot and its socket are in use.
    fn find_nameless<'a>(&mut self, mailboxes: impl Iterator<Item = &'a (usize, OwnedFd)>, what: &str) {
        for (slot, mailbox) in mailboxes {
            if self.alive >> slot & 1 == 0 && !is_hung_up(mailbox) {
                warn!(
                    "the process in slot {slot} of {what} exists, but its file does not: another program removes \
                     files in {}",
                    private_directory::of_user().display()
                );
                self.alive |= 1 << slot;
                self.nameless.push(*slot);
            }
        }
    }

    /// Notifies every member of the new slots, and waits until all members that are not stopped have acknowledged.
    fn tell(&self, own: &[Own], parts: &Parts, what: &str) {
        let mut waiting = Vec::new();
        for (slot, connection) in &self.connections {
            match send_joined(connection, own, parts) {
                Ok(()) => waiting.push((*slot, connection)),
                // It has just ended.
                Err(error)
                    if [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset]
                        .contains(&error.kind()) => {}
                Err(error) => {
                    warn!(
                        "{}, in slot {slot} of {what}, is not notified of this process: {error}",
                        process(connection)
                    );
                }
            }
        }
        let deadline = Instant::now() + ANSWER;
        for (slot, connection) in waiting {
            let has_heard = loop {
                match answer(connection, deadline) {
                    // A late answer to the earlier request.
                    Ok(message) if message.bytes.first() == Some(&MEMBERS) => {}
                    answered => break answered.is_ok_and(|message| message.bytes == [HEARD]),
                }
            };
            if !has_heard {
                warn!("{}, in slot {slot} of {what}, does not answer; is it stopped?", process(connection));
            }
        }
    }
}

/// Whether no process reads the mailbox. The descriptors of a process that is ending are closed one after another.
fn is_hung_up(mailbox: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(mailbox, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&timespec(QUICK_ANSWER)));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// The other end, for messages.
fn process(connection: &OwnedFd) -> String {
    Credentials::of_peer(connection).map_or("a process".to_owned(), |peer| format!("pid {}", peer.pid))
}

fn answer(connection: &OwnedFd, deadline: Instant) -> io::Result<Message> {
    let gone = || io::Error::new(io::ErrorKind::UnexpectedEof, "it has ended");
    loop {
        match message::receive(connection, &mut [0; ROOM]) {
            Ok(message) => return message.ok_or_else(gone),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match poll(&mut [PollFd::new(connection, PollFlags::IN)], Some(&timespec(left))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Members {
    /// Sends the description of a group.
    pub(super) fn send(connection: &OwnedFd, group: &Group, own: &[Own]) -> io::Result<()> {
        let parts = group.parts();
        let mut descriptors = vec![group.table.file()];
        descriptors.extend(parts.common.iter().map(|fd| fd.as_fd()));
        descriptors.extend(parts.descriptors.iter().map(|fd| fd.as_fd()));
        let mut mask = 0u64;
        for slot in 0..SLOTS {
            let mine = own.iter().find(|own| own.slot == slot).map(|own| own.mailbox_of_others.as_fd());
            if let Some(mailbox) = mine.or(parts.mailbox(slot)) {
                mask |= 1 << slot;
                descriptors.push(mailbox);
            }
        }
        let counts = [parts.common.len() as u8, parts.descriptors.len() as u8];
        message::send(connection, &[&[MEMBERS], &counts, &mask.to_ne_bytes()], &descriptors)
    }

    pub(super) fn read(message: Message) -> io::Result<Members> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let [MEMBERS, common, descriptors, mask @ ..] = &message.bytes[..] else {
            return Err(invalid("it reports other values"));
        };
        let mask = u64::from_ne_bytes(mask.try_into().map_err(|_| invalid("its message is too short"))?);
        let (common, count) = (usize::from(*common), usize::from(*descriptors));
        if message.descriptors.len() != 1 + common + count + mask.count_ones() as usize || count > SLOTS {
            return Err(invalid("its descriptors are not those that it names"));
        }
        let mut all = message.descriptors.into_iter();
        let table = all.next().ok_or_else(|| invalid("it has no table"))?;
        let table = Table::open(table).map_err(|error| invalid(&format!("its table: {error:?}")))?;
        Ok(Members {
            table,
            common: all.by_ref().take(common).collect(),
            descriptors: all.by_ref().take(count).collect(),
            mailboxes: (0..SLOTS).filter(|slot| mask >> slot & 1 == 1).zip(all).collect(),
        })
    }
}

fn send_joined(connection: &OwnedFd, own: &[Own], parts: &Parts) -> io::Result<()> {
    let mut mask = 0u64;
    let mut descriptors: Vec<BorrowedFd<'_>> = Vec::new();
    for own in own {
        mask |= 1 << own.slot;
        descriptors.push(parts.descriptors[own.slot].as_fd());
        descriptors.push(own.mailbox_of_others.as_fd());
    }
    let count = [parts.descriptors.len() as u8];
    message::send(connection, &[&[JOINED], &count, &mask.to_ne_bytes()], &descriptors)
}

impl Joined {
    pub(super) fn read(message: Message) -> Option<Joined> {
        let [JOINED, count, mask @ ..] = &message.bytes[..] else { return None };
        let (count, mask) = (usize::from(*count), u64::from_ne_bytes(mask.try_into().ok()?));
        if count > SLOTS || message.descriptors.len() != 2 * mask.count_ones() as usize {
            return None;
        }
        let mut all = message.descriptors.into_iter();
        let slots = (0..SLOTS).filter(|slot| mask >> slot & 1 == 1);
        let slots = slots.filter_map(|slot| Some((slot, all.next()?, all.next()?))).collect();
        Some(Joined { count, slots })
    }
}

/// Whether it is the limit of open files of the process or the host.
pub(super) fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

pub(super) fn failed(what: &str, error: &io::Error) -> Error {
    if !is_short(error) {
        return Error::sharing(what, error.to_string());
    }
    let most = 3 * SLOTS + 16;
    let reason = format!(
        "{error}: it takes up to {most} in each process; `ulimit -n` with a larger number allows more"
    );
    Error::sharing(what, reason)
}

fn unusable(what: &str, error: SealedError) -> Error {
    Error::sharing(what, format!("memory to share: {error:?}"))
}
