//! 1,000 connections over AF_XDP between two namespaces, during a flood of requests from hosts that do not exist.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]
#![cfg(feature = "af_xdp")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce::driver::udp::{Udp, UdpConfig};
use ferroce::driver::{self, FrameSink};
use ferroce::{Nanos, PacketDriver};
use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
use ferroce_test_support::strangers::{self, Outcome, Plan};

/// One such request used to stop the context for 3 s, and ended other connections with `RetryExcErr`.
#[test]
fn strangers_end_no_connection() {
    let Some(namespaces) = Namespaces::new(1500) else { return };
    let open = || -> Box<dyn PacketDriver> { Box::new(AfXdp::open(&AfXdpConfig::new(VETH)).unwrap()) };
    let ports = [namespaces.in_a(open), namespaces.in_b(open)];
    let plan = Plan { connections: 1000, rate: 2000, time: Duration::from_secs(3) };
    let outcome = strangers::run(ports, &plan).unwrap();
    println!("{outcome}");
    let Outcome { asked, accepted, refused, .. } = outcome;
    assert!(asked > 1000, "{asked} requests");
    // All of them were received, except those that the port lost.
    assert!(accepted > 100 && accepted + refused > asked / 2, "{accepted} accepted and {refused} refused");
}

/// Frames by queue, and lost frames.
#[derive(Debug, Default)]
struct Heard {
    by_queue: Vec<u64>,
    lost: u64,
}

/// A port that reports how many frames each of its queues has received.
struct Told {
    port: AfXdp,
    heard: Arc<Mutex<Heard>>,
}

impl driver::Wrapper for Told {
    type Inner = AfXdp;

    fn inner(&self) -> &AfXdp {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut AfXdp {
        &mut self.port
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, driver::Error> {
        let received = self.port.rx_burst(now, sink)?;
        let mut heard = self.heard.lock().unwrap();
        heard.by_queue.clear();
        heard.by_queue.extend(self.port.received_by_queue().map(|(_, frames)| frames));
        Ok(received)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.heard.lock().unwrap().lost = self.port.stats().rx_dropped;
    }
}

/// 64 connections, made with QP1, over all four queues of an interface, and over one of them.
#[test]
fn connections_come_over_all_queues() {
    let Some(namespaces) = Namespaces::with_queues(1500, 4) else { return };
    for queue in [None, Some(2)] {
        let heard = [(); 2].map(|()| Arc::<Mutex<Heard>>::default());
        let open = |heard: &Arc<Mutex<Heard>>| -> Box<dyn PacketDriver> {
            let port = AfXdp::open(&AfXdpConfig::new(VETH).queue(queue)).unwrap();
            Box::new(Told { port, heard: heard.clone() })
        };
        let ports = [namespaces.in_a(|| open(&heard[0])), namespaces.in_b(|| open(&heard[1]))];
        let plan = Plan { connections: 64, rate: 100, time: Duration::from_secs(2) };
        let outcome = strangers::run(ports, &plan).unwrap();
        for heard in heard {
            let heard = heard.lock().unwrap();
            println!("queue {queue:?}: {heard:?} of 64 connections; {} sent again", outcome.retransmitted);
            let queues = if queue.is_none() { 4 } else { 1 };
            assert!(
                heard.by_queue.len() == queues && heard.by_queue.iter().all(|frames| *frames > 500),
                "{heard:?}"
            );
            assert_eq!(heard.lost, 0);
        }
    }
}

/// A socket's answers to them wait for ARP in the kernel. They used to occupy the send buffer for all other packets.
#[test]
fn strangers_do_not_stop_a_socket() {
    let Some(namespaces) = Namespaces::new(1500) else { return };
    let client = namespaces.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH)).unwrap());
    let server = namespaces.in_b(|| Udp::open(&UdpConfig::new("10.9.0.2".parse().unwrap())).unwrap());
    let plan = Plan { connections: 100, rate: 20_000, time: Duration::from_secs(3) };
    let outcome = strangers::run([Box::new(client), Box::new(server)], &plan).unwrap();
    println!("{outcome}");
    assert!(outcome.accepted > 100 && outcome.asked > 20_000, "{outcome}");
}
