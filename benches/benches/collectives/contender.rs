//! The measured libraries: how their ranks are started, and how their output is parsed.

use std::fs::{self, File};
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferroce_benches::command::built;
use ferroce_benches::process::Stopped;
use ferroce_benches::veth::Veth;
use serde::Deserialize;

use crate::Outcome;
use crate::place::{Place, Stand};

/// A library whose operations are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Contender {
    Ferroce,
    /// An AF_XDP port that transfers as many bytes in both directions, without a protocol.
    Raw,
    OpenMpi,
    Gloo,
}

impl Contender {
    pub(crate) const ALL: [Contender; 4] =
        [Contender::Ferroce, Contender::Raw, Contender::OpenMpi, Contender::Gloo];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::Ferroce => "ferroce",
            Contender::Raw => "raw port",
            Contender::OpenMpi => "Open MPI",
            Contender::Gloo => "gloo",
        }
    }
}

/// Sizes of an operation that are measured in one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) operation: &'static str,
    pub(crate) least: u64,
    pub(crate) most: u64,
    pub(crate) iterations: u32,
    pub(crate) warmup: u32,
}

/// The factor between two sizes.
pub(crate) const FACTOR: u64 = 4;

impl Job {
    /// In the format of the other libraries' programs, with this many iterations.
    fn arguments(&self, iterations: u32) -> [String; 6] {
        let Job { operation, least, most, warmup, .. } = self;
        let numbers = [*least, *most, FACTOR, iterations.into(), (*warmup).min(iterations).into()];
        let [a, b, c, d, e] = numbers.map(|number| number.to_string());
        [(*operation).to_owned(), a, b, c, d, e]
    }
}

/// The time of a call with some size, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    pub(crate) bytes: u64,
    pub(crate) mean: f64,
    pub(crate) median: f64,
}

/// The programs.
pub(crate) struct Programs {
    ferroce: PathBuf,
    open_mpi: Result<PathBuf, String>,
    /// A Python with torch, and the script.
    gloo: Result<(&'static str, PathBuf), String>,
    /// The folder of their files, and of the standard error of jobs.
    directory: PathBuf,
}

impl Programs {
    /// Builds the programs.
    pub(crate) fn new(build: bool) -> Outcome<Programs> {
        let ferroce = built(build)?;
        let directory = std::env::temp_dir().join(format!("ferroce-collectives-{}", std::process::id()));
        fs::create_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let mut programs =
            Programs { ferroce, open_mpi: Err(String::new()), gloo: Err(String::new()), directory };
        programs.open_mpi = programs.build_open_mpi();
        programs.gloo = programs.find_torch();
        Ok(programs)
    }

    fn build_open_mpi(&self) -> Result<PathBuf, String> {
        let source = self.write("open_mpi.c", include_str!("open_mpi.c"))?;
        let program = self.directory.join("open_mpi");
        let compiled = Command::new("mpicc").args(["-O2", "-o"]).args([&program, &source]).output();
        let compiled = compiled.map_err(|error| format!("mpicc (package libopenmpi-dev): {error}"))?;
        if !compiled.status.success() {
            return Err(format!("mpicc: {}", String::from_utf8_lossy(&compiled.stderr).trim()));
        }
        Ok(program)
    }

    fn find_torch(&self) -> Result<(&'static str, PathBuf), String> {
        // The user's Python, and Debian's, for the package python3-torch.
        let pythons = ["python3", "/usr/bin/python3"];
        let has_torch = |python: &&str| {
            let tried = Command::new(python).args(["-c", "import torch.distributed"]).output();
            tried.is_ok_and(|tried| tried.status.success())
        };
        let python = pythons.into_iter().find(has_torch);
        let python = python.ok_or_else(|| format!("no torch in {}", pythons.join(" or ")))?;
        Ok((python, self.write("gloo.py", include_str!("gloo.py"))?))
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.directory.join(name);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }

    /// The reason that a contender is not measured, if it is not.
    pub(crate) fn lacks(&self, contender: Contender) -> Option<&str> {
        match contender {
            Contender::Ferroce | Contender::Raw => None,
            Contender::OpenMpi => self.open_mpi.as_ref().err().map(String::as_str),
            Contender::Gloo => self.gloo.as_ref().err().map(String::as_str),
        }
    }

    /// Whether a contender runs a job at a place in a round.
    pub(crate) fn measures(&self, contender: Contender, stand: &Stand, job: &Job, round: usize) -> bool {
        self.lacks(contender).is_none()
            && match contender {
                // It measures bandwidth, not the latency of a message.
                Contender::Raw => stand.place == Place::AfXdp && job.least >= 1 << 20,
                // It takes longer to start than all others to run.
                Contender::Gloo => round.is_multiple_of(3),
                _ => true,
            }
    }

