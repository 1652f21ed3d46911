//! The errors without a shim, with an unsuitable one, or without DPDK. A program loads the shim once, so each case is a
//! process of its own: a copy of this program with the shim in its directory.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, process};

use ferroce_dpdk_sys::{SHIM, load};

const ROLE: &str = "FERROCE_TEST_LOADS";

#[test]
fn no_shim() {
    let scratch = Scratch::new("none");
    let said = scratch.load();
    assert!(said.starts_with("libferroce_dpdk.so: cannot open shared object file"), "{said}");
    assert!(said.contains("Debian: dpdk") && said.contains("`./do dpdk`"), "{said}");
}

#[test]
fn a_library_that_is_no_shim() {
    let scratch = Scratch::new("other");
    scratch.compile("int something_else;", &[]);
    let said = scratch.load();
    assert!(said.contains("is not of this release of ferroce") && said.contains("ferroce_dpdk"), "{said}");
}

#[test]
fn a_shim_of_another_release() {
    let scratch = Scratch::new("release");
    scratch.compile("struct { unsigned abi, size; } ferroce_dpdk = { 77, 8 };", &[]);
    let said = scratch.load();
    assert!(said.contains("it has ABI 77 with 8 bytes, and it should have ABI"), "{said}");
    assert!(said.contains(&*scratch.0.join(SHIM).to_string_lossy()), "{said}");
}

#[test]
fn no_dpdk_behind_the_shim() {
    let scratch = Scratch::new("behind");
    // A library that is removed after the shim has been linked with it.
    let librte = scratch.0.join("librte_of_tests.so.1");
    scratch.compile_to(&librte, "int rte_of_tests;", &["-Wl,-soname,librte_of_tests.so.1"]);
    scratch
        .compile("extern int rte_of_tests; int *ferroce_dpdk = &rte_of_tests;", &[librte.to_str().unwrap()]);
    fs::remove_file(librte).unwrap();
    let said = scratch.load();
    assert!(said.starts_with("librte_of_tests.so.1: cannot open shared object file"), "{said}");
    assert!(said.contains("needs DPDK 22.11 or later on this system"), "{said}");
}

/// Not a test: the code of such a process.
#[test]
fn role() {
    if env::var_os(ROLE).is_some() {
        println!("said: {}", load().expect_err("this shim can't serve"));
    }
}

/// A directory with a copy of this program.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let folder = env::temp_dir().join(format!("ferroce-loading-{name}-{}", process::id()));
        fs::create_dir(&folder).unwrap();
        // Copied by another process: if this process wrote the copy, a child forked by another test could have it open
        // for writing, and then it can't be executed ("Text file busy").
        let program = env::current_exe().unwrap();
        assert!(Command::new("cp").arg(program).arg(folder.join("program")).status().unwrap().success());
        Scratch(folder)
    }

    fn compile(&self, source: &str, arguments: &[&str]) {
        self.compile_to(&self.0.join(SHIM), source, arguments);
    }

    fn compile_to(&self, output: &Path, source: &str, arguments: &[&str]) {
        let file = self.0.join("source.c");
        fs::write(&file, source).unwrap();
        let compiler = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(output)
            .arg(&file)
            .args(arguments)
            .status();
        assert!(compiler.unwrap().success());
    }

    /// The program's output there, without shims from the paths of the system's loader.
    fn load(&self) -> String {
        let output = Command::new(self.0.join("program"))
            .args(["--exact", "role", "--nocapture"])
            .env(ROLE, "1")
            .env_remove("LD_LIBRARY_PATH")
            .output()
            .unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        let said = output.lines().find_map(|line| line.split_once("said: "));
        said.unwrap_or_else(|| panic!("{output}")).1.to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
