//! After set-up the drivers do not allocate, whatever happens to the frames.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::IpAddr;
use std::time::Duration;

use ferroce_driver::loopback::{Switch, SwitchConfig};
use ferroce_driver::sim::{EcnConfig, LinkConfig, SimNetwork};
use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{Nanos, PacketDriver};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts calls by thread.
struct Counting;

// SAFETY: every call is forwarded to `System` unchanged. Counting accesses a thread-local `Cell`, which needs no
// allocation and no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract for `GlobalAlloc::alloc` is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract, and `pointer` was allocated by `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract, and `pointer` was allocated by `System`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Performs `rounds` rounds, a microsecond apart, in which each port sends a burst of unicast, broadcast and refused
/// lengths. Returns the number of received frames.
fn exchange(ports: &mut [impl PacketDriver], rounds: u64) -> usize {
    let targets = [ports[1].capabilities().mac, [0xff; 6], ports[0].capabilities().mac, [2, 9, 9, 9, 9, 9]];
    let mut received = 0;
    for round in 0..rounds {
        let now = Nanos(round * 1000);
        for port in ports.iter_mut() {
            let mut left = 20;
            port.tx_burst(now, &mut |buffer: &mut [u8]| {
                left = usize::checked_sub(left, 1)?;
                buffer[..6].copy_from_slice(&targets[left % 4]);
                buffer[12..16].copy_from_slice(&[8, 0, 0x45, 2]);
                Some(if left == 7 { 5 } else { 64 + left })
            })
            .expect("a port of a process is never gone");
        }
        // Only every fourth round, so that queues fill.
        for port in ports.iter_mut().filter(|_| round % 4 == 0) {
            let mut sink = |frame: &[u8]| received += usize::from(frame.len() > 1);
            while port.rx_burst(now, &mut sink).expect("a port of a process is never gone") > 0 {}
        }
    }
    received
}

fn check(ports: &mut [impl PacketDriver]) {
    exchange(ports, 100);
    let before = ALLOCATIONS.get();
    let received = exchange(ports, 5000);
    assert!(received > 10_000, "{received}");
    assert_eq!(ALLOCATIONS.get() - before, 0);
}

fn addresses(last: u8) -> [IpAddr; 1] {
    [IpAddr::from([10, 0, 0, last])]
}

#[test]
fn loopback_overflow_included() {
    let switch = Switch::new(SwitchConfig::default().mtu(1500).depth(100)).expect("sizes are right");
    let mut ports: Vec<_> = (1..=3).map(|n| switch.port(&addresses(n))).collect();
    check(&mut ports);
    assert!(ports[1].stats().rx_dropped > 0);
}

#[test]
fn sim_impairments_included() {
    let link = LinkConfig::default()
        .loss(0.02)
        .duplicate(0.05)
        .corrupt(0.02)
        .reorder(0.05)
        .reorder_by(20)
        .delay(Duration::from_micros(20))
        .jitter(Duration::from_micros(10))
        .rate(10_000_000_000)
        .queue_limit(60_000)
        .ecn(EcnConfig::new(1000, 50_000, 0.5));
    let network = SimNetwork::new(1, link).expect("the link makes sense");
    let mut ports: Vec<_> = (1..=3).map(|n| network.port(&addresses(n))).collect();
    check(&mut ports);
    let c = network.counters();
    for (what, count) in [
        ("lost", c.lost),
        ("duplicated", c.duplicated),
        ("reordered", c.reordered),
        ("corrupted", c.corrupted),
        ("queue_dropped", c.queue_dropped),
        ("marked", c.marked),
    ] {
        assert!(count > 0, "{what}: {c:?}");
    }
}

#[cfg(feature = "af_xdp")]
#[test]
fn af_xdp_frames_of_several_descriptors_included() {
    use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
    use ferroce_driver_test_support::exchange::Roce;
    use ferroce_driver_test_support::namespaces::{Namespaces, VETH};

    let Some(pair) = Namespaces::new(9000) else { return };
    let (mut a, mut b) = pair.in_both(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap());
    let kind = Roce::v4(b.capabilities().mac, a.capabilities().mac);
    let frames = [64, 1082, 4154, 9014].map(|size| kind.build(size, size));
    let mut exchange = |rounds: usize| {
        let mut received = 0;
        for round in 0..rounds {
            let mut burst = frames.iter().cycle().skip(round % 4).take(50);
            a.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                let frame = burst.next()?;
                buffer[..frame.len()].copy_from_slice(frame);
                Some(frame.len())
            })
            .expect("the interface is there");
            let mut sink = |frame: &[u8]| received += usize::from(!frame.is_empty());
            while b.rx_burst(Nanos::ZERO, &mut sink).expect("the interface is there") > 0 {}
        }
        received
    };
    exchange(10);
    let before = ALLOCATIONS.get();
    let received = exchange(200);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(received > 5000, "{received}");
}

#[test]
fn udp_refusals_included() {
    let [a, b] = [1, 2].map(|last| IpAddr::from([127, 79, 0, last]));
    let mut ports = [a, b].map(|own| Udp::open(&UdpConfig::new(own)).expect("a free port on lo"));
    let run = |ports: &mut [Udp; 2]| {
        let mut received = 0;
        for round in 0..2000 {
            let mut left = 20;
            let sent = ports[0].tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                left = usize::checked_sub(left, 1)?;
                let len = if left % 8 == 1 { 60 } else { 500 };
                buffer[..len].fill(0);
                buffer[..2].copy_from_slice(&[0x45, round as u8 & 3]);
                buffer[8] = 64;
                // One in ten to a network without a route through this interface.
                buffer[16..20].copy_from_slice(&if left % 10 == 3 {
                    [192, 0, 2, 77]
                } else {
                    [127, 79, 0, 2]
                });
                buffer[22..24].copy_from_slice(&4791u16.to_be_bytes());
                Some(len)
            });
            assert_eq!(sent.expect("a socket is never gone"), 20);
            let mut sink = |frame: &[u8]| received += usize::from(frame.len() > 28);
            while ports[1].rx_burst(Nanos::ZERO, &mut sink).expect("a socket is never gone") > 0 {
                ports[1].wait(Duration::ZERO).expect("a socket is never gone");
            }
        }
        received
    };
    run(&mut ports);
    let before = ALLOCATIONS.get();
    let received = run(&mut ports);
    assert_eq!(received, 2000 * 18);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert!(ports[0].stats().tx_dropped >= 2 * 4000);
}
