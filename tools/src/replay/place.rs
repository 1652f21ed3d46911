//! The assignment of engines to recorded ends, and the limits: no capture may exhaust the machine.
//!
//! An engine has up to 1,024 queue pairs, a replay up to 64 engines. Queue pairs that were connected again need one
//! engine per connection.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ferroce::{Gid, PkeyTable, Qpn};

use super::conversation::Conversation;
use super::memory::{Area, areas};
use super::message::Messages;

/// One end of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Its index.
    pub(super) conversation: usize,
    pub(super) end: usize,
}

/// The engines with their ends, and the ends that are not played.
#[derive(Default)]
pub(super) struct Cast {
    pub(super) plays: Vec<Play>,
    /// With the reason.
    pub(super) left_out: Vec<(Place, String)>,
    /// Ends of addresses that were not selected.
    pub(super) unwanted: usize,
}

/// The work of one engine.
pub(super) struct Play {
    pub(super) role: IpAddr,
    pub(super) places: Vec<Place>,
    /// The areas of its memory that the other ends access.
    pub(super) areas: Vec<Area>,
    conversations: HashSet<usize>,
    peers: HashSet<(Gid, Qpn)>,
    pkeys: HashSet<u16>,
    bytes: u64,
    packets: u64,
}

/// The most engines of a replay: queue pairs that were connected again need one for each connection.
const PLAYS: usize = 64;
/// The most queue pairs and partitions of one engine, and the most unrecorded bytes and packets.
const QUEUE_PAIRS: usize = 1024;
const PARTITIONS: usize = PkeyTable::MAX - 1;
const BYTES: u64 = 64 << 20;
const PACKETS: u64 = 1 << 17;
/// The most areas of memory that the other ends access, and their bytes.
const AREAS: usize = 1 << 15;
const AREA_BYTES: u64 = 1 << 30;

/// Assigns the ends: those of one address to one engine, if their peers differ.
pub(super) fn plays(conversations: &[Conversation], roles: &[IpAddr]) -> Cast {
    let Cast { mut plays, mut left_out, mut unwanted } = Cast::default();
    // The engine of the last connection between an address and a peer; the next connection needs a later one.
    let mut latest: HashMap<(IpAddr, Gid, Qpn), usize> = HashMap::new();
    let mut by_role: HashMap<IpAddr, Vec<usize>> = HashMap::new();
    for (index, conversation) in conversations.iter().enumerate().filter(|(_, c)| !c.is_guessed) {
        for end in [0, 1] {
            let role = conversation.ends[end].gid.to_ip();
            let place = Place { conversation: index, end };
            if !(roles.is_empty() || roles.contains(&role)) {
                unwanted += 1;
                continue;
            }
            if let Some(reason) = unplayable(conversation) {
                left_out.push((place, reason.to_owned()));
                continue;
            }
            let other = conversation.ends[1 - end];
            let peer = other.qpn.map(|qpn| (other.gid, qpn));
            let of_role = by_role.entry(role).or_default();
            // A host that talks to itself needs two engines, and so does a queue pair that was connected again.
            let from = peer.and_then(|(gid, qpn)| latest.get(&(role, gid, qpn))).map_or(0, |last| last + 1);
            let mut candidates = (from..of_role.len()).filter(|number| {
                let play = &plays[of_role[*number]];
                !play.conversations.contains(&index) && peer.is_none_or(|peer| !play.peers.contains(&peer))
            });
            let number = match candidates.next() {
                Some(number) => number,
                None if plays.len() < PLAYS => {
                    plays.push(Play::new(role));
                    of_role.push(plays.len() - 1);
                    of_role.len() - 1
                }
                None => {
                    let reason = format!(
                        "there are {PLAYS} engines already, one for each time that queue pairs were connected; --role takes a part"
                    );
                    left_out.push((place, reason));
                    continue;
                }
            };
            if let Some((gid, qpn)) = peer {
                latest.insert((role, gid, qpn), number);
            }
            if let Err(reason) = plays[of_role[number]].admit(place, conversation, peer) {
                left_out.push((place, reason));
            }
        }
    }
    plays.iter_mut().for_each(|play| play.survey(conversations, &mut left_out));
    Cast { plays, left_out, unwanted }
}

