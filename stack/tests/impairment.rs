//! Exactly once and bit-exact, over a link that loses, duplicates, reorders and corrupts 1 % each; from and to host memory
//! and device memory, whose copies land late and out of order.
//!
//! `FERROCE_SEED` replays a run, `FERROCE_SOAK_BYTES` sets the bytes per operation.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use ferroce::driver::gpu::Device;
use ferroce::driver::gpu::strict::Strict;
use ferroce::driver::sim::LinkConfig;
use ferroce::*;
use ferroce_driver_test_support::random::Random;
use ferroce_test_support::pair::{Pair, Setup};

fn bad_link() -> LinkConfig {
    LinkConfig::default()
        .loss(0.01)
        .duplicate(0.01)
        .reorder(0.01)
        .reorder_by(32)
        .corrupt(0.01)
        .delay(Duration::from_micros(5))
        .jitter(Duration::from_micros(2))
        .rate(100_000_000_000)
}

fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v}: a number")))
}

fn seed() -> u64 {
    let seed = from_env("FERROCE_SEED", 7);
    println!("replay: FERROCE_SEED={seed} cargo test -p ferroce --test impairment -- --nocapture");
    seed
}

/// Bytes per operation; the 10^8 of issue 2 with `./do soak`.
fn soak_bytes() -> u64 {
    from_env("FERROCE_SOAK_BYTES", 20_000_000)
}

/// Message lengths around every edge of a path MTU of 1024, and long ones.
const LENGTHS: [u32; 12] = [0, 1, 3, 1023, 1024, 1025, 2048, 5000, 16_384, 40_001, 65_536, 262_144];
/// Outstanding messages: each has its own slot of memory.
const SLOTS: u64 = 4;
const SLOT: u64 = 262_144;

/// The contents of message `n` from `offset` on: every message differs from its neighbours everywhere.
fn pattern(n: u64, bytes: &mut [u8]) {
    Random::new(n).fill(bytes);
}

struct Traffic {
    pair: Pair,
    /// The memory of both ends to send from and receive into.
    regions: [Mr; 2],
    /// The expected contents of a message, and the actual ones.
    expected: Vec<u8>,
    found: Vec<u8>,
    /// Of the responder.
    window: Mw,
}

/// How losses are retransmitted.
#[derive(Clone, Copy, PartialEq)]
enum Repeat {
    GoBackN,
    Selective,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Send,
    Write,
    Read,
}

/// Between host memory, or device memory.
type Make = fn(u64, LinkConfig, Repeat) -> Traffic;

impl Traffic {
    fn new(seed: u64, link: LinkConfig, repeat: Repeat) -> Traffic {
        let setup = Setup { selective_repeat: repeat == Repeat::Selective, ..Setup::default() };
        Traffic::between(Pair::new(seed, link, setup))
    }

    /// Between memory of two devices whose copies land up to 10 ms late.
    fn of_devices(seed: u64, link: LinkConfig, repeat: Repeat) -> Traffic {
        let setup = Setup {
            selective_repeat: repeat == Repeat::Selective,
            timeout: 12, // 17 ms, longer than a copy takes
            ..Setup::default()
        };
        let mut traffic = Traffic::between(Pair::new(seed, link, setup));
        for (n, (end, region)) in traffic.pair.ends.iter_mut().zip(&mut traffic.regions).enumerate() {
            let strict = Strict::default().seed(seed + n as u64).latest(Duration::from_millis(10));
            let memory = strict.open().unwrap().allocate((SLOTS * SLOT) as usize).unwrap();
            let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::MW_BIND;
            *region = end.context.register(end.pd, memory, rights).unwrap();
        }
        traffic
    }

    fn between(mut pair: Pair) -> Traffic {
        let window = pair.ends[1].context.alloc_mw(pair.ends[1].pd).unwrap();
        let [expected, found] = [0, 1].map(|_| vec![0; SLOT as usize]);
        Traffic { regions: [0, 1].map(|end| pair.ends[end].mr), pair, expected, found, window }
    }

    fn fill(&mut self, end: usize, n: u64, length: u32) {
        let bytes = &mut self.expected[..length as usize];
        pattern(n, bytes);
        self.pair.ends[end].context.write(self.regions[end], n % SLOTS * SLOT, bytes).unwrap();
    }

