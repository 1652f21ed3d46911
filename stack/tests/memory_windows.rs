//! Memory windows of type 2B: bind, use, invalidate, and every refusal.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::{HashSet, VecDeque};

use ferroce::WcStatus::{LocProtErr, MwBindErr, RemInvReqErr, Success, WrFlushErr};
use ferroce::wire::{Feth, Opcode};
use ferroce::*;
use ferroce_test_support::packet::{NAK_ACCESS, Script, ack, packet, payload};
use ferroce_test_support::peer::{Peer, RQ, SQ, Setup, all_access, pattern, sge};

/// The peers' address of the region's start.
const IOVA: u64 = 0x1_0000;
/// The window: these bytes of the region.
const OFFSET: u64 = 256;
const LENGTH: u64 = 512;
/// The same, as the peer's address.
const START: u64 = IOVA + OFFSET;

/// The rights of most binds here.
fn read_write() -> Access {
    Access::REMOTE_READ | Access::REMOTE_WRITE
}

/// A bind before it is posted.
#[derive(Clone, Copy)]
struct Bind {
    mw: Mw,
    mr: Mr,
    offset: u64,
    length: u64,
    access: Access,
}

impl Bind {
    fn op(self) -> SendOp {
        let Bind { mw, mr, offset, length, access } = self;
        SendOp::BindMw { mw, mr, offset, length, access }
    }
}

/// A queue pair with a region of 1024 bytes, which a peer can only access by a window.
struct Windowed {
    peer: Peer,
    mr: Mr,
    mw: Mw,
    /// The PSN of the peer's next request.
    psn: u32,
}

impl Windowed {
    fn new() -> Windowed {
        Windowed::over(Access::LOCAL_WRITE | Access::MW_BIND)
    }

    /// On an unreliable connection.
    fn unreliable() -> Windowed {
        Windowed::of(Setup { qp_type: QpType::Uc, ..Setup::default() }, Access::LOCAL_WRITE | Access::MW_BIND)
    }

    /// With a region with these rights.
    fn over(access: Access) -> Windowed {
        Windowed::of(Setup::default(), access)
    }

    fn of(setup: Setup, access: Access) -> Windowed {
        let mut peer = Peer::with(setup);
        let memory = Memory::copy_of(&pattern(1024)).unwrap();
        let mr = peer.context.register_at(peer.pd, memory, access, IOVA).unwrap();
        let mw = peer.context.alloc_mw(peer.pd).unwrap();
        Windowed { peer, mr, mw, psn: RQ }
    }

    /// With the window bound.
    fn bound(access: Access) -> (Windowed, RKey) {
        let mut windowed = Windowed::new();
        let rkey = windowed.bind(access);
        (windowed, rkey)
    }

    fn bind_of(&self, access: Access) -> Bind {
        Bind { mw: self.mw, mr: self.mr, offset: OFFSET, length: LENGTH, access }
    }

    fn op(&self, access: Access) -> SendOp {
        self.bind_of(access).op()
    }

    #[track_caller]
    fn bind(&mut self, access: Access) -> RKey {
        self.peer.post(1, self.op(access), &[]);
        let wc = self.peer.expect_wc(1, Success);
        assert_eq!(wc.opcode, WcOpcode::BindMw);
        self.remote().expect("it is bound").rkey
    }

    fn remote(&self) -> Option<RemoteMemory> {
        self.peer.context.remote_window(self.mw).unwrap()
    }

    /// The peer's request is executed.
    #[track_caller]
    fn admit(&mut self, request: fn(u32, u64, RKey, u32) -> Script, va: u64, rkey: RKey, length: u32) {
        self.peer.inject(request(self.psn, va, rkey, length));
        let got = self.peer.take_packets();
        let aeth = got.first().and_then(|got| got.extensions.aeth).map(|aeth| aeth.syndrome_byte());
        assert_eq!(aeth, Some(wire::Syndrome::ACK.byte()), "{}", got[0]);
        self.psn += got.len() as u32;
    }

