//! The thread of a member. It answers new processes, receives mail and detects members that have ended, even while its
//! program does not poll.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use tracing::{debug, warn};

use super::join::{HEARD, HELLO, JOINED, Joined, MEMBERS, Members, is_short};
use super::message::{self, Message};
use super::name::{Found, Listener, Lock, admits};
use super::{
    GONE, Group, MAIL_LEN_MAX, Mail, NAMELESS, OFFER, PACKET, Resource, SLOTS, Watch, locked, owner,
};
use crate::waker::timespec;

/// The most connections at once. More are pending in a name's backlog.
const CONNECTIONS_MAX: usize = 32;
/// How long a connection may be silent.
const SILENCE: Duration = Duration::from_secs(5);
/// The most messages received from one descriptor at a time, so that none blocks the others.
const MESSAGES_MAX: usize = 64;
/// The length of the sender's description at the beginning of an offer.
const SENDER: usize = 17;
/// How soon an operation blocked by other processes is tried again.
const RETRY: Duration = Duration::from_millis(5);
/// How often members without a known mailbox are queried: they were stopped when this process joined.
const SEARCH: Duration = Duration::from_secs(1);
const STACK: usize = 256 << 10;

/// A slot of this process.
#[derive(Debug)]
pub(super) struct Own {
    pub(super) slot: usize,
    pub(super) listener: Listener,
    pub(super) mailbox: OwnedFd,
    /// The end that other members have. This process keeps it for new ones.
    pub(super) mailbox_of_others: Arc<OwnedFd>,
}

pub(super) struct Service<R> {
    group: Arc<Group>,
    own: Vec<Own>,
    resource: R,
    connections: Vec<Connection>,
    /// Since when descriptors of slots without a process, and own names, need cleaning up.
    untidy: Option<Instant>,
    /// Whether a new process could not notify this one, because its name was removed.
    is_found_missing: bool,
    searched: Instant,
    /// Whether this process has reached its limit of open files, so that it may have missed messages.
    is_short: bool,
    room: Vec<u8>,
}

/// Signals that the thread has ended.
struct Ending(Arc<Group>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.own.store(0, Ordering::Release);
        *locked(&self.0.left) = u64::MAX;
        self.0.one_left.notify_all();
    }
}

/// A connection at the name of a slot, or to a member that this one has asked.
struct Connection {
    socket: OwnedFd,
    since: Instant,
    /// The slot of the name.
    slot: Option<usize>,
    is_over: bool,
}

impl Connection {
    fn new(socket: OwnedFd, slot: Option<usize>) -> Connection {
        Connection { socket, since: Instant::now(), slot, is_over: false }
    }
}

/// A ready descriptor.
enum Ready {
    Bell,
    Listener(usize),
    Mailbox(usize),
    Connection(usize),
    /// The process of this slot, which had this mailbox, has ended.
    Gone(usize, Arc<OwnedFd>),
    /// A watched process has ended.
    Watched(u64),
    Served(Arc<OwnedFd>),
}

impl<R: Resource> Service<R> {
    /// Starts the thread. It ends with the last slot of the process.
    pub(super) fn start(group: Arc<Group>, own: Vec<Own>, resource: R) -> io::Result<JoinHandle<()>> {
        let service = Service {
            group,
            own,
            resource,
            connections: Vec::new(),
            untidy: None,
            is_found_missing: false,
            searched: Instant::now(),
            is_short: false,
            room: vec![0; 1 + MAIL_LEN_MAX],
        };
        thread::Builder::new().name("ferroce-slots".to_owned()).stack_size(STACK).spawn(move || service.run())
    }

    fn run(mut self) {
        // A slot being given up waits for the thread, even if the thread has panicked.
        let _end = Ending(self.group.clone());
        while !self.own.is_empty() {
            let ready = self.wait();
            for ready in ready {
                match ready {
                    Ready::Bell => {
                        let _ = rustix::io::read(&self.group.bell, &mut [0u8; 8]);
                    }
                    Ready::Listener(index) => self.accept(index),
                    Ready::Mailbox(index) => self.take_mail(index),
                    Ready::Connection(index) => self.hear(index),
                    // Another process may have just taken its slot.
                    Ready::Gone(slot, mailbox) if self.has_mailbox(slot, &mailbox) => self.lose(slot),
                    Ready::Gone(..) => {}
                    Ready::Watched(number) => self.tell_gone(number),
                    Ready::Served(served) => self.resource.serve(&self.group, served.as_fd()),
                }
            }
            let now = Instant::now();
            self.connections
                .retain(|connection| !connection.is_over && now.duration_since(connection.since) < SILENCE);
            self.leave();
            if self.untidy.is_some() {
                self.tidy();
            }
            if std::mem::take(&mut self.is_found_missing) {
                self.ask_all();
            }
            if now.duration_since(self.searched) >= SEARCH {
                self.searched = now;
                self.search();
            }
        }
    }

