//! Channels of unread connection events.

use std::collections::VecDeque;
use std::io;

use super::{CmEvent, CmId, ConnectionManager, Listener};
use crate::engine::slab::Slab;
use crate::verbs::{Error, Handle};

/// A separate queue of connection events, for the listeners and connections that name it
/// ([`Context::next_cm_event_of`](crate::Context::next_cm_event_of)).
///
/// Unlike rdma_cm's event channel it has no file descriptor, and no other thread can read it: wait for the context, poll it,
/// then take the events. With a [`Runner`](crate::Runner), take them by
/// `handle.call(move |context| context.next_cm_event_of(channel))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmChannel(pub(crate) Handle);

impl ConnectionManager {
    pub(crate) fn next_event(&mut self, channel: Option<CmChannel>) -> Result<Option<CmEvent>, Error> {
        channel.map_or(Ok(()), |channel| self.events.check(channel))?;
        Ok(self.events.pop(channel))
    }

    /// Whether events were added since the last call, or taken.
    pub(crate) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.events.has_news)
    }

    /// Takes the oldest event of one exchange.
    pub(crate) fn take_event(&mut self, id: CmId) -> Option<CmEvent> {
        self.events.take(id)
    }

    pub(crate) fn create_channel(&mut self) -> Result<CmChannel, Error> {
        self.events.create()
    }

    pub(crate) fn destroy_channel(&mut self, channel: CmChannel) -> Result<(), Error> {
        let listeners = self.listeners.iter().filter(|l| l.config.channel == Some(channel)).count();
        let connections = self.communications.iter().filter(|c| c.channel == Some(channel)).count();
        self.events.destroy_unused(channel, listeners, connections)
    }

    /// Delivers an event to the channel of its connection.
    pub(super) fn tell(&mut self, event: CmEvent) {
        self.events.push(self.channel_of(event.id()), event);
    }

    pub(super) fn channel_of(&self, id: CmId) -> Option<CmChannel> {
        self.communications.get(id.0)?.channel
    }

    /// The channel of a listener's requests.
    pub(super) fn channel_of_listener(&self, listener: Listener) -> Option<CmChannel> {
        self.listeners.get(listener.0)?.config.channel
    }
}

/// The queues of all channels, and the default one.
pub(crate) struct CmEvents {
    first: VecDeque<CmEvent>,
    channels: Slab<VecDeque<CmEvent>>,
    connections: usize,
    /// An event was added since the last query, or taken: there may be more.
    pub(crate) has_news: bool,
}

/// Per connection: request, established, disconnected, the end of timewait.
const EVENTS_EACH: usize = 4;
/// With this many unread events per possible connection, no new one can start.
const UNREAD_EACH: usize = 3;
/// The room per possible connection.
const EVENTS: usize = UNREAD_EACH + EVENTS_EACH;

impl CmEvents {
    pub(crate) fn new(connections: u32, channels: u32, generation: u32) -> CmEvents {
        let connections = connections as usize;
        CmEvents {
            first: VecDeque::with_capacity(EVENTS * connections),
            channels: Slab::new(channels, generation),
            connections,
            has_news: false,
        }
    }

    pub(crate) fn create(&mut self) -> Result<CmChannel, Error> {
        let limit = self.channels.capacity();
        let queue = queue(self.connections)?;
        let handle = self.channels.insert_with(|_| queue);
        let full = Error::Exhausted { kind: "CM channel", limit, setting: "max_cm_channels" };
        handle.map(CmChannel).ok_or(full)
    }

    /// Destroys a channel with its events, unless connections or listeners refer to it.
    pub(crate) fn destroy_unused(
        &mut self,
        channel: CmChannel,
        listeners: usize,
        connections: usize,
    ) -> Result<(), Error> {
        self.check(channel)?;
        if listeners + connections > 0 {
            let users = format!("{listeners} listeners and {connections} connections");
            return Err(Error::Busy { kind: "CM channel", handle: format!("{:?}", channel.0), users });
        }
        self.channels.remove(channel.0);
        Ok(())
    }

    pub(crate) fn check(&self, channel: CmChannel) -> Result<(), Error> {
        let gone = || Error::invalid_handle("CM channel", channel.0);
        self.channels.get(channel.0).map(drop).ok_or_else(gone)
    }

    /// Checks that there is room for all events of one more connection.
    pub(crate) fn check_room(&mut self, channel: Option<CmChannel>) -> Result<(), Error> {
        if self.queue(channel).len() < UNREAD_EACH * self.connections {
            return Ok(());
        }
        let (kind, handle) = match channel {
            Some(channel) => ("CM channel", format!("{:?}", channel.0)),
            None => ("connection manager", String::new()),
        };
        Err(Error::Busy { kind, handle, users: "events that the application does not read".to_owned() })
    }

    pub(crate) fn push(&mut self, channel: Option<CmChannel>, event: CmEvent) {
        self.has_news = true;
        self.queue(channel).push_back(event);
    }

    pub(crate) fn pop(&mut self, channel: Option<CmChannel>) -> Option<CmEvent> {
        let event = self.queue(channel).pop_front();
        self.has_news |= event.is_some();
        event
    }

    /// Takes the oldest event of a connection, which may have ended: then its channel is not known.
    pub(crate) fn take(&mut self, id: CmId) -> Option<CmEvent> {
        let CmEvents { first, channels, .. } = self;
        let mut queues = std::iter::once(first).chain(channels.iter_mut());
        queues.find_map(|queue| {
            let at = queue.iter().position(|event| event.id() == id)?;
            queue.remove(at)
        })
    }

    /// Removes the events that `is_over` selects. Returns whether there was one.
    pub(crate) fn forget(&mut self, channel: Option<CmChannel>, is_over: impl Fn(&CmEvent) -> bool) -> bool {
        let queue = self.queue(channel);
        let unread = queue.len();
        queue.retain(|event| !is_over(event));
        queue.len() < unread
    }

    /// Moves the unread events of a connection from one channel to another.
    pub(crate) fn migrate(&mut self, id: CmId, from: Option<CmChannel>, to: Option<CmChannel>) {
        for _ in 0..self.queue(from).len() {
            if let Some(event) = self.pop(from) {
                self.push(if event.id() == id { to } else { from }, event);
            }
        }
    }

    /// A channel exists as long as anything refers to it.
    fn queue(&mut self, channel: Option<CmChannel>) -> &mut VecDeque<CmEvent> {
        let CmEvents { first, channels, .. } = self;
        channel.and_then(|channel| channels.get_mut(channel.0)).unwrap_or(first)
    }
}

/// Room for all possible events. A large [`max_connections`](crate::Config::max_connections) may need more than the
/// available memory.
fn queue(connections: usize) -> Result<VecDeque<CmEvent>, Error> {
    let (mut queue, events) = (VecDeque::new(), EVENTS.saturating_mul(connections));
    queue.try_reserve_exact(events).map_err(|_| {
        let refused =
            format!("none for the {events} events of a CM channel; a smaller max_connections needs less");
        io::Error::new(io::ErrorKind::OutOfMemory, refused)
    })?;
    Ok(queue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_without_memory_is_refused() {
        let error = queue(usize::MAX).unwrap_err();
        assert!(matches!(error, Error::Memory(_)), "{error}");
        assert!(error.to_string().contains("max_connections"), "{error}");
        assert!(queue(1000).is_ok_and(|queue| queue.capacity() >= 7000));
        // As documented for `Context::create_cm_channel` and `Config::max_cm_channels`.
        assert!(EVENTS * size_of::<CmEvent>() <= 2100, "{}", EVENTS * size_of::<CmEvent>());
    }
}
