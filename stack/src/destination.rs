//! What may be in flight: of a queue pair, and of all that send to one destination.

use ferroce_wire::{Gid, Psn};

use crate::qp::QueuePair;
use crate::shared::Shared;

/// What a queue pair may have in flight even if others have filled the window of its destination: so each goes
/// on, and one whose peer is gone stops nobody.
const LEAST: u32 = 4;

/// What the go-back-N queue pairs to one destination have in flight together. The way there has one queue for
/// all of them, so the window is the destination's: many queue pairs have no more in flight than one, but for
/// [a few packets each](LEAST). Sized when created.
pub(crate) struct Destinations {
    /// Ordered by GID, each with its place in `in_flight` and the number of its queue pairs.
    places: Vec<(Gid, Destination, u32)>,
    /// PSNs; as many READs as there are queue pairs may take 2²³ each.
    in_flight: Box<[u64]>,
    free: Vec<Destination>,
}

/// The place of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination(u32);

impl Destinations {
    /// For `limit` queue pairs.
    pub(crate) fn new(limit: u32) -> Destinations {
        Destinations {
            places: Vec::with_capacity(limit as usize),
            in_flight: vec![0; limit as usize].into_boxed_slice(),
            free: (0..limit).rev().map(Destination).collect(),
        }
    }

    /// One more queue pair sends to `gid`. There is room for as many destinations as there are queue pairs.
    pub(crate) fn join(&mut self, gid: Gid) -> Option<Destination> {
        match self.find(gid) {
            Ok(index) => {
                let (_, place, users) = &mut self.places[index];
                *users += 1;
                Some(*place)
            }
            Err(index) => {
                let place = self.free.pop()?;
                self.places.insert(index, (gid, place, 1));
                Some(place)
            }
        }
    }

    /// A queue pair that has nothing in flight sends to `gid` no more.
    pub(crate) fn leave(&mut self, gid: Gid) {
        let Ok(index) = self.find(gid) else { return };
        let (_, place, users) = &mut self.places[index];
        *users -= 1;
        if *users == 0 {
            debug_assert_eq!(self.in_flight[place.0 as usize], 0);
            self.free.push(*place);
            self.places.remove(index);
        }
    }

    /// Packets in flight.
    #[inline]
    pub(crate) fn in_flight(&self, place: Destination) -> u64 {
        self.in_flight[place.0 as usize]
    }

    #[inline]
    pub(crate) fn add(&mut self, place: Destination, packets: u32) {
        self.in_flight[place.0 as usize] += u64::from(packets);
    }

    #[inline]
    pub(crate) fn remove(&mut self, place: Destination, packets: u32) {
        self.in_flight[place.0 as usize] -= u64::from(packets);
    }

    fn find(&self, gid: Gid) -> Result<usize, usize> {
        self.places.binary_search_by_key(&gid.0, |(gid, ..)| gid.0)
    }
}

/// What one queue pair has in flight.
#[derive(Clone, Copy)]
pub(crate) struct Flight {
    /// As they count at its destination.
    packets: u32,
    /// The PSN after the newest that asks for an answer.
    asked: Psn,
}

impl Flight {
    /// Nothing is in flight before `psn`.
    pub(crate) fn new(psn: Psn) -> Flight {
        Flight { packets: 0, asked: psn }
    }
}

impl QueuePair {
    /// Whether a packet at `psn` that takes `wanted` PSNs may be in flight beside the others. A READ
    /// needs room for its whole response, unless nothing else is in flight.
    #[inline]
    pub(crate) fn window_admits(&self, shared: &Shared, psn: Psn, wanted: u32) -> bool {
        let una = self.requester.una();
        if let Some(selective) = &self.selective {
            return selective.scoreboard.admits(una, psn, wanted);
        }
        let own = (psn.distance(una).max(0) as u32).saturating_add(wanted);
        if own == wanted || own <= LEAST && own <= shared.window {
            return true;
        }
        let all = self.in_flight_with_others(shared) + u64::from(wanted);
        // One that waits has an answer coming, which tells it when to go on.
        own <= shared.window && (all <= shared.window.into() || !self.awaits_answer())
    }

    /// Whether nothing more may be sent behind a packet at `psn`: it must be acknowledged.
    #[inline]
    pub(crate) fn fills_window(&mut self, shared: &Shared, psn: Psn) -> bool {
        let una = self.requester.una();
        if let Some(selective) = &mut self.selective {
            return selective.scoreboard.must_ask(una, psn);
        }
        let own = psn.distance(una) as u32 + 1;
        own == shared.window
            || own >= LEAST
                && self.in_flight_with_others(shared) + 1 >= shared.window.into()
                && !self.awaits_answer()
    }

    /// A packet was sent that takes `count` PSNs.
    #[inline]
    pub(crate) fn note_departure(&mut self, shared: &mut Shared, psn: Psn, count: u32, asks: bool) {
        let Some(destination) = self.destination else { return };
        let flight = &mut self.requester.flight;
        flight.packets += count;
        if asks {
            flight.asked = psn + count;
        }
        shared.destinations.add(destination, count);
    }

    /// Everything before `una`, which is to be the oldest that is not acknowledged, is there.
    #[inline]
    pub(crate) fn note_arrival(&mut self, shared: &mut Shared, una: Psn) {
        let Some(destination) = self.destination else { return };
        let acknowledged = una.distance(self.requester.una()).max(0) as u32;
        let flight = &mut self.requester.flight;
        let arrived = flight.packets.min(acknowledged);
        flight.packets -= arrived;
        shared.destinations.remove(destination, arrived);
    }

    /// What is not acknowledged counts as lost, or does not matter any more.
    pub(crate) fn forget_in_flight(&mut self, shared: &mut Shared) {
        let una = self.requester.una();
        let forgotten = std::mem::replace(&mut self.requester.flight, Flight::new(una));
        if let Some(destination) = self.destination {
            shared.destinations.remove(destination, forgotten.packets);
        }
    }

    /// From now on its packets in flight count at `gid`.
    pub(crate) fn join_destination(&mut self, shared: &mut Shared, gid: Gid) {
        if self.selective.is_none() {
            self.destination = shared.destinations.join(gid);
        }
    }

    /// Undoes [`join_destination`](QueuePair::join_destination), while nothing is in flight and the address is
    /// still the one.
    pub(crate) fn leave_destination(&mut self, shared: &mut Shared) {
        if let (Some(_), Some(address)) = (self.destination.take(), self.address) {
            shared.destinations.leave(address.gid);
        }
    }

    #[inline]
    fn in_flight_with_others(&self, shared: &Shared) -> u64 {
        self.destination.map_or(0, |destination| shared.destinations.in_flight(destination))
    }

    /// Whether a packet in flight asks for an answer.
    #[inline]
    fn awaits_answer(&self) -> bool {
        self.requester.flight.asked.distance(self.requester.una()) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_lasts_as_long_as_its_last_queue_pair() {
        let mut destinations = Destinations::new(2);
        let [a, b, c] = [1, 2, 3].map(|last| Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]));
        let first = destinations.join(b).expect("there is room");
        assert_eq!(destinations.join(b), Some(first));
        let second = destinations.join(a).expect("there is room");
        assert_eq!((first == second, destinations.join(c)), (false, None));
        destinations.add(first, 7);
        destinations.add(second, 1);
        destinations.remove(first, 3);
        assert_eq!((destinations.in_flight(first), destinations.in_flight(second)), (4, 1));
        destinations.remove(first, 4);
        destinations.leave(b);
        assert_eq!(destinations.join(c), None);
        destinations.leave(b);
        assert_eq!(destinations.join(c), Some(first));
    }
}
