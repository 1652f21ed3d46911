//! Next hops that are being resolved, and what waits for them: the driver is polled repeatedly, and never blocks
//! (docs/decisions/02-nothing-blocks.md).

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Bound;
use std::time::Duration;

use ferroce_driver::{Nanos, NextHop, PacketDriver};
use ferroce_wire::MacAddr;

use super::Software;
use super::engine::Engine;
use crate::cm::CmId;
use crate::engine::ah::Hop;
use crate::engine::scheduler::Ticket;
use crate::verbs::{AddressVector, Ah, Error, Event, EventSource, Port, Qp, Unreachable};

/// The interval at which a driver is polled for one next hop, while there are few.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The interval between any two polls of the driver, which are for one peer each in turn, however many are resolved.
const LOOKS_APART: Duration = Duration::from_micros(50);
/// The most searches before unwanted ones are removed.
const ROOM: usize = 32;
/// The time limit of each waiter for a driver that returns no result.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time of a waiter starts with a round: there may be many waiters, so rounds are rare.
const ROUND_EVERY: Duration = Duration::from_secs(1);

/// A waiter for a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seeker {
    /// A connected queue pair, which sends nothing before.
    Qp(Qp),
    /// An address handle.
    Ah(Ah),
    /// An exchange of the connection manager.
    Connection(CmId),
}

impl Seeker {
    /// The place of the waiter. Only one object has it at a time, and it waits for one search at a time.
    fn place(self) -> (u8, u32) {
        match self {
            Seeker::Qp(qp) => (0, qp.0.index),
            Seeker::Ah(ah) => (1, ah.0.index),
            Seeker::Connection(id) => (2, id.0.index),
        }
    }
}

/// A peer, and the VLAN in which its next hop is resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wanted {
    peer: IpAddr,
    vlan: Option<u16>,
}

impl Wanted {
    /// The peer of an address vector, in the VLAN of its source.
    pub(crate) fn of(address: &AddressVector, port: &Port) -> Wanted {
        let vlan = port.gids.get(address.sgid_index).and_then(|source| source.vlan);
        Wanted { peer: address.gid.to_ip(), vlan }
    }

    fn ask(self, driver: &mut dyn PacketDriver) -> Result<NextHop, ferroce_driver::Error> {
        match self.vlan {
            Some(vlan) => driver.resolve_in_vlan(vlan, self.peer),
            None => driver.resolve(self.peer),
        }
    }
}

/// A waiter and its deadline, which is not known before the first round.
#[derive(Clone, Copy)]
struct Waiter {
    seeker: Seeker,
    until: Option<Nanos>,
}

/// A search: a next hop that is being resolved.
struct Sought {
    ticket: Ticket,
    /// When the waiters are checked next: new ones get their deadline, and expired ones end.
    next_round: Nanos,
    /// The waiters, by place; some may no longer exist, or wait for another search.
    waiters: BTreeMap<(u8, u32), Waiter>,
}

impl Sought {
    fn new(ticket: Ticket) -> Sought {
        Sought { ticket, next_round: Nanos::ZERO, waiters: BTreeMap::new() }
    }

    /// Adds a waiter, with its whole time.
    fn add(&mut self, seeker: Seeker) {
        self.waiters.insert(seeker.place(), Waiter { seeker, until: None });
    }

    /// Whether any waiter is left. Removes those that no longer wait, so that each is checked without success only once.
    fn is_wanted(&mut self, seeks: impl Fn(Seeker, Ticket) -> bool) -> bool {
        while let Some(waiter) = self.waiters.last_entry() {
            if seeks(waiter.get().seeker, self.ticket) {
                return true;
            }
            waiter.remove();
        }
        false
    }

