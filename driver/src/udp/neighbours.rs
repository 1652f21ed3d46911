//! Contexts on addresses of this host, which are reached by memory that both ends share.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use crate::shm::links::{Links, Neighbour};
use crate::shm::ring::FRAME_MAX;
use crate::slots::{Mail, Slot};
use crate::{FrameSource, Gathered, Nanos, Room, TAIL_MAX};

/// Frames by memory in a burst.
const BURST: usize = 64;

#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) links: Links,
    /// Addresses of this host.
    local: Vec<IpAddr>,
    /// The frame that is being written.
    head: Box<[u8; FRAME_MAX]>,
}

impl Neighbours {
    pub(super) fn new(address: IpAddr, slot: usize, local: Vec<IpAddr>) -> Neighbours {
        let links = Links::new(Neighbour { address, slot }, |address| format!("udp/{address}"));
        Neighbours { links, local, head: Box::new([0; FRAME_MAX]) }
    }

    /// Frames go to this address from now on.
    pub(super) fn resolved(&mut self, peer: IpAddr) {
        if self.local.contains(&peer) || peer.is_loopback() && peer.is_ipv4() {
            self.links.add_address(peer);
        }
    }

    pub(super) fn take_mail(&mut self, slot: &Slot, bell: BorrowedFd<'_>, mail: Mail) {
        self.links.take_mail(slot, bell, mail);
        self.links.end_burst();
    }

    /// The frames of `source` that go by the socket; the others are sent by memory on the way.
    pub(super) fn others<'a>(
        &'a mut self,
        (slot, now): (&'a Slot, Nanos),
        source: &'a mut dyn FrameSource,
    ) -> Others<'a> {
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
        if let Some(frame) = links.next_unanswered(self.now) {
            buffer.get_mut(..frame.len())?.copy_from_slice(&frame);
            return Some(frame.len());
        }
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

    fn place(&mut self, head: &mut [u8], tail: &mut [u8; TAIL_MAX], room: &mut dyn Room) -> Option<Gathered> {
        self.source.place(head, tail, room)
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        self.source.renumber(frame, identification);
    }
}
