//! Finds the two flows that are the two directions of one connection.
//!
//! Packets name only the destination queue pair. Two flows are paired one to one by, in this order:
//!
//! - the connection manager
//! - the UDP source port that verbs compute from both queue pair numbers
//! - PSNs that only one flow requested
//! - MSNs that count the flow's messages from the first one
//!
//! Responses to unrequested PSNs, or of another kind or length, contradict a pair. This decides between several
//! candidates; if there is only one, it is left to the judge. A remaining pair is a guess and is not judged.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use ferroce::wire::{Operation, Position, Service, source_port};
use ferroce::{Gid, PathMtu, Psn, Qpn};

use super::packet::{Seen, answers};
use super::progress::Progress;
use crate::failure::Failure;

/// The packets to one queue pair: of a connection, or from one datagram queue pair.
pub(super) type Flow = (Gid, Gid, Qpn, Service);

/// The source queue pair of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Partner {
    pub(super) qpn: Qpn,
    /// Whether other partners are possible.
    pub(super) is_guess: bool,
}

/// The partners found so far.
#[derive(Debug, Default)]
pub(super) struct Pairing {
    partners: HashMap<Flow, Partner>,
    /// Flows with more candidates than were examined.
    crowded: HashSet<Flow>,
}

impl Pairing {
    pub(super) fn partner(&self, flow: &Flow) -> Option<Partner> {
        self.partners.get(flow).copied()
    }

    pub(super) fn is_crowded(&self, flow: &Flow) -> bool {
        self.crowded.contains(flow)
    }

    /// Pairs two queue pairs.
    pub(super) fn tie(&mut self, a: (Gid, Qpn), b: (Gid, Qpn), service: Service) {
        self.join((a.0, b.0, b.1, service), (b.0, a.0, a.1, service), false);
    }

    /// Pairs two queue pairs from now on, in place of their previous partners.
    pub(super) fn retie(&mut self, a: (Gid, Qpn), b: (Gid, Qpn), service: Service) {
        for (to, from) in [(a, b), (b, a)] {
            if let Some(before) = self.partners.remove(&(from.0, to.0, to.1, service)) {
                self.partners.remove(&(to.0, from.0, before.qpn, service));
            }
        }
        self.tie(a, b, service);
    }

    fn join(&mut self, there: Flow, back: Flow, is_guess: bool) {
        if !self.partners.contains_key(&there) && !self.partners.contains_key(&back) {
            self.partners.insert(there, Partner { qpn: back.2, is_guess });
            self.partners.insert(back, Partner { qpn: there.2, is_guess });
        }
    }

    /// Pairs the remaining flows, one to one, by how their responses fit the requests.
    pub(super) fn find(&mut self, packets: &[Rc<Seen>], progress: &mut Progress) -> Result<(), Failure> {
        let streams = Streams::of(packets, self, progress)?;
        self.crowded = streams.crowded.iter().map(|number| streams.list[*number].flow).collect();
        let mut rivals = streams.candidates(progress)?;
        let rejected = rivals.reject();
        // A certain pair leaves fewer candidates to the others.
        for tier in [Tier::Port, Tier::Alone, Tier::Count, Tier::Rest] {
            loop {
                progress.step(|| format!("{} flows are not paired yet", rivals.0.len()))?;
                let mut decided = rivals.decided(tier);
                if matches!(tier, Tier::Count | Tier::Rest) {
                    // A candidate that was not examined may be as good.
                    let is_crowded = |number: &usize| streams.crowded.contains(number);
                    decided.retain(|(a, b)| !is_crowded(a) && !is_crowded(b));
                }
                if decided.is_empty() {
                    break;
                }
                for (a, b) in decided {
                    self.join(streams.list[a].flow, streams.list[b].flow, false);
                    rivals.remove(a, b);
                }
            }
        }
        // A pair with contradictions may still be real, with a faulty end, so it remains as a guess.
        for (a, b) in rivals.ranked().into_iter().chain(rejected) {
            self.join(streams.list[a].flow, streams.list[b].flow, true);
        }
        Ok(())
    }
}

