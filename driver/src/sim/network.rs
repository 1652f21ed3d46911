use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::net::IpAddr;

use super::impairment::Impairment;
use super::random::Random;
use super::trace::Trace;
use super::{Counters, Filter, LinkConfig, Verdict, WIRE_OVERHEAD, ecn};
use crate::Nanos;
use crate::loopback::Destination;

/// The network behind the ports: links, frames in flight, random choices and the trace.
pub(super) struct Network {
    pub(super) link: LinkConfig,
    pub(super) filter: Filter,
    pub(super) counters: Counters,
    pub(super) trace: Trace,
    random: Random,
    ports: Vec<NetworkPort>,
    /// The number of frames scheduled so far, which orders those that arrive at the same time.
    scheduled: u64,
}

/// A frame and the port that owns its memory.
pub(super) struct SimFrame {
    pub(super) bytes: Box<[u8]>,
    pub(super) len: usize,
    owner: usize,
}

/// The network's side of a port.
struct NetworkPort {
    addresses: Vec<IpAddr>,
    open: bool,
    /// Unused frames. The last [`copies`] of them are reserved for copies.
    spare: Vec<SimFrame>,
    underway: BinaryHeap<Reverse<Underway>>,
    /// The links from this port, by number of the port at their other end.
    links: Vec<LinkState>,
}

/// One direction between two ports.
struct LinkState {
    /// When the last bit of the frames accepted so far has left, in picoseconds: at 100 Gb/s a byte takes 80 ps, so
    /// rounding errors do not accumulate.
    busy_until: u128,
    impairment: Impairment<SimFrame>,
}

struct Underway {
    arrival: Nanos,
    order: u64,
    frame: SimFrame,
}

impl Network {
    pub(super) fn new(seed: u64, link: LinkConfig) -> Network {
        Network {
            link,
            filter: Box::new(|_| Verdict::Pass),
            counters: Counters::default(),
            trace: Trace::default(),
            random: Random::new(seed),
            ports: Vec::new(),
            scheduled: 0,
        }
    }

    /// Adds a port that may have `frames` frames in flight and returns its number.
    pub(super) fn add_port(&mut self, addresses: &[IpAddr], frames: usize, max_frame: usize) -> usize {
        let number = self.ports.len();
        self.ports.push(NetworkPort {
            addresses: addresses.to_vec(),
            open: true,
            spare: Vec::new(),
            underway: BinaryHeap::new(),
            links: Vec::new(),
        });
        // Any one of the ports may have to receive the frames of all.
        let total = self.ports.len() * (frames + copies(self.ports.len()));
        let ports = self.ports.len();
        for (owner, port) in self.ports.iter_mut().enumerate() {
            let more = if owner == number { frames + copies(ports) } else { copies(1) };
            port.spare.extend((0..more).map(|_| SimFrame::new(max_frame, owner)));
            port.spare.reserve_exact((frames + copies(ports)).saturating_sub(port.spare.len()));
            port.underway.reserve_exact(total - port.underway.len());
            port.links.resize_with(ports, LinkState::new);
        }
        number
    }

