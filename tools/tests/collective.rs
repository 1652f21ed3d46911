//! `ferroce collective`, as a user runs it: what it prints, how it ends, and what it leaves behind.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver_test_support::signal::{Signal, signal};
use serde_json::Value;

const FERROCE: &str = env!("CARGO_BIN_EXE_ferroce");
/// The longest time of any test here.
const LIMIT: Duration = Duration::from_secs(60);
const OPERATIONS: [&str; 10] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send_receive",
    "barrier",
];

#[test]
fn every_operation_is_right_at_every_size() {
    let _alone = alone();
    for ranks in [2, 4] {
        for operation in OPERATIONS {
            let few = ["-b", "4", "-e", "256K", "-f", "256", "-n", "3", "-w", "1", "--json"];
            let report = json(&collective(operation, ranks, &few));
            check_report(&report, operation, ranks);
        }
    }
}

/// One type and one reduction of each kind; unit tests compare the others with the driver's.
#[test]
fn every_kind_of_type_and_reduction_is_right() {
    let _alone = alone();
    for (data_type, reduction) in [
        ("half", "avg"),
        ("fp8_e4m3", "sum"),
        ("int8", "prod"),
        ("u64", "max"),
        ("double", "premulsum"),
        ("bf16", "min"),
    ] {
        let few =
            ["-t", data_type, "-o", reduction, "-b", "512K", "-e", "512K", "-n", "2", "-w", "0", "--json"];
        let report = json(&collective("all_reduce", 3, &few));
        assert_eq!((&report["wrong"], &report["reduction"]), (&0.into(), &reduction.into()), "{report}");
    }
}

#[test]
fn the_table_has_the_columns_of_nccl_tests() {
    let _alone = alone();
    let name = format!("ferroce-collective-test-{}", std::process::id());
    let output = collective(
        "reduce",
        2,
        &[
            "-b",
            "1K",
            "-e",
            "2K",
            "-n",
            "2",
            "-r",
            "1",
            "-d",
            &format!("shm:{name}"),
            "--algorithm",
            "ring",
            "--explain",
        ],
    );
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    for expected in [
        "# reduce: 2 ranks; 2 iterations",
        "rank 1: ",
        &name,
        "forced: algorithm ring",
        "which an option forces",
        "0 OK",
    ] {
        assert!(table.contains(expected), "no '{expected}' in\n{table}");
    }
    let rows: Vec<Vec<&str>> = table
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows.len(), 2, "{table}");
    assert_eq!(rows[0][..5], ["1024", "256", "f32", "sum", "1"], "{table}");
    // time, algbw, busbw and #wrong, twice, and the algorithm.
    assert_eq!((rows[1].len(), rows[1][8], rows[1][12], rows[1][13]), (14, "0", "0", "ring"), "{table}");
}

#[test]
fn it_is_said_where_no_packets_go() {
    let _alone = alone();
    let line = "# the ranks share memory: no packets";
    for (operation, how, sends_nothing) in
        [("all_reduce", "auto", true), ("all_reduce", "off", false), ("send_receive", "auto", false)]
    {
        let few = ["-b", "1K", "-e", "1K", "-n", "2", "--shared-memory", how];
        let table = text(&collective(operation, 2, &few).stdout);
        assert_eq!(table.contains(line), sends_nothing, "{table}");
        let report = json(&collective(operation, 2, &[&few[..], &["--json"]].concat()));
        assert_eq!(report["sends_nothing"], sends_nothing, "{report}");
    }
}

/// If there is a GPU.
#[test]
fn a_gpu_that_reduces_is_named() {
    let _alone = alone();
    let devices = text(&Command::new(FERROCE).arg("devinfo").output().unwrap().stdout);
    let Some(gpu) = devices.lines().find_map(|line| line.strip_prefix("GPU opencl:0: ")) else {
        println!("skipped: there is no GPU for OpenCL here");
        return;
    };
    let few = ["-b", "1K", "-e", "1K", "-n", "2", "--memory", "opencl"];
    let table = text(&collective("all_reduce", 2, &few).stdout);
    let due = format!("; reductions by opencl:0 ({}", gpu.split(", ").next().unwrap());
    assert!(table.contains(&due), "no '{due}' in {table}");
}

