//! Section J: device memory, whose copies end later. Acknowledged or completed data must be there.

use std::time::Duration;

use ferroce::driver::gpu::Device;
use ferroce::driver::gpu::strict::Strict;
use ferroce::wire::{Opcode, Syndrome};
use ferroce::{Access, Mr, QpState, ReceiveWorkRequest, SendOp, Sge, WcStatus, WorkCompletion};

use crate::packet::{Got, ack, packet, read_response};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, pattern, sge};

/// Memory of a device with this behaviour: copies end immediately or late.
fn device_memory(peer: &mut Peer, strict: &Strict) -> Mr {
    let memory = strict.clone().open().unwrap().allocate(4096).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    peer.context.register(peer.pd, memory, access).unwrap()
}

fn late() -> Strict {
    Strict::default().latest(Duration::from_millis(5))
}

fn bytes(peer: &Peer, mr: Mr, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    peer.context.read(mr, offset, &mut bytes).unwrap();
    bytes
}

/// The packets and completions of the engine.
#[derive(Default)]
struct Told {
    packets: Vec<Got>,
    completions: Vec<WorkCompletion>,
}

/// Advances time until `is_enough` returns true. After each packet or completion it sees the current bytes.
fn until(peer: &mut Peer, mut is_enough: impl FnMut(&Peer, &Told) -> bool) -> Told {
    let mut told = Told::default();
    for _ in 0..2000 {
        peer.advance(Duration::from_micros(10));
        told.packets.extend(peer.take_packets());
        while let Some(completion) = peer.context.poll_cq(peer.cq).unwrap() {
            told.completions.push(completion);
        }
        if is_enough(peer, &told) {
            return told;
        }
    }
    let packets: Vec<String> = told.packets.iter().map(|packet| packet.to_string()).collect();
    panic!("not told in 20 ms; only {packets:?}, {:?}", told.completions);
}

/// Checks the only completion.
fn check_completion(told: &Told, wr_id: u64, status: WcStatus) {
    let completions: Vec<_> = told.completions.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(completions, [(wr_id, status)]);
}

#[test]
fn case_137_acknowledgements_follow_what_is_visible() {
    let data = pattern(600);
    // Alone; with a READ of it after it, and with one of other bytes, whose response acknowledges everything before it.
    for read_at in [None, Some(8), Some(2000)] {
        let mut peer = Peer::new();
        let mr = device_memory(&mut peer, &late());
        let remote = peer.remote(mr);
        let opcodes = [Opcode::RC_WRITE_FIRST, Opcode::RC_WRITE_MIDDLE, Opcode::RC_WRITE_LAST];
        for (number, (opcode, piece)) in (0..).zip(opcodes.into_iter().zip(data.chunks(256))) {
            let packet = packet(opcode, RQ + number).payload(piece);
            peer.arrive([match number {
                0 => packet.reth(remote.addr + 8, remote.rkey, 600),
                2 => packet.ack_req(),
                _ => packet,
            }]);
        }
        if let Some(at) = read_at {
            let read = packet(Opcode::RC_READ_REQUEST, RQ + 3).reth(remote.addr + at, remote.rkey, 200);
            peer.arrive([read]);
        }
        peer.poll();
        assert_ne!(bytes(&peer, mr, 8, 600), data, "it is visible at once: the device is not late");
        let last = RQ + 2 + u32::from(read_at.is_some());
        let told = until(&mut peer, |peer, Told { packets, .. }| {
            let is_there = bytes(peer, mr, 8, 600) == data;
            if let Some(packet) = packets.first() {
                assert!(is_there, "told before it is there: {packet}");
            }
            packets.iter().any(|packet| packet.psn() == last)
        });
        for packet in &told.packets {
            if packet.opcode == Opcode::RC_READ_RESPONSE_ONLY {
                let expected = if read_at == Some(8) { &data[..200] } else { &[0; 200] };
                assert_eq!(packet.payload, expected);
            }
            // The MSN includes the WRITE, and the READ.
            let (syndrome, msn) = aeth(packet);
            assert!(syndrome == Syndrome::ACK.byte() && (1..=2).contains(&msn), "{packet}");
        }
        peer.forget_allocations();
    }
}

