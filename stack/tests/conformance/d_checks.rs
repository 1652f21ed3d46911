//! Section D, second part: requests that the responder must refuse.

use ferroce::WcStatus::{RemInvReqErr, Success, WrFlushErr};
use ferroce::wire::{Extension, Feth, FlushType, Opcode, Operation, Position, Selectivity};
use ferroce::{Access, Event, Memory, Mr, PathMtu, QpState, RKey};

use crate::packet::{BTH, IP, NAK_ACCESS, NAK_INVALID, Script, UDP, packet, reseal};
use crate::peer::{Peer, RQ, Setup, all_access, pattern};

/// The longest message.
const MAX_MESSAGE: u32 = 1 << 31;

#[test]
fn case_067_opcodes_out_of_sequence() {
    let [send_first, write_first] = [Opcode::RC_SEND_FIRST, Opcode::RC_WRITE_FIRST];
    let continues_send = [
        Opcode::RC_SEND_MIDDLE,
        Opcode::RC_SEND_LAST,
        Opcode::RC_SEND_LAST_WITH_IMMEDIATE,
        Opcode::RC_SEND_LAST_WITH_INVALIDATE,
    ];
    let continues_write =
        [Opcode::RC_WRITE_MIDDLE, Opcode::RC_WRITE_LAST, Opcode::RC_WRITE_LAST_WITH_IMMEDIATE];
    for second in requests() {
        // At the start of a message.
        if continues_send.contains(&second) || continues_write.contains(&second) {
            let (mut peer, memory) = peer_with_memory(Setup::default());
            peer.post_recv(1, 1024);
            peer.inject(request(second, RQ, memory));
            expect_refused(&mut peer, NAK_INVALID, RQ, 0);
            peer.expect_wc(1, WrFlushErr);
        }
        // Within a SEND: its receive reports it.
        if !continues_send.contains(&second) {
            let (mut peer, memory) = peer_with_memory(Setup::default());
            peer.post_recv(1, 1024);
            peer.post_recv(2, 1024);
            peer.inject(request(send_first, RQ, memory));
            peer.inject(request(second, RQ + 1, memory));
            peer.expect_nak(NAK_INVALID, RQ + 1, 0);
            peer.expect_state(QpState::Error);
            peer.expect_wc(1, RemInvReqErr);
            peer.expect_wc(2, WrFlushErr);
        }
        // Within a WRITE.
        if !continues_write.contains(&second) {
            let (mut peer, memory) = peer_with_memory(Setup::default());
            peer.post_recv(1, 1024);
            peer.inject(request(write_first, RQ, memory));
            peer.inject(request(second, RQ + 1, memory));
            expect_refused(&mut peer, NAK_INVALID, RQ + 1, 0);
            peer.expect_wc(1, WrFlushErr);
            assert_eq!(peer.bytes(memory.mr)[256..], pattern(1024)[256..]);
        }
    }
}