    /// Runs a job, and returns what rank 0 has printed.
    pub(crate) fn run(&self, contender: Contender, stand: &Stand, job: &Job) -> Outcome<Vec<Time>> {
        let processes = match contender {
            Contender::Ferroce => self.start_ferroce(stand, job)?,
            Contender::Raw => self.start_raw(stand)?,
            Contender::OpenMpi => self.start_open_mpi(stand, job)?,
            Contender::Gloo => self.start_gloo(stand, job)?,
        };
        let output = wait(processes).map_err(|error| {
            let said = fs::read_to_string(self.log()).unwrap_or_default();
            let last: Vec<&str> = said.lines().rev().take(3).collect();
            format!("{error}: {}", last.join(" / "))
        })?;
        let sizes = std::iter::successors(Some(job.least), |size| Some(size * FACTOR));
        let sizes: Vec<u64> = sizes.take_while(|size| *size <= job.most).collect();
        let times = match contender {
            Contender::Ferroce => report(&output)?,
            Contender::Raw => moved(&output, job, &sizes)?,
            _ => lines(&output)?,
        };
        let measured: Vec<u64> = times.iter().map(|time| time.bytes).collect();
        if measured != sizes {
            return Err(format!("it has measured {measured:?}, not {sizes:?}").into());
        }
        Ok(times)
    }

    fn start_ferroce(&self, stand: &Stand, job: &Job) -> Outcome<Vec<Stopped>> {
        let Job { operation, least, most, iterations, warmup } = job;
        let port = free_port()?;
        self.start_ranks(stand, |rank, command| {
            command.arg(&self.ferroce).arg("collective").arg(operation);
            command.args(["--device", &stand.device(rank), "--json", "--quiet", "--out-of-place"]);
            command.args(["-b", &least.to_string(), "-e", &most.to_string(), "-f", &FACTOR.to_string()]);
            command.args(["-n", &iterations.to_string(), "-w", &warmup.to_string()]);
            if stand.yields() {
                command.args(["--idle", "yield"]);
            }
            if stand.veth.is_some() {
                // The namespaces stand for hosts, which share no memory.
                command.args(["--shared-memory", "off"]);
            }
            command.env("FERROCE_RANK", rank.to_string()).env("FERROCE_SIZE", stand.ranks.to_string());
            command.env("FERROCE_MASTER_ADDR", stand.master().to_string());
            command.env("FERROCE_MASTER_PORT", port.to_string());
        })
    }

    /// Starts this program again, at both ends.
    fn start_raw(&self, stand: &Stand) -> Outcome<Vec<Stopped>> {
        let own = std::env::current_exe()?;
        let veth = stand.veth.as_ref().ok_or("a raw port is between namespaces")?;
        let macs = [veth.mac(0)?, veth.mac(1)?];
        self.start_ranks(stand, |rank, command| {
            let end = format!("{},{rank},{}", stand.device(rank), macs[1 - rank]);
            command.arg(&own).args(["--raw-end", &end]);
        })
    }

    fn start_gloo(&self, stand: &Stand, job: &Job) -> Outcome<Vec<Stopped>> {
        let (python, script) = self.gloo.as_ref().map_err(String::as_str)?;
        let port = free_port()?;
        self.start_ranks(stand, |rank, command| {
            // Its threads pass each call on: on one core they would wait for each other's time slices.
            command.args(["taskset", "-c", &stand.all_cores()]);
            // A call takes milliseconds.
            let iterations = job.iterations.min((job.iterations / 10).max(5));
            command.arg(python).arg(script).args(job.arguments(iterations));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", stand.ranks.to_string());
            command.env("MASTER_ADDR", stand.master().to_string()).env("MASTER_PORT", port.to_string());
            command.env("GLOO_SOCKET_IFNAME", if stand.veth.is_some() { Veth::INTERFACE } else { "lo" });
        })
    }

    /// Starts a process for each rank, on its core.
    fn start_ranks(&self, stand: &Stand, arguments: impl Fn(usize, &mut Command)) -> Outcome<Vec<Stopped>> {
        let log = File::create(self.log())?;
        let mut processes = Vec::new();
        for rank in 0..stand.ranks {
            let mut command = stand.command(rank);
            arguments(rank, &mut command);
            let stdout = if rank == 0 { Stdio::piped() } else { Stdio::null() };
            command.stdin(Stdio::null()).stdout(stdout).stderr(log.try_clone()?);
            processes.push(Stopped(command.spawn()?));
        }
        Ok(processes)
    }

