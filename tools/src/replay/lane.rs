//! One queue pair of the engine, in place of a recorded one.
//!
//! - A packet that the engine sends is kept without its payload, as length and digest. A queue pair may send a few
//!   packets for each packet that was recorded or requested. One that sends more is destroyed and reported as not
//!   played, and its engine continues with the others: a small capture can request a READ of 30 MiB a thousand times.
//! - On UC and UD any message may be lost, so all receive WRs of an end share one buffer. The newest packet shows which
//!   message was received into it. Datagrams are counted in the order of arrival, not by PSN.

mod completion;

use std::cmp::Ordering;
use std::collections::{HashSet, VecDeque};
use std::rc::Rc;

use ferroce::wire::{Operation, Reth, Service};
use ferroce::{
    Access, AddressVector, Context, Cq, Data, Destination, Gid, GidEntry, MacAddr, Memory, Mr, Pd, Qp,
    QpConfig, QpState, QpType, QpUpdate, Qpn, ReadyToReceive, ReadyToSend, ReceiveWorkRequest, RemoteAddress,
    SendFlags, SendOp, SendWorkRequest, Sge, Transition, UnreliablePath,
};

use super::conversation::{Conversation, Event, wrapped};
use super::message::Messages;
use super::packet::Seen;
use super::place::Place;
use super::play::{DEPTH, Played};
use super::recorded::{ack_timeout, permissions, refused_as_too_long, rnr_timer};
use super::rule::{Finding, Rule, Weight};
use crate::failure::{Failure, OrFail};

/// One queue pair of the engine.
pub(super) struct Lane<'a> {
    pub(super) end: usize,
    pub(super) of: &'a Conversation,
    pub(super) qp: Qp,
    pub(super) qpn: Qpn,
    /// The other end's queue pair, or an unused number.
    peer: Qpn,
    pub(super) own: Messages,
    pub(super) theirs: Messages,
    destination: Option<Destination>,
    /// The memory of sent payload, READ results and receive WRs.
    memory: Option<Mr>,
    /// By message: its place in that memory.
    sources: Vec<(u64, u32)>,
    sinks: Vec<(u64, u32)>,
    /// Messages that wait for room in the send queue.
    waiting: VecDeque<usize>,
    /// Messages whose receive WRs wait for room in the receive queue.
    waiting_receives: VecDeque<usize>,
    /// The next expected PSN of the other end's requests.
    due: i64,
    /// PSNs of the other end's atomics that the engine has answered.
    atomics: HashSet<i64>,
    /// The last PSNs of the other end's messages with the turn in which they ended, and the current turn.
    ended: Vec<(i64, u64)>,
    pub(super) turn: u64,
    /// The newest PSN that the engine has answered other than with a NAK.
    newest_answer: Option<i64>,
    /// The first PSN of a WRITE whose memory a later READ has replaced.
    overwritten: Option<i64>,
    /// The number of the other end's messages that the engine has completed, by its responses.
    answered: usize,
    /// The newest PSN of each end's requests.
    pub(super) newest: [i64; 2],
    /// The number of packets that it may still send.
    packets_left: u64,
    pub(super) played: Played,
}

/// The relation of a request to those that the engine has executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// An atomic that was answered before.
    Done,
    /// A repeated request, which may have found no receive WR.
    Again,
    /// The next request.
    Due,
    /// A request before it is missing, or it is damaged.
    Ahead,
}

/// Marks receive WRs in the `wr_id`.
const RECEIVE: u64 = 1 << 63;
/// Content of memory that nothing was received into.
const EMPTY: u8 = 0xee;
/// The first of the numbers for queue pairs that nothing was sent to.
const NOBODY: u32 = 0x00e0_0000;