    fn check(&mut self, end: usize, n: u64, length: u32) {
        let [expected, found] = [&mut self.expected, &mut self.found].map(|b| &mut b[..length as usize]);
        pattern(n, expected);
        self.pair.ends[end].context.read(self.regions[end], n % SLOTS * SLOT, found).unwrap();
        assert!(found == expected, "message {n} of {length} bytes differs");
    }

    fn post(&mut self, kind: Kind, n: u64, length: u32) {
        let [local, region] = self.regions;
        let remote = self.pair.ends[1].context.remote(region).unwrap();
        let address = RemoteAddress { addr: remote.addr + n % SLOTS * SLOT, rkey: remote.rkey };
        let [requester, responder] = &mut self.pair.ends;
        let sges = |mr| [Sge { mr, offset: n % SLOTS * SLOT, length }];
        let op = match kind {
            Kind::Send => {
                let wr = ReceiveWorkRequest { wr_id: n, sges: &sges(region) };
                responder.context.post_recv(responder.qp, &wr).unwrap();
                SendOp::SendWithImm(n as u32)
            }
            Kind::Write => SendOp::Write(address),
            Kind::Read => SendOp::Read(address),
        };
        let sges = sges(local);
        let data = Data::Sges(&sges);
        let wr = SendWorkRequest { wr_id: n, op, data, flags: SendFlags::SIGNALED };
        requester.context.post_send(requester.qp, &wr).unwrap();
    }

