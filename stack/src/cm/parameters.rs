//! The parameters of the ends of a connection.

use std::time::Duration;

use ferroce_wire::{Ecn, PathMtu};

use super::CmChannel;
#[cfg(doc)]
use super::CmEvent;
use crate::verbs::{Error, MAX_RD_ATOMIC, exponent_of, time_of};

/// The settings of a listener: the number of pending requests, the partition, and the channel of the events.
/// [`manual::connecting`](crate::manual::connecting) has a server with one.
///
/// ```
/// # use ferroce::*;
/// // A server whose clients may all be behind one address.
/// let config = ListenConfig::default().backlog(512).per_source(512);
/// assert_eq!(config.per_source, 512);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct ListenConfig {
    /// Requests that the application has neither accepted nor rejected yet. Further requests are rejected; with 0 all are.
    pub backlog: u32,
    /// The same from one address, so that one peer can't use all of them.
    pub per_source: u32,
    /// Only requests for this partition, by the index of its P_Key in the port's table; `None` for all.
    pub pkey_index: Option<usize>,
    /// The channel of the events of requests and of the resulting connections; `None` for
    /// [`next_cm_event`](crate::Context::next_cm_event).
    pub channel: Option<CmChannel>,
}

impl Default for ListenConfig {
    /// 128 requests, 64 from one address, of any partition.
    fn default() -> ListenConfig {
        ListenConfig { backlog: 128, per_source: 64, pkey_index: None, channel: None }
    }
}

impl ListenConfig {
    /// Requests that the application has not answered yet; 128 by default. With 0 the listener rejects every request.
    pub fn backlog(self, backlog: u32) -> Self {
        ListenConfig { backlog, ..self }
    }

    /// The same from one address; 64 by default.
    pub fn per_source(self, per_source: u32) -> Self {
        ListenConfig { per_source, ..self }
    }

    /// Only requests for one partition, by the index of its P_Key in the port's table; all by default.
    pub fn pkey_index(self, pkey_index: impl Into<Option<usize>>) -> Self {
        ListenConfig { pkey_index: pkey_index.into(), ..self }
    }

    /// The channel of the events; [`next_cm_event`](crate::Context::next_cm_event) by default.
    pub fn channel(self, channel: impl Into<Option<CmChannel>>) -> Self {
        ListenConfig { channel: channel.into(), ..self }
    }
}

/// The parameters that an end of a connection requests, or offers.
///
/// ```
/// # use ferroce::*;
/// # use std::time::Duration;
/// let parameters = ConnectionParameters::default()
///     .private_data(b"hello")
///     .timeout_at_least(Duration::from_millis(100))
///     .cm_retries(3);
/// assert_eq!(parameters.patience().as_secs(), 17);
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
#[non_exhaustive]
pub struct ConnectionParameters<'a> {
    /// The application's bytes for the other end: at most 56 with a request, 196 with an acceptance.
    pub private_data: &'a [u8],
    /// READs and atomics that the peer may have outstanding here, at most 128. The smaller of this and the peer's
    /// `initiator_depth` is used.
    pub responder_resources: u8,
    /// READs and atomics that this end may have outstanding at the peer; as above.
    pub initiator_depth: u8,
    /// Retries after timeouts and sequence errors, 0 to 7. Both ends use the requester's.
    pub retry_count: u8,
    /// Retries of the peer after RNR NAKs of this end, 0 to 7. 7 means unlimited.
    pub rnr_retry: u8,
    /// ACK timeout of both ends, 4.096 µs · 2^timeout, 1 to 31. Both use that of the connecting end, but the accepting end uses
    /// 21 (8.6 s) if the request has 0 or more than 21.
    /// [`timeout_at_least`](ConnectionParameters::timeout_at_least) takes a `Duration`.
    pub timeout: u8,
    /// The requester's choice; `None` for the largest that the interface allows.
    pub path_mtu: Option<PathMtu>,
    /// The requester's choice of a partition, by the index of its P_Key in the port's table. `None` for that of the queue
    /// pair; for a search, which has no queue pair, the first. Both ends' queue pairs get it.
    pub pkey_index: Option<usize>,
    /// DSCP of the connection's packets in the upper six bits; congestion control sets the lower two. In a request it is
    /// for both ends, and `None` is 0. In an acceptance it is for this end only, and `None` is the value of the request.
    pub traffic_class: Option<u8>,
    /// How long a message of the connection manager waits for its answer, 4.096 µs · 2^cm_timeout, up to 31.
    /// [`cm_timeout_at_least`](ConnectionParameters::cm_timeout_at_least) sets it from a `Duration`.
    pub cm_timeout: u8,
    /// How often such a message is retransmitted, 0 to 15.
    pub cm_retries: u8,
    /// The channel of the events of this connection or search. `None` for [`next_cm_event`](crate::Context::next_cm_event);
    /// with `accept` for the current channel.
    pub channel: Option<CmChannel>,
}

