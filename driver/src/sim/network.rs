use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::net::IpAddr;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::{Counters, EcnConfig, Filter, LinkConfig, REORDER_LIMIT, Verdict, WIRE_OVERHEAD, ecn};
use crate::Nanos;
use crate::loopback::Destination;

/// Everything behind the ports: links, frames underway, chance and the record.
pub(super) struct Network {
    pub(super) link: LinkConfig,
    pub(super) filter: Filter,
    pub(super) counters: Counters,
    pub(super) trace: Trace,
    rng: ChaCha8Rng,
    ports: Vec<NetworkPort>,
    /// Frames scheduled so far, which orders those that arrive at the same time.
    scheduled: u64,
}

/// A frame and the port whose memory it is.
pub(super) struct SimFrame {
    pub(super) bytes: Box<[u8]>,
    pub(super) len: usize,
    owner: usize,
}

/// The network's side of a port.
struct NetworkPort {
    addresses: Vec<IpAddr>,
    open: bool,
    /// Frames that nobody uses. The last [`copies`] of them are for copies alone.
    spare: Vec<SimFrame>,
    underway: BinaryHeap<Reverse<Underway>>,
    /// The links from this port, by number of the port at their other end.
    links: Vec<LinkState>,
}

/// One direction between two ports.
struct LinkState {
    /// When the last bit of what was accepted so far has left, in picoseconds: a byte takes 80 of
    /// them at 100 Gb/s, so that no rounding adds up.
    busy_until: u128,
    /// The latest arrival of a frame in its place.
    last_arrival: Nanos,
    /// Frames held back, in the order in which they were sent.
    held: Vec<Held>,
}

