//! One communicator: its ranks, channels to them, outstanding operations, and its failure.
//!
//! - `group/calls.rs`: starts the operations that the program calls
//! - `group/plans.rs`: caches 64 operations with their schedules
//! - `group/peers.rs`: communicates with the other ranks
//! - `group/on_memory.rs`: operations on memory that all ranks have mapped
//! - `group/membership.rs`: joining and leaving
//! - `group/failure.rs`: detects lost ranks
//! - `group/rails.rs`: continues without a failed rail
//!
//! An operation is data (`operation.rs`). The cost model (`choice.rs`) chooses its algorithm, whose schedule
//! (`schedule.rs`) is executed by `execution.rs` on channels, or without packets on memory that the ranks of a host have
//! mapped (`mapped.rs`). docs/decisions/14-collectives.md has the reasons.

mod calls;
mod failure;
mod membership;
mod on_memory;
mod peers;
mod plans;
mod rails;

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::driver::reduction::DataType;
use ferroce::driver::segment::Ticket;
use ferroce::{Context, Counter, Cq, Event, Idle, Mr, Nanos, PathMtu, Poller, Qpn, WcStatus};
use tracing::{debug, info, warn};

use crate::Error;
use crate::card::{Card, gid_index, limits};
use crate::channel::message::{Call, Count, Grant, Header, Purpose};
use crate::channel::{Channel, Limits, Link, News, Waiting};
use crate::choice::{Demand, Explanation, Model, choose, explain, problem};
use crate::compute::Computer;
use crate::control::{BODY, Envelope, Left, Mailbox, Message};
use crate::error::Cause;
use crate::execution::{Execution, Places, Tools, Trouble, What};
use crate::flight::{LATE, Log, Recorder};
use crate::mapped::{Bench, Host, Job, Mapped};
use crate::operation::{Kind, Operation};
use crate::options::Options;
use crate::ports::Ports;
use crate::schedule::{self, Algorithm, Hosts, Seat, Shape, Task};
use crate::shrink::{Ranks, Shrink};
use plans::Plans;

/// The state of another rank of the communicator.
#[derive(Default)]
pub(crate) struct Peer {
    pub(crate) channel: Option<Box<Channel>>,
    /// Operations that still send to it, and those that still receive from it, in order.
    pub(crate) sends: VecDeque<u64>,
    pub(crate) receives: VecDeque<u64>,
    /// Grants of operations that have not started here.
    pub(crate) grants: VecDeque<(Call, Grant)>,
    /// The numbers of operations between the two ranks: sends and receives.
    of_two: [u32; 2],
    /// Since when it has not answered a ping, and when the last one was sent.
    silent: Option<Nanos>,
    pinged: Nanos,
    /// The number of calls that it reported.
    calls: Option<u32>,
    /// It knows that the communicator has failed.
    knows_abort: bool,
    /// The outstanding chunks to it.
    pub(crate) chunks: Chunks,
}

/// Unacknowledged chunks to one peer.
#[derive(Default)]
pub(crate) struct Chunks {
    under_way: u32,
    /// Since when there are any, and the bytes sent since then.
    since: Nanos,
    bytes: u64,
}

impl Chunks {
    pub(crate) fn begin(&mut self, bytes: u64, now: Nanos) {
        if self.under_way == 0 {
            (self.since, self.bytes) = (now, 0);
        }
        self.under_way += 1;
        self.bytes += bytes;
    }

    /// `count` chunks are acknowledged. If none are left, returns the bytes and the duration of the whole period.
    fn end(&mut self, count: u32, now: Nanos) -> Option<(u64, Duration)> {
        let before = self.under_way;
        self.under_way = before.saturating_sub(count);
        (before > 0 && self.under_way == 0).then(|| (self.bytes, now.since(self.since)))
    }
}

/// Resources of the process that a communicator needs.
pub(crate) struct Process<'a> {
    pub(crate) ports: &'a mut Ports,
    pub(crate) computer: &'a mut Computer,
    pub(crate) host: &'a mut Host,
    pub(crate) recorder: &'a Recorder,
    /// The clock for events between two polls.
    pub(crate) clock: &'a mut Poller,
    pub(crate) now: Nanos,
}

