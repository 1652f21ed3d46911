//! The flight recorder: the last operations of the communicators of a process, in memory that others can read while the
//! process works, hangs or is stopped.
//!
//! Each [`Collectives`](crate::Collectives) has one. It costs a few stores per operation. `ferroce flight` merges and shows the
//! recordings of this host's processes, or those in files; `ferroce stat` derives counters from them. [`FlightRecorder::dump`]
//! writes a file, and so does every communicator that fails, if [`FOLDER`] names a directory.

mod diagnosis;
mod layout;
mod log;
mod recording;

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use ferroce::driver::segment::Segment;
use ferroce::{Context, Nanos};
use tracing::{debug, warn};

pub use diagnosis::{Diagnosis, Finding, PortWay, Why};
use layout as at;
pub(crate) use log::Log;
pub use recording::{NotARecording, OperationRecord, PeerRecord, RecordedCommunicator, Recording};

/// The environment variable that names a directory into which a communicator that fails writes a recording.
pub const FOLDER: &str = "FERROCE_FLIGHT_DIR";

/// A rank that starts an operation this much later than another one is late: smaller differences are chance.
pub(crate) const LATE: Duration = Duration::from_micros(20);

/// The name of a recorder's memory in `/proc/PID/fd`.
const NAME: &str = "ferroce-flight";

/// A process's recorder. Any thread can read it.
///
/// ```
/// # use ferroce_collectives::ferroce::{Config, Context, Device};
/// # use ferroce_collectives::*;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let context = Context::open(Device::open("loopback")?, &Config::default())?;
/// # let mut collectives = Collectives::new(context)?;
/// # let card = collectives.card(&Options::default())?;
/// let all = collectives.join_with(0, &[card], &Options::default())?;
/// let recorder = collectives.flight_recorder().ok_or("this system has no memory to share")?;
/// // A thread that waits for a signal, as an example: the one that works may hang.
/// std::thread::spawn(move || println!("{:?}", recorder.read())).join().expect("no panic");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FlightRecorder {
    memory: Arc<Segment>,
}

impl FlightRecorder {
    /// The current recording.
    pub fn read(&self) -> Recording {
        // Its own bytes are a recording.
        Recording::parse(&self.bytes()).unwrap_or_default()
    }

    /// Writes the current recording to a file; an existing one is replaced atomically.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn dump(&self, path: &Path) -> io::Result<()> {
        let hidden = write_hidden(path, &self.bytes())?;
        fs::rename(&hidden, path).inspect_err(|_| {
            let _ = fs::remove_file(&hidden);
        })
    }

    /// The same, to a new file in a directory, with the host and the process in its name. Returns its path.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn dump_into(&self, folder: &Path) -> io::Result<PathBuf> {
        write_new(folder, &self.read().host, std::process::id(), &self.bytes())
    }

    /// The recording as the bytes of a file, up to the end of the last log.
    fn bytes(&self) -> Vec<u8> {
        let word = |offset: usize| self.memory.word(offset).load(Ordering::Acquire);
        let end = end_of_logs(word);
        let mut bytes: Vec<u8> = (0..end).step_by(8).flat_map(|offset| word(offset).to_ne_bytes()).collect();
        set(&mut bytes, at::TAKEN, nanos(since_epoch()));
        set(&mut bytes, at::LENGTH, end as u64);
        bytes
    }
}

/// Writes a word of a recording that is long enough.
fn set(bytes: &mut [u8], field: usize, value: u64) {
    if let Some(word) = bytes.get_mut(field..field + 8) {
        word.copy_from_slice(&value.to_ne_bytes());
    }
}

/// The end of the last log.
fn end_of_logs(word: impl Fn(usize) -> u64) -> usize {
    let logs = (0..at::LOGS).map(|index| at::HEAD + index * at::LOG);
    let logs = logs.take_while(|base| word(base + at::COMMUNICATOR) != 0);
    logs.last().map_or(at::HEAD, |base| base + at::LOG)
}

/// Writes a file next to `path`, with a name that readers ignore, readable only by its owner. Returns its path.
fn write_hidden(path: &Path, bytes: &[u8]) -> io::Result<PathBuf> {
    /// Threads of a process may write at the same time.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{}-{}.part", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
    // Links are not followed: the directory may be world-writable.
    let _ = fs::remove_file(&hidden);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&hidden)?;
    file.write_all(bytes).inspect_err(|_| {
        let _ = fs::remove_file(&hidden);
    })?;
    Ok(hidden.into())
}

