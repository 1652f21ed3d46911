//! Setting up a ring between two contexts, and its end.
//!
//! A context with a frame for another context creates a ring, of which it is the producer. It offers the ring at the
//! name of the other's slot, together with its own mailbox. The other context answers with its bell and its mailbox,
//! and reads the ring from then on. Each end is notified when the other's mailbox is closed, and gives up the ring. So
//! each direction is created by the context that needs it, and a killed process leaves nothing behind.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::SocketType;
use tracing::{debug, info, warn};

use super::bell::{Rope, is_unix_socket};
use super::links::{Incoming, Links, Outgoing, SIZE};
use super::ring::{FrameConsumer, FrameProducer};
use super::route::{Neighbour, Route};
use crate::credentials::Credentials;
use crate::next_hop::octets;
use crate::slots::{self, Mail, SLOTS, Slot};

/// Kind of mail: accepts an offer.
const ACCEPT: u8 = b'K';
/// Kind of mail: a ring is no longer read.
const CLOSED: u8 = b'X';
/// Kind of mail: refuses an offer, because its receiver shares no memory.
const REFUSE: u8 = b'N';
/// How long frames wait for the answer to an offer, which the other program sends when it polls.
const ANSWER: Duration = Duration::from_millis(20);
/// How long an offer may be answered after that.
const ANSWERABLE: Duration = Duration::from_secs(1);
/// How soon a process that has refused is asked again. Another process may then have its slot.
const LATER: Duration = Duration::from_secs(10);
/// How soon a process that has not answered is asked again.
const AGAIN: Duration = Duration::from_millis(200);
/// The most rings that other contexts may offer to one context.
const RINGS_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Offer {
    to: Neighbour,
    pid: u32,
    ring: FrameProducer,
    /// The end of the time in which other frames wait for the answer, if they do.
    until: Instant,
    waits: bool,
    /// The answer repeats it, to distinguish late answers to earlier offers.
    number: u64,
}

/// A message about a ring: its sender, the number of its offer, and whether its frames shall have an ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    from: Neighbour,
    number: u64,
    icrc: bool,
}

impl Word {
    const BYTES: usize = 26;

