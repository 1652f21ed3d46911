//! The rings between one context and others of this host.
//!
//! A context that has a frame for another process makes a ring, of which it is the producer, and offers it at the name of the
//! other's slot, with its own mailbox beside it. The other answers with its bell and its mailbox, and looks into the ring from
//! then on. Either end is told when the other one's mailbox is closed, and lets go of the ring. So each direction is made by
//! who needs it, and a process that is killed leaves nothing.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use tracing::{debug, info, warn};

use super::ring::{FRAME_MAX, FrameConsumer, FrameProducer};
use crate::kept::Copies;
use crate::next_hop::octets;
use crate::slots::{self, Mail, SLOTS, Slot, owner};
use crate::{FrameSink, Nanos, Room, RxFrame, SpanMut};

/// Mail that answers an offer.
pub(crate) const ACCEPT: u8 = b'K';
/// How long frames wait for the answer to an offer, which the other's program gives when it polls.
const ANSWER: Duration = Duration::from_millis(20);
/// How long an offer may be answered after that.
const ANSWERABLE: Duration = Duration::from_secs(1);
/// How soon a process that has not answered is asked again.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a full ring holds up all others. A consumer that is so long away has its frames dropped.
const STALL: Duration = Duration::from_millis(100);
/// How soon a ring that is full is looked at again by who would sleep.
const RETRY: Duration = Duration::from_micros(100);
/// Frames of one ring in a burst.
const BURST: usize = 64;
/// Rings that others have made for one context.
const RINGS_MAX: usize = 1024;
/// Bytes of a ring.
const SIZE: usize = 1 << 19;

/// A context of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Neighbour {
    pub(crate) address: IpAddr,
    pub(crate) slot: usize,
}

/// All rings of a context.
#[derive(Debug)]
pub(crate) struct Links {
    own: Neighbour,
    /// What the processes at an address are called in names.
    name_of: NameOf,
    outgoing: Vec<Option<Outgoing>>,
    incoming: Vec<Incoming>,
    has_fresh: bool,
    /// Some rings may be over.
    has_over: bool,
    offers: Vec<Offer>,
    routes: Vec<(IpAddr, [Route; SLOTS])>,
    /// Which outgoing ring is full, and since when.
    full: Option<(usize, Nanos)>,
    watches: u64,
    /// Offers so far.
    numbers: u64,
    /// Addresses of this host: nobody else's are believed.
    local: Vec<IpAddr>,
    frame: Box<[u8; FRAME_MAX]>,
    copies: Copies,
    pub(crate) counts: Counts,
}

/// What the slots at an address are called in names.
struct NameOf(Box<dyn Fn(IpAddr) -> String + Send + Sync>);

impl fmt::Debug for NameOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NameOf")
    }
}

/// Frames that went by memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) tx_frames: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) tx_dropped: u64,
    pub(crate) rx_frames: u64,
    pub(crate) rx_bytes: u64,
    /// Rings that were closed because the other end wrote what can't be.
    pub(crate) corrupt: u64,
}

/// What is known of the way to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Unknown,
    /// It was asked.
    Offered,
    /// By this ring.
    Ring(usize),
    /// It has none, and is asked again then.
    None(Nanos),
}

#[derive(Debug)]
struct Offer {
    to: Neighbour,
    ring: FrameProducer,
    /// Until then other frames wait for the answer, if they do at all.
    until: Nanos,
    waits: bool,
    /// The answer repeats it: one that comes late is to another offer.
    number: u64,
}

#[derive(Debug)]
struct Outgoing {
    to: Neighbour,
    ring: FrameProducer,
    bell: OwnedFd,
    watch: u64,
    /// Something was published since the bell was looked at.
    is_used: bool,
    /// It has been full for so long that its frames are dropped.
    is_stalled: bool,
}

#[derive(Debug)]
struct Incoming {
    from: Neighbour,
    ring: FrameConsumer,
    watch: u64,
    /// What has come another way before is not taken yet.
    is_fresh: bool,
    /// The other end is gone: what it has sent is still taken.
    is_over: bool,
}

