//! Several queue pairs at once, while the guest's network loses, reorders, duplicates, damages or delays packets: mixed
//! verbs with fences, a shared receive queue, multicast. Whole buffers are compared.

use std::time::Duration;

use ferroce::{PathMtu, QpType};

use crate::ends::{Ends, Memories, Pair};
use crate::guest::Guest;
use crate::verbs::Tally;
use crate::work::{Completion, Part, Queue, Request, Side, Terms, Verb, everything};

/// The netem impairments of the packets that the guest sends and receives.
pub(crate) const IMPAIRMENTS: [(&str, &str); 5] = [
    ("loss", "loss 5%"),
    ("reorder", "delay 2ms reorder 70% 50%"),
    ("duplicate", "duplicate 10%"),
    ("corrupt", "corrupt 5%"),
    ("delay", "delay 40ms 10ms"),
];

/// A program that runs during an impairment.
pub(crate) type Program = fn(&mut Ends, &Guest, Side, &str) -> Result<(), String>;
pub(crate) const PROGRAMS: [(&str, Program); 4] = [
    ("verbs_8", |ends, _, asker, how| mixed(ends, asker, 8, how)),
    ("verbs_64", |ends, _, asker, how| mixed(ends, asker, 64, how)),
    ("srq", |ends, _, asker, _| shared_receives(ends, asker)),
    ("multicast", |ends, guest, asker, _| multicast(ends, guest, asker)),
];

/// Runs all of them; returns the number of exchanges.
pub(crate) fn run(guest: &Guest) -> u32 {
    guest.inside(|| {
        let mut tally = Tally::default();
        for (how, netem) in IMPAIRMENTS {
            for (device, programs) in [("af_xdp:fe0", &PROGRAMS[..]), ("udp:10.77.0.1", &PROGRAMS[..1])] {
                let mut ends = Ends::open(guest, device, false);
                guest.impair(netem);
                for (name, program) in programs {
                    for asker in Side::BOTH {
                        let outcome = program(&mut ends, guest, asker, how).map(|()| String::new());
                        tally.single(&format!("{name}, {netem} each way"), device, asker, outcome);
                    }
                }
                guest.impair_nothing();
            }
        }
        tally.end()
    })
}

/// An ACK timeout of 67 ms, so that lost packets are soon retransmitted.
fn terms(service: QpType, path_mtu: PathMtu) -> Terms {
    Terms { timeout: 14, ..Terms::new(service, path_mtu) }
}

/// Bytes of a message, and the distance between the parts of two queue pairs in the memory.
const SIZE: u32 = 1500;
const STRIDE: u64 = 8192;
/// In each part: the operands and results of atomics; data to be read; data that was read and is written back; data to
/// be sent; data that is written.
const WORD: u64 = 8;
const READ: u64 = 64;
const BACK: u64 = 2048;
const SENT: u64 = 4096;
const WRITTEN: u64 = 6144;
/// Words have the byte that no pattern contains.
const UNTOUCHED: u64 = 0xfefe_fefe_fefe_fefe;
const SWAPPED: u64 = 77;

