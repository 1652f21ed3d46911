//! The kernel's counters of a port.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Counters of a port in sysfs (`hw_counters`) under the names of its driver. They count all users of the device.
#[derive(Debug)]
pub struct PortCounters(Vec<(usize, File)>);

impl PortCounters {
    /// Opens those of `names` that the port has.
    pub fn open<'a>(device: &str, port: u8, names: impl Iterator<Item = &'a str>) -> PortCounters {
        let folder =
            Path::new("/sys/class/infiniband").join(device).join(format!("ports/{port}/hw_counters"));
        let files =
            names.enumerate().filter_map(|(place, name)| Some((place, File::open(folder.join(name)).ok()?)));
        PortCounters(files.collect())
    }

    /// Passes each readable counter to `tell`, with its index among the names.
    pub fn read(&self, mut tell: impl FnMut(usize, u64)) {
        for (place, file) in &self.0 {
            let mut text = [0; 32];
            let length = file.read_at(&mut text, 0).unwrap_or(0);
            let value = str::from_utf8(&text[..length]).ok().and_then(|text| text.trim().parse().ok());
            if let Some(value) = value {
                tell(*place, value);
            }
        }
    }
}
