//! Ranks of `ferroce_collectives` on the hosts of a fabric, in virtual time. All `Collectives` are polled in one
//! thread.

use std::time::Duration;

use ferroce::{Context, Memory, Nanos};
use ferroce_collectives::{
    Buffer, Card, Collectives, Communicator, DataType, Error, Explanation, Measurement, Model, Operation,
    Options, Reduction, Request,
};
use ferroce_driver::sim::fabric::{Fabric, HostId};

use super::section::AllreduceSection;
use crate::fabric::plan::{BEGIN, Plan};
use crate::fabric::report::legible_time;
use crate::fabric::wakes::Wakes;
use crate::failure::{Failure, OrFail};

/// Total size of the ranks' private buffers; above it, all ranks share one.
const OWN_BYTES: u64 = 1 << 30;
/// Bytes of an element.
const ELEMENT: u64 = 8;
/// The most turns between two reports of progress.
const TURNS: u32 = 1 << 14;

/// All ranks, polled in one thread.
pub(super) struct Ranks {
    fabric: Fabric,
    each: Vec<Rank>,
    rails: usize,
    wakes: Wakes,
    now: Nanos,
    /// The time limit of an operation.
    limit: Duration,
    turns: u32,
    /// The length of each rank's private buffer so far.
    own_bytes: u64,
    /// The greatest length of a private buffer.
    most_own_bytes: u64,
}

struct Rank {
    collectives: Collectives,
    all: Communicator,
    /// The private buffer, whose contents are checked.
    own: Buffer,
    /// A buffer shared by all ranks, for longer operations.
    common: Option<Buffer>,
}

/// Reports progress; returns whether to continue.
pub(super) type Told<'a> = dyn FnMut() -> bool + 'a;

/// The longest of these sizes for which each rank has a private buffer.
pub(super) fn own_bytes(sizes: &[u64], ranks: usize) -> u64 {
    sizes.iter().copied().filter(|bytes| bytes * ranks as u64 <= OWN_BYTES).max().unwrap_or(ELEMENT)
}

impl Ranks {
    /// Creates the ranks and lets them meet; no channels are connected. `options` are those of the library.
    pub(super) fn meet(plan: &Plan, section: &AllreduceSection, options: &Options) -> Result<Ranks, Failure> {
        let built = plan.build()?;
        plan.fail(&built);
        let size = section.size(built.hosts.len());
        let transport = &plan.transport;
        let options = |rank: usize| {
            options
                .host((rank / section.ranks_per_host) as u128)
                .path_mtu(transport.path_mtu)
                .traffic_class(transport.dscp << 2)
                .ack_timeout(Duration::from_nanos(4096 << transport.timeout))
        };
        let mut opened = Vec::new();
        let mut cards: Vec<Card> = Vec::new();
        for rank in 0..size {
            let open = |rail: usize| -> Result<Context, Failure> {
                let host = rail * size + rank;
                let port = built.fabric.open(built.hosts[host])?;
                Ok(Context::open(Box::new(port), &plan.config(host))?)
            };
            let mut collectives = Collectives::new(open(0)?)?.unrecorded();
            for rail in 1..section.rails {
                collectives.add_rail(open(rail)?)?;
            }
            cards.push(collectives.card(&options(rank))?);
            opened.push(collectives);
        }
        let sizes = section.bytes.sizes();
        let most_own_bytes = own_bytes(&sizes, size);
        let longest = sizes.last().copied().filter(|longest| *longest > most_own_bytes);
        let common = longest.map(|longest| Memory::shared(longest as usize)).transpose();
        let common = common.or_fail(|| "memory of the ranks".into())?;
        let join = |(rank, mut collectives): (usize, Collectives)| -> Result<Rank, Failure> {
            let all = collectives.join_with(rank as u32, &cards, &options(rank))?;
            let own = collectives.allocate_private(ELEMENT as usize)?;
            let share = |memory: &Memory| Ok::<_, Failure>(collectives.register(memory.share()?)?);
            let common = common.as_ref().map(share).transpose()?;
            Ok(Rank { collectives, all, own, common })
        };
        let each: Vec<Rank> = opened.into_iter().enumerate().map(join).collect::<Result<_, _>>()?;
        let wakes = Wakes::new(built.hosts.len(), transport.poll_interval);
        let limit = plan.duration;
        Ok(Ranks {
            fabric: built.fabric,
            each,
            rails: section.rails,
            wakes,
            now: BEGIN,
            limit,
            turns: 0,
            own_bytes: ELEMENT,
            most_own_bytes,
        })
    }

    /// Measures the cost model at the ranks; `None` if stopped.
    pub(super) fn measure(&mut self, told: &mut Told<'_>) -> Result<Option<Model>, Failure> {
        let begin = |rank: &mut Rank| rank.collectives.start_measuring(rank.all);
        let mut under_way: Vec<Measurement> =
            self.each.iter_mut().map(begin).collect::<Result<_, Error>>()?;
        let mut model = None;
        let step = |rank: &mut Rank, number: usize| {
            let measured = rank.collectives.measured(&mut under_way[number])?;
            model = measured.or(model);
            Ok(measured.is_some())
        };
        let what = || "the measurement of latency and bandwidth".to_owned();
        Ok(self.go_on(told, &what, step)?.and(model))
    }

    /// The library's choice for an all-reduce of `bytes` bytes.
    pub(super) fn explain(&self, bytes: u64) -> Result<Explanation, Failure> {
        let rank = &self.each[0];
        Ok(rank.collectives.explain(rank.all, &self.operation(0, bytes))?)
    }

