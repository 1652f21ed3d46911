//! An end of a ring that writes anything anywhere, for tests and the fuzzer.

use std::sync::atomic::Ordering;

use super::ring::{Corrupt, FRAME_MAX, FrameConsumer, FrameProducer};
use crate::sealed::SealedMemory;

/// Executes `script` on a ring whose memory a third party can write too: frames are sent and received, and words of the
/// memory are overwritten, mostly those with a meaning. In all cases a received frame must be valid, and a consumer
/// that has read something invalid must not read on.
///
/// # Panics
/// If this is violated.
pub fn play(script: &[u8]) {
    let (mut producer, file) = FrameProducer::create(0).expect("memory to share");
    let stranger = SealedMemory::open(&file, 0..=usize::MAX).expect("the same memory");
    let mut consumer = FrameConsumer::open(&file).expect("a ring");
    let (mut frame, mut ends) = (Box::new([0; FRAME_MAX]), [Ok(()), Ok(())]);
    for step in script.chunks(12) {
        let [what, kind, number @ ..] = step else { continue };
        let number = number.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        match what % 4 {
            0 if ends[0] == Ok(()) => ends[0] = send(&mut producer, *kind, number),
            1 if ends[1] == Ok(()) => {
                consumer.prefetch();
                ends[1] = consumer.take(&mut frame).map(|taken| {
                    assert!(taken.is_none_or(|len| (1..=FRAME_MAX).contains(&len)), "{taken:?}");
                });
                consumer.tell();
            }
            2 => {
                let (rest, wakes) = (consumer.rest(), producer.wakes());
                let _ = (rest, wakes, consumer.is_ready());
                consumer.rise();
            }
            _ => {
                let meant = match kind % 4 {
                    0 => consumer.next_word(),
                    1 => FrameProducer::CONSUMED,
                    2 => producer.next_word(),
                    _ => (number as usize % stranger.len()) & !7,
                };
                // Small changes of existing values reach more states than random numbers.
                let before = stranger.word(meant).load(Ordering::Relaxed);
                let value = if kind & 0x80 == 0 { number } else { before ^ 1 << (number % 64) };
                stranger.word(meant).store(value, Ordering::Relaxed);
            }
        }
    }
}

fn send(producer: &mut FrameProducer, kind: u8, number: u64) -> Result<(), Corrupt> {
    if !producer.has_room()? {
        producer.flush();
        return Ok(());
    }
    let bytes = [kind; FRAME_MAX];
    let payload = number as usize % 9000;
    if kind & 1 == 0 && payload > 0 {
        if let Some(to) = producer.place(payload) {
            to.copy_from(bytes[..payload].into());
        }
        producer.publish(&bytes[..1 + usize::from(kind) % 150], payload, &bytes[..number as usize % 9]);
    } else {
        producer.publish(&bytes[..1 + payload], 0, &[]);
    }
    if kind & 6 == 0 {
        producer.flush();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ferroce_driver_test_support::random::Random;

    use super::*;

    #[test]
    fn received_frames_are_valid_after_any_writes() {
        let mut random = Random::from_env("FERROCE_SHM_SEED");
        for _ in 0..300 {
            let mut script = vec![0; 12 * 400];
            random.fill(&mut script);
            play(&script);
        }
    }

    /// Another thread writes all the time while frames are sent and received.
    #[test]
    fn a_third_party_writes_during_transfers() {
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut random = Random::from_env("FERROCE_SHM_SEED");
        let (mut taken, mut corrupt) = (0u64, 0u64);
        for _ in 0..100 {
            let (mut producer, file) = FrameProducer::create(0).unwrap();
            let stranger = SealedMemory::open(&file, 0..=usize::MAX).unwrap();
            let mut consumer = FrameConsumer::open(&file).unwrap();
            stop.store(false, Ordering::Relaxed);
            std::thread::scope(|scope| {
                let mut numbers = Random::new(random.any());
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let at = numbers.below(stranger.len() as u64) as usize & !7;
                        stranger.word(at).store(numbers.any(), Ordering::Relaxed);
                    }
                });
                let mut frame = Box::new([0; FRAME_MAX]);
                for number in 0..20_000 {
                    if send(&mut producer, random.any() as u8, random.any()).is_err() {
                        corrupt += 1;
                        break;
                    }
                    match consumer.take(&mut frame) {
                        Ok(Some(len)) => {
                            assert!((1..=FRAME_MAX).contains(&len), "frame {number}");
                            taken += 1;
                        }
                        Ok(None) => consumer.tell(),
                        Err(Corrupt) => {
                            corrupt += 1;
                            break;
                        }
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
        println!("{taken} frames taken, {corrupt} rings ended");
        assert!(taken > 0 && corrupt > 0, "{taken} frames taken, {corrupt} rings ended");
    }
}
