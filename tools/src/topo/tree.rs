//! The devices of a NUMA node as a tree: host bridge, bridges, devices. A bridge whose only child is a bridge is merged
//! with it.

use std::collections::BTreeMap;

use ferroce::driver::topology::{PciAddress, Topology};

/// A host bridge or a bridge with its children, or a device.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Branch {
    /// The names of a chain of bridges, from the top, or the device's own name.
    pub(super) names: Vec<String>,
    /// The device, if the branch is one.
    pub(super) device: Option<PciAddress>,
    pub(super) below: Vec<Branch>,
}

/// The trees of these devices, each with a host bridge at its root.
pub(super) fn grow(host: &Topology, devices: &[PciAddress]) -> Vec<Branch> {
    let mut tops: BTreeMap<&str, Branch> = BTreeMap::new();
    for device in devices.iter().filter_map(|at| host.device(*at)) {
        let mut branch =
            tops.entry(&device.host_bridge).or_insert_with(|| Branch::named(device.host_bridge.clone()));
        for bridge in &device.bridges {
            branch = branch.child(bridge.to_string());
        }
        branch.child(device.address.to_string()).device = Some(device.address);
    }
    tops.into_values().map(Branch::joined).collect()
}

impl Branch {
    fn named(name: String) -> Branch {
        Branch { names: vec![name], ..Branch::default() }
    }

    fn child(&mut self, name: String) -> &mut Branch {
        let found = self.below.iter().position(|branch| branch.names.first() == Some(&name));
        let at = found.unwrap_or_else(|| {
            self.below.push(Branch::named(name));
            self.below.len() - 1
        });
        &mut self.below[at]
    }

    /// Merges a bridge with its only child if that is a bridge. The length of a chain is limited by the length of a
    /// path in the file system.
    fn joined(mut self) -> Branch {
        while let [only] = &mut self.below[..]
            && only.device.is_none()
        {
            let Branch { names, below, .. } = std::mem::take(only);
            self.names.extend(names);
            self.below = below;
        }
        self.below = self.below.into_iter().map(Branch::joined).collect();
        self
    }
}

#[cfg(test)]
mod tests {
    use ferroce_driver_test_support::sysfs::{DGX_A100_FAULTY, Sysfs};

    use super::*;

    #[test]
    fn bridges_with_one_way_on_are_joined() {
        let sysfs = Sysfs::of(DGX_A100_FAULTY);
        let host = Topology::read(sysfs.root()).unwrap();
        let devices: Vec<PciAddress> =
            ["0000:07:00.0", "0000:0c:00.0"].map(|address| address.parse().unwrap()).to_vec();
        let tree = grow(&host, &devices);
        assert_eq!(tree.len(), 1);
        assert_eq!(tree[0].names, ["pci0000:00", "0000:00:01.1", "0000:01:00.0"]);
        let found: Vec<Option<PciAddress>> =
            tree[0].below.iter().map(|branch| branch.below[0].device).collect();
        assert_eq!(found, [Some(devices[0]), Some(devices[1])]);
        let below: Vec<usize> = tree[0].below.iter().map(|branch| branch.names.len()).collect();
        assert_eq!(below, [3, 1]);
    }
}
