//! Address handles and multicast groups.

use ferroce_wire::{Encapsulation, Gid, PathMtu, Qpn, Service};

use super::Software;
use super::next_hops::{Seeker, Wanted};
use crate::engine::ah::AddressHandle;
use crate::verbs::{AddressVector, Ah, Error, Pd, Qp, WorkCompletion};

impl Software {
    pub(crate) fn create_ah(&mut self, pd: Pd, address: &AddressVector) -> Result<Ah, Error> {
        self.check_pd(pd)?;
        let (path, hop) = self.path(address, Qpn::default(), Qpn::default())?;
        let is_v1 = matches!(path.encapsulation, Encapsulation::RoceV1);
        let max_payload = self.engine.port.path_mtu(is_v1 || address.gid.is_ipv6());
        let max_payload = max_payload.map_or(0, PathMtu::bytes);
        let header = self.engine.port.header(&path);
        let source_port = self.engine.port.socket.map(|terms| terms.source_port);
        let ahs = &mut self.engine.shared.ahs;
        let full = Error::Exhausted { kind: "AH", limit: ahs.capacity(), setting: "max_ahs" };
        let new = AddressHandle::new(pd, address, (header, hop), source_port, max_payload);
        let ah = ahs.insert_with(|_| new).map(Ah).ok_or(full)?;
        let wanted = Wanted::of(address, &self.engine.port);
        self.engine.next_hops.tell(wanted, hop, Seeker::Ah(ah));
        Ok(ah)
    }

    pub(crate) fn address_from_wc(
        &self,
        wc: &WorkCompletion,
        grh: &[u8; 40],
    ) -> Result<AddressVector, Error> {
        let back = crate::engine::ah::reverse(&self.engine.port, grh, wc.vlan)?;
        Ok(AddressVector { mac: wc.source_mac, ..back })
    }

    pub(crate) fn destroy_ah(&mut self, ah: Ah) -> Result<(), Error> {
        let shared = &mut self.engine.shared;
        let removed = shared.ahs.remove(ah.0).ok_or_else(|| Error::invalid_handle("AH", ah.0))?;
        shared.events.forget(ah.into());
        if let Some(ticket) = removed.hop.ticket() {
            // Those that wait for other handles of the same peer are queued again.
            shared.scheduler.redeem(ticket);
        }
        Ok(())
    }

    pub(crate) fn attach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        if queue_pair.service != Service::Ud {
            return Err(Error::invalid("qp", format_args!("{:?}", queue_pair.service), "a UD QP"));
        }
        if !group.is_multicast() {
            return Err(Error::invalid("group", group, "a multicast address"));
        }
        let groups = &mut self.engine.groups;
        if groups.is_attached(group, qp.0.index) {
            return Ok(());
        }
        if groups.is_full() {
            let (limit, setting) = (groups.limit(), "max_mcast_attachments");
            return Err(Error::Exhausted { kind: "multicast attachment", limit, setting });
        }
        if !groups.has_members(group) {
            self.driver.join(group.to_ip())?;
        }
        groups.attach(group, qp.0.index);
        Ok(())
    }

    pub(crate) fn detach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        self.qp(qp)?;
        let groups = &mut self.engine.groups;
        if !groups.is_attached(group, qp.0.index) {
            return Err(Error::invalid("group", group, "one that the QP is attached to"));
        }
        if groups.members(group).count() == 1 {
            self.driver.leave(group.to_ip())?;
        }
        groups.detach(group, qp.0.index);
        Ok(())
    }
}
