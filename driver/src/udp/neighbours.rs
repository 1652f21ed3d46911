//! Contexts on addresses of this host: frames to them are sent through shared memory ([`shm`](crate::shm)), not through
//! the socket.

use std::io;
use std::net::IpAddr;

use super::name_of;
use crate::FrameSource;
use crate::shm::links::Links;
use crate::shm::route::Neighbour;
use crate::slots::Slot;

/// After this many receive calls, what a socket contained when the ring was added has been received.
const LOOKS_MAX: u32 = 64;

#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) links: Links,
    /// Receive calls since a new ring was added.
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

    /// Frames are sent to this address from now on.
    pub(super) fn resolved(&mut self, peer: IpAddr) {
        if self.links.is_local(peer) {
            self.links.add_address(peer);
        }
    }

    /// Called after a receive call, with its number of packets. Packets that a process of this host sent by UDP before
    /// it had a ring are older than those in the ring, so they are received first. The number of calls is limited,
    /// because other hosts may fill the sockets all the time.
    pub(super) fn looked(&mut self, packets: usize) {
        self.looks += 1;
        if packets == 0 || self.looks >= LOOKS_MAX {
            self.looks = 0;
            self.links.caught_up();
        }
    }
}

/// The frames of a source that are sent through the socket. The others are sent through memory during iteration.
pub(super) struct Others<'a> {
    pub(super) links: &'a mut Links,
    pub(super) slot: &'a Slot,
    pub(super) source: &'a mut dyn FrameSource,
    /// Frames sent through memory.
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
