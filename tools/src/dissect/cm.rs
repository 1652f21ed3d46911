//! The report on a message of the connection manager.

use std::fmt;
use std::net::IpAddr;

use ferroce_wire::cm::{CmBody, CmMessage, IpCm};
use serde::Serialize;

/// A message of the connection manager.
#[derive(Default, Serialize)]
pub(super) struct CmFields {
    message: &'static str,
    transaction_id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) local_comm_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remote_comm_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) qpn: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    starting_psn: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    responder_resources: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    initiator_depth: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    qkey: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The addresses in the IP-CM header, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<IpAddr>,
}

impl CmFields {
    pub(super) fn new(message: &CmMessage<'_>) -> CmFields {
        let base = CmFields {
            message: message.body.name(),
            transaction_id: message.transaction_id,
            ..CmFields::default()
        };
        let ids = |local: u32, remote: u32| CmFields {
            local_comm_id: Some(local),
            remote_comm_id: Some(remote),
            message: base.message,
            transaction_id: base.transaction_id,
            ..CmFields::default()
        };
        match message.body {
            CmBody::Req(req) => CmFields {
                local_comm_id: Some(req.local_comm_id()),
                service_id: Some(req.service_id()),
                qpn: Some(req.qpn().value()),
                starting_psn: Some(req.starting_psn().value()),
                path_mtu: req.path_mtu().map(|mtu| mtu.bytes()),
                responder_resources: Some(req.responder_resources()),
                initiator_depth: Some(req.initiator_depth()),
                ..base
            }
            .with_ip_cm(&req.private_data),
            CmBody::Rep(rep) => CmFields {
                qpn: Some(rep.qpn().value()),
                starting_psn: Some(rep.starting_psn().value()),
                responder_resources: Some(rep.responder_resources()),
                initiator_depth: Some(rep.initiator_depth()),
                ..ids(rep.local_comm_id(), rep.remote_comm_id())
            },
            CmBody::Rej(rej) => CmFields {
                reason: Some(rej.reason().to_string()),
                ..ids(rej.local_comm_id(), rej.remote_comm_id())
            },
            CmBody::Dreq(dreq) => CmFields {
                qpn: Some(dreq.remote_qpn().value()),
                ..ids(dreq.local_comm_id(), dreq.remote_comm_id())
            },
            CmBody::SidrReq(request) => CmFields {
                request_id: Some(request.request_id()),
                service_id: Some(request.service_id()),
                ..base
            }
            .with_ip_cm(&request.private_data),
            CmBody::SidrRep(reply) => CmFields {
                request_id: Some(reply.request_id()),
                service_id: Some(reply.service_id()),
                qpn: Some(reply.qpn().value()),
                qkey: Some(reply.qkey()),
                status: Some(reply.status()),
                ..base
            },
            CmBody::Mra(mra) => ids(mra.local_comm_id(), mra.remote_comm_id()),
            CmBody::Rtu(rtu) => ids(rtu.local_comm_id(), rtu.remote_comm_id()),
            CmBody::Drep(drep) => ids(drep.local_comm_id(), drep.remote_comm_id()),
            CmBody::Lap(lap) => CmFields {
                qpn: Some(lap.remote_qpn().value()),
                ..ids(lap.local_comm_id(), lap.remote_comm_id())
            },
            CmBody::Apr(apr) => {
                CmFields { status: Some(apr.status()), ..ids(apr.local_comm_id(), apr.remote_comm_id()) }
            }
        }
    }

    /// The sender's queue pair, which a REQ and a REP name, and its first PSN.
    pub(super) fn own_qpn(&self) -> Option<u32> {
        self.qpn.filter(|_| self.starting_psn.is_some())
    }

    fn with_ip_cm(mut self, private_data: &[u8]) -> CmFields {
        if let Ok(ip) = IpCm::parse(private_data) {
            self.source = Some(ip.source);
            self.source_port = Some(ip.source_port);
            self.destination = Some(ip.destination);
        }
        self
    }
}

impl fmt::Display for CmFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CM {} tid {:#x}", self.message, self.transaction_id)?;
        let numbers = [
            ("local id", self.local_comm_id),
            ("remote id", self.remote_comm_id),
            ("request id", self.request_id),
            ("qp", self.qpn),
            ("psn", self.starting_psn),
            ("qkey", self.qkey),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                write!(f, " {name} {value:#x}")?;
            }
        }
        if let Some(service) = self.service_id {
            write!(f, " service {service:#018x}")?;
        }
        if let Some(mtu) = self.path_mtu {
            write!(f, " mtu {mtu}")?;
        }
        if let (Some(resources), Some(depth)) = (self.responder_resources, self.initiator_depth) {
            write!(f, " resources {resources} depth {depth}")?;
        }
        if let Some(status) = self.status {
            write!(f, " status {status}")?;
        }
        if let Some(reason) = &self.reason {
            write!(f, " ({reason})")?;
        }
        match (self.source, self.source_port, self.destination) {
            (Some(source), Some(port), Some(destination)) => {
                write!(f, " {source} port {port} > {destination}")
            }
            _ => Ok(()),
        }
    }
}
