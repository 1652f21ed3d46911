//! The exported contexts on this machine: their sockets and their metrics.
//!
//! Root reads directories of other users, so the owner of a directory and the process of a text are those that the kernel
//! reports; and no user's entries can delay others for long.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferroce_driver::credentials::Credentials;
use ferroce_driver::user_ids::UserIds;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::geteuid;

use super::directory::Directory;
use super::{OF_OTHERS, OF_ROOT, OF_SESSIONS, OTHERS_PREFIX, own_directory};
use crate::telemetry::metrics::Metrics;

/// How long to search for directories.
const LONGEST_SEARCH: Duration = Duration::from_secs(1);
/// The most users.
const MAX_USERS: usize = 256;
/// The most directories whose problems are reported, and the most sockets of one user.
const MAX_NAMED: usize = 16;

/// The time limit for a process to answer.
const LONGEST_ANSWER: Duration = Duration::from_secs(1);
/// How long new processes are asked.
const LONGEST_ROUND: Duration = Duration::from_secs(2);
/// Processes asked concurrently.
const MAX_OPEN: usize = 64;
/// The most bytes of a text; ten times the usual length.
const LARGEST_TEXT: usize = 1 << 18;
/// The labels that identify a context.
const TOLD_APART_BY: [&str; 4] = ["pid", "uid", "context", "device"];
/// The most contexts and bytes of texts, of one user and of all.
const MAX_OF_USER: (usize, usize) = (256, 8 << 20);
const MAX_OF_ALL: (usize, usize) = (1024, 16 << 20);

/// The exported contexts on this machine, as far as this process may access them.
#[derive(Debug, Default)]
pub struct Exported {
    users: Vec<User>,
    /// Directories of other users that may have more contexts.
    pub forbidden: Vec<PathBuf>,
    /// Directories of sockets that can't be trusted, with the reason; and directories with more entries than are read.
    pub skipped: Vec<(PathBuf, io::Error)>,
    /// More that were skipped.
    unnamed: usize,
}

#[derive(Debug)]
struct User {
    directory: Directory,
    /// `PID.NUMBER.DEVICE` each.
    names: Vec<OsString>,
}

impl Exported {
    /// Searches for them, for at most a second. Sockets of dead processes of this user are removed.
    pub fn find() -> Exported {
        let mut exported = Exported::default();
        let deadline = Instant::now() + LONGEST_SEARCH;
        let (own, uid) = (own_directory(), geteuid().as_raw());
        if let Ok(directory) = Directory::open(&own, uid) {
            directory.remove_abandoned();
        }
        exported.look_into(own, uid);
        let ids = UserIds::read();
        exported.look_into_of(OF_ROOT.into(), 0, &ids);
        let in_session: fn(PathBuf) -> PathBuf = |session| session.join("ferroce");
        for (parent, prefix, within) in
            [(OF_SESSIONS, "", in_session), (OF_OTHERS, OTHERS_PREFIX, |directory| directory)]
        {
            if let Err(error) = exported.search(parent, prefix, within, &ids, deadline) {
                exported.skipped.push((parent.into(), error));
            }
        }
        if exported.unnamed > 0 {
            let more = io::Error::other(format!("{} more like these are skipped", exported.unnamed));
            exported.skipped.push((OF_OTHERS.into(), more));
        }
        exported.users.sort_by(|a, b| a.directory.path().cmp(b.directory.path()));
        exported
    }

    /// Their sockets, named `PID.NUMBER.DEVICE`. A connection returns a context's [`Metrics`] as text, then the end of file. A
    /// socket that refuses connections belongs to a process that has ended.
    pub fn sockets(&self) -> impl Iterator<Item = PathBuf> {
        self.users.iter().flat_map(|user| user.names.iter().map(|name| user.directory.path().join(name)))
    }

