//! Carries out a plan, event by event, with contexts on `driver::sim::fabric`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use ferroce::{CongestionControl, Memory, Nanos};
use ferroce_driver::sim::fabric::{Built, Fabric, HostId, address};

use super::host::{Host, News, PIECE};
use super::outcome::{FlowOutcome, HostCounters, MessageOutcome, Outcome};
use super::plan::{BEGIN, Plan};
use super::wakes::Wakes;
use super::watch::Watch;
use super::ways::Ways;
use crate::failure::{Failure, OrFail};

/// Carries out a plan. `progress` gets the fraction that is done, at least at each sample, and stops the run by
/// returning `false`.
#[cfg(test)]
pub(crate) fn run(plan: &Plan, progress: &mut dyn FnMut(f64) -> bool) -> Result<Outcome, Failure> {
    run_observed(plan, progress, |_| Ok(()))
}

/// The same, with a look at the fabric before the run.
pub(crate) fn run_observed(
    plan: &Plan,
    progress: &mut dyn FnMut(f64) -> bool,
    observe: impl FnOnce(&Built) -> Result<(), Failure>,
) -> Result<Outcome, Failure> {
    let start = Instant::now();
    let mut world = World::new(plan)?;
    observe(&world.built)?;
    let set_up = start.elapsed();
    world.go_on(progress)?;
    Ok(world.outcome(set_up, start.elapsed() - set_up))
}

/// The most turns between two reports of progress, which also check for an interruption.
const TURNS: u32 = 1 << 14;

struct World<'a> {
    plan: &'a Plan,
    built: Built,
    fabric: Fabric,
    hosts: Vec<Host>,
    /// For each flow, its queue pairs at the two hosts.
    ends: Vec<[usize; 2]>,
    messages: Vec<Delivery>,
    wakes: Wakes,
    /// Scheduled actions of the plan.
    agenda: BinaryHeap<Reverse<(Nanos, Item)>>,
    watch: Watch,
    polls: u64,
    completed: usize,
}

/// An action that the plan schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    /// An endless flow starts or stops.
    Endless { flow: usize, begins: bool },
    /// The start time of a message is reached. It is posted if all messages before it have arrived.
    Message { number: usize },
}