    /// Transfers `bytes` in messages of all lengths, `SLOTS` at a time. Returns the number of messages.
    fn run(&mut self, kind: Kind, first: u64, bytes: u64) -> u64 {
        let (mut posted, mut completed, mut received, mut moved) = (first, first, first, 0);
        let length = |n: u64| LENGTHS[(n % LENGTHS.len() as u64) as usize];
        loop {
            while moved < bytes && posted < completed.min(received) + SLOTS {
                let source = if kind == Kind::Read { 1 } else { 0 };
                self.fill(source, posted, length(posted));
                self.post(kind, posted, length(posted));
                moved += u64::from(length(posted));
                posted += 1;
            }
            let [requester, responder] = &mut self.pair.ends;
            if let Some(wc) = requester.context.poll_cq(requester.cq).unwrap() {
                assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, completed));
                match kind {
                    Kind::Send => {}
                    Kind::Write => self.check(1, completed, length(completed)),
                    Kind::Read => self.check(0, completed, length(completed)),
                }
                completed += 1;
                if kind != Kind::Send {
                    received = completed;
                }
                continue;
            }
            if let Some(wc) = responder.context.poll_cq(responder.cq).unwrap() {
                assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, received));
                assert_eq!((wc.byte_len, wc.immediate), (length(received), Some(received as u32)));
                self.check(1, received, length(received));
                received += 1;
                continue;
            }
            if moved >= bytes && completed == posted && received == posted {
                return posted - first;
            }
            assert!(self.pair.step(), "stuck: {posted} posted, {completed} completed, {received} received");
        }
    }

    fn atomics(&mut self, count: u64) {
        let remote = self.pair.ends[1].context.remote(self.pair.ends[1].mr).unwrap();
        let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        let end = &mut self.pair.ends[1];
        end.context.bytes_mut(end.mr).unwrap()[..8].fill(0);
        let (mut posted, mut completed) = (0, 0);
        while completed < count {
            let [requester, _] = &mut self.pair.ends;
            while posted < count && posted < completed + 16 {
                let sges = [Sge { mr: requester.mr, offset: posted % 16 * 8, length: 8 }];
                // Every other one is a COMPARE_SWAP that must match the result of the previous one.
                let op = match posted % 2 {
                    0 => SendOp::FetchAdd { remote, add: 1 },
                    _ => SendOp::CompareSwap { remote, compare: posted, swap: posted + 1 },
                };
                let wr = SendWorkRequest {
                    wr_id: posted,
                    op,
                    data: Data::Sges(&sges),
                    flags: SendFlags::SIGNALED,
                };
                requester.context.post_send(requester.qp, &wr).unwrap();
                posted += 1;
            }
            match requester.context.poll_cq(requester.cq).unwrap() {
                Some(wc) => {
                    assert_eq!((wc.status, wc.wr_id, wc.byte_len), (WcStatus::Success, completed, 8));
                    let at = (completed % 16 * 8) as usize;
                    let old = &requester.context.bytes(requester.mr).unwrap()[at..at + 8];
                    assert_eq!(u64::from_ne_bytes(old.try_into().unwrap()), completed);
                    completed += 1;
                }
                None => assert!(self.pair.step(), "stuck after {completed}"),
            }
        }
        let end = &self.pair.ends[1];
        assert_eq!(end.context.bytes(end.mr).unwrap()[..8], count.to_ne_bytes());
    }

    /// ATOMIC WRITEs of their number to one of 16 words, each followed by a FLUSH.
    fn atomic_writes(&mut self, count: u64) {
        let remote = self.pair.ends[1].context.remote(self.pair.ends[1].mr).unwrap();
        let word = |n: u64| RemoteAddress { addr: remote.addr + n % 16 * 8, rkey: remote.rkey };
        let kind = FlushType { global_visibility: true, persistence: false };
        let (mut posted, mut completed) = (0, 0);
        while completed < 2 * count {
            let [requester, responder] = &mut self.pair.ends;
            while posted < count && 2 * posted < completed + 32 {
                let (remote, number) = (word(posted), posted.to_ne_bytes());
                let flush = SendOp::Flush { remote, length: 8, selectivity: Selectivity::Range, kind };
                let mut post = |wr_id, op, data| {
                    let wr = SendWorkRequest { wr_id, op, data, flags: SendFlags::SIGNALED };
                    requester.context.post_send(requester.qp, &wr).unwrap();
                };
                post(2 * posted, SendOp::AtomicWrite(remote), Data::Inline(&number));
                post(2 * posted + 1, flush, Data::Sges(&[]));
                posted += 1;
            }
            let Some(wc) = requester.context.poll_cq(requester.cq).unwrap() else {
                assert!(self.pair.step(), "stuck after {completed}");
                continue;
            };
            assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, completed));
            assert_eq!(wc.opcode, [WcOpcode::AtomicWrite, WcOpcode::Flush][(completed % 2) as usize]);
            let (number, at) = (completed / 2, (completed / 2 % 16 * 8) as usize);
            // The next ATOMIC WRITE to this word is posted after this FLUSH is complete.
            let found = &responder.context.bytes(responder.mr).unwrap()[at..at + 8];
            assert_eq!(u64::from_ne_bytes(found.try_into().unwrap()), number);
            completed += 1;
        }
    }

    /// One window per message: the responder binds it, the requester writes through it, reads back and invalidates it with
    /// the message that reports it.
    fn windows(&mut self, count: u64) {
        const BIND: u64 = 1;
        let mw = self.window;
        for n in 0..count {
            let length = LENGTHS[(n % LENGTHS.len() as u64) as usize].max(1);
            let offset = n % SLOTS * SLOT;
            let bind = SendOp::BindMw {
                mw,
                mr: self.regions[1],
                offset,
                length: length.into(),
                access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            };
            let wr = ReceiveWorkRequest { wr_id: n, sges: &[] };
            let end = &mut self.pair.ends[1];
            end.context.post_recv(end.qp, &wr).unwrap();
            self.post_and_wait(1, BIND, bind, &[]);
            let window = self.pair.ends[1].context.remote_window(mw).unwrap().unwrap();
            assert_eq!((window.addr, window.length), (offset, length.into()));
            self.fill(0, n, length);
            let remote = RemoteAddress { addr: window.addr, rkey: window.rkey };
            let local = [Sge { mr: self.regions[0], offset, length }];
            self.post_and_wait(0, n, SendOp::Write(remote), &local);
            self.check(1, n, length);
            self.fill(0, n + 1, length);
            self.post_and_wait(0, n, SendOp::Read(remote), &local);
            self.check(0, n, length);
            self.post_and_wait(0, n, SendOp::SendWithInvalidate(window.rkey), &[]);
            let wc = self.wait(1);
            assert_eq!((wc.status, wc.invalidated), (WcStatus::Success, Some(window.rkey)));
            assert_eq!(self.pair.ends[1].context.remote_window(mw).unwrap(), None);
        }
    }

    fn post_and_wait(&mut self, end: usize, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(sges), flags: SendFlags::SIGNALED };
        let poster = &mut self.pair.ends[end];
        poster.context.post_send(poster.qp, &wr).unwrap();
        let wc = self.wait(end);
        assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, wr_id));
    }

    fn wait(&mut self, end: usize) -> WorkCompletion {
        loop {
            let waiting = &mut self.pair.ends[end];
            if let Some(wc) = waiting.context.poll_cq(waiting.cq).unwrap() {
                return wc;
            }
            assert!(self.pair.step(), "stuck");
        }
    }

    /// The link had all impairments, and the engine noticed them.
    fn assert_impaired(&self) {
        let link = self.pair.network.counters();
        assert!(link.lost > 0 && link.duplicated > 0 && link.corrupted > 0 && link.reordered > 0, "{link:?}");
        let counters = self.pair.ends[0].context.counters();
        assert!(counters.value(Counter::RetransmittedPkts) > 0);
    }
}

