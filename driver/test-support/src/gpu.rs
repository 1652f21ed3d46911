//! A GPU to test with.

use std::env;
use std::sync::Arc;

use ferroce_driver::gpu::{Device, GpuSpec};

/// The GPU that `FERROCE_GPU` names (`cuda:0`), else the first of OpenCL, opened anew. Without one it says why tests of it can't
/// run, but in CI, where everything runs.
///
/// # Panics
///
/// If the variable names no GPU, or one that can't be opened.
pub fn first() -> Option<Arc<dyn Device>> {
    let named: Option<GpuSpec> = env::var("FERROCE_GPU").ok().map(|name| name.parse().unwrap());
    match named.unwrap_or(GpuSpec::OpenCl(0)).open() {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(env::var("CI").as_deref() != Ok("true"), "CI tests everything: {error}");
            assert!(named.is_none(), "FERROCE_GPU: {error}");
            println!("skipped: {error}");
            None
        }
    }
}
