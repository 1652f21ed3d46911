//! Random schedules: several queue pairs between two contexts over a bad simulated link, work of
//! every kind posted at random, receives posted late, queue pairs drained, broken and connected
//! anew in the middle, against a small model: every work request has one outcome, in order; every
//! message arrives once, in order; memory holds what the work requests, one after the other, make
//! of it.
//!
//! `FERROCE_SEED` replays one schedule, `FERROCE_SCHEDULES` sets how many are tried.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork};
use ferroce::*;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Bytes of the longest message, and of the place for it.
const SLOT: u32 = 9216;
/// Places of work requests, receives and WRITEs in the memory that a queue pair has at each end.
const WORK_SLOTS: u64 = 32;
const RECEIVE_SLOTS: u64 = 16;
const TARGET_SLOTS: u64 = 4;
const RECEIVES_AT: u64 = WORK_SLOTS * SLOT as u64;
const TARGETS_AT: u64 = RECEIVES_AT + RECEIVE_SLOTS * SLOT as u64;
const WORDS_AT: u64 = TARGETS_AT + TARGET_SLOTS * SLOT as u64;
const WORDS: usize = 4;
const MEMORY: usize = WORDS_AT as usize + 8 * WORDS;
/// Regions at each end whose keys may be invalidated, by the peer and by oneself.
const KEYS: usize = 4;
/// Longer than any frame of a connection stays in the network.
const TIME_WAIT: Duration = Duration::from_millis(20);
/// Turns without any progress after which a schedule counts as stuck.
const PATIENCE: u32 = 20_000;

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|v| v.parse().unwrap_or_else(|_| panic!("{name}={v}: a number")))
}

#[test]
fn random_schedules_agree_with_the_model() {
    let (first, count) = match from_env("FERROCE_SEED") {
        Some(seed) => (seed, 1),
        None => (0, from_env("FERROCE_SCHEDULES").unwrap_or(100)),
    };
    for seed in first..first + count {
        println!("replay: FERROCE_SEED={seed} cargo test -p ferroce --test random_schedules -- --nocapture");
        let mut world = World::new(seed);
        world.run();
        println!("  {}", world.summary());
    }
}

struct Rng(ChaCha20Rng);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0.next_u64() % n
    }

    /// True in one of `n` cases.
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    fn length(&mut self, mtu: PathMtu) -> u32 {
        let mtu = u64::from(mtu.bytes());
        let length = match self.below(8) {
            0 => 0,
            1 => self.below(64),
            2 => mtu * self.below(4) + self.below(3),
            3 => self.below(u64::from(SLOT) + 1),
            _ => self.below(3 * mtu),
        };
        length.min(u64::from(SLOT)) as u32
    }
}

/// Bytes that differ everywhere from those of another number.
fn pattern(number: u64, length: u32) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// What a work request must have done once it is complete.
enum Check {
    Nothing,
    /// These bytes are in its slot.
    Local(Vec<u8>),
}

struct Work {
    number: u64,
    signaled: bool,
    fence: bool,
    opcode: WcOpcode,
    length: u32,
    check: Check,
    /// The slot of the peer's targets that it reads.
    reads: Option<usize>,
    refused: bool,
}

/// A message that the peer must receive.
struct Message {
    opcode: WcOpcode,
    length: u32,
    immediate: Option<u32>,
    invalidated: Option<usize>,
    /// Its bytes, if they come with it.
    bytes: Vec<u8>,
}

/// One end of a queue pair: what it posted, and what its peer's memory holds.
struct Half {
    qp: Qp,
    mr: Mr,
    /// Regions whose keys the peer may invalidate, and the same for oneself; used once each.
    keys: [(Mr, bool); KEYS],
    own_keys: [(Mr, bool); KEYS],
    outstanding: VecDeque<Work>,
    posted: u64,
    receives: VecDeque<u64>,
    receives_posted: u64,
    /// Sent to the peer and not yet received.
    under_way: VecDeque<Message>,
    /// The peer's targets and words, once all that is posted is done.
    targets: Vec<u8>,
    words: [u64; WORDS],
    /// READs of each target that are outstanding: nothing may write there.
    readers: [u32; TARGET_SLOTS as usize],
    failed: bool,
    /// Draining; the event has not come.
    draining: bool,
    drained: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Phase {
    Up,
    /// One end has failed, or is about to; the other is told at this time.
    Dying(Nanos),
    Waiting(Nanos),
}

struct Connection {
    halves: [Half; 2],
    phase: Phase,
    /// An end was reset in the middle: its work has no outcome.
    discarded: [bool; 2],
    mtu: PathMtu,
    depth: u8,
    selective_repeat: bool,
    config: QpConfigs,
}

type QpConfigs = [QpConfig; 2];

struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
}

