//! What the recordings of the ranks of a communicator tell together.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::recording::{OperationRecord, RecordedCommunicator, Recording};

/// What the recordings of some ranks of a communicator tell together.
///
/// ```
/// use ferroce_collectives::flight::{Diagnosis, Recording};
///
/// // Of the processes of this host; those of other hosts come as files.
/// let recordings: Vec<Recording> = Recording::running().into_iter().filter_map(|(_, read)| read.ok()).collect();
/// for diagnosis in Diagnosis::all(&recordings) {
///     print!("{diagnosis}");
/// }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Diagnosis {
    /// The communicator's id.
    pub communicator: u64,
    /// How many ranks it has.
    pub size: u32,
    /// Ranks of which there is no recording.
    pub missing: Vec<u32>,
    /// What was found, the gravest first.
    pub findings: Vec<Finding>,
}

/// What is wrong with a communicator.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Finding {
    /// A rank has ended with an error.
    Failed {
        /// The rank.
        rank: u32,
        /// Its error.
        why: String,
    },
    /// Ranks wait for this one.
    Hangs {
        /// The rank that they wait for.
        rank: u32,
        /// What is known of it.
        why: Why,
        /// What they wait in.
        operation: String,
        /// Who waits, directly or for another one that does.
        waiting: Vec<u32>,
        /// For how long nothing has moved at the one that has waited longest.
        waited: Duration,
    },
    /// Ranks wait for each other.
    Deadlock {
        /// The ranks, and what each waits in.
        ranks: Vec<(u32, String)>,
        /// For how long nothing has moved.
        waited: Duration,
    },
    /// A rank begins operations later than others.
    Late {
        /// The rank.
        rank: u32,
        /// In how many operations it was the last, by so much that it matters, and of how many.
        operations: u64,
        /// See `operations`.
        of: u64,
        /// How much later than another rank, in all.
        all: Duration,
        /// At most.
        most: Duration,
    },
    /// All that goes to or comes from a rank is slower than what goes between others.
    SlowPort {
        /// The rank.
        rank: u32,
        /// Its device, if it has left a recording.
        device: String,
        /// Bytes in a second of what went quickest there.
        bytes_per_second: f64,
        /// The same of the other links: the median.
        others: f64,
    },
    /// What goes from one rank to another one is slower than what goes between others.
    SlowLink {
        /// From this rank.
        from: u32,
        /// To this one.
        to: u32,
        /// Bytes in a second of what went quickest there.
        bytes_per_second: f64,
        /// The same of the other links: the median.
        others: f64,
    },
}

/// Why others wait for a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// There is no recording of it: its process has ended, or nobody has looked.
    Unknown,
    /// Its program has not called the operation.
    HasNotCalled {
        /// How many operations of all ranks it has called.
        calls: u64,
        /// The one that it is in.
        within: Option<String>,
        /// The last that has ended there, and how long ago.
        last: Option<(String, Duration)>,
        /// How long ago it has polled.
        polled: Duration,
    },
    /// It has called, and polls no more.
    DoesNotPoll {
        /// How long ago it has polled.
        polled: Duration,
    },
    /// Its device has not ended what it was given.
    Device,
    /// Its communicator has failed or was given back, and the others do not know.
    IsGone {
        /// Its error, if there was one.
        why: String,
    },
}

/// Nothing has moved for so long: shorter, and it is work.
const LONG: Duration = Duration::from_secs(1);
/// Whoever has not polled for so long does something else: one that waits polls all the time.
const SILENT: Duration = Duration::from_millis(100);
/// A rank is late if it is so many times as late as the next one.
const OUTSTANDING: u32 = 2;
/// Chunks tell how quick a link is from so many bytes on.
const BYTES_LEAST: u64 = 16 << 20;
/// A link is slow that has less than this of what the others have.
const SLOW: f64 = 0.7;

/// One rank, as it was recorded.
struct Member<'a> {
    recording: &'a Recording,
    own: &'a RecordedCommunicator,
}

