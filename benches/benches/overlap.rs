//! An all-reduce of two ranks on device memory, compared with each of its three stages alone: the copies between
//! devices and host, the network transfer, the reductions. If the stages overlap, it takes little longer than the
//! longest one; otherwise it would take their sum.
//!
//! First in virtual time, without CPU cost: strict devices whose copies and reductions have a speed, on a link of 100
//! Gb/s. This measures how well ferroce keeps all three busy at the same time, and a run is reproducible to the
//! nanosecond. Then in real time on the available GPU (`FERROCE_GPU`, CUDA or OpenCL), with a thread for each rank and
//! a driver inside the process. PoCL copies and reduces on the CPU that the ranks run on, too: there the stages share
//! its cores, and can overlap only as far as cores are free.

use std::net::IpAddr;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::driver::Clock;
use ferroce::driver::gpu::{Device as Gpu, GpuError, GpuSpec, Staging, Ticket, Tickets, strict::Strict};
use ferroce::driver::loopback;
use ferroce::driver::machine::Rounds;
use ferroce::driver::reduction::{Computation, Reduction};
use ferroce::driver::sim::{LinkConfig, SimNetwork};
use ferroce::{Config, Context, Counter, Device, Nanos};
use ferroce_benches::report::{self, Median, Options};
use ferroce_collectives::{
    Collectives, Communicator, DataType, Operation, Options as Ranks, ReduceOp, SharedMemory,
};
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Bytes of one copy, and of one reduction, in the separate measurements: those of the engine's copies and of the
/// ranks' reductions.
const COPY: usize = 64 << 10;
const CHUNK: usize = 256 << 10;
/// Concurrent copies or reductions.
const DEPTH: u64 = 16;

/// The measured times, in seconds.
struct Times {
    copies: f64,
    wire: f64,
    reductions: f64,
    all_reduce: f64,
}

fn main() -> Outcome<()> {
    let options = Options::from_args();
    let (bytes, rounds) = options.scale((1 << 20, 1), (64 << 20, 5));
    let size = report::bytes(bytes as u64);
    println!("all-reduce of {size} f32 by two ranks, and its stages alone, in ms");
    println!(
        "{:<44} {:>8} {:>8} {:>10} {:>10} {:>10} {:>10}",
        "", "copies", "wire", "reductions", "all-reduce", "of longest", "of the sum"
    );
    // GB/s of a device's copies, in each direction, and of its reductions: each of the three stages is the longest one
    // once.
    let mut rows = Vec::new();
    for [copied, reduced] in [[50, 200], [8, 200], [50, 4], [12, 6]] {
        let open = || {
            Ok(Strict::default().speed(copied * 1_000_000_000, reduced * 1_000_000_000).open()?
                as Arc<dyn Gpu>)
        };
        let times = modelled(bytes, &open)?;
        rows.push(row(&format!("modelled: copies {copied} GB/s, reductions {reduced}"), &times, 0.0));
    }
    let mut state = Rounds::new();
    match find_gpu() {
        Ok(gpu) => {
            let runs = state.hold(rounds, |_| {
                measured(bytes, &gpu).map(|of| [of.copies, of.wire, of.reductions, of.all_reduce])
            })?;
            let [copies, wire, reductions, all_reduce] = Median::of_each(&runs);
            let times = Times {
                copies: copies.value,
                wire: wire.value,
                reductions: reductions.value,
                all_reduce: all_reduce.value,
            };
            rows.push(row(&format!("{}, median of {rounds}", gpu.name()), &times, all_reduce.spread));
        }
        Err(error) => println!("skipped: no GPU: {error}"),
    }
    Ok(options.save_with(&state, json!({ "bytes": bytes, "rows": rows }))?)
}

fn find_gpu() -> Result<Arc<dyn Gpu>, GpuError> {
    match std::env::var("FERROCE_GPU") {
        Ok(name) => name.parse::<GpuSpec>()?.open(),
        Err(_) => GpuSpec::Cuda(0).open().or_else(|_| GpuSpec::OpenCl(0).open()),
    }
}

