//! Received frames that are kept beyond their burst.
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce_driver::sim::{LinkConfig, SimNetwork};
use ferroce_driver::{FrameSink, KeptFrame, Nanos, PacketDriver, loopback};
use ferroce_driver_test_support::keep::keeps_frames;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

/// Sends a frame and receives it.
fn pass(from: &mut dyn PacketDriver, to: &mut dyn PacketDriver, frame: &[u8], sink: &mut dyn FrameSink) {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut unsent = Some(());
    while unsent.is_some() {
        from.tx_burst(Nanos(1), &mut |buffer: &mut [u8]| {
            unsent.take()?;
            buffer[..frame.len()].copy_from_slice(frame);
            Some(frame.len())
        })
        .unwrap();
        assert!(Instant::now() < deadline, "no room to send");
    }
    while to.rx_burst(Nanos(2), sink).unwrap() == 0 {
        assert!(Instant::now() < deadline, "nothing came");
    }
}

/// A frame that differs from others only by its number.
fn numbered(to: [u8; 6], from: [u8; 6], n: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &[0x08, 0]].concat();
    frame.extend((0..200).map(|at| (n + at * (n % 251)) as u8));
    frame.extend(n.to_be_bytes());
    frame
}

fn between(a: &mut dyn PacketDriver, b: &mut dyn PacketDriver) -> Vec<KeptFrame> {
    let (to, from) = (b.capabilities().mac, a.capabilities().mac);
    let limit = b.keeps();
    keeps_frames(limit, false, |n| numbered(to, from, n), |frame, sink| pass(a, b, frame, sink))
}

/// Checks that the frames outlive their port.
fn outlives(kept: Vec<KeptFrame>, port: impl PacketDriver) {
    let copies: Vec<Vec<u8>> = kept.iter().map(|frame| frame.to_vec()).collect();
    drop(port);
    assert!(kept.iter().zip(&copies).all(|(kept, copy)| **kept == **copy));
    assert!(!kept.is_empty());
}

#[test]
fn a_loopback_port_keeps_frames() {
    let (mut a, mut b) = loopback::pair(&[A], &[B]);
    let kept = between(&mut a, &mut b);
    outlives(kept, b);
}

#[test]
fn a_simulated_port_keeps_frames() {
    let network = SimNetwork::new(1, LinkConfig::default()).unwrap();
    let (mut a, mut b) = (network.port(&[A]), network.port(&[B]));
    let kept = between(&mut a, &mut b);
    outlives(kept, b);
}

#[test]
fn a_wrapped_port_keeps_frames() {
    let (mut a, b) = loopback::pair(&[A], &[B]);
    let path = std::env::temp_dir().join(format!("ferroce-kept-{}.pcapng", std::process::id()));
    let mut b = ferroce_driver::pcap::Recorder::create(b, &path).unwrap();
    drop(between(&mut a, &mut b));
    drop(b);
    std::fs::remove_file(path).unwrap();
}

#[cfg(feature = "af_xdp")]
mod af_xdp {
    use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
    use ferroce_driver_test_support::exchange::{Roce, drain, send};
    use ferroce_driver_test_support::keep::Keep;
    use ferroce_driver_test_support::namespaces::{Namespaces, VETH};

    use super::*;

    const CHUNKS: u32 = 128;

    fn open(pair: &Namespaces) -> (AfXdp, AfXdp) {
        let config = AfXdpConfig::new(VETH).sharing(false).rx_frames(CHUNKS);
        pair.in_both(|| AfXdp::open(&config).unwrap())
    }

    fn keep(a: &mut AfXdp, b: &mut AfXdp, length: usize) -> Vec<KeptFrame> {
        let roce = Roce::v4(b.capabilities().mac, a.capabilities().mac);
        let limit = b.keeps();
        keeps_frames(limit, length < 3840, |n| roce.build(length, n), |frame, sink| pass(a, b, frame, sink))
    }

    #[test]
    fn chunks_are_lent_and_come_back() {
        let Some(pair) = Namespaces::new(1500) else { return };
        let (mut a, mut b) = open(&pair);
        assert_eq!(b.keeps(), CHUNKS as usize / 4);
        let kept = keep(&mut a, &mut b, 700);
        drop(kept);
        // After one burst the kernel has all chunks again: it can receive as many frames as there are chunks.
        let roce = Roce::v4(b.capabilities().mac, a.capabilities().mac);
        send(&mut a, &roce.build(100, 0));
        assert_eq!(drain(&mut b, Duration::from_millis(20)).len(), 1);
        let sent: Vec<_> = (0..CHUNKS as usize).map(|n| roce.build(100, n)).collect();
        sent.iter().for_each(|frame| send(&mut a, frame));
        assert!(drain(&mut b, Duration::from_millis(50)) == sent);
        assert_eq!((b.stats().rx_dropped, b.stats().bad_descriptors), (0, 0));
    }

    /// A keeper that keeps as many frames as possible leaves enough chunks for others.
    #[test]
    fn a_keeper_does_not_starve_reception() {
        let Some(pair) = Namespaces::new(1500) else { return };
        let (mut a, mut b) = open(&pair);
        let roce = Roce::v4(b.capabilities().mac, a.capabilities().mac);
        let mut all = Keep::default();
        for n in 0..CHUNKS as usize {
            pass(&mut a, &mut b, &roce.build(700, n), &mut all);
        }
        assert_eq!((all.kept.len(), all.refused.len()), (32, 96));
        let sent: Vec<_> = (0..96).map(|n| roce.build(100, n)).collect();
        sent.iter().for_each(|frame| send(&mut a, frame));
        assert!(drain(&mut b, Duration::from_millis(50)) == sent);
        assert_eq!(b.stats().rx_dropped, 0);
    }

    /// Frames of several chunks are copied, with the same limit.
    #[test]
    fn frames_of_several_chunks_are_kept_too() {
        let Some(pair) = Namespaces::new(9000) else { return };
        let (mut a, mut b) = open(&pair);
        drop(keep(&mut a, &mut b, 9014));
        assert_eq!((b.stats().rx_dropped, b.stats().bad_descriptors), (0, 0));
    }

    #[test]
    fn kept_frames_outlive_the_port() {
        let Some(pair) = Namespaces::new(1500) else { return };
        let (mut a, mut b) = open(&pair);
        let kept = keep(&mut a, &mut b, 700);
        outlives(kept, b);
        // The queue is free again.
        let mut b = pair.in_b(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))).unwrap();
        let frame = Roce::v4(b.capabilities().mac, a.capabilities().mac).build(100, 1);
        send(&mut a, &frame);
        assert_eq!(drain(&mut b, Duration::from_millis(20)), [frame]);
    }
}
