use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::{Device, GpuError};

/// A GPU name, as in `--memory`: the library and the number of the device there.
///
/// | text | meaning |
/// |---|---|
/// | `opencl`, `opencl:1` | the first device of OpenCL, the second |
/// | `cuda`, `cuda:1` | the first GPU of CUDA, the second |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuSpec {
    /// With OpenCL; feature `opencl`.
    OpenCl(usize),
    /// With CUDA; feature `cuda`.
    Cuda(usize),
}

/// An existing GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundGpu {
    /// The name that opens it.
    pub spec: GpuSpec,
    /// Its own name, and that of the implementation.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Its PCI address, such as `0000:3b:00.0`, if reported.
    pub pci: Option<String>,
    /// Why its memory can't be [exported](crate::Memory::export) to a network card, if a reason is known.
    pub no_dma_buf: Option<String>,
}

impl GpuSpec {
    /// All GPUs, those of CUDA first, and for each library without GPUs the reason.
    pub fn all() -> (Vec<FoundGpu>, Vec<GpuError>) {
        let (mut found, mut absent) = (Vec::new(), Vec::new());
        for gpus in [GpuSpec::of_cuda(), GpuSpec::of_opencl()] {
            match gpus {
                Ok(gpus) => found.extend(gpus),
                Err(error) => absent.push(error),
            }
        }
        (found, absent)
    }

    #[cfg(feature = "cuda")]
    fn of_cuda() -> Result<Vec<FoundGpu>, GpuError> {
        let no_dma_buf = "its driver exports none (NVIDIA's open kernel modules do, on Linux 5.12 or later)";
        let gpus = super::cuda::devices()?.into_iter().map(|gpu| FoundGpu {
            spec: GpuSpec::Cuda(gpu.index),
            name: gpu.name,
            memory: gpu.memory,
            pci: gpu.pci,
            no_dma_buf: (!gpu.has_dma_buf).then(|| no_dma_buf.to_owned()),
        });
        Ok(gpus.collect())
    }

    #[cfg(not(feature = "cuda"))]
    fn of_cuda() -> Result<Vec<FoundGpu>, GpuError> {
        Err(GpuSpec::Cuda(0).not_built("cuda"))
    }

    #[cfg(feature = "opencl")]
    fn of_opencl() -> Result<Vec<FoundGpu>, GpuError> {
        let gpus = super::opencl::devices()?.into_iter().map(|gpu| FoundGpu {
            spec: GpuSpec::OpenCl(gpu.index),
            name: format!(
                "{} by {}{}",
                gpu.name,
                gpu.platform,
                if gpu.is_cpu { ", which is the CPU" } else { "" }
            ),
            memory: gpu.memory,
            pci: gpu.pci,
            no_dma_buf: Some("OpenCL exports none".to_owned()),
        });
        Ok(gpus.collect())
    }

    #[cfg(not(feature = "opencl"))]
    fn of_opencl() -> Result<Vec<FoundGpu>, GpuError> {
        Err(GpuSpec::OpenCl(0).not_built("opencl"))
    }

    /// Opens it. Memory and queues belong to the handle that created them: open a device only once.
    ///
    /// # Errors
    /// [`GpuError::NoDevice`], with what is missing; [`GpuError::Call`].
    pub fn open(self) -> Result<Arc<dyn Device>, GpuError> {
        match self {
            #[cfg(feature = "opencl")]
            GpuSpec::OpenCl(index) => Ok(super::opencl::open(index)?),
            #[cfg(not(feature = "opencl"))]
            GpuSpec::OpenCl(_) => Err(self.not_built("opencl")),
            #[cfg(feature = "cuda")]
            GpuSpec::Cuda(index) => Ok(super::cuda::open(index)?),
            #[cfg(not(feature = "cuda"))]
            GpuSpec::Cuda(_) => Err(self.not_built("cuda")),
        }
    }

    #[cfg(not(all(feature = "opencl", feature = "cuda")))]
    fn not_built(self, feature: &str) -> GpuError {
        let reason = format!("this program is built without the feature {feature}");
        GpuError::NoDevice { device: self.to_string(), reason }
    }
}

impl FromStr for GpuSpec {
    type Err = GpuError;

    fn from_str(text: &str) -> Result<GpuSpec, GpuError> {
        let (library, number) = text.split_once(':').unwrap_or((text, "0"));
        let index = number.parse().ok().filter(|_| number.bytes().all(|digit| digit.is_ascii_digit()));
        match (library, index) {
            ("opencl", Some(index)) => Ok(GpuSpec::OpenCl(index)),
            ("cuda", Some(index)) => Ok(GpuSpec::Cuda(index)),
            _ => Err(GpuError::NoDevice {
                device: format!("'{text}'"),
                reason: "opencl, opencl:N, cuda or cuda:N, where N counts from 0".to_owned(),
            }),
        }
    }
}

impl fmt::Display for GpuSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuSpec::OpenCl(index) => write!(f, "opencl:{index}"),
            GpuSpec::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (text, spec) in [
            ("opencl", GpuSpec::OpenCl(0)),
            ("opencl:12", GpuSpec::OpenCl(12)),
            ("cuda", GpuSpec::Cuda(0)),
            ("cuda:1", GpuSpec::Cuda(1)),
        ] {
            assert_eq!(text.parse::<GpuSpec>().unwrap(), spec);
            assert_eq!(spec.to_string().parse::<GpuSpec>().unwrap(), spec);
        }
        for text in
            ["", "gpu", "opencl:", "opencl:+1", "opencl:-1", "opencl:1:2", "cuda:99999999999999999999"]
        {
            let refused = text.parse::<GpuSpec>().unwrap_err().to_string();
            assert_eq!(refused, format!("'{text}': opencl, opencl:N, cuda or cuda:N, where N counts from 0"));
        }
    }
}