    /// The peer's request is refused, and nothing has changed.
    #[track_caller]
    fn refuse(&mut self, request: Script, msn: u32) {
        let before = self.peer.bytes(self.mr).to_vec();
        self.peer.inject(request);
        self.peer.expect_nak(NAK_ACCESS, self.psn, msn);
        self.peer.expect_event(Event::QpAccessErr(self.peer.qp));
        self.peer.expect_state(QpState::Error);
        assert!(self.peer.bytes(self.mr) == before);
    }

    /// The peer continues with a second queue pair, in the same protection domain.
    fn turn_to_another_qp(&mut self) {
        self.peer.qp = self.peer.another_qp(&Setup::default());
        self.peer.qpn = self.peer.query().qpn;
        self.psn = RQ;
    }
}

fn read(psn: u32, va: u64, rkey: RKey, length: u32) -> Script {
    packet(Opcode::RC_READ_REQUEST, psn).reth(va, rkey, length)
}

/// A WRITE of one packet.
fn write(psn: u32, va: u64, rkey: RKey, length: u32) -> Script {
    packet(Opcode::RC_WRITE_ONLY, psn).reth(va, rkey, length).payload(&vec![0xee; length as usize]).ack_req()
}

fn fetch_add(psn: u32, va: u64, rkey: RKey, _: u32) -> Script {
    packet(Opcode::RC_FETCH_ADD, psn).atomic_eth(va, rkey, 1, 0)
}

fn atomic_write(psn: u32, va: u64, rkey: RKey, _: u32) -> Script {
    packet(Opcode::RC_ATOMIC_WRITE, psn).reth(va, rkey, 8).payload(&[0xee; 8])
}

fn flush(psn: u32, va: u64, rkey: RKey, length: u32) -> Script {
    let visible = FlushType { global_visibility: true, persistence: false };
    packet(Opcode::RC_FLUSH, psn).feth(Feth::new(Selectivity::Range, visible)).reth(va, rkey, length)
}

fn invalidate(psn: u32, rkey: RKey) -> Script {
    packet(Opcode::RC_SEND_ONLY_WITH_INVALIDATE, psn).ieth(rkey).ack_req()
}

#[test]
fn a_window_grants_its_range_under_its_own_key() {
    let mut windowed = Windowed::new();
    assert_eq!(windowed.remote(), None);
    let rkey = windowed.bind(read_write());
    let remote = RemoteMemory::new(START, rkey, LENGTH);
    assert_eq!(windowed.remote(), Some(remote));
    assert_ne!(rkey, windowed.peer.remote(windowed.mr).rkey);

    windowed.peer.inject(read(RQ, START, rkey, LENGTH as u32));
    assert_eq!(payload(&windowed.peer.take_packets()), pattern(1024)[256..768]);
    windowed.psn += 2;
    windowed.admit(write, START + LENGTH - 1, rkey, 1);
    windowed.admit(write, START, rkey, 2);
    let mut expected = pattern(1024);
    expected[767] = 0xee;
    expected[256..258].fill(0xee);
    assert!(windowed.peer.bytes(windowed.mr) == expected);
    // The region's own key grants only what the region grants: nothing.
    let own = windowed.peer.remote(windowed.mr).rkey;
    windowed.refuse(read(windowed.psn, START, own, 1), 3);
}

/// Outside of the window there is no access, although the region is longer.
#[test]
fn a_window_ends_before_the_region_does() {
    let access = read_write() | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
    let requests = [read, write, fetch_add, atomic_write, flush];
    for request in requests {
        let (mut windowed, rkey) = Windowed::bound(access);
        windowed.admit(request, START, rkey, 8);
        windowed.admit(request, START + LENGTH - 8, rkey, 8);
        windowed.peer.take_packets();
        for va in [START - 8, START + LENGTH, IOVA, IOVA + 1016, 0, START.wrapping_neg()] {
            let (mut windowed, rkey) = Windowed::bound(access);
            windowed.refuse(request(windowed.psn, va, rkey, 8), 0);
        }
    }
    for request in [read, write, flush] {
        for (va, length) in [(START - 1, 8), (START + LENGTH - 7, 8), (START + LENGTH, 1), (u64::MAX, 8)] {
            let (mut windowed, rkey) = Windowed::bound(access);
            windowed.refuse(request(windowed.psn, va, rkey, length), 0);
        }
    }
}