    fn start_open_mpi(&self, stand: &Stand, job: &Job) -> Outcome<Vec<Stopped>> {
        let program = self.open_mpi.as_ref().map_err(String::as_str)?;
        let mut command = match &stand.veth {
            Some(veth) => veth.command(0),
            None => Command::new("env"),
        };
        command.args(["mpirun", "-np", &stand.ranks.to_string(), "--bind-to", "none", "--oversubscribe"]);
        command.args(["--mca", "pml", "ob1"]);
        let yields = if stand.yields() { "1" } else { "0" };
        command.args(["--mca", "mpi_yield_when_idle", yields]);
        match &stand.veth {
            None => {
                command.args(["--mca", "btl", "vader,self"]);
            }
            Some(veth) => {
                let each = stand.ranks / 2;
                let hosts = [0, 1].map(|end| format!("{}:{each}", Veth::address(end)));
                let agent = self.agent(veth.namespace(1))?;
                command.args(["--host", &hosts.join(",")]);
                command.args([
                    "--mca",
                    "btl",
                    "vader,tcp,self",
                    "--mca",
                    "btl_tcp_if_include",
                    Veth::INTERFACE,
                ]);
                command.args(["--mca", "oob_tcp_if_include", Veth::INTERFACE]);
                command.args(["--mca", "plm_rsh_no_tree_spawn", "1", "--mca", "plm_rsh_agent"]).arg(agent);
            }
        }
        // Its own binding does not know that ranks of two hosts run on the same machine.
        command.arg(self.pin(stand)?).arg(program).args(job.arguments(job.iterations));
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(self.log())?);
        Ok(vec![Stopped(command.spawn()?)])
    }

    /// The command with which Open MPI starts processes on the other host: in the other namespace, with its own host
    /// name.
    fn agent(&self, namespace: &str) -> Outcome<PathBuf> {
        let text = format!(
            "#!/bin/sh\nshift\nexec ip netns exec {namespace} unshare --uts sh -c \"hostname {namespace}; $*\"\n"
        );
        self.script("agent", &text)
    }

    fn pin(&self, stand: &Stand) -> Outcome<PathBuf> {
        let [a, b] = stand.cores;
        let text = format!(
            "#!/bin/sh\nif [ $((OMPI_COMM_WORLD_RANK % 2)) = 0 ]; then core={a}; else core={b}; fi\n\
             exec taskset -c $core \"$@\"\n"
        );
        self.script("pin", &text)
    }

    fn script(&self, name: &str, text: &str) -> Outcome<PathBuf> {
        let path = self.write(name, text)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    fn log(&self) -> PathBuf {
        self.directory.join("log")
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("collectives: {} stays behind: {error}", self.directory.display());
        }
    }
}

/// The time limit of a job.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits for all processes of a job. Returns the output of the first one.
fn wait(mut processes: Vec<Stopped>) -> Outcome<String> {
    let stdout = processes[0].0.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stdout.map_or(Ok(0), |mut stdout| stdout.read_to_string(&mut text)).map(|_| text)
    });
    let deadline = Instant::now() + PATIENCE;
    for (rank, process) in processes.iter_mut().enumerate() {
        loop {
            match process.0.try_wait()? {
                Some(status) if status.success() => break,
                Some(status) => return Err(format!("process {rank} ended with {status}").into()),
                None if Instant::now() > deadline => return Err(format!("no end after {PATIENCE:?}").into()),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
    Ok(reader.join().map_err(|_| "standard output could not be read")??)
}

/// The output of `ferroce collective --json`.
#[derive(Deserialize)]
struct Report {
    results: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    bytes: u64,
    out_of_place: Figures,
}

#[derive(Deserialize)]
struct Figures {
    time_us: f64,
    median_us: f64,
    wrong: u64,
}

fn report(output: &str) -> Outcome<Vec<Time>> {
    let Report { results } = serde_json::from_str(output)?;
    let time = |Row { bytes, out_of_place: Figures { time_us, median_us, wrong } }: Row| match wrong {
        0 => Ok(Time { bytes, mean: time_us, median: median_us }),
        _ => Err(format!("{wrong} elements are wrong").into()),
    };
    results.into_iter().map(time).collect()
}

/// Converts a raw port's rate to the time for the bytes that each of two ranks sends.
fn moved(output: &str, job: &Job, sizes: &[u64]) -> Outcome<Vec<Time>> {
    let rate: f64 = output.trim().parse()?;
    let share = if job.operation == "all_gather" { 0.5 } else { 1.0 };
    let time = |bytes: &u64| {
        let time = *bytes as f64 * share / rate * 1e6;
        Time { bytes: *bytes, mean: time, median: time }
    };
    Ok(sizes.iter().map(time).collect())
}

fn lines(output: &str) -> Outcome<Vec<Time>> {
    let time = |line: &str| -> Outcome<Time> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [bytes, mean, median, wrong] = words[..] else {
            return Err(format!("it has printed '{line}'").into());
        };
        if wrong != "0" {
            return Err(format!("{wrong} elements are wrong").into());
        }
        Ok(Time { bytes: bytes.parse()?, mean: mean.parse()?, median: median.parse()? })
    };
    output.lines().map(time).collect()
}

/// A port that was free just now.
fn free_port() -> Outcome<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
