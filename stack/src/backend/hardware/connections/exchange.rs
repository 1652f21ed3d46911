//! A connection, from its setup to its end, or the search for a datagram service.

use std::net::SocketAddr;
use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_driver::rnic::ConnectionId;

use super::KERNEL_PATIENCE;
use crate::cm::{CmChannel, ConnectionParameters, Listener, PrivateData};
use crate::verbs::{Qp, QpType};

pub(super) struct Exchange {
    /// The kernel's identifier; dropping it ends the exchange there.
    pub(super) card: Option<ConnectionId>,
    pub(super) stage: Stage,
    pub(super) qp: Option<Qp>,
    pub(super) qp_type: QpType,
    pub(super) peer: SocketAddr,
    pub(super) listener: Option<Listener>,
    pub(super) channel: Option<CmChannel>,
    pub(super) terms: Proposal,
    /// How long the peer is asked; `None` for the kernel's limit.
    pub(super) patience: Option<Duration>,
    /// The end of that time, once it has started.
    pub(super) deadline: Option<Nanos>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The kernel is resolving the next hop.
    FindingAddress,
    FindingRoute,
    /// The peer has been sent the request.
    Asked,
    /// The application has the request.
    Requested,
    /// The peer has been sent the acceptance.
    Accepted,
    Established,
    /// The peer is being notified of the end.
    Ending,
    Timewait,
}

/// The parameters of a request, with its private data until it is sent.
#[derive(Clone, Copy)]
pub(super) struct Proposal {
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
    pub(super) private_data: PrivateData,
}

impl Exchange {
    /// An exchange that starts here; without a queue pair it is a search.
    pub(super) fn asking(
        qp: Option<Qp>,
        peer: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Exchange {
        let ConnectionParameters { responder_resources, initiator_depth, retry_count, rnr_retry, .. } =
            *parameters;
        let private_data = PrivateData::new(parameters.private_data);
        Exchange {
            card: None,
            stage: Stage::FindingAddress,
            qp,
            qp_type: if qp.is_some() { QpType::Rc } else { QpType::Ud },
            peer,
            listener: None,
            channel: parameters.channel,
            terms: Proposal { responder_resources, initiator_depth, retry_count, rnr_retry, private_data },
            patience: Some(parameters.patience()).filter(|patience| *patience < KERNEL_PATIENCE),
            deadline: None,
        }
    }

    /// Whether the application waits for its result.
    pub(super) fn is_attempt(&self) -> bool {
        matches!(self.stage, Stage::FindingAddress | Stage::FindingRoute | Stage::Asked)
    }
}
