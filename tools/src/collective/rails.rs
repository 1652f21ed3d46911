//! The devices of a rank, one for each rail: `eth0+eth1`.

use std::fmt;
use std::str::FromStr;

use ferroce::{Config, Context, DeviceSpec, Error};
use ferroce_collectives::{Collectives, MAX_RAILS};
use ferroce_driver::gpu;

use crate::failure::Failure;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rails(Vec<DeviceSpec>);

impl fmt::Display for Rails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, device) in self.0.iter().enumerate() {
            write!(f, "{}{device}", if at > 0 { "+" } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for Rails {
    type Err = String;

    fn from_str(text: &str) -> Result<Rails, String> {
        let device = |text: &str| text.parse().map_err(|error: Error| error.to_string());
        let rails: Vec<DeviceSpec> = text.split('+').map(device).collect::<Result<_, _>>()?;
        let first = rails.iter().enumerate().find(|(index, rail)| rails[..*index].contains(rail));
        if let Some((_, twice)) = first {
            return Err(format!("{twice} is given twice: each rail must be another port"));
        }
        match rails.len() {
            1..=MAX_RAILS => Ok(Rails(rails)),
            many => Err(format!("{many} devices, joined by '+': must be at most {MAX_RAILS}")),
        }
    }
}

impl Rails {
    pub(super) fn has_loopback(&self) -> bool {
        self.0.contains(&DeviceSpec::Loopback)
    }

    /// Opens all devices.
    pub(super) fn open(&self, gpu: Option<std::sync::Arc<dyn gpu::Device>>) -> Result<Collectives, Failure> {
        let mut contexts = Vec::new();
        for device in &self.0 {
            contexts.push(Context::open(device.open()?, &Config::default())?);
        }
        let mut contexts = contexts.into_iter();
        let mut first = contexts.next().ok_or_else(|| Failure::usage("--device: no device"))?;
        crate::endpoint::export(&mut first);
        let mut collectives = match gpu {
            Some(gpu) => Collectives::on_device(first, gpu)?,
            None => Collectives::new(first)?,
        };
        contexts.try_for_each(|mut context| {
            crate::endpoint::export(&mut context);
            collectives.add_rail(context)
        })?;
        Ok(collectives)
    }
}
