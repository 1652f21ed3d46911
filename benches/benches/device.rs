//! GPU memory compared with host memory: goodput of WRITEs and the latency of one, over the in-process driver on one
//! core, and the times of the GPU's own copies, in the same rounds.
//!
//! The GPU is `FERROCE_GPU` (`cuda:1`), else the first of CUDA, else the first of OpenCL. The strict device, which
//! copies by the CPU and synchronously, is measured besides: its difference to host memory is the engine's own cost.

use std::sync::Arc;
use std::time::Instant;

use ferroce::driver::gpu::{Device as Gpu, GpuError, GpuSpec, Staging, Ticket, strict::Strict};
use ferroce::driver::loopback;
use ferroce::driver::machine::Rounds;
use ferroce::*;
use ferroce_benches::pair::{Pair, Setup, Writes};
use ferroce_benches::report::{Median, Options};
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Of messages and of copies.
const SIZES: [usize; 6] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const SHORT: u32 = 8;
/// Concurrent copies, as the engine has several.
const COPIES: usize = 8;

struct Scale {
    bytes: u64,
    writes: usize,
    rounds: usize,
}

fn main() -> Outcome<()> {
    let options = Options::from_args();
    let scale = options.scale(
        Scale { bytes: 1 << 20, writes: 5, rounds: 1 },
        Scale { bytes: 256 << 20, writes: 2000, rounds: 5 },
    );
    let mut devices: Vec<Arc<dyn Gpu>> = vec![Strict::default().open()?];
    match find_gpu() {
        Ok(gpu) => devices.push(gpu),
        Err(error) => println!("skipped: no GPU: {error}"),
    }
    let mut state = Rounds::new();
    let results: Vec<Value> =
        devices.iter().map(|gpu| measure(gpu, &scale, &mut state)).collect::<Outcome<Vec<Value>>>()?;
    Ok(options.save_with(&state, json!({ "devices": results }))?)
}

fn find_gpu() -> Result<Arc<dyn Gpu>, GpuError> {
    match std::env::var("FERROCE_GPU") {
        Ok(name) => name.parse::<GpuSpec>()?.open(),
        Err(_) => GpuSpec::Cuda(0).open().or_else(|_| GpuSpec::OpenCl(0).open()),
    }
}

fn measure(gpu: &Arc<dyn Gpu>, scale: &Scale, state: &mut Rounds) -> Outcome<Value> {
    println!("\n{}: GB/s of payload, median of {} rounds (spread)", gpu.name(), scale.rounds);
    println!(
        "{:>9} {:>16} {:>16} {:>16} {:>16} {:>9} {:>9} {:>9}",
        "bytes", "copies out", "copies in", "WRITE, host", "WRITE, device", "of host", "of copies", "in turn"
    );
    let mut rows = Vec::new();
    for size in SIZES {
        let mut copied = [0.0; 2];
        let runs = state.hold(scale.rounds, |_| {
            let [gathers, scatters] = copy_rates(gpu, size, scale.bytes)?;
            let host = write_rate(None, size, scale.bytes)?.0;
            let (device, per_byte) = write_rate(Some(gpu), size, scale.bytes)?;
            copied = per_byte;
            Outcome::Ok([gathers, scatters, host, device])
        })?;
        let [out, into, host, device] = Median::of_each(&runs);
        let slower = out.value.min(into.value);
        // The rate of the copy out, the host-memory transfer and the copy in, one after the other.
        let in_turn = 1.0 / (out.value.recip() + host.value.recip() + into.value.recip());
        println!(
            "{size:>9} {} {} {} {} {:>8.0}% {:>8.0}% {:>8.0}%",
            cell(out),
            cell(into),
            cell(host),
            cell(device),
            100.0 * device.value / host.value,
            100.0 * device.value / slower,
            100.0 * device.value / in_turn
        );
        rows.push(json!({
            "bytes": size, "gathers_gb_s": out.value, "scatters_gb_s": into.value, "host_gb_s": host.value,
            "device_gb_s": device.value, "device_spread": device.spread, "device_copies_per_byte": copied,
            "in_turn_gb_s": in_turn,
        }));
    }
    println!(
        "in turn: of what the copy out, the WRITE of host memory and the copy in make one after the other; the rest is the engine's"
    );
    let per_byte = rows.iter().map(|row| &row["device_copies_per_byte"]);
    println!("copies by the device for each byte of payload, at the sender and at the receiver:");
    for (size, copies) in SIZES.iter().zip(per_byte) {
        println!("{size:>9} {copies}");
    }
    Ok(json!({ "device": gpu.name(), "rows": rows, "short": short_writes(gpu, scale, state)? }))
}

fn cell(median: Median) -> String {
    format!("{:>8.3} ({:>3.0}%)", median.value, 100.0 * median.spread)
}

