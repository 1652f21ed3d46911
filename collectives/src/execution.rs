//! The execution of one operation: it processes a schedule (`schedule.rs`) on channels (`channel.rs`) and memory.
//!
//! The order of additions is fixed; `manual.rs` documents it.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::driver::gpu::Ticket;
use ferroce::driver::reduction::{Computation, DataType, ReduceOp, Reduction as Arithmetic};
use ferroce::{Mr, Nanos, Sge};
use zerocopy::IntoBytes;

use crate::channel::message::{Age, Call, Grant, Purpose, Remote};
use crate::channel::{Channel, Heard, Waiting};
use crate::compute::{ByDevice, Computer, Operands};
use crate::error::Cause;
use crate::flight::Log;
use crate::operation::{At, Kind, Operation, Reduction};
use crate::ports::Ports;
use crate::schedule::{Finish, Operand, Place, Schedule, Spot, Step};

/// An operation that has started and not ended.
pub(crate) struct Execution {
    pub(crate) id: u64,
    pub(crate) call: Call,
    /// The key of its plan.
    pub(crate) plan: u64,
    schedule: Schedule,
    pub(crate) places: Places,
    arithmetic: What,
    /// By step.
    states: Vec<State>,
    /// The number of steps that are not done.
    left: usize,
    lanes: Vec<Lane>,
    /// Steps on a device, in its order.
    running: VecDeque<(Ticket, usize)>,
    /// When there was last progress; initially the time of the first poll.
    pub(crate) moved: Option<Nanos>,
    /// The time of the first poll, and since when the rank had been in no operation then, if it was in none.
    began: Option<Nanos>,
    pub(crate) idle_since: Option<Nanos>,
    /// Its number in the flight recorder, and the bytes of its input or output.
    pub(crate) record: u64,
    pub(crate) bytes: u64,
    /// The number of outstanding chunks.
    under_way: u32,
    /// The peer that started it last, as far as known, and how much later than this rank.
    late: (u32, Duration),
}

/// The state of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waits,
    /// It is running on a device.
    Runs,
    Done,
}

/// The memory of the elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) input: Option<(Mr, u64)>,
    pub(crate) output: Option<(Mr, u64)>,
    pub(crate) scratch: Option<(Mr, u64)>,
}

/// The arithmetic of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct What {
    pub(crate) data_type: DataType,
    pub(crate) reduction: Option<Reduction>,
    /// The number of ranks.
    pub(crate) size: u32,
}

/// Steps that are executed in order.
struct Lane {
    way: Way,
    peer: u32,
    steps: Vec<u32>,
    next: usize,
    /// The peer knows which call it is (for a sending lane), or the destination of its chunks (for a receiving one).
    is_told: bool,
    /// The peer has reported the call.
    has_heard: bool,
    /// The destination of chunks at the peer.
    grant: Option<Remote>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Send,
    Receive,
    Local,
}

/// Resources shared by the operations of a communicator.
pub(crate) struct Tools<'a> {
    pub(crate) ports: &'a mut Ports,
    pub(crate) computer: &'a mut Computer,
    /// By rank.
    pub(crate) links: &'a mut [crate::group::Peer],
    pub(crate) log: &'a Log,
    pub(crate) now: Nanos,
    /// Bytes that may still be combined before packets are polled again.
    pub(crate) budget: usize,
}

/// Why a step could not be executed.
pub(crate) enum Trouble {
    /// The operation fails.
    Cause(Cause),
    /// A verb was refused.
    Error(crate::Error),
}

impl From<crate::Error> for Trouble {
    fn from(error: crate::Error) -> Trouble {
        Trouble::Error(error)
    }
}

impl From<ferroce::Error> for Trouble {
    fn from(error: ferroce::Error) -> Trouble {
        Trouble::Error(error.into())
    }
}

impl Places {
    /// The memory of an operation's elements; scratch memory is added at the start.
    pub(crate) fn of(operation: &Operation) -> Places {
        let place = |at: Option<At>| at.map(|at| (at.buffer.mr, at.offset));
        Places { input: place(operation.input), output: place(operation.output), scratch: None }
    }

