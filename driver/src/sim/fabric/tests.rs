//! Tests of switches alone: raw frames from hosts that the test drives.

use std::time::Duration;

use super::*;
use crate::sim::{EcnConfig, LinkConfig};
use crate::{NextHop, PacketDriver};

/// Ethernet, IPv4 and UDP.
const HEADERS: usize = 42;
const GIGABIT: u64 = 1_000_000_000;

/// A frame of `len` bytes to `mac`, with this DSCP, ECT(0), and UDP source port.
fn udp(mac: [u8; 6], (from, to): (u8, u8), dscp: u8, source_port: u16, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len.max(HEADERS)];
    frame[..6].copy_from_slice(&mac);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..16].copy_from_slice(&[0x45, dscp << 2 | 2]);
    frame[23] = 17;
    frame[26..30].copy_from_slice(&[10, 0, 0, from]);
    frame[30..34].copy_from_slice(&[10, 0, 0, to]);
    frame[34..36].copy_from_slice(&source_port.to_be_bytes());
    frame[36..38].copy_from_slice(&4791_u16.to_be_bytes());
    frame
}

/// Hosts on one switch, and their ports.
struct Star {
    fabric: Fabric,
    switch: SwitchId,
    hosts: Vec<HostPort>,
    macs: Vec<[u8; 6]>,
    /// The switch's port to each host.
    ports: Vec<PortId>,
}

impl Star {
    fn new(hosts: u8, link: &LinkConfig, switch: SwitchConfig, host: HostConfig) -> Star {
        Star::with_rates(&vec![link.clone(); usize::from(hosts)], switch, host)
    }

    fn with_rates(links: &[LinkConfig], switch: SwitchConfig, host: HostConfig) -> Star {
        let fabric = Fabric::new(7, FabricConfig::default().mtu(9000)).unwrap();
        let switch = fabric.add_switch(switch).unwrap();
        let mut star = Star { fabric, switch, hosts: Vec::new(), macs: Vec::new(), ports: Vec::new() };
        for (number, link) in (1..).zip(links) {
            let host = star.fabric.add_host(host, &[[10, 0, 0, number].into()]).unwrap();
            let link = star.fabric.link(host, star.switch, link).unwrap();
            star.ports.push(star.fabric.ends(link)[1]);
            star.hosts.push(star.fabric.open(host).unwrap());
            let Ok(NextHop::Found(mac)) = star.hosts[0].resolve([10, 0, 0, number].into()) else { panic!() };
            star.macs.push(mac);
        }
        star
    }

    /// Sends `count` frames of `len` bytes, or fewer if there is no room; returns the number sent.
    fn send(&mut self, now: u64, (from, to): (usize, usize), dscp: u8, len: usize, count: usize) -> usize {
        let frame = udp(self.macs[to], (from as u8 + 1, to as u8 + 1), dscp, 49152, len);
        let mut left = count;
        let mut source = |buffer: &mut [u8]| {
            left = left.checked_sub(1)?;
            buffer[..frame.len()].copy_from_slice(&frame);
            Some(frame.len())
        };
        self.hosts[from].tx_burst(Nanos(now), &mut source).unwrap()
    }

    /// Receives all frames that have arrived.
    fn receive(&mut self, now: u64, host: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while self.hosts[host].rx_burst(Nanos(now), &mut |frame: &[u8]| frames.push(frame.to_vec())).unwrap()
            > 0
        {}
        frames
    }

    /// These hosts send to one at line rate until `end`, in frames of `len` bytes. Polls every µs, and makes the receiver
    /// read the frames that have arrived.
    fn load(&mut self, (start, end): (u64, u64), from: &[usize], to: usize, dscp: u8, len: usize) {
        for now in (start..end).step_by(1000) {
            for host in from {
                self.send(now, (*host, to), dscp, len, usize::MAX);
            }
            self.receive(now, to);
            self.check();
        }
    }

    /// Checks that each frame is counted once, and that no headroom is exceeded.
    fn check(&self) {
        let counters = self.fabric.counters();
        let counted = counters.delivered + counters.dropped() + counters.under_way;
        assert_eq!(counters.sent + counters.duplicated, counted, "{counters:?}");
        for port in &self.ports {
            let (taken, most) = self.fabric.headroom(*port, 3);
            assert!(taken <= most, "{taken} bytes of headroom of {most}");
        }
    }
}