/// The result of an operation, or that it has not ended.
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
    /// By rail, the index of the local GID table entry, and the largest path MTU.
    ways: Vec<(usize, PathMtu)>,
    hosts: Hosts,
    /// A rank has a device that reduces.
    is_on_device: bool,
    /// Operations on memory that all ranks have mapped, or why that is impossible.
    mapped: Result<Mapped, &'static str>,
    wake: Vec<u32>,
    model: Model,
    plans: Plans,
    log: Log,
    limits: Limits,
    /// By rail.
    cqs: Vec<Cq>,
    peers: Vec<Peer>,
    /// Peers to which there is a channel.
    linked: Vec<u32>,
    executions: VecDeque<Option<Execution>>,
    /// The ID of the first of them, and of the next one.
    first: u64,
    /// The number of operations of all ranks so far, and the newest of them.
    calls: u32,
    own_calls: u32,
    history: VecDeque<Call>,
    /// Scratch memory of ended operations, and of outstanding ones.
    scratch: Vec<(Mr, usize)>,
    in_use: Vec<(u64, Mr, usize)>,
    failed: Option<Cause>,
    /// It has failed, and no recording was written yet.
    is_to_be_recorded: bool,
    /// The failure was returned to the program.
    has_said_failure: bool,
    /// The agreement of the ranks on the lost ones.
    shrink: Option<Shrink>,
    /// The agreement is about to start, with these ranks lost.
    shrinking: Option<Ranks>,
    /// The number of communicators derived from this one so far.
    children: u64,
    is_leaving: bool,
    /// Since when it waits for writes to memory to end.
    calming: Option<Nanos>,
    /// Until when the others are notified of the failure, once that has started, and when next.
    telling: Option<(Option<Nanos>, Nanos)>,
    /// Since when it is in no operation, if it is in none.
    idle_since: Nanos,
    /// There were events since operations were last advanced.
    is_dirty: bool,
    /// When to poll the device.
    device_due: Nanos,
    /// The number of failed device copies before it was created.
    device_errors: u64,
    next_look: Nanos,
}

/// The number of operations whose calls are remembered.
const HISTORY: usize = 64;
/// The longest interval between two hellos, and between two aborts.
const AGAIN: Duration = Duration::from_millis(20);
/// How long others are notified that the communicator has failed.
const TELL: Duration = Duration::from_millis(500);
/// Bytes that are combined before packets are polled again.
const BUDGET: usize = 256 << 10;

impl Group {
    pub(crate) fn new(
        process: &mut Process<'_>,
        rank: u32,
        cards: Vec<Card>,
        options: &Options,
    ) -> Result<Group, Error> {
        let size = cards.len() as u32;
        let is_on_device = cards.iter().any(|card| card.device.get() != 0);
        let mut limits = limits(options, size);
        if is_on_device {
            // Device memory is not copied by the CPU: the port lets the device copy it, and even short messages arrive in
            // device memory.
            limits.eager = 0;
        }
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
        let ways: Vec<(usize, PathMtu)> =
            process.ports.all().map(|port| gid_index(&port.context, options)).collect::<Result<_, _>>()?;
        let cqs = (0..ways.len()).map(|rail| process.ports.of_mut(rail).context.create_cq(entries));
        let cqs = cqs.collect::<Result<_, _>>()?;
        let mut peers = Vec::new();
        peers.resize_with(cards.len(), Peer::default);
        info!(rank, size, hosts = hosts.count(), rails = ways.len(), path_mtu = %ways[0].1, "communicator");
        Ok(Group {
            id: cards[0].nonce.get(),
            rank,
            options: *options,
            is_on_device,
            log: process.recorder.log(cards[0].nonce.get(), (rank, size)),
            cards,
            ways,
            hosts,
            mapped: Err("the ranks have not agreed on shared memory"),
            // A call wakes each rank when it starts, has reduced and ends.
            wake: Vec::with_capacity(3 * size as usize),
            model: options.model.unwrap_or_default(),
            plans: Plans::default(),
            limits,
            cqs,
            peers,
            linked: Vec::new(),
            executions: VecDeque::new(),
            first: 0,
            calls: 0,
            own_calls: 0,
            history: VecDeque::with_capacity(HISTORY),
            scratch: Vec::new(),
            in_use: Vec::new(),
            failed: None,
            is_to_be_recorded: false,
            has_said_failure: false,
            shrink: None,
            shrinking: None,
            children: 0,
            is_leaving: false,
            calming: None,
            telling: None,
            idle_since: process.now,
            is_dirty: false,
            device_due: Nanos::NEVER,
            device_errors: failure::device_errors(process.ports),
            next_look: Nanos::ZERO,
        })
    }

