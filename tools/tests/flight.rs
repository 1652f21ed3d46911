//! `ferroce flight` and `ferroce stat` with ranks that are late, hang or die. Other programs of ferroce may run on this
//! machine.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use ends::{LIMIT, alone};
use ferroce_driver_test_support::patience::until;
use ferroce_driver_test_support::signal::{Signal, signal};
use serde_json::Value;

const FERROCE: &str = env!("CARGO_BIN_EXE_ferroce");

/// Ranks of `ferroce collective`, started as by another launcher. They are killed on drop.
struct Ranks(Vec<Child>);

impl Ranks {
    fn start(count: u32, arguments: &str, folder: Option<&Path>) -> Ranks {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let start = |rank: u32| {
            let mut command = Command::new(FERROCE);
            command.arg("collective").args(arguments.split_whitespace());
            command.env("FERROCE_UNIQUE_ID", format!("ferroce1:127.0.0.1:{port}:00000000000000aa"));
            command.env("FERROCE_RANK", rank.to_string()).env("FERROCE_SIZE", count.to_string());
            command.env("LOCAL_WORLD_SIZE", count.to_string());
            if let Some(folder) = folder {
                command.env("FERROCE_FLIGHT_DIR", folder);
            }
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        Ranks((0..count).map(start).collect())
    }

    fn ids(&self) -> Vec<String> {
        self.0.iter().map(|child| child.id().to_string()).collect()
    }

    /// The report of `ferroce flight` about the ranks.
    fn report(&self) -> Value {
        let ids = self.ids();
        let output = ferroce(["flight", "--json"].into_iter().chain(ids.iter().map(String::as_str)));
        // A rank that has not started has no recorder.
        let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        found[0].clone()
    }

    /// The report, as soon as it fulfils the condition.
    fn report_when(&self, wanted: impl Fn(&Value) -> bool) -> Value {
        until(
            LIMIT,
            || Some(self.report()).filter(|report| wanted(report)),
            || format!("{:#}", self.report()),
        )
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn ferroce<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Output {
    Command::new(FERROCE).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The finding with this name, if there is exactly one.
fn finding<'a>(report: &'a Value, name: &str) -> Option<&'a Value> {
    let mut all = report["findings"].as_array()?.iter().filter(|found| found["finding"] == name);
    all.next().filter(|_| all.next().is_none())
}

fn calls(report: &Value) -> u64 {
    report["ranks"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|rank| rank["calls"].as_u64())
        .max()
        .unwrap_or(0)
}

/// The child processes of a process, by rank: oldest first.
fn children_of(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// A directory of this test, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("ferroce-test-{name}-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        Folder(folder)
    }

    fn files(&self) -> Vec<PathBuf> {
        let is_whole = |path: &PathBuf| path.extension().is_none_or(|end| end != "part");
        fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).filter(is_whole).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_rank_that_is_late_is_named_by_flight_and_by_stat() {
    let _alone = alone();
    for memory in ["off", "required"] {
        // Far longer than delays caused by the scheduler.
        let arguments =
            format!("all_reduce -b 1K -e 1K -n 100000 -w 0 -c 0 --shared-memory {memory} --late 2:50ms:10");
        let ranks = Ranks::start(4, &arguments, None);
        let report = ranks.report_when(|report| {
            calls(report) >= 100 && finding(report, "late").is_some_and(|late| late["rank"] == 2)
        });
        let late = finding(&report, "late").unwrap();
        assert!(late["text"].as_str().unwrap().starts_with("rank 2 began last in "), "{late}");
        let stat = text(&ferroce(["stat"]).stdout);
        let id = report["communicator"].as_str().unwrap();
        let line = format!("communicator {id}: rank 2 began last in ");
        assert!(stat.contains(&line), "no '{line}' in\n{stat}");
        let title = format!("rank 2 of 4 of communicator {id}");
        assert!(stat.contains(&title), "no '{title}' in\n{stat}");
        let prometheus = text(&ferroce(["stat", "--prometheus"]).stdout);
        let labels = format!("communicator=\"{id}\",rank=\"0\",size=\"4\"");
        for name in ["operations_total", "under_way", "failed", "since_poll_ns"] {
            let found = prometheus.lines().any(|line| {
                line.starts_with(&format!("ferroce_collective_{name}{{")) && line.contains(&labels)
            });
            assert!(found, "no {name} with {labels} in\n{prometheus}");
        }
        let has_peers = prometheus.contains(&format!("{labels},peer=\"1\""));
        assert!(memory == "required" || has_peers, "{prometheus}");
    }
}

/// A rank that starts on time, and is stopped wherever it is: mostly in the middle of an operation.
#[test]
fn a_rank_that_is_stopped_now_and_then_is_named() {
    let _alone = alone();
    for memory in ["off", "required"] {
        let arguments = format!("all_reduce -b 64K -e 64K -n 1000000 -w 0 -c 0 --shared-memory {memory}");
        let ranks = Ranks::start(2, &arguments, None);
        ranks.report_when(|report| calls(report) >= 50);
        let stopped = ranks.0[1].id();
        let report = || {
            signal(stopped, Signal::STOP);
            thread::sleep(Duration::from_millis(300));
            signal(stopped, Signal::CONT);
            thread::sleep(Duration::from_millis(150));
            let report = ranks.report();
            finding(&report, "away").is_some_and(|away| away["rank"] == 1).then_some(report)
        };
        let report = until(LIMIT, report, || format!("{:#}", ranks.report()));
        let away = finding(&report, "away").unwrap()["text"].as_str().unwrap();
        assert!(away.starts_with("rank 1 was off its core while it waited for operations: for "), "{away}");
    }
}

/// The reader gets the recordings and no other information.
#[test]
fn a_hanging_rank_is_found_from_recordings_alone() {
    let _alone = alone();
    let folder = Folder::new("hangs");
    let ranks =
        Ranks::start(4, "all_reduce -b 64K -e 64K -n 1000000 -w 0 -c 0 --patience 60s", Some(&folder.0));
    ranks.report_when(|report| calls(report) >= 50);
    // The memory of a hanging rank can still be read.
    signal(ranks.0[1].id(), Signal::STOP);
    let report = ranks.report_when(|report| {
        let text = finding(report, "hangs").and_then(|found| found["text"].as_str());
        // Once all of them have waited for long.
        text.is_some_and(|text| text.starts_with("ranks 0, 2 and 3 wait for rank 1 in "))
    });
    let found = finding(&report, "hangs").unwrap()["text"].as_str().unwrap();
    assert!(found.contains("all_reduce of 16384 f32"), "{found}");
    assert!(found.contains("it computes, hangs or is stopped"), "{found}");
    // The other ranks write files on request; the missing one is evidence, too.
    for rank in [0, 2, 3] {
        signal(ranks.0[rank].id(), Signal::USR1);
    }
    until(LIMIT, || (folder.files().len() == 3).then_some(()), || format!("{:?}", folder.files()));
    let svg = folder.0.join("line.svg");
    let output = ferroce(["flight", folder.0.to_str().unwrap(), "--svg", svg.to_str().unwrap()]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for expected in
        ["no recording of 1 ranks: 1", "wait for rank 1 in ", "it has no recording here", "all_reduce"]
    {
        assert!(table.contains(expected), "no '{expected}' in\n{table}");
    }
    let drawn = fs::read_to_string(&svg).unwrap();
    assert!(
        drawn.starts_with("<svg") && drawn.contains("rank") && drawn.matches("<rect").count() > 20,
        "{drawn}"
    );
    signal(ranks.0[1].id(), Signal::CONT);
}

#[test]
fn ranks_that_fail_leave_recordings_that_name_the_one_that_died() {
    let _alone = alone();
    let folder = Folder::new("fails");
    let mut ranks =
        Ranks::start(3, "all_gather -b 64K -e 64K -n 1000000 -w 0 -c 0 --patience 1s", Some(&folder.0));
    ranks.report_when(|report| calls(report) >= 50);
    ranks.0[2].kill().unwrap();
    for rank in [0, 1] {
        let child = &mut ranks.0[rank];
        let status = until(LIMIT, || child.try_wait().unwrap(), || format!("rank {rank} goes on"));
        assert_eq!(status.code(), Some(1), "rank {rank}");
    }
    assert_eq!(folder.files().len(), 2, "{:?}", folder.files());
    let table = text(&ferroce(["flight", folder.0.to_str().unwrap()]).stdout);
    for rank in [0, 1] {
        let line = table.lines().find(|line| line.starts_with(&format!("  rank   {rank}"))).unwrap();
        let due = ["has failed in call ", "all_gather of ", " of 1 steps done, waits for 2"];
        assert!(due.iter().all(|due| line.contains(due)), "{table}");
    }
    let output = ferroce(["flight", "--json", folder.0.to_str().unwrap()]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [report] = &report.as_array().unwrap()[..] else { panic!("{report:#}") };
    assert_eq!((&report["size"], &report["missing"]), (&3.into(), &serde_json::json!([2])), "{report:#}");
    let texts: Vec<&str> =
        report["findings"].as_array().unwrap().iter().map(|found| found["text"].as_str().unwrap()).collect();
    assert!(
        texts.len() >= 2 && texts.iter().any(|text| text.contains("has failed: ") && text.contains("rank 2")),
        "{texts:?}"
    );
}

/// The launcher waits for the recordings of ranks that have noticed the failure; a rank that can't notice is asked for
/// its own.
#[test]
fn ranks_of_a_job_leave_recordings_when_one_dies() {
    let _alone = alone();
    let folder = Folder::new("dies");
    let mut command = Command::new(FERROCE);
    let arguments = "collective all_reduce -g 3 -b 64K -e 64K -n 1000000 -w 0 -c 0 --patience 1s";
    command.args(arguments.split_whitespace()).env("FERROCE_FLIGHT_DIR", &folder.0);
    let mut job = Ranks(vec![command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()]);
    let ranks = until(
        LIMIT,
        || Some(children_of(job.0[0].id())).filter(|ranks| ranks.len() == 3),
        || "no three ranks".to_owned(),
    );
    let has_begun = || {
        let arguments = ["flight", "--json"].map(str::to_owned).into_iter();
        let arguments: Vec<String> = arguments.chain(ranks.iter().map(u32::to_string)).collect();
        let output = ferroce(arguments.iter().map(String::as_str));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (calls(&found[0]) >= 50).then_some(())
    };
    until(LIMIT, has_begun, || "the ranks do not begin".to_owned());
    signal(ranks[2], Signal::KILL);
    let status = until(LIMIT, || job.0[0].try_wait().unwrap(), || "the job goes on".to_owned());
    let mut said = String::new();
    job.0[0].stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("rank 2 (process {}) ended with signal: 9", ranks[2])), "{said}");
    assert_eq!(folder.files().len(), 2, "{said}");
    let table = text(&ferroce(["flight", folder.0.to_str().unwrap()]).stdout);
    assert!(table.contains("no recording of 1 ranks: 2"), "{table}");
    assert_eq!(
        table.matches(", all_reduce of 16384 f32 (sum), by mapped: 0 of 1 steps done, waits for 2").count(),
        2,
        "{table}"
    );
}

/// Ended as by a launcher.
#[test]
fn a_rank_that_is_ended_leaves_a_recording_where_one_is_wanted() {
    let _alone = alone();
    for wanted in [true, false] {
        let folder = Folder::new("ended");
        let arguments = "all_reduce -b 1K -e 1K -n 1000000 -w 0 -c 0 --patience 60s";
        let mut ranks = Ranks::start(2, arguments, wanted.then_some(&folder.0));
        ranks.report_when(|report| calls(report) >= 50);
        signal(ranks.0[1].id(), Signal::TERM);
        let status = until(LIMIT, || ranks.0[1].try_wait().unwrap(), || "it goes on".to_owned());
        assert_eq!(status.code(), Some(130));
        let own = format!(".{}.0", ranks.0[1].id());
        let left = folder.files().iter().any(|file| file.to_str().unwrap().ends_with(&own));
        assert_eq!(left, wanted, "{:?}", folder.files());
    }
}

#[test]
fn recordings_of_running_ranks_are_written_from_outside() {
    let _alone = alone();
    let folder = Folder::new("outside");
    let ranks = Ranks::start(2, "all_reduce -b 1K -e 1K -n 1000000 -w 0 -c 0", None);
    ranks.report_when(|report| calls(report) >= 50);
    let path = folder.0.to_str().unwrap();
    let ids = ranks.ids();
    let dump = || {
        let output = ferroce(["flight", "--dump", path].into_iter().chain(ids.iter().map(String::as_str)));
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).lines().map(PathBuf::from).collect::<Vec<_>>()
    };
    let first = dump();
    assert_eq!(first.len(), 2, "{first:?}");
    let before: Vec<Vec<u8>> = first.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(first.iter().all(|path| fs::metadata(path).unwrap().permissions().mode() & 0o777 == 0o600));
    // The next file name may be a symbolic link of another user: it is skipped, like existing files.
    let victim = folder.0.join("victim");
    fs::write(&victim, "of somebody").unwrap();
    let next = |path: &Path, number: u32| path.with_extension(number.to_string());
    std::os::unix::fs::symlink(&victim, next(&first[0], 1)).unwrap();
    let second = dump();
    assert_eq!(second, [next(&first[0], 2), next(&first[1], 1)]);
    assert_eq!(fs::read(&victim).unwrap(), b"of somebody");
    fs::remove_file(next(&first[0], 1)).unwrap();
    assert_eq!(before, first.iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>());
    // The later file of each process is read, which is reported.
    let table = text(&ferroce(["flight", path]).stdout);
    for (early, late) in first.iter().zip(&second) {
        let due = format!(
            "'{}' is not shown: '{}' is a later recording of the same process",
            early.display(),
            late.display()
        );
        assert!(table.contains(&due), "no \"{due}\" in\n{table}");
    }
    assert!(table.contains(": 2 ranks\n") && table.contains("all_reduce of 256 f32"), "{table}");
    let [one, other] = [&first[0], &first[1]].map(|path| path.to_str().unwrap());
    let table = text(&ferroce(["flight", one, other]).stdout);
    assert!(table.contains(": 2 ranks\n") && !table.contains("not shown"), "{table}");
    for (sources, code, due) in [
        (vec![path, "4294967295"], 1, "process 4294967295 has no visible flight recorder"),
        (vec![path, one], 2, "with --dump must be a process id"),
        (vec![one], 2, "must be an existing directory"),
    ] {
        let output = ferroce(["flight", "--dump"].into_iter().chain(sources));
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(due), "{}", text(&output.stderr));
    }
}