impl Default for ConnectionParameters<'_> {
    /// As rdma_cm does: 16 READs and atomics, 7 retries, an ACK timeout of 0.54 s, 15 retransmissions 4.3 s apart. So a
    /// `connect` to a host that does not answer, and that the network does not report as unreachable, ends after 69 s with
    /// [`CmEvent::Unreachable`]; with 3 retransmissions it ends after 17 s ([`patience`](ConnectionParameters::patience)).
    fn default() -> Self {
        ConnectionParameters {
            private_data: &[],
            responder_resources: 16,
            initiator_depth: 16,
            retry_count: 7,
            rnr_retry: 7,
            timeout: 17,
            path_mtu: None,
            pkey_index: None,
            traffic_class: None,
            cm_timeout: 20,
            cm_retries: 15,
            channel: None,
        }
    }
}

impl<'a> ConnectionParameters<'a> {
    /// The application's bytes for the other end: at most 56 with a request, 196 with an acceptance; none by default.
    pub fn private_data(self, private_data: &'a [u8]) -> Self {
        ConnectionParameters { private_data, ..self }
    }

    /// READs and atomics that the peer may have outstanding here, at most 128; 16 by default.
    pub fn responder_resources(self, responder_resources: u8) -> Self {
        ConnectionParameters { responder_resources, ..self }
    }

    /// READs and atomics of this end outstanding at the peer, at most 128; 16 by default.
    pub fn initiator_depth(self, initiator_depth: u8) -> Self {
        ConnectionParameters { initiator_depth, ..self }
    }

    /// Retries after timeouts and sequence errors, 0 to 7; 7 by default.
    pub fn retry_count(self, retry_count: u8) -> Self {
        ConnectionParameters { retry_count, ..self }
    }

    /// Retries of the peer after RNR NAKs of this end, 0 to 7; 7, unlimited, by default.
    pub fn rnr_retry(self, rnr_retry: u8) -> Self {
        ConnectionParameters { rnr_retry, ..self }
    }

    /// ACK timeout of both ends, 4.096 µs · 2^timeout, 1 to 31; 17 (0.5 s) by default.
    pub fn timeout(self, timeout: u8) -> Self {
        ConnectionParameters { timeout, ..self }
    }

    /// `time` rounded up to the next ACK timeout that can be encoded ([how](crate::manual::connecting#timeouts-and-retries)).
    /// Zero means the shortest, 8.2 µs: a connection always has an ACK timeout. (In [`ReadyToSend`](crate::ReadyToSend) zero
    /// turns it off.)
    pub fn timeout_at_least(self, time: Duration) -> Self {
        ConnectionParameters { timeout: exponent_of(time).max(1), ..self }
    }

    /// The path MTU of the connection; by default the largest that the interface allows.
    pub fn path_mtu(self, path_mtu: impl Into<Option<PathMtu>>) -> Self {
        ConnectionParameters { path_mtu: path_mtu.into(), ..self }
    }

    /// The partition, by the index of its P_Key in the port's table; that of the queue pair by default.
    pub fn pkey_index(self, pkey_index: impl Into<Option<usize>>) -> Self {
        ConnectionParameters { pkey_index: pkey_index.into(), ..self }
    }