/// Rights that the bind does not grant are refused, whatever the queue pair and the region grant.
#[test]
fn a_window_grants_the_rights_of_its_bind() {
    let requests = [
        (read as fn(_, _, _, _) -> _, Access::REMOTE_READ),
        (write, Access::REMOTE_WRITE),
        (fetch_add, Access::REMOTE_ATOMIC),
        (atomic_write, Access::REMOTE_WRITE),
        (flush, Access::FLUSH_GLOBAL),
    ];
    for (request, needed) in requests {
        for (_, granted) in requests {
            let mut windowed = Windowed::over(all_access());
            let rkey = windowed.bind(granted);
            if granted == needed {
                windowed.admit(request, START, rkey, 8);
            } else {
                windowed.refuse(request(RQ, START, rkey, 8), 0);
            }
        }
    }
}

#[test]
fn a_window_belongs_to_the_queue_pair_that_bound_it() {
    for request in [read, write] {
        let (mut windowed, rkey) = Windowed::bound(read_write());
        let (first, first_qpn) = (windowed.peer.qp, windowed.peer.qpn);
        windowed.turn_to_another_qp();
        windowed.refuse(request(RQ, START, rkey, 8), 0);
        // The owner continues.
        (windowed.peer.qp, windowed.peer.qpn) = (first, first_qpn);
        windowed.admit(request, START, rkey, 8);
    }
    // Nor may others invalidate it: neither the peer ...
    let (mut windowed, rkey) = Windowed::bound(read_write());
    windowed.turn_to_another_qp();
    windowed.peer.post_recv(2, 8);
    windowed.peer.inject(invalidate(RQ, rkey));
    windowed.peer.expect_wc(2, RemInvReqErr);
    windowed.peer.expect_nak(NAK_ACCESS, RQ, 0);
    assert_eq!(windowed.remote().unwrap().rkey, rkey);
    // ... nor the application.
    windowed.turn_to_another_qp();
    windowed.peer.post(3, SendOp::LocalInvalidate(rkey), &[]);
    windowed.peer.expect_wc(3, LocProtErr);
    assert_eq!(windowed.remote().unwrap().rkey, rkey);
}

#[test]
fn an_invalidated_window_is_closed_and_may_be_bound_again() {
    for by_peer in [false, true] {
        let (mut windowed, old) = Windowed::bound(read_write());
        windowed.admit(read, START, old, 300);
        let mut msn = 1;
        if by_peer {
            windowed.peer.post_recv(2, 8);
            windowed.peer.inject(invalidate(windowed.psn, old));
            assert_eq!(windowed.peer.expect_wc(2, Success).invalidated, Some(old));
            windowed.peer.expect_ack(windowed.psn, 2);
            windowed.psn += 1;
            msn += 1;
        } else {
            windowed.peer.post(2, SendOp::LocalInvalidate(old), &[]);
            assert_eq!(windowed.peer.expect_wc(2, Success).opcode, WcOpcode::LocalInv);
        }
        assert_eq!(windowed.remote(), None);
        // Not even for a READ that was permitted before.
        windowed.peer.inject(read(RQ, START, old, 300));
        windowed.peer.expect_nothing();
        let new = windowed.bind(read_write());
        assert_ne!(new, old);
        windowed.admit(read, START, new, 8);
        windowed.refuse(write(windowed.psn, START, old, 8), msn + 1);
    }
}

