//! The conversations of a capture: connections, separated and paired, with the attributes that the packets show.
//! Packets are numbered without wraps.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::Duration;

use ferroce::wire::cm::{CmBody, CmMessage};
use ferroce::wire::{Opcode, Operation, PKEY_DEFAULT, PKey, PayloadRule, Service};
use ferroce::{Gid, Nanos, PathMtu, Psn, Qpn};

use super::answers::Answers;
use super::given;
use super::message::Messages;
use super::numbering::Numbering;
use super::packet::Seen;
use super::pairing::{Flow, Pairing};
use super::progress::Progress;
use super::renewal::Courses;
use crate::failure::Failure;

/// Packets between two queue pairs.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) service: Service,
    pub(super) ends: [End; 2],
    pub(super) path_mtu: PathMtu,
    /// The source of the path MTU.
    pub(super) path_mtu_from: &'static str,
    pub(super) events: Vec<Event>,
    /// The attributes from the connection manager's messages.
    pub(super) agreed: Option<Agreed>,
    /// The messages that each end's application posted.
    pub(super) messages: [Messages; 2],
    /// The responses of each end.
    pub(super) answers: [Answers; 2],
    /// The partition, as a full member's key: that of the REQ, or of the first packet.
    pub(super) pkey: PKey,
    /// Ends that are limited members of it: the other end must be a full member.
    pub(super) limited: [bool; 2],
    /// Ends that use RoCE v1.
    roce_v1: [bool; 2],
    /// Ends that number their packets by the IPv4 identification.
    pub(super) numbers: [bool; 2],
    /// Whether the pairing of its flows is a guess.
    pub(super) is_guessed: bool,
    /// The end of the judged part: the frame of a manufacturer opcode, and the opcode.
    pub(super) foreign: Option<(u64, u8)>,
}

/// One of the two queue pairs.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) gid: Gid,
    /// Unknown if nothing was sent to it.
    pub(super) qpn: Option<Qpn>,
}

/// A packet of a conversation.
#[derive(Clone, Debug)]
pub(super) struct Event {
    /// The index of the end that sent it.
    pub(super) from: usize,
    pub(super) packet: Rc<Seen>,
    /// Its PSN without wraps, in the PSN space of the end that sends the requests.
    pub(super) psn: i64,
    /// Later packets show that it did not arrive.
    pub(super) lost: bool,
    /// A copy made by the network: its sender sent this packet once.
    pub(super) copy: bool,
    /// A request identical to the packet just before it: either the sender or the network repeated it.
    pub(super) twin: bool,
}

/// The attributes in a REQ and its REP, by end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub(super) start: [Psn; 2],
    pub(super) pkey: PKey,
    pub(super) path_mtu: Option<PathMtu>,
    /// The most outstanding READs and atomics of an end.
    pub(super) depth: [u8; 2],
    /// The ACK timeout of an end, as a power of two of 4.096 µs.
    pub(super) timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
}

/// Attributes that the user has given.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) path_mtu: Option<PathMtu>,
    /// Connected queue pairs.
    pub(super) pairs: Vec<(Qpn, Qpn)>,
}

/// A packet with a manufacturer opcode: its effect on the PSNs is unknown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Foreign {
    pub(super) frame: u64,
    pub(super) at: Nanos,
    pub(super) source: Gid,
    pub(super) destination: Gid,
    pub(super) to: Qpn,
    pub(super) opcode: u8,
}

impl Event {
    /// The end in whose PSN space it is.
    pub(super) fn space(&self) -> usize {
        if self.packet.is_request() { self.from } else { 1 - self.from }
    }
}

