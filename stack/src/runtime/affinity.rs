use crate::verbs::Error;

/// Pins the calling thread to one core, by the system's number.
///
/// # Errors
/// [`Error::Invalid`] for a core that does not exist or on which this process may not run.
pub fn pin_to_core(core: usize) -> Result<(), Error> {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let wanted = cores.iter().find(|id| id.id == core);
    if wanted.is_some_and(|id| core_affinity::set_for_current(*id)) {
        return Ok(());
    }
    let ids: Vec<_> = cores.iter().map(|id| id.id.to_string()).collect();
    Err(Error::invalid("core", core, format!("one that this process may run on: {}", ids.join(", "))))
}
