//! The engine in the place of one recorded end: what its application posted and what the other end
//! sent, at the recorded times; what the engine sends is kept.

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use ferroce::driver::loopback::{Loopback, Switch, SwitchConfig};
use ferroce::wire::{ICRC_LEN, Operation, Service, Syndrome, icrc};
use ferroce::{
    Access, AddressVector, Config, Context, Cq, Data, Destination, MacAddr, Memory, Mr, Nanos,
    PacketDriver, Pd, Qp, QpConfig, QpState, Qpn, RKey, ReadyToReceive, ReadyToSend, ReceiveWorkRequest,
    RemoteAddress, RnrTimer, SendFlags, SendOp, SendWorkRequest, Sge, Transition, UnreliablePath, WcOpcode,
    WcStatus, WorkCompletion,
};

use super::conversation::{Conversation, Event, wrapped};
use super::memory::{Exposed, Found};
use super::message::{Message, Messages};
use super::packet::Seen;
use super::rule::{Finding, Rule, Weight};
use crate::failure::{Failure, OrFail};

/// What the engine did in the place of an end.
#[derive(Debug)]
pub(super) struct Played {
    /// Index of the conversation.
    pub(super) conversation: usize,
    /// Which end the engine was.
    pub(super) end: usize,
    /// What reached the engine, and what it sent, in order.
    pub(super) events: Vec<Event>,
    pub(super) findings: Vec<Finding>,
    /// Messages whose bytes were compared, and how many bytes.
    pub(super) compared: (u64, u64),
    /// How many messages the application posted.
    pub(super) posted: u64,
    /// The first PSN of either end.
    pub(super) starts: [i64; 2],
}

/// Puts the engine in the place of `role` in all of its conversations: at `ends[i]` of `chosen[i]`.
pub(super) fn play(
    conversations: &[Conversation],
    places: &[(usize, usize)],
    timeout: Option<u8>,
) -> Result<(Vec<Played>, Vec<(&'static str, u64)>), Failure> {
    let mut stage = Stage::new(conversations, places, timeout)?;
    let mut steps = stage.steps();
    steps.sort_by_key(|step| (step.at, step.what.rank(), step.order));
    for step in steps {
        stage.run_until(step.at)?;
        stage.carry_out(&step)?;
        stage.settle(step.frame)?;
    }
    let counters = stage.context.counters().iter().filter(|(_, value)| *value > 0).collect();
    Ok((stage.lanes.into_iter().map(Lane::end).collect(), counters))
}

/// Largest IP packet between the engine and the recorded side.
const MTU: u32 = 9216;
/// Work requests that a queue pair holds; what is more waits.
const DEPTH: u32 = 4096;
/// The engine's random numbers: a replay is the same each time.
const SEED: [u8; 32] = [0x5e; 32];

struct Stage<'a> {
    conversations: &'a [Conversation],
    context: Context,
    /// The recorded side's end of the cable.
    far: Loopback,
    near_mac: [u8; 6],
    far_mac: [u8; 6],
    pd: Pd,
    cq: Cq,
    lanes: Vec<Lane<'a>>,
    exposed: Exposed,
    now: Nanos,
    timeout: Option<u8>,
}

/// One queue pair of the engine.
struct Lane<'a> {
    end: usize,
    of: &'a Conversation,
    qp: Qp,
    qpn: Qpn,
    /// The other end's queue pair, or a number that nobody has.
    peer: Qpn,
    own: Messages,
    theirs: Messages,
    destination: Option<Destination>,
    /// Where payload goes out from, READs and receives come in.
    memory: Option<Mr>,
    /// By message, where in that memory.
    sources: Vec<(u64, u32)>,
    sinks: Vec<(u64, u32)>,
    /// Messages that wait for room in the send queue.
    waiting: VecDeque<usize>,
    /// Their messages that ended at the engine, as its answers tell.
    answered: usize,
    /// The newest PSN of either end's requests.
    newest: [i64; 2],
    played: Played,
}

struct Step {
    at: Nanos,
    lane: usize,
    what: What,
    order: usize,
    frame: u64,
}

#[derive(Clone, Copy)]
enum What {
    /// A receive for their message of that number.
    Receive(usize),
    /// A work request: our message of that number.
    Send(usize),
    /// Their packet.
    Packet(usize),
}