#[test]
fn case_068_payload_lengths() {
    // First and Middle must be full.
    for length in [0, 1, 252, 255, 257, 512] {
        for continues in [false, true] {
            // A SEND with a current receive.
            let mut peer = Peer::new();
            peer.post_recv(1, 1024);
            let opcode = if continues { Opcode::RC_SEND_MIDDLE } else { Opcode::RC_SEND_FIRST };
            let psn = RQ + u32::from(continues);
            if continues {
                peer.inject(packet(Opcode::RC_SEND_FIRST, RQ).payload(&[1; 256]));
            }
            peer.inject(packet(opcode, psn).payload(&pattern(length)));
            expect_send_refused(&mut peer, psn);

            // A WRITE whose length would be valid.
            let (mut peer, Target { mr, addr, rkey }) = peer_with_memory(Setup::default());
            let opcode = if continues { Opcode::RC_WRITE_MIDDLE } else { Opcode::RC_WRITE_FIRST };
            let mut wrong = packet(opcode, psn);
            if continues {
                peer.inject(packet(Opcode::RC_WRITE_FIRST, RQ).reth(addr, rkey, 900).payload(&[1; 256]));
            } else {
                wrong = wrong.reth(addr, rkey, 900);
            }
            peer.inject(wrong.payload(&vec![1; length]));
            expect_refused(&mut peer, NAK_INVALID, psn, 0);
            let written = if continues { 256 } else { 0 };
            assert_eq!(peer.bytes(mr)[written..], pattern(1024)[written..]);
        }
    }
    // Last must have at least one byte, and not too many.
    for length in [0, 257] {
        let mut peer = Peer::new();
        peer.post_recv(1, 1024);
        peer.inject(packet(Opcode::RC_SEND_FIRST, RQ).payload(&[1; 256]));
        peer.inject(packet(Opcode::RC_SEND_LAST, RQ + 1).payload(&pattern(length)));
        expect_send_refused(&mut peer, RQ + 1);

        let (mut peer, Target { mr, addr, rkey }) = peer_with_memory(Setup::default());
        let total = 256 + length as u32;
        peer.inject(packet(Opcode::RC_WRITE_FIRST, RQ).reth(addr, rkey, total.max(257)).payload(&[1; 256]));
        peer.inject(packet(Opcode::RC_WRITE_LAST, RQ + 1).payload(&vec![1; length]));
        expect_refused(&mut peer, NAK_INVALID, RQ + 1, 0);
        assert_eq!(peer.bytes(mr)[256..], pattern(1024)[256..]);
    }
    // Only must not have too many.
    let mut peer = Peer::new();
    peer.post_recv(1, 1024);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(&pattern(257)));
    expect_send_refused(&mut peer, RQ);

    let (mut peer, Target { mr, addr, rkey }) = peer_with_memory(Setup::default());
    peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ).reth(addr, rkey, 257).payload(&[1; 257]));
    expect_refused(&mut peer, NAK_INVALID, RQ, 0);
    assert_eq!(peer.bytes(mr), pattern(1024));

    // The pad must fill the last word: here it is one byte, after six of payload.
    let mut peer = Peer::new();
    peer.post_recv(1, 1024);
    let mut frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).payload(b"sixsix"));
    frame.remove(frame.len() - 5);
    frame[IP + 3] -= 1;
    frame[UDP + 5] -= 1;
    frame[BTH + 1] ^= 0x30;
    reseal(&mut frame);
    peer.inject_frame(frame);
    expect_send_refused(&mut peer, RQ);
}

#[test]
fn case_069_write_of_another_length_than_announced() {
    // The length of the RETH, the payloads, and which of them is refused.
    let cases: [(u32, &[usize], usize); 9] = [
        (300, &[256, 100], 1),
        (400, &[256, 100], 1),
        (513, &[256, 256], 1),
        (600, &[256, 256, 256], 2),
        (600, &[256, 256, 89], 2),
        (256, &[256, 1], 0),
        (4, &[8], 0),
        (16, &[8], 0),
        (0, &[4], 0),
    ];
    for (total, payloads, wrong) in cases {
        let (mut peer, Target { mr, addr, rkey }) = peer_with_memory(Setup::default());
        for (i, length) in payloads[..=wrong].iter().enumerate() {
            let opcode = match (i, i + 1 == payloads.len()) {
                (0, true) => Opcode::RC_WRITE_ONLY,
                (0, false) => Opcode::RC_WRITE_FIRST,
                (_, false) => Opcode::RC_WRITE_MIDDLE,
                (_, true) => Opcode::RC_WRITE_LAST,
            };
            let part = packet(opcode, RQ + i as u32).payload(&vec![0xee; *length]);
            peer.inject(if i == 0 { part.reth(addr, rkey, total) } else { part });
        }
        expect_refused(&mut peer, NAK_INVALID, RQ + wrong as u32, 0);
        let end = total as usize;
        assert_eq!(peer.bytes(mr)[end..], pattern(1024)[end..], "behind {total} bytes");
    }
}

#[test]
fn case_070_longer_than_any_message() {
    for length in [MAX_MESSAGE + 1, u32::MAX] {
        for opcode in
            [Opcode::RC_READ_REQUEST, Opcode::RC_FLUSH, Opcode::RC_WRITE_FIRST, Opcode::RC_WRITE_ONLY]
        {
            let (mut peer, target) = peer_with_memory(Setup::default());
            peer.inject(request_of(opcode, RQ, target, length));
            expect_refused(&mut peer, NAK_INVALID, RQ, 0);
            assert_eq!(peer.bytes(target.mr), pattern(1024));
        }
    }
    // The longest message is refused only for its range.
    for opcode in [Opcode::RC_READ_REQUEST, Opcode::RC_FLUSH, Opcode::RC_WRITE_FIRST] {
        let (mut peer, target) = peer_with_memory(Setup::default());
        peer.inject(request_of(opcode, RQ, target, MAX_MESSAGE));
        expect_refused(&mut peer, NAK_ACCESS, RQ, 0);
    }
}