/// Writes the recording of a process to the first free name: nothing is replaced.
fn write_new(folder: &Path, host: &str, process: u32, bytes: &[u8]) -> io::Result<PathBuf> {
    /// The most recordings of one process in a directory.
    const MOST: u32 = 10_000;
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "-.".contains(*c);
    let host: String = host.chars().filter(is_plain).collect();
    let name = |number: u32| folder.join(format!("{NAME}.{host}.{process}.{number}"));
    let hidden = write_hidden(&name(0), bytes)?;
    // A link is only created for a free name, and only to a complete file.
    let free = (0..MOST).map(name).find_map(|path| match fs::hard_link(&hidden, &path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
        made => Some(made.map(|()| path)),
    });
    let _ = fs::remove_file(&hidden);
    free.unwrap_or_else(|| Err(io::Error::other(format!("there are {MOST} recordings of process {process}"))))
}

/// The recorder of the thread that writes it.
pub(crate) struct Recorder {
    memory: Option<Arc<Segment>>,
    /// The directory for recordings of communicators that fail.
    folder: Option<PathBuf>,
    /// When clocks are compared again.
    next: Nanos,
}

impl Recorder {
    /// For operations on a context.
    pub(crate) fn new(context: &Context) -> Recorder {
        let made = Segment::create_named(NAME, at::BYTES_ALL);
        let memory = made.inspect_err(|error| warn!("no flight recorder: {error}")).ok().map(Arc::new);
        let recorder =
            Recorder { memory, folder: std::env::var_os(FOLDER).map(PathBuf::from), next: Nanos::ZERO };
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let device = context.metrics().label("device").unwrap_or_default().to_owned();
        if let Some(memory) = &recorder.memory {
            for (field, text) in [(at::HOST, host.trim()), (at::DEVICE, &*device)] {
                for (index, bytes) in text.as_bytes()[..text.len().min(at::TEXT)].chunks(8).enumerate() {
                    memory.word(field + 8 * index).store(log::word_of(bytes), Ordering::Relaxed);
                }
            }
            memory.word(at::PROCESS).store(std::process::id().into(), Ordering::Relaxed);
            memory.word(at::FORMAT).store(at::MAGIC, Ordering::Release);
        }
        recorder
    }

    /// Records nothing.
    pub(crate) fn off() -> Recorder {
        Recorder { memory: None, folder: None, next: Nanos::ZERO }
    }

    /// For other threads.
    pub(crate) fn reader(&self) -> Option<FlightRecorder> {
        self.memory.clone().map(|memory| FlightRecorder { memory })
    }

    /// The log of a new communicator.
    pub(crate) fn log(&self, communicator: u64, (rank, size): (u32, u32)) -> Log {
        let log = Log::new(self.memory.clone(), communicator, (rank, size));
        if self.memory.is_some() && !log.is_kept() {
            debug!("communicator {communicator:016x} is not recorded: {} others are", at::LOGS);
        }
        log
    }

    /// Records that the process polls.
    #[inline]
    pub(crate) fn polled(&mut self, now: Nanos) {
        /// The drift of clocks in that time does not matter.
        const INTERVAL: Duration = Duration::from_secs(1);
        let Some(memory) = &self.memory else { return };
        memory.word(at::POLLED).store(now.0, Ordering::Relaxed);
        if now >= self.next {
            self.next = now + INTERVAL;
            memory.word(at::CLOCK).store(now.0, Ordering::Relaxed);
            memory.word(at::EPOCH).store(nanos(since_epoch()), Ordering::Relaxed);
        }
    }

    /// A communicator has failed: writes a recording, if [`FOLDER`] is set.
    pub(crate) fn leave(&self) {
        let (Some(folder), Some(reader)) = (&self.folder, self.reader()) else { return };
        match reader.dump_into(folder) {
            Ok(path) => {
                warn!(
                    "a flight recording is in {path:?}; `ferroce flight` reads it, best with those of the other ranks"
                );
            }
            Err(error) => warn!("no flight recording in {folder:?}, which {FOLDER} names: {error}"),
        }
    }
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
