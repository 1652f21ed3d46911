//! `ferroce fabric`: congestion control, ECN and PFC in a simulated fabric of switches. The hosts run the real engine.
//!
//! A `Description` (a scenario, or a TOML file, changed by options) becomes a `Plan`, which is pure data, and a `Plan`
//! becomes an `Outcome`.
//!
//! - `description.rs`, `scenario.rs`, `file.rs`, `options.rs`: the description and its sources
//! - `compile.rs`, `expansion.rs`, `traffic.rs`, `sizes.rs`, `chance.rs`: from description to plan; every value is
//!   checked
//! - `plan.rs`: the plan
//! - `world.rs`, `host.rs`, `wakes.rs`, `watch.rs`: a run of the plan
//! - `outcome.rs`, `measure.rs`, `ways.rs`: the outcome, and the numbers computed from it
//! - `compare.rs`, `campaign.rs`: comparisons of settings; runs over several cores
//! - `effect.rs`, `memory.rs`: options without effect; the buffer memory of the switches
//! - `report.rs`, `heading.rs`, `json.rs`, `plot.rs`, `capture.rs`: the output
//! - `wrong.rs`: an invalid value
//! - `allreduce.rs`, `allreduce/`: collectives in place of flows
//!
//! `--describe` prints the description of a scenario, so a file can express everything that a scenario can.

mod allreduce;
mod campaign;
mod capture;
mod chance;
mod compare;
mod compile;
mod description;
mod effect;
mod expansion;
mod file;
mod heading;
mod host;
mod json;
mod measure;
mod memory;
mod options;
mod outcome;
mod plan;
mod plot;
mod report;
mod scenario;
mod sizes;
mod traffic;
mod wakes;
mod watch;
mod ways;
mod world;
mod wrong;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread::available_parallelism;

use clap::ValueEnum;
use ferroce_driver::heap;
use ferroce_driver::pcap::Recording;
use ferroce_driver::sim::fabric::Built;

use crate::endpoint::Interrupt;
use crate::failure::{Failure, legible};
use crate::output::{self, JsonArg, check_files, say};
use capture::PortFile;
use compare::{Compared, compared};
use compile::Compiled;
use description::Description;
use effect::Effect;
use memory::Memory;
use options::{SceneOptions, Settings};
use report::{Case, Keeping, Run, legible_time};
use scenario::Scenario;
use traffic::Group;
use wrong::Wrong;

/// Simulates a fabric of switches and shows the effects of congestion control, ECN, PFC and retransmission modes.
#[derive(clap::Args, Clone, Debug)]
#[command(long_about = ABOUT, after_long_help = EXAMPLES, mut_args = options::with_hyphens)]
pub struct Args {
    /// incast, fairness, burst, victim, permutation, allreduce, alltoall, websearch, or a TOML file.
    #[arg(value_name = "SCENARIO|FILE")]
    scenario: String,
    #[command(flatten)]
    scene: SceneOptions,
    #[command(flatten)]
    settings: Settings,
    /// Run with each of these settings and print them side by side: congestion controls, as off,dcqcn, or values of any
    /// option of the groups "Links and switches", "Hosts" and "Time", as kmin=50KB,100KB or pfc=on,off; a plus joins options
    /// (kmin=50KB+pmax=1). If it is given several times, all combinations are run.
    #[arg(long, value_name = "LIST", help_heading = "What is run and printed")]
    compare: Vec<String>,
    /// Seed of all random decisions; 1 by default.
    #[arg(long, value_name = "SEED", help_heading = "What is run and printed", value_parser = options::whole::<u64>)]
    seed: Option<u64>,
    /// Run with N seeds, --seed and the following ones, and print mean and standard deviation.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "What is run and printed", value_parser = options::between::<1, 10_000>)]
    seeds: u64,
    /// Simulations that run in parallel; by default the number of cores.
    #[arg(long, value_name = "N", help_heading = "What is run and printed", value_parser = options::between::<1, 1024>)]
    jobs: Option<u64>,
    /// Write plots of rates and queues over time, for the first seed of each setting; for allreduce, of time over size.
    #[arg(long, value_name = "FILE", help_heading = "What is run and printed")]
    svg: Option<PathBuf>,
    /// Record the packets of a port, named as in the report (switch0:3, host2), into a pcapng file with virtual time;
    /// can be given several times. Not with --compare, --seeds or allreduce.
    #[arg(long, value_name = "PORT=FILE", help_heading = "What is run and printed")]
    pcap: Vec<PortFile>,
    #[command(flatten, next_help_heading = "What is run and printed")]
    json: JsonArg,
    /// Add goodput, rates and queues of each sample to the JSON.
    #[arg(long, requires = "json", help_heading = "What is run and printed")]
    series: bool,
    /// Print the scenario with all options as a TOML file, and run nothing.
    #[arg(long, conflicts_with_all = ["compare", "svg", "pcap", "json"], help_heading = "What is run and printed")]
    describe: bool,
}