    /// Waits until something is ready.
    fn wait(&self) -> Vec<Ready> {
        let group = &*self.group;
        let (ends, served) = {
            let parts = group.parts();
            let served = self.resource.served(&parts, self.is_first());
            (parts.mailboxes.clone(), served)
        };
        let watches: Vec<Watch> = locked(&group.watches).clone();
        let mut what = vec![Ready::Bell];
        let mut fds = vec![PollFd::new(&group.bell, PollFlags::IN)];
        let mut watch = |ready, fd, flags| {
            what.push(ready);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        for (index, own) in self.own.iter().enumerate() {
            if self.connections.len() < CONNECTIONS_MAX {
                watch(Ready::Listener(index), own.listener.as_fd(), PollFlags::IN);
            }
            watch(Ready::Mailbox(index), own.mailbox.as_fd(), PollFlags::IN);
        }
        for (index, connection) in self.connections.iter().enumerate() {
            watch(Ready::Connection(index), connection.socket.as_fd(), PollFlags::IN);
        }
        for served in &served {
            watch(Ready::Served(served.clone()), served.as_fd(), PollFlags::IN);
        }
        // A closed other end is reported without being requested.
        for (slot, end) in ends.iter().enumerate() {
            if let Some(end) = end {
                watch(Ready::Gone(slot, end.clone()), end.as_fd(), PollFlags::empty());
            }
        }
        for Watch { number, mailbox, .. } in &watches {
            watch(Ready::Watched(*number), mailbox.as_fd(), PollFlags::empty());
        }
        let timeout = match self.untidy {
            Some(since) if since.elapsed() < SEARCH => Some(RETRY),
            Some(_) => Some(SEARCH),
            None => (!self.connections.is_empty() || self.is_searching()).then_some(SEARCH),
        };
        match poll(&mut fds, timeout.map(timespec).as_ref()) {
            Ok(_) => {
                what.into_iter().zip(fds).filter(|(_, fd)| !fd.revents().is_empty()).map(|(r, _)| r).collect()
            }
            Err(Errno::INTR) => Vec::new(),
            Err(error) => {
                warn!("waiting for messages to {}: {error}", group.what);
                thread::sleep(RETRY);
                Vec::new()
            }
        }
    }

    /// Whether this process has the lowest of all slots, and so does the group's common work.
    fn is_first(&self) -> bool {
        let lowest = self.group.alive().trailing_zeros() as usize;
        self.own.iter().any(|own| own.slot == lowest)
    }

    fn accept(&mut self, index: usize) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        for _ in 0..MESSAGES_MAX {
            if self.connections.len() >= CONNECTIONS_MAX {
                break;
            }
            let connection = match accept_with(&self.own[index].listener, flags) {
                Ok(connection) => connection,
                // The pending connection is reported again immediately.
                Err(Errno::MFILE | Errno::NFILE) => {
                    self.lack_files();
                    thread::sleep(RETRY);
                    break;
                }
                Err(_) => break,
            };
            let connection = UnixStream::from(connection);
            if admits(&connection) {
                let slot = Some(self.own[index].slot);
                self.connections.push(Connection::new(connection.into(), slot));
            } else {
                debug!("root asked for {}", self.group.what);
            }
        }
    }

    fn lack_files(&mut self) {
        if !std::mem::replace(&mut self.is_short, true) {
            let what = &self.group.what;
            warn!(
                "this process may not open more files (`ulimit -n`), so it is not notified of new processes at {what}"
            );
        }
    }