struct Held {
    frame: SimFrame,
    /// When it arrives at the latest.
    deadline: Nanos,
    /// Frames that may still overtake it.
    overtakers: usize,
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
            rng: ChaCha8Rng::seed_from_u64(seed),
            ports: Vec::new(),
            scheduled: 0,
        }
    }

    /// Adds a port that may have `frames` frames underway and returns its number.
    pub(super) fn add_port(&mut self, addresses: &[IpAddr], frames: usize, max_frame: usize) -> usize {
        let number = self.ports.len();
        self.ports.push(NetworkPort {
            addresses: addresses.to_vec(),
            open: true,
            spare: Vec::new(),
            underway: BinaryHeap::new(),
            links: Vec::new(),
        });
        // Whatever the ports have, any one of them may have to take it all.
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

    /// Takes a port away, and what is underway to it.
    pub(super) fn remove_port(&mut self, number: usize) {
        let port = &mut self.ports[number];
        port.open = false;
        port.addresses.clear();
        while let Some(Reverse(underway)) = self.ports[number].underway.pop() {
            self.give_back(underway.frame);
        }
        for from in 0..self.ports.len() {
            while let Some(held) = self.ports[from].links[number].held.pop() {
                self.give_back(held.frame);
            }
        }
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = &[IpAddr]> {
        self.ports.iter().map(|port| &port.addresses[..])
    }

    /// A frame for `port` to fill, unless it has too many underway.
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

    /// Hands over the frames that have arrived at `port` by `now`, `limit` of them at most.
    pub(super) fn receive(&mut self, port: usize, now: Nanos, frames: &mut Vec<SimFrame>, limit: usize) {
        for from in 0..self.ports.len() {
            let expired = |held: &Held| held.deadline <= now;
            while let Some(at) = self.ports[from].links[port].held.iter().position(expired) {
                self.release(from, port, at, now);
                self.overtaken(from, port, at, now);
            }
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
        let deadlines = links.flat_map(|link| &link.held).map(|held| held.deadline);
        underway.map(|Reverse(next)| next.arrival).chain(deadlines).min()
    }

    /// Takes `frame` through everything that happens once, whatever the number of copies.
    fn transmit(&mut self, now: Nanos, to: usize, mut frame: SimFrame, verdict: Verdict) {
        if !self.ports[to].open {
            return self.discard(frame, Fate::NoPort);
        }
        self.counters.offered += 1;
        let Some(departure) = self.serialise(now, to, &mut frame) else {
            self.counters.queue_dropped += 1;
            return self.discard(frame, Fate::QueueDropped);
        };
        if verdict == Verdict::Drop || self.chance(self.link.loss) {
            self.counters.lost += 1;
            return self.discard(frame, Fate::Lost);
        }
        if verdict == Verdict::Duplicate || self.chance(self.link.duplicate) {
            self.counters.duplicated += 1;
            let copy = self.copy(&frame);
            self.propagate(departure, to, copy, verdict);
        }
        self.propagate(departure, to, frame, verdict);
    }

    /// Of its links, in bit/s.
    pub(super) fn rate(&self) -> Option<u64> {
        self.link.rate
    }

    /// When the last bit of `frame` has left, if the queue takes it. May mark it.
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
            && self.chance(ecn.probability(waiting))
            && ecn::mark(&mut frame.bytes[..frame.len])
        {
            self.counters.marked += 1;
        }
        let end = start + (u128::from(bytes) * 8 * PICOS_PER_SECOND).div_ceil(rate);
        self.ports[frame.owner].links[to].busy_until = end;
        Some(Nanos(end.div_ceil(PICOS_PER_NANO) as u64))
    }

    /// Takes one copy through everything that happens on the way.
    fn propagate(&mut self, departure: Nanos, to: usize, mut frame: SimFrame, verdict: Verdict) {
        let from = frame.owner;
        if verdict == Verdict::Corrupt || self.chance(self.link.corrupt) {
            self.counters.corrupted += 1;
            let bit = self.below(frame.len as u64 * 8) as usize;
            frame.bytes[bit / 8] ^= 1 << (bit % 8);
            self.trace.words(&[Fate::Corrupted as u64, bit as u64]);
        }
        let jitter = self.link.jitter.as_nanos() as u64;
        let jitter = if jitter == 0 { 0 } else { self.below(jitter.saturating_add(1)) };
        let arrival = departure + self.link.delay + Duration::from_nanos(jitter);
        if let Verdict::Delay(more) = verdict {
            self.counters.reordered += 1;
            return self.schedule(to, arrival + more, frame);
        }
        let reorder = self.chance(self.link.reorder);
        let overtakers = if reorder { 1 + self.below(self.link.reorder_by as u64) as usize } else { 0 };
        let deadline = arrival + self.link.reorder_hold;
        let link = &mut self.ports[from].links[to];
        link.last_arrival = link.last_arrival.max(arrival);
        let arrival = link.last_arrival;
        if reorder && link.held.len() < REORDER_LIMIT {
            link.held.push(Held { frame, deadline: deadline.max(arrival), overtakers });
            self.counters.reordered += 1;
            return;
        }
        let older = link.held.len();
        self.schedule(to, arrival, frame);
        self.overtaken(from, to, older, arrival);
    }

    /// Tells the first `older` frames held back that a later one has arrived at `arrival`, and
    /// releases those for which it was the last. Each of these overtakes in turn those before it,
    /// so that none is ever overtaken by more than it was to be.
    fn overtaken(&mut self, from: usize, to: usize, older: usize, arrival: Nanos) {
        let mut older = older;
        loop {
            let held = &mut self.ports[from].links[to].held;
            for held in &mut held[..older] {
                held.overtakers -= 1;
            }
            let Some(at) = held.iter().position(|held| held.overtakers == 0) else { break };
            self.release(from, to, at, arrival);
            older = at;
        }
    }

    fn release(&mut self, from: usize, to: usize, at: usize, arrival: Nanos) {
        let held = self.ports[from].links[to].held.remove(at);
        self.schedule(to, arrival.min(held.deadline), held.frame);
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
        // `spare_frame` left enough of them; growing the pool is right even if it did not.
        let spare = self.ports[frame.owner].spare.pop();
        let mut copy = spare.unwrap_or_else(|| SimFrame::new(frame.bytes.len(), frame.owner));
        copy.len = frame.len;
        copy.bytes[..frame.len].copy_from_slice(frame.contents());
        copy
    }

    fn chance(&mut self, probability: f64) -> bool {
        const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
        probability > 0.0 && ((self.rng.next_u64() >> 11) as f64 * UNIT) < probability
    }

    /// Evenly from 0 to `limit` - 1.
    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.rng.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}

const PICOS_PER_NANO: u128 = 1_000;
const PICOS_PER_SECOND: u128 = 1_000_000_000_000;

/// How many copies of one frame a network of `ports` ports may make: it floods, and duplicates.
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
        LinkState { busy_until: 0, last_arrival: Nanos::ZERO, held: Vec::with_capacity(REORDER_LIMIT) }
    }
}

impl EcnConfig {
    fn probability(&self, waiting: u64) -> f64 {
        if waiting <= self.kmin_bytes {
            0.0
        } else if waiting > self.kmax_bytes {
            1.0
        } else {
            self.pmax * (waiting - self.kmin_bytes) as f64 / (self.kmax_bytes - self.kmin_bytes) as f64
        }
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

/// What the trace says of a frame.
#[derive(Clone, Copy)]
enum Fate {
    Arrives = 1,
    Lost,
    QueueDropped,
    NoPort,
    Corrupted,
}

/// A running hash: FNV-1a's step on words, with a shift so that high bits reach low ones.
pub(super) struct Trace(u64);

impl Default for Trace {
    fn default() -> Trace {
        Trace(0xcbf2_9ce4_8422_2325)
    }
}

impl Trace {
    pub(super) fn value(&self) -> u64 {
        self.0
    }

    fn words(&mut self, words: &[u64]) {
        for word in words {
            self.0 = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.0 ^= self.0 >> 29;
        }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.words(&[bytes.len() as u64]);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.words(&[u64::from_le_bytes(*word)]);
        }
        for byte in rest {
            self.words(&[u64::from(*byte)]);
        }
    }
}
