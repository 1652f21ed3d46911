//! Contexts that other processes can look at: each has a Unix socket in a directory of its user and
//! writes its [`Metrics`](crate::Metrics) to whoever connects.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ferroce_driver::Nanos;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::geteuid;

use crate::{Error, Metrics};

/// How often the socket is looked at.
const INTERVAL: Duration = Duration::from_millis(5);
/// How often a context that sleeps is woken to look at it: one that nothing else happens to has no
/// business waking 200 times in a second, and readers wait for a second.
const IDLE_INTERVAL: Duration = Duration::from_millis(100);
/// Readers at a time; more wait in the socket's backlog.
const MAX_READERS: usize = 4;
/// How long a reader may leave its text lying.
const PATIENCE: Duration = Duration::from_secs(2);

/// The socket of a context. It is removed on drop.
pub(crate) struct Exporter {
    listener: UnixListener,
    path: PathBuf,
    /// Which context of this process it is.
    number: u32,
    readers: Vec<Reader>,
    next: Nanos,
}

impl Exporter {
    /// Opens the socket `PID.NUMBER.DEVICE`; those that dead processes left behind are removed.
    pub(crate) fn open(device: &str) -> Result<Exporter, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let directory = own_directory();
        make_private(&directory).map_err(|source| Error::export(&directory, source))?;
        remove_abandoned(&directory);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("{}.{number}.{device}", std::process::id()));
        // One that is there already is of a dead process of the same number.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(|source| Error::export(&path, source))?;
        let exporter =
            Exporter { listener, path, number, readers: Vec::with_capacity(MAX_READERS), next: Nanos::ZERO };
        exporter.listener.set_nonblocking(true).map_err(|source| Error::export(&exporter.path, source))?;
        Ok(exporter)
    }

    /// Whether it is time to look at the socket again.
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        now >= self.next
    }

    /// When it has to be looked at even if nothing else happens: soon while somebody reads.
    pub(crate) fn next_look(&self) -> Nanos {
        if self.readers.is_empty() { self.next + (IDLE_INTERVAL - INTERVAL) } else { self.next }
    }

    /// Lets new readers in and writes to those that are there. Never blocks; allocates only for a
    /// new reader.
    pub(crate) fn serve(&mut self, now: Nanos, metrics: impl Fn() -> Metrics) {
        self.next = now + INTERVAL;
        while self.readers.len() < MAX_READERS
            && let Ok((stream, _)) = self.listener.accept()
            && stream.set_nonblocking(true).is_ok()
        {
            let metrics = metrics().with_label("pid", std::process::id()).with_label("context", self.number);
            let text = metrics.to_string().into_bytes();
            self.readers.push(Reader { stream, text, written: 0, deadline: now + PATIENCE });
        }
        self.readers.retain_mut(|reader| reader.write() && now < reader.deadline);
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

struct Reader {
    stream: UnixStream,
    text: Vec<u8>,
    written: usize,
    deadline: Nanos,
}

impl Reader {
    /// Writes what the socket takes. Returns whether there is more to write.
    fn write(&mut self) -> bool {
        while self.written < self.text.len() {
            match self.stream.write(&self.text[self.written..]) {
                Ok(0) => return false,
                Ok(written) => self.written += written,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        false
    }
}

/// Connects without waiting: a process that answers nobody any more has a full backlog.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(socket)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&fd, &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The contexts on this machine that show themselves, as far as this process may see them.
#[derive(Debug, Default)]
pub struct Exported {
    /// Sockets, named `PID.NUMBER.DEVICE`. Whoever connects gets a context's
    /// [`Metrics`](crate::Metrics) as text, then the end. One that refuses is of a process that has
    /// ended.
    pub sockets: Vec<PathBuf>,
    /// Directories that may have more, of other users.
    pub forbidden: Vec<PathBuf>,
}

impl Exported {
    /// Looks for them. What dead processes of this user left behind is removed.
    ///
    /// # Errors
    /// Those of reading a directory, but for a lack of rights.
    pub fn find() -> io::Result<Exported> {
        let own = own_directory();
        remove_abandoned(&own);
        let mut directories = vec![own, PathBuf::from(OF_ROOT)];
        directories.extend(list(Path::new(OF_SESSIONS))?.into_iter().map(|of_user| of_user.join("ferroce")));
        let others = list(Path::new(OF_OTHERS))?;
        directories.extend(others.into_iter().filter(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(OTHERS_PREFIX))
        }));
        directories.sort();
        directories.dedup();
        let mut exported = Exported::default();
        for directory in directories {
            match list(&directory) {
                Ok(entries) => {
                    exported.sockets.extend(entries.into_iter().filter(|path| pid_of(path).is_some()));
                }
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    // In a directory that is closed itself, nobody knows what there is.
                    if directory.symlink_metadata().is_ok() {
                        exported.forbidden.push(directory);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(exported)
    }

    /// Asks all of them, for a second in all. Those that have ended meanwhile are left out.
    pub fn read(&self) -> Vec<(&Path, io::Result<Metrics>)> {
        let deadline = Instant::now() + LONGEST_ANSWER;
        let connected: Vec<_> = self.sockets.iter().map(|path| (path.as_path(), connect(path))).collect();
        let read = |(path, stream): (_, io::Result<UnixStream>)| match stream {
            Err(error) if [ErrorKind::ConnectionRefused, ErrorKind::NotFound].contains(&error.kind()) => None,
            stream => Some((path, stream.and_then(|stream| read_until(stream, deadline)))),
        };
        connected.into_iter().filter_map(read).collect()
    }
}

/// How long processes have to answer.
const LONGEST_ANSWER: Duration = Duration::from_secs(1);
/// Bytes of a text; a hundred times what there is.
const LARGEST_TEXT: usize = 1 << 20;

fn read_until(mut stream: UnixStream, deadline: Instant) -> io::Result<Metrics> {
    let mut text = Vec::new();
    let mut piece = [0; 1 << 14];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                return Err(io::Error::new(
                    ErrorKind::TimedOut,
                    "does not answer; does it poll its context?",
                ));
            }
            Err(error) => return Err(error),
        }
        // What came in time may be read late, but not for ever.
        if text.len() > LARGEST_TEXT || Instant::now() > deadline + LONGEST_ANSWER {
            return Err(io::Error::other("sends more, or more slowly, than a context does"));
        }
    }
    let text = String::from_utf8(text).map_err(io::Error::other)?;
    Metrics::parse(&text).map_err(io::Error::other)
}

const OF_ROOT: &str = "/run/ferroce";
/// Has a folder for each user who is logged in; `XDG_RUNTIME_DIR` points there.
const OF_SESSIONS: &str = "/run/user";
const OF_OTHERS: &str = "/tmp";
const OTHERS_PREFIX: &str = "ferroce-";

/// Where this user's sockets are.
fn own_directory() -> PathBuf {
    let uid = geteuid();
    if uid.is_root() {
        return OF_ROOT.into();
    }
    let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    match session {
        Some(session) => session.join("ferroce"),
        None => Path::new(OF_OTHERS).join(format!("{OTHERS_PREFIX}{uid}")),
    }
}

/// Makes a directory that nobody else can look into. One that is there already must be such.
fn make_private(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    check_private(directory, geteuid().as_raw())
}

/// Where everybody may write, somebody else may have been there before.
fn check_private(directory: &Path, uid: u32) -> io::Result<()> {
    let found = directory.symlink_metadata()?;
    let mode = found.mode() & 0o7777;
    if found.is_dir() && found.uid() == uid && mode & 0o077 == 0 {
        return Ok(());
    }
    let owner = found.uid();
    Err(io::Error::other(format!(
        "must be a directory of uid {uid} with mode 0700; it is of uid {owner} with mode {mode:04o}; remove it"
    )))
}

/// Removes the sockets of dead processes. One that still takes connections is of a live process,
/// which another PID namespace can hide.
fn remove_abandoned(directory: &Path) {
    if check_private(directory, geteuid().as_raw()).is_err() {
        return;
    }
    for path in list(directory).unwrap_or_default() {
        let dead = pid_of(&path).is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
        if dead && connect(&path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            let _ = fs::remove_file(&path);
        }
    }
}

fn pid_of(socket: &Path) -> Option<u32> {
    socket.file_name()?.to_str()?.split('.').next()?.parse().ok()
}

/// What is in a directory, in order; nothing if it does not exist.
fn list(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(Vec::new());
        }
        entries => entries?,
    };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use ferroce_driver::Stats;

    use super::*;

    #[test]
    fn a_reader_that_does_not_read_is_let_go_and_holds_nobody_up() {
        // More than a socket takes.
        let metrics = || {
            let mut metrics = Metrics::new("sim", &"x".repeat(1 << 20));
            metrics.push_driver(&Stats::default());
            metrics
        };
        let mut exporter = Exporter::open("slow").unwrap();
        let mut slow: Vec<_> =
            (0..MAX_READERS).map(|_| UnixStream::connect(&exporter.path).unwrap()).collect();
        let start = Nanos(1);
        exporter.serve(start, metrics);
        assert_eq!(exporter.readers.len(), MAX_READERS);
        assert!(!exporter.is_due(start) && exporter.is_due(start + INTERVAL));

        let mut late = UnixStream::connect(&exporter.path).unwrap();
        exporter.serve(start + PATIENCE, metrics);
        assert!(exporter.readers.is_empty());
        exporter.serve(start + PATIENCE + INTERVAL, metrics);
        assert_eq!(exporter.readers.len(), 1);

        // One that reads gets all of it, piece by piece; what the slow ones got ends early.
        let whole = metrics().with_label("pid", std::process::id()).with_label("context", exporter.number);
        let whole = whole.to_string();
        late.set_nonblocking(true).unwrap();
        let mut text = Vec::new();
        while !exporter.readers.is_empty() {
            let _ = late.read_to_end(&mut text);
            exporter.serve(start + PATIENCE + INTERVAL, metrics);
        }
        late.read_to_end(&mut text).unwrap();
        assert_eq!(text.len(), whole.len());
        let mut piece = Vec::new();
        slow[0].read_to_end(&mut piece).unwrap();
        assert!(piece.len() < whole.len());
    }

    #[test]
    fn a_directory_that_others_can_look_into_or_made_is_refused() {
        let directory = std::env::temp_dir().join(format!("ferroce-exporter-{}", std::process::id()));
        make_private(&directory).unwrap();
        make_private(&directory).unwrap();
        for mode in [0o755, 0o701] {
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
            let refused = make_private(&directory).unwrap_err().to_string();
            assert!(refused.contains(&format!("{mode:04o}")) && refused.contains("0700"), "{refused}");
        }
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        let own = geteuid().as_raw();
        let refused = check_private(&directory, own + 1).unwrap_err().to_string();
        assert!(refused.contains(&format!("of uid {} with mode 0700; it is of uid {own}", own + 1)), "{refused}");
        fs::remove_dir(&directory).unwrap();
        symlink("/", &directory).unwrap();
        assert!(make_private(&directory).is_err(), "a link to somewhere else");
        fs::remove_file(&directory).unwrap();
    }
}
