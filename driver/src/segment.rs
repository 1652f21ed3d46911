//! Memory that processes of one user on one host share without packets: a memfd, which another process opens with a ticket
//! from its creator.
//!
//! The memfd is opened by its link in the creator's `/proc/PID/fd`: the kernel permits this only to processes of the same
//! user that could trace each other. Both must see the same `/proc` (one PID namespace). The opening process checks the
//! seals, the length, and a random number of the creator, so that it does not accept a file of a later process.
//!
//! ```
//! use ferroce_driver::segment::Segment;
//!
//! let mut own = Segment::create(4096)?;
//! let there = Segment::open(&own.ticket())?; // elsewhere
//! there.word(0).store(7, std::sync::atomic::Ordering::Release);
//! assert_eq!(own.memory().load_u64(0)?, 7);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fs::{self, DirEntry, File, read_link};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags, open};

use crate::Memory;
use crate::sealed::{SealedError, SealedMemory};

/// A ticket to open a segment. It is valid only on this host, and as long as the creator has the segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "plain numbers, that travel")]
pub struct Ticket {
    /// The creator's PID.
    pub pid: u32,
    /// The creator's descriptor.
    pub fd: u32,
    /// The PID namespace of `pid`.
    pub namespace: u64,
    /// The length in bytes.
    pub length: u64,
    /// The creator's random number.
    pub nonce: u64,
}

/// Why a segment could not be created or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// Creating or mapping it failed, or it does not match the ticket.
    #[error("{0}")]
    Memory(String),
    /// The creator is in another PID namespace.
    #[error("the other process is in another PID namespace")]
    Namespace,
    /// The kernel does not let this process open it.
    #[error("/proc/{pid}/fd/{fd}: {source} (the process must be of this user, and allow to be traced)")]
    Open {
        /// The creator's PID.
        pid: u32,
        /// The creator's descriptor.
        fd: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process has ended, and another one has its PID.
    #[error("the file of process {pid} is not the announced one")]
    Stranger {
        /// The PID.
        pid: u32,
    },
}

impl From<SealedError> for SegmentError {
    fn from(error: SealedError) -> SegmentError {
        SegmentError::Memory(error.to_string())
    }
}

/// Memory that processes share. Its words are accessed by atomics, the rest by copies: any process that has it may write it
/// at any time.
#[derive(Debug)]
pub struct Segment {
    memory: Arc<SealedMemory>,
    /// The descriptor, in the creator only.
    file: Option<OwnedFd>,
    ticket: Ticket,
}

/// The length of the header before the bytes: the nonce, alone in a page.
const HEAD: usize = 4096;
/// The longest segment.
const LONGEST: u64 = 1 << 40;

impl Segment {
    /// Creates `length` bytes, zeroed.
    ///
    /// # Errors
    /// [`SegmentError::Memory`].
    pub fn create(length: usize) -> Result<Segment, SegmentError> {
        Segment::make(length, |whole| SealedMemory::create(NAME, whole))
    }

    /// As [`create`](Segment::create), but pages are allocated on first access, and [`find`] finds the segment by its name.
    ///
    /// # Errors
    /// [`SegmentError::Memory`].
    pub fn create_named(name: &str, length: usize) -> Result<Segment, SegmentError> {
        Segment::make(length, |whole| SealedMemory::create_sparse(name, whole))
    }