#[test]
fn commands_of_processes_are_shown_and_simulations_are_not() {
    let _alone = alone();
    let ranks = Ranks::start(2, "all_reduce -b 1K -e 1K -n 1000000 -w 0 -c 0", None);
    let report = ranks.report_when(|report| calls(report) >= 50);
    let command = "collective all_reduce -b 1K -e 1K -n 1000000";
    assert!(report["ranks"][0]["command"].as_str().unwrap().contains(command), "{report:#}");
    let id = &ranks.ids()[0];
    for (shown, name) in [("flight", "process"), ("stat", "pid")] {
        let table = text(&ferroce([shown, id]).stdout);
        let line = table.lines().find(|line| line.starts_with(&format!("{name} {id}: "))).unwrap_or_default();
        assert!(line.contains(command), "{table}");
    }
    drop(ranks);
    let mut command = Command::new(FERROCE);
    command.args("fabric allreduce --ranks 16 --bytes 4MiB --count 1000".split_whitespace());
    let simulation = Ranks(vec![command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()]);
    // A recorder's memory would be allocated before the ranks are connected.
    let pid = simulation.0[0].id();
    let peak = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok().filter(|kb| *kb > 50_000)
    };
    until(LIMIT, peak, || "the simulation does not begin".to_owned());
    let output = ferroce(["flight", &pid.to_string()]);
    assert!(text(&output.stderr).contains("has no visible flight recorder"), "{}", text(&output.stdout));
}

