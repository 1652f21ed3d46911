//! What a port of DPDK does without a protocol on it: the reference for the benches.
//!
//!     dpdk_raw PORT ADDRESS/PREFIX send PEER SIZE SECONDS [gather] -- EAL ARGUMENTS
//!     dpdk_raw PORT ADDRESS/PREFIX recv SECONDS -- EAL ARGUMENTS
//!     dpdk_raw PORT ADDRESS/PREFIX ping PEER SIZE COUNT -- EAL ARGUMENTS
//!     dpdk_raw PORT ADDRESS/PREFIX pong SECONDS -- EAL ARGUMENTS
//!
//! `send` sends frames as fast as they go, with `gather` from memory outside DPDK's; `recv` counts
//! them and what is missing between them; `ping` and `pong` measure round trips. Start `recv` or `pong`
//! first. Two ends on one machine, joined by memif:
//!
//!     dpdk_raw net_memif0 10.0.0.1/24 recv 5 -- --no-huge -m 512 --no-shconf --no-pci \
//!         --vdev=net_memif0,role=server,socket=/run/x.sock,socket-abstract=no,bsize=8192
//!     dpdk_raw net_memif0 10.0.0.2/24 send 10.0.0.1 4154 4 -- --no-huge -m 512 --no-shconf --no-pci \
//!         --vdev=net_memif0,role=client,socket=/run/x.sock,socket-abstract=no,bsize=8192

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferroce_driver::dpdk::{Dpdk, DpdkConfig};
use ferroce_driver::{FrameSource, Gathered, Memory, Nanos, PacketDriver, Payload, TAIL_MAX};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dpdk_raw: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Outcome<()> {
    const USAGE: &str = "usage: PORT ADDRESS/PREFIX send PEER SIZE SECONDS [gather] | recv SECONDS | \
        ping PEER SIZE COUNT | pong SECONDS, then -- EAL ARGUMENTS";
    let end = arguments.iter().position(|a| a == "--").ok_or(USAGE)?;
    let ours: Vec<_> = arguments[..end].iter().map(String::as_str).collect();
    let [port, address, ref command @ ..] = ours[..] else { return Err(USAGE.into()) };
    let (ip, prefix) = address.split_once('/').ok_or(USAGE)?;
    let mut config = DpdkConfig::new(port, &[(ip.parse()?, prefix.parse()?)]);
    config.eal = arguments[end + 1..].to_vec();
    let open = || -> Outcome<Dpdk> {
        let port = Dpdk::open(&config)?;
        println!("{}", port.capabilities().description);
        Ok(port)
    };
    match *command {
        ["send", peer, size, seconds] => send(open()?, peer.parse()?, size.parse()?, seconds.parse()?, false),
        ["send", peer, size, seconds, "gather"] => {
            send(open()?, peer.parse()?, size.parse()?, seconds.parse()?, true)
        }
        ["recv", seconds] => receive(open()?, seconds.parse()?),
        ["ping", peer, size, count] => ping(open()?, peer.parse()?, size.parse()?, count.parse()?),
        ["pong", seconds] => pong(open()?, seconds.parse()?),
        _ => Err(USAGE.into()),
    }
}

/// Frames with a number each, and how many of them are still to be sent in this burst.
struct Source<'a> {
    frame: &'a [u8],
    payload: Option<&'a Memory>,
    next: u32,
    left: u32,
}

impl Source<'_> {
    fn number(&mut self, header: &mut [u8]) -> Option<()> {
        self.left = self.left.checked_sub(1)?;
        header[NUMBER..NUMBER + 4].copy_from_slice(&self.next.to_be_bytes());
        self.next = self.next.wrapping_add(1);
        Some(())
    }
}

impl FrameSource for Source<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        buffer[..self.frame.len()].copy_from_slice(self.frame);
        self.number(buffer)?;
        Some(self.frame.len())
    }

    fn gather(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX]) -> Option<Gathered> {
        if self.payload.is_none() {
            return Some(Gathered { head: self.write(head)?, tail: 0 });
        }
        head[..HEADER].copy_from_slice(&self.frame[..HEADER]);
        self.number(head)?;
        tail[..4].copy_from_slice(&[0; 4]);
        Some(Gathered { head: HEADER, tail: 4 })
    }

    fn payload(&self) -> Option<Payload<'_>> {
        self.payload?.payload(0, self.frame.len() - HEADER - 4)
    }
}

fn send(mut port: Dpdk, peer: IpAddr, size: usize, seconds: f64, gather: bool) -> Outcome<()> {
    let frame = frame(&mut port, peer, size)?;
    let payload = Memory::zeroed(size)?;
    let mut source = Source { frame: &frame, payload: gather.then_some(&payload), next: 0, left: 0 };
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds {
        source.left = 64;
        port.tx_burst(Nanos::ZERO, &mut source)?;
    }
    report("sent", port.stats().tx_frames, port.stats().tx_bytes, start.elapsed());
    Ok(())
}

fn receive(mut port: Dpdk, seconds: f64) -> Outcome<()> {
    let opened = Instant::now();
    let (mut first, mut last) = (None, opened);
    let (mut expected, mut missing) = (0, 0);
    while opened.elapsed().as_secs_f64() < seconds {
        let received = port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            if let Some(number) = frame.get(NUMBER..).and_then(|rest| rest.first_chunk()) {
                let number = u32::from_be_bytes(*number);
                missing += u64::from(number.wrapping_sub(expected));
                expected = number.wrapping_add(1);
            }
        })?;
        if received > 0 {
            last = Instant::now();
            first.get_or_insert(last);
        }
    }
    let stats = port.stats();
    report("received", stats.rx_frames, stats.rx_bytes, last - first.unwrap_or(last));
    println!("missing: {missing}; lost before the receiver: {}", stats.rx_dropped);
    Ok(())
}

fn ping(mut port: Dpdk, peer: IpAddr, size: usize, count: usize) -> Outcome<()> {
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

fn pong(mut port: Dpdk, seconds: f64) -> Outcome<()> {
    let opened = Instant::now();
    let mut answer = Vec::with_capacity(port.capabilities().max_frame);
    while opened.elapsed().as_secs_f64() < seconds {
        port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            answer.clear();
            answer.extend_from_slice(&frame[6..12]);
            answer.extend_from_slice(&frame[..6]);
            answer.extend_from_slice(&frame[12..]);
        })?;
        if !answer.is_empty() {
            port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                let len = answer.len();
                buffer[..len].copy_from_slice(&answer);
                answer.clear();
                (len > 0).then_some(len)
            })?;
        }
    }
    Ok(())
}

/// What is in front of the payload of a gathered frame: all headers of RoCEv2 over IPv4.
const HEADER: usize = 54;
/// How long a peer has to answer ARP.
const RESOLVE_TIME: Duration = Duration::from_secs(5);
/// Where a frame's number is.
const NUMBER: usize = 42;

/// A UDP packet to port 4791 of `size` bytes, Ethernet header included.
fn frame(port: &mut Dpdk, peer: IpAddr, size: usize) -> Outcome<Vec<u8>> {
    let max = port.capabilities().max_frame;
    if !(60..=max).contains(&size) {
        return Err(format!("SIZE = {size}: 60 to {max}").into());
    }
    let mut frame = port.resolve_blocking(peer, RESOLVE_TIME)?.to_vec();
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
