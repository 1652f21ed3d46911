//! Address handles and multicast groups.

use ferroce_driver::rnic::AddressHandle;
use ferroce_wire::Gid;

use super::{Hardware, HardwareAh};
use crate::verbs::{AddressVector, Ah, Error, Pd, Qp, QpType, WorkCompletion};

impl Hardware {
    pub(crate) fn create_ah(&mut self, pd: Pd, address: &AddressVector) -> Result<Ah, Error> {
        let domain = self.pd(pd)?;
        let way = self.way(address)?;
        let full = Error::Exhausted { kind: "AH", limit: self.ahs.capacity(), setting: "max_ahs" };
        if self.ahs.is_full() {
            return Err(full);
        }
        let card = AddressHandle::new(domain, &way)?;
        self.ahs.insert_with(|_| HardwareAh { card, pd }).map(Ah).ok_or(full)
    }

    pub(crate) fn address_from_wc(&self, _: &WorkCompletion, grh: &[u8; 40]) -> Result<AddressVector, Error> {
        crate::engine::ah::reverse(&self.port, grh)
    }

    pub(crate) fn destroy_ah(&mut self, ah: Ah) -> Result<(), Error> {
        self.ahs.remove(ah.0).ok_or_else(|| Error::invalid_handle("AH", ah.0))?;
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
        if !queue_pair.groups.contains(&group) {
            queue_pair.card.attach(&group.0)?;
            queue_pair.groups.push(group);
        }
        Ok(())
    }

    pub(crate) fn detach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        let Some(place) = queue_pair.groups.iter().position(|own| *own == group) else {
            return Err(Error::invalid("group", group, "one that the QP is attached to"));
        };
        queue_pair.card.detach(&group.0)?;
        queue_pair.groups.swap_remove(place);
        Ok(())
    }
}