/// The GPU's own rate of copies of one size, to and from staging memory, in GB/s.
fn copy_rates(gpu: &Arc<dyn Gpu>, size: usize, bytes: u64) -> Outcome<[f64; 2]> {
    let memory = gpu.allocate(COPIES * size)?;
    let staging = Staging::new(COPIES * size)?;
    let mut rates = [0.0; 2];
    for (direction, rate) in rates.iter_mut().enumerate() {
        let mut queue = gpu.queue(&staging)?;
        let mut clock = Clock::start();
        let count = (bytes / size as u64).max(1);
        let (mut done, start) = (Ticket::NONE, Instant::now());
        for n in 1..=count {
            let at = n as usize % COPIES * size;
            let piece = [memory.piece(at as u64, size)?];
            // The copies that are not complete.
            while done.0 + (COPIES as u64) < n {
                done = queue.done(clock.now())?;
            }
            match direction {
                0 => queue.gather(clock.now(), &piece, at)?,
                _ => queue.scatter(clock.now(), at, &piece, Ticket::NONE)?,
            };
        }
        while done < Ticket(count) {
            done = queue.done(clock.now())?;
        }
        *rate = (count * size as u64) as f64 / start.elapsed().as_nanos() as f64;
    }
    Ok(rates)
}

fn pair(gpu: Option<&Arc<dyn Gpu>>, size: usize) -> Outcome<Pair> {
    let ports = loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    let config = Config::default().staging_chunk((size as u32).max(1 << 16));
    let setup = Setup { config, memory: size.max(4096), gpu: gpu.cloned(), ..Setup::default() };
    Ok(Pair::new([ports.0, ports.1], &setup)?.in_real_time())
}

/// The rate of WRITEs of one size, in GB/s, and how often the device has copied each byte, at each end.
fn write_rate(gpu: Option<&Arc<dyn Gpu>>, size: usize, bytes: u64) -> Outcome<(f64, [f64; 2])> {
    let mut pair = pair(gpu, size)?;
    let count = (bytes / size as u64).max(16);
    let writes = Writes { active: &[0], length: size as u32, depth: 16, count };
    let start = Instant::now();
    pair.write(&writes)?;
    let payload = (count * size as u64) as f64;
    let rate = payload / start.elapsed().as_nanos() as f64;
    let copied = pair.ends.map(|end| end.context.counters().value(Counter::DeviceBytes) as f64 / payload);
    Ok((rate, copied))
}

/// The time of a WRITE of 8 bytes, from its post to its completion, and its parts.
fn short_writes(gpu: &Arc<dyn Gpu>, scale: &Scale, state: &mut Rounds) -> Outcome<Value> {
    let runs = state.hold(scale.rounds, |_| {
        let [out, into] = copy_times(gpu, scale.writes)?;
        Outcome::Ok([out, into, write_time(None, scale.writes)?, write_time(Some(gpu), scale.writes)?])
    })?;
    let [out, into, host, device] = Median::of_each(&runs);
    let rest = device.value - host.value - out.value - into.value;
    println!(
        "WRITE of {SHORT} B, µs from post to completion (p50): host {:.2}, device {:.2} ({:.0}%): copy out {:.2}, copy in {:.2}, \
         the way as of host memory {:.2}, the rest {rest:.2}",
        host.value,
        device.value,
        100.0 * device.spread,
        out.value,
        into.value,
        host.value
    );
    Ok(json!({
        "host_us": host.value, "device_us": device.value, "gather_us": out.value, "scatter_us": into.value, "rest_us": rest,
    }))
}

/// One copy of 8 bytes at a time, out and in, in µs.
fn copy_times(gpu: &Arc<dyn Gpu>, count: usize) -> Outcome<[f64; 2]> {
    let (memory, staging) = (gpu.allocate(4096)?, Staging::new(4096)?);
    let mut queue = gpu.queue(&staging)?;
    let mut clock = Clock::start();
    let mut times: [Vec<f64>; 2] = Default::default();
    for _ in 0..count {
        for (direction, times) in times.iter_mut().enumerate() {
            let piece = [memory.piece(0, SHORT as usize)?];
            let start = Instant::now();
            let ticket = match direction {
                0 => queue.gather(clock.now(), &piece, 0)?,
                _ => queue.scatter(clock.now(), 0, &piece, Ticket::NONE)?,
            };
            while queue.done(clock.now())? < ticket {}
            times.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
    }
    Ok(times.map(|times| Median::of(times).value))
}

fn write_time(gpu: Option<&Arc<dyn Gpu>>, count: usize) -> Outcome<f64> {
    let mut pair = pair(gpu, 4096)?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        pair.write(&Writes { active: &[0], length: SHORT, depth: 16, count: 1 })?;
        times.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(Median::of(times).value)
}
