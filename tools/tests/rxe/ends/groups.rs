//! Objects that several queue pairs share: a shared receive queue, a multicast group.

use std::net::{IpAddr, Ipv4Addr};

use ferroce::wire::Gid;
use ferroce::{AddressVector, Destination, Qpn, Srq, SrqConfig};
use serde_json::json;

use super::{Ends, Pair, QKEY, number, text};
use crate::guest::Guest;
use crate::work::Side;

/// A shared receive queue at each end.
#[derive(Clone, Copy)]
pub(super) struct SharedReceives {
    pub(super) here: Srq,
    pub(super) there: u64,
    /// Receive WRs posted here.
    pub(super) posted: u64,
}

const GROUP: Ipv4Addr = Ipv4Addr::new(239, 7, 7, 7);

impl Ends {
    /// From now on an SRQ at each end is used.
    pub(crate) fn share_receives(&mut self) {
        let config = SrqConfig::new(self.pd).max_wr(256).max_sge(1);
        let here = self.context.create_srq(&config).expect("an SRQ");
        let there = number(&self.ask(&json!({"do": "srq"}))["id"]);
        self.shared = Some(SharedReceives { here, there, posted: 0 });
    }

    /// Ends the use of the SRQs. No queue pair may use them any more.
    pub(crate) fn own_receives(&mut self) {
        if let Some(SharedReceives { here, there, .. }) = self.shared.take() {
            self.context.destroy_srq(here).expect("no queue pair uses it");
            self.ask(&json!({"do": "destroy", "id": there}));
        }
    }

    /// Undoes [`join`](Ends::join).
    pub(crate) fn leave(&mut self, side: Side, pair: &Pair) {
        if side == Side::Ferroce {
            self.context.detach_mcast(pair.here, Gid::from(IpAddr::V4(GROUP))).expect("it has joined");
        }
    }

    /// A queue pair of `side` joins the multicast group, and the other end's queue pair sends to it. In the guest it
    /// leaves when it is destroyed.
    pub(crate) fn join(&mut self, guest: &Guest, side: Side, pair: &mut Pair) {
        guest.start("ip route replace 239.0.0.0/8 dev eth0").succeed();
        let group = Gid::from(IpAddr::V4(GROUP));
        if side == Side::Rxe {
            self.ask(&json!({"do": "join", "qp": pair.there, "group": GROUP.to_string()}));
        } else {
            self.context.attach_mcast(pair.here, group).expect("a group");
        }
        if let Some(ah) = pair.to_there.take() {
            self.context.destroy_ah(ah).expect("an address handle");
        }
        let address = AddressVector::new(group, self.sgid_index);
        pair.to_there = Some(self.context.create_ah(self.pd, &address).expect("an address handle"));
        pair.group = Some(group);
    }

    /// The destination of a datagram queue pair here.
    pub(super) fn destination(pair: &Pair) -> Option<Destination> {
        let qpn = if pair.group.is_some() { Qpn::MULTICAST } else { Qpn::new(pair.qpn_there) };
        pair.to_there.map(|ah| Destination { ah, qpn, qkey: QKEY })
    }

    /// The destination of one in the guest, as a command argument.
    pub(super) fn destination_there(&self, pair: &Pair) -> serde_json::Value {
        let (gid, qpn) =
            pair.group.map_or((self.gid_here, pair.qpn_here), |group| (group, Qpn::MULTICAST.value()));
        json!({"gid": text(gid), "sgid_index": self.index_there(), "qpn": qpn})
    }
}
