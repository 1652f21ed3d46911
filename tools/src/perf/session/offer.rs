//! The description of queue pairs that the two ends of `ferroce perf` exchange.

use std::net::Ipv6Addr;

use ferroce::{Gid, PathMtu, Psn, Qpn, RKey, RemoteAddress};

use super::{Regions, Session, unexpected};
use crate::failure::Failure;
use crate::perf::message::{Offer, PerfMessage};
use crate::perf::plan::{Layout, Operation};

impl Session {
    /// Creates queue pairs and memory for messages of `size` bytes, and returns their description.
    pub(in crate::perf) fn open(
        &mut self,
        size: u32,
        gid_index: usize,
        path_mtu: Option<PathMtu>,
    ) -> Result<Offer, Failure> {
        self.plan.check_size(size)?;
        let memory = self.create(Layout::new(&self.plan, size), Layout::single(&self.plan, size))?;
        let gid = self.end.context.port().gids[gid_index].gid;
        Ok(Offer {
            size,
            gid: Ipv6Addr::from(gid.0),
            qps: self.lanes.iter().map(|lane| (lane.qpn.value(), lane.psn.value())).collect(),
            memory: (memory.addr, memory.rkey.value(), memory.length),
            path_mtu: path_mtu.map(PathMtu::bytes),
            largest_path_mtu: self.end.largest_path_mtu(gid_index)?.bytes(),
            selective_repeat: self.plan.selective_repeat,
            pkey: self.end.pkey().0,
            switch: self.end.switch().map(str::to_owned),
        })
    }

    /// Connects the queue pairs to those of the other end.
    pub(in crate::perf) fn connect(
        &mut self,
        offer: &Offer,
        gid_index: usize,
        mtu: PathMtu,
    ) -> Result<(), Failure> {
        if offer.qps.len() != self.lanes.len() {
            let (theirs, ours) = (offer.qps.len(), self.lanes.len());
            return Err(Failure::run(format!("the other end offers {theirs} queue pairs: must be {ours}")));
        }
        let mut path = self.path(self.end.address(Gid(offer.gid.octets()), gid_index), mtu);
        path.selective_repeat &= offer.selective_repeat;
        let (addr, rkey, _) = offer.memory;
        let Regions { source_layout, .. } = self.regions()?;
        let atomic = self.plan.operation == Operation::Atomic;
        let layout = if atomic { Layout::single(&self.plan, offer.size) } else { source_layout };
        for (index, &(qpn, psn)) in offer.qps.iter().enumerate() {
            let addr = addr.wrapping_add(layout.offset(index, 0));
            let remote = RemoteAddress { addr, rkey: RKey::new(rkey) };
            self.connect_lane(index, &path, remote, (Qpn::new(qpn), Psn::new(psn)))?;
        }
        Ok(())
    }

    /// Sends the reason for the end. If that fails, the closed connection signals the end.
    pub(in crate::perf) fn tell(&mut self, failure: &Failure) -> Result<(), Failure> {
        self.control.send(&PerfMessage::Failed { reason: failure.to_string() })
    }

    /// Polls until a message of the other end has arrived.
    pub(in crate::perf) fn wait_message(&mut self) -> Result<PerfMessage, Failure> {
        loop {
            if let Some(message) = self.control.take() {
                return Ok(message);
            }
            self.turn()?;
        }
    }

    /// Receives the next message, which must be `wanted`.
    pub(in crate::perf) fn expect(&mut self, wanted: &PerfMessage) -> Result<(), Failure> {
        let message = self.wait_message()?;
        if message == *wanted { Ok(()) } else { Err(unexpected(&message)) }
    }
}