impl Conversation {
    /// All conversations of a capture except those of QP1, in the order of their first packets.
    pub(super) fn find(
        packets: &[Rc<Seen>],
        foreign: &[Foreign],
        given: &Given,
        progress: &mut Progress,
    ) -> Result<Vec<Conversation>, Failure> {
        let setups = setups(packets);
        let mut pairing = pair_flows(packets, &setups, given, progress)?;
        let mut found: Vec<Conversation> = Vec::new();
        let mut by_flow: HashMap<Flow, usize> = HashMap::new();
        let mut datagrams: HashMap<[(Gid, Qpn); 2], usize> = HashMap::new();
        let mut courses = Courses::of(packets);
        let mut renewed = setups.iter().peekable();
        let mut foreign = foreign.iter().peekable();
        for (number, packet) in packets.iter().enumerate() {
            progress.step(|| format!("{number} of {} packets are in their conversations", packets.len()))?;
            let (to, service) = (packet.bth.dest_qpn(), packet.service());
            while let Some(foreign) = foreign.next_if(|f| (f.at, f.frame) < (packet.at, packet.frame)) {
                // If it precedes all known packets of a connection, the connection is judged from behind it, as at the
                // start of a capture.
                let flow = (foreign.source, foreign.destination, foreign.to, Service::Rc);
                if let Some(index) = by_flow.get(&flow) {
                    found[*index].foreign.get_or_insert((foreign.frame, foreign.opcode));
                }
            }
            // A queue pair that is connected again begins another conversation.
            while let Some(setup) = renewed.next_if(|setup| setup.frame < packet.frame) {
                let [a, b] = setup.ends;
                for service in [Service::Rc, Service::Uc] {
                    pairing.retie(a, b, service);
                    by_flow.remove(&(a.0, b.0, b.1, service));
                    by_flow.remove(&(b.0, a.0, a.1, service));
                }
            }
            if matches!(service, Service::Rc | Service::Uc) {
                let flow = (packet.network.source, packet.network.destination, to, service);
                let back = pairing
                    .partner(&flow)
                    .map(|partner| (packet.network.destination, packet.network.source, partner.qpn, service));
                if courses.note(packet, flow, back) {
                    by_flow.remove(&flow);
                    back.and_then(|back| by_flow.remove(&back));
                }
            }
            if packet.is_manufacturers() {
                let flow = (packet.network.source, packet.network.destination, to, service);
                if let Some(index) = by_flow.get(&flow) {
                    found[*index].foreign.get_or_insert((packet.frame, packet.opcode.byte()));
                }
                continue;
            }
            let index = match (service, packet.extensions.deth) {
                _ if to == Qpn::GSI => continue,
                (Service::Ud, Some(deth)) => {
                    let mut ends =
                        [(packet.network.source, deth.source_qpn()), (packet.network.destination, to)];
                    let as_sent = ends.map(|(gid, qpn)| End { gid, qpn: Some(qpn) });
                    ends.sort_by_key(|(gid, qpn)| (gid.0, qpn.value()));
                    *datagrams.entry(ends).or_insert_with(|| {
                        found.push(Conversation::new(Service::Ud, as_sent));
                        found.len() - 1
                    })
                }
                (Service::Ud, None) => continue,
                // A CNP names the queue pair, without its service.
                (Service::Cnp, _) => {
                    let of = |service| {
                        by_flow.get(&(packet.network.source, packet.network.destination, to, service))
                    };
                    match of(Service::Rc).or_else(|| of(Service::Uc)) {
                        Some(index) => *index,
                        None => continue,
                    }
                }
                (service, _) => {
                    let flow = (packet.network.source, packet.network.destination, to, service);
                    match by_flow.get(&flow) {
                        Some(index) => *index,
                        // A damaged packet may belong to any queue pair.
                        None if !packet.icrc_is_right => continue,
                        None => begin(&mut found, &mut by_flow, flow, &pairing),
                    }
                }
            };
            if found[index].foreign.is_none() {
                found[index].take(packet);
            }
        }
        for foreign in foreign {
            let flow = (foreign.source, foreign.destination, foreign.to, Service::Rc);
            if let Some(index) = by_flow.get(&flow) {
                found[*index].foreign.get_or_insert((foreign.frame, foreign.opcode));
            }
        }
        found.retain(|conversation| !conversation.events.is_empty());
        let numbering = Numbering::of(packets);
        for conversation in &mut found {
            let start = conversation.events.first().map_or(0, |event| event.packet.frame);
            let before = setups.iter().rev().filter(|setup| setup.frame < start);
            conversation.agreed = before.filter_map(|setup| setup.fits(&conversation.ends)).next();
            conversation.find_versions();
            conversation.find_pkey();
            conversation.number();
            conversation.find_copies(&numbering);
            conversation.find_path_mtu(given);
            conversation.find_losses();
            conversation.answers = [0, 1].map(|end| Answers::of(&conversation.events, end));
            conversation.messages =
                [0, 1].map(|end| Messages::among(conversation, &conversation.events, end));
        }
        Ok(found)
    }

