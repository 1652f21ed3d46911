//! `--memory`: the kind of memory that is sent and received.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ferroce_driver::gpu::{Device, GpuSpec};
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, legible};

/// Memory of the host, or of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum MemorySpec {
    /// Host memory.
    #[default]
    Host,
    /// GPU memory.
    Gpu(GpuSpec),
}

impl MemorySpec {
    /// The GPU, if it is GPU memory.
    ///
    /// # Errors
    /// The GPU can't be opened.
    pub(crate) fn open(self) -> Result<Option<Arc<dyn Device>>, Failure> {
        match self {
            MemorySpec::Host => Ok(None),
            MemorySpec::Gpu(spec) => Ok(Some(spec.open()?)),
        }
    }

    /// A description of what reduces in this memory.
    pub(crate) fn reduces_by(self) -> String {
        match self {
            MemorySpec::Host => ferroce_driver::reduction::processor().to_owned(),
            MemorySpec::Gpu(spec) => {
                let found = GpuSpec::all().0.into_iter().find(|gpu| gpu.spec == spec);
                found.map_or(spec.to_string(), |gpu| format!("{spec} ({})", legible(&gpu.name)))
            }
        }
    }

    /// Whether it is host memory.
    pub(crate) fn is_host(self) -> bool {
        self == MemorySpec::Host
    }
}

impl FromStr for MemorySpec {
    type Err = String;

    fn from_str(text: &str) -> Result<MemorySpec, String> {
        match text {
            "host" => Ok(MemorySpec::Host),
            _ => text.parse().map(MemorySpec::Gpu).map_err(|_| {
                format!("'{text}': host, or a GPU: opencl, opencl:N, cuda or cuda:N, where N counts from 0")
            }),
        }
    }
}

impl TryFrom<String> for MemorySpec {
    type Error = String;

    fn try_from(text: String) -> Result<MemorySpec, String> {
        text.parse()
    }
}

impl From<MemorySpec> for String {
    fn from(spec: MemorySpec) -> String {
        spec.to_string()
    }
}

impl fmt::Display for MemorySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemorySpec::Host => f.write_str("host"),
            MemorySpec::Gpu(spec) => spec.fmt(f),
        }
    }
}