fn row(name: &str, times: &Times, spread: f64) -> Value {
    let Times { copies, wire, reductions, all_reduce } = *times;
    let (longest, sum) = (copies.max(wire).max(reductions), copies + wire + reductions);
    println!(
        "{name:<44} {:>8.2} {:>8.2} {:>10.2} {:>10.2} {:>10.2} {:>10.2}",
        copies * 1e3,
        wire * 1e3,
        reductions * 1e3,
        all_reduce * 1e3,
        all_reduce / longest,
        all_reduce / sum
    );
    json!({
        "name": name, "copies_s": copies, "wire_s": wire, "reductions_s": reductions, "all_reduce_s": all_reduce,
        "spread": spread, "of_longest": all_reduce / longest, "of_sum": all_reduce / sum,
    })
}

/// The source of time.
enum Time {
    Real(Clock),
    Virtual(Nanos),
}

impl Time {
    fn now(&mut self) -> Nanos {
        match self {
            Time::Real(clock) => clock.now(),
            Time::Virtual(now) => *now,
        }
    }

    /// Nothing happens before `next`.
    fn pass(&mut self, next: Option<Nanos>) {
        if let Time::Virtual(now) = self {
            *now = next.unwrap_or(*now).max(*now + Duration::from_nanos(1));
        }
    }
}

/// The copies of one rank alone, in both directions at once.
fn copies(gpu: &Arc<dyn Gpu>, [out, into]: [u64; 2], time: &mut Time) -> Outcome<f64> {
    let ring = DEPTH as usize * COPY;
    let (memory, staging) = (gpu.allocate(2 * ring)?, Staging::new(2 * ring)?);
    let mut queues = [gpu.queue(&staging)?, gpu.queue(&staging)?];
    let counts = [out, into].map(|bytes| bytes.div_ceil(COPY as u64));
    let (mut submitted, mut done) = ([0; 2], [Ticket::NONE; 2]);
    let start = time.now();
    while (0..2).any(|way| done[way].0 < counts[way]) {
        for (way, queue) in queues.iter_mut().enumerate() {
            let now = time.now();
            done[way] = queue.done(now)?;
            while submitted[way] < counts[way].min(done[way].0 + DEPTH) {
                let at = way * ring + (submitted[way] % DEPTH) as usize * COPY;
                let piece = [memory.piece(at as u64, COPY)?];
                match way {
                    0 => queue.gather(now, &piece, at)?,
                    _ => queue.scatter(now, at, &piece, Ticket::NONE)?,
                };
                submitted[way] += 1;
            }
        }
        let now = time.now();
        time.pass(queues.iter().filter_map(|queue| queue.next_deadline(now)).min());
    }
    Ok(time.now().since(start).as_secs_f64())
}

/// The reductions of one rank alone, of `bytes` bytes.
fn reductions(gpu: &Arc<dyn Gpu>, bytes: u64, time: &mut Time) -> Outcome<f64> {
    let memory = gpu.allocate(2 * DEPTH as usize * CHUNK)?;
    let sum = Computation::Reduce(Reduction::new(DataType::F32, ReduceOp::Sum));
    let mut reducer = gpu.reducer()?;
    let count = bytes.div_ceil(CHUNK as u64);
    // Built before the measurement.
    let piece = memory.piece(0, CHUNK)?;
    let first = reducer.compute(time.now(), sum, piece, &[piece, piece])?;
    until(&mut *reducer, first, time)?;
    let start = time.now();
    for n in 0..count {
        let [a, b] = [0, 1].map(|which| memory.piece((2 * (n % DEPTH) + which) * CHUNK as u64, CHUNK));
        let (a, b) = (a?, b?);
        let ticket = reducer.compute(time.now(), sum, a, &[a, b])?;
        until(&mut *reducer, Ticket(ticket.0.saturating_sub(DEPTH)), time)?;
    }
    until(&mut *reducer, Ticket(first.0 + count), time)?;
    Ok(time.now().since(start).as_secs_f64())
}