/// From this number of hosts on, huge pages pay off. The second constant is the heap of each host.
const LARGE: usize = 256;
const HEAP_PER_HOST: usize = 512 << 10;

// One line per paragraph; clap wraps them.
const ABOUT: &str = "\
Simulates a fabric of switches and shows the effects of congestion control, ECN, PFC and retransmission modes.

Hosts run the engine of ferroce, unchanged, over switches with shared buffers, ECN marking, PFC and ECMP, in virtual time: \
no packet leaves the process, neither root nor a network is needed, and the same seed gives the same run on any machine.

SCENARIO is one of these (default of N in parentheses), or a TOML file (--describe prints one to start from; \
docs/fabric.md describes the format):
  incast       N senders (16), 10 messages of 1 MB, to one receiver
  fairness     N endless senders (4) to one receiver; a new one starts every 2 ms
  burst        N senders (16), 256 KB every 5 ms; two endless senders
  victim       a flow that shares a paused link with an incast of N senders (16)
  permutation  N hosts (32), each sends 10 messages of 1 MB to one other
  allreduce    N ranks (64) of ferroce-collectives: all algorithms, 1 KiB to 4 MiB
  alltoall     N hosts (16), each sends 1 MB to each other host
  websearch    N hosts (32), a web search workload, 30 % load, 20 ms

The report has goodput, flow completion times (FCT: from the post of a message to its completion) and \
slowdown (FCT divided by that of the flow alone), Jain's fairness index, queues, marks, CNPs, pauses, drops \
and retransmissions.";

const EXAMPLES: &str = "\
Examples:
  ferroce fabric incast --hosts 32
      32 senders to one receiver, with DCQCN, ECN and PFC.
  ferroce fabric incast --hosts 32 --kmin 100KB --pfc off
      The same, with ECN marks from a queue of 100 KB on, and without PFC.
  ferroce fabric incast --compare off,dcqcn --compare pfc=on,off --seeds 5
      Four settings side by side, mean and standard deviation of 5 seeds.
  ferroce fabric permutation --topology fat-tree --hosts 128 --rate 400G
  ferroce fabric victim --describe > victim.toml; ferroce fabric victim.toml
      The scenario as a file, to be changed.

Exit status: 0 if every message was completed, or the scenario has no end and ran until its limit; 1 if a \
queue pair failed, a message was not completed, or nothing was delivered or measured (the report is \
printed); 2 if a value is invalid or has no effect; 130 if it was interrupted (the results until then are \
printed).";