/// Invalidates a window twice, and a key that never existed.
#[test]
fn an_invalid_key_can_not_be_invalidated() {
    for bogus in [false, true] {
        let (mut windowed, rkey) = Windowed::bound(read_write());
        windowed.peer.post(2, SendOp::LocalInvalidate(rkey), &[]);
        windowed.peer.expect_wc(2, Success);
        let rkey = if bogus { RKey::new(!rkey.value()) } else { rkey };
        windowed.peer.post(3, SendOp::LocalInvalidate(rkey), &[]);
        windowed.peer.expect_wc(3, LocProtErr);
        windowed.peer.expect_state(QpState::Error);
    }
}

/// Every bind that violates a rule, and the same one without the violation.
#[test]
fn a_bind_that_breaks_a_rule_fails() {
    type Change = fn(&mut Windowed, &mut Bind);
    let faults: [(&str, bool, Change); 14] = [
        ("none", true, |_, _| {}),
        ("to the end of the region", true, |_, bind| bind.length = 1024 - OFFSET),
        ("of no right at all", true, |_, bind| bind.access = Access::NONE),
        ("past the end", false, |_, bind| bind.length = 1025 - OFFSET),
        ("behind the end", false, |_, bind| bind.offset = 1024),
        ("past 2^64", false, |_, bind| (bind.offset, bind.length) = (u64::MAX - 7, 16)),
        ("window of another PD", false, |windowed, bind| {
            let pd = windowed.peer.context.alloc_pd().unwrap();
            bind.mw = windowed.peer.context.alloc_mw(pd).unwrap();
        }),
        ("region of another PD", false, |windowed, bind| {
            let pd = windowed.peer.context.alloc_pd().unwrap();
            let memory = Memory::zeroed(1024).unwrap();
            bind.mr = windowed.peer.context.register(pd, memory, all_access()).unwrap();
        }),
        ("region without MW_BIND", false, |windowed, bind| {
            let access = read_write() | Access::LOCAL_WRITE;
            bind.mr = windowed.peer.memory_with(&[0; 1024], access);
        }),
        ("WRITE without LOCAL_WRITE", false, |windowed, bind| {
            bind.mr = windowed.peer.memory_with(&[0; 1024], Access::MW_BIND);
        }),
        ("atomics without LOCAL_WRITE", false, |windowed, bind| {
            bind.mr = windowed.peer.memory_with(&[0; 1024], Access::MW_BIND);
            bind.access = Access::REMOTE_ATOMIC;
        }),
        ("READ without LOCAL_WRITE", true, |windowed, bind| {
            bind.mr = windowed.peer.memory_with(&[0; 1024], Access::MW_BIND);
            bind.access = Access::REMOTE_READ;
        }),
        ("bound already", false, |windowed, _| {
            windowed.bind(read_write());
        }),
        ("revoked region", false, |windowed, _| {
            let rkey = windowed.peer.remote(windowed.mr).rkey;
            windowed.peer.post(9, SendOp::LocalInvalidate(rkey), &[]);
            windowed.peer.expect_wc(9, Success);
        }),
    ];
    for (name, allowed, change) in faults {
        println!("{name}");
        let mut windowed = Windowed::new();
        let mut bind = windowed.bind_of(read_write());
        change(&mut windowed, &mut bind);
        let before = windowed.peer.context.remote_window(bind.mw).unwrap();
        windowed.peer.post(2, bind.op(), &[]);
        windowed.peer.expect_wc(2, if allowed { Success } else { MwBindErr });
        windowed.peer.expect_state(if allowed { QpState::Rts } else { QpState::Error });
        let after = windowed.peer.context.remote_window(bind.mw).unwrap();
        assert_eq!((after.is_some(), after == before), (allowed || before.is_some(), !allowed));
    }
}

