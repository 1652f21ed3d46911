use std::sync::atomic::Ordering;
use std::time::Instant;

use super::*;
use crate::{Gathered, Icrc, Placed, Room, TAIL_MAX};

/// Longer than any operation here.
const LONG: Duration = Duration::from_secs(20);

fn name(of: &str) -> String {
    format!("test-{}-{of}", std::process::id())
}

fn open(of: &str) -> Shm {
    Shm::open(&ShmConfig::new(name(of))).unwrap()
}

/// An IPv4 packet to the first queue pair of a slot, with `payload` bytes after the BTH.
fn packet(source: [u8; 4], slot: usize, payload: usize) -> Vec<u8> {
    let mut packet = vec![0u8; 28 + 12 + payload];
    packet[0] = 0x45;
    packet[12..16].copy_from_slice(&source);
    packet[16..20].copy_from_slice(&[127, 0, 0, 1]);
    let (rest, divisor) = owner::qpns(slot);
    packet[28 + 4..28 + 8].copy_from_slice(&(rest + divisor).to_be_bytes());
    packet
}

const OWN: [u8; 4] = [127, 0, 0, 1];

/// Sends a frame, unless another ring blocks. Returns whether it was sent.
fn send(port: &mut Shm, frame: &[u8]) -> bool {
    let mut left = Some(frame);
    let mut source = |buffer: &mut [u8]| {
        let frame = left.take()?;
        buffer[..frame.len()].copy_from_slice(frame);
        Some(frame.len())
    };
    port.tx_burst(Nanos::ZERO, &mut source).unwrap();
    left.is_none()
}

/// The received frames, each with whether it has an ICRC.
fn take(port: &mut Shm) -> Vec<(Vec<u8>, bool)> {
    struct All(Vec<(Vec<u8>, bool)>);
    impl FrameSink for All {
        fn take(&mut self, frame: RxFrame<'_>) {
            self.0.push((frame.bytes().to_vec(), frame.icrc() == Icrc::Right));
        }
    }
    let mut all = All(Vec::new());
    port.rx_burst(Nanos::ZERO, &mut all).unwrap();
    all.0
}

fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !done() {
        assert!(Instant::now() < deadline, "it does not come");
        std::thread::yield_now();
    }
}

/// Makes one port set up a ring to another.
fn meet(from: &mut Shm, to: &mut Shm) {
    let frame = packet(OWN, to.slot.number(), 8);
    until(|| {
        send(from, &frame);
        take(to);
        take(from);
        from.stats().tx_by_memory > 0
    });
    until(|| {
        let was_fresh = to.links.has_fresh();
        take(to).is_empty() && !was_fresh
    });
}

/// How long a frame to `to` waits.
fn time_to(port: &mut Shm, to: usize) -> Duration {
    let (frame, start) = (packet(OWN, to, 8), Instant::now());
    until(|| send(port, &frame));
    start.elapsed()
}

#[test]
fn a_full_ring_delays_others_once() {
    let [mut a, mut stopped, mut c] = [(); 3].map(|()| open("held"));
    meet(&mut a, &mut stopped);
    meet(&mut a, &mut c);
    let fill = |a: &mut Shm| {
        let frame = packet(OWN, 1, 4000);
        let start = Instant::now();
        while a.stats().tx_dropped == 0 && start.elapsed() < Duration::from_secs(1) {
            send(a, &frame);
        }
    };
    let start = Instant::now();
    fill(&mut a);
    assert!(
        a.stats().tx_dropped > 0 && start.elapsed() >= Duration::from_millis(100),
        "held up, then dropped"
    );
    // From now on it blocks no other ring, even if it takes a frame now and then.
    let mut held = Duration::ZERO;
    for _ in 0..50 {
        stopped.links.incoming[0].ring.take(&mut [0; ring::FRAME_MAX]).unwrap();
        stopped.links.incoming[0].ring.tell();
        send(&mut a, &packet(OWN, 1, 4000));
        held += time_to(&mut a, 2);
    }
    assert!(held < Duration::from_millis(50), "others were held up for {held:?}");
    // It reads again, and receives all frames that are sent to it.
    until(|| take(&mut stopped).is_empty());
    let dropped = a.stats().tx_dropped;
    assert!(send(&mut a, &packet(OWN, 1, 100)));
    until(|| !take(&mut stopped).is_empty());
    assert_eq!(a.stats().tx_dropped, dropped);
}

#[test]
fn packets_with_a_foreign_source_are_refused() {
    let [mut a, mut b] = [(); 2].map(|()| open("source"));
    meet(&mut a, &mut b);
    assert!(send(&mut a, &packet([192, 0, 2, 1], 1, 8)));
    assert!(send(&mut a, &packet([127, 0, 0, 9], 1, 9)), "the whole of 127.0.0.0/8 is this host's");
    let mut all = Vec::new();
    until(|| {
        all.extend(take(&mut b));
        !all.is_empty()
    });
    assert_eq!((all.len(), all[0].0.len(), b.stats().rx_dropped), (1, 28 + 12 + 9, 1));
}