    /// DSCP of the connection's packets in the upper six bits; by default 0 in a request, and the value of the request in
    /// an acceptance.
    pub fn traffic_class(self, traffic_class: impl Into<Option<u8>>) -> Self {
        ConnectionParameters { traffic_class: traffic_class.into(), ..self }
    }

    /// How long a message waits for its answer, 4.096 µs · 2^cm_timeout, 0 to 31; 20 (4.3 s) by default.
    pub fn cm_timeout(self, cm_timeout: u8) -> Self {
        ConnectionParameters { cm_timeout, ..self }
    }

    /// The shortest time for an answer that is at least `time`: 4.1 µs to 2.4 h, in powers of two.
    pub fn cm_timeout_at_least(self, time: Duration) -> Self {
        let exponent = if time <= time_of(0) { 0 } else { exponent_of(time) };
        ConnectionParameters { cm_timeout: exponent, ..self }
    }

    /// How often such a message is retransmitted, 0 to 15; 15 by default.
    pub fn cm_retries(self, cm_retries: u8) -> Self {
        ConnectionParameters { cm_retries, ..self }
    }

    /// The channel of the events; [`next_cm_event`](crate::Context::next_cm_event) by default.
    pub fn channel(self, channel: impl Into<Option<CmChannel>>) -> Self {
        ConnectionParameters { channel: channel.into(), ..self }
    }

    /// The ACK timeout of both ends.
    pub fn ack_timeout(&self) -> Duration {
        time_of(self.timeout)
    }

    /// The time after which a peer that does not answer is given up, retransmissions included.
    pub fn patience(&self) -> Duration {
        time_of(self.cm_timeout) * (u32::from(self.cm_retries) + 1)
    }

    /// Fails on the first one that is out of range.
    pub(crate) fn check(&self, private_data_max: usize) -> Result<(), Error> {
        check_private_data(self.private_data, private_data_max)?;
        let numbers = [
            ("responder_resources", self.responder_resources, 0, MAX_RD_ATOMIC),
            ("initiator_depth", self.initiator_depth, 0, MAX_RD_ATOMIC),
            ("retry_count", self.retry_count, 0, 7),
            ("rnr_retry", self.rnr_retry, 0, 7),
            ("timeout", self.timeout, 1, 31),
            ("cm_timeout", self.cm_timeout, 0, 31),
            ("cm_retries", self.cm_retries, 0, 15),
        ];
        for (attribute, value, least, most) in numbers {
            if value < least || value > most {
                return Err(Error::invalid(attribute, value, format!("{least} to {most}")));
            }
        }
        match self.traffic_class {
            Some(class) if class & Ecn::MASK != 0 => {
                let expected = "DSCP in the upper six bits and 0 below: congestion control sets ECN";
                Err(Error::invalid("traffic_class", format_args!("{class:#04x}"), expected))
            }
            _ => Ok(()),
        }
    }
}

/// Private data must fit in its message.
pub(crate) fn check_private_data(data: &[u8], most: usize) -> Result<(), Error> {
    if data.len() <= most {
        return Ok(());
    }
    Err(Error::invalid("private_data", format_args!("{} bytes", data.len()), format!("at most {most} bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::REQ_PRIVATE;

    #[test]
    fn durations_become_exponents() {
        let default = ConnectionParameters::default();
        assert_eq!(default.patience().as_millis(), 68_719);
        let brief = default.cm_timeout_at_least(Duration::from_millis(100)).timeout_at_least(Duration::ZERO);
        assert_eq!((brief.cm_timeout, brief.timeout), (15, 1));
        let brief = brief.cm_timeout_at_least(Duration::ZERO).timeout_at_least(Duration::from_millis(500));
        assert_eq!((brief.cm_timeout, brief.timeout, brief.ack_timeout().as_millis()), (0, 17, 536));
        assert!(brief.check(REQ_PRIVATE).is_ok());
    }
}