/// The requests and responses of a flow.
struct Stream {
    flow: Flow,
    /// Its UDP source port, if there is only one.
    port: Option<u16>,
    asks: Vec<Ask>,
    answers: Vec<Answer>,
    /// The index in `asks` of the newest request, by PSN.
    by_psn: HashMap<Psn, usize>,
    /// The last PSNs of its messages, without wraps, in order.
    ends: Vec<i64>,
}

/// A request packet.
struct Ask {
    /// Its index in the capture.
    at: usize,
    psn: Psn,
    operation: Operation,
    ends: bool,
    /// The length of a READ.
    length: Option<u32>,
}

/// A response packet.
struct Answer {
    at: usize,
    psn: Psn,
    operation: Operation,
    is_nak: bool,
    /// The length of a READ response that is an Only packet.
    length: Option<usize>,
    msn: Option<u32>,
}

struct Streams {
    list: Vec<Stream>,
    path_mtu: PathMtu,
    /// The number of responses of a flow to requests that only one other flow has made.
    alone: HashMap<(usize, usize), u32>,
    /// Pairs of flows with a response to a request that several flows have made.
    shared: HashSet<(usize, usize)>,
    /// Flows with a candidate that was left out, since there are too many.
    crowded: HashSet<usize>,
    /// The queue pairs of one host that another host sends to, including paired ones.
    reached: HashMap<(Gid, Gid), HashSet<Qpn>>,
}

/// The kind of evidence that makes a pair certain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tier {
    /// The UDP port that verbs compute from both queue pair numbers.
    Port,
    /// PSNs that only one flow has requested.
    Alone,
    /// MSNs that count the messages from the first one.
    Count,
    /// No contradiction, and no other candidate.
    Rest,
}

/// The evidence for and against a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Evidence {
    port: bool,
    alone: u32,
    counts: bool,
    agreeing: u32,
    contradicting: u32,
    /// The hosts send to no other queue pairs of each other.
    only: bool,
}

/// The candidates of each flow.
struct Rivals(HashMap<usize, HashMap<usize, Evidence>>);

/// The most flows that are examined as the requester of one PSN.
const ASKERS: usize = 64;
/// The most pairs that are examined.
const PAIRS: usize = 1 << 17;
/// The most packets that are examined to compare flows.
const COMPARED: usize = 20_000_000;
/// A response this far behind the requests does not belong to them.
const OLD: i32 = 1 << 16;

impl Streams {
    /// The unpaired flows of connections.
    fn of(packets: &[Rc<Seen>], known: &Pairing, progress: &mut Progress) -> Result<Streams, Failure> {
        let mut streams = Streams {
            list: Vec::new(),
            path_mtu: PathMtu::Mtu1024,
            alone: HashMap::new(),
            shared: HashSet::new(),
            crowded: HashSet::new(),
            reached: HashMap::new(),
        };
        let mut by_flow: HashMap<Flow, usize> = HashMap::new();
        // The flows that have requested a PSN, the newest last.
        let mut askers: HashMap<(Gid, Gid, Psn), Vec<usize>> = HashMap::new();
        let mut longest = 0;
        for (at, packet) in packets.iter().enumerate() {
            progress.step(|| format!("{at} of {} packets are in their flows", packets.len()))?;
            let flow =
                (packet.network.source, packet.network.destination, packet.bth.dest_qpn(), packet.service());
            if packet.service() != Service::Rc || !packet.icrc_is_right {
                continue;
            }
            streams.reached.entry((flow.0, flow.1)).or_default().insert(flow.2);
            if known.partner(&flow).is_some() {
                continue;
            }
            let number = *by_flow.entry(flow).or_insert_with(|| {
                streams.list.push(Stream::new(flow, packet.network.source_port));
                streams.list.len() - 1
            });
            let stream = &mut streams.list[number];
            stream.port = stream.port.filter(|port| packet.network.source_port == Some(*port));
            let psn = packet.psn();
            longest = longest.max(packet.payload_len());
            if packet.is_request() {
                stream.by_psn.insert(psn, stream.asks.len());
                stream.asks.push(Ask::of(at, packet));
                let list =
                    askers.entry((packet.network.source, packet.network.destination, psn)).or_default();
                if list.last() != Some(&number) {
                    list.retain(|asker| *asker != number);
                    if list.len() == ASKERS {
                        list.remove(0);
                    }
                    list.push(number);
                }
            } else if packet.is_response() || packet.is_manufacturers() {
                // ferroce's own opcode is an acknowledge.
                stream.answers.push(Answer::of(at, packet));
                match askers.get(&(packet.network.destination, packet.network.source, psn)).map(Vec::as_slice)
                {
                    Some([only]) => *streams.alone.entry((*only, number)).or_default() += 1,
                    Some(several) => {
                        for asker in several {
                            if streams.shared.len() < PAIRS {
                                streams.shared.insert((*asker, number));
                            } else if !streams.shared.contains(&(*asker, number)) {
                                streams.crowded.extend([*asker, number]);
                            }
                        }
                    }
                    None => {}
                }
            }
        }
        let fits = PathMtu::ALL.into_iter().find(|mtu| mtu.bytes() as usize >= longest.max(1));
        streams.path_mtu = fits.unwrap_or(PathMtu::Mtu4096);
        let path_mtu = streams.path_mtu;
        streams.list.iter_mut().for_each(|stream| stream.find_ends(path_mtu));
        Ok(streams)
    }

