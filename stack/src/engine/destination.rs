//! Packets in flight: of a queue pair, and of all queue pairs to one destination.

use ferroce_wire::{Gid, Psn};

use crate::engine::congestion::Reaction;
use crate::engine::kind::Kind;
use crate::engine::qp::QueuePair;
use crate::engine::requester::ACK_REQ_INTERVAL;
use crate::engine::shared::Shared;

/// The packets that a queue pair may have in flight even if others have filled the window of its destination, so that each
/// makes progress.
const LEAST: u32 = 4;

/// The fraction of a destination's window that all queue pairs whose peers may be gone share, in addition.
const UNHEARD_PART: u32 = 4;

/// The packets in flight of all go-back-N queue pairs to one destination, in each direction. A path has one queue for all
/// of them, so the window is per destination: many queue pairs have no more in flight than one, except for [a few packets
/// each](LEAST). Sized when created.
pub(crate) struct Destinations {
    /// Ordered by GID, each with its place in `traffic` and its number of queue pairs.
    places: Vec<(Gid, DestinationPlace, u32)>,
    /// By [`Class`].
    traffic: Box<[Traffic]>,
    free: Vec<DestinationPlace>,
}

/// The packets in flight of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Half of the window minus the packets in flight. Far below 0 for READs: each queue pair may have 2²³ packets.
    room: i64,
    /// The number of queue pairs with such packets in flight.
    senders: u32,
    window: u32,
}

impl Traffic {
    fn new(window: u32) -> Traffic {
        Traffic { room: i64::from(window / 2), senders: 0, window }
    }

    /// Whether a queue pair that has `own` packets in flight may send `wanted` more. Half of the window is for any queue
    /// pair, the rest for those that have less than their share of the window: an early one gives up the excess.
    #[inline(always)]
    fn admits(&self, own: u32, wanted: u32) -> bool {
        i64::from(wanted) <= self.room || self.admits_share(own, wanted)
    }

    #[inline]
    fn admits_share(&self, own: u32, wanted: u32) -> bool {
        let window = i64::from(self.window);
        self.packets() + i64::from(wanted) <= window
            && (i64::from(own) + i64::from(wanted)) * i64::from(self.senders) <= window
    }

    fn packets(&self) -> i64 {
        i64::from(self.window / 2) - self.room
    }
}

/// The direction of the packets for which the PSNs of a request stand.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    /// To the destination.
    There,
    /// From it: responses to READs, atomics and the like.
    Back,
}

impl Direction {
    const BOTH: [Direction; 2] = [Direction::There, Direction::Back];

    #[inline]
    pub(crate) fn of(kind: &Kind) -> Direction {
        if kind.is_read_or_atomic { Direction::Back } else { Direction::There }
    }
}

/// The number of classes of traffic per destination: for each [`Direction`], the queue pairs whose peers respond, and those
/// without an acknowledgement since their ACK timer expired. The peers of the latter may be gone.
const CLASSES: usize = 4;

/// A queue pair's reference to a destination: the place of the first of its two classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DestinationPlace(u32);

impl DestinationPlace {
    const UNHEARD: u32 = 2;

    /// For queue pairs that share no window: they use selective repeat, or are not connected.
    pub(crate) const NONE: DestinationPlace = DestinationPlace(0);

    fn new(number: u32) -> DestinationPlace {
        DestinationPlace(CLASSES as u32 * number)
    }

    #[inline]
    fn is_unheard(self) -> bool {
        self.0 & DestinationPlace::UNHEARD != 0
    }

    fn heard(self) -> DestinationPlace {
        DestinationPlace(self.0 & !DestinationPlace::UNHEARD)
    }

    fn unheard(self) -> DestinationPlace {
        DestinationPlace(self.0 | DestinationPlace::UNHEARD)
    }

    #[inline(always)]
    fn class(self, direction: Direction) -> Class {
        Class(self.0 as usize + direction as usize)
    }
}

