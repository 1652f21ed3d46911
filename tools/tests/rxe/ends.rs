//! Both ends of an exchange, the engine's here and rdma_rxe's in the guest, under the same verbs.

mod commands;
mod groups;

use std::time::{Duration, Instant};

use ferroce::wire::Gid;
use ferroce::{
    Access, AddressVector, Ah, Config, Context, Counter, Cq, Data, Device, DeviceSpec, Memory, Mr, Pd,
    Poller, Psn, Qp, QpConfig, QpState, QpType, Qpn, RKey, ReadyToReceive, ReadyToSend, ReceiveWorkRequest,
    RemoteAddress, RnrTimer, SendFlags, SendOp, SendWorkRequest, Sge, Transition, UnreliablePath,
};
use serde_json::{Value, json};

use self::groups::SharedReceives;
use crate::guest::{GUEST, Guest};
use crate::peer::Peer;
use crate::work::{Completion, Part, Queue, Request, Side, Terms, Verb};

/// A byte that no pattern contains; the same in the guest, as is the pattern.
const UNTOUCHED: u8 = 0xfe;
const PERIOD: usize = 251;
/// The first address of the memory here.
const BASE: u64 = 0x7f3a_0000_1000;
const QKEY: u32 = 0x1111_1111;
/// Near the end of the PSN range, so that they wrap.
const PSN_HERE: u32 = 0xff_fffa;
const PSN_THERE: u32 = 0xff_fff0;
/// The longest wait for completions, even with loss.
const PATIENCE: Duration = Duration::from_secs(60);

/// One memory at each end, of the same length.
#[derive(Clone, Copy)]
pub(crate) struct Memories {
    here: Mr,
    rkey_here: u32,
    there: u64,
    addr_there: u64,
    rkey_there: u32,
    length: u64,
}

/// One queue pair at each end, connected.
pub(crate) struct Pair {
    here: Qp,
    there: u64,
    qpn_here: u32,
    qpn_there: u32,
    to_there: Option<Ah>,
    /// The multicast group that datagrams go to in place of the peer.
    group: Option<Gid>,
    posted: [u64; 2],
}

/// A context on a device, and the peer.
pub(crate) struct Ends {
    context: Context,
    poller: Poller,
    peer: Peer,
    pd: Pd,
    queues: [Cq; 2],
    shared: Option<SharedReceives>,
    /// Queued commands to the peer, to be sent at once.
    kept: Option<Vec<Value>>,
    sgid_index: usize,
    gid_here: Gid,
    gid_there: Gid,
    ipv6: bool,
}

impl Ends {
    /// Opens `device`, with the guest as the peer over IPv6 or IPv4.
    pub(crate) fn open(guest: &Guest, device: &str, ipv6: bool) -> Ends {
        let spec: DeviceSpec = device.parse().expect("a device");
        let driver = spec.open().unwrap_or_else(|error| panic!("{device}: {error}"));
        Ends::over(guest, driver, ipv6)
    }

    pub(crate) fn over(guest: &Guest, device: impl Into<Device>, ipv6: bool) -> Ends {
        Ends::with(guest, device, ipv6, &Config::default())
    }

    pub(crate) fn with(guest: &Guest, device: impl Into<Device>, ipv6: bool, config: &Config) -> Ends {
        let mut context = Context::open(device, config).expect("a context");
        let address: std::net::IpAddr = GUEST[usize::from(ipv6)].parse().expect("an address");
        let gid_there = Gid::from(address);
        let sgid_index = context.port().gid_index_for(gid_there).expect("a GID of its kind");
        let gid_here = context.port().gids[sgid_index].gid;
        let pd = context.alloc_pd().expect("a PD");
        let queues = [0; 2].map(|_| context.create_cq(512).expect("a CQ"));
        // Most of the time it waits for the guest.
        let poller = Poller::new();
        let peer = Peer::connect(guest);
        Ends {
            context,
            poller,
            peer,
            pd,
            queues,
            shared: None,
            kept: None,
            sgid_index,
            gid_here,
            gid_there,
            ipv6,
        }
    }

