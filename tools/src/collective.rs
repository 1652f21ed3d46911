//! `ferroce collective`: time and bandwidth of collective operations, in the manner of nccl-tests.
//!
//! - `launch.rs`: starts ranks of this program, and watches them
//! - `rank.rs`, `rails.rs`, `signals.rs`: the work of a rank, its devices, its signals
//! - `pattern.rs`: the operation, and the rank that each element comes from
//! - `values.rs`: the inputs, and the expected outputs
//! - `report.rs`, `plot.rs`: the results, and a chart

mod launch;
mod pattern;
mod plot;
mod rails;
mod rank;
mod report;
mod signals;
mod values;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use ferroce::Idle;
use ferroce_collectives::{Algorithm, Bootstrap, DataType, Options, Reduction, SharedMemory};
use ferroce_driver::machine::Machine;

use crate::failure::Failure;
use crate::memory::MemorySpec;
use crate::output::{JsonArg, check_files};
use crate::quantity::{self, Bytes, Time};
use pattern::Pattern;
use rails::Rails;
use rank::{Fault, Late};
use report::Printer;

/// Measures a collective operation between ranks, over a range of sizes, and checks every element.
///
/// With --ranks N (-g) it starts N ranks, as processes of this host. Otherwise it is one rank of a job, started by torchrun,
/// mpirun, srun, an indexed job of Kubernetes, or a script that sets FERROCE_RANK, FERROCE_SIZE and FERROCE_UNIQUE_ID. Rank 0
/// prints the report.
///
/// The columns are those of nccl-tests. "time" is the mean over the iterations, at the slowest rank. "algbw" is the size divided by
/// this time. "busbw" is algbw times a factor that makes it comparable with the bandwidth of a link: 2 (n - 1) / n for all_reduce,
/// (n - 1) / n for reduce_scatter, all_gather, all_to_all, gather and scatter, 1 for the others. As in nccl-tests, the size of an
/// operation with one block per rank is the sum of all blocks.
///
/// On SIGUSR1 a rank writes its flight recording (its last operations, see `ferroce flight`) into FERROCE_FLIGHT_DIR, or else into
/// its working directory; with --ranks this process passes the signal on to all ranks. If FERROCE_FLIGHT_DIR is set, a rank also
/// writes a recording when SIGTERM ends it. If it is set and a rank of --ranks fails, this process gives the others time to detect
/// the failure and to record before it ends them.
///
/// Exit status: 0 if every element is right, 1 if one is not or a rank failed, 2 for wrong usage, 130 if it is interrupted.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The operation. send_receive is a ring: each rank sends to the next one and receives from the previous one.
    operation: Pattern,
    /// Start N ranks on this host.
    #[arg(short = 'g', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Option<u32>,
    /// An interface (eth0), or a driver with its argument, as for the other commands. Several ports of a rank (rails) are joined by
    /// a plus: eth0+eth1. Given once, it is for all ranks; otherwise give it once per rank, in the order of the ranks [default:
    /// udp:127.0.0.1 if all ranks are on this host].
    #[arg(short, long)]
    device: Vec<Rails>,
    /// The smallest size, as 8 or 64K (K is 1024, KB is 1000).
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8")]
    min: Bytes,
    /// The largest size.
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "64MiB")]
    max: Bytes,
    /// Each size is N times the previous one.
    #[arg(short, long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
    /// Type of the elements: f32, i32, bf16, ..., or float, int32, bfloat16, ... as in nccl-tests.
    #[arg(short = 't', long, value_name = "TYPE", default_value = "f32", value_parser = parse_data_type)]
    data_type: DataType,
    /// The reduction: sum, prod, min, max, avg, or premulsum (the sum of the elements of even ranks times 1 and of odd ranks times
    /// 2).
    #[arg(short = 'o', long, value_name = "OP", default_value = "sum", value_parser = parse_reduction)]
    reduction: Reduction,
    /// The root of broadcast, reduce, gather and scatter.
    #[arg(short, long, value_name = "RANK", default_value_t = 0)]
    root: u32,
    /// Timed iterations of each size.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: u32,
    /// Untimed iterations before the timed ones.
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    warmup: u32,
    /// 1: compare every element with the expected value, in one additional iteration that is not timed. 0: do not.
    #[arg(short, long, value_name = "0|1", default_value = "1", hide_possible_values = true, action = clap::ArgAction::Set, value_parser = clap::builder::BoolishValueParser::new())]
    check: bool,
    /// Measure only in place (input and output are the same memory); by default in place and out of place. Not for all_to_all,
    /// send_receive and barrier.
    #[arg(long, conflicts_with = "out_of_place")]
    in_place: bool,
    /// Measure only out of place (input and output are separate memory); by default in place and out of place.
    #[arg(long)]
    out_of_place: bool,
    /// Use this algorithm: direct, two_step, ring, halving, tree, hierarchical or mapped; by default the communicator chooses.
    #[arg(long, value_name = "NAME", value_parser = parse_algorithm)]
    algorithm: Option<Algorithm>,
    /// Long operations are divided into chunks of this length: a multiple of 8, 1K to 16M [default: 64 bytes less than 256K].
    #[arg(long, value_name = "BYTES", value_parser = quantity::length::<1, { u32::MAX }>)]
    chunk: Option<u32>,
    /// Messages of up to this length are copied and sent without waiting for the receiver's destination address, 64 to 64K
    /// [default: 64K].
    #[arg(long, value_name = "BYTES", value_parser = quantity::length::<1, { u32::MAX }>)]
    eager: Option<u32>,
    /// What a waiting rank does: spin, yield, block, or adaptive (spin, then yield, then block) [default: adaptive; without
    /// spinning if this host has more ranks than cores].
    #[arg(long, value_name = "HOW")]
    idle: Option<Idle>,
    /// Whether ranks of one host work on memory that all of them map, without packets: auto, off, required.
    #[arg(long, default_value_t, value_name = "HOW")]
    shared_memory: SharedMemory,
    /// Memory of the elements: host, or a GPU's (opencl[:N], cuda[:N]); the GPU then also reduces.
    #[arg(long, default_value_t)]
    memory: MemorySpec,
    /// Print why each size uses its algorithm: the cost of each algorithm, by the latency and bandwidth measured at the start.
    #[arg(long)]
    explain: bool,
    /// Fail if not all ranks have joined after this time, or if an operation makes no progress for this time although all ranks
    /// answer.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    timeout: Time,
    /// A rank that does not answer for this time is treated as dead. Rounded up to 32.8 µs · 2^N [default: 4.3s].
    #[arg(long, value_name = "TIME")]
    patience: Option<Time>,
    /// Delay rank RANK by TIME in every Nth call, to try `ferroce flight` and `ferroce stat`: 2:5ms:10.
    #[arg(long, value_name = "RANK:TIME:N")]
    late: Option<Late>,
    /// Write a plot of busbw over size.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
    /// RANK:INDEX of an element of an input that a rank gets wrong on purpose, for tests.
    #[arg(long, hide = true)]
    fault: Option<Fault>,
    /// This process is a rank that the process with this id has started.
    #[arg(long, hide = true, value_name = "PROCESS")]
    as_rank_of: Option<u32>,
}