    fn get(&self, place: Place) -> Option<(Mr, u64)> {
        match place {
            Place::Input => self.input,
            Place::Output => self.output,
            Place::Scratch => self.scratch,
        }
    }
}

impl Execution {
    pub(crate) fn new(
        (id, plan): (u64, u64),
        call: Call,
        schedule: Schedule,
        places: Places,
        arithmetic: What,
    ) -> Execution {
        let count = schedule.steps.len();
        let mut execution = Execution {
            id,
            call,
            plan,
            schedule,
            places,
            arithmetic,
            states: vec![State::Waits; count],
            left: count,
            lanes: Vec::new(),
            running: VecDeque::new(),
            moved: None,
            began: None,
            idle_since: None,
            record: 0,
            bytes: 0,
            under_way: 0,
            late: (0, Duration::ZERO),
        };
        for step in 0..count {
            execution.enlist(step);
        }
        execution
    }

    /// An operation without steps, which is executed elsewhere, until [`end`](Execution::end) is called.
    pub(crate) fn elsewhere(id: u64, call: Call, places: Places, arithmetic: What) -> Execution {
        let of_no_plan = u64::MAX;
        let execution = Execution::new((id, of_no_plan), call, Schedule::default(), places, arithmetic);
        Execution { left: 1, ..execution }
    }

    /// Restarts it after its end. Scratch memory is added at the start.
    pub(crate) fn again(mut self, id: u64, call: Call, arithmetic: What) -> Execution {
        self.states.fill(State::Waits);
        for lane in &mut self.lanes {
            (lane.next, lane.is_told, lane.has_heard, lane.grant) = (0, false, false, None);
        }
        let places = Places { scratch: None, ..self.places };
        Execution {
            id,
            call,
            places,
            arithmetic,
            left: self.states.len(),
            moved: None,
            began: None,
            under_way: 0,
            late: (0, Duration::ZERO),
            ..self
        }
    }

