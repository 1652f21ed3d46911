//! Links with the system's libxdp statically, so the program runs on systems without it.

use std::path::Path;
use std::process::{Command, exit};

/// In the order of their dependencies.
const ARCHIVES: [&str; 5] = ["xdp", "bpf", "elf", ZSTD, "z"];
/// Needed by libelf since 0.189, whose package depends on it.
const ZSTD: &str = "zstd";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Only xsk-rs needs it. Without AF_XDP this crate is built only as a member of the workspace.
    if std::env::var_os("CARGO_FEATURE_USE_CC_BUILD").is_none() {
        return;
    }
    let [host, target] = ["HOST", "TARGET"].map(std::env::var_os);
    if host != target {
        fail("the driver AF_XDP is built for the machine that it is built on");
    }
    for name in ARCHIVES {
        match folder_of(name) {
            Some(folder) => {
                println!("cargo::rustc-link-search=native={folder}");
                println!("cargo::rustc-link-lib=static={name}");
            }
            None if name == ZSTD => {}
            None => fail(&format!("no lib{name}.a, which the driver AF_XDP is linked with")),
        }
    }
}

/// The directory in which the C compiler finds a library.
fn folder_of(name: &str) -> Option<String> {
    let output = Command::new("cc").arg(format!("-print-file-name=lib{name}.a")).output();
    let output = output.unwrap_or_else(|error| fail(&format!("no C compiler: {error}")));
    let found = Path::new(str::from_utf8(&output.stdout).ok()?.trim_end());
    // If the file is missing, the compiler prints the bare name.
    Some(found.parent().filter(|_| found.is_absolute())?.to_str()?.to_owned())
}

fn fail(reason: &str) -> ! {
    println!("cargo::error={reason}; on Debian: apt-get install gcc libxdp-dev (or build without `af_xdp`)");
    exit(1)
}