#[test]
fn a_wrong_element_is_named() {
    let _alone = alone();
    // With all_gather, element 0 of rank 1 is element 128 at rank 0.
    for (operation, fault, named) in [
        ("all_reduce", "1:7", "element 7 of rank 0 is "),
        ("all_gather", "1:0", "element 128 of rank 0 is "),
        ("send_receive", "0:9", "element 9 of rank 1 is "),
    ] {
        let output =
            collective(operation, 2, &["-b", "1K", "-e", "1K", "-n", "2", "-t", "i32", "--fault", fault]);
        let (table, why) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{table}{why}");
        assert!(why.contains(named) && why.contains(", not "), "{why}");
        assert!(table.contains("FAILED"), "{table}");
    }
    let unchecked =
        collective("all_reduce", 2, &["-b", "1K", "-e", "1K", "-n", "2", "-c", "0", "--fault", "1:7"]);
    assert!(unchecked.status.success() && text(&unchecked.stdout).contains("not checked"), "{unchecked:?}");
}

/// Time, minimum and maximum are those of the slowest rank: with two iterations, the time is the mean of minimum and maximum.
#[test]
fn mean_least_and_greatest_time_are_of_the_same_iterations() {
    let _alone = alone();
    let report =
        json(&collective("all_reduce", 4, &["-b", "8", "-e", "64K", "-n", "2", "-w", "0", "--json"]));
    let rows = report["results"].as_array().unwrap();
    assert_eq!(rows.len(), 14, "{report}");
    for timing in rows.iter().flat_map(|row| [&row["out_of_place"], &row["in_place"]]) {
        let [mean, least, most] = ["time_us", "min_us", "max_us"].map(|name| timing[name].as_f64().unwrap());
        assert!((2.0 * mean - least - most).abs() < 1e-6 * most, "{timing}");
    }
}