    /// Receives messages from a connection.
    fn hear(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        connection.since = Instant::now();
        let said = match message::receive(&connection.socket, &mut self.room) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // It has ended without reading everything. This is reported once, before its earlier messages.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return,
            said => said,
        };
        let done = match said {
            Ok(Some(message)) => self.answer(index, message),
            Ok(None) => Ok(false),
            Err(error) => Err(error),
        };
        match done {
            Ok(true) => {}
            Ok(false) => self.connections[index].is_over = true,
            Err(error) => {
                if is_short(&error) {
                    self.lack_files();
                }
                debug!("a connection of {} is closed: {error}", self.group.what);
                self.connections[index].is_over = true;
            }
        }
    }

    /// Returns whether the connection stays open.
    fn answer(&mut self, index: usize, message: Message) -> io::Result<bool> {
        let Connection { socket: connection, slot, .. } = &self.connections[index];
        match message.bytes.first() {
            Some(&HELLO) => {
                // The process may have ended because this one was stopped. Its further messages still count.
                if let Err(error) = Members::send(connection, &self.group, &self.own) {
                    debug!("a process that asks for {} receives no answer: {error}", self.group.what);
                }
                Ok(true)
            }
            Some(&JOINED) => {
                let joined = Joined::read(message).ok_or(io::ErrorKind::InvalidData)?;
                self.take_in(joined);
                // As above. A process that receives this relies on being known here.
                let _ = message::send(&self.connections[index].socket, &[&[HEARD]], &[]);
                Ok(true)
            }
            Some(&OFFER) => {
                let Some(slot) = slot else { return Ok(false) };
                let Message { mut bytes, descriptors } = message;
                bytes.remove(0);
                let inbox = &self.group.inboxes[*slot];
                // The program may not read its mail for long, and offers are repeated.
                inbox.forget(|mail| mail.kind == OFFER && mail.bytes.get(..SENDER) == bytes.get(..SENDER));
                if descriptors.len() > 2 || !inbox.put(Mail { kind: OFFER, bytes, descriptors }) {
                    self.group.lose(*slot, 1);
                }
                Ok(false)
            }
            Some(&PACKET) => {
                // From a port on another address of this host, which has no mailbox of this group.
                let packet = &message.bytes[1..];
                if let (Some(own), Some(datagram)) = (self.group.first_own(), owner::datagram_of(packet)) {
                    owner::post(&self.group, own, datagram, packet);
                }
                Ok(false)
            }
            Some(&MEMBERS) => {
                self.learn(Members::read(message)?);
                Ok(false)
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Adds a new process.
    fn take_in(&mut self, joined: Joined) {
        let group = self.group.clone();
        let mut parts = group.parts();
        let mut alive = group.alive();
        for (slot, descriptor, mailbox) in joined.slots {
            if self.own.iter().any(|own| own.slot == slot) {
                continue;
            }
            debug!("another process has slot {slot} of {}", group.what);
            alive |= 1 << slot;
            if slot == parts.descriptors.len() {
                parts.descriptors.push(descriptor.into());
            }
            parts.mailboxes[slot] = Some(mailbox.into());
        }
        group.set_alive(alive);
        // This process was stopped while others joined. It must have all their descriptors before later ones.
        let lacks_some = parts.descriptors.len() < joined.count;
        self.resource.changed(&parts, alive, group.own.load(Ordering::Acquire));
        drop(parts);
        if lacks_some {
            self.search();
        }
    }

    /// Adds what another member knows.
    fn learn(&mut self, members: Members) {
        let mut parts = self.group.parts();
        let known = parts.descriptors.len();
        parts.descriptors.extend(members.descriptors.into_iter().skip(known).map(Into::into));
        for (slot, mailbox) in members.mailboxes {
            let is_own = self.own.iter().any(|own| own.slot == slot);
            if !is_own && parts.mailboxes[slot].is_none() {
                parts.mailboxes[slot] = Some(mailbox.into());
                self.group.set_alive(self.group.alive() | 1 << slot);
            }
        }
        self.resource.changed(&parts, self.group.alive(), self.group.own.load(Ordering::Acquire));
    }

    /// Whether information about a known slot is missing.
    fn is_searching(&self) -> bool {
        let parts = self.group.parts();
        let known =
            |slot: usize| parts.mailboxes[slot].is_some() || self.own.iter().any(|own| own.slot == slot);
        let alive = self.group.alive();
        self.is_short
            || parts.descriptors.len() < self.group.table.descriptors()
            || (0..SLOTS).any(|slot| alive >> slot & 1 == 1 && !known(slot))
    }

    /// Asks the processes about which information is missing, and others for what they know.
    fn search(&mut self) {
        if !self.is_searching() {
            return;
        }
        self.is_short = false;
        self.ask_all();
    }

    fn ask_all(&mut self) {
        for slot in 0..SLOTS {
            let is_there = self.ask(slot);
            // The end of a process with a known mailbox is reported, even without its name.
            if !is_there
                && self.group.parts().mailboxes[slot].is_none()
                && self.group.alive() >> slot & 1 == 1
                && !self.own.iter().any(|own| own.slot == slot)
            {
                self.lose(slot);
            }
        }
    }

    /// Asks the process of a slot for what it knows. Returns whether there may be one.
    fn ask(&mut self, slot: usize) -> bool {
        if self.own.iter().any(|own| own.slot == slot) || self.connections.len() >= CONNECTIONS_MAX {
            return true;
        }
        match self.group.name.connect(&slot.to_string()) {
            Ok(Found::Process(connection)) => {
                if message::send(&connection, &[&[HELLO]], &[]).is_ok() {
                    self.connections.push(Connection::new(connection, None));
                }
                true
            }
            Ok(Found::Nobody) => false,
            _ => true,
        }
    }

    fn has_mailbox(&self, slot: usize, mailbox: &Arc<OwnedFd>) -> bool {
        self.group.parts().mailboxes[slot].as_ref().is_some_and(|has| Arc::ptr_eq(has, mailbox))
    }

    /// The process of a slot has ended.
    fn lose(&mut self, slot: usize) {
        let mut parts = self.group.parts();
        parts.mailboxes[slot] = None;
        self.group.set_alive(self.group.alive() & !(1 << slot));
        self.untidy = Some(Instant::now());
        debug!("the process in slot {slot} of {} has ended", self.group.what);
    }

    fn tell_gone(&self, number: u64) {
        locked(&self.group.watches).retain(|watch| {
            let is_it = watch.number == number;
            if is_it {
                let bytes = number.to_ne_bytes().to_vec();
                // It must be delivered, so watches are exempt from the limit.
                self.group.inboxes[watch.slot].put_always(Mail {
                    kind: GONE,
                    bytes,
                    descriptors: Vec::new(),
                });
            }
            !is_it
        });
    }

    fn take_mail(&mut self, index: usize) {
        let own = &self.own[index];
        let inbox = &self.group.inboxes[own.slot];
        for _ in 0..MESSAGES_MAX {
            match message::receive(&own.mailbox, &mut self.room) {
                Ok(Some(Message { mut bytes, descriptors })) => {
                    let kind = bytes.remove(0);
                    if kind == NAMELESS {
                        self.untidy = Some(Instant::now());
                        self.is_found_missing = true;
                    } else if descriptors.len() > 2 {
                        debug!("mail with {} descriptors for {}", descriptors.len(), self.group.what);
                    } else if !inbox.put(Mail { kind, bytes, descriptors }) {
                        self.group.lose(own.slot, 1);
                    }
                }
                // This process has the other end too, so it is never closed.
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => debug!("mail for slot {} of {}: {error}", own.slot, self.group.what),
            }
        }
    }

    /// Gives up the requested slots.
    fn leave(&mut self) {
        let leaving = self.group.leaving.swap(0, Ordering::AcqRel);
        if leaving == 0 {
            return;
        }
        self.own.retain(|own| leaving >> own.slot & 1 == 0);
        locked(&self.group.watches).retain(|watch| leaving >> watch.slot & 1 == 0);
        self.group.own.fetch_and(!leaving, Ordering::AcqRel);
        let alive = self.group.alive() & !leaving;
        self.group.set_alive(alive);
        self.untidy = (alive != 0).then(Instant::now);
        *locked(&self.group.left) |= leaving;
        self.group.one_left.notify_all();
    }

    /// Cleans up after the slots known to have no process. The process with the lowest slot retires what ended
    /// processes have left, because all would do the same.
    fn tidy(&mut self) {
        let lock = match Lock::try_take(&self.group.name) {
            // A new process is changing the group, and may be about to take such a slot.
            Ok(Err(_)) | Err(_) => return,
            Ok(lock) => lock,
        };
        self.untidy = None;
        for own in &mut self.own {
            if let Ok(Found::Nobody) = self.group.name.connect(&own.slot.to_string())
                && let Err(error) = own.listener.bind_again()
            {
                warn!(
                    "the name of slot {} of {}, which another program has removed: {error}",
                    own.slot, self.group.what
                );
            }
        }
        let is_first = self.is_first();
        let count = self.group.parts().descriptors.len();
        for slot in 0..count {
            if self.group.alive() >> slot & 1 == 1 {
                continue;
            }
            // A new process in the slot may have notified this one in vain, because this one was stopped.
            if self.ask(slot) || !is_first {
                continue;
            }
            let descriptor = self.group.parts().descriptors[slot].clone();
            self.resource.retire(descriptor.as_fd());
            self.group.table.clear(slot);
        }
        if is_first {
            let group = self.group.clone();
            self.resource.changed(&group.parts(), group.alive(), group.own.load(Ordering::Acquire));
        }
        drop(lock);
    }
}