    /// Removes a port, and the frames in flight to it.
    pub(super) fn remove_port(&mut self, number: usize) {
        let port = &mut self.ports[number];
        port.open = false;
        port.addresses.clear();
        while let Some(Reverse(underway)) = self.ports[number].underway.pop() {
            self.give_back(underway.frame);
        }
        for from in 0..self.ports.len() {
            let held: Vec<SimFrame> = self.ports[from].links[number].impairment.drain().collect();
            for frame in held {
                self.give_back(frame);
            }
        }
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = &[IpAddr]> {
        self.ports.iter().map(|port| &port.addresses[..])
    }

    /// A frame for `port` to fill, unless too many of its frames are in flight.
    pub(super) fn spare_frame(&mut self, port: usize) -> Option<SimFrame> {
        let reserve = copies(self.ports.len());
        let spare = &mut self.ports[port].spare;
        if spare.len() > reserve { spare.pop() } else { None }
    }

    pub(super) fn give_back(&mut self, frame: SimFrame) {
        self.ports[frame.owner].spare.push(frame);
    }

    pub(super) fn recycle(&mut self, frames: &mut Vec<SimFrame>) {
        for frame in frames.drain(..) {
            self.give_back(frame);
        }
    }

    /// Sends `frame` from its owner's port.
    pub(super) fn send(&mut self, now: Nanos, frame: SimFrame) {
        self.trace.words(&[now.0, frame.owner as u64]);
        self.trace.bytes(frame.contents());
        let verdict = (self.filter)(frame.contents());
        match Destination::of(frame.contents(), self.ports.len()) {
            Destination::Port(to) => self.transmit(now, to, frame, verdict),
            Destination::Flood => {
                for to in (0..self.ports.len()).filter(|&to| to != frame.owner) {
                    let copy = self.copy(&frame);
                    self.transmit(now, to, copy, verdict);
                }
                self.give_back(frame);
            }
        }
    }

    /// Passes on the frames that have arrived at `port` by `now`, at most `limit`.
    pub(super) fn receive(&mut self, port: usize, now: Nanos, frames: &mut Vec<SimFrame>, limit: usize) {
        for from in 0..self.ports.len() {
            self.with_impairment(from, port, |impairment, arrives| {
                impairment.release_due(now.0, arrives);
                false
            });
        }
        let underway = &mut self.ports[port].underway;
        while frames.len() < limit
            && underway.peek().is_some_and(|Reverse(next)| next.arrival <= now)
            && let Some(Reverse(next)) = underway.pop()
        {
            frames.push(next.frame);
        }
    }

    pub(super) fn next_arrival(&self) -> Option<Nanos> {
        let underway = self.ports.iter().filter_map(|port| port.underway.peek());
        let links = self.ports.iter().flat_map(|port| &port.links);
        let deadlines = links.filter_map(|link| link.impairment.next_deadline()).map(Nanos);
        underway.map(|Reverse(next)| next.arrival).chain(deadlines).min()
    }

    /// Applies the steps that happen once to `frame`, independent of the number of copies.
    fn transmit(&mut self, now: Nanos, to: usize, mut frame: SimFrame, verdict: Verdict) {
        if !self.ports[to].open {
            return self.discard(frame, Fate::NoPort);
        }
        self.counters.offered += 1;
        let Some(departure) = self.serialise(now, to, &mut frame) else {
            self.counters.queue_dropped += 1;
            return self.discard(frame, Fate::QueueDropped);
        };
        if verdict == Verdict::Drop || self.random.chance(self.link.loss) {
            self.counters.lost += 1;
            return self.discard(frame, Fate::Lost);
        }
        if verdict == Verdict::Duplicate || self.random.chance(self.link.duplicate) {
            self.counters.duplicated += 1;
            let copy = self.copy(&frame);
            self.propagate(departure, to, copy, verdict);
        }
        self.propagate(departure, to, frame, verdict);
    }

    /// The rate of its links, in bit/s.
    pub(super) fn rate(&self) -> Option<u64> {
        self.link.rate
    }

    /// When the last bit of `frame` has left, if the queue accepts it. May mark it.
    fn serialise(&mut self, now: Nanos, to: usize, frame: &mut SimFrame) -> Option<Nanos> {
        let Some(rate) = self.link.rate else { return Some(now) };
        let rate = u128::from(rate);
        let link = &self.ports[frame.owner].links[to];
        let start = link.busy_until.max(u128::from(now.0) * PICOS_PER_NANO);
        let left = start - u128::from(now.0) * PICOS_PER_NANO;
        let waiting = (left * rate).div_ceil(8 * PICOS_PER_SECOND) as u64;
        let bytes = frame.len as u64 + WIRE_OVERHEAD;
        if self.link.queue_limit.is_some_and(|limit| waiting + bytes > limit) {
            return None;
        }
        if let Some(ecn) = self.link.ecn
            && self.random.chance(ecn.probability(waiting))
            && ecn::mark(&mut frame.bytes[..frame.len])
        {
            self.counters.marked += 1;
        }
        let end = start + (u128::from(bytes) * 8 * PICOS_PER_SECOND).div_ceil(rate);
        self.ports[frame.owner].links[to].busy_until = end;
        Some(Nanos(end.div_ceil(PICOS_PER_NANO) as u64))
    }

    /// Applies the steps that happen to each copy.
    fn propagate(&mut self, departure: Nanos, to: usize, mut frame: SimFrame, verdict: Verdict) {
        let from = frame.owner;
        let link = &self.link;
        let corrupt = verdict == Verdict::Corrupt;
        let treatment = link.treatment(&mut self.random, frame.len, corrupt);
        if let Some(bit) = treatment.flip {
            self.counters.corrupted += 1;
            frame.bytes[bit / 8] ^= 1 << (bit % 8);
            self.trace.words(&[Fate::Corrupted as u64, bit as u64]);
        }
        let arrival = departure + link.delay + treatment.jitter;
        if let Verdict::Delay(more) = verdict {
            self.counters.reordered += 1;
            return self.schedule(to, arrival + more, frame);
        }
        let hold = u64::try_from(link.reorder_hold.as_nanos()).unwrap_or(u64::MAX);
        let reordered = self.with_impairment(from, to, |impairment, arrives| {
            impairment.pass(frame, arrival.0, (treatment.overtakers, hold), arrives)
        });
        self.counters.reordered += u64::from(reordered);
    }

    /// Calls `use_it` with the impairment of a link, and with a function that schedules a frame's arrival. Returns its
    /// result.
    fn with_impairment(
        &mut self,
        from: usize,
        to: usize,
        use_it: impl FnOnce(&mut Impairment<SimFrame>, &mut dyn FnMut(u64, SimFrame)) -> bool,
    ) -> bool {
        let mut impairment = std::mem::take(&mut self.ports[from].links[to].impairment);
        let result = use_it(&mut impairment, &mut |arrival, frame| self.schedule(to, Nanos(arrival), frame));
        self.ports[from].links[to].impairment = impairment;
        result
    }

    fn schedule(&mut self, to: usize, arrival: Nanos, frame: SimFrame) {
        self.trace.words(&[Fate::Arrives as u64, to as u64, arrival.0]);
        let order = self.scheduled;
        self.scheduled += 1;
        self.ports[to].underway.push(Reverse(Underway { arrival, order, frame }));
    }

    fn discard(&mut self, frame: SimFrame, fate: Fate) {
        self.trace.words(&[fate as u64]);
        self.give_back(frame);
    }

    fn copy(&mut self, frame: &SimFrame) -> SimFrame {
        // `spare_frame` has reserved enough of them; allocating another one would be correct too.
        let spare = self.ports[frame.owner].spare.pop();
        let mut copy = spare.unwrap_or_else(|| SimFrame::new(frame.bytes.len(), frame.owner));
        copy.len = frame.len;
        copy.bytes[..frame.len].copy_from_slice(frame.contents());
        copy
    }
}

const PICOS_PER_NANO: u128 = 1_000;
const PICOS_PER_SECOND: u128 = 1_000_000_000_000;

/// The most copies of one frame in a network of `ports` ports: it floods, and duplicates.
fn copies(ports: usize) -> usize {
    2 * ports
}

impl SimFrame {
    fn new(size: usize, owner: usize) -> SimFrame {
        SimFrame { bytes: vec![0; size].into_boxed_slice(), len: 0, owner }
    }

    pub(super) fn contents(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl LinkState {
    fn new() -> LinkState {
        LinkState { busy_until: 0, impairment: Impairment::with_capacity() }
    }
}

impl Ord for Underway {
    fn cmp(&self, other: &Underway) -> Ordering {
        (self.arrival, self.order).cmp(&(other.arrival, other.order))
    }
}

impl PartialOrd for Underway {
    fn partial_cmp(&self, other: &Underway) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Underway {
    fn eq(&self, other: &Underway) -> bool {
        self.order == other.order
    }
}

impl Eq for Underway {}

/// The fate of a frame in the trace.
#[derive(Clone, Copy)]
enum Fate {
    Arrives = 1,
    Lost,
    QueueDropped,
    NoPort,
    Corrupted,
}