impl Links {
    pub(crate) fn new(own: Neighbour, name_of: impl Fn(IpAddr) -> String + Send + Sync + 'static) -> Links {
        Links {
            own,
            name_of: NameOf(Box::new(name_of)),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            has_fresh: false,
            has_over: false,
            offers: Vec::new(),
            routes: Vec::new(),
            full: None,
            watches: 0,
            numbers: 0,
            local: Vec::new(),
            frame: Box::new([0; FRAME_MAX]),
            copies: Copies::default(),
            counts: Counts::default(),
        }
    }

    /// Hands a burst of what has come to `sink`. Returns how many frames.
    pub(crate) fn receive(&mut self, sink: &mut dyn FrameSink) -> usize {
        let Links { incoming, frame, copies, counts, .. } = self;
        let mut frames = 0;
        let mut corrupt = false;
        for incoming in incoming.iter_mut().filter(|incoming| !incoming.is_fresh) {
            for _ in 0..BURST {
                match incoming.ring.take(frame) {
                    Ok(Some(len)) => {
                        incoming.ring.prefetch();
                        frames += 1;
                        counts.rx_bytes += len as u64;
                        sink.take(RxFrame::new(&frame[..len], copies));
                    }
                    Ok(None) => {
                        incoming.ring.tell();
                        break;
                    }
                    Err(_) => {
                        corrupt = true;
                        break;
                    }
                }
            }
        }
        if corrupt {
            self.close_corrupt();
        }
        if self.has_over {
            self.forget_empty();
        }
        self.counts.rx_frames += frames as u64;
        frames
    }

    /// Whether a ring is not read yet, because what was sent before may be coming another way.
    #[inline]
    pub(crate) fn has_fresh(&self) -> bool {
        self.has_fresh
    }

    /// All that has come another way is taken.
    pub(crate) fn caught_up(&mut self) {
        self.incoming.iter_mut().for_each(|incoming| incoming.is_fresh = false);
        self.has_fresh = false;
    }

    /// Rings whose other end is gone, and that have nothing more.
    #[cold]
    fn forget_empty(&mut self) {
        self.incoming.retain(|incoming| !incoming.is_over || incoming.ring.is_ready());
        self.has_over = self.incoming.iter().any(|incoming| incoming.is_over);
    }

    #[cold]
    fn close_corrupt(&mut self) {
        let Links { incoming, frame, counts, .. } = self;
        incoming.retain_mut(|incoming| {
            // Reading on from what can't be gives the same again.
            let is_right = incoming.ring.take(frame).is_ok();
            if !is_right {
                counts.corrupt += 1;
                warn!(
                    "what slot {} of {} has written in shared memory can't be: it is not read any more",
                    incoming.from.slot, incoming.from.address
                );
            }
            is_right
        });
    }

    /// Whether another frame may be asked for, whoever it is for.
    #[inline]
    pub(crate) fn has_room(&mut self, now: Nanos) -> bool {
        match self.full {
            None => self.offers.is_empty() || !self.is_waiting(),
            Some((index, since)) => self.has_room_again(index, since, now),
        }
    }

    /// Whether an answer is waited for.
    fn is_waiting(&self) -> bool {
        self.offers.iter().any(|offer| offer.waits)
    }

    /// Time goes on: offers that nobody answers are waited for no longer, and taken back in the end.
    #[inline]
    pub(crate) fn advance(&mut self, now: Nanos) {
        if self.offers.is_empty() {
            return;
        }
        let Links { offers, routes, .. } = self;
        offers.retain_mut(|offer| {
            offer.waits &= now < offer.until;
            let is_answerable = now < offer.until + ANSWERABLE;
            if !is_answerable {
                set_route(routes, offer.to, Route::None(now + AGAIN));
            }
            is_answerable
        });
    }

    /// How long a wait that begins now may be at most.
    pub(crate) fn longest_wait(&self) -> Duration {
        // Nobody tells that a ring has room again.
        if self.full.is_some() {
            RETRY
        } else if self.is_waiting() {
            ANSWER
        } else {
            Duration::MAX
        }
    }