    /// The interval between two hellos, and between two aborts: several before a rank is given up.
    fn again(&self) -> Duration {
        (self.options.retry_budget() / 16).min(AGAIN)
    }

    pub(crate) fn size(&self) -> u32 {
        self.cards.len() as u32
    }

    /// Whether all operations before the one with this ID have ended successfully, or no failure is known.
    pub(crate) fn has_ended_before(&self, id: u64) -> bool {
        id <= self.first
    }

    /// The state of an operation.
    pub(crate) fn outcome(&mut self, id: u64) -> Outcome {
        let execution = id.checked_sub(self.first).and_then(|index| self.executions.get(index as usize));
        let Some(Some(execution)) = execution else { return Outcome::Done };
        if self.failed.is_none() {
            return Outcome::UnderWay;
        }
        let operation = execution.call.to_string();
        self.say_failure(operation).map_or(Outcome::UnderWay, Outcome::Failed)
    }

    /// The rank was off its core for this long while its program waited.
    pub(crate) fn was_away(&self, time: Duration) {
        if !self.executions.is_empty() {
            self.log.away(time);
        }
    }

    /// Whether an outstanding operation has elements in this region.
    pub(crate) fn is_about(&self, mr: Mr) -> bool {
        self.failed.is_none() && self.executions.iter().flatten().any(|execution| execution.is_about(mr))
    }

    /// Processes completions, and advances operations. Returns whether there was any progress.
    pub(crate) fn poll(&mut self, process: &mut Process<'_>) -> bool {
        self.try_poll(process).unwrap_or_else(|error| {
            self.refused(&error);
            false
        })
    }

    fn try_poll(&mut self, process: &mut Process<'_>) -> Result<bool, Error> {
        self.take_completions(process)?;
        let is_to_be_mended = self.is_dirty || process.now >= self.next_look;
        let mut moved = false;
        if self.failed.is_none() {
            let mapped = self.advance_mapped(process);
            let is_due = std::mem::take(&mut self.is_dirty) || process.now >= self.device_due;
            let scheduled = if is_due { self.advance(process) } else { Ok(false) };
            let both = mapped.and_then(|mapped| scheduled.map(|scheduled| mapped || scheduled));
            moved = self.moved(both);
            let elsewhere = self.executions.iter_mut().flatten().filter(|execution| !execution.has_steps());
            elsewhere.for_each(|execution| _ = execution.moved.get_or_insert(process.now));
        }
        if process.now >= self.next_look {
            self.look(process)?;
        }
        if is_to_be_mended && self.failed.is_none() {
            self.mend_rails(process)?;
        }
        Ok(moved)
    }

    /// Whether there was any progress. An error fails the communicator.
    fn moved(&mut self, moved: Result<bool, Trouble>) -> bool {
        let cause = match moved {
            Ok(moved) => return moved,
            Err(Trouble::Cause(cause)) => cause,
            Err(Trouble::Error(error)) => Cause::of(self.rank, &error),
        };
        self.fail(cause);
        false
    }

    fn take_completions(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        for rail in 0..self.cqs.len() {
            self.take_completions_of(process, rail)?;
        }
        Ok(())
    }

    fn take_completions_of(&mut self, process: &mut Process<'_>, rail: usize) -> Result<(), Error> {
        while let Some(wc) = process.ports.of_mut(rail).context.poll_cq(self.cqs[rail])? {
            let number = Channel::peer_of(wc.wr_id);
            let peer = &mut self.peers[number as usize];
            let Some(channel) = &mut peer.channel else { continue };
            peer.silent = None;
            let (executions, first) = (&mut self.executions, self.first);
            let mut chunks = 0;
            let done = |waiting: Waiting| {
                chunks += 1;
                sent(executions, first, waiting);
            };
            let news = channel.complete((process.ports, process.now), rail, &wc, done)?;
            if let Some((bytes, sending)) = peer.chunks.end(chunks, process.now) {
                self.log.was_sending(number, bytes, sending);
            }
            self.take_news(process, (number, rail), news)?;
            while let Some(channel) = &mut self.peers[number as usize].channel
                && let Some(news) = channel.next(process.ports, process.now)?
            {
                if let Some(heard) = channel.take_heard()
                    && let Some(execution) =
                        self.executions.iter_mut().flatten().find(|of| of.call.number == heard.call)
                {
                    execution.hear(number, heard);
                }
                self.take_news(process, (number, rail), news)?;
            }
        }
        Ok(())
    }

