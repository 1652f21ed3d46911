use std::fmt;

use ferroce_wire::ParseError;

use crate::verbs::Event;

/// The origin of a counter's name: the other software that has a counter of this name and meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// The hw_counters of `mlx5_ib`.
    Mlx5,
    /// The hw_counters of `rdma_rxe`, if mlx5 has no such counter.
    Rxe,
    /// The statistics of network interfaces, as `ethtool -S` and `ip -s link` show them.
    Ethtool,
    /// The verbs' asynchronous events.
    Verbs,
    /// No other software counts it.
    Ferroce,
}

/// Makes [`Counter`] and its table from one list: the counter, its name, and the origin of the name; `dropped` marks reasons for
/// dropping a packet. The first line of the documentation is the help text that users see.
macro_rules! counters {
    ($(#[doc = $help:literal] $counter:ident: $name:literal, $origin:ident $(, $dropped:ident)?;)*) => {
        /// The counters. A name has the same meaning as in its [`Origin`]; a dropped packet is counted under the reason, and is
        /// no error.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(usize)]
        #[non_exhaustive]
        pub enum Counter {
            $(#[doc = $help] $counter,)*
        }

        const TABLE: &[Row] = &[
            $(Row {
                counter: Counter::$counter,
                name: $name,
                help: $help.trim_ascii(),
                origin: Origin::$origin,
                is_drop: !stringify!($($dropped)?).is_empty(),
            },)*
        ];
    };
}

counters! {
    /// Packets sent.
    SentPkts: "sent_pkts", Rxe;
    /// Packets received whose format and ICRC are correct.
    RcvdPkts: "rcvd_pkts", Rxe;
    /// SENDs completed.
    RdmaSends: "rdma_sends", Rxe;
    /// SENDs received.
    RdmaRecvs: "rdma_recvs", Rxe;
    /// WRITEs received, counted at their first packet.
    RxWriteRequests: "rx_write_requests", Mlx5;
    /// READs received.
    RxReadRequests: "rx_read_requests", Mlx5;
    /// Compare-and-swaps and fetch-and-adds received.
    RxAtomicRequests: "rx_atomic_requests", Mlx5;
    /// ATOMIC WRITEs received.
    RxAtomicWriteRequests: "rx_atomic_write_requests", Ferroce;
    /// FLUSHes received.
    RxFlushRequests: "rx_flush_requests", Ferroce;
    /// Packets received that a switch has marked: ECN is Congestion Experienced.
    NpEcnMarkedRocePackets: "np_ecn_marked_roce_packets", Mlx5;
    /// Congestion notification packets sent.
    NpCnpSent: "np_cnp_sent", Mlx5;
    /// Congestion notification packets that the congestion control of a queue pair handled.
    RpCnpHandled: "rp_cnp_handled", Mlx5;
    /// Packets with a likely IPv4 ID, computed from the ICRC: a check of 25 bits, not of 32.
    RxIdentificationLikely: "rx_icrc_identification_likely", Ferroce;
    /// Packets with an unlikely IPv4 ID, computed from the ICRC: a check of 16 bits, not of 32.
    RxIdentificationSolved: "rx_icrc_identification_solved", Ferroce;
    /// Request packets retransmitted.
    RetransmittedPkts: "retransmitted_pkts", Ferroce;
    /// Requests with a PSN that was executed before.
    DuplicateRequest: "duplicate_request", Mlx5;
    /// Requests with a PSN beyond the expected one.
    OutOfSequence: "out_of_sequence", Mlx5;
    /// Sequence error NAKs received, one for each gap.
    PacketSeqErr: "packet_seq_err", Mlx5;
    /// Lost responses detected by a later response, one for each gap.
    ImpliedNakSeqErr: "implied_nak_seq_err", Mlx5;
    /// ACK timeouts.
    LocalAckTimeoutErr: "local_ack_timeout_err", Mlx5;
    /// Selective acknowledgements received.
    RcvdSelectiveAck: "rcvd_selective_ack", Ferroce;
    /// RNR NAKs received.
    RnrNakRetryErr: "rnr_nak_retry_err", Mlx5;
    /// RNR NAKs sent.
    SendRnrErr: "send_rnr_err", Rxe;
    /// RNR NAKs not sent, after several for the same packet in a short time.
    NakSuppressed: "nak_suppressed", Ferroce;
    /// Work requests that ran out of retries.
    ReqTransportRetriesExceeded: "req_transport_retries_exceeded", Mlx5;
    /// Work requests that ran out of RNR retries.
    ReqRnrRetriesExceeded: "req_rnr_retries_exceeded", Mlx5;
    /// Responses to no outstanding request.
    StaleResponse: "stale_response", Ferroce;
    /// UD messages not sent: longer than the path MTU.
    TxTooLong: "tx_too_long", Ferroce;
    /// Responses ignored: a reserved syndrome, or a NAK code that RC does not have.
    IgnoredSyndrome: "ignored_syndrome", Ferroce;
    /// Requests refused with NAK invalid request.
    RespInvalidRequest: "resp_remote_invalid_request", Ferroce;
    /// Requests refused with NAK remote access error.
    RespRemoteAccessErrors: "resp_remote_access_errors", Mlx5;
    /// Requests refused with NAK remote operational error.
    RespRemoteOperationalErrors: "resp_remote_operation_errors", Ferroce;
    /// Messages received that are longer than their receive WR.
    RespLocalLengthError: "resp_local_length_error", Mlx5;
    /// Receives completed in error, flushed ones included.
    RespCqeError: "resp_cqe_error", Mlx5;
    /// Receives flushed.
    RespCqeFlushError: "resp_cqe_flush_error", Mlx5;
    /// Work requests that a peer refused as invalid.
    ReqRemoteInvalidRequest: "req_remote_invalid_request", Mlx5;
    /// Work requests refused by a peer with a remote access error.
    ReqRemoteAccessErrors: "req_remote_access_errors", Mlx5;
    /// Work requests failed by a peer with a remote operational error.
    ReqRemoteOperationalErrors: "req_remote_operation_errors", Ferroce;
    /// Sends completed in error, flushed ones included.
    ReqCqeError: "req_cqe_error", Mlx5;
    /// Sends flushed.
    ReqCqeFlushError: "req_cqe_flush_error", Mlx5;
    /// Copies from GPU memory.
    DeviceGathers: "device_gathers", Ferroce;
    /// Copies to GPU memory.
    DeviceScatters: "device_scatters", Ferroce;
    /// Bytes copied from and to GPU memory.
    DeviceBytes: "device_bytes", Ferroce;
    /// Failed copies from and to GPU memory.
    DeviceErrors: "device_errors", Ferroce;
    /// Messages of the connection manager sent.
    CmTxMsgs: "cm_tx_msgs", Ferroce;
    /// Messages of the connection manager retransmitted after a timeout.
    CmTxRetries: "cm_tx_retries", Ferroce;
    /// Requests for connections or services that this end refused.
    CmTxRejects: "cm_tx_rejects", Ferroce;
    /// Messages of the connection manager not sent: too many were waiting for the port.
    CmTxDropped: "cm_tx_dropped", Ferroce;
    /// Messages of the connection manager received.
    CmRxMsgs: "cm_rx_msgs", Ferroce;
    /// Duplicate messages of the connection manager received.
    CmRxDuplicates: "cm_rx_duplicates", Ferroce;
    /// Completions that did not fit into their CQ.
    CqOverflow: "cq_overflow", Ferroce;
    /// Completion events raised.
    EventCompletion: "event_completion", Verbs;
    /// CQ errors raised.
    EventCqErr: "event_cq_err", Verbs;
    /// Fatal errors of queue pairs raised.
    EventQpFatal: "event_qp_fatal", Verbs;
    /// Queue pairs and address handles without a next hop, raised as events.
    EventUnreachable: "event_unreachable", Ferroce;
    /// Invalid requests of peers raised as events.
    EventQpReqErr: "event_qp_req_err", Verbs;
    /// Access violations of peers raised as events.
    EventQpAccessErr: "event_qp_access_err", Verbs;
    /// First packets received in RTR, raised as events.
    EventCommEst: "event_comm_est", Verbs;
    /// Drained send queues raised as events.
    EventSqDrained: "event_sq_drained", Verbs;
    /// Failed queue pairs that use no more receives of their SRQ, raised as events.
    EventQpLastWqeReached: "event_qp_last_wqe_reached", Verbs;
    /// SRQs below their limit, raised as events.
    EventSrqLimitReached: "event_srq_limit_reached", Verbs;
    /// RNICs that failed or were removed, raised as events.
    EventDeviceFatal: "event_device_fatal", Verbs;
    /// Packets and requests of other partitions, raised as events.
    EventPkeyViolation: "event_pkey_violation", Ferroce;
    /// Dropped: no receive was posted for the message.
    OutOfBuffer: "out_of_buffer", Mlx5, dropped;
    /// Dropped: wrong ICRC.
    RxIcrcEncapsulated: "rx_icrc_encapsulated", Mlx5, dropped;
    /// Dropped: not RoCE.
    RxNotRoce: "rx_not_roce", Ferroce, dropped;
    /// Dropped: truncated, or lengths that contradict each other.
    RxLengthErrors: "rx_length_errors", Ethtool, dropped;
    /// Dropped: fragments, IP options, wrong IP version.
    RxIpErrors: "rx_ip_errors", Ferroce, dropped;
    /// Dropped: an opcode that does not exist.
    RxUnknownOpcode: "rx_unknown_opcode", Ferroce, dropped;
    /// Dropped: unknown transport header version.
    RxTransportVersion: "rx_transport_version", Ferroce, dropped;
    /// Dropped: RoCE v1 while it is off.
    RxRoceV1Off: "rx_roce_v1_off", Ferroce, dropped;
    /// Dropped: no such queue pair.
    RxUnknownQp: "rx_unknown_qp", Ferroce, dropped;
    /// Dropped: the opcode is of another service than the queue pair.
    RxWrongService: "rx_wrong_service", Ferroce, dropped;
    /// Dropped: not allowed in the state of the queue pair.
    RxWrongState: "rx_wrong_state", Ferroce, dropped;
    /// Dropped: not from the queue pair's peer, or not to its address.
    RxWrongAddress: "rx_wrong_address", Ferroce, dropped;
    /// Dropped: another P_Key.
    RxPkeyMismatch: "rx_pkey_mismatch", Ferroce, dropped;
    /// Dropped: duplicate READs and atomics that can't be answered any more.
    RxForgottenDuplicate: "rx_forgotten_duplicate", Ferroce, dropped;
    /// Dropped: requests out of order, and the reorder buffer was full.
    RxReorderFull: "rx_reorder_full", Ferroce, dropped;
    /// Dropped: packets to GPU memory, and no staging chunk was free.
    RxStagingFull: "rx_staging_full", Ferroce, dropped;
    /// Dropped: packets of incomplete UC messages.
    RxIncomplete: "rx_incomplete", Ferroce, dropped;
    /// Dropped: UC and UD packets that are malformed or not allowed.
    RxInvalidRequest: "rx_invalid_request", Ferroce, dropped;
    /// Dropped: requests with an access error (UC; RC with drop_access_errors).
    RxAccessErrors: "rx_access_errors", Ferroce, dropped;
    /// Dropped: UD packets with another Q_Key.
    RxQkeyMismatch: "rx_qkey_mismatch", Ferroce, dropped;
    /// Dropped: packets to QP 1 that are no message of the connection manager.
    RxMadErrors: "rx_mad_errors", Ferroce, dropped;
    /// Dropped: requests of the connection manager: too many are pending.
    CmRxNoRoom: "cm_rx_no_room", Ferroce, dropped;
    /// Dropped: connection manager messages for no known connection, or not from its peer.
    CmRxUnknown: "cm_rx_unknown", Ferroce, dropped;
    /// Dropped: UD messages longer than the receive.
    RxTooLong: "rx_too_long", Ferroce, dropped;
    /// Dropped: congestion notifications to a queue pair without congestion control.
    RpCnpIgnored: "rp_cnp_ignored", Mlx5, dropped;
}

struct Row {
    counter: Counter,
    name: &'static str,
    help: &'static str,
    origin: Origin,
    is_drop: bool,
}

impl Counter {
    /// All of them, in order.
    pub fn all() -> impl Iterator<Item = Counter> {
        TABLE.iter().map(|row| row.counter)
    }

    /// The name.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Its help text, one sentence.
    pub fn help(self) -> &'static str {
        self.row().help
    }

    /// The origin of its name.
    pub fn origin(self) -> Origin {
        self.row().origin
    }

    /// Whether each count is a received packet that was dropped.
    pub fn is_drop(self) -> bool {
        self.row().is_drop
    }

    fn row(self) -> &'static Row {
        &TABLE[self as usize]
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

    pub(crate) fn of_event(event: &Event) -> Counter {
        match event {
            Event::Completion(_) => Counter::EventCompletion,
            Event::CqErr(_) => Counter::EventCqErr,
            Event::QpFatal(_) => Counter::EventQpFatal,
            Event::QpUnreachable { .. } | Event::AhUnreachable { .. } => Counter::EventUnreachable,
            Event::QpReqErr(_) => Counter::EventQpReqErr,
            Event::QpAccessErr(_) => Counter::EventQpAccessErr,
            Event::CommEst(_) => Counter::EventCommEst,
            Event::SqDrained(_) => Counter::EventSqDrained,
            Event::QpLastWqeReached(_) => Counter::EventQpLastWqeReached,
            Event::SrqLimitReached(_) => Counter::EventSrqLimitReached,
            Event::DeviceFatal => Counter::EventDeviceFatal,
            Event::PkeyViolation { .. } => Counter::EventPkeyViolation,
        }
    }
}

/// The counters of a context, since it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    values: [u64; TABLE.len()],
}

