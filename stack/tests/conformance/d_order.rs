//! Section D, first part: the responder's order of packets; gaps and duplicates.

use ferroce::WcStatus::Success;
use ferroce::wire::Opcode;
use ferroce::{Counter, Event, Mr, QpState, RKey};

use crate::packet::{Got, NAK_INVALID, NAK_SEQUENCE, Script, packet, payload};
use crate::peer::{Peer, RQ, Setup, pattern};

#[test]
fn case_056_acks_and_msn_of_a_stream() {
    // PSNs wrap meanwhile.
    let start = 0xff_fffe;
    let mut peer = Peer::with(Setup { rq_psn: start, ..Setup::default() });
    let mr = peer.memory(&[0; 1024]);
    let remote = peer.remote(mr);
    for id in 1..=2 {
        peer.post_recv(id, 1024);
    }
    let [full, some] = [pattern(256), pattern(9)];
    // Each packet requests an ACK: its PSN, and the messages complete with it.
    let stream = [
        (packet(Opcode::RC_SEND_FIRST, start).payload(&full), 0),
        (packet(Opcode::RC_SEND_MIDDLE, start + 1).payload(&full), 0),
        (packet(Opcode::RC_SEND_LAST, start + 2).payload(&some), 1),
        (packet(Opcode::RC_WRITE_ONLY, start + 3).reth(remote.addr, remote.rkey, 9).payload(&some), 2),
        (packet(Opcode::RC_SEND_ONLY, start + 4), 3),
        (packet(Opcode::RC_WRITE_FIRST, start + 5).reth(remote.addr, remote.rkey, 265).payload(&full), 3),
        (packet(Opcode::RC_WRITE_LAST, start + 6).payload(&some), 4),
    ];
    for (i, (packet, msn)) in stream.into_iter().enumerate() {
        peer.inject(packet.ack_req());
        peer.expect_ack(start + i as u32, msn);
        peer.expect_nothing();
    }
    // READs and atomics count as well, in their responses.
    peer.inject(read(&peer, mr, start + 7, 0, 300));
    assert_eq!(msns(&peer.take_packets()), [Some(5), Some(5)]);
    peer.inject(fetch_add(&peer, mr, start + 9, 512, 1));
    assert_eq!(msns(&peer.take_packets()), [Some(6)]);

    // All at once: ACKs may be combined, and never decrease.
    let sends = (0..3).map(|i| {
        let write = packet(Opcode::RC_WRITE_ONLY, start + 10 + i);
        write.reth(remote.addr, remote.rkey, 9).payload(&some).ack_req()
    });
    peer.inject_all(sends);
    let acks = peer.take_packets();
    let seen: Vec<(u32, Option<u32>)> =
        acks.iter().map(|p| (p.psn(), p.extensions.aeth.map(|a| a.msn()))).collect();
    assert!(seen.is_sorted() && seen.iter().all(|(_, msn)| msn.is_some()), "{seen:?}");
    assert_eq!(seen.last(), Some(&((start + 12) & 0xff_ffff, Some(9))));
    for (id, bytes) in [(1, 521), (2, 0)] {
        assert_eq!(peer.expect_wc(id, Success).byte_len, bytes);
    }
}

#[test]
fn case_057_one_nak_for_a_gap() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[7; 1024]);
    peer.post_recv(1, 8);
    peer.post_recv(2, 8);
    peer.inject(send(RQ, b"one"));
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);

    peer.inject(send(RQ + 2, b"three"));
    peer.expect_nak(NAK_SEQUENCE, RQ + 1, 1);
    for i in 0..10 {
        let psn = RQ + 3 + 2 * i;
        peer.inject(match i % 4 {
            0 => send(psn, b"later"),
            1 => write(&peer, mr, psn, b"later"),
            2 => read(&peer, mr, psn, 0, 8),
            _ => fetch_add(&peer, mr, psn, 0, 1),
        });
        peer.expect_nothing();
    }
    peer.expect_no_wc();
    peer.expect_counted(Counter::OutOfSequence, 11);
    assert_eq!(peer.bytes(mr), [7; 1024]);
    assert_eq!(peer.query().rq_psn.value(), RQ + 1);
}

#[test]
fn case_058_nak_for_each_gap() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 8]);
    for gap in 0..3 {
        let psn = RQ + 2 * gap;
        peer.inject(write(&peer, mr, psn + 1, b"b"));
        peer.expect_nak(NAK_SEQUENCE, psn, 2 * gap);
        // A duplicate fills no gap.
        peer.inject(write(&peer, mr, psn.wrapping_sub(1), b"x"));
        peer.expect_ack(psn - 1, 2 * gap);
        peer.inject(write(&peer, mr, psn + 1, b"b"));
        peer.expect_nothing();
        peer.inject(write(&peer, mr, psn, b"a"));
        peer.expect_ack(psn, 2 * gap + 1);
        assert_eq!(peer.bytes(mr)[0], b'a');
        peer.inject(write(&peer, mr, psn + 1, b"b"));
        peer.expect_ack(psn + 1, 2 * gap + 2);
        assert_eq!(peer.bytes(mr)[0], b'b');
    }
}

