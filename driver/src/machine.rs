//! The machine and its state, for reports of measurements.

mod line;
mod rounds;

use std::fmt;
use std::fs;
use std::thread;

pub use line::LineTime;
pub use rounds::{Repetitions, Rounds};

/// The machine's properties that measurements depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Machine {
    /// The processor's model, or its architecture if Linux reports no model.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// The machine of this process.
    pub fn this() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Machine {
            cpu: model(&cpuinfo).unwrap_or(std::env::consts::ARCH).to_owned(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            kernel: kernel.trim().to_owned(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { cpu, cores, kernel } = self;
        write!(f, "{cpu}, {cores} core{}, Linux {kernel}", if *cores == 1 { "" } else { "s" })
    }
}

fn model(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"))?;
    let (_, model) = line.split_once(':')?;
    Some(model.trim()).filter(|model| !model.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_that_of_the_first_processor() {
        let cpuinfo = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n";
        assert_eq!(model(cpuinfo), Some("AMD EPYC"));
        // 64-bit Arm does not have this line.
        assert_eq!(model("processor\t: 0\nCPU part\t: 0xd0c\n"), None);
        assert_eq!(model("model name\t:\n"), None);
    }
}
