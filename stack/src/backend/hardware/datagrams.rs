//! Address handles and multicast groups.

use std::io;

use ferroce_driver::rnic::AddressHandle;
use ferroce_wire::Gid;

use super::{Hardware, HardwareAh};
use crate::verbs::{AddressVector, Ah, Error, Pd, Qp, QpType, WorkCompletion};

impl Hardware {
    pub(crate) fn create_ah(&mut self, pd: Pd, address: &AddressVector) -> Result<Ah, Error> {
        let domain = self.pd(pd)?;
        let way = self.way(address)?;
        let full = Error::Exhausted { kind: "AH", limit: self.named.ahs.capacity(), setting: "max_ahs" };
        if self.named.ahs.is_full() {
            return Err(full);
        }
        let card = AddressHandle::new(domain, &way);
        let card = card.map_err(|error| self.unreached(address.gid, error.into()))?;
        self.named.ahs.insert_with(|_| HardwareAh { card, pd }).map(Ah).ok_or(full)
    }

    pub(crate) fn address_from_wc(
        &self,
        wc: &WorkCompletion,
        grh: &[u8; 40],
    ) -> Result<AddressVector, Error> {
        crate::engine::ah::reverse(&self.port, grh, wc.vlan)
    }

    pub(crate) fn destroy_ah(&mut self, ah: Ah) -> Result<(), Error> {
        self.named.ahs.remove(ah.0).ok_or_else(|| Error::invalid_handle("AH", ah.0))?;
        self.events.forget(ah.into());
        Ok(())
    }

    pub(crate) fn attach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        if queue_pair.qp_type != QpType::Ud {
            let service = queue_pair.qp_type.service();
            return Err(Error::invalid("qp", format_args!("{service:?}"), "a UD QP"));
        }
        if !group.is_multicast() {
            return Err(Error::invalid("group", group, "a multicast address"));
        }
        if queue_pair.groups.contains(&group) {
            return Ok(());
        }
        queue_pair.card.attach(&group.0)?;
        queue_pair.groups.push(group);
        if self.members(group) == 1
            && let Err(source) = self.membership.join(group.to_ip())
        {
            self.detach_from_card(qp, group)?;
            return Err(self.membership_failed("joining a multicast group", source));
        }
        Ok(())
    }

    pub(crate) fn detach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        if !queue_pair.groups.contains(&group) {
            return Err(Error::invalid("group", group, "one that the QP is attached to"));
        }
        self.detach_from_card(qp, group)?;
        if self.members(group) == 0 {
            let left = self.membership.leave(group.to_ip());
            left.map_err(|source| self.membership_failed("leaving a multicast group", source))?;
        }
        Ok(())
    }

    fn detach_from_card(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        queue_pair.card.detach(&group.0)?;
        queue_pair.groups.retain(|own| *own != group);
        Ok(())
    }

    fn members(&self, group: Gid) -> usize {
        self.qps.iter().filter(|qp| qp.groups.contains(&group)).count()
    }

    fn membership_failed(&self, what: &'static str, source: io::Error) -> Error {
        let interface = self.capabilities.interface.clone();
        ferroce_driver::Error::Os { what, interface, source }.into()
    }
}