fn soak(kind: Kind, repeat: Repeat) {
    soak_in(Traffic::new(seed(), bad_link(), repeat), kind);
}

/// The same between device memory.
fn soak_devices(kind: Kind) {
    for repeat in [Repeat::GoBackN, Repeat::Selective] {
        soak_in(Traffic::of_devices(seed(), bad_link(), repeat), kind);
    }
}

fn soak_in(mut traffic: Traffic, kind: Kind) {
    let messages = traffic.run(kind, 0, soak_bytes());
    println!(
        "{messages} messages; {:?}\n{}",
        traffic.pair.network.counters(),
        traffic.pair.ends[0].context.counters()
    );
    traffic.assert_impaired();
}

#[test]
fn sends_arrive_exactly_once() {
    soak(Kind::Send, Repeat::GoBackN);
}

#[test]
fn writes_arrive_exactly_once() {
    soak(Kind::Write, Repeat::GoBackN);
}

#[test]
fn reads_arrive_exactly_once() {
    soak(Kind::Read, Repeat::GoBackN);
}

#[test]
fn sends_between_devices_arrive_exactly_once() {
    soak_devices(Kind::Send);
}

#[test]
fn writes_between_devices_arrive_exactly_once() {
    soak_devices(Kind::Write);
}

#[test]
fn reads_between_devices_arrive_exactly_once() {
    soak_devices(Kind::Read);
}

#[test]
fn atomics_happen_exactly_once() {
    let mut traffic = Traffic::new(seed(), bad_link(), Repeat::GoBackN);
    traffic.atomics(100_000);
    traffic.assert_impaired();
}

#[test]
fn sends_arrive_exactly_once_by_selective_repeat() {
    soak(Kind::Send, Repeat::Selective);
}

#[test]
fn writes_arrive_exactly_once_by_selective_repeat() {
    soak(Kind::Write, Repeat::Selective);
}

#[test]
fn reads_arrive_exactly_once_by_selective_repeat() {
    soak(Kind::Read, Repeat::Selective);
}

#[test]
fn atomics_happen_exactly_once_by_selective_repeat() {
    let mut traffic = Traffic::new(seed(), bad_link(), Repeat::Selective);
    traffic.atomics(100_000);
    traffic.assert_impaired();
}

#[test]
fn atomic_writes_and_flushes_happen_exactly_once() {
    for repeat in [Repeat::GoBackN, Repeat::Selective] {
        let mut traffic = Traffic::new(seed(), bad_link(), repeat);
        traffic.atomic_writes(50_000);
        traffic.assert_impaired();
    }
}

#[test]
fn windows_open_and_close_on_a_bad_link() {
    for repeat in [Repeat::GoBackN, Repeat::Selective] {
        let mut traffic = Traffic::new(seed(), bad_link(), repeat);
        traffic.windows(500);
        traffic.assert_impaired();
    }
}

/// The same seed gives the same frames at the same times with the same fates; another does not.
#[test]
fn a_seed_replays_bit_for_bit() {
    let seed = seed();
    let trace = |make: Make, seed, repeat| {
        let mut traffic = make(seed, bad_link(), repeat);
        for (i, kind) in [Kind::Send, Kind::Write, Kind::Read].into_iter().enumerate() {
            traffic.run(kind, i as u64 * 1_000_000, 1_000_000);
        }
        traffic.atomics(1000);
        traffic.atomic_writes(1000);
        traffic.windows(50);
        (traffic.pair.network.trace_hash(), traffic.pair.now)
    };
    let makes: [Make; 2] = [Traffic::new, Traffic::of_devices];
    for make in makes {
        for repeat in [Repeat::GoBackN, Repeat::Selective] {
            let first = trace(make, seed, repeat);
            assert_eq!(first, trace(make, seed, repeat));
            assert_ne!(first, trace(make, seed + 1, repeat));
        }
    }
}

