//! All rings between one context and others of this host.
//!
//! Each direction between two contexts has its own ring, created by its producer: [`meeting`](super::meeting).

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use tracing::warn;

use super::bell::{Bell, Rope};
use super::meeting::Offer;
use super::ring::{FRAME_MAX, FrameConsumer, FrameProducer};
use super::route::{Ends, Neighbour, Route, Routes, behind_ethernet, destination_of, ends, is_local};
use crate::kept::Copies;
use crate::slots::{Slot, owner};
use crate::{FrameSink, FrameSource, Icrc, Placed, Room, RxFrame, TAIL_MAX};

/// How long a full ring may block all others, for each time that its consumer empties it. Frames to a slower consumer,
/// or to one that does not read, are dropped.
const PATIENCE: Duration = Duration::from_millis(100);
/// This long after a ring was offered, all earlier packets have arrived, including those through sockets and threads
/// that must be woken.
const SETTLED: Duration = Duration::from_millis(1);
/// How soon a full ring is checked again before sleeping.
const RETRY: Duration = Duration::from_micros(100);
/// The most frames received from one ring in a burst, and sent through all rings in a burst.
const BURST: usize = 64;
/// A receiving burst ends after this many frames from all rings.
const ALL_BURST: usize = 256;
/// Bytes of a ring.
pub(super) const SIZE: usize = 1 << 19;

/// All rings of a context.
#[derive(Debug)]
pub(crate) struct Links {
    pub(super) own: Neighbour,
    /// The context's addresses.
    owns: Vec<IpAddr>,
    /// Whether frames shall have an ICRC.
    pub(super) icrc: bool,
    /// Whether frames to send begin with an Ethernet header, which is not written to the rings.
    is_ethernet: bool,
    /// The base of the names of an address's slots.
    pub(super) name_of: NameOf,
    pub(super) outgoing: Vec<Option<Outgoing>>,
    pub(super) incoming: Vec<Incoming>,
    /// The incoming ring with which the next burst begins.
    turn: usize,
    pub(super) has_fresh: bool,
    /// Whether some rings may have ended.
    pub(super) has_over: bool,
    pub(super) offers: Vec<Offer>,
    pub(super) routes: Routes,
    /// The outgoing ring that is full, and since when.
    full: Option<(usize, Instant)>,
    pub(super) watches: u64,
    /// The number of offers so far.
    pub(super) numbers: u64,
    /// Addresses of this host. Packets from others are refused.
    local: Vec<IpAddr>,
    pub(super) bell: Bell,
    /// The received frame, and the part of a frame to send that is not in its ring.
    frame: Box<[u8; FRAME_MAX]>,
    head: Box<[u8; FRAME_MAX]>,
    copies: Copies,
    pub(crate) counts: Counts,
}

/// The base of the names of an address's slots.
pub(super) struct NameOf(pub(super) Box<dyn Fn(IpAddr) -> String + Send + Sync>);

impl fmt::Debug for NameOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NameOf")
    }
}

/// Frames through memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) tx_frames: u64,
    pub(crate) tx_bytes: u64,
    pub(crate) tx_dropped: u64,
    pub(crate) rx_frames: u64,
    pub(crate) rx_bytes: u64,
    /// Sent and received frames.
    pub(crate) without_icrc: u64,
    /// Frames in a ring that are not from its producer's host to this context.
    pub(crate) rx_dropped: u64,
    /// Rings that were closed because the other end wrote something invalid.
    pub(crate) corrupt: u64,
}

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) to: Neighbour,
    /// The neighbour's process; 0 if this process's PID namespace does not contain it.
    pid: u32,
    pub(super) ring: FrameProducer,
    pub(super) rope: Rope,
    pub(super) watch: u64,
    /// The number of the ring's offer.
    pub(super) number: u64,
    /// Whether frames have an ICRC.
    pub(super) icrc: bool,
    /// Whether frames were published since the last check for a sleeping consumer.
    is_used: bool,
    /// Whether it was full for so long that its frames are dropped.
    is_stalled: bool,
    /// How long it may still block others, unless its consumer releases space; and the consumer's position when this
    /// was set.
    patience: Duration,
    consumed: u64,
}

impl Outgoing {
    pub(super) fn new(
        (to, pid): (Neighbour, u32),
        ring: FrameProducer,
        rope: Rope,
        (watch, number): (u64, u64),
        icrc: bool,
    ) -> Outgoing {
        let (is_used, is_stalled, patience) = (false, false, PATIENCE);
        Outgoing { to, pid, ring, rope, watch, number, icrc, is_used, is_stalled, patience, consumed: 0 }
    }