    /// The pairs with any evidence, and the evidence.
    fn candidates(&self, progress: &mut Progress) -> Result<Rivals, Failure> {
        let mut pairs: HashMap<(usize, usize), Evidence> = HashMap::new();
        let sorted = |a: usize, b: usize| (a.min(b), a.max(b));
        for ((asker, answerer), count) in &self.alone {
            pairs.entry(sorted(*asker, *answerer)).or_default().alone += count;
        }
        for (asker, answerer) in &self.shared {
            pairs.entry(sorted(*asker, *answerer)).or_default();
        }
        let mut by_port: HashMap<(Gid, Gid, u16), Vec<usize>> = HashMap::new();
        for (number, stream) in self.list.iter().enumerate() {
            let Some(port) = stream.port else { continue };
            let (source, destination, to, _) = stream.flow;
            for other in by_port.get(&(destination, source, port)).into_iter().flatten().take(ASKERS) {
                if source_port(0, to, self.list[*other].flow.2) == port {
                    pairs.entry(sorted(*other, number)).or_default().port = true;
                }
            }
            by_port.entry((source, destination, port)).or_default().push(number);
        }
        for pair in self.only_ones() {
            pairs.entry(pair).or_default().only = true;
        }
        let mut rivals = Rivals(HashMap::new());
        let mut left = COMPARED;
        let mut pairs: Vec<_> = pairs.into_iter().filter(|((a, b), _)| a != b).collect();
        pairs.sort_unstable_by_key(|(pair, evidence)| (std::cmp::Reverse(*evidence), *pair));
        let count = pairs.len();
        for (number, ((a, b), mut evidence)) in pairs.into_iter().enumerate() {
            progress.step(|| format!("{number} of {count} possible pairs are compared"))?;
            let (one, other) = (&self.list[a], &self.list[b]);
            let cost = one.len() + other.len();
            if left >= cost {
                left -= cost;
                let [there, back] = [one.answered_by(other), other.answered_by(one)];
                evidence.agreeing = there.agreeing + back.agreeing;
                evidence.contradicting = there.contradicting + back.contradicting;
                let both = [there, back].iter().all(|way| way.agreeing == 0 || way.counts);
                evidence.counts = evidence.agreeing > 0 && both;
            }
            rivals.0.entry(a).or_default().insert(b, evidence);
            rivals.0.entry(b).or_default().insert(a, evidence);
        }
        Ok(rivals)
    }
}

impl Streams {
    /// Flows between two hosts that send to only one queue pair of each other, with responses near the requests.
    fn only_ones(&self) -> Vec<(usize, usize)> {
        let is_only =
            |way: (Gid, Gid)| self.reached.get(&way).is_some_and(|queue_pairs| queue_pairs.len() == 1);
        let mut by_hosts: HashMap<(Gid, Gid), usize> = HashMap::new();
        let mut found = Vec::new();
        for (number, stream) in self.list.iter().enumerate() {
            let (source, destination, ..) = stream.flow;
            let back = (destination, source);
            if source == destination || !is_only((source, destination)) || !is_only(back) {
                continue;
            }
            by_hosts.insert((source, destination), number);
            if let Some(other) = by_hosts.get(&back) {
                let there = &self.list[*other];
                if stream.is_answered_near(there) || there.is_answered_near(stream) {
                    found.push((*other, number));
                }
            }
        }
        found
    }
}