#[test]
fn case_071_memory_that_may_not_be_reached() {
    const LENGTH: usize = 1020;
    const IOVA: u64 = 0x1000;
    let data = pattern(LENGTH);
    for opcode in [
        Opcode::RC_WRITE_ONLY,
        Opcode::RC_WRITE_FIRST,
        Opcode::RC_READ_REQUEST,
        Opcode::RC_COMPARE_SWAP,
        Opcode::RC_FETCH_ADD,
        Opcode::RC_FLUSH,
        Opcode::RC_ATOMIC_WRITE,
    ] {
        let needed = needed_access(opcode);
        let all = [
            Access::LOCAL_WRITE,
            Access::REMOTE_WRITE,
            Access::REMOTE_READ,
            Access::REMOTE_ATOMIC,
            Access::FLUSH_GLOBAL,
        ];
        let others = all.into_iter().filter(|a| *a != needed).fold(Access::NONE, |a, b| a | b);
        let touched = u64::from(length_of(opcode));
        let end = IOVA + LENGTH as u64;
        // Atomics are aligned, and the first one not completely inside ends 4 bytes after the end.
        let behind = if touched == 8 { end - 4 } else { end + 1 - touched };
        // How the request exceeds its rights.
        type Fault = (&'static str, Access, bool, u32, u64);
        let faults: [Fault; 8] = [
            ("without the right", others, false, 0, IOVA),
            (
                "read only",
                if needed == Access::REMOTE_READ { others } else { Access::REMOTE_READ },
                false,
                0,
                IOVA,
            ),
            ("in another PD", all_access(), true, 0, IOVA),
            ("rkey + 1", all_access(), false, 1, IOVA),
            ("rkey - 1", all_access(), false, u32::MAX, IOVA),
            ("over the end", all_access(), false, 0, behind),
            ("before the start", all_access(), false, 0, IOVA - 8),
            ("behind the end", all_access(), false, 0, end + 4),
        ];
        for (fault, access, foreign, key_offset, addr) in faults {
            let mut peer = Peer::new();
            let pd = if foreign { peer.context.alloc_pd().unwrap() } else { peer.pd };
            let memory = Memory::copy_of(&data).unwrap();
            let mr = peer.context.register_at(pd, memory, access, IOVA).unwrap();
            let rkey = RKey::new(peer.remote(mr).rkey.value().wrapping_add(key_offset));
            peer.inject(request(opcode, RQ, Target { mr, addr, rkey }));
            let situation = format!("{opcode} {fault}");
            assert_eq!(peer.bytes(mr), data, "{situation}");
            expect_refused(&mut peer, NAK_ACCESS, RQ, 0);
        }
        // They were valid otherwise.
        let mut peer = Peer::new();
        let mr =
            peer.context.register_at(peer.pd, Memory::copy_of(&data).unwrap(), all_access(), IOVA).unwrap();
        let rkey = peer.remote(mr).rkey;
        peer.inject(request(opcode, RQ, Target { mr, addr: IOVA, rkey }).ack_req());
        peer.expect_state(QpState::Rts);
        assert!(!peer.take_packets().is_empty(), "{opcode}");
    }
    // The very last byte may be accessed; and a region that is deregistered during a WRITE is not written any more.
    let (mut peer, Target { mr, rkey, .. }) = peer_with_memory(Setup::default());
    peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ).reth(1023, rkey, 1).payload(&[0xee]).ack_req());
    peer.expect_ack(RQ, 1);
    assert_eq!(peer.bytes(mr)[1022..], [pattern(1024)[1022], 0xee]);
    peer.inject(packet(Opcode::RC_WRITE_FIRST, RQ + 1).reth(0, rkey, 300).payload(&[1; 256]));
    let memory = peer.context.deregister(mr).unwrap();
    peer.inject(packet(Opcode::RC_WRITE_LAST, RQ + 2).payload(&[1; 44]));
    expect_refused(&mut peer, NAK_ACCESS, RQ + 2, 1);
    assert_eq!(memory.bytes().unwrap()[256..300], pattern(1024)[256..300]);
}

