//! Names by which processes of one user find each other, and the lock of a group.
//!
//! A name is a Unix socket in a directory that only the user can access ([`private_directory`]). It belongs to one
//! network namespace, like the shared addresses. A killed process leaves a socket behind that refuses connections, and
//! the next process removes it.
//!
//! Abstract sockets would leave nothing behind. But any user can take their names and fill their backlogs, and can send
//! a connection with descriptors that delay the process which closes them, before the sender is known.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, flock, openat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use crate::credentials::Credentials;
use crate::private_directory;
use crate::sealed::file_size_max;
use crate::user_ids::UserIds;

/// The beginning of names, with the version of the names and of the protocol between their processes: processes with
/// different versions do not find each other. It is followed by the network namespace.
const START: &str = "slots-2-";
/// New processes that may be pending at a name.
const BACKLOG: i32 = 64;
const PAUSE: Duration = Duration::from_millis(1);
/// The most entries of the directory that are checked for remains of killed processes.
const CLEARED_MAX: usize = 4096;

/// A group, by its name.
#[derive(Clone, Debug)]
pub(super) struct Name {
    /// If there is none, no other process finds the group.
    directory: Option<Arc<OwnedFd>>,
    prefix: String,
}

/// The owner of a name.
#[derive(Debug)]
pub(super) enum Found {
    Nobody,
    /// A process, connected.
    Process(OwnedFd),
    /// A process that does not accept connections now, because it is stopped.
    Busy,
}

/// A name of this process, to which others connect. It is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    file: Option<(Arc<OwnedFd>, String)>,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((directory, file)) = &self.file {
            // Before the socket is closed: while it accepts connections, no other process takes the name.
            let _ = unlinkat(directory, file, AtFlags::empty());
        }
    }
}

impl Listener {
    /// Creates the removed file again. Needs the [lock](Lock), and no process may have the name.
    pub(super) fn bind_again(&mut self) -> io::Result<()> {
        if let Some((directory, file)) = &self.file {
            self.socket = bound(directory, file)?;
        }
        Ok(())
    }
}

