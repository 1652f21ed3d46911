//! Which handle gets the completions of a completion queue.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex};

use super::wakeup::{Desk, lock};
use crate::verbs::{Cq, Error};

/// The completion queues whose completions go to a handle, and the handle's desk.
#[derive(Default)]
pub(super) struct Claims(Mutex<HashMap<Cq, Arc<Desk>>>);

impl Claims {
    /// # Errors
    /// [`Error::Busy`] for a queue that already has a handle.
    pub(super) fn add(&self, cq: Cq, desk: &Arc<Desk>) -> Result<(), Error> {
        match lock(&self.0).entry(cq) {
            Entry::Vacant(place) => {
                place.insert(desk.clone());
                Ok(())
            }
            Entry::Occupied(_) => {
                let users = "a handle of this runner, which gets its completions".to_owned();
                Err(Error::Busy { kind: "CQ", handle: format!("{:?}", cq.0), users })
            }
        }
    }

    /// The queue was destroyed, or could not be assigned.
    pub(super) fn remove(&self, cq: Cq) {
        lock(&self.0).remove(&cq);
    }

    /// A handle was dropped; its queues are free for others.
    pub(super) fn leave(&self, desk: &Arc<Desk>) {
        lock(&self.0).retain(|_, other| !Arc::ptr_eq(other, desk));
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.0).len()
    }
}
