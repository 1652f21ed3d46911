//! One communicator: its ranks, channels to them, operations under way, and what becomes of it when one fails.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::driver::reduction::DataType;
use ferroce::driver::segment::Ticket;
use ferroce::{Ah, Context, Cq, Event, Mr, Nanos, PathMtu, Pd, Qpn, WcStatus};
use tracing::{debug, info, warn};

use crate::Error;
use crate::card::{Card, limits};
use crate::channel::message::{Call, Count, Grant, Header, Purpose};
use crate::channel::{Channel, Limits, Link, News, Waiting};
use crate::choice::{Demand, Explanation, Model, choose, explain};
use crate::compute::Computer;
use crate::control::{BODY, Control, Envelope, Mailbox, Message};
use crate::error::Cause;
use crate::execution::{Execution, Places, Tools, Trouble, What};
use crate::mapped::{Bench, Host, Job, Mapped};
use crate::memory::{allocate, deregister, when_free};
use crate::operation::{Kind, Operation};
use crate::options::Options;
use crate::schedule::{Algorithm, Hosts, Schedule, Seat, Shape, Task, plan};
use crate::shrink::{Ranks, Shrink};

/// A rank of a communicator, as another one sees it.
#[derive(Default)]
pub(crate) struct Peer {
    ah: Option<Ah>,
    pub(crate) channel: Option<Box<Channel>>,
    /// Operations that still send to it, and those that still receive from it, in their order.
    pub(crate) sends: VecDeque<u64>,
    pub(crate) receives: VecDeque<u64>,
    /// Grants of operations that have not begun here.
    grants: VecDeque<(Call, Grant)>,
    /// Operations of the two, those that send and those that receive.
    of_two: [u32; 2],
    /// Since when it has not answered a ping, and when the last one was sent.
    silent: Option<Nanos>,
    pinged: Nanos,
    /// What it said of its calls.
    calls: Option<u32>,
    /// It knows that the communicator has failed.
    knows_abort: bool,
}

/// What a communicator needs of the process that it is in.
pub(crate) struct Process<'a> {
    pub(crate) context: &'a mut Context,
    pub(crate) control: &'a mut Control,
    pub(crate) computer: &'a mut Computer,
    pub(crate) host: &'a mut Host,
    pub(crate) pd: Pd,
    pub(crate) now: Nanos,
}

/// How an operation has ended, or that it has not.
pub(crate) enum Outcome {
    UnderWay,
    Done,
    Failed(Error),
}

pub(crate) struct Group {
    pub(crate) id: u64,
    pub(crate) rank: u32,
    pub(crate) options: Options,
    cards: Vec<Card>,
    gid_index: usize,
    path_mtu: PathMtu,
    hosts: Hosts,
    /// Operations on memory that all ranks have mapped, or why there are none.
    mapped: Result<Mapped, &'static str>,
    wake: Vec<u32>,
    model: Model,
    limits: Limits,
    cq: Cq,
    peers: Vec<Peer>,
    /// Peers to which there is a channel.
    linked: Vec<u32>,
    executions: VecDeque<Option<Execution>>,
    /// The id of the first of them, and of the next.
    first: u64,
    /// Operations of all ranks, so far, and the newest of them.
    calls: u32,
    own_calls: u32,
    history: VecDeque<Call>,
    /// Memory and schedules of operations that have ended.
    scratch: Vec<(Mr, usize)>,
    in_use: Vec<(u64, Mr, usize)>,
    schedules: Vec<Schedule>,
    failed: Option<Cause>,
    /// The ranks agree on who is gone.
    shrink: Option<Shrink>,
    /// Communicators that were made of this one, so far.
    children: u64,
    is_leaving: bool,
    /// Until when the others are told, and when next.
    telling: Option<(Nanos, Nanos)>,
    /// Something has happened since operations were looked at.
    is_dirty: bool,
    next_look: Nanos,
}

/// Operations of which is remembered what they were.
const HISTORY: usize = 64;
/// Between two hellos, two aborts.
const AGAIN: Duration = Duration::from_millis(20);
/// How long others are told that the communicator has failed.
const TELL: Duration = Duration::from_millis(500);
/// Bytes that are combined before packets are looked after again.
const BUDGET: usize = 256 << 10;

impl Group {
    pub(crate) fn new(
        process: &mut Process<'_>,
        rank: u32,
        cards: Vec<Card>,
        options: &Options,
        (gid_index, path_mtu): (usize, PathMtu),
    ) -> Result<Group, Error> {
        let size = cards.len() as u32;
        let limits = limits(options, size);
        let hosts = Hosts::new(&cards.iter().map(|card| card.host).collect::<Vec<_>>());
        if let (Some(Algorithm::Hierarchical), Some(problem)) = (options.algorithm, hosts.problem())
            && size > 1
        {
            return Err(Error::invalid(
                "algorithm",
                Algorithm::Hierarchical,
                format!("another one: {problem}"),
            ));
        }
        let entries = (size - 1).max(1).saturating_mul(3 * limits.depth + 64).min(1 << 20);
        let cq = process.context.create_cq(entries)?;
        let mut peers = Vec::new();
        peers.resize_with(cards.len(), Peer::default);
        info!(rank, size, hosts = hosts.count(), %path_mtu, "communicator");
        Ok(Group {
            id: cards[0].nonce.get(),
            rank,
            options: *options,
            cards,
            gid_index,
            path_mtu,
            hosts,
            mapped: Err("the ranks have not agreed on shared memory"),
            wake: Vec::new(),
            model: options.model.unwrap_or_default(),
            limits,
            cq,
            peers,
            linked: Vec::new(),
            executions: VecDeque::new(),
            first: 0,
            calls: 0,
            own_calls: 0,
            history: VecDeque::with_capacity(HISTORY),
            scratch: Vec::new(),
            in_use: Vec::new(),
            schedules: Vec::new(),
            failed: None,
            shrink: None,
            children: 0,
            is_leaving: false,
            telling: None,
            is_dirty: false,
            next_look: Nanos::ZERO,
        })
    }

