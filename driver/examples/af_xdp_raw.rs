//! What an AF_XDP port does without a protocol on it: the reference for the benches.
//!
//!     af_xdp_raw INTERFACE send PEER SIZE SECONDS     frames as fast as they go
//!     af_xdp_raw INTERFACE recv SECONDS               counts them
//!     af_xdp_raw INTERFACE ping PEER SIZE COUNT       round-trip times
//!     af_xdp_raw INTERFACE pong SECONDS               sends every frame back
//!
//! Start `recv` or `pong` in one network namespace (or host), then the other end.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::{Nanos, PacketDriver};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("af_xdp_raw: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Outcome<()> {
    let open = |interface: &str| -> Outcome<AfXdp> {
        let port = AfXdp::open(&AfXdpConfig::new(interface))?;
        println!("{interface}: {}", port.capabilities().description);
        Ok(port)
    };
    match *arguments {
        [interface, "send", peer, size, seconds] => {
            send(open(interface)?, peer.parse()?, size.parse()?, seconds.parse()?)
        }
        [interface, "recv", seconds] => receive(open(interface)?, seconds.parse()?),
        [interface, "ping", peer, size, count] => {
            ping(open(interface)?, peer.parse()?, size.parse()?, count.parse()?)
        }
        [interface, "pong", seconds] => pong(open(interface)?, seconds.parse()?),
        _ => Err(
            "usage: INTERFACE send PEER SIZE SECONDS | recv SECONDS | ping PEER SIZE COUNT | pong SECONDS"
                .into(),
        ),
    }
}

fn send(mut port: AfXdp, peer: IpAddr, size: usize, seconds: f64) -> Outcome<()> {
    let frame = frame(&mut port, peer, size)?;
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds {
        let mut burst = 0..64;
        port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            burst.next()?;
            buffer[..size].copy_from_slice(&frame);
            Some(size)
        })?;
    }
    report("sent", port.stats().tx_frames, port.stats().tx_bytes, start.elapsed());
    Ok(())
}

fn receive(mut port: AfXdp, seconds: f64) -> Outcome<()> {
    let opened = Instant::now();
    let (mut first, mut last) = (None, opened);
    while opened.elapsed().as_secs_f64() < seconds {
        if port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {})? > 0 {
            last = Instant::now();
            first.get_or_insert(last);
        }
    }
    let stats = port.stats();
    report("received", stats.rx_frames, stats.rx_bytes, last - first.unwrap_or(last));
    println!("lost before the receiver: {}", stats.rx_dropped);
    Ok(())
}

fn ping(mut port: AfXdp, peer: IpAddr, size: usize, count: usize) -> Outcome<()> {
    let frame = frame(&mut port, peer, size)?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        let mut once = Some(&frame);
        port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            buffer[..size].copy_from_slice(once.take()?);
            Some(size)
        })?;
        while port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {})? == 0 {
            if start.elapsed() > Duration::from_secs(5) {
                return Err("no answer for 5 s".into());
            }
        }
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let at = |share: f64| times[((count - 1) as f64 * share) as usize];
    println!("round trip of {size} B: p50 {:?}, p99 {:?}, p99.9 {:?}", at(0.5), at(0.99), at(0.999));
    Ok(())
}

fn pong(mut port: AfXdp, seconds: f64) -> Outcome<()> {
    let opened = Instant::now();
    let mut answer = Vec::with_capacity(port.capabilities().max_frame);
    while opened.elapsed().as_secs_f64() < seconds {
        port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            answer.clear();
            answer.extend_from_slice(&frame[6..12]);
            answer.extend_from_slice(&frame[..6]);
            answer.extend_from_slice(&frame[12..]);
        })?;
        port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            let len = answer.len();
            buffer[..len].copy_from_slice(&answer);
            answer.clear();
            (len > 0).then_some(len)
        })?;
    }
    Ok(())
}

/// A UDP packet to port 4791 of `size` bytes, Ethernet header included.
fn frame(port: &mut AfXdp, peer: IpAddr, size: usize) -> Outcome<Vec<u8>> {
    let max = port.capabilities().max_frame;
    if !(60..=max).contains(&size) {
        return Err(format!("SIZE = {size}: 60 to {max}").into());
    }
    let mut frame = port.resolve(peer)?.to_vec();
    frame.extend_from_slice(&port.capabilities().mac);
    frame.extend_from_slice(&[0x08, 0, 0x45, 0]);
    frame.extend_from_slice(&((size - 14) as u16).to_be_bytes());
    frame.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0xc0, 0]);
    frame.extend_from_slice(&4791u16.to_be_bytes());
    frame.extend_from_slice(&((size - 34) as u16).to_be_bytes());
    frame.resize(size, 0);
    Ok(frame)
}

fn report(what: &str, frames: u64, bytes: u64, time: Duration) {
    let seconds = time.as_secs_f64().max(1e-9);
    println!(
        "{what} {frames} frames in {seconds:.2} s: {:.3} Mpps, {:.2} Gb/s",
        frames as f64 / seconds / 1e6,
        bytes as f64 * 8.0 / seconds / 1e9
    );
}