    /// The bytes of scratch memory that it needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.bytes(self.schedule.scratch)
    }

    /// Whether it has steps of its own.
    pub(crate) fn has_steps(&self) -> bool {
        !self.schedule.steps.is_empty()
    }

    /// Adds a step to its lanes.
    fn enlist(&mut self, step: usize) {
        let Execution { schedule, lanes, .. } = self;
        match &schedule.steps[step] {
            Step::Send { peer, .. } => lane(lanes, Way::Send, *peer).steps.push(step as u32),
            Step::Land { peer, .. } => lane(lanes, Way::Receive, *peer).steps.push(step as u32),
            Step::Combine { operands, .. } => {
                let mut is_local = true;
                for operand in schedule.operands(operands) {
                    if let Operand::Arrival(peer) = operand {
                        lane(lanes, Way::Receive, *peer).steps.push(step as u32);
                        is_local = false;
                    }
                }
                if is_local {
                    lane(lanes, Way::Local, 0).steps.push(step as u32);
                }
            }
        }
    }

    /// The peers that it sends to, and those that it receives from.
    pub(crate) fn peers(&self) -> impl Iterator<Item = (u32, bool)> {
        self.lanes.iter().filter(|lane| lane.way != Way::Local).map(|lane| (lane.peer, lane.way == Way::Send))
    }

    /// The peers whose chunks it has taken: they wait for the ACK of a chunk, but not for that of a short message.
    pub(crate) fn owes_acks(&self, eager: usize) -> impl Iterator<Item = u32> {
        let is_chunk = move |step: &u32| match &self.schedule.steps[*step as usize] {
            Step::Send { .. } => false,
            Step::Land { .. } => true,
            Step::Combine { len, .. } => self.bytes(*len) > eager,
        };
        let lanes = self.lanes.iter().filter(|lane| lane.way == Way::Receive);
        lanes.filter(move |lane| lane.steps.iter().any(is_chunk)).map(|lane| lane.peer)
    }

    /// Of the peers that it receives from, those whose chunks arrive in staging memory.
    pub(crate) fn staged(&self, eager: usize) -> impl Iterator<Item = u32> {
        let lanes = self.lanes.iter().filter(|lane| lane.way == Way::Receive);
        lanes.filter(move |lane| self.is_staged(lane, eager)).map(|lane| lane.peer)
    }

    fn is_staged(&self, lane: &Lane, eager: usize) -> bool {
        lane.steps.iter().any(|step| {
            matches!(&self.schedule.steps[*step as usize], Step::Combine { len, .. } if self.bytes(*len) > eager)
        })
    }

    /// The ranks from which data is still expected, or to which it is still to be sent.
    pub(crate) fn waits_for(&self) -> impl Iterator<Item = u32> {
        self.peers().map(|(peer, _)| peer).filter(|peer| {
            self.lanes.iter().any(|lane| {
                lane.peer == *peer
                    && lane.way != Way::Local
                    && lane.steps.iter().any(|step| self.states[*step as usize] != State::Done)
            })
        })
    }

    /// Whether this region contains its elements.
    pub(crate) fn is_about(&self, mr: Mr) -> bool {
        [self.places.input, self.places.output].into_iter().flatten().any(|(of, _)| of == mr)
    }

    /// Whether a device is executing steps of it.
    pub(crate) fn is_on_device(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether all steps are done.
    pub(crate) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// The number of steps, and of those done. An operation that is executed elsewhere is one step.
    pub(crate) fn progress(&self) -> (usize, usize) {
        let steps = self.states.len().max(1);
        (steps, steps - self.left)
    }

    /// The operation that is executed elsewhere is done.
    pub(crate) fn end(&mut self) {
        self.left = 0;
    }

    /// The memory of a sending step is free again.
    pub(crate) fn sent(&mut self, step: u32) {
        self.under_way = self.under_way.saturating_sub(1);
        self.finish(step as usize);
    }

    fn finish(&mut self, step: usize) {
        if std::mem::replace(&mut self.states[step], State::Done) != State::Done {
            self.left -= 1;
        }
    }

    /// A peer has sent the destination of chunks.
    pub(crate) fn granted(&mut self, peer: u32, grant: &Grant) {
        lane(&mut self.lanes, Way::Send, peer).grant = Some(grant.output());
    }

    /// Takes the grants of peers that arrived before the start. A grant of another call is detected when a message of this
    /// one arrives.
    pub(crate) fn take_grants(&mut self, links: &mut [crate::group::Peer]) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.way == Way::Send) {
            let grants = &mut links[lane.peer as usize].grants;
            if let Some(index) = grants.iter().position(|(call, _)| *call == self.call)
                && let Some((_, grant)) = grants.remove(index)
            {
                lane.grant = Some(grant.output());
            }
        }
    }

    /// Executes all steps that are ready. Returns whether there were any.
    pub(crate) fn advance(&mut self, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        if self.began.is_none() {
            self.began = Some(tools.now);
            tools.log.began(self.record, tools.now);
        }
        self.moved.get_or_insert(tools.now);
        let mut has_moved = self.take_from_device(tools)?;
        loop {
            let mut moved = false;
            for index in 0..self.lanes.len() {
                let is_starved = self.under_way == 0 && self.running.is_empty();
                let this = match self.lanes[index].way {
                    Way::Send => self.send(index, tools)?,
                    Way::Receive => self.receive(index, tools)?,
                    Way::Local => self.compute(index, tools)?,
                };
                if this && !(has_moved || moved) && is_starved {
                    self.log_wait(index, tools);
                }
                moved |= this;
            }
            has_moved |= moved;
            if !moved || tools.budget == 0 {
                break;
            }
        }
        if has_moved {
            self.moved = Some(tools.now);
            tools.log.moved(self.record, tools.now, self.progress());
        }
        Ok(has_moved)
    }

    /// Records that this rank had no work until a message of a lane's peer arrived.
    fn log_wait(&self, index: usize, tools: &Tools<'_>) {
        let Lane { way, peer, .. } = &self.lanes[index];
        if let (Way::Receive, Some(moved)) = (way, self.moved) {
            tools.log.waited(self.record, *peer, tools.now.since(moved));
        }
    }

    /// A peer has reported the call.
    pub(crate) fn hear(&mut self, peer: u32, Heard { began, idle, .. }: Heard) {
        // Only its first report counts: later ones may have been queued after chunks.
        let lane = self.lanes.iter_mut().find(|lane| lane.way != Way::Local && lane.peer == peer);
        let is_first = lane.is_some_and(|lane| !std::mem::replace(&mut lane.has_heard, true));
        if let Some(own) = self.began.filter(|_| is_first) {
            let by = began.since(own).min(idle);
            self.late = if by > self.late.1 { (peer, by) } else { self.late };
        }
    }

    /// The peer that started it last, with the delay, if the delay to this rank is at least `at_least`.
    pub(crate) fn late(&self, at_least: Duration) -> Option<(u32, Duration)> {
        Some(self.late).filter(|(_, by)| *by > at_least)
    }

    /// When it started, as reported to peers.
    fn age(&self, now: Nanos) -> Age {
        let began = self.began.unwrap_or(now);
        let idle = self.idle_since.map_or(Duration::ZERO, |since| began.since(since));
        Age { age: now.since(began), idle }
    }

    fn is_ready(&self, step: usize) -> bool {
        self.schedule.after(step).iter().all(|before| self.states[*before as usize] == State::Done)
    }

    fn bytes(&self, len: usize) -> usize {
        len * self.arithmetic.data_type.size()
    }

    fn sge(&self, spot: Spot, bytes: usize) -> Result<Sge, Trouble> {
        let (mr, offset) = self.places.get(spot.place).ok_or_else(|| no_memory(spot.place))?;
        Ok(Sge { mr, offset: offset + self.bytes(spot.at) as u64, length: bytes as u32 })
    }

    /// Sends all that is ready in a lane.
    fn send(&mut self, index: usize, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        let peer = self.lanes[index].peer as usize;
        let link = &mut tools.links[peer];
        if link.sends.front() != Some(&self.id) {
            return Ok(false);
        }
        let Some(channel) = &mut link.channel else { return Ok(false) };
        let (age, mut moved) = (self.age(tools.now), false);
        while let Some(&step) = self.lanes[index].steps.get(self.lanes[index].next) {
            let Step::Send { from, len, lands, .. } = self.schedule.steps[step as usize] else { break };
            if !self.is_ready(step as usize) {
                return Ok(moved);
            }
            let bytes = self.bytes(len);
            let is_short = lands.is_none() && bytes <= channel.eager_bytes() as usize;
            let has_gone = if is_short {
                let source = if len > 0 { Some(self.sge(from, bytes)?) } else { None };
                channel.send_short(
                    (tools.ports, tools.now),
                    (&self.call, age),
                    Purpose::Elements,
                    bytes as u32,
                    |context, mirror, at| {
                        let Some(source) = source else { return Ok(()) };
                        tools.computer.copy(
                            context,
                            Sge { mr: mirror, offset: at.into(), length: source.length },
                            source,
                        )
                    },
                )?
            } else {
                self.send_chunk(index, step, ((tools.ports, tools.now), age), channel)?
            };
            if !has_gone {
                return Ok(moved);
            }
            tools.log.sent(peer as u32, bytes as u64, !is_short);
            if is_short {
                self.lanes[index].is_told = true;
                self.finish(step as usize);
            } else {
                self.under_way += 1;
                link.chunks.begin(bytes as u64, tools.now);
            }
            self.lanes[index].next += 1;
            moved = true;
        }
        if self.lanes[index].next == self.lanes[index].steps.len() {
            link.sends.pop_front();
        }
        Ok(moved)
    }

    /// Sends a chunk, once the peer has sent its destination.
    fn send_chunk(
        &mut self,
        index: usize,
        step: u32,
        ((ports, now), age): ((&mut Ports, Nanos), Age),
        channel: &mut Channel,
    ) -> Result<bool, Trouble> {
        let Step::Send { from, len, lands, .. } = self.schedule.steps[step as usize] else {
            return Ok(false);
        };
        let source = self.sge(from, self.bytes(len))?;
        let target = match (lands, self.lanes[index].grant) {
            (Some(at), Some(base)) => {
                Some(Remote { address: base.address.wrapping_add(self.bytes(at) as u64), ..base })
            }
            (Some(_), None) => return Ok(false),
            (None, _) if !channel.has_staging_for(source.length) => return Ok(false),
            (None, _) => None,
        };
        if !self.lanes[index].is_told {
            if !channel.send_short((ports, now), (&self.call, age), Purpose::Call, 0, |_, _, _| Ok(()))? {
                return Ok(false);
            }
            self.lanes[index].is_told = true;
        }
        let waiting = Waiting { operation: self.id, step };
        Ok(match target {
            Some(target) => channel.send_landing((ports, now), source, target, waiting)?,
            None => channel.send_staged((ports, now), source, waiting)?,
        })
    }

    /// Takes messages that have arrived for a lane.
    fn receive(&mut self, index: usize, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        let peer = self.lanes[index].peer as usize;
        if !self.lanes[index].is_told {
            self.lanes[index].is_told = self.grant(index, tools)?;
        }
        let mut moved = false;
        while tools.budget > 0
            && let Some(step) = self.next_of(index)
            && self.is_ready(step)
            && self.can_take(step, tools)?
            && self.take(step, tools)?
        {
            moved = true;
        }
        if self.next_of(index).is_none() && tools.links[peer].receives.front() == Some(&self.id) {
            tools.links[peer].receives.pop_front();
        }
        Ok(moved)
    }

    /// The next step of a lane that is neither done nor running: steps with several arrivals are in several lanes.
    fn next_of(&mut self, index: usize) -> Option<usize> {
        let lane = &mut self.lanes[index];
        while lane.steps.get(lane.next).is_some_and(|step| self.states[*step as usize] != State::Waits) {
            lane.next += 1;
        }
        lane.steps.get(lane.next).map(|step| *step as usize)
    }

    /// Sends a peer the destination of its chunks, if it needs it. Returns whether the peer has it.
    fn grant(&self, index: usize, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        let (lane @ Lane { peer, steps, .. }, age) = (&self.lanes[index], self.age(tools.now));
        let link = &mut tools.links[*peer as usize];
        let Some(channel) = &mut link.channel else { return Ok(false) };
        let lands = steps.iter().any(|step| matches!(self.schedule.steps[*step as usize], Step::Land { .. }));
        let is_staged = self.is_staged(lane, channel.eager_bytes() as usize);
        let tells_staging = is_staged && !channel.staging_is_told;
        if !lands && !tells_staging {
            return Ok(true);
        }
        let output = match (lands, self.places.output) {
            (true, Some((mr, offset))) => {
                let (address, keys) = tools.ports.keys(mr)?;
                let base = offset + self.bytes(self.schedule.base(*peer)) as u64;
                Some(Remote { address: address.wrapping_add(base), keys })
            }
            (true, None) => return Err(no_memory(Place::Output)),
            (false, _) => None,
        };
        let grant = channel.grant(tools.ports, output)?;
        let bytes = size_of::<Grant>() as u32;
        let told = channel.send_short(
            (tools.ports, tools.now),
            (&self.call, age),
            Purpose::Grant,
            bytes,
            |context, mirror, at| Ok(context.write(mirror, at.into(), grant.as_bytes())?),
        )?;
        channel.staging_is_told |= told && tells_staging;
        Ok(told)
    }

    /// Whether all messages of a step have arrived.
    fn can_take(&self, step: usize, tools: &Tools<'_>) -> Result<bool, Trouble> {
        match &self.schedule.steps[step] {
            Step::Send { .. } => Ok(false),
            Step::Land { peer, len, .. } => self.has_come(*peer, *len, true, tools),
            Step::Combine { operands, len, .. } => {
                for operand in self.schedule.operands(operands) {
                    if let Operand::Arrival(peer) = operand
                        && !(self.is_front(*peer, step) && self.has_come(*peer, *len, false, tools)?)
                    {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
        }
    }

    /// Whether a step is the next one that takes a message of a peer.
    fn is_front(&self, peer: u32, step: usize) -> bool {
        let lane = self.lanes.iter().find(|lane| lane.way == Way::Receive && lane.peer == peer);
        lane.is_some_and(|lane| {
            lane.steps[lane.next..].iter().find(|step| self.states[**step as usize] == State::Waits)
                == Some(&(step as u32))
        })
    }

    /// Whether the next message of a peer has arrived, and belongs to this operation with the expected length.
    fn has_come(&self, peer: u32, len: usize, lands: bool, tools: &Tools<'_>) -> Result<bool, Trouble> {
        let link = &tools.links[peer as usize];
        if link.receives.front() != Some(&self.id) {
            return Ok(false);
        }
        let Some(arrival) = link.channel.as_ref().and_then(|channel| channel.arrival()) else {
            return Ok(false);
        };
        if arrival.call != self.call {
            let (ours, theirs) = (self.call.to_string(), arrival.call.to_string());
            return Err(Trouble::Cause(Cause::Mismatch { peer, ours, theirs }));
        }
        if arrival.bytes as usize != self.bytes(len) && self.call.kind == Kind::AllToAll {
            // Each rank knows only its own counts.
            let ours = format!("{}, with {} bytes from rank {peer}", self.call, self.bytes(len));
            let theirs = format!("{}, with {} bytes for this rank", arrival.call, arrival.bytes);
            return Err(Trouble::Cause(Cause::Mismatch { peer, ours, theirs }));
        }
        if arrival.bytes as usize != self.bytes(len) || arrival.from.is_none() != lands {
            let way = |lands| if lands { "to its place" } else { "to be combined" };
            let problem = format!(
                "{} bytes {} instead of {} bytes {}",
                arrival.bytes,
                way(arrival.from.is_none()),
                self.bytes(len),
                way(lands)
            );
            return Err(Trouble::Cause(Cause::Protocol { peer, problem }));
        }
        Ok(true)
    }

    /// Executes a step whose messages have arrived, or starts it on a device. Returns `false` if the device has no room for
    /// it yet.
    fn take(&mut self, step: usize, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        if let Step::Combine { to, len, operands, finish } = &self.schedule.steps[step]
            && *len > 0
        {
            let bytes = self.bytes(*len);
            let mut sources = Operands::new();
            for operand in self.schedule.operands(operands) {
                sources.push(match operand {
                    Operand::Own(spot) => self.sge(*spot, bytes)?,
                    Operand::Arrival(peer) => arrived(tools, *peer, bytes)?,
                });
            }
            let target = self.sge(*to, bytes)?;
            match self.combine(*finish, target, &sources, tools)? {
                ByDevice::No => tools.budget = tools.budget.saturating_sub(bytes),
                ByDevice::Later => return Ok(false),
                ByDevice::Begun(ticket) => {
                    self.states[step] = State::Runs;
                    self.running.push_back((ticket, step));
                    self.of_arrivals(step, |peer, _| {
                        if let Some(channel) = &mut tools.links[peer as usize].channel {
                            channel.begin();
                        }
                    });
                    return Ok(true);
                }
            }
        }
        self.of_arrivals(step, |peer, bytes| took(tools, peer, bytes, Channel::take));
        self.finish(step);
        Ok(true)
    }

    /// Calls `of` for each message that a step takes, with its peer and its bytes.
    fn of_arrivals(&self, step: usize, mut of: impl FnMut(u32, usize)) {
        match &self.schedule.steps[step] {
            Step::Send { .. } => {}
            Step::Land { peer, len, .. } => of(*peer, self.bytes(*len)),
            Step::Combine { operands, len, .. } => {
                for operand in self.schedule.operands(operands) {
                    if let Operand::Arrival(peer) = operand {
                        of(*peer, self.bytes(*len));
                    }
                }
            }
        }
    }

    /// Processes the steps that the device has ended.
    fn take_from_device(&mut self, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        let mut moved = false;
        while let Some(&(ticket, step)) = self.running.front()
            && tools.computer.has_ended(ticket)?
        {
            self.running.pop_front();
            self.of_arrivals(step, |peer, bytes| took(tools, peer, bytes, Channel::end));
            self.finish(step);
            moved = true;
        }
        Ok(moved)
    }

    /// For a failed operation: waits for the device's work only because it uses the memory.
    pub(crate) fn drop_from_device(&mut self, computer: &mut Computer) {
        while let Some((ticket, _)) = self.running.front()
            && !matches!(computer.has_ended(*ticket), Ok(false))
        {
            self.running.pop_front();
        }
    }

    /// Combines operands, or starts it on the device. [`ByDevice::No`] if it is done.
    fn combine(
        &self,
        finish: Finish,
        target: Sge,
        sources: &Operands,
        tools: &mut Tools<'_>,
    ) -> Result<ByDevice, Trouble> {
        let What { data_type, reduction, size } = self.arithmetic;
        let Tools { computer, ports: context, now, .. } = tools;
        let computation = match (finish, reduction) {
            (Finish::Scale, Some(Reduction::PreMulSum(factor))) => Computation::Scale { data_type, factor },
            _ => {
                let op = reduction.map_or(ReduceOp::Sum, Reduction::op);
                let divide_by = (finish == Finish::Whole).then_some(size);
                Computation::Reduce(Arithmetic::new(data_type, op).divide_by(divide_by))
            }
        };
        let by_device = computer.begin(context, *now, computation, target, sources)?;
        if matches!(by_device, ByDevice::No) {
            computer.compute(context, computation, target, sources)?;
        }
        Ok(by_device)
    }

    /// Executes the steps of a lane that need no other rank.
    fn compute(&mut self, index: usize, tools: &mut Tools<'_>) -> Result<bool, Trouble> {
        let mut moved = false;
        while tools.budget > 0
            && let Some(step) = self.next_of(index)
            && self.is_ready(step)
            && self.take(step, tools)?
        {
            moved = true;
        }
        Ok(moved)
    }
}

/// The lane of a peer, created if necessary.
fn lane(lanes: &mut Vec<Lane>, way: Way, peer: u32) -> &mut Lane {
    let found = lanes.iter().position(|lane| lane.way == way && lane.peer == peer);
    let index = found.unwrap_or_else(|| {
        lanes.push(Lane {
            way,
            peer,
            steps: Vec::new(),
            next: 0,
            is_told: false,
            has_heard: false,
            grant: None,
        });
        lanes.len() - 1
    });
    &mut lanes[index]
}

/// The memory of the next message of a peer.
fn arrived(tools: &Tools<'_>, peer: u32, bytes: usize) -> Result<Sge, Trouble> {
    let channel = tools.links[peer as usize].channel.as_ref();
    let from = channel.and_then(|channel| channel.arrival()).and_then(|arrival| arrival.from);
    let (mr, offset) = from.ok_or_else(|| {
        Trouble::Cause(Cause::Protocol { peer, problem: "no message where one was".to_owned() })
    })?;
    Ok(Sge { mr, offset: offset.into(), length: bytes as u32 })
}

/// Takes a message: a plain one, or one that a device has read.
fn took(tools: &mut Tools<'_>, peer: u32, bytes: usize, take: impl FnOnce(&mut Channel)) {
    tools.log.received(peer, bytes as u64);
    if let Some(channel) = &mut tools.links[peer as usize].channel {
        take(channel);
    }
}

fn no_memory(place: Place) -> Trouble {
    Trouble::Cause(Cause::Local { problem: format!("no memory was given as {place:?}") })
}