#[test]
fn busbw_is_drawn() {
    let _alone = alone();
    let file = std::env::temp_dir().join(format!("ferroce-collective-{}.svg", std::process::id()));
    let output = collective("all_reduce", 2, &["-e", "1K", "-n", "2", "--svg", file.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let drawn = fs::read_to_string(&file).unwrap();
    fs::remove_file(&file).unwrap();
    for expected in ["<svg", "all_reduce, 2 ranks, f32", "in place", "busbw", "1KiB", "</svg>"] {
        assert!(drawn.contains(expected), "no {expected}");
    }
}

#[test]
fn wrong_usage_is_told_apart_from_failure() {
    for (operation, args, value) in [
        ("all_sums", &["-g", "2"][..], "all_sums"),
        ("all_reduce", &["-g", "0"], "'0'"),
        ("all_reduce", &["-g", "2", "-t", "f99"], "f99"),
        ("all_reduce", &["-g", "2", "-o", "median"], "median"),
        ("all_reduce", &["-g", "2", "-b", "1"], "--min 1B: must be at least 4"),
        ("all_reduce", &["-g", "2", "-b", "2M", "-e", "1M"], "--max 1MiB"),
        ("all_reduce", &["-g", "2", "-f", "1"], "'1'"),
        ("all_reduce", &["-g", "2", "-c", "2"], "'2'"),
        ("all_reduce", &["-g", "2", "--chunk", "1001"], "1001: a multiple of 8"),
        ("all_reduce", &["-g", "2", "--algorithm", "spiral"], "spiral"),
        ("all_reduce", &["-g", "2", "--algorithm", "hierarchical"], "all ranks are on one host"),
        ("all_to_all", &["-g", "2", "--algorithm", "ring"], "--algorithm ring: all_to_all has direct"),
        ("all_to_all", &["-g", "2", "--in-place"], "can't be in place"),
        ("broadcast", &["-g", "2", "-r", "2"], "--root 2: must be a rank, 0 to 1"),
        ("send_receive", &["-g", "1"], "2 or more"),
        ("all_reduce", &["-g", "2", "-d", "loopback"], "--device loopback"),
        ("all_reduce", &["-g", "3", "-d", "shm:a", "-d", "shm:b"], "given 2 times"),
        ("all_reduce", &["-g", "2", "-d", "no-such0"], "'no-such0'"),
        (
            "all_reduce",
            &["-g", "2", "-d", "float"],
            "--device float: there is no such interface; the type of the elements is --data-type (-t) float",
        ),
        ("all_reduce", &["-g", "2", "--svg", "/no/such/x.svg"], "/no/such"),
        ("all_reduce", &[], "SLURM_PROCID (Slurm)"),
    ] {
        let output = run(ferroce().arg(operation).args(args));
        let why = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {why}");
        assert!(why.contains(value), "{args:?}: {why}");
    }
}

#[test]
fn the_death_of_a_rank_is_told_and_ends_the_others() {
    let _alone = alone();
    let (mut child, ranks) = start_and_see_a_row("all_reduce", 4);
    signal(ranks[2], Signal::KILL);
    let status = wait(&mut child);
    let why = read_all(child.stderr.take()).join().unwrap();
    assert_eq!(status.code(), Some(1), "{why}");
    let expected =
        format!("all_reduce: rank 2 (process {}) ended with signal: 9 (SIGKILL), after ", ranks[2]);
    assert!(why.contains(&expected), "no '{expected}' in {why}");
    check_nothing_is_left(&ranks);
}

/// A stopped rank is treated like a dead one.
#[test]
fn a_rank_that_does_not_answer_is_given_up() {
    let _alone = alone();
    let (mut child, ranks) = start_and_see_a_row("broadcast", 3);
    signal(ranks[1], Signal::STOP);
    let status = wait(&mut child);
    let why = read_all(child.stderr.take()).join().unwrap();
    assert_eq!(status.code(), Some(1), "{why}");
    assert!(why.contains("broadcast: rank") && why.contains("rank 1 is gone"), "{why}");
    check_nothing_is_left(&ranks);
}

#[test]
fn an_interruption_ends_all_ranks() {
    let _alone = alone();
    let (mut child, ranks) = start_and_see_a_row("all_to_all", 4);
    signal(child.id(), Signal::INT);
    let status = wait(&mut child);
    let why = read_all(child.stderr.take()).join().unwrap();
    assert_eq!(status.code(), Some(130), "{why}");
    assert!(why.contains("interrupted"), "{why}");
    check_nothing_is_left(&ranks);
}

#[test]
fn ranks_do_not_outlive_who_started_them() {
    let _alone = alone();
    let (mut child, ranks) = start_and_see_a_row("all_reduce", 3);
    child.kill().unwrap();
    child.wait().unwrap();
    let start = Instant::now();
    while ranks.iter().any(|rank| is_alive(*rank)) {
        assert!(start.elapsed() < Duration::from_secs(5), "ranks go on alone");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Started as torchrun does, and with a unique id that the user provides.
#[test]
fn ranks_of_a_launcher_find_each_other() {
    let _alone = alone();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let id = format!("ferroce1:127.0.0.1:{port}:00000000000000ff");
    let torchrun = |rank: &'static str| {
        vec![("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]
    };
    let by_id =
        |rank: &'static str| vec![("FERROCE_RANK", rank), ("FERROCE_SIZE", "2"), ("FERROCE_UNIQUE_ID", &id)];
    for (launcher, variables) in [("torchrun", ["0", "1"].map(torchrun)), ("ferroce", ["0", "1"].map(by_id))]
    {
        let ranks = variables.map(|variables| {
            let mut command = ferroce();
            command.args(["all_gather", "-e", "4K", "-n", "2", "--json"]).envs(variables);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let [first, second] = ranks.map(|mut child| {
            let (stdout, stderr) = (read_all(child.stdout.take()), read_all(child.stderr.take()));
            thread::spawn(move || (wait(&mut child), stdout.join().unwrap(), stderr.join().unwrap()))
        });
        let (status, report, why) = first.join().unwrap();
        assert!(status.success(), "{why}");
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!((&report["launcher"], &report["ranks"]), (&launcher.into(), &2.into()), "{report}");
        let (status, said, why) = second.join().unwrap();
        assert!(status.success() && said.is_empty(), "{said}{why}");
    }
    // Ranks on one host have a default device; others do not.
    let mut far = ferroce();
    far.args(["all_gather", "--timeout", "1s"]).envs(torchrun("1")).env("MASTER_ADDR", "192.0.2.1");
    let refused = run(&mut far);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("--device is not given"), "{}", text(&refused.stderr));
}

#[test]
fn ranks_of_mpirun_find_each_other() {
    let _alone = alone();
    if Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: there is no mpirun here (package openmpi-bin)");
        return;
    }
    let mut mpirun = Command::new("mpirun");
    mpirun.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    mpirun.args([
        "--oversubscribe",
        "-np",
        "3",
        FERROCE,
        "collective",
        "all_reduce",
        "-e",
        "4K",
        "-n",
        "2",
        "--json",
    ]);
    let output = run(&mut mpirun);
    let report = json(&output);
    assert_eq!((&report["ranks"], &report["wrong"]), (&3.into(), &0.into()), "{report}");
    let launcher = report["launcher"].as_str().unwrap();
    assert!(["Open MPI", "PMI"].contains(&launcher), "{launcher}");
}

/// The agent of torchrun has a store at the port that it passes to its ranks.
#[test]
fn ranks_of_torchrun_find_each_other() {
    let _alone = alone();
    if Command::new("torchrun").arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        println!("skipped: there is no torchrun here (package python3-torch)");
        return;
    }
    let report = std::env::temp_dir().join(format!("ferroce-torchrun-{}.json", std::process::id()));
    let mut torchrun = Command::new("torchrun");
    // To a file and the terminal: some versions of torchrun support nothing else.
    let both = "0:1,1:1,2:1,3:1";
    torchrun.args(["--no_python", "--nproc_per_node", "4", "-r", both, "-t", both, FERROCE, "collective"]);
    torchrun.args(["all_reduce", "-e", "64K", "-f", "16", "-n", "2"]);
    torchrun.arg(format!("--json={}", report.display()));
    let output = run(&mut torchrun);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let written: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
    fs::remove_file(report).unwrap();
    assert_eq!((&written["ranks"], &written["wrong"]), (&4.into(), &0.into()), "{written}");
    assert_eq!(written["launcher"], "torchrun");
}

/// 64 MiB, over shared memory and over packets.
#[test]
fn long_operations_are_right() {
    let _alone = alone();
    for ranks in [2, 4] {
        for operation in ["all_reduce", "all_gather"] {
            for shared_memory in ["required", "off"] {
                let long = ["-b", "64M", "-e", "64M", "-n", "1", "-w", "0", "--json"];
                let args = [&long[..], &["--shared-memory", shared_memory]].concat();
                let report = json(&collective(operation, ranks, &args));
                assert_eq!(report["wrong"], 0, "{report}");
                assert_eq!(report["results"][0]["bytes"], 64 << 20, "{report}");
            }
        }
    }
}

/// Without a launcher that watches it, a rank is killed or stopped at any point of any operation: every other rank ends
/// with an error that names it, or the rank that noticed it first.
#[test]
fn ranks_notice_by_themselves_that_one_is_gone() {
    let _alone = alone();
    let seed = std::env::var("FERROCE_RANKS_SEED").map_or(1, |seed| seed.parse().unwrap());
    let count = std::env::var("FERROCE_RANKS_COUNT").map_or(6, |count| count.parse().unwrap());
    for seed in seed..seed + count {
        println!("FERROCE_RANKS_SEED={seed} FERROCE_RANKS_COUNT=1 replays it");
        lose_a_rank(seed);
    }
}

fn lose_a_rank(seed: u64) {
    // The upper bits of a linear congruential generator.
    let mut state = seed;
    let mut below = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let operation = OPERATIONS[below(OPERATIONS.len())];
    let (ranks, shared_memory) = (2 + below(3), ["auto", "off"][below(2)]);
    let (victim, is_stopped) = (below(ranks), below(2) == 0);
    let pause = Duration::from_millis(below(300) as u64);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut children = Vec::new();
    for rank in 0..ranks {
        let mut command = ferroce();
        command.args([operation, "-b", "4K", "-e", "4M", "-n", "5000", "--shared-memory", shared_memory]);
        command.env("FERROCE_UNIQUE_ID", format!("ferroce1:127.0.0.1:{port}:00000000000000{seed:02x}"));
        command.env("FERROCE_RANK", rank.to_string()).env("FERROCE_SIZE", ranks.to_string());
        children.push(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    }
    let mut stdout = BufReader::new(children[0].stdout.take().unwrap());
    let mut line = "#".to_owned();
    // The header: all ranks are running then.
    while !line.contains("out-of-place") {
        line.clear();
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "it ended before the first row");
    }
    let outputs: Vec<_> = children.iter_mut().map(|child| read_all(child.stderr.take())).collect();
    read_all(Some(stdout));
    thread::sleep(pause);
    signal(children[victim].id(), if is_stopped { Signal::STOP } else { Signal::KILL });
    let start = Instant::now();
    for (rank, child) in children.iter_mut().enumerate().filter(|(rank, _)| *rank != victim) {
        let status = wait(child);
        assert_eq!(status.code(), Some(1), "rank {rank} of seed {seed}");
    }
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(10), "seed {seed}: {elapsed:?}, with a retry budget of 4.3 s");
    children[victim].kill().unwrap();
    children[victim].wait().unwrap();
    for (rank, output) in outputs.into_iter().enumerate() {
        let why = output.join().unwrap();
        let names = why.contains(&format!("rank {victim} is gone")) || why.contains("failed first");
        assert!(
            rank == victim || names && why.contains(&format!("rank {rank}, ")),
            "seed {seed}, rank {rank}: {why}"
        );
    }
}

// --- checks of reports

fn check_report(report: &Value, operation: &str, ranks: u32) {
    assert_eq!((&report["operation"], &report["ranks"]), (&operation.into(), &ranks.into()), "{report}");
    assert_eq!(report["places"].as_array().unwrap().len(), ranks as usize, "{report}");
    let is_barrier = operation == "barrier";
    let unchecked = if is_barrier { Value::Null } else { 0.into() };
    assert_eq!(report["wrong"], unchecked, "{report}");
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), if is_barrier { 1 } else { 3 }, "{report}");
    let n = f64::from(ranks);
    let factor = match operation {
        "all_reduce" => 2.0 * (n - 1.0) / n,
        "broadcast" | "reduce" | "send_receive" | "barrier" => 1.0,
        _ => (n - 1.0) / n,
    };
    let only_apart = ["all_to_all", "send_receive", "barrier"].contains(&operation);
    for row in results {
        let bytes = row["bytes"].as_f64().unwrap();
        assert_eq!(row["in_place"].is_null(), only_apart, "{row}");
        for timing in [&row["out_of_place"], &row["in_place"]].into_iter().filter(|timing| !timing.is_null())
        {
            let value = |name: &str| timing[name].as_f64().unwrap();
            assert!(value("min_us") <= value("median_us") && value("min_us") > 0.0, "{timing}");
            assert!(value("median_us") <= value("max_us"), "{timing}");
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * (1.0 + b);
            assert!(near(value("algbw_gb_s"), bytes / value("time_us") / 1e3), "{timing}");
            assert!(near(value("busbw_gb_s"), value("algbw_gb_s") * factor), "{timing}");
        }
    }
}

// --- running the program

/// Without variables that a launcher of the tests may have set.
fn ferroce() -> Command {
    let mut command = Command::new(FERROCE);
    for name in
        ["FERROCE_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"]
    {
        command.env_remove(name);
    }
    command.arg("collective");
    command
}

fn collective(operation: &str, ranks: u32, args: &[&str]) -> Output {
    run(ferroce().args([operation, "-g", &ranks.to_string()]).args(args))
}

fn run(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, stderr) = (read_all(child.stdout.take()), read_all(child.stderr.take()));
    let status = wait(&mut child);
    Output { status, stdout: stdout.join().unwrap().into(), stderr: stderr.join().unwrap().into() }
}

