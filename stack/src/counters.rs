use std::fmt;

use ferroce_wire::ParseError;

/// What is counted. Names are those of rdma's hw_counters (`mlx5_ib`, `rdma_rxe`) where one exists;
/// a packet that is dropped is counted under the reason, and is no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
#[non_exhaustive]
pub enum Counter {
    /// Packets sent.
    SentPkts,
    /// Packets received that parsed, ICRC included.
    RcvdPkts,
    /// Requests with a PSN that was executed before.
    DuplicateRequest,
    /// Requests with a PSN beyond the expected one.
    OutOfSequence,
    /// Sequence error NAKs received.
    PacketSeqErr,
    /// Losses that a later response gave away.
    ImpliedNakSeqErr,
    /// ACK timers that ran out.
    LocalAckTimeoutErr,
    /// RNR NAKs received.
    RcvdRnrErr,
    /// RNR NAKs sent.
    SendRnrErr,
    /// Work requests that ran out of retries.
    RetryExceededErr,
    /// Work requests that ran out of RNR retries.
    RnrNakRetryErr,
    /// Request packets that were sent again.
    RetransmittedPkts,
    /// Responses that answer nothing outstanding.
    StaleResponse,
    /// NAK and reserved syndromes that are ignored.
    IgnoredSyndrome,
    /// Requests refused with NAK invalid request.
    RespInvalidRequest,
    /// Requests refused with NAK remote access error.
    RespRemoteAccessErrors,
    /// Requests refused with NAK remote operational error.
    RespRemoteOperationalErrors,
    /// Work requests that a peer refused.
    ReqRemoteErrors,
    /// Completions that found their CQ full.
    CqOverflow,
    /// Events that found the event queue full.
    EventOverflow,
    /// Dropped: wrong ICRC.
    RxIcrcEncapsulated,
    /// Dropped: not RoCE.
    RxNotRoce,
    /// Dropped: truncated, or lengths that contradict each other.
    RxLengthErrors,
    /// Dropped: fragments, IP options, wrong IP version.
    RxIpErrors,
    /// Dropped: an opcode that does not exist.
    RxUnknownOpcode,
    /// Dropped: transport header version.
    RxTransportVersion,
    /// Dropped: RoCE v1 while it is off.
    RxRoceV1Off,
    /// Dropped: no such queue pair.
    RxUnknownQp,
    /// Dropped: the opcode is of another service than the queue pair.
    RxWrongService,
    /// Dropped: the queue pair's state takes no such packet.
    RxWrongState,
    /// Dropped: not from the queue pair's peer, or not to its address.
    RxWrongAddress,
    /// Dropped: partition key.
    RxPkeyMismatch,
    /// Dropped: duplicate READs and atomics that are not remembered.
    RxForgottenDuplicate,
    /// Dropped: packets of UC messages that are not whole.
    RxIncomplete,
    /// Dropped: UC and UD messages without a receive for them. (For RC see `SendRnrErr`.)
    OutOfBuffer,
    /// Dropped: UC and UD packets that are malformed or not allowed.
    RxInvalidRequest,
    /// Dropped: requests that name memory which they may not reach (UC; RC as configured).
    RxAccessErrors,
    /// Dropped: UD packets with another Q_Key.
    RxQkeyMismatch,
    /// Dropped: UD messages longer than the receive.
    RxTooLong,
    /// Not sent: UD messages longer than a packet.
    TxTooLong,
    /// Dropped: congestion notifications; they will be counted as `rp_cnp_handled` once obeyed.
    RxCnpIgnored,
}