impl<'a> Lane<'a> {
    /// A queue pair connected like the recorded one.
    pub(super) fn new(
        context: &mut Context,
        (pd, cq): (Pd, Cq),
        of: &'a Conversation,
        place: Place,
        (number, far): (u32, MacAddr),
        timeout: Option<u8>,
    ) -> Result<Lane<'a>, Failure> {
        let end = place.end;
        let (own, theirs) = (Messages::posted(of, end), of.messages[1 - end].clone());
        let start = |whose: usize, messages: &Messages| {
            let agreed = of.agreed.map(|agreed| i64::from(agreed.start[whose].value()));
            let seen = messages.list.first().map(|message| message.first);
            // Requests before the capture are acknowledged in it.
            let before = || {
                let mut answers = of.events.iter().filter(|event| event.space() == whose);
                answers.next().map(|event| event.psn + 1)
            };
            seen.or(agreed).or_else(before).unwrap_or(0)
        };
        let starts =
            if end == 0 { [start(0, &own), start(1, &theirs)] } else { [start(0, &theirs), start(1, &own)] };
        let config = QpConfig::new(qp_type(of.service), pd, cq)
            .max_send_wr(depth(&own))
            .max_recv_wr(depth(&theirs))
            .max_send_sge(1)
            .max_recv_sge(1)
            .signal_all(true);
        let qp = context.create_qp(&config)?;
        let qpn = context.query_qp(qp)?.qpn;
        let peer = of.ends[1 - end].qpn.unwrap_or(Qpn::new(NOBODY + number));
        let address = address(context, of, end, far)?;
        let rq_psn = wrapped(starts[1 - end]);
        let sq_psn = wrapped(starts[end]);
        let steps = match of.service {
            Service::Ud | Service::Cnp => {
                let qkey = of.events.iter().find(|e| e.from != end).and_then(|e| e.packet.extensions.deth);
                vec![
                    Transition::InitDatagram { qkey: qkey.map_or(0, |deth| deth.qkey()) },
                    Transition::ReadyToReceiveDatagrams,
                    Transition::ReadyToSendUnreliable { sq_psn },
                ]
            }
            Service::Uc => {
                let path = UnreliablePath::new(address, peer, rq_psn).path_mtu(of.path_mtu);
                vec![
                    Transition::Init { access: Access::REMOTE_WRITE },
                    Transition::ReadyToReceiveUnreliable(path),
                    Transition::ReadyToSendUnreliable { sq_psn },
                ]
            }
            Service::Rc => vec![
                Transition::Init { access: permissions(of, end, &theirs) },
                Transition::ReadyToReceive(
                    ReadyToReceive::new(address, peer, rq_psn)
                        .path_mtu(of.path_mtu)
                        .max_dest_rd_atomic(128)
                        .min_rnr_timer(rnr_timer(of, end)),
                ),
                Transition::ReadyToSend(
                    ReadyToSend::new(sq_psn)
                        .timeout(timeout.unwrap_or_else(|| ack_timeout(of, end)))
                        .retry_count(of.agreed.map_or(7, |agreed| agreed.retry_count))
                        .rnr_retry(of.agreed.map_or(7, |agreed| agreed.rnr_retry))
                        .max_rd_atomic(128),
                ),
            ],
        };
        let pkey_index = match context.port().pkeys.index_of(of.pkey) {
            Some(index) => index,
            None => context.add_pkey(of.pkey)?,
        };
        for step in steps {
            let is_init = matches!(step, Transition::Init { .. } | Transition::InitDatagram { .. });
            context.modify_qp(qp, step)?;
            if is_init {
                let update = QpUpdate::default().pkey_index(pkey_index);
                context.modify_qp(qp, Transition::Update(update))?;
            }
        }
        let destination = match of.service {
            Service::Ud => {
                let qkey = of.events.iter().find(|e| e.from == end).and_then(|e| e.packet.extensions.deth);
                let ah = context.create_ah(pd, &address)?;
                Some(Destination { ah, qpn: peer, qkey: qkey.map_or(0, |deth| deth.qkey()) })
            }
            _ => None,
        };
        let mut lane = Lane {
            end,
            of,
            qp,
            qpn,
            peer,
            own,
            theirs,
            destination,
            memory: None,
            sources: Vec::new(),
            sinks: Vec::new(),
            waiting: VecDeque::new(),
            waiting_receives: VecDeque::new(),
            due: starts[1 - end],
            atomics: HashSet::new(),
            ended: Vec::new(),
            turn: 0,
            newest_answer: None,
            overwritten: None,
            answered: 0,
            newest: starts.map(|start| start - 1),
            packets_left: packets_of(of),
            played: Played {
                place,
                events: Vec::new(),
                findings: Vec::new(),
                compared: (0, 0),
                posted: 0,
                given_up: None,
                dead_from: None,
                starts,
            },
        };
        lane.fill(context, pd)?;
        Ok(lane)
    }

    /// Posts the receive WR for one of the other end's messages.
    pub(super) fn receive(&mut self, context: &mut Context, number: usize) -> Result<(), Failure> {
        self.waiting_receives.push_back(number);
        self.post_receives(context)
    }

    fn post_receives(&mut self, context: &mut Context) -> Result<(), Failure> {
        while let Some(number) = self.waiting_receives.front().copied() {
            let (offset, length) = self.sinks[self.own.list.len() + number];
            let sges = [Sge { mr: self.mr()?, offset, length }];
            let wr = ReceiveWorkRequest { wr_id: RECEIVE | number as u64, sges: &sges };
            match context.post_recv(self.qp, &wr) {
                Ok(()) => {}
                Err(ferroce::Error::QueueFull { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            self.waiting_receives.pop_front();
        }
        Ok(())
    }

    /// The relation of a request of the other end to the engine's state.
    pub(super) fn standing(&self, request: &Event) -> Standing {
        let psn = request.psn;
        match psn.cmp(&self.due) {
            _ if !self.of.is_acceptable(&request.packet) => Standing::Ahead,
            _ if self.atomics.contains(&psn) => Standing::Done,
            Ordering::Less => Standing::Again,
            Ordering::Equal => Standing::Due,
            Ordering::Greater => Standing::Ahead,
        }
    }

    /// Notes that a READ has replaced memory. If the engine has received part of a WRITE to it, that WRITE can't be
    /// compared.
    pub(super) fn note_put(&mut self, read: Reth) {
        let begun = self.theirs.at(self.due).filter(|message| message.first < self.due);
        let Some(message) = begun.filter(|message| message.operation() == Some(Operation::Write)) else {
            return;
        };
        let end = |start: u64, len: u64| start.saturating_add(len);
        if let Some((addr, rkey, len)) = message.remote()
            && rkey == read.rkey()
            && addr < end(read.va(), read.length().into())
            && read.va() < end(addr, len)
        {
            self.overwritten = Some(message.first);
        }
    }

    /// Notes that a packet of the other end has reached the engine.
    pub(super) fn note_arrival(&mut self, event: &Event) {
        self.turn += 1;
        if event.packet.is_request() && self.of.is_acceptable(&event.packet) {
            if event.psn == self.due {
                self.due += self.of.span(&event.packet);
            }

            self.newest[event.from] = self.newest[event.from].max(event.psn);
            if event.packet.ends() {
                self.ended.push((event.psn, self.turn));
            }
        }
        let packet = Rc::clone(&event.packet);
        self.played.events.push(Event {
            from: event.from,
            packet,
            psn: event.psn,
            lost: event.lost,
            copy: event.copy,
            twin: event.twin,
        });
    }

    /// Whether the engine has still to send posted messages, and can.
    pub(super) fn has_unsent(&self) -> bool {
        let last = self.own.list.last().map(|message| message.first);
        self.played.dead_from.is_none()
            && !self.is_over()
            && last.is_some_and(|last| self.newest[self.end] < last)
    }

    /// Ends the lane. Messages that could not be posted are not counted against the engine.
    pub(super) fn end(mut self) -> Played {
        if let Some(message) = self.waiting.front().and_then(|number| self.own.list.get(*number)) {
            self.played.given_up = Some(self.played.given_up.map_or(message.first, |g| g.min(message.first)));
        }
        self.played
    }

    /// Queues one of the own messages; it is posted as soon as there is room.
    pub(super) fn send(&mut self, context: &mut Context, number: usize) -> Result<(), Failure> {
        self.waiting.push_back(number);
        self.post(context)
    }

    /// Bytes before a received message: the network header of datagrams.
    fn header_area(&self) -> usize {
        if self.of.service == Service::Ud { 40 } else { 0 }
    }

    fn mr(&self) -> Result<Mr, Failure> {
        self.memory.ok_or_else(|| Failure::run("a message without memory"))
    }

    /// Whether the engine gets a packet of the other end. It does not get packets that did not arrive, or that belong
    /// to partly recorded messages. It does get damaged packets, which it must drop.
    pub(super) fn is_understood(&self, event: &Event) -> bool {
        let packet = &event.packet;
        let is_known = match self.of.service {
            Service::Rc | Service::Uc if packet.is_request() => self.theirs.at(event.psn).is_some(),
            Service::Rc | Service::Uc if packet.is_response() => self.own.at(event.psn).is_some(),
            _ => true,
        };
        if self.of.is_acceptable(packet) { is_known && !event.lost } else { true }
    }

    pub(super) fn fault(&mut self, rule: Rule, frame: u64, text: String) {
        self.played.findings.push(Finding { rule, weight: Weight::Violation, frame, text });
    }

    /// Registers memory for sent payload, READs and receive WRs.
    fn fill(&mut self, context: &mut Context, pd: Pd) -> Result<(), Failure> {
        let mtu = self.of.path_mtu.bytes() as usize;
        let mut end = 0;
        let mut place = |len: usize| {
            let offset = end;
            end = (offset + len).next_multiple_of(8);
            (offset as u64, len as u32)
        };
        for message in &self.own.list {
            self.sources.push(place(message.payload_len(mtu)));
        }
        for message in &self.own.list {
            let len = match message.operation() {
                Some(Operation::ReadRequest) => message.remote().map_or(0, |(_, _, len)| len as usize),
                Some(Operation::CompareSwap | Operation::FetchAdd) => 8,
                _ => 0,
            };
            self.sinks.push(place(len));
        }
        let area = self.header_area();
        let lens = self.theirs.list.iter().map(|message| {
            let too_long = refused_as_too_long(self.of, self.end, message);
            too_long.unwrap_or_else(|| message.receive_len(mtu) + area)
        });
        if self.of.service == Service::Rc {
            self.sinks.extend(lens.map(place));
        } else {
            // Any message may be lost, and the next one is received into its receive WR: all share one place, which is
            // checked before another packet arrives.
            let common = place(lens.max().unwrap_or(0));
            self.sinks.resize(self.sinks.len() + self.theirs.list.len(), common);
        }
        let len = end.max(8);
        let mut memory = Memory::zeroed(len).or_fail(|| format!("{len} bytes of memory"))?;
        let bytes = memory.bytes_mut()?;
        for (message, (offset, len)) in self.own.list.iter().zip(&self.sources) {
            let start = *offset as usize;
            bytes[start..start + *len as usize].copy_from_slice(&message.payload(mtu).0);
        }
        for (offset, len) in &self.sinks {
            let start = *offset as usize;
            bytes[start..start + *len as usize].fill(EMPTY);
        }
        let registered = context.register(pd, memory, Access::LOCAL_WRITE);
        self.memory = Some(registered.map_err(|error| Failure::run(error.to_string()))?);
        Ok(())
    }

    /// Posts waiting work requests, as far as there is room.
    pub(super) fn post(&mut self, context: &mut Context) -> Result<(), Failure> {
        self.post_receives(context)?;
        while let Some(number) = self.waiting.front().copied() {
            if context.query_qp(self.qp)?.state != QpState::Rts {
                return Ok(()); // the engine has given up the connection
            }
            let (op, (offset, length)) = self.work(number)?;
            let sges = [Sge { mr: self.mr()?, offset, length }];
            let data = Data::Sges(if length == 0 { &[] } else { &sges });
            let tail = self.own.list[number].tail();
            let solicited = tail.is_some_and(|packet| packet.bth.solicited());
            let flags = SendFlags::SIGNALED.solicited(solicited);
            match context.post_send(self.qp, &SendWorkRequest { wr_id: number as u64, op, data, flags }) {
                Ok(()) => self.played.posted += 1,
                Err(ferroce::Error::QueueFull { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// The work request of one of the own messages, and its local memory.
    fn work(&self, number: usize) -> Result<(SendOp, (u64, u32)), Failure> {
        let message = &self.own.list[number];
        let (source, sink) = (self.sources[number], self.sinks[number]);
        let tail = message.tail().ok_or_else(|| Failure::run("a message without packets"))?;
        let head = message.packets.first().and_then(Option::as_ref).unwrap_or(tail);
        let remote = message.remote().map(|(addr, rkey, _)| RemoteAddress { addr, rkey });
        let missing = || Failure::run(format!("frame {}: {} without its headers", head.frame, head.opcode));
        let op = match (head.opcode.operation(), tail.immediate(), remote) {
            (Operation::Send, immediate, _) => match (self.destination, immediate, tail.invalidates()) {
                (Some(to), None, _) => SendOp::SendTo(to),
                (Some(to), Some(immediate), _) => SendOp::SendToWithImm(to, immediate),
                (None, Some(immediate), _) => SendOp::SendWithImm(immediate),
                (None, None, Some(rkey)) => SendOp::SendWithInvalidate(rkey),
                (None, None, None) => SendOp::Send,
            },
            (Operation::Write, Some(immediate), Some(remote)) => SendOp::WriteWithImm(remote, immediate),
            (Operation::Write, None, Some(remote)) => SendOp::Write(remote),
            (Operation::ReadRequest, _, Some(remote)) => return Ok((SendOp::Read(remote), sink)),
            (Operation::CompareSwap, _, Some(remote)) => {
                let atomic = head.extensions.atomic_eth.ok_or_else(missing)?;
                let (compare, swap) = (atomic.compare(), atomic.swap_or_add());
                return Ok((SendOp::CompareSwap { remote, compare, swap }, sink));
            }
            (Operation::FetchAdd, _, Some(remote)) => {
                let add = head.extensions.atomic_eth.ok_or_else(missing)?.swap_or_add();
                return Ok((SendOp::FetchAdd { remote, add }, sink));
            }
            (Operation::AtomicWrite, _, Some(remote)) => SendOp::AtomicWrite(remote),
            (Operation::Flush, _, Some(remote)) => {
                let feth = head.extensions.feth.ok_or_else(missing)?;
                let length = head.extensions.reth.map_or(0, |reth| reth.length());
                let selectivity = feth.selectivity().ok_or_else(missing)?;
                SendOp::Flush { remote, length, selectivity, kind: feth.flush_type() }
            }
            _ => return Err(missing()),
        };
        Ok((op, source))
    }

    /// The recorded queue pair that this one sends to.
    pub(super) fn sends_to(&self) -> (Gid, Qpn) {
        (self.of.ends[1 - self.end].gid, self.peer)
    }

    /// Whether this queue pair sent a packet to its peer.
    pub(super) fn sent(&self, packet: &Seen) -> bool {
        let source = packet.extensions.deth.is_none_or(|deth| deth.source_qpn() == self.qpn);
        source && (packet.service() == self.of.service || packet.is_cnp())
    }

    /// Whether the engine has sent more than the limit: then this queue pair is no longer played, and not judged.
    pub(super) fn is_over(&self) -> bool {
        self.packets_left == 0
    }

    /// The reason that it is not judged.
    pub(super) fn why_over(&self) -> String {
        format!(
            "the engine sent more than {} packets for the {} that were recorded",
            packets_of(self.of),
            self.of.events.len()
        )
    }

    /// Records a packet of the engine.
    pub(super) fn keep(&mut self, packet: Seen) {
        self.packets_left = self.packets_left.saturating_sub(1);
        if self.is_over() {
            self.played.events = Vec::new();
            return;
        }
        let space = if packet.is_request() { self.end } else { 1 - self.end };
        let newest = &mut self.newest[space];
        let psn = *newest + i64::from(packet.psn().distance(wrapped(*newest)));
        if packet.is_request() {
            *newest = (*newest).max(psn);
        }
        if packet.original().is_some() {
            self.atomics.insert(psn);
        }
        if packet.is_response() && !packet.is_nak() {
            self.newest_answer = self.newest_answer.max(Some(psn));
        }
        self.played.events.push(Event {
            from: self.end,
            packet: Rc::new(packet),
            psn,
            lost: false,
            copy: false,
            twin: false,
        });
    }
}

/// The most packets that the engine may send in a conversation: some for each recorded packet, and for each requested
/// one.
fn packets_of(of: &Conversation) -> u64 {
    let asked: u64 = of.messages.iter().map(Messages::psns).sum();
    FEW + 4 * of.events.len() as u64 + 2 * asked
}

/// The packets that any queue pair may send.
const FEW: u64 = 64;

/// The depth of a queue for these messages.
fn depth(messages: &Messages) -> u32 {
    (messages.list.len() as u32).next_power_of_two().clamp(16, DEPTH)
}

/// The path to the other end.
fn address(context: &Context, of: &Conversation, end: usize, far: MacAddr) -> Result<AddressVector, Failure> {
    let gid = of.ends[1 - end].gid;
    if gid.is_multicast() {
        return Err(Failure::run(format!("{} is a multicast group; such datagrams are not replayed", gid)));
    }
    let first = of.events.iter().find(|event| event.from == end);
    let is_v1 = of.is_roce_v1(end);
    let own = |entry: &GidEntry| entry.gid == of.ends[end].gid && entry.roce_v1 == is_v1;
    let gids = &context.port().gids;
    let sgid_index = gids.iter().position(own).ok_or_else(|| Failure::run("an end without address"))?;
    Ok(AddressVector::new(gid, sgid_index)
        .mac(far)
        .traffic_class(first.map_or(0, |event| event.packet.network.traffic_class)))
}

fn qp_type(service: Service) -> QpType {
    match service {
        Service::Rc | Service::Cnp => QpType::Rc,
        Service::Uc => QpType::Uc,
        Service::Ud => QpType::Ud,
    }
}
