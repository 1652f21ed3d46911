//! RC and UC.

use ferroce_driver::rnic::{Completion, SendOperation};

use crate::ends::{Kind, RC, good, pair};

#[test]
fn messages_with_all_that_they_may_carry() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind::of(RC));
    a.region.write(0, b"hello, world").unwrap();
    // In two pieces here, in three there.
    b.receive(1, &[b.piece(100, 4), b.piece(200, 0), b.piece(300, 20)]);
    let sent = a.carry_out(SendOperation::Send, &[a.piece(0, 5), a.piece(5, 7)]);
    assert_eq!((sent.status, sent.opcode), (0, 0));
    let received = b.received();
    assert_eq!(received.len(), 1);
    let Completion { wr_id, status, opcode, byte_len, qp_num, wc_flags, .. } = received[0];
    assert_eq!((wr_id, status, opcode, byte_len, qp_num, wc_flags), (1, 0, 128, 12, b.qp.qpn(), 0));
    assert_eq!((b.bytes(100, 5), b.bytes(300, 9)), (b"hell\0".to_vec(), b"o, world\0".to_vec()));
}