#[test]
fn a_corrupt_ring_is_closed_and_replaced() {
    let [mut a, mut b] = [(); 2].map(|()| open("corrupt"));
    meet(&mut a, &mut b);
    let outgoing = a.links.outgoing[0].as_ref().unwrap();
    outgoing.ring.memory().word(outgoing.ring.next_word()).store(u64::MAX, Ordering::Relaxed);
    until(|| {
        take(&mut b);
        take(&mut a);
        a.stats().bad_descriptors == 1 && b.stats().bad_descriptors == 1
    });
    let before = a.stats().tx_by_memory;
    let frame = packet(OWN, 1, 8);
    until(|| {
        send(&mut a, &frame);
        take(&mut b);
        take(&mut a);
        a.stats().tx_by_memory > before
    });
}

/// Frames of another process are not lost when a ring is closed, and a ring is not read too early.
#[test]
fn closing_a_ring_loses_no_frames_of_others() {
    let [mut a, mut b, mut c] = [(); 3].map(|()| open("closed"));
    meet(&mut a, &mut b);
    meet(&mut c, &mut b);
    let outgoing = a.links.outgoing[0].as_ref().unwrap();
    outgoing.ring.memory().word(outgoing.ring.next_word()).store(u64::MAX, Ordering::Relaxed);
    assert!((0..100).all(|n| send(&mut c, &packet(OWN, 1, n))));
    let mut lengths = Vec::new();
    until(|| {
        lengths.extend(take(&mut b).iter().map(|(frame, _)| frame.len() - 40));
        lengths.len() >= 100
    });
    assert_eq!((lengths, b.stats().bad_descriptors), ((0..100).collect(), 1));
}

#[test]
fn a_replaced_ring_is_no_longer_watched() {
    let [mut a, mut b] = [(); 2].map(|()| open("watches"));
    for _ in 0..5 {
        meet(&mut a, &mut b);
        a.links.close(&a.slot, 0);
        a.links.counts.tx_frames = 0;
    }
    assert_eq!((a.slot.group().watched(), b.slot.group().watched()), (0, 1));
}

/// Sends one frame whose payload is placed. Returns whether it was to have an ICRC.
fn place(port: &mut Shm, to: usize) -> Option<bool> {
    struct Placing {
        frame: Option<Vec<u8>>,
        icrc: Option<bool>,
    }
    impl FrameSource for Placing {
        fn write(&mut self, _: &mut [u8]) -> Option<usize> {
            None
        }

        fn place(
            &mut self,
            head: &mut [u8],
            _: &mut [u8; TAIL_MAX],
            room: &mut dyn Room,
        ) -> Option<Gathered> {
            const HEAD: usize = 40;
            let mut frame = self.frame.take()?;
            let qpn = owner::qpn_of(&frame[28..])?;
            let payload = &mut frame[HEAD..];
            let Placed { to, icrc } = room.place(&OWN, qpn, payload.len())?;
            to.copy_from((&*payload).into());
            self.icrc = Some(icrc);
            head[..HEAD].copy_from_slice(&frame[..HEAD]);
            Some(Gathered { head: HEAD, tail: 0 })
        }
    }
    let mut source = Placing { frame: Some(packet(OWN, to, 1000)), icrc: None };
    port.tx_burst(Nanos::ZERO, &mut source).unwrap();
    source.icrc
}

#[test]
fn the_icrc_is_omitted_if_both_ends_agree() {
    for (n, [first, second]) in
        [[true, true], [true, false], [false, true], [false, false]].into_iter().enumerate()
    {
        let of = format!("icrc-{n}");
        let [mut a, mut b] =
            [first, second].map(|icrc| Shm::open(&ShmConfig::new(name(&of)).icrc(icrc)).unwrap());
        meet(&mut a, &mut b);
        let icrc = first || second;
        assert_eq!(place(&mut a, 1), Some(icrc));
        let mut all = Vec::new();
        until(|| {
            all.extend(take(&mut b));
            !all.is_empty()
        });
        assert_eq!((all[0].0.len(), all[0].1), (1040, icrc));
    }
}

#[test]
fn a_port_that_sleeps_is_woken() {
    let [mut a, mut b] = [(); 2].map(|()| open("sleep"));
    meet(&mut a, &mut b);
    let sleeper = std::thread::spawn(move || {
        // The first wait ends immediately, because mail has arrived since the last one.
        let (start, mut waits, mut frames) = (Instant::now(), 0, 0);
        while frames == 0 {
            b.wait(LONG).unwrap();
            (waits, frames) = (waits + 1, take(&mut b).len());
        }
        (start.elapsed(), waits)
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(send(&mut a, &packet(OWN, 1, 8)));
    let (slept, waits) = sleeper.join().unwrap();
    assert!(slept < LONG / 2 && waits <= 3, "{waits} waits for {slept:?}");
}