/// Syndrome and MSN.
fn aeth(packet: &Got) -> (u8, u32) {
    packet.extensions.aeth.map(|aeth| (aeth.syndrome_byte(), aeth.msn())).unwrap()
}

#[test]
fn case_138_receives_complete_when_their_bytes_are_visible() {
    let mut peer = Peer::new();
    let mr = device_memory(&mut peer, &late());
    let data = pattern(200);
    let sges = [Sge { mr, offset: 100, length: 256 }];
    peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 7, sges: &sges }).unwrap();
    peer.arrive([packet(Opcode::RC_SEND_ONLY, RQ).payload(&data).ack_req()]);
    peer.poll();
    assert_ne!(bytes(&peer, mr, 100, 200), data, "it is visible at once: the device is not late");
    let told = until(&mut peer, |peer, Told { completions, .. }| {
        let is_there = bytes(peer, mr, 100, 200) == data;
        assert!(completions.is_empty() || is_there, "complete before it is there");
        !completions.is_empty()
    });
    check_completion(&told, 7, WcStatus::Success);
    assert_eq!(told.packets.iter().map(|p| p.opcode).collect::<Vec<_>>(), [Opcode::RC_ACKNOWLEDGE]);

    // So does a READ into such memory.
    peer.post(8, SendOp::Read(REMOTE), &[Sge { mr, offset: 1000, length: 200 }]);
    assert_eq!(peer.take_packets().len(), 1);
    peer.arrive([read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &data)]);
    peer.poll();
    let told = until(&mut peer, |peer, Told { completions, .. }| {
        let is_there = bytes(peer, mr, 1000, 200) == data;
        assert!(completions.is_empty() || is_there, "complete before it is there");
        !completions.is_empty()
    });
    check_completion(&told, 8, WcStatus::Success);
    peer.forget_allocations();
}

#[test]
fn case_139_a_copy_that_fails_ends_the_work_at_both_ends() {
    // Data to write: the peer gets a NAK for it, and nothing is acknowledged.
    let mut peer = Peer::new();
    let mr = device_memory(&mut peer, &Strict::default().fails_one_in(1));
    let remote = peer.remote(mr);
    let write = packet(Opcode::RC_WRITE_ONLY, RQ).payload(&[1; 64]);
    peer.inject(write.reth(remote.addr, remote.rkey, 64).ack_req());
    let told = until(&mut peer, |_, told| !told.packets.is_empty());
    assert_eq!(aeth(&told.packets[0]).0, 0x63, "a NAK of code 3, remote operational error");
    peer.expect_state(QpState::Error);
    while peer.context.next_event().is_some() {}
    peer.forget_allocations();

    // Data to send: nothing is sent, and the work request fails.
    let mut peer = Peer::new();
    let mr = device_memory(&mut peer, &Strict::default().fails_one_in(1));
    peer.post(9, SendOp::Write(REMOTE), &[sge(mr, 64)]);
    let told = until(&mut peer, |_, told| !told.completions.is_empty());
    check_completion(&told, 9, WcStatus::FatalErr);
    assert!(told.packets.is_empty());
    while peer.context.next_event().is_some() {}
    peer.forget_allocations();
}