    /// Removes those whose deadline is reached at `now`, after a poll without a result.
    fn take_overdue(&mut self, now: Nanos) -> BTreeMap<(u8, u32), Waiter> {
        if now < self.next_round {
            return BTreeMap::new();
        }
        let waiters = std::mem::take(&mut self.waiters).into_iter();
        let timed = waiters.map(|(place, Waiter { seeker, until })| {
            (place, Waiter { seeker, until: Some(until.unwrap_or(now + PATIENCE)) })
        });
        let overdue;
        (overdue, self.waiters) = timed.partition(|(_, waiter)| waiter.until <= Some(now));
        let first = self.waiters.values().filter_map(|waiter| waiter.until).min();
        self.next_round = first.unwrap_or(Nanos::NEVER).min(now + ROUND_EVERY);
        overdue
    }
}

/// All searches, by peer and VLAN. An unwanted search is removed when its turn comes, when there are too many, or when
/// another waiter starts to wait for the same peer. It costs the driver nothing.
pub(crate) struct NextHops {
    sought: BTreeMap<Wanted, Sought>,
    /// The number of searches at which unwanted ones are removed.
    room: usize,
    /// The search of the last turn.
    last: Wanted,
    next_look: Nanos,
}

impl NextHops {
    pub(crate) fn new() -> NextHops {
        NextHops {
            sought: BTreeMap::new(),
            room: ROOM,
            last: Wanted { peer: Ipv4Addr::UNSPECIFIED.into(), vlan: None },
            next_look: Nanos::NEVER,
        }
    }

    /// Whether it is time for [`Engine::look_for_next_hop`].
    #[inline]
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        self.next_look <= now
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        (!self.sought.is_empty()).then_some(self.next_look)
    }

    /// Adds `seeker` to the search for `wanted`, if it waits for that.
    pub(crate) fn tell(&mut self, wanted: Wanted, hop: Hop, seeker: Seeker) {
        if hop.ticket().is_some()
            && let Some(sought) = self.sought.get_mut(&wanted)
        {
            sought.add(seeker);
        }
    }

    /// Takes out the search whose turn it is.
    fn take_next(&mut self) -> Option<(Wanted, Sought)> {
        let behind = self.sought.range((Bound::Excluded(self.last), Bound::Unbounded));
        self.last = *behind.chain(&self.sought).next()?.0;
        self.sought.remove_entry(&self.last)
    }
}

