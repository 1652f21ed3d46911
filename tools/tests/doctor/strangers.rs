//! Only answers to the request count, and not other packets of a busy peer or messages of a firewall.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ferroce::wire::{
    Bth, Deth, Encapsulation, FrameBuilder, GSI_QKEY, MAD_LEN, Opcode, PathAddress, PathHeader,
};
use ferroce::{Gid, MacAddr, Psn, Qpn};
use ferroce_driver_test_support::namespaces::inside;

use super::ends::{Ferroce, alone};
use super::wait_for_engine;
use super::way::{PEER, Way};

/// Unsolicited packets from the peer's address, until it is dropped.
pub(super) struct Flood {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    const FROM: Ipv4Addr = Ipv4Addr::new(10, 1, 2, 2);
    const TO: Ipv4Addr = Ipv4Addr::new(10, 1, 1, 2);
    /// The most rounds, of at least a millisecond each.
    const ROUNDS: usize = 60_000;

    pub(super) fn start(way: &Way) -> Flood {
        let socket = inside(&way.b, || UdpSocket::bind((Flood::FROM, 0)).unwrap());
        socket.set_ttl(7).unwrap();
        let source_port = socket.local_addr().unwrap().port();
        let right = packet(source_port);
        let mut wrong = right.clone();
        wrong[40] ^= 1;
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = stop.clone();
        let send = move || {
            for _ in 0..Flood::ROUNDS {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                for packet in [&right, &wrong, &wrong] {
                    // If the router rejects them, the error is reported here.
                    let _ = socket.send_to(packet, (Flood::TO, 4791));
                }
                thread::sleep(Duration::from_millis(1));
            }
        };
        Flood { stop, thread: Some(thread::spawn(send)) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// A REJ of the connection manager in an unknown transaction, starting with the BTH.
fn packet(source_port: u16) -> Vec<u8> {
    let header = PathHeader::new(&PathAddress {
        source_mac: MacAddr([2; 6]),
        destination_mac: MacAddr([4; 6]),
        vlan: None,
        source: Gid::from(IpAddr::from(Flood::FROM)),
        destination: Gid::from(IpAddr::from(Flood::TO)),
        encapsulation: Encapsulation::RoceV2 { source_port },
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 7,
        identification: 0,
    })
    .without_link();
    let mut mad = [0; MAD_LEN];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[8..16].copy_from_slice(b"somebody");
    mad[16..18].copy_from_slice(&[0, 0x12]);
    let mut buffer = [0; 512];
    let bth = Bth::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(1));
    let mut frame = FrameBuilder::start(&mut buffer, &header, bth, MAD_LEN).unwrap();
    frame.put(&Deth::new(GSI_QKEY, Qpn::GSI));
    frame.payload().copy_from_slice(&mad);
    let length = frame.finish();
    buffer[28..length].to_vec()
}

#[test]
fn a_busy_peer_is_no_answer() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let _flood = Flood::start(&way);
    for near in ["veth0", "udp:veth0"] {
        let found = way.check(&format!("-d {near} {}", PEER[0]));
        found.fails(&["UDP 4791"], &["does not answer"]);
        assert!(found.text("ICRC").starts_with("no packet came back"), "{:#?}", found.report);
    }
}

#[test]
fn a_busy_peer_answers() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    {
        let _end = Ferroce::start(Some(&way.b), "rping -d veth0");
        wait_for_engine(&way);
        let _flood = Flood::start(&way);
        for near in ["veth0", "udp:veth0"] {
            let found = way.check(&format!("-d {near} {}", PEER[0]));
            found.is_well();
            assert!(found.text("UDP 4791").contains("refuses, as it should"), "{:#?}", found.report);
            assert!(found.text("DSCP and ECN").contains("hop limit 63"), "{:#?}", found.report);
        }
    }
    let _far = way.far_end("veth0");
    let _flood = Flood::start(&way);
    let found = way.check(PEER[0]);
    found.is_well();
    assert!(found.text("ICRC there").starts_with("right in 20"), "{:#?}", found.report);
}

/// An ICMP message for a plain packet does not prove that there is no peer: AF_XDP needs no socket, and firewalls send
/// the same.
#[test]
fn an_icmp_message_proves_nothing() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let says = |found: &super::way::Found| {
        let text = found.text("UDP 4791");
        assert!(!text.contains("nothing has"), "{text}");
        assert!(text.contains("AF_XDP, DPDK and cards need none"), "{text}");
        assert!(text.contains("or a firewall rejects it"), "{text}");
    };
    says(&way.check(PEER[0]));
    let _end = Ferroce::start(Some(&way.b), "rping -d veth0");
    wait_for_engine(&way);
    way.rule("forward oifname to-b udp dport 4791 reject");
    let found = way.check(PEER[0]);
    found.fails(&["UDP 4791"], &["does not answer"]);
    says(&found);
}