fn link(gigabits: u64) -> LinkConfig {
    LinkConfig::default().rate(gigabits * GIGABIT).delay(Duration::from_micros(1))
}

fn fast_host() -> HostConfig {
    HostConfig::default().tx_frames(64)
}

#[test]
fn delays_are_exact() {
    // 1500 bytes and 24 at 10 Gb/s, twice, and 1 µs, twice.
    let mut star = Star::new(2, &link(10), SwitchConfig::default(), HostConfig::default());
    assert_eq!(star.send(1000, (0, 1), 26, 1500, 1), 1);
    let arrival = 1000 + 2 * 1219 + 2 * 1000 + 1;
    assert_eq!(star.receive(arrival - 1, 1).len(), 0);
    let frames = star.receive(arrival, 1);
    assert_eq!(frames, [udp(star.macs[1], (1, 2), 26, 49152, 1500)]);
    star.check();
}

/// Two hosts send to one, all at 25 Gb/s: exactly half of the frames are queued or lost.
#[test]
fn an_incast_gets_the_bandwidth_of_one_link() {
    let buffer = BufferConfig::default().pool(1_000_000);
    let mut star = Star::new(3, &link(25), SwitchConfig::default().buffer(buffer), fast_host());
    star.load((0, 1_000_000), &[0, 1], 2, 26, 4096);
    let out = star.fabric.queue_counters(star.ports[2], 3);
    let rate = (out.sent * (4096 + 24) * 8) as f64 / 1e-3;
    assert!((rate / 25e9 - 1.0).abs() < 0.005, "{rate}");
    // The lossy threshold is the free bytes: a queue gets half of the pool.
    assert!(out.max_bytes <= 500_000 && out.max_bytes > 495_000, "{out:?}");
    assert!(out.dropped > 0 && out.dropped == star.fabric.counters().buffer_dropped);
    star.check();
}

/// With PFC no frame is lost, for any rates of the links and any reaction time, and the headroom is at most three times its
/// used part.
#[test]
fn nothing_is_lost_with_pfc_and_headroom() {
    for (gigabits, reaction) in [(10, 0), (25, 500), (100, 0), (100, 2000), (400, 1000)] {
        let buffer = BufferConfig::default().pool(2 << 20).threshold(Threshold::Static(100_000));
        let reaction = Duration::from_nanos(reaction);
        let switch = SwitchConfig::default().buffer(buffer).pfc(PfcConfig::default());
        let host = fast_host().reaction(reaction);
        let mut star = Star::new(4, &link(gigabits), switch.reaction(reaction), host);
        let mut most = 0;
        for step in 0..100 {
            star.load((step * 10_000, step * 10_000 + 10_000), &[0, 1, 2], 3, 26, 9000);
            most = most.max(star.fabric.headroom(star.ports[0], 3).0);
        }
        let counters = star.fabric.counters();
        assert_eq!(counters.dropped(), 0, "{gigabits} Gb/s: {counters:?}");
        let sent = star.fabric.port_counters(star.ports[0]);
        assert!(sent.pauses_sent > 0 && sent.pfc_sent > sent.pauses_sent, "{sent:?}");
        let host_port = star.fabric.peer(star.ports[0]);
        let queue = star.fabric.queue_counters(host_port, 3);
        let share = queue.paused().as_secs_f64() / 1e-3;
        // Each of three gets a third of the link.
        assert!(
            (share - 2.0 / 3.0).abs() < 0.05,
            "{gigabits} Gb/s: paused for {share} of the time, {queue:?}"
        );
        assert_eq!(star.fabric.port_counters(host_port).pfc_received, sent.pfc_sent);
        let limit = star.fabric.headroom(star.ports[0], 3).1;
        println!("{gigabits} Gb/s, reaction {reaction:?}: {most} of {limit} bytes of headroom were used");
    }
}