    fn new(service: Service, ends: [End; 2]) -> Conversation {
        Conversation {
            service,
            ends,
            path_mtu: PathMtu::Mtu1024,
            path_mtu_from: "",
            events: Vec::new(),
            agreed: None,
            messages: Default::default(),
            answers: Default::default(),
            pkey: PKEY_DEFAULT,
            limited: [false; 2],
            roce_v1: [false; 2],
            numbers: [false; 2],
            is_guessed: false,
            foreign: None,
        }
    }

    fn take(&mut self, packet: &Rc<Seen>) {
        let is_first = match (self.service, packet.extensions.deth) {
            (Service::Ud, Some(deth)) => {
                self.ends[0].gid == packet.network.source && self.ends[0].qpn == Some(deth.source_qpn())
            }
            // Both ends may have the same address (a host that talks to itself).
            _ => {
                self.ends[1].gid == packet.network.destination
                    && self.ends[1].qpn == Some(packet.bth.dest_qpn())
            }
        };
        let from = usize::from(!is_first);
        self.events.push(Event {
            from,
            packet: Rc::clone(packet),
            psn: 0,
            lost: false,
            copy: false,
            twin: false,
        });
    }

    fn find_pkey(&mut self) {
        let mut whole = self.events.iter().map(|event| &event.packet).filter(|packet| packet.icrc_is_right);
        let told = self.agreed.map(|agreed| agreed.pkey).or_else(|| whole.next().map(|p| p.bth.pkey()));
        self.pkey = told.filter(|pkey| pkey.is_valid()).map_or(PKEY_DEFAULT, |pkey| PKey(pkey.0 | 0x8000));
        let is_limited = |event: &Event| {
            let packet = &event.packet;
            self.is_acceptable(packet) && !packet.is_cnp() && !packet.bth.pkey().is_full_member()
        };
        self.limited =
            [0, 1].map(|end| self.events.iter().any(|event| event.from == end && is_limited(event)));
    }

    /// Whether a receiver accepts a packet for further checks: ICRC, transport version and P_Key are valid.
    pub(super) fn is_acceptable(&self, packet: &Seen) -> bool {
        packet.icrc_is_right && packet.bth.transport_version() == 0 && self.pkey.admits(packet.bth.pkey())
    }

    /// Unwraps the PSNs.
    fn number(&mut self) {
        let mut newest: [Option<i64>; 2] =
            [0, 1].map(|end| self.agreed.map(|agreed| i64::from(agreed.start[end].value()) - 1));
        // The first request is decisive; an ACK before it belongs to an unrecorded request.
        for end in [0, 1] {
            let mut whole = self.events.iter().filter(|e| e.space() == end && e.packet.icrc_is_right);
            let first = whole.clone().find(|event| event.packet.is_request()).or_else(|| whole.next());
            newest[end] = newest[end].or_else(|| first.map(|e| i64::from(e.packet.psn().value())));
        }
        for event in &mut self.events {
            let Some(newest) = &mut newest[event.space()] else { continue };
            event.psn = *newest + i64::from(event.packet.psn().distance(wrapped(*newest)));
            // A damaged packet may have any PSN.
            if event.packet.is_whole_request() {
                *newest = (*newest).max(event.psn);
            }
        }
    }