const EXAMPLES: &str = "\
Examples:
  ferroce collective all_reduce -g 4                      four ranks on this host, 8 B to 64 MiB
  ferroce collective all_to_all -g 2 -d shm:net -b 1M -e 1M -n 100
  ferroce collective reduce_scatter -g 4 -t bf16 -o avg --algorithm ring --json
  mpirun -np 16 -H node1:8,node2:8 ferroce collective all_reduce -d eth0
  mpirun -np 2 -H node1,node2 ferroce collective all_reduce -d eth0+eth1      two ports per host
  srun -N 2 --ntasks-per-node 8 ferroce collective all_gather -d eth0 --svg busbw.svg
  torchrun --no_python --nnodes 2 --nproc_per_node 8 --master_addr node1 --node_rank 0 \\
      ferroce collective broadcast -d eth0";

/// The device of ranks on one host, without `--device`.
const SHARED: &str = "udp:127.0.0.1";

/// Launches the ranks, or runs as one of them; see [`Args`] for the exit status.
///
/// # Errors
/// An argument is invalid, a rank fails, an output can't be written, or the command is interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    args.check_arguments()?;
    if let Some(parent) = args.as_rank_of {
        return launch::rank(&args, parent);
    }
    let json = args.json.file().map(|file| ("--json", file));
    check_files(&[], args.svg.as_deref().map(|file| ("--svg", file)).into_iter().chain(json))?;
    args.memory.open()?;
    let mut printer = Printer::new(&args);
    match args.ranks {
        Some(ranks) => launch::run(&args, ranks, &mut printer)?,
        None => {
            let bootstrap = Bootstrap::from_env().map_err(no_launcher)?;
            let is_first = bootstrap.rank() == 0;
            rank::run(&args, bootstrap, &mut |event| printer.hear(event))?;
            if !is_first {
                return Ok(ExitCode::SUCCESS);
            }
        }
    }
    printer.finish()
}

