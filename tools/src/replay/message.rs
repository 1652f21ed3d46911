//! The work requests of an application, inferred from their packets.

use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

use ferroce::wire::{Operation, Position, Service};
use ferroce::{Nanos, RKey};

use super::conversation::{Conversation, Event};
use super::packet::Seen;

/// One work request of an end, from its first transmission.
#[derive(Clone, Debug)]
pub(super) struct Message {
    /// First and last PSN, including the responses of a READ.
    pub(super) first: i64,
    pub(super) last: i64,
    /// The latest time of its post: that of its first recorded packet, or of one of a later message.
    pub(super) at: Nanos,
    /// Its request packets in order; `None` for those that were not recorded.
    pub(super) packets: Vec<Option<Rc<Seen>>>,
    /// Frame of the first recorded packet.
    pub(super) frame: u64,
}

/// The messages of one end.
#[derive(Clone, Debug, Default)]
pub(super) struct Messages {
    pub(super) list: Vec<Message>,
    /// The first PSN and frame from which on nothing is certain: a message did not end, or its length is unknown.
    pub(super) cut: Option<(i64, u64)>,
    /// Packets before the first complete message, and the PSNs at which messages end among them.
    pub(super) orphans: usize,
    orphan_ends: Vec<i64>,
}

impl Message {
    /// A datagram.
    pub(super) fn datagram(event: &Event) -> Message {
        let Event { psn, packet, .. } = event;
        let packets = vec![Some(Rc::clone(packet))];
        Message { first: *psn, last: *psn, at: packet.at, packets, frame: packet.frame }
    }

    fn head(&self) -> Option<&Rc<Seen>> {
        self.packets.first()?.as_ref()
    }

    pub(super) fn operation(&self) -> Option<Operation> {
        Some(self.packets.iter().flatten().next()?.opcode.operation())
    }

    /// The last request packet.
    pub(super) fn tail(&self) -> Option<&Rc<Seen>> {
        self.packets.last()?.as_ref()
    }

    /// Whether it consumes a receive WR of the other end.
    pub(super) fn takes_receive(&self) -> bool {
        let immediate = self.tail().is_some_and(|packet| packet.immediate().is_some());
        self.operation() == Some(Operation::Send) || immediate
    }

    /// Remote address, key and length.
    pub(super) fn remote(&self) -> Option<(u64, RKey, u64)> {
        let head = self.head()?;
        let by_reth = head.extensions.reth.map(|reth| (reth.va(), reth.rkey(), u64::from(reth.length())));
        by_reth.or_else(|| head.extensions.atomic_eth.map(|atomic| (atomic.va(), atomic.rkey(), 8)))
    }

    /// Its payload, and whether every packet of it was recorded.
    pub(super) fn payload(&self, path_mtu: usize) -> (Vec<u8>, bool) {
        let mut bytes = Vec::new();
        let mut whole = true;
        let last = self.packets.len().saturating_sub(1);
        for (place, packet) in self.packets.iter().enumerate() {
            match packet {
                Some(packet) => bytes.extend_from_slice(&packet.payload),
                None => {
                    whole = false;
                    bytes.resize(bytes.len() + self.len_of(None, place == last, path_mtu), 0);
                }
            }
        }
        (bytes, whole)
    }

    /// The length of its payload.
    pub(super) fn payload_len(&self, path_mtu: usize) -> usize {
        let last = self.packets.len().saturating_sub(1);
        let places = self.packets.iter().enumerate();
        places.map(|(place, packet)| self.len_of(packet.as_deref(), place == last, path_mtu)).sum()
    }

    /// The payload length of one packet; for an unrecorded one, the inferred length.
    fn len_of(&self, packet: Option<&Seen>, is_last: bool, path_mtu: usize) -> usize {
        let rest = self.remote().map_or(0, |(_, _, len)| len as usize % path_mtu);
        match packet {
            Some(packet) => packet.payload_len(),
            None if is_last && rest > 0 => rest,
            None => path_mtu,
        }
    }

    /// An upper bound of its payload length.
    pub(super) fn payload_bound(&self, path_mtu: usize) -> u64 {
        let seen = self.packets.iter().flatten().map(|packet| packet.payload_len()).max().unwrap_or(0);
        self.packets.len() as u64 * seen.max(if self.packets.len() > 1 { path_mtu } else { 0 }) as u64
    }

    /// Whether all its packets were recorded.
    pub(super) fn is_whole(&self) -> bool {
        self.packets.iter().all(Option::is_some)
    }

    /// The least length of a receive WR for it.
    pub(super) fn receive_len(&self, path_mtu: usize) -> usize {
        if self.operation() == Some(Operation::Send) { self.payload_len(path_mtu) } else { 0 }
    }
}

