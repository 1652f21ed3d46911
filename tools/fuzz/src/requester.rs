//! A live requester that gets arbitrary responses, while its application continues.
//!
//! A model knows the PSNs of every work request. From these it derives the required contents of each packet of the
//! engine, the response that justifies each completion, and the bytes that it may write.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::wire::{Extension, Opcode, Operation, Packet, Position, Syndrome};
use ferroce::{
    Access, Data, PathMtu, Psn, QpState, QpType, SendFlags, SendOp, SendWorkRequest, Transition, WcOpcode,
    WcStatus, WorkCompletion,
};
use ferroce_test_support::peer::PEER_QPN;

use crate::input::Input;
use crate::live::{Live, Piece, REGION, REMOTE, Setup, part, total};
use crate::packet::{self, Fields};

/// The most steps of an input that are executed.
const MAX_STEPS: usize = 96;

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    // The peer sends no requests here.
    let setup = Setup::read(&mut input);
    let setup =
        Setup { access: Access::NONE, rts: true, service: QpType::Rc, shared_receives: false, ..setup };
    let mut target = Target::new(setup);
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        target.step(&mut input);
    }
    target.finish();
}

/// The input for a capture: the requests of one end as work requests, and the responses. Lengths are divided by
/// `scale`.
pub fn input_of(ipv6: bool, scale: u32, packets: &[Packet<'_>]) -> Vec<u8> {
    let mtu = PathMtu::Mtu1024;
    let mut input = Setup::usual(QpType::Rc, mtu, ipv6).to_vec();
    // For each work request: first PSN, number of PSNs, and received response packets.
    let mut outstanding: VecDeque<(Psn, u32, u32)> = VecDeque::new();
    let mut sending = 0;
    for packet in packets {
        let (operation, psn) = (packet.opcode.operation(), packet.bth.psn());
        if packet.opcode.is_request() {
            let position = packet.opcode.position();
            sending += packet.payload.len() as u32 / scale;
            let (kind, length) = match operation {
                Operation::Send if matches!(position, Position::Last | Position::Only) => (0, sending),
                Operation::Write if matches!(position, Position::Last | Position::Only) => (3, sending),
                Operation::ReadRequest => (6, packet.reth().map_or(0, |reth| reth.length() / scale)),
                Operation::CompareSwap => (10, 8),
                Operation::FetchAdd => (12, 8),
                _ => continue,
            };
            sending = 0;
            let count = mtu.packets(length);
            let first = if kind < 6 { psn + 1 - count } else { psn };
            outstanding.push_back((first, count, 0));
            input.extend([0, kind, 0]);
            input.extend(Live::pieces_bytes(0x20, 0, length.min(2 * REGION as u32 - 1) as u16));
            continue;
        }
        let syndrome = packet.aeth().map_or(Syndrome::ACK.byte(), |aeth| aeth.syndrome_byte());
        let is_ack = matches!(Syndrome::from_byte(syndrome), Some(Syndrome::Ack { .. }));
        while outstanding.front().is_some_and(|(first, count, _)| psn.distance(*first + *count) >= 0) {
            outstanding.pop_front();
        }
        let Some((first, count, arrived)) = outstanding.front_mut() else { continue };
        let delta = psn.distance(*first + *arrived) as i8;
        input.extend([4, if is_ack { 7 } else { 0x40 }, delta as u8, 0, syndrome, 0xff, 0xff, 0]);
        *arrived += u32::from(operation == Operation::ReadResponse);
        if is_ack && psn + 1 == *first + *count {
            outstanding.pop_front();
        }
    }
    input
}

/// A step of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Post,
    Response,
    Raw,
    Room,
    Advance,
    Register,
    Modify,
    Write,
}

impl Step {
    fn of(byte: u8) -> Step {
        match byte & 15 {
            0..=3 => Step::Post,
            4..=9 => Step::Response,
            10 => Step::Raw,
            11 => Step::Room,
            12 => Step::Advance,
            13 => Step::Register,
            14 => Step::Modify,
            _ => Step::Write,
        }
    }
}

/// A posted work request.
struct Request {
    wr_id: u64,
    op: SendOp,
    flags: SendFlags,
    pieces: Vec<Piece>,
    inline: Option<Vec<u8>>,
    first: Psn,
    /// Its number of PSNs; 0 if it is not sent on the network.
    packets: u32,
    /// Received packets of the READ response.
    arrived: u32,
}

impl Request {
    fn length(&self) -> usize {
        self.inline.as_ref().map_or_else(|| total(&self.pieces), Vec::len)
    }

