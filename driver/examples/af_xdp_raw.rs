//! What an AF_XDP port does without a protocol on it: the reference for the benches.
//!
//!     af_xdp_raw INTERFACE send PEER SIZE SECONDS [OPTION...]   frames as fast as they go
//!     af_xdp_raw INTERFACE recv SECONDS [OPTION...]             counts them, and those that were lost
//!     af_xdp_raw INTERFACE both PEER SIZE SECONDS [OPTION...]   sends and receives at once
//!     af_xdp_raw INTERFACE ping PEER SIZE COUNT [OPTION...]     round-trip times
//!     af_xdp_raw INTERFACE pong SECONDS [OPTION...]             sends every frame back
//!
//! | option | |
//! |---|---|
//! | `check` | both ends copy the payload between frame and memory, and make or check its CRC-32 |
//! | `block` | waits in the kernel for frames instead of spinning |
//! | `queue=N` | one queue; all by default |
//!
//! Start `recv` or `pong` in one network namespace (or host), then the other end; of `both` one on
//! each side, with the same options.

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
    match *arguments {
        [interface, "send", peer, size, seconds, ref options @ ..] => {
            let (mut port, options) = open(interface, options)?;
            let mut sender = Sender::new(&mut port, peer.parse()?, size.parse()?, options)?;
            let time = Duration::from_secs_f64(seconds.parse()?);
            let start = Instant::now();
            while start.elapsed() < time {
                sender.burst(&mut port)?;
            }
            sent(&port, start.elapsed());
            Ok(())
        }
        [interface, "recv", seconds, ref options @ ..] => {
            let (mut port, options) = open(interface, options)?;
            let mut receiver = Receiver::new(options);
            let time = Duration::from_secs_f64(seconds.parse()?);
            let start = Instant::now();
            while start.elapsed() < time {
                receiver.burst(&mut port)?;
            }
            receiver.report(&port)
        }
        [interface, "both", peer, size, seconds, ref options @ ..] => {
            let (mut port, options) = open(interface, options)?;
            let mut sender = Sender::new(&mut port, peer.parse()?, size.parse()?, options)?;
            let mut receiver = Receiver::new(Options { block: false, ..options });
            let time = Duration::from_secs_f64(seconds.parse()?);
            // What comes early is the peer's, which is up then.
            while receiver.burst(&mut port)? == 0 {
                sender.frames(&mut port, 1)?;
            }
            let start = Instant::now();
            while start.elapsed() < time {
                sender.burst(&mut port)?;
                while receiver.burst(&mut port)? > 0 {}
            }
            sent(&port, start.elapsed());
            receiver.report(&port)
        }
        [interface, "ping", peer, size, count, ref options @ ..] => {
            let (mut port, options) = open(interface, options)?;
            let sender = Sender::new(&mut port, peer.parse()?, size.parse()?, options)?;
            ping(port, sender, count.parse()?, options)
        }
        [interface, "pong", seconds, ref options @ ..] => {
            let (port, options) = open(interface, options)?;
            pong(port, seconds.parse()?, options)
        }
        _ => Err("usage: INTERFACE send PEER SIZE SECONDS | recv SECONDS | both PEER SIZE SECONDS | \
                  ping PEER SIZE COUNT | pong SECONDS, then any of: check block queue=N"
            .into()),
    }
}

#[derive(Clone, Copy, Default)]
struct Options {
    check: bool,
    block: bool,
}

fn open(interface: &str, words: &[&str]) -> Outcome<(AfXdp, Options)> {
    let mut config = AfXdpConfig::new(interface).sharing(false);
    let mut options = Options::default();
    for word in words {
        match word.split_once('=') {
            None if *word == "check" => options.check = true,
            None if *word == "block" => options.block = true,
            Some(("queue", queue)) => config.queue = Some(queue.parse()?),
            _ => return Err(format!("'{word}': check, block or queue=N").into()),
        }
    }
    let port = AfXdp::open(&config)?;
    println!("{interface}: {}", port.capabilities().description);
    Ok((port, options))
}

