//! Nanoseconds per packet in the engine, with both ends on one core and no driver between them: frames pass through a
//! ring in memory.
//!
//! A packet here is a WRITE frame with all its work: gather, ICRC and emit at one end; parse, ICRC, checks and scatter
//! at the other; and its share of the ACKs, completions and posts. The further columns split the time: the same copies,
//! ICRCs and headers alone, and the rest.

use ferroce::driver::machine::Rounds;
use ferroce::wire::{Bth, FrameBuilder, NetworkHeader, Opcode, Packet, Reth, icrc};
use ferroce::{Error, Psn, Qpn, RKey};
use ferroce_benches::pair::{Pair, Setup, Writes};
use ferroce_benches::report::{CpuTime, Median, Options};
use ferroce_benches::ring::{self, FRAME};
use serde_json::json;

const ROUNDS: usize = 7;
const PACKETS: u64 = 400_000;

/// The same frames through `wire` alone: emit with copy and ICRC, parse with ICRC, copy.
fn wire_alone(length: usize, count: u64) -> f64 {
    let path = ferroce_benches::path();
    let (mut buffer, data, mut sink) = (vec![0u8; FRAME], vec![1u8; length], vec![0u8; length]);
    let start = CpuTime::start();
    for n in 0..count {
        let bth = Bth::new(Opcode::RC_WRITE_ONLY, Qpn::new(17), Psn::new(n as u32));
        let Some(mut frame) = FrameBuilder::start(&mut buffer, &path, bth, length) else { continue };
        frame.put(&Reth::new(0, RKey::new(1), length as u32));
        frame.payload().copy_from_slice(&data);
        let end = frame.finish();
        if let Ok(packet) = Packet::parse(std::hint::black_box(&buffer[..end])) {
            sink.copy_from_slice(packet.payload);
        }
    }
    std::hint::black_box(&sink);
    start.each(count)
}

/// The two ICRCs of such a frame alone: one to generate it, one to check it.
fn icrc_alone(length: usize, count: u64) -> f64 {
    let packet = vec![0x45u8; 20 + 8 + 12 + 16 + length];
    let start = CpuTime::start();
    for _ in 0..2 * count {
        std::hint::black_box(icrc::compute(NetworkHeader::Ipv4, std::hint::black_box(&packet)));
    }
    start.each(count)
}

/// The two copies of its payload alone: memory to frame, frame to memory.
fn copy_alone(length: usize, count: u64) -> f64 {
    let (from, mut to) = (vec![1u8; length], vec![0u8; length]);
    let start = CpuTime::start();
    for _ in 0..2 * count {
        std::hint::black_box(&mut to[..]).copy_from_slice(std::hint::black_box(&from));
    }
    start.each(count)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = Options::from_args();
    let (rounds, packets) = options.scale((1, 10_000), (ROUNDS, PACKETS));
    println!("engine, WRITE, both ends on one core; median of {rounds} runs of {packets} packets");
    println!("nanoseconds a packet, and where they go (each part measured alone, in the same run)");
    println!("   bytes    total  spread     copy     ICRC  headers     rest");
    let (mut results, mut state) = (Vec::new(), Rounds::new());
    for length in [64u32, 1024, 4096] {
        let mut pair = Pair::new(ring::ports(), &Setup::default())?;
        let mut writes = Writes { active: &[0], length, depth: 64, count: packets / 10 };
        pair.write(&writes)?;
        writes.count = packets;
        let runs = state.hold(rounds, |_| {
            let start = CpuTime::start();
            pair.write(&writes)?;
            let (total, length) = (start.each(packets), length as usize);
            Ok::<_, Error>([
                total,
                wire_alone(length, packets),
                icrc_alone(length, packets),
                copy_alone(length, packets),
            ])
        })?;
        let [total, wire, icrc, copy] = Median::of_each(&runs);
        let (spread, total) = (total.spread, total.value);
        let (copy, icrc) = (copy.value, icrc.value);
        let (headers, rest) = (wire.value - icrc - copy, total - wire.value);
        println!(
            "{length:>8} {total:>8.1} {:>6.0}% {copy:>8.1} {icrc:>8.1} {headers:>8.1} {rest:>8.1}",
            spread * 100.0
        );
        results.push(json!({
            "bytes": length, "ns": total, "spread": spread,
            "copy_ns": copy, "icrc_ns": icrc, "headers_ns": headers, "rest_ns": rest,
        }));
    }
    println!(
        "headers: writing and taking apart; rest: state machines, memory checks, ACKs, posts, completions"
    );
    Ok(options.save_with(&state, json!({ "bench": "engine", "rows": results }))?)
}
