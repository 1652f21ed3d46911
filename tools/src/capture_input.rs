//! The input of `dissect` and `replay`: a capture from a file or from standard input (a pipe), compressed by gzip or
//! not.

use std::fs::{File, Metadata};
use std::io::{self, BufReader, Cursor, ErrorKind, IsTerminal, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferroce_driver::pcap::Reader;
use flate2::bufread::MultiGzDecoder;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};

/// An opened file or standard input; nothing has been read yet.
pub(crate) struct CaptureInput {
    file: File,
    name: String,
    about: Metadata,
}

impl CaptureInput {
    /// Opens a file, or standard input for `-`.
    ///
    /// A FIFO blocks until a writer opens it, so this must precede [`Interrupt::install`].
    pub(crate) fn open(path: &Path) -> Result<CaptureInput, Failure> {
        let name = name(path);
        let file = if path == Path::new("-") {
            let stdin = io::stdin();
            if stdin.is_terminal() {
                return Err(Failure::usage(
                    "standard input is a terminal: must be a capture: `tcpdump -U -w - udp port 4791 | ferroce ...`",
                ));
            }
            File::from(stdin.as_fd().try_clone_to_owned().or_fail(|| name.clone())?)
        } else {
            File::open(path).map_err(|error| Failure::usage(format!("capture '{name}': {error}")))?
        };
        let about = file.metadata().or_fail(|| name.clone())?;
        Ok(CaptureInput { file, name, about })
    }

    /// The metadata of the file.
    pub(crate) fn about(&self) -> &Metadata {
        &self.about
    }

    /// Reads the first bytes. After a signal the capture ends: a file at once, a pipe when its writer has ended, too,
    /// or shortly after. `before_waiting` is called when no input is available.
    pub(crate) fn read(
        self,
        interrupt: Interrupt,
        before_waiting: impl FnMut() + Send + 'static,
    ) -> Result<(Reader, Amount), Failure> {
        let size = self.about.is_file().then_some(self.about.len());
        let amount = Amount { taken: Arc::default(), size, is_cut: Arc::default() };
        let mut source = Source {
            file: self.file,
            waits: size.is_none(),
            interrupt,
            before_waiting: Box::new(before_waiting),
            deadline: None,
            amount: amount.clone(),
        };
        let mut magic = Vec::new();
        let read = (&mut source).take(GZIP.len() as u64).read_to_end(&mut magic);
        read.map_err(|error| Failure::usage(format!("capture '{}': {error}", self.name)))?;
        let is_gzip = magic == GZIP;
        let whole = Cursor::new(magic).chain(source);
        let input: Box<dyn Read + Send> = match is_gzip {
            true => Box::new(Gzip(MultiGzDecoder::new(BufReader::with_capacity(1 << 16, whole)))),
            false => Box::new(whole),
        };
        Ok((Reader::new(input, self.name)?, amount))
    }
}

/// The name of a capture in errors.
pub(crate) fn name(path: &Path) -> String {
    if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() }
}

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The amount of a capture that was read.
#[derive(Clone)]
pub(crate) struct Amount {
    taken: Arc<AtomicU64>,
    size: Option<u64>,
    is_cut: Arc<AtomicBool>,
}

impl Amount {
    /// Bytes read; compressed ones if the input is compressed.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Total bytes; `None` for a pipe.
    pub(crate) fn size(&self) -> Option<u64> {
        self.size
    }

    /// Whether a signal ended the capture early.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }
}

/// The bytes of a file or a pipe.
struct Source {
    file: File,
    /// Whether it may have to wait: it is not a file.
    waits: bool,
    interrupt: Interrupt,
    before_waiting: Box<dyn FnMut() + Send>,
    /// When it ends after a signal.
    deadline: Option<Instant>,
    amount: Amount,
}

/// How long a pipe is read after a signal. Ctrl-C also ends the writer, for instance tcpdump, which then writes what it
/// has captured.
const GRACE: Duration = Duration::from_millis(500);
/// The longest time that a signal just before a wait may go unnoticed.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

impl Source {
    /// Waits until input is available. Returns false if a signal ends the capture.
    fn wait(&mut self) -> io::Result<bool> {
        let mut has_told = false;
        loop {
            if self.interrupt.is_set() {
                let deadline = self.deadline.get_or_insert_with(|| Instant::now() + GRACE);
                if !self.waits || Instant::now() >= *deadline {
                    return Ok(false);
                }
            }
            let timeout = if has_told { LOOK } else { Timespec::default() };
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&timeout)) {
                Ok(0) if !has_told => {
                    (self.before_waiting)();
                    has_told = true;
                }
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.wait()? {
            self.amount.is_cut.store(true, Ordering::Relaxed);
            return Ok(0);
        }
        let read = self.file.read(buffer)?;
        self.amount.taken.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// A decoder whose errors mention gzip.
struct Gzip<R>(MultiGzDecoder<R>);

impl<R: io::BufRead> Read for Gzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                io::Error::new(ErrorKind::InvalidData, "truncated: the gzip data ends early")
            }
            ErrorKind::InvalidInput | ErrorKind::InvalidData => {
                io::Error::new(ErrorKind::InvalidData, format!("the gzip data is damaged: {error}"))
            }
            _ => error,
        })
    }
}