    pub(crate) fn size(&self) -> u32 {
        self.cards.len() as u32
    }

    /// Why it is of no use any more.
    pub(crate) fn failure(&self) -> Option<&Cause> {
        self.failed.as_ref()
    }

    /// What an operation asks for.
    fn demand(&self, operation: &Operation, lengths: (usize, usize)) -> Demand {
        // The same at all ranks, also where one alone has an input or an output.
        let length = match operation.kind {
            Kind::Gather | Kind::Scatter | Kind::AllToAll
                if operation.sent.is_some() || operation.received.is_some() =>
            {
                0
            }
            Kind::Gather | Kind::Scatter => operation.count * self.cards.len(),
            _ => lengths.0.max(lengths.1),
        };
        Demand {
            kind: operation.kind,
            bytes: length * operation.data_type.size(),
            ranks: self.cards.len(),
            chunk: self.options.chunk_bytes as usize,
            unmapped: match &self.mapped {
                Err(problem) => Some(problem),
                Ok(_) if operation.kind == Kind::AllToAll && operation.sent.is_some() => {
                    Some("each rank knows its own counts alone")
                }
                Ok(_) => None,
            },
            is_small_float: matches!(operation.data_type, DataType::F8E4M3 | DataType::F8E5M2),
        }
    }

    /// Which algorithm an operation takes, and why.
    pub(crate) fn explain(&self, operation: &Operation) -> Result<Explanation, Error> {
        let lengths = operation.lengths(self.rank as usize, self.cards.len())?;
        let demand = self.demand(operation, lengths);
        let name = match operation.reduction {
            Some(reduction) => {
                format!("{} of {} {} ({reduction})", operation.kind, operation.count, operation.data_type)
            }
            None => format!("{} of {} {}", operation.kind, operation.count, operation.data_type),
        };
        let name =
            format!("{name}, {} bytes, {} ranks on {} hosts", demand.bytes, demand.ranks, self.hosts.count());
        Ok(explain(&self.model, &demand, &self.hosts, self.options.algorithm, name))
    }

    /// What messages cost, from now on. All ranks have the same.
    pub(crate) fn set_model(&mut self, model: Model) {
        info!(rank = self.rank, "communicator {:016x}: {model}", self.id);
        self.model = model;
    }

    /// Begins an operation. Returns its id.
    pub(crate) fn start(
        &mut self,
        process: &mut Process<'_>,
        operation: &Operation,
        buffers: [u64; 2],
        forced: Option<Algorithm>,
        is_own: bool,
    ) -> Result<u64, Error> {
        let (rank, size) = (self.rank as usize, self.size() as usize);
        let lengths = operation.lengths(rank, size)?;
        let element = operation.data_type.size();
        for (what, at, length, buffer) in [
            ("input", operation.input, lengths.0, buffers[0]),
            ("output", operation.output, lengths.1, buffers[1]),
        ] {
            let bytes = (length * element) as u64;
            if let Some(at) = at
                && (at.offset > buffer || bytes > buffer - at.offset)
            {
                let value = format!("{bytes} bytes from byte {} on", at.offset);
                return Err(Error::invalid(
                    what,
                    value,
                    format!("a part of the buffer, which has {buffer} bytes"),
                ));
            }
        }
        let in_place = operation.in_place(rank, lengths)?;
        if let Some(cause) = &self.failed {
            let operation = operation.kind.to_string();
            return Err(Error::Failed { rank: self.rank, operation, cause: cause.clone() });
        }
        let demand = self.demand(operation, lengths);
        let forced = forced.or(self.options.algorithm);
        let (algorithm, _) = choose(&self.model, &demand, &self.hosts, forced);
        if algorithm == Algorithm::Mapped {
            return Ok(self.start_mapped(process, operation, lengths, is_own));
        }
        let [sent, received] =
            [&operation.sent, &operation.received].map(|counts| counts.as_ref().map(|counts| ends(counts)));
        let task = Task {
            kind: operation.kind,
            count: operation.count,
            sent: sent.as_deref(),
            received: received.as_deref(),
            root: operation.root as usize,
            is_scaled: matches!(operation.reduction, Some(crate::Reduction::PreMulSum(_))),
            is_average: matches!(operation.reduction, Some(crate::Reduction::Average)),
            in_place,
        };
        let chunk = (self.options.chunk_bytes as usize / element).max(1);
        let shape = Shape { chunk, lands_above: self.options.eager_bytes as usize / element };
        let seat = Seat { rank, size, hosts: &self.hosts };
        let mut schedule = self.schedules.pop().unwrap_or_default();
        plan(&task, algorithm, seat, shape, &mut schedule);
        let id = self.first + self.executions.len() as u64;
        let scratch = self.take_scratch(process, id, schedule.scratch * element)?;
        let places = Places {
            input: operation.input.map(|at| (at.buffer.mr, at.offset)),
            output: operation.output.map(|at| (at.buffer.mr, at.offset)),
            scratch: scratch.map(|mr| (mr, 0)),
        };
        let what = What { data_type: operation.data_type, reduction: operation.reduction, size: self.size() };
        let call = self.call(operation, algorithm, is_own);
        let execution = Execution::new(id, call, schedule, places, what, process.now);
        let peers: Vec<(u32, bool)> = execution.peers().collect();
        for (peer, sends) in peers {
            self.link(process, peer)?;
            let peer = &mut self.peers[peer as usize];
            if sends { peer.sends.push_back(id) } else { peer.receives.push_back(id) }
        }
        self.executions.push_back(Some(execution));
        self.take_grants(id);
        self.is_dirty = true;
        self.next_look = Nanos::ZERO;
        Ok(id)
    }