/// A certain error is refused when it is posted.
#[test]
fn an_invalid_bind_is_not_posted() {
    let mut windowed = Windowed::new();
    let bind = windowed.bind_of(read_write());
    let (mr, mw) = (windowed.mr, windowed.mw);
    let (gone_mr, gone_mw) =
        (windowed.peer.memory(&[0; 8]), windowed.peer.context.alloc_mw(windowed.peer.pd));
    let gone_mw = gone_mw.unwrap();
    windowed.peer.context.deregister(gone_mr).unwrap();
    windowed.peer.context.dealloc_mw(gone_mw).unwrap();
    let qp = windowed.peer.qp;
    let mut refusal = |bind: Bind, data: &[Sge]| {
        let (op, data, flags) = (bind.op(), Data::Sges(data), SendFlags::SIGNALED);
        let wr = SendWorkRequest { wr_id: 2, op, data, flags };
        windowed.peer.context.post_send(qp, &wr).unwrap_err()
    };
    for access in [Access::LOCAL_WRITE, Access::MW_BIND, Access::REMOTE_INVALIDATE, Access::FLUSH_PERSISTENT]
    {
        assert!(matches!(refusal(Bind { access, ..bind }, &[]), Error::Access { .. }), "{access:?}");
    }
    let refused = refusal(Bind { length: 0, ..bind }, &[]);
    assert!(matches!(refused, Error::Invalid { attribute: "length of the window", .. }), "{refused}");
    for bind in [Bind { mw: gone_mw, mr, ..bind }, Bind { mr: gone_mr, mw, ..bind }] {
        assert!(matches!(refusal(bind, &[]), Error::InvalidHandle { .. }));
    }
    assert!(matches!(refusal(bind, &[sge(mr, 8)]), Error::Invalid { attribute: "length", .. }));
}

/// A bind waits for all earlier work requests, and later ones wait for it.
#[test]
fn a_bind_is_executed_in_order() {
    let mut windowed = Windowed::new();
    windowed.peer.post_write(11, b"before");
    windowed.peer.post(12, windowed.op(read_write()), &[]);
    windowed.peer.post_write(13, b"behind");
    windowed.peer.expect(Opcode::RC_WRITE_ONLY, SQ);
    windowed.peer.expect_nothing();
    assert_eq!(windowed.remote(), None);
    windowed.peer.inject(ack(SQ, 1));
    windowed.peer.expect_wc(11, Success);
    windowed.peer.expect_wc(12, Success);
    assert!(windowed.remote().is_some());
    // It used no PSN.
    windowed.peer.expect(Opcode::RC_WRITE_ONLY, SQ + 1);
    windowed.peer.inject(ack(SQ + 1, 2));
    windowed.peer.expect_wc(13, Success);
}

/// A bind checks its window and region when its turn comes.
#[test]
fn objects_destroyed_before_a_bind_are_not_bound() {
    for window in [false, true] {
        let mut windowed = Windowed::new();
        windowed.peer.post_write(11, b"before");
        windowed.peer.post(12, windowed.op(read_write()), &[]);
        windowed.peer.post_write(13, b"behind");
        windowed.peer.expect(Opcode::RC_WRITE_ONLY, SQ);
        if window {
            windowed.peer.context.dealloc_mw(windowed.mw).unwrap();
        } else {
            windowed.peer.context.deregister(windowed.mr).unwrap();
        }
        windowed.peer.inject(ack(SQ, 1));
        windowed.peer.expect_wc(11, Success);
        windowed.peer.expect_wc(12, MwBindErr);
        windowed.peer.expect_wc(13, WrFlushErr);
    }
}