    fn take_news(
        &mut self,
        process: &mut Process<'_>,
        (peer, rail): (u32, usize),
        news: News,
    ) -> Result<(), Error> {
        match news {
            News::None => {}
            News::Moved => self.is_dirty = true,
            News::Granted(call, grant) => {
                self.is_dirty = true;
                self.granted(peer, call, grant);
            }
            News::Failed(status) => {
                // An event may contain the reason.
                self.take_events_of(process, (peer, rail))?;
                let of_device = self.device_failed(process.ports, peer, status);
                let lately = self.options.retry_budget() / 2;
                let channel = self.peers[peer as usize].channel.as_mut();
                let can_do_without = channel.as_ref().is_some_and(|channel| {
                    // If a peer does not answer on this rail, the other rails report it to the peer and ask about it
                    // meanwhile.
                    channel.can_do_without(rail)
                        && (status != WcStatus::RetryExcErr
                            || channel.is_heard_without(rail, process.now, lately))
                });
                let is_left = channel.as_ref().is_some_and(|channel| channel.paths()[rail].is_left());
                if is_left || self.failed.is_some() {
                    return Ok(());
                }
                if let Some(cause) = of_device {
                    self.fail(cause);
                } else if self.is_leaving && self.executions.is_empty() && !can_do_without {
                    // It has left before its ACK arrived.
                    channel.into_iter().for_each(|channel| channel.forget());
                } else if can_do_without {
                    self.leave_rail(
                        process,
                        (peer, rail),
                        &format!("its queue pair failed with {status:?}"),
                    )?;
                } else {
                    let cause = self.why(peer, status);
                    self.fail(cause);
                }
            }
            News::Broken(problem) => self.fail(Cause::Protocol { peer, problem }),
        }
        Ok(())
    }

    /// A message of a peer that no operation here takes, because this rank has called another operation instead: for
    /// example if each of two ranks considers itself the root.
    fn passed_over(&self, peer: u32) -> Option<(Call, Call)> {
        let peer = &self.peers[peer as usize];
        if !peer.receives.is_empty() {
            return None;
        }
        let theirs = peer.channel.as_ref()?.arrival()?.call;
        let calls = if theirs.number & Call::OWN != 0 { self.own_calls } else { self.calls };
        let ago = calls.wrapping_sub(theirs.number) & (Call::OWN - 1);
        // An operation that this rank has not called yet may follow.
        if theirs.number & Call::OF_TWO != 0 || !(1..=HISTORY as u32).contains(&ago) {
            return None;
        }
        let ours = self.history.iter().rfind(|ours| ours.number == theirs.number)?;
        (*ours != theirs).then_some((*ours, theirs))
    }

    fn advance(&mut self, process: &mut Process<'_>) -> Result<bool, Trouble> {
        let mut tools = Tools {
            ports: process.ports,
            computer: process.computer,
            links: &mut self.peers,
            log: &self.log,
            now: process.now,
            budget: BUDGET,
        };
        let mut moved = false;
        for slot in &mut self.executions {
            let Some(execution) = slot else { continue };
            moved |= execution.advance(&mut tools)?;
            if tools.budget == 0 {
                // The rest after the packets that have arrived.
                self.is_dirty = true;
                break;
            }
        }
        self.device_due = process.computer.next_deadline(process.now);
        for peer in &self.linked {
            if let Some(channel) = &mut self.peers[*peer as usize].channel {
                moved |= channel.return_credits(process.ports, process.now)?;
            }
        }
        let has_ended = self.retire(process.ports, process.now)?;
        self.look_at_arrivals()?;
        Ok(has_ended || moved)
    }

    /// Fails if peers have sent messages that no operation here takes.
    fn look_at_arrivals(&self) -> Result<(), Trouble> {
        for peer in &self.linked {
            if let Some((ours, theirs)) = self.passed_over(*peer) {
                let (ours, theirs) = (ours.to_string(), theirs.to_string());
                return Err(Trouble::Cause(Cause::Mismatch { peer: *peer, ours, theirs }));
            }
        }
        Ok(())
    }