fn no_launcher(error: ferroce_collectives::Error) -> Failure {
    Failure::usage(format!("{error}; --ranks N starts ranks on this host"))
}

impl Args {
    /// Checks the arguments that do not depend on the number of ranks.
    fn check_arguments(&self) -> Result<(), Failure> {
        let Args { operation, min, max, algorithm, .. } = self;
        let size = self.data_type.size() as u64;
        if min.0 < size || *operation == Pattern::Barrier && min.0 == 0 {
            return Err(Failure::usage(format!(
                "--min {min}: must be at least {size} bytes, an element of {}",
                self.data_type
            )));
        }
        // Far above the memory that a rank can have.
        const MOST: u64 = 1 << 40;
        if max.0 < min.0 || max.0 > MOST {
            return Err(Failure::usage(format!("--max {max}: must be from --min {min} to {}", Bytes(MOST))));
        }
        if let Some(algorithm) =
            algorithm.filter(|algorithm| !operation.kinds().iter().all(|kind| algorithm.applies_to(*kind)))
        {
            let valid = Algorithm::ALL
                .into_iter()
                .filter(|other| operation.kinds().iter().all(|kind| other.applies_to(*kind)));
            let valid: Vec<String> = valid.map(|algorithm| algorithm.to_string()).collect();
            return Err(Failure::usage(format!(
                "--algorithm {algorithm}: {operation} has {}",
                valid.join(", ")
            )));
        }
        if self.in_place && !operation.can_be_in_place() {
            return Err(Failure::usage(format!("--in-place: {operation} can't be in place")));
        }
        if self.timeout.0.is_zero() {
            return Err(Failure::usage("--timeout 0s: must be the time that ranks need to join, as 60s"));
        }
        // As in nccl-tests.
        let is_type = |device: &&Rails| {
            let name = device.to_string();
            name.parse::<DataType>().is_ok() && !Path::new("/sys/class/net").join(name).exists()
        };
        if let Some(device) = self.device.iter().find(is_type) {
            return Err(Failure::usage(format!(
                "--device {device}: there is no such interface; the type of the elements is --data-type (-t) {device}"
            )));
        }
        if let Some(patience) = self.patience.filter(|patience| patience.0 < LEAST_PATIENCE) {
            return Err(Failure::usage(format!(
                "--patience {patience}: must be {LEAST_PATIENCE:?} at least"
            )));
        }
        match self.ranks {
            Some(ranks) => self.check_ranks(ranks),
            None => Ok(()),
        }
    }

    /// Checks the arguments that depend on the number of ranks.
    fn check_ranks(&self, ranks: u32) -> Result<(), Failure> {
        let Args { operation, root, device, .. } = self;
        if self.operation.has_root() && *root >= ranks {
            return Err(Failure::usage(format!("--root {root}: must be a rank, 0 to {}", ranks - 1)));
        }
        if *operation == Pattern::SendReceive && ranks < 2 {
            return Err(Failure::usage(format!("{operation} of {ranks} rank: must be 2 or more")));
        }
        if device.len() > 1 && device.len() != ranks as usize {
            let given = device.len();
            return Err(Failure::usage(format!(
                "--device is given {given} times: must be once for all ranks, or {ranks} times"
            )));
        }
        if device.iter().any(Rails::has_loopback) {
            return Err(Failure::usage(
                "--device loopback: it does not leave a process, and each rank is a process; use udp:127.0.0.1 or \
                 shm:NAME",
            ));
        }
        Ok(())
    }

