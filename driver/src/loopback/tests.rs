use std::net::Ipv4Addr;
use std::thread;
use std::time::Instant;

use super::*;

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

/// A frame of `len` bytes to `to` that carries `number`.
fn write(buffer: &mut [u8], to: [u8; 6], len: usize, number: u32) -> usize {
    buffer[..len].fill(number as u8);
    buffer[..6].copy_from_slice(&to);
    buffer[14..18].copy_from_slice(&number.to_be_bytes());
    len
}

fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[14..18].try_into().unwrap())
}

/// Sends the frames `numbers` to `to` in one burst.
fn send(port: &mut Loopback, to: [u8; 6], numbers: std::ops::Range<u32>) -> usize {
    let mut numbers = numbers;
    port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| numbers.next().map(|n| write(buffer, to, 60, n)))
        .unwrap()
}

fn receive(port: &mut Loopback) -> Vec<u32> {
    let mut got = Vec::new();
    while port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| got.push(number(frame))).unwrap() > 0 {}
    got
}

#[test]
fn frames_arrive_in_order_and_unchanged() {
    let (mut a, mut b) = pair(&[ip(1)], &[ip(2)]);
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    assert_eq!(to, b.capabilities().mac);
    let lengths = [14, 60, 64, 1500, a.capabilities().max_frame];
    let mut next = lengths.iter();
    let fill = |len: usize| (0..len).map(|i| (i * 7 + len) as u8).collect::<Vec<u8>>();
    let sent = a.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
        let len = *next.next()?;
        buffer[..len].copy_from_slice(&fill(len));
        buffer[..6].copy_from_slice(&to);
        Some(len)
    });
    assert_eq!(sent.unwrap(), lengths.len());
    let mut seen = 0;
    b.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
        assert_eq!(frame.len(), lengths[seen]);
        assert_eq!(frame[..6], to);
        assert_eq!(frame[6..], fill(frame.len())[6..]);
        seen += 1;
    })
    .unwrap();
    assert_eq!(seen, lengths.len());
    let bytes = lengths.iter().sum::<usize>() as u64;
    assert_eq!(a.stats(), Stats { tx_frames: 5, tx_bytes: bytes, ..Stats::default() });
    assert_eq!(b.stats(), Stats { rx_frames: 5, rx_bytes: bytes, ..Stats::default() });
}

#[test]
fn a_switch_forwards_by_address_and_floods_the_rest() {
    let switch = Switch::new(SwitchConfig::default()).unwrap();
    let mut ports: Vec<Loopback> = (1..=4).map(|n| switch.port(&[ip(n)])).collect();
    let macs: Vec<[u8; 6]> = ports.iter().map(|port| port.capabilities().mac).collect();
    assert_eq!(ports[2].capabilities().interface, "loopback2");

    let mut targets =
        [macs[1], macs[1], macs[3], macs[0], [0xff; 6], [0x33, 0x33, 0, 0, 0, 1], [2, 9, 9, 9, 9, 9]]
            .into_iter()
            .enumerate();
    let sent = ports[0].tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
        targets.next().map(|(n, to)| write(buffer, to, 60, n as u32))
    });
    assert_eq!(sent.unwrap(), 7);
    let got: Vec<Vec<u32>> = ports.iter_mut().map(receive).collect();
    assert_eq!(got, [vec![3], vec![0, 1, 4, 5, 6], vec![4, 5, 6], vec![2, 4, 5, 6]]);
}

#[test]
fn a_port_plugged_in_later_is_reached() {
    let switch = Switch::new(SwitchConfig::default()).unwrap();
    let mut a = switch.port(&[ip(1)]);
    assert_eq!(send(&mut a, [0xff; 6], 0..1), 1);
    let mut b = switch.port(&[ip(2)]);
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    send(&mut a, to, 1..2);
    assert_eq!(receive(&mut b), [1]);
}

#[test]
fn a_full_queue_drops_the_newest_and_counts_them_at_the_receiver() {
    let switch = Switch::new(SwitchConfig { mtu: 1500, depth: 100 }).unwrap();
    let (mut a, mut b) = (switch.port(&[ip(1)]), switch.port(&[ip(2)]));
    let to = b.capabilities().mac;
    assert_eq!(send(&mut a, to, 0..80), 80);
    assert_eq!(send(&mut a, to, 80..120), 40);
    assert_eq!(b.stats().rx_dropped, 20);
    assert_eq!(receive(&mut b), (0..100).collect::<Vec<u32>>());
    // No buffer was lost: the same number of frames fits again.
    for _ in 0..3 {
        send(&mut a, to, 0..100);
        assert_eq!(receive(&mut b).len(), 100);
    }
    assert_eq!(b.stats().rx_dropped, 20);
    // A call asks for no more frames than the depth.
    assert_eq!(send(&mut a, to, 0..200), 100);
}