/// A class: the place of its traffic.
#[derive(Clone, Copy)]
struct Class(usize);

impl Destinations {
    /// For `limit` queue pairs, with a window of this many packets for each destination.
    pub(crate) fn new(limit: u32, window: u32) -> Destinations {
        let [heard, unheard] = [Traffic::new(window), Traffic::new(window / UNHEARD_PART)];
        // The first ones are for `NONE`.
        let traffic = [heard, heard, unheard, unheard].repeat(1 + limit as usize).into_boxed_slice();
        let free = (1..=limit).rev().map(DestinationPlace::new).collect();
        Destinations { places: Vec::with_capacity(limit as usize), traffic, free }
    }

    /// Adds a queue pair that sends to `gid`. There is room for as many destinations as queue pairs.
    pub(crate) fn join(&mut self, gid: Gid) -> Option<DestinationPlace> {
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

    /// Removes a queue pair that sends to `gid`, with nothing in flight.
    pub(crate) fn leave(&mut self, gid: Gid) {
        let Ok(index) = self.find(gid) else { return };
        let (_, place, users) = &mut self.places[index];
        *users -= 1;
        if *users == 0 {
            let first = place.0 as usize;
            debug_assert!(self.traffic[first..first + CLASSES].iter().all(|traffic| traffic.senders == 0));
            self.free.push(*place);
            self.places.remove(index);
        }
    }

    #[inline]
    fn traffic(&self, class: Class) -> &Traffic {
        &self.traffic[class.0]
    }

    /// At least one more packet is in flight, of a queue pair that had `before`.
    #[inline(always)]
    fn add(&mut self, class: Class, before: u32, packets: u32) {
        let traffic = &mut self.traffic[class.0];
        traffic.room -= i64::from(packets);
        traffic.senders += u32::from(before == 0);
    }

    /// Undoes [`add`](Destinations::add).
    #[inline]
    fn remove(&mut self, class: Class, before: u32, packets: u32) {
        let traffic = &mut self.traffic[class.0];
        traffic.room += i64::from(packets);
        traffic.senders -= u32::from(before == 0);
    }

    fn find(&self, gid: Gid) -> Result<usize, usize> {
        self.places.binary_search_by_key(&gid.0, |(gid, ..)| gid.0)
    }
}

/// The packets in flight of one queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Flight {
    /// By direction.
    packets: [u32; 2],
    /// The PSN after the newest packet that requests an answer.
    asked: Psn,
}

impl Flight {
    /// Nothing is in flight before `psn`.
    pub(crate) fn new(psn: Psn) -> Flight {
        Flight { packets: [0; 2], asked: psn }
    }
}

impl QueuePair {
    /// Whether a packet at `psn` that occupies `wanted` PSNs may be in flight in addition. A READ needs room for its whole
    /// response, unless nothing else is in flight.
    #[inline]
    pub(crate) fn window_admits(&self, shared: &Shared, kind: &Kind, psn: Psn, wanted: u32) -> bool {
        let una = self.requester.una();
        if let Some(selective) = &self.selective {
            return selective.scoreboard.admits(una, psn, wanted);
        }
        let own = psn.distance(una).max(0) as u32 + wanted;
        // A waiting queue pair expects an answer, after which it continues.
        own == wanted
            || own <= self.window
                && (self.finds_room(shared, Direction::of(kind), wanted)
                    || own <= LEAST
                    || !self.awaits_answer())
    }

    /// Whether a packet at `psn` must request an answer: because it `asks` anyway, or because no further packet may be sent
    /// before it is acknowledged.
    #[inline]
    pub(crate) fn must_ask(&mut self, shared: &Shared, psn: Psn, asks: bool) -> bool {
        let una = self.requester.una();
        if let Some(selective) = &mut self.selective {
            return selective.scoreboard.must_ask(una, psn) || asks;
        }
        if asks || self.reaction.as_ref().is_some_and(|reaction| self.asks_often(reaction)) {
            return true;
        }
        // There must be room for this packet and the next.
        let own = psn.distance(una) as u32 + 1;
        own == self.window
            || own >= LEAST && !self.awaits_answer() && !self.finds_room(shared, Direction::There, 2)
    }

