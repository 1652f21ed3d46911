//! Contexts on addresses of this host, which are reached by memory that both ends share.

use std::net::IpAddr;

use crate::shm::links::{Links, Neighbour};
use crate::shm::ring::FRAME_MAX;
use crate::slots::Slot;
use crate::{FrameSource, Nanos, TAIL_MAX};

/// So many looks have what a socket had when the ring came.
const LOOKS_MAX: u32 = 64;
/// Frames by memory in a burst.
const BURST: usize = 64;

#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) links: Links,
    /// The frame that is being written.
    head: Box<[u8; FRAME_MAX]>,
    /// Looks into the sockets since a new ring came.
    looks: u32,
}

impl Neighbours {
    pub(super) fn new(address: IpAddr, slot: usize, local: Vec<IpAddr>) -> Neighbours {
        let mut links = Links::new(Neighbour { address, slot }, |address| format!("udp/{address}"));
        local.into_iter().for_each(|address| links.add_local(address));
        Neighbours { links, head: Box::new([0; FRAME_MAX]), looks: 0 }
    }

    /// Frames go to this address from now on.
    pub(super) fn resolved(&mut self, peer: IpAddr) {
        if self.links.is_local(peer) {
            self.links.add_address(peer);
        }
    }

    /// The sockets were looked into, and had so many packets. What a process of this host has sent by UDP before it had a ring was
    /// there before what is in the ring, so it is taken first; but others may fill the sockets all the time.
    pub(super) fn looked(&mut self, packets: usize) {
        self.looks += 1;
        if packets == 0 || self.looks >= LOOKS_MAX {
            self.looks = 0;
            self.links.caught_up();
        }
    }

    /// The frames of `source` that go by the socket; the others are sent by memory on the way.
    pub(super) fn others<'a>(
        &'a mut self,
        (slot, now): (&'a Slot, Nanos),
        source: &'a mut dyn FrameSource,
    ) -> Others<'a> {
        self.links.advance(now);
        Others { neighbours: self, slot, now, source, sent: 0 }
    }
}

pub(super) struct Others<'a> {
    neighbours: &'a mut Neighbours,
    slot: &'a Slot,
    now: Nanos,
    source: &'a mut dyn FrameSource,
    /// By memory.
    sent: usize,
}

impl Others<'_> {
    /// Wakes those who have frames now. Returns how many frames went by memory.
    pub(super) fn end(self) -> usize {
        self.neighbours.links.end_burst();
        self.sent
    }
}

impl FrameSource for Others<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let Neighbours { links, head, .. } = self.neighbours;
        let mut tail = [0; TAIL_MAX];
        while self.sent < BURST && links.has_room(self.now) {
            let mut room = links.room();
            let written = self.source.place(&mut head[..], &mut tail, &mut room)?;
            let chosen = room.chosen;
            let (head, tail) = (head.get(..written.head)?, tail.get(..written.tail)?);
            if !links.send((self.slot, self.now), head, tail, chosen) {
                buffer.get_mut(..head.len())?.copy_from_slice(head);
                return Some(head.len());
            }
            self.sent += 1;
        }
        None
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        self.source.renumber(frame, identification);
    }
}
