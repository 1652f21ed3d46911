//! All rings between one context and others of this host.
//!
//! Each direction between two contexts has a ring of its own, which its producer makes: [`meeting`](super::meeting).

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

/// How long a full ring holds up all others, for each time that its consumer takes all of it. One that is slower, or away, has
/// its frames dropped.
const PATIENCE: Duration = Duration::from_millis(100);
/// So long after a ring is offered, what was sent before it has come: by sockets and threads, which have to be woken.
const SETTLED: Duration = Duration::from_millis(1);
/// How soon a ring that is full is looked at again by who would sleep.
const RETRY: Duration = Duration::from_micros(100);
/// Frames of one ring in a burst, and of all rings that are sent.
const BURST: usize = 64;
/// So many frames of all rings end a burst that receives.
const ALL_BURST: usize = 256;
/// Bytes of a ring.
pub(super) const SIZE: usize = 1 << 19;

/// All rings of a context.
#[derive(Debug)]
pub(crate) struct Links {
    pub(super) own: Neighbour,
    /// Its addresses.
    owns: Vec<IpAddr>,
    /// Frames are to have an ICRC.
    pub(super) icrc: bool,
    /// Those that are sent begin with an Ethernet header, which stays out of the rings.
    is_ethernet: bool,
    /// What the processes at an address are called in names.
    pub(super) name_of: NameOf,
    pub(super) outgoing: Vec<Option<Outgoing>>,
    pub(super) incoming: Vec<Incoming>,
    /// Which of them the next burst begins with.
    turn: usize,
    pub(super) has_fresh: bool,
    /// Some rings may be over.
    pub(super) has_over: bool,
    pub(super) offers: Vec<Offer>,
    pub(super) routes: Routes,
    /// Which outgoing ring is full, and since when.
    full: Option<(usize, Instant)>,
    pub(super) watches: u64,
    /// Offers so far.
    pub(super) numbers: u64,
    /// Addresses of this host: nobody else's are believed.
    local: Vec<IpAddr>,
    pub(super) bell: Bell,
    /// The frame that is received, and the one that is sent, as far as it is not in its ring.
    frame: Box<[u8; FRAME_MAX]>,
    head: Box<[u8; FRAME_MAX]>,
    copies: Copies,
    pub(crate) counts: Counts,
}