    /// The devices of a rank.
    fn device(&self, rank: u32, are_all_here: bool) -> Result<Rails, Failure> {
        match &*self.device {
            [] if are_all_here => SHARED.parse().map_err(Failure::usage),
            [] => Err(Failure::usage(
                "--device is not given: ranks of several hosts need one, as eth0 or udp:ADDRESS",
            )),
            [one] => Ok(one.clone()),
            each => each
                .get(rank as usize)
                .cloned()
                .ok_or_else(|| Failure::usage(format!("--device is not given for rank {rank}"))),
        }
    }

    fn options(&self) -> Options {
        let mut options = Options::default()
            .algorithm(self.algorithm)
            .idle(self.idle())
            .stall_timeout(self.timeout())
            .shared_memory(self.shared_memory);
        if let Some(chunk) = self.chunk {
            options = options.chunk_bytes(chunk);
        }
        if let Some(patience) = self.patience {
            // A packet is retransmitted seven times.
            options = options.ack_timeout(patience.0 / 8);
        }
        if let Some(eager) = self.eager {
            options = options.eager_bytes(eager);
        }
        options
    }

    fn timeout(&self) -> Duration {
        self.timeout.0
    }

    /// A rank that spins does not yield its core to the other ranks on it, and may be waiting for one of them.
    fn idle(&self) -> Idle {
        let local =
            LOCAL_SIZES.iter().find_map(|name| std::env::var(name).ok()?.trim().parse::<usize>().ok());
        match (self.idle, Idle::default()) {
            (Some(idle), _) => idle,
            (None, Idle::Adaptive { yields, .. })
                if local.is_some_and(|ranks| ranks > Machine::this().cores) =>
            {
                Idle::Adaptive { spins: 0, yields }
            }
            (None, default) => default,
        }
    }

    /// Whether to run out of place, and in place.
    fn passes(&self) -> [bool; 2] {
        [!self.in_place, !self.out_of_place && self.operation.can_be_in_place()]
    }

    /// Whether the output is compared: there is something to compare, and `--check` is on.
    fn checks(&self) -> bool {
        self.check && self.operation != Pattern::Barrier
    }

    /// The settings that the communicator does not choose, as text.
    fn forced(&self) -> Vec<String> {
        let algorithm = self.algorithm.map(|algorithm| format!("algorithm {algorithm}"));
        let chunk = self.chunk.map(|bytes| format!("chunks of {bytes} B"));
        let eager = self.eager.map(|bytes| format!("eager up to {bytes} B"));
        let idle = self.idle.map(|idle| format!("idle {idle:?}"));
        let is_auto = self.shared_memory == SharedMemory::Auto;
        let shared_memory = (!is_auto).then(|| format!("shared memory {}", self.shared_memory));
        [algorithm, chunk, eager, idle, shared_memory].into_iter().flatten().collect()
    }
}

/// The environment variables with the number of ranks on this host: of torchrun, Open MPI and hydra.
const LOCAL_SIZES: [&str; 3] = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];

fn parse_data_type(text: &str) -> Result<DataType, String> {
    DataType::from_str(text).map_err(|error| error.to_string())
}

fn parse_algorithm(text: &str) -> Result<Algorithm, String> {
    Algorithm::from_str(text).map_err(|error| error.to_string())
}

fn parse_reduction(text: &str) -> Result<Reduction, String> {
    Ok(match text {
        "sum" => Reduction::Sum,
        "prod" | "product" => Reduction::Product,
        "min" => Reduction::Min,
        "max" => Reduction::Max,
        "avg" => Reduction::Average,
        // The name in nccl-tests. The factor is that of rank 0.
        "premulsum" | "mulsum" => Reduction::PreMulSum(1.0),
        _ => return Err(format!("'{text}': must be sum, prod, min, max, avg or premulsum")),
    })
}

/// Below this, a rank that loses its core for one time slice is considered failed.
const LEAST_PATIENCE: Duration = Duration::from_millis(10);