    /// The other end, for log messages.
    pub(super) fn who(&self) -> String {
        format!("pid {} in slot {} of {}", self.pid, self.to.slot, self.to.address)
    }

    /// Increases the patience by what the consumer has released since.
    fn regain_patience(&mut self) {
        let taken = self.ring.consumed() - std::mem::replace(&mut self.consumed, self.ring.consumed());
        let regained = PATIENCE.mul_f64(taken.min(SIZE as u64) as f64 / SIZE as f64);
        self.patience = PATIENCE.min(self.patience + regained);
    }
}

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) from: Neighbour,
    /// The address of this context that the ring is for.
    pub(super) to: IpAddr,
    pub(super) ring: FrameConsumer,
    pub(super) watch: u64,
    /// The number of the ring's offer.
    pub(super) number: u64,
    /// Whether frames have an ICRC.
    pub(super) icrc: bool,
    /// Whether older packets from elsewhere may be pending, so that the ring is not read yet.
    pub(super) is_fresh: bool,
    /// When it was offered.
    since: Instant,
    /// Whether the other end has ended. Its remaining frames are still received.
    pub(super) is_over: bool,
    /// Whether it contains something invalid.
    is_corrupt: bool,
    /// Source and destination of the last valid frame.
    ends: ArrayVec<u8, 32>,
}

impl Incoming {
    pub(super) fn new(
        (from, to): (Neighbour, IpAddr),
        ring: FrameConsumer,
        (watch, number): (u64, u64),
        icrc: bool,
    ) -> Incoming {
        let (is_fresh, since, is_over, is_corrupt) = (true, Instant::now(), false, false);
        Incoming {
            from,
            to,
            ring,
            watch,
            number,
            icrc,
            is_fresh,
            since,
            is_over,
            is_corrupt,
            ends: ArrayVec::new(),
        }
    }
}

impl Links {
    /// Makes the rings of the context `own`. `name_of` returns the base of the names of other contexts at an address.
    /// With `icrc` off, frames to and from neighbours that also turned it off have no ICRC.
    pub(crate) fn new(
        own: Neighbour,
        icrc: bool,
        name_of: impl Fn(IpAddr) -> String + Send + Sync + 'static,
    ) -> io::Result<Links> {
        Ok(Links {
            own,
            owns: vec![own.address],
            icrc,
            is_ethernet: false,
            name_of: NameOf(Box::new(name_of)),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            turn: 0,
            has_fresh: false,
            has_over: false,
            offers: Vec::new(),
            routes: Routes::default(),
            full: None,
            watches: 0,
            numbers: 0,
            local: vec![own.address],
            bell: Bell::new()?,
            frame: Box::new([0; FRAME_MAX]),
            head: Box::new([0; FRAME_MAX]),
            copies: Copies::default(),
            counts: Counts::default(),
        })
    }

    /// Passes a burst of received frames to `sink`. Returns their number.
    pub(crate) fn receive(&mut self, slot: &Slot, sink: &mut dyn FrameSink) -> usize {
        let Links { incoming, turn, frame, copies, counts, owns, local, routes, .. } = self;
        let (mut frames, mut corrupt) = (0, false);
        let first = if *turn < incoming.len() { *turn } else { 0 };
        *turn = first;
        for at in (first..incoming.len()).chain(0..first) {
            let incoming = &mut incoming[at];
            if incoming.is_fresh {
                continue;
            }
            for _ in 0..BURST {
                match incoming.ring.take(frame) {
                    Ok(Some(len)) => {
                        incoming.ring.prefetch();
                        let frame = &frame[..len];
                        match ends(frame, &mut incoming.ends, owns, local) {
                            Ends::Known => {}
                            // Answers to it use its ring, and need no resolution.
                            Ends::New(source) => routes.add(source),
                            Ends::Wrong => {
                                counts.rx_dropped += 1;
                                continue;
                            }
                        }
                        frames += 1;
                        counts.rx_bytes += len as u64;
                        counts.without_icrc += u64::from(!incoming.icrc);
                        let icrc = if incoming.icrc { Icrc::Right } else { Icrc::LeftOut };
                        sink.take(RxFrame::new(frame, copies).with_icrc(icrc));
                    }
                    Ok(None) => {
                        incoming.ring.tell();
                        break;
                    }
                    Err(_) => {
                        incoming.is_corrupt = true;
                        corrupt = true;
                        break;
                    }
                }
            }
            if frames >= ALL_BURST {
                // The remaining rings have their turn in the next burst.
                *turn = at + 1;
                break;
            }
        }
        if corrupt {
            self.close_corrupt(slot);
        }
        if self.has_over {
            self.forget_empty();
        }
        self.counts.rx_frames += frames as u64;
        frames
    }

