use std::net::{Ipv4Addr, Ipv6Addr};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn pair(seed: u64, link: LinkConfig) -> (SimNetwork, SimPort, SimPort) {
    let network = SimNetwork::new(seed, link).unwrap();
    let (a, b) = (network.port(&[ip(1)]), network.port(&[ip(2)]));
    (network, a, b)
}

fn write(buffer: &mut [u8], to: [u8; 6], len: usize, number: u32) -> usize {
    buffer[..len].fill(0xa5);
    buffer[..6].copy_from_slice(&to);
    buffer[14..18].copy_from_slice(&number.to_be_bytes());
    len
}

fn send(port: &mut SimPort, now: Nanos, to: [u8; 6], numbers: std::ops::Range<u32>) -> usize {
    let mut numbers = numbers;
    port.tx_burst(now, &mut |buffer: &mut [u8]| numbers.next().map(|n| write(buffer, to, 60, n))).unwrap()
}

fn receive(port: &mut SimPort, now: Nanos) -> Vec<u32> {
    let mut got = Vec::new();
    let mut sink = |frame: &[u8]| got.push(u32::from_be_bytes(frame[14..18].try_into().unwrap()));
    while port.rx_burst(now, &mut sink).unwrap() > 0 {}
    got
}

/// Sends `count` frames, one per microsecond, and returns the numbers of those that arrive with their times.
fn run(network: &SimNetwork, a: &mut SimPort, b: &mut SimPort, count: u32) -> Vec<(Nanos, u32)> {
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    let mut got = Vec::new();
    for n in 0..count {
        let now = Nanos(u64::from(n) * 1000);
        assert_eq!(send(a, now, to, n..n + 1), 1);
        got.extend(receive(b, now).into_iter().map(|n| (now, n)));
    }
    got.extend(drain(network, b));
    got
}

/// Jumps from arrival to arrival until no frame is in flight.
fn drain(network: &SimNetwork, port: &mut SimPort) -> Vec<(Nanos, u32)> {
    let mut got = Vec::new();
    while let Some(now) = network.next_arrival() {
        let burst = receive(port, now);
        assert!(!burst.is_empty(), "next_arrival said {now:?}, and nothing came");
        got.extend(burst.into_iter().map(|n| (now, n)));
    }
    got
}

fn numbers(got: &[(Nanos, u32)]) -> Vec<u32> {
    got.iter().map(|(_, n)| *n).collect()
}

#[test]
fn an_ideal_link_delivers_at_once_and_in_order() {
    let (network, mut a, mut b) = pair(1, LinkConfig::default());
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    assert_eq!(to, b.capabilities().mac);
    assert_eq!(send(&mut a, Nanos(5), to, 0..200), 200);
    assert_eq!(network.next_arrival(), Some(Nanos(5)));
    assert_eq!(receive(&mut b, Nanos(4)), []);
    assert_eq!(receive(&mut b, Nanos(5)), (0..200).collect::<Vec<u32>>());
    assert_eq!(network.next_arrival(), None);
    assert_eq!(network.counters(), Counters { offered: 200, ..Counters::default() });
    assert_eq!(a.stats(), Stats { tx_frames: 200, tx_bytes: 12_000, ..Stats::default() });
    assert_eq!(b.stats(), Stats { rx_frames: 200, rx_bytes: 12_000, ..Stats::default() });
    assert_eq!(a.resolve(ip(9)).unwrap_err().to_string(), "no route to 10.0.0.9 from 'sim0'");
}

#[test]
fn frames_are_forwarded_by_address_and_floods_skip_the_sender_and_closed_ports() {
    let network = SimNetwork::new(1, LinkConfig::default()).unwrap();
    let mut ports: Vec<SimPort> = (1..=4).map(|n| network.port(&[ip(n)])).collect();
    let gone = ports.pop().unwrap();
    let gone_mac = gone.capabilities().mac;
    let to = [ports[1].capabilities().mac, ports[0].capabilities().mac, [0xff; 6], gone_mac];
    for (n, to) in to.into_iter().enumerate() {
        send(&mut ports[0], Nanos(1), to, n as u32..n as u32 + 1);
    }
    drop(gone);
    send(&mut ports[0], Nanos(1), gone_mac, 4..5);
    let got: Vec<Vec<u32>> = ports.iter_mut().map(|port| receive(port, Nanos(1))).collect();
    assert_eq!(got, [vec![1], vec![0, 2], vec![2]]);
    assert_eq!(network.next_arrival(), None);
    assert!(ports[0].resolve(ip(4)).is_err());
}

