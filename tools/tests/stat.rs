//! `ferroce stat`, as a user runs it. Other programs of ferroce may run on this machine.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::collections::HashSet;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ends::{Ferroce, LIMIT, Namespaces, Outcome, SERVER, VETH, alone, refused};
use ferroce_driver_test_support::patience::until;
use ferroce_driver_test_support::signal::Signal;
use serde_json::Value;

const PERF: &str = "perf write bw -D 60";

fn stat(arguments: &str) -> Outcome {
    Ferroce::start(None, &format!("stat {arguments}")).end()
}

/// The contexts of a process, as soon as they fulfil the condition.
fn contexts_when(process: &Ferroce, wanted: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let contexts = || {
        let outcome = stat(&format!("{} --json", process.pid()));
        if outcome.code == Some(0) { outcome.json().as_array().unwrap().clone() } else { Vec::new() }
    };
    until(LIMIT, || Some(contexts()).filter(|contexts| wanted(contexts)), || format!("{:#?}", contexts()))
}

fn counter(context: &Value, name: &str) -> u64 {
    context["counters"][name].as_u64().unwrap_or_else(|| panic!("no '{name}' in {context:#}"))
}

/// The sockets that a process has or had, in this user's directory.
fn sockets(pid: u32) -> Vec<PathBuf> {
    let entries = fs::read_dir(own_directory()).into_iter().flatten();
    let of_process =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(&format!("{pid}."));
    entries.map(|entry| entry.unwrap().path()).filter(of_process).collect()
}

fn own_directory() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if uid() == 0 => PathBuf::from("/run/ferroce"),
        Some(session) => PathBuf::from(session).join("ferroce"),
        None => PathBuf::from(format!("/tmp/ferroce-{}", uid())),
    }
}

fn uid() -> u32 {
    fs::metadata("/proc/self").unwrap().uid()
}

/// Both ends of a running measurement in one process.
fn running() -> Ferroce {
    let process = Ferroce::start(None, &format!("{PERF} -d loopback"));
    contexts_when(&process, |contexts| {
        contexts.len() == 2 && contexts.iter().all(|c| counter(c, "rcvd_pkts") > 0)
    });
    process
}

#[test]
fn counters_of_a_running_process_grow_and_go_with_it() {
    let _alone = alone();
    let process = running();
    let pid = process.pid();
    let labels = |context: &Value, name: &str| context["labels"][name].as_str().unwrap().to_owned();
    let before = contexts_when(&process, |contexts| contexts.len() == 2);
    let devices: HashSet<_> = before.iter().map(|context| labels(context, "device")).collect();
    assert_eq!(devices.len(), 2, "{before:#?}");
    for context in &before {
        assert_eq!(
            (labels(context, "pid"), labels(context, "driver")),
            (pid.to_string(), "loopback".to_owned())
        );
        assert_eq!(context["gauges"]["qps"]["rts"], 1, "{context:#}");
        assert_eq!(context["gauges"]["resource_in_use"]["qp"], 1, "{context:#}");
    }
    contexts_when(&process, |contexts| {
        contexts.len() == 2
            && contexts.iter().zip(&before).all(|(now, old)| {
                ["sent_pkts", "rcvd_pkts", "rx_bytes", "tx_bytes"]
                    .iter()
                    .all(|n| counter(now, n) > counter(old, n))
            })
    });

    // As text: zeros only with --all.
    let text = stat(&pid.to_string()).stdout;
    assert!(text.contains(&format!("(loopback), pid {pid}")) && text.contains("Packets sent."), "{text}");
    assert!(!text.contains("rx_icrc_encapsulated"), "{text}");
    let text = stat(&format!("{pid} --all")).stdout;
    assert!(text.contains("rx_icrc_encapsulated"), "{text}");
    let text = stat(&format!("{pid} --watch 1 --count 2")).stdout;
    let rates: Vec<&str> =
        text.lines().filter(|line| line.contains("sent_pkts") && line.contains("/s")).collect();
    assert_eq!(rates.len(), 2, "{text}");
    let lines = stat(&format!("{pid} --watch 1 --count 2 --json"));
    assert_eq!(lines.stdout.lines().count(), 2, "{lines:#?}");

    // By device, possibly with others.
    let by_device = stat("loopback0 --json").json();
    let devices: HashSet<_> = by_device.as_array().unwrap().iter().map(|c| labels(c, "device")).collect();
    assert_eq!(devices, HashSet::from(["loopback0".to_owned()]));

    process.interrupt();
    process.end();
    let gone = stat(&pid.to_string());
    assert_eq!(gone.code, Some(1), "{gone:#?}");
    assert_eq!(sockets(pid), Vec::<PathBuf>::new());
}