/// Pauses start and end at the thresholds, to the frame.
#[test]
fn pauses_begin_and_end_at_their_thresholds() {
    let buffer = BufferConfig::default()
        .pool(1 << 20)
        .threshold(Threshold::Static(10_000))
        .headroom(50_000)
        .resume_offset(3000);
    let switch = SwitchConfig::default().buffer(buffer).pfc(PfcConfig::default());
    // Frames arrive at 100 Gb/s and leave at 1 Gb/s.
    let mut star = Star::with_rates(&[link(100), link(1)], switch, fast_host());
    let queue = |star: &Star| star.fabric.queue_bytes(star.ports[1], 3);
    let pauses = |star: &Star| star.fabric.port_counters(star.ports[0]);
    // One frame leaves, ten are queued.
    star.send(0, (0, 1), 26, 1000, 11);
    star.fabric.advance(Nanos(3000));
    assert_eq!((queue(&star), pauses(&star).pfc_sent), (10_000, 0));
    star.send(3000, (0, 1), 26, 1000, 1);
    star.fabric.advance(Nanos(5000));
    assert_eq!((queue(&star), pauses(&star).pauses_sent, pauses(&star).pfc_sent), (11_000, 1, 1));
    assert_eq!(star.fabric.headroom(star.ports[0], 3), (1000, 50_000));
    // A frame takes 8.192 µs at 1 Gb/s. The pause ends when 7,000 bytes are left.
    for time in (5000..200_000).step_by(100) {
        star.fabric.advance(Nanos(time));
        assert_eq!(pauses(&star).pfc_sent > 1, queue(&star) <= 7000, "{} bytes", queue(&star));
        if queue(&star) == 0 {
            break;
        }
    }
    assert_eq!(pauses(&star).pfc_sent, 2);
    star.check();
}

/// A pause that is not renewed expires, and a needed one is renewed in time.
#[test]
fn a_pause_expires_and_is_renewed() {
    let mut star = Star::new(2, &link(10), SwitchConfig::default().pfc(PfcConfig::default()), fast_host());
    let mut frames = [pfc::frame(0, 1 << 3, 0, 1000)].into_iter();
    let mut source = |buffer: &mut [u8]| {
        let frame = frames.next()?;
        buffer[..frame.len()].copy_from_slice(&frame);
        Some(frame.len())
    };
    // Host 1 pauses the switch: 1000 quanta of 51.2 ns.
    star.hosts[1].tx_burst(Nanos(0), &mut source).unwrap();
    star.fabric.advance(Nanos(2000));
    star.send(2000, (0, 1), 26, 1000, 3);
    star.send(2000, (0, 1), 0, 1000, 1);
    let begin = 1000 + 68;
    star.fabric.advance(Nanos(begin + 51_200 - 1));
    assert_eq!(star.fabric.queue_bytes(star.ports[1], 3), 3000);
    assert_eq!(star.receive(begin + 51_200 - 1, 1).len(), 1, "another class is not paused");
    assert_eq!(star.receive(begin + 51_200 + 10_000, 1).len(), 3);
    let queue = star.fabric.queue_counters(star.ports[1], 3);
    assert_eq!((queue.pauses, queue.pauses_expired, queue.paused().as_nanos()), (1, 1, 51_200));

    // The switch must pause host 0 for a long time, by short pauses.
    let buffer = BufferConfig::default().threshold(Threshold::Static(10_000));
    let switch = SwitchConfig::default().buffer(buffer).pfc(PfcConfig::default().quanta(100));
    let mut star = Star::with_rates(&[link(100), link(1)], switch, fast_host());
    star.load((0, 2_000_000), &[0], 1, 26, 4096);
    let host = star.fabric.queue_counters(star.fabric.peer(star.ports[0]), 3);
    assert_eq!((host.pauses_expired, star.fabric.counters().dropped()), (0, 0), "{host:?}");
    assert!(host.pauses > 0 && star.fabric.port_counters(star.ports[0]).pfc_sent > 10 * host.pauses);
}