    /// Runs the engine for a time.
    pub(crate) fn run_for(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            turn(&mut self.context, &mut self.poller);
        }
    }

    /// A counter of the engine.
    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.context.counters().value(counter)
    }

    /// RNR NAKs that the engine has sent or received.
    pub(crate) fn rnr_naks(&self) -> u64 {
        self.count(Counter::SendRnrErr) + self.count(Counter::RnrNakRetryErr)
    }

    /// The number of losses that the engine has noticed, in either direction.
    pub(crate) fn repairs(&self) -> u64 {
        let signs = [
            Counter::OutOfSequence,
            Counter::PacketSeqErr,
            Counter::ImpliedNakSeqErr,
            Counter::LocalAckTimeoutErr,
            Counter::DuplicateRequest,
        ];
        signs.map(|sign| self.count(sign)).iter().sum()
    }

    // --- memory ---

    /// Allocates memory at both ends, with the access rights of the other end.
    pub(crate) fn memories(&mut self, length: u64, [here, there]: [Access; 2]) -> Memories {
        let memory = Memory::zeroed(length as usize).expect("memory");
        let here = self.context.register_at(self.pd, memory, here, BASE).expect("a region");
        let rkey_here = self.context.remote(here).expect("a region").rkey.value();
        let answer = self.ask(&json!({"do": "memory", "length": length, "access": verbs_access(there)}));
        Memories {
            here,
            rkey_here,
            there: number(&answer["id"]),
            addr_there: number(&answer["addr"]),
            rkey_there: number(&answer["rkey"]) as u32,
            length,
        }
    }

    /// The key of a memory.
    pub(crate) fn key(&self, side: Side, memories: &Memories) -> u32 {
        if side == Side::Ferroce { memories.rkey_here } else { memories.rkey_there }
    }

    /// Deregisters both. No outstanding work may use them.
    pub(crate) fn release_memories(&mut self, memories: &Memories) {
        self.context.deregister(memories.here).expect("it is idle");
        self.ask(&json!({"do": "destroy", "id": memories.there}));
    }

    /// Fills `parts` with patterns, and the rest with a byte that no message contains.
    pub(crate) fn fill(&mut self, side: Side, memories: &Memories, parts: &[Part]) {
        match side {
            Side::Ferroce => {
                let whole = whole(memories.length, parts);
                self.context.bytes_mut(memories.here).expect("a region").copy_from_slice(&whole);
            }
            Side::Rxe => {
                self.ask(&json!({"do": "fill", "memory": memories.there, "parts": parts_json(parts)}));
            }
        }
    }

    /// Fails unless the memory becomes as [`fill`](Ends::fill) would make it, within `patience`.
    pub(crate) fn check(
        &mut self,
        side: Side,
        memories: &Memories,
        parts: &[Part],
        patience: Duration,
    ) -> Result<(), String> {
        let wrong = match side {
            Side::Ferroce => {
                let mut expected = whole(memories.length, parts);
                let start = Instant::now();
                loop {
                    let bytes = self.context.bytes(memories.here).expect("a region");
                    for part in parts.iter().filter(|part| part.seed.is_none()) {
                        expected[range(part)].copy_from_slice(&bytes[range(part)]);
                    }
                    let wrong = if *bytes == *expected {
                        None
                    } else {
                        bytes.iter().zip(&expected).position(|(a, b)| a != b)
                    };
                    if wrong.is_none() || start.elapsed() >= patience {
                        break wrong.map(|at| at as u64);
                    }
                    turn(&mut self.context, &mut self.poller);
                }
            }
            Side::Rxe => {
                let answer = self.ask(&json!({
                    "do": "check", "memory": memories.there, "parts": parts_json(parts),
                    "ms": patience.as_millis() as u64,
                }));
                answer["wrong"].as_u64()
            }
        };
        match wrong {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of {}'s memory is wrong", side.name())),
        }
    }

    /// All bytes of a small memory.
    pub(crate) fn peek(&mut self, side: Side, memories: &Memories) -> Vec<u8> {
        match side {
            Side::Ferroce => self.context.bytes(memories.here).expect("a region").to_vec(),
            Side::Rxe => {
                let command =
                    json!({"do": "peek", "memory": memories.there, "offset": 0, "length": memories.length});
                let answer = self.ask(&command);
                let hex = answer["hex"].as_str().expect("hex");
                let digits: Vec<u8> = hex.chars().map(|c| c.to_digit(16).expect("a digit") as u8).collect();
                digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
            }
        }
    }

    /// Writes bytes at an offset.
    pub(crate) fn poke(&mut self, side: Side, memories: &Memories, offset: u64, bytes: &[u8]) {
        match side {
            Side::Ferroce => {
                let start = offset as usize;
                let memory = self.context.bytes_mut(memories.here).expect("a region");
                memory[start..start + bytes.len()].copy_from_slice(bytes);
            }
            Side::Rxe => {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                self.ask(&json!({"do": "poke", "memory": memories.there, "offset": offset, "hex": hex}));
            }
        }
    }

    // --- queue pairs ---

    /// Creates a queue pair at each end, connected, in RTS.
    pub(crate) fn connect(&mut self, terms: &Terms) -> Pair {
        let Terms { service, path_mtu, timeout, retry_count, rnr_retry, rnr_timer, access } = *terms;
        let kind = match service {
            QpType::Rc => "rc",
            QpType::Uc => "uc",
            QpType::Ud => "ud",
        };
        let mut command = json!({"do": "queue_pair", "kind": kind});
        if let Some(shared) = &self.shared {
            command["srq"] = shared.there.into();
        }
        let answer = self.ask(&command);
        let (there, qpn_there) = (number(&answer["id"]), number(&answer["qpn"]) as u32);
        let [send_cq, recv_cq] = self.queues;
        let config = QpConfig::new(service, self.pd, send_cq)
            .recv_cq(recv_cq)
            .srq(self.shared.map(|shared| shared.here))
            .signal_all(true);
        let here = self.context.create_qp(&config).expect("a queue pair");
        let qpn_here = self.context.query_qp(here).expect("a queue pair").qpn.value();
        let address = AddressVector::new(self.gid_there, self.sgid_index);
        let (dest_qpn, rq_psn, sq_psn) = (Qpn::new(qpn_there), Psn::new(PSN_THERE), Psn::new(PSN_HERE));
        let mut to_there = None;
        let mut step = |transition| self.context.modify_qp(here, transition).expect("a lawful move");
        match service {
            QpType::Rc => {
                step(Transition::Init { access });
                step(Transition::ReadyToReceive(
                    ReadyToReceive::new(address, dest_qpn, rq_psn)
                        .path_mtu(path_mtu)
                        .min_rnr_timer(RnrTimer::new(rnr_timer).expect("a code below 32")),
                ));
                let send =
                    ReadyToSend::new(sq_psn).timeout(timeout).retry_count(retry_count).rnr_retry(rnr_retry);
                step(Transition::ReadyToSend(send));
            }
            QpType::Uc => {
                step(Transition::Init { access });
                let path = UnreliablePath::new(address, dest_qpn, rq_psn).path_mtu(path_mtu);
                step(Transition::ReadyToReceiveUnreliable(path));
                step(Transition::ReadyToSendUnreliable { sq_psn });
            }
            QpType::Ud => {
                step(Transition::InitDatagram { qkey: QKEY });
                step(Transition::ReadyToReceiveDatagrams);
                step(Transition::ReadyToSendUnreliable { sq_psn });
                to_there = Some(self.context.create_ah(self.pd, &address).expect("an address handle"));
            }
        }
        self.tell(json!({
            "do": "connect", "qp": there, "gid": text(self.gid_here), "sgid_index": self.index_there(), "qpn": qpn_here,
            "mtu": path_mtu.bytes(), "sq_psn": PSN_THERE, "rq_psn": PSN_HERE, "access": verbs_access(access),
            "timeout": timeout, "retry": retry_count, "rnr_retry": rnr_retry, "rnr_timer": rnr_timer,
        }));
        Pair { here, there, qpn_here, qpn_there, to_there, group: None, posted: [0; 2] }
    }

    /// Destroys both queue pairs.
    pub(crate) fn close(&mut self, pair: Pair) {
        self.close_side(Side::Rxe, &pair);
        self.close_side(Side::Ferroce, &pair);
        if let Some(ah) = pair.to_there {
            self.context.destroy_ah(ah).expect("an address handle");
        }
    }

    /// Destroys the queue pair of one side.
    pub(crate) fn close_side(&mut self, side: Side, pair: &Pair) {
        match side {
            Side::Ferroce => self.context.destroy_qp(pair.here).expect("a queue pair"),
            Side::Rxe => self.tell(json!({"do": "destroy", "id": pair.there})),
        }
    }

    /// Whether a queue pair is in the error state; otherwise it must be in RTS.
    pub(crate) fn has_failed(&mut self, side: Side, pair: &Pair) -> bool {
        match side {
            Side::Ferroce => match self.context.query_qp(pair.here).expect("a queue pair").state {
                QpState::Error => true,
                QpState::Rts => false,
                other => panic!("{other:?}"),
            },
            Side::Rxe => match number(&self.ask(&json!({"do": "state", "qp": pair.there}))["state"]) {
                6 => true,
                3 => false,
                other => panic!("state {other}"),
            },
        }
    }

    /// The index of the guest's GID.
    fn index_there(&self) -> u32 {
        if self.ipv6 { 2 } else { 1 }
    }

    // --- work ---

    /// Posts receive WRs, to the SRQ if there is one.
    pub(crate) fn receive(&mut self, side: Side, pair: &mut Pair, memories: &Memories, parts: &[(u64, u32)]) {
        if side == Side::Rxe {
            let queue = self.shared.map_or(pair.there, |shared| shared.there);
            self.tell(json!({"do": "receive", "qp": queue, "memory": memories.there, "parts": parts}));
            return;
        }
        for &(offset, length) in parts {
            let sges = [Sge { mr: memories.here, offset, length }];
            if let Some(shared) = &mut self.shared {
                let wr = ReceiveWorkRequest { wr_id: shared.posted, sges: &sges };
                self.context.post_srq_recv(shared.here, &wr).expect("a receive");
                shared.posted += 1;
                continue;
            }
            let wr = ReceiveWorkRequest { wr_id: pair.posted[1], sges: &sges };
            self.context.post_recv(pair.here, &wr).expect("a receive");
            pair.posted[1] += 1;
        }
    }

    /// Posts requests of one kind.
    pub(crate) fn post(
        &mut self,
        side: Side,
        pair: &mut Pair,
        memories: &Memories,
        verb: Verb,
        requests: &[Request],
    ) {
        let posted = self.try_to_post(side, pair, memories, verb, requests);
        posted.unwrap_or_else(|error| panic!("{verb:?} by {}: {error}", side.name()));
    }

    /// As [`post`](Ends::post); fails if the end rejects them.
    pub(crate) fn try_to_post(
        &mut self,
        side: Side,
        pair: &mut Pair,
        memories: &Memories,
        verb: Verb,
        requests: &[Request],
    ) -> Result<(), String> {
        if side == Side::Rxe {
            let parts: Vec<Value> = requests
                .iter()
                .map(|request| {
                    json!({
                        "offset": request.offset, "length": request.length, "imm": request.imm,
                        "addr": BASE.wrapping_add_signed(request.remote_offset),
                        "rkey": request.rkey.unwrap_or(memories.rkey_here),
                        "compare": request.compare, "swap": request.swap, "invalidate": request.invalidate,
                        "fence": request.fence,
                    })
                })
                .collect();
            let to = self.destination_there(pair);
            let command = json!({
                "do": "send", "qp": pair.there, "op": verb.name_there(), "memory": memories.there, "parts": parts,
                "to": to,
            });
            if self.keeps() {
                self.tell(command);
            } else {
                self.try_to_ask(&command)?;
            }
            return Ok(());
        }
        for request in requests {
            let remote = RemoteAddress {
                addr: memories.addr_there.wrapping_add_signed(request.remote_offset),
                rkey: RKey::new(request.rkey.unwrap_or(memories.rkey_there)),
            };
            let to = Ends::destination(pair);
            let op = match (verb, to) {
                (Verb::Send, None) => SendOp::Send,
                (Verb::SendImm, None) => SendOp::SendWithImm(request.imm),
                (Verb::Send, Some(to)) => SendOp::SendTo(to),
                (Verb::SendImm, Some(to)) => SendOp::SendToWithImm(to, request.imm),
                (Verb::SendInvalidate, _) => SendOp::SendWithInvalidate(RKey::new(request.invalidate)),
                (Verb::Write, _) => SendOp::Write(remote),
                (Verb::WriteImm, _) => SendOp::WriteWithImm(remote, request.imm),
                (Verb::Read, _) => SendOp::Read(remote),
                (Verb::FetchAdd, _) => SendOp::FetchAdd { remote, add: request.compare },
                (Verb::CompareSwap, _) => {
                    SendOp::CompareSwap { remote, compare: request.compare, swap: request.swap }
                }
            };
            let sges = [Sge { mr: memories.here, offset: request.offset, length: request.length }];
            let flags = SendFlags::SIGNALED.fence(request.fence);
            let wr = SendWorkRequest { wr_id: pair.posted[0], op, data: Data::Sges(&sges), flags };
            self.context.post_send(pair.here, &wr).map_err(|error| error.to_string())?;
            pair.posted[0] += 1;
        }
        Ok(())
    }

    /// Opens a memory window at `side` for the other end, and returns its key.
    pub(crate) fn window(
        &mut self,
        side: Side,
        pair: &mut Pair,
        memories: &Memories,
        (offset, length): (u64, u64),
    ) -> u32 {
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        if side == Side::Rxe {
            let answer = self.ask(&json!({
                "do": "window", "qp": pair.there, "memory": memories.there, "offset": offset, "length": length,
                "access": verbs_access(access),
            }));
            return number(&answer["rkey"]) as u32;
        }
        let mw = self.context.alloc_mw(self.pd).expect("a window");
        let op = SendOp::BindMw { mw, mr: memories.here, offset, length, access };
        let flags = SendFlags::SIGNALED;
        let wr = SendWorkRequest { wr_id: pair.posted[0], op, data: Data::Sges(&[]), flags };
        self.context.post_send(pair.here, &wr).expect("a bind");
        pair.posted[0] += 1;
        let bound = self.poll(side, pair, Queue::Send, 1);
        assert!(bound.len() == 1 && bound[0].status == 0, "{bound:?}");
        let window = self.context.remote_window(mw).expect("a window");
        window.expect("it is bound").rkey.value()
    }

    /// Takes `count` completions, or those that have arrived within the patience.
    pub(crate) fn poll(&mut self, side: Side, pair: &Pair, queue: Queue, count: usize) -> Vec<Completion> {
        self.poll_for(side, pair, queue, count, PATIENCE)
    }

    pub(crate) fn poll_for(
        &mut self,
        side: Side,
        pair: &Pair,
        queue: Queue,
        count: usize,
        patience: Duration,
    ) -> Vec<Completion> {
        if side == Side::Rxe {
            let answer = self.ask(&json!({
                "do": "poll", "qp": pair.there, "queue": if queue == Queue::Send { "send" } else { "receive" },
                "count": count, "ms": patience.as_millis() as u64,
            }));
            let completions = answer["completions"].as_array().expect("completions");
            return completions.iter().map(completion_there).collect();
        }
        let (cq, start) = (self.queues[queue as usize], Instant::now());
        let mut found = Vec::new();
        while found.len() < count && start.elapsed() < patience {
            match self.context.poll_cq(cq).expect("a CQ") {
                Some(wc) => found.push(Completion {
                    wr_id: wc.wr_id,
                    status: wc.status as u64,
                    opcode: wc.opcode as u64,
                    length: wc.byte_len.into(),
                    imm: wc.immediate,
                    invalidated: wc.invalidated.map(|key| key.value()),
                }),
                None => turn(&mut self.context, &mut self.poller),
            }
        }
        found
    }

    /// Whether the network header before a datagram has the addresses of sender and receiver.
    pub(crate) fn has_network_header(&self, side: Side, grh: &[u8]) -> bool {
        let (sender, receiver) = match side {
            Side::Ferroce => (self.gid_there, self.gid_here),
            Side::Rxe => (self.gid_here, self.gid_there),
        };
        let Gid(sender) = sender;
        let Gid(receiver) = receiver;
        if self.ipv6 {
            grh[8..24] == sender && grh[24..40] == receiver
        } else {
            grh[..20] == [0; 20] && grh[32..36] == sender[12..] && grh[36..40] == receiver[12..]
        }
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        // The guest's queue pairs first, while their peers still answer.
        if !std::thread::panicking() {
            self.ask(&json!({"do": "release"}));
        }
    }
}