/// The reason that no end of a conversation can be played.
fn unplayable(conversation: &Conversation) -> Option<&'static str> {
    if conversation.ends.iter().any(|end| end.gid.is_multicast()) {
        return Some("a multicast group has no engine in its place, and none is asked to talk to one");
    }
    if !conversation.knows_path_mtu() {
        return Some("the packets do not tell the path MTU; --mtu does");
    }
    let has_none = conversation.messages.iter().all(|messages| messages.list.is_empty());
    has_none.then_some("none of its messages was recorded whole")
}

impl Play {
    fn new(role: IpAddr) -> Play {
        Play {
            role,
            places: Vec::new(),
            areas: Vec::new(),
            pkeys: HashSet::new(),
            conversations: HashSet::new(),
            peers: HashSet::new(),
            bytes: 0,
            packets: 0,
        }
    }

    /// Adds an end of a conversation, or returns the reason that it is not played.
    fn admit(
        &mut self,
        place: Place,
        conversation: &Conversation,
        peer: Option<(Gid, Qpn)>,
    ) -> Result<(), String> {
        self.conversations.insert(place.conversation);
        self.peers.extend(peer);
        (self.bytes, self.packets) = self.room(conversation)?;
        self.pkeys.insert(conversation.pkey.0);
        self.places.push(place);
        Ok(())
    }

    /// Finds the memory that the other ends access; if it is too much, the engine plays no end.
    fn survey(&mut self, conversations: &[Conversation], left_out: &mut Vec<(Place, String)>) {
        self.areas = areas(conversations, &self.places);
        let bytes = self.areas.iter().map(Area::len).fold(0, u64::saturating_add);
        if self.areas.len() > AREAS || bytes > AREA_BYTES {
            let reason = format!(
                "the packets reach {bytes} bytes of memory in {} places: {AREA_BYTES} and {AREAS} are for one engine",
                self.areas.len()
            );
            left_out.extend(self.places.drain(..).map(|place| (place, reason.clone())));
        }
    }

    /// The bytes and packets with one more conversation, if they are within the limits.
    fn room(&self, conversation: &Conversation) -> Result<(u64, u64), String> {
        let mtu = conversation.path_mtu.bytes() as usize;
        let messages = conversation.messages.iter().flat_map(|messages| &messages.list);
        let bytes = messages
            .map(|message| message.payload_bound(mtu) + message.remote().map_or(0, |(_, _, len)| len));
        let told: usize = conversation.events.iter().map(|event| event.packet.payload_len()).sum();
        // Recorded payload, which is held on either side, does not count.
        let bytes = bytes.fold(0, u64::saturating_add).saturating_sub(2 * told as u64);
        let bytes = bytes.saturating_add(self.bytes);
        let asked: u64 = conversation.messages.iter().map(Messages::psns).sum();
        let packets = self.packets + asked.saturating_sub(conversation.events.len() as u64);
        let queue_pairs = self.places.len() + 1;
        if bytes > BYTES || packets > PACKETS || queue_pairs > QUEUE_PAIRS {
            return Err(format!(
                "it would take {bytes} bytes in {packets} packets that were not recorded, and {queue_pairs} queue pairs: {BYTES}, {PACKETS} and {QUEUE_PAIRS} are for one engine; --role takes a part"
            ));
        }
        if self.pkeys.len() == PARTITIONS && !self.pkeys.contains(&conversation.pkey.0) {
            return Err(format!("one engine has {PARTITIONS} partitions at most; --role takes a part"));
        }
        Ok((bytes, packets))
    }
}