impl What {
    /// Of what happens at one time, what comes first.
    fn rank(self) -> u8 {
        match self {
            What::Receive(_) => 0,
            What::Send(_) => 1,
            What::Packet(_) => 2,
        }
    }
}

impl<'a> Stage<'a> {
    fn new(
        conversations: &'a [Conversation],
        places: &[(usize, usize)],
        timeout: Option<u8>,
    ) -> Result<Stage<'a>, Failure> {
        let ends = |other: bool| {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for (index, end) in places {
                let ends = &conversations[*index].ends;
                let address = ends[if other { 1 - end } else { *end }].gid.to_ip();
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            addresses
        };
        let switch = Switch::new(SwitchConfig { mtu: MTU, depth: 4096 })?;
        let (near, far) = (switch.port(&ends(false)), switch.port(&ends(true)));
        let (near_mac, far_mac) = (near.capabilities().mac, far.capabilities().mac);
        let is_v1 = |c: &Conversation| c.events.iter().any(|e| e.packet.source_port.is_none());
        let config = Config {
            seed: Some(SEED),
            roce_v1: conversations.iter().any(is_v1),
            max_qps: places.len() as u32 + 1,
            max_ahs: places.len() as u32 + 1,
            max_mrs: 1 << 16,
            window: 1 << 20,
            ..Config::default()
        };
        let mut context = Context::open(Box::new(near), &config)?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(2 * DEPTH * (places.len() as u32).clamp(1, 512))?;
        let exposed = Exposed::new(&mut context, pd, conversations, places)?;
        let mut stage = Stage {
            conversations,
            context,
            far,
            near_mac,
            far_mac,
            pd,
            cq,
            lanes: Vec::new(),
            exposed,
            now: Nanos::ZERO,
            timeout,
        };
        for (index, end) in places {
            let lane = stage.lane(*index, *end)?;
            stage.lanes.push(lane);
        }
        Ok(stage)
    }

    /// A queue pair that is connected as the recorded one was.
    fn lane(&mut self, index: usize, end: usize) -> Result<Lane<'a>, Failure> {
        let of = &self.conversations[index];
        let (own, theirs) = (Messages::of(of, end), Messages::of(of, 1 - end));
        let start = |whose: usize, messages: &Messages| {
            let agreed = of.agreed.map(|agreed| i64::from(agreed.start[whose].value()));
            let seen = messages.list.first().map(|message| message.first);
            // What was sent before the capture began is acknowledged in it.
            let before = || {
                let mut answers = of.events.iter().filter(|event| event.space() == whose);
                answers.next().map(|event| event.psn + 1)
            };
            if messages.orphans > 0 { seen } else { agreed.or(seen) }.or_else(before).unwrap_or(0)
        };
        let starts = if end == 0 { [start(0, &own), start(1, &theirs)] } else { [start(0, &theirs), start(1, &own)] };
        let config = QpConfig {
            qp_type: of.service.into_type(),
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_send_sge: 1,
            max_recv_sge: 1,
            signal_all: true,
            ..QpConfig::rc(self.pd, self.cq)
        };
        let qp = self.context.create_qp(&config)?;
        let qpn = self.context.query_qp(qp)?.qpn;
        let peer = of.ends[1 - end].qpn.unwrap_or(Qpn::new(NOBODY + self.lanes.len() as u32));
        let address = self.address(of, end)?;
        let rq_psn = wrapped(starts[1 - end]);
        let sq_psn = wrapped(starts[end]);
        let steps = match of.service {
            Service::Ud | Service::Cnp => {
                let qkey = of.events.iter().find(|e| e.from != end).and_then(|e| e.packet.deth);
                vec![
                    Transition::InitDatagram { qkey: qkey.map_or(0, |deth| deth.qkey()) },
                    Transition::ReadyToReceiveDatagrams,
                    Transition::ReadyToSendUnreliable { sq_psn },
                ]
            }
            Service::Uc => {
                let path = UnreliablePath { address, path_mtu: of.path_mtu, dest_qpn: peer, rq_psn };
                vec![
                    Transition::Init { access: Access::REMOTE_WRITE },
                    Transition::ReadyToReceiveUnreliable(path),
                    Transition::ReadyToSendUnreliable { sq_psn },
                ]
            }
            Service::Rc => vec![
                Transition::Init { access: permissions(of, end, &theirs) },
                Transition::ReadyToReceive(ReadyToReceive {
                    path_mtu: of.path_mtu,
                    max_dest_rd_atomic: 128,
                    min_rnr_timer: rnr_timer(of, end),
                    ..ReadyToReceive::new(address, peer, rq_psn)
                }),
                Transition::ReadyToSend(ReadyToSend {
                    sq_psn,
                    timeout: self.timeout.unwrap_or_else(|| ack_timeout(of, end)),
                    retry_count: of.agreed.map_or(7, |agreed| agreed.retry_count),
                    rnr_retry: of.agreed.map_or(7, |agreed| agreed.rnr_retry),
                    max_rd_atomic: 128,
                }),
            ],
        };
        for step in steps {
            self.context.modify_qp(qp, step)?;
        }
        let destination = match of.service {
            Service::Ud => {
                let qkey = of.events.iter().find(|e| e.from == end).and_then(|e| e.packet.deth);
                let ah = self.context.create_ah(self.pd, &address)?;
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
            answered: 0,
            newest: starts.map(|start| start - 1),
            played: Played {
                conversation: index,
                end,
                events: Vec::new(),
                findings: Vec::new(),
                compared: (0, 0),
                posted: 0,
                starts,
            },
        };
        lane.fill(&mut self.context, self.pd)?;
        Ok(lane)
    }