/// Frames that the sender offers at once: what a protocol's window may give.
const BURST: u64 = 64;
/// How long a peer has to answer ARP.
const RESOLVE_TIME: Duration = Duration::from_secs(5);
/// Ethernet, IPv4 and UDP.
const HEADERS: usize = 42;
/// Where the frame's number ends.
const NUMBERED: usize = HEADERS + 8;
const CRC: usize = 4;
/// The memory from which payload is copied, and to which: that of some messages under way.
const MEMORY: usize = 256 << 10;

/// Makes numbered frames.
struct Sender {
    headers: Vec<u8>,
    size: usize,
    next: u64,
    memory: Option<Memory>,
}

impl Sender {
    fn new(port: &mut AfXdp, peer: IpAddr, size: usize, options: Options) -> Outcome<Sender> {
        let max = port.capabilities().max_frame;
        if !(60..=max).contains(&size) {
            return Err(format!("SIZE = {size}: 60 to {max}").into());
        }
        let mut headers = port.resolve_blocking(peer, RESOLVE_TIME)?.to_vec();
        headers.extend_from_slice(&port.capabilities().mac);
        headers.extend_from_slice(&[0x08, 0, 0x45, 0]);
        headers.extend_from_slice(&((size - 14) as u16).to_be_bytes());
        headers.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0xc0, 0]);
        headers.extend_from_slice(&4791u16.to_be_bytes());
        headers.extend_from_slice(&((size - 34) as u16).to_be_bytes());
        headers.extend_from_slice(&[0, 0]);
        Ok(Sender { headers, size, next: 0, memory: options.check.then(Memory::new) })
    }

    fn burst(&mut self, port: &mut AfXdp) -> Outcome<usize> {
        self.frames(port, BURST)
    }

    fn frames(&mut self, port: &mut AfXdp, count: u64) -> Outcome<usize> {
        let end = self.next + count;
        Ok(port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            (self.next < end).then(|| self.write(&mut buffer[..self.size]))
        })?)
    }

    fn write(&mut self, frame: &mut [u8]) -> usize {
        frame[..HEADERS].copy_from_slice(&self.headers);
        frame[HEADERS..NUMBERED].copy_from_slice(&self.next.to_be_bytes());
        self.next += 1;
        if let Some(memory) = &mut self.memory {
            let (checked, crc) = frame[HEADERS..].split_at_mut(self.size - HEADERS - CRC);
            let (number, payload) = checked.split_at_mut(8);
            payload.copy_from_slice(memory.next(payload.len()));
            crc.copy_from_slice(&Memory::crc(number, payload).to_be_bytes());
        }
        self.size
    }
}

/// Counts frames, and what is wrong with them.
struct Receiver {
    memory: Option<Memory>,
    block: bool,
    expected: Option<u64>,
    lost: u64,
    corrupt: u64,
    first: Option<Instant>,
    last: Instant,
}

impl Receiver {
    fn new(options: Options) -> Receiver {
        Receiver {
            memory: options.check.then(Memory::new),
            block: options.block,
            expected: None,
            lost: 0,
            corrupt: 0,
            first: None,
            last: Instant::now(),
        }
    }