#[test]
fn the_text_for_prometheus_explains_each_metric_once_and_tells_contexts_apart() {
    let _alone = alone();
    let process = running();
    let outcome = stat(&format!("{} --prometheus", process.pid()));
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    let mut seen = HashSet::new();
    let mut values = 0;
    for line in outcome.stdout.lines() {
        // Names before a value, and those after HELP and TYPE, are unique.
        let key = match line.strip_prefix("# ") {
            Some(header) => header.split(' ').take(2).collect::<Vec<_>>().join(" "),
            None => {
                values += 1;
                let (series, value) = line.rsplit_once(' ').unwrap();
                value.parse::<u64>().unwrap_or_else(|error| panic!("{line}: {error}"));
                // About the search, not about a context.
                if !series.starts_with("ferroce_contexts") {
                    assert!(series.starts_with("ferroce_") && series.ends_with("\"}"), "{line}");
                    assert!(series.contains(&format!("pid=\"{}\"", process.pid())), "{line}");
                }
                series.to_owned()
            }
        };
        assert!(seen.insert(key), "twice: {line}");
    }
    assert!(values > 100, "{values} values: {}", outcome.stdout);
}

#[test]
fn a_killed_process_is_not_shown_and_what_it_left_is_removed() {
    let _alone = alone();
    let mut process = running();
    let pid = process.pid();
    process.kill();
    process.end();
    let left = sockets(pid);
    assert_eq!(left.len(), 2, "SIGKILL leaves the sockets");
    // Process ids are reused; this one can't exist.
    let never = left[0].with_file_name(format!("{}.0.x", u32::MAX));
    drop(UnixListener::bind(&never).unwrap());
    let gone = stat(&pid.to_string());
    assert_eq!(gone.code, Some(1), "{gone:#?}");
    assert!(!gone.stderr.contains("answer"), "{gone:#?}");
    assert_eq!(sockets(pid), Vec::<PathBuf>::new());
    assert!(!never.exists());
}

#[test]
fn a_process_that_does_not_answer_is_named_and_holds_nobody_up() {
    let _alone = alone();
    let process = running();
    let silent = sockets(process.pid())[0].with_file_name(format!("{}.9.silent", std::process::id()));
    let listener = UnixListener::bind(&silent).unwrap();
    let outcome = stat(&process.pid().to_string());
    drop(listener);
    fs::remove_file(&silent).unwrap();
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    assert!(
        outcome.stderr.contains(silent.to_str().unwrap()) && outcome.stderr.contains("poll"),
        "{outcome:#?}"
    );
    assert!(outcome.took < Duration::from_secs(20), "{outcome:#?}");
}

/// The answer of a server at `address` to these bytes.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_prometheus_server_is_answered_over_http() {
    let _alone = alone();
    let process = running();
    let mut server = Ferroce::start(None, &format!("stat {} --listen 0", process.pid()));
    let address = address_of(&mut server);
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let answer = ask(&address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert!(body.contains("# TYPE ferroce_sent_pkts_total counter\n"), "{body}");
    let answer = ask(&address, b"HEAD /metrics?x=1 HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n"), "{answer}");
    let long = [b"GET /metrics HTTP/1.1\r\nX: ".as_slice(), &[b'x'; 9000]].concat();
    for (request, status) in [
        (b"GET / HTTP/1.1\r\n\r\n".as_slice(), "404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", "405"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "400"),
        (&long[..8192], "400"),
    ] {
        let answer = ask(&address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
    }

    // A client that sends nothing, and one that closes, do not block the next one.
    let silent = TcpStream::connect(&address).unwrap();
    drop(TcpStream::connect(&address).unwrap());
    assert!(ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    drop(silent);

    // A process that does not answer is counted, for an alert.
    let answer = ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(
        answer.contains("\nferroce_contexts 2\n") && answer.contains("\nferroce_contexts_unread 0\n"),
        "{answer}"
    );
    process.signal(Signal::STOP);
    let answer = ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n");
    process.signal(Signal::CONT);
    assert!(
        answer.contains("\nferroce_contexts 0\n") && answer.contains("\nferroce_contexts_unread 2\n"),
        "{answer}"
    );

    // Without a process there are no metrics, and that is no error.
    process.interrupt();
    process.end();
    let answer = ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\nferroce_contexts 0\n"), "{answer}");
    server.interrupt();
    assert_eq!(server.end().code, Some(0));
}

#[test]
fn both_ends_over_af_xdp_and_a_server_that_waits() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(4200) else { return };
    let server = Ferroce::server(&pair.a, &format!("{PERF} -d {VETH}"));
    let waiting = contexts_when(&server, |contexts| contexts.len() == 1);
    assert_eq!(
        (&waiting[0]["labels"]["device"], &waiting[0]["labels"]["driver"]),
        (&VETH.into(), &"af_xdp".into())
    );
    assert_eq!(waiting[0]["gauges"]["resource_in_use"]["qp"], 0, "{waiting:#?}");

    let client = Ferroce::start(Some(&pair.b), &format!("{PERF} -d {VETH} {SERVER}"));
    for (end, name) in [(&client, "rcvd_pkts"), (&server, "rx_write_requests")] {
        contexts_when(end, |contexts| contexts.iter().any(|context| counter(context, name) > 0));
    }
    let unknown = stat("no-such-device");
    assert_eq!(unknown.code, Some(1), "{unknown:#?}");
    for named in ["'no-such-device'", VETH, &server.pid().to_string(), &client.pid().to_string()] {
        assert!(unknown.stderr.contains(named), "no '{named}' in {}", unknown.stderr);
    }
}

