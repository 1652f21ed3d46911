//! Findings from the recordings of all ranks of a communicator.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use super::recording::{OperationRecord, RecordedCommunicator, Recording};

/// The findings from recordings of some or all ranks of a communicator.
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
    /// The number of its ranks.
    pub size: u32,
    /// Ranks without a recording.
    pub missing: Vec<u32>,
    /// The findings, the most serious first.
    pub findings: Vec<Finding>,
}

/// A problem of a communicator.
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
        /// Its state.
        why: Why,
        /// The operation in which they wait.
        operation: String,
        /// The ranks that wait, directly or for another waiting rank.
        waiting: Vec<u32>,
        /// The time without progress at the rank that has waited longest.
        waited: Duration,
    },
    /// Ranks wait for each other.
    Deadlock {
        /// The ranks, with the operation in which each waits.
        ranks: Vec<(u32, String)>,
        /// The time without progress.
        waited: Duration,
    },
    /// A rank starts operations later than others.
    Late {
        /// The rank.
        rank: u32,
        /// In how many operations it was late, as the last rank, and out of how many.
        operations: u64,
        /// See `operations`.
        of: u64,
        /// How much later than another rank, in total.
        all: Duration,
        /// The maximum.
        most: Duration,
    },
    /// A rank was off its core while it waited for operations: others had its core, or it was stopped.
    Away {
        /// The rank.
        rank: u32,
        /// The total time.
        all: Duration,
        /// The maximum.
        most: Duration,
        /// The time since its first operation started.
        of: Duration,
    },
    /// A rail between two ranks has failed, and has not recovered.
    RailLeft {
        /// The two ranks.
        ranks: (u32, u32),
        /// The rail.
        rail: u32,
    },
    /// Transfers to a rank, or from it, or both, are slower than those between others.
    SlowPort {
        /// The rank.
        rank: u32,
        /// The direction.
        way: PortWay,
        /// Its device, if there is a recording of it.
        device: String,
        /// Bytes per second of its fastest transfer.
        bytes_per_second: f64,
        /// The median of the other links.
        others: f64,
    },
    /// Transfers from one rank to another one are slower than those between others.
    SlowLink {
        /// From this rank.
        from: u32,
        /// To this one.
        to: u32,
        /// Bytes per second of its fastest transfer.
        bytes_per_second: f64,
        /// The median of the other links.
        others: f64,
    },
}

/// The slow direction of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortWay {
    /// Both sending and receiving.
    Both,
    /// Sending.
    From,
    /// Receiving.
    To,
}

/// Why others wait for a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// There is no recording of it: its process has ended, or its host was not read.
    Unknown,
    /// Its program has not called the operation.
    HasNotCalled {
        /// The number of operations of all ranks that it has called.
        calls: u64,
        /// Its current operation.
        within: Option<String>,
        /// Its last completed operation, and how long ago.
        last: Option<(String, Duration)>,
        /// How long ago it polled.
        polled: Duration,
    },
    /// It has called the operation, and no longer polls.
    DoesNotPoll {
        /// How long ago it polled.
        polled: Duration,
    },
    /// Its device has not completed its work.
    Device,
    /// Its communicator has failed or was left, and the others do not know.
    IsGone {
        /// Its error, if there was one.
        why: String,
    },
}

/// The time without progress that is reported; less is normal.
const LONG: Duration = Duration::from_secs(1);
/// A rank that has not polled for this time does something else: a waiting rank polls all the time.
const SILENT: Duration = Duration::from_millis(100);
/// A rank is late if it is this many times as late as the next one.
const OUTSTANDING: u32 = 2;
/// Times off the core, or late, are reported from this fraction of the time on.
const PART_AWAY: u32 = 20;
const PART_LATE: u32 = 100;
/// The bandwidth of a link is derived from chunks after this many bytes.
const BYTES_LEAST: u64 = 16 << 20;
/// A link is slow below this fraction of the others' bandwidth.
const SLOW: f64 = 0.7;

/// The recording of one rank.
struct Member<'a> {
    recording: &'a Recording,
    own: &'a RecordedCommunicator,
}

impl Member<'_> {
    /// The age at the time of the recording.
    fn ago(&self, time: Duration) -> Duration {
        self.recording.taken.saturating_sub(time)
    }

    /// The time since its first operation started.
    fn elapsed(&self) -> Option<Duration> {
        Some(self.recording.polled.saturating_sub(self.own.started?))
    }

    /// The oldest outstanding operation without progress for long, and for how long.
    fn stuck(&self) -> Option<(&OperationRecord, Duration)> {
        let oldest = self.own.under_way().next()?;
        let since = oldest.last.or(oldest.began).unwrap_or(self.recording.polled);
        let ago = self.ago(since);
        (ago >= LONG && self.own.failure.is_none() && !self.own.has_left).then_some((oldest, ago))
    }

    /// Why another rank would wait for it in an operation.
    fn why(&self, operation: &OperationRecord) -> Option<Why> {
        let polled = self.ago(self.recording.polled);
        if self.own.failure.is_some() || self.own.has_left {
            let why = self
                .own
                .failure
                .clone()
                .unwrap_or_else(|| "its program has dropped the communicator".to_owned());
            return Some(Why::IsGone { why });
        }
        let has_called = match operation.call {
            Some(call) => self.own.calls > call.into(),
            // Of two ranks, or of the communicator itself: if there is an outstanding operation.
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
    /// For each communicator with two ranks or more, by its id. Of several recordings of one rank the latest one counts.
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
        findings.extend(rails(ranks));
        findings.extend(late(ranks));
        findings.extend(away(ranks));
        findings.extend(slow(ranks));
        Diagnosis { communicator, size, missing, findings }
    }
}