    /// Reads all of them, for at most three seconds, and reports which ones can't be read, and why. Those that have ended
    /// meanwhile are left out. Every value has the labels `pid` and `uid`, which the kernel reports. A context with the `pid`,
    /// `uid`, `context` and `device` of another is left out.
    pub fn read(&self) -> Vec<(PathBuf, io::Result<Metrics>)> {
        let mut answers: Vec<Reply> = Vec::new();
        let end = Instant::now() + LONGEST_ROUND;
        let mut shares = vec![Share::default(); self.users.len()];
        let mut sockets = self.in_turn();
        let mut open: Vec<Conversation> = Vec::new();
        loop {
            while open.len() < MAX_OPEN
                && Instant::now() < end
                && let Some((number, user, name)) = sockets.next()
            {
                if shares[number].is_below(MAX_OF_USER) && Share::total(&shares).is_below(MAX_OF_ALL) {
                    match Conversation::begin(number, user, name) {
                        Ok(begun) => open.extend(begun),
                        Err(error) => {
                            shares[number].fail(&mut answers, user.directory.path().join(name), error)
                        }
                    }
                } else {
                    shares[number].left_out += 1;
                }
            }
            if open.is_empty() {
                break;
            }
            wait(&open);
            for conversation in open.extract_if(.., |conversation| conversation.advance()) {
                let share = &mut shares[conversation.user];
                share.contexts += 1;
                share.bytes += conversation.text.len();
                match conversation.answer() {
                    (path, Ok(metrics)) => answers.push((path, Ok(metrics))),
                    (path, Err(error)) => share.fail(&mut answers, path, error),
                }
            }
        }
        for (number, ..) in sockets {
            shares[number].left_out += 1;
        }
        for (user, share) in self.users.iter().zip(shares).filter(|(_, share)| share.left_out > 0) {
            let more =
                format!("{} more are left out: too many, too long, too slow or no contexts", share.left_out);
            answers.push((user.directory.path().to_owned(), Err(io::Error::other(more))));
        }
        answers.sort_by(|(a, _), (b, _)| a.cmp(b));
        refuse_repeats(&mut answers);
        answers
    }

    /// All sockets, one of each user in turn: a user with many does not delay others.
    fn in_turn(&self) -> impl Iterator<Item = (usize, &User, &OsStr)> {
        let most = self.users.iter().map(|user| user.names.len()).max().unwrap_or(0);
        (0..most).flat_map(|turn| {
            self.users
                .iter()
                .enumerate()
                .filter_map(move |(number, user)| Some((number, user, user.names.get(turn)?.as_os_str())))
        })
    }

    /// Reads the users' directories in `parent`, named `prefix` and the uid. Fails if there are more than are read.
    fn search(
        &mut self,
        parent: &str,
        prefix: &str,
        within: fn(PathBuf) -> PathBuf,
        ids: &UserIds,
        deadline: Instant,
    ) -> io::Result<()> {
        let entries = match fs::read_dir(parent) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("can't be searched within {LONGEST_SEARCH:?}")));
            }
            if self.users.len() == MAX_USERS {
                return Err(io::Error::other(format!("has more than {MAX_USERS} users")));
            }
            if let Some(uid) = entry.file_name().to_str().and_then(|name| uid_of(name, prefix)) {
                self.look_into_of(within(entry.path()), uid, ids);
            }
        }
        Ok(())
    }

    /// Reads a directory that should belong to the user with the number `uid` outside this user namespace.
    fn look_into_of(&mut self, path: PathBuf, uid: u32, ids: &UserIds) {
        match ids.inside(uid) {
            Some(owner) => self.look_into(path, owner),
            // This process may not read it.
            None if path.is_dir() => self.forbidden.push(path),
            None => {}
        }
    }

    fn look_into(&mut self, path: PathBuf, owner: u32) {
        if self.users.iter().any(|user| user.directory.path() == path) {
            return;
        }
        let opened = Directory::open(&path, owner).and_then(|directory| Ok((directory.names()?, directory)));
        match opened {
            Ok((names, directory)) if !names.is_empty() => self.users.push(User { directory, names }),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => match path.symlink_metadata() {
                Ok(found) if found.is_dir() && found.uid() == owner => self.forbidden.push(path),
                Ok(_) => self.skip(path, error),
                // The contents of an inaccessible directory are unknown.
                Err(_) => {}
            },
            Err(error) => self.skip(path, error),
        }
    }

    fn skip(&mut self, path: PathBuf, error: io::Error) {
        match self.skipped.len() < MAX_NAMED {
            true => self.skipped.push((path, error)),
            false => self.unnamed += 1,
        }
    }
}