/// A user without rights.
const NOBODY: u32 = 65534;

#[test]
fn an_ordinary_user_sees_their_own_and_root_sees_them_too() {
    let _alone = alone();
    if uid() != 0 {
        println!("skipped: needs root, to become somebody else");
        return;
    }
    // The build's folder may not be accessible to others.
    let program = std::env::temp_dir().join(format!("ferroce-stat-test-{}", std::process::id()));
    fs::copy(env!("CARGO_BIN_EXE_ferroce"), &program).unwrap();
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let by_nobody = |arguments: &str| {
        let mut command = Command::new(&program);
        command.uid(NOBODY).gid(NOBODY).current_dir("/").env_remove("XDG_RUNTIME_DIR");
        Ferroce::spawn(command, arguments)
    };
    let of_root = running();
    let of_nobody = by_nobody(&format!("{PERF} -d loopback"));
    contexts_when(&of_nobody, |contexts| contexts.len() == 2);
    let directory = PathBuf::from(format!("/tmp/ferroce-{NOBODY}"));
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);

    let seen = by_nobody(&format!("stat {} --json", of_nobody.pid())).end().json();
    assert_eq!(seen.as_array().unwrap().len(), 2, "{seen:#}");
    let unseen = by_nobody(&format!("stat {}", of_root.pid())).end();
    assert_eq!(unseen.code, Some(1), "{unseen:#?}");
    assert!(unseen.stderr.contains("permission denied"), "{unseen:#?}");
    of_nobody.interrupt();
    of_nobody.end();

    // A folder that another user could have created is not used, without other effects.
    fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
    let unshown = by_nobody("perf write bw -d loopback -n 10").end();
    fs::set_permissions(&directory, Permissions::from_mode(0o700)).unwrap();
    // It remains if killed processes of others have left files.
    let _ = fs::remove_dir(&directory);
    fs::remove_file(Path::new(&program)).unwrap();
    assert_eq!(unshown.code, Some(0), "{unshown:#?}");
    assert!(unshown.stderr.contains("0755") && unshown.stderr.contains("ferroce stat"), "{unshown:#?}");
}

/// Files and directories that are removed on drop.
#[derive(Default)]
struct Litter(Vec<PathBuf>);

impl Litter {
    fn path(&mut self, path: impl Into<PathBuf>) -> PathBuf {
        self.0.push(path.into());
        self.0.last().unwrap().clone()
    }

    /// A socket in `directory` that sends `text` to each reader, or nothing.
    fn socket(&mut self, directory: &Path, name: &str, text: Option<String>) -> PathBuf {
        let path = self.path(directory.join(format!("{}.{name}", std::process::id())));
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            let mut readers = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if let Some(text) = &text {
                    // The reader may have closed its end.
                    let _ = stream.write_all(text.as_bytes());
                } else {
                    readers.push(stream);
                }
            }
        });
        path
    }
}

impl Drop for Litter {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            let _ = fs::remove_file(path).or_else(|_| fs::remove_dir(path));
        }
    }
}

/// A text with this many metrics.
fn text(labels: &str, metrics: usize) -> String {
    let of = |n| format!("# TYPE ferroce_m{n} gauge\nferroce_m{n}{{{labels}}} 1\n");
    (0..metrics).map(of).collect()
}