/// The share of marked frames follows the curve for the queue length; none below Kmin, all above Kmax.
#[test]
fn marks_follow_the_curve() {
    for marking in [Marking::Enqueue, Marking::Dequeue] {
        for (waiting, expected) in
            [(39_u64, 0.0), (60, 0.125), (80, 0.25), (100, 0.375), (119, 0.49375), (122, 1.0)]
        {
            let ecn = EcnConfig::new(40_000, 120_000, 0.5);
            let switch = SwitchConfig::default().ecn(ecn).marking(marking);
            let mut star = Star::with_rates(&[link(100), link(1)], switch, fast_host());
            // The queue is filled, and kept at its length: every 8.192 µs a frame leaves and another one arrives.
            let mut now = 0;
            while star.fabric.queue_bytes(star.ports[1], 3) < waiting * 1000 {
                star.send(now, (0, 1), 26, 1000, 1);
                now += 300;
                star.fabric.advance(Nanos(now));
            }
            star.receive(now, 1);
            let mut marked = 0_u32;
            let mut count = 0_u32;
            let before = star.fabric.queue_counters(star.ports[1], 3).marked;
            while count < 4000 {
                now += 100;
                star.fabric.advance(Nanos(now));
                if star.fabric.queue_bytes(star.ports[1], 3) < waiting * 1000 {
                    count += 1;
                    star.send(now, (0, 1), 26, 1000, 1);
                    now += 2000;
                }
                marked += star.receive(now, 1).iter().filter(|frame| frame[15] & 3 == 3).count() as u32;
            }
            let after = star.fabric.queue_counters(star.ports[1], 3).marked;
            assert!(u64::from(marked) <= after && marked > 0 || expected == 0.0);
            let share = (after - before) as f64 / f64::from(count);
            // Before it is enqueued, or after it, one frame less is queued than the length kept. Up to four are between the
            // host and the queue.
            let expected: f64 =
                if expected == 1.0 || expected == 0.0 { expected } else { expected - 0.5 / 80.0 };
            let deviation = (expected * (1.0 - expected) / f64::from(count)).sqrt();
            assert!(
                (share - expected).abs() <= 4.0 * deviation + 4.0 / f64::from(count),
                "{marking:?}, {waiting} frames wait: {share} marked, {expected} expected"
            );
        }
    }
}

/// Classes share a link in proportion to their weights; a strict one is served first.
#[test]
fn a_link_is_shared_in_proportion_to_weights() {
    let mut scheduling = [Scheduling::Weighted(1); CLASSES];
    scheduling[3] = Scheduling::Weighted(3);
    scheduling[6] = Scheduling::Strict;
    let buffer = BufferConfig::default().lossy_threshold(Threshold::Static(200_000));
    let switch = SwitchConfig::default().scheduling(scheduling).buffer(buffer);
    let mut star = Star::with_rates(&[link(10), link(10), link(2), link(10)], switch, fast_host());
    for now in (0..4_000_000).step_by(1000) {
        // Classes 3 and 1 offer the full rate of the link each, class 6 a fifth of it.
        for (host, dscp, len) in [(0, 26, 1500), (1, 8, 4000), (2, 48, 300)] {
            star.send(now, (host, 3), dscp, len, usize::MAX);
        }
        star.receive(now, 3);
    }
    star.check();
    let sent = [3, 1, 6].map(|class| star.fabric.queue_counters(star.ports[3], class));
    let strict = (sent[2].sent * (300 + 24)) as f64 / (4e-3 * 2e9 / 8.0);
    assert!((strict - 1.0).abs() < 0.01 && sent[2].dropped == 0, "{strict}: {sent:?}");
    let ratio = sent[0].sent_bytes as f64 / sent[1].sent_bytes as f64;
    assert!((ratio - 3.0).abs() < 0.05, "{ratio}: {sent:?}");
}

