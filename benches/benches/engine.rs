//! Nanoseconds a packet through the engine, both ends on one core and no driver between them:
//! frames pass through a ring in memory.
//!
//! A packet here is a WRITE frame with all that it causes: gather, ICRC, emit at one end, parse,
//! ICRC, checks, scatter at the other, and its share of the ACKs, completions and posts. The columns
//! behind it say where the time goes: the same copies, ICRCs and headers alone, and the rest.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferroce::driver::{Capabilities, Error, Layer, Stats};
use ferroce::wire::{Bth, FrameBuilder, NetworkHeader, Opcode, Packet, Reth, icrc};
use ferroce::*;

const FRAMES: usize = 1024;
const FRAME: usize = 4300;
/// WRITEs in flight.
const DEPTH: u64 = 64;
const ROUNDS: usize = 7;
const PACKETS: u64 = 400_000;

/// One direction: frames in place, no copy.
struct Ring {
    frames: Vec<(usize, Box<[u8]>)>,
    head: usize,
    tail: usize,
}

impl Ring {
    fn new() -> Arc<Mutex<Ring>> {
        let frames = (0..FRAMES).map(|_| (0, vec![0; FRAME].into_boxed_slice())).collect();
        Arc::new(Mutex::new(Ring { frames, head: 0, tail: 0 }))
    }
}

struct Port {
    capabilities: Capabilities,
    rx: Arc<Mutex<Ring>>,
    tx: Arc<Mutex<Ring>>,
}

impl Port {
    fn new(n: u8, rx: Arc<Mutex<Ring>>, tx: Arc<Mutex<Ring>>) -> Port {
        let capabilities = Capabilities {
            driver: "ring",
            description: "frames in memory".to_owned(),
            interface: format!("ring{n}"),
            layer: Layer::Ethernet,
            mac: [2, 0, 0, 0, 0, n],
            addresses: vec![[192, 0, 2, n].into()],
            mtu: 4200,
            max_frame: FRAME,
        };
        Port { capabilities, rx, tx }
    }
}

