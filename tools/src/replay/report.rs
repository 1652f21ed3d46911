//! The report of `ferroce replay`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

use super::capture::{CUT_SHORT, Capture};
use super::congestion::Congestion;
use super::conversation::Conversation;
use super::coverage::Coverage;
use super::exchange::{Exchange, Judged};
use super::judge::{Measured, hex};
use super::place::Place;
use super::play::Played;
use super::rule::{Finding, Rule, Weight};
use crate::dissect::segments::JOINED;
use crate::dissect::unopened::Unopened;
use crate::failure::Failure;
use crate::output::{JsonArg, say};

/// The whole report. Field names are stable, since scripts read them.
#[derive(Serialize)]
pub(super) struct ReplayReport {
    frames: u64,
    /// Frames that contain several packets, which are split here.
    joined_frames: u64,
    roce_packets: usize,
    /// Packets with a manufacturer opcode.
    foreign: usize,
    /// Packets with a reserved opcode, which is not a manufacturer opcode.
    reserved: u64,
    /// Conversations that are judged up to a manufacturer opcode.
    judged_in_part: usize,
    unreadable: u64,
    /// RoCE packets that can't be checked, by reason.
    unchecked: BTreeMap<&'static str, u64>,
    /// Frames without a known RoCE packet, by kind.
    unopened: Unopened,
    /// Packets with a wrong ICRC.
    damaged: u64,
    /// Conversations whose pairing is a guess.
    guessed: usize,
    /// All RoCE packets, and the judged ones.
    packets: u64,
    judged: u64,
    /// Whether a request is among the judged ones.
    #[serde(skip)]
    has_requests: bool,
    /// The judged packets of each conversation.
    #[serde(skip)]
    coverage: Vec<Coverage>,
    /// Ends that no engine replaced.
    not_played: usize,
    /// Judged packets that no engine in place of their ends got or sent.
    packets_not_played: u64,
    /// The reason that the file could not be read to its end.
    damage: Option<String>,
    /// The progress at the time of a signal.
    interrupted: Option<String>,
    conversations: Vec<ConversationReport>,
    /// The counters of each engine, by address.
    counters: Vec<(IpAddr, BTreeMap<&'static str, u64>)>,
    congestion: Congestion,
    verdict: ReplayVerdict,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum ReplayVerdict {
    NothingToJudge,
    NotPlayed,
    Conforms,
    DiffersLawfully,
    Violates,
}

#[derive(Serialize)]
struct ConversationReport {
    title: String,
    ends: Vec<EndReport>,
}

/// An end, as recorded or with the engine in its place.
#[derive(Serialize)]
pub(super) struct EndReport {
    who: String,
    verdict: ReplayVerdict,
    summary: String,
    findings: Vec<Group>,
    measured: Vec<String>,
}

/// All findings of one rule.
#[derive(Serialize)]
struct Group {
    rule: Rule,
    weight: Weight,
    count: usize,
    first: Finding,
}

impl ReplayReport {
    pub(super) fn new(
        capture: &Capture,
        conversations: &[Conversation],
        congestion: Congestion,
    ) -> ReplayReport {
        let coverage: Vec<Coverage> = conversations.iter().map(Coverage::of).collect();
        let judged = conversations.iter().zip(&coverage).filter(|(conversation, _)| !conversation.is_guessed);
        let judged = judged.map(|(_, coverage)| coverage);
        let has_requests = judged.clone().any(|coverage| coverage.has_requests);
        let reports = conversations.iter().map(|conversation| {
            let name = |end: usize| {
                let qpn = conversation.ends[end].qpn.map_or("?".to_owned(), |qpn| qpn.to_string());
                format!("{} qp {qpn}", conversation.ends[end].gid.to_ip())
            };
            let starts = [0, 1].map(|end| {
                let mut requests =
                    conversation.events.iter().filter(|e| e.from == end && e.packet.is_request());
                requests.next().map_or("none".to_owned(), |event| hex(event.psn))
            });
            let cm = if conversation.agreed.is_some() { ", set up by the connection manager" } else { "" };
            let mut title = format!("{:?} {} <> {}", conversation.service, name(0), name(1));
            let _ = write!(
                title,
                ": {} packets, first PSNs {} and {}",
                conversation.events.len(),
                starts[0],
                starts[1]
            );
            let _ = write!(
                title,
                ", path MTU {} ({}){cm}",
                conversation.path_mtu.bytes(),
                conversation.path_mtu_from
            );
            if conversation.is_guessed {
                title.push_str(", pairing guessed, not judged; --pair tells");
            }
            if let Some((frame, opcode)) = conversation.foreign {
                let _ =
                    write!(title, ", judged up to frame {frame}: opcode {opcode:#04x} is a manufacturer's");
            }
            ConversationReport {
                title: title.replace("Rc ", "RC ").replace("Uc ", "UC ").replace("Ud ", "UD "),
                ends: Vec::new(),
            }
        });
        ReplayReport {
            frames: capture.frames,
            joined_frames: capture.joined_frames,
            roce_packets: capture.packets.len(),
            foreign: capture.manufacturers_packets(),
            reserved: capture.reserved,
            judged_in_part: conversations
                .iter()
                .filter(|conversation| conversation.foreign.is_some())
                .count(),
            unreadable: capture.unreadable,
            unchecked: capture.unchecked.clone(),
            unopened: capture.unopened.clone(),
            damaged: capture.damaged
                + capture.packets.iter().filter(|packet| !packet.icrc_is_right).count() as u64,
            guessed: conversations.iter().filter(|conversation| conversation.is_guessed).count(),
            packets: capture.roce_packets(),
            judged: judged.map(Coverage::judged).sum(),
            has_requests,
            coverage,
            not_played: 0,
            packets_not_played: 0,
            damage: capture.damage.clone(),
            interrupted: None,
            conversations: reports.collect(),
            counters: Vec::new(),
            congestion,
            verdict: ReplayVerdict::NothingToJudge,
        }
    }

    /// Records the progress at the time of a signal.
    pub(super) fn interrupted(&mut self, how_far: String) {
        let before = self.interrupted.take().map_or(String::new(), |before| before + ", ");
        self.interrupted = Some(before + &how_far);
    }

    /// The judged packets of a conversation.
    pub(super) fn coverage(&self, conversation: usize) -> &Coverage {
        &self.coverage[conversation]
    }

    /// Adds ends that no engine replaces.
    pub(super) fn left_out(&mut self, conversations: &[Conversation], left_out: Vec<(Place, String)>) {
        for (Place { conversation, end }, reason) in left_out {
            let report = EndReport::not_played(&conversations[conversation], end, reason, Vec::new());
            self.recorded(conversation, report);
        }
    }

    /// Adds ends that were not played to the end. A rule that was broken before remains broken.
    pub(super) fn broken_off(
        &mut self,
        conversations: &[Conversation],
        ends: Vec<(Place, String, Vec<Finding>)>,
    ) {
        for (Place { conversation, end }, reason, findings) in ends {
            if ReplayVerdict::of(&findings) == ReplayVerdict::Violates {
                self.verdict = ReplayVerdict::Violates;
            }
            let report = EndReport::not_played(&conversations[conversation], end, reason, findings);
            self.recorded(conversation, report);
        }
    }

    /// Adds ends that were not selected.
    pub(super) fn unwanted(&mut self, ends: usize) {
        self.not_played += ends;
    }

    pub(super) fn packets_not_played(&mut self, packets: u64) {
        self.packets_not_played += packets;
    }

    /// Adds the report on an end of a conversation.
    pub(super) fn recorded(&mut self, conversation: usize, end: EndReport) {
        self.verdict = self.verdict.max(end.verdict);
        self.not_played += usize::from(end.verdict == ReplayVerdict::NotPlayed);
        self.conversations[conversation].ends.push(end);
    }

    /// Adds the report on the connection manager's messages between two hosts.
    pub(super) fn exchange(&mut self, exchange: &Exchange) {
        let [a, b] = exchange.hosts.map(|host| host.to_ip());
        let title = format!("Connection manager {a} <> {b}: {} messages", exchange.len());
        let judged = exchange.judge().into_iter().zip([a, b]);
        let ends: Vec<EndReport> = judged
            .map(|(Judged { findings, said }, host)| {
                let said: Vec<String> = said.iter().map(|(name, count)| format!("{count} {name}")).collect();
                let is_silent = said.is_empty();
                let said = if is_silent { "silent".to_owned() } else { said.join(", ") };
                EndReport::new(format!("{host} as recorded"), said, findings, Vec::new())
                    .of_nothing(is_silent)
            })
            .collect();
        self.judged += exchange.len() as u64;
        self.has_requests |= exchange.judged() > 0;
        self.verdict = ends.iter().map(|end| end.verdict).fold(self.verdict, ReplayVerdict::max);
        self.conversations.push(ConversationReport { title, ends });
    }

    pub(super) fn counters(&mut self, role: IpAddr, counters: Vec<(&'static str, u64)>) {
        self.counters.push((role, counters.into_iter().collect()));
    }

    /// Without a request the verdict is inconclusive, unless a rule is broken.
    fn verdict(&self) -> ReplayVerdict {
        match self.verdict.max(ReplayVerdict::Conforms) {
            ReplayVerdict::Violates => ReplayVerdict::Violates,
            verdict if self.has_requests => verdict,
            _ => ReplayVerdict::NothingToJudge,
        }
    }

    /// The parts that the verdict does not cover.
    fn not_judged(&self) -> String {
        let mut text = String::new();
        if self.guessed > 0 {
            let _ =
                write!(text, "; {} of {} conversations not judged", self.guessed, self.conversations.len());
        }
        if self.judged_in_part > 0 {
            let (part, all) = (self.judged_in_part, self.conversations.len());
            let _ = write!(text, "; {part} of {all} conversations judged only up to a manufacturer's opcode");
        }
        if self.judged < self.packets {
            let _ = write!(text, "; {} of {} packets not judged", self.packets - self.judged, self.packets);
            let reasons = self.unchecked.iter().map(|(reason, count)| format!("{count} {reason}"));
            let reasons = reasons.collect::<Vec<_>>().join(", ");
            if !reasons.is_empty() {
                let _ = write!(text, " ({reasons})");
            }
        }
        if self.not_played > 0 {
            let _ = write!(text, "; {} ends not played", self.not_played);
        }
        if self.packets_not_played > 0 {
            let _ = write!(text, "; {} packets not played", self.packets_not_played);
        }
        text
    }

    /// What was found in place of requests, and the remedy.
    fn seen_instead(&self) -> String {
        let mut text = ": no request that can be judged".to_owned();
        if self.frames == 0 {
            text.push_str("; the file has no frames");
        }
        if self.damaged > 0 {
            let _ = write!(text, "; the ICRC of {} is wrong, `ferroce dissect` tells why", self.damaged);
        }
        if self.guessed > 0 {
            let _ = write!(text, "; the pairing of {} conversations is guessed, --pair tells", self.guessed);
        }
        if self.foreign > 0 {
            let _ = write!(text, "; {} have a manufacturer's opcode", self.foreign);
        }
        if self.reserved > 0 {
            let _ = write!(text, "; {} have an opcode that RoCE does not have", self.reserved);
        }
        if self.unreadable > 0 {
            let _ = write!(text, "; {} contradict themselves, `ferroce dissect` tells how", self.unreadable);
        }
        for (reason, count) in &self.unchecked {
            let cure = if *reason == CUT_SHORT { ": `tcpdump -s 0` records whole packets" } else { "" };
            let _ = write!(text, "; {count} are {reason}{cure}");
        }
        let strays: u64 = self.coverage.iter().map(|coverage| coverage.strays).sum();
        if strays > 0 {
            let _ = write!(text, "; {strays} answers are to requests that were not recorded");
        }
        for (name, count) in self.unopened.most() {
            let _ = write!(text, "; {count} frames were not opened: {name}");
        }
        text
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.verdict() {
            ReplayVerdict::Violates => 1,
            _ if self.damage.is_some() => 2,
            _ if self.interrupted.is_some() => 130,
            ReplayVerdict::NothingToJudge => 3,
            ReplayVerdict::NotPlayed | ReplayVerdict::Conforms | ReplayVerdict::DiffersLawfully => 0,
        })
    }

    pub(super) fn print(&mut self, json: &JsonArg) -> Result<(), Failure> {
        self.verdict = self.verdict();
        if json.write(self)? {
            return Ok(());
        }
        say!("{}", self.text().trim_end_matches('\n'))
    }

    fn text(&self) -> String {
        let mut text = format!("{} frames, {} RoCE packets", self.frames, self.packets);
        if self.joined_frames > 0 {
            let _ = write!(text, ", {} frames with several each ({JOINED})", self.joined_frames);
        }
        if self.foreign > 0 {
            let _ = write!(text, ", {} with a manufacturer's opcode", self.foreign);
        }
        if self.reserved > 0 {
            let _ = write!(text, ", {} with an opcode that RoCE does not have", self.reserved);
        }
        if self.unreadable > 0 {
            let _ = write!(text, ", {} in contradiction with themselves", self.unreadable);
        }
        for (reason, count) in &self.unchecked {
            let _ = write!(text, ", {count} unchecked: {reason}");
        }
        for (name, count) in self.unopened.most() {
            let _ = write!(text, ", {count} frames not opened: {name}");
        }
        text.push('\n');
        for conversation in &self.conversations {
            let _ = writeln!(text, "\n{}", conversation.title);
            for end in &conversation.ends {
                let _ = writeln!(text, "  {}: {}; {}", end.who, end.verdict.text(), end.summary);
                for Group { rule, weight, count, first } in &end.findings {
                    let weight = if *weight == Weight::Lawful { "lawful" } else { "VIOLATION" };
                    let times = if *count > 1 { format!(" x{count}, first") } else { String::new() };
                    let _ = writeln!(
                        text,
                        "    {weight} {}{times} at frame {}: {}",
                        rule.name(),
                        first.frame,
                        first.text
                    );
                }
                for line in &end.measured {
                    let _ = writeln!(text, "    measured {line}");
                }
            }
        }
        let _ = writeln!(text, "{}", self.congestion);
        for (role, counters) in &self.counters {
            let shown = counters.iter().filter(|(name, _)| SHOWN.contains(name));
            let shown: Vec<String> = shown.map(|(name, value)| format!("{name} {value}")).collect();
            if !shown.is_empty() {
                let _ = writeln!(text, "ferroce as {role} counted: {}", shown.join(", "));
            }
        }
        let _ = write!(text, "{}", self.verdict.text());
        match self.verdict {
            ReplayVerdict::NothingToJudge => text.push_str(&self.seen_instead()),
            _ => text.push_str(&self.not_judged()),
        }
        if let Some(damage) = &self.damage {
            let _ = write!(text, "; the file is judged up to frame {}: {damage}", self.frames);
        }
        if let Some(how_far) = &self.interrupted {
            let _ = write!(text, "; interrupted: {how_far}");
        }
        text.push('\n');
        text
    }
}

/// Counters that show errors on the network.
const SHOWN: [&str; 10] = [
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "duplicate_request",
    "local_ack_timeout_err",
    "retransmitted_pkts",
    "rnr_nak_retry_err",
    "send_rnr_err",
    "rx_icrc_encapsulated",
    "np_cnp_sent",
];

impl ReplayVerdict {
    fn of(findings: &[Finding]) -> ReplayVerdict {
        match findings.iter().map(|finding| finding.weight).max() {
            None => ReplayVerdict::Conforms,
            Some(Weight::Lawful) => ReplayVerdict::DiffersLawfully,
            Some(Weight::Violation) => ReplayVerdict::Violates,
        }
    }

    fn text(self) -> &'static str {
        match self {
            ReplayVerdict::NothingToJudge => "nothing to judge",
            ReplayVerdict::NotPlayed => "not played",
            ReplayVerdict::Conforms => "conforms",
            ReplayVerdict::DiffersLawfully => "differs lawfully",
            ReplayVerdict::Violates => "VIOLATES",
        }
    }
}

impl EndReport {
    /// The report on an end as recorded.
    pub(super) fn recorded(
        of: &Conversation,
        end: usize,
        findings: Vec<Finding>,
        measured: &Measured,
        tells_nothing: bool,
    ) -> EndReport {
        let who = format!("{} as recorded", of.ends[end].gid.to_ip());
        EndReport::new(who, counts(measured), findings, lines(measured)).of_nothing(tells_nothing)
    }