impl Args {
    /// The same arguments, for a rank.
    fn to_arguments(&self) -> Vec<String> {
        let Args { operation, min, max, factor, data_type, reduction, root, iterations, warmup, .. } = self;
        let reduction = reduction.to_string();
        let mut arguments = vec![operation.to_string()];
        let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        add("--min", min.0.to_string());
        add("--max", max.0.to_string());
        add("--factor", factor.to_string());
        add("--data-type", data_type.to_string());
        add("--reduction", reduction);
        add("--root", root.to_string());
        add("--iterations", iterations.to_string());
        add("--warmup", warmup.to_string());
        add("--check", u8::from(self.check).to_string());
        add("--shared-memory", self.shared_memory.to_string());
        add("--memory", self.memory.to_string());
        add("--timeout", self.timeout.to_string());
        self.patience.iter().for_each(|patience| add("--patience", patience.to_string()));
        self.device.iter().for_each(|device| add("--device", device.to_string()));
        if let Some(algorithm) = self.algorithm {
            add("--algorithm", algorithm.to_string());
        }
        if let Some(chunk) = self.chunk {
            add("--chunk", chunk.to_string());
        }
        if let Some(eager) = self.eager {
            add("--eager", eager.to_string());
        }
        if let Some(idle) = self.idle {
            add("--idle", name_of(idle).to_owned());
        }
        self.late.iter().for_each(|late| add("--late", late.to_string()));
        if let Some(fault) = self.fault {
            add("--fault", fault.to_string());
        }
        let flags = [
            ("--in-place", self.in_place),
            ("--out-of-place", self.out_of_place),
            ("--explain", self.explain),
        ];
        arguments.extend(flags.iter().filter(|(_, is_set)| *is_set).map(|(name, _)| (*name).to_owned()));
        arguments
    }
}

/// The name on the command line.
fn name_of(idle: Idle) -> &'static str {
    match idle {
        Idle::Spin => "spin",
        Idle::Yield => "yield",
        Idle::Block => "block",
        _ => "adaptive",
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches};

    use super::*;

    fn parse(text: &str) -> Args {
        let command = Args::augment_args(Command::new("collective").no_binary_name(true));
        Args::from_arg_matches(&command.try_get_matches_from(text.split_whitespace()).unwrap()).unwrap()
    }

    /// What a rank is started with means the same to it.
    #[test]
    fn arguments_come_back() {
        for text in [
            "all_reduce",
            "send_receive -b 1K -e 1M -f 4 -t bf16 -n 7 -w 0 -c 0 --out-of-place --timeout 1500ms",
            "reduce -o premulsum -r 3 -d shm:a+udp:127.0.0.2 -d udp:127.0.0.1 --algorithm tree --chunk 64K --eager 1K --idle block --in-place --explain",
            "all_gather --fault 1:5 --memory cuda:1 --idle adaptive --shared-memory off --patience 2s --late 1:5ms:10",
        ] {
            let args = parse(text);
            let again = parse(&args.to_arguments().join(" "));
            assert_eq!(format!("{args:?}"), format!("{again:?}"), "{text}");
        }
    }

    #[test]
    fn sizes_are_of_whole_elements_and_each_comes_once() {
        let bytes = |text: &str, ranks| -> Vec<usize> {
            let args = parse(text);
            args.operation.sizes(&args, ranks).iter().map(|size| size.bytes).collect()
        };
        assert_eq!(bytes("all_reduce -b 8 -e 64", 3), [8, 16, 32, 64]);
        assert_eq!(bytes("all_gather -b 8 -e 64 -t f64", 3), [24, 48]);
        assert_eq!(bytes("all_reduce -b 1M -e 64M -f 8", 4), [1 << 20, 8 << 20, 64 << 20]);
        assert_eq!(bytes("barrier", 4), [0]);
    }

    #[test]
    fn factors_of_busbw_are_those_of_nccl_tests() {
        for (operation, factor) in [
            ("all_reduce", 1.5),
            ("reduce_scatter", 0.75),
            ("all_to_all", 0.75),
            ("broadcast", 1.0),
            ("send_receive", 1.0),
        ] {
            assert_eq!(parse(operation).operation.bus_factor(4), factor, "{operation}");
        }
    }
}
