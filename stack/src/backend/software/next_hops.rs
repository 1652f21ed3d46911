//! Next hops that are being looked for, and who waits for them: the driver is asked again and again, and never
//! blocks (docs/decisions/02-nothing-blocks.md).

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
use crate::verbs::{Ah, Error, Event, EventSource, Qp, Unreachable};

/// How often a driver is asked for one next hop, while there are few.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// It is asked for one peer in a poll, and no sooner again, however many are looked for: they have turns.
const LOOKS_APART: Duration = Duration::from_micros(50);
/// Searches that there may be before it is asked who wants them.
const ROOM: usize = 32;
/// A driver that knows neither way for so long never will.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who waits for a next hop.
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
    /// One at a time has this place, and it waits for one search at a time.
    fn place(self) -> (u8, u32) {
        match self {
            Seeker::Qp(qp) => (0, qp.0.index),
            Seeker::Ah(ah) => (1, ah.0.index),
            Seeker::Connection(id) => (2, id.0.index),
        }
    }
}

/// A next hop that is being looked for.
struct Sought {
    ticket: Ticket,
    /// When it is given up; not known before the first look.
    until: Option<Nanos>,
    /// Who began to wait, by place; some are gone, or wait for another.
    seekers: BTreeMap<(u8, u32), Seeker>,
}

impl Sought {
    /// Whether anybody still waits. Who is found not to is forgotten, so that each is looked at in vain once.
    fn is_wanted(&mut self, seeks: impl Fn(Seeker, Ticket) -> bool) -> bool {
        while let Some(seeker) = self.seekers.last_entry() {
            if seeks(*seeker.get(), self.ticket) {
                return true;
            }
            seeker.remove();
        }
        false
    }
}

/// All that are being looked for, by peer. A search for which nobody waits any more is noticed when its turn comes, or
/// when there are too many, and costs the driver nothing.
pub(crate) struct NextHops {
    sought: BTreeMap<IpAddr, Sought>,
    /// So many before those that nobody waits for are looked for.
    room: usize,
    /// Whose turn was the last.
    last: IpAddr,
    next_look: Nanos,
}

