//! The port alone: frames both ways at once, as fast as both ends can, without a protocol.

use std::ops::Range;
use std::str::FromStr;
use std::time::{Duration, Instant};

use ferroce::wire::{Bth, FrameBuilder, Gid, MacAddr, Opcode, PathAddress, PathHeader, Psn, Qpn};
use ferroce::{Clock, DeviceSpec};
use ferroce_benches::path_address;
use ferroce_benches::veth::Veth;

use crate::Outcome;

/// Bytes of elements of a frame, as those of ferroce on this veth.
const PAYLOAD: usize = 4096;
/// Frames under way to the other end: rings hold as many.
const WINDOW: u64 = 512;
const BURST: u64 = 64;
/// Behind IPv4, UDP and a BTH: how many frames the sender has taken.
const TAKEN: Range<usize> = 54..62;
/// How long is measured.
const TIME: Duration = Duration::from_millis(1500);
/// Before that, for both ends to be at it, and behind it, for the other one.
const WARM_UP: Duration = Duration::from_millis(200);
/// The other end has taken nothing for so long: what is under way is lost, or it was not there.
const SILENCE: Duration = Duration::from_millis(50);
/// How long the other end may take to be there.
const PATIENCE: Duration = Duration::from_secs(10);

/// What an end is told on its command line.
#[derive(Clone, Debug)]
pub(crate) struct End {
    device: String,
    /// 0 or 1.
    end: usize,
    /// The other's address.
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

/// One end of two. Prints how many bytes of payload have come in a second.
///
/// # Errors
/// Those of the port, and that nothing has come.
pub(crate) fn run(End { device, end, peer }: &End) -> Outcome<()> {
    let driver = device.parse::<DeviceSpec>()?.open()?.into_driver();
    let mut driver = driver.map_err(|_| "an RNIC is no packet driver")?;
    let headers = headers(*end, MacAddr(driver.capabilities().mac), *peer)?;
    let (mut clock, start) = (Clock::start(), Instant::now());
    // Frames that this end has sent and taken, that the other has taken, and that were lost.
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
            // Both ends take and send.
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
        // The other end, which may have begun later, still measures.
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

/// Those of a WRITE to the other end.
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
