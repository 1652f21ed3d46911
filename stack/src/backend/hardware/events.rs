//! Asynchronous events.

use ferroce_driver::rnic::{AsyncEvent, Device};

use super::{COUNT_INTERVAL, Hardware, LOOK_INTERVAL, LOOK_POLLS};
use crate::telemetry::counters::Counter;
use crate::verbs::{Cq, Error, Event, EventSource, Handle, Qp, QpState, Srq, WcStatus, WorkCompletion};

impl Hardware {
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        let event = self.events.next();
        // There may be more.
        self.has_news |= event.is_some();
        event
    }

    pub(crate) fn next_event_of(&mut self, source: EventSource) -> Result<Option<Event>, Error> {
        match source {
            EventSource::Qp(qp) => self.qp(qp).map(drop)?,
            EventSource::Cq(cq) => self.cq(cq).map(drop)?,
            EventSource::Srq(srq) => self.srq(srq).map(drop)?,
            EventSource::Ah(ah) => self.ah(ah).map(drop)?,
            EventSource::Port => {}
        }
        let event = self.events.next_of(source);
        self.has_news |= event.is_some();
        Ok(event)
    }

    /// Processes pending asynchronous events, and those of the completion channel.
    #[cold]
    pub(super) fn look_for_events(&mut self) -> Result<(), Error> {
        self.polls_to_look = LOOK_POLLS;
        self.next_look = self.now + LOOK_INTERVAL;
        for taken in 1..=EVENTS_AT_ONCE {
            match self.device.event() {
                Ok(Some(event)) => {
                    self.take_event(event)?;
                    if taken == EVENTS_AT_ONCE {
                        self.polls_to_look = 0;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    self.fail();
                    return Err(error.into());
                }
            }
        }
        self.take_channel_events()?;
        self.look_for_connections()?;
        if self.now >= self.next_count {
            self.next_count = self.now + COUNT_INTERVAL;
            self.count();
        }
        if self.is_gone { Err(self.gone()) } else { Ok(()) }
    }

    /// Processes the events of completion queues that were armed on the card.
    pub(super) fn take_channel_events(&mut self) -> Result<(), Error> {
        for _ in 0..EVENTS_AT_ONCE {
            let Some(tag) = self.channel.event()? else { break };
            let Hardware { cqs, events, counters, .. } = self;
            let Some((handle, cq)) = u32::try_from(tag).ok().and_then(|index| cqs.at_with_handle(index))
            else {
                continue;
            };
            if std::mem::take(&mut cq.solicited_only) && cq.queue.trip() {
                cq.queue.notify(Cq(handle), events, counters);
                self.has_news = true;
            }
        }
        Ok(())
    }

    fn take_event(&mut self, event: AsyncEvent) -> Result<(), Error> {
        tracing::debug!(device = self.device.name(), "asynchronous event: {event:?}");
        // Numbers of `enum ibv_event_type`.
        match event.kind {
            0 => {
                let cq = self.cqs.iter_with_handles().find(|(_, cq)| cq.card.id() == event.element);
                if let Some(cq) = cq.map(|(handle, _)| Cq(handle)) {
                    self.raise(Event::CqErr(cq));
                }
            }
            1 => self.raise_of_qp(event.element, Event::QpFatal, true),
            2 => self.raise_of_qp(event.element, Event::QpReqErr, true),
            3 => self.raise_of_qp(event.element, Event::QpAccessErr, true),
            4 => {
                self.raise_of_qp(event.element, Event::CommEst, false);
                self.notify_connection(event.element);
            }
            5 => self.raise_of_qp(event.element, Event::SqDrained, false),
            8 => self.fail(),
            9..=13 | 17 | 18 => self.refresh_port()?,
            14 => self.fail_srq(event.element),
            15 => {
                let srq = self.srqs.iter_with_handles().find(|(_, srq)| srq.card.id() == event.element);
                if let Some(srq) = srq.map(|(handle, _)| Srq(handle)) {
                    if let Some(queue) = self.srqs.get_mut(srq.0) {
                        queue.limit = 0;
                    }
                    self.raise(Event::SrqLimitReached(srq));
                }
            }
            16 => self.raise_of_qp(event.element, Event::QpLastWqeReached, false),
            _ => {}
        }
        Ok(())
    }

    /// A shared receive queue has failed: its queue pairs have received the last WQE.
    fn fail_srq(&mut self, element: u64) {
        tracing::warn!(device = self.device.name(), "a shared receive queue has failed");
        let srq = self.srqs.iter_with_handles().find(|(_, srq)| srq.card.id() == element);
        let srq = srq.map(|(handle, _)| Srq(handle));
        let of_it = self.qps.iter().filter(|qp| srq.is_some() && qp.srq == srq).map(|qp| qp.card.id());
        for element in of_it.collect::<Vec<_>>() {
            self.raise_of_qp(element, Event::QpFatal, true);
        }
    }

    fn raise(&mut self, event: Event) {
        self.has_news |= self.events.raise(event);
        self.counters.count(Counter::of_event(&event));
    }

    fn raise_of_qp(&mut self, element: u64, event: fn(Qp) -> Event, has_failed: bool) {
        let found = self.qps.iter_with_handles().find(|(_, qp)| qp.card.id() == element);
        let Some(qp) = found.map(|(handle, _)| Qp(handle)) else { return };
        if has_failed && let Some(queue_pair) = self.qps.get_mut(qp.0) {
            queue_pair.state = QpState::Error;
        }
        self.raise(event(qp));
    }

    /// The device is gone: posted work requests are completed only here.
    #[cold]
    fn fail(&mut self) {
        if self.is_gone {
            return;
        }
        tracing::warn!(device = self.device.name(), "the device has failed, or was removed");
        self.raise(Event::DeviceFatal);
        // Completions of the card from before.
        for place in 0..self.live_cqs.len() {
            if let Err(error) = self.drain(self.live_cqs[place]) {
                tracing::debug!("completions of a device that is gone: {error}");
            }
        }
        self.is_gone = true;
        let handles: Vec<Handle> = self.qps.iter_with_handles().map(|(handle, _)| handle).collect();
        for handle in handles {
            self.flush(Qp(handle));
        }
    }

    /// Flushes all work requests posted to a queue pair.
    pub(super) fn flush(&mut self, qp: Qp) {
        loop {
            let Some(queue_pair) = self.qps.get_mut(qp.0) else { return };
            queue_pair.state = QpState::Error;
            let (send_cq, recv_cq, qpn) = (queue_pair.send_cq, queue_pair.recv_cq, queue_pair.qpn);
            let sent = queue_pair.sq.pop_oldest().map(|work| (send_cq, work));
            let Some((cq, work)) = sent.or_else(|| queue_pair.rq.pop_oldest().map(|work| (recv_cq, work)))
            else {
                return;
            };
            let (wr_id, opcode, status) = (work.wr_id, work.opcode, WcStatus::WrFlushErr);
            self.tell(cq.0.index, WorkCompletion { wr_id, opcode, status, qp, qpn, ..WorkCompletion::EMPTY });
        }
    }

    pub(super) fn gone(&self) -> Error {
        gone(&self.device)
    }
}

/// The error of all verbs on this device.
#[cold]
pub(super) fn gone(device: &Device) -> Error {
    let source = std::io::Error::from_raw_os_error(rustix::io::Errno::NODEV.raw_os_error());
    let (call, device) = ("polling", device.name().to_owned());
    let remedy =
        "it has failed or was removed: drop the context, and open the device when it is back".to_owned();
    ferroce_driver::Error::Verbs { call, device, source, remedy }.into()
}

/// A device with more events is checked again in the next poll.
const EVENTS_AT_ONCE: usize = 256;
