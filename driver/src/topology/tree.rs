//! Reading a sysfs tree that is not trusted: it may come from another person.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use crate::{Error, is_unprintable};

/// The most bytes of a file: the kernel's text files have at most a page, 4 KiB on most machines.
const MAX_BYTES: u64 = 16 * 1024;
/// The most entries of a directory. A host with all virtual functions has a few thousand PCI devices.
const MAX_ENTRIES: usize = 4096;
/// The most notes.
const MAX_NOTES: usize = 64;

/// Reads files below a directory, none outside, and keeps their contents.
pub(super) struct Tree {
    /// The canonical path.
    root: PathBuf,
    notes: RefCell<Vec<String>>,
    read: RefCell<BTreeMap<PathBuf, Seen>>,
}

/// A file or link that was read, for [`Tree::save`].
enum Seen {
    Folder,
    Text(Vec<u8>),
    /// Its target, relative to the root.
    Link(PathBuf),
}

impl Tree {
    /// # Errors
    /// [`Error::Topology`] if the directory does not exist, or is not a sysfs tree.
    pub(super) fn open(root: &Path) -> Result<Tree, Error> {
        let error = |reason: String| Error::Topology { path: root.display().to_string(), reason };
        let canonical = root.canonicalize().map_err(|source| error(source.to_string()))?;
        if !["devices", "class", "bus"].iter().any(|part| canonical.join(part).is_dir()) {
            return Err(error(
                "it holds no sysfs tree (no folder 'devices', 'class' or 'bus'); name /sys, or a folder that \
                 `ferroce topo --record` has made"
                    .to_owned(),
            ));
        }
        Ok(Tree { root: canonical, notes: RefCell::default(), read: RefCell::default() })
    }

    /// The canonical path of a path, both relative to the root. `None` if it does not exist or is outside.
    pub(super) fn real(&self, path: &Path) -> Option<PathBuf> {
        let real = match fs::canonicalize(self.root.join(path)) {
            Ok(real) => real,
            Err(error) => {
                self.note_error(path, &error);
                return None;
            }
        };
        let Ok(real) = real.strip_prefix(&self.root) else {
            self.note(format!("{}: it points outside the tree, and is ignored", path.display()));
            return None;
        };
        if real != path {
            self.read.borrow_mut().insert(path.to_owned(), Seen::Link(real.to_owned()));
        }
        Some(real.to_owned())
    }