#[test]
fn a_region_with_a_window_stays() {
    let (mut windowed, rkey) = Windowed::bound(read_write());
    let (mr, mw, pd) = (windowed.mr, windowed.mw, windowed.peer.pd);
    let refused = windowed.peer.context.deregister(mr).unwrap_err();
    assert!(matches!(&refused, Error::Busy { users, .. } if users.contains("1 bound")), "{refused}");
    // Nor can the key of a region with a window be revoked.
    let own = windowed.peer.remote(mr).rkey;
    windowed.peer.post(2, SendOp::LocalInvalidate(own), &[]);
    windowed.peer.expect_wc(2, LocProtErr);
    // That has failed the queue pair; the window stays bound, and still holds the region.
    assert_eq!(windowed.remote().unwrap().rkey, rkey);
    assert!(matches!(windowed.peer.context.deregister(mr), Err(Error::Busy { .. })));
    windowed.peer.context.dealloc_mw(mw).unwrap();
    assert!(matches!(windowed.peer.context.remote_window(mw), Err(Error::InvalidHandle { .. })));
    windowed.peer.context.deregister(mr).unwrap();
    // A protection domain with a window can't be freed.
    windowed.peer.context.destroy_qp(windowed.peer.qp).unwrap();
    let mw = windowed.peer.context.alloc_mw(pd).unwrap();
    assert!(matches!(windowed.peer.context.dealloc_pd(pd), Err(Error::Busy { .. })));
    windowed.peer.context.dealloc_mw(mw).unwrap();
    windowed.peer.context.dealloc_pd(pd).unwrap();
}

/// A peer can't revoke the key of a region that has windows.
#[test]
fn a_peer_does_not_invalidate_a_region_under_its_window() {
    let mut windowed = Windowed::new();
    windowed.mr = windowed.peer.memory(&pattern(1024));
    windowed.bind(read_write());
    let own = windowed.peer.remote(windowed.mr).rkey;
    windowed.peer.post_recv(2, 8);
    windowed.peer.inject(invalidate(RQ, own));
    windowed.peer.expect_wc(2, RemInvReqErr);
    windowed.peer.expect_nak(NAK_ACCESS, RQ, 0);
}

/// RESET and the end of a queue pair unbind its windows, and only those; ERR leaves them, because no request is executed
/// any more.
#[test]
fn the_windows_of_a_queue_pair_end_with_it() {
    for destroy in [false, true] {
        let (mut windowed, _) = Windowed::bound(read_write());
        let (first, first_mw) = (windowed.peer.qp, windowed.mw);
        windowed.turn_to_another_qp();
        windowed.mw = windowed.peer.context.alloc_mw(windowed.peer.pd).unwrap();
        let rkey = windowed.bind(read_write());
        let context = &mut windowed.peer.context;
        context.modify_qp(first, Transition::Error).unwrap();
        assert!(context.remote_window(first_mw).unwrap().is_some());
        if destroy {
            context.destroy_qp(first).unwrap();
        } else {
            context.modify_qp(first, Transition::Reset).unwrap();
        }
        assert_eq!(context.remote_window(first_mw).unwrap(), None);
        windowed.admit(read, START, rkey, 8);
        // It may be bound again.
        windowed.mw = first_mw;
        windowed.bind(read_write());
    }
}

/// A READ is checked again for each packet: bytes that the window no longer grants are not sent.
#[test]
fn invalidating_a_window_stops_a_read_in_progress() {
    for by_peer in [false, true] {
        let (mut windowed, rkey) = Windowed::bound(read_write());
        windowed.peer.post_recv(2, 8);
        windowed.peer.take_at_most(1);
        windowed.peer.inject(read(RQ, START, rkey, LENGTH as u32));
        windowed.peer.expect(Opcode::RC_READ_RESPONSE_FIRST, RQ);
        let mut msn = 1;
        if by_peer {
            windowed.peer.inject(invalidate(RQ + 2, rkey));
            windowed.peer.expect_wc(2, Success);
            msn += 1;
        } else {
            windowed.peer.context.dealloc_mw(windowed.mw).unwrap();
        }
        windowed.peer.take_at_most(usize::MAX);
        windowed.peer.expect_nak(NAK_ACCESS, RQ + 1, msn);
        if !by_peer {
            windowed.peer.expect_wc(2, WrFlushErr);
        }
        windowed.peer.expect_event(Event::QpAccessErr(windowed.peer.qp));
    }
}