    fn make(
        length: usize,
        create: impl FnOnce(usize) -> Result<(SealedMemory, OwnedFd), SealedError>,
    ) -> Result<Segment, SegmentError> {
        let system = |source: io::Error| SegmentError::Memory(source.to_string());
        let whole = length.checked_add(HEAD).filter(|whole| *whole as u64 <= LONGEST);
        let whole = whole.ok_or_else(|| SegmentError::Memory(format!("{length} bytes are too many")))?;
        let (memory, file) = create(whole)?;
        let mut nonce = [0; 8];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| system(error.into()))?;
        let nonce = u64::from_ne_bytes(nonce) | 1;
        memory.word(0).store(nonce, Ordering::Release);
        let ticket = Ticket {
            pid: std::process::id(),
            fd: file.as_raw_fd() as u32,
            namespace: namespace().map_err(system)?,
            length: length as u64,
            nonce,
        };
        Ok(Segment { memory: Arc::new(memory), file: Some(file), ticket })
    }

    /// Opens another process's segment.
    ///
    /// # Errors
    /// [`SegmentError`]. All fields of the ticket are checked.
    pub fn open(ticket: &Ticket) -> Result<Segment, SegmentError> {
        let Ticket { pid, fd, .. } = *ticket;
        if ticket.length > LONGEST - HEAD as u64 {
            return Err(SegmentError::Stranger { pid });
        }
        if namespace().map_err(|source| SegmentError::Open { pid, fd, source })? != ticket.namespace {
            return Err(SegmentError::Namespace);
        }
        let opened = open_memory((pid, fd), OFlags::RDWR, "");
        let file = opened.map_err(|source| SegmentError::Open { pid, fd, source })?;
        let file = file.ok_or(SegmentError::Stranger { pid })?;
        let whole = ticket.length as usize + HEAD;
        let memory = SealedMemory::open(&file, whole..=whole)?;
        if memory.word(0).load(Ordering::Acquire) != ticket.nonce {
            return Err(SegmentError::Stranger { pid });
        }
        Ok(Segment { memory: Arc::new(memory), file: None, ticket: *ticket })
    }

    /// The ticket with which others open it.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Whether this is the creator's value.
    pub fn is_makers(&self) -> bool {
        self.file.is_some()
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.memory.len() - HEAD
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The eight bytes at `offset`.
    ///
    /// # Panics
    /// If they are not inside the memory, or not aligned.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        self.memory.word(HEAD + offset)
    }

    /// All bytes, as memory that can be registered. It stays valid without this value.
    pub fn memory(&self) -> Memory {
        let base = self.memory.start(HEAD, self.len());
        // SAFETY: initialised bytes of the mapping, which lives as long as the owner. Other processes may read and write
        // them at any time; the only references to them are atomics.
        unsafe { Memory::from_raw(base, self.len(), self.memory.clone()) }
    }
}

/// The name of files of [`Segment::create`].
const NAME: &str = "ferroce-segment";

/// Opens a process's memfd; `None` if the file is of another kind, or its name does not start with `name`.
fn open_memory((pid, fd): (u32, u32), flags: OFlags, name: &str) -> io::Result<Option<OwnedFd>> {
    // The link is checked first, because opening a file of another kind may block, for example on a FUSE server.
    let path = format!("/proc/{pid}/fd/{fd}");
    let found = open(path.as_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let path = format!("/proc/self/fd/{}", found.as_raw_fd());
    let is_memory = is_named(&read_link(&path)?, name)
        .then(|| open(path.as_str(), flags | OFlags::CLOEXEC, Mode::empty()));
    Ok(is_memory.transpose()?)
}

/// Whether it is the link of a memfd whose name starts with `name`.
fn is_named(link: &Path, name: &str) -> bool {
    let link = link.as_os_str().as_encoded_bytes();
    link.strip_prefix(b"/memfd:").is_some_and(|rest| rest.starts_with(name.as_bytes()))
}

/// A segment of a running process, which may be stopped or hang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// The PID.
    pub pid: u32,
    /// The descriptor.
    pub fd: u32,
}

/// The most descriptors examined per process.
const FILES_MAX: usize = 1 << 16;