    /// Finds bit-identical duplicates. If a host numbers its packets, or if the request is never retransmitted, the
    /// network made the second one. Otherwise it may also be a retransmission; right after the first one, the two can't
    /// be distinguished.
    fn find_copies(&mut self, numbering: &Numbering) {
        let [a, b] = self.ends.map(|end| end.gid);
        self.numbers = [numbering.counts(a, b), numbering.counts(b, a)];
        let sends_once = [0, 1].map(|end| self.sends_each_request_once(end));
        let mut seen: HashMap<_, usize> = HashMap::new();
        let mut copies = Vec::new();
        let mut twins = Vec::new();
        for (index, event) in self.events.iter().enumerate() {
            let packet = &event.packet;
            let key = (event.from, packet.identification(), event.psn, packet.icrc);
            let Some(before) = seen.insert(key, index) else { continue };
            let first = &self.events[before].packet;
            let is_repeat = packet.is_request() && self.service == Service::Rc;
            if !first.is_same_as(packet) {
                continue;
            }
            if self.numbers[event.from] || sends_once[event.from] && packet.is_request() {
                copies.push(index);
            } else if is_repeat && before + 1 == index && packet.at.since(first.at) < SUDDEN {
                twins.push(index);
            }
        }
        copies.into_iter().for_each(|index| self.events[index].copy = true);
        twins.into_iter().for_each(|index| self.events[index].twin = true);
    }

    /// Whether an end never retransmits requests, and its PSNs distinguish them.
    fn sends_each_request_once(&self, end: usize) -> bool {
        match self.service {
            Service::Uc => true,
            Service::Ud => {
                let mut requests =
                    self.events.iter().filter(|e| e.from == end && e.packet.is_whole_request());
                let mut by_psn: HashMap<i64, &Seen> = HashMap::new();
                requests
                    .all(|event| by_psn.entry(event.psn).or_insert(&event.packet).is_same_as(&event.packet))
                    && by_psn.len() > 1
            }
            Service::Rc | Service::Cnp => false,
        }
    }

    fn find_path_mtu(&mut self, given: &Given) {
        let full = self.events.iter().find_map(|event| {
            let len = u32::try_from(event.packet.payload_len()).ok()?;
            let is_full =
                self.is_acceptable(&event.packet) && event.packet.opcode.payload() == PayloadRule::Full;
            PathMtu::try_from(len).ok().filter(|_| is_full)
        });
        (self.path_mtu, self.path_mtu_from) = if let Some(mtu) = given.path_mtu {
            (mtu, "given")
        } else if let Some(mtu) = full {
            (mtu, "from a full packet")
        } else if let Some(mtu) = self.agreed.and_then(|agreed| agreed.path_mtu) {
            (mtu, "from the connection manager")
        } else if let Some(mtu) = self.path_mtu_of_reads() {
            (mtu, "from the PSNs of a READ")
        } else {
            let longest = self.events.iter().map(|event| event.packet.payload_len()).max().unwrap_or(0);
            let fits = PathMtu::ALL.into_iter().find(|mtu| mtu.bytes() as usize >= longest.max(1024));
            (fits.unwrap_or(PathMtu::Mtu4096), GUESSED)
        };
    }

    /// From the distance between a READ and the next request.
    fn path_mtu_of_reads(&self) -> Option<PathMtu> {
        let mut firsts: BTreeMap<(usize, i64), u32> = BTreeMap::new();
        for event in self.events.iter().filter(|event| event.packet.is_whole_request()) {
            let read =
                event.packet.extensions.reth.filter(|_| event.packet.opcode == Opcode::RC_READ_REQUEST);
            firsts.entry((event.from, event.psn)).or_insert(read.map_or(0, |reth| reth.length()));
        }
        // Path MTUs that fit every READ followed by a new request; a resumed READ is not one.
        let mut fitting = PathMtu::ALL.to_vec();
        let mut seen = false;
        for (((end, psn), length), ((next_end, next_psn), next_length)) in
            firsts.iter().zip(firsts.iter().skip(1))
        {
            if end == next_end && *length > PathMtu::Mtu256.bytes() && next_length != length {
                fitting.retain(|mtu| i64::from(mtu.packets(*length)) <= next_psn - psn);
                seen |= PathMtu::ALL.iter().any(|mtu| i64::from(mtu.packets(*length)) == next_psn - psn);
            }
        }
        // A smaller one would leave PSNs of READs to other requests.
        fitting.first().copied().filter(|mtu| seen && *mtu != PathMtu::Mtu256)
    }