#[test]
fn impairment_rates_match_their_probabilities() {
    let link =
        LinkConfig { loss: 0.01, duplicate: 0.02, corrupt: 0.03, reorder: 0.04, ..LinkConfig::default() };
    let (network, mut a, mut b) = pair(42, link);
    const FRAMES: u32 = 100_000;
    let got = run(&network, &mut a, &mut b, FRAMES);
    let c = network.counters();
    assert_eq!(c.offered, u64::from(FRAMES));
    assert_eq!(got.len() as u64, c.offered - c.lost + c.duplicated);
    // Five standard deviations, sqrt(n p (1-p)), around n p.
    for (count, p) in [(c.lost, 0.01), (c.duplicated, 0.02), (c.corrupted, 0.03), (c.reordered, 0.04)] {
        let (mean, deviation) = (f64::from(FRAMES) * p, (f64::from(FRAMES) * p * (1.0 - p)).sqrt());
        assert!((count as f64 - mean).abs() < 5.0 * deviation, "{count} of {FRAMES} at {p}");
    }
}

#[test]
fn corruption_flips_one_bit() {
    let (network, mut a, mut b) = pair(3, LinkConfig { corrupt: 1.0, ..LinkConfig::default() });
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    let mut bits = std::collections::BTreeSet::new();
    for _ in 0..500 {
        let mut original = [0; 60];
        a.tx_burst(Nanos(1), &mut |buffer: &mut [u8]| {
            let fresh = original[0] == 0;
            fresh.then(|| {
                let len = write(buffer, to, 60, 7);
                original.copy_from_slice(&buffer[..len]);
                len
            })
        })
        .unwrap();
        let count = b.rx_burst(Nanos(1), &mut |frame: &[u8]| {
            let flipped: Vec<usize> =
                (0..480).filter(|bit| (frame[bit / 8] ^ original[bit / 8]) >> (bit % 8) & 1 == 1).collect();
            assert_eq!(flipped.len(), 1);
            bits.extend(flipped);
        });
        assert_eq!(count.unwrap(), 1);
    }
    assert_eq!(network.counters().corrupted, 500);
    // 500 draws out of 480 bits hit about 480 (1 - 1/e) = 311 different ones.
    assert!((270..350).contains(&bits.len()), "{}", bits.len());
    assert!(bits.first() < Some(&16) && bits.last() > Some(&464), "{bits:?}");
}

#[test]
fn reordered_frames_are_overtaken_by_at_most_the_configured_number() {
    for reorder_by in [1, 3, 64] {
        let link = LinkConfig {
            reorder: 0.2,
            reorder_by,
            reorder_hold: SECOND,
            delay: Duration::from_micros(7),
            jitter: Duration::from_micros(5),
            ..LinkConfig::default()
        };
        let (network, mut a, mut b) = pair(7, link);
        let got = numbers(&run(&network, &mut a, &mut b, 20_000));
        assert_eq!(got.len(), 20_000);
        let mut deepest = 0;
        for (at, n) in got.iter().enumerate() {
            let from = at.saturating_sub(2 * 64 + 1);
            deepest = deepest.max(got[from..at].iter().filter(|earlier| *earlier > n).count());
        }
        assert_eq!(deepest, reorder_by);
    }
}

#[test]
fn a_reordered_frame_that_nothing_overtakes_arrives_when_its_hold_ends() {
    let hold = Duration::from_micros(50);
    let link = LinkConfig {
        reorder: 1.0,
        reorder_hold: hold,
        delay: Duration::from_micros(2),
        ..LinkConfig::default()
    };
    let (network, mut a, mut b) = pair(7, link);
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    send(&mut a, Nanos(1000), to, 0..1);
    assert_eq!(network.next_arrival(), Some(Nanos(53_000)));
    assert_eq!(receive(&mut b, Nanos(52_999)), []);
    assert_eq!(receive(&mut b, Nanos(53_000)), [0]);
}