#[test]
fn what_others_put_into_tmp_stops_nobody() {
    let _alone = alone();
    let process = running();
    let mut litter = Litter::default();
    // No process has such a number.
    let mut next = u64::from(4_000_000_000 + std::process::id() % 1_000_000 * 10);
    let mut named = || {
        next += 1;
        litter.path(format!("/tmp/ferroce-{next}"))
    };
    let [circle, dangling, fifo, of_other, elsewhere] = [named(), named(), named(), named(), named()];
    symlink(&circle, &circle).unwrap();
    symlink("/no/such/directory", &dangling).unwrap();
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    fs::create_dir(&of_other).unwrap();
    symlink(own_directory(), &elsewhere).unwrap();
    let skipped = [&circle, &dangling, &fifo, &of_other, &elsewhere];

    let outcome = stat(&process.pid().to_string());
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    assert!(outcome.stdout.contains(&format!("pid {}", process.pid())), "{outcome:#?}");
    for path in skipped {
        assert!(outcome.stderr.contains(path.to_str().unwrap()), "{}: {outcome:#?}", path.display());
    }
    let mut server = Ferroce::start(None, &format!("stat {} --listen 127.0.0.1:0", process.pid()));
    let address = address_of(&mut server);
    for _ in 0..2 {
        let answer = ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n");
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("ferroce_sent_pkts_total{"),
            "{answer}"
        );
    }
    server.signal(Signal::TERM);
    let server = server.end();
    assert_eq!(server.code, Some(0));
    // A repeated problem is reported once.
    assert_eq!(server.stderr.matches(circle.to_str().unwrap()).count(), 1, "{server:#?}");
}

/// The address in the log of a server that listens on a port that the kernel chose.
fn address_of(server: &mut Ferroce) -> String {
    let said = server.ready();
    said.split("http://").nth(1).and_then(|rest| rest.split('/').next()).unwrap().to_owned()
}

/// One socket with 8,000 labels, and 40 with 15,000 metrics each.
#[test]
fn too_much_input_is_refused_at_once() {
    let _alone = alone();
    let process = running();
    let refuses = |name: &str, reason: &str| {
        let outcome = stat(&process.pid().to_string());
        assert_eq!(outcome.code, Some(0), "{outcome:#?}");
        assert!(outcome.took < Duration::from_secs(20), "{:?}", outcome.took);
        let said = outcome.stderr.lines().find(|line| line.contains(name)).unwrap_or_default();
        assert!(said.contains(reason) && said.len() < 1000, "{said}");
        outcome
    };
    let mut litter = Litter::default();
    let labels: String = (0..8_000).map(|n| format!("l{n}=\"x\",")).collect();
    litter.socket(&own_directory(), "0.labels", Some(text(&labels, 2)));
    refuses("0.labels", "at most 4096 bytes");
    drop(litter);

    let mut litter = Litter::default();
    let many = text("device=\"x\"", 15_000);
    for number in 0..40 {
        litter.socket(&own_directory(), &format!("{number}.many"), Some(many.clone()));
    }
    let outcome = refuses(".many", "more than a context does");
    // 16 of them are listed by name.
    assert_eq!(outcome.stderr.matches(".many").count(), 16, "{outcome:#?}");
    assert!(outcome.stderr.contains("24 more are left out"), "{outcome:#?}");
}

#[test]
fn a_signal_ends_it_while_it_waits() {
    let _alone = alone();
    let process = running();
    let mut litter = Litter::default();
    litter.socket(&own_directory(), "0.silent", None);
    for (arguments, signal, status) in [
        ("", Signal::TERM, 130),
        ("--watch 100", Signal::INT, 130),
        // For a server, a signal is the normal end.
        ("--listen 127.0.0.1:0", Signal::TERM, 0),
        ("--listen 0", Signal::INT, 0),
    ] {
        let waiting = Ferroce::start(None, &format!("stat {} {arguments}", process.pid()));
        thread::sleep(Duration::from_millis(500));
        waiting.signal(signal);
        let outcome = waiting.end();
        assert_eq!(outcome.code, Some(status), "{arguments}: {outcome:#?}");
        assert!(outcome.took < Duration::from_secs(1), "{arguments}: {outcome:#?}");
    }
}