/// The user ID that follows `prefix`, written as the kernel would.
fn uid_of(name: &str, prefix: &str) -> Option<u32> {
    let digits = name.strip_prefix(prefix)?;
    digits.parse().ok().filter(|uid: &u32| uid.to_string() == digits)
}

/// The answer of a context.
type Reply = (PathBuf, io::Result<Metrics>);

/// What was read of a user's contexts, and what was not.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    contexts: usize,
    bytes: usize,
    /// The named ones.
    failures: usize,
    left_out: usize,
}

impl Share {
    fn total(shares: &[Share]) -> Share {
        shares.iter().fold(Share::default(), |sum, share| Share {
            contexts: sum.contexts + share.contexts,
            bytes: sum.bytes + share.bytes,
            ..sum
        })
    }

    /// A context can't be read.
    fn fail(&mut self, answers: &mut Vec<Reply>, path: PathBuf, error: io::Error) {
        match self.failures < MAX_NAMED {
            true => answers.push((path, Err(error))),
            false => self.left_out += 1,
        }
        self.failures += 1;
    }

    fn is_below(&self, (contexts, bytes): (usize, usize)) -> bool {
        self.contexts < contexts && self.bytes < bytes
    }
}

/// A socket to read.
struct Conversation {
    /// The number of its user.
    user: usize,
    path: PathBuf,
    stream: UnixStream,
    /// The listening process.
    peer: Credentials,
    deadline: Instant,
    text: Vec<u8>,
    end: Option<io::Result<()>>,
}

impl Conversation {
    /// `None` if the process has ended.
    fn begin(number: usize, user: &User, name: &OsStr) -> io::Result<Option<Conversation>> {
        let stream = match user.directory.connect(name) {
            Ok(stream) => stream,
            Err(error) if [ErrorKind::ConnectionRefused, ErrorKind::NotFound].contains(&error.kind()) => {
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(no_answer()),
            Err(error) => return Err(error),
        };
        let peer = Credentials::of_peer(&stream)?;
        let owner = user.directory.owner();
        if peer.uid != owner {
            return Err(io::Error::other(format!(
                "process {} of uid {} listens there, in a directory of uid {owner}",
                peer.pid, peer.uid
            )));
        }
        let path = user.directory.path().join(name);
        let deadline = Instant::now() + LONGEST_ANSWER;
        Ok(Some(Conversation { user: number, path, stream, peer, deadline, text: Vec::new(), end: None }))
    }

    /// Reads the available bytes. Returns whether the text has ended.
    fn advance(&mut self) -> bool {
        let mut piece = [0; 1 << 14];
        while self.end.is_none() {
            match self.stream.read(&mut piece) {
                Ok(0) => self.end = Some(Ok(())),
                Ok(length) => {
                    self.text.extend_from_slice(&piece[..length]);
                    if self.text.len() > LARGEST_TEXT {
                        self.end = Some(Err(io::Error::other("sends more than a context does")));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() < self.deadline {
                        return false;
                    }
                    self.end = Some(Err(match self.text.is_empty() {
                        true => no_answer(),
                        false => io::Error::other("sends more slowly than a context does"),
                    }));
                }
                Err(error) => self.end = Some(Err(error)),
            }
        }
        true
    }

    /// The text read.
    fn answer(self) -> Reply {
        let Conversation { path, peer, text, end, .. } = self;
        let read = || {
            end.unwrap_or(Ok(()))?;
            let text = String::from_utf8(text).map_err(io::Error::other)?;
            let metrics = Metrics::parse(&text).map_err(io::Error::other)?;
            metrics.of_process(peer.pid, peer.uid).map_err(io::Error::other)
        };
        (path, read())
    }
}

/// Removes contexts with the labels of another one: the kernel has no PID here for processes of other PID namespaces, and a
/// scrape must contain a series only once.
fn refuse_repeats(answers: &mut [Reply]) {
    let mut seen: HashMap<[String; 4], PathBuf> = HashMap::new();
    for (path, answer) in answers {
        let Ok(metrics) = answer else { continue };
        let value = |name| metrics.label(name).unwrap_or_default().to_owned();
        match seen.entry(TOLD_APART_BY.map(value)) {
            Entry::Vacant(vacant) => drop(vacant.insert(path.clone())),
            Entry::Occupied(first) => {
                let labels: Vec<_> = TOLD_APART_BY
                    .iter()
                    .zip(first.key())
                    .map(|(name, value)| format!("{name}={value:?}"))
                    .collect();
                *answer = Err(io::Error::other(format!(
                    "is left out: it has the labels {} of {}",
                    labels.join(", "),
                    first.get().display()
                )));
            }
        }
    }
}

fn no_answer() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "does not answer; does it poll its context?")
}