impl Stream {
    fn new(flow: Flow, port: Option<u16>) -> Stream {
        Stream { flow, port, asks: Vec::new(), answers: Vec::new(), by_psn: HashMap::new(), ends: Vec::new() }
    }

    fn len(&self) -> usize {
        self.asks.len() + self.answers.len()
    }

    fn find_ends(&mut self, path_mtu: PathMtu) {
        let mut newest: Option<(i64, Psn)> = None;
        for ask in &self.asks {
            let psn =
                newest.map_or(i64::from(ask.psn.value()), |(at, psn)| at + i64::from(ask.psn.distance(psn)));
            newest = newest.filter(|(at, _)| *at > psn).or(Some((psn, ask.psn)));
            if ask.ends {
                self.ends.push(psn + i64::from(ask.span(path_mtu)) - 1);
            }
        }
        self.ends.sort_unstable();
        self.ends.dedup();
    }

    /// The evidence from the responses of `other` to the requests of this flow.
    fn answered_by(&self, other: &Stream) -> Evidence {
        let mut evidence = Evidence::default();
        let (Some(first), mut counted) = (self.asks.first(), 0) else { return evidence };
        let mut asks = self.asks.iter().peekable();
        let mut newest: Option<Psn> = None;
        for answer in &other.answers {
            while let Some(ask) = asks.next_if(|ask| ask.at < answer.at) {
                newest = Some(newest.filter(|newest| newest.distance(ask.psn) > 0).unwrap_or(ask.psn));
            }
            let asked = self.by_psn.get(&answer.psn).map(|at| &self.asks[*at]);
            let Some(newest) = newest else {
                // A response ahead of the first recorded request contradicts; earlier ones belong to requests before
                // the capture.
                evidence.contradicting += u32::from(answer.psn.distance(first.psn) >= 0);
                continue;
            };
            let ahead = answer.psn.distance(newest);
            let is_read = answer.operation == Operation::ReadResponse;
            match asked {
                Some(ask) if ahead <= 0 => {
                    if ask.may_have(answer) {
                        evidence.agreeing += 1;
                        counted += u32::from(self.counts(answer));
                    } else {
                        evidence.contradicting += 2;
                    }
                }
                _ if (ahead > 0 && !is_read) || ahead < -OLD => evidence.contradicting += 1,
                _ => {}
            }
        }
        evidence.counts = counted * 2 > evidence.agreeing;
        evidence
    }

    /// Whether `other` has a response near this flow's requests, allowing for unrecorded ones.
    fn is_answered_near(&self, other: &Stream) -> bool {
        let Some(first) = self.asks.first() else { return false };
        let is_near = |answer: &Answer, ask: &Ask| answer.psn.distance(ask.psn).abs() <= OLD;
        let mut behind = other.answers.iter().filter(|answer| answer.at > first.at);
        behind
            .any(|answer| is_near(answer, first) || self.asks.last().is_some_and(|ask| is_near(answer, ask)))
    }

    /// Whether the MSN of a response is the number of messages up to it, as it is if the capture has the first one.
    fn counts(&self, answer: &Answer) -> bool {
        let Some(first) = self.asks.first() else { return false };
        let psn = i64::from(first.psn.value()) + i64::from(answer.psn.distance(first.psn));
        let ended = self.ends.partition_point(|end| *end < psn + i64::from(!answer.is_nak)) as u32;
        answer.msn.is_some_and(|msn| {
            msn == ended || answer.operation == Operation::ReadResponse && msn == ended + 1
        })
    }
}

impl Ask {
    fn of(at: usize, packet: &Seen) -> Ask {
        let operation = packet.opcode.operation();
        let length =
            packet.extensions.reth.filter(|_| operation == Operation::ReadRequest).map(|reth| reth.length());
        Ask { at, psn: packet.psn(), operation, ends: packet.ends(), length }
    }