#[derive(Default)]
struct Totals {
    completed: u64,
    flushed: u64,
    received: u64,
    reconnected: u64,
    drained: u64,
}

struct World {
    rng: Rng,
    ends: [End; 2],
    connections: Vec<Connection>,
    network: SimNetwork,
    now: Nanos,
    totals: Totals,
    /// No more accidents: everything is to come to its end.
    closing: bool,
}

const ACCESS: [Access; 5] = [
    Access::LOCAL_WRITE,
    Access::REMOTE_WRITE,
    Access::REMOTE_READ,
    Access::REMOTE_ATOMIC,
    Access::REMOTE_INVALIDATE,
];

fn access() -> Access {
    ACCESS.into_iter().fold(Access::NONE, |a, b| a | b)
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng(ChaCha20Rng::seed_from_u64(seed));
        let mut rate = || rng.pick(&[0.0, 0.002, 0.01, 0.03]);
        let link = LinkConfig {
            loss: rate(),
            duplicate: rate(),
            reorder: rate(),
            corrupt: rate(),
            reorder_by: 1 + rng.below(64) as usize,
            delay: Duration::from_nanos(rng.below(20_000)),
            jitter: Duration::from_nanos(rng.below(5_000)),
            rate: rng.pick(&[None, Some(100_000_000_000), Some(10_000_000_000)]),
            ..LinkConfig::default()
        };
        let frames = rng.pick(&[1, 2, 5, 64, 4096]);
        let network = SimNetwork::with_config(seed, link, NetworkConfig { mtu: 4200, frames }).unwrap();
        let ends = [1u8, 2].map(|n| {
            let window = rng.pick(&[1, 2, 3, 5, 17, 64, 512]);
            let reorder_packets = rng.pick(&[0, 3, 40, 1024]);
            let config =
                Config { seed: Some([n; 32]), window, reorder_packets, max_qps: 16, ..Config::default() };
            let port = network.port(&[[10, 0, 0, n].into()]);
            let mut context = Context::open(Box::new(port), &config).unwrap();
            let pd = context.alloc_pd().unwrap();
            let cq = context.create_cq(4096).unwrap();
            End { context, pd, cq }
        });
        let count = 1 + rng.below(5);
        let mut world = World {
            rng,
            ends,
            connections: Vec::new(),
            network,
            now: Nanos(1_000_000),
            totals: Totals::default(),
            closing: false,
        };
        for _ in 0..count {
            world.add_connection();
        }
        world
    }

    fn summary(&self) -> String {
        let Totals { completed, flushed, received, reconnected, drained } = self.totals;
        format!(
            "{} QPs: {completed} completed, {received} received, {flushed} flushed, {reconnected} times \
             connected anew, {drained} times drained",
            self.connections.len()
        )
    }

    fn add_connection(&mut self) {
        let World { rng, ends, .. } = self;
        let config = [0, 1].map(|e: usize| QpConfig {
            max_send_wr: rng.pick(&[4, 16, 32]),
            max_recv_wr: RECEIVE_SLOTS as u32,
            signal_all: rng.one_in(8),
            ..QpConfig::rc(ends[e].pd, ends[e].cq)
        });
        let halves = [0, 1].map(|e: usize| {
            let End { context, pd, .. } = &mut ends[e];
            let mut register =
                |length| context.register(*pd, Memory::zeroed(length).unwrap(), access()).unwrap();
            let mr = register(MEMORY);
            let keys = [(); KEYS].map(|()| (register(8), false));
            let own_keys = [(); KEYS].map(|()| (register(8), false));
            let qp = context.create_qp(&config[e]).unwrap();
            Half::new(qp, mr, keys, own_keys)
        });
        self.connections.push(Connection {
            halves,
            phase: Phase::Up,
            discarded: [false; 2],
            mtu: PathMtu::Mtu256,
            depth: 0,
            selective_repeat: false,
            config,
        });
        self.connect(self.connections.len() - 1);
    }

    /// Connects both ends of a connection, which are in RESET, with memory filled anew.
    fn connect(&mut self, c: usize) {
        let World { rng, ends, connections, .. } = self;
        let connection = &mut connections[c];
        connection.mtu = rng.pick(&PathMtu::ALL);
        connection.depth = rng.pick(&[1, 2, 4, 16, 128]);
        connection.selective_repeat = rng.one_in(2);
        connection.discarded = [false; 2];
        connection.phase = Phase::Up;
        let psn = [0, 1].map(|_| match rng.below(2) {
            0 => Psn::new(rng.0.next_u32()),
            _ => Psn::new((1 << 24) - rng.below(100) as u32),
        });
        let qpns = [0, 1].map(|e| ends[e].context.query_qp(connection.halves[e].qp).unwrap().qpn);
        let gids = [0, 1].map(|e: usize| ends[e].context.port().gids[0].gid);
        for e in [0, 1] {
            let Connection { halves, mtu, depth, selective_repeat, .. } = connection;
            let (End { context, pd, .. }, half) = (&mut ends[e], &mut halves[e]);
            for (mr, used) in half.keys.iter_mut().chain(&mut half.own_keys).filter(|key| key.1) {
                let memory = context.deregister(*mr).unwrap();
                *mr = context.register(*pd, memory, access()).unwrap();
                *used = false;
            }
            *half = Half::new(half.qp, half.mr, half.keys, half.own_keys);
            context.bytes_mut(half.mr).unwrap()[TARGETS_AT as usize..].fill(0);
            let receive = ReadyToReceive {
                path_mtu: *mtu,
                max_dest_rd_atomic: *depth,
                min_rnr_timer: RnrTimer::new(1 + rng.below(12) as u8).unwrap(),
                selective_repeat: *selective_repeat,
                ..ReadyToReceive::new(AddressVector::new(gids[1 - e], 0), qpns[1 - e], psn[1 - e])
            };
            let send = ReadyToSend { timeout: 10, max_rd_atomic: *depth, ..ReadyToSend::new(psn[e]) };
            let init = Transition::Init { access: access() };
            let moves = [init, Transition::ReadyToReceive(receive), Transition::ReadyToSend(send)];
            for transition in moves {
                context.modify_qp(half.qp, transition).unwrap();
            }
        }
    }

    fn run(&mut self) {
        let accidents = self.rng.pick(&[100, 1000, 5000]);
        let turns = 1000 + self.rng.below(4000);
        for _ in 0..turns {
            self.act(accidents);
            self.turn();
        }
        self.closing = true;
        let mut quiet = 0;
        loop {
            for c in 0..self.connections.len() {
                for e in [0, 1] {
                    self.post_receives(c, e);
                    self.resume(c, e);
                }
            }
            let progress = self.turn();
            if self.connections.iter().all(Connection::is_idle) {
                break;
            }
            for c in 0..self.connections.len() {
                for e in [0, 1] {
                    let half = &self.connections[c].halves[e];
                    // What is not signaled shows up with something that is.
                    if half.outstanding.back().is_some_and(|work| !work.signaled) && !half.failed {
                        self.post_write(c, e, 0, true);
                    }
                }
            }
            quiet = if progress { 0 } else { quiet + 1 };
            if quiet == PATIENCE {
                let counters = [0, 1].map(|e| self.ends[e].context.counters().to_string());
                let states: Vec<_> = self.connections.iter().map(|c| c.describe(&self.ends)).collect();
                panic!("stuck at {:?}\n{}\n{}{}", self.now, states.join("\n"), counters[0], counters[1]);
            }
        }
        self.check_memory_at_the_end();
        self.tear_down();
    }

    /// Some things that applications do.
    fn act(&mut self, accidents: u64) {
        let c = self.rng.below(self.connections.len() as u64) as usize;
        let e = self.rng.below(2) as usize;
        for _ in 0..self.rng.below(6) {
            self.post(c, e);
        }
        if self.rng.one_in(3) {
            for c in 0..self.connections.len() {
                let e = self.rng.below(2) as usize;
                self.post_receives(c, e);
            }
        }
        match self.rng.below(accidents) {
            0 => self.start_dying(c, e),
            1..4 => self.drain(c, e),
            _ => {}
        }
        if self.rng.one_in(8) {
            self.resume(c, e);
        }
    }

    /// Frames, timers, completions, events. Whether anything came of it.
    fn turn(&mut self) -> bool {
        let now = self.now;
        let frames: usize = self.ends.iter_mut().map(|end| end.context.poll(now).unwrap()).sum();
        let mut progress = false;
        for e in [0, 1] {
            // Sometimes completions wait.
            if self.closing || !self.rng.one_in(4) {
                while let Some(wc) = self.ends[e].context.poll_cq(self.ends[e].cq).unwrap() {
                    self.complete(e, &wc);
                    progress = true;
                }
            }
            while let Some(event) = self.ends[e].context.next_event() {
                self.handle(e, event);
            }
        }
        for c in 0..self.connections.len() {
            progress |= self.go_on(c);
        }
        if frames == 0 {
            let timeouts = self.ends.iter().filter_map(|end| end.context.next_timeout());
            let phases = self.connections.iter().filter_map(|c| match c.phase {
                Phase::Up => None,
                Phase::Dying(at) | Phase::Waiting(at) => Some(at),
            });
            let next = timeouts.chain(self.network.next_arrival()).chain(phases).min();
            if let Some(next) = next {
                self.now = next.max(Nanos(now.0 + 1));
            }
        }
        progress
    }

    fn post(&mut self, c: usize, e: usize) {
        let length = self.rng.length(self.connections[c].mtu);
        match self.rng.below(9) {
            0 | 1 => self.post_send(c, e, length),
            2 => self.post_write(c, e, length, false),
            3 => self.post_write_with_imm(c, e, length),
            4 | 5 => self.post_read(c, e, length),
            6 | 7 => self.post_atomic(c, e),
            _ => self.post_local_invalidate(c, e),
        }
    }

    fn post_send(&mut self, c: usize, e: usize, length: u32) {
        let immediate = if self.rng.one_in(2) { Some(self.rng.0.next_u32()) } else { None };
        let peer = &mut self.connections[c].halves[1 - e];
        let free = peer.keys.iter().position(|key| !key.1).filter(|_| self.rng.one_in(4));
        let op = match (free, immediate) {
            (Some(key), _) => {
                let remote = self.ends[1 - e].context.remote(peer.keys[key].0);
                SendOp::SendWithInvalidate(remote.unwrap().rkey)
            }
            (None, Some(immediate)) => SendOp::SendWithImm(immediate),
            (None, None) => SendOp::Send,
        };
        let bytes = pattern(self.rng.0.next_u64(), length);
        let work = Work { opcode: WcOpcode::Send, length, ..Work::default() };
        if self.submit(c, e, op, work, Some(&bytes)) {
            let halves = &mut self.connections[c].halves;
            if let Some(key) = free {
                halves[1 - e].keys[key].1 = true;
            }
            let immediate = immediate.filter(|_| free.is_none());
            let message = Message { opcode: WcOpcode::Recv, length, immediate, invalidated: free, bytes };
            halves[e].under_way.push_back(message);
        }
    }

    /// A range of the peer's targets to write, and whether a fence is needed: a READ of it may be
    /// outstanding.
    fn target(&mut self, c: usize, e: usize, length: u32) -> (Range<usize>, bool) {
        let slot = self.rng.below(TARGET_SLOTS) as usize;
        let start = slot * SLOT as usize + self.rng.below(u64::from(SLOT - length) + 1) as usize;
        let read = self.connections[c].halves[e].readers[slot] > 0;
        (start..start + length as usize, read)
    }

    fn remote(&self, c: usize, e: usize, at: u64) -> RemoteAddress {
        let remote = self.ends[1 - e].context.remote(self.connections[c].halves[1 - e].mr).unwrap();
        RemoteAddress { addr: remote.addr + at, rkey: remote.rkey }
    }

    fn post_write(&mut self, c: usize, e: usize, length: u32, last: bool) {
        let (target, fence) = self.target(c, e, length);
        let remote = self.remote(c, e, TARGETS_AT + target.start as u64);
        let written = pattern(self.rng.0.next_u64(), length);
        let work = Work { opcode: WcOpcode::RdmaWrite, length, fence, signaled: last, ..Work::default() };
        if self.submit(c, e, SendOp::Write(remote), work, Some(&written)) {
            self.connections[c].halves[e].targets[target].copy_from_slice(&written);
        }
    }

    fn post_write_with_imm(&mut self, c: usize, e: usize, length: u32) {
        let (target, fence) = self.target(c, e, length);
        let remote = self.remote(c, e, TARGETS_AT + target.start as u64);
        let written = pattern(self.rng.0.next_u64(), length);
        let immediate = self.rng.0.next_u32();
        let work = Work { opcode: WcOpcode::RdmaWrite, length, fence, ..Work::default() };
        if self.submit(c, e, SendOp::WriteWithImm(remote, immediate), work, Some(&written)) {
            let half = &mut self.connections[c].halves[e];
            half.targets[target].copy_from_slice(&written);
            half.under_way.push_back(Message {
                opcode: WcOpcode::RecvRdmaWithImm,
                length,
                immediate: Some(immediate),
                invalidated: None,
                bytes: Vec::new(),
            });
        }
    }

    fn post_read(&mut self, c: usize, e: usize, length: u32) {
        let slot = self.rng.below(TARGET_SLOTS) as usize;
        let start = slot * SLOT as usize + self.rng.below(u64::from(SLOT - length) + 1) as usize;
        let target = start..start + length as usize;
        let remote = self.remote(c, e, TARGETS_AT + start as u64);
        let expected = self.connections[c].halves[e].targets[target.clone()].to_vec();
        let work = Work {
            opcode: WcOpcode::RdmaRead,
            length,
            check: Check::Local(expected),
            reads: Some(slot),
            ..Work::default()
        };
        if self.submit(c, e, SendOp::Read(remote), work, None) {
            self.connections[c].halves[e].readers[slot] += 1;
        }
    }

    fn post_atomic(&mut self, c: usize, e: usize) {
        let word = self.rng.below(WORDS as u64) as usize;
        let remote = self.remote(c, e, WORDS_AT + 8 * word as u64);
        let old = self.connections[c].halves[e].words[word];
        let value = self.rng.0.next_u64();
        let (op, opcode, new) = match self.rng.below(3) {
            0 => (SendOp::FetchAdd { remote, add: value }, WcOpcode::FetchAdd, old.wrapping_add(value)),
            1 => (SendOp::CompareSwap { remote, compare: old, swap: value }, WcOpcode::CompSwap, value),
            _ => (SendOp::CompareSwap { remote, compare: !old, swap: value }, WcOpcode::CompSwap, old),
        };
        let check = Check::Local(old.to_ne_bytes().to_vec());
        let work = Work { opcode, length: 8, check, ..Work::default() };
        if self.submit(c, e, op, work, None) {
            self.connections[c].halves[e].words[word] = new;
        }
    }

    fn post_local_invalidate(&mut self, c: usize, e: usize) {
        let half = &self.connections[c].halves[e];
        let Some(key) = half.own_keys.iter().position(|key| !key.1) else { return };
        let rkey = self.ends[e].context.remote(half.own_keys[key].0).unwrap().rkey;
        let work = Work { opcode: WcOpcode::LocalInv, ..Work::default() };
        if self.submit(c, e, SendOp::LocalInvalidate(rkey), work, None) {
            self.connections[c].halves[e].own_keys[key].1 = true;
        }
    }

    /// A WRITE that the peer must refuse.
    fn post_refused(&mut self, c: usize, e: usize) {
        let RemoteAddress { addr, rkey } = self.remote(c, e, 0);
        let remote = RemoteAddress { addr, rkey: RKey(!rkey.0) };
        let work = Work { opcode: WcOpcode::RdmaWrite, length: 8, refused: true, ..Work::default() };
        self.submit(c, e, SendOp::Write(remote), work, Some(&[0xee; 8]));
    }

    /// Posts the work with random flags, from random pieces of memory. `false` if there was no room.
    fn submit(&mut self, c: usize, e: usize, op: SendOp, mut work: Work, bytes: Option<&[u8]>) -> bool {
        let World { rng, ends, connections, .. } = self;
        let connection = &mut connections[c];
        let discarded = connection.discarded[e];
        let half = &mut connection.halves[e];
        let context = &mut ends[e].context;
        if half.outstanding.len() as u64 == WORK_SLOTS || matches!(connection.phase, Phase::Waiting(_)) {
            return false;
        }
        let flags = SendFlags {
            signaled: work.signaled || rng.one_in(2),
            fence: work.fence || rng.one_in(8),
            solicited: rng.one_in(2),
        };
        let (number, length) = (half.posted, work.length);
        let start = number % WORK_SLOTS * u64::from(SLOT);
        let inline = bytes.filter(|bytes| bytes.len() <= 64 && rng.one_in(2));
        if let (Some(bytes), None) = (bytes, inline) {
            let slot = &mut context.bytes_mut(half.mr).unwrap()[start as usize..];
            slot[..bytes.len()].copy_from_slice(bytes);
        }
        let mut cuts = [rng.below(u64::from(length) + 1), rng.below(u64::from(length) + 1), 0];
        cuts[2] = length.into();
        if rng.one_in(2) {
            cuts[..2].fill(0);
        }
        cuts.sort_unstable();
        let mut offset = 0;
        let sges = cuts.map(|cut| {
            let sge = Sge { mr: half.mr, offset: start + offset, length: (cut - offset) as u32 };
            offset = cut;
            sge
        });
        let data = match (inline, op) {
            (Some(bytes), _) => Data::Inline(bytes),
            (None, SendOp::LocalInvalidate(_)) => Data::Sges(&[]),
            (None, _) => Data::Sges(&sges),
        };
        match context.post_send(half.qp, &SendWorkRequest { wr_id: number, op, data, flags }) {
            Ok(()) => {
                work.number = number;
                work.signaled = flags.signaled || connection.config[e].signal_all;
                half.posted += 1;
                half.outstanding.push_back(work);
                true
            }
            Err(Error::QueueFull { .. }) => false,
            Err(Error::State { .. }) if discarded => false,
            Err(error) => panic!("post {op:?}: {error}"),
        }
    }

    fn post_receives(&mut self, c: usize, e: usize) {
        let count = 1 + self.rng.below(4);
        let World { ends, connections, .. } = self;
        let connection = &mut connections[c];
        if matches!(connection.phase, Phase::Waiting(_)) || connection.discarded[e] {
            return;
        }
        let half = &mut connection.halves[e];
        for _ in 0..count {
            if half.receives.len() as u64 == RECEIVE_SLOTS {
                return;
            }
            let wr_id = half.receives_posted;
            let offset = RECEIVES_AT + wr_id % RECEIVE_SLOTS * u64::from(SLOT);
            let sges = [
                Sge { mr: half.mr, offset, length: 100 },
                Sge { mr: half.mr, offset, length: 0 },
                Sge { mr: half.mr, offset: offset + 100, length: SLOT - 100 },
            ];
            let slot = &mut ends[e].context.bytes_mut(half.mr).unwrap()[offset as usize..];
            slot[..SLOT as usize].fill(0xcc);
            ends[e].context.post_recv(half.qp, &ReceiveWorkRequest { wr_id, sges: &sges }).unwrap();
            half.receives_posted += 1;
            half.receives.push_back(wr_id);
        }
    }

    fn complete(&mut self, e: usize, wc: &WorkCompletion) {
        let c = self.connections.iter().position(|c| c.halves[e].qp == wc.qp).expect("a known QP");
        match wc.opcode {
            WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => self.complete_receive(c, e, wc),
            _ => self.complete_work(c, e, wc),
        }
    }

    fn complete_work(&mut self, c: usize, e: usize, wc: &WorkCompletion) {
        let World { ends, connections, totals, .. } = self;
        let connection = &mut connections[c];
        let dying = connection.phase != Phase::Up;
        let half = &mut connection.halves[e];
        while half.outstanding.front().is_some_and(|work| work.number != wc.wr_id) {
            let work = half.outstanding.pop_front().unwrap();
            assert!(!work.signaled && !half.failed, "QP {c}.{e}: no outcome of {}, but {wc:?}", work.number);
            half.succeed(&ends[e].context, &work);
            totals.completed += 1;
        }
        let work = half.outstanding.pop_front();
        let work = work.unwrap_or_else(|| panic!("QP {c}.{e}: nothing is outstanding, but {wc:?}"));
        assert_eq!(wc.opcode, work.opcode, "QP {c}.{e}: {wc:?}");
        match wc.status {
            WcStatus::Success => {
                assert!(work.signaled && !half.failed && !work.refused, "QP {c}.{e}: {wc:?}");
                assert_eq!(wc.byte_len, work.length, "QP {c}.{e}: {wc:?}");
                half.succeed(&ends[e].context, &work);
                totals.completed += 1;
            }
            WcStatus::WrFlushErr if dying => {
                half.failed = true;
                totals.flushed += 1;
            }
            WcStatus::RetryExcErr if dying && !half.failed => half.failed = true,
            WcStatus::RemAccessErr if work.refused && !half.failed => half.failed = true,
            _ => panic!("QP {c}.{e}: {wc:?}"),
        }
    }

    fn complete_receive(&mut self, c: usize, e: usize, wc: &WorkCompletion) {
        let connection = &mut self.connections[c];
        let dying = connection.phase != Phase::Up;
        let [half, peer] = connection.halves.get_disjoint_mut([e, 1 - e]).unwrap();
        let wr_id = half.receives.pop_front().expect("a posted receive");
        assert_eq!(wc.wr_id, wr_id, "QP {c}.{e}: {wc:?}");
        if wc.status != WcStatus::Success {
            assert!(dying && wc.status == WcStatus::WrFlushErr, "QP {c}.{e}: {wc:?}");
            self.totals.flushed += 1;
            return;
        }
        let message = peer.under_way.pop_front().expect("a message under way");
        let rkey = |key: usize| self.ends[e].context.remote(half.keys[key].0).unwrap().rkey;
        let found = (wc.opcode, wc.byte_len, wc.immediate, wc.invalidated);
        let invalidated = message.invalidated.map(rkey);
        assert_eq!(found, (message.opcode, message.length, message.immediate, invalidated), "QP {c}.{e}");
        let start = (RECEIVES_AT + wr_id % RECEIVE_SLOTS * u64::from(SLOT)) as usize;
        let slot = &self.ends[e].context.bytes(half.mr).unwrap()[start..start + SLOT as usize];
        let (bytes, rest) = slot.split_at(message.bytes.len());
        assert!(bytes == message.bytes, "QP {c}.{e}: receive {wr_id} holds other bytes");
        assert!(rest.iter().all(|byte| *byte == 0xcc), "QP {c}.{e}: receive {wr_id} was written beyond");
        self.totals.received += 1;
    }

    fn handle(&mut self, e: usize, event: Event) {
        let (Event::SqDrained(qp) | Event::QpReqErr(qp) | Event::QpAccessErr(qp) | Event::CommEst(qp)) =
            event
        else {
            panic!("{event:?}")
        };
        // The queue pair may have been replaced since.
        let Some(c) = self.connections.iter().position(|c| c.halves[e].qp == qp) else { return };
        let connection = &mut self.connections[c];
        let half = &mut connection.halves[e];
        match event {
            Event::SqDrained(_) if connection.phase == Phase::Up => {
                assert!(half.draining, "QP {c}.{e}: drained twice, or unasked");
                half.draining = false;
                half.drained = true;
                self.totals.drained += 1;
            }
            _ => assert!(connection.phase != Phase::Up || event == Event::CommEst(qp), "{event:?}"),
        }
    }

    fn drain(&mut self, c: usize, e: usize) {
        let connection = &mut self.connections[c];
        let half = &mut connection.halves[e];
        if connection.phase == Phase::Up && !half.draining && !half.drained {
            half.draining = true;
            self.ends[e].context.modify_qp(half.qp, Transition::Drain).unwrap();
        }
    }

    fn resume(&mut self, c: usize, e: usize) {
        let connection = &mut self.connections[c];
        let half = &mut connection.halves[e];
        if connection.phase == Phase::Up && half.drained {
            half.drained = false;
            self.ends[e].context.modify_qp(half.qp, Transition::Resume).unwrap();
        }
    }

    fn start_dying(&mut self, c: usize, e: usize) {
        if self.connections[c].phase != Phase::Up {
            return;
        }
        let until = self.now + Duration::from_micros(self.rng.pick(&[0, 10, 200, 100_000]));
        self.connections[c].phase = Phase::Dying(until);
        match self.rng.below(3) {
            0 => self.break_end(c, e),
            1 => self.post_refused(c, e),
            _ => {
                self.ends[e].context.modify_qp(self.connections[c].halves[e].qp, Transition::Reset).unwrap();
                self.connections[c].discarded[e] = true;
            }
        }
    }

    fn break_end(&mut self, c: usize, e: usize) {
        if !self.connections[c].discarded[e] {
            self.ends[e].context.modify_qp(self.connections[c].halves[e].qp, Transition::Error).unwrap();
        }
    }

    /// Takes a connection that is not up one step further. Whether it did.
    fn go_on(&mut self, c: usize) -> bool {
        match self.connections[c].phase {
            Phase::Dying(at) if at <= self.now => {
                self.end(c);
                self.connections[c].phase = Phase::Waiting(self.now + TIME_WAIT);
                true
            }
            Phase::Waiting(at) if at <= self.now => {
                self.connect(c);
                self.totals.reconnected += 1;
                true
            }
            _ => false,
        }
    }

    /// Both ends fail; all their work has an outcome; then RESET, or new queue pairs.
    fn end(&mut self, c: usize) {
        for e in [0, 1] {
            self.break_end(c, e);
            while let Some(wc) = self.ends[e].context.poll_cq(self.ends[e].cq).unwrap() {
                self.complete(e, &wc);
            }
        }
        let connection = &self.connections[c];
        for e in [0, 1] {
            let half = &connection.halves[e];
            if !connection.discarded[e] {
                // Only success may go without saying.
                let silent = |work: &Work| !work.signaled && !half.failed && !work.refused;
                assert!(half.outstanding.iter().all(silent), "QP {c}.{e}: work without outcome");
                assert!(half.receives.is_empty(), "QP {c}.{e}: receives without outcome");
            }
        }
        let destroy = self.rng.one_in(3);
        let World { ends, connections, .. } = self;
        let connection = &mut connections[c];
        for e in [0, 1] {
            let (context, half) = (&mut ends[e].context, &mut connection.halves[e]);
            if destroy {
                context.destroy_qp(half.qp).unwrap();
                half.qp = context.create_qp(&connection.config[e]).unwrap();
            } else {
                context.modify_qp(half.qp, Transition::Reset).unwrap();
            }
        }
    }

    /// All work is done: the memory of both ends is what the work makes of it.
    fn check_memory_at_the_end(&self) {
        for (c, connection) in self.connections.iter().enumerate() {
            for e in [0, 1] {
                let [half, peer] = [&connection.halves[e], &connection.halves[1 - e]];
                let memory = self.ends[1 - e].context.bytes(peer.mr).unwrap();
                let (targets, words) = memory[TARGETS_AT as usize..].split_at(half.targets.len());
                assert!(targets == half.targets, "QP {c}.{e}: other bytes in the peer's memory");
                let expected: Vec<u8> = half.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert_eq!(words, expected, "QP {c}.{e}: words of the peer");
                assert!(half.under_way.is_empty(), "QP {c}.{e}: messages lost");
            }
        }
    }

    /// Nothing holds on to anything.
    fn tear_down(&mut self) {
        let World { ends, connections, .. } = self;
        for connection in &*connections {
            for (end, half) in ends.iter_mut().zip(&connection.halves) {
                end.context.modify_qp(half.qp, Transition::Reset).unwrap();
                let keys = half.keys.iter().chain(&half.own_keys).map(|key| key.0);
                for mr in keys.chain([half.mr]) {
                    drop(end.context.deregister(mr).unwrap());
                }
                end.context.destroy_qp(half.qp).unwrap();
            }
        }
        for end in ends {
            end.context.destroy_cq(end.cq).unwrap();
            end.context.dealloc_pd(end.pd).unwrap();
            end.context.poll(self.now).unwrap();
            assert_eq!(end.context.next_timeout(), None, "a timer of nobody");
        }
    }
}

