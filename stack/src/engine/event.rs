//! Unread events.

use std::collections::{HashMap, VecDeque};

use crate::verbs::{Ah, Config, Cq, Event, EventSource, Handle, Qp, Srq, Unreachable};

/// For each object, each kind of event is held once: there is room for all possible events, so none is lost.
pub(crate) struct Events {
    /// For queue pairs, then completion queues, shared receive queues, address handles, and the port.
    waiting: Box<[Waiting]>,
    first_cq: u32,
    first_srq: u32,
    first_ah: u32,
    port: u32,
    /// Unread events with further fields, by place: each object has at most one.
    particular: HashMap<u32, Event>,
    /// The objects with events, and some whose events were already taken by object, each once.
    order: VecDeque<u32>,
}

impl Events {
    pub(crate) fn new(config: &Config) -> Events {
        let first_cq = config.max_qps;
        let first_srq = first_cq + config.max_cqs;
        let first_ah = first_srq + config.max_srqs;
        let port = first_ah + config.max_ahs;
        let objects = port as usize + 1;
        Events {
            waiting: vec![Waiting::default(); objects].into(),
            first_cq,
            first_srq,
            first_ah,
            port,
            // One for the port; more if paths can't be resolved, at most one per object. Packets add none.
            particular: HashMap::with_capacity(1),
            order: VecDeque::with_capacity(objects),
        }
    }

    /// Adds an event. Returns `false` if it is already there.
    pub(crate) fn raise(&mut self, event: Event) -> bool {
        let (place, generation) = self.locate(event.source());
        let Some(waiting) = self.waiting.get_mut(place as usize) else { return false };
        waiting.be_of(generation);
        let kind = kind_of(&event);
        let is_news = waiting.push(kind);
        if is_news && !waiting.enter_order() {
            self.order.push_back(place);
        }
        if is_news && kind == PARTICULAR {
            self.particular.insert(place, event);
        }
        is_news
    }

    /// Takes the oldest event of the next object.
    pub(crate) fn next(&mut self) -> Option<Event> {
        loop {
            let place = *self.order.front()?;
            let event = self.take(place);
            if event.is_some() {
                return event;
            }
            self.order.pop_front();
            self.waiting.get_mut(place as usize)?.leave_order();
        }
    }

    /// Takes the oldest event of one object.
    pub(crate) fn next_of(&mut self, source: EventSource) -> Option<Event> {
        let (place, generation) = self.locate(source);
        let is_its = self.waiting.get(place as usize)?.generation == generation;
        is_its.then(|| self.take(place)).flatten()
    }

