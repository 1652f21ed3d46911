//! `examples/write.rs`, unchanged: on the software stack, and on an RNIC. For rdma_rxe it is in
//! `tools/tests/rxe/hardware.rs`.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::process::Command;
use std::thread;
use std::time::Duration;

use ferroce_driver_test_support::rnic_stub::Stub;

#[allow(dead_code, reason = "the example has a main of its own")]
#[path = "../examples/write.rs"]
mod write;

/// Both ends, in two threads.
fn run([listens, connects]: [&'static str; 2], address: &'static str) {
    let there = thread::spawn(move || write::run(listens, false, address).map_err(|e| e.to_string()));
    // The other end may not listen yet.
    let connected = (0..100).any(|_| match write::run(connects, true, address) {
        Err(error) if error.to_string().contains("refused") => {
            thread::sleep(Duration::from_millis(50));
            false
        }
        end => end.map_or_else(|error| panic!("{error}"), |()| true),
    });
    assert!(connected, "nobody listens");
    there.join().unwrap().unwrap();
}

#[test]
fn in_software() {
    // Addresses of the loopback interface that no other test uses.
    run(["udp:127.71.0.1", "udp:127.71.0.2"], "127.71.0.1:7000");
}

/// The libibverbs of the tests, which is loaded by its name; so this test runs itself with a library path in which it is
/// first.
#[test]
fn on_a_card() {
    const INSIDE: &str = "FERROCE_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return run(["ibverbs:stub0", "ibverbs:stub1"], "127.71.0.3:7000");
    }
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "on_a_card", "--nocapture"]).env(INSIDE, "1");
    let output = command.env("LD_LIBRARY_PATH", stub.folder()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("hello from 10.0.0.3"), "{said}");
}