    /// Finds recorded packets that did not arrive: those that a NAK or a resumed READ requests again.
    fn find_losses(&mut self) {
        // Earlier READs by end: first PSN, and the PSN after the last.
        let mut reads = [BTreeMap::new(), BTreeMap::new()];
        for at in 0..self.events.len() {
            let event = &self.events[at];
            let (packet, asker, missing) = (&event.packet, event.from, event.psn);
            if !packet.icrc_is_right {
                continue; // it is unknown what it requested
            }
            let is_sequence_error = packet.extensions.aeth.is_some_and(|aeth| aeth.syndrome_byte() == 0x60);
            let is_told = packet.is_response() && is_sequence_error;
            // A request without a receive WR did arrive; rdma_rxe sends NAKs for the packets after it, too.
            let mut before = self.events[..at].iter().rev().take(LOOK_BACK);
            if is_told && before.any(|e| e.from == asker && e.psn == missing && e.packet.is_rnr_nak()) {
                continue;
            }
            if !is_told {
                if packet.opcode != Opcode::RC_READ_REQUEST {
                    continue;
                }
                // A READ that resumes an earlier one, after its start.
                let mut before = reads[asker].range(..missing).rev().take(NESTED);
                let is_resumed = before.any(|(_, end)| missing < *end);
                let end = missing + self.span(packet);
                let known = reads[asker].entry(missing).or_insert(end);
                *known = end.max(*known);
                if !is_resumed {
                    continue;
                }
            }
            for event in self.events[..at].iter_mut().rev().take(LOOK_BACK) {
                let kind = if is_told { event.packet.is_request() } else { event.packet.is_response() };
                // A READ request asks for all its responses; a NAK names it by the first one.
                event.lost |= event.from != asker && event.psn == missing && kind;
            }
        }
        for at in 0..self.events.len() {
            self.events[at].lost |= !self.is_acceptable(&self.events[at].packet);
        }
    }

    /// Whether the path MTU is more than a guess, and with it the number of PSNs of a READ.
    pub(super) fn knows_path_mtu(&self) -> bool {
        let long = |event: &Event| {
            event.packet.extensions.reth.is_some_and(|reth| reth.length() > PathMtu::Mtu256.bytes())
        };
        self.path_mtu_from != GUESSED || !self.events.iter().any(long)
    }

    /// Finds the RoCE version of an end: that of its first packet, or of the first one that it received.
    fn find_versions(&mut self) {
        let first = |end: usize| self.events.iter().find(|event| event.from == end).or(self.events.first());
        self.roce_v1 = [0, 1].map(|end| first(end).is_some_and(|event| event.packet.is_roce_v1()));
    }

    /// Whether an end uses RoCE v1.
    pub(super) fn is_roce_v1(&self, end: usize) -> bool {
        self.roce_v1[end]
    }

    /// The number of PSNs of a request.
    pub(super) fn span(&self, request: &Seen) -> i64 {
        match (request.opcode.operation(), request.extensions.reth) {
            (Operation::ReadRequest, Some(reth)) => i64::from(self.path_mtu.packets(reth.length())),
            _ => 1,
        }
    }
}

/// Begins the conversation of a flow and of its opposite flow, if that is known.
fn begin(
    found: &mut Vec<Conversation>,
    by_flow: &mut HashMap<Flow, usize>,
    flow: Flow,
    pairing: &Pairing,
) -> usize {
    let (source, destination, to, service) = flow;
    let (index, partner) = (found.len(), pairing.partner(&flow));
    let back = partner.map(|partner| partner.qpn);
    let ends = [End { gid: source, qpn: back }, End { gid: destination, qpn: Some(to) }];
    let is_guessed = partner.map_or(pairing.is_crowded(&flow), |partner| partner.is_guess);
    found.push(Conversation { is_guessed, ..Conversation::new(service, ends) });
    by_flow.insert(flow, index);
    if let Some(back) = back {
        by_flow.insert((destination, source, back, service), index);
    }
    index
}

