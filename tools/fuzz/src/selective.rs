//! A live queue pair with selective repeat, as requester and responder at once.
//!
//! Held packets and their execution are not modelled. The checked properties are weaker, and apply to any packets in
//! any order; see the README.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use ferroce::wire::{Opcode, Packet, Sack, Syndrome};
use ferroce::{
    Counter, Data, Psn, QpAttributes, QpState, QpType, SendOp, SendWorkRequest, Transition, WcStatus,
};
use ferroce_test_support::peer::PEER_QPN;

use crate::input::Input;
use crate::live::{Live, Piece, REGION, Setup};
use crate::packet::{self, Fields, Flags};

/// The most steps of an input that are executed.
const MAX_STEPS: usize = 128;
/// Bytes at both ends of each region that no request names.
const GUARD: usize = 64;
/// The place of data from READs and atomics; nothing else writes there.
const SINK: usize = 2;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let kind = input.u8();
    let room = [40, 3, 0, 40][usize::from(kind & 3)];
    let setup = Setup::read(&mut input);
    let setup = Setup {
        service: QpType::Rc,
        shared_receives: false,
        cq_capacity: 256,
        reorder_packets: Some(room),
        ..setup
    };
    let mut target = Target {
        live: Live::new(setup),
        sends: Default::default(),
        receives: Default::default(),
        next_wr_id: 0,
        next_psn: setup.sq_psn,
        came: Default::default(),
        mute: false,
    };
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        target.step(&mut input);
    }
    target.finish(kind & 4 == 0);
}

/// Initial inputs: name and bytes.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let start = |room: u8, psn: u8| vec![room, 0, 0, psn];
    let post = |kind: u8, offset: u16, length: u16| [&[0, kind, 0][..], &words(&[offset, length])].concat();
    let receive = || [&[3, 0][..], &words(&[64, 1024])].concat();
    let request = |opcode: u8, delta: u16, length: u16, payload: u16| {
        [&[4, opcode, Flags::ACK_REQ, 0][..], &words(&[delta, 128, length, payload]), &[1]].concat()
    };
    let right = |delta: u8| vec![9, 7, delta, 0, 0, 0xff, 0xff, 9];
    let sack = |delta: u8, from: u8, count: u8| vec![11, delta, 0, 0, from, count];
    let (advance, error, again) = (vec![13, 12], vec![14, 0], vec![14, 1]);
    // Three SENDs in reverse order, a WRITE of three packets in reverse order, a READ, an atomic.
    let early = [
        receive(),
        receive(),
        receive(),
        request(4, 2, 0, 64),
        request(4, 1, 0, 64),
        request(4, 0, 0, 64),
        request(8, 2, 768, 256),
        request(7, 1, 768, 256),
        request(6, 0, 768, 256),
        request(12, 1, 512, 0),
        request(20, 0, 8, 0),
        request(19, 1, 8, 0),
        request(12, 0, 512, 0),
    ];
    // The second and the last packet arrive first.
    let write = [post(3, 64, 1024), sack(0, 1, 1), sack(0, 1, 3), advance.clone(), right(3), right(3)];
    let read = [post(6, 64, 1024), right(1), right(2), right(2), right(0), right(0), right(3)];
    let atomics = [post(10, 64, 8), post(12, 128, 8), right(1), right(0), right(0), advance];
    let both = [&early[..], &read[..], &[error, again][..], &write[..], &atomics[..]].concat();
    let input = |start: Vec<u8>, steps: &[Vec<u8>]| [start, steps.concat()].concat();
    vec![
        ("early", input(start(0, 0), &early)),
        ("early-3", input(start(1, 1), &early)),
        ("early-0", input(start(2, 0), &early)),
        ("write", input(start(0, 1), &write)),
        ("read", input(start(0, 0), &read)),
        ("atomics", input(start(0, 1), &atomics)),
        ("both", input(start(4, 1), &both)),
    ]
}

