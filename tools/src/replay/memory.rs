//! The memory of the end that the engine replaces, as the packets of the other end have accessed it.

use std::collections::{BTreeMap, BTreeSet};

use ferroce::wire::Operation;
use ferroce::{Access, Context, Memory, Mr, Pd, RKey};

use super::conversation::Conversation;
use super::lane::{Lane, Standing};
use super::message::Message;
use super::place::Place;
use super::rule::{Finding, Rule, Weight};
use crate::failure::{Failure, OrFail};

/// The regions that the other ends access, each at its recorded address and with a key of the engine.
pub(super) struct Exposed {
    /// Sorted by recorded keys and addresses.
    regions: Vec<Region>,
}

/// A range of addresses with one recorded key.
struct Region {
    rkey: RKey,
    start: u64,
    len: u64,
    mr: Mr,
    own: RKey,
}

/// Addresses with a recorded key that were accessed successfully.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    rkey: RKey,
    start: u64,
    end: u64,
    access: Access,
}

/// The result of comparing memory.
pub(super) enum Found {
    /// The number of bytes that are as sent.
    Right(u64),
    /// The frame of the message, and the difference.
    Wrong(u64, String),
}

/// The accesses with a key, before it is registered.
#[derive(Default)]
struct WantedAccess {
    /// Address ranges with the successful accesses.
    ranges: Vec<(u64, u64, Access)>,
    invalidated: bool,
}

/// Addresses closer than this are one area.
const NEAR: u64 = 256;
/// Content of memory that nothing was written to.
const BLANK: u8 = 0xdd;

/// The areas that the other ends accessed successfully, sorted by keys and addresses.
pub(super) fn areas(conversations: &[Conversation], places: &[Place]) -> Vec<Area> {
    let mut wanted: BTreeMap<u32, WantedAccess> = BTreeMap::new();
    // A key with refused requests may have been refused again after the end of the capture.
    let mut refused: BTreeSet<u32> = BTreeSet::new();
    for Place { conversation, end } in places {
        let of = &conversations[*conversation];
        let keys =
            of.messages[1 - end].list.iter().filter(|m| was_refused(of, *end, m)).filter_map(Message::remote);
        refused.extend(keys.map(|(_, rkey, _)| rkey.value()));
    }
    for Place { conversation, end } in places {
        let of = &conversations[*conversation];
        for message in &of.messages[1 - end].list {
            let is_refused = message.remote().is_some_and(|(_, rkey, _)| refused.contains(&rkey.value()));
            if was_refused(of, *end, message) || (is_refused && !was_answered(of, *end, message)) {
                continue;
            }
            if let Some(key) = message.tail().and_then(|packet| packet.invalidates()) {
                wanted.entry(key.value()).or_default().invalidated = true;
            }
            if let Some((addr, rkey, len @ 1..)) = message.remote() {
                let access = match message.operation() {
                    Some(Operation::Write | Operation::AtomicWrite) => Access::REMOTE_WRITE,
                    Some(Operation::ReadRequest) => Access::REMOTE_READ,
                    Some(Operation::Flush) => Access::FLUSH_GLOBAL,
                    _ => Access::REMOTE_ATOMIC,
                };
                // An address overflow can't be registered.
                let Some(end) = addr.checked_add(len) else { continue };
                wanted.entry(rkey.value()).or_default().ranges.push((addr, end, access));
            }
        }
    }
    let mut areas = Vec::new();
    for (rkey, WantedAccess { mut ranges, invalidated }) in wanted {
        if ranges.is_empty() {
            ranges.push((0, 8, Access::NONE));
        }
        ranges.sort_by_key(|(start, ..)| *start);
        let kept = if invalidated { Access::REMOTE_INVALIDATE } else { Access::NONE };
        let kept = kept | Access::LOCAL_WRITE;
        let mut last: Option<Area> = None;
        for (start, end, access) in ranges {
            match &mut last {
                Some(last) if start <= last.end.saturating_add(NEAR) => {
                    last.end = last.end.max(end);
                    last.access = last.access | access;
                }
                _ => areas.extend(last.replace(Area {
                    rkey: RKey::new(rkey),
                    start,
                    end,
                    access: access | kept,
                })),
            }
        }
        areas.extend(last);
    }
    areas
}

impl Area {
    pub(super) fn len(&self) -> u64 {
        self.end - self.start
    }
}

impl Exposed {
    /// Registers the areas that the other ends access.
    pub(super) fn new(context: &mut Context, pd: Pd, areas: &[Area]) -> Result<Exposed, Failure> {
        let mut exposed = Exposed { regions: Vec::new() };
        for area in areas {
            exposed.register(context, pd, area)?;
        }
        Ok(exposed)
    }

    fn register(&mut self, context: &mut Context, pd: Pd, area: &Area) -> Result<(), Failure> {
        let (Area { rkey, start, access, .. }, len) = (*area, area.len());
        let mut memory = Memory::zeroed(len as usize).or_fail(|| format!("{len} bytes of memory"))?;
        memory.bytes_mut()?.fill(BLANK);
        let registered = context.register_at(pd, memory, access, start);
        let mr = registered.map_err(|error| Failure::run(error.to_string()))?;
        let own = context.remote(mr)?.rkey;
        self.regions.push(Region { rkey, start, len, mr, own });
        Ok(())
    }