    /// Removes ended operations. Sends the ACKs that are due to peers, because this rank may not poll again.
    fn retire(&mut self, ports: &mut Ports, now: Nanos) -> Result<bool, Error> {
        let mut has_ended = false;
        for index in 0..self.executions.len() {
            if let Some(execution) = self.executions[index].take_if(|execution| execution.is_done()) {
                has_ended = true;
                if execution.has_steps() {
                    self.log.ended(execution.record, now, execution.late(self.chance(execution.bytes)));
                }
                for peer in execution.owes_acks(self.limits.eager as usize) {
                    if let Some(channel) = &mut self.peers[peer as usize].channel {
                        channel.acknowledge(ports)?;
                    }
                }
                if let Some(index) = self.in_use.iter().position(|(id, ..)| *id == execution.id) {
                    let (_, mr, length) = self.in_use.swap_remove(index);
                    self.scratch.push((mr, length));
                }
                // Removes it from the queues, also if the last step was executed in another lane.
                for (peer, sends) in execution.peers() {
                    let peer = &mut self.peers[peer as usize];
                    let turns = if sends { &mut peer.sends } else { &mut peer.receives };
                    if turns.front() == Some(&execution.id) {
                        turns.pop_front();
                    }
                }
                self.plans.end(execution);
            }
        }
        while let Some(None) = self.executions.front() {
            self.executions.pop_front();
            self.first += 1;
            self.idle_since = now;
        }
        Ok(has_ended)
    }

    /// The delay of a rank that is considered normal for an operation of this many bytes: a message may be queued after
    /// chunks of others.
    fn chance(&self, bytes: u64) -> Duration {
        const LATENCIES: u32 = 10;
        const CHUNKS: u64 = 16;
        let waiting = (2 * bytes).min(CHUNKS * u64::from(self.options.chunk_bytes));
        let behind = Duration::from_secs_f64(waiting as f64 / self.model.bytes_per_second.max(1.0));
        LATE.max(self.model.latency * LATENCIES) + behind
    }

    /// Whether operations were started and not yet advanced.
    pub(crate) fn is_dirty(&self) -> bool {
        self.is_dirty
    }

    /// Whether work was posted since the last call; the next poll sends it.
    pub(crate) fn take_posted(&mut self) -> bool {
        let Group { linked, peers, .. } = self;
        linked.iter().fold(false, |posted, peer| {
            let channel = peers[*peer as usize].channel.as_mut();
            posted | channel.is_some_and(|channel| channel.take_posted())
        })
    }

    /// Whether it has failed since the last call.
    pub(crate) fn take_failure(&mut self) -> bool {
        std::mem::take(&mut self.is_to_be_recorded)
    }

    /// Sets the cost model, which is the same at all ranks.
    pub(crate) fn set_model(&mut self, model: Model) {
        info!(rank = self.rank, "communicator {:016x}: {model}", self.id);
        self.model = model;
        self.plans.clear();
    }

    /// The cost model.
    pub(crate) fn model(&self) -> Model {
        self.model
    }

    /// The number of rails that all ranks have.
    pub(crate) fn rails(&self) -> usize {
        self.cards.iter().map(|card| card.rails().len()).min().unwrap_or(1).max(1)
    }

    /// The hosts of the ranks.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Sends the ACKs that are due to peers.
    pub(crate) fn acknowledge(&mut self, ports: &mut Ports) -> Result<(), Error> {
        for peer in &self.linked {
            if let Some(channel) = &mut self.peers[*peer as usize].channel
                && self.failed.is_none()
            {
                channel.acknowledge(ports)?;
            }
        }
        Ok(())
    }
}

/// The memory of a sending step is free again, if its operation is still outstanding. `first` is the ID of the first of
/// them.
fn sent(executions: &mut VecDeque<Option<Execution>>, first: u64, waiting: Waiting) {
    let index = waiting.operation.checked_sub(first);
    if let Some(Some(execution)) = index.and_then(|index| executions.get_mut(index as usize)) {
        execution.sent(waiting.step);
    }
}

/// The most grants of operations that have not started here: the depth of a channel.
const GRANTS: usize = 64;

/// FNV-1a.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