    /// Whether a ring is not read yet, because older packets may be pending elsewhere.
    #[inline]
    pub(crate) fn has_fresh(&self) -> bool {
        self.has_fresh
    }

    /// All older packets have been received, except those that a thread has yet to deliver.
    pub(crate) fn caught_up(&mut self) {
        let is_fresh = |incoming: &Incoming| incoming.is_fresh && incoming.since.elapsed() < SETTLED;
        self.incoming.iter_mut().for_each(|incoming| incoming.is_fresh = is_fresh(incoming));
        self.has_fresh = self.incoming.iter().any(|incoming| incoming.is_fresh);
    }

    /// Removes empty rings whose other end has ended.
    #[cold]
    fn forget_empty(&mut self) {
        self.incoming.retain(|incoming| !incoming.is_over || incoming.ring.is_ready());
        self.has_over = self.incoming.iter().any(|incoming| incoming.is_over);
    }

    #[cold]
    fn close_corrupt(&mut self, slot: &Slot) {
        let Links { incoming, counts, .. } = self;
        let corrupt: Vec<Incoming> = incoming.extract_if(.., |incoming| incoming.is_corrupt).collect();
        counts.corrupt += corrupt.len() as u64;
        for incoming in corrupt {
            let Neighbour { address, slot: number } = incoming.from;
            warn!(
                "slot {number} of {address} has written invalid values into shared memory: its ring is not read any \
                 more"
            );
            self.say_closed(slot, &incoming);
        }
    }

    /// Whether another frame may be taken, regardless of its destination.
    #[inline]
    fn has_room(&mut self, slot: &Slot) -> bool {
        match self.full {
            None => self.offers.is_empty() || !self.is_waiting(),
            Some((index, since)) => self.has_room_again(slot, index, since),
        }
    }

    #[cold]
    fn has_room_again(&mut self, slot: &Slot, index: usize, since: Instant) -> bool {
        if let Some(Some(outgoing)) = self.outgoing.get_mut(index) {
            let held = since.elapsed();
            match outgoing.ring.has_room() {
                Ok(false) if held < outgoing.patience => return false,
                Ok(has_room) => {
                    outgoing.patience = outgoing.patience.saturating_sub(held);
                    outgoing.is_stalled = !has_room;
                }
                Err(_) => self.close_corrupt_outgoing(slot, index),
            }
        }
        self.full = None;
        true
    }

    /// The longest wait from now on.
    pub(crate) fn longest_wait(&self) -> Duration {
        // There is no notification when a ring has room again.
        if self.full.is_some() { RETRY } else { self.longest_wait_for_answers() }
    }

    /// Adds another address of the context.
    #[cfg(feature = "af_xdp")]
    pub(crate) fn add_own(&mut self, address: IpAddr) {
        self.owns.push(address);
        self.local.push(address);
    }

    /// The context's frames begin with an Ethernet header.
    #[cfg(feature = "af_xdp")]
    pub(crate) fn of_ethernet(self) -> Links {
        Links { is_ethernet: true, ..self }
    }

    /// Adds an address of this host.
    pub(crate) fn add_local(&mut self, address: IpAddr) {
        self.local.push(address);
    }

    pub(crate) fn is_local(&self, address: IpAddr) -> bool {
        is_local(address, &self.local)
    }

    /// Adds an address of this host whose contexts may be reached through memory.
    pub(crate) fn add_address(&mut self, address: IpAddr) {
        self.routes.add(address);
    }

    /// Whether any frames may be sent through memory.
    pub(crate) fn is_used(&self) -> bool {
        !self.routes.is_empty()
    }

    /// Sends frames of `source` through memory, until `sent` is a full burst or no more may be sent now. Ends with the
    /// first frame without a ring, and returns it.
    #[inline]
    pub(crate) fn send(
        &mut self,
        slot: &Slot,
        source: &mut dyn FrameSource,
        sent: &mut usize,
    ) -> Option<&[u8]> {
        let mut tail = [0; TAIL_MAX];
        while *sent < BURST && self.has_room(slot) {
            let Links { routes, outgoing, head, .. } = self;
            let mut room = Choice { routes, outgoing, chosen: None };
            let written = source.place(&mut head[..], &mut tail, &mut room)?;
            let chosen = room.chosen;
            if !self.publish(slot, written.head, &tail[..written.tail], chosen) {
                return self.head.get(..written.head);
            }
            *sent += 1;
        }
        None
    }