impl Engine {
    /// The next hop to a peer: the driver's result, the ticket of an existing search, or that of a new one.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn next_hop(&mut self, driver: &mut dyn PacketDriver, wanted: Wanted) -> Result<Hop, Error> {
        if let Some(mut sought) = self.next_hops.sought.remove(&wanted)
            && sought.is_wanted(|seeker, ticket| self.seeks(seeker, ticket))
        {
            let ticket = sought.ticket;
            self.next_hops.sought.insert(wanted, sought);
            return Ok(Hop::Sought(ticket));
        }
        if let NextHop::Found(mac) = wanted.ask(driver)? {
            return Ok(Hop::Found(MacAddr(mac)));
        }
        if self.next_hops.sought.len() >= self.next_hops.room {
            self.end_unwanted_searches();
        }
        let ticket = self.shared.scheduler.ticket();
        let NextHops { sought, next_look, .. } = &mut self.next_hops;
        sought.insert(wanted, Sought::new(ticket));
        // With the next poll, because the time is not known.
        *next_look = Nanos::ZERO;
        Ok(Hop::Sought(ticket))
    }

    /// Removes all unwanted searches, and makes room for as many as are left.
    #[cold]
    fn end_unwanted_searches(&mut self) {
        let mut sought = std::mem::take(&mut self.next_hops.sought);
        sought.retain(|_, sought| sought.is_wanted(|seeker, ticket| self.seeks(seeker, ticket)));
        self.next_hops.room = (2 * sought.len()).max(ROOM);
        self.next_hops.sought = sought;
    }

    /// Whether `seeker` waits for the search with this ticket.
    fn seeks(&self, seeker: Seeker, ticket: Ticket) -> bool {
        let awaited = match seeker {
            Seeker::Qp(qp) => self.qps.get(qp.0).and_then(|qp| qp.next_hop),
            Seeker::Ah(ah) => self.shared.ahs.get(ah.0).and_then(|handle| handle.hop.ticket()),
            // Its path is fixed.
            Seeker::Connection(id) => return self.awaits_next_hop(id),
        };
        awaited == Some(ticket)
    }

    /// Polls the driver for one of the searches, and notifies its waiters of the result.
    #[cold]
    pub(crate) fn look_for_next_hop(&mut self, driver: &mut dyn PacketDriver) {
        let now = self.shared.now;
        if let Some((wanted, mut sought)) = self.next_hops.take_next()
            && sought.is_wanted(|seeker, ticket| self.seeks(seeker, ticket))
        {
            let ticket = sought.ticket;
            let (told, word) = match look(driver, wanted) {
                Some(found) => (sought.waiters, found),
                None => {
                    let overdue = sought.take_overdue(now);
                    if !sought.waiters.is_empty() {
                        self.next_hops.sought.insert(wanted, sought);
                    }
                    (overdue, Err(Unreachable::Silent { peer: wanted.peer }))
                }
            };
            self.settle_next_hop(ticket, told, word);
        }
        let NextHops { sought, next_look, .. } = &mut self.next_hops;
        *next_look = match u32::try_from(sought.len()) {
            Ok(0) => Nanos::NEVER,
            Ok(count) => now + (LOOK_EVERY / count).max(LOOKS_APART),
            Err(_) => now + LOOKS_APART,
        };
    }

    /// Notifies the waiters of the search with this ticket of its result. Queue pairs whose datagrams wait for others are
    /// queued again.
    fn settle_next_hop(
        &mut self,
        ticket: Ticket,
        told: BTreeMap<(u8, u32), Waiter>,
        found: Result<MacAddr, Unreachable>,
    ) {
        if told.is_empty() {
            return;
        }
        for Waiter { seeker, .. } in told.into_values() {
            match seeker {
                Seeker::Qp(qp) => {
                    let Engine { qps, shared, .. } = self;
                    if let Some(qp) = qps.get_mut(qp.0).filter(|qp| qp.next_hop == Some(ticket)) {
                        qp.take_next_hop(shared, found);
                    }
                }
                Seeker::Ah(ah) => {
                    if let Some(handle) = self.shared.ahs.get_mut(ah.0) {
                        handle.take_next_hop(found);
                        if let Err(reason) = found {
                            self.shared.raise(Event::AhUnreachable { ah, reason });
                        }
                    }
                }
                Seeker::Connection(id) => {
                    if let Some((cm, mut verbs)) = self.cm_if_used() {
                        cm.take_next_hop(id, found, &mut verbs);
                    }
                }
            }
        }
        self.shared.scheduler.redeem(ticket);
    }

    /// Processes errors of the network for undelivered packets.
    pub(crate) fn hear_refusals(&mut self, driver: &mut dyn PacketDriver) {
        if let Some((cm, _)) = self.cm_if_used() {
            while let Some(refusal) = driver.next_refusal() {
                cm.on_refusal(&refusal);
            }
        }
    }
}

/// The driver's result for a next hop; `None` while there is none.
fn look(driver: &mut dyn PacketDriver, wanted: Wanted) -> Option<Result<MacAddr, Unreachable>> {
    match wanted.ask(driver) {
        Ok(NextHop::Found(mac)) => Some(Ok(MacAddr(mac))),
        Ok(NextHop::Pending) => None,
        Err(error) => {
            let Wanted { peer, .. } = wanted;
            tracing::debug!("no next hop to {peer}: {error}");
            Some(Err(Unreachable::of(peer, &error)))
        }
    }
}