/// Runs the command and prints the report.
///
/// # Errors
/// A value is invalid, a queue pair fails, a message is not completed, a file can't be written, or the command is
/// interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let bases = args.bases()?;
    let Some(first) = bases.first() else { return Err(Failure::usage("--compare: no setting to run")) };
    if args.describe {
        let text = file::write(&first.description)?;
        return output::write(format_args!("{text}")).map(|_| ExitCode::SUCCESS);
    }
    args.check_outputs()?;
    let hosts = bases.iter().map(|base| base.description.topology.hosts()).max().unwrap_or(0);
    if hosts >= LARGE && !heap::prefer_huge_pages(hosts * HEAP_PER_HOST) {
        tracing::debug!("no huge pages for {hosts} hosts: a run takes 20 % longer");
    }
    if first.description.seed.checked_add(args.seeds - 1).is_none() {
        let (seed, seeds) = (first.description.seed, args.seeds);
        let most = u64::MAX - (seeds - 1);
        return Err(Failure::usage(format!("--seed {seed}: must be at most {most} with --seeds {seeds}")));
    }
    let runs = bases.len() as u64 * args.seeds;
    if !args.pcap.is_empty() && runs > 1 {
        return Err(Failure::usage(format!(
            "--pcap: there are {runs} runs; must be a single one, without --compare and --seeds"
        )));
    }
    let interrupt = Interrupt::install()?;
    if let Some(section) = &first.description.allreduce {
        return allreduce::run(&args, &bases, section, &interrupt);
    }
    let campaign = Campaign::new(&args, &bases)?;
    let (cases, recorded) = campaign.run(&args, &interrupt)?;
    let interrupted = interrupt.check().is_err().then(|| campaign.interrupted(&cases));
    campaign.print(&args, &cases, interrupted)?;
    // The report was printed even if a file could not be written.
    recorded?;
    if let Some(path) = &args.svg {
        plot::write(path, &campaign.command, &first.description, &cases)?;
    }
    interrupt.check()?;
    campaign.judge(&cases)
}

/// Checks whether a text is a valid file for [`run`]. An error has the line number, from 1, and the reason.
///
/// # Errors
/// The text is invalid.
pub fn check(text: &str) -> Result<(), (usize, String)> {
    file::parse(text).map(drop)
}

/// One setting of the comparison.
struct Base {
    label: String,
    settings: Settings,
    description: Description,
    memory: Memory,
}

impl Base {
    fn effect(&self) -> Effect<'_> {
        Effect { settings: &self.settings, description: &self.description, memory: &self.memory }
    }
}

impl Args {
    /// The runs with the first seed, one for each setting.
    fn bases(&self) -> Result<Vec<Base>, Failure> {
        let of_option = |wrong: Wrong| self.of_option(&wrong);
        let scene = match Scenario::from_str(&self.scenario, false) {
            Ok(scenario) => scenario.describe(&self.scene, self.settings.uplink()).map_err(of_option)?,
            Err(_) => self.file()?,
        };
        let base = |compared: Compared| {
            let Compared { label, settings } = compared;
            let mut description = scene.clone();
            settings.apply(&mut description);
            description.seed = self.seed.unwrap_or(description.seed);
            let compiled = description.compile().map_err(of_option)?;
            let memory = Memory::of(&compiled.plan, description.allreduce.as_ref())?;
            Ok(Base { label, settings, description: description.resolve(), memory })
        };
        let bases: Vec<Base> =
            compared(&self.compare, &self.settings)?.into_iter().map(base).collect::<Result<_, Failure>>()?;
        effect::check(&bases.iter().map(Base::effect).collect::<Vec<_>>()).map_err(of_option)?;
        Ok(bases)
    }

    fn file(&self) -> Result<Description, Failure> {
        let path = PathBuf::from(&self.scenario);
        if !path.exists() {
            let names: Vec<String> = Scenario::value_variants().iter().map(Scenario::to_string).collect();
            let names = names.join(", ");
            return Err(Failure::usage(format!(
                "'{}' is neither a scenario nor a file; the scenarios are {names}",
                self.scenario
            )));
        }
        if let Some(option) = options::arguments(&self.scene).first() {
            let option = option.split('=').next().unwrap_or_default();
            return Err(Failure::usage(format!(
                "{option} is for the scenarios; {} says it itself",
                self.scenario
            )));
        }
        file::read(&path)
    }

    /// The error for an invalid value: by option if it was given as one, otherwise by its place in the file.
    fn of_option(&self, wrong: &Wrong) -> Failure {
        let key = wrong.key();
        let is_file = Scenario::from_str(&self.scenario, false).is_err();
        let is_given = self.compare.iter().any(|list| list.contains(&format!("{key}=")))
            || options::given(&self.settings).iter().any(|(name, _)| name == key);
        // A named scenario sets the other values, so an option of this name is the way to correct it.
        match is_given || !is_file && options::is_option(key) {
            true => Failure::usage(format!("--{key} {}: must be {}", legible(&wrong.value), wrong.right)),
            false => Failure::usage(wrong.to_string()),
        }
    }