    /// Begins an operation on memory that all ranks have mapped.
    fn start_mapped(
        &mut self,
        process: &Process<'_>,
        operation: &Operation,
        lengths: (usize, usize),
        is_own: bool,
    ) -> u64 {
        let id = self.first + self.executions.len() as u64;
        let call = self.call(operation, Algorithm::Mapped, is_own);
        let place = |at: Option<crate::At>| at.map(|at| (at.buffer.mr, at.offset));
        let places = Places { input: place(operation.input), output: place(operation.output), scratch: None };
        let what = What { data_type: operation.data_type, reduction: operation.reduction, size: self.size() };
        self.executions.push_back(Some(Execution::elsewhere(id, call, places, what, process.now)));
        let counts = operation.sent.as_ref().or(operation.received.as_ref());
        let ends = counts.map(|counts| ends(counts));
        let (root, count) = (operation.root as usize, operation.count);
        if let Ok(mapped) = &mut self.mapped {
            mapped.start(Job { id, call, places, what, root, lengths, count, ends });
        }
        id
    }

    /// Goes on with operations on mapped memory.
    fn advance_mapped(&mut self, process: &mut Process<'_>) -> Result<bool, Trouble> {
        let Group { mapped: Ok(mapped), executions, first, wake, .. } = self else { return Ok(false) };
        if mapped.is_idle() {
            return Ok(false);
        }
        let mut bench = Bench {
            context: process.context,
            pd: process.pd,
            host: process.host,
            computer: process.computer,
            wake,
            budget: BUDGET,
        };
        let mut has_ended = false;
        let moved = mapped.advance(&mut bench, |id| {
            if let Some(Some(execution)) = executions.get_mut((id - *first) as usize) {
                execution.sent(0);
                has_ended = true;
            }
        })?;
        if moved {
            let elsewhere = executions.iter_mut().flatten().filter(|execution| !execution.has_steps());
            elsewhere.for_each(|execution| execution.moved = process.now);
        }
        for peer in std::mem::take(wake) {
            self.tell(process, peer, Message::Wake)?;
        }
        if has_ended {
            self.retire(process.context)?;
        }
        Ok(moved)
    }