/// Shorter than any ACK timeout.
const SUDDEN: Duration = Duration::from_micros(200);
/// The packets before a NAK or READ among which a lost one is looked for.
const LOOK_BACK: usize = 8192;
/// The most READs around one PSN: one, and those that resumed it.
const NESTED: usize = 256;

/// The source of a path MTU that is a guess.
const GUESSED: &str = "taken for granted";

/// The PSN on the wire.
pub(super) fn wrapped(psn: i64) -> Psn {
    Psn::new((psn & 0x00ff_ffff) as u32)
}

/// A connection that the connection manager established.
struct Setup {
    /// The frame of the REP.
    frame: u64,
    /// The active and the passive end.
    ends: [(Gid, Qpn); 2],
    agreed: Agreed,
}

impl Setup {
    fn fits(&self, ends: &[End; 2]) -> Option<Agreed> {
        let is = |end: usize, who: usize| {
            ends[end].gid == self.ends[who].0 && ends[end].qpn.is_none_or(|qpn| qpn == self.ends[who].1)
        };
        let known = ends.iter().any(|end| end.qpn.is_some());
        if known && is(0, 0) && is(1, 1) {
            Some(self.agreed)
        } else if known && is(0, 1) && is(1, 0) {
            let Agreed { start: [a, b], depth: [c, d], .. } = self.agreed;
            Some(Agreed { start: [b, a], depth: [d, c], ..self.agreed })
        } else {
            None
        }
    }
}

/// Connections whose REQ and REP are in the capture.
fn setups(packets: &[Rc<Seen>]) -> Vec<Setup> {
    let mut asked = HashMap::new();
    let mut setups = Vec::new();
    for packet in packets.iter().filter(|p| p.bth.dest_qpn() == Qpn::GSI && p.icrc_is_right) {
        let Ok(message) = CmMessage::parse(&packet.payload) else { continue };
        match message.body {
            CmBody::Req(req) => {
                asked
                    .insert((packet.network.source, req.local_comm_id()), (packet.network.destination, *req));
            }
            CmBody::Rep(rep) => {
                let key = (packet.network.destination, rep.remote_comm_id());
                let Some((from, req)) = asked.get(&key).filter(|(from, _)| *from == packet.network.source)
                else {
                    continue;
                };
                let agreed = Agreed {
                    // Each message has the first PSN that its sender expects of the other end's requests.
                    start: [rep.starting_psn(), req.starting_psn()],
                    pkey: req.pkey(),
                    path_mtu: req.path_mtu(),
                    // An end may have as many outstanding as the other end accepts.
                    depth: [rep.responder_resources(), rep.initiator_depth()],
                    timeout: req.primary_path.ack_timeout(),
                    retry_count: req.retry_count(),
                    rnr_retry: req.rnr_retry_count(),
                };
                setups.push(Setup {
                    frame: packet.frame,
                    ends: [(key.0, req.qpn()), (*from, rep.qpn())],
                    agreed,
                });
            }
            _ => {}
        }
    }
    setups
}

/// Finds the source queue pairs of the flows of connections: as given, by the connection manager, or from the packets.
fn pair_flows(
    packets: &[Rc<Seen>],
    setups: &[Setup],
    given: &Given,
    progress: &mut Progress,
) -> Result<Pairing, Failure> {
    let mut pairing = Pairing::default();
    given::tie(&mut pairing, packets, &given.pairs)?;
    for setup in setups {
        for service in [Service::Rc, Service::Uc] {
            pairing.tie(setup.ends[0], setup.ends[1], service);
        }
    }
    pairing.find(packets, progress)?;
    Ok(pairing)
}