/// Leaves and spines: flows are evenly distributed, each keeps its path, and another seed gives other paths.
#[test]
fn flows_are_distributed_over_equal_paths() {
    let ways = |seed: u64| {
        let fabric = Fabric::new(seed, FabricConfig::default()).unwrap();
        let leaves = [0, 1].map(|_| fabric.add_switch(SwitchConfig::default()).unwrap());
        let spines: Vec<SwitchId> =
            (0..8).map(|_| fabric.add_switch(SwitchConfig::default()).unwrap()).collect();
        let hosts = [1, 2].map(|n| fabric.add_host(HostConfig::default(), &[[10, 0, 0, n].into()]).unwrap());
        for (host, leaf) in hosts.iter().zip(leaves) {
            fabric.link(*host, leaf, &link(100)).unwrap();
        }
        let mut uplinks = Vec::new();
        for spine in &spines {
            uplinks.push(fabric.ends(fabric.link(leaves[0], *spine, &link(100)).unwrap())[0]);
            fabric.link(leaves[1], *spine, &link(100)).unwrap();
        }
        let mut from = fabric.open(hosts[0]).unwrap();
        let mut to = fabric.open(hosts[1]).unwrap();
        let Ok(NextHop::Found(mac)) = from.resolve([10, 0, 0, 2].into()) else { panic!() };
        let mut port_of_flow = Vec::new();
        for flow in 0..4000_u16 {
            let sent = |uplinks: &[PortId]| -> Vec<u64> {
                uplinks.iter().map(|port| fabric.queue_counters(*port, 3).sent).collect()
            };
            let before = sent(&uplinks);
            for again in 0..2 {
                let mut frames = 1;
                let mut source = |buffer: &mut [u8]| {
                    frames = i32::checked_sub(frames, 1).filter(|left| *left >= 0)?;
                    let frame = udp(mac, (1, 2), 26, 49152 + flow, 100);
                    buffer[..frame.len()].copy_from_slice(&frame);
                    Some(frame.len())
                };
                let now = Nanos(u64::from(flow) * 20_000 + again * 10_000);
                from.tx_burst(now, &mut source).unwrap();
                to.rx_burst(now + Duration::from_micros(9), &mut |_: &[u8]| ()).unwrap();
            }
            let after = sent(&uplinks);
            let used: Vec<usize> = (0..8).filter(|n| after[*n] != before[*n]).collect();
            assert_eq!(used.len(), 1, "the two packets of a flow go one way");
            port_of_flow.push(used[0]);
        }
        assert_eq!(fabric.counters().delivered, 8000);
        port_of_flow
    };
    let flows = ways(1);
    for port in 0..8 {
        let count = flows.iter().filter(|used| **used == port).count();
        // Expected: 500 with a standard deviation of 21.
        assert!((415..=585).contains(&count), "{count} of 4000 flows by uplink {port}");
    }
    let other = ways(2);
    let alike = flows.iter().zip(&other).filter(|(a, b)| a == b).count();
    assert!((400..=600).contains(&alike), "{alike} of 4000 flows go the same way with another seed");
}

/// A link that goes down loses the frames on it; after the convergence time the other links carry all, and again after it
/// is up.
#[test]
fn traffic_avoids_a_link_that_is_down() {
    let config = FabricConfig::default().convergence(Duration::from_micros(100));
    let fabric = Fabric::new(1, config).unwrap();
    let leaves = [0, 1].map(|_| fabric.add_switch(SwitchConfig::default()).unwrap());
    let spines = [0, 1].map(|_| fabric.add_switch(SwitchConfig::default()).unwrap());
    let hosts = [1, 2].map(|n| fabric.add_host(HostConfig::default(), &[[10, 0, 0, n].into()]).unwrap());
    for (host, leaf) in hosts.iter().zip(leaves) {
        fabric.link(*host, leaf, &link(10)).unwrap();
    }
    let uplinks = spines.map(|spine| {
        let link_of = fabric.link(leaves[0], spine, &link(10)).unwrap();
        fabric.link(leaves[1], spine, &link(10)).unwrap();
        link_of
    });
    let mut from = fabric.open(hosts[0]).unwrap();
    let mut to = fabric.open(hosts[1]).unwrap();
    let Ok(NextHop::Found(mac)) = from.resolve([10, 0, 0, 2].into()) else { panic!() };
    fabric.set_link(uplinks[0], false, Nanos(1_000_000));
    fabric.set_link(uplinks[0], true, Nanos(2_000_000));
    fabric.set_switch(spines[1], false, Nanos(3_000_000));
    let mut lost = Vec::new();
    let mut seen = (0, 0);
    for now in (0..4_000_000).step_by(10_000) {
        // One flow of each of 16.
        let mut flow = 0;
        let mut source = |buffer: &mut [u8]| {
            flow += 1;
            let frame = udp(mac, (1, 2), 26, flow, 100);
            buffer[..frame.len()].copy_from_slice(&frame);
            (flow <= 4).then_some(frame.len())
        };
        from.tx_burst(Nanos(now), &mut source).unwrap();
        to.rx_burst(Nanos(now), &mut |_: &[u8]| ()).unwrap();
        let counters = fabric.counters();
        lost.push((now, counters.dropped() - seen.1));
        seen = (counters.delivered, counters.dropped());
        assert_eq!(counters.sent, counters.delivered + counters.dropped() + counters.under_way);
    }
    let lost_in = |from: u64, to: u64| -> u64 {
        lost.iter().filter(|(time, _)| (from..to).contains(time)).map(|(_, lost)| lost).sum()
    };
    let ends = [fabric.ends(uplinks[0])[0], fabric.ends(uplinks[1])[0]];
    let sent = ends.map(|port| fabric.queue_counters(port, 3).sent);
    assert!(sent[0] > 0 && sent[1] > 0, "{sent:?}: the flows of this seed use both");
    assert_eq!(lost_in(0, 1_000_000), 0);
    assert!(lost_in(1_000_000, 1_120_000) > 0);
    assert_eq!(lost_in(1_120_000, 3_000_000), 0);
    assert!(lost_in(3_000_000, 3_120_000) > 0);
    assert_eq!(lost_in(3_120_000, 4_000_000), 0);
}