/// After a queue pair's first use of device memory, nothing is allocated for it.
#[test]
fn staging_is_allocated_once() {
    let mut peer = Peer::new();
    let mr = device_memory(&mut peer, &Strict::default().latest(Duration::from_micros(50)));
    let remote = peer.remote(mr);
    for round in 0..50_u32 {
        let psn = RQ + 2 * round;
        let write = packet(Opcode::RC_WRITE_ONLY, psn).payload(&pattern(200)).ack_req();
        let read = packet(Opcode::RC_READ_REQUEST, psn + 1).reth(remote.addr, remote.rkey, 200);
        peer.inject(write.reth(remote.addr + u64::from(round), remote.rkey, 200));
        peer.inject(read);
        until(&mut peer, |_, told| {
            told.packets.iter().any(|packet| packet.opcode == Opcode::RC_READ_RESPONSE_ONLY)
        });
        peer.post(u64::from(round), SendOp::Write(REMOTE), &[sge(mr, 300)]);
        until(&mut peer, |_, told| told.packets.iter().any(|packet| packet.opcode.is_request()));
        peer.inject(ack(SQ + 2 * round + 1, round + 1));
        let told = until(&mut peer, |_, told| !told.completions.is_empty());
        check_completion(&told, round.into(), WcStatus::Success);
        if round == 0 {
            peer.forget_allocations();
        }
    }
}

/// Each time the peer requests another part of a READ, it gets that part, whether copies for its earlier requests are
/// outstanding or not.
#[test]
fn repeated_reads_get_the_requested_part() {
    let mut peer = Peer::new();
    let mr = device_memory(&mut peer, &Strict::default().latest(Duration::from_micros(50)));
    let (data, remote) = (pattern(1000), peer.remote(mr));
    peer.context.write(mr, 0, &data).unwrap();
    let read =
        |psn, from, len| packet(Opcode::RC_READ_REQUEST, RQ + psn).reth(remote.addr + from, remote.rkey, len);
    let answers = |peer: &mut Peer, count| -> Vec<(u32, Vec<u8>)> {
        let told = until(peer, |_, told| told.packets.len() == count);
        told.packets.iter().map(|packet| (packet.psn() - RQ, packet.payload.clone())).collect()
    };
    let whole = [(0, &data[..256]), (1, &data[256..512]), (2, &data[512..600])].map(|(n, b)| (n, b.to_vec()));
    peer.inject(read(0, 0, 600));
    assert_eq!(answers(&mut peer, 3), whole);
    peer.inject(read(3, 600, 256));
    assert_eq!(answers(&mut peer, 1), [(3, data[600..856].to_vec())]);
    for asked_before in [256, 512, 600] {
        // Copies are started for this, and for the READ after it.
        peer.inject(read(0, 0, asked_before));
        peer.inject(read(3, 600, 256));
        peer.inject(read(0, 0, 600));
        assert_eq!(answers(&mut peer, 4)[..3], whole, "{asked_before} bytes asked before");
    }
    peer.inject(read(0, 0, 600));
    peer.inject(read(1, 256, 256));
    assert_eq!(answers(&mut peer, 1), [(1, data[256..512].to_vec())]);
    peer.forget_allocations();
}

/// Peers that request much, and then less before they have it, leak no chunk.
#[test]
fn chunks_gathered_for_a_response_are_released() {
    let setup = Setup { config: |config| config.staging_chunks(4), ..Setup::default() };
    let mut peer = Peer::with(setup);
    let other = peer.another_qp(&setup);
    let other = peer.context.query_qp(other).unwrap().qpn;
    let memory =
        Strict::default().latest(Duration::from_millis(1)).open().unwrap().allocate(1 << 17).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let mr = peer.context.register(peer.pd, memory, access).unwrap();
    let remote = peer.remote(mr);
    let read = |len| packet(Opcode::RC_READ_REQUEST, RQ).reth(remote.addr, remote.rkey, len);
    peer.inject_all([read(1 << 17), read(1 << 17).dest_qpn(other)]);
    peer.poll();
    peer.inject_all([read(256), read(256).dest_qpn(other)]);
    until(&mut peer, |_, told| told.packets.len() == 2);
    let write = packet(Opcode::RC_WRITE_ONLY, RQ + 512).payload(&[1; 64]);
    peer.inject(write.reth(remote.addr, remote.rkey, 64).ack_req());
    let told = until(&mut peer, |_, told| !told.packets.is_empty());
    assert_eq!(told.packets[0].opcode, Opcode::RC_ACKNOWLEDGE, "{}", told.packets[0]);
    peer.forget_allocations();
}
