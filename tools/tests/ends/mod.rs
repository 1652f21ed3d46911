//! `ferroce` processes as the ends of a measurement, in one process or in two network namespaces.
#![allow(dead_code, reason = "no test program uses all of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use ferroce_driver_test_support::patience::until;
use ferroce_driver_test_support::signal::{Signal, signal};

/// The longest time of any test here.
pub(crate) const LIMIT: Duration = Duration::from_secs(90);
/// The server of a pair of namespaces.
pub(crate) const SERVER: &str = "10.9.0.1";

/// Whether this process is root.
pub(crate) fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    uids.split_whitespace().nth(1) == Some("0")
}

/// Whether user namespaces are available; the kernel refuses them in a chroot, and some containers everywhere. They are
/// required in CI.
pub(crate) fn has_user_namespaces() -> bool {
    let made = Command::new("unshare").args(["--map-root-user", "--net", "true"]).output().unwrap();
    if made.status.success() || std::env::var_os("CI").is_some() {
        return true;
    }
    println!("skipped: no user namespace can be made here: {}", String::from_utf8_lossy(&made.stderr).trim());
    false
}

/// Whether there is a command of this name.
pub(crate) fn has(command: &str) -> bool {
    Command::new(command).arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// Two poll loops at a time suffice for two cores.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running `ferroce`. It is killed on drop.
pub(crate) struct Ferroce {
    child: Child,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
    /// Lines of stderr that have not been examined.
    lines: Receiver<String>,
}

/// How it ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
}

impl Ferroce {
    /// Starts `ferroce`, in a network namespace if one is given.
    pub(crate) fn start(namespace: Option<&str>, arguments: &str) -> Ferroce {
        let command = match namespace {
            None => Command::new(env!("CARGO_BIN_EXE_ferroce")),
            Some(namespace) => {
                // The command executes ferroce, so the pid is ferroce's.
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, env!("CARGO_BIN_EXE_ferroce")]);
                command
            }
        };
        Ferroce::spawn(command, arguments)
    }

    /// Starts a command that executes ferroce.
    pub(crate) fn spawn(mut command: Command, arguments: &str) -> Ferroce {
        command.args(arguments.split_whitespace()).env("RUST_LOG", "info").env("NO_COLOR", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("ferroce starts");
        let (notify, lines) = mpsc::channel();
        let mut out = child.stdout.take().unwrap();
        let stdout = thread::spawn(move || {
            let mut text = String::new();
            out.read_to_string(&mut text).unwrap();
            text
        });
        let err = BufReader::new(child.stderr.take().unwrap());
        let stderr = thread::spawn(move || {
            let mut text = String::new();
            for line in err.lines() {
                let line = line.unwrap();
                // The receiver is gone if the test does not wait for the end.
                let _ = notify.send(line.clone());
                text += &line;
                text.push('\n');
            }
            text
        });
        Ferroce { child, stdout: Some(stdout), stderr: Some(stderr), lines }
    }

    /// Starts a server and waits until it accepts clients.
    pub(crate) fn server(namespace: &str, arguments: &str) -> Ferroce {
        let mut server = Ferroce::start(Some(namespace), arguments);
        server.ready();
        server
    }

    /// Waits until it accepts clients. Returns the line that says so.
    pub(crate) fn ready(&mut self) -> String {
        self.says("waiting for ", || {})
    }

    /// Waits for these words on stderr, and calls `meanwhile` repeatedly. Returns the whole line.
    pub(crate) fn says(&mut self, words: &str, mut meanwhile: impl FnMut()) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        while Instant::now() < deadline {
            match self.lines.recv_timeout(Duration::from_millis(5)) {
                Ok(line) if line.contains(words) => return line,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => meanwhile(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.kill();
        panic!("it never says '{words}': {:?}", self.collect(Duration::ZERO));
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// SIGINT.
    pub(crate) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    pub(crate) fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Outcome {
        let started = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if started.elapsed() > LIMIT {
                self.kill();
                panic!("still running after {LIMIT:?}: {:?}", self.collect(LIMIT));
            }
            thread::sleep(Duration::from_millis(2));
        }
        self.collect(started.elapsed())
    }

    fn collect(&mut self, took: Duration) -> Outcome {
        let code = self.child.wait().unwrap().code();
        let [stdout, stderr] =
            [&mut self.stdout, &mut self.stderr].map(|reader| reader.take().unwrap().join().unwrap());
        Outcome { code, stdout, stderr, took }
    }
}

impl Drop for Ferroce {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Outcome {
    /// The JSON report of a successful run.
    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, Some(0), "{self:#?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// Runs `command` at both ends over AF_XDP, with `-d` and the host added. Returns server and client.
pub(crate) fn both(pair: &Namespaces, command: &str) -> [Outcome; 2] {
    let command = format!("{command} -d {VETH}");
    let server = Ferroce::server(&pair.a, &command);
    let client = Ferroce::start(Some(&pair.b), &format!("{command} {SERVER}")).end();
    if client.code != Some(0) {
        // It may not have noticed.
        server.interrupt();
    }
    let server = server.end();
    if [client.code, server.code] != [Some(0); 2] {
        println!("{command}: server {server:#?}, client {client:#?}");
    }
    [server, client]
}

/// Runs commands that must be rejected with status 2; stderr must contain these words.
pub(crate) fn refused(cases: &[(&str, &[&str])]) {
    for (arguments, words) in cases {
        let outcome = Ferroce::start(None, arguments).end();
        assert_eq!(outcome.code, Some(2), "{arguments}: {outcome:#?}");
        for word in *words {
            assert!(outcome.stderr.contains(word), "{arguments}: no '{word}' in {}", outcome.stderr);
        }
    }
}

/// Waits until the interface of a namespace has sent 1000 more packets than `before`: the measurement is running.
pub(crate) fn wait_for_traffic(namespace: &str, before: u64) {
    let has_begun = || (sent_packets(namespace) >= before + 1000).then_some(());
    until(Duration::from_secs(30), has_begun, || format!("traffic from {namespace}"));
}

/// The number of packets that the interface of a namespace has sent.
pub(crate) fn sent_packets(namespace: &str) -> u64 {
    let arguments = ["-n", namespace, "-j", "-s", "link", "show", VETH];
    let shown = Command::new("ip").args(arguments).output().unwrap();
    let links: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    links[0]["stats64"]["tx"]["packets"].as_u64().expect("a counter")
}

/// Two namespaces whose interfaces have their link-local addresses. The kernel takes a while for these, and without
/// them the indices of the GID table differ.
pub(crate) fn pair(mtu: u32) -> Option<Namespaces> {
    let pair = Namespaces::new(mtu)?;
    for namespace in [&pair.a, &pair.b] {
        let arguments = ["-n", namespace, "-6", "address", "show", "dev", VETH, "scope", "link"];
        let shown = || {
            let shown = Command::new("ip").args(arguments).output().unwrap().stdout;
            String::from_utf8_lossy(&shown).into_owned()
        };
        let is_there = |shown: String| shown.contains("fe80::") && !shown.contains("tentative");
        let address = || is_there(shown()).then_some(());
        let missing = || format!("a link-local address in {namespace}: {}", shown());
        until(Duration::from_secs(10), address, missing);
    }
    Some(pair)
}
