//! The flows and messages of an entry of `[[traffic]]`.

use std::collections::BTreeMap;
use std::time::Duration;

use super::chance::Chance;
use super::plan::{Flow, Message};
use super::traffic::{Expanded, MOST_MESSAGES, Pattern, Scene, Traffic};

/// The expansion of one entry.
pub(super) struct Expansion<'a> {
    entry: &'a Traffic,
    scene: Scene,
    place: usize,
    to: &'a mut Expanded,
    by_pair: BTreeMap<(usize, usize), usize>,
}

impl<'a> Expansion<'a> {
    /// Expands the entry at `place` in the list.
    pub(super) fn new(entry: &'a Traffic, scene: Scene, place: usize, to: &'a mut Expanded) -> Expansion<'a> {
        Expansion { entry, scene, place, to, by_pair: BTreeMap::new() }
    }

    pub(super) fn expand(&mut self) {
        let entry = self.entry;
        let members = entry.members(self.scene);
        let bytes = entry.bytes.map_or(0, |bytes| bytes.0);
        match (entry.pattern, entry.load) {
            (Pattern::Ring, None) if !entry.endless => self.ring(&members, bytes),
            (Pattern::AllToAll, None) if !entry.endless => self.all_to_all(&members, bytes),
            (Pattern::Random, Some(load)) => {
                for (at, from) in members.iter().enumerate() {
                    let others = [&members[..at], &members[at + 1..]].concat();
                    self.arrivals(*from, &others, load);
                }
            }
            (_, load) => {
                let mut receivers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
                for (from, to) in self.pairs(&members) {
                    receivers.entry(from).or_default().push(to);
                }
                for (from, receivers) in receivers {
                    match load {
                        Some(load) => self.arrivals(from, &receivers, load),
                        None => receivers.into_iter().for_each(|to| self.flow(from, to, bytes)),
                    }
                }
            }
        }
    }

    fn pairs(&self, members: &[usize]) -> Vec<(usize, usize)> {
        let count = members.len();
        let each = members.iter().copied();
        match self.entry.pattern {
            Pattern::Pairs => self.entry.pairs.iter().map(|[from, to]| (*from, *to)).collect(),
            Pattern::Incast => {
                let to = self.entry.to.unwrap_or_default();
                each.filter(|from| *from != to).map(|from| (from, to)).collect()
            }
            Pattern::Permutation => {
                let places = Chance::new(self.scene.seed, self.place, usize::MAX).cycle(count);
                each.zip(places).map(|(from, to)| (from, members[to])).collect()
            }
            Pattern::Ring => (0..count).map(|at| (members[at], members[(at + 1) % count])).collect(),
            Pattern::AllToAll | Pattern::Random => {
                let shifted = |shift: usize| (0..count).map(move |at| (at, (at + shift) % count));
                (1..count).flat_map(shifted).map(|(from, to)| (members[from], members[to])).collect()
            }
        }
    }

    /// An endless flow, or one that sends its messages one after the other.
    fn flow(&mut self, from: usize, to: usize, bytes: u64) {
        let Traffic { endless, count, every, stop, .. } = *self.entry;
        let first = self.by_pair.len();
        let start = self.start(from).saturating_add(if endless {
            every.unwrap_or_default().0.saturating_mul(first as u32)
        } else {
            Duration::ZERO
        });
        let stop = stop.unwrap_or(self.scene.limit).0;
        let flow = self.add_flow(from, to);
        if endless {
            self.to.flows[flow].endless = Some((start, stop));
            return;
        }
        let mut before = None;
        for number in 0..count {
            let start = start + every.unwrap_or_default().0.saturating_mul(number as u32);
            let after = before.filter(|_| every.is_none()).into_iter().collect();
            before = Some(self.add_message(flow, bytes, start, after));
        }
    }

    /// Messages of a Poisson process, each to one of `receivers`.
    fn arrivals(&mut self, from: usize, receivers: &[usize], load: f64) {
        let Traffic { bytes, sizes, start, stop, .. } = *self.entry;
        let mut chance = Chance::new(self.scene.seed, self.place, from);
        let mean = self.entry.mean_bytes();
        let interval = 8.0 * mean / (load * self.scene.rate.0 as f64);
        let stop = stop.unwrap_or(self.scene.limit).0;
        let mut now = start.0;
        loop {
            now += Duration::from_secs_f64(interval * chance.exponential());
            if now >= stop || self.to.messages.len() > MOST_MESSAGES {
                return;
            }
            let to = receivers[chance.below(receivers.len() as u64) as usize];
            let bytes = sizes.map_or(bytes.map_or(1, |bytes| bytes.0), |sizes| sizes.draw(&mut chance));
            let flow = self.add_flow(from, to);
            self.add_message(flow, bytes, now, Vec::new());
        }
    }

    /// A reduce-scatter and an all-gather: each host forwards what it received from the previous one.
    fn ring(&mut self, members: &[usize], bytes: u64) {
        let count = members.len();
        let pairs = self.pairs(members);
        let flows: Vec<usize> = pairs.into_iter().map(|(from, to)| self.add_flow(from, to)).collect();
        let chunk = bytes.div_ceil(count as u64);
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); count];
        for round in 0..self.entry.count {
            for _ in 0..2 * (count - 1) {
                let mut arrives = vec![Vec::new(); count];
                for at in 0..count {
                    let start = self.start_of_round(members[at], round);
                    let message = self.add_message(flows[at], chunk, start, std::mem::take(&mut before[at]));
                    arrives[(at + 1) % count].push(message);
                }
                before = arrives;
            }
        }
    }

    /// In step s each host sends to the s-th after it.
    fn all_to_all(&mut self, members: &[usize], bytes: u64) {
        let count = members.len();
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); count];
        for round in 0..self.entry.count {
            for shift in 1..count {
                let mut arrives = vec![Vec::new(); count];
                for at in 0..count {
                    let to = (at + shift) % count;
                    let start = self.start_of_round(members[at], round);
                    let flow = self.add_flow(members[at], members[to]);
                    let message = self.add_message(flow, bytes, start, std::mem::take(&mut before[at]));
                    arrives[to].push(message);
                }
                before = arrives;
            }
        }
    }

    fn start(&self, from: usize) -> Duration {
        let spread = self.entry.spread.0.as_nanos() as u64;
        let later = Chance::new(self.scene.seed, self.place, from).below(spread + 1);
        self.entry.start.0 + Duration::from_nanos(later)
    }

    fn start_of_round(&self, from: usize, round: usize) -> Duration {
        self.start(from) + self.entry.every.unwrap_or_default().0.saturating_mul(round as u32)
    }

    /// Adds one flow for each pair.
    fn add_flow(&mut self, from: usize, to: usize) -> usize {
        let flows = &mut self.to.flows;
        *self.by_pair.entry((from, to)).or_insert_with(|| {
            flows.push(Flow { from, to, endless: None });
            flows.len() - 1
        })
    }

    fn add_message(&mut self, flow: usize, bytes: u64, start: Duration, after: Vec<usize>) -> usize {
        self.to.messages.push(Message { flow, bytes, start, after });
        self.to.messages.len() - 1
    }
}
