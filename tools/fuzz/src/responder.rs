//! A live responder that gets arbitrary packets, while its application continues.
//!
//! A model is checked against the engine. For each packet that the engine executes (its expected PSN advances, or,
//! without acknowledgements, it counts no drop), the model states whether it may be executed, and exactly its effects
//! on memory, receive WRs and the MSN. A packet that is not executed must change nothing.

mod effect;

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::time::Duration;

use ferroce::wire::{Extension, Nak, Opcode, Operation, Packet, Position, Syndrome};
use ferroce::{Access, Counter, PathMtu, Psn, QpState, QpType, RKey, Transition, WcStatus, WorkCompletion};
use ferroce_test_support::peer::PEER_QPN;

use crate::input::Input;
use crate::live::{Live, Piece, REGION, Setup};
use crate::packet::{self, Fields, Flags};
use effect::Effect;

/// The most steps of an input that are executed.
const MAX_STEPS: usize = 96;

/// The `wr_id` of binds.
const BIND: u64 = u64::MAX;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut target = Target::new(Setup::read(&mut input));
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        target.step(&mut input);
    }
    target.finish();
}

/// The input for a capture: its requests, each message with a receive WR if it consumes one. Lengths are divided by
/// `scale`.
pub fn input_of(service: QpType, ipv6: bool, scale: u32, requests: &[Packet<'_>]) -> Vec<u8> {
    let mut input = Setup::usual(service, PathMtu::Mtu1024, ipv6).to_vec();
    for packet in requests {
        let (opcode, position) = (packet.opcode, packet.opcode.position());
        let is_first = matches!(position, Position::First | Position::Only);
        if opcode.operation() == Operation::Send && is_first || opcode.has(Extension::ImmDt) {
            input.push(8);
            input.extend(Live::pieces_bytes(2, 0, REGION as u16));
        }
        let flags = u8::from(packet.bth.ack_req()) * Flags::ACK_REQ;
        let length = packet.reth().map_or(0, |reth| reth.length() / scale) as u16;
        let payload = packet.payload.len() as u16 / scale as u16;
        input.extend([0, opcode.byte() & 0x1f, flags, 0, 0, 0, 0]);
        input.extend(length.to_le_bytes());
        input.extend(payload.to_le_bytes());
        input.push(packet.payload.first().copied().unwrap_or(0));
        if packet.bth.ack_req() {
            input.extend([9, 15]);
        }
    }
    input
}

/// A step of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Packet,
    Raw,
    PostReceive,
    PollCq,
    Room,
    Advance,
    Register,
    Modify,
    Write,
    Bind,
    Events,
}

impl Step {
    fn of(byte: u8) -> Step {
        match byte & 15 {
            0..=6 => Step::Packet,
            7 if byte & 16 == 0 => Step::Raw,
            7 => Step::Bind,
            8 => Step::PostReceive,
            9 => Step::PollCq,
            10 => Step::Room,
            11 => Step::Advance,
            12 => Step::Register,
            13 => Step::Modify,
            14 => Step::Write,
            _ => Step::Events,
        }
    }
}

/// The message in progress.
#[derive(Clone, Copy)]
enum InboundMessage {
    None,
    Send { received: usize },
    Write { va: u64, rkey: RKey, remaining: u32, total: u32 },
}

struct Receive {
    wr_id: u64,
    pieces: Vec<Piece>,
}

/// An executed request that is answered with data.
struct Executed {
    first: Psn,
    packets: u32,
    msn: u32,
    answer: Answer,
}

enum Answer {
    Read { va: u64, rkey: RKey, length: u32 },
    Atomic { original: u64 },
    Done,
}

struct Target {
    live: Live,
    expected: Psn,
    msn: u32,
    message: InboundMessage,
    next_wr_id: u64,
    /// Posted ones; flushed ones remain until their completion is polled.
    receives: VecDeque<Receive>,
    /// Completions of received messages, oldest first, not yet polled.
    completions: VecDeque<WorkCompletion>,
    executed: VecDeque<Executed>,
    /// The application has stopped the queue pair: nothing may be sent.
    mute: bool,
}