const NAMES: [(Counter, &str); 41] = [
    (Counter::SentPkts, "sent_pkts"),
    (Counter::RcvdPkts, "rcvd_pkts"),
    (Counter::DuplicateRequest, "duplicate_request"),
    (Counter::OutOfSequence, "out_of_sequence"),
    (Counter::PacketSeqErr, "packet_seq_err"),
    (Counter::ImpliedNakSeqErr, "implied_nak_seq_err"),
    (Counter::LocalAckTimeoutErr, "local_ack_timeout_err"),
    (Counter::RcvdRnrErr, "rcvd_rnr_err"),
    (Counter::SendRnrErr, "send_rnr_err"),
    (Counter::RetryExceededErr, "retry_exceeded_err"),
    (Counter::RnrNakRetryErr, "rnr_nak_retry_err"),
    (Counter::RetransmittedPkts, "retransmitted_pkts"),
    (Counter::StaleResponse, "stale_response"),
    (Counter::IgnoredSyndrome, "ignored_syndrome"),
    (Counter::RespInvalidRequest, "resp_remote_invalid_request"),
    (Counter::RespRemoteAccessErrors, "resp_remote_access_errors"),
    (Counter::RespRemoteOperationalErrors, "resp_remote_operation_errors"),
    (Counter::ReqRemoteErrors, "req_remote_errors"),
    (Counter::CqOverflow, "cq_overflow"),
    (Counter::EventOverflow, "event_overflow"),
    (Counter::RxIcrcEncapsulated, "rx_icrc_encapsulated"),
    (Counter::RxNotRoce, "rx_not_roce"),
    (Counter::RxLengthErrors, "rx_length_errors"),
    (Counter::RxIpErrors, "rx_ip_errors"),
    (Counter::RxUnknownOpcode, "rx_unknown_opcode"),
    (Counter::RxTransportVersion, "rx_transport_version"),
    (Counter::RxRoceV1Off, "rx_roce_v1_off"),
    (Counter::RxUnknownQp, "rx_unknown_qp"),
    (Counter::RxWrongService, "rx_wrong_service"),
    (Counter::RxWrongState, "rx_wrong_state"),
    (Counter::RxWrongAddress, "rx_wrong_address"),
    (Counter::RxPkeyMismatch, "rx_pkey_mismatch"),
    (Counter::RxForgottenDuplicate, "rx_forgotten_duplicate"),
    (Counter::RxIncomplete, "rx_incomplete"),
    (Counter::OutOfBuffer, "out_of_buffer"),
    (Counter::RxInvalidRequest, "rx_invalid_request"),
    (Counter::RxAccessErrors, "rx_access_errors"),
    (Counter::RxQkeyMismatch, "rx_qkey_mismatch"),
    (Counter::RxTooLong, "rx_too_long"),
    (Counter::TxTooLong, "tx_too_long"),
    (Counter::RxCnpIgnored, "rx_cnp_ignored"),
];

impl Counter {
    /// All of them, in order.
    pub fn all() -> impl Iterator<Item = Counter> {
        NAMES.iter().map(|(counter, _)| *counter)
    }

    /// The name.
    pub fn name(self) -> &'static str {
        NAMES[self as usize].1
    }

    pub(crate) fn of(error: &ParseError) -> Counter {
        match error {
            ParseError::Icrc { .. } => Counter::RxIcrcEncapsulated,
            ParseError::NotRoce => Counter::RxNotRoce,
            ParseError::Opcode(_) => Counter::RxUnknownOpcode,
            ParseError::TransportVersion(_) => Counter::RxTransportVersion,
            ParseError::Fragment | ParseError::IpOptions(_) | ParseError::IpVersion(_) => Counter::RxIpErrors,
            _ => Counter::RxLengthErrors,
        }
    }
}

/// The counters of a context, since it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    values: [u64; NAMES.len()],
}

impl Default for Counters {
    fn default() -> Counters {
        Counters { values: [0; NAMES.len()] }
    }
}

impl Counters {
    /// The value of one.
    pub fn value(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// All, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        NAMES.iter().zip(&self.values).map(|((_, name), value)| (*name, *value))
    }

    pub(crate) fn count(&mut self, counter: Counter) {
        self.values[counter as usize] += 1;
    }
}

impl fmt::Display for Counters {
    /// One line for each counter that is not zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.iter().filter(|(_, value)| *value > 0) {
            writeln!(f, "{name:32} {value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_at_their_counters() {
        for (index, (counter, name)) in NAMES.iter().enumerate() {
            assert_eq!(*counter as usize, index, "{name}");
        }
    }
}