#[test]
fn case_072_addresses_near_2_to_the_64() {
    const TOP: u64 = 0xffff_ffff_ffff_fc00;
    for iova in [0, 0xffff_ffff_ffff_f000, TOP - 0x400] {
        for opcode in [Opcode::RC_WRITE_ONLY, Opcode::RC_READ_REQUEST, Opcode::RC_FLUSH] {
            let mut peer = Peer::with(Setup { mtu: PathMtu::Mtu1024, ..Setup::default() });
            let memory = Memory::copy_of(&pattern(0x400)).unwrap();
            let mr = peer.context.register_at(peer.pd, memory, all_access(), iova).unwrap();
            let target = Target { mr, addr: TOP, rkey: peer.remote(mr).rkey };
            let mut request = request_of(opcode, RQ, target, 0x400);
            if opcode == Opcode::RC_WRITE_ONLY {
                request = request.payload(&[0xee; 0x400]);
            }
            peer.inject(request);
            expect_refused(&mut peer, NAK_ACCESS, RQ, 0);
            assert_eq!(peer.bytes(mr), pattern(0x400));
        }
    }
    for addr in [0u64.wrapping_sub(8), u64::MAX - 0xff] {
        let (mut peer, target) = peer_with_memory(Setup::default());
        let opcode = if addr % 8 == 0 { Opcode::RC_FETCH_ADD } else { Opcode::RC_READ_REQUEST };
        peer.inject(request(opcode, RQ, Target { addr, ..target }));
        expect_refused(&mut peer, NAK_ACCESS, RQ, 0);
        assert_eq!(peer.bytes(target.mr), pattern(1024));
    }
}

#[test]
fn case_073_nothing_is_checked_for_nothing() {
    let bogus = RKey::new(0xdead_beef);
    let va = 0xffff_ffff_ffff_fff1;
    let mut peer = Peer::new();
    let only = Opcode::RC_READ_RESPONSE_ONLY;
    peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ).reth(va, bogus, 0).ack_req());
    peer.expect_ack(RQ, 1);
    let read = packet(Opcode::RC_READ_REQUEST, RQ + 1).reth(va, bogus, 0);
    peer.inject(read.clone());
    assert_eq!(peer.expect(only, RQ + 1).payload, []);
    // The response was lost.
    peer.inject(read);
    assert_eq!(peer.expect(only, RQ + 1).payload, []);
    peer.post_recv(1, 0);
    let write = packet(Opcode::RC_WRITE_ONLY_WITH_IMMEDIATE, RQ + 2).reth(va, bogus, 0).imm(7);
    peer.inject(write.ack_req());
    peer.expect_ack(RQ + 2, 3);
    assert_eq!(peer.expect_wc(1, Success).immediate, Some(7));

    // FLUSH is always checked.
    let (mut peer, Target { mr: _, addr, rkey }) = peer_with_memory(Setup::default());
    peer.inject(packet(Opcode::RC_FLUSH, RQ).feth(global_range()).reth(addr, rkey, 0));
    assert_eq!(peer.expect(only, RQ).payload, []);
    peer.inject(packet(Opcode::RC_FLUSH, RQ + 1).feth(global_range()).reth(addr, bogus, 0));
    expect_refused(&mut peer, NAK_ACCESS, RQ + 1, 1);
}

#[test]
fn case_074_operations_that_the_queue_pair_does_not_allow() {
    for opcode in requests() {
        let needed = needed_access(opcode);
        if needed == Access::NONE || matches!(opcode.position(), Position::Middle | Position::Last) {
            continue;
        }
        let all = [
            Access::LOCAL_WRITE,
            Access::REMOTE_WRITE,
            Access::REMOTE_READ,
            Access::REMOTE_ATOMIC,
            Access::FLUSH_GLOBAL,
            Access::REMOTE_INVALIDATE,
        ];
        let access = all.into_iter().filter(|a| *a != needed).fold(Access::NONE, |a, b| a | b);
        let (mut peer, target) = peer_with_memory(Setup { access, ..Setup::default() });
        peer.inject(request(opcode, RQ, target));
        assert_eq!(peer.bytes(target.mr), pattern(1024), "{opcode}");
        expect_refused(&mut peer, NAK_INVALID, RQ, 0);
    }
    // SEND needs none.
    let (mut peer, _) = peer_with_memory(Setup { access: Access::NONE, ..Setup::default() });
    peer.post_recv(1, 8);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);
}