/// A host that pauses its switch forever blocks a sender to another host; the watchdog ends that.
#[test]
fn a_watchdog_ends_a_storm() {
    for watchdog in [None, Some(Duration::from_micros(200))] {
        let buffer = BufferConfig::default().threshold(Threshold::Static(50_000));
        let pfc_config = PfcConfig::default().watchdog(watchdog);
        let switch = SwitchConfig::default().buffer(buffer).pfc(pfc_config);
        let mut star = Star::new(3, &link(10), switch, fast_host());
        let mut received = 0;
        for now in (0..4_000_000).step_by(1000) {
            // Host 1 misbehaves until 2 ms.
            if now % 100_000 == 0 && now < 2_000_000 {
                let mut frames = 1;
                let mut source = |buffer: &mut [u8]| {
                    frames = i32::checked_sub(frames, 1).filter(|left| *left >= 0)?;
                    buffer[..pfc::LENGTH].copy_from_slice(&pfc::frame(0, 1 << 3, 0, u16::MAX));
                    Some(pfc::LENGTH)
                };
                star.hosts[1].tx_burst(Nanos(now), &mut source).unwrap();
            }
            // One frame to it for each one to host 2.
            star.send(now, (0, 1), 26, 500, 1);
            star.send(now, (0, 2), 26, 500, 1);
            received += star.receive(now, 2).len();
            star.receive(now, 1);
            star.check();
        }
        let queue = star.fabric.queue_counters(star.ports[1], 3);
        let counters = star.fabric.counters();
        if watchdog.is_some() {
            assert_eq!(queue.storms, 1, "{queue:?}");
            assert!(counters.storm_dropped > 1000 && received > 3900, "{received}: {counters:?}");
        } else {
            assert!(queue.storms == 0 && counters.dropped() == 0, "{counters:?}");
            assert!(received < 200, "{received} frames got past the storm");
        }
    }
}

/// The impairments of a link are counted; a lost or duplicated frame is counted once.
#[test]
fn impairments_are_counted() {
    let bad = link(10).loss(0.1).duplicate(0.1).corrupt(0.1).reorder(0.2).jitter(Duration::from_nanos(300));
    let mut star = Star::with_rates(&[bad, link(10)], SwitchConfig::default(), fast_host());
    let mut received = Vec::new();
    for now in (0..10_000_000).step_by(1000) {
        star.send(now, (0, 1), 26, 200, 1);
        received.extend(star.receive(now, 1));
        star.check();
    }
    received.extend(star.receive(20_000_000, 1));
    star.check();
    let counters = star.fabric.counters();
    assert_eq!((counters.sent, counters.under_way), (10_000, 0), "{counters:?}");
    let near = |count: u64, expected: u64| count.abs_diff(expected) < 150;
    assert!(near(counters.lost, 1000) && near(counters.duplicated, 900), "{counters:?}");
    assert!(near(counters.corrupted, 990) && near(counters.reordered, 1980), "{counters:?}");
    assert_eq!(received.len() as u64, counters.delivered);
}

/// Idle hosts do not change the run, and neither do calls to `advance` at other times.
#[test]
fn idle_hosts_do_not_change_the_run() {
    let run = |idle: u8, seed: u64| {
        let fabric = Fabric::new(seed, FabricConfig::default()).unwrap();
        let ecn = EcnConfig::new(1000, 20_000, 0.5);
        let switch = fabric.add_switch(SwitchConfig::default().ecn(ecn)).unwrap();
        let bad = link(10).loss(0.01).reorder(0.01);
        let mut hosts = Vec::new();
        for n in 0..3 + idle {
            let host = fabric.add_host(HostConfig::default(), &[[10, 0, 0, n].into()]).unwrap();
            fabric.link(host, switch, &bad).unwrap();
            hosts.push(fabric.open(host).unwrap());
        }
        let Ok(NextHop::Found(mac)) = hosts[0].resolve([10, 0, 0, 2].into()) else { panic!() };
        let mut marked = 0;
        for now in (0..1_000_000).step_by(1000) {
            for host in 0..2_u8 {
                let frame = udp(mac, (host, 2), 26, 49152, 1000);
                let mut source = |buffer: &mut [u8]| {
                    buffer[..frame.len()].copy_from_slice(&frame);
                    Some(frame.len())
                };
                hosts[usize::from(host)].tx_burst(Nanos(now), &mut source).unwrap();
            }
            let mut sink = |frame: &[u8]| marked += u32::from(frame[15] & 3 == 3);
            hosts[2].rx_burst(Nanos(now), &mut sink).unwrap();
        }
        (fabric.trace_hash(), marked, fabric.counters())
    };
    assert_eq!(run(0, 1), run(0, 1));
    assert_eq!(run(0, 1), run(50, 1));
    // The same on any machine; it changes only with the behaviour of a switch.
    assert_eq!(run(0, 1).0, 0xea62_fd4a_466e_a7c2);
    assert_ne!(run(0, 1).0, run(0, 2).0);
}

