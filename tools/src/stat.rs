//! `ferroce stat`: counters and events of the ferroce contexts that run on this machine.

mod collectives;
mod http;
mod table;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use ferroce::{Exported, Exposition, MetricKind, Metrics};
use ferroce_collectives::flight::{Diagnosis, Recording};
use serde::Serialize;
use tracing::{info, warn};

use crate::endpoint::end_at_once_on_signals;
use crate::failure::{Failure, INTERRUPTED};
use crate::output::JsonArg;
use crate::process::command_line;
use crate::tcp::ListenAddress;
use table::Table;
pub(crate) use table::title;

/// Shows the counters of running ferroce processes: packets, losses, errors, events, objects in use.
///
/// The report includes communicators (groups of ranks of a collective job) with the traffic between each two ranks, also
/// if the processes hang. Below them it names the ranks that are late or slow, or for which others wait, as far as the
/// ranks of this host know.
///
/// ferroce's commands (`perf`, `rping`, `demo`, ...) are shown while they run, and so is every program that calls
/// `Context::export`. Root sees the processes of all users, others their own. Counters have the names of the
/// hw_counters of mlx5_ib and rdma_rxe if those count the same.
///
/// The JSON is an array of contexts; with --watch one array per line.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Only this process, or this device: the name of an interface (eth0) or RNIC (mlx5_0).
    #[arg(value_name = "PID|DEVICE")]
    which: Option<String>,
    /// Also show counters that are 0, and limits, which do not change.
    #[arg(long, conflicts_with_all = ["json", "prometheus", "listen"])]
    all: bool,
    #[command(flatten)]
    json: JsonArg,
    /// Print the report in Prometheus' text format, version 0.0.4.
    #[arg(long, conflicts_with_all = ["watch", "listen", "json"])]
    prometheus: bool,
    /// Serve the Prometheus text at http://ADDRESS:PORT/metrics until SIGINT or SIGTERM, which end it with status 0.
    /// ADDRESS is an IP address or a host name; PORT alone is 127.0.0.1:PORT, and :PORT all addresses of this host.
    #[arg(long, value_name = "[ADDRESS:]PORT", conflicts_with_all = ["watch", "json"])]
    listen: Option<ListenAddress>,
    /// Repeat every SECONDS seconds, with the increase per second.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=86400))]
    watch: Option<u32>,
    /// Number of repetitions with --watch; without end by default.
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
}

/// Shows the metrics that processes export, or serves them by HTTP.
///
/// # Errors
/// The address can't be listened on, or the output can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    // Nothing needs cleaning up at any point. For a server, a signal is the normal end.
    end_at_once_on_signals(if args.listen.is_some() { 0 } else { INTERRUPTED })?;
    args.show()?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn show(&self) -> Result<(), Failure> {
        let mut said = HashSet::new();
        if let Some(address) = &self.listen {
            return http::serve(&address.listen()?, || self.find(&mut said).exposition());
        }
        let mut output = self.json.open()?;
        let mut table = Table::new(self.all);
        let mut turn = 0;
        loop {
            let began = Instant::now();
            let found = self.find(&mut said);
            let exposition = self.prometheus.then(|| found.exposition());
            let (commands, findings) = (found.commands(), found.findings());
            let contexts = match found.or_explain() {
                Err(_) if turn > 0 => {
                    info!("the watched processes have ended");
                    return Ok(());
                }
                contexts => contexts?,
            };
            let text = if self.json.is_asked() {
                json(&contexts, self.watch.is_some())
            } else if let Some(exposition) = exposition {
                exposition
            } else {
                table.draw(&commands, contexts, began) + &findings
            };
            let is_read = output.write(format_args!("{text}"))?;
            turn += 1;
            match self.watch {
                Some(seconds) if is_read && self.count.is_none_or(|count| turn < count) => {
                    let next = began + Duration::from_secs(seconds.into());
                    thread::sleep(next.saturating_duration_since(Instant::now()));
                }
                _ => return Ok(()),
            }
        }
    }

    /// Finds all contexts, and reports what is wrong with some unless it is in `said`, the reports of the last round.
    fn find(&self, said: &mut HashSet<String>) -> Contexts {
        let exported = Exported::find();
        let mut found = Contexts {
            wanted: self.which.clone(),
            forbidden: exported.forbidden.len(),
            ..Contexts::default()
        };
        let mut complaints = HashSet::new();
        let mut complain = |path: &Path, error: &io::Error| {
            // A process of another user may have chosen the name.
            let complaint = format!("{path:?}: {error}");
            if complaints.insert(complaint.clone()) && !said.contains(&complaint) {
                warn!("{complaint}");
            }
        };
        exported.skipped.iter().for_each(|(path, error)| complain(path, error));
        for (path, metrics) in exported.read() {
            match metrics {
                Ok(metrics) if self.wants(&metrics) => found.chosen.push(metrics),
                Ok(metrics) => found.others.push(metrics),
                Err(error) => {
                    found.unread += 1;
                    complain(&path, &error);
                }
            }
        }
        let mut recordings = Vec::new();
        for (pid, recording) in Recording::running() {
            match recording {
                Ok(recording) => recordings.push(recording),
                Err(why) => {
                    found.unread += 1;
                    complain(Path::new(&format!("/proc/{pid}")), &io::Error::other(why));
                }
            }
        }
        let communicators = collectives::metrics(&recordings);
        found.chosen.extend(communicators.into_iter().filter(|metrics| self.wants(metrics)));
        found.diagnoses = Diagnosis::all(&recordings);
        *said = complaints;
        found
    }

    fn wants(&self, metrics: &Metrics) -> bool {
        let is_wanted =
            |wanted: &str| [metrics.label("pid"), metrics.label("device")].contains(&Some(wanted));
        self.which.as_deref().is_none_or(is_wanted)
    }
}

