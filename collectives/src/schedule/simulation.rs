//! Executes schedules of ranks in memory, in any order that the rules allow, for the tests of schedules.

use std::collections::VecDeque;

use super::{Finish, Operand, Place, Schedule, Spot, Step};

/// The arithmetic of a simulation.
pub(crate) trait Elements {
    type Element: Clone;
    /// Reduces from left to right.
    fn reduce(&self, operands: &[Self::Element], finish: Finish, rank: usize) -> Self::Element;
}

/// One rank's memory and progress.
pub(crate) struct Rank<T> {
    pub(crate) input: Vec<T>,
    pub(crate) output: Vec<T>,
    /// The positions of the first elements of input and output in `input`, if they share it.
    pub(crate) shared: Option<(usize, usize)>,
    scratch: Vec<T>,
    schedule: Schedule,
    done: Vec<bool>,
    /// The sends to each peer that have not started, and the steps that take its messages: in list order.
    sends: Vec<VecDeque<usize>>,
    receives: Vec<VecDeque<usize>>,
    local: VecDeque<usize>,
    /// Outstanding messages to each peer, the oldest first.
    flying: Vec<VecDeque<Flying<T>>>,
    /// Messages received from each peer.
    arrived: Vec<VecDeque<Arrived<T>>>,
    has_begun: bool,
}

/// A posted message; its elements are read when it is sent, unless they were copied.
struct Flying<T> {
    step: usize,
    copy: Option<Vec<T>>,
    has_left: bool,
}

enum Arrived<T> {
    Staged(Vec<T>),
    Landed(usize),
}

#[derive(Clone, Copy)]
enum Event {
    Begin(usize),
    Post(usize, usize),
    Leave(usize, usize),
    Acknowledge(usize, usize),
    Take(usize, usize),
    Local(usize),
}

impl<T: Clone> Rank<T> {
    pub(crate) fn new(
        input: Vec<T>,
        output: Vec<T>,
        shared: Option<(usize, usize)>,
        schedule: Schedule,
        garbage: &T,
    ) -> Rank<T> {
        let scratch = vec![garbage.clone(); schedule.scratch];
        let done = vec![false; schedule.steps.len()];
        let (sends, receives, local) = Default::default();
        let (flying, arrived) = Default::default();
        Rank {
            input,
            output,
            shared,
            scratch,
            schedule,
            done,
            sends,
            receives,
            local,
            flying,
            arrived,
            has_begun: false,
        }
    }

    fn set_up(&mut self, size: usize) {
        self.sends.resize_with(size, VecDeque::new);
        self.receives.resize_with(size, VecDeque::new);
        self.flying.resize_with(size, VecDeque::new);
        self.arrived.resize_with(size, VecDeque::new);
        for (index, step) in self.schedule.steps.iter().enumerate() {
            match step {
                Step::Send { peer, .. } => self.sends[*peer as usize].push_back(index),
                Step::Land { peer, .. } => self.receives[*peer as usize].push_back(index),
                Step::Combine { operands, .. } => {
                    let mut is_local = true;
                    for operand in self.schedule.operands(operands) {
                        if let Operand::Arrival(peer) = operand {
                            self.receives[*peer as usize].push_back(index);
                            is_local = false;
                        }
                    }
                    if is_local {
                        self.local.push_back(index);
                    }
                }
            }
        }
    }

    fn is_ready(&self, step: usize) -> bool {
        self.schedule.after(step).iter().all(|before| self.done[*before as usize])
    }

    fn place(&mut self, spot: Spot, len: usize) -> &mut [T] {
        let (memory, at) = match (spot.place, self.shared) {
            (Place::Input, None) => (&mut self.input, spot.at),
            (Place::Output, None) => (&mut self.output, spot.at),
            (Place::Scratch, _) => (&mut self.scratch, spot.at),
            (Place::Input, Some((input, _))) => (&mut self.input, input + spot.at),
            (Place::Output, Some((_, output))) => (&mut self.input, output + spot.at),
        };
        &mut memory[at..at + len]
    }

