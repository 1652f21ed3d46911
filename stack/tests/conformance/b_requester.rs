//! Section B: PSNs, acknowledgement and completion of the requester.

use ferroce::WcStatus::Success;
use ferroce::wire::Opcode;

use crate::packet::{ack, payload};
use crate::peer::{Peer, SQ, pattern};

#[test]
fn case_019_send_is_segmented() {
    let mut peer = Peer::new();
    let data = pattern(3 * 256 + 1);
    peer.post_send(1, &data);
    let packets = [
        peer.expect(Opcode::RC_SEND_FIRST, SQ),
        peer.expect(Opcode::RC_SEND_MIDDLE, SQ + 1),
        peer.expect(Opcode::RC_SEND_MIDDLE, SQ + 2),
        peer.expect(Opcode::RC_SEND_LAST, SQ + 3),
    ];
    peer.expect_nothing();
    assert_eq!(packets.each_ref().map(|p| p.payload.len()), [256, 256, 256, 1]);
    assert_eq!(packets.each_ref().map(|p| p.pad), [0, 0, 0, 3]);
    assert_eq!(payload(&packets), data);
    assert!(packets[3].ack_req, "AckReq on the last packet");
    peer.inject(ack(SQ + 3, 1));
    peer.expect_wc(1, Success);
}
