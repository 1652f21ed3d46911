//! Several queues of one interface, a port each. Needs root; prints why and passes where it can't run.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;
#[path = "common/exchange.rs"]
mod exchange;

use std::thread;
use std::time::{Duration, Instant};

use common::{Pair, VETH};
use exchange::{Roce, drain, send};
use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::{Nanos, PacketDriver};

/// Frames that each port sends.
const FRAMES: usize = 20_000;

#[test]
fn ports_on_several_queues_exchange_everything_once() {
    let Some(pair) = Pair::with_queues(1500, 2) else { return };
    let open = |queue| AfXdp::open(&AfXdpConfig { queue, ..AfXdpConfig::new(VETH) }).unwrap();
    let mut a = [0, 1].map(|queue| pair.in_a(|| open(queue)));
    let mut b = [0, 1].map(|queue| pair.in_b(|| open(queue)));
    let (mac_a, mac_b) = (a[0].capabilities().mac, b[0].capabilities().mac);
    // All four at once; each finds what its opposite number has sent, in order, and nothing else.
    let exchange = |port: &mut AfXdp, to: [u8; 6], send: usize, expect: usize| {
        let mac = port.capabilities().mac;
        let (mut sent, mut received) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while (sent < FRAMES || received < FRAMES) && Instant::now() < deadline {
            // No more under way than the other side has buffers for.
            let mut next = sent..(received + 512).min(FRAMES).max(sent);
            sent += port
                .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                    let frame = Roce::v4(to, mac).build(200, next.next()? + send * FRAMES);
                    buffer[..frame.len()].copy_from_slice(&frame);
                    Some(frame.len())
                })
                .unwrap();
            port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
                let expected = Roce::v4(mac, to).build(200, received + expect * FRAMES);
                assert!(frame == expected, "frame {received} for {expect}");
                received += 1;
            })
            .unwrap();
        }
        assert_eq!((sent, received), (FRAMES, FRAMES), "port {send}");
    };
    thread::scope(|scope| {
        for (queue, (a, b)) in a.iter_mut().zip(&mut b).enumerate() {
            scope.spawn(move || exchange(a, mac_b, queue, queue + 2));
            scope.spawn(move || exchange(b, mac_a, queue + 2, queue));
        }
    });
    for port in a.iter_mut().chain(&mut b) {
        assert_eq!(drain(port, Duration::from_millis(20)), Vec::<Vec<u8>>::new());
        assert_eq!((port.stats().rx_frames, port.stats().rx_dropped), (FRAMES as u64, 0));
    }
}

/// The rule that `af_xdp` documents for veth.
#[test]
fn a_veth_delivers_to_the_queue_that_sent() {
    let Some(pair) = Pair::with_queues(1500, 2) else { return };
    let open = |queue| AfXdp::open(&AfXdpConfig { queue, ..AfXdpConfig::new(VETH) }).unwrap();
    let mut a = [0, 1].map(|queue| pair.in_a(|| open(queue)));
    let mut b = [0, 1].map(|queue| pair.in_b(|| open(queue)));
    let (to, from) = (b[0].capabilities().mac, a[0].capabilities().mac);
    for port in 0..16 {
        for queue in [0, 1] {
            // Neither ports nor addresses matter, unlike with the RSS of a network card.
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