    /// The engine's key for a recorded one at an address; the recorded key if there is none.
    pub(super) fn translate(&self, rkey: RKey, va: u64) -> RKey {
        self.at(rkey, va).map_or(rkey, |region| region.own)
    }

    /// The engine's key for a recorded one, regardless of the address.
    pub(super) fn translate_any(&self, rkey: RKey) -> RKey {
        let first = self.regions.partition_point(|region| region.rkey.value() < rkey.value());
        self.regions.get(first).filter(|region| region.rkey == rkey).map_or(rkey, |region| region.own)
    }

    fn at(&self, rkey: RKey, va: u64) -> Option<&Region> {
        let behind = self.regions.partition_point(|r| (r.rkey.value(), r.start) <= (rkey.value(), va));
        let region = self.regions.get(behind.checked_sub(1)?)?;
        (region.rkey == rkey && va - region.start < region.len).then_some(region)
    }

    /// Restores the memory of the recorded end at the time of a READ or atomic, which its response shows.
    pub(super) fn prepare(
        &self,
        context: &mut Context,
        lane: &mut Lane<'_>,
        index: usize,
    ) -> Result<(), Failure> {
        let (of, standing) = (lane.of, lane.standing(&lane.of.events[index]));
        if standing == Standing::Ahead {
            return Ok(()); // the engine drops it, and the retransmission must find the memory unchanged
        }
        let request = &of.events[index];
        let packet = &request.packet;
        let end = 1 - request.from;
        if let Some(atomic) = packet.extensions.atomic_eth {
            // All responses to it are equal, and the one to this packet may be missing.
            let original = of.answers[end].original(request.psn);
            if let Some(original) = original.filter(|_| standing != Standing::Done) {
                let before = self.put(context, atomic.rkey(), atomic.va(), &original.to_ne_bytes())?;
                let blank = u64::from_ne_bytes([BLANK; 8]);
                if let Some(before) =
                    before.filter(|before| standing == Standing::Due && ![original, blank].contains(before))
                {
                    let text = format!(
                        "an atomic found {original:#x} where the packets before left {before:#x}: \
                         somebody else wrote there, or one was carried out twice"
                    );
                    let weight = Weight::Lawful;
                    lane.played.findings.push(Finding {
                        rule: Rule::LocalChange,
                        weight,
                        frame: packet.frame,
                        text,
                    });
                }
            }
        } else if let (Operation::ReadRequest, Some(reth)) =
            (packet.opcode.operation(), packet.extensions.reth)
        {
            lane.note_put(reth);
            let mtu = u64::from(of.path_mtu.bytes());
            for (psn, answers) in of.answers[end].reads(request.psn..request.psn + of.span(packet)) {
                // The response to this request comes after it; if it never came, there may be an earlier one.
                let behind = answers.partition_point(|(_, answer)| *answer < index);
                let Some((_, answer)) = answers.get(behind).or(answers.last()) else { continue };
                let va = reth.va().wrapping_add((psn - request.psn) as u64 * mtu);
                self.put(context, reth.rkey(), va, &of.events[*answer].packet.payload)?;
            }
        }
        Ok(())
    }

    /// Writes to a region and returns its previous first 8 bytes.
    fn put(&self, context: &mut Context, rkey: RKey, va: u64, bytes: &[u8]) -> Result<Option<u64>, Failure> {
        let Some(region) = self.at(rkey, va) else { return Ok(None) };
        let at = (va - region.start) as usize;
        let Some(room) = context.bytes_mut(region.mr)?.get_mut(at..at + bytes.len()) else { return Ok(None) };
        let before = room.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
        room.copy_from_slice(bytes);
        Ok(before)
    }

    /// Compares WRITEs that the engine has acknowledged (frame, key, address and payload) with memory.
    pub(super) fn check(
        &self,
        context: &Context,
        written: Vec<(u64, RKey, u64, Vec<u8>)>,
    ) -> Result<Vec<Found>, Failure> {
        let mut found = Vec::new();
        for (number, (frame, rkey, va, payload)) in written.iter().enumerate() {
            let overwritten = written[number + 1..].iter().any(|(_, key, later, bytes)| {
                key == rkey && *later < va + payload.len() as u64 && *va < later + bytes.len() as u64
            });
            let Some(region) = self.at(*rkey, *va).filter(|_| !overwritten) else { continue };
            let at = (va - region.start) as usize;
            let memory = context.bytes(region.mr)?.get(at..at + payload.len());
            found.push(
                match memory.and_then(|memory| memory.iter().zip(payload).position(|(a, b)| a != b)) {
                    None => Found::Right(payload.len() as u64),
                    Some(at) => Found::Wrong(
                        *frame,
                        format!("byte {at} of a WRITE of {} is not in memory", payload.len()),
                    ),
                },
            );
        }
        Ok(found)
    }
}

/// Whether the recorded end is known to have executed a message.
fn was_answered(of: &Conversation, end: usize, message: &Message) -> bool {
    of.answers[end].newest.is_some_and(|answered| answered >= message.last)
}

/// Whether the recorded end refused a message.
fn was_refused(of: &Conversation, end: usize, message: &Message) -> bool {
    of.answers[end].refused(message.first, message.last).is_some()
}
