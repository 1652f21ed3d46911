//! The driver without a protocol: the performance of a port that only transfers frames.

use std::net::IpAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use ferroce::driver::shared::Producer;
use ferroce::driver::{Capabilities, Crc32, Layer};
use ferroce::{Clock, Memory, PacketDriver};
use hdrhistogram::Histogram;

use crate::case::{Case, RoundTrip, Seen};
use crate::end::{Outcome, Stage, Watch};
use crate::memory::{fill, verify};
use crate::ring::Handover;

/// Frames offered to the port at once, the size of its bursts.
const BURST: u64 = 64;
/// The length of a frame includes the Ethernet header, even if the driver has none.
const ETHERNET: usize = 14;
/// IPv4, UDP and as many bytes as a BTH.
const HEADERS: usize = 20 + 8 + 12;
/// The overhead of a RoCE frame.
pub(crate) const OVERHEAD: usize = ETHERNET + HEADERS + 4;
/// The number of a frame, in place of a PSN.
const NUMBER: Range<usize> = HEADERS - 8..HEADERS;
/// The part of the headers that the CRC covers: the rest is the same in each frame, and so is its part of a CRC.
const COVERED: Range<usize> = HEADERS - 12..HEADERS;
/// The receiver reports received frames in this many parts of a window.
const TOKENS: u64 = 8;
/// Without a frame for this long, no more are expected.
const SILENCE: Duration = Duration::from_millis(50);

/// A port, and the headers of frames to the other end.
struct Port {
    driver: Box<dyn PacketDriver>,
    clock: Clock,
    /// Starting with Ethernet.
    headers: [u8; ETHERNET + HEADERS],
    /// Bytes before the IP header in the driver's frames.
    link: usize,
    /// The most frames that are not known to be received: the capacity of rings and socket buffers.
    window: u64,
    /// The name under which the ring for tokens is passed.
    shared: String,
}

pub(crate) fn run(stage: &mut Stage<'_>) -> Outcome<String> {
    let driver = stage.open_device()?;
    let capabilities = driver.capabilities().clone();
    let is_ethernet = matches!(capabilities.layer, Layer::Ethernet);
    let (link, window) = if is_ethernet { (ETHERNET, 2048) } else { (0, 128) };
    let peer_mac: [u8; 6] = stage.peer.exchange(&capabilities.mac)?;
    let headers = headers(peer_mac, &capabilities, stage.job.addresses)?;
    let shared = stage.job.shared.clone();
    let mut port = Port { driver, clock: Clock::start(), headers, link, window, shared };
    for (n, case) in stage.job.cases.iter().enumerate() {
        stage.record(|stage| {
            match *case {
                Case::RawRate { frame } => port.rate(stage, frame),
                Case::RawChecked { payload } => port.checked(stage, payload, n as u64),
                _ if stage.starts() => port.ping(stage, case.payload()),
                _ => port.pong(stage, case.payload()),
            }
            .map_err(|error| format!("{case}: {error}").into())
        })?;
    }
    // No port is closed while the other end polls: closing a memif removes its memory.
    stage.peer.meet()?;
    Ok(capabilities.description)
}

impl Port {
    fn rate(&mut self, stage: &mut Stage<'_>, frame: usize) -> Outcome<Seen> {
        if stage.starts() { self.send(stage, frame, |_, _| ()) } else { self.receive(stage, |_| true) }
    }

    /// Payload is copied from memory to frames and from frames to memory, with a CRC each time.
    fn checked(&mut self, stage: &mut Stage<'_>, payload: usize, seed: u64) -> Outcome<Seen> {
        let (crc, slots) = (Crc32::detect(), Stage::footprint(payload) / payload);
        let mut memory = Memory::zeroed(slots * payload)?;
        let memory = memory.bytes_mut()?;
        let place = |number: u64| {
            let slot = number as usize % slots;
            slot * payload..(slot + 1) * payload
        };
        let body = HEADERS..HEADERS + payload;
        let trailer = body.end..body.end + 4;
        if stage.starts() {
            fill(memory, seed);
            return self.send(stage, payload + OVERHEAD, |number, frame| {
                let register = crc.update(!0, &frame[COVERED]);
                let register = crc.copy(register, &memory[place(number)], &mut frame[body.clone()]);
                frame[trailer.clone()].copy_from_slice(&register.to_le_bytes());
            });
        }
        let (mut frames, mut bad) = (0, 0u64);
        let seen = self.receive(stage, |frame| {
            let (Some(payload), Some(sum)) = (frame.get(body.clone()), frame.get(trailer.clone())) else {
                return false;
            };
            let number = u64::from_be_bytes(frame[NUMBER].try_into().unwrap_or_default());
            let register = crc.update(!0, &frame[COVERED]);
            let register = crc.copy(register, payload, &mut memory[place(number)]);
            bad += u64::from(sum != register.to_le_bytes());
            frames += 1;
            true
        })?;
        if bad > 0 {
            return Err(format!("{bad} frames of {frames} with a wrong CRC").into());
        }
        if seen.lost == 0 {
            let length = memory.len().min(frames * payload);
            verify(memory, seed, 0..length)?;
        }
        Ok(seen)
    }

