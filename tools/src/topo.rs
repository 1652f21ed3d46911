//! `ferroce topo`: the topology of a host, the placement of its ranks, and what is placed badly.

mod report;
mod svg;
mod text;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ferroce::driver::topology::{CpuSet, Topology};
use ferroce_collectives::topology::Placement;
use ferroce_driver::gpu::GpuSpec;

use crate::failure::{Failure, legible};
use crate::output::{JsonArg, check_files, note};
use report::{Process, Report};

/// Shows the topology of this host: sockets, NUMA nodes, the PCI tree with GPUs and network cards and their speeds, the distance of
/// each GPU from each card, which card each GPU should use and the order of the ranks, both with the reasons, and
/// placements that cost performance.
///
/// Distances have the names of `nvidia-smi topo -m`. The topology is read from sysfs, or from a copy of it (--sysfs). Nothing is
/// measured or changed, and no privilege is needed.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ferroce topo
  ferroce topo --svg host.svg
  ferroce topo --pid $(pgrep -f train.py | head -1) --local-rank 0
  ferroce topo --record host-7            # then, anywhere: ferroce topo --sysfs host-7
  ferroce topo --json | jq '.warnings[] | {subject, cost, remedy}'")]
pub struct Args {
    /// Read this sysfs tree instead of /sys: a folder made by --record.
    #[arg(long, value_name = "DIR")]
    sysfs: Option<PathBuf>,
    /// Copy the sysfs files that this command reads to DIR, a new or empty folder, to examine them elsewhere or to attach them to
    /// a report. They contain names of interfaces, but no addresses.
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Also check the CPU affinity of process PID; `self` is this process (taskset -c 0-7 ferroce topo --pid self).
    #[arg(long, value_name = "PID", value_parser = pid, conflicts_with_all = ["sysfs", "cpus"])]
    pid: Option<Pid>,
    /// Also check the cost of running on these CPUs, as 0-7,64-71.
    #[arg(long, value_name = "LIST")]
    cpus: Option<CpuSet>,
    /// With --pid or --cpus: the number of this process among the ranks of this host, from 0; by default any.
    #[arg(long, value_name = "N")]
    local_rank: Option<usize>,
    /// Also write a drawing.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

/// A process id, or `None` for this process.
#[derive(Clone, Copy, Debug)]
struct Pid(Option<u32>);

fn pid(text: &str) -> Result<Pid, String> {
    match text {
        "self" => Ok(Pid(None)),
        number => {
            let number = number.parse::<u32>().map_err(|_| "must be a process id, or 'self'".to_owned())?;
            Ok(Pid(Some(number)))
        }
    }
}

/// Prints the topology.
///
/// # Errors
/// There is no sysfs tree, no such process or rank, or an output can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let outputs = [("--svg", args.svg.as_deref()), ("--json", args.json.file())];
    check_files(&[], outputs.into_iter().filter_map(|(option, path)| Some((option, path?))))?;
    if let Some(sysfs) = args.sysfs.as_ref().and_then(|sysfs| sysfs.canonicalize().ok()) {
        let is_in_it = |path: &Path| path.canonicalize().is_ok_and(|path| path.starts_with(&sysfs));
        for (option, path) in outputs.iter().filter_map(|(option, path)| Some((option, (*path)?))) {
            if is_in_it(path) {
                let path = legible(&path.display().to_string());
                return Err(Failure::usage(format!(
                    "{option} {path}: must not be a file of the tree of --sysfs"
                )));
            }
        }
    }
    if args.local_rank.is_some() && args.pid.is_none() && args.cpus.is_none() {
        return Err(Failure::usage("--local-rank needs --pid or --cpus"));
    }
    let host = match &args.sysfs {
        Some(folder) => Topology::read(folder)?,
        None => Topology::this()?,
    };
    if let Some(cpus) = &args.cpus {
        let of_nodes = host.nodes.iter().map(|node| &node.cpus);
        let known: Vec<&CpuSet> = of_nodes.chain(host.packages.iter().map(|package| &package.cpus)).collect();
        let is_known = |cpu: u32| known.is_empty() || known.iter().any(|cpus| cpus.contains(cpu));
        match cpus.iter().find(|cpu| !is_known(*cpu)) {
            Some(cpu) => return Err(Failure::usage(format!("--cpus {cpus}: this host has no CPU {cpu}"))),
            None if cpus.is_empty() => return Err(Failure::usage("--cpus: must be a list, as 0-7,64-71")),
            None => {}
        }
    }
    let sysfs = args.sysfs.as_deref().unwrap_or(Path::new("/sys"));
    if let Some(folder) = &args.record {
        Topology::record(sysfs, folder)?;
        note!("recorded into {0}: ferroce topo --sysfs {0}", legible(&folder.display().to_string()));
    }
    let placement = Placement::new(&host);
    let process = match (&args.pid, args.cpus) {
        (Some(Pid(pid)), _) => {
            Some((pid.map_or("self".to_owned(), |pid| pid.to_string()), CpuSet::of_process(*pid)?))
        }
        (None, cpus) => cpus.map(|cpus| ("with --cpus".to_owned(), cpus)),
    };
    if let Some(rank) = args.local_rank.filter(|rank| *rank >= placement.ranks.len()) {
        return Err(Failure::usage(format!(
            "--local-rank {rank}: this host has {} ranks, which count from 0",
            placement.ranks.len()
        )));
    }
    let process = process.map(|(name, cpus)| {
        let warnings = placement.check_process(&host, &cpus, args.local_rank);
        Process::new(&host, name, &cpus, args.local_rank, &warnings)
    });
    // GPU libraries see only the GPUs of this machine.
    let (libraries, absent) = if args.sysfs.is_some() { (Vec::new(), Vec::new()) } else { GpuSpec::all() };
    let report = Report::new(&name(args.sysfs.as_deref()), &host, &placement, process, &libraries, &absent);
    if let Some(path) = &args.svg {
        svg::write(path, &report, &host, &placement)?;
    }
    if !args.json.write(&report)? {
        text::print(&report, &host)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of the host: this one's host name, or the folder of the recorded tree.
fn name(sysfs: Option<&Path>) -> String {
    let name = match sysfs {
        Some(folder) => folder.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned()),
        None => fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned(),
    };
    legible(&name)
}