fn failures(ranks: &BTreeMap<u32, Member<'_>>) -> Vec<Finding> {
    let failed = ranks.iter().filter_map(|(rank, member)| Some((*rank, member.own.failure.clone()?)));
    failed.map(|(rank, why)| Finding::Failed { rank, why }).collect()
}

/// Ranks that others wait for and that do not wait themselves.
fn hangs(ranks: &BTreeMap<u32, Member<'_>>, size: u32) -> Vec<Finding> {
    let stuck: BTreeMap<u32, (&OperationRecord, Duration)> =
        ranks.iter().filter_map(|(rank, member)| Some((*rank, member.stuck()?))).collect();
    // Those that it waits for; all, if unknown.
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
    // A rank with a known state is preferred to one without a recording, for which others may wait by chance.
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

/// Ranks that start later than others: if several ranks have observed one, the observations of the rank with the most count.
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
    let (all, rank) = outstanding(seen.iter().map(|(rank, (all, ..))| (*all, *rank)))?;
    let (_, operations, of, most) = seen[&rank];
    let is_late = operations > 0 && all >= elapsed(ranks) / PART_LATE;
    is_late.then_some(Finding::Late { rank, operations, of, all, most })
}

/// The rank with the longest time, if it is [`OUTSTANDING`] times that of the next one, and the time.
fn outstanding(times: impl Iterator<Item = (Duration, u32)>) -> Option<(Duration, u32)> {
    let mut order: Vec<(Duration, u32)> = times.collect();
    order.sort_unstable_by(|one, other| other.cmp(one));
    let first = *order.first()?;
    let next = order.get(1).map_or(Duration::ZERO, |(time, _)| *time);
    (first.0 > next * OUTSTANDING).then_some(first)
}

/// The time since the first operation started.
fn elapsed(ranks: &BTreeMap<u32, Member<'_>>) -> Duration {
    ranks.values().filter_map(Member::elapsed).max().unwrap_or_default()
}

/// Ranks that were off their cores.
fn away(ranks: &BTreeMap<u32, Member<'_>>) -> Option<Finding> {
    let (all, rank) = outstanding(ranks.iter().map(|(rank, member)| (member.own.away, *rank)))?;
    let of = ranks[&rank].elapsed()?;
    let is_away = all >= of / PART_AWAY;
    is_away.then_some(Finding::Away { rank, all, most: ranks[&rank].own.away_at_most, of })
}

/// The rails that have failed, at either end.
fn rails(ranks: &BTreeMap<u32, Member<'_>>) -> Vec<Finding> {
    let living = ranks.iter().filter(|(_, member)| member.own.failure.is_none() && !member.own.has_left);
    let left: BTreeSet<(u32, (u32, u32))> = living
        .flat_map(|(rank, member)| member.own.peers.iter().map(move |peer| (*rank, peer)))
        .flat_map(|(rank, peer)| {
            let ranks = (rank.min(peer.peer), rank.max(peer.peer));
            peer.rails_left.iter().map(move |rail| (*rail, ranks))
        })
        .collect();
    left.into_iter().map(|(rail, ranks)| Finding::RailLeft { ranks, rail }).collect()
}

/// From a rank, to another one, and bytes per second.
type Link = (u32, u32, f64);

/// The port whose transfers are all slower than those between others, if there is one: in both directions, or in one.
fn slow_port(links: &[Link]) -> Option<(u32, PortWay, f64, f64)> {
    let ports: BTreeSet<u32> = links.iter().flat_map(|(from, to, _)| [*from, *to]).collect();
    let mut tried = [PortWay::Both, PortWay::From, PortWay::To]
        .into_iter()
        .flat_map(|way| ports.iter().map(move |port| (*port, way)));
    tried.find_map(|(port, way)| {
        let is_of_port = |(from, to, _): &&Link| match way {
            PortWay::Both => *from == port || *to == port,
            PortWay::From => *from == port,
            PortWay::To => *to == port,
        };
        let (these, others): (Vec<&Link>, Vec<&Link>) = links.iter().partition(is_of_port);
        let quickest = these.iter().map(|(.., rate)| *rate).fold(0.0, f64::max);
        let slowest = others.iter().map(|(.., rate)| *rate).fold(f64::INFINITY, f64::min);
        let is_slow = these.len() > 1 && !others.is_empty() && quickest < SLOW * slowest;
        is_slow.then(|| (port, way, quickest, median(others.iter().map(|(.., rate)| *rate))))
    })
}