    /// Sends as many frames as the port accepts and the receiver has room for; `write` writes each after its headers.
    /// The receiver reports received frames through shared memory: nothing is lost, without overhead on the link.
    fn send(
        &mut self,
        stage: &mut Stage<'_>,
        length: usize,
        mut write: impl FnMut(u64, &mut [u8]),
    ) -> Outcome<Seen> {
        let Port { driver, clock, headers, link, window, shared } = self;
        let token = *window / TOKENS;
        let headers = set_lengths(headers, length, *link);
        let (link, length) = (*link, length - (ETHERNET - *link));
        stage.peer.meet()?;
        let mut tokens = Handover::take(shared)?;
        stage.peer.meet()?;
        let (mut sent, mut room) = (0u64, *window);
        let (start, time) = (Instant::now(), stage.warm_up() + stage.time());
        while start.elapsed() < time {
            room += token * tokens.pop(usize::MAX, |_| ())? as u64;
            let mut burst = 0..room.min(BURST);
            let before = sent;
            driver.tx_burst(clock.now(), &mut |buffer: &mut [u8]| {
                burst.next()?;
                let frame = &mut buffer[..length];
                frame[..headers.len()].copy_from_slice(headers);
                let packet = &mut frame[link..];
                packet[NUMBER].copy_from_slice(&sent.to_be_bytes());
                write(sent, packet);
                sent += 1;
                Some(length)
            })?;
            room -= sent - before;
        }
        stage.peer.tell(&sent)?;
        let watch = Watch::new();
        while stage.peer.heard::<()>()?.is_none() {
            // Flushes frames that the port still holds.
            driver.tx_burst(clock.now(), &mut |_: &mut [u8]| None)?;
            watch.check()?;
        }
        Ok(Seen { handled: sent, ..Seen::default() })
    }

    /// Counts frames until all that were sent have arrived, or no more arrive.
    fn receive(&mut self, stage: &mut Stage<'_>, mut take: impl FnMut(&[u8]) -> bool) -> Outcome<Seen> {
        let Port { driver, clock, shared, link, window, .. } = self;
        let token = *window / TOKENS;
        let mut tokens = Producer::create(64, 1)?;
        let handover = Handover::at(shared)?;
        stage.peer.meet()?;
        handover.give(&tokens)?;
        stage.peer.meet()?;
        let (mut got, mut given, mut sent) = (0u64, 0, None);
        let mut watch = Watch::new();
        let mut meter = Meter::new(stage.warm_up());
        loop {
            let came = driver.rx_burst(clock.now(), &mut |frame: &[u8]| {
                got += u64::from(frame.get(*link..).is_some_and(&mut take));
            })?;
            if came > 0 {
                meter.count(got);
                given += token * tokens.push(((got - given) / token) as usize, |_| ())? as u64;
            } else if watch.due() {
                sent = match sent {
                    None => stage.peer.heard()?,
                    sent => sent,
                };
                if sent.is_some_and(|sent| got >= sent || meter.silent_for(SILENCE)) {
                    break;
                }
                watch.check()?;
            }
        }
        stage.peer.tell(&())?;
        let (messages, nanos) = meter.result();
        let lost = sent.unwrap_or_default().saturating_sub(got);
        Ok(Seen { messages, nanos, handled: got, lost, ..Seen::default() })
    }

    fn ping(&mut self, stage: &mut Stage<'_>, length: usize) -> Outcome<Seen> {
        let mut times = Histogram::<u64>::new(3)?;
        let (start, warm_up) = (Instant::now(), stage.warm_up());
        let (mut count, mut elapsed) = (0, Duration::ZERO);
        while elapsed < warm_up + stage.time() || times.len() < RoundTrip::LEAST {
            let sent = Instant::now();
            self.send_one(length)?;
            while self.look()? == 0 {
                if sent.elapsed() > Duration::from_secs(2) {
                    return Err("no answer for 2 s".into());
                }
            }
            let took = sent.elapsed();
            elapsed = start.elapsed();
            count += 1;
            if elapsed > warm_up {
                times.record(took.as_nanos() as u64)?;
            }
        }
        stage.peer.tell(&())?;
        Ok(Seen { handled: count, round_trip: Some(RoundTrip::of(&times)), ..Seen::default() })
    }