    /// The output, in whichever memory it is.
    pub(crate) fn result(&mut self, len: usize) -> Vec<T> {
        self.place(Place::Output.at(0), len).to_vec()
    }

    /// Whether all messages of a step have arrived.
    fn can_take(&self, step: usize) -> bool {
        let at_front =
            |peer: usize| self.receives[peer].front() == Some(&step) && !self.arrived[peer].is_empty();
        self.is_ready(step)
            && match &self.schedule.steps[step] {
                Step::Land { peer, .. } => at_front(*peer as usize),
                Step::Combine { operands, .. } => {
                    self.schedule.operands(operands).iter().all(|operand| match operand {
                        Operand::Arrival(peer) => at_front(*peer as usize),
                        Operand::Own(_) => true,
                    })
                }
                Step::Send { .. } => false,
            }
    }
}

/// Runs until no event is possible; each time `pick` chooses among the possible events. A channel holds `slots` messages;
/// `eager` of a length returns whether the sender's memory is free as soon as a message is posted.
///
/// # Panics
/// If messages do not match, or a rank does not end.
pub(crate) fn run<E: Elements>(
    elements: &E,
    ranks: &mut [Rank<E::Element>],
    slots: usize,
    eager_up_to: usize,
    mut pick: impl FnMut(usize) -> usize,
) {
    let size = ranks.len();
    ranks.iter_mut().for_each(|rank| rank.set_up(size));
    loop {
        let events = possible(ranks, slots);
        if events.is_empty() {
            break;
        }
        let event = events[pick(events.len())];
        happen(elements, ranks, event, eager_up_to);
    }
    for (number, rank) in ranks.iter().enumerate() {
        let stuck: Vec<_> = (0..rank.done.len()).filter(|step| !rank.done[*step]).collect();
        assert!(stuck.is_empty(), "rank {number} of {size} is stuck at {:?}", rank.schedule.steps[stuck[0]]);
        assert!(rank.arrived.iter().all(VecDeque::is_empty), "rank {number} of {size} got too much");
    }
}

/// Runs as far as possible without a rank that does not start. Returns those that end.
pub(crate) fn run_without<E: Elements>(
    elements: &E,
    ranks: &mut [Rank<E::Element>],
    slots: usize,
    late: usize,
) -> Vec<usize> {
    let size = ranks.len();
    ranks.iter_mut().for_each(|rank| rank.set_up(size));
    let is_late = |event: &Event| matches!(event, Event::Begin(rank) if *rank == late);
    while let Some(event) = possible(ranks, slots).into_iter().find(|event| !is_late(event)) {
        happen(elements, ranks, event, 0);
    }
    (0..size).filter(|rank| ranks[*rank].done.iter().all(|done| *done)).collect()
}

fn possible<T: Clone>(ranks: &[Rank<T>], slots: usize) -> Vec<Event> {
    let mut events = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        if !rank.has_begun {
            events.push(Event::Begin(number));
            continue;
        }
        if rank.local.front().is_some_and(|step| rank.is_ready(*step)) {
            events.push(Event::Local(number));
        }
        for (peer, other) in ranks.iter().enumerate() {
            let under_way = rank.flying[peer].iter().filter(|message| !message.has_left).count()
                + other.arrived[number].len();
            if under_way < slots && rank.sends[peer].front().is_some_and(|step| rank.is_ready(*step)) {
                events.push(Event::Post(number, peer));
            }
            if let Some(message) = rank.flying[peer].iter().find(|message| !message.has_left) {
                let lands = matches!(rank.schedule.steps[message.step], Step::Send { lands: Some(_), .. });
                if !lands || other.has_begun {
                    events.push(Event::Leave(number, peer));
                }
            }
            if rank.flying[peer].front().is_some_and(|message| message.has_left) {
                events.push(Event::Acknowledge(number, peer));
            }
            if rank.receives[peer].front().is_some_and(|step| rank.can_take(*step)) {
                events.push(Event::Take(number, peer));
            }
        }
    }
    events
}

