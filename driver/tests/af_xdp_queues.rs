//! Several queues of one interface, each with a port. Needs root; otherwise prints the reason and passes.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::netlink::Netlink;
use ferroce_driver::{Capabilities, Error, Nanos, PacketDriver};
use ferroce_driver_test_support::exchange::{Roce, drain, send};
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};

/// The number of frames that each port sends.
const FRAMES: usize = 20_000;

#[test]
fn ports_on_several_queues_exchange_everything_once() {
    let Some(pair) = Namespaces::with_queues(1500, 2) else { return };
    let open = |queue| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false).queue(queue)).unwrap();
    let mut a = [0, 1].map(|queue| pair.in_a(|| open(queue)));
    let mut b = [0, 1].map(|queue| pair.in_b(|| open(queue)));
    let [of_a, of_b] = [&a[0], &b[0]].map(|port| port.capabilities().clone());
    // All four at once. Each receives the frames of its counterpart, in order, and no others.
    let exchange = |port: &mut AfXdp, to: &Capabilities, send: usize, expect: usize| {
        let own = port.capabilities().clone();
        let (mut sent, mut received) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while (sent < FRAMES || received < FRAMES) && Instant::now() < deadline {
            // No more frames in flight than the other side has buffers for.
            let mut next = sent..(received + 512).min(FRAMES).max(sent);
            sent += port
                .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                    let frame = Roce::to(to, own.mac).build(200, next.next()? + send * FRAMES);
                    buffer[..frame.len()].copy_from_slice(&frame);
                    Some(frame.len())
                })
                .unwrap();
            port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
                let expected = Roce::to(&own, to.mac).build(200, received + expect * FRAMES);
                assert!(frame == expected, "frame {received} for {expect}");
                received += 1;
            })
            .unwrap();
        }
        assert_eq!((sent, received), (FRAMES, FRAMES), "port {send}");
    };
    let (of_a, of_b) = (&of_a, &of_b);
    thread::scope(|scope| {
        for (queue, (a, b)) in a.iter_mut().zip(&mut b).enumerate() {
            scope.spawn(move || exchange(a, of_b, queue, queue + 2));
            scope.spawn(move || exchange(b, of_a, queue + 2, queue));
        }
    });
    for port in a.iter_mut().chain(&mut b) {
        assert_eq!(drain(port, Duration::from_millis(20)), Vec::<Vec<u8>>::new());
        assert_eq!((port.stats().rx_frames, port.stats().rx_dropped), (FRAMES as u64, 0));
    }
}

/// The rule for veth in the documentation of `af_xdp`.
#[test]
fn a_veth_delivers_to_the_queue_that_sent() {
    let Some(pair) = Namespaces::with_queues(1500, 2) else { return };
    let open = |queue| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false).queue(queue)).unwrap();
    let mut a = [0, 1].map(|queue| pair.in_a(|| open(queue)));
    let mut b = [0, 1].map(|queue| pair.in_b(|| open(queue)));
    let (to, from) = (b[0].capabilities().mac, a[0].capabilities().mac);
    for port in 0..16 {
        for queue in [0, 1] {
            // Unlike with the RSS of a network card, ports and addresses have no effect.
            let mut frame = Roce::v4(to, from).build(100, queue);
            frame[34..36].copy_from_slice(&(0xc000u16 + port).to_be_bytes());
            send(&mut a[queue], &frame);
            let quiet = Duration::from_millis(2);
            let seen = b.each_mut().map(|port| drain(port, quiet));
            assert_eq!(seen[queue], [frame]);
            assert!(seen[1 - queue].is_empty());
        }
    }
}

// ---------------------------------------------------------------- all queues in one port

const QUEUES: u32 = 4;

fn open_all() -> AfXdp {
    AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap()
}

fn open_one(queue: u32) -> AfXdp {
    AfXdp::open(&AfXdpConfig::new(VETH).sharing(false).queue(queue)).unwrap()
}