    #[cold]
    fn has_room_again(&mut self, index: usize, since: Nanos, now: Nanos) -> bool {
        let has_room = match self.outgoing.get_mut(index) {
            Some(Some(outgoing)) => match outgoing.ring.has_room() {
                Ok(false) if now.since(since) < STALL => return false,
                Ok(has_room) => {
                    outgoing.is_stalled = !has_room;
                    true
                }
                Err(_) => {
                    self.close(index);
                    true
                }
            },
            _ => true,
        };
        self.full = None;
        has_room
    }

    /// The ring by which frames to a queue pair go, if there is one. Asks for it otherwise, if `slot` may.
    #[inline]
    fn route(&self, destination: &[u8], qpn: u32) -> Option<(usize, usize, Route)> {
        let address = address_of(destination)?;
        let index = self.routes.iter().position(|(known, _)| *known == address)?;
        let slot = owner::slot_of(qpn);
        Some((index, slot, self.routes[index].1[slot]))
    }

    /// An address of this host.
    pub(crate) fn add_local(&mut self, address: IpAddr) {
        self.local.push(address);
    }

    pub(crate) fn is_local(&self, address: IpAddr) -> bool {
        self.local.contains(&address) || address.is_ipv4() && address.is_loopback()
    }

    /// An address of this host: its contexts may be reached by memory.
    pub(crate) fn add_address(&mut self, address: IpAddr) {
        if !self.routes.iter().any(|(known, _)| *known == address) {
            self.routes.push((address, [Route::Unknown; SLOTS]));
        }
    }

    /// Whether frames may go by memory at all.
    pub(crate) fn is_used(&self) -> bool {
        !self.routes.is_empty()
    }