    fn span(&self, path_mtu: PathMtu) -> u32 {
        self.length.map_or(1, |length| path_mtu.packets(length))
    }

    /// Whether a response with its PSN can answer it.
    fn may_have(&self, answer: &Answer) -> bool {
        let is_as_long = match (self.length, answer.length) {
            (Some(asked), Some(came)) => asked as usize == came,
            _ => true,
        };
        answer.is_nak || answers(answer.operation, self.operation) && is_as_long
    }
}

impl Answer {
    fn of(at: usize, packet: &Seen) -> Answer {
        let operation = packet.opcode.operation();
        let is_only = operation == Operation::ReadResponse && packet.opcode.position() == Position::Only;
        Answer {
            at,
            psn: packet.psn(),
            operation,
            is_nak: packet.is_nak(),
            length: is_only.then(|| packet.payload_len()),
            msn: packet.extensions.aeth.map(|aeth| aeth.msn()),
        }
    }
}

impl Evidence {
    fn reaches(&self, tier: Tier) -> bool {
        match tier {
            Tier::Port => self.port,
            Tier::Alone => self.alone > 0,
            Tier::Count => self.counts,
            Tier::Rest => true,
        }
    }
}

impl Rivals {
    /// Rejects pairs with contradictions if there are better ones; without a better one, the judge reports the
    /// contradiction. Returns the rejected pairs, the best first.
    fn reject(&mut self) -> Vec<(usize, usize)> {
        let all = self.ranked();
        let least: HashMap<usize, u32> = self
            .0
            .iter()
            .map(|(flow, others)| (*flow, others.values().map(|e| e.contradicting).min().unwrap_or(0)))
            .collect();
        for (flow, others) in &mut self.0 {
            others.retain(|other, evidence| {
                let least = least[flow].max(least[other]);
                let is_worse = evidence.contradicting > 1 + 4 * least;
                evidence.port
                    || evidence.only
                    || (!is_worse && evidence.contradicting <= evidence.agreeing.max(1))
            });
        }
        let is_gone = |(a, b): &(usize, usize)| !self.0.get(a).is_some_and(|others| others.contains_key(b));
        all.into_iter().filter(is_gone).collect()
    }

    /// The pairs with evidence of this tier of which neither flow has another candidate nearly as good.
    fn decided(&self, tier: Tier) -> Vec<(usize, usize)> {
        let rules = |flow: usize, other: usize, evidence: &Evidence| {
            self.0[&flow].iter().all(|(rival, against)| {
                let is_weaker = match tier {
                    Tier::Alone => against.alone * 2 <= evidence.alone,
                    _ => !against.reaches(tier),
                };
                *rival == other || is_weaker
            })
        };
        let mut found = Vec::new();
        for (flow, others) in &self.0 {
            for (other, evidence) in others.iter().filter(|(_, evidence)| evidence.reaches(tier)) {
                if flow < other && rules(*flow, *other, evidence) && rules(*other, *flow, evidence) {
                    found.push((*flow, *other));
                }
            }
        }
        found
    }

    /// The remaining pairs, the best first.
    fn ranked(&self) -> Vec<(usize, usize)> {
        let mut pairs: Vec<(usize, usize, &Evidence)> = Vec::new();
        for (flow, others) in &self.0 {
            pairs
                .extend(others.iter().filter(|(other, _)| flow < other).map(|(other, e)| (*flow, *other, e)));
        }
        let rank = |e: &Evidence| (e.port, e.alone, e.counts, e.agreeing.saturating_sub(e.contradicting));
        pairs.sort_unstable_by_key(|(a, b, evidence)| (std::cmp::Reverse(rank(evidence)), *a, *b));
        pairs.into_iter().map(|(a, b, _)| (a, b)).collect()
    }

    fn remove(&mut self, a: usize, b: usize) {
        for flow in [a, b] {
            for other in self.0.remove(&flow).unwrap_or_default().keys() {
                if let Some(others) = self.0.get_mut(other) {
                    others.remove(&flow);
                }
            }
        }
    }
}