/// What the slots at an address are called in names.
pub(super) struct NameOf(pub(super) Box<dyn Fn(IpAddr) -> String + Send + Sync>);

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
    /// Frames of both kinds.
    pub(crate) without_icrc: u64,
    /// Frames in a ring that are not from its producer's host to this context.
    pub(crate) rx_dropped: u64,
    /// Rings that were closed because the other end wrote what can't be.
    pub(crate) corrupt: u64,
}

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) to: Neighbour,
    /// The neighbour's process; 0 where it is in no PID namespace of ours.
    pid: u32,
    pub(super) ring: FrameProducer,
    pub(super) rope: Rope,
    pub(super) watch: u64,
    /// Of the offer by which it came about.
    pub(super) number: u64,
    /// Frames have an ICRC.
    pub(super) icrc: bool,
    /// Something was published since the bell was looked at.
    is_used: bool,
    /// It was full for so long that its frames are dropped.
    is_stalled: bool,
    /// How long it may hold up others until its consumer takes more, and what that had taken when this was set.
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

    /// Who is at the other end, for people.
    pub(super) fn who(&self) -> String {
        format!("pid {} in slot {} of {}", self.pid, self.to.slot, self.to.address)
    }

    /// What the consumer has taken since gives it time again.
    fn regain_patience(&mut self) {
        let taken = self.ring.consumed() - std::mem::replace(&mut self.consumed, self.ring.consumed());
        let regained = PATIENCE.mul_f64(taken.min(SIZE as u64) as f64 / SIZE as f64);
        self.patience = PATIENCE.min(self.patience + regained);
    }
}

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) from: Neighbour,
    /// Which address of this context it was made to.
    pub(super) to: IpAddr,
    pub(super) ring: FrameConsumer,
    pub(super) watch: u64,
    /// Of the offer by which it came about.
    pub(super) number: u64,
    /// Frames have an ICRC.
    pub(super) icrc: bool,
    /// What has come another way before is not taken yet.
    pub(super) is_fresh: bool,
    /// When it was offered.
    since: Instant,
    /// The other end is gone: what it has sent is still taken.
    pub(super) is_over: bool,
    /// It has what can't be.
    is_corrupt: bool,
    /// Source and destination of the last frame, which were found right.
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
    /// Of the context `own`. Other ones at an address have names that `name_of` tells. With `icrc` off frames have none, to and
    /// from neighbours who want it so too.
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

    /// Hands a burst of what has come to `sink`. Returns how many frames.
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
                            // Answers go there, and are not resolved.
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
                // The others have their turn with the next burst.
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

    /// Whether a ring is not read yet, because what was sent before may be coming another way.
    #[inline]
    pub(crate) fn has_fresh(&self) -> bool {
        self.has_fresh
    }

    /// All that has come another way is taken, but for what a thread has still to hand over.
    pub(crate) fn caught_up(&mut self) {
        let is_fresh = |incoming: &Incoming| incoming.is_fresh && incoming.since.elapsed() < SETTLED;
        self.incoming.iter_mut().for_each(|incoming| incoming.is_fresh = is_fresh(incoming));
        self.has_fresh = self.incoming.iter().any(|incoming| incoming.is_fresh);
    }

    /// Rings whose other end is gone, and that have nothing more.
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

    /// Whether another frame may be asked for, whoever it is for.
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

    /// How long a wait that begins now may be at most.
    pub(crate) fn longest_wait(&self) -> Duration {
        // Nobody tells that a ring has room again.
        if self.full.is_some() { RETRY } else { self.longest_wait_for_answers() }
    }

    /// The context has another address too.
    #[cfg(feature = "af_xdp")]
    pub(crate) fn add_own(&mut self, address: IpAddr) {
        self.owns.push(address);
        self.local.push(address);
    }

    /// Its frames begin with an Ethernet header.
    #[cfg(feature = "af_xdp")]
    pub(crate) fn of_ethernet(self) -> Links {
        Links { is_ethernet: true, ..self }
    }

    /// An address of this host.
    pub(crate) fn add_local(&mut self, address: IpAddr) {
        self.local.push(address);
    }

    pub(crate) fn is_local(&self, address: IpAddr) -> bool {
        is_local(address, &self.local)
    }

    /// An address of this host: its contexts may be reached by memory.
    pub(crate) fn add_address(&mut self, address: IpAddr) {
        self.routes.add(address);
    }

    /// Whether frames may go by memory at all.
    pub(crate) fn is_used(&self) -> bool {
        !self.routes.is_empty()
    }

    /// Sends frames of `source` by memory, until `sent` are a burst or no more may be sent now. Ends with the first one that no
    /// ring leads to, and returns it: it goes another way.
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

    /// Sends the frame that was written, in its place or by the ring to whom its head names. Returns whether it is taken; not if
    /// no ring leads there.
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

    /// Ends a burst: those who have frames now see them all, and those of them that sleep are woken.
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

    /// What is readable when frames have come while the context [rests](Links::rest).
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The context is going to sleep. Returns whether it may.
    pub(crate) fn rest(&self) -> bool {
        // All of them, so that each wakes it.
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
            warn!("{} has written invalid values into shared memory: no more frames are sent through it", outgoing.who());
        }
        self.counts.corrupt += 1;
        self.close(slot, index);
    }

    /// The ring is full no more, for there is none.
    pub(super) fn forget_full(&mut self, index: usize) {
        self.full = self.full.filter(|(full, _)| *full != index);
    }
}

/// Where the payload of one frame goes.
struct Choice<'a> {
    routes: &'a Routes,
    outgoing: &'a mut [Option<Outgoing>],
    /// The ring, and how long the payload is.
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