impl Member<'_> {
    /// How long ago, when the recording was taken.
    fn ago(&self, time: Duration) -> Duration {
        self.recording.taken.saturating_sub(time)
    }

    /// The oldest operation that has not ended, if nothing has moved in it for long, and for how long.
    fn stuck(&self) -> Option<(&OperationRecord, Duration)> {
        let oldest = self.own.under_way().next()?;
        let since = oldest.last.or(oldest.began).unwrap_or(self.recording.polled);
        let ago = self.ago(since);
        (ago >= LONG && self.own.failure.is_none() && !self.own.has_left).then_some((oldest, ago))
    }

    /// Why another one would wait for it in an operation.
    fn why(&self, operation: &OperationRecord) -> Option<Why> {
        let polled = self.ago(self.recording.polled);
        if self.own.failure.is_some() || self.own.has_left {
            let why = self
                .own
                .failure
                .clone()
                .unwrap_or_else(|| "its program has given the communicator back".to_owned());
            return Some(Why::IsGone { why });
        }
        let has_called = match operation.call {
            Some(call) => self.own.calls > call.into(),
            // Of two ranks, or the communicator's own: as far as anything is under way.
            None => self.own.under_way().next().is_some(),
        };
        if !has_called {
            let last = self
                .own
                .operations
                .iter()
                .rev()
                .find_map(|last| Some((last.operation.clone(), self.ago(last.ended?))));
            let within = self.own.under_way().next().map(|of| of.operation.clone());
            return Some(Why::HasNotCalled { calls: self.own.calls, within, last, polled });
        }
        if polled >= LONG {
            return Some(Why::DoesNotPoll { polled });
        }
        let waits_for_itself = |(stuck, _): (&OperationRecord, _)| stuck.waits_for == [self.own.rank];
        self.stuck().is_some_and(waits_for_itself).then_some(Why::Device)
    }
}

impl Diagnosis {
    /// Of each communicator that has two ranks or more, by its id. Of several recordings of one rank the last one counts.
    pub fn all(recordings: &[Recording]) -> Vec<Diagnosis> {
        let mut communicators: BTreeMap<u64, BTreeMap<u32, Member<'_>>> = BTreeMap::new();
        for recording in recordings {
            for own in recording.communicators.iter().filter(|own| own.size > 1) {
                let ranks = communicators.entry(own.id).or_default();
                if ranks.get(&own.rank).is_none_or(|known| known.recording.taken <= recording.taken) {
                    ranks.insert(own.rank, Member { recording, own });
                }
            }
        }
        communicators.into_iter().map(|(id, ranks)| Diagnosis::of(id, &ranks)).collect()
    }

    fn of(communicator: u64, ranks: &BTreeMap<u32, Member<'_>>) -> Diagnosis {
        let size = ranks.values().map(|member| member.own.size).max().unwrap_or(0);
        let missing = (0..size).filter(|rank| !ranks.contains_key(rank)).collect();
        let mut findings = failures(ranks);
        findings.extend(hangs(ranks, size));
        findings.extend(late(ranks));
        findings.extend(slow(ranks));
        Diagnosis { communicator, size, missing, findings }
    }
}

fn failures(ranks: &BTreeMap<u32, Member<'_>>) -> Vec<Finding> {
    let failed = ranks.iter().filter_map(|(rank, member)| Some((*rank, member.own.failure.clone()?)));
    failed.map(|(rank, why)| Finding::Failed { rank, why }).collect()
}

