//! Next hops that are being looked for, and who waits for them: the driver is asked again and again, and never
//! blocks (docs/decisions/02-nothing-blocks.md).

use std::net::IpAddr;
use std::time::Duration;

use ferroce_driver::{Nanos, NextHop, PacketDriver};
use ferroce_wire::MacAddr;

use super::Software;
use super::engine::Engine;
use crate::cm::CmId;
use crate::engine::ah::Hop;
use crate::engine::scheduler::Ticket;
use crate::verbs::{Ah, Error, Event, EventSource, Qp, Unreachable};

/// How often a driver is asked for one next hop.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// It is asked for one peer in a poll, and no sooner again, however many are looked for.
const LOOKS_APART: Duration = Duration::from_micros(50);
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

/// A next hop that is being looked for.
struct Sought {
    peer: IpAddr,
    ticket: Ticket,
    /// When it is given up; not known before the first look.
    until: Option<Nanos>,
    seekers: Vec<Seeker>,
}

/// All that are being looked for, each once.
pub(crate) struct NextHops {
    sought: Vec<Sought>,
    /// Which is looked for next.
    next: usize,
    next_look: Nanos,
}

impl NextHops {
    pub(crate) fn new() -> NextHops {
        NextHops { sought: Vec::new(), next: 0, next_look: Nanos::NEVER }
    }

    /// Whether it is time for [`Engine::look_for_next_hop`].
    #[inline]
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        self.next_look <= now
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        (!self.sought.is_empty()).then_some(self.next_look)
    }

    /// Tells `seeker` too what comes of the search.
    pub(crate) fn tell(&mut self, ticket: Ticket, seeker: Seeker) {
        if let Some(sought) = self.sought.iter_mut().find(|sought| sought.ticket == ticket)
            && sought.seekers.last() != Some(&seeker)
        {
            sought.seekers.push(seeker);
        }
    }
}

impl Engine {
    /// The next hop to a peer: what the driver knows, or the ticket of the search that begins with this.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn next_hop(&mut self, driver: &mut dyn PacketDriver, peer: IpAddr) -> Result<Hop, Error> {
        if let Some(sought) = self.next_hops.sought.iter().find(|sought| sought.peer == peer) {
            return Ok(Hop::Sought(sought.ticket));
        }
        if let NextHop::Found(mac) = driver.resolve(peer)? {
            return Ok(Hop::Found(MacAddr(mac)));
        }
        let ticket = self.shared.scheduler.ticket();
        let NextHops { sought, next_look, .. } = &mut self.next_hops;
        sought.push(Sought { peer, ticket, until: None, seekers: Vec::new() });
        // With the next poll, whose time is not known.
        *next_look = Nanos::ZERO;
        Ok(Hop::Sought(ticket))
    }

    /// Asks the driver for one of the next hops that are looked for, and tells whoever waits for it.
    #[cold]
    pub(crate) fn look_for_next_hop(&mut self, driver: &mut dyn PacketDriver) {
        let now = self.shared.now;
        let NextHops { sought, next, next_look } = &mut self.next_hops;
        *next = if *next < sought.len() { *next } else { 0 };
        let Some(this) = sought.get_mut(*next) else {
            *next_look = Nanos::NEVER;
            return;
        };
        let (peer, until) = (this.peer, *this.until.get_or_insert(now + PATIENCE));
        let found = match driver.resolve(peer) {
            Ok(NextHop::Found(mac)) => Some(Ok(MacAddr(mac))),
            Ok(NextHop::Pending) if now < until => None,
            Ok(NextHop::Pending) => Some(Err(Unreachable::Silent { peer })),
            Err(error) => {
                tracing::debug!("no next hop to {peer}: {error}");
                Some(Err(Unreachable::of(peer, &error)))
            }
        };
        match found {
            None => *next += 1,
            Some(found) => {
                let Sought { ticket, seekers, .. } = self.next_hops.sought.swap_remove(self.next_hops.next);
                self.settle_next_hop(ticket, &seekers, found);
            }
        }
        let NextHops { sought, next_look, .. } = &mut self.next_hops;
        *next_look = match u32::try_from(sought.len()) {
            Ok(0) => Nanos::NEVER,
            Ok(count) => now + (LOOK_EVERY / count).max(LOOKS_APART),
            Err(_) => now + LOOKS_APART,
        };
    }

    fn settle_next_hop(&mut self, ticket: Ticket, seekers: &[Seeker], found: Result<MacAddr, Unreachable>) {
        for seeker in seekers {
            match *seeker {
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