#[test]
fn a_closed_port_is_not_resolved_and_receives_nothing() {
    let (mut a, b) = pair(&[ip(1)], &[ip(2)]);
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    drop(b);
    let error = a.resolve(ip(2)).unwrap_err();
    assert_eq!(error.to_string(), "no route to 10.0.0.2 from 'loopback0'");
    assert_eq!(send(&mut a, to, 0..10), 10);
}

#[test]
fn a_length_outside_the_limits_is_not_sent() {
    let (mut a, mut b) = pair(&[ip(1)], &[ip(2)]);
    let to = b.capabilities().mac;
    let limit = a.capabilities().max_frame;
    let mut lengths = [13, limit + 1, usize::MAX, 60].into_iter();
    let sent = a.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
        write(buffer, to, 60, 0);
        lengths.next()
    });
    assert_eq!(sent.unwrap(), 1);
    assert_eq!(a.stats().tx_dropped, 3);
    assert_eq!(receive(&mut b).len(), 1);
}

#[test]
fn invalid_sizes_are_refused() {
    let refused = |mtu, depth| Switch::new(SwitchConfig { mtu, depth }).unwrap_err().to_string();
    assert!(refused(67, 1).starts_with("mtu = 67:"));
    assert!(refused(65536, 1).starts_with("mtu = 65536:"));
    assert!(refused(1500, 0).starts_with("depth = 0:"));
    assert_eq!(refused(1500, usize::MAX), format!("depth = {}: 1 to 65536 frames", usize::MAX));
}

#[test]
fn wait_ends_at_the_timeout_or_when_a_frame_arrives() {
    let (mut a, mut b) = pair(&[ip(1)], &[ip(2)]);
    let to = b.capabilities().mac;
    let start = Instant::now();
    b.wait(Duration::from_millis(20)).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(20));

    let start = Instant::now();
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        send(&mut a, to, 0..1);
        a
    });
    b.wait(Duration::from_secs(30)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
    assert_eq!(receive(&mut b), [0]);
    let mut a = sender.join().unwrap();
    // A frame that has already arrived keeps it from sleeping.
    send(&mut a, to, 1..2);
    let start = Instant::now();
    b.wait(Duration::from_secs(30)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_waker_ends_the_current_or_next_wait() {
    let (mut a, _b) = pair(&[ip(1)], &[ip(2)]);
    let waker = a.waker().unwrap();
    let start = Instant::now();
    waker.wake_by_ref();
    waker.wake_by_ref();
    a.wait(Duration::from_secs(30)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
    let start = Instant::now();
    a.wait(Duration::from_millis(20)).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(20), "one wake-up ends one wait");
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        waker.wake();
    });
    let start = Instant::now();
    a.wait(Duration::from_secs(30)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(20));
    other.join().unwrap();
}

/// Echoes across two threads that poll, then block, with a window that can't overflow the queue.
#[test]
fn two_threads_lose_nothing_within_the_depth() {
    const FRAMES: u32 = 200_000;
    let (mut a, mut b) = pair(&[ip(1)], &[ip(2)]);
    let to_a = b.resolve(ip(1)).unwrap().found().unwrap();
    let to_b = a.resolve(ip(2)).unwrap().found().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let echo = thread::spawn(move || {
        let mut owed = VecDeque::new();
        let mut echoed = 0;
        while echoed < FRAMES && Instant::now() < deadline {
            if b.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| owed.push_back(number(frame))).unwrap() == 0 {
                b.wait(Duration::from_millis(100)).unwrap();
            }
            b.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                echoed += u32::from(!owed.is_empty());
                owed.pop_front().map(|n| write(buffer, to_a, 60, n))
            })
            .unwrap();
        }
        (echoed, b.stats())
    });
    let (mut sent, mut got) = (0, 0);
    while got < FRAMES && Instant::now() < deadline {
        a.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            (sent < FRAMES && sent - got < 1000).then(|| {
                sent += 1;
                write(buffer, to_b, 60, sent - 1)
            })
        })
        .unwrap();
        let burst = a.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            assert_eq!(number(frame), got);
            got += 1;
        });
        if burst.unwrap() == 0 {
            a.wait(Duration::from_millis(100)).unwrap();
        }
    }
    let (echoed, far) = echo.join().unwrap();
    assert_eq!((sent, echoed, got), (FRAMES, FRAMES, FRAMES));
    assert_eq!(far.rx_dropped + a.stats().rx_dropped, 0);
}

#[test]
fn resolve_blocking_accepts_an_unlimited_timeout() {
    let (mut a, b) = pair(&[ip(1)], &[ip(2)]);
    assert_eq!(a.resolve_blocking(ip(2), Duration::MAX).unwrap(), b.capabilities().mac);
}