impl NextHops {
    pub(crate) fn new() -> NextHops {
        NextHops {
            sought: BTreeMap::new(),
            room: ROOM,
            last: Ipv4Addr::UNSPECIFIED.into(),
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

    /// Tells `seeker` too what comes of the search for `peer`, if that is what it waits for.
    pub(crate) fn tell(&mut self, peer: IpAddr, hop: Hop, seeker: Seeker) {
        if hop.ticket().is_some()
            && let Some(sought) = self.sought.get_mut(&peer)
        {
            sought.seekers.insert(seeker.place(), seeker);
        }
    }

    /// The search whose turn it is, taken out.
    fn take_next(&mut self) -> Option<(IpAddr, Sought)> {
        let behind = self.sought.range((Bound::Excluded(self.last), Bound::Unbounded));
        self.last = *behind.chain(&self.sought).next()?.0;
        self.sought.remove_entry(&self.last)
    }
}

impl Engine {
    /// The next hop to a peer: what the driver knows, or the ticket of the search that begins with this.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn next_hop(&mut self, driver: &mut dyn PacketDriver, peer: IpAddr) -> Result<Hop, Error> {
        if let Some(sought) = self.next_hops.sought.get(&peer) {
            return Ok(Hop::Sought(sought.ticket));
        }
        if let NextHop::Found(mac) = driver.resolve(peer)? {
            return Ok(Hop::Found(MacAddr(mac)));
        }
        if self.next_hops.sought.len() >= self.next_hops.room {
            self.end_unwanted_searches();
        }
        let ticket = self.shared.scheduler.ticket();
        let NextHops { sought, next_look, .. } = &mut self.next_hops;
        sought.insert(peer, Sought { ticket, until: None, seekers: BTreeMap::new() });
        // With the next poll, whose time is not known.
        *next_look = Nanos::ZERO;
        Ok(Hop::Sought(ticket))
    }

    /// Ends all searches that nobody waits for, and makes room for as many as are left.
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
            // Its way is fixed.
            Seeker::Connection(id) => return self.awaits_next_hop(id),
        };
        awaited == Some(ticket)
    }

    /// Asks the driver for one of the next hops that are looked for, and tells whoever waits for it.
    #[cold]
    pub(crate) fn look_for_next_hop(&mut self, driver: &mut dyn PacketDriver) {
        let now = self.shared.now;
        if let Some((peer, mut sought)) = self.next_hops.take_next()
            && sought.is_wanted(|seeker, ticket| self.seeks(seeker, ticket))
        {
            match look(driver, peer, now < *sought.until.get_or_insert(now + PATIENCE)) {
                None => _ = self.next_hops.sought.insert(peer, sought),
                Some(found) => self.settle_next_hop(sought, found),
            }
        }
        let NextHops { sought, next_look, .. } = &mut self.next_hops;
        *next_look = match u32::try_from(sought.len()) {
            Ok(0) => Nanos::NEVER,
            Ok(count) => now + (LOOK_EVERY / count).max(LOOKS_APART),
            Err(_) => now + LOOKS_APART,
        };
    }

    fn settle_next_hop(&mut self, sought: Sought, found: Result<MacAddr, Unreachable>) {
        let Sought { ticket, seekers, .. } = sought;
        for seeker in seekers.into_values() {
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

    /// Takes the network's word on packets that came back.
    pub(crate) fn hear_refusals(&mut self, driver: &mut dyn PacketDriver) {
        if let Some((cm, _)) = self.cm_if_used() {
            while let Some(refusal) = driver.next_refusal() {
                cm.on_refusal(&refusal);
            }
        }
    }
}

/// What the driver says of a next hop; nothing while it may still find out.
fn look(
    driver: &mut dyn PacketDriver,
    peer: IpAddr,
    is_patient: bool,
) -> Option<Result<MacAddr, Unreachable>> {
    match driver.resolve(peer) {
        Ok(NextHop::Found(mac)) => Some(Ok(MacAddr(mac))),
        Ok(NextHop::Pending) if is_patient => None,
        Ok(NextHop::Pending) => Some(Err(Unreachable::Silent { peer })),
        Err(error) => {
            tracing::debug!("no next hop to {peer}: {error}");
            Some(Err(Unreachable::of(peer, &error)))
        }
    }
}

impl Software {
    /// Whether the next hop of a queue pair or an address handle is still looked for.
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

    /// Takes the event that says why the next hop of a queue pair or an address handle was not found.
    pub(crate) fn take_unreachable(&mut self, source: EventSource) -> Option<Unreachable> {
        self.engine.shared.events.take_unreachable(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scheduler::Scheduler;
    use crate::verbs::Handle;

    #[test]
    fn a_search_knows_each_place_once() {
        let (ticket, peer) = (Scheduler::new(1).ticket(), IpAddr::from([10, 0, 0, 1]));
        let mut next_hops = NextHops::new();
        next_hops.sought.insert(peer, Sought { ticket, until: None, seekers: BTreeMap::new() });
        // Queue pairs that come and go, and two that take turns.
        for n in 0..1000 {
            let handle = Handle { index: n % 2, generation: n / 2 % 7 };
            next_hops.tell(peer, Hop::Sought(ticket), Seeker::Qp(Qp(handle)));
            next_hops.tell(peer, Hop::Sought(ticket), Seeker::Ah(Ah(handle)));
        }
        let (_, mut sought) = next_hops.take_next().unwrap();
        assert_eq!(sought.seekers.len(), 4);
        assert!(sought.is_wanted(|seeker, of| of == ticket && matches!(seeker, Seeker::Qp(_))));
        assert!(!sought.is_wanted(|_, _| false) && sought.seekers.is_empty());
    }

    #[test]
    fn searches_take_turns() {
        let mut scheduler = Scheduler::new(1);
        let mut next_hops = NextHops::new();
        assert!(next_hops.take_next().is_none());
        for host in [3, 1, 2] {
            let sought = Sought { ticket: scheduler.ticket(), until: None, seekers: BTreeMap::new() };
            next_hops.sought.insert([10, 0, 0, host].into(), sought);
        }
        let mut turn = || {
            let (peer, sought) = next_hops.take_next().unwrap();
            next_hops.sought.insert(peer, sought);
            peer.to_string()
        };
        let turns: Vec<String> = (0..4).map(|_| turn()).collect();
        assert_eq!(turns, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"]);
    }
}