fn until<T: Tickets + ?Sized>(tickets: &mut T, ticket: Ticket, time: &mut Time) -> Outcome<()> {
    loop {
        let now = time.now();
        if tickets.done(now)? >= ticket {
            return Ok(());
        }
        time.pass(tickets.next_deadline(now));
    }
}

/// Two ranks, each on a port and with a device, if there is one.
fn ranks(ports: [Device; 2], gpus: [Option<Arc<dyn Gpu>>; 2]) -> Outcome<[(Collectives, Communicator); 2]> {
    let options = Ranks::default().shared_memory(SharedMemory::Off);
    let mut ranks = Vec::new();
    for ((n, port), gpu) in (0_u8..).zip(ports).zip(gpus) {
        let context = Context::open(port, &Config::default().seed([n; 32]))?;
        ranks.push(match gpu {
            Some(gpu) => Collectives::on_device(context, gpu)?,
            None => Collectives::new(context)?,
        });
    }
    let mut cards = Vec::new();
    for rank in &mut ranks {
        cards.push(rank.card(&options)?);
    }
    let mut joined = Vec::new();
    for (n, mut rank) in (0..).zip(ranks) {
        let all = rank.join_with(n, &cards, &options)?;
        joined.push((rank, all));
    }
    Ok(joined.try_into().map_err(|_| "there are two")?)
}

/// One rank's part: the all-reduce on device memory; for host memory, messages with as many bytes in each direction,
/// which is the network transfer.
fn part(
    rank: &mut Collectives,
    all: Communicator,
    bytes: usize,
    is_all_reduce: bool,
) -> Outcome<Vec<Operation>> {
    let [a, b] = [rank.allocate(bytes)?, rank.allocate(bytes)?];
    let (peer, count) = (1 - all.rank(), bytes / 4);
    Ok(match is_all_reduce {
        true => vec![Operation::all_reduce(a, a, count, DataType::F32, ReduceOp::Sum)],
        false => vec![
            Operation::receive(b, count, DataType::F32, peer),
            Operation::send(a, count, DataType::F32, peer),
        ],
    })
}

/// Bytes that the first rank's device has copied so far, from and to its memory.
fn copied(rank: &Collectives) -> u64 {
    rank.context().counters().value(Counter::DeviceBytes)
}

const ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2))];

/// All in virtual time.
fn modelled(bytes: usize, open: &dyn Fn() -> Result<Arc<dyn Gpu>, GpuError>) -> Outcome<Times> {
    let (all_reduce, moved) = simulated(bytes, [Some(open()?), Some(open()?)])?;
    let (wire, _) = simulated(bytes, [None, None])?;
    let gpu = open()?;
    let mut time = Time::Virtual(Nanos(0));
    Ok(Times {
        copies: copies(&gpu, [moved / 2, moved / 2], &mut time)?,
        wire,
        reductions: reductions(&gpu, bytes as u64 / 2, &mut time)?,
        all_reduce,
    })
}