impl Target {
    fn new(setup: Setup) -> Target {
        Target {
            live: Live::new(setup),
            expected: setup.rq_psn,
            msn: 0,
            message: InboundMessage::None,
            next_wr_id: 0,
            receives: VecDeque::new(),
            completions: VecDeque::new(),
            executed: VecDeque::new(),
            mute: false,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let byte = input.u8();
        match Step::of(byte) {
            Step::Packet => {
                let (opcode, fields) = self.read_packet(input);
                let frame = self.live.build(opcode, &fields);
                self.turn(&frame);
                self.live.recycle(frame);
                return;
            }
            Step::Raw => {
                let frame = self.live.raw(input);
                self.turn(&frame);
                return;
            }
            Step::PostReceive => self.post_receive(input),
            Step::PollCq => self.poll_cq(usize::from(input.u8() & 15)),
            Step::Room => self.live.change_room(input.u8()),
            Step::Advance => self.live.advance(Duration::from_micros(1 << (input.u8() & 15))),
            Step::Register => self.register(input.u8()),
            Step::Modify => self.modify(input.u8()),
            Step::Write => self.live.write_some(input),
            Step::Bind => {
                let (piece, access) = (self.live.read_pieces(input)[0], input.u8());
                let rights =
                    [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::FLUSH_GLOBAL];
                let access = (0..4)
                    .filter(|bit| access & 1 << bit != 0)
                    .fold(Access::NONE, |sum, bit| sum | rights[bit]);
                self.live.post_bind(BIND, piece, access);
            }
            Step::Events => self.live.drain_events(),
        }
        self.turn(&[]);
    }

    fn read_packet(&self, input: &mut Input<'_>) -> (Opcode, Fields) {
        let opcode = packet::opcode(input.u8(), self.live.setup.service);
        let (flags, psn, key) = (Flags(input.u8()), input.u8() as i8, input.u8());
        let (va, length, payload, fill) = (input.u16(), input.u16(), input.u16(), input.u8());
        let start = self.live.address(key);
        let va = match key & 0x40 {
            0 => start.wrapping_add_signed(i64::from(va as i16)),
            _ => u64::MAX - u64::from(va),
        };
        let length = if key & 0x20 == 0 { length.into() } else { 1 << 31 | u32::from(length) };
        let word = self.live.reach(self.live.key(key), Access::NONE, va, 8);
        let word =
            word.and_then(|piece| self.live.bytes(piece).try_into().ok()).map_or(0, u64::from_ne_bytes);
        let fields = Fields {
            psn: match psn {
                i8::MIN => self.expected + (1 << 23),
                i8::MAX => self.expected + ((1 << 23) - 1),
                delta => self.expected + (delta as u32 & 0xff_ffff),
            },
            va,
            rkey: self.live.key(key),
            length,
            compare: if fill & 8 == 0 { word } else { u64::from(fill) },
            operand: u64::from(fill) * 0x0101_0101_0101_0101,
            syndrome: fill,
            msn: length & 0xff_ffff,
            payload: usize::from(payload) % 1101,
            fill,
            flags,
        };
        (opcode, fields)
    }

    fn post_receive(&mut self, input: &mut Input<'_>) {
        let pieces = self.live.read_pieces(input);
        let wr_id = self.next_wr_id;
        if self.live.post_receive(wr_id, &pieces) {
            self.next_wr_id += 1;
            self.receives.push_back(Receive { wr_id, pieces });
        }
    }

    fn register(&mut self, choice: u8) {
        let place = usize::from(choice & 7) % self.live.regions.len();
        if choice & 8 != 0 {
            self.live.register(place);
            return;
        }
        if choice & 16 != 0 {
            self.live.arm_srq(u32::from(choice >> 5));
        }
        // In the error state the queue pair's own receive WRs are flushed, and have no effect any more.
        let shared = self.live.shared_receives();
        let pins = match (Live::is_up(self.live.query().state), shared) {
            (true, _) => self.receives.len(),
            (false, shared) => shared.unwrap_or(0),
        };
        let mut named = self.receives.iter().rev().take(pins);
        let named = named.any(|receive| receive.pieces.iter().any(|piece| piece.place == place));
        self.live.deregister(place, named);
    }

    fn modify(&mut self, choice: u8) {
        let state = self.live.query().state;
        match choice & 3 {
            0 => self.stop(),
            1 => {
                let sent = self.live.reset();
                self.check_all_sent(&sent, state);
                self.live.connect();
                self.expected = self.live.setup.rq_psn;
                self.msn = 0;
                self.message = InboundMessage::None;
                // Those in a shared queue remain.
                let gone = self.receives.len() - self.live.shared_receives().unwrap_or(0);
                self.receives.drain(..gone);
                self.completions.clear();
                self.executed.clear();
                self.mute = false;
            }
            2 if state == QpState::Rts => self.live.modify(Transition::Drain),
            3 if state == QpState::Sqd => self.live.modify(Transition::Resume),
            _ => {}
        }
    }

    /// One turn of the engine, with this frame if it is not empty, and all checks after it.
    fn turn(&mut self, frame: &[u8]) {
        let before = self.live.query().state;
        let (drops, overflows) = (self.drops(), self.live.overflows());
        let sent = self.live.turn(frame);
        let after = self.live.query();
        let packet = self.live.admitted(frame).filter(|_| Live::is_up(before));
        if let Some(packet) = &packet
            && self.live.setup.service == QpType::Uc
        {
            self.resynchronise(packet);
        }
        let effect = packet.as_ref().and_then(|packet| self.effect(packet));
        let executed = match self.live.setup.service {
            QpType::Rc => after.rq_psn != self.expected,
            // Dropped packets are not answered, but counted. A completion without room in the CQ ends the queue pair,
            // but after its message was executed.
            _ => {
                let lost = self.live.overflows() > overflows && effect.is_some();
                packet.is_some() && self.drops() == drops && (Live::is_up(after.state) || lost)
            }
        };
        if executed {
            let Some(packet) = packet else { panic!("a frame was executed that is no packet of the peer") };
            let Some(effect) = effect else {
                panic!("executed, and must not be: {} {:?}", packet.opcode, packet.bth)
            };
            self.apply(&packet, effect);
        } else {
            if let Some(effect) = effect
                && effect.invalidates.is_some()
                && after.state == QpState::Error
            {
                // Refused due to the key at its end: the data is in the buffer of the receive WR, which failed.
                for (piece, bytes) in effect.writes {
                    if self.live.actual(piece) == bytes {
                        self.live.expect_bytes(piece, &bytes);
                    }
                }
            }
            if packet.is_some() && self.live.setup.service == QpType::Uc {
                self.message = InboundMessage::None;
                self.expected += 1;
            }
        }
        if self.live.setup.service != QpType::Ud {
            assert_eq!(after.rq_psn, self.expected, "the expected PSN");
        }
        self.live.observe_window();
        self.live.check_memory();
        self.check_all_sent(&sent, after.state);
    }

    /// Moves the queue pair to the error state.
    fn stop(&mut self) {
        let state = self.live.query().state;
        let sent = self.live.stop();
        self.check_all_sent(&sent, state);
        self.mute = true;
    }

    fn check_all_sent(&self, sent: &[Vec<u8>], state: QpState) {
        for frame in sent {
            self.check_sent(frame, state);
        }
    }

    /// Packets that were dropped as invalid, or for lack of a receive WR.
    fn drops(&self) -> u64 {
        let counters = self.live.context.counters();
        let reasons = [
            Counter::RxInvalidRequest,
            Counter::RxAccessErrors,
            Counter::RxTooLong,
            Counter::RxIncomplete,
            Counter::OutOfBuffer,
            Counter::RxQkeyMismatch,
        ];
        reasons.iter().map(|reason| counters.value(*reason)).sum()
    }

    /// UC: a lost packet ends its message, and another message may begin.
    fn resynchronise(&mut self, packet: &Packet<'_>) {
        let first = matches!(packet.opcode.position(), Position::First | Position::Only);
        if packet.bth.psn() != self.expected || first {
            self.message = InboundMessage::None;
        }
        let continues = match self.message {
            InboundMessage::None => false,
            InboundMessage::Send { .. } => packet.opcode.operation() == Operation::Send,
            InboundMessage::Write { .. } => packet.opcode.operation() == Operation::Write,
        };
        if !continues {
            self.message = InboundMessage::None;
        }
        self.expected = packet.bth.psn();
    }

    fn apply(&mut self, packet: &Packet<'_>, effect: Effect) {
        for (piece, bytes) in &effect.writes {
            self.live.expect_bytes(*piece, bytes);
        }
        self.message = effect.message;
        self.msn = (self.msn + u32::from(effect.ends)) & 0xff_ffff;
        if let Some(rkey) = effect.invalidates {
            self.live.invalidated(rkey);
        }
        if let Some((opcode, length)) = effect.received {
            let receive = self.receives.pop_front().expect("the effect looked at it");
            let mut wc = WorkCompletion::EMPTY;
            (wc.wr_id, wc.status, wc.opcode) = (receive.wr_id, WcStatus::Success, opcode);
            (wc.byte_len, wc.grh) = (length as u32, packet.deth().is_some());
            (wc.immediate, wc.invalidated) = (effect.immediate, effect.invalidates);
            (wc.qp, wc.qpn) = (self.live.qp, self.live.qpn);
            wc.src_qpn = packet.deth().map_or(PEER_QPN, |deth| deth.source_qpn());
            wc.source_mac = packet.deth().and(packet.source_mac());
            wc.vlan = packet.deth().and(packet.vlan()).and_then(NonZeroU16::new);
            self.completions.push_back(wc);
        }
        if let Some(answer) = effect.answer {
            assert!(self.live.setup.dest_rd_atomic > 0, "{} beyond max_dest_rd_atomic", packet.opcode);
            if self.executed.len() > 32 {
                self.executed.pop_front();
            }
            let Effect { packets, .. } = effect;
            self.executed.push_back(Executed { first: self.expected, packets, msn: self.msn, answer });
        }
        self.expected += effect.packets;
    }

    /// Checks that a frame of the engine is a response to a request.
    fn check_sent(&self, frame: &[u8], state: QpState) {
        let packet = packet::parse_own(frame);
        assert_eq!(
            self.live.setup.service,
            QpType::Rc,
            "{} of a service that answers nothing",
            packet.opcode
        );
        assert!(!self.mute, "{} after the application stopped the queue pair", packet.opcode);
        assert_eq!(packet.bth.dest_qpn(), PEER_QPN);
        let psn = packet.bth.psn();
        let executed = self.executed.iter().rev().find(|e| {
            let distance = psn.distance(e.first);
            distance >= 0 && (distance as u32) < e.packets
        });
        let aeth = packet.aeth();
        let syndrome = aeth.map(|aeth| aeth.syndrome().expect("a syndrome that exists"));
        match packet.opcode.operation() {
            Operation::Acknowledge => {
                let (aeth, syndrome) = (aeth.expect("it has one"), syndrome.expect("it has one"));
                assert_eq!(aeth.msn(), self.msn, "MSN of {syndrome:?}");
                match syndrome {
                    Syndrome::Ack { .. } => assert_eq!(psn, self.expected - 1, "PSN of an ACK"),
                    Syndrome::RnrNak(_) | Syndrome::Nak(Nak::PsnSequenceError) => {
                        assert_eq!(psn, self.expected, "PSN of {syndrome:?}");
                    }
                    Syndrome::Nak(_) => {
                        assert!(psn == self.expected || executed.is_some(), "PSN of {syndrome:?}");
                        assert_eq!(state, QpState::Error, "after {syndrome:?}");
                    }
                }
                return;
            }
            Operation::AtomicAcknowledge | Operation::ReadResponse => {}
            other => panic!("a responder sent {other:?}"),
        }
        let Some(executed) = executed else { panic!("{} {psn:?} answers nothing", packet.opcode) };
        if let Some(aeth) = aeth {
            assert_eq!(
                (syndrome, aeth.msn()),
                (Some(Syndrome::ACK), executed.msn),
                "AETH of {}",
                packet.opcode
            );
        }
        match (&executed.answer, packet.atomic_ack_eth()) {
            (Answer::Atomic { original }, Some(answer)) => assert_eq!(answer.original(), *original),
            (Answer::Done, None) => {
                assert_eq!((packet.opcode, packet.payload.len()), (Opcode::RC_READ_RESPONSE_ONLY, 0));
            }
            (Answer::Read { va, rkey, length }, None) => {
                let mtu = self.live.setup.mtu.bytes();
                let offset = psn.distance(executed.first) as u32 * mtu;
                let most = (length - offset).min(mtu);
                let payload = packet.payload;
                assert_eq!(
                    packet.opcode.has(Extension::Aeth),
                    packet.opcode != Opcode::RC_READ_RESPONSE_MIDDLE
                );
                if matches!(packet.opcode.position(), Position::First | Position::Middle) {
                    assert_eq!(payload.len() as u32, mtu);
                }
                assert!(payload.len() as u32 <= most, "{} bytes where {most} are left", payload.len());
                if !payload.is_empty() {
                    let va = va.wrapping_add(offset.into());
                    let piece = self.live.reach(*rkey, Access::REMOTE_READ, va, payload.len());
                    let piece = piece.unwrap_or_else(|| panic!("bytes that the peer may not read"));
                    assert!(payload == self.live.bytes(piece), "a READ response is not what memory holds");
                }
            }
            _ => panic!("{} is no answer to the request at its PSN", packet.opcode),
        }
    }

    /// Polls up to `count` completions: each belongs to the oldest receive WR without one.
    fn poll_cq(&mut self, count: usize) {
        for _ in 0..count {
            let Some(wc) = self.live.poll_cq() else { return };
            if wc.wr_id == BIND {
                assert!(matches!(wc.status, WcStatus::MwBindErr | WcStatus::WrFlushErr), "{wc:?}");
                continue;
            }
            if wc.status == WcStatus::Success {
                assert_eq!(Some(&wc), self.completions.front(), "the next completion");
                self.completions.pop_front();
                continue;
            }
            assert!(self.completions.is_empty(), "{wc:?} before {:?}", self.completions.front());
            let receive = self.receives.pop_front();
            assert_eq!(Some(wc.wr_id), receive.map(|receive| receive.wr_id), "the next completion in error");
            let lawful = matches!(
                wc.status,
                WcStatus::LocLenErr
                    | WcStatus::LocProtErr
                    | WcStatus::RemInvReqErr
                    | WcStatus::RemAccessErr
                    | WcStatus::WrFlushErr
            );
            assert!(lawful, "{wc:?}");
            assert_eq!(self.live.query().state, QpState::Error, "after {wc:?}");
        }
    }

    /// The end: all posted work requests are accounted for, and all objects can be destroyed.
    fn finish(mut self) {
        self.live.set_room(usize::MAX);
        self.turn(&[]);
        self.poll_cq(usize::MAX);
        self.stop();
        self.turn(&[]);
        self.poll_cq(usize::MAX);
        if self.live.overflows() == 0 {
            let shared = self.live.shared_receives().unwrap_or(0);
            let left = (self.receives.len(), self.completions.len());
            assert_eq!(left, (shared, 0), "receives without a completion");
        }
        let sent = self.live.destroy_qp();
        self.check_all_sent(&sent, QpState::Error);
        self.live.destroy();
    }
}