    /// Whether packets are sent so slowly that the ACK timer could expire before one of them requests an ACK.
    fn asks_often(&self, reaction: &Reaction) -> bool {
        self.requester.ack_timeout().is_some_and(|timeout| reaction.is_slow(ACK_REQ_INTERVAL, timeout))
    }

    /// A packet that occupies `count` PSNs was sent.
    #[inline(always)]
    pub(crate) fn note_departure(
        &mut self,
        shared: &mut Shared,
        kind: &Kind,
        psn: Psn,
        (count, asks): (u32, bool),
    ) {
        let direction = Direction::of(kind);
        let flight = &mut self.requester.flight;
        let before = flight.packets[direction as usize];
        flight.packets[direction as usize] = before + count;
        if asks {
            flight.asked = psn + count;
        }
        shared.destinations.add(self.destination.class(direction), before, count);
    }

    /// Everything before `una`, the new oldest unacknowledged PSN, has arrived. All of it was in one direction.
    #[inline]
    pub(crate) fn note_arrival(&mut self, shared: &mut Shared, direction: Direction, una: Psn) {
        if self.destination.is_unheard() {
            self.note_heard(shared);
        }
        let acknowledged = una.distance(self.requester.una()).max(0) as u32;
        let packets = &mut self.requester.flight.packets[direction as usize];
        let arrived = acknowledged.min(*packets);
        *packets -= arrived;
        if arrived > 0 {
            shared.destinations.remove(self.destination.class(direction), *packets, arrived);
        }
    }

    /// The peer responds: its packets in flight are counted in the regular class.
    #[cold]
    fn note_heard(&mut self, shared: &mut Shared) {
        let (unheard, heard) = (self.destination, self.destination.heard());
        self.destination = heard;
        for direction in Direction::BOTH {
            let packets = self.requester.flight.packets[direction as usize];
            if packets > 0 {
                shared.destinations.remove(unheard.class(direction), 0, packets);
                shared.destinations.add(heard.class(direction), 0, packets);
            }
        }
    }

    /// The ACK timer has expired: packets in flight are considered lost, and further ones are counted separately until the
    /// peer responds.
    pub(crate) fn note_silence(&mut self, shared: &mut Shared) {
        self.forget_in_flight(shared);
        self.destination = self.destination.unheard();
    }

    /// The last packet is retransmitted: it is in flight once.
    pub(crate) fn forget_newest(&mut self, shared: &mut Shared, direction: Direction) {
        let packets = &mut self.requester.flight.packets[direction as usize];
        if *packets > 0 {
            *packets -= 1;
            shared.destinations.remove(self.destination.class(direction), *packets, 1);
        }
    }

    /// Unacknowledged packets are considered lost, or are no longer relevant.
    pub(crate) fn forget_in_flight(&mut self, shared: &mut Shared) {
        let una = self.requester.una();
        let Flight { packets, .. } = std::mem::replace(&mut self.requester.flight, Flight::new(una));
        for direction in Direction::BOTH {
            let packets = packets[direction as usize];
            if packets > 0 {
                shared.destinations.remove(self.destination.class(direction), 0, packets);
            }
        }
    }

    /// From now on its packets in flight are counted for `gid`.
    pub(crate) fn join_destination(&mut self, shared: &mut Shared, gid: Gid) {
        if self.selective.is_none() {
            self.destination = shared.destinations.join(gid).unwrap_or(DestinationPlace::NONE);
        }
    }

    /// Reverses [`join_destination`](QueuePair::join_destination), while nothing is in flight and the address is unchanged.
    pub(crate) fn leave_destination(&mut self, shared: &mut Shared) {
        let left = std::mem::replace(&mut self.destination, DestinationPlace::NONE);
        if let Some(address) = self.address
            && left.heard() != DestinationPlace::NONE
        {
            shared.destinations.leave(address.gid);
        }
    }