fn words(words: &[u16]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A posted send WR.
struct Request {
    wr_id: u64,
    op: SendOp,
    signaled: bool,
    piece: Piece,
    first: Psn,
    packets: u32,
    /// Received packets of the response, and those that have changed memory, one bit each.
    came: u64,
    landed: u64,
}

impl Request {
    /// The index of a PSN among its packets.
    fn index(&self, psn: Psn) -> Option<u32> {
        u32::try_from(psn.distance(self.first)).ok().filter(|index| *index < self.packets)
    }
}

struct Target {
    live: Live,
    /// Posted and not observed complete, oldest first.
    sends: VecDeque<Request>,
    receives: VecDeque<u64>,
    next_wr_id: u64,
    next_psn: Psn,
    /// PSNs of all requests received on this connection.
    came: HashSet<u32>,
    /// The application has stopped the queue pair.
    mute: bool,
}

impl Target {
    fn step(&mut self, input: &mut Input<'_>) {
        let frame = match input.u8() & 15 {
            0..=2 => return self.post_send(input),
            3 => return self.post_receive(input),
            4..=8 => self.request(input),
            9 | 10 => self.response(input),
            11 => self.selective_acknowledge(input),
            12 => {
                self.live.change_room(input.u8());
                vec![]
            }
            13 => {
                self.live.advance(Duration::from_micros(1 << (input.u8() & 15)));
                vec![]
            }
            14 => return self.modify(input.u8()),
            _ => return self.poll_cq(),
        };
        self.turn(&frame);
        self.live.recycle(frame);
    }

    /// A piece outside the guards, in this place or in one without write access.
    fn piece(input: &mut Input<'_>, place: usize) -> Piece {
        let offset = GUARD + usize::from(input.u16()) % (REGION - 2 * GUARD);
        let length = usize::from(input.u16());
        Piece { place, offset, length: length.min(REGION - GUARD - offset) }
    }

    fn post_send(&mut self, input: &mut Input<'_>) {
        let (kind, choice) = (input.u8(), input.u8());
        let (op, flags) = self.live.read_send(kind, choice);
        let answer = packet::response_to(&op, 0, 0, self.live.setup.mtu);
        let place = if answer.is_none() { 0 } else { [SINK, SINK, SINK, 1][usize::from(choice & 3)] };
        let mut piece = Self::piece(input, place);
        match op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } | SendOp::AtomicWrite(_) => piece.length = 8,
            SendOp::LocalInvalidate(_) | SendOp::Flush { .. } => piece.length = 0,
            _ => {}
        }
        let sges = self.live.sges(&[piece]).expect("nothing is deregistered");
        let data = Data::Sges(if piece.length == 0 { &[] } else { &sges });
        let wr_id = self.next_wr_id;
        if self.live.context.post_send(self.live.qp, &SendWorkRequest { wr_id, op, data, flags }).is_ok() {
            self.next_wr_id += 1;
            let packets = match op {
                SendOp::LocalInvalidate(_) => 0,
                _ => self.live.setup.mtu.packets(piece.length as u32),
            };
            let (signaled, first) = (flags.signaled, self.next_psn);
            self.next_psn += packets;
            self.sends.push_back(Request { wr_id, op, signaled, piece, first, packets, came: 0, landed: 0 });
        }
        self.turn(&[]);
    }

    fn post_receive(&mut self, input: &mut Input<'_>) {
        let place = [0, 0, 0, 1, 3, 4, 0, 0][usize::from(input.u8() & 7)];
        let piece = Self::piece(input, place);
        if self.live.post_receive(self.next_wr_id, &[piece]) {
            self.receives.push_back(self.next_wr_id);
            self.next_wr_id += 1;
        }
        self.turn(&[]);
    }

    /// A request of the peer. It names bytes outside the guards, or beyond the region.
    fn request(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let opcode = packet::opcode(input.u8(), QpType::Rc);
        let (flags, key, delta) = (Flags(input.u8()), input.u8(), u32::from(input.u16()));
        let (offset, length, payload, fill) = (input.u16(), input.u16(), input.u16(), input.u8());
        let expected = self.live.query().rq_psn;
        let psn = match delta >> 12 {
            0..8 => expected + (delta & 0x3f),
            8..12 => expected + (delta & 0xfff) % 1101,
            12..15 => expected - (delta & 0xff),
            _ => expected + (1 << 23) - (delta & 3),
        };
        let offset = GUARD + usize::from(offset) % (REGION - 2 * GUARD - 8);
        let inner = (REGION - GUARD - offset) as u32;
        let length = match u32::from(length) {
            length if length <= inner => length,
            _ if key & 0x20 == 0 => inner,
            length => length.max(REGION as u32),
        };
        let fields = Fields {
            psn,
            va: self.live.address(key).wrapping_add(offset as u64) & !(u64::from(key >> 6 & 1) * 7),
            rkey: self.live.key(key),
            length,
            operand: u64::from(fill) * 0x0101_0101_0101_0101,
            payload: usize::from(payload) % 1101,
            fill,
            flags,
            ..Fields::default()
        };
        self.live.build(opcode, &fields)
    }

    /// The oldest outstanding PSN.
    fn oldest(&self) -> Psn {
        let count = self.live.query().outstanding_sends as usize;
        let oldest = self.sends.len().checked_sub(count).and_then(|at| self.sends.get(at));
        oldest.map_or(self.next_psn, |oldest| oldest.first)
    }

    fn response(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let right = |psn| self.sends.iter().find_map(|request| self.response_to(request, psn));
        let (opcode, fields) = packet::read_response(input, |_| self.oldest(), right);
        self.live.build(opcode, &fields)
    }

    fn response_to(&self, request: &Request, psn: Psn) -> Option<(Opcode, usize)> {
        packet::response_to(&request.op, request.piece.length, request.index(psn)?, self.live.setup.mtu)
    }

    fn selective_acknowledge(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let (psn, flags, kind) = (packet::near(self.oldest(), input.u8()), Flags(input.u8()), input.u8());
        let (from, count) = (psn + u32::from(input.u8()), u32::from(input.u8()));
        let length = [Sack::LEN, Sack::LEN, 0, 4, 124, 132, 256, 1100][usize::from(kind & 7)];
        let syndrome = if kind & 0x40 == 0 { Syndrome::ACK.byte() } else { kind };
        let fields = Fields { psn, syndrome, payload: length, fill: kind, flags, ..Fields::default() };
        let mut frame = self.live.build(Opcode::SELECTIVE_ACKNOWLEDGE, &fields);
        // Otherwise the bits are effectively random.
        if length == Sack::LEN && kind & 8 == 0 {
            let start = frame.len() - 4 - Sack::LEN;
            let bits = &mut frame[start..start + Sack::LEN];
            bits.fill(if kind & 16 == 0 { 0 } else { 0xff });
            for named in (0..count).map(|i| (from + i).value() % Sack::SPAN) {
                bits[named as usize / 8] ^= 1 << (named % 8);
            }
            packet::seal(&mut frame);
        }
        frame
    }

    fn modify(&mut self, choice: u8) {
        match (choice & 7, self.live.query().state) {
            (0, _) => self.stop(),
            (1 | 2, _) => self.reconnect(choice & 1 != 0),
            (3, QpState::Rts) => self.live.modify(Transition::Drain),
            (_, QpState::Sqd) => {
                // Refused until the queue is drained.
                let _ = self.live.context.modify_qp(self.live.qp, Transition::Resume);
            }
            _ => {}
        }
        self.turn(&[]);
    }

    /// Moves the queue pair to the error state.
    fn stop(&mut self) {
        let before = self.live.query();
        let sent = self.live.stop();
        self.check_sent(&sent, &before);
        self.mute = true;
    }

    /// A new connection, after RESET or with another queue pair: no state of the old one remains.
    fn reconnect(&mut self, reset: bool) {
        let before = self.live.query();
        let sent = if reset { self.live.reset() } else { self.live.replace() };
        self.check_sent(&sent, &before);
        self.live.connect();
        self.sends.clear();
        self.receives.clear();
        self.came.clear();
        self.next_psn = self.live.setup.sq_psn;
        self.mute = false;
    }

    /// One turn of the engine, with this frame if it is not empty, and all checks after it.
    fn turn(&mut self, frame: &[u8]) {
        let before = self.live.query();
        let sent = self.live.turn(frame);
        let packet = self.live.admitted(frame).filter(|_| Live::is_up(before.state));
        if let Some(packet) = packet.filter(|packet| packet.opcode.is_request()) {
            self.came.insert(packet.bth.psn().value());
        }
        self.check_memory(packet.as_ref());
        let mut after = self.live.query();
        after.state = before.state;
        self.check_sent(&sent, &after);
        self.live.drain_events();
    }

    /// Checks packets that were sent while the queue pair had this state and expected PSN.
    fn check_sent(&self, sent: &[Vec<u8>], qp: &QpAttributes) {
        for frame in sent {
            let packet = packet::parse_own(frame);
            assert_eq!(packet.bth.dest_qpn(), PEER_QPN);
            assert!(!self.mute, "{} after the application stopped the queue pair", packet.opcode);
            let psn = packet.bth.psn();
            if packet.opcode.is_request() {
                assert!(Live::is_up(qp.state), "{} is sent in ERR", packet.opcode);
                let known = self.sends.iter().any(|request| request.index(psn).is_some());
                assert!(known, "{} at {psn:?}, where nothing was posted", packet.opcode);
            }
            if packet.opcode == Opcode::SELECTIVE_ACKNOWLEDGE {
                let sack = packet.sack().expect("128 bytes");
                assert_eq!(psn, qp.rq_psn, "what is missing");
                let named = (0..Sack::SPAN).map(|i| psn + i).filter(|psn| sack.holds(*psn));
                assert!(named.clone().all(|psn| self.came.contains(&psn.value())), "what never came is held");
                let room = usize::from(self.live.setup.reorder_packets.unwrap_or(0));
                assert!(named.count() <= room, "more is held than there is room for");
            }
        }
    }

    /// Checks that memory changes only where received packets may change it; the changed bytes become the expected
    /// ones.
    fn check_memory(&mut self, packet: Option<&Packet<'_>>) {
        // The memory that a response may write.
        let answer = packet.filter(|packet| !packet.opcode.is_request()).and_then(|packet| {
            let psn = packet.bth.psn();
            let at = self.sends.iter().position(|request| request.index(psn).is_some())?;
            let request = &self.sends[at];
            let (index, (opcode, length)) = (request.index(psn)?, self.response_to(request, psn)?);
            let is_atomic = packet.atomic_ack_eth().is_some();
            let is_right = packet.opcode.operation() == opcode.operation()
                && (is_atomic || packet.payload.len() == length);
            let skip = index as usize * self.live.setup.mtu.bytes() as usize;
            let length = if is_atomic { 8 } else { length };
            is_right.then_some((at, 1 << index, request.piece.offset + skip, length))
        });
        if let Some((at, bit, ..)) = answer {
            self.sends[at].came |= bit;
        }
        for place in 0..self.live.regions.len() {
            let whole = Piece { place, offset: 0, length: REGION };
            let (actual, before) = (self.live.actual(whole), self.live.bytes(whole));
            if actual == before {
                continue;
            }
            let changed = |at: &usize| actual[*at] != before[*at];
            let first = (0..REGION).find(changed).expect("they differ");
            let last = (0..REGION).rfind(changed).expect("they differ");
            match place {
                SINK => {
                    let Some((at, bit, start, length)) = answer else {
                        panic!("byte {first} changed, and no response came")
                    };
                    assert!(
                        start <= first && last < start + length,
                        "bytes {first} to {last} of {start}+{length}"
                    );
                    let request = &mut self.sends[at];
                    assert_eq!(request.landed & bit, 0, "a response was taken twice");
                    request.landed |= bit;
                }
                0 | 4 => {
                    assert!(packet.is_some_and(|p| p.opcode.is_request()), "place {place} changed by itself");
                    assert!(first >= GUARD && last < REGION - GUARD, "bytes {first} to {last} of {place}");
                }
                _ => panic!("place {place} changed at byte {first}, and nobody may write it"),
            }
            let actual = self.live.actual(whole).to_vec();
            self.live.expect_bytes(whole, &actual);
        }
    }

    /// Polls all completions: each belongs to the oldest work request that must have one.
    fn poll_cq(&mut self) {
        while let Some(wc) = self.live.poll_cq() {
            if self.receives.front() == Some(&wc.wr_id) {
                self.receives.pop_front();
                continue;
            }
            let success = wc.status == WcStatus::Success;
            while let Some(request) = self.sends.pop_front() {
                if success && packet::response_to(&request.op, 0, 0, self.live.setup.mtu).is_some() {
                    assert_eq!(request.came.count_ones(), request.packets, "success without all of the data");
                }
                if request.wr_id == wc.wr_id {
                    assert!(request.signaled || !success, "{wc:?} was not asked for");
                    break;
                }
                assert!(!request.signaled, "{wc:?} before that of {}", request.wr_id);
                assert!(!self.sends.is_empty(), "{wc:?} of nothing that was posted");
            }
        }
    }

    /// The end: all is complete, all held packets are released, and all objects can be destroyed.
    fn finish(mut self, reset: bool) {
        self.live.set_room(usize::MAX);
        self.turn(&[]);
        self.stop();
        self.turn(&[]);
        self.poll_cq();
        let unsaid = self.sends.iter().filter(|request| request.signaled).count();
        assert_eq!((unsaid, self.receives.len()), (0, 0), "work requests without a completion");
        assert_eq!(self.live.overflows(), 0);
        self.reconnect(reset);
        let full = |live: &Live| live.context.counters().value(Counter::RxReorderFull);
        let (before, room) = (full(&self.live), u32::from(self.live.setup.reorder_packets.unwrap_or(0)));
        for i in 0..=room {
            let psn = self.live.setup.rq_psn + 1 + i;
            let frame = self.live.build(Opcode::RC_SEND_ONLY, &Fields { psn, ..Fields::default() });
            self.turn(&frame);
            assert_eq!(full(&self.live) - before, u64::from(i == room), "room for {i} of {room} packets");
        }
        let before = self.live.query();
        let sent = self.live.destroy_qp();
        self.check_sent(&sent, &before);
        self.live.destroy();
    }
}