/// Waits until one of them is readable, or its time limit is reached.
fn wait(open: &[Conversation]) {
    let first = open.iter().map(|conversation| conversation.deadline).min();
    let left = first.map(|first| first.saturating_duration_since(Instant::now())).unwrap_or_default();
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let mut fds: Vec<PollFd<'_>> =
        open.iter().map(|conversation| PollFd::new(&conversation.stream, PollFlags::IN)).collect();
    // If it ends early, each one is checked anyway.
    let _ = poll(&mut fds, Some(&timeout));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_named_after_one_user() {
        assert_eq!(uid_of("ferroce-1000", OTHERS_PREFIX), Some(1000));
        assert_eq!(uid_of("0", ""), Some(0));
        for name in
            ["ferroce-", "ferroce-+5", "ferroce-05", "ferroce-4294967296", "ferroce-5.x", "xferroce-5"]
        {
            assert_eq!(uid_of(name, OTHERS_PREFIX), None, "{name}");
        }
    }

    /// The kernel has no PID here for a process of another PID namespace, so two of them can look like one; and a scraper refuses
    /// a whole text that contains a series twice.
    #[test]
    fn no_context_is_there_twice() {
        let path = std::env::temp_dir().join(format!("ferroce-twins-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let names = ["1.0.sim", "2.0.sim", "3.1.sim"];
        let servers = [(names[0], 0), (names[1], 0), (names[2], 1)].map(|(name, context)| {
            let listener = std::os::unix::net::UnixListener::bind(path.join(name)).unwrap();
            std::thread::spawn(move || {
                let mut metrics = Metrics::new("sim", "sim0").with_label("context", context);
                metrics.push_driver(&ferroce_driver::Stats::default());
                let (mut stream, _) = listener.accept().unwrap();
                io::Write::write_all(&mut stream, metrics.to_string().as_bytes()).unwrap();
            })
        });
        let directory = Directory::open(&path, geteuid().as_raw()).unwrap();
        let users = vec![User { directory, names: names.map(OsString::from).into() }];
        let answers = Exported { users, ..Exported::default() }.read();
        servers.into_iter().for_each(|server| server.join().unwrap());
        fs::remove_dir_all(&path).unwrap();
        let found: Vec<_> = answers.iter().map(|(path, answer)| (path.ends_with(names[1]), answer)).collect();
        assert!(matches!(found[..], [(false, Ok(_)), (true, Err(_)), (false, Ok(_))]), "{found:?}");
        let repeat = answers[1].1.as_ref().unwrap_err().to_string();
        assert!(repeat.contains("1.0.sim") && repeat.contains("context=\"0\""), "{repeat}");
    }

    #[test]
    fn users_take_turns() {
        let path = std::env::temp_dir().join(format!("ferroce-turns-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let user = |names: &[&str]| {
            let directory = Directory::open(&path, geteuid().as_raw()).unwrap();
            User { directory, names: names.iter().map(OsString::from).collect() }
        };
        let users = vec![user(&["1.0.a", "2.0.a", "3.0.a"]), user(&["4.0.b"])];
        let exported = Exported { users, ..Exported::default() };
        let turns: Vec<_> =
            exported.in_turn().map(|(user, _, name)| (user, name.to_str().unwrap())).collect();
        assert_eq!(turns, [(0, "1.0.a"), (1, "4.0.b"), (0, "2.0.a"), (0, "3.0.a")]);
        fs::remove_dir(&path).unwrap();
    }
}
