//! The messages of the connection manager between two hosts, judged by whether they are consistent. They have a
//! connection's attributes, and are not played.

use std::collections::HashMap;
use std::rc::Rc;

use ferroce::wire::cm::{CmBody, CmMessage, IpCm, SERVICE_ID_TCP, SERVICE_ID_UDP};
use ferroce::wire::{MAD_LEN, MadHeader, Opcode};
use ferroce::{Gid, Qpn};

use super::packet::Seen;
use super::rule::{Finding, Rule, Weight};

/// The packets of QP1 between two hosts.
#[derive(Debug)]
pub(super) struct Exchange {
    pub(super) hosts: [Gid; 2],
    messages: Vec<Rc<Seen>>,
}

/// The results for one host.
#[derive(Debug, Default)]
pub(super) struct Judged {
    pub(super) findings: Vec<Finding>,
    /// The number of messages of each kind, in the order of the first ones.
    pub(super) said: Vec<(&'static str, u64)>,
}

/// A request, by sender and communication ID.
struct Asked {
    transaction_id: u64,
    by: Gid,
    mad: Vec<u8>,
}

/// The private Q_Key of QP1 (docs/protocol.md §1).
const GSI_QKEY: u32 = 0x8001_0000;
/// A port is the last 16 bits of the service id.
const PORT_BITS: u64 = 0xffff;

impl Exchange {
    /// All exchanges of a capture, by pair of hosts.
    pub(super) fn find(packets: &[Rc<Seen>]) -> Vec<Exchange> {
        let mut found: Vec<Exchange> = Vec::new();
        let mut by_hosts: HashMap<[Gid; 2], usize> = HashMap::new();
        for packet in packets.iter().filter(|packet| packet.bth.dest_qpn() == Qpn::GSI && is_cm(packet)) {
            let hosts = [packet.network.source, packet.network.destination];
            let mut sorted = hosts;
            sorted.sort_by_key(|host| host.0);
            let index = *by_hosts.entry(sorted).or_insert_with(|| {
                found.push(Exchange { hosts, messages: Vec::new() });
                found.len() - 1
            });
            found[index].messages.push(Rc::clone(packet));
        }
        found
    }

    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// The number of undamaged messages.
    pub(super) fn judged(&self) -> usize {
        self.messages.iter().filter(|message| message.icrc_is_right).count()
    }

    /// Judges both hosts, in order.
    pub(super) fn judge(&self) -> [Judged; 2] {
        let mut judged = [Judged::default(), Judged::default()];
        let mut requests: HashMap<(Gid, u32), Asked> = HashMap::new();
        let mut ends: HashMap<(Gid, u32), Asked> = HashMap::new();
        for packet in &self.messages {
            let judged = &mut judged[usize::from(packet.network.source != self.hosts[0])];
            if !packet.icrc_is_right {
                continue; // no receiver sees it
            }
            shape(packet, judged);
            let message = match CmMessage::parse(&packet.payload) {
                Ok(message) => message,
                Err(error) => {
                    judged.fault(
                        Rule::CmMessage,
                        packet,
                        format!("no message of the connection manager: {error}"),
                    );
                    continue;
                }
            };
            judged.count(message.body.name());
            let (here, there) = (packet.network.source, packet.network.destination);
            let transaction_id = message.transaction_id;
            let asked = || Asked { transaction_id, by: here, mad: packet.payload.clone() };
            match message.body {
                CmBody::Req(req) => {
                    addresses(packet, req.service_id(), &req.private_data, judged);
                    repeated(&requests, (here, req.local_comm_id()), packet, transaction_id, judged);
                    requests.insert((here, req.local_comm_id()), asked());
                }
                CmBody::SidrReq(req) => {
                    addresses(packet, req.service_id(), &req.private_data, judged);
                    repeated(&requests, (here, req.request_id()), packet, transaction_id, judged);
                    requests.insert((here, req.request_id()), asked());
                }
                CmBody::Rep(rep) => {
                    answers(&requests, (there, rep.remote_comm_id()), packet, transaction_id, judged);
                    if !rep.qpn().is_ordinary() {
                        judged.fault(Rule::CmMessage, packet, format!("a REP with queue pair {}", rep.qpn()));
                    }
                }
                CmBody::SidrRep(rep) => {
                    answers(&requests, (there, rep.request_id()), packet, transaction_id, judged);
                }
                CmBody::Dreq(dreq) => {
                    ends.insert((here, dreq.local_comm_id()), asked());
                }
                CmBody::Drep(drep) => {
                    answers(&ends, (there, drep.remote_comm_id()), packet, transaction_id, judged);
                }
                // A REJ may also answer a REP, an MRA a DREQ: they name the ID of either end.
                _ => {}
            }
        }
        judged
    }
}

impl Judged {
    fn fault(&mut self, rule: Rule, packet: &Seen, text: String) {
        self.findings.push(Finding { rule, weight: Weight::Violation, frame: packet.frame, text });
    }