impl Messages {
    /// The messages that the engine can send in place of an end: its PSNs have no gaps.
    pub(super) fn posted(conversation: &Conversation, end: usize) -> Messages {
        let mut messages = conversation.messages[end].clone();
        let hole = messages.list.windows(2).position(|pair| pair[1].first != pair[0].last + 1);
        if let Some(at) = hole.filter(|_| conversation.service == Service::Uc) {
            messages.cut = Some((messages.list[at].last + 1, messages.list[at].frame));
            messages.list.truncate(at + 1);
        }
        messages
    }

    /// The messages that an end of a conversation sent among these packets.
    pub(super) fn among(conversation: &Conversation, events: &[Event], end: usize) -> Messages {
        if conversation.service == Service::Ud {
            // In order of arrival: the PSNs of datagrams need not be in order, or even differ.
            let sent = events.iter().filter(|e| e.from == end && !e.copy && e.packet.is_whole_request());
            return Messages { list: sent.map(Message::datagram).collect(), ..Messages::default() };
        }
        let mut firsts: BTreeMap<i64, Rc<Seen>> = BTreeMap::new();
        // PSNs of READ responses other than First and Only: the READ began before them.
        let mut continued = HashSet::new();
        for event in events.iter().filter(|event| event.packet.icrc_is_right) {
            let is_answer = event.from != end && event.packet.opcode.operation() == Operation::ReadResponse;
            if is_answer && !event.packet.starts() {
                continued.insert(event.psn);
            }
            if event.from == end && event.packet.is_request() {
                firsts.entry(event.psn).or_insert_with(|| Rc::clone(&event.packet));
            }
        }
        let mut messages = Messages::default();
        let mut rest = firsts.iter().peekable();
        let mut next = None;
        while let Some((psn, packet)) = rest.next() {
            if next.is_some_and(|next| *psn < next) {
                continue; // a resumed READ
            }
            let is_resumed = packet.opcode.operation() == Operation::ReadRequest
                && continued.contains(psn)
                && next != Some(*psn);
            if let Some(missing) = next.filter(|next| psn > next && conversation.service == Service::Rc) {
                // The requests between were not recorded.
                messages.cut.get_or_insert((missing, packet.frame));
                break;
            }
            if !packet.starts() || is_resumed {
                // The start was not recorded.
                if messages.list.is_empty() {
                    messages.orphans += 1;
                    if packet.ends() && !is_resumed {
                        messages.orphan_ends.push(*psn);
                    }
                } else {
                    messages.cut.get_or_insert((*psn, packet.frame));
                }
                continue;
            }
            if messages.cut.is_some() {
                break;
            }
            let mut packets = vec![Some(Rc::clone(packet))];
            let mut ended = packet.opcode.position() == Position::Only;
            while let Some((at, packet)) = rest.next_if(|(at, packet)| {
                !ended && !packet.starts() && *at - psn - (packets.len() as i64) < MAX_HOLE
            }) {
                packets.resize((at - psn) as usize, None);
                packets.push(Some(Rc::clone(packet)));
                ended = packet.ends();
            }
            // The missing packets may be the end of this message and the start of another one.
            let announced =
                packet.extensions.reth.map(|reth| conversation.path_mtu.packets(reth.length()) as usize);
            let is_sure = packets.iter().all(Option::is_some) || announced == Some(packets.len());
            if !ended || !is_sure {
                messages.cut = Some((*psn, packet.frame));
                break;
            }
            let last = psn + conversation.span(packet).max(packets.len() as i64) - 1;
            next = Some(last + 1);
            messages.list.push(Message { first: *psn, last, at: packet.at, frame: packet.frame, packets });
        }
        // They were posted in order, even if recorded in another one.
        let mut earliest = Nanos::NEVER;
        for message in messages.list.iter_mut().rev() {
            earliest = earliest.min(message.at);
            message.at = earliest;
        }
        messages
    }

    /// The number of their PSNs.
    pub(super) fn psns(&self) -> u64 {
        self.list.iter().map(|message| (message.last - message.first + 1) as u64).sum()
    }

    /// The message that a PSN belongs to.
    pub(super) fn at(&self, psn: i64) -> Option<&Message> {
        let index = self.list.partition_point(|message| message.last < psn);
        self.list.get(index).filter(|message| message.first <= psn)
    }

    /// The number of messages that end at or before a PSN.
    pub(super) fn ended_by(&self, psn: i64) -> usize {
        self.orphan_ends.partition_point(|last| *last <= psn)
            + self.list.partition_point(|message| message.last <= psn)
    }
}

/// The most consecutive packets of a message that may be missing.
const MAX_HOLE: i64 = 4096;