/// Who is waited for and does not wait itself.
fn hangs(ranks: &BTreeMap<u32, Member<'_>>, size: u32) -> Vec<Finding> {
    let stuck: BTreeMap<u32, (&OperationRecord, Duration)> =
        ranks.iter().filter_map(|(rank, member)| Some((*rank, member.stuck()?))).collect();
    // Those that it waits for; all, where that is not known.
    let waits_for = |rank: u32, operation: &OperationRecord| -> Vec<u32> {
        let named: Vec<u32> = operation.waits_for.iter().copied().filter(|peer| *peer < size).collect();
        let is_all = named.is_empty() || named.len() < operation.waits_for_count as usize;
        if is_all { (0..size).filter(|peer| *peer != rank).collect() } else { named }
    };
    let mut guilty: BTreeMap<u32, (Why, &OperationRecord, BTreeSet<u32>, Duration)> = BTreeMap::new();
    for (rank, (operation, waited)) in &stuck {
        for peer in waits_for(*rank, operation) {
            let why = match ranks.get(&peer) {
                None => Some(Why::Unknown),
                Some(member) => member.why(operation),
            };
            if let Some(why) = why {
                let entry = guilty.entry(peer).or_insert((why, operation, BTreeSet::new(), *waited));
                entry.2.insert(*rank);
                entry.3 = entry.3.max(*waited);
            }
        }
    }
    // What is known of one tells more than that nothing is known of another one, which may be waited for by chance.
    if guilty.values().any(|(why, ..)| *why != Why::Unknown) {
        guilty.retain(|_, (why, ..)| *why != Why::Unknown);
    }
    if guilty.is_empty() && !stuck.is_empty() {
        let waited = stuck.values().map(|(_, waited)| *waited).min().unwrap_or_default();
        let ranks = stuck.iter().map(|(rank, (operation, _))| (*rank, operation.operation.clone())).collect();
        return vec![Finding::Deadlock { ranks, waited }];
    }
    let is_only = guilty.len() == 1;
    let all: BTreeSet<u32> = stuck.keys().copied().collect();
    let finding = |(rank, (why, operation, waiting, waited)): (
        u32,
        (Why, &OperationRecord, BTreeSet<u32>, Duration),
    )| {
        let waiting = if is_only { &all } else { &waiting };
        let waiting = waiting.iter().copied().filter(|waiting| *waiting != rank).collect();
        Finding::Hangs { rank, why, operation: operation.operation.clone(), waiting, waited }
    };
    guilty.into_iter().map(finding).collect()
}

/// Who begins later than others: of what several have seen of a rank, what the one has that has seen most.
fn late(ranks: &BTreeMap<u32, Member<'_>>) -> Option<Finding> {
    let mut seen: BTreeMap<u32, (Duration, u64, u64, Duration)> = BTreeMap::new();
    for member in ranks.values() {
        let of = member.own.forgotten + member.own.operations.len() as u64;
        for peer in &member.own.peers {
            let this = (peer.late_by, peer.late, of, peer.late_at_most);
            let known = seen.entry(peer.peer).or_default();
            *known = (*known).max(this);
        }
    }
    let mut order: Vec<(Duration, u32)> = seen.iter().map(|(rank, (all, ..))| (*all, *rank)).collect();
    order.sort_unstable_by(|one, other| other.cmp(one));
    let (all, rank) = *order.first()?;
    let next = order.get(1).map_or(Duration::ZERO, |(all, _)| *all);
    let (_, operations, of, most) = seen[&rank];
    let is_late = operations > 0 && all > next * OUTSTANDING;
    is_late.then_some(Finding::Late { rank, operations, of, all, most })
}

