//! The packets that pass a port, as a file.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use ferroce::Nanos;
use ferroce_driver::pcap::{Recording, Writer};
use ferroce_driver::sim::fabric::{Built, PortId};

use super::plan::BEGIN;
use super::watch::{name, port_name};
use crate::failure::Failure;

/// `switch0:3=port.pcapng`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortFile {
    port: String,
    path: PathBuf,
}

impl FromStr for PortFile {
    type Err = String;

    fn from_str(text: &str) -> Result<PortFile, String> {
        let parts = text.split_once('=').filter(|(port, path)| !port.is_empty() && !path.is_empty());
        let (port, path) =
            parts.ok_or("must be a port and a file, as switch0:3=port.pcapng or host2=host.pcapng")?;
        Ok(PortFile { port: port.to_owned(), path: path.into() })
    }
}

impl PortFile {
    pub(crate) fn port(&self) -> &str {
        &self.port
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Records each frame that passes the port from now on. Times are virtual, from 0, as in the report.
    pub(crate) fn record(&self, built: &Built) -> Result<Recording, Failure> {
        let fabric = &built.fabric;
        let of_name = |port: &PortId| port_name(fabric, *port) == self.port;
        let port = fabric.ports().find(of_name).ok_or_else(|| {
            let last = |prefix: &str, count: usize| match count {
                0 => String::new(),
                _ => format!("{prefix}0 to{}{}", prefix.replace(',', ""), count - 1),
            };
            let (hosts, switches) =
                (last(" host", built.hosts.len()), last(", switch", built.switches.len()));
            let expected = "a port of a switch, as switch0:3";
            Failure::usage(format!("--pcap: no port '{}'; there are{hosts}{switches}; {expected}", self.port))
        })?;
        let mut writer = Writer::create(&self.path, &self.port, &name(fabric, port))?;
        let recording = writer.recording();
        fabric.tap(
            port,
            Box::new(move |now, leaves, frame| {
                writer.write(Nanos(now.0.saturating_sub(BEGIN.0)), leaves, frame)
            }),
        );
        Ok(recording)
    }
}
