//! Contexts on addresses of this host: frames to them go by shared memory ([`shm`](crate::shm)), not by the socket.

use std::io;
use std::net::IpAddr;

use super::name_of;
use crate::FrameSource;
use crate::shm::links::Links;
use crate::shm::route::Neighbour;
use crate::slots::Slot;

/// So many looks have what a socket had when the ring came.
const LOOKS_MAX: u32 = 64;

#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) links: Links,
    /// Looks into the sockets since a new ring came.
    looks: u32,
}

impl Neighbours {
    pub(super) fn new(
        address: IpAddr,
        slot: usize,
        icrc: bool,
        local: Vec<IpAddr>,
    ) -> io::Result<Neighbours> {
        let own = Neighbour { address, slot };
        let mut links = Links::new(own, icrc, name_of)?;
        local.into_iter().for_each(|address| links.add_local(address));
        Ok(Neighbours { links, looks: 0 })
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
}

/// The frames of a source that go by the socket; the others are sent by memory on the way.
pub(super) struct Others<'a> {
    pub(super) links: &'a mut Links,
    pub(super) slot: &'a Slot,
    pub(super) source: &'a mut dyn FrameSource,
    /// Frames that went by memory.
    pub(super) sent: usize,
}

impl FrameSource for Others<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let frame = self.links.send(self.slot, self.source, &mut self.sent)?;
        buffer.get_mut(..frame.len())?.copy_from_slice(frame);
        Some(frame.len())
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        self.source.renumber(frame, identification);
    }
}