/// The random streams of two ports differ, in whichever direction links between the same switches were added.
#[test]
fn random_streams_of_ports_differ() {
    let fabric = Fabric::new(1, FabricConfig::default()).unwrap();
    let [a, b] = [0, 1].map(|_| fabric.add_switch(SwitchConfig::default()).unwrap());
    for (from, to) in [(a, b), (b, a), (a, b), (b, a)] {
        fabric.link(from, to, &link(10)).unwrap();
    }
    let simulation = lock(&fabric.simulation);
    let mut identities: Vec<u64> = simulation.ports.iter().map(|port| port.of.identity).collect();
    identities.sort_unstable();
    identities.dedup();
    assert_eq!(identities.len(), 8);
}

#[test]
fn invalid_configurations_are_refused() {
    let fabric = Fabric::new(1, FabricConfig::default()).unwrap();
    let refused = |result: Result<(), Error>| result.unwrap_err().to_string();
    let no_mtu = Fabric::new(1, FabricConfig::default().mtu(10)).map(|_| ());
    assert!(refused(no_mtu).starts_with("mtu = 10: "));
    let overhead = Fabric::new(1, FabricConfig::default().overhead(257)).map(|_| ());
    assert_eq!(refused(overhead), "overhead = 257: at most 256 bytes");
    let switch = |config: SwitchConfig| refused(fabric.add_switch(config).map(|_| ()));
    let buffer = BufferConfig::default();
    assert_eq!(switch(SwitchConfig::default().buffer(buffer.pool(0))), "pool = 0: at least 1 byte");
    let threshold = buffer.threshold(Threshold::Dynamic(-1.0));
    assert_eq!(switch(SwitchConfig::default().buffer(threshold)), "threshold = -1: a factor above 0");
    let ecn = EcnConfig::new(2, 1, 0.5);
    assert_eq!(switch(SwitchConfig::default().ecn(ecn)), "ecn.kmin_bytes = 2: at most ecn.kmax_bytes");
    let quanta = PfcConfig::default().quanta(1);
    assert!(switch(SwitchConfig::default().pfc(quanta)).starts_with("quanta = 1: 2 to 65535"));
    let idle = [Scheduling::Weighted(0); CLASSES];
    assert!(switch(SwitchConfig::default().scheduling(idle)).starts_with("scheduling = Weighted(0): "));
    let host = fabric.add_host(HostConfig::default().tx_frames(0), &[]).map(|_| ());
    assert_eq!(refused(host), "tx_frames = 0: 1 to 65536 frames");
    let host = fabric.add_host(HostConfig::default(), &[]).unwrap();
    let node = fabric.add_switch(SwitchConfig::default()).unwrap();
    assert_eq!(refused(fabric.open(host).map(|_| ())), "host = 0: a host with a link");
    let link_to = |link: LinkConfig| refused(fabric.link(host, node, &link).map(|_| ()));
    assert_eq!(link_to(LinkConfig::default()), "rate = none: bits per second");
    assert!(link_to(link(1).queue_limit(5)).starts_with("queue_limit = 5: none"));
    fabric.link(host, node, &link(1)).unwrap();
    assert_eq!(
        refused(fabric.link(host, node, &link(1)).map(|_| ())),
        "host = 0: a host without a link: it has one port"
    );
    let _port = fabric.open(host).unwrap();
    assert_eq!(refused(fabric.open(host).map(|_| ())), "host = 0: a host that nobody drives yet");
}
