//! 1,000 connections over AF_XDP between two namespaces, beside a flood of requests from hosts that are not
//! there.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]
#![cfg(feature = "af_xdp")]

#[path = "../../driver/tests/common/mod.rs"]
mod namespaces;
#[expect(unreachable_pub, reason = "a module shared with the benchmarks")]
mod strangers;

use std::time::Duration;

use ferroce::PacketDriver;
use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce::driver::udp::{Udp, UdpConfig};
use strangers::{Outcome, Plan};

/// One such request stopped the context for 3 s, and ended innocent connections with `RetryExcErr`.
#[test]
fn strangers_end_no_connection() {
    let Some(namespaces) = namespaces::Pair::new(1500) else { return };
    let open =
        || -> Box<dyn PacketDriver> { Box::new(AfXdp::open(&AfXdpConfig::new(namespaces::VETH)).unwrap()) };
    let ports = [namespaces.in_a(open), namespaces.in_b(open)];
    let plan = Plan { connections: 1000, rate: 2000, time: Duration::from_secs(3) };
    let outcome = strangers::run(ports, &plan).unwrap();
    println!("{outcome}");
    let Outcome { asked, accepted, refused, .. } = outcome;
    assert!(asked > 1000, "{asked} requests");
    // All of them were heard, unless the port lost some.
    assert!(accepted > 100 && accepted + refused > asked / 2, "{accepted} accepted and {refused} refused");
}

/// A socket's answers to them wait for ARP in the kernel. They took the send buffer of everybody's packets.
#[test]
fn strangers_do_not_stop_a_socket() {
    let Some(namespaces) = namespaces::Pair::new(1500) else { return };
    let client = namespaces.in_a(|| AfXdp::open(&AfXdpConfig::new(namespaces::VETH)).unwrap());
    let server = namespaces.in_b(|| Udp::open(&UdpConfig::new("10.9.0.2".parse().unwrap())).unwrap());
    let plan = Plan { connections: 100, rate: 20_000, time: Duration::from_secs(3) };
    let outcome = strangers::run([Box::new(client), Box::new(server)], &plan).unwrap();
    println!("{outcome}");
    assert!(outcome.accepted > 100 && outcome.asked > 10_000, "{outcome}");
}
