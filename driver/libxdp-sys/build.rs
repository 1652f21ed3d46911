//! Links with the system's libxdp, statically: the command then runs where it is not installed.

use std::path::Path;
use std::process::{Command, exit};

/// In the order in which they need each other.
const ARCHIVES: [&str; 4] = ["xdp", "bpf", "elf", "z"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Only xsk-rs needs it. Without the driver AF_XDP this crate is built as a member of the workspace alone.
    if std::env::var_os("CARGO_FEATURE_USE_CC_BUILD").is_none() {
        return;
    }
    for name in ARCHIVES {
        let file = format!("lib{name}.a");
        let found = Command::new("cc").arg(format!("-print-file-name={file}")).output();
        let found = match &found {
            Ok(output) => Path::new(str::from_utf8(&output.stdout).unwrap_or_default().trim_end()),
            Err(error) => fail(&format!("no C compiler: {error}")),
        };
        // Without the file, the compiler answers with the bare name.
        let Some(folder) = found.parent().filter(|_| found.is_absolute()) else {
            fail(&format!("no {file}, which the driver AF_XDP is linked with"));
        };
        println!("cargo::rustc-link-search=native={}", folder.display());
        println!("cargo::rustc-link-lib=static={name}");
    }
}

fn fail(reason: &str) -> ! {
    println!("cargo::error={reason}; on Debian: apt-get install gcc libxdp-dev (or build without `af_xdp`)");
    exit(1)
}