    /// A place for payloads, for the frame that is written next.
    pub(crate) fn room(&mut self) -> Choice<'_> {
        Choice { links: self, chosen: None }
    }

    /// Sends a frame that was written with [`room`](Links::room): in its place, or by the ring to whom its head names. Returns
    /// whether it is taken; not if no ring leads there.
    #[inline]
    pub(crate) fn send(
        &mut self,
        (slot, now): (&Slot, Nanos),
        head: &[u8],
        tail: &[u8],
        chosen: Option<(usize, usize)>,
    ) -> bool {
        let (index, payload) = match chosen {
            Some(chosen) => chosen,
            None => {
                let Some((destination, qpn)) = destination_of(head) else { return false };
                match self.route(destination, qpn) {
                    _ if qpn == owner::QP1 => return false,
                    Some((_, _, Route::Ring(index))) => (index, 0),
                    Some((at, number, route)) => {
                        self.ask((slot, now), (at, number), route);
                        return false;
                    }
                    None => return false,
                }
            }
        };
        let Some(Some(outgoing)) = self.outgoing.get_mut(index) else { return false };
        if outgoing.is_stalled {
            match outgoing.ring.has_room() {
                Ok(true) => outgoing.is_stalled = false,
                Ok(false) => {
                    self.counts.tx_dropped += 1;
                    return true;
                }
                Err(_) => {
                    self.counts.corrupt += 1;
                    self.close(index);
                    return true;
                }
            }
        }
        outgoing.ring.publish(head, payload, tail);
        outgoing.is_used = true;
        self.counts.tx_frames += 1;
        self.counts.tx_bytes += (head.len() + payload + tail.len()) as u64;
        if !matches!(outgoing.ring.has_room(), Ok(true)) {
            self.full = Some((index, now));
        }
        true
    }

    /// Ends a burst: those who have frames now see them all, and those of them that sleep are woken.
    #[inline]
    pub(crate) fn end_burst(&mut self) {
        for outgoing in self.outgoing.iter_mut().flatten().filter(|outgoing| outgoing.is_used) {
            outgoing.is_used = false;
            outgoing.ring.flush();
            if outgoing.ring.wakes() {
                // A bell whose process is gone rings nobody.
                let _ = rustix::io::write(&outgoing.bell, &1u64.to_ne_bytes());
            }
        }
    }

    /// The context is going to sleep. Returns whether it may.
    pub(crate) fn rest(&self) -> bool {
        // All of them, so that each wakes it.
        let ready = self.incoming.iter().filter(|incoming| !incoming.ring.rest()).count();
        ready == 0
    }

    pub(crate) fn rise(&self) {
        self.incoming.iter().for_each(|incoming| incoming.ring.rise());
    }

    /// Asks a neighbour for a ring, if it is time to. The frame that it is asked for goes another way, and those behind it
    /// wait for the answer: few come out of order so, and none is lost for want of room there.
    #[cold]
    fn ask(&mut self, (slot, now): (&Slot, Nanos), (at, number): (usize, usize), route: Route) {
        let to = Neighbour { address: self.routes[at].0, slot: number };
        let is_time = match route {
            Route::Unknown => true,
            Route::None(again) => now >= again,
            Route::Offered | Route::Ring(_) => false,
        };
        if !is_time {
            return;
        }
        // Who has not answered once is not waited for again.
        let is_offered = match self.offer(slot, to, now, route == Route::Unknown) {
            Ok(is_offered) => is_offered,
            Err(error) => {
                debug!("no shared memory with slot {} of {}: {error}", to.slot, to.address);
                false
            }
        };
        self.routes[at].1[number] = if is_offered { Route::Offered } else { Route::None(now + AGAIN) };
    }

    /// Returns whether there is anybody.
    fn offer(&mut self, slot: &Slot, to: Neighbour, now: Nanos, waits: bool) -> io::Result<bool> {
        let name = (self.name_of.0)(to.address);
        let Some(connection) = slots::connect(&name, to.slot)? else { return Ok(false) };
        let ring = FrameProducer::create(SIZE).map_err(|error| io::Error::other(format!("{error:?}")))?;
        let with = [ring.file(), slot.mailbox()];
        self.numbers += 1;
        let number = self.numbers;
        slots::say(&connection, slots::OFFER, &self.own.to_bytes(number), &with)?;
        self.offers.push(Offer { to, ring, until: now + ANSWER, waits, number });
        Ok(true)
    }

    /// Takes mail that is about rings. `bell` is what wakes this context.
    pub(crate) fn take_mail(&mut self, slot: &Slot, bell: BorrowedFd<'_>, mail: Mail) {
        match mail.kind {
            slots::OFFER => self.on_offer(slot, bell, mail),
            ACCEPT => self.on_accept(slot, mail),
            slots::GONE => {
                if let Some(number) = mail.bytes.first_chunk() {
                    self.on_gone(u64::from_ne_bytes(*number));
                }
            }
            kind => debug!("mail of kind {kind:#x}"),
        }
    }

    fn on_offer(&mut self, slot: &Slot, bell: BorrowedFd<'_>, mail: Mail) {
        let Some((from, number)) = Neighbour::from_bytes(&mail.bytes) else { return };
        if !self.is_local(from.address) || self.incoming.len() >= RINGS_MAX {
            return warn!("slot {} of {} offers a ring, and is no neighbour", from.slot, from.address);
        }
        let Ok([memory, mailbox]) = <[OwnedFd; 2]>::try_from(mail.descriptors) else { return };
        let ring = match FrameConsumer::open(memory) {
            Ok(ring) => ring,
            Err(error) => {
                self.counts.corrupt += 1;
                return warn!("slot {} of {} offers what is no ring: {error}", from.slot, from.address);
            }
        };
        let answered = slots::say(&mailbox, ACCEPT, &self.own.to_bytes(number), &[bell, slot.mailbox()]);
        if let Err(error) = answered {
            return debug!("slot {} of {} hears no answer: {error}", from.slot, from.address);
        }
        // A new process in an old one's place.
        self.incoming.retain(|incoming| incoming.from != from);
        let watch = self.watch(slot, mailbox);
        self.incoming.push(Incoming { from, ring, watch, is_fresh: true, is_over: false });
        self.has_fresh = true;
        // Whoever reaches this context so is reached so: answers to packets go where those came from, and are not resolved.
        self.add_address(from.address);
    }

    fn on_accept(&mut self, slot: &Slot, mail: Mail) {
        let Some((from, number)) = Neighbour::from_bytes(&mail.bytes) else { return };
        let Ok([bell, mailbox]) = <[OwnedFd; 2]>::try_from(mail.descriptors) else { return };
        let is_it = |offer: &Offer| offer.to == from && offer.number == number;
        let Some(at) = self.offers.iter().position(is_it) else { return };
        let Offer { to, ring, .. } = self.offers.remove(at);
        let watch = self.watch(slot, mailbox);
        let index = self.outgoing.iter().position(Option::is_none).unwrap_or(self.outgoing.len());
        let new = Outgoing { to, ring, bell, watch, is_used: false, is_stalled: false };
        if index == self.outgoing.len() {
            self.outgoing.push(None);
        }
        self.outgoing[index] = Some(new);
        set_route(&mut self.routes, to, Route::Ring(index));
        info!("slot {} of {} is reached by shared memory", to.slot, to.address);
    }

    fn watch(&mut self, slot: &Slot, mailbox: OwnedFd) -> u64 {
        self.watches += 1;
        let number = (slot.number() as u64) << 48 | self.watches;
        slot.watch(number, mailbox);
        number
    }

    fn on_gone(&mut self, watch: u64) {
        let is_it = |outgoing: &Option<Outgoing>| outgoing.as_ref().is_some_and(|out| out.watch == watch);
        if let Some(index) = self.outgoing.iter().position(is_it) {
            self.close(index);
        }
        for incoming in self.incoming.iter_mut().filter(|incoming| incoming.watch == watch) {
            incoming.is_over = true;
        }
        self.has_over = true;
    }

    fn close(&mut self, index: usize) {
        if let Some(closed) = self.outgoing[index].take() {
            set_route(&mut self.routes, closed.to, Route::Unknown);
            info!(
                "slot {} of {} is not reached by shared memory any more",
                closed.to.slot, closed.to.address
            );
        }
        self.full = self.full.filter(|(full, _)| *full != index);
    }
}