    fn count(&mut self, name: &'static str) {
        match self.said.iter_mut().find(|(said, _)| *said == name) {
            Some((_, count)) => *count += 1,
            None => self.said.push((name, 1)),
        }
    }
}

/// Whether it belongs to the connection manager, and not to another management class.
fn is_cm(packet: &Seen) -> bool {
    packet.payload.get(1) == Some(&MadHeader::CLASS_CM)
}

/// Checks the common part of messages on QP1 (docs/protocol.md §2, GMP).
fn shape(packet: &Seen, judged: &mut Judged) {
    let deth = packet.extensions.deth.map(|deth| (deth.qkey(), deth.source_qpn()));
    if packet.opcode != Opcode::UD_SEND_ONLY || packet.payload_len() != MAD_LEN {
        let text =
            format!("{} of {} bytes: must be a UD SEND of {MAD_LEN}", packet.opcode, packet.payload_len());
        judged.fault(Rule::CmMessage, packet, text);
    } else if deth != Some((GSI_QKEY, Qpn::GSI)) {
        judged.fault(
            Rule::CmMessage,
            packet,
            format!("Q_Key and queue pair {deth:x?}: must be {GSI_QKEY:#x} and 1"),
        );
    }
}

/// Checks that the addresses in rdma_cm's private data are those of the packet.
fn addresses(packet: &Seen, service_id: u64, private_data: &[u8], judged: &mut Judged) {
    if ![SERVICE_ID_TCP, SERVICE_ID_UDP].contains(&(service_id & !PORT_BITS)) {
        return; // not rdma_cm's: the private data are the application's
    }
    match IpCm::parse(private_data) {
        Err(error) => judged.fault(Rule::CmAddresses, packet, error.to_string()),
        Ok(ip)
            if (Gid::from(ip.source), Gid::from(ip.destination))
                != (packet.network.source, packet.network.destination) =>
        {
            let text = format!("says it goes from {} to {}", ip.source, ip.destination);
            judged.fault(Rule::CmAddresses, packet, text);
        }
        Ok(_) => {}
    }
}

/// Checks that a retransmitted request is identical.
fn repeated(
    requests: &HashMap<(Gid, u32), Asked>,
    key: (Gid, u32),
    packet: &Seen,
    transaction_id: u64,
    judged: &mut Judged,
) {
    if let Some(before) = requests.get(&key)
        && before.transaction_id == transaction_id
        && before.mad != packet.payload
    {
        judged.fault(
            Rule::CmRepeat,
            packet,
            format!("the request {:#010x} comes again with other contents", key.1),
        );
    }
}

/// Checks that the ID and transaction of an answer are those of a request.
fn answers(
    asked: &HashMap<(Gid, u32), Asked>,
    key: (Gid, u32),
    packet: &Seen,
    transaction_id: u64,
    judged: &mut Judged,
) {
    let same = asked.values().find(|asked| asked.by == key.0 && asked.transaction_id == transaction_id);
    match asked.get(&key) {
        Some(request) if request.transaction_id != transaction_id => {
            let text = format!(
                "answers id {:#010x} in transaction {transaction_id:#x}: it was asked in {:#x}",
                key.1, request.transaction_id
            );
            judged.fault(Rule::CmAnswer, packet, text);
        }
        // The request may precede the capture, unless its transaction is known with another ID.
        None if same.is_some() => {
            let text = format!("answers id {:#010x}, which nobody asked with in this transaction", key.1);
            judged.fault(Rule::CmAnswer, packet, text);
        }
        _ => {}
    }
}
