//! The sender of a packet. Packets name only the destination queue pair.

use std::collections::{BTreeMap, HashMap, HashSet};

use ferroce::wire::{Service, source_port};
use ferroce::{Gid, Qpn};

use super::super::conversation::Conversation;
use super::super::pairing::Flow;
use super::super::sample::Sample;

/// A sending queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SenderName {
    Known(Gid, Qpn),
    /// A queue pair known only by the destination of its packets.
    Unknown(Flow),
}

/// The source queue pairs of the flows in a capture.
pub(super) struct Origins(HashMap<Flow, Qpn>);

/// The most flows between two hosts, and queue pairs of one host, that are compared with each other.
const MOST: usize = 256;

impl Origins {
    /// Determined from `pairs`, and from the pairs of the conversations that are no guess. For a CNP's queue pair
    /// without data: from the UDP port that verbs compute from both numbers, or because it is the only one left.
    pub(super) fn of(samples: &[Sample], conversations: &[Conversation], pairs: &[(Qpn, Qpn)]) -> Origins {
        let mut origins = HashMap::new();
        for conversation in conversations.iter().filter(|conversation| !conversation.is_guessed) {
            let [a, b] = conversation.ends;
            for (from, to) in [(a, b), (b, a)] {
                if let (Some(of), Some(at)) = (from.qpn, to.qpn) {
                    origins.insert((from.gid, to.gid, at, conversation.service), of);
                }
            }
        }
        let mut flows: HashMap<Flow, u16> = HashMap::new();
        let connected = |sample: &&Sample| sample.is_data() && sample.from.is_none();
        for sample in samples.iter().filter(connected) {
            flows.entry(flow(sample)).or_insert(sample.port.unwrap_or(0));
        }
        for flow in flows.keys() {
            let given = pairs.iter().flat_map(|(a, b)| [(*a, *b), (*b, *a)]).find(|(_, to)| *to == flow.2);
            if let Some((from, _)) = given {
                origins.insert(*flow, from);
            }
        }
        let taken: HashSet<(Gid, Qpn)> = origins.iter().map(|(flow, from)| (flow.0, *from)).collect();
        let mut strangers: BTreeMap<([u8; 16], [u8; 16]), Strangers> = BTreeMap::new();
        for (flow, port) in flows.iter().filter(|(flow, _)| !origins.contains_key(*flow)) {
            strangers.entry((flow.0.0, flow.1.0)).or_default().flows.push((*flow, *port));
        }
        let mut told = HashSet::new();
        for cnp in samples.iter().filter(|sample| sample.is_cnp()) {
            let is_free = !taken.contains(&(cnp.destination, cnp.to));
            if let Some(between) = strangers.get_mut(&(cnp.destination.0, cnp.source.0))
                && is_free
                && told.insert((cnp.destination, cnp.source, cnp.to))
            {
                between.told.push(cnp.to);
            }
        }
        for between in strangers.into_values() {
            origins.extend(between.pair());
        }
        Origins(origins)
    }

    /// The sender of this data, or the one that this CNP is for; `None` if it is neither data nor a CNP, or a packet of
    /// QP1.
    pub(super) fn sender(&self, sample: &Sample) -> Option<SenderName> {
        if sample.is_cnp() {
            return Some(SenderName::Known(sample.destination, sample.to));
        }
        if !sample.is_data() || sample.to == Qpn::GSI {
            return None;
        }
        let flow = flow(sample);
        let from = sample.from.or_else(|| self.0.get(&flow).copied());
        Some(from.map_or(SenderName::Unknown(flow), |qpn| SenderName::Known(sample.source, qpn)))
    }
}

fn flow(sample: &Sample) -> Flow {
    (sample.source, sample.destination, sample.to, sample.opcode.service())
}

/// Unpaired flows from one host to another, and unpaired queue pairs of the first host that the other one sends CNPs
/// to.
#[derive(Default)]
struct Strangers {
    flows: Vec<(Flow, u16)>,
    told: Vec<Qpn>,
}

impl Strangers {
    fn pair(mut self) -> Vec<(Flow, Qpn)> {
        let mut pairs = Vec::new();
        if self.flows.len() > MOST || self.told.len() > MOST {
            return pairs;
        }
        self.flows.retain(|(flow, port)| {
            let fits = |qpn: &&Qpn| source_port(0, **qpn, flow.2) == *port;
            let mut fitting = self.told.iter().filter(fits);
            match (fitting.next(), fitting.next()) {
                (Some(qpn), None) => {
                    pairs.push((*flow, *qpn));
                    false
                }
                _ => true,
            }
        });
        // One queue pair sends one flow.
        let once = |qpn: Qpn| pairs.iter().filter(|(_, of)| *of == qpn).count() == 1;
        let certain: Vec<(Flow, Qpn)> = pairs.iter().filter(|(_, qpn)| once(*qpn)).copied().collect();
        self.told.retain(|qpn| !pairs.iter().any(|(_, of)| of == qpn));
        let last = match (&self.flows[..], &self.told[..]) {
            ([(flow, _)], [qpn]) if flow.3 != Service::Ud => Some((*flow, *qpn)),
            _ => None,
        };
        certain.into_iter().chain(last).collect()
    }
}
