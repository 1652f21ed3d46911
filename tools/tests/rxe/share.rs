//! The files that the guest gets: the command, this test, and the shared libraries that they need.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its path in the guest.
const THERE: &str = "/share";
/// The loader of the build machine, with the libraries that belong to it.
const LOADER: &str = "ld-linux-x86-64.so.2";

/// A folder that is copied into the guest, until it is dropped.
pub(crate) struct Share(PathBuf);

impl Share {
    pub(crate) fn new() -> Share {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rxe-share-{}", std::process::id()));
        let libraries = folder.join("lib");
        fs::create_dir_all(&libraries).expect("a folder for the guest");
        let test = std::env::current_exe().expect("this test");
        for (name, program) in [("ferroce", Path::new(env!("CARGO_BIN_EXE_ferroce"))), ("test", &test)] {
            // All of it is in the guest's memory.
            let stripped = Command::new("strip").arg("-o").arg(folder.join(name)).arg(program).status();
            assert!(stripped.expect("strip (package binutils) runs").success(), "strip {name}");
            for library in libraries_of(program) {
                let name = library.file_name().expect("a file");
                fs::copy(&library, libraries.join(name)).expect("a library can be copied");
            }
        }
        Share(folder)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The command that runs a program of the share in the guest.
pub(crate) fn command(program: &str, arguments: &str) -> String {
    format!(
        "NO_COLOR=1 RUST_LOG=info {THERE}/lib/{LOADER} --library-path {THERE}/lib {THERE}/{program} {arguments}"
    )
}

/// The command that runs a command of `ferroce` in the guest which starts its own program again: the kernel must
/// execute the program itself, not the loader, so the loader replaces the guest's own for this command.
pub(crate) fn command_that_starts_itself(arguments: &str) -> String {
    format!(
        "unshare -m /bin/busybox sh -c 'mount --bind {THERE}/lib/{LOADER} /lib64/{LOADER} && \
         NO_COLOR=1 LD_LIBRARY_PATH={THERE}/lib exec {THERE}/ferroce {arguments}'"
    )
}

/// The libraries that the loader finds. libibverbs is loaded on demand, and is the guest's own.
fn libraries_of(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().expect("ldd runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = text.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    paths.map(PathBuf::from).collect()
}