fn turn(context: &mut Context, poller: &mut Poller) {
    poller.poll(context).expect("the port is there");
    while context.next_event().is_some() {}
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// In the guest's format: all colons, for IPv4 too.
fn text(Gid(bytes): Gid) -> String {
    std::net::Ipv6Addr::from(bytes).to_string()
}

fn completion_there(value: &Value) -> Completion {
    Completion {
        wr_id: number(&value["wr_id"]),
        status: number(&value["status"]),
        opcode: number(&value["opcode"]),
        length: number(&value["length"]),
        imm: value["imm"].as_u64().map(|imm| imm as u32),
        invalidated: value["invalidated"].as_u64().map(|key| key as u32),
    }
}

/// The bits of `ibv_access_flags`.
fn verbs_access(access: Access) -> u32 {
    let bits = [
        (Access::LOCAL_WRITE, 1),
        (Access::REMOTE_WRITE, 2),
        (Access::REMOTE_READ, 4),
        (Access::REMOTE_ATOMIC, 8),
        (Access::MW_BIND, 16),
    ];
    bits.iter().filter(|(flag, _)| access.contains(*flag)).map(|(_, bit)| bit).sum()
}

fn parts_json(parts: &[Part]) -> Value {
    parts.iter().map(|part| json!([part.offset, part.length, part.seed])).collect()
}

fn range(part: &Part) -> std::ops::Range<usize> {
    let start = part.offset as usize;
    start..start + part.length as usize
}

/// The contents of a memory with its parts, as `peer.py` creates it.
fn whole(length: u64, parts: &[Part]) -> Vec<u8> {
    let mut whole = vec![UNTOUCHED; length as usize];
    for part in parts {
        let Some(seed) = part.seed else { continue };
        let revolution: Vec<u8> = (0..PERIOD).map(|i| ((i + usize::from(seed)) % PERIOD) as u8).collect();
        for piece in whole[range(part)].chunks_mut(PERIOD) {
            piece.copy_from_slice(&revolution[..piece.len()]);
        }
    }
    whole
}