#[test]
fn jitter_spreads_arrivals_within_its_bounds_and_keeps_the_order() {
    let (delay, jitter) = (Duration::from_micros(10), Duration::from_micros(3));
    let (network, mut a, mut b) = pair(9, LinkConfig { delay, jitter, ..LinkConfig::default() });
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    let (mut earliest, mut latest) = (SECOND, Duration::ZERO);
    for n in 0..2000 {
        let now = Nanos(u64::from(n) * 100_000);
        send(&mut a, now, to, n..n + 1);
        let took = network.next_arrival().unwrap().since(now);
        earliest = earliest.min(took);
        latest = latest.max(took);
        assert_eq!(numbers(&drain(&network, &mut b)), [n]);
    }
    assert!(earliest >= delay && earliest < delay + jitter / 50, "{earliest:?}");
    assert!(latest <= delay + jitter && latest > delay + jitter * 49 / 50, "{latest:?}");
    // Sent closer together than the jitter, they still arrive in order.
    send(&mut a, Nanos(1_000_000_000), to, 0..100);
    assert_eq!(numbers(&drain(&network, &mut b)), (0..100).collect::<Vec<u32>>());
}

#[test]
fn a_rate_gives_exact_times_without_drift() {
    // 60 + 24 bytes at 100 Gb/s: 6.72 ns.
    let rate = Some(100_000_000_000);
    let (network, mut a, mut b) = pair(1, LinkConfig { rate, ..LinkConfig::default() });
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    send(&mut a, Nanos(1000), to, 0..1000);
    let got = drain(&network, &mut b);
    for (at, n) in &got {
        assert_eq!(at.0, 1000 + ((u64::from(*n) + 1) * 672).div_ceil(100));
    }
    assert_eq!(got.len(), 1000);
    // An idle link starts again without delay, and the other direction is a separate link.
    send(&mut a, Nanos(10_000), to, 0..1);
    assert_eq!(network.next_arrival(), Some(Nanos(10_007)));
    send(&mut b, Nanos(10_000), port_mac(0), 1..2);
    assert_eq!(receive(&mut a, Nanos(10_007)), [1]);
}

#[test]
fn frames_beyond_the_queue_limit_are_dropped() {
    let link = LinkConfig { rate: Some(1_000_000_000), queue_limit: Some(10 * 84), ..LinkConfig::default() };
    let (network, mut a, mut b) = pair(1, link);
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    send(&mut a, Nanos(0), to, 0..15);
    assert_eq!(network.counters().queue_dropped, 5);
    // 84 bytes take 672 ns; by then there is room for just one more.
    send(&mut a, Nanos(671), to, 15..16);
    send(&mut a, Nanos(672), to, 16..18);
    assert_eq!(network.counters().queue_dropped, 7);
    assert_eq!(numbers(&drain(&network, &mut b)), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16]);
}