impl Default for Counters {
    fn default() -> Counters {
        Counters { values: [0; TABLE.len()] }
    }
}

impl Counters {
    /// The value of a counter.
    pub fn value(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// All counters, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        TABLE.iter().zip(&self.values).map(|(row, value)| (row.name, *value))
    }

    /// The reasons for drops, with their counts.
    pub fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Counter::all()
            .filter(|counter| counter.is_drop())
            .map(|counter| (counter.name(), self.value(counter)))
    }

    /// Sets a count kept by other software.
    pub(crate) fn set(&mut self, counter: Counter, value: u64) {
        self.values[counter as usize] = value;
    }

    pub(crate) fn count(&mut self, counter: Counter) {
        self.count_if(true, counter);
    }

    /// Counts without a branch.
    pub(crate) fn count_if(&mut self, condition: bool, counter: Counter) {
        self.values[counter as usize] += u64::from(condition);
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
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_have_help_texts() {
        let names: HashSet<&str> = Counter::all().map(Counter::name).collect();
        assert_eq!(names.len(), TABLE.len());
        for counter in Counter::all() {
            let (name, help) = (counter.name(), counter.help());
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
            assert!(help.ends_with('.') && help.len() < 90, "{name}: {help}");
            assert_eq!(help.starts_with("Dropped: "), counter.is_drop(), "{name}: {help}");
        }
    }

    /// A name of other software must exist there exactly.
    #[test]
    fn names_of_other_software_exist_there() {
        const MLX5: &[&str] = &[
            "rx_write_requests",
            "rx_read_requests",
            "rx_atomic_requests",
            "out_of_buffer",
            "out_of_sequence",
            "duplicate_request",
            "rnr_nak_retry_err",
            "packet_seq_err",
            "implied_nak_seq_err",
            "local_ack_timeout_err",
            "rp_cnp_ignored",
            "rp_cnp_handled",
            "np_ecn_marked_roce_packets",
            "np_cnp_sent",
            "resp_local_length_error",
            "resp_cqe_error",
            "req_cqe_error",
            "req_remote_invalid_request",
            "req_remote_access_errors",
            "resp_remote_access_errors",
            "resp_cqe_flush_error",
            "req_cqe_flush_error",
            "req_transport_retries_exceeded",
            "req_rnr_retries_exceeded",
            "rx_icrc_encapsulated",
        ];
        const RXE: &[&str] = &["sent_pkts", "rcvd_pkts", "send_rnr_err", "rdma_sends", "rdma_recvs"];
        for counter in Counter::all() {
            let name = counter.name();
            let is_borrowed = MLX5.contains(&name) || RXE.contains(&name);
            match counter.origin() {
                Origin::Mlx5 => assert!(MLX5.contains(&name), "{name}"),
                Origin::Rxe => assert!(RXE.contains(&name), "{name}"),
                Origin::Ethtool => assert_eq!(name, "rx_length_errors"),
                Origin::Verbs => assert!(name.starts_with("event_"), "{name}"),
                Origin::Ferroce => assert!(!is_borrowed, "{name}"),
            }
        }
    }
}
