//! The port alone: frames in both directions at once, as fast as both ends can, without a protocol.

use std::ops::Range;
use std::str::FromStr;
use std::time::{Duration, Instant};

use ferroce::wire::{Bth, FrameBuilder, Gid, MacAddr, Opcode, PathAddress, PathHeader, Psn, Qpn};
use ferroce::{Clock, DeviceSpec};
use ferroce_benches::path_address;
use ferroce_benches::veth::Veth;

use crate::Outcome;

/// Bytes of elements in a frame, as ferroce has on this veth.
const PAYLOAD: usize = 4096;
/// The most frames in flight to the other end: the capacity of the rings.
const WINDOW: u64 = 512;
const BURST: u64 = 64;
/// After IPv4, UDP and a BTH: the number of frames that the sender has received.
const TAKEN: Range<usize> = 54..62;
/// The measured time.
const TIME: Duration = Duration::from_millis(1500);
/// The time before it, until both ends run, and after it, for the other end.
const WARM_UP: Duration = Duration::from_millis(200);
/// If the other end has received nothing for this long, the frames in flight were lost, or it was not ready.
const SILENCE: Duration = Duration::from_millis(50);
/// The longest wait for the other end.
const PATIENCE: Duration = Duration::from_secs(10);

/// The end's command line argument.
#[derive(Clone, Debug)]
pub(crate) struct End {
    device: String,
    /// 0 or 1.
    end: usize,
    /// The MAC address of the other end.
    peer: MacAddr,
}

impl FromStr for End {
    type Err = String;

    /// `DEVICE,END,MAC`
    fn from_str(text: &str) -> Result<End, String> {
        let words: Vec<&str> = text.split(',').collect();
        let [device, end, mac] = words[..] else { return Err("must be DEVICE,END,MAC".to_owned()) };
        let end = end.parse().ok().filter(|end| *end < 2).ok_or("END must be 0 or 1")?;
        let bytes: Vec<u8> = mac.split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
        let mac = bytes.try_into().map_err(|_| "MAC must be six bytes with ':' between them")?;
        Ok(End { device: device.to_owned(), end, peer: MacAddr(mac) })
    }
}

/// Runs one end of two. Prints the received payload in bytes per second.
///
/// # Errors
/// The port fails, or nothing has arrived.
pub(crate) fn run(End { device, end, peer }: &End) -> Outcome<()> {
    let driver = device.parse::<DeviceSpec>()?.open()?.into_driver();
    let mut driver = driver.map_err(|_| "an RNIC is no packet driver")?;
    let headers = headers(*end, MacAddr(driver.capabilities().mac), *peer)?;
    let (mut clock, start) = (Clock::start(), Instant::now());
    // Frames that this end has sent and received, that the other end has received, and that were lost.
    let (mut sent, mut taken, mut heard, mut lost) = (0_u64, 0_u64, 0_u64, 0_u64);
    let (mut first, mut began, mut rate, mut last) = (None, None, None, Instant::now());
    loop {
        let before = heard;
        driver.rx_burst(clock.now(), &mut |frame: &[u8]| {
            let Some(count) = frame.get(TAKEN).and_then(|bytes| bytes.try_into().ok()) else { return };
            heard = heard.max(u64::from_be_bytes(count));
            taken += 1;
        })?;
        let now = Instant::now();
        if heard > before {
            last = now;
            // Both ends receive and send.
            first.get_or_insert(now);
        } else if now - last > SILENCE {
            (lost, last) = (sent - heard, now);
            if first.is_none() && now - start > PATIENCE {
                return Err("nothing has come of the other end".into());
            }
        }
        let phase = first.map_or(Duration::ZERO, |first| now - first);
        if phase > WARM_UP && began.is_none() {
            began = Some((now, taken));
        }
        if let (Some((at, before)), None) = (began, rate)
            && now - at >= TIME
        {
            rate = Some((taken - before) as f64 * PAYLOAD as f64 / (now - at).as_secs_f64());
        }
        // The other end may have begun later, and still measures.
        if let Some(rate) = rate.filter(|_| phase > WARM_UP + TIME + WARM_UP) {
            println!("{rate}");
            return Ok(());
        }
        let under_way = sent.saturating_sub(heard + lost);
        let mut burst = 0..BURST.min(WINDOW.saturating_sub(under_way));
        driver.tx_burst(clock.now(), &mut |buffer: &mut [u8]| {
            burst.next()?;
            buffer[..headers.len()].copy_from_slice(&headers);
            buffer[TAKEN].copy_from_slice(&taken.to_be_bytes());
            sent += 1;
            Some(headers.len() + PAYLOAD + 4)
        })?;
    }
}

/// The headers of a WRITE to the other end.
fn headers(end: usize, own: MacAddr, peer: MacAddr) -> Outcome<Vec<u8>> {
    let path = PathHeader::new(&PathAddress {
        source_mac: own,
        destination_mac: peer,
        source: Gid::from_ipv4(Veth::address(end)),
        destination: Gid::from_ipv4(Veth::address(1 - end)),
        ..path_address()
    });
    let mut frame = vec![0; 2 * PAYLOAD];
    let bth = Bth::new(Opcode::RC_WRITE_MIDDLE, Qpn::new(2), Psn::new(0));
    FrameBuilder::start(&mut frame, &path, bth, PAYLOAD).ok_or("no room for a frame")?.finish();
    frame.truncate(TAKEN.start);
    Ok(frame)
}