#[test]
fn who_says_it_is_the_kernels_word() {
    let _alone = alone();
    let mut litter = Litter::default();
    let process = running();
    let own = std::process::id().to_string();
    let claim = "device=\"claim\x1b[2J\",pid=\"1\",uid=\"0\"";
    litter.socket(&own_directory(), "0.claim", Some(text(claim, 2)));
    let told = stat(&format!("{own} --json")).json();
    let labels = &told[0]["labels"];
    assert_eq!(
        (&labels["pid"], &labels["uid"]),
        (&own.as_str().into(), &uid().to_string().into()),
        "{told:#}"
    );
    for format in ["", "--prometheus"] {
        let outcome = stat(&format!("{own} {format}"));
        assert!(outcome.stdout.contains("claim") && !outcome.stdout.contains('\x1b'), "{outcome:#?}");
    }
    assert_eq!(stat("1 --json").code, Some(1));

    if uid() != 0 {
        println!("skipped in part: needs root, to give a directory away");
        return;
    }
    // Two in a directory of another user: one that root listens on, and a link to one of root's.
    let directory = litter.path(format!("/tmp/ferroce-{}", 3_000_000_000 + std::process::id()));
    fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
    let mut inside = Litter::default();
    let foreign = inside.socket(&directory, "0.foreign", Some(text("device=\"foreign\"", 1)));
    let link = inside.path(directory.join("1.0.link"));
    symlink(&sockets(process.pid())[0], &link).unwrap();
    chown(&directory, Some(3_000_000_000 + std::process::id()), None).unwrap();
    let outcome = stat(&process.pid().to_string());
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    for (path, reason) in [(&foreign, "of uid 0 listens there"), (&link, "is not a socket")] {
        let said = outcome.stderr.lines().find(|line| line.contains(path.to_str().unwrap()));
        assert!(said.is_some_and(|said| said.contains(reason)), "{outcome:#?}");
    }
}

#[test]
fn clients_that_say_nothing_keep_no_scrape_out() {
    let _alone = alone();
    let process = running();
    let mut server = Ferroce::start(None, &format!("stat {} --listen 127.0.0.1:0", process.pid()));
    let address = address_of(&mut server);
    let idle: Vec<_> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    // One byte after the other.
    let mut slow = TcpStream::connect(&address).unwrap();
    let started = Instant::now();
    for _ in 0..3 {
        slow.write_all(b"G").unwrap();
        let answer = ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    while slow.write_all(b"x").is_ok() {
        assert!(started.elapsed() < Duration::from_secs(20), "it takes one byte after the other for ever");
        thread::sleep(Duration::from_millis(100));
    }
    drop(idle);
}

#[test]
fn bad_input_is_named() {
    let _alone = alone();
    refused(&[
        ("stat --watch 0", &["'0'", "86400"]),
        ("stat --count 3", &["--watch"]),
        ("stat --listen host", &["'host'", "as 8080"]),
        ("stat --json --prometheus", &["--json", "--prometheus"]),
        ("stat --listen 127.0.0.1:1 --watch 1", &["--listen", "--watch"]),
    ]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let outcome = stat(&format!("--listen {address}"));
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stderr.contains(&address), "{outcome:#?}");
}

/// Root of a user namespace has the sockets of the user that it is outside, where that user finds them, too, and no
/// access to those of root.
#[test]
fn root_of_a_user_namespace_has_its_own_sockets() {
    if !ends::is_root() {
        return println!("skipped: only root can become another user");
    }
    if !ends::has_user_namespaces() {
        return;
    }
    // A user id that no other test and no session uses.
    const UID: u32 = 64_999;
    let user = format!("setpriv --reuid {UID} --regid {UID} --clear-groups env -u XDG_RUNTIME_DIR");
    // In a place that this user can access: the checkout may be in a folder that is closed to others.
    let ferroce = std::env::temp_dir().join(format!("ferroce-of-all-{}", std::process::id()));
    fs::copy(env!("CARGO_BIN_EXE_ferroce"), &ferroce).unwrap();
    let run = |what: &str| {
        let command = format!("cd / && {user} unshare --map-root-user '{}' {what}", ferroce.display());
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, stderr) = run("pingpong -d loopback -n 10");
    let folder = format!("/tmp/ferroce-{UID}");
    let is_there = fs::remove_dir(&folder);
    assert_eq!(status, Some(0), "{stderr}");
    assert!(!stderr.contains("will not show this context") && !stderr.contains("/run/ferroce"), "{stderr}");
    assert!(is_there.is_ok(), "{folder}: {is_there:?}");
    let (_, stderr) = run("stat");
    fs::remove_file(&ferroce).unwrap();
    assert!(stderr.contains("no running ferroce process") && !stderr.contains("WARN"), "{stderr}");
}