#[test]
fn invalidating_a_window_stops_a_write_in_progress() {
    let (mut windowed, rkey) = Windowed::bound(read_write());
    let first = packet(Opcode::RC_WRITE_FIRST, RQ).reth(START, rkey, LENGTH as u32).payload(&[0xee; 256]);
    windowed.peer.inject(first);
    windowed.peer.context.dealloc_mw(windowed.mw).unwrap();
    windowed.psn = RQ + 1;
    windowed.refuse(packet(Opcode::RC_WRITE_LAST, RQ + 1).payload(&[0xee; 256]).ack_req(), 0);
    assert_eq!(windowed.peer.bytes(windowed.mr)[512..], pattern(1024)[512..]);
}

/// An unreliable connection has windows too. Requests outside of them are dropped, and a failed bind only stops the sends.
#[test]
fn windows_on_an_unreliable_connection() {
    let mut windowed = Windowed::unreliable();
    let rkey = windowed.bind(read_write());
    let write = |psn, va, value| packet(Opcode::UC_WRITE_ONLY, psn).reth(va, rkey, 8).payload(&[value; 8]);
    windowed.peer.inject_all([
        write(RQ, START - 1, 1),
        write(RQ + 1, START, 2),
        write(RQ + 2, START + LENGTH, 3),
    ]);
    let mut expected = pattern(1024);
    expected[256..264].fill(2);
    assert!(windowed.peer.bytes(windowed.mr) == expected);
    windowed.peer.post(2, SendOp::LocalInvalidate(rkey), &[]);
    windowed.peer.expect_wc(2, Success);
    windowed.peer.inject(write(RQ + 3, START, 4));
    assert!(windowed.peer.bytes(windowed.mr) == expected);
    windowed.bind(read_write());
    windowed.peer.post(3, windowed.op(read_write()), &[]);
    windowed.peer.expect_wc(3, MwBindErr);
    windowed.peer.expect_state(QpState::Sqe);
}

#[test]
fn datagrams_have_no_windows() {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let mut windowed = Windowed::of(Setup { qp_type: QpType::Ud, ..Setup::default() }, access);
    let (op, data, flags) = (windowed.op(read_write()), Data::Sges(&[]), SendFlags::SIGNALED);
    let wr = SendWorkRequest { wr_id: 1, op, data, flags };
    let refused = windowed.peer.context.post_send(windowed.peer.qp, &wr).unwrap_err();
    assert!(matches!(refused, Error::Invalid { attribute: "op", .. }), "{refused}");
}

/// A retired key is reused late, if ever: not among the next 4096.
#[test]
fn keys_of_windows_are_reused_late() {
    let mut windowed = Windowed::new();
    let mut recent = VecDeque::new();
    let mut known = HashSet::new();
    for _ in 0..10_000 {
        let rkey = windowed.bind(read_write());
        assert!(known.insert(rkey), "{rkey} came back early");
        recent.push_back(rkey);
        windowed.peer.post(2, SendOp::LocalInvalidate(rkey), &[]);
        windowed.peer.expect_wc(2, Success);
        if recent.len() > 4096 {
            known.remove(&recent.pop_front().unwrap());
        }
    }
}

#[test]
fn windows_are_as_many_as_configured() {
    let (port, _) = driver::loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let config = Config::default().max_mws(2);
    let mut context = Context::open(Box::new(port), &config).unwrap();
    assert_eq!(context.query_device().max_mw, 2);
    assert!(context.query_device().mem_window_type_2b);
    let pd = context.alloc_pd().unwrap();
    let windows = [(); 2].map(|()| context.alloc_mw(pd).unwrap());
    let refused = context.alloc_mw(pd).unwrap_err();
    assert!(matches!(refused, Error::Exhausted { setting: "max_mws", .. }), "{refused}");
    context.dealloc_mw(windows[0]).unwrap();
    context.alloc_mw(pd).unwrap();
    assert!(matches!(context.dealloc_mw(windows[0]), Err(Error::InvalidHandle { .. })));
}