    fn address(&self, of: &Conversation, end: usize) -> Result<AddressVector, Failure> {
        let gid = of.ends[1 - end].gid;
        if gid.is_multicast() {
            return Err(Failure::run(format!("{} is a multicast group; such datagrams are not replayed", gid)));
        }
        let first = of.events.iter().find(|event| event.from == end);
        let is_v1 = of.events.iter().any(|event| event.packet.source_port.is_none());
        let own = |entry: &ferroce::GidEntry| entry.gid == of.ends[end].gid && entry.roce_v1 == is_v1;
        let gids = &self.context.port().gids;
        let sgid_index = gids.iter().position(own).ok_or_else(|| Failure::run("an end without address"))?;
        Ok(AddressVector {
            mac: Some(MacAddr(self.far_mac)),
            traffic_class: first.map_or(0, |event| event.packet.traffic_class),
            ..AddressVector::new(gid, sgid_index)
        })
    }

    /// All that happens from outside the engine.
    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (lane, of) in self.lanes.iter().enumerate() {
            let mut step = |at, what, order, frame| steps.push(Step { at, lane, what, order, frame });
            for (number, message) in of.own.list.iter().enumerate() {
                step(message.at, What::Send(number), number, message.frame);
            }
            for (number, at) in of.receive_times() {
                step(at, What::Receive(number), number, of.theirs.list[number].frame);
            }
            for (index, event) in of.of.events.iter().enumerate() {
                if event.from != of.end && of.is_understood(event) {
                    step(event.packet.at, What::Packet(index), index, event.packet.frame);
                }
            }
        }
        steps
    }

    /// Lets virtual time go by.
    fn run_until(&mut self, at: Nanos) -> Result<(), Failure> {
        let frame = self.lanes.iter().filter_map(|lane| Some(lane.played.events.last()?.packet.frame)).max();
        while let Some(timer) = self.context.next_timeout().filter(|timer| *timer <= at) {
            self.now = self.now.max(timer);
            self.settle(frame.unwrap_or(0))?;
        }
        self.now = self.now.max(at);
        Ok(())
    }

    fn carry_out(&mut self, step: &Step) -> Result<(), Failure> {
        let lane = &mut self.lanes[step.lane];
        match step.what {
            What::Receive(number) => {
                let (offset, length) = lane.sinks[lane.own.list.len() + number];
                let sges = [Sge { mr: lane.mr()?, offset, length }];
                let wr = ReceiveWorkRequest { wr_id: RECEIVE | number as u64, sges: &sges };
                // Its send queue is as long as any application's; beyond it is a peer that was told RNR.
                self.context.post_recv(lane.qp, &wr)?;
            }
            What::Send(number) => {
                lane.waiting.push_back(number);
                lane.post(&mut self.context)?;
            }
            What::Packet(index) => {
                let event = &lane.of.events[index];
                self.exposed.prepare(&mut self.context, lane.of, index, &mut lane.played.findings)?;
                let frame = translated(&event.packet, lane.qpn, &self.exposed, self.near_mac, self.far_mac);
                let mut frame = Some(frame);
                self.far.tx_burst(self.now, &mut |room: &mut [u8]| {
                    let frame = frame.take()?;
                    room.get_mut(..frame.len())?.copy_from_slice(&frame);
                    Some(frame.len())
                })?;
                let packet = Rc::clone(&event.packet);
                let (from, psn) = (event.from, event.psn);
                if packet.is_request() {
                    lane.newest[from] = lane.newest[from].max(psn);
                }
                lane.played.events.push(Event { from, packet, psn, lost: event.lost });
            }
        }
        Ok(())
    }

    /// Polls until the engine has nothing more to do at this time.
    fn settle(&mut self, frame: u64) -> Result<(), Failure> {
        loop {
            let mut moved = self.context.poll(self.now)?;
            let (lanes, now) = (&mut self.lanes, self.now);
            moved += self.far.rx_burst(now, &mut |bytes: &[u8]| {
                let is_v1 = bytes.get(12..14) == Some(&[0x89, 0x15]);
                let packet = bytes.get(ETHERNET_LEN..).map(|packet| Seen::new(frame, now, packet, is_v1));
                if let Some(Ok(packet)) = packet
                    && let Some(lane) = lanes.iter_mut().rev().find(|lane| lane.sent(&packet))
                {
                    lane.keep(packet);
                }
            })?;
            while let Some(wc) = self.context.poll_cq(self.cq)? {
                if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.qp == wc.qp) {
                    lane.completed(&mut self.context, &wc)?;
                }
            }
            for lane in &mut self.lanes {
                lane.post(&mut self.context)?;
                for finding in self.exposed.check(&self.context, lane.newly_answered())? {
                    match finding {
                        Found::Right(bytes) => {
                            lane.played.compared.0 += 1;
                            lane.played.compared.1 += bytes;
                        }
                        Found::Wrong(frame, text) => lane.fault(Rule::Data, frame, text),
                    }
                }
            }
            while self.context.next_event().is_some() {}
            if moved == 0 && self.context.next_timeout().is_none_or(|timer| timer > self.now) {
                return Ok(());
            }
        }
    }
}