    /// Whether the window of the destination has room for `wanted` more.
    #[inline]
    fn finds_room(&self, shared: &Shared, direction: Direction, wanted: u32) -> bool {
        let traffic = shared.destinations.traffic(self.destination.class(direction));
        traffic.admits(self.requester.flight.packets[direction as usize], wanted)
    }

    /// Packets in flight are considered lost: no answer is expected.
    pub(crate) fn await_no_answer(&mut self) {
        self.requester.flight.asked = self.requester.una();
    }

    /// Whether a packet in flight requests an answer.
    #[inline]
    pub(crate) fn awaits_answer(&self) -> bool {
        self.requester.flight.asked.distance(self.requester.una()) > 0
    }

    /// Whether so little is in flight to the destination that a late acknowledgement does no harm.
    pub(crate) fn is_quiet(&self, shared: &Shared) -> bool {
        let traffic = shared.destinations.traffic(self.destination.class(Direction::There));
        traffic.packets() < i64::from(traffic.window / 8)
    }

    /// How many packets before `psn` are in flight after the last that requests an answer.
    pub(crate) fn unasked(&self, psn: Psn) -> i32 {
        let (asked, una) = (self.requester.flight.asked, self.requester.una());
        psn.distance(if asked.distance(una) > 0 { asked } else { una })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{MAX_QPS, MAX_WINDOW};

    #[test]
    fn a_destination_lasts_as_long_as_its_last_queue_pair() {
        let mut destinations = Destinations::new(2, 512);
        let [a, b, c] = [1, 2, 3].map(|last| Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]));
        let first = destinations.join(b).expect("there is room");
        assert_eq!(destinations.join(b), Some(first));
        let second = destinations.join(a).expect("there is room");
        assert_eq!((first == second, destinations.join(c)), (false, None));
        let both = |destinations: &Destinations| {
            [first, second].map(|place| destinations.traffic(place.class(Direction::There)).packets())
        };
        destinations.add(first.class(Direction::There), 0, 7);
        destinations.add(second.class(Direction::There), 0, 1);
        destinations.remove(first.class(Direction::There), 4, 3);
        assert_eq!(both(&destinations), [4, 1]);
        destinations.remove(first.class(Direction::There), 0, 4);
        assert_eq!(both(&destinations), [0, 1]);
        destinations.leave(b);
        assert_eq!(destinations.join(c), None);
        destinations.leave(b);
        assert_eq!(destinations.join(c), Some(first));
    }

    /// The longest READs of all queue pairs.
    #[test]
    fn the_packets_in_flight_to_a_destination_can_be_counted() {
        const LONGEST: u32 = 1 << 23;
        let mut destinations = Destinations::new(1, MAX_WINDOW);
        let place = destinations.join(Gid([1; 16])).expect("there is room");
        for _ in 0..MAX_QPS {
            destinations.add(place.class(Direction::Back), 0, LONGEST);
        }
        let traffic = *destinations.traffic(place.class(Direction::Back));
        assert_eq!((traffic.packets(), traffic.senders), (i64::from(MAX_QPS) << 23, MAX_QPS));
        assert!(!traffic.admits(LONGEST - 1, LONGEST));
    }

    #[test]
    fn an_early_queue_pair_gives_up_more_than_its_share() {
        let traffic = |packets: i64, senders| Traffic { room: 256 - packets, senders, window: 512 };
        assert!(traffic(511, 1).admits(511, 1));
        assert!(!traffic(512, 1).admits(512, 1));
        assert!(!traffic(508, 2).admits(504, 1));
        assert!(traffic(508, 2).admits(4, 1));
        assert!(traffic(255, 2).admits(255, 1));
        // Half of it is for a new one, however many there are.
        assert!(traffic(255, 300).admits(0, 1));
        assert!(!traffic(256, 300).admits(4, 1));
    }
}