    /// The time of an all-reduce of `bytes` bytes, from its start at all ranks to its end at the last one; `None` if
    /// stopped. Every element is checked if the ranks use private buffers.
    pub(super) fn all_reduce(
        &mut self,
        bytes: u64,
        told: &mut Told<'_>,
    ) -> Result<Option<Duration>, Failure> {
        let is_own = bytes <= self.most_own_bytes;
        if is_own {
            self.make_room(bytes)?;
            self.fill(bytes)?;
        }
        let mut requests: Vec<Request> = Vec::new();
        for number in 0..self.each.len() {
            let operation = self.operation(number, bytes);
            let Rank { collectives, all, .. } = &mut self.each[number];
            requests.push(collectives.start(*all, &operation)?);
        }
        let what = || format!("an all-reduce of {bytes} bytes");
        let step = |rank: &mut Rank, number: usize| rank.collectives.has_ended(requests[number]);
        let time = self.go_on(told, &what, step)?;
        if is_own && time.is_some() {
            self.check(bytes)?;
        }
        Ok(time)
    }

    /// The number of events of the fabric, and the hash of all its frames.
    pub(super) fn trace(&self) -> (u64, u64) {
        (self.fabric.events(), self.fabric.trace_hash())
    }

    fn operation(&self, number: usize, bytes: u64) -> Operation {
        let rank = &self.each[number];
        let buffer = if bytes <= self.most_own_bytes { rank.own } else { rank.common.unwrap_or(rank.own) };
        let count = (bytes / ELEMENT) as usize;
        Operation::all_reduce(buffer, buffer, count, DataType::U64, Reduction::Sum)
    }

    /// Polls the ranks until `step` has returned true for each, and returns the time that took.
    fn go_on(
        &mut self,
        told: &mut Told<'_>,
        what: &dyn Fn() -> String,
        mut step: impl FnMut(&mut Rank, usize) -> Result<bool, Error>,
    ) -> Result<Option<Duration>, Failure> {
        let Ranks { fabric, each, rails, wakes, now, limit, turns, .. } = self;
        let (start, end) = (*now, *now + *limit);
        let failed = |rank: usize, error: Error| Failure::run(format!("rank {rank}: {error}"));
        let mut is_done = vec![false; each.len()];
        let mut left = each.len();
        let mut woken: Vec<HostId> = Vec::new();
        (0..each.len()).for_each(|rank| wakes.wake(rank, start));
        while left > 0 {
            *now = fabric.advance_until_woken(wakes.next().min(end), &mut woken);
            // Hosts beyond the last rail belong to no rank.
            let size = each.len();
            let hosts = woken.drain(..).filter(|host| host.number() < size * *rails);
            hosts.for_each(|host| wakes.wake(host.number() % size, *now));
            while let Some(number) = wakes.pop(*now) {
                wakes.polled(number, *now);
                let rank = &mut each[number];
                let moved = rank.collectives.poll(*now).map_err(|error| failed(number, error))?;
                if !is_done[number] && step(rank, number).map_err(|error| failed(number, error))? {
                    is_done[number] = true;
                    left -= 1;
                }
                let timeout = rank.collectives.next_timeout().unwrap_or(Nanos::NEVER);
                let next = if moved { *now } else { timeout.min(rank.collectives.next_look()) };
                if next != Nanos::NEVER {
                    wakes.wake(number, next);
                }
            }
            if *now >= end && left > 0 {
                let limit = legible_time(*limit);
                let problem = format!("{} has not ended after {limit}; --limit gives more time", what());
                return Err(Failure::run(problem));
            }
            *turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS) && !told() {
                return Ok(None);
            }
        }
        Ok(Some(now.since(start)))
    }

    /// Allocates longer buffers if the present ones are too short. The old ones stay allocated: a peer may still await
    /// an ACK for them.
    fn make_room(&mut self, bytes: u64) -> Result<(), Failure> {
        if bytes > self.own_bytes {
            for rank in &mut self.each {
                rank.own = rank.collectives.allocate_private(bytes as usize)?;
            }
            self.own_bytes = bytes;
        }
        Ok(())
    }

    /// Gives every element of every rank a different value.
    fn fill(&mut self, bytes: u64) -> Result<(), Failure> {
        for (number, rank) in (0..).zip(&mut self.each) {
            let own: Vec<u8> = (0..bytes / ELEMENT).flat_map(|at| value(number, at).to_ne_bytes()).collect();
            rank.collectives.write(rank.own, 0, &own)?;
        }
        Ok(())
    }

    fn check(&self, bytes: u64) -> Result<(), Failure> {
        let ranks = 0..self.each.len() as u64;
        let [first, second] = [0, 1].map(|at| ranks.clone().map(|rank| value(rank, at)).sum::<u64>());
        let mut own = vec![0; bytes as usize];
        for (number, rank) in self.each.iter().enumerate() {
            rank.collectives.read(rank.own, 0, &mut own)?;
            for (at, element) in (0..).zip(own.as_chunks::<8>().0) {
                let (found, right) = (u64::from_ne_bytes(*element), first + at * (second - first));
                if found != right {
                    return Err(Failure::run(format!(
                        "rank {number}, element {at} of {bytes} bytes: {found} instead of {right}"
                    )));
                }
            }
        }
        Ok(())
    }
}

/// The value of an element: linear in its index, plus an offset that depends on the rank.
fn value(rank: u64, at: u64) -> u64 {
    (rank + 1) * (rank + 3) + ((at * (2 * rank + 1)) << 16)
}
