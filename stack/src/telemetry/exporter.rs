//! Exported contexts: each has a Unix socket in a directory of its user and writes its [`Metrics`](crate::Metrics) to every
//! reader that connects.

mod directory;
mod exported;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use directory::Directory;
pub use exported::Exported;
use ferroce_driver::Nanos;
use ferroce_driver::private_directory::{self, OF_OTHERS, OF_ROOT, OTHERS_PREFIX};

use crate::telemetry::metrics::Metrics;
use crate::verbs::Error;

/// How often the socket is checked.
const INTERVAL: Duration = Duration::from_millis(5);
/// How often a sleeping context is woken to check it: an idle context should not wake 200 times per second, and readers wait for
/// a second.
const IDLE_INTERVAL: Duration = Duration::from_millis(100);
/// Concurrent readers; more wait in the socket's backlog.
const MAX_READERS: usize = 4;
/// Numbers to try, in case another PID namespace has a process with the same PID.
const MAX_TAKEN: u32 = 1024;
/// How long a reader may leave its text unread.
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
    /// Opens the socket `PID.NUMBER.DEVICE`; sockets of dead processes are removed.
    pub(crate) fn open(device: &str) -> Result<Exporter, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let directory = own_directory();
        let opened = Directory::make(&directory).map_err(|source| Error::export(&directory, source))?;
        opened.remove_abandoned();
        let bind = |_| {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("{}.{number}.{device}", std::process::id());
            // An existing socket is of another process with the same PID: a dead one, or one in another PID namespace.
            opened.remove_dead(name.as_ref());
            let path = directory.join(name);
            match UnixListener::bind(&path) {
                Err(error) if error.kind() == ErrorKind::AddrInUse => None,
                bound => Some((number, bound.map_err(|source| Error::export(&path, source)), path)),
            }
        };
        let (number, listener, path) = (0..MAX_TAKEN).find_map(bind).ok_or_else(|| {
            let taken = format!("{MAX_TAKEN} numbers in a row are those of another process's contexts");
            Error::export(&directory, io::Error::other(taken))
        })?;
        let listener = listener?;
        let exporter =
            Exporter { listener, path, number, readers: Vec::with_capacity(MAX_READERS), next: Nanos::ZERO };
        exporter.listener.set_nonblocking(true).map_err(|source| Error::export(&exporter.path, source))?;
        Ok(exporter)
    }

    /// Whether it is time to check the socket again.
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        now >= self.next
    }

    /// When it must be checked even if nothing else happens: soon if there is a reader.
    pub(crate) fn next_look(&self) -> Nanos {
        if self.readers.is_empty() { self.next + (IDLE_INTERVAL - INTERVAL) } else { self.next }
    }

    /// Accepts new readers and writes to the present ones. Does not block; allocates only for a new reader.
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
    /// Writes as much as the socket accepts. Returns whether there is more to write.
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

/// Has a directory for each logged-in user; `XDG_RUNTIME_DIR` points there.
const OF_SESSIONS: &str = "/run/user";

/// The directory of this user's sockets.
fn own_directory() -> PathBuf {
    let of_user = private_directory::of_user();
    let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    match session {
        Some(session) if of_user != Path::new(OF_ROOT) => session.join("ferroce"),
        _ => of_user,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use ferroce_driver::Stats;
    use rustix::process::geteuid;

    use super::*;

    #[test]
    fn a_reader_that_does_not_read_is_disconnected_and_delays_nobody() {
        // More than a socket accepts.
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

        // A reader that reads gets the whole text, in parts; slow readers get only the beginning.
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

    /// Another PID namespace can have a process with the same PID, and share the directory.
    #[test]
    fn a_socket_of_a_live_process_stays() {
        const BUSY: u32 = 100;
        let directory = own_directory();
        Directory::make(&directory).unwrap();
        let path = |number| directory.join(format!("{}.{number}.shared", std::process::id()));
        let live: Vec<_> = (0..BUSY).map(|number| UnixListener::bind(path(number)).unwrap()).collect();
        let exporter = Exporter::open("shared").unwrap();
        assert!(exporter.number >= BUSY, "{}", exporter.number);
        let refused = (0..BUSY).find(|number| UnixStream::connect(path(*number)).is_err());
        assert_eq!(refused, None, "another's socket was taken away");
        drop(live);
        // These are dead now, and do not interfere.
        let number = exporter.number + 1;
        drop(UnixListener::bind(path(number)).unwrap());
        let next = Exporter::open("shared").unwrap();
        UnixStream::connect(&next.path).unwrap();
        (0..BUSY).for_each(|number| fs::remove_file(path(number)).unwrap());
        let _ = fs::remove_file(path(number));
    }

    #[test]
    fn an_accessible_or_foreign_directory_is_refused() {
        let directory = std::env::temp_dir().join(format!("ferroce-exporter-{}", std::process::id()));
        Directory::make(&directory).unwrap();
        Directory::make(&directory).unwrap();
        for mode in [0o755, 0o701] {
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
            let refused = Directory::make(&directory).unwrap_err().to_string();
            assert!(refused.contains(&format!("{mode:04o}")) && refused.contains("0700"), "{refused}");
        }
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        let own = geteuid().as_raw();
        let refused = Directory::open(&directory, own + 1).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("of uid {} with mode 0700; it belongs to uid {own}", own + 1)),
            "{refused}"
        );
        fs::remove_dir(&directory).unwrap();
        symlink("/", &directory).unwrap();
        assert!(Directory::make(&directory).is_err(), "a link to somewhere else");
        fs::remove_file(&directory).unwrap();
    }
}
