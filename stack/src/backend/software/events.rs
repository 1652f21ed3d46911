//! Asynchronous events.

use super::Software;
use crate::verbs::{Error, Event, EventSource};

impl Software {
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        let shared = &mut self.engine.shared;
        let event = shared.events.next();
        // There may be more.
        shared.has_news |= event.is_some();
        event
    }

    pub(crate) fn next_event_of(&mut self, source: EventSource) -> Result<Option<Event>, Error> {
        match source {
            EventSource::Qp(qp) => self.qp(qp).map(drop)?,
            EventSource::Cq(cq) => self.cq(cq).map(drop)?,
            EventSource::Srq(srq) => self.srq(srq).map(drop)?,
            EventSource::Ah(ah) => {
                self.engine.shared.ahs.get(ah.0).ok_or_else(|| Error::invalid_handle("AH", ah.0))?;
            }
            EventSource::Port => {}
        }
        let shared = &mut self.engine.shared;
        let event = shared.events.next_of(source);
        shared.has_news |= event.is_some();
        Ok(event)
    }
}