/// An IPv4 packet in a frame, with ECN bits and a correct header checksum, computed as a plain sum.
fn ipv4_frame(ecn: u8, vlan: bool) -> Vec<u8> {
    let mut frame = port_mac(1).to_vec();
    frame.extend(port_mac(0));
    if vlan {
        frame.extend([0x81, 0x00, 0x60, 0x05]);
    }
    frame.extend([0x08, 0x00]);
    let mut header =
        vec![0x45, 0x68 | ecn, 0, 40, 0x12, 0x34, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    let checksum = !ones_sum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    frame.extend(header);
    frame.extend([0; 20]);
    frame
}

fn ipv6_frame(ecn: u8, vlan: bool) -> Vec<u8> {
    let mut frame = ipv4_frame(0, vlan);
    let at = frame.len() - 40;
    frame[at - 2..at].copy_from_slice(&[0x86, 0xdd]);
    let address = Ipv6Addr::LOCALHOST.octets();
    frame.truncate(at);
    frame.extend([0x66, (ecn << 4) | 0x8a, 0xbc, 0xde, 0, 0, 17, 64]);
    frame.extend(address);
    frame.extend(address);
    frame
}

fn ones_sum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn only_ecn_capable_packets_are_marked() {
    for (build, tos_bits) in [(ipv4_frame as fn(u8, bool) -> Vec<u8>, (1, 0)), (ipv6_frame, (1, 4))] {
        for vlan in [false, true] {
            let start = if vlan { 18 } else { 14 };
            for ecn_bits in 0..4 {
                let original = build(ecn_bits, vlan);
                let mut frame = original.clone();
                assert_eq!(ecn::mark(&mut frame), ecn_bits == 1 || ecn_bits == 2);
                let expected = if ecn_bits == 0 { 0 } else { 3 };
                assert_eq!((frame[start + tos_bits.0] >> tos_bits.1) & 3, expected);
                // It has the correct checksum, computed from scratch.
                assert_eq!(frame, build(expected, vlan));
            }
        }
    }
    // Too short, or not IP: unchanged.
    for len in 0..33 {
        assert!(!ecn::mark(&mut ipv4_frame(1, false)[..len]));
    }
    let mut arp = ipv4_frame(1, false);
    arp[13] = 6;
    assert!(!ecn::mark(&mut arp));
}

#[test]
fn ecn_marking_follows_the_queue_length() {
    let frame = ipv4_frame(2, false);
    let bytes = frame.len() as u64 + WIRE_OVERHEAD;
    let ecn = EcnConfig { kmin_bytes: 10 * bytes, kmax_bytes: 110 * bytes, pmax: 0.2 };
    let rate = Some(10_000_000_000);
    let (network, mut a, mut b) = pair(5, LinkConfig { rate, ecn: Some(ecn), ..LinkConfig::default() });
    let mut left = 0;
    let mut burst = |count: usize, at: u64, a: &mut SimPort| {
        left = count;
        a.tx_burst(Nanos(at), &mut |buffer: &mut [u8]| {
            left = left.checked_sub(1)?;
            buffer[..frame.len()].copy_from_slice(&frame);
            Some(frame.len())
        })
        .unwrap();
        network.counters().marked
    };
    // Frame n finds n frames queued: none marked up to kmin, all above kmax, some between.
    assert_eq!(burst(11, 0, &mut a), 0);
    let between = burst(100, 0, &mut a);
    assert!((1..30).contains(&between), "{between}");
    assert_eq!(burst(50, 0, &mut a), between + 50);
    let mut marked = 0;
    while let Some(now) = network.next_arrival() {
        b.rx_burst(now, &mut |frame: &[u8]| {
            marked += u64::from(frame[15] & 3 == 3);
            assert_eq!(ones_sum(&frame[14..34]), 0xffff);
        })
        .unwrap();
    }
    assert_eq!(marked, between + 50);
}

#[test]
fn a_filter_determines_the_verdict_of_each_frame() {
    let (network, mut a, mut b) = pair(1, LinkConfig::default());
    let mut n = 0;
    network.set_filter(Box::new(move |frame| {
        assert_eq!(frame.len(), 60);
        n += 1;
        match n - 1 {
            1 => Verdict::Drop,
            2 => Verdict::Duplicate,
            3 => Verdict::Delay(Duration::from_micros(1)),
            5 => Verdict::Corrupt,
            _ => Verdict::Pass,
        }
    }));
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    send(&mut a, Nanos(10), to, 0..7);
    let got = drain(&network, &mut b);
    assert_eq!(got.len(), 7);
    assert_eq!(numbers(&got)[..4], [0, 2, 2, 4]);
    assert_eq!(got.last(), Some(&(Nanos(1010), 3)));
    let expected =
        Counters { offered: 7, lost: 1, duplicated: 1, reordered: 1, corrupted: 1, ..Counters::default() };
    assert_eq!(network.counters(), expected);
}

#[test]
fn a_link_can_be_cut_and_restored() {
    let (network, mut a, mut b) = pair(1, LinkConfig::default());
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    network.set_config(LinkConfig { loss: 1.0, ..LinkConfig::default() }).unwrap();
    send(&mut a, Nanos(1), to, 0..1000);
    assert_eq!(network.next_arrival(), None);
    assert_eq!(network.counters().lost, 1000);
    network.set_config(LinkConfig::default()).unwrap();
    send(&mut a, Nanos(2), to, 0..2);
    assert_eq!(receive(&mut b, Nanos(2)), [0, 1]);
}

#[test]
fn a_port_with_all_frames_in_flight_accepts_no_more_until_some_arrive() {
    let link = LinkConfig { delay: Duration::from_micros(1), duplicate: 1.0, ..LinkConfig::default() };
    let config = NetworkConfig { mtu: 1500, frames: 100 };
    let network = SimNetwork::with_config(1, link, config).unwrap();
    let (mut a, mut b) = (network.port(&[ip(1)]), network.port(&[ip(2)]));
    for round in 0..5 {
        let now = Nanos(round * 10_000);
        assert_eq!(send(&mut a, now, [0xff; 6], 0..200), 50);
        // The other port has its own frames.
        assert_eq!(send(&mut b, now, port_mac(0), 0..10), 10);
        assert_eq!(receive(&mut b, now + SECOND).len(), 100);
        assert_eq!(receive(&mut a, now + SECOND).len(), 20);
    }
}

#[test]
fn a_length_outside_the_limits_is_not_sent() {
    let (_network, mut a, mut b) = pair(1, LinkConfig::default());
    let to = a.resolve(ip(2)).unwrap().found().unwrap();
    let mut lengths = [13, a.capabilities().max_frame + 1, 60].into_iter();
    let sent = a.tx_burst(Nanos(1), &mut |buffer: &mut [u8]| {
        write(buffer, to, 60, 0);
        lengths.next()
    });
    assert_eq!(sent.unwrap(), 1);
    assert_eq!(a.stats().tx_dropped, 2);
    assert_eq!(receive(&mut b, Nanos(1)), [0]);
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let trace = |seed| {
        let link = LinkConfig {
            loss: 0.05,
            duplicate: 0.05,
            corrupt: 0.05,
            reorder: 0.05,
            delay: Duration::from_micros(3),
            jitter: Duration::from_micros(9),
            rate: Some(1_000_000_000),
            queue_limit: Some(2_000),
            ..LinkConfig::default()
        };
        let (network, mut a, mut b) = pair(seed, link);
        let got = run(&network, &mut a, &mut b, 3000);
        (network.trace_hash(), network.counters(), got)
    };
    let first = trace(11);
    assert_eq!(first, trace(11));
    assert_ne!(first.0, trace(12).0);
}

#[test]
fn the_trace_covers_time_bytes_and_fate() {
    let hash = |now: u64, number: u32, loss: f64| {
        let (network, mut a, _b) = pair(1, LinkConfig { loss, ..LinkConfig::default() });
        send(&mut a, Nanos(now), port_mac(1), number..number + 1);
        network.trace_hash()
    };
    let base = hash(1, 1, 0.0);
    assert_eq!(base, hash(1, 1, 0.0));
    for other in [hash(2, 1, 0.0), hash(1, 2, 0.0), hash(1, 1, 1.0)] {
        assert_ne!(base, other);
    }
}

#[test]
fn errors_name_the_invalid_field() {
    let ok = LinkConfig::default;
    let ecn = EcnConfig { kmin_bytes: 2, kmax_bytes: 1, pmax: 0.5 };
    for (link, message) in [
        (LinkConfig { loss: 1.5, ..ok() }, "loss = 1.5: a probability, 0 to 1"),
        (LinkConfig { corrupt: f64::NAN, ..ok() }, "corrupt = NaN: a probability, 0 to 1"),
        (LinkConfig { reorder_by: 65, ..ok() }, "reorder_by = 65: 1 to 64 frames"),
        (LinkConfig { reorder_by: 0, ..ok() }, "reorder_by = 0: 1 to 64 frames"),
        (LinkConfig { rate: Some(0), ..ok() }, "rate = 0:"),
        (LinkConfig { queue_limit: Some(9), ..ok() }, "queue_limit = 9: a rate too"),
        (
            LinkConfig { ecn: Some(ecn), ..ok() },
            "ecn = EcnConfig { kmin_bytes: 2, kmax_bytes: 1, pmax: 0.5 }: a rate too",
        ),
        (LinkConfig { ecn: Some(ecn), rate: Some(1), ..ok() }, "ecn.kmin_bytes = 2:"),
    ] {
        let error = SimNetwork::new(1, link.clone()).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
        let (network, ..) = pair(1, ok());
        assert!(network.set_config(link).is_err());
    }
    let size = |mtu, frames| SimNetwork::with_config(1, ok(), NetworkConfig { mtu, frames }).is_err();
    assert!(size(67, 1) && size(1500, 0) && !size(1500, 1) && !size(1500, 1 << 16));
    for frames in [(1 << 16) + 1, usize::MAX] {
        let refused = SimNetwork::with_config(1, ok(), NetworkConfig::default().frames(frames)).unwrap_err();
        assert_eq!(refused.to_string(), format!("frames = {frames}: 1 to 65536 frames"));
    }
}

#[test]
fn ports_can_move_to_other_threads() {
    fn assert_send<T: Send>() {}
    assert_send::<SimPort>();
    assert_send::<SimNetwork>();
}