    /// The boards of the ranks, if all of them are on this host and have one; else why not.
    pub(crate) fn boards(&self) -> Result<Vec<Ticket>, &'static str> {
        let boards: Vec<Ticket> = self.cards.iter().map(Card::board).collect();
        match self.hosts.count() {
            1 if boards.iter().all(|board| board.nonce != 0) => Ok(boards),
            1 => Err("a rank has no memory to share"),
            _ => Err("the ranks are on several hosts"),
        }
    }

    /// Operations on mapped memory from now on, or why not.
    pub(crate) fn set_mapped(&mut self, mapped: Result<Mapped, &'static str>) {
        match &mapped {
            Ok(_) => info!(rank = self.rank, "communicator {:016x}: the ranks share memory", self.id),
            Err(problem) => {
                info!(rank = self.rank, "communicator {:016x}: no shared memory, because {problem}", self.id)
            }
        }
        self.mapped = mapped;
    }

    /// The boards of some ranks, if this communicator's ranks share memory.
    pub(crate) fn mapped_boards(&self, ranks: &[u32]) -> Result<Vec<Ticket>, &'static str> {
        self.mapped.as_ref().map(|mapped| mapped.boards(ranks)).map_err(|problem| *problem)
    }

    /// What both ends of a channel must have in common of an operation.
    fn call(&mut self, operation: &Operation, algorithm: Algorithm, is_own: bool) -> Call {
        let hash = |counts: &[usize]| hash(counts.iter().flat_map(|count| (*count as u64).to_be_bytes()));
        let counts = match operation.kind {
            // Ranks know their own counts alone.
            Kind::AllToAll => operation.sent.as_ref().map(|_| &[][..]),
            _ => operation.sent.as_deref().or(operation.received.as_deref()),
        };
        let number = if operation.kind.is_of_two() {
            let way = usize::from(operation.kind == Kind::Receive);
            let count = &mut self.peers[operation.root as usize].of_two[way];
            *count = count.wrapping_add(1);
            (*count - 1) & !Call::OF_TWO | Call::OF_TWO
        } else {
            let (count, bits) = if is_own { (&mut self.own_calls, Call::OWN) } else { (&mut self.calls, 0) };
            *count = (*count + 1) & (Call::OWN - 1);
            count.wrapping_sub(1) & (Call::OWN - 1) | bits
        };
        let call = Call {
            number,
            kind: if operation.kind == Kind::Receive { Kind::Send } else { operation.kind },
            data_type: operation.data_type,
            reduction: operation.reduction.map_or(0, crate::Reduction::number),
            algorithm,
            root: if operation.kind.has_root() { operation.root as u16 } else { 0 },
            count: counts.map_or(Count::Each(operation.count as u64), |counts| Count::Differ(hash(counts))),
        };
        if !operation.kind.is_of_two() {
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            self.history.push_back(call);
        }
        call
    }

    /// Grants that came before their operation had begun.
    fn take_grants(&mut self, id: u64) {
        let Some(Some(execution)) = self.executions.get_mut((id - self.first) as usize) else { return };
        let peers: Vec<u32> = execution.peers().filter(|(_, sends)| *sends).map(|(peer, _)| peer).collect();
        for number in peers {
            let peer = &mut self.peers[number as usize];
            // One of another call comes to light when a message of this one does.
            if let Some(index) = peer.grants.iter().position(|(call, _)| *call == execution.call)
                && let Some((_, grant)) = peer.grants.remove(index)
            {
                execution.granted(number, &grant);
            }
        }
    }

    fn take_scratch(
        &mut self,
        process: &mut Process<'_>,
        id: u64,
        bytes: usize,
    ) -> Result<Option<Mr>, Error> {
        if bytes == 0 {
            return Ok(None);
        }
        let found = self.scratch.iter().position(|(_, length)| *length >= bytes);
        let (mr, length) = match found {
            Some(index) => self.scratch.swap_remove(index),
            None => {
                let length = bytes.next_power_of_two().max(4096);
                let Process { context, computer, pd, .. } = process;
                let memory = allocate(computer.device(), length)?;
                (computer.register(context, *pd, memory, ferroce::Access::LOCAL_WRITE)?, length)
            }
        };
        self.in_use.push((id, mr, length));
        Ok(Some(mr))
    }

    /// Makes a channel to a peer, if there is none.
    fn link(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        if self.peers[peer as usize].channel.is_none() {
            let ends = (process.pd, self.cq);
            let mut channel = Channel::new(process.context, ends, peer, self.limits)?;
            if self.is_leaving {
                channel.signal_all();
            }
            self.peers[peer as usize].channel = Some(Box::new(channel));
            self.linked.push(peer);
            self.greet(process, peer)?;
        }
        Ok(())
    }

    /// Tells a peer of this end of the channel.
    fn greet(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let link = channel.link(process.context, self.path_mtu)?;
        let (has_heard, is_open) = (channel.has_heard, channel.is_open);
        channel.next_hello = process.now + AGAIN;
        self.tell(process, peer, Message::Hello { link, has_heard, is_open })
    }

    fn tell(&mut self, process: &mut Process<'_>, peer: u32, message: Message) -> Result<(), Error> {
        let card = self.cards[peer as usize];
        let ah = match self.peers[peer as usize].ah {
            Some(ah) => ah,
            None => {
                let to = (card.gid(), self.gid_index);
                match Control::address(process.context, process.pd, to, self.options.traffic_class) {
                    Ok(ah) => *self.peers[peer as usize].ah.insert(ah),
                    // As if the message were lost: whoever is gone has no route, either.
                    Err(error) => {
                        debug!(%error, peer, "a control message without a way");
                        return Ok(());
                    }
                }
            }
        };
        let to = Mailbox { ah, qpn: Qpn::new(card.qpn.get()), qkey: card.qkey.get() };
        let envelope = Envelope { communicator: self.id, from: self.rank, message };
        process.control.send(process.context, to, &envelope)
    }

    /// Takes a control message of a rank.
    pub(crate) fn hear(
        &mut self,
        process: &mut Process<'_>,
        from: u32,
        message: Message,
    ) -> Result<(), Error> {
        if from >= self.size() || from == self.rank {
            debug!(from, "a control message of no other rank");
            return Ok(());
        }
        self.peers[from as usize].silent = None;
        if let Some(shrink) = &mut self.shrink {
            shrink.is_there(from, process.now);
        }
        match message {
            Message::Hello { link, has_heard, is_open } => {
                if self.failed.is_some() {
                    return self.tell_failure(process, from);
                }
                self.meet(process, from, &link, has_heard, is_open)
            }
            Message::Ping { call } => {
                if self.failed.is_some() {
                    return self.tell_failure(process, from);
                }
                let calls = self.calls;
                let mut known: Vec<Header> = self.of_two_with(from, call).collect();
                let of_all = self.history.iter().find(|known| known.number == call);
                known.extend(of_all.map(|call| Header::new(call, Purpose::Call, 0)));
                if known.is_empty() {
                    return self.tell(process, from, Message::Pong { calls, call: None });
                }
                known.into_iter().try_for_each(|header| {
                    self.tell(process, from, Message::Pong { calls, call: Some(header) })
                })
            }
            Message::Pong { calls, call } => {
                self.peers[from as usize].calls = Some(calls);
                let Some(Ok((theirs, purpose))) = call.map(|header| header.parse()) else { return Ok(()) };
                let ours = match purpose {
                    Purpose::Call => self.history.iter().find(|ours| ours.number == theirs.number).copied(),
                    _ => {
                        let end = (from, purpose == Purpose::Grant);
                        self.of_two(from, theirs.number).find(|(of, _)| *of == end).map(|(_, call)| call)
                    }
                };
                if let Some(ours) = ours.filter(|ours| *ours != theirs) {
                    let (ours, theirs) = (ours.to_string(), theirs.to_string());
                    self.fail(process, Cause::Mismatch { peer: from, ours, theirs });
                }
                Ok(())
            }
            Message::Abort { origin, lost, reason } => {
                self.peers[from as usize].knows_abort = true;
                self.tell(process, from, Message::Aborted)?;
                if self.failed.is_none() {
                    self.fail(process, Cause::Aborted { origin, lost, reason });
                }
                Ok(())
            }
            Message::Aborted => {
                self.peers[from as usize].knows_abort = true;
                Ok(())
            }
            Message::Wake => Ok(()),
            Message::Shrink(word) => match &mut self.shrink {
                Some(shrink) => match shrink.hear(from, word, process.now) {
                    Some(answer) => self.tell(process, from, Message::Shrink(answer)),
                    None => Ok(()),
                },
                // It is there, and its program has not called yet.
                None => self.tell(process, from, Message::Pong { calls: self.calls, call: None }),
            },
        }
    }

    /// The operations of this rank and a peer that have this number: one that sends to it, and one that receives.
    fn of_two(&self, peer: u32, number: u32) -> impl Iterator<Item = ((u32, bool), Call)> {
        let all = self.executions.iter().flatten();
        let of_two = all.filter(move |of| of.call.number == number && number & Call::OF_TWO != 0);
        of_two.flat_map(|of| of.peers().map(|end| (end, of.call))).filter(move |((of, _), _)| *of == peer)
    }

    /// As a PONG has them: elements are what this rank has, and a grant is what it gives.
    fn of_two_with(&self, peer: u32, number: u32) -> impl Iterator<Item = Header> {
        let purpose = |sends| if sends { Purpose::Elements } else { Purpose::Grant };
        self.of_two(peer, number).map(move |((_, sends), call)| Header::new(&call, purpose(sends), 0))
    }

    /// The peer's end of a channel.
    fn meet(
        &mut self,
        process: &mut Process<'_>,
        from: u32,
        link: &Link,
        has_heard: bool,
        is_open: bool,
    ) -> Result<(), Error> {
        self.link(process, from)?;
        let to = (self.cards[from as usize].gid(), self.gid_index);
        let Some(channel) = &mut self.peers[from as usize].channel else { return Ok(()) };
        let is_new = !channel.has_heard;
        if is_new {
            channel.connect(process.context, &self.options, to, self.path_mtu, link)?;
        }
        if has_heard && !channel.is_open {
            channel.is_open = true;
            self.is_dirty = true;
            self.next_look = Nanos::ZERO;
        }
        // The peer waits for a word of this end's until it has one that says so.
        if is_new || !is_open { self.greet(process, from) } else { Ok(()) }
    }

    fn tell_failure(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        let Some(cause) = &self.failed else { return Ok(()) };
        let (origin, reason) = match cause {
            Cause::Aborted { origin, reason, .. } => (*origin, reason.clone()),
            cause => (self.rank, cause.to_string()),
        };
        let lost = cause.lost();
        self.tell(process, peer, Message::Abort { origin, lost, reason })
    }

    /// The communicator is of no use any more, and the others are told.
    pub(crate) fn fail(&mut self, process: &Process<'_>, cause: Cause) {
        if self.failed.is_some() {
            return;
        }
        warn!(rank = self.rank, "communicator {:016x} has failed: {cause}", self.id);
        self.failed = Some(cause);
        if let Ok(mapped) = &mut self.mapped {
            mapped.drop_all();
        }
        self.telling = Some((process.now + TELL, process.now));
        self.next_look = Nanos::ZERO;
    }

    /// How an operation is.
    pub(crate) fn outcome(&self, id: u64) -> Outcome {
        let execution = id.checked_sub(self.first).and_then(|index| self.executions.get(index as usize));
        match (execution, &self.failed) {
            (Some(Some(execution)), Some(cause)) => {
                let operation = execution.call.to_string();
                Outcome::Failed(Error::Failed { rank: self.rank, operation, cause: cause.clone() })
            }
            (Some(Some(_)), None) => Outcome::UnderWay,
            _ => Outcome::Done,
        }
    }

    /// Whether the others still have to be told that it has failed.
    pub(crate) fn is_telling(&self) -> bool {
        self.telling.is_some()
    }

    /// Takes what has completed, and goes on with operations. Returns whether anything has moved.
    pub(crate) fn poll(&mut self, process: &mut Process<'_>) -> Result<bool, Error> {
        self.take_completions(process)?;
        let mut moved = false;
        if self.failed.is_none() {
            let mapped = self.advance_mapped(process);
            let scheduled =
                if std::mem::take(&mut self.is_dirty) { self.advance(process) } else { Ok(false) };
            moved = match mapped.and_then(|mapped| scheduled.map(|scheduled| mapped || scheduled)) {
                Ok(moved) => moved,
                Err(Trouble::Cause(cause)) => {
                    self.fail(process, cause);
                    false
                }
                Err(Trouble::Error(error)) => {
                    self.fail(process, Cause::Local { problem: error.to_string() });
                    false
                }
            };
        }
        if process.now >= self.next_look {
            self.look(process)?;
        }
        Ok(moved)
    }

    /// When it wants to be polled though nothing comes.
    pub(crate) fn next_look(&self) -> Nanos {
        let is_waiting = !self.executions.is_empty() || self.telling.is_some() || self.shrink.is_some();
        let is_working = self.mapped.as_ref().is_ok_and(Mapped::is_working);
        match ((self.is_dirty || is_working) && self.failed.is_none(), is_waiting) {
            (true, _) => Nanos::ZERO,
            (false, true) => self.next_look,
            (false, false) => Nanos::NEVER,
        }
    }

    fn take_completions(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        while let Some(wc) = process.context.poll_cq(self.cq)? {
            let number = Channel::peer_of(wc.wr_id);
            let peer = &mut self.peers[number as usize];
            let Some(channel) = &mut peer.channel else { continue };
            peer.silent = None;
            let (executions, first) = (&mut self.executions, self.first);
            let done = |waiting: Waiting| {
                let index = waiting.operation.checked_sub(first);
                if let Some(Some(execution)) = index.and_then(|index| executions.get_mut(index as usize)) {
                    execution.sent(waiting.step);
                }
            };
            match channel.complete(process.context, &wc, done)? {
                News::None => {}
                News::Moved => self.is_dirty = true,
                News::Granted(call, grant) => {
                    self.is_dirty = true;
                    self.granted(process, number, call, grant);
                }
                // It has left before its ACK came.
                News::Failed(_) if self.is_leaving && self.executions.is_empty() => channel.forget(),
                News::Failed(status) => {
                    let cause = self.why(number, status);
                    self.fail(process, cause);
                }
                News::Broken(problem) => self.fail(process, Cause::Protocol { peer: number, problem }),
            }
        }
        Ok(())
    }

    /// What it means that the connection to a peer has failed so.
    fn why(&self, peer: u32, status: WcStatus) -> Cause {
        match status {
            WcStatus::RetryExcErr | WcStatus::RnrRetryExcErr | WcStatus::WrFlushErr => {
                let how = format!(
                    "the connection to it failed with {status:?}; it has ended, or has not polled for {:?} (Options::ack_timeout and \
                     retry_count)",
                    self.options.retry_budget()
                );
                Cause::Lost { peer, how }
            }
            WcStatus::RemInvReqErr | WcStatus::RemAccessErr | WcStatus::RemOpErr | WcStatus::BadRespErr => {
                Cause::Protocol { peer, problem: format!("the connection to it failed with {status:?}") }
            }
            // Of this rank's own port or memory.
            _ => {
                Cause::Local { problem: format!("the connection to rank {peer} failed here with {status:?}") }
            }
        }
    }

    fn granted(&mut self, process: &mut Process<'_>, from: u32, call: Call, grant: Grant) {
        let execution = self.executions.iter_mut().flatten().find(|execution| {
            execution.call.number == call.number && execution.peers().any(|peer| peer == (from, true))
        });
        match execution {
            Some(execution) if execution.call == call => execution.granted(from, &grant),
            Some(execution) => {
                let (ours, theirs) = (execution.call.to_string(), call.to_string());
                self.fail(process, Cause::Mismatch { peer: from, ours, theirs });
            }
            None if self.peers[from as usize].grants.len() < GRANTS => {
                self.peers[from as usize].grants.push_back((call, grant));
            }
            None => {
                let problem = format!("more than {GRANTS} grants of operations that have not begun");
                self.fail(process, Cause::Protocol { peer: from, problem });
            }
        }
    }

    fn advance(&mut self, process: &mut Process<'_>) -> Result<bool, Trouble> {
        let mut tools = Tools {
            context: process.context,
            pd: process.pd,
            computer: process.computer,
            links: &mut self.peers,
            now: process.now,
            budget: BUDGET,
        };
        let mut moved = false;
        for slot in &mut self.executions {
            let Some(execution) = slot else { continue };
            moved |= execution.advance(&mut tools)?;
            self.is_dirty |= execution.is_running();
            if tools.budget == 0 {
                // The rest behind the packets that have come.
                self.is_dirty = true;
                break;
            }
        }
        for peer in &self.linked {
            if let Some(channel) = &mut self.peers[*peer as usize].channel {
                channel.return_credits(process.context)?;
            }
        }
        Ok(self.retire(process.context)? || moved)
    }

    /// Forgets operations that have ended. Peers get the ACKs that they are owed: this rank may poll no more.
    fn retire(&mut self, context: &mut Context) -> Result<bool, Error> {
        let mut has_ended = false;
        for slot in &mut self.executions {
            if slot.as_ref().is_some_and(Execution::is_done)
                && let Some(execution) = slot.take()
            {
                has_ended = true;
                for (peer, _) in execution.peers().filter(|(_, sends)| !sends) {
                    if let Some(channel) = &self.peers[peer as usize].channel {
                        channel.acknowledge(context)?;
                    }
                }
                if let Some(index) = self.in_use.iter().position(|(id, ..)| *id == execution.id) {
                    let (_, mr, length) = self.in_use.swap_remove(index);
                    self.scratch.push((mr, length));
                }
                // Its turn is over, also where the last step was made from another lane.
                for (peer, sends) in execution.peers() {
                    let peer = &mut self.peers[peer as usize];
                    let turns = if sends { &mut peer.sends } else { &mut peer.receives };
                    if turns.front() == Some(&execution.id) {
                        turns.pop_front();
                    }
                }
                self.schedules.push(execution.schedule);
            }
        }
        while let Some(None) = self.executions.front() {
            self.executions.pop_front();
            self.first += 1;
        }
        Ok(has_ended)
    }

    /// What has to be done now and then: hellos, pings, aborts.
    fn look(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        let now = process.now;
        self.next_look = now + self.options.probe_interval;
        if self.shrink.is_some() {
            return self.agree(process);
        }
        if let Some((until, next)) = self.telling {
            return self.tell_all(process, until, next);
        }
        for index in 0..self.linked.len() {
            let peer = self.linked[index];
            let Some(channel) = &self.peers[peer as usize].channel else { continue };
            if channel.is_open {
                continue;
            }
            let due = channel.next_hello;
            if now >= due {
                self.greet(process, peer)?;
            }
            self.next_look = self.next_look.min(now + AGAIN);
        }
        if self.failed.is_none() {
            self.ask(process)?;
        }
        self.take_events(process)
    }

    /// Begins to agree on who is gone.
    pub(crate) fn begin_to_shrink(&mut self, now: Nanos) -> Result<(), Error> {
        let size = self.size();
        if size.div_ceil(8) as usize > BODY {
            let expected = format!("at most {} ranks", BODY * 8);
            return Err(Error::invalid("size of a communicator that shrinks", size, expected));
        }
        let mut gone = Ranks::none(size);
        if let Some(lost) = self.failed.as_ref().and_then(Cause::lost) {
            gone.add(lost);
        }
        if self.shrink.is_none() {
            self.failed.get_or_insert_with(|| Cause::Local { problem: "it has been shrunk".to_owned() });
            self.telling = None;
            self.shrink = Some(Shrink::new(self.rank, size, gone, self.options.retry_budget(), AGAIN, now));
        }
        self.next_look = Nanos::ZERO;
        Ok(())
    }

    /// Who is gone, once the ranks agree and those know that this one has to tell.
    pub(crate) fn agreed(&self) -> Option<&Ranks> {
        self.shrink.as_ref().filter(|shrink| !shrink.is_telling()).and_then(Shrink::decision)
    }

    fn agree(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        self.next_look = process.now + AGAIN;
        let words = self.shrink.as_mut().map(|shrink| shrink.tick(process.now)).unwrap_or_default();
        for (to, word) in words {
            self.tell(process, to, Message::Shrink(word))?;
        }
        Ok(())
    }

    /// The cards of some ranks, for a communicator of theirs, and this rank's place among them; `None` if it is not one of them.
    /// All ranks call it in the same order.
    pub(crate) fn cards_of(&mut self, ranks: &[u32]) -> Option<(u32, Vec<Card>)> {
        self.children += 1;
        let place = ranks.iter().position(|rank| *rank == self.rank)?;
        let mut cards: Vec<Card> = ranks.iter().map(|rank| self.cards[*rank as usize]).collect();
        let parts = [self.id, self.children, ranks[0].into(), ranks.len() as u64];
        cards[0].nonce.set(hash(parts.iter().flat_map(|part| part.to_be_bytes())));
        Some((place as u32, cards))
    }

    /// What messages cost.
    pub(crate) fn model(&self) -> Model {
        self.model
    }

    /// Asks those that an operation has waited for long whether they are there.
    fn ask(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        let now = process.now;
        let interval = self.options.probe_interval;
        let patience = self.options.retry_budget().saturating_sub(interval * 2).max(interval);
        let waiting =
            self.executions.iter().flatten().find(|execution| now.since(execution.moved) >= interval);
        let Some(execution) = waiting else { return Ok(()) };
        let waited = now.since(execution.moved);
        let mut peers: Vec<u32> = match &self.mapped {
            Ok(mapped) if !execution.has_steps() => mapped.waits_for(),
            _ => execution.waits_for().collect(),
        };
        peers.sort_unstable();
        peers.dedup();
        let call = execution.call;
        if waited >= self.options.stall_timeout {
            let (steps, done) = execution.progress();
            let waits_for = self.waits_for(&peers, call.number, (steps, done));
            self.fail(process, Cause::Stalled { waited, waits_for });
            return Ok(());
        }
        for number in peers {
            let peer = &mut self.peers[number as usize];
            if let Some(since) = peer.silent
                && now.since(since) >= patience
            {
                let how = format!(
                    "no sign of life for {:?}; it has ended, or has not polled (Options::ack_timeout and retry_count)",
                    waited
                );
                self.fail(process, Cause::Lost { peer: number, how });
                return Ok(());
            }
            if now.since(peer.pinged) >= interval {
                peer.pinged = now;
                peer.silent.get_or_insert(now);
                self.tell(process, number, Message::Ping { call: call.number })?;
            }
        }
        Ok(())
    }

    /// Which ranks an operation waits for, and what they have called.
    fn waits_for(&self, peers: &[u32], number: u32, (steps, done): (usize, usize)) -> String {
        let of = |peer: &u32| match self.peers[*peer as usize].calls {
            Some(calls) if number & (Call::OF_TWO | Call::OWN) == 0 && calls <= number => {
                format!("rank {peer}, which has made {calls} calls and not this one")
            }
            _ => format!("rank {peer}"),
        };
        let peers: Vec<String> = peers.iter().map(of).collect();
        format!("it has done {done} of {steps} steps and waits for {}", peers.join(", "))
    }

    fn tell_all(&mut self, process: &mut Process<'_>, until: Nanos, next: Nanos) -> Result<(), Error> {
        let now = process.now;
        let gone = self.failed.as_ref().and_then(Cause::lost);
        let others = (0..self.size()).filter(|peer| *peer != self.rank);
        let missing: Vec<u32> = others.filter(|peer| !self.peers[*peer as usize].knows_abort).collect();
        if missing.is_empty() || now >= until {
            self.telling = None;
            return Ok(());
        }
        if now >= next {
            for peer in &missing {
                self.tell_failure(process, *peer)?;
            }
            // One that is gone is told, for it may not be, and is not waited for.
            if missing.iter().all(|peer| Some(*peer) == gone) {
                self.telling = None;
                return Ok(());
            }
            self.telling = Some((until, now + AGAIN));
        }
        self.next_look = now + AGAIN;
        Ok(())
    }

    /// Events of the channels' queue pairs.
    fn take_events(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        for index in 0..self.linked.len() {
            let number = self.linked[index];
            let Some(channel) = &self.peers[number as usize].channel else { continue };
            let qp = channel.qp();
            while let Some(event) = process.context.next_event_of(qp)? {
                match event {
                    Event::QpFatal(_) | Event::QpReqErr(_) | Event::QpAccessErr(_) => {
                        let problem = format!("asynchronous event {event:?}");
                        self.fail(process, Cause::Protocol { peer: number, problem });
                    }
                    Event::QpUnreachable { reason, .. } => {
                        self.fail(process, Cause::Lost { peer: number, how: reason.to_string() });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// This rank leaves: the messages of its last barrier are waited for.
    pub(crate) fn begin_to_leave(&mut self) {
        self.is_leaving = true;
        for peer in &mut self.peers {
            if let Some(channel) = &mut peer.channel {
                channel.signal_all();
            }
        }
    }

    /// Whether the others have all that they need of this rank. Whoever has what it needs may be gone.
    pub(crate) fn has_left(&self) -> bool {
        let mut channels = self.peers.iter().filter_map(|peer| peer.channel.as_ref());
        self.failed.is_some() || channels.all(|channel| channel.is_flushed())
    }

    /// Sends the ACKs that peers are owed.
    pub(crate) fn acknowledge(&mut self, context: &mut Context) -> Result<(), Error> {
        for peer in &self.linked {
            if let Some(channel) = &self.peers[*peer as usize].channel
                && self.failed.is_none()
            {
                channel.acknowledge(context)?;
            }
        }
        Ok(())
    }

    /// Frees what operations need. Control messages go on.
    pub(crate) fn disconnect(
        &mut self,
        host: &mut Host,
        context: &mut Context,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), Error> {
        let gone = Err("the communicator is of no use any more");
        if let Ok(mapped) = std::mem::replace(&mut self.mapped, gone) {
            mapped.free(host, context, &mut now)?;
        }
        for peer in &mut self.peers {
            if let Some(channel) = peer.channel.take() {
                channel.destroy(context, &mut now)?;
            }
        }
        self.linked.clear();
        self.executions.clear();
        let in_use = self.in_use.drain(..).map(|(_, mr, _)| mr);
        for mr in self.scratch.drain(..).map(|(mr, _)| mr).chain(in_use) {
            deregister(context, &mut now, mr)?;
        }
        Ok(())
    }

    /// Frees everything.
    pub(crate) fn destroy(
        mut self,
        host: &mut Host,
        context: &mut Context,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), Error> {
        self.disconnect(host, context, &mut now)?;
        for peer in self.peers {
            if let Some(ah) = peer.ah {
                when_free(context, &mut now, |context| context.destroy_ah(ah))?;
            }
        }
        context.destroy_cq(self.cq)?;
        Ok(())
    }
}

/// Grants of operations that have not begun here: of as many as a channel has messages under way.
const GRANTS: usize = 64;

/// FNV-1a.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Where blocks of so many elements end.
fn ends(counts: &[usize]) -> Vec<usize> {
    let sum = |end: &mut usize, count: &usize| {
        *end += count;
        Some(*end)
    };
    counts.iter().scan(0, sum).collect()
}