fn bound(directory: &OwnedFd, file: &str) -> io::Result<OwnedFd> {
    let socket = socket()?;
    bind(&socket, &address(directory, file)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

impl Name {
    /// The name of the group `what` in this thread's network namespace.
    ///
    /// # Errors
    /// If no process, or any process, could find the group, with the reason. A process that needs no others can use
    /// [`Name::alone`].
    pub(super) fn new(what: &str) -> io::Result<Name> {
        let user = rustix::process::geteuid().as_raw();
        if UserIds::read().is_anybody(user) {
            return Err(io::Error::other(format!(
                "user {user} stands for every user whom this user namespace does not know, and whose a process is can't be told"
            )));
        }
        let path = private_directory::of_user();
        let directory = private_directory::make(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
        // Programs that clean temporary directories skip those with this lock (tmpfiles.d(5)). A failure is harmless.
        let _ = flock(&directory, FlockOperation::NonBlockingLockShared);
        let namespace = std::fs::metadata("/proc/thread-self/ns/net")
            .map_err(|error| io::Error::new(error.kind(), format!("/proc/thread-self/ns/net: {error}")))?;
        let what = what.replace('%', "%25").replace('/', "%2F");
        let prefix = format!("{START}{}-{what}", namespace.ino());
        Ok(Name { directory: Some(Arc::new(directory)), prefix })
    }

    /// A group that no other process finds.
    pub(super) fn alone() -> Name {
        Name { directory: None, prefix: String::new() }
    }

    /// Takes the name of `part`, or returns `None` if it is in use. Needs the [lock](Lock).
    pub(super) fn bind(&self, part: &str) -> io::Result<Option<Listener>> {
        let Some(directory) = &self.directory else {
            return Ok(Some(Listener { socket: eventfd(0, EventfdFlags::CLOEXEC)?, file: None }));
        };
        match self.connect(part)? {
            Found::Nobody => {}
            Found::Process(_) | Found::Busy => return Ok(None),
        }
        let file = self.file(part);
        match unlinkat(directory, &file, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let socket = bound(directory, &file)?;
        Ok(Some(Listener { socket, file: Some((directory.clone(), file)) }))
    }

    /// Removes files that killed processes have left for these parts. Needs the [lock](Lock), and no process may have
    /// any of them.
    pub(super) fn clear(&self, parts: impl Iterator<Item = String>) {
        let Some(directory) = &self.directory else { return };
        for part in parts {
            // It refuses connections, and so does a file that can't be removed.
            let _ = unlinkat(directory, self.file(&part), AtFlags::empty());
        }
    }

    /// Removes files that killed processes have left for other network namespaces, which may never be seen again.
    pub(super) fn clear_namespaces(&self) {
        let Some(directory) = &self.directory else { return };
        let Ok(entries) = Dir::read_from(directory) else { return };
        let namespace = |file: &str| {
            file.strip_prefix(START).and_then(|rest| rest.split('-').next()?.parse::<u64>().ok())
        };
        let ours = namespace(&self.prefix);
        for entry in entries.take(CLEARED_MAX).map_while(Result::ok) {
            let Ok(file) = entry.file_name().to_str() else { continue };
            if namespace(file).is_none_or(|namespace| Some(namespace) == ours) {
                continue;
            }
            let Some((prefix, part)) = file.rsplit_once('-') else { continue };
            let name = Name { directory: self.directory.clone(), prefix: prefix.to_owned() };
            // The lock ensures that no process is taking these names.
            if part.parse::<usize>().is_ok()
                && let Ok(Ok(_lock)) = Lock::try_take(&name)
                && let Ok(Found::Nobody) = name.connect(part)
            {
                name.clear(std::iter::once(part.to_owned()));
            }
        }
    }

    /// Connects to the owner of the name of `part`.
    pub(super) fn connect(&self, part: &str) -> io::Result<Found> {
        let Some(directory) = &self.directory else { return Ok(Found::Nobody) };
        let socket = socket()?;
        match connect(&socket, &address(directory, &self.file(part))?) {
            // Only the user could have created it, but a file system may report this for another user's file.
            Ok(()) if Credentials::of_peer(&socket)?.uid != rustix::process::geteuid().as_raw() => {
                Err(io::Error::other(format!("another user's process has the name of slot {part}")))
            }
            Ok(()) => Ok(Found::Process(socket)),
            Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(Found::Nobody),
            Err(Errno::AGAIN) => Ok(Found::Busy),
            Err(error) => Err(error.into()),
        }
    }

    fn file(&self, part: &str) -> String {
        format!("{}-{part}", self.prefix)
    }
}

/// Whether the connected process is of this user: root can access the directory too.
pub(super) fn admits(connection: &UnixStream) -> bool {
    let user = rustix::process::geteuid().as_raw();
    Credentials::of_peer(connection).is_ok_and(|peer| peer.uid == user)
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The address of a file in the directory that was opened and checked, even if another one has its path now. It has at
/// most 108 bytes, and names have those that descriptor, namespace and slot leave.
fn address(directory: &OwnedFd, file: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{file}", directory.as_raw_fd()))?)
}

/// The right to change the shared resource. Its file exists while a process has the lock.
#[derive(Debug)]
pub(super) struct Lock(#[expect(dead_code, reason = "held until it is dropped")] Option<Held>);

#[derive(Debug)]
struct Held {
    directory: Arc<OwnedFd>,
    name: String,
    #[expect(dead_code, reason = "locked until it is closed")]
    file: File,
}

impl Drop for Held {
    fn drop(&mut self) {
        // A process that waits for this file finds that it was removed, and creates a new one.
        let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
    }
}

impl Lock {
    /// `Err` contains the holder, if known.
    pub(super) fn try_take(name: &Name) -> io::Result<Result<Lock, String>> {
        let Some(directory) = &name.directory else { return Ok(Ok(Lock(None))) };
        let path = name.file("lock");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(directory, &path, flags, Mode::RUSR | Mode::WUSR)?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut holder = Vec::new();
                file.take(16).read_to_end(&mut holder)?;
                return Ok(Err(String::from_utf8_lossy(&holder).into_owned()));
            }
            Err(error) => return Err(error.into()),
        }
        match statat(directory, &path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if there.st_ino == file.metadata()?.ino() => {}
            // The holder has ended since the file was opened.
            Ok(_) | Err(Errno::NOENT) => return Ok(Err(String::new())),
            Err(error) => return Err(error.into()),
        }
        // Only for messages, so a failure for lack of room is harmless.
        let holder = format!("pid {}", std::process::id());
        if holder.len() as u64 <= file_size_max() {
            let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
        }
        Ok(Ok(Lock(Some(Held { directory: directory.clone(), name: path, file }))))
    }

    /// Waits for the lock, at most for `patience`. `Err` contains the holder.
    pub(super) fn take(name: &Name, patience: Duration) -> io::Result<Result<Lock, String>> {
        let deadline = Instant::now() + patience;
        loop {
            match Lock::try_take(name)? {
                Ok(lock) => return Ok(Ok(lock)),
                Err(holder) if Instant::now() >= deadline => {
                    return Ok(Err(if holder.is_empty() { "another process".to_owned() } else { holder }));
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(what: &str) -> Name {
        Name::new(&format!("{}/{what}", std::process::id())).unwrap()
    }

    fn is_there(name: &Name, part: &str) -> bool {
        private_directory::of_user().join(name.file(part)).exists()
    }

    #[test]
    fn files_left_for_other_namespaces_are_removed() {
        let ours = name("cleared");
        let of = |namespace: &str| Name {
            directory: ours.directory.clone(),
            prefix: format!("{START}{namespace}-{}-cleared", std::process::id()),
        };
        let (gone, alive) = (of("1"), of("2"));
        // Without a process, as after a kill.
        let path = |name: &Name, part: &str| private_directory::of_user().join(name.file(part));
        let left = || drop(std::os::unix::net::UnixDatagram::bind(path(&gone, "5")).unwrap());
        left();
        let _listener = alive.bind("5").unwrap().expect("it is free");
        let mine = ours.bind("5").unwrap().expect("it is free");
        let locked = Lock::try_take(&gone).unwrap().expect("it is free");
        ours.clear_namespaces();
        assert!(is_there(&gone, "5"), "somebody may be about to have it");
        drop(locked);
        ours.clear_namespaces();
        assert_eq!([&gone, &alive, &ours].map(|name| is_there(name, "5")), [false, true, true]);
        assert!(!is_there(&gone, "lock") && !is_there(&alive, "lock"));
        drop(mine);
    }

    #[test]
    fn a_name_belongs_to_one_process_until_it_ends() {
        let name = name("one");
        assert!(matches!(name.connect("3").unwrap(), Found::Nobody));
        let first = name.bind("3").unwrap();
        assert!(first.is_some() && is_there(&name, "3"));
        assert!(name.bind("3").unwrap().is_none());
        assert!(name.bind("4").unwrap().is_some());
        assert!(matches!(name.connect("3").unwrap(), Found::Process(_)));
        drop(first);
        assert!(!is_there(&name, "3"));
        assert!(matches!(name.connect("3").unwrap(), Found::Nobody));
        // A killed process removes nothing.
        let mut killed = name.bind("3").unwrap().unwrap();
        killed.file = None;
        drop(killed);
        assert!(is_there(&name, "3") && matches!(name.connect("3").unwrap(), Found::Nobody));
        let mut again = name.bind("3").unwrap().unwrap();
        again.file = None;
        drop(again);
        name.clear(["2", "3"].map(str::to_owned).into_iter());
        assert!(!is_there(&name, "3"));
    }

    #[test]
    fn names_are_distinct() {
        let [one, other] = ["a/b", "a%2Fb"].map(name);
        let _first = one.bind("0").unwrap();
        assert!(matches!(other.connect("0").unwrap(), Found::Nobody));
        assert!(other.bind("0").unwrap().is_some());
    }

    #[test]
    fn a_name_whose_process_does_not_accept_is_busy() {
        let name = name("busy");
        let _held = name.bind("0").unwrap();
        let _waiting: Vec<_> = (0..=BACKLOG).map(|_| name.connect("0").unwrap()).collect();
        assert!(matches!(name.connect("0").unwrap(), Found::Busy));
        assert!(name.bind("0").unwrap().is_none());
    }

    #[test]
    fn a_group_alone_is_not_found() {
        let name = Name::alone();
        let listener = name.bind("0").unwrap().unwrap();
        assert!(matches!(name.connect("0").unwrap(), Found::Nobody));
        let mut ready = [rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut ready, Some(&now)).unwrap(), 0);
        assert!(Lock::try_take(&name).unwrap().is_ok() && Lock::try_take(&name).unwrap().is_ok());
    }

    #[test]
    fn the_lock_has_one_holder() {
        let name = name("lock");
        let lock = Lock::try_take(&name).unwrap().expect("it is free");
        let refused = Lock::take(&name, Duration::from_millis(5)).unwrap().unwrap_err();
        assert_eq!(refused, format!("pid {}", std::process::id()));
        drop(lock);
        assert!(!is_there(&name, "lock"));
        assert!(Lock::take(&name, Duration::ZERO).unwrap().is_ok());
    }

    #[test]
    fn one_thread_has_the_lock_at_a_time() {
        let name = name("turns");
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = Lock::take(&name, Duration::from_secs(20)).unwrap().expect("in its turn");
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
    }
}