/// The segments of this name in all processes that this one may inspect: those of the same user, or all for root.
pub fn find(name: &str) -> Vec<Found> {
    let number = |entry: &DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for pid in entries("/proc".into()).filter_map(|entry| number(&entry)) {
        for file in entries(format!("/proc/{pid}/fd").into()).take(FILES_MAX) {
            if let Some(fd) = number(&file)
                && read_link(file.path()).is_ok_and(|link| is_named(&link, name))
            {
                found.push(Found { pid, fd });
            }
        }
    }
    found.sort_by_key(|found| (found.pid, found.fd));
    found
}

impl Found {
    /// Reads the current contents, at most `most` bytes. They may be written at the same time.
    ///
    /// # Errors
    /// The kernel's error; [`ErrorKind::NotFound`] if the process has ended, or the descriptor is of another file now.
    pub fn read(&self, name: &str, most: usize) -> io::Result<Vec<u8>> {
        let Found { pid, fd } = *self;
        let file = open_memory((pid, fd), OFlags::RDONLY, name)?;
        let file = file.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "another file has its number"))?;
        let mut file = File::from(file);
        file.seek(SeekFrom::Start(HEAD as u64))?;
        let mut bytes = Vec::new();
        file.take(most as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// The number of this process's PID namespace.
fn namespace() -> io::Result<u64> {
    let link = read_link("/proc/self/ns/pid")?;
    let text = link.to_string_lossy().into_owned();
    let number = text.strip_prefix("pid:[").and_then(|rest| rest.strip_suffix(']'));
    number
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| io::Error::other(format!("/proc/self/ns/pid is '{text}'")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_segment_is_found_and_read_and_no_other_file_is() {
        let name = format!("ferroce-test-{}", std::process::id());
        let own = Segment::create_named(&name, 100).unwrap();
        let _other = Segment::create(100).unwrap();
        own.word(8).store(7, Ordering::Release);
        let found = find(&name);
        assert_eq!(found, [Found { pid: std::process::id(), fd: own.ticket().fd }]);
        let bytes = found[0].read(&name, 1 << 20).unwrap();
        assert_eq!((bytes.len(), &bytes[8..16]), (100, &7_u64.to_ne_bytes()[..]));
        assert_eq!(found[0].read(&name, 10).unwrap().len(), 10);
        drop(own);
        assert!(find(&name).is_empty());
        let status = File::open("/proc/self/status").unwrap();
        let stranger = Found { fd: status.as_raw_fd() as u32, ..found[0] };
        assert_eq!(stranger.read(&name, 10).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_wrong_ticket_is_refused() {
        let own = Segment::create(100).unwrap();
        let ticket = own.ticket();
        assert!(Segment::open(&ticket).is_ok());
        let file = File::open("/proc/self/status").unwrap();
        for (bad, due) in [
            (Ticket { namespace: 1, ..ticket }, "another PID namespace"),
            (Ticket { nonce: 0, ..ticket }, "is not the announced one"),
            (Ticket { length: 99, ..ticket }, "bytes"),
            (Ticket { length: u64::MAX, ..ticket }, "is not the announced one"),
            (Ticket { fd: 9999, ..ticket }, "/fd/9999"),
            (Ticket { pid: u32::MAX, ..ticket }, "/proc/4294967295/fd/"),
            (Ticket { fd: file.as_raw_fd() as u32, ..ticket }, "is not the announced one"),
        ] {
            let error = Segment::open(&bad).unwrap_err().to_string();
            assert!(error.contains(due), "{error}");
        }
    }

    #[test]
    fn writes_are_shared_and_memory_outlives_the_segment() {
        let own = Segment::create(64).unwrap();
        let there = Segment::open(&own.ticket()).unwrap();
        let mut memory = own.memory();
        memory.write(8, &7_u64.to_ne_bytes()).unwrap();
        assert_eq!((there.word(8).load(Ordering::Acquire), there.len(), there.is_makers()), (7, 64, false));
        drop((own, there));
        assert_eq!(memory.load_u64(8).unwrap(), 7);
        assert!(memory.bytes().is_err() && memory.len() == 64);
    }
}
