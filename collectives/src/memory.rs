//! The memory of channels and operations.

use std::time::Duration;

use ferroce::driver::gpu::Device;
use ferroce::{Access, Context, Memory, Mr, Nanos, Pd};

use crate::Error;

/// Zeros, of the device if there is one.
pub(crate) fn allocate(device: Option<&dyn Device>, bytes: usize) -> Result<Memory, Error> {
    match device {
        Some(device) => Ok(device.allocate(bytes)?),
        None => Memory::zeroed(bytes).map_err(|source| Error::Memory { bytes, source }),
    }
}

pub(crate) fn register(context: &mut Context, pd: Pd, memory: Memory, access: Access) -> Result<Mr, Error> {
    Ok(context.register(pd, memory, access).map_err(ferroce::Error::from)?)
}

/// What a device is about ends within that, unless it hangs: longer than copies take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Ends a registration, behind the copies of a device and what the port sends from there.
pub(crate) fn deregister(context: &mut Context, now: impl FnMut() -> Nanos, mr: Mr) -> Result<Memory, Error> {
    when_free(context, now, |context| context.deregister(mr))
}

/// Frees something, once nothing that is under way names it.
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