/// Marks the receives among the work request's numbers.
const RECEIVE: u64 = 1 << 63;
/// From here on, numbers for queue pairs that nothing was sent to.
const NOBODY: u32 = 0x00e0_0000;
const ETHERNET_LEN: usize = 14;

impl Lane<'_> {
    fn mr(&self) -> Result<Mr, Failure> {
        self.memory.ok_or_else(|| Failure::run("a message without memory"))
    }

    /// Whether the engine is to get one of their packets: not what did not arrive, and not what belongs
    /// to messages of which the capture has only a part. What is damaged it must see, to refuse it.
    fn is_understood(&self, event: &Event) -> bool {
        let packet = &event.packet;
        let is_known = match self.of.service {
            Service::Rc | Service::Uc if packet.is_request() => self.theirs.at(event.psn).is_some(),
            Service::Rc | Service::Uc if packet.is_response() => self.own.at(event.psn).is_some(),
            _ => true,
        };
        if packet.is_acceptable() { is_known && !event.lost } else { true }
    }

    fn fault(&mut self, rule: Rule, frame: u64, text: String) {
        self.played.findings.push(Finding { rule, weight: Weight::Violation, frame, text });
    }

    /// Registers what is sent, and room for what is read and received.
    fn fill(&mut self, context: &mut Context, pd: Pd) -> Result<(), Failure> {
        let mtu = self.of.path_mtu.bytes() as usize;
        let mut bytes = Vec::new();
        let mut place = |payload: &[u8]| {
            let offset = bytes.len() as u64;
            bytes.extend_from_slice(payload);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            (offset, payload.len() as u32)
        };
        for message in &self.own.list {
            let (payload, _) = message.payload(mtu);
            self.sources.push(place(&payload));
        }
        for message in &self.own.list {
            let len = match message.operation() {
                Some(Operation::ReadRequest) => message.remote().map_or(0, |(_, _, len)| len as usize),
                Some(Operation::CompareSwap | Operation::FetchAdd) => 8,
                _ => 0,
            };
            self.sinks.push(place(&vec![0xee; len]));
        }
        let area = if self.of.service == Service::Ud { 40 } else { 0 };
        for message in &self.theirs.list {
            let too_long = self.refused_as_too_long(message, mtu);
            let len = too_long.unwrap_or_else(|| message.receive_len(mtu) + area);
            self.sinks.push(place(&vec![0xee; len]));
        }
        bytes.resize(bytes.len().max(8), 0);
        let memory = Memory::copy_of(&bytes).or_fail(|| format!("{} bytes of memory", bytes.len()))?;
        let registered = context.register(pd, memory, Access::LOCAL_WRITE);
        self.memory = Some(registered.map_err(|error| Failure::run(error.to_string()))?);
        Ok(())
    }

    /// The length of a receive that a message was refused for.
    fn refused_as_too_long(&self, message: &Message, mtu: usize) -> Option<usize> {
        let refused = self.of.events.iter().find_map(|event| {
            let byte = event.packet.aeth.filter(|_| event.from == self.end)?.syndrome_byte();
            let inside = event.psn >= message.first && event.psn <= message.last;
            (inside && matches!(byte, 0x61 | 0x63)).then_some(event.psn)
        })?;
        (message.operation() == Some(Operation::Send)).then_some(())?;
        let before = (refused - message.first) as usize * mtu;
        Some(message.payload(mtu).0.len().saturating_sub(1).min(before))
    }

    /// When receives were posted, as far as the packets tell: before the message came, or after the last
    /// time that there was none.
    fn receive_times(&self) -> Vec<(usize, Nanos)> {
        let takers: Vec<usize> =
            (0..self.theirs.list.len()).filter(|n| self.theirs.list[*n].takes_receive()).collect();
        let mut times: Vec<(usize, Option<Nanos>)> = Vec::new();
        for number in takers {
            let message = &self.theirs.list[number];
            let inside = |event: &&Event| event.psn >= message.first && event.psn <= message.last;
            let told = self.of.events.iter().filter(|event| event.from == self.end && is_rnr_nak(&event.packet));
            let last_told = told.filter(inside).map(|event| event.packet.at).max();
            let time = match last_told {
                None => Some(message.at),
                Some(told) => {
                    let mut again = self.of.events.iter().filter(|event| event.from != self.end);
                    let comes_again = again.any(|event| {
                        event.packet.is_request() && event.packet.at > told && inside(&event)
                    });
                    // The last of them may have been told in vain again, without a record of it.
                    let taken = self.of.events.iter().any(|event| {
                        event.from == self.end
                            && event.psn >= message.last
                            && event.packet.at > told
                            && event.packet.is_response()
                            && !is_rnr_nak(&event.packet)
                    });
                    (comes_again && taken).then_some(told)
                }
            };
            times.push((number, time));
        }
        // They are taken in order.
        let mut latest = Nanos::ZERO;
        let mut ordered = Vec::new();
        for (number, time) in times {
            let Some(time) = time else { break };
            latest = latest.max(time);
            ordered.push((number, latest));
        }
        ordered
    }

    /// Posts what waits, as far as there is room.
    fn post(&mut self, context: &mut Context) -> Result<(), Failure> {
        while let Some(number) = self.waiting.front().copied() {
            if context.query_qp(self.qp)?.state != QpState::Rts {
                return Ok(()); // the engine has given the connection up
            }
            let (op, (offset, length)) = self.work(number)?;
            let sges = [Sge { mr: self.mr()?, offset, length }];
            let data = Data::Sges(if length == 0 { &[] } else { &sges });
            let tail = self.own.list[number].tail();
            let solicited = tail.is_some_and(|packet| packet.bth.solicited());
            let flags = SendFlags { solicited, ..SendFlags::SIGNALED };
            match context.post_send(self.qp, &SendWorkRequest { wr_id: number as u64, op, data, flags }) {
                Ok(()) => self.played.posted += 1,
                Err(ferroce::Error::QueueFull { .. }) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// The work request of one of our messages, and its local memory.
    fn work(&self, number: usize) -> Result<(SendOp, (u64, u32)), Failure> {
        let message = &self.own.list[number];
        let (source, sink) = (self.sources[number], self.sinks[number]);
        let tail = message.tail().ok_or_else(|| Failure::run("a message without packets"))?;
        let head = message.packets.first().and_then(Option::as_ref).unwrap_or(tail);
        let remote = message.remote().map(|(addr, rkey, _)| RemoteAddress { addr, rkey });
        let missing = || Failure::run(format!("frame {}: {} without its headers", head.frame, head.opcode));
        let op = match (head.opcode.operation(), tail.immediate, remote) {
            (Operation::Send, immediate, _) => match (self.destination, immediate, tail.invalidates) {
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
                let atomic = head.atomic.ok_or_else(missing)?;
                let (compare, swap) = (atomic.compare(), atomic.swap_or_add());
                return Ok((SendOp::CompareSwap { remote, compare, swap }, sink));
            }
            (Operation::FetchAdd, _, Some(remote)) => {
                let add = head.atomic.ok_or_else(missing)?.swap_or_add();
                return Ok((SendOp::FetchAdd { remote, add }, sink));
            }
            (Operation::AtomicWrite, _, Some(remote)) => SendOp::AtomicWrite(remote),
            (Operation::Flush, _, Some(remote)) => {
                let feth = head.feth.ok_or_else(missing)?;
                let length = head.reth.map_or(0, |reth| reth.length());
                let selectivity = feth.selectivity().ok_or_else(missing)?;
                SendOp::Flush { remote, length, selectivity, kind: feth.flush_type() }
            }
            _ => return Err(missing()),
        };
        Ok((op, source))
    }

    /// Whether it was this queue pair that sent a packet.
    fn sent(&self, packet: &Seen) -> bool {
        let source = packet.deth.is_none_or(|deth| deth.source_qpn() == self.qpn);
        let is_ours = packet.service() == self.of.service || packet.is_cnp();
        is_ours
            && source
            && packet.bth.dest_qpn() == self.peer
            && packet.destination == self.of.ends[1 - self.end].gid
    }

    /// Keeps a packet of the engine.
    fn keep(&mut self, packet: Seen) {
        let space = if packet.is_request() { self.end } else { 1 - self.end };
        let newest = &mut self.newest[space];
        let psn = *newest + i64::from(packet.psn().distance(wrapped(*newest)));
        if packet.is_request() {
            *newest = (*newest).max(psn);
        }
        self.played.events.push(Event { from: self.end, packet: Rc::new(packet), psn, lost: false });
    }

    /// Compares what has arrived with what was sent.
    fn completed(&mut self, context: &mut Context, wc: &WorkCompletion) -> Result<(), Failure> {
        let number = (wc.wr_id & !RECEIVE) as usize;
        let mtu = self.of.path_mtu.bytes() as usize;
        let received = wc.wr_id & RECEIVE != 0;
        let messages = if received { &self.theirs } else { &self.own };
        let Some(message) = messages.list.get(number).cloned()
        else {
            return Ok(());
        };
        let frame = message.frame;
        let (offset, _) = self.sinks[if received { self.own.list.len() + number } else { number }];
        if received {
            if wc.status != WcStatus::Success {
                return Ok(());
            }
            let area = if self.of.service == Service::Ud { 40 } else { 0 };
            let (payload, whole) = message.payload(mtu);
            let immediate = message.tail().and_then(|packet| packet.immediate);
            if wc.opcode == WcOpcode::Recv && wc.byte_len as usize != payload.len() + area {
                let text = format!("{} bytes received of a SEND of {}", wc.byte_len, payload.len() + area);
                self.fault(Rule::Data, frame, text);
            } else if wc.immediate != immediate {
                let text = format!("immediate {:?} received, {immediate:?} was sent", wc.immediate);
                self.fault(Rule::Data, frame, text);
            } else if wc.opcode == WcOpcode::Recv && whole {
                self.compare(context, offset + area as u64, &payload, frame, "received")?;
            }
            return Ok(());
        }
        let refused = self.of.events.iter().any(|event| {
            let nak = event.packet.aeth.is_some_and(|aeth| matches!(aeth.syndrome_byte(), 0x61..=0x64));
            nak && event.from != self.end && event.psn <= message.last
        });
        if wc.status != WcStatus::Success {
            if !refused {
                let text = format!("the work request ended with {:?}", wc.status);
                self.fault(Rule::Completion, frame, text);
            }
            return Ok(());
        }
        if wc.opcode == WcOpcode::RdmaRead
            && let Some(expected) = self.read_data(&message)
        {
            self.compare(context, offset, &expected, frame, "read")?;
        }
        if matches!(wc.opcode, WcOpcode::CompSwap | WcOpcode::FetchAdd) {
            let answers = self.of.events.iter().filter(|event| event.from != self.end);
            let original = answers.filter(|e| e.psn == message.first).find_map(|e| e.packet.original);
            if let Some(original) = original {
                self.compare(context, offset, &original.to_ne_bytes(), frame, "returned by the atomic")?;
            }
        }
        Ok(())
    }

    /// What the responses to a READ brought, if all of them were recorded.
    fn read_data(&self, message: &Message) -> Option<Vec<u8>> {
        let (_, _, len) = message.remote()?;
        let mut data = vec![None; (message.last - message.first + 1) as usize];
        for event in &self.of.events {
            let is_response = event.packet.opcode.operation() == Operation::ReadResponse;
            if event.from != self.end && is_response && !event.lost {
                let place = usize::try_from(event.psn - message.first).ok();
                if let Some(slot) = place.and_then(|place| data.get_mut(place)) {
                    slot.get_or_insert(Rc::clone(&event.packet));
                }
            }
        }
        let mut bytes = Vec::with_capacity(len as usize);
        for packet in data {
            bytes.extend_from_slice(packet?.payload());
        }
        (bytes.len() as u64 == len).then_some(bytes)
    }

    fn compare(
        &mut self,
        context: &Context,
        offset: u64,
        expected: &[u8],
        frame: u64,
        what: &str,
    ) -> Result<(), Failure> {
        let bytes = context.bytes(self.mr()?)?;
        let found = bytes.get(offset as usize..).and_then(|rest| rest.get(..expected.len()));
        match found.and_then(|found| found.iter().zip(expected).position(|(a, b)| a != b)) {
            None => {
                self.played.compared.0 += 1;
                self.played.compared.1 += expected.len() as u64;
            }
            Some(at) => {
                let text = format!("byte {at} of {} {what} is not what was recorded", expected.len());
                self.fault(Rule::Data, frame, text);
            }
        }
        Ok(())
    }

    /// Their WRITEs that the engine has acknowledged since the last time.
    fn newly_answered(&mut self) -> Vec<(u64, RKey, u64, Vec<u8>)> {
        let (end, theirs) = (self.end, &self.theirs);
        let mtu = self.of.path_mtu.bytes() as usize;
        let positive = |packet: &Seen| {
            let syndrome = packet.aeth.and_then(|aeth| aeth.syndrome());
            packet.is_response() && syndrome.is_none_or(|s| matches!(s, Syndrome::Ack { .. }))
        };
        let ours = self.played.events.iter().rev().take(LOOK_BACK).filter(|event| event.from == end);
        let newest = ours.filter(|event| positive(&event.packet)).map(|event| event.psn).max();
        let Some(newest) = newest else { return Vec::new() };
        let until = theirs.list.partition_point(|message| message.last <= newest).max(self.answered);
        let fresh = theirs.list[self.answered..until].iter();
        let written = fresh.filter(|message| message.operation() == Some(Operation::Write));
        let answered = written.filter_map(|message| {
            let (payload, whole) = message.payload(mtu);
            let (addr, rkey, _) = message.remote()?;
            whole.then_some((message.frame, rkey, addr, payload))
        });
        let answered = answered.collect();
        self.answered = until;
        answered
    }

    fn end(self) -> Played {
        self.played
    }
}

/// The engine's answers of one settling are among so many.
const LOOK_BACK: usize = 8192;

pub(super) fn is_rnr_nak(packet: &Seen) -> bool {
    packet.is_response() && packet.aeth.is_some_and(|aeth| aeth.syndrome_byte() >> 5 == 1)
}

/// What the other end may do through the queue pair: all but what it was refused as not allowed there.
fn permissions(of: &Conversation, end: usize, theirs: &Messages) -> Access {
    let mut refused = Vec::new();
    for event in of.events.iter().filter(|event| event.from == end) {
        if event.packet.aeth.is_some_and(|aeth| aeth.syndrome_byte() == 0x61)
            && let Some(message) = theirs.at(event.psn)
        {
            refused.extend(message.operation());
        }
    }
    let kinds = [
        (Access::REMOTE_WRITE, [Operation::Write, Operation::AtomicWrite]),
        (Access::REMOTE_READ, [Operation::ReadRequest; 2]),
        (Access::REMOTE_ATOMIC, [Operation::CompareSwap, Operation::FetchAdd]),
        (Access::FLUSH_GLOBAL, [Operation::Flush; 2]),
    ];
    let allowed = kinds.iter().filter(|(_, operations)| !operations.iter().any(|o| refused.contains(o)));
    allowed.fold(Access::NONE, |access, (kind, _)| access | *kind)
}

/// The timer that the recorded end put into its RNR NAKs.
fn rnr_timer(of: &Conversation, end: usize) -> RnrTimer {
    let mut told = of.events.iter().filter(|event| event.from == end);
    let code = told.find_map(|event| match event.packet.aeth?.syndrome()? {
        Syndrome::RnrNak(timer) => Some(timer),
        _ => None,
    });
    code.unwrap_or(RnrTimer::DEFAULT)
}

/// Shorter than this, a repeat may be due to packets that the capture does not have.
const CROSSING: Duration = Duration::from_millis(2);

/// The ACK timeout of the recorded end: by the connection manager, or as its repeats out of silence show;
/// 0, which is none, where there are no such.
fn ack_timeout(of: &Conversation, end: usize) -> u8 {
    if let Some(agreed) = of.agreed {
        return agreed.timeout;
    }
    let mut sent: HashSet<i64> = HashSet::new();
    let mut shortest: Option<Duration> = None;
    for (index, event) in of.events.iter().enumerate() {
        if event.from != end || !event.packet.is_request() || sent.insert(event.psn) {
            continue;
        }
        // Out of silence from both, and not because the other end asked for it.
        let Some(before) = index.checked_sub(1).and_then(|before| of.events.get(before)) else { continue };
        let heard = of.events[..index].iter().rfind(|event| event.from != end);
        let silence = event.packet.at.since(before.packet.at);
        let is_asked = heard.is_some_and(|heard| heard.packet.aeth.is_some_and(|aeth| aeth.syndrome_byte() >= 0x20));
        if !is_asked && silence > CROSSING {
            shortest = Some(shortest.map_or(silence, |shortest| shortest.min(silence)));
        }
    }
    let Some(shortest) = shortest else { return 0 };
    // A tenth for the coarse clocks of both.
    let units = (shortest.as_nanos() * 11 / 10 / 4096).max(1);
    (units.ilog2() as u8).min(31)
}

/// A recorded packet as it must be to reach the engine: to its queue pair, with its keys. The ICRC stays
/// as right or wrong as it was.
fn translated(packet: &Seen, to: Qpn, exposed: &Exposed, near: [u8; 6], far: [u8; 6]) -> Vec<u8> {
    let mut bytes = packet.bytes.clone();
    let bth = packet.header.bth_start();
    if to != Qpn::GSI {
        bytes[bth + 5..bth + 8].copy_from_slice(&to.value().to_be_bytes()[1..]);
    }
    let extensions = bth + 12;
    if let Some(reth) = packet.reth {
        let start = extensions + if packet.feth.is_some() { 4 } else { 0 };
        let key = exposed.translate(reth.rkey(), reth.va());
        bytes[start + 8..start + 12].copy_from_slice(&key.0.to_be_bytes());
    }
    if let Some(atomic) = packet.atomic {
        let key = exposed.translate(atomic.rkey(), atomic.va());
        bytes[extensions + 8..extensions + 12].copy_from_slice(&key.0.to_be_bytes());
    }
    if let Some(rkey) = packet.invalidates {
        bytes[extensions..extensions + 4].copy_from_slice(&exposed.translate_any(rkey).0.to_be_bytes());
    }
    let end = bytes.len() - ICRC_LEN;
    if let Some(right) = icrc::compute(packet.header, &bytes[..end]) {
        let icrc = if packet.icrc_is_right { right } else { !right };
        bytes[end..].copy_from_slice(&icrc.to_le_bytes());
    }
    let ethertype: u16 = match packet.header {
        ferroce::wire::NetworkHeader::Ipv4 => 0x0800,
        ferroce::wire::NetworkHeader::Ipv6 => 0x86dd,
        ferroce::wire::NetworkHeader::Grh => ferroce::wire::ROCE_V1_ETHERTYPE,
    };
    [&near[..], &far[..], &ethertype.to_be_bytes()[..], &bytes].concat()
}

/// A service has a kind of queue pair.
trait IntoType {
    fn into_type(self) -> ferroce::QpType;
}

impl IntoType for Service {
    fn into_type(self) -> ferroce::QpType {
        match self {
            Service::Rc | Service::Cnp => ferroce::QpType::Rc,
            Service::Uc => ferroce::QpType::Uc,
            Service::Ud => ferroce::QpType::Ud,
        }
    }
}