/// Frame `n` of a flow. The number is in its last bytes.
fn of_flow(to: &Capabilities, from: [u8; 6], flow: u16, n: u32, length: usize) -> Vec<u8> {
    let mut frame = Roce::to(to, from).build(length, usize::from(flow));
    frame[34..36].copy_from_slice(&(0xc000 | (flow * 37)).to_be_bytes());
    frame[length - 6..length - 4].copy_from_slice(&flow.to_be_bytes());
    frame[length - 4..].copy_from_slice(&n.to_be_bytes());
    frame
}

/// Sends `each` frames of each of 64 flows in both directions, with a thread for each port. Checks that all arrive, the
/// frames of a flow in order. Returns how many each queue of `b` has received.
fn exchange_flows(a: &mut AfXdp, b: &mut AfXdp, each: u32, length: usize) -> Vec<u64> {
    const FLOWS: u16 = 64;
    let all = u32::from(FLOWS) * each;
    let run = |port: &mut AfXdp, to: &Capabilities| {
        let own = port.capabilities().clone();
        let (mut sent, mut received, mut next) = (0, 0, [0; FLOWS as usize]);
        let deadline = Instant::now() + Duration::from_secs(60);
        while (sent < all || received < all) && Instant::now() < deadline {
            let mut numbers = sent..(received + 512).min(all).max(sent);
            sent += port
                .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                    let n = numbers.next()?;
                    let frame =
                        of_flow(to, own.mac, (n % u32::from(FLOWS)) as u16, n / u32::from(FLOWS), length);
                    buffer[..length].copy_from_slice(&frame);
                    Some(length)
                })
                .unwrap() as u32;
            port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
                let flow = u16::from_be_bytes([frame[length - 6], frame[length - 5]]);
                let expected = &mut next[usize::from(flow)];
                assert!(
                    frame == of_flow(&own, to.mac, flow, *expected, length),
                    "flow {flow}, frame {expected}"
                );
                *expected += 1;
                received += 1;
            })
            .unwrap();
        }
        assert_eq!((sent, received), (all, all));
    };
    let [of_a, of_b] = [&*a, b].map(|port| port.capabilities().clone());
    thread::scope(|scope| {
        scope.spawn(|| run(a, &of_b));
        scope.spawn(|| run(b, &of_a));
    });
    for port in [&*a, b] {
        assert_eq!((port.stats().rx_frames, port.stats().rx_dropped), (u64::from(all), 0));
        assert_eq!(port.stats().bad_descriptors, 0);
    }
    let counts: Vec<u64> = b.received_by_queue().map(|(_, frames)| frames).collect();
    assert_eq!(counts.iter().sum::<u64>(), u64::from(all));
    counts
}

#[test]
fn one_port_receives_from_all_queues_and_spreads_its_frames() {
    let Some(pair) = Namespaces::with_queues(1500, QUEUES) else { return };
    let (mut a, mut b) = (pair.in_a(open_all), pair.in_b(open_all));
    assert!(b.capabilities().description.contains("all 4 queues"), "{}", b.capabilities().description);
    let counts = exchange_flows(&mut a, &mut b, 500, 300);
    println!("of 32000 frames of 64 flows, by queue: {counts:?}");
    // A fair hash assigns 16 of 64 flows to each queue, and almost never fewer than 6.
    assert!(counts.len() == 4 && counts.iter().all(|count| *count >= 6 * 500), "{counts:?}");
}

#[test]
fn frames_of_several_chunks_arrive_on_all_queues() {
    let Some(pair) = Namespaces::with_queues(9000, QUEUES) else { return };
    let (mut a, mut b) = (pair.in_a(open_all), pair.in_b(open_all));
    let counts = exchange_flows(&mut a, &mut b, 20, 9014);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}