/// The state of a message.
#[derive(Clone, Default)]
struct Delivery {
    /// The number of conditions before it is posted: messages that must arrive first, and its start time.
    awaits: usize,
    /// Messages that wait for this one.
    followers: Vec<usize>,
    posted: Option<Nanos>,
    completed: Option<Nanos>,
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan) -> Result<World<'a>, Failure> {
        let built = plan.build()?;
        let mut queue_pairs = vec![0; built.hosts.len()];
        let mut ends = Vec::new();
        for flow in &plan.flows {
            ends.push([flow.from, flow.to].map(|host| {
                queue_pairs[host] += 1;
                queue_pairs[host] - 1
            }));
        }
        // All hosts share one memory region: its contents are unused, and it stays in the cache.
        let memory = Memory::shared(PIECE as usize).or_fail(|| "memory of the hosts".into())?;
        let mut hosts = Vec::new();
        for (number, queue_pairs) in queue_pairs.iter().enumerate() {
            let port = built.fabric.open(built.hosts[number])?;
            let (config, memory) = (plan.config(number), memory.share()?);
            hosts.push(Host::open(Box::new(port), config, *queue_pairs, memory, &plan.transport)?);
        }
        for (flow, [from, to]) in plan.flows.iter().zip(&ends) {
            let [here, there] = [hosts[flow.from].end(*from)?, hosts[flow.to].end(*to)?];
            hosts[flow.from].connect(*from, there, address(flow.to), &plan.transport)?;
            hosts[flow.to].connect(*to, here, address(flow.from), &plan.transport)?;
        }
        let mut messages = vec![Delivery::default(); plan.messages.len()];
        let mut agenda = BinaryHeap::new();
        for (number, message) in plan.messages.iter().enumerate() {
            messages[number].awaits = message.after.len() + 1;
            for before in &message.after {
                messages[*before].followers.push(number);
            }
            agenda.push(Reverse((BEGIN + message.start, Item::Message { number })));
        }
        for (flow, endless) in
            plan.flows.iter().enumerate().filter_map(|(at, flow)| Some((at, flow.endless?)))
        {
            for (time, begins) in [(endless.0, true), (endless.1, false)] {
                agenda.push(Reverse((BEGIN + time, Item::Endless { flow, begins })));
            }
        }
        let fabric = built.fabric.clone();
        plan.fail(&built);
        let watch = Watch::new(plan, &built, &ends);
        Ok(World {
            plan,
            built,
            fabric,
            hosts,
            ends,
            messages,
            wakes: Wakes::new(plan.topology.hosts.len(), plan.transport.poll_interval),
            agenda,
            watch,
            polls: 0,
            completed: 0,
        })
    }

    fn go_on(&mut self, progress: &mut dyn FnMut(f64) -> bool) -> Result<(), Failure> {
        let is_endless = self.plan.flows.iter().any(|flow| flow.endless.is_some());
        let end = BEGIN + self.plan.duration;
        let mut sample = BEGIN + self.plan.sample;
        // The measured time begins with a sample.
        let mut warm = Some(BEGIN + self.plan.warm_up).filter(|warm| *warm > BEGIN);
        let mut turns = 0_u32;
        let mut woken: Vec<HostId> = Vec::new();
        let mut due: Vec<usize> = Vec::new();
        loop {
            let next = |time: Option<Nanos>| time.unwrap_or(Nanos::NEVER);
            let item = next(self.agenda.peek().map(|Reverse((time, _))| *time));
            let limit = self.wakes.next().min(item).min(sample).min(next(warm)).min(end);
            let now = self.fabric.advance_until_woken(limit, &mut woken);
            for host in woken.drain(..) {
                self.wakes.wake(host.number(), now);
            }
            while self.agenda.peek().is_some_and(|Reverse((time, _))| *time <= now) {
                let Some(Reverse((_, item))) = self.agenda.pop() else { break };
                self.begin(item, now)?;
            }
            due.extend(std::iter::from_fn(|| self.wakes.pop(now)));
            for host in due.drain(..) {
                self.poll(host, now)?;
            }
            let is_over = now >= end || !is_endless && self.is_over();
            turns = turns.wrapping_add(1);
            let samples = now >= sample || now >= next(warm) || is_over;
            if samples || turns.is_multiple_of(TURNS) {
                if samples {
                    self.watch.sample(&self.fabric, &self.hosts, now.since(BEGIN));
                }
                if now >= sample {
                    sample = sample + self.plan.sample;
                }
                warm = warm.filter(|warm| now < *warm);
                if is_over {
                    return Ok(());
                }
                if !progress(self.part(now.since(BEGIN))) {
                    if !samples {
                        self.watch.sample(&self.fabric, &self.hosts, now.since(BEGIN));
                    }
                    return Ok(());
                }
            }
        }
    }

    /// The fraction of the run that is done: it ends with the last message, or at its time limit.
    fn part(&self, now: Duration) -> f64 {
        let time = now.as_secs_f64() / self.plan.duration.as_secs_f64();
        match self.messages.len() {
            0 => time,
            messages => time.max(self.completed as f64 / messages as f64),
        }
    }

    /// Whether all messages are completed, or no further event can occur, as after queue pairs have failed.
    fn is_over(&self) -> bool {
        let is_still = || {
            self.wakes.next() == Nanos::NEVER && self.agenda.is_empty() && self.fabric.next_event().is_none()
        };
        self.completed == self.messages.len() || is_still()
    }

    fn begin(&mut self, item: Item, now: Nanos) -> Result<(), Failure> {
        match item {
            Item::Message { number } => self.released(number, now),
            Item::Endless { flow, begins } => {
                let host = self.plan.flows[flow].from;
                self.hosts[host].set_endless(self.ends[flow][0], begins)?;
                self.wakes.wake(host, now);
                Ok(())
            }
        }
    }

    /// One condition of a message is met.
    fn released(&mut self, number: usize, now: Nanos) -> Result<(), Failure> {
        self.messages[number].awaits -= 1;
        if self.messages[number].awaits > 0 {
            return Ok(());
        }
        let message = &self.plan.messages[number];
        let host = self.plan.flows[message.flow].from;
        self.hosts[host].send(self.ends[message.flow][0], number as u32, message.bytes)?;
        self.messages[number].posted = Some(now);
        self.wakes.wake(host, now);
        Ok(())
    }

    fn poll(&mut self, host: usize, now: Nanos) -> Result<(), Failure> {
        let mut news = Vec::new();
        self.polls += 1;
        self.wakes.polled(host, now);
        self.hosts[host].poll(now, &mut news)?;
        if let Some(next) = self.hosts[host].context.next_timeout() {
            self.wakes.wake(host, next);
        }
        for news in news {
            match news {
                News::Completed(number) => {
                    self.messages[number as usize].completed.get_or_insert(now);
                    self.completed += 1;
                }
                News::Arrived(number) => {
                    for follower in std::mem::take(&mut self.messages[number as usize].followers) {
                        self.released(follower, now)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn outcome(mut self, set_up: Duration, wall: Duration) -> Outcome {
        self.watch.settle();
        let ways = Ways::of(self.plan);
        let time = |time: Nanos| time.since(BEGIN);
        let messages =
            self.plan.messages.iter().zip(&self.messages).map(|(message, delivery)| MessageOutcome {
                flow: message.flow,
                bytes: message.bytes,
                posted: delivery.posted.map(time),
                completed: delivery.completed.map(time),
                alone: ways.alone(&self.plan.flows[message.flow], message.bytes),
            });
        let messages: Vec<MessageOutcome> = messages.collect();
        let duration = self.watch.duration();
        let measured = duration.saturating_sub(self.plan.warm_up);
        let is_on = self.plan.transport.control != CongestionControl::Off;
        let times = times_of_flows(&messages, self.plan.flows.len(), duration);
        let flows = self.plan.flows.iter().enumerate().map(|(at, flow)| {
            let (bytes, time) = match flow.endless {
                Some(_) => (self.watch.bytes(at), measured),
                None => (self.watch.all_bytes(at), times[at]),
            };
            let (still, still_at_end) = self.watch.still(at);
            let failure = self.hosts[flow.from].ends[self.ends[at][0]].failure;
            let (goodputs, rates) = self.watch.take_series(at);
            FlowOutcome {
                from: flow.from,
                to: flow.to,
                bytes,
                time,
                still,
                still_at_end,
                goodputs,
                rates: if is_on { rates } else { Vec::new() },
                failure: failure.map(|status| format!("{status:?}")),
            }
        });
        let flows = flows.collect();
        let mut hosts = HostCounters::default();
        for host in &self.hosts {
            host.count(&mut hosts);
        }
        Outcome {
            set_up,
            wall,
            events: self.fabric.events(),
            polls: self.polls,
            trace_hash: self.fabric.trace_hash(),
            duration,
            measured,
            flows,
            messages,
            queues: self.watch.queues(&self.built),
            pauses: self.watch.pauses(&self.built),
            fabric: self.fabric.counters(),
            hosts,
            times: self.watch.times(),
        }
    }
}

/// The time in which each flow had messages to send.
fn times_of_flows(messages: &[MessageOutcome], flows: usize, end: Duration) -> Vec<Duration> {
    let mut by_flow: Vec<Vec<&MessageOutcome>> = vec![Vec::new(); flows];
    for message in messages {
        by_flow[message.flow].push(message);
    }
    by_flow.into_iter().map(|messages| time_of(messages.into_iter(), end)).collect()
}

/// From the first post to the last completion, or to the end if a message was not completed.
pub(super) fn time_of<'a>(messages: impl Iterator<Item = &'a MessageOutcome>, end: Duration) -> Duration {
    let mut first = None;
    let mut last = Duration::ZERO;
    for message in messages {
        first = [first, message.posted].into_iter().flatten().min();
        last = last.max(message.completed.unwrap_or(end));
    }
    first.map_or(Duration::ZERO, |first| last.saturating_sub(first))
}

#[cfg(test)]
mod tests {
    use ferroce::{Dcqcn, PathMtu};
    use ferroce_driver::sim::fabric::{BufferConfig, FabricConfig, Part, PfcConfig, SwitchConfig, Topology};
    use ferroce_driver::sim::{EcnConfig, LinkConfig};

    use super::*;
    use crate::fabric::plan::{Flow, Message, Transport};

    fn transport(control: CongestionControl) -> Transport {
        Transport {
            control,
            cnp_interval: Duration::from_micros(50),
            selective_repeat: false,
            path_mtu: PathMtu::Mtu1024,
            dscp: 26,
            window: 512,
            timeout: 10,
            poll_interval: Duration::from_nanos(250),
        }
    }

    fn incast(senders: usize, control: CongestionControl, switch: SwitchConfig) -> Plan {
        let link = LinkConfig::default().rate(25_000_000_000).delay(Duration::from_micros(1));
        let forever = (Duration::ZERO, Duration::from_secs(1));
        let flows = (1..=senders).map(|from| Flow { from, to: 0, endless: Some(forever) });
        Plan {
            seed: 1,
            fabric: FabricConfig::default(),
            topology: Topology::star(senders + 1, &link, switch),
            flows: flows.collect(),
            messages: Vec::new(),
            failures: Vec::new(),
            transport: transport(control),
            duration: Duration::from_millis(20),
            warm_up: Duration::from_millis(10),
            sample: Duration::from_micros(100),
        }
    }

    #[test]
    fn an_incast_is_shared() {
        let ecn = EcnConfig::new(5150, 206_000, 0.01);
        let pool = BufferConfig::default().pool(4 << 20);
        let lossless = SwitchConfig::default().buffer(pool).ecn(ecn).pfc(PfcConfig::default());
        for (control, switch) in [
            (CongestionControl::Off, SwitchConfig::default().buffer(pool.pool(1 << 20))),
            (CongestionControl::Off, lossless),
            (CongestionControl::Dcqcn(Dcqcn::ZHU25P), lossless),
        ] {
            let plan = incast(4, control, switch);
            let outcome = run(&plan, &mut |_| true).unwrap();
            let sum: f64 = outcome.flows.iter().filter_map(FlowOutcome::goodput).sum();
            let Outcome { fabric, hosts, .. } = &outcome;
            // Each frame takes 1106 bytes with preamble and gap, with 1024 bytes of payload.
            let most = 25e9 * 1024.0 / 1106.0;
            // Without PFC some packets are dropped.
            assert!(sum <= 1.01 * most && sum > 0.96 * most, "{sum}");
            let counted = fabric.delivered + fabric.dropped() + fabric.under_way;
            assert_eq!(fabric.sent + fabric.duplicated, counted, "{fabric:?}");
            let queue = outcome.queues.iter().max_by_key(|queue| queue.max).unwrap();
            assert_eq!(queue.name, "switch0:0 to host0");
            assert_eq!(queue.dropped, fabric.dropped());
            let is_lossless = switch.pfc.is_some();
            assert_eq!(is_lossless, fabric.dropped() == 0 && hosts.retransmitted == 0, "{hosts:?}");
            match control {
                CongestionControl::Off => {
                    assert_eq!((hosts.marked, hosts.cnps_sent), (0, 0));
                    assert_eq!(is_lossless, outcome.pauses.len() == 4, "{:?}", outcome.pauses);
                }
                _ => {
                    assert!(hosts.marked > 0 && hosts.cnps_handled == hosts.cnps_sent, "{hosts:?}");
                    assert!(outcome.pauses.is_empty() && queue.mean < 206_000.0, "{queue:?}");
                    assert!(outcome.flows.iter().all(|flow| flow.rates.len() == outcome.times.len()));
                }
            }
            for sample in 0..outcome.times.len() {
                let shown: f64 = outcome.flows.iter().map(|flow| flow.goodputs[sample]).sum();
                assert!(shown <= 25e9, "{shown} in sample {sample}");
            }
            if is_lossless {
                assert!(
                    outcome
                        .flows
                        .iter()
                        .all(|flow| flow.goodput() > Some(0.15 * sum) && flow.failure.is_none())
                );
            }
        }
    }

    /// The same plan gives the same run; idle hosts change nothing.
    #[test]
    fn a_run_repeats_itself_with_idle_hosts_too() {
        let ecn = EcnConfig::new(5150, 206_000, 0.01);
        let switch = SwitchConfig::default().ecn(ecn).pfc(PfcConfig::default());
        let hash = |idle: usize, seed: u64| {
            let mut plan = incast(4, CongestionControl::Dcqcn(Dcqcn::ZHU25P), switch);
            plan.seed = seed;
            plan.duration = Duration::from_millis(12);
            let link = plan.topology.links[0].link.clone();
            plan.topology.add_hosts(idle, Part::Switch(0), &link);
            let outcome = run(&plan, &mut |_| true).unwrap();
            (outcome.trace_hash, outcome.hosts.marked, outcome.fabric)
        };
        assert_eq!(hash(0, 1), hash(0, 1));
        assert_eq!(hash(0, 1), hash(30, 1));
        assert_ne!(hash(0, 1).0, hash(0, 2).0);
    }

    #[test]
    fn messages_wait_for_those_before_them() {
        let mut plan = incast(3, CongestionControl::Off, SwitchConfig::default());
        plan.flows = vec![
            Flow { from: 0, to: 1, endless: None },
            Flow { from: 1, to: 2, endless: None },
            Flow { from: 2, to: 0, endless: None },
        ];
        let message = |flow, bytes, after| Message { flow, bytes, start: Duration::ZERO, after };
        plan.messages =
            vec![message(0, 1_000_000, vec![]), message(1, 1, vec![0]), message(2, 5000, vec![0, 1])];
        let outcome = run(&plan, &mut |_| true).unwrap();
        println!("{:?}", outcome.messages);
        for (number, message) in outcome.messages.iter().enumerate() {
            let time = message.time().unwrap();
            assert!(time >= message.alone, "{message:?}");
            assert!(time < message.alone + Duration::from_micros(3), "{message:?}");
            for before in &plan.messages[number].after {
                // It arrives before it is acknowledged.
                assert!(
                    message.posted.unwrap() + Duration::from_micros(5)
                        > outcome.messages[*before].completed.unwrap()
                );
            }
        }
    }
}