impl Software {
    /// Whether the next hop of a queue pair or an address handle is still being resolved.
    pub(crate) fn awaits_next_hop(&self, source: EventSource) -> Result<bool, Error> {
        match source {
            EventSource::Qp(qp) => {
                let queue_pair =
                    self.engine.qps.get(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
                Ok(queue_pair.next_hop.is_some())
            }
            EventSource::Ah(ah) => {
                let handle = self.engine.shared.ahs.get(ah.0);
                Ok(handle.ok_or_else(|| Error::invalid_handle("AH", ah.0))?.hop.ticket().is_some())
            }
            EventSource::Cq(_) | EventSource::Srq(_) | EventSource::Port => Ok(false),
        }
    }

    /// Takes the event with the reason why the next hop of a queue pair or an address handle was not resolved.
    pub(crate) fn take_unreachable(&mut self, source: EventSource) -> Option<Unreachable> {
        self.engine.shared.events.take_unreachable(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scheduler::Scheduler;
    use crate::verbs::Handle;

    fn wanted(host: u8) -> Wanted {
        Wanted { peer: [10, 0, 0, host].into(), vlan: None }
    }

    #[test]
    fn a_search_has_each_place_once() {
        let (ticket, peer) = (Scheduler::new(1).ticket(), wanted(1));
        let mut next_hops = NextHops::new();
        next_hops.sought.insert(peer, Sought::new(ticket));
        // Queue pairs that are created and destroyed, and two that alternate.
        for n in 0..1000 {
            let handle = Handle { index: n % 2, generation: n / 2 % 7 };
            next_hops.tell(peer, Hop::Sought(ticket), Seeker::Qp(Qp(handle)));
            next_hops.tell(peer, Hop::Sought(ticket), Seeker::Ah(Ah(handle)));
        }
        let (_, mut sought) = next_hops.take_next().unwrap();
        assert_eq!(sought.waiters.len(), 4);
        assert!(sought.is_wanted(|seeker, of| of == ticket && matches!(seeker, Seeker::Qp(_))));
        assert!(!sought.is_wanted(|_, _| false) && sought.waiters.is_empty());
    }

    #[test]
    fn each_waiter_has_its_own_deadline() {
        let mut sought = Sought::new(Scheduler::new(1).ticket());
        let [first, second] = [0, 1].map(|index| Seeker::Qp(Qp(Handle { index, generation: 0 })));
        let start = Nanos(1_000_000_000);
        let overdue_after = |sought: &mut Sought, seconds| {
            let overdue = sought.take_overdue(start + Duration::from_secs(seconds));
            overdue.into_values().map(|waiter| waiter.seeker).collect::<Vec<_>>()
        };
        sought.add(first);
        assert_eq!(overdue_after(&mut sought, 0), []);
        sought.add(second);
        assert_eq!(overdue_after(&mut sought, 7), []);
        assert_eq!(overdue_after(&mut sought, 9), []);
        assert_eq!(overdue_after(&mut sought, 10), [first], "others that come later do not keep it waiting");
        assert_eq!(overdue_after(&mut sought, 16), []);
        // It waits again, for another search and then for this one.
        sought.add(second);
        assert_eq!(overdue_after(&mut sought, 17), []);
        assert_eq!(overdue_after(&mut sought, 26), []);
        assert_eq!(overdue_after(&mut sought, 27), [second]);
        assert!(sought.waiters.is_empty());
    }

    #[test]
    fn searches_take_turns() {
        let mut scheduler = Scheduler::new(1);
        let mut next_hops = NextHops::new();
        assert!(next_hops.take_next().is_none());
        for host in [3, 1, 2] {
            next_hops.sought.insert(wanted(host), Sought::new(scheduler.ticket()));
        }
        let mut turn = || {
            let (wanted, sought) = next_hops.take_next().unwrap();
            next_hops.sought.insert(wanted, sought);
            wanted.peer.to_string()
        };
        let turns: Vec<String> = (0..4).map(|_| turn()).collect();
        assert_eq!(turns, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]);
    }
}