    /// Checks before any run that each output has a file of its own.
    fn check_outputs(&self) -> Result<(), Failure> {
        for (at, port) in self.pcap.iter().enumerate() {
            if self.pcap[..at].iter().any(|other| other.port() == port.port()) {
                return Err(Failure::usage(format!(
                    "--pcap: {} is given twice; one file is enough",
                    legible(port.port())
                )));
            }
        }
        let svg = self.svg.iter().map(|path| ("--svg", path.as_path()));
        let pcap = self.pcap.iter().map(|port| ("--pcap", port.path()));
        let json = self.json.file().map(|path| ("--json", path));
        check_files(&[("the scenario", Path::new(&self.scenario))], svg.chain(pcap).chain(json))
    }

    /// The number of concurrent simulations.
    fn threads(&self) -> usize {
        let cores = || available_parallelism().map_or(1, |cores| cores.get());
        self.jobs.map_or_else(cores, |jobs| jobs as usize)
    }

    /// The command line of all runs.
    fn command_of_all(&self, bases: &[Base]) -> String {
        let lists = self.compare.iter().flat_map(|list| ["--compare".to_owned(), list.clone()]);
        let mut rest: Vec<String> = lists.collect();
        rest.extend(bases.first().map(|base| format!("--seed={}", base.description.seed)));
        if self.seeds > 1 {
            rest.push(format!("--seeds={}", self.seeds));
        }
        self.command(&self.settings, &rest)
    }

    /// The command line of the runs of these settings.
    fn command(&self, settings: &Settings, rest: &[String]) -> String {
        let mut words = vec!["ferroce".to_owned(), "fabric".to_owned(), self.scenario.clone()];
        words.extend(options::arguments(&self.scene));
        words.extend(options::arguments(settings));
        words.extend_from_slice(rest);
        words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }
}

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+%@~^".contains(c);
    match word.chars().all(is_plain) && !word.is_empty() && !word.starts_with('~') {
        true => word.to_owned(),
        false => format!("'{}'", legible(word).replace('\'', r"'\''")),
    }
}

/// All runs: setting by setting, and seed by seed.
struct Campaign<'a> {
    bases: &'a [Base],
    seeds: u64,
    plans: Vec<Compiled>,
    groups: Vec<Group>,
    /// The command that repeats the campaign.
    command: String,
}

