//! The memory of channels and operations.

use std::time::Duration;

use ferroce::driver::gpu::Device;
use ferroce::{Access, Context, Memory, Mr, Nanos, Pd};

use crate::Error;

/// Zeroed memory, of the device if there is one.
pub(crate) fn allocate(device: Option<&dyn Device>, bytes: usize) -> Result<Memory, Error> {
    match device {
        Some(device) => Ok(device.allocate(bytes)?),
        None => Memory::zeroed(bytes).map_err(|source| Error::Memory { bytes, source }),
    }
}

pub(crate) fn register(context: &mut Context, pd: Pd, memory: Memory, access: Access) -> Result<Mr, Error> {
    Ok(context.register(pd, memory, access).map_err(ferroce::Error::from)?)
}

/// Work of a device ends within this time, unless it hangs: longer than copies take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Ends a registration after the copies of a device and the port's sends from the memory.
pub(crate) fn deregister(context: &mut Context, now: impl FnMut() -> Nanos, mr: Mr) -> Result<Memory, Error> {
    when_free(context, now, |context| context.deregister(mr))
}

/// Frees a resource once no outstanding work refers to it.
pub(crate) fn when_free<T>(
    context: &mut Context,
    mut now: impl FnMut() -> Nanos,
    mut free: impl FnMut(&mut Context) -> Result<T, ferroce::Error>,
) -> Result<T, Error> {
    let start = now();
    loop {
        match free(context) {
            Err(ferroce::Error::Busy { .. }) if now().since(start) < PATIENCE => {
                context.poll(now())?;
            }
            result => return Ok(result?),
        }
    }
}
