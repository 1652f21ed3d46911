//! Queue pairs that were reset and connected again with the same numbers: finds the boundary between the connections.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use ferroce::wire::{Operation, PayloadRule, Service};
use ferroce::{PathMtu, Psn, RKey};

use super::packet::Seen;
use super::pairing::Flow;

/// The requests of each flow since the start of its connection.
pub(super) struct Courses {
    by_flow: HashMap<Flow, Course>,
    /// The path MTU of a flow, if a full packet shows it.
    path_mtus: HashMap<Flow, PathMtu>,
}

#[derive(Default)]
struct Course {
    /// The PSN after the newest request.
    next: Option<Psn>,
    /// The contents of requests, by PSN.
    contents: HashMap<Psn, u64>,
    /// READs: first PSN, number of PSNs, and rkey.
    reads: Vec<(Psn, u32, RKey)>,
    /// The newest answered PSN.
    answered: Option<Psn>,
    /// The PSN of the previous request, and the length if it is a READ.
    before: Option<(Psn, Option<u32>)>,
}

/// A request this far from the previous one belongs to another connection.
const FAR: u32 = 1 << 20;
/// The most READs that may be in flight.
const READS: usize = 256;

impl Courses {
    pub(super) fn of(packets: &[Rc<Seen>]) -> Courses {
        let mut path_mtus = HashMap::new();
        for packet in packets
            .iter()
            .filter(|packet| packet.opcode.payload() == PayloadRule::Full && packet.icrc_is_right)
        {
            let len = u32::try_from(packet.payload_len()).ok();
            if let Some(mtu) = len.and_then(|len| PathMtu::try_from(len).ok()) {
                path_mtus.entry(flow(packet)).or_insert(mtu);
            }
        }
        Courses { by_flow: HashMap::new(), path_mtus }
    }

    /// Takes the next packet of a flow and returns whether another connection begins with it. `back` is the flow of its
    /// responses.
    pub(super) fn note(&mut self, packet: &Seen, flow: Flow, back: Option<Flow>) -> bool {
        if !packet.icrc_is_right {
            return false;
        }
        if packet.is_response() {
            if let Some(course) =
                back.and_then(|back| self.by_flow.get_mut(&back)).filter(|_| !packet.is_nak())
            {
                let psn = packet.psn();
                course.answered =
                    Some(course.answered.filter(|newest| newest.distance(psn) > 0).unwrap_or(psn));
            }
            return false;
        }
        if !packet.is_request() {
            return false;
        }
        let told = self.path_mtus.get(&flow).or_else(|| self.path_mtus.get(&back?)).copied();
        let course = self.by_flow.entry(flow).or_default();
        let is_another = packet.starts() && course.is_left_by(packet);
        if is_another {
            *course = Course::default();
        }
        course.take(packet, told);
        if is_another {
            back.and_then(|back| self.by_flow.remove(&back));
        }
        is_another
    }
}

impl Course {
    /// Whether the start of a message can't belong to this connection.
    fn is_left_by(&self, packet: &Seen) -> bool {
        let psn = packet.psn();
        if self.next.is_some_and(|next| psn.distance(next).unsigned_abs() > FAR) {
            return true;
        }
        if let Some(before) = self.contents.get(&psn) {
            // A request that was answered is not retransmitted with other contents.
            let is_done = self.answered.is_some_and(|answered| answered.distance(psn) >= 0);
            return *before != contents(packet) && (is_done || packet.service() == Service::Uc);
        }
        // A requester that counts a READ wrongly continues close to it. Another connection starts anywhere.
        if self.before.is_some_and(|(before, read)| is_miscounted(psn.distance(before), read)) {
            return false;
        }
        // The PSNs of a READ's responses are not available to other requests.
        let inside = self.reads.iter().rev().take(READS).find(|(first, count, _)| {
            let behind = psn.distance(*first);
            behind > 0 && (behind as u32) < *count
        });
        inside.is_some_and(|(.., rkey)| match packet.extensions.reth {
            Some(reth) if packet.opcode.operation() == Operation::ReadRequest => reth.rkey() != *rkey,
            _ => true,
        })
    }

    fn take(&mut self, packet: &Seen, path_mtu: Option<PathMtu>) {
        let psn = packet.psn();
        let read = packet.extensions.reth.filter(|_| packet.opcode.operation() == Operation::ReadRequest);
        let mut count = 1;
        if let Some(reth) = read {
            count = path_mtu.unwrap_or(PathMtu::Mtu1024).packets(reth.length());
            // A PSN inside a READ with the largest path MTU is inside it with any path MTU.
            let least = path_mtu.unwrap_or(PathMtu::Mtu4096).packets(reth.length());
            if !self.contents.contains_key(&psn) {
                self.reads.push((psn, least, reth.rkey()));
            }
        }
        self.contents.entry(psn).or_insert_with(|| contents(packet));
        self.before = Some((psn, read.map(|reth| reth.length())));
        let next = psn + count;
        self.next = Some(self.next.filter(|newest| newest.distance(next) > 0).unwrap_or(next));
    }
}

/// Whether a PSN directly follows the previous request, or follows a READ counted with another path MTU or without its
/// last part.
fn is_miscounted(distance: i32, read: Option<u32>) -> bool {
    let is_end = |length: u32, mtu: PathMtu| {
        [mtu.packets(length), length / mtu.bytes()].contains(&distance.unsigned_abs())
    };
    distance == 1
        || distance > 0 && read.is_some_and(|length| PathMtu::ALL.iter().any(|mtu| is_end(length, *mtu)))
}

/// A hash of a request's contents. A resumed READ may request less.
fn contents(packet: &Seen) -> u64 {
    let mut hasher = DefaultHasher::new();
    packet.opcode.hash(&mut hasher);
    match packet.extensions.reth.filter(|_| packet.opcode.operation() == Operation::ReadRequest) {
        Some(reth) => (reth.va(), reth.rkey()).hash(&mut hasher),
        None => (packet.extensions, &packet.payload).hash(&mut hasher),
    }
    hasher.finish()
}

fn flow(packet: &Seen) -> Flow {
    (packet.network.source, packet.network.destination, packet.bth.dest_qpn(), packet.service())
}