    fn end(&self) -> Psn {
        self.first + self.packets
    }

    fn reads(&self) -> bool {
        matches!(self.op, SendOp::Read(_) | SendOp::Flush { .. } | SendOp::AtomicWrite(_)) || self.is_atomic()
    }

    fn is_atomic(&self) -> bool {
        matches!(self.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    fn wc_opcode(&self) -> WcOpcode {
        match self.op {
            SendOp::Send | SendOp::SendWithImm(_) | SendOp::SendWithInvalidate(_) => WcOpcode::Send,
            SendOp::Write(_) | SendOp::WriteWithImm(..) => WcOpcode::RdmaWrite,
            SendOp::Read(_) => WcOpcode::RdmaRead,
            SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
            SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
            SendOp::LocalInvalidate(_) => WcOpcode::LocalInv,
            SendOp::Flush { .. } => WcOpcode::Flush,
            SendOp::AtomicWrite(_) => WcOpcode::AtomicWrite,
            other => panic!("{other:?} is not posted here"),
        }
    }
}

struct Target {
    live: Live,
    /// Posted and not complete, oldest first.
    requests: VecDeque<Request>,
    next_wr_id: u64,
    next_psn: Psn,
    /// The PSN after the last one that was sent.
    sent: Psn,
}

impl Target {
    fn new(setup: Setup) -> Target {
        let psn = setup.sq_psn;
        Target {
            live: Live::new(setup),
            requests: Default::default(),
            next_wr_id: 0,
            next_psn: psn,
            sent: psn,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let byte = input.u8();
        match Step::of(byte) {
            Step::Post => self.post(input),
            Step::Response => {
                let (opcode, fields) = self.read_response(input);
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
            Step::Room => self.live.change_room(input.u8()),
            Step::Advance => self.live.advance(Duration::from_micros(1 << (input.u8() & 15))),
            Step::Register => self.register(input.u8()),
            Step::Modify => self.modify(input.u8()),
            Step::Write => self.live.write_some(input),
        }
        self.live.drain_events();
        self.turn(&[]);
    }

    fn post(&mut self, input: &mut Input<'_>) {
        let (kind, choice) = (input.u8(), input.u8());
        let mut pieces = self.live.read_pieces(input);
        let (op, flags) = self.live.read_send(kind, choice);
        match op {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } | SendOp::AtomicWrite(_) => {
                pieces.truncate(1);
                pieces[0].length = 8;
            }
            SendOp::LocalInvalidate(_) | SendOp::Flush { .. } => pieces.clear(),
            _ => {}
        }
        let mut inline = None;
        if kind & 128 != 0 && matches!(kind & 15, 0..=5) {
            let mut bytes = vec![0; total(&pieces) % 65];
            packet::fill(&mut bytes, choice);
            inline = Some(bytes);
            pieces.clear();
        }
        let Some(sges) = self.live.sges(&pieces) else { return };
        let data = inline.as_deref().map_or(Data::Sges(&sges), Data::Inline);
        let wr_id = self.next_wr_id;
        let wr = SendWorkRequest { wr_id, op, data, flags };
        if self.live.context.post_send(self.live.qp, &wr).is_err() {
            return;
        }
        self.next_wr_id += 1;
        let mut request =
            Request { wr_id, op, flags, pieces, inline, first: self.next_psn, packets: 1, arrived: 0 };
        if matches!(op, SendOp::LocalInvalidate(_)) {
            request.packets = 0;
        } else if !request.is_atomic() {
            request.packets = (request.length() as u32).div_ceil(self.live.setup.mtu.bytes()).max(1);
        }
        self.next_psn = request.end();
        self.requests.push_back(request);
    }

    /// A response near the outstanding PSNs.
    fn read_response(&self, input: &mut Input<'_>) -> (Opcode, Fields) {
        let base = |kind: u8| match self.requests.front() {
            Some(oldest) if kind & 0x80 == 0 => oldest.first + oldest.arrived,
            _ => self.sent,
        };
        let right =
            |psn| self.requests.iter().find(|r| covers(r, psn)).and_then(|r| self.response_to(r, psn));
        packet::read_response(input, base, right)
    }

    fn response_to(&self, request: &Request, psn: Psn) -> Option<(Opcode, usize)> {
        let index = psn.distance(request.first) as u32;
        packet::response_to(&request.op, request.length(), index, self.live.setup.mtu)
    }

    fn register(&mut self, choice: u8) {
        let place = usize::from(choice & 7) % self.live.regions.len();
        if choice & 8 != 0 {
            self.live.register(place);
            return;
        }
        let named = self.requests.iter().any(|r| r.pieces.iter().any(|piece| piece.place == place));
        self.live.deregister(place, named);
    }

    fn modify(&mut self, choice: u8) {
        let state = self.live.query().state;
        match choice & 3 {
            0 => self.stop(),
            1 => {
                let sent = self.live.reset();
                self.check_sent(&sent, is_up(state));
                self.requests.clear();
                self.live.connect();
                self.next_psn = self.live.setup.sq_psn;
                self.sent = self.next_psn;
            }
            2 if state == QpState::Rts => self.live.modify(Transition::Drain),
            _ if state == QpState::Sqd => {
                // Refused until the queue is drained.
                let _ = self.live.context.modify_qp(self.live.qp, Transition::Resume);
            }
            _ => {}
        }
    }

    /// One turn of the engine, with this frame if it is not empty, and all checks after it.
    fn turn(&mut self, frame: &[u8]) {
        let before = self.live.query();
        let sent = self.live.turn(frame);
        let after = self.live.query();
        let packet = self.live.admitted(frame);
        let up = is_up(before.state);
        let response = packet.as_ref().filter(|packet| up && !packet.opcode.is_request());
        let response = response.filter(|packet| packet.bth.psn().distance(self.sent) < 0);
        let landed = response.and_then(|packet| self.land(packet));
        self.live.check_memory();
        let local_fault = self.complete(response, landed, after.state, after.outstanding_sends);
        let may = up && (after.state != QpState::Error || local_fault || self.live.overflows() > 0);
        self.check_sent(&sent, may);
    }

    /// Moves the queue pair to the error state.
    fn stop(&mut self) {
        let state = self.live.query().state;
        let sent = self.live.stop();
        self.check_sent(&sent, is_up(state));
    }

    /// `may`: requests may be sent.
    fn check_sent(&mut self, sent: &[Vec<u8>], may: bool) {
        for frame in sent {
            let packet = packet::parse_own(frame);
            assert_eq!(packet.bth.dest_qpn(), PEER_QPN);
            if packet.opcode.is_request() {
                assert!(may, "{} is sent in ERR", packet.opcode);
                self.check_request(&packet);
            } else {
                assert_eq!(
                    packet.opcode,
                    Opcode::RC_ACKNOWLEDGE,
                    "nothing was asked that has another answer"
                );
            }
        }
    }

    /// Records the bytes of a response, if the engine accepted it. Returns the work request that they belong to.
    fn land(&mut self, packet: &Packet<'_>) -> Option<u64> {
        let psn = packet.bth.psn();
        let at = self.requests.iter().position(|request| covers(request, psn))?;
        let request = &self.requests[at];
        let (_, length) = self.response_to(request, psn)?;
        let index = psn.distance(request.first) as u32;
        let is_answer = match packet.opcode.operation() {
            Operation::ReadResponse => !request.is_atomic() && packet.payload.len() == length,
            Operation::AtomicAcknowledge => request.is_atomic(),
            _ => false,
        };
        let good = packet.aeth().is_none_or(|aeth| matches!(aeth.syndrome(), Some(Syndrome::Ack { .. })));
        // In order only, and only after all data of earlier READs.
        let in_turn = index == request.arrived && self.requests.iter().take(at).all(|r| !r.reads());
        if !is_answer || !good || !in_turn {
            return None;
        }
        let original = packet.atomic_ack_eth().map(|answer| answer.original().to_ne_bytes());
        let data = original.as_ref().map_or(packet.payload, |bytes| &bytes[..]);
        let skip = index as usize * self.live.setup.mtu.bytes() as usize;
        let parts = part(&request.pieces, skip, data.len());
        // The engine may have a reason to drop it (such as a wrong position), but must not accept a part.
        let mut offset = 0;
        let taken = parts.iter().all(|piece| {
            let here = &data[offset..offset + piece.length];
            offset += piece.length;
            self.live.regions[piece.place].is_some() && self.live.actual(*piece) == here
        });
        if !taken {
            return None;
        }
        let mut rest = data;
        for piece in parts {
            let (here, after) = rest.split_at(piece.length);
            self.live.expect_bytes(piece, here);
            rest = after;
        }
        let request = &mut self.requests[at];
        request.arrived += 1;
        Some(request.wr_id)
    }

    /// Polls the completions of this turn, and checks that each is justified. Returns whether the queue pair failed due
    /// to its own work request.
    fn complete(
        &mut self,
        response: Option<&Packet<'_>>,
        landed: Option<u64>,
        state: QpState,
        outstanding: u32,
    ) -> bool {
        let mut retired = self.requests.len() as u32 - outstanding;
        let mut next: Option<WorkCompletion> = self.live.poll_cq();
        let (mut failed, mut local_fault) = (false, false);
        while retired > 0 {
            retired -= 1;
            let request = self.requests.pop_front().expect("it was counted");
            let wc = next.filter(|wc| wc.wr_id == request.wr_id);
            if wc.is_some() {
                next = self.live.poll_cq();
            }
            let status = match wc {
                Some(wc) => wc.status,
                None if self.live.overflows() > 0 => continue,
                None => {
                    assert!(!request.flags.signaled && !failed, "no completion of {}", request.wr_id);
                    WcStatus::Success
                }
            };
            match status {
                WcStatus::Success => {
                    assert!(!failed, "success after a failure");
                    if let Some(wc) = wc {
                        assert!(request.flags.signaled, "a completion that was not asked for");
                        let is = (wc.opcode, wc.byte_len, wc.qp);
                        assert_eq!(is, (request.wc_opcode(), request.length() as u32, self.live.qp));
                    }
                    self.justify(&request, response, landed);
                    continue;
                }
                WcStatus::WrFlushErr => {}
                WcStatus::LocProtErr => local_fault = true,
                WcStatus::LocLenErr
                | WcStatus::LocQpOpErr
                | WcStatus::BadRespErr
                | WcStatus::RemInvReqErr
                | WcStatus::RemAccessErr
                | WcStatus::RemOpErr
                | WcStatus::RetryExcErr
                | WcStatus::RnrRetryExcErr => {}
                other => panic!("a send completed with {other:?}"),
            }
            assert_eq!(state, QpState::Error, "after {status:?}");
            assert!(!failed || status == WcStatus::WrFlushErr, "a second failure: {status:?}");
            failed = true;
        }
        assert_eq!(next, None, "a completion of what is not complete");
        if state == QpState::Error {
            assert!(self.requests.is_empty(), "work that was not flushed");
        }
        local_fault
    }

    /// A work request succeeded in this turn: this response must justify it.
    fn justify(&mut self, request: &Request, response: Option<&Packet<'_>>, landed: Option<u64>) {
        if let SendOp::LocalInvalidate(rkey) = request.op {
            let region = self.live.regions.iter_mut().flatten().find(|region| region.rkey == rkey);
            let region = region.unwrap_or_else(|| panic!("{rkey} is no key to invalidate"));
            assert!(region.own_pd && !region.revoked, "{rkey} is not a key to invalidate");
            region.revoked = true;
            return;
        }
        let Some(packet) = response else { panic!("{:?} succeeded without a response", request.op) };
        if request.reads() {
            assert_eq!(request.arrived, request.packets, "{:?} succeeded without its data", request.op);
            assert_eq!(landed, Some(request.wr_id), "{:?} succeeded, but not by its data", request.op);
            return;
        }
        let syndrome = packet.aeth().map_or(Some(Syndrome::ACK), |aeth| aeth.syndrome());
        let psn = packet.bth.psn();
        let covered = match syndrome {
            None => false,
            Some(Syndrome::Ack { .. }) if packet.opcode == Opcode::RC_ACKNOWLEDGE => {
                psn.distance(request.end()) >= -1
            }
            Some(_) => psn.distance(request.end()) >= 0,
        };
        let in_window = psn.distance(request.first) >= 0;
        assert!(covered && in_window, "{:?} succeeded by {syndrome:?} of {psn:?}", request.op);
    }

    /// Checks a request packet against the work request at its PSN.
    fn check_request(&mut self, packet: &Packet<'_>) {
        let psn = packet.bth.psn();
        let Some(at) = self.requests.iter().position(|request| covers(request, psn)) else {
            // A local operation may have found the queue full in the same turn; then the work requests after it were
            // flushed silently.
            if self.live.overflows() > 0 {
                return;
            }
            panic!("{} {psn:?} belongs to no outstanding work request", packet.opcode)
        };
        let request = &self.requests[at];
        let reads = |r: &&Request| r.reads();
        let earlier = self.requests.iter().take(at).filter(reads).count();
        assert!(!request.flags.fence || earlier == 0, "a fenced request beside {earlier} READs and atomics");
        if request.reads() {
            assert!(
                earlier < self.live.setup.rd_atomic.into(),
                "{earlier} READs and atomics are outstanding"
            );
        }
        let index = psn.distance(request.first) as u32;
        let offset = index as usize * self.live.setup.mtu.bytes() as usize;
        let rest = request.length() - offset;
        let is_last = index + 1 == request.packets;
        let (operation, whole) = match request.op {
            SendOp::Send | SendOp::SendWithImm(_) | SendOp::SendWithInvalidate(_) => (Operation::Send, false),
            SendOp::Write(_) | SendOp::WriteWithImm(..) => (Operation::Write, false),
            SendOp::Read(_) => (Operation::ReadRequest, true),
            SendOp::CompareSwap { .. } => (Operation::CompareSwap, true),
            SendOp::FetchAdd { .. } => (Operation::FetchAdd, true),
            SendOp::Flush { .. } => (Operation::Flush, true),
            SendOp::AtomicWrite(_) => (Operation::AtomicWrite, false),
            other => panic!("{other:?} on the wire"),
        };
        let position = match (index == 0 || whole, is_last || whole) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        };
        assert_eq!((packet.opcode.operation(), packet.opcode.position()), (operation, position));
        if let Some(reth) = packet.reth() {
            let (va, length) = match request.op {
                SendOp::Read(_) => (REMOTE.addr.wrapping_add(offset as u64), rest),
                SendOp::Flush { length, .. } => (REMOTE.addr, length as usize),
                _ => (REMOTE.addr, request.length()),
            };
            assert_eq!((reth.va(), reth.rkey(), reth.length()), (va, REMOTE.rkey, length as u32));
        }
        if let Some(feth) = packet.feth() {
            let SendOp::Flush { selectivity, kind, .. } = request.op else {
                panic!("a FETH of {:?}", request.op)
            };
            assert_eq!((feth.selectivity(), feth.flush_type()), (Some(selectivity), kind));
        }
        if let Some(atomic) = packet.atomic_eth() {
            let (operand, compare) = match request.op {
                SendOp::CompareSwap { compare, swap, .. } => (swap, compare),
                SendOp::FetchAdd { add, .. } => (add, 0),
                _ => panic!("{} of {:?}", packet.opcode, request.op),
            };
            assert_eq!((atomic.va(), atomic.rkey()), (REMOTE.addr, REMOTE.rkey));
            assert_eq!((atomic.swap_or_add(), atomic.compare()), (operand, compare));
        }
        let immediate = match request.op {
            SendOp::SendWithImm(value) | SendOp::WriteWithImm(_, value) if is_last => Some(value),
            _ => None,
        };
        assert_eq!(packet.immdt().map(|immdt| immdt.value()), immediate);
        let invalidates = match request.op {
            SendOp::SendWithInvalidate(rkey) if is_last => Some(rkey),
            _ => None,
        };
        assert_eq!(packet.ieth().map(|ieth| ieth.rkey()), invalidates);
        assert_eq!(packet.opcode.has(Extension::ImmDt), immediate.is_some());
        let length = if whole { 0 } else { rest.min(self.live.setup.mtu.bytes() as usize) };
        assert_eq!(packet.payload.len(), length, "bytes of {}", packet.opcode);
        match &request.inline {
            Some(bytes) => assert!(packet.payload == &bytes[offset..offset + length], "not the inline bytes"),
            None => {
                let mut rest = packet.payload;
                for piece in part(&request.pieces, offset, length) {
                    let (here, after) = rest.split_at(piece.length);
                    assert!(here == self.live.bytes(piece), "{} has not what memory holds", packet.opcode);
                    rest = after;
                }
            }
        }
        let end = if whole { request.end() } else { psn + 1 };
        assert!(psn.distance(self.sent) <= 0, "a hole before {psn:?}");
        if end.distance(self.sent) > 0 {
            self.sent = end;
        }
    }

    /// The end: all posted work requests are accounted for, and all objects can be destroyed.
    fn finish(mut self) {
        self.live.set_room(usize::MAX);
        self.turn(&[]);
        self.stop();
        self.turn(&[]);
        assert!(self.requests.is_empty(), "work without a completion");
        let sent = self.live.destroy_qp();
        self.check_sent(&sent, false);
        self.live.destroy();
    }
}

/// Whether a queue pair in this state sends requests.
fn is_up(state: QpState) -> bool {
    matches!(state, QpState::Rts | QpState::Sqd)
}

fn covers(request: &Request, psn: Psn) -> bool {
    let distance = psn.distance(request.first);
    distance >= 0 && (distance as u32) < request.packets
}
