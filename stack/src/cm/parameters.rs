//! What the ends of a connection ask for.

use std::time::Duration;

use ferroce_wire::PathMtu;

use super::CmChannel;
#[cfg(doc)]
use super::CmEvent;
use crate::verbs::{Error, MAX_RD_ATOMIC, exponent_of, time_of};

/// How many requests wait at a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenConfig {
    /// Requests that nobody has accepted or rejected yet; more are rejected.
    pub backlog: u32,
    /// The same from one address, so that one peer does not take all of it.
    pub per_source: u32,
    /// Only requests for this partition, by the index of its P_Key in the port's table; `None` for all.
    pub pkey_index: Option<usize>,
    /// Where requests are told, and what becomes of those connections; `None` for
    /// [`next_cm_event`](crate::Context::next_cm_event).
    pub channel: Option<CmChannel>,
}

impl Default for ListenConfig {
    /// 128 requests, 64 from one address, of any partition.
    fn default() -> ListenConfig {
        ListenConfig { backlog: 128, per_source: 64, pkey_index: None, channel: None }
    }
}

/// What an end of a connection asks for, or offers.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionParameters<'a> {
    /// The application's bytes for the other end: at most 56 with a request, 196 with an acceptance.
    pub private_data: &'a [u8],
    /// READs and atomics that the peer may have outstanding here, at most 128. What is agreed on is the
    /// smaller of this and the peer's `initiator_depth`.
    pub responder_resources: u8,
    /// READs and atomics of this end outstanding at the peer; likewise.
    pub initiator_depth: u8,
    /// Retries after timeouts and sequence errors, 0 to 7. Both ends take the requester's.
    pub retry_count: u8,
    /// Retries of the peer after RNR NAKs of this end, 0 to 7. 7 means without end.
    pub rnr_retry: u8,
    /// ACK timeout of both ends, 4.096 µs · 2^timeout, 1 to 31. The requester's is taken. The accepting end uses 21
    /// (8.6 s) if the requester asks for 0 or for more than 21.
    /// [`with_ack_timeout`](ConnectionParameters::with_ack_timeout) takes a `Duration`.
    pub timeout: u8,
    /// The requester's choice; `None` for the largest that the interface allows.
    pub path_mtu: Option<PathMtu>,
    /// The requester's choice of a partition, by the index of its P_Key in the port's table. `None` for
    /// that of the queue pair; for a search, which has none, the first. Both ends' queue pairs get it.
    pub pkey_index: Option<usize>,
    /// How long a message of the connection manager waits for its answer, 4.096 µs · 2^cm_timeout, up to 31.
    /// [`with_cm_timeout`](ConnectionParameters::with_cm_timeout) takes a `Duration`.
    pub cm_timeout: u8,
    /// How often such a message is sent again, 0 to 15.
    pub cm_retries: u8,
    /// Where the events of this connection or search are told. `None` for
    /// [`next_cm_event`](crate::Context::next_cm_event); with `accept` for where they were told so far.
    pub channel: Option<CmChannel>,
}

impl Default for ConnectionParameters<'_> {
    /// As rdma_cm does: 16 READs and atomics, 7 retries, an ACK timeout of 0.5 s, 15 resends 4.3 s apart. So a
    /// `connect` to who neither answers nor is refused by the network ends after 69 s, [`CmEvent::Unreachable`],
    /// and 3 resends would end it after 17 s ([`patience`](ConnectionParameters::patience)).
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
            cm_timeout: 20,
            cm_retries: 15,
            channel: None,
        }
    }
}

impl ConnectionParameters<'_> {
    /// With the shortest ACK timeout that is no shorter than `time`: 8.2 µs to 2.4 h, each twice the one before.
    pub fn with_ack_timeout(self, time: Duration) -> Self {
        ConnectionParameters { timeout: exponent_of(time).max(1), ..self }
    }

    /// With the shortest time for an answer that is no shorter than `time`: 4.1 µs to 2.4 h, each twice the one
    /// before.
    pub fn with_cm_timeout(self, time: Duration) -> Self {
        let exponent = if time <= time_of(0) { 0 } else { exponent_of(time) };
        ConnectionParameters { cm_timeout: exponent, ..self }
    }

    /// The ACK timeout of both ends.
    pub fn ack_timeout(&self) -> Duration {
        time_of(self.timeout)
    }

    /// How long a peer that does not answer is asked, resends included.
    pub fn patience(&self) -> Duration {
        time_of(self.cm_timeout) * (u32::from(self.cm_retries) + 1)
    }

    /// Fails on the first that is out of its range.
    pub(crate) fn check(&self, private_data_max: usize) -> Result<(), Error> {
        let length = self.private_data.len();
        let numbers = [
            ("private_data", length, 0, private_data_max),
            ("responder_resources", self.responder_resources.into(), 0, MAX_RD_ATOMIC.into()),
            ("initiator_depth", self.initiator_depth.into(), 0, MAX_RD_ATOMIC.into()),
            ("retry_count", self.retry_count.into(), 0, 7),
            ("rnr_retry", self.rnr_retry.into(), 0, 7),
            ("timeout", self.timeout.into(), 1, 31),
            ("cm_timeout", self.cm_timeout.into(), 0, 31),
            ("cm_retries", self.cm_retries.into(), 0, 15),
        ];
        for (attribute, value, least, most) in numbers {
            if value < least || value > most {
                return Err(Error::invalid(attribute, value, format!("{least} to {most}")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::REQ_PRIVATE;

    #[test]
    fn durations_become_exponents() {
        let default = ConnectionParameters::default();
        assert_eq!(default.patience().as_millis(), 68_719);
        let brief = default.with_cm_timeout(Duration::from_millis(100)).with_ack_timeout(Duration::ZERO);
        assert_eq!((brief.cm_timeout, brief.timeout), (15, 1));
        let brief = brief.with_cm_timeout(Duration::ZERO).with_ack_timeout(Duration::from_millis(500));
        assert_eq!((brief.cm_timeout, brief.timeout, brief.ack_timeout().as_millis()), (0, 17, 536));
        assert!(brief.check(REQ_PRIVATE).is_ok());
    }
}