/// Links that are slower than others, or the port that all of them have in common.
fn slow(ranks: &BTreeMap<u32, Member<'_>>) -> Vec<Finding> {
    let mut links: Vec<(u32, u32, f64)> = Vec::new();
    for (rank, member) in ranks {
        for peer in
            member.own.peers.iter().filter(|peer| peer.chunk_bytes >= BYTES_LEAST && peer.quickest > 0)
        {
            links.push((*rank, peer.peer, peer.quickest as f64));
        }
    }
    // Two tell nothing of each other.
    if links.len() < 3 {
        return Vec::new();
    }
    let median = median(links.iter().map(|(.., rate)| *rate));
    let slow: Vec<(u32, u32, f64)> = links.into_iter().filter(|(.., rate)| *rate < SLOW * median).collect();
    let ports: BTreeSet<u32> = slow.iter().flat_map(|(from, to, _)| [*from, *to]).collect();
    let has_all = |port: &u32| slow.iter().all(|(from, to, _)| port == from || port == to);
    let mut common = ports.into_iter().filter(has_all);
    if slow.len() > 1
        && let (Some(rank), None) = (common.next(), common.next())
    {
        let bytes_per_second = slow.iter().map(|(.., rate)| *rate).fold(0.0, f64::max);
        let device = ranks.get(&rank).map(|member| member.recording.device.clone()).unwrap_or_default();
        return vec![Finding::SlowPort { rank, device, bytes_per_second, others: median }];
    }
    let finding =
        |(from, to, bytes_per_second)| Finding::SlowLink { from, to, bytes_per_second, others: median };
    slow.into_iter().map(finding).collect()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl fmt::Display for Diagnosis {
    /// A line for each finding.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.findings.iter().try_for_each(|finding| writeln!(f, "{finding}"))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Failed { rank, why } => write!(f, "rank {rank} has failed: {why}"),
            Finding::Hangs { rank, why, operation, waiting, waited } => {
                match waiting.len() {
                    0 => write!(f, "rank {rank} does not go on")?,
                    1 => write!(f, "{} waits for rank {rank}", these(waiting))?,
                    _ => write!(f, "{} wait for rank {rank}", these(waiting))?,
                }
                write!(f, " in {operation}, for {}: {why}", Time(*waited))
            }
            Finding::Deadlock { ranks, waited } => {
                write!(f, "ranks wait for each other, for {}: ", Time(*waited))?;
                for (index, (rank, operation)) in ranks.iter().enumerate() {
                    write!(f, "{}rank {rank} in {operation}", if index > 0 { "; " } else { "" })?;
                }
                Ok(())
            }
            Finding::Late { rank, operations, of, all, most } => {
                let mean = *all / u32::try_from((*operations).max(1)).unwrap_or(u32::MAX);
                write!(
                    f,
                    "rank {rank} came last in {operations} of {of} operations, {} after another rank on average, {} at most, {} \
                     in all",
                    Time(mean),
                    Time(*most),
                    Time(*all)
                )
            }
            Finding::SlowPort { rank, device, bytes_per_second, others } => {
                let device = if device.is_empty() { String::new() } else { format!(" ({device})") };
                write!(
                    f,
                    "the port of rank {rank}{device} is slow: {} to and from it, {} between others",
                    Rate(*bytes_per_second),
                    Rate(*others)
                )
            }
            Finding::SlowLink { from, to, bytes_per_second, others } => {
                let (this, others) = (Rate(*bytes_per_second), Rate(*others));
                write!(f, "from rank {from} to rank {to} it is slow: {this}, {others} between others")
            }
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Unknown => f.write_str(
                "there is no recording of it; its process has ended, or its recording is not here",
            ),
            Why::HasNotCalled { calls, within, last, polled } => {
                write!(f, "its program has not called that")?;
                match (within, last) {
                    (Some(within), _) => write!(f, "; it is in {within}")?,
                    (None, Some((last, ago))) => {
                        write!(f, "; its last was {last}, which ended {} before", Time(*ago))?
                    }
                    (None, None) => write!(f, "; it has called {calls} operations")?,
                }
                match *polled >= SILENT {
                    true => write!(
                        f,
                        ", and it has not polled for {}: it computes, hangs or is stopped",
                        Time(*polled)
                    ),
                    false => write!(f, ", and it polls: its program does something else"),
                }
            }
            Why::DoesNotPoll { polled } => {
                let polled = Time(*polled);
                write!(
                    f,
                    "it has called that too, and has not polled for {polled}: it computes, hangs or is stopped"
                )
            }
            Why::Device => f.write_str("its device has not ended what it was given"),
            Why::IsGone { why } => write!(f, "it is out of the communicator: {why}"),
        }
    }
}

/// Ranks: `rank 3`, `ranks 0, 1 and 3`.
fn these(ranks: &[u32]) -> String {
    match ranks {
        [one] => format!("rank {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(u32::to_string).collect();
            format!("ranks {} and {last}", first.join(", "))
        }
        [] => "no rank".to_owned(),
    }
}

/// A time with three digits.
struct Time(Duration);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        match seconds {
            ..1e-3 => write!(f, "{:.1} µs", seconds * 1e6),
            1e-3..1.0 => write!(f, "{:.1} ms", seconds * 1e3),
            _ => write!(f, "{seconds:.1} s"),
        }
    }
}

/// Bytes in a second, as links have them.
struct Rate(f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} Gb/s", self.0 * 8.0 / 1e9)
    }
}
