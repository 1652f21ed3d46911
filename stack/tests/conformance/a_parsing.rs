//! Section A: parsing, ICRC, demultiplexing.

use ferroce::WcStatus::Success;
use ferroce::wire::Opcode;

use crate::packet::packet;
use crate::peer::{Peer, RQ, Setup};

#[test]
fn case_015_no_udp_checksum_over_ipv6() {
    let mut peer = Peer::with(Setup { ipv6: true, ..Setup::default() });
    let mr = peer.post_recv(1, 64);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).ack_req().payload(b"hello"));
    peer.expect_ack(RQ, 1);
    assert_eq!(peer.expect_wc(1, Success).byte_len, 5);
    assert_eq!(&peer.bytes(mr)[..6], b"hello\0");
}