/// A queue with many pending frames delays the others for at most a burst.
#[test]
fn queues_have_their_turns() {
    let Some(pair) = Namespaces::with_queues(1500, QUEUES) else { return };
    let mut flood = pair.in_a(|| open_one(0));
    let mut others = [1, 2, 3].map(|queue| pair.in_a(|| open_one(queue)));
    let mut b = pair.in_b(open_all);
    let (to, from) = (b.capabilities().clone(), flood.capabilities().mac);
    for n in 0..600 {
        send(&mut flood, &of_flow(&to, from, 0, n, 100));
    }
    for (flow, port) in (1..).zip(&mut others) {
        send(port, &of_flow(&to, from, flow, 0, 100));
    }
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut burst = 0;
        b.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            seen.push(frame[95]);
            burst += 1;
        })
        .unwrap();
        assert!(burst <= 64, "{burst} frames");
    }
    assert!([1, 2, 3].iter().all(|flow| seen.contains(flow)), "{seen:?}");
}

#[test]
fn a_wait_ends_with_a_frame_on_any_queue() {
    let Some(pair) = Namespaces::with_queues(1500, QUEUES) else { return };
    let mut a = [0, 1, 2, 3].map(|queue| pair.in_a(|| open_one(queue)));
    let mut b = pair.in_b(open_all);
    let (to, from) = (b.capabilities().clone(), a[0].capabilities().mac);
    for port in &mut a {
        let frame = of_flow(&to, from, 1, 0, 100);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                send(port, &frame);
            });
            let mut received = 0;
            let deadline = Instant::now() + Duration::from_secs(5);
            while received == 0 && Instant::now() < deadline {
                b.wait(Duration::from_secs(5)).unwrap();
                received += b.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| assert_eq!(frame[95], 1)).unwrap();
            }
            assert_eq!(received, 1);
        });
    }
    assert_eq!(b.received_by_queue().collect::<Vec<_>>(), [(0, 1), (1, 1), (2, 1), (3, 1)]);
}

/// The owner of a queue is not disturbed, and is named. The queues opened before are closed again.
#[test]
fn the_owner_of_a_busy_queue_is_named() {
    let Some(pair) = Namespaces::with_queues(1500, QUEUES) else { return };
    let mut a = pair.in_a(|| open_one(2));
    let mut owner = pair.in_b(|| open_one(2));
    let refused = pair.in_b(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))).unwrap_err();
    assert!(
        matches!(&refused, Error::QueueBusy { interface, queue: 2, .. } if interface == VETH),
        "{refused}"
    );
    let frame = of_flow(owner.capabilities(), a.capabilities().mac, 1, 0, 100);
    send(&mut a, &frame);
    assert_eq!(drain(&mut owner, Duration::from_millis(20)), [frame]);
    // The queues opened before the refusal were closed.
    drop(pair.in_b(|| [0, 1, 3].map(open_one)));
    drop(owner);
    drop(pair.in_b(open_all));
    let left = pair.in_b(|| Netlink::open().unwrap().interface(VETH).unwrap().xdp.is_some());
    assert!(!left, "the program is still there");
}

/// A queue that only receives also works.
#[test]
fn queues_that_only_receive_work_too() {
    let Some(pair) = Namespaces::with_queues(1500, QUEUES) else { return };
    let fewer = ["netns", "exec", &pair.b, "ethtool", "-L", VETH, "tx", "1"];
    match std::process::Command::new("ip").args(fewer).status() {
        Ok(status) if status.success() => {}
        other => return println!("skipped: ethtool does not take transmit queues away ({other:?})"),
    }
    let (mut a, mut b) = (pair.in_a(open_all), pair.in_b(open_all));
    let counts = exchange_flows(&mut a, &mut b, 20, 300);
    assert!(counts.len() == 4 && counts.iter().all(|count| *count > 0), "{counts:?}");
    assert_eq!(a.received_by_queue().next(), Some((0, 64 * 20)), "all of it came from one queue");
}
