//! The port, and the device's capabilities.

use ferroce_driver::Capabilities;
use ferroce_wire::PKey;

use super::Software;
use crate::verbs::{DeviceAttributes, Error, Feature, GidEntry, Port};

impl Software {
    pub(crate) fn port(&self) -> &Port {
        &self.engine.port
    }

    pub(crate) fn add_gid(&mut self, entry: GidEntry) -> Result<usize, Error> {
        if self.engine.port.socket.is_some() {
            return Err(Error::Unsupported(Feature::SecondAddress));
        }
        if let Some(vlan) = entry.vlan.filter(|vlan| !(1..=4094).contains(vlan)) {
            return Err(Error::invalid("vlan", vlan, "1 to 4094"));
        }
        if entry.gid.is_multicast() {
            return Err(Error::invalid("gid", entry.gid, "an address of this port, not a multicast group"));
        }
        // RoCE v1 is not filtered by IP addresses.
        if !entry.roce_v1 {
            self.driver.admit(entry.gid.to_ip())?;
        }
        self.engine.add_gid(entry)
    }

    pub(crate) fn add_pkey(&mut self, pkey: PKey) -> Result<usize, Error> {
        self.engine.port.pkeys.add(pkey)
    }

    pub(crate) fn remove_pkey(&mut self, index: usize) -> Result<(), Error> {
        let pkey = self.engine.port.pkey(index)?;
        let (qps, connections) = self.engine.pkey_users(index);
        if qps + connections > 0 {
            let users = format!("{qps} queue pairs, {connections} connections and listeners");
            return Err(Error::Busy { kind: "P_Key", handle: format!("{pkey} at index {index}"), users });
        }
        self.engine.port.pkeys.remove(index);
        Ok(())
    }

    pub(crate) fn query_device(&self) -> &DeviceAttributes {
        &self.engine.shared.device
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        self.driver.capabilities()
    }
}