/// After set-up nothing is allocated, neither without nor with impairments, even if other threads could access the contexts
/// meanwhile.
#[test]
fn the_steady_state_does_not_allocate() {
    let calm = LinkConfig::default();
    let makes: [Make; 2] = [Traffic::new, Traffic::of_devices];
    for (make, link, repeat) in makes.into_iter().flat_map(|make| {
        [
            (make, calm.clone(), Repeat::GoBackN),
            (make, bad_link(), Repeat::GoBackN),
            (make, calm.clone(), Repeat::Selective),
            (make, bad_link(), Repeat::Selective),
        ]
    }) {
        let mut traffic = make(seed(), link, repeat);
        for end in &mut traffic.pair.ends {
            end.context.export().unwrap();
        }
        let warm_up = 1_000_000;
        let mut first = 0;
        for kind in [Kind::Send, Kind::Write, Kind::Read] {
            first += traffic.run(kind, first, warm_up);
        }
        let allocations = allocation_counter::measure(|| {
            for kind in [Kind::Send, Kind::Write, Kind::Read] {
                first += traffic.run(kind, first, 5_000_000);
            }
            traffic.atomics(2000);
            traffic.atomic_writes(2000);
            traffic.windows(200);
        });
        assert_eq!(allocations.count_total, 0, "{allocations:?}");
    }
}

/// The other services allocate nothing either: messages and datagrams that are lost, interrupted and too many for their
/// receives, with receives of the queue pair and of an SRQ.
#[test]
fn the_other_services_do_not_allocate() {
    let seed = seed();
    for link in [LinkConfig::default(), bad_link()] {
        for (qp_type, srq) in
            [(QpType::Uc, false), (QpType::Ud, false), (QpType::Ud, true), (QpType::Rc, true)]
        {
            let mut pair = Pair::new(seed, link.clone(), Setup { qp_type, srq, ..Setup::default() });
            let mut messages = Messages { posted: 0, receives: 0, delivered: 0 };
            messages.run(&mut pair, 2000);
            let allocations = allocation_counter::measure(|| messages.run(&mut pair, 10_000));
            assert_eq!(allocations.count_total, 0, "{qp_type:?}, SRQ {srq}: {allocations:?}");
            let Messages { posted, delivered, .. } = messages;
            println!("{qp_type:?}, SRQ {srq}: {delivered} of {posted} messages delivered");
            assert!(delivered > posted / 4 && delivered <= posted + posted / 20);
        }
    }
}

/// Messages of all lengths from one end to the other, and the number of receives posted there.
struct Messages {
    posted: u64,
    receives: u64,
    delivered: u64,
}

impl Messages {
    fn run(&mut self, pair: &mut Pair, count: u64) {
        let end = self.posted + count;
        let mut completed = self.posted;
        while completed < end {
            let [sender, receiver] = &mut pair.ends;
            // Sometimes too few.
            let wanted = if self.posted.is_multiple_of(64) { 0 } else { 8 };
            while self.receives < wanted {
                receiver.post_recv(self.receives, 0, 4096);
                self.receives += 1;
            }
            while self.posted < end && self.posted < completed + 8 {
                let length = LENGTHS[self.posted as usize % 8].min(4056);
                sender.post_send(self.posted, sender.send_op(), 0, length);
                self.posted += 1;
            }
            let going = pair.step();
            let [sender, receiver] = &mut pair.ends;
            let before = completed;
            while let Some(wc) = sender.context.poll_cq(sender.cq).unwrap() {
                assert_eq!(wc.status, WcStatus::Success);
                completed += 1;
            }
            while let Some(wc) = receiver.context.poll_cq(receiver.cq).unwrap() {
                assert_eq!(wc.status, WcStatus::Success);
                self.receives -= 1;
                self.delivered += 1;
            }
            assert!(going || completed > before, "stuck after {completed}");
        }
        while pair.step() {}
        let receiver = &mut pair.ends[1];
        while let Some(wc) = receiver.context.poll_cq(receiver.cq).unwrap() {
            assert_eq!(wc.status, WcStatus::Success);
            self.receives -= 1;
            self.delivered += 1;
        }
    }
}