#[test]
fn case_075_atomics_that_are_not_aligned() {
    for opcode in [Opcode::RC_FETCH_ADD, Opcode::RC_COMPARE_SWAP] {
        for addr in [4, 1, 2, 7, 12, 1020] {
            let (mut peer, target) = peer_with_memory(Setup::default());
            peer.inject(request(opcode, RQ, Target { addr, ..target }));
            expect_refused(&mut peer, NAK_INVALID, RQ, 0);
            assert_eq!(peer.bytes(target.mr), pattern(1024));
        }
    }
}

/// The memory of a request.
#[derive(Clone, Copy)]
struct Target {
    mr: Mr,
    addr: u64,
    rkey: RKey,
}

/// A peer, and 1024 bytes that it may access in every way.
fn peer_with_memory(setup: Setup) -> (Peer, Target) {
    let mut peer = Peer::with(setup);
    let mr = peer.memory(&pattern(1024));
    let remote = peer.remote(mr);
    (peer, Target { mr, addr: remote.addr, rkey: remote.rkey })
}

/// All requests of the service.
fn requests() -> impl Iterator<Item = Opcode> {
    (0..0x20).filter_map(Opcode::from_byte).filter(|opcode| opcode.is_request())
}

/// A request that is valid by itself.
fn request(opcode: Opcode, psn: u32, target: Target) -> Script {
    request_of(opcode, psn, target, length_of(opcode))
}

/// The same, with another length in its RETH.
fn request_of(opcode: Opcode, psn: u32, Target { addr, rkey, .. }: Target, length: u32) -> Script {
    let payload = match (opcode.operation(), opcode.position()) {
        (_, Position::First | Position::Middle) => 256,
        (Operation::Send | Operation::Write | Operation::AtomicWrite, _) => 8,
        _ => 0,
    };
    opcode.extensions().iter().fold(packet(opcode, psn).payload(&vec![0xee; payload]), |packet, extension| {
        match extension {
            Extension::Reth => packet.reth(addr, rkey, length),
            Extension::AtomicEth => packet.atomic_eth(addr, rkey, 1, 0),
            Extension::ImmDt => packet.imm(1),
            Extension::Ieth => packet.ieth(rkey),
            Extension::Feth => packet.feth(global_range()),
            _ => panic!("no request has {extension:?}"),
        }
    })
}

/// The bytes that such a request accesses.
fn length_of(opcode: Opcode) -> u32 {
    match (opcode.operation(), opcode.position()) {
        (Operation::Write, Position::First) => 264,
        (Operation::ReadRequest, _) => 300,
        _ => 8,
    }
}

fn needed_access(opcode: Opcode) -> Access {
    match opcode.operation() {
        Operation::Write | Operation::AtomicWrite => Access::REMOTE_WRITE,
        Operation::ReadRequest => Access::REMOTE_READ,
        Operation::CompareSwap | Operation::FetchAdd => Access::REMOTE_ATOMIC,
        Operation::Flush => Access::FLUSH_GLOBAL,
        _ => Access::NONE,
    }
}

fn global_range() -> Feth {
    Feth::new(Selectivity::Range, FlushType { global_visibility: true, persistence: false })
}

/// The request was refused without a current receive: a NAK, an event, and the end.
#[track_caller]
fn expect_refused(peer: &mut Peer, syndrome: u8, psn: u32, msn: u32) {
    peer.expect_nak(syndrome, psn, msn);
    peer.expect_nothing();
    peer.expect_state(QpState::Error);
    let qp = peer.qp;
    peer.expect_event(if syndrome == NAK_ACCESS { Event::QpAccessErr(qp) } else { Event::QpReqErr(qp) });
    peer.expect_no_event();
}

/// The SEND was refused with its receive in error.
#[track_caller]
fn expect_send_refused(peer: &mut Peer, psn: u32) {
    peer.expect_nak(NAK_INVALID, psn, 0);
    peer.expect_state(QpState::Error);
    peer.expect_wc(1, RemInvReqErr);
    peer.expect_no_event();
}