/// Links that are slower than others, or the port that they share.
fn slow(ranks: &BTreeMap<u32, Member<'_>>) -> Vec<Finding> {
    let mut links: Vec<Link> = Vec::new();
    for (rank, member) in ranks {
        for peer in
            member.own.peers.iter().filter(|peer| peer.chunk_bytes >= BYTES_LEAST && peer.quickest > 0)
        {
            links.push((*rank, peer.peer, peer.quickest as f64));
        }
    }
    // With two there is no comparison.
    if links.len() < 3 {
        return Vec::new();
    }
    let device_of =
        |rank: u32| ranks.get(&rank).map(|member| member.recording.device.clone()).unwrap_or_default();
    if let Some((rank, way, bytes_per_second, others)) = slow_port(&links) {
        return vec![Finding::SlowPort { rank, way, device: device_of(rank), bytes_per_second, others }];
    }
    let median = median(links.iter().map(|(.., rate)| *rate));
    let slow: Vec<Link> = links.into_iter().filter(|(.., rate)| *rate < SLOW * median).collect();
    let ports: BTreeSet<u32> = slow.iter().flat_map(|(from, to, _)| [*from, *to]).collect();
    let has_all = |port: &u32| slow.iter().all(|(from, to, _)| port == from || port == to);
    let mut common = ports.into_iter().filter(has_all);
    if slow.len() > 1
        && let (Some(rank), None) = (common.next(), common.next())
    {
        let bytes_per_second = slow.iter().map(|(.., rate)| *rate).fold(0.0, f64::max);
        let (device, way) = (device_of(rank), PortWay::Both);
        return vec![Finding::SlowPort { rank, way, device, bytes_per_second, others: median }];
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
                    0 => write!(f, "rank {rank} makes no progress")?,
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
                    "rank {rank} began last in {operations} of {of} operations, {} after another rank on average, {} \
                     at most, {} in all",
                    Time(mean),
                    Time(*most),
                    Time(*all)
                )
            }
            Finding::Away { rank, all, most, of } => write!(
                f,
                "rank {rank} was off its core while it waited for operations: for {} of {}, {} at most at a time",
                Time(*all),
                Time(*of),
                Time(*most)
            ),
            Finding::RailLeft { ranks: (one, other), rail } => {
                write!(
                    f,
                    "rail {rail} between ranks {one} and {other} was taken out of use, and is not used again"
                )
            }
            Finding::SlowPort { rank, way, device, bytes_per_second, others } => {
                let way = match way {
                    PortWay::Both => "to and from it",
                    PortWay::From => "from it",
                    PortWay::To => "to it",
                };
                let device = if device.is_empty() { String::new() } else { format!(" ({device})") };
                write!(
                    f,
                    "the port of rank {rank}{device} is slow: {} {way} at best, {} between others",
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
                "it has no recording here: its process has ended, or its recording is on another host",
            ),
            Why::HasNotCalled { calls, within, last, polled } => {
                write!(f, "its program has not called it")?;
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
            Why::Device => f.write_str("its device has not ended its copies and reductions"),
            Why::IsGone { why } => write!(f, "it has left the communicator: {why}"),
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

/// Bytes per second, in the units of links.
struct Rate(f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} Gb/s", self.0 * 8.0 / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gb/s of a run of four ranks in which `tc` limited rank 2 to 0.2 Gb/s, and the others shared two cores.
    #[test]
    fn a_slow_port_is_distinguished_from_slow_links() {
        let others = [(0, 1, 3.0), (0, 2, 3.2), (0, 3, 2.9), (1, 0, 1.03), (1, 2, 3.1), (1, 3, 3.0)];
        let others = others.into_iter().chain([(3, 0, 1.1), (3, 1, 1.2), (3, 2, 2.8)]);
        let links: Vec<Link> = [(2, 0, 0.09), (2, 1, 0.2), (2, 3, 0.1)].into_iter().chain(others).collect();
        let turned: Vec<Link> = links.iter().map(|(from, to, rate)| (*to, *from, *rate)).collect();
        assert_eq!(slow_port(&links), Some((2, PortWay::From, 0.2, 2.9)));
        assert_eq!(slow_port(&turned), Some((2, PortWay::To, 0.2, 2.9)));
        assert_eq!(slow_port(&links[3..]), None);
        // In both directions.
        let is_fast = |of: &&Link| of.0 != 2 && of.1 != 2;
        let both: Vec<Link> =
            links.iter().map(|of| if is_fast(&of) { *of } else { (of.0, of.1, 0.5) }).collect();
        assert_eq!(slow_port(&both), Some((2, PortWay::Both, 0.5, 2.9)));
    }
}