    fn to_bytes(self) -> [u8; Word::BYTES] {
        let mut bytes = [0; Word::BYTES];
        bytes[..16].copy_from_slice(&octets(self.from.address));
        bytes[16] = self.from.slot as u8;
        bytes[17] = self.icrc.into();
        bytes[18..].copy_from_slice(&self.number.to_ne_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Word> {
        let bytes: &[u8; Word::BYTES] = bytes.try_into().ok()?;
        let address: [u8; 16] = *bytes.first_chunk()?;
        let (slot, number) = (usize::from(bytes[16]), u64::from_ne_bytes(*bytes.last_chunk()?));
        let from = Neighbour { address: IpAddr::from(address).to_canonical(), slot };
        // Every value except 0 means with an ICRC.
        (slot < SLOTS).then_some(Word { from, number, icrc: bytes[17] != 0 })
    }
}

impl Links {
    /// Whether frames wait for an answer. Offers without an answer no longer delay frames after a time, and are finally
    /// withdrawn.
    pub(super) fn is_waiting(&mut self) -> bool {
        let Links { offers, routes, .. } = self;
        let now = Instant::now();
        offers.retain_mut(|offer| {
            offer.waits &= now < offer.until;
            let is_answerable = now < offer.until + ANSWERABLE;
            if !is_answerable {
                routes.set(offer.to, Route::None(now + AGAIN));
            }
            is_answerable
        });
        self.offers.iter().any(|offer| offer.waits)
    }

    pub(super) fn longest_wait_for_answers(&self) -> Duration {
        if self.offers.iter().any(|offer| offer.waits) { ANSWER } else { Duration::MAX }
    }

    /// A message from this context, with the address `address`.
    fn word(&self, address: IpAddr, number: u64) -> [u8; Word::BYTES] {
        let from = Neighbour { address, ..self.own };
        Word { from, number, icrc: self.icrc }.to_bytes()
    }

    /// Offers a ring to a neighbour, if it is time. The frame that caused it is sent elsewhere, and the frames after it
    /// wait for the answer: so few are reordered, and none is lost for lack of room there.
    #[cold]
    pub(super) fn ask(&mut self, slot: &Slot, to: Neighbour, route: Route) {
        let is_time = match route {
            Route::Unknown => true,
            Route::None(again) => Instant::now() >= again,
            Route::Offered | Route::Ring(_) => false,
        };
        if !is_time {
            return;
        }
        // Frames wait only after the first offer to a process.
        let is_offered = match self.offer(slot, to, route == Route::Unknown) {
            Ok(is_offered) => is_offered,
            Err(error) => {
                debug!("no shared memory with slot {} of {}: {error}", to.slot, to.address);
                false
            }
        };
        self.routes.set(to, if is_offered { Route::Offered } else { Route::None(Instant::now() + AGAIN) });
    }

    /// Returns whether there is a process.
    fn offer(&mut self, slot: &Slot, to: Neighbour, waits: bool) -> io::Result<bool> {
        let name = (self.name_of.0)(to.address);
        let Some(connection) = slots::connect(&name, [to.slot])? else { return Ok(false) };
        let pid = Credentials::of_peer(&connection)?.pid;
        let (ring, file) =
            FrameProducer::create(SIZE).map_err(|error| io::Error::other(format!("{error:?}")))?;
        let with = [file.as_fd(), slot.mailbox()];
        self.numbers += 1;
        let number = self.numbers;
        slots::say(&connection, slots::OFFER, &self.word(self.own.address, number), &with)?;
        self.offers.push(Offer { to, pid, ring, until: Instant::now() + ANSWER, waits, number });
        Ok(true)
    }

    /// Handles mail about rings. `slot` is the slot that sends all messages; `to` is the address of this context to
    /// which the mail was sent.
    pub(crate) fn take_mail(&mut self, slot: &Slot, to: IpAddr, mail: Mail) {
        match mail.kind {
            slots::OFFER => self.on_offer(slot, to, mail),
            ACCEPT => self.on_accept(slot, mail),
            REFUSE => self.on_refusal(&mail),
            CLOSED => self.on_closed(slot, &mail),
            slots::GONE => {
                if let Some(number) = mail.bytes.first_chunk() {
                    self.on_gone(slot, u64::from_ne_bytes(*number));
                }
            }
            kind => debug!("mail of kind {kind:#x}"),
        }
    }

    fn on_offer(&mut self, slot: &Slot, to: IpAddr, mail: Mail) {
        let Some(Word { from, number, icrc }) = Word::from_bytes(&mail.bytes) else { return };
        if !self.is_local(from.address) || self.incoming.len() >= RINGS_MAX {
            return warn!("slot {} of {} offers a ring, and is not a neighbour", from.slot, from.address);
        }
        let Ok([memory, mailbox]) = <[OwnedFd; 2]>::try_from(mail.descriptors) else { return };
        if !is_unix_socket(&mailbox, SocketType::SEQPACKET) {
            return warn!("slot {} of {} sends a file that is not a mailbox", from.slot, from.address);
        }
        let ring = match FrameConsumer::open(&memory) {
            Ok(ring) => ring,
            Err(error) => {
                self.counts.corrupt += 1;
                return warn!(
                    "slot {} of {} offers a file that is not a ring: {error}",
                    from.slot, from.address
                );
            }
        };
        let with = [self.bell.rope(), slot.mailbox()];
        if let Err(error) = slots::say(&mailbox, ACCEPT, &self.word(to, number), &with) {
            return debug!("slot {} of {} receives no answer: {error}", from.slot, from.address);
        }
        // A new process with the slot of an old one, or a new ring of the same process.
        for old in self.incoming.extract_if(.., |old| (old.from, old.to) == (from, to)) {
            slot.unwatch(old.watch);
        }
        let watch = self.watch(slot, mailbox);
        self.incoming.push(Incoming::new((from, to), ring, (watch, number), icrc || self.icrc));
        self.has_fresh = true;
        // Answers are sent through memory too, and need no resolution.
        self.add_address(from.address);
    }

    fn on_accept(&mut self, slot: &Slot, mail: Mail) {
        let Some(Word { from, number, icrc }) = Word::from_bytes(&mail.bytes) else { return };
        let Ok([rope, mailbox]) = <[OwnedFd; 2]>::try_from(mail.descriptors) else { return };
        let is_it = |offer: &Offer| offer.to == from && offer.number == number;
        let Some(at) = self.offers.iter().position(is_it) else { return };
        let Offer { to, pid, ring, .. } = self.offers.remove(at);
        let rope = Rope::new(rope).filter(|_| is_unix_socket(&mailbox, SocketType::SEQPACKET));
        let Some(rope) = rope else {
            self.routes.set(to, Route::None(Instant::now() + AGAIN));
            return warn!(
                "slot {} of {} sends a file that is not a bell or not a mailbox",
                to.slot, to.address
            );
        };
        let watch = self.watch(slot, mailbox);
        let how = match (self.icrc, icrc) {
            (true, _) => "",
            (false, false) => ", without ICRC",
            (false, true) => ", with an ICRC, as it requires",
        };
        let icrc = icrc || self.icrc;
        let index = self.outgoing.iter().position(Option::is_none).unwrap_or(self.outgoing.len());
        if index == self.outgoing.len() {
            self.outgoing.push(None);
        }
        let outgoing = Outgoing::new((to, pid), ring, rope, (watch, number), icrc);
        info!("{} is reached by shared memory{how}", outgoing.who());
        self.outgoing[index] = Some(outgoing);
        self.routes.set(to, Route::Ring(index));
    }

    fn on_refusal(&mut self, mail: &Mail) {
        let Some(Word { from, number, .. }) = Word::from_bytes(&mail.bytes) else { return };
        let is_it = |offer: &mut Offer| offer.to == from && offer.number == number;
        if let Some(Offer { pid, waits, .. }) = self.offers.extract_if(.., is_it).next() {
            let Neighbour { address, slot } = from;
            // It is asked repeatedly, but logged once.
            if waits {
                info!(
                    "pid {pid} in slot {slot} of {address} does not use shared memory (shm=off): it is reached by UDP"
                );
            }
            self.routes.set(from, Route::None(Instant::now() + LATER));
        }
    }

    /// The consumer has found something invalid in a ring of this context.
    fn on_closed(&mut self, slot: &Slot, mail: &Mail) {
        let Some(Word { from, number, .. }) = Word::from_bytes(&mail.bytes) else { return };
        let is_it = |outgoing: &Outgoing| outgoing.to == from && outgoing.number == number;
        if let Some(index) = self.outgoing.iter().position(|outgoing| outgoing.as_ref().is_some_and(is_it)) {
            warn!("slot {} of {} has found invalid values in shared memory", from.slot, from.address);
            self.counts.corrupt += 1;
            self.close(slot, index);
            self.routes.set(from, Route::None(Instant::now() + AGAIN));
        }
    }

    /// Tells the producer of a ring that it is no longer read.
    pub(super) fn say_closed(&self, slot: &Slot, incoming: &Incoming) {
        if let Some(mailbox) = slot.unwatch(incoming.watch) {
            // If the message is lost, the producer finds its ring full.
            let _ = slots::say(&*mailbox, CLOSED, &self.word(incoming.to, incoming.number), &[]);
        }
    }

    fn watch(&mut self, slot: &Slot, mailbox: OwnedFd) -> u64 {
        self.watches += 1;
        let number = (slot.number() as u64) << 48 | self.watches;
        slot.watch(number, mailbox);
        number
    }

    fn on_gone(&mut self, slot: &Slot, watch: u64) {
        let is_it = |outgoing: &Option<Outgoing>| outgoing.as_ref().is_some_and(|out| out.watch == watch);
        if let Some(index) = self.outgoing.iter().position(is_it) {
            if let Some(outgoing) = &self.outgoing[index] {
                info!("{}, reached by shared memory, has ended", outgoing.who());
            }
            self.close(slot, index);
        }
        for incoming in self.incoming.iter_mut().filter(|incoming| incoming.watch == watch) {
            incoming.is_over = true;
        }
        self.has_over = true;
    }

    /// Removes a ring of this context.
    pub(super) fn close(&mut self, slot: &Slot, index: usize) {
        if let Some(closed) = self.outgoing[index].take() {
            slot.unwatch(closed.watch);
            self.routes.set(closed.to, Route::Unknown);
        }
        self.forget_full(index);
    }
}

/// Refuses the mail, if it is an offer, for a context `own` that shares no memory, because the sender waits for an
/// answer.
pub(crate) fn refuse(own: Neighbour, mail: Mail) {
    let (slots::OFFER, Some(word)) = (mail.kind, Word::from_bytes(&mail.bytes)) else { return };
    let Ok([_, mailbox]) = <[OwnedFd; 2]>::try_from(mail.descriptors) else { return };
    // If the message is lost, the sender waits as for a process that does not answer.
    let _ = slots::say(&mailbox, REFUSE, &Word { from: own, ..word }.to_bytes(), &[]);
}