/// On each queue pair, posted at once: a READ, a fenced WRITE of its result, FETCH_ADD, CMP_SWAP of the new value, a
/// fenced SEND, a WRITE.
fn mixed(ends: &mut Ends, asker: Side, count: u64, how: &str) -> Result<(), String> {
    // rxe of kernel 6.1 never continues with a fenced request after a READ was retransmitted.
    let fence = asker == Side::Ferroce || how == "duplicate";
    // The packets that 64 queue pairs send at once keep an emulated guest busy for longer than 67 ms.
    let many = count > 8;
    let path_mtu = if many { PathMtu::Mtu256 } else { PathMtu::Mtu1024 };
    let terms = Terms { timeout: if many { 16 } else { 14 }, ..terms(QpType::Rc, path_mtu) };
    let other = asker.other();
    let memories = ends.memories(STRIDE * count, [everything(); 2]);
    let at = |number: u64, place: u64, seed: u64| Part {
        offset: number * STRIDE + place,
        length: SIZE,
        seed: Some((number * 3 + seed) as u8),
    };
    let all = |f: &dyn Fn(u64) -> Vec<Part>| (0..count).flat_map(f).collect::<Vec<Part>>();
    let words = |number, length| Part { offset: number * STRIDE + WORD, length, seed: None };
    ends.fill(other, &memories, &all(&|n| vec![at(n, READ, 1)]));
    ends.fill(asker, &memories, &all(&|n| vec![at(n, SENT, 2), at(n, WRITTEN, 3)]));
    ends.keep();
    let mut pairs: Vec<Pair> = (0..count).map(|_| ends.connect(&terms)).collect();
    for (number, pair) in pairs.iter_mut().enumerate() {
        ends.receive(other, pair, &memories, &[(number as u64 * STRIDE + SENT, SIZE)]);
    }
    ends.tell_all();
    ends.keep();
    for (number, pair) in pairs.iter_mut().enumerate() {
        let start = number as u64 * STRIDE;
        let part = |here, there: u64| Request {
            offset: start + here,
            length: SIZE,
            remote_offset: (start + there) as i64,
            imm: number as u32,
            ..Request::EMPTY
        };
        let word = Request { length: 8, compare: 5, ..part(WORD, WORD) };
        let changed = UNTOUCHED + 5;
        let swap = Request { compare: changed, swap: SWAPPED, ..word };
        // Without a fence it is unknown when the READ's result arrives.
        let source = if fence { READ } else { SENT };
        for (verb, request) in [
            (Verb::Read, part(READ, READ)),
            (Verb::Write, Request { fence, ..part(source, BACK) }),
            (Verb::FetchAdd, word),
            (Verb::CompareSwap, Request { offset: start + WORD + 8, ..swap }),
            (Verb::SendImm, Request { fence, ..part(SENT, 0) }),
            (Verb::Write, part(WRITTEN, WRITTEN)),
        ] {
            ends.post(asker, pair, &memories, verb, &[request]);
        }
    }
    ends.tell_all();
    let sent = completions(ends, asker, &pairs, Queue::Send, 6)?;
    let mut numbers: Vec<u64> = sent.iter().map(|wc| wc.wr_id).collect();
    numbers.sort_unstable();
    if !numbers.into_iter().eq((0..6).flat_map(|wr_id| vec![wr_id; count as usize])) {
        return Err(format!("sends complete as {sent:?}"));
    }
    let received = completions(ends, other, &pairs, Queue::Receive, 1)?;
    let mut immediates: Vec<Option<u32>> = received.iter().map(|wc| wc.imm).collect();
    immediates.sort_unstable();
    if !immediates.into_iter().eq((0..count as u32).map(Some)) {
        return Err(format!("receives complete as {received:?}"));
    }
    let back = if fence { 1 } else { 2 };
    let here = all(&|n| vec![words(n, 16), at(n, READ, 1), at(n, SENT, 2), at(n, WRITTEN, 3)]);
    let there =
        all(&|n| vec![words(n, 8), at(n, READ, 1), at(n, BACK, back), at(n, SENT, 2), at(n, WRITTEN, 3)]);
    ends.check(asker, &memories, &here, Duration::ZERO)?;
    ends.check(other, &memories, &there, Duration::ZERO)?;
    check_words(ends, other, &memories, count, &[SWAPPED])?;
    if asker == Side::Ferroce {
        // rxe of kernel 6.1 may complete a retransmitted atomic without its original value.
        check_words(ends, asker, &memories, count, &[UNTOUCHED, UNTOUCHED + 5])?;
    }
    ends.keep();
    pairs.into_iter().for_each(|pair| ends.close(pair));
    ends.tell_all();
    ends.release_memories(&memories);
    Ok(())
}

/// Checks the words in each queue pair's part.
fn check_words(
    ends: &mut Ends,
    side: Side,
    memories: &Memories,
    count: u64,
    expected: &[u64],
) -> Result<(), String> {
    let bytes = ends.peek(side, memories);
    for number in 0..count {
        let start = (number * STRIDE + WORD) as usize;
        let found: Vec<u64> = bytes[start..start + 8 * expected.len()]
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")))
            .collect();
        if found != expected {
            return Err(format!("words of queue pair {number} at {}: {found:x?}", side.name()));
        }
    }
    Ok(())
}

/// The completions of all pairs, `each` per pair, all successful. Those of the engine are in one queue.
fn completions(
    ends: &mut Ends,
    side: Side,
    pairs: &[Pair],
    queue: Queue,
    each: usize,
) -> Result<Vec<Completion>, String> {
    let expected = each * pairs.len();
    let found = match side {
        Side::Ferroce => ends.poll(side, &pairs[0], queue, expected),
        Side::Rxe => pairs.iter().flat_map(|pair| ends.poll(side, pair, queue, each)).collect(),
    };
    if found.len() < expected || found.iter().any(|wc| wc.status != 0) {
        let first = found.iter().find(|wc| wc.status != 0);
        return Err(format!(
            "{} of {expected} completions at {}, in error {first:?}",
            found.len(),
            side.name()
        ));
    }
    Ok(found)
}

/// The space for a received message.
const ROOM: u64 = 2048;