    /// The text of a file without surrounding blanks; `None` if there is no file. Unprintable characters are replaced.
    pub(super) fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let path = path.as_ref();
        let real = self.real(path)?;
        let bytes = match read(&self.root.join(&real)) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.note_error(path, &error);
                return None;
            }
        };
        let text =
            String::from_utf8_lossy(&bytes).trim_matches(|c: char| c.is_whitespace() || c == '\0').to_owned();
        self.read.borrow_mut().insert(real, Seen::Text(bytes));
        Some(printable(&text))
    }

    /// The number in a file. `unknown` lists the kernel's texts for an unknown value.
    pub(super) fn number<T: std::str::FromStr>(&self, path: impl AsRef<Path>, unknown: &[&str]) -> Option<T> {
        let text = self.text(path.as_ref())?;
        let number = text.parse().ok();
        if number.is_none() && !unknown.contains(&text.as_str()) {
            self.note_wrong(path.as_ref(), &text, "a number");
        }
        number
    }

    /// The number in a file in the form `0x1234`.
    pub(super) fn hexadecimal(&self, path: impl AsRef<Path>) -> Option<u32> {
        let text = self.text(path.as_ref())?;
        let number = text.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
        if number.is_none() {
            self.note_wrong(path.as_ref(), &text, "a number as 0x10de");
        }
        number
    }

    /// The names in a directory, sorted; none if there is no directory.
    pub(super) fn names(&self, folder: impl AsRef<Path>) -> Vec<String> {
        let folder = folder.as_ref();
        let Some(real) = self.real(folder) else { return Vec::new() };
        let entries = match fs::read_dir(self.root.join(&real)) {
            Ok(entries) => entries,
            Err(error) => {
                self.note_error(folder, &error);
                return Vec::new();
            }
        };
        self.read.borrow_mut().insert(real, Seen::Folder);
        let mut names = Vec::new();
        for (nth, entry) in entries.flatten().enumerate() {
            if nth == MAX_ENTRIES {
                self.note(format!(
                    "{}: more than {MAX_ENTRIES} entries; the rest is ignored",
                    folder.display()
                ));
                break;
            }
            match entry.file_name().into_string() {
                Ok(name) => names.push(name),
                Err(name) => self.note(format!("{}: no UTF-8, and ignored", folder.join(name).display())),
            }
        }
        names.sort();
        names
    }

    /// Adds a note on an invalid entry, for users.
    pub(super) fn note(&self, text: String) {
        let mut notes = self.notes.borrow_mut();
        match notes.len() {
            0..MAX_NOTES => notes.push(printable(&text)),
            MAX_NOTES => notes.push("and more of that kind".to_owned()),
            _ => {}
        }
    }

    pub(super) fn note_wrong(&self, path: &Path, text: &str, expected: &str) {
        const MOST: usize = 40;
        let cut: String = text.chars().take(MOST).collect();
        let more = if cut.len() < text.len() { "..." } else { "" };
        self.note(format!("{}: '{cut}{more}' is not {expected}", path.display()));
    }

    fn note_error(&self, path: &Path, error: &io::Error) {
        // Files that exist for some devices only, and the speed of an interface that is down.
        let is_usual = matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput);
        if !is_usual {
            self.note(format!("{}: {error}", path.display()));
        }
    }

    pub(super) fn into_notes(self) -> Vec<String> {
        self.notes.into_inner()
    }

    /// Creates a tree from the entries read, in an empty or absent directory.
    ///
    /// # Errors
    /// [`Error::Topology`].
    pub(super) fn save(&self, to: &Path) -> Result<(), Error> {
        let error =
            |path: &Path, reason: String| Error::Topology { path: path.display().to_string(), reason };
        let fail = |path: &Path, source: io::Error| error(path, source.to_string());
        fs::create_dir_all(to).map_err(|source| fail(to, source))?;
        if fs::read_dir(to).map_err(|source| fail(to, source))?.next().is_some() {
            return Err(error(to, "it is not empty; name a new folder".to_owned()));
        }
        let folder = |path: &Path| fs::create_dir_all(path).map_err(|source| fail(path, source));
        let parent = |path: &Path| path.parent().map_or(Ok(()), folder);
        for (path, what) in self.read.borrow().iter() {
            let place = to.join(path);
            match what {
                Seen::Folder => folder(&place)?,
                Seen::Text(bytes) => {
                    parent(&place)?;
                    fs::write(&place, bytes).map_err(|source| fail(&place, source))?;
                }
                Seen::Link(target) => {
                    parent(&place)?;
                    let depth = path.components().count().saturating_sub(1);
                    let up: PathBuf = std::iter::repeat_n(Component::ParentDir, depth).collect();
                    symlink(up.join(target), &place).map_err(|source| fail(&place, source))?;
                }
            }
        }
        // A link may lead to a directory from which nothing was read, such as a driver's.
        let links = self.read.borrow();
        for target in
            links.values().filter_map(|what| if let Seen::Link(to) = what { Some(to) } else { None })
        {
            let place = to.join(target);
            if !place.exists() {
                folder(&place)?;
            }
        }
        Ok(())
    }
}

/// The bytes of a regular file. Reading another file, such as a pipe, may never end, or never start.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it is longer than {MAX_BYTES} bytes, and ignored")));
    }
    Ok(bytes)
}

/// Replaces unprintable characters.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if is_unprintable(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}