impl PacketDriver for Port {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FnMut(&[u8])) -> Result<usize, Error> {
        let mut ring = self.rx.lock().unwrap_or_else(|e| e.into_inner());
        let burst = (ring.tail - ring.head).min(64);
        for _ in 0..burst {
            let (length, frame) = &ring.frames[ring.head % FRAMES];
            sink(&frame[..*length]);
            ring.head += 1;
        }
        Ok(burst)
    }

    fn tx_burst(
        &mut self,
        _: Nanos,
        source: &mut dyn FnMut(&mut [u8]) -> Option<usize>,
    ) -> Result<usize, Error> {
        let mut ring = self.tx.lock().unwrap_or_else(|e| e.into_inner());
        let mut sent = 0;
        while ring.tail - ring.head < FRAMES {
            let slot = ring.tail % FRAMES;
            let (length, frame) = &mut ring.frames[slot];
            let Some(n) = source(frame) else { break };
            *length = n;
            ring.tail += 1;
            sent += 1;
        }
        Ok(sent)
    }

    fn wait(&mut self, _: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn resolve(&mut self, _: std::net::IpAddr) -> Result<[u8; 6], Error> {
        Ok([2, 0, 0, 0, 0, 3 - self.capabilities.mac[5]])
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

struct Pair {
    ends: [Context; 2],
    qp: Qp,
    cq: Cq,
    mr: Mr,
    remote: RemoteAddress,
    now: u64,
}

impl Pair {
    fn new() -> Result<Pair, ferroce::Error> {
        let (a, b) = (Ring::new(), Ring::new());
        let ports = [Port::new(1, a.clone(), b.clone()), Port::new(2, b, a)];
        let mut made = Vec::new();
        for port in ports {
            let mut context = Context::open(Box::new(port), &Config::default())?;
            let pd = context.alloc_pd()?;
            let cq = context.create_cq(4096)?;
            let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
            let memory = Memory::zeroed(1 << 16).map_err(|e| Error::Os {
                what: "mmap",
                interface: "none".to_owned(),
                source: e,
            })?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let mr = context.register(pd, memory, access)?;
            made.push((context, cq, qp, mr));
        }
        let facts: Vec<(Gid, Qpn)> = made
            .iter()
            .map(|(c, _, qp, _)| Ok((c.port().gids[0].gid, c.query_qp(*qp)?.qpn)))
            .collect::<Result<_, ferroce::Error>>()?;
        for (i, (context, _, qp, _)) in made.iter_mut().enumerate() {
            let (gid, dest_qpn) = facts[1 - i];
            context.modify_qp(*qp, Transition::Init { access: Access::REMOTE_WRITE })?;
            let rnr = RnrTimer::new(12).unwrap_or_else(|| unreachable!("12 is below 32"));
            context.modify_qp(
                *qp,
                Transition::ReadyToReceive(ReadyToReceive {
                    address: AddressVector::new(gid, 0),
                    path_mtu: PathMtu::Mtu4096,
                    dest_qpn,
                    rq_psn: Psn::new(0),
                    max_dest_rd_atomic: 16,
                    min_rnr_timer: rnr,
                }),
            )?;
            context.modify_qp(
                *qp,
                Transition::ReadyToSend(ReadyToSend {
                    sq_psn: Psn::new(0),
                    timeout: 14,
                    retry_count: 7,
                    rnr_retry: 7,
                    max_rd_atomic: 16,
                }),
            )?;
        }
        let [(a, cq, qp, mr), (b, _, _, peer_mr)]: [_; 2] =
            made.try_into().unwrap_or_else(|_| unreachable!("two were made"));
        let remote = b.remote(peer_mr)?;
        let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        Ok(Pair { ends: [a, b], qp, cq, mr, remote, now: 0 })
    }

    /// Moves `count` WRITEs of `length` bytes. Returns the time a packet took.
    fn run(&mut self, length: u32, count: u64) -> Result<f64, ferroce::Error> {
        let (mut posted, mut done) = (0, 0);
        let start = Instant::now();
        while done < count {
            while posted < count && posted - done < DEPTH {
                let sges = [Sge { mr: self.mr, offset: 0, length }];
                // One completion for eight, as applications do it that care.
                let signaled = posted % 8 == 7 || posted + 1 == count;
                let flags = SendFlags { signaled, ..SendFlags::default() };
                let op = SendOp::Write(self.remote);
                let wr = SendWorkRequest { wr_id: posted + 1, op, data: Data::Sges(&sges), flags };
                self.ends[0].post_send(self.qp, &wr)?;
                posted += 1;
            }
            self.now += 1000;
            for end in &mut self.ends {
                end.poll(Nanos(self.now))?;
            }
            while let Some(wc) = self.ends[0].poll_cq(self.cq)? {
                assert_eq!(wc.status, WcStatus::Success, "the ring loses nothing");
                done = wc.wr_id;
            }
        }
        Ok(start.elapsed().as_nanos() as f64 / count as f64)
    }
}

/// The same frames through `wire` alone: emit with copy and ICRC, parse with ICRC, copy.
fn wire_alone(length: usize, count: u64) -> f64 {
    let path = ferroce_benches::path();
    let (mut buffer, data, mut sink) = (vec![0u8; FRAME], vec![1u8; length], vec![0u8; length]);
    let start = Instant::now();
    for n in 0..count {
        let bth = Bth::new(Opcode::RC_WRITE_ONLY, Qpn::new(17), Psn::new(n as u32));
        let Some(mut frame) = FrameBuilder::start(&mut buffer, &path, bth, length) else { continue };
        frame.put(&Reth::new(0, RKey(1), length as u32));
        frame.payload().copy_from_slice(&data);
        let end = frame.finish();
        if let Ok(packet) = Packet::parse(std::hint::black_box(&buffer[..end])) {
            sink.copy_from_slice(packet.payload);
        }
    }
    std::hint::black_box(&sink);
    start.elapsed().as_nanos() as f64 / count as f64
}

/// The two ICRCs of such a frame alone: one to write it, one to check it.
fn icrc_alone(length: usize, count: u64) -> f64 {
    let packet = vec![0x45u8; 20 + 8 + 12 + 16 + length];
    let start = Instant::now();
    for _ in 0..2 * count {
        std::hint::black_box(icrc::compute(NetworkHeader::Ipv4, std::hint::black_box(&packet)));
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// The two copies of its payload alone: memory to frame, frame to memory.
fn copy_alone(length: usize, count: u64) -> f64 {
    let (from, mut to) = (vec![1u8; length], vec![0u8; length]);
    let start = Instant::now();
    for _ in 0..2 * count {
        std::hint::black_box(&mut to[..]).copy_from_slice(std::hint::black_box(&from));
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// Median and spread (least to most, as a share of the median) of several runs.
fn median(mut runs: Vec<f64>) -> (f64, f64) {
    runs.sort_by(f64::total_cmp);
    let median = runs[runs.len() / 2];
    (median, (runs[runs.len() - 1] - runs[0]) / median)
}

fn main() -> Result<(), ferroce::Error> {
    // `cargo test --benches` runs this too; one short round shows that it works.
    let quick = !std::env::args().any(|a| a == "--bench");
    let (rounds, packets) = if quick { (1, 10_000) } else { (ROUNDS, PACKETS) };
    println!("engine, WRITE, both ends on one core; median of {rounds} runs of {packets} packets");
    println!("nanoseconds a packet, and where they go (each part measured alone, in the same run)");
    println!("   bytes    total  spread     copy     ICRC  headers     rest");
    for length in [64u32, 1024, 4096] {
        let mut pair = Pair::new()?;
        pair.run(length, packets / 10)?;
        let mut runs: [Vec<f64>; 4] = Default::default();
        for _ in 0..rounds {
            runs[0].push(pair.run(length, packets)?);
            runs[1].push(wire_alone(length as usize, packets));
            runs[2].push(icrc_alone(length as usize, packets));
            runs[3].push(copy_alone(length as usize, packets));
        }
        let [(total, spread), (wire, _), (icrc, _), (copy, _)] = runs.map(median);
        let (headers, rest) = (wire - icrc - copy, total - wire);
        let spread = spread * 100.0;
        println!(
            "{length:>8} {total:>8.1} {spread:>6.0}% {copy:>8.1} {icrc:>8.1} {headers:>8.1} {rest:>8.1}"
        );
    }
    println!(
        "headers: writing and taking apart; rest: state machines, memory checks, ACKs, posts, completions"
    );
    Ok(())
}