/// The signal goes to the process that has started them.
#[test]
fn a_signal_to_the_job_has_all_ranks_leave_a_recording() {
    let _alone = alone();
    let folder = Folder::new("signal");
    let mut command = Command::new(FERROCE);
    command.args("collective broadcast -g 3 -b 1K -e 1K -n 1000000 -w 0 -c 0".split_whitespace());
    command.env("FERROCE_FLIGHT_DIR", &folder.0).stdout(Stdio::null()).stderr(Stdio::null());
    let job = Ranks(vec![command.spawn().unwrap()]);
    let parent = job.0[0].id();
    // Before that it would end by the signal, as any process does.
    let has_begun = || {
        let stat = text(&ferroce(["stat"]).stdout);
        (stat.matches("of 3 of communicator").count() >= 3).then_some(())
    };
    until(LIMIT, has_begun, || text(&ferroce(["stat"]).stdout));
    thread::sleep(Duration::from_millis(100));
    signal(parent, Signal::USR1);
    until(LIMIT, || (folder.files().len() == 3).then_some(()), || format!("{:?}", folder.files()));
    let table = text(&ferroce(["flight", folder.0.to_str().unwrap()]).stdout);
    assert!(table.contains(": 3 ranks\n") && table.contains("broadcast of 256 f32"), "{table}");
    // A truncated file, as from a full disk: the others are shown, and the exit status reports it.
    let cut = folder.files().pop().unwrap();
    let bytes = fs::read(&cut).unwrap();
    fs::write(&cut, &bytes[..bytes.len() - 1]).unwrap();
    let output = ferroce(["flight", folder.0.to_str().unwrap()]);
    assert!(text(&output.stdout).contains("no recording of 1 ranks"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("it is cut off"), "{}", text(&output.stderr));
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn what_is_no_recording_is_refused_by_name() {
    let folder = Folder::new("refused");
    let (empty, nonsense) = (folder.0.join("empty"), folder.0.join("ferroce-flight.nonsense"));
    fs::create_dir(&empty).unwrap();
    fs::write(&nonsense, "no recording, but long enough").unwrap();
    let shown = |path: &Path| path.to_str().unwrap().to_owned();
    // A FIFO without a writer, which another user may leave in a world-writable directory.
    let (pipe, piped) = (folder.0.join("pipe"), folder.0.join("piped"));
    fs::create_dir(&piped).unwrap();
    for path in [&pipe, &piped.join("ferroce-flight.host.1.0")] {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    for (arguments, code, due) in [
        (vec!["flight".to_owned(), shown(&pipe)], 1, "pipe': must be a regular file, not a pipe or device"),
        (vec!["flight".to_owned(), shown(&piped)], 1, "ferroce-flight.host.1.0': must be a regular file"),
        (
            vec!["flight".to_owned(), shown(&nonsense)],
            1,
            "ferroce-flight.nonsense': no flight recording: it does not begin like one",
        ),
        (vec!["flight".to_owned(), shown(&empty)], 1, "empty': no file in it is called ferroce-flight..."),
        (vec!["flight".to_owned(), shown(&folder.0.join("none"))], 1, "none': No such file"),
        (
            vec!["flight".to_owned(), "4294967295".to_owned()],
            1,
            "process 4294967295 has no visible flight recorder",
        ),
        (vec!["flight".to_owned(), "--last".to_owned(), "0".to_owned()], 2, "--last"),
        (vec!["flight".to_owned(), "--svg".to_owned(), "/no/such/x.svg".to_owned()], 2, "/no/such"),
    ] {
        let output = ferroce(arguments.iter().map(String::as_str));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(due) && output.stdout.is_empty(), "{arguments:?}: {said}");
    }
}