fn happen<E: Elements>(elements: &E, ranks: &mut [Rank<E::Element>], event: Event, eager_up_to: usize) {
    match event {
        Event::Begin(rank) => ranks[rank].has_begun = true,
        Event::Post(number, peer) => {
            let rank = &mut ranks[number];
            let Some(step) = rank.sends[peer].pop_front() else { unreachable!("it was possible") };
            let Step::Send { from, len, lands, .. } = rank.schedule.steps[step] else {
                unreachable!("a send")
            };
            let is_eager = len <= eager_up_to && lands.is_none();
            let copy = is_eager.then(|| rank.place(from, len).to_vec());
            rank.flying[peer].push_back(Flying { step, copy, has_left: false });
            rank.done[step] = is_eager;
        }
        Event::Leave(rank, peer) => leave(ranks, rank, peer),
        Event::Acknowledge(rank, peer) => {
            if let Some(message) = ranks[rank].flying[peer].pop_front() {
                ranks[rank].done[message.step] = true;
            }
        }
        Event::Take(rank, peer) => {
            if let Some(step) = ranks[rank].receives[peer].front().copied() {
                take(elements, ranks, rank, step);
            }
        }
        Event::Local(rank) => {
            if let Some(step) = ranks[rank].local.pop_front() {
                take(elements, ranks, rank, step);
            }
        }
    }
}

fn leave<T: Clone>(ranks: &mut [Rank<T>], number: usize, peer: usize) {
    let rank = &mut ranks[number];
    let Some(message) = rank.flying[peer].iter_mut().find(|message| !message.has_left) else { return };
    message.has_left = true;
    let (step, copy) = (message.step, message.copy.take());
    let Step::Send { from, len, lands, .. } = rank.schedule.steps[step] else { unreachable!("a send") };
    let elements = copy.unwrap_or_else(|| rank.place(from, len).to_vec());
    let target = &mut ranks[peer];
    let arrived = match lands {
        None => Arrived::Staged(elements),
        Some(at) => {
            let base = target.schedule.base(number as u32);
            target.place(Place::Output.at(base + at), len).clone_from_slice(&elements);
            Arrived::Landed(base + at)
        }
    };
    target.arrived[number].push_back(arrived);
}

fn take<E: Elements>(elements: &E, ranks: &mut [Rank<E::Element>], number: usize, step: usize) {
    let rank = &mut ranks[number];
    match rank.schedule.steps[step].clone() {
        Step::Send { .. } => unreachable!("sends are posted"),
        Step::Land { peer, at, .. } => {
            rank.receives[peer as usize].pop_front();
            match rank.arrived[peer as usize].pop_front() {
                Some(Arrived::Landed(there)) => assert_eq!(there, at, "rank {number}: landed elsewhere"),
                _ => panic!("rank {number}: what was to land came otherwise"),
            }
        }
        Step::Combine { to, len, operands, finish } => {
            let operands = rank.schedule.operands(&operands).to_vec();
            let sources: Vec<Vec<E::Element>> = operands
                .iter()
                .map(|operand| match operand {
                    Operand::Own(spot) => rank.place(*spot, len).to_vec(),
                    Operand::Arrival(peer) => {
                        rank.receives[*peer as usize].pop_front();
                        match rank.arrived[*peer as usize].pop_front() {
                            Some(Arrived::Staged(elements)) => {
                                assert_eq!(elements.len(), len, "rank {number}: length of a message");
                                elements
                            }
                            _ => panic!("rank {number}: what was to be combined came otherwise"),
                        }
                    }
                })
                .collect();
            let result: Vec<E::Element> = (0..len)
                .map(|i| {
                    let column: Vec<E::Element> = sources.iter().map(|source| source[i].clone()).collect();
                    elements.reduce(&column, finish, number)
                })
                .collect();
            rank.place(to, len).clone_from_slice(&result);
        }
    }
    ranks[number].done[step] = true;
}