    fn burst(&mut self, port: &mut AfXdp) -> Outcome<usize> {
        let received = port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| self.take(frame))?;
        if received > 0 {
            self.last = Instant::now();
            self.first.get_or_insert(self.last);
        } else if self.block {
            port.wait(Duration::from_millis(1))?;
        }
        Ok(received)
    }

    fn take(&mut self, frame: &[u8]) {
        let Some(number) = frame.get(HEADERS..NUMBERED) else { return };
        let number = u64::from_be_bytes(number.try_into().expect("eight bytes"));
        // Frames of one queue come in order.
        self.lost += number.saturating_sub(*self.expected.get_or_insert(number));
        self.expected = Some(number + 1);
        if let Some(memory) = &mut self.memory {
            let (checked, crc) = frame[HEADERS..].split_at(frame.len() - HEADERS - CRC);
            let (number, payload) = checked.split_at(8);
            memory.next(payload.len()).copy_from_slice(payload);
            self.corrupt += u64::from(crc != Memory::crc(number, payload).to_be_bytes());
        }
    }

    fn report(&self, port: &AfXdp) -> Outcome<()> {
        let stats = port.stats();
        let time = self.last - self.first.unwrap_or(self.last);
        print_rate("received", stats.rx_frames, stats.rx_bytes, time);
        println!("lost {}, corrupt {}, without a buffer {}", self.lost, self.corrupt, stats.rx_dropped);
        Ok(())
    }
}

/// Stands for an application's registered memory.
struct Memory {
    bytes: Vec<u8>,
    at: usize,
}

impl Memory {
    fn new() -> Memory {
        Memory { bytes: (0..MEMORY).map(|i| (i * 7 + i / 251) as u8).collect(), at: 0 }
    }

    fn next(&mut self, len: usize) -> &mut [u8] {
        if self.at + len > MEMORY {
            self.at = 0;
        }
        self.at += len;
        &mut self.bytes[self.at - len..self.at]
    }

    fn crc(number: &[u8], payload: &[u8]) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        crc.update(number);
        crc.update(payload);
        crc.finalize()
    }
}

fn ping(mut port: AfXdp, mut sender: Sender, count: usize, options: Options) -> Outcome<()> {
    let mut receiver = Receiver::new(options);
    let mut times = Vec::with_capacity(count);
    let opened = Instant::now();
    while times.len() < count {
        let start = Instant::now();
        sender.frames(&mut port, 1)?;
        // Until the other end is up, what is sent is lost.
        let patience = Duration::from_millis(if times.is_empty() { 10 } else { 5000 });
        while receiver.expected != Some(sender.next) && start.elapsed() < patience {
            receiver.burst(&mut port)?;
        }
        if receiver.expected == Some(sender.next) {
            times.push(start.elapsed());
        } else if opened.elapsed() > Duration::from_secs(5) {
            return Err("no answer for 5 s".into());
        }
    }
    times.sort_unstable();
    let at = |share: f64| times[((count - 1) as f64 * share) as usize];
    println!(
        "round trip of {} B: p50 {:?}, p99 {:?}, p99.9 {:?}; corrupt {}",
        sender.size,
        at(0.5),
        at(0.99),
        at(0.999),
        receiver.corrupt
    );
    Ok(())
}

fn pong(mut port: AfXdp, seconds: f64, options: Options) -> Outcome<()> {
    let mut receiver = Receiver::new(options);
    let opened = Instant::now();
    let mut answer = Vec::with_capacity(port.capabilities().max_frame);
    while opened.elapsed().as_secs_f64() < seconds {
        let received = port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            receiver.take(frame);
            answer.clear();
            answer.extend_from_slice(&frame[6..12]);
            answer.extend_from_slice(&frame[..6]);
            answer.extend_from_slice(&frame[12..]);
        })?;
        if received == 0 {
            if options.block {
                port.wait(Duration::from_millis(1))?;
            }
            continue;
        }
        port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            let len = answer.len();
            buffer[..len].copy_from_slice(&answer);
            answer.clear();
            (len > 0).then_some(len)
        })?;
    }
    Ok(())
}

fn sent(port: &AfXdp, time: Duration) {
    print_rate("sent", port.stats().tx_frames, port.stats().tx_bytes, time);
}

fn print_rate(what: &str, frames: u64, bytes: u64, time: Duration) {
    let seconds = time.as_secs_f64().max(1e-9);
    println!(
        "{what} {frames} frames in {seconds:.2} s: {:.3} Mpps, {:.2} Gb/s",
        frames as f64 / seconds / 1e6,
        bytes as f64 * 8.0 / seconds / 1e9
    );
}