    /// An end without judged packets does not count as conforming; a broken rule counts anyway.
    fn of_nothing(mut self, is_nothing: bool) -> EndReport {
        if is_nothing && self.verdict < ReplayVerdict::Violates {
            self.verdict = ReplayVerdict::NothingToJudge;
        }
        self
    }

    /// The report on the engine in place of an end.
    pub(super) fn played(
        of: &Conversation,
        played: &Played,
        findings: Vec<Finding>,
        measured: &Measured,
    ) -> EndReport {
        let who = format!("ferroce as {}", of.ends[played.place.end].gid.to_ip());
        let (messages, bytes) = played.compared;
        let mut summary = counts(measured);
        let _ = write!(summary, "; {} posted, {messages} compared in memory ({bytes} bytes)", played.posted);
        EndReport::new(who, summary, findings, Vec::new())
    }

    /// The report on an end that no engine replaces, or not to the end.
    fn not_played(of: &Conversation, end: usize, reason: String, findings: Vec<Finding>) -> EndReport {
        let who = format!("ferroce as {}", of.ends[end].gid.to_ip());
        EndReport { verdict: ReplayVerdict::NotPlayed, ..EndReport::new(who, reason, findings, Vec::new()) }
    }

    fn new(who: String, summary: String, findings: Vec<Finding>, measured: Vec<String>) -> EndReport {
        let verdict = ReplayVerdict::of(&findings);
        let mut groups: BTreeMap<(std::cmp::Reverse<Weight>, Rule), Vec<Finding>> = BTreeMap::new();
        for finding in findings {
            groups.entry((std::cmp::Reverse(finding.weight), finding.rule)).or_default().push(finding);
        }
        let findings = groups.into_iter().filter_map(|((std::cmp::Reverse(weight), rule), mut all)| {
            let count = all.len();
            all.sort_by_key(|finding| finding.frame);
            Some(Group { rule, weight, count, first: all.into_iter().next()? })
        });
        EndReport { who, verdict, summary, findings: findings.collect(), measured }
    }
}

fn counts(measured: &Measured) -> String {
    let mut text = format!("{} requests, {} responses", measured.requests, measured.responses);
    let others = [
        (measured.repeats, "repeated"),
        (measured.twins, "of these may be copies by the network"),
        (measured.naks, "NAKs"),
        (measured.rnr_naks, "RNR NAKs"),
        (measured.cnps, "CNPs"),
        (measured.copies, "copies by the network"),
        (measured.marked, "marked packets came"),
    ];
    for (count, what) in others.into_iter().filter(|(count, _)| *count > 0) {
        let _ = write!(text, ", {count} {what}");
    }
    text
}

fn lines(measured: &Measured) -> Vec<String> {
    let mut lines = Vec::new();
    let (right, all) = measured.go_back_n;
    if all > 0 {
        lines.push(format!("go-back-N: {right} of {all} times from the PSN of the NAK"));
    }
    if measured.restarts_unseen > 0 {
        let times = measured.restarts_unseen;
        lines.push(format!("go-back-N: {times} times from a PSN that may not have been recorded"));
    }
    let spreads = [
        ("from gap to NAK", &measured.nak_generation),
        ("from NAK to repeat", &measured.nak_reaction),
        ("from RNR NAK to repeat", &measured.rnr_wait),
        ("between CNPs", &measured.cnp_interval),
    ];
    for (what, times) in spreads {
        let mut times = times.clone();
        times.sort();
        let at = |part: usize| times.get((times.len() * part / 100).min(times.len().saturating_sub(1)));
        if let (Some(least), Some(median), Some(high), Some(most)) =
            (times.first(), at(50), at(99), times.last())
        {
            let us = |time: &Duration| format!("{:.1}", time.as_nanos() as f64 / 1e3);
            let (least, median, high, most) = (us(least), us(median), us(high), us(most));
            lines.push(format!(
                "{what}: {} times, least {least} us, p50 {median}, p99 {high}, most {most}",
                times.len()
            ));
        }
    }
    lines
}