    /// Sends the frame that was written, in its place or through the ring for its destination. Returns whether it was
    /// taken; not if there is no ring.
    #[inline]
    fn publish(&mut self, slot: &Slot, head: usize, tail: &[u8], chosen: Option<(usize, usize)>) -> bool {
        let Some(head) = self.head.get(..head) else { return false };
        let head = if self.is_ethernet { behind_ethernet(head) } else { head };
        let (index, payload) = match chosen {
            Some(chosen) => chosen,
            None => {
                let Some((destination, party)) = destination_of(head) else { return false };
                match self.routes.find(destination, party) {
                    Some((_, Route::Ring(index))) => (index, 0),
                    Some((to, route)) => {
                        // A context that refuses its own request needs no ring to itself.
                        let is_mad = owner::datagram_of(head).and_then(owner::qpn_of) == Some(owner::QP1);
                        if !(is_mad && to == self.own) {
                            self.ask(slot, to, route);
                        }
                        return false;
                    }
                    None => return false,
                }
            }
        };
        let Some(Some(outgoing)) = self.outgoing.get_mut(index) else { return false };
        let length = head.len() + payload + tail.len();
        if outgoing.is_stalled || length > FRAME_MAX {
            match outgoing.ring.is_half_empty() {
                Ok(true) if length <= FRAME_MAX => outgoing.is_stalled = false,
                Ok(_) => {
                    self.counts.tx_dropped += 1;
                    return true;
                }
                Err(_) => {
                    self.close_corrupt_outgoing(slot, index);
                    return true;
                }
            }
        }
        outgoing.ring.publish(head, payload, tail);
        outgoing.is_used = true;
        self.counts.tx_frames += 1;
        self.counts.tx_bytes += length as u64;
        self.counts.without_icrc += u64::from(!outgoing.icrc);
        if !matches!(outgoing.ring.has_room(), Ok(true)) {
            outgoing.regain_patience();
            self.full = Some((index, Instant::now()));
        }
        true
    }

    /// Ends a burst: publishes all frames to their receivers, and wakes those that sleep.
    #[inline]
    pub(crate) fn end_burst(&mut self) {
        for outgoing in self.outgoing.iter_mut().flatten().filter(|outgoing| outgoing.is_used) {
            outgoing.is_used = false;
            outgoing.ring.flush();
            if outgoing.ring.wakes() {
                outgoing.rope.ring();
            }
        }
    }

    /// The descriptor that is readable when frames have arrived while the context [rests](Links::rest).
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The context is about to sleep. Returns whether it may.
    pub(crate) fn rest(&self) -> bool {
        // All rings are marked, so that each wakes the context.
        let ready = self.incoming.iter().filter(|incoming| !incoming.ring.rest()).count();
        ready == 0
    }

    pub(crate) fn rise(&self) {
        self.incoming.iter().for_each(|incoming| incoming.ring.rise());
        self.bell.clear();
    }

    #[cold]
    fn close_corrupt_outgoing(&mut self, slot: &Slot, index: usize) {
        if let Some(outgoing) = &self.outgoing[index] {
            warn!(
                "{} has written invalid values into shared memory: no more frames are sent through it",
                outgoing.who()
            );
        }
        self.counts.corrupt += 1;
        self.close(slot, index);
    }

    /// Forgets that the ring was full, because it was removed.
    pub(super) fn forget_full(&mut self, index: usize) {
        self.full = self.full.filter(|(full, _)| *full != index);
    }
}

/// The ring for the payload of one frame.
struct Choice<'a> {
    routes: &'a Routes,
    outgoing: &'a mut [Option<Outgoing>],
    /// The ring, and the length of the payload.
    chosen: Option<(usize, usize)>,
}

impl Room for Choice<'_> {
    #[inline]
    fn place(&mut self, destination: &[u8], qpn: u32, payload: usize) -> Option<Placed<'_>> {
        let (_, Route::Ring(index)) = self.routes.find(destination, owner::slot_of(qpn))? else {
            return None;
        };
        let outgoing = self.outgoing.get_mut(index)?.as_mut()?;
        if outgoing.is_stalled {
            return None;
        }
        let icrc = outgoing.icrc;
        let to = outgoing.ring.place(payload)?;
        self.chosen = Some((index, payload));
        Some(Placed { to, icrc })
    }
}