#[test]
fn case_059_duplicate_send() {
    let mut peer = Peer::new();
    let mrs = [1, 2].map(|id| peer.post_recv(id, 600));
    let data = pattern(256);
    let packets = [
        send(RQ, b"one"),
        packet(Opcode::RC_SEND_FIRST, RQ + 1).payload(&data).ack_req(),
        packet(Opcode::RC_SEND_LAST_WITH_IMMEDIATE, RQ + 2).imm(5).payload(b"end").ack_req(),
    ];
    for (i, packet) in packets.iter().enumerate() {
        peer.inject(packet.clone());
        peer.expect_ack(RQ + i as u32, [1, 1, 2][i]);
        // One that belongs to the current message, or to the one before it.
        peer.inject(packet.clone());
        peer.expect_ack(RQ + i as u32, [1, 1, 2][i]);
    }
    peer.expect_wc(1, Success);
    assert_eq!(peer.expect_wc(2, Success).byte_len, 259);
    // The application has its memory back.
    for mr in mrs {
        peer.bytes_mut(mr).fill(0xee);
    }
    peer.post_recv(3, 600);
    for _ in 0..3 {
        for packet in &packets {
            peer.inject(packet.clone());
            peer.expect_ack(RQ + 2, 2);
        }
    }
    peer.expect_no_wc();
    peer.expect_counted(Counter::DuplicateRequest, 12);
    for mr in mrs {
        assert_eq!(peer.bytes(mr), [0xee; 600]);
    }
    peer.inject(send(RQ + 3, b"next"));
    peer.expect_ack(RQ + 3, 3);
    assert_eq!(peer.expect_wc(3, Success).byte_len, 4);
}

#[test]
fn case_060_duplicate_write() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 512]);
    let remote = peer.remote(mr);
    let data = pattern(256);
    peer.post_recv(1, 0);
    peer.post_recv(2, 0);
    let packets = [
        packet(Opcode::RC_WRITE_FIRST, RQ).reth(0, remote.rkey, 260).payload(&data).ack_req(),
        packet(Opcode::RC_WRITE_LAST_WITH_IMMEDIATE, RQ + 1).imm(1).payload(b"last").ack_req(),
        write(&peer, mr, RQ + 2, b"only"),
    ];
    peer.inject_all(packets.clone());
    peer.expect_ack(RQ + 2, 2);
    peer.expect_wc(1, Success);
    assert_eq!(peer.bytes(mr)[..4], *b"only");
    peer.bytes_mut(mr).fill(0xee);
    for packet in packets {
        peer.inject(packet);
        peer.expect_ack(RQ + 2, 2);
    }
    peer.expect_no_wc();
    assert_eq!(peer.bytes(mr), [0xee; 512]);
}

#[test]
fn case_061_duplicate_read() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(600));
    peer.inject(read(&peer, mr, RQ, 0, 600));
    assert_eq!(payload(&peer.take_packets()), pattern(600));
    peer.bytes_mut(mr).fill(0xee);
    for _ in 0..2 {
        peer.inject(read(&peer, mr, RQ, 0, 600));
        let again = peer.take_packets();
        assert_eq!(shape(&again), [(FIRST, RQ), (MIDDLE, RQ + 1), (LAST, RQ + 2)]);
        assert_eq!(payload(&again), [0xee; 600]);
    }
    // Neither the PSNs nor the messages have advanced.
    peer.inject(write(&peer, mr, RQ + 3, b"next"));
    peer.expect_ack(RQ + 3, 2);
}

