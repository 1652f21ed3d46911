//! A ring of slots in memory that both processes share: the upper bound.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use ferroce::Memory;
use ferroce::driver::Crc32;
use ferroce::driver::shared::{Consumer, FullSlot, Producer, VacantSlot};
use hdrhistogram::Histogram;

use crate::case::{Case, RoundTrip, Seen};
use crate::end::{Outcome, Stage, Watch};
use crate::memory::{fill, verify};
use crate::raw::Meter;

/// Bytes of a ring.
const RING: usize = 2 << 20;
/// Slots moved at once.
const BURST: usize = 32;

pub(crate) fn run(stage: &mut Stage<'_>) -> Outcome<String> {
    for (n, case) in stage.job.cases.iter().enumerate() {
        let path = format!("{}-{n}", stage.job.shared);
        let Case::Ring { slot, crc } = *case else {
            stage.record(|stage| round_trips(stage, &path))?;
            continue;
        };
        // Enough slots that they have left the writer's caches when the reader comes to them: lines are faster to fetch
        // from the shared cache.
        let slots = RING / slot.clamp(64, RING / 256);
        let length = if crc { slot + 4 } else { slot };
        let seed = n as u64;
        if stage.starts() {
            let mut producer = Producer::create(slots, length)?;
            let handover = Handover::at(&path)?;
            stage.record(|stage| {
                handover.give(&producer)?;
                produce(stage, &mut producer, slot, crc, seed)
            })?;
        } else {
            stage.record(|stage| consume(stage, &path, slot, crc, seed))?;
        }
    }
    Ok("shared memory, no wire".to_owned())
}

/// A socket through which an end passes the memory of a ring. It exists before the ends meet.
pub(crate) struct Handover<'a> {
    listener: UnixListener,
    path: &'a str,
}

impl Handover<'_> {
    pub(crate) fn at(path: &str) -> Outcome<Handover<'_>> {
        Ok(Handover { listener: UnixListener::bind(path)?, path })
    }

    pub(crate) fn give(&self, producer: &Producer) -> Outcome<()> {
        Ok(producer.send(&self.listener.accept()?.0)?)
    }

    /// The other end's ring.
    pub(crate) fn take(path: &str) -> Outcome<Consumer> {
        Ok(Consumer::receive(&UnixStream::connect(path)?)?)
    }
}

impl Drop for Handover<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path);
    }
}

/// A slot in one direction and one back.
fn round_trips(stage: &mut Stage<'_>, path: &str) -> Outcome<Seen> {
    let role = stage.job.role;
    let mut out = Producer::create(2, 64)?;
    let [own, other] = [role, 1 - role].map(|role| format!("{path}-{role}"));
    let handover = Handover::at(&own)?;
    stage.peer.meet()?;
    let connected = UnixStream::connect(&other)?;
    handover.give(&out)?;
    let mut back = Consumer::receive(&connected)?;
    stage.peer.meet()?;
    let mut times = Histogram::<u64>::new(3)?;
    let (mut count, mut watch, start, mut bytes) = (0, Watch::new(), Instant::now(), [0; 64]);
    loop {
        let sent = Instant::now();
        if stage.starts() {
            if start.elapsed() > stage.time() {
                break;
            }
            out.push(1, |mut slot| slot.write(0, &[1; 64]))?;
        }
        while back.pop(1, |slot| slot.read(0, &mut bytes))? == 0 {
            if watch.due() {
                if !stage.starts() && stage.peer.heard::<()>()?.is_some() {
                    return Ok(Seen { handled: count, ..Seen::default() });
                }
                watch.check()?;
            }
        }
        count += 1;
        if stage.starts() {
            times.record(sent.elapsed().as_nanos() as u64)?;
        } else {
            out.push(1, |mut slot| slot.write(0, &[1; 64]))?;
        }
    }
    stage.peer.tell(&())?;
    Ok(Seen { handled: count, round_trip: Some(RoundTrip::of(&times)), ..Seen::default() })
}

fn produce(stage: &mut Stage<'_>, ring: &mut Producer, size: usize, check: bool, seed: u64) -> Outcome<Seen> {
    let (crc, messages) = (Crc32::detect(), Stage::footprint(size) / size);
    let mut memory = Memory::zeroed(messages * size)?;
    let memory = memory.bytes_mut()?;
    fill(memory, seed);
    stage.peer.meet()?;
    let (start, time) = (Instant::now(), stage.warm_up() + stage.time());
    let (mut sent, mut turns, mut next) = (0u64, 0u32, 0);
    while turns % 64 != 0 || start.elapsed() < time {
        turns = turns.wrapping_add(1);
        if ring.free(BURST)? < BURST {
            continue;
        }
        let push = |mut slot: VacantSlot<'_>| {
            let from = &memory[next * size..(next + 1) * size];
            slot.write(0, from);
            if check {
                slot.write(size, &crc.update(!0, from).to_le_bytes());
            }
            next = if next + 1 == messages { 0 } else { next + 1 };
        };
        sent += ring.push(BURST, push)? as u64;
    }
    stage.peer.tell(&sent)?;
    stage.peer.hear::<()>()?;
    Ok(Seen { handled: sent, ..Seen::default() })
}

fn consume(stage: &mut Stage<'_>, path: &str, size: usize, check: bool, seed: u64) -> Outcome<Seen> {
    let (crc, messages) = (Crc32::detect(), Stage::footprint(size) / size);
    let mut memory = Memory::zeroed(messages * size)?;
    let memory = memory.bytes_mut()?;
    let mut ring = Handover::take(path)?;
    stage.peer.meet()?;
    let (mut got, mut bad, mut next, mut sent) = (0u64, 0u64, 0, None);
    let mut meter = Meter::new(stage.warm_up());
    let (mut watch, mut bursts) = (Watch::new(), 0u32);
    loop {
        let whole = ring.full(BURST)? >= BURST;
        let pop = |slot: FullSlot<'_>| {
            let to = &mut memory[next * size..(next + 1) * size];
            slot.read(0, to);
            if check {
                let mut sum = [0; 4];
                slot.read(size, &mut sum);
                bad += u64::from(sum != crc.update(!0, &*to).to_le_bytes());
            }
            next = if next + 1 == messages { 0 } else { next + 1 };
        };
        let came = ring.pop(if whole { BURST } else { 0 }, pop)?;
        got += came as u64;
        if came > 0 {
            // Reading the clock for each burst would affect the measurement.
            bursts += 1;
            if bursts % 16 == 0 {
                meter.count(got);
            }
        } else if watch.due() {
            sent = match sent {
                None => stage.peer.heard()?,
                sent => sent,
            };
            if sent.is_some_and(|sent: u64| got >= sent) {
                break;
            }
            watch.check()?;
        }
    }
    stage.peer.tell(&())?;
    if bad > 0 {
        return Err(format!("{bad} slots of {got} with a wrong CRC").into());
    }
    verify(memory, seed, 0..memory.len().min(got as usize * size))?;
    let (messages, nanos) = meter.result();
    Ok(Seen { messages, nanos, handled: got, ..Seen::default() })
}
