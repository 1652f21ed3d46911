//! Names by which processes of one user find each other: abstract Unix sockets. A name is of one network namespace, as the
//! addresses are that are shared, and ends with its process.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use crate::credentials::Credentials;
use crate::holder::processes_with;

/// Of the names and of what is said between their processes. Processes of different versions do not find each other.
const VERSION: u32 = 1;
/// Newcomers that wait at a name.
const BACKLOG: i32 = 64;
/// A user who is not known.
const NOBODY: u32 = 65_534;
const PAUSE: Duration = Duration::from_millis(1);

/// What processes share, by name.
#[derive(Clone, Debug)]
pub(super) struct Name {
    prefix: String,
    user: u32,
}

/// Who has a name.
#[derive(Debug)]
pub(super) enum Found {
    Nobody,
    /// A process of this user, connected.
    Process(OwnedFd),
    /// One that does not take connections now: it takes none in its turn, for it is stopped.
    Busy,
    /// A process of somebody else.
    Stranger(Credentials),
}

impl Name {
    pub(super) fn new(what: &str) -> Name {
        let user = rustix::process::geteuid().as_raw();
        Name { prefix: format!("ferroce/{VERSION}/{user}/{what}"), user }
    }

    /// Takes the name of `part`, or `None` if somebody has it.
    pub(super) fn bind(&self, part: &str) -> io::Result<Option<OwnedFd>> {
        let socket = self.socket()?;
        match bind(&socket, &self.address(part)?) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        listen(&socket, BACKLOG)?;
        Ok(Some(socket))
    }

    /// As [`connect`](Name::connect), but whose a name is that takes no connections is looked for in all of `/proc`.
    pub(super) fn look_up(&self, part: &str) -> io::Result<Found> {
        Ok(match self.connect(part)? {
            Found::Busy => self.busy(part),
            found => found,
        })
    }

    /// Connects to who has the name of `part`.
    pub(super) fn connect(&self, part: &str) -> io::Result<Found> {
        let socket = self.socket()?;
        match connect(&socket, &self.address(part)?) {
            Ok(()) => {}
            Err(Errno::CONNREFUSED) => return Ok(Found::Nobody),
            Err(Errno::AGAIN) => return Ok(Found::Busy),
            Err(error) => return Err(error.into()),
        }
        let socket = UnixStream::from(socket);
        let credentials = Credentials::of_peer(&socket)?;
        if credentials.uid == self.user {
            Ok(Found::Process(socket.into()))
        } else {
            Ok(Found::Stranger(credentials))
        }
    }

    /// The kernel does not tell whose a name is that takes no connections, and anybody can have such a one.
    fn busy(&self, part: &str) -> Found {
        let name = format!("@{}/{part}", self.prefix);
        let Some(inode) = listening_at(&name) else { return Found::Busy };
        match processes_with([inode]).get(&inode).map(|process| process.pid) {
            Some(pid) => match fs::metadata(format!("/proc/{pid}")).map(|process| process.uid()) {
                Ok(uid) if uid != self.user => Found::Stranger(Credentials { pid, uid }),
                _ => Found::Busy,
            },
            // What processes of this user have open is seen.
            None => Found::Stranger(Credentials { pid: 0, uid: NOBODY }),
        }
    }

    /// Whether who has connected is of this user.
    pub(super) fn admits(&self, connection: &UnixStream) -> bool {
        Credentials::of_peer(connection).is_ok_and(|peer| peer.uid == self.user)
    }

    fn socket(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
    }

    fn address(&self, part: &str) -> io::Result<SocketAddrUnix> {
        Ok(SocketAddrUnix::new_abstract_name(format!("{}/{part}", self.prefix).as_bytes())?)
    }
}

/// The inode of the socket that listens at an abstract name, in this network namespace.
fn listening_at(name: &str) -> Option<u32> {
    /// `__SO_ACCEPTCON`. Those that were accepted have the same name.
    const LISTENS: u32 = 1 << 16;
    let sockets = fs::read_to_string("/proc/thread-self/net/unix").ok()?;
    sockets.lines().find_map(|line| {
        // Number, references, protocol, flags, type, state, inode, name.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[_, _, _, flags, _, _, inode, listening] = &fields[..] else { return None };
        let listens = u32::from_str_radix(flags, 16).ok()? & LISTENS != 0;
        (listens && listening == name).then(|| inode.parse().ok())?
    })
}

/// Whoever has it may change what the processes share.
#[derive(Debug)]
pub(super) struct Lock(#[expect(dead_code, reason = "held until it is dropped")] OwnedFd);

impl Lock {
    const PART: &str = "lock";

    /// `None` while somebody else has it.
    pub(super) fn try_take(name: &Name) -> io::Result<Option<Lock>> {
        Ok(name.bind(Lock::PART)?.map(Lock))
    }

    /// Waits for it, for `patience` at most. `Err` says who has it then.
    pub(super) fn take(name: &Name, patience: Duration) -> io::Result<Result<Lock, String>> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(lock) = Lock::try_take(name)? {
                return Ok(Ok(lock));
            }
            if Instant::now() >= deadline {
                let holder = match name.connect(Lock::PART)? {
                    Found::Stranger(credentials) => format!("user {}", credentials.uid),
                    Found::Process(socket) => {
                        format!("pid {}", Credentials::of_peer(&UnixStream::from(socket))?.pid)
                    }
                    Found::Nobody | Found::Busy => "another process".to_owned(),
                };
                return Ok(Err(holder));
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(what: &str) -> Name {
        Name::new(&format!("{}/{what}", std::process::id()))
    }

    #[test]
    fn a_name_is_one_processs_until_it_ends() {
        let name = name("one");
        assert!(matches!(name.connect("3").unwrap(), Found::Nobody));
        let first = name.bind("3").unwrap();
        assert!(first.is_some());
        assert!(name.bind("3").unwrap().is_none());
        assert!(name.bind("4").unwrap().is_some());
        assert!(matches!(name.connect("3").unwrap(), Found::Process(_)));
        drop(first);
        assert!(matches!(name.connect("3").unwrap(), Found::Nobody));
        assert!(name.bind("3").unwrap().is_some());
    }

    #[test]
    fn a_name_whose_process_takes_nobody_is_busy() {
        let name = name("busy");
        let _held = name.bind("0").unwrap();
        let _waiting: Vec<_> = (0..=BACKLOG).map(|_| name.connect("0").unwrap()).collect();
        assert!(matches!(name.connect("0").unwrap(), Found::Busy));
    }

    #[test]
    fn one_has_the_lock() {
        let name = name("lock");
        let lock = Lock::try_take(&name).unwrap().expect("it is free");
        assert!(Lock::try_take(&name).unwrap().is_none());
        let refused = Lock::take(&name, Duration::from_millis(5)).unwrap().unwrap_err();
        assert_eq!(refused, format!("pid {}", std::process::id()));
        drop(lock);
        assert!(Lock::take(&name, Duration::ZERO).unwrap().is_ok());
    }

    #[test]
    fn who_listens_is_found_by_name() {
        let name = name("found");
        let full = format!("@{}/5", name.prefix);
        assert_eq!(listening_at(&full), None);
        let listener = name.bind("5").unwrap().expect("it is free");
        let inode = rustix::fs::fstat(&listener).unwrap().st_ino;
        assert_eq!(listening_at(&full), Some(inode as u32));
        let holder = processes_with([inode as u32]).remove(&(inode as u32)).unwrap();
        assert_eq!(holder.pid, std::process::id());
    }
}