#[test]
fn case_062_duplicate_read_suffix() {
    let mut peer = Peer::new();
    let data = pattern(1000);
    let mr = peer.memory(&data);
    peer.inject(read(&peer, mr, RQ, 0, 1000));
    assert_eq!(peer.take_packets().len(), 4);
    let suffixes = [
        (1, vec![(FIRST, RQ + 1), (MIDDLE, RQ + 2), (LAST, RQ + 3)]),
        (2, vec![(FIRST, RQ + 2), (LAST, RQ + 3)]),
        (3, vec![(ONLY, RQ + 3)]),
        (0, vec![(FIRST, RQ), (MIDDLE, RQ + 1), (MIDDLE, RQ + 2), (LAST, RQ + 3)]),
    ];
    for (skip, expected) in suffixes {
        let offset = skip * 256;
        peer.inject(read(&peer, mr, RQ + skip, offset, 1000 - offset));
        let again = peer.take_packets();
        assert_eq!(shape(&again), expected);
        assert_eq!(payload(&again), data[offset as usize..]);
    }
    // Also while the response is still being sent.
    peer.take_at_most(2);
    peer.inject(read(&peer, mr, RQ + 4, 0, 1000));
    assert_eq!(shape(&peer.take_packets()), [(FIRST, RQ + 4), (MIDDLE, RQ + 5)]);
    peer.inject(read(&peer, mr, RQ + 5, 256, 744));
    peer.take_at_most(usize::MAX);
    assert_eq!(shape(&peer.take_packets()), [(FIRST, RQ + 5), (MIDDLE, RQ + 6), (LAST, RQ + 7)]);
}

#[test]
fn case_063_duplicate_read_that_asks_for_more() {
    let mut peer = Peer::new();
    let (mr, other) = (peer.memory(&pattern(2048)), peer.memory(&[0xdd; 2048]));
    let [rkey, other_rkey] = [mr, other].map(|mr| peer.remote(mr).rkey);
    let request = |psn, va, rkey, length| packet(Opcode::RC_READ_REQUEST, psn).reth(va, rkey, length);
    let original = request(RQ, 256, rkey, 768);
    peer.inject(original.clone());
    assert_eq!(peer.take_packets().len(), 3);
    let greedy = [
        request(RQ, 256, other_rkey, 768),
        request(RQ, 256, RKey::new(rkey.value().wrapping_add(1)), 768),
        request(RQ, 256, rkey, 769),
        request(RQ, 256, rkey, 1024),
        request(RQ, 0, rkey, 768),
        request(RQ, 512, rkey, 768),
        request(RQ + 1, 256, rkey, 768),
        request(RQ + 1, 512, rkey, 513),
        request(RQ + 2, 768, rkey, u32::MAX),
        request(RQ, 0xffff_ffff_ffff_ff00, rkey, 768),
        request(RQ + 1, 0xffff_ffff_ffff_ffff, rkey, 512),
        // Nothing is remembered for it.
        request(RQ - 1, 0, rkey, 1024),
    ];
    for request in greedy {
        let frame = peer.frame(&request);
        let before = peer.query();
        peer.inject_frame(frame);
        peer.expect_nothing();
        peer.expect_counted(Counter::RxForgottenDuplicate, 1);
        assert_eq!(peer.query(), before);
    }
    peer.inject(original.clone());
    assert_eq!(payload(&peer.take_packets()), pattern(2048)[256..1024]);
    drop(peer.context.deregister(mr).unwrap());
    peer.inject(original);
    peer.expect_nothing();
    peer.expect_counted(Counter::RxForgottenDuplicate, 1);
    peer.expect_state(QpState::Rts);
}

#[test]
fn case_064_duplicate_atomic() {
    let mut peer = Peer::with(Setup { max_dest_rd_atomic: 2, ..Setup::default() });
    let mr = peer.memory(&[0; 16]);
    let word = |peer: &Peer| u64::from_ne_bytes(peer.bytes(mr)[..8].try_into().unwrap());
    peer.bytes_mut(mr)[..8].copy_from_slice(&10u64.to_ne_bytes());
    let remote = peer.remote(mr);
    let add = fetch_add(&peer, mr, RQ, 0, 5);
    let swap = packet(Opcode::RC_COMPARE_SWAP, RQ + 1).atomic_eth(remote.addr, remote.rkey, 100, 15);
    for _ in 0..3 {
        peer.inject(add.clone());
        assert_eq!(peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ).original(), Some(10));
        assert_eq!(word(&peer), 15);
    }
    for _ in 0..3 {
        peer.inject(swap.clone());
        assert_eq!(peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ + 1).original(), Some(15));
        assert_eq!(word(&peer), 100);
    }
    // The stored result, whatever the memory contains by now.
    peer.bytes_mut(mr)[..8].copy_from_slice(&1u64.to_ne_bytes());
    peer.inject(add.clone());
    assert_eq!(peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ).original(), Some(10));

    // Another one replaces the oldest result.
    peer.inject(fetch_add(&peer, mr, RQ + 2, 8, 1));
    peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ + 2);
    let unknown = [
        add,
        fetch_add(&peer, mr, RQ - 1, 0, 5),
        read(&peer, mr, RQ + 2, 0, 8),
        read(&peer, mr, RQ + 1, 0, 8),
    ];
    for request in unknown {
        peer.inject(request);
        peer.expect_nothing();
        peer.expect_counted(Counter::RxForgottenDuplicate, 1);
        assert_eq!(word(&peer), 1);
    }
    peer.inject(swap);
    assert_eq!(peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ + 1).original(), Some(15));
    peer.expect_state(QpState::Rts);
}