    fn pong(&mut self, stage: &mut Stage<'_>, length: usize) -> Outcome<Seen> {
        let (mut watch, mut count) = (Watch::new(), 0);
        loop {
            for _ in 0..self.look()? {
                self.send_one(length)?;
                count += 1;
            }
            if watch.due() {
                if stage.peer.heard::<()>()?.is_some() {
                    return Ok(Seen { handled: count, ..Seen::default() });
                }
                watch.check()?;
            }
        }
    }

    /// The number of received frames. Frames that the port had no room for are sent first, as in ferroce's poll.
    fn look(&mut self) -> Outcome<usize> {
        let Port { driver, clock, .. } = self;
        driver.tx_burst(clock.now(), &mut |_: &mut [u8]| None)?;
        Ok(driver.rx_burst(clock.now(), &mut |_: &[u8]| ())?)
    }

    fn send_one(&mut self, length: usize) -> Outcome<()> {
        let Port { driver, clock, headers, link, .. } = self;
        let headers = set_lengths(headers, length, *link);
        let length = length - (ETHERNET - *link);
        let mut left = true;
        while left {
            driver.tx_burst(clock.now(), &mut |buffer: &mut [u8]| {
                std::mem::take(&mut left).then(|| {
                    buffer[..headers.len()].copy_from_slice(headers);
                    length
                })
            })?;
        }
        Ok(())
    }
}

/// Counts events between the end of the warm-up and the last event.
pub(crate) struct Meter {
    warm_up: Duration,
    first: Option<Instant>,
    from: Option<(Instant, u64)>,
    to: Option<(Instant, u64)>,
}

impl Meter {
    pub(crate) fn new(warm_up: Duration) -> Meter {
        Meter { warm_up, first: None, from: None, to: None }
    }

    /// `so_far` events have occurred.
    pub(crate) fn count(&mut self, so_far: u64) {
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        if self.from.is_none() && now - first >= self.warm_up {
            self.from = Some((now, so_far));
        }
        self.to = Some((now, so_far));
    }

    pub(crate) fn silent_for(&self, time: Duration) -> bool {
        self.to.is_none_or(|(at, _)| at.elapsed() > time)
    }

    /// The number since the end of the warm-up.
    pub(crate) fn counted(&self) -> u64 {
        self.result().0
    }

    /// The number and its time in nanoseconds.
    pub(crate) fn result(&self) -> (u64, u64) {
        match (self.from, self.to) {
            (Some((from, before)), Some((to, after))) => (after - before, (to - from).as_nanos() as u64),
            _ => (0, 0),
        }
    }
}

/// The headers of a UDP packet to RoCE's port.
fn headers(to: [u8; 6], from: &Capabilities, addresses: [IpAddr; 2]) -> Outcome<[u8; ETHERNET + HEADERS]> {
    let [IpAddr::V4(source), IpAddr::V4(destination)] = addresses else {
        return Err("the raw frames are IPv4".into());
    };
    let mut headers = [0; ETHERNET + HEADERS];
    headers[..6].copy_from_slice(&to);
    headers[6..12].copy_from_slice(&from.mac);
    headers[12..16].copy_from_slice(&[0x08, 0, 0x45, 0]);
    headers[20] = 0x40;
    headers[22..24].copy_from_slice(&[64, 17]);
    headers[26..30].copy_from_slice(&source.octets());
    headers[30..34].copy_from_slice(&destination.octets());
    headers[34..36].copy_from_slice(&0xc000u16.to_be_bytes());
    headers[36..38].copy_from_slice(&4791u16.to_be_bytes());
    Ok(headers)
}

/// The headers of a frame of `length` bytes, for a driver with `link` bytes before IP.
fn set_lengths(headers: &mut [u8; ETHERNET + HEADERS], length: usize, link: usize) -> &[u8] {
    headers[16..18].copy_from_slice(&((length - 14) as u16).to_be_bytes());
    headers[38..40].copy_from_slice(&((length - 34) as u16).to_be_bytes());
    &headers[ETHERNET - link..]
}