/// Where the payload of one frame goes.
pub(crate) struct Choice<'a> {
    links: &'a mut Links,
    /// The ring, and how long the payload is.
    pub(crate) chosen: Option<(usize, usize)>,
}

impl Room for Choice<'_> {
    #[inline]
    fn place(&mut self, destination: &[u8], qpn: u32, payload: usize) -> Option<SpanMut<'_>> {
        let (_, _, Route::Ring(index)) = self.links.route(destination, qpn)? else { return None };
        let outgoing = self.links.outgoing.get_mut(index)?.as_mut()?;
        if outgoing.is_stalled {
            return None;
        }
        let to = outgoing.ring.place(payload)?;
        self.chosen = Some((index, payload));
        Some(to)
    }
}

fn set_route(routes: &mut [(IpAddr, [Route; SLOTS])], to: Neighbour, route: Route) {
    if let Some((_, slots)) = routes.iter_mut().find(|(address, _)| *address == to.address) {
        slots[to.slot] = route;
    }
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => bytes.first_chunk::<4>().map(|bytes| Ipv4Addr::from(*bytes).into()),
        _ => bytes.first_chunk::<16>().map(|bytes| Ipv6Addr::from(*bytes).into()),
    }
}

/// The destination in the head of an IP packet, and its queue pair.
fn destination_of(head: &[u8]) -> Option<(&[u8], u32)> {
    let (address, bth) = match head.first()? >> 4 {
        4 => (head.get(16..20)?, 28),
        _ => (head.get(24..40)?, 48),
    };
    Some((address, owner::qpn_of(head.get(bth..)?)?))
}

impl Neighbour {
    const BYTES: usize = 25;

    /// Who makes an offer or answers it, and the offer's number.
    fn to_bytes(self, number: u64) -> [u8; Neighbour::BYTES] {
        let mut bytes = [0; Neighbour::BYTES];
        bytes[..16].copy_from_slice(&octets(self.address));
        bytes[16] = self.slot as u8;
        bytes[17..].copy_from_slice(&number.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<(Neighbour, u64)> {
        let bytes: &[u8; Neighbour::BYTES] = bytes.try_into().ok()?;
        let address: [u8; 16] = *bytes.first_chunk()?;
        let (slot, number) = (usize::from(bytes[16]), u64::from_ne_bytes(*bytes.last_chunk()?));
        (slot < SLOTS).then_some((Neighbour { address: IpAddr::from(address).to_canonical(), slot }, number))
    }
}