#[test]
fn case_065_too_many_reads_at_once() {
    let mut peer = Peer::with(Setup { max_dest_rd_atomic: 2, ..Setup::default() });
    let mr = peer.memory(&pattern(8));
    // Any number, one after the other.
    for i in 0..10 {
        peer.inject(read(&peer, mr, RQ + i, 0, 8));
        peer.expect(ONLY, RQ + i);
    }
    // And two at once, of either kind.
    peer.inject_all([read(&peer, mr, RQ + 10, 0, 8), fetch_add(&peer, mr, RQ + 11, 0, 1)]);
    peer.expect(ONLY, RQ + 10);
    peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ + 11);
    // But not three: those before are answered, and the third is refused.
    let three = [12, 13, 14].map(|i| read(&peer, mr, RQ + i, 0, 8));
    peer.inject_all(three);
    peer.expect(ONLY, RQ + 12);
    peer.expect(ONLY, RQ + 13);
    peer.expect_nak(NAK_INVALID, RQ + 14, 14);
    peer.expect_state(QpState::Error);
    peer.expect_event(Event::QpReqErr(peer.qp));

    for request in [read, |peer: &Peer, mr, psn, va, _| fetch_add(peer, mr, psn, va, 1)] {
        let mut peer = Peer::with(Setup { max_dest_rd_atomic: 0, ..Setup::default() });
        let mr = peer.memory(&[0; 8]);
        peer.inject(request(&peer, mr, RQ, 0, 8));
        peer.expect_nak(NAK_INVALID, RQ, 0);
        peer.expect_state(QpState::Error);
        peer.expect_event(Event::QpReqErr(peer.qp));
        assert_eq!(peer.bytes(mr), [0; 8]);
    }
}

#[test]
fn case_066_half_the_psns_away() {
    let far = |e: u32, by: i32| e.wrapping_add_signed(by) & 0xff_ffff;
    for expected in [0, RQ, 0x80_0000, 0xff_ffff] {
        let mut peer = Peer::with(Setup { rq_psn: expected, ..Setup::default() });
        peer.post_recv(1, 8);
        for behind in [1, 1000, 1 << 23] {
            peer.inject(send(far(expected, -behind), b"old"));
            peer.expect_ack(far(expected, -1), 0);
            peer.expect_counted(Counter::DuplicateRequest, 1);
        }
        peer.inject(send(far(expected, (1 << 23) - 1), b"new"));
        peer.expect_nak(NAK_SEQUENCE, expected, 0);
        peer.expect_counted(Counter::OutOfSequence, 1);
        peer.expect_no_wc();
        peer.inject(send(expected, b"now"));
        peer.expect_ack(expected, 1);
        peer.expect_wc(1, Success);
    }
}

const FIRST: Opcode = Opcode::RC_READ_RESPONSE_FIRST;
const MIDDLE: Opcode = Opcode::RC_READ_RESPONSE_MIDDLE;
const LAST: Opcode = Opcode::RC_READ_RESPONSE_LAST;
const ONLY: Opcode = Opcode::RC_READ_RESPONSE_ONLY;

fn send(psn: u32, bytes: &[u8]) -> Script {
    packet(Opcode::RC_SEND_ONLY, psn).payload(bytes).ack_req()
}

fn write(peer: &Peer, mr: Mr, psn: u32, bytes: &[u8]) -> Script {
    let remote = peer.remote(mr);
    packet(Opcode::RC_WRITE_ONLY, psn)
        .reth(remote.addr, remote.rkey, bytes.len() as u32)
        .payload(bytes)
        .ack_req()
}

fn read(peer: &Peer, mr: Mr, psn: u32, offset: u32, length: u32) -> Script {
    let remote = peer.remote(mr);
    packet(Opcode::RC_READ_REQUEST, psn).reth(remote.addr + u64::from(offset), remote.rkey, length)
}

fn fetch_add(peer: &Peer, mr: Mr, psn: u32, offset: u32, add: u64) -> Script {
    let remote = peer.remote(mr);
    packet(Opcode::RC_FETCH_ADD, psn).atomic_eth(remote.addr + u64::from(offset), remote.rkey, add, 0)
}

fn shape(packets: &[Got]) -> Vec<(Opcode, u32)> {
    packets.iter().map(|packet| (packet.opcode, packet.psn())).collect()
}

fn msns(packets: &[Got]) -> Vec<Option<u32>> {
    packets.iter().map(|packet| packet.extensions.aeth.map(|aeth| aeth.msn())).collect()
}