impl Connection {
    fn is_idle(&self) -> bool {
        self.phase == Phase::Up
            && self.halves.iter().all(|h| h.outstanding.is_empty() && h.under_way.is_empty() && !h.draining)
    }

    fn describe(&self, ends: &[End; 2]) -> String {
        let half = |e: usize| {
            let half = &self.halves[e];
            let query = ends[e].context.query_qp(half.qp);
            let (outstanding, messages) = (half.outstanding.len(), half.under_way.len());
            format!("{outstanding} outstanding, {messages} under way, {query:?}")
        };
        format!("{} | {}", half(0), half(1))
    }
}

impl Half {
    fn new(qp: Qp, mr: Mr, keys: [(Mr, bool); KEYS], own_keys: [(Mr, bool); KEYS]) -> Half {
        Half {
            qp,
            mr,
            keys,
            own_keys,
            outstanding: VecDeque::new(),
            posted: 0,
            receives: VecDeque::new(),
            receives_posted: 0,
            under_way: VecDeque::new(),
            targets: vec![0; (TARGET_SLOTS * u64::from(SLOT)) as usize],
            words: [0; WORDS],
            readers: [0; TARGET_SLOTS as usize],
            failed: false,
            draining: false,
            drained: false,
        }
    }

    /// The work is done: what it was to leave behind is there.
    fn succeed(&mut self, context: &Context, work: &Work) {
        match &work.check {
            Check::Nothing => {}
            Check::Local(expected) => {
                let start = (work.number % WORK_SLOTS * u64::from(SLOT)) as usize;
                let found = &context.bytes(self.mr).unwrap()[start..start + expected.len()];
                assert!(found == expected, "{:?} {}: other bytes", work.opcode, work.number);
            }
        }
        if let Some(slot) = work.reads {
            self.readers[slot] -= 1;
        }
    }
}

impl Default for Work {
    fn default() -> Work {
        Work {
            number: 0,
            signaled: false,
            fence: false,
            opcode: WcOpcode::Send,
            length: 0,
            check: Check::Nothing,
            reads: None,
            refused: false,
        }
    }
}