/// The second run of an operation, and the bytes that the device of a rank has copied in it.
fn simulated(bytes: usize, gpus: [Option<Arc<dyn Gpu>>; 2]) -> Outcome<(f64, u64)> {
    let is_all_reduce = gpus[0].is_some();
    let link = LinkConfig::default().rate(100_000_000_000).delay(Duration::from_micros(1));
    let network = SimNetwork::new(1, link)?;
    let ports = ADDRESSES
        .map(|address| Device::from(Box::new(network.port(&[address])) as Box<dyn ferroce::PacketDriver>));
    let mut ranks = ranks(ports, gpus)?;
    let (mut now, mut took) = (Nanos(0), (0.0, 0));
    let mut parts = Vec::new();
    for (rank, all) in &mut ranks {
        parts.push(part(rank, *all, bytes, is_all_reduce)?);
    }
    for _ in 0..2 {
        let (start, before) = (now, copied(&ranks[0].0));
        let mut requests = Vec::new();
        for ((rank, all), part) in ranks.iter_mut().zip(&parts) {
            requests.push(Some(rank.start_all(*all, part)?));
        }
        while requests.iter().any(Option::is_some) {
            let mut moved = false;
            for ((rank, _), request) in ranks.iter_mut().zip(&mut requests) {
                moved |= rank.poll(now)?;
                if let Some(under_way) = *request
                    && rank.has_ended(under_way)?
                {
                    *request = None;
                }
            }
            if !moved {
                let timers = ranks.iter().filter_map(|(rank, _)| rank.next_timeout());
                let looks = ranks.iter().map(|(rank, _)| rank.next_look());
                let next = timers.chain(looks).chain(network.next_arrival()).min().unwrap_or(now);
                now = next.max(now + Duration::from_nanos(1));
            }
        }
        took = (now.since(start).as_secs_f64(), copied(&ranks[0].0) - before);
    }
    Ok(took)
}

/// All in real time, on one GPU that both ranks share.
fn measured(bytes: usize, gpu: &Arc<dyn Gpu>) -> Outcome<Times> {
    let (all_reduce, moved) = threads(bytes, [Some(gpu.clone()), Some(gpu.clone())])?;
    let (wire, _) = threads(bytes, [None, None])?;
    // For both ranks at the same time, as in the operation.
    let both = |stage: fn(&Arc<dyn Gpu>, u64, &mut Time) -> Outcome<f64>, bytes: u64| -> Outcome<f64> {
        let times = thread::scope(|scope| {
            let ranks = [(); 2].map(|()| {
                scope.spawn(move || {
                    stage(gpu, bytes, &mut Time::Real(Clock::start())).map_err(|error| error.to_string())
                })
            });
            ranks.map(|rank| rank.join().unwrap_or_else(|_| Err("a thread has panicked".to_owned())))
        });
        let [a, b] = times;
        Ok(a?.max(b?))
    };
    Ok(Times {
        copies: both(|gpu, bytes, time| copies(gpu, [bytes / 2, bytes / 2], time), moved)?,
        wire,
        reductions: both(reductions, bytes as u64 / 2)?,
        all_reduce,
    })
}

/// As [`simulated`], with a thread for each rank.
fn threads(bytes: usize, gpus: [Option<Arc<dyn Gpu>>; 2]) -> Outcome<(f64, u64)> {
    let is_all_reduce = gpus[0].is_some();
    let (a, b) = loopback::pair(&ADDRESSES[..1], &ADDRESSES[1..]);
    let ports = [a, b].map(|port| Device::from(Box::new(port) as Box<dyn ferroce::PacketDriver>));
    let together = Barrier::new(2);
    let run = |(mut rank, all): (Collectives, Communicator)| -> Outcome<(f64, u64)> {
        let part = part(&mut rank, all, bytes, is_all_reduce)?;
        let request = rank.start_all(all, &part)?;
        rank.wait(request)?;
        together.wait();
        let (start, before) = (Instant::now(), copied(&rank));
        let request = rank.start_all(all, &part)?;
        rank.wait(request)?;
        let took = (start.elapsed().as_secs_f64(), copied(&rank) - before);
        rank.finish()?;
        Ok(took)
    };
    let ranks = ranks(ports, gpus)?;
    let [first, second] = thread::scope(|scope| {
        let run = &run;
        let threads = ranks.map(|rank| scope.spawn(move || run(rank).map_err(|error| error.to_string())));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err("a thread has panicked".to_owned())))
    });
    let (first, second) = (first?, second?);
    Ok((first.0.max(second.0), first.1))
}