impl<'a> Campaign<'a> {
    fn new(args: &Args, bases: &'a [Base]) -> Result<Campaign<'a>, Failure> {
        let mut plans = Vec::new();
        for base in bases {
            for seed in 0..args.seeds {
                let mut description = base.description.clone();
                description.seed += seed;
                plans.push(description.compile().map_err(|wrong| args.of_option(&wrong))?);
            }
        }
        let groups = plans.first().map(|plan| plan.groups.clone()).unwrap_or_default();
        let command = args.command_of_all(bases);
        Ok(Campaign { bases, seeds: args.seeds, plans, groups, command })
    }

    /// The results, and whether all requested recordings succeeded.
    fn run(&self, args: &Args, interrupt: &Interrupt) -> Result<(Vec<Case>, Result<(), Failure>), Failure> {
        let recordings = Mutex::new(Vec::new());
        let observe = |built: &Built| {
            for port in &args.pcap {
                let recording = port.record(built)?;
                recordings.lock().unwrap_or_else(PoisonError::into_inner).push(recording);
            }
            Ok(())
        };
        let run = |number: usize, progress: &mut dyn FnMut(f64) -> bool| {
            let (compiled, base) = (&self.plans[number], &self.bases[number / self.seeds as usize]);
            let outcome = world::run_observed(&compiled.plan, progress, observe)?;
            let is_first = number.is_multiple_of(self.seeds as usize);
            let series = args.json.is_asked() && args.series || args.svg.is_some() && is_first;
            let keeping = Keeping { series, details: args.json.is_asked() || is_first };
            let command = args.command(&base.settings, &[format!("--seed={}", compiled.plan.seed)]);
            Ok(Run::new(compiled, outcome, command, keeping))
        };
        let mut runs = campaign::carry_out(self.plans.len(), args.threads(), interrupt, &run)?.into_iter();
        let recordings = recordings.into_inner().unwrap_or_else(PoisonError::into_inner);
        let failure = recordings.iter().find_map(Recording::failure);
        let recorded = failure.map_or(Ok(()), |failure| Err(Failure::run(failure)));
        let cases = self.bases.iter().map(|base| {
            let runs = runs.by_ref().take(self.seeds as usize).flatten().collect();
            Case { label: base.label.clone(), runs }
        });
        Ok((cases.filter(|case| !case.runs.is_empty()).collect(), recorded))
    }

    /// The results that are missing after an interruption.
    fn interrupted(&self, cases: &[Case]) -> String {
        if let ([_], [case]) = (self.plans.as_slice(), cases)
            && let Some(run) = case.runs.first()
        {
            let limit = self.bases[0].description.time.limit;
            return format!(
                "interrupted at {} of {limit}: the report covers a part of the run",
                legible_time(run.outcome.duration)
            );
        }
        let done: usize = cases.iter().map(|case| case.runs.len()).sum();
        let absent = self.bases.iter().filter(|base| cases.iter().all(|case| case.label != base.label));
        let absent: Vec<String> = absent.map(|base| format!("'{}'", base.label)).collect();
        let of = self.plans.len();
        let fewer = cases.iter().filter(|case| case.runs.len() < self.seeds as usize);
        let fewer =
            fewer.map(|case| format!("'{}' has {} of {} seeds", case.label, case.runs.len(), self.seeds));
        let mut left: Vec<String> = fewer.collect();
        if done == 0 {
            left = vec!["there are no results".to_owned()];
        } else if !absent.is_empty() {
            left.push(format!("without a run, and left out: {}", absent.join(", ")));
        }
        let left = left.join("; ");
        format!("interrupted: only the {done} of {of} runs that were complete are reported; {left}")
    }

    fn print(&self, args: &Args, cases: &[Case], interrupted: Option<String>) -> Result<(), Failure> {
        let first = &self.bases[0];
        let mut notes = effect::notes(&self.bases.iter().map(Base::effect).collect::<Vec<_>>());
        notes.extend(cases.iter().filter_map(Case::note));
        if args.json.is_asked() {
            let report = json::Report::new(
                &first.description,
                &self.command,
                interrupted.as_deref(),
                &notes,
                cases,
                args.series,
            );
            return args.json.write(&report).map(drop);
        }
        let names: Vec<String> = self.groups.iter().map(|group| group.name.clone()).collect();
        let labels: Vec<&str> = cases.iter().map(|case| case.label.as_str()).collect();
        let seeds = cases.iter().map(|case| case.runs.len()).max().unwrap_or(0);
        output::write(format_args!("{}\n", report::heading(&first.description, &first.memory, &labels)))?;
        if seeds > 1 {
            output::write(format_args!("mean ± standard deviation of {seeds} seeds\n"))?;
        }
        for note in notes.iter().chain(&interrupted) {
            output::write(format_args!("note      {note}\n"))?;
        }
        output::write(format_args!("\n"))?;
        output::write(format_args!("{}\n", report::table(cases, &names)))?;
        for case in cases {
            output::write(format_args!("{}", case.details(cases.len() == 1)))?;
        }
        if let Some(interrupted) = &interrupted {
            output::write(format_args!("{interrupted}\n"))?;
        }
        say!("{}\n\nrepeat it by: {}", report::memory(), self.command)
    }

    /// Whether all work was completed.
    fn judge(&self, cases: &[Case]) -> Result<ExitCode, Failure> {
        let complaints: Vec<String> = cases.iter().flat_map(Case::complaints).collect();
        match complaints.as_slice() {
            [] => Ok(ExitCode::SUCCESS),
            [first] => Err(Failure::run(first)),
            [first, others @ ..] => {
                Err(Failure::run(format!("{first}; and {} more runs like this", others.len())))
            }
        }
    }
}