/// The most contexts that are listed in an error.
const MAX_NAMED: usize = 32;

/// The contexts on this machine.
#[derive(Default)]
struct Contexts {
    wanted: Option<String>,
    chosen: Vec<Metrics>,
    others: Vec<Metrics>,
    /// Contexts that do not answer, or with an invalid answer.
    unread: usize,
    /// Directories of other users.
    forbidden: usize,
    diagnoses: Vec<Diagnosis>,
}

impl Contexts {
    /// For Prometheus, which also needs the metrics of a hanging process.
    fn exposition(&self) -> String {
        let (chosen, unread) = (self.chosen.len(), self.unread);
        format!(
            "{}# HELP ferroce_contexts Contexts whose counters are here.\n\
             # TYPE ferroce_contexts gauge\n\
             ferroce_contexts {chosen}\n\
             # HELP ferroce_contexts_unread Contexts that do not answer, as those of a process that hangs or is stopped.\n\
             # TYPE ferroce_contexts_unread gauge\n\
             ferroce_contexts_unread {unread}\n",
            Exposition(&self.chosen)
        )
    }

    /// A line for each process, with its command.
    fn commands(&self) -> String {
        let mut pids: Vec<u32> =
            self.chosen.iter().filter_map(|metrics| metrics.label("pid")?.parse().ok()).collect();
        pids.sort_unstable();
        pids.dedup();
        let line = |pid| Some(format!("pid {pid}: {}\n", command_line(pid)?));
        pids.into_iter().filter_map(line).collect()
    }

    /// The findings about the communicators of the chosen contexts.
    fn findings(&self) -> String {
        let mut text = String::new();
        for diagnosis in &self.diagnoses {
            let id = format!("{:016x}", diagnosis.communicator);
            if self.chosen.iter().any(|metrics| metrics.label("communicator") == Some(&id)) {
                let findings =
                    diagnosis.findings.iter().map(|finding| format!("communicator {id}: {finding}\n"));
                text.extend(findings);
            }
        }
        if text.is_empty() { text } else { format!("\n{text}") }
    }

    /// The chosen contexts, or the reason that there is none.
    fn or_explain(self) -> Result<Vec<Metrics>, Failure> {
        if !self.chosen.is_empty() {
            return Ok(self.chosen);
        }
        let mut reason = match &self.wanted {
            Some(wanted) if !self.others.is_empty() => {
                let others: Vec<_> = self.others.iter().take(MAX_NAMED).map(title).collect();
                let more = match self.others.len() - others.len() {
                    0 => String::new(),
                    more => format!("; and {more} more"),
                };
                format!("no process and no device '{wanted}'; there are: {}{more}", others.join("; "))
            }
            _ => "no running ferroce process is visible; ferroce's commands (`perf`, `rping`, `demo`, ...) are \
                visible, other programs by Context::export"
                .to_owned(),
        };
        if self.forbidden > 0 {
            reason += "; only root sees those of other users (permission denied)";
        }
        Err(Failure::Run(reason))
    }
}

/// A context as JSON.
#[derive(Serialize)]
struct Json<'a> {
    labels: BTreeMap<&'a str, &'a str>,
    counters: BTreeMap<&'a str, u64>,
    /// By name and by label.
    gauges: BTreeMap<&'a str, BTreeMap<&'a str, u64>>,
}

impl Json<'_> {
    fn new(metrics: &Metrics) -> Json<'_> {
        let labels = metrics.labels().iter().map(|label| (&*label.name, &*label.value)).collect();
        let mut json = Json { labels, counters: BTreeMap::new(), gauges: BTreeMap::new() };
        for metric in metrics.iter() {
            for sample in &metric.samples {
                let label = sample.label.as_ref().map_or("", |label| &*label.value);
                match metric.kind {
                    MetricKind::Counter => json.counters.insert(&metric.name, sample.value),
                    MetricKind::Gauge => {
                        json.gauges.entry(&metric.name).or_default().insert(label, sample.value)
                    }
                };
            }
        }
        json
    }
}

fn json(contexts: &[Metrics], in_one_line: bool) -> String {
    let all: Vec<_> = contexts.iter().map(Json::new).collect();
    let value = serde_json::json!(all);
    if in_one_line { format!("{value}\n") } else { format!("{value:#}\n") }
}