/// Four queue pairs SEND four messages each, to receive WRs of one SRQ.
fn shared_receives(ends: &mut Ends, asker: Side) -> Result<(), String> {
    const PAIRS: u64 = 4;
    const EACH: u64 = 4;
    let other = asker.other();
    let memories = ends.memories(ROOM * PAIRS * EACH, [everything(); 2]);
    let sources: Vec<Part> = (0..PAIRS * EACH).map(|n| piece(n, SIZE, n)).collect();
    ends.fill(asker, &memories, &sources);
    ends.fill(other, &memories, &[]);
    ends.share_receives();
    let mut pairs: Vec<Pair> =
        (0..PAIRS).map(|_| ends.connect(&terms(QpType::Rc, PathMtu::Mtu1024))).collect();
    let receives: Vec<(u64, u32)> = (0..PAIRS * EACH).map(|n| (n * ROOM, ROOM as u32)).collect();
    ends.receive(other, &mut pairs[0], &memories, &receives);
    for (pair, sources) in pairs.iter_mut().zip(sources.chunks(EACH as usize)) {
        ends.post(asker, pair, &memories, Verb::SendImm, &requests(sources));
    }
    completions(ends, asker, &pairs, Queue::Send, EACH as usize)?;
    let received = completions(ends, other, &pairs, Queue::Receive, EACH as usize)?;
    let arrived = placed(&received, SIZE, 0);
    let mut seeds: Vec<Option<u8>> = arrived.iter().map(|part| part.seed).collect();
    seeds.sort_unstable();
    let expected = sources.iter().map(|part| part.seed);
    let complete = seeds.into_iter().eq(expected);
    let outcome = ends.check(other, &memories, &arrived, Duration::ZERO);
    pairs.into_iter().for_each(|pair| ends.close(pair));
    ends.own_receives();
    ends.release_memories(&memories);
    if complete { outcome } else { Err(format!("received {received:?}")) }
}

/// Datagrams to a multicast group that a queue pair of the other end has joined: some may be lost or duplicated; those
/// that arrive are complete.
fn multicast(ends: &mut Ends, guest: &Guest, asker: Side) -> Result<(), String> {
    const COUNT: u64 = 40;
    const LENGTH: u32 = 700;
    const HEADER: u32 = 40;
    let other = asker.other();
    let memories = ends.memories(2 * COUNT * ROOM, [everything(); 2]);
    let sources: Vec<Part> = (0..COUNT).map(|n| piece(n, LENGTH, n)).collect();
    ends.fill(asker, &memories, &sources);
    ends.fill(other, &memories, &[]);
    let mut pair = ends.connect(&terms(QpType::Ud, PathMtu::Mtu1024));
    let receives: Vec<(u64, u32)> = (0..2 * COUNT).map(|n| (n * ROOM, ROOM as u32)).collect();
    ends.receive(other, &mut pair, &memories, &receives);
    ends.join(guest, other, &mut pair);
    ends.post(asker, &mut pair, &memories, Verb::SendImm, &requests(&sources));
    let received = ends.poll_for(other, &pair, Queue::Receive, 2 * COUNT as usize, Duration::from_secs(1));
    let sent = ends.poll(asker, &pair, Queue::Send, COUNT as usize);
    let headers = received.iter().map(|wc| Part { offset: wc.wr_id * ROOM, length: HEADER, seed: None });
    let arrived: Vec<Part> = placed(&received, LENGTH, HEADER).into_iter().chain(headers).collect();
    let outcome = ends.check(other, &memories, &arrived, Duration::ZERO);
    ends.leave(other, &pair);
    ends.close(pair);
    ends.release_memories(&memories);
    let is_right = |wc: &Completion| wc.status == 0 && wc.length == u64::from(LENGTH + HEADER);
    if sent.len() != COUNT as usize || received.len() < COUNT as usize / 2 || !received.iter().all(is_right) {
        return Err(format!("{} of {COUNT} sent, received {received:?}", sent.len()));
    }
    outcome
}

fn piece(number: u64, length: u32, seed: u64) -> Part {
    Part { offset: number * ROOM, length, seed: Some(seed as u8 + 1) }
}

fn requests(sources: &[Part]) -> Vec<Request> {
    let request = |part: &Part| Request {
        offset: part.offset,
        length: part.length,
        imm: part.seed.map_or(0, u32::from),
        ..Request::EMPTY
    };
    sources.iter().map(request).collect()
}

/// The places of received messages: the receive WR's id determines the place, the immediate data the pattern.
fn placed(received: &[Completion], length: u32, header: u32) -> Vec<Part> {
    let part = |wc: &Completion| Part {
        offset: wc.wr_id * ROOM + u64::from(header),
        length,
        seed: wc.imm.map(|imm| imm as u8),
    };
    received.iter().map(part).collect()
}