/// Starts ranks that run for long, and waits for the first row; returns their process ids by rank.
fn start_and_see_a_row(operation: &str, ranks: u32) -> (Child, Vec<u32>) {
    let mut command = ferroce();
    command.args([operation, "-g", &ranks.to_string(), "-b", "8", "-e", "1M", "-n", "3000"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = "#".to_owned();
    while line.starts_with('#') {
        line.clear();
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "it ended before the first row");
    }
    read_all(Some(stdout));
    let processes = children_of(child.id());
    assert_eq!(processes.len(), ranks as usize);
    (child, processes)
}

fn wait(child: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("it runs for more than {LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn read_all(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut from) = from {
            from.read_to_string(&mut text).unwrap();
        }
        text
    })
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_str(text(&output.stdout).trim()).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

// --- the machine

/// One test at a time: four ranks suffice to load any machine.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The processes started by `parent`, by rank: oldest first.
fn children_of(parent: u32) -> Vec<u32> {
    let mut children: Vec<(u64, u32)> = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // After the name in parentheses: state, parent, …, and the start time as the 20th.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        if fields[1] == parent.to_string() {
            children.push((fields[19].parse().unwrap(), process));
        }
    }
    children.sort_unstable();
    children.into_iter().map(|(_, process)| process).collect()
}

fn is_alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim().starts_with('Z'))
}

fn check_nothing_is_left(ranks: &[u32]) {
    let left: Vec<_> = ranks.iter().filter(|rank| is_alive(**rank)).collect();
    assert!(left.is_empty(), "processes left: {left:?}");
}