    /// Takes the event that there is no path to the peer, before others of the object.
    pub(crate) fn take_unreachable(&mut self, source: EventSource) -> Option<Unreachable> {
        let (place, generation) = self.locate(source);
        let waiting =
            self.waiting.get_mut(place as usize).filter(|waiting| waiting.generation == generation)?;
        waiting.remove(PARTICULAR);
        match self.particular.remove(&place)? {
            Event::QpUnreachable { reason, .. } | Event::AhUnreachable { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// Whether there is one for the port.
    pub(crate) fn has_pkey_violation(&self) -> bool {
        self.particular.contains_key(&self.port)
    }

    /// Removes the events of a destroyed object.
    pub(crate) fn forget(&mut self, source: EventSource) {
        let (place, _) = self.locate(source);
        if let Some(waiting) = self.waiting.get_mut(place as usize) {
            waiting.clear();
        }
        self.particular.remove(&place);
    }

    fn take(&mut self, place: u32) -> Option<Event> {
        let waiting = self.waiting.get_mut(place as usize)?;
        let (kind, generation) = (waiting.pop()?, waiting.generation);
        let handle = |first| Handle { index: place - first, generation };
        let source = if place < self.first_cq {
            EventSource::Qp(Qp(handle(0)))
        } else if place < self.first_srq {
            EventSource::Cq(Cq(handle(self.first_cq)))
        } else if place < self.first_ah {
            EventSource::Srq(Srq(handle(self.first_srq)))
        } else if place < self.port {
            EventSource::Ah(Ah(handle(self.first_ah)))
        } else {
            EventSource::Port
        };
        match source {
            _ if kind == PARTICULAR => self.particular.remove(&place),
            EventSource::Qp(qp) => QP_EVENTS.get(kind).map(|event| event(qp)),
            EventSource::Cq(cq) => CQ_EVENTS.get(kind).map(|event| event(cq)),
            EventSource::Srq(srq) => Some(Event::SrqLimitReached(srq)),
            EventSource::Ah(_) | EventSource::Port => None,
        }
    }

    /// The place of an object, and its generation.
    fn locate(&self, source: EventSource) -> (u32, u32) {
        match source {
            EventSource::Qp(Qp(handle)) => (handle.index, handle.generation),
            EventSource::Cq(Cq(handle)) => (self.first_cq + handle.index, handle.generation),
            EventSource::Srq(Srq(handle)) => (self.first_srq + handle.index, handle.generation),
            EventSource::Ah(Ah(handle)) => (self.first_ah + handle.index, handle.generation),
            EventSource::Port => (self.port, 0),
        }
    }
}

/// The events of a queue pair; the index is the kind.
const QP_EVENTS: [fn(Qp) -> Event; 6] = [
    Event::QpFatal,
    Event::QpReqErr,
    Event::QpAccessErr,
    Event::CommEst,
    Event::SqDrained,
    Event::QpLastWqeReached,
];

/// The events of a completion queue.
const CQ_EVENTS: [fn(Cq) -> Event; 2] = [Event::Completion, Event::CqErr];

/// The kind of events with further fields.
const PARTICULAR: usize = 6;

fn kind_of(event: &Event) -> usize {
    match event {
        Event::QpFatal(_) | Event::Completion(_) => 0,
        Event::SrqLimitReached(_) => 0,
        Event::QpReqErr(_) | Event::CqErr(_) => 1,
        Event::QpAccessErr(_) => 2,
        Event::CommEst(_) => 3,
        Event::SqDrained(_) => 4,
        Event::QpLastWqeReached(_) => 5,
        Event::QpUnreachable { .. }
        | Event::AhUnreachable { .. }
        | Event::PkeyViolation { .. }
        | Event::DeviceFatal => PARTICULAR,
    }
}

/// The unread events of one object, kept small because there are many queue pairs.
#[derive(Clone, Copy, Default)]
struct Waiting {
    /// The generation of their object; events of an earlier object in the slot are discarded.
    generation: u32,
    /// Three bits each, a kind plus one, the oldest lowest; and [`IN_ORDER`].
    kinds: u32,
}

/// The object is in the order.
const IN_ORDER: u32 = 1 << 31;

impl Waiting {
    fn be_of(&mut self, generation: u32) {
        if self.generation != generation {
            self.generation = generation;
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.kinds &= IN_ORDER;
    }

    /// Returns whether it was added, because it was not there yet.
    fn push(&mut self, kind: usize) -> bool {
        let (kind, mut shift) = (kind as u32 + 1, 0);
        loop {
            match self.kinds >> shift & 7 {
                0 => break,
                waits if waits == kind => return false,
                _ => shift += 3,
            }
        }
        self.kinds |= kind << shift;
        true
    }

    fn pop(&mut self) -> Option<usize> {
        let kind = (self.kinds & 7).checked_sub(1)?;
        self.kinds = self.kinds & IN_ORDER | (self.kinds & !IN_ORDER) >> 3;
        Some(kind as usize)
    }

    /// Removes one at any position.
    fn remove(&mut self, kind: usize) {
        let mut others = Waiting { generation: self.generation, kinds: self.kinds & IN_ORDER };
        while let Some(waits) = self.pop() {
            if waits != kind {
                others.push(waits);
            }
        }
        *self = others;
    }

    /// Returns whether it was in the order before.
    fn enter_order(&mut self) -> bool {
        let was = self.kinds & IN_ORDER != 0;
        self.kinds |= IN_ORDER;
        was
    }

    fn leave_order(&mut self) {
        self.kinds &= !IN_ORDER;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> Events {
        Events::new(&Config { max_qps: 2, max_cqs: 1, max_srqs: 1, ..Config::default() })
    }

    fn qp(index: u32, generation: u32) -> Qp {
        Qp(Handle { index, generation })
    }

    #[test]
    fn every_kind_is_returned_unchanged_and_the_queue_is_never_full() {
        let mut events = events();
        let [a, b] = [qp(0, 0), qp(1, 0)];
        let (cq, srq) = (Cq(Handle { index: 0, generation: 0 }), Srq(Handle { index: 0, generation: 0 }));
        let (pkey, source) = (ferroce_wire::PKey(7), ferroce_wire::Gid::from_ipv4([10, 0, 0, 1].into()));
        let violation = Event::PkeyViolation { qp: Some(a), pkey, source };
        let mut all: Vec<Event> = Vec::new();
        all.extend([a, b].iter().flat_map(|qp| QP_EVENTS.iter().rev().map(|event| event(*qp))));
        all.extend(CQ_EVENTS.map(|event| event(cq)));
        all.extend([Event::SrqLimitReached(srq), violation]);
        let capacity = events.order.capacity();
        for _ in 0..3 {
            assert!(all.iter().all(|event| events.raise(*event)));
            assert!(!all.iter().any(|event| events.raise(*event)), "the same waits already");
            let read: Vec<Event> = std::iter::from_fn(|| events.next()).collect();
            assert_eq!(read, all);
        }
        // Reading only by object must not let the order grow.
        for n in 0..1000 {
            let event = QP_EVENTS[n % 6](a);
            assert!(events.raise(event));
            assert_eq!(events.next_of(a.into()), Some(event));
        }
        assert!(events.order.capacity() == capacity && events.order.len() <= 1);
        assert_eq!(events.next(), None);
    }

    /// Each costs one step, however many others are unread.
    #[test]
    fn events_with_fields_are_returned_in_order() {
        let count = 100_000;
        let mut events = Events::new(&Config { max_qps: count, ..Config::default() });
        let reason = Unreachable::Silent { peer: [10, 0, 0, 1].into() };
        let unreachable = |index| Event::QpUnreachable { qp: qp(index, 0), reason };
        assert!((0..count).all(|index| events.raise(unreachable(index))));
        assert_eq!(events.take_unreachable(qp(1, 0).into()), Some(reason));
        assert_eq!(events.next_of(qp(3, 0).into()), Some(unreachable(3)));
        events.forget(qp(5, 0).into());
        let rest = (0..count).filter(|index| ![1, 3, 5].contains(index)).map(unreachable);
        assert!(rest.map(Some).eq(std::iter::from_fn(|| Some(events.next())).take(count as usize - 3)));
        assert!(events.next().is_none() && events.particular.is_empty());
    }

    #[test]
    fn events_of_an_object_are_returned_in_order() {
        let mut events = events();
        let [a, b] = [qp(0, 3), qp(1, 0)];
        let raised = [Event::CommEst(a), Event::CommEst(b), Event::QpFatal(a), Event::SqDrained(b)];
        assert!(raised.iter().all(|event| events.raise(*event)));
        assert_eq!(events.next_of(b.into()), Some(Event::CommEst(b)));
        assert_eq!(events.next(), Some(Event::CommEst(a)));
        assert_eq!(events.next_of(qp(0, 2).into()), None, "another one");
        assert_eq!(events.next_of(b.into()), Some(Event::SqDrained(b)));
        assert_eq!(events.next_of(b.into()), None);
        assert_eq!(events.next(), Some(Event::QpFatal(a)));
        assert_eq!(events.next(), None);
        // A later object in the same slot has none of them.
        assert!(events.raise(Event::CommEst(a)));
        events.forget(a.into());
        assert!(events.raise(Event::QpReqErr(qp(0, 4))));
        assert_eq!((events.next(), events.next()), (Some(Event::QpReqErr(qp(0, 4))), None));
    }
}
